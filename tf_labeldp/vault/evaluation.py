"""Metrics of predictions on private labels: by one release, or free of charge on noisy labels."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from tf_labeldp import _validate
from tf_labeldp.accounting import (
    PrivacyGuarantee,
    Private,
    Public,
    PublicInput,
    Setting,
    public_input,
)
from tf_labeldp.accounting.provenance import bare
from tf_labeldp.accounting.receipts import Receipts, compose_receipts, merge_receipts
from tf_labeldp.mechanisms import HistogramMechanism, MetricMechanism, SelectionMechanism
from tf_labeldp.mechanisms.metrics import (
    CLASS_METRICS,
    check_length,
    class_predictions,
    class_values,
)

_AUC_BINS, _CALIBRATION_BINS = 64, 10


@dataclasses.dataclass(frozen=True, eq=False)
class Evaluation:
    """A noisy metric with its standard error, as ``evaluate`` returns it.

    Attributes:
        metric: the name of the metric.
        value: the estimate, a number or an array; unbiased except for ``"auc"`` and
            ``"calibration"``, which are ratios. It may lie outside the range of the metric.
        standard_error: one per value. A release's error covers the noise alone; on noisy labels it
            also covers the sample of examples.
        num_examples: the number of labels.
        receipts: the receipts of the cost.
        details: for ``"calibration"`` the mean predicted probability per bin, ``"predicted"``, and
            the number of examples per bin, ``"examples"``.

    Example:
        >>> found = Evaluation("accuracy", 0.9, 0.01, 5000)
        >>> print(found)
        accuracy 0.9 ± 0.01 (95 %: 0.8788 to 0.9212)
    """

    metric: str
    value: Setting[Any]
    standard_error: Setting[Any]
    num_examples: int
    receipts: Receipts = ()
    details: Setting[dict[str, np.ndarray]] = dataclasses.field(default_factory=dict)

    def interval(self, confidence: float = 0.95) -> tuple[Any, Any]:
        """Returns the ends of a confidence interval, which is exact or too wide.

        It is exact for Laplace noise.
        """
        confidence = _validate.number_in("confidence", confidence, "(0, 1)")
        half = math.log(1.0 / (1.0 - confidence)) / math.sqrt(2.0) * self.standard_error
        return self.value - half, self.value + half

    def guarantee(self, delta: float | None = None) -> PrivacyGuarantee:
        """Returns the statement of this evaluation alone."""
        return compose_receipts(self.receipts, delta)

    def __str__(self) -> str:
        if np.ndim(self.value):
            return f"{self.metric}\n{np.round(self.value, 4)}\n± {np.max(self.standard_error):.4g}"
        low, high = self.interval()
        return (
            f"{self.metric} {self.value:.4g} ± {self.standard_error:.2g} "
            f"(95 %: {low:.4g} to {high:.4g})"
        )


def evaluate_by_release(
    labels: Any, predictions: Any, metric: str, epsilon: float, key: str | None
) -> Evaluation:
    """Returns a metric of predictions on the labels of a vault by one release."""
    kind, size = labels.kind, len(labels)
    _validate.one_of("metric", metric, (*kind.metrics, *kind.summaries))
    public = public_input(predictions)
    check_length(size, size if public.value is None else np.shape(public.value)[0])
    if metric in _HISTOGRAM_METRICS:
        return _HISTOGRAM_METRICS[metric](labels, public, epsilon, key)
    released_metric = "mean" if metric == "total" else metric
    mechanism = MetricMechanism(epsilon, released_metric, **kind.mechanism_arguments())
    public = public.with_value(_checked_predictions(public.value, mechanism))
    released = labels.release(mechanism, public_input=public, key=key)
    times = size if metric == "total" else 1
    error = mechanism.noise_stddev(size) * times
    return Evaluation(metric, float(released.values) * times, error, size, released.receipts)


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
    number = getattr(noisy.mechanism, "num_classes", None)
    if number is None or noisy.values.ndim != 1:
        if metric not in ("mean", "total"):
            raise ValueError(
                "noisy labels without classes have only the metrics 'mean' and 'total', got "
                f"{metric!r}. Use PrivateLabels.evaluate for others."
            )
        terms = noisy.debiased()
    else:
        _validate.one_of("metric", metric, CLASS_METRICS)
        checked = class_predictions(metric, predictions, number)
        check_length(len(noisy), len(checked))
        by_class = class_values(metric, checked, number, MetricMechanism.clip)
        terms = (noisy.debiased() * by_class).sum(axis=1)
    size = len(noisy)
    times = size if metric == "total" else 1
    error = float(np.std(terms, ddof=1) / math.sqrt(size)) if size > 1 else math.inf
    receipts = merge_receipts(noisy.receipts, public.receipts)
    return Evaluation(metric, float(terms.mean()) * times, error * times, size, receipts)


def select(
    predictions: Public[Sequence[Any]],
    labels: Private[Any],
    epsilon: float,
    metric: str | None = None,
    *,
    key: str | None = None,
) -> int:
    """Returns the index of the best of several models on private labels, by one release for all.

    Guarantee:
        Epsilon-DP for the replacement of one label, for any number of models
        (``mechanisms.SelectionMechanism``); charged to the vault. The models have their own
        statements. Select on labels that no model was trained on (``labels.split``): the uses then
        compose in parallel, and the choice does not favour a model that has learnt these labels.

    Args:
        predictions: one entry per model, in the order of the labels, as ``PrivateLabels.evaluate``
            takes them.
        labels: a ``PrivateLabels``.
        epsilon: finite and above zero. The chosen model is on average within about
            ``2 ln(m) / epsilon`` correct answers of the best of m.
        metric: ``"accuracy"`` (the default for classes), ``"log_loss"`` or ``"brier"``; ``"mse"``
            (the default for numbers) or ``"mae"``.
        key: the name of the release in the vault.

    Raises:
        BudgetExceededError: the budget is too small; nothing was released.
        ValueError: no model, unsuitable predictions, or another metric.

    Example:
        >>> from tf_labeldp import PrivacyBudget, PrivateLabels
        >>> labels = PrivateLabels([0, 1] * 500, 2, budget=PrivacyBudget(1.0))
        >>> select([np.zeros(1000, int), np.array([0, 1] * 500)], labels, epsilon=0.5)
        1
    """
    return int(release_choice(predictions, labels, epsilon, metric, key).values)


def release_choice(
    predictions: Public[Any], labels: Any, epsilon: float, metric: str | None, key: str | None
) -> Any:
    """Releases the index of the best model, charged to the vault."""
    mechanism = selection_mechanism(labels, epsilon, metric)
    public = public_input(predictions)
    candidates = [bare(candidate) for candidate in public.value]
    if not candidates:
        raise ValueError("expected the predictions of at least one model, got none.")
    for candidate in candidates:
        check_length(len(labels), np.shape(candidate)[0])
    stacked = np.stack([_checked_predictions(candidate, mechanism) for candidate in candidates])
    return labels.release(mechanism, public_input=public.with_value(stacked), key=key)


def selection_mechanism(labels: Any, epsilon: float, metric: str | None) -> SelectionMechanism:
    """Returns the mechanism that selects by a metric; None is the first metric of the labels."""
    metrics = labels.kind.metrics
    metric = _validate.one_of("metric", metrics[0] if metric is None else metric, metrics)
    return SelectionMechanism(epsilon, metric, **labels.kind.mechanism_arguments())


def _checked_predictions(predictions: Any, mechanism: MetricMechanism | SelectionMechanism) -> Any:
    if mechanism.num_classes is not None:
        return class_predictions(mechanism.metric, predictions, mechanism.num_classes)
    if mechanism.metric != "mean":
        return _validate.real_vector("predictions", np.squeeze(np.asarray(predictions)))
    if predictions is not None:
        raise ValueError("'mean' and 'total' take no predictions. Leave predictions=None.")
    return None


def _release_counts(
    labels: Any, public: PublicInput[Any], groups: Any, size: int, epsilon: float, key: str | None
) -> tuple[np.ndarray, np.ndarray, float, Receipts]:
    """Returns noisy counts of labels by group and class (G, K), by one release.

    Further results are the group sizes (G,), the standard deviation of the noise and the receipts.
    """
    num_classes = labels.kind.num_classes
    mechanism = HistogramMechanism(epsilon, num_classes)
    released = labels.release(mechanism, public_input=public.with_value(groups), key=key)
    counts = np.zeros((size, num_classes))
    counts[: len(released.values)] = released.values
    sizes = np.bincount(groups, minlength=size)
    # The groups are public, so an empty group has no labels.
    counts[sizes == 0] = 0.0
    return counts, sizes, mechanism.noise_stddev, released.receipts


def _confusion_matrix(
    labels: Any, public: PublicInput[Any], epsilon: float, key: str | None
) -> Evaluation:
    num_classes = labels.kind.num_classes
    predicted = class_predictions("accuracy", public.value, num_classes)
    counts, sizes, noise, receipts = _release_counts(
        labels, public, predicted, num_classes, epsilon, key
    )
    errors = np.broadcast_to(np.where(sizes > 0, noise, 0.0), counts.shape)
    return Evaluation("confusion_matrix", counts.T, errors, len(labels), receipts)


def _auc(labels: Any, public: PublicInput[Any], epsilon: float, key: str | None) -> Evaluation:
    """Returns the area under the ROC curve from noisy positives by score; delta-method error.

    Pairs in one bin count a half. The area is NaN where the noise leaves no positive or negative.
    """
    if labels.kind.num_classes != 2:
        raise ValueError(f"'auc' is for two classes, these labels have {labels.kind.num_classes}.")
    scores = class_predictions("log_loss", public.value, 2)[:, 1]
    # The scores are public, so bins of about equal size cost nothing.
    edges = np.unique(np.quantile(scores, np.linspace(0.0, 1.0, _AUC_BINS + 1)[1:-1]))
    bins = np.searchsorted(edges, scores, side="right")
    counts, sizes, noise, receipts = _release_counts(
        labels, public, bins, edges.size + 1, epsilon, key
    )
    # The sizes of the groups are public: the difference of two counts has half the variance.
    positives = 0.5 * (sizes + counts[:, 1] - counts[:, 0])
    negatives = sizes - positives
    p, n = positives.sum(), negatives.sum()
    value, error = math.nan, math.inf
    if p > 0.0 and n > 0.0:
        below = np.cumsum(negatives) - 0.5 * negatives
        above = p - np.cumsum(positives) + 0.5 * positives
        value = float(positives @ below / (p * n))
        slopes = (below - above) / (p * n) - value * (n - p) / (p * n)
        error = float(noise * np.sqrt(0.5 * np.square(slopes[sizes > 0]).sum()))
    return Evaluation("auc", value, error, len(labels), receipts)


def _calibration(
    labels: Any, public: PublicInput[Any], epsilon: float, key: str | None
) -> Evaluation:
    num_classes, size = labels.kind.num_classes, len(labels)
    rows = class_predictions("log_loss", public.value, num_classes)
    predicted = np.full(size, 1) if num_classes == 2 else rows.argmax(axis=1)
    confidence = rows[np.arange(size), predicted]
    bins = np.minimum((confidence * _CALIBRATION_BINS).astype(np.int64), _CALIBRATION_BINS - 1)
    shape = (_CALIBRATION_BINS, num_classes)
    counts, sizes, noise, receipts = _release_counts(
        labels, public, bins * num_classes + predicted, math.prod(shape), epsilon, key
    )
    right = np.diagonal(counts.reshape(*shape, num_classes), axis1=1, axis2=2).sum(axis=1)
    filled = (sizes > 0).reshape(shape).sum(axis=1)
    totals = sizes.reshape(shape).sum(axis=1)
    with np.errstate(invalid="ignore", divide="ignore"):
        share, error = right / totals, noise * np.sqrt(filled) / totals
        mean = np.bincount(bins, weights=confidence, minlength=_CALIBRATION_BINS) / totals
    details = {"predicted": mean, "examples": totals}
    return Evaluation("calibration", share, error, size, receipts, details)


_HISTOGRAM_METRICS = {
    "confusion_matrix": _confusion_matrix,
    "auc": _auc,
    "calibration": _calibration,
}
