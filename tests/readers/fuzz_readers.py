"""Reads files that were changed at random, with every reader of files of others.

``test_readers.py`` runs ``python fuzz_readers.py FOLDER NUMBER SEED``; the full run has 10,000
files. Each file is read as it was, or refused by an error of the library. Prints a JSON list: the
problems, the number of files by kind and by result, and the growth of the memory in MB.
"""

from __future__ import annotations

import base64
import collections
import hashlib
import io
import json
import os
import pathlib
import resource
import shutil
import signal
import sys
import tempfile
import traceback
import warnings
import zipfile
import zlib

import numpy as np

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras

import tf_labeldp as ldp
from tf_labeldp.accounting import ReceiptError
from tf_labeldp.scale import ReleaseKey
from tf_labeldp.vault import LabelStoreError, PrivateLabels

LABELS = np.random.default_rng(1).integers(0, 3, 60)
FEATURES = np.random.default_rng(2).normal(size=(60, 2))
VALUES = [
    "1e309", "-1", "0", "1e400", "10" * 12, "NaN", "-Infinity", "null", "[]", "{}", '""', "true",
    '"\\ud800"', '"\\u0000"', '"../../../x"', "[" * 3000 + "]" * 3000, "-0.0", "1.5", "99999999",
    '"' + "x" * 300_000 + '"', '{"a": ' * 2000 + "1" + "}" * 2000,
]  # fmt: skip
OURS = (LabelStoreError, ReceiptError)


def originals(root):
    """Makes one of each kind of file; returns its folder and its files by kind."""
    budget = ldp.PrivacyBudget(6.0, 1e-3)
    store = root / "store" / "s"
    labels = PrivateLabels(LABELS, 3, budget=budget, store=store)
    part = labels.randomize(ldp.RandomizedResponse(0.5, 3), np.arange(9)[::-1], key="part")
    noisy = labels.randomize(ldp.RandomizedResponse(1.0, 3), key="all")
    labels.reserve({"later": ldp.RandomizedResponse(0.25, 3)}).give_back()
    labels.raise_budget(ldp.PrivacyBudget(7.0, 1e-3), reason="a test")
    head = ldp.PrivateLogisticRegression(1.0, 1e-3, key="head").fit(FEATURES, labels)
    noisy.save(root / "draw" / "noisy")
    part.save(root / "draw-part" / "noisy")
    ldp.dossier.save(head, root / "card" / "c", data="made up")
    head.to_keras().save(root / "model.keras")
    key = ReleaseKey.create(root / "key" / "k")
    key.register("r", ldp.RandomizedResponse(1.0, 3))
    published = [root / "draw" / "noisy"]
    ldp.dossier.report(store, published=published).save(root / "report" / "r")
    table = root / "t.csv"
    table.write_text("id,y\n" + "".join(f"{i},{label}\n" for i, label in enumerate(LABELS)))
    (root / "table").mkdir()
    words = ["randomize", table, "--column", "y", "--task", "classification", "--num-classes", 3]
    words += ["--epsilon", 1, "--quiet", "--output", root / "table" / "n.csv"]
    assert ldp.cli.main(list(map(str, words))) == 0
    (root / "model").mkdir()
    shutil.move(root / "model.keras", root / "model" / "m.keras")
    return {
        "store": sorted((root / "store" / "s").rglob("*")),
        "draw": sorted((root / "draw" / "noisy").iterdir()),
        "draw-part": sorted((root / "draw-part" / "noisy").iterdir()),
        "table": sorted((root / "table").iterdir()),
        "card": sorted((root / "card" / "c").iterdir()),
        "model": [root / "model" / "m.keras"],
        "key": [root / "key" / "k", *sorted((root / "key" / "k.ledger").rglob("*"))],
        "report": [root / "report" / "r" / "report.json"],
    }


def read_store(root):
    """Opens a store with its labels and without, and returns its statement."""
    store = root / "store" / "s"
    read = ldp.dossier.report(store).statement.epsilon
    labels = PrivateLabels(LABELS, 3, store=store)
    for key, rows in (("all", None), ("part", np.arange(9)[::-1])):
        epsilon = 1.0 if key == "all" else 0.5
        if labels.has_draw(key):
            labels.randomize(ldp.RandomizedResponse(epsilon, 3), rows, key=key)
    str(labels.history())
    return read, labels.guarantee().epsilon


def read_draw(folder):
    noisy = ldp.NoisyLabels.load(folder)
    found = ldp.dossier.verify(folder)
    str(found)
    return noisy.values.tolist(), noisy.indices.tolist(), noisy.guarantee().epsilon


def read_published(path):
    """Returns nothing: a changed card or model may be right, or wrong."""
    str(ldp.dossier.verify(path))


def read_key(root):
    return ReleaseKey(root / "key" / "k").guarantee().epsilon


def read_report(root):
    place = root / "report" / "r" / "report.json"
    str(ldp.dossier.verify(root / "draw" / "noisy", report=place))


READERS = {
    "store": read_store,
    "draw": lambda root: read_draw(root / "draw" / "noisy"),
    "draw-part": lambda root: read_draw(root / "draw-part" / "noisy"),
    "table": lambda root: read_draw(root / "table" / "n.csv"),
    "card": lambda root: read_published(root / "card" / "c"),
    "model": lambda root: read_published(root / "model" / "m.keras"),
    "key": read_key,
    "report": read_report,
}
SHARES = dict(zip(READERS, (34, 14, 8, 10, 10, 10, 8, 6), strict=True))
"""Percentages of the files by kind."""


def changed(content, rng):
    """Returns bytes with one or a few changes."""
    content = bytearray(content)
    for _ in range(int(rng.integers(1, 4))):
        size = len(content)
        at = int(rng.integers(size + 1))
        length = int(rng.integers(1, 40))
        how = rng.integers(9)
        if how == 0 and size:
            content[at % size] ^= 1 << int(rng.integers(8))
        elif how == 1:
            del content[at:]
        elif how == 2:
            del content[at : at + length]
        elif how == 3:
            content[at:at] = content[at : at + length]
        elif how == 4:
            content[at:at] = rng.bytes(length)
        elif how == 5:
            content[at : at + length] = bytes(length)
        elif how == 6:
            content[at : at + length] = rng.bytes(length)
        elif how == 7 and size:
            content[at % size] = int(rng.integers(256))
        else:
            other = int(rng.integers(size + 1))
            content[at:at] = content[other : other + 10 * length]
    return bytes(content)


def changed_json(text, rng):
    """Returns JSON with another value for one of its fields, at any depth."""
    data = json.loads(text)
    places = []

    def walk(part):
        pairs = part.items() if isinstance(part, dict) else enumerate(part)
        for name, value in list(pairs):
            places.append((part, name))
            if isinstance(value, (dict, list)):
                walk(value)

    walk(data)
    part, name = places[int(rng.integers(len(places)))]
    new = VALUES[int(rng.integers(len(VALUES)))]
    how = rng.integers(4)
    mark = "@changed@"
    if how == 0 and isinstance(part, dict):
        del part[name]
        return json.dumps(data)
    if how == 1 and isinstance(part, dict):
        part["unknown"] = mark
    else:
        part[name] = mark
    return json.dumps(data).replace(f'"{mark}"', new)


def sealed(text, field="digest"):
    """Returns JSON with the digest of its content, as a forger writes it."""
    try:
        data = json.loads(text)
        rest = {name: value for name, value in data.items() if name != field}
        digest = hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()
        return json.dumps({**rest, field: digest})
    except (AttributeError, RecursionError, ValueError):
        return text


def changed_record(content, rng, store):
    """Returns the first record with a changed field, and a digest that fits."""
    line, _, arrays = content.partition(b"\n")
    text = changed_json(line.partition(b" ")[2], rng)
    before = json.loads((store / "header.json").read_text())["label_set"]
    digest = hashlib.sha256((before + text).encode()).hexdigest()
    return f"{digest} {text}\n".encode() + arrays


def changed_zip(content, rng):
    """Returns a zip file with a changed member, or one that unpacks to far more."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(content)) as old:
        chosen = int(rng.integers(len(old.namelist())))
        with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as new:
            for number, name in enumerate(old.namelist()):
                part = old.read(name)
                if number == chosen:
                    part = changed_member(name, part, rng)
                new.writestr(name, part)
    return buffer.getvalue()


def changed_member(name, part, rng):
    if rng.integers(12) == 0:
        return bytes(200_000_000) if rng.integers(6) == 0 else bytes(100_000)
    if name.endswith(".json") and rng.integers(2):
        return changed_json(part, rng).encode("utf-8", "surrogatepass")
    if name.endswith("receipts.bin") and rng.integers(2):
        layer, _, packed = part.partition(b"\n")
        text = changed_json(zlib.decompress(packed), rng)
        if rng.integers(2):
            text = with_large_parts(text, rng)
        return layer + b"\n" + zlib.compress(text.encode())
    if name.endswith(".npy") and rng.integers(2):
        return part.replace(b"(60,)", b"(%d,)" % 10 ** int(rng.integers(1, 11)))
    return changed(part, rng)


def with_large_parts(text, rng):
    """Returns receipts of a part of very many examples, with digests that fit."""
    try:
        data = json.loads(text)
        for receipt in data["receipts"]:
            size = 10 ** int(rng.integers(6, 11))
            receipt["labels"]["size"] = size
            if rng.integers(2):
                bits = zlib.compress(bytes(min(-(-size // 8), 50_000_000)), 9)
                receipt["examples"] = base64.b64encode(bits).decode()
            receipt.pop("digest", None)
            content = json.dumps(receipt, sort_keys=True).encode()
            receipt["digest"] = hashlib.sha256(content).hexdigest()
        return json.dumps(data)
    except (AttributeError, KeyError, TypeError, ValueError, RecursionError):
        return text


def mutate(path, rng, root):
    content = path.read_bytes()
    how = rng.integers(4)
    try:
        if how and zipfile.is_zipfile(io.BytesIO(content)):
            return changed_zip(content, rng)
        if how and path.parent.name == "records" and path.name == "000000":
            return changed_record(content, rng, path.parent.parent)
        if how and content.lstrip()[:1] == b"{":
            text = changed_json(content, rng)
            text = sealed(text) if how > 1 else text
            return text.encode("utf-8", "surrogatepass")
    except (UnicodeError, ValueError, KeyError, zipfile.BadZipFile):
        pass
    return changed(content, rng)


def is_ours(error):
    """Returns whether the library raised an error itself, with words on what to do."""
    if isinstance(error, OURS):
        return True
    last = traceback.extract_tb(error.__traceback__)[-1]
    raised = "raise" in (last.line or "") and "tf_labeldp" in last.filename
    return raised and type(error) in (ValueError, TypeError, FileNotFoundError)


class Written:
    outside = frozenset()
    root = "/"

    @classmethod
    def hook(cls, event, arguments):
        if event != "open" or not isinstance(arguments[0], (str, bytes)):
            return
        if (arguments[2] or 0) & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
            path = os.path.realpath(os.fsdecode(arguments[0]))
            if not path.startswith((cls.root, "/dev/")):
                cls.outside |= {path}


def stop(*unused):
    raise TimeoutError("a reader took more than a minute")


def main(root, number, seed):
    warnings.simplefilter("ignore")
    root = root.resolve()
    tempfile.tempdir = str(root)
    Written.root = str(root)
    keras.utils.disable_interactive_logging()
    files = originals(root / "work")
    kept = {path: path.read_bytes() for paths in files.values() for path in paths if path.is_file()}
    kept = {path: content for path, content in kept.items() if path.name != ".lock"}
    expected = {kind: read(root / "work") for kind, read in READERS.items()}
    signal.signal(signal.SIGALRM, stop)
    sys.addaudithook(Written.hook)
    rng = np.random.default_rng(seed)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    problems, results = [], collections.Counter()
    kinds = list(SHARES)
    shares = np.array(list(SHARES.values())) / sum(SHARES.values())
    grown = 0
    for turn in range(number):
        kind = kinds[rng.choice(len(kinds), p=shares)]
        paths = [path for path in files[kind] if path in kept]
        path = paths[int(rng.integers(len(paths)))]
        new = mutate(path, rng, root)
        path.write_bytes(new)
        result, problem = read_edited(kind, root / "work", expected[kind])
        problems += [f"{turn}: {kind}, {path.name}: {problem}"] if problem else []
        results[f"{kind} {result}"] += 1
        most = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024
        if most > grown + 150:
            print(f"{turn}: {kind}, {path.name}: {most} MB", file=sys.stderr)
        grown = max(grown, most)
        restore(root, kind, kept, files)
        if turn % 100 == 99:
            keras.backend.clear_session()
            for each, read in READERS.items():
                if read(root / "work") != expected[each]:
                    problems.append(f"{turn}: {each} is not as it was")
                restore(root, each, kept, files)
    problems += [f"written outside: {path}" for path in sorted(Written.outside)]
    print(json.dumps([problems, dict(sorted(results.items())), grown]))


def read_edited(kind, folder, expected):
    """Returns whether a reader read, refused or was late, and what was wrong with that, or ""."""
    signal.alarm(60)
    try:
        found = READERS[kind](folder)
        is_right = expected is None or found == expected
        if is_right or (kind in ("store", "key") and at_least(found, expected)):
            return "read", ""
        return "read", f"read as {str(found)[:200]}"
    except TimeoutError as error:
        return "late", str(error)
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)
        where = [f"{frame.filename[-40:]}:{frame.lineno}" for frame in frames]
        return "refused", "" if is_ours(error) else f"{error!r:.200} at {where[-3:]}"
    finally:
        signal.alarm(0)


def at_least(found, expected):
    """Returns whether no figure of a statement is below that of the unchanged file."""
    found, expected = np.atleast_1d(found), np.atleast_1d(expected)
    return bool(np.all(found >= expected - 1e-12))


def restore(root, kind, kept, files):
    """Puts the files of a kind back, also those that a reader wrote or removed."""
    for path in files[kind]:
        if path in kept:
            path.write_bytes(kept[path])
    if kind in ("store", "key"):
        places = (
            [root / "work" / "store" / "s"]
            if kind == "store"
            else [root / "work" / "key" / "k.ledger"]
        )
        for place in places:
            last = place / "last-record"
            # The place of the file that was written here is another one.
            last.write_bytes(kept[last][:75] + b"\n")
            for path in place.rglob("*"):
                if path.is_file() and path not in kept and path.name != ".lock":
                    path.unlink()


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
