"""A small problem for the tests of the ledger, with short ways to train on it."""

from __future__ import annotations

import keras
import numpy as np

import tf_labeldp as ldp
from tf_labeldp.data import poisson_batches

N, D, K, DELTA = 120, 4, 3, 1e-3
RNG = np.random.default_rng(7)
X = RNG.normal(size=(N, D)).astype(np.float32)
Y = RNG.integers(0, K, N)
NOISE, Q, STEPS = 4.0, 0.1, 2
SPARSE = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
DENSE = keras.losses.CategoricalCrossentropy(from_logits=True)


def vault(epsilon=50.0, delta=DELTA, **arguments):
    return ldp.PrivateLabels(Y, K, budget=ldp.PrivacyBudget(epsilon, delta), **arguments)


def plain():
    layers = [keras.Input((D,)), keras.layers.Dense(5, "relu"), keras.layers.Dense(K)]
    return keras.Sequential(layers)


def private(model=None, noise=None, loss=SPARSE, **arguments):
    """Returns a compiled LabelDPModel around a model, or around a fresh one."""
    private_model = ldp.LabelDPModel.from_model(plain() if model is None else model)
    multiplier = NOISE if noise is None else None
    optimizer = ldp.LabelDPOptimizer(
        keras.optimizers.SGD(0.1), 1.0, multiplier, noise=noise, **arguments
    )
    private_model.compile(optimizer, loss=loss, run_eagerly=True)
    return private_model


def batches(labels, **arguments):
    return poisson_batches(X, labels, sampling_probability=Q, steps=STEPS, **arguments)


def dp_sgd(model, labels, epochs=1, **arguments):
    """Fits a private model on a vault."""
    model.fit(batches(labels), epochs=epochs, verbose=0, **arguments)
    return model


def multi_stage(labels, epsilon=2.0, model=None):
    """Trains a plain model in two stages; returns it and the stages."""
    model = plain() if model is None else model
    model.compile(keras.optimizers.SGD(0.1), DENSE, run_eagerly=True)
    stages = ldp.MultiStageTraining(
        X,
        labels,
        epsilon=epsilon,
        fractions=(0.5, 0.5),
        epochs_per_stage=1,
        batch_size=32,
        verbose=0,
    )
    model.fit(stages.dataset(), epochs=stages.epochs, callbacks=[stages], shuffle=False, verbose=0)
    return model, stages


def in_the_clear(model=None):
    """Trains a plain model on the true labels."""
    model = plain() if model is None else model
    model.compile(keras.optimizers.SGD(0.1), SPARSE)
    model.fit(X, Y, verbose=0)
    return model


def stated(artefact):
    return ldp.guarantee(artefact).epsilon


def has_no_record(artefact):
    """Returns whether nothing is known of a model, which then promises nothing."""
    return ldp.guarantee(artefact).headline == "no record of any label"


def codes(artefact):
    """Returns the codes of the assumptions in a statement."""
    return {note.code for note in ldp.guarantee(artefact).assumptions}


def steps_epsilon(steps, delta=DELTA):
    """Returns the epsilon of DP-SGD steps with these settings."""
    return ldp.accounting.dp_sgd_guarantee(NOISE, Q, steps, delta).epsilon
