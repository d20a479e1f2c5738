"""Uses of labels: their cost, the check against the budget, and their charges."""

from __future__ import annotations

import contextlib
import dataclasses
import secrets
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np

from tf_labeldp.accounting import Assumption, Charge, PublicInput, Receipt, Receipts, public_input
from tf_labeldp.accounting.planned_uses import ChainedUse
from tf_labeldp.mechanisms import Mechanism
from tf_labeldp.vault._draws import DrawRequest, Draws
from tf_labeldp.vault._examples import VaultPart
from tf_labeldp.vault.ledger import Ledger
from tf_labeldp.vault.reservations import PlannedUse, Reservation

_PUBLIC_ARRIVALS = Assumption(
    "public-arrivals",
    "holder",
    "The time at which a label became known does not depend on the label.",
)


@runtime_checkable
class HasParts(Protocol):
    """A head or a randomizer, whose releases are known before the first one."""

    def parts(self, labels: Any) -> Mapping[str, Mechanism]:
        """Returns mechanisms that cost what the releases cost, by their names."""


@dataclasses.dataclass(frozen=True, eq=False)
class NamedUse:
    """A use of labels: a draw or a release that is recorded under a name, or will be.

    Attributes:
        labels: the vault, or a part of one.
        key: the name; None stands for the next use without a name.
    """

    labels: Any
    key: str | None = None

    def __post_init__(self) -> None:
        if self.key is not None:
            object.__setattr__(self, "key", str(self.key))

    @classmethod
    def of(cls, labels: Any) -> NamedUse:
        """Returns a use as it is, and a vault as a use without a name."""
        return labels if isinstance(labels, NamedUse) else cls(labels)

    def or_named(self, default: str) -> NamedUse:
        """Returns the use, with this name if it has none."""
        return self if self.key is not None else NamedUse(self.labels, default)

    def part(self, name: str) -> NamedUse:
        """Returns one of several releases that this use consists of, ``key/name``."""
        return NamedUse(self.labels, f"{self.key}/{name}")

    @property
    def name(self) -> str:
        """The name in the ledger, where uses without a key are numbered."""
        return self._uses.draws.next_name() if self.key is None else self.key

    @property
    def is_recorded(self) -> bool:
        """Whether a draw of this name is recorded, and so costs nothing for its labels."""
        with self._uses.ledger.turn():
            return self.name in self._uses.ledger.draws

    @property
    def mechanism(self) -> Mechanism:
        """The recorded mechanism; a ``KeyError`` is raised if there is none."""
        if not self.is_recorded:
            raise KeyError(
                f"there is no draw {self.key!r}; there are {sorted(self._uses.ledger.draws)}."
            )
        return self._uses.ledger.draws[self.name].mechanism

    @property
    def shift(self) -> np.ndarray | None:
        """The predictions (n,) that a recorded draw of residuals subtracted; None of labels.

        Another machine rounds them differently: those of the draw count.
        """
        return self._uses.ledger.draws[self.name].output.arrays.get("shift")

    @property
    def _uses(self) -> LedgerOfExamples:
        uses: LedgerOfExamples = self.labels._uses
        return uses

    def residuals(self, predictions: Any, largest: float) -> NamedUse:
        """Returns this use of the labels minus public predictions, charged by the same ledger.

        Given the predictions, one label moves its own residual alone. Residuals are clipped to
        ``largest``, so that their range is public.

        Args:
            predictions: (n,), in the order of the labels, which are numbers; their receipts count
                in the use.
            largest: the largest size of a residual, above zero.
        """
        residuals = self.labels._residuals(public_input(predictions), largest)
        return NamedUse(residuals, self.key)

    def randomize(self, mechanism: Any, *, priors: Any = None) -> Any:
        """Draws noisy labels under this name, as ``PrivateLabels.randomize`` does."""
        return self.labels.randomize(mechanism, priors=priors, key=self.key)

    def release(self, mechanism: Any, public_input: Any = None) -> Any:
        """Releases a statistic under this name, as ``PrivateLabels.release`` does."""
        return self.labels.release(mechanism, public_input=public_input, key=self.key)

    def reserve(self, mechanism: PublicInput[Any]) -> Reservation:
        """Reserves the releases of a mechanism, a randomizer or a head together."""
        reservation: Reservation = self.labels.reserve(
            mechanism.with_value({self.key: mechanism.value})
        )
        return reservation

    def check_budget(self, mechanism: Any) -> None:
        """Raises if the budget does not allow a use; its recorded or reserved parts are free."""
        with self._uses.ledger.turn():
            self._uses.check(self._uses.draws.not_recorded(self.planned(mechanism)))

    def planned(self, use: Any, examples: VaultPart | None = None) -> list[PlannedUse]:
        """Returns the uses to reserve for an argument of ``PrivateLabels.reserve``.

        ``examples`` are some of these labels; None takes all.
        """
        examples = self.labels._examples if examples is None else examples
        if isinstance(use, Sequence):
            return [planned for each in use for planned in self.planned(each, examples)]
        if isinstance(use, HasParts):
            parts = [(NamedUse(self.labels, name), part) for name, part in use.parts(self).items()]
            return [planned for each, part in parts for planned in each.planned(part, examples)]
        if isinstance(use, Charge):
            return [PlannedUse(self.key, "the use", "steps", use, examples.rows)]
        request = DrawRequest(Mechanism.checked(use), examples.rows)
        return [self._uses.draws.planned(self.key, request)]


class LedgerOfExamples:
    """The ledger of a vault, which its parts share, with the examples of one part.

    Attributes:
        ledger: counts the uses of all examples.
        draws: the draws and releases among them.
    """

    __slots__ = ("_examples", "draws", "ledger")

    def __init__(self, ledger: Ledger, draws: Draws, examples: VaultPart) -> None:
        self.ledger, self.draws, self._examples = ledger, draws, examples

    def of(self, examples: VaultPart) -> LedgerOfExamples:
        """Returns the uses of other examples, by the same ledger."""
        return LedgerOfExamples(self.ledger, self.draws, examples)

    def note_arrivals(self) -> None:
        """Notes an assumption, unless all examples have had a label from their start."""
        if self._examples.sealed.rows is not None or self._examples.sealed.is_late:
            self.ledger.account.notes = (_PUBLIC_ARRIVALS,)

    def check_unit(self, unit: str | None) -> None:
        """Raises for a use of users' labels whose cost is not for all labels of one user."""
        if self.ledger.account.users is not None and unit != "user":
            raise ValueError(
                f"expected a use whose cost is for all labels of one user, got unit={unit!r}. Give "
                "users= and max_examples_per_user= to poisson_batches, or unit='user' to charge."
            )

    def check(self, uses: Sequence[PlannedUse], receipts: Sequence[Receipt] = ()) -> None:
        """Raises if the budget does not allow uses that are not reserved; within a turn."""
        covering = self.ledger.account.reserved.covering(uses)
        planned, reserved = [], set[str]() if covering is None else {covering.id}
        for use in uses:
            part = self.ledger.account.reserved_use(use, reserved)
            if part is None:
                planned.append(use)
            else:
                reserved.add(part.id)
        self.ledger.account.check(planned, receipts, covering)

    def charge(self, use: PlannedUse, made_of: Sequence[Receipt], **flags: Any) -> Receipt:
        """Charges a use outside the vault; takes the reserved use, if any."""
        with self.ledger.turn():
            # Its name is for the history: an epoch is found by its cost.
            part = self.ledger.account.reserved_use(use._replace(key=None))
            if part is not None:
                flags = {"plan": part.plan, **flags, "id": part.id}
            receipt = self.ledger.account.new_receipt(use, **flags)
            if receipt.use:
                # Another vault of a project may have counted this use.
                inherited = self.ledger.account.check([], [*made_of, receipt], part)
            else:
                plan = ChainedUse(receipt.charge, receipt.plan, receipt.plan_uses)
                inherited = self.ledger.account.check([use], made_of, part, plan)
            for other in inherited:
                if other is not receipt:
                    self.ledger.keep(receipt=other)
            self.ledger.keep(receipt=receipt)
        return receipt


class LabelsTogether:
    """Vaults, or one, that are used together: row i of each has labels of the same example."""

    def __init__(self, vaults: Sequence[Any]) -> None:
        self._vaults: list[tuple[LedgerOfExamples, VaultPart]] = [
            (vault._uses, vault._examples) for vault in vaults
        ]

    def open(self) -> list[np.ndarray]:
        """Returns the true labels for ``LabelDPModel.fit`` alone, which charges each step first."""
        opened = []
        for uses, examples in self._vaults:
            with uses.ledger.turn():
                labels = examples.sealed.open(examples.chosen).view()
            labels.flags.writeable = False
            opened.append(labels)
        return opened

    def charge(self, charge: Charge, *, what: str, unit: str, **flags: Any) -> Receipts:
        """Charges one use, and returns its receipt for each vault.

        ``charge`` is the cost for the replacement of all labels of one example, so it counts once
        in a statement. No vault is charged if the budget of one of them does not allow the use.
        """
        for uses, _ in self._vaults:
            uses.check_unit(unit)
        use = secrets.token_hex(16) if len(self._vaults) > 1 else ""
        plan = flags.get("plan", ""), flags.get("plan_uses", 1)
        planned = [
            (
                uses,
                PlannedUse(None, what, "steps", charge, examples.rows, use),
                examples.chosen_by,
            )
            for uses, examples in self._vaults
        ]
        with contextlib.ExitStack() as work:
            for uses, each, chosen_by in planned if use else ():
                work.enter_context(uses.ledger.reserve([each], chosen_by.receipts, plan))
            return Receipts(
                uses.charge(each, chosen_by.receipts, unit=unit, **flags)
                for uses, each, chosen_by in planned
            )

    def check(
        self, what: str, charge: Charge, plan: ChainedUse, made_of: Sequence[Receipt] = ()
    ) -> None:
        """Raises if one of the budgets does not allow a use, which the filter counts as ``plan``.

        ``what`` is the use in words, and ``made_of`` are receipts of its public inputs.
        """
        for uses, examples in self._vaults:
            with uses.ledger.turn():
                planned = PlannedUse(None, what, "steps", charge, examples.rows)
                uses.ledger.account.check([planned], made_of, plan=plan)

    def plans(self, charge: Charge, number: int) -> list[tuple[str, int]]:
        """Returns the plan of each of several uses of equal cost, and the plan's number of uses.

        The plan of reserved uses is empty here. After them, what other plans have not used is used
        first: the number, noise and examples of their uses were fixed in advance, and what they are
        for may depend on earlier outputs.
        """
        reserved, unused = [], []
        for uses, examples in self._vaults:
            with uses.ledger.turn():
                use, taken = PlannedUse(None, "", "steps", charge, examples.rows), set[str]()
                while (part := uses.ledger.account.reserved_use(use, taken)) is not None:
                    taken.add(part.id)
                reserved.append(len(taken))
                unused.append(uses.ledger.account.unused(charge, use.rows))
        plans = [("", 1)] * min(reserved)
        for plan, left in unused[0].items():
            plans += [plan] * min([left, *(others.get(plan, 0) for others in unused[1:])])
        rest = number - len(plans)
        return plans[:number] + [(secrets.token_hex(16), rest)] * rest

    @staticmethod
    def reserve(
        several: Sequence[tuple[Any, ...]], public: PublicInput[Any] | None = None
    ) -> Reservation:
        """Reserves uses of parts of one vault, as ``PrivateLabels.reserve``.

        Each is a ``NamedUse`` with its mechanism, and with indices if it is for some examples of
        its labels.
        """
        own = several[0][0].labels._uses
        chosen = public_input(public, *(use.labels._examples.chosen_by for use, *_ in several))
        with own.ledger.turn():
            planned: list[PlannedUse] = []
            for use, mechanism, *indices in several:
                planned += use.planned(mechanism, use.labels._examples.some(*indices))
            return own.ledger.reserve(own.draws.not_recorded(planned), chosen.receipts)
