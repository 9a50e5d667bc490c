"""Random lives of a run folder: trained, killed, damaged, moved, read, and continued.

The oracle is an undisturbed run: as long as nothing that changes what a run computes was changed,
every loss, AP and weight is equal to its. A failure prints the shortest life as commands.
"""

import contextlib
import hashlib
import itertools
import json
import os
import re
import shutil
import tempfile
import zipfile
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from faults import Command, Fault
from helpers import examples, records, seeded, seeds
from hypothesis import Phase, note
from hypothesis import strategies as st
from hypothesis.errors import InvalidArgument
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)

from ssdctl.data.shapes import generate

OPTIONS = (
    "--preset stable-r34 --backbone tiny --backbone-weights none --warmup 1st --log-every 1 "
    "--fp32 --device cpu --optimizer adamw --lr 0.0025 --rank-timeout 20"
)
GLOBAL_BATCH = 2
LENGTH = 8  # steps of the undisturbed run
SIGNALS = ("SIGTERM", "SIGINT", "SIGHUP", "SIGUSR1")
ERRORS = ("ENOSPC", "EDQUOT", "EROFS", "EFBIG")
ranks = st.sampled_from([1, 1, 2])
kills = st.builds(Fault, st.integers(1, 50), st.just("SIGKILL"), ranks.map(lambda n: n - 1))
faults = kills | st.builds(
    Fault, st.integers(1, 160), st.sampled_from(SIGNALS + ERRORS), ranks.map(lambda n: n - 1)
)
readers = st.sampled_from(["evaluate", "all", "report", "runs", "predict", "export"])
often = st.sampled_from(["1st", "2st", "3st", "9st"])
lengths = st.integers(1, LENGTH)


class Settings(NamedTuple):
    """What may differ from start to start."""

    keep: int
    save_every: str
    eval_every: str
    workers: int

    def options(self) -> list[object]:
        names = (f"--{name.replace('_', '-')}" for name in self._fields)
        return list(itertools.chain(*zip(names, self, strict=True)))


changing = st.builds(Settings, st.integers(1, 4), often, often, st.integers(1, 2))


def say(line: str) -> None:
    with contextlib.suppress(InvalidArgument):  # not a random life
        note(line)


class Undisturbed(NamedTuple):
    data: Path
    losses: dict[int, float]
    aps: dict[int, float]
    states: dict[int, str]
    statistics: dict[int, torch.Tensor]


def load(path: Path) -> dict[str, Any] | None:
    """Return the contents of a checkpoint; None if it is damaged."""
    with contextlib.suppress(Exception), zipfile.ZipFile(path) as archive:
        if archive.testzip() is None:
            return torch.load(path, weights_only=True)
    return None


def digest(content: dict[str, Any], count: int) -> str:
    """Return a digest of weights and momenta, and of statistics that are not the ranks' average."""
    model = content["model"].items()
    tensors = [tensor for name, tensor in model if count == 1 or ".running_" not in name]
    for state in content["optimizer"]["state"].values():
        tensors += map(torch.as_tensor, state.values())
    return hashlib.sha256(b"".join(t.numpy().tobytes() for t in tensors)).hexdigest()


def statistics(content: dict[str, Any]) -> torch.Tensor:
    """Return the statistics of batch norm, which are the average of the ranks'."""
    return torch.cat([t.flatten() for n, t in content["model"].items() if ".running_" in n])


def steps(run: Path) -> list[Path]:
    return sorted((run / "checkpoints").glob("step-????????.pt"))


def step_of(path: Path) -> int:
    return int(path.name[5:13])


def files(run: Path) -> dict[Path, bytes]:
    found = (p for p in run.rglob("*") if p.is_file() and p.name not in (".lock", "report.html"))
    return {p: hashlib.sha256(p.read_bytes()).digest() for p in found}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Undisturbed]:
    """Return the undisturbed runs on one rank and on two."""
    folder = tmp_path_factory.mktemp("undisturbed")
    data = folder / "data"
    generate(data, num_train=8, num_val=3, seed=0)
    return {count: undisturbed_run(data, folder / f"run-{count}", count) for count in (1, 2)}


def undisturbed_run(data: Path, run: Path, count: int) -> Undisturbed:
    words = training(data, run, LENGTH, Settings(99, "1st", "1st", 1), count)
    code, text = Command(words, run, run.with_suffix(".log"), ranks=count).wait()
    assert code == 0, text
    contents = {step_of(path): content for path in steps(run) if (content := load(path))}
    return Undisturbed(
        data,
        {r["step"]: r["loss"] for r in records(run, "train")},
        {r["step"]: r["AP"] for r in records(run, "eval")},
        {step: digest(content, count) for step, content in contents.items()},
        {step: statistics(content) for step, content in contents.items()},
    )


def training(data: Path, run: Path, to: int, chosen: Settings, ranks: int) -> list[object]:
    words = ["train", "--data", data, "--out", run, *OPTIONS.split(), "--bs", GLOBAL_BATCH // ranks]
    return [*words, "--steps", to, *chosen.options()]


class Life(RuleBasedStateMachine):
    """The life of one run folder, and what must be true of it after each command."""

    undisturbed_runs: dict[int, Undisturbed]
    about: str

    def __init__(self) -> None:
        super().__init__()
        self.ranks = 1
        self.undisturbed = self.undisturbed_runs[1]
        self.folder = Path(tempfile.mkdtemp(prefix="life-"))
        self.names = (f"{number:02d}" for number in itertools.count())
        self.run = self.folder / next(self.names)
        self.data = shutil.copytree(self.undisturbed.data, self.folder / "data")
        self.own: list[object] = []  # options that change what the run computes
        self.first = 1  # the first step in metrics.jsonl
        self.origin = ""  # the checkpoint of this folder that it went back to
        self.is_exact = True  # whether it computes what the undisturbed run does
        self.gone = set[int]()  # evaluated steps whose weights are nowhere: none is the best
        self.newest = 0  # the newest intact checkpoint's step
        self.damaged = set[str]()  # the files that `damage` damaged
        self.was_reached = False  # whether the last fault was

    def teardown(self) -> None:
        shutil.rmtree(self.folder)

    @initialize(has_links=st.booleans(), count=ranks)
    def begin(self, has_links: bool, count: int) -> None:
        self.has_links, self.ranks = has_links, count
        self.undisturbed = self.undisturbed_runs[count]
        say(self.about)

    # What a user does

    @rule(to=lengths, chosen=changing, fault=st.none() | faults)
    def train(self, to: int, chosen: Settings, fault: Fault | None) -> None:
        described = self.run / "config.toml"
        before = described.read_bytes() if self.newest >= to else b""
        code, text = self.start(self.training(to, chosen), fault).wait()
        self.was_reached = code != 0
        self.check(to, chosen, code, text, fault)
        assert not before or described.read_bytes() == before, "describes what was not trained"

    @precondition(lambda self: self.newest > 0)
    @rule(back=st.integers(0, 3), by=lengths, chosen=changing, fault=st.none() | faults)
    def go_back(self, back: int, by: int, chosen: Settings, fault: Fault | None) -> None:
        """Train again from an earlier checkpoint; the same file again continues."""
        file = [path for path in steps(self.run) if load(path)][-1 - back :][0]
        to = step_of(file) + by
        words = [*self.training(to, chosen), "--resume", file]
        if file.name != self.origin:
            self.newest, self.origin = step_of(file), file.name
            self.forget()
        result = self.start(words, fault).wait()
        self.was_reached = result[0] != 0
        if fault is not None and self.was_reached:
            self.newest = min(self.newest, self.newest_intact())
            result = self.start(words).wait()
        self.check(to, chosen, *result, None)
        self.check(to, chosen, *self.start(words).wait(), None)

    @precondition(lambda self: self.newest > 0)
    @rule(to=lengths, chosen=changing, has_other_batch=st.booleans())
    def begin_elsewhere(self, to: int, chosen: Settings, has_other_batch: bool) -> None:
        """Continue in a new folder from a checkpoint of this one."""
        file = [path for path in steps(self.run) if load(path)][-1]
        if has_other_batch:
            is_larger = "--accumulate" not in self.own
            self.own = [*["--accumulate", 2] * is_larger, "--resume-changed"]
            code, text = self.start(self.training(to, chosen)).wait()
            assert (code, "the global batch was" in text) == (2, True), text
            self.is_exact = False
            seen, batch = ((load(file) or {})[key] for key in ("samples_seen", "global_batch"))
            self.newest = seen // (2 * batch if is_larger else batch // 2)
        self.run = self.folder / next(self.names)
        to += self.newest
        words = [*self.training(to, chosen), "--resume", file]
        self.first, self.gone, self.origin = self.newest + 1, set(), ""
        for _ in range(2):
            self.check(to, chosen, *self.start(words).wait(), None)
            file.unlink(missing_ok=True)

    @rule()
    def change_ranks(self) -> None:
        """The global batch is the same; the statistics of batch norm and the rounding are not."""
        self.ranks = 3 - self.ranks
        self.is_exact = False

    @precondition(lambda self: len([p for p in steps(self.run) if load(p)]) > 1)
    @rule(how=st.sampled_from(["delete", "cut", "flip"]))
    def damage(self, how: str) -> None:
        path = steps(self.run)[-1]
        say(f"{how} {path}")
        if how == "delete":
            path.unlink()
        else:
            with path.open("r+b") as file:
                file.truncate(file.seek(0, 2) // 2) if how == "cut" else file.seek(70_000)
                file.write(b"\xff\x00\xff") if how == "flip" else None
        self.newest = self.newest_intact()
        self.forget()
        self.damaged |= self.damaged_files()

    @rule(name=st.sampled_from(["best.pt", "last.pt"]))
    def remove(self, name: str) -> None:
        say(f"rm {self.run}/checkpoints/{name}")
        (self.run / "checkpoints" / name).unlink(missing_ok=True)
        self.forget()

    @precondition(lambda self: self.run.exists())
    @rule(is_copied=st.booleans())
    def move(self, is_copied: bool) -> None:
        target = self.folder / next(self.names)
        say(f"{'cp -r' if is_copied else 'mv'} {self.run} {target}")
        (shutil.copytree if is_copied else shutil.move)(self.run, target)
        self.run = target

    @rule()
    def move_data(self) -> None:
        target = self.folder / f"data-{next(self.names)}"
        say(f"mv {self.data} {target}")
        self.data = self.data.rename(target)

    @rule(encoding=st.sampled_from(["jpeg", "raw"]))
    def prepare(self, encoding: str) -> None:
        words = ["prepare", "--data", self.data, "--encoding", encoding, "--force"]
        code, text = self.start(words).wait()
        assert code == 0, text

    @precondition(lambda self: self.is_readable())
    @rule(reader=readers)
    def read(self, reader: str) -> None:
        before = files(self.run)
        code, text = self.start(self.reading(reader)).wait()
        assert code == 0, text
        assert files(self.run) == before, "a command that reads changed the run"

    @precondition(lambda self: self.is_readable())
    @rule(reader=readers, to=lengths, chosen=changing)
    def read_meanwhile(self, reader: str, to: int, chosen: Settings) -> None:
        training, reading = self.start(self.training(to, chosen)), self.start(self.reading(reader))
        code, text = reading.wait()
        assert code == 0, text
        self.check(to, chosen, *training.wait(), None)

    @rule(to=lengths, chosen=changing)
    def train_twice_at_once(self, to: int, chosen: Settings) -> None:
        """The second one waits for the first."""
        both = [self.start(self.training(to, chosen)) for _ in range(2)]
        for code, text in [command.wait() for command in both]:
            assert code in (0, 2), text
            assert code == 0 or "another ssdctl process" in text
        self.check(to, chosen, 0, "", None)

    # How a command is started

    def training(self, to: int, chosen: Settings) -> list[object]:
        return [*training(self.data, self.run, to, chosen, self.ranks), *self.own]

    def reading(self, reader: str) -> list[object]:
        run, out = self.run, self.folder / next(self.names)
        return {
            "evaluate": ["evaluate", run, "--data", self.data],
            "all": ["evaluate", run, "--all", "--data", self.data],
            "report": ["report", run],
            "runs": ["runs", run.parent],
            "predict": ["predict", run, self.data / "val2017", "--out", out],
            "export": ["export", run, "--format", "safetensors", "--out", f"{out}.safetensors"],
        }[reader]

    def start(self, words: list[object], fault: Fault | None = None) -> Command:
        log = self.folder / f"log-{next(self.names)}"
        count = self.ranks if words[0] == "train" else 1
        command = Command(words, self.run, log, fault=fault, has_links=self.has_links, ranks=count)
        say(command.line)
        return command

    # What must be true

    def is_readable(self) -> bool:
        """Return whether the user left the links, and all checkpoints intact."""
        folder = self.run / "checkpoints"
        has_links = any((folder / name).exists() for name in ("best.pt", "last.pt"))
        return has_links and not self.damaged_files()

    def damaged_files(self) -> set[str]:
        return {p.name for p in (self.run / "checkpoints").glob("*.pt") if load(p) is None}

    def best(self) -> tuple[float, str] | None:
        """Return the highest AP of the records, and a digest of best.pt; None without them."""
        path, scores = self.run / "checkpoints/best.pt", records(self.run, "eval")
        content = load(path) if path.exists() and scores else None
        return content and (max(r["AP"] for r in scores), digest(content, 1))

    def forget(self) -> None:
        """Note the steps that cannot be the best one after `newest`, from which the run goes on."""
        best = load(self.run / "checkpoints/best.pt")
        if best is None or best["step"] > self.newest:
            left = {step_of(path) for path in steps(self.run) if load(path)}
            self.gone |= {r["step"] for r in records(self.run, "eval")} - left
        self.gone = {step for step in self.gone if step <= self.newest}

    def newest_intact(self) -> int:
        links = [self.run / "checkpoints" / name for name in ("last.pt", "best.pt")]
        found = (content for path in steps(self.run)[::-1] or links if (content := load(path)))
        return next((int(content["step"]) for content in found), 0)

    def check(self, to: int, chosen: Settings, code: int, text: str, fault: Fault | None) -> None:
        assert "Traceback" not in text, text
        expected = {0}
        if fault is not None:
            expected.add(-9 if fault.name == "SIGKILL" else 75 if fault.is_signal else 6)
        assert code in expected, f"exit code {code}, not in {expected}: {text}"
        before, self.newest = self.newest, self.newest_intact()
        assert self.newest >= before, f"was at step {before}, is at {self.newest}"
        damaged = self.damaged_files() - self.damaged
        assert not damaged, f"damaged: {damaged}"
        if code == -9:
            return
        left = list(self.run.rglob("*.tmp"))
        assert not left, f"left: {left}"
        if code == 6:
            assert any(word in text for word in ("no space left", "no permission", "ulimit -f")), (
                text
            )
            return
        if code == 0:
            end = max(to, before)
            assert self.newest == end
            assert not text or f"{self.run}: {self.newest} steps" in text, text
        elif "before the first step" in text:
            return
        else:
            stopped = re.search(r"at step (\d+)/(\d+); progress saved in (\S+)", text)
            assert stopped, text
            assert stopped.groups() == (str(self.newest), str(to), str(self.run))
        self.check_records(is_at_its_end=code == 0 and self.newest == to)
        self.check_checkpoints(chosen.keep)

    def check_records(self, *, is_at_its_end: bool) -> None:
        trained = [r["step"] for r in records(self.run, "train")]
        assert trained == list(range(self.first, self.newest + 1))
        scored = [r["step"] for r in records(self.run, "eval")]
        assert len(scored) == len(set(scored)), f"evaluated twice: {scored}"
        assert self.newest in scored or not is_at_its_end, "its end is not evaluated"
        if self.is_exact:
            for record in records(self.run, "train"):
                assert record["loss"] == self.undisturbed.losses.get(record["step"], record["loss"])
            for record in records(self.run, "eval"):
                expected = self.undisturbed.aps.get(record["step"], record["AP"])
                rounding = 0 if self.ranks == 1 else 1e-3  # statistics are averaged when it saves
                assert record["AP"] == pytest.approx(expected, rel=0, abs=rounding)

    def check_checkpoints(self, keep: int) -> None:
        folder = self.run / "checkpoints"
        kept = [*steps(self.run), *folder.glob("*.pt.retired")]
        assert len(kept) <= keep, f"--keep {keep}: {sorted(p.name for p in kept)}"
        last = load(folder / "last.pt")
        assert last["step"] == self.newest, "last.pt is not the newest"
        if self.is_exact and self.newest in self.undisturbed.states:
            state = digest(last, self.ranks)
            assert state == self.undisturbed.states[self.newest], "other weights"
            expected = self.undisturbed.statistics[self.newest]
            torch.testing.assert_close(statistics(last), expected, rtol=1e-4, atol=1e-5)
        evaluations = [
            r for r in records(self.run, "eval") if r["AP"] >= 0 and r["step"] not in self.gone
        ]
        if not evaluations:
            return
        step = max(evaluations, key=lambda r: r["AP"])["step"]
        best = folder / "best.pt"
        assert best.exists(), "no best.pt"
        if self.is_exact:
            content = load(best)
            assert content is not None, "best.pt is damaged"
            assert content["step"] == step, f"best is {step}, best.pt is {content['step']}"
            details = json.loads((self.run / "evaluation.json").read_text())
            assert details["about"]["step"] == step


def live(
    undisturbed: dict[int, Undisturbed], number: int | None, lives: int, commands: int
) -> None:
    """Live some lives; without a seed always the same."""
    machine = type("Life", (Life,), {"undisturbed_runs": undisturbed, "about": f"SEED={number}"})
    how = examples(lives, number, Phase.shrink, stateful_step_count=commands)
    run_state_machine_as_test(seeded(machine, number), settings=how)


@pytest.mark.slow(in_ci=True)
@pytest.mark.parametrize("goes_back", [False, True])
def test_any_operation_may_be_last(undisturbed: dict[int, Undisturbed], goes_back: bool) -> None:
    """Of steps with their evaluations and saves, and of going back to a step before the best."""
    chosen = Settings(9, "1st", "1st", 1)
    kind = type("Life", (Life,), {"undisturbed_runs": undisturbed, "about": ""})
    first = kind()
    first.begin(True, 1)
    first.train(4, chosen, None)
    for number in itertools.count(1):
        life = kind()
        life.begin(True, 1)
        life.newest = 4
        shutil.copytree(first.run, life.run, copy_function=os.link)
        fault = Fault(number, "SIGKILL")
        life.go_back(2, 1, chosen, fault) if goes_back else life.train(5, chosen, fault)
        was_reached = life.was_reached
        if not goes_back:
            life.train(5, chosen, None)
        life.teardown()
        if not was_reached:
            break
    first.teardown()
    assert number > 15


def test_lives(undisturbed: dict[int, Undisturbed]) -> None:
    live(undisturbed, None, 5, 5)


@pytest.mark.slow
def test_many_lives(undisturbed: dict[int, Undisturbed]) -> None:
    for number in seeds():
        live(undisturbed, number, 5, 12)
