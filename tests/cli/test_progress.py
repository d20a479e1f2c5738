"""What the demo says while it works."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest

from tf_labeldp.cli import _demo, main


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
