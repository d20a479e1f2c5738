"""The progress of a long pass: silent at first, a line that changes or a new one now and then."""

from __future__ import annotations

import io
import sys

import tqdm.std

from tf_labeldp._progress import Progress


class Terminal(io.StringIO):
    def isatty(self):
        return True


def said(monkeypatch, errors, seconds, total=100, **how):
    """Returns the lines printed for ten parts that take ``seconds`` together."""
    clock = [0.0]
    monkeypatch.setattr(tqdm.std, "time", lambda: clock[0])
    monkeypatch.setattr(sys, "stderr", errors)
    with Progress("Reading", total, **how) as progress:
        for _ in range(10):
            clock[0] += seconds / 10
            progress.advance(10)
    return "" if errors is None else errors.getvalue()


def test_a_file_gets_a_line_every_ten_seconds(monkeypatch):
    assert said(monkeypatch, io.StringIO(), 30).splitlines() == [
        "Reading: 20 of 100 rows, 3 a second",
        "Reading: 60 of 100 rows, 3 a second",
        "Reading: 100 of 100 rows, 3 a second",
        "Reading: 100 rows in 30 s",
    ]
    assert "Reading: 20 rows, 3 a second" in said(monkeypatch, io.StringIO(), 30, total=None)


def test_a_terminal_gets_one_line_that_changes(monkeypatch):
    told = said(monkeypatch, Terminal(), 30).split("\r")[1:]
    assert len(told) == 10 and told[0] == "Reading: 20 of 100 rows, 3 a second"
    assert told[-1].strip() == "Reading: 100 rows in 30 s" and told[-1].endswith("\n")


def test_short_and_quiet_passes_say_nothing(monkeypatch):
    assert said(monkeypatch, io.StringIO(), 4.9) == ""
    assert said(monkeypatch, io.StringIO(), 30, quiet=True) == ""
    assert said(monkeypatch, io.StringIO(), 4.9, delay=2.0) != ""
    assert said(monkeypatch, None, 30) == ""
