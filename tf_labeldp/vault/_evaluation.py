"""How good predictions are, by private labels: one release for each answer, or noisy labels."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Protocol, runtime_checkable

import numpy as np

from tf_labeldp import _validate
from tf_labeldp.accounting import PrivacyGuarantee, PublicInput, Setting, public_input
from tf_labeldp.accounting._receipts import Receipts, compose_receipts, merge_receipts
from tf_labeldp.mechanisms import HistogramMechanism, MetricMechanism
from tf_labeldp.mechanisms._metrics import (
    CLASS_METRICS,
    check_length,
    class_predictions,
    class_values,
)
from tf_labeldp.vault._label_kinds import LabelKind

_HISTOGRAMS = ("confusion_matrix", "auc", "calibration")
_AUC_BINS, _CALIBRATION_BINS = 64, 10


@dataclasses.dataclass(frozen=True, eq=False)
class Evaluation:
    """A noisy metric with its standard error, as ``evaluate`` returns it; print it.

    Attributes:
        metric: its name.
        value: the estimate, unbiased except for ``"auc"`` and ``"calibration"``, which are ratios;
            a number, or an array. It may lie outside of the metric's range.
        standard_error: of each value. Of a release it is that of its noise alone, about the metric
            of the same predictions on these very examples; of noisy labels it has the choice of
            examples in it as well.
        num_examples: how many labels it is of.
        receipts: of what it cost.
        details: for ``"calibration"`` the mean of the predicted probabilities in each bin,
            ``"predicted"``, and how many examples are there, ``"examples"``.

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
        """Returns the ends of a confidence interval, exact for Laplace noise.

        Sums of several noises have lighter tails: theirs is wider than it would have to be.
        """
        confidence = _validate.number_in("confidence", confidence, "(0, 1)")
        half = math.log(1.0 / (1.0 - confidence)) / math.sqrt(2.0) * self.standard_error
        return self.value - half, self.value + half

    def guarantee(self, delta: float | None = None) -> PrivacyGuarantee:
        """Returns the statement of this evaluation alone."""
        return compose_receipts(self.receipts, delta)

    def __str__(self) -> str:
        """Returns value, standard error and interval."""
        if np.ndim(self.value):
            return f"{self.metric}\n{np.round(self.value, 4)}\n± {np.max(self.standard_error):.4g}"
        low, high = self.interval()
        return (
            f"{self.metric} {self.value:.4g} ± {self.standard_error:.2g} "
            f"(95 %: {low:.4g} to {high:.4g})"
        )


@runtime_checkable
class _Vault(Protocol):
    """The part of ``PrivateLabels`` that an evaluation uses."""

    @property
    def kind(self) -> LabelKind: ...

    def __len__(self) -> int: ...

    def release(
        self, mechanism: Any, indices: Any = None, public_input: Any = None, *, key: str | None
    ) -> Any: ...


def evaluate(
    labels: _Vault | Any,
    predictions: Any,
    metric: str,
    *,
    epsilon: Any = None,
    key: str | None = None,
    model: Any = None,
) -> Evaluation:
    """Returns a metric of predictions: of a vault by one release, of noisy labels at no cost.

    The arguments are those of ``PrivateLabels.evaluate`` and ``NoisyLabels.evaluate``.
    """
    if isinstance(labels, _Vault):
        return _by_release(labels, predictions, metric, epsilon, key)
    return _by_noisy_labels(labels, predictions, metric, model)


def _by_release(
    labels: _Vault, predictions: Any, metric: str, epsilon: float, key: str | None
) -> Evaluation:
    kind = labels.kind
    _validate.one_of("metric", metric, (*kind.metrics, *kind.summaries))
    public = public_input(predictions)
    predictions = public.value
    check_length(len(labels), len(labels) if predictions is None else np.shape(predictions)[0])
    if metric in _HISTOGRAMS:
        return _of_histogram(labels, public, metric, epsilon, key)
    of_mean = "mean" if metric == "total" else metric
    mechanism = MetricMechanism(epsilon, of_mean, **kind.mechanism_arguments())
    released = public.with_value(as_released(predictions, mechanism))
    made = labels.release(mechanism, public_input=released, key=key)
    times = len(labels) if metric == "total" else 1
    return Evaluation(
        metric,
        float(made.values) * times,
        mechanism.noise_stddev(len(labels)) * times,
        len(labels),
        made.receipts,
    )


def _by_noisy_labels(noisy: Any, predictions: Any, metric: str, model: Any) -> Evaluation:
    public = public_input(predictions, model)
    predictions = public.value[0]
    learnt = {one.id for one in public.receipts} & {one.id for one in noisy.receipts}
    if learnt:
        raise ValueError(
            "the model has learnt from these noisy labels, by its receipts, and would look better "
            "than it is. Draw noisy labels for examples that were held out: labels.split(0.2)."
        )
    number = getattr(noisy.mechanism, "num_classes", None)
    if number is None or noisy.values.ndim != 1:
        if metric not in ("mean", "total"):
            raise ValueError(
                f"noisy labels that are no classes give 'mean' and 'total' alone, got {metric!r}. "
                "PrivateLabels.evaluate releases other metrics."
            )
        found = noisy.debiased()
    else:
        _validate.one_of("metric", metric, CLASS_METRICS)
        given = class_predictions(metric, predictions, number)
        check_length(len(noisy), len(given))
        table = class_values(metric, given, number, MetricMechanism.clip)
        found = (noisy.debiased() * table).sum(axis=1)
    times = len(noisy) if metric == "total" else 1
    error = float(np.std(found, ddof=1) / math.sqrt(len(found))) if len(found) > 1 else math.inf
    receipts = merge_receipts(noisy.receipts, public.receipts)
    return Evaluation(metric, float(found.mean()) * times, error * times, len(noisy), receipts)


def as_released(predictions: Any, mechanism: MetricMechanism) -> Any:
    """Returns predictions, checked, as they go to the mechanism: what is wrong shows before."""
    if mechanism.num_classes is not None:
        return class_predictions(mechanism.metric, predictions, mechanism.num_classes)
    if mechanism.metric == "mean":
        if predictions is not None:
            raise ValueError("'mean' and 'total' are of the labels alone; give predictions=None.")
        return None
    return _validate.real_vector("predictions", np.squeeze(np.asarray(predictions)))


def _of_histogram(
    labels: _Vault, public: PublicInput[Any], metric: str, epsilon: float, key: str | None
) -> Evaluation:
    """Returns a metric of the noisy numbers of labels of each class in public groups."""
    predictions = public.value
    number = labels.kind.as_classes().num_classes
    mechanism = HistogramMechanism(epsilon, number)
    size = len(labels)
    if metric == "confusion_matrix":
        groups, num_groups = class_predictions("accuracy", predictions, number), number
    else:
        if metric == "auc" and number != 2:
            raise ValueError(f"'auc' is for two classes, these labels have {number}.")
        rows = class_predictions("log_loss", predictions, number)
        likeliest = np.full(size, 1) if number == 2 else rows.argmax(axis=1)
        sure = rows[np.arange(size), likeliest]
        if metric == "auc":  # bins of about as many examples, by the public scores
            edges = np.unique(np.quantile(sure, np.linspace(0.0, 1.0, _AUC_BINS + 1)[1:-1]))
            groups, num_groups = np.searchsorted(edges, sure, side="right"), edges.size + 1
        else:
            bins = np.minimum((sure * _CALIBRATION_BINS).astype(np.int64), _CALIBRATION_BINS - 1)
            groups, num_groups = bins * number + likeliest, _CALIBRATION_BINS * number
    made = labels.release(mechanism, public_input=public.with_value(groups), key=key)
    counts = np.zeros((num_groups, number))
    counts[: len(made.values)] = made.values
    in_group = np.bincount(groups, minlength=num_groups)
    counts[in_group == 0] = 0.0  # known without a label
    noise = mechanism.noise_stddev
    if metric == "confusion_matrix":
        errors = np.where(in_group > 0, noise, 0.0)
        return Evaluation(
            metric, counts.T, np.broadcast_to(errors, counts.shape), size, made.receipts
        )
    if metric == "auc":
        # The sizes of the groups are public: the difference of two counts has half the variance.
        positives = 0.5 * (in_group + counts[:, 1] - counts[:, 0])
        value, error = _auc(positives, in_group, noise / math.sqrt(2.0))
        return Evaluation(metric, value, error, size, made.receipts)
    shape = (_CALIBRATION_BINS, number)
    right = counts.reshape(*shape, number)[:, np.arange(number), np.arange(number)].sum(axis=1)
    filled = (in_group > 0).reshape(shape).sum(axis=1)
    totals = in_group.reshape(shape).sum(axis=1)
    with np.errstate(invalid="ignore", divide="ignore"):
        share, error = right / totals, noise * np.sqrt(filled) / totals
        predicted = np.bincount(bins, weights=sure, minlength=_CALIBRATION_BINS) / totals
    details = {"predicted": predicted, "examples": totals}
    return Evaluation(metric, share, error, size, made.receipts, details)


def _auc(positives: np.ndarray, totals: np.ndarray, noise: float) -> tuple[float, float]:
    """Returns the area under the curve of noisy positives by score, and its error (delta method).

    Pairs in one group count a half; NaN where the noise leaves no positive or no negative.
    """
    negatives = totals - positives
    p, n = positives.sum(), negatives.sum()
    if p <= 0.0 or n <= 0.0:
        return math.nan, math.inf
    below = np.cumsum(negatives) - 0.5 * negatives
    above = p - np.cumsum(positives) + 0.5 * positives
    value = float(positives @ below / (p * n))
    slopes = (below - above) / (p * n) - value * (n - p) / (p * n)
    return value, float(noise * np.sqrt(np.square(slopes[totals > 0]).sum()))
