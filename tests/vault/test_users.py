"""Vaults with users: every use is charged for all labels of one user, and stated so."""

from __future__ import annotations

import dataclasses
import itertools
import math
import pathlib
from typing import Any

import numpy as np
import pandas as pd
import pytest

import tf_labeldp as ldp
from tf_labeldp.accounting import Charge, PublicInput, group_privacy
from tf_labeldp.audit import audit_mechanism
from tf_labeldp.mechanisms import AggregateMechanism, HistogramMechanism, MetricMechanism
from tf_labeldp.plugins import gaussian_epsilon
from tf_labeldp.vault import Keyed, Store, Users

SIZES = (1, 2, 3, 5)
USERS = np.repeat(["ann", "bob", "cyd", "dan"], SIZES)
N, DELTA = USERS.size, 1e-3
Y = np.arange(N) % 2
RR = ldp.RandomizedResponse(0.5, 2)


def vault(budget: float = 9.0, **options: Any) -> ldp.PrivateLabels:
    options = {"users": USERS, "budget": ldp.PrivacyBudget(budget)} | options
    return ldp.PrivateLabels(Y, 2, **options)


@pytest.mark.holds("vault.PrivateLabels")
def test_noisy_labels_cost_as_often_as_a_user_has_labels() -> None:
    labels = vault()
    assert labels.guarantee().unit == "all labels of one user"
    stated = labels.randomize(RR).guarantee()
    assert stated.epsilon == labels.guarantee().epsilon == 2.5  # five labels of dan
    assert stated.unit == "all labels of one user" and stated.num_units == 4
    assert "public-features" in {note.code for note in stated.assumptions}
    assert labels.guarantee(after=[RR]).epsilon == 5.0 and labels.remaining() == 6.5
    # The channel of k labels is a product: its worst log-ratio is k epsilon, and not less.
    channel = RR.transition_matrix()
    for k in (1, 2, 3):
        rows = list(itertools.product((0, 1), repeat=k))
        joint = np.array([[np.prod(channel[list(a), list(b)]) for b in rows] for a in rows])
        worst = np.log(joint.max(axis=0) / joint.min(axis=0)).max()
        price = Charge.of(RR).repeated(k)
        assert worst == pytest.approx(price.epsilon, rel=1e-12) and worst > 0.999 * k * 0.5


@pytest.mark.holds("vault.PrivateLabels")
def test_uses_of_some_labels_compose_for_their_users() -> None:
    labels = vault()
    labels.randomize(RR, indices=[0, 1])  # ann and bob, one label each
    assert labels.guarantee().epsilon == 0.5
    labels.randomize(RR, indices=[2])  # the other label of bob
    assert labels.guarantee().epsilon == 1.0
    labels.randomize(RR, indices=np.flatnonzero(USERS == "cyd"))  # in parallel
    assert labels.guarantee().epsilon == 1.5
    assert labels.receipts[0].num_examples == 3 and labels.receipts[0].num_units == 4


def test_at_most_k_examples_of_a_user() -> None:
    labels = vault(users=Users(USERS, at_most=2))
    assert np.bincount(labels.users).tolist() == [1, 2, 2, 2] and labels.group_size == 2
    assert len(labels) == 7 and len(set(labels.indices)) == 7
    np.testing.assert_array_equal(
        np.unique(USERS[labels.indices], return_inverse=True)[1], labels.users
    )
    noisy = labels.randomize(RR)
    assert len(noisy) == 7 and noisy.guarantee().epsilon == 1.0
    more = vault(users=Users(USERS, at_most=3))
    assert set(labels.indices) < set(more.indices)  # the choice does not depend on labels
    other = ldp.PrivateLabels(
        1 - Y, 2, budget=ldp.PrivacyBudget(1.0), users=Users(USERS, at_most=2)
    )
    np.testing.assert_array_equal(other.indices, labels.indices)


def test_features_of_all_rows_are_refused_with_noisy_labels_of_some_rows() -> None:
    """The receipt names all rows of the users, so it does not show which were drawn."""
    labels = vault(users=Users(USERS, at_most=2))
    noisy = labels.randomize(RR)
    with pytest.raises(ValueError, match=r"Give x\[labels.indices\] of that part"):
        noisy.rows_among({(N,)})
    with pytest.raises(ValueError, match=r"Give x\[labels.indices\] of that part"):
        noisy.to_dataset(np.arange(N))
    assert noisy.rows_among({(len(labels),)}) == slice(None)
    pairs = list(noisy.to_dataset(labels.indices).as_numpy_iterator())
    assert [x for x, _ in pairs] == labels.indices.tolist()
    assert vault().randomize(RR).rows_among({(N,)}) is not None


@pytest.mark.parametrize("unit", ["label", "user"])
def test_receipts_show_a_part_where_labels_do_not_record_it(unit: str) -> None:
    """Whichever unit the receipts of their priors have."""
    south = ldp.PrivateLabels(Y, 2, budget=ldp.PrivacyBudget(1.0), people="south")
    priors = PublicInput(np.full(2, 0.5), south.randomize(RR).receipts)

    def drawn(labels: ldp.PrivateLabels, indices: Any = None) -> ldp.NoisyLabels:
        noisy = labels.randomize(ldp.RRWithPrior(0.5, 2), indices, priors=priors)
        assert [receipt.unit for receipt in noisy.receipts] == ["label", unit]
        return dataclasses.replace(noisy, of_part=None)

    by_user = unit == "user"
    whole = vault(users=USERS if by_user else None, people="north")
    np.testing.assert_array_equal(drawn(whole).rows_among({(N,)}), np.arange(N))
    part = vault(users=Users(USERS, at_most=2), people="north")
    if not by_user:
        part, _ = whole.split(np.arange(N) < 5)
        np.testing.assert_array_equal(drawn(whole, [1, 3]).rows_among({(N,)}), [1, 3])
    with pytest.raises(ValueError, match=r"Give x\[labels.indices\] of that part"):
        drawn(part).rows_among({(N,)})


@pytest.mark.parametrize("held_out", [np.arange(N) % 2 == 1, np.arange(N) < 5])
def test_features_in_the_order_of_a_part_are_refused_with_labels_in_another(held_out: Any) -> None:
    """They have as many rows as features in the order of the labels."""
    _, part = vault(users=None).split(held_out)
    noisy = part.randomize(RR, [4, 1, 0, 2, 3])
    with pytest.raises(ValueError, match="in the order of their examples"):
        noisy.rows_among({(5,)})
    pairs = list(noisy.to_dataset(part.indices).as_numpy_iterator())
    assert [x for x, _ in pairs] == part.indices[noisy.indices].tolist()
    # Labels of some examples of a part have rows in their own order alone.
    some = part.randomize(RR, [4, 1])
    assert some.rows_among({(2,)}) == slice(None)


def test_parts_have_whole_users() -> None:
    train, held_out = vault().split(0.5)
    owners = [set(USERS[part.indices]) for part in (train, held_out)]
    assert len(owners[0]) == len(owners[1]) == 2 and not owners[0] & owners[1]
    labels = vault()
    first, second = labels.split([0, 1])  # one of the two labels of bob is in each
    second.randomize(RR)
    first.randomize(ldp.RandomizedResponse(0.1, 2))  # all users pay for the five labels of dan
    assert labels.guarantee().epsilon == 0.5 + 0.1 * 5


@pytest.mark.holds("mechanisms.HistogramMechanism")
def test_histograms_by_enumeration() -> None:
    """The largest change by a user's labels, over that by one label, is the group size."""
    users, groups = np.array([0, 0, 0, 1]), np.array([0, 1, 1, 0])
    found = {}
    for order, noise in ((1, "discrete_laplace"), (2, "gaussian")):
        mechanism = HistogramMechanism(
            1.0, 3, noise=noise, delta=DELTA if noise == "gaussian" else 0.0
        )
        tables = [
            mechanism.exact_counts(np.array([*own, 0]), groups).ravel()
            for own in itertools.product(range(3), repeat=3)
        ]
        moved = max(np.linalg.norm(a - b, order) for a, b in itertools.combinations(tables, 2))
        of_one = {1: 2.0, 2: math.sqrt(2.0)}[order]
        found[noise] = mechanism.group_size(users, groups)
        assert found[noise] == pytest.approx(moved / of_one, rel=1e-12)
    assert found == {"discrete_laplace": 3.0, "gaussian": math.sqrt(5.0)}
    # The charge of Gaussian noise is the closed form, from both sides.
    labels = ldp.PrivateLabels(
        np.array([0, 1, 2, 0]), 3, budget=ldp.PrivacyBudget(9.0, 5e-3), users=users
    )
    labels.release(mechanism, public_input=groups)
    exact = gaussian_epsilon(mechanism.noise_stddev, DELTA, math.sqrt(2.0) * math.sqrt(5.0))
    [receipt] = labels.receipts
    assert exact * (1.0 - 1e-8) <= receipt.charge.epsilon <= exact * (1.0 + 1e-8)
    by_group = group_privacy(ldp.accounting.PrivacyGuarantee(1.0, DELTA), 3)
    assert receipt.charge.epsilon < 0.9 * by_group.epsilon and by_group.delta > 10 * DELTA


@pytest.mark.holds("vault.PrivateLabels.evaluate")
def test_metrics_cost_their_epsilon_for_a_user() -> None:
    labels = vault()
    found = labels.evaluate(Y, "accuracy", epsilon=0.5)
    assert labels.guarantee().epsilon == pytest.approx(0.5, rel=1e-12)
    assert found.noise_stderr == MetricMechanism(0.1, "accuracy", num_classes=2).noise_stddev(N)
    # All labels of a user may be equal: the sample is as small as this.
    assert found.effective_examples == pytest.approx(N**2 / np.square(SIZES).sum())
    assert ldp.select([Y, 1 - Y], labels, epsilon=2.0) in (0, 1)
    assert labels.guarantee().epsilon == pytest.approx(2.5, rel=1e-12)
    many = ldp.PrivateLabels(
        np.arange(2000) % 2, 2, budget=ldp.PrivacyBudget(1.0), users=np.arange(2000) // 2
    )
    sets = ldp.conformal(lambda x: x, (np.full(2000, 0.5), many), 0.1, epsilon=1.0)
    assert sets.guarantee().epsilon == 1.0
    alone = vault(users=np.arange(N)).evaluate(Y, "accuracy", epsilon=0.5)
    assert alone.effective_examples == N  # a user with one label is a label


def test_inputs_that_were_priced_by_label_are_refused() -> None:
    """A user has several labels in the other vault, too, and its receipts do not say how many."""
    labels, others = vault(), vault(users=None)
    prior = others.release(HistogramMechanism(0.5, 2)).priors()
    with pytest.raises(ValueError, match=r"got one whose cost is by label \(HistogramMechanism"):
        labels.randomize(ldp.RRWithPrior(0.5, 2), priors=prior)
    assert labels.receipts == ()
    prior = vault().release(HistogramMechanism(0.5, 2)).priors()
    assert labels.randomize(ldp.RRWithPrior(0.5, 2), priors=prior).guarantee().epsilon == 5.0
    assert labels.guarantee().unit == "all labels of one user"


class Mean(AggregateMechanism):
    """A plug-in, which knows nothing of users."""

    def __init__(self, epsilon: float, num_classes: int = 2) -> None:
        self.epsilon, self.num_classes = epsilon, num_classes

    def release(self, labels: Any, public_input: Any = None, *, rng: Any = None) -> np.ndarray:
        rng = np.random.default_rng() if rng is None else rng
        return np.array(np.sum(labels) + rng.laplace(scale=1.0 / self.epsilon))


def test_plug_ins_and_steps() -> None:
    labels = vault()
    labels.release(Mean(0.25))
    assert labels.guarantee().epsilon == 1.25  # group privacy
    charge = Charge.of(RR)
    assert labels.charge(charge, what="noisy steps by user", unit="user").unit == "user"
    for unit in ("label", None):  # a cost that does not name its unit is for one label
        with pytest.raises(ValueError, match="whose cost is for all labels of one user"):
            labels.charge(charge, what="noisy steps", unit=unit)
    assert labels.guarantee().epsilon == 1.75
    with pytest.raises(ldp.BudgetExceededError, match="Nothing was drawn"):
        labels.randomize(ldp.RandomizedResponse(2.0, 2))
    approximate = Charge(0.5, 1e-6, {"class": "NonPrivateDpEvent"}).for_group(3)
    by_group = group_privacy(ldp.accounting.PrivacyGuarantee(0.5, 1e-6), 3)
    assert (approximate.epsilon, approximate.delta) == (by_group.epsilon, by_group.delta)
    assert Charge.of(Mean(0.25)).for_group(1.2).epsilon == 0.5  # a part of a label counts as one


def test_reports_of_peers_cost_group_privacy() -> None:
    """A report depends on the labels of other rows, so those of a user do not compose."""
    mechanism = ldp.mechanisms.PeerToPeerRandomizedResponse.for_cluster_size(0.4, 0.5, N, 1e-6)
    labels = ldp.PrivateLabels(Y, 2, users=USERS, budget=ldp.PrivacyBudget(9.0, 0.05))
    labels.randomize(mechanism)
    [receipt] = labels.receipts
    one = ldp.accounting.PrivacyGuarantee(mechanism.epsilon, mechanism.delta)
    assert receipt.charge.delta == group_privacy(one, 5).delta > 5.5 * mechanism.delta


def test_an_audit_of_a_user_whose_labels_all_change() -> None:
    users = np.array([0, 0, 0, 1, 2])
    mechanism = HistogramMechanism(0.5, 2)

    def counts(label: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        exact = np.stack([1 + 3 * (label == 0), 1 + 3 * (label == 1)], axis=1)
        return np.clip(mechanism.add_noise(exact, rng=rng), 1, 4)  # has the likeliest event

    claimed = Charge.of(mechanism).for_group(mechanism.group_size(users)).epsilon
    found = audit_mechanism(counts, [0, 1], claimed=claimed, draws=100_000, seed=0)
    assert claimed == 1.5 and 0.9 * claimed < found.lower_bound <= claimed
    # The cost of one label would be refuted.
    assert audit_mechanism(counts, [0, 1], claimed=0.5, draws=40_000, seed=0).refutes


def test_a_store_keeps_the_users(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "labels"
    first = vault(store=path).randomize(RR, key="a")
    renamed = np.char.add("user of ", USERS)
    again = vault(store=path, users=renamed)
    np.testing.assert_array_equal(again.randomize(RR, key="a").values, first.values)
    assert again.guarantee().epsilon == 2.5 and len(again.receipts) == 1
    for other in (None, USERS[::-1]):
        with pytest.raises(ldp.LabelStoreError, match="made with other settings: users"):
            vault(store=path, users=other)


def test_a_project_does_not_add_costs_by_label_to_those_by_user(tmp_path: pathlib.Path) -> None:
    vault(store=Store(tmp_path / "visits", project=True))
    with pytest.raises(ValueError, match="expected users= in all vaults of a project"):
        ldp.PrivateLabels(1 - Y, 2, store=tmp_path / "drugs")
    again = ldp.PrivateLabels(1 - Y, 2, users=USERS, store=tmp_path / "drugs")
    again.randomize(RR)
    stated = vault(store=tmp_path / "visits").guarantee()
    assert stated.epsilon == 2.5 and stated.unit == "all labels of one user"


WRONG = {
    "another length": ({"users": USERS[1:]}, "expected users of shape"),
    "rows": ({"users": [[1, 2]] * N}, "expected users of shape"),
    "None": ({"users": [None, *USERS[1:]]}, "1 of 11 users are missing"),
    "NA of pandas": (
        {"users": pd.array(["a"] * (N - 1) + [None], "string")},
        "1 of 11 users are missing",
    ),
    "NaN": ({"users": np.where(np.arange(N) < 2, np.nan, 1.0)}, "2 of 11 users are missing"),
    "k alone": ({"users": Users(None, at_most=2)}, "expected users of shape"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_users(case: str) -> None:
    options, message = WRONG[case]
    with pytest.raises(ValueError, match=message):
        vault(**options)
    with pytest.raises(ValueError, match="at_most must be at least 1, got 0"):
        Users(USERS, at_most=0)


@pytest.mark.holds("vault.PrivateLabels")
def test_keyed_draws_compose_over_the_files_of_a_user(tmp_path: pathlib.Path) -> None:
    labels = vault(2.0, store=tmp_path / "labels", draws=Keyed(np.arange(N)))
    place = np.arange(N) - np.repeat(np.cumsum(SIZES) - SIZES, SIZES)  # of a label of its user
    files = [labels.randomize(RR, np.flatnonzero(place == i), key=f"day {i}") for i in range(4)]
    assert [noisy.guarantee().epsilon for noisy in files] == [0.5] * 4
    stated = labels.guarantee()
    assert stated.epsilon == 2.0 and stated.unit == "all labels of one user"
    assert {"secure-keyed-draws", "public-features"} <= {note.code for note in stated.assumptions}
    with pytest.raises(ldp.BudgetExceededError):
        labels.randomize(RR, np.flatnonzero(place == 4), key="day 4")
    # A row's draw depends on its id, whatever its user.
    key = ldp.scale.ReleaseKey(tmp_path / "labels" / "labels.key")
    same = ldp.scale.randomize_batch(files[3].indices, Y[place == 3], RR, key.secret, "vault/day 3")
    np.testing.assert_array_equal(files[3].values, same)
    # An engine's release would be charged by label.
    with pytest.raises(ValueError, match="whose vault has users"):
        key.register("day 4", RR)


def test_a_vault_with_users_is_not_extended() -> None:
    with pytest.raises(ValueError, match="Users are for all labels"):
        vault().extend([0, 1])


def test_a_user_with_ten_thousand_labels() -> None:
    users = np.r_[np.zeros(10_000, int), np.arange(1, 11)]
    y = np.arange(users.size) % 2
    labels = ldp.PrivateLabels(y, 2, budget=ldp.PrivacyBudget(1.0, 1e-4), users=users)
    with pytest.raises(ldp.BudgetExceededError, match="epsilon=10000"):
        labels.randomize(ldp.RandomizedResponse(1.0, 2))
    assert labels.receipts == ()
    bounded = ldp.PrivateLabels(
        y, 2, budget=ldp.PrivacyBudget(1.0, 1e-4), users=Users(users, at_most=2)
    )
    assert len(bounded) == 12
    assert bounded.randomize(ldp.RandomizedResponse(0.5, 2)).guarantee().epsilon == 1.0
