"""SimCLR and SCAN: encoders and clusters that no label has touched."""

import numpy as np
import pytest
from _shapes import NUM_CLASSES, network, shapes

import tf_labeldp as ldp
from tf_labeldp.features import find_clusters
from tf_labeldp.heads import NoiseCluster
from tf_labeldp.self_supervised import SCAN, SimCLR, strong_views, weak_views

keras = pytest.importorskip("keras")


@pytest.fixture(scope="session")
def simclr(images):
    model = SimCLR(network(16))
    model.compile(keras.optimizers.Adam(3e-3))
    model.losses_seen = model.fit(images[0], batch_size=64, epochs=4, verbose=0).history["loss"]
    return model


@pytest.fixture(scope="session")
def scan(simclr, images):
    encoder = keras.models.clone_model(simclr.encoder())
    encoder.set_weights(simclr.encoder().get_weights())
    model = SCAN(encoder, NUM_CLASSES, num_neighbours=8)
    model.compile(keras.optimizers.Adam(3e-3))
    model.fit(images[0], batch_size=64, epochs=10, self_label_epochs=2, verbose=0)
    return model


def test_the_loss_of_contrast_is_that_of_a_loop():
    model = SimCLR(network(4), projection_dim=3, temperature=0.5)
    rows = np.random.default_rng(0).normal(size=(6, 3)).astype(np.float32)
    unit = rows / np.linalg.norm(rows, axis=1, keepdims=True)
    total = 0.0
    for one in range(6):
        scores = np.exp(unit @ unit[one] / 0.5)
        total -= np.log(scores[(one + 3) % 6] / (scores.sum() - scores[one])) / 6
    assert float(model.compute_loss(y_pred=rows)) == pytest.approx(total, rel=1e-4)


@pytest.mark.holds("self_supervised.SCAN", "self_supervised.SimCLR")
def test_it_learns_and_costs_nothing(simclr):
    assert simclr.losses_seen[-1] < simclr.losses_seen[0]
    assert ldp.guarantee(simclr.encoder()).epsilon == 0.0


def test_its_features_serve_clusters_and_heads(simclr, images):
    clusters = find_clusters(images[0], 20, encoder=simclr.encoder())
    purity = sum(np.bincount(images[1][clusters.assignments == c]).max() for c in range(20)) / 300
    assert purity > 0.9
    head = ldp.PrivateRidge(4.0, 1e-4, num_classes=NUM_CLASSES, encoder=simclr.encoder())
    assert head.fit(*shapes(300, seed=2)).guarantee().epsilon == pytest.approx(4.0)


@pytest.mark.holds("self_supervised.SimCLR")
def test_an_encoder_that_saw_labels_is_counted(images, noisy):
    encoder = network(8)
    wrapped = keras.Sequential([encoder, keras.layers.Dense(NUM_CLASSES, activation="softmax")])
    wrapped.compile("sgd", "sparse_categorical_crossentropy")
    wrapped.fit(images[0], np.asarray(noisy), verbose=0)
    ldp.declare(wrapped, "trained on these noisy labels", made_of=[noisy])
    model = SimCLR(encoder)
    model.compile("adam")
    model.fit(images[0], batch_size=64, verbose=0)
    assert ldp.guarantee(model.encoder()).epsilon == 1.5


def test_clusters_follow_the_classes(scan, images):
    clusters = scan.clusters(images[0])
    counts = np.zeros((NUM_CLASSES, NUM_CLASSES))
    np.add.at(counts, (clusters.assignments, images[1]), 1)
    assert counts.max(axis=1).sum() > 280
    test, truth = shapes(90, seed=1)
    head = NoiseCluster(None, 1.0, num_classes=NUM_CLASSES, clusters=clusters, insecure_seed=0)
    head = head.fit(images[0], images[1])
    assert head.score(test, truth) > 0.9 and head.guarantee().epsilon == 1.0


def test_new_images_get_the_likeliest_cluster(scan, images, tmp_path):
    clusters = scan.clusters(images[0])
    assert np.array_equal(clusters.assign(images[0]), clusters.assignments)
    scan.save(tmp_path / "scan.keras")
    loaded = keras.models.load_model(tmp_path / "scan.keras")
    assert np.array_equal(loaded.clusters(images[0]).assignments, clusters.assignments)
    assert ldp.guarantee(loaded).epsilon == 0.0


def test_the_losses_of_scan_are_those_of_the_paper():
    model = SCAN(network(4), 2, threshold=0.8)
    first = np.array([[0.9, 0.1], [0.3, 0.7]], np.float32)
    second = np.array([[0.6, 0.4], [0.2, 0.8]], np.float32)
    rows = np.concatenate([first, second])
    mean = first.mean(axis=0)
    wanted = -np.log((first * second).sum(axis=1)).mean() + 5 * (mean * np.log(mean)).sum()
    found = model.compute_loss({"images": 0, "neighbours": 0}, y_pred=rows)
    assert float(found) == pytest.approx(wanted, rel=1e-5)
    # Of self-labelling only the first row is sure, and its class is 0.
    assert float(model.compute_loss({"images": 0}, y_pred=rows)) == pytest.approx(-np.log(0.6))


def test_views_keep_shape_and_range():
    for channels in (1, 3):
        images, _ = shapes(8, channels=channels)
        for views in (weak_views(flip=True), strong_views(flip=True)):
            made = np.asarray(views(images, training=True))
            assert made.shape == images.shape and made.min() >= 0 and made.max() <= 1.0001
            assert not np.array_equal(made, images)


@pytest.mark.parametrize("kind", [lambda: SimCLR(network(4)), lambda: SCAN(network(4), 2)])
def test_bad_images(kind):
    model = kind()
    model.compile("adam")
    with pytest.raises(ValueError, match="images"):
        model.fit(np.zeros((40, 12, 12), np.float32))
    with pytest.raises(ValueError, match="255"):
        model.fit(np.full((40, 12, 12, 1), 255, np.uint8))
    with pytest.raises(TypeError):
        model.fit(np.zeros((40, 12, 12, 1), np.float32), np.zeros(40))


def test_fewer_images_than_neighbours():
    model = SCAN(network(4), 2)
    model.compile("adam")
    with pytest.raises(ValueError, match="20 neighbours"):
        model.fit(shapes(20)[0])


@pytest.mark.parametrize(
    "make, match",
    [
        (lambda: SimCLR(keras.Sequential([keras.layers.Dense(2)])), "built Keras model"),
        (lambda: SCAN(network(4), 1), "num_clusters"),
        (lambda: SCAN(network(4), 2, threshold=1.0), "threshold"),
    ],
)
def test_bad_settings(make, match):
    with pytest.raises(ValueError, match=match):
        make()


def test_training_sees_two_views_of_each_image_and_inference_the_features(simclr, images):
    rows = images[0][:5]
    assert simclr(rows, training=True).shape == (10, simclr.projection_dim)
    features = simclr(rows)
    np.testing.assert_array_equal(features, simclr.network(rows, training=False))


def test_contrast_needs_two_images(simclr, images):
    with pytest.raises(ValueError, match=r"batch_size must be .*2, got 1"):
        simclr.fit(images[0], batch_size=1)
