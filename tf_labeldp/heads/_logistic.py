"""Logistic regression from one noisy release of moments, and the choice of its penalty.

Notation as in ``_ridge_path``. With scores ``s_i = x_i U`` (one column a class) the log-likelihood
of softmax regression is ``tr(U^T B) - sum_i log sum_k exp(s_ik)``: as for every generalised linear
model with a canonical link, labels enter through ``B = X^T Y`` alone. So the release that serves
ridge serves it too, and every Newton step that would need the labels again gets them from that same
release: k releases of B with noise of variance k sigma^2, averaged, would be one with sigma^2.
Two classes, and rows of labels, have one column of log-odds s each, with ``log(2 cosh(s / 2))`` in
the place of the sum and codes 0 and 1 less 1/2: scores s/2 and -s/2 of two classes.

*Penalty.* The fit minimises ``sum_i lse(s_i) - tr(U^T B~) + 1/2 sum_j c p_j ||u_j||^2`` in the
eigenvectors of the Gram matrix. Its Hessian at zero is ``h l_j`` (h = 1/K, or 1/4 for one column),
so that with ``p_j = h (1 / f_j - l_j)`` and c = 1 the first Newton step is the empirical-Bayes fit
of filter f. Away from zero the curvature is less, and the same noise moves U further; the multiple
c makes up for that. With the filter, small directions are penalised by what is noise in them.

*Choice of c.* For a fixed sharpness beta, ``sum_i lse(beta s_i) - beta tr(U^T B)`` is the log-loss
on the training set. By Stein's identity, for normal noise,

``E tr(U^T B) = E[tr(U^T B~) - sum_j q_j div_j U]``,

where the divergence is that of the fit with respect to the release. A random probe P with
``E P P^T`` the covariance of the noise estimates it as ``tr(P^T (U(B~ + h P) - U(B~))) / h``
(Ramani, Blu and Unser 2008, "Monte-Carlo SURE"); the fewer entries a probe has, the more of them
are taken. The same changes of U show how large its standard errors are. c is chosen by the least of
these estimates over powers of two, each at its best beta. No label is looked at.

*Choice of beta.* For the fit at hand the estimate of ``tr(U^T B)`` has the variance
``sum_j q_j (||u_j||^2 + ||(J P)_j||^2)`` on average, J P being the change along a probe (Stein's
identity once more). Where that is not small, the agreement found may be more than any fit can
have; a part of it as large as its variance over its square is taken for noise, as James and Stein
do, so that scores of pure noise are not sharpened into certainties.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import numpy as np

from tf_labeldp.heads import _probabilities

_ENTRIES = 1 << 22
_STEP = 0.3
"""Of the finite difference, in standard deviations of the noise."""
_LEAST, _MOST = 0.25, 4096.0
_PROBE_ENTRIES, _MOST_PROBES = 256, 16


@dataclasses.dataclass(frozen=True)
class Likelihood:
    """The public part of the log-likelihood: ``sum_i lse(s_i)``, over a sample of the rows.

    Attributes:
        rows: ``float32`` (m, d).
        weight: n / m.
        softmax: whether columns are classes that exclude each other.
    """

    rows: np.ndarray
    weight: float
    softmax: bool

    def curvature(self, columns: int) -> float:
        """Returns h, the Hessian of one row at zero in the directions that matter."""
        return 1.0 / columns if self.softmax else 0.25

    def value_and_gradient(self, coefficients: np.ndarray) -> tuple[float, np.ndarray]:
        """Returns the sum, and its gradient (d, C)."""
        u = coefficients.astype(np.float32)
        value, gradient = 0.0, np.zeros(coefficients.shape)
        step = max(1, _ENTRIES // max(u.shape))
        for start in range(0, len(self.rows), step):
            block = self.rows[start : start + step]
            scores = block @ u
            if self.softmax:
                top = scores.max(axis=1, keepdims=True)
                scores -= top
                np.exp(scores, out=scores)
                total = scores.sum(axis=1, keepdims=True)
                value += float((np.log(total) + top).sum(dtype=np.float64))
                scores /= total
            else:
                scores *= 0.5
                size = np.abs(scores)  # log(e^x + e^-x) = |x| + log1p(e^(-2 |x|))
                value += float((size + np.log1p(np.exp(-2.0 * size))).sum(dtype=np.float64))
                np.tanh(scores, out=scores)
                scores *= 0.5
            gradient += block.T @ scores
        return self.weight * value, self.weight * gradient

    def scores(self, coefficients: np.ndarray) -> np.ndarray:
        """Returns scores whose softmax, rows of log-odds made (-s/2, s/2), are probabilities."""
        scores = self.rows @ coefficients.astype(np.float32)
        if self.softmax:
            return scores
        return _probabilities.class_scores(0.5 * scores.reshape(-1, 1))


@dataclasses.dataclass(frozen=True)
class LogisticFit:
    """Attributes: coefficients U (d, C), multiple c, sharpness beta, mean log-loss estimate.

    And ``variance`` (d,), that the noise gives a row of U in sum over its columns, to first order;
    in a single direction it is a rough guess.
    """

    coefficients: np.ndarray
    multiple: float
    sharpness: float
    log_loss: float
    variance: np.ndarray


@dataclasses.dataclass(frozen=True)
class LogisticProblem:
    """A release in coordinates in which penalties are diagonal.

    Attributes:
        likelihood: of rows in these coordinates.
        moments: ``float64`` (d, C); rows sum to zero over classes.
        noise: (d,), variances.
        eigenvalues: l (d,).
        penalties: p (d,), finite.
        fixed: (d,), true where c does not multiply the penalty (the constant column).
    """

    likelihood: Likelihood
    moments: np.ndarray
    noise: np.ndarray
    eigenvalues: np.ndarray
    penalties: np.ndarray
    fixed: np.ndarray

    def fit(self, multiple: float, moments: np.ndarray, start: np.ndarray) -> np.ndarray:
        """Returns U (d, C) for a multiple of the penalties."""
        from scipy import optimize

        penalties = np.where(self.fixed, 1.0, multiple) * self.penalties
        curvature = self.likelihood.curvature(moments.shape[1])
        scale = 1.0 / np.sqrt(curvature * self.eigenvalues + penalties)[:, np.newaxis]
        penalties = penalties[:, np.newaxis]

        def objective(flat: np.ndarray) -> tuple[float, np.ndarray]:
            u = flat.reshape(moments.shape) * scale
            value, gradient = self.likelihood.value_and_gradient(u)
            value += 0.5 * float((penalties * u * u).sum()) - float((u * moments).sum())
            gradient = self._centred(gradient - moments + penalties * u)
            return value, (gradient * scale).ravel()

        found = optimize.minimize(
            objective,
            (start / scale).ravel(),
            jac=True,
            method="L-BFGS-B",
            options={"maxiter": 200, "maxcor": 20, "ftol": 1e-7, "gtol": 1e-6},
        )
        return self._centred(found.x.reshape(moments.shape) * scale)

    def assess(
        self, multiple: float, start: np.ndarray, num_rows: int, probe_seed: int = 0
    ) -> LogisticFit:
        """Returns the fit for a multiple, with its sharpness and estimated log-loss.

        All multiples get the same probes, so that what these add by chance hardly tells them apart.
        """
        u = self.fit(multiple, self.moments, start)
        rng = np.random.default_rng(probe_seed)
        number = min(_MOST_PROBES, math.ceil(_PROBE_ENTRIES / self.moments.size))
        overlap, variance = 0.0, np.zeros(len(u))
        for _ in range(number):
            probe = rng.choice([-1.0, 1.0], size=self.moments.shape)
            probe = self._centred(probe * np.sqrt(self.noise)[:, np.newaxis])
            change = (self.fit(multiple, self.moments + _STEP * probe, u) - u) / _STEP
            overlap += float((probe * change).sum()) / number
            variance += np.square(change).sum(axis=1) / number
        agreement = (float((u * self.moments).sum()) - overlap) / num_rows
        scores = self.likelihood.scores(u)
        error = math.sqrt(float(self.noise @ (np.square(u).sum(axis=1) + variance))) / num_rows
        if not self.likelihood.softmax:
            agreement, error = agreement / u.shape[1], error / u.shape[1]
        agreement = _probabilities.believable_agreement(scores, agreement, error)
        trusted = agreement - error**2 / agreement if agreement > error else 0.0
        sharpness = _probabilities.softmax_sharpness(scores, trusted)
        loss = _probabilities.log_loss(scores, agreement, sharpness)
        return LogisticFit(u, multiple, sharpness, loss, variance)

    def best(self, start: np.ndarray, num_rows: int) -> tuple[LogisticFit, dict[float, float]]:
        """Returns the fit of least estimated log-loss, and the estimate for each multiple tried."""
        tried: dict[float, LogisticFit] = {}

        def at(multiple: float) -> float:
            if multiple not in tried:
                near = min(tried, key=lambda m: abs(math.log(m / multiple)), default=None)
                begin = start if near is None else tried[near].coefficients
                tried[multiple] = self.assess(multiple, begin, num_rows)
            return tried[multiple].log_loss

        curvature = self.likelihood.curvature(self.moments.shape[1])
        best = _descend(at, 2.0 ** round(math.log2(1.2 / curvature)))
        return tried[best], {multiple: tried[multiple].log_loss for multiple in sorted(tried)}

    def _centred(self, values: np.ndarray) -> np.ndarray:
        if not self.likelihood.softmax:
            return values
        return values - values.mean(axis=1, keepdims=True)


def _descend(loss: Callable[[float], float], best: float) -> float:
    """Returns a power of two, from ``best`` on, next to which both neighbours have more loss."""
    factor = 0.5 if loss(best / 2.0) < loss(best) else 2.0
    while _LEAST <= best * factor <= _MOST and loss(best * factor) < loss(best):
        best *= factor
    return best
