"""``randomize_labels`` for numbers, one-hot rows with noise, clusters and a released prior."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from tf_labeldp.accounting import BudgetExceededError, PrivacyBudget
from tf_labeldp.data import randomize_labels
from tf_labeldp.mechanisms import ALIBI, RROnBins
from tf_labeldp.vault import ClusterRandomizedResponse, LabelRandomizer

N, K = 300, 5


def itself(x):
    return x


def by_id(dataset):
    """Returns {id: noisy label} of the second epoch, after checking that it is the first's."""
    first, second = ({int(x): y.tolist() for x, y in dataset.as_numpy_iterator()} for _ in range(2))
    assert first == second
    return second


@pytest.mark.parametrize("id_fn", [None, itself])
def test_noisy_rows_take_the_place_of_labels(source, id_fn):
    transform = randomize_labels(ALIBI(1.0, K), id_fn=id_fn)
    dataset = source.apply(transform)
    assert dataset.element_spec == (
        tf.TensorSpec((), tf.int64),
        tf.TensorSpec((K,), tf.float32),
    )
    found = by_id(dataset)
    noisy = transform.noisy_labels
    assert noisy.values.shape == (N, K) and transform.guarantee().epsilon == 1.0
    assert [found[i] for i in range(N)] == noisy.values.tolist()
    assert {int(x): y.tolist() for x, y in dataset.shuffle(N).as_numpy_iterator()} == found


def test_noisy_rows_follow_the_labels(source, labels):
    """At epsilon 200 the largest entry is the label: the noise is some hundredths."""
    found = by_id(source.apply(randomize_labels(ALIBI(200.0, K))))
    assert [int(np.argmax(found[i])) for i in range(N)] == labels.tolist()


@pytest.mark.slow
def test_clusters_go_with_their_examples(source, labels):
    mechanism = ClusterRandomizedResponse.for_epsilon(2.0, K)
    clusters = np.arange(N) % 3
    transform = randomize_labels(mechanism, clusters=clusters)
    found = by_id(source.apply(transform))
    noisy = transform.noisy_labels
    assert [found[i] for i in range(N)] == noisy.values.tolist()
    np.testing.assert_array_equal(noisy.priors.groups, clusters)
    assert len(noisy.receipts) == 2 and transform.guarantee().epsilon == 2.0
    assert transform.private_labels.guarantee().epsilon == 2.0
    with pytest.raises(BudgetExceededError):
        source.apply(randomize_labels(mechanism, clusters=clusters, budget=PrivacyBudget(1.9)))


@pytest.mark.parametrize(("id_fn", "dtype"), [(None, "float32"), (itself, "float64")])
def test_numbers_keep_their_bin_by_the_channel(id_fn, dtype):
    amounts = np.round(np.random.default_rng(2).uniform(-50.0, 50.0, N), 1)
    bins = RROnBins(1.0, (-50.0, 0.0, 50.0), (-25.0, 0.0, 25.0), (0, 1, 2))
    source = tf.data.Dataset.from_tensor_slices((np.arange(N), amounts.astype(dtype)))
    transform = randomize_labels(bins, id_fn=id_fn)
    dataset = source.apply(transform)
    assert dataset.element_spec == source.element_spec
    noisy = by_id(dataset)
    assert set(noisy.values()) == {-25.0, 0.0, 25.0}
    assert transform.guarantee().epsilon == 1.0
    own = np.array(bins.outputs)[bins.bin_of(amounts)]
    kept = np.mean([noisy[i] == own[i] for i in range(N)])
    assert kept > 0.43  # e / (e + 2) = 0.576, five standard deviations less; by chance 1 / 3


@pytest.mark.slow
@pytest.mark.parametrize("id_fn", [None, itself])
def test_a_released_prior_is_counted(id_fn):
    numbers = np.round(np.random.default_rng(3).uniform(0.0, 10.0, N), 1)
    source = tf.data.Dataset.from_tensor_slices((np.arange(N), numbers.astype(np.float32)))
    transform = randomize_labels(LabelRandomizer(2.0), low=0.0, high=10.0, id_fn=id_fn)
    dataset = source.apply(transform)
    assert dataset.element_spec == source.element_spec
    found = by_id(dataset)
    noisy = transform.noisy_labels
    assert [found[i] for i in range(N)] == noisy.values.astype(np.float32).tolist()
    assert [receipt.kind for receipt in noisy.receipts] == ["release", "draw"]
    assert transform.guarantee().epsilon == pytest.approx(2.0, rel=1e-12)
    assert transform.private_labels.label_range == (0.0, 10.0)
    outside = randomize_labels(LabelRandomizer(2.0), low=0.0, high=5.0)
    with pytest.raises(ValueError, match=r"must lie in \[0, 5\], but \d+ of 300 do not"):
        source.apply(outside)
    assert outside.private_labels is None
