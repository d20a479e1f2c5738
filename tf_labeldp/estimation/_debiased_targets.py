"""Channel inverses as targets: noisy labels turned into signed weights over the classes."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from tf_labeldp import _validate
from tf_labeldp.mechanisms import (
    ClassificationMechanism,
    PriorMechanism,
    PriorResampling,
    RandomizedResponse,
    checked_mechanism,
    top_k_members,
)
from tf_labeldp.mechanisms._prior_resampling import checked_bias_correction

_MAX_CONDITION = 1e12


def debiased_targets(
    mechanism: ClassificationMechanism,
    noisy_labels: Any,
    priors: Any = None,
    *,
    bias_correction: float | None = None,
) -> np.ndarray:
    """Returns weights w such that ``sum_k w_k loss(y_pred, k)`` is unbiased for the true label.

    For RRTop-k, and RRWithPrior with its k*, the weights are those of ``ghazi2021``, equation 17:
    with ``p = 1 / (e^eps + k - 1)``, ``w = (onehot(noisy) - p * [class in top-k]) / (1 - k p)``.
    For randomized response (k = K) this is RR-Debiased: Algorithm 5, equation 7 of ``ghazi2021``,
    and appendix D.1 of ``ghazi2024``. For any other mechanism with a square channel Q, w is the row
    of ``Q^-1`` at the noisy label. Use them as ``y_true`` of ``keras_layers.LabelWeightedLoss``.

    The loss is unbiased where the true label lies in the top-k set (``ghazi2021``, Lemma 18); for
    bounded losses the bias is at most the probability that it does not (Lemma 20). Its Lipschitz
    constant grows by ``(1 + k p) / (1 - k p)`` (Lemma 19).

    For ``PriorResampling``, which cluster-based randomized response draws by, the weights are those
    of the modified loss of ``esfandiari2022`` (lines 28 to 30 of Algorithm 1):
    ``w = (onehot(noisy) - beta q) / (1 - beta)`` with the prior q. The loss is unbiased for
    ``beta = lambda`` (Lemma 3); a smaller beta varies less and leaves a bias, for losses in [0, 1]
    of at most ``|beta - lambda| / (1 - beta)`` times the L1 distance of q from the true
    distribution.

    Privacy: post-processing of noisy labels; nothing is charged.

    Args:
        mechanism: the mechanism that drew the labels.
        noisy_labels: its output, integers (n,) in 0..K-1.
        priors: the very priors of the draw, (K,) or (n, K), for mechanisms that use them.
        bias_correction: beta, in [0, 1), for ``PriorResampling`` alone; None is the lambda with
            which each label was resampled. With 0 the targets are the noisy labels, one-hot.

    Returns:
        ``float64`` array (n, K); rows sum to one, entries may be negative.

    Raises:
        TypeError: the mechanism is none, or the labels are not integers.
        ValueError: priors missing, superfluous or of a wrong shape; a noisy label that these
            priors cannot have produced; a channel that cannot be inverted; or a bias correction
            out of its range, or for another mechanism.

    Example:
        >>> from tf_labeldp.mechanisms import RandomizedResponse
        >>> mechanism = RandomizedResponse(epsilon=1.0, num_classes=3)
        >>> debiased_targets(mechanism, [2]).round(3).tolist()
        [[-0.582, -0.582, 2.164]]
    """
    num_classes = checked_mechanism(mechanism, ClassificationMechanism).num_classes
    if bias_correction is not None and not isinstance(mechanism, PriorResampling):
        raise ValueError(
            f"bias_correction is for PriorResampling, got {type(mechanism).__name__}, whose loss "
            "is corrected in full. Leave bias_correction=None."
        )
    noisy = _validate.class_indices("noisy_labels", noisy_labels, num_classes)
    if not mechanism.uses_priors:
        if priors is not None:
            raise ValueError(f"{type(mechanism).__name__} takes no priors; leave priors=None.")
        if isinstance(mechanism, RandomizedResponse):
            everywhere = np.ones((1, num_classes), dtype=bool)
            return _top_k_weights(noisy, everywhere, np.array([num_classes]), mechanism.epsilon)
        return channel_inverse(mechanism.transition_matrix())[noisy]
    if priors is None:
        raise ValueError(
            f"{type(mechanism).__name__} drew its labels with priors; pass the same ones, of shape "
            f"({num_classes},) or ({noisy.size}, {num_classes})."
        )
    if isinstance(mechanism, PriorResampling):
        return _resampling_weights(mechanism, noisy, priors, bias_correction)
    if not isinstance(mechanism, PriorMechanism):
        raise ValueError(
            f"debiased_targets does not know the channel of {type(mechanism).__name__} by prior."
        )
    rows = _validate.prior_rows("priors", priors, noisy.size, num_classes)
    k = mechanism.set_sizes(rows)
    members = top_k_members(rows, k)
    possible = np.broadcast_to(members, (noisy.size, num_classes))[np.arange(noisy.size), noisy]
    if not np.all(possible):
        raise ValueError(
            f"{int(np.count_nonzero(~possible))} noisy label(s) lie outside the top-k set of their "
            "prior, so these are not the priors of the draw. Keep the priors that you randomize "
            "with and pass those, in the same order."
        )
    return _top_k_weights(noisy, members, k, mechanism.epsilon)


def _resampling_weights(
    mechanism: PriorResampling, noisy: np.ndarray, priors: Any, bias_correction: float | None
) -> np.ndarray:
    """Returns row z of ``Q^-1`` for each noisy label z, where ``Q = (1 - beta) I + beta 1 q^T``.

    As ``q^T 1 = 1``, the formula of Sherman and Morrison gives ``(I - beta 1 q^T) / (1 - beta)``.
    """
    rows = _validate.prior_rows("priors", priors, noisy.size, mechanism.num_classes)
    if bias_correction is not None:
        beta = np.array([checked_bias_correction(bias_correction)])
    else:
        beta = mechanism.resampling_probabilities(rows)
        lost = int(np.count_nonzero((1.0 - beta) * _MAX_CONDITION < 1.0))
        if lost:
            raise ValueError(
                f"{lost} prior(s) have resampling probability 1, or next to it: the noisy label "
                "says nothing of the true one, and no loss is unbiased. Give a bias_correction "
                "below 1; 0 takes the noisy labels as they are. Or draw with priors that have no "
                "entries near zero."
            )
    weights = np.broadcast_to(rows, (noisy.size, mechanism.num_classes)) * -beta[:, np.newaxis]
    weights /= rows.sum(axis=1, keepdims=True)  # as the draw takes them
    weights[np.arange(noisy.size), noisy] += 1.0
    weights /= 1.0 - beta[:, np.newaxis]
    return weights


def channel_inverse(transition_matrix: Any) -> np.ndarray:
    """Returns ``Q^-1`` of a square channel ``Q[input, output]``.

    Row z of the inverse holds the weights of the unbiased loss when z was observed:
    ``sum_z Q[y, z] Q^-1[z, k] = [y == k]`` (matrix-inverse loss, ``esfandiari2022``).

    Args:
        transition_matrix: ``float64`` (K, K), row-stochastic.

    Returns:
        ``float64`` (K, K).

    Raises:
        ValueError: not square, not finite, or too close to singular (condition number above 1e12).

    Example:
        >>> channel_inverse([[0.75, 0.25], [0.25, 0.75]]).tolist()
        [[1.5, -0.5], [-0.5, 1.5]]
    """
    matrix = np.asarray(transition_matrix, dtype=np.float64)
    if matrix.ndim != 2 or matrix.shape[0] != matrix.shape[1]:
        raise ValueError(f"transition_matrix must be square (K, K), got shape {matrix.shape}.")
    if not np.all(np.isfinite(matrix)):
        raise ValueError("transition_matrix must be finite, but it holds NaN or infinity.")
    condition = np.linalg.cond(matrix)
    if not condition < _MAX_CONDITION:
        raise ValueError(
            f"the channel cannot be inverted (condition number {condition:.3g}): its outputs say "
            "too little about the label. Raise epsilon, or use ForwardCorrectedLoss."
        )
    return np.linalg.solve(matrix, np.eye(matrix.shape[0]))


def _top_k_weights(
    noisy: np.ndarray, members: np.ndarray, k: np.ndarray, epsilon: float
) -> np.ndarray:
    """Returns the weights of equation 17; ``members`` (1 or n, K), ``k`` (1 or n,)."""
    # p / (1 - k p) = 1 / (e^eps - 1) and 1 / (1 - k p) = (e^eps + k - 1) / (e^eps - 1), written
    # with e^-eps so that neither a large nor a small epsilon loses digits.
    gain = -math.expm1(-epsilon)
    shrink = math.exp(-epsilon)
    weights = np.where(members, -shrink / gain, 0.0)
    weights = np.broadcast_to(weights, (noisy.size, members.shape[1])).copy()
    weights[np.arange(noisy.size), noisy] += (1.0 + (k - 1) * shrink) / gain
    return weights
