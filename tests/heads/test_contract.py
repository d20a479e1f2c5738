"""The contract that every head keeps: its cost, its store, its Keras model and its refusals."""

from __future__ import annotations

import inspect
from typing import Any, NamedTuple

import keras
import numpy as np
import pytest
from fits import fixed_in_advance, without_encoder
from sklearn.base import clone, is_classifier, is_regressor

from tf_labeldp import PrivacyBudget, PrivateLabels, guarantee, heads
from tf_labeldp.accounting import BudgetExceededError, public_input
from tf_labeldp.heads import (
    NoiseCluster,
    PrivateLogisticRegression,
    PrivatePoissonRegression,
    PrivateRidge,
)
from tf_labeldp.mechanisms import HistogramMechanism, LabelMomentMechanism, RandomizedResponse
from tf_labeldp.plugins import Head, TrainedModel
from tf_labeldp.vault import LabelKind

pytestmark = [
    pytest.mark.usefixtures("fits_apart"),
    pytest.mark.filterwarnings("ignore:the release is indistinguishable"),
]
RNG = np.random.default_rng(0)
X = RNG.normal(size=(300, 4)).astype(np.float32) + np.float32(0.2)
Y = np.argmax(X[:, :3] + 0.3 * RNG.normal(size=(300, 3)), axis=1)
KINDS = {
    "classes": ({"num_classes": 3}, Y),
    "binary": ({"num_classes": 2}, np.minimum(Y, 1)),
    "numbers": ({"low": 1.0, "high": 8.0}, np.clip(4.0 + 2.0 * X[:, 0], 1.0, 8.0)),
    "rows": ({"num_labels": 3}, np.eye(3, dtype=int)[Y]),
}
EPSILON = 5.0


class Member(NamedTuple):
    """A head as a function of epsilon, and the kind of labels that it is fitted on."""

    make: Any
    kind: str = "classes"
    delta: float = 1e-5

    def head(self, epsilon=EPSILON, **arguments):
        return self.make(epsilon, delta=self.delta, **arguments)

    def vault(self, epsilon=EPSILON, labels=None, **options):
        arguments, own = KINDS[self.kind]
        labels = own if labels is None else labels
        budget = PrivacyBudget(epsilon, self.delta)
        return PrivateLabels(labels, LabelKind.of(**arguments), budget=budget, **options)

    def outputs(self, head, rows=X):
        return head.predict(rows)[:, None] if self.kind == "numbers" else head.predict_proba(rows)


def ids(receipts):
    return {receipt.id for receipt in receipts}


def clusters(epsilon, **arguments):
    return NoiseCluster(5, epsilon, **arguments)


def plain(epsilon, **arguments):
    return PrivateRidge(epsilon, spread=False, center=False, intercept=False, **arguments)


MEMBERS = {
    **{f"PrivateRidge, {kind}": Member(PrivateRidge, kind) for kind in KINDS},
    "PrivateRidge, plain": Member(plain, "binary"),
    "PrivateLogisticRegression": Member(PrivateLogisticRegression),
    "PrivateLogisticRegression, rows": Member(PrivateLogisticRegression, "rows"),
    "PrivatePoissonRegression": Member(PrivatePoissonRegression, "numbers"),
    "NoiseCluster": Member(clusters, delta=0.0),
    "NoiseCluster, gaussian": Member(clusters),
}


@pytest.fixture(params=MEMBERS)
def member(request):
    return MEMBERS[request.param]


def test_every_head_is_in_the_table():
    """``BootstrappedHead`` needs a network, and has tests with one."""
    classes = [kind for _, kind in inspect.getmembers(heads, inspect.isclass)]
    public = {kind for kind in classes if issubclass(kind, Head)}
    assert public - {heads.BootstrappedHead} == {type(each.head()) for each in MEMBERS.values()}


def test_configuration_round_trip(member):
    head = member.head(**KINDS[member.kind][0])
    again = clone(head)
    assert type(again) is type(head) and again.get_params() == head.get_params()
    assert again.set_params(epsilon=2.0) is again and (again.epsilon, head.epsilon) == (2.0, 5.0)
    with pytest.raises(ValueError, match="Invalid parameter 'alpha'"):
        again.set_params(alpha=1)
    with pytest.raises(ValueError, match="an encoder stays as it was fitted"):
        again.set_params(encoder__alpha=1)
    for unfitted in (lambda: head.predict(X), head.guarantee, head.to_keras):
        with pytest.raises(ValueError, match="not fitted"):
            unfitted()
    fitted = member.head().fit(X, member.vault())
    for one in (head, fitted):
        assert is_regressor(one) == (member.kind == "numbers") != is_classifier(one)
    with pytest.raises(ValueError, match="not fitted"):
        clone(fitted).predict(X)


@pytest.mark.parametrize("key", [None, "name"])
@pytest.mark.holds("heads.NoiseCluster", "heads.PrivateRidge")
def test_one_release_costs_what_the_head_states_and_is_stored(member, key, tmp_path):
    labels = member.vault(store=tmp_path / "store")
    head = member.head(key=key).fit(X, labels)
    stated = head.guarantee()
    assert stated.epsilon == pytest.approx(EPSILON, rel=1e-9) and stated.epsilon <= EPSILON
    assert stated.delta == member.delta and stated.is_private
    assert stated == labels.guarantee()
    assert ids(head.receipts_) == ids(labels.receipts)
    with pytest.raises(BudgetExceededError):
        member.head(0.01, key="another").fit(X, labels)
    restarted = member.vault(store=tmp_path / "store")
    again = member.head(key=key).fit(X, restarted)
    np.testing.assert_array_equal(member.outputs(again), member.outputs(head))
    assert again.guarantee() == stated and len(restarted.receipts) == 1


def test_only_a_seed_repeats_the_noise_and_the_statement_names_it(member):
    arguments, labels = KINDS[member.kind]
    fits = [member.head(insecure_seed=seed, **arguments).fit(X, labels) for seed in (4, 4, 5)]
    fits += [member.head(**arguments).fit(X, labels) for _ in range(2)]
    first, same, *others = [member.outputs(head) for head in fits]
    np.testing.assert_array_equal(first, same)
    assert all(np.any(first != other) for other in others) and np.any(others[1] != others[2])
    assert [head.guarantee().seeded for head in fits] == [True, True, True, False, False]
    assert [head.guarantee().is_private for head in fits[2:4]] == [False, True]
    assert "array-of-labels" in {note.code for note in fits[3].guarantee().assumptions}


def test_all_that_is_fitted_depends_on_the_release_and_public_numbers(member, monkeypatch):
    """Vaults with different labels and the same release give the same head, to the last bit."""
    released = []
    for kind in (LabelMomentMechanism, HistogramMechanism):

        def release(self, *rest, original=kind.release, **named):
            if not released:
                released.append(original(self, *rest, **named))
            return released[0].copy()

        monkeypatch.setattr(kind, "release", release)
    labels = KINDS[member.kind][1]
    vaults = [member.vault(), member.vault(labels=np.broadcast_to(labels[:1], labels.shape))]
    first, second = (member.head().fit(X, vault) for vault in vaults)
    assert [len(vault.receipts) for vault in vaults] == [1, 1] and len(released) == 1
    arrays = {name for name, value in vars(first).items() if isinstance(value, np.ndarray)}
    assert len(arrays) >= 3
    for name in arrays:
        np.testing.assert_array_equal(vars(first)[name], vars(second)[name])
    np.testing.assert_array_equal(member.outputs(first), member.outputs(second))


def test_the_keras_model_computes_the_same_and_its_file_keeps_the_receipts(
    member, tmp_path, forget
):
    head = member.head().fit(X, member.vault())
    model = head.to_keras()
    model.save(tmp_path / "head.keras")
    forget()  # as in another program
    loaded = keras.models.load_model(tmp_path / "head.keras")
    rows = np.concatenate([X, 3.0 * RNG.normal(size=(500, 4)).astype(np.float32)])
    for found in (model, loaded):
        assert found.trainable_weights == []
        np.testing.assert_allclose(found(rows), member.outputs(head, rows), rtol=1e-5, atol=2e-5)
        assert guarantee(found).epsilon == head.guarantee().epsilon
        assert ids(public_input(found).receipts) == ids(head.receipts_)


def trained_encoder():
    """A network that carries the receipt of a draw at epsilon 1, as if it was trained on it."""
    encoder = keras.Sequential([keras.Input((4,)), keras.layers.Dense(6, "tanh")])
    labels = PrivateLabels(np.minimum(Y, 1), 2, budget=PrivacyBudget(1.0))
    receipts = labels.randomize(RandomizedResponse(1.0, 2)).receipts
    TrainedModel(encoder).attach(receipts)
    return encoder, receipts


@pytest.mark.parametrize("route", ["model", "method"])
def test_receipts_of_the_encoder_are_charged_and_stated(member, route):
    encoder, receipts = trained_encoder()
    argument = encoder if route == "model" else encoder.predict
    labels = member.vault(6.0)
    head = member.head(encoder=argument).fit(X, labels)
    *before, declared, own = head.receipts_
    assert ids(before) == ids(receipts)
    assert [declared.kind, own.kind] == ["declared", "release"]
    assert EPSILON < head.guarantee().epsilon <= 6.0
    stated = without_encoder(head.guarantee())
    assert fixed_in_advance(stated) == fixed_in_advance(labels.guarantee())
    assert stated.adaptive == pytest.approx((7.0, labels.guarantee().adaptive[1]))
    assert ids(public_input(head.to_keras(encoder)).receipts) == ids(head.receipts_)
    tight = member.vault(EPSILON)
    with pytest.raises(BudgetExceededError):
        member.head(encoder=argument).fit(X, tight)
    assert all(receipt.kind != "release" for receipt in tight.receipts)


def test_a_head_is_a_model_that_has_seen_labels(member):
    head = member.head().fit(X, member.vault())
    labels = PrivateLabels(Y, 3, budget=PrivacyBudget(7.0, 1e-5))
    methods = [] if member.kind == "numbers" else [head.predict_proba]
    for number, encoder in enumerate([head.to_keras(), *methods]):
        again = PrivateRidge(1.0, 1e-5, encoder=encoder, key=str(number)).fit(X, labels)
        assert ids(head.receipts_) < ids(again.receipts_)


BAD = {
    "NaN": ({}, np.where(np.arange(300)[:, None] == 7, np.nan, X), "features must be finite"),
    "length": ({}, X[:-1], "got 299 rows and 300 labels"),
    "seed": ({"insecure_seed": 1}, X, "insecure_seed must be None with a PrivateLabels"),
    "epsilon": ({"epsilon": 0.0}, X, "epsilon must be finite and above zero"),
    "kind": ({"num_classes": 9}, X, "num_classes differs from the PrivateLabels"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_refused_before_anything_is_charged(member, case):
    arguments, features, message = BAD[case]
    if case == "kind" and "num_classes" not in member.head().get_params():
        arguments, message = {"high": 99.0}, "high differs from the PrivateLabels"
    labels = member.vault()
    with pytest.raises(ValueError, match=message):
        member.head(**arguments).fit(features, labels)
    assert labels.receipts == ()


def test_labels_out_of_range_are_refused_and_not_shown(member):
    arguments, labels = KINDS[member.kind]
    with pytest.raises(ValueError, match="labels must") as caught:
        member.head(**arguments).fit(X, labels + 986)
    assert not any(str(number) in str(caught.value) for number in range(986, 995))


def test_a_budget_too_small_is_refused_before_the_features_are_read(member):
    labels = member.vault(0.9 * EPSILON)
    with pytest.raises(BudgetExceededError):
        member.head().fit(np.full_like(X, np.nan), labels)
    assert labels.receipts == ()


def test_a_failed_fit_leaves_the_head_and_its_statement(member):
    head = member.head().fit(X, member.vault())
    before, stated = member.outputs(head), head.guarantee()
    with pytest.raises(ValueError, match="got 299 rows and"):
        head.fit(X[:-1], member.vault())
    np.testing.assert_array_equal(member.outputs(head), before)
    assert head.guarantee() == stated
    with pytest.raises(ValueError, match=r"X has 3 features, but .* expecting 4"):
        head.predict(X[:, :3])
