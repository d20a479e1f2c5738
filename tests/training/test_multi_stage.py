"""LP-MST against Algorithm 3 and appendix B of ``ghazi2021``, option by option."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_labeldp as ldp
from tf_labeldp.estimation import prior_from_logits


@pytest.mark.slow
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


def test_a_stage_has_whole_users(kit, problem):
    """Stages of one user would compose: a budget for her labels would end in the second stage."""
    x, y = problem
    users = np.random.default_rng(0).permutation(np.arange(y.size) // 2)
    labels = kit.labels(y, users=users, budget=ldp.PrivacyBudget(2 * 3.0))
    stages = kit.stages(x, labels)
    kit.fit(stages, kit.model())
    first, second = (users[rows] for _, rows, _ in kit.draws)
    assert not np.intersect1d(first, second).size and first.size + second.size == y.size
    assert stages.guarantee().epsilon == labels.guarantee().epsilon == 6.0
    assert stages.guarantee().unit == "all labels of one user"


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
    (drawn,) = kit.noisy.values()
    np.testing.assert_array_equal(noisy.values, drawn.values)
    assert np.mean(model.predict(x, verbose=0).argmax(axis=1) == y) > 0.9


@pytest.mark.slow
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


@pytest.mark.slow
def test_earlier_labels_outside_the_top_k_are_dropped(kit, problem, tmp_path):
    x, y = problem
    labels = kit.labels(y, store=tmp_path)
    stages = kit.stages(x, labels)
    model = kit.model()
    kit.fit(stages, model, (kit.stop_after(2),))
    report = stages.reports[1]
    _, new, priors = kit.draws[1]
    first = kit.draws[0][1]
    mean_k = ldp.RRWithPrior(3.0, kit.num_classes).optimal_k(priors).mean()
    k = max(1, round(mean_k))
    scores = kit.snapshots[1]  # logits after the last epoch of stage 1
    noisy = next(iter(kit.noisy.values())).values
    top = np.argsort(-scores[first], axis=1, kind="stable")[:, :k]
    kept = first[(top == noisy[:, np.newaxis]).any(axis=1)]
    # The record of the second stage, which a run that goes on reads.
    (record,) = (tmp_path / "stages").glob("*stage-2*.npz")
    np.testing.assert_array_equal(np.load(record)["kept"], kept)
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


@pytest.mark.slow
@pytest.mark.holds("training.MultiStageTraining")
def test_true_labels_enter_training_by_their_draws_alone(kit, problem):
    """A vault of other labels, with the same draws, trains the same weights."""
    x, y = problem
    model = kit.model()
    kit.fit(kit.stages(x, kit.labels(y, people="others")), model)
    drawn, randomize = dict(kit.noisy), ldp.PrivateLabels.randomize

    def same_draw(vault, *args, key):
        randomize(vault, *args, key=key)
        return drawn[key]

    kit.monkeypatch.setattr(ldp.PrivateLabels, "randomize", same_draw)
    other = kit.model()
    kit.fit(kit.stages(x, kit.labels((y + 1) % 4, people="these")), other)
    for got, expected in zip(other.get_weights(), model.get_weights(), strict=True):
        np.testing.assert_array_equal(got, expected)


@pytest.mark.slow
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


@pytest.mark.slow
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


@pytest.mark.slow
def test_the_defaults_are_those_that_did_best(kit, problem):
    """benchmarks/README.md: no filter, and a temperature of one half."""
    x, y = problem
    labels, by_default = kit.labels(y), {"fractions": (0.5, 0.5), "epochs_per_stage": 2}
    stages = ldp.MultiStageTraining(x, labels, epsilon=3.0, verbose=0, **by_default)
    kit.fit(stages, kit.model())
    assert (stages.reports[1].num_reused, stages.reports[1].num_dropped) == (120, 0)
    # The same settings have the same draws, at no further cost.
    kit.fit(kit.stages(x, labels, temperature=(0.5, 0.5)), kit.model())
    assert len(kit.draws) == 2 and labels.guarantee().epsilon == 3.0


@pytest.mark.slow
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


@pytest.mark.slow
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
    assert ldp.guarantee(other).headline == "no record of any label"
    other.set_weights(model.get_weights())
    assert ldp.guarantee(other).epsilon == 3.0
    noisy.save(tmp_path / "noisy")
    again = ldp.NoisyLabels.load(tmp_path / "noisy")
    np.testing.assert_array_equal(again.values, noisy.values)
    np.testing.assert_array_equal(again.indices, noisy.indices)
    assert again.guarantee() == noisy.guarantee()


@pytest.mark.slow
def test_noisy_labels_of_all_stages_have_the_channel_of_their_priors(kit, problem):
    """Also in the first stage, whose randomized response has a uniform prior."""
    x, y = problem
    stages = kit.stages(x, kit.labels(y))
    kit.fit(stages, kit.model())
    noisy = stages.noisy_labels()
    first, second = kit.noisy.values()
    found = noisy.posterior()
    uniform = ldp.estimation.posterior(ldp.RandomizedResponse(3.0, 4), first.values)
    np.testing.assert_allclose(found[: len(first)], uniform, rtol=1e-9)
    np.testing.assert_allclose(found[len(first) :], second.posterior(), rtol=1e-9)
    rows = np.asarray(noisy.priors)
    np.testing.assert_array_equal(rows[: len(first)], 0.25)
    np.testing.assert_array_equal(rows[len(first) :], kit.draws[1][2])


@pytest.mark.slow
def test_the_seed_of_stages_fixes_their_examples_alone(kit, problem):
    x, y = problem
    drawn = []
    for _ in range(2):
        stages = kit.stages(x, kit.labels(y, insecure_seed=None), seed=3, fractions=(0.9, 0.1))
        kit.fit(stages, kit.model())
        assert not stages.guarantee().seeded
        drawn.append(stages.noisy_labels())
    np.testing.assert_array_equal(drawn[0].indices, drawn[1].indices)
    # Equal draws have a probability of 0.76^240.
    assert np.any(drawn[0].values != drawn[1].values)


@pytest.mark.slow
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


@pytest.mark.slow
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


# Several outputs and weights.


def two_outputs(form):
    """A model with the output `kind`, of the classes, and another."""
    inputs = {"left": keras.Input((1,), name="left"), "right": keras.Input((1,), name="right")}
    joined = keras.layers.Concatenate()(list(inputs.values()))
    other = keras.layers.Dense(1, name="other")(joined)
    kind = keras.layers.Dense(4, name="kind")(joined)
    loss = keras.losses.CategoricalCrossentropy(from_logits=True)
    if form == "dict":
        model = keras.Model(inputs, {"other": other, "kind": kind})
        model.compile(keras.optimizers.Adam(0.05), loss={"kind": loss})
    else:
        model = keras.Model(inputs, [other, kind])
        model.compile(keras.optimizers.Adam(0.05), loss=[None, loss])
    return model


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Gradients do not exist")
@pytest.mark.parametrize("form", ["dict", "list"])
@pytest.mark.parametrize("weights", [{}, {"sample_weight": np.ones(240)}], ids=["", "weights"])
def test_stages_train_one_named_output_of_a_model_with_a_dict_of_inputs(
    kit, problem, form, weights
):
    x, y = problem
    arrays = {"left": x[:, :1], "right": x[:, 1:]}
    labels, model = kit.labels(y), two_outputs(form)
    stages = kit.stages(arrays, labels, output="kind", epsilon=3.0, epochs_per_stage=20, **weights)
    kit.fit(stages, model)
    outputs = model.predict(arrays, verbose=0)
    kind = outputs["kind"] if form == "dict" else outputs[1]
    # Randomized response keeps exp(3) / (exp(3) + 3) = 0.87 of the labels.
    assert np.mean(kind.argmax(axis=1) == y) > 0.9
    assert ldp.guarantee(model).epsilon == labels.guarantee().epsilon == 3.0
    assert ("[public-sample-weights]" in str(ldp.guarantee(model))) == bool(weights)
    assert [report.num_new for report in stages.reports] == [120, 120]


def test_a_named_output_needs_its_loss_alone(kit, problem):
    x, y = problem
    arrays = {"left": x[:, :1], "right": x[:, 1:]}
    labels = kit.labels(y)
    both = two_outputs("dict")
    both.compile("sgd", loss={"kind": "categorical_crossentropy", "other": "mse"})
    for output, model, message in (
        (None, two_outputs("dict"), "returns one tensor.*name one of several outputs in output="),
        ("kinds", two_outputs("list"), r"one of the outputs \['other', 'kind'\], got 'kinds'"),
        ("kind", both, "a loss for the output 'kind' alone.*got losses for"),
    ):
        with pytest.raises(ValueError, match=message):
            kit.fit(kit.stages(arrays, labels, output=output), model)


@pytest.mark.parametrize("mixup_alpha", [0.0, 4.0])
def test_weights_of_examples_and_of_noisy_classes_multiply(kit, problem, mixup_alpha):
    x, y = problem
    rng = np.random.default_rng(3)
    sample_weight = np.where(rng.uniform(size=240) < 0.2, 0.0, rng.uniform(size=240))
    labels = kit.labels(y)
    settings = {"fractions": (1.0,), "key": "same", "mixup_alpha": mixup_alpha}
    plain = kit.stages(x, labels, **settings)
    weighted = kit.stages(
        x, labels, sample_weight=sample_weight, class_weight={1: 3.0, 2: 0.0}, **settings
    )
    of_classes = np.array([1.0, 3.0, 0.0, 1.0])
    noisy = np.empty(240, np.int64)
    noisy_labels = [stages.dataset() for stages in (plain, weighted)]
    drawn = plain.noisy_labels()
    noisy[drawn.indices] = drawn.values
    assert labels.guarantee().epsilon == 3.0  # one draw: weights cost nothing
    expected = sample_weight * of_classes[noisy]
    found = np.zeros((240, 4))
    for (x_plain, y_plain), (rows, y_new, weights) in zip(
        *(dataset.as_numpy_iterator() for dataset in noisy_labels), strict=True
    ):
        np.testing.assert_array_equal(rows, x_plain)
        np.testing.assert_allclose(y_new.sum(axis=1), 1.0, rtol=1e-5)
        if not mixup_alpha:
            np.testing.assert_array_equal(y_new, y_plain)
            places = [int(np.flatnonzero((x == row).all(axis=1))[0]) for row in rows]
            np.testing.assert_allclose(weights, expected[places], rtol=1e-6)
        found[: len(rows)] += weights[:, None] * y_new
    # Mixing keeps the weight of each class in the sum of all losses.
    total = np.bincount(noisy, expected, minlength=4)
    np.testing.assert_allclose(found.sum(axis=0), total, rtol=1e-4)


def test_balanced_weights_come_from_the_noisy_labels_of_stage_1(kit, problem):
    x, y = problem
    few = np.where(y == 0, np.arange(240) % 12 // 4, y)  # class 0 is rare
    labels = kit.labels(few, budget=ldp.PrivacyBudget(epsilon=8.0))
    stages = kit.stages(x, labels, epsilon=6.0, fractions=(1.0,), class_weight="balanced")
    weights = {}
    for _, one_hot, weight in stages.dataset().as_numpy_iterator():
        weights |= dict(zip(one_hot.argmax(axis=1).tolist(), weight.tolist(), strict=True))
    # Randomized response changes about 2 of the 240 labels, and class 0 has 20.
    shares = np.bincount(few) / 240
    np.testing.assert_allclose([weights[c] for c in range(4)], 0.25 / shares, rtol=0.2)
    assert labels.guarantee().epsilon == 6.0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"class_weight": {4: 1.0}}, r"classes \[0, 1, 2, 3\], got \[4\]"),
        ({"class_weight": {1: -1.0}}, "class_weight"),
        ({"class_weight": "even"}, "class_weight as a dict of public numbers"),
        ({"sample_weight": np.ones(239)}, r"shape \(240,\)"),
    ],
)
def test_unsuitable_weights_are_refused_before_a_draw(kit, problem, change, message):
    x, y = problem
    labels = kit.labels(y)
    with pytest.raises(ValueError, match=message):
        kit.stages(x, labels, **change)
    assert labels.guarantee().epsilon == 0.0


@pytest.mark.slow
def test_the_receipts_of_weights_are_counted(kit, problem):
    x, y = problem
    earlier = kit.labels(y, people="others").randomize(ldp.RandomizedResponse(1.0, 4))
    labels, model = kit.labels(y, people="these"), kit.model()
    weights = ldp.accounting.PublicInput({1: 2.0}, earlier.receipts)
    kit.fit(kit.stages(x, labels, class_weight=weights), model)
    assert {receipt.id for receipt in earlier.receipts} <= {
        receipt.id for receipt in ldp.accounting.public_input(model).receipts
    }
