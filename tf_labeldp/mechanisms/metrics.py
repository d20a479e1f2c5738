"""Metrics of public predictions on the labels: noisy means and counts, and a choice of models.

Each example's value is rounded to whole grid steps, so sums, sensitivities and noise are exact.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import Any, ClassVar

import numpy as np

from tf_labeldp import _validate
from tf_labeldp.accounting import Private, Public
from tf_labeldp.mechanisms.base import FrozenAggregate
from tf_labeldp.mechanisms.integer_noise import LaplaceNoise, decay_per_step, geometric
from tf_labeldp.mechanisms.random_bits import Rng, checked_generator

_STEPS = 1 << 20
"""Grid steps in the sensitivity, except for accuracy, which needs one. Rounding moves a mean by at
most 2^-21 of the sensitivity."""
_LAST_CELL = 1 << 16
"""The largest position of a label: more cells than this are noise alone."""
_TOLERANCE = 1e-3
"""Error allowed in a sum of probabilities, which may be half-precision numbers."""


@dataclasses.dataclass(frozen=True)
class ClassMetric:
    """A metric of public predictions of K classes: their form, and the value for each label.

    ``clip`` is the largest log-loss of one example.
    """

    name: str
    num_classes: int
    clip: float = 5.0

    @property
    def bounds(self) -> tuple[float, float]:
        """The range of the metric."""
        return 0.0, {"log_loss": self.clip, "brier": 2.0}.get(self.name, 1.0)

    def checked(self, predictions: Public[Any]) -> np.ndarray:
        """Returns class codes (m,) for ``"accuracy"``, else probabilities (m, K), or raises."""
        array = np.asarray(predictions)
        flat = array[:, 0] if array.ndim == 2 and array.shape[1] == 1 else array
        if self.name == "accuracy" and flat.ndim == 1 and flat.dtype.kind in "iu":
            return _validate.class_indices("predictions", flat, self.num_classes)
        if flat.ndim == 1 and self.num_classes == 2 and flat.dtype.kind == "f":
            flat = np.stack([1.0 - flat, flat], axis=1)
        codes = ", or class codes (n,)" if self.name == "accuracy" else ""
        if flat.ndim != 2 or flat.shape[1] != self.num_classes or flat.dtype.kind not in "fiu":
            raise ValueError(
                f"predictions for {self.name!r} must be probabilities of shape "
                f"(n, {self.num_classes}){codes}, got {array.dtype} {array.shape}. Take "
                "model.predict(x) or predict_proba(x)."
            )
        rows = flat.astype(np.float64)
        if not np.all(np.isfinite(rows)):
            raise ValueError("predictions must be finite, got NaN or infinity. Check the model.")
        if self.name == "accuracy":
            return np.argmax(rows, axis=1)
        if np.any(rows < 0.0) or np.any(np.abs(rows.sum(axis=1) - 1.0) > _TOLERANCE):
            raise ValueError(
                f"predictions for {self.name!r} must be probabilities: rows of at least zero that "
                "sum to one. If the model returns logits, pass keras.ops.softmax(logits)."
            )
        return rows / rows.sum(axis=1, keepdims=True)

    def values(self, checked: Public[np.ndarray]) -> np.ndarray:
        """Returns the metric of checked predictions for every possible label, (m, K)."""
        if self.name == "accuracy":
            return (checked[:, np.newaxis] == np.arange(self.num_classes)).astype(np.float64)
        if self.name == "log_loss":
            return -np.log(np.maximum(checked, math.exp(-self.clip)))
        return np.square(checked).sum(axis=1, keepdims=True) - 2.0 * checked + 1.0


@dataclasses.dataclass(frozen=True)
class MetricMechanism(FrozenAggregate):
    """The mean of a metric of public predictions over the labels, with discrete Laplace noise.

    Guarantee:
        The result is epsilon-DP for the replacement of one label. A replaced label moves the sum by
        at most ``sensitivity``, a whole number of grid steps, and OpenDP certifies epsilon for the
        noise. Assumes that the predictions and the number of labels are public.

    Source: the Laplace mechanism (Dwork, McSherry, Nissim and Smith 2006) on the integers.

    Attributes:
        epsilon: finite and above zero.
        metric: for classes ``"accuracy"``, ``"log_loss"`` or ``"brier"`` (the squared distance of
            the probabilities from the one-hot label, in 0..2); for numbers ``"mse"`` and ``"mae"``,
            which clip predictions to the range, or ``"mean"``, the mean of the labels.
        num_classes: K, for classes.
        low: the smallest label, for numbers.
        high: the largest label, for numbers.
        clip: the largest log-loss of one example; probabilities below e^-clip count as e^-clip.

    Example:
        >>> mechanism = MetricMechanism(epsilon=1.0, metric="accuracy", num_classes=2)
        >>> labels, predictions = np.array([0, 1, 1] * 999), np.array([0, 1, 0] * 999)
        >>> found = mechanism.release(labels, predictions, rng=np.random.default_rng(0))
        >>> round(float(found), 2)
        0.67
    """

    purpose = "a noisy metric of predictions"

    CLASS_METRICS: ClassVar[tuple[str, ...]] = ("accuracy", "log_loss", "brier")
    NUMBER_METRICS: ClassVar[tuple[str, ...]] = ("mse", "mae", "mean")

    metric: str
    num_classes: int | None = None
    low: float | None = None
    high: float | None = None
    clip: float = ClassMetric.clip

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_kind()
        metrics = self.NUMBER_METRICS if self.num_classes is None else self.CLASS_METRICS
        _validate.one_of("metric", self.metric, metrics)
        self._set(clip=_validate.positive_finite("clip", self.clip))

    @property
    def _of_classes(self) -> ClassMetric:
        return ClassMetric(self.metric, int(self.num_classes or 0), self.clip)

    @property
    def sensitivity(self) -> float:
        """The largest change of the sum by one label, in units of the metric."""
        if self.num_classes is not None:
            return self._of_classes.bounds[1]
        low, high = self.label_range() or (0.0, 0.0)
        return (high - low) ** 2 if self.metric == "mse" else high - low

    @property
    def bounds(self) -> tuple[float, float]:
        """The range of the metric: that of the labels for ``"mean"``, else from zero."""
        if self.metric == "mean":
            return self.label_range() or (0.0, 0.0)
        return 0.0, self.sensitivity

    @staticmethod
    def check_length(num_labels: int, num_predictions: int) -> None:
        """Raises unless there is one prediction for each of at least one label."""
        if num_labels != num_predictions or not num_labels:
            raise ValueError(
                f"expected one prediction per label and at least one, got {num_predictions} "
                f"predictions and {num_labels} labels. Pass them in the order of the labels."
            )

    def example_bounds(self, predictions: Public[Any]) -> tuple[np.ndarray, np.ndarray] | None:
        """Returns each example's least and largest metric over all labels, (n,), from predictions.

        It is None for ``"accuracy"`` and ``"mean"``, which the range itself bounds.
        """
        if self.metric in ("accuracy", "mean"):
            return None
        if self.num_classes is not None:
            table = self._table(predictions, len(predictions))
            return table.min(axis=1), table.max(axis=1)
        low, high = self.label_range() or (0.0, 0.0)
        clipped = self._clipped(predictions, len(predictions))
        most = np.maximum(clipped - low, high - clipped)
        return np.zeros(most.size), np.square(most) if self.metric == "mse" else most

    @property
    def steps(self) -> int:
        """The number of grid steps in ``sensitivity``."""
        return 1 if self.metric == "accuracy" else _STEPS

    def noise_stddev(self, num_labels: int) -> float:
        """Returns the standard deviation of the noise on the mean of ``num_labels`` labels."""
        return self._noise_law.stddev * self.sensitivity / self.steps / num_labels

    @property
    def _noise_law(self) -> LaplaceNoise:
        return LaplaceNoise(self.epsilon, self.steps)

    @_validate.clears_frames
    def release(
        self, labels: Private[Any], public_input: Public[Any] = None, *, rng: Rng = None
    ) -> np.ndarray:
        """Returns the noisy mean of the metric, shape ().

        Args:
            labels: (n,), at least one.
            public_input: the predictions, in the order of the labels: probabilities (n, K);
                probabilities (n,) of the second of two classes; class codes (n,) for
                ``"accuracy"``; numbers (n,); None for ``"mean"``.
            rng: a generator for repeatable (not private) runs; None uses secure random bits.
        """
        exact = np.array([self.exact_steps(labels, public_input)], dtype=np.int64)
        mean = self._noise_law.add_to(exact, rng)[0] * (self.sensitivity / self.steps / len(labels))
        return np.asarray(mean + self.low if self.metric == "mean" else mean)

    @_validate.clears_frames
    def exact_steps(self, labels: Private[Any], predictions: Public[Any]) -> int:
        """Returns the sum in whole grid steps; not private."""
        labels = self._checked(labels)
        rows = np.arange(labels.size)
        if self.metric == "mean":
            if predictions is not None:
                raise ValueError("'mean' takes no predictions. Leave them out.")
            values = labels - self.low
        elif self.num_classes is not None:
            values = self._table(predictions, labels.size)[rows, labels]
        else:
            values = self._errors(labels, self._clipped(predictions, labels.size))
        steps = np.rint(values * (self.steps / self.sensitivity))
        return int(np.clip(steps, 0, self.steps).astype(np.int64).sum())

    def _checked(self, labels: Any) -> np.ndarray:
        if self.num_classes is not None:
            return _validate.class_indices("labels", labels, self.num_classes)
        low, high = self.label_range() or (0.0, 0.0)
        return _validate.numbers_in_range("labels", labels, low, high)

    def _table(self, predictions: Any, size: int) -> np.ndarray:
        checked = self._of_classes.checked(predictions)
        self.check_length(size, len(checked))
        return self._of_classes.values(checked)

    def _clipped(self, predictions: Any, size: int) -> np.ndarray:
        numbers = _validate.real_vector("predictions", predictions)
        self.check_length(size, numbers.size)
        return np.clip(numbers, self.low, self.high)

    def _errors(self, labels: np.ndarray, predictions: np.ndarray) -> np.ndarray:
        off = np.abs(labels - predictions)
        return np.square(off) if self.metric == "mse" else off


@dataclasses.dataclass(frozen=True)
class SelectionMechanism(MetricMechanism):
    """The index of the model with the best metric, by report noisy max.

    Guarantee:
        The index is epsilon-DP for the replacement of one label. Each model's sum gets exponential
        noise on the integers, with decay epsilon over ``moved``. Given the noise of the others, a
        model wins if its own noise passes a threshold; one label moves the threshold by at most
        ``moved``, the largest change of a difference of two sums. It depends on the predictions
        alone, and is small where the models agree. Assumes that all predictions, and their number,
        are public.

    Source: Ding, Kifer, Steinke et al. 2021, "The permute-and-flip mechanism is identical to
    report-noisy-max with exponential noise"; it is never worse than the exponential mechanism
    (McKenna and Sheldon 2020).

    Attributes:
        epsilon: finite and above zero. Other arguments as for ``MetricMechanism``, but not the
            metric ``"mean"``.

    Example:
        >>> mechanism = SelectionMechanism(epsilon=1.0, metric="accuracy", num_classes=2)
        >>> labels = np.array([0, 1] * 500)
        >>> candidates = [np.zeros(1000, int), labels, 1 - labels]
        >>> int(mechanism.release(labels, candidates, rng=np.random.default_rng(0)))
        1
    """

    purpose = "a noisy choice among models"

    @_validate.clears_frames
    def release(
        self, labels: Private[Any], public_input: Public[Any] = None, *, rng: Rng = None
    ) -> np.ndarray:
        """Returns the index of the chosen model, shape ().

        Args:
            labels: (n,), at least one.
            public_input: the predictions of each model, (m, n) or (m, n, K) or a list of them.
            rng: a generator for repeatable (not private) runs; None uses secure random bits.
        """
        rng = None if rng is None else checked_generator(rng)
        scores, moved = self.scores(labels, public_input)
        if moved:
            decay = decay_per_step(self.epsilon, moved)
            scores = scores + geometric(scores.size, decay, rng)
        # Of equal sums the first wins: the guarantee's thresholds need a fixed order.
        return np.asarray(np.argmax(scores))

    @_validate.clears_frames
    def scores(self, labels: Private[Any], predictions: Public[Any]) -> tuple[np.ndarray, int]:
        """Returns each model's sum, ``int64`` (m,), larger is better; not private.

        The second result is ``moved``, the largest change of a difference of two sums by one label.
        """
        if predictions is None or not len(predictions) or self.metric == "mean":
            raise ValueError(
                "expected a metric of predictions, and the predictions of at least one model."
            )
        labels = self._checked(labels)
        if self.num_classes is None:
            rows = np.stack([self._clipped(each, labels.size) for each in predictions])
            return self._scores_of_numbers(labels, rows)
        sign = 1 if self.metric == "accuracy" else -1
        scale = sign * self.steps / self.sensitivity
        tables = [
            np.rint(self._table(each, labels.size) * scale).astype(np.int64) for each in predictions
        ]
        moved = [np.ptp(a - b, axis=1).max() for a, b in itertools.combinations(tables, 2)]
        rows = np.arange(labels.size)
        return np.array([table[rows, labels].sum() for table in tables]), int(max(moved, default=0))

    def _scores_of_numbers(self, labels: np.ndarray, rows: np.ndarray) -> tuple[np.ndarray, int]:
        # |y - p| - |y - q| changes by at most 2 |p - q|, and (y - p)^2 - (y - q)^2 by that times
        # the range.
        span = float(np.ptp(rows, axis=0).max()) * 2.0
        if self.metric == "mse":
            low, high = self.label_range() or (0.0, 0.0)
            span *= high - low
        if not span:
            return np.zeros(len(rows), np.int64), 0
        scale = self.steps / self.sensitivity
        steps = np.rint(self._errors(labels, rows) * scale).astype(np.int64)
        # Rounding moves each of four values by at most half a step, and doubles by far less.
        return -steps.sum(axis=1), math.ceil(span * scale) + 3


@dataclasses.dataclass(frozen=True)
class LinearBinningMechanism(FrozenAggregate):
    """Noisy counts of the labels of each class by a public position, in cells that share mass.

    A label at position 2.25 adds 0.75 to cell 2 of its class and 0.25 to cell 3; whole positions
    give a histogram. Of two classes only the second is counted, since the rest of the public
    positions belongs to the first: the noise has half the scale of a histogram's.

    Guarantee:
        All counts together are epsilon-DP for the replacement of one label, for any number of
        cells. A replaced label takes one unit of mass away and adds one unit elsewhere, in whole
        grid steps, so the L1 sensitivity is 2; of two classes only one unit is counted, and it is
        1. OpenDP certifies epsilon for the noise. Assumes that the positions and the number of
        labels are public.

    Source: the Laplace mechanism (Dwork, McSherry, Nissim and Smith 2006) on the integers; linear
    binning is that of kernel density estimates (Hall and Wand 1996).

    Attributes:
        epsilon: finite and above zero.
        num_classes: K, at least 2.

    Example:
        >>> labels, positions = np.array([0, 1, 1] * 999), np.array([0.0, 0.0, 0.5] * 999)
        >>> mechanism = LinearBinningMechanism(epsilon=1.0, num_classes=2)
        >>> counts = mechanism.release(labels, positions, rng=np.random.default_rng(0))
        >>> counts.round(-1).tolist()
        [1500.0, 500.0]
    """

    purpose = "noisy counts of labels by score, for a metric"

    num_classes: int = 2  # type: ignore[assignment]

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_kind()

    @property
    def sensitivity(self) -> int:
        """The largest change of all counts together by one label."""
        return 1 if self.num_classes == 2 else 2

    @property
    def noise_stddev(self) -> float:
        """The standard deviation of the noise on each count."""
        return self._noise_law.stddev / _STEPS

    @property
    def _noise_law(self) -> LaplaceNoise:
        return LaplaceNoise(self.epsilon, self.sensitivity * _STEPS)

    @_validate.clears_frames
    def release(
        self, labels: Private[Any], public_input: Public[Any] = None, *, rng: Rng = None
    ) -> np.ndarray:
        """Returns noisy counts: of the second of two classes (cells,), of K classes (K, cells).

        Args:
            labels: (n,), at least one.
            public_input: the position of each label, real numbers of at least zero, (n,); or one
                per class, (n, K). There is a cell at every whole number up to the largest position.
            rng: a generator for repeatable (not private) runs; None uses secure random bits.
        """
        return self._noise_law.add_to(self.exact_steps(labels, public_input), rng) / _STEPS

    @_validate.clears_frames
    def exact_steps(self, labels: Private[Any], positions: Public[Any]) -> np.ndarray:
        """Returns the counts in grid steps of 2^-20, ``int64``; not private."""
        labels = _validate.class_indices("labels", labels, self.num_classes)
        positions = self._checked_positions(positions, labels.size)
        size = math.ceil(positions.max()) + 1
        rows = np.arange(labels.size)
        if positions.ndim == 2:
            positions = positions[rows, labels]
        cells = np.floor(positions).astype(np.int64)
        upper = np.rint((positions - cells) * _STEPS).astype(np.int64)
        # A spare cell takes the zeros above the last one.
        counts = np.zeros((self.num_classes, size + 1), np.int64)
        np.add.at(counts, (labels, cells), _STEPS - upper)
        np.add.at(counts, (labels, cells + 1), upper)
        counts = counts[:, :size]
        return counts[1] if self.num_classes == 2 else counts

    def _checked_positions(self, positions: Any, size: int) -> np.ndarray:
        array = np.asarray(positions)
        shapes = [(size,), (size, self.num_classes)]
        if array.dtype.kind not in "iuf" or array.shape not in shapes or not size:
            raise ValueError(
                f"expected the positions of at least one label, numbers of shape {shapes[0]} or "
                f"{shapes[1]}, got {array.dtype} {array.shape}. Pass them in the order of the "
                "labels."
            )
        positions = array.astype(np.float64)
        if not np.all((positions >= 0.0) & (positions <= _LAST_CELL)):
            raise ValueError(
                f"expected positions from 0 to {_LAST_CELL}, got others. Scale or clip them."
            )
        return positions
