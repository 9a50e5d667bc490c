"""Color jitter as one affine map, against its parts and against the sequential definition."""

import math

import numpy as np
import pytest
import reference
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ssdctl.input.normalize import ColorMap, Normalize
from ssdctl.model.backbones import RESNET

MEAN, STD = RESNET.mean, RESNET.std
normalize = Normalize(MEAN, STD)
FACTORS = st.floats(0.5, 1.5)
IDENTITY = (1.0, 1.0, 1.0, 0.0)


def jittered(image: np.ndarray, *jitter: float) -> np.ndarray:
    """(H, W, 3) in 0 to 1 -> the same under ssdctl's map: brightness, contrast, saturation, hue."""
    mean = torch.from_numpy(image.mean(axis=(0, 1)))[None]
    matrix, offset = ColorMap(torch.float64)(torch.tensor([jitter], dtype=torch.float64), mean)
    return image @ matrix[0].numpy().T + offset[0].numpy()


def muted_image(seed: int = 0) -> np.ndarray:
    """Colors between .4 and .6, so that no factor of the recipes reaches a clamp."""
    return np.random.default_rng(seed).uniform(0.4, 0.6, (6, 5, 3))


def natural_image(rng: np.random.Generator, size: int = 24) -> np.ndarray:
    """A random image with a photograph's 1/f spectrum, contrast and correlated channels."""
    frequency = np.hypot(np.fft.fftfreq(size)[:, None], np.fft.fftfreq(size)[None])
    frequency[0, 0] = np.inf

    def field() -> np.ndarray:
        actual = np.fft.ifft2(np.fft.fft2(rng.normal(size=(size, size))) / frequency).real
        return actual / actual.std()

    common = field()
    color = np.stack([0.9 * common + 0.44 * field() for _ in range(3)], axis=-1)
    mean = np.array(MEAN) + rng.normal(0, 0.1, 3)
    return (mean + rng.uniform(0.15, 0.25) * color).clip(0, 1)


def random_pixels(*shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)


def test_each_image_has_its_own_jitter() -> None:
    images = random_pixels(3, 20, 20, 3)
    jitter = torch.tensor([[1.1, 0.5, 1.5, 0.3], IDENTITY, [0.9, 1.5, 0.5, -0.3]])
    actual = normalize(images, jitter)
    torch.testing.assert_close(normalize(images)[1], actual[1], rtol=0, atol=5e-6)
    for i in range(3):
        single = normalize(images[i : i + 1], jitter[i : i + 1])[0]
        np.testing.assert_allclose(actual[i].numpy(), single.numpy(), atol=5e-6)
        image = images[i].numpy() / 255
        expected = (jittered(image, *jitter[i].tolist()) - MEAN) / STD
        np.testing.assert_allclose(actual[i].permute(1, 2, 0).numpy(), expected, atol=2e-5)


@settings(max_examples=30, deadline=None)
@given(brightness=st.floats(0.875, 1.125), contrast=FACTORS, saturation=FACTORS)
def test_all_but_hue_is_sequential(brightness: float, contrast: float, saturation: float) -> None:
    image = muted_image(1)
    expected = reference.jitter_colors(image, brightness, contrast, saturation, 0.0)
    actual = jittered(image, brightness, contrast, saturation, 0.0)
    np.testing.assert_allclose(actual, expected, atol=1e-12)


def test_hue_keeps_luma_and_undoes_itself() -> None:
    image = muted_image(2)
    for turn in (0.3, -1.0, math.pi):
        turned = jittered(image, 1.0, 1.0, 1.0, turn)
        for before, after in zip(image.reshape(-1, 3), turned.reshape(-1, 3), strict=True):
            assert reference.gray_of(after) == pytest.approx(reference.gray_of(before), abs=1e-12)
        back = jittered(turned, 1.0, 1.0, 1.0, -turn)
        np.testing.assert_allclose(back, image, atol=1e-12)
    np.testing.assert_allclose(jittered(image, 1, 1, 1, 2 * math.pi), image, atol=1e-12)


@pytest.mark.parametrize(
    # Measured: means of .0147 and .0048, the worst image .059 and .054 (where contrast or
    # saturation clamps much). An 8-bit level is .0039.
    ("hue_degrees", "mean_error", "worst_image"),
    [(18.0, 0.016, 0.065), (0.5, 0.0055, 0.06)],
)
def test_distance_from_the_sequential_definition(
    hue_degrees: float, mean_error: float, worst_image: float
) -> None:
    """The affine map neither clamps nor turns hue in HSV; on image-like data that is small."""
    rng = np.random.default_rng(0)
    errors = []
    for _ in range(60):
        image, draw = natural_image(rng), rng.uniform(-1, 1, 4)
        turn = hue_degrees * draw[3]
        factors = (1 + 0.125 * draw[0], 1 + 0.5 * draw[1], 1 + 0.5 * draw[2])
        actual = jittered(image, *factors, math.radians(turn))
        expected = reference.jitter_colors(image, *factors, turn / 360)
        errors.append(np.abs(actual - expected).mean())
    assert np.mean(errors) < mean_error
    assert max(errors) < worst_image
