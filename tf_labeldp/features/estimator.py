"""``Estimator``, the base of feature maps and heads: scikit-learn's conventions, Keras export."""

from __future__ import annotations

import itertools
import re
import warnings
from typing import Any, TypeVar

from sklearn.base import BaseEstimator, TransformerMixin

from tf_labeldp.accounting.provenance import bare
from tf_labeldp.accounting.receipts import Receipts, receipts_to_bytes
from tf_labeldp.vault.model_history import counted_weights

_Self = TypeVar("_Self", bound="Estimator")
_INPUT_NAME = re.compile(r"[A-Za-z0-9.][A-Za-z0-9_.-]*")
"""Names of Keras inputs that save, load and are exported for serving."""
_LAYER_NAMES = frozenset(
    """
    above_low clip encoded_columns head label_range neighbour_smoothing neighbours
    principal_components public_center_and_scale random_fourier_features spread unit_rows
    unit_spread_rows
    """.split()
)
"""Names of the layers behind the inputs; names are unique within a Keras model."""


class _Family:
    """Stands for an estimator and its clones; a class, so that it is pickled."""


class Estimator(BaseEstimator):
    """scikit-learn's estimator, whose encoder is one argument and no estimator inside."""

    def get_params(self, deep: bool = True) -> dict[str, Any]:
        """Returns the constructor's arguments by name; those of an encoder are not listed."""
        del deep
        return super().get_params(deep=False)

    def set_params(self: _Self, **params: Any) -> _Self:
        """Sets arguments of the constructor by name; the next ``fit`` uses them."""
        inner = [name for name in params if "__" in name]
        if inner:
            raise ValueError(
                f"Invalid parameter {inner[0]!r}: an encoder is used as it was fitted. Fit another "
                "one with these arguments, and set that."
            )
        return super().set_params(**params)

    def __sklearn_clone__(self: _Self) -> _Self:
        # scikit-learn would clone an encoder too: unfitted, or without its receipts.
        clone = type(self)(**self.get_params())
        clone._family = self._family_of_clones()
        return clone

    def _family_of_clones(self) -> object:
        if not hasattr(self, "_family"):
            self._family: object = _Family()
        return self._family

    def _refuse_unfitted(self, attribute: str, call: str) -> None:
        if not hasattr(self, attribute):
            raise ValueError(f"this {type(self).__name__} is not fitted; call {call} first.")

    def _remember_columns(self, columns: tuple[str, ...] | None) -> None:
        self.__dict__.pop("feature_names_in_", None)
        if columns is not None:
            self.feature_names_in_ = columns

    def _known_columns(self) -> tuple[str, ...] | None:
        return getattr(self, "feature_names_in_", None)


class FeatureMap(Estimator):
    """A map of public inputs to features, with the tags of a transformer."""

    def __sklearn_tags__(self) -> Any:
        return tags_of(TransformerMixin)


def tags_of(mixin: type) -> Any:
    """Returns the tags of scikit-learn (from 1.6 on) of an estimator with this mixin."""
    return type(mixin.__name__, (mixin, BaseEstimator), {})().__sklearn_tags__()


def note_release(layer: Any, receipts: Receipts, weights: Any = None) -> None:
    """Gives a layer the receipts of its weights, or of some of them, also in its files."""
    layer.label_dp_receipts = receipts_to_bytes(receipts) if receipts else b""
    if receipts:
        counted_weights(layer, receipts, layer.weights if weights is None else weights)


def input_names(columns: list[str]) -> dict[str, str]:
    """Returns the name of the Keras input of each column: its own where Keras can have it.

    Names must also differ in their letters, digits and underscores, which alone serving keeps.
    """
    names: dict[str, str] = {}
    taken = set(_LAYER_NAMES)
    for column in columns:
        served = re.sub(r"\W", "_", column).lower()
        if _INPUT_NAME.fullmatch(column) and served not in taken:
            names[column] = column
            taken.add(served)
    for column in columns:
        if column not in names:
            name = stem = "column_" + re.sub(r"\W", "_", column, flags=re.ASCII)
            for number in itertools.count(2):
                if name.lower() not in taken:
                    break
                name = f"{stem}_{number}"
            names[column] = name
            taken.add(name.lower())
    return names


def keras_model(inputs: Any, outputs: Any, name: str) -> Any:
    """Returns a Keras model, whose inputs may have other names than their columns."""
    import keras

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "When providing `inputs` as a dict", UserWarning)
        return keras.Model(inputs, outputs, name=name)


def with_encoder(encoder: Any, width: int) -> tuple[Any, Any]:
    """Returns new Keras inputs, and an encoder's outputs for them (m, width)."""
    import keras

    encoder = bare(encoder)
    if encoder is None:
        features = keras.Input((width,), name="features")
        return features, features
    model = encoder.to_keras() if hasattr(encoder, "to_keras") else encoder
    if not isinstance(model, keras.Model):
        raise TypeError(
            f"the encoder is {type(encoder).__name__}, which has no Keras model. Pass "
            "to_keras(encoder=...) a Keras model that computes the same features."
        )
    try:
        # A Sequential model has ``inputs``, but ``input`` only once another has called it.
        old_inputs = model.inputs[0] if isinstance(model, keras.Sequential) else model.input
        shape = tuple(model.output_shape)
    except AttributeError:
        raise TypeError(
            f"the encoder is a {type(model).__name__}, whose inputs Keras does not know. Wrap it: "
            "keras.Model(inputs, encoder(inputs)) with inputs = keras.Input(...)."
        ) from None
    if len(shape) != 2 or shape[1] != width:
        raise ValueError(
            f"the encoder gives outputs of shape {shape}, the head was fitted on {width} features. "
            "Pass the encoder that made them, flattened."
        )
    inputs = keras.tree.map_structure(
        lambda old: keras.Input(tuple(old.shape[1:]), dtype=old.dtype, name=old.name), old_inputs
    )
    return inputs, model(inputs)
