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
from tf_labeldp._label_store import Draw, LabelStore, LabelStoreError, array_digest
from tf_labeldp.accounting import (
    BudgetExceededError,
    Charge,
    PrivacyBudget,
    PrivacyGuarantee,
    compose_charges,
)
from tf_labeldp.mechanisms import LabelMechanism, checked_mechanism, deserialize, serialize

__all__ = ["LabelStoreError", "PrivateLabels"]

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
        labels: the true labels, shape (n,): integers 0..K-1, or any hashable values with
            ``classes``. NumPy array, list, tensor or column of a data frame; they are copied.
        num_classes: K, at least 2; may be left out where ``classes`` is given.
        budget: the most that may be spent on one label.
        classes: the class values, in the order of their codes 0..K-1. Must be public knowledge:
            classes are never taken from the labels, since a rare class would show its holder.
        store: folder in which every draw is kept. Opening it again with the same labels returns
            the same draws and remembers what they cost. Without one, a second run draws, and
            spends, again.
        seed: makes the draws repeatable; the statement then says "not private: seeded".
        rng: likewise, with a generator of your own.

    Raises:
        TypeError: the labels are not integers and no classes are given.
        ValueError: labels outside the classes, wrong shape, or contradictory arguments.
        LabelStoreError: the store is of other labels, of other settings, damaged or not a store.
        BudgetExceededError: the store has spent more than the budget given now.

    Example:
        >>> from tf_labeldp.accounting import PrivacyBudget
        >>> from tf_labeldp.mechanisms import RandomizedResponse
        >>> labels = PrivateLabels([0, 2, 1, 1], num_classes=3, budget=PrivacyBudget(epsilon=1.0))
        >>> noisy = labels.randomize(RandomizedResponse(epsilon=1.0, num_classes=3))
        >>> noisy.shape, labels.guarantee().epsilon
        ((4,), 1.0)
    """

    __slots__ = (
        "__weakref__",
        "_budget",
        "_classes",
        "_composed_before",
        "_draws",
        "_histories",
        "_history_of",
        "_lock",
        "_num_classes",
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
        self._classes = None if classes is None else _checked_classes(classes, num_classes)
        if self._classes is not None:
            num_classes = len(self._classes)
        if num_classes is None:
            raise ValueError(
                "num_classes is missing. It is not counted from the labels, since that would "
                "reveal whether a rare class occurs; give num_classes or classes."
            )
        self._num_classes = _validate.integer_at_least("num_classes", num_classes, 2)
        self._budget = budget
        self._seed = None if seed is None else _validate.integer_at_least("seed", seed, 0)
        self._rng = rng
        self._lock = threading.RLock()
        self._sealed = _Sealed(_codes(labels, self._num_classes, self._classes))
        # Examples with the same charges share a row of histories; at first none has any.
        self._history_of = np.zeros(len(self._sealed), dtype=np.int32)
        self._histories: list[tuple[Charge, ...]] = [()]
        self._composed_before: dict[tuple[Charge, ...], PrivacyGuarantee] = {}
        self._draws: dict[str, Draw] = {}
        self._unnamed_draws = 0
        self._store = None if store is None else LabelStore(store)
        if self._store is not None:
            names = None if self._classes is None else array_digest(np.array(repr(self._classes)))
            for draw in self._store.open(self._sealed.open(), self._num_classes, names):
                self._remember(draw, Charge.of(deserialize(draw.mechanism)))
            self._check_spent()

    @property
    def num_classes(self) -> int:
        """Number of classes K."""
        return self._num_classes

    @property
    def classes(self) -> tuple[Hashable, ...]:
        """The class values in the order of their codes."""
        return self._classes if self._classes is not None else tuple(range(self._num_classes))

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
            mechanism: a mechanism over this vault's K classes.
            indices: the examples to draw for: integers (m,), each at most once, or a boolean mask
                (n,). None draws for all.
            priors: probabilities (K,) or (m, K), in the order of ``indices``, for mechanisms that
                take them.
            key: a name for this draw. Asking again for a name returns the stored draw and charges
                nothing, whatever the priors are now. Without a name the draws of a run are
                numbered, and a store answers them in that order.

        Returns:
            ``int64`` array (m,) of class codes; ``decode`` turns them into class values.

        Raises:
            BudgetExceededError: the draw would take an example past the budget; nothing was drawn.
            LabelStoreError: the stored draw of this name was made with other settings.
            TypeError: ``mechanism`` is not a mechanism.
            ValueError: other number of classes, bad indices, priors or key; nothing was charged.
        """
        if checked_mechanism(mechanism).num_classes != self._num_classes:
            raise ValueError(
                f"the mechanism has num_classes={mechanism.num_classes}, the labels have "
                f"{self._num_classes}. Make the mechanism with the labels' number of classes."
            )
        rows = self._checked_indices(indices)
        digest = None if priors is None else array_digest(np.asarray(priors))
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
                self._check_same(draw, mechanism, rows, digest, strict)
            else:
                draw = self._new_draw(name, mechanism, rows, priors, digest)
            if strict:
                self._unnamed_draws += 1
        return draw.noisy_labels.astype(np.int64)

    def check_budget(self, mechanism: LabelMechanism, indices: Any = None) -> None:
        """Raises if a draw would pass the budget; draws and charges nothing.

        Args:
            mechanism: as for ``randomize``.
            indices: as for ``randomize``.

        Raises:
            BudgetExceededError: as ``randomize`` would.
        """
        rows = self._checked_indices(indices)
        with self._lock:
            self._check_budget(rows, Charge.of(checked_mechanism(mechanism)), mechanism)

    def has_draw(self, key: str) -> bool:
        """Returns whether a draw of this name has been made (and so costs nothing to ask for)."""
        return key in self._draws

    def decode(self, codes: Any) -> np.ndarray:
        """Returns the class values of class codes (m,)."""
        codes = _validate.class_indices("codes", codes, self._num_classes)
        return _class_array(self.classes)[codes]

    def guarantee(self) -> PrivacyGuarantee:
        """Returns what has been spent so far on the most charged example."""
        with self._lock:
            used = np.unique(self._history_of)
            spent = [self._composed(self._histories[i]) for i in used]
            seeded = any(draw.seeded for draw in self._draws.values())
        worst = max(
            spent,
            key=lambda guarantee: (guarantee.epsilon, guarantee.delta),
            default=PrivacyGuarantee(epsilon=0.0),
        )
        delta = max((guarantee.delta for guarantee in spent), default=0.0)
        # The statement covers every example, so it rests on what any of their sums rests on.
        notes = tuple(dict.fromkeys(text for one in spent for text in one.assumptions))
        worst = dataclasses.replace(worst, delta=delta, seeded=seeded, assumptions=notes)
        extra = _ASSUMPTIONS if seeded else (*_ASSUMPTIONS, _SECURE_BITS)
        return worst.with_assumptions(extra)

    def _new_draw(
        self,
        name: str,
        mechanism: LabelMechanism,
        rows: np.ndarray,
        priors: Any,
        digest: str | None,
    ) -> Draw:
        charge = Charge.of(mechanism)
        self._check_budget(rows, charge, mechanism)
        number = len(self._draws)
        rng = self._rng
        if self._seed is not None:
            # One stream a draw: a run that reads stored draws does not shift the later ones.
            rng = np.random.default_rng([self._seed, number])
        noisy = mechanism.randomize(self._sealed.open(rows), priors, rng=rng)
        draw = Draw(
            number=number,
            key=name,
            mechanism=serialize(mechanism),
            indices=rows,
            noisy_labels=noisy.astype(np.min_scalar_type(self._num_classes - 1)),
            priors_digest=digest,
            seeded=rng is not None,
        )
        if self._store is not None:
            self._store.append(draw)
        self._remember(draw, charge)
        return draw

    def _remember(self, draw: Draw, charge: Charge) -> None:
        self._draws[draw.key] = draw
        before, inverse = np.unique(self._history_of[draw.indices], return_inverse=True)
        after = np.empty(before.size, dtype=np.int32)
        for i, old in enumerate(before):  # a handful of different histories, not examples
            history = (*self._histories[old], charge)
            if history not in self._histories:
                self._histories.append(history)
            after[i] = self._histories.index(history)
        self._history_of[draw.indices] = after[inverse]

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

    def _check_budget(self, rows: np.ndarray, charge: Charge, mechanism: LabelMechanism) -> None:
        for old in np.unique(self._history_of[rows]):
            after = self._composed((*self._histories[old], charge))
            if not self._budget.allows(after):
                spent = self._composed(self._histories[old])
                raise BudgetExceededError(
                    f"{type(mechanism).__name__} would charge epsilon={charge.epsilon:g}, "
                    f"delta={charge.delta:g} to examples that have spent epsilon="
                    f"{spent.epsilon:g}: together epsilon={after.epsilon:g} at delta="
                    f"{after.delta:g}, over the budget of epsilon={self._budget.epsilon:g}, "
                    f"delta={self._budget.delta:g}. Nothing was drawn. Draw for other examples, "
                    "use a smaller epsilon, or reuse the noisy labels drawn before (give the draw "
                    "a key)."
                )

    def _composed(self, history: tuple[Charge, ...]) -> PrivacyGuarantee:
        if history not in self._composed_before:
            self._composed_before[history] = compose_charges(history, self._budget.delta)
        return self._composed_before[history]

    def _check_same(
        self,
        draw: Draw,
        mechanism: LabelMechanism,
        rows: np.ndarray,
        digest: str | None,
        strict: bool,
    ) -> None:
        differing = [
            name
            for name, same in (
                ("mechanism", draw.mechanism == serialize(mechanism)),
                ("indices", np.array_equal(draw.indices, rows)),
                ("priors", not strict or draw.priors_digest == digest),
            )
            if not same
        ]
        if differing:
            raise LabelStoreError(
                f"draw {draw.key!r} exists and was made with other {' and '.join(differing)} "
                f"(stored: {draw.mechanism}, {draw.indices.size} examples; asked: "
                f"{serialize(mechanism)}, {rows.size} examples). Ask with the settings of the "
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
            f"PrivateLabels(num_labels={len(self)}, num_classes={self._num_classes}, "
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


def _checked_classes(classes: Sequence[Hashable], num_classes: int | None) -> tuple[Hashable, ...]:
    # NumPy's scalars become Python's, so that a store does not depend on how NumPy prints them.
    names = tuple(name.item() if isinstance(name, np.generic) else name for name in classes)
    if len(set(names)) != len(names):
        raise ValueError("classes names a class more than once; name each once.")
    if num_classes is not None and num_classes != len(names):
        raise ValueError(
            f"num_classes={num_classes} but classes has {len(names)} entries; leave out "
            "num_classes."
        )
    return names


def _object_array(values: Sequence[Any]) -> np.ndarray:
    """Returns the values as they are, one a cell: tuples stay whole, numbers stay numbers."""
    return np.fromiter(values, dtype=object, count=len(values))


def _class_array(classes: tuple[Hashable, ...]) -> np.ndarray:
    """Returns the classes as NumPy holds them best without changing any of them."""
    if len({type(name) for name in classes}) == 1:
        array = np.asarray(classes)
        if array.ndim == 1:
            return array
    return _object_array(classes)


def _codes(labels: Any, num_classes: int, classes: tuple[Hashable, ...] | None) -> np.ndarray:
    """Returns a private copy of the labels as codes 0..K-1."""
    if hasattr(labels, "numpy"):  # a tensor, of any framework
        labels = labels.numpy()
    if classes is None:
        return _validate.class_indices("labels", labels, num_classes)
    array = _object_array(labels) if isinstance(labels, (list, tuple)) else np.asarray(labels)
    if array.ndim != 1:
        raise ValueError(f"labels must have shape (n,), got shape {array.shape}.")
    lookup: dict[Hashable, int] = {value: code for code, value in enumerate(classes)}
    for name in [name for name in classes if isinstance(name, str)]:
        lookup.setdefault(name.encode(), lookup[name])  # a tensor of texts holds bytes
    if array.dtype.kind == "O":  # not sortable in general, so looked up one by one
        codes = np.fromiter((lookup.get(v, -1) for v in array), np.int64, array.size)
    else:
        values, inverse = np.unique(array, return_inverse=True)
        codes = np.array([lookup.get(v, -1) for v in values.tolist()], np.int64)[inverse]
    unknown = int(np.count_nonzero(codes < 0))
    if unknown:
        raise ValueError(
            f"{unknown} of {array.size} labels are not among the {num_classes} classes given. Add "
            "the missing classes to classes=, or check the labels' type and spelling."
        )
    return codes
