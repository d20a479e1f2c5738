"""The noise of DP-SGD from both sources: its law from both sides, its grid and its bits."""

from __future__ import annotations

import ssl
from collections.abc import Callable

import keras
import numpy as np
import pytest
import scipy.special
import scipy.stats
import tensorflow as tf

from tf_labeldp.mechanisms import step_noise
from tf_labeldp.mechanisms.step_noise import standard_normal
from tf_labeldp.training import GaussianNoise, NoiseMechanism

SOURCES = pytest.mark.parametrize("source", ["host", "device"])
SIZE = 1_000_000
# Kolmogorov's distribution: P[sqrt(n) D > 2.7] is below 1e-6.
LIMIT = 2.7 / np.sqrt(SIZE)


def distance_from_normal(sample: np.ndarray, scale: float) -> float:
    """Returns the Kolmogorov-Smirnov distance to N(0, scale^2)."""
    law = scipy.special.ndtr(np.sort(sample) / scale)
    grid = np.arange(sample.size + 1) / sample.size
    return float(max(np.max(law - grid[:-1]), np.max(grid[1:] - law)))


def noise_of(noise: NoiseMechanism, clip: float) -> np.ndarray:
    parts, _ = noise.add_noise([tf.zeros([SIZE // 2, 1]), tf.zeros([SIZE // 2])], clip, ())
    return np.concatenate([part.numpy().ravel() for part in parts])


@SOURCES
@pytest.mark.holds("training.GaussianNoise", "mechanisms.DeviceNormal")
def test_standard_deviation_is_noise_multiplier_times_clip(source: str) -> None:
    sample = noise_of(GaussianNoise(3.0, source=source, insecure_seed=1), 0.5)
    assert distance_from_normal(sample, 1.5) < LIMIT
    assert distance_from_normal(sample, 1.5 * 1.02) > LIMIT
    assert distance_from_normal(sample, 1.5 / 1.02) > LIMIT


@pytest.mark.holds("mechanisms.standard_normal")
def test_every_layer_and_the_tail_have_their_share() -> None:
    # The edges of the ziggurat, where a layer that is too high or too low would show itself.
    size = 4_000_000
    edges = np.sort(np.concatenate([step_noise._EDGE, -step_noise._EDGE[:-1]]))
    law = np.diff([0.0, *scipy.special.ndtr(edges), 1.0]) * size
    drawn = standard_normal(size, None)

    def chance(sample: np.ndarray) -> float:
        counts = np.histogram(sample, [-np.inf, *edges, np.inf])[0]
        return float(scipy.stats.chi2.sf(np.sum((counts - law) ** 2 / law), law.size - 1))

    assert chance(drawn) > 1e-6
    assert chance(1.01 * drawn) < 1e-6 and chance(0.99 * drawn) < 1e-6


def test_beyond_the_last_layer_is_the_tail_of_the_law() -> None:
    start = step_noise._RIGHT
    drawn = np.sort(step_noise._tail(SIZE // 100))
    law = 1.0 - scipy.special.ndtr(-drawn) / scipy.special.ndtr(-start)
    assert drawn[0] >= start
    assert scipy.stats.kstest(law, "uniform").pvalue > 1e-6


def test_layers_have_one_area_and_end_at_the_top() -> None:
    edge, height = step_noise._EDGE, step_noise._HEIGHT
    areas = edge[1:-1] * np.diff(height)[1:]  # above the base, whose tail is drawn apart
    np.testing.assert_allclose(areas, step_noise._AREA, rtol=1e-8)
    base = edge[1] * height[1] + scipy.special.ndtr(-edge[1]) * np.sqrt(2.0 * np.pi)
    assert abs(base / step_noise._AREA - 1.0) < 1e-8


def test_all_bits_are_those_of_openssl(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def counting(size: int, secure: Callable[[int], bytes] = ssl.RAND_bytes) -> bytes:
        asked.append(size)
        return secure(size)

    monkeypatch.setattr(ssl, "RAND_bytes", counting)
    size = 3 * step_noise._BLOCK
    first, second = standard_normal(size, None), standard_normal(size, None)
    assert sum(asked) >= 2 * 8 * size  # 64 bits each, and more near the edges
    assert not np.any(first == second)
    asked.clear()
    standard_normal(size, np.random.default_rng(1))
    assert asked == []


def test_odd_and_empty_sizes() -> None:
    assert standard_normal(3, None).shape == (3,)
    assert standard_normal(0, None).shape == (0,)
    zeros = [tf.zeros([2, 3]), tf.zeros([]), tf.zeros([4])]
    parts, _ = GaussianNoise(1.0).add_noise(zeros, 1.0, ())
    assert [part.shape for part in parts] == [(2, 3), (), (4,)]


def test_every_step_of_a_compiled_function_draws_anew() -> None:
    noise = GaussianNoise(noise_multiplier=1.0)

    @tf.function
    def twice() -> tuple[tf.Tensor, tf.Tensor]:
        zeros = tf.zeros([8])
        return noise.add_noise([zeros], 1.0, ())[0][0], noise.add_noise([zeros], 1.0, ())[0][0]

    drawn = [part.numpy().tobytes() for _ in range(3) for part in twice()]
    assert len(set(drawn)) == 6


@SOURCES
def test_seeds_repeat_and_secure_bits_do_not(source: str) -> None:
    seeded, other = [
        [noise_of(GaussianNoise(1.0, source=source, insecure_seed=seed), 1.0) for seed in seeds]
        for seeds in ((7, 7), (8, None))
    ]
    np.testing.assert_array_equal(*seeded)
    assert len({sample.tobytes() for sample in (seeded[0], *other)}) == 3
    assert GaussianNoise(1.0, source=source, insecure_seed=7).seeded
    assert not GaussianNoise(1.0, source=source).seeded


@pytest.mark.holds("training.GaussianNoise")
def test_noisy_sums_lie_on_a_grid_that_the_sum_does_not_move() -> None:
    scale, values = 2.0, np.random.default_rng(0).normal(size=1000).astype(np.float32)
    [noisy], _ = GaussianNoise(scale, insecure_seed=3).add_noise([tf.constant(values)], 1.0, ())
    steps = noisy.numpy().astype(np.float64) / (scale * 2.0**-16)
    np.testing.assert_array_equal(steps, np.round(steps))


@SOURCES
def test_noise_is_added_to_the_sum(source: str) -> None:
    value = tf.fill([SIZE], 5.0)
    [noisy], _ = GaussianNoise(1.0, source=source, insecure_seed=3).add_noise([value], 1.0, ())
    assert abs(noisy.numpy().mean() - 5.0) < 5.0 / np.sqrt(SIZE)
    assert noisy.dtype == tf.float32


def test_arguments_out_of_range() -> None:
    for value in (0.0, float("inf")):
        with pytest.raises(ValueError, match="noise_multiplier must be finite and above zero"):
            GaussianNoise(value)
    with pytest.raises(ValueError, match="source must be one of host, device"):
        GaussianNoise(1.0, source="tpu")


@SOURCES
def test_config_round_trip_and_settings_of_a_statement(source: str) -> None:
    noise = GaussianNoise(1.5, source=source, insecure_seed=2)
    again = keras.saving.deserialize_keras_object(keras.saving.serialize_keras_object(noise))
    assert again.get_config() == noise.get_config()
    # A seed that came later would make the noise repeatable, and the statement not name it.
    for name in ("noise_multiplier", "source", "insecure_seed", "seeded"):
        with pytest.raises(AttributeError):
            setattr(noise, name, 1)
    assert noise.assumptions() == ()
    cipher = {"host": "AES-256", "device": "ChaCha20"}[source]
    assert cipher in GaussianNoise(1.0, source=source).assumptions()[0]


def test_the_integers_of_0_2_become_doubles_of_the_device() -> None:
    config = {"noise_multiplier": 1.5, "source": "integer", "insecure_seed": None}
    assert GaussianNoise.from_config(config).get_config() == {**config, "source": "device"}
