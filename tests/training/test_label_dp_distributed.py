"""``LabelDPModel`` under MirroredStrategy on two logical CPU devices."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from typing import Any

import numpy as np
import pytest

RUN = textwrap.dedent(
    """
    import json, sys
    import keras, numpy as np, tensorflow as tf
    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
    workers = tf.distribute.MultiWorkerMirroredStrategy()  # before anything else runs
    import tf_labeldp as ldp
    from tf_labeldp.data import poisson_batches
    from tf_labeldp.training import (AltConv, GaussianNoise, LabelDPModel, LabelDPOptimizer,
                                     SelfConv)
    from tf_labeldp.vault._carried import _OF_WEIGHTS, receipts_of

    x = np.random.default_rng(0).normal(size=(44, 3)).astype("float32")
    y = np.arange(44) % 4
    sparse = keras.losses.SparseCategoricalCrossentropy(from_logits=True)

    one = tf.distribute.get_strategy()
    two = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])  # TensorFlow confuses several
    assert two.num_replicas_in_sync == 2

    def train(strategy, on, noise_multiplier=1e-9, inner=None, loss=sparse, **settings):
        keras.utils.set_random_seed(0)
        _OF_WEIGHTS.clear()  # both may end in the same weights, which bring receipts along
        with strategy.scope():
            inputs = keras.Input((3,))
            hidden = keras.layers.Dense(5, "tanh", kernel_regularizer="l2")(inputs)
            model = LabelDPModel(inputs, keras.layers.Dense(4)(hidden))
            optimizer = LabelDPOptimizer(inner or keras.optimizers.SGD(0.7, momentum=0.5), 0.4,
                                         noise_multiplier, **settings)
            model.compile(optimizer, loss=loss)
        before = model.get_weights()
        if on == "arrays":
            model.fit(x, y, batch_size=16, epochs=2, shuffle=False, verbose=0)
        elif on == "users":
            batches = poisson_batches(x, y, sampling_probability=1.0, steps=4, insecure_seed=3,
                                      users=np.arange(44) // 2, max_examples_per_user=2)
            model.fit(batches, epochs=2, verbose=0)
        else:
            batches = poisson_batches(x, y, sampling_probability=1.0, steps=4, insecure_seed=3)
            model.fit(batches, epochs=2, verbose=0)
        return model, before

    result = {}
    with workers.scope():
        inputs = keras.Input((3,))
        model = LabelDPModel(inputs, keras.layers.Dense(4)(inputs))
        model.compile(LabelDPOptimizer("sgd", 1.0, 1.0), loss="mse")
    before = model.get_weights()
    try:
        model.fit(np.ones((8, 3)), np.ones((8, 4)), verbose=0)
    except ValueError as error:
        same = all(np.array_equal(a, b) for a, b in zip(before, model.get_weights()))
        result["workers"] = [same, model.guarantee().epsilon, str(error)]

    for name, on, settings in (("arrays", "arrays", {"num_microbatches": 4}),
                               ("users", "users", {}),
                               ("poisson", "poisson", {"noise_multiplier": 2.0,
                                                       "insecure_seed": 5})):
        (first, before), (second, _) = [train(where, on, **settings) for where in (one, two)]
        result[name] = float(max(np.max(np.abs(a - b)) for a, b in
                                 zip(first.get_weights(), second.get_weights())))
        result[name + " moved"] = float(np.max(np.abs(first.get_weights()[0] - before[0])))
        result[name + " receipts"] = [one.charge.event.count for one in receipts_of(second)]
        same = first.guarantee(1e-3).epsilon == second.guarantee(1e-3).epsilon
        result[name + " stated"] = bool(same and 0.0 < first.guarantee(1e-3).epsilon)

    # The noise of a step, where no gradient is: momentum and penalties off.
    nothing = lambda y_true, y_pred: 0.0 * tf.reduce_sum(y_pred, axis=1)
    def made(jit=False, **settings):
        inputs = keras.Input((3,))
        model = LabelDPModel(inputs, keras.layers.Dense(30)(inputs))
        optimizer = LabelDPOptimizer(keras.optimizers.SGD(0.7), 0.4, **settings)
        model.compile(optimizer, loss=nothing, jit_compile=jit)
        return model
    for source in ("host", "device"):
        noise, moves = GaussianNoise(1.5, source=source), []
        with two.scope():
            model = made(noise=noise)
        last = [model.get_weights()]
        def keep(*_, **__):
            now = model.get_weights()
            moves.extend((a - b).ravel() for a, b in zip(now, last[0]))
            last[0] = now
        watch = keras.callbacks.LambdaCallback(on_train_batch_end=keep)
        model.fit(x, y, batch_size=22, epochs=12, verbose=0, callbacks=[watch])
        sample = np.concatenate(moves)
        steps = np.stack([np.concatenate(moves[i:i + 2]) for i in range(0, len(moves), 2)])
        result["noise of " + source] = [int(sample.size),
                                        float(np.sum(sample ** 2) / (0.7 * 1.5 * 0.4 / 22) ** 2),
                                        len(set(part.tobytes() for part in steps))]
    result["draws"] = int(noise._device._drawn)  # of the first replica alone
    with two.scope():
        model = made(jit=True, noise=noise)
    try:
        model.fit(x, y, batch_size=22, verbose=0)
        result["compiled"] = "trained"
    except ValueError as error:
        result["compiled"] = str(error)
    alone = tf.distribute.OneDeviceStrategy("CPU:0")
    with alone.scope():
        model = made(jit=True, noise=noise)
    before = model.get_weights()
    model.fit(x, y, batch_size=22, epochs=1, verbose=0)
    moved = all(not np.array_equal(a, b) for a, b in zip(before, model.get_weights()))
    result["compiled on one device"] = [len(receipts_of(model)), moved]
    for name, strategy, denoiser in (("alt", two, AltConv(8)), ("self", alone, SelfConv())):
        try:
            train(strategy, "poisson", denoiser=denoiser)
            result[name] = "trained"
        except ValueError as error:
            result[name] = str(error)
    print("RESULT" + json.dumps(result))
    """
)


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    result = subprocess.run(
        [sys.executable, "-c", RUN],
        capture_output=True,
        text=True,
        env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "2"},
        timeout=600,
    )
    assert result.returncode == 0, result.stderr[-3000:]
    return json.loads(result.stdout.split("RESULT")[1])


@pytest.mark.slow
@pytest.mark.parametrize("on", ["arrays", "users", "poisson"])
def test_two_replicas_take_the_steps_of_one(found: dict[str, Any], on: str) -> None:
    """By microbatches, by users, and with noise of one seed."""
    # Sums in another order, in single precision, and noisy sums on a grid of 2^-16 of 0.8.
    assert found[on] < 1e-4
    assert found[f"{on} moved"] > 1e-2
    assert found[f"{on} receipts"] == ([1, 1] if on == "arrays" else [4, 4])
    assert found[f"{on} stated"]


@pytest.mark.parametrize("source", ["host", "device"])
def test_noise_is_added_once_a_step_and_not_once_a_replica(
    found: dict[str, Any], source: str
) -> None:
    degrees, ratio, different = found[f"noise of {source}"]
    assert different == 24  # steps
    # Chi-square, 1e-6 on each side (Wilson-Hilferty).
    low, high = (
        degrees * (1 - 2 / (9 * degrees) + z * np.sqrt(2 / (9 * degrees))) ** 3
        for z in (-4.753, 4.753)
    )
    assert low < ratio < high
    assert not low < 2.0 * ratio < high
    assert not low < 0.5 * ratio < high


def test_one_replica_draws_from_the_device_and_a_compiled_step_has_one_alone(
    found: dict[str, Any],
) -> None:
    assert found["draws"] == 24
    assert "jit_compile=True works on one replica only" in found["compiled"]
    assert found["compiled on one device"] == [1, True]


def test_strategies_of_several_machines_are_refused(found: dict[str, Any]) -> None:
    unchanged, epsilon, message = found["workers"]
    assert unchanged and epsilon == 0.0
    assert message.startswith("MultiWorkerMirroredStrategy is not supported")


def test_denoisers_are_refused_with_a_strategy_also_of_one_replica(found: dict[str, Any]) -> None:
    assert "AltConv does not work with a distribution strategy" in found["alt"]
    assert "SelfConv does not work with a distribution strategy" in found["self"]
