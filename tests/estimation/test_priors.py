"""Priors from logits, probabilities and noisy histograms, and the grids of priors of numbers."""

from __future__ import annotations

import dataclasses
import itertools
import math

import numpy as np
import pytest
from scipy import special

import tf_labeldp as ldp
from tf_labeldp.estimation import prior_from_logits, sharpen_prior
from tf_labeldp.estimation.priors import ordered_prior
from tf_labeldp.mechanisms import (
    HistogramMechanism,
    LabelMomentMechanism,
    Priors,
    RRWithPrior,
    optimal_bins,
)
from tf_labeldp.plugins import estimated_prior, histogram_prior
from tf_labeldp.vault import Numbers

LOGITS = np.array([2.0, 1.0, 0.0])
SURE = 2000.0  # an epsilon at which discrete noise is zero except with probability e^-1000
CLUSTERS = np.arange(600) % 3  # of four classes
LABELS = np.where(np.random.default_rng(0).random(600) < 0.8, CLUSTERS, 3)


def released(mechanism, groups=None, epsilon=SURE, **arguments):
    """A statistic of a vault's labels."""
    labels = ldp.PrivateLabels(LABELS, 4, budget=ldp.PrivacyBudget(epsilon), **arguments)
    return labels.release(mechanism, public_input=groups)


def test_prior_from_logits_oracle():
    np.testing.assert_allclose(
        prior_from_logits(LOGITS), [0.665240956, 0.244728471, 0.0900305732], rtol=0, atol=1e-9
    )


def test_sharpen_prior_oracle():
    np.testing.assert_allclose(
        sharpen_prior([0.5, 0.3, 0.2], 0.5), [0.657894737, 0.236842105, 0.105263158], atol=1e-9
    )


@pytest.mark.parametrize("temperature", [0.1, 3.0])
def test_temperature_is_a_power_of_the_odds(temperature):
    rows = np.random.default_rng(21).normal(size=(50, 4))
    prior = prior_from_logits(rows, temperature)
    assert prior.shape == rows.shape and prior.dtype == np.float64
    np.testing.assert_allclose(prior.sum(axis=1), 1.0, rtol=0, atol=1e-15)
    np.testing.assert_allclose(
        np.log(prior[:, 1] / prior[:, 0]), (rows[:, 1] - rows[:, 0]) / temperature, rtol=1e-9
    )
    np.testing.assert_allclose(
        sharpen_prior(prior_from_logits(rows), temperature), prior, rtol=1e-9
    )


def test_a_probability_of_zero_stays_zero():
    assert sharpen_prior([[0.5, 0.5, 0.0]], 3.0).tolist() == [[0.5, 0.5, 0.0]]


def test_large_logits_do_not_overflow():
    np.testing.assert_allclose(prior_from_logits([1e4, 1e4, -1e4], 0.01), [0.5, 0.5, 0.0])


@pytest.mark.parametrize("temperature", [0.0, np.nan])
def test_bad_temperature(temperature):
    with pytest.raises(ValueError, match="temperature must be finite and above zero"):
        prior_from_logits(LOGITS, temperature)
    with pytest.raises(ValueError, match="temperature must be finite and above zero"):
        sharpen_prior([0.5, 0.5], temperature)


def test_bad_logits_and_priors():
    with pytest.raises(ValueError, match=r"logits must be finite, but 2 are NaN or infinite.*rate"):
        prior_from_logits([[np.nan, 1.0], [np.inf, 0.0]])
    with pytest.raises(ValueError, match="prior must not be negative"):
        sharpen_prior([1.5, -0.5], 1.0)
    with pytest.raises(ValueError, match="prior must sum to one"):
        sharpen_prior([0.5, 0.4], 1.0)


def test_priors_are_the_noisy_histogram_clipped_and_normalised():
    """Algorithm 4, step by step; a cluster without any count above zero is uniform."""
    groups = np.r_[CLUSTERS[:-1], 7]
    statistic = released(HistogramMechanism(0.02, 4), groups, insecure_seed=6)
    counts = statistic.values
    assert counts.shape == (8, 4) and counts.dtype == np.int64 and (counts < 0).any()
    alone = HistogramMechanism(0.02, 4).release(LABELS, groups, rng=np.random.default_rng([6, 0]))
    np.testing.assert_array_equal(counts, alone)
    np.testing.assert_array_equal(np.asarray(statistic), counts)
    clipped = np.maximum(counts, 0)
    uniform = clipped.sum(axis=1) == 0
    expected = np.where(uniform[:, None], 0.25, clipped / np.maximum(clipped.sum(1), 1)[:, None])
    priors = statistic.priors()
    assert isinstance(priors, Priors) and priors.values is None
    assert priors.probabilities.shape == (8, 4) and priors.groups.shape == (600,)
    np.testing.assert_allclose(np.asarray(priors), expected[groups], rtol=1e-12)
    np.testing.assert_allclose(np.asarray(priors).sum(axis=1), 1.0, rtol=1e-12)


@pytest.mark.holds("estimation.histogram_prior")
def test_guarantee_the_prior_of_a_label_and_its_draw_add_up():
    """Exactly: two labels of one cluster, all noisy counts, all outputs; the sum is reached."""
    for_prior, for_draw = 0.7, 1.1
    mechanism = RRWithPrior(for_draw, 2)
    shrink = math.exp(-for_prior / 2)

    def joint(label, counts, output):
        """P of the counts and the output, if the other label is 1, times a constant."""
        exact = np.bincount([label, 1], minlength=2)
        noise = shrink ** int(np.abs(np.array(counts) - exact).sum())
        return noise * mechanism.transition_matrix(histogram_prior(counts))[label, output]

    ratios = [
        math.log(joint(label, counts, output) / joint(1 - label, counts, output))
        for counts in itertools.product(range(-4, 7), repeat=2)
        for label, output in itertools.product((0, 1), repeat=2)
        if joint(label, counts, output) > 0.0
    ]
    assert max(ratios) == pytest.approx(for_prior + for_draw, abs=1e-9)


def test_one_histogram_of_all_makes_one_prior_for_all():
    priors = released(HistogramMechanism(SURE, 4)).priors()
    assert priors.groups is None and priors.probabilities.shape == (4,)
    np.testing.assert_allclose(np.asarray(priors), np.bincount(LABELS, minlength=4) / 600)


def test_other_statistics_make_no_priors():
    mechanism = LabelMomentMechanism(1.0, 0.0, noise="laplace", num_classes=4, max_l1=1.0)
    with pytest.raises(TypeError, match="priors need a histogram, got a LabelMomentMechanism"):
        released(mechanism, np.eye(600, 2)).priors()


def test_prior_clips_and_normalises():
    prior = histogram_prior(np.array([[3, -2, 1], [-1, 0, -7], [0, 0, 5]]))
    expected = [[0.75, 0.0, 0.25], [1 / 3] * 3, [0.0, 0.0, 1.0]]
    np.testing.assert_allclose(prior, expected, rtol=1e-15)
    assert prior.dtype == np.float64
    found = histogram_prior([12, -3, 5, 0])  # by another program
    np.testing.assert_allclose(found, [0.705882353, 0.0, 0.294117647, 0.0], atol=1e-6)
    assert histogram_prior([0.5, -1.0, 1.5]).tolist() == [0.25, 0.0, 0.75]
    noisy = np.random.default_rng(76).laplace(size=(500, 7), scale=30)
    np.testing.assert_allclose(histogram_prior(noisy).sum(axis=1), 1.0, rtol=0, atol=1e-15)
    assert np.all(histogram_prior(noisy) >= 0.0)


@pytest.mark.holds("estimation.ordered_prior")
def test_ordered_prior_without_noise_is_the_histogram():
    counts = np.random.default_rng(77).integers(0, 9, (5, 13))
    counts[2] = 0
    shares = ordered_prior(counts, counts.sum(axis=1), 0.0)
    np.testing.assert_allclose(shares[2], 1 / 13)
    rest = [0, 1, 3, 4]
    np.testing.assert_allclose(
        shares[rest], counts[rest] / counts[rest].sum(axis=1, keepdims=True), atol=1e-12
    )
    np.testing.assert_allclose(ordered_prior(counts[0], counts[0].sum(), 0.0), shares[0])


def test_ordered_prior_by_hand():
    """Total 100 of [70, 20, -4, 2]: halves 96 and 4, below 1.5 * 4 / sqrt(1/2 + 1/2), so zero."""
    assert ordered_prior([70, 20, -4, 2], 100, 4.0).tolist() == [0.75, 0.25, 0.0, 0.0]
    # Each count has a share of the 12 that are missing; a part above the threshold is kept.
    found = ordered_prior([70.0, 20.0, -4.0, 2.0], 100, 1.0)
    np.testing.assert_allclose(found, [0.73, 0.23, 0.0, 0.04])


def test_ordered_prior_leaves_empty_stretches_empty():
    rng = np.random.default_rng(78)
    counts = np.zeros(64)
    counts[:4] = [60_000, 25_000, 10_000, 5_000]
    noisy = counts + rng.laplace(scale=40.0, size=(300, 64))
    totals = np.full(300, 100_000)
    shares = ordered_prior(noisy, totals, math.sqrt(2.0) * 40.0)
    np.testing.assert_allclose(shares.sum(axis=1), 1.0, rtol=1e-12)
    assert shares.min() >= 0.0
    place = np.arange(64.0)
    exact = counts @ place / 100_000
    before, after = (made @ place / exact - 1.0 for made in (histogram_prior(noisy), shares))
    assert before.mean() > 0.2 and abs(after.mean()) < 0.1 * before.mean()


def test_priors_of_numbers_by_group_know_the_sizes_of_the_groups():
    labels = ldp.PrivateLabels([0.0, 1.0, 2.0] * 20, Numbers(0, 2), budget=ldp.PrivacyBudget(SURE))
    groups = np.repeat([0, 2], 30)
    counts = labels.release(HistogramMechanism(SURE, values=(0.0, 1.0, 2.0)), None, groups)
    np.testing.assert_allclose(np.asarray(counts.priors()), 1 / 3)
    np.testing.assert_allclose(counts.priors().probabilities[1], 1 / 3)  # of nobody


LOSSES = ("squared_error", "absolute_error", "poisson")


def deviance(loss, y_hat, y):
    """The losses, the Poisson one as a deviance, of which Lipschitz constants are about."""
    if loss == "squared_error":
        return (y_hat - y) ** 2
    if loss == "absolute_error":
        return np.abs(y_hat - y)
    return y_hat - special.xlogy(y, y_hat) + special.xlogy(y, y) - y


def mean_loss(mechanism, labels, prior, loss, judged_by):
    """E loss(M(label), judged_by), for labels (k,) of these probabilities."""
    outputs = np.array(mechanism.outputs)
    chances = mechanism.likelihood(outputs, labels)
    return float(np.sum(chances * prior * deviance(loss, outputs[:, np.newaxis], judged_by)))


LIPSCHITZ = {
    "squared_error": lambda low, high: 2.0 * (high - low),
    "absolute_error": lambda low, high: 1.0,
    "poisson": lambda low, high: math.log(high / low),
}


def step(values):
    """The widest one."""
    return np.diff(values).max()


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize(("epsilon", "number"), [(0.5, 13), (6.0, 3)])
def test_lemma_16_both_inequalities_and_their_sum(loss, epsilon, number):
    low, high = 1.0, 8.5
    values = Priors.rounding_grid(low, high, number)
    bound = LIPSCHITZ[loss](low, high) * step(values)
    fine = np.linspace(low, high, 181)
    rounded = np.argmin(np.abs(values[:, np.newaxis] - fine), axis=0)
    rng = np.random.default_rng([91, number, int(10 * epsilon)])
    for concentration in (0.02, 0.3, 5.0):
        prior = rng.dirichlet(np.full(fine.size, concentration))
        coarse = np.bincount(rounded, prior, minlength=number)
        mine = optimal_bins(values, coarse, epsilon, loss)
        best = optimal_bins(fine, prior, epsilon, loss)
        on_true = mean_loss(mine, fine, prior, loss, fine)
        on_rounded = mean_loss(mine, fine, prior, loss, values[rounded])
        optimum = mean_loss(best, fine, prior, loss, fine)
        assert on_true <= on_rounded + bound / 2  # (12)
        assert on_rounded <= optimum + bound / 2  # (13)
        assert optimum - 1e-9 <= on_true <= optimum + bound


def test_whole_numbers_where_they_fit():
    values = Priors.rounding_grid(-3, 400, 404, whole_numbers=True)
    assert values.tolist() == [float(value) for value in range(-3, 401)]
    one_less = Priors.rounding_grid(-3, 400, 403, whole_numbers=True)
    assert len(one_less) == 403 and step(one_less) == pytest.approx(403 / 402)
    assert one_less[0] == -3.0 and one_less[-1] == 400.0
    assert Priors.rounding_grid(0, 1, 64, whole_numbers=True).tolist() == [0.0, 1.0]


def test_real_labels_between_whole_ends_are_resolved():
    assert len(Priors.rounding_grid(0.0, 1.0, 64)) == 64
    values = Priors.rounding_grid(0, 7, 64)
    assert len(values) == 64 and set(range(8)) <= set(values.tolist())
    values = Priors.rounding_grid(0, 30, 64)  # two parts of each unit fit, three do not
    assert step(values) == 0.5 and set(range(31)) <= set(values.tolist())
    assert Priors.rounding_grid(0, 52, 64).tolist() == list(range(53))


@pytest.mark.parametrize(("low", "high"), [(0.0, 5000.0), (18.0, 90.0), (0.3, 1e6)])
def test_small_amounts_are_resolved(low, high):
    values = Priors.rounding_grid(low, high, 64)
    steps = np.diff(values)
    assert len(values) == 64 and np.all(np.diff(steps) > 0.0)
    assert (values[0], values[-1]) == (low, high)
    logs = np.diff(np.log(values + high / math.expm1(4.0)))
    np.testing.assert_allclose(logs, logs[0], rtol=1e-6)
    assert steps[-1] < 0.07 * (high - low)
    # The same labels in another currency.
    np.testing.assert_allclose(Priors.rounding_grid(3 * low, 3 * high, 64), 3 * values, rtol=1e-12)
    below_zero = Priors.rounding_grid(-high, high, 64)
    np.testing.assert_allclose(np.diff(below_zero), 2 * high / 63, rtol=1e-9)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((3.0, 3.0, 10), ValueError, "low must be below high"),
        ((0.0, math.inf, 10), ValueError, "high must be finite"),
        ((0.0, 1.0, 1), ValueError, "max_values must be at least 2, got 1"),
        ((1e15, 1e15 + 0.5, 100), ValueError, "there are no 100 distinct doubles"),
    ],
)
def test_bad_grids(arguments, error, message):
    with pytest.raises(error, match=message):
        Priors.rounding_grid(*arguments)


RATE, MANY = 0.034, 20_000
RARE = (np.random.default_rng(3).random(MANY) < RATE).astype(int)


def rare(mechanism, labels=RARE, number=2, seed=4, **arguments):
    """A seeded draw of labels of which 3.4 % are positive."""
    budget = ldp.PrivacyBudget(50.0)
    vault = ldp.PrivateLabels(labels, number, budget=budget, insecure_seed=seed)
    return vault.randomize(mechanism, **arguments)


@pytest.mark.holds("estimation.estimated_prior")
@pytest.mark.filterwarnings("ignore:a budget of epsilon=50")
@pytest.mark.parametrize(
    ("mechanism", "seen"),
    [(ldp.RandomizedResponse(2.0, 2), 0.2), (ldp.ALIBI(2.0, 2), 0.12)],
    ids=["RandomizedResponse", "ALIBI"],
)
def test_posteriors_have_the_rate_of_the_labels(mechanism, seen):
    """The prior is estimated from the noisy labels: the mean of the posteriors is the true rate.

    The standard error is that of debiased labels.
    """
    noisy = rare(mechanism)
    error = noisy.debiased()[:, 1].std() / math.sqrt(MANY)
    assert abs(noisy.posterior()[:, 1].mean() - RARE.mean()) < 5 * error < 0.06
    uniform = noisy.posterior("uniform")
    assert uniform[:, 1].mean() > seen
    np.testing.assert_array_equal(uniform, ldp.estimation.posterior(mechanism, noisy.values))
    np.testing.assert_array_equal(noisy.posterior(), noisy.posterior())
    assert noisy.guarantee().epsilon == mechanism.epsilon
    with pytest.raises(ValueError, match="priors must be one of"):
        noisy.posterior("even")


def test_posteriors_shrink_to_the_prior():
    """The limit that the docstring names: a certain positive has a target of 0.2."""
    found = rare(ldp.RandomizedResponse(2.0, 2)).posterior()[:, 1]
    assert 0.15 < found.max() < 0.25


@pytest.mark.filterwarnings("ignore:a budget of epsilon=50")
def test_no_class_gets_a_prior_of_zero_and_equal_shares_stay_equal():
    for size in (0, 1, 50, MANY):
        for seed in range(5):
            noisy = rare(ldp.RandomizedResponse(0.5, 3), np.zeros(size, int), 3, seed)
            found = noisy.posterior()
            assert np.all(found > 0.0) and np.isfinite(found).all()
            np.testing.assert_allclose(found.sum(axis=1), 1.0, rtol=1e-12)
    # Of 100 equal classes at epsilon 1 the estimate is noise, which must not become a prior.
    noisy = rare(ldp.RandomizedResponse(1.0, 100), np.arange(MANY) % 100, 100)
    shares = np.maximum(noisy.debiased().mean(axis=0), 0.0)
    assert shares.max() > 0.03
    np.testing.assert_allclose(noisy.posterior().mean(axis=0), 0.01, atol=0.004)


@dataclasses.dataclass(frozen=True)
class Mixes(ldp.mechanisms.ClassificationMechanism):
    """A channel of another library that does not distinguish the first two classes."""

    epsilon: float = 1.0
    num_classes: int = 3

    def _answers(self):
        keep, move = np.exp(self.epsilon), 1.0
        table = np.array([[keep, keep, move], [keep, keep, move], [move, move, 2 * keep]])
        return table / table.sum(axis=1, keepdims=True)

    def transition_matrix(self, prior=None):
        return self._answers()

    def randomize(self, labels, priors=None, *, rng=None):
        ends = np.cumsum(self._answers(), axis=1)[np.asarray(labels)]
        return (rng.random(len(labels))[:, np.newaxis] >= ends).sum(axis=1)

    def get_config(self):
        return dataclasses.asdict(self)


def test_classes_that_a_channel_mixes_have_equal_shares():
    found = estimated_prior(Mixes(), np.repeat([0, 1, 2], [45, 45, 10]))
    assert found[0] == pytest.approx(found[1], rel=1e-9) and found[2] < found[0]


def test_draws_with_priors_keep_them():
    priors = np.random.default_rng(5).dirichlet([1.0, 1.0], MANY)
    mechanism = RRWithPrior(1.0, 2)
    noisy = rare(mechanism, priors=priors)
    expected = ldp.estimation.posterior(mechanism, noisy.values, priors)
    np.testing.assert_array_equal(noisy.posterior(), expected)
    with pytest.raises(ValueError, match="expected priors=None for labels that RRWithPrior drew"):
        noisy.posterior("uniform")


@pytest.mark.filterwarnings("ignore:a budget of epsilon=50")
def test_posteriors_of_clusters_have_the_rate_of_the_labels():
    """Their priors are at least tau, here 0.2, and half of the labels are kept.

    The standard error of the rate is 0.005. In equal shares the priors stay what they were.
    """
    clusters = np.arange(MANY) % 50
    mechanism = ldp.ClusterRandomizedResponse.for_epsilon(2.0, 2)
    noisy = rare(mechanism, clusters=clusters)
    by_bayes = ldp.estimation.posterior(noisy.mechanism, noisy.values, noisy.priors)
    assert by_bayes[:, 1].mean() > 0.12
    assert noisy.posterior()[:, 1].mean() == pytest.approx(RARE.mean(), abs=0.025)
    labels = np.where(np.random.default_rng(1).random(MANY) < 0.9, clusters % 2, 1 - clusters % 2)
    noisy = rare(mechanism, labels, clusters=clusters)
    by_bayes = ldp.estimation.posterior(noisy.mechanism, noisy.values, noisy.priors)
    np.testing.assert_allclose(noisy.posterior(), by_bayes, atol=0.02)
    lost = rare(ldp.ClusterRandomizedResponse(2, 0.1, 4.0, 1.0, None, 0.0), clusters=clusters)
    np.testing.assert_allclose(lost.posterior(), np.asarray(lost.priors), rtol=1e-9)


def test_bins_estimate_their_prior():
    """Numbers of which nine in ten are near zero: their posterior means have the mean of all."""
    amounts = np.random.default_rng(6).choice([0.0, 1.0, 8.0, 9.0], MANY, p=[0.6, 0.3, 0.05, 0.05])
    values = np.arange(10.0)
    bins = ldp.RROnBins(1.0, values, (0.5, 3.0, 6.0, 8.5), (0, 0, 1, 1, 1, 2, 2, 2, 3, 3))
    budget = ldp.PrivacyBudget(1.0)
    vault = ldp.PrivateLabels(amounts, Numbers(0.0, 9.0), budget=budget, insecure_seed=7)
    noisy = vault.randomize(bins)
    # The channel of four bins at epsilon 1 makes 20,000 labels worth 1,800.
    assert noisy.posterior().mean() == pytest.approx(amounts.mean(), abs=5 * 2.5 / 1800**0.5)
    assert noisy.posterior("uniform").mean() > 3.0 > 2 * amounts.mean()
    with pytest.raises(ValueError, match="need priors with values"):
        laplace = ldp.mechanisms.LaplaceMechanism(1.0, 0.0, 9.0)
        ldp.NoisyLabels(amounts, np.arange(MANY), laplace).posterior()
