"""The one reader of public inputs: every kind gives the same rows to every part that reads them."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import tensorflow as tf
from scipy import sparse

from tf_labeldp.features import (
    NeighbourSmoothing,
    PatchDictionary,
    RandomFourierFeatures,
    TableCodes,
    find_clusters,
)
from tf_labeldp.heads import NoiseCluster, PrivateRidge
from tf_labeldp.plugins import FeatureRows

N = 45
RNG = np.random.default_rng(7)
Y = np.arange(N) % 3
X = (3.0 * np.eye(4)[Y] + RNG.normal(size=(N, 4))).astype(np.float32)
X[X < 0.5] = 0.0
X[:, 0] += 0.1  # no row of zeros
NAMES = ("d", "c", "b", "a")  # not in alphabetical order, which tf.data might prefer


def structured(names=NAMES, x=X):
    table = np.empty(len(x), [(name, x.dtype) for name in names])
    for place, name in enumerate(names):
        table[name] = x[:, place]
    return table


def columns(x=X):
    return dict(zip(NAMES, x.T, strict=True))


def frame(x=X):
    return pd.DataFrame(x, columns=list(NAMES))


def dataset(inputs, labels=None):
    pairs = inputs if labels is None else (inputs, labels)
    return tf.data.Dataset.from_tensor_slices(pairs).batch(8)


KINDS = {
    "list of arrays": lambda: list(X),
    "doubles in columns": lambda: np.asfortranarray(X, np.float64),
    "tensor": lambda: tf.constant(X),
    "frame of kinds of numbers": lambda: frame().astype({"c": np.float64}),
    "arrow table": lambda: pa.table(columns()),
    "structured array": structured,
    "dict of columns": columns,
    "dict of matrices": lambda: {"x": X[:, :3], "y": X[:, 3:]},
    "tuple of sparse and dense": lambda: (sparse.csr_array(X[:, :2]), X[:, 2:]),
    "csc array": lambda: sparse.csc_array(X),
    "coo matrix": lambda: sparse.coo_matrix(X),
    "data set": lambda: dataset(X),
    "data set of columns": lambda: dataset(columns()),
    "data set of pairs": lambda: dataset(X, Y),
}


def of_head(inputs):
    head = PrivateRidge(50.0, 1e-4, num_classes=3, insecure_seed=0).fit(inputs, Y)
    return head.predict_proba(inputs)


READERS = {
    "clusters": lambda inputs: np.eye(6)[find_clusters(inputs, 6).assign(inputs)],
    "smoothing": lambda inputs: NeighbourSmoothing(num_neighbours=3).fit(inputs).transform(inputs),
    "fourier": lambda inputs: RandomFourierFeatures(8).fit(inputs).transform(inputs),
    "head": of_head,
}


def test_every_kind_gives_the_same_rows():
    for kind, make in KINDS.items():
        np.testing.assert_allclose(FeatureRows(make()).array(), X, err_msg=kind)
        np.testing.assert_allclose(np.concatenate(list(FeatureRows(make()).blocks())), X)


def test_sparse_and_dense_parts_are_read_by_row_number():
    places = np.array([7, 0, 7])
    left, right = FeatureRows((sparse.csr_array(X[:, :2]), X[:, 2:])).by_number()
    np.testing.assert_array_equal(left.take(places), X[places, :2])
    np.testing.assert_array_equal(right.take(places), X[places, 2:])
    assert left.array is None and right.array is not None and len(left) == len(right) == N


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.usefixtures("fits_apart")
def test_what_reads_features_takes_every_kind(reader):
    expected = READERS[reader](X)
    for kind in ("arrow table", "csc array", "data set of columns"):
        np.testing.assert_allclose(READERS[reader](KINDS[kind]()), expected, atol=2e-4)


@pytest.mark.parametrize("kind", ["structured array", "coo matrix", "data set of pairs"])
def test_fits_on_the_same_rows_are_added_up_whatever_their_kind(kind):
    PrivateRidge(1.0, 1e-4, num_classes=3).fit(X, Y)
    head = NoiseCluster(3, 1.0, num_classes=3)
    with pytest.warns(UserWarning, match="fit number 2 on rows"):
        head.fit(KINDS[kind](), Y)
    assert 1.5 < head.guarantee(1e-4).epsilon <= 2.0


@pytest.mark.parametrize("kind", [list, lambda x: dataset(x, np.zeros(len(x)))])
def test_images_of_every_kind(kind):
    images = RNG.random((20, 8, 8)).astype(np.float32)
    maps = [PatchDictionary(4, 3, pooling=2) for _ in range(2)]
    expected, found = (
        one.fit_transform(x) for one, x in zip(maps, (images, kind(images)), strict=True)
    )
    np.testing.assert_array_equal(found, expected)


def test_columns_of_other_kinds_of_numbers():
    table = pd.DataFrame({"x": [True, False, True], "y": [3, 4, 5]})
    assert np.asarray(table).dtype == object
    np.testing.assert_array_equal(FeatureRows(table).array(), [[1, 3], [0, 4], [1, 5]])


def test_an_encoder_may_take_and_give_sparse_matrices():
    class Scaler:
        def transform(self, x):
            return sparse.csr_matrix(2.0 * x)

    for inputs in (X, sparse.csr_matrix(X), frame()):
        np.testing.assert_allclose(FeatureRows(inputs, Scaler()).array(), 2.0 * X)


FITTED = {
    "clusters": (lambda x: find_clusters(x, 3), "assign"),
    "smoothing": (lambda x: NeighbourSmoothing(num_neighbours=3).fit(x), "transform"),
    "head": (lambda x: PrivateRidge(9.0, 1e-4, num_classes=3).fit(x, Y), "predict"),
    "NoiseCluster": (lambda x: NoiseCluster(3, 9.0, num_classes=3).fit(x, Y), "predict"),
}


@pytest.mark.parametrize("part", FITTED)
@pytest.mark.usefixtures("fits_apart")
def test_columns_must_be_those_of_fit_in_their_order(part):
    fit, method = FITTED[part]
    for make in (frame, lambda: dataset(columns())):
        use = getattr(fit(make()), method)
        expected = use(make())
        np.testing.assert_allclose(use(X), expected)  # without names, as they come
        for other in (frame()[["a", "b", "c", "d"]], structured(NAMES[::-1], X[:, ::-1])):
            with pytest.raises(ValueError, match=r"another order than in fit: .*got \['a', 'b', "):
                use(other)
        renamed = frame().rename(columns={"b": "e"})
        with pytest.raises(ValueError, match="lack 'b' and have 'e', which fit did not have"):
            use(renamed)
    use = getattr(fit(X), method)
    assert len(use(frame())) == N  # fit saw no names


def test_a_map_that_asks_for_columns_by_name_takes_them_in_any_order():
    one = RandomFourierFeatures(8).fit(frame())
    head = PrivateRidge(9.0, 1e-4, num_classes=3, encoder=one).fit(frame(), Y)
    other = frame()[["a", "b", "c", "d"]].assign(more=1.0)
    np.testing.assert_array_equal(one.transform(other), one.transform(frame()))
    np.testing.assert_array_equal(head.predict_proba(other), head.predict_proba(frame()))


def test_a_function_as_encoder_gets_the_columns_of_fit():
    head = PrivateRidge(9.0, 1e-4, num_classes=3, encoder=lambda table: table.to_numpy())
    head.fit(frame(), Y)
    with pytest.raises(ValueError, match="another order than in fit"):
        head.predict(frame()[["a", "b", "c", "d"]])


NOT_FINITE = np.where(np.arange(4 * N).reshape(N, 4) == 9, np.inf, X)
ENDLESS = dataset(X).repeat()
SHUFFLED = tf.data.Dataset.from_tensor_slices(X).shuffle(N, seed=1).batch(8)
READ_BY_ROW = {
    "clusters": lambda inputs, **how: find_clusters(inputs, 3, **how),
    "smoothing": lambda inputs, **how: NeighbourSmoothing(**how).fit(inputs),
    "head": lambda inputs, **how: PrivateRidge(1.0, 1e-4, num_classes=3, **how).fit(inputs, Y),
}


class FeatureMap:
    def transform(self, x):
        return x


BAD = {
    "vector": (X[:, 0], {}, ValueError, r"shape \(n, d\), got \(45,\). Reshape your data: x\[np"),
    "nothing": (None, {}, TypeError, "features must be an array, a list .* got NoneType"),
    "text": ("x.npy", {}, TypeError, "got str"),
    "words": ([["a", "b"]] * N, {}, TypeError, "features must be numbers, got dtype <U1"),
    "column of words": (
        {"a": X[:, 0], "b": ["a"] * N},
        {},
        TypeError,
        "text in column 'b'. Encode",
    ),
    "no rows": (X[:0], {}, ValueError, "features hold no rows"),
    "no batches": (dataset(X[:0]), {}, ValueError, "features hold no rows"),
    "uneven parts": ((X, X[1:]), {}, ValueError, r"same length, got lengths \[44, 45\]"),
    "tuple of vectors": (tuple(X), {}, ValueError, "tuple of 45 vectors.*np.stack"),
    "endless": (ENDLESS, {}, ValueError, "is endless.*repeat"),
    "shuffled": (SHUFFLED, {}, ValueError, "must not be shuffled"),
    "not in batches": (dataset(X).unbatch(), {}, ValueError, "; batch a data set"),
    "three parts": (dataset((X, Y, Y)), {}, ValueError, "got 3 parts"),
    "not finite": (NOT_FINITE, {}, ValueError, "must be finite, but 1"),
    "encoder": (X, {"encoder": 3}, TypeError, "an encoder must be a fitted feature map.*got 3"),
    "class": (X, {"encoder": FeatureMap}, TypeError, "got the class FeatureMap"),
    "encoder of no rows": (X[:0], {"encoder": np.abs}, ValueError, "features hold no rows"),
    "encoder's shape": (
        X,
        {"encoder": lambda x: x[:, np.newaxis]},
        ValueError,
        r"numbers of shape \(m, d\), got an array of shape \(\d+, 1, 4\).*Flatten",
    ),
    "encoder's kind": (
        X,
        {"encoder": lambda x: x.astype(str)},
        ValueError,
        r"numbers of shape \(m, d\), .* dtype <U",
    ),
    "encoder's rows": (
        X,
        {"encoder": lambda x: np.concatenate([x, x])},
        ValueError,
        r"must return \d+ rows .* got \d+",
    ),
}


@pytest.mark.parametrize("table", [columns, frame, structured])
def test_a_map_of_this_library_gets_tables_in_blocks(table):
    sizes = []

    class Map(RandomFourierFeatures):
        def transform(self, table):
            sizes.append(len(next(iter(FeatureRows(table).table().values()))))
            return super().transform(table)

    x = RNG.normal(size=(10_000, 4)).astype(np.float32)
    encoder = Map(20).fit(columns(x))
    inputs = table(x=x)
    rows = np.concatenate(list(FeatureRows(inputs, encoder).blocks()))
    assert max(sizes) == 4096
    np.testing.assert_allclose(rows, encoder.transform(inputs), atol=1e-6)


def test_columns_of_one_name_are_refused_by_name():
    twice = pd.DataFrame(X, columns=["a", "b", "a", "c"])
    arrow = pa.table([X[:, 0], X[:, 1]], names=["b", "b"])
    for table, name in ((twice, "'a'"), (arrow, "'b'")):
        for read in (lambda table: FeatureRows(table).table(), FeatureRows):
            with pytest.raises(ValueError, match=f"got {name} more than once. Rename or drop"):
                read(table)


def test_bad_input():
    for inputs, settings, error, message in BAD.values():
        with pytest.raises(error, match=message):
            FeatureRows(inputs, **settings).array()


@pytest.mark.parametrize("reader", READ_BY_ROW)
def test_bad_input_is_refused_in_the_same_words(reader):
    for case in ("vector", "uneven parts", "shuffled", "not finite", "encoder's rows"):
        inputs, settings, error, message = BAD[case]
        with pytest.raises(error, match=message):
            READ_BY_ROW[reader](inputs, **settings)


def test_images_are_flattened_where_k_means_reads_them_and_refused_elsewhere():
    images = X.reshape(N, 2, 2)
    assert find_clusters(images, 3).centres.shape == (3, 4)
    for reader in set(READ_BY_ROW) - {"clusters"}:
        with pytest.raises(ValueError, match="Flatten images"):
            READ_BY_ROW[reader](images)


def test_a_data_set_whose_later_batches_are_shuffled_is_refused():
    tf = pytest.importorskip("tensorflow")
    x = np.random.default_rng(0).normal(size=(300, 4)).astype(np.float32)
    whole = tf.data.Dataset.from_tensor_slices(x).batch(10)
    shuffled = whole.take(1).concatenate(whole.skip(1).shuffle(29))
    with pytest.raises(ValueError, match="same order on each reading"):
        FeatureRows(shuffled).joined()
    np.testing.assert_array_equal(FeatureRows(whole).joined(), x)


def test_a_tuple_of_vectors_is_no_table():
    x = np.random.default_rng(0).normal(size=(30, 4))
    with pytest.raises(ValueError, match="may be rows or columns"):
        FeatureRows(tuple(x)).table()


@pytest.mark.slow
def test_a_sparse_matrix_of_a_million_columns_is_refused_before_it_is_dense():
    wide = sparse.random(50, 10**6, density=1e-5, format="csr", random_state=0)
    for map_ in (RandomFourierFeatures(), TableCodes(), NeighbourSmoothing()):
        with pytest.raises(ValueError, match=r"at most 20,000 columns.* got 1,000,000\. Project"):
            map_.fit(wide)
    with pytest.raises(ValueError, match=r"at most \d+ features .* got 1000000"):
        PrivateRidge(1.0, 1e-3, num_classes=2).fit(wide, np.arange(50) % 2)
