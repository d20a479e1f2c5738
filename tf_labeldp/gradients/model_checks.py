"""A Keras model: its layers, inputs and outputs, and checks before it is trained."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tf_labeldp import _validate
from tf_labeldp.features.tables import symbolic_inputs

# Channels per group of the GroupNormalization that replaces a BatchNormalization, about.
_CHANNELS_PER_GROUP = 8


_NORMALIZE = "use LayerNormalization or GroupNormalization"
# What to do without layers that mix the examples of a batch, by the name of a base class, to
# include layers of other packages.
_MIXING = {
    "BatchNormalization": _NORMALIZE,
    "SyncBatchNormalization": _NORMALIZE,
    "BatchRenormalization": _NORMALIZE,
    "MixUp": "mix noisy labels in plain training, with tf_labeldp.keras_layers.Mixup",
    "CutMix": "augment each image by itself, for instance with RandomCrop",
    "SpectralNormalization": "bound the weights with a kernel_constraint",
}


def _without_mixing(layer: Any) -> str | None:
    """Returns what to do without a layer that mixes examples; None if it keeps them apart."""
    families = [kind.__name__ for kind in type(layer).__mro__ if kind.__name__ in _MIXING]
    # A frozen BatchNormalization uses its moving averages, not the batch.
    if not families or (families == ["BatchNormalization"] and not layer.trainable):
        return None
    return _MIXING[families[0]]


def _group_normalization(layer: keras.layers.BatchNormalization) -> keras.Layer:
    """Returns normalization of each example alone, on the same axis.

    The number of groups divides that of the channels.
    """
    channels = int(layer.input_spec.axes[layer.axis])
    most = max(1, channels // _CHANNELS_PER_GROUP)
    groups = next(count for count in range(most, 0, -1) if channels % count == 0)
    return keras.layers.GroupNormalization(groups, axis=layer.axis, epsilon=layer.epsilon)


class InspectedModel:
    """A Keras model, or a layer: its parts, inputs and outputs, and checks of them.

    Nothing is kept: each property is that of the present state of the model.
    """

    def __init__(self, model: Any) -> None:
        self._model = model

    @property
    def layers(self) -> list[Any]:
        """The model and all layers inside it, each once, outer layers first."""
        return self.parts(keras.Layer)

    @property
    def seed_states(self) -> list[Any]:
        """The states of the generators of random numbers inside it."""
        return [part.state for part in self.parts(keras.random.SeedGenerator)]

    def parts(self, kind: type) -> list[Any]:
        """Returns all instances of a class in the attributes of model and layers, each once.

        ``model.layers`` leaves out the layers of wrappers and custom layers.
        """
        found: list[Any] = []
        visited: set[int] = set()
        pending: list[Any] = [self._model]
        while pending:
            value = pending.pop(0)
            if id(value) in visited:
                continue
            visited.add(id(value))
            if isinstance(value, kind):
                found.append(value)
            if isinstance(value, keras.Layer):
                pending.extend(value.layers if isinstance(value, keras.Model) else [])
                pending.extend(vars(value).values())
            elif isinstance(value, dict):
                pending.extend(value.values())
            elif isinstance(value, (list, tuple, set)):
                pending.extend(value)
        return found

    @property
    def inputs(self) -> list[Any]:
        """The symbolic inputs; none of a model that is not functional, or not built."""
        return getattr(self._model, "inputs", None) or []

    @property
    def output_shape(self) -> Any:
        """The shape of the outputs, in their structure; None if it is unknown."""
        return getattr(self._model, "output_shape", None)

    @property
    def outputs(self) -> dict[str, Any]:
        """The symbolic outputs by name; one without a name, None, if they are unknown.

        Raises:
            ValueError: outputs without names.
        """
        model = self._model
        if not self.inputs:
            return {"": None}
        outputs = model.outputs
        # It has no ``output`` before another model calls it.
        if isinstance(model, keras.Sequential):
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
                "expected outputs with a name each, in one dict or list, got "
                f"{model.output_names}. Name the last layers, or return "
                "keras.Model(inputs, {'name': output, ...})."
            )
        return named

    def by_output(self, values: Any, what: str) -> dict[str, Any]:
        """Returns a loss or weight for each output, from one for all, a dict, or a list."""
        names = list(self.outputs)
        if is_by_name(values):
            unknown = [name for name in values if name not in names]
            if unknown:
                raise ValueError(
                    f"expected a {what} for the outputs {names}, got one for {unknown}. Name "
                    "the outputs as the model does."
                )
            return dict(values)
        if isinstance(values, (list, tuple)):
            if len(values) != len(names):
                raise ValueError(
                    f"expected a {what} for each of the {len(names)} outputs, got {len(values)}. "
                    "Use a dict to leave some out."
                )
            return dict(zip(names, values, strict=True))
        if what == "weight" and len(names) > 1 and values != 1.0:
            raise ValueError(
                f"expected loss_weights for the outputs {names}, got {values!r}. Give a dict or "
                "a list."
            )
        return dict.fromkeys(names, values)

    def check_layers(self) -> None:
        """Raises a ``ValueError`` if the model mixes examples, adds losses, or trains nothing.

        Clipping bounds the effect of one label on a step only if no layer uses statistics of the
        batch, and if no loss but the clipped one depends on labels (weight regularizers do not).
        """
        model, layers = self._model, self.layers
        problems = [
            f"{layer.name!r} ({type(layer).__name__}): {advice}"
            for layer in layers
            if (advice := _without_mixing(layer)) is not None
        ]
        if problems:
            raise ValueError(
                "these layers mix the examples of a batch, so clipping one example's gradient does "
                f"not bound the effect of its label: {'; '.join(problems)}. A BatchNormalization "
                "may stay if it is frozen (trainable=False)."
            )
        regularized = [
            layer.name
            for layer in layers
            if layer.activity_regularizer is not None
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
            raise self.added_loss()
        if model.built and not model.trainable_variables:
            raise ValueError(
                f"model {model.name!r} has no trainable variables. Set trainable=True on some "
                "layers."
            )

    def without_mixing_layers(self) -> keras.Model:
        """Returns the model, or a copy that shares all layers but batch normalisations.

        One inside another model stays, and so do other layers: ``check_layers`` names them.
        """
        model, replaced = self._model, []

        def kept(layer: keras.Layer) -> keras.Layer:
            # By its class and not by a name: the replacement reads the attributes of Keras's layer.
            if not isinstance(layer, keras.layers.BatchNormalization) or not layer.trainable:
                return layer
            replaced.append(layer.name)
            return _group_normalization(layer)

        if not any(isinstance(layer, keras.layers.BatchNormalization) for layer in model.layers):
            return model

        def called(layer: keras.Layer, *args: Any, **kwargs: Any) -> Any:
            if isinstance(layer, keras.layers.GroupNormalization):  # takes no mask
                kwargs.pop("mask", None)
            return layer(*args, **kwargs)

        # A sequential model has no `input`; that of a functional one keeps its structure.
        is_flat = isinstance(model, keras.Sequential)
        ends = (model.inputs, model.outputs) if is_flat else (model.input, model.output)
        whole = keras.Model(*ends)
        clone = keras.models.clone_model(whole, clone_function=kept, call_function=called)
        if replaced:
            _validate.warn(
                f"layers {replaced} normalise over the batch, which mixes examples: they were "
                "replaced by GroupNormalization with fresh weights, in a copy of the model. In a "
                "pretrained model freeze them instead (layer.trainable = False): they stay as they "
                "are."
            )
        return clone

    def added_loss(self) -> ValueError:
        """Returns the error for a model whose layers call ``add_loss``."""
        return ValueError(
            f"model {self._model.name!r} has losses from add_loss, which are not clipped. Add the "
            "term to the per-example loss."
        )

    def check_features_fit(self, features: Any) -> None:
        """Raises if a functional or sequential model can't take these features.

        ``features`` are arrays, tensors, or the ``tf.TensorSpec`` of a batch, in their structure.

        Raises:
            TypeError: texts for an input of numbers.
            ValueError: other shapes or names than the model has.
        """
        if not self.inputs:
            return
        inputs = dict(enumerate(self.inputs))
        found = dict(enumerate(tf.nest.flatten(features)))
        structure = symbolic_inputs(self._model)
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
                f"expected features of shape {expected[next(iter(expected))] if one else expected} "
                "per example, as the model takes, got "
                f"{shapes[next(iter(shapes))] if one else shapes}. Give one array for each input "
                "of the model."
            )
        for name, tensor in inputs.items():
            if tf.as_dtype(found[name].dtype) == tf.string != tf.as_dtype(tensor.dtype):
                raise TypeError(
                    f"expected numbers for the input {tensor.name!r} of the model, got texts. "
                    "Encode them: encoder=tf_labeldp.features.RandomFourierFeatures().fit(table), "
                    "or a layer such as keras.layers.StringLookup after an input of texts."
                )

    def check_missing(self, features: Any) -> None:
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
        outputs = keras.tree.flatten(self._model(row, training=False))
        if not all(np.isfinite(keras.ops.convert_to_numpy(output)).all() for output in outputs):
            raise ValueError(
                f"expected finite features, got NaN or infinity in {np.count_nonzero(has_hole)} "
                f"examples, the first in row {first}, where the model returns NaN or infinity. "
                "Fill them in, by a rule that reads no label, or in a layer of the model."
            )


def is_by_name(values: Any) -> bool:
    """Returns whether losses or weights are a dict by output."""
    # Keras's configuration of one loss is a dict with this key.
    return isinstance(values, Mapping) and "class_name" not in values
