"""A fake machine: folders for sysfs, scripts for third-party programs, a recorded answer of torch's
probe where torch itself is not the point; and the doctor run on it."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from conftest import run_cli

from ssdctl.doctor import FACT
from ssdctl.runtime import hardware

STANDIN = Path(__file__).parent.parent / "standin"
CPU = {"label": "Test CPU", "has_native_bf16": True}
RECORDED = {
    "torch": "2.9.0", "import_s": 1.5, "has_gloo": True, "cpu": CPU, "cuda_build": "12.8",
    "gpus": [], "gpu_problem": "no driver",
}  # fmt: skip
Checks = dict[str, dict[str, str]]


def expect(check: dict[str, str], state: str, *parts: str) -> None:
    """Assert the state of a check, and that its detail and remedy contain these parts."""
    text = f"{check['detail']}\n{check['remedy']}"
    assert (check["state"], [part for part in parts if part not in text]) == (state, []), check


class Machine:
    """A machine of folders: /sys, /proc, a PATH, free bytes, and the output of torch's probe."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.sys, self.proc = folder / "sys", folder / "proc"
        self.bin, self.modules = folder / "bin", folder / "modules"
        self.packages, self._patch = folder / "packages", monkeypatch
        self.free_bytes = 64_000_000_000
        monkeypatch.setattr("ssdctl.doctor.data.free_bytes", lambda _: self.free_bytes)
        for path in (self.sys, self.proc, self.bin, self.modules):
            path.mkdir(parents=True)
        self.put(self.proc / "meminfo", "MemTotal: 64000000 kB\nMemAvailable: 60000000 kB\n")
        monkeypatch.setattr(hardware, "SYS", self.sys)
        monkeypatch.setattr(hardware, "PROC", self.proc)
        monkeypatch.setenv("PATH", str(self.bin))
        monkeypatch.setenv("PYTHONPATH", str(self.modules))
        monkeypatch.setenv("TORCH_HOME", str(folder / "torch"))
        self.probes: dict[str, str] = {}
        self.torch_says()

    def doctor(self, *arguments: object, code: int = 0) -> Checks:
        """Run the doctor, which ends with `code`; return the checks by name."""
        result = run_cli("doctor", "--json", *arguments)
        assert result.code == code, result.err + result.out
        return {check["name"]: check for check in json.loads(result.out)}

    def expect(self, name: str, state: str, *parts: str) -> None:
        """Run the doctor without options, and `expect` this of one check; only `fail` fails."""
        expect(self.doctor(code=2 * (state == "fail"))[name], state, *parts)

    def put(self, path: Path, text: str) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")

    def program(self, name: str, script: str) -> None:
        self.put(self.bin / name, f"#!/bin/sh\n{script}")
        (self.bin / name).chmod(0o755)

    def card(
        self, vendor: str, number: int = 0, kind: str = "0x120000", device: str = "0x0000"
    ) -> None:
        folder = self.sys / f"bus/pci/devices/0000:{number:02}:00.0"
        for name, text in (("vendor", vendor), ("class", kind), ("device", device)):
            self.put(folder / name, text)

    def package(self, name: str, version: str) -> None:
        text = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}"
        info = f"{name.replace('-', '_')}-{version}.dist-info"
        self.put(self.packages / info / "METADATA", text)

    def use_packages(self) -> None:
        """Put `packages` on the path of this process and of the probes."""
        self._patch.syspath_prepend(str(self.packages))
        self._patch.setenv("PYTHONPATH", f"{self.modules}:{self.packages}")

    def torch_says(self, **facts: Any) -> None:
        """Replace torch's probe by a program that prints RECORDED with these changes."""
        self.probe_prints("torch", json.dumps(RECORDED | facts))

    def probe_prints(self, name: str, text: str, end: str = "os._exit(0)") -> None:
        """Replace a probe: it prints the text and runs the code `end`."""
        text = re.sub("^(?={)", FACT, text, flags=re.MULTILINE)
        self.probes[name] = f"print({text!r}, flush=True)\n    {end}\n"
        code = "import os, sys\n"
        for name, answer in self.probes.items():
            code += f"if ['ssdctl.doctor.probes', {name!r}] == sys.orig_argv[4:6]:\n    {answer}"
        shutil.rmtree(self.modules / "__pycache__", ignore_errors=True)  # may have the same second
        self.put(self.modules / "sitecustomize.py", code)
