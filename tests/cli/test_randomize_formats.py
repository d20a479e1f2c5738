"""Files that are almost what they should be, many classes, and a prior that is too deep."""

from __future__ import annotations

import gzip
import json
import os
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

from tf_labeldp.cli import _tables, main

REGRESSION = ["--column", "y", "--task", "regression", "--low", "0", "--high", "100"]
COMMON = ["--epsilon", "99", "--output", "n.csv", "--quiet"]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def error_of(capsys: pytest.CaptureFixture[str], source: str, *options: str) -> str:
    assert main(["randomize", source, *COMMON, *options]) == 2
    told = capsys.readouterr().err
    assert told.count("\n") == 1
    return told


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("t.csv", "id,y\na,1\n".encode("utf-16"), "save UTF-16, as of Excel"),
        ("t.csv", b"\xfe\xff" + "id,y\na,1\n".encode("utf-16-be"), "PowerShell, as UTF-8"),
        ("t.csv.gz", gzip.compress("id,y\na,1\n".encode("utf-16")), "is not UTF-8 text"),
        ("t.csv", gzip.compress(b"id,y\na,1\n"), "name a gzip archive .csv.gz"),
        ("t.csv.gz", gzip.compress(gzip.compress(b"id,y\na,1\n")), "is not UTF-8 text"),
    ],
    ids=["utf-16", "utf-16-be", "utf-16 in gzip", "gzip", "gzip in gzip"],
)
def test_files_that_are_no_utf8(
    capsys: pytest.CaptureFixture[str], name: str, content: bytes, reason: str
) -> None:
    Path(name).write_bytes(content)
    assert reason in error_of(capsys, name, *REGRESSION)


@pytest.mark.parametrize(
    ("text", "hidden"),
    [("1,55.25\n2,60.5\n", "55.25"), ("a,-7\nb,8\n", "-7"), ("a,1,y,y\n", "'1'")],
)
def test_a_table_without_a_header_line_shows_no_label(
    capsys: pytest.CaptureFixture[str], text: str, hidden: str
) -> None:
    Path("t.csv").write_text(text)
    told = error_of(capsys, "t.csv", *REGRESSION)
    assert "is there a header line?" in told and hidden not in told


@pytest.mark.parametrize("block", [4, 1 << 20])
@pytest.mark.parametrize("name", ["t.csv", "t.csv.gz"])
@pytest.mark.parametrize("end", ["\n\n", "\r\n\r\n", "\n", ""])
def test_an_empty_last_line_of_a_single_column(
    monkeypatch: pytest.MonkeyPatch, name: str, end: str, block: int
) -> None:
    monkeypatch.setattr(_tables, "_BLOCK_BYTES", block)
    line = "\r\n" if "\r" in end else "\n"
    text = (line.join(["y", "0", "1", "2"]) + end).encode()
    Path(name).write_bytes(gzip.compress(text) if name.endswith("gz") else text)
    task = ["--column", "y", "--task", "classification", "--num-classes", "3"]
    assert main(["randomize", name, *COMMON, *task]) == 0
    assert Path("n.csv").read_text() == "row,y\n0,0\n1,1\n2,2\n"


@pytest.mark.parametrize(("text", "rows"), [("y\n1\n\n\n", 2), ("y\n\n1\n", 2), ("y\n1\nNA\n", 2)])
def test_other_empty_cells_of_a_single_column_are_missing(
    capsys: pytest.CaptureFixture[str], text: str, rows: int
) -> None:
    Path("t.csv").write_text(text)
    assert f"has no label in 1 of {rows} rows" in error_of(capsys, "t.csv", *REGRESSION)


@pytest.mark.parametrize("cell", ["", "nan"])
def test_missing_labels_are_not_to_be_left_out(
    capsys: pytest.CaptureFixture[str], cell: str
) -> None:
    """Leaving out rows by their label shows something of it."""
    Path("t.csv").write_text(f"id,y\na,1\nb,{cell}\n")
    told = error_of(capsys, "t.csv", *REGRESSION)
    assert "fill them by a rule that does not look at labels, or choose the rows to send by" in told
    assert "leave" not in told


@pytest.mark.parametrize("place", ["input", "output"])
def test_folders_that_may_not_be_entered(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    Path("t.csv").write_text("id,y\na,1\n")
    stat = os.stat

    def forbidden(path: object, *args: object, **options: object) -> os.stat_result:
        if "closed" in str(path):  # as for others than root
            raise PermissionError(13, "Permission denied", str(path))
        return stat(path, *args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "stat", forbidden)
    monkeypatch.setattr(Path, "stat", forbidden)  # which keeps an os.stat of its own in 3.10
    if place == "input":
        told = error_of(capsys, "closed/t.csv", *REGRESSION)
        assert "the input closed/t.csv cannot be read (Permission denied)" in told
    else:
        told = error_of(capsys, "t.csv", *REGRESSION, "--output", "closed/n.csv")
        assert "cannot write --output closed/n.csv (Permission denied)" in told


def test_a_prior_that_is_nested_too_deep(capsys: pytest.CaptureFixture[str]) -> None:
    Path("t.csv").write_text("id,y\na,1\n")
    Path("p.json").write_text("[" * 100_000)
    assert "--prior p.json is not as expected" in error_of(
        capsys, "t.csv", *REGRESSION, "--prior", "p.json"
    )


def test_a_statement_that_is_nested_too_deep_is_no_leftover(
    capsys: pytest.CaptureFixture[str],
) -> None:
    Path("t.csv").write_text("id,y\na,1\n")
    Path("n.csv.privacy.json").write_text("[" * 100_000)
    assert "n.csv.privacy.json exists" in error_of(capsys, "t.csv", *REGRESSION)


K = 100_000


@pytest.mark.parametrize("prior", [None, 7, K])
def test_many_classes(prior: int | None) -> None:
    """A matrix of K x K would take 80 GB; a list of all classes says nothing."""
    labels = np.random.default_rng(0).integers(0, K, 500)
    parquet.write_table(pa.table({"y": labels}), "t.parquet")
    options = ["--column", "y", "--task", "classification", "--num-classes", str(K)]
    if prior is not None:
        start = 0 if prior == K else 100
        probabilities = np.zeros(K)
        probabilities[start : start + prior] = 1.0 / prior
        Path("p.json").write_text(json.dumps(probabilities.tolist()))
        options += ["--prior", "p.json"]
    assert main(["randomize", "t.parquet", *COMMON, "--epsilon", "1", *options]) == 0
    told = json.loads(Path("n.csv.privacy.json").read_text())
    assert (told["num_classes"], told["classes"]) == (K, None)
    assert told["outputs"] == (list(range(100, 107)) if prior == 7 else "all")
    noisy = np.loadtxt("n.csv", delimiter=",", skiprows=1, dtype=int)[:, 1]
    assert noisy.min() >= 0 and noisy.max() < K
    if prior == 7:
        assert set(noisy) <= set(range(100, 107))


def test_more_classes_than_labels_can_have(capsys: pytest.CaptureFixture[str]) -> None:
    Path("t.csv").write_text("y\n1\n")
    options = ["--column", "y", "--task", "classification", "--num-classes", "1" + "0" * 30]
    assert "--num-classes must be at most 1,000,000,000" in error_of(capsys, "t.csv", *options)


def test_outputs_of_named_classes_have_names() -> None:
    Path("t.csv").write_text("y\na\nb\nc\n")
    Path("p.json").write_text("[0.5, 0.0, 0.5]")
    options = ["--column", "y", "--task", "classification", "--classes", "a", "b", "c"]
    assert main(["randomize", "t.csv", *options, *COMMON, "--prior", "p.json"]) == 0
    told = json.loads(Path("n.csv.privacy.json").read_text())
    assert (told["classes"], told["outputs"]) == (["a", "b", "c"], ["a", "c"])


@pytest.mark.parametrize("kind", [pa.string_view(), pa.large_string()])
def test_class_names_in_any_kind_of_text(kind: pa.DataType) -> None:
    column = pa.array(["no", "yes", "no"], kind)
    parquet.write_table(pa.table({"y": column}), "t.parquet")
    assert parquet.ParquetFile("t.parquet").schema_arrow.field("y").type == kind
    options = ["--column", "y", "--task", "classification", "--classes", "yes", "no"]
    assert main(["randomize", "t.parquet", *options, *COMMON]) == 0
    assert Path("n.csv").read_text() == "row,y\n0,no\n1,yes\n2,no\n"
