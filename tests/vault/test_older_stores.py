"""Stores and keys of version 0.2 keep their spending, and are brought to the present format.

Version 0.2 (commit 9f9dc74) made ``of_0_2``: ``store``, with 60 labels, keyed draws, a histogram,
steps, a raised budget, weights and two releases of an engine, one of them not adopted yet;
``forgotten``, a similar store after ``tf-labeldp forget``; and ``keys/labels.key`` of an engine,
with noisy labels and two histograms, one without its output. ``expected`` has the statements and
releases of version 0.2.
"""

from __future__ import annotations

import json
import pathlib
import shutil

import numpy as np
import pytest

import tf_labeldp as ldp
from tf_labeldp.accounting import provenance as _public_input
from tf_labeldp.mechanisms import HistogramMechanism, RandomizedResponse, RRWithPrior
from tf_labeldp.scale import ReleaseKey
from tf_labeldp.vault import LabelStoreError, PrivateLabels, forget
from tf_labeldp.vault.ledger import Ledger
from tf_labeldp.vault.records import sealed_json

OF_0_2 = pathlib.Path(__file__).parent / "of_0_2"
LABELS = np.random.default_rng(2).integers(0, 3, 60)
IDS = [f"p{i}" for i in range(60)]
TIGHTER = 2e-4
"""The largest relative decrease of epsilon: losses are composed on a finer grid than in 0.2."""
EXPECTED = json.loads((OF_0_2 / "expected.json").read_text())
HISTORY = EXPECTED["history"].replace(", which came along", " (of an input)")
HISTOGRAM = HistogramMechanism(0.5, 3)


@pytest.fixture
def old(tmp_path):
    """A copy of the folder for one test."""
    return pathlib.Path(shutil.copytree(OF_0_2, tmp_path / "old"))


def opened(folder, **arguments):
    arguments = {"draws": "keyed", "ids": IDS, **arguments}
    return PrivateLabels(LABELS, 3, store=folder / "store", **arguments)


def ids(receipts):
    return [receipt.id for receipt in receipts]


def contents(folder):
    files = [path for path in folder.rglob("*") if path.is_file() and not path.name == ".lock"]
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


def interrupt(*_):
    raise KeyboardInterrupt


def draws_of(vault):
    counts = vault.release(HistogramMechanism(0.25, 3), key="counts")
    response = RandomizedResponse(0.5, 3)
    part = np.arange(20)[::-1]
    return {
        "all": vault.randomize(response),
        "counts": counts,
        "part": vault.randomize(RRWithPrior(0.25, 3), part, counts.priors(), key="part"),
    }


def test_a_store_of_0_2_keeps_its_draws_and_spending(old, no_new_randomness):
    for _ in range(2):
        vault = opened(old)
    assert vault.guarantee().epsilon == pytest.approx(EXPECTED["epsilon"], rel=TIGHTER)
    assert ids(vault.receipts) == EXPECTED["receipts"]
    assert str(vault.history()) == HISTORY
    assert vault.budget == ldp.PrivacyBudget(8.0, 1e-3)
    no_new_randomness()
    with np.load(old / "expected.npz") as expected:
        for name, found in draws_of(vault).items():
            np.testing.assert_array_equal(found.values, expected[name])
    noisy = draws_of(vault)["part"]
    np.testing.assert_array_equal(noisy.indices, np.arange(20)[::-1])
    assert noisy.priors is not None and len(noisy.receipts) == 2


def test_it_is_brought_to_the_present_format(old):
    vault = opened(old)
    names = {path.name for path in (old / "store").iterdir()}
    expected = {"header.json", "PRIVATE-fingerprint", "records", "last-record", "labels.key"}
    assert names - {".lock"} == expected
    key = json.loads((old / "store" / "labels.key").read_text())
    assert set(key) == {"format", "secret", "checksum"}
    found = ReleaseKey(old / "store" / "labels.key")
    assert found.guarantee().epsilon == vault.guarantee().epsilon
    with pytest.raises(ValueError, match="drawn for 60 rows"):
        found.bind_rows("engine", 59, 12345)
    found.bind_rows("engine", 60, 12345)


def test_it_is_read_without_labels(old):
    ledger = Ledger.of_store(old / "store")
    stated = ldp.accounting.receipts.compose_receipts(ledger.receipts(), 1e-3)
    assert stated.epsilon == pytest.approx(EXPECTED["epsilon"], rel=TIGHTER)
    assert str(ledger.history()) == HISTORY == str(opened(old).history())


def test_a_reader_completes_an_upgrade_that_was_killed(old, monkeypatch):
    """The header has the present format, and the key still lists the releases."""
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr("tf_labeldp.vault._store_of_0_2.import_key", interrupt)
        Ledger.of_store(old / "store")
    stated = ldp.accounting.receipts.compose_receipts(Ledger.of_store(old / "store").receipts())
    assert stated.epsilon == pytest.approx(EXPECTED["epsilon"], rel=TIGHTER)


def test_a_new_store_of_its_project_upgrades_it(old):
    """The turn of the new store holds the lock of the project already."""
    header = json.loads((old / "store" / "header.json").read_text())
    del header["digest"]
    (old / "store" / "header.json").write_bytes(sealed_json({**header, "project": "0" * 32}))
    stores = {"store": header["label_set"]}
    (old / "project.json").write_bytes(sealed_json({"name": "0" * 32, "stores": stores}))
    later = PrivateLabels([0, 1] * 20, 2, store=old / "later")
    later.randomize(RandomizedResponse(0.5, 2))
    assert later.budget == ldp.PrivacyBudget(8.0, 1e-3)
    assert opened(old).guarantee().epsilon == later.guarantee().epsilon > EXPECTED["epsilon"] + 0.4


def test_with_other_labels_it_is_refused_and_unchanged(old):
    before = contents(old)
    for labels, message in (
        (LABELS[::-1], "made for other labels"),
        (LABELS[1:], "expected the 60"),
    ):
        with pytest.raises(LabelStoreError, match=message):
            PrivateLabels(labels, 3, store=old / "store")
    with pytest.raises(LabelStoreError, match="num_classes differ"):
        PrivateLabels(LABELS, 4, store=old / "store")
    assert contents(old) == before


def test_it_recognizes_the_weights_of_0_2(old, monkeypatch):
    monkeypatch.setattr(_public_input, "_OF_WEIGHTS", {})
    opened(old)
    [[receipts]] = _public_input._OF_WEIGHTS.values()
    assert ids(receipts) == EXPECTED["receipts"][:2]


def test_a_forgotten_store_of_0_2_keeps_its_receipts(old):
    path = old / "forgotten"
    before = str(Ledger.of_store(path).history())
    assert forget(path) == []
    ledger = Ledger.of_store(path)
    assert str(ledger.history()) == before and len(ledger.receipts()) == 8
    assert ledger.budget == ldp.PrivacyBudget(8.0, 1e-3)
    with pytest.raises(LabelStoreError, match=r"forgotten on .* by officer"):
        PrivateLabels(LABELS, 3, store=path)


def test_a_key_file_of_0_2_opens_with_the_same_statement(old):
    path = old / "keys" / "labels.key"
    key = ReleaseKey(path)
    assert key.secret.hex() == EXPECTED["secret"] and "releases" in json.loads(path.read_text())
    assert key.guarantee().epsilon == EXPECTED["key"]
    assert set(json.loads(path.read_text())) == {"format", "secret", "checksum"}
    again = ReleaseKey(path)
    assert again.secret == key.secret and again.guarantee().epsilon == EXPECTED["key"]
    again.register("noisy", RandomizedResponse(1.0, 3))
    assert again.guarantee().epsilon == EXPECTED["key"]
    with pytest.raises(ValueError, match="drawn for 9 rows"):
        again.bind_rows("noisy", 8, 777)


def test_a_statistic_of_0_2_is_never_drawn_again(old):
    key = ReleaseKey(old / "keys" / "labels.key")

    def draw():
        raise AssertionError("drawn again")

    assert key.draw_once("counts", HISTOGRAM, draw)["values"].tolist() == [4, 3, 2]
    with pytest.raises(LabelStoreError, match=r"written to .*labels\.key\.moved\.npz.*new release"):
        key.draw_once("moved", HISTOGRAM, draw)


def test_a_kill_during_the_upgrade_loses_and_repeats_nothing(run_writers):
    folders = list(run_writers("killed", "upgrade")[0].iterdir())
    assert len(folders) > 20
    for folder in folders:
        vault = opened(folder)
        expected = pytest.approx(EXPECTED["epsilon"], rel=TIGHTER)
        assert vault.guarantee().epsilon == expected, folder.name
        assert str(vault.history()) == HISTORY
        key = ReleaseKey(folder / "keys" / "labels.key")
        assert key.guarantee().epsilon == EXPECTED["key"] and len(key.receipts()) == 3


def flip(path, place):
    whole = path.read_bytes()
    path.write_bytes(whole[:place] + bytes([whole[place] ^ 0x80]) + whole[place + 1 :])


@pytest.mark.parametrize("name", ["draws/000001.npz", "charges/000001", "charges/000007"])
def test_b9_a_flipped_charge_of_0_2_is_damaged(old, name):
    path = old / "store" / name
    flip(path, path.stat().st_size // 2)
    for open_it in (lambda: opened(old), lambda: Ledger.of_store(old / "store")):
        with pytest.raises(LabelStoreError, match="is damaged"):
            open_it()


@pytest.mark.parametrize("lost", ["draws/000003.npz", "charges/000003", "labels.key"])
def test_a_store_of_0_2_that_lacks_a_charge_is_refused(old, lost):
    (old / "store" / lost).unlink()
    for open_it in (lambda: opened(old), lambda: Ledger.of_store(old / "store")):
        with pytest.raises(LabelStoreError, match=r"lacks a draw|labels\.key is missing"):
            open_it()


def test_a_store_of_0_1_is_refused_with_what_to_do(tmp_path):
    header = {"format": 1, "label_set": "0" * 32, "num_labels": 60, "num_classes": 3}
    (tmp_path / "header.json").write_text(json.dumps(header))
    for open_it in (
        lambda: PrivateLabels(LABELS, 3, budget=ldp.PrivacyBudget(1.0), store=tmp_path),
        lambda: Ledger.of_store(tmp_path),
        lambda: forget(tmp_path),
    ):
        with pytest.raises(LabelStoreError, match=r"has format 1, .*\(0\.1 wrote format 1"):
            open_it()
    assert {path.name for path in tmp_path.iterdir()} <= {"header.json", ".lock"}


def test_a_header_without_the_kind_of_its_labels_is_refused(tmp_path):
    PrivateLabels([0, 1] * 9, 2, budget=ldp.PrivacyBudget(1.0), store=tmp_path / "s")
    path = tmp_path / "s" / "header.json"
    header = json.loads(path.read_text())
    del header["num_classes"], header["digest"]
    path.write_bytes(sealed_json(header))
    with pytest.raises(LabelStoreError, match=r"header\.json is damaged"):
        ldp.dossier.report(tmp_path / "s")
