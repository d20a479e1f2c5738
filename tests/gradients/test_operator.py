"""Products with the matrix of gradients against the matrix itself."""

from __future__ import annotations

import re

import keras
import numpy as np
import pytest
import tensorflow as tf

from tf_labeldp.gradients import GradientOperator

KINDS = ("dense", "conv", "max_pool_norm", "embedding", "two_inputs")
SHAPES = ((5, 3), (1, 4), (3, 2))


@pytest.mark.parametrize("products", ["double_backward", "forward"])
@pytest.mark.parametrize("kind", KINDS)
def test_products_are_those_of_the_matrix(kind, products, case_of, flat, like_variables):
    for n, labels in SHAPES:
        case = case_of(kind, n, labels)
        matrix, operator = case.matrix(), case.operator(products=products)
        rng = np.random.default_rng(0)
        u, v = rng.normal(size=(n, labels)), rng.normal(size=matrix.shape[0])
        assert operator.shape == matrix.shape
        assert operator.coefficients_shape == (n, labels)
        np.testing.assert_allclose(flat(operator.matvec(u)), matrix @ u.ravel(), atol=1e-10)
        product = operator.rmatvec(like_variables(case, v))
        assert product.shape == (n, labels)
        np.testing.assert_allclose(np.ravel(product), v @ matrix, atol=1e-10)


@pytest.mark.parametrize("jit_compile", [False, True], ids=["graph", "xla"])
@pytest.mark.parametrize("kind", [*KINDS, "unrolled"])
def test_all_kinds_of_products_are_equal_in_a_program(
    kind, jit_compile, case_of, flat, like_variables
):
    case = case_of(kind, dtype="float32")
    rng = np.random.default_rng(1)
    u = tf.constant(rng.normal(size=(5, 3)), tf.float32)
    v = like_variables(case, rng.normal(size=case.operator().shape[0]))

    @tf.function(jit_compile=jit_compile)
    def both(products):
        operator = case.operator(products=products)

        def step(i, parts, _):
            product = operator.rmatvec(parts)
            return i + 1, operator.matvec(u * product), product

        return tf.while_loop(lambda i, *_: i < 2, step, (0, v, tf.zeros_like(u)))[1:]

    (parts, product), (other_parts, other_product) = map(both, ("double_backward", "forward"))
    for one, other in ((flat(parts), flat(other_parts)), (product, other_product)):
        np.testing.assert_allclose(one, other, rtol=1e-3, atol=1e-4 * np.abs(one).max())


def test_loops_in_a_model_need_double_backward(case_of, like_variables, flat):
    case = case_of("recurrent", dtype="float32")
    matrix = case.matrix()
    v = np.random.default_rng(0).normal(size=matrix.shape[0])
    product = tf.function(
        lambda products: case.operator(products=products).rmatvec(like_variables(case, v))
    )
    np.testing.assert_allclose(np.ravel(product("double_backward")), v @ matrix, atol=1e-4)
    with pytest.raises(ValueError, match=r"forward mode cannot pass.*products='double_backward'"):
        product("forward")


@pytest.mark.parametrize("products", ["double_backward", "forward"])
def test_products_inside_a_while_loop(products, case_of, flat):
    case = case_of("conv")
    gram = case.matrix().T @ case.matrix()
    traces = []

    @tf.function
    def power(u):
        traces.append(None)
        operator = case.operator(products=products)

        def step(i, u):
            u = operator.rmatvec(operator.matvec(u))
            return i + 1, u / tf.norm(u)

        return tf.while_loop(lambda i, _: i < 3, step, (0, u))[1]

    for seed in range(2):
        u = np.random.default_rng(seed).normal(size=(5, 3))
        expected = u.ravel()
        for _ in range(3):
            expected = gram @ expected
            expected /= np.linalg.norm(expected)
        np.testing.assert_allclose(np.ravel(power(tf.constant(u))), expected, atol=1e-9)
    assert len(traces) == 1


def test_an_operator_made_in_a_graph_sees_the_variables_of_the_call(case_of, flat):
    weights = tf.Variable([[1.0, -1.0]])
    x = tf.constant([[2.0]])

    @tf.function
    def gradient():
        operator = GradientOperator(lambda: tf.square(x @ weights), [weights])
        return operator.matvec(tf.ones([1, 2]))

    np.testing.assert_allclose(gradient()[0], [[8.0, -8.0]])
    weights.assign([[3.0, 0.0]])
    np.testing.assert_allclose(gradient()[0], [[24.0, 0.0]])


def test_the_model_is_evaluated_once_by_default():
    calls = []
    weights = tf.Variable([[1.0, 2.0]])

    def losses():
        calls.append(None)
        return tf.square(tf.ones([3, 1]) @ weights)

    operator = GradientOperator(losses, [weights])
    for _ in range(4):
        operator.rmatvec(operator.matvec(tf.ones([3, 2])))
    assert len(calls) == 1


def test_losses_made_of_outputs_of_other_shapes(flat):
    """A model with two heads of two classes, output (n, 2, 2): four losses an example."""
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.layers.Dense(4), keras.layers.Reshape([2, 2])])
    x = tf.random.stateless_normal([3, 5], [0, 1])
    model(x)
    variables = model.trainable_variables
    operator = GradientOperator(
        lambda: tf.reshape(-tf.nn.log_softmax(model(x), axis=2), [3, 4]), variables
    )
    u = tf.random.stateless_normal([3, 4], [0, 2])
    with tf.GradientTape() as tape:
        logits = model(x)
        total = tf.reduce_sum(-tf.nn.log_softmax(logits, axis=2) * tf.reshape(u, [3, 2, 2]))
    np.testing.assert_allclose(
        flat(operator.matvec(u)), flat(tape.gradient(total, variables)), atol=1e-5
    )


def test_variables_that_the_losses_do_not_use_get_zeros():
    used, unused = tf.Variable([[1.0, 2.0]]), tf.Variable([5.0])
    for products in ("double_backward", "forward"):
        operator = GradientOperator(
            lambda: tf.ones([2, 1]) @ used, [used, unused], products=products
        )
        assert operator.shape == (3, 4)
        np.testing.assert_array_equal(operator.matvec(tf.ones([2, 2]))[1], [0.0])
        product = operator.rmatvec([tf.zeros([1, 2]), tf.ones([1])])
        np.testing.assert_array_equal(product, np.zeros([2, 2]))


def test_half_precision_losses_take_and_give_float32():
    weights = tf.Variable([[1.0, 2.0]])
    operator = GradientOperator(lambda: tf.cast(tf.ones([2, 1]) @ weights, tf.float16), [weights])
    assert operator.dtype == tf.float32
    assert operator.matvec(tf.ones([2, 2]))[0].dtype == tf.float32
    assert operator.rmatvec([tf.ones([1, 2])]).dtype == tf.float32


@pytest.mark.parametrize("products", ["double_backward", "forward"])
@pytest.mark.parametrize("shape", [(5, 3), (5, 1), (1, 3), ()], ids=str)
def test_scales_are_factors_on_the_columns(shape, products, case_of, flat, like_variables):
    case = case_of("dense")
    scales = np.random.default_rng(0).uniform(0.5, 2.0, shape)
    matrix = case.matrix() * np.broadcast_to(scales, (5, 3)).ravel()
    u, v = np.ones((5, 3)), np.ones(matrix.shape[0])
    given = case.operator(scales=scales, products=products)
    later = case.operator(products=products).scaled(scales)
    twice = later.scaled(2.0)
    for operator, factor in ((given, 1.0), (later, 1.0), (twice, 2.0)):
        np.testing.assert_allclose(flat(operator.matvec(u)), factor * matrix.sum(1), atol=1e-10)
        product = operator.rmatvec(like_variables(case, v))
        np.testing.assert_allclose(np.ravel(product), factor * matrix.sum(0), atol=1e-10)


W = tf.Variable([[1.0, 2.0]])


@pytest.mark.parametrize(
    ("losses", "variables", "kwargs", "error", "message"),
    [
        (3, [W], {}, TypeError, "must be a callable, got int"),
        (lambda: W, [], {}, ValueError, "variables must not be empty"),
        (lambda: W[0], [W], {}, ValueError, "fixed shape (n, K), got (2,)"),
        (lambda: tf.cast(W, tf.int32), [W], {}, TypeError, "floats, got int32"),
        (lambda: W, [W], {"scales": tf.ones([3, 1])}, ValueError, "got (3, 1)"),
        (lambda: W, [W], {"scales": tf.ones([1, 1, 2])}, ValueError, "shape (1, 2)"),
        (lambda: W, [W], {"products": "fast"}, ValueError, "double_backward, forward, got 'fast'"),
    ],
    ids=["callable", "empty", "rank", "dtype", "scales", "scales_rank", "products"],
)
def test_bad_arguments(losses, variables, kwargs, error, message):
    with pytest.raises(error, match=re.escape(message)):
        GradientOperator(losses, variables, **kwargs)


def test_losses_for_a_batch_of_unknown_size_are_refused():
    @tf.function(input_signature=[tf.TensorSpec([None, 1])])
    def product(x):
        return GradientOperator(lambda: x @ W, [W]).matvec(tf.ones([1, 2]))

    with pytest.raises(ValueError, match="pad them, and give a mask"):
        product(tf.ones([2, 1]))
