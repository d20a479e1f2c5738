"""Stores on file systems without hard links."""

from __future__ import annotations

import errno
import os

import numpy as np
import pytest

import tf_labeldp as ldp
from tf_labeldp._label_store import publish


@pytest.fixture
def no_hard_links(monkeypatch):
    def refuse(*unused):
        raise OSError(errno.EOPNOTSUPP, "no hard links here")

    monkeypatch.setattr(os, "link", refuse)


@pytest.mark.usefixtures("no_hard_links")
def test_draws_are_stored_and_read_again(tmp_path):
    mechanism = ldp.RandomizedResponse(1.0, 3)
    budget = ldp.PrivacyBudget(epsilon=1.0)
    y = np.arange(30) % 3
    noisy = ldp.PrivateLabels(y, 3, budget=budget, store=tmp_path / "s").randomize(mechanism)
    again = ldp.PrivateLabels(y, 3, budget=budget, store=tmp_path / "s").randomize(mechanism)
    np.testing.assert_array_equal(noisy, again)


@pytest.mark.usefixtures("no_hard_links")
def test_an_existing_file_is_never_replaced(tmp_path):
    publish(tmp_path / "draw", b"first")
    with pytest.raises(FileExistsError):
        publish(tmp_path / "draw", b"second")
    assert (tmp_path / "draw").read_bytes() == b"first"
    assert [path.name for path in tmp_path.iterdir()] == ["draw"]
