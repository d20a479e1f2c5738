"""An encoder that was trained on private labels: its receipts count in the head's statement.

They are found however the encoder is wrapped, and charged to the vault that the head is fitted on,
unless it is declared to be of other people.
"""

from __future__ import annotations

import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf
from fits import without_encoder

import tf_labeldp as ldp
from tf_labeldp.accounting import BudgetExceededError, PrivacyBudget
from tf_labeldp.heads import PrivateRidge
from tf_labeldp.mechanisms import RandomizedResponse
from tf_labeldp.plugins import TrainedModel
from tf_labeldp.vault import PrivateLabels

RNG = np.random.default_rng(0)
X = RNG.normal(size=(120, 4)).astype(np.float32)
Y = (X[:, 0] > 0).astype(int)
SPENT = 2.0
"""What the training of an encoder is said to have cost, of which a draw of so much is the receipt.

Beside the 30 of a head it saves the sum of two no more than 1 % to be composed any finer.
"""


def vault(epsilon=60.0, **arguments):
    return PrivateLabels(Y, num_classes=2, budget=PrivacyBudget(epsilon, 1e-3), **arguments)


def network():
    inputs = keras.Input((4,))
    hidden = keras.layers.Dense(6, "tanh", name="hidden")(inputs)
    return keras.Model(inputs, keras.layers.Dense(2, name="logits")(hidden))


def body(model):
    """A new model over the layers of one."""
    return keras.Model(model.inputs, model.get_layer("hidden").output)


def train(model, labels, epsilon=SPENT):
    """Has a model carry the receipt of a draw, as if it was trained on it; returns the receipts."""
    receipts = labels.randomize(RandomizedResponse(epsilon, labels.num_classes)).receipts
    TrainedModel(model).attach(receipts)
    return receipts


def head(encoder, **arguments):
    return PrivateRidge(30.0, 1e-3, encoder=encoder, **arguments)


def uses(one):
    """The ids of a head's receipts, without the free ones that name an encoder."""
    return [receipt.id for receipt in one.receipts_ if receipt.kind != "declared"]


def assert_states(one, receipts, release=30.0):
    """The head was made of these receipts and of a release of its own, and states their sum."""
    found = {receipt.id: receipt for receipt in one.receipts_}
    own = set(uses(one)) - {receipt.id for receipt in receipts}
    assert {receipt.id for receipt in receipts} < set(found) and len(own) == 1
    assert found[own.pop()].charge.epsilon == release
    total = sum(receipt.charge.epsilon for receipt in one.receipts_)
    stated = one.guarantee()
    assert stated == ldp.guarantee(one) and stated.is_private and stated.delta == 1e-3
    assert release < stated.epsilon <= total * (1.0 + 1e-9)


@pytest.mark.parametrize("encoder_of", [body, lambda model: model, lambda m: keras.Sequential([m])])
def test_the_vault_of_the_encoder_counts_its_training_once(encoder_of):
    model, labels = network(), vault()
    encoder = encoder_of(model)
    receipts = train(model, labels)
    one = head(encoder).fit(X, labels)
    assert one.predict(X).shape == (120,)
    assert_states(one, receipts)
    assert without_encoder(one.guarantee()) == labels.guarantee()
    assert [receipt.id for receipt in labels.receipts] == uses(one)


def test_a_vault_without_room_for_the_encoder_names_its_history():
    tiny, model = vault(1.0), network()
    train(model, vault())
    with pytest.raises(BudgetExceededError, match="receipts of an input count"):
        PrivateRidge(0.5, 1e-3, encoder=model).fit(X, tiny)
    assert tiny.guarantee().epsilon == 0.0


def test_other_people_are_not_charged():
    """Declared by name, two populations compose in parallel: the statement is of the worst one."""
    model, labels, other = network(), vault(people="north"), vault(30.0, people="south")
    receipts = train(model, labels)
    one = head(body(model)).fit(X, other)
    assert {receipt.id for receipt in receipts} < {receipt.id for receipt in one.receipts_}
    assert one.guarantee().epsilon == other.guarantee().epsilon == 30.0
    assert "in more than one of the populations 'north', 'south'" in str(one.guarantee())


@pytest.mark.parametrize("given", ["list", "pairs"])
def test_labels_in_no_vault_count_the_encoder_too(given):
    model, labels = network(), vault()
    receipts = train(model, labels)
    one = head(body(model), num_classes=2)
    if given == "pairs":
        one.fit(tf.data.Dataset.from_tensor_slices((X, Y)).batch(60))
    else:
        one.fit(X, Y.tolist())
    assert_states(one, receipts)


def test_a_model_that_has_seen_no_labels_adds_nothing():
    trained, public = network(), network()
    train(trained, vault())
    one = head(body(public), num_classes=2).fit(X, Y)
    assert len(uses(one)) == 1 and one.guarantee().epsilon == 30.0


def test_frozen_layers_have_learnt_nothing():
    """A public backbone under a trained classifier stays public."""
    backbone = keras.Sequential([keras.Input((4,)), keras.layers.Dense(6, "tanh")])
    backbone.trainable = False
    model = keras.Sequential([keras.Input((4,)), backbone, keras.layers.Dense(2)])
    receipts = train(model, vault())
    public = head(backbone, num_classes=2).fit(X, Y)
    assert len(uses(public)) == 1 and public.guarantee().epsilon == 30.0
    assert_states(head(model).fit(X, vault()), receipts)


@pytest.mark.parametrize("told", [{"num_classes": 2}, {"num_labels": 1}])
def test_a_head_of_labels_in_no_vault_is_counted_by_all(told):
    given = Y if "num_classes" in told else Y[:, np.newaxis]
    one = PrivateRidge(30.0, 1e-3, **told).fit(X, given)
    foreign = vault()
    made = head(one.to_keras()).fit(X, foreign)
    assert_states(made, one.receipts_)
    stated, of_vault = without_encoder(made.guarantee()), foreign.guarantee()
    assert (stated.epsilon, stated.delta) == (of_vault.epsilon, of_vault.delta)
    assert [note.code for note in stated.assumptions] == [n.code for n in of_vault.assumptions]
    # The vault keeps its own budget for all of them; the model is within those of both.
    assert (stated.adaptive, of_vault.adaptive) == ((90.0, 2e-3), (60.0, 1e-3))


class Slots:
    """An encoder whose network is in no dictionary."""

    __slots__ = ("model",)

    def __init__(self, model):
        self.model = model

    def __call__(self, inputs):
        return np.asarray(self.model(inputs))


@pytest.mark.parametrize(
    "hidden",
    [
        lambda model: lambda inputs: np.asarray(model(inputs)),
        lambda model: tf.function(lambda inputs: model(inputs)),
        Slots,
    ],
    ids=["closure", "tf.function", "slots"],
)
def test_a_model_that_only_the_body_of_a_function_names_is_an_assumption(hidden):
    model = network()
    train(model, vault())
    one = head(hidden(model)).fit(X, vault())
    assert len(uses(one)) == 1 and one.guarantee().epsilon == 30.0
    assert "public-inputs" in {one.code for one in one.guarantee().assumptions}


def test_an_encoder_trained_in_the_clear_promises_nothing_until_it_is_declared():
    model = network()
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(0.1), loss=loss)
    model.fit(X, Y, verbose=0)
    for labels, told in ((vault(), {}), (Y, {"num_classes": 2})):
        one = head(model, **told)
        with pytest.warns(UserWarning, match="steps that no receipt covers") as caught:
            one.fit(X, labels)
        assert [w.filename for w in caught if "no receipt" in str(w.message)] == [__file__]
        assert not one.guarantee().is_private and np.isinf(one.guarantee().epsilon)
        assert one.guarantee().assumptions[0].code == "not-promised"
    # Its layers in another model have no optimizer that shows the training.
    part = head(body(model)).fit(X, vault()).guarantee()
    assert part.epsilon == 30.0 and "public-inputs" in {one.code for one in part.assumptions}
    ldp.declare(model, because="the labels of this test are public")
    one = head(model).fit(X, vault())
    assert one.guarantee().epsilon == 30.0 and one.guarantee().is_private
    words = "Declared by its author, not checked: the labels of this test are public"
    assert words in one.guarantee().assumptions


def test_nothing_is_said_of_what_was_declared():
    model = network()
    model.compile("sgd", loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    model.fit(X, Y, verbose=0)
    ldp.declare(model, because="the labels of this test are public")
    labels = vault()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        head(body(model)).fit(X, labels)
