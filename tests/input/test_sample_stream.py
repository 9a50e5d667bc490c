"""The stream of samples: every image once an epoch, at any world size, from any step."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ssdctl.input.sample_stream import SampleStream


@settings(deadline=None)
@given(st.integers(1, 60), st.integers(1, 90), st.integers(0, 5), st.integers(0, 1000))
@pytest.mark.process
def test_each_epoch_is_a_permutation(images: int, batch: int, seed: int, offset: int) -> None:
    rows = np.arange(images) * 3 + offset
    order = SampleStream(rows, seed)
    steps = -(-3 * images // batch)
    stream = np.concatenate([order.samples(s * batch, batch).row for s in range(steps)])
    for epoch in range(3):
        assert sorted(stream[epoch * images : (epoch + 1) * images]) == rows.tolist()


@settings(deadline=None)
@given(st.integers(1, 40), st.integers(1, 4), st.integers(1, 4), st.integers(0, 20))
@pytest.mark.process
def test_ranks_share_the_global_batch(images: int, world: int, size: int, step: int) -> None:
    rows = np.arange(images)
    complete = SampleStream(rows, 1).samples(step * world * size, world * size)
    parts = [
        SampleStream(rows, 1).samples(step * world * size + rank * size, size)
        for rank in range(world)
    ]
    assert np.concatenate([p.row for p in parts]).tolist() == complete.row.tolist()
    assert np.concatenate([p.epoch for p in parts]).tolist() == complete.epoch.tolist()


def test_epochs_and_seeds_differ() -> None:
    rows = np.arange(100)
    first, second = SampleStream(rows, 0).samples(0, 100), SampleStream(rows, 0).samples(100, 100)
    assert first.row.tolist() != second.row.tolist()
    assert first.row.tolist() != SampleStream(rows, 1).samples(0, 100).row.tolist()
    assert set(first.epoch) == {0}
    assert set(second.epoch) == {1}


def test_a_step_is_independent_of_what_came_before() -> None:
    rows = np.arange(50)
    walked = SampleStream(rows, 3)
    for start in range(0, 700, 7):
        last = walked.samples(start, 7)
    assert SampleStream(rows, 3).samples(693, 7).row.tolist() == last.row.tolist()
