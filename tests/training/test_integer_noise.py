"""Gaussian noise from integers: its tables, its law, and the delta that its distance costs."""

from __future__ import annotations

import math
from fractions import Fraction

import keras
import numpy as np
import pytest
import tensorflow as tf
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms
from hypothesis import given
from hypothesis import strategies as st

from tf_labeldp.accounting._events import dp_sgd_event, event_from_json, event_to_json
from tf_labeldp.accounting._gaussian import gaussian_delta
from tf_labeldp.accounting._losses import composed_epsilon
from tf_labeldp.training import GaussianNoise, LabelDPModel, LabelDPOptimizer, _integer_normal

TABLES = sorted(set(_integer_normal._LEVELS))
HALF = _integer_normal._HALF


def odds_of(sigma: int, words: int) -> list[int]:
    """Returns how many of 2^(32 words) draws give each integer, counted from the table."""
    thresholds, aliases = _integer_normal.table(sigma, words)
    size = 2 ** (32 * words - 13)
    odds = [0] * len(aliases)
    for place, (row, alias) in enumerate(zip(thresholds.tolist(), aliases.tolist(), strict=True)):
        own = sum(word << 32 * k for k, word in enumerate(reversed(row)))
        odds[place] += own
        odds[alias + HALF] += size - own
    return odds


@pytest.mark.parametrize("sigma, words", TABLES)
def test_tables_have_the_odds_of_the_discrete_gaussian_rounded_down(sigma: int, words: int) -> None:
    weights = _integer_normal.weights(sigma, 32 * words)
    assert odds_of(sigma, words) == weights and sum(weights) == 2 ** (32 * words)
    x = np.arange(-40 * sigma, 40 * sigma + 1)
    mass = np.exp(-0.5 * (x / sigma) ** 2)
    mass = (mass / mass.sum())[40 * sigma - HALF : 40 * sigma + HALF]
    found = np.array([one / 2 ** (32 * words) for one in weights])
    lacking = 2.0 * mass[0] * sigma + 2.0 ** (13 - 32 * words)  # the ends, and roundings
    mass[0] = 0.0  # as there is no 4096 either
    # In double precision, and of each integer but zero 2^-(32 words) at most is lacking.
    np.testing.assert_allclose(found, mass, rtol=1e-11, atol=2.0 ** (-32 * words))
    assert abs(found[HALF] - mass[HALF]) <= lacking + 1e-12 * mass[HALF]


def test_draws_are_the_tables_read_by_the_words_of_openssl() -> None:
    key, nonce = np.arange(8, dtype="<u4"), np.array([3, 1, 4], "<u4")
    size, last = _integer_normal._CHUNK + 5, 1000
    cipher = Cipher(algorithms.ChaCha20(key.tobytes(), bytes(4) + nonce.tobytes()), mode=None)
    stream = cipher.encryptor().update(bytes(64 * size))
    blocks = np.frombuffer(stream, "<u4").reshape(size, 16).tolist()
    made = _integer_normal._compiled(size, last)(
        tf.constant(key.astype(np.int64)), tf.constant(nonce.astype(np.int64))
    ).numpy()
    factors = [*_integer_normal._factors()[0], last]
    for number in [*range(300), *range(size - 300, size)]:
        words, expected = blocks[number], 0
        for factor, (sigma, count) in zip(factors, _integer_normal._LEVELS, strict=True):
            thresholds, aliases = _integer_normal.table(sigma, count)
            drawn, words = words[:count], words[count:]
            place, drawn[0] = drawn[0] >> 19, drawn[0] % 2**19
            own = drawn < thresholds[place].tolist()
            expected += factor * (place - HALF if own else int(aliases[place]))
        assert made[number] == expected


def sum_against_gaussian(sigma: int, factor: int) -> float:
    """Returns how far the odds of one table's sum with another's are from a discrete Gaussian's."""
    x = np.arange(-9 * sigma, 9 * sigma + 1)
    mass = np.exp(-0.5 * (x / sigma) ** 2)
    spread = np.zeros((x.size - 1) * factor + 1)
    spread[::factor] = mass
    found = np.convolve(spread, mass) if factor * x.size < 3000 else None
    if found is None:
        size = 2 ** math.ceil(math.log2(spread.size + x.size))
        found = np.fft.irfft(np.fft.rfft(spread, size) * np.fft.rfft(mass, size), size)
        found = found[: spread.size + x.size - 1]
    places = np.arange(found.size) - found.size // 2
    total = sigma * math.hypot(1.0, factor)
    expected = np.exp(-0.5 * (places / total) ** 2)
    near = np.abs(places) < 4.0 * total
    ratio = (found / found.sum() * expected.sum() / expected)[near]
    return float(np.max(np.abs(ratio - 1.0)))


def test_sums_of_tables_are_discrete_gaussians_up_to_the_factor_that_is_used() -> None:
    sigma = _integer_normal._LEVELS[0][0]
    used = _integer_normal._factors()[0][1]
    assert sum_against_gaussian(sigma, used) < 1e-9  # the transform rounds
    assert sum_against_gaussian(sigma, 2 * used) > 1e-8
    assert sum_against_gaussian(sigma, 4 * used) > 1e-2


@given(st.floats(0.2, 100.0), st.floats(-18.0, 18.0), st.integers(1, 10**7))
@pytest.mark.holds("training.IntegerNormal")
def test_noise_is_what_the_statement_needs_and_hardly_more(
    multiplier: float, log_clip: float, size: int
) -> None:
    clip = 2.0**log_clip
    exponent, last = _integer_normal.lattice(multiplier, clip, size)
    first, most = _integer_normal._factors()
    assert 1 <= last <= most
    spreads = [
        k * sigma for k, (sigma, _) in zip([*first, last], _integer_normal._LEVELS, strict=True)
    ]
    variance = sum(Fraction(one) ** 2 for one in spreads)
    # Two sums that are `clip` apart are so many spacings apart, at most, once they are rounded.
    farthest = Fraction(clip) / Fraction(2) ** exponent + Fraction(math.sqrt(size))
    needed = Fraction(multiplier) * farthest
    assert needed**2 + Fraction(7, 2) <= variance <= needed**2 * (1 + Fraction(1, 1000))
    assert math.sqrt(variance) >= 0.49 * math.hypot(
        *(k * s for k, (s, _) in zip([*first, most], _integer_normal._LEVELS, strict=True))
    )


@pytest.mark.holds("training.IntegerNormal")
def test_added_delta_covers_what_short_tables_tell_and_no_less_would(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One number from one table of few integers, whose ends tell two values apart for certain."""
    sigma, half, multiplier = 12, 64, 1.0
    monkeypatch.setattr(_integer_normal, "_LEVELS", ((sigma, 1),))
    monkeypatch.setattr(_integer_normal, "_HALF", half)
    monkeypatch.setattr(_integer_normal, "_MOST", 1)
    monkeypatch.setattr(_integer_normal, "_factors", lambda: ([], 1))
    made = _integer_normal.weights.__wrapped__(sigma, 32)
    law = np.zeros(2048)
    law[1024 - half : 1024 + half] = [one / 2**32 for one in made]
    added = _integer_normal.added_delta(multiplier)
    assert 1e-6 < added < 1e-2
    shift = 24  # the table's two standard deviations are the sensitivity of a replaced label
    moved = np.roll(law, shift)
    without = []
    for epsilon in (1e-9, 1.0, 3.0, 6.0, 9.0, 14.0, 20.0):
        delta = max(
            np.maximum(one - math.exp(epsilon) * other, 0.0).sum()
            for one, other in ((law, moved), (moved, law))
        )
        exact = gaussian_delta(sigma, epsilon, shift)
        assert delta <= added + (1.0 - added) * exact
        without.append(delta > exact)
    assert any(without)


def test_added_delta_of_the_tables_in_use() -> None:
    added = [_integer_normal.added_delta(z) for z in (0.2, 0.35, 1.0, 10.0)]
    assert added[0] == 1.0 and added[1] < 1e-12
    assert added == sorted(added, reverse=True) and added[-1] > 0.0


def test_statements_contain_the_added_delta() -> None:
    noise = GaussianNoise(0.35, source="integer")
    added = _integer_normal.added_delta(0.35)
    plain = dp_sgd_event(0.35, 0.01, 1000)
    event = noise.dp_event(0.01, 1000)
    assert event_from_json(event_to_json(event)) == event
    for relation in ("replace_label", "add_or_remove"):
        found = composed_epsilon([event], 2000 * added, relation)
        assert found == composed_epsilon([plain], 1000 * added, relation)
        assert found > composed_epsilon([plain], 2000 * added, relation)
        assert composed_epsilon([event], 1000 * added, relation) == math.inf
    assert (
        composed_epsilon([GaussianNoise(0.2, source="integer").dp_event(1.0, 1)], 0.9) == math.inf
    )


def test_sums_lie_on_the_lattice_and_far_or_undefined_ones_stay_so() -> None:
    noise = GaussianNoise(1.0, source="integer")
    values = tf.constant([0.3, -7.0, 1e30, -1e30, np.nan, np.inf, -np.inf])
    found = tf.function(
        lambda: noise.add_noise([values], 1.0, ())[0][0], jit_compile=True
    )().numpy()
    exponent, _ = _integer_normal.lattice(1.0, 1.0, 7)
    steps = found[:2].astype(np.float64) * 2.0**-exponent
    np.testing.assert_array_equal(steps, np.round(steps))
    assert found[2] > 1e6 and found[3] < -1e6
    assert np.isnan(found[4:]).all()


def test_a_program_has_no_number_of_double_precision() -> None:
    noise = GaussianNoise(1.0, source="integer")
    step = tf.function(lambda part: noise.add_noise([part], 1.0, ())[0][0])
    for dtype in (tf.float32, tf.bfloat16):
        graph = step.get_concrete_function(tf.TensorSpec([10], dtype)).graph
        graphs = [graph, *(one.graph for one in _functions(graph))]
        made = {out.dtype for one in graphs for op in one.get_operations() for out in op.outputs}
        assert len(graphs) > 1 and tf.int64 in made and tf.float64 not in made


def _functions(graph: tf.Graph) -> list:
    found = list(graph._functions.values())
    return [function for function in found if hasattr(function, "graph")]


@pytest.mark.parametrize("jit", [False, True])
def test_a_model_trains_with_it_and_says_what_it_costs(jit: bool) -> None:
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(64, 3)).astype(np.float32), rng.integers(0, 2, 64)
    epsilons = []
    for source in ("device", "integer"):
        keras.utils.set_random_seed(0)
        inputs = keras.Input((3,))
        model = LabelDPModel(inputs, keras.layers.Dense(2)(inputs))
        noise = GaussianNoise(1.0, source=source)
        model.compile(
            LabelDPOptimizer(keras.optimizers.SGD(0.1), 1.0, noise=noise),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            jit_compile=jit,
        )
        model.fit(x, y, batch_size=16, epochs=2, verbose=0)
        epsilons.append(model.guarantee(1e-5).epsilon)
    assert epsilons[0] < epsilons[1] < epsilons[0] * (1.0 + 1e-6)


def test_what_it_can_not_do_is_refused() -> None:
    noise = GaussianNoise(1.0, source="integer")
    with pytest.raises(ValueError, match=r"1,073,741,824 weights at most.*2,000,000,000 weights"):
        noise.initial_state([(2, 10**9)])
    with pytest.raises(ValueError, match=r"noise_multiplier of 762.*Train fewer weights"):
        GaussianNoise(1e6, source="integer").initial_state([(10**9,)])
    with pytest.raises(ValueError, match="Choose another l2_norm_clip"):
        noise.add_noise([tf.zeros([3])], 1e-30, ())
