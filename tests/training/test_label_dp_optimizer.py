"""The optimizer takes clipped and noised gradients, and refuses all others."""

from __future__ import annotations

import inspect
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from label_dp_cases import LOSS, batches, network, optimizer, vault

from tf_labeldp.training import AltConv, GaussianNoise, GaussNewton, LabelDPOptimizer, NoOp


@pytest.mark.parametrize("wrap", [lambda inner: inner, keras.optimizers.LossScaleOptimizer])
def test_a_plain_keras_model_does_not_train_with_it(wrap: Any) -> None:
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
    before = [w.copy() for w in model.get_weights()]
    model.compile(wrap(optimizer()), LOSS, jit_compile=False)
    with pytest.raises(Exception, match="not clipped and noised"):
        model.fit(np.ones((4, 3), "f"), np.zeros(4, int), verbose=0)
    for old, new in zip(before, model.get_weights(), strict=True):
        np.testing.assert_array_equal(old, new)


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
    ("settings", "error", "message"),
    [
        ({"clip": 0.0}, ValueError, "l2_norm_clip must be finite and above zero"),
        ({"clip": np.nan}, ValueError, "l2_norm_clip must be finite and above zero"),
        # Squares of these norms leave single precision.
        ({"clip": 1e-19}, ValueError, "l2_norm_clip must be in"),
        ({"clip": 1e19}, ValueError, "l2_norm_clip must be in"),
        ({"noise_multiplier": 0.0}, ValueError, "noise_multiplier must be finite and above zero"),
        ({"noise_multiplier": None}, TypeError, "calibrate_noise_multiplier"),
        ({"noise": GaussianNoise(2.5)}, ValueError, "contradicts"),
        ({"noise": "gaussian", "noise_multiplier": None}, TypeError, "NoiseMechanism"),
        ({"clipnorm": 1.0}, TypeError, "clipnorm"),
        ({"num_microbatches": 4}, TypeError, "num_microbatches. Leave it out"),
        ({"denoiser": "alt"}, TypeError, "denoiser must be"),
        ({"method": "fast"}, ValueError, "method must be"),
        ({"inner": keras.optimizers.SGD(0.5, clipnorm=1.0)}, ValueError, "clipnorm"),
        (
            {"inner": keras.optimizers.SGD(0.5, gradient_accumulation_steps=2)},
            ValueError,
            "gradient_accumulation_steps",
        ),
        ({"inner": optimizer()}, ValueError, "plain optimizer"),
        (
            {"inner": keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD())},
            ValueError,
            "plain optimizer",
        ),
        *(
            ({"inner": wrapper(lambda variable: keras.optimizers.SGD())}, ValueError, "plain opt")
            # Before Keras 3.13 there is none.
            for wrapper in [getattr(keras.optimizers, "MultiOptimizer", None)]
            if wrapper is not None
        ),
        ({"inner": NoOp()}, TypeError, "Keras optimizer"),
    ],
)
def test_bad_arguments(settings: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        optimizer(**settings)


# Values of the arguments that all optimizers of Keras have.
SETTINGS: dict[str, Any] = {
    "learning_rate": 0.25,
    "weight_decay": 0.125,
    "clipnorm": 0.25,
    "clipvalue": 0.25,
    "global_clipnorm": 0.25,
    "use_ema": True,
    "ema_momentum": 0.5,
    "ema_overwrite_frequency": 1,
    "loss_scale_factor": 8.0,
    "gradient_accumulation_steps": 2,
}
KINDS = {
    kind: {"loss_scale_factor": 8.0}
    for kind in vars(keras.optimizers).values()
    if inspect.isclass(kind)
    and issubclass(kind, keras.optimizers.Optimizer)
    and "optimizer" not in str(inspect.signature(kind))  # These are around others.
    and kind is not keras.optimizers.Optimizer
}


def test_every_argument_that_all_optimizers_have_is_tried() -> None:
    shared = set.intersection(*(set(inspect.signature(kind).parameters) for kind in KINDS))
    assert shared - {"name", "kwargs"} == set(SETTINGS)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_a_setting_that_is_refused_is_refused_by_every_optimizer(kind: type) -> None:
    refused = set()
    for name, value in SETTINGS.items():
        try:
            optimizer(inner=kind(**{name: value}))
        except ValueError as error:
            assert f"inner_optimizer sets {name}" in str(error)
            refused.add(name)
    clips = {"clipnorm", "clipvalue", "global_clipnorm"}
    assert refused == clips | {"gradient_accumulation_steps"}


def stepped(inner: keras.optimizers.Optimizer) -> list[np.ndarray]:
    """Returns the weights after one step on noisy gradients, which are the same for each inner."""
    model = network()
    model.compile(optimizer(inner=inner, insecure_seed=3), loss=LOSS, run_eagerly=True)
    with pytest.warns(UserWarning):  # by the seed
        model.fit(batches(vault(1e6, 0.5), q=1.0, steps=1), verbose=0)
    return model.get_weights()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        *[(keras.optimizers.SGD, {name: value}) for name, value in SETTINGS.items()],
        *KINDS.items(),
    ],
    ids=str,
)
def test_a_setting_changes_a_step_as_in_keras_or_is_refused(
    kind: type, settings: dict[str, Any]
) -> None:
    """Plain Keras trains on a loss whose gradients are the noisy ones of a step with SGD(1.0)."""
    if "ema_overwrite_frequency" in settings or "ema_momentum" in settings:
        settings = {"use_ema": True, **settings}
    try:
        private = optimizer(inner=kind(**settings))
    except ValueError as error:
        assert next(iter(settings)) in str(error)
        return
    before = network().get_weights()
    gradients = [a - b for a, b in zip(before, stepped(keras.optimizers.SGD(1.0)), strict=True)]
    private_net = network()

    class Linear(keras.Model):
        def compute_loss(self, *args: Any, **unused: Any) -> Any:
            weights = zip(gradients, private_net.trainable_variables, strict=True)
            return sum(keras.ops.sum(v * g) for g, v in weights)

    linear = Linear(private_net.inputs, private_net.outputs)
    linear.compile(kind(**settings), run_eagerly=True)
    try:
        linear.fit(np.zeros((1, 3), "f"), np.zeros((1, 4), "f"), verbose=0)
    except AttributeError as error:  # Muon of Keras before 3.13 on TensorFlow
        pytest.skip(f"plain Keras {keras.__version__} can't take a step: {error}")
    for ours, keras_own in zip(stepped(private.inner_optimizer), linear.get_weights(), strict=True):
        np.testing.assert_allclose(ours, keras_own, rtol=1e-4, atol=1e-6)


def test_config_round_trip_keeps_every_argument() -> None:
    private = LabelDPOptimizer(
        keras.optimizers.Adam(keras.optimizers.schedules.ExponentialDecay(0.1, 10, 0.9)),
        l2_norm_clip=0.7,
        noise_multiplier=1.3,
        denoiser=AltConv(num_examples=8, smoothing=0.75),
        insecure_seed=5,
        method="vectorized",
        max_bytes=10**6,
        name="private",
    )
    again = keras.saving.deserialize_keras_object(keras.saving.serialize_keras_object(private))
    assert again.get_config() == private.get_config()
    assert again.denoiser.num_examples == 8
    assert "history" not in private.get_config()  # receipts go with the weights
    # Files of 0.2 have this argument.
    of_0_2 = {**private.get_config(), "num_microbatches": None}
    assert LabelDPOptimizer.from_config(of_0_2).get_config() == private.get_config()
    with pytest.warns(UserWarning, match="num_microbatches=4 .* compile the model again"):
        LabelDPOptimizer.from_config({**of_0_2, "num_microbatches": 4})


def test_settings_that_steps_were_charged_for_can_not_be_changed() -> None:
    private = optimizer(None, noise=GaussianNoise(3.0))
    assert private.noise_multiplier == 3.0
    for name, value in {
        "l2_norm_clip": 3.0,
        "noise": GaussianNoise(0.1),
        "noise_multiplier": 0.1,
        "denoiser": AltConv(num_examples=8),
        "preconditioner": GaussNewton(),
    }.items():
        before = getattr(private, name)
        with pytest.raises(AttributeError, match=r"no setter|can't set"):
            setattr(private, name, value)
        assert getattr(private, name) is before


def test_learning_rate_is_that_of_the_inner_optimizer() -> None:
    private = optimizer()
    private.learning_rate = 0.25
    assert float(private.inner_optimizer.learning_rate) == float(private.learning_rate) == 0.25
