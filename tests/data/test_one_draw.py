"""One noisy label per example, whatever happens to the dataset afterwards."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf
from slow_cases import with_slow

from tf_labeldp.accounting import BudgetExceededError, PrivacyBudget
from tf_labeldp.data import randomize_labels
from tf_labeldp.mechanisms import RandomizedResponse, RRWithPrior
from tf_labeldp.vault import LabelStoreError

N, K = 300, 5


def itself(x):
    return x


def as_text(x):
    return tf.strings.as_string(x)


WAYS = ("by place", "by id", "by place, one by one", "by id, one by one")


@pytest.fixture(scope="session", params=with_slow(WAYS, WAYS[2:]))
def private(request, source, mechanism):
    """The four ways in which labels are replaced."""
    if "one by one" in request.param:  # elements of no static shape cannot go in blocks
        ragged = tf.data.Dataset.from_tensor_slices(tf.ragged.range(tf.range(N) % 3))
        whole = tf.data.Dataset.zip((source, ragged)).map(lambda e, r: (*e, r))
    else:
        whole = source
    id_fn = itself if "by id" in request.param else None
    dataset = whole.apply(randomize_labels(mechanism, id_fn=id_fn))
    assert dataset.element_spec == whole.element_spec
    return dataset.map(lambda x, y, *rest: (x, y))


AFTERWARDS = {
    "shuffle": lambda d: d.shuffle(100),
    "batch": lambda d: d.batch(7),
    "shuffle, batch and prefetch": lambda d: d.shuffle(N).batch(32).prefetch(tf.data.AUTOTUNE),
    "repeat": lambda d: d.repeat(3),
    "cache": lambda d: d.cache().repeat(2),
    "parallel map": lambda d: d.map(lambda x, y: (x, y), num_parallel_calls=2),
    "shards put together": lambda d: (
        d.shard(3, 2).concatenate(d.shard(3, 0)).concatenate(d.shard(3, 1))
    ),
    "interleave": lambda d: tf.data.Dataset.range(3).interleave(
        lambda i: d.shard(3, i), cycle_length=3, num_parallel_calls=2, deterministic=False
    ),
    "skip and take": lambda d: d.skip(10).concatenate(d.take(10)),
}


def test_every_epoch_and_transform_sees_the_same_noisy_labels(private, read):
    first = read(private)
    assert set(first) == set(range(N))
    assert read(private) == first
    for name, transform in AFTERWARDS.items():
        assert read(transform(private)) == first, name


def test_two_iterators_at_once_see_the_same(private, read):
    together = tf.data.Dataset.zip((private, private.take(1).repeat())).map(lambda a, b: a)
    assert read(together) == read(private)
    one, other = private.as_numpy_iterator(), private.as_numpy_iterator()
    next(one)
    rest = [next(one) for _ in range(20)]
    assert [next(other) for _ in range(21)][1:] == rest


def test_order_and_size_are_those_of_the_source(private):
    assert [int(x) for x, _ in private] == list(range(N))


def test_a_shuffled_source_with_ids_keeps_one_label_an_example(source, mechanism, read):
    dataset = source.shuffle(N).apply(randomize_labels(mechanism, id_fn=as_text))
    orders = [[int(x) for x, _ in dataset] for _ in range(2)]
    assert orders[0] != orders[1]
    first = read(dataset)
    assert len(first) == N
    assert read(dataset.repeat(3)) == first


@pytest.mark.slow
def test_seed_repeats_the_draw_and_is_said_in_the_statement(source, mechanism, read):
    first, second = (randomize_labels(mechanism, insecure_seed=3) for _ in range(2))
    seeded = read(source.apply(first))
    assert read(source.apply(second)) == seeded
    assert read(source.apply(randomize_labels(mechanism))) != seeded
    assert not first.guarantee().is_private
    assert "seeded" in str(first.guarantee())


@pytest.mark.holds("vault.guarantee")
def test_guarantee_is_the_mechanism_s_whatever_the_number_of_epochs(source, mechanism, read):
    transform = randomize_labels(mechanism)
    read(source.apply(transform).repeat(5))
    guarantee = transform.guarantee()
    assert (guarantee.epsilon, guarantee.delta) == (1.0, 0.0)
    assert guarantee.relation == "replace_label"
    assert guarantee.is_private
    assert {"public-columns", "distinct-examples"} <= {line.code for line in guarantee.assumptions}


@pytest.mark.holds("data.randomize_labels")
def test_the_budget_is_charged_once_and_held(source, mechanism):
    transform = randomize_labels(mechanism, budget=PrivacyBudget(epsilon=1.5))
    source.apply(transform)
    with pytest.raises(BudgetExceededError):
        transform.private_labels.randomize(mechanism)
    small = randomize_labels(mechanism, budget=PrivacyBudget(epsilon=0.5))
    with pytest.raises(BudgetExceededError):
        source.apply(small)
    assert small.private_labels is None


@pytest.mark.slow
def test_a_store_returns_the_draw_without_new_randomness(tmp_path, source, mechanism, read):
    store = tmp_path / "store"
    first = read(source.apply(randomize_labels(mechanism, store=store)))
    again = randomize_labels(mechanism, store=store)
    assert read(source.apply(again)) == first
    assert again.guarantee().epsilon == 1.0
    assert len(list((store / "records").iterdir())) == 1
    with pytest.raises(LabelStoreError, match="other mechanism"):
        other = randomize_labels(RandomizedResponse(0.5, K), store=store, budget=PrivacyBudget(1.0))
        source.apply(other)
    with pytest.raises(LabelStoreError, match="other mechanism"):  # the budget is the store's
        source.apply(randomize_labels(RandomizedResponse(0.5, K), store=store))
    with pytest.raises(LabelStoreError, match=r"keeps the budget epsilon=1, .*epsilon=2, delta"):
        source.apply(randomize_labels(mechanism, store=store, budget=PrivacyBudget(2.0)))
    last = randomize_labels(mechanism, store=store)
    assert read(source.apply(last)) == first  # the refusals have changed nothing
    assert last.private_labels.guarantee().epsilon == 1.0
    assert last.noisy_labels.receipts[0].id == again.noisy_labels.receipts[0].id


def test_a_store_knows_a_shuffled_source_again(tmp_path, source, mechanism, read):
    kept = {"store": tmp_path / "store", "id_fn": as_text}
    first = read(source.shuffle(N, seed=1).apply(randomize_labels(mechanism, **kept)))
    assert read(source.shuffle(N, seed=2).apply(randomize_labels(mechanism, **kept))) == first
    assert len(list((tmp_path / "store" / "records").iterdir())) == 1


@pytest.mark.slow
@pytest.mark.parametrize("id_fn", [None, itself])
@pytest.mark.holds("data.randomize_labels")
def test_the_draw_follows_the_channel_and_not_a_nearby_one(id_fn):
    n = 20_000
    labels = np.arange(n) % 3
    source = tf.data.Dataset.from_tensor_slices((np.arange(n), labels))
    mechanism = RandomizedResponse(epsilon=1.0, num_classes=3)
    dataset = source.apply(randomize_labels(mechanism, insecure_seed=11, id_fn=id_fn))
    noisy = np.concatenate([y for _, y in dataset.batch(4096).as_numpy_iterator()])
    counts = np.zeros((3, 3))
    np.add.at(counts, (labels, noisy), 1)

    def chi_square(epsilon: float) -> float:
        channel = RandomizedResponse(epsilon, 3).transition_matrix()
        expected = channel * counts.sum(axis=1, keepdims=True)
        return float(((counts - expected) ** 2 / expected).sum())

    limit = 22.46  # chi-square, 6 degrees of freedom, 1 in 1000
    assert chi_square(1.0) < limit
    assert chi_square(0.9) > limit
    assert chi_square(1.1) > limit


def test_priors_go_with_their_examples(source, read):
    priors = np.full((N, K), 0.01 / (K - 1))
    likely = np.arange(N) % K
    priors[np.arange(N), likely] = 0.99
    transform = randomize_labels(RRWithPrior(epsilon=1.0, num_classes=K), priors=priors)
    noisy = read(source.apply(transform))  # k* = 1: the answer is the likely class, always
    assert noisy == dict(enumerate(likely.tolist()))
