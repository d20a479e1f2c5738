"""`tf-labeldp randomize` from table to table: ids stay, labels are gone, the statement is right."""

from __future__ import annotations

import datetime
import gzip
import json
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import csv, parquet
from scipy import stats

from tf_labeldp.accounting import PrivacyGuarantee
from tf_labeldp.cli import _randomize, _tables, main
from tf_labeldp.estimation import posterior
from tf_labeldp.mechanisms import Priors, RROnBins
from tf_labeldp.mechanisms.base import deserialize

N = 3000
RNG = np.random.default_rng(5)
AMOUNTS = np.round(np.minimum(RNG.exponential(60.0, N), 400.0), 3)  # nearly all distinct
BOUGHT = RNG.integers(0, 2, N)
IDS = [f"{i:05d}" for i in RNG.permutation(N)]
REGRESSION = ("--column", "amount", "--task", "regression", "--low", "0", "--high", "400")
CLASSES = ("--column", "bought", "--task", "classification", "--num-classes", "2")


def table() -> pa.Table:
    return pa.table({"user": ["x"] * N, "ID": IDS, "amount": AMOUNTS, "bought": BOUGHT})


@pytest.fixture(params=["csv", "csv.gz", "parquet"])
def source(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """The same table in each format."""
    return write(tmp_path / f"labels.{request.param}", table())


def write(path: Path, content: pa.Table) -> Path:
    if path.suffix == ".parquet":
        parquet.write_table(content, path)
    else:
        with (
            pa.CompressedOutputStream(path, "gzip")
            if path.suffix == ".gz"
            else open(path, "wb") as file
        ):
            csv.write_csv(content, file)
    return path


def read(path: Path) -> pa.Table:
    if path.suffix == ".parquet":
        return parquet.read_table(path)
    text = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    # As text, so that nothing is converted on the way.
    names = text.decode().split("\n", 1)[0].split(",")
    return csv.read_csv(
        pa.BufferReader(text),
        parse_options=csv.ParseOptions(newlines_in_values=True),
        convert_options=csv.ConvertOptions(column_types={name: pa.string() for name in names}),
    )


def randomize(source: Path, output: Path, *options: object) -> pa.Table:
    """Runs the command, which must succeed, and gives its output."""
    assert main(["randomize", str(source), "--output", str(output), *map(str, options)]) == 0
    return read(output)


def numbers(column: pa.ChunkedArray) -> np.ndarray:
    return column.cast(pa.float64()).to_numpy()


def statement_of(output: Path) -> dict:
    return json.loads(Path(f"{output}.privacy.json").read_text(encoding="utf-8"))


def test_the_total_is_told_with_its_standard_error(tmp_path: Path, capsys) -> None:
    source, output = write(tmp_path / "labels.csv", table()), tmp_path / "noisy.csv"
    randomize(source, output, *REGRESSION, "--epsilon", 2, "--insecure-seed", 4)
    told = statement_of(output)["total"]
    words = f"{told['estimate']:.6g} (standard error {told['standard_error']:.2g})"
    assert f"total of the true labels, estimated from the noisy ones: {words}" in (
        capsys.readouterr().out
    )
    assert abs(told["estimate"] - AMOUNTS.sum()) < 4.0 * told["standard_error"]
    assert 0.0 < told["standard_error"] < 0.1 * AMOUNTS.sum()


@pytest.mark.parametrize("suffix", ["csv", "csv.gz", "parquet"])
def test_regression_leaves_ids_and_few_bins(source: Path, tmp_path: Path, suffix: str) -> None:
    output = tmp_path / f"noisy.{suffix}"
    noisy = randomize(source, output, *REGRESSION, "--epsilon", 2, "--insecure-seed", 0)
    statement = statement_of(output)
    assert noisy.column_names == ["ID", "amount"]
    assert noisy["ID"].to_pylist() == IDS
    values = numbers(noisy["amount"])
    # Nothing but the bins comes out, of which there are far fewer than labels.
    assert set(values) <= set(statement["outputs"])
    assert len(statement["outputs"]) < 40 < len(set(AMOUNTS)) / 10
    # The draw follows its channel: a chi-square test of the labels' bins against the outputs.
    mechanism = deserialize(statement["mechanism"])
    assert isinstance(mechanism, RROnBins)
    expected = mechanism.likelihood(mechanism.outputs, np.minimum(AMOUNTS, 400.0)).sum(axis=1)
    counts = np.array([(values == y).sum() for y in mechanism.outputs])
    assert counts.sum() == N
    assert stats.chisquare(counts, expected * N / expected.sum()).pvalue > 1e-6


@pytest.mark.parametrize("suffix", ["csv", "csv.gz", "parquet"])
def test_classification_keeps_labels_as_often_as_it_says(
    source: Path, tmp_path: Path, suffix: str
) -> None:
    output = tmp_path / f"noisy.{suffix}"
    noisy = randomize(source, output, *CLASSES, "--epsilon", 1, "--insecure-seed", 0)
    assert noisy.column_names == ["ID", "bought"]
    assert noisy["ID"].to_pylist() == IDS
    values = numbers(noisy["bought"]).astype(int)
    kept = int((values == BOUGHT).sum())
    keeps = np.exp(1) / (1 + np.exp(1))
    assert stats.binomtest(kept, N, keeps).pvalue > 1e-6
    assert stats.binomtest(kept, N, keeps + 0.1).pvalue < 1e-6
    if suffix == "parquet":
        assert noisy.schema.field("bought").type == pa.int64()


def test_parquet_keeps_the_types_of_ids_and_nothing_of_the_schema(tmp_path: Path) -> None:
    ids = pa.array([2**53 + 1, 2**63 - 1, -(2**63), None], pa.int64())
    content = pa.table({"id": ids, "when": pa.array([1, 2, 3, 4], pa.timestamp("ms"))})
    content = content.append_column(
        pa.field("y", pa.int32(), metadata={"secret": "0110"}), pa.array([0, 1, 1, 0], pa.int32())
    ).replace_schema_metadata({"secret": "0110"})
    source = write(tmp_path / "t.parquet", content)
    options = ("--column", "y", "--task", "classification", "--num-classes", 2, "--epsilon", 1)
    noisy = randomize(source, tmp_path / "n.parquet", *options, "--id", "when", "--id", "id")
    assert noisy.column_names == ["when", "id", "y"]
    assert noisy.select(["when", "id"]).equals(content.select(["when", "id"]))
    assert b"0110" not in (tmp_path / "n.parquet").read_bytes()
    text = randomize(source, tmp_path / "n.csv", *options, "--id", "id")
    assert text["id"].to_pylist() == [str(2**53 + 1), str(2**63 - 1), str(-(2**63)), ""]


def test_no_other_column_is_copied(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    content = table().append_column("amount_again", pa.array(AMOUNTS))
    source = write(tmp_path / "t.csv", content)
    noisy = randomize(source, tmp_path / "n.csv", *REGRESSION, "--epsilon", 1)
    assert noisy.column_names == ["ID", "amount"]
    told = capsys.readouterr().err
    assert "ids copied from 'ID'" in told
    assert "left out besides the labels 'amount': 'user', 'bought', 'amount_again'" in told


def test_a_column_with_a_dot_does_not_come_along(tmp_path: Path) -> None:
    """Parquet readers take "a" for "a.b" too."""
    columns = {"id.y": AMOUNTS, "y.a": AMOUNTS, "id": IDS, "y": BOUGHT, "y.z": AMOUNTS}
    source = write(tmp_path / "t.parquet", pa.table(columns))
    options = ("--column", "y", "--task", "classification", "--num-classes", 2, "--epsilon", 99)
    noisy = randomize(source, tmp_path / "n.parquet", *options)
    assert noisy.column_names == ["id", "y"]
    assert noisy.to_pydict() == {"id": IDS, "y": BOUGHT.tolist()}


def test_row_numbers_where_there_is_no_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_randomize, "_ROWS", 700)
    source = write(tmp_path / "t.csv", pa.table({"amount": AMOUNTS}))
    noisy = randomize(source, tmp_path / "n.parquet", *REGRESSION, "--epsilon", 1)
    assert noisy.column_names == ["row", "amount"]
    assert noisy["row"].to_pylist() == list(range(N))


def test_output_column_has_its_name(tmp_path: Path) -> None:
    source = write(tmp_path / "t.csv", table())
    options = (*REGRESSION, "--epsilon", 1, "--output-column", 'noisy, "amount"')
    randomize(source, tmp_path / "n.csv", *options)
    assert (tmp_path / "n.csv").read_text().startswith('ID,"noisy, ""amount"""\n')
    assert statement_of(tmp_path / "n.csv")["noisy_label_column"] == 'noisy, "amount"'


@pytest.mark.parametrize("suffix", ["csv", "parquet"])
def test_named_classes(tmp_path: Path, suffix: str) -> None:
    names = np.array(["no", "yes, gladly", "naïve"])
    labels = names[RNG.integers(0, 3, N)]
    source = write(tmp_path / f"t.{suffix}", pa.table({"id": IDS, "answer": labels}))
    options = ("--column", "answer", "--task", "classification", "--epsilon", 1)
    options = (*options, "--insecure-seed", 0)
    noisy = randomize(source, tmp_path / f"n.{suffix}", *options, "--classes", *names)
    values = np.array(noisy["answer"].to_pylist())
    kept = int((values == labels).sum())
    assert set(values) == set(names)
    assert stats.binomtest(kept, N, np.exp(1) / (2 + np.exp(1))).pvalue > 1e-6
    assert statement_of(tmp_path / f"n.{suffix}")["classes"] == list(names)


@pytest.mark.parametrize(
    ("column", "names"),
    [
        (pa.array([True, False, True]), ("false", "true")),
        (pa.array([10, 20, 10]), ("10", "20")),
        (pa.array(["a", "b", "a"]).dictionary_encode(), ("a", "b")),
    ],
)
def test_parquet_columns_that_name_classes(
    tmp_path: Path, column: pa.Array, names: tuple[str, str]
) -> None:
    source = write(tmp_path / "t.parquet", pa.table({"y": column}))
    options = ("--column", "y", "--task", "classification", "--epsilon", 99, "--classes", *names)
    noisy = randomize(source, tmp_path / "n.parquet", *options)
    assert noisy["y"].to_pylist() == [str(v).lower() for v in column.to_pylist()]


@pytest.mark.parametrize("type_name", ["int8", "uint64", "float", "halffloat", "decimal128"])
def test_parquet_columns_that_hold_numbers(tmp_path: Path, type_name: str) -> None:
    kind = pa.decimal128(9, 2) if type_name == "decimal128" else pa.type_for_alias(type_name)
    column = pa.array([0.0, 1.0, 2.0]).cast(kind)
    source = write(tmp_path / "t.parquet", pa.table({"y": column}))
    options = ("--column", "y", "--task", "regression", "--low", 0, "--high", 2, "--epsilon", 99)
    noisy = randomize(source, tmp_path / "n.parquet", *options, "--mechanism", "discrete_laplace")
    assert noisy["y"].to_pylist() == [0.0, 1.0, 2.0]


AWKWARD = [
    "007", "a,b", 'say ""', '"', "line\nbreak", "cr\rlf\r\n", "ünïcode 数", "", " space ", "NULL",
    str(2**64), "1e5", "-0", "'", "#N/A", "\t", "=1+1",
]  # fmt: skip


@pytest.mark.parametrize("suffix", ["csv", "csv.gz", "parquet"])
@pytest.mark.parametrize("from_suffix", ["csv", "parquet"])
def test_awkward_ids_come_back_unchanged(tmp_path: Path, suffix: str, from_suffix: str) -> None:
    content = pa.table({"id": AWKWARD, "y": [0, 1] * 8 + [0]})
    source = write(tmp_path / f"t.{from_suffix}", content)
    options = ("--column", "y", "--task", "classification", "--num-classes", 2, "--epsilon", 1)
    noisy = randomize(source, tmp_path / f"n.{suffix}", *options)
    assert noisy["id"].to_pylist() == AWKWARD


def test_only_cells_that_need_quotes_get_them(tmp_path: Path) -> None:
    source = tmp_path / "t.csv"
    source.write_text('id,y\n007,0\n"a,b",1\n"plain",1\n')
    options = ("--column", "y", "--task", "classification", "--num-classes", 2, "--epsilon", 99)
    randomize(source, tmp_path / "n.csv", *options)
    assert (tmp_path / "n.csv").read_text() == 'id,y\n007,0\n"a,b",1\nplain,1\n'


@pytest.mark.parametrize("suffix", ["csv", "parquet"])
def test_any_size_of_chunks_gives_the_same_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, suffix: str
) -> None:
    lines = [f'{i},"id\n{i}",{a}' for i, a in enumerate(AMOUNTS)]
    source = tmp_path / "t.csv"
    source.write_text("\n".join(["x,id,amount", *lines]) + "\n")
    if suffix == "parquet":
        source = write(
            tmp_path / "t.parquet",
            read(source).cast(
                pa.schema([("x", pa.string()), ("id", pa.string()), ("amount", pa.float64())])
            ),
        )
    options = (*REGRESSION, "--epsilon", 1, "--insecure-seed", 3)
    large = randomize(source, tmp_path / f"large.{suffix}", *options)
    monkeypatch.setattr(_tables, "_BLOCK_BYTES", 100)
    monkeypatch.setattr(_randomize, "_ROWS", 50)
    small = randomize(source, tmp_path / f"small.{suffix}", *options)
    assert small.equals(large)
    assert small["id"].to_pylist() == [f"id\n{i}" for i in range(N)]


def test_empty_lines_are_no_rows_beside_other_columns(tmp_path: Path) -> None:
    source = tmp_path / "t.csv"
    source.write_text("id,y\r\na,0\r\n\r\nb,1\r\n\r\n")
    options = ("--column", "y", "--task", "classification", "--num-classes", 2, "--epsilon", 99)
    noisy = randomize(source, tmp_path / "n.csv", *options)
    assert noisy.to_pydict() == {"id": ["a", "b"], "y": ["0", "1"]}


def test_statement_is_complete(tmp_path: Path) -> None:
    output = tmp_path / "n.csv"
    noisy = randomize(
        write(tmp_path / "t.csv", table()), output, *REGRESSION, "--epsilon", 1,
        "--prior-epsilon", 0.25, "--max-values", 101, "--loss", "absolute_error",
    )  # fmt: skip
    statement = statement_of(output)
    guarantee = PrivacyGuarantee.from_json(json.dumps(statement["guarantee"]))
    assert (guarantee.epsilon, guarantee.delta, guarantee.is_private) == (1.0, 0.0, True)
    assert json.loads(guarantee.to_json()) == statement["guarantee"]
    assert statement["statement"] == str(guarantee).splitlines()
    assert {"public-rows", "public-settings"} <= {one.code for one in guarantee.assumptions}
    assert statement["epsilon"] == {"total": 1.0, "prior": 0.25, "draw": 0.75}
    assert statement["loss"] == "absolute_error"
    assert statement["label_range"] == [0.0, 400.0]
    assert (statement["rows"], statement["id_columns"]) == (N, ["ID"])
    prior = statement["prior"]
    assert prior["source"] == "private histogram"
    assert len(prior["values"]) == len(prior["probabilities"]) == 101
    # All that the features party needs for the posterior mean is there.
    means = posterior(
        deserialize(statement["mechanism"]),
        numbers(noisy["amount"]),
        Priors(prior["probabilities"], values=prior["values"]),
    )
    assert means.shape == (N,) and 0.0 <= means.min() <= means.max() <= 400.0


def test_clipping_is_not_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whether a label had to be clipped depends on the labels, so nothing says that any was."""
    monkeypatch.setattr(_randomize, "_PATIENCE", 1e9)  # however slow the machine is
    told = []
    for top, options in ((400.0, ()), (9e9, ("--clip",))):
        folder = tmp_path / str(top)
        folder.mkdir()
        labels = np.where(np.arange(N) == 7, top, AMOUNTS)
        source = write(folder / "t.csv", pa.table({"id": IDS, "amount": labels}))
        options = (*REGRESSION, *options, "--epsilon", 1, "--insecure-seed", 1)
        randomize(source, folder / "n.csv", *options)
        captured = capsys.readouterr()
        told.append((
            (captured.out + captured.err).replace(str(folder), ""),
            (folder / "n.csv").read_text(),
            without_names((folder / "n.csv.privacy.json").read_text()),
        ))  # fmt: skip
    assert told[0] == told[1]


def without_names(statement: str) -> str:
    """Gives a statement without what is random, or the time, in its receipts, after a look at it.

    A digest is of the other entries, and so says nothing more; that of all is of the receipts too.
    """
    content = json.loads(statement)
    assert re.fullmatch("[0-9a-f]{64}", content.pop("digest"))
    random = (("id", 32), ("digest", 64))
    assert len(content["receipts"]) == 2
    assert content.pop("prior_receipts") == [content["receipts"][0]["id"]]
    # The bins are made of the release of the prior.
    assert content["mechanism"]["receipts"] == content["receipts"][:1]
    del content["mechanism"]["receipts"]
    for receipt in content["receipts"]:
        found = [(receipt.pop(name), length) for name, length in random]
        found.append((receipt["labels"].pop("name"), 32))
        for text, length in found:
            assert re.fullmatch(f"[0-9a-f]{{{length}}}", text)
        assert datetime.datetime.fromisoformat(receipt.pop("time")).utcoffset() is not None
    return json.dumps(content)


@pytest.mark.parametrize(
    "name", ["laplace", "discrete_laplace", "staircase", "discrete_staircase", "exponential"]
)
def test_baselines(tmp_path: Path, name: str) -> None:
    output = tmp_path / "n.csv"
    source = write(tmp_path / "t.csv", pa.table({"id": IDS, "amount": AMOUNTS.round()}))
    options = (*REGRESSION, "--mechanism", name, "--epsilon", 3, "--insecure-seed", 0)
    noisy = randomize(source, output, *options)
    values = numbers(noisy["amount"])
    assert 0.0 <= values.min() <= values.max() <= 400.0
    assert np.corrcoef(values, AMOUNTS)[0, 1] > 0.1
    statement = statement_of(output)
    assert statement["mechanism"]["class_name"].lower() == f"{name.replace('_', '')}mechanism"
    assert statement["epsilon"] == {"total": 3.0, "prior": 0.0, "draw": 3.0}
    assert statement["prior"] is None


def json_prior(**content: object) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        (folder / "prior.json").write_text(json.dumps(content))
        return folder / "prior.json"

    return make


def csv_prior(text: str) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        (folder / "prior.csv").write_text(text)
        return folder / "prior.csv"

    return make


@pytest.mark.parametrize("form", ["json", "csv"])
def test_public_prior_for_regression_costs_nothing(tmp_path: Path, form: str) -> None:
    # Unordered, and without the ends of the range.
    values, probabilities = [300, 10, 100], [0.2, 0.5, 0.3]
    if form == "json":
        prior = json_prior(values=values, probabilities=probabilities)(tmp_path)
    else:
        rows = "".join(f"{v},{p}\n" for v, p in zip(values, probabilities, strict=True))
        prior = csv_prior("value,probability\n" + rows)(tmp_path)
    output = tmp_path / "n.csv"
    noisy = randomize(
        write(tmp_path / "t.csv", table()), output, *REGRESSION, "--prior", prior, "--epsilon", 2
    )
    statement = statement_of(output)
    assert statement["epsilon"] == {"total": 2.0, "prior": 0.0, "draw": 2.0}
    assert statement["guarantee"]["epsilon"] == 2.0
    assert statement["prior"] == {
        "source": "public",
        "values": [0.0, 10.0, 100.0, 300.0, 400.0],
        "probabilities": [0.0, 0.5, 0.3, 0.2, 0.0],
    }
    assert set(numbers(noisy["amount"])) == set(statement["outputs"])


@pytest.mark.parametrize("form", ["list", "json", "csv"])
def test_public_prior_for_classification(tmp_path: Path, form: str) -> None:
    """A prior that rules a class out: RRWithPrior never answers it."""
    labels = RNG.integers(0, 3, N)
    source = write(tmp_path / "t.csv", pa.table({"y": labels}))
    prior = tmp_path / ("p.csv" if form == "csv" else "p.json")
    prior.write_text({
        "list": "[0.5, 0.5, 0.0]",
        "json": '{"probabilities": [0.5, 0.5, 0.0]}',
        "csv": "class,probability\n2,0\n0,0.5\n1,0.5\n",
    }[form])  # fmt: skip
    options = ("--column", "y", "--task", "classification", "--num-classes", 3, "--epsilon", 1)
    noisy = randomize(source, tmp_path / "n.csv", *options, "--prior", prior, "--insecure-seed", 0)
    values = numbers(noisy["y"]).astype(int)
    statement = statement_of(tmp_path / "n.csv")
    assert set(values) == {0, 1} and statement["outputs"] == [0, 1]
    assert statement["mechanism"]["class_name"] == "RRWithPrior"
    assert statement["prior"] == {"source": "public", "probabilities": [0.5, 0.5, 0.0]}
    kept = int((values[labels < 2] == labels[labels < 2]).sum())
    keeps = np.exp(1) / (1 + np.exp(1))
    assert stats.binomtest(kept, int((labels < 2).sum()), keeps).pvalue > 1e-6


def test_a_seed_repeats_and_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = write(tmp_path / "t.csv", table())
    options = (*REGRESSION, "--epsilon", 1)
    first = randomize(source, tmp_path / "a.csv", *options, "--insecure-seed", 4)
    assert "NOT PRIVATE: seeded" in capsys.readouterr().out
    assert first.equals(randomize(source, tmp_path / "b.csv", *options, "--insecure-seed", 4))
    assert not first.equals(randomize(source, tmp_path / "c.csv", *options, "--insecure-seed", 5))
    assert not first.equals(randomize(source, tmp_path / "d.csv", *options))
    statement = statement_of(tmp_path / "a.csv")
    assert statement["statement"][0].startswith("NOT PRIVATE: seeded")
    assert statement["guarantee"]["seeded"] and not statement["guarantee"]["private"]
    assert statement_of(tmp_path / "d.csv")["guarantee"]["private"]


def test_quiet_says_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = write(tmp_path / "t.csv", table())
    randomize(source, tmp_path / "n.csv", *REGRESSION, "--epsilon", 1, "--quiet")
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", "")


@pytest.mark.parametrize("suffix", ["csv", "parquet"])
def test_parquet_ids_in_dictionaries(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, suffix: str
) -> None:
    monkeypatch.setattr(_randomize, "_ROWS", 100)
    ids = pa.array([f"u{i // 7}" for i in range(N)]).dictionary_encode()
    source = write(tmp_path / "t.parquet", pa.table({"id": ids, "amount": AMOUNTS}))
    noisy = randomize(source, tmp_path / f"n.{suffix}", *REGRESSION, "--epsilon", 1)
    assert noisy["id"].to_pylist() == ids.to_pylist()


def test_loads_no_tensorflow(tmp_path: Path, in_process: Callable[..., tuple[int, str]]) -> None:
    source = write(tmp_path / "t.csv", table())
    program = (
        "import json, sys\n"
        "from tf_labeldp.cli import main\n"
        "for arguments in json.loads(sys.argv[1]):\n"
        "    assert main(arguments) == 0\n"
        "print(json.dumps([name.partition('.')[0] for name in sys.modules]))\n"
    )
    commands = [
        ["randomize", str(source), *task, "--epsilon", "1", "--output", str(tmp_path / output)]
        for task, output in ((REGRESSION, "r.csv"), (CLASSES, "c.csv"))
    ]
    code, told = in_process(program, json.dumps(commands))
    assert code == 0, told
    loaded = set(json.loads(told.splitlines()[-1]))
    assert "pyarrow" in loaded
    assert not loaded & {"tensorflow", "keras"}
