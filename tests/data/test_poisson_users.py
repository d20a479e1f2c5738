"""Batches by user: exactly k rows of a user come together, or none."""

from __future__ import annotations

from collections import Counter
from itertools import combinations
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from scipy import stats

from tf_labeldp.data import poisson_batches
from tf_labeldp.plugins import PoissonBatches, open_for_training
from tf_labeldp.vault import Users

# User 0 has 1 row, user 1 has 2, ... user 7 has 8; rows of users are mixed.
OWNERS = np.random.default_rng(4).permutation(np.repeat(np.arange(8), np.arange(1, 9)))
N, USERS, K, Q = OWNERS.size, 8, 3, 0.5
REJECT = 1e-6


def make(**changes: Any) -> PoissonBatches:
    settings: dict[str, Any] = {
        "sampling_probability": Q,
        "steps": 2,
        "users": OWNERS,
        "max_examples_per_user": K,
        "insecure_seed": 3,
    }
    return poisson_batches(np.arange(N)[:, np.newaxis], 10 * OWNERS, **(settings | changes))


def take(batches: PoissonBatches, steps: int) -> list[Any]:
    dataset = open_for_training(batches).take(steps)
    return [tf.nest.map_structure(lambda t: t.numpy(), element) for element in dataset]


@pytest.mark.parametrize("k", [3, 20])
def test_every_user_has_exactly_k_rows(k: int) -> None:
    rows = Users(OWNERS, at_most=k).rows_of_each(N, np.random.default_rng(0))
    assert rows.shape == (USERS, k)
    np.testing.assert_array_equal(OWNERS[rows], np.repeat(np.arange(USERS), k).reshape(USERS, k))
    for user, own in enumerate(rows):
        # Nothing is repeated before all of it is there.
        assert len(set(own.tolist())) == min(k, user + 1)


def test_the_kept_rows_are_a_uniform_choice() -> None:
    own = np.flatnonzero(OWNERS == 3)
    rng = np.random.default_rng(1)
    drawn = [Users(OWNERS, at_most=2).rows_of_each(N, rng)[3] for _ in range(3000)]
    kept = Counter(tuple(sorted(rows.tolist())) for rows in drawn)
    pairs = list(combinations(own.tolist(), 2))
    assert set(kept) == set(pairs)
    assert stats.chisquare([kept[pair] for pair in pairs]).pvalue > REJECT


def test_repeated_rows_are_a_uniform_choice() -> None:
    own = np.flatnonzero(OWNERS == 2)
    rng = np.random.default_rng(2)
    third = Counter(Users(OWNERS, at_most=4).rows_of_each(N, rng)[2, 3] for _ in range(3000))
    assert set(third) == set(own)
    assert stats.chisquare([third[row] for row in own]).pvalue > REJECT


@pytest.mark.parametrize(
    "users",
    [
        tf.constant([f"user {number}" for number in OWNERS]),
        np.fromiter(((number, "x") for number in OWNERS), object, N),
    ],
    ids=["tensor", "tuples"],
)
def test_users_may_be_of_any_kind(users: Any) -> None:
    rows = Users(users, at_most=K).rows_of_each(N, np.random.default_rng(0))
    assert rows.shape == (USERS, K)
    assert len({tuple(set(OWNERS[own])) for own in rows}) == USERS
    assert all(len(set(OWNERS[own])) == 1 for own in rows)


def test_the_rows_of_a_user_come_together_or_not_at_all() -> None:
    batches = make()
    kept = Users(OWNERS, at_most=K).rows_of_each(N, None)
    assert kept.shape == (batches.num_units, batches.group_size)
    first: dict[int, tuple[int, ...]] = {}
    for x, y, weights in take(batches, 50):
        assert x.shape == (batches.buffer_size * K, 1)
        by_user, held = x[:, 0].reshape(-1, K), weights.reshape(-1, K)
        assert np.all(held == held[:, :1])
        users = OWNERS[by_user[held[:, 0] > 0]]
        assert np.all(users == users[:, :1])
        assert len(set(users[:, 0].tolist())) == len(users)
        np.testing.assert_array_equal(y[weights > 0], 10 * OWNERS[x[weights > 0, 0]])
        for rows in by_user[held[:, 0] > 0]:  # the choice of rows is made once
            user = int(OWNERS[rows[0]])
            assert first.setdefault(user, tuple(rows.tolist())) == tuple(rows.tolist())
    assert len(first) == USERS


def test_users_are_sampled_with_probability_q_however_many_rows_they_have() -> None:
    steps = 400
    counts = np.zeros(USERS, int)
    for x, _, weights in take(make(), steps):
        counts += np.bincount(OWNERS[x[weights > 0, 0]], minlength=USERS) // K
    p_values = [stats.binomtest(int(count), steps, Q).pvalue for count in counts]
    assert min(p_values) * USERS > REJECT
    total = int(counts.sum())
    assert stats.binomtest(total, steps * USERS, 1.2 * Q).pvalue < REJECT
