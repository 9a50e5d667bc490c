from typing import Any

import torch

from habana_frameworks.torch import calls


class FusedSGD(torch.optim.SGD):
    def __init__(self, params: Any, lr: float, momentum: float = 0.0) -> None:
        super().__init__(params, lr=lr, momentum=momentum)

    def step(self, closure: Any = None) -> None:
        calls.append("FusedSGD.step")
        super().step(closure)


class FusedAdamW(torch.optim.AdamW):
    def __init__(
        self, params: Any, lr: float = 1e-3, betas: tuple[float, float] = (0.9, 0.999)
    ) -> None:
        super().__init__(params, lr=lr, betas=betas)

    def step(self, closure: Any = None) -> None:
        calls.append("FusedAdamW.step")
        super().step(closure)
