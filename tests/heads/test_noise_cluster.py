"""NoiseCluster: what it predicts, what it costs, its Keras model, and what it refuses."""

from __future__ import annotations

import keras
import numpy as np
import pytest
from fits import fixed_in_advance, without_encoder

from tf_labeldp.accounting import PrivacyBudget, public_input
from tf_labeldp.features import find_clusters
from tf_labeldp.heads import NoiseCluster
from tf_labeldp.mechanisms import HistogramMechanism, RandomizedResponse
from tf_labeldp.plugins import Clusters, TrainedModel
from tf_labeldp.vault import Numbers, PrivateLabels, guarantee

pytestmark = pytest.mark.filterwarnings("ignore:this is fit number")
RNG = np.random.default_rng(0)
GROUPS = np.repeat(np.arange(5), 120)
CLASS_OF_GROUP = np.array([2, 0, 1, 2, 1])
X = (7.0 * np.eye(5)[GROUPS] + RNG.normal(size=(600, 5))).astype(np.float32)
Y = np.where(RNG.random(600) < 0.9, CLASS_OF_GROUP[GROUPS], 0)
SURE = 2000.0  # an epsilon at which discrete noise is zero except with probability e^-1000


def vault(epsilon=3.0, delta=0.0, **arguments):
    return PrivateLabels(Y, num_classes=3, budget=PrivacyBudget(epsilon, delta), **arguments)


def head(epsilon=0.5, delta=0.0, **arguments):
    defaults = {"num_clusters": 5, "num_classes": 3, "insecure_seed": 0}
    return NoiseCluster(epsilon=epsilon, delta=delta, **{**defaults, **arguments})


def test_clusters_get_the_class_of_most_of_their_examples():
    one = head().fit(X, Y)
    assert np.mean(one.predict(X) == CLASS_OF_GROUP[GROUPS]) > 0.99
    assert one.score(X, Y) == np.mean(one.predict(X) == Y) > 0.85
    probabilities = one.predict_proba(X)
    assert probabilities.shape == (600, 3)
    np.testing.assert_allclose(probabilities.sum(axis=1), 1.0)
    assert np.array_equal(one.classes_[probabilities.argmax(axis=1)], one.predict(X))
    names = np.array(["bee", "ant", "cat"])
    named = NoiseCluster(5, 0.5, classes=names.tolist(), insecure_seed=0).fit(X, names[Y])
    assert np.array_equal(named.predict(X), names[one.predict(X)])


def test_algorithm_2_step_by_step():
    """The counts are those of the mechanism, by cluster, with the noise of the seed."""
    clusters = find_clusters(X, 5)
    for delta, noise in ((0.0, "discrete_laplace"), (1e-4, "gaussian")):
        one = head(0.05, delta).fit(X, Y)
        mechanism = HistogramMechanism(0.05, 3, noise=noise, delta=delta)
        rng = np.random.default_rng([0, 0])  # of the first draw of a vault with this seed
        counts = mechanism.release(Y, clusters.assignments, rng=rng)
        assert np.array_equal(one.cluster_counts_, counts)
        assert one.noise_stddev_ == mechanism.noise_stddev
        told = (counts > 0).any(axis=1)
        assert np.array_equal(one.cluster_classes_[told], counts.argmax(axis=1)[told])


def test_a_cluster_with_nothing_to_tell_gets_the_shares_of_all():
    """Of five clusters number 1 is empty, and the last, 4, too: a release ends before it."""
    groups = np.where(GROUPS == 1, 0, np.minimum(GROUPS, 3))
    one = NoiseCluster(None, SURE, num_classes=3, clusters=Clusters.from_assignments(groups, 5))
    one.fit(None, Y)
    overall = np.bincount(Y, minlength=3) / 600
    for empty in (1, 4):
        np.testing.assert_allclose(one.cluster_probabilities_[empty], overall)
        assert one.cluster_counts_[empty].tolist() == [0, 0, 0]
        assert one.cluster_classes_[empty] == overall.argmax()
    shares = np.bincount(Y[groups == 2], minlength=3) / 120
    np.testing.assert_allclose(one.cluster_probabilities_[2], shares)


def test_guarantee_covers_what_the_head_was_made_of_and_the_vaults_all_that_left_it():
    labels = vault(3.0)
    first = NoiseCluster(5, 1.0).fit(X, labels)
    again = NoiseCluster(3, 0.5).fit(X, labels)
    assert first.guarantee().epsilon == 1.0 and again.guarantee().epsilon == 0.5
    assert labels.guarantee().epsilon == pytest.approx(1.5, rel=1e-6)
    assert labels.receipts == first.receipts_ + again.receipts_


def test_given_clusters():
    clusters = find_clusters(X, 5, seed=3)
    one = head(num_clusters=None, clusters=clusters)
    for features in (X, X[:, :, np.newaxis], None):  # which are not looked at
        found = one.fit(features, Y)
        assert found.to_keras().input_shape == (None, 5)
        same = head(cluster_seed=3).fit(X, Y)
        assert np.array_equal(found.cluster_counts_, same.cluster_counts_)
        assert np.array_equal(found.predict(X), same.predict(X))
    bare = head(num_clusters=None, clusters=clusters.assignments).fit(X, Y)
    assert np.array_equal(bare.cluster_classes_, one.cluster_classes_)
    with pytest.raises(ValueError, match="needs centres"):
        bare.predict(X)
    with pytest.raises(ValueError, match="needs centres"):
        bare.to_keras()


def model_says_the_same(one, model, rows, folder):
    model.save(folder / "model.keras")
    for found in (model, keras.models.load_model(folder / "model.keras")):
        assert found.trainable_weights == []
        probabilities = keras.ops.convert_to_numpy(found(rows))
        np.testing.assert_allclose(probabilities, one.predict_proba(rows), atol=1e-6)
        assert np.array_equal(one.classes_[probabilities.argmax(axis=1)], one.predict(rows))


def test_the_keras_model_of_images_takes_images(tmp_path):
    images = X[:, :, np.newaxis].repeat(2, axis=2)
    one = head().fit(images, Y)
    model = one.to_keras()
    assert model.input_shape == (None, 5, 2)
    model_says_the_same(one, model, images, tmp_path)


def network():
    keras.utils.set_random_seed(0)
    inputs = keras.Input((5,), name="raw")
    hidden = keras.layers.Dense(6, name="hidden")(inputs)
    return keras.Model(inputs, hidden)


def test_a_keras_encoder_is_put_in_front(tmp_path):
    encoder = network()
    encoder.trainable = False
    one = head(encoder=encoder).fit(X, Y)
    model_says_the_same(one, one.to_keras(), X, tmp_path)
    on_features = head().fit(encoder.predict(X, verbose=0), Y)
    in_front = on_features.to_keras(encoder)
    np.testing.assert_allclose(in_front(X), on_features.predict_proba(encoder(X)), atol=1e-6)


def encoder_trained_on(labels):
    encoder = network()
    receipts = labels.randomize(RandomizedResponse(1.0, 3)).receipts
    TrainedModel(encoder).attach(receipts)
    return encoder, receipts


def test_the_encoder_of_given_clusters_is_counted():
    """By its own vault once; by another one, which may be of the same people, as well."""
    labels = vault()
    encoder, receipts = encoder_trained_on(labels)
    options = {"num_classes": None, "insecure_seed": None, "num_clusters": None}
    clusters = find_clusters(X, 5, encoder=encoder)
    for held in (labels, vault()):
        one = head(clusters=clusters, **options).fit(X, held)
        drawn, named, own = one.receipts_
        assert (drawn,) == receipts and own.charge.epsilon == 0.5
        assert named.kind == "declared" and named.charge.epsilon == 0.0
        assert one.guarantee().epsilon == held.guarantee().epsilon == 1.5
        stated = without_encoder(one.guarantee())
        assert fixed_in_advance(stated) == fixed_in_advance(held.guarantee())
        assert one.guarantee().is_private


def test_public_centres_carry_no_receipts():
    """Two models of the same centres, and of different labels, have nothing in common."""
    models = [NoiseCluster(5, 0.5).fit(5.0 * X, vault()).to_keras() for _ in range(2)]
    for model in models:
        assert guarantee(model).epsilon == 0.5 and len(public_input(model).receipts) == 1


NUMBERS = PrivateLabels(np.linspace(0, 1, 600), Numbers(0, 1), budget=PrivacyBudget(5.0))
BAD = {
    "no-classes": ({"num_classes": None}, X, Y, "exactly one of num_classes"),
    "numbers": ({"num_classes": None, "insecure_seed": None}, X, NUMBERS, "expected classes"),
    "clusters": ({"num_clusters": 601}, X, Y, "at most the number of examples, 600"),
    "nothing": ({"num_clusters": None}, X, Y, "expected features and num_clusters"),
    "both": ({"clusters": GROUPS}, X, Y, "expected clusters, or num_clusters"),
    "assignments": (
        {"clusters": GROUPS[:-1], "num_clusters": None},
        X,
        Y,
        "got 599 rows and 600 labels",
    ),
}


def test_bad_input_is_refused_before_anything_is_charged():
    for settings, features, labels, message in BAD.values():
        with pytest.raises(ValueError, match=message):
            head(**settings).fit(features, labels)
        if isinstance(labels, PrivateLabels):
            assert labels.guarantee().epsilon == 0.0
