"""Priors from noisy histograms, noisy labels and models."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from tf_labeldp import _validate
from tf_labeldp.accounting import Public
from tf_labeldp.estimation._debiased import debiased
from tf_labeldp.mechanisms import (
    ALIBI,
    ClassificationMechanism,
    Priors,
    ProjectiveGeometryResponse,
    RandomizedResponse,
    RROnBins,
)
from tf_labeldp.mechanisms.clusters import PriorResampling
from tf_labeldp.mechanisms.priors import PriorRows

_SPLIT_AT = 1.5
"""Standard deviations of noise that the smaller part of a split must exceed to get a share."""
_LEAST_KEPT = 1e-9
"""The least probability of keeping a label at which the shares of clusters are estimated."""
_SURE = 2.0
"""Standard deviations of an estimate of risk by which the better estimator must be better."""
_REST = 0.01
"""Total share of the floors where few classes have most of the mass."""


def histogram_prior(histogram: Any) -> np.ndarray:
    """Returns noisy counts (K,) or (G, K) as probabilities; negative counts become zero.

    A row without a positive count becomes uniform; the papers leave this case open.

    Guarantee:
        Post-processing of noisy counts: no charge.

    Source: the last steps of Algorithm 4 of ``ghazi2023`` (appendix C.1).
    """
    clipped = np.maximum(np.asarray(histogram, dtype=np.float64), 0.0)
    total = clipped.sum(axis=-1, keepdims=True)
    empty = total == 0.0
    return np.where(empty, 1.0 / clipped.shape[-1], clipped / np.where(empty, 1.0, total))


def ordered_prior(histogram: Any, totals: Any, noise_stddev: float) -> np.ndarray:
    """Returns noisy counts over ordered values, (k,) or (G, k), as probabilities.

    Setting negative counts to zero would add mass to empty cells, which most values of amounts are,
    and so raise the mean. Instead the public ``totals``, (G,) or a number, are split between the
    lower and upper half of the values by their noisy sums, then each part again, down to single
    values. A part below 1.5 standard deviations of the noise of its split gets nothing, so empty
    stretches stay empty. Rows with total zero become uniform.

    Guarantee:
        Post-processing of noisy counts: no charge.

    Source: the splits of Hay et al. 2010, "Boosting the accuracy of differentially private
    histograms through consistency", with a known total; the threshold is ours (``benchmarks``). The
    papers set negative counts to zero (Algorithm 4 of ``ghazi2023``).
    """
    counts = np.asarray(histogram, dtype=np.float64)
    rows = np.atleast_2d(counts)
    totals = np.broadcast_to(np.asarray(totals, dtype=np.float64), rows.shape[:1])
    sums = np.concatenate([np.zeros((len(rows), 1)), np.cumsum(rows, axis=1)], axis=1)
    edges = np.array([0, rows.shape[1]])
    split = np.where(totals > 0.0, totals, 1.0)[:, np.newaxis]  # (G, parts), level by level
    while len(edges) <= rows.shape[1]:
        start, stop = edges[:-1], edges[1:]
        # The upper part of a single value is empty.
        middle = (start + stop + 1) // 2
        below, above = middle - start, stop - middle
        lower, upper = sums[:, middle] - sums[:, start], sums[:, stop] - sums[:, middle]
        # The sums differ from the total by noise, which is shared equally among the counts.
        lower += (split - lower - upper) * below / (below + above)
        least = _SPLIT_AT * noise_stddev * np.sqrt(below * above / (below + above))
        lower = np.where(lower < least, 0.0, np.where(split - lower < least, split, lower))
        lower = np.where(above > 0, np.clip(lower, 0.0, split), split)
        halves = np.stack([lower, split - lower], axis=2).reshape(len(rows), -1)
        kept = np.stack([below, above], axis=1).ravel() > 0
        split = halves[:, kept]
        edges = np.unique(np.concatenate([edges, middle]))
    split /= split.sum(axis=1, keepdims=True)
    split[totals <= 0.0] = 1.0 / rows.shape[1]
    return split.reshape(counts.shape)


def estimated_prior(mechanism: Any, noisy_labels: Any) -> np.ndarray | Priors | None:
    """Returns the prior that noisy labels estimate, no entry of which is zero.

    For classes and ``ALIBI`` it is ``float64`` (K,), for ``RROnBins`` ``Priors`` with values, and
    for other mechanisms None. What the channel cannot distinguish has equal shares: the classes
    that a singular channel mixes, and the inputs in a bin.

    Guarantee:
        Post-processing of noisy labels: no charge beyond theirs.
    """
    if isinstance(mechanism, RROnBins):
        return _prior_of_bins(mechanism, noisy_labels)
    if isinstance(mechanism, ALIBI):
        return class_prior(np.asarray(noisy_labels))[0]
    if not isinstance(mechanism, ClassificationMechanism):
        return None
    if isinstance(mechanism, (RandomizedResponse, ProjectiveGeometryResponse)):
        return _shares_of_sets(mechanism, np.asarray(noisy_labels))
    noisy, counts = np.unique(np.asarray(noisy_labels), return_counts=True)
    channel = mechanism.transition_matrix()
    inverse = np.linalg.pinv(channel)
    inverse = inverse + (1.0 - (channel @ inverse).sum(axis=0)) / mechanism.num_classes
    return class_prior(inverse[noisy], counts)[0]


def _shares_of_sets(
    mechanism: RandomizedResponse | ProjectiveGeometryResponse, noisy: np.ndarray
) -> np.ndarray:
    """Returns the result of ``class_prior`` for answers of sets, without a table of targets."""
    number = mechanism.num_classes
    centre = np.full(number, 1.0 / number)
    if not noisy.size:
        return centre
    if isinstance(mechanism, RandomizedResponse):  # the sets have one class
        shrink = math.exp(-mechanism.epsilon)
        own, other = np.array([1.0, shrink]) / (1.0 + (number - 1) * shrink)
        counts = np.bincount(noisy, minlength=number)
    else:
        own, other = mechanism.inclusion_probabilities
        counts = mechanism.set_counts(noisy)
    mean = (counts / noisy.size - other) / (own - other)
    mean += (1.0 - mean.sum()) / number
    classes_per_set = counts.sum() / noisy.size
    squares = classes_per_set * (1.0 - other) ** 2 + (number - classes_per_set) * other**2
    return _shrunk(mean, squares / (own - other) ** 2, noisy.size, centre)[0]


def shift_of_clusters(mechanism: PriorResampling, noisy_labels: Any, priors: Any) -> np.ndarray:
    """Returns factors (K,) for the classes of priors of a draw, which give them estimated shares.

    The least entry of such priors is tau, which may be far above the share of a rare class.
    """
    noisy = np.asarray(noisy_labels)
    rows = PriorRows.of(priors, noisy.size, mechanism)
    kept = 1.0 - mechanism.resampling_probabilities(rows.rows)
    if not noisy.size or kept.min() < _LEAST_KEPT:
        return np.ones(mechanism.num_classes)
    groups = np.arange(noisy.size) if rows.groups is None else rows.groups
    centre = np.bincount(groups, minlength=len(rows.rows)) @ rows.rows / noisy.size
    return class_prior(debiased(mechanism, noisy, priors), centre=centre)[0] / centre


def class_prior(
    targets: np.ndarray, counts: np.ndarray | None = None, centre: np.ndarray | None = None
) -> tuple[np.ndarray, float]:
    """Returns the class shares (K,) of debiased labels (m, K), and their floor.

    The mean shrinks to ``centre``, by as much of its distance from it as the variance of the labels
    explains (James and Stein 1961), unless its estimated risk is clearly lower without (Stein
    1981), as where few of many classes have most of the mass. It is projected onto the simplex:
    negative shares set to zero alone would leave too much for empty classes. The floor is one
    example among as many true labels as the noisy ones are worth.

    Args:
        targets: debiased labels, whose rows sum to one on average.
        counts: the number of labels of each row; None counts each once.
        centre: shares without these labels, (K,); None takes equal ones.
    """
    size = float(len(targets) if counts is None else counts.sum())
    num_classes = targets.shape[1]
    centre = np.full(num_classes, 1.0 / num_classes) if centre is None else centre
    if not size:
        return centre, float(centre.min())
    weights = np.full(len(targets), 1.0 / size) if counts is None else counts / size
    mean = weights @ targets
    squares = float(weights @ np.einsum("ij,ij->i", targets, targets))
    return _shrunk(mean, squares, size, centre)


def _shrunk(
    mean: np.ndarray, squares: float, size: float, centre: np.ndarray
) -> tuple[np.ndarray, float]:
    """Returns ``class_prior`` of debiased labels by their mean (K,) and mean squared norm."""
    num_classes = mean.size
    variance, distance = (squares - mean @ mean) / size, np.square(mean - centre).sum()
    kept = 1.0 - variance / max(distance, variance, 1e-300)
    shares = _on_simplex(mean)
    # Stein's unbiased estimates of both risks. The projection alone subtracts the same from all
    # shares above zero; it is better where few of many classes have most of the mass.
    changes = np.square(shares - mean).sum()
    risk = changes + variance * (2.0 * np.count_nonzero(shares > 0.0) / num_classes - 1.0)
    noise = _SURE * variance * math.sqrt(2.0 / num_classes)
    # The squared norm of a true one-hot label is one.
    floor = 1.0 / (size / squares + num_classes)
    if risk < variance * kept - noise:
        floor = min(floor, _REST / num_classes)
    else:
        shares = _on_simplex(centre + kept * (mean - centre))
    shares = np.maximum(shares, floor)
    return shares / shares.sum(), floor


def _on_simplex(mean: np.ndarray) -> np.ndarray:
    """Returns the nearest shares, at least zero and with sum one."""
    ordered = np.sort(mean)[::-1]
    excess = (np.cumsum(ordered) - 1.0) / np.arange(1, mean.size + 1)
    return np.maximum(mean - excess[np.count_nonzero(ordered > excess) - 1], 0.0)


def _prior_of_bins(mechanism: RROnBins, noisy_labels: Any) -> Priors:
    bins = np.asarray(mechanism.bin_of_input)
    number = mechanism.num_bins
    shares = np.ones(1)
    if number > 1:
        place, _ = mechanism.output_index(noisy_labels)
        outputs, counts = np.unique(place, return_counts=True)
        targets = debiased(RandomizedResponse(mechanism.epsilon, number), outputs)
        shares, floor = class_prior(targets, counts)
        if (size := counts.sum()) > 0:
            total = counts @ targets
            noise = math.sqrt((counts @ np.square(targets) - total**2 / size).mean())
            shares = np.maximum(ordered_prior(total, size, noise), floor)
    inputs = np.bincount(bins, minlength=number)
    probabilities = (shares / np.maximum(inputs, 1))[bins]
    return Priors(probabilities / probabilities.sum(), values=np.asarray(mechanism.inputs))


def prior_from_logits(logits: Public[Any], temperature: float = 1.0) -> np.ndarray:
    """Returns ``softmax(logits / temperature)``, the prior of LP-MST (``ghazi2021``, appendix E).

    Args:
        logits: array (K,) or (n, K); finite. The result has the same shape.
        temperature: above zero; below one sharpens the prior, above one flattens it.

    Example:
        >>> prior_from_logits([2.0, 1.0, 0.0]).round(4).tolist()
        [0.6652, 0.2447, 0.09]
    """
    temperature = _validate.positive_finite("temperature", temperature)
    array = np.asarray(logits, dtype=np.float64)
    bad = int(np.count_nonzero(~np.isfinite(array)))
    if bad:
        raise ValueError(
            f"logits must be finite, but {bad} are NaN or infinite. Lower the learning rate."
        )
    return _softmax(array / temperature)


def sharpen_prior(prior: Public[Any], temperature: float) -> np.ndarray:
    """Returns ``prior^(1 / temperature)``, normalised: a temperature for priors without logits.

    This equals ``prior_from_logits(log(prior), temperature)``; a probability of zero stays zero.

    Args:
        prior: probabilities (K,) or (n, K); rows sum to one (tolerance 1e-4).
        temperature: as for ``prior_from_logits``, with the same result and errors.

    Example:
        >>> sharpen_prior([0.5, 0.3, 0.2], temperature=0.5).round(4).tolist()
        [0.6579, 0.2368, 0.1053]
    """
    temperature = _validate.positive_finite("temperature", temperature)
    shape = np.shape(prior)
    rows = _validate.prior_rows("prior", prior, None, shape[-1])
    with np.errstate(divide="ignore"):
        return _softmax(np.log(rows) / temperature).reshape(shape)


def _softmax(logits: np.ndarray) -> np.ndarray:
    from scipy import special  # the vault imports this file, and should not load scipy

    return special.softmax(logits, axis=-1)
