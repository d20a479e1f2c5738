"""Processes that train one case each and wait between rounds, so that cases take turns.

The parent writes a number of steps, and the process answers with one line of JSON when it has taken
them: all cases then share every slow moment of the machine.
"""

from __future__ import annotations

import json
import os
import re
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any


class Stopped(SystemExit):
    """The parent wants no more steps of this case."""


class Rounds:
    """Times rounds of steps in a process, each when the parent starts it.

    Attributes:
        wait: waits for the device to finish its steps.
        peak: returns the peak memory in GiB; None for that of the process.
        device: the name of the device.
        begun: processor time at which the case began.
    """

    def __init__(self) -> None:
        # Only lines for the parent go to stdout; the output of libraries goes to stderr.
        self._out = os.fdopen(os.dup(1), "w", buffering=1)
        os.dup2(2, 1)
        self.wait: Callable[[], Any] | None = None
        self.peak: Callable[[], float] | None = None
        self.device = "CPU"
        self.begun = 0.0
        self._left = 0

    def before_step(self) -> None:
        """Waits for the parent before the first step of a round; raises ``Stopped`` at the end."""
        if not self._left:
            self._left = int(sys.stdin.readline() or 0)
            if not self._left:
                raise Stopped
            self._start = time.perf_counter(), time.process_time()

    def after_step(self, logs: Any = None) -> None:
        """Answers after the last step of a round."""
        self._left -= 1
        if self._left:
            return
        if self.wait is not None:
            self.wait()
        products = (logs or {}).get("projection_products")
        process = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
        self.answer(
            seconds=time.perf_counter() - self._start[0],
            processor=time.process_time() - self._start[1],
            since=time.process_time() - self.begun,
            products=None if products is None else int(products),
            peak=process if self.peak is None else self.peak(),
        )

    def answer(self, **figures: Any) -> None:
        """Sends figures to the parent."""
        self._out.write(json.dumps({**figures, "device": self.device}) + "\n")

    def callback(self, base: type) -> Any:
        """Returns the callback of ``fit``, of the Keras that runs the model."""
        rounds = self

        class Callback(base):  # type: ignore[misc, valid-type]
            def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
                rounds.before_step()

            def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
                rounds.after_step(logs)

        return Callback()


class Worker:
    """A process that trains cases, seen from the parent.

    Args:
        command: its command, or a text that says why it can't run.
        environment: variables that the parent does not have.
        limit: bytes of memory that the process may have, for the text of its failure.

    Attributes:
        seconds: time per step of each round that counts.
        figures: the last answer.
        problem: why there are no more answers.
    """

    def __init__(
        self, command: Sequence[str] | str, environment: dict[str, str], limit: int = 0
    ) -> None:
        self.seconds: list[float] = []
        self.figures: dict[str, Any] = {}
        self.problem = command if isinstance(command, str) else ""
        self._limit = limit
        self._errors = tempfile.TemporaryFile("w+")
        if self.problem:
            return
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env={**os.environ, **environment},
            text=True,
        )

    def tell(self, line: str) -> None:
        """Writes a line to the process."""
        if self.problem or self._process.stdin is None:
            return
        try:
            self._process.stdin.write(line + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            # The process failed: its answer will be empty.
            pass

    def listen(self) -> dict[str, Any]:
        """Returns the answer of the process, empty if it failed."""
        if self.problem or self._process.stdout is None:
            return {}
        line = self._process.stdout.readline()
        if not line:
            self._failed()
            return {}
        self.figures = json.loads(line)
        return self.figures

    def round(self, steps: int, *, counts: bool, clock: str = "seconds") -> None:
        """Runs some steps, and keeps the time per step unless the round is for warming up."""
        self.tell(str(steps))
        figures = self.listen()
        if counts and figures:
            self.seconds.append(figures[clock] / steps)

    def _failed(self) -> None:
        self._process.wait()
        self._errors.seek(0)
        text = self._errors.read()
        words = ("OOM", "ResourceExhausted", "RESOURCE_EXHAUSTED", "bad_alloc", "MemoryError")
        words += ("allocate memory", "out of memory")
        lines = [line for line in text.splitlines() if re.match(r"[\w.]*(Error|Exception)\b", line)]
        last = lines[-1] if lines else f"exit status {self._process.returncode}"
        self.problem = last[:60].replace("|", "/")
        if any(word in text for word in words):
            self.problem = f"out of memory (limit {self._limit / 2**30:.0f} GiB)"

    def stop(self) -> None:
        """Ends the process."""
        if not self.problem and self._process.stdin is not None:
            self._process.stdin.close()
            self._process.wait()


def ratio(above: Sequence[float], below: Sequence[float]) -> float:
    """Returns the median over rounds of the ratio within a round."""
    return statistics.median(a / b for a, b in zip(above, below, strict=False))
