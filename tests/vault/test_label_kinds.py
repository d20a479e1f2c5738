"""Kinds of labels are values, and each keeps to the same contract."""

from __future__ import annotations

import pickle
from decimal import Decimal

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest

from tf_labeldp import PrivacyBudget, PrivateLabels
from tf_labeldp.mechanisms import HistogramMechanism, LabelMomentMechanism
from tf_labeldp.vault import Classes, LabelKind, Numbers, Rows

# A kind, labels of it, and the arguments of a vault that make it.
KINDS = {
    "codes": (Classes(3), [0, 2, 1], {"num_classes": 3}),
    "two codes": (Classes(2), [0, 1, 1], {"num_classes": 2}),
    "names": (Classes(["no", "yes"]), ["yes", "no"], {"classes": ["no", "yes"]}),
    "tuples": (Classes([("a", 1), 2.5]), [2.5, ("a", 1)], {"classes": [("a", 1), 2.5]}),
    "numbers": (Numbers(0, 52), [52.0, 0.0, 13.5], {"low": 0, "high": 52}),
    "clipped": (Numbers(-1, 1, clip=True), [0.5, -1.0], {"low": -1, "high": 1, "clip": True}),
    "rows": (Rows(2), [[0, 1], [1, 1]], {"num_labels": 2}),
}


@pytest.fixture(params=KINDS)
def case(request):
    return KINDS[request.param]


def columns_of(values):
    """Labels as columns of every library and type that holds them exactly."""
    import polars

    flags = [bool(value) for value in values]
    floats = [float(value) for value in values]
    yield from (values, flags, floats, np.array(flags), np.array(values, object))
    yield [Decimal(value) for value in values]
    for dtype in ("int64", "Int64", "boolean", "float64", "category", "int64[pyarrow]"):
        yield pd.Series(values, dtype=dtype)
    for entries in (values, flags, floats):
        yield from (polars.Series(entries), pa.array(entries), pa.chunked_array([entries]))
    yield pa.array(values).dictionary_encode()


def test_labels_of_every_library_and_type_are_taken_where_they_are_exact():
    for column in columns_of([1, 0, 1]):
        for kind in (Classes(2), Classes([0, 1])):
            assert kind.encode(column).tolist() == [1, 0, 1], repr(column)
        vault = PrivateLabels(column, num_classes=2, budget=PrivacyBudget(1.0))
        assert vault.split([0])[0].indices.tolist() == [1, 2]
    rows = pd.DataFrame({"a": [True, False], "b": [1, 0]})
    assert Rows(2).encode(rows).tolist() == [[1, 1], [0, 0]]
    assert Numbers(0, 1).encode([Decimal("0.5")]).tolist() == [0.5]


@pytest.mark.parametrize("labels", [[1.0, np.nan], [1, None], pd.Series([1, None], dtype="Int64")])
def test_missing_labels_are_counted(labels):
    for kind in (Classes(2), Numbers(0, 1)):
        with pytest.raises(ValueError, match=r"1 of 2 labels are missing\. Leave"):
            kind.encode(labels)


@pytest.mark.parametrize("labels", [[0.5, 1.0], [np.inf, 1.0], ["0", "1"]])
def test_labels_that_are_no_whole_numbers_are_no_classes(labels):
    with pytest.raises(TypeError, match=r"must be integers 0\.\.1"):
        Classes(2).encode(labels)


def test_a_missing_entry_of_an_arrow_dictionary_is_no_class():
    """NumPy reads it as the first entry of the dictionary."""
    column = pa.array(["a", None, "b"]).dictionary_encode()
    with pytest.raises(ValueError, match="1 of 3 labels are missing"):
        Classes(["a", "b"]).encode(column)


def test_a_vault_has_the_kind_that_its_arguments_describe(case):
    kind, labels, arguments = case
    vault = PrivateLabels(labels, **arguments, budget=PrivacyBudget(1.0))
    assert vault.kind == kind and hash(vault.kind) == hash(kind)
    assert [part.kind for part in vault.split([0])] == [kind, kind]
    assert vault.unit == kind.unit and str(kind) in repr(vault)
    with pytest.raises(AttributeError):
        vault.kind = kind
    encoded = kind.encode(labels)
    assert encoded.shape[:1] == (len(labels),)
    assert kind.decode(encoded).tolist() == labels


def test_a_kind_is_a_value(case):
    kind = case[0]
    found = LabelKind.of_header(kind.header())  # as a store describes it
    assert found.describe() == kind.describe()
    assert found.mechanism_arguments() == kind.mechanism_arguments()
    assert isinstance(kind, LabelKind) and pickle.loads(pickle.dumps(kind)) == kind
    assert eval(repr(kind)) == kind
    assert [kind == other for other, *_ in KINDS.values()].count(True) == 1
    with pytest.raises(AttributeError):
        kind.num_classes = 4


def test_a_release_takes_what_is_made_with_the_arguments_of_the_kind(case):
    kind = case[0]
    made = LabelMomentMechanism(1.0, 1e-6, **kind.mechanism_arguments())
    kind.check_release(made)
    for other, *_ in KINDS.values():
        if other.mechanism_arguments() == kind.mechanism_arguments():
            continue
        with pytest.raises(ValueError, match=r"Make the mechanism|Give it the values"):
            other.check_release(made)


def test_possible_labels_are_labels_of_the_kind(case):
    kind = case[0]
    possible = kind.any_labels(4)
    again = kind.encode(kind.decode(possible).tolist())
    np.testing.assert_array_equal(again, possible)
    assert again.dtype == possible.dtype


@pytest.mark.parametrize("name", ["codes", "two codes", "numbers", "rows"])
def test_the_variance_of_a_code_is_the_largest_there_is(name):
    """Of the codes of ``LabelMomentMechanism``: one-hot rows of more than two classes."""
    kind, *_ = KINDS[name]
    possible = {
        "codes": np.eye(3),
        "two codes": np.array([[0.0], [1.0]]),
        "numbers": np.array([[0.0], [52.0]]),
        "rows": np.array([[0.0, 0.0], [1.0, 1.0]]),  # labels of a row that go together
    }[name]
    largest = possible.var(axis=0).sum()  # each is as likely as the others
    assert kind.code_variance == pytest.approx(largest)


def test_headers_are_those_of_version_0_2():
    assert Classes(3).header() == {"num_classes": 3, "classes": None}
    assert Numbers(0, 4).header() == {"num_classes": None, "classes": None, "range": [0.0, 4.0]}
    assert Rows(3).header() == {"num_classes": None, "classes": None, "labels_in_row": 3}
    digest = "9ad3c9dbb8aecb35f8d1dc4c485c95024836c90c1fae10b35f7b961a765cc329"
    assert Classes(["no", "yes"]).header() == {"num_classes": 2, "classes": digest}


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: Classes(1), ValueError, "num_classes must be at least 2"),
        (lambda: Classes(["a", "a"]), ValueError, "has a repeated value"),
        (lambda: Numbers(1, 1), ValueError, "low must be below high"),
        (lambda: Numbers(0, np.inf), ValueError, "high must be finite"),
        (lambda: Numbers(0, 1, True), TypeError, "positional"),
        (lambda: Rows(0), ValueError, "num_labels must be at least 1"),
    ],
)
def test_bad_kinds(make, error, message):
    with pytest.raises(error, match=message):
        make()


def test_a_histogram_of_classes_is_for_as_many_classes():
    with pytest.raises(ValueError, match="num_classes=4, the labels have 3"):
        Classes(3).check_release(HistogramMechanism(1.0, 4))
