"""The interface of backbones: the network up to the 38 x 38 map, and the blocks behind it.

Shapes: B batch; the six maps have 38, 19, 10, 5, 3 and 1 rows and columns.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ssdctl.boxes import FEATURE_SIZES, IMAGE_SIZE
from ssdctl.runtime.plugins import Plugin

EXTRA_WIDTHS = (256, 256, 128, 128, 128)  # channels of 1x1 convolutions


class Backbone(nn.Sequential):
    """A network from normalized (B, 3, 300, 300) images to (B, channels[0], 38, 38).

    It runs its modules in order, unless `forward` is overridden.

    Attributes:
        channels: Channels of the six feature maps.
        stages: Names of its modules by stage, for `--freeze`.
        stem: Names of the modules that `--freeze-stem` stops training.
        extra_widths: Channels of the 1x1 convolutions of the extra blocks.
    """

    channels: tuple[int, ...]
    stages: tuple[tuple[str, ...], ...]
    stem: tuple[str, ...]
    extra_widths: tuple[int, ...] = EXTRA_WIDTHS

    def first_map_norm(self) -> nn.Module:
        """Return the normalization applied to the first feature map before its heads."""
        return nn.Identity()

    def extra_blocks(self, norm: str) -> list[nn.Sequential]:
        """Return five blocks, each from a feature map to the next.

        Args:
            norm: `none` (biased convolutions) or `batch` (batch norm).
        """
        return [self.extra_block(number, norm) for number in range(5)]

    def extra_block(self, number: int, norm: str) -> nn.Sequential:
        """Return a 1x1 and a 3x3 convolution with ReLUs.

        The first three blocks halve the rows and columns, the others take two off.
        """
        in_channels, out_channels = self.channels[number : number + 2]
        width, has_norm = self.extra_widths[number], norm == "batch"
        stride, padding = (2, 1) if number < 3 else (1, 0)
        layers: list[nn.Module] = []
        for convolution in (
            nn.Conv2d(in_channels, width, 1, bias=not has_norm),
            nn.Conv2d(width, out_channels, 3, stride, padding, bias=not has_norm),
        ):
            layers.append(convolution)
            if has_norm:
                layers.append(nn.BatchNorm2d(convolution.out_channels))
            layers.append(nn.ReLU(inplace=True))
        return nn.Sequential(*layers)

    def pretrained_parts(
        self, state: Mapping[str, Tensor], extra: nn.ModuleList
    ) -> list[tuple[nn.Module, dict[str, Tensor]]]:
        """Return the modules that pretrained weights are for, each with its state dict.

        Args:
            state: A state dict of ImageNet's classifier.
            extra: The blocks of `extra_blocks`.
        """
        return [(self, dict(state))]


Parts = tuple[Backbone, nn.Module, list[nn.Sequential]]


def build_parts(build: Callable[[], Backbone], plugin: Plugin | None, norm: str) -> Parts:
    """Return a backbone, its normalization of the first map, and its extra blocks.

    Raises:
        UsageError: It is a plugin that fails, or whose maps have other shapes.
    """
    if plugin is None:
        built = build()
        return built, built.first_map_norm(), built.extra_blocks(norm)
    with plugin.errors("building it"):
        built = build()
        plugin.require(isinstance(built, Backbone), "build() to return a Backbone")
        channels = getattr(built, "channels", ())
        plugin.require(len(channels) == len(FEATURE_SIZES), "channels of six maps")
        for name in (*built.stem, *(name for stage in built.stages for name in stage)):
            built.get_submodule(name)
        parts = built, built.first_map_norm(), built.extra_blocks(norm)
        plugin.require(isinstance(parts[1], nn.Module), "first_map_norm() to return a module")
        _check_maps(plugin, *parts)
    return parts


@torch.no_grad()
def _check_maps(
    plugin: Plugin, built: Backbone, norm: nn.Module, extra: list[nn.Sequential]
) -> None:
    """Compare the shapes of the six maps of an image with what the heads take."""
    modules = (built, norm, *extra)
    parameter = next(built.parameters(), torch.empty(0))
    if parameter.is_meta:  # names and shapes of the parameters are enough
        return
    for module in modules:
        module.eval()
    maps = [built(torch.zeros(1, 3, IMAGE_SIZE, IMAGE_SIZE, dtype=parameter.dtype))]
    for block in extra:
        maps.append(block(maps[-1]))
    maps[0] = norm(maps[0])
    shapes = [tuple(getattr(values, "shape", ())) for values in maps]
    expected = [(1, c, size, size) for c, size in zip(built.channels, FEATURE_SIZES, strict=True)]
    plugin.require(shapes == expected, f"maps of the shapes {expected}, not {shapes}")
    for module in modules:
        module.train()


def check_parameters(
    model: nn.Module, num_classes: int, declared: tuple[int, int], plugin: Plugin
) -> None:
    """Raise UsageError unless PARAMETERS, from which plans estimate sizes, are the network's."""
    total = sum(parameter.numel() for parameter in model.parameters())
    each = sum(p.numel() for p in model.get_submodule("class_heads").parameters()) // num_classes
    right = total - num_classes * each, each
    plugin.require(right == declared, f"PARAMETERS {right}, not {declared}")


@contextlib.contextmanager
def own_random_numbers(seed: int, device: str = "cpu") -> Iterator[None]:
    """Build modules on a device with random numbers that depend only on the seed.

    PyTorch's global generators are neither used nor changed, and other threads are not affected.
    """
    with torch.device(device), _OwnGenerator(seed):
        yield


def without_weights() -> contextlib.AbstractContextManager[None]:
    """Build modules on the meta device: names and shapes, no memory and no random numbers."""
    return own_random_numbers(0, "meta")


_TENSOR_DRAWS = "bernoulli_ cauchy_ exponential_ geometric_ log_normal_ normal_ random_ uniform_"
_TORCH_DRAWS = "bernoulli multinomial normal poisson rand randint randn randperm"
_INIT_DRAWS = "normal_ trunc_normal_ uniform_ kaiming_normal_ kaiming_uniform_ orthogonal_ sparse_"
_DRAWS = {
    getattr(module, name)
    for module, names in (
        (Tensor, _TENSOR_DRAWS),
        (torch, _TORCH_DRAWS),
        (nn.init, f"{_INIT_DRAWS} xavier_normal_ xavier_uniform_"),
    )
    for name in names.split()
}


class _OwnGenerator(TorchFunctionMode):
    def __init__(self, seed: int) -> None:
        super().__init__()
        self._generator = torch.Generator().manual_seed(seed)

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _DRAWS:
            tensor = args[0] if args else kwargs.get("tensor")
            if isinstance(tensor, Tensor) and tensor.is_meta:
                return tensor  # random numbers on it import the compiler: a second of CPU time
            if kwargs.get("generator") is None:
                kwargs = {**kwargs, "generator": self._generator}
        return func(*args, **kwargs)
