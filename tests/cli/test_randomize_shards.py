"""Several files are one table: one vault, one prior, one statement, and all files or none."""

from __future__ import annotations

import gzip
import json
import os
import threading
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

from tf_labeldp.cli import main
from tf_labeldp.vault import NoisyLabels

N = 300
AMOUNTS = np.random.default_rng(8).integers(0, 53, N)
NAMES = ["part-0.csv", "part-1.csv.gz", "part-2.parquet"]
BOUNDS = [0, 120, 130, N]
REGRESSION = ("--column", "weeks", "--task", "regression", "--low", "0", "--high", "52")
SEEDED = ("--insecure-seed", "3")


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """The current folder, with labels in three files, and a folder to publish."""
    (tmp_path / "labels").mkdir()
    (tmp_path / "public").mkdir()
    monkeypatch.chdir(tmp_path)
    for number in range(3):
        write(number, AMOUNTS[BOUNDS[number] : BOUNDS[number + 1]])
    Path("labels/notes.txt").write_text("no table")
    Path("labels/.hidden.csv").write_text("no table")
    return tmp_path


def write(number, amounts, ids=None, name="id"):
    path = Path("labels") / NAMES[number]
    ids = [f"id{BOUNDS[number] + i}" for i in range(len(amounts))] if ids is None else ids
    rows = ["" if i is None else i for i in ids]
    text = f"{name},weeks\n" + "".join(f"{i},{a}\n" for i, a in zip(rows, amounts, strict=True))
    if path.suffix == ".parquet":
        parquet.write_table(pa.table({"weeks": amounts, name: ids}), path)
    else:
        path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())


def randomize(*inputs, output="public/noisy", more=()):
    options = [*REGRESSION, "--epsilon", "1", "--output", output, *more]
    return main(["randomize", *(inputs or ("labels",)), *options])


def rows_of(path):
    """Returns the rows of an output file, without its header."""
    if path.suffix == ".parquet":
        columns = parquet.read_table(path).to_pydict()
        return [[i, f"{w!r}"] for i, w in zip(columns["id"], columns["weeks"], strict=True)]
    text = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    return [line.split(",") for line in text.decode().splitlines()[1:]]


def values():
    rows = [row for name in NAMES for row in rows_of(Path("public/noisy") / name)]
    assert [row[0] for row in rows] == [f"id{i}" for i in range(N)]
    return np.array([float(row[1]) for row in rows])


def statement():
    return json.loads(Path("public/noisy/privacy.json").read_text())


def contents(folder):
    return {str(path): path.read_bytes() for path in Path(folder).rglob("*") if path.is_file()}


def test_a_folder_becomes_a_folder_with_one_statement():
    assert randomize(more=SEEDED) == 0
    assert sorted(path.name for path in Path("public").iterdir()) == ["noisy"]
    assert sorted(path.name for path in Path("public/noisy").iterdir()) == [*NAMES, "privacy.json"]
    stated = statement()
    assert list(stated["files"].items()) == list(zip(NAMES, [120, 10, 170], strict=True))
    assert stated["rows"] == stated["guarantee"]["num_units"] == N
    assert stated["epsilon"]["total"] == stated["guarantee"]["epsilon"] == 1.0
    # One prior for all files: the draws are those of the same rows in one file.
    rows = "".join(f"id{i},{a}\n" for i, a in enumerate(AMOUNTS))
    Path("whole.csv").write_text(f"id,weeks\n{rows}")
    assert randomize("whole.csv", output="public/whole.csv", more=SEEDED) == 0
    whole = NoisyLabels.load("public/whole.csv")
    assert np.array_equal(values(), whole.values)
    for suffix in ("csv", "csv.gz", "parquet"):
        output = f"public/together.{suffix}"
        assert randomize(output=output, more=SEEDED) == 0
        assert np.array_equal(NoisyLabels.load(output).values, whole.values)
        assert [row[0] for row in rows_of(Path(output))] == [f"id{i}" for i in range(N)]
    alone = json.loads(Path("public/whole.csv.privacy.json").read_text())
    assert alone["prior"] == stated["prior"] and "files" not in alone

    loaded = NoisyLabels.load("public/noisy")
    assert np.array_equal(loaded.values, whole.values) and loaded.guarantee() == whole.guarantee()
    changed = Path("public/noisy") / NAMES[1]
    rest, _ = gzip.decompress(changed.read_bytes()).rsplit(b",", 1)
    changed.write_bytes(gzip.compress(rest + b",0.5\n"))
    with pytest.raises(ValueError, match="damaged or edited"):
        NoisyLabels.load("public/noisy")


@pytest.mark.parametrize("way", ["up", "absolute", "subfolder", "link", "folder"])
def test_load_reads_no_file_outside_the_folder(way):
    assert randomize(more=SEEDED) == 0
    noisy = Path("public/noisy")
    secret = (noisy / NAMES[1]).replace(Path(NAMES[1]).resolve())
    name = {"up": f"../../{NAMES[1]}", "absolute": str(secret), "folder": ".."}.get(way, NAMES[1])
    if way == "link":
        (noisy / name).symlink_to(secret)
    elif way == "subfolder":
        (noisy / "inner").symlink_to(secret.parent)
        name = f"inner/{name}"
    stated = statement()
    stated["files"] = {name if old == NAMES[1] else old: n for old, n in stated["files"].items()}
    (noisy / "privacy.json").write_text(json.dumps(stated))
    with pytest.raises(ValueError, match="leads elsewhere"):
        NoisyLabels.load(noisy)


def test_the_rows_are_in_the_order_of_the_names():
    assert randomize(more=SEEDED) == 0
    for number, inputs in enumerate(
        (
            ("labels/part-*",),
            ("labels/part-2.parquet", "labels/part-0.csv", "labels/part-1.csv.gz"),
            ("labels/part-[01]*", "labels/part-2.parquet"),
            ("lab*/**/part-?.*",),
        )
    ):
        output, jobs = Path(f"public/again-{number}"), ("--jobs", "7" if number % 2 else "1")
        assert randomize(*inputs, output=str(output), more=(*SEEDED, *jobs)) == 0
        for name in NAMES:
            assert (output / name).read_bytes() == (Path("public/noisy") / name).read_bytes()


def test_row_numbers_go_on_from_file_to_file():
    for name, rows in (("a.csv", 3), ("b.csv", 2)):
        Path(name).write_text("weeks\n" + "7\n" * rows)
    assert randomize("a.csv", "b.csv") == 0
    found = [rows_of(Path("public/noisy") / name) for name in ("a.csv", "b.csv")]
    assert [[row[0] for row in rows] for rows in found] == [["0", "1", "2"], ["3", "4"]]


def test_ids_repeated_across_files_are_counted(capsys):
    write(1, AMOUNTS[:10], ["id5", "id5", *"abcdefgh"])
    assert randomize() == 0
    assert statement()["most_rows_of_one_id"] == 3  # one of them in part-0
    assert "one id has up to 3 rows: where an id is a person" in capsys.readouterr().err


def spoil(number, how):
    """Writes one of the files with an error."""
    low, high = BOUNDS[number], BOUNDS[number + 1]
    amounts, ids = AMOUNTS[low:high].astype(object), [f"id{i}" for i in range(low, high)]
    if how == "label":
        amounts[[3, 5]] = 53
    elif how == "missing label":
        amounts[3] = None if number == 2 else ""
    elif how == "missing id":
        ids[3] = None  # type: ignore[call-overload]
    elif how == "text":
        amounts[3] = "-secret-"
    elif how == "no rows":
        amounts, ids = amounts[:0], []
    elif how == "type of id":
        ids = list(range(low, high))  # type: ignore[arg-type]
    write(number, amounts, ids, "key" if how == "column" else "id")


@pytest.mark.parametrize(
    ("number", "how", "reason"),
    [
        (0, "label", "of labels/part-0.csv: 2 of 120 labels lie outside --low 0 to --high 52"),
        (2, "label", "of labels/part-2.parquet: 2 of 170 labels lie outside"),
        (1, "missing label", "of labels/part-1.csv.gz: 1 of 10 labels are missing"),
        (2, "missing label", "of labels/part-2.parquet: 1 of 170 labels are missing"),
        (0, "missing id", "column 'id' of labels/part-0.csv has no id in 1 of 120 rows"),
        (2, "missing id", "column 'id' of labels/part-2.parquet has no id in 1 of 170 rows"),
        (1, "text", "of labels/part-1.csv.gz has a cell that is not a number in row 5"),
        (0, "no rows", "the input labels/part-0.csv has no rows below its header line"),
        (2, "type of id", "column 'id' has type string in labels/part-0.csv, but int64 in labels/"),
        (1, "column", "labels/part-1.csv.gz has no column 'id' for --id"),
    ],
)
def test_one_bad_file_of_many_publishes_nothing(folder, capsys, number, how, reason):
    spoil(number, how)
    before = contents(folder)
    assert randomize(more=("--store", "store", "--quiet")) == 2
    shown = capsys.readouterr().err
    assert reason in shown and "secret" not in shown and shown.count("\n") == 1
    assert contents(folder) == before  # no output, and no store either: nothing was charged
    assert list(Path("public").iterdir()) == [] and not Path("store").exists()


@pytest.mark.parametrize("number", [0, 1, 2])
def test_files_that_changed_between_two_runs(folder, capsys, number):
    store = ("--store", "store", "--overwrite", "--quiet")
    assert randomize(more=store) == 0
    low, high = BOUNDS[number], BOUNDS[number + 1]
    amounts, ids = AMOUNTS[low:high], [f"id{i}" for i in range(low, high)]
    other = [(amounts[0] + 1) % 53, *amounts[1:]]
    for changed, names, reason in (
        (other, ids, "was made for other labels"),
        (amounts, [ids[1], ids[0], *ids[2:]], f"rows with other ids (another name, value or order) "
         f"in '{NAMES[number]}'; give the input"),
        (amounts[1:], ids[1:], f"in '{NAMES[number]}'; give the input"),
    ):  # fmt: skip
        write(number, np.array(changed), names)
        before = contents(folder)
        capsys.readouterr()
        assert randomize(more=store) == 2
        shown = capsys.readouterr().err
        assert reason in shown and shown.count("\n") == 1 and contents(folder) == before
    assert randomize("labels/part-[01]*", more=store) == 2
    assert "the store store has noisy labels of rows with other ids" in capsys.readouterr().err


def test_an_output_folder_that_is_there(folder, capsys):
    Path("public/noisy").mkdir()
    assert randomize() == 0  # it was empty
    first = contents(folder)
    assert randomize() == 2
    assert "public/noisy exists; give another --output, or --overwrite" in capsys.readouterr().err
    assert contents(folder) == first
    assert randomize("labels/part-0.csv", "labels/part-1*", more=("--overwrite",)) == 0
    assert {path.name for path in Path("public/noisy").iterdir()} == {*NAMES[:2], "privacy.json"}
    for name in NAMES[1:]:
        Path("labels", name).unlink()
    assert randomize(more=("--overwrite",)) == 0  # a folder with one file is a folder too
    assert statement()["files"] == {NAMES[0]: 120}
    Path("public/noisy/mine.txt").write_text("mine")
    before = contents(folder)
    capsys.readouterr()
    for output in ("public/noisy", "labels"):
        assert randomize(output=output, more=("--overwrite",)) == 2
        assert "has files that no earlier run wrote" in capsys.readouterr().err
    assert contents(folder) == before


def test_a_failure_leaves_everything_as_it_was(folder, monkeypatch, capsys):
    """One failure in a writing thread, and one while the folder gets its name."""
    sync, replace, calls = os.fsync, os.replace, []

    def full(file):
        calls.append(threading.current_thread())
        if len(calls) == 2:
            raise OSError(28, "No space left on device")
        sync(file)

    def fail_once(source, target):
        if Path(target) == Path("public/noisy") and "old-" not in str(source):
            raise OSError(28, "No space left on device")
        replace(source, target)

    for before in (contents(folder), None):
        if before is None:
            assert randomize() == 0
            before = contents(folder)
        calls.clear()
        for name, broken in (("fsync", full), ("replace", fail_once)):
            with monkeypatch.context() as patch:
                patch.setattr(os, name, broken)
                assert randomize(more=("--overwrite",)) == 2
            shown = capsys.readouterr().err
            assert "cannot write --output public/noisy (No space left" in shown
            assert contents(folder) == before
        assert threading.main_thread() not in calls


@pytest.mark.parametrize(
    ("inputs", "output", "more", "reason"),
    [
        (("nothing-*.csv",), "public/n", (), "the input nothing-*.csv does not exist"),
        (("public",), "public/n", (), "the folder public has no file in it whose name ends in"),
        (("labels", "labels/part-0.csv"), "public/n", (), "have the same name, which names a file"),
        (("labels", "-"), "public/n", (), "is stdin, which can't be one of several files"),
        (("labels",), "no/n", (), "the folder of --output no/n does not exist; make no first"),
        (("labels",), "-", (), "--output - needs --statement FILE"),
        (("labels",), "public/n", ("--statement", "s"), "--statement is for --output -"),
        (("labels",), "-", ("--statement", "no/s"), "of --statement no/s does not exist"),
        (("labels",), "-", ("--statement", "labels/notes.txt"), "exists; give another --statement"),
        (("labels",), "public/n", ("--store", "public/n/s"), "is in the folder of --output"),
        (("labels",), "labels/part-0.csv", ("--overwrite",), "is the input itself"),
        (("labels",), "labels/notes.txt", (), "is a file; several inputs need a folder"),
        (("labels",), "public/n", ("--jobs", "0"), "must be a whole number, at least 1"),
    ],
)
def test_inputs_and_outputs_that_are_refused(folder, capsys, inputs, output, more, reason):
    before = contents(folder)
    assert randomize(*inputs, output=output, more=(*more, "--quiet")) == 2
    shown = capsys.readouterr().err
    assert reason in shown and shown.count("\n") == 1
    assert contents(folder) == before
