"""The layers of the config, the source of each value, and what is refused."""

import contextlib
import functools
import json
import os
import re
from pathlib import Path
from typing import Any

import jsonschema
import pytest

import ssdctl
from ssdctl.config.render import (
    json_schema,
    snapshot,
    to_snapshot_toml,
    to_template_toml,
    values,
)
from ssdctl.config.resolve import (
    Override,
    of_call,
    parse_assignments,
    preset_overrides,
    resolve,
)
from ssdctl.config.settings import DEFAULT, SMALL_DATA, Config, all_settings
from ssdctl.errors import UsageError
from ssdctl.files import parse_toml

PRESETS = all_settings()["train.preset"].choices


def resolved(*overrides: tuple[str, object], text: str | None = None, **environment: str) -> Config:
    if text is not None:
        Path("my.toml").write_text(text, encoding="utf-8")
    return resolve(
        file=None if text is None else "my.toml",
        overrides=[Override(path, value, of_call(f"--{path}")) for path, value in overrides],
        environment=environment or {"HOME": "/"},
    )


def test_a_second_assignment_joins_lists_and_is_refused_for_others() -> None:
    joined = parse_assignments(["train.tracker=a", "train.lr=1", 'train.tracker=["b", "c"]'])
    config = resolve(overrides=joined, environment={}).train
    assert (config.tracker, config.lr) == (("a", "b", "c"), 1.0)
    assert len(parse_assignments(["train.lr=1", "train.lr=1"])) == 1
    with pytest.raises(UsageError, match=r"train\.batch_size"):
        parse_assignments(["train.bs=1", "train.batch_size=2"])


@pytest.mark.parametrize(
    ("given", "start", "nearest"),
    [
        ({"text": "[train]\n\nlerning = 1\n"}, "my.toml:3: ", ""),
        ({"text": "[train]\nmomentun = 1\n"}, "my.toml:2: ", "train.momentum"),
        ({"text": "train.epoch = 1\n"}, "my.toml:1: ", "train.epochs"),
        ({"text": "[[train]]\nlr = 3"}, "my.toml: 'train'", "`ssdctl config schema`"),
        ({"text": '[kubernetes.labels]\na.io = "c"'}, "my.toml:1: kubernetes.labels: ", "quotes"),
        ({"SSDCTL_TRAIN__LRR": "1"}, "SSDCTL_TRAIN__LRR: ", "'train.lr'"),
        ({"SSDCTL_TRAIN_BACKBONE": "1"}, "SSDCTL_TRAIN_BACKBONE: ", "'model.backbone'"),
        ({"SSDCTL_TRAIN_BS": "1"}, "SSDCTL_TRAIN_BS: ", "SSDCTL_TRAIN__BATCH_SIZE"),
        ("train.learnrate", "--", "'train.lr'"),
        ("lr", "--", "'train.lr'"),
        ("eval.batch_size", "--", "'evaluate.batch_size'"),
        ("train.backbone", "--", "'model.backbone'"),  # not train.background
        ("train.nope", "--", "`ssdctl config schema`"),  # not launch.nodes
    ],
)
def test_an_unknown_key_is_named_with_its_line_and_the_nearest_key(
    given: dict[str, Any] | str, start: str, nearest: str
) -> None:
    with pytest.raises(UsageError) as caught:
        resolved((given, "3")) if isinstance(given, str) else resolved(**given)
    assert str(caught.value).startswith(start)
    assert nearest in (caught.value.hint or "")


def test_empty_text_is_refused_where_it_means_nothing() -> None:
    for path in ("train.resume", "model.weights", "slurm.job_name", "kubernetes.python"):
        for text in ("", '""'):
            with pytest.raises(UsageError, match=f"^--{path} is empty"):
                resolved((path, text))
    assert resolved(("train.init", '""')).train.init is None


def test_two_variables_of_a_setting_are_refused() -> None:
    first = {"SSDCTL_TRAIN__LR": "1"}
    for other in ("SSDCTL_TRAIN__LEARNING_RATE", "SSDCTL_train__lr"):
        with pytest.raises(UsageError, match=f"{other} is the same setting as SSDCTL_TRAIN__LR"):
            resolved(**first, **{other: "2"})
        assert resolved(**first, **{other: "1"}).train.lr == 1


@pytest.mark.parametrize("text", ["[train", "lr = ", "\x00", None, "huge"])
def test_a_broken_missing_or_huge_file_is_a_usage_error(text: str | None) -> None:
    if text is not None:
        Path("my.toml").write_text(text)
    if text == "huge":
        os.truncate("my.toml", 10**9)
    with pytest.raises(UsageError, match=r"my\.toml"):
        resolve(file="my.toml", environment={})


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_sets_its_recipe_and_a_template_follows_it(name: str) -> None:
    recipe = {path for path, setting in all_settings().items() if setting.is_recipe}
    assert recipe <= {o.path for o in preset_overrides(name)}
    before = resolved(("train.preset", name))
    text = to_template_toml(before)
    after = resolved(text=text)
    assert values(after) == values(before)
    assert {p for p, s in after.sources.items() if "my.toml" in s.label} == {"train.preset"}
    other = "nvidia-r50" if name != "nvidia-r50" else "mlperf-r34"
    changed = resolved(("train.preset", other), text=text)
    assert changed.model.backbone == resolved(("train.preset", other)).model.backbone


@pytest.mark.parametrize("name", PRESETS)
def test_a_value_that_is_left_empty_stays_so(name: str) -> None:
    """Also if the preset has one: in the file of a run, and in a template."""
    empty = {path for path, s in all_settings().items() if s.default is None and not s.is_flag}
    for path in sorted(empty):
        given = resolved(("train.preset", name), (path, ""))
        for written in (to_snapshot_toml(given), to_template_toml(given)):
            again = values(resolved(text=written))
            own = {key: again[key] for key in snapshot(given) if not key.startswith("data.")}
            assert own == {key: snapshot(given)[key] for key in own}


def test_defaults_in_the_file_of_a_run_are_not_chosen() -> None:
    text = to_snapshot_toml(resolved(("train.seed", 3), ("evaluate.verify", "false")))
    sources = resolved(text=text.replace('"val"', '"test"')).sources
    chosen = {p for p, s in sources.items() if s != DEFAULT and not all_settings()[p].is_recipe}
    assert chosen == {"train.seed", "evaluate.verify", "evaluate.split"}


def test_only_edited_values_of_presets_and_rules_are_chosen() -> None:
    rule, given = SMALL_DATA, resolved()
    for path, value in (("train.lr", 0.5), ("train.epochs", 7), ("train.warmup", "3ep")):
        given = given.with_value(path, value, rule)
    edited = {"epochs = 7 ": "epochs = 8 ", "momentum = 0.9 ": "momentum = 0.8 "}
    edited |= {"seed = 0  # default": "seed = 7  # lucky: 7"}
    text = functools.reduce(lambda t, e: t.replace(*e), edited.items(), to_snapshot_toml(given))
    again, named = resolved(text=text), resolved(("train.preset", "mlperf-r34"), text=text)
    assert (again.train.lr, again.train.warmup, again.sources["train.lr"]) == (0.5, "3ep", rule)
    chosen = {path for path in again.sources if again.is_chosen(path)}
    assert chosen == {"train.epochs", "train.momentum", "train.seed"}
    assert (named.train.lr, named.train.epochs) == (0.0025, 8)


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_has_always_had_its_values(name: str) -> None:
    """Of all settings, with their sources; those that are added later may be missing."""
    golden = json.loads((Path(__file__).parents[1] / "golden/settings.json").read_text())
    now, expected = resolved(("train.preset", name)), {**golden["plain"], **golden[name]}
    shown = {path: [value, now.sources[path].label] for path, value in values(now).items()}
    shown = json.loads(json.dumps({path: shown[path] for path in expected}))
    shown["train.preset"][1] = expected["train.preset"][1]
    assert shown == expected


def test_every_line_of_a_template_can_be_set() -> None:
    set_up = resolved(text=re.sub(r"(?m)^#(\w+ = .)", r"\1", to_template_toml(resolved())))
    assert values(set_up) == values(resolved())
    unset = {p for p, v in values(set_up).items() if v is None}
    in_file = {p for p, s in set_up.sources.items() if "my.toml" in s.label}
    assert in_file == set(all_settings()) - unset


def test_a_list_of_pairs_may_be_a_table() -> None:
    text = '[kubernetes]\nresources = { cpu = 95 }\n[kubernetes.labels]\n"a.io/b" = "c"\nd = true'
    kubernetes: Any = resolved(text=text).kubernetes  # type: ignore[attr-defined]
    assert kubernetes.labels == ("a.io/b=c", "d=true")
    assert kubernetes.resources == ("cpu=95",)


@pytest.mark.parametrize(
    ("path", "text", "is_read"),
    [
        ("train.tf32", '"TRUE"', True),
        ("train.steps", '""', True),
        ("train.decay_epochs", '["1", 2]', True),
        ("train.seed", '"1.5"', False),
        ("train.lr", '"1,5"', False),
        ("train.epochs", "2.5", False),
        ("slurm.epochs", "2", False),
        ("train.augment", '["crop"]', False),
    ],
)
def test_schema_accepts_what_the_config_reads(path: str, text: str, is_read: bool) -> None:
    section, _, name = path.partition(".")
    text = f"[{section}]\n{name} = {text}\n"
    validator = jsonschema.Draft202012Validator(json_schema())
    assert validator.is_valid(parse_toml(text)) == is_read
    with contextlib.nullcontext() if is_read else pytest.raises(UsageError):
        resolved(text=text)


def test_an_evaluation_interval_replaces_the_evaluation_epochs_of_a_preset() -> None:
    nvidia, every = ("train.preset", "nvidia-r50"), ("train.eval_every", "10")
    for options, eval_at in (([every], ()), ([every, ("train.eval_at", "5")], (5,))):
        train = resolved(nvidia, *options).train
        assert (train.eval_every, train.eval_at) == ("10", eval_at)
    assert resolved(nvidia, ("train.eval_at", "5,6")).train.eval_at == (5, 6)
    config = ssdctl.configure(train={"preset": "nvidia-r50", "eval_every": "10\n"})
    more = ssdctl.configure(config, train={"batch_size": 2})
    assert more.sources["train.eval_at"] == config.sources["train.eval_at"]  # not chosen
