"""Disjoint batches, for steps that reveal them: without sampling, each unit once per pass."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest

from tf_labeldp.data import poisson_batches
from tf_labeldp.plugins import open_for_training

N = 50


def batches(q: float = 0.2, steps: int = 12, **settings: Any) -> Any:
    """Batches whose features are row numbers, and whose labels are ten times these."""
    x = np.arange(N, dtype=np.float32)[:, None]
    return poisson_batches(x, 10 * np.arange(N), sampling_probability=q, steps=steps, **settings)


def rows(made: Any, count: int) -> list[list[int]]:
    """The examples of the first batches."""
    found = []
    for x, y, weights in open_for_training(made, disjoint=True).take(count).as_numpy_iterator():
        used = weights > 0
        np.testing.assert_array_equal(10 * x[used, 0], y[used])
        np.testing.assert_array_equal(weights[used], 1.0)
        found.append(x[used, 0].astype(int).tolist())
    return found


@pytest.mark.parametrize(("q", "size"), [(0.25, 12), (1.0, 50)])
def test_batches_have_the_expected_size(q: float, size: int) -> None:
    made = batches(q)
    assert made.disjoint_size == size
    assert {len(batch) for batch in rows(made, 12)} == {size}


@pytest.mark.parametrize(("q", "steps"), [(0.2, 12), (0.3, 7), (1.0, 3)])
def test_no_example_is_used_more_often_than_is_accounted_for(q: float, steps: int) -> None:
    made = batches(q, steps)
    a_pass = N // made.disjoint_size
    drawn = rows(made, 3 * steps)
    for epoch in range(3):
        of_epoch = drawn[epoch * steps : (epoch + 1) * steps]
        counts = np.bincount(list(itertools.chain(*of_epoch)), minlength=N)
        assert counts.max() <= math.ceil(steps / a_pass)
        for start in range(0, steps, a_pass):
            together = list(itertools.chain(*of_epoch[start : start + a_pass]))
            assert len(set(together)) == len(together)


def test_passes_and_epochs_are_in_new_orders() -> None:
    drawn = rows(batches(0.2, 10), 20)
    passes = [tuple(map(tuple, drawn[start : start + 5])) for start in range(0, 20, 5)]
    assert len(set(passes)) == 4  # the same twice: less than 1e-30


def test_every_example_is_in_the_first_batch_as_often() -> None:
    runs = 400
    drawn = rows(batches(0.2, 1), runs)  # each step is the first of an epoch
    counts = np.bincount(list(itertools.chain(*drawn)), minlength=N)
    # Binomial(400, 0.2) for each of 50: chi-square with 49 degrees of freedom, 1e-6 on each side.
    statistic = np.sum((counts - runs * 0.2) ** 2) / (runs * 0.2 * 0.8) * (N - 1) / N
    assert 14.0 < statistic < 112.0


def test_seeds_repeat() -> None:
    assert rows(batches(insecure_seed=3), 12) == rows(batches(insecure_seed=3), 12)
    assert rows(batches(insecure_seed=3), 12) != rows(batches(insecure_seed=4), 12)
    assert rows(batches(), 12) != rows(batches(), 12)
    made = batches(insecure_seed=3)
    assert rows(made, 12) != rows(made, 12)  # another fit is another opening


def test_users_come_whole_and_once_per_pass() -> None:
    users = np.arange(N) // 2
    made = batches(0.2, 5, users=users, max_examples_per_user=2)
    assert made.disjoint_size == 5
    drawn = rows(made, 5)
    for batch in drawn:
        of_users = {row // 2 for row in batch}
        assert sorted(batch) == sorted(row for u in of_users for row in (2 * u, 2 * u + 1))
    assert sorted(itertools.chain(*drawn)) == list(range(N))


def test_a_second_batch_is_drawn_too() -> None:
    dataset = open_for_training(batches(), disjoint=True, alt_examples=7)
    for x, _, _, others in dataset.take(3).as_numpy_iterator():
        assert others.shape == (7, 1)
        assert len(set(others[:, 0])) == 7
        assert x.shape[0] == batches().buffer_size
