"""The optimizer takes clipped and noised gradients, and refuses all others."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from tf_labeldp.training import AltConv, GaussianNoise, GaussNewton, LabelDPOptimizer, NoOp


def optimizer(**settings: Any) -> LabelDPOptimizer:
    arguments = {"l2_norm_clip": 1.0, "noise_multiplier": 2.0, **settings}
    return LabelDPOptimizer(keras.optimizers.SGD(0.5), **arguments)


def plain_model() -> keras.Model:
    return keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])


def test_a_plain_keras_model_does_not_train_with_it() -> None:
    model = plain_model()
    before = [w.copy() for w in model.get_weights()]
    model.compile(
        optimizer(), keras.losses.SparseCategoricalCrossentropy(from_logits=True), jit_compile=False
    )
    with pytest.raises(RuntimeError, match="not clipped and noised"):
        model.fit(np.ones((4, 3), "f"), np.zeros(4, int), verbose=0)
    for old, new in zip(before, model.get_weights(), strict=True):
        np.testing.assert_array_equal(old, new)


def test_nor_one_that_scales_its_loss() -> None:
    model = plain_model()
    wrapped = keras.optimizers.LossScaleOptimizer(optimizer())
    model.compile(
        wrapped, keras.losses.SparseCategoricalCrossentropy(from_logits=True), jit_compile=False
    )
    with pytest.raises(Exception, match="not clipped and noised"):
        model.fit(np.ones((4, 3), "f"), np.zeros(4, int), verbose=0)


@pytest.mark.parametrize("call", ["apply", "apply_gradients", "stateless_apply", "update_step"])
@pytest.mark.holds("training.LabelDPOptimizer")
def test_every_way_in_refuses_plain_gradients(call: str) -> None:
    variable = keras.Variable(np.zeros(2, "f"))
    gradient = tf.ones([2])
    arguments = {
        "apply": ([gradient], [variable]),
        "apply_gradients": ([(gradient, variable)],),
        "stateless_apply": ([], [gradient], [variable]),
        "update_step": (gradient, variable, 0.1),
    }[call]
    with pytest.raises(RuntimeError, match="LabelDPModel"):
        getattr(optimizer(), call)(*arguments)
    np.testing.assert_array_equal(keras.ops.convert_to_numpy(variable), 0.0)


@pytest.mark.parametrize(
    ("name", "value"), [("l2_norm_clip", 0.0), ("l2_norm_clip", np.nan), ("noise_multiplier", 0.0)]
)
def test_clip_and_noise_must_be_positive(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"{name} must be finite and above zero"):
        optimizer(**{name: value})


def test_noise_has_to_be_given() -> None:
    with pytest.raises(TypeError, match="calibrate_noise_multiplier"):
        LabelDPOptimizer(keras.optimizers.SGD(0.5), 1.0)


@pytest.mark.parametrize("setting", [{"clipnorm": 1.0}, {"gradient_accumulation_steps": 2}])
def test_inner_clipping_is_refused(setting: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(setting))):
        LabelDPOptimizer(keras.optimizers.SGD(0.5, **setting), 1.0, 1.0)


def test_wrappers_are_not_inner_optimizers() -> None:
    with pytest.raises(ValueError, match="plain optimizer"):
        LabelDPOptimizer(optimizer(), 1.0, 1.0)
    with pytest.raises(ValueError, match="plain optimizer"):
        LabelDPOptimizer(keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD()), 1.0, 1.0)
    with pytest.raises(TypeError, match="Keras optimizer"):
        LabelDPOptimizer(NoOp(), 1.0, 1.0)  # type: ignore[arg-type]


def test_contradicting_noise_is_refused() -> None:
    with pytest.raises(ValueError, match="contradicts"):
        optimizer(noise=GaussianNoise(3.0))
    with pytest.raises(TypeError, match="NoiseMechanism"):
        optimizer(noise="gaussian", noise_multiplier=None)
    assert optimizer(noise=GaussianNoise(3.0), noise_multiplier=None).noise_multiplier == 3.0


def test_unknown_arguments_and_denoisers_are_refused() -> None:
    with pytest.raises(TypeError, match="clipnorm"):
        optimizer(clipnorm=1.0)
    with pytest.raises(TypeError, match="denoiser must be"):
        optimizer(denoiser="alt")
    with pytest.raises(ValueError, match="method must be"):
        optimizer(method="fast")


def test_config_round_trip_keeps_every_argument() -> None:
    made = LabelDPOptimizer(
        keras.optimizers.Adam(keras.optimizers.schedules.ExponentialDecay(0.1, 10, 0.9)),
        l2_norm_clip=0.7,
        noise_multiplier=1.3,
        denoiser=AltConv(num_examples=8, smoothing=0.75),
        num_microbatches=4,
        insecure_seed=5,
        method="vectorized",
        max_bytes=10**6,
        name="private",
    )
    again = keras.saving.deserialize_keras_object(keras.saving.serialize_keras_object(made))
    assert again.get_config() == made.get_config()
    assert again.denoiser.num_examples == 8
    assert "history" not in made.get_config()  # receipts go with the weights


def test_what_steps_were_charged_for_can_not_be_changed() -> None:
    made = optimizer()
    for name, value in {
        "l2_norm_clip": 3.0,
        "noise": GaussianNoise(0.1),
        "noise_multiplier": 0.1,
        "denoiser": AltConv(num_examples=8),
        "preconditioner": GaussNewton(),
        "num_microbatches": 2,
    }.items():
        before = getattr(made, name)
        with pytest.raises(AttributeError, match="no setter"):
            setattr(made, name, value)
        assert getattr(made, name) is before


def test_learning_rate_is_that_of_the_inner_optimizer() -> None:
    made = optimizer()
    made.learning_rate = 0.25
    assert float(made.inner_optimizer.learning_rate) == 0.25
    assert float(made.learning_rate) == 0.25
