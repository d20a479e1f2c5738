"""Commands in new processes, killed or not; edits of JSON."""

from __future__ import annotations

import contextlib
import copy
import json
import math
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tf_labeldp.accounting import ReceiptError

# Forks a process per program, which is faster than a new interpreter: a first draw of classes and
# of numbers has loaded all modules.
FORKS = """
import json, os, sys, traceback
from tf_labeldp.cli import main
os.chdir(sys.argv[1])
with open("first.csv", "w") as file:
    file.write("y\\n0\\n1\\n")
for task in (["classification", "--num-classes", "2"], ["regression", "--low", "0", "--high", "1"]):
    common = ["--column", "y", "--epsilon", "1", "--quiet", "--overwrite", "--output", "noisy.csv"]
    assert main(["randomize", "first.csv", *common, "--task", *task]) == 0
for line in sys.stdin:
    program, arguments, folder, shown = json.loads(line)
    child = os.fork()
    if not child:
        code = 1
        try:
            os.chdir(folder)
            os.dup2(os.open(shown, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 1)
            os.dup2(1, 2)
            sys.argv = ["-c", *arguments]
            exec(program, {"__name__": "__main__"})
            code = 0
        except SystemExit as error:
            code = error.code or 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


@pytest.fixture(scope="session")
def in_process(tmp_path_factory):
    """Runs a program in a new process in the current folder; returns exit code and output."""
    shown = tmp_path_factory.mktemp("processes") / "shown"
    with subprocess.Popen(
        [sys.executable, "-c", FORKS, str(shown.parent)],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as server:

        def run(program, *arguments):
            order = json.dumps([program, arguments, os.getcwd(), str(shown)])
            print(order, file=server.stdin, flush=True)
            code = int(server.stdout.readline())  # type: ignore[union-attr]
            return code, shown.read_text()

        yield run
        server.stdin.close()  # type: ignore[union-attr]


# Kills the process before the n-th call that changes the disk for good.
KILLED = """
import os, signal, sys
from tf_labeldp.cli import main
calls = 0
def watched(function):
    def wrapper(*arguments, **options):
        global calls
        calls += 1
        if calls == int(sys.argv[1]):
            os.kill(os.getpid(), signal.SIGKILL)
        return function(*arguments, **options)
    return wrapper
for name in ("fsync", "link", "replace"):
    setattr(os, name, watched(getattr(os, name)))
sys.exit(main(sys.argv[2:]))
"""


@pytest.fixture
def killed(in_process):
    """Runs a command that is killed at its n-th write; returns whether there was one."""

    def run(number, *command):
        code, printed = in_process(KILLED, str(number), *command)
        assert code in (0, -signal.SIGKILL), printed
        return code != 0

    return run


@pytest.fixture
def unnoticed_edits():
    """Edits each value of a JSON file, and lists the edits that a loader does not refuse."""

    def run(path, load, fewest):
        content, tried, unnoticed = json.loads(path.read_text(encoding="utf-8")), 0, []
        for place in places(content):
            value = content
            for step in place:
                value = value[step]
            for edit, other in other_values(value):
                tried += 1
                path.write_text(json.dumps(with_value(content, place, other)))
                with contextlib.suppress(ReceiptError):
                    load()
                    unnoticed.append(f"{place}: {edit}")
        path.write_text(json.dumps(content))  # other blanks are no edit
        load()
        assert tried > fewest
        return unnoticed

    return run


def places(content, path=()):
    """Yields the path to each value, of lists and objects too."""
    yield path
    if isinstance(content, dict | list):
        for step in content if isinstance(content, dict) else range(len(content)):
            yield from places(content[step], (*path, step))


def other_values(value):
    """Yields the smallest changes of a value, with their names."""
    if isinstance(value, dict):
        yield "an entry more", {**value, "more": None}
        for name in value:
            yield f"without {name}", {key: kept for key, kept in value.items() if key != name}
    elif isinstance(value, list):
        yield "an entry more", [*value, None]
        if value:
            yield "without the first", value[1:]
        if value != value[::-1]:
            yield "reversed", value[::-1]
    elif value is None:
        yield "zero", 0
        yield "a text", ""
    else:
        yield "none", None
        if isinstance(value, bool):
            yield "the other", not value
        elif isinstance(value, int):
            yield "one more", value + 1
        elif isinstance(value, float):
            yield "the next number", math.nextafter(value, math.inf)
        else:
            yield "a letter more", f"{value} "


def with_value(content, path, value):
    """Returns a copy with another value at the end of a path."""
    if not path:
        return value
    edited = copy.copy(content)
    edited[path[0]] = with_value(content[path[0]], path[1:], value)
    return edited
