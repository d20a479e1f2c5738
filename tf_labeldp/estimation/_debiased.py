"""Unbiased targets from noisy labels: signed weights over the classes, or numbers."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from tf_labeldp import _validate
from tf_labeldp.accounting import Public
from tf_labeldp.estimation._posterior import empty_targets, number_priors, priors_of_draw
from tf_labeldp.mechanisms import (
    ClassificationMechanism,
    LabelMechanism,
    PeerToPeerRandomizedResponse,
    PriorMechanism,
    Priors,
    ProjectiveGeometryResponse,
    RandomizedResponse,
    RegressionMechanism,
    RROnBins,
)
from tf_labeldp.mechanisms.classes import row_chunks, top_k_members
from tf_labeldp.mechanisms.clusters import PriorResampling
from tf_labeldp.mechanisms.priors import PriorRows

_MAX_CONDITION = 1e12
"""Above, the inverse of a channel has fewer than four correct digits."""


def debiased(
    mechanism: Public[LabelMechanism],
    noisy_labels: Public[Any],
    priors: Public[Any] = None,
    *,
    bias_correction: float | None = None,
) -> np.ndarray:
    """Returns targets whose loss is unbiased for the true label; ``NoisyLabels.debiased`` calls it.

    *Classes.* Weights w such that ``sum_k w_k loss(y_pred, k)`` is unbiased for the true label; use
    them as ``y_true`` of ``keras_layers.LabelWeightedLoss``.

    For RRTop-k, and RRWithPrior and InformativeRR with their k, the weights follow
    ``ghazi2021``, equation 17: with ``p = 1 / (e^eps + k - 1)``,
    ``w = (onehot(noisy) - p * [class in top-k]) / (1 - k p)``. For randomized response (k = K) this
    is RR-Debiased: Algorithm 5, equation 7 of ``ghazi2021``, and appendix D.1 of ``ghazi2024``. The
    loss is unbiased where the true label lies in the top-k set (Lemma 18); for bounded losses the
    bias is at most the probability that it does not (Lemma 20). For
    ``ProjectiveGeometryResponse``, whose sets S contain the label with probability p and another
    class with probability o, ``w = ([class in S] - o) / (p - o)``, plus an equal part for each
    class that makes the sum one; that part has mean zero. For any other mechanism with a channel Q,
    w is the row of its (pseudo-)inverse at the noisy label.

    For ``PriorResampling`` the weights follow the modified loss of ``esfandiari2022`` (lines 28 to
    30 of Algorithm 1): ``w = (onehot(noisy) - beta q) / (1 - beta)`` with the prior q. The
    loss is unbiased for ``beta = lambda`` (Lemma 3). A smaller beta lowers the variance and leaves
    a bias of at most ``|beta - lambda| / (1 - beta)`` times the L1 distance of q from the true
    distribution, for losses in [0, 1]. For ``PeerToPeerRandomizedResponse`` the weights undo the
    flips: they are unbiased for the peer's label, and so for the share in the cluster.

    *Numbers.* An output of RR-on-Bins is the mean of all labels that may have drawn it, so noisy
    labels shrink to the overall mean, a bias that section 6 of ``ghazi2023`` leaves open. With d
    bins whose labels have means ``r_j``, ``s = e^-epsilon`` and ``T = 1 + (d - 1) s``, the labels
    ``w_j = (T r_j - s sum_i r_i) / (1 - s)`` have ``E[w | bin b] = r_b``: the inverse channel over
    the bins, applied to ``r``. Their spread is larger by about ``T / (1 - s)``; the remaining bias
    is the width of the bins. Laplace and staircase noise without clipping is unbiased, and so are
    the channels of ``optimal_unbiased`` and the noisy one-hot rows of ``ALIBI``.

    Guarantee:
        Post-processing of noisy labels and of a public or released prior: no charge.

    Args:
        mechanism: the mechanism that drew the labels.
        noisy_labels: its output, (n,), or (n, K) from ``ALIBI``.
        priors: for classes the priors of the draw, (K,) or (n, K) or ``Priors``, if the mechanism
            uses priors; for numbers ``Priors`` with their ``values``.
        bias_correction: beta, in [0, 1), only for ``PriorResampling``; None uses the lambda with
            which each label was resampled. With 0 the targets are the noisy labels, one-hot.

    Returns:
        ``float64`` (n, K), rows that sum to one with entries of either sign; the rows themselves
        for ``ALIBI``; (n,) for numbers.

    Raises:
        TypeError: a mechanism with unknown bias, or labels of a wrong type.
        ValueError: priors missing, superfluous or of a wrong shape; impossible noisy labels; a
            channel that cannot be inverted; a wrong bias correction.

    Example:
        >>> from tf_labeldp.mechanisms import Priors, RandomizedResponse, RROnBins
        >>> mechanism = RandomizedResponse(epsilon=1.0, num_classes=3)
        >>> debiased(mechanism, [2]).round(3).tolist()
        [[-0.582, -0.582, 2.164]]
        >>> bins = RROnBins(1.0, [0.0, 1.0], outputs=[0.25, 0.75], bin_of_input=[0, 1])
        >>> debiased(bins, [0.25, 0.75], Priors([0.5, 0.5], values=[0.0, 1.0])).round(4).tolist()
        [-0.582, 1.582]
    """
    LabelMechanism.checked(mechanism)
    if bias_correction is not None and not isinstance(mechanism, PriorResampling):
        name = type(mechanism).__name__
        raise ValueError(f"bias_correction is for PriorResampling, got {name}. Leave it out.")
    if isinstance(mechanism, ClassificationMechanism):
        return _of_classes(mechanism, noisy_labels, priors, bias_correction)
    if isinstance(mechanism, RegressionMechanism):
        numbers = _of_numbers(mechanism, noisy_labels, priors)
        return priors.shifted(numbers) if isinstance(priors, Priors) else numbers
    if isinstance(mechanism, PeerToPeerRandomizedResponse):
        alpha = mechanism.flip_probability
        channel = [[1.0 - alpha, alpha], [alpha, 1.0 - alpha]]
        return channel_inverse(channel)[_validate.class_indices("noisy_labels", noisy_labels, 2)]
    mechanism.check_unbiased()
    return np.array(noisy_labels, dtype=np.float64)


def _of_numbers(mechanism: RegressionMechanism, noisy_labels: Any, priors: Any) -> np.ndarray:
    if isinstance(mechanism, RROnBins):
        return _of_bins(mechanism, noisy_labels, priors)
    mechanism.check_unbiased()
    return _validate.real_vector("noisy_labels", noisy_labels)


def _of_classes(
    mechanism: ClassificationMechanism, noisy_labels: Any, priors: Any, beta: float | None
) -> np.ndarray:
    noisy = _validate.class_indices("noisy_labels", noisy_labels, mechanism.num_outputs)
    if not mechanism.uses_priors:
        mechanism._refuse_public(priors)
        if isinstance(mechanism, ProjectiveGeometryResponse):
            return _set_weights(mechanism, noisy)
        if not isinstance(mechanism, RandomizedResponse):
            return channel_inverse(mechanism.transition_matrix())[noisy]
    prior = priors_of_draw(mechanism, priors, noisy.size)
    if isinstance(mechanism, PriorResampling):
        return _resampling_weights(mechanism, noisy, prior, beta)
    if not isinstance(mechanism, (RandomizedResponse, PriorMechanism)):
        name = type(mechanism).__name__
        raise ValueError(f"the channel of {name} by prior is unknown. Use the posterior.")
    found = empty_targets(mechanism, noisy.size)
    impossible = 0
    # p / (1 - k p) = 1 / (e^eps - 1) and 1 / (1 - k p) = (e^eps + k - 1) / (e^eps - 1), written
    # with e^-eps so that no epsilon loses digits.
    gain, shrink = -math.expm1(-mechanism.epsilon), math.exp(-mechanism.epsilon)
    for some in row_chunks(found.shape):
        rows = prior.of_labels(some)
        k = mechanism.set_sizes(rows)
        members = np.broadcast_to(top_k_members(rows, k), found[some].shape)
        picked = np.arange(len(members)), noisy[some]
        impossible += int(np.count_nonzero(~members[picked]))
        weights = np.where(members, -shrink / gain, 0.0)
        weights[picked] += (1.0 + (k - 1) * shrink) / gain
        found[some] = weights
    if impossible:
        raise ValueError(
            f"{impossible} noisy label(s) lie outside the top-k set of their prior. Pass the "
            "priors of the draw, in the same order."
        )
    return found


def _set_weights(mechanism: ProjectiveGeometryResponse, noisy: np.ndarray) -> np.ndarray:
    found = empty_targets(mechanism, noisy.size)
    own, other = mechanism.inclusion_probabilities
    for some in row_chunks(found.shape):
        weights = (mechanism.members(noisy[some]) - other) / (own - other)
        found[some] = weights + (1.0 - weights.sum(axis=1, keepdims=True)) / mechanism.num_classes
    return found


def _resampling_weights(
    mechanism: PriorResampling, noisy: np.ndarray, prior: PriorRows, beta: float | None
) -> np.ndarray:
    """Returns row z of ``Q^-1`` for each noisy label z, where ``Q = (1 - beta) I + beta 1 q^T``."""
    # As q^T 1 = 1, the formula of Sherman and Morrison gives (I - beta 1 q^T) / (1 - beta).
    if beta is not None:
        betas = np.full(noisy.size, PriorResampling.checked_bias_correction(beta))
    else:
        of_rows = mechanism.resampling_probabilities(prior.rows)
        lost = int(np.count_nonzero((1.0 - of_rows) * _MAX_CONDITION < 1.0))
        if lost:
            raise ValueError(
                f"{lost} prior(s) have a resampling probability of about 1, so no loss is "
                "unbiased. Pass a bias_correction below 1; 0 keeps the noisy labels."
            )
        betas = prior.by_label(of_rows)
    found = empty_targets(mechanism, noisy.size)
    for some in row_chunks(found.shape):
        rows = prior.of_labels(some)
        weights = np.broadcast_to(rows, found[some].shape) * -betas[some, np.newaxis]
        # The draw normalises its priors too.
        weights /= rows.sum(axis=1, keepdims=True)
        weights[np.arange(len(weights)), noisy[some]] += 1.0
        found[some] = weights / (1.0 - betas[some, np.newaxis])
    return found


def _of_bins(mechanism: RROnBins, noisy_labels: Any, priors: Any) -> np.ndarray:
    values, prior = number_priors(priors)
    place, is_output = mechanism.output_index(noisy_labels)
    if not np.all(is_output):
        raise ValueError(
            f"{int(np.count_nonzero(~is_output))} noisy label(s) are not outputs of {mechanism!r}. "
            "Pass the mechanism of the draw."
        )
    outputs = np.asarray(mechanism.outputs)
    bins = mechanism.bin_of(values)
    mass = np.bincount(bins, prior, minlength=outputs.size)
    total = np.bincount(bins, prior * values, minlength=outputs.size)
    # The mean of a bin with probability zero is its output.
    means = np.where(mass > 0.0, total / np.where(mass > 0.0, mass, 1.0), outputs)
    shrink, gain = math.exp(-mechanism.epsilon), -math.expm1(-mechanism.epsilon)
    spread = 1.0 + (outputs.size - 1) * shrink
    return ((spread * means - shrink * means.sum()) / gain)[place]


def channel_inverse(transition_matrix: Any) -> np.ndarray:
    """Returns the (pseudo-)inverse of a channel ``Q[input, output]`` (``esfandiari2022``).

    Row z has the weights of the unbiased loss for the noisy label z:
    ``sum_z Q[y, z] Q^-1[z, k] = [y == k]``.
    """
    matrix = np.asarray(transition_matrix, dtype=np.float64)
    condition = np.linalg.cond(matrix)
    if not condition < _MAX_CONDITION:
        raise ValueError(
            f"the channel cannot be inverted (condition number {condition:.3g}). Raise epsilon, "
            "or use ForwardCorrectedLoss."
        )
    if matrix.shape[0] != matrix.shape[1]:
        return np.linalg.pinv(matrix)
    return np.linalg.solve(matrix, np.eye(matrix.shape[0]))
