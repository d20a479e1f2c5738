"""Where the labels of one fit are: in a vault that was given, or in one that is made of an array.

Fits on arrays have no vault in common, so this process keeps account of them: each row of features
is known by a keyed digest, and a head that is fitted on rows which earlier heads were fitted on
states the sum. Clones of one head (by cross-validation, a search, an ensemble) count as fits on the
same rows also where a transformer has changed these in between.
"""

from __future__ import annotations

import dataclasses
import multiprocessing
import secrets
import threading
from typing import Any

import numpy as np

from tf_labeldp import _validate
from tf_labeldp.accounting import PrivacyBudget, Receipt, compose_receipts
from tf_labeldp.accounting._receipts import Receipts, merge_receipts
from tf_labeldp.features._reader import Rows
from tf_labeldp.mechanisms import AggregateMechanism, LabelMomentMechanism
from tf_labeldp.vault import NoisyStatistic, PrivateLabels

_BY_THIS_PROCESS = (
    "an array of labels has no vault: other uses of these labels than the fits of this process "
    "that are counted here were none, or are added to this statement"
)


@dataclasses.dataclass(frozen=True)
class LabelArguments:
    """What a head was told about the labels and their release; see ``PrivateRidge``."""

    epsilon: float
    delta: float
    num_classes: int | None
    classes: Any
    low: float | None
    high: float | None
    num_labels: int | None
    noise: str
    key: str | None
    insecure_seed: int | None


class LabelSource:
    """Labels that can be released once, as moments with public rows.

    Args:
        told: the head's arguments.
        labels: a ``PrivateLabels``, or labels as ``PrivateRidge.fit`` takes them.
    """

    def __init__(self, told: LabelArguments, labels: Any) -> None:
        self._told = told
        self._is_array = not isinstance(labels, PrivateLabels)
        given = {
            "num_classes or classes": told.num_classes is not None or told.classes is not None,
            "low and high": told.low is not None or told.high is not None,
            "num_labels": told.num_labels is not None,
        }
        if isinstance(labels, PrivateLabels):
            self._check_vault(labels)
            self.vault = labels
        elif sum(given.values()) != 1:
            found = [name for name, is_given in given.items() if is_given]
            raise ValueError(
                "the head must be told what the labels are, by exactly one of num_classes (or "
                "classes, their values), low and high (numbers), and num_labels (rows of zeros and "
                f"ones); got {' together with '.join(found) or 'none of them'}. They are public, "
                "so they are never taken from the labels; a PrivateLabels knows them."
            )
        else:
            self.vault = self._new_vault(labels)
        self.label_range = self.vault.label_range
        self.class_values: np.ndarray | None = None
        if self.label_range is None and self.vault.num_labels is None:
            self.class_values = self.vault.decode(np.arange(self.vault.num_classes))
        if not self.vault.has_draw(told.key):
            self.vault.check_budget(self.mechanism(1.0))

    def __len__(self) -> int:
        return len(self.vault)

    def check_length(self, num_rows: int) -> None:
        """Raises unless there are so many labels."""
        if len(self) != num_rows:
            raise ValueError(
                f"there are {num_rows} rows of features and {len(self)} labels; give one row a "
                "label, in the same order."
            )

    @property
    def num_labels(self) -> int | None:
        """The number of labels in a row, or None."""
        return self.vault.num_labels

    @property
    def code_variance(self) -> float:
        """The largest variance of the code of a label, summed over the columns."""
        if self.vault.num_labels is not None:
            return 0.25 * self.vault.num_labels
        if self.label_range is not None:
            return 0.25 * (self.label_range[1] - self.label_range[0]) ** 2
        k = self.vault.num_classes
        return 0.25 if k == 2 else 1.0 - 1.0 / k

    def mechanism(self, max_l1: float) -> LabelMomentMechanism:
        """Returns the mechanism of the release, for rows of unit norm and L1 norm ``max_l1``."""
        told, vault = self._told, self.vault
        kind: dict[str, Any] = {}
        if vault.num_labels is not None:
            kind["num_labels"] = vault.num_labels
        elif vault.label_range is not None:
            kind["low"], kind["high"] = vault.label_range
        else:
            kind["num_classes"] = vault.num_classes
        return LabelMomentMechanism(
            told.epsilon,
            told.delta,
            max_l1=max_l1 if told.noise == "laplace" else None,
            noise=told.noise,
            **kind,
        )

    def release(
        self,
        mechanism: AggregateMechanism,
        public_input: Any,
        carried: Receipts,
        rows: np.ndarray | None,
        family: object,
    ) -> tuple[NoisyStatistic, Receipts]:
        """Returns the noisy statistic, charged to the vault, and all that a head of it is made of.

        Args:
            mechanism: of the release.
            public_input: of the release.
            carried: what the features were made of, as far as it is known.
            rows: keyed digests of the rows of features, (n,); None where there are none.
            family: the same for clones of one head.
        """
        if not self._is_array:
            self.vault.adopt(carried)
        made = self.vault.release(mechanism, public_input=public_input, key=self._told.key)
        if not self._is_array:
            return made, merge_receipts(carried, made.receipts)
        own = _with_assumption(made.receipts[0], _BY_THIS_PROCESS)
        return made, merge_receipts(carried, _FITS.with_others(own, rows, family))

    def _new_vault(self, labels: Any) -> PrivateLabels:
        """Returns a vault of an array, with the budget of one release."""
        if multiprocessing.parent_process() is not None:
            raise RuntimeError(
                "labels were given as an array in a process that another one started (n_jobs?). "
                "Such processes know nothing of each other's fits, and no statement could add them "
                "up. Use n_jobs=1, or open a PrivateLabels(..., store=path) in each process."
            )
        told = self._told
        kind: dict[str, Any] = {"low": told.low, "high": told.high, "num_labels": told.num_labels}
        classes = {"num_classes": told.num_classes, "classes": told.classes}
        self._check_arguments()
        return PrivateLabels(
            labels,
            **classes,
            **kind,
            budget=PrivacyBudget(told.epsilon, told.delta),
            insecure_seed=told.insecure_seed,
        )

    def _check_arguments(self) -> None:
        """Raises for arguments of the release, before labels are looked at."""
        told = self._told
        number = told.num_classes
        if number is None and told.classes is not None:
            number = len(told.classes)
        LabelMomentMechanism(
            told.epsilon,
            told.delta,
            num_classes=number,
            low=told.low,
            high=told.high,
            num_labels=told.num_labels,
            max_l1=1.0 if told.noise == "laplace" else None,
            noise=told.noise,
        )

    def _check_vault(self, vault: PrivateLabels) -> None:
        told = self._told
        if told.insecure_seed is not None:
            raise ValueError(
                "insecure_seed must be None with a PrivateLabels: it has its own source of random "
                "bits. Use PrivateLabels(..., insecure_seed=...) for a repeatable run."
            )
        found: dict[str, Any]
        if vault.num_labels is not None:
            found = {"num_labels": vault.num_labels}
        elif vault.label_range is None:
            found = {"num_classes": vault.num_classes, "classes": vault.classes}
        else:
            found = {"low": vault.label_range[0], "high": vault.label_range[1]}
        for name in ("num_classes", "classes", "low", "high", "num_labels"):
            given = getattr(told, name)
            given = tuple(given) if name == "classes" and given is not None else given
            if given is not None and given != found.get(name):
                raise ValueError(
                    f"{name} is not that of the PrivateLabels, which has {found}. Leave it out: "
                    "the vault knows its labels."
                )


class _Fits:
    """The fits on arrays of this process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: list[tuple[Receipt, np.ndarray | None, object]] = []

    def with_others(self, receipt: Receipt, rows: np.ndarray | None, family: object) -> Receipts:
        """Returns a receipt with those of earlier fits on the same rows, and remembers it."""
        others = []
        with self._lock:
            for earlier, earlier_rows, earlier_family in self._known:
                shared = None
                if rows is not None and earlier_rows is not None:
                    shared = np.isin(rows, earlier_rows)
                    if earlier_family is family and not np.isin(earlier_rows, rows).all():
                        shared[:] = True  # rows of it may be here with other features
                if shared is not None and shared.any():
                    # The earlier fit as the rows of this one saw it.
                    examples = None if shared.all() else np.flatnonzero(shared)
                    others.append(
                        dataclasses.replace(earlier, labels=receipt.labels, examples=examples)
                    )
                elif earlier_family is family:
                    others.append(earlier)
            self._known.append((receipt, rows, family))
        if others:
            total = compose_receipts([*others, receipt])
            _validate.warn(
                f"this is fit number {len(others) + 1} on rows whose labels were released before "
                f"in this process; together epsilon={total.epsilon:.4g}, which guarantee() states. "
                "One PrivateLabels for all of them keeps account, and refuses to pass its budget."
            )
        return merge_receipts(others, [receipt])


_FITS = _Fits()
_KEY = np.frombuffer(secrets.token_bytes(8 * 4097), np.uint64) | np.uint64(1)
"""Random odd numbers, a new draw in each process."""


def row_digests(block: np.ndarray) -> np.ndarray:
    """Returns a keyed digest of each row of numbers (m, d), ``uint64`` (m,).

    The random key stays in the process. Rows that differ have the same digest with a probability
    of about 2^-32 at most; such rows would be taken for the same, which only overstates.
    """
    bits = np.ascontiguousarray(block, dtype=np.float32).view(np.uint32).astype(np.uint64)
    width = bits.shape[1]
    keys = np.resize(_KEY[1:], width)
    if width > keys.size:
        keys = np.resize(keys, width)
    # Places beyond the key's length are told apart by a second factor.
    turn = (np.arange(width, dtype=np.uint64) // np.uint64(_KEY.size - 1)) * np.uint64(2)
    found = (bits * (keys + turn * _KEY[0])).sum(axis=1, dtype=np.uint64)
    found ^= found >> np.uint64(32)
    return found * _KEY[0] ^ np.uint64(width)


def array_digests(inputs: Any) -> np.ndarray | None:
    """Returns digests of the rows of inputs that are numbers, of whatever kind; None of others."""
    if isinstance(inputs, np.ndarray) and inputs.dtype.kind in "biuf":
        array = inputs
    else:
        try:
            array = Rows(inputs, flatten=True).array()
        except (TypeError, ValueError):
            array = np.asarray(None if isinstance(inputs, tuple) else inputs)
    if array.dtype.kind not in "biuf" or array.ndim == 0 or not array.size:
        return None
    rows = array.reshape(len(array), -1)
    step = max(1, (1 << 24) // rows.shape[1])
    return np.concatenate([row_digests(rows[at : at + step]) for at in range(0, len(rows), step)])


def _with_assumption(receipt: Receipt, text: str) -> Receipt:
    charge = receipt.charge
    notes = tuple(dict.fromkeys((*charge.assumptions, text)))
    return dataclasses.replace(receipt, charge=dataclasses.replace(charge, assumptions=notes))
