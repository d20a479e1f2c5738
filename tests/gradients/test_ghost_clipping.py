"""Clipped sums of calls of layers: schedules, memory and examples without a finite gradient."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

# The schedule of memory and the norms of one layer, which no sum of a model shows.
from tf_labeldp.gradients._layer_rules import LookupRule, ProductRule, Taps
from tf_labeldp.gradients.ghost_clipping import LayerCall, clipped_sums, make_schedules
from tf_labeldp.plugins import Batch, Clip

BATCH = 10
NO_BATCH = Batch(None, None, None, None)


def calls(group_size: int = 1) -> list[LayerCall]:
    """Returns a dense layer over time with large gradients, a small one and a table."""
    rng = np.random.default_rng(1)

    def normal(*shape: int) -> tf.Tensor:
        return tf.constant(rng.normal(size=(BATCH, *shape)), tf.float32)

    def tapped(inputs: tf.Tensor, output_gradients: tf.Tensor) -> Taps:
        return Taps(inputs, output_gradients, group_size)

    return [
        LayerCall("wide", ProductRule((30, 20), True, True), tapped(normal(3, 30), normal(3, 20))),
        LayerCall("small", ProductRule((2, 3), True, True), tapped(normal(9, 2), normal(9, 3))),
        LayerCall(
            "table",
            LookupRule(50, 3),
            tapped(tf.constant(rng.integers(50, size=(BATCH, 6))), normal(6, 3)),
        ),
    ]


def expected(group_size: int, share: float = 0.5) -> tuple[list[np.ndarray], np.ndarray, float]:
    """Returns clipped sums, norms and the clip that ``share`` of the groups satisfies."""
    parts = [
        gradient.numpy().astype(np.float64)
        for call in calls(group_size)
        for gradient in call.rule.gradients(call.taps)
    ]
    norms = np.sqrt(sum(np.square(part.reshape(part.shape[0], -1)).sum(axis=1) for part in parts))
    clip = float(np.float32(np.quantile(norms, share)))
    factors = np.minimum(1.0, clip / norms)
    return [np.tensordot(factors, part, 1) for part in parts], norms, clip


def sums_of(layers: list[LayerCall], clip: Clip, max_bytes: int):
    return clipped_sums(layers, lambda norms: clip.coefficients(norms, NO_BATCH, None), max_bytes)


def flat(layers: list[list[tf.Tensor]]) -> list[np.ndarray]:
    return [part.numpy() for layer in layers for part in layer]


@pytest.mark.parametrize(
    ("max_bytes", "group_size"), [(2_600, 1), (2_500, 2), (20_000, 5), (10**9, 2)]
)
def test_memory_changes_nothing_but_the_schedule(max_bytes: int, group_size: int):
    sums, norms, clip = expected(group_size)
    found, found_norms = sums_of(calls(group_size), Clip(clip, group_size), max_bytes)
    np.testing.assert_allclose(found_norms, norms, rtol=1e-5)
    for got, part in zip(flat(found), sums, strict=True):
        np.testing.assert_allclose(got, part, rtol=1e-5, atol=1e-5 * clip)


def test_the_schedule_follows_memory():
    wide, small, table = make_schedules(calls(), 10**9)
    assert wide.ghost and not wide.keep  # 2 * 3^2 numbers instead of 620
    assert small.keep
    assert table.ghost and not table.keep
    wide, small, table = make_schedules(calls(), 250)
    assert not any(schedule.keep for schedule in (wide, small, table))
    assert 1 <= small.chunk < BATCH and small.chunk * 4 * 9 <= 250


def test_gradients_are_formed_where_that_is_faster_than_gram_matrices():
    values = tf.zeros((BATCH, 64, 48))
    layer = LayerCall("dense", ProductRule((48, 48), True, True), Taps(values, values))
    assert make_schedules([layer], 10**9)[0].keep
    tall = LayerCall("dense", ProductRule((48, 48), True, True), Taps(values[:, :8], values[:, :8]))
    assert make_schedules([tall], 10**9)[0].ghost


@pytest.mark.parametrize(("max_bytes", "group_size"), [(2_600, 1), (2_500, 5), (20_000, 2)])
def test_schedules_keep_to_the_memory(max_bytes: int, group_size: int):
    kept, working = 0, 0
    layers = calls(group_size)
    for call, schedule in zip(layers, make_schedules(layers, max_bytes), strict=True):
        formed = 4 * call.rule.num_weights
        if schedule.keep:
            kept += formed * BATCH // group_size
            continue
        ghost = call.rule.norm_bytes(call.taps)
        working = max(working, schedule.chunk * (ghost if schedule.ghost else formed))
    assert kept + working <= max_bytes


def test_a_group_that_does_not_fit_is_refused():
    with pytest.raises(ValueError, match=r"max_bytes=200 is too small for layer 'table'.*216"):
        make_schedules(calls(), 200)


@pytest.mark.parametrize(
    ("place", "bad", "max_bytes"),
    [
        ("inputs", np.nan, 2_600),
        ("inputs", 1e30, 10**9),
        ("output_gradients", np.inf, 10**9),
        ("output_gradients", 1e30, 2_600),
    ],
)
def test_privacy_a_group_without_a_finite_gradient_adds_exactly_zero(place, bad, max_bytes):
    row = 3
    broken, without = [], []
    for call in calls():
        parts = {
            "inputs": call.taps.inputs,
            "output_gradients": call.taps.output_gradients,
        }
        values = parts[place].numpy()
        if values.dtype == np.float32:
            values[row] = bad
        bad_parts = Taps(**{**parts, place: tf.constant(values)})
        broken.append(LayerCall(call.name, call.rule, bad_parts))
        rest = {name: tf.constant(np.delete(part, row, axis=0)) for name, part in parts.items()}
        without.append(LayerCall(call.name, call.rule, Taps(**rest)))
    clip = Clip(20.0)
    found, norms = sums_of(broken, clip, max_bytes)
    assert not np.isfinite(norms[row])
    assert np.all(np.isfinite(np.delete(norms, row)))
    rest, _ = sums_of(without, clip, max_bytes)
    for got, expected_part in zip(flat(found), flat(rest), strict=True):
        np.testing.assert_allclose(got, expected_part, rtol=1e-5, atol=1e-4)


def test_coefficients_clip_and_never_raise_a_norm():
    norms = tf.constant([0.0, 0.5, 2.0, 3.0, 1e30, np.inf, np.nan])
    found = Clip(2.0).coefficients(norms, NO_BATCH, None).numpy()
    np.testing.assert_allclose(found, [1, 1, 1, 2 / 3, 2e-30, 0, 0], rtol=1e-6)


def test_privacy_a_clip_that_is_no_number_does_not_turn_clipping_off():
    clip = Clip(tf.constant(np.nan))
    found = clip.coefficients(tf.constant([0.5, 2.0]), NO_BATCH, None).numpy()
    assert np.all(np.isnan(found))


# Norms without gradients, where a plain formula would get them wrong.


def test_an_index_that_comes_twice_counts_as_one_row():
    rule = LookupRule(3, 1)
    indices = tf.constant([[2, 0, 2]])
    gradients = tf.constant([[[1.0], [10.0], [2.0]]])
    # (1 + 2)^2 + 10^2; separate rows would give 1 + 4 + 100.
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
