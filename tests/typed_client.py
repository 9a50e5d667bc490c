"""A program that uses every public name: mypy checks it, tests/test_api.py runs it."""

import sys
from pathlib import Path

import numpy as np
import torch
from torch.utils.data import DataLoader

import ssdctl
from ssdctl.training.observers import Scored

TINY = ssdctl.configure(
    train={"log_every": 1, "device": "cpu", "workers": 1, "warmup": "1st", "batch_size": 2},
    model={"backbone": "resnet18", "weights": "none"},
)


class Printer(ssdctl.Observer):
    def on_evaluation(self, scored: Scored) -> None:
        print(scored.step, scored.evaluation.metrics["AP"])


def train(data: Path) -> ssdctl.Run:
    for split in ssdctl.prepare(data, pack=False).splits:
        print(split.split, split.images)
    losses: list[float] = []
    with ssdctl.Trainer(data, out="stepped", steps=2, config=TINY, progress=False) as trainer:
        for step in trainer:
            losses.append(step.loss)
            if step.evaluation is not None:
                print(step.step, step.lr, step.evaluation.metrics["AP"], trainer.plan.total_steps)
    assert len(losses) == 2
    config: ssdctl.Config = TINY
    run: ssdctl.Run = ssdctl.train(
        data, out="run", steps=1, config=config, progress=False, observers=[Printer()]
    )
    page: Path = ssdctl.report(run, out="page.html")
    print(run.best, run.metrics, run.best_metrics, run.config.train.lr, run.plot().size, page)
    return run


def predict(run: ssdctl.Run, image: Path) -> ssdctl.Result:
    predictor: ssdctl.Predictor = ssdctl.load(run, device="cpu", score=0.02)
    result = predictor(image)
    many: list[ssdctl.Result] = predictor.predict([image, image])
    best: ssdctl.Detection = result[0]
    confident: ssdctl.Result = result[result.scores > 0.1]
    named: ssdctl.Result = result[result.names == best.name]
    boxes: np.ndarray = result.boxes
    print(len(many), len(confident), len(named[:2]), boxes.shape, result.to_coco())
    for found in predictor.predict_iter([image], batch_size=1):
        print([detection.box for detection in found], found.save("drawn.png"))
    return result


def score(run: ssdctl.Run) -> float:
    evaluation: ssdctl.Evaluation = ssdctl.evaluate(run, device="cpu", limit=2, progress=False)
    exported = ssdctl.export(run, "mlperf.pt", format="mlperf", progress=False)
    print(exported["file"], ssdctl.__version__)
    return evaluation.metrics["AP"]


def own_loop(run: ssdctl.Run, data: Path) -> None:
    dataset = ssdctl.Dataset(data, "train", augment="ssd")
    model = ssdctl.SSD300("resnet18", num_classes=len(dataset.class_names) + 1)
    images, targets = next(iter(DataLoader(dataset, 2, collate_fn=dataset.collate)))
    model.loss(images, targets).backward()
    found: list[ssdctl.Result] = model.detect(images, score=0.05)
    file: Path = model.save("own.pt", class_names=dataset.class_names)
    print(found[0].to_torch()["boxes"].shape, ssdctl.load(file, device="cpu"), model.training)
    print(ssdctl.evaluate(model, data, device="cpu", limit=1, progress=False).metrics["AP"])
    boxes, labels = torch.zeros(1, 1, 4), torch.zeros(1, 1, dtype=torch.int64)
    losses = ssdctl.MultiboxLoss()(*model(torch.zeros(1, 3, 300, 300)), boxes, labels)
    print(
        losses.total, ssdctl.default_boxes().shape, ssdctl.SSD300.from_checkpoint(run).class_names
    )


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    trained = train(folder)
    predict(trained, next((folder / "val2017").iterdir()))
    score(trained)
    own_loop(trained, folder)
    try:
        ssdctl.load("nowhere.pt")
    except ssdctl.errors.UsageError as error:
        print(error.hint)
