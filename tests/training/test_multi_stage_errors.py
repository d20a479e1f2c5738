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
    with pytest.raises(ldp.BudgetExceededError, match=r"over the budget of epsilon=2\.9"):
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


def test_a_run_cannot_start_in_a_later_stage_without_its_draws(kit, problem):
    x, y = problem
    with pytest.raises(RuntimeError, match=r"labels of stage 1 were not drawn|no record of how"):
        kit.fit(kit.stages(x, kit.labels(y)), kit.model(), initial_epoch=3)


def test_key_must_name_a_file(kit, problem):
    x, y = problem
    with pytest.raises(ValueError, match=r"key must be made of letters.*got 'a/b'"):
        kit.stages(x, kit.labels(y), key="a/b")
