"""`DenoisedQuery` meets the contract of a TF Privacy query, and denoises the noisy result."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tf_labeldp.tf_privacy import DenoisedQuery
from tf_labeldp.training import AltConv, Denoiser, NoOp, SelfConv, VertexLosses

pytestmark = pytest.mark.tf_privacy

NUM_PUBLIC, NUM_RECORDS = 16, 40


class Counting(Denoiser):
    """Adds one to every entry of the mean gradient, and counts its calls."""

    def initial_state(self, shapes: list[tuple[int, ...]]) -> Any:
        return tf.constant(0)

    def denoise(self, gradients: Any, vertices: Any, state: Any) -> Any:
        return [part + 1.0 for part in gradients], state + 1, {}


class Problem:
    """A linear model with two weight tensors, public examples and records."""

    def __init__(self) -> None:
        rng = np.random.default_rng(0)
        self.x = tf.constant(rng.normal(size=(NUM_PUBLIC, 4)), tf.float32)
        self.w = tf.Variable(rng.normal(size=(4, 3)), dtype=tf.float32)
        self.b = tf.Variable(tf.zeros([3]))
        self.records = [
            [tf.constant(rng.normal(size=v.shape), tf.float32) for v in self.variables]
            for _ in range(NUM_RECORDS)
        ]

    @property
    def variables(self) -> list[tf.Variable]:
        return [self.w, self.b]

    def logits(self) -> tf.Tensor:
        return self.x @ self.w + self.b

    def query(self, inner: Any, denoiser: Denoiser, **options: Any) -> DenoisedQuery:
        settings = {
            "losses": lambda: -tf.nn.log_softmax(self.logits()),
            "predictions": lambda: tf.nn.softmax(self.logits()),
            "variables": self.variables,
            "denominator": NUM_RECORDS,
            **options,
        }
        return DenoisedQuery(inner, denoiser, **settings)


@pytest.fixture
def problem() -> Problem:
    return Problem()


def run(query: Any, problem: Problem, state: Any = None) -> tuple[list[np.ndarray], Any, Any]:
    """One round of the protocol: clip and add the records, then the result."""
    state = query.initial_global_state() if state is None else state
    params = query.derive_sample_params(state)
    total = query.initial_sample_state(problem.variables)
    for record in problem.records:
        total = query.accumulate_record(params, total, record)
    result, state, event = query.get_noised_result(total, state)
    return [part.numpy() for part in result], state, event


def assert_same(ours: list[np.ndarray], theirs: list[np.ndarray]) -> None:
    for a, b in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


def test_the_denoiser_gets_the_mean_and_the_result_is_a_sum(tfp: Any, problem: Problem) -> None:
    inner = tfp.GaussianSumQuery(l2_norm_clip=2.0, stddev=0.0)
    expected, _, _ = run(inner, problem)
    unclipped, _, _ = run(tfp.NoPrivacySumQuery(), problem)
    assert np.abs(unclipped[0] - expected[0]).max() > 0.1  # records are clipped
    assert_same(run(problem.query(inner, NoOp()), problem)[0], expected)
    result, state, _ = run(problem.query(inner, Counting()), problem)
    assert_same(result, [part + NUM_RECORDS for part in expected])
    assert int(state.denoiser) == 1
    _, state, _ = run(problem.query(inner, Counting()), problem, state)
    assert int(state.denoiser) == 2


def test_alt_conv_denoises_as_in_label_dp_model(tfp: Any, problem: Problem) -> None:
    inner = tfp.GaussianSumQuery(l2_norm_clip=2.0, stddev=0.0)
    noisy, _, _ = run(inner, problem)
    denoiser = AltConv(num_examples=NUM_PUBLIC)
    query = problem.query(inner, denoiser)
    shapes = [tuple(v.shape) for v in problem.variables]
    mean = [tf.constant(part / NUM_RECORDS) for part in noisy]
    vertices = VertexLosses(
        lambda: -tf.nn.log_softmax(problem.logits()),
        lambda: tf.nn.softmax(problem.logits()),
        problem.variables,
    )
    expected, _, _ = denoiser.denoise(mean, vertices, denoiser.initial_state(shapes))
    found, _, _ = run(query, problem)
    assert_same(found, [part.numpy() * NUM_RECORDS for part in expected])
    assert np.abs(found[0] - noisy[0]).max() > 0.1


def test_it_works_in_a_compiled_step(tfp: Any, problem: Problem) -> None:
    query = problem.query(tfp.GaussianSumQuery(2.0, 0.0), AltConv(num_examples=NUM_PUBLIC))
    expected, _, _ = run(query, problem)
    total = [tf.add_n(parts) for parts in zip(*clipped(query, problem), strict=True)]
    state = query.initial_global_state()
    step = tf.function(lambda sums: query.get_noised_result(sums, state)[0])
    for _ in range(2):
        assert_same([part.numpy() for part in step(total)], expected)
    problem.w.assign(2.0 * problem.w)  # the public losses are computed again
    assert np.abs(step(total)[0] - expected[0]).max() > 1e-3


def clipped(query: Any, problem: Problem) -> list[Any]:
    params = query.derive_sample_params(query.initial_global_state())
    return [query.preprocess_record(params, record) for record in problem.records]


@pytest.mark.holds("tf_privacy.DenoisedQuery")
def test_the_event_is_that_of_the_query_inside(tfp: Any, problem: Problem) -> None:
    _, _, event = run(problem.query(tfp.GaussianSumQuery(2.0, 8.0), NoOp()), problem)
    assert type(event).__name__ == "GaussianDpEvent"
    assert float(event.noise_multiplier) == 4.0


def test_it_meets_the_contract_of_a_sum_query(tfp: Any, problem: Problem) -> None:
    methods = {name for name in vars(tfp.DPQuery) if not name.startswith("_")}
    assert methods <= set(vars(DenoisedQuery))
    query = problem.query(tfp.GaussianSumQuery(2.0, 0.0), NoOp())
    assert isinstance(query, tfp.DPQuery) and isinstance(query, tfp.SumAggregationDPQuery)
    sums, _, _ = run(query, problem)
    means, _, _ = run(tfp.NormalizedQuery(query, denominator=10.0), problem)
    assert_same(means, [part / 10.0 for part in sums])
    first, second = clipped(query, problem)[:2]
    added = query.accumulate_preprocessed_record(first, second)
    merged = query.merge_sample_states(first, added)
    expected = [(2 * a + b).numpy() for a, b in zip(first, second, strict=True)]
    assert_same([part.numpy() for part in merged], expected)
    assert query.derive_metrics(query.initial_global_state()) == {}


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"denoiser": SelfConv()}, ValueError, "SelfConv uses the features of the sampled batch"),
        ({"inner": "query"}, TypeError, "SumAggregationDPQuery"),
        ({"denominator": 0.0}, ValueError, "denominator"),
    ],
    ids=["reveals-batch", "inner", "denominator"],
)
def test_bad_arguments(
    tfp: Any, problem: Problem, change: dict[str, Any], error: type[Exception], message: str
) -> None:
    settings = {"inner": tfp.GaussianSumQuery(2.0, 0.0), "denoiser": NoOp(), **change}
    with pytest.raises(error, match=message):
        problem.query(**settings)


def test_records_unlike_the_variables_are_refused(tfp: Any, problem: Problem) -> None:
    query = problem.query(tfp.GaussianSumQuery(2.0, 0.0), NoOp())
    with pytest.raises(ValueError, match="expected records with the shapes of the variables"):
        query.get_noised_result([tf.zeros([3]), tf.zeros([4, 3])], query.initial_global_state())
