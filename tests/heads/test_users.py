"""Heads on vaults with users: the noise hides all labels of any one user, and not more."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

import tf_labeldp as ldp
from tf_labeldp.audit import audit_mechanism
from tf_labeldp.heads.weights import user_weights
from tf_labeldp.mechanisms import LabelMomentMechanism
from tf_labeldp.plugins import gaussian_epsilon

DELTA = 1e-4
RNG = np.random.default_rng(0)
KINDS: dict[str, tuple[dict[str, Any], list[Any]]] = {
    "two classes": ({"num_classes": 2}, [0, 1]),
    "three classes": ({"num_classes": 3}, [0, 1, 2]),
    "numbers": ({"low": -1.0, "high": 3.0}, [-1.0, 0.5, 3.0]),
    "rows": ({"num_labels": 2}, [(0, 0), (0, 1), (1, 0), (1, 1)]),
}


def unit_rows(n: int, d: int = 3) -> np.ndarray:
    rows = RNG.normal(size=(n, d))
    return rows / np.linalg.norm(rows, axis=1, keepdims=True)


def for_users(rows: np.ndarray, users: np.ndarray, **options: Any) -> LabelMomentMechanism:
    mechanism = LabelMomentMechanism(**({"epsilon": 1.0, "delta": DELTA} | options))
    norms = mechanism.user_norms(users, [rows], rows.shape[1])
    return mechanism.for_users(norms, np.bincount(users), rows.shape[1])


@pytest.mark.holds("mechanisms.LabelMomentMechanism")
@pytest.mark.parametrize("k", [1, 2, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_the_largest_change_by_enumeration(kind: str, k: int) -> None:
    """All labels of one user change in every way; epsilon follows in closed form."""
    options, values = KINDS[kind]
    rows, users = unit_rows(k + 1), np.r_[np.zeros(k, int), 1]
    mechanism = for_users(rows, users, **options)
    assert mechanism.group_size(users, rows) == pytest.approx(1.0, abs=1e-9)
    sums = np.stack(
        [
            mechanism.exact_sums(np.array([*own, values[0]]), rows, k + 1)[0].ravel()
            for own in itertools.product(values, repeat=k)
        ]
    ).astype(np.float64)
    moved = np.linalg.norm(sums[:, np.newaxis] - sums, axis=2).max()
    grid = mechanism._grid(k + 1, 3)
    sigma = mechanism.noise_stddev(k + 1, 3) / grid.unit
    worst = gaussian_epsilon(sigma, DELTA, moved)
    # The bound is exact for codes of one column, and for two rows.
    tight = 0.9 if kind == "three classes" and k == 3 else 1.0 - 1e-5
    assert tight <= worst <= 1.0
    if k > 1:  # the noise of one label is not enough
        one = LabelMomentMechanism(1.0, DELTA, **options).noise_stddev(k + 1, 3) / grid.unit
        assert gaussian_epsilon(one, DELTA, moved) > 1.1


def user_norms(blocks: list[np.ndarray], users: np.ndarray, *, by_signs: bool) -> np.ndarray:
    """Norms for codes of one column, whose signs alone differ, or of several."""
    mechanism = LabelMomentMechanism(1.0, DELTA, num_classes=2 if by_signs else 3)
    return mechanism.user_norms(users, blocks, blocks[0].shape[1])


def test_norms_of_users() -> None:
    rows, users = unit_rows(40, 6), RNG.permutation(np.repeat(np.arange(4), [1, 4, 10, 25]))
    exact = user_norms([rows[:7], rows[7:]], users, by_signs=True)
    bound = user_norms([rows], users, by_signs=False)
    for user in range(3):
        own = rows[users == user]
        signs = np.array(list(itertools.product((-1, 0, 1), repeat=min(len(own), 4))))
        brute = np.linalg.norm(signs @ own[:4], axis=1).max() if len(own) <= 4 else exact[user]
        assert exact[user] == pytest.approx(brute, rel=1e-12)
        assert np.sqrt(len(own)) - 1e-9 <= exact[user] <= bound[user] * (1 + 1e-12)
    assert exact[3] == bound[3] and 5.0 <= bound[3] < 20.0  # the spectral bound of 25 rows
    many = np.r_[rows, np.tile(unit_rows(300, 6), (2, 1))]
    owners = np.r_[users, np.full(600, 4)]
    assert user_norms([many], owners, by_signs=True)[4] < 0.7 * 600
    equal = np.tile(rows[:1], (600, 1))  # nothing less than the sum of norms
    assert user_norms([equal], np.zeros(600, int), by_signs=True)[0] == pytest.approx(600.0)
    with pytest.raises(ValueError, match="one label per row of features"):
        user_norms([rows], users[1:], by_signs=True)


def test_laplace_noise() -> None:
    rows, users = unit_rows(4), np.array([0, 0, 0, 1])
    mechanism = for_users(rows, users, num_classes=2, noise="laplace", delta=0.0)
    assert mechanism.max_l1 == pytest.approx(np.abs(rows[:3]).sum(), rel=1e-6)
    assert mechanism.group_size(users, rows) <= 1.0
    sums = [
        mechanism.exact_sums(np.array([*own, 0]), rows, 4)[0]
        for own in itertools.product((0, 1), repeat=3)
    ]
    moved = max(np.abs(a - b).sum() for a, b in itertools.combinations(sums, 2))
    law = mechanism._noise_law(mechanism._grid(4, 3), 3)
    assert moved / law.scale <= 1.0 + 1e-12


def clicks(sizes: Any, d: int = 8) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(1)
    users = rng.permutation(np.repeat(np.arange(len(sizes)), sizes))
    x = rng.normal(size=(users.size, d))
    y = (rng.random(users.size) < 1.0 / (1.0 + np.exp(-x @ np.linspace(-2, 2, d)))).astype(int)
    return x, y, users


def vault(y: np.ndarray, users: np.ndarray | None, **options: Any) -> ldp.PrivateLabels:
    budget = ldp.PrivacyBudget(1.0, DELTA)
    return ldp.PrivateLabels(y, 2, budget=budget, users=users, insecure_seed=0, **options)


HEADS = {
    "ridge": lambda: ldp.PrivateRidge(1.0, DELTA),
    "logistic": lambda: ldp.PrivateLogisticRegression(1.0, DELTA),
    "no spread": lambda: ldp.PrivateRidge(1.0, DELTA, spread=False, center=False),
    "laplace": lambda: ldp.PrivateRidge(1.0, noise="laplace"),
}


@pytest.mark.parametrize("head", HEADS)
def test_heads_cost_their_epsilon_for_a_user(head: str) -> None:
    x, y, users = clicks([1] * 200 + [6] * 50 + [100])
    labels = vault(y, users)
    fitted = HEADS[head]().fit(x, labels)
    stated = fitted.guarantee()
    assert stated.epsilon == labels.guarantee().epsilon == 1.0
    assert stated.unit == "all labels of one user" and stated.num_units == 251
    assert labels.remaining() == 0.0
    assert fitted.score(x, y) > 0.6
    # Nothing of the plain release depends on the users if each has one label.
    alone = HEADS[head]().fit(x, vault(y, np.arange(y.size)))
    plain = HEADS[head]().fit(x, vault(y, None))
    if head == "laplace":  # rows of a long L1 norm weigh less
        assert alone.noise_stddev_ < plain.noise_stddev_
    else:
        assert alone.noise_stddev_ == pytest.approx(plain.noise_stddev_, rel=1e-3)
        np.testing.assert_allclose(alone.coef_, plain.coef_, atol=1e-3)


def test_users_cost_less_than_group_privacy() -> None:
    """Ten different rows of a user move the moments by less than half of ten rows."""
    x, y, users = clicks([10] * 200)
    noise = ldp.PrivateRidge(1.0, DELTA).fit(x, vault(y, users)).noise_stddev_
    plain = ldp.PrivateRidge(1.0, DELTA).fit(x, vault(y, None)).noise_stddev_
    assert 3.0 < noise / plain < 6.0


def test_weights_do_not_depend_on_labels_and_bound_heavy_users() -> None:
    x, y, users = clicks([1] * 300 + [3000])
    heads = [ldp.PrivateRidge(1.0, DELTA).fit(x, vault(labels, users)) for labels in (y, 1 - y)]
    assert heads[0].noise_stddev_ == heads[1].noise_stddev_
    plain = ldp.PrivateRidge(1.0, DELTA).fit(x, vault(y, None)).noise_stddev_
    # Relative to all weights, which have mean one: 3,000 times the noise would be group privacy.
    assert heads[0].noise_stddev_ < 400.0 * plain
    norms, totals = np.array([1.0, 1.0, 50.0]), np.array([1.0, 1.0, 100.0])
    noisy = user_weights(norms, totals, noise=1e6, label_variance=0.25)
    np.testing.assert_allclose(noisy, [1.0, 1.0, 1.0 / 50.0])
    exact = user_weights(norms, totals, noise=0.0, label_variance=1e-9)
    assert exact[2] > noisy[2]
    np.testing.assert_array_equal(user_weights(np.zeros(2), np.ones(2), 1.0, 1.0), [1.0, 1.0])


def test_sample_weights_of_users() -> None:
    x, y, users = clicks([3] * 100)
    weights = np.where(users == 0, 0.0, 1.0 + users % 2)
    labels = vault(y, users)
    fitted = ldp.PrivateRidge(1.0, DELTA).fit(x, labels, sample_weight=weights)
    assert fitted.guarantee().epsilon == 1.0


@pytest.mark.holds("heads.PrivateRidge")
def test_a_release_for_one_label_costs_more_for_users() -> None:
    """The vault prices the release itself: it does not trust the caller's max_norm."""
    rows, users = unit_rows(60), np.repeat(np.arange(20), 3)
    labels = ldp.PrivateLabels(
        RNG.integers(0, 2, 60), 2, budget=ldp.PrivacyBudget(9.0, DELTA), users=users
    )
    labels.release(LabelMomentMechanism(1.0, DELTA, num_classes=2), public_input=rows)
    group = LabelMomentMechanism(1.0, DELTA, num_classes=2).group_size(users, rows)
    assert 1.7 < group <= 3.0 and labels.guarantee().epsilon > 1.7
    with pytest.raises(ldp.BudgetExceededError):
        vault(y=RNG.integers(0, 2, 60), users=users).release(
            LabelMomentMechanism(1.0, DELTA, num_classes=2), public_input=rows
        )


def test_other_models_of_users() -> None:
    x, y, users = clicks([2] * 150)
    for model in (
        ldp.PrivateBoosting(1.0, max_trees=2),
        ldp.heads.NoiseCluster(8, 1.0),
        ldp.heads.NoiseCluster(1, 1.0, DELTA),  # k labels in one cluster: the noise is for them
        ldp.PrivateClassifier(1.0, DELTA, budget_for_evaluation=1.0),
    ):
        labels = vault(y, users)
        assert model.fit(x, labels).guarantee().epsilon == pytest.approx(1.0, rel=1e-9)
        assert labels.guarantee().unit == "all labels of one user"
    of_clusters = ldp.heads.NoiseCluster(8, 1.0, DELTA).fit(x, vault(y, users)).guarantee()
    assert 0.6 < of_clusters.epsilon <= 1.0 and of_clusters.delta == DELTA
    assert "A user has up to 2 labels" in str(model.choice_)


def test_an_audit_of_a_user_whose_labels_all_change() -> None:
    """Her labels change along the signs of the worst sum; the auditor looks in its direction."""
    rows, users = unit_rows(12), np.repeat(np.arange(4), 3)
    mechanism = for_users(rows, users, num_classes=2)
    signs = np.array(list(itertools.product((0, 1), repeat=3)))
    reach = np.linalg.norm((2 * signs - 1) @ rows.reshape(4, 3, 3), axis=2)
    user, worst = np.unravel_index(reach.argmax(), reach.shape)
    direction = (2 * signs[worst] - 1) @ rows[users == user]
    direction /= np.linalg.norm(direction)

    def draw(label: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        sums = []
        for flipped in (0, 1):
            labels = np.zeros(12, int)
            labels[users == user] = signs[worst] ^ flipped
            sums.append(mechanism.exact_sums(labels, rows, 12))
        noisy = [mechanism.add_noise(*sums[each], 12, rng=rng)[:, 0] for each in label]
        return np.array(noisy) @ direction

    found = audit_mechanism(
        draw, [0, 1], claimed=1.0, delta=DELTA, draws=20_000, family="gaussian", seed=0
    )
    assert 0.65 < found.lower_bound <= 1.0
