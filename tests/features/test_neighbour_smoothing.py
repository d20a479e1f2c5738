"""Smoothed features: against dense linear algebra, new examples, no labels, a better release."""

from __future__ import annotations

import numpy as np
import pytest

from tf_labeldp import PrivateLabels
from tf_labeldp.accounting import BudgetExceededError, PrivacyBudget, public_input
from tf_labeldp.features import NeighbourSmoothing, _neighbour_smoothing
from tf_labeldp.features._neighbour_smoothing import listed_neighbours, nearest_neighbours
from tf_labeldp.heads import PrivateRidge
from tf_labeldp.mechanisms import RandomizedResponse
from tf_labeldp.plugins import TrainedModel

RNG = np.random.default_rng(81)
CENTRES = 1.6 * RNG.normal(size=(6, 12))
CLUSTER = RNG.integers(0, 6, size=1500)
X = (CENTRES[CLUSTER] + RNG.normal(size=(1500, 12))).astype(np.float32)
pytestmark = pytest.mark.usefixtures("fits_apart")


def unit(rows):
    return (rows / np.linalg.norm(rows, axis=1, keepdims=True)).astype(np.float32)


@pytest.mark.parametrize(("size", "num", "block"), [(11, 10, 512), (333, 10, 7), (700, 3, 512)])
def test_neighbours_equal_a_full_sort(monkeypatch, block, size, num):
    monkeypatch.setattr(_neighbour_smoothing, "_QUERIES", block)
    rows, queries = unit(X[:size, :5]), unit(X[-50:, :5])
    for asked in (rows, queries):
        products = (asked @ rows.T).astype(np.float64)
        if asked is rows:
            np.fill_diagonal(products, -2.0)
        expected = np.sort(products, axis=1)[:, -num:]
        found = nearest_neighbours(asked, rows, num)
        assert found.shape == (len(asked), num)
        assert all(len(set(row)) == num for row in found.tolist())
        values = np.sort(np.take_along_axis(products, found, axis=1), axis=1)
        np.testing.assert_allclose(values, expected, atol=1e-6)


def test_equal_rows_are_no_neighbours():
    rows = np.repeat(unit(X[:30]), 4, axis=0)
    found = nearest_neighbours(rows, rows, 8)
    assert not np.any(found // 4 == np.arange(120)[:, np.newaxis] // 4)
    same = nearest_neighbours(rows[:1], np.repeat(rows[:1], 20, axis=0), 8)
    assert same.min() >= 0 and same.max() < 20


def recall(found, expected):
    return np.mean([np.isin(a, b).mean() for a, b in zip(found, expected, strict=True)])


def test_lists_find_most_neighbours_and_never_equals(monkeypatch):
    """Also past more equals than it asks for at first, and more than it asks for at all."""
    pytest.importorskip("faiss")
    rows, queries = unit(X), unit(X[:200] + 0.1)
    for asked in (rows, queries):
        expected = nearest_neighbours(asked, rows, 10)
        found = listed_neighbours(asked, rows, 10, 0)
        assert found.dtype == np.int32 and found.shape == (len(asked), 10)
        assert all(len(set(row)) == 10 for row in found.tolist())
        assert recall(found, expected) > 0.97
    assert not np.any(listed_neighbours(rows, rows, 10, 0) == np.arange(1500)[:, np.newaxis])
    several = np.repeat(rows[:100], 30, axis=0)
    for most in (4096, 40):
        monkeypatch.setattr(_neighbour_smoothing, "_FOUND", most)
        found = listed_neighbours(several, several, 10, 0)
        assert not np.any(found // 30 == np.arange(3000)[:, np.newaxis] // 30)
        exact = nearest_neighbours(several, several, 10)
        near, nearest = (
            np.einsum("id,ikd->ik", several, several[which]).min(axis=1) for which in (found, exact)
        )
        assert np.mean(near > nearest - 1e-5) > 0.95
    monkeypatch.setattr(_neighbour_smoothing, "_SEARCHED_LISTS", 1)
    assert recall(listed_neighbours(rows, rows, 10, 0), nearest_neighbours(rows, rows, 10)) < 0.9


def test_lists_are_the_same_for_a_seed(monkeypatch):
    """However many threads search them."""
    faiss = pytest.importorskip("faiss")
    monkeypatch.setattr(_neighbour_smoothing, "_EXACT_PAIRS", 0.0)
    monkeypatch.setattr(_neighbour_smoothing, "_SEARCHED_LISTS", 4)
    one, other, third = (NeighbourSmoothing(seed=seed).fit_transform(X) for seed in (0, 0, 1))
    np.testing.assert_array_equal(one, other)
    assert np.any(one != third)
    threads = faiss.omp_get_max_threads()
    for number in (1, 3):
        faiss.omp_set_num_threads(number)
        try:
            np.testing.assert_array_equal(NeighbourSmoothing().fit_transform(X), one)
        finally:
            faiss.omp_set_num_threads(threads)


def test_lists_are_for_many_pairs(monkeypatch):
    """Few pairs, and all where faiss is not installed, are compared one by one."""
    expected = NeighbourSmoothing().fit(X)
    calls = []

    def lists(queries, rows, num, seed):
        calls.append((len(queries), seed))
        return nearest_neighbours(queries, rows, num)

    monkeypatch.setattr(_neighbour_smoothing, "find_spec", lambda name: name == "faiss")
    monkeypatch.setattr(_neighbour_smoothing, "listed_neighbours", lists)
    monkeypatch.setattr(_neighbour_smoothing, "_EXACT_PAIRS", 1500.0**2 - 1)
    one = NeighbourSmoothing(seed=3).fit(X)
    one.transform(X[:1400])
    assert calls == [(1500, 3)]
    monkeypatch.setattr(_neighbour_smoothing, "find_spec", lambda name: None)
    with pytest.warns(UserWarning, match=r"1,500 examples .* pip install 'tf-labeldp\[neighbours"):
        found = NeighbourSmoothing().fit(X)
    assert len(calls) == 1
    np.testing.assert_array_equal(found.transform(X), expected.transform(X))


def test_it_is_the_fixed_point():
    strength = 0.8
    one = NeighbourSmoothing(strength=strength)
    smooth = one.fit_transform(X)
    start = NeighbourSmoothing(strength=0.0).fit_transform(X)
    lengths = np.linalg.norm(start, axis=1)
    centred = np.linalg.norm(X - X.mean(axis=0), axis=1)
    np.testing.assert_allclose(lengths, centred, rtol=1e-3)  # principal components: a rotation
    keys = unit(start * start.var(axis=0) ** -0.25)
    step = np.zeros((1500, 1500))
    np.put_along_axis(step, nearest_neighbours(keys, keys, 10), 0.1, axis=1)
    expected = np.linalg.solve(np.eye(1500) - strength * step, (1 - strength) * start)
    difference = np.linalg.norm(smooth - expected) / np.linalg.norm(expected)
    assert difference < 0.02
    assert np.linalg.norm(start - expected) / np.linalg.norm(expected) > 0.2


def test_old_examples_stay_and_new_ones_follow_their_neighbours():
    one = NeighbourSmoothing()
    smooth = one.fit_transform(X)
    assert smooth.dtype == np.float32 and smooth.shape == (1500, one.n_features_out_)
    difference = np.linalg.norm(one.transform(X) - smooth) / np.linalg.norm(smooth)
    assert difference < 0.01
    rng = np.random.default_rng(82)
    new = (CENTRES[CLUSTER] + rng.normal(size=X.shape)).astype(np.float32)
    means = np.stack([smooth[CLUSTER == c].mean(axis=0) for c in range(6)])
    plain = NeighbourSmoothing(strength=0.0).fit(X)

    def spread(rows):  # within clusters, relative to between
        own = np.stack([rows[CLUSTER == c].mean(axis=0) for c in range(6)])
        return np.mean((rows - own[CLUSTER]) ** 2) / np.mean(own**2)

    assert spread(one.transform(new)) < 0.5 * spread(plain.transform(new))
    nearest = np.linalg.norm(one.transform(new)[:, np.newaxis] - means, axis=2).argmin(axis=1)
    assert np.mean(nearest == CLUSTER) > 0.9


def _ids(receipts):
    return {receipt.id for receipt in receipts}


@pytest.mark.slow
@pytest.mark.holds("features.NeighbourSmoothing")
def test_an_encoder_that_was_trained_on_private_labels_is_counted():
    """By the map, by its Keras model, and by a head on either."""
    keras = pytest.importorskip("keras")
    model = keras.Sequential([keras.Input((12,)), keras.layers.Dense(4)])
    before = NeighbourSmoothing(encoder=model)
    assert before.fit_transform(X).shape == (1500, 4)
    vault = PrivateLabels(CLUSTER, 6, budget=PrivacyBudget(1.0))
    receipts = vault.randomize(RandomizedResponse(1.0, 6)).receipts
    named = before.receipts_
    assert [receipt.charge.epsilon for receipt in named] == [0.0]
    assert _ids(before.fit(X).receipts_) == _ids(named)
    TrainedModel(model).attach(receipts)
    smooth = NeighbourSmoothing(encoder=model).fit(X)
    assert _ids(smooth.receipts_) == _ids(receipts + named)
    for encoder in (smooth, smooth.to_keras(), smooth.transform, before.fit(X)):
        assert _ids(receipts) <= _ids(public_input(encoder).receipts) <= _ids(receipts + named)
        other = PrivateLabels(CLUSTER, 6, budget=PrivacyBudget(6.0, 1e-6))
        head = PrivateRidge(5.0, 1e-6, encoder=encoder).fit(X, other)
        assert _ids(receipts) < _ids(head.receipts_)
        assert sum(receipt.charge.epsilon > 0 for receipt in head.receipts_) == 2
        stated, charged = head.guarantee(), other.guarantee()  # the head's also names the encoder
        assert stated.epsilon == charged.epsilon > 5.0 and stated.delta == charged.delta
        assert {note.code for note in charged.assumptions} < {n.code for n in stated.assumptions}
        tight = PrivateLabels(CLUSTER, 6, budget=PrivacyBudget(5.0, 1e-6))
        with pytest.raises(BudgetExceededError):
            PrivateRidge(5.0, 1e-6, encoder=encoder).fit(X, tight)


def test_fewer_components_and_directions_without_variance():
    assert NeighbourSmoothing(num_components=3).fit_transform(X).shape == (1500, 3)
    wide = np.hstack([X, X[:, :2], np.ones((1500, 4), np.float32)])
    assert NeighbourSmoothing().fit_transform(wide).shape == (1500, 12)


@pytest.mark.parametrize(
    ("arguments", "inputs", "error", "message"),
    [
        ({"num_neighbours": 0}, X, ValueError, "num_neighbours must be at least 1"),
        ({"strength": 1.0}, X, ValueError, "strength must be in"),
        ({}, X[:10], ValueError, "expected more than num_neighbours=10 rows, got 10"),
        ({}, np.where(X > 3, np.nan, X), ValueError, "NaN or infinity"),
        ({}, np.ones((50, 3)), ValueError, "got equal rows"),
    ],
)
def test_bad_input(arguments, inputs, error, message):
    with pytest.raises(error, match=message):
        NeighbourSmoothing(**arguments).fit(inputs)


def test_bad_transform():
    with pytest.raises(ValueError, match=r"X has 11 features, .* expecting 12"):
        NeighbourSmoothing().fit(X).transform(X[:, :11])


def test_a_head_exports_it_on_raw_inputs():
    import keras

    images = X.reshape(-1, 3, 4)
    encoder = keras.Sequential([keras.Input((3, 4)), keras.layers.Flatten()])
    smooth = NeighbourSmoothing(encoder).fit(images)
    head = PrivateRidge(5.0, 1e-5, num_classes=6, encoder=smooth, insecure_seed=0).fit(
        images, CLUSTER
    )
    found = head.to_keras().predict(images, verbose=0)
    apart = np.abs(found - head.predict_proba(images)).max(axis=1)
    assert np.mean(apart > 1e-3) < 0.01
    function = NeighbourSmoothing(lambda rows: rows.reshape(-1, 12)).fit(images)
    with pytest.raises(TypeError, match="expected an encoder with a Keras model, got function"):
        function.to_keras()
