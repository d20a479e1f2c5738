"""The recipes of the papers and our own, on colour images of 32 x 32."""

import math

import numpy as np
import pytest
from _shapes import NUM_CLASSES, network, shapes

import tf_labeldp as ldp
from tf_labeldp.features import PatchDictionary, find_clusters
from tf_labeldp.heads import BootstrappedHead, NoiseCluster, PrivateLogisticRegression
from tf_labeldp.mechanisms import HistogramMechanism
from tf_labeldp.pate import PATE
from tf_labeldp.self_supervised import SCAN, SimCLR, weak_views
from tf_labeldp.semi_supervised import DivideMix, FixMatch

keras = pytest.importorskip("keras")
EPSILON, DELTA = 4.0, 1e-4
SIDE, CHANNELS = 32, 3
VIEWS = {"weak": weak_views(shift=0.03), "strong": keras.layers.GaussianNoise(0.1)}


@pytest.fixture(scope="session")
def colours():
    """The bars of the other tests, enlarged, each in its own colour."""
    (x, y), (x_test, y_test) = ((_enlarged(*shapes(n, seed=s))) for n, s in ((360, 0), (150, 1)))
    return x, y, x_test, y_test


def _enlarged(images, classes):
    large = images.repeat(3, axis=1).repeat(3, axis=2)[:, 2:34, 2:34]
    tint = np.random.default_rng(0).uniform(0.5, 1.0, (len(large), 1, 1, CHANNELS))
    return (large * tint).astype(np.float32), classes


def vault(y):
    budget = ldp.PrivacyBudget(EPSILON, DELTA)
    return ldp.PrivateLabels(y, NUM_CLASSES, budget=budget, insecure_seed=0)


def noisy(y):
    return vault(y).randomize(ldp.RandomizedResponse(EPSILON, NUM_CLASSES))


def encoder(x):
    model = SimCLR(network(16, CHANNELS, SIDE))
    model.compile("adam")
    model.fit(x, batch_size=60, verbose=0)
    return model.encoder()


def fix_match(x, labels, **options):
    model = FixMatch(network(channels=CHANNELS, side=SIDE), unlabelled_ratio=1, **VIEWS)
    model.compile(keras.optimizers.Adam(2e-3), keras.losses.CategoricalCrossentropy(True))
    model.fit(x, labels, 20, epochs=3, verbose=0, **options)
    return model


def denoise_ssl(x, y):
    patches = PatchDictionary(num_atoms=10, patch_size=5).fit(x)
    return fix_match(x, noisy(y), clusters=find_clusters(x, 12, encoder=patches))


def aug_descent(x, y):
    model = DivideMix(network(channels=CHANNELS, side=SIDE), **VIEWS)
    model.compile(keras.optimizers.Adam(2e-3))
    model.fit(x, noisy(y), 20, epochs=4, warmup_epochs=3, verbose=0)
    return model


def pate(x, y):
    rows = PatchDictionary(num_atoms=10, patch_size=5).fit_transform(x)
    answers = PATE(EPSILON, DELTA, num_teachers=30, num_queries=40).answer(rows, vault(y))
    return fix_match(x, answers, steps_per_epoch=20)


def scan(x, y):
    model = SCAN(encoder(x), 12, num_neighbours=5, **VIEWS)
    model.compile(keras.optimizers.Adam(1e-3))
    model.fit(x, batch_size=60, epochs=4, verbose=0)
    return NoiseCluster(None, EPSILON, DELTA, clusters=model.clusters(x)).fit(x, vault(y))


def priors(x, y):
    clusters = find_clusters(x, 12, encoder=encoder(x))
    labels = vault(y)
    counts = HistogramMechanism(0.1 * EPSILON, NUM_CLASSES)
    found = labels.release(counts, public_input=clusters.assignments).priors()
    drawn = labels.randomize(ldp.RRWithPrior(0.9 * EPSILON, NUM_CLASSES), priors=found)
    return fix_match(x, drawn, targets="posterior")


def encoder_and_head(x, y):
    return PrivateLogisticRegression(EPSILON, DELTA, encoder=encoder(x)).fit(x, vault(y))


def bootstrapped(x, y):
    patches = PatchDictionary(num_atoms=10, patch_size=5).fit(x)
    net = keras.Sequential(
        [*network(32, CHANNELS, SIDE, "relu").layers, keras.layers.Dense(NUM_CLASSES)]
    )
    net.build((None, SIDE, SIDE, CHANNELS))
    options = {"epochs": 3, "batch_size": 20, "views": VIEWS["weak"], "verbose": 0}
    return BootstrappedHead(EPSILON, DELTA, net, encoder=patches, **options).fit(x, vault(y))


@pytest.mark.slow
@pytest.mark.parametrize(
    "recipe",
    [
        lambda x, y: fix_match(x, noisy(y)),
        denoise_ssl,
        aug_descent,
        pate,
        scan,
        priors,
        encoder_and_head,
        bootstrapped,
    ],
    ids="LDP-SSL DenoiseSSL AugDescent PATE-FM NoiseCluster Algorithm-4 SimCLR ours".split(),
)
def test_a_recipe_learns_and_states_its_cost(recipe, colours):
    x, y, x_test, y_test = colours
    model = recipe(x, y)
    quiet = {"verbose": 0} if isinstance(model, keras.Model) else {}
    outputs = model.predict(x_test, **quiet)
    right = (outputs.argmax(axis=1) if outputs.ndim == 2 else outputs) == y_test
    chance = 1.0 / NUM_CLASSES
    assert right.mean() > chance + 5 * math.sqrt(chance * (1 - chance) / len(right))
    assert ldp.guarantee(model).epsilon == pytest.approx(EPSILON, rel=1e-3)
