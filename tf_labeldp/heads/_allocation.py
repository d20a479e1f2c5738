"""Where to spend a release: shares of a row's length for the principal directions of features.

A release of ``X^T Y`` has the same noise in all directions, and its size is fixed by the length of
the longest row. So a linear map of the features before they are scaled to unit length decides how
much of the signal each direction gets, and as it is made of public features alone, it is free.

Let the centred features have the covariance eigenvalues ``l_j``, let direction j get the share
``p_j`` of the squared length of an average row (``sum_j p_j = 1``), and let ``c_j^2`` be the part
of the labels' energy that direction j explains. Its moment has the size ``n sqrt(p_j) c_j`` and
noise of standard deviation sigma in each of k columns, so that the best linear estimate leaves of
``c_j^2`` the error ``c_j^2 v_j / (c_j^2 + v_j)`` with ``v_j = k sigma^2 / (n^2 p_j)``. The sum of
these errors is least for

``p_j = max(0, tau - k sigma^2 / (n^2 c_j^2))``,

with the level tau that makes the shares sum to one: water-filling, as for parallel Gaussian
channels (Cover and Thomas, "Elements of Information Theory", section 9.4). The ``c_j^2`` are not
known. Under the normal prior of ridge regression, coefficients of equal variance in the features as
they are, they are proportional to ``l_j`` in expectation; their sum is taken to be the variance of
the codes of labels, as if the features explained the labels in full. Strong directions so get equal
shares (whitening), weak ones less, and those that the noise would drown anyway get nothing.
"""

from __future__ import annotations

import numpy as np

_RANK = 1e-10
"""An eigenvalue below this part of the largest counts as zero: rows are mapped in single precision,
in which such a direction, 1e-5 of a row's length, is known to one part in a hundred."""


def spread_shares(eigenvalues: np.ndarray, noise_to_signal: float) -> np.ndarray:
    """Returns the share (d,) of the squared length that each direction gets; their sum is one.

    Args:
        eigenvalues: of the covariance, (d,), at least zero, not all zero.
        noise_to_signal: ``k sigma^2 / (n^2 V)`` for k noisy columns and codes of variance V (summed
            over the columns), above zero.
    """
    strength = eigenvalues / eigenvalues.sum()
    with np.errstate(divide="ignore", over="ignore"):
        depth = noise_to_signal / strength
    # Only differences of depths matter; as they are, a huge one would swallow the unit of water.
    depth -= depth.min()
    ordered = np.sort(depth)
    # With the m shallowest directions under water, the level is (1 + sum of their depths) / m.
    with np.errstate(over="ignore"):
        levels = (1.0 + np.cumsum(ordered)) / np.arange(1, depth.size + 1)
    level = levels[np.flatnonzero(levels > ordered)[-1]]
    shares = np.maximum(level - depth, 0.0)
    return shares / shares.sum()


def spread_map(covariance: np.ndarray, noise_to_signal: float | None) -> np.ndarray | None:
    """Returns the map (d, m), ``float32``, from centred rows to the directions that get a share.

    Args:
        covariance: (d, d), Fortran order; its upper triangle is used, and overwritten.
        noise_to_signal: as in ``spread_shares``; None for no map.

    Returns:
        ``V diag(sqrt(p / l))`` over the m directions of positive share; or None.
    """
    if noise_to_signal is None:
        return None
    from scipy import linalg

    driver = "evd" if len(covariance) > 1 else "ev"  # some versions of SciPy fail at 1 x 1
    values, vectors = linalg.eigh(covariance, lower=False, driver=driver, overwrite_a=True)
    if values[-1] <= 0.0:  # rows that do not differ: nothing to choose from
        return None
    # A large budget would spend a full share on rounding.
    values = np.where(values > _RANK * values[-1], values, 0.0)
    shares = spread_shares(values, noise_to_signal)
    kept = shares > 0.0
    gains = np.sqrt(shares[kept] / values[kept])
    vectors = vectors[:, kept]
    # An eigenvector's sign is arbitrary; a stored release is of use with the same signs alone.
    largest = np.abs(vectors).argmax(axis=0)
    gains *= np.sign(vectors[largest, np.arange(largest.size)])
    return (vectors * gains).astype(np.float32)
