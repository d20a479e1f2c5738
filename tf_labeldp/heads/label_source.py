"""The labels of a fit, in the user's vault or in a new one for an array of labels.

Fits on arrays share no vault, so this process counts them: by keyed digests of the rows, and by
the number and the memory of the labels, never by their content.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import math
import multiprocessing
import threading
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from sklearn.utils import column_or_1d

from tf_labeldp import _validate
from tf_labeldp._columns import Column
from tf_labeldp.accounting import Charge, LabelSet, PrivacyBudget, PublicInput, Receipt, Receipts
from tf_labeldp.mechanisms import LabelMomentMechanism
from tf_labeldp.vault import LabelKind, NoisyLabels, PrivateLabels, Randomizer
from tf_labeldp.vault.noisy_labels import NoisyStatistic
from tf_labeldp.vault.private_labels import (
    refuse_noisy,
    vault_of_array,
)
from tf_labeldp.vault.uses import NamedUse

_KIND = ("num_classes", "classes", "low", "high", "num_labels")
"""The arguments of a head that describe the labels."""
_CHANCE = 0.25
"""Share of a fit's rows; fewer may have equal features by chance. Folds share half or more."""


@dataclasses.dataclass(frozen=True, eq=False)
class _Place:
    """Where an array of labels lies in memory; its content is not read."""

    base: weakref.ref[np.ndarray]  # whose memory it is
    ends: tuple[int, int]  # its first byte, and the one after its last
    has_whole_rows: bool  # of the base, in which a column would lie apart from another one

    @classmethod
    def of(cls, labels: Any) -> _Place | None:
        """Returns the place of an array; None for anything else."""
        if not isinstance(labels, np.ndarray):
            return None
        base = labels
        while isinstance(base.base, np.ndarray):  # Parts of a file are bases, too.
            base = base.base
        spans = [(size - 1) * step for size, step in zip(labels.shape, labels.strides, strict=True)]
        first = labels.__array_interface__["data"][0]
        low, high = sum(min(span, 0) for span in spans), sum(max(span, 0) for span in spans)
        has_whole_rows = math.prod(base.shape[1:]) == math.prod(labels.shape[1:])
        ends = first + low, first + high + labels.itemsize
        return cls(weakref.ref(base), ends, has_whole_rows)

    def overlaps(self, other: _Place | None) -> bool | None:
        """Returns whether two parts of one array overlap; None for parts of two, or of none.

        Columns of one array are parts with the labels of the same people.
        """
        base = self.base()
        if other is None or base is None or other.base() is not base:
            return None
        if self.ends[0] < other.ends[1] and other.ends[0] < self.ends[1]:
            return True
        return False if self.has_whole_rows and other.has_whole_rows else None


class LabelSource:
    """Labels in a vault, for one use; an array gets a vault with the budget of that use.

    If the use releases a head on the features, ``made_of`` are their receipts, which count there.
    """

    def __init__(
        self,
        head: Any,
        labels: Any,
        mechanism_of: Callable[[LabelKind], Any],
        made_of: tuple[Receipt, ...] = (),
    ) -> None:
        labels = self.checked(head, labels)
        self._is_array = not isinstance(labels, PrivateLabels)
        self._place = self.place_of(labels)
        if self._is_array:
            self.kind = self.kind_of(head, labels)
            self.refuse_worker_processes()
        else:
            self.kind = labels.kind
            if head.insecure_seed is not None:
                raise ValueError(
                    "insecure_seed must be None with a PrivateLabels, which draws its own random "
                    "bits. Use PrivateLabels(..., insecure_seed=...) for a repeatable run."
                )
            self.check_arguments(self.arguments_of(head), self.kind)
        self.mechanism: Any = mechanism_of(self.kind)  # checks the arguments before labels are read
        self.vault: PrivateLabels = labels
        if self._is_array:
            delta = getattr(head, "delta", getattr(self.mechanism, "delta", 0.0))
            inherited = Receipts(made_of).guarantee(delta).epsilon if made_of else 0.0
            spent = inherited if math.isfinite(inherited) else 0.0
            budget = PrivacyBudget(head.epsilon + spent, delta)
            self.vault = vault_of_array(labels, self.kind, budget, head.insecure_seed)
        self.mechanism = mechanism_for_users(self.vault, self.mechanism)
        self._use = NamedUse(self.vault, head.key)
        if isinstance(self.mechanism, Randomizer):
            self._use = self._use.or_named(self.mechanism.default_key)
        self._use.check_budget(self.mechanism)

    @staticmethod
    def check_arguments(arguments: dict[str, Any], kind: LabelKind, of: str = "vault") -> None:
        """Raises for an argument of another kind of labels than a vault or noisy labels have."""
        for name, value in arguments.items():
            if name == "classes" and value is not None:
                value = tuple(value)
            if value is not None and value != getattr(kind, name, None):
                source = "PrivateLabels, which has" if of == "vault" else "NoisyLabels, which have"
                raise ValueError(
                    f"{name} differs from the {source} {kind.describe()}. Leave it out: the {of} "
                    f"{'has its' if of == 'vault' else 'have their'} own."
                )

    @staticmethod
    def refuse_missing(head: Any, labels: Any) -> None:
        """Raises for labels that are None."""
        if labels is None:
            raise ValueError(
                f"{type(head).__name__} requires y to be passed, but the target y is None. Give "
                "labels; a linear head also takes a data set of (x, y) batches."
            )

    @staticmethod
    def arguments_of(head: Any) -> dict[str, Any]:
        """Returns the arguments of a head that describe its labels; None for missing ones."""
        return {name: getattr(head, name, None) for name in _KIND}

    @staticmethod
    def kind_of(head: Any, labels: np.ndarray | None = None) -> LabelKind:
        """Returns the kind of labels in an array that the arguments of a head describe.

        Wrappers of scikit-learn, such as ``VotingClassifier``, sort the class values and give
        their places as labels. These are the classes then: the values may have another order.
        """
        described = LabelKind.of(**LabelSource.arguments_of(head))
        kind = described if labels is None else described.of_array(labels)
        if kind is not described:
            number = len(described.names or ())
            _validate.warn(
                f"expected labels that are values of classes, got whole numbers. They are "
                f"taken as codes 0..{number - 1}, as wrappers of scikit-learn encode labels, and "
                f"codes are predicted. For OneVsRestClassifier give num_classes=2, not classes."
            )
        return kind

    @staticmethod
    def check_order_for_scikit_learn(head: Any) -> None:
        """Warns of classes that are not sorted, in a tool of scikit-learn, which clones heads.

        Its scorers of probabilities assume sorted ones: the AUC would be that of the other class.
        """
        classes = LabelSource.arguments_of(head)["classes"]
        if classes is None:
            return
        with contextlib.suppress(TypeError):  # Values of mixed types have no order.
            if sorted(classes) != list(classes):
                _validate.warn(
                    "expected sorted classes in a tool of scikit-learn, whose scorers of "
                    f"probabilities (roc_auc, neg_log_loss) assume them, got {list(classes)[:10]}. "
                    "Sort classes=, or score predicted classes."
                )

    @classmethod
    def checked(cls, head: Any, labels: Any) -> Any:
        """Returns a vault, or an array for the arguments of a head: a vector of classes or numbers.

        A column (n, 1) becomes a vector with scikit-learn's warning.
        """
        refuse_noisy(labels)
        cls.refuse_missing(head, labels)
        if isinstance(labels, PrivateLabels) or cls.kind_of(head).num_labels:
            return labels
        return cls.vector(labels)

    @staticmethod
    def vector(labels: Any) -> np.ndarray:
        """Returns labels as an array; a column (n, 1) is a vector, with scikit-learn's warning."""
        array = Column.array_of(labels)
        if array.ndim == 2 and array.shape[1] == 1:
            return column_or_1d(array, warn=True)
        return array

    @staticmethod
    def refuse_worker_processes() -> None:
        """Raises in a worker process: this process would not count its fits."""
        if multiprocessing.parent_process() is not None:
            raise RuntimeError(
                "expected a PrivateLabels in a worker process (n_jobs?), got an array of labels: "
                "no statement can compose the fits of several processes. Use n_jobs=1, or open a "
                "PrivateLabels(..., store=path) in each process."
            )

    @staticmethod
    def place_of(labels: Any) -> _Place | None:
        """Returns where labels lie in memory, for ``with_other_fits``; None without an array."""
        return _Place.of(labels)

    @staticmethod
    def with_other_fits(
        receipts: tuple[Receipt, ...],
        labels: LabelSet,
        rows: np.ndarray | None,
        family: object,
        place: _Place | None,
    ) -> tuple[Receipt, ...]:
        """Returns the receipts of a fit on an array and of earlier fits on its labels.

        Those of other labels, such as of an encoder, count as they are.
        """
        own = tuple(receipt for receipt in receipts if receipt.labels == labels)
        others = [receipt for receipt in receipts if receipt not in own]
        return Receipts.merged(others, _FITS.with_others(_Fit(own, rows, family, place)))

    def release(
        self,
        mechanism: Any,
        public: PublicInput[Any],
        rows: np.ndarray | None,
        family: object,
    ) -> tuple[NoisyStatistic, tuple[Receipt, ...]]:
        """Charges the vault, and returns the noisy statistic and the receipts of the head.

        ``mechanism`` is that of the source, with noise for the features; ``rows`` are keyed digests
        (n, k) or None; clones of a head share a ``family``.
        """
        own = self._own(public)
        statistic = self._use.release(mechanism, own)
        return statistic, self._counted(statistic.receipts, public, rows, family)

    def randomize(
        self,
        public: PublicInput[Any],
        rows: np.ndarray | None,
        family: object,
        draw: Callable[[NamedUse, PublicInput[Any]], NoisyLabels],
    ) -> tuple[NoisyLabels, tuple[Receipt, ...]]:
        """Charges the vault, and returns the noisy labels of ``draw`` and the model's receipts."""
        noisy = draw(self._use, self._own(public))
        return noisy, self._counted(noisy.receipts, public, rows, family)

    def _own(self, public: PublicInput[Any]) -> PublicInput[Any]:
        for receipt in Receipts(public.receipts).standing():
            if receipt.kind == "unknown":  # training without receipts voids the promise
                _validate.warn(str(receipt.charge.assumptions[0]))
        # The vault of an array has budget for this release alone, none for its public inputs.
        return PublicInput(public.value) if self._is_array else public

    def _counted(
        self,
        receipts: tuple[Receipt, ...],
        public: PublicInput[Any],
        rows: np.ndarray | None,
        family: object,
    ) -> tuple[Receipt, ...]:
        # A stored release may lack receipts of the features, which the fit reads in any case.
        if self._is_array:
            own = self.vault.label_set
            receipts = self.with_other_fits(receipts, own, rows, family, self._place)
        return Receipts.merged(public.receipts, receipts)


def mechanism_for_users(labels: PrivateLabels, mechanism: Any) -> Any:
    """Returns the mechanism whose cost for all labels of a user is that of ``mechanism``.

    Those of linear heads follow the rows of users, and change with the design.
    """
    size = labels.group_size
    is_for_users = isinstance(mechanism, Randomizer) and mechanism.is_for_users
    if size == 1 or is_for_users or isinstance(mechanism, LabelMomentMechanism):
        return mechanism
    # The head's budget is for a user, whose labels move these mechanisms as far as k do.
    each = labels.epsilon_of_one_label(mechanism.epsilon)
    if delta := getattr(mechanism, "delta", 0.0):
        # Gaussian noise, k times that for one label.
        each = Charge.gaussian_share(mechanism.epsilon, delta, size**-2).epsilon
    return dataclasses.replace(mechanism, epsilon=each)


class _Fit(NamedTuple):
    """A fit on an array of labels."""

    receipts: tuple[Receipt, ...]  # its own
    rows: np.ndarray | None  # digests (n, k)
    family: object  # that of the clones of its head
    place: _Place | None

    @property
    def labels(self) -> LabelSet:
        return self.receipts[0].labels

    def shared_rows(self, earlier: _Fit) -> np.ndarray | None:
        """Returns which rows an earlier fit had, too; None if their digests do not show it."""
        if self.rows is None or earlier.rows is None:
            return None
        shared: np.ndarray = np.isin(self.rows, earlier.rows).max(axis=1)
        is_clone = earlier.family is self.family
        if is_clone and not np.isin(earlier.rows, self.rows).max(axis=1).all():
            # A transformer may have changed the features of its other rows.
            shared = np.ones(len(shared), bool)
        return shared if shared.any() else None

    def may_share_labels(self, earlier: _Fit) -> bool:
        """Returns whether an earlier fit with other rows counts as one on the same labels.

        The features of a label may differ between fits. Parts of one array are known by their
        memory; other arrays count as the same labels if they are as many.
        """
        overlaps = None if self.place is None else self.place.overlaps(earlier.place)
        is_same = self.labels.size == earlier.labels.size if overlaps is None else overlaps
        return is_same or earlier.family is self.family


class _Fits:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: list[_Fit] = []

    def with_others(self, fit: _Fit) -> tuple[Receipt, ...]:
        """Returns the receipts of a fit with those of earlier ones on its labels, and stores them.

        Clones of a head count as fits on the same rows, even if a transformer changed the rows
        in between.
        """
        others: list[tuple[Receipt, ...]] = []
        with self._lock:
            for earlier in self._known:
                shared = fit.shared_rows(earlier)
                if shared is not None:
                    # The earlier fit spends budget only on the shared rows of this fit, unless
                    # it may be on all labels with other features, of which a few are equal.
                    is_chance = shared.mean() < _CHANCE and fit.may_share_labels(earlier)
                    examples = None if is_chance or shared.all() else np.flatnonzero(shared)
                    uses = earlier.receipts
                    others.append(tuple(_on_labels(use, fit.labels, examples) for use in uses))
                elif fit.may_share_labels(earlier):
                    others.append(earlier.receipts)
            self._known.append(fit)
        together = Receipts.merged(*others, fit.receipts)
        if others:
            total = together.guarantee()
            _validate.warn(
                f"this is fit number {len(others) + 1} on rows whose labels were released before "
                "in this process, or on equally many labels, which count as those of the same "
                f"people; together epsilon={total.epsilon:.4g}, which guarantee() states. Give all "
                "fits one PrivateLabels: it tracks the budget and enforces it. Labels of other "
                "people need a PrivateLabels of their own, with people=."
            )
        return together


def _on_labels(use: Receipt, labels: LabelSet, examples: np.ndarray | None) -> Receipt:
    """Returns the receipt of an earlier fit for the labels of a later one, with an id of its own.

    A statement of models of both fits counts the earlier fit for both label sets. No budget was
    kept for both.
    """
    name = hashlib.sha256(f"{use.id} on {labels.name}".encode()).hexdigest()[: len(use.id)]
    return dataclasses.replace(use, labels=labels, examples=examples, id=name, budget_epsilon=None)


_FITS = _Fits()
