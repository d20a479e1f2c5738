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
from tf_labeldp.accounting.events import dp_sgd_event
from tf_labeldp.accounting.gaussian import gaussian_epsilon
from tf_labeldp.mechanisms.random_bits import uniform_integers
from tf_labeldp.training import NoiseMechanism

_CLIP_TOLERANCE = 1e-6
"""Relative: a query keeps its clip as ``float32``."""
_HOW = (
    "Its own requirements ask for old versions of TensorFlow and numpy, so leave them out: pip "
    "install --no-deps --ignore-requires-python tensorflow-privacy==0.9.0 (the release that the "
    "tests run against), then pip install absl-py dm-tree packaging."
)
_SWITCH = "skip_tf_privacy_import"
_QUERIES = "dp gaussian nested no_privacy normalized restart tree_aggregation".split()
"""Modules of TF Privacy, less their ending ``_query``."""


def load() -> ModuleType:
    """Imports tensorflow-privacy and returns it, with its queries in their usual places.

    ``import tensorflow_privacy`` fails under TensorFlow 2.16 and later, as tensorflow-privacy 0.9
    imports TensorFlow Estimator. Its switch against that, ``sys.skip_tf_privacy_import``, is set
    during the import alone. Query classes are set on the returned module, which ``import
    tensorflow_privacy`` then finds too. Its models and optimizers are for Keras 2: set
    ``TF_USE_LEGACY_KERAS=1`` before TensorFlow is imported, in a process of their own, install
    ``tf-keras`` and import their modules by their full names.

    Raises:
        ImportError: it is not installed, or a requirement is missing; says how to install it.

    Example:
        >>> load().GaussianSumQuery(l2_norm_clip=1.0, stddev=4.0)  # doctest: +SKIP
        <tensorflow_privacy.privacy.dp_query.gaussian_query.GaussianSumQuery object at 0x...>
    """
    was_set = hasattr(sys, _SWITCH)
    if not was_set:
        setattr(sys, _SWITCH, True)
    try:
        module = importlib.import_module("tensorflow_privacy")
        for kind in _QUERIES:
            home = importlib.import_module(f"tensorflow_privacy.privacy.dp_query.{kind}_query")
            for name, value in vars(home).items():
                if name.endswith("Query") and not hasattr(module, name):
                    setattr(module, name, value)
    except ImportError as error:
        missing = (error.name or "").partition(".")[0] == "tensorflow_privacy"
        problem = "is not installed" if missing else f"was not imported: {error}"
        raise ImportError(f"tensorflow-privacy {problem}. {_HOW}", name=error.name) from error
    finally:
        if not was_set:
            delattr(sys, _SWITCH)
    return module


@keras.saving.register_keras_serializable(package="tf_labeldp")
class QueryNoise(NoiseMechanism):
    """Noise from a query of TF Privacy, instead of ``GaussianNoise``.

    Only the query's noise is used: ``LabelDPModel`` clips the gradients, so the query's clip has to
    be the optimizer's ``l2_norm_clip``. Three queries are accepted:

    * ``GaussianSumQuery``: independent Gaussian noise in every step.
    * ``TreeResidualSumQuery``, from ``build_l2_gaussian_query``: the noise of tree aggregation,
      correlated over steps so that it almost cancels in the sum of all of them (DP-FTRL; Kairouz et
      al. 2021, "Practical and private (deep) learning without sampling or shuffling").
    * ``TreeCumulativeSumQuery``: the same noise; a step takes the difference of two sums.

    The noise of a tree is kept in this object and never saved, since a reader of the checkpoint
    could subtract it. A run resumed from a checkpoint starts a new tree.

    Guarantee:
        A ``GaussianSumQuery`` has the event of ``GaussianNoise``. A tree is not amplified by
        sampling, and an example in several steps meets the same noise again: ``dp_event`` is None,
        and ``LabelDPModel`` states nothing; ``single_pass_guarantee`` is for disjoint steps.
        The random numbers are TensorFlow's, in single precision, and statements say so. A
        ``GaussianSumQuery`` draws from a generator that TensorFlow starts from 32 random bits, or
        from ``tf.random.set_seed``: then ``seeded`` is true. A tree without ``noise_seed``, which
        TF Privacy would seed from the clock, is seeded with 106 bits of the operating system.

    Args:
        query: one of the three; its noise must be above zero.

    Attributes:
        l2_norm_clip: the query's clip.
        noise_multiplier: standard deviation over clip: of one step, or of one node of a tree.

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
        self._is_cumulative = type(query) is privacy.TreeCumulativeSumQuery
        self._is_tree = self._is_cumulative or type(query) is privacy.TreeResidualSumQuery
        if not self._is_tree and type(query) is not privacy.GaussianSumQuery:
            raise TypeError(
                "query must be a GaussianSumQuery, TreeResidualSumQuery or TreeCumulativeSumQuery "
                f"of tensorflow_privacy, got {type(query).__name__}, whose noise is not known."
            )
        self._numbers = _tree_numbers(query) if self._is_tree else _gaussian_numbers(query)
        clip = self._numbers["clip_norm" if self._is_tree else "l2_norm_clip"]
        self.l2_norm_clip = _validate.positive_finite("the query's l2_norm_clip", clip)
        multiplier = self._numbers.get("noise_multiplier", self._numbers.get("stddev", 0.0) / clip)
        name = "the query's noise multiplier"
        self.noise_multiplier = _validate.positive_finite(name, multiplier)
        self._was_seeded = self._numbers.get("noise_seed") is not None
        self._state: Any = None
        self._previous: list[np.ndarray] = []
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
        """Returns the sum with the query's noise, in ``float32``, and the unchanged state.

        Raises:
            ValueError: another clip or other shapes than the query's.
        """
        if not math.isclose(float(l2_norm_clip), self.l2_norm_clip, rel_tol=_CLIP_TOLERANCE):
            raise ValueError(
                f"the optimizer clips to l2_norm_clip={float(l2_norm_clip):g}, the query is for "
                f"{self.l2_norm_clip:g}. Make both the same."
            )
        shapes = [list(part.shape) for part in clipped_sum]
        if self._is_tree and shapes != self._numbers["shapes"]:
            raise ValueError(
                f"expected variables of the shapes {self._numbers['shapes']}, which the query's "
                f"record_specs have, got {shapes}. Build the query with record_specs="
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
        """Returns the event of some steps; None for a tree."""
        if self._is_tree:
            return None
        return dp_sgd_event(self.noise_multiplier, sampling_probability, steps)

    def single_pass_guarantee(self, delta: float, *, steps: int | None = None) -> PrivacyGuarantee:
        """Returns the guarantee of a tree where no example takes part in two steps.

        The gradient of one example is then in at most ``m = ceil(log2(steps + 1))`` nodes of the
        tree, each with its own noise. So all steps together are one Gaussian mechanism of noise
        multiplier ``noise_multiplier / sqrt(m)`` (Kairouz et al. 2021, appendix D), here under
        replacement, where each of these nodes moves by twice ``l2_norm_clip`` at most.

        Guarantee:
            Holds if no example took part in two steps; Poisson batches do not ensure that.

        Args:
            delta: in (0, 1).
            steps: the number of planned steps; None for the number of steps taken.

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
        steps = self._num_drawn if steps is None else steps
        if _validate.integer_at_least("steps", steps, 0) < self._num_drawn:
            raise ValueError(
                f"steps={steps}, but noise has been added to {self._num_drawn} steps already."
            )
        sensitivity = 2.0 * math.sqrt(int(steps).bit_length())  # m = ceil(log2(steps + 1))
        multiplier = self.noise_multiplier
        epsilon = gaussian_epsilon(multiplier, delta, sensitivity) if sensitivity else 0.0
        text = f"No example takes part in two of the {steps} steps with this noise."
        assumptions = (Assumption("disjoint-steps", "trainer", text), *self.assumptions())
        return PrivacyGuarantee(epsilon, delta, assumptions=assumptions, seeded=self.seeded)

    def assumptions(self) -> tuple[Assumption, ...]:
        """Returns the assumptions of a statement about this noise, beyond its event."""
        if not self._is_tree:
            text = (
                "TensorFlow's generator made this noise (a GaussianSumQuery of TF Privacy, not the "
                "operating system's bits), and which of 2^32 states it started in is secret."
            )
            return (Assumption("generator-state-secret", "machines", text),)
        source = "the query's noise_seed" if self.seeded else "106 bits of the operating system"
        text = (
            "TensorFlow's stateless generator, which is not a cryptographic one, is unpredictable: "
            f"from {source} it made the noise (tree aggregation of TF Privacy)."
        )
        return (Assumption("generator-unpredicted", "machines", text),)

    def get_config(self) -> dict[str, Any]:
        """Returns every constructor argument; the query as its class and its numbers."""
        return {"query": {"class": type(self.query).__name__, **self._numbers}}

    @classmethod
    def from_config(cls, config: Setting[dict[str, Any]]) -> QueryNoise:
        """Returns the mechanism that ``get_config`` described; a tree starts from its root."""
        numbers = dict(config["query"])
        kind = getattr(load(), numbers.pop("class"))
        if "shapes" not in numbers:
            return cls(kind(**numbers))
        specs = [tf.TensorSpec(shape) for shape in numbers.pop("shapes")]
        return cls(kind.build_l2_gaussian_query(record_specs=specs, **numbers))

    def _draw(self, shapes: list[list[int]]) -> np.ndarray:
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
            if previous:
                noise = [new - old for new, old in zip(noise, previous, strict=True)]
        return np.concatenate([part.ravel() for part in noise])


# Some attributes that these functions read have no public name in TF Privacy.


def _gaussian_numbers(query: Any) -> dict[str, Any]:
    state = query.initial_global_state()
    return {"l2_norm_clip": float(state.l2_norm_clip), "stddev": float(state.stddev)}


def _tree_numbers(query: Any) -> dict[str, Any]:
    """Returns the arguments of ``build_l2_gaussian_query`` that make the same query."""
    aggregator = query._tree_aggregator
    generator = aggregator.value_generator
    if type(generator).__name__ != "GaussianNoiseGenerator":
        raise TypeError(
            f"expected a query with Gaussian noise, got one of {type(generator).__name__}. Make it "
            f"with {type(query).__name__}.build_l2_gaussian_query(...)."
        )
    state = query.initial_global_state()
    clip, stddev = float(state.clip_value), float(state.tree_state.value_generator_state.stddev)
    return {
        "clip_norm": clip,
        "noise_multiplier": stddev / clip,
        "shapes": [list(spec.shape) for spec in tf.nest.flatten(query._record_specs)],
        "noise_seed": generator._seed,
        "use_efficient": type(aggregator).__name__ == "EfficientTreeAggregator",
    }


def _with_secret_seed(query: Any, state: Any) -> Any:
    """Returns the state of a new tree whose noise starts from the operating system's bits."""
    aggregator, tree = query._tree_aggregator, state.tree_state
    generator = aggregator.value_generator.make_state(
        tf.constant(uniform_integers(2, None).astype(np.int64)), tree.value_generator_state.stddev
    )
    fresh = aggregator.reset_state(tree._replace(value_generator_state=generator))
    return state._replace(tree_state=fresh)
