"""Noisy labels across devices, and through ``model.fit``."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

MIRRORED = """
    import keras, numpy as np, tensorflow as tf
    from tf_labeldp.data import randomize_labels
    from tf_labeldp.mechanisms import RandomizedResponse

    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
    strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    x = np.arange(50, dtype=np.float32)[:, None]
    source = tf.data.Dataset.from_tensor_slices((x, np.arange(50) % 3))

    def read(batches):
        found = {}
        for ids, labels in batches:
            ids, labels = map(strategy.experimental_local_results, (ids, labels))
            for some_ids, some_labels in zip(ids, labels):
                found.update(zip(some_ids.numpy()[:, 0].tolist(), some_labels.numpy().tolist()))
        return found

    for id_fn in (None, lambda x: tf.cast(x[0], tf.int64)):
        transform = randomize_labels(RandomizedResponse(1.0, 3), id_fn=id_fn)
        batches = source.apply(transform).shuffle(50).batch(8)
        single = {float(i[0]): int(y) for i, y in batches.unbatch()}
        shared = strategy.experimental_distribute_dataset(batches)
        assert len(single) == 50 and read(shared) == single and read(shared) == single
    with strategy.scope():
        model = keras.Sequential([keras.layers.Dense(3, activation="softmax")])
        model.compile("sgd", "sparse_categorical_crossentropy")
    model.fit(batches, epochs=2, verbose=0)
    print("devices:", strategy.num_replicas_in_sync)
"""


@pytest.mark.slow
def test_two_devices_see_the_labels_that_one_sees():
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(MIRRORED)],
        env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "2", "PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert "devices: 2" in done.stdout
