"""Stores on file systems without hard links."""

from __future__ import annotations

import errno
import os

import filelock
import numpy as np
import pytest

import tf_labeldp as ldp
from tf_labeldp.vault import LabelStoreError
from tf_labeldp.vault.records import publish


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
    publish(tmp_path / "draw", b"first")
    with pytest.raises(FileExistsError):
        publish(tmp_path / "draw", b"second")
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
