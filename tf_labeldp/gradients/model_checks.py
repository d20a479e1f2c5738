"""Checks of models and losses: no layer may mix examples, and losses must be per example."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tf_labeldp.features.estimator import symbolic_inputs
from tf_labeldp.gradients.masks import mask_of, mean_of_shown, shown_labels

_GROUP = "use LayerNormalization or GroupNormalization"
# By the name of a base class, to include layers of other packages.
_MIXING = {
    "BatchNormalization": _GROUP,
    "SyncBatchNormalization": _GROUP,
    "BatchRenormalization": _GROUP,
    "MixUp": "mix noisy labels in plain training, with tf_labeldp.keras_layers.Mixup",
    "CutMix": "augment each image by itself, for instance with RandomCrop",
    "SpectralNormalization": "bound the weights with a kernel_constraint",
}


def check_layers(model: keras.Model) -> None:
    """Raises a ``ValueError`` if the model mixes examples, adds losses, or has nothing to train.

    Clipping bounds the effect of one label on a step only if no layer uses statistics of the batch,
    and if no loss but the clipped one depends on labels (weight regularizers do not).
    """
    layers = all_layers(model)
    problems = []
    for layer in layers:
        families = [kind.__name__ for kind in type(layer).__mro__ if kind.__name__ in _MIXING]
        # A frozen BatchNormalization uses its moving averages, not the batch.
        frozen = families == ["BatchNormalization"] and not layer.trainable
        if families and not frozen:
            problems.append(f"{layer.name!r} ({type(layer).__name__}): {_MIXING[families[0]]}")
    if problems:
        raise ValueError(
            "these layers mix the examples of a batch, so clipping one example's gradient does not "
            "bound the effect of its label: " + "; ".join(problems) + ". A BatchNormalization may "
            "stay if it is frozen (trainable=False)."
        )
    regularized = [
        layer.name
        for layer in layers
        if getattr(layer, "activity_regularizer", None) is not None
        or isinstance(layer, keras.layers.ActivityRegularization)
    ]
    if regularized:
        raise ValueError(
            f"layers {regularized} have activity regularizers, whose loss is not clipped. Use "
            "kernel_regularizer, or add the term to the per-example loss."
        )
    stateful = [layer.name for layer in layers if getattr(layer, "stateful", False)]
    if stateful:
        raise ValueError(
            f"layers {stateful} keep their state, which carries examples into later steps. Use "
            "stateful=False."
        )
    weight_losses = sum(v.regularizer is not None for v in model.trainable_variables)
    if len(model.losses) > weight_losses:
        raise added_loss(model)
    if model.built and not model.trainable_variables:
        raise ValueError(
            f"model {model.name!r} has no trainable variables. Set trainable=True on some layers."
        )


def added_loss(model: keras.Model) -> ValueError:
    """Returns the error for a model whose layers call ``add_loss``."""
    return ValueError(
        f"model {model.name!r} has losses from add_loss, which are not clipped. Add the term to "
        "the per-example loss."
    )


def all_layers(model: keras.Model) -> list[Any]:
    """Returns the model and all layers inside it, each once, outer layers first."""
    return parts_of(model, keras.Layer)


def parts_of(model: keras.Model, kind: type) -> list[Any]:
    """Returns all instances of a class in the attributes of the model and its layers, each once.

    ``model.layers`` leaves out the layers of wrappers and custom layers.
    """
    found: list[Any] = []
    visited: set[int] = set()
    pending: list[Any] = [model]
    while pending:
        value = pending.pop(0)
        if id(value) in visited:
            continue
        visited.add(id(value))
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


# These compare row by row if labels and outputs have the same rank; otherwise they broadcast the
# label of one example against the output of another. Other losses, such as Circle, may use the
# whole batch.
_ROW_BY_ROW = [
    getattr(keras.losses, name)
    for name in """
    binary_crossentropy binary_focal_crossentropy categorical_crossentropy
    categorical_focal_crossentropy categorical_hinge cosine_similarity hinge huber kl_divergence
    log_cosh mean_absolute_error mean_absolute_percentage_error mean_squared_error
    mean_squared_logarithmic_error poisson sparse_categorical_crossentropy squared_hinge
    """.split()
]
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
# These take probabilities unless from_logits=True.
_OF_PROBABILITIES = [
    _OF_CODES,
    *_OF_ROWS,
    keras.losses.binary_crossentropy,
    keras.losses.binary_focal_crossentropy,
]


def loss_object(loss: Any) -> Any:
    """Returns the Keras loss for a name or configuration, and any other object unchanged."""
    return keras.losses.get(loss) if isinstance(loss, (str, dict)) else loss


def name_of(loss: Any) -> str:
    """Returns the name of a loss for messages."""
    loss = loss_object(loss)
    return str(getattr(loss, "name", None) or getattr(loss, "__name__", type(loss).__name__))


def _function_of(loss: Any) -> Any:
    """Returns the function of a Keras loss; other objects with ``fn`` may do more than call it."""
    loss = loss_object(loss)
    return getattr(loss, "fn", loss) if isinstance(loss, keras.losses.Loss) else loss


def _is_row_by_row(loss: Any) -> bool:
    loss = loss_object(loss)
    exact = not isinstance(loss, keras.losses.Loss) or type(loss).__module__.startswith("keras.")
    return exact and _function_of(loss) in _ROW_BY_ROW


def takes_rows(loss: Any) -> bool:
    """Returns whether a Keras loss takes labels as one-hot rows."""
    return _function_of(loss) in _OF_ROWS


def takes_vectors(loss: Any) -> bool:
    """Returns whether a Keras loss compares labels and outputs entry by entry."""
    return takes_rows(loss) or (_is_row_by_row(loss) and _function_of(loss) is not _OF_CODES)


def takes_two_classes(loss: Any) -> bool:
    """Returns whether a Keras loss takes labels in [0, 1], or of two classes."""
    return _function_of(loss) in _OF_TWO


def takes_codes(loss: Any) -> bool:
    """Returns whether a loss is Keras's cross-entropy of class codes, without ``ignore_class``."""
    ignored = getattr(loss_object(loss), "ignore_class", None)
    return ignored is None and _function_of(loss) is _OF_CODES


def is_plain_cross_entropy(loss: Any, kind: str) -> bool:
    """Returns whether a loss is Keras's plain cross-entropy of logits.

    ``kind`` is "binary", or "categorical" for labels as codes or one-hot rows.
    """
    loss = loss_object(loss)
    classes: tuple[Any, ...] = (keras.losses.BinaryCrossentropy,)
    if kind == "categorical":
        classes = (keras.losses.CategoricalCrossentropy, keras.losses.SparseCategoricalCrossentropy)
    if type(loss) not in classes:
        return False
    config = loss.get_config()
    special = config.get("label_smoothing") or config.get("ignore_class") is not None
    return bool(config.get("from_logits")) and not special and config.get("axis", -1) == -1


def per_example_loss(loss: Any) -> Callable[[Any, Any], tf.Tensor]:
    """Returns a callable ``(y_true, y_pred) -> (B,)`` for any loss that Keras takes.

    The reduction of a ``keras.losses.Loss`` is ignored: gradients are clipped per example and
    later divided by the expected batch size. A loss with more axes, such as one number per time
    step, is averaged over them; entries that a mask of the output or of the loss leaves out do not
    count, as in Keras. The callable raises a ``ValueError`` for a loss over the batch.
    """
    found = loss_object(loss)
    is_keras = isinstance(found, keras.losses.Loss)
    if not is_keras and (isinstance(found, type) or not callable(found)):
        raise TypeError(
            "the loss must be a keras.losses.Loss, its name or a function of y_true and y_pred, "
            f"got {found!r}. Give an object, such as keras.losses.CategoricalCrossentropy()."
        )
    function = found.call if is_keras else found
    dtype = found.dtype if is_keras else None
    # The configuration of some losses, such as CosineSimilarity, lacks the axis.
    options = {**found.get_config(), **getattr(found, "_fn_kwargs", {})} if is_keras else {}
    axis = options.get("axis", -1)
    row_by_row = _is_row_by_row(found) and axis == -1
    # Class codes have one axis less than outputs.
    is_sparse = _function_of(found) is _OF_CODES

    def batch_losses(y_true: Any, y_pred: Any, mask: Any = None) -> tf.Tensor:
        if mask is not None and row_by_row:
            y_true = shown_labels(y_true, mask)
        losses = function(y_true, y_pred)
        # Keras's `ignore_class` is a mask of the losses.
        masks = [part for part in (mask, mask_of(losses)) if part is not None]
        losses = tf.convert_to_tensor(losses)
        batch, rank = tf.nest.flatten(y_pred)[0].shape[0], losses.shape.rank
        if rank == 0 or (None not in (batch, losses.shape[0]) and losses.shape[0] != batch):
            raise ValueError(
                f"losses must be per example: for {batch} examples the loss {name_of(found)!r} "
                f"must return shape ({batch},), got shape {tuple(losses.shape)}."
            )
        return mean_of_shown(losses, masks)

    def row_loss(row: Any) -> tf.Tensor:
        return batch_losses(*tf.nest.map_structure(lambda part: part[tf.newaxis], row))[0]

    def losses_of(y_true: Any, y_pred: Any) -> tf.Tensor:
        masks = () if mask_of(y_pred) is None else (tf.convert_to_tensor(mask_of(y_pred)),)
        # The dtype is that of Loss.__call__.
        y_true, y_pred = tf.nest.map_structure(
            lambda values: keras.ops.convert_to_tensor(values, dtype=dtype), (y_true, y_pred)
        )
        if (isinstance(loss, str) or masks) and tf.is_tensor(y_true) and tf.is_tensor(y_pred):
            # For a loss by name, Keras allows labels (B,) with outputs (B, 1). With masks it needs
            # one loss per step.
            if y_pred.shape.rank == y_true.shape.rank + 1 and y_pred.shape[-1] == 1:
                y_true = y_true[..., tf.newaxis]
        ranks = {part.shape.rank for part in tf.nest.flatten((y_true, y_pred))}
        is_batched = row_by_row and (is_sparse or len(ranks) == 1)
        if is_batched or tf.nest.flatten(y_pred)[0].shape[0] == 1:
            return batch_losses(y_true, y_pred, *masks)
        return tf.vectorized_map(row_loss, (y_true, y_pred, *masks), warn=False)

    return losses_of


def check_output(output: Any, loss: Any) -> None:
    """Raises a ``ValueError`` for a loss of probabilities on an output of logits.

    ``output`` is symbolic, or None. Checks only outputs of Keras's ``Dense``.
    """
    last: Any = getattr(getattr(output, "_keras_history", None), "operation", None)
    if type(last) is not keras.layers.Dense or last.activation is not keras.activations.linear:
        return
    found = loss_object(loss)
    from_logits = isinstance(found, keras.losses.Loss) and found.get_config().get("from_logits")
    if _function_of(found) in _OF_PROBABILITIES and not from_logits:
        raise ValueError(
            f"the model ends in {last.name!r}, a Dense layer without activation, and the loss "
            "takes probabilities. Give the loss from_logits=True, or end the model in a softmax."
        )


def check_features_fit(model: keras.Model, features: Any) -> None:
    """Raises if a functional or sequential model can't take these features.

    ``features`` are arrays, tensors, or the ``tf.TensorSpec`` of a batch, in their structure.

    Raises:
        TypeError: texts for an input of numbers.
        ValueError: other shapes or names than the model has.
    """
    if not getattr(model, "inputs", None):
        return
    inputs = dict(enumerate(model.inputs))
    found = dict(enumerate(tf.nest.flatten(features)))
    structure = symbolic_inputs(model)
    if isinstance(structure, dict) and isinstance(features, dict):
        inputs, found = structure, features
    shapes = {name: tuple(spec.shape[1:]) for name, spec in found.items()}
    expected = {name: tuple(spec.shape[1:]) for name, spec in inputs.items()}
    fits = set(expected) <= set(shapes) and all(
        # Keras adds or drops an axis of size one.
        len(shape) != len(shapes[name])
        or all(None in (a, b) or a == b for a, b in zip(shape, shapes[name], strict=True))
        for name, shape in expected.items()
    )
    if not fits:
        one = len(expected) == 1 == len(shapes)
        raise ValueError(
            f"expected features of shape {expected[next(iter(expected))] if one else expected} per "
            f"example, as the model takes, got {shapes[next(iter(shapes))] if one else shapes}. "
            "Give one array for each input of the model."
        )
    for name, tensor in inputs.items():
        if tf.as_dtype(found[name].dtype) == tf.string != tf.as_dtype(tensor.dtype):
            raise TypeError(
                f"expected numbers for the input {tensor.name!r} of the model, got texts. Encode "
                "them: encoder=tf_labeldp.features.RandomFourierFeatures().fit(table), or a layer "
                "such as keras.layers.StringLookup after an input of texts."
            )


def check_missing(model: keras.Model, features: Any) -> None:
    """Raises a ``ValueError`` if a model returns NaN or infinity where features have one.

    A model may fill in missing numbers itself. ``features`` are all examples, a nest of arrays
    or tensors.
    """
    has_hole: Any = False
    for part in map(np.asarray, keras.tree.flatten(features)):
        # The sum finds out without memory for a mask.
        if part.dtype.kind == "f" and not np.isfinite(part.sum(dtype=np.float64)):
            has_hole = has_hole | ~np.isfinite(part.reshape(len(part), -1)).all(axis=1)
    if not np.any(has_hole):
        return
    first = int(np.argmax(has_hole))
    row = keras.tree.map_structure(lambda part: part[first : first + 1], features)
    outputs = keras.tree.flatten(model(row, training=False))
    if not all(np.isfinite(keras.ops.convert_to_numpy(output)).all() for output in outputs):
        raise ValueError(
            f"expected finite features, got NaN or infinity in {np.count_nonzero(has_hole)} "
            f"examples, the first in row {first}, where the model returns NaN or infinity. Fill "
            "them in, by a rule that reads no label, or in a layer of the model."
        )


def check_labels_fit(output: Any, loss: Any, labels: tf.TensorSpec) -> None:
    """Raises a ``ValueError`` if a Keras loss can't take labels of this shape for an output.

    ``labels`` is the spec of a batch: the loss is traced, and no label is read.
    """
    if not _is_row_by_row(loss):
        return
    outputs = tf.TensorSpec((labels.shape[0], *output.shape[1:]), output.dtype)
    try:
        tf.function(per_example_loss(loss)).get_concrete_function(labels, outputs)
    except (TypeError, ValueError) as error:
        shapes = [
            f"(n{''.join(f', {size}' for size in spec.shape[1:])})" for spec in (labels, outputs)
        ]
        raise ValueError(
            f"the loss {name_of(loss)!r} can't take labels of shape {shapes[0]} with a model "
            f"that returns {shapes[1]}. Class codes (n) need SparseCategoricalCrossentropy, "
            "one-hot rows CategoricalCrossentropy."
        ) from error
