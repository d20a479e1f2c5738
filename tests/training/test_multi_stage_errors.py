"""Bad input to multi-stage training: each with its message."""

from __future__ import annotations

import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_labeldp as ldp
from tf_labeldp.vault import Numbers

CONSTRUCTOR = {
    "rows": ({"x": lambda x: x[1:]}, "got 239 rows and 240 labels"),
    # A list is read as an array of rows, so that several inputs need a tuple.
    "list of arrays": ({"x": lambda x: [x, x]}, "got 2 rows and 240 labels"),
    "no rows": ({"x": lambda x: x[:0]}, "at least one"),
    "epsilon": ({"epsilon": 0.0}, "epsilon must be finite and above zero"),
    "priors": ({"priors": np.zeros((240, 4))}, "priors must sum to one"),
    "mixup of integers": (
        {"x": lambda x: np.round(x).astype(int), "mixup_alpha": 1.0},
        "mixup_alpha above 0 needs floating-point features",
    ),
    "fractions": ({"fractions": (0.6, 0.6)}, r"fractions must sum to one, got 1.2"),
    "an empty stage": ({"fractions": (1.0, 0.0)}, r"fractions\[1\] must be finite and above zero"),
    "a short stage": ({"fractions": (0.98, 0.02)}, "expected stage 2 .* 8 batches, got 5 of 240"),
    "stages": ({"epochs_per_stage": (1, 2, 3)}, r"one per stage \(2\), got 3"),
    "temperature": ({"temperature": 0.0}, "temperature must be finite and above zero"),
    "key": ({"key": "a/b"}, r"key must be letters.*got 'a/b'"),
}


@pytest.mark.parametrize("kind", CONSTRUCTOR)
def test_arguments_of_the_constructor(kit, problem, kind):
    x, y = problem
    options, message = CONSTRUCTOR[kind]
    options = dict(options)
    x = options.pop("x", lambda rows: rows)(x)
    with pytest.raises(ValueError, match=message):
        kit.stages(x, kit.labels(y), **options)


def test_labels_must_be_in_a_vault(kit, problem):
    x, y = problem
    with pytest.raises(TypeError, match="labels must be a PrivateLabels, got ndarray"):
        kit.stages(x, y)


def test_numbers_are_for_another_mechanism(problem):
    x, y = problem
    labels = ldp.PrivateLabels(y * 1.0, Numbers(0, 3), budget=ldp.PrivacyBudget(epsilon=3.0))
    with pytest.raises(ValueError, match=r"got numbers.*LabelRandomizer"):
        ldp.MultiStageTraining(x, labels, epsilon=1.0, fractions=(1.0,), epochs_per_stage=1)


def test_an_empty_data_set_of_features(kit, problem):
    x, y = problem
    dataset = tf.data.Dataset.from_tensor_slices(x).batch(10)
    with pytest.raises(ValueError, match="got an empty one"):
        kit.stages(dataset.take(0), kit.labels(y))
    # The number of examples is counted, not that of batches.
    with pytest.raises(ValueError, match=r"expected 240 examples.* set of 20 in 2 batches"):
        kit.stages(dataset.take(2), kit.labels(y))
    with pytest.raises(ValueError, match=r"expected 240 examples, one per label"):
        kit.stages(dataset.unbatch().take(20), kit.labels(y))
    with pytest.raises(ValueError, match=r"must not be shuffled"):
        kit.stages(dataset.shuffle(24), kit.labels(y))


def test_epochs_of_fit_must_be_those_of_the_stages(kit, problem):
    x, y = problem
    stages = kit.stages(x, kit.labels(y))
    with pytest.raises(ValueError, match=r"expected epochs=4, .*got 3"):
        kit.fit(stages, kit.model(), epochs=3)


MODELS = {
    "too few scores": (3, "mse", r"shape \(batch, 4\), got \(1, 3\)"),
    "sparse loss": (
        4,
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        r"Use keras\.losses\.CategoricalCrossentropy",
    ),
    "logits, unsaid": (
        4,
        keras.losses.CategoricalCrossentropy(),
        "expected probabilities from the model",
    ),
}


@pytest.mark.parametrize("kind", MODELS)
def test_models_that_do_not_fit_noisy_labels(kit, problem, kind):
    x, y = problem
    units, loss, message = MODELS[kind]
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(units)])
    model.compile("sgd", loss)
    with pytest.raises(ValueError, match=message):
        kit.fit(kit.stages(x, kit.labels(y)), model)


@pytest.mark.slow
def test_a_model_with_one_output_is_refused_and_costs_nothing_more(kit, problem):
    x, y = problem
    labels = ldp.PrivateLabels(y % 2, num_classes=2, budget=ldp.PrivacyBudget(epsilon=3.0))
    stages = kit.stages(x, labels)
    one = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1, "sigmoid")])
    one.compile("sgd", "binary_crossentropy")
    with pytest.raises(ValueError, match=r"Dense\(2\), for CategoricalCrossentropy.*same draw"):
        kit.fit(stages, one)
    two = keras.Sequential([keras.Input((2,)), keras.layers.Dense(2, "softmax")])
    two.compile("sgd", "categorical_crossentropy")
    kit.fit(stages, two)
    assert stages.guarantee().epsilon == labels.guarantee().epsilon == 3.0


def later_part(kit, problem, **options):
    """The examples of stage 2; the parts depend on the size and the seed alone."""
    x, y = problem
    twin = kit.stages(x, kit.labels(y), **options)
    twin.dataset()
    return np.setdiff1d(np.arange(len(y)), twin.noisy_labels().indices)


def test_the_budget_of_all_stages_is_checked_before_the_first(kit, problem):
    x, y = problem
    labels = kit.labels(y)
    stages = kit.stages(x, labels)
    labels.randomize(ldp.RandomizedResponse(0.5, 4), later_part(kit, problem)[:1])
    with pytest.raises(ldp.BudgetExceededError, match="Nothing was drawn"):
        stages.dataset()
    assert labels.guarantee().epsilon == 0.5


@pytest.mark.parametrize("epoch", [1, 3])
def test_a_run_cannot_go_on_without_the_records_of_its_stages(kit, problem, epoch):
    """Without a store its labels would be drawn a second time: in stage 1 and in 2."""
    x, y = problem
    with pytest.raises(RuntimeError, match=r"a record of stage 1, got none.*second time.*store="):
        kit.fit(kit.stages(x, kit.labels(y)), kit.model(), initial_epoch=epoch)


@pytest.mark.slow
def test_an_interrupted_run_goes_on_in_the_same_process(kit, problem):
    x, y = problem
    stages, model = kit.stages(x, kit.labels(y)), kit.model()
    kit.fit(stages, model, (kit.stop_after(2),))
    kit.fit(stages, model, initial_epoch=3)
    assert len(kit.draws) == 2


@pytest.mark.slow
def test_what_a_run_that_ends_in_its_first_stage_has_not_used(kit, problem):
    x, y = problem
    labels = kit.labels(y)
    stages, model = kit.stages(x, labels, fractions=(0.75, 0.25)), kit.model()
    with pytest.warns(UserWarning, match=r"stage 1 of 2: the labels of 60 of 240 examples.*=3 "):
        kit.fit(stages, model, (kit.stop_after(0),))
    assert stages.guarantee().epsilon == labels.guarantee().epsilon == 3.0
    # Nothing was spent on the others.
    part = later_part(kit, problem, fractions=(0.75, 0.25))
    labels.check_budget(ldp.RandomizedResponse(3.0, 4), part)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        kit.fit(stages, model, initial_epoch=1)
    assert len(kit.draws) == 3  # one of them the twin's


def test_a_fit_without_the_callback_says_what_was_spent(kit, problem):
    x, y = problem
    stages, model = kit.stages(x, kit.labels(y)), kit.model()
    model.fit(stages.dataset(), epochs=1, verbose=0)
    with pytest.raises(RuntimeError, match=r"epsilon=3 was spent .* 120 of 240 .*callbacks="):
        stages.guarantee()
    assert ldp.guarantee(model).epsilon == np.inf  # it was trained without an account


@pytest.mark.slow
def test_stage_1_is_not_trained_on_in_place_of_later_stages(kit, problem):
    x, y = problem
    stages = kit.stages(x, kit.labels(y))
    model, seen = kit.model(), []
    count = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: seen.append(epoch))
    # The text is alone: no error of TensorFlow's surrounds it.
    call = (
        r"^expected the MultiStageTraining among the callbacks of model.fit, got none: after stage "
        r"1 its .* Call model.fit\(stages\.dataset\(\), epochs=stages\.epochs, callbacks=[^\n]*$"
    )
    with pytest.raises(RuntimeError, match=call):
        model.fit(stages.dataset(), epochs=stages.epochs, verbose=0, callbacks=[count])
    assert seen == [0, 1]
    with pytest.raises(RuntimeError, match=call):  # a second data set changes nothing
        model.fit(stages.dataset(), epochs=1, verbose=0)
    kit.fit(stages, model)  # the callback is the way on, at no further cost
    assert len(stages.reports) == 2


def clear(x, y, stages):
    return x, np.eye(4)[y]


def cached(x, y, stages):
    return (stages.dataset().cache(),)


@pytest.mark.parametrize(("data", "first_bad_epoch"), [(clear, 0), (cached, 1)])
def test_other_data_than_the_stages_own_is_refused(kit, problem, data, first_bad_epoch):
    """And leaves nothing: momentum would go into a next training, of which no statement knows."""
    x, y = problem
    stages, model = kit.stages(x, kit.labels(y)), kit.model()
    stages.dataset()
    model.optimizer.build(model.trainable_variables)
    variables = [*model.variables, *model.optimizer.variables]
    before = kit.values(variables)
    epochs = []

    class Count(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            epochs.append(epoch)

    with pytest.raises(RuntimeError, match=r"got another dataset.*were set back"):
        model.fit(
            *data(x, y, stages),
            epochs=stages.epochs,
            callbacks=[stages, Count()],
            verbose=0,
            shuffle=False,
        )
    assert epochs[-1] == first_bad_epoch
    for got, expected in zip(kit.values(variables), before, strict=True):
        np.testing.assert_array_equal(got, expected)
