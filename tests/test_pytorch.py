"""The network, loss and dataset in loops of other libraries."""

import copy
import json
import pickle
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

import ssdctl
from ssdctl.checkpoint.file import load_resumable
from ssdctl.config.fields import Tiling
from ssdctl.data.image_decode import read_rgb
from ssdctl.errors import DataError, IntegrityError, NonFiniteError, UsageError
from ssdctl.input.normalize import Normalize
from ssdctl.model.backbones import RESNET


@pytest.fixture(scope="module")
def model() -> ssdctl.SSD300:
    torch.manual_seed(0)
    return ssdctl.SSD300("resnet18", num_classes=6)


def target(*boxes: tuple[float, ...]) -> dict[str, torch.Tensor]:
    labels = torch.arange(1, len(boxes) + 1)
    return {"boxes": torch.tensor(boxes).reshape(-1, 4), "labels": labels}


class Labeled(ssdctl.Dataset):
    def __init__(self, data: Path, label: int) -> None:
        self.label = label
        super().__init__(data, "val")

    def __getitem__(self, index: int) -> Any:
        image, target = super().__getitem__(index)
        return image, {"labels": target["labels"][target["labels"] == self.label]}


def test_items_are_the_annotated_images(shapes: Path) -> None:
    dataset = ssdctl.Dataset(shapes, "val")
    truth = json.loads((shapes / "annotations/instances_val2017.json").read_text())
    assert len(dataset) == len(truth["images"])
    assert dataset.class_names == [c["name"] for c in truth["categories"]]
    number = next(n for n, i in enumerate(truth["images"]) if i["width"] != i["height"])
    image, found = dataset[number]
    listed = truth["images"][number]
    assert found["image_id"] == listed["id"]
    expected = read_rgb(shapes / "val2017" / listed["file_name"])
    assert (image.dtype, image.shape) == (torch.float32, (3, *expected.shape[:2]))
    assert np.array_equal((image * 255).round().byte().permute(1, 2, 0), expected)
    boxes = [a["bbox"] for a in truth["annotations"] if a["image_id"] == listed["id"]]
    ltrb = [(x, y, x + w, y + h) for x, y, w, h in boxes]
    np.testing.assert_allclose(found["boxes"], np.reshape(ltrb, (-1, 4)), atol=0.01)
    assert found["labels"].dtype == torch.int64
    assert len(found["labels"]) == len(boxes)
    assert dataset[-1][1]["image_id"] == truth["images"][-1]["id"]
    with pytest.raises(IndexError):
        dataset[len(dataset)]


def test_a_dataset_is_read_from_any_folder(dataset: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(dataset.parent)
    items = ssdctl.Dataset(dataset.name, "val")
    monkeypatch.chdir("/")
    assert items[0][0].ndim == 3


def test_targets_have_areas_and_crowds(dataset: Path) -> None:
    path = dataset / "annotations/instances_val2017.json"
    document = json.loads(path.read_text())
    document["annotations"][2] |= {"iscrowd": 1, "area": 7.5}
    path.write_text(json.dumps(document))
    for _, target in ssdctl.Dataset(dataset, "val"):
        listed = [a for a in document["annotations"] if a["image_id"] == target["image_id"]]
        assert target["iscrowd"].tolist() == [a["iscrowd"] for a in listed]
        assert target["area"].tolist() == pytest.approx([a["area"] for a in listed])

    def without_first(image: Any, target: Any) -> Any:  # as SanitizeBoundingBoxes does
        labels = copy.deepcopy(target["labels"])
        kept = labels.cumsum(0) > labels[0]
        return image, {**target, "boxes": target["boxes"][kept], "labels": labels[kept]}

    items: Any = [
        ssdctl.Dataset(dataset, "val", **options)
        for options in ({}, {"augment": "flip"}, {"transforms": without_first})
    ]
    for (_, plain), (_, flipped), (_, rest) in zip(*items, strict=True):
        assert flipped["iscrowd"].tolist() == plain["iscrowd"].tolist()
        assert rest["iscrowd"].tolist() == plain["iscrowd"][1:].tolist()
        assert rest["labels"].tolist() == plain["labels"][1:].tolist()
        assert type(rest["labels"]) is torch.Tensor


@pytest.mark.parametrize("names", [["boxes", "labels"], ["boxes", "labels", "iscrowd"]])
def test_crowds_are_chosen_as_labels(names: list[str], dataset: Path) -> None:
    path = dataset / "annotations/instances_val2017.json"
    document = json.loads(path.read_text())
    for annotation in document["annotations"][::3]:
        annotation["iscrowd"] = 1
    path.write_text(json.dumps(document))

    def reversed_(image: Any, target: Any) -> Any:
        order = torch.arange(len(target["boxes"])).flip(0)
        new = {name: target[name][order] for name in names}
        new["labels"] = (new["labels"] - 1).clone().to(torch.int32) + 1
        texts = [f"{label:d}" for label in target["labels"]]
        assert texts == [str(int(target["labels"][n])) for n in range(len(texts))]
        return image, {**target, **new, "all_labels": target["labels"]}

    items = ssdctl.Dataset(dataset, "val"), ssdctl.Dataset(dataset, "val", transforms=reversed_)
    for (_, plain), (_, after) in zip(*items, strict=True):
        assert after["iscrowd"].tolist() == plain["iscrowd"].flip(0).tolist()
        assert {type(after[name]) for name in ("labels", "all_labels")} == {torch.Tensor}

    def without_boxes(image: Any, target: Any) -> Any:
        new = {name: target[name].narrow(0, 0, 0) for name in ("boxes", "labels")}
        return image, {**target, **new}

    def flipped(image: Any, target: Any) -> Any:
        return image, {**target, **{name: target[name].flip(0) for name in ("boxes", "labels")}}

    for transforms in (without_boxes, flipped):
        with pytest.raises(UsageError, match="iscrowd"):
            [*ssdctl.Dataset(dataset, "val", transforms=transforms)]


@pytest.mark.parametrize("augment", ["ssd", "ssd-zoom"])
def test_augmented_items_follow_torchs_random_numbers(shapes: Path, augment: Any) -> None:
    dataset = ssdctl.Dataset(shapes, "train", augment=augment)

    def draw(seed: int) -> torch.Tensor:
        torch.manual_seed(seed)
        return torch.stack([dataset[n][0] for n in range(4)])

    first = draw(1)
    assert first.shape == (4, 3, 300, 300)
    assert 0 <= first.min() < first.max() <= 1
    assert torch.equal(first, draw(1))
    assert not torch.equal(first, draw(2))
    for n in range(len(dataset)):
        boxes = dataset[n][1]["boxes"]
        assert len(boxes) > 0
        assert boxes.min() >= 0
        assert boxes.max() <= 300
        assert (boxes[:, 2:] > boxes[:, :2]).all()


def test_joint_transforms_of_torchvision(shapes: Path, model: ssdctl.SSD300) -> None:
    from torchvision.transforms import v2

    transforms = v2.Compose(
        [
            v2.RandomHorizontalFlip(p=1.0),
            v2.Resize((100, 200)),
            v2.RandomCrop((90, 150)),
            v2.SanitizeBoundingBoxes(),
            v2.ConvertBoundingBoxFormat("CXCYWH"),
        ]
    )
    plain, flipped = ssdctl.Dataset(shapes), ssdctl.Dataset(shapes, transforms=transforms)
    again = pickle.loads(pickle.dumps(flipped))
    for number in (0, 1, 2):
        (image, before), (small, after) = plain[number], again[number]
        assert small.shape == (3, 90, 150)
        assert len(after["boxes"]) <= len(before["boxes"])
        assert len({len(after[name]) for name in ("boxes", "labels", "area", "iscrowd")}) == 1
        assert after["area"].tolist() == after["boxes"][:, 2:].prod(dim=1).tolist()
        assert model.loss([small], [after]) >= 0
    only_tensors = v2.Compose([v2.RandomHorizontalFlip(1.0), v2.ToPureTensor()])
    mirrored, _ = ssdctl.Dataset(shapes, transforms=only_tensors)[2]
    assert torch.equal(mirrored, image.flip(2))


def test_images_without_objects_are_items_and_train(shapes: Path, model: ssdctl.SSD300) -> None:
    without = ssdctl.Dataset(shapes, "train", augment="ssd")
    dataset = ssdctl.Dataset(shapes, "train", augment="ssd", background=True)
    document = json.loads((shapes / "annotations/instances_train2017.json").read_text())
    empty = {i["id"] for i in document["images"]} - {a["image_id"] for a in document["annotations"]}
    assert len(dataset) == len(without) + len(empty)
    number = [i["id"] for i in document["images"]].index(min(empty))
    image, found = dataset[number]
    assert found["boxes"].shape == (0, 4)
    assert model.loss([image], [found]) == 0
    assert model.loss([image], [{}]) == 0  # as torchvision's wrapped datasets
    assert model.loss([image], [found], background_negatives=30) > 0


def test_a_loader_collates_items_also_in_another_process(
    shapes: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dataset = pickle.loads(pickle.dumps(Labeled(shapes, 1)))
    assert {*torch.cat([target["labels"] for _, target in dataset]).tolist()} == {1}
    monkeypatch.chdir(shapes)
    original = ssdctl.Dataset(".", "val", store="prepared")
    original.class_names = ["renamed"]
    monkeypatch.chdir(tmp_path)
    dataset = pickle.loads(pickle.dumps(original))
    assert dataset.class_names == original.class_names
    images, targets = next(iter(DataLoader(dataset, batch_size=3, collate_fn=dataset.collate)))
    assert [len(images), len(targets)] == [3, 3]
    assert torch.equal(images[2], dataset[2][0])


def test_a_store_that_changes_before_a_worker_opens_it(shapes: Path, tmp_path: Path) -> None:
    data = tmp_path / "copy"
    shutil.copytree(shapes, data, ignore=shutil.ignore_patterns("prepared"))
    pickled = pickle.dumps(ssdctl.Dataset(data, "val"))
    labels = data / "annotations/instances_val2017.json"
    labels.write_text(labels.read_text().replace('"category_id":1', '"category_id":2'))
    with pytest.raises(DataError, match="was prepared again"):
        pickle.loads(pickled)


def test_wrong_datasets_are_named(shapes: Path) -> None:
    with pytest.raises(UsageError, match="test"):
        ssdctl.Dataset(shapes, "test")
    wrong = {"mosaic": "'mosaic'", "ssd,flip": "twice", "ssd,zoom": "zoom,crop"}
    for augment, named in wrong.items():
        with pytest.raises(UsageError, match=f"^augment: .*{named}"):
            ssdctl.Dataset(shapes, augment=augment)
    for missing, shown in (("nowhere", "nowhere"), (None, "data")):
        with pytest.raises(DataError, match=shown):
            ssdctl.Dataset(missing)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match='augment="none"'):
        ssdctl.Dataset(shapes, augment=None)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="expected an integer"):
        ssdctl.Dataset(shapes)[0:2]  # type: ignore[index]


def test_the_loss_of_the_network_is_the_multibox_loss(model: ssdctl.SSD300) -> None:
    torch.manual_seed(1)
    pixels = torch.randint(0, 256, (2, 300, 300, 3), dtype=torch.uint8)
    fractions = torch.tensor(
        [[[0.1, 0.2, 0.6, 0.8], [0, 0, 0, 0]], [[0.5, 0.5, 1, 1], [0, 0, 0.3, 0.4]]]
    )
    labels = torch.tensor([[1, 0], [1, 2]])
    expected = ssdctl.MultiboxLoss()(
        *model(Normalize(RESNET.mean, RESNET.std)(pixels)), fractions, labels
    ).total
    images = pixels.permute(0, 3, 1, 2)
    targets = [target((30, 60, 180, 240)), target((150, 150, 300, 300), (0, 0, 90, 120))]
    for given in (images, list(images), images / 255):
        torch.testing.assert_close(model.loss(given, targets), expected)
    # Boxes are in pixels of each image; of one color, an image is the same in every size.
    plain = torch.full((2, 3, 300, 300), 0.5)
    wide = [{**t, "boxes": t["boxes"] * torch.tensor([2.0, 1.0, 2.0, 1.0])} for t in targets]
    stretched = torch.full((2, 3, 300, 600), 0.5)
    torch.testing.assert_close(model.loss(stretched, wide), model.loss(plain, targets))
    assert "targets" not in str(list(model.state_dict()))
    empty = torch.zeros(2, 0, 4), torch.zeros(2, 0, dtype=torch.long)
    assert ssdctl.MultiboxLoss()(*model(plain), *empty).total == 0
    with pytest.raises(NotImplementedError, match="second derivatives"):
        torch.autograd.grad(model.loss(plain, targets), [*model.parameters()], create_graph=True)


def in_format(name: str, box: tuple[float, ...], canvas_size: tuple[int, int]) -> torch.Tensor:
    from torchvision import tv_tensors

    return tv_tensors.BoundingBoxes([box], format=name, canvas_size=canvas_size)


def test_boxes_are_converted_from_their_format(model: ssdctl.SSD300) -> None:
    image, plain = torch.rand(3, 200, 100), target((10, 20, 50, 120))
    expected = model.loss([image], [plain])
    for name, box in (("XYWH", (10, 20, 40, 100)), ("CXCYWH", (30, 70, 40, 100))):
        boxes = in_format(name, box, (200, 100))
        assert model.loss([image], [{**plain, "boxes": boxes}]) == expected


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_the_loss_takes_the_precision_of_the_weights(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    tiny = ssdctl.SSD300("tiny", num_classes=3).eval()
    images, targets = torch.rand(2, 3, 300, 300), [target((30, 60, 180, 240)), target()]
    expected = tiny.loss(images, targets)
    loss = tiny.to(dtype).loss(images, targets)
    loss.backward()
    assert loss.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    torch.testing.assert_close(loss.float(), expected, rtol=0.02, atol=0)
    rounded = tiny.float().loss(images, targets)
    fresh = ssdctl.SSD300("tiny", num_classes=3).eval()
    fresh.load_state_dict(tiny.state_dict())
    assert rounded == fresh.loss(images, targets)  # no constant of the loss was rounded


@pytest.mark.slow
@pytest.mark.skipif(torch.__version__ < "2.10", reason="torch 2.6 cannot trace named tuples")
def test_the_loss_of_fixed_shapes_is_one_graph() -> None:
    tiny = ssdctl.SSD300("tiny", num_classes=3).eval()
    images, targets = torch.rand(2, 3, 300, 300), [target((30, 60, 180, 240)), target()]
    compiled = torch.compile(tiny.loss, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(images, targets), tiny.loss(images, targets))


def tiny_network(num_classes: Any = 6) -> ssdctl.SSD300:
    torch.manual_seed(0)
    return ssdctl.SSD300("tiny", num_classes)


def test_a_network_of_an_own_loop_is_a_checkpoint(shapes: Path) -> None:
    own, dataset = tiny_network(np.int64(6)), ssdctl.Dataset(shapes, "val")
    wrapped, names = torch.compile(torch.optim.swa_utils.AveragedModel(own)), dataset.class_names
    with pytest.raises(UsageError, match=r"class_names=\[...\]"):
        own.save("own.pt")
    assert own.save("own.pt", class_names=dataset.classes) == Path("own.pt")
    options: dict[str, Any] = {"device": "cpu", "limit": 3, "score_threshold": 0.02}
    first, *others = (
        ssdctl.evaluate(network, shapes, progress=False, **options)
        for network in ("own.pt", own, wrapped)
    )
    assert first.about.images == 3
    assert all(other.metrics == first.metrics for other in others)
    assert own.training
    read = ssdctl.SSD300.from_checkpoint("own.pt")
    assert (read.class_names, read.training) == (names, False)
    assert str(read.state_dict()) == str(own.state_dict())
    for _ in range(2):
        read.save("again.pt", class_names=names)
    assert ssdctl.load("again.pt", device="cpu").model.classes == dataset.classes  # with their ids
    copied = ssdctl.load(own, device="cpu").model
    assert next(copied.parameters()) is not next(own.parameters())
    assert ssdctl.export(own, "own.safetensors", format="safetensors")["source"] == "SSD300 tiny"
    exported = ssdctl.SSD300.from_checkpoint("own.safetensors")
    assert exported.architecture == own.architecture
    assert str(exported.state_dict()) == str(own.state_dict())
    with pytest.raises(UsageError, match="cannot be resumed"):
        load_resumable(Path("own.pt"))


class Halved(ssdctl.SSD300):
    def forward(self, images_B3HW: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        offsets, logits = super().forward(images_B3HW)
        return offsets / 2, logits


def test_what_is_not_a_network_is_named() -> None:
    for wrong in (torch.nn.Linear(1, 1), tiny_network().state_dict(), 7):
        with pytest.raises(UsageError, match=type(wrong).__name__):
            ssdctl.load(wrong)  # type: ignore[arg-type]
    own = tiny_network()
    with pytest.raises(UsageError, match=r'init="model\.pt"'):
        ssdctl.train("shapes", init=own)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="Halved has a `forward` of its own"):
        ssdctl.evaluate(Halved("tiny", 6), "shapes")
    own.extra = torch.nn.ModuleList()
    with pytest.raises(IntegrityError, match="extra"):
        own.save("own.pt", class_names=[*"abcde"])


def test_detections_are_those_of_a_predictor() -> None:
    own = tiny_network()
    own.backbone.eval()  # stays so
    images = torch.randint(0, 256, (2, 3, 200, 400), dtype=torch.uint8)
    modes = [module.training for module in own.modules()]
    found = own.detect(images, score=0.02, nms_iou=0.4)
    assert [module.training for module in own.modules()] == modes
    with ThreadPoolExecutor(4) as pool:
        given = [[*images / 255], iter(images), *[images] * 12]
        together = pool.map(lambda same: own.detect(same, score=0.02, nms_iou=0.4), given)
        assert all(found == same for same in together)
    assert [module.training for module in own.modules()] == modes
    expected = ssdctl.load(own, device="cpu", score=0.02, nms_iou=0.4).predict([*images])
    for result, other in zip(found, expected, strict=True):
        assert result.labels.tolist() == other.labels.tolist()
        np.testing.assert_allclose(result.boxes, other.boxes, atol=0.02)
    assert min(len(result) for result in found) > 0
    assert found[0].class_names[0] == "class 1"
    tensors = found[0].to_torch()
    assert [t.dtype for t in tensors.values()] == [torch.float32, torch.float32, torch.int64]
    np.testing.assert_allclose(
        tensors["boxes"].clamp(min=0).minimum(torch.tensor([400.0, 200.0] * 2)),
        found[0].boxes,
        atol=0.01,
    )
    assert found[1].plot().size == (400, 200)
    own.class_names = ["a", "b", "c", "d", "e"]
    (wide,) = own.detect([torch.full((3, 100, 400), 0.3)], score=0.02)
    assert (wide.size, wide.class_names) == ((400, 100), own.class_names)
    assert wide.boxes.max(axis=0)[2] > 300
    wrong_options: Any = ({"score": 1.5}, {"nms_iou": float("nan")}, {"score": "best"})
    for wrong in wrong_options:
        with pytest.raises(UsageError, match=next(iter(wrong))):
            own.detect(images, **wrong)
    plain, own.tiling = own.detect(images), (150, 0.2)
    own.thresholds = [0.02, 0.02, None, 0.02, 0.02]
    own.save("tiled.pt")
    read = ssdctl.SSD300.from_checkpoint("tiled.pt")
    assert (read.tiling, read.thresholds) == (Tiling(150, 0.2), own.thresholds)
    wrong_names = [["a"], dict.fromkeys("abcde")]
    wrong_values = {
        "tiling": [(0, 0.2)],
        "thresholds": [[0.5], [2] * 5],
        "class_names": wrong_names,
    }
    for name, values in wrong_values.items():
        for value in values:
            with pytest.raises(UsageError, match=name):
                setattr(own, name, value)
    for names, named in (("abcde", "'abcde'"), (["a" * 10_001, *"bcde"], "own.pt")):
        with pytest.raises(UsageError, match=named):
            own.save("own.pt", class_names=names)
    assert not Path("own.pt").exists()
    for result, other, image in zip(read.detect(images), plain, images, strict=True):
        assert len(result) > len(other)
        expected = ssdctl.load("tiled.pt", device="cpu")(image)
        assert result.labels.tolist() == expected.labels.tolist()
        np.testing.assert_allclose(result.boxes, expected.boxes, atol=0.02)
    own.box_heads[0].bias.data.fill_(float("nan"))
    with pytest.raises(NonFiniteError):
        own.detect(images)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_detections_take_the_precision_of_the_weights(dtype: torch.dtype) -> None:
    own, images = tiny_network(), torch.rand(1, 3, 300, 300)
    (expected,), (found,) = (n.detect(images, score=0.02) for n in (own, own.to(dtype)))
    np.testing.assert_allclose(found.scores[:5], expected.scores[:5], atol=0.01)
    with torch.autocast("cpu", torch.bfloat16):
        assert len(own.float().detect(images, score=0.02)[0])


IMAGE = torch.zeros(3, 9, 9)


@pytest.mark.parametrize(
    ("images", "targets", "named"),
    [
        ([IMAGE], [], "0 targets"),
        ([], [], "empty"),
        ([torch.zeros(9, 9, 3)], [target()], r"\(9, 9, 3\)"),
        ([IMAGE.long()], [target()], "int64"),
        ([IMAGE], [{**target((0, 0, 0, 0)), "labels": torch.tensor([6])}], "6"),
        ([IMAGE], [{**target((0, 0, 0, 0)), "labels": torch.tensor([0])}], "0"),
        ([IMAGE], [{**target((0, 0, 0, 0)), "boxes": torch.zeros(4, 1)}], r"boxes \(4, 1\)"),
        ([IMAGE], [{**target((0, 0, 0, 0)), "labels": torch.ones(1, 1).long()}], r"\(1, 1\)"),
        ([IMAGE], [{**target((0, 0, 0, 0)), "labels": torch.tensor([1.7])}], "float32"),
        ([IMAGE.numpy()], [target()], "ndarray"),
        ([IMAGE], [torch.zeros(1, 4)], "Tensor"),
        ([IMAGE], [{"bboxes": torch.zeros(1, 4), "image_id": torch.tensor(1)}], ": bboxes, but"),
        ([IMAGE + 255], [target()], "255 to 255"),
        ([IMAGE - 1], [target()], "-1"),
        ([IMAGE], [target((5, 1, 2, 8))], "no area"),
        ([IMAGE], [target((1, float("nan"), 8, 5))], "no area"),
        ([IMAGE], [{**target(), "boxes": in_format("XYXY", (1, 2, 3, 4), (9, 8))}], r"\(9, 8\)"),
    ],
)
def test_bad_batches_are_named(model: ssdctl.SSD300, images: Any, targets: Any, named: str) -> None:
    with pytest.raises(UsageError, match=named):
        model.loss(images, targets)


def test_networks_that_do_not_exist_are_refused(model: ssdctl.SSD300) -> None:
    wrong = [("tin", 3, "none"), ("tiny", 3, "batc"), ("vgg16", 3, "batch"), ("tiny", 1, "none")]
    for name, classes, norm in wrong:
        with pytest.raises(UsageError, match=f"{norm}|num_classes {classes}|hint: choose from"):
            ssdctl.SSD300(name, classes, norm)
    with pytest.raises(UsageError, match="320"):
        model(torch.zeros(1, 3, 320, 320))
    for stages in (-1, 5):
        with pytest.raises(UsageError, match=str(stages)):
            model.freeze(stages)
