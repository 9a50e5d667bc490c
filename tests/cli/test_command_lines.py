"""Random command lines, drawn from the table of settings: values and sources, errors, plans, hints.

Each option has values that are valid or not by its type, bounds and choices, and may be written as
an option, one of its aliases, `--set`, a variable or a line of a config file. A failure prints the
shortest line that fails, to be typed in a shell.
"""

import contextlib
import inspect
import json
import re
import shlex
import shutil
import sys
import typing
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import jsonschema
import msgspec
import pytest
from conftest import TINY_RUN, Result, budgets, check_all, run_cli
from hypothesis import note
from hypothesis import strategies as st
from typer.models import ArgumentInfo

from ssdctl.cli import command
from ssdctl.cli.help import app
from ssdctl.cli.main import click_root
from ssdctl.cli.option_aliases import find_row
from ssdctl.config.fields import AUGMENTATION_LISTS
from ssdctl.config.render import json_schema, toml_value
from ssdctl.config.settings import TABLES, Setting, all_settings, other_programs, plain_type, select
from ssdctl.files import parse_toml
from ssdctl.training.description import facts
from ssdctl.training.trainer import Trainer

INVALID = object()
LAYERS = ("file", "variable", "--set", "option")  # a later one overrides those before it
FILE = "my config.toml"
# Settings with rules that involve others, and the forms of a warm-up that are refused.
CONFLICTING = {
    *("train.decay_epochs", "train.lr_decay", "train.augment", "train.pipeline", "train.init"),
    *("train.resume", "train.profile", "train.preset", "train.warmup"),
    *("train.fold", "train.group"),
    *("model.backbone", "model.weights", "model.extra_norm"),
}
NAMES = ["a b", "it's", "$(touch x)", "-x", "a;b", "é", "x=y", "[a]", "#c", "~", "*", "a'b\"c", "%"]
WORDS = st.sampled_from(NAMES) | st.text("ab/._- $'\"=#\\é\U0001f600", min_size=1, max_size=9)
PLAIN = WORDS.filter(
    lambda w: w == w.strip() != "--" and w[0] + w[-1] != '""' and w not in ("0", "0,0")
)


class Value(NamedTuple):
    text: str
    value: Any  # as `config show --json` prints it, or INVALID


def numbers(kind: Any, *, is_int: bool) -> st.SearchStrategy[Value]:
    """Return numbers at, within and beyond the bounds of a type, and text that is none."""
    unit = 1 if is_int else 1e-6
    low = kind.ge if kind.ge is not None else None if kind.gt is None else kind.gt + unit
    high = kind.le if kind.le is not None else None if kind.lt is None else kind.lt - unit
    low, high = (-(10**6) if low is None else low), (10**6 if high is None else high)
    within: Any = st.integers(low, high) if is_int else st.floats(low, min(high, 1e9))
    inside = (st.sampled_from([low, high]) | within).map(
        lambda n: Value(str(n) if is_int else repr(n), n)
    )
    beyond = [low - unit] * (low > -(10**6)) + [high + unit] * (high < 10**6)
    wrong = [*map(str, beyond), "x", "1.5x", "nan", "inf", "1e308", "1e400", *["1.5"] * is_int]
    return inside | st.sampled_from(wrong).map(lambda text: Value(text, INVALID))


def values(setting: Setting, kind: Any = None) -> st.SearchStrategy[Value]:
    """Return texts for a setting, with the value that each means."""
    info = msgspec.inspect
    kind = info.type_info(setting.type) if kind is None else kind
    if isinstance(kind, info.Metadata):
        return values(setting, kind.type)
    if setting.path == "train.augment":
        names = [Value(name, name) for name in (*AUGMENTATION_LISTS, "flip", "crop,color")]
        return st.sampled_from([*names, Value("rotate", INVALID)])
    if setting.path == "data.tile":
        sizes = [Value(text, INVALID) for text in ("-1", "1", "31", "x", "1.5")]
        return st.sampled_from([*sizes, Value("0", 0), Value("32", 32), Value("640", 640)])
    if isinstance(kind, info.UnionType):
        kinds = [part for part in kind.types if not isinstance(part, info.NoneType)]
        parts = [values(setting, part) for part in kinds]
        # What one part refuses, another may accept: `auto` is no number.
        return st.one_of(parts) if len(parts) == 1 else st.one_of(parts).filter(
            lambda value: value.text != "auto" or value.value is not INVALID
        )  # fmt: skip
    if isinstance(kind, (info.IntType, info.FloatType)):
        return numbers(kind, is_int=isinstance(kind, info.IntType))
    if isinstance(kind, info.BoolType):
        return st.sampled_from(
            [Value("true", True), Value("false", False), Value("maybe", INVALID)]
        )
    if isinstance(kind, info.LiteralType):
        wrong = [Value(str(kind.values[0]) + "x", INVALID), Value("", INVALID)]
        has_none = setting.default is None
        wrong = wrong[:1] if has_none else wrong
        return st.sampled_from([*(Value(str(v), v) for v in kind.values), *wrong])
    if isinstance(kind, info.VarTupleType):
        parts = values(setting, kind.item_type)
        if isinstance(kind.item_type, info.StrType):
            parts = parts.filter(lambda v: "," not in v.text and v.text[0] != "[")
        lists = st.lists(parts, min_size=1, max_size=3, unique_by=lambda v: v.text)
        found = st.builds(joined, lists, as_json=st.booleans())
        return found if setting.path != "train.decay_epochs" else found.map(increasing)
    assert isinstance(kind, info.StrType), kind
    if setting.kind is not None:  # the name of a plugin
        names = [Value(name, name) for name in setting.choices]
        return st.sampled_from([*names, Value("?", INVALID)])
    if kind.pattern is None:
        is_text = is_regex if setting.name == "group" else bool
        return PLAIN.map(lambda text: Value(text, text if is_text(text) else INVALID))
    # "0" and "0,0" switch off what other programs switch off so.
    matching = st.from_regex(re.compile(kind.pattern, re.ASCII), fullmatch=True)
    wrong_texts = st.sampled_from(["x", "3 weeks", "-1", "1e3", "9" * 400, "5,", "ep"])
    return matching.map(lambda text: Value(text, text)) | wrong_texts.map(
        lambda text: Value(text, INVALID)
    )


def is_regex(text: str) -> bool:
    with contextlib.suppress(re.error):
        return bool(re.compile(text))
    return False


def joined(parts: list[Value], *, as_json: bool) -> Value:
    is_valid = all(part.value is not INVALID for part in parts)
    texts = [part.text for part in parts]
    text = json.dumps(texts, ensure_ascii=False) if as_json else ",".join(texts)
    return Value(text, [part.value for part in parts] if is_valid else INVALID)


def increasing(given: Value) -> Value:
    is_valid = given.value is not INVALID and given.value == sorted(given.value)
    return given if is_valid else given._replace(value=INVALID)


class Typed(NamedTuple):
    """A value as a person gives it."""

    path: str
    layer: str
    name: str  # the option or variable, as typed; of a file and `--set` the key
    words: tuple[str, ...]  # of the command line
    given: Value
    is_text: bool = False  # of a file: a value in quotes


@st.composite
def typed(draw: Any, setting: Setting, layer: str) -> Typed:
    value = draw(values(setting))
    if layer == "option":
        return draw(as_option(setting, value))
    name = draw(st.sampled_from([setting.name, *setting.key_aliases]))
    name = name.replace("_", draw(st.sampled_from("-_"))) if layer == "file" else name
    key = f"{setting.section}.{name}"
    if layer == "variable":
        variable = f"SSDCTL_{key.replace('.', '__').upper()}"
        return Typed(setting.path, layer, variable, (), value)
    words = (f"--set={key}={value.text}",) if layer == "--set" else ()
    return Typed(setting.path, layer, key, words, value, is_text=draw(st.booleans()))


@st.composite
def as_option(draw: Any, setting: Setting, value: Value) -> Typed:
    aliases = [
        alias
        for alias in setting.aliases
        if alias.startswith("--") and find_row(alias, "", is_own=False) is None
    ]
    if setting.is_flag:
        flag, _, text = draw(st.sampled_from([*setting.flags, *aliases])).partition("=")
        is_on = text != "false" and flag not in setting.flags[1:]
        return Typed(setting.path, "option", flag, (flag,), Value("", is_on))
    if setting.choice_flags:
        flag = draw(st.sampled_from(setting.flags))
        return Typed(setting.path, "option", flag, (flag,), Value("", flag.removeprefix("--")))
    if constants := [a for a in aliases if "=" in a and draw(st.booleans())]:
        flag, _, text = draw(st.sampled_from(constants)).partition("=")
        return Typed(setting.path, "option", flag, (flag,), Value("", text))
    flag = draw(st.sampled_from([*setting.flags, *(a for a in aliases if "=" not in a)]))
    flag = flag[:2] + flag[2:].replace("-", draw(st.sampled_from("-_")))
    is_joined = draw(st.booleans())
    words = (f"{flag}={value.text}",) if is_joined else (flag, value.text)
    return Typed(setting.path, "option", flag, words, value)


OF_TRAIN = select("data.*", "model.*", "train.*")


@st.composite
def lines(draw: Any, pool: tuple[Setting, ...]) -> list[Typed]:
    of_any = st.sampled_from(OF_TRAIN) | st.sampled_from(pool)
    chosen = draw(st.lists(of_any, min_size=1, max_size=4, unique=True))
    found = []
    for setting in chosen:
        layers = LAYERS if setting in OF_TRAIN else LAYERS[:-1]
        for layer in draw(st.lists(st.sampled_from(layers), min_size=1, max_size=3, unique=True)):
            found.append(draw(typed(setting, layer)))
    return found


@contextlib.contextmanager
def typed_in(line: list[Typed]) -> Iterator[list[str]]:
    """Write the file and set the variables; yield the words, and print the line if it fails."""
    in_file = [t for t in line if t.layer == "file"]
    text = "".join(f"{t.name} = {in_toml(t)}\n" for t in in_file)
    Path(FILE).write_text(text)
    words = [word for t in line for word in t.words]
    words = [*(["--config", FILE] if in_file else []), *words]
    variables = {t.name: t.given.text for t in line if t.layer == "variable"}
    shell = " ".join(f"{name}={shlex.quote(value)}" for name, value in variables.items())
    note(f"cat > {shlex.quote(FILE)} <<'END'\n{text}END\n{shell} ssdctl ... {shlex.join(words)}")
    with pytest.MonkeyPatch.context() as patch:
        for name, value in variables.items():
            patch.setenv(name, value)
        yield words


def in_toml(given_in_file: Typed) -> str:
    value, text = given_in_file.given.value, given_in_file.given.text
    return toml_value(text if value is INVALID or given_in_file.is_text else value)


def source_of(line: list[Typed], wanted: Typed) -> str:
    """Return what a message and `config show` call the source of a value."""
    if wanted.layer == "file":
        return f"{FILE}:{[t for t in line if t.layer == 'file'].index(wanted) + 1}"
    return wanted.layer if wanted.layer == "--set" else wanted.name


def check_refusal(result: Result, line: list[Typed], blamed: list[Typed], *, has_key: bool) -> None:
    """One error without a traceback names the source of a wrong value, and its key, as typed."""
    assert (result.code, result.out) == (2, ""), result
    error = result.err.partition("\nhint:")[0]
    assert error.startswith("error: ")
    assert "Traceback" not in result.err
    named = [t for t in blamed if source_of(line, t) in error]
    has_keys = [not has_key or t.layer in ("option", "variable") or t.name in error for t in named]
    assert any(has_keys), result.err


SETTINGS = tuple(all_settings().values())


@budgets(100, 6000)
def test_the_highest_layer_counts_and_errors_name_what_was_typed(examples: int) -> None:
    check_all(check_layers, examples, line=lines(SETTINGS))


def check_layers(line: list[Typed]) -> None:
    """The shown config, fed back as a file, is the same config."""
    with typed_in(line) as words:
        result = run_cli("config", "show", "--json", *words)
    if wrong := [t for t in line if t.given.value is INVALID or t.words[1:] == ("",)]:
        check_refusal(result, line, wrong, has_key=True)
        return
    if result.code and {t.path for t in line} & CONFLICTING:
        check_refusal(result, line, line, has_key=False)
        return
    assert result.code == 0, result.err
    jsonschema.Draft202012Validator(json_schema()).validate(parse_toml(Path(FILE).read_text()))
    shown = json.loads(result.out)
    for path in {t.path for t in line}:
        top = max((t for t in line if t.path == path), key=lambda t: LAYERS.index(t.layer))
        assert shown[path] == {"value": top.given.value, "source": source_of(line, top)}
    text = "".join(f"{k} = {toml_value(e['value'])}\n" for k, e in shown.items()
                   if e["value"] is not None)  # fmt: skip
    Path("again.toml").write_text(text)
    again = run_cli("config", "show", "--json", "--config", "again.toml").expect(0)
    values_again = {key: entry["value"] for key, entry in json.loads(again.out).items()}
    assert values_again == {key: entry["value"] for key, entry in shown.items()}


class Opened(BaseException):
    """A training that is about to take its first step."""


# Values of the options that a plan depends on; files that exist are CKPT and RUN, absent ones others.
PLANNED = {
    "data.root": "DATA absent .",
    "model.backbone": "tiny vgg16 nonsense",
    "model.weights": "none absent.pth",
    "train.accumulate": "1 3 0",
    "train.augment": "ssd ssd-zoom none flip rotate",
    "train.background": "0 0.3 0.99 1",
    "train.batch_size": "1 2 7 24 30 0",
    "train.decay_epochs": "1 1,2 2,1 50",
    "train.device": "auto cpu",
    "train.ema": "0 0.9 1",
    "train.epochs": "1 2 3 0",
    "train.eval_at": "1 2,9",
    "train.eval_every": "0 1 1st 9ep x",
    "train.fold": "1/2 9/9 99/99",
    "train.freeze": "0 4 5",
    "train.init": "CKPT absent.pt . hf://absent",
    "train.limit_train": "1 5 100",
    "train.mllog": "log absent/log",
    "train.out": "run RUN",
    "train.overfit": "1 3 100",
    "train.profile": "1,2 2,1",
    "train.resume": "auto never CKPT absent.pt .",
    "train.save_every": "1st 10min 0",
    "train.seed": "0 1",
    "train.steps": "1 2 50",
    "train.tracker": "tensorboard nonsense",
    "train.warmup": "0st 1st 3ep 12st 30 900st",
}
CHOSEN = [s for s in OF_TRAIN if s.choices and not s.choice_flags and s.path not in PLANNED]
PLANNED |= {s.path: " ".join(s.choices) for s in CHOSEN}
PLAN_FLAGS = [flag for s in OF_TRAIN if s.is_flag or s.choice_flags for flag in s.flags]
PLAN_OPTION = st.sampled_from(PLAN_FLAGS) | st.sampled_from(sorted(PLANNED)).flatmap(
    lambda path: st.sampled_from(PLANNED[path].split()).map(
        lambda text: f"{all_settings()[path].flags[0]}={text}"
    )
)


def opened(words: list[str]) -> tuple[Result, dict[str, Any], dict[str, str]]:
    def stop(trainer: Trainer) -> None:
        names = [c.name for c in trainer.splits.train.classes]
        plan, images = trainer.plan, len(trainer.splits.scored_rows)
        raise Opened(plan.as_json(), facts(plan, names, images, "", trainer.step))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trainer, "run", stop)
        try:
            return run_cli("train", *words), {}, {}
        except Opened as end:
            return Result(0, "", ""), *end.args


def problem_of(result: Result) -> str:
    lines = [line for line in result.err.splitlines() if line.startswith("error: ")]
    return lines[0] if lines else ""


@budgets(40, 1200)
def test_a_dry_run_and_the_run_agree(shapes: Path, tiny_run: Path, examples: int) -> None:
    names = {"DATA": shapes, "RUN": "old", "CKPT": "old/checkpoints/last.pt"}

    def check(options: list[str]) -> None:
        shutil.rmtree("old", ignore_errors=True)
        shutil.copytree(tiny_run, "old", symlinks=True)
        shutil.rmtree("run", ignore_errors=True)
        words = [re.sub(r"(DATA|RUN|CKPT)$", lambda m: str(names[m[0]]), o) for o in options]
        words = [*TINY_RUN.split()[2:], f"--data={shapes}", "--out=run", *words]
        note(f"ssdctl train {shlex.join(words)}")
        planned = run_cli("train", "--dry-run", "--json", *words)
        text = run_cli("train", "--dry-run", *words).out.splitlines()
        result, plan, facts = opened(words)
        assert planned.code in (0, 2, 3), planned
        assert (planned.code == 0) == (result.code == 0), (planned, result)
        if len(options) == 1:  # else each may name another of several problems
            assert (planned.code, problem_of(planned)) == (result.code, problem_of(result))
        if result.code == 0:
            assert {key: json.loads(planned.out)[key] for key in plan} == plan
            rows = dict(re.split("  +", line, maxsplit=1) for line in text)
            assert rows | facts | {"device": rows["device"]} == rows

    drawn = st.lists(PLAN_OPTION, min_size=1, max_size=3, unique_by=lambda o: o.partition("=")[0])
    check_all(check, examples, options=drawn)
    known = [["--out=RUN", "--resume-changed"], ["--overfit=20"], ["--overfit=5", "--fake-data"]]
    known.append(["--fold=1/2"])
    check_all(check, len(known), options=st.sampled_from(known))


# Command lines to which one option is added; NEW is a folder that does not exist.
WORKING = [
    f"train --data DATA --out NEW --steps 2 {TINY_RUN}",
    f"train --out NEW --steps 2 --fake-data {TINY_RUN}",
    "evaluate RUN --data DATA --device cpu",
    "evaluate FOUND --data DATA",
    "predict RUN IMAGE --device cpu",
    "predict RUN IMAGE --device cpu --save coco --out NEW",
    "prepare --data DATA --store NEW --no-pack",
    "download --dataset shapes --dest NEW --images 1 --val-images 1",
    "export RUN --format onnx --out NEW.onnx",
    "benchmark data --data DATA --seconds 0.1",
]
# What these do depends on what the command finds.
READ_IF_NEEDED = {"train.resume_changed", "prepare.keep_damaged"}


def sections_read(patch: pytest.MonkeyPatch) -> set[str]:
    """Return a set to which the settings are added that are read outside of ssdctl.config."""
    found = set[str]()
    for section, table in TABLES.items():

        def get(self: Any, name: str, section: str = section) -> Any:
            if "/ssdctl/config/" not in sys._getframe(1).f_code.co_filename:
                found.add(f"{section}.{name}")
            return object.__getattribute__(self, name)

        patch.setattr(table, "__getattribute__", get)
    return found


@budgets(4, 2000)
def test_accepted_means_read(shapes: Path, tiny_run: Path, image_file: Path, examples: int) -> None:
    click_root()
    found = str(Path("found.json").absolute())
    words = [f"--data={shapes}", f"--detections={found}", "--device=cpu"]
    assert run_cli("evaluate", tiny_run, *words).code == 0
    places = {"DATA": shapes, "RUN": tiny_run, "IMAGE": image_file, "FOUND": found}

    def check(line: tuple[list[str], Typed]) -> None:
        words, option = line
        for made in (Path("new"), Path("new.onnx")):
            shutil.rmtree(made, ignore_errors=True) if made.is_dir() else made.unlink(True)
        words = [re.sub("NEW", "new", str(places.get(w, w))) for w in words]
        note(f"ssdctl {shlex.join([*words, *option.words])}")
        with pytest.MonkeyPatch.context() as patch:
            is_read = sections_read(patch)
            result = run_cli(*words, *option.words)
        assert result.code in (0, 2, 3, 7), result.err
        assert result.code or option.path in {*is_read, *READ_IF_NEEDED}

    check_all(check, examples, line=extended())


@st.composite
def extended(draw: Any) -> tuple[list[str], Typed]:
    words = draw(st.sampled_from(WORKING)).split()
    name = next(n for n in COMMANDS if n.split() == words[: len(n.split())])
    pool = [s for s in COMMANDS[name].cls.settings if not {*s.flags} & {*words}]
    chosen = draw(st.sampled_from(pool))
    given = values(chosen).filter(lambda value: value.value not in (INVALID, chosen.default))
    return words, draw(as_option(chosen, draw(given)))


class Read(BaseException):
    """A command line was read to its end, and its config resolved."""


def read(*words: str) -> str:
    """Return the error of a command line that is read, but not run; empty if it is accepted."""
    real = command._call

    def stop(*arguments: Any) -> None:
        real(*arguments)
        raise Read

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(command, "_call", stop)
        try:
            result = run_cli(*words)
        except Read:
            launched = words[words.index("--") + 1 :] if "--" in words else ()
            return read(*launched) if launched else ""
    return "" if result.code == 0 else result.err


def own_option(parameter: inspect.Parameter) -> st.SearchStrategy[Typed]:
    kind, about = typing.get_args(parameter.annotation)
    written = [w for w in (about.default, *(about.param_decls or ())) if str(w).startswith("--")]
    flag = str([f"--{parameter.name.replace('_', '-')}", *written][-1])
    kind = plain_type(kind)
    if kind is bool:
        return st.just(Typed("", "option", flag, (flag,), Value("", True)))
    if kind in (int, float):
        bounds = SimpleNamespace(gt=None, lt=None, ge=about.min, le=about.max)
        found = numbers(bounds, is_int=kind is int)
        found = found.filter(lambda value: value.text not in ("nan", "inf", "1e308", "1e400"))
    elif typing.get_origin(kind) is typing.Literal:
        names = [Value(str(choice), True) for choice in typing.get_args(kind)]
        found = st.sampled_from([*names, Value("?", INVALID)])
    else:
        found = PLAIN.map(lambda text: Value(text, text))
    return found.map(lambda v: Typed("", "option", flag, (f"{flag}={v.text}",), v))


def commands() -> Iterator[tuple[str, Any]]:
    """Yield each command as it was registered; options are added by `click_root`."""
    click_root()
    groups = [(f"{group.name} ", group.typer_instance) for group in app.registered_groups]
    for prefix, group in [("", app), *groups]:
        yield from ((f"{prefix}{info.name}", info) for info in group.registered_commands)


COMMANDS = dict(commands())
CHOICE_FLAGS = {flag for s in SETTINGS if s.choice_flags for flag in s.flags}
COMMON = {"config_file", "assignments", "short_help", "as_json", "quiet", "verbose"}


@st.composite
def of_any_command(draw: Any) -> tuple[list[str], list[Typed]]:
    name = draw(st.sampled_from(sorted(COMMANDS)))
    signature = inspect.signature(COMMANDS[name].callback)
    words, options, pool = name.split(), list[Typed](), list[Any]()
    for parameter in signature.parameters.values():
        _, about = typing.get_args(parameter.annotation)
        is_required = parameter.default is parameter.empty
        if isinstance(about, ArgumentInfo):
            words += ["x"] * is_required
        elif is_required:
            options.append(draw(own_option(parameter)))
        elif parameter.name not in COMMON and "__" not in parameter.name:
            pool.append(parameter)
    pool += COMMANDS[name].cls.settings
    for chosen in draw(st.lists(st.sampled_from(pool), max_size=3, unique=True)) if pool else ():
        is_setting = isinstance(chosen, Setting)
        for _ in range(1 + (is_setting and chosen.choice_flags)):  # `--bf16 --fp32`
            drawn = as_option(chosen, draw(values(chosen))) if is_setting else own_option(chosen)
            options.append(draw(drawn))
    return words, options


@budgets(250, 6000)
def test_every_command_takes_its_options_and_names_the_wrong_one(examples: int) -> None:
    def check(line: tuple[list[str], list[Typed]]) -> None:
        words, options = line
        words = [*words, *(word for option in options for word in option.words)]
        note(f"ssdctl {shlex.join(words)}")
        problem = read(*words)
        error = problem.partition("\nhint:")[0]
        wrong = [o for o in options if o.given.value is INVALID or o.words[1:] == ("",)]
        if len({(o.path, o.given.value) for o in options if o.words[0] in CHOICE_FLAGS}) > 1:
            assert wrong or refuses_both(error, options), problem
        elif wrong or (problem and {o.path for o in options} & CONFLICTING):
            assert any(o.name in error for o in wrong or options), problem
            assert "Traceback" not in problem
        else:
            assert not problem or refuses_both(error, options), problem

    check_all(check, examples, line=of_any_command())


def refuses_both(error: str, options: list[Typed]) -> bool:
    """Return whether an error names two flags of one setting: `--bf16 and --fp32`."""
    return " and " in error and sum(o.name in error for o in options) > 1


def next_commands(text: str) -> list[list[str]]:
    """Return the commands of ssdctl in a closing block, as a shell would read them."""
    lines = text.partition("next  ")[2].splitlines()
    return [words[1:] for words in map(shlex.split, lines) if words[:1] == ["ssdctl"]]


# NAME is a folder or file of any name; RUN and DATA are copies at such a place.
CLOSING = [
    "config init NAME.toml",
    "dataset export DATA --to yolo --out NAME",
    "download --dataset shapes --dest NAME --images 1 --val-images 1",
    "export RUN --format safetensors --out NAME.safetensors",
    "predict RUN IMAGE --save yolo --out NAME --device cpu",
    "prepare --data DATA --no-pack --force",
    "prepare --data DATA --no-pack --store NAME",
    "report RUN",
    "runs .",
    "push RUN hf://a/b --out NAME --message NAME --samples 0",
]


@budgets(8, 1200)
def test_the_next_commands_are_accepted_by_a_shell(
    shapes: Path, tiny_run: Path, image_file: Path, examples: int
) -> None:
    def check(line: str, name: str) -> None:
        shutil.rmtree("all", ignore_errors=True)
        Path("all").mkdir()
        with pytest.MonkeyPatch.context() as patch:
            patch.chdir("all")
            place = f"./{name}"
            if "RUN" in line or line == "runs .":
                shutil.copytree(tiny_run, place, symlinks=True)
            if "DATA" in line:
                shutil.copytree(shapes, place)
            target = f"{place}2" if {"RUN", "DATA"} & set(line.split()) else place
            places = {"RUN": place, "DATA": place, "IMAGE": str(image_file)}
            words = [places.get(w, w.replace("NAME", target)) for w in line.split()]
            note(f"ssdctl {shlex.join(words)}")
            result = run_cli(*words).expect(0)
            found = next_commands(result.err)
            assert found, result.err
            if words[0] in ("runs", "config"):
                silent = run_cli(*words, "-q", *["--force"] * (words[0] == "config"))
                assert (silent.code, silent.err) == (0, "")
            for words in found:
                assert not (problem := read(*words)), (words, problem)
                assert any(name in word for word in words), (words, name)

    names = (
        st.sampled_from(["-x", "a b", "it's"])
        | st.sampled_from(NAMES)
        | st.text("ab .-$'\"=#\\é", min_size=1, max_size=6).filter(
            lambda name: name == name.strip() and not name.startswith(".")
        )
    )
    check_all(check, examples, line=st.sampled_from(CLOSING), name=names)


def spelling(usage: str) -> st.SearchStrategy[list[str]]:
    """Return ways to write a refused option of the table, with values."""
    name, _, metavar = usage.partition(" ")
    flag, _, constant = name.partition("=")
    if constant:
        return st.just([flag, constant])
    if metavar.endswith("..."):
        epochs = st.lists(st.integers(1, 60), unique=True, min_size=1)
        return epochs.map(lambda numbers: [flag, *map(str, sorted(numbers))])
    examples = {"": [""], "N": ["1", "8"], "AP": ["0.2"], "V": ["x", "12"]}
    texts = st.sampled_from(examples.get(metavar, ["a/b", "it's"]))
    return texts.map(lambda text: [flag, text] if text else [flag])


FOREIGN = st.sampled_from(sorted(other_programs()["refused"])).flatmap(spelling)
OWN = st.sampled_from(
    ["--bs 4", "--lr 0.1", "--bf16", "--fp32", "--seed 3", "--device cpu", "--hpus 8", "--nodes 2"]
).map(str.split)


@budgets(25, 3000)
def test_a_line_of_another_program_is_refused_at_once(examples: int) -> None:
    def check(name: str, options: list[list[str]]) -> None:
        words = [*name.split(), *(word for option in options for word in option)]
        note(f"ssdctl {shlex.join(words)}")
        problem, flags = read(*words), {option[0] for option in options}
        if "are not those of ssdctl" in problem:
            lines = problem.partition("\nhint:")[0].splitlines()[1:]
            assert all(": use " in line or ": leave it out" in line for line in lines), problem
            assert f"error: {len(lines)} options are" in problem
        assert "Traceback" not in problem
        assert not problem or any(flag in problem for flag in flags), problem
        lists = [v for flag, *v in options if v[1:] and flag != "--evaluation"]  # counts from 0
        assert all(",".join(values) in problem for values in lists), problem

    options = st.lists(FOREIGN | OWN, min_size=1, max_size=5, unique_by=lambda words: words[0])
    names = st.sampled_from(["train", "train", "launch", "evaluate x.pt", "benchmark train"])
    check_all(check, examples, name=names, options=options)
