"""SimCLR and SCAN: their losses, and the features and clusters that they learn."""

import numpy as np
import pytest
from _shapes import NUM_CLASSES, network, shapes

import tf_labeldp as ldp
from tf_labeldp.features import find_clusters
from tf_labeldp.heads import NoiseCluster
from tf_labeldp.self_supervised import SCAN, SimCLR, rand_augment_views

keras = pytest.importorskip("keras")


@pytest.fixture(scope="session")
def simclr(images):
    model = SimCLR(network(16))
    model.compile(keras.optimizers.Adam(3e-3))
    model.losses_by_epoch = model.fit(images[0], batch_size=64, epochs=4, verbose=0).history["loss"]
    return model


@pytest.fixture(scope="session")
def scan(simclr, images):
    encoder = keras.models.clone_model(simclr.encoder())
    encoder.set_weights(simclr.encoder().get_weights())
    strong = rand_augment_views(shift=0.0, operations=1, reach=0.1, cutout=(0.0, 0.5))
    model = SCAN(encoder, NUM_CLASSES, num_neighbours=8, strong=strong)
    model.compile(keras.optimizers.Adam(3e-3))
    model.fit(images[0], batch_size=64, epochs=10, self_label_epochs=2, verbose=0)
    return model


def test_the_loss_of_contrast_is_that_of_a_loop():
    model = SimCLR(network(4), projection_dim=3, temperature=0.5)
    rows = np.random.default_rng(0).normal(size=(6, 3)).astype(np.float32)
    unit = rows / np.linalg.norm(rows, axis=1, keepdims=True)
    total = 0.0
    for row in range(6):
        scores = np.exp(unit @ unit[row] / 0.5)
        total -= np.log(scores[(row + 3) % 6] / (scores.sum() - scores[row])) / 6
    assert float(model.compute_loss(y_pred=rows)) == pytest.approx(total, rel=1e-4)


@pytest.mark.slow
@pytest.mark.holds("self_supervised.SCAN", "self_supervised.SimCLR")
def test_it_learns_without_labels(simclr):
    assert simclr.losses_by_epoch[-1] < simclr.losses_by_epoch[0]
    # A Keras model without receipts; as an encoder it is a named assumption.
    assert ldp.guarantee(simclr.encoder()).headline == "no record of any label"


@pytest.mark.slow
def test_its_features_serve_clusters_and_heads(simclr, images):
    clusters = find_clusters(images[0], 20, encoder=simclr.encoder())
    purity = sum(np.bincount(images[1][clusters.assignments == c]).max() for c in range(20)) / 300
    assert purity > 0.9
    head = ldp.PrivateRidge(4.0, 1e-4, num_classes=NUM_CLASSES, encoder=simclr.encoder())
    assert head.fit(*shapes(300, seed=2)).guarantee().epsilon == pytest.approx(4.0)


@pytest.mark.slow
def test_clusters_follow_the_classes(scan, images):
    clusters = scan.clusters(images[0])
    counts = np.zeros((NUM_CLASSES, NUM_CLASSES))
    np.add.at(counts, (clusters.assignments, images[1]), 1)
    assert counts.max(axis=1).sum() > 280
    test, truth = shapes(90, seed=1)
    head = NoiseCluster(None, 1.0, num_classes=NUM_CLASSES, clusters=clusters, insecure_seed=0)
    head = head.fit(images[0], images[1])
    assert head.score(test, truth) > 0.9 and head.guarantee().epsilon == 1.0


@pytest.mark.slow
def test_new_images_get_the_likeliest_cluster(scan, images, tmp_path):
    clusters = scan.clusters(images[0])
    assert np.array_equal(clusters.assign(images[0]), clusters.assignments)
    scan.save(tmp_path / "scan.keras")
    loaded = keras.models.load_model(tmp_path / "scan.keras")
    assert np.array_equal(loaded.clusters(images[0]).assignments, clusters.assignments)
    assert ldp.guarantee(loaded).headline == "no record of any label"


def test_the_losses_of_scan_are_those_of_the_paper():
    model = SCAN(network(4), 2, threshold=0.8)
    first = np.array([[0.9, 0.1], [0.3, 0.7]], np.float32)
    second = np.array([[0.6, 0.4], [0.2, 0.8]], np.float32)
    rows = np.concatenate([first, second])
    mean = first.mean(axis=0)
    expected = -np.log((first * second).sum(axis=1)).mean() + 5 * (mean * np.log(mean)).sum()
    found = model.compute_loss({"images": 0, "neighbours": 0}, y_pred=rows)
    assert float(found) == pytest.approx(expected, rel=1e-5)
    # Only the first row passes the threshold of self-labelling, and its class is 0.
    assert float(model.compute_loss({"images": 0}, y_pred=rows)) == pytest.approx(-np.log(0.6))


def test_the_first_stage_of_scan_has_strong_views_alone():
    inside = keras.Sequential([keras.Input((3,)), keras.layers.Activation("linear")])
    black = keras.layers.Rescaling(0.0)
    model = SCAN(inside, 2, weak=keras.layers.Identity(), strong=black)
    model.head = keras.layers.Identity()
    ones = np.ones((4, 3), np.float32)
    pairs = model({"images": ones, "neighbours": ones}, training=True)
    assert np.array_equal(pairs, np.zeros((8, 3)))
    # The targets of self-labelling are those of weak views.
    assert np.array_equal(model({"images": ones}, training=True), [[1] * 3] * 4 + [[0] * 3] * 4)


def test_an_image_is_one_of_its_neighbours_in_scan(monkeypatch):
    rows = np.eye(12, dtype=np.float32)[:, None, :, None] * np.ones((1, 12, 1, 1), np.float32)
    trained = SCAN(network(4), 2, num_neighbours=3)
    trained.compile("adam")
    batches = []

    def kept(self, batch, **options):
        batches.append(batch[0][0])

    monkeypatch.setattr(keras.Model, "fit", kept)
    trained.fit(rows, epochs=200)
    images, neighbours = batches[0]["images"], batches[0]["neighbours"]
    drawn = [np.array_equal(a, b) for a, b in zip(images, neighbours, strict=True)]
    assert 0 < sum(drawn) < 12


def test_fewer_images_than_neighbours():
    model = SCAN(network(4), 2)
    model.compile("adam")
    with pytest.raises(ValueError, match="more than num_neighbours=20 images, got 20"):
        model.fit(shapes(20)[0])


def test_training_sees_two_views_of_each_image_and_inference_the_features(simclr, images):
    rows = images[0][:5]
    assert simclr(rows, training=True).shape == (10, simclr.projection_dim)
    features = simclr(rows)
    np.testing.assert_array_equal(features, simclr.network(rows, training=False))
    inside = keras.Sequential([keras.Input((3,)), keras.layers.Dropout(0.5)])
    model = SimCLR(inside, views=keras.layers.Identity(), projection_dim=3)
    model.projector = keras.layers.Identity()
    ones = np.ones((50, 3), np.float32)
    assert set(np.unique(model(ones, training=True))) == {0.0, 2.0}
    assert np.array_equal(model(ones), ones)


def test_contrast_needs_two_images(simclr, images):
    with pytest.raises(ValueError, match=r"batch_size must be .*2, got 1"):
        simclr.fit(images[0], batch_size=1)
