"""Ensembles of decision trees as arrays, from LightGBM's text, and as a Keras layer."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from scipy import sparse

_BLOCK = 4096
"""Rows scored at a time."""
_ZERO = np.float32(1e-35)
"""LightGBM's kZeroThreshold: numbers up to this size are zero."""
_SUM_BITS = 22
"""Bits of a sum of leaves: float32 has 24, and two are left for rounding the leaves."""


@dataclasses.dataclass(frozen=True, eq=False)
class Nodes:
    """The nodes of several trees, in one array (N,) per property.

    A row goes from a node to ``left`` if its ``feature`` is at most ``threshold``, or, if the node
    has a category set, if its code is in the set. Missing values (NaN), negative codes, and codes
    from V on go left where ``missing_left`` is true. A leaf is its own ``left`` and ``right``.
    """

    feature: np.ndarray  # int32 (N,)
    threshold: np.ndarray  # float32 (N,)
    left: np.ndarray  # int32 (N,)
    right: np.ndarray  # int32 (N,)
    missing_left: np.ndarray  # bool (N,)
    category_set: np.ndarray  # int32 (N,), a row of the trees' category_sets; -1 for a threshold
    value: np.ndarray  # float64 (N,)

    def __len__(self) -> int:
        return self.feature.size


@dataclasses.dataclass(frozen=True, eq=False)
class Trees:
    """An ensemble of decision trees, whose scores are sums of leaves."""

    roots: np.ndarray  # int32 (T,); tree t belongs to output t % C
    nodes: Nodes
    category_sets: np.ndarray  # bool (S, V)
    baseline: np.ndarray  # float64 (C,), added to the sums of leaves

    @property
    def depth(self) -> int:
        """The most nodes above a leaf."""
        nodes, level, depth = self.nodes, self.roots, 0
        while np.any(nodes.left[level] != level):
            level = np.union1d(nodes.left[level], nodes.right[level])
            depth += 1
        return depth

    @classmethod
    def from_lightgbm(cls, text: str, baseline: Sequence[float] | None = None) -> Trees:
        """Returns the trees of a LightGBM model.

        Args:
            text: ``model_to_string()`` of a booster with constant leaves whose trees are summed.
            baseline: the initial scores (C,) of its training, which LightGBM does not keep.

        Raises:
            ValueError: the trees have linear leaves, or are averaged.
        """
        head, *blocks = text.partition("\nend of trees")[0].split("\nTree=")
        trees = [
            dict(line.split("=", 1) for line in block.splitlines()[1:] if "=" in line)
            for block in blocks
        ]
        if "\naverage_output" in head or any(tree.get("is_linear", "0") != "0" for tree in trees):
            raise ValueError(
                "expected a LightGBM model that sums trees of constant leaves, got linear leaves "
                "or averaged trees. Train with boosting='gbdt' and linear_tree=False."
            )
        outputs = int(head.partition("num_tree_per_iteration=")[2].split()[0])
        all_sets = [members for tree in trees for members in _lightgbm_sets(tree)]
        sets = np.zeros((len(all_sets), max(map(len, all_sets), default=0)), bool)
        for row, members in zip(sets, all_sets, strict=True):
            row[: len(members)] = members
        parts = [_lightgbm_nodes(tree) for tree in trees]
        nodes = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
        sizes = [len(part["value"]) for part in parts]
        roots = np.cumsum([0, *sizes])[:-1].astype(np.int32)
        nodes["left"] += np.repeat(roots, sizes)
        nodes["right"] += np.repeat(roots, sizes)
        first_set = np.cumsum([0, *(int(tree["num_cat"]) for tree in trees)])[:-1]
        has_set = nodes["category_set"] >= 0
        nodes["category_set"][has_set] += np.repeat(first_set, sizes)[has_set].astype(np.int32)
        zero_is_missing = nodes.pop("zero_is_missing")
        initial = np.zeros(outputs) if baseline is None else np.asarray(baseline, np.float64)
        return cls(roots, _with_missing_zeros(nodes, zero_is_missing), sets, initial)

    @classmethod
    def weighted_sum(cls, parts: Sequence[tuple[Trees, float]], baseline: np.ndarray) -> Trees:
        """Returns trees whose scores are the weighted sum of those of the parts, plus (C,)."""
        trees = [part for part, _ in parts]
        sizes = [len(part.nodes) for part in trees]
        first_node = np.cumsum([0, *sizes])[:-1]
        first_set = np.cumsum([0, *(len(part.category_sets) for part in trees)])[:-1]
        codes = max(part.category_sets.shape[1] for part in trees)

        def moved(places: list[np.ndarray]) -> np.ndarray:
            pairs = zip(places, first_node, strict=True)
            return np.concatenate([part + first for part, first in pairs]).astype(np.int32)

        nodes = [part.nodes for part in trees]
        weights = [weight for _, weight in parts]
        sets = zip(nodes, first_set, strict=True)
        joined = Nodes(
            feature=np.concatenate([part.feature for part in nodes]),
            threshold=np.concatenate([part.threshold for part in nodes]),
            left=moved([part.left for part in nodes]),
            right=moved([part.right for part in nodes]),
            missing_left=np.concatenate([part.missing_left for part in nodes]),
            category_set=np.concatenate(
                [
                    np.where(part.category_set < 0, -1, part.category_set + first)
                    for part, first in sets
                ]
            ).astype(np.int32),
            value=np.concatenate(
                [weight * part.value for part, weight in zip(nodes, weights, strict=True)]
            ),
        )
        return cls(
            moved([part.roots for part in trees]),
            joined,
            np.concatenate([part._sets_of(codes) for part in trees]),
            baseline + sum(weight * part.baseline for part, weight in parts),
        )

    def scores(self, rows: Any) -> np.ndarray:
        """Returns the raw scores of rows (m, p), an array or CSR matrix, ``float64`` (m, C)."""
        size, depth, nodes = rows.shape[0], self.depth, self.nodes
        found = np.empty((size, len(self.baseline)))
        for start in range(0, size, _BLOCK):
            block = rows[start : start + _BLOCK]
            block = block.toarray() if sparse.issparse(block) else np.asarray(block, np.float32)
            node = np.broadcast_to(self.roots, (len(block), len(self.roots)))
            for _ in range(depth):
                is_left = self._goes_left(block, node)
                node = np.where(is_left, nodes.left[node], nodes.right[node])
            leaves = nodes.value[node].reshape(len(block), -1, len(self.baseline))
            found[start : start + _BLOCK] = leaves.sum(axis=1) + self.baseline
        return found

    def layer(self, **kwargs: Any) -> Any:
        """Returns a ``TreeEnsemble`` layer with the same scores; it is built on (m, p)."""
        from tf_labeldp.keras_layers import TreeEnsemble

        nodes, (num_sets, num_codes) = self.nodes, self.category_sets.shape
        layer = TreeEnsemble(
            len(self.roots),
            len(nodes),
            self.depth,
            len(self.baseline),
            num_sets,
            num_codes if num_sets else 0,
            **kwargs,
        )
        layer.build((None, int(nodes.feature.max(initial=0)) + 1))
        leaf, baseline = self._exact_parts()
        layer.set_weights(
            [
                self.roots,
                nodes.feature,
                nodes.threshold,
                np.stack([nodes.left, nodes.right], axis=1),
                nodes.missing_left.astype(np.int32),
                nodes.category_set,
                np.packbits(self.category_sets, axis=1, bitorder="little"),
                leaf,
                baseline,
            ]
        )
        return layer

    def _sets_of(self, codes: int) -> np.ndarray:
        """Returns the category sets with more codes, which go where unknown codes go."""
        sets = np.zeros((len(self.category_sets), codes), bool)
        nodes, places = self.nodes, np.flatnonzero(self.nodes.category_set >= 0)
        sets[nodes.category_set[places]] = nodes.missing_left[places, np.newaxis]
        sets[:, : self.category_sets.shape[1]] = self.category_sets
        return sets

    def _goes_left(self, rows: np.ndarray, node: np.ndarray) -> np.ndarray:
        nodes, value = self.nodes, np.take_along_axis(rows, self.nodes.feature[node], axis=1)
        left, missing = value <= nodes.threshold[node], np.isnan(value)
        if self.category_sets.size:
            row = nodes.category_set[node]
            is_category = (value >= 0) & (value < self.category_sets.shape[1])
            members = self.category_sets[row, np.where(is_category, value, 0).astype(np.int64)]
            left = np.where(row >= 0, members, left)
            missing = np.where(row >= 0, ~is_category, missing)
        return np.where(missing, nodes.missing_left[node], left)

    def _exact_parts(self) -> tuple[np.ndarray, np.ndarray]:
        """Returns leaves (N, 2) and baseline (C, 2), ``float32``: coarse parts and their rests.

        Coarse parts are multiples of a unit so large that their sums are exact in float32, in any
        order. The rests are so small that rounding their sums does not matter.
        """
        largest = np.maximum.reduceat(np.abs(self.nodes.value), self.roots).sum()
        bound = float(largest + np.abs(self.baseline).max())
        unit = 2.0 ** (math.ceil(math.log2(max(bound, 1e-30))) - _SUM_BITS)

        def parts(values: np.ndarray) -> np.ndarray:
            coarse = unit * np.round(values / unit)
            return np.stack([coarse, values - coarse], axis=1).astype(np.float32)

        return parts(self.nodes.value), parts(self.baseline)


def _rounded_down(thresholds: np.ndarray) -> np.ndarray:
    """Returns the largest float32 up to each threshold: it splits float32 inputs the same way."""
    with np.errstate(over="ignore"):
        rounded = np.asarray(thresholds, np.float64).astype(np.float32)
    return np.where(rounded > thresholds, np.nextafter(rounded, np.float32(-np.inf)), rounded)


def _bits(words: np.ndarray) -> np.ndarray:
    """Returns the bits of ``uint32`` words (S, W) as bool (S, 32 W), the lowest first."""
    octets = np.ascontiguousarray(words, "<u4").view(np.uint8)
    return np.unpackbits(octets, axis=1, bitorder="little").astype(bool)


def _numbers(tree: dict[str, str], name: str, dtype: Any = np.int64) -> np.ndarray:
    return np.array(tree.get(name, "").split(), dtype)


def _lightgbm_sets(tree: dict[str, str]) -> list[np.ndarray]:
    """Returns the category sets of a tree in LightGBM's text format, bool, of any lengths."""
    ends, words = _numbers(tree, "cat_boundaries"), _numbers(tree, "cat_threshold", np.uint32)
    return [_bits(words[np.newaxis, start:end])[0] for start, end in itertools.pairwise(ends)]


def _lightgbm_nodes(tree: dict[str, str]) -> dict[str, np.ndarray]:
    """Returns the arrays of a tree in LightGBM's text format: inner nodes, then leaves."""
    leaves = _numbers(tree, "leaf_value", np.float64)
    inner = len(leaves) - 1
    # A tree of one leaf has no inner node, whatever its other lines are.
    kinds = _numbers(tree, "decision_type")[:inner]
    is_categorical, default_left, missing_type = kinds & 1 > 0, kinds & 2 > 0, kinds >> 2 & 3
    thresholds = _numbers(tree, "threshold", np.float64)[:inner]
    # Numbers around zero become zero; without a type, a missing number does too.
    rounded = _rounded_down(thresholds)
    near_zero = np.where(thresholds < 0.0, np.nextafter(-_ZERO, np.float32(-1.0)), _ZERO)
    rounded = np.where(np.abs(rounded) <= _ZERO, near_zero, rounded)
    missing_left = np.where(missing_type == 0, thresholds >= 0.0, default_left) & ~is_categorical
    places = np.arange(inner, 2 * inner + 1)

    def children(name: str) -> np.ndarray:
        found = _numbers(tree, name)[:inner]
        return np.concatenate([np.where(found >= 0, found, inner + ~found), places])

    def of_all(values: np.ndarray, fill: Any, dtype: Any) -> np.ndarray:
        return np.concatenate([values, np.full(inner + 1, fill)]).astype(dtype)

    return {
        "feature": of_all(_numbers(tree, "split_feature")[:inner], 0, np.int32),
        "threshold": of_all(rounded, 0.0, np.float32),
        "left": children("left_child").astype(np.int32),
        "right": children("right_child").astype(np.int32),
        "missing_left": of_all(missing_left, False, bool),
        "zero_is_missing": of_all((missing_type == 1) & ~is_categorical, False, bool),
        "category_set": of_all(np.where(is_categorical, thresholds, -1), -1, np.int32),
        "value": np.concatenate([np.zeros(inner), leaves]),
    }


def _with_missing_zeros(arrays: dict[str, np.ndarray], zero_is_missing: np.ndarray) -> Nodes:
    """Returns nodes that send zeros where missing numbers go, at some places (``zero_as_missing``).

    Such a node asks whether a number is above zero; if not, a second one asks whether it is below;
    and a third one compares the number with the threshold.
    """
    first = np.flatnonzero(zero_is_missing)
    if not first.size:
        return Nodes(**arrays)
    size = len(zero_is_missing)
    second = np.arange(size, size + len(first))
    third = second + len(first)
    default = np.where(arrays["missing_left"], arrays["left"], arrays["right"])[first]
    arrays = {
        name: np.concatenate([values, values[first], values[first]])
        for name, values in arrays.items()
    }
    arrays["threshold"][first] = _ZERO
    arrays["threshold"][second] = np.nextafter(-_ZERO, np.float32(-1.0))
    arrays["left"][first], arrays["right"][first] = second, third
    arrays["left"][second], arrays["right"][second] = third, default
    arrays["missing_left"][first], arrays["missing_left"][second] = True, False
    return Nodes(**arrays)
