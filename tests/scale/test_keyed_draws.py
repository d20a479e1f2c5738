"""Keyed draws: their channel, their inputs, and the ledger with their charges."""

from __future__ import annotations

import hashlib
import json
import pickle
import shutil
import stat

import numpy as np
import pyarrow as pa
import pytest
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from hypothesis import given, settings
from hypothesis import strategies as st
from mechanism_cases import needing
from scipy import stats

from tf_labeldp import BudgetExceededError, PrivacyBudget, PrivateLabels, guarantee, mechanisms
from tf_labeldp.accounting import dp_sgd_charge
from tf_labeldp.mechanisms import (
    ChannelMechanism,
    HistogramMechanism,
    InformativeRR,
    LabelMechanism,
    LaplaceMechanism,
    Priors,
    RandomizedResponse,
    RROnBins,
    RRTopK,
    RRWithPrior,
    SurveyChannel,
    classes,
    random_bits,
)
from tf_labeldp.plugins import DrawSettingsError, KeyedRows
from tf_labeldp.scale import ReleaseKey, randomize_batch
from tf_labeldp.vault import (
    ClusterRandomizedResponse,
    Keyed,
    LabelStoreError,
    Numbers,
    Rows,
    Store,
    keyed_draws,
)
from tf_labeldp.vault.row_ids import RowIds

KEY = bytes(range(32))
PRIOR = np.array([0.5, 0.3, 0.15, 0.05])
CHANNEL = ChannelMechanism(1.0, (0.0, 1.0), (-1.0, 2.0), ((0.7, 0.3), (0.3, 0.7)))
BINS = RROnBins(1.0, [0.0, 1.0, 2.0], outputs=[0.5, 1.5], bin_of_input=[0, 0, 1])
RR, WITH_PRIOR = RandomizedResponse(1.0, 4), RRWithPrior(1.0, 4)
CASES = {
    **{
        name: (kind(1.0, 4), PRIOR if kind.public_input == "priors" else None)
        for name, kind in needing("epsilon", "num_classes").items()
        if kind.has_keyed_draws
    },
    "RRTopK": (RRTopK(1.5, 4, k=2), PRIOR),
    "survey": (SurveyChannel.from_warner(0.5, 4), None),
}
N = 60_000


def draw(ids, labels, mechanism=RR, release="a", priors=None, key=KEY):
    return randomize_batch(ids, np.asarray(labels), mechanism, key, release, priors)


@pytest.mark.parametrize(("mechanism", "priors"), CASES.values(), ids=CASES)
def test_the_channel_is_the_stated_one(mechanism, priors):
    ids = np.arange(N)
    for label in range(4):
        expected = mechanism.transition_matrix(priors)[label] * N
        drawn = draw(ids, np.full(N, label), mechanism, "a", priors)
        drawn = np.bincount(drawn, minlength=expected.size)
        assert np.all(drawn[expected == 0] == 0)
        some = expected > 0
        chi2 = np.sum((drawn[some] - expected[some]) ** 2 / expected[some])
        assert chi2 < stats.chi2.isf(1e-4, np.sum(some) - 1)


GOLDEN = [
    ((RR, None), "3132022101230102", "0113022303203103"),
    ((WITH_PRIOR, PRIOR), "1011011101100110", "0100001010110101"),
    (
        (RRWithPrior(1.0, 4), np.stack([PRIOR, PRIOR[::-1]] * 8)),
        "0213030203130303",
        "1303031203030303",
    ),
]


@pytest.mark.parametrize(("case", "numbers", "texts"), GOLDEN)
def test_draws_of_version_0_2_are_drawn_again(case, numbers, texts):
    """Another draw of the same row would be a second release."""
    for ids, expected in ((np.arange(16), numbers), ([f"p{i}" for i in range(16)], texts)):
        found = draw(ids, np.arange(16) % 4, case[0], priors=case[1])
        assert "".join(map(str, found)) == expected


def test_numbers_are_drawn_too():
    drawn = draw(np.arange(N), np.zeros(N), BINS)
    assert set(drawn.tolist()) == {0.5, 1.5}
    assert np.mean(drawn == 0.5) == pytest.approx(np.e / (1 + np.e), abs=0.01)
    np.testing.assert_array_equal(drawn, draw(np.arange(N), np.zeros(N, np.int32), BINS))


def test_a_channel_of_numbers_is_drawn_too():
    """``LabelRandomizer(unbiased=True)`` draws by it, and had released its histogram by then."""
    for label, of_second in ((0.0, 0.3), (1.0, 0.7)):
        drawn = draw(np.arange(N), np.full(N, label), CHANNEL)
        assert set(drawn.tolist()) == {-1.0, 2.0}
        assert np.mean(drawn == 2.0) == pytest.approx(of_second, abs=0.01)
        part = draw(np.arange(100, 200), np.full(100, label), CHANNEL)
        np.testing.assert_array_equal(drawn[100:200], part)


def test_a_draw_without_a_key_is_refused_before_the_release_that_it_follows(tmp_path):
    vault = PrivateLabels(
        np.arange(300) % 3, 3, budget=PrivacyBudget(9.0), draws="keyed", store=tmp_path / "s"
    )
    clustered = ClusterRandomizedResponse.for_epsilon(1.0, 3)
    with pytest.raises(TypeError, match="keyed draws need"):
        vault.randomize(clustered, clusters=np.zeros(300, int))
    assert vault.receipts == () and vault.remaining() == 9.0


def test_every_mechanism_with_keyed_draws_is_drawn_here():
    drawn = {type(mechanism) for mechanism, _ in CASES.values()} | {RROnBins, ChannelMechanism}
    # A class of a docstring's example is of this library, too.
    kinds = LabelMechanism.with_keyed_draws()
    assert {kind for kind in kinds if hasattr(mechanisms, kind.__name__)} == drawn


@pytest.mark.parametrize("texts", [False, True])
def test_order_batches_and_types_change_nothing(texts):
    ids = [f"row {i}" for i in range(999)] if texts else list(range(999))
    labels = np.arange(999) % 4
    whole = draw(ids, labels)
    order = np.random.default_rng(0).permutation(999)
    np.testing.assert_array_equal(whole[order], draw(np.array(ids)[order], labels[order]))
    parts = [draw(pa.array(ids[i : i + 7]), labels[i : i + 7]) for i in range(0, 999, 7)]
    np.testing.assert_array_equal(whole, np.concatenate(parts))


@pytest.mark.slow
@settings(deadline=None)
@given(st.lists(st.text(max_size=24), max_size=9), st.integers(0, 3))
def test_each_text_has_its_own_block(texts, skipped):
    def block(text):
        name = text.encode()
        if len(name) < 16:
            return name.ljust(15, b"\0") + bytes([len(name)])
        digest = hashlib.blake2b(name, key=bytes(32), digest_size=15, person=b"labeldp-text")
        return digest.digest() + b"\x10"

    whole = pa.array(texts, pa.string())
    for ids in (whole, whole[skipped:], pa.chunked_array([whole[:2], whole[2:]])):
        blocks = RowIds(ids).blocks(bytes(32))
        assert [row.tobytes() for row in blocks] == [block(text) for text in ids.to_pylist()]
    assert len(set(map(block, texts))) == len(set(texts))


def test_rows_that_need_more_words_are_the_same_in_any_batch(monkeypatch):
    monkeypatch.setattr(
        random_bits, "_RANGE", np.uint64(8)
    )  # a third of the targets is drawn again
    labels = np.arange(300) % 4
    whole = draw(np.arange(300), labels)
    alone = [draw([i], labels[i : i + 1])[0] for i in range(300)]
    np.testing.assert_array_equal(whole, alone)
    assert len(set(whole.tolist())) == 4


@pytest.mark.parametrize("what", ["release", "key", "mechanism", "ids", "kind of ids", "label"])
@pytest.mark.holds("vault.ReleaseKey", "scale.randomize_batch")
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
        ([1, 2**64], [0, 1], ValueError, "below 2\\^64"),
        ([-1, 2**63], [0, 1], ValueError, "of one type, below"),
        ([1, -(2**63) - 1], [0, 1], ValueError, "below 2\\^64"),
        (["a\ud800", "b"], [0, 1], ValueError, "texts of valid Unicode"),
        ([b"\xff\xfe", b"b"], [0, 1], ValueError, "texts in UTF-8"),
    ],
)
def test_bad_rows_are_refused(ids, labels, error, message):
    with pytest.raises(error, match=message):
        draw(ids, labels)


def test_words_are_a_cbc_mac_of_id_label_and_place():
    secret = bytes(range(32))
    rows = KeyedRows([7, -1], [2, 0], RR, secret, "a")

    def aes(block):
        return Cipher(algorithms.AES(rows._key), modes.ECB()).encryptor().update(block)

    def xor(block, other):
        return bytes(a ^ b for a, b in zip(block, other, strict=True))

    words = keyed_draws._KeyedWords(rows._state, rows._key)
    drawn = [words.integers(0, 1 << 53, 2) for _ in range(4)]
    total = 0
    for i, (name, label) in enumerate([((7, 0), 2.0), ((2**64 - 1, 1), 0.0)]):
        chain = aes(np.array(name, "<u8").tobytes())
        chain = aes(xor(chain, np.array([label, 0.0], "<f8").tobytes()))
        for place in range(4):
            block = np.frombuffer(
                aes(xor(chain, np.array([place // 2, 1], "<u8").tobytes())), "<u8"
            )
            assert drawn[place][i] == int(block[place % 2]) >> 11
        # The fingerprint has a place that no draw reaches.
        block = aes(xor(chain, np.array([1 << 63, 1 << 63], "<u8").tobytes()))
        total += int(np.frombuffer(block, "<u8")[0])
    assert rows.fingerprint() == total % 2**64


@pytest.mark.parametrize("mechanism", [RRWithPrior(1.0, 4), InformativeRR(1.0, 4)])
def test_priors_by_row_are_part_of_the_row(mechanism):
    table = np.array([PRIOR, PRIOR[::-1], np.full(4, 0.25)])
    groups, labels = np.arange(3000) % 3, np.arange(3000) % 4
    whole = draw(np.arange(3000), labels, mechanism, priors=Priors(table, groups))
    np.testing.assert_array_equal(
        whole, draw(np.arange(3000), labels, mechanism, priors=table[groups])
    )
    part = draw(np.arange(1, 9), labels[1:9], mechanism, priors=Priors(table, groups[1:9]))
    np.testing.assert_array_equal(whole[1:9], part)
    other = draw(np.arange(3000), labels, mechanism, priors=Priors(table, (groups + 1) % 3))
    assert np.mean(other != whole) > 0.3
    with pytest.raises(ValueError, match="2 rows"):
        draw(np.arange(3), labels[:3], mechanism, priors=table[:2])


def test_other_mechanisms_are_refused():
    with pytest.raises(TypeError, match="keyed draws need"):
        draw([1], [0.5], LaplaceMechanism(1.0, low=0.0, high=1.0))


@pytest.fixture
def key(tmp_path):
    return ReleaseKey.create(tmp_path / "labels.key")


def test_the_file_is_private_and_pickles_as_its_path(key):
    assert stat.S_IMODE(key.path.stat().st_mode) == 0o600
    assert key.secret not in pickle.dumps(key)
    assert key.secret.hex().encode() not in pickle.dumps(key)
    assert pickle.loads(pickle.dumps(key)).secret == key.secret
    assert b"same_key" in pickle.dumps(key)  # Workers may have version 0.3.
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


def test_a_key_is_not_made_for_other_labels_than_those_of_its_store(tmp_path):
    budget = PrivacyBudget(1.0)
    both = [PrivateLabels([0, 1], 2, budget=budget, store=tmp_path / name) for name in "ab"]
    for name, other in zip("ab", reversed(both), strict=True):
        with pytest.raises(LabelStoreError, match="store of other labels"):
            ReleaseKey.create(tmp_path / name / "labels.key", labels=other.label_set)


def test_numbers_up_to_2_to_the_64th_are_ids_in_any_container():
    ids = [1, 2**63, 2**64 - 1]
    whole = draw(np.array(ids, np.uint64), [0, 1, 2])
    np.testing.assert_array_equal(whole, draw(ids, [0, 1, 2]))
    np.testing.assert_array_equal(whole, draw(np.array(ids, object), [0, 1, 2]))


BAD_NAMES = ["", 3, None, "a/b", "..", ".", "q\n", "x\0y", "a\\b", "\udc80", "\u202ea", "é" * 101]


@pytest.mark.parametrize("name", BAD_NAMES)
@pytest.mark.parametrize("call", ["register", "check", "draw_once"])
def test_a_release_needs_a_name_that_files_can_have(key, name, call):
    rest = [lambda: (1, {"values": np.zeros(3)})] * (call == "draw_once")
    key.is_drawn(name)
    with pytest.raises(ValueError, match="release must be a name") as refused:
        getattr(key, call)(name, RandomizedResponse(1.0, 3), *rest)
    assert str(refused.value).isprintable()
    assert key.receipts() == ()


@pytest.mark.parametrize("name", ["a b", "é" * 100, "2026-11-28", "..a"])
def test_other_names_are_taken(key, name):
    key.register(name, RandomizedResponse(1.0, 3))
    assert key.receipts(name)


def test_a_draw_by_another_version_of_the_draws_is_refused(key, monkeypatch):
    """Its labels would be second draws; those of this version are ``GOLDEN``."""
    key.register("a", RR)
    key.register("b", WITH_PRIOR, PRIOR)
    before = draw(np.arange(N), np.zeros(N, int))
    monkeypatch.setattr(keyed_draws, "_DRAW_VERSION", 2)
    for each in (key, ReleaseKey(key.path)):
        for name, mechanism, priors in (("a", RR, None), ("b", WITH_PRIOR, PRIOR)):
            with pytest.raises(ValueError, match="another version of the draws"):
                each.register(name, mechanism, priors)
    after = draw(np.arange(N), np.zeros(N, int))
    assert abs(np.corrcoef(before, after)[0, 1]) < 5 / np.sqrt(N)


@pytest.mark.parametrize("has_ledger", [True, False])
def test_a_worker_with_another_key_under_the_same_path_is_refused(key, tmp_path, has_ledger):
    pickled = pickle.dumps(key)
    assert pickle.loads(pickled).secret == key.secret
    key.path.unlink()
    shutil.rmtree(f"{key.path}.ledger")
    other = ReleaseKey.create(key.path)  # on the disk of a worker
    if not has_ledger:
        shutil.rmtree(f"{key.path}.ledger")
    with pytest.raises(LabelStoreError, match=r"another key\. Mount one key file"):
        pickle.loads(pickled)
    if has_ledger:
        assert other.receipts() == ()


def test_check_refuses_what_the_vault_can_not_afford_before_a_pipeline_runs(tmp_path):
    labels = PrivateLabels([0, 1], 2, budget=PrivacyBudget(1.0), store=tmp_path, draws="keyed")
    key = ReleaseKey(tmp_path / "labels.key")
    key.check("a", RandomizedResponse(1.0, 2))
    with pytest.raises(BudgetExceededError):
        key.check("a", RandomizedResponse(1.5, 2))
    key.register("a", RandomizedResponse(1.0, 2))
    key.check("a", RandomizedResponse(1.0, 2))  # A release that is recorded costs nothing more.
    assert labels.guarantee().epsilon == 1.0


def test_rows_of_a_release_stay_the_same(key):
    key.register("a", RR)

    def rows(labels, start=0):
        ids = np.arange(start, start + len(labels))
        return KeyedRows(ids, labels, RR, key.secret, "a")

    whole = rows([0, 1, 2, 3]).fingerprint()
    key.bind_rows("a", 4, whole)
    key.bind_rows("a", 4, rows([0, 1]).fingerprint() + rows([2, 3], 2).fingerprint())
    for count, labels in ((4, [0, 1, 2, 2]), (3, [0, 1, 2])):
        with pytest.raises(ValueError, match=f"drawn for 4 rows, and now there are {count}, or"):
            key.bind_rows("a", count, rows(labels).fingerprint())
    assert f"{whole % 2**64:016x}" not in key.statement("a")


def vault(labels, store, ids=None, **options):
    return PrivateLabels(labels, 4, store=store, draws=Keyed(ids), **options)


def test_a_vault_draws_by_its_key(tmp_path):
    labels, ids = np.arange(400) % 4, [f"p{i}" for i in range(400)]
    budget = PrivacyBudget(4.0)
    first = vault(labels, tmp_path / "s", ids=ids, budget=budget)
    noisy = first.randomize(RR, key="a")
    assert "pseudorandom" in str(noisy.guarantee())
    path = tmp_path / "s" / "labels.key"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    key = ReleaseKey(path)
    again = randomize_batch(ids, labels, RR, key.secret, "vault/a")
    np.testing.assert_array_equal(noisy.values, again)
    some = first.randomize(RR, indices=[9, 3], key="b").values
    again = randomize_batch(["p9", "p3"], labels[[9, 3]], RR, key.secret, "vault/b")
    np.testing.assert_array_equal(some, again)
    first.release(HistogramMechanism(0.5, num_classes=4), key="counts")
    # A release of an engine is in the vault's ledger, and spends its budget.
    key.register("engine", RandomizedResponse(1.0, 4))
    assert first.guarantee().epsilon == 3.5
    reopened = vault(labels, tmp_path / "s", ids=ids)
    np.testing.assert_array_equal(reopened.randomize(RR, key="a").values, noisy.values)
    assert reopened.guarantee().epsilon == 3.5 and "engine" in str(reopened.history())
    for use in (key.register, lambda *of: key.draw_once(*of, pytest.fail)):
        with pytest.raises(BudgetExceededError):
            use("too much", HistogramMechanism(1.0, num_classes=4))
    assert vault(labels, tmp_path / "s", ids=ids).guarantee().epsilon == 3.5
    plain = PrivateLabels(labels, 4, store=tmp_path / "s")
    key.register("later", RandomizedResponse(0.5, 4))
    assert plain.guarantee().epsilon == 4.0


def test_a_key_that_would_be_lost_is_refused():
    for draws in ("keyed", Keyed(), Keyed(["a", "b"])):
        with pytest.raises(ValueError, match="a store with keyed draws, got none"):
            PrivateLabels([0, 1], 2, budget=PrivacyBudget(1.0), draws=draws)


def test_each_vault_has_its_own_key(tmp_path):
    mechanism, labels = RandomizedResponse(0.1, 4), np.zeros(400, int)
    stores = (tmp_path / name for name in "ab")
    keyed, other = (vault(labels, store, budget=PrivacyBudget(9.0)) for store in stores)
    first, second = keyed.randomize(mechanism), keyed.randomize(mechanism)
    assert np.any(first.values != second.values)
    assert np.any(first.values != other.randomize(mechanism).values)


def test_a_vault_refuses_what_it_cannot_key(tmp_path):
    budget = PrivacyBudget(1.0)
    with pytest.raises(ValueError, match=r"1 ids name more than one row \(1 rows too many of 3"):
        vault([0, 1, 2], None, ids=["a", "b", "a"], budget=budget)
    with pytest.raises(TypeError, match="a mix"):
        vault([0, 1], None, ids=[1, "b"], budget=budget)
    with pytest.raises(ValueError, match="2 ids and 3 labels"):
        vault([0, 1, 2], None, ids=[1, 2], budget=budget)
    with pytest.raises(ValueError, match="insecure_seed"):
        vault([0, 1, 2], None, budget=budget, insecure_seed=1)
    with pytest.raises(ValueError, match="neither Rows"):
        PrivateLabels([[0, 1]], Rows(2), budget=budget, draws="keyed")
    with pytest.raises(ValueError, match="draws must be"):
        PrivateLabels([0, 1], 2, budget=budget, draws="fresh")
    options = {"budget": budget, "store": tmp_path / "numbers"}
    numbers = PrivateLabels([0.0, 1.0], Numbers(0, 1), draws="keyed", **options)
    with pytest.raises(TypeError, match="keyed draws need"):
        numbers.randomize(LaplaceMechanism(1.0, low=0.0, high=1.0))
    assert numbers.guarantee().epsilon == 0.0


def test_rows_beyond_the_chunk_of_a_mechanism_are_drawn_in_its_chunks(monkeypatch):
    n = 3000
    priors = np.random.default_rng(0).dirichlet(np.ones(4), n)
    ids, labels, mechanism = np.arange(n), np.arange(n) % 4, RRWithPrior(1.0, 4)
    alone = draw(ids, labels, mechanism, priors=priors)
    sizes = []

    class Counted(keyed_draws._KeyedWords):
        def __init__(self, state, key):
            sizes.append(len(state))
            super().__init__(state, key)

    monkeypatch.setattr(keyed_draws, "_KeyedWords", Counted)
    monkeypatch.setattr(classes, "_CHUNK_CELLS", 4 * 1000)
    np.testing.assert_array_equal(draw(ids, labels, mechanism, priors=priors), alone)
    assert sizes == [1000, 1000, 1000]
    assert draw([], [], mechanism, priors=PRIOR).size == 0


@pytest.mark.parametrize("by_group", [False, True])
def test_a_vault_draws_rows_in_blocks(tmp_path, monkeypatch, by_group):
    table = np.random.default_rng(0).dirichlet(np.ones(4), 5)
    priors = Priors(table, np.array([4, 0, 1, 3, 3])) if by_group else table
    mechanism, y = RRWithPrior(1.0, 4), [0, 1, 2, 3, 3]
    budget = PrivacyBudget(2.0)
    keyed = vault(y, tmp_path / "store", budget=budget)
    whole = keyed.randomize(mechanism, priors=priors, key="a").values
    monkeypatch.setattr(random_bits, "_BLOCK_ROWS", 2)
    secret = ReleaseKey(tmp_path / "store" / "labels.key").secret
    np.testing.assert_array_equal(
        whole, randomize_batch(range(5), y, mechanism, secret, "vault/a", priors)
    )
    other = vault(y, tmp_path / "other", budget=budget)
    drawn = other.randomize(mechanism, priors=priors, key="a").values
    secret = ReleaseKey(tmp_path / "other" / "labels.key").secret
    np.testing.assert_array_equal(
        drawn, randomize_batch(range(5), y, mechanism, secret, "vault/a", priors)
    )
    response, few = RandomizedResponse(0.5, 4), vault(y, tmp_path / "few", budget=budget)
    drawn = few.randomize(response, indices=[3, 1], key="c")
    secret = ReleaseKey(tmp_path / "few" / "labels.key").secret
    expected = randomize_batch([3, 1], [y[3], y[1]], response, secret, "vault/c")
    np.testing.assert_array_equal(drawn.values, expected)
    assert few.randomize(response, indices=[], key="none").values.size == 0
    with pytest.raises(ValueError, match="priors must have shape"):
        other.randomize(mechanism, priors=np.full((7, 4), 0.25), key="b")
    with pytest.raises(ValueError, match="1 ids name more than one row"):
        vault(y, None, ids=[3, 1, 2, 4, 3], budget=budget)


def test_a_lost_or_foreign_key_of_a_vault_is_refused(tmp_path):
    for name in ("one", "other"):
        vault([0, 1], tmp_path / name, budget=PrivacyBudget(1.0)).randomize(RR, key="a")
    path = tmp_path / "one" / "labels.key"
    path.write_bytes((tmp_path / "other" / "labels.key").read_bytes())
    with pytest.raises(LabelStoreError, match="other labels"):
        vault([0, 1], tmp_path / "one")
    path.unlink()
    with pytest.raises(FileNotFoundError, match="Restore it"):
        vault([0, 1], tmp_path / "one")


def test_the_statement_names_what_it_rests_on(key):
    key.register("a", RandomizedResponse(1.0, 3))
    stated = json.loads(key.statement("a", 500))
    assert stated["guarantee"]["epsilon"] == 1.0
    assert stated["receipts"][0]["labels"]["size"] == 500
    text = " ".join(stated["statement"])
    assert "pseudorandom" in text and "Each id names one row" in text
    assert key.secret.hex() not in key.statement("a")


def test_b9_flipped_bits_of_a_key_are_refused(key):
    key.register("a", RandomizedResponse(1.0, 3))
    whole = key.path.read_bytes()
    places = np.random.default_rng(0).choice(8 * len(whole), 64, replace=False)
    for place in places.tolist():
        content = bytearray(whole)
        content[place // 8] ^= 1 << place % 8
        key.path.write_bytes(content)
        with pytest.raises(ValueError, match=r"damaged|no key file"):
            ReleaseKey(key.path)
    key.path.write_bytes(whole)
    assert ReleaseKey(key.path).secret == key.secret


@pytest.mark.parametrize("in_a_store", [False, True])
def test_b9_a_release_that_was_removed_by_hand_is_missed(tmp_path, in_a_store):
    if in_a_store:
        PrivateLabels([0, 1, 2], 3, budget=PrivacyBudget(9.0), store=tmp_path / "s")
        path = tmp_path / "s" / "labels.key"
    else:
        path = tmp_path / "labels.key"
    key = ReleaseKey.create(path)
    for name in ("first", "second"):
        key.register(name, RandomizedResponse(1.0, 3))
    assert b"first" not in path.read_bytes()
    for record in [file for file in tmp_path.rglob("*") if file.is_file() and file != path]:
        whole = record.read_bytes()
        if b"first" not in whole and b"second" not in whole:
            continue
        for content in (None, b"{}"):
            record.unlink()
            if content is not None:
                record.write_bytes(content)
            with pytest.raises(LabelStoreError, match=r"lacks record|is damaged"):
                ReleaseKey(path).guarantee()
            record.write_bytes(whole)
    assert ReleaseKey(path).guarantee().epsilon == 2.0


def test_a_key_without_its_ledger_is_refused(tmp_path, key):
    key.register("a", RandomizedResponse(1.0, 3))
    (tmp_path / "labels.key.ledger").rename(tmp_path / "elsewhere")
    with pytest.raises(LabelStoreError, match=r"labels\.key\.ledger .* is missing"):
        ReleaseKey(key.path).receipts()
    (tmp_path / "elsewhere").rename(tmp_path / "labels.key.ledger")
    key.path.rename(tmp_path / "lost")
    with pytest.raises(FileExistsError, match="Restore the file"):
        ReleaseKey.create(key.path)


def test_two_objects_of_one_key_see_each_others_releases(key):
    other = ReleaseKey(key.path)
    key.register("a", RandomizedResponse(1.0, 3))
    assert other.guarantee().epsilon == 1.0
    with pytest.raises(ValueError, match="another mechanism"):
        other.register("a", RandomizedResponse(0.5, 3))
    with pytest.raises(KeyError, match="no release 'b'"):
        other.receipts("b")


def test_a_lost_or_damaged_key_is_said(tmp_path, key):
    with pytest.raises(FileNotFoundError, match="Restore it"):
        ReleaseKey(tmp_path / "other.key")
    key.path.write_text("{}")
    with pytest.raises(ValueError, match="damaged"):
        ReleaseKey(key.path)


@pytest.mark.parametrize("key", [b"short", bytes(33), "a text of thirty-two characters!", None])
def test_a_key_that_is_none_is_refused(key):
    with pytest.raises(TypeError, match=r"key must be 32 secret bytes\. Use ReleaseKey"):
        randomize_batch([1, 2], np.array([0, 1]), RandomizedResponse(1.0, 2), key, "vault/a")


def test_what_priors_cost_is_kept_once_and_what_they_cost_others_not(tmp_path):
    """The ledger has each charge that may concern the key's labels once."""
    key = ReleaseKey.create(tmp_path / "labels.key", people="north")
    for people in ("south", "north"):
        budget = PrivacyBudget(1.0)
        vault = PrivateLabels([0, 1, 2], num_classes=3, budget=budget, people=people)
        receipts = vault.randomize(RandomizedResponse(1.0, 3)).receipts
        priors = Priors(np.full((1, 3), 1 / 3), receipts=receipts)
        for release in (f"{people}-a", f"{people}-b"):
            key.register(release, RRWithPrior(1.0, 3), priors)
    records = (tmp_path / "labels.key.ledger" / "records").iterdir()
    assert len(list(records)) == 4 + 1  # four releases, and the draw in the north
    assert key.guarantee().epsilon == 5.0
    for num_rows in (None, 3):
        own = json.loads(key.statement("north-a", num_rows))["guarantee"]
        assert own["epsilon"] == 2.0


@pytest.mark.parametrize("inputs", [0, 1, 2])
def test_a_statement_has_the_number_of_rows_of_its_own_labels_alone(key, inputs):
    receipts = ()
    for size in range(3, 3 + inputs):
        vault = PrivateLabels([0, 1] * size, num_classes=2, budget=PrivacyBudget(1.0))
        receipts += vault.randomize(RandomizedResponse(1.0, 2)).receipts
    key.register("a", RRWithPrior(1.0, 2), Priors(np.full((1, 2), 0.5), receipts=receipts))
    without, found = (json.loads(key.statement("a", rows))["receipts"] for rows in (None, 1000))
    assert [each["labels"]["size"] for each in without] == [*[6, 8][:inputs], 0]
    assert found[:-1] == without[:-1] and len(found) == inputs + 1
    assert found[-1]["labels"] == {**without[-1]["labels"], "size": 1000}


VAULTS = {
    "label": {"num_classes": 2},
    "user": {"num_classes": 2, "users": np.arange(600) // 3},
    "numbers": {"kind": Numbers(0.0, 1.0)},
    "people": {"num_classes": 2, "people": "north"},
}


@pytest.mark.holds("vault.ReleaseKey")
@pytest.mark.parametrize("case", VAULTS)
def test_the_key_of_a_vault_states_all_uses_of_the_vault(tmp_path, case):
    """Its draws, evaluations, training steps and raised budget, with the unit of the vault."""
    options = dict(VAULTS[case])
    is_number = case == "numbers"
    labels, path = np.arange(600) % 2, tmp_path / "s"
    budget = PrivacyBudget(20.0, 1e-5)
    vault = PrivateLabels(labels, budget=budget, draws="keyed", store=path, **options)
    key, unit = ReleaseKey(path / "labels.key"), "user" if case == "user" else "label"

    def check():
        assert key.guarantee().to_json() == vault.guarantee().to_json()
        assert guarantee([key]).epsilon == guarantee([vault]).epsilon
        assert [receipt.id for receipt in key.receipts()] == [use.id for use in vault.receipts]
        assert key.guarantee(1e-6).epsilon == vault.guarantee(delta=1e-6).epsilon
        assert unit in key.guarantee().unit

    assert key.guarantee().headline == vault.guarantee().headline == "(0, 0)-label-DP"
    assert unit in key.guarantee().unit
    draw = (
        RROnBins(1.0, [0.0, 1.0], [0.0, 1.0], [0, 1]) if is_number else RandomizedResponse(1.0, 2)
    )
    vault.randomize(draw, key="a")
    check()
    assert key.guarantee().epsilon == pytest.approx(3.0 if case == "user" else 1.0)
    if not is_number:
        vault.evaluate(labels, "accuracy", 1.0)
        check()
    vault.charge(
        dp_sgd_charge(20.0, sampling_probability=0.1, steps=5, delta=1e-5), what="steps", unit=unit
    )
    check()
    if case != "user":
        key.register("engine", RandomizedResponse(0.5, 2), num_rows=600)
        check()
        # The statement of one release is that of its own output.
        own = json.loads(key.statement("engine"))["guarantee"]
        assert own["epsilon"] == 0.5 and key.receipts("engine")[-1].unit == "label"
    reopened = ReleaseKey(key.path)
    assert reopened.guarantee().to_json() == vault.guarantee().to_json()


def test_the_key_of_a_vault_counts_the_other_stores_of_its_project(tmp_path):
    mechanism, budget = RandomizedResponse(1.0, 2), PrivacyBudget(4.0)
    first = PrivateLabels(
        [0, 1] * 9, 2, budget=budget, draws="keyed", store=Store(tmp_path / "p" / "a", project=True)
    )
    second = PrivateLabels([1, 0] * 9, 2, store=tmp_path / "p" / "b")
    second.randomize(mechanism, key="b")
    key = ReleaseKey(tmp_path / "p" / "a" / "labels.key")
    assert key.guarantee().epsilon == first.guarantee().epsilon == 1.0
    key.register("c", mechanism)
    assert key.guarantee().epsilon == second.guarantee().epsilon == 2.0


def test_a_key_that_was_refused_once_knows_its_releases(tmp_path):
    """The first call of an object may read the records, and be refused after that."""
    mechanism, project = RandomizedResponse(2.0, 2), tmp_path / "p"
    first = PrivateLabels(
        *([0, 1] * 9, 2),
        budget=PrivacyBudget(4.0),
        draws="keyed",
        store=Store(project / "a", project=True),
    )
    PrivateLabels([1, 0] * 9, 2, store=project / "b")
    first.randomize(RandomizedResponse(1.0, 2), key="own")
    ReleaseKey(project / "a" / "labels.key").register("c", mechanism)
    key = ReleaseKey(project / "a" / "labels.key")
    shutil.move(project / "b", tmp_path)
    for _ in range(2):
        with pytest.raises(LabelStoreError, match="lacks its store 'b'"):
            key.guarantee()
    shutil.move(tmp_path / "b", project)
    with pytest.raises(ValueError, match="another mechanism"):
        key.register("c", RandomizedResponse(0.5, 2))
    with pytest.raises(BudgetExceededError):
        key.register("d", mechanism)
    assert key.guarantee().epsilon == first.guarantee().epsilon == 3.0


def test_a_release_of_the_key_takes_what_its_vault_reserved(tmp_path):
    mechanism = RandomizedResponse(1.0, 2)
    labels = PrivateLabels([0, 1], 2, budget=PrivacyBudget(1.0), draws="keyed", store=tmp_path)
    key = ReleaseKey(tmp_path / "labels.key")
    with labels.reserve({"engine": mechanism}) as reserved:
        with pytest.raises(BudgetExceededError):
            key.register("other", RandomizedResponse(0.5, 2))
        with pytest.raises(DrawSettingsError, match="got another mechanism"):
            key.register("engine", HistogramMechanism(1.0, 2))
        key.register("engine", mechanism)
    assert labels.guarantee().epsilon == key.guarantee().epsilon == 1.0
    [receipt] = key.receipts("engine")
    assert receipt.plan in repr(reserved)


def test_an_engine_does_not_draw_for_another_unit(tmp_path):
    """The cost of a draw for one label is less than that for a row, or for a user."""
    for name, options in (("row", {"kind": Rows(2)}), ("user", {"num_classes": 2, "users": [5]})):
        store = tmp_path / name
        y = [[0, 1]] if name == "row" else [1]
        labels = PrivateLabels(y, budget=PrivacyBudget(9.0), store=store, **options)
        key = ReleaseKey.create(store / "labels.key")
        with pytest.raises(ValueError, match=f"unit is one label.*vault has {name}s"):
            key.register("a", RandomizedResponse(1.0, 2))
        assert labels.guarantee().epsilon == 0.0


def test_an_id_twice_in_one_batch_is_refused():
    """Its rows would share their noise, which reveals whether their labels are equal."""
    for ids in ([5, 2, 5], ["a", "b", "a"]):
        with pytest.raises(ValueError, match="1 ids name more than one row"):
            randomize_batch(ids, [0, 1, 0], RandomizedResponse(1.0, 2), bytes(32), "a")
