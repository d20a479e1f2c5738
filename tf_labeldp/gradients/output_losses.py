"""The losses of a model's outputs: one per example for each, and their weighted sum."""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from tf_labeldp import _validate
from tf_labeldp.gradients.keras_loss import KerasLoss
from tf_labeldp.gradients.model_checks import InspectedModel


@dataclasses.dataclass(frozen=True, eq=False)
class OutputLoss:
    """The loss of one output.

    Attributes:
        name: key of the output in a dict of outputs, or the name of its layer.
        place: place of the output in a list of outputs.
        output: the symbolic output; None if the model is not functional.
        loss: the loss that the model was compiled with.
        weight: factor of the loss in the sum.
        class_weights: factors of the losses by class, (K,); None without.
    """

    name: str
    place: int
    output: Any
    loss: KerasLoss
    weight: float = 1.0
    class_weights: Sequence[float] | None = None

    def __post_init__(self) -> None:
        self.loss.check()

    @property
    def units(self) -> int | None:
        """The number of units of the output, if it has rows of a known size."""
        shape: Any = () if self.output is None else self.output.shape
        return shape[-1] if len(shape) > 1 else None

    @functools.cached_property
    def of_examples(self) -> Callable[[Any, Any], tf.Tensor]:
        """The loss without a factor: (y_true, y_pred) -> (B,)."""
        return self.loss.of_examples()

    @property
    def is_plain(self) -> bool:
        """Whether the loss has neither a factor nor class weights."""
        return self.weight == 1.0 and self.class_weights is None

    def losses(self, y_true: Any, y_pred: Any) -> tf.Tensor:
        """Returns the weighted losses (B,) for labels and predictions of the output."""
        losses = self.of_examples(y_true, y_pred)
        if self.is_plain:
            return losses
        # Losses of other dtypes, such as float16, are added up in float32.
        losses = self.weight * tf.cast(losses, tf.float32)
        if self.class_weights is None:
            return losses
        return losses * _weights_of_labels(tf.convert_to_tensor(y_true), self.class_weights)

    def part(self, values: Any) -> Any:
        """Returns the entry of this output in labels or predictions of all outputs."""
        if isinstance(values, Mapping):
            return values[self.name]
        return values[self.place] if isinstance(values, (list, tuple)) else values


class OutputLosses:
    """The weighted sum of the losses of a model's outputs, one number per example.

    Calling it with labels and predictions, each a tensor or a dict, list or tuple with an entry for
    each output, returns the losses (B,). So one clip bounds the gradient of the sum.

    Attributes:
        parts: the losses of the outputs that have one.
        names: the names of all outputs, in order.
        is_function: whether the only loss is the caller's function, which may take labels in any
            structure; with several outputs it takes all of them.

    Raises:
        TypeError: a loss that is no loss, or weights that are no numbers.
        ValueError: losses or weights for other outputs than those of the model.
    """

    def __init__(self, model: keras.Model, loss: Any, loss_weights: Any = None) -> None:
        inspected = InspectedModel(model)
        outputs = inspected.outputs
        self.names = tuple(outputs)
        # Keras's own losses are of one output each.
        self.is_function = KerasLoss(loss).is_function
        if self.is_function and len(outputs) > 1:
            if loss_weights is not None:
                raise ValueError(
                    "expected losses by output for loss_weights, got one function of all outputs. "
                    "Weigh them in the function."
                )
            self.parts = [OutputLoss("", 0, None, KerasLoss(loss))]
            return
        losses = inspected.by_output(loss, "loss")
        weights = inspected.by_output(1.0 if loss_weights is None else loss_weights, "weight")
        self.parts = [
            OutputLoss(
                name,
                place,
                outputs[name],
                KerasLoss(losses[name]),
                _validate.number_in("loss_weights", weights.get(name, 1.0), "(-inf, inf)"),
            )
            for place, name in enumerate(outputs)
            if losses.get(name) is not None
        ]
        if not self.parts:
            KerasLoss(None).check()  # raises
        for part in self.parts:
            part.loss.check_output(part.output)
            part.loss.check_true_labels()

    def __call__(self, y_true: Any, y_pred: Any) -> tf.Tensor:
        """Returns the weighted sum of the losses, (B,)."""
        if self._takes_whole(y_true):
            y_pred = y_pred if self.only is None else self.parts[0].part(y_pred)
            return self.parts[0].of_examples(y_true, y_pred)
        terms = [part.losses(part.part(y_true), part.part(y_pred)) for part in self.parts]
        if len(terms) == 1:
            return terms[0]
        return tf.add_n([tf.cast(losses, tf.float32) for losses in terms])

    def with_class_weights(self, tables: Mapping[str, Sequence[float]]) -> OutputLosses:
        """Returns these losses with the weights (K,) of each class, by output."""
        weighted = copy.copy(self)
        weighted.parts = [
            dataclasses.replace(part, class_weights=tables.get(part.name)) for part in self.parts
        ]
        return weighted

    def pairs(self, labels: Any) -> list[tuple[OutputLoss, Any]]:
        """Returns each loss with the labels of its output, out of labels of the whole model.

        Raises:
            ValueError: other labels than the outputs need.
        """
        if self._takes_whole(labels):
            return []
        needed = {part.name for part in self.parts}
        if isinstance(labels, Mapping):
            fits = set(labels) == needed
            got = f"labels of {sorted(map(str, labels))}"
        elif isinstance(labels, (list, tuple)):
            fits, got = len(labels) == len(self.names) == len(needed), f"{len(labels)} labels"
        else:
            fits, got = len(self.names) == 1, "labels without names"
        if not fits:
            names = ", ".join(f"{part.name!r}: ..." for part in self.parts)
            raise ValueError(
                f"expected labels for the outputs {sorted(needed)}, got {got}. Give a dict, "
                f"{{{names}}}; poisson_batches takes columns= for a vault of rows."
            )
        return [(part, part.part(labels)) for part in self.parts]

    def check_labels_fit(self, specs: Any) -> None:
        """Raises a ``ValueError`` if a Keras loss can't take labels of these shapes."""
        for part, spec in self.pairs(specs):
            if part.output is not None:
                with_name = f"output {part.name!r}: " if len(self.names) > 1 else ""
                try:
                    part.loss.check_labels(part.output, spec)
                except ValueError as error:
                    raise ValueError(f"{with_name}{error}") from error

    def _takes_whole(self, labels: Any) -> bool:
        if not self.is_function or self.only is None:
            return self.is_function
        named = isinstance(labels, Mapping) and set(labels) == set(self.names)
        return keras.tree.is_nested(labels) and not named

    @property
    def only(self) -> OutputLoss | None:
        """The loss of a model with one output; None for several."""
        return self.parts[0] if len(self.names) == 1 else None


def _weights_of_labels(labels: tf.Tensor, table: Sequence[float]) -> tf.Tensor:
    """Returns the weight (B,) of labels: codes (B,) or (B, 1), or one-hot rows (B, K)."""
    if labels.shape.rank == 2 and labels.shape[1] == len(table):
        rows = tf.cast(labels, tf.float32)
    else:
        # Other codes get zeros; an error of a look-up would quote them.
        rows = tf.one_hot(tf.cast(tf.reshape(labels, (-1,)), tf.int32), len(table))
    return tf.linalg.matvec(rows, tf.constant(table, tf.float32))
