"""A denoiser as a query of TF Privacy."""

from __future__ import annotations

import collections
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from tf_labeldp import _validate
from tf_labeldp.accounting import Setting
from tf_labeldp.tf_privacy._query_noise import load
from tf_labeldp.training import Denoiser, VertexLosses


class _GlobalState(NamedTuple):
    """The state of the inner query, and what the denoiser carries from step to step."""

    inner: Any
    denoiser: Any


class DenoisedQuery:
    """A sum query of TF Privacy whose noisy result is denoised with public examples.

    For training loops and Keras-2 optimizers of TF Privacy: use it in place of the inner query. It
    counts as a ``tensorflow_privacy.SumAggregationDPQuery``; every method but
    ``get_noised_result`` is that of the inner query.

    Guarantee:
        The event is that of the inner query: denoising is post-processing, which sees the noisy
        result, the model and public examples, no label and no record.
        Denoisers that use the sampled batch are refused: a query does not know how the batch was
        drawn, and revealed batches get no amplification (``ghazi2024``, section 3.4).

    Args:
        query: a ``SumAggregationDPQuery`` whose records are gradients.
        denoiser: such as ``AltConv(num_examples)``.
        losses: callable without arguments: float (n, K), the loss of each of n public examples for
            each of K labels from the current variables: ``lambda: -tf.nn.log_softmax(model(x))``.
            For ``AltConv`` n must be its ``num_examples``; draw them without looking at labels.
        predictions: callable without arguments: float (n, K), rows that sum to one, at which the
            gradient vanishes: ``lambda: tf.nn.softmax(model(x))``.
        variables: the weights, in the order of the tensors of a record.
        denominator: what the noisy sum is divided by to be a mean gradient: the expected number of
            records. The result is a sum again, as TF Privacy's optimizers divide themselves. 1 for
            a ``NormalizedQuery``, which has divided.

    Raises:
        ImportError: tensorflow-privacy is not installed.
        TypeError: an argument of the wrong kind.
        ValueError: a denoiser that uses the batch, no variables, or a denominator not above zero.

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
        >>> state = query.initial_global_state()                     # doctest: +SKIP
        >>> total = query.initial_sample_state([w])                  # doctest: +SKIP
        >>> [noisy], state, event = query.get_noised_result(total, state)  # doctest: +SKIP
        >>> float(event.noise_multiplier)                            # doctest: +SKIP
        4.0
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
                f"query must be a SumAggregationDPQuery of tensorflow_privacy, got "
                f"{type(query).__name__}. GaussianSumQuery is the usual one."
            )
        if not isinstance(denoiser, Denoiser):
            raise TypeError(
                f"denoiser must be a tf_labeldp denoiser such as AltConv(num_examples=256), got "
                f"{type(denoiser).__name__}."
            )
        if denoiser.reveals_batch:
            raise ValueError(
                f"{type(denoiser).__name__} uses the features of the sampled batch, which a query "
                "does not see. Use AltConv, or LabelDPModel, which accounts for it."
            )
        for name, value in (("losses", losses), ("predictions", predictions)):
            if not callable(value):
                raise TypeError(
                    f"{name} must be a callable without arguments, got {type(value).__name__}."
                )
        if not variables:
            raise ValueError("variables is empty: give the weights that are trained.")
        self._query = query
        self._denoiser = denoiser
        self._vertices = VertexLosses(losses, predictions, list(variables))
        self._denominator = _validate.positive_finite("denominator", denominator)
        # Registered, not derived: so this file can be imported where TF Privacy is not installed.
        contract.register(DenoisedQuery)

    def initial_global_state(self) -> _GlobalState:
        """Returns the state of the inner query, and that of the denoiser."""
        shapes = [tuple(variable.shape) for variable in self._vertices.variables]
        return _GlobalState(
            self._query.initial_global_state(), self._denoiser.initial_state(shapes)
        )

    def derive_sample_params(self, global_state: Setting[_GlobalState]) -> Any:
        """Returns the sample parameters of the inner query, such as its clip."""
        return self._query.derive_sample_params(global_state.inner)

    def derive_metrics(
        self, global_state: Setting[_GlobalState]
    ) -> collections.OrderedDict[str, Any]:
        """Returns the metrics of the inner query."""
        return self._query.derive_metrics(global_state.inner)

    def initial_sample_state(self, template: Setting[Any] = None) -> Any:
        """Returns the sample state of the inner query: zeros like ``template``."""
        return self._query.initial_sample_state(template)

    def preprocess_record(self, params: Setting[Any], record: Setting[Any]) -> Any:
        """Returns the record as the inner query prepares it: clipped."""
        return self._query.preprocess_record(params, record)

    def accumulate_preprocessed_record(
        self, sample_state: Setting[Any], preprocessed_record: Setting[Any]
    ) -> Any:
        """Returns the sample state with one more record."""
        return self._query.accumulate_preprocessed_record(sample_state, preprocessed_record)

    def accumulate_record(
        self, params: Setting[Any], sample_state: Setting[Any], record: Setting[Any]
    ) -> Any:
        """Returns the sample state with one more record, which is prepared first."""
        return self._query.accumulate_record(params, sample_state, record)

    def merge_sample_states(
        self, sample_state_1: Setting[Any], sample_state_2: Setting[Any]
    ) -> Any:
        """Returns the sample state of the records of both."""
        return self._query.merge_sample_states(sample_state_1, sample_state_2)

    def get_noised_result(
        self, sample_state: Setting[Any], global_state: Setting[_GlobalState]
    ) -> tuple[Any, _GlobalState, Any]:
        """Returns the denoised result, the next state, and the event of the inner query.

        Args:
            sample_state: the sum of the records.
            global_state: from ``initial_global_state`` or the last call. If a loop drops it, as
                TF Privacy's Keras optimizers do in graph mode, only the denoiser's estimate starts
                anew.

        Raises:
            ValueError: the records are not like the variables.
        """
        noisy, inner, event = self._query.get_noised_result(sample_state, global_state.inner)
        parts = tf.nest.flatten(noisy)
        shapes = [tuple(part.shape) for part in parts]
        expected = [tuple(variable.shape) for variable in self._vertices.variables]
        if shapes != expected:
            raise ValueError(
                f"the records have tensors of the shapes {shapes}, the variables {expected}. Give "
                "variables= in the order of the records' tensors."
            )
        mean = [tf.cast(part, tf.float32) / self._denominator for part in parts]
        denoised, after, _ = self._denoiser.denoise(mean, self._vertices, global_state.denoiser)
        result = [
            tf.cast(part * self._denominator, like.dtype)
            for part, like in zip(denoised, parts, strict=True)
        ]
        return tf.nest.pack_sequence_as(noisy, result), _GlobalState(inner, after), event
