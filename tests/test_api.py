"""The Python API: the same work, settings and errors as the commands."""

import ast
import inspect
import itertools
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from conftest import Cli

import ssdctl
from ssdctl.config.call import hints_in_messages, keywords_of
from ssdctl.config.settings import all_settings
from ssdctl.errors import DataError, UsageError


def test_nothing_is_read_unasked(monkeypatch: pytest.MonkeyPatch, cli: Cli) -> None:
    """Neither the folder's config file nor variables: only the file that is named."""
    Path("ssdctl.toml").write_text("[train]\nepochs = 7\n[predict]\nscore = 0.5\n")
    monkeypatch.setenv("SSDCTL_TRAIN__SEED", "3")
    plain = ssdctl.configure()
    assert (plain.train.epochs, plain.train.seed, plain.predict.score) == (65, 0, None)
    config = ssdctl.configure("ssdctl.toml", train={"lr": 2e-3, "batch-size": 4, "seed": 3})
    assert isinstance(config, ssdctl.Config)
    command = ("config", "show", "--json", "--set", "train.lr=2e-3", "--set", "train.bs=4")
    shown = {path: entry["value"] for path, entry in json.loads(cli(*command).out).items()}
    tables = json.loads(msgspec.json.encode(config))
    assert tables.pop("sources").keys() == shown.keys()
    assert {f"{s}.{k}": v for s, table in tables.items() for k, v in table.items()} == shown
    assert ssdctl.configure(config) == config
    numbers = {"lr": np.float64(0.25), "batch_size": np.int64(3), "decay_epochs": np.array([1, 2])}
    changed = ssdctl.configure(config, train=numbers).train
    assert (changed.lr, changed.batch_size, changed.decay_epochs) == (0.25, 3, (1, 2))
    assert changed.seed == 3


@pytest.mark.parametrize(
    ("function", "settings", "subject"),
    [
        (ssdctl.train, {"config": "none.toml"}, "none.toml"),
        (ssdctl.train, {"config": {"train": {"lr": 1}}}, "config: a dictionary"),
        (ssdctl.configure, {"lr": 1e-3}, "lr"),  # without its table
        (ssdctl.configure, {"train": {"epoch": 1}}, r"train\.epoch\b"),
        (ssdctl.load, {"score": float("nan")}, "^score: nan"),
        (ssdctl.load, {"max_detections": -1}, "^max_detections: -1"),
        (ssdctl.load, {"device": "cuda:0"}, "^device: 'cuda:0'"),
        (ssdctl.export, {"format": "tflite"}, "tflite"),
        (ssdctl.export, {"format": "mlperf", "batch": 4}, "batch"),
        (ssdctl.export, {"batch": 2.5}, r"batch 2\.5"),
        (ssdctl.export, {"batch": True}, "batch True"),
        (ssdctl.export, {"int8": True, "calibrate": 0}, "calibrate 0"),
        (ssdctl.export, {"int8": True, "calibrate": "4"}, "calibrate '4'"),
        (ssdctl.export, {"int8": True, "max_ap_loss": "0.1"}, "max_ap_loss '0.1'"),
        (ssdctl.export, {"int8": True, "max_ap_loss": float("nan")}, "max_ap_loss nan"),
        (ssdctl.export, {"out": "."}, "is a folder"),
        (ssdctl.export, {"out": ""}, "out is empty"),
        (lambda run, **_: ssdctl.load(""), {}, "empty"),
        (lambda run, **_: ssdctl.load(ssdctl.SSD300), {}, "a type"),
        (lambda run, **_: ssdctl.report([run]), {}, "report"),
    ],
)
def test_wrong_values_are_named_before_a_file_is_read(
    function: Callable[..., Any], settings: dict[str, Any], subject: str
) -> None:
    given = [] if function is ssdctl.configure else ["none.pt"]
    out = {"out": "out"} if function is ssdctl.export else {}
    with pytest.raises(UsageError, match=subject):
        function(*given, **{**out, **settings})


def test_data_errors_are_those_of_the_commands_with_their_hints(tmp_path: Path) -> None:
    for call in (ssdctl.prepare, ssdctl.train):
        with pytest.raises(DataError, match="nowhere") as error:
            call(tmp_path / "nowhere")
        assert error.value.hint
        assert str(error.value).count(error.value.hint) == 1


@pytest.mark.parametrize(
    ("written", "shown"),
    [
        ("name it: --data DIR, or try --mirror", "name it: data=DIR, or try `mirror`"),
        ("--bs 4 or --bs auto: full", 'batch_size=4 or batch_size="auto": full'),
        ("use --lr-decay cosine: --lr is low", 'use lr_decay="cosine": `lr` is low'),
        ("use --device cpu, --bf16, --no-pack", 'use device="cpu", precision="bf16", pack=False'),
        ("--score 0.3: low; --warmup 300st", 'score=0.3: low; warmup="300st"'),
        ("data --data a/b c", 'data data="a/b" c'),
        ("`ssdctl prepare --data DIR`, or --set train.lr=1", None),
        ("docker run --runtime=habana; pip install --no-deps x", None),
    ],
)
def test_errors_name_keywords_or_options(written: str, shown: str | None) -> None:
    with pytest.raises(UsageError) as caught, hints_in_messages(), hints_in_messages():
        raise UsageError(written, hint=written)
    shown = shown or written.replace("--set ", "")
    assert str(caught.value) == f"{shown}\nhint: {shown}"
    assert caught.value.hint == caught.value.message == shown
    assert caught.value.for_command_line() == (written, written)


# Options of other programs, of commands that Python does not have, and `--set KEY=VALUE`.
COMMANDS_ONLY = {
    *("dest", "preview", "allow-dropped", "save-media", "recursive", "list", "deps", "set")
}


def test_options_in_errors_are_keywords_or_settings() -> None:
    """Those that Python shows: `--bs 4` must not become an unknown keyword."""
    functions = [getattr(ssdctl, name) for name in ssdctl.__all__]
    known = {name for f in functions if callable(f) for name in inspect.signature(f).parameters}
    known |= {path.rpartition(".")[2] for path in all_settings()}
    named = set()
    for path in Path(ssdctl.__file__).parent.rglob("*.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        raised = [n for n in ast.walk(tree) if isinstance(n, ast.Raise)]
        is_shown = path.parent.name not in ("cli", "launch", "engines", "doctor", "config")
        for node in itertools.chain.from_iterable(map(ast.walk, raised if is_shown else [])):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                named |= set(re.findall(r"(?<![\w-])--(?:no-)?([a-z][a-z0-9-]+)", node.value))
    shown = {keywords_of(f"--{name}", {}).strip("`") for name in named - COMMANDS_ONLY}
    assert len(shown) > 30
    assert shown - known == set()


def test_a_folder_in_a_hint_is_a_value(dataset: Path) -> None:
    for data in (None, f"{dataset.name}/val2017"):
        with pytest.raises(DataError, match=f'data="./{dataset.name}"'):
            ssdctl.prepare(data)


def test_a_folder_that_is_no_run_is_named(tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "none"):
        for name in ("metrics", "best"):
            with pytest.raises(UsageError, match=re.escape(str(folder))):
                getattr(ssdctl.Run(folder), name)


def test_a_config_keeps_who_set_its_values(shapes: Path) -> None:
    config = ssdctl.configure(train={"lr": 5e-3})
    other = ssdctl.configure(config, train={"preset": "nvidia-r50"})
    assert (other.train.lr, other.train.hue_degrees) == (5e-3, 0.5)
    assert other.model.backbone == "resnet50"
    replaced = msgspec.structs.replace(config, train=msgspec.structs.replace(config.train, seed=3))
    again = ssdctl.configure(replaced, train={"preset": "nvidia-r50"})
    assert (again.train.lr, again.train.seed, again.train.hue_degrees) == (5e-3, 3, 0.5)
