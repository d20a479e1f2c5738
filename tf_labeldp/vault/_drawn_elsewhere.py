"""Noisy labels that somebody else drew: their codes, their receipt, and whether they are possible.

The library saw neither the true labels nor the draw. So the receipt has the cost of the mechanism,
and an assumption that the labels were drawn by it.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from tf_labeldp import _validate
from tf_labeldp._columns import Column
from tf_labeldp.accounting import Assumption, Charge, LabelSet, PublicInput, Receipt
from tf_labeldp.mechanisms import ClassificationMechanism, LabelMechanism
from tf_labeldp.vault.label_kinds import Classes, LabelKind, Rows
from tf_labeldp.vault.records import PUBLIC_INPUT, compact

_ANSWERED = Assumption(
    "answers-missing",
    "authors",
    "The people without an answer are public, and who they are does not depend on true labels.",
)
_LEAST_P = 1e-3
"""The p-value below which frequencies count as impossible."""
_STEPS = 2000
"""Most steps to the likeliest shares of the classes; a bound covers what is left."""
_GAP = 1e-3
"""Nats of log-likelihood that may be left, a thousandth of the p-value."""
_MOST_CELLS = 1 << 16
"""Probabilities of a channel above which hardly any frequencies are impossible."""


class ForeignDraw(NamedTuple):
    """Noisy labels that somebody else drew, as fields of ``NoisyLabels``."""

    values: np.ndarray
    indices: np.ndarray
    classes: tuple[Hashable, ...] | None
    receipt: Receipt


def drawn_elsewhere(
    answers: Any, mechanism: LabelMechanism, priors: Any, classes: Sequence[Hashable] | None
) -> ForeignDraw:
    """Returns the fields of answers (n,) or (n, L) that somebody else drew by a mechanism.

    Missing answers are left out. Frequencies that the channel makes impossible warn.
    """
    mechanism = LabelMechanism.checked(mechanism)
    column = Column.of(answers)
    if column.values.ndim == 2 and column.values.shape[1] == 1:
        column = Column(column.values[:, 0], column.missing[:, 0])
    if not column.values.ndim:
        raise ValueError("expected answers of shape (n,), got one value. Give one per person.")
    is_missing = column.missing.reshape(len(column), -1).any(axis=1)
    rows = np.flatnonzero(~is_missing)
    if not rows.size:
        raise ValueError(
            f"expected noisy labels, got {len(column)} that are all missing. Give some answers."
        )
    values, kind = _encoded(column.take(rows), mechanism, classes)
    _warn_of_frequencies(values, mechanism, priors)
    charge = Charge.of(mechanism) if kind is None else kind.charge(mechanism)
    notes = [*charge.assumptions, *mechanism.claims(), _drawn_by(mechanism)]
    notes += [_ANSWERED] * bool(is_missing.any()) + [PUBLIC_INPUT] * (priors is not None)
    receipt = Receipt(
        LabelSet.new(len(column)),
        charge.with_assumptions(notes),
        f"{type(mechanism).__name__} (epsilon={charge.epsilon:g}, delta={charge.delta:g})",
        examples=rows,
        delta=charge.delta,
        output_digest=PublicInput.digest_of(compact(values)),
        unit="label" if kind is None else kind.unit,
    )
    return ForeignDraw(values, rows, None if kind is None else kind.names, receipt)


def is_foreign(receipts: Iterable[Receipt]) -> bool:
    """Returns whether one of the receipts is of noisy labels that somebody else drew."""
    notes = (note for receipt in receipts for note in receipt.charge.assumptions)
    return any(note.code == "drawn-elsewhere" for note in notes)


def _drawn_by(mechanism: LabelMechanism) -> Assumption:
    text = (
        f"The noisy labels that this library did not draw were drawn by {mechanism!r} from the "
        "true labels, by somebody else, once for each label and with secret randomness: the "
        "epsilon holds if they were."
    )
    return Assumption("drawn-elsewhere", "authors", text)


def _encoded(
    answers: Column, mechanism: LabelMechanism, classes: Sequence[Hashable] | None
) -> tuple[np.ndarray, LabelKind | None]:
    """Returns answers as outputs of the mechanism, and their kind; None for numbers and vectors."""
    name = type(mechanism).__name__
    if not isinstance(mechanism, ClassificationMechanism):
        if classes is not None:
            raise ValueError(f"classes= is for mechanisms of classes, got {name}. Leave it out.")
        numbers = answers.numbers("values")
        return mechanism.check_output(numbers, len(numbers)), None
    if answers.values.ndim == 2:
        kind = Rows(answers.values.shape[1])
        kind.check(mechanism)
        return kind.encode(answers), kind
    own = Classes(mechanism.num_classes if classes is None else classes)
    own.check_release(mechanism)
    if not mechanism.outputs_are_classes:
        codes = _validate.class_indices("values", answers.numbers("values"), mechanism.num_outputs)
        return codes, own
    try:
        return own.encode(answers), own
    except (TypeError, ValueError) as error:
        if classes is not None:
            raise
        raise type(error)(
            f"expected codes 0..{mechanism.num_classes - 1}, the outputs of {name}, got other "
            "noisy labels. Give NoisyLabels(values, mechanism, classes=[...]) with the class "
            "values, in the order of the rows of the channel."
        ) from None


def _warn_of_frequencies(values: np.ndarray, mechanism: LabelMechanism, priors: Any) -> None:
    """Warns if no shares of the classes make the frequencies of the noisy labels likely."""
    if not isinstance(mechanism, ClassificationMechanism) or priors is not None:
        return
    if mechanism.num_classes * mechanism.num_outputs > _MOST_CELLS:
        return
    channel = mechanism.transition_matrix()
    columns = values.reshape(len(values), -1).T
    each = [possible_by(channel, np.bincount(v, minlength=channel.shape[1])) for v in columns]
    p_value = min(1.0, len(each) * min(each))
    if p_value < _LEAST_P:
        # Neither the frequencies nor their p-value are shown: these may be the true labels.
        _validate.warn(
            f"the frequencies of these noisy labels are impossible under {mechanism!r}: p-value "
            f"below {_LEAST_P:g}. Check the probabilities of the channel, the order of the "
            "classes, and that these are not the true labels."
        )


def possible_by(channel: np.ndarray, counts: np.ndarray) -> float:
    """Returns an upper bound on the p-value of counts of noisy labels (M,) under a channel (K, M).

    The hypothesis is that some shares of the classes made them; the statistic is the likelihood
    ratio to free frequencies. Its tail is bounded for every sample size (Agrawal 2020,
    "Finite-sample concentration of the multinomial in relative entropy", Theorem 1.2).
    """
    total, freedom = counts.sum(), int(np.count_nonzero(channel.max(axis=0))) - 1
    if np.any(counts[channel.max(axis=0) == 0.0]):
        return 0.0
    counted = counts > 0
    channel, observed = channel[:, counted], counts[counted]
    shares = np.full(len(channel), 1.0 / len(channel))
    for _ in range(_STEPS):
        expected = shares @ channel
        gains = channel @ (observed / expected)
        # No shares have a log-likelihood that is larger by more than the excess of a gain.
        excess = max(0.0, float(gains.max()) - total)
        largest = float(np.sum(observed * np.log(observed / (total * expected))))
        if excess < _GAP or largest <= freedom:
            break
        shares = shares * gains / total
    if (ratio := largest - excess) <= freedom:
        return 1.0
    return min(1.0, math.exp(freedom * (1.0 + math.log(ratio / freedom)) - ratio))
