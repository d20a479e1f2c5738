"""Private metrics and the private choice of a model: their law, from both sides, and bad input."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from sklearn.metrics import accuracy_score, brier_score_loss, log_loss

from tf_labeldp.mechanisms import (
    LinearBinningMechanism,
    MetricMechanism,
    SelectionMechanism,
)

RNG = np.random.default_rng(3)
N, K = 400, 4
LABELS = RNG.integers(0, K, N)
ROWS = RNG.dirichlet(np.ones(K), N)
NUMBERS, GUESSES = RNG.uniform(-1.0, 3.0, N), RNG.normal(1.0, 2.0, N)
CASES = {
    "accuracy": (MetricMechanism(0.8, "accuracy", K), LABELS, ROWS),
    "accuracy of codes": (MetricMechanism(0.8, "accuracy", K), LABELS, ROWS.argmax(axis=1)),
    "log_loss": (MetricMechanism(0.8, "log_loss", K, clip=3.0), LABELS, ROWS),
    "brier": (MetricMechanism(0.8, "brier", K), LABELS, ROWS),
    "mse": (MetricMechanism(0.8, "mse", low=-1.0, high=3.0), NUMBERS, GUESSES),
    "mae": (MetricMechanism(0.8, "mae", low=-1.0, high=3.0), NUMBERS, GUESSES),
    "mean": (MetricMechanism(0.8, "mean", low=-1.0, high=3.0), NUMBERS, None),
}


def exact(mechanism, labels, predictions):
    """The metric without noise, as its steps have it."""
    mean = mechanism.exact_steps(labels, predictions) / mechanism.steps * mechanism.sensitivity
    return mean / len(labels) + (mechanism.low if mechanism.metric == "mean" else 0.0)


def test_metrics_are_those_of_scikit_learn():
    values = {name: exact(*case) for name, case in CASES.items()}
    clipped = np.clip(GUESSES, -1.0, 3.0)
    one_hot = np.eye(K)[LABELS]
    expected = {
        "accuracy": accuracy_score(LABELS, ROWS.argmax(axis=1)),
        "accuracy of codes": accuracy_score(LABELS, ROWS.argmax(axis=1)),
        "brier": np.square(ROWS - one_hot).sum(axis=1).mean(),
        "mse": np.square(NUMBERS - clipped).mean(),
        "mae": np.abs(NUMBERS - clipped).mean(),
        "mean": NUMBERS.mean(),
    }
    expected["log_loss"] = np.minimum(-np.log(ROWS[np.arange(N), LABELS]), 3.0).mean()
    assert values == pytest.approx(expected, abs=1e-6)
    soft = 0.5 * ROWS + 0.125  # nothing to clip
    wide = MetricMechanism(1.0, "log_loss", K)
    assert exact(wide, LABELS, soft) == pytest.approx(log_loss(LABELS, soft), abs=1e-5)
    two = MetricMechanism(1.0, "brier", 2)  # scikit-learn counts one of the two classes
    binary, chance = LABELS % 2, ROWS[:, 0]
    assert exact(two, binary, chance) == pytest.approx(
        2 * brier_score_loss(binary, chance), abs=1e-6
    )


@pytest.mark.parametrize("name", CASES)
@pytest.mark.holds("mechanisms.MetricMechanism")
def test_one_label_moves_the_sum_by_the_sensitivity_and_no_more(name):
    mechanism = CASES[name][0]
    if mechanism.num_classes:
        others = range(K)
        # The hardest predictions there are, in addition to those drawn.
        rows = np.vstack([np.eye(K), RNG.dirichlet(np.ones(K), 30)])
        rows = rows.argmax(axis=1) if name == "accuracy of codes" else rows
    else:
        others, rows = np.linspace(-1.0, 3.0, 9), np.linspace(-2.0, 4.0, 25)
    most = 0
    for one in rows if mechanism.metric != "mean" else [None]:
        given = None if one is None else np.array([one])
        sums = [mechanism.exact_steps(np.array([label]), given) for label in others]
        most = max(most, max(sums) - min(sums))
    assert most == mechanism.steps


@pytest.mark.parametrize("name", ["accuracy", "log_loss", "mse", "mean"])
@pytest.mark.holds("mechanisms.MetricMechanism")
def test_the_noise_is_laplace_of_scale_sensitivity_over_epsilon(name):
    mechanism, labels, predictions = CASES[name]
    drawn = np.array(
        [mechanism.release(labels, predictions, rng=np.random.default_rng(i)) for i in range(4000)]
    )
    off = drawn - exact(mechanism, labels, predictions)
    scale = mechanism.sensitivity / mechanism.epsilon / N
    error = mechanism.noise_stddev(N)
    assert error == pytest.approx(math.sqrt(2.0) * scale, rel=0.06)  # discrete: a little less
    # The fourth moment of Laplace noise is 6 times the squared variance.
    assert abs(off.mean()) < 4 * error / math.sqrt(4000)
    assert np.mean(off**2) == pytest.approx(error**2, rel=4 * math.sqrt(5.0 / 4000))
    assert mechanism.release(labels, predictions).shape == ()


def chances(mechanism, scores):
    """P[each model is chosen], from the law of the noise: P[g >= x] = e^(-decay x) for x >= 0."""
    decay = 0.5 * mechanism.epsilon / mechanism.steps
    grid = np.arange(4000)
    found = []
    for i, score in enumerate(scores):
        mass = np.exp(-decay * grid) * -np.expm1(-decay)
        for j, other in enumerate(scores):
            if j != i:  # the first of equal sums wins
                least = score + grid - other + (1 if j > i else 0)
                mass = mass * np.where(least > 0, -np.expm1(-decay * np.maximum(least, 0)), 0.0)
        found.append(mass.sum())
    return np.array(found)


@pytest.mark.slow
@pytest.mark.parametrize("epsilon", [0.3, 2.5])
@pytest.mark.holds("mechanisms.SelectionMechanism")
def test_no_label_makes_a_choice_more_than_e_to_the_epsilon_likelier_and_some_nearly(epsilon):
    """The guarantee from both sides, over all predictions of three models for one example."""
    mechanism = SelectionMechanism(epsilon, "accuracy", 2)
    worst = 0.0
    for start in itertools.product(range(6), repeat=3):
        for moves in itertools.product((-1, 1), repeat=3):  # wrong becomes right, or the reverse
            before, after = chances(mechanism, start), chances(mechanism, np.add(start, moves))
            assert before.sum() == pytest.approx(1.0, abs=1e-9)
            worst = max(worst, np.abs(np.log(before) - np.log(after)).max())
    assert worst <= epsilon + 1e-9
    assert worst > 0.8 * epsilon


@pytest.mark.parametrize(
    ("metric", "kind"),
    [
        ("accuracy", {"num_classes": 3}),
        ("log_loss", {"num_classes": 3}),
        ("brier", {"num_classes": 3}),
        ("mse", {"low": -1.0, "high": 3.0}),
        ("mae", {"low": -1.0, "high": 3.0}),
    ],
)
@pytest.mark.parametrize("alike", [0.0, 1.0])
def test_one_label_moves_the_difference_of_two_sums_by_at_most_moved(metric, kind, alike):
    mechanism = SelectionMechanism(1.0, metric, **kind)
    rng = np.random.default_rng(11)
    if "num_classes" in kind:
        rows = (1 - alike) * rng.dirichlet(np.full(3, 0.3), (5, 6))
        rows += alike * rng.dirichlet(np.ones(3), 6)
        others: object = range(3)
    else:
        rows = (1 - alike) * rng.normal(1.0, 3.0, (5, 6)) + alike * rng.normal(1.0, 3.0, 6)
        others = np.linspace(-1.0, 3.0, 81)
    worst, said = 0, set()
    for at in range(6):
        sums = []
        for label in others:
            labels = np.ones(6, int) if "num_classes" in kind else np.ones(6)
            labels[at] = label
            found, moved = mechanism.scores(labels, rows)
            sums.append(found)
            said.add(moved)
        for one, other in itertools.combinations(np.array(sums), 2):
            worst = max(worst, np.ptp(one - other))
    assert len(said) == 1  # whatever the labels are
    assert worst <= moved <= 1.02 * worst + 4
    if alike == 1.0:
        assert moved == 0 and int(mechanism.release(labels, rows)) == 0


@pytest.mark.parametrize("metric", ["mse", "mae"])
@pytest.mark.parametrize("apart", [1e-13, 1e-6])
def test_rounding_of_models_that_are_nearly_the_same_is_counted(metric, apart):
    mechanism = SelectionMechanism(1.0, metric, low=-1.0, high=3.0)
    rng = np.random.default_rng(8)
    first = rng.uniform(-1.0, 3.0, 2)
    rows = np.array([first, first + apart * rng.normal(size=2), first - apart])
    labels = np.column_stack([rng.uniform(-1.0, 3.0, 400), np.ones(400)])
    found = [mechanism.scores(one, rows) for one in labels]
    sums, moved = np.array([one[0] for one in found]), found[0][1]
    changes = sums - sums[:1]
    assert np.ptp(changes[:, 0] - changes[:, 1]) <= moved
    assert np.ptp(changes[:, 0] - changes[:, 2]) <= moved


@pytest.mark.slow
def test_the_drawn_choice_has_this_law():
    mechanism = SelectionMechanism(0.9, "accuracy", 2)
    labels, rng, n = np.zeros(12, int), np.random.default_rng(0), 2000
    candidates = np.array([[0] * right + [1] * (12 - right) for right in (7, 9, 8, 9)])
    draws = [int(mechanism.release(labels, candidates, rng=rng)) for _ in range(n)]
    expected = chances(mechanism, [7, 9, 8, 9])
    shares = np.bincount(draws, minlength=4) / n
    assert np.all(np.abs(shares - expected) < 4 * np.sqrt(expected * (1 - expected) / n))
    assert int(mechanism.release(labels, candidates)) in range(4)  # by secure bits


def test_a_loss_is_chosen_by_its_least():
    good, bad = 0.9 * np.eye(K)[LABELS] + 0.025, ROWS
    for metric in ("log_loss", "brier"):
        assert int(SelectionMechanism(20.0, metric, K).release(LABELS, [bad, good, bad])) == 1
    numbers = SelectionMechanism(20.0, "mae", low=-1.0, high=3.0)
    assert int(numbers.release(NUMBERS, [GUESSES, GUESSES, NUMBERS])) == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"metric": "accuracy"}, "exactly one of num_classes .*, low and high"),
        ({"metric": "accuracy", "num_classes": 2, "low": 0.0, "high": 1.0}, "exactly one of"),
        ({"metric": "accuracy", "low": 0.0, "high": 1.0}, "metric must be"),
        ({"metric": "log_loss", "num_classes": 2, "clip": 0.0}, "clip must be"),
    ],
)
def test_bad_arguments(arguments, message):
    with pytest.raises(ValueError, match=message):
        MetricMechanism(1.0, **arguments)


def test_a_choice_needs_predictions_and_a_metric_of_them():
    for metric, predictions in (("accuracy", None), ("accuracy", []), ("mean", [np.zeros(3)])):
        kind = {"num_classes": 3} if metric == "accuracy" else {"low": 0.0, "high": 1.0}
        mechanism = SelectionMechanism(1.0, metric, **kind)
        with pytest.raises(ValueError, match="predictions of at least one model"):
            mechanism.scores(np.zeros(3, int), predictions)
    with pytest.raises(ValueError, match="'mean' takes no predictions"):
        MetricMechanism(1.0, "mean", low=0.0, high=1.0).release(np.zeros(3), np.zeros(3))


@pytest.mark.parametrize(
    ("metric", "predictions", "message"),
    [
        ("accuracy", np.zeros((3, 5)), r"of shape \(n, 4\), or class codes \(n,\)"),
        ("accuracy", [0, 1], "2 predictions and 3 labels"),
        ("log_loss", np.full((3, 4), 2.0), "sum to one"),
        ("brier", [[1.5, -0.5, 0, 0]] * 3, "at least zero"),
        ("brier", np.full((3, 4), np.nan), "finite"),
    ],
)
def test_bad_predictions(metric, predictions, message):
    with pytest.raises(ValueError, match=message):
        MetricMechanism(1.0, metric, 4).release([0, 1, 2], predictions)


@pytest.mark.parametrize("kind", [MetricMechanism, SelectionMechanism])
def test_an_epsilon_whose_noise_does_not_fit_the_integers_is_refused(kind):
    guesses = [0, 1, 1] if kind is MetricMechanism else [[0, 1, 1], [1, 1, 1]]
    for rng in (None, np.random.default_rng(0)):
        with pytest.raises(ValueError, match="leaves the 64-bit integers"):
            kind(1e-300, "accuracy", 2).release([0, 1, 0], np.array(guesses), rng=rng)


class TestLinearBinning:
    def test_mass_is_split_between_cells(self):
        mechanism = LinearBinningMechanism(1.0, 3)
        counts = mechanism.exact_steps([0, 2, 2], [2.25, 0.0, 1.0]) / 2**20
        np.testing.assert_array_equal(counts, [[0, 0, 0.75, 0.25], [0] * 4, [1, 1, 0, 0]])
        by_class = mechanism.exact_steps([0, 2, 1], np.arange(9.0).reshape(3, 3)) / 2**20
        np.testing.assert_array_equal(np.argwhere(by_class), [[0, 0], [1, 7], [2, 5]])
        groups = RNG.integers(0, 5, N)
        histogram = np.zeros((K, 5))
        np.add.at(histogram, (LABELS, groups), 1)
        found = LinearBinningMechanism(1.0, K).exact_steps(LABELS, groups)
        np.testing.assert_array_equal(found / 2**20, histogram)

    @pytest.mark.holds("mechanisms.LinearBinningMechanism")
    @pytest.mark.parametrize("num_classes", [2, 4])
    def test_one_label_moves_all_counts_by_the_sensitivity_and_no_more(self, num_classes):
        mechanism, most = LinearBinningMechanism(1.0, num_classes), 0
        for position in (0.0, 1.0, 0.3, 1 / 3, 2.0 - 1e-9, 1.5e-7):
            places = np.array([position] * num_classes)
            # A second label fixes the number of cells, as the public positions do.
            positions = np.stack([places, places[::-1] * 0.7 + 1.0])
            found = [mechanism.exact_steps([y, 0], positions) for y in range(num_classes)]
            moved = [np.abs(a - b).sum() for a, b in itertools.combinations(found, 2)]
            most = max(most, *moved)
        assert most == mechanism.sensitivity * 2**20 == (1 if num_classes == 2 else 2) * 2**20

    @pytest.mark.holds("mechanisms.LinearBinningMechanism")
    @pytest.mark.parametrize("num_classes", [2, 4])
    def test_the_noise_is_laplace_of_scale_sensitivity_over_epsilon(self, num_classes):
        mechanism = LinearBinningMechanism(0.8, num_classes)
        labels, positions = LABELS % num_classes, RNG.uniform(0.0, 3.0, N)
        exact = mechanism.exact_steps(labels, positions) / 2**20
        runs = (
            mechanism.release(labels, positions, rng=np.random.default_rng(i)) for i in range(2000)
        )
        off = np.array([run - exact for run in runs])
        error, size = mechanism.noise_stddev, off.size
        assert error == pytest.approx(math.sqrt(2.0) * mechanism.sensitivity / 0.8, rel=1e-3)
        assert abs(off.mean()) < 4 * error / math.sqrt(size)
        assert np.mean(off**2) == pytest.approx(error**2, rel=4 * math.sqrt(5.0 / size))
        assert mechanism.release(labels, positions).shape == exact.shape

    @pytest.mark.parametrize(
        "positions",
        [None, [0.0], [-1.0, 0.0], [math.nan, 0.0], [0.0, 1e6], ["a", "b"], [[1.0]] * 2],
    )
    def test_bad_positions(self, positions):
        with pytest.raises(ValueError, match=r"expected (the )?positions"):
            LinearBinningMechanism(1.0, 4).release([0, 1], positions)
