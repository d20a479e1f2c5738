"""Tables as features of networks: matrices, named inputs, and an encoder for texts."""

from __future__ import annotations

import importlib.util

import keras
import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from slow_cases import with_slow

import tf_labeldp as ldp
from tf_labeldp.features import RandomFourierFeatures, TableCodes, to_inputs
from tf_labeldp.semi_supervised import DivideMix, FixMatch
from tf_labeldp.vault import Classes

N = 240
RNG = np.random.default_rng(0)
NUMBERS = pd.DataFrame({"age": RNG.normal(size=N), "weight": RNG.normal(size=N)})
TEXTS = NUMBERS.assign(job=RNG.choice(["cook", "nurse"], N))
Y = (NUMBERS["age"] > 0).to_numpy()
MATRIX = NUMBERS.to_numpy("float32")
FORMS = {
    "frame": NUMBERS,
    "nullable": NUMBERS.convert_dtypes(),
    "Arrow": pa.table(dict(NUMBERS)),
    "records": NUMBERS.to_dict("records"),
}
LOGITS = keras.losses.CategoricalCrossentropy(from_logits=True)


def labels_of(y=Y):
    budget = ldp.PrivacyBudget(4.0, 1e-5)
    return ldp.PrivateLabels(y, num_classes=2, budget=budget, insecure_seed=0)


def dense(width=2):
    keras.utils.set_random_seed(0)
    return keras.Sequential([keras.Input((width,)), keras.layers.Dense(2)])


def named():
    """Returns a model of two named inputs, which come in another order than the columns."""
    keras.utils.set_random_seed(0)
    inputs = {name: keras.Input((1,), name=name) for name in ("weight", "age")}
    return keras.Model(
        inputs, keras.layers.Dense(2)(keras.layers.Concatenate()([*inputs.values()]))
    )


def by_make_private(model, x, labels, **how):
    private, batches, callbacks = ldp.make_private(
        model, epsilon=2.0, x=x, labels=labels, epochs=1, batch_size=60, insecure_seed=0, **how
    )
    private.fit(batches, epochs=1, callbacks=callbacks, verbose=0)
    return model


def by_stages(model, x, labels, **how):
    stages = ldp.MultiStageTraining(
        x, labels, epsilon=2.0, fractions=(0.6, 0.4), epochs_per_stage=1, verbose=0, **how
    )
    model.compile("sgd", LOGITS)
    model.fit(stages.dataset(), epochs=2, callbacks=[stages], verbose=0)
    return model


def by_fit(model, x, labels, **how):
    model.compile("sgd", LOGITS)
    noisy = labels.randomize(ldp.RandomizedResponse(2.0, 2))
    ldp.fit(model, x, noisy, epochs=1, shuffle=False, verbose=0, **how)
    return model


def by_learner(kind, model, x, labels, **how):
    same = keras.layers.Identity()
    learner = kind(model, weak=same, strong=same)
    learner.compile("sgd", LOGITS)
    learner.fit(x, labels.randomize(ldp.RandomizedResponse(2.0, 2)), verbose=0, **how)
    return model


TRAINED = {"make_private": by_make_private, "stages": by_stages, "fit": by_fit}
LEARNERS = {
    "FixMatch": lambda *how: by_learner(FixMatch, *how),
    "DivideMix": lambda *how: by_learner(DivideMix, *how),
}


@pytest.mark.slow
@pytest.mark.parametrize("how", [*TRAINED, *LEARNERS])
@pytest.mark.filterwarnings("ignore")
def test_a_table_of_numbers_is_a_matrix(how):
    train = {**TRAINED, **LEARNERS}[how]
    expected = train(dense(), MATRIX, labels_of()).get_weights()
    assert np.any(expected[1] != 0.0)  # it was trained
    for form, table in FORMS.items():
        found = train(dense(), table, labels_of()).get_weights()
        for one, other in zip(found, expected, strict=True):
            np.testing.assert_allclose(one, other, atol=1e-6, err_msg=form)


@pytest.mark.slow
@pytest.mark.parametrize("how", TRAINED)
@pytest.mark.filterwarnings("ignore")
def test_an_encoder_maps_a_table_with_texts_and_missing_numbers(how):
    table = TEXTS.assign(age=TEXTS["age"].where(np.arange(N) % 7 > 0))
    earlier = ldp.PrivateLabels(Y, num_classes=2, budget=ldp.PrivacyBudget(1.0))
    noisy = earlier.randomize(ldp.RandomizedResponse(0.5, 2))
    public = ldp.accounting.public_input(noisy).with_value(table)
    encoder = RandomFourierFeatures(20).fit(public)
    width = encoder.n_features_out_
    found = TRAINED[how](dense(width), table, labels_of(), encoder=encoder)
    rows = ldp.accounting.public_input(encoder).with_value(encoder.transform(table))
    expected = TRAINED[how](dense(width), rows, labels_of())
    for one, other in zip(found.get_weights(), expected.get_weights(), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-6)
    # The encoder was made of labels, which the statement counts.
    [receipt] = encoder.receipts_
    receipts = ldp.accounting.public_input(found).receipts
    assert receipt.id in {each.id for each in receipts}


@pytest.mark.slow
@pytest.mark.parametrize("how", ["make_private", "fit"])
@pytest.mark.filterwarnings("ignore")
def test_a_model_with_named_inputs_takes_the_columns_by_name(how):
    expected = TRAINED[how](named(), to_inputs(NUMBERS, named()), labels_of()).get_weights()
    for table in (NUMBERS.assign(more=1.0), FORMS["records"]):
        found = TRAINED[how](named(), table, labels_of()).get_weights()
        np.testing.assert_allclose(found[0], expected[0], atol=1e-6)


@pytest.mark.parametrize("how", ["stages", "fit"])
@pytest.mark.filterwarnings("ignore")
def test_a_network_behind_an_exported_map_takes_texts(how):
    front = TableCodes().fit(TEXTS).to_keras()
    model = keras.Model(front.input, keras.layers.Dense(2)(front.output))
    before = model.get_weights()
    TRAINED[how](model, to_inputs(TEXTS, model), labels_of())
    assert np.any(model.get_weights()[-1] != before[-1])


@pytest.mark.parametrize("how", [*TRAINED, *LEARNERS, "poisson_batches"])
@pytest.mark.filterwarnings("ignore")
def test_texts_and_missing_numbers_need_an_encoder(how):
    def batches(model, x, labels):
        ldp.data.poisson_batches(x, labels, sampling_probability=0.5, steps=1)

    train = {**TRAINED, **LEARNERS, "poisson_batches": batches}[how]
    missing = NUMBERS.assign(age=np.nan)
    twice = pd.DataFrame(MATRIX, columns=["age", "age"])
    for table, error, message in [
        (TEXTS, TypeError, r"got text in column 'job'. Encode the table: encoder=.*RandomFourier"),
        (missing, ValueError, r"got missing or infinite ones in column 'age'. Encode the table"),
        (twice, ValueError, "got 'age' more than once"),
    ]:
        labels = labels_of()
        with pytest.raises(error, match=message):
            train(dense(table.shape[1]), table, labels)
        if how in ("make_private", "stages", "poisson_batches"):
            assert not labels.history()


def test_a_table_for_views_of_images_is_refused():
    for kind in (FixMatch, DivideMix):
        learner = kind(dense())
        learner.compile("sgd", LOGITS)
        noisy = labels_of().randomize(ldp.RandomizedResponse(2.0, 2))
        with pytest.raises(ValueError, match=r"got \(240, 2\). For rows of a table, give views"):
            learner.fit(NUMBERS, noisy, verbose=0)


def test_a_data_set_of_noisy_labels_takes_numbers_of_a_table():
    noisy = labels_of().randomize(ldp.RandomizedResponse(2.0, 2))
    x, _ = next(iter(noisy.to_dataset(NUMBERS).batch(N)))
    np.testing.assert_allclose(x, MATRIX, atol=1e-6)
    with pytest.raises(TypeError, match=r"got a DataFrame of several types.*to_inputs"):
        noisy.to_dataset(TEXTS)


WORDS = pd.DataFrame({"visit": ["good day", "bad night", "bad day", "good night"] * (N // 4)})


def of_texts(shape=(1,)):
    """Returns a model that splits texts into words itself; its input has Keras's own name."""
    words = keras.layers.TextVectorization(20, output_sequence_length=2)
    words.adapt(WORDS["visit"].to_numpy(str))
    inputs = keras.Input(shape, dtype="string")
    outputs = keras.layers.Flatten()(keras.layers.Embedding(20, 3)(words(inputs)))
    return keras.Model(inputs, keras.layers.Dense(2)(outputs))


@pytest.mark.parametrize("how", with_slow(TRAINED, {"make_private", "stages"}))
@pytest.mark.filterwarnings("ignore")
def test_a_model_that_splits_texts_is_trained_on_texts(how):
    texts = WORDS["visit"].to_numpy(str)
    forms = {"array": texts, "objects": WORDS[["visit"]].to_numpy(object), "frame": WORDS}
    # Stages have no model to read a table for; a private step takes a second to trace.
    of_how = {"make_private": ["frame"], "stages": ["array", "objects"]}
    forms = {form: forms[form] for form in of_how.get(how, forms)}
    for form, x in forms.items():
        model = of_texts(() if form == "array" else (1,))
        before = model.get_weights()
        TRAINED[how](model, x, labels_of())
        after = model.get_weights()
        assert all(np.any(old != new) for old, new in zip(before, after, strict=True)), form


def test_a_table_of_one_text_is_the_input_of_a_model_of_texts():
    for shape in ((1,), ()):
        model = of_texts(shape)
        inputs = to_inputs(WORDS, model)
        expected = model.predict(keras.ops.convert_to_tensor(WORDS.to_numpy(str)), verbose=0)
        np.testing.assert_array_equal(model.predict(inputs, verbose=0), expected)
    with pytest.raises(ValueError, match="the table lacks inputs of the model: 'keras_tensor"):
        to_inputs(WORDS.assign(other="x"), model)
    with pytest.raises(TypeError, match="model takes text in column 'visit', got numbers"):
        to_inputs({"visit": [1.0]}, model)


def test_entries_that_are_neither_numbers_nor_texts_are_no_features():
    x = np.array(["good", None] * (N // 2), object)
    with pytest.raises(TypeError, match="features must be numbers, got dtype object"):
        ldp.data.poisson_batches(x, labels_of(), sampling_probability=0.5, steps=1)
    labels = labels_of()
    with pytest.raises(TypeError, match=r"expected numbers for the input .* got texts"):
        by_make_private(dense(1), WORDS["visit"].to_numpy(str), labels)
    assert not labels.history()


TARGETS = ("posterior", "values", "make_private")


@pytest.mark.parametrize("targets", with_slow(TARGETS, {"posterior", "values"}))
@pytest.mark.filterwarnings("ignore")
def test_validation_labels_may_be_names(targets):
    names = np.array(["no", "yes"])[Y.astype(int)]
    budget = ldp.PrivacyBudget(4.0, 1e-5)
    labels = ldp.PrivateLabels(names, Classes(["no", "yes"]), budget=budget)
    found = []
    several = (names, list(names), pd.Series(names), Y.astype(int))
    for validation in several[:1] if targets == "make_private" else several:
        model = dense()
        rows = np.asarray(validation)
        if rows.dtype.kind == "i" and targets == "posterior":
            validation = np.eye(2)[rows]
        if targets == "make_private":
            private, batches, _ = ldp.make_private(
                model, epsilon=0.5, x=MATRIX, labels=labels, epochs=1, batch_size=60
            )
            fit = private.fit
            history = fit(batches, validation_data=(MATRIX, validation), verbose=0)
        else:
            kind = keras.losses.SparseCategoricalCrossentropy
            model.compile("sgd", LOGITS if targets == "posterior" else kind(from_logits=True))
            noisy = labels.randomize(ldp.RandomizedResponse(2.0, 2), key="draw")
            history = ldp.fit(
                model,
                NUMBERS,
                noisy,
                targets=targets,
                validation_data=(NUMBERS, validation),
                shuffle=False,
                verbose=0,
            )
        found += history.history["val_loss"]
    if targets != "make_private":
        assert found == [found[0]] * 4
    wrong = (MATRIX, np.full(N, "maybe"))
    with pytest.raises(ValueError, match="240 of 240 labels are not among the 2 classes"):
        if targets == "make_private":
            fit(batches, validation_data=wrong, verbose=0)
        else:
            ldp.fit(model, MATRIX, noisy, targets=targets, validation_data=wrong)


def test_tensorboard_without_its_package_is_named_before_any_charge(monkeypatch, tmp_path):
    find = importlib.util.find_spec

    def without(name, package=None):
        return None if name == "tensorboard" else find(name, package)

    monkeypatch.setattr(importlib.util, "find_spec", without)
    callbacks = [keras.callbacks.TensorBoard(tmp_path)]
    labels, model = labels_of(), dense()
    private, batches, _ = ldp.make_private(
        model, epsilon=2.0, x=MATRIX, labels=labels, epochs=1, batch_size=60
    )
    learner = DivideMix(dense(), weak=keras.layers.Identity(), strong=keras.layers.Identity())
    for fit in (
        lambda: private.fit(batches, callbacks=callbacks),
        lambda: by_fit(dense(), MATRIX, labels_of(), callbacks=callbacks),
        lambda: learner.fit(MATRIX, Y.astype(int), callbacks=callbacks),
    ):
        with pytest.raises(ImportError, match="pip install tensorboard"):
            fit()
    assert not labels.history()
