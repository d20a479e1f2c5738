"""Stores on file systems without hard links."""

from __future__ import annotations

import errno
import os

import filelock
import numpy as np
import pytest

import tf_labeldp as ldp
from tf_labeldp.vault import LabelStoreError
from tf_labeldp.vault.files import PlainFile


@pytest.fixture
def no_hard_links(monkeypatch):
    def refuse(*unused):
        raise OSError(errno.EOPNOTSUPP, "no hard links here")

    monkeypatch.setattr(os, "link", refuse)


@pytest.mark.usefixtures("no_hard_links")
def test_draws_are_stored_and_read_again(make, response, store):
    noisy, again = (make(store=store).randomize(response()) for _ in range(2))
    np.testing.assert_array_equal(noisy.values, again.values)


@pytest.mark.usefixtures("no_hard_links")
def test_an_existing_file_is_never_replaced(tmp_path):
    PlainFile(tmp_path / "draw").write(b"first")
    with pytest.raises(FileExistsError):
        PlainFile(tmp_path / "draw").write(b"second")
    assert (tmp_path / "draw").read_bytes() == b"first"
    assert [path.name for path in tmp_path.iterdir()] == ["draw"]


@pytest.fixture
def no_locks(monkeypatch):
    def refuse(*unused, **also_unused):
        raise NotImplementedError("no locks here")

    monkeypatch.setattr(filelock.FileLock, "acquire", refuse)


@pytest.mark.usefixtures("no_locks")
def test_two_writers_without_locks_do_not_both_return(make, response, store, monkeypatch):
    """The slower writer finds the record: it returns nothing, and is charged nothing."""
    faster, other = make(epsilon=1.0, store=store), make(epsilon=1.0, store=store)
    begun, kept, draw = [], [], ldp.RandomizedResponse.randomize

    def be_overtaken(self, *arguments, **keywords):
        if not begun:
            begun.append(True)
            kept.append(faster.randomize(response(1.0), key="a"))
        return draw(self, *arguments, **keywords)

    monkeypatch.setattr(ldp.RandomizedResponse, "randomize", be_overtaken)
    with pytest.raises(LabelStoreError, match=r"Another process has written record 0.*Nothing was"):
        other.randomize(response(1.0), key="b")
    assert len(list((store / "records").iterdir())) == 1
    assert other.guarantee().epsilon == 1.0 and not other.has_draw("b")
    again = make(epsilon=1.0, store=store).randomize(response(1.0), key="a")
    np.testing.assert_array_equal(again.values, kept[0].values)


@pytest.mark.usefixtures("no_locks", "no_hard_links")
def test_two_writers_without_locks_and_links_do_not_both_return(make, response, store, monkeypatch):
    """The name of a record is claimed before its content: also within this window."""
    faster, other = make(epsilon=1.0, store=store), make(epsilon=1.0, store=store)
    begun, replace = [], os.replace

    def be_overtaken(source, target):
        if not begun and str(target).endswith("000000"):
            begun.append(True)
            with pytest.raises(LabelStoreError, match="is writing record 0"):
                other.randomize(response(1.0), key="b")
        replace(source, target)

    monkeypatch.setattr(os, "replace", be_overtaken)
    noisy = faster.randomize(response(1.0), key="a")
    assert begun and other.guarantee().epsilon == 1.0 and not other.has_draw("b")
    np.testing.assert_array_equal(other.randomize(response(1.0), key="a").values, noisy.values)


@pytest.mark.usefixtures("no_hard_links")
@pytest.mark.parametrize("name", ["records/000001", "header.json", "labels.key"])
def test_a_claim_of_a_killed_process_is_removed(make, response, store, name):
    """A process that is killed between claim and content leaves an empty file."""
    if name.startswith("records"):
        vault = make(epsilon=2.0, store=store, draws="keyed")
        vault.randomize(response(1.0), key="a")
        (store / name).touch()
        assert vault.guarantee().epsilon == 1.0
    else:
        store.mkdir(parents=True)
        if name == "labels.key":
            make(epsilon=2.0, store=store)
        (store / name).touch()
        vault = make(epsilon=2.0, store=store, draws="keyed")
        vault.randomize(response(1.0), key="a")
    vault.randomize(response(1.0), key="b")
    assert make(epsilon=2.0, store=store, draws="keyed").guarantee().epsilon == 2.0


@pytest.mark.usefixtures("no_locks")
def test_a_project_needs_locks(make, tmp_path):
    """Two stores write different records, so that no collision would show."""
    with pytest.raises(LabelStoreError, match="expected file locks"):
        make(store=tmp_path / "study" / "visits", project=True)


@pytest.mark.usefixtures("no_locks")
def test_without_locks_what_is_reserved_is_given_back_by_the_command(make, response, store):
    vault = make(epsilon=1.0, store=store)
    with pytest.raises(KeyError), vault.reserve({"a": response(0.5)}):
        raise KeyError
    assert vault.remaining() == 1.0
    kept = vault.reserve({"a": response(0.5)})
    assert make(epsilon=1.0, store=store).remaining() == 0.5
    assert ldp.vault.give_back(store) == ["a"]
    assert make(epsilon=1.0, store=store).remaining() == 1.0
    kept.give_back()
