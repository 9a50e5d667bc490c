"""Find the trackers that a training config names."""

from __future__ import annotations

import importlib.util
from importlib import import_module
from typing import NamedTuple

from ssdctl.config.sections.train import TrainConfig
from ssdctl.errors import UsageError, missing_package
from ssdctl.runtime.packages import entry_point_names, load_entry_point
from ssdctl.training.trackers.base import ENTRY_POINTS, Tracker


class BuiltIn(NamedTuple):
    """A tracker of ssdctl, in the module of its name, and the package that it needs."""

    tracker: str  # the class
    imports: str
    package: str


BUILT_IN = {
    "tensorboard": BuiltIn("TensorBoard", "tensorboard", "tensorboard"),
    "wandb": BuiltIn("WeightsAndBiases", "wandb", "wandb"),
    "mlflow": BuiltIn("MLflow", "mlflow", "mlflow-skinny"),
}


def find_trackers(config: TrainConfig) -> dict[str, type[Tracker]]:
    """Return the trackers that a config names; their packages are not imported yet.

    Raises:
        UsageError: There is no tracker of that name, or its package is not installed.
    """
    names = [*(["tensorboard"] if config.tensorboard else []), *config.tracker]
    return {name: _find(name) for name in dict.fromkeys(names)}


def _find(name: str) -> type[Tracker]:
    if (known := BUILT_IN.get(name)) is not None:
        if importlib.util.find_spec(known.imports) is None:
            raise missing_package(known.package, known.package)
        tracker: type[Tracker] = getattr(import_module(f"{__package__}.{name}"), known.tracker)
        return tracker
    plugin = load_entry_point(ENTRY_POINTS, name)
    if plugin is None:
        names = [*BUILT_IN, *entry_point_names(ENTRY_POINTS)]
        raise UsageError(
            f"--tracker {name}: no such tracker", hint=f"choose from {', '.join(names)}"
        )
    if not (isinstance(plugin, type) and issubclass(plugin, Tracker)):
        raise UsageError(
            f"--tracker {name}: its entry point is not a subclass of {Tracker.__module__}.Tracker"
        )
    return plugin
