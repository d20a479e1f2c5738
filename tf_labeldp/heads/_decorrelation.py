"""Centring and partial whitening of features: where a release of fixed noise is spent."""

from __future__ import annotations

import numpy as np

from tf_labeldp import _validate

_FLOOR_PER_LABEL = 120.0


def decorrelation_floor(epsilon: float, num_labels: int) -> float:
    """Returns a good ``decorrelate=`` of a feature map for a budget: ``120 / (epsilon * n)``.

    The smaller the noise of the release, the weaker are the directions that are worth a share of
    it; a mean over n labels has noise proportional to ``1 / (epsilon * n)``. The factor is a rule
    of thumb, set on the public labels of MNIST and Fashion-MNIST with 1,800 features of
    ``PatchDictionary``, where the choice is flat (at epsilon 0.1, floors of 0.01 to 0.03 differ by
    half a point of accuracy); for other features it is a start. No private label enters.

    Args:
        epsilon: the budget of the release, finite and above zero.
        num_labels: n, at least one.

    Returns:
        A float in (0, 1].

    Example:
        >>> decorrelation_floor(epsilon=0.1, num_labels=60_000)
        0.02
    """
    budget = _validate.positive_finite("epsilon", epsilon)
    n = _validate.integer_at_least("num_labels", num_labels, 1)
    return min(1.0, _FLOOR_PER_LABEL / (budget * n))


class Moments:
    """Mean and covariance of rows that come in batches, ``float64``."""

    def __init__(self) -> None:
        self._shift: np.ndarray | None = None
        self._count = 0

    def add(self, rows: np.ndarray) -> None:
        """Takes rows (m, d)."""
        if self._shift is None:
            # Sums about a point near the mean keep their digits.
            self._shift = rows.mean(axis=0, dtype=np.float64).astype(np.float32)
            self._sum = np.zeros(rows.shape[1])
            self._products = np.zeros((rows.shape[1], rows.shape[1]))
        moved = rows - self._shift
        self._sum += moved.sum(axis=0, dtype=np.float64)
        self._products += moved.T @ moved
        self._count += len(rows)

    def mean_and_covariance(self) -> tuple[np.ndarray, np.ndarray]:
        """Returns (d,) and (d, d)."""
        if self._shift is None:
            raise ValueError("no rows were given; give at least one.")
        mean = self._sum / self._count
        covariance = self._products / self._count - np.outer(mean, mean)
        return self._shift + mean, covariance


def affine_map(
    mean: np.ndarray, covariance: np.ndarray, floor: float | None
) -> tuple[np.ndarray | None, np.ndarray]:
    """Returns a matrix (d, d) and an offset (d,), ``float32``: features become ``x M + offset``.

    ``M`` is ``(C + floor * max_eigenvalue(C) * I)^(-1/2)`` for the covariance ``C``, times a number
    that makes the mean squared norm of the results one; ``floor=None`` only centres (M is None).

    The noise of a release of ``X^T Y`` is the same in all directions, so what a direction can tell
    of the labels depends on its share of the rows' length. Centring frees the share of the mean,
    which tells the classes nothing; whitening hands that of a few strong directions to the many
    weak ones, and the floor says down to which. All of it is computed from features alone.
    """
    if floor is None:
        return None, (-mean).astype(np.float32)
    variances, axes = np.linalg.eigh(covariance)
    variances = np.maximum(variances, 0.0)
    largest = float(variances[-1])
    if largest == 0.0:
        raise ValueError(
            "decorrelate needs features that differ between examples, but all are the same. Pass "
            "decorrelate=None, or check the inputs."
        )
    gains = 1.0 / np.sqrt(variances + floor * largest)
    gains /= np.sqrt((variances * gains**2).sum())
    matrix = (axes * gains) @ axes.T
    return matrix.astype(np.float32), (-mean @ matrix).astype(np.float32)
