"""Bad input to `tf-labeldp randomize`: exit code 2, one line that says why, no label, no output."""

from __future__ import annotations

import gzip
import json
import os
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import parquet

from tf_labeldp.cli import _randomize, _tables, main

ROOT = Path(__file__).parents[2]
SECRET = "31.4159"
REGRESSION = ("--column", "y", "--task", "regression", "--low", "0", "--high", "100")
CLASSES = ("--column", "y", "--task", "classification", "--num-classes", "3")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path / "here"


@pytest.fixture
def refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Runs a command that must be refused, and gives the reason; nothing may change on disk."""

    def run(*options: str, source: str = "labels.csv") -> str:
        before = contents(folder)
        arguments = [
            "randomize",
            source,
            "--epsilon",
            "1",
            "--output",
            "noisy.csv",
            "--quiet",
            *options,
        ]
        assert main(arguments) == 2
        captured = capsys.readouterr()
        assert captured.out == ""
        assert captured.err.startswith("tf-labeldp")
        assert captured.err.count("\n") == 1 and captured.err.endswith("\n")
        assert SECRET not in captured.err
        assert contents(folder) == before
        return captured.err.strip().partition("error: ")[2]

    return run


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def labels(text: str | bytes, name: str = "labels.csv") -> None:
    Path(name).write_bytes(text.encode() if isinstance(text, str) else text)


MALFORMED = 'is not as expected; give JSON {"values": [...]'
GOOD = f"id,y\na,1\nb,{SECRET}\nc,2\n"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "the input labels.csv is empty; give a CSV file with a header line"),
        ("\n\n", "has no rows below its header line"),
        ("id,y", "has no rows below its header line; there is nothing to randomize"),
        ("id,y\n", "has no rows below its header line"),
        ("id,x\na,1\n", "has no column 'y' for --column; its columns are 'id', 'x'"),
        ("id,y,y\na,1,1\n", "has more than one column 'y' for --column"),
        ("id;y\na;1\n", "has no column 'y' for --column; its columns are 'id;y'"),
        (
            f"id,y\na,1\nb,{SECRET}x\n",
            "column 'y' of labels.csv holds something that is not a number in row 3 (the header is "
            "row 1); repair the column",
        ),
        (f"id,y\na,'{SECRET}'\n", "not a number in row 2"),
        (f'id,y\na,"{SECRET},0"\n', "not a number in row 2"),
        ("id,y\na,\nb,1\nc,NA\nd,null\n", "column 'y' of labels.csv has no label in 3 of 4 rows"),
        ("y\n1\n\n2\n\n", "has no label in 1 of 3 rows"),
        ("id,y\na,nan\nb,1\nc,inf\nd,-Infinity\ne,1e999\n", "4 of 5 labels are NaN or infinite"),
        (
            f"id,y\na,-1\nb,100.5\nc,{SECRET}\n",
            "2 of 3 labels lie outside --low 0 to --high 100; widen the range, or give --clip",
        ),
        (
            f"id,y\na,1\nb,{SECRET},7\n",
            "has 3 cells in row 3 (the header is row 1), but 2 columns; repair that row",
        ),
        (f"id,y\na,1\n{SECRET}\n", "has 1 cells in row 3 (the header is row 1), but 2 columns"),
        (f'id,y\n"a,{SECRET}\nb,2\n', "but 2 columns; repair that row"),
        (b"id,y\n\xff,1\n", "the input labels.csv is not UTF-8 text in row 2"),
        (b"\xff\xfey,id\n1,2\n", "labels.csv is not UTF-8 text"),
        (b"id,y\na,1\x00\n", "not a number in row 2"),
    ],
)
def test_bad_csv(refused: Callable[..., str], text: str | bytes, reason: str) -> None:
    labels(text)
    assert reason in refused(*REGRESSION)


@pytest.mark.parametrize(
    ("cells", "reason"),
    [
        (("0", "1.0", "2"), "holds something that is not a whole number in row 3"),
        (("0", "yes", "2"), "not a whole number in row 3"),
        (("0", "9" * 30, "2"), "not a whole number in row 3"),
        (("0", "-1", "3"), "2 of 3 labels are not in 0..2; raise --num-classes"),
        (("0", "", "NULL"), "has no label in 2 of 3 rows"),
    ],
)
def test_bad_classes(refused: Callable[..., str], cells: tuple[str, ...], reason: str) -> None:
    labels("id,y\n" + "".join(f"{SECRET},{cell}\n" for cell in cells))
    assert reason in refused(*CLASSES)


def test_unknown_class_names(refused: Callable[..., str]) -> None:
    labels(f"y\nyes\n{SECRET}\nYes\n\n\n")
    options = ("--column", "y", "--task", "classification", "--classes", "yes", "no")
    assert "3 of 4 labels are none of the 2 --classes" in refused(*options)


@pytest.mark.parametrize(
    ("content", "options", "reason"),
    [
        ({"y": [SECRET]}, REGRESSION, "column 'y' of t.parquet has type string, expected a number"),
        ({"y": [True]}, CLASSES, "has type bool, expected a whole number"),
        ({"y": [1.0]}, CLASSES, "has type double, expected a whole number; classes are numbered"),
        ({"y": [[1.0]]}, REGRESSION, "has type list"),
        ({"y": [1.5, None, None]}, REGRESSION, "has no label in 2 of 3 rows"),
        ({"y": [float("nan"), 1.0]}, REGRESSION, "1 of 2 labels are NaN or infinite"),
        ({"y": pa.array([2**64 - 1, 1], pa.uint64())}, CLASSES, "1 of 2 labels are not in 0..2"),
        ({"y": pa.array([], pa.float64())}, REGRESSION, "has no rows below its header line"),
        ({"x": [1.0]}, REGRESSION, "has no column 'y' for --column; its columns are 'x'"),
        ({"id": [[1]], "y": [1.0]}, REGRESSION, "an id column holds something that"),
        ({"id": [b"\xff"], "y": [1.0]}, REGRESSION, "name other columns with --id"),
    ],
)
def test_bad_parquet(
    refused: Callable[..., str], content: dict, options: tuple[str, ...], reason: str
) -> None:
    parquet.write_table(pa.table(content), "t.parquet")
    assert reason in refused(*options, source="t.parquet")


@pytest.mark.parametrize("part", ["start", "middle", "end", "nothing", "other"])
def test_damaged_parquet(refused: Callable[..., str], part: str) -> None:
    parquet.write_table(pa.table({"y": [1.0 + i % 70 for i in range(5000)]}), "t.parquet")
    data = Path("t.parquet").read_bytes()
    middle = len(data) // 4
    damaged = {
        "start": data[100:],
        "middle": data[:middle] + bytes(len(data) - 2 * middle) + data[-middle:],
        "end": data[:-20],
        "nothing": b"",
        "other": GOOD.encode(),
    }[part]
    labels(damaged, "t.parquet")
    assert "the input t.parquet cannot be read" in refused(*REGRESSION, source="t.parquet")


@pytest.mark.parametrize("part", ["not gzip", "cut", "changed"])
def test_damaged_gzip(refused: Callable[..., str], part: str) -> None:
    packed = gzip.compress(b"id,y\n" + b"".join(b"%d,%d\n" % (i, i) for i in range(99)))
    labels(
        {"not gzip": GOOD.encode(), "cut": packed[:-9], "changed": packed[:-8] + bytes(8)}[part],
        "t.csv.gz",
    )
    assert "the input t.csv.gz cannot be read" in refused(*REGRESSION, source="t.csv.gz")


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("missing.csv", "the input missing.csv does not exist; check the path"),
        ("t.tsv", "the format of the input t.tsv is not known by its name; name it .csv, .csv.gz"),
        ("folder.csv", "the folder folder.csv has no file in it whose name ends in .csv, .csv.gz"),
        ("pipe.csv", "is not a regular file, which it must be to be read twice"),
    ],
)
def test_inputs_that_are_no_tables(refused: Callable[..., str], source: str, reason: str) -> None:
    Path("folder.csv").mkdir()
    os.mkfifo("pipe.csv")
    labels(GOOD, "t.tsv")
    assert reason in refused(*REGRESSION, source=source)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (("--output", "noisy.txt"), "the format of --output noisy.txt is not known by its name"),
        (("--output", "no/noisy.csv"), "does not exist; make no first"),
        (("--output", "labels.csv"), "--output labels.csv is the input itself"),
        (("--output", "./labels.csv", "--overwrite"), "is the input itself"),
        (("--output", "link.csv", "--overwrite"), "is the input itself"),
        (("--output", "taken.csv"), "taken.csv exists; give another --output, or --overwrite"),
        (("--output", "half.csv"), "half.csv.privacy.json exists"),
        (("--output", "folder.csv", "--overwrite"), "folder.csv is a folder"),
        (("--id", "z"), "has no column 'z' for --id; its columns are 'id', 'y'"),
        (("--id", "y"), "--id 'y' is the label column; copying it would publish the labels"),
        (("--id", "id", "--id", "id"), "--id names a column more than once"),
        (("--output-column", "id"), "would have the name of the id column, 'id'"),
        (("--store", "../taken.txt"), "taken.txt exists and is not a label store"),
        (("--store", "../taken.txt/store"), "the store ../taken.txt/store cannot be used"),
        (("--epsilon", "0"), "epsilon must be a finite number above zero, got '0'"),
        (("--epsilon", "inf"), "epsilon must be a finite number above zero"),
        (("--insecure-seed", "-1"), "must be a whole number of at least 0"),
        (("--low", "nan"), "--low: must be a finite number, got 'nan'"),
        (("--low", "100"), "--low must be below --high, got --low 100 --high 100"),
        (("--low", "-1", "--loss", "poisson"), "--loss poisson needs labels of zero or more"),
        (("--loss", "huber"), "--loss: invalid choice"),
        (("--task", "ranking"), "--task: invalid choice"),
        (("--prior-epsilon", "1"), "prior_epsilon=1 leaves nothing of epsilon=1"),
        (("--prior-epsilon", "0"), "epsilon must be a finite number above zero"),
        (("--max-values", "1"), "must be a whole number of at least 2"),
        (("--num-classes", "3"), "--num-classes is for --task classification; leave it out"),
        (("--classes", "a", "b"), "--classes is for --task classification"),
        (("--mechanism", "laplace", "--loss", "poisson"), "--loss is for --mechanism rr_on_bins"),
        (("--mechanism", "laplace", "--prior", "p.json"), "--prior is for --mechanism rr_on_bins"),
        (("--prior", "p.json", "--prior-epsilon", "0.5"), "--prior-epsilon is for runs without"),
        (("--mechanism", "discrete_laplace", "--high", "9.5"), "high must be a whole number"),
        (("--task", "classification"), "--low is for --task regression; leave it out"),
    ],
)
def test_bad_options(refused: Callable[..., str], options: tuple[str, ...], reason: str) -> None:
    labels(GOOD)
    Path("taken.csv").write_text("mine")
    Path("../taken.txt").write_text("mine")
    Path("half.csv.privacy.json").write_text("mine")
    Path("folder.csv").mkdir()
    Path("link.csv").hardlink_to("labels.csv")
    assert reason in refused(*REGRESSION, *options)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ((), "needs either --num-classes K, for labels 0..K-1, or --classes"),
        (("--num-classes", "2", "--classes", "0", "1"), "got both"),
        (("--num-classes", "1"), "must be a whole number of at least 2"),
        (("--classes", "a"), "--classes must name at least two classes, each once, got 1"),
        (("--classes", "a", "b", "a"), "got 3 names of which 2 differ"),
        (("--num-classes", "2", "--clip"), "--clip is for --task regression"),
        (("--num-classes", "2", "--loss", "poisson"), "--loss is for --task regression"),
        (("--num-classes", "2", "--mechanism", "laplace"), "--mechanism is for --task regression"),
    ],
)
def test_bad_options_of_classification(
    refused: Callable[..., str], options: tuple[str, ...], reason: str
) -> None:
    labels(GOOD)
    assert reason in refused("--column", "y", "--task", "classification", *options)


@pytest.mark.parametrize("missing", ["--low", "--high"])
def test_a_range_is_needed(refused: Callable[..., str], missing: str) -> None:
    labels(GOOD)
    place = REGRESSION.index(missing)
    options = REGRESSION[:place] + REGRESSION[place + 2 :]
    assert f"--task regression needs {missing}, an end of the public range" in refused(*options)


@pytest.mark.parametrize("missing", ["--column", "--task", "--epsilon", "--output"])
def test_needed_options(missing: str, capsys: pytest.CaptureFixture[str]) -> None:
    given = {"--column": "y", "--task": "regression", "--epsilon": "1", "--output": "n.csv"}
    options = [text for name, value in given.items() if name != missing for text in (name, value)]
    assert main(["randomize", "labels.csv", *options]) == 2
    assert f"the following arguments are required: {missing}" in capsys.readouterr().err


def test_several_columns_look_like_ids(refused: Callable[..., str]) -> None:
    labels("ID,row_id,y\na,b,1\n")
    assert "look like row ids, 'ID', 'row_id'; choose with --id" in refused(*REGRESSION)


def test_labels_named_like_the_row_number(refused: Callable[..., str]) -> None:
    labels("row\n1\n")
    options = ("--column", "row", *REGRESSION[2:])
    assert "give another --output-column" in refused(*options)


def test_long_lists_of_columns_are_cut(refused: Callable[..., str]) -> None:
    labels(",".join(f"x{i}" for i in range(500)) + "\n" + ",".join("1" * 500) + "\n")
    reason = refused(*REGRESSION)
    assert reason.endswith("'x18', 'x19' and 480 more")


@pytest.mark.parametrize(
    ("name", "text", "reason"),
    [
        ("p.json", None, "--prior p.json cannot be read (No such file or directory)"),
        ("p.txt", "{}", MALFORMED),
        ("p.json", "{", MALFORMED),
        ("p.json", b"\xff", MALFORMED),
        ("p.json", "3", MALFORMED),
        ("p.json", '{"values": [1]}', MALFORMED),
        ("p.json", "[0.5, 0.5]", MALFORMED),
        ("p.json", '{"values": [1, 2], "probabilities": [1]}', MALFORMED),
        ("p.json", '{"values": [1, "x"], "probabilities": [0.5, 0.5]}', MALFORMED),
        ("p.json", '{"values": [1, NaN], "probabilities": [0.5, 0.5]}', "values must be finite"),
        ("p.json", '{"values": [1, 2], "probabilities": [0.5, NaN]}', "must be finite"),
        ("p.json", '{"values": [1, 2], "probabilities": [0.5, true]}', "row 0 sums to 1.5"),
        ("p.json", '{"values": [1, 1], "probabilities": [0.5, 0.5]}', "strictly increasing"),
        ("p.json", '{"values": [1, 200], "probabilities": [0.5, 0.5]}', "1 values outside --low"),
        ("p.json", '{"values": [1, 2], "probabilities": [0.5, 0.6]}', "row 0 sums to 1.1"),
        ("p.json", '{"values": [1, 2], "probabilities": [1.5, -0.5]}', "must not be negative"),
        ("p.csv", "value,probability\n", MALFORMED),
        ("p.csv", "value,probability\n1,0.5,2\n", MALFORMED),
        ("p.csv", "value,probability\n1,x\n", MALFORMED),
    ],
)
def test_bad_priors_for_regression(
    refused: Callable[..., str], name: str, text: str | bytes | None, reason: str
) -> None:
    labels(GOOD)
    if text is not None:
        labels(text, name)
    assert reason in refused(*REGRESSION, "--prior", name)


@pytest.mark.parametrize(
    ("name", "text", "reason"),
    [
        ("p.json", "[0.5, 0.5]", "must have shape (3,)"),
        ("p.json", "[0.5, 0.5, 0.5]", "row 0 sums to 1.5"),
        ("p.json", '{"probabilities": 1}', "is not as expected; give JSON"),
        ("p.csv", "class,probability\n0,1\n1,0\n3,0\n", "3 rows for 2 of the 3"),
        ("p.csv", "class,probability\n0,1\n1,0\n1,0\n2,0\n", "4 rows for 3 of the 3"),
    ],
)
def test_bad_priors_for_classification(
    refused: Callable[..., str], name: str, text: str, reason: str
) -> None:
    labels("y\n0\n1\n2\n")
    labels(text, name)
    assert reason in refused(*CLASSES, "--prior", name)


@pytest.mark.parametrize("change", ["a row more", "a row less", "another label"])
@pytest.mark.parametrize("name", ["labels.csv", "t.parquet"])
def test_an_input_that_changes_meanwhile(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    name: str,
    change: str,
) -> None:
    def make(ids: str) -> None:
        if name == "labels.csv":
            labels("id,y\n" + "".join(f"{i},1\n" for i in ids))
        else:
            parquet.write_table(pa.table({"id": list(ids), "y": [1.0] * len(ids)}), name)

    make("abc")
    read = _tables.CsvTable._read if name == "labels.csv" else _tables.ParquetTable._read

    def read_and_change(self: _tables.Table, *arguments: Any) -> object:
        found = read(self, *arguments)
        make({"a row more": "abcd", "a row less": "ab", "another label": "abx"}[change])
        return found

    for kind in (_tables.CsvTable, _tables.ParquetTable):
        monkeypatch.setattr(kind, "_read", read_and_change)
    assert main(["randomize", name, *REGRESSION, "--epsilon", "1", "--output", "n.csv"]) == 2
    assert f"the input {name} changed while it was read" in capsys.readouterr().err
    assert sorted(path.name for path in folder.iterdir()) == [name]


def test_an_output_that_comes_into_being_meanwhile(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    labels(GOOD)
    statement = _randomize._statement

    def late(*arguments: object) -> str:
        Path("n.csv").write_text("another's")
        return statement(*arguments)

    monkeypatch.setattr(_randomize, "_statement", late)
    assert (
        main(["randomize", "labels.csv", *REGRESSION, "--epsilon", "1", "--output", "n.csv"]) == 2
    )
    assert "n.csv has come into being meanwhile" in capsys.readouterr().err
    assert sorted(path.name for path in folder.iterdir()) == ["labels.csv", "n.csv"]
    assert Path("n.csv").read_text() == "another's"


def test_a_row_longer_than_a_block(
    refused: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_tables, "_BLOCK_BYTES", 1 << 20)
    labels(f'id,y\n"{"x" * (3 << 20)},{SECRET}\n')
    assert "has a row longer than 16 MB; look for a quote" in refused(*REGRESSION)


@pytest.mark.parametrize("output", ["noisy.csv", "noisy.csv.gz", "noisy.parquet"])
def test_a_full_disk(folder: Path, output: str, capsys: pytest.CaptureFixture[str]) -> None:
    """No file may grow past 20,000 bytes; what was there before stays as it was."""
    labels("id,y\n" + "".join(f"{os.urandom(8).hex()},1\n" for _ in range(20_000)))
    Path(output).write_text("before")
    before = contents(folder)
    options = [*REGRESSION, "--epsilon", "1", "--output", output, "--overwrite", "--quiet"]
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))
    try:
        code = main(["randomize", "labels.csv", *options])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert code == 2
    told = capsys.readouterr().err
    assert f"cannot write --output {output} (File too large)" in told
    assert told.count("\n") == 1
    assert contents(folder) == before


def test_a_folder_that_cannot_be_written_to(
    refused: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    labels(GOOD)

    def forbidden(*arguments: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("os.mkdir", forbidden)
    assert "cannot write --output noisy.csv (Permission denied)" in refused(*REGRESSION)


def test_stopped_by_hand_leaves_nothing(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    labels(GOOD)

    def interrupted(*arguments: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(_randomize, "_output_rows", interrupted)
    assert (
        main(["randomize", "labels.csv", *REGRESSION, "--epsilon", "1", "--output", "n.csv"]) == 130
    )
    assert "stopped" in capsys.readouterr().err
    assert [path.name for path in folder.iterdir()] == ["labels.csv"]


def test_help_says_what_may_be_published(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["randomize", "--help"])
    told = " ".join(capsys.readouterr().out.split())
    assert "Both files may be published" in told
    assert "the sum of their epsilons" in told
    assert json.dumps(told)  # plain text
