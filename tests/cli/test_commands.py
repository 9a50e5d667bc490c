"""Commands as users type them: typical mistakes get a hint that works, results a next command."""

import json
import re
import shutil
from pathlib import Path

import pytest
from conftest import Cli

import ssdctl
from ssdctl.config.settings import all_settings
from ssdctl.errors import UsageError

MISTAKES = [
    ("train --data . --device cpu", 3, "annotations"),
    ("fetch-weights tiny-imagenet-v1", 2, "tiny has no"),
    ("train --fake-data --device hpu", 2, "habana_frameworks"),
    ("train --fake-data --device tpu", 2, "torch_tpu"),
    ("evaluate text.pt", 5, "torch.save did not write it"),
    ("evaluate text.json --data .", 3, "annotations"),
    ("report .", 2, "metrics.jsonl"),
    ("predict text.pt a.jpg --every 2", 2, "--every is for videos"),
    ("predict text.pt a.jpg --hide-labels", 2, "--hide-labels is for drawn images"),
    ("benchmark train --backbone-weights none", 2, "--backbone-weights"),
    ("export text.pt --format mlperf --out x", 5, "text.pt"),
    ("prepare --split 80", 2, "80% is 0.8"),
    ("prepare --data dataset --split 0.9", 2, "has validation images already"),
    ("prepare --data dataset --classes bal", 2, "did you mean 'ball'"),
    ("prepare --data dataset --keep-damaged", 2, "--verify-images"),
    ("prepare --data dataset --store text.pt/x", 6, "--store"),
    ("download --dest data --verify --dry-run", 2, "--dry-run"),
    ("download --dest data --part val --manifest m.toml", 2, "--part"),
    ("download --dest data --images 4 --dry-run", 2, "--images is for --dataset shapes"),
    ("download --dest data --dataset shapes --mirror http://m.org", 2, "--mirror does not apply"),
    ("download --mirror m.org", 2, "--mirror"),
    ("download --dest s3://bucket/coco", 2, "s3://bucket/coco"),
    # Typing errors, and options of other programs: see test_command_lines.py, test_docs.py.
    ("config shw", 2, "'show'"),
    ("--install-completion zsh", 2, "--install-completion takes no argument"),
    ("val", 2, "'evaluate'"),
    ("prepare photos", 2, "--data"),
    ("train --epoch 3", 2, "--epochs"),
    ("train --flux-capacitor", 2, "ssdctl train --help"),
    ("export", 2, "--format FORMAT: onnx, "),
    ("train --hpus 8 --bs 4", 2, "--hpus: use ssdctl launch --hpus 8"),
    ("launch --cpus 2 -- evaluate --amp x.pt", 2, "--amp: use --bf16 ("),
    ("report --lr .1", 2, "--lr: leave it out (ssdctl train has it)"),
    ("launch --gpus 2 --time 60", 2, "--time: use --set slurm.time=60"),
    ("train --device 1", 2, "--device: use --device cuda (the variable CUDA_VISIBLE_DEVICES"),
    ("train --mode benchmark-training", 2, "--mode: use ssdctl benchmark train"),
    ("launch -np", 2, "--hpus"),
    ("train -v5", 2, "--log-every 5"),
    ("train --profile 9012", 2, "--profile 50,53"),
    ("train --dry-run -e 64.5", 2, "--steps N"),
    ("train --dry-run --set evaluate.split=train", 2, "--set evaluate.split does nothing"),
    ("launch --cpus 2 --dry-run --set predict.score=0.5", 2, "--set predict.score does nothing"),
    ("launch --dry-run", 2, "--cpus"),
    ("launch --cpus 2 --set train.device=hpu --dry-run", 2, "--device hpu"),
    ("launch --tpus 4 --launcher slurm --dry-run", 2, "slurm"),
    ("launch --hpus 8 --hostfile absent --dry-run", 2, "absent"),
    ("launch --cpus 4 --device cpu --devices 2 --dry-run", 2, "exactly one"),
    ("launch --cpus 2 --export-env HOME --dry-run", 2, "--export-env is for mpirun"),
    # What the ranks would refuse.
    ("launch --tpus 4 --execution lazy --dry-run", 2, "--execution compile or eager"),
    ("launch --tpus 4 --tpu-version v3 --execution compile --dry-run", 2, "--execution lazy"),
    ("launch --tpus 4 --tpu-version v3 --bs 100 --dry-run", 2, "--bs 96 is a multiple of 8"),
    ("launch --gpus 8 --warmup 1200 --dry-run", 2, "--warmup 1200st"),
    ("launch --gpus 8 --backbone-weights nosuch --write x.sh", 2, "'nosuch'"),
    ("launch --cpus 2 -- evaluat x.pt", 2, "'evaluate'"),
    ("launch --cpus 2 -- train --resume a.pt", 2, "leave out the word train"),
    ("launch --cpus 2 -- predict a.pt a.jpg", 2, "predict does not share its work among ranks"),
    # Options before -- are train's, and train is not what is launched.
    ("launch --cpus 2 --bs 4 -- evaluate x", 2, "--bs is an option of train"),
    ("launch --cpus 2 train --bs 4 --dry-run", 2, "leave out the word train"),
]


def test_tildes_after_an_equals_sign(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the shell expands them elsewhere."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "home").mkdir()
    (tmp_path / "home/c.toml").write_text('[data]\nroot = "~/photos"')
    install = "kubernetes.install=get --to=~/w http://x//y"
    assert "get --to=~/w http://x//y" in cli("config", "show", "--set", install).out
    for given in (["--data=~/photos"], ["--data", "~/photos"], ["--config=~/c.toml"]):
        cli("train", *given, "--dry-run").expect(3, f"{tmp_path}/home/photos")


@pytest.mark.usefixtures("dataset")
@pytest.mark.parametrize(("line", "code", "named"), MISTAKES)
def test_mistakes_get_one_message_and_code(cli: Cli, line: str, code: int, named: str) -> None:
    Path("text.pt").write_text("hello")
    Path("text.json").write_text("[]")
    before = {*Path().rglob("*")}
    result = cli(*line.split()).expect(code, named)
    assert result.out == ""
    assert "\nerror: " in f"\n{result.err}"
    assert "%" not in result.err or "%" in named
    assert {*Path().rglob("*")} == before


def test_an_unexpected_exception_is_a_bug(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    def breaks(**_: object) -> None:
        raise ValueError("out of the blue")

    monkeypatch.setattr("ssdctl.cli.command.resolve", breaks)
    result = cli("config", "show", "--json")
    assert (result.code, result.out) == (1, "")
    assert "ValueError: out of the blue" in result.err
    assert "This is a bug in ssdctl" in result.err


def test_no_permission_is_a_disk_error(cli: Cli, shapes: Path) -> None:
    """Not even root can create folders in /proc."""
    for arguments in (
        ["prepare", "--data", shapes, "--store", "/proc/store"],
        ["download", "--dataset", "shapes", "--dest", "/proc/shapes", "--images", "1"],
        ["config", "init", "/proc/ssdctl.toml"],
    ):
        cli(*arguments).expect(6, "/proc")


def test_verbose_shows_the_traceback(cli: Cli) -> None:
    assert "Traceback" in cli("evaluate", "none.pt", "-v").err


@pytest.mark.parametrize("command", ["train", "prepare"])
def test_no_dataset_at_all(
    cli: Cli, shapes: Path, command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    roots = (Path("data/coco"), tmp_path / "absent")
    monkeypatch.setattr("ssdctl.data.store_folder.DEFAULT_ROOTS", roots)
    result = cli(command).expect(3, "ssdctl demo")
    assert "--data" in result.err.splitlines()[0]
    shutil.copytree(shapes, "bolts", ignore=shutil.ignore_patterns("prepared"))
    Path("notes").mkdir()
    result = cli(command).expect(3, "--data ./bolts")
    assert "notes" not in result.err


def test_a_plan_shows_what_a_run_starts_with(cli: Cli, shapes: Path) -> None:
    options = ("--data", shapes, "--bs", 4, "--epochs", 10, "--dry-run")
    text = cli("train", *options, "--lr", 1e-3, "--device", "cpu").out
    for word in ("cpu", "ball", "ring", "resnet34", "0.001", "0.00012625"):
        assert word in text
    plan = json.loads(cli("train", *options, "--json").out)
    assert set(plan) == {
        "images", "background", "global_batch_size", "steps_per_epoch", "total_steps", "warmup_steps", "peak_lr",
        "decay_steps", "evaluations", "recipe", "workers", "cpu_quota",
    }  # fmt: skip
    assert plan["global_batch_size"] == 4
    assert plan["total_steps"] == 10 * plan["images"] // 4
    assert not Path("runs").exists()


def test_only_a_plan_without_data_assumes_coco(cli: Cli) -> None:
    result = cli("train", "--dry-run", "--json", "--bs", 32).expect(0, "117,266")
    plan = json.loads(result.out)
    assert (plan["images"], plan["steps_per_epoch"]) == (117_266, 3664)
    assert cli("train", "--dry-run", "--data", "none").expect(3, "none").out == ""
    assert cli("train", "--dry-run", "--fake-data", "--data", "none").code == 0


def test_config_commands(cli: Cli) -> None:
    assert cli("config", "init").code == 0
    assert cli("config", "init").code == 2
    assert "valid" in cli("config", "validate").out
    text = Path("ssdctl.toml").read_text()
    Path("ssdctl.toml").write_text(text.replace("#lr = 0.0025", "lr = 0.5"))
    settings = json.loads(cli("config", "show", "--json").out)
    assert settings["train.lr"]["value"] == 0.5
    assert re.fullmatch(r"ssdctl\.toml:\d+", settings["train.lr"]["source"])
    assert list(json.loads(cli("config", "show", "--json", "train.lr").out)) == ["train.lr"]
    assert "Time limit" in cli("config", "show", "slurm").out
    assert "'slurm'" in cli("config", "show", "slrum").err
    Path("ssdctl.toml").write_text("[train]\nlrr = 1\n")  # these commands repair it
    assert cli("config", "validate").code == 2
    assert json.loads(cli("config", "schema").out)["$defs"]
    presets = all_settings()["train.preset"].choices
    assert {*json.loads(cli("config", "presets", "--json").out)} == {*presets}
    assert "mlperf-r34" in cli("config", "presets").out
    Path("good.toml").write_text("[train]\nlr = 1\n")
    assert cli("config", "validate", "good.toml").code == 0
    cli("config", "validate", "--config", "good.toml").expect(0)
    cli("config", "show", "--config", "good.toml", "--config", "a.toml").expect(2, "2 times")
    assert cli("config", "init", "--force").code == 0
    assert cli("config", "validate").code == 0


def test_a_file_may_have_settings_of_other_commands(cli: Cli) -> None:
    Path("ssdctl.toml").write_text('[train]\nfold = "1/2"\noverfit = 4\n')
    cli("doctor", "--help").expect(0)
    cli("runs", ".").expect(0)
    cli("evaluate", "absent.pt").expect(2, "absent.pt: no such file")
    cli("launch", "--cpus", 2, "--dry-run", "--", "evaluate", "absent.pt").expect(0)
    with pytest.raises(UsageError, match=r"absent\.pt"):
        ssdctl.evaluate("absent.pt", config="ssdctl.toml")
    for command in ("train --dry-run", "launch --cpus 2 --dry-run", "config show"):
        cli(*command.split()).expect(2, "ssdctl.toml:2: train.fold: validates on other")
    Path("ssdctl.toml").unlink()
    Path("ssdctl.toml").symlink_to("absent.toml")
    cli("runs", ".").expect(2, "ssdctl.toml: no such config file")


def test_what_cannot_be_scored_is_a_warning(cli: Cli, dataset: Path) -> None:
    Path("none.json").write_text("[]")
    result = cli("evaluate", "none.json", "--data", dataset, "--json", "-q").expect(0, "none.json")
    assert json.loads(result.out)["AP"] == 0
    assert result.err.startswith("warning: ")
    path = dataset / "annotations/instances_val2017.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "annotations": []}))
    result = cli("evaluate", "none.json", "--data", dataset, "--json")
    assert (result.code, json.loads(result.out)["AP"]) == (0, -1)
    assert "no annotated objects" in result.err
    assert "AP is 0" not in result.err


def test_benchmark_commands(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ssdctl.cli.machine.TRAIN_IMAGES", 8)
    monkeypatch.setattr("ssdctl.cli.machine.VAL_IMAGES", 1)
    monkeypatch.setattr("ssdctl.benchmark.data.BATCH_SIZE", 4)
    metrics = json.loads(cli("benchmark", "data", "--seconds", 0.3, "--json").out)
    for name in ("images_per_second", "images_per_second_full"):
        assert 0 < metrics[name] < 1e5
