"""Runs a scenario in processes that are killed, each some steps later than the process before.

The tests run ``python killed_writers.py FOLDER SCENARIO``. Each process has its own folder and is
killed (SIGKILL) right before a file operation; the last process is not killed. Prints the number of
processes.
"""

import os
import pathlib
import signal
import sys
import tempfile
from os import _exit

import numpy as np

from tf_labeldp.accounting import PrivacyBudget
from tf_labeldp.mechanisms import RandomizedResponse
from tf_labeldp.vault import PrivateLabels, forget

OPERATIONS = "mkdir chmod open write fsync link replace unlink rmdir close".split()


def nothing(folder):
    pass


def draw_twice(folder):
    labels = PrivateLabels(np.arange(200) % 5, 5, budget=PrivacyBudget(1.0), store=folder / "store")
    for key in ("a", "b"):
        part = np.arange(0, 100) if key == "a" else np.arange(100, 200)
        noisy = labels.randomize(RandomizedResponse(1.0, 5), part, key=key)
        (folder / key).write_bytes(noisy.values.tobytes())  # The draw was returned.


def draw_and_extend(folder):
    labels = PrivateLabels(np.arange(100) % 5, 5, budget=PrivacyBudget(1.0), store=folder / "store")
    first = labels.randomize(RandomizedResponse(1.0, 5), key="weekly")
    (folder / "first").write_bytes(first.values.tobytes())
    labels.extend(np.arange(60) % 3)
    both = labels.randomize(RandomizedResponse(1.0, 5), key="weekly")
    (folder / "both").write_bytes(both.values.tobytes())


def draw_once(folder):
    labels = PrivateLabels([0, 1] * 20, 2, budget=PrivacyBudget(3.0), store=folder / "store")
    labels.randomize(RandomizedResponse(0.5, 2))


# For each scenario: its preparation, the work of the killed processes, and the step between them.
SCENARIOS = {
    "draw": (nothing, draw_twice, 1),
    "extend": (nothing, draw_and_extend, 2),
    "forget": (draw_once, lambda folder: forget(folder / "store"), 2),
}


def die_before_operation(number):
    count = 0

    def watched(operation):
        def call(*arguments, **keywords):
            nonlocal count
            count += 1
            if count == number:
                os.kill(os.getpid(), signal.SIGKILL)
            return operation(*arguments, **keywords)

        return call

    for name in OPERATIONS:
        setattr(os, name, watched(getattr(os, name)))


def main(root, scenario):
    prepare, work, step = SCENARIOS[scenario]
    with tempfile.TemporaryDirectory() as folder:
        # This loads the accountant once, before the forks.
        prepare(pathlib.Path(folder))
        work(pathlib.Path(folder))
    for number in range(1, 500):
        folder = root / f"{number:03d}"
        folder.mkdir()
        prepare(folder)
        child = os.fork()
        if child == 0:
            status = 1
            try:
                die_before_operation(number * step)
                work(folder)
                status = 0
            finally:
                _exit(status)
        status = os.waitpid(child, 0)[1]
        if not os.WIFSIGNALED(status):
            if os.WEXITSTATUS(status) != 0:
                raise RuntimeError(f"process {number} failed")
            print(number)
            return
    raise RuntimeError("all processes were killed")


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]), sys.argv[2])
