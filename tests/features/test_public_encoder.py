"""Encoders that were made elsewhere: features once, pixels in range, named in statements."""

from __future__ import annotations

import pickle

import keras
import numpy as np
import pandas as pd
import pytest
import tensorflow as tf
from keras import layers
from sklearn.base import clone
from sklearn.decomposition import PCA
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.pipeline import make_pipeline
from slow_cases import with_slow

import tf_labeldp as ldp
from tf_labeldp.features import NeighbourSmoothing, PublicEncoder, find_clusters
from tf_labeldp.heads import NoiseCluster
from tf_labeldp.plugins import TrainedModel

N = 60
RNG = np.random.default_rng(3)
Y = np.arange(N) % 2
IMAGES = (RNG.integers(0, 120, (N, 8, 8, 3)) + 130 * Y[:, None, None, None]).astype(np.uint8)
TEXTS = [("good fine " if y else "bad poor ") + f"word{i % 7} plot{i}" for i, y in enumerate(Y)]
DELTA = 1e-4


def network(*middle, shape=(8, 8, 3), name="small"):
    """Returns an encoder with other outputs for each image, and fixed weights."""
    start = keras.initializers.RandomNormal(seed=1)
    end = [layers.Flatten(), layers.Dense(5, kernel_initializer=start)]
    model = keras.Sequential([keras.Input(shape), *middle, *end], name=name)
    model.trainable = False
    return model


class Counted:
    """A function from images or texts to features, which counts the rows that it computes."""

    def __init__(self, last=10**9):
        self.rows, self.last = 0, last

    def __call__(self, rows):
        if self.rows + len(rows) > self.last:
            raise KeyboardInterrupt
        self.rows += len(rows)
        if isinstance(rows[0], str):
            return np.array([[row.count(word) for word in ("good", "word3", "o")] for row in rows])
        return np.asarray(rows, np.float64).reshape(len(rows), -1)[:, :6]


def labels_of(epsilon=9.0):
    return ldp.PrivateLabels(Y, 2, budget=ldp.PrivacyBudget(epsilon, DELTA), insecure_seed=0)


def head(encoder, **arguments):
    return ldp.PrivateLogisticRegression(5.0, DELTA, encoder=encoder, **arguments)


FITS = {
    "head": lambda encoder: head(encoder).fit(IMAGES, labels_of()).predict(IMAGES[:9]),
    "smoothing": lambda encoder: head(NeighbourSmoothing(encoder).fit(IMAGES)).fit(
        IMAGES, labels_of()
    ),
    "clusters": lambda encoder: NoiseCluster(3, 5.0, encoder=encoder).fit(IMAGES, labels_of()),
    "ridge on a data set": lambda encoder: ldp.PrivateRidge(5.0, DELTA, encoder=encoder).fit(
        tf.data.Dataset.from_tensor_slices(IMAGES).batch(16), labels_of()
    ),
    "priors": lambda encoder: labels_of().randomize(
        ldp.heads.HeadPriorRandomizer(5.0, DELTA, encoder=encoder), features=IMAGES
    ),
}


@pytest.mark.parametrize("way", FITS)
def test_each_row_is_encoded_once(way):
    counted = Counted()
    FITS[way](counted)
    assert counted.rows == N


def test_several_fits_share_the_features():
    counted = Counted()
    encoder = PublicEncoder(counted)
    for inputs in (IMAGES, IMAGES[::-1], IMAGES[10:30]):
        PublicEncoder.fit(encoder, inputs)
    expected = Counted()(IMAGES).astype(np.float32)
    np.testing.assert_array_equal(encoder.transform(IMAGES[5:9]), expected[5:9])
    assert counted.rows == N
    # Other rows are encoded, and not kept; those of a fit are kept in their place.
    assert encoder.transform(IMAGES[:2] + 1).shape == (2, 6) and counted.rows == N + 2
    mixed = encoder.transform(np.concatenate([IMAGES[:2], IMAGES[:1] + 1]))
    np.testing.assert_array_equal(mixed[:2], expected[:2])
    assert counted.rows == N + 3
    again = pickle.loads(pickle.dumps(encoder))
    np.testing.assert_array_equal(again.transform(IMAGES), expected)


@pytest.mark.parametrize("inputs", [IMAGES, TEXTS], ids=["images", "texts"])
def test_an_interrupted_run_continues_from_its_folder(inputs, tmp_path, monkeypatch):
    monkeypatch.setattr("tf_labeldp.features.public_encoder._BLOCK", 16)
    with pytest.raises(KeyboardInterrupt):
        PublicEncoder(Counted(40), cache_dir=tmp_path).fit(inputs)
    counted = Counted()
    found = PublicEncoder(counted, cache_dir=tmp_path).fit_transform(inputs)
    # Two blocks were stored, of which one row is compared.
    assert counted.rows == N - 32 + 1
    np.testing.assert_array_equal(found, Counted()(inputs).astype(np.float32))
    third = PublicEncoder(Counted(1), cache_dir=tmp_path).fit(inputs)
    np.testing.assert_array_equal(third.transform(inputs), found)

    class Other(Counted):
        def __call__(self, rows):
            return super().__call__(rows) + 1.0

    Other.__name__ = Counted.__name__
    with pytest.raises(ValueError, match=r"got those of another one\. Give each encoder its own"):
        PublicEncoder(Other(), cache_dir=tmp_path).fit(inputs)
    for file in tmp_path.glob("*/*.npz"):  # damaged files are computed again
        file.write_bytes(file.read_bytes()[:50])
    assert PublicEncoder(Counted(), cache_dir=tmp_path).fit(inputs).n_features_out_ == 6 - 3 * (
        inputs is TEXTS
    )


def test_a_clone_has_the_arguments_and_nothing_of_a_fit():
    encoder = PublicEncoder(network(), pixel_range=(0, 255)).fit(IMAGES)
    names = {"model", "size", "pixel_range", "weights", "cache_dir"}
    assert set(encoder.get_params(deep=False)) == names
    copy = clone(PublicEncoder(Counted(), size=8).fit(IMAGES))
    assert copy.get_params(deep=False).keys() == names and not hasattr(copy, "n_features_out_")


def test_arguments_that_were_set_count_in_the_next_fit():
    encoder = PublicEncoder(lambda rows: rows.reshape(N, -1)[:, :3]).fit(IMAGES)
    encoder.set_params(model=lambda rows: rows.reshape(N, -1)[:, 3:6]).fit(IMAGES)
    np.testing.assert_array_equal(encoder.transform(IMAGES), IMAGES.reshape(N, -1)[:, 3:6])
    pooled = [keras.Input((None, None, 3)), layers.Conv2D(4, 3), layers.GlobalMaxPooling2D()]
    encoder = PublicEncoder(keras.Sequential(pooled), size=4).fit(UNIT)
    small = encoder.transform(UNIT)
    assert not np.allclose(encoder.set_params(size=9).fit(UNIT).transform(UNIT), small)


def test_all_of_a_row_identifies_it():
    # The repr of a long array leaves out its middle.
    rows = np.empty(4, object)
    rows[:] = [np.insert(np.zeros(2000), 1000, value) for value in range(4)]
    largest = PublicEncoder(lambda rows: np.array([[row.max()] for row in rows])).fit(rows)
    np.testing.assert_array_equal(largest.transform(rows).ravel(), range(4))
    table = pd.DataFrame({"a": [1.0, 2.0], "b": [3.0, 4.0]})
    column = PublicEncoder(lambda table: table[["a"]].to_numpy()).fit(table)
    swapped = table.rename(columns={"a": "b", "b": "a"})
    np.testing.assert_array_equal(column.transform(swapped).ravel(), [3.0, 4.0])


def test_a_folder_holds_the_features_of_each_use_of_equal_weights(tmp_path):
    found = [
        PublicEncoder(network(pool(2)), cache_dir=tmp_path).fit_transform(UNIT)
        for pool in (layers.MaxPooling2D, layers.AveragePooling2D)
    ]
    assert not np.allclose(*found)


def test_a_folder_holds_the_features_of_each_model(tmp_path):
    first, second = network(), network()
    second.layers[-1].set_weights([2.0 * part for part in first.layers[-1].get_weights()])
    arguments = {"pixel_range": (0, 255), "cache_dir": tmp_path}
    one, two = (PublicEncoder(model, **arguments).fit(IMAGES) for model in (first, second))
    np.testing.assert_allclose(two.transform(IMAGES), 2.0 * one.transform(IMAGES), atol=0.01)
    assert len(list(tmp_path.iterdir())) == 2
    # Trained further in place, a model has other features in the next fit.
    kept = one.transform(IMAGES)
    first.layers[-1].set_weights([3.0 * part for part in first.layers[-1].get_weights()])
    np.testing.assert_allclose(one.fit_transform(IMAGES), 3.0 * kept, atol=0.01)


# Raw images, from which the exported model resizes and rescales.

UNIT = (IMAGES / 255.0).astype(np.float32)
RAW = {
    "uint8": (IMAGES, {"pixel_range": (0, 1)}, (8, 8, 3)),
    "floats to 1": (UNIT, {"pixel_range": (-1, 1)}, (8, 8, 3)),
    "another size": (IMAGES, {"pixel_range": (0, 255), "size": 12}, (12, 12, 3)),
    "grey": (IMAGES[..., :1], {"pixel_range": (0, 1)}, (8, 8, 3)),
    "grey without channel": (IMAGES[..., 0], {"pixel_range": (-1, 1)}, (8, 8, 1)),
    "preprocessing": (IMAGES, {"pixel_range": "ResNet50"}, (8, 8, 3)),
}


@pytest.mark.parametrize("case", RAW)
def test_the_exported_model_takes_raw_images(case, tmp_path):
    images, arguments, shape = RAW[case]
    encoder = PublicEncoder(network(shape=shape), **arguments)
    fitted = head(encoder).fit(images, labels_of())
    model = fitted.to_keras()
    if case in ("another size", "preprocessing"):
        model.save(tmp_path / "model.keras")
        model = keras.models.load_model(tmp_path / "model.keras")
    assert model.input_shape == (None, *images.shape[1:])
    expected = fitted.predict_proba(images)
    np.testing.assert_allclose(model.predict(images, verbose=0), expected, atol=1e-5)
    assert ldp.guarantee(model).epsilon == fitted.guarantee().epsilon
    assert named(model) == named(fitted) != []


@pytest.mark.slow
def test_pixels_are_rescaled_to_the_range_that_the_model_expects():
    identity = keras.Sequential([keras.Input((8, 8, 3)), layers.Flatten()])
    for images in (IMAGES, IMAGES.astype(np.float32), UNIT, 2.0 * UNIT - 1.0):
        for low, high in ((0, 255), (0, 1), (-1, 1)):
            found = PublicEncoder(identity, pixel_range=(low, high)).fit_transform(images)
            expected = low + (high - low) * UNIT.reshape(N, -1)
            np.testing.assert_allclose(found, expected, atol=1e-4 * (high - low))
    for name in ("ResNet50", "DenseNet121", "MobileNetV2"):
        module = {"ResNet50": "resnet50", "DenseNet121": "densenet", "MobileNetV2": "mobilenet_v2"}
        preprocess = getattr(keras.applications, module[name]).preprocess_input
        found = PublicEncoder(identity, pixel_range=name).fit_transform(UNIT)
        expected = preprocess(IMAGES.astype(np.float32)).reshape(N, -1)
        np.testing.assert_allclose(found, expected, atol=1e-3)


NAMED = network(name="mobilenetv2_1.00_8")
NORMALIZED = layers.Normalization(mean=[0.5, 0.5, 0.5], variance=[0.1, 0.1, 0.1])
OTHER_RANGE = {
    "255 into 1": (
        network(layers.Rescaling(2.0, -1.0)),
        IMAGES,
        r"0 to 1 .*got images of 0 to 255",
    ),
    "255 into standardized": (network(NORMALIZED), IMAGES, r"pixel_range=\(0, 1\)"),
    "1 into 255": (
        network(layers.Rescaling(1 / 127.5, -1)),
        UNIT,
        r"0 to 255 .*got images of 0 to 1",
    ),
    "standardized into 255": (
        network(layers.Rescaling(1 / 255.0)),
        3.0 * UNIT - 1.5,
        r"0 to 255 .*got -1.5 to 1.4\d+\. Give raw",
    ),
    "65535 into 255": (
        network(layers.Rescaling(1 / 255.0)),
        257 * IMAGES.astype(np.uint16),
        r"0 to 255 .*got \d+ to \d+\. Give raw",
    ),
    "255 into an application": (NAMED, IMAGES, "pixel_range='MobileNetV2'"),
    "1 into an application": (NAMED, UNIT, "keras.applications preprocesses them for MobileNetV2"),
    "255 into an unknown model": (
        network(),
        IMAGES,
        r"does not show it. Give PublicEncoder\(model",
    ),
}
SAME_RANGE = {
    "1": (network(layers.Rescaling(2.0, -1.0)), UNIT),
    "255": (network(layers.Rescaling(1 / 127.5, -1)), IMAGES),
    "255 in floats": (network(layers.Rescaling(1 / 255.0)), IMAGES.astype(np.float32)),
    "an application": (NAMED, 2.0 * UNIT - 1.0),
    "1 into an unknown model": (network(), UNIT),
    "standardized": (network(), 3.0 * UNIT - 1.5),
}


@pytest.mark.parametrize("case", OTHER_RANGE)
def test_pixels_in_another_range_are_refused(case):
    model, images, message = OTHER_RANGE[case]
    labels = labels_of()
    with pytest.raises(ValueError, match=message):
        head(model).fit(images, labels)
    assert labels.receipts == ()


@pytest.mark.parametrize("case", SAME_RANGE)
def test_pixels_in_the_range_pass_unchanged(case):
    model, images = SAME_RANGE[case]
    found = PublicEncoder(model).fit(images)
    assert found.to_keras() is model
    np.testing.assert_allclose(found.transform(images), model.predict(images, verbose=0), rtol=1e-4)


@pytest.mark.parametrize("pixel_range", [255, (0, 1, 2), (1, 0)])
def test_a_range_is_two_ends_in_order(pixel_range):
    with pytest.raises(ValueError, match=r"pixel_range as \(smallest, largest\)|below high"):
        PublicEncoder(network(), pixel_range=pixel_range).fit(IMAGES)


def test_outputs_in_bfloat16_are_read():
    model = keras.Sequential([keras.Input((8, 8, 3)), layers.Flatten(dtype="bfloat16")])
    found = PublicEncoder(model).fit_transform(UNIT)
    np.testing.assert_allclose(found, UNIT.reshape(N, -1), atol=0.01)


def test_resized_pixels_may_exceed_one():
    images = UNIT * (1.01 / UNIT.max())
    found = PublicEncoder(network(), pixel_range=(0, 1)).fit_transform(images)
    np.testing.assert_allclose(found, network().predict(images, verbose=0), rtol=1e-4)


OTHER_THAN_IN_FIT = {
    "range": (UNIT, "expected pixels of 0 to 255, as in fit, got 0"),
    "shape": (IMAGES[:, :6], r"\(n, 8, 8, 3\), as in fit, got \(60, 6, 8, 3\)"),
    "one image": (IMAGES[0], r"as in fit, got \(8, 8, 3\)\. Reshape"),
}


@pytest.mark.parametrize("case", OTHER_THAN_IN_FIT)
def test_images_of_another_range_or_shape_than_in_fit_are_refused(case):
    images, message = OTHER_THAN_IN_FIT[case]
    encoder = PublicEncoder(network(), pixel_range=(0, 1))
    fitted = head(encoder).fit(IMAGES, labels_of())
    with pytest.raises(ValueError, match=message):
        fitted.predict(images)
    # One encoder in two heads: the second must not change the features of the first.
    if images.ndim == 4:
        labels = labels_of()
        with pytest.raises(ValueError, match=r"as in the first fit .* Make another PublicEncoder"):
            head(encoder).fit(images, labels)
        assert labels.receipts == ()
    assert fitted.score(IMAGES, Y) > 0.9
    black = np.zeros((1, 8, 8, 3), np.float32)
    assert fitted.predict(np.concatenate([black, black + 1.0])).shape == (2,)


# Statements.


def named(result):
    """Returns the sentences about encoders in the statement of a result."""
    statement = ldp.guarantee(result) if isinstance(result, keras.Model) else result.guarantee()
    return [str(note) for note in statement.assumptions if note.code == "public-encoder"]


def test_statements_name_the_encoder_with_a_digest_of_its_weights():
    model = network(name="encoder_of_photos")
    fitted = head(model).fit(UNIT, labels_of())
    [sentence] = named(fitted)
    digest = fitted.encoder_.digest_
    assert f'"encoder_of_photos" (weights sha256 {digest[:32]})' in sentence
    assert "made without these labels, except for the uses counted here" in sentence
    kernel, bias = model.layers[-1].get_weights()
    model.layers[-1].set_weights([kernel, bias + 1e-3])
    [other] = named(head(model).fit(UNIT, labels_of()))
    assert other != sentence
    assert digest[:32] in str(fitted.guarantee())


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["function", "transformer"])
def test_statements_name_a_function_with_a_digest_of_its_outputs(kind):
    rows = UNIT.reshape(N, -1)

    def encoder_of(factor):
        if kind == "transformer":
            return PCA(3 + factor).fit(rows)
        return lambda x: factor * x[:, :4]

    first, again, other = (head(encoder_of(f)).fit(rows, labels_of()) for f in (1, 1, 2))
    assert named(first) == named(again) != named(other)
    assert f"outputs for {N} rows, sha256 {first.encoder_.digest_[:32]}" in named(first)[0]


def test_maps_of_this_library_are_not_named():
    assert (
        named(
            head(NeighbourSmoothing().fit(UNIT.reshape(N, -1))).fit(
                UNIT.reshape(N, -1), labels_of()
            )
        )
        == []
    )


@pytest.mark.parametrize("wrap", [lambda model: model, PublicEncoder, lambda model: model.predict])
def test_an_encoder_that_was_trained_on_these_labels_is_counted(wrap):
    labels = labels_of()
    drawn = labels.randomize(ldp.RandomizedResponse(2.0, 2))
    trained, other = network(), network()
    TrainedModel(trained).attach(drawn.receipts)
    fitted = head(wrap(trained), key="counted").fit(UNIT, labels)
    assert {receipt.id for receipt in drawn.receipts} < {r.id for r in fitted.receipts_}
    assert fitted.guarantee().epsilon > 6.0
    free = head(wrap(other), key="free").fit(UNIT, labels_of())
    assert free.guarantee().epsilon <= 5.0


# Kinds of encoders.


@pytest.mark.parametrize(
    "make",
    with_slow([list, tuple, np.array, pd.Series], [list, tuple, pd.Series]),
    ids=["list", "tuple", "array", "series"],
)
def test_texts(make):
    texts = make(TEXTS)
    for encoder in (
        TfidfVectorizer().fit(TEXTS),
        make_pipeline(TfidfVectorizer(), PCA(4)).fit(TEXTS),
        Counted(),
    ):
        fitted = head(encoder).fit(texts, labels_of())
        assert fitted.score(texts, Y) > 0.9


def test_a_model_of_texts():
    vectors = layers.TextVectorization(16, output_mode="tf_idf")
    vectors.adapt(TEXTS)
    model = keras.Sequential([keras.Input((1,), dtype="string"), vectors])
    assert head(model).fit(TEXTS, labels_of()).score(TEXTS, Y) > 0.9


def test_a_table_in_a_pipeline():
    from sklearn.compose import make_column_transformer
    from sklearn.preprocessing import OneHotEncoder

    table = pd.DataFrame({"job": np.where(Y, "cook", "smith"), "age": RNG.uniform(20, 60, N)})
    encoder = make_column_transformer((OneHotEncoder(), ["job"]), remainder="passthrough")
    fitted = head(encoder.fit(table)).fit(table, labels_of())
    assert fitted.score(table, Y) > 0.9


class Backbone(keras.Model):
    """Stands for the base class of KerasHub's backbones."""


class ImageBackbone(Backbone):
    def __init__(self):
        inputs = keras.Input((None, None, 3))
        super().__init__(inputs, layers.Conv2D(4, 3, kernel_initializer="glorot_normal")(inputs))


class TextBackbone(Backbone):
    def __init__(self):
        ids = keras.Input((None,), dtype="int32", name="token_ids")
        mask = keras.Input((None,), dtype="int32", name="padding_mask")
        rows = layers.Embedding(9, 4)(ids) * (keras.ops.cast(mask, "float32")[..., None] + 1.0)
        outputs = {"sequence_output": rows, "pooled_output": rows[:, 0]}
        super().__init__({"token_ids": ids, "padding_mask": mask}, outputs)


def test_the_outputs_of_a_backbone_are_averaged():
    model = ImageBackbone()
    found = PublicEncoder(model).fit_transform(UNIT)
    np.testing.assert_allclose(found, model.predict(UNIT, verbose=0).mean(axis=(1, 2)), atol=1e-5)
    ids = RNG.integers(0, 9, (N, 6)).astype(np.int32)
    inputs = {"token_ids": ids, "padding_mask": (np.arange(6) < 4) * np.ones((N, 1), np.int32)}
    text = TextBackbone()
    found = PublicEncoder(text).fit_transform(inputs)
    sequence = text.predict(inputs, verbose=0)["sequence_output"]
    np.testing.assert_allclose(found, sequence[:, :4].mean(axis=1), atol=1e-5)
    fitted = head(text).fit(inputs, labels_of())
    np.testing.assert_allclose(
        fitted.to_keras().predict(inputs, verbose=0), fitted.predict_proba(inputs), atol=1e-5
    )


@pytest.mark.slow
def test_a_name_of_keras_applications():
    encoder = PublicEncoder("MobileNet", weights=None, size=32).fit(IMAGES[:8])
    assert encoder.n_features_out_ == 1024
    model = encoder.to_keras()
    assert model.input_shape == (None, 8, 8, 3)
    assert {"resizing", "rescaling"} <= {layer.name for layer in model.layers}
    np.testing.assert_allclose(
        encoder.transform(UNIT[:8] * 255.0), encoder.transform(IMAGES[:8]), atol=1e-4
    )


# Bad input: (encoder, inputs, error, message); nothing is charged.

SEQUENCE = keras.Sequential([keras.Input((8, 8, 3)), layers.Reshape((8, 24))])
BAD = {
    "channels first": (
        lambda: PublicEncoder(network(), pixel_range=(0, 1)),
        IMAGES.transpose(0, 3, 1, 2),
        ValueError,
        r"expected images \(n, height, width, 3\).*got \(n, 3, 8, 8\). Move the channels last",
    ),
    "colour into grey": (
        lambda: network(shape=(8, 8, 1)),
        UNIT,
        ValueError,
        r"images.mean\(axis=-1, keepdims=True\)",
    ),
    "alpha": (
        lambda: network(),
        np.zeros((N, 8, 8, 4)),
        ValueError,
        r"alpha channel: images\[..., :3\]",
    ),
    "flat images": (
        network,
        UNIT.reshape(N, -1),
        ValueError,
        r"expected inputs of shape \(n, 8, 8, 3\).*Reshape",
    ),
    "another size by argument": (
        lambda: PublicEncoder(network(), size=9),
        UNIT,
        ValueError,
        r"expected size=\(8, 8\)",
    ),
    "constant": (
        lambda: lambda x: np.ones((len(x), 3)),
        UNIT,
        ValueError,
        "got equal rows for all 60",
    ),
    "sequence": (lambda: SEQUENCE, UNIT, ValueError, r"\(\d+, 8, 24\).*GlobalAveragePooling1D"),
    "map": (
        lambda: keras.Sequential([keras.Input((8, 8, 3)), layers.Conv2D(2, 3)]),
        UNIT,
        ValueError,
        r"average its map: keras.Sequential\(\[encoder, keras.layers.GlobalAveragePooling2D",
    ),
    "NaN": (
        lambda: lambda x: np.where(np.arange(len(x))[:, None] < 2, np.nan, x[:, 0, 0]),
        UNIT,
        ValueError,
        "the encoder's features must be finite, but 2 of 60 rows",
    ),
    "unknown name": (lambda: "EfficentNetB0", IMAGES, ValueError, "for example EfficientNetB0"),
    "lower case": (lambda: "resnet", IMAGES, ValueError, "expected the name of a model in keras"),
    "no network": (
        lambda: "MobileNetV2",
        IMAGES,
        OSError,
        "weights of MobileNetV2 on this machine",
    ),
    "unfitted": (
        TfidfVectorizer,
        TEXTS,
        ValueError,
        "expected a fitted transformer, got an unfitted",
    ),
    "texts into a network": (
        network,
        np.array(TEXTS),
        TypeError,
        "expected numbers for the encoder",
    ),
    "no encoder": (lambda: 3, UNIT, TypeError, "an encoder must be a fitted feature map.*got 3"),
    "a table of texts": (
        lambda: TfidfVectorizer().fit(TEXTS),
        pd.DataFrame({"text": TEXTS}),
        ValueError,
        r"return 60 rows .* got 1\. Give it a column, table\['text'\]",
    ),
    "a builder": (
        lambda: keras.applications.ResNet50,
        UNIT,
        TypeError,
        "got the function ResNet50, which builds one. Give its name",
    ),
    "no known range": (
        lambda: PublicEncoder(network(), pixel_range=(0, 1)),
        3.0 * UNIT - 1.5,
        ValueError,
        "to rescale",
    ),
    "unknown preprocessing": (
        lambda: PublicEncoder(network(), pixel_range="Net"),
        UNIT,
        ValueError,
        r"\(low, high\) or the name",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_refused_before_anything_is_charged(case, monkeypatch):
    def fetch(**arguments):
        raise Exception("URL fetch failure on https://storage.example: no route to host.")

    monkeypatch.setattr(keras.applications, "MobileNetV2", fetch)
    make, inputs, error, message = BAD[case]
    labels = labels_of()
    with pytest.raises(error, match=message):
        head(make()).fit(inputs, labels)
    classifier = ldp.PrivateClassifier(5.0, DELTA, encoder=make())
    with pytest.raises(error, match=message):
        classifier.fit(inputs, labels)
    assert labels.receipts == ()


def test_one_image_and_data_sets_that_are_not_batched_or_endless_are_refused():
    data = tf.data.Dataset.from_tensor_slices(UNIT)
    with pytest.raises(ValueError, match=r"got one of shape .*batch a data set"):
        PublicEncoder(network()).fit(data)
    with pytest.raises(ValueError, match="the data set is endless"):
        PublicEncoder(network()).fit(data.batch(9).repeat())
    with pytest.raises(ValueError, match=r"got one of shape \(8, 8, 3\)\. Reshape"):
        PublicEncoder(network()).fit(UNIT[0])
    classifier = ldp.PrivateClassifier(5.0, DELTA, encoder=network())
    with pytest.raises(TypeError, match=r"got a tf\.data\.Dataset"):
        classifier.fit(data.batch(9), labels_of())


def test_images_of_another_size_are_resized_with_a_warning():
    with pytest.warns(
        UserWarning, match="the images are 8 x 8 and the encoder 'small' takes 12 x 12"
    ):
        encoder = PublicEncoder(network(shape=(12, 12, 3))).fit(UNIT)
    resized = keras.ops.convert_to_numpy(layers.Resizing(12, 12)(UNIT))
    expected = encoder.model.predict(resized, verbose=0)
    np.testing.assert_allclose(encoder.transform(UNIT), expected, atol=1e-5)


def test_a_failed_fit_keeps_the_encoder():
    encoder = PublicEncoder(network()).fit(UNIT)
    expected, digest = encoder.transform(UNIT), encoder.digest_
    with pytest.raises(ValueError, match="does not show it"):
        encoder.fit(IMAGES)
    np.testing.assert_array_equal(encoder.transform(UNIT), expected)
    assert encoder.digest_ == digest


def test_clusters_of_an_encoder_assign_raw_images():
    clusters = find_clusters(UNIT, 3, encoder=network())
    np.testing.assert_array_equal(clusters.assign(UNIT), clusters.assignments)


def test_progress_is_shown(monkeypatch, capsys):
    from tf_labeldp._progress import Progress

    monkeypatch.setattr(Progress.__init__, "__kwdefaults__", {"delay": 0.0, "quiet": False})
    PublicEncoder(Counted()).fit(IMAGES)
    assert "Encoding" in capsys.readouterr().err
