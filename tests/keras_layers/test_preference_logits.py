"""PreferenceLogits: the DPO loss, its debiased form, equal answers, training, files and errors."""

from __future__ import annotations

import keras
import numpy as np
import pytest

import tf_labeldp as ldp
from tf_labeldp.keras_layers import ForwardCorrectedLoss, LabelWeightedLoss, PreferenceLogits

D = 4
RNG = np.random.default_rng(0)
FIRST, SECOND = RNG.normal(size=(2, 6, D)).astype("float32")


def scorer(seed=0):
    start = keras.initializers.RandomNormal(seed=seed)
    return keras.Sequential([keras.Input((D,)), keras.layers.Dense(1, kernel_initializer=start)])


def margins(model, reference=None, beta=1.0):
    scores = [model(FIRST) - model(SECOND)]
    scores += [] if reference is None else [-reference(FIRST) + reference(SECOND)]
    return beta * np.asarray(sum(scores), np.float64)[:, 0]


def pair_of(layer):
    first, second = keras.Input((D,)), keras.Input((D,))
    return keras.Model([first, second], layer((first, second)))


def test_the_loss_is_that_of_dpo_and_its_mean_over_the_noise_that_on_true_preferences():
    model, reference = scorer(1), scorer(2)
    logits = PreferenceLogits(model, reference, beta=0.3)((FIRST, SECOND))
    of_first = np.log1p(np.exp(-margins(model, reference, 0.3)))  # DPO, if the first is preferred
    of_second = np.log1p(np.exp(margins(model, reference, 0.3)))
    channel = ldp.RandomizedResponse(1.0, 2).transition_matrix()
    weights = np.linalg.inv(channel)
    loss = LabelWeightedLoss(from_logits=True, reduction=None)
    losses = np.stack([np.asarray(loss(np.tile(row, (6, 1)), logits)) for row in weights])
    keep = channel[0, 0]
    expected = (keep * of_first - (1 - keep) * of_second) / (2 * keep - 1)
    np.testing.assert_allclose(losses[1], expected, rtol=1e-4)
    np.testing.assert_allclose(channel @ losses, [of_second, of_first], rtol=1e-4)


def test_equal_answers_have_even_odds_and_no_gradient():
    import tensorflow as tf

    model = scorer()
    layer = PreferenceLogits(model, beta=2.0)
    with tf.GradientTape() as tape:
        logits = layer((FIRST, FIRST))
        loss = LabelWeightedLoss(from_logits=True)(np.tile([-0.5, 1.5], (6, 1)), logits)
    assert np.all(np.asarray(logits) == 0.0)
    assert all(np.all(np.asarray(part) == 0.0) for part in tape.gradient(loss, model.weights))


@pytest.mark.slow
@pytest.mark.parametrize("loss", ["debiased", "values"])
def test_noisy_preferences_train_the_scorer_which_carries_the_receipts(loss, tmp_path):
    rng, law = np.random.default_rng(1), np.array([2.0, -1.0, 0.0, 0.5])
    answers = rng.normal(size=(2, 4000, D)).astype("float32")
    chance = 1.0 / (1.0 + np.exp(-(answers[0] - answers[1]) @ law))
    preferred = (rng.uniform(size=4000) < chance).astype(int)
    labels = ldp.PrivateLabels(preferred, 2, budget=ldp.PrivacyBudget(1.0), insecure_seed=0)
    channel = ldp.RandomizedResponse(1.0, 2)
    noisy, model = labels.randomize(channel), scorer()
    reference = keras.models.clone_model(model)  # its layers have the same names
    reference.set_weights(model.get_weights())
    pair = pair_of(PreferenceLogits(model, reference, beta=2.0))
    matrix = channel.transition_matrix()
    corrected = {
        "debiased": LabelWeightedLoss(from_logits=True),
        "values": ForwardCorrectedLoss(matrix, from_logits=True),
    }[loss]
    pair.compile(keras.optimizers.Adam(0.05), corrected)
    before = [weight.copy() for weight in reference.get_weights()]
    ldp.fit(pair, tuple(answers), noisy, targets=loss, epochs=4, batch_size=200, verbose=0)
    learnt = model.get_weights()[0][:, 0]
    assert np.corrcoef(learnt, law)[0, 1] > 0.95
    for old, new in zip(before, reference.get_weights(), strict=True):
        np.testing.assert_array_equal(old, new)
    assert ldp.guarantee(model).epsilon == ldp.guarantee(pair).epsilon == 1.0
    pair.save(tmp_path / "pair.keras")
    loaded = ldp.load_model(tmp_path / "pair.keras")
    np.testing.assert_allclose(
        loaded.predict((FIRST, SECOND), verbose=0), pair.predict((FIRST, SECOND), verbose=0)
    )
    assert ldp.guarantee(loaded).epsilon == 1.0


def test_a_reference_has_no_dropout_in_training_and_differences_have_single_precision():
    model = scorer()
    reference = keras.Sequential([keras.Input((D,)), keras.layers.Dropout(0.5), scorer(2)])
    layer = PreferenceLogits(model, reference)
    np.testing.assert_array_equal(
        layer((FIRST, SECOND), training=True), layer((FIRST, SECOND), training=False)
    )

    def log_probabilities(answers):  # of texts: 0.5 apart, as half precision has them
        return keras.ops.cast(answers[:, :1] - 600.0, "float16")

    logits = PreferenceLogits(log_probabilities, beta=1.001)((FIRST, SECOND))
    assert logits.dtype == "float32"


def test_what_does_not_fit_is_refused():
    model = scorer()
    with pytest.raises(ValueError, match=r"beta above zero.*got beta=0"):
        PreferenceLogits(model, beta=0.0)
    with pytest.raises(ValueError, match="another model as reference"):
        PreferenceLogits(model, model)
    with pytest.raises(ValueError, match="with its own weights, got one that shares 2 with"):
        PreferenceLogits(model, keras.Model(model.inputs, model.outputs))
    assert model.trainable
    several = keras.Sequential([keras.Input((D,)), keras.layers.Dense(3)])
    with pytest.raises(ValueError, match="one number per answer"):
        PreferenceLogits(several)((FIRST, SECOND))


class TestTheHeadOfBradleyAndTerry:
    """Logistic regression on differences of features, without centring and intercept."""

    def fitted(self, differences, preferred, epsilon=1.0):
        head = ldp.PrivateLogisticRegression(
            epsilon, 1e-6, num_classes=2, center=False, intercept=False, insecure_seed=0
        )
        return head.fit(differences, preferred)

    def test_it_ranks_by_the_law_and_swapped_answers_have_opposite_odds(self):
        rng, law = np.random.default_rng(2), np.array([2.0, -1.0, 0.0, 0.5])
        differences = rng.normal(size=(4000, D))
        chance = 1.0 / (1.0 + np.exp(-differences @ law))
        head = self.fitted(differences, (rng.uniform(size=4000) < chance).astype(int))
        answers = rng.normal(size=(2000, D))
        rewards = answers @ head.coef_[0]
        assert np.corrcoef(rewards, answers @ law)[0, 1] > 0.97
        both = [head.predict_proba(sign * differences[:50])[:, 1] for sign in (1, -1)]
        np.testing.assert_allclose(both[0], 1.0 - both[1], atol=1e-12)

    def test_a_preference_of_equal_answers_does_not_move_it(self):
        rng = np.random.default_rng(3)
        differences = rng.normal(size=(600, D))
        differences[:100] = 0.0
        preferred = (differences[:, 0] > 0).astype(int)
        other = preferred.copy()
        other[:100] = 1
        heads = [self.fitted(differences, labels) for labels in (preferred, other)]
        np.testing.assert_array_equal(heads[0].coef_, heads[1].coef_)
        np.testing.assert_array_equal(heads[0].predict_proba(differences[:2]), 0.5)
        with pytest.raises(ValueError, match="rows of features that differ"):
            self.fitted(0.0 * differences, preferred)
