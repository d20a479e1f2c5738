"""Fits from one noisy release of moments: spectrum, penalties and the choice among them.

Notation: rows X (n, d) of public features, centred label codes Y (n, C), ``A = X^T X``,
``B = X^T Y``, and the release ``B~ = B + N`` whose entries of N are independent with variance
``sigma^2``. Everything here is post-processing of ``B~`` and public features: no label is looked
at, and no choice among fits costs privacy.

*Projection.* One-hot codes less 1/K sum to zero over the classes, so do the rows of B. Projecting
the rows of ``B~`` onto vectors that sum to zero, ``P = I - 1 1^T / K``, keeps B and removes one
part in K of the noise: ``E ||N P||^2 = d (K - 1) sigma^2``. The number of noisy directions in a
row, ``trace(P)``, is called ``k_eff`` below: K - 1 for K > 2 classes, else the number of columns.

*Intercept.* It is not penalised. With a last column that is constant, ``A`` has the blocks A1, a
and l0, ``B~`` has b0 in its last row, and the equations for the other coefficients are those of
``A1 - a a^T / l0`` and ``B1~ - g b0^T`` with ``g = a / l0``, whose noise ``N1 - g n0^T`` has the
covariance ``sigma^2 (I + g g^T)``. From here on A, B~ and N are these; g is zero without intercept
(and small where features were centred).

Fits are linear in ``B~`` and diagonal in the eigenvectors of ``A = V diag(l) V^T``: with
``z = V^T B~``, whose row j has noise of variance ``q_j = sigma^2 (1 + (V^T g)_j^2)``,

``W = V diag(f) z``, for a filter f (d,).

*Ridge* with penalty lambda is ``f = 1 / (l + lambda)``, and zero where l is: B has no part there.

*Unbiased risk.* The squared error of the predictions on the training features is
``||X W - Y||^2 = tr(W^T A W) - 2 tr(W^T B) + ||Y||^2``. The first term is known. For the second,
``tr(W^T B~) = tr(W^T B) + tr(W^T N)``, and with ``M = V diag(f) V^T``, so ``W = M (B + N)``,
``E tr(W^T N) = E tr(N^T M N) = k_eff sum_j f_j q_j`` (without intercept ``sigma^2 k_eff tr(M)``).
So

``R(f) = sum_j (l_j f_j^2 - 2 f_j) e_j + 2 k_eff sum_j q_j f_j``, ``e_j = ||z_j||^2``,

has the expectation of the squared error less ``||Y||^2``, for every filter fixed in advance. The
least of a path of such estimates is too low where the estimate varies much, at small penalties,
and may lie there by chance alone. The variance of R for pure noise is
``2 k_eff sum_j (l_j f_j^2 - 2 f_j)^2 q_j^2``; a third of its root is added when penalties are
compared.

*Empirical Bayes.* Suppose ``Y = X W + E`` with coefficients of variance ``t^2`` and residuals of
variance ``s^2``. Then ``z_j = l_j w_j + (noise of variance s^2 l_j + q_j)``: row j is normal with
variance ``v_j = t^2 l_j^2 + s^2 l_j + q_j``, and different rows are independent (but for g).
t and s maximise the likelihood ``-1/2 sum_j (k_eff log v_j + e_j / v_j)``; sigma is known. The
posterior mean is ``f_j = t^2 l_j / v_j``. Unlike ridge, which keeps ``1 / lambda`` in directions
with hardly any data, it goes to zero there: noise that the release has put into such a direction is
removed, as B itself can be no larger there than the features are.

*Probabilities.* Softmax of ``beta s`` for scores ``s = x W`` has the log-likelihood
``beta tr(W^T B) - sum_i log sum_k exp(beta s_ik)`` (the scores of a row sum to zero, so that
centring the codes changes nothing). ``tr(W^T B)`` can be estimated from the release
(``Problem.cross_moment``, ``_logistic``), and the sum is public, so the sharpness beta of greatest
likelihood, which temperature scaling (Guo et al. 2017) finds from held-out labels, is found from
the release. The sum is taken over a public sample of rows.
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np

_POINTS = 121
_GUARD = 1.0 / 3.0
_RANK = 1e-12
"""An eigenvalue below this part of the largest is rounding of zero."""
_LARGEST_SHARPNESS = 1e3


@dataclasses.dataclass(frozen=True)
class Spectrum:
    """A release in the eigenvectors of the Gram matrix.

    Attributes:
        values: eigenvalues l (d,), ascending, at least zero.
        vectors: V (d, d), one eigenvector a column.
        moments: z = V^T B~ (d, C), after the projection and without the intercept.
        noise: q (d,), the variance of the noise on the entries of each row of z.
        k_eff: noisy directions in a row.
    """

    values: np.ndarray
    vectors: np.ndarray
    moments: np.ndarray
    noise: np.ndarray
    k_eff: int

    @property
    def energies(self) -> np.ndarray:
        """e (d,): squared lengths of the rows of z."""
        return np.einsum("jc,jc->j", self.moments, self.moments)

    def coefficients(self, filter_: np.ndarray) -> np.ndarray:
        """Returns W (d, C)."""
        return self.vectors @ (filter_[:, np.newaxis] * self.moments)

    def risk(self, filter_: np.ndarray) -> float:
        """Returns R(f), see the head of this file."""
        value = (self.values * filter_**2 - 2.0 * filter_) @ self.energies
        return float(value + 2.0 * self.k_eff * (filter_ @ self.noise))

    def risk_stddev(self, filter_: np.ndarray) -> float:
        """Returns the standard deviation of R(f) for a release of pure noise."""
        weights = (self.values * filter_**2 - 2.0 * filter_) * self.noise
        return math.sqrt(2.0 * self.k_eff) * float(np.linalg.norm(weights))


@dataclasses.dataclass(frozen=True)
class Problem:
    """A release and the Gram matrix, solved for any filter.

    Attributes:
        spectrum: of the features, without the intercept.
        sigma: standard deviation of the noise on an entry of the release.
        column: ``g = a / l0`` (d,), zeros without intercept.
        count: l0, zero without intercept.
        last: the last row of the release over l0, ``b0 / l0`` (C,).
    """

    spectrum: Spectrum
    sigma: float
    column: np.ndarray
    count: float
    last: np.ndarray

    def solve(self, filter_: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns coefficients W (d, C) and that of the constant column (C,).

        The mean of the codes, ``b0 / l0``, is shrunk towards zero by the positive-part rule of
        James and Stein: for classes of about the same size it is mostly noise.
        """
        weights = self.spectrum.coefficients(filter_)
        return weights, self.kept() * self.last - self.column @ weights

    def cross_moment(self, filter_: np.ndarray, t2: float, s2: float) -> float:
        """Returns an estimate of ``tr(W^T B)``, intercept and all: of the scores with the labels.

        A part ``1 - q_j / v_j`` of row j of z is signal, under the prior of variances t2 and s2:
        that is its posterior mean. ``sum_j f_j (e_j - k_eff q_j)`` is unbiased without a prior,
        but mostly noise at a small epsilon. Likewise for the constant column.
        """
        spectrum = self.spectrum
        signal = t2 * spectrum.values**2 + s2 * spectrum.values
        value = float((filter_ * signal / (signal + spectrum.noise)) @ spectrum.energies)
        return value + self.count * self.kept() ** 2 * float(self.last @ self.last)

    def cross_moment_error(self, filter_: np.ndarray) -> float:
        """Returns about the standard deviation of that estimate, given the filter.

        Of ``tr(W^T N)``, to first order: noise on W itself is as large again as what it is on.
        """
        spectrum = self.spectrum
        noise = filter_**2 * spectrum.noise
        variance = float(noise @ (spectrum.energies + spectrum.k_eff * spectrum.noise))
        kept = self.kept() * self.sigma
        return math.sqrt(variance + kept**2 * (float(self.last @ self.last) + self._noise()))

    def _noise(self) -> float:
        """The mean energy of the noise in ``last``."""
        return self.spectrum.k_eff * (self.sigma / self.count) ** 2 if self.count else 0.0

    def kept(self) -> float:
        """Returns the part of ``last`` that is kept."""
        size = float(self.last @ self.last)
        return max(0.0, 1.0 - self._noise() / size) if size > 0.0 else 0.0

    def coefficient_stddev(self, filter_: np.ndarray, spread: np.ndarray | None) -> np.ndarray:
        """Returns the standard deviation that the noise of the release gives each row of S W.

        Given the filter: ``Cov(M N) = sigma^2 M (I + g g^T) M``; a column of P keeps
        ``k_eff / C`` of it.
        """
        filtered = self.spectrum.vectors * filter_
        along = filtered @ (self.spectrum.vectors.T @ self.column)
        vectors = filtered
        if spread is not None:
            vectors, along = spread @ filtered, spread @ along
        variances = np.square(vectors).sum(axis=1) + np.square(along)
        kept = self.spectrum.k_eff / self.spectrum.moments.shape[1]
        return self.sigma * np.sqrt(variances * kept)


def decompose(
    gram: np.ndarray, moments: np.ndarray, sigma: float, *, centred: bool, intercept: bool
) -> Problem:
    """Returns the spectrum of a Gram matrix (upper triangle; overwritten) and a release."""
    from scipy import linalg

    k_eff = moments.shape[1] - centred
    if centred:
        moments = moments - moments.mean(axis=1, keepdims=True)
    width = gram.shape[0] - intercept
    column, last, count = np.zeros(width), np.zeros(moments.shape[1]), 0.0
    if intercept:
        count = float(gram[-1, -1])
        column, last = gram[:-1, -1] / count, moments[-1] / count
        gram, moments = gram[:-1, :-1], moments[:-1]
        for start in range(0, width, 1024):  # in place, and never a second matrix
            part = slice(start, start + 1024)
            gram[part] -= np.outer(count * column[part], column)
        moments = moments - np.outer(column, count * last)
    driver = "evd" if width > 1 else "ev"  # some versions of SciPy fail at 1 x 1
    values, vectors = linalg.eigh(gram, lower=False, driver=driver, overwrite_a=True)
    noise = sigma**2 * (1.0 + np.square(vectors.T @ column))
    spectrum = Spectrum(np.maximum(values, 0.0), vectors, vectors.T @ moments, noise, k_eff)
    return Problem(spectrum, sigma, column, count, last)


def ridge_filter(spectrum: Spectrum, penalty: float) -> np.ndarray:
    """Returns ``1 / (l + penalty)``, zero where l is zero but for rounding."""
    values = spectrum.values
    return np.where(values > _RANK * values[-1], 1.0 / (values + penalty), 0.0)


def risk_path(spectrum: Spectrum) -> tuple[np.ndarray, np.ndarray]:
    """Returns penalties, ascending, and the unbiased risk of each, both (121,).

    From a millionth of the largest eigenvalue to where next to nothing of the release is kept.
    """
    top = _top(spectrum)
    high = 1e3 * max(top, math.sqrt(float(spectrum.noise.sum())))
    penalties = np.geomspace(1e-6 * top, high, _POINTS)
    return penalties, np.array([spectrum.risk(ridge_filter(spectrum, p)) for p in penalties])


def least_risk(spectrum: Spectrum, penalties: np.ndarray) -> float:
    """Returns the best penalty of the path, refined between its neighbours."""
    from scipy import optimize

    def guarded(log_penalty: float) -> float:
        filter_ = ridge_filter(spectrum, math.exp(log_penalty))
        return spectrum.risk(filter_) + _GUARD * spectrum.risk_stddev(filter_)

    logs = np.log(penalties)
    risks = np.array([guarded(value) for value in logs])
    best = int(np.argmin(risks))
    bounds = (logs[max(best - 1, 0)], logs[min(best + 1, logs.size - 1)])
    found = optimize.minimize_scalar(guarded, bounds=bounds, method="bounded")
    return math.exp(found.x) if found.fun < risks[best] else float(penalties[best])


def prior_variances(spectrum: Spectrum, label_variance: float) -> tuple[float, float]:
    """Returns (t^2, s^2) of greatest marginal likelihood, see the head of this file."""
    from scipy import optimize

    top, noise, energies = _top(spectrum), spectrum.noise, spectrum.energies
    # In units of the mean noise at the largest eigenvalue: a natural scale for the search.
    unit = float(noise.mean())
    signal, residual = np.square(spectrum.values / top) * unit, spectrum.values / top * unit

    def loss(logs: np.ndarray) -> tuple[float, np.ndarray]:
        t, s = np.exp(logs)
        v = t * signal + s * residual + noise
        slope = 0.5 * (spectrum.k_eff / v - energies / v**2)
        gradient = np.array([t * (slope @ signal), s * (slope @ residual)])
        return 0.5 * float((spectrum.k_eff * np.log(v) + energies / v).sum()), gradient

    most = math.log(label_variance * top / unit)
    bounds = [(-30.0, 60.0), (most - 40.0, most)]
    starts = [(t, s) for t in (-2.0, 4.0, 10.0) for s in (most - 8.0, most - 1.0)]
    found = min(
        (
            optimize.minimize(loss, start, jac=True, bounds=bounds, method="L-BFGS-B")
            for start in starts
        ),
        key=lambda result: float(result.fun),
    )
    t, s = np.exp(found.x)
    return float(t) * unit / top**2, float(s) * unit / top


def bayes_filter(spectrum: Spectrum, t2: float, s2: float) -> np.ndarray:
    """Returns ``t^2 l / (t^2 l^2 + s^2 l + q)``."""
    values = spectrum.values
    return t2 * values / (t2 * values**2 + s2 * values + spectrum.noise)


def signal_test(spectrum: Spectrum) -> tuple[float, float]:
    """Returns how far the release is from pure noise: (signal-to-noise, standard deviations).

    ``T = sum_j l_j e_j`` weighs directions by the data in them. Without a signal it has the mean
    ``m = k_eff sum_j l_j q_j`` and the variance ``2 k_eff sum_j (l_j q_j)^2``. The first number is
    ``T / m - 1``: the energy of the signal over that of the noise, zero on average without one.
    """
    weights = spectrum.values * spectrum.noise
    mean = max(spectrum.k_eff * float(weights.sum()), np.finfo(float).tiny)
    spread = math.sqrt(2.0 * spectrum.k_eff) * float(np.linalg.norm(weights))
    excess = float(spectrum.values @ spectrum.energies) - mean
    return excess / mean, excess / max(spread, np.finfo(float).tiny)


def expected_signal_to_noise(spectrum: Spectrum, label_energy: float) -> float:
    """Returns what ``signal_test`` would find if features explained the labels fully and evenly.

    That is, if each of the d directions carried ``label_energy / d`` of ``||Y||^2``, so that
    ``e_j = l_j label_energy / d``; known before the release, from public numbers alone.
    """
    values = spectrum.values
    mean = max(spectrum.k_eff * float(values @ spectrum.noise), np.finfo(float).tiny)
    return label_energy * float(values @ values) / (values.size * mean)


def _top(spectrum: Spectrum) -> float:
    return max(float(spectrum.values[-1]), np.finfo(float).tiny)


def class_scores(scores: np.ndarray) -> np.ndarray:
    """Returns scores of all classes (m, K): of two classes, s is that of 1 and -s that of 0."""
    return np.concatenate([-scores, scores], axis=1) if scores.shape[1] == 1 else scores


def softmax_sharpness(scores: np.ndarray, agreement: float) -> float:
    """Returns the beta of greatest likelihood; zero (all classes alike) if nothing agrees."""
    from scipy import optimize, special

    size = float(np.sqrt(np.mean(np.square(scores))))
    if agreement <= 0.0 or size == 0.0:
        return 0.0

    def slope(beta: float) -> float:
        expected = np.einsum("ik,ik->i", special.softmax(beta * scores, axis=1), scores)
        return agreement - float(expected.mean())

    largest = _LARGEST_SHARPNESS / size
    if slope(largest) >= 0.0:  # the true class agrees more often than the best class: noise
        return largest
    return float(optimize.brentq(slope, 0.0, largest, xtol=1e-7 * largest, rtol=1e-6))


def believable_agreement(scores: np.ndarray, agreement: float, error: float) -> float:
    """Returns the mean of what the agreement can be, given a noisy estimate of it.

    The score of the true class is at most the largest score of its row, so the agreement has a
    ceiling; an estimate near it or above, taken as it is, would make probabilities of 0 and 1. The
    mean of a normal law around the estimate, cut off at the ceiling, is below it.
    """
    from scipy import stats

    ceiling = float(scores.max(axis=1).mean(dtype=np.float64))
    if error <= 0.0:
        return min(agreement, ceiling)
    place = (ceiling - agreement) / error
    below = agreement - error * float(np.exp(stats.norm.logpdf(place) - stats.norm.logcdf(place)))
    return min(below, ceiling)  # rounding, where the estimate is far above


def log_loss(scores: np.ndarray, agreement: float, sharpness: float) -> float:
    """Returns the mean log-loss of softmax of sharpened scores; arguments as above."""
    from scipy import special

    sharpened = sharpness * scores.astype(np.float64)
    return float(special.logsumexp(sharpened, axis=1).mean()) - sharpness * agreement
