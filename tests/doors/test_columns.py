"""Columns of users, labels, ids and weights in every container: equal values, equal results.

A missing entry is refused in each role, whatever marks it; among features it is missing.
"""

from __future__ import annotations

import datetime
import itertools
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pytest
import tensorflow as tf
from scipy import sparse
from sklearn.base import clone

import tf_labeldp as ldp
from tf_labeldp.data import poisson_batches
from tf_labeldp.features import RandomFourierFeatures, TableCodes, find_clusters, to_inputs
from tf_labeldp.heads import PrivateLogisticRegression
from tf_labeldp.mechanisms import HistogramMechanism
from tf_labeldp.plugins import Clusters, open_for_training
from tf_labeldp.scale import randomize_batch
from tf_labeldp.vault import Classes, Numbers

N = 12
HOLES = (3, 10)
KEY = bytes(range(32))
DAY = datetime.datetime(2024, 2, 1)
VALUES: dict[str, list[Any]] = {
    "numbers": [30, 7, 7, 30, 5, 7, 30, 5, 5, 7, 30, 5],
    "large": [2**60 + 1, 2**60, 5, 2**60 + 1, 2**60, 5] * 2,
    "fractions": [0.5, 2.0, 2.0, 0.25, 0.5, 4.0] * 2,
    "booleans": [True, False, False, True] * 3,
    "texts": ["b", "", "ä", "a", "b", "nan", "ä", "a", "a", "b", "None", ""],
    "times": [DAY + datetime.timedelta(hours=12 * k) for k in (3, 1, 1, 0, 5, 3)] * 2,
    "bytes": [b"b", b"a", b"a", b"c"] * 3,
}
"""A column of each type, which has no missing value: "nan" and "" are texts."""
IDS: dict[str, list[Any]] = {
    "numbers": list(range(30, 18, -1)),
    "large": [2**60 + k for k in (5, 4, 6, 2, 3, 11, 9, 10, 8, 7, 0, 1)],
    "texts": ["b", "", "ä", "a", "B", "nan", "Ä", "A", "1", "01", "None", "1.0"],
    "bytes": [bytes([code]) for code in range(98, 110)],
}
"""The same, where an entry may come once."""
NUMPY = {"texts": str, "times": "M8[us]", "bytes": "S1"}
ARROW = {"times": pa.timestamp("us"), "bytes": pa.binary()}


def filled(entries: list[Any]) -> list[Any]:
    """The entries with any value where one is missing: what lies below a mask."""
    return [entries[0] if entry is None else entry for entry in entries]


def mask(entries: list[Any]) -> list[bool]:
    return [entry is None for entry in entries]


def of_numpy(entries: list[Any], kind: str) -> Any:
    if not any(mask(entries)):
        return np.array(entries, NUMPY.get(kind))
    missing = {"times": "NaT", "fractions": np.nan}.get(kind)
    if missing is None:  # NumPy's other types have no missing value.
        return None
    return np.array([missing if entry is None else entry for entry in entries], NUMPY.get(kind))


def masked(entries: list[Any], kind: str) -> Any:
    return np.ma.array(np.array(filled(entries), NUMPY.get(kind)), mask=mask(entries))


def structured(entries: list[Any], kind: str) -> Any:
    rows = np.zeros(N, [("key", np.array(filled(entries), NUMPY.get(kind)).dtype), ("at", int)])
    rows["key"] = filled(entries)
    if not any(mask(entries)):
        return rows
    return np.ma.array(rows, mask=[(hole, False) for hole in mask(entries)])


def chunked(entries: list[Any], kind: str) -> Any:
    parts = [entries[:5], entries[5:]]
    return pa.chunked_array([pa.array(part, ARROW.get(kind)) for part in parts])


def chunked_dictionary(entries: list[Any], kind: str) -> Any:
    """Two chunks whose dictionaries have the same values at different places."""
    if kind == "fractions":
        return None
    parts = [entries[:5], entries[5:]]
    return pa.chunked_array([pa.array(part, ARROW.get(kind)).dictionary_encode() for part in parts])


def hole_in_the_dictionary(entries: list[Any], kind: str) -> Any:
    distinct = list(dict.fromkeys(entries))
    codes = pa.array([distinct.index(entry) for entry in entries])
    return pa.DictionaryArray.from_arrays(codes, pa.array(distinct, ARROW.get(kind)))


def nullable(entries: list[Any], kind: str) -> Any:
    dtypes = {"numbers": "Int64", "large": "Int64", "fractions": "Float64"}
    dtypes |= {"booleans": "boolean", "texts": "string"}
    return pd.Series(entries, dtype=dtypes[kind]) if kind in dtypes else None


def of_arrow_in_pandas(entries: list[Any], kind: str) -> Any:
    return pd.Series(pd.arrays.ArrowExtensionArray(chunked(entries, kind)))


def dictionary_in_pandas(entries: list[Any], kind: str) -> Any:
    found = None if kind == "times" else chunked_dictionary(entries, kind)
    return None if found is None else pd.Series(pd.arrays.ArrowExtensionArray(found))


def of_polars(entries: list[Any], kind: str) -> Any:
    return pl.Series(entries)


def categories_of_polars(entries: list[Any], kind: str) -> Any:
    return pl.Series(entries, dtype=pl.Categorical) if kind == "texts" else None


def tensor(entries: list[Any], kind: str) -> Any:
    if any(mask(entries)) or kind == "times":
        return None
    return tf.constant(entries, tf.int64 if kind in ("numbers", "large") else None)


def tensor_of_keras(entries: list[Any], kind: str) -> Any:
    if any(mask(entries)) or kind not in ("numbers", "fractions", "booleans"):
        return None
    return keras.ops.convert_to_tensor(np.array(entries))


CONTAINERS: dict[str, Callable[[list[Any], str], Any]] = {
    "list": lambda entries, kind: list(entries),
    "tuple": lambda entries, kind: tuple(entries),
    "list of NaN": lambda entries, kind: [np.nan if e is None else e for e in entries],
    "list with a masked entry": lambda e, kind: [np.ma.masked if x is None else x for x in e],
    "NumPy": of_numpy,
    "NumPy, objects": lambda entries, kind: np.array(entries, object),
    "NumPy, masked": masked,
    "NumPy, strided": lambda e, kind: (
        None if of_numpy(e, kind) is None else of_numpy([x for x in e for _ in range(2)], kind)[::2]
    ),
    "pandas": lambda entries, kind: pd.Series(entries),
    "pandas, objects": lambda entries, kind: pd.Series(entries, dtype=object),
    "pandas, nullable": nullable,
    "pandas, Arrow": of_arrow_in_pandas,
    "pandas, dictionary": dictionary_in_pandas,
    "pandas, categories": lambda entries, kind: pd.Series(pd.Categorical(entries)),
    "pandas, index": lambda entries, kind: pd.Index(entries),
    "pandas, other index": lambda entries, kind: pd.Series(entries, index=range(N, 0, -1)),
    "Polars": of_polars,
    "Polars, categories": categories_of_polars,
    "Arrow": lambda entries, kind: pa.array(entries, ARROW.get(kind)),
    "Arrow, chunked": chunked,
    "Arrow, dictionary": lambda e, kind: pa.array(e, ARROW.get(kind)).dictionary_encode(),
    "Arrow, chunked dictionary": chunked_dictionary,
    "Arrow, null in the dictionary": hole_in_the_dictionary,
    "tensor": tensor,
    "tensor of Keras": tensor_of_keras,
}


def users_of(column: Any) -> list[int]:
    labels = ldp.PrivateLabels([0, 1] * 6, 2, budget=ldp.PrivacyBudget(1.0), users=column)
    return labels.users.tolist()  # type: ignore[union-attr]


def users_of_batches(column: Any) -> Any:
    arguments: dict[str, Any] = {"sampling_probability": 1.0, "steps": 1, "insecure_seed": 0}
    x, y = np.arange(N, dtype=np.float32).reshape(N, 1), np.arange(N) % 2
    found = poisson_batches(x, y, users=column, max_examples_per_user=2, **arguments)
    rows, _, weights = next(iter(open_for_training(found, alt_examples=0)))
    return rows.numpy().tolist(), weights.numpy().tolist()


def codes_of(column: Any, values: list[Any]) -> list[int]:
    return Classes(list(dict.fromkeys(values))).encode(column).tolist()


def numbers_of(column: Any, values: list[Any]) -> list[float]:
    return Numbers(0, 100).encode(column).tolist()


def draws_of(column: Any) -> list[int]:
    labels = np.arange(N) % 4
    return randomize_batch(column, labels, ldp.RandomizedResponse(0.5, 4), KEY, "a").tolist()


def weights_of_head(column: Any) -> list[float]:
    x, y = np.random.default_rng(0).normal(size=(N, 2)), np.arange(N) % 2
    head = ldp.PrivateRidge(1.0, 1e-3, num_classes=2, insecure_seed=0).fit(
        x, y, sample_weight=column
    )
    return head.predict_proba(x).tolist()


def weights_of_batches(column: Any) -> list[float]:
    arguments: dict[str, Any] = {"sampling_probability": 1.0, "steps": 1}
    x, y = np.zeros((N, 2), np.float32), np.arange(N) % 2
    return poisson_batches(x, y, sample_weight=column, **arguments).sample_weight.tolist()


ROLES: dict[str, tuple[str, Callable[..., Any], tuple[str, ...]]] = {
    "users": ("users", lambda c, v: users_of(c), tuple(VALUES)),
    "users of batches": ("users", lambda c, v: users_of_batches(c), tuple(VALUES)),
    "classes": ("labels", codes_of, tuple(VALUES)),
    "numbers": ("labels", numbers_of, ("numbers", "fractions")),
    "ids": ("ids", lambda c, v: draws_of(c), tuple(IDS)),
    "weights": (
        "sample_weight",
        lambda c, v: weights_of_batches(c),
        ("numbers", "fractions", "booleans"),
    ),
    "weights of a head": (
        "sample_weight",
        lambda c, v: weights_of_head(c),
        ("numbers", "fractions"),
    ),
}
CASES = [
    (role, kind, container)
    for role, (_, _, kinds) in ROLES.items()
    for kind, container in itertools.product(kinds, CONTAINERS)
    if CONTAINERS[container](VALUES[kind], kind) is not None
]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("role", ROLES)
def test_equal_values_give_equal_results_in_every_container(role: str) -> None:
    _, read, _ = ROLES[role]
    wrong = []
    for _, kind, container in (case for case in CASES if case[0] == role):
        values = IDS[kind] if role == "ids" else VALUES[kind]
        if read(CONTAINERS[container](values, kind), values) != read(values, values):
            wrong.append((kind, container))
    assert not wrong


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("role", ROLES)
def test_missing_entries_are_counted_and_refused_in_every_container(role: str) -> None:
    name, read, _ = ROLES[role]
    passed = []
    for _, kind, container in (case for case in CASES if case[0] == role):
        values = IDS[kind] if role == "ids" else VALUES[kind]
        entries = [None if row in HOLES else value for row, value in enumerate(values)]
        column = CONTAINERS[container](entries, kind)
        if column is None:
            continue
        try:
            read(column, values)
            passed.append((kind, container, "accepted"))
        except (TypeError, ValueError) as error:
            if f"2 of 12 {name} are missing" not in str(error):
                passed.append((kind, container, str(error)))
    assert not passed


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", VALUES)
def test_labels_are_missing_where_there_is_none_yet(kind: str) -> None:
    """Whatever marks them, the labels of the other rows are those of a list."""
    values = VALUES[kind]
    entries = [None if row in HOLES else value for row, value in enumerate(values)]
    classes = list(dict.fromkeys(values))
    present = [row for row in range(N) if row not in HOLES]
    expected = Classes(classes).encode([values[row] for row in present]).tolist()
    for container, make in CONTAINERS.items():
        if (column := make(entries, kind)) is None:
            continue
        if getattr(column, "dtype", None) == np.float64 and kind == "large":
            continue  # pandas has made doubles of them.
        budget = ldp.PrivacyBudget(20.0)
        labels = ldp.PrivateLabels(column, Classes(classes), budget=budget, unlabelled=HOLES)
        sure = ldp.RandomizedResponse(20.0, len(classes))
        assert labels.randomize(sure).values.tolist() == expected, container
        with pytest.raises(ValueError, match="1 of 11 labels are missing"):
            ldp.PrivateLabels(column, Classes(classes), budget=budget, unlabelled=HOLES[:1])


def test_users_keep_their_type_and_their_text() -> None:
    """Users of mixed types, which would be merged or split, are refused."""
    for mixed in (
        [1, "1"] * 6,
        np.array([1, "1"] * 6, object),
        pd.Series([1, "1"] * 6, dtype=object),
        [1, True] * 6,
        [1, 1.0] * 6,
        ["a", b"a"] * 6,
        [datetime.date(2024, 1, 1), datetime.datetime(2024, 1, 1)] * 6,
    ):
        with pytest.raises(TypeError, match="expected users of one type, got a mix of"):
            users_of(mixed)
        with pytest.raises(TypeError, match=r"ids of one type|whole numbers or text"):
            draws_of(mixed)
    assert users_of(["a", "a\0"] * 6) == users_of(["1", "01"] * 6)[::-1] == [0, 1] * 6
    assert users_of([2**63, -1] * 6) == users_of([2**63, 2**63 + 1] * 6)[::-1] == [1, 0] * 6
    assert users_of([(2, "x"), (1, "x")] * 6) == [1, 0] * 6
    records = structured(VALUES["texts"], "texts")
    assert users_of(records) == users_of(VALUES["texts"])
    holed = [None if row in HOLES else value for row, value in enumerate(VALUES["texts"])]
    with pytest.raises(ValueError, match="2 of 12 users are missing"):
        users_of(structured(holed, "texts"))
    with pytest.raises(ValueError, match=r"expected users of shape \(12,\)"):
        users_of(np.zeros((N, 1)))
    with pytest.raises(ValueError, match="symbolic"):
        users_of(keras.KerasTensor((N,)))


@pytest.mark.filterwarnings("ignore")
def test_a_missing_cluster_is_not_the_first_one() -> None:
    entries = [None if row in HOLES else row % 3 for row in range(N)]
    budget = ldp.PrivacyBudget(9.0)
    draw = ldp.ClusterRandomizedResponse.for_epsilon(1.0, num_classes=2)
    for container, make in CONTAINERS.items():
        if (column := make(entries, "numbers")) is None:
            continue
        labels = ldp.PrivateLabels([0, 1] * 6, 2, budget=budget)
        for call in (
            lambda c: labels.randomize(draw, clusters=c),  # noqa: B023
            lambda c: labels.release(HistogramMechanism(1.0, 2), public_input=c),  # noqa: B023
            Clusters.from_assignments,
        ):
            with pytest.raises(ValueError, match=r"2 of 12 (clusters|groups|assignments) are"):
                call(column)
        assert not labels.receipts, container


@pytest.mark.parametrize("weight", ["x", None, -1.0, np.inf, np.nan])
def test_weights_are_numbers_that_are_finite_and_not_negative(weight: Any) -> None:
    for read in (weights_of_head, weights_of_batches):
        with pytest.raises(ValueError, match="sample_weight"):
            read([weight, *np.ones(N - 1)])


RNG = np.random.default_rng(0)
X = RNG.normal(size=(400, 4))
Y = (X[:, 0] + 0.3 * RNG.normal(size=400) > 0).astype(int)
HIDDEN = np.zeros(X.shape, bool)
HIDDEN[:200, 1:] = RNG.random((200, 3)) < 0.3
MASKED = np.ma.array(np.where(HIDDEN, 1e6, X), mask=HIDDEN)
HOLED = np.where(HIDDEN, np.nan, X)


def front_door(x: Any) -> Any:
    door = ldp.PrivateClassifier(5.0, 1e-5, num_classes=2, insecure_seed=0)
    return door.fit(x, Y).predict_proba(x)


def boosting(x: Any) -> Any:
    trees = ldp.PrivateBoosting(5.0, num_classes=2, max_trees=20, insecure_seed=0)
    return trees.fit(x, Y).predict_proba(x)


def fourier(x: Any) -> Any:
    return RandomFourierFeatures(32, seed=0).fit(x).transform(x)


def head(x: Any) -> Any:
    fitted = PrivateLogisticRegression(5.0, 1e-5, num_classes=2, insecure_seed=0)
    return clone(fitted).fit(x, Y).predict_proba(x)


def batches(x: Any) -> Any:
    return poisson_batches(x, Y, sampling_probability=0.5, steps=1).features_in_memory()


def trained(x: Any) -> Any:
    labels = ldp.PrivateLabels(Y, 2, budget=ldp.PrivacyBudget(1.0), insecure_seed=0)
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
    model.compile("sgd", keras.losses.CategoricalCrossentropy(from_logits=True))
    ldp.fit(model, x, labels.randomize(ldp.RandomizedResponse(1.0, 2)), verbose=0)
    return model.get_weights()[0]


def as_dataset(x: Any) -> Any:
    labels = ldp.PrivateLabels(Y, 2, budget=ldp.PrivacyBudget(1.0), insecure_seed=0)
    data = labels.randomize(ldp.RandomizedResponse(1.0, 2)).to_dataset(x)
    return np.array([row for row, _ in data.as_numpy_iterator()])


def as_table(x: Any) -> Any:
    return list(to_inputs({str(place): column for place, column in enumerate(x.T)}).values())


FEATURES = [front_door, boosting, fourier, head, batches, trained, as_dataset, as_table]


def outcome(door: Callable[[Any], Any], x: Any) -> Any:
    """The result, or the words of the refusal."""
    try:
        return door(x)
    except (TypeError, ValueError) as error:
        return str(error)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("door", [*FEATURES, lambda x: find_clusters(x, 4).assignments])
def test_a_masked_feature_is_missing_as_nan_is(door: Callable[[Any], Any]) -> None:
    expected, found = outcome(door, HOLED), outcome(door, MASKED)
    if isinstance(expected, str):
        assert found == expected
    else:
        np.testing.assert_array_equal(found, expected)
    # A mask that hides nothing changes nothing, and integers stay integers.
    whole = outcome(door, np.ma.array(X, mask=False))
    np.testing.assert_array_equal(whole, outcome(door, X))


def weighted(x: Any) -> Any:
    """Weights in a list, next to rows in any container."""
    noisy = ldp.PrivateLabels(Y, 2, budget=ldp.PrivacyBudget(1.0), insecure_seed=0)
    drawn = noisy.randomize(ldp.RandomizedResponse(1.0, 2))
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
    model.compile("sgd", keras.losses.CategoricalCrossentropy(from_logits=True))
    weights = np.linspace(0.0, 1.0, 400).tolist()
    ldp.fit(model, x, drawn, sample_weight=weights, batch_size=400, verbose=0)
    return model.get_weights()[0]


DENSE: dict[str, Callable[[np.ndarray], Any]] = {
    "a list of lists": lambda x: x.tolist(),
    "a tuple of tuples": lambda x: tuple(map(tuple, x.tolist())),
    "a list of arrays": list,
    "objects that are arrays": lambda x: np.fromiter(list(x), object, len(x)),
    "a column of lists": lambda x: pd.Series(x.tolist()),
    "a column of arrays": lambda x: pd.Series(list(x)),
    "a tensor": tf.constant,
}
SPARSE: dict[str, Callable[[np.ndarray], Any]] = {
    "CSR": sparse.csr_matrix,
    "COO": sparse.coo_array,
    "a sparse tensor": tf.sparse.from_dense,
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("door", [head, fourier, batches, trained, weighted, as_dataset])
def test_rows_are_the_same_in_every_container(door: Callable[[Any], Any]) -> None:
    expected = door(X)
    others = {} if door is batches else SPARSE  # which have no features in memory
    for name, make in (DENSE | others).items():
        np.testing.assert_allclose(door(make(X)), expected, atol=1e-3, err_msg=name)


RAGGED = [list(range(1 + row % 3)) for row in range(400)]
UNREADABLE: dict[str, tuple[Any, str]] = {
    "a list": (RAGGED, "expected rows of one length, got rows of 1 to 3 entries. Pad"),
    "arrays": ([np.array(row) for row in RAGGED], "got rows of 1 to 3 entries. Pad"),
    "objects": (np.fromiter(RAGGED, object, 400), "got rows of 1 to 3 entries. Pad"),
    "a ragged tensor": (tf.ragged.constant(RAGGED), "got a RaggedTensor. Pad"),
    "a generator": ((row for row in X), "read more than once, got a generator. Give an array"),
    "a map": (map(list, X), "read more than once, got a map. Give an array"),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", UNREADABLE)
def test_ragged_rows_and_iterators_are_refused_with_advice(name: str) -> None:
    rows, words = UNREADABLE[name]
    for door in (front_door, boosting, head, fourier, batches, trained, as_dataset):
        with pytest.raises((TypeError, ValueError), match=words):
            door(rows)


def test_numbers_next_to_texts_stay_numbers_in_a_list_of_rows() -> None:
    rows = [[20.5 + row % 40, "nurse" if row % 2 else "smith"] for row in range(60)]
    codes = TableCodes().fit(rows)
    assert codes.categorical_.tolist() == [False, True]
    assert codes.transform(rows)[:, 0].tolist() == [20.5 + row % 40 for row in range(60)]


def test_inputs_of_a_model_in_a_list_are_not_rows() -> None:
    labels = ldp.PrivateLabels(Y, 2, budget=ldp.PrivacyBudget(1.0), insecure_seed=0)
    noisy = labels.randomize(ldp.RandomizedResponse(1.0, 2))
    inputs = [keras.Input((2,), name="first"), keras.Input((2,), name="second")]
    outputs = keras.layers.Dense(2)(keras.layers.Concatenate()(inputs))
    model = keras.Model(inputs, outputs)
    model.compile("sgd", keras.losses.CategoricalCrossentropy(from_logits=True))
    ldp.fit(model, [X[:, :2], X[:, 2:]], noisy, verbose=0)
    with pytest.raises(TypeError, match="expected arrays of numbers, or of texts, got a list"):
        noisy.to_dataset([{"age": row} for row in range(400)])


NAMES: dict[str, list[Any]] = {
    "MultiIndex": [("a", "x"), ("a", "y"), ("b", "x"), ("b", "y")],
    "numbers": [7, 8, 9, 10],
    "dates": list(pd.date_range("2024-01-01", periods=4)),
    "mixed": ["a", 1, None, ("b", 2)],
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("names", NAMES)
def test_names_of_columns_that_are_no_texts_are_used_as_texts(names: str) -> None:
    frame = pd.DataFrame(X, columns=NAMES[names])
    texts = list(map(str, frame.columns))
    door = ldp.PrivateClassifier(5.0, 1e-5, num_classes=2, method="head", insecure_seed=0)
    model = door.fit(frame, Y)
    assert model.feature_names_in_.tolist() == texts
    expected = model.predict_proba(frame)
    # Columns are found by name, or refused in another order.
    backwards = frame[frame.columns[::-1]]
    np.testing.assert_array_equal(model.predict_proba(backwards), expected)
    np.testing.assert_array_equal(model.predict_proba(dict(zip(texts, X.T, strict=True))), expected)
    exported = model.to_keras()
    found = exported.predict(to_inputs(frame, exported), verbose=0)
    np.testing.assert_allclose(found, expected, atol=1e-4)
    one = PrivateLogisticRegression(5.0, 1e-5, num_classes=2, insecure_seed=0).fit(frame, Y)
    with pytest.raises(ValueError, match="in another order than in fit"):
        one.predict(backwards)


def test_names_of_columns_that_are_equal_as_texts_are_refused() -> None:
    for names in ([("a", 1), "('a', 1)"], [1, "1"], [None, "None"]):
        with pytest.raises(ValueError, match=r"names that differ as text.*Rename one"):
            TableCodes().fit({name: X[:, 0] for name in names})
