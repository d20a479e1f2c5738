"""Computes the clipped mean gradient of TF Privacy's `DPSequential`, in a process with Keras 2.

    TF_USE_LEGACY_KERAS=1 python keras2_clipped_gradient.py IN.npz OUT.npz

IN has x, y, l2_norm_clip, and the weights w0, w1, ...; OUT has the gradient g0, g1, ..., and the
name of the Keras package.
"""

from __future__ import annotations

import sys

import numpy as np
import tensorflow as tf

from tf_labeldp.tf_privacy import load


def main(source: str, target: str) -> None:
    load()
    from tensorflow_privacy.privacy.keras_models.dp_keras_model import DPSequential

    inputs = np.load(source)
    layers = tf.keras.layers
    model = DPSequential(
        l2_norm_clip=float(inputs["l2_norm_clip"]),
        noise_multiplier=0.0,
        use_xla=False,
        layers=[
            layers.InputLayer(inputs["x"].shape[1:]),
            layers.Conv2D(4, 3, strides=2, activation="relu"),
            layers.AveragePooling2D(2),
            layers.Conv2D(3, 2, padding="same", activation="tanh"),
            layers.Flatten(),
            layers.Dense(8, activation="relu"),
            layers.Dense(5),
        ],
    )
    weights = [inputs[f"w{i}"] for i in range(len(model.weights))]
    model.set_weights(weights)
    # A step of size one takes the gradient off the weights.
    loss = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(tf.keras.optimizers.SGD(1.0), loss)
    model.train_on_batch(inputs["x"], inputs["y"])
    after = model.get_weights()
    gradients = {f"g{i}": weights[i] - after[i] for i in range(len(after))}
    np.savez(target, keras=tf.keras.layers.Dense.__module__, **gradients)


if __name__ == "__main__":
    main(*sys.argv[1:])
