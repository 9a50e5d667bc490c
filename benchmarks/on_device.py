"""Test and measure an accelerator in at most 45 minutes, and write RESULTS-<device>.md.

    benchmarks/on_gpu.sh [--out FOLDER] [--only PART ...]    # one NVIDIA GPU, or several
    benchmarks/on_hpu.sh                                     # Intel Gaudi

Run it in a clone, in an environment with ssdctl and pytest (`pip install -e '.[all]' --group
test`). It needs no network and no data. Each part has a time limit, and one that fails does not
stop the others: the file says which failed, with the end of their output. Without the accelerator
everything runs on the CPU with a tiny network, and what needs the accelerator is skipped.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
TOTAL_MINUTES = 45
STEPS = 20
PACKAGES = (
    "torch", "triton", "habana-torch-plugin", "onnxruntime-gpu", "onnxruntime", "tensorrt",
    "nvidia-dali-cuda120", "nvidia-dali-cuda130", "nvidia-nccl-cu12", "nvidia-nccl-cu13",
)  # fmt: skip
SPEED = ("images_per_second", "step_ms", "tflops", "peak_memory_bytes", "warmup_s")


class SkippedError(Exception):
    """Raised by a part that this machine cannot run."""


class Bench:
    """The machine, and a folder for the runs of all parts."""

    def __init__(self, device: str, folder: Path) -> None:
        self.wanted = device
        self.folder = folder
        self.deadline = 0.0  # when the current part must end
        self.missing = ""  # why the accelerator cannot be used
        self.label = platform.processor() or "CPU"
        probe = f"import ssdctl.device as d; print(d.open_device({device!r}).label)"
        done = self._call([sys.executable, "-c", probe], 300)
        if done.returncode:
            self.missing = (done.stderr.strip().splitlines() or ["no device"])[-1]
            self.label = "cpu"
        else:
            self.label = done.stdout.strip().splitlines()[-1]
        self.device = "cpu" if self.missing else device
        network = "tiny --bs 2" if self.missing else "resnet34 --bs 32"
        self.options = f"--device {self.device} --backbone {network}".split()

    def needs_accelerator(self) -> None:
        if self.missing:
            raise SkippedError(f"needs the accelerator: {self.missing}")

    def run(self, *command: Any) -> str:
        """Run a command and return its output.

        Raises:
            RuntimeError: It failed, or the part's time is over.
        """
        done = self._call([str(word) for word in command], self.deadline - time.monotonic())
        if done.returncode:
            raise RuntimeError(f"exit {done.returncode}\n{(done.stdout + done.stderr)[-1500:]}")
        return done.stdout

    def ssdctl(self, *arguments: Any) -> Any:
        """Run a command of ssdctl and return its JSON."""
        out = self.run(sys.executable, "-m", "ssdctl", *arguments, "--json")
        return json.loads(out.strip().splitlines()[-1]) if out.strip() else {}

    def train(self, name: str, *options: Any, steps: int = STEPS) -> Path:
        """Train on generated shapes in fp32 and return the run's folder."""
        out = self.folder / name
        shapes = self.folder / "shapes"
        if not shapes.exists():
            self.ssdctl("download", "--dataset", "shapes", "--dest", shapes, "--images", 64)
        # With a schedule that does not depend on the number of steps.
        schedule = ("--preset", "stable-r34", "--warmup", "1st")
        chosen = [
            *self.options,
            "--backbone-weights",
            "none",
            "--fp32",
            "--log-every",
            1,
            *schedule,
        ]
        self.ssdctl("train", "--data", shapes, "--out", out, "--steps", steps, *chosen, *options)
        return out

    def _call(self, command: list[str], seconds: float) -> subprocess.CompletedProcess[str]:
        """Run a command in its own process group, which is killed when the time is over."""
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        try:
            out, err = process.communicate(timeout=max(seconds, 0.1))
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
            raise RuntimeError("the time of this part is over") from None
        return subprocess.CompletedProcess(command, process.returncode, out, err)


def versions(bench: Bench) -> str:
    lines = [f"Python {platform.python_version()}, {platform.platform()}, {os.cpu_count()} cores"]
    for package in PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            lines.append(f"{package} {metadata.version(package)}")
    for tool in ("nvidia-smi", "hl-smi"):
        if shutil.which(tool):
            lines.append(f"```\n{bench.run(tool).strip()}\n```")
    return "\n".join(lines)


def device_tests(bench: Bench) -> str:
    bench.needs_accelerator()
    if bench.wanted != "cuda":  # tests/device/test_standins.py uses a stub
        return bench.run(sys.executable, "-m", "ssdctl", "doctor", "--self-test", "-v")
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-n",
        0,
        "-m",
        "",
        "-k",
        "cuda",
        "tests/device",
    ]
    return "\n".join(bench.run(*command).strip().splitlines()[-5:])


def training_speed(bench: Bench) -> str:
    return _table([bench.ssdctl("benchmark", "train", *bench.options, "--fake-data")], SPEED)


def evaluation_speed(bench: Bench) -> str:
    metrics = bench.ssdctl("benchmark", "evaluate", *bench.options)
    return _table([metrics], ("images_per_second", "detect_images_per_second", "score_s"))


def forms(bench: Bench) -> str:
    """Measure the step with all forms of model/fused.py, and without each."""
    bench.needs_accelerator()
    rows = []
    for name in json.loads(bench.run(sys.executable, __file__, bench.wanted, "--rows")):
        command = [sys.executable, __file__, bench.wanted, "--row", name, *bench.options]
        try:
            rows.append({"without": name, **json.loads(bench.run(*command).splitlines()[-1])})
        except RuntimeError as error:
            rows.append({"without": name, "images_per_second": f"failed: {error}"[:80]})
    return _table(rows, ("without", *SPEED))


def compiled_and_eager(bench: Bench) -> str:
    runs = {e: bench.train(e, "--execution", e) for e in ("eager", "compile")}
    losses = {e: _losses(run) for e, run in runs.items()}
    error = max(
        abs(a / b - 1) for a, b in zip(losses["compile"][:3], losses["eager"][:3], strict=True)
    )
    weights, difference = _difference(runs["compile"], runs["eager"])
    text = (
        f"First losses {losses['compile'][:3]} compiled, {losses['eager'][:3]} eager. After "
        f"{STEPS} steps {weights} tensors of weights differ by at most {difference:.1e} of their "
        "largest value."
    )
    if error > 1e-3:
        raise RuntimeError(text)
    return text


def resume(bench: Bench) -> str:
    complete = bench.train("complete", "--deterministic")
    bench.train("stopped", "--deterministic", steps=STEPS // 2)
    weights, difference = _difference(complete, bench.train("stopped", "--deterministic"))
    text = f"{weights} weight tensors of a resumed run differ by at most {difference:.1e}."
    if difference:
        raise RuntimeError(text)
    return text


def collectives(bench: Bench) -> str:
    """Train on one rank and on all cards."""
    flag = {"cuda": "--gpus", "hpu": "--hpus", "cpu": "--cpus"}[bench.device]
    count = "import torch; print(torch.cuda.device_count())"
    if bench.device == "hpu":
        count = "import habana_frameworks.torch.hpu as h; print(h.device_count())"
    cards = 2 if bench.missing else int(bench.run(sys.executable, "-c", count).split()[-1])
    texts = []
    for ranks in sorted({1, cards}):
        launch = [sys.executable, "-m", "ssdctl", "launch", flag, ranks, "--"]
        speed = bench.run(*launch, "benchmark", "train", *bench.options, "--fake-data", "--json")
        texts.append(_table([json.loads(speed.strip().splitlines()[-1])], ("world_size", *SPEED)))
    return "\n\n".join(texts)


def dali(bench: Bench) -> str:
    bench.needs_accelerator()
    if bench.wanted != "cuda" or importlib.util.find_spec("nvidia.dali") is None:
        raise SkippedError("nvidia.dali is not installed")
    losses = _losses(bench.train("dali", "--pipeline", "dali"))
    speed = bench.ssdctl("benchmark", "train", *bench.options, "--pipeline", "dali")
    return f"Losses {losses[0]} to {losses[-1]}.\n\n{_table([speed], SPEED)}"


def onnx_runtime(bench: Bench) -> str:
    if importlib.util.find_spec("onnxruntime") is None:
        raise SkippedError("onnxruntime is not installed")
    checkpoint = bench.train("exported") / "checkpoints/last.pt"
    file, scored = bench.folder / "ssd.onnx", []
    bench.ssdctl("export", checkpoint, "--format", "onnx", "--out", file)
    device = bench.device if bench.device == "cuda" else "cpu"
    for model in (checkpoint, file):
        metrics = bench.ssdctl(
            "evaluate", model, "--data", bench.folder / "shapes", "--device", device, "--fp32"
        )
        scored.append({"model": model.suffix, **metrics})
    return _table(scored, ("model", *[k for k, v in metrics.items() if isinstance(v, float)][:4]))


def tensorrt(bench: Bench) -> str:
    bench.needs_accelerator()
    if bench.wanted != "cuda" or shutil.which("trtexec") is None:
        raise SkippedError("trtexec is not on the PATH")
    checkpoint, file = bench.train("trt") / "checkpoints/last.pt", bench.folder / "trt.onnx"
    bench.ssdctl("export", checkpoint, "--format", "onnx", "--nms", "efficientnms", "--out", file)
    log = bench.run("trtexec", f"--onnx={file}", "--fp16")
    return "\n".join(line for line in log.splitlines() if re.search("Throughput|Latency:", line))


PARTS: dict[str, tuple[float, Callable[[Bench], str]]] = {  # minutes
    "versions": (1, versions),
    "device tests": (9, device_tests),
    "benchmark train": (3, training_speed),
    "benchmark evaluate": (3, evaluation_speed),
    "compiled against eager": (4, compiled_and_eager),
    "resume": (4, resume),
    "collectives": (4, collectives),
    "DALI": (3, dali),
    "ONNX Runtime": (3, onnx_runtime),
    "TensorRT": (3, tensorrt),
    "forms of model/fused.py": (15, forms),  # what fits into the rest
}


class Result(NamedTuple):
    """The result of a part."""

    state: str  # ok, skipped or FAILED
    seconds: float
    text: str


def run_part(bench: Bench, part: Callable[[Bench], str], seconds: float) -> Result:
    """Run a part; an error is its result."""
    started = time.monotonic()
    bench.deadline = started + seconds
    try:
        state, text = "ok", part(bench)
    except SkippedError as reason:
        state, text = "skipped", str(reason)
    except Exception as error:  # whatever it is, the other parts run
        state, text = "FAILED", f"{type(error).__name__}: {error}"
    return Result(state, time.monotonic() - started, text)


def write(bench: Bench, results: dict[str, Result], folder: Path) -> Path:
    """Write the results so far."""
    name = re.sub(r"[^a-z0-9]+", "-", bench.label.lower()).strip("-")
    head = [f"# {bench.label}", "", f"`{Path(__file__).name} {bench.wanted}`, {time.ctime()}."]
    if bench.missing:
        head.append(f"Run on the CPU, with a tiny network: {bench.missing}")
    head += ["", "| part | result | s |", "|---|---|---|"]
    head += [f"| {part} | {r.state} | {r.seconds:.0f} |" for part, r in results.items()]
    texts = [f"## {part}: {r.state}\n\n{r.text}" for part, r in results.items()]
    file = folder / f"RESULTS-{name}.md"
    file.write_text("\n".join(head) + "\n\n" + "\n\n".join(texts) + "\n")
    return file


def _table(rows: list[dict[str, Any]], columns: tuple[str, ...]) -> str:
    lines = [f"| {' | '.join(columns)} |", "|" + "---|" * len(columns)]
    return "\n".join(
        lines + [f"| {' | '.join(str(row.get(c, '')) for c in columns)} |" for row in rows]
    )


def _losses(run: Path) -> list[float]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line["loss"] for line in lines if line["kind"] == "train"]


def _difference(one: Path, other: Path) -> tuple[int, float]:
    """Return how many weights two runs have, and their largest relative difference."""
    os.environ["PT_HPU_AUTOLOAD"] = "0"
    import torch

    files = [run / "checkpoints/last.pt" for run in (one, other)]
    a, b = (torch.load(file, map_location="cpu", weights_only=True)["model"] for file in files)
    return len(a), max(
        float((a[n].double() - b[n].double()).abs().max() / b[n].double().abs().max().clamp(1e-30))
        for n in a
    )


def _rows(device: str) -> dict[str, Callable[[], None]]:
    """Return the changes for this device that can be undone one by one."""
    if device == "cuda":
        from codegen_rows import ROWS

        for name in ("TORCHINDUCTOR_FORCE_DISABLE_CACHES", "TORCHINDUCTOR_COMPILE_THREADS"):
            del os.environ[name]  # set by codegen.py
        return ROWS
    from ssdctl.model import fused

    rows: dict[str, Callable[[], None]] = {"all": lambda: None}
    for form in ("compiled", "no_scatter"):
        for plain in fused.FORMS[form]:
            rows[f"{form} {plain.__name__}"] = lambda f=form, p=plain: fused.FORMS[f].pop(p)
    return rows


def _run_row(device: str, row: str, options: list[str]) -> None:
    """Undo one change, then measure training in this process."""
    _rows(device)[row]()
    from ssdctl.cli.main import main as ssdctl

    sys.argv = ["ssdctl", "benchmark", "train", *options, "--fake-data", "--seconds", "5", "--json"]
    ssdctl()


def main() -> None:
    """Run the parts and write their results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("device", choices=["cuda", "hpu"])
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks", metavar="FOLDER")
    parser.add_argument("--only", nargs="+", default=list(PARTS), choices=PARTS, metavar="PART")
    parser.add_argument("--slower", type=float, default=1.0, help="multiply the time limits")
    parser.add_argument("--rows", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--row", help=argparse.SUPPRESS)
    options, passed_on = parser.parse_known_args()
    if options.rows:
        print(json.dumps(list(_rows(options.device))))
    elif options.row:
        _run_row(options.device, options.row, passed_on)
    else:
        results: dict[str, Result] = {}
        minute = 60 * options.slower
        end = time.monotonic() + TOTAL_MINUTES * minute
        with tempfile.TemporaryDirectory() as folder:
            bench = Bench(options.device, Path(folder))
            for name in options.only:
                minutes, part = PARTS[name]
                left = min(minutes * minute, end - time.monotonic())
                results[name] = run_part(bench, part, left)
                file = write(bench, results, options.out)
                print(f"{results[name].state}: {name} ({results[name].seconds:.0f} s)", flush=True)
        print(file)
        sys.exit(any(result.state == "FAILED" for result in results.values()))


if __name__ == "__main__":
    main()
