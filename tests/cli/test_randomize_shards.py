"""Several files are one table: one vault, one prior, one statement, and all files or none."""

from __future__ import annotations

import gzip
import io
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

from tf_labeldp.accounting import PrivacyBudget
from tf_labeldp.cli import _outputs, _randomize, main
from tf_labeldp.vault import NoisyLabels, PrivateLabels
from tf_labeldp.vault.ledger import Ledger

ROOT = Path(__file__).parents[2]
N = 300
AMOUNTS = np.random.default_rng(8).integers(0, 53, N)
NAMES = ["part-0.csv", "part-1.csv.gz", "part-2.parquet"]
BOUNDS = [0, 120, 130, N]
REGRESSION = ("--column", "weeks", "--task", "regression", "--low", "0", "--high", "52")
SEEDED = ("--insecure-seed", "3")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with labels in three files, and a folder that is published."""
    (tmp_path / "labels").mkdir()
    (tmp_path / "public").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(_randomize, "_PATIENCE", 1e9)  # however slow the machine is
    for number in range(3):
        write(number, AMOUNTS[BOUNDS[number] : BOUNDS[number + 1]])
    Path("labels/notes.txt").write_text("no table")
    Path("labels/.hidden.csv").write_text("no table")
    return tmp_path


def write(number: int, amounts: np.ndarray, ids: list[str] | None = None) -> None:
    """Writes one of the files."""
    path = Path("labels") / NAMES[number]
    ids = ids or [f"id{BOUNDS[number] + i}" for i in range(len(amounts))]
    text = "id,weeks\n" + "".join(f"{i},{a}\n" for i, a in zip(ids, amounts, strict=True))
    if path.suffix == ".parquet":
        parquet.write_table(pa.table({"weeks": amounts, "id": ids}), path)
    else:
        path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())


def randomize(*inputs: str, output: str = "public/noisy", more: tuple[str, ...] = ()) -> int:
    options = [*REGRESSION, "--epsilon", "1", "--output", output, *more]
    return main(["randomize", *(inputs or ("labels",)), *options])


def rows_of(path: Path) -> list[list[str]]:
    """Gives the rows of a file of the output, below its header line."""
    if path.suffix == ".parquet":
        columns = parquet.read_table(path).to_pydict()
        return [[i, f"{w!r}"] for i, w in zip(columns["id"], columns["weeks"], strict=True)]
    text = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    return [line.split(",") for line in text.decode().splitlines()[1:]]


def values_in(folder: str = "public/noisy") -> np.ndarray:
    rows = [row for name in NAMES for row in rows_of(Path(folder) / name)]
    assert [row[0] for row in rows] == [f"id{i}" for i in range(N)]
    return np.array([float(row[1]) for row in rows])


def statement_in(folder: str = "public/noisy") -> dict:
    return json.loads((Path(folder) / "privacy.json").read_text())


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_folder_becomes_a_folder_with_one_statement(folder: Path) -> None:
    assert randomize(more=SEEDED) == 0
    assert sorted(path.name for path in Path("public").iterdir()) == ["noisy"]
    assert sorted(path.name for path in Path("public/noisy").iterdir()) == [*NAMES, "privacy.json"]
    told = statement_in()
    assert told["files"] == {NAMES[0]: 120, NAMES[1]: 10, NAMES[2]: 170}
    assert list(told["files"]) == NAMES
    assert told["rows"] == told["guarantee"]["num_units"] == N
    assert told["epsilon"]["total"] == told["guarantee"]["epsilon"] == 1.0
    # One prior for all: the same draws as of the same rows in one file.
    rows = "".join(f"id{i},{a}\n" for i, a in enumerate(AMOUNTS))
    Path("one.csv").write_text(f"id,weeks\n{rows}")
    assert randomize("one.csv", output="public/one.csv", more=SEEDED) == 0
    one = NoisyLabels.load("public/one.csv")
    assert np.array_equal(values_in(), one.values)
    loaded = NoisyLabels.load("public/noisy")
    assert np.array_equal(loaded.values, one.values) and loaded.guarantee() == one.guarantee()
    changed = Path("public/noisy") / NAMES[1]
    rest, _ = gzip.decompress(changed.read_bytes()).rsplit(b",", 1)
    changed.write_bytes(gzip.compress(rest + b",0.5\n"))
    with pytest.raises(ValueError, match="damaged or edited"):
        NoisyLabels.load("public/noisy")
    alone = json.loads(Path("public/one.csv.privacy.json").read_text())
    assert alone["prior"] == told["prior"] and "files" not in alone


@pytest.mark.parametrize("way", ["up", "absolute", "subfolder", "link", "folder"])
def test_load_reads_no_file_outside_the_folder(folder: Path, way: str) -> None:
    assert randomize(more=SEEDED) == 0
    noisy = Path("public/noisy")
    secret = (noisy / NAMES[1]).replace(Path(NAMES[1]).resolve())
    name = {"up": f"../../{NAMES[1]}", "absolute": str(secret), "folder": ".."}.get(way, NAMES[1])
    if way == "link":
        (noisy / name).symlink_to(secret)
    elif way == "subfolder":
        (noisy / "inner").symlink_to(secret.parent)
        name = f"inner/{name}"
    told = statement_in()
    told["files"] = {name if old == NAMES[1] else old: n for old, n in told["files"].items()}
    (noisy / "privacy.json").write_text(json.dumps(told))
    with pytest.raises(ValueError, match="leads elsewhere"):
        NoisyLabels.load(noisy)


@pytest.mark.parametrize(
    "inputs",
    [
        ("labels/part-*",),
        ("labels/part-2.parquet", "labels/part-0.csv", "labels/part-1.csv.gz"),
        ("labels/part-[01]*", "labels/part-2.parquet"),
        ("lab*/**/part-?.*",),
    ],
)
@pytest.mark.parametrize("jobs", ["1", "7"])
def test_the_rows_are_in_the_order_of_the_names(inputs: tuple[str, ...], jobs: str) -> None:
    assert randomize(more=SEEDED) == 0
    assert randomize(*inputs, output="public/again", more=(*SEEDED, "--jobs", jobs)) == 0
    for name in NAMES:
        again = (Path("public/again") / name).read_bytes()
        assert again == (Path("public/noisy") / name).read_bytes()


@pytest.mark.parametrize("output", ["noisy.csv", "noisy.csv.gz", "noisy.parquet"])
def test_several_files_into_one_table(output: str) -> None:
    assert randomize(more=SEEDED) == 0
    assert randomize(output=f"public/{output}", more=SEEDED) == 0
    one = NoisyLabels.load(f"public/{output}")
    assert np.array_equal(one.values, values_in()) and len(one) == N
    assert [row[0] for row in rows_of(Path("public") / output)] == [f"id{i}" for i in range(N)]


def test_a_folder_with_one_file_is_a_folder_too() -> None:
    for name in NAMES[1:]:
        Path("labels", name).unlink()
    assert randomize() == 0
    assert randomize(more=("--overwrite",)) == 0
    assert statement_in()["files"] == {NAMES[0]: 120}
    assert len(rows_of(Path("public/noisy") / NAMES[0])) == 120


def test_row_numbers_go_on_from_file_to_file() -> None:
    for name, rows in (("a.csv", 3), ("b.csv", 2)):
        Path(name).write_text("weeks\n" + "7\n" * rows)
    assert randomize("a.csv", "b.csv") == 0
    found = [rows_of(Path("public/noisy") / name) for name in ("a.csv", "b.csv")]
    assert [[row[0] for row in rows] for rows in found] == [["0", "1", "2"], ["3", "4"]]


def test_ids_repeated_across_files_are_counted(capsys: pytest.CaptureFixture[str]) -> None:
    write(1, AMOUNTS[:10], ["id5", "id5", *"abcdefgh"])
    assert randomize() == 0
    assert statement_in()["most_rows_of_one_id"] == 3  # one of them in part-0
    assert "one id has up to 3 rows: where an id is a person" in capsys.readouterr().err


def spoil(number: int, how: str) -> None:
    """Makes one file bad."""
    low, high = BOUNDS[number], BOUNDS[number + 1]
    amounts, ids = AMOUNTS[low:high].astype(object), [f"id{i}" for i in range(low, high)]
    if how == "label":
        amounts[[3, 5]] = 53
    elif how == "missing label":
        amounts[3] = None if number == 2 else ""
    elif how == "missing id":
        ids[3] = None if number == 2 else ""  # type: ignore[call-overload]
    elif how == "text":
        amounts[3] = "-secret-"
    elif how == "no rows":
        amounts, ids = amounts[:0], []
    if how == "type of id":
        parquet.write_table(pa.table({"weeks": amounts, "id": range(high - low)}), "labels/p.pq")
        os.replace("labels/p.pq", Path("labels") / NAMES[number])
    elif how == "no rows" and number < 2:
        text = b"id,weeks\n"
        (Path("labels") / NAMES[number]).write_bytes(text if number == 0 else gzip.compress(text))
    elif how == "column":
        path = Path("labels") / NAMES[number]
        text = path.read_bytes() if number == 0 else gzip.decompress(path.read_bytes())
        text = text.replace(b"id,weeks", b"key,weeks")
        path.write_bytes(text if number == 0 else gzip.compress(text))
    else:
        write(number, amounts, ids)


@pytest.mark.parametrize(
    ("number", "how", "reason"),
    [
        (0, "label", "of labels/part-0.csv: 2 of 120 labels lie outside --low 0 to --high 52"),
        (1, "label", "of labels/part-1.csv.gz: 2 of 10 labels lie outside --low 0 to --high 52"),
        (2, "label", "of labels/part-2.parquet: 2 of 170 labels lie outside"),
        (1, "missing label", "of labels/part-1.csv.gz has no label in 1 of 10 rows"),
        (2, "missing label", "of labels/part-2.parquet has no label in 1 of 170 rows"),
        (0, "missing id", "column 'id' of labels/part-0.csv has no id in 1 of 120 rows"),
        (2, "missing id", "column 'id' of labels/part-2.parquet has no id in 1 of 170 rows"),
        (1, "text", "of labels/part-1.csv.gz holds something that is not a number in row 5"),
        (0, "no rows", "the input labels/part-0.csv has no rows below its header line"),
        (2, "type of id", "column 'id' has type string in labels/part-0.csv, but int64 in labels/"),
        (1, "column", "labels/part-1.csv.gz has no column 'id' for --id; its columns are 'key'"),
    ],
)
def test_one_bad_file_of_many_publishes_nothing(
    folder: Path, capsys: pytest.CaptureFixture[str], number: int, how: str, reason: str
) -> None:
    spoil(number, how)
    before = contents(folder)
    assert randomize(more=("--store", "store")) == 2
    told = capsys.readouterr().err
    assert reason in told and "secret" not in told
    assert told.count("\n") == 1
    assert contents(folder) == before  # no output, and no store either: nothing was charged
    assert list(Path("public").iterdir()) == [] and not Path("store").exists()


# How many draws are on disk by then: of the histogram and of the noisy labels.
POINTS = {
    "before the vault": ("cli._tasks", "Task.vault", 1, 0),
    "between histogram and draw": ("vault.store", "LabelStore.append", 2, 1),
    "before the ids are kept": ("cli._randomize", "_keep_ids", 1, 2),
    "before the first file": ("cli._outputs", "Output._write_table", 1, 2),
    "between files": ("cli._outputs", "_sync", 2, 2),
    "before the statement": ("cli._outputs", "_sync", 4, 2),
    "before the name": ("cli._outputs", "give_name", 1, 2),
}


@pytest.mark.parametrize("point", POINTS)
def test_killed_and_resumed(
    folder: Path,
    point: str,
    killed: Callable[..., None],
    capsys: pytest.CaptureFixture[str],
) -> None:
    *place, draws = POINTS[point]
    options = ["--epsilon", "1", "--output", "public/noisy", "--store", "store", "--jobs", "1"]
    killed(*place, "randomize", "labels", *REGRESSION, *options)
    assert not Path("public/noisy").exists()
    assert len(list(Path("public").glob(".noisy.*"))) >= 1  # left behind by the kill
    stored = {path.name: path.read_bytes() for path in Path("store").glob("records/[0-9]*")}
    assert len(stored) == draws

    assert randomize(more=("--store", "store")) == 0
    assert ("what they cost is counted once" in capsys.readouterr().err) == (draws > 0)
    after = {path.name: path.read_bytes() for path in Path("store").glob("records/[0-9]*")}
    assert len(after) == 2 and stored.items() <= after.items()
    assert np.array_equal(values_in(), Ledger.of_store("store").records[1].values)
    assert statement_in()["guarantee"]["epsilon"] == 1.0
    vault = PrivateLabels(AMOUNTS, low=0, high=52, budget=PrivacyBudget(1.0), store="store")
    assert vault.guarantee().epsilon == 1.0
    assert [path.name for path in Path("public").iterdir()] == ["noisy"]
    # Once more: the same files, byte for byte.
    files = contents(folder / "public")
    assert randomize(more=("--store", "store", "--overwrite")) == 0
    assert contents(folder / "public") == files


@pytest.mark.parametrize("number", [0, 1, 2])
@pytest.mark.parametrize("what", ["ids", "labels", "rows"])
def test_a_file_that_changed_between_two_runs(
    folder: Path, capsys: pytest.CaptureFixture[str], number: int, what: str
) -> None:
    assert randomize(more=("--store", "store")) == 0
    low, high = BOUNDS[number], BOUNDS[number + 1]
    amounts, ids = AMOUNTS[low:high].copy(), [f"id{i}" for i in range(low, high)]
    if what == "ids":
        ids[0], ids[1] = ids[1], ids[0]
    elif what == "labels":
        amounts[0] = (amounts[0] + 1) % 53
    else:
        amounts, ids = amounts[1:], ids[1:]
    write(number, amounts, ids)
    before = contents(folder)
    capsys.readouterr()
    assert randomize(more=("--store", "store", "--overwrite")) == 2
    told = capsys.readouterr().err
    assert ("was made for other labels" if what == "labels" else "rows with other ids") in told
    if what != "labels":
        assert f"in '{NAMES[number]}'; give the input" in told
    assert told.count("\n") == 1 and contents(folder) == before


def test_other_files_than_at_the_first_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert randomize(more=("--store", "store")) == 0
    capsys.readouterr()
    assert randomize("labels/part-[01]*", more=("--store", "store", "--overwrite")) == 2
    assert "the store store holds noisy labels of rows with other ids" in capsys.readouterr().err


def test_an_output_folder_that_is_there(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("public/noisy").mkdir()
    assert randomize() == 0  # it was empty
    first = contents(folder)
    assert randomize() == 2
    assert "public/noisy exists; give another --output, or --overwrite" in capsys.readouterr().err
    assert contents(folder) == first
    assert randomize("labels/part-[01]*", more=("--overwrite",)) == 0
    assert {path.name for path in Path("public/noisy").iterdir()} == {*NAMES[:2], "privacy.json"}
    Path("public/noisy/mine.txt").write_text("mine")
    before = contents(folder)
    capsys.readouterr()
    for output in ("public/noisy", "labels"):
        assert randomize(output=output, more=("--overwrite",)) == 2
        assert "holds files that are not of an earlier run" in capsys.readouterr().err
    Path("file").write_text("mine")
    assert randomize(output="file", more=("--overwrite",)) == 2
    assert "--output file is a file; several inputs need a folder" in capsys.readouterr().err
    Path("file").unlink()
    assert contents(folder) == before


def test_a_failure_while_the_folder_is_written_leaves_the_old_one(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert randomize() == 0
    before = contents(folder)
    give_name, calls = _outputs.give_name, []

    def fail_once(source: Path, target: Path) -> None:
        calls.append(target)
        if len(calls) == 1:
            assert target == Path("public/noisy") and not target.exists()
            raise OSError(28, "No space left on device")
        give_name(source, target)

    monkeypatch.setattr(_outputs, "give_name", fail_once)
    assert randomize(more=("--overwrite",)) == 2
    assert "cannot write --output public/noisy (No space left" in capsys.readouterr().err
    assert contents(folder) == before


def test_a_thread_that_fails_leaves_nothing(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_table = _outputs.Output._write_table

    def fail(self: _outputs.Output, path: Path, *arguments: Any) -> None:
        assert threading.current_thread() is not threading.main_thread()
        if path.name == NAMES[1]:
            raise OSError(28, "No space left on device")
        write_table(self, path, *arguments)

    monkeypatch.setattr(_outputs.Output, "_write_table", fail)
    assert randomize() == 2
    assert "cannot write --output public/noisy (No space left" in capsys.readouterr().err
    assert list(Path("public").iterdir()) == []


@pytest.mark.parametrize(
    ("inputs", "output", "more", "reason"),
    [
        (("nothing-*.csv",), "public/n", (), "the input nothing-*.csv does not exist"),
        (("public",), "public/n", (), "the folder public has no file in it whose name ends in"),
        (("labels", "labels/part-0.csv"), "public/n", (), "have the same name, by which the files"),
        (("labels", "-"), "public/n", (), "is stdin, which can't be one of several files"),
        (("labels",), "no/n", (), "the folder of --output no/n does not exist; make no first"),
        (("labels",), "-", (), "--output - needs --statement FILE"),
        (("labels",), "public/n", ("--statement", "s"), "--statement is for --output -"),
        (("labels",), "-", ("--statement", "no/s"), "of --statement no/s does not exist"),
        (("labels",), "-", ("--statement", "labels/notes.txt"), "exists; give another --statement"),
        (("labels",), "public/n", ("--store", "public/n/s"), "lies in the folder of --output"),
        (("labels",), "labels/part-0.csv", ("--overwrite",), "is the input itself"),
        (("labels",), "public/n", ("--jobs", "0"), "must be a whole number of at least 1"),
    ],
)
def test_inputs_and_outputs_that_are_refused(
    folder: Path,
    capsys: pytest.CaptureFixture[str],
    inputs: tuple[str, ...],
    output: str,
    more: tuple[str, ...],
    reason: str,
) -> None:
    before = contents(folder)
    assert randomize(*inputs, output=output, more=more) == 2
    told = capsys.readouterr().err
    assert reason in told and told.count("\n") == 1
    assert contents(folder) == before


def test_a_store_may_lie_beside_the_folder() -> None:
    assert randomize(more=("--store", "public/store")) == 0


def from_stdin(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text.encode())))


@pytest.mark.parametrize("store", [(), ("--store", "store")])
def test_stdin_to_stdout(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], store: tuple[str, ...]
) -> None:
    text = "id,weeks\n" + "".join(f"id{i},{a}\n" for i, a in enumerate(AMOUNTS))
    from_stdin(monkeypatch, text)
    more = (*store, *SEEDED, "--statement", "public/rows.csv.privacy.json")
    assert randomize("-", output="-", more=more) == 0
    told = capsys.readouterr()
    assert "label-DP" in told.err and "wrote 300 rows to stdout and public/rows" in told.err
    Path("public/rows.csv").write_text(told.out)
    noisy = NoisyLabels.load("public/rows.csv")
    Path("labels.csv").write_text(text)
    assert randomize("labels.csv", output="public/n.csv", more=SEEDED) == 0
    assert Path("public/n.csv").read_text() == told.out and len(noisy) == N
    if store:  # a run that was stopped while it wrote goes on with its draws
        from_stdin(monkeypatch, text)
        capsys.readouterr()
        assert randomize("-", output="-", more=(*more, "--overwrite")) == 0
        assert capsys.readouterr().out == told.out


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "the input stdin is empty"),
        ("id,weeks\na,99\n", "column 'weeks' of stdin: 1 of 1 labels lie outside"),
        ("id,weeks\na,1\nb,-secret-\n", "of stdin holds something that is not a number in row 3"),
    ],
)
def test_bad_stdin(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    text: str,
    reason: str,
) -> None:
    from_stdin(monkeypatch, text)
    before = contents(folder)
    assert randomize("-", output="-", more=("--statement", "public/s.json")) == 2
    told = capsys.readouterr()
    assert reason in told.err and "secret" not in told.err and told.out == ""
    assert contents(folder) == before


def test_a_pipe_between_processes() -> None:
    """Nothing but rows goes to stdout; what cannot be written there is an error."""
    Path("labels.csv").write_text("id,weeks\n" + "".join(f"id{i},7\n" for i in range(50)))
    program = f'"{sys.executable}" -m tf_labeldp.cli randomize - {" ".join(REGRESSION)}'
    start = f"{program} --epsilon 1 --output - --statement public/s.json --overwrite < labels.csv"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    for end, code in (("", 0), (" > /dev/full", 2)):
        done = subprocess.run(
            ["bash", "-c", start + end],
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == code, done.stderr
        if code:
            assert "cannot write --output - (No space left on device)" in done.stderr
            assert done.stderr.count("rror") == 1
        else:
            assert len(done.stdout.splitlines()) == 51 and "label-DP" not in done.stdout


def test_stopped_by_the_system_leaves_nothing(
    folder: Path, in_process: Callable[..., tuple[int, str]]
) -> None:
    program = """
import os, signal, sys
from tf_labeldp.cli import _outputs, main
write_table = _outputs.Output._write_table
def stopped(*arguments):
    os.kill(os.getpid(), signal.SIGTERM)
    write_table(*arguments)
_outputs.Output._write_table = stopped
sys.exit(main(sys.argv[1:]))
"""
    options = ["--epsilon", "1", "--output", "public/noisy"]
    code, told = in_process(program, "randomize", "labels", *REGRESSION, *options)
    assert code == 128 + signal.SIGTERM, told
    assert list((folder / "public").iterdir()) == []
