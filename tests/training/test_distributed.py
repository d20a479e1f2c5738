"""Multi-stage training under MirroredStrategy on two logical CPU devices."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap

import pytest

RUN = textwrap.dedent(
    """
    import keras, numpy as np, tensorflow as tf
    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
    import tf_labeldp as ldp

    strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    assert strategy.num_replicas_in_sync == 2
    rng = np.random.default_rng(0)
    y = np.arange(251) % 4
    x = (np.eye(4)[y] + 0.3 * rng.normal(size=(251, 4))).astype("float32")
    labels = ldp.PrivateLabels(y, 4, budget=ldp.PrivacyBudget(epsilon=3.0), insecure_seed=0)
    with strategy.scope():  # all of it inside, as users write it
        stages = ldp.MultiStageTraining(x, labels, epsilon=3.0, fractions=(0.5, 0.5),
                                        epochs_per_stage=8, batch_size=32, verbose=0,
                                        warm_start=False, mixup_alpha=(0.5, 0.0))
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(8, "relu"),
                                  keras.layers.Dense(4)])
        model.compile(keras.optimizers.Adam(0.03),
                      keras.losses.CategoricalCrossentropy(from_logits=True))
        dataset = stages.dataset()
    model.fit(dataset, epochs=stages.epochs, callbacks=[stages], verbose=0, shuffle=False)
    accuracy = float(np.mean(model.predict(x, verbose=0).argmax(axis=1) == y))
    steps = int(model.optimizer.iterations.numpy())
    print("RESULT", labels.guarantee().epsilon, len(stages.reports), steps, accuracy)
    """
)


@pytest.mark.slow
def test_two_replicas():
    result = subprocess.run(
        [sys.executable, "-c", RUN],
        capture_output=True,
        text=True,
        env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "2"},
        timeout=300,
    )
    assert result.returncode == 0, result.stderr[-3000:]
    epsilon, stages, steps, accuracy = result.stdout.split("RESULT")[1].split()
    assert float(epsilon) == 3.0
    assert int(stages) == 2
    assert int(steps) == 8 * 8  # the optimizer restarted with the second stage
    assert float(accuracy) > 0.9
