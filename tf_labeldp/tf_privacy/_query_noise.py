"""The import of TF Privacy, and its Gaussian query as the noise of ``LabelDPOptimizer``."""

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
from tf_labeldp.accounting import Assumption, Setting
from tf_labeldp.accounting.events import EventFields
from tf_labeldp.training import NoiseMechanism

# Relative: a query keeps its clip as ``float32``.
_CLIP_TOLERANCE = 1e-6
_INSTALL = (
    "Its own requirements ask for old versions of TensorFlow and numpy. Install it without them: "
    "pip install --no-deps --ignore-requires-python tensorflow-privacy==0.9.0 (the version that "
    "is tested), then pip install absl-py dm-tree packaging."
)
_SWITCH = "skip_tf_privacy_import"
_QUERY = "GaussianSumQuery"
# The modules ``..._query`` of TF Privacy.
_QUERIES = "dp gaussian nested no_privacy normalized restart tree_aggregation".split()


def load() -> ModuleType:
    """Imports tensorflow-privacy and returns it, with its query classes as attributes.

    ``import tensorflow_privacy`` fails under TensorFlow 2.16 and later, because tensorflow-privacy
    0.9 imports TensorFlow Estimator. This function sets ``sys.skip_tf_privacy_import``, which
    avoids that import, and removes it afterwards. The query classes become attributes of the
    module, also for a later ``import tensorflow_privacy``. Its models and optimizers need Keras 2
    in a separate process: install ``tf-keras``, set ``TF_USE_LEGACY_KERAS=1`` before TensorFlow is
    imported, and import their modules by their full names.

    Raises:
        ImportError: tensorflow-privacy or one of its requirements is missing. The message shows how
            to install them.

    Example:
        >>> load().GaussianSumQuery(l2_norm_clip=1.0, stddev=4.0)  # doctest: +SKIP
        <tensorflow_privacy.privacy.dp_query.gaussian_query.GaussianSumQuery object at 0x...>
    """
    was_set = hasattr(sys, _SWITCH)
    if not was_set:
        setattr(sys, _SWITCH, True)
    try:
        package = importlib.import_module("tensorflow_privacy")
        for kind in _QUERIES:
            module = importlib.import_module(f"tensorflow_privacy.privacy.dp_query.{kind}_query")
            for name, value in vars(module).items():
                if name.endswith("Query") and not hasattr(package, name):
                    setattr(package, name, value)
    except ImportError as error:
        missing = (error.name or "").partition(".")[0] == "tensorflow_privacy"
        problem = "is not installed" if missing else f"was not imported: {error}"
        raise ImportError(f"tensorflow-privacy {problem}. {_INSTALL}", name=error.name) from error
    finally:
        if not was_set:
            delattr(sys, _SWITCH)
    return package


@keras.saving.register_keras_serializable(package="tf_labeldp")
class QueryNoise(NoiseMechanism):
    """Takes the noise of a ``GaussianSumQuery`` of TF Privacy, instead of ``GaussianNoise``.

    ``LabelDPModel`` clips the gradients and the query only adds noise, so the query's clip must
    equal the optimizer's ``l2_norm_clip``.

    Guarantee:
        The event is that of ``GaussianNoise``: independent Gaussian noise in every step. TensorFlow
        draws the noise in single precision, from a generator that starts from 32 random bits, which
        statements name as an assumption. If ``tf.random.set_seed`` was called, ``seeded`` is true.

    Args:
        query: a ``GaussianSumQuery`` with a standard deviation above zero.

    Attributes:
        l2_norm_clip: the query's clip.
        noise_multiplier: standard deviation of one step's noise, divided by the clip.

    Raises:
        ImportError: tensorflow-privacy is not installed.
        TypeError: the query is not a ``GaussianSumQuery``.
        ValueError: the standard deviation or the clip is not above zero.

    Example:
        >>> query = load().GaussianSumQuery(l2_norm_clip=1.0, stddev=4.0)  # doctest: +SKIP
        >>> QueryNoise(query).noise_multiplier                             # doctest: +SKIP
        4.0
    """

    def __init__(self, query: Setting[Any]) -> None:
        if type(query) is not load().GaussianSumQuery:
            raise TypeError(
                "query must be a GaussianSumQuery of tensorflow_privacy, got "
                f"{type(query).__name__}, whose noise has no known event."
            )
        self.query = query
        self._state = query.initial_global_state()
        clip, stddev = float(self._state.l2_norm_clip), float(self._state.stddev)
        self.l2_norm_clip = _validate.positive_finite("the query's l2_norm_clip", clip)
        self._stddev = _validate.positive_finite("the query's stddev", stddev)
        self.noise_multiplier = stddev / clip
        self._was_seeded = False

    @property
    def seeded(self) -> bool:  # type: ignore[override]
        """Whether TensorFlow's global seed makes the noise repeatable, now or in a past step."""
        # With a global seed and none of its own an operation gets two seeds, else (None, None).
        return self._was_seeded or tf.compat.v1.get_seed(None)[0] is not None

    def add_noise(
        self, clipped_sum: list[tf.Tensor], l2_norm_clip: float, state: Setting[Any]
    ) -> tuple[list[tf.Tensor], Any]:
        """Returns the sum with the query's noise, in ``float32``, and the unchanged state.

        Raises:
            ValueError: ``l2_norm_clip`` is not the query's.
        """
        if not math.isclose(float(l2_norm_clip), self.l2_norm_clip, rel_tol=_CLIP_TOLERANCE):
            raise ValueError(
                f"the optimizer clips to l2_norm_clip={float(l2_norm_clip):g}, the query is for "
                f"{self.l2_norm_clip:g}. Make both the same."
            )
        shapes = [list(part.shape) for part in clipped_sum]
        sizes = [math.prod(shape) for shape in shapes]
        # Drawn on the host, so that no graph optimization folds or shares the draw.
        noise = tf.py_function(lambda: self._draw(shapes), [], tf.float32)
        parts = tf.split(tf.ensure_shape(noise, [sum(sizes)]), sizes)
        return [
            tf.cast(like, tf.float32) + tf.reshape(part, shape)
            for part, shape, like in zip(parts, shapes, clipped_sum, strict=True)
        ], state

    def dp_event(self, sampling_probability: float, steps: int) -> Any:
        """Returns the ``dp_accounting`` event of this number of steps."""
        return EventFields.dp_sgd(self.noise_multiplier, sampling_probability, steps).dp_event()

    def assumptions(self) -> tuple[Assumption, ...]:
        """Returns the assumption about TensorFlow's generator."""
        text = (
            "TensorFlow's generator made this noise (a GaussianSumQuery of TF Privacy, not the "
            "operating system's bits), and which of 2^32 states it started in is secret."
        )
        return (Assumption("generator-state-secret", "machines", text),)

    def get_config(self) -> dict[str, Any]:
        """Returns the class name and the numbers of the query."""
        numbers = {"l2_norm_clip": self.l2_norm_clip, "stddev": self._stddev}
        return {"query": {"class": _QUERY, **numbers}}

    @classmethod
    def from_config(cls, config: Setting[dict[str, Any]]) -> QueryNoise:
        """Returns the mechanism that ``get_config`` described."""
        query = config["query"]
        # A file must not choose what is called.
        _validate.one_of("the class of a query", query["class"], (_QUERY,))
        numbers = {name: query[name] for name in ("l2_norm_clip", "stddev")}
        return cls(load().GaussianSumQuery(**numbers))

    def _draw(self, shapes: list[list[int]]) -> np.ndarray:
        """Returns the noise of one step, all tensors in one vector.

        The query adds its noise to a sum of zeros, so it never receives a gradient.
        """
        self._was_seeded = self.seeded
        zeros = self.query.initial_sample_state([tf.TensorSpec(shape) for shape in shapes])
        result, self._state, _ = self.query.get_noised_result(zeros, self._state)
        return np.concatenate([part.numpy().ravel() for part in tf.nest.flatten(result)])
