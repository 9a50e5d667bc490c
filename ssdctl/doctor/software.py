"""Python, torch and the packages, against what ssdctl's own metadata asks for."""

from __future__ import annotations

import importlib.util
import platform
import sys
from concurrent.futures import Future
from importlib import metadata

from packaging.requirements import Requirement

from ssdctl._version import __version__
from ssdctl.config import Config
from ssdctl.doctor.check import FAIL, OK, WARN, CheckResult
from ssdctl.doctor.subprocess_probe import ProbeOutput
from ssdctl.runtime.torch_compat import dali_extra

NEWEST_PYTHON = (3, 13)  # that the tests run on
SHOWN = ("torch", "torchvision")  # the others share a line
VENDORS = "it belongs to the vendor's image: take a newer image"
PURPOSES = {
    dali_extra(): "--pipeline dali",
    "tpu": "--device xla",
    "onnx": "export --format onnx",
    "export": "export --format safetensors",
    "tensorboard": "--tensorboard",
}


def check_software(config: Config, torch: Future[ProbeOutput]) -> list[CheckResult]:
    """What is installed, then whether torch really starts."""
    found = [
        CheckResult("ssdctl", OK, f"{__version__} on {platform.platform()}"),
        _python(),
        *_packages(config),
    ]
    return [*found, _import(torch.result())]


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
        remedy = "pip install ssdctl (or -e . in its folder)"
        return [CheckResult("packages", WARN, "ssdctl runs without being installed", remedy)]
    requirements = [Requirement(text) for text in texts]
    needed = [r for r in requirements if r.marker is None or r.marker.evaluate({"extra": ""})]
    judged = [_judge(requirement) for requirement in needed]
    wrong = [c for c in judged if c.state != OK]
    shown = [c for c in judged if c.state == OK and c.name in SHOWN]
    rest = ", ".join(f"{c.name} {c.detail}" for c in judged if c not in (*wrong, *shown))
    return [
        *shown,
        *wrong,
        *([CheckResult("packages", OK, rest)] if rest else []),
        *_torchvision(),
        *_extras(config, [r for r in requirements if r not in needed]),
    ]


def _judge(requirement: Requirement) -> CheckResult:
    name, asked = requirement.name, str(requirement.specifier)
    remedy = f"pip install '{requirement.name}{asked}'"
    if name in SHOWN and importlib.util.find_spec("habana_frameworks") is not None:
        remedy = VENDORS
    version = _version(name)
    if version is None:
        return CheckResult(name, FAIL, f"not installed; ssdctl needs {asked}", remedy)
    if not requirement.specifier.contains(version, prereleases=True):
        return CheckResult(name, FAIL, f"{version}; ssdctl needs {asked}", remedy)
    return CheckResult(name, OK, version)


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _torchvision() -> list[CheckResult]:
    """torchvision's kernels are made for one torch; another one makes them vanish."""
    try:
        texts = metadata.requires("torchvision") or []
    except metadata.PackageNotFoundError:
        return []  # said already
    for requirement in map(Requirement, texts):
        version = _version("torch")
        if requirement.name != "torch" or version is None or not requirement.specifier:
            continue
        if not requirement.specifier.contains(version, prereleases=True):
            detail = f"made for torch {requirement.specifier}, here is {version}"
            remedy = "pip install --upgrade torch torchvision, both at once"
            return [CheckResult("torchvision", WARN, detail, remedy)]
    return []


def _extras(config: Config, requirements: list[Requirement]) -> list[CheckResult]:
    """What exports, DALI and the like need: absent is fine unless the config asks for it."""
    wanted = {
        dali_extra(): config.train.pipeline == "dali",
        "tensorboard": config.train.tensorboard,
    }
    here, away, wrong = [], [], []
    for extra, purpose in PURPOSES.items():
        belong = [r for r in requirements if r.marker and r.marker.evaluate({"extra": extra})]
        judged = [_judge(r) for r in belong if r.name != "ssdctl"]
        if not judged:  # unknown to the metadata
            continue
        if all(c.state == OK for c in judged):
            here.append(extra)
        elif wanted.get(extra) or any(_version(c.name) for c in judged if c.state != OK):
            state = FAIL if wanted.get(extra) else WARN
            bad = next(c for c in judged if c.state != OK)
            remedy = f"pip install 'ssdctl[{extra}]', for {purpose}"
            wrong.append(CheckResult(f"extra {extra}", state, f"{bad.name}: {bad.detail}", remedy))
        else:
            away.append(f"{extra} ({purpose})")
    detail = "; not installed: ".join(", ".join(part) for part in (here, away) if part)
    if not here:
        detail = f"not installed: {', '.join(away)}"
    return [*wrong, CheckResult("extras", OK, detail)]


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
