"""Spherical k-means on whitened patches, and the whitening: the label-free part of learning."""

from __future__ import annotations

import numpy as np

_BLOCK = 16_384


def zca(rows: np.ndarray, floor: float) -> tuple[np.ndarray, np.ndarray]:
    """Returns the mean (p,) and the symmetric whitening matrix (p, p) of rows, ``float64``.

    Args:
        rows: (n, p).
        floor: what is added to every eigenvalue of the covariance, above zero.
    """
    wide = rows.astype(np.float64, copy=False)
    mean = wide.mean(axis=0)
    covariance = wide.T @ wide / len(wide) - np.outer(mean, mean)
    variances, axes = np.linalg.eigh(covariance)
    return mean, (axes / np.sqrt(np.maximum(variances, 0.0) + floor)) @ axes.T


def spherical_kmeans(
    rows: np.ndarray, num_atoms: int, rng: np.random.Generator, rounds: int = 15
) -> np.ndarray:
    """Returns directions of unit norm, ``float32`` (num_atoms, p), up to sign.

    A row belongs to the atom of the largest absolute product with it, and moves that atom by the
    product times the row (so rows of high energy count more, and opposite rows pull alike).

    Source: Coates and Ng, "Learning feature representations with k-means" (2012), section 3.

    Args:
        rows: ``float32`` (n, p).
        num_atoms: the number of directions.
        rng: the source of the first directions.
        rounds: passes over the rows.
    """
    from scipy import sparse

    atoms = _unit(rng.normal(size=(num_atoms, rows.shape[1]))).astype(np.float32)
    for _ in range(rounds):
        moved = atoms.astype(np.float64)  # keeps an atom without rows where it is
        for start in range(0, len(rows), _BLOCK):
            block = rows[start : start + _BLOCK]
            products = block @ atoms.T
            chosen = np.abs(products).argmax(axis=1)
            weights = products[np.arange(len(block)), chosen]
            code = sparse.csr_array(
                (weights, chosen, np.arange(len(block) + 1)), shape=products.shape
            )
            moved += code.T @ block
        atoms = _unit(moved).astype(np.float32)
    return atoms


def _unit(rows: np.ndarray) -> np.ndarray:
    """Returns rows scaled to unit norm; a row of zeros becomes the first axis."""
    norms = np.linalg.norm(rows, axis=1, keepdims=True)
    first = np.eye(1, rows.shape[1])
    return np.where(norms > 0.0, rows / np.where(norms > 0.0, norms, 1.0), first)
