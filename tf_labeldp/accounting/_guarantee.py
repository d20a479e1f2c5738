"""The privacy statement: what is promised, to whom, and on which assumptions."""

from __future__ import annotations

import dataclasses
import decimal
import json
import math
from collections.abc import Iterable

from tf_labeldp import _validate

UNIT_LABEL = "the label of one training example"
RELATION_REPLACE = "replace_label"

_RELATIONS = {
    RELATION_REPLACE: "data sets with the same features that differ in the value of one unit",
    "add_or_remove": "data sets of which one holds one unit more (weaker; for comparison only)",
}
_ADD_OR_REMOVE = "DP under add_or_remove, which is weaker than label-DP"
_TOO_LARGE = "such a delta would allow to publish the label of one example"


class Assumption(str):
    """A sentence that must be true for a statement to hold, and who must vouch for it.

    It is its text, so that it prints, compares and sorts as a ``str``.

    Args:
        code: names the assumption for programs, whatever figures are in its text;
            ``"not-promised"`` is that of a reason why nothing is promised.
        who: must vouch for it: the ``"holder"`` of the labels, the ``"trainer"`` of the model, this
            ``"library"``, the operators of the ``"machines"``, the ``"authors"`` of other code, the
            ``"users"`` of a protocol, or ``"nobody"``.
        text: the sentence.

    Example:
        >>> public = Assumption("public-features", "holder", "The features are public.")
        >>> print(public, public.code)
        The features are public. public-features
    """

    code: str
    who: str

    def __new__(cls, code: str, who: str, text: str) -> Assumption:
        made = super().__new__(cls, text)
        made.code, made.who = code, who
        return made

    def __getnewargs__(self) -> tuple[str, str, str]:  # type: ignore[override]
        return self.code, self.who, str(self)

    @classmethod
    def of(cls, given: str | dict[str, str]) -> Assumption:
        """Returns an assumption as it is, from JSON, or of a sentence that nobody is known for."""
        if isinstance(given, dict):
            return cls(**given)
        return given if isinstance(given, cls) else cls("other", "nobody", given)

    def to_json(self) -> dict[str, str]:
        """Returns code, who and text."""
        return {"code": self.code, "who": self.who, "text": str(self)}


@dataclasses.dataclass(frozen=True)
class PrivacyGuarantee:
    """An (epsilon, delta) statement of label differential privacy, in full.

    For all neighbouring data sets and every set of outputs S,
    ``Pr[output in S] <= e^epsilon * Pr[output' in S] + delta``.

    The figures were promised before anything was drawn and do not depend on what came out.

    Attributes:
        epsilon: privacy parameter, >= 0; ``inf`` if nothing is promised.
        delta: failure probability, in [0, 1).
        unit: what one person contributes, in words.
        relation: ``"replace_label"``, which alone is called label-DP; or, for comparison with
            published tables, ``"add_or_remove"``.
        assumptions: that must be true for the statement to hold, each an ``Assumption``, which is
            a ``str``; where nothing is promised, the reasons come first.
        seeded: True if the random bits came from a seed or a generator that was passed in; the
            headline then says so.
        num_units: how many units there are, which tells what delta is worth; None if unknown.
        remarks: what promises nothing more, such as a smaller figure for this very draw.

    Raises:
        ValueError: a number is out of range or the relation is unknown.

    Example:
        >>> guarantee = PrivacyGuarantee(epsilon=1.0, delta=0.0)
        >>> guarantee.headline
        '(1, 0)-label-DP'
    """

    epsilon: float
    delta: float = 0.0
    unit: str = UNIT_LABEL
    relation: str = RELATION_REPLACE
    assumptions: tuple[Assumption, ...] = ()
    seeded: bool = False
    num_units: int | None = None
    remarks: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Checks the ranges."""
        if math.isnan(self.epsilon) or self.epsilon < 0:
            raise ValueError(f"epsilon must be zero or more, got {self.epsilon}.")
        if not 0.0 <= self.delta < 1.0:
            raise ValueError(f"delta must be in [0, 1), got {self.delta}.")
        _validate.one_of("relation", self.relation, _RELATIONS)
        object.__setattr__(self, "assumptions", tuple(map(Assumption.of, self.assumptions)))
        object.__setattr__(self, "remarks", tuple(self.remarks))

    def to_json(self) -> str:
        """Returns the statement as a JSON object; an infinite epsilon is ``"inf"`` there."""
        fields = dataclasses.asdict(self)
        fields["assumptions"] = [one.to_json() for one in self.assumptions]
        fields["private"] = self.is_private
        if math.isinf(self.epsilon):
            fields["epsilon"] = "inf"
        return json.dumps(fields, indent=2)

    @classmethod
    def from_json(cls, text: str) -> PrivacyGuarantee:
        """Returns the statement that ``to_json`` wrote."""
        fields = json.loads(text)
        fields.pop("private", None)
        fields["epsilon"] = float(fields["epsilon"])
        return cls(**fields)

    @property
    def is_private(self) -> bool:
        """True if the statement promises something: finite epsilon and unseeded random bits."""
        return math.isfinite(self.epsilon) and not self.seeded

    @property
    def headline(self) -> str:
        """The promise in one line."""
        if math.isinf(self.epsilon):
            return "NOT PRIVATE: nothing is promised"
        figures = f"({_rounded_up(self.epsilon)}, {_rounded_up(self.delta)})"
        name = "label-DP" if self.relation == RELATION_REPLACE else _ADD_OR_REMOVE
        promise = f"{figures}-{name}"
        if self.seeded:
            return (
                "NOT PRIVATE: seeded. Whoever knows or guesses the seed can undo the noise. "
                f"With secret random bits this would be {promise}."
            )
        return promise

    def with_assumptions(self, assumptions: Iterable[str | Assumption]) -> PrivacyGuarantee:
        """Returns a copy that rests on these assumptions too; none is said twice."""
        together = dict.fromkeys((*self.assumptions, *map(Assumption.of, assumptions)))
        return dataclasses.replace(self, assumptions=tuple(together))

    def with_remarks(self, remarks: Iterable[str]) -> PrivacyGuarantee:
        """Returns a copy with these remarks too."""
        return dataclasses.replace(self, remarks=(*self.remarks, *remarks))

    def warn_of_delta(self) -> PrivacyGuarantee:
        """Returns the statement itself, and warns of a delta that would allow too much."""
        if self.num_units is not None:
            warn_of_delta(self.delta, self.num_units)
        return self

    def __str__(self) -> str:
        """Returns the statement in plain words."""
        lines = [
            self.headline,
            f"  protects: {self.unit}",
            f"  neighbours: {_RELATIONS[self.relation]} ({self.relation})",
        ]
        if math.isfinite(self.epsilon):
            lines.append(
                "  meaning: no output becomes more than "
                f"{_factor(self.epsilon)} times as likely by changing one unit"
                + (f", but for probability {_rounded_up(self.delta)}" if self.delta else "")
            )
        if self.delta and self.num_units:
            worth = self.delta * self.num_units
            lines.append(
                f"  delta: {_rounded_up(worth, 3)} / n, for n = {self.num_units:,}"
                + (f" (WARNING: not below 1 / n; {_TOO_LARGE})" if _is_large(worth) else "")
            )
        lines += [f"  assumes: {text}" for text in self.assumptions]
        lines += [f"  remark: {text}" for text in self.remarks]
        return "\n".join(lines)


def warn_of_delta(delta: float, num_units: int) -> None:
    """Warns of a delta that would allow to publish one unit in full."""
    if _is_large(delta * num_units):
        limit = f"1/n = {1.0 / num_units:.3g}"
        _validate.warn(f"delta={delta:g} is not below {limit}: {_TOO_LARGE}. Use a smaller delta.")


def _is_large(worth: float) -> bool:
    return worth >= 1.0 - 1e-9


def _factor(epsilon: float) -> str:
    """Returns e^epsilon for people, rounded up, without overflow."""
    if epsilon >= 700:
        return f"e^{_rounded_up(epsilon)}"
    return _rounded_up(math.exp(epsilon), digits=4)


def _rounded_up(value: float, digits: int = 6) -> str:
    """Returns a number rounded up, but for one part in 1e9 that sums of doubles may be off by."""
    if math.isinf(value):
        return "inf"
    context = decimal.Context(prec=digits, rounding=decimal.ROUND_CEILING)
    return f"{float(context.create_decimal(repr(value * (1.0 - 1e-9)))):.{digits}g}"
