"""Where features come from: arrays, data sets, encoders; the same head whichever way."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf

from tf_labeldp.accounting import PrivacyBudget
from tf_labeldp.features import PatchDictionary, RandomFourierFeatures
from tf_labeldp.heads import PrivateLogisticRegression, PrivateRidge
from tf_labeldp.plugins import FeatureRows, PublicRows
from tf_labeldp.vault import PrivateLabels

HEADS = [PrivateRidge, PrivateLogisticRegression]
N = 400
RNG = np.random.default_rng(3)
LABELS = RNG.integers(0, 2, N)
IMAGES = RNG.random((N, 8, 8)).astype(np.float32)
IMAGES[:, :4] += 0.5 * LABELS[:, None, None]
TABLE = {
    "age": RNG.normal(40.0, 10.0, N) + 20.0 * LABELS,
    "job": np.where(RNG.random(N) < 0.2 + 0.5 * LABELS, "smith", "baker"),
}
pytestmark = pytest.mark.usefixtures("fits_apart")


class Flatten:
    """A plain callable: not a feature map, not a Keras model."""

    def __init__(self):
        self.calls = 0

    def __call__(self, images):
        self.calls += 1
        return np.reshape(images, (len(images), -1))


def encoder_and_inputs(kind):
    if kind == "patches":
        encoder = PatchDictionary(patch_size=3, num_atoms=6, pooling=2, seed=0)
        return encoder.fit(IMAGES), IMAGES
    if kind == "fourier":
        return RandomFourierFeatures(num_features=20).fit(TABLE), TABLE
    if kind == "keras":
        keras.utils.set_random_seed(0)
        layers = [keras.layers.Flatten(), keras.layers.Dense(12, "tanh")]
        return keras.Sequential([keras.Input((8, 8)), *layers]), IMAGES
    return Flatten(), IMAGES


ENCODERS = ["patches", "fourier", "keras", "function"]


def head(kind=PrivateRidge, epsilon=20.0, **arguments):
    return kind(epsilon, 1e-4, num_classes=2, insecure_seed=0, **arguments)


def features_by_hand(encoder, raw):
    if hasattr(encoder, "transform"):
        return encoder.transform(raw)
    return encoder.predict(raw, verbose=0) if hasattr(encoder, "predict") else encoder(raw)


@pytest.mark.parametrize("name", ENCODERS)
def test_an_encoder_in_the_head_is_one_before_it(name):
    encoder, raw = encoder_and_inputs(name)
    features = features_by_hand(encoder, raw)
    inside = head(encoder=encoder).fit(raw, LABELS)
    before = head().fit(features, LABELS)
    np.testing.assert_allclose(inside.predict_proba(raw), before.predict_proba(features), atol=1e-5)
    assert inside.coef_.shape[1] == before.n_features_in_ == features.shape[1]
    own = len(raw) if isinstance(raw, dict) else np.prod(raw.shape[1:])
    assert inside.n_features_in_ == own
    assert inside.score(raw, LABELS) > 0.8
    assert inside.predict(raw).shape == inside.decision_function(raw).shape == (N,)


@pytest.mark.parametrize("name", ["fourier", "function"])
def test_data_sets_of_raw_inputs_give_the_same_head(name):
    encoder, raw = encoder_and_inputs(name)
    expected = head(encoder=encoder).fit(raw, LABELS)
    alone = tf.data.Dataset.from_tensor_slices(raw).batch(200)
    pairs = tf.data.Dataset.from_tensor_slices((raw, LABELS)).batch(100)
    for one in (
        head(encoder=encoder).fit(alone, LABELS),
        head(encoder=encoder).fit(pairs),
    ):
        np.testing.assert_allclose(one.coef_, expected.coef_, atol=1e-4)
        np.testing.assert_allclose(one.predict_proba(raw), expected.predict_proba(raw), atol=1e-4)


def test_features_that_are_not_kept_are_made_again():
    """The same to the last bit."""
    kept, again = Flatten(), Flatten()
    one = FeatureRows(IMAGES, kept, max_bytes=2e9)
    other = FeatureRows(IMAGES, again, max_bytes=1000.0)
    found = []
    for source in (one, other):
        found.append(np.concatenate(list(source.blocks())))
    before = kept.calls, again.calls
    for source in (one, other):
        list(source.blocks())
    assert kept.calls == before[0] and again.calls > before[1] + 1
    np.testing.assert_array_equal(*found)


def test_the_sketch_of_a_release_knows_the_encoder():
    """Without the mean and the spread, nothing else of a release's name would."""
    scanned = []
    for encode in (Flatten(), lambda images: 2.0 * np.reshape(images, (len(images), -1)) ** 2):
        rows, sample = PublicRows.survey(FeatureRows(IMAGES, encode), 8e9)
        scaling = rows.scaling(sample, center=False, intercept=0.2, noise_to_signal=None)
        scanned.append(rows.scaled(scaling).scan())
    assert scanned[0].matches(scanned[0].digest())
    assert not scanned[0].matches(scanned[1].digest())


def test_fit_from_a_data_set_of_features():
    kind, x = PrivateRidge, IMAGES.reshape(N, -1)
    pairs = tf.data.Dataset.from_tensor_slices((x, LABELS)).batch(64)
    alone = tf.data.Dataset.from_tensor_slices(x).batch(100)
    expected = head(kind).fit(x, LABELS)
    for one in (head(kind).fit(pairs), head(kind).fit(alone, LABELS)):
        np.testing.assert_array_equal(one.coef_, expected.coef_)
    with pytest.raises(ValueError, match="expected labels once"):
        head(kind).fit(pairs, LABELS)
    with pytest.raises(ValueError, match="requires y to be passed"):
        head(kind).fit(alone)


@pytest.mark.parametrize("changes", ["order", "values"])
def test_a_data_set_that_is_not_the_same_twice_is_refused_and_nothing_is_charged(changes):
    changing = tf.data.Dataset.from_tensor_slices(IMAGES.reshape(N, -1))
    if changes == "order":
        changing = changing.shuffle(N).batch(100)
    else:
        generator = tf.random.Generator.from_seed(1)
        changing = changing.batch(100).map(lambda x: x + generator.normal(tf.shape(x)))
    labels = PrivateLabels(LABELS, num_classes=2, budget=PrivacyBudget(1.0, 1e-4))
    with pytest.raises(ValueError, match="must not be shuffled"):
        PrivateRidge(1.0, 1e-4).fit(changing, labels)
    assert labels.guarantee().epsilon == 0.0


def test_bad_data_sets_are_refused():
    x = IMAGES.reshape(N, -1)
    three = tf.data.Dataset.from_tensor_slices((x, LABELS, LABELS)).batch(64)
    with pytest.raises(ValueError, match="got 3 parts"):
        head().fit(three)
    ragged = tf.data.Dataset.from_generator(
        lambda: iter([np.ones((4, 2)), np.ones((4, 3))]),
        output_signature=tf.TensorSpec((None, None), tf.float32),
    )
    with pytest.raises(ValueError, match="same number of features, got 2 and 3"):
        head().fit(ragged, np.zeros(8, int))
    uneven = tf.data.Dataset.from_tensors((x[:10], LABELS[:9]))
    with pytest.raises(ValueError, match="expected one label per row of features"):
        head().fit(uneven)
    with pytest.raises(ValueError, match="features hold no rows"):
        head().fit(tf.data.Dataset.from_tensor_slices(x[:0]).batch(4), LABELS)
