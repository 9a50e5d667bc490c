"""Check Python, torch and the installed packages against ssdctl's requirements."""

from __future__ import annotations

import importlib.util
import platform
import sys
from concurrent.futures import Future
from importlib import metadata

from packaging.requirements import Requirement

from ssdctl._version import __version__
from ssdctl.config import Config
from ssdctl.doctor.check import ABSENT, FAIL, OK, WARN, CheckResult
from ssdctl.doctor.subprocess_probe import ProbeOutput
from ssdctl.runtime.packages import package_version
from ssdctl.runtime.torch_compat import dali_extra

NEWEST_PYTHON = (3, 13)  # that the tests run on
OWN_LINE = ("torch", "torchvision")  # the others share one line
VENDORS = "it is part of the vendor's image: use a newer image"
PURPOSES = {
    dali_extra(): "--pipeline dali",
    "tpu": "--device xla",
    "onnx": "export --format onnx",
    "export": "export --format safetensors",
    "tensorboard": "--tensorboard",
    "wandb": "--tracker wandb",
    "mlflow": "--tracker mlflow",
    "hub": "hf:// models, push",
    "video": "predict on videos and cameras",
}


def check_software(config: Config, torch: Future[ProbeOutput]) -> list[CheckResult]:
    """Return the results for Python, the packages and the import of torch."""
    results = [
        CheckResult("ssdctl", OK, f"{__version__} on {platform.platform()}"),
        _python(),
        *_packages(config),
    ]
    return [*results, _import(torch.result())]


def _python() -> CheckResult:
    detail = f"{platform.python_version()} ({sys.executable})"
    if sys.version_info[:2] > NEWEST_PYTHON:
        newest = ".".join(map(str, NEWEST_PYTHON))
        return CheckResult("python", WARN, f"{detail}: newer than tested", f"use Python {newest}")
    return CheckResult("python", OK, detail)


def _packages(config: Config) -> list[CheckResult]:
    try:
        texts = metadata.requires("ssdctl") or []
    except metadata.PackageNotFoundError:
        remedy = "install it: pip install -e . in its folder, or pip install of its wheel"
        return [CheckResult("packages", WARN, "ssdctl runs without being installed", remedy)]
    requirements = [Requirement(text) for text in texts]
    needed = [r for r in requirements if r.marker is None or r.marker.evaluate({"extra": ""})]
    results = [_check_requirement(requirement) for requirement in needed]
    wrong = [c for c in results if c.state != OK]
    separate = [c for c in results if c.state == OK and c.name in OWN_LINE]
    rest = ", ".join(f"{c.name} {c.detail}" for c in results if c not in (*wrong, *separate))
    return [
        *separate,
        *wrong,
        *([CheckResult("packages", OK, rest)] if rest else []),
        *_torchvision(),
        *_extras(config, [r for r in requirements if r not in needed], {r.name for r in needed}),
    ]


def _check_requirement(requirement: Requirement) -> CheckResult:
    name, specifier = requirement.name, str(requirement.specifier)
    remedy = f"pip install '{requirement.name}{specifier}'"
    if name in OWN_LINE and importlib.util.find_spec("habana_frameworks") is not None:
        remedy = VENDORS
    version = package_version(name)
    if version is None:
        return CheckResult(name, FAIL, f"not installed; ssdctl needs {specifier}", remedy)
    if not requirement.specifier.contains(version, prereleases=True):
        return CheckResult(name, FAIL, f"{version}; ssdctl needs {specifier}", remedy)
    return CheckResult(name, OK, version)


def _torchvision() -> list[CheckResult]:
    """Check that torchvision was built for the installed torch; else its kernels are missing."""
    try:
        texts = metadata.requires("torchvision") or []
    except metadata.PackageNotFoundError:
        return []  # reported by _packages
    for requirement in map(Requirement, texts):
        version = package_version("torch")
        if requirement.name != "torch" or version is None or not requirement.specifier:
            continue
        if not requirement.specifier.contains(version, prereleases=True):
            detail = f"built for torch {requirement.specifier}, installed is {version}"
            remedy = "pip install --upgrade torch torchvision, both at once"
            return [CheckResult("torchvision", WARN, detail, remedy)]
    return []


def _extras(
    config: Config, requirements: list[Requirement], always_installed: set[str]
) -> list[CheckResult]:
    """Check the optional dependencies; absent ones are problems only if the config needs them.

    An extra may also restrict a package that is always installed. That counts only if the extra's
    other packages are installed.
    """
    wanted = {
        dali_extra(): config.train.pipeline == "dali",
        "tensorboard": config.train.tensorboard,
        **dict.fromkeys(config.train.tracker, True),
    }
    installed, absent, wrong = [], [], []
    for extra, purpose in PURPOSES.items():
        members = [r for r in requirements if r.marker and r.marker.evaluate({"extra": extra})]
        results = [_check_requirement(r) for r in members if r.name != "ssdctl"]
        if not results:  # unknown to the metadata
            continue
        bad = [c for c in results if c.state != OK]
        own = {c.name for c in results} - always_installed
        has_all = all(package_version(name) for name in own)
        if not bad:
            installed.append(extra)
        elif wanted.get(extra) or any(
            package_version(c.name) and (has_all or c.name in own) for c in bad
        ):
            state = FAIL if wanted.get(extra) else WARN
            detail = "; ".join(f"{c.name}: {c.detail}" for c in bad)
            packages = " ".join(c.remedy.removeprefix("pip install ") for c in bad)
            remedy = f"pip install {packages}, for {purpose}"
            wrong.append(CheckResult(f"extra {extra}", state, detail, remedy))
        else:
            absent.append(f"{extra} ({purpose})")
    if installed:
        wrong.append(CheckResult("extras", OK, ", ".join(installed)))
    if absent:
        wrong.append(CheckResult("other extras", ABSENT, f"not installed: {', '.join(absent)}"))
    return wrong


def _import(torch: ProbeOutput) -> CheckResult:
    facts = torch.facts()
    if "cpu" not in facts:
        remedy = "pip install --force-reinstall torch torchvision"
        return CheckResult("torch import", FAIL, f"fails: {torch.problem}", remedy)
    detail = f"{facts['import_s']:.1f} s"
    if not facts["has_gloo"]:
        remedy = "several ranks need it: install PyTorch's own build"
        return CheckResult("torch import", WARN, f"{detail}; built without gloo", remedy)
    return CheckResult("torch import", OK, detail)
