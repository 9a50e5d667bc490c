"""The stream of samples: every image once an epoch, at any world size, from any step."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from ssdctl.input.sampler import SampleStream


@settings(deadline=None)
@given(st.integers(1, 60), st.integers(1, 90), st.integers(0, 5), st.integers(0, 1000))
def test_each_epoch_is_a_permutation(images: int, batch: int, seed: int, offset: int) -> None:
    rows = np.arange(images) * 3 + offset
    order = SampleStream(rows, seed)
    steps = -(-3 * images // batch)
    stream = np.concatenate([order.samples(s * batch, batch)[0] for s in range(steps)])
    for epoch in range(3):
        assert sorted(stream[epoch * images : (epoch + 1) * images]) == rows.tolist()


def test_epochs_and_seeds_differ() -> None:
    rows = np.arange(100)
    (first, epoch), (second, next_epoch) = (
        SampleStream(rows, 0).samples(start, 100) for start in (0, 100)
    )
    assert first.tolist() != second.tolist()
    assert first.tolist() != SampleStream(rows, 1).samples(0, 100)[0].tolist()
    assert (set(epoch), set(next_epoch)) == ({0}, {1})


def test_a_step_is_independent_of_what_came_before() -> None:
    rows = np.arange(50)
    walked = SampleStream(rows, 3)
    for start in range(0, 700, 7):
        last, _ = walked.samples(start, 7)
    assert SampleStream(rows, 3).samples(693, 7)[0].tolist() == last.tolist()
