"""Noise on the integers whose drawn law is known exactly: Laplace, staircase and Gaussian.

Noise computed in floating point is not private, whatever its formula says: which doubles can come
out depends on the label (Mironov 2012, "On significance of the least significant bits for
differential privacy"). Here noise comes from comparisons of uniform integers alone, by the
algorithms of Canonne, Kamath and Steinke 2020, "The discrete Gaussian for differential privacy".
"""

from __future__ import annotations

import abc
import dataclasses
import decimal
import math
from fractions import Fraction

import numpy as np

from tf_labeldp.mechanisms import _random
from tf_labeldp.mechanisms._random import Rng

MIN_EPSILON = 1e-6
MAX_STEPS = 1 << 32
"""Within these no integer here passes 2^63, but with probability e^-1000 (see ``geometric``)."""

MAX_SIGMA = 1 << 26
"""Of Gaussian noise: the square has to fit the 53 bits of ``uniform_below``."""

_RANGE = 1 << 53
_MAX_DECAY = 1024
"""More decay than this in one step is not drawn: e^-1024 is nothing, and integers stay small."""
_FARTHEST = math.isqrt((1 << 63) - 1)
"""Its square still fits 64 bits; at least 45 sigma, where e^-1000 of the draws are."""


def fitting_scale(scale: float, epsilon: float, largest: float) -> float:
    """Returns the scale of noise on the integers, or raises where draws might leave 64 bits."""
    if not scale <= largest:
        raise ValueError(
            f"epsilon={epsilon:g} needs noise that leaves the 64-bit integers. The release would "
            "be indistinguishable from noise; use a larger one."
        )
    return scale


def decay_per_step(epsilon: float, steps: int) -> Fraction:
    """Returns the largest fraction not above epsilon/steps with a denominator up to 2^53.

    Its numerator is no larger: from one on, epsilon/steps has a double's 53 bits in its numerator
    and fewer in its denominator, and comes back as it is. It is not zero.
    """
    fitting_scale(steps / epsilon, epsilon, _RANGE)
    return _fraction_below(min(Fraction(epsilon) / steps, Fraction(_MAX_DECAY)), _RANGE)


def _fraction_below(value: Fraction, limit: int) -> Fraction:
    """Returns the largest fraction not above ``value`` with a denominator of at most ``limit``."""
    if value.denominator <= limit:
        return value
    # The continued fraction ends in the two fractions next to the value, one on each side.
    top, bottom = value.numerator, value.denominator
    p0, q0, p1, q1 = 0, 1, 1, 0
    while q0 + (top // bottom) * q1 <= limit:
        whole = top // bottom
        p0, q0, p1, q1 = p1, q1, p0 + whole * p1, q0 + whole * q1
        top, bottom = bottom, top - whole * bottom
    fill = (limit - q0) // q1
    return min(Fraction(p1, q1), Fraction(p0 + fill * p1, q0 + fill * q1))


def bernoulli_exp(numerators: np.ndarray, denominator: int, rng: Rng) -> np.ndarray:
    """Returns events of probability exp(-n/d), exactly, for each n (m,) in 0..d; ``bool`` (m,).

    Algorithm 1 of Canonne, Kamath and Steinke: go on while a coin of probability n / (d k) shows
    heads, k = 1, 2, ...; the event is that the last k is odd.
    """
    event = np.ones(numerators.size, dtype=bool)
    alive = np.arange(numerators.size)
    k = 1
    while alive.size:
        # The coin is one of 1/k and one of n/d; the cheaper first.
        if k > 1:
            alive = alive[_random.uniform_below(np.full(alive.size, k), rng) == 0]
        if denominator > 1:
            drawn = _random.uniform_below(np.full(alive.size, denominator), rng)
            alive = alive[drawn < numerators[alive]]
        elif k == 1:
            alive = alive[numerators[alive] == 1]
        event[alive] = ~event[alive]
        k += 1
    return event


def geometric(size: int, decay: Fraction, rng: Rng) -> np.ndarray:
    """Returns ``size`` draws x >= 0 of ``P[x] ~ exp(-x decay)``, exactly; ``int64``.

    Algorithm 2 of Canonne, Kamath and Steinke before its sign: u + t v with u < t is geometric with
    decay 1/t, and its quotient by s geometric with decay s/t. v, of mean 0.6, may reach 1,000.
    """
    low = np.empty(size, dtype=np.int64)
    waiting = np.arange(size)
    while waiting.size:
        drawn = _random.uniform_below(np.full(waiting.size, decay.denominator), rng)
        low[waiting] = drawn
        waiting = waiting[~bernoulli_exp(drawn, decay.denominator, rng)]
    count = np.zeros(size, dtype=np.int64)
    going = np.arange(size)
    while going.size:
        going = going[bernoulli_exp(np.ones(going.size, dtype=np.int64), 1, rng)]
        count[going] += 1
    return (low + decay.denominator * count) // decay.numerator


@dataclasses.dataclass(frozen=True)
class IntegerNoise(abc.ABC):
    """Symmetric noise on the integers, epsilon-DP for a shift by up to ``steps``.

    Attributes:
        epsilon: at least ``MIN_EPSILON``.
        steps: N, the largest difference of two labels, in 1..``MAX_STEPS``.
    """

    epsilon: float
    steps: int

    @abc.abstractmethod
    def magnitudes(self, size: int, rng: Rng) -> np.ndarray:
        """Returns draws of |x|, except that 0 counts twice (as 0 and as -0)."""

    @abc.abstractmethod
    def mass(self, x: np.ndarray) -> np.ndarray:
        """Returns P[noise = x] for integers x, given and returned as ``float64``."""

    @abc.abstractmethod
    def tail(self, x: np.ndarray) -> np.ndarray:
        """Returns P[noise >= x] for integers x >= 0, given and returned as ``float64``."""

    def draw(self, size: int, rng: Rng) -> np.ndarray:
        """Returns ``size`` independent draws, ``int64``."""
        return _random.in_blocks(lambda start, stop: self._draw(stop - start, rng), size, rng)

    def _draw(self, size: int, rng: Rng) -> np.ndarray:
        noise = np.empty(size, dtype=np.int64)
        waiting = np.arange(size)
        while waiting.size:
            drawn, signed = _with_sign(self.magnitudes(waiting.size, rng), rng)
            noise[waiting] = drawn
            waiting = waiting[~signed]
        return noise


def _with_sign(magnitudes: np.ndarray, rng: Rng) -> tuple[np.ndarray, np.ndarray]:
    """Returns magnitudes with random signs, and which count: -0 is no second way to draw 0."""
    negative = _random.uniform_below(np.full(magnitudes.size, 2), rng) == 1
    return np.where(negative, -magnitudes, magnitudes), ~(negative & (magnitudes == 0))


class LaplaceNoise(IntegerNoise):
    """Discrete Laplace noise, ``P[x] ~ exp(-|x| epsilon / N)``.

    It is drawn with the decay s/t that is the largest fraction *not above* epsilon/N, so a shift by
    N changes a probability by at most ``exp(N s / t) <= e^epsilon``. The noise is wider than its
    formula by less than one part in 2^50.
    """

    def magnitudes(self, size: int, rng: Rng) -> np.ndarray:
        return geometric(size, decay_per_step(self.epsilon, self.steps), rng)

    def mass(self, x: np.ndarray) -> np.ndarray:
        decay = self.epsilon / self.steps
        return math.tanh(0.5 * decay) * np.exp(-decay * np.abs(x))

    def tail(self, x: np.ndarray) -> np.ndarray:
        decay = self.epsilon / self.steps
        return np.exp(-decay * x) / (1.0 + math.exp(-decay))


@dataclasses.dataclass(frozen=True)
class StaircaseNoise(IntegerNoise):
    """Discrete staircase noise (``ghazi2023``, Definition 24).

    ``|x| = u + N v`` has a weight ``w(u) g^v``, where g >= e^-epsilon is drawn as that of
    ``LaplaceNoise``, and w is 1 for u < r and c for the rest, with e^-epsilon <= c <= 1. Two
    magnitudes at most N apart have the same v, and a ratio of at most 1/c, or (u, v) and
    (u', v + 1) with u' <= u, so w(u) <= w(u'), and a ratio of at most 1/g: e^epsilon in both.

    Attributes:
        epsilon: at least ``MIN_EPSILON``.
        steps: N, the width of a stair.
        first: r, the width of the upper part of a stair, in 1..N.
    """

    first: int

    def lower_threshold(self) -> int:
        """Returns t such that ``uniform_integers < t`` is "in the lower part of the stair"."""
        rest = self.steps - self.first
        if rest == 0:
            return 0
        context = decimal.Context(prec=60)  # operators would round to the caller's precision
        shrink = context.exp(decimal.Decimal(-min(self.epsilon, float(_MAX_DECAY))))
        weight = context.multiply(shrink, rest)
        chance = context.divide(weight, context.add(weight, self.first))
        # Above the rounding errors of the lines before, and then up to the next integer.
        margin = 1 + Fraction(1, 10**20)
        return math.ceil(Fraction(chance) * margin * _RANGE)

    def magnitudes(self, size: int, rng: Rng) -> np.ndarray:
        stair = geometric(size, decay_per_step(self.epsilon, 1), rng)
        lower = _random.uniform_integers(size, rng) < np.uint64(self.lower_threshold())
        width = np.where(lower, max(self.steps - self.first, 1), self.first)
        within = _random.uniform_below(width, rng) + np.where(lower, self.first, 0)
        return within + self.steps * stair

    def mass(self, x: np.ndarray) -> np.ndarray:
        stair, within = np.divmod(np.abs(x), self.steps)
        loss, weight = -math.expm1(-self.epsilon), self._stair_weight()
        levels = stair + (within >= self.first)
        return loss / (2.0 * weight - loss) * np.exp(-self.epsilon * levels)

    def tail(self, x: np.ndarray) -> np.ndarray:
        stair, within = np.divmod(x, self.steps)
        loss, weight = -math.expm1(-self.epsilon), self._stair_weight()
        # What is left of this stair, and then all later ones.
        upper = np.maximum(self.first - within, 0.0)
        lower = self.steps - np.maximum(within, self.first)
        left = loss * upper + math.exp(-self.epsilon) * (loss * lower + weight)
        return left / (2.0 * weight - loss) * np.exp(-self.epsilon * stair)

    def _stair_weight(self) -> float:
        """Returns the sum of w(u) over one stair."""
        return self.first + math.exp(-self.epsilon) * (self.steps - self.first)


def discrete_gaussian(size: int, sigma: int, rng: Rng) -> np.ndarray:
    """Returns ``size`` draws of ``P[x] ~ exp(-x^2 / (2 sigma^2))``, sigma in 1..2^26; ``int64``.

    Algorithm 3 of Canonne, Kamath and Steinke, with t = sigma: a discrete Laplace draw y of scale
    sigma is kept with probability ``exp(-(|y| - sigma)^2 / (2 sigma^2))``; of four draws three are.
    OpenDP's sampler has the same law and is some twenty times slower. ``_grid_noise`` calibrates.
    """
    noise = np.empty(size, dtype=np.int64)
    waiting = np.arange(size)
    square = 2 * sigma * sigma
    while waiting.size:
        magnitudes = geometric(waiting.size, Fraction(1, sigma), rng)
        noise[waiting], signed = _with_sign(magnitudes, rng)
        whole, rest = np.divmod(np.minimum(np.abs(magnitudes - sigma), _FARTHEST) ** 2, square)
        kept = bernoulli_exp(rest, square, rng) & _all_of_exp_one(whole, rng)
        waiting = waiting[~(kept & signed)]
    return noise


def _all_of_exp_one(counts: np.ndarray, rng: Rng) -> np.ndarray:
    """Returns events of probability e^-count, exactly, for each count (m,); ``bool`` (m,)."""
    event = np.ones(counts.size, dtype=bool)
    left = counts.copy()
    going = np.flatnonzero(left > 0)
    while going.size:
        heads = bernoulli_exp(np.ones(going.size, dtype=np.int64), 1, rng)
        event[going[~heads]] = False
        going = going[heads]
        left[going] -= 1
        going = going[left[going] > 0]
    return event
