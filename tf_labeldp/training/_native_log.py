"""Keeps labels out of TensorFlow's messages: its log, and the errors of its kernels."""

from __future__ import annotations

import contextlib
import functools
import io
import os
import re
import secrets
import sys
import threading
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np

from tf_labeldp.gradients._model_checks import takes_codes, takes_rows
from tf_labeldp.training._training_plan import TrainingPlan

# "W0000 00:00:1795365476.152832 ... " of absl, or "2026-01-01 00:00:00.000000: W tensorflow/... ".
_LOG_LINE = r"(?:{level}\d{{4}} \d\d:\d\d:|\d{{4}}-\d\d-\d\d \d\d:\d\d:\d\d\.\d+: {level} )"
_WITHHELD = re.compile(_LOG_LINE.format(level="[WEF]").encode())
_INFORMATION = re.compile(_LOG_LINE.format(level="I").encode())
_LINES = re.compile(rb"[^\r\n]*[\r\n]")


def check_codes(model: keras.Model, loss: Any, plan: TrainingPlan) -> None:
    """Raises a ``ValueError`` if labels are class codes that the model has no output for.

    The kernel of sparse cross-entropy would write the labels of the batch into TensorFlow's log.
    """
    shape = getattr(model, "output_shape", None)
    if not isinstance(shape, tuple) or len(shape) < 2 or not isinstance(shape[-1], int):
        return
    outputs, vault = shape[-1], plan.vault
    if vault is None:
        labels = plan.known_labels() if takes_codes(loss) else None
        came = f"some labels are not in 0..{outputs - 1}"
        fits = labels is None or bool(np.all((labels >= 0) & (labels < outputs)))
    elif vault.num_labels is not None:
        came = f"the labels are rows of {vault.num_labels}"
        fits = vault.num_labels == outputs
    elif vault.label_range is not None:
        return
    else:
        # Whatever the loss: one that wraps sparse cross-entropy can't be told from others.
        came = f"the labels have {vault.num_classes} classes"
        fits = vault.num_classes <= outputs
        fits = fits or (outputs == 1 and not takes_codes(loss))
        if fits and takes_rows(loss) and outputs > 1:
            raise ValueError(
                "the labels of a PrivateLabels are class codes, and the loss takes one-hot rows. "
                "Use keras.losses.SparseCategoricalCrossentropy, of codes."
            )
    if not fits:
        raise ValueError(
            f"{came}, but the model has {outputs} outputs. Give its last layer one unit for each "
            "class (these are numbered from zero), or for each label of a row."
        )


_LOCK = threading.Lock()
_DIVERSION = contextlib.ExitStack()  # entered while there are users
_USERS: list[object] = []


@contextlib.contextmanager
def withheld_log() -> Iterator[None]:
    """Withholds warnings and errors that TensorFlow's kernels write to the standard error stream.

    Such an entry may quote values of tensors, and so labels. It may have several lines, and ends
    with the next line of information. What Python writes goes through; the number of lines withheld
    is printed at the end. Trainings in several threads share one diversion.
    """
    user = object()
    with _LOCK:
        if not _USERS:
            _DIVERSION.enter_context(_diverted())
        _USERS.append(user)
    try:
        yield
    finally:
        with _LOCK:
            _USERS.remove(user)
            if not _USERS:
                _DIVERSION.close()


# What a sys.stderr raises that is None, closed, or no file.
_no_stream = functools.partial(contextlib.suppress, OSError, ValueError, AttributeError)


@contextlib.contextmanager
def _diverted() -> Iterator[None]:
    """Sends file number 2, standard error, through a thread that filters it."""
    python, own = sys.stderr, None
    with _no_stream():
        python.flush()
    try:
        original = os.dup(2)
    except OSError:  # there is no such file
        yield
        return
    read_end, write_end = os.pipe()
    os.dup2(write_end, 2)
    pump = _Pump(read_end, os.dup(original))
    pump.start()
    with _no_stream():
        if python.fileno() == 2:  # and no notebook's
            sys.stderr = own = io.TextIOWrapper(
                open(os.dup(original), "wb", buffering=0),
                encoding=python.encoding,
                errors=python.errors,
                write_through=True,
            )
    try:
        yield
    finally:
        if own is not None and sys.stderr is own:
            sys.stderr = python
        with _no_stream():
            python.flush()
        os.dup2(original, 2)
        os.close(original)
        os.write(write_end, pump.mark)
        os.close(write_end)
        pump.has_seen_mark.wait(timeout=5.0)
        if pump.withheld:
            text = (
                f"tf_labeldp: {pump.withheld} line(s) of TensorFlow's log were withheld while "
                "training privately, since they may quote labels."
            )
            with _no_stream():
                print(text, file=sys.stderr)


class _Pump(threading.Thread):
    """Copies all lines except TensorFlow's warnings and errors, until the source ends.

    The thread outlives training while a process that a callback started holds the source open.
    """

    def __init__(self, source: int, target: int) -> None:
        super().__init__(daemon=True)
        self.mark = secrets.token_bytes(16).hex().encode() + b"\n"
        self.has_seen_mark = threading.Event()
        self.withheld = 0
        self._source, self._target = source, target
        self._hiding = False

    def run(self) -> None:
        """Copies."""
        rest = b""
        with (
            open(self._source, "rb", buffering=0) as stream,
            open(self._target, "wb", buffering=0) as target,
        ):
            while chunk := stream.read(1 << 16):
                rest += chunk
                before, mark, after = rest.partition(self.mark)
                if mark:
                    self._copy(_lines(before), target)
                    self.has_seen_mark.set()
                    self._hiding, rest = False, after
                *lines, rest = _lines(rest)
                self._copy(lines, target)
            self._copy([rest], target)
        self.has_seen_mark.set()

    def _copy(self, lines: list[bytes], target: Any) -> None:
        for line in filter(None, lines):
            entry = _WITHHELD.search(line)
            shown = line
            if entry is not None:  # also behind a progress bar, which leaves its line open
                shown = b"" if self._hiding else line[: entry.start()]
                self._hiding = True
            elif _INFORMATION.match(line):
                self._hiding = False
            elif self._hiding:
                shown = b""
            self.withheld += self._hiding
            if shown:
                target.write(shown)


def _lines(text: bytes) -> list[bytes]:
    """Returns the lines with their ends, and then what has no end yet."""
    lines = _LINES.findall(text)
    return [*lines, text[sum(map(len, lines)) :]]
