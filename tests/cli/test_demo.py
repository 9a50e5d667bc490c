"""The number of training steps of the demo on machines of different speed."""

from __future__ import annotations

import shlex
from pathlib import Path

import msgspec
import pytest
from PIL import Image, ImageColor

from ssdctl.cli import demo
from ssdctl.config.resolve import Override, resolve
from ssdctl.training.schedule import make_plan, next_evaluation


@pytest.mark.parametrize(
    ("step_s", "left_s", "fewest", "most"),
    [
        (0.1, 240.0, demo.FULL_STEPS, demo.FULL_STEPS),  # a fast machine: one pass over the images
        (0.5, 250.0, demo.USEFUL_STEPS, 400),
        (1.25, 230.0, demo.USEFUL_STEPS, demo.USEFUL_STEPS),  # a slow one takes longer
        (1.0, -20.0, demo.USEFUL_STEPS, demo.USEFUL_STEPS),
    ],
)
def test_steps_follow_from_the_speed(step_s: float, left_s: float, fewest: int, most: int) -> None:
    speed = demo.Speed(step_s, image_s=0.01)
    steps = demo.affordable_steps(speed, left_s)
    assert fewest <= steps <= most
    total_s = sum(stage.seconds for stage in demo.expected_stages(steps, speed))
    assert total_s <= left_s or steps == demo.USEFUL_STEPS


def test_a_slower_machine_is_promised_more_time() -> None:
    def total_s(step_s: float) -> float:
        stages = demo.expected_stages(demo.USEFUL_STEPS, demo.Speed(step_s, 0.01))
        return sum(stage.seconds for stage in stages)

    assert total_s(2.0) - total_s(1.0) >= demo.USEFUL_STEPS


@pytest.mark.parametrize("steps", [demo.USEFUL_STEPS, 370, demo.FULL_STEPS])
def test_a_demo_evaluates_often_enough_for_curves(steps: int) -> None:
    train = resolve(
        overrides=[Override("train.eval_every", demo.recipe(steps).split()[-3], "--eval-every")],
        environment={},
        default_file=False,
    ).config.train
    plan = make_plan(
        msgspec.structs.replace(train, batch_size=demo.BATCH_SIZE, steps=steps, warmup="15st"),
        demo.IMAGES,
        1,
    )
    evaluated, step = [], 0
    while step < steps:
        step = next_evaluation(train, plan, step)
        evaluated.append(step)
    assert demo.EVALUATIONS <= len(evaluated) <= demo.EVALUATIONS + 1
    assert evaluated[-1] == steps


def test_an_echoed_command_can_be_pasted() -> None:
    arguments = ["train", "--data", "my photos", "--quiet", *demo.recipe(520).split()]
    lines = demo.echoed(arguments)
    assert len(lines) > 2
    assert all(len(line) <= 80 for line in lines)
    assert all(line.endswith(" \\") for line in lines[:-1])
    assert all(line.strip().startswith("--") for line in lines[1:])
    assert shlex.split("\n".join(lines).replace("\\\n", ""))[1:] == ["ssdctl", *arguments]


def test_the_contact_sheet_shows_four_images(tmp_path: Path) -> None:
    colors, paths = ["red", "lime", "blue", "yellow"], []
    for color in colors:
        paths.append(tmp_path / f"{color}.png")
        Image.new("RGB", (300, 400), color).save(paths[-1])
    demo.write_contact_sheet(paths, tmp_path / "sheet.png")
    with Image.open(tmp_path / "sheet.png") as sheet:
        width, height = sheet.size
        places = [
            (x, y) for y in (height // 4, 3 * height // 4) for x in (width // 4, 3 * width // 4)
        ]
        assert [sheet.getpixel(place) for place in places] == [
            ImageColor.getrgb(color) for color in colors
        ]


def test_held_out_images_have_several_objects(shapes: Path) -> None:
    images = demo.held_out_images(shapes)
    assert 1 < len(images) == len(set(images)) <= 4
    assert all(image.is_file() and image.parent.name == "val2017" for image in images)


def test_an_interrupted_demo_keeps_its_number_of_steps(tmp_path: Path) -> None:
    assert demo.steps_of_run(tmp_path) is None
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "metrics.jsonl").touch()
    (tmp_path / "environment.json").write_text("{}")
    (tmp_path / "config.toml").write_text("[train]\nsteps = 410\n")
    assert demo.steps_of_run(tmp_path) == 410
