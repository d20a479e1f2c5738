"""``PrivateBoosting``: cost, channels, kinds of labels, Keras model and refusals."""

from __future__ import annotations

import pickle
import sys

import keras
import numpy as np
import pytest
import tensorflow as tf
from scipy import sparse
from sklearn.base import clone

import tf_labeldp.keras_layers  # noqa: F401
from tf_labeldp import (
    ALIBI,
    LabelRandomizer,
    NoisyLabels,
    PrivacyBudget,
    PrivateBoosting,
    PrivateLabels,
    RandomizedResponse,
    RRWithPrior,
    guarantee,
)
from tf_labeldp.accounting import BudgetExceededError, public_input
from tf_labeldp.boosting._targets import TableLabels
from tf_labeldp.mechanisms import LaplaceMechanism
from tf_labeldp.vault import LabelKind, Numbers, Rows

pytestmark = pytest.mark.usefixtures("fits_apart")
N = 1500
RNG = np.random.default_rng(0)
AGE = RNG.uniform(18, 90, N)
AGE[::50] = np.nan
JOB = RNG.choice(["a", "b", "c"], N)
TABLE = {"age": AGE, "job": JOB, "hours": RNG.integers(0, 60, N).astype(float)}
# Depends on an interaction, which a linear model of the columns misses.
BINARY = ((np.nan_to_num(AGE, nan=20.0) > 54) ^ (JOB == "b")).astype(int)
THREE = np.where(TABLE["hours"] > 40, 2, BINARY)
COUNTS = RNG.poisson(np.where(BINARY == 1, 3.0, 0.5)).clip(0, 8).astype(float)
KINDS = {
    "binary": (BINARY, {"num_classes": 2}),
    "classes": (THREE, {"num_classes": 3}),
    "numbers": (COUNTS, {"low": 0.0, "high": 8.0}),
    "counts": (COUNTS, {"low": 0.0, "high": 8.0, "loss": "poisson"}),
}
EPSILON = 4.0


def fitted(labels=BINARY, epsilon=EPSILON, **arguments):
    model = PrivateBoosting(
        epsilon, max_trees=60, insecure_seed=0, **({"num_classes": 2} | arguments)
    )
    return model.fit(TABLE, labels)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_it_learns_an_interaction_and_exports_the_same_predictions(kind, tmp_path):
    labels, arguments = KINDS[kind]
    model = PrivateBoosting(EPSILON, max_trees=60, insecure_seed=0, **arguments)
    model.fit(TABLE, labels)
    assert model.gain_ > 5 * model.gain_stddev_ > 0
    assert model.guarantee().epsilon == pytest.approx(EPSILON, rel=1e-9)
    if kind in ("numbers", "counts"):
        expected = np.where(BINARY == 1, 3.0, 0.5)
        outputs = model.predict(TABLE)
        # A constant would have 1.25^2; noise of the labels and few examples leave a fifth of it.
        assert np.mean((outputs - expected) ** 2) < 0.2 * expected.var()
        assert abs(outputs.mean() - COUNTS.mean()) < 0.2
        assert outputs.min() >= 0.0 and outputs.max() <= 8.0
        outputs = outputs[:, np.newaxis]
    else:
        outputs = model.predict_proba(TABLE)
        assert model.score(TABLE, labels) > 0.9
        assert outputs.sum(axis=1) == pytest.approx(1.0)
        assert outputs.mean(axis=0) == pytest.approx(np.bincount(labels) / N, abs=0.05)
    model.to_keras().save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    ensembles = [layer for layer in loaded.layers if layer.name.startswith("tree_ensemble")]
    assert sum(layer.num_trees for layer in ensembles) == model.num_trees_
    rows = {name: tf.constant(column[:, np.newaxis].tolist()) for name, column in TABLE.items()}
    assert loaded.predict(rows, verbose=0) == pytest.approx(outputs, rel=1e-5, abs=1e-6)
    assert guarantee(loaded).epsilon == pytest.approx(EPSILON, rel=1e-9)


def test_matrices_with_missing_numbers_and_sparse_rows():
    x = np.stack([AGE, TABLE["hours"], BINARY + 0.0], axis=1)
    model = PrivateBoosting(EPSILON, num_classes=2, max_trees=20)
    model.fit(x, BINARY)
    assert model.score(x, BINARY) > 0.99 and model.n_features_in_ == 3
    assert model.to_keras().predict(x, verbose=0) == pytest.approx(
        model.predict_proba(x), rel=1e-5, abs=1e-6
    )
    rows = sparse.csr_matrix(np.nan_to_num(x))
    assert clone(model).fit(rows, BINARY).score(rows, BINARY) > 0.99


@pytest.mark.slow
def test_every_channel_that_is_known():
    """Priors by example, noisy rows of ALIBI, and one draw for two models."""
    vault = PrivateLabels(THREE, 3, budget=PrivacyBudget(40.0, 1e-5))
    priors = np.random.default_rng(1).dirichlet(np.ones(3), N)
    draws = [
        vault.randomize(RandomizedResponse(EPSILON, 3)),
        vault.randomize(RRWithPrior(EPSILON, 3), priors=priors),
        vault.randomize(ALIBI(EPSILON, num_classes=3)),
    ]
    spent = vault.guarantee().epsilon
    for noisy in draws:
        model = PrivateBoosting(max_trees=60).fit(TABLE, noisy)
        assert model.score(TABLE, THREE) > 0.85
        assert model.guarantee().epsilon == pytest.approx(EPSILON, rel=1e-9)
        assert model.noisy_labels_ is noisy
    assert vault.guarantee().epsilon == spent
    part = vault.randomize(RandomizedResponse(EPSILON, 3), indices=np.arange(0, N, 2))
    assert PrivateBoosting(max_trees=60).fit(TABLE, part).score(TABLE, THREE) > 0.8


def test_noisy_labels_from_a_file(tmp_path):
    vault = PrivateLabels(BINARY, num_classes=2, budget=PrivacyBudget(9.0))
    noisy = vault.randomize(RandomizedResponse(EPSILON, 2))
    noisy.save(tmp_path / "noisy")
    model = PrivateBoosting(max_trees=60)
    model.fit(TABLE, NoisyLabels.load(tmp_path / "noisy"))
    assert model.score(TABLE, BINARY) > 0.9
    with pytest.raises(ValueError, match="noisy labels with receipts"):
        model.fit(TABLE, NoisyLabels(noisy.values, noisy.indices, noisy.mechanism))


@pytest.mark.holds("boosting.PrivateBoosting")
def test_a_vault_is_charged_once_and_a_named_draw_is_read_again(tmp_path):
    def vault():
        return PrivateLabels(BINARY, 2, budget=PrivacyBudget(EPSILON), store=tmp_path / "store")

    labels = vault()
    model = PrivateBoosting(EPSILON, max_trees=20, key="trees")
    first = model.fit(TABLE, labels).predict_proba(TABLE)
    with pytest.raises(BudgetExceededError):
        PrivateBoosting(1.0).fit(TABLE, labels)
    # A new process reads the draw.
    again = clone(model).fit(TABLE, vault())
    assert again.predict_proba(TABLE) == pytest.approx(first)
    assert vault().guarantee().epsilon == EPSILON


def test_small_budgets_are_refused_before_the_draw_and_noise_is_named_after_it():
    labels = PrivateLabels(BINARY, 2, budget=PrivacyBudget(5.0))
    with pytest.raises(ValueError, match=r"worth at least 20 true ones, got 1500 labels at eps"):
        PrivateBoosting(0.1).fit(TABLE, labels)
    assert labels.guarantee().epsilon == 0.0
    coins = np.random.default_rng(5).integers(0, 2, N)
    with pytest.warns(UserWarning, match="learnt hardly more than noise"):
        model = fitted(coins, epsilon=1.0)
    # Probabilities stay near the class shares.
    assert np.abs(model.predict_proba(TABLE)[:, 1] - coins.mean()).max() < 0.2


@pytest.mark.slow
def test_weights_of_examples_and_classes():
    """Examples of weight zero do not count; class weights move probabilities by Bayes' rule."""
    flipped = np.where(JOB == "c", 1 - BINARY, BINARY)
    model = PrivateBoosting(EPSILON, num_classes=2, max_trees=60, insecure_seed=0, seed=3)
    weighted = clone(model).fit(TABLE, flipped, sample_weight=(JOB != "c") + 0.0)
    # The statement names who vouches for the weights.
    assert "[public-sample-weights]" in str(weighted.guarantee())
    kept = {name: column[JOB != "c"] for name, column in TABLE.items()}
    assert weighted.score(kept, BINARY[JOB != "c"]) > 0.9
    rare = (BINARY == 1) & (TABLE["hours"] > 45)
    plain = clone(model).fit(TABLE, rare.astype(int))
    balanced = clone(model).set_params(class_weight="balanced").fit(TABLE, rare.astype(int))
    doubled = clone(model).set_params(class_weight={1: 2.0}).fit(TABLE, rare.astype(int))
    odds = [m.predict_proba(TABLE) for m in (plain, doubled, balanced)]
    odds = [p[:, 1] / p[:, 0] for p in odds]
    assert odds[1] == pytest.approx(2.0 * odds[0], rel=1e-6)
    share = rare.mean()
    assert np.median(odds[2] / odds[0]) == pytest.approx((1 - share) / share, rel=0.3)
    assert balanced.guarantee().epsilon == pytest.approx(EPSILON, rel=1e-9)


BAD_INPUT = {
    "threads": ({"n_jobs": 0}, TABLE, BINARY, {}, "n_jobs"),
    "monotone texts": (
        {"monotonic_cst": {"job": 1}},
        TABLE,
        BINARY,
        {},
        r"by columns of numbers, got 'job': 1. Choose from 'age', 'hours'",
    ),
    "monotone sign": ({"monotonic_cst": {"age": 2}}, TABLE, BINARY, {}, "of -1, 0 or 1"),
    "monotone classes": (
        {"num_classes": 3, "monotonic_cst": {"age": 1}},
        TABLE,
        THREE,
        {},
        "two classes or numbers with monotonic_cst, got 3 classes",
    ),
    "categorical": ({"categorical": ["town"]}, TABLE, BINARY, {}, "the table lacks: 'town'"),
    "rows": (
        {},
        {k: v[:-1] for k, v in TABLE.items()},
        BINARY,
        {},
        "got 1499 rows and 1500 labels",
    ),
    "weights": (
        {},
        TABLE,
        BINARY,
        {"sample_weight": -np.ones(N)},
        "sample_weight of finite numbers, at least zero",
    ),
    "class weights": ({"class_weight": {5: 2.0}}, TABLE, BINARY, {}, "class_weight for"),
    "constant": ({}, {"age": np.ones(N)}, BINARY, {}, "constant columns alone"),
    "range": (
        {"num_classes": None, "low": -1.0, "high": 8.0, "loss": "poisson"},
        TABLE,
        COUNTS,
        {},
        "labels of zero or more",
    ),
    "weights of numbers": (
        {"num_classes": None, "low": 0.0, "high": 8.0, "class_weight": "balanced"},
        TABLE,
        COUNTS,
        {},
        "class_weight is for classes",
    ),
}


@pytest.mark.parametrize("case", BAD_INPUT)
def test_bad_input_is_refused_before_the_draw(case):
    arguments, table, labels, options, message = BAD_INPUT[case]
    arguments = {"num_classes": 2} | arguments
    kind = {name: arguments[name] for name in ("num_classes", "low", "high") if name in arguments}
    vault = PrivateLabels(labels, LabelKind.of(**kind), budget=PrivacyBudget(EPSILON))
    with pytest.raises(ValueError, match=message):
        PrivateBoosting(EPSILON, **arguments).fit(table, vault, **options)
    assert vault.guarantee().epsilon == 0.0


def test_rows_of_labels_are_named():
    vault = PrivateLabels(np.eye(3, dtype=int)[THREE], Rows(3), budget=PrivacyBudget(30.0))
    with pytest.raises(ValueError, match="one model per column"):
        PrivateBoosting(EPSILON).fit(TABLE, vault)
    noisy = vault.randomize(RandomizedResponse(1.0, 2))
    with pytest.raises(ValueError, match="one model per column"):
        PrivateBoosting().fit(TABLE, noisy)


@pytest.fixture
def no_lightgbm(monkeypatch):
    """LightGBM is installed, but the system lacks OpenMP."""

    class Finder:
        def find_spec(self, name, *_):
            if name == "lightgbm":
                raise OSError("libgomp.so.1: cannot open shared object file")

    for name in [name for name in sys.modules if name.partition(".")[0] == "lightgbm"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "meta_path", [Finder(), *sys.meta_path])


@pytest.mark.parametrize("is_sparse", [False, True])
def test_a_fitted_model_predicts_where_lightgbm_cannot_be_loaded(is_sparse, request):
    x = np.stack([AGE, TABLE["hours"]], axis=1)
    x = sparse.csr_matrix(np.nan_to_num(x)) if is_sparse else TABLE
    model = PrivateBoosting(EPSILON, num_classes=3, max_trees=10).fit(x, THREE)
    expected, pickled = model.predict_proba(x), pickle.dumps(model)
    request.getfixturevalue("no_lightgbm")
    loaded = pickle.loads(pickled)
    assert loaded.predict_proba(x) == pytest.approx(expected, rel=1e-9)
    assert loaded.guarantee().epsilon == pytest.approx(EPSILON)
    labels = PrivateLabels(BINARY, 2, budget=PrivacyBudget(EPSILON))
    with pytest.raises(ImportError, match=r"cannot open shared .* apt-get install libgomp1"):
        PrivateBoosting(EPSILON).fit(TABLE, labels)
    assert labels.guarantee().epsilon == 0.0


def test_boosters_importances_and_log_probabilities():
    """The boosters, weighted, are the scores, as a reader of boosters such as SHAP sees them."""
    model = fitted()
    shares = model.feature_importances_
    assert shares.shape == (3,) and shares.sum() == pytest.approx(1.0)
    assert shares[:2].min() > 5 * shares[2]  # the hours do not matter
    assert np.exp(model.predict_log_proba(TABLE)) == pytest.approx(model.predict_proba(TABLE))
    rows = model.coder_.transform(TABLE)
    total = sum(
        weight * np.mean([booster.predict(rows, raw_score=True) for booster in boosters], axis=0)
        for weight, boosters in zip(model.shape_weights_, model.boosters_, strict=True)
    )
    p = model.predict_proba(TABLE)
    constant = np.log(p[:, 1] / p[:, 0]) - total
    assert np.ptp(constant) < 1e-9


def test_categories_of_numbers_and_monotone_scores():
    codes = RNG.integers(0, 8, N)
    labels = np.isin(codes, [0, 3, 5]).astype(int)
    x = np.stack([codes, RNG.normal(size=N)], axis=1)
    model = PrivateBoosting(EPSILON, num_classes=2, categorical=[0], max_trees=20, insecure_seed=0)
    model.fit(x, labels)
    assert model.coder_.categorical_.tolist() == [True, False] and model.score(x, labels) > 0.99
    ages = np.linspace(18.0, 90.0, 200)
    table = {"age": ages, "job": np.repeat("a", 200), "hours": np.full(200, 30.0)}
    wavy = (np.sin(np.nan_to_num(AGE) / 8.0) > 0.0).astype(int)
    for constraints, is_monotone in ((None, False), ({"age": 1}, True)):
        model = PrivateBoosting(
            8.0, num_classes=2, monotonic_cst=constraints, insecure_seed=0, max_trees=60
        )
        steps = np.diff(model.fit(TABLE, wavy).predict_proba(table)[:, 1])
        assert bool(np.all(steps >= 0.0)) == is_monotone


CHANNEL = RandomizedResponse(1.0, 3)


def loss_of(values, mechanism, loss="squared_error"):
    noisy = NoisyLabels(np.asarray(values), np.arange(len(values)), mechanism)
    return TableLabels(noisy, noisy.kind, slice(None), None).target(loss, None).loss


LOSSES = {
    "classes": loss_of([0, 1, 2], CHANNEL),
    "two classes": loss_of([0, 1], RandomizedResponse(1.0, 2)),
    "numbers": loss_of([0.3, -2.0], LaplaceMechanism(1.0, -2.0, 2.0, clip=False)),
    "counts": loss_of([4.0, -1.0], LaplaceMechanism(1.0, 0.0, 10.0, clip=False), "poisson"),
}


@pytest.mark.parametrize("name", LOSSES)
def test_gradients_are_those_of_the_loss(name):
    loss = LOSSES[name]
    scores = np.resize(np.random.default_rng(2).normal(size=12), loss.start.shape)
    gradient, hessian = loss.derivatives(scores)
    for column in range(scores.shape[1]):
        step = np.zeros(scores.shape)
        step[:, column] = 1e-6
        numeric = (loss.values(scores + step) - loss.values(scores - step)) / 2e-6
        assert gradient[:, column] == pytest.approx(numeric, abs=1e-7)
    assert np.all(hessian > 0.0)


@pytest.mark.parametrize("name", ["classes", "two classes"])
def test_the_hessian_is_the_variance_of_the_gradient(name):
    """Fisher's information: the mean squared gradient over the noisy labels of one example."""
    loss = LOSSES[name]
    scores = np.tile(np.random.default_rng(3).normal(size=(1, loss.start.shape[1])), (3, 1))
    scores = scores[: len(loss.likelihoods)]
    gradient, hessian = loss.derivatives(scores)
    p = np.exp(scores[0]) if name == "classes" else np.array([1.0, np.exp(scores[0, 0])])
    q = p / p.sum() @ loss.channel
    assert q @ np.square(gradient) == pytest.approx(hessian[0], rel=1e-9)
    assert q @ gradient == pytest.approx(0.0, abs=1e-12)


def test_numbers_drawn_by_a_label_randomizer_are_used_as_they_are():
    vault = PrivateLabels(COUNTS, Numbers(0.0, 8.0), budget=PrivacyBudget(EPSILON))
    noisy = vault.randomize(LabelRandomizer(EPSILON))
    model = PrivateBoosting(loss="poisson", max_trees=60)
    assert model.fit(TABLE, noisy).guarantee().epsilon == pytest.approx(EPSILON, rel=1e-9)
    assert {receipt.id for receipt in model.receipts_} == {r.id for r in noisy.receipts}


def test_features_without_a_split_are_refused_before_the_draw():
    nine = (np.arange(N) < 9) + 0.0
    rare = np.zeros((N, 2))
    rare[:4] = 1.0
    infinite = np.where(rare > 0, np.inf, 0.0)
    cases = [
        ({}, rare, {}, "at least 60 examples differ"),
        ({"seed": -1}, TABLE, {}, "seed"),
        ({"class_weight": {1: np.inf}}, TABLE, {}, "class_weight must"),
        (
            {},
            TABLE,
            {"sample_weight": nine},
            "got 9 labels",
        ),
        ({}, sparse.csr_matrix(rare), {}, "at least 60 examples differ"),
        ({}, sparse.csr_matrix(infinite), {}, "finite features"),
    ]
    vault = PrivateLabels(BINARY, 2, budget=PrivacyBudget(EPSILON))
    for arguments, table, options, message in cases:
        with pytest.raises(ValueError, match=message):
            PrivateBoosting(EPSILON, **arguments).fit(table, vault, **options)
        assert vault.guarantee().epsilon == 0.0
    few = vault.randomize(RandomizedResponse(EPSILON, 2), indices=np.arange(3))
    with pytest.raises(ValueError, match="at least 20 noisy labels, got 3"):
        PrivateBoosting().fit(TABLE, few)


def test_equal_numbers_empty_columns_and_few_weights():
    model = PrivateBoosting(8.0, low=0.0, high=8.0, max_trees=5)
    model.fit(TABLE, np.full(N, 2.0))
    assert model.predict(TABLE) == pytest.approx(np.full(N, 2.0), abs=0.2)
    matrix = np.full((N, 3), np.nan)
    matrix[:, 0], matrix[0, 1] = AGE, 1.0
    model = PrivateBoosting(EPSILON, num_classes=2, max_trees=5)
    labels = (np.nan_to_num(AGE) > 54).astype(int)
    model.fit(matrix, labels)
    assert model.score(matrix, labels) > 0.9
    # LightGBM refuses folds without weights.
    weights = (np.arange(N) % 50 == 0).astype(float)
    assert clone(model).fit(matrix, labels, sample_weight=weights).num_trees_ > 0


def test_a_model_of_sparse_rows_names_dense_ones():
    rows = sparse.csr_matrix(np.nan_to_num(AGE)[:, np.newaxis])
    model = PrivateBoosting(EPSILON, num_classes=2, max_trees=5).fit(rows, BINARY)
    with pytest.raises(TypeError, match=r"expected a sparse matrix, as in fit, got ndarray"):
        model.predict(rows.toarray())


def test_stored_numbers_are_read_again_without_a_key(tmp_path):
    first, again = (
        PrivateBoosting(EPSILON, max_trees=5).fit(
            TABLE,
            PrivateLabels(
                COUNTS, Numbers(0.0, 8.0), budget=PrivacyBudget(EPSILON), store=tmp_path / "store"
            ),
        )
        for _ in range(2)
    )
    assert again.predict(TABLE) == pytest.approx(first.predict(TABLE))
    assert again.guarantee().epsilon == pytest.approx(EPSILON)


def test_public_inputs_over_the_budget_are_not_counted():
    others = PrivateLabels(BINARY, 2, budget=PrivacyBudget(EPSILON))
    drawn = public_input(others.randomize(RandomizedResponse(1.0, 2)))
    vault = PrivateLabels(BINARY, 2, budget=PrivacyBudget(EPSILON))
    model = PrivateBoosting(EPSILON - 0.5)
    with pytest.raises(BudgetExceededError):
        model.fit(TABLE, vault, sample_weight=drawn.with_value(np.ones(N)))
    assert vault.guarantee().epsilon == 0.0


def test_lightgbm_bins_the_rows_once_for_all_folds(monkeypatch):
    if not PrivateBoosting.is_available():
        pytest.skip("LightGBM can't be loaded")
    import lightgbm

    binned = []

    class Counted(lightgbm.Dataset):
        def __init__(self, data, *args, **kwargs):
            if data is not None:
                binned.append(len(data))
            super().__init__(data, *args, **kwargs)

    monkeypatch.setattr(lightgbm, "Dataset", Counted)
    rng = np.random.default_rng(0)
    x = rng.normal(size=(600, 3))
    model = PrivateBoosting(4.0, num_classes=2, insecure_seed=0)
    model.fit(x, (x[:, 0] > 0.0).astype(int))
    assert binned == [600] and model.score(x, (x[:, 0] > 0.0).astype(int)) > 0.8
