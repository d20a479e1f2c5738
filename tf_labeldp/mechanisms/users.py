"""The users of rows: what a use costs for all labels of one, and how far they move moments."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable
from typing import Any

import numpy as np

from tf_labeldp import _validate
from tf_labeldp.accounting import Charge
from tf_labeldp.mechanisms.base import AggregateMechanism, LabelMechanism, Mechanism

_SIGNS = 10
"""The most rows of a user whose signs are tried, 512 combinations up to the sign of all."""
_WIDEST = 512
"""Rows of a user, or features, up to which eigenvalues are computed; of more, norms are added."""
_FEW = 64
"""Up to here, or up to the number of features, the entries of a user's Gram matrix are added up."""
_ENTRIES = 1 << 21
"""Numbers per block of users."""


@dataclasses.dataclass(frozen=True, eq=False)
class UsersOfRows:
    """The public user of each of n rows.

    Attributes:
        codes: users as numbers 0..U-1, ``int64`` (n,).
    """

    codes: np.ndarray

    @classmethod
    def one_per_row(cls, num_rows: int) -> UsersOfRows:
        """Returns users with one row each."""
        return cls(np.arange(num_rows))

    def __len__(self) -> int:
        return len(self.codes)

    @functools.cached_property
    def counts(self) -> np.ndarray:
        """The number of each user's rows, ``int64`` (U,)."""
        return np.bincount(self.codes)

    @property
    def most(self) -> int:
        """The largest number of rows of a user, at least 1."""
        return int(self.counts.max(initial=1))

    @property
    def mean(self) -> float:
        """The number of rows that the user of a row has on average; 1 without rows."""
        return float(np.square(self.counts).sum() / len(self)) if len(self) else 1.0

    def at(self, rows: np.ndarray) -> UsersOfRows:
        """Returns the users of these rows alone, numbered from 0 in the same order."""
        codes = self.codes[rows]
        numbers = np.cumsum(np.bincount(codes) > 0) - 1
        return UsersOfRows(numbers[codes])

    def in_order_of_rows(self) -> UsersOfRows:
        """Returns users numbered in the order of their first rows, whatever their names are."""
        _, first, codes = np.unique(self.codes, return_index=True, return_inverse=True)
        return UsersOfRows(np.argsort(np.argsort(first))[codes].astype(np.int64))

    def random_share(self, share: float, seed: int) -> np.ndarray:
        """Returns which rows are those of a random share of the users, ``bool`` (n,)."""
        share = _validate.number_in("held_out", share, "(0, 1)")
        order = np.random.default_rng(_validate.integer_at_least("seed", seed, 0))
        size = self.counts.size
        return np.isin(self.codes, order.permutation(size)[: round(share * size)])

    def rows_of_same(self, rows: np.ndarray) -> np.ndarray:
        """Returns all rows of the users of these rows, ``int64``, rising."""
        chosen = np.zeros(self.counts.size, dtype=bool)
        chosen[self.codes[rows]] = True
        return np.flatnonzero(chosen[self.codes])

    def by_user(self, order_within: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray]:
        """Returns row numbers sorted by user (n,), and the start of each user's rows (U,)."""
        keys = (self.codes,) if order_within is None else (order_within, self.codes)
        return np.lexsort(keys), np.cumsum(self.counts) - self.counts

    def charge(self, mechanism: Mechanism, for_one: Charge, public_input: Any) -> Charge:
        """Returns the cost of a use for all labels of one user, from its cost for one label."""
        if isinstance(mechanism, AggregateMechanism):
            return for_one.for_group(mechanism.group_size(self.codes, public_input))
        composes = isinstance(mechanism, LabelMechanism) and mechanism.draws_are_independent
        is_ours = Mechanism.is_of_this_library(mechanism)
        return (for_one.repeated if is_ours and composes else for_one.for_group)(self.most)

    def sums_of_norms(self, blocks: Iterable[np.ndarray], order: int) -> np.ndarray:
        """Returns the sums of the L1 or L2 norms of each user's rows, ``float64`` (U,)."""
        norms = [np.linalg.norm(block, order, axis=1) for block in blocks]
        return np.bincount(self.codes, weights=self._joined(norms))

    def norms(self, blocks: Iterable[np.ndarray], *, by_signs: bool) -> np.ndarray:
        """Returns a bound on ``||sum_i x_i d_i^T||`` for each user's rows x_i, ``float64`` (U,).

        The d_i are any vectors of norm at most one, with ``by_signs`` any numbers in [-1, 1]: the
        changes of codes, divided by the largest. The bounds are proved in docs/theory.md (users);
        with ``by_signs`` they are exact up to ten rows.

        Args:
            blocks: rows (m, d) in order, n in total.
            by_signs: whether codes are numbers, or vectors whose entries change separately.
        """
        rows, (order, starts) = self._joined(list(blocks)), self.by_user()
        norms = np.zeros(self.counts.size)
        for k in np.unique(self.counts[self.counts > 0]):
            of_size = np.flatnonzero(self.counts == k)
            tried = 1 << (int(k) - 1) if by_signs and k <= _SIGNS else 1
            step = max(1, _ENTRIES // int(k * max(rows.shape[1], min(k, _WIDEST), tried)))
            for first in range(0, of_size.size, step):
                some = of_size[first : first + step]
                own = rows[order[starts[some, np.newaxis] + np.arange(k)]]
                norms[some] = _norms(own, by_signs=by_signs)
        return norms

    def _joined(self, blocks: list[np.ndarray]) -> np.ndarray:
        rows = np.concatenate(blocks)
        _validate.one_label_per_row(len(rows), len(self))
        return rows


def _norms(rows: np.ndarray, *, by_signs: bool) -> np.ndarray:
    """Returns the norms (m,) of m users with k rows each, (m, k, d)."""
    k, width = rows.shape[1:]
    if min(k, width) > _WIDEST:
        return np.linalg.norm(rows, axis=2).sum(axis=1)
    other = rows.transpose(0, 2, 1)
    if k > max(width, _FEW):
        squares = k * np.linalg.eigvalsh(other @ rows)[:, -1]
        return np.minimum(np.sqrt(squares), np.linalg.norm(rows, axis=2).sum(axis=1))
    gram = rows @ other
    if by_signs and 2 < k <= _SIGNS:
        signs = _signs(k)
        return np.sqrt(((signs @ gram) * signs).sum(axis=2).max(axis=1))
    squares = np.abs(gram).sum(axis=(1, 2))
    if k > 2:
        squares = np.minimum(squares, k * np.linalg.eigvalsh(gram)[:, -1])
    return np.sqrt(squares)


@functools.cache
def _signs(k: int) -> np.ndarray:
    """Returns all signs of k numbers up to the sign of all, (2^(k-1), k)."""
    bits = np.arange(1 << (k - 1))[:, np.newaxis] >> np.arange(k)
    return 1.0 - 2.0 * (bits & 1)
