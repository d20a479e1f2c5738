"""Lets several processes draw from one store at the same time.

``test_processes.py`` runs ``python shared_writers.py FOLDER``. Half of the processes are forks
with the vault of their parent, half open the store themselves. Each writes a JSON file.
"""

import json
import os
import pathlib
import sys
import time
from os import _exit

import numpy as np

from tf_labeldp.accounting import BudgetExceededError, PrivacyBudget
from tf_labeldp.mechanisms import RandomizedResponse
from tf_labeldp.vault import PrivateLabels

LABELS = np.arange(200) % 5
PROCESSES, TRIES = 6, 4


def draw_until_refused(vault, name):
    drawn, refused = {}, 0
    for number in range(TRIES):
        key = f"{name}-{number}"
        try:
            noisy = vault.randomize(RandomizedResponse(0.125, 5), key=key)
        except BudgetExceededError:
            refused += 1
        else:
            drawn[key] = [noisy.values.tolist(), noisy.receipts[0].id]
    shared = vault.randomize(RandomizedResponse(0.25, 5), key="shared").values.tolist()
    return {"drawn": drawn, "refused": refused, "shared": shared}


def main(root):
    budget, store = PrivacyBudget(1.0), root / "store"
    parent = PrivateLabels(LABELS, 5, budget=budget, store=store)
    parent.randomize(RandomizedResponse(0.25, 5), key="shared")
    unstored = PrivateLabels(LABELS, 5, budget=budget)
    start = time.time() + 1.0
    children = []
    for number in range(PROCESSES):
        child = os.fork()
        if child:
            children.append(child)
            continue
        status = 1
        try:
            results = {}
            vault = parent if number % 2 else PrivateLabels(LABELS, 5, store=store)
            try:
                unstored.randomize(RandomizedResponse(0.25, 5))
            except RuntimeError as error:
                results["unstored"] = str(error)
            time.sleep(max(0.0, start - time.time()))
            results |= draw_until_refused(vault, f"p{number}")
            results["epsilon"] = vault.guarantee().epsilon
            (root / f"{number}.json").write_text(json.dumps(results))
            status = 0
        finally:
            _exit(status)
    for child in children:
        status = os.waitpid(child, 0)[1]
        if os.waitstatus_to_exitcode(status) != 0:
            raise RuntimeError(f"process {child} failed")
    print(json.dumps({"epsilon": parent.guarantee().epsilon, "uses": len(parent.history())}))


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]))
