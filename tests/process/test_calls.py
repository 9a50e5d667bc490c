"""A process with the library in it: random public calls, in threads, in the user's process group.

After each call the process's own state is as before, and the result is that of the same call in a
fresh process. A failure prints the shortest program.
"""

import itertools
import re
import shutil
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest
from faults import CONTEXT
from global_state import FOR_RANKS, SETUP, Line, Lived, live
from helpers import check_examples, seeds
from hypothesis import strategies as st

from ssdctl.data.shapes import generate

DEADLINE_S = 120.0

# Each call has a name of its own for what it writes: OUT.
TRAINING = """
result = ssdctl.train("shapes", out="OUT", steps=2, **TINY)
result = ssdctl.train("shapes", out="OUT", steps=1, config=ssdctl.configure(train={"deterministic": True}), **TINY)
result = ssdctl.train("shapes", out="OUT", steps=2, init="run", config=ssdctl.configure(train={"ema": 0.9, "augment": "ssd"}), **TINY)
result = [ssdctl.train("shapes", out="OUT", steps=n, **TINY) for n in (1, 2)]
result = [[s.loss for s in ssdctl.Trainer("shapes", out=f"OUT-{n}", steps=3, config=ssdctl.configure(train={"ema": 0.9, "eval_every": n}), **TINY)] for n in ("1st", "3st")]; assert result[0] == result[1]
result = [s.loss for s in islice(ssdctl.Trainer("shapes", out="OUT", steps=3, **TINY), 2)]
trainer = ssdctl.Trainer("shapes", out="OUT", steps=3, **TINY); result = next(iter(trainer)).loss; del trainer
with ssdctl.Trainer("shapes", out="OUT", steps=3, **TINY) as trainer: result = [next(iter(trainer)).loss, trainer.evaluate(), trainer.save(), trainer.model]
trainer = ssdctl.Trainer("shapes", out="OUT", steps=3, **TINY); result = next(iter(trainer)).loss; trainer.close(); trainer.close()
a, b = (ssdctl.Trainer("shapes", out=f"OUT-{n}", steps=2, config=ssdctl.configure(train={"deterministic": True}), **TINY) for n in "ab"); result = [(x.loss, y.loss) for x, y in zip(a, b)]; a.close(); b.close()
a, b = (ssdctl.Trainer("shapes", out=f"OUT-{n}", steps=2, **TINY) for n in "ab"); a.open(); b.open(); a.close(); result = next(iter(b)).loss; b.close()
"""
READING = """
result = ssdctl.load("run", device="cpu", score=0.01)("photo.jpg")
result = ssdctl.load("run", device="cpu", score=0.1, tile=160, max_detections=9)(["photo.jpg"] * 2)
result = next(ssdctl.load("run", device="cpu", score=0.01).predict_iter(["photo.jpg"] * 9, batch_size=2))
result = list(ssdctl.load("run", device="cpu", score=0.01).predict_iter(["photo.jpg"] * 3))
result = ssdctl.load("run", device="cpu", precision="bf16").model
result = ssdctl.load("run", device="cpu", score=0.01)("photo.jpg"); result.save("OUT.png"); result.to_coco(image_id=1)
result = ssdctl.SSD300.from_checkpoint("run")
with torch.autocast("cpu", enabled=False): result = ssdctl.SSD300.from_checkpoint("run").loss(*OBJECT)
result = ssdctl.evaluate("run", device="cpu", detections="OUT.json")
result = ssdctl.evaluate("run", "shapes", split="train", device="cpu", workers=2, batch_size=3, report="OUT")
result = ssdctl.evaluate("rows.json", "shapes")
result = ssdctl.prepare("shapes", store="OUT", jobs=2, force=True).splits[0].images
result = [ssdctl.Dataset("shapes", "val")[n] for n in (0, -1)]
result = next(iter(ssdctl.Trainer("shapes", out="OUT", steps=3, **TINY))).loss; ssdctl.train("shapes", out="OUT", steps=2, **TINY)
result = ssdctl.export("run", "OUT.safetensors", format="safetensors")["format"]
result = [ssdctl.Run("run"), ssdctl.Run("run").best_metrics, ssdctl.Run("run").plot().size]
result = ssdctl.report("run", out="OUT.html").is_file()
result = [ssdctl.default_boxes(), str(ssdctl.configure(train={"lr": 1e-3}).train)]
"""
FAILING = """
ssdctl.train("nowhere", out="OUT", **TINY)
ssdctl.train("broken", out="OUT", **TINY)
ssdctl.train("shapes", out="OUT", steps=2, init="photo.jpg", **TINY)
ssdctl.train("shapes", out="photo.jpg", steps=2, **TINY)
ssdctl.train("shapes", out="OUT", steps=2, observers=[Broken()], **TINY)
ssdctl.train("shapes", out="OUT", steps=2, observers=Broken(), **TINY)
ssdctl.Trainer("shapes", out="OUT", **TINY).summary()
with ssdctl.Trainer("shapes", out="OUT", steps=3, config=ssdctl.configure(train={"deterministic": True}), **TINY) as trainer: next(iter(trainer)), 1 / 0
ssdctl.load("none.pt", device="cpu")
ssdctl.load("photo.jpg", device="cpu")
ssdctl.load("run", device="cpu")(b"no image")
list(ssdctl.load("run", device="cpu").predict_iter(["photo.jpg", "none.jpg"]))
ssdctl.evaluate("run", "nowhere", device="cpu")
ssdctl.Dataset("shapes", "test")
ssdctl.prepare("run")
ssdctl.export("run", "OUT.pt2", format="pt2", nms="onnx")
ssdctl.report("shapes", out="OUT.html")
"""
# A signal stops what trains in the main thread; the handlers of the program stay.
STOPPED = """
ssdctl.train("shapes", out="OUT", steps=9, observers=[Stopping(signal.SIGTERM)], **TINY)
ssdctl.train("shapes", out="OUT", steps=9, observers=[Stopping(signal.SIGINT, signal.SIGINT)], **TINY)
before = threading.active_count(); trainer = ssdctl.Trainer("shapes", out="OUT", steps=9, observers=[Stopping(signal.SIGHUP)], **TINY); result = next(iter(trainer)).loss; trainer.close(); assert threading.active_count() == before
a, b = (ssdctl.Trainer("shapes", out=f"OUT-{n}", steps=9, observers=[Stopping(signal.SIGTERM)] * (n == "b"), **TINY) for n in "ab"); x, y = iter(a), iter(b); next(x), next(y); a.close(); list(y)
"""
# What programs do with their own state; the calls after it give the same results.
OWN = """
torch.manual_seed(3), np.random.seed(3)
np.seterr(all="raise")
torch.set_default_dtype(torch.float64)
torch.set_default_device("meta")
torch.set_grad_enabled(False)
torch.kept = torch.inference_mode(); torch.kept.__enter__()
torch.autocast("cpu", torch.bfloat16).__enter__()
torch.use_deterministic_algorithms(True)
torch.multiprocessing.set_start_method("spawn", force=True)
warnings.simplefilter("error")
signal.signal(signal.SIGTERM, lambda *_: None), signal.signal(signal.SIGINT, signal.SIG_IGN)
os.environ.update(OMP_NUM_THREADS="2", MASTER_ADDR="nowhere", SSDCTL_TRAIN__SEED="7")
gc.disable()
threading.Thread(target=lambda: [torch.rand(9) for _ in iter(lambda: time.sleep(0.001), 1)], daemon=True).start()
"""

# Calls that the ranks make together. One of them is given something else, spoils a file, or fails inside.
TOGETHER = """
ssdctl.train("shapes", out="OUT", **{**TINY, "steps": 3, **given}); result = done("OUT")
ssdctl.train("shapes", out="OUT", **{**TINY, "steps": 3, "init": "run", "config": ssdctl.configure(train={"fold": "1/2", "eval_every": "1st", "sync_bn": True}), **given}); result = done("OUT")
with ssdctl.Trainer("shapes", out="OUT", **{**TINY, "steps": 3, **given}) as trainer: [inside(trainer) for _ in trainer]\\nresult = done("OUT")
trainer = ssdctl.Trainer("shapes", out="OUT", **{**TINY, "steps": 3, **given}); trainer.open(); [(inside(trainer), trainer.save(), trainer.evaluate()) for _ in trainer]; result = done("OUT")
result = ssdctl.evaluate("run", "shapes", **{"device": "cpu", **given})
result = ssdctl.evaluate(network, "shapes", **{"device": "cpu", "detections": "OUT.json", "report": "OUT", **given})
"""
FILES = """
shapes shapes/annotations shapes/annotations/instances_train2017.json shapes/annotations/instances_val2017.json
shapes/train2017 shapes/val2017 shapes/val2017/000000000001.jpg shapes/prepared run run/checkpoints/best.pt
OUT OUT/checkpoints OUT/metrics.jsonl OUT/config.toml OUT/logs OUT/.lock OUT.json OUT/report.html
"""
OF_EVALUATE = """
batch_size=3; batch_size=0; device="cuda"; device="?"; precision="bf16"; workers=2; split="train"; split="test"; limit=1
score_threshold=0.9; nms_iou=0.9; config="gone.toml"; detections="shapes"; report="photo.jpg"; config=configured(tile=160)
"""
OF_TRAIN = """
batch_size=3; batch_size=0; batch_size="auto"; device="cuda"; device="?"; precision="bf16"; workers=2; config="gone.toml"
lr=0.1; seed=1; steps=2; epochs=1; backbone="resnet18"; backbone="?"; backbone_weights="none.pth"; init="run"
init="gone.pt"; init="shapes"; warmup="9ep"; out="photo.jpg"; preset="?"; optimizer="sgd"; observers=[1]
"""
TABLE = """
deterministic=True; rank_timeout=9.0; eval_every="1st"; eval_at=[0.5]; sync_bn=True; ema=0.9; augment="ssd-zoom"
accumulate=2; fold="1/2"; fold="9/9"; keep=1; resume="never"; resume="run"; save_every="1st"; limit_train=2; overfit=1
background=0.5; log_every=2; mllog="shapes"; tracker=["tensorboard"]; tracker=["?"]; freeze=2; freeze_norm=True
target_ap=0.001; patience=1; profile="1,2"; pipeline="dali"; fake_data=True; tf32=True; on_nonfinite="stop"; tile=160
"""
RAISES = """
1 / 0
fail(KeyboardInterrupt())
fail(MemoryError())
fail(ssdctl.errors.DataError("own"))
"""
CLOSED = "UsageError: OUT: this trainer is closed"
# How the errors begin that are the program's own.
OF_PROGRAM = ("Traceback", "KeyboardInterrupt", "ZeroDivisionError", "DataError: own", CLOSED)
SENT = [f"os.kill(os.getpid(), signal.SIG{name})" for name in ("TERM", "HUP", "INT")]
HOOKS = "start step epoch evaluation_start detections evaluation checkpoint end"


def calls(*texts: str) -> list[str]:
    return [line.replace("\\n", "\n") for text in texts for line in text.strip().splitlines()]


QUICK = [c for c in calls(TRAINING, READING, FAILING, STOPPED) if "deterministic" not in c]
usual = st.sampled_from(calls(TRAINING, READING, FAILING))
alone = usual | st.sampled_from(calls(STOPPED))
own = st.sampled_from([f"# The program's own:\n{line}" for line in calls(OWN)])


def split_at_semicolons(texts: str) -> list[str]:
    return [text for line in calls(texts) for text in line.split("; ")]


def mistakes(call: str) -> st.SearchStrategy[str]:
    """Return what one rank does before the call, which may fail then."""
    is_training, acts = not call.startswith("result = ssdctl.evaluate"), [*calls(RAISES), *SENT]
    own = split_at_semicolons(OF_TRAIN if is_training else OF_EVALUATE)
    own += [f"config=configured({text})" for text in split_at_semicolons(TABLE) if is_training]
    files = [name for name in FILES.split() if "network" not in call or "run" not in name]
    relabeled = ["boxes", "ids"] if is_training else ["ids"]  # boxes are the first rank's
    spoiled = st.sampled_from(files), st.sampled_from(["gone", "text", "folder", "half"])
    found = st.sampled_from([f"given = dict({text})" for text in own])
    found |= st.builds('spoil("{}", "{}")'.format, *spoiled)
    found |= st.sampled_from([f'relabel("{what}")' for what in relabeled])
    if is_training:
        hooks = st.sampled_from(HOOKS.split()), st.sampled_from(acts)
        found |= st.builds('given = dict(observers=[At("{}", lambda: {})])'.format, *hooks)
    if "inside" in call:
        acts += ["trainer.close()", 'spoil("OUT/checkpoints", "text")', 'spoil("OUT", "gone")']
        found |= st.sampled_from([f"inside = lambda trainer: {act}" for act in acts])
    return found


Failing = tuple[str, int, str]  # a call, a rank, and what this rank does before the call
failing = st.sampled_from(calls(TOGETHER)).flatmap(
    lambda call: st.tuples(st.just(call), st.integers(0, 1), mistakes(call))
)
lines: st.SearchStrategy[Line] = st.tuples(alone) | st.tuples(own) | st.tuples(usual, usual)
programs = st.lists(lines, min_size=2, max_size=6)


class World(NamedTuple):
    folder: Path  # the program's, copied for each
    # The result of a call on a rank of so many. A fresh process decides if two differ.
    expected: dict[tuple[str, int, int], Any]
    hanging: set[str]  # programs that hypothesis repeats


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    folder = tmp_path_factory.mktemp("calls") / "program"
    generate(folder / "shapes", num_train=8, num_val=3, seed=0)
    shutil.copytree(folder / "shapes", folder / "broken")
    (folder / "broken/annotations/instances_train2017.json").write_text("[")
    (folder / "tmp").mkdir()
    shutil.copy(folder / "shapes/val2017/000000000001.jpg", folder / "photo.jpg")
    made = World(folder, {}, set())
    lives(made, [(text,) for text in calls(
        'ssdctl.prepare("shapes")\nssdctl.train("shapes", out="run", steps=3, **TINY)\n'
        'ssdctl.evaluate("run", device="cpu", detections="rows.json")'
    )], copies=0)  # fmt: skip
    return made


def lives(world: World, lines: Sequence[Line], size: int = 0, copies: int = 1) -> list[Lived]:
    """Run a program in a fork, or in `size` forks that form a group; return what happened.

    Args:
        copies: Folders of the program that the ranks use: none for the world's own.
    """
    text = program(lines, size)
    assert text not in world.hanging, f"hangs: {text}"
    root = Path(tempfile.mkdtemp(prefix="program-"))
    folders = [
        shutil.copytree(world.folder, root / "program" / str(n), symlinks=True)
        for n in range(copies)
    ] or [world.folder]
    pairs, end = [], time.monotonic() + DEADLINE_S
    for rank in range(max(size, 1)):
        folder = folders[rank % len(folders)]
        receiver, sender = CONTEXT.Pipe(duplex=False)
        group = (rank, size) if size else None
        process = CONTEXT.Process(target=live, args=(lines, folder, sender, group), daemon=True)
        process.start()
        sender.close()
        pairs.append((process, receiver))
    try:
        answers = [
            r.recv_bytes() if r.poll(max(end - time.monotonic(), 0)) else b"" for _, r in pairs
        ]
        if not all(answers):
            world.hanging.add(text)
        assert all(answers), f"hangs: {text}"
        return [x for answer in answers for x in msgspec.json.decode(answer, type=list[Lived])]
    finally:
        for process, _ in pairs:
            process.join(5)
            process.kill()
        shutil.rmtree(root)


def program(lines: Sequence[Line], size: int) -> str:
    """Return the text of a program."""
    text = SETUP + FOR_RANKS * bool(size)
    for line in lines:
        if len(line) == 1:
            text += f"{line[0]}\n"
            continue
        text += "threads = [threading.Thread(target=exec, args=(text, globals())) for text in (\n"
        text += "".join(f"    {call!r},\n" for call in line)
        text += ")]\nany(thread.start() for thread in threads), any(t.join() for t in threads)\n"
    return text + f"# in each of {size} ranks of a process group\n" * bool(size)


def numbered(lines: Sequence[Line]) -> list[Line]:
    """Give each call a name of its own for what it writes."""
    names = (f"out-{number}" for number in itertools.count())
    return [tuple(text.replace("OUT", next(names)) for text in line) for line in lines]


def check(world: World, lines: Sequence[Line], size: int = 0, copies: int = 1) -> None:
    lived = lives(world, numbered(lines), size, copies)
    for number, happened in enumerate(lived):
        rank, place = divmod(number, len(lines))
        line = lines[place]
        where = f"{program(numbered(lines), size)}\n{happened.line}"
        assert not happened.changed, f"{where}: changed {happened.changed}"
        for text, result in zip(line, happened.results, strict=True):
            assert "Traceback" not in str(result), f"{where}: {result}"
            if not text.startswith("#") and "torch's default type" not in str(result):
                check_result(world, text, size, rank, result, where)


def check_result(
    world: World, text: str, size: int, rank: int, result: Any, where: str, copies: int = 1
) -> None:
    known = world.expected.setdefault((text, size, rank), result)
    if result != known:
        fresh = lives(world, numbered([(text,)]), size, copies)[rank].results[0]
        assert result == fresh, f"{where}: {result}, in a fresh process {fresh}"
        assert known == fresh, f"{text}: {known} in an earlier program, not {fresh}"


def check_failing(world: World, programs: Sequence[Failing], copies: int) -> None:
    """One of two ranks fails in each call; then all is repaired, and both make the call again."""
    texts, wait = list[str](), "torch.distributed.barrier()"
    programs = [p for p in programs if copies > 1 or "relabel" not in p[2]]
    for number, (call, rank, act) in enumerate(programs):
        call, act = (text.replace("OUT", f"out-{number}") for text in (call, act))
        texts += [f"if rank == {rank}: {act}\n{wait}\n{call}", f"#\n{wait}\nrepair()\n{wait}", call]
    lived = lives(world, [(text,) for text in texts], 2, copies)
    for place, (call, rank, act) in enumerate(programs):
        where = f"folders: {copies}\n{program([(t,) for t in texts[: 3 * place + 3]], 2)}"
        of_ranks = [lived[n * len(texts) + 3 * place :][:3] for n in (0, 1)]
        own, other = (of_ranks[n][0].results[0] for n in (rank, 1 - rank))
        is_all_told = is_told(own, other, rank) and ("relabel" not in act or isinstance(own, str))
        assert is_all_told, f"{where}: {own}\non the other rank: {other}"
        for n, (failed, _, again) in enumerate(of_ranks):
            changed = {**failed.changed, **again.changed}
            assert not changed, f"{where}: changed {changed}"
            for lived_call in (again, failed)[: 1 + isinstance(own, list)]:  # an evaluation
                check_result(world, call, 2, n, lived_call.results[0], where, copies=2)


def is_told(own: Any, other: Any, rank: int) -> bool:
    """Return whether the other rank's result fits that of the rank that may have failed."""
    errors = [of_one_rank(text) for text in (own, other) if isinstance(text, str)]
    if len(errors) == 2 and not errors[0].startswith(OF_PROGRAM):
        return errors[0] == errors[1]
    # Of the program; or the rank left.
    return not errors or (isinstance(other, str) and (other == own or f"rank {rank}" in other))


def of_one_rank(text: str) -> str:
    """Return an error without the folder of the rank, and without the signal that only it got."""
    return re.sub(r"\S*/program/\d", ".", re.sub("by (another rank|SIG[A-Z]+)", "", text))


def run_programs(world: World, number: int | None, count: int, size: int = 0) -> None:
    def test(lines: list[Line]) -> None:
        check(world, lines, size)

    single = st.lists(st.tuples(usual), min_size=2, max_size=4)
    drawn = single if size else programs
    check_examples(test, count, number, shrinks=number is not None, lines=drawn)


def test_calls_one_after_the_other(world: World) -> None:
    modes = [f"# The program's own:\n{line}" for line in calls(OWN) if "__enter__" in line]
    trained_and_read = QUICK[0], calls(READING)[0]
    texts = [*QUICK, *modes, *trained_and_read]
    check(world, [*((text,) for text in texts), (QUICK[0], QUICK[0])])


def run_failing(world: World, number: int | None, count: int) -> None:
    def test(programs: list[Failing], copies: int) -> None:
        check_failing(world, programs, copies)

    drawn = st.lists(failing, min_size=8, max_size=12, unique_by=lambda f: (f[0][:30], f[2][:18]))
    given = {"programs": drawn, "copies": st.integers(1, 2)}
    check_examples(test, count, number, shrinks=number is not None, **given)


def test_a_rank_fails(world: World) -> None:
    run_failing(world, None, 1)
    act = 'given = dict(observers=[At("detections", lambda: 1 / 0)])'
    check_failing(world, [(calls(TOGETHER)[1], 0, act)], 1)  # the other exchanges statistics
    train, evaluate = calls(TOGETHER)[0], calls(TOGETHER)[4]
    check_failing(world, [(train, 1, 'relabel("boxes")'), (evaluate, 1, 'relabel("ids")')], 2)


def test_programs(world: World) -> None:
    run_programs(world, None, 2)


@pytest.mark.slow
def test_many_programs(world: World) -> None:
    for number in seeds():
        run_programs(world, number, 8)
        run_programs(world, number, 2, size=2)
        run_failing(world, number, 4)
