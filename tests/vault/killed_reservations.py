"""Kills processes that draw in several releases from one store, two at a time.

``test_reservations.py`` runs ``python killed_reservations.py FOLDER KILLS``. Each store has budget
for its uses and no more, so that one that is spent for nothing leaves another without. Each process
is killed (SIGKILL) right before a random file operation. Prints a JSON list of what went wrong, and
the number of kills and of stores.
"""

import itertools
import json
import os
import pathlib
import sys
from os import _exit

import numpy as np
from killed_writers import die_before_operation

import tf_labeldp as ldp
from tf_labeldp.accounting import PrivacyBudget
from tf_labeldp.mechanisms import HistogramMechanism, RandomizedResponse
from tf_labeldp.vault import PrivateLabels, give_back

Y = np.arange(60) % 2
NAMES, EPSILON = 6, 0.5
MOST_OPERATIONS = 70


def vault(store):
    return PrivateLabels(Y, 2, budget=PrivacyBudget(NAMES * EPSILON + 1.0), store=store)


def draw(labels, returned, unnamed_first=False):
    """Draws by name and without a name, in two releases each."""
    if unnamed_first:
        draw_without_names(labels, returned)
    for name in range(NAMES):
        clusters = ldp.ClusterRandomizedResponse.for_epsilon(EPSILON, 2)
        noisy = labels.randomize(clusters, clusters=np.arange(60) // 30, key=f"n{name}")
        returned(f"n{name}", noisy.values.astype(np.int64).tobytes())
    if not unnamed_first:
        draw_without_names(labels, returned)


def draw_without_names(labels, returned):
    """Reserves two uses as a fit with an evaluation and without a key does."""
    response, histogram = RandomizedResponse(0.5, 2), HistogramMechanism(0.5, 2)
    with labels.reserve({None: [response, histogram]}):
        noisy, counts = labels.randomize(response), labels.release(histogram)
    returned("unnamed", noisy.values.tobytes() + counts.values.tobytes())


def fork(store, folder, operations):
    child = os.fork()
    if child:
        return child
    status = 1
    try:
        die_before_operation(operations)

        def returned(name, content):
            with open(folder / f"{name}-{os.getpid()}", "wb") as file:
                file.write(content)

        draw(vault(store), returned, unnamed_first=operations % 2 == 1)
        status = 0
    finally:
        _exit(status)


def problems_of(store, folder):
    """Returns what is wrong once two processes have drawn everything, or were killed."""
    found = []
    for child in [fork(store, folder, 10**9)]:
        if os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]):
            found.append("the uses can't be completed")
    labels = vault(store)
    outputs = {}
    for path in folder.iterdir():
        content = path.read_bytes()
        if content:  # A killed process may leave an empty file.
            outputs.setdefault(path.name.partition("-")[0], set()).add(content)
    found += [f"{name} was drawn twice" for name, several in outputs.items() if len(several) > 1]
    if len(outputs) != NAMES + 1:
        found.append(f"{sorted(outputs)} came out")
    keys = [receipt.key for receipt in labels.receipts]
    if len(keys) != 2 * NAMES + 2 or len(set(keys)) != len(keys):
        found.append(f"{len(keys)} charges")
    if abs(labels.guarantee().epsilon - NAMES * EPSILON - 1.0) > 1e-9 or labels.remaining():
        found.append(f"{labels.guarantee().epsilon} spent, {labels.remaining()} left")
    if any("reserved" in use.what for use in labels.history()) or give_back(store):
        found.append("a reservation is stuck")
    if left := list(store.glob(".reserved-*")):
        found.append(f"{len(left)} locks are left")
    return found


def main(root, most):
    draw(vault(None), lambda *unused: None)  # This loads everything before the forks.
    rng = np.random.default_rng(0)
    problems, kills = [], 0
    for number in itertools.count(1):
        store, folder = root / f"{number}", root / f"{number}-returned"
        folder.mkdir()
        for _ in range(12):
            children = [fork(store, folder, int(rng.integers(1, MOST_OPERATIONS))) for _ in "ab"]
            statuses = [os.waitpid(child, 0)[1] for child in children]
            kills += sum(map(os.WIFSIGNALED, statuses))
            failed = [status for status in statuses if os.WIFEXITED(status) and status]
            problems += [f"store {number}: a process failed" for _ in failed]
        problems += [f"store {number}: {found}" for found in problems_of(store, folder)]
        if kills >= most:
            print(json.dumps([problems, kills, number]))
            return


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]), int(sys.argv[2]))
