"""The progress bar of a long pass: silent at first, then rare reports."""

from __future__ import annotations

import io
import sys

import tqdm.std

from tf_labeldp._progress import Progress


class Terminal(io.StringIO):
    def isatty(self):
        return True


def reports(monkeypatch, stderr, seconds, total=100, **settings):
    """Returns the reports for ten parts that take ``seconds`` together."""
    clock = [0.0]
    monkeypatch.setattr(tqdm.std, "time", lambda: clock[0])
    monkeypatch.setattr(sys, "stderr", stderr)
    with Progress("Reading", total, **settings) as progress:
        for _ in range(10):
            clock[0] += seconds / 10
            progress.advance(10)
    return [] if stderr is None else stderr.getvalue().split("\r")[1:]


def test_a_file_gets_a_report_every_ten_seconds(monkeypatch):
    first, second, *_, last = reports(monkeypatch, io.StringIO(), 30)
    assert first.startswith("Reading:  20%") and "20/100 [" in first and "60/100 [" in second
    assert "100/100 [00:30<00:00,  3.33 rows/s]" in last and last.endswith("\n")
    assert reports(monkeypatch, io.StringIO(), 30, total=None)[0].startswith("Reading: 20 rows [")


def test_a_terminal_gets_a_report_every_second(monkeypatch):
    assert len(reports(monkeypatch, Terminal(), 30)) == 10


def test_short_and_quiet_passes_are_silent(monkeypatch):
    assert reports(monkeypatch, io.StringIO(), 4.9) == []
    assert reports(monkeypatch, io.StringIO(), 30, quiet=True) == []
    assert reports(monkeypatch, Terminal(), 4.9, delay=2.0) != []
    assert reports(monkeypatch, None, 30) == []
