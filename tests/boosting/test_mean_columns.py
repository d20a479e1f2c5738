"""Columns of many categories count as the mean of their noisy labels."""

from __future__ import annotations

import numpy as np
import pytest

import tf_labeldp as ldp
from tf_labeldp.boosting import PrivateBoosting
from tf_labeldp.features import to_inputs
from tf_labeldp.vault import LabelKind

RNG = np.random.default_rng(0)
N, MANY = 12_000, 600
SHOP = RNG.integers(MANY, size=N)
OF_SHOP = RNG.random(MANY)
TABLE = {"shop": np.array([f"shop {code}" for code in SHOP]), "hour": RNG.uniform(0, 24, N)}
BOUGHT = (RNG.random(N) < OF_SHOP[SHOP]).astype(int)
TRAIN, TEST = np.arange(N) < 9_000, np.arange(N) >= 9_000


def part(rows):
    return {name: column[rows] for name, column in TABLE.items()}


def noisy_of(labels, epsilon, **kind):
    budget = ldp.PrivacyBudget(epsilon)
    vault = ldp.PrivateLabels(labels, LabelKind.of(**kind), budget=budget, insecure_seed=0)
    return vault.randomize(ldp.LabelRandomizer(epsilon, values=(0.0, 1.0)) if "low" in kind else
                           ldp.RandomizedResponse(epsilon, kind["num_classes"]))  # fmt: skip


@pytest.fixture(scope="module")
def fitted():
    noisy = noisy_of(BOUGHT[TRAIN], 3.0, num_classes=2)
    return PrivateBoosting().fit(part(TRAIN), noisy)


def error_of(model, rows):
    """The mean squared error of the probabilities, over that of knowing nothing."""
    found = model.predict_proba(part(rows))[:, 1]
    return np.mean((found - OF_SHOP[SHOP[rows]]) ** 2) / OF_SHOP.var()


def test_each_of_many_categories_has_its_own_mean(fitted):
    """254 buckets of two or three shops each would leave more than half of the variance."""
    assert error_of(fitted, TEST) < 0.35
    assert fitted.coder_.hashed_ == {} and not fitted.coder_.categorical_.any()


def test_the_same_for_numbers():
    noisy = noisy_of(BOUGHT[TRAIN].astype(float), 3.0, low=0.0, high=1.0)
    found = PrivateBoosting().fit(part(TRAIN), noisy).predict(part(TEST))
    assert np.mean((found - OF_SHOP[SHOP[TEST]]) ** 2) < 0.35 * OF_SHOP.var()


def test_more_classes_stay_hashed():
    noisy = noisy_of(BOUGHT[TRAIN] + SHOP[TRAIN] % 2, 3.0, num_classes=3)
    assert PrivateBoosting(max_trees=5).fit(part(TRAIN), noisy).coder_.hashed_ == {"shop": MANY}


@pytest.mark.parametrize("rows", [1, 5])
def test_a_label_is_never_in_its_own_mean(rows):
    """Categories say nothing here: trees that saw a row's own label would seem to gain."""
    size = 4_000
    names = RNG.permutation(np.array([f"id {code}" for code in range(size // rows)]).repeat(rows))
    table = {"id": names, "hour": RNG.uniform(0, 24, size)}
    noisy = noisy_of(RNG.integers(2, size=size), 8.0, num_classes=2)
    with pytest.warns(UserWarning, match="hardly more than noise"):
        model = PrivateBoosting().fit(table, noisy)
    assert model.gain_ < 0.01


@pytest.mark.slow
def test_the_exported_model_has_the_same_means(fitted, tmp_path):
    rows = part(TEST)
    rows["shop"] = rows["shop"].copy()
    rows["shop"][:3] = ["a new shop", "", "nan"]
    expected = fitted.predict_proba(rows)
    assert (expected[0] != expected[3]).any()
    fitted.to_keras().save(tmp_path / "m.keras")
    model = ldp.load_model(tmp_path / "m.keras")
    np.testing.assert_allclose(
        model.predict(to_inputs(rows, model), verbose=0), expected, atol=1e-5
    )
    assert ldp.guarantee(model).epsilon == ldp.guarantee(fitted).epsilon == 3.0


def test_means_carry_the_receipts_of_the_labels(fitted):
    assert ldp.guarantee(fitted.coder_) == ldp.guarantee(fitted)
    [codes] = [layer for layer in fitted.to_keras().layers if hasattr(layer, "layers")]
    [table] = [layer for layer in codes._flatten_layers() if hasattr(layer, "embeddings")]
    assert ldp.guarantee(table).epsilon == 3.0


def test_rare_categories_are_not_listed():
    """The file of a model does not name what few rows have, such as an identifier."""
    table = part(TRAIN)
    table["shop"] = table["shop"].copy()
    table["shop"][:4] = "rare one"
    model = PrivateBoosting(max_trees=5).fit(table, noisy_of(BOUGHT[TRAIN], 3.0, num_classes=2))
    [column, _] = model.coder_.columns_
    assert "shop 7" in column.categories.vocabulary
    assert "rare one" not in column.categories.vocabulary


def test_weights_count_in_the_means():
    """Rows without a weight say nothing: their labels are turned round."""
    weights = (RNG.random(9_000) < 0.7).astype(float)
    labels = np.where(weights > 0, BOUGHT[TRAIN], 1 - BOUGHT[TRAIN])
    model = PrivateBoosting().fit(part(TRAIN), noisy_of(labels, 3.0, num_classes=2), weights)
    assert error_of(model, TEST) < 0.45


@pytest.mark.slow
def test_codes_in_a_matrix_are_categories_by_place():
    """As ``categorical=`` names them; the exported model takes the matrix."""
    rows = np.stack([SHOP, TABLE["hour"]], axis=1)
    noisy = noisy_of(BOUGHT[TRAIN], 3.0, num_classes=2)
    model = PrivateBoosting(categorical=[0]).fit(rows[TRAIN], noisy)
    found = model.predict_proba(rows[TEST])
    assert np.mean((found[:, 1] - OF_SHOP[SHOP[TEST]]) ** 2) < 0.35 * OF_SHOP.var()
    exported = model.to_keras().predict(rows[TEST].astype(np.float32), verbose=0)
    np.testing.assert_allclose(exported, found, atol=1e-5)
