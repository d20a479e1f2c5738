"""Exact noise on the integers, for labels and for statistics: Laplace, staircase and Gaussian.

Noise computed in floating point is not private, since the set of possible doubles depends on the
label (Mironov 2012, "On significance of the least significant bits for differential privacy").
A law of noise is a frozen value, and additive mechanisms differ by their law alone. ``draw`` gives
the noise of labels, by comparing uniform integers with the algorithms of Canonne, Kamath and
Steinke 2020, "The discrete Gaussian for differential privacy". ``add_to`` gives a noisy statistic,
whose scale may exceed 53 bits, by OpenDP's exact samplers.
"""

from __future__ import annotations

import abc
import dataclasses
import decimal
import functools
import math
from fractions import Fraction
from typing import Any, ClassVar

import numpy as np

from tf_labeldp import _validate
from tf_labeldp.accounting.events import EventFields
from tf_labeldp.accounting.gaussian import gaussian_sigma
from tf_labeldp.mechanisms import random_bits
from tf_labeldp.mechanisms.base import Frozen
from tf_labeldp.mechanisms.random_bits import UNITS, Rng

MIN_EPSILON = 1e-6
"""The smallest epsilon of noise on labels."""
MAX_STEPS = 1 << 32
"""Grid steps between the ends of a label range. With ``MIN_EPSILON``, draws exceed 63 bits with
probability e^-1000 (see ``geometric``)."""
MAX_SIGMA = 1 << 26
"""The largest sigma of ``discrete_gaussian``, whose square must fit 53 random bits."""
LARGEST_SCALE = 2.0**57
"""Scale, in grid steps, at which noise on statistics fits 64 bits up to 40 standard deviations."""

_MAX_DECAY = 1024
"""The largest decay per step, which keeps integers small; e^-1024 is below any double."""
_FARTHEST = math.isqrt((1 << 63) - 1)
"""The largest distance whose square fits 63 bits: 45 sigma or more, exceeded with odds e^-1000."""
_MARGIN = 1e-9
"""Share of epsilon and delta that the grid may cost Gaussian noise."""


class FrozenWithNoise(Frozen):
    """A mechanism with an argument ``noise``: pure noise, or Gaussian noise with a delta."""

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
                f"got delta={delta:g}. For Gaussian noise on n labels use delta below 1/n."
            )
        self._set(delta=delta)

    def _event_fields(self) -> EventFields:
        """Returns the Gaussian event, or the event that dominates all pure mechanisms."""
        if self.noise != "gaussian":
            return super()._event_fields()
        return EventFields.gaussian(gaussian_sigma(self.epsilon, self.delta, 1.0))


def fitting_scale(scale: float, epsilon: float, largest: float) -> float:
    """Returns the scale of integer noise, or raises if draws might exceed 64 bits."""
    if not scale <= largest:
        raise ValueError(
            f"epsilon={epsilon:g} needs noise that leaves the 64-bit integers. Raise epsilon: the "
            "release would be all noise."
        )
    return scale


# --- Statistics: vectors of integers -------------------------------------------------------------


@functools.lru_cache(maxsize=64)
def gaussian_scale(epsilon: float, delta: float, l2_sensitivity: float, num_entries: int) -> float:
    """Returns the sigma of discrete Gaussian noise for (epsilon, delta), in grid steps.

    The analytic calibration is for continuous noise Z; integers plus round(Z) are as private, by
    post-processing. The discrete Gaussian has nearly the law of round(Z): for x within 40 sigma,

    ``P[round(Z) = x] = phi(x) (1 + (x^2 / sigma^2 - 1) / (24 sigma^2) + O(sigma^-4))``,

    so the logarithms differ by at most ``a = 70 m / sigma^2`` over m entries. The mass beyond is
    ``2 m e^-800``, less than any delta that is a double. So (epsilon', delta') for round(Z) implies
    (epsilon' + 2 a, e^a delta') for the discrete Gaussian: the noise is calibrated to epsilon and
    delta lowered by one part in 1e9, and 2 a must be smaller than that part.
    """
    less = 1.0 - _MARGIN
    sigma = gaussian_sigma(epsilon * less, delta * less, l2_sensitivity)
    difference = 70.0 * num_entries / sigma**2
    if 2.0 * difference > _MARGIN * min(epsilon, 1.0):
        raise ValueError(
            f"the grid for exact sums is too coarse for {num_entries} entries at epsilon="
            f"{epsilon:g}. Use another epsilon, fewer entries, or the moments of fewer rows."
        )
    return fitting_scale(sigma, epsilon, LARGEST_SCALE)


def with_noise(
    exact: np.ndarray, kind: str, scale: float, epsilon: float, l1_sensitivity: float, rng: Rng
) -> np.ndarray:
    """Returns ``int64`` or ``float64`` numbers (any shape) with independent noise on each.

    Gaussian noise needs integers, and a ``scale`` from ``gaussian_scale``. For Laplace noise
    OpenDP's privacy map certifies ``epsilon`` at ``l1_sensitivity``. Without ``rng``, which is for
    repeatable (not private) runs, OpenDP uses the operating system's random bits: its samplers are
    exact on integers and safe in floating point.
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
    # Floating-point noise reveals low bits of a sum, so these draws are for repeatable runs alone.
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

    OpenDP rounds its bound on the loss up, so a Laplace scale is raised, double by double, until
    OpenDP certifies ``epsilon``.
    """
    from opendp import domains, measurements, metrics, mod

    # OpenDP requires this for components whose written proof is not finished.
    mod.enable_features("contrib")
    # Types are explicit, since T=int would mean 32 bits, at which counts saturate.
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
        f"OpenDP does not certify epsilon={epsilon} for Laplace noise of scale {scale}. Report "
        "this with your version of opendp."
    )


# --- Labels: vectorized draws on at most 2^32 steps ----------------------------------------------


def decay_per_step(epsilon: float, steps: int) -> Fraction:
    """Returns the largest fraction up to epsilon/steps with a denominator up to 2^53.

    The fraction is above zero, and its numerator has at most 53 bits too: an epsilon/steps of one
    or more has the numerator of a double and a small denominator, and is returned unchanged.
    """
    fitting_scale(steps / epsilon, epsilon, UNITS)
    return _fraction_below(min(Fraction(epsilon) / steps, Fraction(_MAX_DECAY)), UNITS)


def _fraction_below(value: Fraction, limit: int) -> Fraction:
    """Returns the largest fraction not above ``value`` with a denominator of at most ``limit``."""
    nearest = value.limit_denominator(limit)
    if nearest <= value:
        return nearest
    # Neighbouring fractions p/q and p'/q' differ by 1/(q q'), so p q' = 1 modulo q.
    top, bottom = nearest.as_integer_ratio()
    inverse = pow(top, -1, bottom)
    below = inverse + (limit - inverse) // bottom * bottom
    return Fraction((top * below - 1) // bottom, below)


def bernoulli_exp(numerators: np.ndarray, denominator: int, rng: Rng) -> np.ndarray:
    """Returns events of probability exp(-n/d), exactly, for each n (m,) in 0..d; ``bool`` (m,).

    Algorithm 1 of Canonne, Kamath and Steinke: toss a coin with probability n / (d k) of heads for
    k = 1, 2, ... until it shows tails; the event is that the last k is odd.
    """
    event = np.ones(numerators.size, dtype=bool)
    alive = np.arange(numerators.size)
    k = 1
    while alive.size:
        # The coin is made of two, with odds 1/k and n/d; the cheaper one is tossed first.
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
    """Returns ``size`` exact draws x >= 0 with ``P[x] ~ exp(-x decay)``, ``int64``.

    Algorithm 2 of Canonne, Kamath and Steinke without its sign: u + t v with u < t is geometric
    with decay 1/t, and its quotient by s is geometric with decay s/t. The mean of v is 0.6; v may
    reach 1,000.
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
class ShiftNoise(abc.ABC):
    """A law of symmetric noise on the integers that is epsilon-DP for a shift by up to N.

    Attributes:
        epsilon: finite and above zero; at least ``MIN_EPSILON`` for ``draw``.
        steps: N, the largest difference of two inputs; in 1..``MAX_STEPS`` for ``draw``.
    """

    epsilon: float
    steps: int

    def draw(self, size: int, rng: Rng) -> np.ndarray:
        """Returns ``size`` independent draws, ``int64``."""
        return random_bits.in_blocks(
            lambda start, stop: self._draw_block(stop - start, rng), size, rng
        )

    def _draw_block(self, size: int, rng: Rng) -> np.ndarray:
        noise = np.empty(size, dtype=np.int64)
        waiting = np.arange(size)
        while waiting.size:
            noise[waiting], kept = _with_sign(self.magnitudes(waiting.size, rng), rng)
            waiting = waiting[~kept]
        return noise

    @abc.abstractmethod
    def magnitudes(self, size: int, rng: Rng) -> np.ndarray:
        """Returns draws of |x|, in which 0 has twice its probability (as 0 and as -0)."""

    @abc.abstractmethod
    def mass(self, x: np.ndarray) -> np.ndarray:
        """Returns P[noise = x] for integers x, as ``float64`` like x."""

    @abc.abstractmethod
    def tail(self, x: np.ndarray) -> np.ndarray:
        """Returns P[noise >= x] for integers x >= 0, as ``float64`` like x."""


@dataclasses.dataclass(frozen=True)
class LaplaceNoise(ShiftNoise):
    """Discrete Laplace noise, ``P[x] ~ exp(-|x| epsilon / N)``.

    The draws use the largest fraction s/t up to epsilon/N as their decay, so a shift by N changes a
    probability by a factor of at most ``exp(N s / t) <= e^epsilon``. The noise is wider than the
    formula by less than one part in 2^50.
    """

    spread: ClassVar[float] = math.sqrt(2.0)
    """Standard deviation of the continuous law over its scale."""

    @property
    def scale(self) -> float:
        """The scale in grid steps, N / epsilon."""
        return fitting_scale(self.steps / self.epsilon, self.epsilon, LARGEST_SCALE)

    @property
    def stddev(self) -> float:
        """The standard deviation of the discrete law, in grid steps."""
        return discrete_laplace_stddev(self.epsilon / self.steps)

    def add_to(self, exact: np.ndarray, rng: Rng) -> np.ndarray:
        """Returns a statistic whose L1 sensitivity is N with noise; continuous noise for floats."""
        return with_noise(exact, "laplace", self.scale, self.epsilon, self.steps, rng)

    def magnitudes(self, size: int, rng: Rng) -> np.ndarray:
        return geometric(size, decay_per_step(self.epsilon, self.steps), rng)

    def mass(self, x: np.ndarray) -> np.ndarray:
        decay = self.epsilon / self.steps
        return math.tanh(0.5 * decay) * np.exp(-decay * np.abs(x))

    def tail(self, x: np.ndarray) -> np.ndarray:
        decay = self.epsilon / self.steps
        return np.exp(-decay * x) / (1.0 + math.exp(-decay))


def discrete_laplace_stddev(decay: float) -> float:
    """Returns the standard deviation of discrete Laplace noise with this decay per grid step."""
    # Above, sinh overflows; the noise is zero except with probability e^-1000.
    return math.sqrt(0.5) / math.sinh(0.5 * decay) if decay < 1e3 else 0.0


@dataclasses.dataclass(frozen=True)
class StaircaseNoise(ShiftNoise):
    """Discrete staircase noise (``ghazi2023``, Definition 24).

    ``|x| = u + N v`` has the weight ``w(u) g^v``, where g >= e^-epsilon is drawn as in
    ``LaplaceNoise``, and w is 1 for u < r and c for the rest, with e^-epsilon <= c <= 1. Two
    magnitudes at most N apart either share v, with a ratio of at most 1/c, or are (u, v) and
    (u', v + 1) with u' <= u, so w(u) <= w(u'), with a ratio of at most 1/g. Both ratios are at most
    e^epsilon.

    Attributes:
        first: r, the width of a stair's upper part, in 1..N.
    """

    first: int

    def lower_threshold(self) -> int:
        """Returns t such that ``uniform_integers < t`` selects the lower part of the stair."""
        rest = self.steps - self.first
        if rest == 0:
            return 0
        # Methods of the context keep its precision; operators would use the caller's.
        context = decimal.Context(prec=60)
        shrink = context.exp(decimal.Decimal(-min(self.epsilon, float(_MAX_DECAY))))
        weight = context.multiply(shrink, rest)
        chance = context.divide(weight, context.add(weight, self.first))
        # The margin covers the rounding errors of the lines before; ceil rounds up too.
        margin = 1 + Fraction(1, 10**20)
        return math.ceil(Fraction(chance) * margin * UNITS)

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
        # The tail is the rest of this stair and all later stairs.
        upper = np.maximum(self.first - within, 0.0)
        lower = self.steps - np.maximum(within, self.first)
        left = loss * upper + math.exp(-self.epsilon) * (loss * lower + weight)
        return left / (2.0 * weight - loss) * np.exp(-self.epsilon * stair)

    def _stair_weight(self) -> float:
        return self.first + math.exp(-self.epsilon) * (self.steps - self.first)


@dataclasses.dataclass(frozen=True)
class DiscreteGaussian:
    """Discrete Gaussian noise, ``P[x] ~ exp(-x^2 / (2 scale^2))``.

    Attributes:
        scale: sigma in grid steps, as of ``gaussian_scale``; a whole number for ``draw``.
    """

    scale: float

    spread: ClassVar[float] = 1.0
    """Standard deviation over the scale."""

    def draw(self, size: int, rng: Rng) -> np.ndarray:
        """Returns ``size`` independent draws, ``int64``."""
        return discrete_gaussian(size, int(self.scale), rng)

    def add_to(self, exact: np.ndarray, rng: Rng) -> np.ndarray:
        """Returns a statistic of integers with noise."""
        return with_noise(exact, "gaussian", self.scale, 0.0, 0.0, rng)


def _with_sign(magnitudes: np.ndarray, rng: Rng) -> tuple[np.ndarray, np.ndarray]:
    """Returns magnitudes with random signs, and whether to keep each; -0 is drawn again."""
    negative = random_bits.uniform_below(np.full(magnitudes.size, 2), rng) == 1
    return np.where(negative, -magnitudes, magnitudes), ~(negative & (magnitudes == 0))


def discrete_gaussian(size: int, sigma: int, rng: Rng) -> np.ndarray:
    """Returns ``size`` draws with ``P[x] ~ exp(-x^2 / (2 sigma^2))``, ``int64``; sigma in 1..2^26.

    Algorithm 3 of Canonne, Kamath and Steinke, with t = sigma: a discrete Laplace draw y of scale
    sigma is kept with probability ``exp(-(|y| - sigma)^2 / (2 sigma^2))``, three times in four.
    OpenDP's sampler has the same law and takes about twenty times as long.
    """
    noise = np.empty(size, dtype=np.int64)
    waiting = np.arange(size)
    square = 2 * sigma * sigma
    while waiting.size:
        magnitudes = geometric(waiting.size, Fraction(1, sigma), rng)
        noise[waiting], signed = _with_sign(magnitudes, rng)
        whole, rest = np.divmod(np.minimum(np.abs(magnitudes - sigma), _FARTHEST) ** 2, square)
        kept = bernoulli_exp(rest, square, rng)
        # A geometric draw of decay one reaches the whole part w with probability e^-w.
        kept &= geometric(rest.size, Fraction(1), rng) >= whole
        waiting = waiting[~(kept & signed)]
    return noise
