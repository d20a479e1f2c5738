"""`tf-labeldp randomize` copies ids, replaces labels, and writes a correct statement."""

from __future__ import annotations

import datetime
import gzip
import io
import json
import re
import tempfile
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow import csv, parquet
from scipy import stats

from tf_labeldp.accounting import PrivacyGuarantee
from tf_labeldp.cli import main
from tf_labeldp.estimation import posterior
from tf_labeldp.mechanisms import Mechanism, Priors, RandomizedResponse, RROnBins
from tf_labeldp.scale import ReleaseKey, randomize_batch
from tf_labeldp.vault import NoisyLabels

N = 3000
RNG = np.random.default_rng(5)
AMOUNTS = np.round(np.minimum(RNG.exponential(60.0, N), 400.0), 3)  # nearly all distinct
BOUGHT = RNG.integers(0, 2, N)
IDS = [f"{i:05d}" for i in RNG.permutation(N)]
REGRESSION = ("--column", "amount", "--task", "regression", "--low", "0", "--high", "400")
CLASSES = ("--task", "classification", "--num-classes", "2")
SEEDED = ("--insecure-seed", "0")


def _views():
    """Returns the type of string views; large strings where Parquet files cannot have views."""
    try:
        parquet.write_table(pa.table({"view": pa.array(["a"], pa.string_view())}), io.BytesIO())
    except pa.ArrowNotImplementedError:  # as of pyarrow 16
        return pa.large_string()
    return pa.string_view()


VIEW = _views()


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "public").mkdir()
    return tmp_path


def table():
    return pa.table({"user": ["x"] * N, "ID": IDS, "amount": AMOUNTS, "bought": BOUGHT})


def write(name, content):
    if name.endswith(".parquet"):
        parquet.write_table(content, name)
    else:
        with pa.output_stream(name) as file:  # by the name, through gzip
            csv.write_csv(content, file)
    return name


def read(name):
    if name.endswith(".parquet"):
        return parquet.read_table(name)
    content = Path(name).read_bytes()
    text = gzip.decompress(content) if name.endswith(".gz") else content
    # Read as text, so that Arrow converts nothing.
    names = csv.open_csv(pa.BufferReader(text)).schema.names
    return csv.read_csv(
        pa.BufferReader(text),
        parse_options=csv.ParseOptions(newlines_in_values=True),
        convert_options=csv.ConvertOptions(column_types=dict.fromkeys(names, pa.string())),
    )


def randomize(source, output, *options):
    """Runs the command, and returns its output."""
    words = ["--overwrite", *map(str, options)]
    words += [] if "--epsilon" in options else ["--epsilon", "1"]
    words += [] if "--column" in options else ["--column", "y"]
    assert main(["randomize", source, "--output", output, *words]) == 0
    return read(output)


def numbers(column):
    return column.cast(pa.float64()).to_numpy()


def statement_of(output):
    return json.loads(Path(f"{output}.privacy.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("suffix", ["csv", "csv.gz", "parquet"])
def test_numbers_leave_ids_and_few_bins(suffix, capsys):
    source, output = write(f"labels.{suffix}", table()), f"noisy.{suffix}"
    noisy = randomize(source, output, *REGRESSION, *SEEDED, "--epsilon", 2)
    assert noisy.column_names == ["ID", "amount"] and noisy["ID"].to_pylist() == IDS
    values, statement = numbers(noisy["amount"]), statement_of(output)
    # The outputs are the bins, far fewer than labels.
    assert set(values) <= set(statement["outputs"])
    assert len(statement["outputs"]) < 40 < len(set(AMOUNTS)) / 10
    # A chi-square test compares the draws with the channel.
    mechanism = Mechanism.from_json(statement["mechanism"])
    assert isinstance(mechanism, RROnBins)
    expected = mechanism.likelihood(mechanism.outputs, np.minimum(AMOUNTS, 400.0)).sum(axis=1)
    counts = np.array([(values == y).sum() for y in mechanism.outputs])
    assert counts.sum() == N
    assert stats.chisquare(counts, expected * N / expected.sum()).pvalue > 1e-6

    printed, total = capsys.readouterr(), statement["total"]
    words = f"{total['estimate']:.6g} (standard error {total['standard_error']:.2g})"
    assert f"total of the true labels, estimated from the noisy ones: {words}" in printed.out
    assert abs(total["estimate"] - AMOUNTS.sum()) < 4.0 * total["standard_error"]
    assert 0.0 < total["standard_error"] < 0.1 * AMOUNTS.sum()
    assert "ids copied from 'ID'" in printed.err  # and no other column
    assert "2 other columns and the labels are left out" in printed.err


@pytest.mark.parametrize("suffix", ["csv", "csv.gz", "parquet"])
def test_classes_are_kept_as_often_as_stated(suffix):
    names = np.array(["no", "yes, gladly", "naïve"])
    labels = RNG.integers(0, 3, N)
    content = table().append_column("y", pa.array(names[labels]))
    content = content.append_column("code", pa.array(labels))
    source, output = write(f"labels.{suffix}", content), f"noisy.{suffix}"
    noisy = randomize(source, output, *CLASSES[:2], *SEEDED, "--classes", *names)
    values = np.array(noisy["y"].to_pylist())
    codes = randomize(
        source, output, *CLASSES[:3], 3, *SEEDED, "--column", "code", "--output-column", 'a, "b"'
    )
    assert codes.column_names[0] == "ID" and codes["ID"].to_pylist() == IDS
    assert statement_of(output)["noisy_label_column"] == 'a, "b"'
    if suffix == "parquet":
        assert codes.schema.field('a, "b"').type == pa.int64()
    for kept in (values == names[labels], numbers(codes.column(1)) == labels):
        keep = np.exp(1) / (2 + np.exp(1))
        assert stats.binomtest(int(kept.sum()), N, keep).pvalue > 1e-6
        assert stats.binomtest(int(kept.sum()), N, keep + 0.1).pvalue < 1e-6
    assert set(values) == set(names)


def test_parquet_keeps_the_types_of_ids_and_nothing_of_the_schema():
    ids = pa.array([2**53 + 1, 2**63 - 1, -(2**63), None], pa.int64())
    content = pa.table({"id": ids, "when": pa.array([1, 2, 3, 4], pa.timestamp("ms"))})
    content = content.append_column(
        pa.field("y", pa.int32(), metadata={"secret": "0110"}), pa.array([0, 1, 1, 0], pa.int32())
    ).replace_schema_metadata({"secret": "0110"})
    source = write("t.parquet", content)
    noisy = randomize(source, "n.parquet", *CLASSES, "--id", "when", "--id", "id")
    assert noisy.column_names == ["when", "id", "y"]
    assert noisy.select(["when", "id"]).equals(content.select(["when", "id"]))
    assert b"0110" not in Path("n.parquet").read_bytes()
    assert statement_of("n.parquet")["most_rows_of_one_id"] is None  # of two columns together
    text = randomize(source, "n.csv", *CLASSES, "--id", "id")
    assert text["id"].to_pylist() == [str(2**53 + 1), str(2**63 - 1), str(-(2**63)), ""]


def test_a_column_with_a_dot_does_not_come_along():
    """Parquet readers take "a" for "a.b" too."""
    columns = {"id.y": AMOUNTS, "y.a": AMOUNTS, "id": IDS, "y": BOUGHT, "y.z": AMOUNTS}
    source = write("t.parquet", pa.table(columns))
    noisy = randomize(source, "n.parquet", *CLASSES, "--epsilon", 99)
    assert noisy.to_pydict() == {"id": IDS, "y": BOUGHT.tolist()}


@pytest.mark.parametrize(
    ("column", "options", "values"),
    [
        ([True, False], ("--classes", "false", "true"), ["true", "false"]),
        ([10, 20], ("--classes", "10", "20"), ["10", "20"]),
        (pa.array(["a", "b"]).dictionary_encode(), ("--classes", "a", "b"), ["a", "b"]),
        (pa.array(["a", "b"], pa.large_string()), ("--classes", "b", "a"), ["a", "b"]),
        (pa.array(["a", "b"], VIEW), ("--classes", "b", "a"), ["a", "b"]),
        (pa.array([0, 2], pa.uint64()), (), [0.0, 2.0]),
        (pa.array([0.0, 2.0], pa.float32()), (), [0.0, 2.0]),
        (pa.array([0.0, 2.0]).cast(pa.decimal128(9, 2)), (), [0.0, 2.0]),
    ],
)
def test_types_of_parquet_columns(column, options, values):
    source = write("t.parquet", pa.table({"y": column}))
    range_ = ("--task", "regression", "--low", 0, "--high", 2, "--mechanism", "discrete_laplace")
    options = (*CLASSES[:2], *options) if options else range_
    noisy = randomize(source, "n.parquet", *options, "--epsilon", 99)
    assert noisy["y"].to_pylist() == values and noisy["row"].to_pylist() == [0, 1]


# Python 3.10's csv module cannot write the null character.
TEXTS = st.text(st.characters(min_codepoint=1, exclude_categories=("Cs",)), max_size=8)
AWKWARD = [
    "007", "a,b", 'say ""', '"', "line\nbreak", "cr\rlf\r\n", "ünïcode 数", "", " space ", "NULL",
    str(2**64), "1e5", "-0", "'", "#N/A", "\t", "=1+1",
]  # fmt: skip


@pytest.mark.slow
@settings(max_examples=15, deadline=None)
@given(ids=st.just(AWKWARD) | st.lists(TEXTS, min_size=1, max_size=6))
def test_any_text_as_id_comes_back_from_any_format(ids):
    with tempfile.TemporaryDirectory() as place:
        source = write(f"{place}/0.parquet", pa.table({"id": ids, "y": [1] * len(ids)}))
        for number, suffix in enumerate(("csv", "csv.gz", "csv", "parquet", "csv")):
            output = f"{place}/n{number}.{suffix}"
            assert randomize(source, output, *CLASSES, "--quiet")["id"].to_pylist() == ids
            source = output


def test_ids_get_quotes_where_one_needs_them():
    Path("t.csv").write_text('id,y\r\n007,0\r\n\r\n"a,b",1\n"plain",1\n\n')  # with empty lines
    randomize("t.csv", "n.csv", *CLASSES, "--epsilon", 99)
    assert Path("n.csv").read_text() == 'id,y\n"007",0\n"a,b",1\n"plain",1\n'
    write("t.parquet", pa.table({"id": ["", None, "a"], "y": [0, 1, 1]}))
    randomize("t.parquet", "n.csv", *CLASSES, "--epsilon", 99)
    assert Path("n.csv").read_text() == 'id,y\n"",0\n,1\n"a",1\n'  # null and empty stay apart
    assert statement_of("n.csv")["most_rows_of_one_id"] == 1


@pytest.mark.slow
def test_tables_longer_than_what_is_read_and_written_at_once():
    """The command reads 16 MB of a CSV file at a time, and writes 262,144 rows."""
    ids = [9 * "longer\n" + str(i) for i in range(270_000)]
    labels = np.arange(len(ids)) % 2
    source = write("t.csv", pa.table({"id": ids, "y": labels}))
    assert Path(source).stat().st_size > 17 << 20
    parquet.write_table(pa.table({"id": ids, "y": labels}), "t.parquet", row_group_size=999)
    for name, suffix in ((source, "csv"), ("t.parquet", "parquet")):
        options = (*CLASSES, "--epsilon", 99, "--store", "store")  # which knows the ids again
        noisy = randomize(name, f"public/n.{suffix}", *options)
        assert noisy["id"].equals(pa.chunked_array([ids]))
        assert np.array_equal(numbers(noisy["y"]), labels)
        assert statement_of(f"public/n.{suffix}")["most_rows_of_one_id"] == 1


def test_the_statement_is_complete():
    output = "n.csv"
    noisy = randomize(
        write("t.csv", table()), output, *REGRESSION, "--prior-epsilon", 0.25, "--max-values", 101,
        "--loss", "absolute_error",
    )  # fmt: skip
    statement = statement_of(output)
    guarantee = PrivacyGuarantee.from_json(json.dumps(statement["guarantee"]))
    assert (guarantee.epsilon, guarantee.delta, guarantee.is_private) == (1.0, 0.0, True)
    assert json.loads(guarantee.to_json()) == statement["guarantee"]
    assert statement["statement"] == str(guarantee).splitlines()
    texts = {note["code"]: note["text"] for note in statement["guarantee"]["assumptions"]}
    assert {"public-rows", "public-settings", "only-release"} <= set(texts)
    assert "the table itself shows that all of them lie there" in texts["labels-in-range"]
    assert statement["epsilon"] == {"total": 1.0, "prior": 0.25, "draw": 0.75}
    assert statement["loss"] == "absolute_error"
    assert statement["label_range"] == [0.0, 400.0]
    assert (statement["rows"], statement["id_columns"]) == (N, ["ID"])
    prior = statement["prior"]
    assert prior["source"] == "private histogram"
    assert len(prior["values"]) == len(prior["probabilities"]) == 101
    # The features party can compute the posterior mean.
    means = posterior(
        Mechanism.from_json(statement["mechanism"]),
        numbers(noisy["amount"]),
        Priors(prior["probabilities"], values=prior["values"]),
    )
    assert means.shape == (N,) and 0.0 <= means.min() <= means.max() <= 400.0


def test_nothing_shows_whether_a_label_was_clipped(capsys):
    """Whether clipping was needed depends on the labels."""
    found = []
    for top, options in ((400.0, ()), (9e9, ("--clip",))):
        labels = np.where(np.arange(N) == 7, top, AMOUNTS)
        source = write("t.csv", pa.table({"id": IDS, "amount": labels}))
        randomize(source, "n.csv", *REGRESSION, *options, *SEEDED)
        statement = without_names(statement_of("n.csv"))
        found.append((capsys.readouterr().out, Path("n.csv").read_text(), statement))
    assert found[0] == found[1]


def without_names(content):
    """Checks the random parts and the times of a statement's receipts, and removes them.

    A digest is of the other entries, and so reveals nothing more; that of all is of the receipts
    too.
    """
    assert re.fullmatch("[0-9a-f]{64}", content.pop("digest"))
    assert len(content["receipts"]) == 2
    assert content.pop("prior_receipts") == [content["receipts"][0]["id"]]
    # The bins depend on the release of the prior.
    assert content["mechanism"].pop("receipts") == content["receipts"][:1]
    for receipt in content["receipts"]:
        for name in ("id", "plan"):
            assert re.fullmatch("[0-9a-f]{32}", receipt.pop(name))
        assert re.fullmatch("[0-9a-f]{64}", receipt.pop("digest"))
        assert re.fullmatch("[0-9a-f]{32}", receipt["labels"].pop("name"))
        assert datetime.datetime.fromisoformat(receipt.pop("time")).utcoffset() is not None
    return content


@pytest.mark.parametrize(
    "name", ["laplace", "discrete_laplace", "staircase", "discrete_staircase", "exponential"]
)
def test_baselines(name):
    source = write("t.csv", pa.table({"id": IDS, "amount": AMOUNTS.round()}))
    options = (*REGRESSION, "--mechanism", name, "--epsilon", 3, *SEEDED)
    values = numbers(randomize(source, "n.csv", *options)["amount"])
    assert 0.0 <= values.min() <= values.max() <= 400.0
    assert np.corrcoef(values, AMOUNTS)[0, 1] > 0.1
    statement = statement_of("n.csv")
    assert statement["mechanism"]["class_name"].lower() == f"{name.replace('_', '')}mechanism"
    assert statement["epsilon"] == {"total": 3.0, "prior": 0.0, "draw": 3.0}
    assert statement["prior"] is None
    noisy = NoisyLabels.load("n.csv")
    assert noisy.values.tolist() == values.tolist() and noisy.guarantee().epsilon == 3.0
    with pytest.raises(ValueError, match="need priors with values"):
        noisy.posterior()


def test_a_public_prior_of_numbers_costs_nothing():
    # The values do not increase, and lack the ends of the range.
    values, probabilities = [300, 10, 100], [0.2, 0.5, 0.3]
    Path("prior.json").write_text(json.dumps({"values": values, "probabilities": probabilities}))
    source = write("t.csv", table())
    noisy = randomize(source, "n.csv", *REGRESSION, "--prior", "prior.json", "--epsilon", 2)
    statement = statement_of("n.csv")
    assert statement["epsilon"] == {"total": 2.0, "prior": 0.0, "draw": 2.0}
    assert statement["guarantee"]["epsilon"] == 2.0
    assert statement["prior"] == {
        "source": "public",
        "values": [0.0, 10.0, 100.0, 300.0, 400.0],
        "probabilities": [0.0, 0.5, 0.3, 0.2, 0.0],
    }
    assert set(numbers(noisy["amount"])) == set(statement["outputs"])


@pytest.mark.parametrize("text", ["[0.5, 0.5, 0.0]", '{"probabilities": [0.5, 0.5, 0.0]}'])
def test_a_public_prior_of_classes(text):
    """RRWithPrior never draws a class that the prior excludes."""
    labels = RNG.integers(0, 3, N)
    source = write("t.csv", pa.table({"y": labels, "name": np.array(["a", "b", "c"])[labels]}))
    Path("p.json").write_text(text)
    options = (*CLASSES[:2], "--num-classes", 3, "--prior", "p.json", *SEEDED)
    values = numbers(randomize(source, "n.csv", *options)["y"]).astype(int)
    statement = statement_of("n.csv")
    assert set(values) == {0, 1} and statement["outputs"] == [0, 1]
    assert statement["mechanism"]["class_name"] == "RRWithPrior"
    assert statement["prior"] == {"source": "public", "probabilities": [0.5, 0.5, 0.0]}
    kept = int((values[labels < 2] == labels[labels < 2]).sum())
    keeps = np.exp(1) / (1 + np.exp(1))
    assert stats.binomtest(kept, int((labels < 2).sum()), keeps).pvalue > 1e-6
    named = (*CLASSES[:2], "--classes", "a", "b", "c", "--column", "name", "--prior", "p.json")
    randomize(source, "n.csv", *named)
    assert statement_of("n.csv")["outputs"] == ["a", "b"]  # by their names


@pytest.mark.parametrize("prior", [None, 7])
def test_many_classes(prior):
    """A K x K matrix would take 80 GB, and the statement does not list the classes."""
    classes = 100_000
    source = write("t.parquet", pa.table({"y": RNG.integers(0, classes, 500)}))
    options = (*CLASSES[:2], "--num-classes", classes)
    if prior is not None:
        probabilities = np.zeros(classes)
        probabilities[100 : 100 + prior] = 1.0 / prior
        Path("p.json").write_text(json.dumps(probabilities.tolist()))
        options = (*options, "--prior", "p.json")
    noisy = numbers(randomize(source, "n.csv", *options)["y"])
    statement = statement_of("n.csv")
    assert (statement["num_classes"], statement["classes"]) == (classes, None)
    assert statement["outputs"] == (list(range(100, 107)) if prior else "all")
    assert noisy.min() >= 0 and noisy.max() < classes
    assert not prior or set(noisy) <= set(range(100, 107))


def test_a_seed_repeats_and_is_stated(capsys):
    source = write("t.csv", table())
    seeds = {"a": ("--insecure-seed", 4), "b": ("--insecure-seed", 4), "c": SEEDED, "d": ()}
    found = {
        name: randomize(source, f"{name}.csv", *REGRESSION, *seed) for name, seed in seeds.items()
    }
    assert capsys.readouterr().out.count("NOT PRIVATE: seeded") == 3
    assert found["a"].equals(found["b"])
    assert not found["a"].equals(found["c"]) and not found["a"].equals(found["d"])
    statement = statement_of("a.csv")
    assert statement["statement"][0].startswith("NOT PRIVATE: seeded")
    assert statement["guarantee"]["seeded"] and not statement["guarantee"]["private"]
    assert statement_of("d.csv")["guarantee"]["private"]
    assert not NoisyLabels.load("a.csv").guarantee().is_private
    randomize(source, "n.csv", *REGRESSION, "--quiet")
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", "")


def test_it_loads_no_tensorflow(in_process):
    source = write("t.csv", table())
    program = (
        "import json, sys\n"
        "from tf_labeldp.cli import main\n"
        "from tf_labeldp import NoisyLabels\n"
        "for arguments in json.loads(sys.argv[1]):\n"
        "    assert main(['randomize', *arguments]) == 0\n"
        "    noisy = NoisyLabels.load(arguments[-1])\n"
        "    assert len(noisy.posterior()) == len(noisy.debiased()) == len(noisy.decode())\n"
        "print(json.dumps([name.partition('.')[0] for name in sys.modules]))\n"
    )
    commands = [
        [source, *task, "--epsilon", "1", "--output", output]
        for task, output in ((REGRESSION, "r.csv"), (("--column", "bought", *CLASSES), "c.csv"))
    ]
    code, printed = in_process(program, json.dumps(commands))
    assert code == 0, printed
    loaded = set(json.loads(printed.splitlines()[-1]))
    assert "pyarrow" in loaded and not loaded & {"tensorflow", "keras"}


# Ids: copies, repeats, and the ids of a store's draws.


@pytest.mark.parametrize(
    ("ids", "most"),
    [
        (list("abcd"), 1),
        (list("abca"), 2),
        (list("bbbb"), 4),
        (["", "x", None, ""], 2),
        ([1.5, None, 1.5, None], 2),
        ([[1], [2], [1], [1]], 3),
        ([b"\xff", b"\xfe", b"\xff", b"a"], 2),
        (pa.array([7, 8, 7, 9], pa.duration("s")), 2),
        (pa.array(["a", "b", "a", "a\0"], VIEW), 2),
        (pa.array(["b", "b", "b", "eight or more"]).dictionary_encode(), 3),
        (["eight or more", "eight or mora", "eight or more", "eight or"], 2),
        # Equal in all bytes that a hash covers, and in length.
        (["x" * 99 + end for end in "abca"], 2),
        ([-1, 2**62, -1, -1], 3),
        (pa.array([1, 255, 255, 2], pa.uint8()), 2),
    ],
)
def test_rows_of_one_id_are_counted(ids, most, capsys):
    source = write("t.parquet", pa.table({"id": ids, "y": [0, 1, 1, 0]}))
    for _ in range(2):  # the store knows the ids again
        noisy = randomize(source, "public/n.parquet", *CLASSES, "--store", "store")
    assert noisy["id"].to_pylist() == parquet.read_table(source)["id"].to_pylist()
    found = statement_of("public/n.parquet")
    assert found["most_rows_of_one_id"] == most
    sentence = f"one id has up to {most} rows: where an id is a person, multiply epsilon"
    warned = f"warning: The epsilon is that of one row, and {sentence}" in capsys.readouterr().err
    codes = {note["code"] for note in found["guarantee"]["assumptions"]}
    assert ("rows-per-id" in codes) == (most > 1) == warned
    assert any(sentence in text for text in found["statement"]) == (most > 1)


def test_what_lies_under_a_null_does_not_count():
    """Arrow stores text under a null; it must not run into the next row."""
    offsets = pa.py_buffer(np.array([0, 1, 4, 5], np.int32).tobytes())
    valid = pa.py_buffer(bytes([0b101]))
    column = pa.StringArray.from_buffers(3, offsets, pa.py_buffer(b"axyza"), valid)
    source = write("t.parquet", pa.table({"id": column, "y": [0, 1, 1]}))
    randomize(source, "n.parquet", *CLASSES)
    assert statement_of("n.parquet")["most_rows_of_one_id"] == 2


@pytest.mark.parametrize(
    ("text", "more"),
    [
        ("id,k,y\na,1,0\nc,2,1\n", ()),
        ("id,k,y\nb,1,0\na,2,1\n", ()),
        ("id,k,y\n,1,0\nab,2,1\n", ()),
        ("id,k,y\na,1,0\nb,2,1\n", ("--id", "k")),
        ("id,k,y\na,1,0\nb,2,1\n", ("--id", "id", "--id", "k")),
        ("other,k,y\na,1,0\nb,2,1\n", ("--id", "other")),
        ("x,k,y\na,1,0\nb,2,1\n", ()),
    ],
)
def test_a_store_refuses_other_ids(folder, capsys, text, more):
    """Here the labels are the same, but not the people."""
    Path("t.csv").write_text("id,k,y\na,1,0\nb,2,1\n")
    Path("u.csv").write_text(text)
    randomize("t.csv", "public/n.csv", *CLASSES, "--store", "store")
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    capsys.readouterr()
    options = [*CLASSES, "--column", "y", "--epsilon", "1", "--store", "store", *more]
    assert main(["randomize", "u.csv", "--output", "public/n.csv", "--overwrite", *options]) == 2
    error = capsys.readouterr().err
    assert "the store store has noisy labels of rows with other ids" in error
    assert error.count("\n") == 1
    assert before == {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_store_takes_the_same_ids_from_another_format():
    Path("t.csv").write_text("id,y\n1,0\n2,1\n")
    write("t.parquet", pa.table({"id": [1, 2], "y": [0, 1]}))
    noisy = [
        randomize(source, "public/n.csv", *CLASSES, "--store", "store")
        for source in ("t.csv", "t.parquet")
    ]
    assert noisy[0].equals(noisy[1])


@pytest.mark.parametrize("ids", [[7, 5, 9, -1, 2], ["a", "b", "", "d", "e"]], ids=str)
def test_keyed_draws_are_those_of_the_key_in_the_store(ids):
    ids = [f"{name}{i}" if isinstance(name, str) else name + 100 * i
           for i, name in enumerate(ids * 8)]  # fmt: skip
    y = np.arange(len(ids)) % 2
    write("t0.csv", pa.table({"id": ids[:20], "y": y[:20]}))
    write("t1.csv", pa.table({"id": ids[20:], "y": y[20:]}))
    keyed = (*CLASSES, "--draws", "keyed", "--store", "store")
    first, again = (numbers(randomize("t*.csv", "public/n.csv", *keyed)["y"]) for _ in range(2))
    np.testing.assert_array_equal(first, again)
    key, noisy = ReleaseKey("store/labels.key").secret, NoisyLabels.load("public/n.csv")
    texts = [str(name) for name in ids]  # as all ids of CSV files
    release = f"vault/{noisy.receipts[0].key}"
    drawn = randomize_batch(texts, y, RandomizedResponse(1.0, 2), key, release)
    np.testing.assert_array_equal(first, drawn)
    assert "pseudorandom" in str(noisy.guarantee())


def test_keyed_draws_of_numbers_take_the_default_mechanism_by_name():
    write("t.csv", pa.table({"id": np.arange(40), "y": np.linspace(0.0, 1.0, 40)}))
    words = ("--task", "regression", "--low", "0", "--high", "1", "--epsilon", "1")
    keyed = (*words, "--draws", "keyed", "--store", "store")
    first, again = (
        randomize("t.csv", "public/n.csv", *keyed, *more)
        for more in ((), ("--mechanism", "rr_on_bins"))
    )
    assert first.equals(again)
