"""The vault: true labels go in, mechanisms' outputs come out, every use leaves a receipt.

Privacy model: the label holder's process and its store folder are trusted; everything that the
vault returns may be published together with the features. The file ``PRIVATE-fingerprint`` in a
store is a salted digest of the true labels, by which a store of other labels is refused. It is not
differentially private: keep the store with the labels, and publish models and noisy labels instead.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import os
import threading
from collections.abc import Hashable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, NoReturn

import numpy as np

from tf_labeldp import _validate
from tf_labeldp.accounting import (
    BudgetExceededError,
    Charge,
    LabelSet,
    PrivacyBudget,
    PrivacyGuarantee,
    Receipt,
    compose_receipts,
    pure_dp_event,
)
from tf_labeldp.accounting._budget import CountedCharges, compose_counted
from tf_labeldp.accounting._guarantee import warn_of_delta
from tf_labeldp.accounting._receipts import (
    UNITS,
    Histories,
    Receipts,
    actor_name,
    histories_with,
    merge_receipts,
)
from tf_labeldp.mechanisms import (
    AggregateMechanism,
    ClassificationMechanism,
    HistogramMechanism,
    PeerToPeerRandomizedResponse,
    Priors,
    check_mechanism,
    deserialize,
    serialize,
)
from tf_labeldp.mechanisms._base import (
    LabelMechanism,
    Mechanism,
    checked_mechanism,
    checked_output,
    has_own_event,
    is_of_this_library,
)
from tf_labeldp.vault._carried import VAULTS, note_digests, receipts_of
from tf_labeldp.vault._label_kinds import LabelKind, label_kind
from tf_labeldp.vault._noisy_labels import NoisyLabels, NoisyStatistic, Randomizer
from tf_labeldp.vault._store import (
    PUBLIC_INPUT,
    DrawSettingsError,
    LabelStore,
    Record,
    array_digest,
)

_UNNAMED = "unnamed-"
_MOST = 1e3
"""An epsilon beyond which nothing is protected: no budget has more left."""
_CHECKED: dict[tuple[type, str], str] = {}
"""Mechanisms of others that have passed ``check_mechanism`` in this process."""


class Use(NamedTuple):
    """One line of ``PrivateLabels.history()``.

    Attributes:
        time: when, in UTC; empty for uses of version 0.1.
        what: the use, or the change of the budget, in words.
        examples: how many examples it touched.
        epsilon: of this use alone.
        epsilon_so_far: of all uses up to this one, at the delta of the budget.
        actor: who.
        key: the name of the use.

    Example:
        >>> Use("2026-01-01T00:00:00+00:00", "a draw", 10, 0.5, 1.0, "me", "first").examples
        10
    """

    time: str
    what: str
    examples: int
    epsilon: float
    epsilon_so_far: float
    actor: str
    key: str


class History(tuple[Use, ...]):
    """The uses of a vault, in order: prints as a table, and is one for ``pandas.DataFrame``.

    Example:
        >>> print(History([Use("2026-01-01T00:00:00", "a draw", 10, 0.5, 0.5, "me", "first")]))
        when                 examples   epsilon    so far  who  what
        2026-01-01T00:00:00        10       0.5       0.5  me   a draw (first)
    """

    __slots__ = ()

    def __str__(self) -> str:
        """Returns the table."""
        when = max([4, *(len(use.time) for use in self)])
        who = max([3, *(len(use.actor) for use in self)])
        heads = f"{'examples':>8}  {'epsilon':>8}  {'so far':>8}"
        lines = [f"{'when':<{when}}  {heads}  {'who':<{who}}  what"]
        lines += [
            f"{use.time:<{when}}  {use.examples:>8}  {use.epsilon:>8.4g}  "
            f"{use.epsilon_so_far:>8.4g}  {use.actor:<{who}}  {use.what}"
            + (f" ({use.key})" if use.key else "")
            for use in self
        ]
        return "\n".join(lines)


class PrivateLabels:
    """The only holder of the true labels of a training set.

    Something leaves it in one of three forms: ``randomize`` gives noisy labels, ``release`` a noisy
    statistic, and training takes noisy steps, for which it is charged. Each leaves a receipt here,
    in the store, and in whatever is made of it.

    Guarantee:
        At any time everything that has left the vault is ``guarantee()``-label-DP together, for the
        replacement of one label (of one row, with ``num_labels``). Uses of disjoint examples
        compose in parallel, uses of the same example in sequence (``ghazi2021``, Observation 4;
        ``accounting.compose_receipts``). A use that would take an example past the budget raises
        before anything is drawn.

    Nothing shows a label: not ``repr``, not an error message, not the store; pickling and copying
    are refused. Processes that share a vault share it through its store; without a store, a process
    that was forked from the vault's is refused.

    Args:
        labels: the true labels, shape (n,): integers 0..K-1, any hashable values with ``classes``,
            or numbers with ``low`` and ``high`` (regression); or rows (n, L) of zeros and ones with
            ``num_labels``. NumPy array, list, tensor or column of a data frame; they are copied.
        num_classes: K, at least 2; may be left out where ``classes`` is given.
        budget: the most that may be spent on one label. A store keeps it: when it is opened again
            the budget may be left out, and can't be another one (``raise_budget``).
        classes: the class values, in the order of their codes 0..K-1. Must be public knowledge:
            classes are never taken from the labels, since a rare class would show its holder.
        low: the smallest label of a regression task. Public knowledge, like ``high``: a range
            taken from the labels would show whoever has the largest one.
        high: the largest label of a regression task.
        clip: for regression, whether labels outside the range are set to its nearer end; without,
            they are refused.
        num_labels: L, for several binary labels an example; the unit of privacy is the whole row.
        people: the name of the population that the labels are of. What is made of several vaults
            adds up, since they may hold labels of the same people; vaults with different names are
            declared to hold those of different people.
        store: folder in which every use is kept. Opening it again with the same labels returns
            the same draws and remembers what they cost. Without one, a second run draws, and
            spends, again.
        actor: who runs this, for the receipts, which go into what is published; None for the
            environment variable ``LABELDP_ACTOR``, or the name of the login.
        insecure_seed: makes the draws repeatable; the statement then says "not private: seeded".

    Raises:
        TypeError: the labels are not integers and neither classes nor a range are given.
        ValueError: labels outside the classes or the range, wrong shape, no budget, or
            contradictory arguments.
        LabelStoreError: the store is of other labels, of other settings or another budget, damaged
            or not a store.

    Example:
        >>> from tf_labeldp.accounting import PrivacyBudget
        >>> from tf_labeldp.mechanisms import LaplaceMechanism, RandomizedResponse
        >>> labels = PrivateLabels([0, 2, 1, 1], num_classes=3, budget=PrivacyBudget(epsilon=1.0))
        >>> noisy = labels.randomize(RandomizedResponse(epsilon=1.0, num_classes=3))
        >>> noisy.values.shape, labels.guarantee().epsilon, labels.remaining()
        ((4,), 1.0, 0.0)
        >>> weeks = PrivateLabels([52, 40, 13], low=0, high=52, budget=PrivacyBudget(epsilon=1.0))
        >>> weeks.randomize(LaplaceMechanism(epsilon=1.0, low=0.0, high=52.0)).values.dtype
        dtype('float64')
    """

    __slots__ = (
        "__weakref__",
        "_actor",
        "_budget",
        "_histories",
        "_kind",
        "_label_set",
        "_lock",
        "_others",
        "_process",
        "_records",
        "_sealed",
        "_seed",
        "_store",
        "_stored",
        "_unnamed_draws",
    )

    def __init__(
        self,
        labels: Any,
        num_classes: int | None = None,
        *,
        budget: PrivacyBudget | None = None,
        classes: Sequence[Hashable] | None = None,
        low: float | None = None,
        high: float | None = None,
        clip: bool = False,
        num_labels: int | None = None,
        people: str | None = None,
        store: str | os.PathLike[str] | None = None,
        actor: str | None = None,
        insecure_seed: int | None = None,
    ) -> None:
        if not isinstance(budget, PrivacyBudget) and (budget is not None or store is None):
            raise TypeError(
                f"budget must be a PrivacyBudget, got {type(budget).__name__}. Write "
                "budget=PrivacyBudget(epsilon=1.0)."
            )
        for name, text in (("people", people), ("actor", actor)):
            if text is not None and (not isinstance(text, str) or not text):
                raise TypeError(f"{name} must be a name, a str, got {text!r}.")
        self._kind: LabelKind = label_kind(num_classes, classes, low, high, clip, num_labels)
        self._seed = (
            None
            if insecure_seed is None
            else _validate.integer_at_least("insecure_seed", insecure_seed, 0)
        )
        self._actor = actor or actor_name()
        self._lock = threading.RLock()
        self._process = os.getpid()
        self._sealed = _Sealed(self._kind.encode(labels))
        self._histories = Histories(len(self._sealed))
        self._others: list[Receipt] = []
        self._records: list[Record] = []
        self._stored: dict[str, Record] = {}
        self._unnamed_draws = 0
        self._store = None if store is None else LabelStore(store)
        self._budget: PrivacyBudget
        if self._store is None and budget is not None:
            self._label_set, self._budget = LabelSet.new(len(self), people), budget
        elif self._store is not None:
            if budget is None and not self._store.exists():
                raise ValueError(
                    f"budget is missing, and there is no store in {self._store.path} that keeps "
                    "one. Write budget=PrivacyBudget(epsilon=1.0), or check the path."
                )
            with self._store.locked():
                self._label_set, self._budget = self._store.open(
                    self._sealed.open(), self._kind.header(), people, budget
                )
                self._read_new_records()
                self._check_kept_budget(budget)
                self._store.keep()
                known = {one.id: one for one in self.receipts}
                for digests, receipts in self._store.weights(known):
                    note_digests(digests, receipts)
            VAULTS[self._label_set.name] = self

    @property
    def num_classes(self) -> int:
        """Number of classes K; raises a ``ValueError`` for numbers and rows of labels."""
        return self._kind.num_classes

    @property
    def classes(self) -> tuple[Hashable, ...]:
        """The class values in the order of their codes; raises for numbers and rows of labels."""
        return self._kind.classes

    @property
    def label_range(self) -> tuple[float, float] | None:
        """The smallest and the largest label of a regression task; None for other labels."""
        return self._kind.label_range

    @property
    def num_labels(self) -> int | None:
        """The number of labels in a row; None for single labels."""
        return self._kind.num_labels

    @property
    def unit(self) -> str:
        """What is protected: ``"label"``, or ``"row"`` for rows of labels."""
        return self._kind.unit

    @property
    def budget(self) -> PrivacyBudget:
        """The most that may be spent on one label."""
        with self._in_turn():
            return self._budget

    @property
    def label_set(self) -> LabelSet:
        """What receipts call these labels."""
        return self._label_set

    @property
    def receipts(self) -> Receipts:
        """The receipts of all that has left the vault, and of what has come with models to it."""
        with self._in_turn():
            return tuple(one.receipt for one in self._records if one.receipt is not None)

    @property
    def store_path(self) -> os.PathLike[str] | None:
        """The folder of the store, or None."""
        return None if self._store is None else self._store.path

    def __len__(self) -> int:
        """Returns the number of labels n."""
        return len(self._sealed)

    def randomize(
        self,
        mechanism: LabelMechanism | Randomizer,
        indices: Any = None,
        priors: Any = None,
        *,
        clusters: Any = None,
        features: Any = None,
        key: str | None = None,
    ) -> NoisyLabels:
        """Draws noisy labels, charges them, and stores them before handing them out.

        Args:
            mechanism: whatever gives noisy labels of this vault's kind: a mechanism for its classes
                or its range, ``ALIBI``, ``LabelRandomizer``, ``ClusterRandomizedResponse``,
                ``PeerToPeerRandomizedResponse``, ``heads.HeadPriorRandomizer``. Rows of labels take
                ``RandomizedResponse(epsilon, num_classes=2)`` for each label, charged L times.
            indices: the examples to draw for: integers (m,), each at most once, or a boolean mask
                (n,). None draws for all.
            priors: probabilities (K,) or (m, K), in the order of ``indices``, or
                ``mechanisms.Priors``, for mechanisms that take them.
            clusters: the cluster of each example, integers (m,) or ``features.Clusters``, for
                mechanisms that take them.
            features: public features, for mechanisms that take them.
            key: a name for this draw. Asking again for a name returns the stored draw and charges
                nothing, whatever the priors are now. Without a name the draws of a run are
                numbered, and a store answers them in that order.

        Returns:
            ``NoisyLabels``: values, indices, targets, statement; ``numpy.asarray`` gives the
            values.

        Warns:
            UserWarning: the budget's delta is not below 1/n; of ``release`` and ``charge`` too.

        Raises:
            BudgetExceededError: the draw would take an example past the budget; nothing was drawn.
            LabelStoreError: the stored draw of this name was made with other settings.
            RuntimeError: this process was forked, and the vault has no store; or a mechanism of
                another library failed on the labels, and was charged.
            TypeError: ``mechanism`` is not a mechanism for labels of this kind.
            ValueError: other number of classes or range, bad indices, public input or key, or a
                mechanism of another library that does not keep to what it says; nothing was
                charged.
        """
        public = {"priors": priors, "clusters": clusters, "features": features}
        given = {name: value for name, value in public.items() if value is not None}
        if isinstance(mechanism, Randomizer):
            if indices is not None:
                raise ValueError(
                    f"{type(mechanism).__name__} draws for all examples; leave indices=None."
                )
            return mechanism.draw_from(self, key, **given)
        self._kind.check(checked_mechanism(mechanism, LabelMechanism))
        wanted = mechanism.public_input
        for name in given:
            if name != wanted:
                raise ValueError(
                    f"{type(mechanism).__name__} takes no {name}; leave them out. RRWithPrior "
                    "takes priors, ClusterRandomizedResponse clusters, HeadPriorRandomizer "
                    "features."
                )
        value = given.get(wanted) if wanted else None
        made_of = receipts_of([mechanism, value])
        if wanted == "priors" and value is not None:
            value = Priors.of(value)
        if wanted == "clusters" and value is not None:
            value = np.asarray(getattr(value, "assignments", value))
        record = self._record(mechanism, indices, value, key, made_of)
        if record.priors is None and isinstance(value, Priors):
            if value.digest() == record.public_digest:  # of version 0.1, which kept the digest
                record = dataclasses.replace(
                    record, priors=value.probabilities, groups=value.groups, made_of=made_of
                )
        return self._noisy_labels(record, mechanism)

    def release(
        self,
        mechanism: AggregateMechanism,
        indices: Any = None,
        public_input: Any = None,
        *,
        key: str | None = None,
    ) -> NoisyStatistic:
        """Releases one noisy statistic of the labels; charges and stores it like a draw.

        Args:
            mechanism: for example ``mechanisms.HistogramMechanism``.
            indices: the examples it is made of, as for ``randomize``; each is charged.
            public_input: what else the statistic is made of, in the order of ``indices``: group
                numbers (m,) or ``features.Clusters``, features (m, d), as the mechanism says. An
                object with ``digest()`` and ``matches(digest)`` is passed on as it is, and is known
                by these. A stored release is given again only for the public input that it was
                made with.
            key: a name for this release, as for ``randomize``.

        Returns:
            ``NoisyStatistic``; ``numpy.asarray`` gives its values.

        Raises:
            BudgetExceededError: an example would pass the budget; nothing was released.
            LabelStoreError: the stored release of this name was made with other settings.
            RuntimeError: as for ``randomize``.
            TypeError: ``mechanism`` is not a mechanism of many labels.
            ValueError: a mechanism for other labels, bad indices, public input or key; nothing was
                charged.

        Example:
            >>> from tf_labeldp.accounting import PrivacyBudget
            >>> from tf_labeldp.mechanisms import HistogramMechanism
            >>> labels = PrivateLabels([0, 2, 1], num_classes=3, budget=PrivacyBudget(epsilon=1.0))
            >>> labels.release(HistogramMechanism(epsilon=0.5, num_classes=3)).values.shape
            (3,)
            >>> labels.guarantee().epsilon
            0.5
        """
        self._kind.check_release(checked_mechanism(mechanism, AggregateMechanism))
        # Heads, which have a digest of their rows, have adopted what these were made of.
        given = None if hasattr(public_input, "matches") else public_input
        made_of = receipts_of([mechanism, given])
        public_input = getattr(public_input, "assignments", public_input)
        record = self._record(mechanism, indices, public_input, key, made_of)
        groups = None
        if isinstance(mechanism, HistogramMechanism) and public_input is not None:
            groups = np.asarray(public_input)
        return NoisyStatistic(_values(record).copy(), mechanism, groups, _carried_by(record))

    def charge(
        self,
        charge: Charge,
        *,
        what: str,
        key: str = "",
        indices: Any = None,
        unit: str | None = None,
        num_units: int | None = None,
        seeded: bool = False,
        metrics_reported: bool = False,
        sample_weights: bool = False,
    ) -> Receipt:
        """Charges a use of the labels whose result does not pass through the vault: noisy steps.

        Call it before the use, once for each. ``LabelDPModel.fit`` does so before every epoch.

        Args:
            charge: what the use costs: ``accounting.dp_sgd_charge(...)``, or an
                ``accounting.Charge`` of your own.
            what: the use in words, for the history.
            key: a name for the history.
            indices: the examples, as for ``randomize``.
            unit: what is protected, ``"label"``, ``"row"`` or ``"user"``; None for what the labels
                are.
            num_units: how many of these there are, for users.
            seeded: whether the noise can be repeated.
            metrics_reported: whether loss or metrics on true labels are shown.
            sample_weights: whether examples are weighted.

        Returns:
            The receipt, which belongs to whatever is made of this use.

        Raises:
            BudgetExceededError: an example would pass the budget; nothing was charged.
            RuntimeError: this process was forked, and the vault has no store.
            TypeError: ``charge`` is not a charge.

        Example:
            >>> from tf_labeldp.accounting import PrivacyBudget, dp_sgd_charge
            >>> labels = PrivateLabels([0, 1] * 99, 2, budget=PrivacyBudget(2.0, delta=1e-3))
            >>> steps = dp_sgd_charge(10.0, sampling_probability=0.1, steps=5, delta=1e-3)
            >>> receipt = labels.charge(steps, what="5 steps of my own")
            >>> labels.guarantee().epsilon == receipt.charge.epsilon
            True
        """
        if not isinstance(charge, Charge):
            raise TypeError(
                f"charge must be an accounting.Charge, got {type(charge).__name__}. "
                "accounting.dp_sgd_charge makes one for steps of DP-SGD."
            )
        if unit is not None:
            _validate.one_of("unit", unit, UNITS)
        rows = self._checked_indices(indices)
        with self._in_turn():
            self._check_budget(rows, [(what, charge)])
            receipt = self._receipt(
                charge,
                what,
                "steps",
                key,
                rows,
                None,
                unit=unit or self._kind.unit,
                num_units=num_units,
                seeded=seeded,
                metrics_reported=metrics_reported,
                sample_weights=sample_weights,
            )
            self._keep(Record(len(self._records), receipt, indices=rows))
        return receipt

    def adopt(self, receipts: Iterable[Receipt]) -> None:
        """Counts receipts that came along with a model or priors, if they may be of these labels.

        A history that was loaded with a model, and a vault without a store, are taken for the same
        labels, unless ``people`` declares that they are of different people. Two stores are known
        to be different labels. ``LabelDPModel.fit``, ``MultiStageTraining`` and heads call it.

        Args:
            receipts: as a model carries them; those that are known here already count once.

        Raises:
            BudgetExceededError: together with what was spent here they pass the budget; nothing was
                counted.
        """
        with self._in_turn():
            new = self._not_adopted(receipts)
            if new:
                self._check_budget(np.arange(len(self)), [], new)
            for one in new:
                self._keep(Record(len(self._records), one))

    def keep_weights(self, digests: Sequence[bytes], receipts: Receipts) -> None:
        """Writes down in the store which weights were made of these receipts.

        Args:
            digests: of the values of variables.
            receipts: what the values were made of.
        """
        if self._store is not None:
            with self._in_turn():
                self._store.keep_weights(digests, receipts, {one.id for one in self.receipts})

    def check_budget(
        self,
        mechanism: Mechanism | Randomizer | Charge | Sequence[Mechanism | Randomizer | Charge],
        indices: Any = None,
        receipts: Iterable[Receipt] = (),
    ) -> None:
        """Raises if a use, or several one after another, would pass the budget; draws nothing.

        Args:
            mechanism: one, or several, for ``randomize``, ``release`` or ``charge``.
            indices: as for ``randomize``.
            receipts: those that come along with what is given for the use.

        Raises:
            BudgetExceededError: as ``randomize`` would.
        """
        charges = self._planned(mechanism)
        rows = self._checked_indices(indices)
        with self._in_turn():
            self._check_budget(rows, charges, self._not_adopted(receipts))

    def has_draw(self, key: str | None) -> bool:
        """Returns whether a draw of this name has been made (and so costs nothing to ask for).

        Args:
            key: the name; None for the next draw without a name, which a store may hold.
        """
        with self._in_turn():
            return (f"{_UNNAMED}{self._unnamed_draws}" if key is None else key) in self._stored

    def mechanism(self, key: str) -> Mechanism:
        """Returns the mechanism of a draw that has been made; a ``KeyError`` if there is none."""
        if not self.has_draw(key):
            raise KeyError(f"there is no draw {key!r}; there are {sorted(self._stored)}.")
        return deserialize(self._stored[key].mechanism or {})

    def decode(self, codes: Any) -> np.ndarray:
        """Returns the class values of class codes (m,), or of ``NoisyLabels``."""
        return self._kind.decode(codes)

    def guarantee(self, *, after: Any = (), delta: float | None = None) -> PrivacyGuarantee:
        """Returns what has been spent so far on the most charged example.

        It covers all that has left the vault, whether or not it was kept. The statement of one
        model or of some noisy labels is theirs: ``model.guarantee()``, ``noisy.guarantee()``.

        Args:
            after: also count one use of this mechanism, or of each of these, on all examples;
                nothing is charged.
            delta: of the statement; None for the budget's.
        """
        planned = [
            Receipt(self._label_set, charge, what, unit=self._kind.unit)
            for what, charge in self._planned(after)
        ]
        stated = compose_receipts(
            [*self.receipts, *planned], self._budget.delta if delta is None else delta
        )
        if stated.num_units is None:  # nothing has left the vault
            stated = dataclasses.replace(stated, num_units=len(self) or None)
        return stated

    def history(self) -> History:
        """Returns the uses so far, one after another: when, what, how many examples, what it cost.

        Uses that follow each other and are alike, such as the epochs of a training, are one line.

        Example:
            >>> from tf_labeldp import PrivacyBudget, RandomizedResponse
            >>> labels = PrivateLabels([0, 1, 1], num_classes=2, budget=PrivacyBudget(2.0))
            >>> noisy = labels.randomize(RandomizedResponse(0.5, 2), key="first")
            >>> labels.history()[0].what, labels.history()[0].epsilon_so_far
            ('RandomizedResponse(epsilon=0.5, num_classes=2)', 0.5)
        """
        with self._in_turn():
            records = list(self._records)
        groups: list[list[Record]] = []
        for record in records:
            if groups and _is_like(groups[-1][-1], record):
                groups[-1].append(record)
            else:
                groups.append([record])
        uses: list[Use] = []
        so_far: list[Receipt] = []
        for group in groups:
            receipts = [one.receipt for one in group if one.receipt is not None]
            so_far += receipts
            spent = compose_receipts(so_far, self._budget.delta).epsilon
            first = group[0]
            if first.receipt is None:
                what = f"budget raised to {first.budget}: {first.reason}"
                uses.append(Use(first.time, what, 0, 0.0, spent, first.actor, ""))
                continue
            alone = compose_receipts(receipts, self._budget.delta).epsilon
            times = f", {len(group)} times" if len(group) > 1 else ""
            one = first.receipt
            what = {"failed": f"{one.what}, which failed"}.get(one.kind, one.what) + times
            if one.labels != self._label_set:
                what += ", which came along"
            key = one.key if not one.key.startswith(_UNNAMED) and not times else ""
            uses.append(Use(one.time, what, one.num_examples, alone, spent, one.actor, key))
        return History(uses)

    def remaining(self) -> float:
        """Returns what is left: the largest epsilon of one more pure use of all labels.

        Example:
            >>> from tf_labeldp import PrivacyBudget, RandomizedResponse
            >>> labels = PrivateLabels([0, 1, 1], num_classes=2, budget=PrivacyBudget(2.0))
            >>> noisy = labels.randomize(RandomizedResponse(0.5, 2))
            >>> labels.remaining()
            1.5
        """
        with self._in_turn():
            histories = histories_with(self._histories.distinct(), self._others)

        def fits(epsilon: float) -> bool:
            one = Charge(epsilon, 0.0, pure_dp_event(epsilon))
            return all(self._budget.allows(self._composed(history, [one])) for history in histories)

        spent = max((self._composed(one, []).epsilon for one in histories), default=0.0)
        low = max(0.0, self._budget.epsilon - spent)  # basic composition
        if self._budget.delta == 0.0 or not histories:
            return low if low > 1e-9 * self._budget.epsilon else 0.0
        low = low if low and fits(low) else 0.0
        high = max(2.0 * low, self._budget.epsilon)
        while high - low > 1e-4 * high and high > 1e-6:
            middle = 0.5 * (low + high)
            low, high = (middle, high) if fits(middle) else (low, middle)
        return low

    def raise_budget(self, budget: PrivacyBudget, *, reason: str) -> None:
        """Raises the budget; the store keeps it, and the history shows it with its reason.

        Args:
            budget: the new one, at least the old one in epsilon and delta.
            reason: why, in a sentence, for whoever reads the history.

        Raises:
            TypeError: not a budget, or no reason.
            ValueError: a smaller budget.

        Example:
            >>> from tf_labeldp import PrivacyBudget
            >>> labels = PrivateLabels([0, 1], num_classes=2, budget=PrivacyBudget(1.0))
            >>> labels.raise_budget(PrivacyBudget(2.0), reason="a second study was approved")
            >>> print(labels.history()[0].what)
            budget raised to epsilon=2, delta=0: a second study was approved
        """
        if not isinstance(budget, PrivacyBudget):
            raise TypeError(f"budget must be a PrivacyBudget, got {type(budget).__name__}.")
        if not isinstance(reason, str) or not reason.strip():
            raise TypeError("reason must say why the budget is raised, in a sentence.")
        with self._in_turn():
            old = self._budget
            if budget.epsilon < old.epsilon or budget.delta < old.delta or budget == old:
                raise ValueError(
                    f"the budget can only be raised: it is {old}, got {budget}. To spend less, "
                    "stop earlier; `remaining()` says what is left."
                )
            time = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
            number = len(self._records)
            made = Record(
                number, budget=budget, reason=reason.strip(), time=time, actor=self._actor
            )
            self._keep(made)

    def _record(
        self,
        mechanism: Mechanism,
        indices: Any,
        public_input: Any,
        key: str | None,
        made_of: Receipts = (),
    ) -> Record:
        """Returns the record of a draw or a release, a new one or the stored one of this name."""
        rows = self._checked_indices(indices)
        digest = _public_digest(public_input)
        if key is not None and str(key).startswith(_UNNAMED):
            raise ValueError(
                f"key must not start with {_UNNAMED!r}, which names draws without a key, got "
                f"{key!r}."
            )
        if not is_of_this_library(mechanism):
            self._admit(mechanism, rows, public_input)
        with self._in_turn():
            name = f"{_UNNAMED}{self._unnamed_draws}" if key is None else str(key)
            if name in self._stored:
                record = self._stored[name]
                strictly = key is None or isinstance(mechanism, AggregateMechanism)
                same = not strictly or _same_input(record.public_digest, public_input, digest)
                self._check_same(record, mechanism, rows, same)
            else:
                record = self._new_record(name, mechanism, rows, public_input, digest, made_of)
            if key is None:
                self._unnamed_draws += 1
        return record

    def _admit(self, mechanism: Mechanism, rows: np.ndarray, public_input: Any) -> None:
        """Holds a mechanism of another library against what it says, on made-up labels."""
        state = {  # NumPy shortens what it shows of arrays
            name: array_digest(value) if isinstance(value, np.ndarray) else value
            for name, value in vars(mechanism).items()
        }
        this = type(mechanism), repr((serialize(mechanism), state))
        if this not in _CHECKED or _CHECKED[this] != _channel_digest(mechanism):
            statistic = isinstance(mechanism, AggregateMechanism)
            check_mechanism(mechanism, public_input=public_input if statistic else None)
            _CHECKED[this] = _channel_digest(mechanism)
        # What is wrong with the public input shows before a true label is looked at.
        self._apply(mechanism, self._kind.any_labels(rows.size), public_input, None)

    def _new_record(
        self,
        name: str,
        mechanism: Mechanism,
        rows: np.ndarray,
        public_input: Any,
        digest: str | None,
        made_of: Receipts,
    ) -> Record:
        charge = self._charge_of(mechanism, public_input)
        came_along = self._not_adopted(made_of)
        if came_along:
            self._check_budget(np.arange(len(self)), [], came_along)
        self._check_budget(rows, [(_in_words(mechanism, charge), charge)], came_along)
        number = len(self._records)
        rng = None
        if self._seed is not None:
            # One stream a draw: a run that reads stored draws does not shift the later ones.
            rng = np.random.default_rng([self._seed, number])
        kind = "draw" if isinstance(mechanism, LabelMechanism) else "release"
        made = (charge, repr(mechanism))
        result = None
        try:
            result = self._apply(mechanism, self._sealed.open(rows), public_input, rng)
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt) and not error.args:
                raise
        if result is None:  # not within `except`: what was raised would hang on to what is
            self._fail(mechanism, rows, public_input, made, rng, name)
        for one in came_along:
            self._keep(Record(len(self._records), one))
        number = len(self._records)
        values = _compact(result) if kind == "draw" else np.asarray(result)
        receipt = self._receipt(
            *made, kind, name, rows, array_digest(values), seeded=rng is not None
        )
        given = public_input if isinstance(public_input, Priors) else None
        record = Record(
            number,
            receipt,
            mechanism=serialize(mechanism),
            public_digest=digest,
            made_of=made_of,
            indices=rows,
            values=values,
            priors=None if given is None else np.asarray(given.probabilities),
            groups=None if given is None or given.groups is None else np.asarray(given.groups),
        )
        self._keep(record)
        return record

    def _not_adopted(self, receipts: Iterable[Receipt]) -> list[Receipt]:
        """Returns the receipts that may be of these labels, and that are not counted here yet."""
        known = {one.id for record in self._records if (one := record.receipt) is not None}
        return [
            one
            for one in merge_receipts(receipts)
            if one.id not in known
            and one.kind != "unknown"
            and type(one.charge.event).__name__ != "NoOpDpEvent"
            and self._label_set.may_be(one.labels)
        ]

    def _charge_of(self, mechanism: Mechanism, public_input: Any = None) -> Charge:
        """Returns what a use costs, with what it rests on beyond the mechanism."""
        charge = self._kind.charge(mechanism)
        notes = list(charge.assumptions)
        if not is_of_this_library(mechanism):
            notes.append(
                f"its author's claim, not this library's: {type(mechanism).__name__} has the "
                f"epsilon of {mechanism.epsilon:g} that it states"
                + (
                    ", and its uses compose as its dp_event says"
                    if has_own_event(mechanism)
                    else ""
                )
            )
        known = isinstance(public_input, Priors) and public_input.receipts
        if public_input is not None and not known:
            notes.append(PUBLIC_INPUT)
        return dataclasses.replace(charge, assumptions=tuple(notes))

    def _apply(
        self,
        mechanism: Mechanism,
        labels: np.ndarray,
        public_input: Any,
        rng: np.random.Generator | None,
    ) -> np.ndarray:
        """Returns what a mechanism makes of labels; noisy labels are checked."""
        if isinstance(public_input, Priors) and not is_of_this_library(mechanism):
            public_input = np.asarray(public_input)
        if isinstance(mechanism, LabelMechanism):
            return self._kind.randomize(mechanism, labels, public_input, rng)
        made = checked_mechanism(mechanism, AggregateMechanism).release(
            labels, public_input, rng=rng
        )
        return checked_output(mechanism, made, None, "biuf")

    def _fail(
        self,
        mechanism: Mechanism,
        rows: np.ndarray,
        public_input: Any,
        made: tuple[Charge, str],
        rng: np.random.Generator | None,
        key: str,
    ) -> NoReturn:
        """Raises what a mechanism would for any labels, or else says nothing of what it raised.

        An error that depends on the labels is an output too: it is charged, and its text, which the
        mechanism's epsilon does not cover, is kept back. Mechanisms of this library check their
        arguments before they look; of others that is not known.
        """
        if is_of_this_library(mechanism):
            self._apply(mechanism, self._kind.any_labels(rows.size), public_input, rng)
        receipt = self._receipt(*made, "failed", key, rows, None, seeded=rng is not None)
        self._keep(Record(len(self._records), receipt, indices=rows))
        raise RuntimeError(
            f"{type(mechanism).__name__} failed on these labels, and would not on others; what it "
            "said is kept back, since it may tell something of them. The draw was charged. Check "
            "the mechanism on labels of your own making: it must take every label of the vault."
        ) from None

    def _receipt(
        self,
        charge: Charge,
        what: str,
        kind: str,
        key: str,
        rows: np.ndarray,
        digest: str | None,
        **flags: Any,
    ) -> Receipt:
        if flags.get("unit") != "user":  # who counts users has fewer units than labels
            warn_of_delta(self._budget.delta, max(1, len(self)))
        return Receipt(
            self._label_set,
            charge,
            what,
            kind,
            key,
            None if rows.size == len(self) and len(self) else np.sort(rows),
            self._budget.delta,
            digest,
            actor=self._actor,
            **{"unit": self._kind.unit, **flags},
        )

    def _keep(self, record: Record) -> None:
        """Writes a record to the store, and then remembers it."""
        if self._store is None:
            self._remember(record)
        else:  # and is read back: what is interrupted here is read by the next call
            self._store.append(record)
            self._read_new_records()

    def _remember(self, record: Record) -> None:
        # The charge first: a draw that is interrupted here is paid for and not handed out.
        receipt = record.receipt
        if receipt is not None:
            if receipt.labels.name == self._label_set.name:
                self._histories.add(receipt.charge, receipt.examples)
            else:
                self._others.append(receipt)
        if record.budget is not None:
            self._budget = record.budget
        self._records.append(record)
        if record.key is not None:
            self._stored[record.key] = record

    def _read_new_records(self) -> None:
        if self._store is not None:
            for record in self._store.new_records(self._label_set, self._budget):
                self._remember(record)

    @contextlib.contextmanager
    def _in_turn(self) -> Iterator[None]:
        """Lets one thread and one process at a time look at the records and add to them."""
        if self._store is None:
            if os.getpid() != self._process:
                raise RuntimeError(
                    "this process was forked from the one that made the PrivateLabels: both would "
                    "draw from the same labels, and neither would know of the other. Give the "
                    "vault a store, PrivateLabels(..., store=path), which they then share."
                )
            with self._lock:
                yield
            return
        if os.getpid() != self._process:  # locks of a parent's threads are none of ours
            self._lock, self._process = threading.RLock(), os.getpid()
        with self._lock, self._store.locked():
            self._read_new_records()
            yield

    def _check_kept_budget(self, given: PrivacyBudget | None) -> None:
        if given is not None and given != self._budget:
            raise DrawSettingsError(
                f"the store keeps the budget {self._budget}, and {given} was given. Leave budget "
                "out to open it, and raise it with labels.raise_budget(budget, reason=...) if need "
                "be."
            )
        for history in histories_with(self._histories.distinct(), self._others):
            spent = self._composed(history, [])
            if not self._budget.allows(spent):
                raise BudgetExceededError(
                    f"the store has spent epsilon={spent.epsilon:g} at delta={spent.delta:g} on "
                    f"some labels, over the budget {self._budget} given now. Open it with a larger "
                    "budget."
                )

    def _planned(self, several: Any) -> list[tuple[str, Charge]]:
        """Returns mechanisms that are planned, in words, with their charges."""
        planned = []
        for one in several if isinstance(several, Sequence) else [several]:
            if isinstance(one, Charge):
                planned.append(("the use", one))
            elif isinstance(one, Randomizer):
                planned += self._planned(one.parts(self))
            else:
                charge = self._charge_of(checked_mechanism(one, Mechanism))
                planned.append((_in_words(one, charge), charge))
        return planned

    def _check_budget(
        self,
        rows: np.ndarray,
        planned: Sequence[tuple[str, Charge]],
        came_along: Sequence[Receipt] = (),
    ) -> None:
        """Raises if the budget does not allow what is planned, and what comes along with it."""
        charges = [charge for _, charge in planned]
        own = self._histories.distinct(rows)
        for history in histories_with(own, [*self._others, *came_along]):
            after = self._composed(history, charges)
            if self._budget.allows(after):
                continue
            before = histories_with(own, self._others)
            spent = max((self._composed(one, []) for one in before), key=lambda one: one.epsilon)
            several = [f"{one.what}, which came along," for one in came_along]
            what = " and ".join(dict.fromkeys([*several, *(words for words, _ in planned)]))
            charges += [one.charge for one in came_along]
            needs = max((charge.delta for charge in charges), default=0.0)
            if needs > 0.0 and self._budget.delta == 0.0:
                raise BudgetExceededError(
                    f"{what} needs a delta above zero (its own is {needs:g}), and the vault's "
                    f"budget has none. Nothing was drawn. Make the vault with PrivacyBudget("
                    f"{self._budget.epsilon:g}, delta=...), below 1/n = {1 / max(1, len(self)):.2g}"
                    " and at least that; or use Laplace noise, which needs none."
                )
            raise BudgetExceededError(
                f"{what} would be charged to examples that have spent epsilon="
                f"{spent.epsilon:g}: together epsilon={after.epsilon:g} at delta="
                f"{after.delta:g}, over the budget {self._budget}. Nothing was drawn. "
                + (_advice(planned) if planned else _CAME_ALONG)
            )

    def _composed(self, history: CountedCharges, more: Sequence[Charge]) -> PrivacyGuarantee:
        counts = dict(history)
        for charge in more:
            counts[charge] = counts.get(charge, 0) + 1
        return compose_counted(tuple(counts.items()), self._budget.delta)

    def _noisy_labels(self, record: Record, mechanism: LabelMechanism) -> NoisyLabels:
        values, indices = _restored(_values(record)), record.indices
        if isinstance(mechanism, PeerToPeerRandomizedResponse):  # others report nothing
            values, indices = values[values >= 0], indices[values >= 0]  # type: ignore[index]
        priors = None
        if record.priors is not None:
            priors = Priors(record.priors, record.groups, receipts=record.made_of)
        return NoisyLabels(
            values,
            indices,  # type: ignore[arg-type]
            mechanism,
            priors,
            _carried_by(record),
            classes=self._kind.names,
        )

    def _check_same(
        self, record: Record, mechanism: Mechanism, rows: np.ndarray, same_input: bool
    ) -> None:
        stored = deserialize(record.mechanism or {})
        indices = record.indices if record.indices is not None else np.empty(0)
        differing = [
            name
            for name, same in (
                # Read back first: a stored draw may lack arguments that were added since.
                ("mechanism", serialize(stored) == serialize(mechanism)),
                ("indices", np.array_equal(indices, rows)),
                ("priors or public input", same_input),
            )
            if not same
        ]
        if differing:
            raise DrawSettingsError(
                f"draw {record.key!r} exists and was made with other {' and '.join(differing)} "
                f"(stored: {stored!r}, {indices.size} examples; asked: {mechanism!r}, {rows.size} "
                "examples). Ask with the settings of the stored draw, or give the new draw a key "
                "of its own."
            )

    def _checked_indices(self, indices: Any) -> np.ndarray:
        n = len(self)
        if indices is None:
            return np.arange(n)
        rows = np.asarray(indices)
        if rows.dtype == bool and rows.shape == (n,):
            return np.flatnonzero(rows)
        if rows.ndim != 1 or (rows.size and not np.issubdtype(rows.dtype, np.integer)):
            raise ValueError(
                f"indices must be integers of shape (m,) or a boolean mask of shape ({n},), got "
                f"dtype {rows.dtype} and shape {rows.shape}."
            )
        rows = rows.astype(np.int64)
        if rows.size and (rows.min() < 0 or rows.max() >= n):
            raise ValueError(
                f"indices must lie in 0..{n - 1}, got values from {rows.min()} to {rows.max()}."
            )
        if np.unique(rows).size != rows.size:
            raise ValueError(
                "indices name an example more than once. A label is drawn once a draw; call "
                "randomize again for a second draw, which is charged again."
            )
        return rows

    def __repr__(self) -> str:
        """Returns sizes and budget, never a label."""
        return (
            f"PrivateLabels(n={len(self)}, {self._kind}, "
            f"budget={self._budget!r}, draws={len(self._stored)})"
        )

    def _refuse(self, *unused: Any, **also_unused: Any) -> NoReturn:
        raise TypeError(
            "PrivateLabels does not give out true labels: it cannot be pickled, copied, indexed, "
            "iterated or turned into an array. Call randomize(mechanism) for noisy labels."
        )

    __reduce_ex__ = __getitem__ = __iter__ = __array__ = _refuse  # type: ignore[assignment]


class _Sealed:
    """Keeps an array away from repr, pickling and NumPy's conversions."""

    __slots__ = ("_array",)

    def __init__(self, array: np.ndarray) -> None:
        self._array = array

    def __len__(self) -> int:
        return int(self._array.shape[0])

    def open(self, rows: np.ndarray | None = None) -> np.ndarray:
        return self._array if rows is None else self._array[rows]

    def __repr__(self) -> str:
        return "<sealed>"

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TypeError("true labels cannot be pickled or copied.")


_CAME_ALONG = (
    "A history that comes with a model counts as that of these labels, unless both have stores, or "
    "people= declares that they are of different people. Raise the budget, take a model that has "
    "not seen these labels, or declare the people."
)


def _advice(planned: Sequence[tuple[str, Charge]]) -> str:
    """Returns what to do about a budget that does not suffice."""
    if any(charge.event is not None and hasattr(charge.event, "count") for _, charge in planned):
        return (
            "Take fewer steps, or more noise (accounting.calibrate_noise_multiplier finds it for a "
            "target epsilon); remaining() says what is left."
        )
    return (
        "Draw for other examples, use a smaller epsilon, or reuse the noisy labels drawn before "
        "(give the draw a key); remaining() says what is left."
    )


def _channel_digest(mechanism: Mechanism) -> str:
    """Returns a digest of the channel that a mechanism of classes has now."""
    if not isinstance(mechanism, ClassificationMechanism) or mechanism.uses_priors:
        return ""
    return array_digest(np.asarray(mechanism.transition_matrix()))


def _in_words(mechanism: Mechanism, charge: Charge) -> str:
    return f"{type(mechanism).__name__} (epsilon={charge.epsilon:g}, delta={charge.delta:g})"


def _is_like(first: Record, second: Record) -> bool:
    """Returns whether two records that follow each other are one line of a history."""
    if first.receipt is None or second.receipt is None:
        return False
    names = ("kind", "what", "charge", "labels", "actor", "num_examples")
    return first.receipt.kind == "steps" and all(
        getattr(first.receipt, name) == getattr(second.receipt, name) for name in names
    )


def _carried_by(record: Record) -> Receipts:
    own = () if record.receipt is None else (record.receipt,)
    return merge_receipts(record.made_of, own)


def _values(record: Record) -> np.ndarray:
    if record.values is None:
        raise RuntimeError("this record of the vault holds no values.")
    return record.values


def _compact(noisy: np.ndarray) -> np.ndarray:
    """Returns noisy labels in the dtype in which they are stored: integers in the smallest."""
    if noisy.dtype.kind not in "iu" or not noisy.size:
        return noisy
    return noisy.astype(np.result_type(*map(np.min_scalar_type, (noisy.min(), noisy.max()))))


def _restored(stored: np.ndarray) -> np.ndarray:
    """Returns a copy of stored noisy labels in the dtype that users get."""
    return stored.astype(np.int64 if stored.dtype.kind in "iu" else stored.dtype)


def _public_digest(public_input: Any) -> str | None:
    """Returns a digest of what a draw uses beside the labels."""
    if public_input is None:
        return None
    if hasattr(public_input, "digest"):  # too large for memory, perhaps
        return str(public_input.digest())
    return array_digest(np.asarray(public_input))


def _same_input(known: str | None, public_input: Any, digest: str | None) -> bool:
    """Returns whether a stored draw was made with this public input."""
    if known is not None and hasattr(public_input, "matches"):
        return bool(public_input.matches(known))
    return known == digest
