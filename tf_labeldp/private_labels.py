"""The vault: true labels go in, mechanisms' outputs come out, every draw is charged and stored.

Privacy model: the label holder's process and its store folder are trusted; everything that the
vault returns may be published together with the features. The file ``PRIVATE-fingerprint`` in a
store is a salted digest of the true labels, by which a store of other labels is refused. It is not
differentially private: keep the store with the labels, and publish models and noisy labels instead.
"""

from __future__ import annotations

import dataclasses
import os
import threading
from collections.abc import Hashable, Sequence
from typing import Any, NoReturn

import numpy as np

from tf_labeldp import _validate
from tf_labeldp._label_kinds import LabelKind, label_kind
from tf_labeldp._label_randomizer import LabelRandomizer, RandomizedLabels
from tf_labeldp._label_store import (
    Draw,
    DrawSettingsError,
    LabelStore,
    LabelStoreError,
    array_digest,
)
from tf_labeldp.accounting import (
    BudgetExceededError,
    Charge,
    PrivacyBudget,
    PrivacyGuarantee,
    compose_charges,
)
from tf_labeldp.mechanisms import (
    AggregateMechanism,
    LabelMechanism,
    Mechanism,
    checked_mechanism,
    deserialize,
    serialize,
)

__all__ = ["LabelRandomizer", "LabelStoreError", "PrivateLabels", "RandomizedLabels"]

_ASSUMPTIONS = (
    "the features are public, and each person has one example",
    "priors given for a draw were made without the labels of the examples it draws for, except "
    "through earlier noisy labels of this vault",
    "the true labels reach training and tuning through this vault alone",
)
_UNNAMED = "unnamed-"
_SECURE_BITS = "the operating system's random generator is secure"


class PrivateLabels:
    """The only holder of the true labels of a training set.

    Privacy: at any time the noisy labels handed out so far are ``guarantee()``-label-DP for the
    replacement of one label. Draws on disjoint examples compose in parallel, draws on the same
    example in sequence (``ghazi2021``, Observation 4; ``accounting.compose_charges``). A draw that
    would take an example past the budget raises before anything is drawn.

    Nothing shows a label: not ``repr``, not an error message, not the store; pickling and copying
    are refused.

    Args:
        labels: the true labels, shape (n,): integers 0..K-1, any hashable values with ``classes``,
            or numbers with ``low`` and ``high`` (regression). NumPy array, list, tensor or column
            of a data frame; they are copied.
        num_classes: K, at least 2; may be left out where ``classes`` is given.
        budget: the most that may be spent on one label.
        classes: the class values, in the order of their codes 0..K-1. Must be public knowledge:
            classes are never taken from the labels, since a rare class would show its holder.
        low: the smallest label of a regression task. Public knowledge, like ``high``: a range
            taken from the labels would show whoever has the largest one.
        high: the largest label of a regression task.
        clip: for regression, whether labels outside the range are set to its nearer end; without,
            they are refused.
        store: folder in which every draw is kept. Opening it again with the same labels returns
            the same draws and remembers what they cost. Without one, a second run draws, and
            spends, again.
        seed: makes the draws repeatable; the statement then says "not private: seeded".
        rng: likewise, with a generator of your own.

    Raises:
        TypeError: the labels are not integers and neither classes nor a range are given.
        ValueError: labels outside the classes or the range, wrong shape, or contradictory
            arguments.
        LabelStoreError: the store is of other labels, of other settings, damaged or not a store.
        BudgetExceededError: the store has spent more than the budget given now.

    Example:
        >>> from tf_labeldp.accounting import PrivacyBudget
        >>> from tf_labeldp.mechanisms import RandomizedResponse
        >>> labels = PrivateLabels([0, 2, 1, 1], num_classes=3, budget=PrivacyBudget(epsilon=1.0))
        >>> noisy = labels.randomize(RandomizedResponse(epsilon=1.0, num_classes=3))
        >>> noisy.shape, labels.guarantee().epsilon
        ((4,), 1.0)
        >>> from tf_labeldp.mechanisms import LaplaceMechanism
        >>> weeks = PrivateLabels([52, 40, 13], low=0, high=52, budget=PrivacyBudget(epsilon=1.0))
        >>> weeks.randomize(LaplaceMechanism(epsilon=1.0, low=0.0, high=52.0)).dtype
        dtype('float64')
    """

    __slots__ = (
        "__weakref__",
        "_budget",
        "_composed_before",
        "_draws",
        "_histories",
        "_history_of",
        "_kind",
        "_lock",
        "_rng",
        "_sealed",
        "_seed",
        "_store",
        "_unnamed_draws",
    )

    def __init__(
        self,
        labels: Any,
        num_classes: int | None = None,
        *,
        budget: PrivacyBudget,
        classes: Sequence[Hashable] | None = None,
        low: float | None = None,
        high: float | None = None,
        clip: bool = False,
        store: str | os.PathLike[str] | None = None,
        seed: int | None = None,
        rng: np.random.Generator | None = None,
    ) -> None:
        if not isinstance(budget, PrivacyBudget):
            raise TypeError(
                f"budget must be a PrivacyBudget, got {type(budget).__name__}. Write "
                "budget=PrivacyBudget(epsilon=1.0)."
            )
        if seed is not None and rng is not None:
            raise ValueError("seed and rng were both given; give one of them, or none.")
        self._kind: LabelKind = label_kind(num_classes, classes, low, high, clip)
        self._budget = budget
        self._seed = None if seed is None else _validate.integer_at_least("seed", seed, 0)
        self._rng = rng
        self._lock = threading.RLock()
        self._sealed = _Sealed(self._kind.encode(labels))
        # Examples with the same charges share a row of histories; at first none has any.
        self._history_of = np.zeros(len(self._sealed), dtype=np.int32)
        self._histories: list[tuple[Charge, ...]] = [()]
        self._composed_before: dict[tuple[Charge, ...], PrivacyGuarantee] = {}
        self._draws: dict[str, Draw] = {}
        self._unnamed_draws = 0
        self._store = None if store is None else LabelStore(store)
        if self._store is not None:
            for draw in self._store.open(self._sealed.open(), self._kind.header()):
                self._remember(draw, Charge.of(deserialize(draw.mechanism)))
            self._check_spent()

    @property
    def num_classes(self) -> int:
        """Number of classes K; raises a ``ValueError`` for regression labels."""
        return self._kind.num_classes

    @property
    def classes(self) -> tuple[Hashable, ...]:
        """The class values in the order of their codes; raises for regression labels."""
        return self._kind.classes

    @property
    def label_range(self) -> tuple[float, float] | None:
        """The smallest and the largest label of a regression task; None for classes."""
        return self._kind.label_range

    @property
    def budget(self) -> PrivacyBudget:
        """The most that may be spent on one label."""
        return self._budget

    @property
    def store_path(self) -> os.PathLike[str] | None:
        """The folder of the store, or None."""
        return None if self._store is None else self._store.path

    def __len__(self) -> int:
        """Returns the number of labels n."""
        return len(self._sealed)

    def randomize(
        self,
        mechanism: LabelMechanism,
        indices: Any = None,
        priors: Any = None,
        *,
        key: str | None = None,
    ) -> np.ndarray:
        """Draws noisy labels, charges them, and stores them before handing them out.

        Args:
            mechanism: a mechanism over this vault's K classes, or over its range of numbers.
            indices: the examples to draw for: integers (m,), each at most once, or a boolean mask
                (n,). None draws for all.
            priors: probabilities (K,) or (m, K), in the order of ``indices``, for mechanisms that
                take them.
            key: a name for this draw. Asking again for a name returns the stored draw and charges
                nothing, whatever the priors are now. Without a name the draws of a run are
                numbered, and a store answers them in that order.

        Returns:
            ``int64`` array (m,) of class codes, which ``decode`` turns into class values; for
            regression ``float64`` (m,).

        Raises:
            BudgetExceededError: the draw would take an example past the budget; nothing was drawn.
            LabelStoreError: the stored draw of this name was made with other settings.
            TypeError: ``mechanism`` is not a mechanism for labels of this kind.
            ValueError: other number of classes or range, bad indices, priors or key; nothing was
                charged.
        """
        self._kind.check(checked_mechanism(mechanism, LabelMechanism))
        return self._kind.restore(self._draw(mechanism, indices, priors, key))

    def release(
        self,
        mechanism: AggregateMechanism,
        indices: Any = None,
        public_input: Any = None,
        *,
        key: str | None = None,
    ) -> np.ndarray:
        """Releases one noisy statistic of the labels; charges and stores it like a draw.

        Args:
            mechanism: for example ``mechanisms.HistogramMechanism``.
            indices: the examples it is made of, as for ``randomize``; each is charged.
            public_input: what else the statistic is made of, in the order of ``indices``: group
                numbers (m,), features (m, d), as the mechanism says. An object with ``digest()``
                and ``matches(digest)`` is passed on as it is, and is known by these. A stored
                release is given again only for the public input that it was made with.
            key: a name for this release, as for ``randomize``.

        Returns:
            The noisy statistic, as the mechanism gives it.

        Raises:
            BudgetExceededError: an example would pass the budget; nothing was released.
            LabelStoreError: the stored release of this name was made with other settings.
            TypeError: ``mechanism`` is not a mechanism of many labels.
            ValueError: a mechanism for other labels, bad indices, public input or key; nothing was
                charged.

        Example:
            >>> from tf_labeldp.accounting import PrivacyBudget
            >>> from tf_labeldp.estimation import HistogramMechanism
            >>> labels = PrivateLabels([0, 2, 1], num_classes=3, budget=PrivacyBudget(epsilon=1.0))
            >>> labels.release(HistogramMechanism(epsilon=0.5, num_classes=3)).shape
            (3,)
            >>> labels.guarantee().epsilon
            0.5
        """
        self._kind.check_release(checked_mechanism(mechanism, AggregateMechanism))
        return self._draw(mechanism, indices, public_input, key).copy()

    def _draw(
        self, mechanism: Mechanism, indices: Any, public_input: Any, key: str | None
    ) -> np.ndarray:
        """Returns the result of a draw or a release, a new one or the stored one of this name."""
        rows = self._checked_indices(indices)
        digest = _public_digest(public_input)
        with self._lock:
            strict = key is None
            if key is not None and str(key).startswith(_UNNAMED):
                raise ValueError(
                    f"key must not start with {_UNNAMED!r}, which names draws without a key, got "
                    f"{key!r}."
                )
            name = f"{_UNNAMED}{self._unnamed_draws}" if key is None else str(key)
            if name in self._draws:
                draw = self._draws[name]
                strictly = strict or isinstance(mechanism, AggregateMechanism)
                same = not strictly or _same_input(draw.priors_digest, public_input, digest)
                self._check_same(draw, mechanism, rows, same)
            else:
                draw = self._new_draw(name, mechanism, rows, public_input, digest)
            if strict:
                self._unnamed_draws += 1
        return draw.noisy_labels

    def check_budget(self, mechanism: Mechanism | Sequence[Mechanism], indices: Any = None) -> None:
        """Raises if a draw, or several one after another, would pass the budget; draws nothing.

        Args:
            mechanism: one, or several, for ``randomize`` or ``release``.
            indices: as for ``randomize``.

        Raises:
            BudgetExceededError: as ``randomize`` would.
        """
        several = mechanism if isinstance(mechanism, Sequence) else [mechanism]
        checked = [checked_mechanism(one, Mechanism) for one in several]
        rows = self._checked_indices(indices)
        with self._lock:
            self._check_budget(rows, checked)

    def has_draw(self, key: str | None) -> bool:
        """Returns whether a draw of this name has been made (and so costs nothing to ask for).

        Args:
            key: the name; None for the next draw without a name, which a store may hold.
        """
        return (f"{_UNNAMED}{self._unnamed_draws}" if key is None else key) in self._draws

    def mechanism(self, key: str) -> Mechanism:
        """Returns the mechanism of a draw that has been made; a ``KeyError`` if there is none."""
        if key not in self._draws:
            raise KeyError(f"there is no draw {key!r}; there are {sorted(self._draws)}.")
        return deserialize(self._draws[key].mechanism)

    def decode(self, codes: Any) -> np.ndarray:
        """Returns the class values of class codes (m,)."""
        return self._kind.decode(codes)

    def guarantee(
        self, *, after: Mechanism | Sequence[Mechanism] = (), delta: float | None = None
    ) -> PrivacyGuarantee:
        """Returns what has been spent so far on the most charged example.

        Args:
            after: also count one use of this mechanism, or of each of these, on all examples;
                nothing is charged.
            delta: of the statement; None for the budget's.
        """
        several = after if isinstance(after, Sequence) else [after]
        more = tuple(Charge.of(checked_mechanism(one, Mechanism)) for one in several)
        with self._lock:
            used = np.unique(self._history_of)
            spent = [self._composed((*self._histories[i], *more), delta) for i in used]
            seeded = any(draw.seeded for draw in self._draws.values())
        worst = max(
            spent,
            key=lambda guarantee: (guarantee.epsilon, guarantee.delta),
            default=PrivacyGuarantee(epsilon=0.0),
        )
        stated_delta = max((guarantee.delta for guarantee in spent), default=0.0)
        # The statement covers every example, so it rests on what any of their sums rests on.
        notes = tuple(dict.fromkeys(text for one in spent for text in one.assumptions))
        worst = dataclasses.replace(worst, delta=stated_delta, seeded=seeded, assumptions=notes)
        extra = _ASSUMPTIONS if seeded else (*_ASSUMPTIONS, _SECURE_BITS)
        return worst.with_assumptions(extra)

    def _new_draw(
        self,
        name: str,
        mechanism: Mechanism,
        rows: np.ndarray,
        public_input: Any,
        digest: str | None,
    ) -> Draw:
        charge = Charge.of(mechanism)
        self._check_budget(rows, [mechanism])
        number = len(self._draws)
        rng = self._rng
        if self._seed is not None:
            # One stream a draw: a run that reads stored draws does not shift the later ones.
            rng = np.random.default_rng([self._seed, number])
        try:
            result = _apply(mechanism, self._sealed.open(rows), public_input, rng)
        except Exception:
            self._fail(mechanism, rows, public_input, charge, rng)
        if isinstance(mechanism, LabelMechanism):
            result = self._kind.compact(result)
        draw = Draw(
            number=number,
            key=name,
            mechanism=serialize(mechanism),
            indices=rows,
            noisy_labels=result,
            priors_digest=digest,
            seeded=rng is not None,
        )
        if self._store is not None:
            self._store.append(draw)
        self._remember(draw, charge)
        return draw

    def _fail(
        self,
        mechanism: Mechanism,
        rows: np.ndarray,
        public_input: Any,
        charge: Charge,
        rng: np.random.Generator | None,
    ) -> NoReturn:
        """Raises what a mechanism would for any labels, or else says nothing of what it raised.

        An error that depends on the labels is an output too: it is charged, and its text, which the
        mechanism's epsilon does not cover, is kept back.
        """
        _apply(mechanism, self._kind.any_labels(rows.size), public_input, rng)
        self._charge(rows, charge)
        raise RuntimeError(
            f"{type(mechanism).__name__} failed on these labels, and would not on others; what it "
            "said is kept back, since it may tell something of them. The draw was charged. Check "
            "the mechanism on labels of your own making: it must take every label of the vault."
        ) from None

    def _remember(self, draw: Draw, charge: Charge) -> None:
        # The charge first: a draw that is interrupted here is paid for and not handed out.
        self._charge(draw.indices, charge)
        self._draws[draw.key] = draw

    def _charge(self, rows: np.ndarray, charge: Charge) -> None:
        before, inverse = np.unique(self._history_of[rows], return_inverse=True)
        after = np.empty(before.size, dtype=np.int32)
        for i, old in enumerate(before):  # a handful of different histories, not examples
            history = (*self._histories[old], charge)
            if history not in self._histories:
                self._histories.append(history)
            after[i] = self._histories.index(history)
        self._history_of[rows] = after[inverse]

    def _check_spent(self) -> None:
        for history in self._histories:
            spent = self._composed(history)
            if not self._budget.allows(spent):
                raise BudgetExceededError(
                    f"the store has spent epsilon={spent.epsilon:g} at delta={spent.delta:g} on "
                    f"some labels, over the budget of epsilon={self._budget.epsilon:g}, delta="
                    f"{self._budget.delta:g} given now. Open it with the budget that it was made "
                    "with."
                )

    def _check_budget(self, rows: np.ndarray, mechanisms: Sequence[Mechanism]) -> None:
        charges = tuple(Charge.of(mechanism) for mechanism in mechanisms)
        for old in np.unique(self._history_of[rows]):
            after = self._composed((*self._histories[old], *charges))
            if not self._budget.allows(after):
                spent = self._composed(self._histories[old])
                wanted = " and ".join(
                    f"{type(mechanism).__name__} (epsilon={charge.epsilon:g}, "
                    f"delta={charge.delta:g})"
                    for mechanism, charge in zip(mechanisms, charges, strict=True)
                )
                raise BudgetExceededError(
                    f"{wanted} would be charged to examples that have spent epsilon="
                    f"{spent.epsilon:g}: together epsilon={after.epsilon:g} at delta="
                    f"{after.delta:g}, over the budget of epsilon={self._budget.epsilon:g}, "
                    f"delta={self._budget.delta:g}. Nothing was drawn. Draw for other examples, "
                    "use a smaller epsilon, or reuse the noisy labels drawn before (give the draw "
                    "a key)."
                )

    def _composed(
        self, history: tuple[Charge, ...], delta: float | None = None
    ) -> PrivacyGuarantee:
        if delta is not None and delta != self._budget.delta:
            return compose_charges(history, delta)
        if history not in self._composed_before:
            self._composed_before[history] = compose_charges(history, self._budget.delta)
        return self._composed_before[history]

    def _check_same(
        self,
        draw: Draw,
        mechanism: Mechanism,
        rows: np.ndarray,
        same_input: bool,
    ) -> None:
        differing = [
            name
            for name, same in (
                # Read back first: a stored draw may lack arguments that were added since.
                ("mechanism", serialize(deserialize(draw.mechanism)) == serialize(mechanism)),
                ("indices", np.array_equal(draw.indices, rows)),
                ("priors or public input", same_input),
            )
            if not same
        ]
        if differing:
            raise DrawSettingsError(
                f"draw {draw.key!r} exists and was made with other {' and '.join(differing)} "
                f"(stored: {deserialize(draw.mechanism)!r}, {draw.indices.size} examples; asked: "
                f"{mechanism!r}, {rows.size} examples). Ask with the settings of the "
                "stored draw, or give the new draw a key of its own."
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
            f"PrivateLabels(num_labels={len(self)}, {self._kind}, "
            f"budget={self._budget}, draws={len(self._draws)})"
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


def _apply(
    mechanism: Mechanism, labels: np.ndarray, public_input: Any, rng: np.random.Generator | None
) -> np.ndarray:
    """Returns what a mechanism makes of true labels."""
    if isinstance(mechanism, AggregateMechanism):
        return mechanism.release(labels, public_input, rng=rng)
    return checked_mechanism(mechanism, LabelMechanism).randomize(labels, public_input, rng=rng)
