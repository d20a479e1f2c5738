"""`QueryNoise`: the noise is the query's, and nothing is promised that does not hold."""

from __future__ import annotations

import itertools
import math
from typing import Any

import dp_accounting
import numpy as np
import pytest
import scipy.stats
import tensorflow as tf
from tensorflow.python.eager import context

from tf_labeldp.tf_privacy import QueryNoise

pytestmark = pytest.mark.tf_privacy

SHAPES = [(2, 3), (4,), ()]
ZEROS = [np.zeros(shape, np.float32) for shape in SHAPES]
TREES = ["TreeResidualSumQuery", "TreeCumulativeSumQuery"]


@pytest.fixture(autouse=True)
def no_global_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a process that has set no seed: other tests may have."""
    monkeypatch.setattr(context.context(), "_seed", None)


def tree(tfp: Any, kind: str = TREES[0], clip: float = 1.0, **options: Any) -> Any:
    specs = [tf.TensorSpec(shape) for shape in SHAPES]
    return getattr(tfp, kind).build_l2_gaussian_query(
        clip, options.pop("noise_multiplier", 4.0), specs, **options
    )


def flat(parts: Any) -> np.ndarray:
    return np.concatenate([np.ravel(part) for part in parts])


def steps_of(noise: QueryNoise, count: int, sums: Any = ZEROS) -> np.ndarray:
    """Noisy sums of some steps of one compiled function."""
    step = tf.function(
        lambda: noise.add_noise([tf.constant(part) for part in sums], noise.l2_norm_clip, ())[0]
    )
    return np.stack([flat(step()) for _ in range(count)])


def test_gaussian_noise_has_the_standard_deviation_of_the_query(tfp: Any) -> None:
    noise = QueryNoise(tfp.GaussianSumQuery(l2_norm_clip=0.5, stddev=2.0))
    assert noise.noise_multiplier == 4.0
    drawn = steps_of(noise, 400)
    assert len(np.unique(drawn)) > 0.99 * drawn.size  # each step has its own
    squares, size = np.sum((drawn / 2.0) ** 2), drawn.size
    low, high = scipy.stats.chi2.ppf([1e-9, 1 - 1e-9], size)
    assert low < squares < high
    assert not low < squares * 1.3**2 < high  # noise of another size is rejected


@pytest.mark.parametrize(("kind", "efficient"), [(TREES[0], True), (TREES[1], False)])
@pytest.mark.holds("tf_privacy.QueryNoise")
def test_tree_noise_is_that_of_the_residual_query(tfp: Any, kind: str, efficient: bool) -> None:
    noise = QueryNoise(tree(tfp, kind, noise_seed=7, use_efficient=efficient))
    drawn = steps_of(noise, 11)
    query = tree(tfp, noise_seed=7, use_efficient=efficient)
    state, expected = query.initial_global_state(), []
    for _ in range(11):
        result, state, _ = query.get_noised_result([tf.constant(z) for z in ZEROS], state)
        expected.append(flat(result))
    np.testing.assert_allclose(drawn, expected, rtol=0, atol=1e-5)
    assert np.abs(drawn[1:] - drawn[:-1]).min() > 1e-5


def test_noise_is_added_to_the_sum(tfp: Any) -> None:
    sums = [np.full(shape, 1000.0, np.float32) for shape in SHAPES]
    noise = QueryNoise(tree(tfp, noise_seed=3))
    other = QueryNoise(tree(tfp, noise_seed=3))
    np.testing.assert_allclose(steps_of(noise, 3, sums) - 1000.0, steps_of(other, 3), atol=1e-3)


def test_a_tree_is_not_seeded_from_the_clock(tfp: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tf, "timestamp", lambda: tf.constant(1.5e9, tf.float64))
    first, second = (steps_of(QueryNoise(tree(tfp)), 1) for _ in range(2))
    assert np.abs(first - second).min() > 1e-6
    clock = [flat(tree(tfp).get_noised_result(ZEROS, tree(tfp).initial_global_state())[0])] * 2
    np.testing.assert_array_equal(*clock)  # the query alone would be


def test_a_statement_of_seeded_noise_says_so(tfp: Any) -> None:
    assert QueryNoise(tree(tfp, noise_seed=1)).seeded
    assert QueryNoise(tree(tfp, noise_seed=1)).single_pass_guarantee(1e-5, steps=3).seeded
    assert not QueryNoise(tree(tfp)).seeded
    gaussian = QueryNoise(tfp.GaussianSumQuery(1.0, 1.0))
    assert not gaussian.seeded
    tf.random.set_seed(5)
    assert gaussian.seeded
    assert not QueryNoise(tree(tfp)).seeded  # a tree does not look at it


def test_noise_that_was_seeded_once_stays_seeded(tfp: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    noise = QueryNoise(tfp.GaussianSumQuery(1.0, 1.0))
    tf.random.set_seed(5)
    steps_of(noise, 1)
    monkeypatch.setattr(context.context(), "_seed", None)
    assert noise.seeded


def test_statements_say_whose_random_numbers_they_are(tfp: Any) -> None:
    [text] = QueryNoise(tfp.GaussianSumQuery(1.0, 1.0)).assumptions()
    assert "TensorFlow" in text and "not the operating system's" in text
    [text] = QueryNoise(tree(tfp)).assumptions()
    assert "TensorFlow" in text and "not a cryptographic" in text and "106 bits" in text
    assert "noise_seed" in QueryNoise(tree(tfp, noise_seed=1)).assumptions()[0]


@pytest.mark.holds("tf_privacy.QueryNoise")
def test_a_gaussian_query_has_the_event_of_dp_sgd(tfp: Any) -> None:
    noise = QueryNoise(tfp.GaussianSumQuery(l2_norm_clip=0.5, stddev=2.0))
    accountant = dp_accounting.pld.PLDAccountant(dp_accounting.NeighboringRelation.REPLACE_ONE)
    by_hand = dp_accounting.pld.PLDAccountant(dp_accounting.NeighboringRelation.REPLACE_ONE)
    accountant.compose(noise.dp_event(0.01, 50))
    event = dp_accounting.PoissonSampledDpEvent(0.01, dp_accounting.GaussianDpEvent(4.0))
    by_hand.compose(event, 50)
    assert accountant.get_epsilon(1e-5) == pytest.approx(by_hand.get_epsilon(1e-5), rel=1e-6)


def test_no_steps_of_a_tree_have_an_event(tfp: Any) -> None:
    for kind, (probability, steps) in itertools.product(TREES, ((0.01, 50), (1.0, 1))):
        assert QueryNoise(tree(tfp, kind)).dp_event(probability, steps) is None


@pytest.mark.parametrize("steps", [1, 3, 1024])
def test_a_single_pass_agrees_with_dp_accounting(tfp: Any, steps: int) -> None:
    # Its relation replaces a record by zero, which moves a sum by C; replacement by 2 C.
    accountant = dp_accounting.rdp.RdpAccountant(
        orders=np.linspace(1.05, 200.0, 4000),
        neighboring_relation=dp_accounting.NeighboringRelation.REPLACE_SPECIAL,
    )
    accountant.compose(dp_accounting.SingleEpochTreeAggregationDpEvent(30.0 / 2.0, steps))
    upper = accountant.get_epsilon(1e-5)
    guarantee = QueryNoise(tree(tfp, noise_multiplier=30.0)).single_pass_guarantee(
        1e-5, steps=steps
    )
    # Renyi DP is an upper bound: for a Gaussian at this delta less than a quarter too large.
    assert 0.8 * upper < guarantee.epsilon < upper
    assert guarantee.relation == "replace_label" and guarantee.delta == 1e-5


@pytest.mark.parametrize(
    ("steps", "efficient"), [(1, True), (3, False), (7, True), (8, False), (13, True)]
)
@pytest.mark.holds("tf_privacy.QueryNoise.single_pass_guarantee")
def test_a_single_pass_promises_no_more_than_the_covariance_of_the_noise(
    tfp: Any, efficient: bool, steps: int
) -> None:
    # The sums after each step have noise L z, where z is that of the nodes. One example moves them
    # by the column a of its step, times 2 C: a Gaussian mechanism of squared sensitivity
    # a' (L L')^-1 a, which may not exceed the number of nodes m that the statement counts.
    from tensorflow_privacy.privacy.dp_query import tree_aggregation

    width = 2 * steps
    kind = "EfficientTreeAggregator" if efficient else "TreeAggregator"

    class OneHot(tree_aggregation.ValueGenerator):
        def initialize(self) -> Any:
            return tf.constant(0)

        def next(self, state: Any) -> Any:
            return tf.one_hot(state, width), state + 1

    aggregator = getattr(tree_aggregation, kind)(OneHot())
    state, rows = aggregator.init_state(), []
    for _ in range(steps):
        row, state = aggregator.get_cumsum_and_update(state)
        rows.append(row.numpy().astype(np.float64))
    noise = np.stack(rows)
    moved = np.tril(np.ones((steps, steps)))
    squared = np.diag(moved.T @ np.linalg.solve(noise @ noise.T, moved)).max()
    promised = QueryNoise(tree(tfp)).single_pass_guarantee(1e-5, steps=steps).epsilon
    nodes = math.ceil(math.log2(steps + 1))
    assert squared <= nodes * (1 + 1e-5)
    assert promised == pytest.approx(epsilon_of(2.0 * math.sqrt(nodes) / 4.0))
    if steps > 1:  # one node alone would promise too much
        assert squared > 1.2 and epsilon_of(2.0 / 4.0) < epsilon_of(2.0 * math.sqrt(squared) / 4.0)


def epsilon_of(distance: float) -> float:
    """Epsilon at delta 1e-5 of a Gaussian moved by this many standard deviations."""
    from scipy.optimize import brentq

    def excess(epsilon: float) -> float:
        a, b = epsilon / distance - distance / 2, epsilon / distance + distance / 2
        return scipy.stats.norm.sf(a) - math.exp(epsilon) * scipy.stats.norm.sf(b) - 1e-5

    return brentq(excess, 1e-6, 50.0, xtol=1e-12)


def test_a_single_pass_counts_the_steps_that_were_taken(tfp: Any) -> None:
    noise = QueryNoise(tree(tfp))
    assert noise.single_pass_guarantee(1e-5).epsilon == 0.0
    steps_of(noise, 5)
    taken = noise.single_pass_guarantee(1e-5)
    assert taken.epsilon == noise.single_pass_guarantee(1e-5, steps=5).epsilon > 0.0
    assert "two of the 5 steps" in taken.assumptions[0]
    with pytest.raises(ValueError, match=r"steps=4, but noise has been added to 5 steps"):
        noise.single_pass_guarantee(1e-5, steps=4)
    with pytest.raises(ValueError, match=r"accounted step by step"):
        QueryNoise(tfp.GaussianSumQuery(1.0, 1.0)).single_pass_guarantee(1e-5)


@pytest.mark.parametrize("kind", ["GaussianSumQuery", *TREES])
def test_the_configuration_makes_the_same_noise(tfp: Any, kind: str) -> None:
    if kind == "GaussianSumQuery":
        noise = QueryNoise(tfp.GaussianSumQuery(0.3, 0.7))
    else:
        options = {"noise_multiplier": 0.7, "noise_seed": 2, "use_efficient": False}
        noise = QueryNoise(tree(tfp, kind, clip=0.3, **options))
    again = QueryNoise.from_config(noise.get_config())
    assert again.get_config() == noise.get_config()
    assert again.noise_multiplier == noise.noise_multiplier
    assert type(again.query) is type(noise.query)
    if kind != "GaussianSumQuery":
        np.testing.assert_array_equal(steps_of(again, 3), steps_of(noise, 3))


def test_another_clip_than_the_optimizers_is_refused(tfp: Any) -> None:
    noise = QueryNoise(tfp.GaussianSumQuery(1.0, 4.0))
    with pytest.raises(ValueError, match=r"l2_norm_clip=1\.1, the query is for 1\."):
        noise.add_noise([tf.zeros([2])], 1.1, ())


def test_a_tree_for_other_variables_is_refused(tfp: Any) -> None:
    with pytest.raises(ValueError, match=r"record_specs"):
        QueryNoise(tree(tfp)).add_noise([tf.zeros([2])], 1.0, ())


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda tfp: tfp.GaussianSumQuery(1.0, 0.0), ValueError, "noise multiplier"),
        (lambda tfp: tree(tfp, noise_multiplier=0.0), ValueError, "noise multiplier"),
        (lambda tfp: tfp.NoPrivacySumQuery(), TypeError, "got NoPrivacySumQuery"),
        (
            lambda tfp: tfp.TreeResidualSumQuery([], lambda: [], lambda *a: a, 1.0),
            TypeError,
            "build_l2_gaussian_query",
        ),
    ],
    ids=["no-noise", "no-tree-noise", "no-privacy", "unknown-noise"],
)
def test_a_query_that_promises_nothing_is_refused(
    tfp: Any, make: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        QueryNoise(make(tfp))
