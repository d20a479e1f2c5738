"""The learners on other backends, in their own process; `make test-torch` installs PyTorch."""

import os
import subprocess
import sys
from importlib.util import find_spec

import pytest

SCRIPT = """
import sys, keras, numpy as np, tf_labeldp as ldp
from _shapes import network, shapes
from tf_labeldp.self_supervised import SCAN, SimCLR
from tf_labeldp.semi_supervised import DivideMix, FixMatch
assert keras.backend.backend() == sys.argv[1]
images, classes = shapes(120)
labels = ldp.PrivateLabels(classes, 3, budget=ldp.PrivacyBudget(4.0))
noisy = labels.randomize(ldp.RandomizedResponse(4.0, 3))
layers = keras.layers
views = {"weak": layers.GaussianNoise(0.1), "strong": layers.GaussianNoise(0.2)}
encoder = SimCLR(network(8), views=layers.GaussianNoise(0.2))
encoder.compile("adam")
encoder.fit(images, batch_size=60, verbose=0)
assert ldp.guarantee(encoder.encoder()).headline == "no record of any label"
scan = SCAN(encoder.encoder(), 3, num_neighbours=5, **views)
scan.compile(keras.optimizers.Adam(3e-3))
scan.fit(images, batch_size=60, epochs=2, self_label_epochs=1, verbose=0)
assert len(scan.clusters(images)) == 120
fix = FixMatch(network(), unlabelled_ratio=2, **views)
fix.compile(keras.optimizers.Adam(3e-3, use_ema=True, ema_momentum=0.9), metrics=["accuracy"])
fix.fit(images, noisy, 16, epochs=20, verbose=0)
mix = DivideMix(network(), division="channel", **views)
mix.compile(keras.optimizers.Adam(3e-3), metrics=["accuracy"])
mix.fit(images, noisy, 16, epochs=6, warmup_epochs=4, verbose=0)
for model in (fix, mix):
    assert ldp.guarantee(model).epsilon == 4.0
    score = (model.predict(images, verbose=0).argmax(axis=1) == classes).mean()
    assert score > 0.9, (model.name, score)
    found = model.evaluate(images, classes, verbose=0, return_dict=True)["accuracy"]
    assert abs(found - score) < 1e-5
    model.save("model.keras")
    loaded = keras.models.load_model("model.keras")
    outputs = [each.predict(images, verbose=0) for each in (loaded, model)]
    assert np.allclose(*outputs, atol=1e-5)
    assert ldp.guarantee(loaded).epsilon == 4.0
"""


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["jax", "torch"])
def test_every_learner_trains_and_saves(backend, tmp_path):
    if find_spec(backend) is None:
        pytest.skip(f"{backend} is not installed; `make test-torch` installs PyTorch")
    here = os.path.dirname(__file__)
    paths = [here, *filter(None, [os.environ.get("PYTHONPATH")])]
    env = {**os.environ, "KERAS_BACKEND": backend, "PYTHONPATH": os.pathsep.join(paths)}
    command = [sys.executable, "-c", SCRIPT, backend]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
