"""Fits on arrays have no vault in common: those of one process on the same rows are added up."""

from __future__ import annotations

import multiprocessing
import pickle
import warnings
from collections import Counter

import numpy as np
import pandas as pd
import pytest
import tensorflow as tf
from scipy import optimize, sparse

from tf_labeldp import PrivateBoosting, PrivateClassifier
from tf_labeldp.accounting import Charge, PrivacyBudget, Receipts, public_input
from tf_labeldp.heads import NoiseCluster, PrivateLogisticRegression, PrivateRidge
from tf_labeldp.mechanisms import LabelMomentMechanism
from tf_labeldp.plugins import FeatureRows
from tf_labeldp.vault import PrivateLabels

N = 240
RNG = np.random.default_rng(17)
X = RNG.normal(size=(N, 4)).astype(np.float32)
Y = (X[:, 0] > 0).astype(int)
DELTA = 1e-4
AGAIN = "on rows whose labels were released before in this process"


def head(epsilon=1.0, kind=PrivateRidge, **arguments):
    return kind(epsilon, DELTA, **({"num_classes": 2} | arguments))


def of(*epsilons):
    """The epsilon of ``releases`` of one label alone."""
    charges = [Charge.of(LabelMomentMechanism(one, DELTA, num_classes=2)) for one in epsilons]
    return Charge.composed(Counter(charges), DELTA).epsilon


def alone(one, *rest):
    """Fits a head of which nothing is said, but that its noise was unlucky."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", "the release is indistinguishable from noise")
        return one.fit(*rest)


def alone_but_noisy(one, *rest):
    """Fits an estimator of which nothing is said, but that it learnt noise."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", "the release is indistinguishable from noise|on held-out")
        return one.fit(*rest)


def again(number, one, *rest):
    with pytest.warns(UserWarning, match=f"this is fit number {number} {AGAIN}"):
        return one.fit(*rest)


def test_a_second_fit_on_the_same_rows_states_both():
    first = alone(head(), X, Y)
    with pytest.warns(UserWarning, match=f"together epsilon={of(1.0, 2.0):.4g}, which guarantee"):
        second = head(2.0).fit(X, Y)
    assert of(1.0, 2.0) > 2.0 and second.guarantee().epsilon == of(1.0, 2.0)
    assert first.guarantee().epsilon == 1.0  # what it was made of
    # The receipt of the first fit, for the labels of the second: other content has another id.
    [earlier], [own] = second.receipts_[:-1], first.receipts_
    assert earlier.charge == own.charge and earlier.id != own.id
    assert len(public_input([first, second]).receipts) == 3
    third = again(3, head(0.5), X, Y)
    assert third.guarantee().epsilon == of(1.0, 2.0, 0.5) > second.guarantee().epsilon
    for one in (first, second, third):
        said = str(one.guarantee())
        assert "An array of labels has no vault: the fits of this process that are counted" in said
    assert second.guarantee() == Receipts(second.receipts_).guarantee()
    assert second.guarantee(delta=1e-3).epsilon < second.guarantee().epsilon
    read = pickle.loads(pickle.dumps(second))
    assert read.guarantee() == second.guarantee()
    assert [receipt.id for receipt in read.receipts_] == [one.id for one in second.receipts_]


@pytest.mark.parametrize("kind", [PrivateRidge, NoiseCluster])
def test_the_warning_is_of_the_line_of_the_fit(kind):
    def one():
        return NoiseCluster(3, 1.0, num_classes=2) if kind is NoiseCluster else head(kind=kind)

    one().fit(X, Y)
    with pytest.warns(UserWarning, match=AGAIN) as caught:
        one().fit(X, Y)
    assert [warning.filename for warning in caught] == [__file__]


@pytest.mark.parametrize(
    "changed",
    [
        lambda: (np.asfortranarray(X[::-1].astype(np.float64)), Y[::-1].tolist()),
        lambda: (tf.data.Dataset.from_tensor_slices((X, Y)).batch(50),),
    ],
    ids=["order-and-dtype", "pairs"],
)
def test_rows_are_known_in_any_form(changed):
    alone(head(), X, Y)
    assert again(2, head(), *changed()).guarantee().epsilon == of(1.0, 1.0)


def test_heads_of_every_kind_are_added_up():
    alone(head(), X, Y)
    logistic = again(2, head(1.0, PrivateLogisticRegression), X, Y)
    clusters = again(3, NoiseCluster(3, 0.5, num_classes=2), X, Y)
    charges = [one.charge for one in clusters.receipts_]
    assert [one.epsilon for one in charges] == [1.0, 1.0, 0.5]
    assert clusters.guarantee().epsilon == Charge.composed(Counter(charges), DELTA).epsilon
    assert clusters.guarantee().epsilon > logistic.guarantee().epsilon > 1.0
    rows = again(4, head(0.5, num_classes=None, num_labels=2), X, np.stack([Y, 1 - Y], axis=1))
    assert rows.guarantee().epsilon > clusters.guarantee().epsilon


def test_each_row_counts_the_fits_that_it_was_in():
    """Of three thirds: the second fit shares one with the first, the third one with both."""
    thirds = np.arange(N) * 3 // N
    alone(head(1.0), X[thirds < 2], Y[thirds < 2])
    second = again(2, head(2.0), X[thirds > 0], Y[thirds > 0])
    assert second.guarantee().epsilon == of(1.0, 2.0)
    third = again(3, head(3.0), X[thirds != 1], Y[thirds != 1])
    assert third.guarantee().epsilon == max(of(1.0, 3.0), of(2.0, 3.0)) < of(1.0, 2.0, 3.0)
    whole = again(4, head(1.0), X, Y)
    pairs = [of(1.0, 3.0, 1.0), of(1.0, 2.0, 1.0), of(2.0, 3.0, 1.0)]
    assert whole.guarantee().epsilon == max(pairs)


@pytest.mark.parametrize("kind", ["head", "logistic", "clusters", "boosting", "front door"])
def test_as_many_labels_count_as_those_of_the_same_people(kind):
    """The features of the second fit are other ones, such as other columns of the same people."""
    door = {"method": "head", "budget_for_evaluation": 1.0, "num_classes": 2}
    made = {
        "head": lambda: head(),
        "logistic": lambda: head(kind=PrivateLogisticRegression),
        "clusters": lambda: NoiseCluster(3, 1.0, DELTA, num_classes=2),
        "boosting": lambda: PrivateBoosting(1.0, num_classes=2, max_trees=2),
        "front door": lambda: PrivateClassifier(1.0, DELTA, **door),
    }[kind]
    first = alone_but_noisy(made(), X, Y).guarantee().epsilon
    second = again(2, made(), X[:, :2] + 9.0, 1 - Y)
    assert second.guarantee().epsilon > 1.3 * first
    # Nothing shows whether two label sets are equal: other labels of as many people add up, too.
    assert again(3, made(), X + 5.0, np.zeros(N, int)).guarantee().epsilon > 1.6 * first


def test_parts_of_one_array_are_known_by_their_memory():
    half = N // 2
    alone(head(1.0), X[:half], Y[:half])
    assert alone(head(2.0), X[half:] + 9.0, Y[half:]).guarantee().epsilon == 2.0
    # Overlapping parts are the same labels, whatever their rows and their number.
    third = again(3, head(1.0), X[10:] - 9.0, Y[10:])
    assert third.guarantee().epsilon > of(1.0, 2.0)
    # A copy has no memory in common, and another length.
    assert alone(head(1.0), X[:50] + 3.0, Y[:50].copy()).guarantee().epsilon == 1.0


def test_columns_of_one_array_are_labels_of_the_same_people():
    """Their memory is apart, as that of disjoint rows is: columns of a frame, rows of a table."""
    columns = np.stack([Y, 1 - Y])
    frame = pd.DataFrame(columns.T.copy(), columns=["ill", "paid"])
    alone(head(1.0), X[:, :2], frame["ill"])
    assert again(2, head(1.0), X[:, 2:], frame["paid"]).guarantee().epsilon == of(1.0, 1.0)
    x = X[:200] + 9.0
    alone(head(1.0), x[:, :2], columns[0, :200])
    found = again(2, head(1.0), x[:, 2:], columns[1, :200]).guarantee()
    assert found.epsilon == of(1.0, 1.0)


def test_parts_of_a_file_are_parts_of_one_array(tmp_path):
    np.save(tmp_path / "labels.npy", Y)
    labels = np.load(tmp_path / "labels.npy", mmap_mode="r")
    alone(head(1.0), X[:150], labels[:150])
    assert again(2, head(1.0), X[100:] + 9.0, labels[100:]).guarantee().epsilon == of(1.0, 1.0)


def test_a_few_rows_that_are_equal_by_chance_do_not_divide_a_label_set():
    """Each earlier fit shares one row with the last one: its labels count in all three."""
    other, last = X + 9.0, X - 9.0
    last[3], last[7] = X[3], other[7]
    alone(head(1.0), X, Y)
    again(2, head(1.0), other, Y)
    assert again(3, head(1.0), last, Y).guarantee().epsilon == of(1.0, 1.0, 1.0)


def test_an_array_that_is_gone_is_not_mistaken_for_another():
    """The memory of a freed array may be used again."""
    labels = Y.copy()
    alone(head(1.0), X, labels)
    del labels
    others = [alone(head(1.0), X[: N - 1 - k] + k + 1.0, Y[: N - 1 - k].copy()) for k in range(5)]
    assert {one.guarantee().epsilon for one in others} == {1.0}


def test_other_people_have_a_vault():
    alone(head(1.0), X, Y)
    options = {"budget": PrivacyBudget(1.0, DELTA), "people": "Rome"}
    other = head(1.0, num_classes=None).fit(X, PrivateLabels(Y, 2, **options))
    assert other.guarantee().epsilon == 1.0
    with pytest.warns(UserWarning, match="need a PrivateLabels of their own, with people="):
        stated = head(1.0).fit(X + 9.0, Y).guarantee()
    assert "of one array that overlap, and on other arrays of as many labels count" in str(stated)


def test_disjoint_rows_of_different_heads_are_apart():
    alone(head(1.0), X[:100], Y[:100])
    other = alone(head(2.0), X[100:], Y[100:])
    assert other.guarantee().epsilon == 2.0 and len(other.receipts_) == 1


def test_clones_count_where_a_transformer_changed_the_rows():
    from sklearn.base import clone
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    one = make_pipeline(StandardScaler(), head())
    alone(clone(one), X, Y)
    other = again(2, clone(one), X[: N // 2], Y[: N // 2])
    assert other[-1].guarantee().epsilon == of(1.0, 1.0)
    apart = make_pipeline(StandardScaler(), head())
    copied = alone(apart, X[: N // 3], Y[: N // 3].copy())
    assert copied[-1].guarantee().epsilon == 1.0
    overlapping = again(4, make_pipeline(StandardScaler(), head()), X[: N // 3], Y[: N // 3])
    assert overlapping[-1].guarantee().epsilon == of(*[1.0] * 4)


@pytest.mark.filterwarnings("ignore:this is fit number")
def test_clones_count_where_a_transformer_changed_some_of_the_rows():
    """Half of the rows lack a number, filled in otherwise in each fit; they are in all three."""
    from sklearn.base import clone
    from sklearn.impute import SimpleImputer
    from sklearn.pipeline import make_pipeline

    x = X.copy()
    x[N // 2 :, 1] = np.nan
    in_all, quarter = np.arange(N) >= N // 2, np.arange(N) < N // 4
    one = make_pipeline(SimpleImputer(), head())
    for rows in (in_all | quarter, ~quarter, np.ones(N, bool)):
        last = clone(one).fit(x[rows], Y[rows])
    assert last[-1].guarantee().epsilon == of(1.0, 1.0, 1.0)


@pytest.mark.filterwarnings("ignore:this is fit number")
def test_cross_validation_and_a_search_are_counted():
    from sklearn.model_selection import GridSearchCV

    search = GridSearchCV(head(), {"penalty": [1.0, 8.0]}, cv=3).fit(X, Y)
    # Each row was in two of three folds, for each of two penalties, and in the last fit.
    assert search.best_estimator_.guarantee().epsilon == of(*[1.0] * 5)
    assert len(search.best_estimator_.receipts_) == 7


def test_a_fit_that_failed_counts_if_it_had_released(monkeypatch):
    for bad in ({"num_classes": 3, "penalty": -1.0}, {"low": 0.0, "high": 1.0}, {"epsilon": 0.0}):
        with pytest.raises(ValueError):
            head(**bad).fit(X, Y)
    with pytest.raises(ValueError, match="and 239 labels"):
        head().fit(X, Y[1:])
    assert alone(head(), X, Y).guarantee().epsilon == 1.0
    with monkeypatch.context() as patch:
        patch.setattr(optimize, "minimize", lambda *rest, **named: 1 / 0)
        with pytest.raises(ZeroDivisionError), pytest.warns(UserWarning, match=AGAIN):
            head(kind=PrivateLogisticRegression).fit(X, Y)
    assert again(3, head(), X, Y).guarantee().epsilon == of(1.0, 1.0, 1.0)


def test_a_seeded_fit_makes_the_sum_not_private():
    alone(head(insecure_seed=0), X, Y)
    stated = again(2, head(), X, Y).guarantee()
    assert stated.seeded and not stated.is_private and stated.epsilon == of(1.0, 1.0)


def test_a_vault_keeps_account_by_itself():
    """Fits on it are no fits on arrays: it knows what has left it, and refuses more."""
    vault = PrivateLabels(Y, num_classes=2, budget=PrivacyBudget(2.0, DELTA))
    for _ in range(2):
        one = alone(head(num_classes=None), X, vault)
        assert one.guarantee().epsilon == 1.0 and "has no vault" not in str(one.guarantee())
    assert vault.guarantee().epsilon == of(1.0, 1.0)
    assert alone(head(), X, Y).guarantee().epsilon == 1.0


@pytest.mark.parametrize("kind", [PrivateRidge, NoiseCluster])
def test_other_processes_need_a_vault_in_a_store(kind, tmp_path, monkeypatch):
    """Processes that another one started know nothing of each other's fits."""
    one = NoiseCluster(3, 1.0, DELTA, num_classes=2) if kind is NoiseCluster else head(kind=kind)
    monkeypatch.setattr(multiprocessing, "parent_process", lambda: "another")
    with pytest.raises(RuntimeError, match=r"n_jobs=1, or open a PrivateLabels\(\.\.\., store="):
        one.fit(X, Y)
    budget = PrivacyBudget(1.0, DELTA)
    vault = PrivateLabels(Y, num_classes=2, budget=budget, store=tmp_path / "store")
    assert one.fit(X, vault).guarantee().epsilon == 1.0


def test_a_search_in_several_processes_says_so():
    from sklearn.model_selection import cross_val_score

    with pytest.raises(ValueError, match="expected a PrivateLabels in a worker process"):
        cross_val_score(head(), X, Y, cv=2, n_jobs=2)


def digests_of(inputs):
    return FeatureRows(inputs).digests()


def test_digests_tell_rows_apart():
    """Also where rows have the same entries at other places, and for wider rows than the key."""
    for width in (1, 3, 5000):
        rows = np.zeros((200, width), np.float32)
        rows[np.arange(200), np.arange(200) % width] = 1.0 + np.arange(200) // width
        found = digests_of(rows)
        assert found.dtype == np.uint64 and np.unique(found).size == 200
        np.testing.assert_array_equal(digests_of(rows.astype(float)), found)
        blocks = [digests_of(rows[start : start + 7]) for start in range(0, 200, 7)]
        np.testing.assert_array_equal(np.concatenate(blocks), found)
    assert digests_of(np.ones((1, 2))) != digests_of(np.ones((1, 3)))


NAMES = np.array([f"person {number}" for number in range(N)])
RAW = {
    "frame of texts": pd.DataFrame({"name": NAMES, "x": X[:, 0]}),
    "objects": np.column_stack([NAMES.astype(object), X[:, :1]]),
    "sparse": sparse.csr_array(X),
    "tuple": (X[:, :2], X[:, 2:]),
    "data set": tf.data.Dataset.from_tensor_slices({"name": NAMES, "x": X[:, 0]}).batch(70),
}


def random_features(seed):
    """An encoder of rows of any kind, whose features tell nothing of those of other seeds."""

    def encode(inputs):
        factors = np.random.default_rng(seed).integers(1 << 62, size=3, dtype=np.uint64)
        hashed = digests_of(inputs) * factors
        return (hashed >> np.uint64(40)).astype(np.float64)

    return encode


@pytest.mark.filterwarnings("ignore:the release is indistinguishable")
@pytest.mark.parametrize("kind", RAW)
def test_heads_with_several_encoders_are_fits_on_the_same_rows(kind):
    """The rows are those that were given, of whatever kind, and not what an encoder makes of them.

    They are known by their features too: fitted on without the encoder, they are the same.
    """
    head(encoder=random_features(1)).fit(RAW[kind], Y)
    stated = again(2, head(encoder=random_features(2)), RAW[kind], Y).guarantee()
    assert stated.epsilon == of(1.0, 1.0)
    if kind != "data set":
        again(3, head(), random_features(1)(RAW[kind]), Y)


@pytest.mark.filterwarnings("ignore:the release is indistinguishable")
def test_other_texts_are_other_rows():
    one = {"name": NAMES, "x": np.ones(N)}
    other = {"name": np.char.upper(NAMES[1:]), "x": np.ones(N - 1)}
    head(encoder=random_features(1)).fit(one, Y)
    found = head(encoder=random_features(2)).fit(other, Y[1:].copy()).receipts_
    assert [receipt.kind for receipt in found] == ["declared", "release"]


def test_rows_are_known_across_the_kinds_of_raw_inputs():
    forms = (X, X.tolist(), pd.DataFrame(X), tf.constant(X), RAW["sparse"], RAW["tuple"])
    found = [digests_of(form) for form in forms]
    assert all(np.array_equal(one, found[0]) for one in found)
    table = {"name": NAMES, "x": X[:, 0]}
    texts = [digests_of(form) for form in (table, RAW["frame of texts"])]
    np.testing.assert_array_equal(*texts)
    for nothing in (None, 3, "text", ({"a": X}, X[1:])):
        assert digests_of(nothing) is None


def test_digests_of_a_sparse_matrix_are_those_of_its_rows():
    held = sparse.random(50, 5000, 0.01, random_state=0).tocoo()
    twice = [np.concatenate([one, one]) for one in (held.data, held.row, held.col)]
    for data, row, column in ((held.data, held.row, held.col), twice):
        for kind in (sparse.csc_array, sparse.coo_matrix):
            made = kind((data, (row, column)), shape=held.shape)
            expected = digests_of(made.toarray())
            np.testing.assert_array_equal(digests_of(made), expected)
