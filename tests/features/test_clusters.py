"""Clusters of features: found and given; deterministic, and with clear errors."""

from __future__ import annotations

import keras
import numpy as np
import pytest

from tf_labeldp.features import find_clusters
from tf_labeldp.plugins import Clusters

POINTS = 10.0 * np.array([[1.0, 0.0, 0.0], [0.0, 1.0, 0.0], [0.0, 0.0, 1.0], [-1.0, 0.0, 0.0]])
TRUE = np.repeat([0, 1, 2, 3], [50, 30, 15, 5])
BLOBS = POINTS[TRUE] + np.random.default_rng(0).normal(size=(100, 3))


def same_partition(one, other):
    """Whether two assignments differ in nothing but the numbers of the clusters."""
    pairs = set(zip(one.tolist(), other.tolist(), strict=True))
    return len(pairs) == len(set(one.tolist())) == len(set(other.tolist()))


def test_blobs_are_found():
    clusters = find_clusters(BLOBS, 4)
    assert same_partition(clusters.assignments, TRUE)
    assert not same_partition(find_clusters(BLOBS, 3).assignments, TRUE)
    assert clusters.assignments.dtype == np.int64 and clusters.num_clusters == len(clusters.sizes)
    assert sorted(clusters.sizes) == [5, 15, 30, 50] and clusters.sizes.dtype == np.int64
    assert clusters.centres.shape == (4, 3) and clusters.centres.dtype == np.float64
    means = [BLOBS[clusters.assignments == c].mean(axis=0) for c in range(4)]
    np.testing.assert_allclose(clusters.centres, means, atol=1e-5)
    assert len(clusters) == 100


def test_examples_are_assigned_to_the_nearest_centre():
    clusters = find_clusters(BLOBS, 4)
    assert np.array_equal(clusters.assign(BLOBS), clusters.assignments)
    new = np.random.default_rng(1).normal(scale=8.0, size=(500, 3))
    distances = np.linalg.norm(new[:, None] - clusters.centres, axis=2)
    assert np.array_equal(clusters.assign(new), distances.argmin(axis=1))
    assert clusters.assign(new[:1]).shape == (1,)


def test_of_equally_near_centres_the_first_counts():
    centres = np.array([[1.0], [-1.0], [1.0], [-1.0]])
    one = Clusters(np.arange(4), 4, centres)
    assert one.assign([[0.0], [2.0], [-2.0]]).tolist() == [0, 0, 1]


@pytest.mark.parametrize(("offset", "factor"), [(0.0, 1e-150), (1e6, 1e150)])
def test_unit_and_offset_of_features_make_no_difference(offset, factor):
    """In single precision squares would overflow, and the offset would swallow the rest."""
    moved = (BLOBS + offset) * factor
    clusters = find_clusters(moved, 4)
    assert same_partition(clusters.assignments, TRUE)
    assert np.array_equal(clusters.assign(moved), clusters.assignments)


@pytest.mark.holds("features.find_clusters")
def test_the_seed_decides():
    rows = np.random.default_rng(2).normal(size=(3000, 5))
    one, again = find_clusters(rows, 20, seed=3), find_clusters(rows, 20, seed=3)
    assert np.array_equal(one.assignments, again.assignments)
    assert np.array_equal(one.centres, again.centres)
    other = find_clusters(rows, 20, seed=4)
    assert not same_partition(one.assignments, other.assignments)


@pytest.mark.slow
def test_many_examples_take_mini_batches():
    rows = POINTS[np.arange(120_000) % 4] + np.random.default_rng(3).normal(size=(120_000, 3))
    one, again = find_clusters(rows, 4), find_clusters(rows.astype(np.float32), 4)
    assert same_partition(one.assignments, np.arange(120_000) % 4)
    assert np.mean(one.assignments == again.assignments) > 0.999
    np.testing.assert_allclose(sorted(one.sizes), 30_000)
    assert np.array_equal(one.assignments, find_clusters(rows, 4).assignments)


class FeatureMap:
    def transform(self, x):
        return x[:, :1]


class Model:
    def predict(self, x):
        return x[:, :1].tolist()


def keras_model():
    inputs = keras.Input((3,))
    return keras.Model(inputs, keras.layers.Lambda(lambda x: x[:, :1])(inputs))


ENCODERS = {"transform": FeatureMap, "predict": Model, "keras": keras_model}


@pytest.mark.parametrize("kind", ENCODERS)
def test_an_encoder_makes_the_features(kind):
    """Its first column tells three groups, of which one is two of the blobs; in blocks."""
    rows = np.tile(BLOBS.astype(np.float32), (50, 1))  # 5,000 examples: two blocks
    clusters = find_clusters(rows, 3, encoder=ENCODERS[kind]())
    assert same_partition(clusters.assignments, np.tile(np.where(TRUE == 2, 1, TRUE), 50))
    assert np.array_equal(clusters.assign(rows[:100]), clusters.assignments[:100])
    assert clusters.centres.shape == (3, 1)


def test_fewer_distinct_rows_than_clusters_leave_some_empty():
    with pytest.warns(UserWarning, match="distinct clusters"):
        clusters = find_clusters(np.repeat([[0.0], [1.0]], 10, axis=0), 5)
    assert sorted(clusters.sizes) == [0, 0, 0, 10, 10]
    assert str(clusters).endswith("3 empty, 5 below 50")


def test_given_clusters():
    clusters = Clusters.from_assignments(np.array([3, 0, 3], np.uint8))
    assert clusters.assignments.tolist() == [3, 0, 3] and clusters.assignments.dtype == np.int64
    assert clusters.num_clusters == 4 and clusters.sizes.tolist() == [1, 0, 0, 2]
    assert Clusters.from_assignments([0, 1], num_clusters=5).sizes.tolist() == [1, 1, 0, 0, 0]
    with pytest.raises(ValueError, match=r"assigning new examples needs centres"):
        clusters.assign([[0.0]])


@pytest.mark.holds("features.Clusters")
def test_clusters_do_not_change():
    clusters = find_clusters(BLOBS, 4)
    for array in (clusters.assignments, clusters.centres):
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 0
    given = np.array([0, 1])
    Clusters.from_assignments(given)
    given[0] = 1  # the caller's array is the caller's


def test_summary():
    clusters = Clusters.from_assignments(np.repeat([0, 1, 3], [1500, 40, 60]), 4)
    text = "4 clusters of 1,600 examples: sizes 0 to 1,500, median 50; 1 empty, 2 below 50"
    assert clusters.summary() == str(clusters) == text
    assert repr(clusters) == f"<Clusters: {text}>"


NAN = np.where(np.arange(300).reshape(100, 3) == 7, np.nan, BLOBS)
BAD = {
    "nan": (NAN, 2, {}, ValueError, r"finite, but 1 of 100 rows"),
    "too-many": (BLOBS, 101, {}, ValueError, "at most the number of examples, 100, got 101"),
    "none": (BLOBS, 0, {}, ValueError, "num_clusters must be at least 1, got 0"),
    "encoder-nan": (BLOBS, 2, {"encoder": np.log}, ValueError, "must be finite"),
}


@pytest.mark.parametrize("case", BAD)
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
@pytest.mark.filterwarnings("ignore:overflow:RuntimeWarning")
def test_bad_input(case):
    features, num_clusters, settings, error, message = BAD[case]
    with pytest.raises(error, match=message):
        find_clusters(features, num_clusters, **settings)


def test_new_examples_of_another_kind():
    clusters = find_clusters(BLOBS, 4)
    with pytest.raises(ValueError, match="expected 3 features, as in the centres, got 2"):
        clusters.assign(BLOBS[:, :2])
    with pytest.raises(ValueError, match="must be finite"):
        clusters.assign(NAN)


@pytest.mark.parametrize(
    ("assignments", "num_clusters", "error", "message"),
    [
        ([[0, 1]], None, ValueError, r"shape \(n,\).*got \(1, 2\)"),
        ([0.0, 1.0], None, TypeError, "must be integers"),
        ([0, -1], None, ValueError, "got -1. Give examples without a cluster"),
        ([0, 4], 4, ValueError, r"in 0..3, got 4\. Raise num_clusters"),
        ([0, 10**12], None, ValueError, r"got 1000000000000: .*np.unique"),
    ],
    ids=range(5),
)
def test_bad_assignments(assignments, num_clusters, error, message):
    with pytest.raises(error, match=message):
        Clusters.from_assignments(assignments, num_clusters)
