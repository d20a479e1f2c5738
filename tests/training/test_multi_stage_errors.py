"""Bad input to multi-stage training: each with its message."""

from __future__ import annotations

import keras
import numpy as np
import pytest

import tf_labeldp as ldp


def test_labels_must_be_in_a_vault(kit, problem):
    x, y = problem
    with pytest.raises(TypeError, match="labels must be a PrivateLabels, got ndarray"):
        kit.stages(x, y)


def test_rows_must_match_labels(kit, problem):
    x, y = problem
    with pytest.raises(ValueError, match="features have 239 rows, labels have 240"):
        kit.stages(x[1:], kit.labels(y))


@pytest.mark.parametrize("epsilon", [0.0, -1.0, np.nan, np.inf])
def test_epsilon_must_be_positive_and_finite(kit, problem, epsilon):
    x, y = problem
    with pytest.raises(ValueError, match="epsilon must be finite and above zero"):
        kit.stages(x, kit.labels(y), epsilon=epsilon)


def test_priors_must_be_probabilities(kit, problem):
    x, y = problem
    with pytest.raises(ValueError, match="priors must sum to one"):
        kit.stages(x, kit.labels(y), priors=np.zeros((240, 4)))


def test_mixup_needs_floating_features(kit, problem):
    x, y = problem
    with pytest.raises(ValueError, match="mixup_alpha > 0 needs floating-point features"):
        kit.stages(np.round(x).astype(int), kit.labels(y), mixup_alpha=1.0)


def test_budget_is_checked_before_the_draw(kit, problem):
    x, y = problem
    labels = kit.labels(y, budget=ldp.PrivacyBudget(epsilon=2.9))
    with pytest.raises(ldp.BudgetExceededError, match=r"over the budget epsilon=2\.9"):
        kit.stages(x, labels).dataset()
    assert labels.guarantee().epsilon == 0.0


def test_epochs_of_fit_must_be_those_of_the_stages(kit, problem):
    x, y = problem
    stages = kit.stages(x, kit.labels(y))
    with pytest.raises(ValueError, match="called with epochs=3, but the stages have 4"):
        kit.fit(stages, kit.model(), epochs=3)


@pytest.mark.parametrize("units", [3, 5])
def test_output_must_have_one_score_a_class(kit, problem, units):
    x, y = problem
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(units)])
    model.compile("sgd", "mse")
    with pytest.raises(ValueError, match=rf"shape \(batch, 4\).*returned \(1, {units}\)"):
        kit.fit(kit.stages(x, kit.labels(y)), model)


def test_sparse_losses_are_refused(kit, problem):
    x, y = problem
    model = kit.model()
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    with pytest.raises(ValueError, match=r"Use keras\.losses\.CategoricalCrossentropy"):
        kit.fit(kit.stages(x, kit.labels(y)), model)


def test_logits_without_saying_so_are_refused(kit, problem):
    x, y = problem
    model = kit.model()
    model.compile("sgd", keras.losses.CategoricalCrossentropy())
    with pytest.raises(ValueError, match="not a probability distribution"):
        kit.fit(kit.stages(x, kit.labels(y)), model)


def test_the_budget_of_all_stages_is_checked_before_the_first(kit, problem):
    x, y = problem
    labels = kit.labels(y)
    stages = kit.stages(x, labels)
    labels.randomize(ldp.RandomizedResponse(0.5, 4), stages._plan.parts[1][:1])
    with pytest.raises(ldp.BudgetExceededError, match="Nothing was drawn"):
        stages.dataset()
    assert labels.guarantee().epsilon == 0.5


@pytest.mark.parametrize("epoch", [1, 2, 3])
def test_a_run_cannot_go_on_without_the_records_of_its_stages(kit, problem, epoch):
    """Without a store its labels would be drawn a second time: in stage 1, between and in 2."""
    x, y = problem
    with pytest.raises(RuntimeError, match=r"no record of how stage 1 began.*second time.*store="):
        kit.fit(kit.stages(x, kit.labels(y)), kit.model(), initial_epoch=epoch)


def test_an_interrupted_run_goes_on_in_the_same_process(kit, problem):
    x, y = problem
    stages, model = kit.stages(x, kit.labels(y)), kit.model()
    kit.fit(stages, model, (kit.stop_after(2),))
    kit.fit(stages, model, initial_epoch=3)
    assert len(kit.draws) == 2


def clear(x, y, stages):
    return x, np.eye(4)[y]


def cached(x, y, stages):
    return (stages.dataset().cache(),)


@pytest.mark.parametrize(("data", "first_bad_epoch"), [(clear, 0), (cached, 1)])
def test_other_data_than_the_stages_own_is_refused(kit, problem, data, first_bad_epoch):
    x, y = problem
    stages, model = kit.stages(x, kit.labels(y)), kit.model()
    stages.dataset()
    before = kit.values(model.variables)
    epochs = []

    class Count(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            epochs.append(epoch)

    with pytest.raises(RuntimeError, match=r"does not read the noisy labels.*were set back"):
        model.fit(
            *data(x, y, stages),
            epochs=stages.epochs,
            callbacks=[stages, Count()],
            verbose=0,
            shuffle=False,
        )
    assert epochs[-1] == first_bad_epoch
    for got, expected in zip(kit.values(model.variables), before, strict=True):
        np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize("data", [clear, cached])
def test_other_data_leave_nothing_in_the_optimizer(kit, problem, data):
    """Its momentum would go into the next training, of which no statement knows."""
    x, y = problem
    stages, model = kit.stages(x, kit.labels(y)), kit.model()
    stages.dataset()
    model.optimizer.build(model.trainable_variables)
    before = kit.values(model.optimizer.variables)
    with pytest.raises(RuntimeError, match="were set back"):
        model.fit(*data(x, y, stages), epochs=stages.epochs, callbacks=[stages], verbose=0)
    for got, expected in zip(kit.values(model.optimizer.variables), before, strict=True):
        np.testing.assert_array_equal(got, expected)


def test_rows_instead_of_arrays(kit, problem):
    x, y = problem
    """A list is read as an array of rows, so that several inputs need a tuple."""
    for features in (x.tolist(), list(x)):
        kit.stages(features, kit.labels(y))
    with pytest.raises(ValueError, match="features have 2 rows, labels have 240"):
        kit.stages([x, x], kit.labels(y))
    with pytest.raises(ValueError, match="at least one"):
        kit.stages(x[:0], kit.labels(y[:0]))


def test_fractions_must_be_a_sequence(kit, problem):
    x, y = problem
    with pytest.raises(ValueError, match=r"fractions must be a sequence .* got 1\.0"):
        kit.stages(x, kit.labels(y), fractions=1.0)


def test_key_must_name_a_file(kit, problem):
    x, y = problem
    with pytest.raises(ValueError, match=r"key must be made of letters.*got 'a/b'"):
        kit.stages(x, kit.labels(y), key="a/b")
