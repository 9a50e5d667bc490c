"""Every setting of ssdctl, once: its type, its bounds, its default and what it is for.

The command line's options, their help, the JSON schema, `config init` and the docs are made from
the tables in `sections/`. A field without a default belongs to the recipe: every preset names it.
"""

import typing

import msgspec

from ssdctl.config.fields import BackboneName
from ssdctl.config.sections.data import DataConfig, DownloadConfig, PrepareConfig
from ssdctl.config.sections.evaluate import EvaluateConfig, PredictConfig
from ssdctl.config.sections.launch import KubernetesConfig, LaunchConfig, SlurmConfig
from ssdctl.config.sections.train import ModelConfig, TrainConfig


class Config(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
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
    """The rules that bind several settings: (key, what is wrong) for each one broken."""
    found = []
    decays = config.train.decay_epochs
    if list(decays) != sorted(set(decays)):
        found.append(("train.decay_epochs", "the epochs must rise"))
    named = config.model.weights.partition("-")[0]
    if named in typing.get_args(BackboneName) and named != config.model.backbone:
        found.append(
            ("model.weights", f"{config.model.weights} do not fit {config.model.backbone}")
        )
    if config.model.backbone == "vgg16" and config.model.extra_norm != "none":
        found.append(("model.extra_norm", "the extra blocks of vgg16 have no batch norm"))
    if config.train.lr_decay == "cosine" and len(decays) != 2:
        found.append(("train.decay_epochs", "a cosine needs two epochs, its start and its end"))
    if config.train.augment == "ssd-zoom" and config.train.pipeline == "dali":
        found.append(("train.augment", "ssd-zoom needs --pipeline native"))
    if config.train.init is not None and config.train.resume not in ("auto", "never"):
        found.append(("train.init", "--init starts a new run and --resume FILE goes on with one"))
    if config.train.profile is not None:
        first, last = map(int, config.train.profile.split(","))
        if last < first:
            found.append(("train.profile", f"step {last} comes before step {first}"))
    return found
