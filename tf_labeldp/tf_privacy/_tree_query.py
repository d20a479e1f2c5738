"""What ``QueryNoise`` reads from a tree-aggregation query of TF Privacy, and the seed it gives it.

Some of it has no public name there; all such uses are in this file.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

from tf_labeldp.mechanisms._random import uniform_integers


def tree_scales(query: Any) -> tuple[float, float]:
    """Returns the clip and the standard deviation of a node.

    Raises:
        TypeError: the nodes' noise is not the query's own Gaussian noise.
    """
    generator = _aggregator(query).value_generator
    if type(generator).__name__ != "GaussianNoiseGenerator":
        raise TypeError(
            f"the query takes its noise from {type(generator).__name__}, of which this library "
            f"cannot say what it promises. Make it with {type(query).__name__}."
            "build_l2_gaussian_query(...)."
        )
    state = query.initial_global_state()
    return float(state.clip_value), float(state.tree_state.value_generator_state.stddev)


def tree_shapes(query: Any) -> list[tuple[int, ...]]:
    """Returns the shapes of its records' tensors."""
    return [tuple(spec.shape) for spec in tf.nest.flatten(query._record_specs)]


def tree_seed(query: Any) -> int | None:
    """Returns the ``noise_seed`` that the query was built with."""
    return _aggregator(query).value_generator._seed


def is_efficient(query: Any) -> bool:
    """Returns whether the query was built with ``use_efficient=True``."""
    return type(_aggregator(query)).__name__ == "EfficientTreeAggregator"


def _aggregator(query: Any) -> Any:
    return query._tree_aggregator


def with_secret_seed(query: Any, state: Any) -> Any:
    """Returns the state of a new tree whose noise starts from the operating system's bits."""
    aggregator = _aggregator(query)
    tree = state.tree_state
    generator = aggregator.value_generator.make_state(
        tf.constant(uniform_integers(2, None).astype(np.int64)), tree.value_generator_state.stddev
    )
    fresh = aggregator.reset_state(tree._replace(value_generator_state=generator))
    return state._replace(tree_state=fresh)
