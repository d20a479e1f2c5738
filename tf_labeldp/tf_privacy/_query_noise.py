"""The queries of TF Privacy as the noise of ``LabelDPOptimizer``, and how to import them."""

from __future__ import annotations

import importlib
import math
import sys
from types import ModuleType
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tf_labeldp import _validate
from tf_labeldp.accounting import Assumption, PrivacyGuarantee, Setting
from tf_labeldp.accounting._events import dp_sgd_event
from tf_labeldp.accounting._gaussian import gaussian_epsilon
from tf_labeldp.mechanisms._random import uniform_integers
from tf_labeldp.training import NoiseMechanism

_CLIP_TOLERANCE = 1e-6
"""Relative: a query keeps its clip as ``float32``."""

_WORKS_WITH = "0.9.0"
"""The release of tensorflow-privacy that the tests run against."""

_NOT_INSTALLED = (
    "tensorflow-privacy is not installed. Its own requirements ask for old versions of TensorFlow "
    "and numpy, so leave them out: pip install --no-deps --ignore-requires-python "
    f"tensorflow-privacy=={_WORKS_WITH} (the release that is known to work), then pip install "
    "absl-py dm-tree packaging."
)
_NOT_IMPORTED = (
    "tensorflow-privacy is installed, but its import failed: {error}. This is known to work: "
    f"tensorflow-privacy=={_WORKS_WITH} with absl-py, dm-tree and packaging (pip install absl-py "
    "dm-tree packaging)."
)
_SWITCH = "skip_tf_privacy_import"
_QUERIES = {
    "DPQuery": "dp_query",
    "GaussianSumQuery": "gaussian_query",
    "NestedQuery": "nested_query",
    "NestedSumQuery": "nested_query",
    "NoPrivacyAverageQuery": "no_privacy_query",
    "NoPrivacySumQuery": "no_privacy_query",
    "NormalizedQuery": "normalized_query",
    "RestartQuery": "restart_query",
    "SumAggregationDPQuery": "dp_query",
    "TreeCumulativeSumQuery": "tree_aggregation_query",
    "TreeResidualSumQuery": "tree_aggregation_query",
}


def load() -> ModuleType:
    """Imports tensorflow-privacy and returns it, with its queries in their usual places.

    ``import tensorflow_privacy`` fails under TensorFlow 2.16 and later, as tensorflow-privacy 0.9
    imports TensorFlow Estimator. Its switch against that, ``sys.skip_tf_privacy_import``, is set
    during the import alone; afterwards ``import tensorflow_privacy`` works in this process too.

    Its query classes are set on the returned module: ``load().GaussianSumQuery``. Its models and
    optimizers are for Keras 2: set ``TF_USE_LEGACY_KERAS=1`` before TensorFlow is imported, in a
    process of their own, install ``tf-keras`` and import their modules by their full names.

    Returns:
        The module ``tensorflow_privacy``.

    Raises:
        ImportError: it is not installed, or lacks something that it needs; the message says how to
            install it.

    Example:
        >>> load().GaussianSumQuery(l2_norm_clip=1.0, stddev=4.0)  # doctest: +SKIP
        <tensorflow_privacy.privacy.dp_query.gaussian_query.GaussianSumQuery object at 0x...>
    """
    try:
        was_set = hasattr(sys, _SWITCH)
        if not was_set:
            setattr(sys, _SWITCH, True)
        try:
            module = importlib.import_module("tensorflow_privacy")
        finally:
            if not was_set:
                delattr(sys, _SWITCH)
        for name, home in _QUERIES.items():
            if not hasattr(module, name):
                queries = importlib.import_module(f"tensorflow_privacy.privacy.dp_query.{home}")
                setattr(module, name, getattr(queries, name))
    except ImportError as error:
        missing = (error.name or "").partition(".")[0] == "tensorflow_privacy"
        message = _NOT_INSTALLED if missing else _NOT_IMPORTED.format(error=error)
        raise ImportError(message, name=error.name) from error
    return module


@keras.saving.register_keras_serializable(package="tf_labeldp")
class QueryNoise(NoiseMechanism):
    """Noise from a query of TF Privacy, instead of ``GaussianNoise``.

    Of the query only its noise is used: gradients are clipped by ``LabelDPModel``, so the query's
    clip has to be the optimizer's ``l2_norm_clip``. Three queries are accepted:

    * ``GaussianSumQuery``: independent Gaussian noise in every step.
    * ``TreeResidualSumQuery``, from ``build_l2_gaussian_query``: the noise of tree aggregation,
      which is correlated over steps so that it almost cancels in the sum of all of them (DP-FTRL;
      Kairouz et al. 2021, "Practical and private (deep) learning without sampling or shuffling").
    * ``TreeCumulativeSumQuery``: the same noise; a step takes the difference of two sums.

    The noise of a tree is kept in this object, not in the optimizer's variables: whoever reads it
    from a checkpoint could subtract it. A run that goes on from a checkpoint starts a new tree.

    Guarantee:
        A ``GaussianSumQuery`` has the event of ``GaussianNoise``.
        A tree is not amplified by sampling, and its steps cannot be accounted one by one, as an
        example that takes part in several meets the same noise again: ``dp_event`` is None, and
        ``LabelDPModel`` states nothing. Where no example took part in two steps,
        ``single_pass_guarantee`` has the statement.
        The random numbers are TensorFlow's, in single precision, and statements say so. A
        ``GaussianSumQuery`` draws from a generator that TensorFlow starts from 32 random bits, or
        from ``tf.random.set_seed``: then ``seeded`` is true. A tree without ``noise_seed``, which
        TF Privacy would seed from the clock, is seeded with 106 bits of the operating system. Only
        ``GaussianNoise`` takes all its bits there.

    Args:
        query: one of the three; its noise must be above zero.

    Attributes:
        query: as given.
        l2_norm_clip: the query's clip.
        noise_multiplier: standard deviation over clip: of one step for ``GaussianSumQuery``, of
            one node of a tree.
        seeded: whether the noise can be repeated.

    Raises:
        ImportError: tensorflow-privacy is not installed.
        TypeError: another kind of query.
        ValueError: no noise, or a clip that is not above zero.

    Example:
        >>> query = load().GaussianSumQuery(l2_norm_clip=1.0, stddev=4.0)  # doctest: +SKIP
        >>> QueryNoise(query).noise_multiplier                             # doctest: +SKIP
        4.0
    """

    def __init__(self, query: Setting[Any]) -> None:
        privacy = load()
        self.query = query
        trees = (privacy.TreeResidualSumQuery, privacy.TreeCumulativeSumQuery)
        self._is_tree = type(query) in trees
        self._is_cumulative = type(query) is privacy.TreeCumulativeSumQuery
        if not self._is_tree and type(query) is not privacy.GaussianSumQuery:
            raise TypeError(
                f"query must be a GaussianSumQuery, TreeResidualSumQuery or TreeCumulativeSumQuery "
                f"of tensorflow_privacy, got {type(query).__name__}, of whose noise nothing is "
                "known."
            )
        clip, stddev = _tree_scales(query) if self._is_tree else _gaussian_scales(query)
        self.l2_norm_clip = _validate.positive_finite("the query's l2_norm_clip", clip)
        self.noise_multiplier = _validate.positive_finite(
            "the query's noise multiplier", stddev / clip
        )
        self._was_seeded = self._is_tree and _tree_seed(query) is not None
        self._state: Any = None
        self._previous: list[np.ndarray] | None = None
        self._num_drawn = 0

    @property
    def seeded(self) -> bool:  # type: ignore[override]
        """Whether the noise can be repeated: by the query's seed or TensorFlow's global one."""
        if self._is_tree or self._was_seeded:
            return self._was_seeded
        # With a global seed and none of its own an operation gets two seeds, else (None, None).
        return tf.compat.v1.get_seed(None)[0] is not None

    def add_noise(
        self, clipped_sum: list[tf.Tensor], l2_norm_clip: float, state: Setting[Any]
    ) -> tuple[list[tf.Tensor], Any]:
        """Returns the sum with the query's noise, in ``float32``; the state is handed through.

        Raises:
            ValueError: another clip or other shapes than the query's.
        """
        if not math.isclose(float(l2_norm_clip), self.l2_norm_clip, rel_tol=_CLIP_TOLERANCE):
            raise ValueError(
                f"the optimizer clips to l2_norm_clip={float(l2_norm_clip):g}, the query is for "
                f"{self.l2_norm_clip:g}. Make both the same."
            )
        shapes = [tuple(part.shape) for part in clipped_sum]
        if self._is_tree and shapes != _tree_shapes(self.query):
            raise ValueError(
                f"the query's record_specs have the shapes {_tree_shapes(self.query)}, the "
                f"trainable variables {shapes}. Build it with record_specs="
                "[tf.TensorSpec(v.shape) for v in model.trainable_variables]."
            )
        sizes = [math.prod(shape) for shape in shapes]
        # On the host, so that no pass folds or shares the draw and a tree's noise is in no graph.
        drawn = tf.py_function(lambda: self._draw(shapes), [], tf.float32)
        parts = tf.split(tf.ensure_shape(drawn, [sum(sizes)]), sizes)
        return [
            tf.cast(like, tf.float32) + tf.reshape(part, shape)
            for part, shape, like in zip(parts, shapes, clipped_sum, strict=True)
        ], state

    def dp_event(self, sampling_probability: float, steps: int) -> Any:
        """Returns the event of some steps; None for a tree, of whose steps nothing can be said."""
        if self._is_tree:
            return None
        return dp_sgd_event(self.noise_multiplier, sampling_probability, steps)

    def single_pass_guarantee(self, delta: float, *, steps: int | None = None) -> PrivacyGuarantee:
        """Returns what a tree promises where no example takes part in two steps.

        The gradient of one example is then in at most ``m = ceil(log2(steps + 1))`` nodes of the
        tree, each with its own noise, and all that is released is made of noisy nodes. So all steps
        together are one Gaussian mechanism of noise multiplier ``noise_multiplier / sqrt(m)``
        (Kairouz et al. 2021, appendix D; ``dp_accounting.SingleEpochTreeAggregationDpEvent``), here
        under replacement, where each of these nodes moves by twice ``l2_norm_clip`` at most.

        Guarantee:
            Holds if no example took part in two steps; Poisson batches do not ensure that.

        Args:
            delta: in (0, 1).
            steps: that are planned; None for those that this object has added noise to.

        Raises:
            ValueError: the query is not a tree, fewer steps than were taken, or delta out of range.

        Example:
            >>> specs = [tf.TensorSpec([3])]
            >>> tree = load().TreeResidualSumQuery                           # doctest: +SKIP
            >>> noise = QueryNoise(tree.build_l2_gaussian_query(1.0, 30.0, specs))  # doctest: +SKIP
            >>> noise.single_pass_guarantee(1e-5, steps=100).epsilon < 0.8   # doctest: +SKIP
            True
        """
        if not self._is_tree:
            raise ValueError(
                "single_pass_guarantee is for tree aggregation. The noise of a GaussianSumQuery is "
                "accounted step by step: see LabelDPModel.guarantee()."
            )
        if steps is None:
            steps = self._num_drawn
        elif _validate.integer_at_least("steps", steps, 0) < self._num_drawn:
            raise ValueError(
                f"steps={steps}, but noise has been added to {self._num_drawn} steps already."
            )
        nodes = int(steps).bit_length()  # ceil(log2(steps + 1))
        epsilon = (
            gaussian_epsilon(self.noise_multiplier, delta, 2.0 * math.sqrt(nodes)) if nodes else 0.0
        )
        return PrivacyGuarantee(
            epsilon,
            delta,
            assumptions=(
                Assumption(
                    "disjoint-steps",
                    "trainer",
                    f"No example takes part in two of the {steps} steps with this noise.",
                ),
                *self.assumptions(),
            ),
            seeded=self.seeded,
        )

    def assumptions(self) -> tuple[Assumption, ...]:
        """Returns what a statement about this noise rests on, beyond its event."""
        if not self._is_tree:
            text = (
                "Nobody tries the 2^32 states in which TensorFlow may have started the generator "
                "of this noise (a GaussianSumQuery of TF Privacy, not the operating system's bits)."
            )
            return (Assumption("generator-state-secret", "machines", text),)
        source = "the query's noise_seed" if self.seeded else "106 bits of the operating system"
        text = (
            "Nobody predicts TensorFlow's stateless generator, which is not a cryptographic one: "
            f"from {source} it made the noise (tree aggregation of TF Privacy)."
        )
        return (Assumption("generator-unpredicted", "machines", text),)

    def get_config(self) -> dict[str, Any]:
        """Returns every constructor argument; the query as its class and its numbers."""
        query: dict[str, Any] = {"class": type(self.query).__name__}
        if self._is_tree:
            aggregator = type(_aggregator(self.query)).__name__
            query |= {
                "clip_norm": self.l2_norm_clip,
                "noise_multiplier": self.noise_multiplier,
                "shapes": [list(shape) for shape in _tree_shapes(self.query)],
                "noise_seed": _tree_seed(self.query),
                "use_efficient": aggregator == "EfficientTreeAggregator",
            }
        else:
            clip, stddev = _gaussian_scales(self.query)
            query |= {"l2_norm_clip": clip, "stddev": stddev}
        return {"query": query}

    @classmethod
    def from_config(cls, config: Setting[dict[str, Any]]) -> QueryNoise:
        """Returns the mechanism that ``get_config`` described; a tree starts from its root."""
        numbers = dict(config["query"])
        kind = getattr(load(), numbers.pop("class"))
        if "shapes" in numbers:
            specs = [tf.TensorSpec(shape) for shape in numbers.pop("shapes")]
            query = kind.build_l2_gaussian_query(record_specs=specs, **numbers)
        else:
            query = kind(**numbers)
        return cls(query)

    def _draw(self, shapes: list[tuple[int, ...]]) -> np.ndarray:
        """Returns the noise of one step, all tensors in one vector.

        The query is asked for the noisy sum of zeros, so that it never holds a gradient.
        """
        self._was_seeded = self.seeded
        if self._state is None:
            self._state = self.query.initial_global_state()
            if self._is_tree and not self._was_seeded:
                self._state = _with_secret_seed(self.query, self._state)
        specs = self.query._record_specs if self._is_tree else [tf.TensorSpec(s) for s in shapes]
        sums = self.query.initial_sample_state(specs)
        result, self._state, _ = self.query.get_noised_result(sums, self._state)
        self._num_drawn += 1
        noise = [part.numpy() for part in tf.nest.flatten(result)]
        if self._is_cumulative:
            previous, self._previous = self._previous, noise
            if previous is not None:
                noise = [new - old for new, old in zip(noise, previous, strict=True)]
        return np.concatenate([part.ravel() for part in noise])


# Some of what follows has no public name in TF Privacy.


def _gaussian_scales(query: Any) -> tuple[float, float]:
    state = query.initial_global_state()
    return float(state.l2_norm_clip), float(state.stddev)


def _tree_scales(query: Any) -> tuple[float, float]:
    """Returns the clip and the standard deviation of a node, or raises if it is not Gaussian."""
    generator = _aggregator(query).value_generator
    if type(generator).__name__ != "GaussianNoiseGenerator":
        raise TypeError(
            f"the query takes its noise from {type(generator).__name__}, of which this library "
            f"cannot say what it promises. Make it with {type(query).__name__}."
            "build_l2_gaussian_query(...)."
        )
    state = query.initial_global_state()
    return float(state.clip_value), float(state.tree_state.value_generator_state.stddev)


def _tree_shapes(query: Any) -> list[tuple[int, ...]]:
    """Returns the shapes of its records' tensors."""
    return [tuple(spec.shape) for spec in tf.nest.flatten(query._record_specs)]


def _tree_seed(query: Any) -> int | None:
    """Returns the ``noise_seed`` that the query was built with."""
    return _aggregator(query).value_generator._seed


def _aggregator(query: Any) -> Any:
    return query._tree_aggregator


def _with_secret_seed(query: Any, state: Any) -> Any:
    """Returns the state of a new tree whose noise starts from the operating system's bits."""
    aggregator = _aggregator(query)
    tree = state.tree_state
    generator = aggregator.value_generator.make_state(
        tf.constant(uniform_integers(2, None).astype(np.int64)), tree.value_generator_state.stddev
    )
    fresh = aggregator.reset_state(tree._replace(value_generator_state=generator))
    return state._replace(tree_state=fresh)
