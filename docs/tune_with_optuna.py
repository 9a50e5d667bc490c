"""Search learning rate, frozen stages and batch norm for a dataset with Optuna; resumable.

    pip install optuna
    python docs/tune_with_optuna.py --data parts --init nvidia-ssd300-coco --out runs/search \
        --trials 20 -- --steps 200

What follows `--` goes to `ssdctl train` unchanged. Run the same command again after an
interruption: finished trials are in OUT/study.db and are not repeated, and the interrupted trial
continues from its last checkpoint.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import optuna
from optuna.trial import TrialState


def main() -> None:
    """Run trials until the study has as many finished ones as asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", required=True)
    parser.add_argument("--init", required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--trials", type=int, default=20)
    parser.add_argument("train_options", nargs="*")
    arguments = parser.parse_args()
    if not train(arguments, "--dry-run")["evaluations"]:
        command = f"ssdctl prepare --data {arguments.data} --split 0.9"
        sys.exit(f"{arguments.data}: trials are compared by AP on validation images: {command}")
    arguments.out.mkdir(parents=True, exist_ok=True)
    study = optuna.create_study(
        study_name="ssdctl",
        storage=f"sqlite:///{arguments.out / 'study.db'}",
        direction="maximize",
        sampler=optuna.samplers.TPESampler(),
        load_if_exists=True,
    )
    for trial in study.get_trials(states=[TrialState.RUNNING]):  # left by an interrupted search
        study.enqueue_trial(trial.params, user_attrs=trial.user_attrs)
        study.tell(trial.number, state=TrialState.FAIL)
    while len(study.get_trials(states=[TrialState.COMPLETE])) < arguments.trials:
        trial = study.ask()
        study.tell(trial, average_precision(trial, arguments))
    sys.stdout.write(json.dumps({"AP": study.best_value, **study.best_params}) + "\n")


def average_precision(trial: optuna.Trial, arguments: argparse.Namespace) -> float:
    """Train with the trial's settings, or finish its run; return the best AP."""
    run = trial.user_attrs.get("run")
    if run is None:
        run = str(arguments.out / f"trial-{trial.number:03d}")
        trial.set_user_attr("run", run)
    weight_decay = trial.suggest_float("weight_decay", 1e-4, 0.1, log=True)
    lr = trial.suggest_float("lr", 2e-4, 1e-2, log=True)
    freeze = trial.suggest_int("freeze", 0, 3)
    norm = trial.suggest_categorical("norm", ["freeze-norm", "no-freeze-norm"])
    options = ["--optimizer", "adamw", "--weight-decay", str(weight_decay), "--lr", str(lr)]
    options += ["--freeze", str(freeze), f"--{norm}", "--seed", "0", "--out", run]
    return float(train(arguments, *options)["best_ap"])


def train(arguments: argparse.Namespace, *options: str) -> dict[str, Any]:
    """Return the JSON of `ssdctl train`; exit with its code if it fails: it wrote the reason."""
    command = [sys.executable, "-m", "ssdctl", "train", "--json", *options]
    command += ["--data", arguments.data, "--init", arguments.init, *arguments.train_options]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        sys.exit(done.returncode)
    result: dict[str, Any] = json.loads(done.stdout)
    return result


if __name__ == "__main__":
    main()
