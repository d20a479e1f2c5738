"""Bad input to `tf-labeldp randomize`: exit code 2, a reason in one line, no label, no output."""

from __future__ import annotations

import gzip
import os
import re
import resource
from pathlib import Path

import pyarrow as pa
import pytest
from pyarrow import parquet

from tf_labeldp.cli import main

SECRET = "31.4159"
REGRESSION = ("--column", "y", "--task", "regression", "--low", "0", "--high", "100")
CLASSES = ("--column", "y", "--task", "classification", "--num-classes", "3")
COMMON = ("--epsilon", "1", "--output", "noisy.csv", "--quiet")
GOOD = f"id,y\na,1\nb,{SECRET}\nc,2\n"


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path / "here"


@pytest.fixture
def refused(folder, capsys):
    """Runs a command that must fail without a trace on the disk, and returns the reason."""

    def run(*options, source="labels.csv"):
        before = contents(folder)
        assert main(["randomize", source, *COMMON, *options]) == 2
        captured = capsys.readouterr()
        assert captured.out == ""
        assert captured.err.startswith("tf-labeldp randomize: error: ")
        assert captured.err.count("\n") == 1 and captured.err.endswith("\n")
        assert SECRET not in captured.err
        assert contents(folder) == before
        return captured.err.strip().partition("error: ")[2]

    return run


def contents(folder):
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def write(content, name="labels.csv"):
    Path(name).write_bytes(content.encode() if isinstance(content, str) else content)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "the input labels.csv is empty; give a CSV file with a header line"),
        ("\n\n", "has no rows below its header line"),
        ("id,y", "has no rows below its header line; give a table with rows"),
        (f"id,{SECRET}\na,1\n", "has no column 'y' for --column; check its header line"),
        ("id,y,y\na,1,1\n", "has more than one column 'y' for --column"),
        ("ID,row_id,y\na,b,1\n", "look like row ids, 'ID', 'row_id'; choose with --id"),
        (
            f"id,y\na,1\nb,{SECRET}x\n",
            "column 'y' of labels.csv has a cell that is not a number in row 3 (the header is "
            "row 1); repair the column",
        ),
        (f'id,y\na,"{SECRET},0"\n', "not a number in row 2"),
        ("id,y\na,\nb,1\nc,NA\nd,null\n", "3 of 4 labels are missing; fill them by a rule that"),
        ("y\n1\n\n2\n", "1 of 3 labels are missing"),
        (
            "id,y\na,nan\nb,1\nc,inf\nd,-Infinity\ne,1e999\n",
            "4 of 5 labels are NaN or infinite; fill them by a rule that does not look at labels",
        ),
        (
            f"id,y\na,-1\nb,100.5\nc,{SECRET}\n",
            "2 of 3 labels lie outside --low 0 to --high 100; widen the range, or give --clip",
        ),
        (
            f"id,y\na,1\nb,{SECRET},7\n",
            "has 3 cells in row 3 (the header is row 1), but 2 columns; repair that row",
        ),
        (f'id,y\n"a,{SECRET}\nb,2\n', "but 2 columns; repair that row"),
        (b"id,y\n\x81,1\n", "the input labels.csv is not UTF-8 text"),  # nor Latin-1
        (b"id,y\n\xff\0,1\n", "the input labels.csv is not UTF-8 text"),
        ("id,y\na,1\n".encode("utf-16"), "save UTF-16, as of Excel"),
        (gzip.compress(b"id,y\na,1\n", mtime=0), "name a gzip archive .csv.gz"),
        (f'id,y\n"{"x" * (50 << 20)},{SECRET}\n', "has a row longer than 16 MB; look for a quote"),
    ],
    ids=lambda value: None if len(value) > 99 else value,
)
def test_bad_csv(refused, text, reason):
    write(text)
    assert reason in refused(*REGRESSION)


@pytest.mark.parametrize(
    ("text", "remark"),
    [
        ("id;y\na;1,5\nb;31,4159\n", "cells between semicolons, and numbers have a decimal"),
        ("id;y\na;1.5\nb;31.4159\n", "has its cells between semicolons\n"),
        ("id\ty\na\t1.5\nb\t31.4159\n", "has its cells between tabs"),
        ("id,y\né,1.5\nb,31.4159\n".encode("cp1252"), "read as Latin-1 (Windows-1252)"),
        ("né,y\na,1.5\n€,31.4159\n".encode("cp1252"), "read as Latin-1 (Windows-1252)"),
    ],
)
def test_forms_of_csv_that_are_found(capsys, text, remark):
    """As Excel writes it in many countries; the remark quotes no cell."""
    write(text)
    header = (text if isinstance(text, str) else text.decode("cp1252")).splitlines()[0]
    name = re.split("[;,\t]", header)[0]
    assert main(["randomize", "labels.csv", *REGRESSION, *COMMON[:-1], "--id", name]) == 0
    shown = capsys.readouterr().err
    assert remark in shown and SECRET not in shown and "31,4159" not in shown
    first = Path("noisy.csv").read_text(encoding="utf-8").splitlines()
    assert first[0] == f"{name},y" and first[1].split(",")[0] in ("a", "é")


@pytest.mark.parametrize(
    ("content", "options", "reason"),
    [
        ({"y": [SECRET]}, REGRESSION, "column 'y' of t.parquet has type string, expected a number"),
        ({"y": [True]}, CLASSES, "has type bool, expected a whole number"),
        ({"y": [1.0]}, CLASSES, "has type double, expected a whole number; classes are numbered"),
        ({"y": [1.5, None, None]}, REGRESSION, "2 of 3 labels are missing"),
        ({"y": [float("nan"), 1.0]}, REGRESSION, "1 of 2 labels is NaN or infinite"),
        ({"y": pa.array([2**64 - 1, 1], pa.uint64())}, CLASSES, "1 of 2 labels is not in 0..2"),
        ({"y": pa.array([], pa.float64())}, REGRESSION, "has no rows below its header line"),
        ({"x": [1.0]}, REGRESSION, "has no column 'y' for --column"),
        ({"id": [[1]], "y": [1.0]}, REGRESSION, "an id column has a type or value that"),
        ({"id": [b"\xff"], "y": [1.0]}, REGRESSION, "name other columns with --id"),
        (
            {"id": pa.array([1], pa.duration("s")), "y": [1]},
            (*CLASSES, "--store", "../store"),  # refused before the draw
            "or give a .parquet --output",
        ),
    ],
)
def test_bad_parquet(refused, content, options, reason):
    parquet.write_table(pa.table(content), "t.parquet")
    assert reason in refused(*options, source="t.parquet")
    assert not Path("../store").exists()


@pytest.mark.parametrize("part", ["start", "middle", "end", "nothing", "other"])
def test_damaged_files(refused, part):
    parquet.write_table(pa.table({"y": [1.0 + i % 70 for i in range(5000)]}), "t.parquet")
    packed = gzip.compress(b"id,y\n" + b"".join(b"%d,%d\n" % (i, i) for i in range(99)))
    for name, data in (("t.parquet", Path("t.parquet").read_bytes()), ("t.csv.gz", packed)):
        middle = len(data) // 4
        damaged = {
            "start": data[100:],
            "middle": data[:middle] + bytes(len(data) - 2 * middle) + data[-middle:],
            "end": data[:-9],
            "nothing": b"",
            "other": GOOD.encode(),
        }[part]
        write(damaged, name)
        reason = refused(*REGRESSION, source=name)
        is_empty = name.endswith("gz") and part == "nothing"
        assert f"the input {name} {'is empty' if is_empty else 'cannot be read'}" in reason


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("missing.csv", "the input missing.csv does not exist; check the path"),
        ("t.tsv", "the format of the input t.tsv is not known by its name; name it .csv, .csv.gz"),
        ("folder.csv", "the folder folder.csv has no file in it whose name ends in .csv, .csv.gz"),
        ("pipe.csv", "pipe.csv is not a regular file, and it is read twice"),
    ],
)
def test_inputs_that_are_no_tables(refused, source, reason):
    Path("folder.csv").mkdir()
    os.mkfifo("pipe.csv")
    write(GOOD, "t.tsv")
    assert reason in refused(*REGRESSION, source=source)


NEEDED = ("--column", "--task", "--epsilon", "--output", "--low")


@pytest.mark.parametrize("missing", NEEDED)
def test_needed_options(missing, capsys):
    write(GOOD)
    values = ("y", "regression", "1", "noisy.csv", "0")
    words = [text for pair in zip(NEEDED, values, strict=True) if pair[0] != missing
             for text in pair]  # fmt: skip
    assert main(["randomize", "labels.csv", "--high", "100", *words]) == 2
    required = "--num-classes --classes --low is required"
    reason = required if missing == "--low" else f"arguments are required: {missing}"
    assert reason in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (("--output", "noisy.txt"), "the format of --output noisy.txt is not known by its name"),
        (("--output", "no/noisy.csv"), "does not exist; make no first"),
        (("--output", "labels.csv", "--overwrite"), "--output labels.csv is the input itself"),
        (("--output", "link.csv", "--overwrite"), "is the input itself"),
        (("--output", "taken.csv"), "taken.csv exists; give another --output, or --overwrite"),
        (("--output", "half.csv"), "half.csv.privacy.json exists"),
        (("--output", "deep.csv"), "deep.csv.privacy.json exists"),
        (("--output", "folder.csv", "--overwrite"), "folder.csv is a folder"),
        (("--id", "z"), "has no column 'z' for --id"),
        (("--id", "y"), "--id 'y' is the label column; copying it would publish the labels"),
        (("--output-column", "id"), "would have the name of the id column, 'id'"),
        (("--store", "../taken.txt"), "taken.txt exists and is not a label store"),
        (("--store", "../taken.txt/store"), "the store ../taken.txt/store cannot be used"),
        (("--insecure-seed", "-1"), "must be a whole number, at least 0"),
        (("--low", "nan"), "--low: must be a finite number, got 'nan'"),
        (("--low", "100"), "expected --low LOW and --high HIGH, with LOW below HIGH"),
        (("--low", "-1", "--loss", "poisson"), "--loss poisson needs labels of zero or more"),
        (("--prior-epsilon", "1"), "prior_epsilon=1 leaves nothing of epsilon=1"),
        (("--max-values", "1"), "must be a whole number, at least 2"),
        (("--num-classes", "3"), "--num-classes: not allowed with argument --low"),
        (("--mechanism", "laplace", "--loss", "poisson"), "--loss is for --mechanism rr_on_bins"),
        (("--mechanism", "laplace", "--prior", "p.json"), "--prior is for --mechanism rr_on_bins"),
        (("--prior", "p.json", "--prior-epsilon", "0.5"), "--prior-epsilon is for runs without"),
        (("--mechanism", "discrete_laplace", "--high", "9.5"), "high must be a whole number"),
        (("--task", "classification"), "--task regression goes with --low and --high"),
        (("--draws", "keyed"), "needs --store DIR"),
        (("--draws", "keyed", "--insecure-seed", "1"), "--insecure-seed is for --draws stored"),
        (
            ("--draws", "keyed", "--store", "../s", "--mechanism", "laplace"),
            "--mechanism is for --draws stored",
        ),
        (
            ("--draws", "keyed", "--store", "../s", "--id", "id", "--id", "x"),
            "takes one --id, got 2",
        ),
    ],
)
def test_bad_options(refused, options, reason):
    for name in ("taken.csv", "../taken.txt", "half.csv.privacy.json"):
        write("mine", name)
    write("[" * 100_000, "deep.csv.privacy.json")
    write(GOOD)
    Path("folder.csv").mkdir()
    Path("link.csv").hardlink_to("labels.csv")
    assert reason in refused(*REGRESSION, *options)


@pytest.mark.parametrize(
    ("labels", "options", "reason"),
    [
        ("1 2", "", "one of the arguments --num-classes --classes --low is required"),
        ("1 2", "--num-classes 2 --classes 0 1", "not allowed with argument"),
        ("1 2", "--num-classes 1", "must be a whole number, at least 2"),
        ("1 2", f"--num-classes 1{'0' * 30}", "and at most 1,000,000,000"),
        ("1 2", "--classes a b a", "got 2 distinct of 3"),
        ("1 2", "--num-classes 2 --loss poisson", "--loss is for labels that are numbers"),
        ("1 2", "--num-classes 2 --output-column id", "the name of the id column, 'id'"),
        ("1 2", "--num-classes 4 --draws keyed --store ../s", "1 ids name more than one row"),
        ("0 1.0 2", "--num-classes 3", "has a cell that is not a whole number in row 3"),
        (f"0 {'9' * 30}", "--num-classes 3", "not a whole number in row 3"),
        ("0 -1 3", "--num-classes 3", "2 of 3 labels are not in 0..2; raise --num-classes"),
        ("0 NULL NA", "--num-classes 3", "2 of 3 labels are missing"),
        (f"yes {SECRET} Yes", "--classes yes no", "2 of 3 labels are none of the 2 --classes"),
    ],
)
def test_bad_classes(refused, labels, options, reason):
    write("id,y\n" + "".join(f"{SECRET},{label}\n" for label in labels.split()))
    words = ("--column", "y", "--task", "classification", *options.split())
    assert reason in refused(*words)


MALFORMED = "has another form; give JSON {"


@pytest.mark.parametrize(
    ("options", "name", "text", "reason"),
    [
        (REGRESSION, "p.json", None, "--prior p.json cannot be read (No such file or directory)"),
        *(
            (REGRESSION, name, text, reason)
            for name, text, reason in (
                ("p.json", "{", MALFORMED),
                ("p.json", b"\xff", MALFORMED),
                ("p.json", "3", MALFORMED),
                ("p.json", "[" * 100_000, MALFORMED),
                ("p.json", "[0.5, 0.5]", MALFORMED),
                ("p.json", '{"values": [1, 2], "probabilities": [1]}', "must have shape (2,)"),
                ("p.json", '{"values": [1, "x"], "probabilities": [0.5, 0.5]}', MALFORMED),
                (
                    "p.json",
                    '{"values": [1, NaN], "probabilities": [0.5, 0.5]}',
                    "1 of 4 values are",
                ),
                ("p.json", '{"values": [1, 1], "probabilities": [0.5, 0.5]}', "increasing"),
                ("p.json", '{"values": [1, 200], "probabilities": [0.5, 0.5]}', "1 values outside"),
                ("p.json", '{"values": [1, 2], "probabilities": [0.5, 0.6]}', "row 0 sums to 1.1"),
                ("p.json", '{"values": [1, 2], "probabilities": [1.5, -0.5]}', "be negative"),
                ("p.csv", "value,probability\n1,1\n", MALFORMED),
            )
        ),
        (CLASSES, "p.json", "[0.5, 0.5]", "must have shape (3,)"),
        (CLASSES, "p.json", '{"probabilities": 1}', "must have shape (3,)"),
    ],
    ids=lambda value: None if value is None or len(value) > 99 else value,
)
def test_bad_priors(refused, options, name, text, reason):
    write("y\n0\n1\n2\n")
    if text is not None:
        write(text, name)
    assert reason in refused(*options, "--prior", name)


@pytest.mark.parametrize("output", ["noisy.csv", "noisy.csv.gz", "noisy.parquet"])
def test_a_full_disk(folder, output, capsys):
    """No file may grow past 20,000 bytes; an earlier output stays."""
    write("id,y\n" + "".join(f"{os.urandom(8).hex()},1\n" for _ in range(20_000)))
    Path(output).write_text("before")
    before = contents(folder)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))
    try:
        words = [*REGRESSION, *COMMON, "--output", output, "--overwrite"]
        code = main(["randomize", "labels.csv", *words])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert code == 2
    shown = capsys.readouterr().err
    assert f"cannot write --output {output} (File too large)" in shown and shown.count("\n") == 1
    assert contents(folder) == before


@pytest.mark.parametrize("name", ["mkdir", "stat"])
def test_a_folder_that_may_not_be_written(refused, monkeypatch, name):
    write(GOOD)
    function = getattr(os, name)

    def forbidden(path, *arguments, **options):
        if str(path).startswith(("closed", ".noisy")):  # as for others than root
            raise PermissionError(13, "Permission denied")
        return function(path, *arguments, **options)

    output = "closed/n.csv" if name == "stat" else "noisy.csv"
    monkeypatch.setattr(os, name, forbidden)
    reason = refused(*REGRESSION, "--output", output)
    assert f"cannot write --output {output} (Permission denied)" in reason
