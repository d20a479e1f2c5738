"""The losses of a model's outputs: one per example for each, and their weighted sum."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from tf_labeldp import _validate
from tf_labeldp.gradients.model_checks import (
    check_labels_fit,
    check_output,
    loss_object,
    per_example_loss,
)


@dataclasses.dataclass(frozen=True, eq=False)
class OutputLoss:
    """The loss of one output.

    Attributes:
        name: key of the output in a dict of outputs, or the name of its layer.
        place: place of the output in a list of outputs.
        output: the symbolic output; None if the model is not functional.
        loss: the loss that the model was compiled with.
        of_examples: (y_true, y_pred) -> (B,)
        weight: factor of the loss in the sum.
        class_weights: factors of the losses by class, (K,); None without.
    """

    name: str
    place: int
    output: Any
    loss: Any
    of_examples: Callable[[Any, Any], tf.Tensor]
    weight: float = 1.0
    class_weights: Sequence[float] | None = None

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
        outputs = named_outputs(model)
        self.names = tuple(outputs)
        found = loss if _is_by_name(loss) else loss_object(loss)
        # Keras's own losses are of one output each.
        self.is_function = (
            callable(found)
            and not isinstance(found, (keras.losses.Loss, type))
            and not getattr(found, "__module__", "").startswith("keras.")
        )
        if self.is_function and len(outputs) > 1:
            if loss_weights is not None:
                raise ValueError(
                    "expected losses by output for loss_weights, got one function of all outputs. "
                    "Weigh them in the function."
                )
            self.parts = [OutputLoss("", 0, None, loss, per_example_loss(loss))]
            return
        losses = by_output(loss, self.names, "loss")
        weights = by_output(1.0 if loss_weights is None else loss_weights, self.names, "weight")
        self.parts = [
            OutputLoss(
                name,
                place,
                outputs[name],
                losses[name],
                per_example_loss(losses[name]),
                _validate.number_in("loss_weights", weights.get(name, 1.0), "(-inf, inf)"),
            )
            for place, name in enumerate(outputs)
            if losses.get(name) is not None
        ]
        if not self.parts:
            per_example_loss(None)  # raises
        for part in self.parts:
            check_output(part.output, part.loss)

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
                    check_labels_fit(part.output, part.loss, spec)
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


def named_outputs(model: keras.Model) -> dict[str, Any]:
    """Returns the symbolic outputs of a model by name; one without a name if they are unknown."""
    outputs = getattr(model, "outputs", None)
    if not outputs:
        return {"": None}
    if isinstance(model, keras.Sequential):  # It has no ``output`` before another model calls it.
        return {model.layers[-1].name: outputs[0]}
    if len(outputs) == 1 and not isinstance(model.output, Mapping):
        return {model.output_names[0]: outputs[0]}
    structure = model.output
    if isinstance(structure, Mapping):
        named = dict(structure)
    else:
        named = dict(zip(model.output_names, structure, strict=False))
    if len(named) != len(outputs) or any(keras.tree.is_nested(v) for v in named.values()):
        raise ValueError(
            f"expected outputs with a name each, in one dict or list, got {model.output_names}. "
            "Name the last layers, or return keras.Model(inputs, {'name': output, ...})."
        )
    return named


def _is_by_name(values: Any) -> bool:
    # Keras's configuration of one loss is a dict with this key.
    return isinstance(values, Mapping) and "class_name" not in values


def by_output(values: Any, names: Sequence[str], what: str) -> dict[str, Any]:
    """Returns a loss or weight for each output, from one for all, a dict, or a list."""
    if _is_by_name(values):
        unknown = [name for name in values if name not in names]
        if unknown:
            raise ValueError(
                f"expected a {what} for the outputs {list(names)}, got one for {unknown}. Name "
                "the outputs as the model does."
            )
        return dict(values)
    if isinstance(values, (list, tuple)):
        if len(values) != len(names):
            raise ValueError(
                f"expected a {what} for each of the {len(names)} outputs, got {len(values)}. Use "
                "a dict to leave some out."
            )
        return dict(zip(names, values, strict=True))
    if what == "weight" and len(names) > 1 and values != 1.0:
        raise ValueError(
            f"expected loss_weights for the outputs {list(names)}, got {values!r}. Give a dict or "
            "a list."
        )
    return dict.fromkeys(names, values)
