"""Sets of classes, and intervals of numbers, that cover the true label with a stated chance."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np

from tf_labeldp import _validate
from tf_labeldp.accounting import (
    Assumption,
    PrivacyGuarantee,
    Public,
    PublicInput,
    Receipt,
    Receipts,
    public_input,
)
from tf_labeldp.estimation import debiased, prior_from_logits
from tf_labeldp.mechanisms import ClassificationMechanism, QuantileMechanism
from tf_labeldp.vault._drawn_rows import charged_examples
from tf_labeldp.vault.label_kinds import Classes, LabelKind, Rows, classes_of_model
from tf_labeldp.vault.noisy_labels import NoisyLabels
from tf_labeldp.vault.private_labels import PrivateLabels

_MEAN_LARGEST = 0.74
"""A bound on ``sqrt(n)`` times the mean of the largest excess of an empirical distribution function
of n draws over the true one: the integral of ``min(1, e^(-2 x^2))`` from Massart 1990, which needs
``x^2 >= ln(2) / 2``, is 0.7386."""
_ENTRIES = 1 << 22
"""Numbers at a time."""
_SUM_TOLERANCE = 1e-3
"""Error allowed in a sum of probabilities, which may be half-precision numbers."""


@dataclasses.dataclass(frozen=True, eq=False)
class ConformalPredictor:
    """Sets of classes or intervals of numbers with coverage, as ``conformal`` returns them.

    Guarantee:
        A prediction is post-processing of the model and of one threshold, and costs nothing more;
        ``guarantee()`` states both.

    Attributes:
        model: the model that makes the predictions.
        threshold: for classes the least probability in a set, for numbers half the width.
        alpha: the chance of a miss, at most.
        receipts: receipts of the model, the features and the threshold.
        label_range: the smallest and the largest label, for numbers; None for classes.
        from_logits: whether the model returns logits.

    Example:
        >>> chances = ConformalPredictor(lambda x: x, 0.3, alpha=0.1)
        >>> chances.predict([[0.6, 0.35, 0.05], [0.2, 0.25, 0.55]]).tolist()
        [[True, True, False], [False, False, True]]
    """

    model: Public[Any] = dataclasses.field(repr=False)
    threshold: float
    alpha: float
    receipts: tuple[Receipt, ...] = dataclasses.field(default=(), repr=False)
    label_range: tuple[float, float] | None = None
    from_logits: bool = False

    def __post_init__(self) -> None:
        public = public_input(self.model)
        object.__setattr__(self, "model", public.value)
        object.__setattr__(self, "receipts", Receipts.merged(public.receipts, self.receipts))

    def predict(self, X: Public[Any]) -> np.ndarray:
        """Returns sets, ``bool`` (m, K), or the ends of intervals, ``float64`` (m, 2).

        The columns of a set are the classes in the order of their codes. The most likely class is
        always in the set, so that none is empty. Intervals lie within the labels' range.
        """
        found = _predictions(self.model, PublicInput.bare(X), self.label_range is None)
        if self.label_range is not None:
            low, high = self.label_range
            centres = np.clip(_validate.real_vector("predictions", found), low, high)
            ends = (centres - self.threshold, centres + self.threshold)
            return np.clip(np.stack(ends, axis=1), low, high)
        found = _probabilities(found, self.from_logits)
        kind = Classes(found.shape[1] if found.ndim == 2 else 2)
        chances = kind.checked_predictions("sets", found)
        sets = chances >= self.threshold
        sets[np.arange(len(sets)), chances.argmax(axis=1)] = True
        return sets

    def guarantee(self, delta: float | None = None) -> PrivacyGuarantee:
        """Returns the statement of the model and the threshold together."""
        notes = [Assumption.INITIAL_WEIGHTS] if _is_keras(self.model) else []
        return Receipts(self.receipts).guarantee(delta).with_assumptions(notes)


def conformal(
    model: Public[Any],
    held_out: Public[tuple[Any, Any]],
    alpha: float,
    epsilon: float | None = None,
    *,
    key: str | None = None,
) -> ConformalPredictor:
    """Turns a model's predictions into sets or intervals that cover 1 - alpha of the true labels.

    Guarantee:
        Epsilon-DP for the replacement of one held-out label, charged to the vault, by one private
        quantile (``mechanisms.QuantileMechanism``); noisy labels cost nothing more. The set or
        interval of a new example contains its label with probability at least 1 - alpha, over the
        held-out labels, the noise and the new example, if the model has not learnt from held-out
        labels and these n examples and the new one are exchangeable (for noisy labels independent
        and of one law). Holds for every model, also a bad one, whose sets are large.

    *Noisy labels* estimate the share that a set covers at each threshold; the least one with 1 -
    alpha and a margin for the estimate's largest error is taken: ``0.74 (W + V) / sqrt(n)``, if the
    positive parts of a debiased label sum to W at most, and the negative ones to V. The vault's
    quantile has a margin of about 11 / (epsilon n) only. Proofs are in docs/theory.md (sets with
    coverage).

    Source: split-conformal prediction (Papadopoulos et al. 2002) with labels of randomized
    response, after Penso, Mahpud, Goldberger and Sheffet 2025 (arXiv 2505.15721); the margins are
    by our own derivation.

    Args:
        model: a classifier or regressor of this library, or another with ``predict_proba`` or
            ``predict``; a head; a Keras model with probabilities, logits or numbers; a function.
        held_out: features and labels, ``(x[part.indices], part)``, that the model has not learnt
            from. The labels are a ``PrivateLabels`` of classes or numbers (``labels.split``), or
            ``NoisyLabels`` of classes with one channel, such as ``RandomizedResponse``.
        alpha: the chance of a miss, in (0, 1).
        epsilon: the cost for a ``PrivateLabels``, with users for a user; None for noisy labels.
        key: a name for the release of a vault, as for ``PrivateLabels.randomize``.

    Raises:
        BudgetExceededError: an example would pass the budget; nothing was released.
        TypeError: the labels are an array, or rows.
        ValueError: a model that has learnt from these labels by its receipts, too few labels for
            alpha, or unsuitable predictions; nothing was charged.

    Example:
        >>> from tf_labeldp import PrivacyBudget
        >>> labels = PrivateLabels([0, 1] * 500, num_classes=2, budget=PrivacyBudget(1.0))
        >>> x = np.array([0.2, 0.9] * 500)
        >>> sets = conformal(lambda x: x, (x, labels), alpha=0.1, epsilon=1.0)
        >>> sets.predict(np.array([0.1, 0.95])).tolist(), sets.guarantee().epsilon
        ([[True, False], [False, True]], 1.0)
    """
    both = public_input(model, held_out)
    network, pair = both.value
    features, labels = pair if isinstance(pair, (tuple, list)) and len(pair) == 2 else (None, pair)
    is_noisy = isinstance(labels, NoisyLabels)
    if features is None or not (is_noisy or isinstance(labels, PrivateLabels)):
        raise TypeError(
            "expected held_out=(features, labels) with PrivateLabels or NoisyLabels, got "
            f"{type(labels).__name__}. Give (x[part.indices], part) of _, part = labels.split(0.2)."
        )
    alpha = _validate.number_in("alpha", alpha, "(0, 1)")
    if is_noisy != (epsilon is None):
        raise ValueError(
            f"expected {'no epsilon with NoisyLabels' if is_noisy else 'epsilon, the cost'}, got "
            f"epsilon={epsilon}. A vault is charged, noisy labels are not."
        )
    kind = _kind_of_noisy(labels) if is_noisy else labels.kind
    _refuse_learnt(public_input(model, features).receipts, labels)
    if isinstance(kind, Rows):
        raise TypeError("expected classes or numbers, got rows. Make a vault of each column.")
    is_classes = isinstance(kind, Classes)
    if not is_classes and classes_of_model(network) is not None:
        raise ValueError("expected a regressor for numbers, got a classifier. Fit PrivateRidge.")
    predictions = _predictions(network, PublicInput.bare(features), is_classes)
    if len(predictions) != len(labels):
        raise ValueError(
            f"expected the features of {len(labels)} held-out labels, got {len(predictions)} rows. "
            "Give x[part.indices], in the order of the labels."
        )
    kind.check_order(network)
    from_logits = is_classes and _are_logits(predictions)
    if isinstance(kind, Classes):
        predictions = _probabilities(predictions, from_logits)
        scores = -kind.checked_predictions("sets", predictions)
    else:
        predictions = _validate.real_vector("predictions", predictions)
    if is_noisy:
        receipts = public_input(labels).receipts
        found = _threshold_of_noisy(labels, scores, alpha)
    else:
        each = labels.epsilon_of_one_label(epsilon)
        mechanism = QuantileMechanism(each, alpha, **kind.mechanism_arguments())
        mechanism.rank(len(labels))  # It raises before anything is charged.
        released = labels.release(mechanism, public_input=both.with_value(predictions), key=key)
        receipts, found = released.receipts, float(released.values)
    receipts = Receipts.merged(both.receipts, receipts)
    threshold = -found if is_classes else found
    return ConformalPredictor(network, threshold, alpha, receipts, kind.label_range, from_logits)


def _refuse_learnt(receipts: tuple[Receipt, ...], labels: Any) -> None:
    """Raises if receipts include a use of held-out labels."""
    if isinstance(labels, PrivateLabels):
        name, rows = labels.label_set.name, labels.indices
    else:
        name, rows = labels.receipts[-1].labels.name, charged_examples(labels.receipts, "draw")
    uses = [use for use in receipts if use.labels.name == name and use.kind != "declared"]
    if uses and np.isin(rows, charged_examples(tuple(uses))).any():
        raise ValueError(
            "expected a model that has not learnt from the held-out labels, got one whose receipts "
            f'name them ("{uses[-1].what}"): its sets would be too small. Train it on the first '
            "part of labels.split(0.2), and give the second one."
        )


def _kind_of_noisy(noisy: NoisyLabels) -> LabelKind:
    mechanism = noisy.mechanism
    is_plain = isinstance(mechanism, ClassificationMechanism) and not mechanism.uses_priors
    if not (is_plain and noisy.values.ndim == 1 and noisy.receipts):
        raise ValueError(
            "expected noisy classes with one channel and with receipts, got others of "
            f"{type(mechanism).__name__}. Draw RandomizedResponse, or give the vault and epsilon."
        )
    return noisy.kind


def _threshold_of_noisy(noisy: NoisyLabels, scores: np.ndarray, alpha: float) -> float:
    mechanism: Any = noisy.mechanism
    size, weights = len(noisy), np.zeros(2)
    step = max(1, _ENTRIES // mechanism.num_classes)
    for first in range(0, mechanism.num_outputs, step):
        some = debiased(mechanism, np.arange(first, min(first + step, mechanism.num_outputs)))
        by_sign = [np.maximum(signed, 0.0).sum(axis=1).max() for signed in (some, -some)]
        weights = np.maximum(weights, by_sign)
        margin = _MEAN_LARGEST * float(weights.sum()) / math.sqrt(size)
        if margin >= alpha:  # Many classes have large weights, and a table that is too large.
            needed = math.ceil(size * (margin / alpha) ** 2)
            raise ValueError(
                f"expected more than {needed:,} noisy labels for alpha={alpha:g}, got {size:,}. "
                "Draw more, raise alpha, or give the vault and epsilon, which needs far fewer."
            )
    thresholds = QuantileMechanism.class_thresholds(scores)
    cells = np.searchsorted(thresholds, scores, side="left")
    shares = np.bincount(cells.ravel(), noisy.debiased().ravel(), minlength=thresholds.size)
    passing = np.flatnonzero(np.cumsum(shares) / size >= 1.0 - alpha + margin)
    return float(thresholds[passing[0]] if passing.size else thresholds[-1])


def _is_keras(model: Any) -> bool:
    return hasattr(model, "trainable_weights")


def _predictions(model: Any, X: Any, is_classes: bool) -> np.ndarray:
    """Returns probabilities, logits or numbers of a model, (n,) if there is one column."""
    names = ("predict_proba", "predict") if is_classes else ("predict",)
    methods = (getattr(model, name, None) for name in names)
    predict = next((method for method in methods if method is not None), model)
    found = predict(X, verbose=0) if _is_keras(model) else predict(X)
    array = np.asarray(found)
    return array[:, 0] if array.ndim == 2 and array.shape[1] == 1 else array


def _are_logits(predictions: np.ndarray) -> bool:
    """Returns whether some predictions, (n,) or (n, K), are no probabilities."""
    sums = predictions.sum(axis=1, dtype=np.float64) if predictions.ndim == 2 else 1.0
    outside = (predictions < 0.0).any() or (predictions > 1.0 + _SUM_TOLERANCE).any()
    return bool(outside or np.any(np.abs(sums - 1.0) > _SUM_TOLERANCE))


def _probabilities(predictions: np.ndarray, from_logits: bool) -> np.ndarray:
    if not from_logits:
        return predictions
    logits = predictions.astype(np.float64)
    logits = np.stack([0.0 * logits, logits], axis=1) if logits.ndim == 1 else logits
    return prior_from_logits(logits)
