"""`NoisyLabels.load` reads the output of `tf-labeldp randomize`, and refuses edits."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import csv, parquet

from tf_labeldp.accounting import PrivacyGuarantee, ReceiptError, Receipts
from tf_labeldp.cli import main
from tf_labeldp.dossier import verify
from tf_labeldp.mechanisms import RandomizedResponse, RROnBins, RRWithPrior
from tf_labeldp.vault import LabelRandomizer, NoisyLabels, Numbers, PrivateLabels

N = 2000
RNG = np.random.default_rng(11)
AMOUNTS = np.round(np.minimum(RNG.exponential(60.0, N), 400.0), 3)
CODES = RNG.choice(4, N, p=[0.5, 0.3, 0.15, 0.05])
NAMES = ("no", 'yes, "gladly"', "naïve\nline", "")
FORMATS = ("csv", "csv.gz", "parquet")
EPSILON = 1.25
CLASSES = ("--task", "classification", "--column")
TASKS: dict[str, tuple[str, ...]] = {
    "amount": ("--column", "amount", "--task", "regression", "--low", "0", "--high", "400"),
    "code": (*CLASSES, "code", "--num-classes", "4"),
    "name": (*CLASSES, "name", "--classes", *NAMES),
}
PRIORS = {
    "amount": {"values": [0, 10, 50, 120, 400], "probabilities": [0.1, 0.3, 0.3, 0.2, 0.1]},
    "code": [0.5, 0.3, 0.15, 0.05],
    "name": [0.5, 0.3, 0.15, 0.05],
}


class Tables:
    """Tables with noisy labels of the same true labels, drawn at their first use."""

    def __init__(self, folder):
        self.folder = folder
        self._paths: dict[tuple[object, ...], Path] = {}
        ids = [f"{i:05d}" for i in RNG.permutation(N)]
        columns = {"id": ids, "pair": [i // 2 for i in range(N)], "amount": AMOUNTS, "code": CODES}
        columns["name"] = np.array(NAMES)[CODES]
        parquet.write_table(pa.table(columns), folder / "labels.parquet")
        for task, prior in PRIORS.items():
            (folder / f"{task}.json").write_text(json.dumps(prior))

    def new(self, output, task, *options):
        """Runs the command, and returns the path of its table."""
        common = ["--epsilon", str(EPSILON), "--output", str(output), "--quiet"]
        more = [str(self.folder / f"{task}.json") if word == "PRIOR" else word for word in options]
        labels = str(self.folder / "labels.parquet")
        assert main(["randomize", labels, *common, *more, *TASKS[task]]) == 0
        return output

    def shared(self, task, suffix, *options):
        """Returns the path of a table that no test may change."""
        case = (task, suffix, options)
        if case not in self._paths:
            place = self.folder / str(len(self._paths))
            place.mkdir()
            self._paths[case] = self.new(place / f"noisy.{suffix}", task, *options)
        return self._paths[case]

    def copy(self, folder, *case):
        """Returns the path of a copy of a table and its statement."""
        table = self.shared(*case)
        shutil.copy(statement_path(table), folder)
        return Path(shutil.copy(table, folder))


@pytest.fixture(scope="session")
def tables(tmp_path_factory):
    return Tables(tmp_path_factory.mktemp("tables"))


def statement_path(table):
    return table.with_name(f"{table.name}.privacy.json")


def statement_of(table):
    return json.loads(statement_path(table).read_text(encoding="utf-8"))


def cells(table, column):
    """Reads a column of a table as text, without the library."""
    if table.suffix == ".parquet":
        return [str(cell) for cell in parquet.read_table(table)[column].to_pylist()]
    options = csv.ConvertOptions(column_types={column: pa.string()}, include_columns=[column])
    parse = csv.ParseOptions(newlines_in_values=True)
    return csv.read_csv(table, parse_options=parse, convert_options=options)[column].to_pylist()


@pytest.mark.parametrize("prior", [(), ("--prior", "PRIOR")], ids=["", "prior"])
@pytest.mark.parametrize("suffix", FORMATS)
@pytest.mark.parametrize("task", TASKS)
def test_the_table_and_its_statement_are_loaded(tables, task, suffix, prior):
    table = tables.shared(task, suffix, *prior)
    noisy, statement, text = NoisyLabels.load(table), statement_of(table), cells(table, task)
    if task == "name":
        assert noisy.classes == NAMES and noisy.decode().tolist() == text
        assert noisy.values.tolist() == [NAMES.index(cell) for cell in text]
    else:
        assert noisy.classes is None and noisy.values.dtype == (int if task == "code" else float)
        values = [float(cell) for cell in text]
        assert noisy.decode().tolist() == noisy.values.tolist() == values
    assert len(set(text)) > 1 and not noisy.values.flags.writeable
    assert noisy.indices.tolist() == list(range(N))

    guarantee = noisy.guarantee()
    assert guarantee == PrivacyGuarantee.from_json(json.dumps(statement["guarantee"]))
    assert str(guarantee).splitlines() == statement["statement"]
    assert (guarantee.epsilon, guarantee.delta, guarantee.num_units) == (EPSILON, 0.0, N)
    assert [item.to_json() for item in noisy.receipts] == statement["receipts"]
    assert [item.to_json() for item in noisy.assumptions] == statement["assumptions"]
    assert len(noisy.assumptions) == 4  # rows, settings, other draws, range or classes
    # The histogram of numbers has its own receipt; a public prior costs nothing.
    private = task == "amount" and not prior
    assert [item.kind for item in noisy.receipts] == ["release", "draw"][not private :]
    spent = [item.charge.epsilon for item in noisy.receipts]
    assert spent == pytest.approx([statement["epsilon"]["prior"]] * private + [
        statement["epsilon"]["draw"]])  # fmt: skip
    assert math.fsum(spent) == pytest.approx(EPSILON, rel=1e-12)
    if task != "amount":
        assert noisy.mechanism == (RRWithPrior if prior else RandomizedResponse)(EPSILON, 4)
    if prior and task != "amount":
        np.testing.assert_allclose(np.asarray(noisy.priors), PRIORS["code"], rtol=1e-12)
    if task == "amount":
        assert isinstance(noisy.mechanism, RROnBins) and noisy.priors is not None
        assert list(noisy.mechanism.outputs) == statement["outputs"]
        assert np.asarray(noisy.priors.values).tolist() == statement["prior"]["values"]
        # Labels drawn with a loaded private prior carry its receipt.
        own = [item.id for item in noisy.receipts[:-1]]
        assert [item.id for item in noisy.priors.receipts] == own


def test_remarks_and_seeds_are_loaded(tables):
    seeded = NoisyLabels.load(tables.shared("amount", "csv", "--insecure-seed", "3")).guarantee()
    assert seeded.seeded and seeded.headline.startswith("NOT PRIVATE: seeded")
    pairs = NoisyLabels.load(tables.shared("code", "csv", "--id", "pair"))
    assert len(pairs.assumptions) == 5
    assert "rows-per-id" in {note.code for note in pairs.guarantee().assumptions}


def test_receipts_are_those_of_the_vault_and_count_once(tables, tmp_path):
    """Loaded labels and the vault of the same store share their charges."""
    (tmp_path / "public").mkdir()
    store = str(tmp_path / "store")
    table = tables.new(tmp_path / "public" / "noisy.csv", "amount", "--store", store)
    noisy = NoisyLabels.load(table)
    vault = PrivateLabels(AMOUNTS, Numbers(0, 400), store=store)
    again = vault.randomize(LabelRandomizer(EPSILON))
    np.testing.assert_array_equal(again.values, noisy.values)
    np.testing.assert_array_equal(again.posterior(), noisy.posterior())
    np.testing.assert_array_equal(again.debiased(), noisy.debiased())
    assert [item.id for item in noisy.receipts] == [item.id for item in vault.receipts]
    assert Receipts([*noisy.receipts, *vault.receipts]).guarantee().epsilon == EPSILON
    # Another draw of the same labels is another charge.
    other = NoisyLabels.load(tables.shared("amount", "csv"))
    together = Receipts([*noisy.receipts, *other.receipts]).guarantee()
    assert together.epsilon == pytest.approx(2 * EPSILON, rel=1e-12)


@pytest.mark.parametrize("suffix", [*FORMATS, "CSV", "CSV.GZ", "Parquet"])
def test_awkward_tables_load(tmp_path, suffix):
    """Names that look empty, long ids, and a dot: Parquet readers take "a" for "a.b" too."""
    names = ["NULL", "", "nan", "#N/A", "007", " space ", "cr\r\nlf", "\t", "-"]
    codes = np.arange(N) % len(names)
    labels, output = tmp_path / "labels.parquet", tmp_path / f"noisy.{suffix}"
    ids = ["x" * 1_500_000, *(f"a\n{i}" for i in range(1, N))]
    parquet.write_table(pa.table({"y.z": ids, "label": np.array(names)[codes]}), labels)
    options = [*CLASSES, "label", "--id", "y.z", "--output-column", "y", "--quiet"]
    command = ["randomize", str(labels), "--epsilon", "99", *options, "--output", str(output)]
    assert main([*command, "--classes", *names]) == 0
    start = {"csv": b"y.z,", "csv.gz": b"\x1f\x8b", "parquet": b"PAR1"}[suffix.lower()]
    assert output.read_bytes().startswith(start)
    noisy = NoisyLabels.load(output)
    assert noisy.values.tolist() == codes.tolist() and noisy.classes == tuple(names)
    found = verify(output)
    assert found.problems == found.not_checked == ()


@pytest.mark.parametrize("suffix", FORMATS)
@pytest.mark.parametrize("task", TASKS)
def test_an_untouched_table_is_verified(tables, tmp_path, task, suffix):
    found = verify(tables.copy(tmp_path, task, suffix))
    assert found.problems == found.not_checked == ()


@pytest.mark.parametrize("missing", ["noisy.csv", "noisy.csv.privacy.json"])
def test_the_error_names_the_file_that_is_missing(tables, tmp_path, missing):
    table = tables.copy(tmp_path, "code", "csv")
    (tmp_path / missing).unlink()
    with pytest.raises(FileNotFoundError, match=rf"{missing}(?!\.?\w)"):
        NoisyLabels.load(table)


def rewrite(table, values, kind, column):
    content = pa.table({"id": [str(i) for i in range(len(values))], column: pa.array(values, kind)})
    if table.suffix == ".parquet":
        parquet.write_table(content, table)
    else:
        # Without quotes Arrow writes an empty text like a missing one.
        with pa.output_stream(str(table)) as file:
            csv.write_csv(content, file, csv.WriteOptions(quoting_style="all_valid"))


@pytest.mark.parametrize("suffix", FORMATS)
@pytest.mark.parametrize("task", TASKS)
def test_an_edited_or_damaged_table_is_refused(tables, tmp_path, task, suffix):
    table = tables.copy(tmp_path, task, suffix, "--prior", "PRIOR")
    column, whole = statement_of(table)["noisy_label_column"], table.read_bytes()
    kind, values = pa.string(), cells(table, column)
    if suffix == "parquet":
        kind = parquet.read_schema(table).field(column).type
        values = parquet.read_table(table)[column].to_pylist()
    rewrite(table, values, kind, column)
    assert len(NoisyLabels.load(table)) == N  # another file of the same content is as good
    other = next(value for value in values if value != values[0])
    edits: list[list[Any]] = [[other, *values[1:]], values[::-1], values[:-1], [*values, other]]
    for edited in [*edits, [None, *values[1:]]]:
        rewrite(table, edited, kind, column)
        with pytest.raises(ReceiptError, match="damaged or edited"):
            NoisyLabels.load(table)
    for damage in (
        lambda: table.write_bytes(whole[:-40]),
        lambda: table.write_bytes(b""),
        lambda: rewrite(table, ["1"] * N, pa.string(), "other"),
        lambda: rewrite(table, ["what"] * N, pa.string(), column),
    ):
        damage()
        with pytest.raises(ReceiptError, match="damaged or edited"):
            NoisyLabels.load(table)


@pytest.mark.parametrize(
    ("task", "options"),
    [("amount", ("--max-values", "8")), ("name", ()), ("code", ("--prior", "PRIOR"))],
    ids=["numbers", "names", "prior"],
)
def test_an_edit_of_any_field_is_refused(tables, tmp_path, task, options, unnoticed_edits):
    """The smallest change of each number, text, list and entry, at any depth."""
    table = tables.copy(tmp_path, task, "csv", *options)
    assert unnoticed_edits(statement_path(table), lambda: NoisyLabels.load(table), 120) == []


def test_statements_of_another_run_or_version_are_refused(tables, tmp_path):
    table = tables.copy(tmp_path, "code", "csv")
    statement = statement_of(table)
    # Version 0.1.0 had no receipts.
    old = {"made_by": "tf-labeldp 0.1.0 randomize", "guarantee": statement["guarantee"]}
    new = {**statement, "format": 2, "made_by": "tf-labeldp 9.9 randomize"}
    another = statement_of(tables.new(tmp_path / "second.csv", "code"))
    for content, message in (
        (json.dumps(old), r"tf-labeldp 0\.1\.0"),
        (json.dumps(new), r"newer version of tf-labeldp \(tf-labeldp 9\.9 randomize\)"),
        (json.dumps(another), "damaged or edited"),
        *((text, "damaged or edited") for text in ("", "[]", "{}", "{", '"text"', "\ufffd")),
    ):
        statement_path(table).write_text(content, encoding="utf-8")
        with pytest.raises(ReceiptError, match=message):
            NoisyLabels.load(table)
    statement_path(table).write_bytes(json.dumps(statement).encode("utf-16"))
    with pytest.raises(ReceiptError, match="damaged or edited"):
        NoisyLabels.load(table)
