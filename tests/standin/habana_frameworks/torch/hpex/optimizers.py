"""As the vendor's: no kinds of PyTorch's own, other defaults, AdamW's count kept per group."""

from typing import Any

import torch

from habana_frameworks.torch import calls


class FusedSGD(torch.optim.Optimizer):
    def __init__(
        self, params: Any, lr: float, momentum: float = 0.0, weight_decay: float = 0.0
    ) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        calls.append("FusedSGD.step")
        for group in self.param_groups:
            for p in group["params"]:
                change = p.grad + group["weight_decay"] * p
                if group["momentum"]:
                    change = self.state[p]["momentum_buffer"].mul_(group["momentum"]).add_(change)
                p.sub_(group["lr"] * change)


class FusedAdamW(torch.optim.Optimizer):
    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.0,
        bias_correction: bool = True,
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, {**defaults, "bias_correction": bias_correction})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        calls.append("FusedAdamW.step")
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            for p in group["params"]:
                self._step_one(p, group)

    def _step_one(self, p: torch.Tensor, group: dict[str, Any]) -> None:
        assert p.grad is not None
        state, count = self.state[p], group["step"]
        first, second = group["betas"]
        mean = state["exp_avg"].mul_(first).add_((1 - first) * p.grad)
        square = state["exp_avg_sq"].mul_(second).add_((1 - second) * p.grad**2)
        rate = group["lr"]
        if group["bias_correction"]:
            rate *= (1 - second**count) ** 0.5 / (1 - first**count)
        p.mul_(1 - group["lr"] * group["weight_decay"])
        p.sub_(rate * mean / (square.sqrt() + group["eps"]))
