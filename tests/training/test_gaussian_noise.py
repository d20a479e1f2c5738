"""The noise of DP-SGD from both sources: its law from both sides, its grid and its bits."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import scipy.special
import scipy.stats
import tensorflow as tf
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

# The bits, blocks and layers of the noise, which sums on a grid have no longer.
from tf_labeldp.mechanisms.random_bits import KeyStream
from tf_labeldp.mechanisms.step_noise import _RIGHT, _rest, noisy_sums, standard_normal
from tf_labeldp.training import GaussianNoise, NoiseMechanism

SOURCES = pytest.mark.parametrize("source", ["host", "device"])
SIZE = 1_000_000
BLOCK = 1 << 16
"""Numbers per pass of the host."""
CODES = 1024
"""Codes of layers, rejections included."""
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
    # The ends of the ziggurat, where a layer that is too wide or too narrow would show itself.
    size, edges = 4_000_000, np.sort(np.concatenate([_RIGHT, -_RIGHT, [0.0]]))
    law = np.diff([0.0, *scipy.special.ndtr(edges), 1.0]) * size
    drawn = standard_normal(size, None)

    def chance(sample: np.ndarray) -> float:
        counts = np.histogram(sample, [-np.inf, *edges, np.inf])[0]
        return float(scipy.stats.chi2.sf(np.sum((counts - law) ** 2 / law), law.size - 1))

    assert chance(drawn) > 1e-6
    assert chance(1.01 * drawn) < 1e-6 and chance(0.99 * drawn) < 1e-6


def test_above_the_layers_is_the_rest_of_the_law() -> None:
    # One number in 340 is drawn here: a sample of all numbers would hide what is wrong with it.
    right = np.append(_RIGHT, 0.0)
    top = np.exp(-0.5 * _RIGHT**2)
    drawn = np.sort(_rest(SIZE, KeyStream()))

    def law(x: np.ndarray) -> np.ndarray:
        whole = np.sqrt(0.5 * np.pi) * scipy.special.erf(x / np.sqrt(2.0))
        # The layers reach up to the height at the next end to the right of x.
        ends, heights = right[::-1], np.append(top[::-1], 0.0)
        covered = np.concatenate([[0.0], np.cumsum(np.diff(ends) * heights[:-1])])
        return whole - np.interp(x, np.append(ends, 50.0), np.append(covered, covered[-1]))

    share = law(drawn) / law(np.array([50.0]))
    assert scipy.stats.kstest(share, "uniform").pvalue > 1e-6
    assert scipy.stats.kstest(law(0.99 * drawn) / law(np.array([50.0])), "uniform").pvalue < 1e-6


def test_layers_lie_below_the_density_and_have_the_area_of_a_code() -> None:
    right, top = _RIGHT, np.exp(-0.5 * _RIGHT**2)
    assert np.all(np.diff(right) < 0.0)
    areas = right * np.diff(top, prepend=0.0)
    np.testing.assert_allclose(areas, np.sqrt(0.5 * np.pi) / CODES, rtol=1e-12)
    assert right.size > 0.997 * CODES  # the others are rejections


def test_all_bits_are_those_of_a_cipher_under_a_key_of_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    keys, asked = [], []

    def key(size: int, secure: Callable[[int], bytes] = os.urandom) -> bytes:
        keys.append(secure(size))
        return keys[-1]

    def counting(self: Any, size: int, words: Any = KeyStream.words) -> np.ndarray:
        asked.append(size)
        drawn: np.ndarray = words(self, size)
        # AES-256 in counter mode from zero on, as another library call has it.
        if len(asked) == 1:
            cipher = Cipher(algorithms.AES(keys[-1]), modes.CTR(bytes(16))).encryptor()
            assert cipher.update(bytes(8 * size)) == drawn.tobytes()
        return drawn

    monkeypatch.setattr(os, "urandom", key)
    monkeypatch.setattr(KeyStream, "words", counting)
    size = 3 * BLOCK
    first, second = standard_normal(size, None), standard_normal(size, None)
    assert len(set(keys)) == len(keys) == 2 and {len(key) for key in keys} == {32}
    # 64 bits each, and more near the edges.
    assert sum(asked) >= 2 * size
    assert not np.any(first == second)
    keys.clear()
    standard_normal(size, np.random.default_rng(1))
    assert keys == []


def test_sums_of_any_sizes_have_noise_in_blocks_of_any_number_of_threads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    keys = []
    monkeypatch.setattr(os, "urandom", lambda n, f=os.urandom: keys.append(n) or f(n))
    sizes = [(3,), (), (0, 5), (2, 5 * BLOCK), (7, 1), (BLOCK + 1,)]
    sums = [np.full(size, 5.0, np.float32) for size in sizes]
    for threads in (1, 3):
        keys.clear()
        noisy = noisy_sums(sums, 2.0, 2.0**-15, None, threads)
        assert [part.shape for part in noisy] == sizes and len(keys) == threads
        assert all(part.ctypes.data % 64 == 0 for part in noisy if part.size)
        sample = np.concatenate([part.ravel() for part in noisy]) - 5.0
        assert np.unique(sample[: 2 * BLOCK]).size > BLOCK
        assert distance_from_normal(sample, 2.0) < 2.7 / np.sqrt(sample.size)
        assert distance_from_normal(sample, 2.0 * 1.05) > 2.7 / np.sqrt(sample.size)
    # A seed gives one stream, which neither blocks nor threads change.
    seeded = noisy_sums(sums, 2.0, 2.0**-15, np.random.default_rng(1), 3)
    stream = np.random.default_rng(1).standard_normal(sample.size)
    rounded = np.rint((2.0 * stream + 5.0) * 2.0**15) * 2.0**-15
    np.testing.assert_array_equal(np.concatenate([p.ravel() for p in seeded]), rounded)


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
