"""A denoiser as a query of TF Privacy."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from tf_labeldp import _validate
from tf_labeldp.accounting import Setting
from tf_labeldp.tf_privacy._query_noise import load
from tf_labeldp.training import Denoiser, VertexLosses


class _GlobalState(NamedTuple):
    inner: Any
    denoiser: Any


def _delegated(name: str) -> Any:
    def method(self: DenoisedQuery, *args: Setting[Any], **kwargs: Setting[Any]) -> Any:
        return getattr(self._query, name)(*args, **kwargs)

    method.__name__, method.__doc__ = name, f"Calls ``{name}`` of the inner query."
    return method


class DenoisedQuery:
    """A sum query of TF Privacy whose noisy result is denoised with public examples.

    It replaces the inner query in training loops and Keras 2 optimizers of TF Privacy.
    ``isinstance`` accepts it as a ``tensorflow_privacy.SumAggregationDPQuery``, and every method
    except ``get_noised_result`` calls the inner query.

    Guarantee:
        The event is that of the inner query: denoising is post-processing, which sees the noisy
        result, the model and public examples, but no label and no record. Denoisers that use the
        sampled batch are refused: revealed batches get no amplification (``ghazi2024``, section
        3.4).

    Args:
        query: a ``SumAggregationDPQuery`` whose records are gradients.
        denoiser: a denoiser that does not reveal the batch, such as ``AltConv(num_examples)``.
        losses: a callable without arguments that returns the loss of n public examples for each of
            K labels, float (n, K), from the current variables:
            ``lambda: -tf.nn.log_softmax(model(x))``. For ``AltConv`` n must be its
            ``num_examples``; draw the examples without looking at labels.
        predictions: a callable without arguments that returns float (n, K), rows that sum to one,
            at which the gradient vanishes: ``lambda: tf.nn.softmax(model(x))``.
        variables: the weights, in the order of the tensors in a record.
        denominator: the expected number of records, which turns the noisy sum into a mean gradient.
            The result is a sum again, because TF Privacy's optimizers divide it. A
            ``NormalizedQuery`` has divided already and needs 1.

    Raises:
        ImportError: tensorflow-privacy is not installed.
        TypeError: ``query`` is not a ``SumAggregationDPQuery``.
        ValueError: ``denoiser`` uses the batch, or ``denominator`` is not above zero.

    Example:
        >>> from tf_labeldp.training import AltConv
        >>> x, w = tf.random.normal([64, 5]), tf.Variable(tf.zeros([5, 3]))
        >>> query = DenoisedQuery(  # doctest: +SKIP
        ...     load().GaussianSumQuery(l2_norm_clip=1.0, stddev=4.0),
        ...     AltConv(num_examples=64),
        ...     losses=lambda: -tf.nn.log_softmax(x @ w),
        ...     predictions=lambda: tf.nn.softmax(x @ w),
        ...     variables=[w],
        ...     denominator=128,
        ... )
    """

    def __init__(
        self,
        query: Setting[Any],
        denoiser: Denoiser,
        *,
        losses: Setting[Callable[[], tf.Tensor]],
        predictions: Setting[Callable[[], tf.Tensor]],
        variables: Setting[Sequence[Any]],
        denominator: float,
    ) -> None:
        contract = load().SumAggregationDPQuery
        if not isinstance(query, contract):
            raise TypeError(
                "query must be a SumAggregationDPQuery of tensorflow_privacy, got "
                f"{type(query).__name__}. Use GaussianSumQuery."
            )
        if denoiser.reveals_batch:
            raise ValueError(
                f"{type(denoiser).__name__} uses the features of the sampled batch, which a query "
                "does not see. Use AltConv, or train with LabelDPModel."
            )
        self._query, self._denoiser = query, denoiser
        self._vertices = VertexLosses(losses, predictions, list(variables))
        self._denominator = _validate.positive_finite("denominator", denominator)
        # A base class would need TF Privacy when this file is imported.
        contract.register(DenoisedQuery)

    def initial_global_state(self) -> _GlobalState:
        """Returns the states of the inner query and of the denoiser."""
        denoiser = self._denoiser.initial_state(self._shapes())
        return _GlobalState(self._query.initial_global_state(), denoiser)

    def _shapes(self) -> list[tuple[int, ...]]:
        return [tuple(variable.shape) for variable in self._vertices.variables]

    def derive_sample_params(self, global_state: Setting[_GlobalState]) -> Any:
        """Returns the sample parameters of the inner query, such as the clip."""
        return self._query.derive_sample_params(global_state.inner)

    def derive_metrics(self, global_state: Setting[_GlobalState]) -> OrderedDict[str, Any]:
        """Returns the metrics of the inner query."""
        return self._query.derive_metrics(global_state.inner)

    initial_sample_state = _delegated("initial_sample_state")
    preprocess_record = _delegated("preprocess_record")
    accumulate_preprocessed_record = _delegated("accumulate_preprocessed_record")
    accumulate_record = _delegated("accumulate_record")
    merge_sample_states = _delegated("merge_sample_states")

    def get_noised_result(
        self, sample_state: Setting[Any], global_state: Setting[_GlobalState]
    ) -> tuple[Any, _GlobalState, Any]:
        """Returns the denoised result, the next state, and the event of the inner query.

        A loop may drop the state, as TF Privacy's Keras optimizers do in graph mode; the denoiser
        then starts from its initial state.

        Raises:
            ValueError: the shapes of the records differ from those of the variables.
        """
        noisy, inner, event = self._query.get_noised_result(sample_state, global_state.inner)
        parts = tf.nest.flatten(noisy)
        shapes = [tuple(part.shape) for part in parts]
        if shapes != self._shapes():
            raise ValueError(
                f"expected records with the shapes of the variables, {self._shapes()}, got "
                f"{shapes}. Give variables= in the order of the tensors in a record."
            )
        mean = [tf.cast(part, tf.float32) / self._denominator for part in parts]
        denoised, next_state, _ = self._denoiser.denoise(
            mean, self._vertices, global_state.denoiser
        )
        result = [
            tf.cast(part * self._denominator, like.dtype)
            for part, like in zip(denoised, parts, strict=True)
        ]
        return tf.nest.pack_sequence_as(noisy, result), _GlobalState(inner, next_state), event
