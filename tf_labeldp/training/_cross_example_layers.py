"""Refuses models whose training would not be what per-example clipping bounds."""

from __future__ import annotations

from typing import Any

import keras

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

    Per-example clipping bounds what one label can do to a step only if its loss is the only one
    that the label enters. Layers that use statistics of the batch break this, and so do losses
    that are added besides (weight regularizers are fine: no label enters them). Layers are found
    wherever they are: in nested models, in wrappers, in lists and attributes of custom layers.

    Args:
        model: a Keras model, built or not.

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

    Keras lists the layers of models only. Layers that another layer holds (wrappers, custom
    layers) are found among its attributes.
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
