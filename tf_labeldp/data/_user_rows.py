"""Rows grouped by user: exactly k for each, so that a user is one unit of privacy."""

from __future__ import annotations

from typing import Any

import numpy as np

from tf_labeldp.mechanisms import _random


def rows_of_users(
    users: Any, num_rows: int, rows_per_user: int, rng: np.random.Generator | None
) -> np.ndarray:
    """Returns k row numbers for each user, ``int64`` (num_users, k).

    A user with more than k rows keeps a random k of them; one with fewer has all of them, and
    random repeats of them up to k (``ghazi2024``, section 6). Labels are not looked at.

    Args:
        users: user of each row, (n,): integers, texts or any hashable values.
        num_rows: n.
        rows_per_user: k.
        rng: None for the operating system's random bits.

    Raises:
        ValueError: another length than n, or rows without a user.
    """
    codes = _user_codes(users, num_rows)
    counts = np.bincount(codes)
    starts = np.cumsum(counts) - counts
    # Rows of a user stand together, in a random order.
    shuffled = np.lexsort((_random.uniform_integers(num_rows, rng), codes))
    places = np.tile(np.arange(rows_per_user), (counts.size, 1))
    missing = places >= counts[:, np.newaxis]
    owners = np.nonzero(missing)[0]
    places[missing] = _random.uniform_below(counts[owners], rng)
    return shuffled[starts[:, np.newaxis] + places]


def _user_codes(users: Any, num_rows: int) -> np.ndarray:
    """Returns users as numbers 0..num_users-1, ``int64`` (n,)."""
    array = np.asarray(users.numpy() if hasattr(users, "numpy") else users)
    if array.shape != (num_rows,):
        raise ValueError(
            f"users must have shape ({num_rows},), one user for each example, got shape "
            f"{array.shape}. Make tuples into texts first."
        )
    if array.dtype.kind == "O":  # not sortable in general
        missing = sum(user is None or user != user for user in array)
        numbers = {user: code for code, user in enumerate(dict.fromkeys(array))}
        codes = np.fromiter((numbers[user] for user in array), np.int64, array.size)
    else:
        missing = int(np.count_nonzero(array != array))  # NaN and NaT
        codes = np.unique(array, return_inverse=True)[1].astype(np.int64)
    if missing:
        raise ValueError(
            f"users must be known, but {missing} of {num_rows} are missing (None or NaN). Give "
            "each of these rows a user of its own, or leave them out, by a rule that does not look "
            "at labels."
        )
    return codes
