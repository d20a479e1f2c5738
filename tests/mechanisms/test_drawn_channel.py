"""What is really drawn: integer thresholds in exact arithmetic, and the code enumerated."""

from __future__ import annotations

from decimal import Decimal, localcontext
from fractions import Fraction

import numpy as np
import pytest

from tf_labeldp.accounting import Charge
from tf_labeldp.mechanisms import RandomizedResponse, classes, random_bits
from tf_labeldp.plugins import uniform_below, uniform_integers

RANGE = 1 << 53


def power_of_e(epsilon):
    """A bound from below and one from above on e^epsilon, for the double epsilon itself."""
    with localcontext() as context:
        context.prec = 420
        value = Fraction(Decimal(epsilon).exp())
    return value * (1 - Fraction(1, 10**60)), value * (1 + Fraction(1, 10**60))


def largest_ratio(k, threshold):
    """The worst ratio of the drawn RRTop-k, with inputs inside and outside the set."""
    keep = Fraction(RANGE - threshold, RANGE)
    other = Fraction(threshold, RANGE * (k - 1))
    outcomes = (keep, other, Fraction(1, k))
    return max(outcomes) / min(outcomes)


@pytest.mark.parametrize("k", [2, 3, 10, 1000])
@pytest.mark.parametrize("epsilon", [1e-9, 1e-3, 0.3, 1.0, 5.0, 40.0, 100.0, 800.0])
def test_drawn_channel_is_never_less_private_than_stated(epsilon, k):
    threshold = int(random_bits.flip_threshold(epsilon, np.array([k]))[0])
    lower, upper = power_of_e(epsilon)
    assert largest_ratio(k, threshold) <= lower
    # From the other side: the rounding costs a few units of 2^-53, not more.
    exact = Fraction(k - 1) / (upper + k - 1) * RANGE
    assert threshold - exact <= 1 + exact * Fraction(8, 1 << 52)
    if exact > 100:
        too_small = threshold - 2 - int(exact * Fraction(8, 1 << 52))
        assert largest_ratio(k, too_small) > upper


@pytest.mark.parametrize("epsilon", [1e-9, 1e-6, 1.0])
def test_the_most_classes_are_drawn_and_priced_as_stated(epsilon):
    """With more, rounding would cost more than epsilon; from 2^53 on a draw would not end."""
    most = int(min(1e9, epsilon * 2.0**49))
    mechanism = RandomizedResponse(epsilon, most)
    assert mechanism.randomize([0, 1]).max() < most
    threshold = int(random_bits.flip_threshold(epsilon, np.array([most]))[0])
    assert largest_ratio(most, threshold) <= power_of_e(epsilon)[0]
    assert Charge.of_event(mechanism.dp_event(), 0.0).epsilon >= epsilon
    for number in (most + 1, 10**16):
        with pytest.raises(ValueError, match=f"num_classes must be at most {most:,} at epsilon="):
            RandomizedResponse(epsilon, number)


def test_a_set_of_one_never_flips_and_a_larger_one_always_can():
    assert random_bits.flip_threshold(1.0, np.array([1, 2])).tolist()[0] == 0
    assert random_bits.flip_threshold(800.0, np.array([2, 7])).min() == 1


@pytest.mark.parametrize("k", [1, 2, 5])
@pytest.mark.parametrize("epsilon", [0.2, 3.0])
def test_draw_ranks_draws_the_channel_of_its_threshold(monkeypatch, epsilon, k):
    """Every pair of random integers of a small range, so the channel comes out exactly."""
    size, num_classes = 60, 6  # 60 is a multiple of every bound, so nothing is drawn again
    flips, targets = (grid.ravel().astype(np.uint64) for grid in np.mgrid[:size, :size])
    monkeypatch.setattr(random_bits, "_RANGE", np.uint64(size))
    threshold = int(random_bits.flip_threshold(epsilon, np.array([k]))[0])
    for rank in range(num_classes):
        queue = [flips.copy(), targets.copy()]
        monkeypatch.setattr(random_bits, "uniform_integers", lambda n, rng, q=queue: q.pop(0))
        drawn = classes.draw_ranks(np.full(size**2, rank), np.full(size**2, k), epsilon, rng=None)
        counts = np.bincount(drawn, minlength=num_classes)
        if rank >= k:
            expected = [size**2 // k] * k
        else:
            expected = [size * threshold // max(k - 1, 1)] * k
            expected[rank] = size * (size - threshold) if k > 1 else size**2
        assert counts.tolist() == expected + [0] * (num_classes - k)


def test_uniform_below_draws_again_beyond_the_last_multiple(monkeypatch):
    monkeypatch.setattr(random_bits, "_RANGE", np.uint64(16))
    queue = [np.arange(16, dtype=np.uint64), np.array([15], np.uint64), np.array([7], np.uint64)]
    monkeypatch.setattr(random_bits, "uniform_integers", lambda n, rng: queue.pop(0))
    drawn = uniform_below(np.full(16, 3), rng=None)
    assert np.bincount(drawn[:15]).tolist() == [5, 5, 5]  # all of 0..14, which favours none
    assert drawn[15] == 7 % 3  # 15 was refused twice
    assert not queue


def test_uniform_integers_fill_their_range():
    for rng in (None, np.random.default_rng(3)):
        drawn = uniform_integers(200_000, rng)
        assert drawn.dtype == np.uint64
        assert int(drawn.max()) < RANGE
        bits = (drawn[:, np.newaxis] >> np.arange(53, dtype=np.uint64)) & np.uint64(1)
        # Every bit is fair: 6.5 standard deviations, 53 bits, two-sided, below 1e-8 in all.
        assert np.abs(bits.mean(axis=0) - 0.5).max() < 6.5 * 0.5 / np.sqrt(200_000)
