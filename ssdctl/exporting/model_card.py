"""Write the model card (README.md) of a model on the Hugging Face Hub. Torch-free."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ssdctl._version import __version__
from ssdctl.inference.drawing import one_line
from ssdctl.runtime.printable import listed

FIGURES = ("AP", "AP50", "AP75", "APs", "APm", "APl", "AR1", "AR10", "AR100", "ARs", "ARm", "ARl")
MAX_CLASSES = 100  # rows of the table of classes

CARD = """---
{header}---

# {title}

SSD300 on {backbone}, from ssdctl {version}: {classes} classes, images of 300 x 300 pixels.

## Results

{results}

## Data

{data}

## Use it

With ssdctl, and the packages huggingface_hub and safetensors:

```sh
ssdctl predict hf://{repo} street.jpg
ssdctl evaluate hf://{repo} --data DIR
ssdctl train --init hf://{repo} --backbone {backbone} --extra-norm {extra_norm} --data DIR
```

Without ssdctl (onnxruntime and Pillow), in a folder with the files of this
repository (`hf download {repo} --local-dir .`):

```python
{snippet}
```

## License

{license}
{samples}"""

SNIPPET = """\
import json, numpy, onnxruntime
from PIL import Image, ImageOps

session = onnxruntime.InferenceSession("model.onnx")
names = json.loads(session.get_modelmeta().custom_metadata_map["classes"])
image = ImageOps.exif_transpose(Image.open("street.jpg")).convert("RGB")
pixels = numpy.asarray(image.resize((300, 300), Image.Resampling.BILINEAR))
boxes, scores, labels, count = session.run(None, {"images": pixels[None]})
for box, score, label in zip(boxes[0], scores[0], labels[0]):
    if score > 0.3:
        box = box.clip(0, 1) * (image.size * 2)  # left, top, right, bottom in pixels
        print(names[label - 1], round(float(score), 3), box.round().tolist())"""


class CardFacts(NamedTuple):
    """What a card says about a model."""

    repo: str  # org/name
    config: Mapping[str, Any]  # the content of config.json
    figures: Mapping[str, float] | None  # COCO's, of this checkpoint; None if it is not evaluated
    class_ap: Mapping[str, float]
    dataset: str | None  # the name of its folder
    images: int  # of the training split; 0 if unknown
    settings: Mapping[str, Any]  # of the training
    license: str
    data_license: str | None
    samples: Sequence[str]  # file names of drawn images


def model_card(facts: CardFacts) -> str:
    """Return the text of README.md; class and dataset names are escaped."""
    architecture = facts.config["architecture"]
    return CARD.format(
        header=_header(facts),
        title=facts.repo.partition("/")[2],
        backbone=architecture["backbone"],
        extra_norm=architecture["extra_norm"],
        version=__version__,
        classes=architecture["num_classes"] - 1,
        results=_results(facts),
        data=_data(facts),
        repo=facts.repo,
        snippet=SNIPPET,
        license=_license(facts),
        samples=_samples(facts.samples),
    )


def _header(facts: CardFacts) -> str:
    """Return the metadata in YAML; JSON strings are YAML strings."""
    lines = [
        f"license: {json.dumps(facts.license)}",
        "library_name: ssdctl",
        "pipeline_tag: object-detection",
        "tags: [ssd300, object-detection]",
    ]
    if facts.figures is not None:
        name, dataset = (json.dumps(one_line(text)) for text in (facts.repo, facts.dataset or "?"))
        lines += [
            "model-index:",
            f"- name: {name}",
            "  results:",
            "  - task: {type: object-detection}",
            f"    dataset: {{name: {dataset}, type: {dataset}}}",
            "    metrics:",
            f"    - {{type: AP, value: {facts.figures['AP']:.4f}, name: COCO AP}}",
        ]
    return "".join(f"{line}\n" for line in lines)


def _results(facts: CardFacts) -> str:
    if facts.figures is None:
        return "This checkpoint was not evaluated."
    figures = [name for name in FIGURES if facts.figures.get(name, -1) >= 0]
    lines = [
        f"COCO metrics on the validation split of {_cell(facts.dataset or 'the dataset')}, at step "
        f"{facts.config['step']:,}:",
        "",
        f"| {' | '.join(figures)} |",
        "|" + "---:|" * len(figures),
        f"| {' | '.join(f'{facts.figures[name]:.3f}' for name in figures)} |",
    ]
    if facts.class_ap:
        rows = list(facts.class_ap.items())[:MAX_CLASSES]
        lines += ["", "| class | AP |", "|---|---:|"]
        lines += [f"| {_cell(name)} | {ap:.3f} |" for name, ap in rows if ap >= 0]
    return "\n".join(lines)


def _data(facts: CardFacts) -> str:
    names = [_cell(c["name"]) for c in facts.config["classes"]]
    images = f", {facts.images:,} training images" if facts.images else ""
    recipe = ""
    if facts.settings:
        shown = {
            "preset": facts.settings.get("train.preset"),
            "step": facts.config["step"],
            "epoch": round(facts.config["epoch"], 2),
            "batch size per device": facts.settings.get("train.batch_size"),
            "learning rate (at global batch 32)": facts.settings.get("train.lr"),
            "optimizer": facts.settings.get("train.optimizer"),
        }
        facts_text = ", ".join(f"{k} {v}" for k, v in shown.items() if v is not None)
        recipe = f"\n\nTraining: {_cell(facts_text)}."
    dataset = _cell(facts.dataset or "unknown")
    return f"Dataset: {dataset}{images}.\n\nClasses: {listed(names, MAX_CLASSES)}.{recipe}"


def _license(facts: CardFacts) -> str:
    data = _cell(facts.data_license) if facts.data_license else "not stated; see its publisher"
    return f"- Weights: {_cell(facts.license)}\n- Dataset and sample images: {data}\n"


def _samples(names: Sequence[str]) -> str:
    if not names:
        return ""
    images = "\n".join(f"![detections]({name})" for name in names)
    return f"\n## Samples\n\nDetections with a score above 0.3:\n\n{images}\n"


def _cell(text: str) -> str:
    """Return foreign text as one line of plain Markdown."""
    return re.sub(r"([\\`*_{}\[\]()#|<>!&~])", r"\\\1", one_line(text, 200))
