"""The noise of DP-SGD: its law from both sides, its bits, and its place in the graph."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf

from tf_labeldp.training import GaussianNoise, NoiseMechanism
from tf_labeldp.training._label_dp_optimizer import standard_normal

SIZE = 200_000
# Kolmogorov's distribution: P[sqrt(n) D > 2.7] is below 1e-6.
LIMIT = 2.7 / np.sqrt(SIZE)


def distance_from_normal(sample: np.ndarray, scale: float) -> float:
    """Returns the Kolmogorov-Smirnov distance to N(0, scale^2)."""
    from math import erf

    ordered = np.sort(sample) / (scale * np.sqrt(2.0))
    law = 0.5 * (1.0 + np.vectorize(erf)(ordered))
    grid = np.arange(sample.size + 1) / sample.size
    return float(max(np.max(law - grid[:-1]), np.max(grid[1:] - law)))


def noise_of(noise: NoiseMechanism, clip: float) -> np.ndarray:
    parts, _ = noise.add_noise([tf.zeros([SIZE // 2, 1]), tf.zeros([SIZE // 2])], clip, ())
    return np.concatenate([part.numpy().ravel() for part in parts])


def test_standard_deviation_is_noise_multiplier_times_clip() -> None:
    sample = noise_of(GaussianNoise(noise_multiplier=3.0, insecure_seed=1), 0.5)
    assert distance_from_normal(sample, 1.5) < LIMIT
    assert distance_from_normal(sample, 1.5 * 1.02) > LIMIT
    assert distance_from_normal(sample, 1.5 / 1.02) > LIMIT


def test_secure_bits_have_the_same_law() -> None:
    assert distance_from_normal(standard_normal(SIZE, None), 1.0) < LIMIT


def test_odd_and_empty_sizes() -> None:
    assert standard_normal(3, None).shape == (3,)
    assert standard_normal(0, None).shape == (0,)


def test_every_step_of_a_compiled_function_draws_anew() -> None:
    noise = GaussianNoise(noise_multiplier=1.0)

    @tf.function
    def twice() -> tuple[tf.Tensor, tf.Tensor]:
        zeros = tf.zeros([8])
        return noise.add_noise([zeros], 1.0, ())[0][0], noise.add_noise([zeros], 1.0, ())[0][0]

    drawn = [part.numpy().tobytes() for _ in range(3) for part in twice()]
    assert len(set(drawn)) == 6


def test_seeds_repeat_and_secure_bits_do_not() -> None:
    same = [noise_of(GaussianNoise(1.0, insecure_seed=7), 1.0) for _ in range(2)]
    np.testing.assert_array_equal(same[0], same[1])
    assert not np.array_equal(noise_of(GaussianNoise(1.0), 1.0), noise_of(GaussianNoise(1.0), 1.0))
    assert GaussianNoise(1.0, insecure_seed=7).seeded
    assert not GaussianNoise(1.0).seeded


def test_noisy_sums_lie_on_a_grid_that_the_sum_does_not_move() -> None:
    scale, values = 2.0, np.random.default_rng(0).normal(size=1000).astype(np.float32)
    [noisy], _ = GaussianNoise(scale, insecure_seed=3).add_noise([tf.constant(values)], 1.0, ())
    steps = noisy.numpy().astype(np.float64) / (scale * 2.0**-16)
    np.testing.assert_array_equal(steps, np.round(steps))


def test_noise_is_added_to_the_sum() -> None:
    value = tf.fill([SIZE], 5.0)
    [noisy], _ = GaussianNoise(1.0, insecure_seed=3).add_noise([value], 1.0, ())
    assert abs(noisy.numpy().mean() - 5.0) < 5.0 / np.sqrt(SIZE)
    assert noisy.dtype == tf.float32


def test_shapes_are_kept() -> None:
    parts, _ = GaussianNoise(1.0).add_noise(
        [tf.zeros([2, 3]), tf.zeros([]), tf.zeros([4])], 1.0, ()
    )
    assert [part.shape for part in parts] == [(2, 3), (), (4,)]


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf")])
def test_noise_multiplier_that_is_not_positive_is_refused(value: float) -> None:
    with pytest.raises(ValueError, match="noise_multiplier must be finite and above zero"):
        GaussianNoise(value)


def test_config_round_trip() -> None:
    noise = GaussianNoise(1.5, insecure_seed=2)
    again = keras.saving.deserialize_keras_object(keras.saving.serialize_keras_object(noise))
    assert again.get_config() == noise.get_config()
    of_0_1 = GaussianNoise.from_config({"noise_multiplier": 1.5, "seed": 2})
    assert of_0_1.get_config() == noise.get_config()
