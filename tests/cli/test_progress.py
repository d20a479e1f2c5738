"""What the commands say while they work, and that ids of any text survive it."""

from __future__ import annotations

import contextlib
import csv
import os
import sys
import tempfile
from pathlib import Path

import pytest
import tqdm.std
from hypothesis import given, settings
from hypothesis import strategies as st

from tf_labeldp._progress import Progress
from tf_labeldp.cli import _demo, main


def test_stopping_by_hand_is_no_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*arguments: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(_demo, "run", interrupted)
    assert main(["demo"]) == 130
    assert capsys.readouterr().err == "\ntf-labeldp demo: stopped\n"


def test_a_long_run_says_what_took_how_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Half a second a row; the second pass counts the rows that it knows of by now."""
    now = [0.0]
    monkeypatch.setattr(tqdm.std, "time", lambda: now[0])
    advance = Progress.advance

    def slowly(self: Progress, rows: int) -> None:
        now[0] += rows / 2
        advance(self, rows)

    monkeypatch.setattr(Progress, "advance", slowly)
    (tmp_path / "t.csv").write_text("id,y\n" + "7,1\n" * 10)
    options = ["--column", "y", "--task", "classification", "--num-classes", "2"]
    options += ["--epsilon", "1", "--output", str(tmp_path / "n.csv")]
    assert main(["randomize", str(tmp_path / "t.csv"), *options]) == 0
    assert capsys.readouterr().err.splitlines()[:6] == [
        "reading labels: 10 rows, 2 a second",
        "reading labels: 10 rows in 5 s",
        "drawing noisy labels: 10 rows, 2 a second",
        "drawing noisy labels: 10 rows in 5 s",
        "writing: 10 of 10 rows, 2 a second",
        "writing: 10 rows in 5 s",
    ]
    assert main(["randomize", str(tmp_path / "t.csv"), *options, "--quiet", "--overwrite"]) == 0
    assert capsys.readouterr().err == ""


def test_progress_that_cannot_be_written_is_no_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    with open("/dev/full", "w", buffering=1) as full:
        monkeypatch.setattr(sys, "stderr", full)
        with Progress("reading", delay=1e-9) as progress:
            progress.advance(1)
        with contextlib.suppress(OSError):
            full.flush()
        monkeypatch.undo()
        os.dup2(os.open(os.devnull, os.O_WRONLY), full.fileno())  # what is left in its buffer


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
