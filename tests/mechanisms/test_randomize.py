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
from tf_labeldp.plugins import secure_bytes

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


def test_many_bits_come_from_openssl_in_pieces(monkeypatch):
    asked = []

    def counting(size, secure=ssl.RAND_bytes):
        asked.append(size)
        return secure(size)

    monkeypatch.setattr(ssl, "RAND_bytes", counting)
    monkeypatch.setattr(random_bits, "_PIECE_BYTES", 1 << 19)
    assert len(secure_bytes((1 << 16) - 1)) == (1 << 16) - 1  # the most from the system itself
    assert asked == []
    drawn = secure_bytes((1 << 20) + 5)
    assert asked == [1 << 19, 1 << 19, 5] and len(drawn) == sum(asked)
    ones = int(np.unpackbits(np.frombuffer(drawn, np.uint8)).sum())
    assert abs(ones - 4 * len(drawn)) < 6 * np.sqrt(2 * len(drawn))


@pytest.mark.parametrize("name", MECHANISMS)
def test_random_bits_are_the_operating_systems_unless_a_generator_is_given(
    monkeypatch, name, seeded
):
    """By either path priors of each label, or one for all, of any layout, draw alike."""
    mechanism = MECHANISMS[name](1.0)
    labels, asked = np.arange(50) % 5, []

    def counting(size, secure=os.urandom):
        asked.append(size)
        return secure(size)

    monkeypatch.setattr(os, "urandom", counting)
    priors = [None]
    if mechanism.uses_priors:  # multiples of 1/64, so that no float type changes an order
        row = np.array([16, 20, 12, 12, 4]) / 64.0
        priors = [row, row.astype(np.float32), np.tile(row, (50, 1)), [row.tolist()] * 50]
        priors += [np.repeat(np.tile(row, (50, 1)), 2, axis=1)[:, ::2]]
    mechanism.randomize(labels, priors[0])
    assert sum(asked) >= 2 * 8 * labels.size  # 64 bits for the flip, 64 for the other value
    asked.clear()
    first = mechanism.randomize(labels, priors[0], rng=seeded())
    for prior in priors:
        for same in (labels, labels.astype("uint8"), labels.astype(">i8")):
            np.testing.assert_array_equal(mechanism.randomize(same, prior, rng=seeded()), first)
    assert asked == [] and labels.tolist() == [*range(5)] * 10
    noisy = mechanism.randomize(labels[:0], priors[0])
    assert noisy.shape == (0,) and noisy.dtype == np.int64


@pytest.mark.parametrize("name", MECHANISMS)
def test_blocks_of_rows_keep_draws_with_their_labels(monkeypatch, name):
    """At a huge epsilon a label inside its set comes back, wherever a block ends."""
    labels, prior = np.arange(50) % 3, np.array([0.4, 0.3, 0.2, 0.06, 0.04])
    mechanism = MECHANISMS[name](200.0)
    for block in (1, 7, 50):
        monkeypatch.setattr(random_bits, "_BLOCK_ROWS", block)
        noisy = mechanism.randomize(labels, prior if mechanism.uses_priors else None)
        np.testing.assert_array_equal(noisy, labels)


@pytest.mark.parametrize("kind", [RRWithPrior, InformativeRR])
@pytest.mark.parametrize("chunk", [1, 30])
def test_chunks_keep_labels_priors_and_set_sizes_together(monkeypatch, chunk, kind, seeded):
    """At a huge epsilon k* is the number of possible classes, which differs from row to row."""
    monkeypatch.setattr(classes, "_CHUNK_CELLS", chunk)
    labels, support = np.arange(400) % 8, np.random.default_rng(11).uniform(size=(400, 8)) < 0.5
    support[np.arange(400), labels] = True
    priors = support / support.sum(axis=1, keepdims=True)
    mechanism = kind(200.0, 8)
    assert len(set(mechanism.set_sizes(priors).tolist())) > 3
    np.testing.assert_array_equal(mechanism.randomize(labels, priors, rng=seeded()), labels)
    outside = priors.argmin(axis=1)  # answers in its row's set, whatever the chunk
    noisy = RRTopK(200.0, 8, 2).randomize(outside, priors, rng=seeded())
    assert np.all(priors[np.arange(400), noisy] >= np.sort(priors, axis=1)[:, -2])


def test_secure_bits_decide_the_draw(monkeypatch):
    labels = np.array([0, 1, 2, 3])
    monkeypatch.setattr(os, "urandom", lambda size: b"\x00" * size)  # flips to the first other
    assert RandomizedResponse(1.0, 4).randomize(labels).tolist() == [1, 0, 0, 0]


@pytest.mark.parametrize("num_classes", [2, 3, 5, 10, 13, 32])
def test_columns_of_priors_give_the_draws_of_sorted_rows(num_classes, monkeypatch):
    rng = np.random.default_rng(num_classes)
    priors = rng.dirichlet(np.full(num_classes, 0.5), 4000)
    priors[::3] = rng.integers(1, 4, priors[::3].shape)  # with many ties
    priors[1] = np.eye(num_classes)[-1]
    priors /= priors.sum(axis=1, keepdims=True)
    labels, given = rng.integers(0, num_classes, len(priors)), priors.copy()

    def drawn():
        found = []
        for epsilon in (0.1, 1.0, 3.0):
            mechanism = RRWithPrior(epsilon, num_classes)
            found.append(mechanism.optimal_k(priors))
            found.append(mechanism.randomize(labels, priors, rng=np.random.default_rng(1)))
            found.append(mechanism.randomize(labels[:1], priors[:1], rng=np.random.default_rng(1)))
            informative = InformativeRR(epsilon, num_classes)
            found.append(informative.randomize(labels, priors, rng=np.random.default_rng(1)))
        return found

    by_columns = drawn()
    np.testing.assert_array_equal(priors, given)
    # With more classes each row is sorted, as in earlier versions.
    monkeypatch.setattr(classes, "_FEW_CLASSES", 0)
    for columns, rows in zip(by_columns, drawn(), strict=True):
        np.testing.assert_array_equal(columns, rows)
    weights = 1.0 / (1.0 + np.arange(num_classes) * np.exp(-1.0))
    mass = np.cumsum(np.sort(priors, axis=1)[:, ::-1], axis=1)
    np.testing.assert_array_equal(by_columns[4], np.argmax(mass * weights, axis=1) + 1)
