"""Every two dimensions of a vault meet here: a pair works, or is refused with what to use.

A dimension is what only some vaults or uses have: users, parts, later labels, keyed draws, projects
of stores, several outputs, and weights.
"""

from __future__ import annotations

import itertools

import keras
import numpy as np
import pytest

import tf_labeldp as ldp
from tf_labeldp.data import poisson_batches
from tf_labeldp.scale import ReleaseKey
from tf_labeldp.vault import Keyed, Rows, Store

DIMENSIONS = ("users", "parts", "later", "keyed", "projects", "outputs", "weights")
N = 60
Y = np.arange(N) % 2
Z = (np.arange(N) // 2) % 2
USERS = np.arange(N) // 2  # two labels of each user
X = np.random.default_rng(5).normal(size=(N, 3)).astype(np.float32)
W = np.linspace(0.5, 1.5, N)
EPSILON, DELTA = 8.0, 1e-3
RR = ldp.RandomizedResponse(0.5, 2)

CROSSINGS = {}
"""For each pair of dimensions, the check of its effect or of its refusal."""


def crosses(first, second):
    """Registers the check of a pair."""

    def register(check):
        CROSSINGS[frozenset((first, second))] = check
        return check

    return register


def vault(y=Y, kind=2, **options):
    return ldp.PrivateLabels(y, kind, budget=ldp.PrivacyBudget(EPSILON, DELTA), **options)


def in_project(folder, name, y=Y, **options):
    return vault(y, store=Store(folder / "study" / name, project=True), **options)


def trained(labels, x=X, **options):
    """A model with an output for each vault, after one epoch of three steps."""
    inputs = keras.Input((3,))
    outputs = {name: keras.layers.Dense(2, name=name)(inputs) for name in labels}
    model = ldp.LabelDPModel(inputs, outputs)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(ldp.LabelDPOptimizer("sgd", 1.0, 4.0), {name: loss for name in labels})
    batches = poisson_batches(x, labels, sampling_probability=0.2, steps=3, **options)
    model.fit(batches, epochs=1, verbose=0)
    return model


def head(labels, x=X, **options):
    return ldp.PrivateLogisticRegression(1.0, DELTA / 10).fit(x, labels, **options)


def refused(message, call, error=ValueError):
    with pytest.raises(error, match=message):
        call()


def spent(labels):
    return labels.guarantee().epsilon


@crosses("users", "parts")
def _(folder):
    """A share is one of users: no user is in both parts, and each part pays for its own."""
    labels = vault(users=USERS)
    train, held_out = labels.split(0.5)
    assert not set(USERS[train.indices]) & set(USERS[held_out.indices])
    held_out.randomize(RR)
    assert spent(labels) == 1.0 and train.remaining() == EPSILON
    assert held_out.group_size == 2


@crosses("users", "later")
def _(folder):
    """Labels may be missing at the start; a user's cost would grow with each later label."""
    labels = vault([*Y[:-1], None], users=USERS, unlabelled=[N - 1])
    assert len(labels) == N - 1 and len(labels.users) == N - 1
    refused(
        "Users are for all labels. Make a vault of the new ones",
        lambda: labels.extend(Y[:1], rows=[N - 1]),
    )
    assert len(labels) == N - 1


@crosses("users", "keyed")
def _(folder):
    """The vault draws for users by its key; an engine, which counts labels, may not."""
    labels = vault(users=USERS, draws="keyed", store=folder / "s")
    labels.randomize(RR, key="a")
    key = ReleaseKey(folder / "s" / "labels.key")
    assert spent(labels) == 1.0 and key.guarantee().unit == "all labels of one user"
    refused("unit is one label.*vault has users", lambda: key.register("b", RR))


@crosses("users", "projects")
def _(folder):
    visits = in_project(folder, "visits", users=USERS)
    refused("expected users= in all vaults of a project", lambda: in_project(folder, "drugs"))
    drugs = in_project(folder, "drugs", Z, users=USERS)
    drugs.randomize(RR)
    assert spent(visits) == 1.0 and visits.guarantee().unit == "all labels of one user"


@crosses("users", "outputs")
def _(folder):
    labels = {"a": vault(users=USERS), "b": vault(Z, users=USERS)}
    stated = trained(labels).guarantee()
    assert stated.unit == "all labels of one user" and stated.epsilon == spent(labels["a"])
    rows = vault(np.stack([Y, Z], axis=1), Rows(2), users=USERS)
    rows.randomize(RR)
    assert spent(rows) == 2.0  # two labels in each of two rows
    refused("users of the vault", lambda: trained(labels | {"b": vault(Z, users=USERS[::-1] % 7)}))


@crosses("users", "weights")
def _(folder):
    labels = vault(users=USERS)
    plain, weighted = head(labels), head(labels, sample_weight=W)
    assert weighted.guarantee().unit == "all labels of one user"
    assert weighted.guarantee().epsilon == plain.guarantee().epsilon == 1.0
    assert np.any(weighted.predict_proba(X) != plain.predict_proba(X))


@crosses("parts", "later")
def _(folder):
    labels = vault()
    train, _ = labels.split(0.5)
    train.randomize(RR)
    refused("expected the whole vault, got a part", lambda: train.extend([0, 1]))
    late = labels.extend([0, 1])
    assert late.indices.tolist() == [N, N + 1] and late.remaining() == EPSILON
    assert len(train) == N // 2 and len(labels) == N + 2
    late.randomize(RR)
    assert spent(labels) == 0.5


@crosses("parts", "keyed")
def _(folder):
    """The draw of a part is charged to it alone, in the ledger of the key."""
    ids = Keyed([f"row {i}" for i in range(N)])
    labels = vault(draws=ids, store=folder / "s")
    train, held_out = labels.split(0.5)
    drawn = train.randomize(RR, key="a")
    assert spent(labels) == 0.5 and held_out.remaining() == EPSILON
    key = ReleaseKey(folder / "s" / "labels.key")
    assert key.guarantee().epsilon == 0.5
    again = vault(draws=ids, store=folder / "s")
    part, _ = again.split(0.5)
    np.testing.assert_array_equal(part.randomize(RR, key="a").values, drawn.values)
    assert spent(again) == 0.5


@crosses("parts", "projects")
def _(folder):
    """Another store of the project can't tell whose labels a part has: each draw counts."""
    visits, drugs = in_project(folder, "visits"), in_project(folder, "drugs", Z)
    train, held_out = visits.split(0.5)
    train.randomize(RR)
    assert drugs.remaining() == EPSILON - 0.5 and held_out.remaining() == EPSILON
    drugs.randomize(RR)
    assert held_out.remaining() == EPSILON - 0.5 and train.remaining() == EPSILON - 1.0


@crosses("parts", "outputs")
def _(folder):
    clicks, kinds = vault(), vault(Z)
    train, held_out = clicks.split(np.arange(30, N))
    of_kinds, _ = kinds.split(np.arange(30, N))
    model = trained({"a": train, "b": of_kinds}, X[train.indices])
    assert model.guarantee().epsilon == spent(train) > 0.0 == spent(vault())
    assert held_out.remaining() == EPSILON
    assert "same-examples" in {note.code for note in model.guarantee().assumptions}
    refused(
        "different parts of one vault. Give one part",
        lambda: trained({"a": train, "b": held_out}, X[train.indices]),
    )
    other, _ = vault(Z).split(np.arange(30))
    with pytest.warns(UserWarning, match="row i of each output must be the same example"):
        poisson_batches(
            X[train.indices], {"a": train, "b": other}, sampling_probability=0.2, steps=3
        )


@crosses("parts", "weights")
def _(folder):
    labels = vault()
    train, held_out = labels.split(0.5)
    fitted = head(train, X[train.indices], sample_weight=W[train.indices])
    assert fitted.guarantee().epsilon == 1.0 and held_out.remaining() == EPSILON
    refused("sample_weight", lambda: head(held_out, X[held_out.indices], sample_weight=W))
    assert held_out.remaining() == EPSILON


@crosses("later", "keyed")
def _(folder):
    refused("Leave unlabelled out", lambda: vault(draws="keyed", unlabelled=[1]))
    labels = vault(draws="keyed", store=folder / "s")
    refused("Keyed draws are for all labels. Make a vault", lambda: labels.extend([0, 1]))
    assert len(labels) == N


@crosses("later", "projects")
def _(folder):
    visits, drugs = in_project(folder, "visits"), in_project(folder, "drugs", Z)
    visits.randomize(RR, key="weekly")
    visits.extend([0, 1])
    visits.randomize(RR, key="weekly")  # draws for the new labels alone
    assert spent(visits) == 0.5 and len(visits.receipts) == 2
    assert drugs.remaining() == EPSILON - 0.5
    drugs.randomize(RR)
    assert spent(visits) == 1.0


@crosses("later", "outputs")
def _(folder):
    clicks = vault([*Y[:-1], None], unlabelled=[N - 1])
    kinds = vault([*Z[:-1], None], unlabelled=[N - 1])
    trained({"a": clicks, "b": kinds}, X[: N - 1])
    assert spent(clicks) == spent(kinds) > 0.0
    refused("labels", lambda: trained({"a": clicks, "b": vault(Z)}, X[: N - 1]))
    batches = poisson_batches(
        X[: N - 1], {"a": clicks, "b": kinds}, sampling_probability=0.2, steps=3
    )
    before = spent(clicks)
    clicks.extend(Y[-1:], rows=[N - 1])
    inputs = keras.Input((3,))
    model = ldp.LabelDPModel(inputs, {n: keras.layers.Dense(2, name=n)(inputs) for n in "ab"})
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(ldp.LabelDPOptimizer("sgd", 1.0, 4.0), {"a": loss, "b": loss})
    refused("extend", lambda: model.fit(batches, verbose=0))
    assert spent(clicks) == before


@crosses("later", "weights")
def _(folder):
    labels = vault([*Y[:-1], None], unlabelled=[N - 1])
    rows = labels.indices
    fitted = head(labels, X[rows], sample_weight=W[rows])
    assert fitted.guarantee().epsilon == spent(labels) == 1.0
    refused("sample_weight", lambda: head(labels, X[rows], sample_weight=W))
    late = labels.extend(Y[-1:], rows=[N - 1])
    assert late.remaining() == EPSILON


@crosses("keyed", "projects")
def _(folder):
    visits = in_project(folder, "visits", draws="keyed")
    drugs = in_project(folder, "drugs", Z)
    visits.randomize(RR, key="a")
    drugs.randomize(RR, key="b")
    key = ReleaseKey(folder / "study" / "visits" / "labels.key")
    assert spent(visits) == spent(drugs) == key.guarantee().epsilon == 1.0
    key.register("engine", RR)
    assert drugs.remaining() == EPSILON - 1.5


@crosses("keyed", "outputs")
def _(folder):
    refused("neither Rows", lambda: vault(np.stack([Y, Z], axis=1), Rows(2), draws="keyed"))
    labels = {
        "a": vault(draws="keyed", store=folder / "a"),
        "b": vault(Z, draws="keyed", store=folder / "b"),
    }
    stated = trained(labels).guarantee()
    key = ReleaseKey(folder / "a" / "labels.key")
    assert stated.epsilon == key.guarantee().epsilon == spent(labels["b"]) > 0.0


@crosses("keyed", "weights")
def _(folder):
    """Statistics are never keyed, so a head has new noise and its charge."""
    labels = vault(draws="keyed", store=folder / "s")
    fits = [head(labels, sample_weight=W) for _ in range(2)]
    assert np.any(fits[0].predict_proba(X) != fits[1].predict_proba(X))
    assert spent(labels) > 1.0
    assert ReleaseKey(folder / "s" / "labels.key").guarantee().epsilon == spent(labels)


@crosses("projects", "outputs")
def _(folder):
    """A step on two stores of one project counts once in each."""
    labels = {"a": in_project(folder, "a"), "b": in_project(folder, "b", Z)}
    other = in_project(folder, "other", Z)
    stated = trained(labels).guarantee()
    assert stated.epsilon == spent(labels["a"]) == spent(labels["b"]) == spent(other) > 0.0


@crosses("projects", "weights")
def _(folder):
    visits, drugs = in_project(folder, "visits"), in_project(folder, "drugs", Z)
    head(visits, sample_weight=W)
    assert spent(drugs) == spent(visits) == 1.0
    assert [each.charge for each in visits.receipts] == [each.charge for each in drugs.receipts]


@crosses("outputs", "weights")
def _(folder):
    labels = {"a": vault(), "b": vault(Z)}
    plain = trained({"a": vault(), "b": vault(Z)}).guarantee()
    stated = trained(labels, sample_weight=W, class_weight={"a": {1: 3.0}}).guarantee()
    assert stated.epsilon == plain.epsilon > 0.0
    assert all(vault.receipts[-1].sample_weights for vault in labels.values())
    refused(
        "one sample_weight per example.*Weigh outputs by loss_weights",
        lambda: trained(labels, sample_weight={"a": W, "b": W}),
    )


def test_no_pair_is_missing():
    pairs = {frozenset(pair) for pair in itertools.combinations(DIMENSIONS, 2)}
    assert len(pairs) == 21 and set(CROSSINGS) == pairs


@pytest.mark.holds("vault.PrivateLabels")
@pytest.mark.parametrize(
    "pair", itertools.combinations(DIMENSIONS, 2), ids=lambda pair: " and ".join(pair)
)
@pytest.mark.filterwarnings("ignore:a budget of epsilon", "ignore:the release is indist")
def test_two_dimensions_work_together_or_are_refused(pair, tmp_path):
    CROSSINGS[frozenset(pair)](tmp_path)
