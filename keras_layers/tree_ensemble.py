"""The layers of boosted trees: category codes of a table, and the sum of an ensemble of trees."""

from collections.abc import Sequence
from typing import Annotated, Any

import keras
from keras import ops

from ._fixed_features import FixedLayer
from ._released_dense import CarriesReceipts

# The values of a byte's bits, the lowest first.
_POWERS = [1, 2, 4, 8, 16, 32, 64, 128]


@keras.saving.register_keras_serializable(package="tf_labeldp")
class CategoryCodes(CarriesReceipts, FixedLayer):
    """Turns places in vocabularies into category codes, as ``TableCodes`` does.

    Takes and returns ``float32`` (batch, columns). In each column where ``is_categorical`` is true,
    place k becomes code ``k - 1``, and place zero, which Keras's lookups give to unknown values,
    becomes NaN. The other columns pass unchanged.
    """

    def __init__(self, is_categorical: Sequence[bool], **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.is_categorical = [bool(column) for column in is_categorical]

    def call(self, inputs: Any) -> Any:
        """Returns numbers and codes (batch, columns)."""
        rows = ops.cast(inputs, "float32")
        is_categorical = ops.convert_to_tensor([self.is_categorical])
        codes = ops.where(rows > 0.0, rows - 1.0, float("nan"))
        return ops.where(is_categorical, codes, rows)

    def compute_output_shape(self, input_shape: Any) -> Any:
        """Returns the shape of the inputs."""
        return tuple(input_shape)


@keras.saving.register_keras_serializable(package="tf_labeldp")
class TreeEnsemble(CarriesReceipts, FixedLayer):
    """Adds up the leaves that a row reaches in an ensemble of decision trees.

    Takes (batch, p), where NaN is a missing value and categories are codes 0, 1, ...; returns
    ``float32`` (batch, num_outputs). Tree t belongs to output ``t % num_outputs``.

    A node with ``category_set`` -1 sends a row to its first child if the row's ``feature`` is at
    most the ``threshold``; a node with a category set does so if the code is in the set. Missing
    values, and codes below 0 or from ``num_categories`` on, go to the first child if
    ``missing_left`` is one. Both children of a leaf are the leaf itself.

    Scores are exact to float32 for any number of trees: ``leaf`` and ``baseline`` have a coarse
    part, whose sums are exact, and the small rest. ``Trees.layer()`` of ``tf_labeldp.boosting``
    makes them. Set the weights by ``set_weights([root, feature, threshold, children, missing_left,
    category_set, category_sets, leaf, baseline])``; ``category_sets`` has eight codes per byte, the
    lowest bit first.

    Args:
        num_trees: number of trees, a multiple of num_outputs.
        num_nodes: number of nodes of all trees, leaves included.
        depth: the most nodes above a leaf.
        num_outputs: number of scores per row.
        num_category_sets: number of sets of categories; zero if no node has one.
        num_categories: number of codes in each set.

    Example:
        >>> layer = TreeEnsemble(num_trees=6, num_nodes=18, depth=1, num_outputs=3)
        >>> layer(keras.ops.zeros((5, 2))).shape
        TensorShape([5, 3])
    """

    def __init__(
        self,
        num_trees: int,
        num_nodes: int,
        depth: int,
        num_outputs: int = 1,
        num_category_sets: int = 0,
        num_categories: int = 0,
        **kwargs: Annotated[Any, "setting"],
    ) -> None:
        super().__init__(**kwargs)
        self.num_trees = num_trees
        self.num_nodes = num_nodes
        self.depth = depth
        self.num_outputs = num_outputs
        self.num_category_sets = num_category_sets
        self.num_categories = num_categories

    def build(self, input_shape: Any) -> None:
        """Adds the arrays of nodes."""
        nodes = (self.num_nodes,)
        self._add_fixed("root", (self.num_trees,), dtype="int32")
        self._add_fixed("feature", nodes, dtype="int32")
        self._add_fixed("threshold", nodes)
        self._add_fixed("children", (*nodes, 2), dtype="int32")
        self._add_fixed("missing_left", nodes, dtype="int32")
        self._add_fixed("category_set", nodes, dtype="int32")
        sets = (self.num_category_sets, -(-self.num_categories // 8))
        self._add_fixed("category_sets", sets, dtype="uint8")
        self._add_fixed("leaf", (*nodes, 2))
        self._add_fixed("baseline", (self.num_outputs, 2))
        super().build(input_shape)

    def call(self, inputs: Any) -> Any:
        """Returns the scores (batch, num_outputs)."""
        rows = ops.cast(inputs, "float32")
        children = ops.reshape(self.children, (-1,))

        def next_level(_: Any, node: Any) -> Any:
            value = ops.take_along_axis(rows, ops.take(self.feature, node), axis=1)
            is_left = value <= ops.take(self.threshold, node)
            is_missing = ops.isnan(value)
            if self.num_category_sets:
                is_member, is_unknown = self._in_category_set(value, node)
                has_set = ops.take(self.category_set, node) >= 0
                is_left = ops.where(has_set, is_member, is_left)
                is_missing = ops.where(has_set, is_unknown, is_missing)
            missing_left = ops.take(self.missing_left, node) > 0
            is_left = ops.where(is_missing, missing_left, is_left)
            return ops.take(children, 2 * node + ops.cast(ops.logical_not(is_left), "int32"))

        # Shape (batch, trees): the node that each row has reached in each tree.
        node = ops.zeros_like(rows[:, :1], dtype="int32") + ops.convert_to_tensor(self.root)
        node = ops.fori_loop(0, self.depth, next_level, node)
        leaves = ops.take(self.leaf, node, axis=0)
        rounds = self.num_trees // self.num_outputs
        leaves = ops.reshape(leaves, (-1, rounds, self.num_outputs, 2))
        parts = ops.sum(leaves, axis=1) + self.baseline
        return parts[..., 0] + parts[..., 1]

    def _in_category_set(self, value: Any, node: Any) -> Any:
        """Returns whether codes are in the sets of their nodes, and whether they are unknown."""
        is_known = ops.logical_and(value >= 0.0, value < self.num_categories)
        code = ops.cast(ops.where(is_known, value, 0.0), "int32")
        row = ops.maximum(ops.take(self.category_set, node), 0)
        place = row * self.category_sets.shape[1] + code // 8
        byte = ops.cast(ops.take(ops.reshape(self.category_sets, (-1,)), place), "int32")
        bit = byte // ops.take(ops.convert_to_tensor(_POWERS, "int32"), code % 8) % 2
        return bit > 0, ops.logical_not(is_known)

    def compute_output_shape(self, input_shape: Any) -> Any:
        """Returns (batch, num_outputs)."""
        return (input_shape[0], self.num_outputs)
