"""Noise of ChaCha20 inside the program: its key stream, its numbers, and no nonce used twice."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms

# The blocks and bits of the cipher inside a program, which sums have no longer.
from tf_labeldp.mechanisms.step_noise import DeviceNormal, _compiled, _fraction, key_stream
from tf_labeldp.training import GaussianNoise

SIZE = 1_000_000

# RFC 8439, section 2.3.2 and appendix A.1: key, nonce, counter, block.
COUNTING, ZEROS = bytes(range(32)).hex(), "00" * 32
VECTORS = [
    (COUNTING, "000000090000004a00000000", 1,
     "10f1e7e4d13b5915500fdd1fa32071c4c7d1f4c733c068030422aa9ac3d46c4e"
     "d2826446079faa0914c2d705d98b02a2b5129cd1de164eb9cbd083e8a2503c4e"),
    ("00" * 31 + "01", "00" * 12, 1,
     "3aeb5224ecf849929b9d828db1ced4dd832025e8018b8160b82284f3c949aa5a"
     "8eca00bbb4a73bdad192b5c42f73f2fd4e273644c8b36125a64addeb006c13a0"),
    (ZEROS, "00" * 11 + "02", 0,
     "c2c64d378cd536374ae204b9ef933fcd1a8b2288b3dfa49672ab765b54ee27c7"
     "8a970e0e955c14f3a88e741b97c286f75f8fc299e8148362fa198a39531bed6d"),
]  # fmt: skip


def words(content: bytes) -> tf.Tensor:
    return tf.constant(np.frombuffer(content, "<u4"))


@pytest.mark.parametrize(("vector", "jit"), [(0, False), (0, True), (1, False), (2, False)])
@pytest.mark.holds("mechanisms.DeviceNormal")
def test_blocks_are_those_of_rfc_8439(vector: int, jit: bool) -> None:
    key, nonce, counter, block = VECTORS[vector]
    make = tf.function(lambda key, nonce: key_stream(key, nonce, counter, 1), jit_compile=jit)
    made = make(words(bytes.fromhex(key)), words(bytes.fromhex(nonce)))
    assert made.shape == (16, 1) and made.numpy()[:, 0].tobytes().hex() == block


def test_many_blocks_are_those_of_openssl() -> None:
    rng = np.random.default_rng(0)
    for blocks in (1, 7, 4097):
        key, nonce = rng.bytes(32), rng.bytes(12)
        cipher = Cipher(algorithms.ChaCha20(key, bytes(4) + nonce), mode=None).encryptor()
        expected = np.frombuffer(cipher.update(bytes(64 * blocks)), "<u4").reshape(blocks, 16)
        made = key_stream(words(key), words(nonce), 0, blocks)
        np.testing.assert_array_equal(made.numpy().T, expected)


def noise_of(noise: GaussianNoise, clip: float = 1.0, size: int = SIZE) -> np.ndarray:
    [noisy], _ = noise.add_noise([tf.zeros([size])], clip, ())
    return noisy.numpy()


def test_coordinates_and_steps_are_not_correlated() -> None:
    noise = GaussianNoise(1.0, source="device", insecure_seed=2)
    first, second = noise_of(noise), noise_of(noise)
    limit = 5.0 / np.sqrt(SIZE)  # each is normal of this over five; a chance of 6e-7 each
    for lag in (1, 2, 4, 8, 16, SIZE // 8, SIZE // 2):  # a block has 8, its sines come last
        assert abs(np.mean(first[lag:] * first[:-lag])) < limit * np.sqrt(SIZE / (SIZE - lag))
    assert abs(np.mean(first * second)) < limit


def test_numbers_are_box_and_muller_s_of_53_bits_to_rounding() -> None:
    key, nonce, blocks = np.arange(8), np.array([1, 2, 0]), 512
    stream = key_stream(
        tf.constant(key, tf.uint32), tf.constant(nonce, tf.uint32), 0, blocks
    ).numpy()
    high, low, high_angle, low_angle = np.split(stream.astype(np.uint64), 4)
    whole = [
        (a << np.uint64(21)) | (b >> np.uint64(11))
        for a, b in ((high, low), (high_angle, low_angle))
    ]
    uniform, angle = ((k.astype(np.float64) + 0.5) * 2.0**-53 for k in whole)
    radius = np.sqrt(-2.0 * np.log(uniform))
    expected = radius * np.stack([np.cos(2.0 * np.pi * angle), np.sin(2.0 * np.pi * angle)])
    found = _compiled(blocks)(tf.constant(key), tf.constant(nonce)).numpy()
    np.testing.assert_allclose(found, expected.ravel(), rtol=0.0, atol=1e-14)


def test_uniform_numbers_reach_both_ends_and_never_zero() -> None:
    ends = _fraction(
        tf.constant([0, 2**32 - 1], tf.uint32), tf.constant([2047, 2**32 - 1], tf.uint32)
    ).numpy()
    assert ends[0] == 2.0**-54 and 1.0 - 2.0**-53 <= ends[1] <= 1.0


def nonces(monkeypatch: pytest.MonkeyPatch, first: int | None = None) -> list[tuple[int, ...]]:
    """Returns the list that every key and nonce goes to from now on; the count goes on there."""
    used: list[tuple[int, ...]] = []
    counted: set[int] = set()
    original = DeviceNormal.key_and_nonce

    def recorded(self: DeviceNormal) -> Any:
        if first is not None and id(self) not in counted:
            counted.add(id(self))
            self._drawn.assign([first, 0, 0])
        key, nonce = original(self)
        note = lambda k, n: used.append((*k.tolist(), *n.tolist()))  # noqa: E731
        with tf.control_dependencies([tf.numpy_function(note, [key, nonce], [])]):
            return tf.identity(key), nonce

    monkeypatch.setattr(DeviceNormal, "key_and_nonce", recorded)
    return used


@pytest.mark.holds("mechanisms.DeviceNormal")
def test_no_draw_has_the_key_and_nonce_of_another(monkeypatch: pytest.MonkeyPatch) -> None:
    used = nonces(monkeypatch)
    noise = GaussianNoise(1.0, source="device")

    @tf.function
    def thrice() -> None:
        for _ in range(3):
            noise.add_noise([tf.zeros([3])], 1.0, ())

    again = tf.function(lambda: noise.add_noise([tf.zeros([3])], 1.0, ())[0])
    for _ in range(2):
        for call in (thrice, again, lambda: noise_of(noise, size=3)):
            call()
            call()
        noise.begin()
    for made in (copy.deepcopy(noise), pickle.loads(pickle.dumps(noise))):
        noise_of(made, size=3)
    assert len(used) == 2 * (6 + 2 + 2) + 2 == len(set(used))
    # A key for each `begin`, and for each copy.
    assert len({one[:8] for one in used}) == 4
    assert max(map(max, used)) < 2**32


def test_count_goes_on_past_32_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    used = nonces(monkeypatch, first=2**32 - 512)  # a draw is 256
    noise = GaussianNoise(1.0, source="device", insecure_seed=0)
    noise.begin()
    for _ in range(3):
        noise_of(noise, size=3)
    assert [one[8:] for one in used] == [(0, 2**32 - 512, 0), (0, 2**32 - 256, 0), (0, 0, 1)]


def test_the_count_is_read_and_moved_on_in_one_operation() -> None:
    """Between an assignment and the reading after it, another thread's could come."""
    noise = GaussianNoise(1.0, source="device")
    draw = tf.function(lambda: noise.add_noise([tf.zeros([3])], 1.0, ())[0][0])
    kinds = [op.type for op in draw.get_concrete_function().graph.get_operations()]
    assert kinds.count("RngReadAndSkip") == 1
    assert not any(kind.startswith("Assign") for kind in kinds)


def test_seeds_repeat_in_eager_graph_and_xla_and_go_on_over_fits() -> None:
    def drawn(jit: bool | None) -> np.ndarray:
        noise = GaussianNoise(1.0, source="device", insecure_seed=7)
        step = lambda: noise.add_noise([tf.zeros([20])], 1.0, ())[0][0]  # noqa: E731
        step = step if jit is None else tf.function(step, jit_compile=jit)
        made = [step().numpy() for _ in range(2)]
        noise.begin()
        return np.stack([*made, step().numpy()])

    eager = drawn(None)
    assert np.unique(eager).size > 50
    for jit in (False, True):
        # A number that lies between two points of the grid may go either way.
        np.testing.assert_allclose(drawn(jit), eager, rtol=0.0, atol=1.01 * 2.0**-16)


def test_noisy_sums_lie_on_the_grid_in_xla_too() -> None:
    scale = 3.0
    noise = GaussianNoise(scale, source="device")
    values = tf.constant(np.random.default_rng(0).normal(size=1000), tf.float32)
    noisy = tf.function(lambda: noise.add_noise([values], 1.0, ())[0][0], jit_compile=True)()
    steps = noisy.numpy().astype(np.float64) / (scale * 2.0**-16)
    np.testing.assert_allclose(steps, np.round(steps), atol=2.0**-24 * np.abs(steps).max())


def test_a_tpu_is_refused_also_one_that_comes_later(monkeypatch: pytest.MonkeyPatch) -> None:
    used = GaussianNoise(1.0, source="device")
    used.begin()
    monkeypatch.setattr(tf.config, "list_logical_devices", lambda kind: [kind])
    for begin in (used.begin, GaussianNoise(1.0, source="device").begin):
        with pytest.raises(ValueError, match="TPU, which has no double precision"):
            begin()


def test_more_than_a_nonce_has_blocks_for_is_refused() -> None:
    with pytest.raises(ValueError, match="one draw gives at most"):
        DeviceNormal(None).draw(2**34 + 1)
