"""What a model and its loss may be: no layer mixes examples, and each example has its loss."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

_GROUP = "LayerNormalization or GroupNormalization"
# By the names in a layer's family tree, so that relatives from other packages are found too.
_MIXING = {
    "BatchNormalization": f"use {_GROUP}",
    "SyncBatchNormalization": f"use {_GROUP}",
    "BatchRenormalization": f"use {_GROUP}",
    "MixUp": "use tf_labeldp.keras_layers.Mixup on the data, before labels are private",
    "CutMix": "augment each image apart, for instance with RandomCrop",
    "SpectralNormalization": "bound the weights with a kernel_constraint",
}


def check_layers(model: keras.Model) -> None:
    """Raises if the model mixes examples, has losses of its own, or has nothing to train.

    Clipping bounds what one label can do to a step only if no layer uses statistics of the batch,
    and if the clipped loss is the only one (weight regularizers are fine: no label enters them).
    Layers are found wherever they are: in nested models, wrappers and attributes of custom layers.

    Raises:
        ValueError: layers that mix examples (all of them are named, with what to use instead),
            activity regularizers, losses from ``add_loss``, or no trainable variable.

    Example:
        >>> import keras
        >>> layers = [keras.Input((4,)), keras.layers.BatchNormalization(), keras.layers.Dense(2)]
        >>> try:
        ...     check_layers(keras.Sequential(layers))
        ... except ValueError as error:
        ...     print(str(error)[:42])
        these layers mix the examples of a batch,
    """
    layers = all_layers(model)
    problems = []
    for layer in layers:
        families = [kind.__name__ for kind in type(layer).__mro__ if kind.__name__ in _MIXING]
        frozen = families == ["BatchNormalization"] and not layer.trainable
        if families and not frozen:  # a frozen one uses its moving averages, not the batch
            problems.append(f"{layer.name!r} ({type(layer).__name__}): {_MIXING[families[0]]}")
    if problems:
        raise ValueError(
            "these layers mix the examples of a batch, so that clipping one example's gradient "
            "does not bound what its label does: " + "; ".join(problems) + ". A "
            "BatchNormalization may stay if it is frozen (trainable=False)."
        )
    regularized = [
        layer.name
        for layer in layers
        if getattr(layer, "activity_regularizer", None) is not None
        or isinstance(layer, keras.layers.ActivityRegularization)
    ]
    if regularized:
        raise ValueError(
            f"layers {regularized} have activity regularizers, whose loss would be trained on "
            "outside of the clipped one. Regularize the weights instead (kernel_regularizer), or "
            "put the term into the per-example loss."
        )
    weight_losses = sum(v.regularizer is not None for v in model.trainable_variables)
    if len(model.losses) > weight_losses:
        raise added_loss(model)
    if model.built and not model.trainable_variables:
        raise ValueError(
            f"model {model.name!r} has no trainable variables. Set trainable=True on the layers "
            "that are to learn."
        )


def added_loss(model: keras.Model) -> ValueError:
    """Returns the error for a model that adds losses while it is called."""
    return ValueError(
        f"model {model.name!r} has losses from add_loss, which would be trained on outside of the "
        "clipped loss. Put the term into the per-example loss."
    )


def all_layers(model: keras.Model) -> list[Any]:
    """Returns the model and every layer inside it, each once, from outside in."""
    return parts_of(model, keras.Layer)


def parts_of(model: keras.Model, kind: type) -> list[Any]:
    """Returns all objects of a kind that the model or its layers hold, each once.

    Keras lists the layers of models only; those of wrappers and custom layers are attributes.
    """
    found: list[Any] = []
    seen: set[int] = set()
    pending: list[Any] = [model]
    while pending:
        value = pending.pop(0)
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, kind):
            found.append(value)
        if isinstance(value, keras.Layer):
            pending.extend(getattr(value, "layers", []))
            pending.extend(vars(value).values())
        elif isinstance(value, dict):
            pending.extend(value.values())
        elif isinstance(value, (list, tuple, set)):
            pending.extend(value)
    return found


# They compare row by row, where labels and outputs have the same rank: without, they broadcast one
# example's label against another's output. Any other loss might look at the batch, as Circle does.
_ROW_BY_ROW = {
    getattr(keras.losses, name)
    for name in """
    BinaryCrossentropy BinaryFocalCrossentropy CategoricalCrossentropy CategoricalFocalCrossentropy
    CategoricalHinge CosineSimilarity Hinge Huber KLDivergence LogCosh MeanAbsoluteError
    MeanAbsolutePercentageError MeanSquaredError MeanSquaredLogarithmicError Poisson
    SparseCategoricalCrossentropy SquaredHinge binary_crossentropy binary_focal_crossentropy
    categorical_crossentropy categorical_focal_crossentropy categorical_hinge cosine_similarity
    hinge huber kl_divergence log_cosh mean_absolute_error mean_absolute_percentage_error
    mean_squared_error mean_squared_logarithmic_error poisson sparse_categorical_crossentropy
    squared_hinge
    """.split()
}
# Labels have one axis less than outputs, and are looked up.
_CODES = {keras.losses.SparseCategoricalCrossentropy, keras.losses.sparse_categorical_crossentropy}


def loss_object(loss: Any) -> Any:
    """Returns a loss of Keras for its name or configuration, and any other as it is."""
    return keras.losses.get(loss) if isinstance(loss, (str, dict)) else loss


def per_example_loss(loss: Any) -> Callable[[Any, Any], tf.Tensor]:
    """Returns a callable ``(y_true, y_pred) -> (B,)`` from anything that Keras takes as a loss.

    The reduction of a ``keras.losses.Loss`` is left out: gradients are clipped one by one and
    divided by the expected batch size later. Losses with more axes (one number a time step, say)
    are averaged over them. The callable raises a ``ValueError`` where the loss is not per example.

    Args:
        loss: a ``keras.losses.Loss``, the name of one, or a function of ``y_true`` and ``y_pred``
            that returns one number an example.

    Raises:
        TypeError: not a loss.
        ValueError: no loss has that name.

    Example:
        >>> import keras, numpy as np
        >>> squared = per_example_loss(keras.losses.MeanSquaredError())
        >>> print(squared(np.array([[1.0], [2.0]]), np.array([[1.0], [5.0]])).numpy())
        [0. 9.]
    """
    found = loss_object(loss)
    is_keras = isinstance(found, keras.losses.Loss)
    if not is_keras and (isinstance(found, type) or not callable(found)):
        given = f"the class {found.__name__}" if isinstance(found, type) else repr(found)
        raise TypeError(
            "the loss must be a keras.losses.Loss, its name or a function of y_true and y_pred, "
            f"got {given}. Losses must be per example: for instance "
            "keras.losses.SparseCategoricalCrossentropy(from_logits=True)."
        )
    function = found.call if is_keras else found
    name = str(getattr(found, "name", None) or getattr(found, "__name__", type(found).__name__))
    axis = found.get_config().get("axis", -1) if is_keras else -1
    kind = type(found) if is_keras else found
    row_by_row = kind in _ROW_BY_ROW and axis == -1
    is_sparse = kind in _CODES

    def one_call(y_true: Any, y_pred: Any) -> tf.Tensor:
        losses = tf.convert_to_tensor(function(y_true, y_pred))
        batch, rank = tf.nest.flatten(y_pred)[0].shape[0], losses.shape.rank
        if rank == 0 or (None not in (batch, losses.shape[0]) and losses.shape[0] != batch):
            raise ValueError(
                f"losses must be per example: for {batch} examples the loss {name!r} must return "
                f"shape ({batch},), got shape {tuple(losses.shape)}. A loss that adds up or "
                "averages over examples cannot be clipped example by example; return the losses "
                "before that, as keras.losses.Loss objects do with any reduction."
            )
        return losses if rank == 1 else tf.reduce_mean(losses, axis=list(range(1, rank)))

    def alone(row: Any) -> tf.Tensor:
        y_true, y_pred = tf.nest.map_structure(lambda part: part[tf.newaxis], row)
        return one_call(y_true, y_pred)[0]

    def losses_of(y_true: Any, y_pred: Any) -> tf.Tensor:
        # With dtype as in Loss.__call__, which reduces afterwards.
        dtype = found.dtype if is_keras else None
        y_true, y_pred = tf.nest.map_structure(
            lambda values: keras.ops.convert_to_tensor(values, dtype=dtype), (y_true, y_pred)
        )
        if isinstance(loss, str) and tf.is_tensor(y_true) and tf.is_tensor(y_pred):
            # As Keras does for losses by name: labels (B,) for outputs (B, 1).
            if y_pred.shape.rank == y_true.shape.rank + 1 and y_pred.shape[-1] == 1:
                y_true = y_true[..., tf.newaxis]
        ranks = {part.shape.rank for part in tf.nest.flatten((y_true, y_pred))}
        together = row_by_row and (is_sparse or len(ranks) == 1)
        if together or tf.nest.flatten(y_pred)[0].shape[0] == 1:
            return one_call(y_true, y_pred)
        return tf.vectorized_map(alone, (y_true, y_pred), warn=False)

    return losses_of


_OF_PROBABILITIES = (
    keras.losses.BinaryCrossentropy,
    keras.losses.BinaryFocalCrossentropy,
    keras.losses.CategoricalCrossentropy,
    keras.losses.CategoricalFocalCrossentropy,
    keras.losses.SparseCategoricalCrossentropy,
)
_OF_PROBABILITIES_TOO = (  # as functions, which take them unless told otherwise
    keras.losses.binary_crossentropy,
    keras.losses.binary_focal_crossentropy,
    keras.losses.categorical_crossentropy,
    keras.losses.categorical_focal_crossentropy,
    keras.losses.sparse_categorical_crossentropy,
)


def check_outputs(model: keras.Model, loss: Any) -> None:
    """Raises a ``ValueError`` for a loss of probabilities on a model that ends in logits.

    Of a last layer that is not Keras's own dense one nothing is known.
    """
    outputs = getattr(model, "outputs", None) or [None]
    last: Any = getattr(getattr(outputs[0], "_keras_history", None), "operation", None)
    if type(last) is not keras.layers.Dense or last.activation is not keras.activations.linear:
        return
    found = loss_object(loss)
    if isinstance(found, _OF_PROBABILITIES):
        wrong = not found.get_config().get("from_logits", False)
    else:
        wrong = any(found is one for one in _OF_PROBABILITIES_TOO)
    if wrong:
        raise ValueError(
            f"the model ends in {last.name!r}, a Dense layer without activation, and the loss "
            "takes probabilities. Give the loss from_logits=True, such as keras.losses."
            "SparseCategoricalCrossentropy(from_logits=True), or end the model in a softmax (or "
            "sigmoid)."
        )


def takes_rows(loss: Any) -> bool:
    """Returns whether a loss of Keras takes labels as rows, one-hot."""
    found = loss_object(loss)
    kinds = (keras.losses.CategoricalCrossentropy, keras.losses.CategoricalFocalCrossentropy)
    return isinstance(found, kinds) or found in _OF_PROBABILITIES_TOO[2:4]


def takes_codes(loss: Any) -> bool:
    """Returns whether a loss is Keras's cross-entropy of class codes, without one to ignore."""
    found = loss_object(loss)
    if getattr(found, "ignore_class", None) is not None:
        return False
    function = keras.losses.sparse_categorical_crossentropy
    is_one = isinstance(found, keras.losses.SparseCategoricalCrossentropy)
    return is_one or found is function or getattr(found, "fn", None) is function


def check_labels_fit(model: keras.Model, loss: Any, labels: Any) -> None:
    """Raises a ``ValueError`` where one of Keras's losses can't take labels of these shapes.

    The loss is traced, so that no label is read. Of any other loss nothing is known.

    Args:
        model: functional.
        loss: as for ``per_example_loss``.
        labels: ``tf.TensorSpec`` of a batch of labels.
    """
    found = loss_object(loss)
    if type(found) not in _ROW_BY_ROW and found not in _ROW_BY_ROW:
        return
    rows = tf.nest.flatten(labels)[0].shape[0]
    made = [tf.TensorSpec((rows, *one.shape[1:]), one.dtype) for one in model.outputs]
    outputs = made[0] if len(made) == 1 else made
    try:
        tf.function(per_example_loss(loss)).get_concrete_function(labels, outputs)
    except (TypeError, ValueError) as error:
        came, returned = (
            " and ".join(f"(n{''.join(f', {size}' for size in one.shape[1:])})" for one in specs)
            for specs in (tf.nest.flatten(labels), made)
        )
        name = getattr(found, "name", None) or getattr(found, "__name__", None)
        raise ValueError(
            f"the loss {name!r} can't take labels of shape {came} with a model that returns "
            f"{returned}. Class codes (n) need SparseCategoricalCrossentropy, one-hot rows "
            "CategoricalCrossentropy, and several outputs a loss of your own."
        ) from error
