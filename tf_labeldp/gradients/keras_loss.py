"""A Keras loss: the labels that it takes, and its value for each example."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from tf_labeldp import _checks
from tf_labeldp.gradients.masks import mask_of, mean_of_shown, shown_labels
from tf_labeldp.gradients.model_checks import is_by_name
from tf_labeldp.keras_layers import ForwardCorrectedLoss
from tf_labeldp.vault import NoisyLabels

_OF_CODES = keras.losses.sparse_categorical_crossentropy
_OF_ROWS = [
    keras.losses.categorical_crossentropy,
    keras.losses.categorical_focal_crossentropy,
]
_OF_TWO = [
    keras.losses.binary_crossentropy,
    keras.losses.binary_focal_crossentropy,
    keras.losses.hinge,
    keras.losses.squared_hinge,
]
# These compare row by row if labels and outputs have the same rank; otherwise they broadcast the
# label of one example against the output of another. Other losses, such as Circle, may use the
# whole batch.
_ROW_BY_ROW = [
    _OF_CODES,
    *_OF_ROWS,
    *_OF_TWO,
    keras.losses.categorical_hinge,
    keras.losses.cosine_similarity,
    keras.losses.huber,
    keras.losses.kl_divergence,
    keras.losses.log_cosh,
    keras.losses.mean_absolute_error,
    keras.losses.mean_absolute_percentage_error,
    keras.losses.mean_squared_error,
    keras.losses.mean_squared_logarithmic_error,
    keras.losses.poisson,
]
# The expected loss of signed targets is that of the true labels only where these enter linearly,
# in all that depends on the prediction. A squared error has y^2 apart from it.
_NOT_LINEAR = [
    keras.losses.kl_divergence,
    keras.losses.categorical_hinge,
    keras.losses.binary_focal_crossentropy,
    keras.losses.hinge,
    keras.losses.squared_hinge,
    keras.losses.huber,
    keras.losses.log_cosh,
    keras.losses.mean_absolute_error,
    keras.losses.mean_absolute_percentage_error,
    keras.losses.mean_squared_logarithmic_error,
]
# These take probabilities unless from_logits=True.
_OF_PROBABILITIES = [
    _OF_CODES,
    *_OF_ROWS,
    keras.losses.binary_crossentropy,
    keras.losses.binary_focal_crossentropy,
]


@dataclasses.dataclass(frozen=True)
class _ExampleLosses:
    """The losses of the examples of a batch, from a function that may mix them."""

    name: str
    function: Callable[[Any, Any], Any]
    # That of Loss.__call__; None keeps the dtypes of labels and outputs.
    dtype: Any
    is_named: bool
    is_row_by_row: bool
    takes_codes: bool

    def of_batch(self, y_true: Any, y_pred: Any) -> tf.Tensor:
        mask = mask_of(y_pred)
        masks = () if mask is None else (tf.convert_to_tensor(mask),)
        y_true, y_pred = tf.nest.map_structure(
            lambda values: keras.ops.convert_to_tensor(values, dtype=self.dtype), (y_true, y_pred)
        )
        if self.is_named or masks:
            y_true = _with_last_axis(y_true, y_pred)
        ranks = {part.shape.rank for part in tf.nest.flatten((y_true, y_pred))}
        is_row_by_row = self.is_row_by_row and (self.takes_codes or len(ranks) == 1)
        if is_row_by_row or tf.nest.flatten(y_pred)[0].shape[0] == 1:
            return self._losses(y_true, y_pred, *masks)
        # The function sees one example alone, so it can't mix them.
        return tf.vectorized_map(self._loss_alone, (y_true, y_pred, *masks), warn=False)

    def _loss_alone(self, row: Any) -> tf.Tensor:
        return self._losses(*tf.nest.map_structure(lambda part: part[tf.newaxis], row))[0]

    def _losses(self, y_true: Any, y_pred: Any, mask: Any = None) -> tf.Tensor:
        if mask is not None and self.is_row_by_row:
            y_true = shown_labels(y_true, mask)
        losses = self.function(y_true, y_pred)
        # Keras's `ignore_class` is a mask of the losses.
        masks = [part for part in (mask, mask_of(losses)) if part is not None]
        losses = tf.convert_to_tensor(losses)
        batch, rank = tf.nest.flatten(y_pred)[0].shape[0], losses.shape.rank
        if rank == 0 or (None not in (batch, losses.shape[0]) and losses.shape[0] != batch):
            raise ValueError(
                f"losses must be per example: for {batch} examples the loss {self.name!r} "
                f"must return shape ({batch},), got shape {tuple(losses.shape)}."
            )
        return mean_of_shown(losses, masks)


def _with_last_axis(y_true: Any, y_pred: Any) -> Any:
    """Returns labels (B, ...) as (B, ..., 1) if the outputs are; others unchanged.

    For a loss by name, Keras allows labels (B,) with outputs (B, 1). With masks it needs one loss
    per step.
    """
    if not (tf.is_tensor(y_true) and tf.is_tensor(y_pred)):
        return y_true
    is_column = y_pred.shape.rank == y_true.shape.rank + 1 and y_pred.shape[-1] == 1
    return y_true[..., tf.newaxis] if is_column else y_true


class KerasLoss:
    """A loss in any form that Keras takes: an object, its name or configuration, or a function.

    ``loss`` is the object or the function; losses by output, which are no loss, stay as they are.
    Questions about it read no label.
    """

    def __init__(self, loss: Any) -> None:
        self._is_named = isinstance(loss, str)
        is_described = isinstance(loss, (str, dict)) and not is_by_name(loss)
        self.loss = keras.losses.get(loss) if is_described else loss

    @property
    def name(self) -> str:
        """The name of the loss in messages."""
        loss = self.loss
        name = loss.name if isinstance(loss, keras.losses.Loss) else self.function_name
        return str(name or type(loss).__name__)

    @property
    def is_function(self) -> bool:
        """Whether the loss is the caller's function, which may take labels in any structure."""
        loss = self.loss
        is_own = callable(loss) and not isinstance(loss, (keras.losses.Loss, type))
        return is_own and not str(loss.__module__).startswith("keras.")

    @property
    def from_logits(self) -> bool:
        """Whether the loss takes logits."""
        return bool(getattr(self.loss, "from_logits", False))

    @property
    def function_name(self) -> str:
        """The name of the function that the loss calls; empty if it calls none."""
        return getattr(self._function, "__name__", "")

    @property
    def takes_rows(self) -> bool:
        """Whether a Keras loss takes labels as one-hot rows."""
        return self._function in _OF_ROWS

    @property
    def takes_vectors(self) -> bool:
        """Whether a Keras loss compares labels and outputs entry by entry."""
        return self.takes_rows or (self._is_row_by_row and self._function is not _OF_CODES)

    @property
    def takes_two_classes(self) -> bool:
        """Whether a Keras loss takes labels in [0, 1], or of two classes."""
        return self._function in _OF_TWO

    @property
    def takes_codes(self) -> bool:
        """Whether the loss is Keras's cross-entropy of class codes, without ``ignore_class``."""
        return self._function is _OF_CODES and self._options.get("ignore_class") is None

    def is_plain_cross_entropy(self, kind: str) -> bool:
        """Returns whether the loss is Keras's plain cross-entropy of logits.

        ``kind`` is "binary", or "categorical" for labels as codes or one-hot rows.
        """
        classes: tuple[Any, ...] = (keras.losses.BinaryCrossentropy,)
        if kind == "categorical":
            classes = (
                keras.losses.CategoricalCrossentropy,
                keras.losses.SparseCategoricalCrossentropy,
            )
        if type(self.loss) not in classes:
            return False
        config = self.loss.get_config()
        special = config.get("label_smoothing") or config.get("ignore_class") is not None
        return bool(config.get("from_logits")) and not special and config.get("axis", -1) == -1

    def check(self) -> None:
        """Raises a ``TypeError`` for an object that is no loss."""
        found = self.loss
        is_keras = isinstance(found, keras.losses.Loss)
        if not is_keras and (isinstance(found, type) or not callable(found)):
            raise TypeError(
                "the loss must be a keras.losses.Loss, its name or a function of y_true and "
                f"y_pred, got {found!r}. Give an object, such as "
                "keras.losses.CategoricalCrossentropy()."
            )

    def of_examples(self) -> Callable[[Any, Any], tf.Tensor]:
        """Returns a callable ``(y_true, y_pred) -> (B,)``.

        The reduction of a ``keras.losses.Loss`` is ignored: gradients are clipped per example and
        later divided by the expected batch size. A loss with more axes, such as one number per time
        step, is averaged over them; entries that a mask of the output or of the loss leaves out do
        not count, as in Keras. The callable raises a ``ValueError`` for a loss over the batch.
        """
        self.check()
        is_keras = isinstance(self.loss, keras.losses.Loss)
        losses = _ExampleLosses(
            self.name,
            self.loss.call if is_keras else self.loss,
            self.loss.dtype if is_keras else None,
            is_named=self._is_named,
            is_row_by_row=self._is_row_by_row and self._options.get("axis", -1) == -1,
            # Class codes have one axis less than outputs.
            takes_codes=self._function is _OF_CODES,
        )
        return losses.of_batch

    def check_output(self, output: Any) -> None:
        """Raises a ``ValueError`` for a loss of probabilities on logits, and the reverse.

        ``output`` is symbolic, or None. Checks only outputs whose activation is known.
        """
        _checks.run("outputs", output, self._takes_logits)

    def check_targets(self, targets: str, noisy: NoisyLabels) -> None:
        """Raises, or warns, if the loss is not for ``noisy.targets(targets)``."""
        if isinstance(self.loss, ForwardCorrectedLoss):
            matrix = self.loss.transition_matrix
            _checks.run("corrected", targets, self.name, matrix, noisy.channel)
        is_for_signed = not self.takes_rows and self._function not in _NOT_LINEAR
        of_numbers = noisy.kind.label_range is not None
        _checks.run("targets", targets, self.name, is_for_signed, of_numbers)

    def check_stages(self) -> None:
        """Raises if the loss is for one channel: the examples of a later stage have their own."""
        if isinstance(self.loss, ForwardCorrectedLoss):
            raise ValueError(
                f"expected a loss of the stages' noisy rows, got {self.name!r}, which is for the "
                "labels of one channel. Use keras.losses.CategoricalCrossentropy."
            )

    def check_true_labels(self) -> None:
        """Warns if the loss, which is for noisy labels, gets true ones."""
        _checks.run("true labels", self.name, isinstance(self.loss, ForwardCorrectedLoss))

    @property
    def _takes_logits(self) -> bool | None:
        """Whether the loss takes logits, or probabilities; None for neither."""
        if "from_logits" in self._options:
            return bool(self._options["from_logits"])
        return False if self._function in _OF_PROBABILITIES else None

    def check_labels(self, output: Any, labels: tf.TensorSpec) -> None:
        """Raises a ``ValueError`` if a Keras loss can't take labels of this shape for an output.

        ``labels`` is the spec of a batch: the loss is traced, and no label is read.
        """
        if not self._is_row_by_row:
            return
        outputs = tf.TensorSpec((labels.shape[0], *output.shape[1:]), output.dtype)
        try:
            tf.function(self.of_examples()).get_concrete_function(labels, outputs)
        except (TypeError, ValueError) as error:
            shapes = [
                f"(n{''.join(f', {size}' for size in spec.shape[1:])})"
                for spec in (labels, outputs)
            ]
            raise ValueError(
                f"the loss {self.name!r} can't take labels of shape {shapes[0]} with a model "
                f"that returns {shapes[1]}. Class codes (n) need SparseCategoricalCrossentropy, "
                "one-hot rows CategoricalCrossentropy."
            ) from error

    @functools.cached_property
    def _function(self) -> Any:
        """The function of a Keras loss; other objects with ``fn`` may do more than call it."""
        is_keras = isinstance(self.loss, keras.losses.Loss)
        return getattr(self.loss, "fn", self.loss) if is_keras else self.loss

    @property
    def _options(self) -> dict[str, Any]:
        """The arguments of a Keras loss."""
        if not isinstance(self.loss, keras.losses.Loss):
            return {}
        # The configuration of some losses, such as CosineSimilarity, lacks the axis.
        return {**self.loss.get_config(), **getattr(self.loss, "_fn_kwargs", {})}

    @property
    def _is_row_by_row(self) -> bool:
        is_keras = isinstance(self.loss, keras.losses.Loss)
        is_exact = not is_keras or type(self.loss).__module__.startswith("keras.")
        return is_exact and self._function in _ROW_BY_ROW
