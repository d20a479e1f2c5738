"""Fits on arrays as in processes of their own: what tests of heads and of features share."""

from __future__ import annotations

import pytest

from tf_labeldp.heads import label_source


@pytest.fixture(autouse=True)
def fits_of_this_test_alone(monkeypatch) -> None:
    """A process adds up the fits on arrays of the same rows: tests must not see each other's."""
    monkeypatch.setattr(label_source, "_FITS", label_source._Fits())


@pytest.fixture
def fits_apart(monkeypatch) -> None:
    """Each fit on an array as in a process of its own: for tests of numbers that take many fits."""
    monkeypatch.setattr(label_source._Fits, "with_others", lambda self, receipts, *rest: receipts)
