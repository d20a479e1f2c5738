"""Private histograms: sensitivity, the law of the noise, and OpenDP's certificate."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from scipy import stats

import tf_labeldp as ldp
from tf_labeldp.mechanisms import HistogramMechanism, integer_noise
from tf_labeldp.plugins import gaussian_delta, gaussian_scale

NOISES = ("discrete_laplace", "laplace")
SURE = 2000.0  # an epsilon at which discrete noise is zero except with probability e^-1000
EPSILONS = [*np.geomspace(1e-6, 50.0, 20).tolist(), 0.1, 1 / 3, 0.7, 2.0]


def discrete_laplace(scale, reach):
    """P[k] for k in -reach..reach, the tails added to the ends."""
    inside = np.exp(-np.abs(np.arange(-reach, reach + 1)) / scale) * math.tanh(0.5 / scale)
    tail = (1.0 - inside.sum()) / 2.0
    inside[[0, -1]] += tail
    return inside


def laplace_bins(scale, edges):
    """P of each interval between the edges, and of the two beyond them."""
    return np.diff(stats.laplace.cdf(edges, scale=scale), prepend=0.0, append=1.0)


def p_value(counts, probabilities):
    expected = np.asarray(probabilities) * counts.sum()
    assert expected.min() >= 5.0
    statistic = np.sum((counts - expected) ** 2 / expected)
    return float(stats.chi2.sf(statistic, counts.size - 1))


def counts_of(noise, draws, reach):
    """Draws sorted into what `law` has probabilities of."""
    if noise == "discrete_laplace":
        return np.bincount(np.clip(draws, -reach, reach) + reach, minlength=2 * reach + 1)
    edges = np.linspace(-reach, reach, 2 * reach)
    return np.bincount(np.searchsorted(edges, draws), minlength=edges.size + 1)


def law(noise, scale, reach):
    if noise == "discrete_laplace":
        return discrete_laplace(scale, reach)
    return laplace_bins(scale, np.linspace(-reach, reach, 2 * reach))


@pytest.mark.parametrize(
    ("mechanism", "labels"),
    [
        (HistogramMechanism(SURE, 3), (0, 1, 2)),
        (HistogramMechanism(SURE, values=(0.0, 1.0, 5.0)), (-4.0, 0.4, 1.2, 3.0, 9.0)),
    ],
    ids=["classes", "values"],
)
@pytest.mark.holds("mechanisms.HistogramMechanism")
def test_a_replaced_label_moves_two_counts_of_one_group(mechanism, labels):
    """Every set of three labels, every replacement, with and without groups: L1 is 2, or 0."""
    groups = [2, 0, 2]
    distances = set()
    for before in itertools.product(labels, repeat=3):
        for place, label in itertools.product(range(3), labels):
            after = list(before)
            after[place] = label
            moved = mechanism.exact_counts(before, groups) - mechanism.exact_counts(after, groups)
            alone = mechanism.exact_counts(before, None) - mechanism.exact_counts(after, None)
            assert np.flatnonzero(moved.any(axis=1)).tolist() in ([], [groups[place]])
            assert np.array_equal(moved.sum(axis=0), alone)
            assert moved.sum() == 0 and np.abs(moved).max() <= 1
            distances |= {int(np.abs(moved).sum()), int(np.abs(alone).sum())}
    assert distances == {0, 2}


def certified(noise, epsilon):
    """OpenDP's measurement that a histogram draws with, and its scale."""
    seen = []

    def record(*arguments, original=integer_noise.opendp_noise):
        seen.append(original(*arguments))
        return seen[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(integer_noise, "opendp_noise", record)
        HistogramMechanism(epsilon, 3, noise=noise).add_noise([2, 1, 0])
    return seen[0]


@pytest.mark.parametrize("epsilon", [0.1, 3.0])
@pytest.mark.holds("mechanisms.HistogramMechanism")
def test_guarantee_the_worst_log_ratio_of_the_noisy_histogram_is_epsilon(epsilon):
    """All outputs of a window around two neighbouring histograms, at the scale that is drawn."""
    _, scale = certified("discrete_laplace", epsilon)
    one, other = np.array([2, 1, 0]), np.array([1, 2, 0])
    outputs = np.array(list(itertools.product(range(-5, 8), repeat=3)))

    def log_law(center, b):
        return np.sum(-np.abs(outputs - center) / b + math.log(math.tanh(0.5 / b)), axis=1)

    ratios = log_law(one, scale) - log_law(other, scale)
    assert ratios.max() == pytest.approx(epsilon, abs=1e-12)
    assert ratios.min() == pytest.approx(-epsilon, abs=1e-12)
    # The scale that forgets that two counts move gives away twice as much.
    half = log_law(one, scale / 2) - log_law(other, scale / 2)
    assert half.max() == pytest.approx(2 * epsilon, abs=1e-12)


@pytest.mark.parametrize("noise", NOISES)
def test_opendp_certifies_the_stated_epsilon(noise):
    """And not for a replacement that moved more, nor for a scale below by 1e-9."""
    raised = 0
    for epsilon in EPSILONS:
        measurement, scale = certified(noise, epsilon)
        kind = int if noise == "discrete_laplace" else float
        assert measurement.map(kind(2)) <= epsilon
        assert measurement.map(kind(3)) > epsilon
        assert 2.0 / epsilon <= scale <= 2.0 / epsilon * (1 + 1e-15)
        raised += scale > 2.0 / epsilon
        too_small = measurement.input_space >> _laplace(scale * (1 - 1e-9))
        assert too_small.map(kind(2)) > epsilon
    assert 0 < raised < len(EPSILONS)  # the raise is needed, and not always


def _laplace(scale):
    import opendp.prelude as dp

    return dp.m.then_laplace(scale)


@pytest.mark.parametrize("noise", NOISES)
@pytest.mark.parametrize("epsilon", [0.5])
def test_seeded_noise_has_the_law_of_scale_two_over_epsilon(noise, epsilon):
    mechanism = HistogramMechanism(epsilon, 100_000, noise=noise)
    zeros = np.zeros(100_000, dtype=int)
    draws = mechanism.add_noise(zeros, rng=np.random.default_rng(71))
    reach = round(10 / epsilon)
    counts = counts_of(noise, draws, reach)
    assert p_value(counts, law(noise, 2.0 / epsilon, reach)) > 1e-6
    assert p_value(counts, law(noise, 1.9 / epsilon, reach)) < 1e-6
    # Against the scale 1/epsilon, on a window in which that one has any mass.
    near = counts_of(noise, draws, round(4 / epsilon))
    assert p_value(near, law(noise, 1.0 / epsilon, round(4 / epsilon))) < 1e-12
    again = mechanism.add_noise(zeros, rng=np.random.default_rng(71))
    assert np.array_equal(draws, again)
    assert draws.dtype == (np.int64 if noise == "discrete_laplace" else np.float64)


@pytest.mark.parametrize("noise", NOISES)
def test_secure_noise_has_the_law_of_scale_two_over_epsilon(noise):
    """OpenDP can't be seeded: each half fails once in 10^9 runs (the first) or never."""
    size, epsilon, reach = 20_000, 1.0, 8
    draws = HistogramMechanism(epsilon, size, noise=noise).add_noise(np.zeros(size, dtype=int))
    counts = counts_of(noise, draws, reach)
    assert p_value(counts, law(noise, 2.0 / epsilon, reach)) > 1e-9
    near = counts_of(noise, draws, 4)
    assert p_value(near, law(noise, 1.0 / epsilon, 4)) < 1e-100
    assert draws.dtype == (np.int64 if noise == "discrete_laplace" else np.float64)


def test_noise_of_cells_is_independent():
    noisy = HistogramMechanism(1.0, 2).add_noise(
        np.zeros((200_000, 2), dtype=int), rng=np.random.default_rng(72)
    )
    assert abs(np.corrcoef(noisy.T)[0, 1]) < 5.0 / math.sqrt(200_000)  # below 1e-6, two-sided


def test_counts_beyond_32_bits_do_not_saturate():
    exact = np.array([2**40, 2**31, 2**53])
    assert HistogramMechanism(SURE, 3).add_noise(exact).tolist() == exact.tolist()


def test_labels_are_counted_in_their_cells_and_groups():
    labels, groups = np.array([0, 2, 2, 1, 2]), np.array([1, 1, 0, 3, 1])
    mechanism = HistogramMechanism(SURE, 3)
    assert mechanism.release(labels).tolist() == [1, 1, 3]
    by_group = [[0, 0, 1], [1, 0, 2], [0, 0, 0], [0, 1, 0]]
    assert mechanism.release(labels, groups).tolist() == by_group
    values = HistogramMechanism(SURE, values=[0.0, 1.0, 10.0])  # 0.5 and 5.5 are ties
    numbers = [-3.0, 0.5, 0.6, 5.5, 5.6, 99.0, np.inf]
    assert values.release(numbers).tolist() == [2, 2, 3]
    assert values.num_cells == 3 and values.values == (0.0, 1.0, 10.0)


def test_chunks_add_up_to_one_release():
    rng = np.random.default_rng(73)
    labels, groups = rng.integers(0, 5, 1000), rng.integers(0, 3, 1000)
    mechanism = HistogramMechanism(0.5, 5)
    parts = [np.zeros((3, 5), dtype=np.int64)]
    for start in range(0, 1000, 300):
        chunk = slice(start, start + 300)
        parts.append(mechanism.exact_counts(labels[chunk], groups[chunk]))
    summed = mechanism.add_noise(sum(parts), rng=np.random.default_rng(74))
    whole = mechanism.release(labels, groups, rng=np.random.default_rng(74))
    assert np.array_equal(summed, whole)


def test_a_part_of_the_labels_is_counted_and_charged():
    labels = ldp.PrivateLabels([0, 1, 1, 2] * 10, num_classes=3, budget=ldp.PrivacyBudget(SURE))
    rows = np.array([3, 0, 39, 4])
    counts = labels.release(HistogramMechanism(SURE, 3), rows, [0, 1, 1, 1])
    assert counts.values.tolist() == [[0, 0, 1], [2, 0, 1]]
    assert np.asarray(labels.receipts[0].examples).tolist() == [0, 3, 4, 39]
    assert labels.receipts[0].kind == "release"


BAD_SETTINGS = {
    "neither": ({}, ValueError, "exactly one of num_classes .* got num_classes=None and no values"),
    "both": ({"num_classes": 3, "values": (0.0, 1.0)}, ValueError, "exactly one.*some values"),
    "one-class": ({"num_classes": 1}, ValueError, "num_classes must be at least 2, got 1"),
    "order": ({"values": (0.0, 2.0, 1.0)}, ValueError, "values must be strictly increasing"),
    "noise": ({"num_classes": 3, "noise": "gauss"}, ValueError, "noise must be one of.*'gauss'"),
    "pure-gaussian": (
        {"num_classes": 3, "noise": "gaussian"},
        ValueError,
        "gaussian noise needs delta above zero, got delta=0",
    ),
    "delta-of-laplace": (
        {"num_classes": 3, "delta": 1e-5},
        ValueError,
        "discrete_laplace noise needs delta equal to zero, got delta=1e-05",
    ),
}


@pytest.mark.parametrize("case", BAD_SETTINGS)
def test_bad_settings(case):
    settings, error, message = BAD_SETTINGS[case]
    with pytest.raises(error, match=message):
        HistogramMechanism(**{"epsilon": 1.0, **settings})


BAD_LABELS = {
    "above": ([0, 987654], None, ValueError, "must lie in 0..2, but 1 of 2 do not"),
    "groups-shape": ([0, 1], [0], ValueError, r"groups must have shape \(2,\), one per label"),
    "groups-kind": ([0, 1], [0.0, 1.0], TypeError, "groups must be integers"),
    "groups-negative": ([0, 1], [0, -1], ValueError, "groups must be in 0..G-1, got -1"),
}


@pytest.mark.parametrize("case", BAD_LABELS)
def test_bad_labels_and_groups(case):
    labels, groups, error, message = BAD_LABELS[case]
    with pytest.raises(error, match=message) as caught:
        HistogramMechanism(1.0, 3).release(labels, groups)
    assert "987654" not in str(caught.value)


# Sigma of the analytic calibration for L2 sensitivity sqrt(2) and delta 1e-5, by another program.
SIGMAS = {0.3: 15.8929949, 0.4: 12.20406, 1.0: 5.27590985, 2.0: 2.8196766, 6.0: 1.07994323}


def gaussian(epsilon, num_classes=10, delta=1e-5):
    return HistogramMechanism(epsilon, num_classes, noise="gaussian", delta=delta)


def gaussian_grid(epsilon, delta, num_counts):
    """The steps of the grid in a count, and the sigma that is drawn in steps."""
    found = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            integer_noise,
            "with_noise",
            lambda exact, kind, scale, *rest: found.append((int(exact[0]), scale)) or exact,
        )
        gaussian(epsilon, num_counts, delta).add_noise(np.eye(1, num_counts, dtype=int)[0])
    return found[0]


@pytest.mark.parametrize("epsilon", SIGMAS)
def test_gaussian_noise_has_the_sigma_of_noise_cluster(epsilon):
    """The stated sigma, and the one that is drawn, which has a margin of some 1e-9 more."""
    steps, scale = gaussian_grid(epsilon, 1e-5, 1000)
    stated = gaussian(epsilon).noise_stddev
    assert stated == pytest.approx(SIGMAS[epsilon], rel=1e-6)
    assert stated < scale / steps < stated * (1 + 1e-8)
    # Exactly private at two moved counts: a millionth less noise is not.
    assert gaussian_delta(scale / steps, epsilon, math.sqrt(2)) <= 1e-5
    assert gaussian_delta(stated * (1 - 1e-6), epsilon, math.sqrt(2)) > 1e-5
    assert gaussian_delta(stated, epsilon, 2.0) > 1e-4  # where L1 is taken for L2


@pytest.mark.parametrize("delta", [1e-12, 0.1])
@pytest.mark.parametrize("num_counts", [2, 10**5])
def test_the_grid_is_fine_enough_for_every_epsilon(num_counts, delta):
    """``gaussian_scale`` itself refuses a grid that is too coarse: one of whole counts, say."""
    for epsilon in np.geomspace(1e-8, 1e4, 25).tolist():
        assert gaussian_grid(epsilon, delta, num_counts)[1] > 0.0
    with pytest.raises(ValueError, match="too coarse"):
        gaussian_scale(1.0, delta, math.sqrt(2), num_counts)


@pytest.mark.parametrize("seeded", [False, True])
def test_gaussian_noise_has_the_stated_law(seeded):
    """Kolmogorov-Smirnov on 20,000 counts: a fifth less or more noise is rejected."""
    mechanism = gaussian(1.0, num_classes=20_000)
    exact = np.arange(20_000)
    noisy = mechanism.add_noise(exact, rng=np.random.default_rng(77) if seeded else None)
    assert noisy.dtype == np.float64 and noisy.shape == (20_000,)
    drawn, sigma = noisy - exact, mechanism.noise_stddev
    assert stats.kstest(drawn, stats.norm(scale=sigma).cdf).pvalue > 1e-9
    for factor in (0.8, 1.25):
        assert stats.kstest(drawn, stats.norm(scale=factor * sigma).cdf).pvalue < 1e-5
    assert abs(stats.pearsonr(drawn[::2], drawn[1::2])[0]) < 6.2 / 100.0  # of 10,000 pairs
    steps = drawn * gaussian_grid(1.0, 1e-5, 20_000)[0]
    assert np.array_equal(steps, np.rint(steps))  # on the grid, not on rounding errors


def test_gaussian_noise_by_groups_and_of_nothing():
    labels, groups = np.array([0, 2, 2, 1, 2]), np.array([1, 1, 0, 3, 1])
    sure = HistogramMechanism(1e6, 3, noise="gaussian", delta=0.5)
    by_group = sure.release(labels, groups)
    np.testing.assert_allclose(by_group, [[0, 0, 1], [1, 0, 2], [0, 0, 0], [0, 1, 0]], atol=0.02)
    assert sure.release(np.zeros(0, int), np.zeros(0, int)).shape == (0, 3)
    seeded = [sure.release(labels, groups, rng=np.random.default_rng(78)) for _ in range(2)]
    assert np.array_equal(*seeded)


def test_too_many_labels_for_the_gaussian_grid():
    """Whether it raises depends on the number of labels alone, not on where they are."""
    mechanism = gaussian(1.0, 3)
    most = (1 << 61) // gaussian_grid(1.0, 1e-5, 3)[0]
    for counts in ([most + 1, 0, 0], [most // 2, 1, most - most // 2]):
        with pytest.raises(ValueError, match="too many labels for exact Gaussian noise on 3"):
            mechanism.add_noise(counts)
    assert mechanism.add_noise([most, 0, 0])[0] == pytest.approx(most, rel=1e-6)


@pytest.mark.parametrize("noise", [*NOISES, "gaussian"])
@pytest.mark.parametrize("epsilon", [2.0])
def test_noise_stddev(noise, epsilon):
    """Of 40,000 draws: within 5 standard errors, and 10 % off is not."""
    delta = 1e-5 if noise == "gaussian" else 0.0
    mechanism = HistogramMechanism(epsilon, 40_000, noise=noise, delta=delta)
    drawn = mechanism.add_noise(np.zeros(40_000, int), rng=np.random.default_rng(79))
    kurtosis = 3.0 if noise == "gaussian" else 6.0 + 1.0 / mechanism.noise_stddev**2
    error = math.sqrt((kurtosis - 1.0) / 40_000) / 2.0  # relative, of a standard deviation
    assert abs(drawn.std() / mechanism.noise_stddev - 1.0) < 5.0 * error < 0.1
    assert HistogramMechanism(SURE, 3).noise_stddev < 1e-200


@pytest.mark.parametrize("epsilon", [0.1, 1.0, 4.0])
@pytest.mark.parametrize("num_classes", [2, 10])
def test_counts_have_less_noise_than_those_of_noisy_labels(epsilon, num_classes):
    channel = ldp.RandomizedResponse(epsilon, num_classes).transition_matrix()
    keep, other = channel[0, 0], channel[0, 1]
    # The variance of a debiased count of a class that no label has.
    of_labels = math.sqrt(1000 * other * (1.0 - other)) / (keep - other)
    assert HistogramMechanism(epsilon, num_classes).noise_stddev < of_labels


@pytest.mark.parametrize(
    ("counts", "error", "message"),
    [
        ([1, 2], ValueError, r"shape \(3,\) or \(G, 3\), got \(2,\)"),
        ([0.2, 0.3, 0.5], TypeError, "not of frequencies"),
        ([1, -2, 3], ValueError, "must not be negative"),
    ],
)
def test_bad_counts(counts, error, message):
    with pytest.raises(error, match=message):
        HistogramMechanism(1.0, 3).add_noise(counts)


@pytest.mark.parametrize("groups", [[0, 10**9, 5], [0, 2**63, 5]])
def test_groups_that_would_take_all_memory_are_refused_and_not_charged(groups):
    labels = ldp.PrivateLabels([0, 2, 1], num_classes=3, budget=ldp.PrivacyBudget(1.0))
    with pytest.raises(ValueError, match=r"(got \d+ groups of 3|must be in 0\.\.G-1).* from zero"):
        labels.release(HistogramMechanism(1.0, 3), public_input=np.array(groups, np.uint64))
    assert labels.guarantee().epsilon == 0.0
    few = labels.release(HistogramMechanism(1.0, 3), public_input=[0, 1000, 5])
    assert few.values.shape == (1001, 3)


def test_as_many_counts_as_labels_may_have():
    labels = np.zeros(2**18 + 1, np.int64)
    mechanism = HistogramMechanism(1.0, 64)
    assert mechanism.exact_counts(labels, np.arange(labels.size)).shape == (labels.size, 64)
    with pytest.raises(ValueError, match=r"expected at most 16777280 counts .* got 262146 groups"):
        mechanism.exact_counts(labels, np.arange(labels.size) + 1)


@pytest.mark.parametrize("noise", ["discrete_laplace", "laplace", "gaussian"])
@pytest.mark.parametrize("epsilon", [5e-324, 1e-24])
def test_an_epsilon_whose_noise_does_not_fit_the_integers_is_refused(noise, epsilon):
    delta = 1e-6 if noise == "gaussian" else 0.0
    with pytest.raises(ValueError, match=r"leaves the 64-bit integers.* Raise epsilon"):
        HistogramMechanism(epsilon, 3, noise=noise, delta=delta)


@pytest.mark.parametrize(("noise", "delta"), [("discrete_laplace", 0.0), ("gaussian", 1e-6)])
def test_the_least_epsilon_has_noise_on_both_sides(noise, delta):
    epsilon = 2.0 / integer_noise.LARGEST_SCALE if noise == "discrete_laplace" else 1e-16
    released = HistogramMechanism(epsilon, 3, noise=noise, delta=delta).release(
        np.arange(3), np.zeros(3, np.int64)
    )
    assert np.all(np.abs(released) < 2.0**62)  # 40 scales are beyond, by a chance of e^-40
