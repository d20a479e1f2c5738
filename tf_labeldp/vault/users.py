"""The public users of examples: the unit of privacy is all labels of one user."""

from __future__ import annotations

from typing import Any

import numpy as np

from tf_labeldp import _validate
from tf_labeldp._columns import Column
from tf_labeldp.accounting import Charge
from tf_labeldp.mechanisms import AggregateMechanism
from tf_labeldp.mechanisms.base import Mechanism, is_of_this_library


def user_codes(users: Any, num_rows: int) -> np.ndarray:
    """Returns users as numbers 0..U-1 in their sorted order, ``int64`` (n,)."""
    values = Column.of(users).names("users", (num_rows,))
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


def without_names(users: np.ndarray) -> np.ndarray:
    """Returns users as numbers in the order of their first rows, whatever their names are."""
    _, first, codes = np.unique(users, return_index=True, return_inverse=True)
    return np.argsort(np.argsort(first))[codes].astype(np.int64)


def rows_by_user(
    users: np.ndarray, order_within: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns row numbers sorted by user (n,), and the starts and counts of the users (U,)."""
    counts = np.bincount(users)
    return np.lexsort((order_within, users)), np.cumsum(counts) - counts, counts


def some_rows(users: np.ndarray, most: int) -> np.ndarray:
    """Returns at most k rows of each user, a repeatable random choice, ``int64``, rising."""
    rows, starts, counts = rows_by_user(users, np.random.default_rng(0).random(users.size))
    return np.sort(rows[np.arange(users.size) - np.repeat(starts, counts) < most])


def rows_of_same_users(users: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """Returns all rows of the users of these rows, ``int64``, rising."""
    chosen = np.zeros(int(users.max(initial=-1)) + 1, dtype=bool)
    chosen[users[rows]] = True
    return np.flatnonzero(chosen[users])


def mean_group_size(labels: Any) -> float:
    """Returns how many labels the user of a label has on average; 1 without users."""
    users = labels.users
    return 1.0 if users is None else float(np.square(np.bincount(users)).sum() / users.size)


def charge_for_users(
    charge: Charge, mechanism: Mechanism, users: np.ndarray, public_input: Any
) -> Charge:
    """Returns the cost of a use for all labels of one user, from its cost for one label."""
    if isinstance(mechanism, AggregateMechanism):
        return charge.for_group(mechanism.group_size(users, public_input))
    most = int(np.bincount(users).max(initial=1))
    composes = is_of_this_library(mechanism) and getattr(mechanism, "draws_are_independent", False)
    return charge.repeated(most) if composes else charge.for_group(most)


def epsilon_of_one_label(labels: Any, epsilon: Any) -> float:
    """Returns the epsilon of a mechanism that costs this epsilon for all labels of a user."""
    return _validate.positive_finite("epsilon", epsilon) / labels.group_size
