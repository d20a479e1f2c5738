"""Products with the matrix of gradients against the matrix itself."""

from __future__ import annotations

import itertools
import re

import numpy as np
import pytest
import tensorflow as tf

from tf_labeldp.gradients import GradientOperator

KINDS = ("dense", "conv", "embedding", "two_inputs")
SHAPES = ((5, 3), (1, 4))


@pytest.mark.parametrize("kind", KINDS)
def test_products_are_those_of_the_matrix(kind, case_of, flat, like_variables):
    for products, (n, labels) in itertools.product(("double_backward", "forward"), SHAPES):
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


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "jit_compile"), [("conv", True), ("unrolled", False)])
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
    for first, second in ((flat(parts), flat(other_parts)), (product, other_product)):
        np.testing.assert_allclose(first, second, rtol=1e-3, atol=1e-4 * np.abs(first).max())


@pytest.mark.slow
def test_loops_in_a_model_need_double_backward(case_of, like_variables, flat):
    case = case_of("recurrent", dtype="float32")
    matrix = case.matrix()
    v = np.random.default_rng(0).normal(size=matrix.shape[0])
    product = tf.function(
        lambda products: case.operator(products=products).rmatvec(like_variables(case, v))
    )
    np.testing.assert_allclose(np.ravel(product("double_backward")), v @ matrix, atol=1e-4)
    with pytest.raises(ValueError, match=r"forward mode fails.*products='double_backward'"):
        product("forward")


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


@pytest.mark.parametrize(
    ("shape", "products"),
    [((5, 3), "double_backward"), ((5, 1), "forward"), ((), "double_backward")],
    ids=str,
)
def test_scales_are_factors_on_the_columns(shape, products, case_of, flat, like_variables):
    case = case_of("dense")
    scales = np.random.default_rng(0).uniform(0.5, 2.0, shape)
    matrix = case.matrix() * np.broadcast_to(scales, (5, 3)).ravel()
    u, v = np.ones((5, 3)), np.ones(matrix.shape[0])
    operator = case.operator(scales=scales, products=products)
    np.testing.assert_allclose(flat(operator.matvec(u)), matrix.sum(1), atol=1e-10)
    product = operator.rmatvec(like_variables(case, v))
    np.testing.assert_allclose(np.ravel(product), matrix.sum(0), atol=1e-10)


W = tf.Variable([[1.0, 2.0]])


@pytest.mark.parametrize(
    ("losses", "variables", "kwargs", "error", "message"),
    [
        (lambda: W, [], {}, ValueError, "variables must not be empty"),
        (lambda: W[0], [W], {}, ValueError, "fixed shape (n, K), got (2,)"),
        (lambda: tf.cast(W, tf.int32), [W], {}, TypeError, "floats, got int32"),
        (lambda: W, [W], {"products": "fast"}, ValueError, "double_backward, forward, got 'fast'"),
    ],
)
def test_bad_arguments(losses, variables, kwargs, error, message):
    with pytest.raises(error, match=re.escape(message)):
        GradientOperator(losses, variables, **kwargs)


def test_losses_for_a_batch_of_unknown_size_are_refused():
    @tf.function(input_signature=[tf.TensorSpec([None, 1])])
    def product(x):
        return GradientOperator(lambda: x @ W, [W]).matvec(tf.ones([1, 2]))

    with pytest.raises(ValueError, match="Pad batches to one size, and give a mask"):
        product(tf.ones([2, 1]))
