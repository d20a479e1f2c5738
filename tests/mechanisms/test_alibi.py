"""ALIBI: the law of the noise, its privacy, the vault, published numbers, bad input."""

from __future__ import annotations

import itertools
import math
from fractions import Fraction

import numpy as np
import pytest
from scipy import integrate, stats

from tf_labeldp.accounting import BudgetExceededError, PrivacyBudget
from tf_labeldp.accounting._losses import composed_epsilon
from tf_labeldp.accounting.gaussian import gaussian_epsilon
from tf_labeldp.mechanisms import (
    ALIBI,
    RandomizedResponse,
    _alibi,
    classes,
    integer_noise,
    random_bits,
)
from tf_labeldp.vault import LabelStoreError, PrivateLabels

LAPLACE = ALIBI(epsilon=1.0, num_classes=5)
GAUSSIAN = ALIBI(epsilon=1.0, num_classes=5, delta=1e-5, noise="gaussian")
BOTH = pytest.mark.parametrize("mechanism", [LAPLACE, GAUSSIAN], ids=["laplace", "gaussian"])
LABELS = np.random.default_rng(7).integers(0, 5, 20_000)


def noise_of(mechanism, rng=None, labels=LABELS):
    """The noise on every entry, of labels that the test knows."""
    return mechanism.randomize(labels, rng=rng) - np.eye(mechanism.num_classes)[labels]


# --- The law -------------------------------------------------------------------------------------


@pytest.mark.parametrize("secure", [True, False])
@pytest.mark.parametrize(
    ("mechanism", "law"),
    [(LAPLACE, stats.laplace), (GAUSSIAN, stats.norm)],
    ids=["laplace", "gaussian"],
)
def test_every_entry_has_the_noise_that_is_stated(mechanism, law, secure):
    """One false alarm in 10^6, at a distance of 0.0085 for 100,000 draws.

    A scale that is 10 % off moves a distribution function by 0.018 or more, a centre that is 5 %
    of the noise off by 0.020 or more: twice that.
    """
    rng = None if secure else np.random.default_rng(11)
    noise = noise_of(mechanism, rng).ravel()
    assert stats.kstest(noise, law(scale=mechanism.scale).cdf).pvalue > 1e-6
    assert stats.kstest(noise, law(scale=1.1 * mechanism.scale).cdf).pvalue < 1e-6
    assert stats.kstest(noise, law(scale=0.9 * mechanism.scale).cdf).pvalue < 1e-6
    off = 0.05 * mechanism.noise_stddev
    assert stats.kstest(noise, law(loc=off, scale=mechanism.scale).cdf).pvalue < 1e-6


@BOTH
def test_the_noise_of_all_entries_is_independent(mechanism):
    """Correlations of n pairs have a standard deviation of 1 / sqrt(n)."""
    noise = noise_of(mechanism, np.random.default_rng(12))
    limit = 6.0 / math.sqrt(LABELS.size)
    between = np.corrcoef(noise, rowvar=False)[np.triu_indices(5, 1)]
    assert np.max(np.abs(between)) < limit
    assert abs(np.corrcoef(noise[1:, 0], noise[:-1, 0])[0, 1]) < limit


@BOTH
def test_the_noise_is_that_of_its_label_whatever_the_label(mechanism):
    """Rows of each class, less their own one-hot, have the same law."""
    noise = noise_of(mechanism, np.random.default_rng(13))
    first, rest = noise[LABELS == 0].ravel(), noise[LABELS != 0].ravel()
    assert stats.ks_2samp(first, rest).pvalue > 1e-6


@pytest.mark.parametrize("sigma", [1, 2, 7, 1000, 1 << 26])
def test_discrete_gaussian_draws_follow_their_law(sigma, chi_square_rejects):
    drawn = integer_noise.discrete_gaussian(200_000, sigma, np.random.default_rng(14))
    assert drawn.dtype == np.int64
    if sigma < 100:  # every number is a cell, the tails are one each
        support = np.arange(-12 * sigma, 12 * sigma + 1)

        def cells(scale):
            weights = np.exp(-(support**2) / (2.0 * scale**2))
            weights /= weights.sum()
            middle = np.abs(support) <= 2 * sigma
            low, high = weights[support < -2 * sigma].sum(), weights[support > 2 * sigma].sum()
            return np.concatenate([[low], weights[middle], [high]])

        clipped = np.clip(drawn, -2 * sigma - 1, 2 * sigma + 1) + 2 * sigma + 1
        counts = np.bincount(clipped, minlength=4 * sigma + 3)
        assert not chi_square_rejects(counts, cells(sigma))
        assert chi_square_rejects(counts, cells(1.03 * sigma))
        # A second way to draw 0 (as -0) would show.
        wrong = cells(sigma)
        wrong[2 * sigma + 1] *= 2.0
        assert chi_square_rejects(counts, wrong / wrong.sum())
    else:
        assert stats.kstest(drawn / sigma, stats.norm.cdf).pvalue > 1e-6
        assert stats.kstest(drawn / (1.1 * sigma), stats.norm.cdf).pvalue < 1e-6


def test_discrete_gaussian_accepts_with_the_exact_chance(monkeypatch):
    """Algorithm 3: the proposal's weight times the chance to keep it is e^(-y^2 / 2s^2 - 1/2)."""
    asked = []

    def record(numerators, denominator, rng):
        asked.append((numerators.copy(), denominator))
        return np.ones(numerators.size, dtype=bool)

    proposals = np.arange(12)
    monkeypatch.setattr(integer_noise, "geometric", lambda size, decay, rng: proposals)
    monkeypatch.setattr(
        random_bits, "uniform_below", lambda bounds, rng: np.zeros(bounds.size, int)
    )
    monkeypatch.setattr(integer_noise, "bernoulli_exp", record)
    integer_noise.discrete_gaussian(12, 3, None)
    (rest, denominator), *ones = asked
    exponents = [Fraction(int(n), denominator) for n in rest]
    for numerators, one in ones:  # coins of e^-1 for those that are still to throw some
        assert one == 1 and set(numerators.tolist()) == {1}
    rounds = [numerators.size for numerators, _ in ones]
    whole = [sum(count > place for count in rounds) for place in range(12)]
    farthest_first = sorted(range(12), key=lambda y: -((y - 3) ** 2))
    for place, y in enumerate(farthest_first):
        exponents[y] += whole[place]
    for y, exponent in enumerate(exponents):
        assert Fraction(y, 3) + exponent == Fraction(y * y, 18) + Fraction(1, 2)


def test_the_largest_squares_fit_64_bits():
    far = np.array([integer_noise._FARTHEST])
    assert far[0] ** 2 == int(far[0]) ** 2 > 0
    assert far[0] / integer_noise.MAX_SIGMA > 45.0
    assert 2 * integer_noise.MAX_SIGMA**2 <= 1 << 53


def test_draws_follow_opendps_discrete_gaussian():
    """Both samplers right, this fails once in 10^9 runs (OpenDP's takes no seed)."""
    dp = pytest.importorskip("opendp.prelude")
    dp.enable_features("contrib")
    space = dp.vector_domain(dp.atom_domain(T="i64")), dp.l2_distance(T="f64")
    mine = integer_noise.discrete_gaussian(40_000, 4, np.random.default_rng(15))

    def p_value(scale):
        theirs = np.array((space >> dp.m.then_gaussian(scale))([0] * mine.size))
        table = [
            np.bincount(np.clip(x, -10, 10).astype(int) + 10, minlength=21) for x in (mine, theirs)
        ]
        return stats.chi2_contingency(table).pvalue

    assert p_value(4.0) > 1e-9
    assert p_value(5.0) < 1e-9


# --- Privacy -------------------------------------------------------------------------------------


@pytest.mark.parametrize("epsilon", [1e-6, 0.01, 0.5, 1.0, math.pi, 40.0, 1e6])
@pytest.mark.holds("mechanisms.ALIBI")
def test_laplace_rows_are_private_by_the_law_that_is_drawn(epsilon, monkeypatch):
    """The worst log-ratio of two neighbours is 2 m times the decay that the sampler is given."""
    given = []
    original = integer_noise.geometric

    def record(size, decay, rng):
        given.append(decay)
        return original(size, decay, rng)

    monkeypatch.setattr(integer_noise, "geometric", record)
    ALIBI(epsilon, 3).randomize(np.array([0, 1]))
    unit = _alibi._LAPLACE_UNIT
    worst = 2 * unit * given[0]  # two entries move by m steps each, towards and away from the draw
    assert worst <= Fraction(epsilon)
    assert float(worst) == pytest.approx(epsilon, rel=1e-9)


def test_the_worst_case_is_attained_and_no_better():
    """Enumerated on a coarse grid: m = 4 steps in a unit, three classes, all outputs near."""
    epsilon, unit = 1.0, 4
    noise = integer_noise.LaplaceNoise(epsilon, 2 * unit)
    axis = np.arange(-6.0, 11.0)
    x = np.stack(np.meshgrid(axis, axis, axis, indexing="ij"), axis=-1)
    laws = [np.log(noise.mass(x - unit * np.eye(3)[y])).sum(axis=-1) for y in range(3)]
    worst = max(np.max(a - b) for a, b in itertools.permutations(laws, 2))
    assert worst == pytest.approx(epsilon, abs=1e-9)
    assert worst > 0.999 * epsilon


@pytest.mark.parametrize("epsilon", [1e-3, 0.1, 1.0, 4.0, 1e6])
@pytest.mark.parametrize("delta", [1e-300, 1e-10, 1e-5, 0.5, 1.0 - 1e-16])
@pytest.mark.holds("mechanisms.ALIBI")
def test_gaussian_noise_is_calibrated_for_what_is_drawn(epsilon, delta):
    """The margin for discrete noise is kept, sigma is whole, and hardly more than necessary."""
    unit, sigma = _alibi._gaussian_grid(epsilon, delta)
    assert isinstance(sigma, int) and 1 << 24 < sigma <= 1 << 26
    assert 2.0 * 70.0 * 2 / sigma**2 <= 1e-9 * min(epsilon, 1.0)
    assert ALIBI(epsilon, 3, delta, "gaussian").scale == sigma / unit
    found = gaussian_epsilon(sigma / unit, delta, math.sqrt(2.0))
    assert found < epsilon
    if 1e-3 < epsilon < 1e3 and delta < 0.4:
        assert found == pytest.approx(epsilon, rel=1e-6)
        assert gaussian_epsilon(0.999 * sigma / unit, delta, math.sqrt(2.0)) > epsilon


@pytest.mark.parametrize(("sigma", "epsilon"), [(1.0, 6.57297007), (5.0, 1.06078976)])
def test_gaussian_sigma_of_the_oracles(sigma, epsilon):
    mechanism = ALIBI(epsilon, 10, 1e-5, "gaussian")
    assert mechanism.scale == mechanism.noise_stddev == pytest.approx(sigma, rel=1e-6)


@pytest.mark.parametrize(
    ("sigma", "delta", "published"),
    [
        (1.0, 1e-5, 7.07739158),
        (2.0, 1e-5, 3.18899156),
        (10.0, 1e-5, 0.545725585),
        (2.0, 1e-10, 4.69692751),
    ],
)
def test_less_noise_than_the_published_accounting_asks_for(sigma, delta, published):
    assert ALIBI(published, 10, delta, "gaussian").scale < 0.96 * sigma


@pytest.mark.parametrize(
    ("epsilon", "sigma", "scale"),
    [
        (0.5, 5.65685425, 4.0),
        (1.0, 2.82842712, 2.0),
        (4.0, 0.707106781, 0.5),
        (8.0, 0.353553391, 0.25),
    ],
)
def test_laplace_scale_of_the_oracles(epsilon, sigma, scale):
    """The published program takes the standard deviation, ``--sigma``."""
    mechanism = ALIBI(epsilon, 10)
    assert mechanism.scale == scale
    assert mechanism.noise_stddev == pytest.approx(sigma, rel=1e-6)


def test_the_events_say_what_the_mechanism_says():
    assert composed_epsilon([LAPLACE.dp_event()], 0.0) == pytest.approx(1.0, abs=1e-9)
    assert composed_epsilon([GAUSSIAN.dp_event()], 1e-5) == pytest.approx(1.0, rel=1e-3)


def test_no_row_depends_on_another_label():
    other = LABELS.copy()
    other[0] = (other[0] + 1) % 5
    one, two = (LAPLACE.randomize(y, rng=np.random.default_rng(1)) for y in (LABELS, other))
    np.testing.assert_array_equal(one[1:], two[1:])
    differing = np.flatnonzero(one[0] != two[0])
    assert sorted(differing.tolist()) == sorted([int(LABELS[0]), int(other[0])])
    np.testing.assert_allclose(np.abs(one[0] - two[0])[differing], 1.0, atol=1e-5)


# --- The largest entry is a poor label -----------------------------------------------------------


def keep_probability(mechanism):
    """P[the largest entry is the true one], by quadrature."""
    law = stats.laplace(scale=mechanism.scale)
    others = mechanism.num_classes - 1
    kept, _ = integrate.quad(
        lambda x: law.pdf(x - 1.0) * law.cdf(x) ** others, -60.0, 60.0, points=[0.0, 1.0], limit=200
    )
    return kept


@pytest.mark.parametrize(
    ("epsilon", "kept", "response"), [(1.0, 0.163666, 0.231969), (4.0, 0.498907, 0.858486)]
)
def test_the_largest_entry_is_worse_than_randomized_response(epsilon, kept, response):
    mechanism = ALIBI(epsilon, 10)
    assert keep_probability(mechanism) == pytest.approx(kept, abs=2e-6)
    matrix = RandomizedResponse(epsilon, 10).transition_matrix()
    assert matrix[0, 0] == pytest.approx(response, abs=2e-6)
    labels = np.random.default_rng(2).integers(0, 10, 20_000)
    noisy = mechanism.randomize(labels, rng=np.random.default_rng(3))
    hits = int(np.count_nonzero(noisy.argmax(axis=1) == labels))
    assert stats.binomtest(hits, labels.size, kept).pvalue > 1e-6
    assert stats.binomtest(hits, labels.size, response).pvalue < 1e-6


# --- What comes out ------------------------------------------------------------------------------


@BOTH
def test_shape_dtype_and_repeatability(mechanism):
    first, second, other = (
        mechanism.randomize(LABELS[:50], rng=np.random.default_rng(seed)) for seed in (1, 1, 2)
    )
    assert first.shape == (50, 5) and first.dtype == np.float32
    np.testing.assert_array_equal(first, second)
    assert np.all(first != other)
    assert np.all(mechanism.randomize(LABELS[:50]) != mechanism.randomize(LABELS[:50]))
    assert mechanism.randomize(LABELS[:0]).shape == (0, 5)
    assert mechanism.randomize(LABELS[:1].astype(np.uint8)).shape == (1, 5)


@BOTH
def test_chunks_give_every_row_its_own_label(mechanism, monkeypatch):
    monkeypatch.setattr(classes, "_CHUNK_CELLS", 17)  # three rows at a time, the last ones two
    sure = ALIBI(1e6, 5, mechanism.delta, mechanism.noise)
    np.testing.assert_allclose(sure.randomize(LABELS[:50]), np.eye(5)[LABELS[:50]], atol=0.05)
    assert np.unique(mechanism.randomize(LABELS[:50])).size > 240


def test_rounding_to_float32_comes_after_exact_integers():
    """The values are the grid's, rounded once: nothing is added to a float."""
    noisy = LAPLACE._noisy_rows(LABELS[:50], None)
    steps = noisy * _alibi._LAPLACE_UNIT
    np.testing.assert_array_equal(steps, np.rint(steps))


# --- The vault -----------------------------------------------------------------------------------


def vault(epsilon, delta=0.0, **options):
    budget = PrivacyBudget(epsilon, delta)
    return PrivateLabels(LABELS[:200], num_classes=5, budget=budget, **options)


@BOTH
def test_the_vault_charges_once_and_keeps_the_rows(mechanism, tmp_path):
    labels = vault(1.0, mechanism.delta, store=tmp_path / "store")
    first = labels.randomize(mechanism, key="alibi")
    again = labels.randomize(mechanism, key="alibi")
    np.testing.assert_array_equal(first.values, again.values)
    assert first.values.dtype == np.float32 and first.values.shape == (200, 5)
    assert first.mechanism == mechanism and first.priors is None
    np.testing.assert_array_equal(first.indices, np.arange(200))
    assert labels.guarantee().epsilon == 1.0 and labels.guarantee().delta == mechanism.delta
    assert first.guarantee() == again.guarantee() == labels.guarantee()
    with pytest.raises(BudgetExceededError, match="ALIBI"):
        labels.randomize(mechanism, key="second")
    resumed = vault(1.0, mechanism.delta, store=tmp_path / "store")
    assert resumed.guarantee().epsilon == 1.0
    assert resumed.mechanism("alibi") == mechanism
    stored = resumed.randomize(mechanism, key="alibi").values
    np.testing.assert_array_equal(stored, first.values)
    assert stored.dtype == np.float32
    with pytest.raises(LabelStoreError, match="made with other mechanism"):
        resumed.randomize(ALIBI(0.5, 5), key="alibi")


@BOTH
def test_the_rows_of_a_vault_are_those_of_its_labels(mechanism):
    """At next to no noise they are one-hot; for some examples, in the order asked for."""
    sure = ALIBI(1e6, 5, mechanism.delta, mechanism.noise)
    rows = np.array([7, 0, 199, 3])
    noisy = vault(1e6, mechanism.delta).randomize(sure, rows)
    np.testing.assert_array_equal(noisy.indices, rows)
    np.testing.assert_allclose(noisy.values, np.eye(5)[LABELS[rows]], atol=0.05)


@pytest.mark.parametrize("seeded", [False, True])
def test_the_vault_draws_by_its_own_bits(seeded):
    seed = 3 if seeded else None
    first, second = (vault(1.0, insecure_seed=seed).randomize(LAPLACE) for _ in range(2))
    assert np.array_equal(first.values, second.values) == seeded
    assert first.guarantee().seeded == seeded


def test_disjoint_examples_compose_in_parallel():
    labels = vault(1.5)
    labels.randomize(LAPLACE, np.arange(0, 80), key="one")
    labels.randomize(ALIBI(1.5, 5), np.arange(80, 200), key="two")
    assert labels.guarantee().epsilon == 1.5
    labels.randomize(ALIBI(0.5, 5), np.arange(0, 80), key="three")
    assert labels.guarantee().epsilon == 1.5
    with pytest.raises(BudgetExceededError):
        labels.randomize(ALIBI(0.5, 5), np.arange(0, 81), key="four")


def test_a_refused_draw_is_not_charged():
    labels = vault(1.0)
    with pytest.raises(ValueError, match="the labels have 5"):
        labels.randomize(ALIBI(1.0, 6))
    for name in ("priors", "clusters", "features"):
        with pytest.raises(ValueError, match=f"ALIBI takes no {name}"):
            labels.randomize(LAPLACE, **{name: np.zeros((200, 5))})
    with pytest.raises(TypeError, match="mechanism of many labels"):
        labels.release(LAPLACE)
    assert labels.guarantee().epsilon == 0.0
    labels.randomize(LAPLACE)


# --- Bad input -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"delta": 1e-5}, ValueError, "laplace noise needs delta equal to zero"),
        ({"noise": "gaussian"}, ValueError, "gaussian noise needs delta above zero"),
        ({"noise": "normal"}, ValueError, "noise must be one of laplace, gaussian, got 'normal'"),
        ({"noise": ["laplace"]}, ValueError, "noise must be one of"),
        ({"delta": 1.0, "noise": "gaussian"}, ValueError, r"delta must be in \[0, 1\)"),
        ({"delta": float("nan"), "noise": "gaussian"}, ValueError, "delta must be in"),
        ({"delta": "0"}, TypeError, "delta must be a number"),
        ({"num_classes": 1}, ValueError, "num_classes must be at least 2"),
        ({"num_classes": 3.0}, TypeError, "num_classes must be an integer"),
        ({"epsilon": 0.0}, ValueError, "epsilon must be finite and above zero"),
        ({"epsilon": float("nan")}, ValueError, "epsilon must be finite and above zero"),
        ({"epsilon": 9e-7}, ValueError, r"epsilon must be from 1e-06 to 1e\+06 for laplace"),
        ({"epsilon": 1.1e6}, ValueError, r"epsilon must be from 1e-06 to 1e\+06 for laplace"),
        (
            {"epsilon": 9e-4, "delta": 1e-5, "noise": "gaussian"},
            ValueError,
            r"epsilon must be from 0\.001 to 1e\+06 for gaussian",
        ),
    ],
)
def test_bad_settings(settings, error, message):
    with pytest.raises(error, match=message):
        ALIBI(**{"epsilon": 1.0, "num_classes": 3, **settings})


@pytest.mark.parametrize(
    ("labels", "error", "message"),
    [
        (np.array([0, 7, 9]), ValueError, r"must lie in 0\.\.4, but 2 of 3 do not"),
        (np.array([0.0, 1.0]), TypeError, "must be integers"),
        (np.eye(5, dtype=int), ValueError, r"must have shape \(n,\)"),
    ],
    ids=["range", "float", "one-hot"],
)
def test_bad_labels_are_refused_and_not_shown(labels, error, message):
    with pytest.raises(error, match=message) as caught:
        LAPLACE.randomize(labels)
    assert "7" not in str(caught.value) and "9" not in str(caught.value)


@pytest.mark.parametrize("labels", [LABELS[:3], LABELS[:0]], ids=["some", "none"])
def test_rng_of_a_wrong_kind(labels):
    with pytest.raises(TypeError, match=r"rng must be a numpy\.random\.Generator or None"):
        LAPLACE.randomize(labels, rng=np.random.RandomState(0))


def test_a_public_input_is_refused():
    with pytest.raises(ValueError, match=r"ALIBI takes no priors and no clusters: .*Leave"):
        LAPLACE.randomize(LABELS[:3], np.full(5, 0.2))


@pytest.mark.parametrize(
    ("noisy", "message"),
    [
        (np.zeros((2, 5), np.float32), r"shape \(2, 5\), expected \(3, 5\)"),
        (np.zeros((3, 4), np.float32), r"shape \(3, 4\), expected \(3, 5\)"),
        (np.zeros(3, np.float32), r"shape \(3,\), expected \(3, 5\)"),
        (np.zeros((3, 5), np.int64), "dtype int64, expected numbers"),
        (np.full((3, 5), 1e3 * np.nan), "NaN or infinity, expected finite numbers"),
    ],
)
def test_outputs_that_are_no_noisy_rows_are_refused_and_not_shown(noisy, message):
    with pytest.raises(ValueError, match=f"ALIBI returned noisy labels with {message}"):
        LAPLACE.check_output(noisy, 3)
    assert LAPLACE.check_output(np.zeros((3, 5)), 3).dtype == np.float32
