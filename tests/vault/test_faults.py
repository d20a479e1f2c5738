"""Failing disks: nothing is drawn twice, lost, or in an error; a torn ``last-record`` is mended."""

from __future__ import annotations

import json
import os

import numpy as np
import pytest

import tf_labeldp as ldp
from tf_labeldp.mechanisms import HistogramMechanism
from tf_labeldp.plugins import Ledger
from tf_labeldp.vault import LabelStoreError, PrivateLabels


@pytest.mark.slow
def test_300_faults_in_pairs_of_processes_lose_and_repeat_nothing(run_writers):
    """Short writes, full disks, errors and refusals, each in one of two processes on a store."""
    _, output = run_writers("faulty", "300")
    problems, faults = json.loads(output)
    assert problems == []
    assert sum(faults.values()) >= 300
    assert set(faults) == {"full", "error", "denied", "short", "short and full"}
    assert min(faults.values()) >= 15


def last_of(store):
    return (store / "last-record").read_bytes()


@pytest.mark.parametrize("how", ["cut", "empty", "zeros", "of 0.3", "mixed", "place"])
def test_a_torn_last_record_is_written_again(how, make, response, store):
    vault = make(epsilon=4.0, store=store)
    lines = [last_of(store)]
    for key in ("a", "b", "c"):
        vault.randomize(response(1.0), key=key)
        lines.append(last_of(store))
    new, old = (line[:75] + b"\n" for line in (lines[-1], lines[-2]))
    for place in range(1, 76, 5):
        torn = {
            "cut": lines[-1][:place],
            "empty": b"",
            "zeros": lines[-1][:place] + bytes(30),
            "of 0.3": new[:place],
            "mixed": new[:place] + old[place:],
            "place": lines[-1][: min(75 + place, len(lines[-1]) - 1)],
        }[how]
        (store / "last-record").write_bytes(torn)
        opened = make(epsilon=4.0, store=store)
        assert opened.guarantee().epsilon == 3.0
        assert last_of(store)[:75] == lines[-1][:75]
    opened.randomize(response(1.0), key="d")
    assert make(epsilon=4.0, store=store).guarantee().epsilon == 4.0


@pytest.mark.parametrize("cut", [9, 10, 40, 75, 76])
def test_a_torn_last_record_does_not_hide_a_lost_record(cut, make, response, store):
    """What is left of it names a record that is not there."""
    vault = make(epsilon=9.0, store=store)
    for key in "abcdefghi":
        vault.randomize(response(1.0), key=key)
    (store / "last-record").write_bytes(b"0000000009 " + last_of(store)[11:cut])
    (store / "records" / "000008").unlink()
    with pytest.raises(LabelStoreError, match=r"last-record is damaged|lacks record 8"):
        make(epsilon=9.0, store=store)


def test_a_short_write_is_completed(make, response, store, monkeypatch):
    write = os.write
    monkeypatch.setattr(os, "write", lambda file, content: write(file, bytes(content)[:7]))
    noisy = make(epsilon=1.0, store=store).randomize(response(1.0), key="a")
    monkeypatch.undo()
    again = make(epsilon=1.0, store=store)
    np.testing.assert_array_equal(again.randomize(response(1.0), key="a").values, noisy.values)


def test_a_full_disk_after_the_record_keeps_no_draw_back(make, response, store, monkeypatch):
    """The record is whole without ``last-record``; the next opening writes that again."""
    vault, replace = make(epsilon=1.0, store=store), os.replace

    def full(source, target):
        if str(target).endswith("last-record"):
            raise OSError(28, "No space left on device")
        replace(source, target)

    before = last_of(store)
    monkeypatch.setattr(os, "replace", full)
    noisy = vault.randomize(response(1.0), key="a")
    assert last_of(store) == before
    monkeypatch.undo()
    again = make(epsilon=1.0, store=store)
    assert again.guarantee().epsilon == 1.0 and last_of(store) != before
    np.testing.assert_array_equal(again.randomize(response(1.0), key="a").values, noisy.values)


@pytest.mark.parametrize("number", [13, 28, 30, 5])
def test_errors_of_the_disk_have_words(number, make, response, store, monkeypatch):
    vault = make(epsilon=1.0, store=store)
    opened = os.open

    def failing(path, flags, *mode, **keywords):
        if flags & os.O_CREAT and ".tmp" in str(path):
            raise OSError(number, os.strerror(number))
        return opened(path, flags, *mode, **keywords)

    monkeypatch.setattr(os, "open", failing)
    message = rf"expected to write .*{os.strerror(number)}\. Nothing was returned or charged"
    with pytest.raises(LabelStoreError, match=message):
        vault.randomize(response(1.0))
    with pytest.raises(LabelStoreError, match=message):
        PrivateLabels([0, 1], 2, budget=ldp.PrivacyBudget(1.0), store=store.with_name("other"))
    monkeypatch.undo()
    assert vault.guarantee().epsilon == 0.0
    assert make(epsilon=1.0, store=store).randomize(response(1.0)).receipts


@pytest.mark.parametrize("verb", ["randomize", "release"])
def test_an_error_at_any_step_after_the_charge_loses_no_draw(
    verb, make, response, store, failing_after_release
):
    """Each store has one charge, and the repeated call returns what the store has."""
    stores = []
    uses = {"randomize": response(1.0), "release": HistogramMechanism(1.0, 5)}

    def draw():
        return getattr(make(epsilon=1.0, store=stores[-1]), verb)(uses[verb], key="a")

    def renew():
        stores.append(store / str(len(stores)))

    steps = failing_after_release(draw, renew)
    assert len(steps) > 10
    for path in tuple(stores):
        [kept] = [each for each in Ledger.of_store(path).records if each.receipt is not None]
        stores.append(path)
        np.testing.assert_array_equal(draw().values, kept.values)
        assert make(epsilon=1.0, store=path).guarantee().epsilon == 1.0
