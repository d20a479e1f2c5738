"""Models that mix examples, or train on more than the per-example loss, are refused."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest

from tf_labeldp.plugins import InspectedModel

layers = keras.layers


def model_with(*stack: Any, shape: tuple[int, ...] = (4, 3)) -> keras.Model:
    return keras.Sequential([keras.Input(shape), *stack, layers.Flatten(), layers.Dense(2)])


class Holder(layers.Layer):
    """Keeps layers where ``model.layers`` does not list them."""

    def __init__(self, held: Any) -> None:
        super().__init__()
        self.held = held

    def call(self, inputs: Any) -> Any:
        return inputs


class SyncBatchNormalization(layers.Layer):
    """Stands for the layer of another package."""

    def call(self, inputs: Any) -> Any:
        return inputs


def norm(name: str = "norm") -> keras.Layer:
    return layers.BatchNormalization(name=name)


@pytest.mark.parametrize(
    "make",
    [
        lambda: model_with(norm()),
        lambda: model_with(SyncBatchNormalization(name="norm")),
        lambda: model_with(type("Own", (layers.BatchNormalization,), {})(name="norm")),
        lambda: model_with(layers.TimeDistributed(norm())),
        lambda: model_with(Holder({"a": {"b": norm()}})),
        lambda: model_with(layers.SpectralNormalization(layers.Dense(3), name="norm")),
        lambda: keras.Sequential([norm(), layers.Dense(2)]),  # not built
    ],
)
def test_layers_that_mix_examples_are_named(make: Any):
    with pytest.raises(ValueError, match=r"mix the examples of a batch.*'norm'"):
        InspectedModel(make()).check_layers()


def test_all_of_them_are_named_in_one_message_with_the_alternative():
    model = model_with(norm("one"), layers.Dense(3), norm("two"))
    with pytest.raises(ValueError) as error:
        InspectedModel(model).check_layers()
    for part in ("'one'", "'two'", "LayerNormalization or GroupNormalization"):
        assert part in str(error.value)


def test_models_that_do_not_mix_examples_pass():
    model = model_with(
        layers.LayerNormalization(),
        layers.GroupNormalization(1),
        layers.BatchNormalization(trainable=False),
        layers.Dropout(0.5),
        layers.Dense(3, kernel_regularizer="l2"),
        layers.Dense(3, bias_regularizer="l1"),
    )
    InspectedModel(model).check_layers()
    model(np.zeros((2, 4, 3)))
    InspectedModel(model).check_layers()


def test_activity_regularizers_are_refused():
    layer = layers.Dense(3, activity_regularizer="l2", name="named")
    with pytest.raises(ValueError, match=r"\['named'\] have activity regularizers.*kernel_reg"):
        InspectedModel(model_with(layer)).check_layers()


def test_losses_that_were_added_are_refused():
    class Penalized(layers.Layer):
        def call(self, inputs: Any) -> Any:
            self.add_loss(keras.ops.sum(inputs))
            return inputs

    model = model_with(layers.Dense(3, kernel_regularizer="l2"), Penalized())
    model(np.zeros((2, 4, 3)))
    with pytest.raises(ValueError, match=r"add_loss.*per-example loss"):
        InspectedModel(model).check_layers()


def test_a_model_with_nothing_to_train_is_refused():
    model = model_with()
    model.trainable = False
    with pytest.raises(ValueError, match=r"no trainable variables.*trainable=True"):
        InspectedModel(model).check_layers()
    model.trainable = True
    InspectedModel(model).check_layers()


def test_every_layer_is_found_once():
    shared = layers.Dense(3)
    model = model_with(Holder([shared, Holder((shared,))]), keras.Sequential([shared]))
    found = InspectedModel(model).layers
    assert found[0] is model
    assert sum(layer is shared for layer in found) == 1
    assert len({id(layer) for layer in found}) == len(found)


def test_parts_that_are_no_layers_are_found():
    model = model_with(layers.Dropout(0.5), keras.Sequential([layers.GaussianNoise(0.1)]))
    assert len(InspectedModel(model).seed_states) == 2
