"""Which ids are copied, how often one comes, and a store that knows the ids of its draws."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow import parquet

from tf_labeldp.cli import _randomize, main
from tf_labeldp.mechanisms import RandomizedResponse
from tf_labeldp.scale import ReleaseKey, randomize_batch
from tf_labeldp.vault import NoisyLabels

OPTIONS = ["--column", "y", "--task", "classification", "--num-classes", "2", "--epsilon", "1"]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "public").mkdir()
    monkeypatch.chdir(tmp_path)
    return tmp_path


def randomize(source: str, *more: str, output: str = "public/n.csv") -> int:
    return main(["randomize", source, *OPTIONS, "--overwrite", "--output", output, *more])


def statement(output: str = "public/n.csv") -> dict:
    return json.loads(Path(f"{output}.privacy.json").read_text())


@pytest.mark.parametrize("name", ["row", "Row", "row_id", "id"])
def test_an_id_that_is_there_is_copied(name: str) -> None:
    Path("t.csv").write_text(f"{name},y\n7,0\n5,1\n9,1\n")
    assert randomize("t.csv") == 0
    lines = Path("public/n.csv").read_text().splitlines()
    assert [line.split(",")[0] for line in lines] == [name, "7", "5", "9"]


def test_row_beside_another_id_is_ambiguous(capsys: pytest.CaptureFixture[str]) -> None:
    Path("t.csv").write_text("row,id,y\n7,a,0\n")
    assert randomize("t.csv") == 2
    assert "look like row ids, 'row', 'id'; choose with --id" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("ids", "most"), [("abcd", 1), ("abca", 2), ("bbbb", 4), ("aabb", 2), (("", "x", "", ""), 3)]
)
def test_rows_of_one_id_are_counted(
    ids: tuple[str, ...], most: int, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("t.csv").write_text("id,y\n" + "".join(f"{i},1\n" for i in ids))
    assert randomize("t.csv") == 0
    found = statement()
    assert found["most_rows_of_one_id"] == most
    sentence = f"one id has up to {most} rows: where an id is a person, multiply epsilon"
    repeated = most > 1
    codes = {one["code"] for one in found["guarantee"]["assumptions"]}
    assert ("rows-per-id" in codes) == repeated
    assert any(sentence in text for text in found["statement"]) == repeated
    warning = f"warning: The epsilon is that of one row, and {sentence}"
    assert (warning in capsys.readouterr().err) == repeated


def test_rows_are_not_counted_without_a_single_id(capsys: pytest.CaptureFixture[str]) -> None:
    Path("t.csv").write_text("a,b,y\n1,1,0\n1,1,1\n")
    assert randomize("t.csv") == 0
    assert statement()["most_rows_of_one_id"] is None
    assert randomize("t.csv", "--id", "a", "--id", "b") == 0
    assert statement()["most_rows_of_one_id"] is None
    assert "warning" not in capsys.readouterr().err


@settings(max_examples=200, deadline=None)
@given(
    ids=st.lists(st.none() | st.text("a\0é", max_size=20), min_size=1, max_size=30),
    cuts=st.lists(st.integers(0, 30), max_size=3),
)
def test_counts_and_digests_of_any_ids_in_any_chunks(
    ids: list[str | None], cuts: list[int]
) -> None:
    bounds = [0, *sorted(min(cut, len(ids)) for cut in cuts), len(ids)]
    column = pa.array(ids, pa.string())
    chunks = [column[start:end] for start, end in itertools.pairwise(bounds)]
    hashes, digest = _randomize.id_facts(pa.table({"id": pa.chunked_array(chunks)}))
    whole = _randomize.id_facts(pa.table({"id": column.dictionary_encode()}))
    assert np.array_equal(hashes, whole[0]) and digest == whole[1]
    # Several files together, of any number of rows.
    most = _randomize.most_rows_of_one_id(np.split(hashes, bounds[1:-1]))
    assert most == max(ids.count(i) for i in ids)


@pytest.mark.parametrize("other", [["ab", "c"], ["a", "bc", ""], ["a", None, "bc"], ["bc", "a"]])
def test_digests_differ_where_ids_do(other: list[str | None]) -> None:
    found = []
    for ids in (["a", "bc"], other):
        found.append(_randomize.id_facts(pa.table({"id": pa.array(ids, pa.string())}))[1])
    assert found[0] != found[1]


def test_what_lies_under_a_null_does_not_count() -> None:
    """Arrow keeps text there: the bytes of one row must not be taken for those of the next."""
    offsets = pa.py_buffer(np.array([0, 1, 4, 5], np.int32).tobytes())
    valid = pa.py_buffer(bytes([0b101]))
    column = pa.StringArray.from_buffers(3, offsets, pa.py_buffer(b"axyza"), valid)
    assert column.to_pylist() == ["a", None, "a"]
    hashes, _ = _randomize.id_facts(pa.table({"id": column}))
    assert _randomize.most_rows_of_one_id([hashes]) == 2


@pytest.mark.parametrize(
    "column",
    [
        pa.array([[1], [2], [1]]),
        pa.array([b"\xff", b"\xfe", b"\xff"]),
        pa.array([7, 8, 7], pa.duration("s")),
        pa.array([1.5, None, 1.5]),
        pa.array(["a", "b", "a"], pa.string_view()),
    ],
)
def test_ids_of_any_type_are_counted(column: pa.Array) -> None:
    parquet.write_table(pa.table({"id": column, "y": [0, 1, 1]}), "t.parquet")
    store = ("--store", "store")
    assert randomize("t.parquet", *store, output="public/n.parquet") == 0
    assert statement("public/n.parquet")["most_rows_of_one_id"] == 2
    assert parquet.read_table("public/n.parquet")["id"].to_pylist() == column.to_pylist()
    assert randomize("t.parquet", *store, output="public/n.parquet") == 0


@pytest.mark.parametrize(
    ("text", "more"),
    [
        ("id,k,y\na,1,0\nc,2,1\n", ()),
        ("id,k,y\nb,1,0\na,2,1\n", ()),
        ("id,k,y\na,1,0\nb,2,1\n", ("--id", "k")),
        ("id,k,y\na,1,0\nb,2,1\n", ("--id", "id", "--id", "k")),
        ("other,k,y\na,1,0\nb,2,1\n", ("--id", "other")),
        ("x,k,y\na,1,0\nb,2,1\n", ()),
    ],
)
def test_a_store_refuses_other_ids(
    folder: Path, capsys: pytest.CaptureFixture[str], text: str, more: tuple[str, ...]
) -> None:
    """The same labels in the same order, but of other people."""
    Path("t.csv").write_text("id,k,y\na,1,0\nb,2,1\n")
    assert randomize("t.csv", "--store", "store") == 0
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    Path("u.csv").write_text(text)
    capsys.readouterr()
    assert randomize("u.csv", "--store", "store", *more) == 2
    told = capsys.readouterr().err
    assert "the store store holds noisy labels of rows with other ids" in told
    assert told.count("\n") == 1
    Path("u.csv").unlink()
    assert before == {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_store_takes_the_same_ids_from_another_format() -> None:
    Path("t.csv").write_text("id,y\n1,0\n2,1\n")
    parquet.write_table(pa.table({"id": [1, 2], "y": [0, 1]}), "t.parquet")
    assert randomize("t.csv", "--store", "store") == 0
    first = Path("public/n.csv").read_bytes()
    assert randomize("t.parquet", "--store", "store") == 0
    assert Path("public/n.csv").read_bytes() == first


def test_other_names_of_the_same_classes_are_refused(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Codes in a store mean nothing without the names that they stood for."""
    (folder / "answers.csv").write_text("answer\nyes\nyes\n")
    start = ["randomize", "answers.csv", "--column", "answer", "--task", "classification"]
    start += ["--epsilon", "1", "--store", "store", "--output", "public/noisy.csv", "--overwrite"]
    assert main([*start, "--classes", "yes", "no", "maybe"]) == 0
    capsys.readouterr()
    assert main([*start, "--classes", "yes", "maybe", "no"]) == 2
    assert "other settings" in capsys.readouterr().err


@pytest.mark.parametrize(
    "column", [pa.array([b"a", b"\xff"]), pa.array([1, 2], pa.duration("s")), pa.array([[1], [2]])]
)
def test_ids_without_text_are_refused_before_the_draw(
    column: pa.Array, capsys: pytest.CaptureFixture[str]
) -> None:
    parquet.write_table(pa.table({"id": column, "y": [0, 1]}), "t.parquet")
    assert randomize("t.parquet", "--store", "store") == 2
    assert "or give a .parquet --output" in capsys.readouterr().err
    assert not Path("store").exists()


def test_null_and_empty_ids_stay_apart() -> None:
    parquet.write_table(pa.table({"id": ["", None, "a"], "y": [0, 1, 1]}), "t.parquet")
    assert randomize("t.parquet") == 0
    cells = [line.split(",")[0] for line in Path("public/n.csv").read_text().splitlines()]
    assert cells == ["id", '""', "", "a"]
    assert statement()["most_rows_of_one_id"] == 1


def test_a_seed_does_not_change_stored_draws(capsys: pytest.CaptureFixture[str]) -> None:
    Path("t.csv").write_text("id,y\n1,0\n2,1\n")
    assert randomize("t.csv", "--store", "secret") == 0
    capsys.readouterr()
    assert randomize("t.csv", "--store", "secret", "--insecure-seed", "1") == 2
    told = capsys.readouterr().err
    assert "made without a seed, which --insecure-seed does not change; leave" in told
    assert "leave --insecure-seed out, or give a new --store" in told
    assert randomize("t.csv", "--store", "seeded", "--insecure-seed", "1") == 0
    capsys.readouterr()
    assert randomize("t.csv", "--store", "seeded", "--insecure-seed", "2") == 0
    assert "they were used, and --insecure-seed was ignored" in capsys.readouterr().err


def test_the_statement_says_what_it_rests_on() -> None:
    Path("t.csv").write_text("id,y\n1,0\n2,1\n")
    assert randomize("t.csv") == 0
    codes = {one["code"] for one in statement()["guarantee"]["assumptions"]}
    assert {"public-rows", "public-settings", "only-release"} <= codes
    assert "labels-in-range" in codes
    options = ["--column", "y", "--task", "regression", "--low", "0", "--high", "1"]
    more = ["--epsilon", "1", "--output", "public/r.csv"]
    assert main(["randomize", "t.csv", *options, *more]) == 0
    found = {
        one["code"]: one["text"] for one in statement("public/r.csv")["guarantee"]["assumptions"]
    }
    assert "the table itself shows that all of them lie there" in found["labels-in-range"]


@pytest.mark.parametrize("ids", [[7, 5, 9, -1, 2] * 8, list("abcde") * 8], ids=["numbers", "texts"])
def test_keyed_draws_are_those_of_the_key_in_the_store(ids: list) -> None:
    ids = [f"{one}{i}" if isinstance(one, str) else one + 100 * i for i, one in enumerate(ids)]
    y = np.arange(len(ids)) % 2
    for start in (0, 20):  # two files
        rows = "".join(f"{ids[i]},{y[i]}\n" for i in range(start, start + 20))
        Path(f"t{start}.csv").write_text("id,y\n" + rows)
    keyed = ["--draws", "keyed", "--store", "store"]
    assert randomize("t*.csv", *keyed) == 0
    first = Path("public/n.csv").read_text()
    assert randomize("t*.csv", *keyed) == 0
    assert Path("public/n.csv").read_text() == first
    key = ReleaseKey("store/labels.key").secret
    noisy = NoisyLabels.load("public/n.csv")
    release = f"vault/{noisy.receipts[0].key}"
    texts = [str(one) for one in ids]  # as all ids of CSV files
    made = randomize_batch(texts, y, RandomizedResponse(1.0, 2), key, release)
    assert [int(line.split(",")[1]) for line in first.splitlines()[1:]] == made.tolist()
    assert "pseudorandom" in str(noisy.guarantee())


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ([], "needs --store DIR"),
        (["--store", "s", "--insecure-seed", "1"], "--insecure-seed is for --draws stored"),
        (["--store", "s", "--id", "id", "--id", "x"], "takes one --id, got 2"),
        (["--store", "s", "--id", "x"], "1 ids name more than one row"),
    ],
)
def test_keyed_draws_need_a_store_and_one_id_a_row(
    options: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("t.csv").write_text("id,x,y\n1,3,0\n2,3,1\n")
    assert randomize("t.csv", "--draws", "keyed", *options) == 2
    assert told in capsys.readouterr().err
    assert not Path("public/n.csv").exists()


def test_keyed_draws_take_no_noise_of_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    Path("t.csv").write_text("id,y\n1,3\n")
    numbers = ["--task", "regression", "--low", "0", "--high", "9", "--mechanism", "laplace"]
    told = ["--epsilon", "1", "--output", "n.csv", "--store", "s", "--draws", "keyed"]
    assert main(["randomize", "t.csv", "--column", "y", *numbers, *told]) == 2
    assert "takes --mechanism rr_on_bins, got laplace" in capsys.readouterr().err
