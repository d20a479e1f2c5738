"""Writes stores in processes that are killed, each one step later than the process before.

``test_kill.py`` runs ``python killed_writers.py FOLDER``. Process n is killed (SIGKILL) right
before its n-th file operation; the last process is not killed. Prints the number of processes.
"""

import os
import pathlib
import signal
import sys

import numpy as np

from tf_labeldp.accounting import PrivacyBudget
from tf_labeldp.mechanisms import RandomizedResponse
from tf_labeldp.vault import PrivateLabels

OPERATIONS = ("mkdir", "chmod", "open", "fsync", "link", "unlink", "close")


def draw_all(folder):
    labels = PrivateLabels(np.arange(200) % 5, 5, budget=PrivacyBudget(1.0), store=folder / "store")
    for key in ("a", "b"):
        part = np.arange(0, 100) if key == "a" else np.arange(100, 200)
        noisy = labels.randomize(RandomizedResponse(1.0, 5), part, key=key)
        (folder / key).write_bytes(noisy.values.tobytes())  # The draw was returned.


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


def main(root):
    RandomizedResponse(1.0, 5).dp_event()  # This loads the accountant once, before the forks.
    for number in range(1, 200):
        folder = root / f"{number:03d}"
        folder.mkdir()
        child = os.fork()
        if child == 0:
            status = 1
            try:
                die_before_operation(number)
                draw_all(folder)
                status = 0
            finally:
                os._exit(status)
        status = os.waitpid(child, 0)[1]
        if not os.WIFSIGNALED(status):
            if os.WEXITSTATUS(status) != 0:
                raise RuntimeError(f"process {number} failed")
            print(number)
            return
    raise RuntimeError("all processes were killed")


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]))
