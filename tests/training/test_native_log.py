"""TensorFlow's log while labels are in its graphs: its warnings and errors are not shown."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tf_labeldp.training._native_log import withheld_log

WARNING = b"W0000 00:00:1795365476.152832   99 op_kernel.cc:1842] INVALID_ARGUMENT: label 31337\n"
OLD_STYLE = b"2026-01-01 00:00:00.000000: E tensorflow/core/x.cc:1] label 31337\n"
INFO = b"I0000 00:00:1795365476.152832   99 port.cc:153] a line of information\n"


def shown(capfd: pytest.CaptureFixture[str], *written: bytes | str) -> str:
    """What of it is shown: bytes that a library writes, and text that Python writes."""
    with withheld_log():
        for text in written:
            if isinstance(text, bytes):
                os.write(2, text)
            else:
                print(text, end="", file=sys.stderr)
    return capfd.readouterr().err


@pytest.mark.parametrize("line", [WARNING, OLD_STYLE], ids=["absl", "old style"])
def test_warnings_and_errors_are_withheld_and_counted(
    capfd: pytest.CaptureFixture[str], line: bytes
) -> None:
    found = shown(capfd, line, line, "a line of Python\n")
    assert "31337" not in found
    assert found.startswith("a line of Python\n")
    assert "tf_labeldp: 2 line(s) of TensorFlow's log were withheld" in found


def test_all_else_is_shown_as_it_is(capfd: pytest.CaptureFixture[str]) -> None:
    text = (
        b"10/10 done\n  50%|#####     |\r 100%|##########|\n" + INFO + "Größe\n".encode() + b"end"
    )
    assert shown(capfd, text) == text.decode()


def test_lines_that_go_on_are_withheld_too(capfd: pytest.CaptureFixture[str]) -> None:
    goes_on = b"\t [[node labels = 31337]]\nTraceback:\n\nlabel 31337\n"
    found = shown(capfd, WARNING, goes_on, "a line of Python\n", INFO, b"more\n")
    assert "31337" not in found and "5 line(s)" in found
    assert "a line of Python\n" in found and INFO.decode() + "more\n" in found


@pytest.mark.parametrize("size", [1, 7, 40])
def test_lines_that_come_in_pieces(capfd: pytest.CaptureFixture[str], size: int) -> None:
    text = b"before\n" + WARNING + INFO
    found = shown(capfd, *(text[i : i + size] for i in range(0, len(text), size)))
    assert "31337" not in found
    assert found.startswith("before\n" + INFO.decode())


def test_a_warning_behind_a_line_that_has_not_ended(capfd: pytest.CaptureFixture[str]) -> None:
    """A progress bar stands at the end of the stream, and leaves its line open."""
    assert "31337" not in shown(capfd, b" 50%|#####     |" + WARNING)


def test_a_line_that_goes_on_and_has_no_end(capfd: pytest.CaptureFixture[str]) -> None:
    assert "31337" not in shown(capfd, WARNING, b"\t [[node labels = 31337]]")


@pytest.mark.parametrize("stream", [None, object()], ids=["none", "no flush"])
def test_it_is_withheld_where_python_has_no_stream(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, stream: object
) -> None:
    monkeypatch.setattr(sys, "stderr", stream)
    with withheld_log():
        os.write(2, WARNING)
    assert "31337" not in capfd.readouterr().err


def test_the_stream_is_what_it_was(capfd: pytest.CaptureFixture[str]) -> None:
    before = os.fstat(2)
    with pytest.raises(OSError, match="as it is"), withheld_log():
        raise OSError("as it is")
    after = os.fstat(2)
    assert (before.st_dev, before.st_ino) == (after.st_dev, after.st_ino)
    os.write(2, WARNING)
    assert "31337" in capfd.readouterr().err


SCRIPT = textwrap.dedent(
    """
    import os, subprocess, sys, threading, time
    import keras, numpy as np, tensorflow as tf
    from tf_labeldp.training import LabelDPModel, LabelDPOptimizer
    from tf_labeldp.training._native_log import withheld_log

    # Two trainings leave the stream whole; what a callback started writes on, unawaited.

    def one(begin, last):
        time.sleep(begin)
        with withheld_log():
            time.sleep(last)

    threads = [threading.Thread(target=one, args=args) for args in ((0.0, 1.0), (0.5, 1.0))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    os.write(2, b"still there\\n")

    begun = time.monotonic()
    with withheld_log():
        script = "sleep 8; echo of the other process >&2; sleep 1; echo again >&2"
        child = subprocess.Popen(["sh", "-c", script])
    took = time.monotonic() - begun
    with open(sys.argv[1], "w+b") as file:  # takes the number that is free
        assert child.wait() == 0
        file.seek(0)
        assert file.read() == b"", "it wrote into another file"
    assert took < 4.0, f"it was waited for, {took:.1f} s"
    time.sleep(1)  # what it wrote is read along until the process ends
    os.write(2, b"the end of the first part\\n")

    # TensorFlow logs the whole traceback of Python, whose lines begin like any others.
    def quoting(labels):
        raise ValueError(f"no such label: {labels[0]}")

    def loss(y_true, y_pred):
        y_true = tf.ensure_shape(tf.numpy_function(quoting, [y_true], tf.int64), [None])
        return tf.reduce_sum(y_pred, axis=1) + tf.cast(y_true, tf.float32)

    inputs = keras.Input((3,))
    model = LabelDPModel(inputs, keras.layers.Dense(2)(inputs))
    model.compile(LabelDPOptimizer("sgd", 1.0, 1.0), loss="mse")
    model._step.per_example_loss = loss
    model.fit(np.zeros((8, 3), "float32"), np.full(8, 31337), verbose=0)
    """
)


@pytest.mark.slow
def test_a_process_of_its_own(tmp_path: Path) -> None:
    """Two threads, a process that outlives the training, and a loss that quotes labels."""
    result = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path / "file of the user")],
        capture_output=True,
        text=True,
        env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "0"},
        timeout=300,
    )
    begin, end, rest = result.stderr.partition("the end of the first part\n")
    assert end, result.stderr[-2000:]
    assert begin.endswith("still there\nof the other process\nagain\n")
    assert result.returncode == 1
    assert "whose text is withheld" in rest
    assert "withheld while training privately" in rest
    assert "31337" not in result.stderr + result.stdout
