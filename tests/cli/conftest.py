"""Commands in processes of their own, killed or not; edits of JSON."""

from __future__ import annotations

import copy
import json
import math
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

# Forks a process for each program that is asked for, which is faster than a new interpreter each.
# What a first draw of classes and numbers loads is loaded by then.
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
InProcess = Callable[..., tuple[int, str]]


@pytest.fixture(scope="session")
def in_process(tmp_path_factory):
    """Runs a program in a process of its own, in the current folder: exit code, what it printed."""
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


# Kills the process right before the n-th call that changes what is on disk for good.
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
    """Runs a command that is killed at its n-th write; whether there was one."""

    def run(number, *command):
        code, printed = in_process(KILLED, str(number), *command)
        assert code in (0, -signal.SIGKILL), printed
        return code != 0

    return run


Edits = Callable[[Any], Iterator[tuple[str, Any]]]


@pytest.fixture
def edits():
    """Gives each small edit of what a JSON file holds: what it is, and the edited content."""

    def each_edit(content):
        for path in places(content):
            held = content
            for step in path:
                held = held[step]
            for what, value in other_values(held):
                yield f"{path}: {what}", with_value(content, path, value)

    return each_edit


def places(content, path=()):
    """Yields the path to each value, of lists and objects too."""
    yield path
    if isinstance(content, dict):
        for name, value in content.items():
            yield from places(value, (*path, name))
    elif isinstance(content, list):
        for number, value in enumerate(content):
            yield from places(value, (*path, number))


def other_values(value):
    """Yields what differs from a value as little as can be."""
    if isinstance(value, dict):
        yield "an entry more", {**value, "more": None}
        for name in value:
            yield f"without {name}", {key: kept for key, kept in value.items() if key != name}
    elif isinstance(value, list):
        yield "an entry more", [*value, None]
        if value:
            yield "without the first", value[1:]
            yield "the last one twice", [*value, value[-1]]
        for i in range(len(value) - 1):
            if value[i] != value[i + 1]:
                yield f"{i} and {i + 1} swapped", [*value[:i], *value[i : i + 2][::-1],
                                                   *value[i + 2 :]]  # fmt: skip
    elif value is None:
        yield "zero", 0
        yield "a text", ""
    elif isinstance(value, bool):
        yield "the other", not value
        yield "none", None
    elif isinstance(value, int):
        yield "one more", value + 1
        yield "none", None
    elif isinstance(value, float):
        yield "the next number", math.nextafter(value, math.inf)
        yield "none", None
    else:
        yield "a letter more", f"{value} "
        yield "none", None


def with_value(content, path, value):
    """Gives a copy with another value at the end of a path."""
    if not path:
        return value
    edited = copy.copy(content)
    edited[path[0]] = with_value(content[path[0]], path[1:], value)
    return edited
