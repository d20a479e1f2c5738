"""Randomized response on a subset of classes: the stateless core of RR, RRTop-k and RRWithPrior.

Ties are broken by one rule everywhere: of two classes with equal prior the one with the smaller
index comes first, and of two set sizes with equal objective the smaller wins.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from tf_labeldp.mechanisms import _random

_CHUNK_CELLS = 1 << 20
"""Rows are handled so many cells at a time, which bounds the working memory beside the input."""


def rank_classes(priors: np.ndarray) -> np.ndarray:
    """Returns the classes of each row (n, K) from the largest prior to the smallest."""
    return np.argsort(-priors, axis=1, kind="stable")


def top_k_members(scores: np.ndarray, k: np.ndarray | int) -> np.ndarray:
    """Returns which classes are in the top-k set of each row, by the rule that RRTop-k draws in.

    Args:
        scores: priors or other scores (n, K), larger is likelier; finite.
        k: size of the set, one number or (n,), in 1..K.

    Returns:
        ``bool`` array (n, K). Of classes with equal scores those with the smaller index come first.

    Example:
        >>> import numpy as np
        >>> top_k_members(np.array([[0.2, 0.4, 0.2, 0.2]]), 2).tolist()
        [[True, True, False, False]]
    """
    within = np.arange(scores.shape[1]) < np.reshape(k, (-1, 1))
    members = np.empty(scores.shape, dtype=bool)
    np.put_along_axis(members, rank_classes(scores), within, axis=1)
    return members


def optimal_set_size(priors: np.ndarray, epsilon: float) -> np.ndarray:
    """Returns k* of Algorithm 2 (``ghazi2021``) for each row of priors (n, K), ``int64`` (n,).

    Maximises ``w_k = e^epsilon / (e^epsilon + k - 1) * (sum of the k largest priors)``, written
    with e^-epsilon so that a large epsilon does not overflow.
    """
    best = np.empty(priors.shape[0], dtype=np.int64)
    weights = 1.0 / (1.0 + np.arange(priors.shape[1]) * math.exp(-epsilon))
    for rows in row_chunks(priors.shape):
        mass = np.cumsum(np.sort(priors[rows], axis=1)[:, ::-1], axis=1)
        best[rows] = np.argmax(mass * weights, axis=1) + 1
    return best


def randomize_in_top_k(
    labels: np.ndarray,
    priors: np.ndarray,
    k: np.ndarray,
    epsilon: float,
    rng: np.random.Generator | None,
) -> np.ndarray:
    """Returns one draw of RRTop-k (Algorithm 1, ``ghazi2021``) for each label.

    Args:
        labels: ``int64`` (n,), in 0..K-1.
        priors: ``float64`` (n, K), or (1, K) for one prior for all.
        k: size of the set for each label, ``int64`` (n,), in 1..K.
        epsilon: privacy parameter.
        rng: source of random bits; None takes the operating system's.
    """
    noisy = np.empty_like(labels)
    shared = priors.shape[0] == 1
    order = rank_classes(priors) if shared else None
    for rows in row_chunks((labels.size, priors.shape[1])):
        ranked = order if order is not None else rank_classes(priors[rows])
        # For a shared prior the inverse permutation gives ranks; else compare along the row.
        if shared:
            rank = np.argsort(ranked[0])[labels[rows]]
        else:
            rank = np.argmax(ranked == labels[rows][:, np.newaxis], axis=1)
        drawn = draw_ranks(rank, k[rows], epsilon, rng)
        noisy[rows] = (
            ranked[0][drawn]
            if shared
            else np.take_along_axis(ranked, drawn[:, np.newaxis], axis=1)[:, 0]
        )
    return noisy


def draw_ranks(
    rank: np.ndarray, k: np.ndarray, epsilon: float, rng: np.random.Generator | None
) -> np.ndarray:
    """Returns randomized ranks in [0, k) for true ranks (n,); a rank >= k is "outside the set".

    Inside the set: another rank of the set with the flip probability of randomized response over k
    values, else the rank itself. Outside: uniform over the set.
    """
    inside = rank < k
    flip = _random.uniform_integers(rank.size, rng) < _random.flip_threshold(epsilon, k)
    # Inside the set there are k - 1 other ranks (one stands in where k = 1, and is never used).
    target = _random.uniform_below(np.where(inside, np.maximum(k - 1, 1), k), rng)
    other = target + (inside & (target >= rank))  # skips the true rank
    return np.where(inside & ~flip, rank, other)


def top_k_transition_matrix(prior: np.ndarray, k: int, epsilon: float) -> np.ndarray:
    """Returns the channel of Algorithm 1 for one prior (K,): ``float64`` (K, K), row-stochastic."""
    members = rank_classes(prior[np.newaxis, :])[0, :k]
    shrink = math.exp(-epsilon)
    matrix = np.zeros((prior.size, prior.size))
    matrix[:, members] = 1.0 / k
    matrix[np.ix_(members, members)] = shrink / (1.0 + (k - 1) * shrink)
    matrix[members, members] = 1.0 / (1.0 + (k - 1) * shrink)
    return matrix


def row_chunks(shape: tuple[int, ...]) -> Iterator[slice]:
    """Yields slices of rows that hold about ``_CHUNK_CELLS`` cells each."""
    step = max(1, _CHUNK_CELLS // max(1, shape[1]))
    for start in range(0, shape[0], step):
        yield slice(start, min(start + step, shape[0]))
