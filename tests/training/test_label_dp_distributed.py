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

SETUP = textwrap.dedent(
    """
    import json, sys
    import keras, numpy as np, tensorflow as tf
    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
    workers = tf.distribute.MultiWorkerMirroredStrategy()  # before anything else runs
    import tf_labeldp as ldp
    from tf_labeldp.data import poisson_batches
    from tf_labeldp.training import (AltConv, Denoiser, GaussianNoise, GaussNewton, LabelDPModel,
                                     LabelDPOptimizer, SelfConv, SelfSpan)
    from tf_labeldp.training._private_step import PrivateStep
    from keras.src.backend.tensorflow.trainer import TFEpochIterator
    from tf_labeldp.accounting import public_input
    from tf_labeldp.accounting.provenance import Weights

    x = np.random.default_rng(0).normal(size=(44, 3)).astype("float32")
    y = np.arange(44) % 4
    sparse = keras.losses.SparseCategoricalCrossentropy(from_logits=True)

    one = tf.distribute.get_strategy()
    two = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])  # TensorFlow confuses several
    assert two.num_replicas_in_sync == 2

    def train(strategy, on, noise_multiplier=1e-9, inner=None, loss=sparse, q=1.0, dropout=0.0,
              metrics=None, labels=y, **settings):
        keras.utils.set_random_seed(0)
        Weights.by_digest.clear()  # both may end in the same weights, which bring receipts along
        with strategy.scope():
            inputs = keras.Input((3,))
            hidden = keras.layers.Dense(5, "tanh", kernel_regularizer="l2")(inputs)
            hidden = keras.layers.Dropout(dropout, seed=1)(hidden)
            model = LabelDPModel(inputs, keras.layers.Dense(4)(hidden))
            optimizer = LabelDPOptimizer(inner or keras.optimizers.SGD(0.7, momentum=0.5), 0.4,
                                         noise_multiplier, **settings)
            model.compile(optimizer, loss=loss, metrics=metrics)
        before = model.get_weights()
        model.report_training_metrics = metrics is not None
        if on == "arrays":
            model.fit(x, y, batch_size=16, epochs=2, shuffle=False, verbose=0)
        elif on == "users":
            batches = poisson_batches(x, y, sampling_probability=1.0, steps=4, insecure_seed=3,
                                      users=np.arange(44) // 2, max_examples_per_user=2)
            model.fit(batches, epochs=2, verbose=0)
        else:
            batches = poisson_batches(x, labels, sampling_probability=q, steps=4, insecure_seed=3)
            model.fit(batches, epochs=2, verbose=0)
        model.stated = model.guarantee(1e-3)  # before another one ends in the same weights
        return model, before

    def difference(first, second):
        return float(max(np.max(np.abs(a - b)) for a, b in
                         zip(first.get_weights(), second.get_weights())))

    result = {}
    """
)
RUN = textwrap.dedent(
    """
    with workers.scope():
        inputs = keras.Input((3,))
        model = LabelDPModel(inputs, keras.layers.Dense(4)(inputs))
        model.compile(LabelDPOptimizer("sgd", 1.0, 1.0), loss="mse")
    before = model.get_weights()
    try:
        model.fit(np.ones((8, 3)), np.ones((8, 4)), verbose=0)
    except ValueError as error:
        same = all(np.array_equal(a, b) for a, b in zip(before, model.get_weights()))
        result["workers"] = [same, model.guarantee().headline, str(error)]

    for name, on, settings in (("arrays", "arrays", {}),
                               ("users", "users", {}),
                               ("poisson", "poisson", {"noise_multiplier": 2.0,
                                                       "insecure_seed": 5})):
        (first, before), (second, _) = [train(where, on, **settings) for where in (one, two)]
        result[name] = difference(first, second)
        result[name + " moved"] = float(np.max(np.abs(first.get_weights()[0] - before[0])))
        known = public_input(second).receipts
        result[name + " receipts"] = [one.charge.event.count for one in known]
        same = first.stated.epsilon == second.stated.epsilon
        result[name + " stated"] = bool(same and 0.0 < first.stated.epsilon)

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
    result["draws"] = int(noise._device._drawn[0]) // 256  # of the first replica alone
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
    result["compiled on one device"] = [len(public_input(model).receipts), moved]
    for name, on, settings in (("alt", "poisson", {"denoiser": AltConv(7)}),
                               ("newton", "poisson", {"preconditioner": GaussNewton(7)}),
                               ("buffer", "poisson", {"buffer_size": 45}),
                               ("array", "arrays", {"batch_size": 15})):
        with two.scope():
            model = made(noise_multiplier=1.0, **{name: value for name, value in settings.items()
                                                  if not name.endswith("size")})
        try:
            if on == "arrays":
                model.fit(x, y, batch_size=15, verbose=0)
            else:
                vault = ldp.PrivateLabels(y, 4, budget=ldp.PrivacyBudget(9.0, 1e-3))
                model.fit(poisson_batches(x, vault, sampling_probability=1.0, steps=4,
                                          buffer_size=settings.get("buffer_size")), verbose=0)
            result[name] = "trained"
        except ValueError as error:
            result[name] = [str(error), model.guarantee().headline]
    print("RESULT" + json.dumps(result))
    """
)
DENOISED = textwrap.dedent(
    """
    # Both draw the labels that the model predicts, as their random numbers differ.
    tf.random.categorical = lambda logits, _: tf.argmax(logits, 1)[:, tf.newaxis]
    noisy = {"noise_multiplier": 2.0, "insecure_seed": 5, "q": 0.5}
    plain, before = train(two, "poisson", **noisy)
    settings = {"AltConv": {"denoiser": AltConv(8)}, "SelfConv": {"denoiser": SelfConv()},
                "SelfSpan": {"denoiser": SelfSpan(max_products=6)},
                "GaussNewton": {"preconditioner": GaussNewton(8)}}
    for name, given in settings.items():
        (first, _), (second, _) = [train(where, "poisson", **given, **noisy)
                                   for where in (one, two)]
        result[name] = [difference(first, second), difference(second, plain)]
        result[name + " stated"] = [first.stated == second.stated, first.stated.epsilon]

    # The span contains a clean gradient, since the replicas draw the same masks for both.
    for method in ("ghost", "vectorized"):
        clean = {"q": 4 / 44, "dropout": 0.5, "method": method}
        (first, _), (second, before) = [
            train(two, "poisson", denoiser=denoiser, **clean)
            for denoiser in (Seen(), SelfSpan(1e-6, 200))]
        result["dropout " + method] = [difference(first, second),
                                       float(np.max(np.abs(second.get_weights()[0] - before[0])))]
    """
)
SEEN = textwrap.dedent(
    """
    class Seen(Denoiser):
        # Changes nothing, but has disjoint batches.
        reveals_batch = True
        def denoise(self, gradients, vertices, state):
            return gradients, state, {}
    """
)
PASSES = textwrap.dedent(
    """
    # Labels are the numbers of examples from 1, and 0 for padding; a pass is 4 steps of 11.
    # Keras 3.6 goes on behind a batch that it took for building; later ones begin again.
    TFEpochIterator.reset = lambda self: None
    used, take = [], PrivateStep.take
    def noting(self, x, y, *others):
        note = lambda labels: used.extend(labels[labels > 0].astype(int).tolist())
        with tf.control_dependencies([tf.numpy_function(note, [y], [])]):
            y = tf.identity(y)
        return take(self, x, y, *others)
    PrivateStep.take = noting
    squares = lambda y_true, y_pred: tf.reduce_sum(tf.square(y_pred), axis=1)
    train(two, "poisson", loss=squares, labels=np.arange(44.0) + 1.0, q=0.25, denoiser=Seen())
    result["passes"] = [sorted(used[:44]), sorted(used[44:])]
    PrivateStep.take = take
    model, _ = train(two, "poisson", denoiser=AltConv(8), metrics=["accuracy"])
    result["reported"] = sorted(model.history.history)
    """
)


@pytest.fixture(scope="session")
def found() -> dict[str, Any]:
    return result_of(SETUP + RUN)


@pytest.fixture(scope="session")
def denoised() -> dict[str, Any]:
    return result_of(SETUP + SEEN + DENOISED + PASSES + 'print("RESULT" + json.dumps(result))')


def result_of(script: str) -> dict[str, Any]:
    result = subprocess.run(
        [sys.executable, "-c", script],
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
    """By examples, by users, and with noise of one seed."""
    # Sums in another order, in single precision, and noisy sums on a grid of 2^-16 of 0.8.
    assert found[on] < 1e-4
    assert found[f"{on} moved"] > 1e-2
    assert found[f"{on} receipts"] == ([1, 1] if on == "arrays" else [4, 4])
    assert found[f"{on} stated"]


@pytest.mark.slow
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


@pytest.mark.slow
def test_one_replica_draws_from_the_device_and_a_compiled_step_has_one_alone(
    found: dict[str, Any],
) -> None:
    assert found["draws"] == 24
    assert "jit_compile=True works on one replica only" in found["compiled"]
    assert found["compiled on one device"] == [1, True]


@pytest.mark.slow
def test_strategies_of_several_machines_are_refused(found: dict[str, Any]) -> None:
    unchanged, stated, message = found["workers"]
    assert unchanged and stated == "no record of any label"
    assert message.startswith("MultiWorkerMirroredStrategy is not supported")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "expected"),
    [
        ("alt", "num_examples=7 must"),
        ("newton", "num_examples=7 must"),
        ("buffer", "buffer_size=45 must"),
        ("array", "batch_size=15 must"),
    ],
)
def test_what_replicas_can_not_share_is_refused_before_a_charge(
    found: dict[str, Any], case: str, expected: str
) -> None:
    message, stated = found[case]
    assert expected in message and "be a multiple of 2" in message
    assert stated == "no record of any label"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["AltConv", "SelfConv", "SelfSpan", "GaussNewton"])
def test_two_replicas_denoise_as_one(denoised: dict[str, Any], name: str) -> None:
    distance, from_plain = denoised[name]
    assert distance < 1e-3 and from_plain > 0.05
    same, epsilon = denoised[f"{name} stated"]
    assert same and epsilon > 0.0


@pytest.mark.slow
@pytest.mark.parametrize("method", ["ghost", "vectorized"])
def test_replicas_project_onto_what_each_of_them_drew(
    denoised: dict[str, Any], method: str
) -> None:
    distance, moved = denoised[f"dropout {method}"]
    assert distance < 1e-4 and moved > 1e-2


@pytest.mark.slow
def test_passes_begin_with_the_epochs_on_replicas_too(denoised: dict[str, Any]) -> None:
    """As they are charged: in each epoch every example once."""
    assert denoised["passes"] == [list(range(1, 45))] * 2
    assert "accuracy" in denoised["reported"]
