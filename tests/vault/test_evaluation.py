"""Parts of a vault, metrics of predictions on private labels, and the choice among models."""

from __future__ import annotations

import dataclasses
import functools
import math

import keras
import numpy as np
import pytest
from sklearn.metrics import (
    average_precision_score,
    confusion_matrix,
    f1_score,
    precision_score,
    recall_score,
    roc_auc_score,
)
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from slow_cases import with_slow

import tf_labeldp as ldp
from tf_labeldp.accounting import BudgetExceededError, PrivacyBudget, public_input
from tf_labeldp.heads import PrivateRidge
from tf_labeldp.mechanisms import HistogramMechanism, LaplaceMechanism, RandomizedResponse
from tf_labeldp.plugins import DrawSettingsError
from tf_labeldp.vault import LabelRandomizer, Numbers, PrivateLabels, Rows, select

RNG = np.random.default_rng(5)
N = 6000
LABELS = RNG.integers(0, 3, N)
ROWS = RNG.dirichlet(np.ones(3), N) + 0.5 * np.eye(3)[LABELS]
ROWS /= ROWS.sum(axis=1, keepdims=True)
BINARY = (LABELS > 0).astype(int)
SCORES = 1.0 - ROWS[:, 0]
NUMBERS = RNG.uniform(0.0, 10.0, N)
GUESSES = NUMBERS + RNG.normal(0.0, 1.0, N)


def vault(labels=LABELS, epsilon=1.0, delta=0.0, **arguments):
    if not arguments.keys() & {"kind", "num_classes"}:
        arguments["num_classes"] = int(np.max(labels)) + 1
    budget = PrivacyBudget(epsilon, delta)
    return PrivateLabels(labels, budget=budget, **{"insecure_seed": 7, **arguments})


class TestSplit:
    def test_parts_are_disjoint_and_compose_in_parallel(self):
        labels = vault(insecure_seed=None)
        train, held_out = labels.split(0.25, seed=3)
        assert len(train) == 4500 and len(held_out) == 1500
        both = np.concatenate([train.indices, held_out.indices])
        assert np.array_equal(np.sort(both), np.arange(N))
        train.randomize(RandomizedResponse(1.0, 3))
        assert labels.guarantee().epsilon == 1.0
        held_out.release(HistogramMechanism(1.0, 3))
        assert labels.guarantee().epsilon == held_out.guarantee().epsilon == 1.0
        for part in (train, held_out):
            with pytest.raises(BudgetExceededError):
                part.randomize(RandomizedResponse(0.1, 3))
        assert [use.examples for use in labels.history()] == [4500, 1500]

    def test_a_part_numbers_its_labels_from_zero(self):
        labels = vault(epsilon=80.0)
        train, held_out = labels.split(np.arange(0, N, 3))
        for part in (train, held_out):
            noisy = part.randomize(RandomizedResponse(30.0, 3))  # at 30 none is flipped
            np.testing.assert_array_equal(noisy.indices, np.arange(len(part)))
            np.testing.assert_array_equal(noisy.values, LABELS[part.indices])
            some = part.randomize(
                RandomizedResponse(30.0, 3), indices=[5, 2, 9], key=f"of {len(part)}"
            )
            np.testing.assert_array_equal(some.indices, [5, 2, 9])
            np.testing.assert_array_equal(some.values, LABELS[part.indices][[5, 2, 9]])
            counts = part.release(HistogramMechanism(20.0, 3), key=f"counts of {len(part)}")
            assert np.abs(counts.values - np.bincount(LABELS[part.indices])).max() <= 2
        with pytest.raises(DrawSettingsError, match="indices"):
            held_out.randomize(RandomizedResponse(30.0, 3), indices=[5, 2, 9], key="of 4000")

    def test_parts_of_parts_and_masks(self):
        labels = vault()
        mask = np.arange(N) % 2 == 0
        rest, even = labels.split(mask)
        np.testing.assert_array_equal(even.indices, np.flatnonzero(mask))
        first, second = even.split(0.1)
        assert set(second.indices) < set(even.indices) and len(first) + len(second) == len(even)
        assert not set(first.indices) & set(rest.indices)
        np.testing.assert_array_equal(
            labels.split(0.1, seed=1)[1].indices, labels.split(0.1, seed=1)[1].indices
        )

    def test_heads_and_randomizers_take_a_part(self):
        features = np.eye(3)[LABELS] + RNG.normal(0, 0.1, (N, 3))
        labels = vault(epsilon=1.0, delta=1e-5)
        train, held_out = labels.split(0.5)
        head = PrivateRidge(1.0, 1e-5).fit(features[train.indices], train)
        assert head.score(features, LABELS) > 0.95
        held_out.evaluate(head.predict_proba(features[held_out.indices]), "accuracy", 1.0)
        assert labels.guarantee().epsilon == pytest.approx(1.0, abs=1e-6)
        numbers = vault(NUMBERS, kind=Numbers(0.0, 10.0))
        noisy = numbers.split(0.5)[0].randomize(LabelRandomizer(1.0))
        assert noisy.values.shape == (3000,)
        with pytest.raises(ValueError, match="got 6000 rows and 3000 labels"):
            PrivateRidge(1.0, 1e-5).fit(features, vault(delta=1e-5).split(0.5)[0])

    def test_training_takes_a_part(self):
        labels = vault(BINARY, epsilon=8.0, delta=1e-5)
        train, held_out = labels.split(0.5)
        x = ROWS.astype("float32")
        data = ldp.data.poisson_batches(x[train.indices], train, sampling_probability=0.1, steps=5)
        inputs = keras.Input((3,))
        model = ldp.LabelDPModel(inputs, keras.layers.Dense(1, "sigmoid")(inputs))
        model.compile(
            ldp.LabelDPOptimizer(
                keras.optimizers.Adam(0.1), l2_norm_clip=1.0, noise_multiplier=1.0
            ),
            "binary_crossentropy",
        )
        model.fit(data, epochs=2, verbose=0)
        assert {use.examples for use in labels.history()} == {3000}
        held_out.randomize(RandomizedResponse(8.0, 2))

    def test_a_store_finds_the_draws_of_parts_again(self, tmp_path, no_new_randomness):
        def drawn():
            labels = PrivateLabels(LABELS, 3, budget=PrivacyBudget(1.0), store=tmp_path / "private")
            train, held_out = labels.split(0.3)
            noisy = train.randomize(RandomizedResponse(1.0, 3), key="noisy").values
            return noisy, held_out.evaluate(ROWS[held_out.indices], "accuracy", 1.0, key="e").value

        first = drawn()
        no_new_randomness()
        second = drawn()
        np.testing.assert_array_equal(first[0], second[0])
        assert first[1] == second[1]

    @pytest.mark.parametrize("held_out", [1.0, [], list(range(N)), [N], [0, 0]])
    def test_bad_parts(self, held_out):
        with pytest.raises(ValueError, match=r"held_out|held out|indices"):
            vault().split(held_out)


GUESSED = ROWS.argmax(axis=1)
RARE = (RNG.random(N) < 0.08).astype(int)
CHANCES = 1.0 / (1.0 + np.exp(1.5 - RNG.normal(2.0 * RARE, 1.0).round(1)))  # with ties
FAST_METRICS = {"f1", "accuracy", "total"}
METRICS = {
    "f1": (RARE, CHANCES, f1_score(RARE, CHANCES > 0.5), {}),
    "precision": (RARE, CHANCES, precision_score(RARE, CHANCES > 0.5), {}),
    "recall": (RARE, CHANCES, recall_score(RARE, CHANCES > 0.5), {}),
    "average_precision": (RARE, CHANCES, average_precision_score(RARE, CHANCES), {}),
    "macro f1": (LABELS, ROWS, f1_score(LABELS, GUESSED, average="macro"), {}),
    "macro recall": (LABELS, GUESSED, recall_score(LABELS, GUESSED, average="macro"), {}),
    "macro auc": (LABELS, ROWS, roc_auc_score(LABELS, ROWS, multi_class="ovr"), {}),
    "accuracy": (LABELS, ROWS, np.mean(ROWS.argmax(axis=1) == LABELS), {}),
    "auc": (BINARY, SCORES, roc_auc_score(BINARY, SCORES), {}),
    "mse": (
        NUMBERS,
        GUESSES,
        np.mean((NUMBERS - GUESSES.clip(0, 10)) ** 2),
        {"kind": Numbers(0, 10)},
    ),
    "total": (NUMBERS, None, NUMBERS.sum(), {"kind": Numbers(0.0, 10.0)}),
}


@pytest.mark.parametrize("metric", with_slow(METRICS, METRICS.keys() - FAST_METRICS))
def test_standard_errors_and_intervals_are_true(metric):
    labels, predictions, truth, kind = METRICS[metric]
    runs = [
        vault(labels, insecure_seed=i, **kind).evaluate(predictions, metric.split()[-1], 0.5)
        for i in range(400)
    ]
    off = np.array([one.value for one in runs]) - truth
    error = np.mean([one.noise_stderr for one in runs])
    slack = 0.01 if metric == "average_precision" else 0.0  # of its bins
    assert abs(off.mean()) < 4 * error / 20 + slack
    assert np.std(off) == pytest.approx(error, rel=4 * np.sqrt(5 / 4 / 400))
    # Without the error of the sample, which does not vary here, intervals are those of the noise.
    alone = [dataclasses.replace(run, effective_examples=math.inf).interval() for run in runs]
    covered = np.mean([low - slack <= truth <= high + slack for low, high in alone])
    assert covered >= 0.95 - 4 * np.sqrt(0.95 * 0.05 / 400)
    for run, (low, high) in zip(runs, alone, strict=True):
        below, above = run.interval()
        assert run.bounds[0] <= below <= low and high <= above <= run.bounds[1]


def _rare(size, rng):
    labels = (rng.random(size) < 0.05).astype(int)
    return labels, 1.0 / (1.0 + np.exp(4.0 - 1.5 * rng.normal(1.5 * labels, 1.0)))


def _three(size, rng):
    labels = rng.choice(3, size, p=[0.7, 0.2, 0.1])
    rows = rng.dirichlet(np.full(3, 0.5), size) + 0.7 * np.eye(3)[labels]
    return labels, rows / rows.sum(axis=1, keepdims=True)


def _amounts(size, rng):
    guesses = rng.uniform(0.0, 8.0, size)
    return np.clip(guesses * rng.exponential(0.8, size), 0.0, 10.0), guesses


def _log_loss(labels, chances):
    rows = chances if chances.ndim == 2 else np.stack([1.0 - chances, chances], axis=1)
    return np.minimum(-np.log(rows[np.arange(labels.size), labels] + 1e-300), 5.0).mean()


def _brier(labels, chances):
    rows = chances if chances.ndim == 2 else np.stack([1.0 - chances, chances], axis=1)
    return np.square(rows - np.eye(rows.shape[1])[labels]).sum(axis=1).mean()


def _by_class(metric, labels, rows):
    codes = rows > 0.5 if rows.ndim == 1 else rows.argmax(axis=1)
    if metric == "accuracy":
        return np.mean(codes == labels)
    score = {"f1": f1_score, "precision": precision_score, "recall": recall_score}[metric]
    return score(labels, codes, average="macro" if rows.ndim == 2 else "binary")


FAST_POPULATIONS = {(_rare, "f1"), (_rare, "accuracy"), (_amounts, "mse")}
POPULATIONS = {
    **{(_rare, m): functools.partial(_by_class, m) for m in ("f1", "precision", "recall")},
    **{(_three, m): functools.partial(_by_class, m) for m in ("f1", "precision", "recall")},
    (_rare, "accuracy"): functools.partial(_by_class, "accuracy"),
    (_rare, "log_loss"): _log_loss,
    (_three, "log_loss"): _log_loss,
    (_three, "brier"): _brier,
    (_rare, "auc"): roc_auc_score,
    (_three, "auc"): functools.partial(roc_auc_score, multi_class="ovr"),
    (_rare, "average_precision"): average_precision_score,
    (_amounts, "mse"): lambda labels, guesses: np.square(labels - guesses).mean(),
    (_amounts, "mae"): lambda labels, guesses: np.abs(labels - guesses).mean(),
    (_amounts, "mean"): lambda labels, guesses: labels.mean(),
}


@pytest.mark.parametrize(
    ("population", "metric"),
    with_slow(POPULATIONS, POPULATIONS.keys() - FAST_POPULATIONS),
    ids=[f"{p.__name__[1:]}-{m}" for p, m in POPULATIONS],
)
@pytest.mark.filterwarnings("ignore:a budget of epsilon")
def test_intervals_cover_the_metric_of_the_population(population, metric):
    """New examples in each run: without the error of the sample they cover it in 5 to 70 %."""
    rng = np.random.default_rng(2000)  # not a seed of the noise
    truth = POPULATIONS[population, metric](*population(300_000, rng))
    kind = {"kind": Numbers(0.0, 10.0)} if population is _amounts else {}
    runs = []
    for i in range(200):
        labels, predictions = population(2000, rng)
        private = vault(labels, epsilon=3.0, insecure_seed=i, **kind)
        runs.append(private.evaluate(None if metric == "mean" else predictions, metric, 3.0))
    least = 0.95 - 4 * np.sqrt(0.95 * 0.05 / 200)
    ends = np.array([run.interval() for run in runs])
    assert np.mean((ends[:, 0] <= truth) & (truth <= ends[:, 1])) >= least
    assert np.all(ends[:, 0] >= runs[0].bounds[0]) and np.all(ends[:, 1] <= runs[0].bounds[1])
    of_noise = [dataclasses.replace(run, effective_examples=math.inf).interval() for run in runs]
    assert np.mean([low <= truth <= high for low, high in of_noise]) < least
    # The stated error is that of the values, or a bound on it.
    error = np.mean([run.standard_error for run in runs])
    assert np.std([run.value for run in runs]) < error * (1 + 4 / np.sqrt(400))
    for run in runs[:3]:
        assert run.standard_error == pytest.approx(
            math.hypot(run.noise_stderr, run.sampling_stderr)
        )


def test_intervals_of_high_scores_stay_within_the_range():
    """At an area of 0.995 and 30 positives, noise and sample alone would reach above one."""
    rng = np.random.default_rng(8)
    above = 0
    for i in range(50):
        labels = (np.arange(600) < 30).astype(int)
        chances = 1.0 / (1.0 + np.exp(-rng.normal(4.0 * labels, 1.0)))
        found = vault(labels, epsilon=2.0, insecure_seed=i).evaluate(chances, "auc", 2.0)
        low, high = found.interval()
        assert 0.5 < low < high <= 1.0 and low <= 0.9977
        above += found.value + 2 * found.standard_error > 1.0
    assert above > 25


def test_an_interval_without_noise_is_wilsons():
    from scipy import stats

    found = ldp.vault.Evaluation("accuracy", 0.95, 0.0, 40, effective_examples=40)
    for confidence in (0.5, 0.95, 0.999):
        expected = stats.binomtest(38, 40).proportion_ci(confidence, method="wilson")
        np.testing.assert_allclose(found.interval(confidence), expected, rtol=1e-9)


def test_intervals_of_laplace_noise_and_a_sample_are_wide_enough():
    """Their convolution, at any ratio of the two errors and any confidence."""
    rng = np.random.default_rng(3)
    size = 100_000
    noise, sample = rng.laplace(size=size) / np.sqrt(2.0), rng.normal(size=size)
    for ratio in (0.2, 1.0, 5.0):
        off = np.abs(ratio * noise + sample)
        for confidence in (0.5, 0.8, 0.95, 0.99):
            found = ldp.vault.Evaluation(
                "mean", 0.0, ratio, 1, bounds=(-1e6, 1e6), effective_examples=1e12
            )
            assert found.sampling_stderr == pytest.approx(1.0, rel=1e-6)
            low, high = found.interval(confidence)
            slack = 4 * np.sqrt(confidence * (1 - confidence) / size)
            assert np.mean(off <= 0.5 * (high - low)) >= confidence - slack


@pytest.mark.parametrize("metric", ["auc", "average_precision", "f1", "precision", "recall"])
def test_without_noise_metrics_of_rare_classes_are_those_of_scikit_learn(metric):
    truth = METRICS[metric][2] if metric != "auc" else roc_auc_score(RARE, CHANCES)
    found = vault(RARE, epsilon=500.0).evaluate(CHANCES, metric, 500.0)
    assert found.value == pytest.approx(truth, abs=0.002 if "average" in metric else 1e-4)
    assert found.noise_stderr < 1e-3 < found.sampling_stderr < 0.1


def test_one_release_gives_precision_recall_and_f1():
    found = vault(RARE, epsilon=300.0).evaluate(CHANCES, "f1", 300.0)
    (right,), (missed,), (predicted,) = (found.details[n] for n in ("right", "missed", "predicted"))
    assert right / predicted == pytest.approx(METRICS["precision"][2], abs=1e-3)
    assert right / (right + missed) == pytest.approx(METRICS["recall"][2], abs=1e-3)
    assert found.guarantee().epsilon == 300.0


def test_the_area_needs_two_counts_and_is_three_times_better_than_bins():
    """Two sums of noise 1/epsilon: the error of 64 bins, each with that noise, is 3.3 times it."""
    found = vault(BINARY).evaluate(SCORES, "auc", 1.0)
    p = BINARY.mean()
    of_bins = math.sqrt(2.0) * math.sqrt(64 / 12) / (N * p * (1 - p))
    assert 2.5 < of_bins / found.noise_stderr < 3.5


def test_classes_that_are_never_predicted_or_drowned_in_noise():
    never = np.zeros(N)
    for metric in ("f1", "precision", "recall"):
        found = vault(RARE).evaluate(never, metric, 1.0)
        assert found.value == 0.0 and found.noise_stderr == 0.0
    for metric in ("f1", "recall", "average_precision", "auc"):
        found = vault((np.arange(N) == 3).astype(int)).evaluate(never, metric, 0.1)
        unknown = metric not in ("f1", "recall")
        assert np.isnan(found.value) == unknown and np.isinf(found.noise_stderr) == unknown
        assert not unknown or found.interval() == (0.0, 1.0)
    one = vault(RARE).evaluate(np.ones(N), "recall", 1.0)
    assert one.value == pytest.approx(1.0) and one.noise_stderr == pytest.approx(0.0, abs=1e-9)


def test_confusion_matrix_and_calibration():
    found = vault(epsilon=4.0).evaluate(ROWS, "confusion_matrix", 4.0)
    exact = confusion_matrix(LABELS, ROWS.argmax(axis=1))
    assert np.abs(found.value - exact).max() < 12 * found.noise_stderr.max()
    codes = np.zeros(N, int)  # one class alone is predicted: the others are known to be empty
    never = vault().evaluate(codes, "confusion_matrix", 1.0)
    assert np.all(never.value[:, 1:] == 0.0) and np.all(never.noise_stderr[:, 1:] == 0.0)

    low, high = found.interval()
    assert np.all((low >= 0.0) & (low <= exact) & (exact <= high) & (high <= exact.sum(axis=0)))
    assert np.all(never.interval()[1][:, 1:] == 0.0)
    # The count of a cell among those that were predicted so is binomial.
    share = exact / exact.sum(axis=0)
    expected = np.sqrt(exact * (1.0 - share))
    np.testing.assert_allclose(found.sampling_stderr, expected, rtol=0.1)

    for labels, predictions, sure in ((LABELS, ROWS, ROWS.max(axis=1)), (BINARY, SCORES, SCORES)):
        found = vault(labels, epsilon=4.0).evaluate(predictions, "calibration", 4.0)
        right = LABELS == ROWS.argmax(axis=1) if labels is LABELS else BINARY == 1
        bins = np.minimum((10 * sure).astype(int), 9)
        for at in np.unique(bins):
            share = right[bins == at].mean()
            assert abs(found.value[at] - share) < 12 * found.noise_stderr[at]
            assert found.details["predicted"][at] == pytest.approx(sure[bins == at].mean())
            assert found.details["examples"][at] == np.sum(bins == at)
        low, high = found.interval()
        empty = found.details["examples"] == 0
        assert np.all(low[empty] == 0.0) and np.all(high[empty] == 1.0)
        assert np.all((0.0 <= low) & (low < high) & (high <= 1.0))


@pytest.mark.holds("vault.PrivateLabels.evaluate")
def test_an_evaluation_is_charged():
    labels = vault(insecure_seed=None)
    found = labels.evaluate(ROWS, "brier", 0.4)
    assert found.guarantee().epsilon == labels.guarantee().epsilon == 0.4
    assert found.num_examples == N and "95 %" in str(found)
    with pytest.raises(BudgetExceededError):
        labels.evaluate(ROWS, "log_loss", 0.7)
    assert labels.guarantee().epsilon == 0.4


@pytest.mark.parametrize(
    ("labels", "predictions", "metric", "kind", "message"),
    [
        (LABELS, ROWS[:, :2], "accuracy", {}, "shape"),
        (LABELS, ROWS[:-1], "accuracy", {}, "5999 predictions and 6000 labels"),
        (LABELS, ROWS, "average_precision", {}, "two classes, these labels have 3. Use 'f1'"),
        (LABELS, np.log(ROWS), "auc", {}, "softmax"),
        (NUMBERS, GUESSES, "f1", {"kind": Numbers(0, 10)}, "metric must be"),
        (LABELS, np.log(ROWS), "log_loss", {}, "softmax"),
        (NUMBERS, None, "mse", {"kind": Numbers(0, 10)}, "predictions"),
        (NUMBERS, GUESSES, "accuracy", {"kind": Numbers(0, 10)}, "metric must be"),
    ],
)
def test_bad_evaluations_charge_nothing(labels, predictions, metric, kind, message):
    private = vault(labels, **kind)
    with pytest.raises((ValueError, TypeError), match=message):
        private.evaluate(predictions, metric, 0.5)
    assert not private.history()


def test_rows_of_labels_are_refused():
    rows = vault(np.eye(3, dtype=int)[LABELS], kind=Rows(3))
    with pytest.raises(TypeError, match="each column"):
        rows.evaluate(ROWS, "accuracy", 0.5)


class TestNoisyLabels:
    @pytest.mark.slow
    def test_estimates_are_unbiased_with_true_errors(self):
        truths = {"accuracy": METRICS["accuracy"][2]}
        truths["brier"] = np.square(ROWS - np.eye(3)[LABELS]).sum(axis=1).mean()
        for metric, truth in truths.items():
            runs = [
                vault(insecure_seed=i)
                .randomize(RandomizedResponse(1.0, 3))
                .evaluate(ROWS, metric, model=None)
                for i in range(200)
            ]
            off = np.array([one.value for one in runs]) - truth
            error = np.mean([one.standard_error for one in runs])
            assert abs(off.mean()) < 4 * error / np.sqrt(200)
            # Examples are fixed here, and their choice is in the error.
            assert np.std(off) < 1.2 * error
            of_noise = np.mean([one.noise_stderr for one in runs])
            assert np.std(off) == pytest.approx(of_noise, rel=4 * np.sqrt(0.5 / 200))

    @pytest.mark.slow
    def test_the_area_has_the_error_of_noise_and_sample(self):
        """New examples in each run: the population's area is that of two normal laws."""
        rng = np.random.default_rng(1000)  # not a seed of the noise
        runs = []
        for i in range(300):
            labels = (rng.random(2000) < 0.3).astype(int)
            chances = 1.0 / (1.0 + np.exp(-rng.normal(labels, 1.0).round(1)))
            noisy = vault(labels, epsilon=2.0, insecure_seed=i).randomize(
                RandomizedResponse(2.0, 2)
            )
            runs.append(noisy.evaluate(chances, "auc", model=None))
        off = np.array([run.value for run in runs]) - 0.7602  # Phi(1 / sqrt(2))
        error = np.mean([run.standard_error for run in runs])
        assert abs(off.mean()) < 4 * error / np.sqrt(300) + 1e-3
        assert np.std(off) == pytest.approx(error, rel=4 * np.sqrt(0.5 / 300))
        covered = np.mean([low <= 0.7602 <= high for low, high in (run.interval() for run in runs)])
        assert covered >= 0.95 - 4 * np.sqrt(0.95 * 0.05 / 300)
        # The area of true labels has a standard deviation of 0.0113 here.
        assert np.mean([run.sampling_stderr for run in runs]) == pytest.approx(0.0113, rel=0.15)

    def test_without_flips_the_area_is_that_of_the_labels_with_the_error_of_its_sample(self):
        exact = vault(RARE, epsilon=40.0).randomize(RandomizedResponse(40.0, 2))
        found = exact.evaluate(CHANCES, "auc", model=None)
        assert found.value == pytest.approx(roc_auc_score(RARE, CHANCES), abs=1e-9)
        assert found.noise_stderr < 0.01 * found.sampling_stderr
        with pytest.raises(ValueError, match="metric must be"):
            vault().randomize(RandomizedResponse(1.0, 3)).evaluate(ROWS, "auc", model=None)

    def test_an_estimate_below_the_range_has_the_sample_of_all_examples(self):
        runs = [
            vault(insecure_seed=i)
            .randomize(RandomizedResponse(0.1, 3))
            .evaluate((LABELS + 1) % 3, "accuracy", model=None)
            for i in range(10)
        ]
        below = [run for run in runs if run.value < 0.0]
        assert below and all(run.effective_examples == N for run in below)

    def test_numbers_have_a_mean_and_a_total(self):
        noisy = vault(NUMBERS, kind=Numbers(0.0, 10.0)).randomize(
            LaplaceMechanism(1.0, 0.0, 10.0, clip=False)
        )
        found = noisy.evaluate(None, "total", model=None)
        assert abs(found.value - NUMBERS.sum()) < 5 * found.standard_error
        with pytest.raises(ValueError, match="only the metrics 'mean' and 'total'"):
            noisy.evaluate(GUESSES, "mse", model=None)

    def test_a_model_that_has_learnt_from_them_is_refused(self):
        features = ROWS
        labels = vault(epsilon=1.0, delta=1e-5)
        train, _ = labels.split(0.5)
        model = keras.Sequential([keras.layers.Dense(3, "softmax")])
        model.compile("adam", "categorical_crossentropy")
        stages = ldp.MultiStageTraining(
            features[train.indices],
            train,
            epsilon=0.5,
            fractions=(1.0,),
            epochs_per_stage=1,
            batch_size=500,
            key="stage",
            verbose=0,
        )
        model.fit(stages.dataset(), epochs=1, callbacks=[stages], verbose=0, shuffle=False)
        given = model.predict(features[train.indices], verbose=0)
        other = train.randomize(RandomizedResponse(0.5, 3))
        assert other.evaluate(given, "accuracy", model=model).num_examples == 3000
        learnt = ldp.NoisyLabels(
            other.values, other.indices, other.mechanism, receipts=public_input([model]).receipts
        )
        with pytest.raises(ValueError, match="has not learnt from these noisy labels"):
            learnt.evaluate(given, "accuracy", model=model)


class TestSelect:
    @pytest.mark.holds("vault.select")
    def test_the_best_is_chosen_and_charged_once(self):
        labels = vault(insecure_seed=None)
        chosen = select([np.zeros((N, 3)) + 1 / 3, ROWS, ROWS[::-1]], labels, epsilon=0.5)
        assert chosen == 1 and labels.guarantee().epsilon == 0.5
        numbers = vault(NUMBERS, kind=Numbers(0.0, 10.0))
        assert select([NUMBERS[::-1], GUESSES], numbers, 0.5, "mae") == 1

    @pytest.mark.holds("vault.select")
    @pytest.mark.parametrize("kind", ["heads", "pipelines", "models", "noisy labels"])
    def test_the_chosen_one_states_the_choice_and_all_candidates(self, kind):
        labels = vault(epsilon=4.0, delta=1e-6)
        train, held_out = labels.split(0.5)
        x, held = ROWS[train.indices], ROWS[held_out.indices]
        noisy = [train.randomize(RandomizedResponse(1.0, 3)) for _ in range(2)]
        if kind == "noisy labels":
            candidates = noisy
            predictions = [np.eye(3)[each.values] for each in noisy]
        elif kind == "models":
            dense = keras.layers.Dense
            candidates = [keras.Sequential([keras.Input((3,)), dense(3)]) for _ in noisy]
            for model, drawn in zip(candidates, noisy, strict=True):
                model.compile("sgd", keras.losses.CategoricalCrossentropy(from_logits=True))
                ldp.fit(model, x, drawn, epochs=1, verbose=0)
            logits = [model.predict(held, verbose=0) for model in candidates]
            predictions = [np.exp(each) / np.exp(each).sum(axis=1)[:, None] for each in logits]
        else:
            heads = [PrivateRidge(0.5, 1e-6, spread=spread) for spread in (True, False)]
            if kind == "pipelines":
                heads = [make_pipeline(StandardScaler(), head) for head in heads]
            candidates = [head.fit(x, train) for head in heads]
            predictions = [head.predict_proba(held) for head in candidates]
        before = [public_input(each).receipts for each in candidates]
        best = select(predictions, held_out, 0.5, candidates=candidates)
        stated = {receipt.id for receipt in public_input(best).receipts}
        assert stated >= {receipt.id for each in before for receipt in each}
        choices = [use for use in labels.receipts if "SelectionMechanism" in use.what]
        assert len(choices) == 1 and choices[0].id in stated
        # A Keras model is not copied; the candidates that were not chosen are as before.
        pairs = zip(candidates, before, strict=True)
        changed = [public_input(each).receipts != old for each, old in pairs]
        assert sum(changed) == (kind == "models") == any(best is each for each in candidates)

    def test_only_what_carries_receipts_is_a_candidate(self):
        labels = vault()
        for candidates, error, message in (
            ([ROWS, ROWS], TypeError, "candidates that carry receipts"),
            ([PrivateRidge(1.0), PrivateRidge(1.0)], TypeError, "got PrivateRidge"),
            ([labels], ValueError, "a candidate for each of 2"),
        ):
            with pytest.raises(error, match=message):
                select([ROWS, ROWS[::-1]], labels, 0.5, candidates=candidates)
        assert not labels.history()

    @pytest.mark.parametrize(
        ("predictions", "metric", "message"),
        [
            ([], None, "at least one model"),
            ([ROWS, ROWS[:5]], None, "5 predictions"),
            ([ROWS], "mse", "metric must be"),
            ([LABELS], "brier", "shape"),
        ],
    )
    def test_bad_candidates(self, predictions, metric, message):
        labels = vault()
        with pytest.raises(ValueError, match=message):
            select(predictions, labels, 0.5, metric)
        assert not labels.history()


def test_the_auc_of_a_perfect_ranking_is_one():
    """One positive or one negative among 64, and next to no noise."""
    scores = np.arange(64) / 64
    for positives in (1, 63):
        labels = (np.arange(64) >= 64 - positives).astype(int)
        vault = ldp.PrivateLabels(labels, num_classes=2, budget=ldp.PrivacyBudget(1e3))
        assert vault.evaluate(scores, "auc", epsilon=500.0).value == pytest.approx(1.0, abs=0.03)
