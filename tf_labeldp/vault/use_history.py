"""The uses of a vault as a table, in order."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

from tf_labeldp._progress import for_terminal
from tf_labeldp.accounting import LabelSet, Receipt
from tf_labeldp.accounting.composition import Composition
from tf_labeldp.mechanisms import Mechanism
from tf_labeldp.vault.records import Record


class HistoryLine(NamedTuple):
    """One line of ``PrivateLabels.history()``: a use, or a change of the budget."""

    time: str  # UTC
    what: str
    examples: int  # number of examples
    epsilon: float  # cost of this use alone
    epsilon_so_far: float  # at the delta of the budget
    actor: str
    key: str


class UseHistory(tuple[HistoryLine, ...]):
    """The uses of a vault, in order: prints as a table; ``pandas.DataFrame`` takes it.

    Example:
        >>> line = HistoryLine("2026-01-01T00:00:00", "a draw", 10, 0.5, 0.5, "me", "first")
        >>> print(UseHistory([line]))
        when                 examples   epsilon    so far  who  what
        2026-01-01T00:00:00        10       0.5       0.5  me   a draw (first)
    """

    __slots__ = ()

    def __str__(self) -> str:
        whens, actors = ([for_terminal(use[place]) for use in self] for place in (0, 5))
        when, who = max([4, *map(len, whens)]), max([3, *map(len, actors)])
        columns = f"{'examples':>8}  {'epsilon':>8}  {'so far':>8}"
        lines = [f"{'when':<{when}}  {columns}  {'who':<{who}}  what"]
        lines += [
            f"{time:<{when}}  {use.examples:>8}  {use.epsilon:>8.4g}  "
            f"{use.epsilon_so_far:>8.4g}  {actor:<{who}}  {use.what}"
            + (f" ({use.key})" if use.key else "")
            for use, time, actor in zip(self, whens, actors, strict=True)
        ]
        return for_terminal(*lines)


def lines_of(
    records: Sequence[Record], reserved: Sequence[Receipt], labels: LabelSet, delta: float
) -> list[tuple[HistoryLine, str]]:
    """Returns the lines of the records of a ledger, each with its use in the words of a page.

    Equal steps in a row share a line. What is reserved comes last: it is in the epsilon of its
    line, and not in that so far. ``labels`` are those of the ledger, ``delta`` is its budget's.
    """
    so_far = Composition(own=labels.name)
    lines: list[tuple[HistoryLine, str]] = []
    for _, equal in itertools.groupby(_with_lines(records, labels.name), _line_of):
        first, *more = equal
        receipts = [record.receipt for record in (first, *more) if record.receipt is not None]
        for receipt in receipts:
            so_far.add(receipt)
        spent = so_far.guarantee(delta).epsilon
        if (raised := first.raised) is not None:
            what = f"budget raised to {raised.budget}: {raised.reason}"
            lines.append((HistoryLine(raised.time, what, 0, 0.0, spent, raised.actor, ""), what))
            continue
        use = receipts[0]
        alone = Composition(receipts).guarantee(delta).epsilon
        what, on_page = (use.line(labels, len(receipts), text) for text in (None, _in_words(use)))
        key, size = "" if more else use.name, use.num_examples
        lines.append((HistoryLine(use.time, what, size, alone, spent, use.actor, key), on_page))
    spent = so_far.guarantee(delta).epsilon
    for use in reserved:
        alone = Composition([use]).guarantee(delta).epsilon
        what, size = f"{use.what}, reserved", use.num_examples
        on_page = f"{_in_words(use)}, reserved"
        lines.append((HistoryLine(use.time, what, size, alone, spent, use.actor, use.key), on_page))
    return lines


def _in_words(use: Receipt) -> str:
    """Returns the use in the words of a page: an author's own, or those of its mechanism."""
    read = Mechanism.in_words if use.is_of_mechanism else Mechanism.without_unset
    return read(use.what)


def _with_lines(records: Sequence[Record], own: str) -> list[Record]:
    """Returns the records of uses and budgets, each use once."""
    records = [record for record in records if record.receipt or record.raised]
    # Receipts of other vaults for the same use would repeat its line.
    receipts = [record.receipt for record in records if record.receipt is not None]
    shared = {(u.use, u.charge.event_text) for u in receipts if u.labels.name == own}
    repeated = {
        use.id
        for use in receipts
        if use.labels.name != own and use.use and (use.use, use.charge.event_text) in shared
    }
    return [r for r in records if r.receipt is None or r.receipt.id not in repeated]


def _line_of(record: Record) -> Any:
    # Equal steps in a row share a line of the history.
    use = record.receipt
    if use is None or use.kind != "steps":
        return record.number
    return use.what, use.charge, use.labels.name, use.actor, use.num_examples
