"""Keyed draws: their law, what they depend on, and the file that lists what they cost."""

from __future__ import annotations

import json
import pickle
import stat

import numpy as np
import pyarrow as pa
import pytest

from tf_labeldp.mechanisms import (
    LaplaceMechanism,
    RandomizedResponse,
    RROnBins,
    RRTopK,
    RRWithPrior,
    _random,
)
from tf_labeldp.scale import ReleaseKey, randomize_batch

KEY = bytes(range(32))
PRIOR = np.array([0.5, 0.3, 0.15, 0.05])
BINS = RROnBins(1.0, [0.0, 1.0, 2.0], outputs=[0.5, 1.5], bin_of_input=[0, 0, 1])
CASES = [
    (RandomizedResponse(1.0, 4), None),
    (RRTopK(1.5, 4, k=2), PRIOR),
    (RRWithPrior(1.0, 4), PRIOR),
]
N = 60_000


def draw(ids, labels, mechanism=CASES[0][0], release="a", priors=None, key=KEY):
    return randomize_batch(ids, np.asarray(labels), mechanism, key, release, priors)


@pytest.mark.parametrize(("mechanism", "priors"), CASES, ids=lambda case: type(case).__name__)
def test_the_channel_is_the_stated_one(mechanism, priors):
    ids = np.arange(N)
    for label in range(4):
        drawn = np.bincount(draw(ids, np.full(N, label), mechanism, "a", priors), minlength=4)
        expected = mechanism.transition_matrix(priors)[label] * N
        assert np.all(drawn[expected == 0] == 0)
        some = expected > 0
        chi2 = np.sum((drawn[some] - expected[some]) ** 2 / expected[some])
        assert chi2 < 21.1  # 3 degrees of freedom, 1e-4


def test_numbers_are_drawn_too():
    drawn = draw(np.arange(N), np.zeros(N), BINS)
    assert set(drawn.tolist()) == {0.5, 1.5}
    assert np.mean(drawn == 0.5) == pytest.approx(np.e / (1 + np.e), abs=0.01)
    np.testing.assert_array_equal(drawn, draw(np.arange(N), np.zeros(N, np.int32), BINS))


@pytest.mark.parametrize("texts", [False, True])
def test_order_batches_and_types_change_nothing(texts):
    ids = [f"row {i}" for i in range(999)] if texts else list(range(999))
    labels = np.arange(999) % 4
    whole = draw(ids, labels)
    order = np.random.default_rng(0).permutation(999)
    np.testing.assert_array_equal(whole[order], draw(np.array(ids)[order], labels[order]))
    parts = [draw(pa.array(ids[i : i + 7]), labels[i : i + 7]) for i in range(0, 999, 7)]
    np.testing.assert_array_equal(whole, np.concatenate(parts))


def test_rows_that_need_more_words_are_the_same_in_any_batch(monkeypatch):
    monkeypatch.setattr(_random, "_RANGE", np.uint64(8))  # a third of the targets is drawn again
    labels = np.arange(300) % 4
    whole = draw(np.arange(300), labels)
    alone = [draw([i], labels[i : i + 1])[0] for i in range(300)]
    np.testing.assert_array_equal(whole, alone)
    assert len(set(whole.tolist())) == 4


@pytest.mark.parametrize("what", ["release", "key", "mechanism", "ids", "kind of ids", "label"])
def test_all_that_a_draw_depends_on_makes_it_independent(what):
    ids, labels = np.arange(N), np.zeros(N, int)
    first = draw(ids, labels, RandomizedResponse(1.0, 2))
    other = {
        "release": lambda: draw(ids, labels, RandomizedResponse(1.0, 2), "b"),
        "key": lambda: draw(ids, labels, RandomizedResponse(1.0, 2), key=bytes(32)),
        "mechanism": lambda: draw(ids, labels, RandomizedResponse(1.0 + 1e-12, 2)),
        "ids": lambda: draw(ids + N, labels, RandomizedResponse(1.0, 2)),
        "kind of ids": lambda: draw(ids.astype(str), labels, RandomizedResponse(1.0, 2)),
        "label": lambda: 1 - draw(ids, 1 - labels, RandomizedResponse(1.0, 2)),
    }[what]()
    assert abs(np.corrcoef(first, other)[0, 1]) < 5 / np.sqrt(N)


@pytest.mark.parametrize(
    ("ids", "labels", "error", "message"),
    [
        ([1, None], [0, 1], ValueError, "1 of 2 ids are missing"),
        ([1, "b"], [0, 1], TypeError, "a mix"),
        ([1.5, 2.0], [0, 1], TypeError, "whole numbers or text"),
        ([1, 2], [0], ValueError, "2 ids"),
        ([1, 2], [0, 4], ValueError, "labels"),
        ([1, 2], ["a", "b"], TypeError, "numbers"),
    ],
)
def test_bad_rows_are_refused(ids, labels, error, message):
    with pytest.raises(error, match=message):
        draw(ids, labels)


def test_other_mechanisms_are_refused():
    with pytest.raises(TypeError, match="keyed draws are made by"):
        draw([1], [0.5], LaplaceMechanism(1.0, low=0.0, high=1.0))


@pytest.fixture
def key(tmp_path):
    return ReleaseKey.create(tmp_path / "labels.key")


def test_the_file_is_private_and_pickles_as_its_path(key):
    assert stat.S_IMODE(key.path.stat().st_mode) == 0o600
    assert key.secret not in pickle.dumps(key)
    assert key.secret.hex().encode() not in pickle.dumps(key)
    assert pickle.loads(pickle.dumps(key)).secret == key.secret
    assert key.secret.hex() not in repr(key)
    with pytest.raises(FileExistsError):
        ReleaseKey.create(key.path)


def test_releases_add_up_and_names_are_bound(key):
    first, second = RandomizedResponse(1.0, 3), RRWithPrior(0.5, 4)
    key.register("a", first)
    key.register("a", first)
    key.register("b", second, PRIOR)
    assert key.guarantee().epsilon == 1.5
    assert stat.S_IMODE(key.path.stat().st_mode) == 0o600
    for mechanism, priors in ((RandomizedResponse(2.0, 3), None), (second, PRIOR)):
        with pytest.raises(ValueError, match="another mechanism or prior"):
            key.register("a", mechanism, priors)
    with pytest.raises(ValueError, match="another mechanism or prior"):
        key.register("b", second, PRIOR[::-1])
    assert key.guarantee().epsilon == 1.5


def test_the_statement_names_what_it_rests_on(key):
    key.register("a", RandomizedResponse(1.0, 3))
    stated = json.loads(key.statement("a", 500))
    assert stated["guarantee"]["epsilon"] == 1.0
    assert stated["receipts"][0]["labels"]["size"] == 500
    text = " ".join(stated["statement"])
    assert "pseudorandom" in text and "each id names one row" in text
    assert key.secret.hex() not in key.statement("a")


def test_a_lost_or_damaged_key_is_said(tmp_path, key):
    with pytest.raises(FileNotFoundError, match="Restore it"):
        ReleaseKey(tmp_path / "other.key")
    key.path.write_text("{}")
    with pytest.raises(ValueError, match="damaged"):
        ReleaseKey(key.path)
