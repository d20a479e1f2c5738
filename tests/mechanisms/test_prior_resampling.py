"""PriorResampling: the drawn channel, exactly, its cost, and bad input."""

from __future__ import annotations

import math
from decimal import Decimal, localcontext
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tf_labeldp.mechanisms import Priors, random_bits
from tf_labeldp.plugins import PriorResampling

RANGE = 1 << 53
BOUNDED = settings(max_examples=100, deadline=None, derandomize=True)
PRIOR = np.array([0.5, 0.3, 0.15, 0.05])
EPSILONS = [1e-12, 1e-3, 0.5, 4.0, 36.0, 100.0, 800.0]
PRIORS = {
    "one": PRIOR,
    "half": np.array([0.5, 0.5]),
    "uniform": np.full(1000, 1e-3),
    "pure": np.array([1.0 - 3e-9, 1e-9, 1e-9, 1e-9]),
    "zero": np.array([0.7, 0.3, 0.0]),
    "denormal": np.array([1.0 - 1e-300, 1e-300]),
    "unnormalised": np.array([0.5, 0.3, 0.2 + 9e-5]),
}


def power_of_e(epsilon):
    """A bound from below and one from above on e^epsilon, for the double epsilon itself."""
    with localcontext() as context:
        context.prec = 420
        value = Fraction(Decimal(epsilon).exp())
    return value * (1 - Fraction(1, 10**60)), value * (1 + Fraction(1, 10**60))


def drawn_units(mechanism, prior):
    """The units of the draw that keep the label, and the units of each class."""
    kept = RANGE - round(mechanism.resampling_probabilities(prior)[0] * RANGE)
    return kept, PriorResampling.prior_units(prior[np.newaxis])[0].tolist()


def worst_ratio(kept, units):
    """Over all pairs of labels and all outputs, as ``resample`` draws with these numbers."""
    total = sum(units)
    by_chance = [Fraction((total - kept) * u, total * total) for u in units]
    return max((Fraction(kept, total) + chance) / chance for chance in by_chance)


@pytest.mark.parametrize("name", PRIORS)
@pytest.mark.holds("mechanisms.PriorResampling")
def test_drawn_channel_is_never_less_private_than_stated(name):
    for epsilon in EPSILONS:
        kept, units = drawn_units(PriorResampling(epsilon, PRIORS[name].size), PRIORS[name])
        assert sum(units) == RANGE and min(units) >= 1 and 0 <= kept < RANGE
        assert worst_ratio(kept, units) <= power_of_e(epsilon)[0]


@pytest.mark.parametrize("name", ["one", "half", "uniform"])
@pytest.mark.holds("mechanisms.PriorResampling")
def test_without_a_given_lambda_the_whole_epsilon_is_used(name):
    for epsilon in (0.1, 1.0, 10.0):
        kept, units = drawn_units(PriorResampling(epsilon, PRIORS[name].size), PRIORS[name])
        assert float(worst_ratio(kept, units)) >= math.exp(epsilon - 1e-9)
        # From the other side: a few units more that keep the label would be too many.
        few = 64 + kept // (1 << 47)
        assert worst_ratio(kept + few, units) > power_of_e(epsilon)[1]


@BOUNDED
@given(
    epsilon=st.floats(1e-9, 80.0),
    least=st.integers(1, RANGE // 2),
)
def test_kept_units_at_any_epsilon_and_least_entry(epsilon, least):
    kept = int(PriorResampling.most_kept_units(epsilon, np.array([least]))[0])
    assert 0 <= kept < RANGE
    ratio = 1 + Fraction(kept * RANGE, (RANGE - kept) * least)
    assert ratio <= power_of_e(epsilon)[0]


@BOUNDED
@given(
    weights=st.lists(st.floats(0.0, 1.0), min_size=2, max_size=12).filter(lambda w: sum(w) > 1e-3)
)
def test_units_are_the_prior_to_a_few_parts_in_2_to_the_53(weights):
    prior = np.array(weights) / np.sum(weights)
    units = PriorResampling.prior_units(prior[np.newaxis])[0]
    assert units.dtype == np.int64 and units.min() >= 1 and units.sum() == RANGE
    assert np.abs(units / RANGE - prior / prior.sum()).max() <= 2.0 * prior.size / RANGE
    others = np.delete(np.arange(prior.size), np.argmax(prior))
    assert np.all(units[others] >= prior[others] * RANGE * (1.0 - 1e-14))


@pytest.mark.parametrize("given_lambda", [None, 0.9])
def test_transition_matrix(worst_log_ratio, given_lambda):
    mechanism = PriorResampling(2.0, 4, given_lambda)
    channel = mechanism.transition_matrix(PRIOR)
    resampled = 1.0 / (1.0 + np.expm1(2.0) * 0.05) if given_lambda is None else given_lambda
    expected = (1.0 - resampled) * np.eye(4) + resampled * PRIOR
    np.testing.assert_allclose(channel, expected, rtol=0, atol=1e-14)
    np.testing.assert_allclose(channel.sum(axis=1), 1.0, rtol=0, atol=1e-14)
    price = math.log1p((1.0 - resampled) / (resampled * 0.05))
    assert price <= 2.0 + 1e-12
    assert worst_log_ratio(channel) == pytest.approx(price, abs=1e-12)


@pytest.mark.parametrize(("kept", "units"), [(0, [20, 10, 6]), (13, [20, 10, 6]), (35, [1, 34, 1])])
@pytest.mark.parametrize("shared", [True, False])
def test_resample_draws_the_channel_of_its_units(monkeypatch, kept, units, shared):
    """Every pair of random integers of a small range, so the channel comes out exactly."""
    size, classes = sum(units), len(units)
    first, second = (grid.ravel().astype(np.uint64) for grid in np.mgrid[:size, :size])
    groups = np.zeros(size**2, np.int64) if shared else np.arange(size**2)
    ends = np.tile(np.cumsum(units), (int(groups.max()) + 1, 1))
    for label in range(classes):
        queue = [first.copy(), second.copy()]
        monkeypatch.setattr(random_bits, "uniform_integers", lambda n, rng, q=queue: q.pop(0))
        labels, keep = np.full(size**2, label), np.full(ends.shape[0], kept)
        noisy = PriorResampling.resample(labels, keep, ends, groups, None)
        expected = [(size - kept) * u for u in units]
        expected[label] += kept * size
        assert np.bincount(noisy, minlength=classes).tolist() == expected


@pytest.mark.parametrize("classes", [2, 3, 8, 9, 1000])
def test_bisection_finds_the_class_of_every_unit(monkeypatch, classes):
    units = np.random.default_rng(classes).integers(1, 5, classes)
    every = np.arange(units.sum()).astype(np.uint64)
    monkeypatch.setattr(random_bits, "uniform_integers", lambda n, rng: every.copy())
    zeros = np.zeros(every.size, np.int64)
    noisy = PriorResampling.resample(
        zeros, np.array([0]), np.cumsum(units)[np.newaxis], zeros, None
    )
    np.testing.assert_array_equal(noisy, np.repeat(np.arange(classes), units))


def frequencies(mechanism, rows, rng=None, per_row=20_000):
    """Counts (rows, K, K) of outputs for every row and label."""
    size, classes = rows.shape
    row, label = (g.ravel() for g in np.mgrid[:size, :classes])
    row, label = np.repeat(row, per_row), np.repeat(label, per_row)
    noisy = mechanism.randomize(label, rows[row], rng=rng)
    flat = (row * classes + label) * classes + noisy
    return np.bincount(flat, minlength=size * classes**2).reshape(size, classes, classes)


@pytest.mark.parametrize("given_lambda", [None, 0.8])
def test_frequencies_are_those_of_the_channel(chi_square_rejects, seeded, given_lambda):
    rows = np.array([PRIOR, [0.1, 0.2, 0.3, 0.4], [0.25] * 4])
    mechanism = PriorResampling(2.5, 4, given_lambda)
    counts = frequencies(mechanism, rows, seeded())
    assert not chi_square_rejects(counts, [mechanism.transition_matrix(row) for row in rows])
    # A lambda that is off by a twentieth, and the prior of another row, are seen.
    wrong = mechanism.resampling_probabilities(rows) * 1.05
    channels = (1.0 - wrong)[:, None, None] * np.eye(4) + wrong[:, None, None] * rows[:, None]
    assert chi_square_rejects(counts, channels)
    assert chi_square_rejects(counts, [mechanism.transition_matrix(row) for row in rows[::-1]])


def test_large_class_sets_are_drawn_in_chunks(seeded):
    size, classes = 3000, 1000
    rows = np.random.default_rng(3).dirichlet(np.ones(classes), size)
    labels = np.arange(size) % classes
    noisy = PriorResampling(3.0, classes).randomize(labels, rows, rng=seeded())
    # The mean prior at a draw is that of sum q^2 / sum q = 2 / (K + 1), twice uniform.
    at_draw = rows[np.arange(size), noisy][noisy != labels]
    assert at_draw.mean() == pytest.approx(2 / (classes + 1), rel=0.2)


def test_a_given_lambda_that_just_fits_is_taken():
    """The price of a lambda, worked out in floating point, may miss e^epsilon by rounding."""
    rng = np.random.default_rng(4)
    for least, given_lambda in zip(
        rng.uniform(1e-9, 0.25, 300), rng.uniform(1e-9, 1, 300), strict=True
    ):
        prior = np.array([1.0 - 3 * least, least, least, least])
        epsilon = math.log1p((1.0 - given_lambda) / given_lambda / least)
        mechanism = PriorResampling(epsilon, 4, float(given_lambda))
        kept, units = drawn_units(mechanism, prior)
        assert worst_ratio(kept, units) <= power_of_e(epsilon)[0]
        assert mechanism.resampling_probabilities(prior)[0] == pytest.approx(
            given_lambda, rel=2e-6, abs=1e-15
        )


def test_a_given_lambda_that_costs_too_much_is_refused_before_anything_is_drawn(monkeypatch):
    def refuse(size, rng):
        raise AssertionError("drawn")

    monkeypatch.setattr(random_bits, "uniform_integers", refuse)
    epsilon = math.log1p((1.0 - 0.5) / (0.5 * 0.05))
    fits = PriorResampling(epsilon, 4, 0.5)
    assert fits.resampling_probabilities(PRIOR) == pytest.approx([0.5], rel=1e-6)
    for wrong in (
        PriorResampling(epsilon - 1e-4, 4, 0.5),
        PriorResampling(epsilon, 4, 0.4999),
    ):
        with pytest.raises(ValueError, match=r"costs more than epsilon=.*1 prior.*Raise epsilon"):
            wrong.randomize([0, 1], np.array([[0.25] * 4, PRIOR]))
    with pytest.raises(ValueError, match="costs more than"):
        fits.transition_matrix([0.5, 0.5, 0.0, 0.0])


def test_lambda_of_one_forgets_the_label():
    mechanism = PriorResampling(1e-9, 4, 1.0)
    np.testing.assert_allclose(mechanism.transition_matrix(PRIOR), np.tile(PRIOR, (4, 1)))
    assert mechanism.resampling_probabilities(PRIOR).tolist() == [1.0]


def test_threshold_refuses_priors_with_a_smaller_entry():
    mechanism = PriorResampling(1.0, 4, threshold=0.05)
    assert mechanism.randomize([0], PRIOR).shape == (1,)
    with pytest.raises(ValueError, match=r"at least threshold=0.05, but 1 row.*uniform"):
        mechanism.randomize([0, 1], np.array([PRIOR, [0.5, 0.31, 0.15, 0.04]]))


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (
            {"resampling_probability": 0.0},
            ValueError,
            r"in \(0, 1\], got 0: with 0",
        ),
        ({"resampling_probability": float("nan")}, ValueError, r"in \(0, 1\], got nan"),
        ({"resampling_probability": "1"}, TypeError, r"number in \(0, 1\], got str"),
        ({"threshold": 0.2501}, ValueError, r"\[0, 0.25\], got 0.2501"),
        ({"threshold": -0.1}, ValueError, "got -0.1"),
    ],
    ids=lambda value: str(sorted(value.items())) if isinstance(value, dict) else "",
)
def test_bad_settings(arguments, error, message):
    with pytest.raises(error, match=message):
        PriorResampling(1.0, 4, **arguments)


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        ([0, 2], "must lie in 0..1, the rows of the priors, got 2"),
        ([0], r"must have shape \(2,\), one per label, got \(1,\)"),
        ([0.0, 1.0], "got dtype float64"),
    ],
)
def test_bad_groups(groups, message):
    priors = Priors(np.array([PRIOR, [0.25] * 4]), np.array(groups))
    with pytest.raises((TypeError, ValueError), match=message):
        PriorResampling(1.0, 4).randomize([0, 1], priors)


def test_priors_are_known_by_their_numbers():
    """However they are held in memory; rows and groups are both looked at."""
    rows = np.random.default_rng(5).dirichlet(np.ones(4), 3)
    groups = np.arange(200) % 3
    known = Priors(rows, groups).digest()
    assert Priors(np.asfortranarray(rows), groups.astype(np.uint8)).digest() == known
    others = [
        Priors(rows[::-1], groups),
        Priors(rows, groups[::-1]),
        Priors(rows, None),
        Priors(rows[groups]),
        Priors(np.nextafter(rows, 1.0), groups),
    ]
    assert known not in {one.digest() for one in others}
    assert len({one.digest() for one in others}) == len(others)


def test_priors_are_like_arrays():
    rows = np.random.default_rng(6).dirichlet(np.ones(4), 3)
    groups = np.arange(20) % 3
    np.testing.assert_array_equal(np.asarray(Priors(rows, groups)), rows[groups])
    np.testing.assert_array_equal(np.asarray(Priors(rows)), rows)
    assert np.asarray(Priors(rows), dtype=np.float32).dtype == np.float32
    assert np.asarray(Priors([0.5, 0.5])).dtype == np.float64
    copied = np.array(Priors(rows))
    copied[:] = 0.0
    assert rows.min() > 0.0
    made = Priors.of([0.5, 0.5])
    assert Priors.of(made) is made and made.receipts == ()
    assert made.guarantee().epsilon == 0.0  # public knowledge
