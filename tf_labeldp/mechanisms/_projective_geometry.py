"""Projective geometry response: one integer per label, for many classes."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import sys
from typing import Any

import numpy as np

from tf_labeldp import _validate
from tf_labeldp.accounting import Public
from tf_labeldp.mechanisms import random_bits
from tf_labeldp.mechanisms.base import FrozenClassification, WithoutPriors
from tf_labeldp.mechanisms.classes import check_number, row_chunks
from tf_labeldp.mechanisms.random_bits import Rng

_MOST_CLASSES = 1 << 24
"""With more, products of coordinates would exceed the whole numbers of doubles."""
_COPIES = 6
"""Doubles per hyperplane that a Fourier transform of counts needs at a time."""
_ROUNDED_UP = 1.0 + 2.0**-48
"""Factor above the rounding of a ratio of two integers, for a flip that is never too rare."""


@dataclasses.dataclass(frozen=True)
class ProjectiveGeometryResponse(WithoutPriors, FrozenClassification):
    """Answers a set of classes, which contains the label more often than any other class.

    For many classes: from about 50 on. The error of shares does not grow with K, and the noise of
    ``debiased()`` targets grows with ``sqrt(K)``: both by ``sqrt(K)`` less than under
    ``RandomizedResponse``.

    Classes are points of the projective space of dimension t - 1 over the integers modulo a prime
    q, and a noisy label is the number of a hyperplane, the set of its points: about K / q of them.
    Any two classes share equally many hyperplanes. A noisy label is no class; use ``posterior()``,
    ``debiased()``, ``class_shares()`` or ``members``. For q = 2 this is the Hadamard response.

    The variance of shares is least near ``q = e^eps + 1``: within 3 % of the best mechanism's
    (subset selection) from 100 classes on. A model that already knows the few likely classes of
    an example learns most from sets that separate a pair, best near ``q = e^(eps / 2) + 1`` (our
    derivation, docs/theory.md, many classes). At epsilon 4 these won 1 to 3 points of accuracy with
    500 examples per class and lost 29 with 50; below 2 the two hardly differ.

    Guarantee:
        (epsilon, 0)-DP for the replacement of one label: a hyperplane has one probability for all
        classes in it and another for all others, in the ratio e^epsilon. If two classes differ in
        a hyperplane, as any two do, the worst log-ratio equals epsilon.

    Source: Feldman, Nelson, Nguyen and Talwar 2022, "Private frequency estimation via projective
    geometry"; the lower bound is Ye and Barg 2018. Rates of optimisation: Chua et al. 2026,
    "Convex optimization with local label differential privacy".

    Attributes:
        epsilon: finite and above zero.
        num_classes: K, from 2 to 2^24.
        best_for: ``"shares"``, or ``"pairs"`` for many examples per class: what q is best for.

    Example:
        >>> mechanism = ProjectiveGeometryResponse(epsilon=1.0, num_classes=1000)
        >>> noisy = mechanism.randomize([3, 999])
        >>> noisy.shape, mechanism.num_outputs, mechanism.members(noisy).shape
        ((2,), 1093, (2, 1000))
    """

    has_keyed_draws = True

    best_for: str = "shares"

    outputs_are_classes = False

    def __post_init__(self) -> None:
        super().__post_init__()
        _validate.one_of("best_for", self.best_for, ("shares", "pairs"))
        check_number(self, _MOST_CLASSES)

    @property
    def num_outputs(self) -> int:
        """The number of hyperplanes, M: ``(q^t - 1) / (q - 1)``, at least K."""
        return self._space.num_points

    @property
    def inclusion_probabilities(self) -> tuple[float, float]:
        """Probabilities that the answered set contains the label, and that it contains another."""
        return self._space.inclusion_probabilities(self.epsilon)

    def members(self, noisy: Public[Any]) -> np.ndarray:
        """Returns whether each noisy label's set contains each class, ``bool`` (m, K).

        ``noisy`` are noisy labels (m,), integers in 0..M-1.
        """
        noisy = _validate.class_indices("noisy labels", noisy, self.num_outputs)
        instead = "Pass some noisy labels at a time."
        _validate.check_size("sets", (noisy.size, self.num_classes), instead)
        found = np.empty((noisy.size, self.num_classes), dtype=bool)
        for rows in row_chunks(found.shape):
            found[rows] = self._space.contains(noisy[rows], self._class_points)
        return found

    def set_counts(self, noisy: Public[Any]) -> np.ndarray:
        """Returns the number of noisy labels (m,) whose set contains each class, (K,).

        It takes about ``K min(q, m / q)`` steps, and memory for M numbers at most: no table of
        noisy labels and classes.
        """
        noisy = _validate.class_indices("noisy labels", noisy, self.num_outputs)
        distinct, repeats = np.unique(noisy, return_counts=True)
        if distinct.size < self._space.prime**2:
            return self._space.sums_of_few(distinct, repeats, self.num_classes)
        _validate.check_size("counts", (self.num_outputs, _COPIES), "Merge rare classes.")
        counts = np.bincount(noisy, minlength=self.num_outputs)
        return self._space.sums(counts, self._class_points)

    def likelihood(
        self, noisy: Public[np.ndarray], priors: Public[np.ndarray | None] = None
    ) -> np.ndarray:
        """Returns ``P[noisy label | class]``, ``float64`` (m, K); ``priors`` is None."""
        self._refuse_public(priors)
        shrink = math.exp(-self.epsilon)
        most = 1.0 / (self._space.within + self._space.beyond * shrink)
        return np.where(self.members(noisy), most, most * shrink)

    def _noisy(self, labels: Any, rng: Rng) -> np.ndarray:
        labels = _validate.class_indices("labels", labels, self.num_classes)
        space = self._space
        ratio = np.array([1.0 + _ROUNDED_UP * space.beyond / space.within])
        threshold = random_bits.flip_threshold(self.epsilon, ratio)

        flip = random_bits.uniform_integers(labels.size, rng) < threshold
        choice = random_bits.uniform_below(np.where(flip, space.beyond, space.within), rng)
        noisy = np.empty_like(labels)
        for some in row_chunks((labels.size, space.num_coordinates)):
            noisy[some] = space.hyperplane(labels[some], flip[some], choice[some])
        return noisy

    @property
    def _space(self) -> _Space:
        return _best_space(self)

    @property
    def _class_points(self) -> np.ndarray:
        return _first_points(self._space, self.num_classes)


@dataclasses.dataclass(frozen=True)
class _Space:
    """The projective space of dimension t - 1 over the integers modulo the prime q.

    A point has t coordinates, of which the first that is not zero is one: the digits, in base q, of
    a number whose first digit is one. Points count in the order of these numbers; hyperplanes have
    the numbers of their normals. Coordinates are ``int64`` (t, m).
    """

    prime: int
    num_coordinates: int

    @property
    def num_points(self) -> int:
        """The number of points, and of hyperplanes."""
        return (self.prime**self.num_coordinates - 1) // (self.prime - 1)

    @property
    def within(self) -> int:
        """The number of hyperplanes through a point; each contains as many points."""
        return (self.prime ** (self.num_coordinates - 1) - 1) // (self.prime - 1)

    @property
    def beyond(self) -> int:
        """The number of hyperplanes without a point."""
        return self.prime ** (self.num_coordinates - 1)

    def inclusion_probabilities(self, epsilon: float) -> tuple[float, float]:
        through_both = (self.prime ** (self.num_coordinates - 2) - 1) // (self.prime - 1)
        shrink = math.exp(-epsilon)
        total = self.within + self.beyond * shrink
        other = through_both + (self.within - through_both) * shrink
        return self.within / total, other / total

    def score(self, mechanism: ProjectiveGeometryResponse) -> float:
        """Returns the divergence of two classes over epsilon, or the information on a share."""
        own, other = self.inclusion_probabilities(mechanism.epsilon)
        if mechanism.best_for == "pairs":
            return own - other
        # The inverse variance of one noisy label's term in the share of a rare class, which may be
        # above all doubles.
        return (own - other) ** 2 / max(other * (1.0 - other), sys.float_info.min)

    def points(self, numbers: np.ndarray, coordinates: int | None = None) -> np.ndarray:
        """Returns the coordinates of points, of this space or one with other coordinates."""
        width = self.num_coordinates if coordinates is None else coordinates
        powers = self.prime ** np.arange(width, dtype=np.int64)
        starts = (powers - 1) // (self.prime - 1)
        free = np.searchsorted(starts, numbers, side="right") - 1
        return self._digits(powers[free] + numbers - starts[free], width)

    def _digits(self, numbers: np.ndarray, width: int) -> np.ndarray:
        powers = self.prime ** np.arange(width - 1, -1, -1, dtype=np.int64)
        return numbers // powers[:, np.newaxis] % self.prime

    def _numbers(self, vectors: np.ndarray) -> np.ndarray:
        """Returns the numbers of the points of vectors, in any scale."""
        first = np.argmax(vectors != 0, axis=0)
        scale = self._inverse(np.take_along_axis(vectors, first[np.newaxis], axis=0)[0])
        number = np.zeros_like(scale)
        for coordinate in vectors:
            number = number * self.prime + coordinate * scale % self.prime
        power = self.prime ** (self.num_coordinates - 1 - first)
        return number - power + (power - 1) // (self.prime - 1)

    def _inverse(self, values: np.ndarray) -> np.ndarray:
        """Returns the inverses modulo the prime: powers of q - 2, by Fermat's little theorem."""
        found, power, exponent = np.ones_like(values), values, self.prime - 2
        while exponent:
            if exponent & 1:
                found = found * power % self.prime
            power, exponent = power * power % self.prime, exponent >> 1
        return found

    def hyperplane(self, points: np.ndarray, flip: np.ndarray, choice: np.ndarray) -> np.ndarray:
        """Returns the hyperplane of a choice among those through a point, or, flipped, without it.

        All coordinates of the normal are free, except for the one at the first nonzero place of the
        point: up to scale if its product with the point is zero, exactly if the product is one.
        """
        vectors, width = self.points(points), self.num_coordinates - 1
        first = np.argmax(vectors != 0, axis=0)
        free = np.where(flip, self._digits(choice, width), self.points(choice * ~flip, width))
        places = np.arange(self.num_coordinates)[:, np.newaxis]
        normal = np.take_along_axis(free, np.minimum(places - (places > first), width - 1), axis=0)
        normal[places == first] = 0
        product = np.zeros_like(points)
        for entry, coordinate in zip(normal, vectors, strict=True):
            product += entry * coordinate % self.prime
        np.put_along_axis(normal, first[np.newaxis], (flip - product)[np.newaxis] % self.prime, 0)
        return self._numbers(normal)

    def contains(self, hyperplanes: np.ndarray, points: np.ndarray) -> np.ndarray:
        """Returns whether hyperplanes (m,) contain points, coordinates (t, k): ``bool`` (m, k)."""
        product = self.points(hyperplanes).T.astype(np.float64) @ points.astype(np.float64)
        # Products are whole numbers below 2^53, and the nearest multiple of the prime is exact.
        return np.rint(product / self.prime) * self.prime == product

    def sums_of_few(
        self, hyperplanes: np.ndarray, counts: np.ndarray, num_points: int
    ) -> np.ndarray:
        """Returns the sum of the counts (m,) of the hyperplanes (m,) through each point: (k,).

        Points from 1 on come in lines of q, which differ in the last coordinate alone. A hyperplane
        contains one point of a line, unless its normal ends in zero: then all of it or none.
        """
        normals = self.points(hyperplanes)
        first, last = normals[:-1].T, normals[-1]
        lines = self.points(np.arange(-(-(num_points - 1) // self.prime)), len(first.T))
        total = np.zeros(1 + lines.shape[1] * self.prime)
        total[0] = counts[last == 0].sum()
        starts = 1 + self.prime * np.arange(lines.shape[1])
        for some in row_chunks((counts.size, lines.shape[1])):
            product = np.rint(first[some].astype(np.float64) @ lines.astype(np.float64))
            product = product.astype(np.int64) % self.prime
            ends = last[some] == 0
            place = -product * self._inverse(last[some])[:, np.newaxis] % self.prime
            of_one = (starts + place)[~ends]
            weights = np.broadcast_to(counts[some][~ends, np.newaxis], of_one.shape)
            np.add.at(total, of_one.ravel(), weights.ravel())
            of_all = counts[some][ends] @ (product[ends] == 0)
            total[1:] += np.repeat(of_all, self.prime)
        return total[:num_points]

    def sums(self, counts: np.ndarray, points: np.ndarray) -> np.ndarray:
        """Returns the sum of the counts (M,) of the hyperplanes through each point (t, k): (k,).

        For normals ``(0.., 1, r)`` and a point with ``v`` at the place of the one and ``w`` after
        it, ``1[v + r w = 0]`` is the mean over b of ``exp(2 pi i b (v + r w) / q)``. So the sum
        over r is a mean of q values of a Fourier transform, at b w.
        """
        total, start = np.zeros(points.shape[1]), 0
        for free in range(self.num_coordinates):
            block = counts[start : start + self.prime**free].reshape((self.prime,) * free)
            start += block.size
            spectrum = np.fft.fftn(block) if free else block.astype(np.complex128)
            head, tail = points[self.num_coordinates - 1 - free], points[points.shape[0] - free :]
            for b in range(self.prime):
                at = spectrum[tuple(b * tail % self.prime)]
                turned = np.exp(-2j * np.pi / self.prime * (b * head % self.prime))
                total += (at * turned).real / self.prime
        return np.rint(total)


@functools.lru_cache(maxsize=64)
def _best_space(mechanism: ProjectiveGeometryResponse) -> _Space:
    """Returns the best space of those by the primes next to the ideal one, and next to K.

    Each is the smallest with a point for each class. Ties go to the smaller prime.
    """
    number, epsilon = mechanism.num_classes, mechanism.epsilon
    most = next(filter(_is_prime, itertools.count(max(2, number - 1))))
    exponent = epsilon / 2.0 if mechanism.best_for == "pairs" else epsilon
    ideal = int(math.exp(min(exponent, 40.0))) + 1
    primes = {most}
    if ideal < most:
        primes.add(next(filter(_is_prime, range(max(ideal, 2), 1, -1))))
        primes.add(next(filter(_is_prime, itertools.count(ideal + 1))))
    spaces = []
    for prime in sorted(primes):
        every = (_Space(prime, coordinates) for coordinates in itertools.count(2))
        spaces.append(next(space for space in every if space.num_points >= number))
    scores = [space.score(mechanism) for space in spaces]
    # Machines round differently, so scores that are nearly equal count as equal.
    best = (1.0 - 1e-9) * max(scores)
    return next(space for space, score in zip(spaces, scores, strict=True) if score >= best)


def _is_prime(number: int) -> bool:
    return number > 1 and all(number % divisor for divisor in range(2, math.isqrt(number) + 1))


@functools.lru_cache(maxsize=2)
def _first_points(space: _Space, number: int) -> np.ndarray:
    return space.points(np.arange(number))
