"""The Python API: the same work, settings and errors as the commands."""

import json
import logging
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from conftest import TINY, Cli

import ssdctl
from ssdctl.errors import UsageError
from ssdctl.training.observers import Step


def test_the_package_is_light_and_its_names_are_listed() -> None:
    code = (
        "import sys, ssdctl; before = set(sys.modules); assert callable(ssdctl.train);"
        "assert not {'torch', 'numpy', 'msgspec', 'PIL'} & before, 'heavy import';"
        "assert dir(ssdctl) == sorted(ssdctl.__all__);"
        "[getattr(ssdctl, name) for name in ('Config', 'Result', 'Run', 'Evaluation', 'train')];"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
    with pytest.raises(AttributeError, match="nothing"):
        ssdctl.nothing  # type: ignore[attr-defined] # noqa: B018


def test_the_end_of_a_forked_process_keeps_the_run(
    shapes: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with ssdctl.Trainer(shapes, out="run", steps=2, **TINY) as trainer:
        next(iter(trainer))
        with monkeypatch.context() as patch:
            patch.setattr(os, "getpid", lambda: -1)
            trainer.close()
        assert Path("run/.lock").exists()
        next(iter(trainer))
    assert not Path("run/.lock").exists()


def test_wrong_observers_and_empty_texts_are_refused(shapes: Path) -> None:
    with pytest.raises(UsageError, match="Observer"):
        ssdctl.train(shapes, out="run", observers=[ssdctl.Observer], **TINY)  # type: ignore
    for keywords in ({"data": ""}, {"data": shapes, "init": ""}, {"data": shapes, "out": ""}):
        with pytest.raises(UsageError, match="is empty"):
            ssdctl.train(**keywords, **TINY)
    assert not Path("run").exists()


def test_importing_all_names_changes_nothing_global() -> None:
    code = (
        "import logging, os, signal, threading, warnings, numpy, random, torch\n"
        "def state(): return (dict(os.environ), list(warnings.filters), torch.get_default_dtype(),"
        "[signal.getsignal(n) for n in signal.valid_signals()], threading.enumerate(),"
        "torch.get_rng_state().tolist(), numpy.random.get_state()[1].tolist(), random.getstate(),"
        "torch.get_num_threads(), logging.root.handlers, logging.root.level,"
        "torch.backends.cudnn.benchmark, torch.are_deterministic_algorithms_enabled())\n"
        "import PIL.Image, pyarrow, requests  # they have filters of their own\n"
        "before = state()\n"
        "import ssdctl; [getattr(ssdctl, name) for name in ssdctl.__all__]\n"
        "changed = [a for a, b in zip(before, state()) if a != b]; assert not changed, changed"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_train_and_evaluate(
    shapes: Path, tmp_path: Path, tiny_run: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "ssdctl")
    handlers = signal.getsignal(signal.SIGTERM), logging.getLogger("ssdctl").handlers
    config = ssdctl.configure(train={"log_every": 1})  # as conftest.TINY_RUN
    for wrong in ({"train": 3}, {"trains": {}}):
        with pytest.raises(UsageError, match=f"configure: {next(iter(wrong))} is not a table"):
            ssdctl.configure(**wrong)
    run = ssdctl.train(shapes, out=tmp_path / "run", steps=1, config=config, **TINY)
    assert (signal.getsignal(signal.SIGTERM), logging.getLogger("ssdctl").handlers) == handlers
    (step,) = (record for record in run.metrics if record["kind"] == "train")
    reference = ssdctl.Run(tiny_run)  # by the command line, with the same settings
    assert step["loss"] == next(r["loss"] for r in reference.metrics if r["kind"] == "train")
    assert any("loss" in record.getMessage() for record in caplog.records)
    assert run.config.train == msgspec.structs.replace(
        reference.config.train, out=str(tmp_path / "run"), steps=1
    )
    assert run.best == tmp_path / "run/checkpoints/best.pt"
    assert "AP50" in run._repr_html_()
    run.plot().save("curves.jpg")
    assert repr(ssdctl.Run("none")) == "Run(none)"
    evaluation = ssdctl.evaluate(run, device="cpu", workers=1, detections="rows.json")
    assert evaluation.metrics["AP"] == pytest.approx(run.best_metrics["AP"], abs=1e-4)
    assert evaluation.per_class[0].name in evaluation._repr_html_()
    rescored = ssdctl.evaluate("rows.json", shapes)
    assert rescored.metrics == evaluation.metrics


def test_a_stepped_run_is_the_run_of_the_command(
    shapes: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bit by bit: a config file, keywords, a loop that is left and entered again, the command."""
    settings = "augment = 'ssd'\nema = 0.9\nlog_every = 1\nmllog = 'log.txt'\n"
    Path("settings.toml").write_text(f"[train]\n{settings}")
    options = [w for name, v in TINY.items() if name not in ("progress", "precision") for w in
               (f"--{name.replace('_', '-')}", v)]  # fmt: skip
    command = ("train", "--config", "settings.toml", "--data", shapes, "--steps", 4, "--fp32")
    assert cli(*command, *options, "--out", "command").code == 0
    common = {**TINY, "steps": 4, "config": "settings.toml"}
    ssdctl.train(shapes, out="function", **common)
    trainer, stepped = ssdctl.Trainer(shapes, out="stepped", **common), Path("stepped").absolute()
    Path("elsewhere").mkdir()
    with monkeypatch.context() as patch:
        patch.chdir("elsewhere")
        for step in trainer:
            if step.step == 2:
                break
        assert repr(trainer) == f"Trainer({stepped}: step 2 of 4)"
        trainer.save()
        assert [step.step for step in trainer] == [3, 4]
    assert not Path("stepped/.lock").exists()
    assert not any(Path("elsewhere").iterdir())
    assert Path("log.txt").read_text().count("run_stop") == 3
    runs = ("command", "function", "stepped")
    first, *others = (torch.load(f"{run}/checkpoints/last.pt", weights_only=True) for run in runs)
    for other in others:
        for part in ("model", "trained"):
            for name, value in first[part].items():
                assert torch.equal(value, other[part][name]), (part, name)
    losses = [[r["loss"] for r in ssdctl.Run(run).metrics if r["kind"] == "train"] for run in runs]
    assert losses[0] == losses[1] == losses[2]
    assert len(losses[0]) == 4
    with pytest.raises(UsageError, match="closed"):
        trainer.run()
    with pytest.raises(TypeError, match="bs"):
        ssdctl.Trainer(shapes, bs=4)  # type: ignore[call-arg]
    with ssdctl.Trainer(shapes, out="left", **common) as left:
        steps = iter(left)
        next(steps)
        assert left.model.training
        monkeypatch.setattr("ssdctl.runs.folder.WAIT_S", 0.0)
        with pytest.raises(UsageError, match="left: this process"):
            ssdctl.Trainer(shapes, out="left", **common).open()
    assert next(steps, None) is None
    with pytest.raises(UsageError, match="closed"):
        left.save()
    assert ssdctl.Trainer(shapes, out="left", **common).run().best.is_file()  # the lock is free


class Diary(ssdctl.Observer):
    def __init__(self) -> None:
        self.notes: list[tuple[str, int]] = []
        self.losses: list[float] = []

    def on_step(self, step: Step) -> None:
        self.notes.append(("step", step.step))
        if step.metrics is not None:
            self.losses.append(step.metrics.loss)

    def on_evaluation_start(self, step: int) -> None:
        self.notes.append(("detecting", step))

    def told(self, about: Any) -> None:
        name = getattr(about, "name", getattr(about, "outcome", type(about).__name__))
        self.notes.append((name, about.step))

    on_start = on_detections = on_evaluation = on_checkpoint = on_end = told


def test_an_observer_is_told_what_happens(shapes: Path) -> None:
    diary, config = Diary(), ssdctl.configure(train={"log_every": 1})
    common = {**TINY, "steps": 2, "config": config, "observers": iter([diary])}
    losses, scores = list[float](), list[tuple[int, int | None]]()
    with ssdctl.Trainer(shapes, out="run", **common) as trainer:
        for step in trainer:
            losses.append(step.loss)
            if step.evaluation is not None:
                scores.append((step.step, step.evaluation.about.step))
    assert diary.notes == [
        *[("Start", 0), ("step", 1), ("step", 2), ("detecting", 2), ("Detected", 2)],
        *[("Scored", 2), ("best", 2), ("last", 2), ("finished", 2)],
    ]
    assert losses == diary.losses
    assert scores == [(2, 2)]  # that of the last step comes with it


def test_an_error_of_an_observer_ends_the_run_and_tells_the_others(shapes: Path) -> None:
    class Broken(ssdctl.Observer):
        def on_step(self, step: Step) -> None:
            raise LookupError("mine")

    diary = Diary()
    with pytest.raises(LookupError, match="mine"):
        ssdctl.train(shapes, out="run", steps=2, observers=[diary, Broken()], **TINY)
    assert diary.notes == [("Start", 0), ("step", 1), ("failed", 1)]


def test_evaluating_a_trainer_waits_for_the_score(shapes: Path) -> None:
    config = ssdctl.configure(train={"patience": 1})
    for start in range(3):
        with ssdctl.Trainer(shapes, config=config, out="run", steps=2, **TINY) as trainer:
            if start == 0:
                next(iter(trainer))
            evaluation = trainer.evaluate()
            assert evaluation.about.step == trainer.summary().step == 1
            assert trainer.evaluate() is evaluation  # the weights are the same
            last = trainer.run() if start == 2 else None
    assert [r["step"] for r in last.metrics if r["kind"] == "eval"] == [1, 2]


@pytest.mark.slow(in_ci=True)
def test_a_typed_program_that_uses_every_public_name(shapes: Path) -> None:
    """`mypy` checks it with the package."""
    client = Path(__file__).parents[1] / "typed_client.py"
    used = set(re.findall(r"ssdctl\.(\w+)", client.read_text(encoding="utf-8")))
    assert set(ssdctl.__all__) <= used
    subprocess.run([sys.executable, client, shapes], check=True, stdout=subprocess.DEVNULL)


TWO_RANKS = """
import json, sys
import ssdctl
data, folder = sys.argv[1:]
config = ssdctl.configure(train={"log_every": 1})
run = ssdctl.train(data, out=f"{folder}/run", steps=2, config=config, batch_size=1, warmup="1st",
                   backbone="resnet18", backbone_weights="none", device="cpu", workers=1, progress=False)
evaluation = ssdctl.evaluate(run, device="cpu", workers=1, progress=False)
found = ssdctl.load(run, device="cpu", score=0.02)(f"{data}/val2017/000000000001.jpg")
from ssdctl.distributed import find_ranks
with open(f"{folder}/{find_ranks().rank}.json", "w") as file:
    json.dump([evaluation.metrics, found.to_coco(), repr(run)], file)
"""


def test_two_ranks(shapes: Path, tmp_path: Path) -> None:
    """torchrun of a program, without shared memory, of which containers have little."""
    Path("program.py").write_text(TWO_RANKS)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    if shutil.which("unshare") and not subprocess.run(["unshare", "-m", "true"]).returncode:
        full = "mount -t tmpfs -o size=64k none /dev/shm && head -c 64K /dev/zero > /dev/shm/full"
        command = ["unshare", "-m", "sh", "-c", f'{full}; exec "$@"', "sh", *command]
    subprocess.run([*command, "program.py", str(shapes), str(tmp_path)], check=True)
    first, second = (json.loads((tmp_path / f"{n}.json").read_text()) for n in (0, 1))
    assert first == second
    assert first[0]["AP"] >= 0
    assert first[1]
    assert "2 steps" in first[2]
    evaluation = ssdctl.evaluate(tmp_path / "run", device="cpu", workers=1, progress=False)
    assert evaluation.metrics == pytest.approx(first[0], abs=1e-9)


def test_networks_of_checkpoints(checkpoint: Path, tiny_run: Path) -> None:
    saved = torch.load(checkpoint, weights_only=True)["model"]
    network = ssdctl.SSD300.from_checkpoint(checkpoint)
    assert not network.training
    assert len(network.class_names) == network.num_classes - 1
    for name, value in network.state_dict().items():
        assert torch.equal(value, saved[name]), name
    for folder in (tiny_run, tiny_run / "checkpoints"):
        assert ssdctl.SSD300.from_checkpoint(folder).num_classes == network.num_classes
    with pytest.raises(UsageError, match="no-such-detector"):
        ssdctl.SSD300.from_checkpoint("no-such-detector")
