"""The config: all settings of ssdctl, and the rules that involve several of them.

The command line's options, their help, the JSON schema, `config init` and the docs are generated
from the classes in `sections/`, which define the type, bounds, default and meaning of each setting.
A field without a default belongs to the recipe: every preset sets it.
"""

import typing

import msgspec

from ssdctl.config.augmentations import names_of, problem_of
from ssdctl.config.fields import BACKBONES, BackboneName
from ssdctl.config.sections.data import DataConfig, DownloadConfig, PrepareConfig
from ssdctl.config.sections.evaluate import EvaluateConfig, PredictConfig
from ssdctl.config.sections.launch import KubernetesConfig, LaunchConfig, SlurmConfig
from ssdctl.config.sections.train import ModelConfig, TrainConfig
from ssdctl.runtime.packages import load_plugin


class Config(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, dict=True):
    """All settings, resolved."""

    data: DataConfig
    download: DownloadConfig
    prepare: PrepareConfig
    model: ModelConfig
    train: TrainConfig
    evaluate: EvaluateConfig
    predict: PredictConfig
    launch: LaunchConfig
    slurm: SlurmConfig
    kubernetes: KubernetesConfig


def conflicts(config: Config) -> list[tuple[str, str]]:
    """Return (key, problem) of each rule between several settings that the config breaks."""
    problems = []
    decays = config.train.decay_epochs
    if list(decays) != sorted(set(decays)):
        problems.append(("train.decay_epochs", "the epochs must increase"))
    weights_backbone = config.model.weights.partition("-")[0]
    is_backbone = weights_backbone in typing.get_args(BackboneName)
    if is_backbone and weights_backbone != config.model.backbone:
        problems.append(
            ("model.weights", f"{config.model.weights} does not fit {config.model.backbone}")
        )
    if config.model.extra_norm not in load_plugin(*BACKBONES, config.model.backbone).EXTRA_NORMS:
        problem = f"{config.model.backbone} has no extra blocks with {config.model.extra_norm}"
        problems.append(("model.extra_norm", problem))
    if config.train.lr_decay == "cosine" and len(decays) != 2:
        problems.append(("train.decay_epochs", "cosine needs two epochs, its start and its end"))
    if (unknown := problem_of(config.train.augment)) is not None:
        problems.append(("train.augment", unknown))
    if "zoom" in names_of(config.train.augment) and config.train.pipeline == "dali":
        problems.append(("train.augment", "zoom needs --pipeline native"))
    if config.train.init is not None and config.train.resume not in ("auto", "never"):
        problems.append(("train.init", "--init starts a new run, --resume FILE continues one"))
    if config.train.profile is not None:
        first, last = map(int, config.train.profile.split(","))
        if last < first:
            problems.append(("train.profile", f"step {last} is before step {first}"))
    return problems
