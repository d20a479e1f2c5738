"""The only place where mechanisms read the true labels: each draw is charged and recorded.

A mechanism of another library is checked on made-up labels before it reads a true label. Its errors
on true labels are withheld, and so are warnings, logs and what it writes to stdout and stderr: what
depends on the labels is an output too.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NoReturn, Protocol, runtime_checkable

import numpy as np

from tf_labeldp import _validate
from tf_labeldp._progress import without_output, without_warnings
from tf_labeldp.accounting import PublicInput, Receipt
from tf_labeldp.mechanisms import (
    AggregateMechanism,
    ClassificationMechanism,
    LabelMechanism,
    Mechanism,
    Priors,
    check_mechanism,
)
from tf_labeldp.vault.keyed_draws import KEYED_ASSUMPTIONS, KeyedDraws, check_keyed
from tf_labeldp.vault.label_kinds import LabelKind, Numbers
from tf_labeldp.vault.ledger import Ledger
from tf_labeldp.vault.records import (
    PUBLIC_INPUT,
    Arrival,
    DrawSettingsError,
    Record,
    compact,
)
from tf_labeldp.vault.reservations import PlannedUse

_CHECKED: dict[tuple[type, str, int | None], tuple[str, bool]] = {}
"""Mechanisms of other libraries that passed ``check_mechanism`` in this process.

By their type, their state and, for statistics, the number of labels: their channel, and whether
their draws were tested.
"""

_OTHER_SHIFT = 1e-4
"""The share of the range by which rounding on another machine may move a stored shift."""


class Sealed:
    """Keeps the true labels away from repr, pickling and NumPy's conversions.

    Attributes:
        arrivals: number of arrivals of labels.
        arrived: number of earlier records at each label's arrival, (n,); -1 without one.
        rows: examples with a label, ``int64``, rising; None for all.
        is_late: whether a label came after its example.
    """

    __slots__ = ("_array", "arrivals", "arrived", "is_late", "rows")

    def __init__(self, array: np.ndarray, arrivals: Sequence[Arrival]) -> None:
        first = arrivals[0]
        self._array, self.arrived = array[: first.total], np.full(first.total, -1, np.int32)
        self.arrived[first.rows] = 0
        self.arrivals, self.is_late = 1, False
        self._find_rows()
        for arrival in arrivals[1:]:
            self.add(arrival, array[arrival.rows])

    def add(self, arrival: Arrival, labels: np.ndarray) -> None:
        """Adds the labels of an arrival."""
        size = len(self._array)
        empty = np.zeros((arrival.total - size, *labels.shape[1:]), labels.dtype)
        array = np.concatenate([self._array, empty])
        arrived = np.concatenate([self.arrived, np.full(len(empty), -1, np.int32)])
        array[arrival.rows], arrived[arrival.rows] = labels, arrival.records
        self._array, self.arrived = array, arrived
        self.arrivals += 1
        self.is_late |= bool(np.any(arrival.rows < size))
        self._find_rows()

    def _find_rows(self) -> None:
        has_label = self.arrived >= 0
        self.rows = None if has_label.all() else np.flatnonzero(has_label)

    def residuals(self, shift: np.ndarray, largest: float) -> Sealed:
        """Returns the labels minus a public shift (N,), at most ``largest`` in size."""
        found = object.__new__(Sealed)
        found.arrivals, found.arrived = self.arrivals, self.arrived
        found.is_late, found.rows = self.is_late, self.rows
        found._array = np.clip(self._array - shift, -largest, largest)
        return found

    def __len__(self) -> int:
        return int(self._array.shape[0])

    def open(self, rows: np.ndarray | None = None) -> np.ndarray:
        return self._array if rows is None else self._array[rows]

    def look(self, rows: np.ndarray) -> np.ndarray:
        """Returns the labels of distinct rows, without a copy if they are all, and read-only."""
        is_all = rows.size == len(self) and bool(np.all(rows[1:] > rows[:-1]))
        labels = self._array.view() if is_all else self._array[rows]
        labels.flags.writeable = False
        return labels

    def __repr__(self) -> str:
        return "<sealed>"

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TypeError("true labels cannot be pickled or copied.")


@dataclasses.dataclass(frozen=True, eq=False)
class DrawRequest:
    """A draw of noisy labels, or the release of a statistic, to find by its name or to make.

    Attributes:
        mechanism: the mechanism of the draw or of the release.
        rows: examples of the whole vault, (m,).
        public: the public input; arrays and priors by example have m rows.
    """

    mechanism: Mechanism
    rows: np.ndarray
    public: PublicInput[Any] = dataclasses.field(default_factory=lambda: PublicInput(None))

    @property
    def kind(self) -> str:
        return "draw" if isinstance(self.mechanism, LabelMechanism) else "release"

    def some(self, places: np.ndarray) -> DrawRequest:
        """Returns the request for the rows in these places."""
        size, value = self.rows.size, self.public.value
        if places.size == size:
            return self
        if isinstance(value, Priors) and value.groups is not None:
            value = dataclasses.replace(value, groups=np.asarray(value.groups)[places])
        elif isinstance(value, Priors):
            rows = np.asarray(value.probabilities)
            if rows.ndim == 2 and len(rows) == size:
                value = dataclasses.replace(value, probabilities=rows[places])
        elif isinstance(value, np.ndarray) and value.shape[:1] == (size,):
            value = value[places]
        public = self.public.with_value(value)
        return dataclasses.replace(self, rows=self.rows[places], public=public)

    def has_input_of(self, record: Record) -> bool:
        """Returns whether a record was made from this public input."""
        stored, value = record.output.public_digest, self.public.value
        if isinstance(value, _HasDigest):
            return stored is not None and bool(value.matches(stored))
        return stored == self.public.digest

    def check_is(self, record: Record, *, same_input: bool) -> None:
        """Raises if a record is that of another draw."""
        stored, indices = record.mechanism, record.indices
        ours, theirs = (each.to_json(with_receipts=False) for each in (self.mechanism, stored))
        agrees = {
            # A stored mechanism may lack arguments that were added since: it gets their defaults.
            "mechanism": ours == theirs,
            "indices": np.array_equal(indices, self.rows),
            "priors or public input": same_input,
        }
        differing = [name for name, same in agrees.items() if not same]
        if differing:
            raise DrawSettingsError(
                f"draw {record.key!r} exists and was made with other {' and '.join(differing)} "
                f"(stored: {stored!r}, {indices.size} examples; asked: {self.mechanism!r}, "
                f"{self.rows.size} examples). Use the settings of the stored draw, or give the new "
                "draw a key of its own."
            )


class Draws:
    """The draws and releases of one vault: each is drawn once, and later found by its name.

    A ``seed`` makes draws repeatable; None takes secure random bits, or those of keyed draws.
    """

    def __init__(
        self,
        sealed: Sealed,
        kind: LabelKind,
        ledger: Ledger,
        seed: int | None,
        keyed: KeyedDraws | None,
    ) -> None:
        self._sealed, self._kind, self._ledger, self._seed = sealed, kind, ledger, seed
        self._keyed = keyed
        self._shift: np.ndarray | None = None
        self._unnamed = 0

    def of_residuals(self, sealed: Sealed, shift: np.ndarray, kind: Numbers) -> Draws:
        """Returns the draws, in the same ledger, of the labels minus a public shift (N,).

        A record keeps the shift of its draw.
        """
        found = Draws(sealed, kind, self._ledger, self._seed, self._keyed)
        found._shift = shift
        return found

    @property
    def is_keyed(self) -> bool:
        return self._keyed is not None

    def next_name(self, later: int = 0) -> str:
        return f"{Receipt.UNNAMED}{self._unnamed + later}"

    def not_recorded(self, uses: Sequence[PlannedUse]) -> list[PlannedUse]:
        """Returns the uses that are not recorded; those without a key are the next ones."""
        unnamed = [use for use in uses if use.key is None and use.kind != "steps"]
        names = {id(use): self.next_name(later) for later, use in enumerate(unnamed)}
        return [use for use in uses if names.get(id(use), use.key) not in self._ledger.draws]

    def record(self, key: str | None, request: DrawRequest) -> Record:
        """Returns the release of this name, which is drawn unless it is recorded.

        None stands for the next name of those without a key.
        """
        self._check(key, request)
        with self._ledger.turn():
            record = self._recorded(self._name_of(key), request, is_compared=True)
            self._unnamed += key is None
        return record

    def records(self, key: str | None, request: DrawRequest) -> list[Record]:
        """Returns the draw of this name, then those of examples whose labels came after a draw.

        Together they have these rows. What is not recorded is drawn.
        """
        self._check(key, request)
        rows, found = request.rows, list[Record]()
        with self._ledger.turn():
            first = self._name_of(key)
            left, place_of = rows.size, None
            while left or not found:
                name = f"{first}+{len(found)}" if found else first
                stored = self._ledger.draws.get(name)
                now = None
                if stored is not None and (old := stored.indices).size < left:
                    if place_of is None:
                        # Each draw costs its own size: a thousand weeks have a thousand draws.
                        place_of = np.full(len(self._sealed), -1, dtype=np.int64)
                        place_of[rows] = np.arange(rows.size)  # of rows without a draw
                        arrived = np.sort(self._sealed.arrived[rows])
                    came = np.searchsorted(arrived, stored.number, side="right")
                    # All rows of the draw are left, and the others came later.
                    if came == rows.size - left + old.size and np.all(place_of[old] >= 0):
                        now = np.sort(place_of[old])
                if now is None:
                    is_left = slice(None) if place_of is None else place_of[rows] >= 0
                    now = np.arange(rows.size)[is_left]
                # A retrained model never gives exactly the same priors, so a named draw ignores
                # them.
                found.append(self._recorded(name, request.some(now), is_compared=key is None))
                left -= now.size
                if place_of is not None:
                    place_of[rows[now]] = -1
            self._unnamed += key is None
        return found

    def _name_of(self, key: str | None) -> str:
        return self.next_name() if key is None else key

    def _check(self, key: str | None, request: DrawRequest) -> None:
        mechanism = request.mechanism
        if key is not None and key.startswith(Receipt.UNNAMED):
            raise ValueError(
                f"key must not start with {Receipt.UNNAMED!r}, which names draws without a key, "
                f"got {key!r}. Use another key."
            )
        self._keyed_for(mechanism)
        if not Mechanism.is_of_this_library(mechanism):
            self._check_foreign(request)

    def _recorded(self, name: str, request: DrawRequest, *, is_compared: bool) -> Record:
        """Returns the record of this name, which is drawn if there is none."""
        record = self._ledger.draws.get(name)
        if record is None:
            return self._new_record(name, request)
        same_input = not is_compared or request.has_input_of(record)
        has_shift = "shift" in record.output.names
        if request.kind == "draw" and has_shift != (self._shift is not None):
            same_input = False  # labels for residuals, or the other way round
        elif has_shift and self._shift is not None:
            stored, rows = record.output.arrays["shift"], request.rows
            # Machines round differently.
            low, high = self._kind.label_range or (0.0, 0.0)
            most = _OTHER_SHIFT * (high - low)
            is_near = stored.shape == rows.shape and np.allclose(
                stored, self._shift[rows], rtol=0.0, atol=most
            )
            same_input = same_input and is_near
        request.check_is(record, same_input=same_input)
        return record

    def planned(self, key: str | None, request: DrawRequest) -> PlannedUse:
        """Returns the use to reserve or to charge, or raises if it needs a key that cannot draw it.

        The statement of a plug-in names what was not tested.
        """
        mechanism, rows, public_value = request.mechanism, request.rows, request.public.value
        charge = self._kind.charge(mechanism)
        if (users := self._ledger.account.users) is not None:
            charge = users.at(rows).charge(mechanism, charge, public_value)
        what = f"{type(mechanism).__name__} (epsilon={charge.epsilon:g}, delta={charge.delta:g})"
        notes = list(charge.assumptions)
        if self._keyed_for(mechanism) is not None:
            notes += KEYED_ASSUMPTIONS
        if not Mechanism.is_of_this_library(mechanism):
            _, is_tested = _CHECKED.get(_identity(mechanism, rows.size), ("", True))
            remark = " Its draws are untested: they could not be run, or not often enough."
            notes += mechanism.claims("" if is_tested else remark)
        has_receipts = isinstance(public_value, Priors) and public_value.receipts
        if public_value is not None and not has_receipts:
            notes.append(PUBLIC_INPUT)
        return PlannedUse(key, what, request.kind, charge.with_assumptions(notes), rows)

    def _keyed_for(self, mechanism: Mechanism) -> KeyedDraws | None:
        """Returns the key that draws for a mechanism, or raises if it cannot; None without one.

        A plan asks, too: the first of several releases is not charged for a draw that is refused.
        """
        # Statistics are never keyed.
        if self._keyed is None or not isinstance(mechanism, LabelMechanism):
            return None
        check_keyed(mechanism)
        return self._keyed

    def _check_foreign(self, request: DrawRequest) -> None:
        mechanism, size, public_value = request.mechanism, request.rows.size, request.public.value
        identity = _identity(mechanism, size)
        if identity not in _CHECKED or _CHECKED[identity][0] != _channel_digest(mechanism):
            statistic: dict[str, Any] = {}
            if isinstance(mechanism, AggregateMechanism):
                statistic = {"public_input": public_value, "size": size}
            tested = check_mechanism(mechanism, **statistic)
            _CHECKED[identity] = _channel_digest(mechanism), tested
        # Made-up labels show a wrong public input before a true label is read.
        self._apply(mechanism, self._kind.any_labels(size), public_value, None)

    @_validate.clears_frames
    def _new_record(self, name: str, request: DrawRequest) -> Record:
        mechanism, rows, public_value = request.mechanism, request.rows, request.public.value
        # A mechanism may change its input; one that is streamed has a digest once it was read.
        digest = None if isinstance(public_value, _HasDigest) else request.public.digest
        ledger, planned = self._ledger, self.planned(name, request)
        taken = ledger.take(planned, request.public.receipts)
        rng = None
        if self._seed is not None:
            # Each draw has its own stream, so that stored draws do not shift later ones.
            number = len(ledger.records) - ledger.account.reserved.num_records
            rng = np.random.default_rng([self._seed, number])
        # A mechanism of another library may keep what it read in its attributes.
        described, charged = mechanism.to_json(), planned._replace(what=repr(mechanism))
        output = None
        is_ours = Mechanism.is_of_this_library(mechanism)
        try:
            quietly = without_warnings if is_ours else without_output
            with quietly(), np.errstate(all="ignore"):
                # Another library's mechanism may write into its input, and gets a copy.
                labels = self._sealed.look(rows) if is_ours else self._sealed.open(rows)
                if (keyed := self._keyed_for(mechanism)) is not None:
                    output = keyed.randomize(mechanism, labels, rows, public_value, name)
                else:
                    output = self._apply(mechanism, labels, public_value, rng)
        except BaseException as error:
            # An interrupt from the keyboard has no text that may reveal a label.
            if isinstance(error, KeyboardInterrupt) and not error.args:
                raise
        # An error raised inside `except` would carry the caught error, which may reveal labels.
        if output is None:
            if is_ours:
                # Errors that do not depend on the labels are raised here, without a charge.
                self._apply(mechanism, self._kind.any_labels(rows.size), public_value, rng)
            failed = ledger.account.new_receipt(
                charged._replace(kind="failed"), seeded=rng is not None
            )
            ledger.keep(receipt=taken.receipt(failed))
            raise RuntimeError(
                f"{type(mechanism).__name__} failed on these labels, and would not on others. Its "
                "message is withheld: it may reveal labels. The draw was charged. Test the "
                "mechanism on made-up labels."
            ) from None
        # The record with the charge is written before the output leaves this function. A process
        # that is killed in between has charged a draw that nobody saw, and finds it by its name.
        values = compact(output) if request.kind == "draw" else np.asarray(output)
        of_values = PublicInput.digest_of(values)
        record: Record = taken.charge(
            ledger.account.new_receipt(charged, seeded=rng is not None, output_digest=of_values),
            mechanism=described,
            public_digest=digest or request.public.digest,
            made_of=request.public.receipts,
            arrays={
                **{"values": values, "indices": rows},
                **_arrays_of_priors(public_value),
                **self._arrays_of_shift(request),
            },
        )
        return record

    def _arrays_of_shift(self, request: DrawRequest) -> dict[str, np.ndarray]:
        shift = self._shift if request.kind == "draw" else None
        return {} if shift is None else {"shift": shift[request.rows]}

    def _apply(
        self,
        mechanism: Mechanism,
        labels: np.ndarray,
        public_value: Any,
        rng: np.random.Generator | None,
    ) -> np.ndarray:
        if isinstance(public_value, Priors) and not Mechanism.is_of_this_library(mechanism):
            public_value = np.asarray(public_value)
        if isinstance(mechanism, LabelMechanism):
            return self._kind.randomize(mechanism, labels, public_value, rng)
        statistic = AggregateMechanism.checked(mechanism)
        released = statistic.release(labels, public_value, rng=rng)
        return statistic.checked_output(released, None, "biuf")


def _identity(mechanism: Mechanism, size: int) -> tuple[type, str, int | None]:
    # NumPy shortens the repr of arrays, so their digests stand for them.
    state = {
        name: PublicInput.digest_of(value) if isinstance(value, np.ndarray) else value
        for name, value in vars(mechanism).items()
    }
    of_statistic = size if isinstance(mechanism, AggregateMechanism) else None
    return type(mechanism), repr((mechanism.to_json(with_receipts=False), state)), of_statistic


def _channel_digest(mechanism: Mechanism) -> str:
    if not isinstance(mechanism, ClassificationMechanism) or mechanism.uses_priors:
        return ""
    return PublicInput.digest_of(np.asarray(mechanism.transition_matrix()))


def assignments_of(clusters: Any) -> Any:
    """Returns the cluster of each example, of ``find_clusters`` or an array."""
    return getattr(clusters, "assignments", clusters)


@runtime_checkable
class _HasDigest(Protocol):
    """An input that is streamed: its digest is known once the mechanism has read it."""

    def digest(self) -> str: ...

    def matches(self, digest: str) -> bool: ...


def _arrays_of_priors(public_value: Any) -> dict[str, Any]:
    if not isinstance(public_value, Priors):
        return {}
    groups = None if public_value.groups is None else np.asarray(public_value.groups)
    return {"priors": np.asarray(public_value.probabilities), "groups": groups}
