"""make_private: what it makes of a Keras model, what it costs, and what it refuses."""

from __future__ import annotations

import contextlib
import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_labeldp as ldp
from tf_labeldp.accounting import BudgetExceededError
from tf_labeldp.vault import LabelKind

N = 2000
RNG = np.random.default_rng(2)
X = RNG.normal(size=(N, 6)).astype("float32")
CLASSES = (X @ RNG.normal(size=(6, 3))).argmax(axis=1)
IMAGES = RNG.normal(size=(N, 6, 6, 2)).astype("float32")
layers = keras.layers


def vault(labels=CLASSES, epsilon=2.0, delta=1e-4, **arguments):
    kind = LabelKind.of(**(arguments or {"num_classes": 3}))
    return ldp.PrivateLabels(labels, kind, budget=ldp.PrivacyBudget(epsilon, delta))


def made(model, x=X, labels=None, epochs=4, **changes):
    labels = vault() if labels is None else labels
    settings = {"epsilon": 2.0, "batch_size": 400, "insecure_seed": 0, **changes}
    return ldp.make_private(model, x=x, labels=labels, epochs=epochs, **settings)


def perceptron(outputs=3, activation=None, inputs=(6,)):
    return keras.Sequential([keras.Input(inputs), layers.Dense(outputs, activation)])


def fitted(model, epochs=4, **arguments):
    private, batches, callbacks = made(model, epochs=epochs, **arguments)
    callbacks[0].verbose = 0
    private.fit(batches, epochs=epochs, callbacks=callbacks, verbose=0)
    return private


def test_a_delta_above_that_of_the_budget_is_a_warning():
    with pytest.warns(UserWarning, match=r"delta=0\.001 is above that of the budget, 0\.0001"):
        made(perceptron(), epsilon=1.0, delta=1e-3)


@pytest.mark.slow
@pytest.mark.holds("training.make_private")
def test_a_model_learns_at_its_epsilon_and_is_the_plain_model_afterwards():
    labels, plain = vault(), perceptron()
    private = fitted(plain, labels=labels, epochs=10)
    assert np.mean(plain.predict(X, verbose=0).argmax(axis=1) == CLASSES) > 0.85
    assert 1.9 < private.guarantee().epsilon <= 2.0 and labels.guarantee().epsilon <= 2.0
    assert ldp.guarantee(plain).epsilon == private.guarantee().epsilon  # as a plain model, too
    assert private.evaluate(X, CLASSES, verbose=0)[1] > 0.85
    optimizer = private.optimizer
    assert optimizer.preconditioner is not None
    assert float(optimizer.inner_optimizer.learning_rate) == pytest.approx(0.0, abs=1e-6)


@pytest.mark.slow
@pytest.mark.holds("training.make_private")
@pytest.mark.parametrize("machine", ["same", "other"])
def test_a_training_that_goes_on_after_a_kill_has_the_rest_of_its_plan(
    tmp_path, monkeypatch, machine
):
    class Kill(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            if epoch == 1:
                raise KeyboardInterrupt

    labels = vault(epsilon=3.0)
    for last in ([Kill()], []):
        backup = keras.callbacks.BackupAndRestore(tmp_path)
        private, batches, _ = made(perceptron(), labels=labels)
        with contextlib.suppress(KeyboardInterrupt):
            private.fit(batches, epochs=4, callbacks=[backup, *last], verbose=0)
        if machine == "other":
            # TensorFloat-32 on a GPU is one more assumption, and no other cost.
            monkeypatch.setattr(tf.config, "list_physical_devices", lambda kind=None: ["GPU"])
    assert 1.9 < labels.guarantee().epsilon <= 2.0


@pytest.mark.slow
@pytest.mark.holds("training.make_private")
def test_a_training_may_be_reserved():
    labels, share = vault(), 400 / N
    noise = ldp.accounting.calibrate_noise_multiplier(2.0, 1e-4, share, 4 * 5)
    epoch = ldp.accounting.dp_sgd_charge(noise, share, 5, 1e-4)
    with labels.reserve({"training": [epoch] * 4}):
        fitted(perceptron(), labels=labels)
    assert 1.9 < labels.guarantee().epsilon <= 2.0


def test_the_loss_of_classes_suits_the_outputs():
    for model, from_logits in ((perceptron(), True), (perceptron(3, "softmax"), False)):
        loss = made(model)[0].loss
        assert isinstance(loss, keras.losses.SparseCategoricalCrossentropy)
        assert loss.get_config()["from_logits"] is from_logits


@pytest.mark.slow
def test_one_output_for_two_classes_and_for_numbers():
    two = (CLASSES == 0).astype(int)
    private = fitted(perceptron(1), labels=vault(two, num_classes=2), epochs=50)
    scores = private.predict(X, verbose=0)[:, 0] > 0
    # 0.18 more than always answering the first class; fits differ by 0.01.
    assert np.mean(scores == two) > np.mean(two == 0) + 0.1
    assert isinstance(private.loss, keras.losses.BinaryCrossentropy)
    numbers = np.clip(X[:, 0], -1, 1)
    private = fitted(perceptron(1), labels=vault(numbers, low=-1.0, high=1.0), epochs=8)
    assert isinstance(private.loss, keras.losses.MeanSquaredError)
    assert private.optimizer.preconditioner is None and private.guarantee().epsilon <= 2.0


@pytest.mark.slow
def test_rows_of_labels_are_trained_with_one_output_for_each():
    rows = X[:, :2] > 0.0
    labels = vault(rows, num_labels=2)
    private = fitted(perceptron(2), labels=labels, epochs=40)
    assert isinstance(private.loss, keras.losses.BinaryCrossentropy) and private.loss.from_logits
    assert np.mean((private.predict(X, verbose=0) > 0.0) == rows) > 0.9
    assert 1.9 < labels.guarantee().epsilon <= 2.0


def test_the_loss_of_a_compiled_model_stays():
    model = perceptron(3, "softmax")
    loss = keras.losses.SparseCategoricalCrossentropy(ignore_class=7)
    model.compile("sgd", loss)
    assert made(model)[0].loss is loss


class SyncBatchNormalization(layers.BatchNormalization):
    """As a layer of another package that derives from Keras's."""


@pytest.mark.parametrize("of", [layers.BatchNormalization, SyncBatchNormalization])
def test_normalisation_over_the_batch_is_replaced_with_a_warning(of):
    inputs = keras.Input((6, 6, 2))
    hidden = of(name="mixes")(layers.Conv2D(12, 3)(inputs))
    kept = layers.Dense(3)
    model = keras.Model(inputs, kept(layers.Flatten()(hidden)))
    with pytest.warns(UserWarning, match=r"\['mixes'\] normalise over the batch.*freeze them"):
        private, _, _ = made(model, x=IMAGES)
    found = [type(one).__name__ for one in private.layers]
    assert "GroupNormalization" in found and "BatchNormalization" not in found
    group = next(one for one in private.layers if type(one).__name__ == "GroupNormalization")
    assert 12 % group.groups == 0
    assert any(one is kept for one in private.layers)  # with its weights
    frozen = layers.BatchNormalization(trainable=False)
    model = keras.Sequential([keras.Input((6,)), frozen, layers.Dense(3)])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert any(one is frozen for one in made(model)[0].layers)


STATISTICS = (1.5, 0.5, 0.1, 2.0)


def pretrained(norm):
    """Returns a model behind an encoder whose normalisation has statistics of its own."""
    encoder = keras.Sequential([keras.Input((6,)), layers.Dense(8), norm, layers.ReLU()])
    norm.set_weights([np.full(8, value) for value in STATISTICS])
    return keras.Sequential([keras.Input((6,)), encoder, layers.Dense(3)])


@pytest.mark.slow
def test_a_frozen_normalisation_inside_a_pretrained_model_keeps_its_statistics():
    norm = layers.BatchNormalization(trainable=False)
    model = pretrained(norm)
    model.layers[0].layers[0].enable_lora(2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # each layer has an exact rule
        private = fitted(model, epochs=1)
    assert private.guarantee().epsilon <= 2.0
    np.testing.assert_array_equal(
        [w[0] for w in norm.get_weights()], np.float32([1.5, 0.5, 0.1, 2])
    )
    assert len(private.trainable_variables) == 5  # two of the adapter, its bias, the last layer


@pytest.mark.slow
def test_the_file_of_a_model_with_adapters_has_its_statement(tmp_path):
    # Keras saves the sum of kernel and adapters, which is no weight of the trained model.
    model = pretrained(layers.BatchNormalization(trainable=False))
    adapted = model.layers[0].layers[0]
    adapted.enable_lora(2)
    private = fitted(model, epochs=1)
    private.save(tmp_path / "model.keras")
    loaded = ldp.load_model(tmp_path / "model.keras")
    assert ldp.guarantee(loaded).epsilon == private.guarantee().epsilon
    rows = np.eye(6, dtype=np.float32)
    np.testing.assert_allclose(loaded(rows), private(rows), atol=1e-5)
    adapted.lora_kernel_b.assign(adapted.lora_kernel_b + 1.0)
    private.save(tmp_path / "changed.keras")
    assert np.isinf(ldp.guarantee(tmp_path / "changed.keras").epsilon)


def test_a_normalisation_inside_a_pretrained_model_is_refused_with_what_to_do():
    labels = vault()
    with pytest.raises(ValueError, match=r"'norm'.*may stay if it is frozen \(trainable=False\)"):
        made(pretrained(layers.BatchNormalization(name="norm")), labels=labels)
    assert not labels.history()


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"labels": CLASSES}, TypeError, "must be a PrivateLabels, got ndarray"),
        ({"labels": vault(delta=0.0)}, ValueError, "delta above zero, got 0"),
        ({"labels": vault(epsilon=1.0)}, BudgetExceededError, "over the budget"),
        ({"batch_size": 2001}, ValueError, "batch_size must be at most"),
        ({"x": X[:5]}, ValueError, "5"),
    ],
)
def test_bad_input_charges_nothing(change, error, message):
    labels = change.get("labels", vault())
    with pytest.raises(error, match=message):
        made(perceptron(), **{"labels": labels, **change})
    if isinstance(labels, ldp.PrivateLabels):
        assert not labels.history()


@pytest.mark.slow
def test_few_examples_are_enough():
    labels = vault(CLASSES[:20])
    private, batches, _ = made(perceptron(), x=X[:20], labels=labels, epochs=1, batch_size=5)
    private.fit(batches, epochs=1, verbose=0)
    assert private.guarantee().epsilon <= 2.0


@pytest.mark.slow
def test_a_model_of_a_dict_keeps_it_as_a_plain_model_in_a_file_and_in_an_export(tmp_path):
    inputs = {"a": keras.Input((6,), name="a"), "b": keras.Input((2,), name="b")}
    joined = layers.BatchNormalization()(layers.Concatenate()(list(inputs.values())))
    x = {"a": X, "b": X[:, :2]}
    with pytest.warns(UserWarning, match="GroupNormalization"):
        private, batches, _ = made(keras.Model(inputs, layers.Dense(3)(joined)), x=x)
    private.fit(batches, verbose=0)
    private.save(tmp_path / "model.keras")
    expected = private.predict(x, verbose=0)
    plain = keras.Model(private.input, private.output)
    for number, model in enumerate((private, plain, ldp.load_model(tmp_path / "model.keras"))):
        assert set(model.input) == {"a", "b"}
        np.testing.assert_allclose(model.predict(x, verbose=0), expected, atol=1e-5)
        model.export(tmp_path / str(number), verbose=False)
        served = tf.saved_model.load(tmp_path / str(number))
        tensors = {name: tf.constant(part) for name, part in x.items()}
        np.testing.assert_allclose(served.serve(tensors), expected, atol=1e-5)
        [found] = served.signatures["serving_default"](**tensors).values()
        np.testing.assert_allclose(found, expected, atol=1e-5)


TWO = (X[:, 0] > 0).astype(int)


def two_headed(loss=None, weights=None):
    inputs = keras.Input((6,))
    heads = {"kind": layers.Dense(3, name="kind")(inputs), "up": layers.Dense(1, name="up")(inputs)}
    model = keras.Model(inputs, heads)
    if loss is not None:
        model.compile("sgd", loss, loss_weights=weights)
    return model


@pytest.mark.slow
@pytest.mark.holds("training.make_private")
def test_several_outputs_at_one_epsilon():
    labels = {"kind": vault(), "up": vault(TWO, num_classes=2)}
    private = fitted(two_headed(), labels=labels, epochs=30, class_weight={"up": {1: 1.0}})
    assert 1.9 < private.guarantee().epsilon <= 2.0
    assert all(1.9 < one.guarantee().epsilon <= 2.0 for one in labels.values())
    scores = private.evaluate(X, {"kind": CLASSES, "up": TWO}, return_dict=True, verbose=0)
    assert scores["kind_accuracy"] > 0.7
    found = private.predict(X, verbose=0)
    assert np.mean(found["kind"].argmax(axis=1) == CLASSES) > 0.7
    assert np.mean((found["up"][:, 0] > 0) == TWO) > 0.7


def test_losses_and_their_weights_of_a_compiled_model_with_several_outputs_stay():
    losses = {"kind": "sparse_categorical_crossentropy", "up": "mse"}
    heads = two_headed()
    softmax = keras.Model(
        heads.input, {"kind": layers.Softmax()(heads.output["kind"]), "up": heads.output["up"]}
    )
    softmax.compile("sgd", losses, loss_weights={"kind": 1.0, "up": 0.5})
    labels = {"kind": vault(), "up": vault(X[:, 0].clip(-1, 1), low=-1, high=1)}
    private = made(softmax, labels=labels)[0]
    assert private.get_compile_config()["loss_weights"] == {"kind": 1.0, "up": 0.5}
    assert private.loss == losses
    rows = vault(X[:, :2] > 0.0, num_labels=2)
    inputs = keras.Input((6,))
    model = keras.Model(inputs, [layers.Dense(1, name=name)(inputs) for name in "ab"])
    private, batches, _ = made(model, labels=rows, columns=[1, 0])
    private.fit(batches, verbose=0)
    assert rows.guarantee().epsilon < 2.0 == rows.budget.epsilon


def regularized():
    layer = layers.Dense(3, activity_regularizer="l2")
    return keras.Sequential([keras.Input((6,)), layer])


def mixing():
    return keras.Sequential([keras.Input((6,)), layers.SpectralNormalization(layers.Dense(3))])


def compiled(loss, outputs=3):
    model = perceptron(outputs)
    model.compile("sgd", loss)
    return model


SPARSE = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


@pytest.mark.parametrize(
    ("model", "change", "message"),
    [
        (lambda: perceptron(2), {}, "labels have 3 classes, but the model has 2 outputs"),
        (lambda: perceptron(1), {}, "labels of two classes for the loss 'binary_crossentropy'"),
        (lambda: compiled("mse"), {}, "a loss of class codes.*got a loss of one-hot rows"),
        (mixing, {}, "mix the examples of a batch"),
        (regularized, {}, "activity regularizers"),
        (perceptron, {"x": X[:, :4]}, r"features of shape \(6,\) per example.*got \(4,\)"),
        (perceptron, {"class_weight": "balanced"}, "counts of private labels are a release"),
        (perceptron, {"class_weight": {5: 1.0}}, "class_weight for the classes"),
        (perceptron, {"sample_weight": -np.ones(N)}, "finite numbers, at least zero"),
        (two_headed, {}, r"expected labels for the outputs \['kind', 'up'\]"),
        (
            lambda: compiled(SPARSE),
            {"kind": {"low": 0.0, "high": 2.0}},
            r"loss of numbers in \[0, 2\], got 'sparse_categorical_crossentropy'",
        ),
        (lambda: compiled("mse"), {"kind": {"low": 0.0, "high": 2.0}}, "one unit for labels that"),
    ],
    ids=range(12),
)
def test_what_fit_would_refuse_is_refused_at_once(model, change, message):
    labels = vault(**change.pop("kind", {}))
    with pytest.raises(ValueError, match=message):
        made(model(), labels=labels, **change)
    assert not labels.history()


def test_features_of_another_structure_and_an_input_over_the_budget_are_refused_at_once():
    inputs = {"a": keras.Input((6,), name="a"), "b": keras.Input((2,), name="b")}
    model = keras.Model(inputs, layers.Dense(3)(layers.Concatenate()(list(inputs.values()))))
    for x in (X, {"a": X}, {"a": X, "b": X}):
        with pytest.raises(ValueError, match="expected features of shape"):
            made(model, x=x)
    labels = vault(epsilon=2.5)
    trained = perceptron()
    trained.compile("sgd", SPARSE)
    noisy = labels.randomize(ldp.RandomizedResponse(1.0, 3))
    ldp.fit(trained, X, noisy, targets="values", verbose=0)
    with pytest.raises(BudgetExceededError):
        made(trained, labels=vault())


@pytest.mark.slow
def test_a_data_set_of_features_that_are_augmented():
    dataset = tf.data.Dataset.from_tensor_slices({"a": X, "b": X[:, :2]})

    def model():
        inputs = {"a": keras.Input((6,), name="a"), "b": keras.Input((2,), name="b")}
        return keras.Model(inputs, layers.Dense(3)(layers.Concatenate()(list(inputs.values()))))

    for data in (dataset, dataset.batch(300)):
        private, batches, _ = made(model(), x=data, epochs=2)
        noise = batches.map(lambda x: {**x, "b": x["b"] + tf.random.normal(tf.shape(x["b"]))})
        private.fit(noise, epochs=2, verbose=0)
        assert 1.9 < private.guarantee().epsilon <= 2.0
    with pytest.raises(ValueError, match=r"expected 2000 examples.* data set of 1800 in 6 batches"):
        made(model(), x=dataset.batch(300).take(6))


def test_a_fit_beyond_the_planned_epochs_says_so_before_the_first(recwarn):
    settings = {"labels": vault(epsilon=20.0), "epochs": 2, "insecure_seed": None}
    private, batches, _ = made(perceptron(), **settings)
    seen = []
    see = keras.callbacks.LambdaCallback(
        on_train_batch_begin=lambda batch, logs: seen.append(len(recwarn))
    )

    def fit(epochs):
        seen.clear()
        before = len(recwarn)
        private.fit(batches, epochs=epochs, callbacks=[see], verbose=0)
        assert seen[0] == len(recwarn)
        return [str(warning.message) for warning in recwarn.list[before:]]

    assert fit(1) == []
    (text,) = fit(3)
    assert "at most 1 epoch more of the 2 that make_private planned for epsilon 2" in text
    assert "got a fit of 3: together they cost epsilon 2.962" in text and "epochs=1" in text
    assert private.guarantee().epsilon == pytest.approx(2.962, abs=5e-4)
    (text,) = fit(1)
    assert "the 2 epochs that make_private planned for epsilon 2 are taken" in text
