"""The rules of single layers against automatic differentiation, one group at a time."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import tensorflow as tf

from tf_labeldp.gradients._layer_rules import (
    DepthwiseRule,
    GroupedRule,
    LookupRule,
    ProductRule,
    Rule,
    ScaleRule,
    Taps,
    Window,
)

BATCH = 6


def convolution(window: Window) -> Callable[..., tf.Tensor]:
    @tf.function(jit_compile=True)  # uncompiled, grouped ones have no kernels on some CPUs
    def layer(inputs, kernel, bias):
        padded = tf.pad(inputs, [(0, 0), *window.padding, (0, 0)])
        return bias + tf.nn.convolution(
            padded,
            kernel,
            strides=window.strides,
            padding="VALID",
            dilations=window.dilations,
            data_format=("NWC", "NHWC", "NDHWC")[len(window.size) - 1],  # Conv3D has no default
        )

    return layer


def depthwise(window: Window) -> Callable[..., tf.Tensor]:
    def layer(inputs, kernel, bias):
        padded = tf.pad(inputs, [(0, 0), *window.padding, (0, 0)])
        return bias + tf.nn.depthwise_conv2d(
            padded, kernel, (1, *window.strides, 1), "VALID", dilations=window.dilations
        )

    return layer


PLANE = Window((3, 2), (2, 1), (1, 1), ((1, 1), (0, 1)))
HOLES = Window((2, 2), (1, 1), (2, 2), ((0, 0), (0, 0)))

# Name: rule, layer (inputs, *weights) -> outputs, shape of one input, shapes of the weights.
CASES = {
    "dense": (ProductRule((5, 3), True, True), lambda a, w, b: a @ w + b, (5,), ((5, 3), (3,))),
    "dense over time": (
        ProductRule((5, 3), True, True),
        lambda a, w, b: tf.einsum("btp,pq->btq", a, w) + b,
        (7, 5),
        ((5, 3), (3,)),
    ),
    "plane": (
        ProductRule((3, 2, 2, 4), True, True, PLANE),
        convolution(PLANE),
        (6, 5, 2),
        ((3, 2, 2, 4), (4,)),
    ),
    "depthwise with holes": (
        DepthwiseRule((2, 2, 3, 1), True, True, HOLES, channel_groups=3),
        depthwise(HOLES),
        (6, 5, 3),
        ((2, 2, 3, 1), (3,)),
    ),
    "grouped plane": (
        GroupedRule((3, 2, 2, 6), True, True, PLANE, channel_groups=2),
        convolution(PLANE),
        (6, 5, 4),
        ((3, 2, 2, 6), (6,)),
    ),
    "scale of a middle axis": (
        ScaleRule((3,), (1,), True, True),
        lambda a, s, o: a * s[:, tf.newaxis] + o[:, tf.newaxis],
        (3, 4),
        ((3,), (3,)),
    ),
    "lookup": (LookupRule(5, 3), lambda a, w: tf.gather(w, a), (8,), ((5, 3),)),
    "lookup of single indices": (LookupRule(5, 3), lambda a, w: tf.gather(w, a), (), ((5, 3),)),
}


def example(name: str, seed: int = 0) -> tuple[Rule, tf.Tensor, tf.Tensor, list[np.ndarray]]:
    """A rule, inputs, output gradients and the gradients of each row by autodiff."""
    rule, layer, shape, weight_shapes = CASES[name]
    rng = np.random.default_rng(seed)
    if isinstance(rule, LookupRule):
        inputs = tf.constant(rng.integers(rule.num_rows, size=(BATCH, *shape)))
    else:
        inputs = tf.constant(rng.normal(size=(BATCH, *shape)), tf.float32)
    weights = [tf.constant(rng.normal(size=size), tf.float32) for size in weight_shapes]
    gradients = tf.constant(rng.normal(size=layer(inputs, *weights).shape), tf.float32)
    rows: list[list[np.ndarray]] = []
    for row in range(BATCH):
        with tf.GradientTape() as tape:
            tape.watch(weights)
            outputs = layer(inputs[row : row + 1], *weights)
        found = tape.gradient(outputs, weights, output_gradients=gradients[row : row + 1])
        rows.append([tf.convert_to_tensor(gradient).numpy() for gradient in found])
    return rule, inputs, gradients, [np.stack(parts) for parts in zip(*rows, strict=True)]


def by_group(rows: np.ndarray, group_size: int) -> np.ndarray:
    return rows.reshape(-1, group_size, *rows.shape[1:]).sum(axis=1)


@pytest.mark.parametrize("name", CASES)
def test_gradients_are_those_of_autodiff(name: str):
    rule, inputs, gradients, rows = example(name)
    assert rule.num_weights == sum(part[0].size for part in rows)
    for group_size in (1, 2):
        found = rule.gradients(Taps(inputs, gradients, group_size))
        for got, expected in zip(found, rows, strict=True):
            np.testing.assert_allclose(got, by_group(expected, group_size), rtol=1e-5, atol=1e-5)
    for got, expected in zip(rule.sum(Taps(inputs, gradients)), rows, strict=True):
        np.testing.assert_allclose(got, expected.sum(axis=0), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "name", ["dense", "dense over time", "plane", "lookup", "lookup of single indices"]
)
def test_norms_without_gradients_are_those_of_the_gradients(name: str):
    rule, inputs, gradients, rows = example(name)
    for group_size in (1, 3):
        assert rule.norm_bytes(Taps(inputs, gradients, group_size)) is not None
        norms = rule.squared_norms(Taps(inputs, gradients, group_size))
        grouped = [by_group(part, group_size).reshape(BATCH // group_size, -1) for part in rows]
        expected = np.square(np.concatenate(grouped, axis=1)).sum(axis=1)
        np.testing.assert_allclose(norms, expected, rtol=2e-5)


@pytest.mark.parametrize(("has_kernel", "has_bias"), [(True, False), (False, True)])
def test_frozen_weights_are_left_out(has_kernel: bool, has_bias: bool):
    full, inputs, gradients, rows = example("plane")
    rule = ProductRule(full.kernel_shape, has_kernel, has_bias, full.window)
    expected = rows[0 if has_kernel else 1]
    assert rule.num_weights == expected[0].size
    (found,) = rule.gradients(Taps(inputs, gradients, 1))
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)
    squares = np.square(expected.reshape(BATCH, -1)).sum(axis=1)
    np.testing.assert_allclose(rule.squared_norms(Taps(inputs, gradients, 1)), squares, rtol=2e-5)


def test_an_index_that_comes_twice_counts_as_one_row():
    rule = LookupRule(3, 1)
    indices = tf.constant([[2, 0, 2]])
    gradients = tf.constant([[[1.0], [10.0], [2.0]]])
    # (1 + 2)^2 + 10^2; taken apart they would be 1 + 4 + 100.
    np.testing.assert_allclose(rule.squared_norms(Taps(indices, gradients, 1)), [109.0])


def test_privacy_norms_are_not_underestimated_where_positions_cancel():
    rng = np.random.default_rng(0)
    groups, positions, width = 200, 64, 8
    inputs = np.repeat(rng.normal(size=(groups, 1, width)), positions, axis=1)
    inputs = np.float32(inputs + 1e-5 * rng.normal(size=inputs.shape))
    signs = np.where(np.arange(positions) % 2, 1.0, -1.0)[:, np.newaxis]
    gradients = np.float32(signs * rng.normal(size=(groups, 1, width)))
    exact = np.einsum("ntp,ntq->npq", np.float64(inputs), np.float64(gradients))
    exact = np.square(exact).sum(axis=(1, 2))
    rule = ProductRule((width, width), True, False)
    found = rule.squared_norms(Taps(tf.constant(inputs), tf.constant(gradients), 1)).numpy()
    assert np.all(found >= exact * (1 - 1e-6))
    # Without rounding up they are: the sum of products alone falls short.
    gram = np.einsum("ntp,nsp->nts", inputs, inputs) * np.einsum(
        "ntp,nsp->nts", gradients, gradients
    )
    assert np.any(gram.sum(axis=(1, 2)) < exact * (1 - 1e-6))


def test_norms_of_wide_inputs_that_cancel_are_not_too_small():
    rng = np.random.default_rng(0)
    inputs = (1e4 + rng.standard_normal((16, 2, 16384))).astype("f")
    gradients = rng.integers(-16, 17, (16, 2, 4)).astype("f") / 16
    gradients[:, -1] -= gradients.sum(axis=1)  # positions cancel, up to the inputs' differences
    rule = ProductRule((16384, 4), True, False)
    squares = rule.squared_norms(Taps(tf.constant(inputs), tf.constant(gradients), 1)).numpy()
    exact = np.einsum("btd,bte->bde", inputs.astype(np.float64), gradients.astype(np.float64))
    exact_squares = np.sum(exact**2, axis=(1, 2))
    assert np.all(squares >= exact_squares * (1 - 1e-6))
    np.testing.assert_allclose(squares, exact_squares, rtol=2e-3)  # the error bound is added
