"""The joint cost of the uses of a vault, and the uses that its budget allows."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import secrets
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from tf_labeldp import _validate
from tf_labeldp.accounting import (
    Assumption,
    BudgetExceededError,
    Charge,
    LabelSet,
    PrivacyBudget,
    PrivacyGuarantee,
    Receipt,
    Receipts,
)
from tf_labeldp.accounting.composition import Composition
from tf_labeldp.accounting.events import EventFields
from tf_labeldp.accounting.planned_uses import ChainedUse
from tf_labeldp.accounting.privacy_filter import PrivacyFilter
from tf_labeldp.mechanisms.users import UsersOfRows
from tf_labeldp.vault.filtered_uses import FilteredUses
from tf_labeldp.vault.records import may_count
from tf_labeldp.vault.reservations import PlannedUse
from tf_labeldp.vault.reserved_uses import ReservedUses, is_about

_RESERVE = (
    "Reserve uses together before the first of them (labels.reserve): they count as one that was "
    "fixed in advance."
)
_MORE = (
    "Take fewer steps, a smaller epsilon, more noise or other examples, or give draws a key and "
    "reuse them; remaining() returns the rest."
)
_OF_INPUT = (
    "The receipts of an input count, unless both label sets have stores or people= declares "
    "different populations. Raise the budget, or use an input that was made without these labels."
)


@dataclasses.dataclass(frozen=True, eq=False)
class _Request:
    """Uses that a budget may allow.

    Attributes:
        rows: the examples; None for all.
        planned: uses that are charged at once.
        inherited: receipts of their inputs.
        reserved: receipts of uses to reserve.
    """

    rows: np.ndarray | None
    planned: Sequence[PlannedUse] = ()
    inherited: Sequence[Receipt] = ()
    reserved: Sequence[Receipt] = ()

    @property
    def receipts(self) -> list[Receipt]:
        return [*self.inherited, *self.reserved]

    @property
    def charges(self) -> list[Charge]:
        return [use.charge for use in self.planned]

    @property
    def what(self) -> str:
        names = [f"{receipt.what} (of an input)" for receipt in self.inherited]
        names += [receipt.what for receipt in self.reserved]
        return " and ".join(dict.fromkeys([*names, *(use.what for use in self.planned)]))

    def check_delta(self, budget: PrivacyBudget, size: int) -> None:
        charges = [*self.charges, *(receipt.charge for receipt in self.receipts)]
        largest = max((charge.delta for charge in charges), default=0.0)
        if budget.delta == 0.0 and largest > 0.0:
            raise BudgetExceededError(
                f"{self.what} needs a delta above zero, at least {largest:g}, and the budget has "
                f"none. Nothing was drawn. Set PrivacyBudget({budget.epsilon:g}, delta=...) below "
                f"1/n = {1 / max(1, size):.2g}, or use Laplace noise, which needs none."
            )

    def refusal(
        self,
        budget: PrivacyBudget,
        after: PrivacyGuarantee,
        spent: float,
        held: float,
        filters: Sequence[str],
    ) -> str:
        """Returns the error for uses after which the guarantee would be ``after``.

        ``spent`` is the epsilon of earlier uses, and ``held`` that with what is reserved;
        ``filters`` are the names of those that do not allow the uses.
        """
        advice = _MORE if self.planned or self.reserved else _OF_INPUT
        has = f"have spent epsilon={spent:g}"
        if held > spent:
            has += f", or epsilon={held:g} with what is reserved"
            advice = f"{advice} A reservation of an ended process: tf-labeldp give-back."
        together = f"epsilon={after.epsilon:g} at delta={after.delta:g}"
        if budget.allows(after):
            advice = f"{_RESERVE} {advice}"
            by = ", or by ".join(filters) or "any privacy filter: they leave nothing"
            together += (
                " if they were fixed in advance, but over what earlier uses leave of the budget "
                f"{budget} for one that is chosen after them, by {by}"
            )
        else:
            together += f", over the budget {budget}"
        return (
            f"{self.what} would be charged to examples that {has}: together {together}. "
            f"Nothing was drawn. {advice}"
        )


class _Planned(NamedTuple):
    """Uses to reserve together."""

    plan: str  # of those that are new
    covering: Receipt | None  # a charge that was reserved for all of them, which they replace
    parts: dict[str, list[Receipt]]  # receipts to reserve, by plan
    inherited: list[Receipt]  # of their inputs, not counted yet


class Account:
    """The uses that count against a budget: those charged, and those reserved.

    Attributes:
        label_set: the labels that the uses are about.
        budget: the budget.
        users: of all labels, if the unit of privacy is a user.
        charged: receipts of the charged uses by id, in order; they include other label sets of the
            same people.
        reserved: the reserved uses.
        filtered: both, as the filter counts them.
        of_project: the accounts of the other stores of a project.
        actor: the author of new charges.
        notes: assumptions of new charges.
    """

    def __init__(
        self,
        label_set: LabelSet,
        budget: PrivacyBudget,
        reserved: ReservedUses,
        unit: str = "label",
        actor: str | None = None,
        users: UsersOfRows | None = None,
    ) -> None:
        self.label_set, self.budget, self.reserved = label_set, budget, reserved
        self._unit, self.actor = unit, actor or Receipt.actor_name()
        self.notes: tuple[Assumption, ...] = ()
        self.users = users
        self.charged: dict[str, Receipt] = {}
        self.filtered = FilteredUses()
        self.of_project: list[Account] = []
        self._composition = Composition(own=label_set.name)

    @property
    def unit(self) -> str:
        """The unit of privacy, ``"label"``, ``"row"`` or ``"user"``."""
        return self._unit if self.users is None else "user"

    @property
    def num_users(self) -> int | None:
        """The number of users of all labels; None without users."""
        return None if self.users is None else self.users.counts.size

    def grow(self, size: int) -> None:
        """Sets the number of labels, which came since then."""
        self.label_set = dataclasses.replace(self.label_set, size=size)

    def new_receipt(self, use: PlannedUse, **flags: Any) -> Receipt:
        """Returns the receipt of a use; charges nothing yet.

        With users, it is charged to all labels of the users of its rows: the labels of a user
        share one history, which composes all uses of any of them.
        """
        n = self.label_set.size
        if self.users is not None:
            number = self.num_users or 0
            flags |= {"unit": "user", "num_units": flags.get("num_units") or number}
            PrivacyGuarantee(0.0, self.budget.delta, num_units=max(1, number)).warn_of_delta()
        elif flags.get("unit") != "user":  # The number of labels is not the number of users.
            PrivacyGuarantee(0.0, self.budget.delta, num_units=max(1, n)).warn_of_delta()
        return Receipt(
            self.label_set,
            self._with_notes(use.charge),
            use.what,
            use.kind,
            use.key or "",
            self.examples(use.rows),
            self.budget.delta,
            use=use.use,
            budget_epsilon=self.budget.epsilon,
            actor=self.actor,
            **{"unit": self._unit, **flags},
        )

    def _with_notes(self, charge: Charge) -> Charge:
        notes = dict.fromkeys((*charge.assumptions, *self.notes))
        return charge.with_assumptions(notes) if self.notes else charge

    def charge(self, receipt: Receipt) -> bool:
        """Counts a receipt; returns whether it was not counted before."""
        if receipt.id in self.charged:
            receipt.agreed(self.charged[receipt.id])
            return False
        self.charged[receipt.id] = receipt
        self.reserved.uses.pop(receipt.id, None)
        self._composition.add(receipt)
        self.filtered.add([receipt])
        return True

    def follow(self, fields: dict[str, Any], made_of: tuple[Receipt, ...]) -> None:
        """Follows a record of a reservation."""
        self.reserved.follow(fields, made_of)
        given_back = fields.get("given_back", ())
        if made_of:
            self.filtered.replace(given_back)
        self.filtered.add(made_of)
        self.give_back(given_back)

    def give_back(self, names: Iterable[str]) -> None:
        """Takes uses, by their ids, out of what the filter counts, as far as nothing followed."""
        self.filtered.give_back(names, self.charged, self.reserved.inputs)

    def give_back_not_charged(self, names: Iterable[str]) -> None:
        """Gives back the uses among these that were neither charged nor given back."""
        self.give_back(set(names) - self.charged.keys() - self.filtered.given_back)

    def not_charged(self, receipts: Iterable[Receipt], labels: LabelSet) -> list[Receipt]:
        """Returns the receipts that these labels may have to bear and that are not counted."""
        merged = Receipts.merged(receipts)
        for receipt in merged:
            receipt.agreed(self.charged.get(receipt.id))
        return [
            receipt
            for receipt in merged
            if receipt.id not in self.charged and may_count(labels, receipt)
        ]

    def examples(self, rows: np.ndarray) -> np.ndarray | None:
        """Returns the rows that a use of some rows is charged to; None for all."""
        if self.users is not None:
            rows = self.users.rows_of_same(rows)
        n = self.label_set.size
        return None if rows.size == n and n else np.sort(rows)

    def reserved_use(self, use: PlannedUse, taken: Collection[str] = ()) -> Receipt | None:
        """Returns the reserved use that a planned one is; see ``ReservedUses.part``."""
        if not self.reserved.uses:
            return None
        return self.reserved.part(use, self.examples(use.rows), taken)

    def planned_before(self, use: PlannedUse, taken: Collection[str] = ()) -> Receipt | None:
        """Returns an equal use that was given back, and is a part of a plan that still counts.

        It was fixed before the first release of its plan, so that it may still be carried out as a
        part of it, such as by a call that failed between two releases and is repeated.
        """
        charge, examples = use.charge, self.examples(use.rows)
        for part in self.filtered.returned():
            is_own = part.labels.name == self.label_set.name and not part.use
            same = is_own and part.key == (use.key or "") and part.charge.has_cost_of(charge)
            if part.id not in taken and same and is_about(part, charge, examples):
                return part
        return None

    def take(
        self, use: PlannedUse, made_of: tuple[Receipt, ...] = ()
    ) -> tuple[Receipt | None, list[Receipt]]:
        """Returns the reserved use that a planned one is, if any, and receipts to count before it.

        Raises what ``check`` raises.
        """
        if use.kind == "release":
            self._warn_of_other_delta(use.charge)
        part = self.reserved_use(use)
        before = None if part else self.planned_before(use)
        try:
            inherited = self.check([use], made_of, part or before)
        except BudgetExceededError:
            if before is None:
                raise
            before = None
            inherited = self.check([use], made_of)
        return part or before, inherited

    def _warn_of_other_delta(self, charge: Charge) -> None:
        """Warns of a release for a delta above the budget's, where it costs more than it names."""
        delta = self.budget.delta
        if 0.0 < delta < charge.delta:
            cost = Charge.composed(((charge, 1),), delta).epsilon
            _validate.warn(
                f"delta={charge.delta:g} is above that of the budget, {delta:g}, at which this "
                f"release costs epsilon={cost:.4g} in place of {charge.epsilon:.4g}. Use delta="
                f"{delta:g} for a release of epsilon={charge.epsilon:.4g}."
            )

    def planned(
        self, uses: Sequence[PlannedUse], made_of: Iterable[Receipt], of_plan: tuple[str, int]
    ) -> _Planned:
        """Returns the plans of uses to reserve together, or raises if the budget allows them not.

        ``made_of`` are receipts of their public inputs; ``of_plan`` is a plan that they are a part
        of, or an empty name, and its number of uses.
        """
        covering = self.reserved.covering(uses)
        plan = of_plan[0] or secrets.token_hex(16) if covering is None else covering.plan
        taken = set() if covering is None else {covering.id}
        parts = self._plans_of(uses, plan, of_plan[1], taken, again=True)
        new = [*itertools.chain(*parts.values())]
        try:
            inherited = self._check_plan(new, made_of, covering)
        except BudgetExceededError:
            if self.filtered.given_back.isdisjoint(use.id for use in new):
                raise
            parts = self._plans_of(uses, plan, of_plan[1], taken)
            new = [*itertools.chain(*parts.values())]
            inherited = self._check_plan(new, made_of, covering)
        return _Planned(plan, covering, parts, inherited)

    def _plans_of(
        self,
        uses: Sequence[PlannedUse],
        plan: str,
        plan_uses: int,
        taken: Collection[str],
        again: bool = False,
    ) -> dict[str, list[Receipt]]:
        """Returns the plans of uses, each with the receipts to reserve.

        Uses that are not reserved are new in ``plan``, or, with ``again``, parts of earlier plans.
        """
        ids, parts = set(taken), dict[str, list[Receipt]]()
        for use in uses:
            if part := self.reserved_use(use, ids):
                parts.setdefault(part.plan, [])
            elif again and (part := self.planned_before(use, ids)):
                parts.setdefault(part.plan, []).append(part)
            else:
                part = self.new_receipt(use, plan=plan, plan_uses=plan_uses)
                parts.setdefault(plan, []).append(part)
            ids.add(part.id)
        return parts

    def unused(self, charge: Charge, rows: np.ndarray) -> dict[tuple[str, int], int]:
        """Returns the unused uses of this charge of each plan, by its name and number of uses."""
        whole = rows.size == self.label_set.size
        charged: Counter[tuple[str, int]] = Counter()
        for receipt in self.charged.values():
            if receipt.plan_uses == 1 or receipt.labels.name != self.label_set.name:
                continue
            if receipt.charge.has_cost_of(charge) and (receipt.examples is None) == whole:
                if whole or np.array_equal(np.asarray(receipt.examples), rows):
                    charged[receipt.plan, receipt.plan_uses] += 1
        return {plan: plan[1] - number for plan, number in charged.items() if plan[1] > number}

    def check(
        self,
        planned: Sequence[PlannedUse],
        made_of: Iterable[Receipt] = (),
        part: Receipt | None = None,
        plan: ChainedUse | None = None,
    ) -> list[Receipt]:
        """Raises if the budget does not allow planned uses; returns receipts to count with them.

        All planned uses are counted on the examples of any of them. The receipts are those among
        ``made_of`` that may be about the labels, and are not counted yet, with those of the plan of
        ``part``, the reserved use that the planned one is. The filter counts several planned uses
        as one plan, as a reservation does, and one use as ``plan``.
        """
        reserved = () if part is None else self.reserved.inputs.get(part.plan, ())
        inherited = self.inputs_to_charge([*made_of, *reserved])
        composition = self._with_reserved(part)
        if inherited:
            composition = composition.with_receipts(inherited)
            self._check(composition, _Request(None, inherited=inherited))
        if planned:
            some = _rows_of(planned, self.label_set.size)
            together = "together" if len(planned) > 1 else ""
            counted = [ChainedUse(use.charge, together) for use in planned]
            without = None
            same_cost = part is not None and part.charge.has_cost_of(planned[0].charge)
            is_reserved = part is not None and part.id not in self.filtered.given_back
            if same_cost and is_reserved and not self._has_grown(part):
                counted = []  # A reserved use is counted already.
            elif part is not None:
                counted = [ChainedUse(use.charge, part.plan) for use in planned]
                without = part
            elif plan is not None:
                counted = [plan]
            self._check(composition, _Request(some, planned, inherited), counted, without)
        return inherited

    def _has_grown(self, part: Receipt | None) -> bool:
        """Returns whether labels came after a use of all labels was reserved."""
        return part is not None and part.examples is None and part.labels.size < self.label_set.size

    def _check_plan(
        self, uses: Sequence[Receipt], made_of: Iterable[Receipt], without: Receipt | None = None
    ) -> list[Receipt]:
        """Raises if the budget does not allow uses together; returns receipts as ``check`` does.

        They take the place of the reserved use ``without``.
        """
        if not uses:
            return []
        inherited = self.inputs_to_charge(made_of)
        composition = self._with_reserved(without).with_receipts(inherited)
        if inherited:
            self._check(composition, _Request(None, inherited=inherited), without=without)
        composition = composition.with_receipts(uses)
        rows = None
        if all(use.examples is not None for use in uses):
            rows = np.unique(np.concatenate([np.asarray(use.examples) for use in uses]))
        self._check(composition, _Request(rows, (), inherited, uses), without=without)
        return inherited

    def inputs_to_charge(self, made_of: Iterable[Receipt]) -> list[Receipt]:
        """Returns the receipts of inputs that may be about the labels, and are not counted yet."""
        inherited = self.not_charged(made_of, self.label_set)
        priced = [use for use in inherited if use.kind not in ("declared", "unknown")]
        by_label = [use for use in priced if use.unit != "user"]
        if by_label and self.users is not None:
            raise ValueError(
                "expected inputs whose cost is for all labels of one user, got one whose cost is "
                f"by label ({by_label[0].what}). Make its vault with users=, too, or give both "
                "vaults different people=."
            )
        return inherited

    def _check(
        self,
        composition: Composition,
        request: _Request,
        counted: Sequence[ChainedUse] = (),
        without: Receipt | None = None,
    ) -> None:
        """Raises if the budget does not allow the uses of a request.

        Its receipts are in the composition. ``counted`` are the planned uses as the filter counts
        them; it leaves out ``without``.
        """
        charges, more = request.charges, request.receipts
        # Each history has to stay within the budget twice: composed as if all uses had been fixed
        # in advance, and by a filter, since this use may have been chosen after earlier outputs.
        after = PrivacyGuarantee(0.0)
        for history in composition.histories(self.label_set, request.rows):
            after = self._composed(history, charges)
            if not self.budget.allows(after):
                break
        else:
            is_free = not more and all(charge.epsilon == 0.0 for charge in charges)
            filters = () if is_free else self.filters(request.rows, counted, more, without)
            if all(each.allows for each in filters):
                return
        request.check_delta(self.budget, self.label_set.size)
        raise BudgetExceededError(self._refusal(request, after))

    def _refusal(self, request: _Request, after: PrivacyGuarantee) -> str:
        """Returns the error for a request after which the guarantee would be ``after``."""
        before = self._composition.histories(self.label_set, request.rows)
        spent = max(self._composed(history).epsilon for history in before)
        held = self._with_reserved().histories(self.label_set, request.rows)
        held_epsilon = max(self._composed(history).epsilon for history in held)
        names: dict[str, None] = {}
        if self.budget.allows(after):
            names = dict.fromkeys(
                name for each in self.filters(request.rows) for name in each.names
            )
        return request.refusal(self.budget, after, spent, held_epsilon, list(names))

    def filters(
        self,
        rows: np.ndarray | None,
        planned: Sequence[ChainedUse] = (),
        inherited: Sequence[Receipt] = (),
        without: Receipt | None = None,
    ) -> list[PrivacyFilter]:
        """Returns the rest of the budget after planned uses, for each distinct history."""
        return self.filtered.filters(self.budget, self.label_set, rows, planned, inherited, without)

    def guarantee(self, planned: Sequence[Receipt], delta: float | None) -> PrivacyGuarantee:
        """Returns the statement of all receipts and of planned ones."""
        composition = self._composition
        if planned:
            composition = composition.with_receipts(planned)
        is_kept = all(each.allows for each in self.filters(None, inherited=planned))
        kept = (self.budget.epsilon, self.budget.delta) if is_kept else ()
        return composition.guarantee(self.budget.delta if delta is None else delta, kept)

    def remaining(self, rows: np.ndarray | None) -> float:
        """Returns the largest epsilon of one more pure-DP use of these examples; None for all."""
        histories = self._with_reserved().histories(self.label_set, rows)
        filters = set(self.filters(rows))
        budget = self.budget
        low, high = 0.0, min((each.remaining() for each in filters), default=budget.epsilon)
        if high <= 1e-9 * budget.epsilon:  # Rounding of a sum that reached the budget.
            return 0.0

        def fits(epsilon: float) -> bool:
            use = Charge(epsilon, 0.0, EventFields.randomized_response(epsilon))
            return all(budget.allows(self._composed(history, [use])) for history in histories)

        # The composition of uses that were fixed in advance is larger by rounding at most.
        if fits(high):
            return high
        # The lower end fits, so a search that stops early is at most 0.01 % too careful.
        while high - low > 1e-4 * high and high > 1e-6:
            middle = 0.5 * (low + high)
            low, high = (middle, high) if fits(middle) else (low, middle)
        return low

    def spread(self) -> list[tuple[float, int]]:
        """Returns each spent epsilon, rising, with the number of examples that spent it."""
        counts: Counter[float] = Counter()
        for histories, count in self._composition.spread(self.label_set):
            counts[max(self._composed(history).epsilon for history in histories)] += count
        return sorted(counts.items())

    def _with_reserved(self, without: Receipt | None = None) -> Composition:
        """Returns the composition of all uses and of all that is reserved, except for one use."""
        accounts = (self, *self.of_project)
        uses = [use for account in accounts for use in account.reserved.with_inputs()]
        own = dataclasses.replace(self.label_set, stored=False)
        new = self.not_charged([use for use in uses if use is not without], own)
        return self._composition.with_receipts(new) if new else self._composition

    def _composed(
        self, history: tuple[tuple[Charge, int], ...], more: Sequence[Charge] = ()
    ) -> PrivacyGuarantee:
        counts = Counter(dict(history))
        counts.update(more)
        return Charge.composed(tuple(counts.items()), self.budget.delta)


def _rows_of(uses: Sequence[PlannedUse], size: int) -> np.ndarray | None:
    """Returns the examples of any of these uses; None for all of this number."""
    if any(use.rows.size == size for use in uses):
        return None
    # The uses of a part share one array, which may be long.
    distinct = {id(use.rows): use.rows for use in uses}
    return functools.reduce(np.union1d, distinct.values())
