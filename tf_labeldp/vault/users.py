"""The public users of examples: the unit of privacy is all labels of one user."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from tf_labeldp import _validate
from tf_labeldp._columns import Column
from tf_labeldp.accounting import Public, Receipts, Setting, public_input
from tf_labeldp.mechanisms.random_bits import uniform_below, uniform_integers
from tf_labeldp.mechanisms.users import UsersOfRows


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
        # The choice looks at no label, so its seed may be public. It is fixed, since a store that
        # is opened again has to find the same examples.
        order = np.random.default_rng(0).random(codes.size)
        users = UsersOfRows(codes)
        rows, starts = users.by_user(order)
        return np.sort(rows[np.arange(codes.size) - np.repeat(starts, users.counts) < self.at_most])

    def rows_of_each(self, num_rows: int, rng: Setting[np.random.Generator | None]) -> np.ndarray:
        """Returns k row numbers for each user, ``int64`` (U, k), without looking at labels."""
        users = UsersOfRows(self.codes(num_rows))
        shuffled, starts = users.by_user(uniform_integers(num_rows, rng))
        places = np.tile(np.arange(self.at_most or 1), (starts.size, 1))
        missing = places >= users.counts[:, np.newaxis]
        owners = np.nonzero(missing)[0]
        places[missing] = uniform_below(users.counts[owners], rng)
        return shuffled[starts[:, np.newaxis] + places]
