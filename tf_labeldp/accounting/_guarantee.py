"""The privacy statement: the promise, its meaning, and the assumptions that it rests on."""

from __future__ import annotations

import dataclasses
import decimal
import json
import math
from collections.abc import Iterable
from typing import Any, ClassVar

from tf_labeldp import _validate
from tf_labeldp._progress import for_terminal

UNITS = {
    "label": "the label of one training example",
    "row": "the whole row of labels of one training example",
    "user": "all labels of one user",
}
UNIT_LABEL = UNITS["label"]
RELATION_REPLACE = "replace_label"
_RELATIONS = {
    RELATION_REPLACE: "If {unit} changed (replace_label)",
    "add_or_remove": "If {unit} were added or removed (add_or_remove: for comparison only)",
}
_IN_FULL = {**_RELATIONS, RELATION_REPLACE: "If {unit} changed to any other one"}
"""The relations for readers who know none by its name."""
_VOUCHES = {
    "nobody": "Not assigned: read these first",
    "authors": "The authors of other code, and of declarations",
    "users": "The users of a protocol without a server",
    "trainer": "Those who train and publish",
    "library": "This library, whose tests check it",
    "machines": "Those who run the machines",
    "holder": "The label holder",
}
"""Titles of the groups of assumptions, by ``Assumption.who``, in the order of statements."""
_PAGE = "docs/privacy.md#who-must-vouch-for-what"
_TOO_LARGE = "such a delta would allow publishing the label of one example"


class Assumption(str):
    """A sentence that must be true for a statement to hold, and who must vouch for it.

    It is a ``str``: it prints, compares and sorts as its text.

    Args:
        code: name for programs, the same whatever figures the text has; ``"not-promised"`` marks a
            reason why nothing is promised, ``"no-record"`` that nothing is known.
        who: party that must vouch for it: the ``"holder"`` of the labels, the ``"trainer"`` of the
            model, this ``"library"``, the operators of the ``"machines"``, the ``"authors"`` of
            other code, the ``"users"`` of a protocol, or ``"nobody"``.
        text: the sentence.

    Example:
        >>> public = Assumption("public-features", "holder", "The features are public.")
        >>> print(public, public.code)
        The features are public. public-features
    """

    INITIAL_WEIGHTS: ClassVar[Assumption]
    """The assumption of every statement of a Keras model."""

    code: str
    who: str

    def __new__(cls, code: str, who: str, text: str) -> Assumption:
        self = super().__new__(cls, text)
        self.code, self.who = code, who
        return self

    def __getnewargs__(self) -> tuple[str, str, str]:  # type: ignore[override]
        return self.code, self.who, str(self)

    @classmethod
    def of(cls, sentence: str | dict[str, str]) -> Assumption:
        """Returns an assumption unchanged, or builds one from JSON or from a plain sentence."""
        if isinstance(sentence, dict):
            return cls(**sentence)
        return sentence if isinstance(sentence, cls) else cls("other", "nobody", sentence)

    def to_json(self) -> dict[str, str]:
        return {"code": self.code, "who": self.who, "text": str(self)}


Assumption.INITIAL_WEIGHTS = Assumption(
    "initial-weights",
    "trainer",
    "The weights that training began with, and any that were set since, were made without these "
    "labels, except for the uses counted here.",
)
NO_RECORD = Assumption(
    "no-record",
    "nobody",
    "There is no record of any label: fresh weights and weights that another program trained look "
    "the same. Train with tf_labeldp.fit(model, x, noisy), or declare the history: "
    "tf_labeldp.declare(model, because=...).",
)


@dataclasses.dataclass(frozen=True)
class PrivacyGuarantee:
    """A complete (epsilon, delta) statement of label differential privacy.

    For all neighbouring data sets and every set of outputs S,
    ``Pr[output in S] <= e^epsilon * Pr[output' in S] + delta``.

    The figures were promised before the draws and do not depend on them.

    Attributes:
        epsilon: privacy parameter, >= 0; ``inf`` if nothing is promised.
        delta: failure probability, in [0, 1).
        unit: contribution of one person, in words.
        relation: ``"replace_label"``, which alone is called label-DP; or ``"add_or_remove"``, for
            comparison with published tables.
        assumptions: sentences that must be true for the statement to hold, each an ``Assumption``,
            which is a ``str``; where nothing is promised, the reasons come first.
        seeded: True if the random bits came from a seed or a generator that the caller passed; the
            headline then reports it.
        num_units: number of units, to which delta is compared; None if unknown.
        remarks: notes without a further promise, such as a smaller figure for this draw.
        adaptive: (epsilon, delta) for uses that were chosen after earlier outputs: the budget,
            which a privacy filter kept; None if it is unknown. ``epsilon`` and ``delta`` are for
            uses that were fixed in advance.

    Example:
        >>> PrivacyGuarantee(epsilon=1.0, delta=0.0).headline
        '(1, 0)-label-DP'
    """

    UNITS: ClassVar[dict[str, str]] = UNITS
    """The contribution of one person in words, by the unit of a receipt."""

    epsilon: float
    delta: float = 0.0
    unit: str = UNIT_LABEL
    relation: str = RELATION_REPLACE
    assumptions: tuple[Assumption, ...] = ()
    seeded: bool = False
    num_units: int | None = None
    remarks: tuple[str, ...] = ()
    adaptive: tuple[float, float] | None = None

    def __post_init__(self) -> None:
        if math.isnan(self.epsilon) or self.epsilon < 0:
            raise ValueError(f"epsilon must be zero or more, got {self.epsilon}.")
        if not 0.0 <= self.delta < 1.0:
            raise ValueError(f"delta must be in [0, 1), got {self.delta}.")
        _validate.one_of("relation", self.relation, _RELATIONS)
        object.__setattr__(self, "assumptions", tuple(map(Assumption.of, self.assumptions)))
        object.__setattr__(self, "remarks", tuple(self.remarks))

    def to_json(self) -> str:
        """Returns the statement as a JSON object; an infinite epsilon is ``"inf"`` there."""
        fields: dict[str, Any] = dataclasses.asdict(self)
        fields["assumptions"] = [note.to_json() for note in self.assumptions]
        fields["private"] = self.is_private
        if fields.pop("adaptive") is not None and self.adaptive is not None:
            fields["adaptive"] = dict(zip(("epsilon", "delta"), self.adaptive, strict=True))
        if math.isinf(self.epsilon):
            fields["epsilon"] = "inf"
        return json.dumps(fields, indent=2)

    @classmethod
    def from_json(cls, text: str) -> PrivacyGuarantee:
        """Returns the statement that ``to_json`` wrote.

        A published ``privacy.json`` has it as ``guarantee``, and its content is read, too.
        """
        fields = json.loads(text)
        fields = fields.get("guarantee", fields)
        fields.pop("private", None)
        if "adaptive" in fields:
            fields["adaptive"] = tuple(fields["adaptive"][name] for name in ("epsilon", "delta"))
        return cls(**{**fields, "epsilon": float(fields["epsilon"])})

    @property
    def is_private(self) -> bool:
        """True if the statement promises something: finite epsilon and unseeded random bits."""
        return math.isfinite(self.epsilon) and not self.seeded

    @property
    def headline(self) -> str:
        """The promise in one line."""
        if math.isinf(self.epsilon):
            codes = {note.code for note in self.assumptions}
            if NO_RECORD.code in codes and "not-promised" not in codes:
                return "no record of any label"
            return "NOT PRIVATE: nothing is promised"
        promise = f"({_rounded_up(self.epsilon)}, {_rounded_up(self.delta)})-"
        if self.relation == RELATION_REPLACE:
            promise += "label-DP"
        else:
            promise += "DP under add_or_remove, which is weaker than label-DP"
        if self.seeded:
            return (
                "NOT PRIVATE: seeded. Knowing or guessing the seed undoes the noise. "
                f"With secret random bits this would be {promise}."
            )
        return promise

    def with_assumptions(self, assumptions: Iterable[str | Assumption]) -> PrivacyGuarantee:
        """Returns a copy that also rests on these assumptions, each listed once."""
        together = dict.fromkeys((*self.assumptions, *map(Assumption.of, assumptions)))
        return dataclasses.replace(self, assumptions=tuple(together))

    def with_remarks(self, remarks: Iterable[str]) -> PrivacyGuarantee:
        """Returns a copy with these remarks added."""
        return dataclasses.replace(self, remarks=(*self.remarks, *remarks))

    def warn_of_delta(self) -> PrivacyGuarantee:
        """Returns the statement itself, and warns if delta is not below 1/n."""
        if self.num_units is not None and _is_large(self.delta * self.num_units):
            limit = f"1/n = {1.0 / self.num_units:.3g}"
            delta = _validate.Argument("delta", self.delta)
            _validate.warn(
                _validate.Message.of(
                    delta, f" is not below {limit}: {_TOO_LARGE}. Use a smaller delta."
                )
            )
        return self

    def assumptions_by_voucher(self) -> dict[str, list[Assumption]]:
        """Returns the assumptions, grouped by the title of the party that must vouch for them."""
        groups: dict[str, list[Assumption]] = {title: [] for title in _VOUCHES.values()}
        for note in self.assumptions:
            groups[_VOUCHES.get(note.who, _VOUCHES["nobody"])].append(note)
        return {title: notes for title, notes in groups.items() if notes}

    def sentences(self, *, in_full: bool = False) -> list[str]:
        """Returns what the headline means, without assumptions and remarks.

        ``in_full`` is for readers who know neither the name of the relation nor what a delta of
        1/n would allow.
        """
        sentences = []
        if math.isfinite(self.epsilon):
            start = "With secret random bits: " if self.seeded else ""
            change = (_IN_FULL if in_full else _RELATIONS)[self.relation].format(unit=self.unit)
            exponential = f"e^{_rounded_up(self.epsilon)}"  # math.exp overflows from 710 on
            if self.epsilon < 700.0:
                exponential = _rounded_up(math.exp(self.epsilon), digits=4)
            factor = f"more than {exponential} times as likely"
            rest = f", except with probability {_rounded_up(self.delta)}" if self.delta else ""
            sentences.append(f"{start}{change}, no outcome would become {factor}{rest}.")
        if self.delta and self.num_units:
            worth = self.delta * self.num_units
            note = " examples (1 / n would allow publishing the label of one example)" * in_full
            if _is_large(worth):
                note = f" (WARNING: not below 1 / n; {_TOO_LARGE})"
            sentences.append(
                f"delta: {_rounded_up(worth, 3)} / n, for n = {self.num_units:,}{note}"
            )
        if self.adaptive is not None:
            sentences.append(f"For any adaptive use: {adaptive_promise(self.adaptive)}.")
        return sentences

    def __str__(self) -> str:
        lines = [self.headline, *(f"  {sentence}" for sentence in self.sentences())]
        if self.assumptions:
            lines.append(f"  Assumptions, by who must vouch for them ({_PAGE}):")
        for title, notes in self.assumptions_by_voucher().items():
            lines += [f"    {title}:", *(f"      [{note.code}] {note}" for note in notes)]
        return for_terminal(*lines, *(f"  remark: {text}" for text in self.remarks))


def adaptive_promise(figure: tuple[float, float]) -> str:
    """Returns the promise for uses that were chosen after earlier outputs, in words."""
    epsilon, delta = map(_rounded_up, figure)
    return f"({epsilon}, {delta})-label-DP, the budget, which a privacy filter keeps"


def _is_large(worth: float) -> bool:
    return worth >= 1.0 - 1e-9


def _rounded_up(value: float, digits: int = 6) -> str:
    """Returns a number rounded up, after one part in 1e9 is taken off for errors of float sums."""
    context = decimal.Context(prec=digits, rounding=decimal.ROUND_CEILING)
    return f"{float(context.create_decimal(repr(value * (1.0 - 1e-9)))):.{digits}g}"
