"""LP-MST against Algorithm 3 and appendix B of ``ghazi2021``, option by option."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_labeldp as ldp
from tf_labeldp.estimation import prior_from_logits


@pytest.mark.holds("training.MultiStageTraining")
def test_each_label_is_drawn_once_for_the_stated_epsilon(kit, problem):
    x, y = problem
    labels = kit.labels(y)
    stages = kit.stages(x, labels, fractions=(0.4, 0.3, 0.3))
    kit.fit(stages, kit.model())
    drawn = np.concatenate([rows for _, rows, _ in kit.draws])
    np.testing.assert_array_equal(np.sort(drawn), np.arange(y.size))
    assert labels.guarantee().epsilon == 3.0
    drawn = stages.noisy_labels()
    np.testing.assert_array_equal(np.sort(drawn.indices), np.arange(y.size))
    noisy = drawn.values[np.argsort(drawn.indices)]
    assert 0 <= noisy.min() and noisy.max() < kit.num_classes
    # RR at epsilon 3 and K = 4 keeps 87 %, RRWithPrior no fewer; five standard deviations below.
    keep = np.exp(3.0) / (np.exp(3.0) + 3.0)
    assert np.mean(noisy == y) > keep - 5 * np.sqrt(keep * (1 - keep) / y.size)
    assert [type(mechanism).__name__ for mechanism, _, _ in kit.draws] == [
        "RandomizedResponse",
        "RRWithPrior",
        "RRWithPrior",
    ]


def test_an_epoch_is_one_pass_in_batches_of_nearly_one_size(kit):
    """The order is random, and rows stay with their labels."""
    y = np.arange(103) % kit.num_classes
    stages = kit.stages(np.arange(103.0), kit.labels(y), fractions=(1.0,), batch_size=20)
    orders = []
    for _ in range(2):
        batches = list(stages.dataset().as_numpy_iterator())
        sizes = [len(rows) for _, rows in batches]
        assert len(sizes) == stages.steps_per_epoch and max(sizes) - min(sizes) <= 1
        orders.append(np.concatenate([x for x, _ in batches]).astype(int))
        np.testing.assert_array_equal(np.sort(orders[-1]), np.arange(103))
        served = np.concatenate([rows for _, rows in batches]).argmax(axis=1)
        noisy = stages.noisy_labels()
        np.testing.assert_array_equal(served, noisy.values[np.argsort(noisy.indices)][orders[-1]])
    assert not np.array_equal(orders[0], np.arange(103))


def test_one_stage_is_plain_randomized_response(kit, problem):
    x, y = problem
    labels = kit.labels(y)
    stages = kit.stages(x, labels, fractions=(1.0,))
    model = kit.model()
    kit.fit(stages, model)
    ((mechanism, rows, priors),) = kit.draws
    assert mechanism == ldp.RandomizedResponse(3.0, kit.num_classes)
    assert priors is None and rows.size == y.size
    noisy = stages.noisy_labels()
    np.testing.assert_array_equal(noisy.indices, rows)
    np.testing.assert_array_equal(noisy.values, stages._stored(0).values)
    assert np.mean(model.predict(x, verbose=0).argmax(axis=1) == y) > 0.9


def test_priors_are_the_models_own_at_the_stage_temperature(kit, problem):
    x, y = problem
    stages = kit.stages(x, kit.labels(y), temperature=(1.0, 0.5))
    model = kit.model()
    logits = {}

    class Watch(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            logits[epoch] = self.model.predict(x, verbose=0)

    kit.fit(stages, model, (Watch(),))
    _, rows, priors = kit.draws[1]
    expected = prior_from_logits(logits[1][rows], 0.5)
    np.testing.assert_allclose(priors, expected, atol=1e-6)
    assert np.abs(priors - prior_from_logits(logits[1][rows], 1.0)).max() > 1e-3


def test_earlier_labels_outside_the_top_k_are_dropped(kit, problem):
    x, y = problem
    labels = kit.labels(y)
    stages = kit.stages(x, labels)
    model = kit.model()
    kit.fit(stages, model, (kit.stop_after(2),))
    report = stages.reports[1]
    _, new, priors = kit.draws[1]
    first = stages._plan.parts[0]
    mean_k = ldp.RRWithPrior(3.0, kit.num_classes).optimal_k(priors).mean()
    k = max(1, round(mean_k))
    scores = kit.snapshots[1]  # logits after the last epoch of stage 1
    noisy = stages._stored(0).values
    top = np.argsort(-scores[first], axis=1, kind="stable")[:, :k]
    kept = first[(top == noisy[:, np.newaxis]).any(axis=1)]
    np.testing.assert_array_equal(stages._kept[1], kept)
    assert report.mean_k == pytest.approx(mean_k)
    assert (report.num_new, report.num_reused) == (new.size, kept.size)
    assert report.num_dropped == first.size - kept.size > 0


@pytest.mark.parametrize(
    ("options", "reused", "dropped"),
    [
        ({"reuse_labels": False}, 0, 0),
        ({"filter_labels": False}, 120, 0),
    ],
)
def test_reuse_and_filter_can_be_switched_off(kit, problem, options, reused, dropped):
    x, y = problem
    stages = kit.stages(x, kit.labels(y), **options)
    kit.fit(stages, kit.model())
    assert (stages.reports[1].num_reused, stages.reports[1].num_dropped) == (reused, dropped)


@pytest.mark.slow
@pytest.mark.parametrize("warm", [True, False])
def test_warm_start_keeps_weights_and_restarts_the_optimizer(kit, problem, warm):
    x, y = problem
    stages = kit.stages(x, kit.labels(y), warm_start=warm, reuse_labels=False)
    model = kit.model(norm=True)
    start = kit.values(model.variables)
    seen = {}

    class Watch(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            seen[epoch] = kit.values(self.model.variables)

        def on_epoch_begin(self, epoch, logs=None):  # runs after the stages' own
            if epoch == 2:
                seen["begin"] = kit.values(self.model.variables)
                seen["optimizer"] = kit.values(self.model.optimizer.variables)

    kit.fit(stages, model, (Watch(),))
    for got, expected in zip(seen["begin"], seen[1] if warm else start, strict=True):
        np.testing.assert_array_equal(got, expected)
    fresh = keras.optimizers.Adam(0.02)
    fresh.build(model.trainable_variables)
    for got, expected in zip(seen["optimizer"], kit.values(fresh.variables), strict=True):
        np.testing.assert_array_equal(got, expected)


@pytest.mark.holds("training.MultiStageTraining")
def test_true_labels_never_enter_training(kit, problem):
    """After each draw the vault's labels of the examples drawn for are replaced by NaN."""
    x, y = problem
    labels = kit.labels(y, people="these")
    stages = kit.stages(x, labels)
    plain = kit.model()
    # Both end in the same weights, which bring receipts along: those of other people here.
    kit.fit(kit.stages(x, kit.labels(y, people="others")), plain)

    original = type(labels._draws)._new_record

    def draw_and_poison(self, name, mechanism, rows, priors, digest, made_of):
        record = original(self, name, mechanism, rows, priors, digest, made_of)
        poisoned = self._sealed.open().astype(float)
        poisoned[rows] = np.nan
        self._sealed._array = poisoned
        return record

    # Labels not yet drawn are read back as integers; a NaN among them would fail the check.
    kit.monkeypatch.setattr(type(labels._draws), "_new_record", draw_and_poison)
    real_open = type(labels._sealed).open
    kit.monkeypatch.setattr(
        type(labels._sealed),
        "open",
        lambda self, rows=None: real_open(self) if rows is None else _exact(real_open(self)[rows]),
    )
    model = kit.model()
    kit.fit(stages, model)
    assert np.isnan(labels._sealed._array).all()
    for got, expected in zip(model.get_weights(), plain.get_weights(), strict=True):
        np.testing.assert_array_equal(got, expected)


def _exact(values):
    if np.isnan(values).any():
        raise AssertionError("a label was read again after its draw")
    return values.astype(np.int64)


def test_a_second_model_trains_on_the_same_draws_for_nothing(kit, problem):
    x, y = problem
    labels = kit.labels(y)
    stages = kit.stages(x, labels, warm_start=False)
    kit.fit(stages, kit.model())
    first = stages.noisy_labels()
    larger = kit.model(norm=True)  # other variables than the first model's
    kit.fit(stages, larger)
    again = kit.stages(x, labels)
    kit.fit(again, kit.model())
    for name in ("values", "indices"):
        np.testing.assert_array_equal(getattr(again.noisy_labels(), name), getattr(first, name))
    assert len(kit.draws) == 2 and labels.guarantee().epsilon == 3.0
    with pytest.raises(ldp.BudgetExceededError):
        kit.stages(x, labels, key="once-more").dataset()


def test_draws_under_other_priors_are_other_draws(kit, problem):
    x, y = problem
    labels = kit.labels(y, budget=ldp.PrivacyBudget(epsilon=9.0))
    kit.fit(kit.stages(x, labels), kit.model())
    cases = [  # what is changed, how many draws are new, and the most that a label has spent
        ({"temperature": (1.0, 0.3)}, 1, 6.0),
        ({"priors": np.full(4, 0.25)}, 1, 6.0),
        ({"key": "other"}, 2, 9.0),
    ]
    for change, new, spent in cases:
        before = len(kit.draws)
        kit.fit(kit.stages(x, labels, **change), kit.model())
        assert len(kit.draws) == before + new
        assert labels.guarantee().epsilon == spent


def test_the_defaults_are_those_that_did_best(kit, problem):
    """benchmarks/README.md: no filter, and a temperature of one half."""
    x, y = problem
    stages = ldp.MultiStageTraining(
        x, kit.labels(y), epsilon=3.0, fractions=(0.5, 0.5), epochs_per_stage=2, verbose=0
    )
    assert stages._plan.temperatures == (0.5, 0.5)
    kit.fit(stages, kit.model())
    assert (stages.reports[1].num_reused, stages.reports[1].num_dropped) == (120, 0)


@pytest.mark.parametrize(("in_fit", "in_stages"), [(0, 1), (2, 0), (2, 1)])
def test_stages_are_silent_where_they_or_the_fit_have_verbose_0(
    kit, problem, capsys, in_fit, in_stages
):
    x, y = problem
    kit.fit(kit.stages(x, kit.labels(y), verbose=in_stages), kit.model(), verbose=in_fit)
    shown = capsys.readouterr()
    assert ("Stage 2: 120 new labels" in shown.out) is bool(in_fit and in_stages)
    assert bool(shown.out) is bool(in_fit) and shown.err == ""


# Statements.


def test_the_model_and_its_noisy_labels_state_their_draws(kit, problem, tmp_path):
    x, y = problem
    labels = kit.labels(y, budget=ldp.PrivacyBudget(epsilon=5.0), insecure_seed=None)
    labels.release(ldp.mechanisms.HistogramMechanism(1.0, 4))  # which goes into neither
    stages, model = kit.stages(x, labels), kit.model()
    with pytest.raises(RuntimeError, match="expected a model trained"):
        stages.guarantee()
    kit.fit(stages, model)
    noisy = stages.noisy_labels()
    for found in (stages.guarantee(), ldp.guarantee(model), noisy.guarantee()):
        assert (found.epsilon, found.delta, found.is_private) == (3.0, 0.0, True)
    assert labels.guarantee().epsilon == 4.0
    # Weights of this model are known wherever they turn up.
    other = kit.model()
    assert ldp.guarantee(other).epsilon == 0.0
    other.set_weights(model.get_weights())
    assert ldp.guarantee(other).epsilon == 3.0
    noisy.save(tmp_path / "noisy")
    again = ldp.NoisyLabels.load(tmp_path / "noisy")
    np.testing.assert_array_equal(again.values, noisy.values)
    np.testing.assert_array_equal(again.indices, noisy.indices)
    assert again.guarantee() == noisy.guarantee()


def test_noisy_labels_of_all_stages_have_the_channel_of_their_priors(kit, problem):
    """Also in the first stage, whose randomized response has a uniform prior."""
    x, y = problem
    stages = kit.stages(x, kit.labels(y))
    kit.fit(stages, kit.model())
    noisy = stages.noisy_labels()
    first, second = (stages._stored(stage) for stage in range(2))
    found = noisy.posterior()
    uniform = ldp.estimation.posterior(ldp.RandomizedResponse(3.0, 4), first.values)
    np.testing.assert_allclose(found[: len(first)], uniform, rtol=1e-9)
    np.testing.assert_allclose(found[len(first) :], second.posterior(), rtol=1e-9)
    rows = np.asarray(noisy.priors)
    np.testing.assert_array_equal(rows[: len(first)], 0.25)
    np.testing.assert_array_equal(rows[len(first) :], kit.draws[1][2])


def test_priors_that_were_released_are_counted(kit, problem):
    x, y = problem
    labels = kit.labels(y, budget=ldp.PrivacyBudget(epsilon=5.0))
    counts = labels.release(ldp.mechanisms.HistogramMechanism(1.0, 4))
    stages, model = kit.stages(x, labels, priors=counts.priors()), kit.model()
    kit.fit(stages, model)
    assert stages.guarantee().epsilon == stages.noisy_labels().guarantee().epsilon == 4.0
    assert labels.guarantee().epsilon == 4.0
    # Numbers are assumed to be public, and the statement names the assumption.
    stages = kit.stages(x, kit.labels(y), priors=np.asarray(counts.priors()))
    kit.fit(stages, kit.model())
    assert stages.guarantee().epsilon == 3.0
    assert "public-inputs" in {line.code for line in stages.guarantee().assumptions}


def test_training_in_the_clear_needs_a_declaration_or_promises_nothing(kit, problem):
    x, y = problem
    model, labels = kit.model(), kit.labels(y)
    model.fit(x, np.eye(4)[y], verbose=0)
    stages = kit.stages(x, labels)
    kit.fit(stages, model)
    assert stages.guarantee().headline == "NOT PRIVATE: nothing is promised"
    assert "steps that no receipt covers" in stages.guarantee().assumptions[0]
    assert labels.guarantee().epsilon == 3.0
    declared = ldp.declare(model, "those labels were public")
    assert declared == stages.guarantee()
    assert declared.epsilon == 3.0
    assert "Declared by its author, not checked: those labels were public" in declared.assumptions
    # After the stages, too.
    model.fit(x, np.eye(4)[y], verbose=0)
    assert stages.guarantee().epsilon == np.inf


def test_data_sets_batched_or_not_are_read_like_arrays(kit, problem):
    x, y = problem
    arrays = {"left": x[:, :1], "right": x[:, 1:]}
    dataset = tf.data.Dataset.from_tensor_slices(arrays)
    seen = []
    for features in (arrays, dataset, dataset.batch(7)):
        stages = kit.stages(features, kit.labels(y), fractions=(1.0,))
        seen.append(list(stages.dataset().as_numpy_iterator()))
    for others in seen[1:]:
        tf.nest.map_structure(np.testing.assert_array_equal, seen[0], others)
