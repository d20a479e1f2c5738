"""Metrics of predictions on private labels: by one release, or free of charge on noisy labels."""

from __future__ import annotations

import dataclasses
import functools
import math
import statistics
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

from tf_labeldp import _validate
from tf_labeldp._progress import for_terminal
from tf_labeldp.accounting import (
    PrivacyGuarantee,
    Private,
    Public,
    PublicInput,
    Receipt,
    Receipts,
    Setting,
    public_input,
)
from tf_labeldp.mechanisms import (
    HistogramMechanism,
    LinearBinningMechanism,
    Mechanism,
    MetricMechanism,
)
from tf_labeldp.vault._statements import LedgerOwner
from tf_labeldp.vault.handed_on import carries_receipts, with_receipts
from tf_labeldp.vault.label_kinds import Classes

_CALIBRATION_BINS = 10
"""Bins of the calibration, of equal width: each has noise of its own, so more would be noisier."""
_LEAST_WIDTH = 1e-300
"""The least width of a range, which is zero for counts in an empty cell."""
_FIRST_BIN, _BIN_GROWTH = 16.0, 0.1
"""Bins for the average precision have at least 16 / epsilon examples, 11 times the noise on a
count, and a tenth of all examples above. With half of the least size the error was 1.5 times as
large, and with a growth of 0.2 the bias was up to twice the error at 100,000 labels."""


@dataclasses.dataclass(frozen=True, eq=False)
class Evaluation:
    """A noisy metric with its errors, as ``evaluate`` returns it.

    Two errors separate it from the population's metric: the noise, and the sample of examples. Both
    follow from the release and from public facts alone.

    Attributes:
        metric: the name of the metric.
        value: the estimate, a number or an array; unbiased except for ``"auc"``,
            ``"average_precision"``, ``"f1"``, ``"recall"`` and ``"calibration"``, which are ratios.
            It may lie outside the range of the metric. It is NaN if noise hides whether a class
            of a ratio has examples at all.
        noise_stderr: the standard error of the noise, one per value, to first order for ratios.
        num_examples: the number of labels.
        receipts: the receipts of the cost.
        details: for ``"calibration"`` the mean predicted probability per bin, ``"predicted"``, and
            the number of examples per bin, ``"examples"``. For ``"f1"``, ``"precision"`` and
            ``"recall"`` the noisy counts of ``"right"`` and ``"missed"`` examples of each class,
            and the number ``"predicted"``: all three metrics follow from one release. Of two
            classes only the second has them.
        bounds: the range of the metric.
        effective_examples: the number of examples whose share, of the same value within the range,
            has this sampling error, or a larger one. It is infinite for ``"total"``, which
            describes these examples alone.

    Example:
        >>> found = Evaluation("accuracy", 0.9, 0.01, 5000, effective_examples=5000)
        >>> print(found)
        accuracy 0.9 ± 0.011 (noise 0.01, sampling 0.0042; 95 %: 0.8769 to 0.9224)
    """

    metric: str
    value: Setting[Any]
    noise_stderr: Setting[Any]
    num_examples: int
    receipts: tuple[Receipt, ...] = ()
    details: Setting[dict[str, np.ndarray]] = dataclasses.field(default_factory=dict)
    bounds: Setting[tuple[Any, Any]] = (0.0, 1.0)
    effective_examples: Setting[Any] = math.inf

    @property
    def sampling_stderr(self) -> Any:
        """The standard error of the sample of examples, or an upper bound."""
        share, width = self._share()
        return _plain(width * np.sqrt(_share_variance(share, self.effective_examples)))

    @property
    def standard_error(self) -> Any:
        """The standard error of noise and sample together."""
        return _plain(np.hypot(self.noise_stderr, self.sampling_stderr))

    def interval(self, confidence: float = 0.95) -> tuple[Any, Any]:
        """Returns the ends of a confidence interval of the population's metric, within its range.

        It covers noise and sample, and is approximate or too wide. It has each value whose distance
        to the estimate is within both errors, as they are at that value: without noise it is the
        interval of Wilson (1927) for a share. If the value is NaN, it is the whole range.
        """
        confidence = _validate.number_in("confidence", confidence, "(0, 1)")
        normal = statistics.NormalDist().inv_cdf(0.5 + 0.5 * confidence)
        # Noise is Laplace's or a sum of it, which is nearer to a normal law.
        of_noise = max(normal, math.log(1.0 / (1.0 - confidence)) / math.sqrt(2.0))
        share, width = self._share()
        noise = of_noise * np.asarray(self.noise_stderr) / width
        spread = normal**2 / np.asarray(self.effective_examples)
        middle = share + 0.5 * spread
        half = np.sqrt(middle**2 - (1.0 + spread) * (share**2 - noise**2))
        ends = (np.clip((middle + side * half) / (1.0 + spread), 0.0, 1.0) for side in (-1, 1))
        hidden = np.isnan(self.value)
        low, high = (
            _plain(self.bounds[0] + width * np.where(hidden, side, end))
            for side, end in enumerate(ends)
        )
        return low, high

    def _share(self) -> tuple[np.ndarray, np.ndarray]:
        """Returns the value as a share of the range, within it, and the width of the range."""
        low, high = self.bounds
        width = np.maximum(np.asarray(high, np.float64) - low, _LEAST_WIDTH)
        value = np.where(np.isnan(self.value), low + 0.5 * width, self.value)
        return np.clip((value - low) / width, 0.0, 1.0), width

    def guarantee(self, delta: float | None = None) -> PrivacyGuarantee:
        """Returns the statement of this evaluation alone."""
        return Receipts(self.receipts).guarantee(delta)

    def __str__(self) -> str:
        if np.ndim(self.value):
            return (
                f"{for_terminal(self.metric)}\n{np.round(self.value, 4)}\n"
                f"± {np.max(self.standard_error):.4g}"
            )
        low, high = self.interval()
        return (
            f"{for_terminal(self.metric)} {self.value:.4g} ± {self.standard_error:.2g} "
            f"(noise {self.noise_stderr:.2g}, sampling {self.sampling_stderr:.2g}; "
            f"95 %: {low:.4g} to {high:.4g})"
        )


def _plain(number: Any) -> Any:
    """Returns a float for an array of no dimension."""
    return float(number) if np.ndim(number) == 0 else number


def _share_variance(share: Any, size: Any) -> np.ndarray:
    """Returns the variance of a share of ``size`` examples, also above zero at the ends."""
    size = np.maximum(np.asarray(size, np.float64), 1.0)
    added = 2.0 / size
    smooth = (share + added) / (1.0 + 2.0 * added)  # two more examples of either kind
    return np.asarray(smooth * (1.0 - smooth) / size)


def _size_of_mean(shares: np.ndarray, sizes: np.ndarray, *, independent: bool) -> float:
    """Returns the number of examples whose share has the sampling error of a mean of shares.

    Without independence, the errors are taken as perfectly correlated, which none exceeds.
    """
    shares = np.clip(shares, 0.0, 1.0)
    sizes = np.maximum(sizes, 1.0)
    if len(shares) == 1:
        return float(sizes[0])
    variances = _share_variance(shares, sizes)
    total = variances.sum() if independent else np.square(np.sqrt(variances).sum())
    mean = np.mean((shares + 2.0 / sizes) / (1.0 + 4.0 / sizes))
    return float(mean * (1.0 - mean) * len(shares) ** 2 / total) if total else math.inf


def _size_by_bounds(least: np.ndarray, most: np.ndarray, mean: float, width: float) -> float:
    """Returns the number of examples whose share has the largest sampling error of a mean.

    The value of each example lies between ``least`` and ``most``, (n,), which are public. The
    second moment is largest if the examples with the largest sums of both have their most.
    """
    size = len(least)
    mean = float(np.clip(mean, least.mean(), most.mean()))
    order = np.argsort(-(least + most), kind="stable")
    room = (most - least)[order]
    left = size * (mean - least.mean()) - (np.cumsum(room) - room)
    taken = np.clip(left, 0.0, room)
    second = (np.square(least).sum() + (taken * (least + most)[order]).sum()) / size
    variance = max(second - mean**2, 0.0)
    share = mean / width
    return size * share * (1.0 - share) * width**2 / variance if variance else math.inf


class _Use(Protocol):
    """A ``NamedUse``, as an evaluation needs it; the file of ``NamedUse`` imports this one."""

    @property
    def labels(self) -> Any:
        """The vault, or a part of one."""

    def release(self, mechanism: Mechanism, public_input: Any = None) -> Any:
        """Releases a statistic, which is charged to the vault under the name of the use."""


def evaluate_by_release(use: _Use, predictions: Any, metric: str, epsilon: float) -> Evaluation:
    """Returns a metric of predictions on labels by one release."""
    kind, size = use.labels.kind, len(use.labels)
    kind.check_metric(metric)
    public = public_input(predictions)
    MetricMechanism.check_length(size, size if public.value is None else np.shape(public.value)[0])
    [predicted] = kind.codes_of([public.value])
    public = public.with_value(predicted)
    if metric in _HISTOGRAM_METRICS:
        return _HISTOGRAM_METRICS[metric](use, public, epsilon)
    released_metric = "mean" if metric == "total" else metric
    mechanism = MetricMechanism(epsilon, released_metric, **kind.mechanism_arguments())
    public = public.with_value(kind.checked_predictions(released_metric, public.value))
    released = use.release(mechanism, public)
    value, noise = float(released.values), mechanism.noise_stddev(size)
    low, high = mechanism.bounds
    examples = float(size)
    if metric == "total":
        # A total is that of these examples.
        value, noise, low, high, examples = (
            size * value,
            size * noise,
            size * low,
            size * high,
            math.inf,
        )
    elif (ends := mechanism.example_bounds(public.value)) is not None:
        examples = _size_by_bounds(*ends, value + noise, high)
    return Evaluation(
        metric,
        value,
        noise,
        size,
        released.receipts,
        bounds=(low, high),
        effective_examples=examples,
    )


def evaluate_by_noisy_labels(noisy: Any, predictions: Any, metric: str, model: Any) -> Evaluation:
    """Returns an unbiased metric of predictions on noisy labels, as post-processing."""
    public = public_input(predictions, model)
    predictions = public.value[0]
    if {receipt.id for receipt in public.receipts} & {receipt.id for receipt in noisy.receipts}:
        raise ValueError(
            "expected a model that has not learnt from these noisy labels, got one whose receipts "
            "include them, and whose metrics would be too good. Draw noisy labels for held-out "
            "examples: labels.split(0.2)."
        )
    kind = noisy.kind
    has_auc = isinstance(kind, Classes) and kind.num_classes == 2
    if predictions is not None:
        kind.check_order(public.value[1])
        [predictions] = kind.codes_of([predictions], public.value[1])
    receipts = Receipts.merged(noisy.receipts, public.receipts)
    size = len(noisy)
    if metric == "auc" and has_auc and noisy.values.ndim == 1:
        scores = np.asarray(kind.checked_predictions("auc", predictions))[:, 1]
        MetricMechanism.check_length(size, len(scores))
        value, error, spread = _noisy_auc(noisy.debiased()[:, 1], scores)
        return _with_both_errors(metric, value, error, spread, size, receipts, (0.0, 1.0))
    if not isinstance(kind, Classes) or noisy.values.ndim != 1:
        if metric not in ("mean", "total"):
            raise ValueError(
                "noisy labels without classes have only the metrics 'mean' and 'total', got "
                f"{metric!r}. Use PrivateLabels.evaluate for others."
            )
        terms = noisy.debiased()
        low, high = kind.label_range or (0.0, 1.0)
        mean = float(np.clip(terms.mean(), low, high))
        variance = (mean - low) * (high - mean)  # No labels in the range have a larger one.
    else:
        _validate.one_of("metric", metric, (*kind.metrics, *(["auc"] if has_auc else [])))
        of_classes = kind.class_metric(metric)
        checked = of_classes.checked(predictions)
        MetricMechanism.check_length(size, len(checked))
        by_class = of_classes.values(checked)
        weights = noisy.debiased()
        terms = (weights * by_class).sum(axis=1)
        low, high = of_classes.bounds
        mean = float(np.clip(terms.mean(), low, high))
        variance = float((weights * np.square(by_class)).sum(axis=1).mean()) - mean**2
    value = float(terms.mean())
    error = float(np.std(terms, ddof=1) / math.sqrt(size)) if size > 1 else math.inf
    if metric == "total":
        bounds = (size * low, size * high)
        return Evaluation(metric, size * value, size * error, size, receipts, bounds=bounds)
    return _with_both_errors(metric, value, error, variance / size, size, receipts, (low, high))


def _with_both_errors(
    metric: str,
    value: float,
    error: float,
    sampling_variance: float,
    size: int,
    receipts: tuple[Receipt, ...],
    bounds: tuple[float, float],
) -> Evaluation:
    """Returns an evaluation from the whole error, and the variance of the sample within it."""
    low, high = bounds
    examples = float(size)
    if math.isfinite(error) and sampling_variance > 0.0:
        share = np.clip((value - low) / (high - low), 1.0 / (size + 2.0), 1.0 - 1.0 / (size + 2.0))
        most = min(sampling_variance, error**2) / (high - low) ** 2
        examples = float(share * (1.0 - share) / most)
    found = Evaluation(
        metric, value, 0.0, size, receipts, bounds=bounds, effective_examples=examples
    )
    noise = math.sqrt(max(error**2 - found.sampling_stderr**2, 0.0))
    return dataclasses.replace(found, noise_stderr=noise)


@_validate.clears_frames
def select(
    predictions: Public[Sequence[Any]],
    labels: Private[Any],
    epsilon: float,
    metric: str | None = None,
    *,
    candidates: Public[Sequence[Any] | None] = None,
    key: str | None = None,
) -> Any:
    """Chooses the best of several models on private labels, by one release for all.

    Guarantee:
        Epsilon-DP for the replacement of one label, for any number of models
        (``mechanisms.SelectionMechanism``); charged to the vault. The chosen model depends on the
        choice, and so on all models: with ``candidates`` its statement has the receipts of the
        choice and of all candidates, and an index has no statement. Select on labels that no model
        was trained on (``labels.split``): the uses then compose in parallel, and the choice does
        not favour a model that has learnt these labels.

    Args:
        predictions: one entry per model, in the order of the labels, as ``PrivateLabels.evaluate``
            takes them.
        labels: a ``PrivateLabels``.
        epsilon: finite and above zero. The chosen model is on average within about
            ``2 ln(m) / epsilon`` correct answers of the best of m.
        metric: ``"accuracy"`` (the default for classes), ``"log_loss"`` or ``"brier"``; ``"mse"``
            (the default for numbers) or ``"mae"``.
        candidates: what made the predictions, in their order: Keras models, fitted estimators of
            this library or noisy labels.
        key: the name of the release in the vault.

    Returns:
        The index of the best model; with ``candidates`` a copy of the best one, with the receipts.
        A Keras model is not copied: it carries them itself from now on.

    Raises:
        BudgetExceededError: the budget is too small; nothing was released.
        TypeError: a candidate that can't carry receipts; nothing was released.
        ValueError: no model, unsuitable predictions, another number of candidates, or another
            metric; nothing was released.

    Example:
        >>> from tf_labeldp import PrivacyBudget, PrivateLabels
        >>> labels = PrivateLabels([0, 1] * 500, 2, budget=PrivacyBudget(1.0))
        >>> select([np.zeros(1000, int), np.array([0, 1] * 500)], labels, epsilon=0.5)
        1

        Give the candidates, and the best one comes with its statement:

        >>> from tf_labeldp import PrivateRidge
        >>> x = np.random.default_rng(0).normal(size=(1000, 3))
        >>> labels = PrivateLabels((x[:, 0] > 0).astype(int), 2, budget=PrivacyBudget(1.0, 1e-5))
        >>> train, held_out = labels.split(0.2)
        >>> rows = x[train.indices]
        >>> heads = [PrivateRidge(0.5, 1e-5, spread=s).fit(rows, train) for s in (True, False)]
        >>> predictions = [head.predict(x[held_out.indices]) for head in heads]
        >>> best = select(predictions, held_out, 0.5, candidates=heads)
        >>> heads[0].guarantee().epsilon, round(best.guarantee().epsilon, 2)
        (0.5, 0.73)
    """
    is_vault = isinstance(labels, LedgerOwner)
    if not is_vault:
        raise TypeError(
            f"labels must be a PrivateLabels, got {type(labels).__name__}. Put them into a vault, "
            "which charges the choice; noisy labels have their own evaluate."
        )
    public = public_input(predictions, candidates)
    predictions, candidates = public.value
    if candidates is not None:
        _check_candidates(candidates, len(predictions))
    mechanism = labels.kind.selection(labels.epsilon_of_one_label(epsilon), metric)
    stacked = labels.kind.stacked_predictions(predictions, mechanism.metric, len(labels))
    chosen = labels.release(mechanism, public_input=public.with_value(stacked), key=key)
    index = int(chosen.values)
    if candidates is None:
        return index
    return with_receipts(
        PublicInput.bare(candidates[index]), Receipts.merged(public.receipts, chosen.receipts)
    )


def _check_candidates(candidates: Sequence[Any], number: int) -> None:
    if len(candidates) != number:
        raise ValueError(
            f"expected a candidate for each of {number} predictions, got {len(candidates)}. Give "
            "the models that made them, in the same order."
        )
    for candidate in candidates:
        if not carries_receipts(PublicInput.bare(candidate)):
            raise TypeError(
                "expected candidates that carry receipts, such as Keras models, fitted heads and "
                f"noisy labels, got {type(PublicInput.bare(candidate)).__name__}. Leave candidates "
                "out for the index alone."
            )


def _release_counts(
    use: _Use, public: PublicInput[Any], groups: Any, size: int, epsilon: float
) -> tuple[np.ndarray, np.ndarray, float, tuple[Receipt, ...]]:
    """Returns noisy counts of labels by group and class (G, K), by one release.

    Further results are the group sizes (G,), the standard deviation of the noise and the receipts.
    """
    num_classes = use.labels.num_classes
    mechanism = HistogramMechanism(epsilon, num_classes)
    released = use.release(mechanism, public.with_value(groups))
    counts = np.zeros((size, num_classes))
    counts[: len(released.values)] = released.values
    sizes = np.bincount(groups, minlength=size)
    # The groups are public, so an empty group has no labels.
    counts[sizes == 0] = 0.0
    return counts, sizes, mechanism.noise_stddev, released.receipts


def _confusion_matrix(use: _Use, public: PublicInput[Any], epsilon: float) -> Evaluation:
    num_classes = use.labels.num_classes
    predicted = use.labels.kind.checked_predictions("accuracy", public.value)
    counts, sizes, noise, receipts = _release_counts(use, public, predicted, num_classes, epsilon)
    errors = np.broadcast_to(np.where(sizes > 0, noise, 0.0), counts.shape)
    return Evaluation(
        "confusion_matrix",
        counts.T,
        errors,
        len(use.labels),
        receipts,
        bounds=(0.0, sizes),
        effective_examples=np.where(sizes > 0, sizes, math.inf),
    )


def _release_positives(
    use: _Use, public: PublicInput[Any], positions: Any, size: int, epsilon: float
) -> tuple[np.ndarray, float, tuple[Receipt, ...]]:
    """Returns noisy counts per class and cell (C, size); of two classes only the second counts.

    Further results are the standard deviation of the noise and the receipts.
    """
    mechanism = LinearBinningMechanism(epsilon, use.labels.num_classes)
    released = use.release(mechanism, public.with_value(positions))
    values = np.atleast_2d(released.values)
    counts = np.zeros((len(values), size))
    counts[:, : values.shape[1]] = values
    return counts, mechanism.noise_stddev, released.receipts


def _detection(use: _Use, public: PublicInput[Any], epsilon: float, metric: str) -> Evaluation:
    """Returns precision, recall or F1, from noisy counts of right and missed examples per class."""
    num_classes, size = use.labels.num_classes, len(use.labels)
    codes = use.labels.kind.checked_predictions("accuracy", public.value)
    is_hit = codes[:, np.newaxis] == np.arange(num_classes)
    positions = is_hit[:, 1] if num_classes == 2 else is_hit
    if num_classes == 2 and not positions.any():
        _validate.warn(
            f"the predictions have no example of the second class, so {metric} is 0 whatever the "
            "labels. Take 'average_precision' or 'auc', or predictions with a lower threshold."
        )
    counts, noise, receipts = _release_positives(
        use, public, positions.astype(np.int64), 2, epsilon
    )
    # The predictions are public: a cell without examples has no label and no noise.
    predicted = is_hit.sum(axis=0)[-len(counts) :]
    sizes = np.stack([size - predicted, predicted], axis=1)
    errors = np.where(sizes > 0, noise, 0.0)
    missed, right = np.where(sizes > 0, counts, 0.0).T
    # The metric is right over a denominator, which moves by weights with (missed, right).
    weights = {"precision": (0.0, 0.0), "recall": (1.0, 1.0), "f1": (0.5, 0.5)}[metric]
    base = {"precision": predicted, "recall": 0.0 * predicted, "f1": 0.5 * predicted}[metric]
    below = base + weights[0] * missed + weights[1] * right
    clear = _is_clear(below, np.sqrt(np.square(errors) @ np.square(weights))) | (predicted == 0)
    value, error, examples = math.nan, math.inf, math.inf
    if np.all(clear):
        # As in scikit-learn, a class that is never predicted has no right prediction: zero.
        safe = np.where(predicted > 0, below, 1.0)
        each = right / safe
        slopes = np.stack([-each * weights[0], 1.0 - each * weights[1]], axis=1)
        slopes = np.where(predicted > 0, slopes.T / safe, 0.0).T
        value = float(each.mean())
        error = float(np.sqrt(np.square(slopes * errors).sum())) / len(each)
        # The share of right examples among those in the denominator is binomial. For F1 these are
        # 2 below / (2 - F1) examples, by its slope in their share.
        sizes = 2.0 * below / (2.0 - each) if metric == "f1" else below
        sizes = np.where(predicted > 0, sizes, math.inf)
        examples = _size_of_mean(each, sizes, independent=metric != "f1")
    details = {"right": right, "missed": missed, "predicted": predicted}
    return Evaluation(metric, value, error, size, receipts, details, effective_examples=examples)


def _auc(use: _Use, public: PublicInput[Any], epsilon: float) -> Evaluation:
    """Returns the area under the ROC curve, the mean of one class against the rest for K > 2.

    The area depends on the labels through two sums over the positives alone, their number and the
    sum of their ranks. Each positive is split between the two ends of the ranks. Both sums together
    then move by one if one label changes, and each gets the noise of one count. With a histogram
    of 64 bins of scores the error is 3.3 times as large, with ten bins 1.3 times, and binning adds
    a bias. Ties count a half.
    """
    num_classes, size = use.labels.num_classes, len(use.labels)
    scores = use.labels.kind.checked_predictions("auc", public.value)
    positions = np.stack([_mid_ranks(scores[:, k]) for k in range(num_classes)], axis=1)
    counts, noise, receipts = _release_positives(
        use, public, positions[:, 1] if num_classes == 2 else positions, 2, epsilon
    )
    low, high = counts.T
    p = low + high
    n = size - p
    value, error, examples = math.nan, math.inf, math.inf
    if np.all(_is_clear(np.minimum(p, n), math.sqrt(2.0) * noise)):
        each = ((size - 1) * high - 0.5 * p * (p - 1.0)) / (p * n)
        by_low = (0.5 - p - each * (n - p)) / (p * n)
        by_high = by_low + (size - 1) / (p * n)
        value = float(each.mean())
        error = float(noise * np.sqrt(np.square([by_low, by_high]).sum())) / len(each)
        # No scores have a larger variance than AUC (1 - AUC) / min(p, n) (Van Dantzig 1951).
        examples = _size_of_mean(each, np.minimum(p, n), independent=False)
    return Evaluation("auc", value, error, size, receipts, effective_examples=examples)


def _average_precision(use: _Use, public: PublicInput[Any], epsilon: float) -> Evaluation:
    """Returns the average precision, from noisy positives in bins of ranks that grow downwards.

    In a bin, positives are taken as spread evenly. The sum is quadratic in the counts: the
    variance of the noise is subtracted from squares.
    """
    size = len(use.labels)
    scores = use.labels.kind.checked_predictions("average_precision", public.value)[:, 1]
    # The number of scores of at least its own: precision changes at these ranks alone.
    ranks = size - np.searchsorted(np.sort(scores), scores, side="left")
    ends, least = [0], math.ceil(_FIRST_BIN / epsilon)
    while ends[-1] < size:
        ends.append(ends[-1] + max(least, math.ceil(_BIN_GROWTH * ends[-1])))
    bins = np.searchsorted(ends[1:], ranks)
    number = len(ends) - 1
    counts, noise, receipts = _release_positives(use, public, bins, number, epsilon)
    sizes = np.bincount(bins, minlength=number)
    positives = np.where(sizes > 0, counts[0], 0.0)
    variances = np.where(sizes > 0, noise**2, 0.0)
    first = np.cumsum(sizes) - sizes + 1
    filled = np.maximum(sizes, 1)
    # Means in a bin of 1 / rank, and of the share of the bin's other examples above over the rank.
    inverse = np.bincount(bins, weights=1.0 / ranks, minlength=number) / filled
    others = np.where(sizes > 1, (1.0 - first * inverse) / np.maximum(sizes - 1, 1), 0.0)
    above = np.cumsum(positives) - positives
    pairs = positives**2 - variances - positives
    total = float(positives.sum())
    value, error = math.nan, math.inf
    if _is_clear(total, math.sqrt(variances.sum())):
        value = float((positives * (above + 1.0) * inverse + pairs * others).sum() / total)
        below = np.cumsum((positives * inverse)[::-1])[::-1] - positives * inverse
        slopes = (above + 1.0) * inverse + (2.0 * positives - 1.0) * others + below - value
        error = float(np.sqrt((variances * slopes**2).sum()) / total)
    # A mean over the positives of precisions in [0, 1]; as one share of them (Boyd et al. 2013).
    examples = max(total, 1.0)
    return Evaluation(
        "average_precision", value, error, size, receipts, effective_examples=examples
    )


def _noisy_auc(positives: np.ndarray, scores: np.ndarray) -> tuple[float, float, float]:
    """Returns the area and its error from debiased labels (m,): one where positive, on average.

    The error is that of the mean of each example's influence on the ratio. The third result is the
    variance of the sample, the mean square of the influence of a true label.
    """
    size, negatives = len(scores), 1.0 - positives
    p, n = positives.mean(), negatives.mean()
    if not 0.0 < p < 1.0 or size < 2:
        return math.nan, math.inf, math.inf
    order = np.argsort(scores)
    ordered = scores[order]
    ends = [np.searchsorted(ordered, scores, side=side) for side in ("left", "right")]
    # Means of the negatives below, and of the positives above, each example; ties count a half.
    below, upto = (np.append(0.0, np.cumsum(negatives[order]))[end] for end in ends)
    at_least, above = (
        np.append(0.0, np.cumsum(positives[order][::-1]))[size - end] for end in ends
    )
    beaten, beaten_by = 0.5 * (below + upto) / size, 0.5 * (at_least + above) / size
    # A debiased label is paired with itself, with expectation zero for the true label.
    own = 0.5 * float((positives * negatives).sum()) / size**2
    area = (float((positives * beaten).mean()) - own) / (p * n)
    of_positive, of_negative = (beaten / n - area) / p, (beaten_by / p - area) / n
    influence = positives * of_positive + negatives * of_negative
    square = (positives * of_positive**2 + negatives * of_negative**2).mean()
    return area, float(np.std(influence, ddof=1) / math.sqrt(size)), float(square / size)


def _is_clear(count: Any, error: Any) -> Any:
    """Returns whether noisy counts are above zero by three standard deviations of their noise."""
    return count > 3.0 * np.asarray(error)


def _mid_ranks(scores: np.ndarray) -> np.ndarray:
    """Returns ranks (n,) from 0 for the lowest score to 1 for the highest; ties share the mean."""
    ordered = np.sort(scores)
    below = np.searchsorted(ordered, scores, side="left")
    up_to = np.searchsorted(ordered, scores, side="right")
    return 0.5 * (below + up_to - 1.0) / max(scores.size - 1, 1)


def _calibration(use: _Use, public: PublicInput[Any], epsilon: float) -> Evaluation:
    num_classes, size = use.labels.num_classes, len(use.labels)
    rows = use.labels.kind.checked_predictions("calibration", public.value)
    predicted = np.full(size, 1) if num_classes == 2 else rows.argmax(axis=1)
    confidence = rows[np.arange(size), predicted]
    bins = np.minimum((confidence * _CALIBRATION_BINS).astype(np.int64), _CALIBRATION_BINS - 1)
    shape = (_CALIBRATION_BINS, num_classes)
    counts, sizes, noise, receipts = _release_counts(
        use, public, bins * num_classes + predicted, math.prod(shape), epsilon
    )
    right = np.diagonal(counts.reshape(*shape, num_classes), axis1=1, axis2=2).sum(axis=1)
    filled = (sizes > 0).reshape(shape).sum(axis=1)
    totals = sizes.reshape(shape).sum(axis=1)
    with np.errstate(invalid="ignore", divide="ignore"):
        share, error = right / totals, noise * np.sqrt(filled) / totals
        mean = np.bincount(bins, weights=confidence, minlength=_CALIBRATION_BINS) / totals
    details = {"predicted": mean, "examples": totals}
    examples = np.where(totals > 0, totals, math.inf)
    return Evaluation(
        "calibration", share, error, size, receipts, details, effective_examples=examples
    )


_HISTOGRAM_METRICS: dict[str, Callable[..., Evaluation]] = {
    "confusion_matrix": _confusion_matrix,
    "auc": _auc,
    "average_precision": _average_precision,
    "f1": functools.partial(_detection, metric="f1"),
    "precision": functools.partial(_detection, metric="precision"),
    "recall": functools.partial(_detection, metric="recall"),
    "calibration": _calibration,
}
