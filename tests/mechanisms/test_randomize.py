"""Draws against channels: the right channel passes, a nearby one is rejected."""

from __future__ import annotations

import os
import ssl

import numpy as np
import pytest

from tf_labeldp.mechanisms import (
    InformativeRR,
    RandomizedResponse,
    RRTopK,
    RRWithPrior,
    classes,
    random_bits,
)

DRAWS = 300_000
PRIORS = np.array(
    [
        [0.4, 0.3, 0.15, 0.1, 0.05],
        [0.2, 0.2, 0.2, 0.2, 0.2],
        [0.05, 0.9, 0.02, 0.02, 0.01],
    ]
)
MECHANISMS = {
    "RandomizedResponse": lambda epsilon: RandomizedResponse(epsilon, 5),
    "RRTopK": lambda epsilon: RRTopK(epsilon, 5, 3),
    "RRWithPrior": lambda epsilon: RRWithPrior(epsilon, 5),
    "InformativeRR": lambda epsilon: InformativeRR(epsilon, 5),
}


def draws(mechanism, rng, shared=False):
    """Counts [prior, label, output] of many draws, the labels and priors in mixed order."""
    label = np.random.default_rng(5).integers(0, 5, DRAWS)
    which = np.zeros(DRAWS, int) if shared else np.arange(DRAWS) % len(PRIORS)
    priors = None
    if mechanism.uses_priors:
        priors = PRIORS[0] if shared else PRIORS[which]
    noisy = mechanism.randomize(label, priors, rng=rng)
    assert noisy.dtype == np.int64
    counts = np.zeros((len(PRIORS), 5, 5))
    np.add.at(counts, (which, label, noisy), 1)
    return counts[:1] if shared else counts


def channels(mechanism, shared=False):
    rows = PRIORS[:1] if shared else PRIORS
    return np.stack(
        [mechanism.transition_matrix(p if mechanism.uses_priors else None) for p in rows]
    )


@pytest.mark.parametrize("name", MECHANISMS)
@pytest.mark.parametrize("shared", [True, False])
def test_draws_follow_the_transition_matrix(name, shared, seeded, chi_square_rejects):
    mechanism = MECHANISMS[name](1.0)
    counts = draws(mechanism, seeded(), shared)
    assert not chi_square_rejects(counts, channels(mechanism, shared))
    nearby = MECHANISMS[name](1.1)
    assert chi_square_rejects(counts, channels(nearby, shared))


def test_secure_draws_follow_the_transition_matrix(chi_square_rejects):
    mechanism = RRWithPrior(1.0, 5)
    assert not chi_square_rejects(draws(mechanism, None), channels(mechanism))


@pytest.mark.parametrize("name", MECHANISMS)
def test_random_bits_are_the_operating_systems_unless_a_generator_is_given(
    monkeypatch, name, seeded
):
    mechanism = MECHANISMS[name](1.0)
    labels = np.arange(50) % 5
    priors = PRIORS[0] if mechanism.uses_priors else None
    asked = []

    def counting(size, secure=os.urandom):
        asked.append(size)
        return secure(size)

    monkeypatch.setattr(os, "urandom", counting)
    mechanism.randomize(labels, priors)
    assert sum(asked) >= 2 * 8 * labels.size  # 64 bits for the flip, 64 for the other value
    asked.clear()
    first = mechanism.randomize(labels, priors, rng=seeded())
    assert asked == []
    np.testing.assert_array_equal(first, mechanism.randomize(labels, priors, rng=seeded()))


def test_many_bits_come_from_openssl_in_pieces(monkeypatch):
    asked = []

    def counting(size, secure=ssl.RAND_bytes):
        asked.append(size)
        return secure(size)

    monkeypatch.setattr(ssl, "RAND_bytes", counting)
    monkeypatch.setattr(random_bits, "_PIECE_BYTES", 1 << 19)
    assert len(random_bits.secure_bytes(random_bits._MANY_BYTES - 1)) == random_bits._MANY_BYTES - 1
    assert asked == []
    drawn = random_bits.secure_bytes((1 << 20) + 5)
    assert asked == [1 << 19, 1 << 19, 5] and len(drawn) == sum(asked)
    ones = int(np.unpackbits(np.frombuffer(drawn, np.uint8)).sum())
    assert abs(ones - 4 * len(drawn)) < 6 * np.sqrt(2 * len(drawn))


@pytest.mark.parametrize("name", MECHANISMS)
@pytest.mark.parametrize("block", [1, 7, 50, 1 << 20])
def test_blocks_of_rows_keep_draws_with_their_labels(monkeypatch, name, block):
    """At a huge epsilon a label inside its set comes back, wherever a block ends."""
    monkeypatch.setattr(random_bits, "_BLOCK_ROWS", block)
    labels, prior = np.arange(50) % 3, np.array([0.4, 0.3, 0.2, 0.06, 0.04])
    mechanism = MECHANISMS[name](200.0)
    noisy = mechanism.randomize(labels, prior if mechanism.uses_priors else None)
    np.testing.assert_array_equal(noisy, labels)


def test_secure_bits_decide_the_draw(monkeypatch):
    labels = np.array([0, 1, 2, 3])
    monkeypatch.setattr(os, "urandom", lambda size: b"\x00" * size)  # flips to the first other
    assert RandomizedResponse(1.0, 4).randomize(labels).tolist() == [1, 0, 0, 0]


@pytest.mark.parametrize("name", ["RRTopK", "RRWithPrior", "InformativeRR"])
def test_one_prior_for_all_equals_the_same_prior_for_each(name, seeded):
    mechanism = MECHANISMS[name](0.7)
    labels = np.random.default_rng(8).integers(0, 5, 100_000)
    rows = np.tile(PRIORS[0], (labels.size, 1))
    np.testing.assert_array_equal(
        mechanism.randomize(labels, PRIORS[0], rng=seeded()),
        mechanism.randomize(labels, rows, rng=seeded()),
    )


@pytest.mark.parametrize("chunk", [1, 30, 1 << 20])
def test_chunks_keep_labels_and_priors_together(monkeypatch, chunk, seeded):
    """At a huge epsilon a label inside its set comes back, wherever a chunk ends."""
    monkeypatch.setattr(classes, "_CHUNK_CELLS", chunk)
    n, num_classes, k = 1000, 10, 6
    rng = np.random.default_rng(9)
    priors, labels = rng.dirichlet(np.ones(num_classes), n), rng.integers(0, num_classes, n)
    rank = np.array(
        [sorted(row, reverse=True).index(row[y]) for row, y in zip(priors, labels, strict=True)]
    )
    noisy = RRTopK(200.0, num_classes, k).randomize(labels, priors, rng=seeded())
    inside = rank < k
    assert 0.5 * n < inside.sum() < 0.7 * n  # both kinds occur
    np.testing.assert_array_equal(noisy[inside], labels[inside])
    smallest_in_set = np.sort(priors, axis=1)[:, -k]
    assert np.all(priors[np.arange(n), noisy] >= smallest_in_set)
    sizes = RRWithPrior(1.0, num_classes).optimal_k(priors)
    assert sizes.tolist() == [int(RRWithPrior(1.0, num_classes).optimal_k(p)[0]) for p in priors]


@pytest.mark.parametrize("kind", [RRWithPrior, InformativeRR])
@pytest.mark.parametrize("chunk", [1, 30])
def test_chunks_keep_labels_and_set_sizes_together(monkeypatch, chunk, kind, seeded):
    """At a huge epsilon k* is the number of possible classes, which differs from row to row."""
    monkeypatch.setattr(classes, "_CHUNK_CELLS", chunk)
    labels, support = np.arange(400) % 8, np.random.default_rng(11).uniform(size=(400, 8)) < 0.5
    support[np.arange(400), labels] = True
    priors = support / support.sum(axis=1, keepdims=True)
    mechanism = kind(200.0, 8)
    assert len(set(mechanism.set_sizes(priors).tolist())) > 3
    np.testing.assert_array_equal(mechanism.randomize(labels, priors, rng=seeded()), labels)


def test_more_labels_than_one_real_chunk(seeded):
    n = (1 << 19) + 3  # two classes: a chunk holds 2^19 rows
    labels = np.arange(n) % 2
    for priors in (np.array([0.5, 0.5]), np.full((n, 2), 0.5)):
        noisy = RRWithPrior(200.0, 2).randomize(labels, priors, rng=seeded())
        np.testing.assert_array_equal(noisy, labels)


@pytest.mark.parametrize(
    "view",
    [
        lambda p: p.astype(np.float32),
        lambda p: np.asfortranarray(p),
        lambda p: np.repeat(p, 2, axis=1)[:, ::2],
        lambda p: p.tolist(),
        lambda p: p.astype(">f8"),
    ],
    ids=["float32", "fortran", "strided", "list", "big-endian"],
)
def test_priors_of_any_layout_give_the_same_draw(view, seeded):
    # Multiples of 1/64, which every float type holds, so that no order of classes changes.
    weights = np.random.default_rng(10).multinomial(64, np.full(5, 0.2), 3000)
    priors, labels = weights / 64.0, np.arange(3000) % 5
    mechanism = RRWithPrior(1.0, 5)
    np.testing.assert_array_equal(
        mechanism.randomize(labels, view(priors), rng=seeded()),
        mechanism.randomize(labels, priors, rng=seeded()),
    )


@pytest.mark.parametrize("dtype", ["uint8", "int32", ">i8", "uint64"])
def test_labels_of_any_integer_type_give_the_same_draw(dtype, seeded):
    labels = np.arange(3000) % 5
    np.testing.assert_array_equal(
        RandomizedResponse(1.0, 5).randomize(labels.astype(dtype), rng=seeded()),
        RandomizedResponse(1.0, 5).randomize(labels, rng=seeded()),
    )


@pytest.mark.parametrize("name", MECHANISMS)
def test_no_labels_give_no_noisy_labels(name):
    mechanism = MECHANISMS[name](1.0)
    for priors in (PRIORS[0], np.empty((0, 5))) if mechanism.uses_priors else (None,):
        noisy = mechanism.randomize(np.empty(0, np.int64), priors)
        assert noisy.shape == (0,) and noisy.dtype == np.int64


def test_randomize_leaves_its_arguments_alone(seeded):
    labels, priors = np.arange(1000) % 5, np.tile(PRIORS[0], (1000, 1))
    before = labels.copy(), priors.copy()
    RRWithPrior(0.5, 5).randomize(labels, priors, rng=seeded())
    np.testing.assert_array_equal(labels, before[0])
    np.testing.assert_array_equal(priors, before[1])
