"""Fits from one noisy release of moments: spectrum, penalties, sharpness; see ``docs/theory.md``.

``A = V diag(l) V^T`` is the Gram matrix of the public rows, ``z = V^T B~`` the release in its
eigenvectors, with noise variance ``q_j`` in row j. Every fit is ``W = V diag(f) z`` for a filter
f (d,). Everything here is post-processing of the release.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator

import numpy as np

_CACHED = 1 << 17
"""Probabilities computed at a time."""
_RANK = 1e-12
"""An eigenvalue below this fraction of the largest is zero up to rounding."""
_DIFFERENCE = 0.05
"""The standard deviation, before the release, of a class mean less the fit's mean probability: the
means of bank, covertype and Adult differed by 0.01 to 0.05."""
_LARGEST_SHARPNESS = 1e3
"""The largest sharpness divided by the size of the scores: probabilities are then 0 or 1."""


@dataclasses.dataclass(frozen=True)
class Spectrum:
    values: np.ndarray  # eigenvalues l (d,), ascending, at least zero
    vectors: np.ndarray  # V (d, d), an eigenvector per column
    moments: np.ndarray  # z = V^T B~ (d, C), after the projection and without the intercept
    noise: np.ndarray  # q (d,), the variance of the noise on the entries of each row of z
    k_eff: int  # noisy directions in a row

    @property
    def energies(self) -> np.ndarray:
        return np.einsum("jc,jc->j", self.moments, self.moments)

    def coefficients(self, filter_: np.ndarray) -> np.ndarray:
        return self.vectors @ (filter_[:, np.newaxis] * self.moments)

    def risk(self, filter_: np.ndarray) -> float:
        """Returns R(f), the unbiased estimate of the squared error minus a constant."""
        value = (self.values * filter_**2 - 2.0 * filter_) @ self.energies
        return float(value + 2.0 * self.k_eff * (filter_ @ self.noise))

    def risk_stddev(self, filter_: np.ndarray) -> float:
        """Returns the standard deviation of R(f) for a release of pure noise."""
        weights = (self.values * filter_**2 - 2.0 * filter_) * self.noise
        return math.sqrt(2.0 * self.k_eff) * float(np.linalg.norm(weights))

    def ridge_filter(self, penalty: float) -> np.ndarray:
        """Returns ``1 / (l + penalty)``, zero where l is zero up to rounding."""
        values = self.values
        return np.where(values > _RANK * values[-1], 1.0 / (values + penalty), 0.0)

    def bayes_filter(self, t2: float, s2: float) -> np.ndarray:
        """Returns ``t^2 l / (t^2 l^2 + s^2 l + q)``."""
        values = self.values
        return t2 * values / (t2 * values**2 + s2 * values + self.noise)

    def prior_variances(self, label_variance: float) -> tuple[float, float]:
        """Returns the (t^2, s^2) that maximise the marginal likelihood."""
        from scipy import optimize

        noise, energies = self.noise, self.energies
        top = max(float(self.values[-1]), np.finfo(float).tiny)
        # The mean noise at the largest eigenvalue is a natural unit for the search.
        unit = float(noise.mean())
        signal, residual = np.square(self.values / top) * unit, self.values / top * unit

        def loss(logs: np.ndarray) -> tuple[float, np.ndarray]:
            t, s = np.exp(logs)
            v = t * signal + s * residual + noise
            slope = 0.5 * (self.k_eff / v - energies / v**2)
            gradient = np.array([t * (slope @ signal), s * (slope @ residual)])
            return 0.5 * float((self.k_eff * np.log(v) + energies / v).sum()), gradient

        most = math.log(label_variance * top / unit)
        bounds = [(-30.0, 60.0), (most - 40.0, most)]
        # The marginal likelihood may have several maxima.
        starts = [(t, s) for t in (-2.0, 4.0, 10.0) for s in (most - 8.0, most - 1.0)]
        found = [
            optimize.minimize(loss, start, jac=True, bounds=bounds, method="L-BFGS-B")
            for start in starts
        ]
        t, s = np.exp(min(found, key=lambda result: float(result.fun)).x)
        return float(t) * unit / top**2, float(s) * unit / top

    def signal_test(self) -> tuple[float, float]:
        """Returns the distance from pure noise: (signal-to-noise, standard deviations)."""
        weights = self.values * self.noise
        mean = max(self.k_eff * float(weights.sum()), np.finfo(float).tiny)
        spread = math.sqrt(2.0 * self.k_eff) * float(np.linalg.norm(weights))
        excess = float(self.values @ self.energies) - mean
        return excess / mean, excess / max(spread, np.finfo(float).tiny)

    def expected_signal_to_noise(self, label_energy: float) -> float:
        """Returns the signal-to-noise if the features explain the labels fully and evenly."""
        values = self.values
        mean = max(self.k_eff * float(values @ self.noise), np.finfo(float).tiny)
        return label_energy * float(values @ values) / (values.size * mean)


@dataclasses.dataclass(frozen=True)
class Problem:
    spectrum: Spectrum  # of the features, without the intercept
    sigma: float  # standard deviation of the noise on an entry of the release
    column: np.ndarray  # g = a / l0 (d,), zeros without intercept
    count: float  # l0, zero without intercept
    last: np.ndarray  # b0 / l0 (C,), the last row of the release over l0
    scale: np.ndarray | None = None  # (d,), factors of the columns; None for ones

    @classmethod
    def of(
        cls,
        gram: np.ndarray,
        moments: np.ndarray,
        sigma: float,
        *,
        centred: bool,
        intercept: bool,
        scale: np.ndarray | None = None,
    ) -> Problem:
        """Returns the spectrum of a Gram matrix (upper triangle; overwritten) and a release.

        ``scale`` (d,) multiplies the columns first.
        """
        from scipy import linalg

        k_eff = moments.shape[1] - centred
        if centred:
            # Codes of classes sum to zero over the columns, so their mean is noise alone.
            moments = moments - moments.mean(axis=1, keepdims=True)
        width = gram.shape[0] - intercept
        if scale is not None:
            factors = np.append(scale, 1.0) if intercept else scale
            gram *= factors
            gram *= factors[:, np.newaxis]
            moments = moments * factors[:, np.newaxis]
        column, last, count = np.zeros(width), np.zeros(moments.shape[1]), 0.0
        if intercept:
            count = float(gram[-1, -1])
            column, last = gram[:-1, -1] / count, moments[-1] / count
            gram, moments = gram[:-1, :-1], moments[:-1]
            for start in range(0, width, 1024):  # blocks avoid a second matrix
                part = slice(start, start + 1024)
                gram[part] -= np.outer(count * column[part], column)
            moments = moments - np.outer(column, count * last)
        driver = "evd" if width > 1 else "ev"  # some versions of SciPy fail at 1 x 1
        values, vectors = linalg.eigh(gram, lower=False, driver=driver, overwrite_a=True)
        own = 1.0 if scale is None else np.square(scale) @ np.square(vectors)
        # The constant column's moments were subtracted in part, and bring their own noise.
        noise = sigma**2 * (own + np.square(vectors.T @ column))
        # A Gram matrix has no negative eigenvalue but by rounding, with which a filter may divide
        # by zero.
        spectrum = Spectrum(np.maximum(values, 0.0), vectors, vectors.T @ moments, noise, k_eff)
        return cls(spectrum, sigma, column, count, last, scale)

    def solve(self, filter_: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        weights = self.spectrum.coefficients(filter_)
        return weights, self.kept() * self.last - self.column @ weights

    def cross_moment(self, filter_: np.ndarray, t2: float, s2: float) -> float:
        """Returns the posterior mean of ``tr(W^T B)``, under the prior of variances t2 and s2."""
        spectrum = self.spectrum
        signal = t2 * spectrum.values**2 + s2 * spectrum.values
        value = float((filter_ * signal / (signal + spectrum.noise)) @ spectrum.energies)
        return value + self.count * self.kept() ** 2 * float(self.last @ self.last)

    def cross_moment_error(self, filter_: np.ndarray) -> float:
        """Returns the standard deviation of ``tr(W^T N)`` to first order, given the filter."""
        spectrum = self.spectrum
        noise = filter_**2 * spectrum.noise
        variance = float(noise @ (spectrum.energies + spectrum.k_eff * spectrum.noise))
        kept = self.kept() * self.sigma
        return math.sqrt(variance + kept**2 * (float(self.last @ self.last) + self._noise()))

    def _noise(self) -> float:
        """The mean energy of the noise in ``last``."""
        return self.spectrum.k_eff * (self.sigma / self.count) ** 2 if self.count else 0.0

    def kept(self) -> float:
        """Returns the James-Stein estimate of the share of ``last`` that is not noise."""
        size = float(self.last @ self.last)
        return max(0.0, 1.0 - self._noise() / size) if size > 0.0 else 0.0

    def coefficient_stddev(self, filter_: np.ndarray, spread: np.ndarray | None) -> np.ndarray:
        """Returns the standard deviation that the release's noise causes in each row of S W."""
        filtered = self.spectrum.vectors * filter_
        along = filtered @ (self.spectrum.vectors.T @ self.column)
        if self.scale is not None:
            filtered = filtered @ (self.spectrum.vectors.T * self.scale)
            filtered, along = self.scale[:, np.newaxis] * filtered, self.scale * along
        if spread is not None:
            filtered, along = spread @ filtered, spread @ along
        variances = np.square(filtered).sum(axis=1) + np.square(along)
        kept = self.spectrum.k_eff / self.spectrum.moments.shape[1]
        return self.sigma * np.sqrt(variances * kept)


def class_scores(scores: np.ndarray) -> np.ndarray:
    return np.concatenate([-scores, scores], axis=1) if scores.shape[1] == 1 else scores


@dataclasses.dataclass(frozen=True)
class SampleScores:
    """Scores of classes for a sample of rows, and the weights of the rows."""

    values: np.ndarray  # (m, C)
    weights: np.ndarray | None = None  # (m,)

    def of_classes(self) -> SampleScores:
        """Returns scores with a column for each class; a single column is the second of two."""
        return SampleScores(class_scores(self.values), self.weights)

    def of_labels(self) -> SampleScores:
        """Returns scores (m C, 2) in which each label of a row is a row of two classes."""
        weights = None if self.weights is None else np.repeat(self.weights, self.values.shape[1])
        return SampleScores(self.values.reshape(-1, 1), weights).of_classes()

    def sharpness(self, agreement: float) -> float:
        """Returns the beta of maximum likelihood; zero (equal probabilities) without agreement."""
        from scipy import optimize

        size = float(np.sqrt(np.mean(np.square(self.values))))
        if agreement <= 0.0 or size == 0.0:
            return 0.0

        def slope(beta: float) -> float:
            expected = np.empty(len(self.values))
            for places, shares, _ in self.softmax_parts(beta):
                expected[places] = np.einsum("ki,ik->i", shares, self.values[places])
            return agreement - float(np.average(expected, weights=self.weights))

        largest = _LARGEST_SHARPNESS / size
        low, high = 0.0, 1.0 / size
        while slope(high) > 0.0:
            if high >= largest:  # the noise puts the agreement above its ceiling
                return largest
            low, high = high, min(8.0 * high, largest)
        return float(optimize.brentq(slope, low, high, xtol=1e-7 * high, rtol=1e-6))

    def matching_shifts(
        self, mean_codes: np.ndarray, error: float, *, are_labels: bool = False
    ) -> np.ndarray:
        """Returns (C,): added to sharpened scores (m, C), mean probabilities equal the class means.

        ``mean_codes`` (C,) are the means of centred codes, up to noise of standard deviation
        ``error``.
        """
        if are_labels or self.values.shape[1] == 1:
            columns = self.values.T[..., np.newaxis]
            pairs = [SampleScores(column, self.weights).of_classes() for column in columns]
            means = [0.5 + np.array([-code, code]) for code in mean_codes]
            both = zip(pairs, means, strict=True)
            return np.array([pair._shifts(mean, error)[1] for pair, mean in both])
        return self._shifts(mean_codes - mean_codes.mean() + 1.0 / self.values.shape[1], error)

    def _shifts(self, means: np.ndarray, error: float) -> np.ndarray:
        from scipy import optimize

        own = self.mean_probabilities()
        part = _DIFFERENCE**2 / (_DIFFERENCE**2 + error**2)  # the part that is not noise
        # The noise can push a mean below zero: as much as its error stays of the fit's own mean.
        means = np.maximum(own + part * (means - own), np.minimum(own, error))
        means /= means.sum()

        # In these units the curvature is about one for many classes, so few passes over the scores
        # suffice.
        unit = 1.0 / np.sqrt(np.maximum(means, 1e-12))

        def loss(flat: np.ndarray) -> tuple[float, np.ndarray]:
            own, log_sum = self.mean_softmax(unit * flat)
            return log_sum - float(means @ (unit * flat)), unit * (own - means)

        start = np.log(means / np.maximum(own, 1e-12)) / unit
        options = {"maxcor": 20, "ftol": 1e-12, "gtol": 1e-6}
        found = optimize.minimize(loss, start, jac=True, method="L-BFGS-B", options=options)
        shifts = unit * found.x
        return shifts - shifts.mean()

    def mean_probabilities(self) -> np.ndarray:
        """Returns the mean softmax (K,) of the rows."""
        return self.mean_softmax(np.zeros(self.values.shape[1]))[0]

    def mean_softmax(self, shifts: np.ndarray) -> tuple[np.ndarray, float]:
        """Returns mean probabilities (K,), and the mean logarithm of the sums of exponentials."""
        weights = np.ones(len(self.values)) if self.weights is None else self.weights
        means, log_sum = np.zeros(self.values.shape[1]), 0.0
        for places, shares, log_sums in self.softmax_parts(shifts=shifts):
            means += shares @ weights[places]
            log_sum += float(log_sums @ weights[places])
        return means / weights.sum(), log_sum / weights.sum()

    def softmax_parts(
        self, sharpness: float = 1.0, shifts: np.ndarray | None = None
    ) -> Iterator[tuple[slice, np.ndarray, np.ndarray]]:
        """Yields places of rows, their softmax (K, m), and the logarithms of its sums (m,).

        A part stays in a core's own cache. Shifts (K,), if any, make it ``float64``.
        """
        step = max(1, _CACHED // self.values.shape[1])
        for start in range(0, len(self.values), step):
            places = slice(start, start + step)
            shares = np.array(self.values[places].T, order="C")
            shares *= sharpness
            if shifts is not None:
                shares = shares + shifts[:, np.newaxis]
            top = shares.max(axis=0)
            shares -= top
            np.exp(shares, out=shares)
            sums = shares.sum(axis=0)
            shares /= sums
            yield places, shares, np.log(sums) + top

    def believable_agreement(self, agreement: float, error: float) -> float:
        """Returns the mean of a normal law around a noisy estimate, truncated at the ceiling.

        The score of the true class is at most the largest score in its row; an agreement at that
        ceiling would give probabilities of 0 and 1.
        """
        from scipy import stats

        largest = self.values.max(axis=1).astype(np.float64)
        ceiling = float(np.average(largest, weights=self.weights))
        if error <= 0.0:
            return min(agreement, ceiling)
        place = (ceiling - agreement) / error
        # Far above the ceiling both densities underflow, but not their logarithms.
        ratio = float(np.exp(stats.norm.logpdf(place) - stats.norm.logcdf(place)))
        below = agreement - error * ratio
        return min(below, ceiling)  # rounding may exceed it for an estimate far above

    def log_loss(self, agreement: float, sharpness: float) -> float:
        """Returns the mean log-loss of a softmax over sharpened scores."""
        log_sums = np.empty(len(self.values))
        for places, _, found in self.softmax_parts(sharpness):
            log_sums[places] = found
        return float(np.average(log_sums, weights=self.weights)) - sharpness * agreement
