"""The private moments: exact sensitivity, exact sums, the law of the noise, the guarantee."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from scipy import special, stats

from tf_labeldp.accounting import PrivacyBudget
from tf_labeldp.mechanisms import LabelMomentMechanism, integer_noise
from tf_labeldp.vault import Numbers, PrivateLabels

FALSE_ALARM = 1e-6
"""The probability that a test of a law fails by chance."""

KINDS = {
    "binary": {"num_classes": 2},
    "classes": {"num_classes": 3},
    "numbers": {"low": -2.0, "high": 6.0},
    "rows": {"num_labels": 2},
}
# All labels of one example, per kind; of numbers the ends and some between.
LABELS = {
    "binary": [0, 1],
    "classes": [0, 1, 2],
    "numbers": [-2.0, -0.3, 1.7, 6.0],
    "rows": [[0, 0], [0, 1], [1, 0], [1, 1]],
}
CODE_DISTANCE = {"binary": 1.0, "classes": math.sqrt(2), "numbers": 8.0, "rows": math.sqrt(2)}
L1_DISTANCE = {"binary": 1.0, "classes": 2.0, "numbers": 8.0, "rows": 2.0}
ROWS = np.array([[0.6, 0.8, 0.0], [0.1, -0.2, 0.3], [-0.5, 0.5, 0.5]])


def mechanism(kind="classes", epsilon=1.0, delta=1e-5, **arguments):
    return LabelMomentMechanism(epsilon, delta, **{**KINDS[kind], **arguments})


def without_noise(one, labels, features):
    """The release without its noise; the scale and the L1 sensitivity of it, and a step's value."""
    found = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            integer_noise,
            "with_noise",
            lambda exact, kind, scale, epsilon, moved, rng: found.append((scale, moved)) or exact,
        )
        moments, totals = one.exact_sums(np.asarray(labels), np.asarray(features), len(labels))
        statistic = one.add_noise(moments, totals, len(labels))
        unit = one.add_noise(moments + 1, totals, len(labels)) - statistic
    return statistic, *found[0], float(unit.mean())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.holds("mechanisms.LabelMomentMechanism")
def test_the_sensitivity_is_the_largest_distance_over_all_replacements(kind):
    """Every data set of three labels, every replacement: the bound holds and is reached."""
    worst = worst_l1 = 0.0
    statistics = {
        labels: without_noise(mechanism(kind), [LABELS[kind][i] for i in labels], ROWS)[0]
        for labels in itertools.product(range(len(LABELS[kind])), repeat=3)
    }
    for labels, place in itertools.product(statistics, range(3)):
        for other in range(len(LABELS[kind])):
            changed = (*labels[:place], other, *labels[place + 1 :])
            difference = statistics[labels] - statistics[changed]
            worst = max(worst, float(np.linalg.norm(difference)))
            worst_l1 = max(worst_l1, float(np.abs(difference).sum()))
    one = mechanism(kind, max_l1=1.5, noise="laplace", delta=0.0)
    _, scale, moved, unit = without_noise(one, [LABELS[kind][0]] * 3, ROWS)
    bound = mechanism(kind).noise_stddev(3, 3) / _unit_sigma()
    assert worst <= bound
    assert worst == pytest.approx(bound, rel=1e-6)  # the norm of the first row is one
    assert bound == pytest.approx(CODE_DISTANCE[kind], rel=1e-6)
    assert worst_l1 <= moved * unit * (1 + 1e-9)
    assert worst_l1 == pytest.approx(moved * unit, rel=1e-5)
    assert moved * unit == pytest.approx(1.5 * L1_DISTANCE[kind], rel=1e-5)
    assert scale == math.ceil(moved) / 1.0


def _unit_sigma():
    """Sigma for sensitivity one at (1, 1e-5), from the bisection of the plain formula."""
    low, high = 1.0, 10.0
    for _ in range(100):
        middle = 0.5 * (low + high)
        u = 1.0 / middle
        delta = special.ndtr(u / 2 - 1 / u) - math.e * special.ndtr(-u / 2 - 1 / u)
        low, high = (middle, high) if delta > 1e-5 else (low, middle)
    return high


@pytest.mark.parametrize("kind", KINDS)
def test_without_noise_it_is_the_moments_of_centred_codes(kind):
    rng = np.random.default_rng(0)
    features = rng.normal(size=(5000, 7))
    features /= np.linalg.norm(features, axis=1, keepdims=True)
    labels = np.array(LABELS[kind])[rng.integers(0, len(LABELS[kind]), 5000)]
    codes = {
        "binary": lambda: labels[:, None] - 0.5,
        "classes": lambda: np.eye(3)[labels.astype(int)] - 1 / 3,
        "numbers": lambda: labels[:, None] - 2.0,
        "rows": lambda: labels - 0.5,
    }[kind]()
    found, *_ = without_noise(mechanism(kind), labels, features)
    np.testing.assert_allclose(found, features.T @ codes, atol=2e-3 if kind == "numbers" else 1e-5)
    assert found.shape == (7, mechanism(kind).num_columns)


def test_the_exact_sum_does_not_depend_on_the_order_or_the_blocks():
    rng = np.random.default_rng(1)
    features = rng.normal(size=(999, 5))
    features /= np.linalg.norm(features, axis=1, keepdims=True)
    labels = rng.integers(0, 3, 999)
    order = rng.permutation(999)

    class Blocks:
        def blocks(self):
            yield from np.array_split(features[order], 7)

    one = mechanism()
    whole, totals = one.exact_sums(labels, features, 999)
    blocks = one.exact_sums(labels[order], Blocks(), 999)
    parts = [one.exact_sums(labels[at], features[at], 999) for at in np.array_split(order, 5)]
    for moments, sums in (blocks, [sum(several) for several in zip(*parts, strict=True)]):
        np.testing.assert_array_equal(whole, moments)
        np.testing.assert_array_equal(totals, sums)
    seeded = one.release(labels, features, rng=np.random.default_rng(3))
    again = one.add_noise(whole, totals, 999, rng=np.random.default_rng(3))
    np.testing.assert_array_equal(seeded, again)


@pytest.mark.parametrize("seeded", [False, True])
@pytest.mark.parametrize("noise", ["gaussian", "laplace"])
def test_the_noise_has_the_stated_law_and_no_other(noise, seeded):
    """Kolmogorov-Smirnov on 12,000 entries; 8 % less or more noise is rejected."""
    rows, columns, n = 4000, 3, 40
    one = mechanism(delta=1e-5 if noise == "gaussian" else 0.0, noise=noise, max_l1=1.0)
    features = np.zeros((n, rows))
    features[:, 0] = 1.0
    labels = np.arange(n) % 3
    rng = np.random.default_rng(2) if seeded else None
    released = one.release(labels, features, rng=rng)
    assert released.shape == (rows, columns)
    noise_part = (released - features.T @ (np.eye(3)[labels] - 1 / 3)).ravel()
    stddev = one.noise_stddev(n, rows)
    if noise == "gaussian":
        assert stddev == pytest.approx(math.sqrt(2) * _unit_sigma(), rel=1e-5)
        law = stats.norm(scale=stddev)
        wrong = [stats.norm(scale=stddev * factor) for factor in (0.92, 1.08)]
    else:
        assert stddev == pytest.approx(math.sqrt(2) * 2.0, rel=1e-5)
        law = stats.laplace(scale=stddev / math.sqrt(2))
        wrong = [stats.laplace(scale=2.0 * factor) for factor in (0.92, 1.08)]
    assert stats.kstest(noise_part, law.cdf).pvalue > FALSE_ALARM
    sizes = np.abs(noise_part)
    for other in wrong:
        # Sizes tell a wrong scale best; the chance to miss it is below 1e-4 for either law.
        assert stats.kstest(sizes, lambda x, law=other: 2 * law.cdf(x) - 1).pvalue < 1e-2
    # Entries are independent: correlations of columns are normal with variance 1 / rows.
    correlations = np.corrcoef(noise_part.reshape(rows, columns).T)[np.triu_indices(columns, 1)]
    limit = stats.norm.isf(FALSE_ALARM / 6) / math.sqrt(rows)
    assert np.all(np.abs(correlations) < limit)


def test_opendp_certifies_the_noise():
    """OpenDP's own privacy map: zCDP of (S / sigma)^2 / 2, and epsilon for Laplace noise."""
    gaussian, _ = integer_noise.opendp_noise("gaussian", True, 2.0**40, 1.0, 0.0)
    assert gaussian.map(2.0**38) == pytest.approx(0.5 * 2.0**-4, rel=1e-12)
    one = mechanism(noise="laplace", delta=0.0, epsilon=0.7, max_l1=1.0)
    features = np.zeros((1000, 5))
    _, scale, moved, _ = without_noise(one, np.zeros(1000, int), features)
    laplace, _ = integer_noise.opendp_noise("laplace", True, scale, 0.7, moved)
    assert 0.7 * (1 - 1e-9) < laplace.map(math.ceil(moved)) <= 0.7


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"delta": 0.0}, ValueError, "gaussian noise needs delta above zero"),
        ({"noise": "laplace"}, ValueError, "laplace noise needs delta equal to zero"),
        ({"low": 0.0, "high": 1.0}, ValueError, "exactly one of num_classes"),
        ({"max_norm": 0.0}, ValueError, "max_norm must be finite and above zero"),
    ],
)
def test_bad_arguments(arguments, error, message):
    with pytest.raises(error, match=message):
        mechanism(**arguments)


@pytest.mark.parametrize(
    ("labels", "features", "message"),
    [
        ([0, 1], None, "needs features"),
        ([0, 1], [[1.0, 0.0], [1.0, 1.0]], "1 are not, the first at row 1"),
        ([0, 1], [[1.0, 0.0], [np.nan, 0.0]], "must be finite, .* 1 are not"),
        ([0, 1], [[1.0, 0.0]], "got 1 rows and 2 labels"),
        ([0, 1], [[1.0, 0.0]] * 3, "got 3 rows and 2 labels"),
        ([0, 1], [1.0, 0.0], r"features must be numbers of shape \(n, d\)"),
    ],
)
def test_bad_input(labels, features, message):
    with pytest.raises(ValueError, match=message):
        mechanism().release(labels, features)


def test_labels_outside_are_never_shown():
    with pytest.raises(ValueError, match="1 of 2 do not") as caught:
        mechanism("numbers").release([0.0, 123.456], [[1.0], [1.0]])
    assert "123" not in str(caught.value)
    with pytest.raises(ValueError, match="1 of 4 are not"):
        mechanism("rows").release([[0, 1], [2, 0]], [[1.0], [1.0]])
    with pytest.raises(ValueError, match=r"labels must have shape \(n, 2\), got \(2,\)"):
        mechanism("rows").release([0, 1], [[1.0], [1.0]])


def test_sums_stay_below_2_to_the_53():
    assert mechanism().noise_stddev(2**32 - 1, 3) > 0.0
    with pytest.raises(ValueError, match=r"fewer than 2\^32 rows for exact sums"):
        mechanism().noise_stddev(2**32, 3)


def test_an_epsilon_at_which_nothing_is_left_is_refused():
    with pytest.raises(ValueError, match="leaves the 64-bit integers"):
        mechanism(epsilon=1e-9, delta=1e-12).release([0, 1], [[1.0], [1.0]])


@pytest.mark.parametrize("high", [50.0, 99.0])
def test_a_vault_refuses_a_narrower_range_whatever_its_labels(high):
    """Otherwise a failure would reveal a label outside the range, at any epsilon."""
    for last in (40.0, 100.0):
        vault = PrivateLabels([1.0, last], Numbers(0, 100), budget=PrivacyBudget(1.0, 1e-5))
        with pytest.raises(ValueError, match="the mechanism is for labels in"):
            vault.release(LabelMomentMechanism(0.01, 1e-9, low=0, high=high), None, np.eye(2))
        assert vault.guarantee().epsilon == 0.0
        wider = LabelMomentMechanism(0.5, 1e-5, low=-1.0, high=100.0)
        assert vault.release(wider, None, np.eye(2)).values.shape == (2, 1)


def test_norms_are_not_computed_in_the_type_of_the_blocks():
    """16 squared is 0 in eight bits."""

    class Blocks:
        def blocks(self):
            yield np.array([[16], [0]], np.uint8)

    with pytest.raises(ValueError, match="1 are not, the first at row 0"):
        mechanism("binary").release([1, 0], Blocks())


def test_laplace_noise_has_no_delta_by_default():
    assert LabelMomentMechanism(1.0, num_classes=2, noise="laplace").delta == 0.0
