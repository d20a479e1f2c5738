"""The guarantee of a head from both sides, on the very rows and the release that it makes.

Named after the "Guarantee:" sections of PrivateRidge and PrivateLogisticRegression.
"""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from fits import release_of
from scipy import optimize, special, stats

from tf_labeldp.accounting import PrivacyBudget
from tf_labeldp.heads import PrivateLogisticRegression, PrivateRidge
from tf_labeldp.mechanisms import LabelMomentMechanism
from tf_labeldp.plugins import FeatureRows, PublicRows
from tf_labeldp.vault import PrivateLabels

pytestmark = pytest.mark.filterwarnings("ignore:this is fit number")
FALSE_ALARM = 1e-6
"""The probability that a test of a law, or a bound of an attack, is wrong by chance."""
SIX = np.array(
    [[1.0, 0.2], [-0.4, 1.5], [0.3, -0.9], [-1.0, -1.0], [2.0, 0.1], [-0.6, 0.4]], np.float32
)
KINDS = {
    "binary": ({"num_classes": 2}, [0, 1]),
    "classes": ({"num_classes": 3}, [0, 1, 2]),
    "numbers": ({"low": -2.0, "high": 6.0}, [-2.0, 0.7, 6.0]),
    "rows": ({"num_labels": 2}, [[0, 0], [0, 1], [1, 0], [1, 1]]),
}
SETTINGS = {
    "spread": {"center": True, "intercept": 0.2, "noise_to_signal": 0.01},
    "few-directions": {"center": True, "intercept": 0.2, "noise_to_signal": 3.0},
    "plain": {"center": False, "intercept": 0.0, "noise_to_signal": None},
}


def rows_of_a_head(settings, features=SIX):
    rows, sample = PublicRows.survey(FeatureRows(features), 8e9)
    return rows.scaled(rows.scaling(sample, **SETTINGS[settings]))


def codes(kind, labels):
    """The centred codes of the docstring, by hand."""
    labels = np.asarray(labels, dtype=np.float64)
    if kind == "classes":
        return np.eye(3)[labels.astype(int)] - 1.0 / 3.0
    centre = {"binary": 0.5, "numbers": 2.0, "rows": 0.5}[kind]
    return (labels - centre).reshape(len(labels), -1)


def unit_sigma(epsilon, delta):
    """Sigma for sensitivity one, by bisection of the formula of Balle and Wang."""
    low, high = 1e-3, 1e3
    for _ in range(200):
        middle = math.sqrt(low * high)
        low, high = (
            (middle, high) if tradeoff_delta(epsilon, 1.0 / middle) > delta else (low, middle)
        )
    return high


def tradeoff_delta(epsilon, u):
    """The least delta at epsilon for two unit normals u apart."""
    return special.ndtr(u / 2 - epsilon / u) - math.exp(epsilon) * special.ndtr(
        -u / 2 - epsilon / u
    )


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("binary", "plain"),
        ("classes", "spread"),
        ("classes", "few-directions"),
        ("numbers", "spread"),
        ("rows", "plain"),
    ],
)
def test_replacement_of_one_label_moves_the_moments_by_the_sensitivity(kind, settings):
    """All examples, all replacements: the bound behind sigma holds, and is reached.

    The other labels drop out of the difference; that they do is checked on random ones.
    """
    arguments, labels = KINDS[kind]
    rows = rows_of_a_head(settings)
    x = np.concatenate(list(rows.blocks()))
    max_l1 = rows.scan().max_l1
    worst = worst_l1 = 0.0
    rng = np.random.default_rng(0)
    for place, (old, new) in itertools.product(range(6), itertools.permutations(labels, 2)):
        before = [labels[i] for i in rng.integers(0, len(labels), 6)]
        after = list(before)
        before[place], after[place] = old, new
        moved = x.T @ codes(kind, before) - x.T @ codes(kind, after)
        worst = max(worst, float(np.linalg.norm(moved)))
        worst_l1 = max(worst_l1, float(np.abs(moved).sum()))
    gaussian = LabelMomentMechanism(1.0, 1e-3, **arguments)
    stated = gaussian.noise_stddev(6, x.shape[1]) / unit_sigma(1.0, 1e-3)
    assert stated * (1.0 - 1e-6) <= worst <= stated
    laplace = LabelMomentMechanism(1.0, 0.0, noise="laplace", max_l1=max_l1, **arguments)
    stated = laplace.noise_stddev(6, x.shape[1]) / math.sqrt(2.0)  # the scale, at epsilon one
    assert stated * (1.0 - 1e-5) <= worst_l1 <= stated


@pytest.mark.parametrize(
    ("kind", "noise", "seed"),
    [
        (PrivateRidge, "gaussian", None),
        (PrivateRidge, "laplace", 5),
        (PrivateLogisticRegression, "gaussian", 5),
    ],
)
@pytest.mark.holds(
    "heads.PrivateLogisticRegression", "heads.PrivatePoissonRegression", "heads.PrivateRidge"
)
def test_the_release_has_noise_of_the_stated_law(kind, noise, seed):
    """Kolmogorov-Smirnov and the likelihood's own statistic on 40,000 entries.

    The latter, the mean of squares or of sizes, rejects a sigma that is 5 % off: that is ten or
    more standard errors, and the limit is 4.9 of them.
    """
    n, classes, width = 60, 40, 1000
    rng = np.random.default_rng(1)
    x = rng.normal(size=(n, width)).astype(np.float32)
    labels = rng.integers(0, classes, n)
    delta = 1e-3 if noise == "gaussian" else 0.0
    head = kind(1.0, delta, num_classes=classes, noise=noise, spread=False, insecure_seed=seed)
    mechanism, rows, released, rng_of_release = release_of(head, x, labels)
    assert (rng_of_release is None) == (seed is None)
    np.testing.assert_allclose(np.linalg.norm(rows, axis=1), 1.0, rtol=0, atol=1e-12)
    noise_part = (released - rows.T @ (np.eye(classes)[labels] - 1.0 / classes)).ravel()
    stddev = mechanism.noise_stddev(n, width + 1)
    if noise == "gaussian":
        assert stddev == pytest.approx(math.sqrt(2.0) * unit_sigma(1.0, 1e-3), rel=1e-4)
        scaled, law = noise_part / stddev, stats.norm
        power, gap = 2, 0.1
    else:
        l1 = 2.0 * np.abs(rows).sum(axis=1).max()
        assert stddev == pytest.approx(math.sqrt(2.0) * l1, rel=1e-4)
        scaled, law = noise_part * math.sqrt(2.0) / stddev, stats.laplace
        power, gap = 1, 0.05
    assert scaled.size == 40 * 1001
    assert stats.kstest(scaled, law.cdf).pvalue > FALSE_ALARM
    sizes = np.abs(scaled) ** power
    error = math.sqrt((2.0 if power == 2 else 1.0) / sizes.size)
    limit = stats.norm.isf(FALSE_ALARM / 2) * error
    assert gap > 2.0 * limit
    assert abs(sizes.mean() - 1.0) < limit
    for factor in (0.95, 1.05):
        assert abs((sizes / factor**power).mean() - 1.0) > limit


@pytest.mark.slow
@pytest.mark.parametrize(
    ("noise", "head"), [("gaussian", PrivateRidge), ("laplace", PrivateLogisticRegression)]
)
@pytest.mark.holds("heads.PrivateRidge")
def test_a_likelihood_ratio_attack_on_a_heads_release_finds_below_epsilon_and_above_half(
    noise, head
):
    """The worst pair: one label replaced, at the row that is longest; 12,000 releases of each.

    The attack knows the rows, the other labels and the law of the noise, and thresholds the
    likelihood ratio. Rates that enter a bound on epsilon are replaced by their Clopper-Pearson
    bounds of level 1e-6, at four thresholds fixed in advance: were the release exactly (epsilon,
    delta)-DP, a bound above epsilon would come out with a probability below 1e-5.
    """
    epsilon, tries = 1.0, 12_000
    delta = 0.01 if noise == "gaussian" else 0.0
    x = np.array([[1.0], [3.0], [-0.5], [-2.0]])
    one = head(epsilon, delta, num_classes=2, noise=noise, center=False, insecure_seed=0)
    mechanism, rows, _, _ = release_of(one, x, [0, 1, 0, 1])
    worst = int(np.abs(rows).sum(axis=1).argmax())
    absent = np.array([0, 1, 0, 1])
    absent[worst] = 0
    present = absent.copy()
    present[worst] = 1
    rng = np.random.default_rng(2)
    releases = [
        np.array([mechanism.release(labels, rows, rng=rng)[:, 0] for _ in range(tries)])
        for labels in (absent, present)
    ]
    means = [rows.T @ (labels - 0.5) for labels in (absent, present)]
    stddev = mechanism.noise_stddev(4, 2)

    def log_ratio(found):
        if noise == "gaussian":
            distances = [np.square(found - mean).sum(axis=1) / (2 * stddev**2) for mean in means]
        else:
            scale = stddev / math.sqrt(2.0)
            distances = [np.abs(found - mean).sum(axis=1) / scale for mean in means]
        return distances[0] - distances[1]

    losses = [log_ratio(found) for found in releases]
    found = -math.inf
    for threshold in epsilon * np.array([0.4, 0.7, 0.9, 1.0 - 1e-9]):
        alarms, hits = (int(np.count_nonzero(loss >= threshold)) for loss in losses)
        sure_hits = stats.beta.ppf(1e-6, hits, tries - hits + 1)
        sure_alarms = stats.beta.isf(1e-6, alarms + 1, tries - alarms)
        if sure_hits > delta:
            found = max(found, math.log((sure_hits - delta) / sure_alarms))
        if noise == "gaussian":  # both rates are those of two normals one sensitivity apart
            u = 1.0 / stddev
            for count, mean in ((alarms, -0.5 * u**2), (hits, 0.5 * u**2)):
                rate = special.ndtr((mean - threshold) / u)
                assert stats.binomtest(count, tries, rate).pvalue > FALSE_ALARM
    assert 0.5 * epsilon < found < epsilon
    if noise == "laplace":  # no event has a larger ratio, up to the rounding of rows
        assert max(np.abs(loss).max() for loss in losses) <= epsilon * (1.0 + 1e-6)


@pytest.mark.parametrize("kind", ["classes", "numbers"])
def test_pure_noise_gives_a_pure_guarantee(kind, examples):
    arguments, labels = examples.kinds[kind]
    one = PrivateRidge(20.0, noise="laplace", **arguments).fit(examples.features, labels)
    statement = one.guarantee()
    assert (statement.epsilon, statement.delta, statement.is_private) == (20.0, 0.0, True)
    assert np.all(np.isfinite(one.predict(examples.features)))


def test_how_rows_are_scaled_does_not_depend_on_labels(examples):
    head = PrivateRidge(1.0, 1e-6, num_classes=3, insecure_seed=0)
    found = [
        release_of(head, examples.features, labels)[1]
        for labels in (np.zeros(3000, int), examples.classes)
    ]
    np.testing.assert_array_equal(*found)


@pytest.mark.parametrize("broken", [{"epsilon": 1e-12, "delta": 1e-30}, {"epsilon": 0.5}])
def test_a_fit_that_fails_leaves_the_head_and_its_statement(broken, examples, monkeypatch):
    """The first fails at the release (noise beyond the integers), the second after it."""
    one = PrivateLogisticRegression(1.0, 1e-5, num_classes=3, spread=False)
    one.fit(examples.features, examples.classes)
    scores, said = one.decision_function(examples.features), one.guarantee()
    one.set_params(**broken)
    if broken["epsilon"] == 0.5:
        monkeypatch.setattr(optimize, "minimize", lambda *rest, **named: 1 / 0)
    with pytest.raises((ValueError, ZeroDivisionError)):
        one.fit(examples.features * np.arange(1, 9), examples.classes)
    np.testing.assert_array_equal(one.decision_function(examples.features), scores)
    assert one.guarantee() == said and one.guarantee().epsilon == 1.0


@pytest.mark.parametrize(("noise", "delta"), [("gaussian", 1e-5), ("laplace", 0.0)])
def test_a_stored_release_is_found_by_rows_that_were_rounded_otherwise(noise, delta, examples):
    vault = PrivateLabels(examples.classes, 3, budget=PrivacyBudget(1.0, delta))
    head = PrivateRidge(1.0, delta, noise=noise, key="one")
    weights = head.fit(examples.features, vault).coef_.copy()
    rounded = examples.features * (1.0 + 1e-8 * np.arange(8))
    again = head.fit(rounded, vault).coef_
    assert np.linalg.norm(again - weights) <= 1e-4 * np.linalg.norm(weights)
    assert vault.guarantee().epsilon == 1.0
