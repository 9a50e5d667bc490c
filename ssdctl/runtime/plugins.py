"""Plugins: what other packages add to ssdctl by entry points, with one mechanism for every kind.

A kind has modules of ours and a group of entry points. Names are read from the metadata of the
installed packages; only the plugin that is used is imported, and checked then. An error inside a
plugin names the plugin and its package.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import re
import sys
import traceback
from collections.abc import Iterator, Mapping
from importlib import metadata
from inspect import getattr_static
from pathlib import Path
from types import UnionType
from typing import Any, NamedTuple, TypeVar, cast

from ssdctl.errors import SsdctlError, UsageError

T = TypeVar("T")
NAME = re.compile(r"\w[\w.-]*", re.ASCII)
AUGMENTATION_LISTS = {
    "ssd": ("crop", "flip", "color"),
    "ssd-zoom": ("zoom", "crop", "flip", "color"),
    "none": (),
}


class PluginKind(NamedTuple):
    noun: str
    option: str
    package: str  # has a module for each built-in
    group: str  # of entry points
    built_in: tuple[str, ...] = ()  # if other modules are in the package, too
    reserved: tuple[str, ...] = ()  # values of the option that are not names
    families: tuple[tuple[str, tuple[str, ...]], ...] = ()  # modules with several, by name


BACKBONES = PluginKind(
    *("backbone", "--backbone", "ssdctl.model.backbones", "ssdctl.backbones"),
    families=(("resnet", ("resnet18", "resnet34", "resnet50", "resnet101", "resnet152", "tiny")),),
)
FORMATS = PluginKind(
    "dataset format", "--from", "ssdctl.data.formats", "ssdctl.datasets", (), ("auto",)
)
AUGMENTATIONS = PluginKind(
    *("augmentation", "--augment", "ssdctl.input.augmentations", "ssdctl.augmentations"),
    reserved=tuple(AUGMENTATION_LISTS),
    families=(("ssd", ("crop", "flip", "color", "zoom")),),
)
LAUNCHERS = PluginKind(
    "launcher", "--launcher", "ssdctl.launch.engines", "ssdctl.launchers", (), ("auto",)
)
TRACKERS = PluginKind(
    *("tracker", "--tracker", "ssdctl.training.observers", "ssdctl.trackers"),
    built_in=("services",),
    families=(("services", ("tensorboard", "wandb", "mlflow")),),
)
DEVICES = PluginKind(
    *("device", "--device", "ssdctl.device", "ssdctl.devices"),
    built_in=("cpu", "cuda", "hpu", "tpu", "xla"),
    reserved=("auto",),
)
KINDS = (BACKBONES, FORMATS, AUGMENTATIONS, LAUNCHERS, TRACKERS, DEVICES)


class Plugin(NamedTuple):
    """An entry point of an installed package."""

    kind: PluginKind
    name: str
    package: str  # with its version
    entry: metadata.EntryPoint

    def __str__(self) -> str:
        return f"{self.kind.option} {self.name} ({self.kind.noun} of the package {self.package})"

    @contextlib.contextmanager
    def errors(self, where: str, error_class: type[SsdctlError] = UsageError) -> Iterator[None]:
        """Name the plugin in an error of the block, which calls or checks it.

        Raises:
            SsdctlError: An expected error is raised again with the plugin's name before its
                message, any other one as an `error_class`.
        """
        try:
            yield
        except SsdctlError as error:
            error.begin_with(str(self))
            raise
        except (Exception, SystemExit) as error:
            raise self.error(where, error, error_class) from error

    def error(
        self, where: str, error: BaseException, error_class: type[SsdctlError] = UsageError
    ) -> SsdctlError:
        """Return the error for an exception that the plugin raised in a function."""
        return error_class(
            f"{self}: {where} failed: {type(error).__name__}: {error}",
            hint=f"report it to the authors of {self.package.partition(' ')[0]}, or update it",
        )

    def require(self, is_right: object, expected: str) -> None:
        """Raise UsageError unless the plugin is as expected."""
        if not is_right:
            raise UsageError(
                f"{self}: expected {expected}", hint="docs/extend.md has an example of each kind"
            )


def built_in(kind: PluginKind) -> list[str]:
    """Return the names of the built-in modules of a kind, in any order; import nothing."""
    folder = Path(__file__).parents[1].joinpath(*kind.package.split(".")[1:])
    names = kind.built_in or [path.stem for path in folder.glob("[!_]*.py")]
    families = dict(kind.families)
    members = [name for family in families.values() for name in family]
    return [name.replace("_", "-") for name in names if name not in families] + members


def plugins(kind: PluginKind) -> list[Plugin]:
    """Return the plugins of a kind, also those that would be refused; import nothing."""
    return [plugin for plugin in _installed(*_places()) if plugin.kind == kind]


def names(kind: PluginKind) -> list[str]:
    """Return the names that can be chosen; import nothing."""

    def by_number(name: str) -> list[tuple[int, str]]:  # resnet18 before resnet101
        parts = re.split(r"(\d+)", name)
        return [(int(part), "") if part.isdecimal() else (0, part) for part in parts]

    found = {plugin.name for plugin in plugins(kind)} - {*kind.reserved}
    return sorted({*built_in(kind), *found}, key=by_number)


def choices(kind: PluginKind) -> tuple[str, ...]:
    """Return the values of the option of a kind."""
    return (*kind.reserved, *names(kind))


def find(kind: PluginKind, name: str) -> Plugin | None:
    """Return the plugin of a name; None for a built-in.

    Raises:
        UsageError: There is none, or several; or a plugin has the name of a built-in.
    """
    found = [plugin for plugin in plugins(kind) if plugin.name == name]
    packages = " and ".join(sorted({plugin.package for plugin in found}))
    is_built_in = name in built_in(kind) or name in kind.reserved
    if found and is_built_in:
        raise UsageError(
            f"{kind.option} {name}: refused: the package {packages} has a plugin of this name, "
            "which is ssdctl's own",
            hint=f"uninstall the package, or rename its entry point in {kind.group}",
        )
    if len(found) > 1:
        raise UsageError(
            f"{kind.option} {name}: the packages {packages} have a plugin of this name",
            hint="uninstall one of them",
        )
    if not (found or is_built_in):
        raise UsageError(
            f"{kind.option} {name}: no such {kind.noun} is installed",
            hint=f"choose from {', '.join(names(kind))}",
        )
    return found[0] if found else None


def load(kind: PluginKind, name: str) -> tuple[Any, Plugin | None]:
    """Import a built-in module, or what an entry point names; return it and its plugin.

    Raises:
        UsageError: As `find`; or the plugin cannot be imported.
    """
    plugin = find(kind, name)
    if plugin is None:
        return built_in_module(kind, name), None
    with plugin.errors(f"importing {plugin.entry.value}"):
        value = plugin.entry.load()
    _loaded[plugin.entry.module] = plugin
    return value, plugin


def guarded(base: type[T], plugin: Plugin, returns: Mapping[str, type | UnionType]) -> type[T]:
    """Return a subclass whose methods name the plugin if they fail or return another type.

    Args:
        returns: The types that the methods return, by name; `object` for any.
    """

    def guard(name: str, kind: Any) -> Any:
        def call(this: Any, *arguments: Any, **keywords: Any) -> Any:
            with plugin.errors(f"{name}()"):
                value = getattr(super(made, this), name)(*arguments, **keywords)
                expected = kind.__name__ if isinstance(kind, type) else kind
                plugin.require(
                    isinstance(value, kind), f"{name}() to return {expected}, not {value!r:.100}"
                )
                return guard_instance(value, base, made)

        return classmethod(call) if isinstance(getattr_static(base, name), classmethod) else call

    members = {name: guard(name, kind) for name, kind in returns.items()}
    members |= {"__slots__": (), "__module__": base.__module__}
    made: Any = cast("Any", type(base))(base.__name__, (base,), members)
    return cast("type[T]", made)


def guard_instance(value: Any, base: type, made: type) -> Any:
    """Give an instance of exactly `base` the class `made`, which `guarded` returned."""
    if type(value) is base:
        object.__setattr__(value, "__class__", made)
    return value


def built_in_module(kind: PluginKind, name: str) -> Any:
    """Import a built-in; return its module, or what its family's module has of that name."""
    for family, members in kind.families:
        if name in members:
            return getattr(importlib.import_module(f"{kind.package}.{family}"), name)
    return importlib.import_module(f"{kind.package}.{name.replace('-', '_')}")


_loaded: dict[str, Plugin] = {}  # by module


def plugin_error(error: BaseException | None) -> SsdctlError | None:
    """Return the error that names the plugin whose code raised an exception; None if none did.

    It is for code that no `Plugin.errors` surrounds: a network's `forward`, a device's methods.
    """
    if isinstance(error, SsdctlError):
        message = error.for_command_line()[0]
        is_named = any(str(loaded) in message for loaded in _loaded.values())
        if not is_named and (plugin := _raising(error)):
            error.begin_with(str(plugin))
        return error
    while error is not None:
        if plugin := _raising(error):
            return plugin.error("running it", error)
        hidden = error.__suppress_context__
        error = error.__cause__ or (None if hidden else error.__context__)
    return None


def _raising(error: BaseException) -> Plugin | None:
    """Return the plugin of the innermost function in an error's traceback that is of a plugin."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    modules = [str(frame.f_globals.get("__name__", "")) for frame in reversed(frames)]
    return next(filter(None, map(_plugin_of, modules)), None)


def _plugin_of(module: str) -> Plugin | None:
    top = module.partition(".")[0]
    near = [p for name, p in _loaded.items() if name.partition(".")[0] == top]
    return _loaded.get(module) or (near[0] if near else None)


def _places() -> tuple[tuple[str, ...], tuple[int, ...]]:
    times = []
    for path in sys.path:
        try:
            times.append(Path(path).stat().st_mtime_ns)
        except OSError:
            times.append(0)
    return tuple(sys.path), tuple(times)


@functools.lru_cache(maxsize=1)
def _installed(path: tuple[str, ...], times: tuple[int, ...]) -> list[Plugin]:
    """Return the plugins of all packages. A package with damaged metadata has none."""
    found, seen = list[Plugin](), set[str]()
    groups = {kind.group: kind for kind in KINDS}
    for distribution in metadata.distributions():
        with contextlib.suppress(Exception):
            if "[ssdctl." not in (distribution.read_text("entry_points.txt") or ""):
                continue
            name, version = distribution.metadata["Name"], distribution.version
            if name in seen:  # hidden by an earlier folder
                continue
            seen.add(name)
            found += [
                Plugin(groups[entry.group], entry.name, f"{name} {version}", entry)
                for entry in distribution.entry_points
                if entry.group in groups and NAME.fullmatch(entry.name)
            ]
    return found
