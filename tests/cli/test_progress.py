"""What the commands say while they work, and that ids of any text survive it."""

from __future__ import annotations

import csv
import io
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tf_labeldp.cli import _console, _demo, main


@pytest.fixture
def clock(clock_of: Callable[[ModuleType], Any]) -> Any:
    return clock_of(_demo)


def test_a_file_gets_a_line_a_run_and_one_every_ten_seconds(
    clock: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = io.StringIO()
    monkeypatch.setattr(sys, "stdout", output)
    progress = _demo.Progress([4, 4])
    progress.begin("first")
    for seconds in (6.0, 6.0, 6.0, 2.0):
        clock.now += seconds
        progress.epoch_done()
    progress.end("done")
    assert output.getvalue().splitlines() == [
        "[1/2] first...",
        # 12 seconds for 2 of 8 epochs: 36 for the other 6.
        "[1/2] first: epoch 2 of 4; 12 s so far, about 36 s left",
        "[1/2] first: done; 20 s so far, about 20 s left",
    ]


def test_a_terminal_gets_one_line_that_follows_the_epochs(
    clock: Any, monkeypatch: pytest.MonkeyPatch, terminal: io.StringIO
) -> None:
    output = terminal
    monkeypatch.setattr(sys, "stdout", output)
    progress = _demo.Progress([2])
    progress.begin("only")
    clock.now += 1.0
    progress.epoch_done()
    progress.end("done")
    assert output.getvalue().split("\r")[1:] == [
        "[1/1] only...\x1b[K",
        "[1/1] only: epoch 1 of 2; 1 s so far, about 1 s left\x1b[K",
        "[1/1] only: done; 1 s so far\x1b[K\n",
    ]


def test_stopping_by_hand_is_no_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*arguments: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(_demo, "run", interrupted)
    assert main(["demo"]) == 130
    assert capsys.readouterr().err == "\ntf-labeldp demo: stopped\n"


@pytest.fixture
def row_clock(clock_of: Callable[[ModuleType], Any]) -> Any:
    return clock_of(_console)


def said(monkeypatch: pytest.MonkeyPatch, row_clock: Any, errors: io.StringIO, quiet: bool) -> str:
    """Gives what is said in 25 seconds: 5 of reading, 20 of writing 2,000 rows a second."""
    monkeypatch.setattr(sys, "stderr", errors)
    progress = _console.RowProgress(quiet=quiet)
    progress.begin("reading")
    for _ in range(5):
        row_clock.now += 1.0
        progress.advance(8_000)
    progress.begin("writing", 40_000)
    for _ in range(20):
        row_clock.now += 1.0
        progress.advance(2_000)
    progress.end()
    return errors.getvalue()


def test_a_file_gets_a_line_after_two_seconds_and_every_ten(
    row_clock: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert said(monkeypatch, row_clock, io.StringIO(), quiet=False).splitlines() == [
        "reading: 16,000 rows, 8,000 a second",
        "writing: 14,000 of 40,000 rows, 2,000 a second",
        "writing: 34,000 of 40,000 rows, 2,000 a second",
        "took 25.0 s: reading 5.0 s, writing 20.0 s",
    ]


def test_a_terminal_gets_one_line_that_changes_every_second(
    row_clock: Any, monkeypatch: pytest.MonkeyPatch, terminal: io.StringIO
) -> None:
    told = said(monkeypatch, row_clock, terminal, quiet=False).split("\r")[1:]
    assert told[0] == "reading: 16,000 rows, 8,000 a second\x1b[K"
    assert len(told) == 4 + 20 + 1
    assert told[-1] == "took 25.0 s: reading 5.0 s, writing 20.0 s\x1b[K\n"


def test_quiet_says_nothing(
    row_clock: Any, monkeypatch: pytest.MonkeyPatch, terminal: io.StringIO
) -> None:
    assert said(monkeypatch, row_clock, terminal, quiet=True) == ""


def test_what_is_done_at_once_says_nothing(row_clock: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    errors = io.StringIO()
    monkeypatch.setattr(sys, "stderr", errors)
    progress = _console.RowProgress(quiet=False)
    for phase in ("reading", "writing"):
        progress.begin(phase)
        row_clock.now += 0.9
        progress.advance(10**6)
    progress.end()
    assert errors.getvalue() == ""


def test_an_error_starts_on_a_line_of_its_own(
    row_clock: Any, monkeypatch: pytest.MonkeyPatch, terminal: io.StringIO
) -> None:
    errors = terminal
    monkeypatch.setattr(sys, "stderr", errors)
    progress = _console.RowProgress(quiet=False)
    progress.begin("reading")
    row_clock.now += 3.0
    progress.advance(9)
    progress.close()
    assert errors.getvalue().endswith("3 a second\x1b[K\n")


# Without the null character, which Python 3.10's csv module cannot write.
TEXTS = st.text(st.characters(min_codepoint=1, exclude_categories=("Cs",)), max_size=8)


@settings(max_examples=30, deadline=None)
@given(
    ids=st.lists(TEXTS, min_size=1, max_size=6),
    output=st.sampled_from(["noisy.csv", "noisy.csv.gz", "noisy.parquet"]),
)
def test_any_text_as_id_comes_back(ids: list[str], output: str) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with open(folder / "labels.csv", "w", encoding="utf-8", newline="") as file:
            csv.writer(file).writerows([("id", "y"), *((text, 1) for text in ids)])
        options = ["--column", "y", "--task", "classification", "--num-classes", "2", "--quiet"]
        options += ["--epsilon", "1", "--output", str(folder / "first.csv")]
        assert main(["randomize", str(folder / "labels.csv"), *options]) == 0
        # Once more, from this command's own files, through every format.
        again = ["--output", str(folder / output)]
        assert main(["randomize", str(folder / "first.csv"), *options, *again]) == 0
        last = ["--output", str(folder / "last.csv")]
        assert main(["randomize", str(folder / output), *options, *last]) == 0
        with open(folder / "last.csv", encoding="utf-8", newline="") as file:
            assert [row[0] for row in csv.reader(file)] == ["id", *ids]
