"""Exact noise on the integers, for labels and for statistics: Laplace, staircase and Gaussian.

Noise computed in floating point is not private, whatever its formula: which doubles can come out
depends on the label (Mironov 2012, "On significance of the least significant bits for differential
privacy"). Noise on labels is made of comparisons of uniform integers alone, by the algorithms of
Canonne, Kamath and Steinke 2020, "The discrete Gaussian for differential privacy". Noise on
statistics has scales beyond 53 bits and comes from OpenDP's exact samplers.
"""

from __future__ import annotations

import dataclasses
import decimal
import functools
import math
from fractions import Fraction
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from tf_labeldp import _validate
from tf_labeldp.accounting.events import gaussian_event, pure_dp_event
from tf_labeldp.accounting.gaussian import gaussian_sigma
from tf_labeldp.mechanisms import random_bits
from tf_labeldp.mechanisms.base import Frozen
from tf_labeldp.mechanisms.random_bits import Rng

if TYPE_CHECKING:
    from tf_labeldp.accounting.events import DpEvent

MIN_EPSILON = 1e-6
MAX_STEPS = 1 << 32
"""Within these no integer here passes 2^63, except with probability e^-1000 (see ``geometric``)."""
MAX_SIGMA = 1 << 26
"""Of ``discrete_gaussian``: the square has to fit the 53 bits of ``uniform_below``."""
LARGEST_SCALE = 2.0**57
"""In grid steps: noise on statistics stays in 64 bits at 40 standard deviations."""

_RANGE = 1 << 53
_MAX_DECAY = 1024
"""Per step: more is drawn as this, since e^-1024 is below any double, and integers stay small."""
_FARTHEST = math.isqrt((1 << 63) - 1)
"""Its square still fits 64 bits; at least 45 sigma, which e^-1000 of the draws pass."""
_MARGIN = 1e-9
"""Relative: epsilon and delta that the grid may cost Gaussian noise."""


class FrozenWithNoise(Frozen):
    """A mechanism with ``noise=``: of a pure kind, or Gaussian with a delta."""

    noise: str
    delta: float
    _noises: ClassVar[tuple[str, ...]]

    def __post_init__(self) -> None:
        super().__post_init__()
        _validate.one_of("noise", self.noise, self._noises)
        delta = _validate.number_in("delta", self.delta, "[0, 1)")
        if (self.noise == "gaussian") != (delta > 0.0):
            raise ValueError(
                f"{self.noise} noise needs delta {'above' if delta == 0.0 else 'equal to'} zero, "
                f"got delta={delta:g}. Gaussian noise takes one below 1/n for n labels."
            )
        self._set(delta=delta)

    def dp_event(self) -> DpEvent:
        """Returns the event of one release: Gaussian, or one that dominates any pure mechanism."""
        if self.noise != "gaussian":
            return pure_dp_event(self.epsilon)
        return gaussian_event(gaussian_sigma(self.epsilon, self.delta, 1.0))


def fitting_scale(scale: float, epsilon: float, largest: float) -> float:
    """Returns the scale of noise on the integers, or raises if draws might leave 64 bits."""
    if not scale <= largest:
        raise ValueError(
            f"epsilon={epsilon:g} needs noise that leaves the 64-bit integers. The release would "
            "be indistinguishable from noise; use a larger one."
        )
    return scale


# --- Statistics: vectors of integers -------------------------------------------------------------


@functools.lru_cache(maxsize=64)
def gaussian_scale(epsilon: float, delta: float, l2_sensitivity: float, num_entries: int) -> float:
    """Returns the sigma of discrete Gaussian noise for (epsilon, delta), in grid steps.

    The analytic calibration is for continuous noise Z; integers plus round(Z) are as private, by
    post-processing. The discrete Gaussian has nearly the law of round(Z): for |x| <= 40 sigma,

    ``P[round(Z) = x] = phi(x) (1 + (x^2 / sigma^2 - 1) / (24 sigma^2) + O(sigma^-4))``,

    so the logarithms differ by at most ``a = 70 m / sigma^2`` over m entries, and beyond lies a
    mass of ``2 m e^-800``, below any delta of a double. Hence (epsilon', delta') for round(Z) is
    (epsilon' + 2 a, e^a delta') for the discrete Gaussian: the noise is calibrated to epsilon and
    delta lowered by one part in 1e9, and 2 a has to be less than that.
    """
    less = 1.0 - _MARGIN
    sigma = gaussian_sigma(epsilon * less, delta * less, l2_sensitivity)
    difference = 70.0 * num_entries / sigma**2
    if 2.0 * difference > _MARGIN * min(epsilon, 1.0):
        raise ValueError(
            f"the grid for exact sums is too coarse for {num_entries} entries at epsilon="
            f"{epsilon:g}: use another epsilon, fewer entries, or the moments of fewer rows."
        )
    return fitting_scale(sigma, epsilon, LARGEST_SCALE)


def laplace_scale(epsilon: float, l1_sensitivity: float) -> float:
    """Returns the scale of discrete Laplace noise in grid steps, which OpenDP may raise."""
    return fitting_scale(math.ceil(l1_sensitivity) / epsilon, epsilon, LARGEST_SCALE)


def with_noise(
    exact: np.ndarray, kind: str, scale: float, epsilon: float, l1_sensitivity: float, rng: Rng
) -> np.ndarray:
    """Returns ``int64`` or ``float64`` numbers (any shape) with independent noise on each.

    Gaussian noise, for integers alone, has a ``scale`` of ``gaussian_scale``. For Laplace noise
    OpenDP's privacy map certifies ``epsilon`` at ``l1_sensitivity``. Without ``rng``, which is for
    repeatable (not private) runs, OpenDP draws from the operating system's random bits: exactly on
    integers, safely in floating point on floats.
    """
    whole = exact.dtype.kind == "i"
    if rng is not None:
        rng = random_bits.checked_generator(rng)
        return exact + _seeded_noise(kind, whole, scale, exact.shape, rng)
    measurement, _ = opendp_noise(kind, whole, scale, epsilon, l1_sensitivity)
    return np.array(measurement(exact.ravel().tolist()), dtype=exact.dtype).reshape(exact.shape)


def _seeded_noise(
    kind: str, whole: bool, scale: float, shape: tuple[int, ...], rng: np.random.Generator
) -> np.ndarray:
    """Returns noise of the same law, up to the rounding of doubles."""
    if kind == "gaussian":
        return np.rint(rng.normal(scale=scale, size=shape)).astype(np.int64)
    if not whole:
        return rng.laplace(scale=scale, size=shape)
    # The difference of two geometric variables has P[k] proportional to e^(-|k| / scale).
    success = -math.expm1(-1.0 / scale)
    return rng.geometric(success, shape) - rng.geometric(success, shape)


@functools.lru_cache(maxsize=64)
def opendp_noise(
    kind: str, whole: bool, scale: float, epsilon: float, l1_sensitivity: float
) -> tuple[Any, float]:
    """Returns OpenDP's measurement that adds noise to a list of numbers, and its scale.

    A Laplace scale rounds to a double, and so does OpenDP's bound on the loss, upwards: the scale
    is raised to the first at which OpenDP itself certifies ``epsilon``, mostly by one step at most.
    """
    from opendp import domains, measurements, metrics, mod

    # OpenDP asks for this before any component whose written proof is not finished.
    mod.enable_features("contrib")
    # Types are given in full: T=int would be 32 bits, at which counts saturate.
    dtype = "i64" if whole else "f64"
    atoms = domains.atom_domain(T="i64") if whole else domains.atom_domain(T="f64", nan=False)
    vectors = domains.vector_domain(atoms)
    if kind == "gaussian":
        return (vectors, metrics.l2_distance(T="f64")) >> measurements.then_gaussian(scale), scale
    distance = math.ceil(l1_sensitivity) if whole else float(l1_sensitivity)
    for _ in range(64):
        space = (vectors, metrics.l1_distance(T=dtype))
        measurement = space >> measurements.then_laplace(scale)
        if measurement.map(distance) <= epsilon:
            return measurement, scale
        scale = math.nextafter(scale, math.inf)
    raise RuntimeError(
        f"OpenDP does not certify epsilon={epsilon} for Laplace noise of scale {scale}. Please "
        "report this with your version of opendp."
    )


# --- Labels: vectorized draws on at most 2^32 steps ----------------------------------------------


def decay_per_step(epsilon: float, steps: int) -> Fraction:
    """Returns the largest fraction not above epsilon/steps with a denominator up to 2^53.

    It is above zero, and its numerator has at most 53 bits too: from one on, epsilon/steps has the
    numerator of a double and a smaller denominator, and comes back as it is.
    """
    fitting_scale(steps / epsilon, epsilon, _RANGE)
    return _fraction_below(min(Fraction(epsilon) / steps, Fraction(_MAX_DECAY)), _RANGE)


def _fraction_below(value: Fraction, limit: int) -> Fraction:
    """Returns the largest fraction not above ``value`` with a denominator of at most ``limit``."""
    nearest = value.limit_denominator(limit)
    if nearest <= value:
        return nearest
    # Of fractions next to each other p/q - p'/q' is 1/(q q'): so p q' = 1 modulo q.
    top, bottom = nearest.as_integer_ratio()
    inverse = pow(top, -1, bottom)
    below = inverse + (limit - inverse) // bottom * bottom
    return Fraction((top * below - 1) // bottom, below)


def bernoulli_exp(numerators: np.ndarray, denominator: int, rng: Rng) -> np.ndarray:
    """Returns events of probability exp(-n/d), exactly, for each n (m,) in 0..d; ``bool`` (m,).

    Algorithm 1 of Canonne, Kamath and Steinke: throw a coin of probability n / (d k) for
    k = 1, 2, ... until it shows tails; the event is that the last k is odd.
    """
    event = np.ones(numerators.size, dtype=bool)
    alive = np.arange(numerators.size)
    k = 1
    while alive.size:
        # The coin is one of 1/k and one of n/d; the cheaper first.
        if k > 1:
            alive = alive[random_bits.uniform_below(np.full(alive.size, k), rng) == 0]
        if denominator > 1:
            drawn = random_bits.uniform_below(np.full(alive.size, denominator), rng)
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
        drawn = random_bits.uniform_below(np.full(waiting.size, decay.denominator), rng)
        low[waiting] = drawn
        waiting = waiting[~bernoulli_exp(drawn, decay.denominator, rng)]
    count = np.zeros(size, dtype=np.int64)
    going = np.arange(size)
    while going.size:
        going = going[bernoulli_exp(np.ones(going.size, dtype=np.int64), 1, rng)]
        count[going] += 1
    return (low + decay.denominator * count) // decay.numerator


@dataclasses.dataclass(frozen=True)
class LaplaceNoise:
    """Discrete Laplace noise, ``P[x] ~ exp(-|x| epsilon / N)``, epsilon-DP for a shift by up to N.

    It is drawn with the decay s/t that is the largest fraction *not above* epsilon/N, so a shift by
    N changes a probability by at most ``exp(N s / t) <= e^epsilon``. The noise is wider than its
    formula by less than one part in 2^50.

    Attributes:
        epsilon: at least ``MIN_EPSILON``.
        steps: N, the largest difference of two labels, in 1..``MAX_STEPS``.
    """

    epsilon: float
    steps: int

    def draw(self, size: int, rng: Rng) -> np.ndarray:
        """Returns ``size`` independent draws, ``int64``."""
        return random_bits.in_blocks(lambda start, stop: self._draw(stop - start, rng), size, rng)

    def _draw(self, size: int, rng: Rng) -> np.ndarray:
        noise = np.empty(size, dtype=np.int64)
        waiting = np.arange(size)
        while waiting.size:
            noise[waiting], kept = _with_sign(self.magnitudes(waiting.size, rng), rng)
            waiting = waiting[~kept]
        return noise

    def magnitudes(self, size: int, rng: Rng) -> np.ndarray:
        """Returns draws of |x|, except that 0 counts twice (as 0 and as -0)."""
        return geometric(size, decay_per_step(self.epsilon, self.steps), rng)

    def mass(self, x: np.ndarray) -> np.ndarray:
        """Returns P[noise = x] for integers x, as ``float64`` like x."""
        decay = self.epsilon / self.steps
        return math.tanh(0.5 * decay) * np.exp(-decay * np.abs(x))

    def tail(self, x: np.ndarray) -> np.ndarray:
        """Returns P[noise >= x] for integers x >= 0, as ``float64`` like x."""
        decay = self.epsilon / self.steps
        return np.exp(-decay * x) / (1.0 + math.exp(-decay))


def _with_sign(magnitudes: np.ndarray, rng: Rng) -> tuple[np.ndarray, np.ndarray]:
    """Returns magnitudes with random signs, and which to keep: -0 is no second way to draw 0."""
    negative = random_bits.uniform_below(np.full(magnitudes.size, 2), rng) == 1
    return np.where(negative, -magnitudes, magnitudes), ~(negative & (magnitudes == 0))


@dataclasses.dataclass(frozen=True)
class StaircaseNoise(LaplaceNoise):
    """Discrete staircase noise (``ghazi2023``, Definition 24).

    ``|x| = u + N v`` has a weight ``w(u) g^v``, where g >= e^-epsilon is drawn as in
    ``LaplaceNoise``, and w is 1 for u < r and c for the rest, with e^-epsilon <= c <= 1. Two
    magnitudes at most N apart have the same v, and a ratio of at most 1/c, or (u, v) and
    (u', v + 1) with u' <= u, so w(u) <= w(u'), and a ratio of at most 1/g: e^epsilon in both.

    Attributes:
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
        lower = random_bits.uniform_integers(size, rng) < np.uint64(self.lower_threshold())
        width = np.where(lower, max(self.steps - self.first, 1), self.first)
        within = random_bits.uniform_below(width, rng) + np.where(lower, self.first, 0)
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
        return self.first + math.exp(-self.epsilon) * (self.steps - self.first)


def discrete_gaussian(size: int, sigma: int, rng: Rng) -> np.ndarray:
    """Returns ``size`` draws of ``P[x] ~ exp(-x^2 / (2 sigma^2))``, sigma in 1..2^26; ``int64``.

    Algorithm 3 of Canonne, Kamath and Steinke, with t = sigma: a discrete Laplace draw y of scale
    sigma is kept with probability ``exp(-(|y| - sigma)^2 / (2 sigma^2))``; of four draws three are.
    OpenDP's sampler has the same law and is some twenty times slower.
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
    going = np.flatnonzero(counts > 0)
    thrown = 0
    while going.size:
        heads = bernoulli_exp(np.ones(going.size, dtype=np.int64), 1, rng)
        event[going[~heads]] = False
        thrown += 1
        going = going[heads & (counts[going] > thrown)]
    return event
