"""The public users of examples: the unit of privacy is all labels of one user."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from tf_labeldp import _validate
from tf_labeldp._columns import Column
from tf_labeldp.accounting import Charge, Public, Receipts, Setting, public_input
from tf_labeldp.mechanisms import AggregateMechanism, LabelMechanism, Mechanism
from tf_labeldp.mechanisms.random_bits import uniform_below, uniform_integers


@dataclasses.dataclass(frozen=True, eq=False)
class Users:
    """The public users of examples, for ``PrivateLabels(users=)``: one person has several labels.

    Args:
        ids: the user of each example (n,): integers, texts or other hashable values of one type,
            since 1 and "1" are two users; none missing.
        at_most: k; of a user with more examples k are chosen at random, without labels, and the
            others are not used: the features are ``x[labels.indices]``. None uses all: heads then
            weigh the rows of users who have many.

    Raises:
        TypeError, ValueError: ``at_most`` is not a positive integer.

    Example:
        >>> from tf_labeldp import PrivacyBudget, PrivateLabels
        >>> patients = Users(["Ada", "Ada", "Ada", "Bob"], at_most=2)
        >>> labels = PrivateLabels([0, 1, 1, 0], 2, budget=PrivacyBudget(1.0), users=patients)
        >>> len(labels), labels.unit, labels.group_size
        (3, 'user', 2)
    """

    ids: Public[Any] = dataclasses.field(repr=False)
    at_most: int | None = dataclasses.field(default=None, kw_only=True)
    receipts: Receipts = dataclasses.field(default=Receipts(), init=False, repr=False)

    def __post_init__(self) -> None:
        public = public_input(self.ids)
        if self.at_most is not None:
            _validate.integer_at_least("at_most", self.at_most, 1)
        object.__setattr__(self, "ids", public.value)
        object.__setattr__(self, "receipts", public.receipts)

    @classmethod
    def of(cls, users: Setting[Any]) -> Users | None:
        """Returns users (n,) as a value; None stays."""
        return users if users is None or isinstance(users, Users) else cls(users)

    def codes(self, num_rows: int) -> np.ndarray:
        """Returns users as numbers 0..U-1 in their sorted order, ``int64`` (n,)."""
        values = Column.of(self.ids).names("users", (num_rows,))
        if values.dtype.kind != "O":
            return np.unique(values, return_inverse=True)[1].astype(np.int64)
        entries = values.tolist()
        distinct: Any = dict.fromkeys(entries)
        try:
            distinct = sorted(distinct)
        except TypeError:  # Objects without an order are numbered as they appear.
            distinct = list(distinct)
        places = dict(zip(distinct, range(len(distinct)), strict=True))
        return np.fromiter(map(places.__getitem__, entries), np.int64, len(entries))

    def some_rows(self, codes: Setting[np.ndarray]) -> np.ndarray:
        """Returns at most k rows of each user, a repeatable random choice, ``int64``, rising."""
        order = np.random.default_rng(0).random(codes.size)
        rows, starts, counts = _by_user(codes, order)
        return np.sort(rows[np.arange(codes.size) - np.repeat(starts, counts) < self.at_most])

    def rows_of_each(self, num_rows: int, rng: Setting[np.random.Generator | None]) -> np.ndarray:
        """Returns k row numbers for each user, ``int64`` (U, k), without looking at labels."""
        codes = self.codes(num_rows)
        shuffled, starts, counts = _by_user(codes, uniform_integers(num_rows, rng))
        places = np.tile(np.arange(self.at_most or 1), (counts.size, 1))
        missing = places >= counts[:, np.newaxis]
        owners = np.nonzero(missing)[0]
        places[missing] = uniform_below(counts[owners], rng)
        return shuffled[starts[:, np.newaxis] + places]


def _by_user(
    codes: np.ndarray, order_within: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns row numbers sorted by user (n,), and the starts and counts of the users (U,)."""
    counts = np.bincount(codes)
    return np.lexsort((order_within, codes)), np.cumsum(counts) - counts, counts


def without_names(users: np.ndarray) -> np.ndarray:
    """Returns users as numbers in the order of their first rows, whatever their names are."""
    _, first, codes = np.unique(users, return_index=True, return_inverse=True)
    return np.argsort(np.argsort(first))[codes].astype(np.int64)


def rows_of_same_users(users: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """Returns all rows of the users of these rows, ``int64``, rising."""
    chosen = np.zeros(int(users.max(initial=-1)) + 1, dtype=bool)
    chosen[users[rows]] = True
    return np.flatnonzero(chosen[users])


def charge_for_users(
    charge: Charge, mechanism: Mechanism, users: np.ndarray, public_input: Any
) -> Charge:
    """Returns the cost of a use for all labels of one user, from its cost for one label."""
    if isinstance(mechanism, AggregateMechanism):
        return charge.for_group(mechanism.group_size(users, public_input))
    most = int(np.bincount(users).max(initial=1))
    composes = isinstance(mechanism, LabelMechanism) and mechanism.draws_are_independent
    is_ours = Mechanism.is_of_this_library(mechanism)
    return charge.repeated(most) if is_ours and composes else charge.for_group(most)
