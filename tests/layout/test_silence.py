"""``verbose=0`` prints nothing, and no door of the library shows lines of TensorFlow's log."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
START = """
import sys, keras, numpy as np, tf_labeldp as ldp
x = np.random.default_rng(0).normal(size=(2000, 6)).astype("float32")
y = (x[:, 0] + x[:, 1] > 0) + 0
table = {"a": x[:, 0], "b c/[]": np.where(x[:, 1] > 0, "u", "v")}
logits = keras.losses.CategoricalCrossentropy(from_logits=True)
images = np.random.default_rng(1).uniform(size=(64, 6, 6, 1)).astype("float32")

def labels(y=y, epsilon=4.0):
    return ldp.PrivateLabels(y, num_classes=2, budget=ldp.PrivacyBudget(epsilon, 1e-5))

def network(*shape):
    layers = [keras.Input(shape or (6,)), keras.layers.Flatten(), keras.layers.Dense(2)]
    model = keras.Sequential(layers)
    model.compile("sgd", logits)
    return model

def noisy_images():
    mean = images.mean(axis=(1, 2, 3))
    return labels((mean > 0.5) + 0).randomize(ldp.RandomizedResponse(4.0, 2))

def learner(model, *arguments, **settings):
    model.compile("sgd", logits)
    model.fit(images, *arguments, batch_size=16, verbose=0, **settings)
"""
DOORS = {
    "fit": "ldp.fit(network(), x, labels().randomize(ldp.RandomizedResponse(2.0, 2)), verbose=0)",
    "stages": """
stages = ldp.MultiStageTraining(
    x, labels(), epsilon=2.0, fractions=(0.6, 0.4), epochs_per_stage=2, mixup_alpha=8.0
)
network().fit(
    stages.dataset(), epochs=stages.epochs, callbacks=[stages], shuffle=False, verbose=0
)
""",
    "make_private": """
model, batches, callbacks = ldp.make_private(
    network(), epsilon=2.0, x=x, labels=labels(), epochs=2, batch_size=100
)
model.fit(batches, epochs=2, callbacks=callbacks, verbose=0)
""",
    # Each fit traces its step, and TensorFlow counts the tracings.
    "six fits": """
private = ldp.LabelDPModel.from_model(network())
optimizer = ldp.LabelDPOptimizer("sgd", 1.0, 4.0, denoiser=ldp.AltConv(8))
private.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True))
batches = ldp.data.poisson_batches(x, y, sampling_probability=0.02, steps=1)
for _ in range(6):
    private.fit(batches, verbose=0)
""",
    "heads": """
for _ in range(3):
    head = ldp.heads.BootstrappedHead(2.0, 1e-6, network(), epochs=1, verbose=0).fit(x, labels())
    head.predict(x)
ldp.PrivateLogisticRegression(1.0, 1e-6).fit(x, labels()).to_keras().predict(x, verbose=0)
""",
    "boosting": """
ldp.PrivateBoosting(4.0, max_trees=4).fit(table, labels()).predict(table)
ldp.PrivateClassifier(epsilon=4.0, delta=1e-6, method="boosting").fit(table, labels())
""",
    "learners": """
noisy = noisy_images()
learner(ldp.semi_supervised.FixMatch(network(6, 6, 1)), noisy)
learner(ldp.semi_supervised.DivideMix(network(6, 6, 1)), noisy, epochs=2)
learner(ldp.self_supervised.SimCLR(network(6, 6, 1)))
learner(ldp.self_supervised.SCAN(network(6, 6, 1), 2, num_neighbours=2), self_label_epochs=1)
""",
    "PATE": """
teacher = ldp.pate.fix_match_teacher(network(6, 6, 1), steps_per_epoch=1)
few = dict(num_teachers=6, num_queries=2, threshold=0.5)
ldp.pate.PATE(4.0, 1e-6, teacher=teacher, **few).answer(images, labels(np.arange(64) % 2))
ldp.pate.PATE(4.0, 1e-6, **few).answer(x, labels())
""",
}


@pytest.mark.slow
def test_verbose_0_prints_nothing() -> None:
    # What TensorFlow logs when it starts is left to the user; its level 3 hides what C++ logs then.
    begin = "keras.ops.zeros(1)\nprint('BEGIN', file=sys.stderr, flush=True)\n"
    done = subprocess.run(
        [sys.executable, "-c", START + begin + "".join(DOORS.values())],
        cwd=ROOT,
        env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"},
        capture_output=True,
        text=True,
        check=False,
    )
    shown = done.stderr.partition("BEGIN\n")[2]
    assert (done.returncode, done.stdout, shown) == (0, "", "")
