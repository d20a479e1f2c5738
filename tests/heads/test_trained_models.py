"""An encoder that was trained on private labels is refused, except by the vault of those labels."""

from __future__ import annotations

import functools
import gc

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_labeldp as ldp
from tf_labeldp import _trained_models
from tf_labeldp.accounting import PrivacyBudget
from tf_labeldp.heads import PrivateLogisticRegression, PrivateRidge
from tf_labeldp.private_labels import PrivateLabels

HEADS = [PrivateRidge, PrivateLogisticRegression]
RNG = np.random.default_rng(0)
X = RNG.normal(size=(120, 4)).astype(np.float32)
Y = (X[:, 0] > 0).astype(int)
REFUSED = "the encoder was trained on labels of a PrivateLabels"


def vault(epsilon=60.0):
    return PrivateLabels(Y, num_classes=2, budget=PrivacyBudget(epsilon, 1e-3))


def network():
    inputs = keras.Input((4,))
    hidden = keras.layers.Dense(6, "tanh", name="hidden")(inputs)
    return keras.Model(inputs, keras.layers.Dense(2, name="logits")(hidden))


def body(model):
    """A new model over the layers of one."""
    return keras.Model(model.inputs, model.get_layer("hidden").output)


def head(kind, encoder, **arguments):
    return kind(30.0, 1e-3, encoder=encoder, **arguments)


@pytest.mark.parametrize("kind", HEADS)
@pytest.mark.parametrize("encoder_of", [body, lambda model: model, lambda m: keras.Sequential([m])])
def test_only_the_same_vault_takes_the_encoder(encoder_of, kind):
    model, labels, other = network(), vault(), vault()
    encoder = encoder_of(model)
    _trained_models.remember(model, labels)
    for foreign in (other, Y, Y.tolist()):
        with pytest.raises(ValueError, match=REFUSED):
            head(kind, encoder, num_classes=2).fit(X, foreign)
    pairs = tf.data.Dataset.from_tensor_slices((X, Y)).batch(60)
    with pytest.raises(ValueError, match=REFUSED):
        head(kind, encoder, num_classes=2).fit(pairs)
    assert other.guarantee().epsilon == labels.guarantee().epsilon == 0.0
    assert head(kind, encoder).fit(X, labels).predict(X).shape == (120,)
    assert labels.guarantee().epsilon == 30.0


def test_a_model_that_has_seen_no_labels_is_taken():
    trained, public = network(), network()
    _trained_models.remember(trained, vault())
    head(PrivateRidge, body(public), num_classes=2).fit(X, Y)


def test_a_vault_that_is_gone_is_not_forgotten():
    """Neither for labels given, nor for a data set of pairs, whose labels are None at first."""
    model = network()
    _trained_models.remember(model, vault())
    gc.collect()
    pairs = tf.data.Dataset.from_tensor_slices((X, Y)).batch(60)
    for arguments in ((pairs,), (X, Y)):
        with pytest.raises(ValueError, match=REFUSED):
            head(PrivateRidge, body(model), num_classes=2).fit(*arguments)


def test_a_model_trained_on_two_vaults_is_taken_by_neither():
    model, labels, more = network(), vault(), vault()
    _trained_models.remember(model, labels)
    _trained_models.remember(model, more)
    _trained_models.remember(model, more)
    for one in (labels, more):
        with pytest.raises(ValueError, match=REFUSED):
            head(PrivateRidge, body(model)).fit(X, one)


def test_frozen_layers_have_learnt_nothing():
    """A public backbone under a trained classifier stays public."""
    backbone = keras.Sequential([keras.Input((4,)), keras.layers.Dense(6, "tanh")])
    backbone.trainable = False
    model = keras.Sequential([keras.Input((4,)), backbone, keras.layers.Dense(2)])
    _trained_models.remember(model, vault())
    head(PrivateRidge, backbone, num_classes=2).fit(X, Y)
    with pytest.raises(ValueError, match=REFUSED):
        head(PrivateRidge, model, num_classes=2).fit(X, Y)


def test_nothing_is_kept_alive():
    before = len(_trained_models._TRAINED_ON)
    model, labels = network(), vault()
    _trained_models.remember(model, labels)
    assert len(_trained_models._TRAINED_ON) > before
    del model
    keras.backend.clear_session()
    gc.collect()
    assert len(_trained_models._TRAINED_ON) <= before


@pytest.mark.parametrize("kind", HEADS)
def test_a_clone_of_a_head_does_not_forget(kind):
    from sklearn.base import clone

    model = network()
    _trained_models.remember(model, vault())
    with pytest.raises(ValueError, match=REFUSED):
        clone(head(kind, body(model), num_classes=2)).fit(X, Y)


def test_what_is_no_keras_model_has_no_layers():
    for encoder in (None, len, "text", PrivateRidge(1.0)):
        _trained_models.refuse_foreign(encoder, Y)


def test_multi_stage_training_marks_its_model():
    labels, model = vault(), network()
    stages = ldp.MultiStageTraining(
        X, labels, epsilon=2.0, fractions=(1.0,), epochs_per_stage=1, batch_size=60, verbose=0
    )
    loss = keras.losses.CategoricalCrossentropy(from_logits=True)
    model.compile("sgd", loss=loss)
    model.fit(stages.dataset(), epochs=stages.epochs, callbacks=[stages], verbose=0)
    encoder = body(model)
    with pytest.raises(ValueError, match=REFUSED):
        head(PrivateRidge, encoder, num_classes=2).fit(X, Y)
    one = head(PrivateRidge, encoder).fit(X, labels)
    assert one.guarantee() == labels.guarantee()
    assert 30.0 < one.guarantee().epsilon <= 32.0  # of the training and the release


@pytest.mark.parametrize("kind", HEADS)
@pytest.mark.parametrize(
    "encoder_of", [lambda one: one.to_keras(), lambda one: one.predict_proba], ids=["keras", "call"]
)
def test_a_head_is_a_model_that_has_seen_labels(encoder_of, kind):
    labels = vault()
    one = kind(30.0, 1e-3).fit(X, labels)
    encoder = encoder_of(one)
    with pytest.raises(ValueError, match=REFUSED):
        head(kind, encoder, num_classes=2).fit(X, Y)
    again = head(kind, encoder).fit(X, labels)
    assert again.guarantee().epsilon > 30.0  # of both


@pytest.mark.parametrize("told", [{"num_classes": 2}, {"num_labels": 1}])
def test_a_head_of_labels_in_no_vault_is_refused_by_all(told):
    given = Y if "num_classes" in told else Y[:, np.newaxis]
    encoder = PrivateRidge(30.0, 1e-3, **told).fit(X, given).to_keras()
    for foreign in (vault(), Y):
        with pytest.raises(ValueError, match=REFUSED):
            head(PrivateRidge, encoder, num_classes=2).fit(X, foreign)


def test_a_method_of_a_trained_model_is_that_model():
    model = network()
    _trained_models.remember(model, vault())
    with pytest.raises(ValueError, match=REFUSED):
        head(PrivateRidge, model.predict, num_classes=2).fit(X, Y)


def features_of(model, inputs):
    return np.asarray(model(inputs))


WRAPPED = {
    "lambda": lambda model: lambda inputs: np.asarray(model(inputs)),
    "of a function": lambda model: lambda inputs: (lambda rows: features_of(model, rows))(inputs),
    "partial": lambda model: functools.partial(features_of, model),
    "keyword": lambda model: functools.partial(lambda rows, by: np.asarray(by(rows)), by=model),
    "partial of a method": lambda model: functools.partial(model.predict, verbose=0),
}


@pytest.mark.parametrize("name", WRAPPED)
def test_a_function_around_a_trained_model_is_that_model(name):
    model, fresh, labels = network(), network(), vault()
    _trained_models.remember(model, labels)
    with pytest.raises(ValueError, match=REFUSED):
        head(PrivateRidge, WRAPPED[name](model), num_classes=2).fit(X, Y)
    for encoder, held in ((model, labels), (fresh, vault())):
        found = head(PrivateRidge, WRAPPED[name](encoder)).fit(X, held).predict(X)
        assert found.shape == (120,)
