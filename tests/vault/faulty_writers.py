"""Lets pairs of processes draw from one store while file operations fail, and checks the store.

``test_faults.py`` runs ``python faulty_writers.py FOLDER FAULTS``. In each process one operation
fails once: the disk is full, an error of the disk, no permission, or a write that is short and then
fails. Prints a JSON list of problems, and the number of faults by kind.
"""

import collections
import contextlib
import errno
import itertools
import json
import os
import pathlib
import sys
import traceback
from os import _exit

import numpy as np

from tf_labeldp.accounting import PrivacyBudget
from tf_labeldp.mechanisms import RandomizedResponse
from tf_labeldp.vault import LabelStoreError, PrivateLabels, give_back

LABELS = np.random.default_rng(5).integers(0, 5, 200)
KEYS = ("a", "b", "c")
OPERATIONS = "mkdir open write fsync link replace unlink".split()
FAULTS = {
    "full": errno.ENOSPC,
    "error": errno.EIO,
    "denied": errno.EACCES,
    "short": 0,
    "short and full": errno.ENOSPC,
}
MOST_OPERATIONS = 60


def fail_once(number, fault):
    """Makes operation ``number`` of this process fail, or the first write after it be short."""
    count, done = 0, []
    write = os.write

    def short(descriptor, content):
        half = bytes(content)[: max(1, len(content) // 2)]
        return write(descriptor, half)

    def watched(name, operation):
        def call(*arguments, **keywords):
            nonlocal count
            count += 1
            is_short = fault.startswith("short")
            is_due = count >= number if is_short and name == "write" else count == number
            if done or not is_due or (is_short and name != "write"):
                if "half" in done and name == "write":
                    done.remove("half")
                    raise OSError(errno.ENOSPC, "No space left on device")
                return operation(*arguments, **keywords)
            done.append(fault)
            if is_short:
                done.extend(["half"] if fault == "short and full" else [])
                return short(*arguments)
            raise OSError(FAULTS[fault], os.strerror(FAULTS[fault]))

        return call

    for name in OPERATIONS:
        setattr(os, name, watched(name, getattr(os, name)))
    return done


def vault(store):
    return PrivateLabels(LABELS, 5, budget=PrivacyBudget(3.0), store=store)


def values_in_frames(error):
    """Returns the names of the library's local variables that have the labels, in an error."""
    found, waiting = [], [error]
    while waiting:
        part = waiting.pop()
        if part is None:
            continue
        waiting += [part.__cause__, part.__context__]
        for frame, _ in traceback.walk_tb(part.__traceback__):
            if "tf_labeldp" in frame.f_code.co_filename:
                for name, value in frame.f_locals.items():
                    if isinstance(value, np.ndarray) and value.size >= 20:
                        if np.isin(value.ravel()[:20], LABELS).all() and value.max() < 5:
                            found.append(f"{frame.f_code.co_name} has labels in {name}")
    return found


def work(store, folder, problems, keys):
    try:
        labels = vault(store)
        for key in keys:
            with labels.reserve({key: RandomizedResponse(1.0, 5)}):
                noisy = labels.randomize(RandomizedResponse(1.0, 5), key=key)
            path = folder / f"{key}-{os.getpid()}"
            path.with_suffix(".tmp").write_bytes(noisy.values.astype(np.int64).tobytes())
            path.with_suffix(".tmp").rename(path)
    except LabelStoreError as error:
        problems += values_in_frames(error)
    except OSError as error:
        problems += values_in_frames(error)
        last = traceback.extract_tb(error.__traceback__)[-3:]
        problems.append(f"an error that is not ours: {error!r} from {last}")


def fork(store, folder, number, fault):
    child = os.fork()
    if child:
        return child
    problems = []
    try:
        done = fail_once(number, fault) if fault else []
        work(store, folder, problems, KEYS if number % 2 else KEYS[::-1])
        result = {"fault": fault if done else None, "problems": problems}
        name = folder.with_name(f"{folder.name}-{os.getpid()}.json")
        with contextlib.suppress(OSError):
            name.write_text(json.dumps(result))
    except BaseException:
        traceback.print_exc()
        _exit(1)
    _exit(0)


def problems_of(store, folder):
    """Returns what is wrong with a store once a process without a fault has drawn everything."""
    found = []
    child = fork(store, folder, 1, None)
    if os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]):
        found.append("the uses can't be completed")
    outputs = collections.defaultdict(set)
    for path in folder.glob("?-*"):
        outputs[path.name[0]].add(path.read_bytes())
    found += [f"{key} was returned twice" for key, several in outputs.items() if len(several) > 1]
    if sorted(outputs) != sorted(KEYS):
        found.append(f"{sorted(outputs)} came out")
    labels = vault(store)
    for key, [values, *_] in outputs.items():
        drawn = labels.randomize(RandomizedResponse(1.0, 5), key=key).values
        if drawn.astype(np.int64).tobytes() != values:
            found.append(f"{key} is not as it was returned")
    if labels.guarantee().epsilon != 3.0 or len(labels.receipts) != 3 or labels.remaining():
        found.append(f"{labels.guarantee().epsilon} in {len(labels.receipts)} uses")
    if give_back(store):
        found.append("a reservation is stuck")
    return found


def main(root, most):
    load = vault(None)  # This loads everything before the forks.
    with load.reserve({"a": RandomizedResponse(1.0, 5)}):
        load.randomize(RandomizedResponse(1.0, 5), key="a")
    load.guarantee()
    rng = np.random.default_rng(0)
    problems, faults = [], collections.Counter()
    kinds = itertools.cycle(FAULTS)
    for number in itertools.count(1):
        store, folder = root / f"{number}" / "store", root / f"{number}-out"
        folder.mkdir()
        for _ in range(4):
            children = []
            for fault in itertools.islice(kinds, 2):
                # Few operations are writes, and one of them comes after the operation.
                most_operations = MOST_OPERATIONS // (3 if fault.startswith("short") else 1)
                children.append(fork(store, folder, int(rng.integers(1, most_operations)), fault))
            statuses = [os.waitpid(child, 0)[1] for child in children]
            problems += [f"store {number}: a process failed" for status in statuses if status]
        for path in root.glob(f"{number}-out-*.json"):
            result = json.loads(path.read_text())
            faults.update([result["fault"]] if result["fault"] else [])
            problems += [f"store {number}: {text}" for text in result["problems"]]
        problems += [f"store {number}: {text}" for text in problems_of(store, folder)]
        if faults.total() >= most and min(faults[kind] for kind in FAULTS) >= most // 20:
            print(json.dumps([problems, faults]))
            return


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]), int(sys.argv[2]))
