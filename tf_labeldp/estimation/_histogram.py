"""Private histograms of labels in one call, and the priors that they make."""

from __future__ import annotations

from typing import Any

import numpy as np

from tf_labeldp.mechanisms import HistogramMechanism


def private_histogram(
    labels: Any,
    num_classes: int | None,
    epsilon: float,
    groups: Any = None,
    noise: str = "discrete_laplace",
    *,
    values: Any = None,
    key: str | None = None,
    rng: np.random.Generator | None = None,
) -> np.ndarray:
    """Returns noisy counts of labels: ``HistogramMechanism`` in one call.

    Privacy: that of ``HistogramMechanism``, epsilon for the whole result. A vault
    (``PrivateLabels``) charges it to its budget and stores the result under ``key``. With a plain
    array nobody keeps account: you have to add this epsilon to what else is drawn from the labels.

    Args:
        labels: a ``PrivateLabels``, or an array (n,): classes 0..K-1, or numbers with ``values``.
        num_classes: K; None with ``values``.
        epsilon: finite and above zero.
        groups: public integers (n,), the group of each label; None for one histogram of all.
        noise: ``"discrete_laplace"`` or ``"laplace"``.
        values: the cells for labels that are numbers; None with ``num_classes``.
        key: for a vault, the name under which it stores the result.
        rng: for an array, a generator for repeatable (not private) runs.

    Returns:
        ``int64`` (``float64`` for ``"laplace"``), (cells,), or (G, cells) with groups.

    Raises:
        TypeError: labels, groups or ``rng`` of a wrong kind.
        ValueError: an argument out of range; ``rng`` with a vault, or ``key`` without one.

    Example:
        >>> import numpy as np
        >>> labels = np.repeat([0, 1, 2], [500, 300, 200])
        >>> private_histogram(labels, 3, epsilon=1.0, rng=np.random.default_rng(0)).tolist()
        [502, 297, 196]
    """
    mechanism = HistogramMechanism(epsilon, num_classes, values, noise)
    # Told by what it can do: the vault's part is below this one, which must not import it.
    if hasattr(labels, "release"):
        if rng is not None:
            raise ValueError(
                "rng must be None with a PrivateLabels: it has its own source of random bits. Use "
                "PrivateLabels(..., seed=...) for a repeatable run."
            )
        return labels.release(mechanism, public_input=groups, key=key)
    if key is not None:
        raise ValueError(
            "key names a stored result of a PrivateLabels, but labels is an array. Leave key=None."
        )
    return mechanism.release(labels, groups, rng=rng)


def histogram_prior(histogram: Any) -> np.ndarray:
    """Returns a noisy histogram as probabilities: negative counts to zero, rows normalised.

    A row without any positive count becomes uniform; the papers leave this case open.

    Privacy: post-processing of noisy counts; nothing is charged.

    Source: the last steps of Algorithm 4 of ``ghazi2023`` (appendix C.1).

    Args:
        histogram: counts (K,) or (G, K), finite.

    Returns:
        ``float64`` of the same shape; the last axis sums to one.

    Raises:
        ValueError: a wrong shape, NaN or infinite counts.

    Example:
        >>> histogram_prior([[6, -1, 2], [-3, 0, -1]]).round(4).tolist()
        [[0.75, 0.0, 0.25], [0.3333, 0.3333, 0.3333]]
    """
    counts = np.asarray(histogram, dtype=np.float64)
    if counts.ndim not in (1, 2) or counts.shape[-1] == 0:
        raise ValueError(
            f"histogram must have shape (K,) or (G, K), got {counts.shape}: counts, not labels."
        )
    if not np.all(np.isfinite(counts)):
        bad = int(np.count_nonzero(~np.isfinite(counts)))
        raise ValueError(f"histogram must be finite, but {bad} count(s) are NaN or infinite.")
    clipped = np.maximum(counts, 0.0)
    total = clipped.sum(axis=-1, keepdims=True)
    empty = total == 0.0
    return np.where(empty, 1.0 / counts.shape[-1], clipped / np.where(empty, 1.0, total))
