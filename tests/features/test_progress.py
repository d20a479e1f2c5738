"""The progress bar of a long pass: silent at first, then rare reports."""

from __future__ import annotations

import io
import logging
import sys

import pytest
import tqdm.std

from tf_labeldp._progress import Progress, silent, without_retracing_warnings


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


@pytest.mark.parametrize(("verbose", "is_shown"), [(0, False), (1, True), ("auto", True)])
def test_the_verbose_argument_of_a_caller_silences_passes_within(monkeypatch, verbose, is_shown):
    with silent(verbose):
        assert bool(reports(monkeypatch, io.StringIO(), 30)) is is_shown
        with silent(1):  # a silent caller keeps all passes within silent
            assert bool(reports(monkeypatch, io.StringIO(), 30)) is is_shown
    assert reports(monkeypatch, io.StringIO(), 30) != []


def test_warnings_of_tracings_alone_are_dropped(caplog):
    logger = logging.getLogger("tensorflow")
    propagated, logger.propagate = logger.propagate, True
    caplog.set_level(logging.WARNING, "tensorflow")
    try:
        with without_retracing_warnings():
            logger.warning("5 out of the last 9 calls to f triggered tf.function retracing.")
            logger.warning("another warning")
        logger.warning("6 out of the last 9 calls to f triggered tf.function retracing.")
    finally:
        logger.propagate = propagated
    assert [record.message.split()[0] for record in caplog.records] == ["another", "6"]
