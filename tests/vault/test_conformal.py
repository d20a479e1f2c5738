"""Sets and intervals with coverage, from held-out private labels and from noisy ones."""

from __future__ import annotations

import keras
import numpy as np
import pytest
from sklearn.linear_model import LogisticRegression

import tf_labeldp as ldp
from tf_labeldp.accounting import public_input
from tf_labeldp.vault import Classes, Numbers

K = 4


def examples(n, rng):
    """Returns rows (n, K) with a noisy mark of the class, and the classes."""
    labels = rng.integers(0, K, n)
    return 1.2 * np.eye(K)[labels] + rng.normal(size=(n, K)), labels


def softmax(logits):
    odds = np.exp(logits - logits.max(axis=1, keepdims=True))
    return odds / odds.sum(axis=1, keepdims=True)


def vault(labels, epsilon=9.0, **kind):
    kind = kind or {"num_classes": K}
    return ldp.PrivateLabels(labels, **kind, budget=ldp.PrivacyBudget(epsilon, 1e-5))


def is_within(sets, labels):
    if sets.dtype == bool:
        return sets[np.arange(len(labels)), labels]
    return (sets[:, 0] <= labels) & (labels <= sets[:, 1])


MODELS = {
    "the law": lambda x: softmax(1.2 * x),
    "sure": lambda x: softmax(40.0 * x),
    "bad": lambda x: softmax(np.roll(x, 1, axis=1)),
    "constant": lambda x: np.full((len(x), K), 1.0 / K),
}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("alpha", [0.1, 0.05])
@pytest.mark.holds("vault.conformal", "vault.ConformalPredictor")
def test_sets_cover_and_not_by_much_more(name, alpha):
    """The mean over 40 times 800 held-out labels, at epsilon 1, against 3 standard errors."""
    rng, covered, passed = np.random.default_rng(5), [], []
    for _ in range(40):
        x, labels = examples(800, rng)
        new, true = examples(1000, rng)
        sets = ldp.conformal(MODELS[name], (x, vault(labels)), alpha, 1.0)
        assert sets.guarantee().epsilon == 1.0
        covered.append(is_within(sets.predict(new), true).mean())
        chances = MODELS[name](new)[np.arange(1000), true]
        passed.append((chances >= sets.threshold).mean())  # without the most likely class
    error = 3 * np.std(passed) / np.sqrt(40)
    assert np.mean(covered) >= np.mean(passed) >= 1 - alpha - error
    if name != "constant":  # whose scores are all equal
        # The correction, 10.6 of 801, and a step of the thresholds: of the expected misses, or for
        # a model that is too sure of the set's size.
        step = K / 192 if name == "sure" else 0.045 * alpha
        assert np.mean(passed) <= 1 - alpha + 0.0135 + step + error


@pytest.mark.parametrize("alpha", [0.1, 0.05])
@pytest.mark.holds("vault.conformal")
def test_intervals_cover_and_not_by_much_more(alpha):
    rng, covered, widths = np.random.default_rng(6), [], []
    for _ in range(40):
        x = rng.uniform(2.0, 8.0, 1800)
        y = np.clip(x + rng.normal(size=1800), 0.0, 10.0)
        labels = vault(y[:800], kind=Numbers(0, 10))
        found = ldp.conformal(lambda x: x, (x[:800], labels), alpha, 2.0).predict(x[800:])
        covered.append(is_within(found, y[800:]).mean())
        widths.append(np.ptp(found, axis=1).mean())
    error = 3 * np.std(covered) / np.sqrt(40)
    assert 1 - alpha - error <= np.mean(covered) <= 1 - alpha + 0.025
    assert found.shape == (1000, 2) and found.min() >= 0.0 and found.max() <= 10.0
    best = 2 * {0.1: 1.645, 0.05: 1.96}[alpha]
    assert np.mean(widths) < 1.2 * best


@pytest.mark.holds("vault.conformal")
def test_sets_of_noisy_labels_cover_at_no_cost_and_without_debiasing_they_would_be_large():
    rng, covered, sizes, naive = np.random.default_rng(7), [], [], []
    for _ in range(20):
        x, labels = examples(6000, rng)
        new, true = examples(1000, rng)
        private = vault(labels)
        noisy = private.randomize(ldp.RandomizedResponse(2.0, K))
        sets = ldp.conformal(MODELS["the law"], (x, noisy), 0.1)
        assert sets.guarantee().epsilon == private.guarantee().epsilon == 2.0
        covered.append(is_within(sets.predict(new), true).mean())
        sizes.append(sets.predict(new).sum(axis=1).mean())
        scores = MODELS["the law"](x)[np.arange(6000), noisy.values]
        naive.append((MODELS["the law"](new) >= np.quantile(scores, 0.1)).sum(axis=1).mean())
    # The margin is 0.74 (W + V) / sqrt(n) = 0.018.
    assert 0.9 <= np.mean(covered) <= 0.9 + 2 * 0.018
    assert np.mean(sizes) < 2.5 < 3.0 < np.mean(naive)


def test_labels_of_one_score_give_valid_sets():
    """Ties: all labels have the same score, also those to come."""
    x, labels = np.zeros((500, K)), np.zeros(500, int)
    sets = ldp.conformal(
        lambda x: softmax(x + np.array([9.0, 0, 0, 0])), (x, vault(labels)), 0.1, 1.0
    )
    assert sets.predict(x[:3]).tolist() == [[True, False, False, False]] * 3


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["classifier", "head", "trees", "probabilities", "logits"])
def test_models_of_classes_give_sets_with_the_receipts_of_both(kind):
    x, labels = examples(1500, np.random.default_rng(8))
    private = vault(labels)
    train, held = private.split(0.4)
    x_train = x[train.indices].astype(np.float32)
    if kind in ("probabilities", "logits"):
        last = "softmax" if kind == "probabilities" else None
        model = keras.Sequential([keras.Input((K,)), keras.layers.Dense(K, last)])
        logits = keras.losses.CategoricalCrossentropy(from_logits=last is None)
        model.compile(keras.optimizers.Adam(0.1), logits)
        noisy = train.randomize(ldp.RandomizedResponse(2.0, K))
        ldp.fit(model, x_train, noisy, targets="posterior", epochs=1, verbose=0)
    else:
        model = {
            "classifier": ldp.PrivateClassifier(2.0),
            "head": ldp.PrivateRidge(2.0, 1e-5),
            "trees": ldp.PrivateBoosting(2.0, max_trees=3),
        }[kind].fit(x_train, train)
    sets = ldp.conformal(model, (x[held.indices], held), 0.1, 1.0)
    new, true = examples(2000, np.random.default_rng(9))
    found = sets.predict(new)
    assert found.shape == (2000, K) and found.any(axis=1).all()
    assert is_within(found, true).mean() > 0.88 and found.sum() < 2000 * (K - 0.4)
    # Training and held-out labels compose in parallel.
    assert sets.guarantee().epsilon == pytest.approx(2.0, abs=1e-3)
    ids = {receipt.id for receipt in public_input(model).receipts}
    assert ids < {receipt.id for receipt in sets.receipts}
    if kind == "logits":
        assert sets.from_logits
        assert any(note.code == "initial-weights" for note in sets.guarantee().assumptions)


@pytest.mark.filterwarnings("ignore")
def test_models_of_numbers_give_intervals():
    rng = np.random.default_rng(10)
    x = rng.uniform(-1, 1, (1500, 3)).astype(np.float32)
    y = np.clip(3.0 + 2.0 * x[:, 0] + 0.3 * rng.normal(size=1500), 0.0, 6.0)
    train, held = vault(y, kind=Numbers(0, 6)).split(0.4)
    dense = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    door = ldp.PrivateRegressor(4.0, method="head").fit(x[train.indices], train)
    for model in (door, ldp.PrivateRidge(4.0, 1e-5).fit(x[train.indices], train), dense):
        found = ldp.conformal(model, (x[held.indices], held), 0.1, 1.0)
        ends = found.predict(x)
        assert ends.shape == (1500, 2) and is_within(ends, y).mean() > 0.88
        assert found.label_range == (0.0, 6.0)
    with pytest.raises(ValueError, match="expected a regressor for numbers"):
        classes = ldp.PrivateRidge(1.0, 1e-5).fit(x, vault((y > 3).astype(int), num_classes=2))
        ldp.conformal(classes, (x[held.indices], held), 0.1, 1.0)


@pytest.mark.parametrize("outputs", [1, 2])
def test_two_classes_by_one_logit_or_two(outputs):
    rng = np.random.default_rng(11)
    labels = rng.integers(0, 2, 1000)
    x = (3.0 * labels + rng.normal(size=1000))[:, np.newaxis] - 1.5
    logits = {1: lambda x: 3.0 * x, 2: lambda x: np.hstack([0.0 * x, 3.0 * x])}[outputs]
    sets = ldp.conformal(logits, (x, vault(labels, num_classes=2)), 0.05, 2.0)
    found = sets.predict(x)
    assert sets.from_logits and found.shape == (1000, 2)
    assert 0.94 < is_within(found, labels).mean() and found.sum() < 1300


class TestLabelsThatTheModelHasLearntFrom:
    @pytest.fixture
    def both(self):
        x, labels = examples(1200, np.random.default_rng(12))
        return x, vault(labels)

    @pytest.mark.filterwarnings("ignore")
    def test_a_model_of_the_whole_vault_is_refused_before_a_charge(self, both):
        x, private = both
        train, held = private.split(0.5)
        rows = (x[held.indices], held)
        model = ldp.PrivateRidge(1.0, 1e-5).fit(x, private)
        before = private.guarantee().epsilon
        with pytest.raises(ValueError, match="has not learnt from the held-out labels"):
            ldp.conformal(model, rows, 0.1, 1.0)
        with pytest.raises(ValueError, match="has not learnt from"):  # from some of them
            ldp.conformal(model, (x[train.indices], train), 0.1, 1.0)
        assert private.guarantee().epsilon == before
        other = ldp.PrivateRidge(1.0, 1e-5).fit(x[train.indices], train)
        assert ldp.conformal(other, rows, 0.1, 1.0).alpha == 0.1

    @pytest.mark.filterwarnings("ignore")
    def test_features_of_such_a_model_are_refused_too(self, both):
        x, private = both
        prior = private.release(ldp.mechanisms.HistogramMechanism(0.5, K))
        features = public_input(prior).with_value(x)
        with pytest.raises(ValueError, match="has not learnt from"):
            ldp.conformal(MODELS["the law"], (features, private), 0.1, 1.0)

    @pytest.mark.filterwarnings("ignore")
    def test_another_draw_of_the_labels_is_refused(self, both):
        x, private = both
        train, held = private.split(0.5)
        channel = ldp.RandomizedResponse(2.0, K)
        first, second = held.randomize(channel), held.randomize(channel)
        trees = ldp.PrivateBoosting(max_trees=2)
        with pytest.raises(ValueError, match="has not learnt from"):
            ldp.conformal(trees.fit(x[held.indices], first), (x[held.indices], second), 0.3)
        trees.fit(x[train.indices], train.randomize(channel))
        sets = ldp.conformal(trees, (x[held.indices], second), 0.3)
        assert sets.guarantee().epsilon == 2.0


def test_a_named_threshold_is_released_once_and_a_vault_without_budget_refuses():
    x, labels = examples(400, np.random.default_rng(13))
    private = vault(labels, epsilon=1.0)
    found = [
        ldp.conformal(MODELS["the law"], (x, private), 0.2, 1.0, key="sets").threshold
        for _ in range(2)
    ]
    assert found[0] == found[1] and private.guarantee().epsilon == 1.0
    with pytest.raises(ldp.BudgetExceededError):
        ldp.conformal(MODELS["the law"], (x, private), 0.2, 1.0)


def test_a_table_of_outputs_and_classes_is_not_needed_for_a_refusal():
    """The outputs are more than the classes, so the table would take over 20 GB."""
    k, n = 50_000, 4
    channel = ldp.mechanisms.ProjectiveGeometryResponse(2.0, k)
    noisy = vault(np.arange(n), num_classes=k).randomize(channel)
    with pytest.raises(ValueError, match=r"noisy labels for alpha=0\.1, got 4"):
        ldp.conformal(lambda x: np.full((n, k), 1.0 / k), (np.zeros(n), noisy), 0.1)


def test_a_model_with_the_classes_in_another_order_is_refused():
    """scikit-learn sorts them; the sets would be large, and their columns other classes."""
    x = np.linspace(-1.0, 1.0, 400)[:, np.newaxis]
    words = np.where(x[:, 0] > 0, "yes", "no")
    model = LogisticRegression().fit(x, words)
    private = vault(words.tolist(), kind=Classes(["yes", "no"]))
    with pytest.raises(ValueError, match=r"\['yes', 'no'\], in the order of the labels, got \['no"):
        ldp.conformal(model, (x, private), 0.2, 1.0)
    noisy = private.randomize(ldp.RandomizedResponse(5.0, 2))
    with pytest.raises(ValueError, match="in the order of the labels"):
        ldp.conformal(model, (x, noisy), 0.2)
    same = vault(words.tolist(), kind=Classes(["no", "yes"]))
    sets = ldp.conformal(model, (x, same), 0.2, 1.0).predict(x[[0, -1]])
    assert sets.tolist() == [[True, False], [False, True]]
