"""The front door with an encoder that was made elsewhere."""

from __future__ import annotations

import keras
import numpy as np
import pytest
from keras import layers
from sklearn.feature_extraction.text import TfidfVectorizer

import tf_labeldp as ldp
from tf_labeldp.features import PublicEncoder
from tf_labeldp.vault import Numbers

N = 200
RNG = np.random.default_rng(5)
Y = np.arange(N) % 3
IMAGES = RNG.integers(0, 100, (N, 8, 8, 3)).astype(np.uint8)
IMAGES[np.arange(N), ..., Y] += 100
TEXTS = [f"{('red', 'green', 'blue')[y]} and number {i % 11}" for i, y in enumerate(Y)]


def network():
    """Returns an encoder of images of 16 x 16, which takes pixels of 0 to 255."""
    start = keras.initializers.RandomNormal(seed=1)
    return keras.Sequential(
        [
            keras.Input((16, 16, 3)),
            layers.Rescaling(1.0 / 255.0),
            layers.Conv2D(8, 3, strides=2, kernel_initializer=start),
            layers.GlobalAveragePooling2D(),
        ]
    )


class Counted:
    """A function from images to features, which counts the rows that it computes."""

    rows = 0

    def __call__(self, images):
        self.rows += len(images)
        return np.asarray(images, np.float64).reshape(len(images), -1)[:, ::7]


def vault(epsilon=20.0):
    budget = ldp.PrivacyBudget(epsilon, 1e-4)
    return ldp.PrivateLabels(Y, 3, budget=budget, insecure_seed=0)


def classifier(encoder, **arguments):
    return ldp.PrivateClassifier(8.0, 1e-4, encoder=encoder, **arguments)


def own_network():
    return keras.Sequential([keras.Input((8, 8, 3)), layers.Flatten(), layers.Dense(3)])


@pytest.mark.parametrize(
    "arguments",
    [{}, {"budget_for_evaluation": 2.0}, {"model": own_network(), "epochs": 1}],
    ids=["alone", "evaluation", "two releases"],
)
def test_features_are_computed_once_for_all_rows(arguments):
    counted = Counted()
    model = classifier(counted, **arguments).fit(IMAGES, vault())
    assert counted.rows == N
    model.predict(IMAGES)
    assert counted.rows == N


def test_regressions_and_searches_compute_them_once():
    counted = Counted()
    labels = ldp.PrivateLabels(
        Y / 2.0, Numbers(0.0, 1.0), budget=ldp.PrivacyBudget(9.0, 1e-4), insecure_seed=0
    )
    ldp.PrivateRegressor(9.0, 1e-4, encoder=counted).fit(IMAGES, labels)
    assert counted.rows == N
    counted = Counted()
    ridge = ldp.PrivateRidge(1.0, 1e-4, encoder=counted)
    search = ldp.PrivateSearchCV(ridge, {"spread": [True, "half"]}, 4.0)
    search.fit(IMAGES, vault())
    assert counted.rows == N and '"Counted"' in str(search.guarantee())


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:the images are 8 x 8")
def test_a_model_of_raw_images_is_exported(tmp_path):
    model = classifier(network()).fit(IMAGES, vault())
    assert model.score(IMAGES, Y) > 0.9
    model.to_keras().save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    found = loaded.predict(IMAGES, verbose=0)
    np.testing.assert_allclose(found, model.predict_proba(IMAGES), atol=1e-4)
    assert set(model.guarantee().assumptions) <= set(ldp.guarantee(loaded).assumptions)
    [note] = [n for n in model.guarantee().assumptions if n.code == "public-encoder"]
    assert "weights sha256" in note


@pytest.mark.slow
def test_images_have_smoothed_features_too_by_public_facts(tmp_path):
    encoder = PublicEncoder(network(), size=16).fit(IMAGES)
    model = ldp.PrivateClassifier(1.0, 1e-4, encoder=encoder).fit(IMAGES, vault())
    assert "next to the same smoothed" in model.choice_.reason
    # Both kinds of features are in the export, the encoder once.
    model.to_keras().save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    found = loaded.predict(IMAGES, verbose=0)
    np.testing.assert_allclose(found, model.predict_proba(IMAGES), atol=1e-3)


@pytest.mark.slow
def test_features_of_texts_are_not_smoothed():
    texts = classifier(TfidfVectorizer().fit(TEXTS)).fit(TEXTS, vault())
    assert "not smoothed" in texts.choice_.reason
    assert texts.score(TEXTS, Y) > 0.9
