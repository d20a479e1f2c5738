"""The channels of surveys with randomized answers, by their coin designs."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import numpy as np

from tf_labeldp import _validate
from tf_labeldp.accounting import Public, Receipt, Receipts, public_input
from tf_labeldp.mechanisms.channels import ClassChannel, checked_table

_DIGITS = 12
"""Decimal digits of epsilon: fewer than the errors of logarithms, more than a statement shows."""

_SHOWN = 6
"""Most classes of a channel whose probabilities are shown."""


@dataclasses.dataclass(frozen=True, repr=False)
class SurveyChannel(ClassChannel):
    """The answers of a survey by a coin design whose probabilities are known.

    ``NoisyLabels(answers, SurveyChannel(...), classes=[...])`` are answers that people randomized
    themselves.

    Guarantee:
        (epsilon, 0)-DP for the replacement of one label, with the worst log-ratio of the channel as
        epsilon, up to 1e-9.

    Source: Warner 1965, "Randomized response"; Greenberg, Abul-Ela, Simmons and Horvitz 1969, "The
    unrelated question randomized response model"; Boruch 1971, "Assuring confidentiality of
    responses in social research" (forced answers).

    Attributes:
        probabilities: ``P[answer | true class]``, (K, K): a row for each true class, which sums to
            one (tolerance 1e-9). Each answer is possible for all classes or for none.

    Example:
        >>> cards = SurveyChannel.from_warner(0.75)  # three of four cards ask the question
        >>> cards, round(cards.epsilon, 4)
        (SurveyChannel([[0.75, 0.25], [0.25, 0.75]]), 1.0986)
        >>> SurveyChannel.from_forced_response([1 / 6, 1 / 6])  # two sides of a die
        SurveyChannel([[0.833333, 0.166667], [0.166667, 0.833333]])
    """

    probabilities: Public[tuple[tuple[float, ...], ...]]
    receipts: tuple[Receipt, ...] = dataclasses.field(
        default=(), repr=False, compare=False, kw_only=True
    )

    def __post_init__(self) -> None:
        public = public_input(self.probabilities)
        size = len(public.value)
        table = checked_table("probabilities", public.value, (size, size))
        _validate.integer_at_least("num_classes", size, 2)
        object.__setattr__(self, "probabilities", tuple(map(tuple, table.tolist())))
        receipts = Receipts.merged(self.receipts, public.receipts)
        object.__setattr__(self, "receipts", receipts)
        _ = self.epsilon  # This raises if the channel has none.

    @functools.cached_property
    def epsilon(self) -> float:  # type: ignore[override]
        """The worst log-ratio of the channel."""
        return _worst_log_ratio(self.table())

    @property
    def num_classes(self) -> int:  # type: ignore[override]
        """The number of classes K."""
        return len(self.probabilities)

    @classmethod
    def from_warner(cls, probability: float, num_classes: int = 2) -> SurveyChannel:
        """Returns the channel of true answers with a probability, else of any other answer.

        All other answers are equally likely. Of two classes it is Warner's design: with this
        probability a card asks the question, else its opposite.
        """
        kept = _validate.number_in("probability", probability, "[0, 1]")
        number = _validate.integer_at_least("num_classes", num_classes, 2)
        table = np.full((number, number), (1.0 - kept) / (number - 1))
        np.fill_diagonal(table, kept)
        return cls(table)  # type: ignore[arg-type]

    @classmethod
    def from_forced_response(cls, forced: Public[tuple[float, ...]]) -> SurveyChannel:
        """Returns the channel of a die that forces each answer with a probability, (K,).

        With the rest of the probability the answer is the truth.
        """
        public = public_input(forced)
        return cls(public.with_value(_with_forced(public.value)))  # type: ignore[arg-type]

    @classmethod
    def from_unrelated_question(
        cls, probability: float, shares: Public[tuple[float, ...]]
    ) -> SurveyChannel:
        """Returns the channel of an unrelated question, asked unless the true one is asked.

        Args:
            probability: of the true question.
            shares: shares (K,) of the answers to the unrelated question, which are known.
        """
        asked = _validate.number_in("probability", probability, "[0, 1]")
        public = public_input(shares)
        rows = _validate.prior_rows("shares", public.value, 1, np.size(public.value))
        return cls(public.with_value(_with_forced((1.0 - asked) * rows[0])))  # type: ignore[arg-type]

    def __repr__(self) -> str:
        number = self.num_classes
        shown = f"<{number} x {number}>, epsilon={self.epsilon:.6g}"
        if number <= _SHOWN:
            shown = repr([[float(f"{cell:.6g}") for cell in row] for row in self.probabilities])
        return f"SurveyChannel({shown})"

    def table(self) -> np.ndarray:
        """Returns ``P[answer | true class]``, (K, K)."""
        return np.array(self.probabilities)

    @functools.cached_property
    def _units(self) -> np.ndarray:  # type: ignore[override]
        return super()._units


def _with_forced(forced: Any) -> np.ndarray:
    """Returns the channel of true answers unless one is forced; probabilities of these, (K,)."""
    answers = np.asarray(forced, dtype=np.float64)
    is_right = answers.ndim == 1 and answers.size >= 2 and bool(np.all(answers >= 0.0))
    if not is_right or not answers.sum() <= 1.0:
        raise ValueError(
            "expected one probability for each of at least 2 classes, with a sum of at most 1, got "
            f"{answers.tolist()}. Give the probability that each answer is forced."
        )
    return answers + (1.0 - answers.sum()) * np.eye(answers.size)


def _worst_log_ratio(table: np.ndarray) -> float:
    """Returns the epsilon of a channel, or raises if it is zero or infinite."""
    used = table[:, table.max(axis=0) > 0.0]
    if used.min() == 0.0:
        raise ValueError(
            "expected answers that are possible for each true class or for none, got a probability "
            "of 0 next to a larger one: such an answer reveals the label, and nothing is promised. "
            "Use a design in which each answer may be random."
        )
    logs = np.log(used)
    worst = round(float(np.max(logs.max(axis=0) - logs.min(axis=0))), _DIGITS)
    if worst == 0.0:
        raise ValueError(
            "expected answers that depend on the truth, got equal rows of probabilities, from "
            "which nothing can be learnt. Check the probabilities of the design."
        )
    return worst
