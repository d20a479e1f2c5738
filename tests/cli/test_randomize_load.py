"""`NoisyLabels.load` reads what `tf-labeldp randomize` writes, and refuses what was edited."""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import csv, parquet

from tf_labeldp.accounting import PrivacyGuarantee, ReceiptError
from tf_labeldp.accounting.receipts import compose_receipts
from tf_labeldp.cli import main
from tf_labeldp.mechanisms import RandomizedResponse, RROnBins, RRWithPrior
from tf_labeldp.vault import LabelRandomizer, NoisyLabels, PrivateLabels

ROOT = Path(__file__).parents[2]
N = 2000
RNG = np.random.default_rng(11)
AMOUNTS = np.round(np.minimum(RNG.exponential(60.0, N), 400.0), 3)
CODES = RNG.choice(4, N, p=[0.5, 0.3, 0.15, 0.05])
NAMES = ("no", 'yes, "gladly"', "naïve\nline", "")
IDS = [f"{i:05d}" for i in RNG.permutation(N)]
FORMATS = ("csv", "csv.gz", "parquet")
EPSILON = 1.25
SEEDED = ("--insecure-seed", "3")

TASKS: dict[str, tuple[str, ...]] = {
    "numbers": ("--column", "amount", "--task", "regression", "--low", "0", "--high", "400"),
    "whole numbers": ("--column", "whole", "--task", "regression", "--low", "0", "--high", "400"),
    "codes": ("--column", "code", "--task", "classification", "--num-classes", "4"),
    "names": ("--column", "name", "--task", "classification", "--classes", *NAMES),
}
COLUMN = {"numbers": "amount", "codes": "code", "names": "name"}
BASELINES = ("laplace", "discrete_laplace", "staircase", "exponential")
NUMBER_PRIOR = {"values": [0, 10, 50, 120, 400], "probabilities": [0.1, 0.3, 0.3, 0.2, 0.1]}
CLASS_PRIOR = [0.5, 0.3, 0.15, 0.05]
PRIORS = {"without prior": False, "public prior": True}


class Tables:
    """Tables that the command made of the same labels, each when it is first asked for."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._made: dict[tuple[object, ...], Path] = {}
        columns = {
            "user": ["x"] * N,
            "id": IDS,
            "pair": [i // 2 for i in range(N)],
            "amount": AMOUNTS,
            "whole": AMOUNTS.round(),
            "code": CODES,
            "name": np.array(NAMES)[CODES],
        }
        parquet.write_table(pa.table(columns), folder / "labels.parquet")
        (folder / "numbers.json").write_text(json.dumps(NUMBER_PRIOR))
        (folder / "classes.json").write_text(json.dumps(CLASS_PRIOR))

    def new(self, output: Path, task: str, *options: str, prior: bool = False) -> Path:
        """Runs the command, which must succeed, and gives the path of its table."""
        file = self.folder / ("numbers.json" if task == "numbers" else "classes.json")
        given = ["--prior", str(file)] if prior else []
        common = ["--epsilon", str(EPSILON), "--output", str(output), "--quiet", *given]
        labels = str(self.folder / "labels.parquet")
        assert main(["randomize", labels, *common, *options, *TASKS[task]]) == 0
        return output

    def made(self, task: str, suffix: str, *options: str, prior: bool = False) -> Path:
        """Gives the path of a table that all tests share, and so none may change."""
        asked = (task, suffix, options, prior)
        if asked not in self._made:
            place = self.folder / str(len(self._made))
            place.mkdir()
            self._made[asked] = self.new(place / f"noisy.{suffix}", task, *options, prior=prior)
        return self._made[asked]


@pytest.fixture(scope="session")
def tables(tmp_path_factory: pytest.TempPathFactory) -> Tables:
    return Tables(tmp_path_factory.mktemp("tables"))


def copied(table: Path, folder: Path) -> Path:
    """Gives the path of a copy of a table and its statement, which a test may change."""
    shutil.copy(statement_path(table), folder)
    return Path(shutil.copy(table, folder))


def statement_path(table: Path) -> Path:
    return table.with_name(f"{table.name}.privacy.json")


def statement_of(table: Path) -> dict[str, Any]:
    return json.loads(statement_path(table).read_text(encoding="utf-8"))


def cells(table: Path, column: str) -> list[str]:
    """Gives a column of a table as text, read without the library."""
    if table.suffix == ".parquet":
        return [str(cell) for cell in parquet.read_table(table)[column].to_pylist()]
    options = csv.ConvertOptions(column_types={column: pa.string()}, include_columns=[column])
    parse = csv.ParseOptions(newlines_in_values=True)
    return csv.read_csv(table, parse_options=parse, convert_options=options)[column].to_pylist()


@pytest.mark.parametrize("prior", PRIORS)
@pytest.mark.parametrize("suffix", FORMATS)
@pytest.mark.parametrize("task", COLUMN)
def test_what_is_in_the_table_is_loaded(tables: Tables, task: str, suffix: str, prior: str) -> None:
    table = tables.made(task, suffix, prior=PRIORS[prior])
    noisy = NoisyLabels.load(table)
    text = cells(table, COLUMN[task])
    if task == "numbers":
        assert noisy.values.dtype == np.float64
        assert noisy.values.tolist() == [float(cell) for cell in text]
    else:
        assert noisy.values.dtype == np.int64
        wanted = [NAMES.index(cell) if task == "names" else int(cell) for cell in text]
        assert noisy.values.tolist() == wanted
        assert len(set(wanted)) > 1
    assert noisy.indices.tolist() == list(range(N)) and len(noisy) == N
    assert not noisy.values.flags.writeable
    np.testing.assert_array_equal(np.asarray(noisy), noisy.values)


@pytest.mark.parametrize("prior", PRIORS)
@pytest.mark.parametrize("suffix", FORMATS)
@pytest.mark.parametrize("task", COLUMN)
def test_what_is_decoded_is_what_the_table_shows(
    tables: Tables, task: str, suffix: str, prior: str
) -> None:
    table = tables.made(task, suffix, prior=PRIORS[prior])
    noisy = NoisyLabels.load(table)
    assert noisy.classes == (NAMES if task == "names" else None)
    text = cells(table, COLUMN[task])
    decoded = noisy.decode()
    assert decoded.shape == (N,)
    if task == "names":
        assert decoded.tolist() == text
    else:
        assert decoded.tolist() == noisy.values.tolist() == [float(cell) for cell in text]


@pytest.mark.parametrize("prior", PRIORS)
@pytest.mark.parametrize("suffix", FORMATS)
@pytest.mark.parametrize("task", COLUMN)
def test_the_promise_is_that_of_the_statement(
    tables: Tables, task: str, suffix: str, prior: str
) -> None:
    table = tables.made(task, suffix, prior=PRIORS[prior])
    noisy, statement = NoisyLabels.load(table), statement_of(table)
    guarantee = noisy.guarantee()
    written = PrivacyGuarantee.from_json(json.dumps(statement["guarantee"]))
    for name in ("epsilon", "delta", "unit", "relation", "seeded", "num_units", "headline"):
        assert getattr(guarantee, name) == getattr(written, name)
    assert guarantee.epsilon == EPSILON and guarantee.delta == 0.0 and guarantee.is_private
    assert guarantee.num_units == N
    assert guarantee.headline == statement["statement"][0] == f"({EPSILON:g}, 0)-label-DP"
    # The histogram of numbers has a receipt of its own; a public prior has cost nothing.
    drawn = [one.kind for one in noisy.receipts]
    private = task == "numbers" and not PRIORS[prior]
    assert drawn == (["release", "draw"] if private else ["draw"])
    assert [one.to_json() for one in noisy.receipts] == statement["receipts"]
    spent = [one.charge.epsilon for one in noisy.receipts]
    parts = statement["epsilon"]
    assert spent == pytest.approx([part for part in (parts["prior"], parts["draw"]) if part])
    assert math.fsum(spent) == pytest.approx(EPSILON, rel=1e-12)
    assert {one.labels.size for one in noisy.receipts} == {N}
    assert all(one.examples is None and not one.seeded for one in noisy.receipts)


STATED: dict[str, tuple[str, tuple[str, ...], bool]] = {
    "numbers": ("numbers", (), False),
    "codes": ("codes", (), False),
    "names": ("names", (), False),
    "numbers with a public prior": ("numbers", (), True),
    "codes with a public prior": ("codes", (), True),
    "names with a public prior": ("names", (), True),
    "seeded": ("numbers", SEEDED, False),
    "rows of one person": ("codes", ("--id", "pair"), False),
    "laplace": ("whole numbers", ("--mechanism", "laplace"), False),
}


@pytest.mark.parametrize("case", STATED)
@pytest.mark.parametrize("suffix", FORMATS)
def test_the_statement_that_is_loaded_is_that_of_the_file(
    tables: Tables, case: str, suffix: str
) -> None:
    """With what it says of rows, ids and range: it is not safer for having been loaded."""
    task, options, prior = STATED[case]
    table = tables.made(task, suffix, *options, prior=prior)
    statement = statement_of(table)
    noisy = NoisyLabels.load(table)
    written = PrivacyGuarantee.from_json(json.dumps(statement["guarantee"]))
    assert noisy.guarantee() == written
    assert str(noisy.guarantee()).splitlines() == statement["statement"]
    assert [one.to_json() for one in noisy.assumptions] == statement["assumptions"]
    assert list(noisy.remarks) == statement["remarks"]
    # What the table rests on is said: rows, settings, other draws, range or classes, repeated ids.
    repeated = case == "rows of one person"
    assert len(noisy.assumptions) == (5 if repeated else 4)
    assert set(noisy.assumptions) <= set(written.assumptions)
    assert repeated == ("rows-per-id" in {one.code for one in written.assumptions})


def bayes(likelihood: np.ndarray, prior: np.ndarray) -> np.ndarray:
    """Gives posteriors (n, K) from the likelihoods of n outputs."""
    weights = likelihood * prior
    return weights / weights.sum(axis=1, keepdims=True)


@pytest.mark.parametrize("suffix", FORMATS)
@pytest.mark.parametrize("task", ["codes", "names"])
def test_targets_of_classes_by_randomized_response(tables: Tables, task: str, suffix: str) -> None:
    noisy = NoisyLabels.load(tables.made(task, suffix))
    assert noisy.mechanism == RandomizedResponse(EPSILON, 4) and noisy.priors is None
    grow = math.exp(EPSILON)
    one_hot = np.eye(4)[noisy.values]
    posterior = (1.0 + (grow - 1.0) * one_hot) / (grow + 3.0)
    np.testing.assert_allclose(noisy.posterior(), posterior, rtol=1e-12)
    # Algorithm 5 of ghazi2021, equation 7.
    debiased = ((grow + 3.0) * one_hot - 1.0) / (grow - 1.0)
    np.testing.assert_allclose(noisy.debiased(), debiased, rtol=1e-9, atol=1e-12)
    # Known shares may be given instead of uniform ones.
    likelihood = posterior  # of a uniform prior, up to a factor
    with_shares = bayes(likelihood, np.array(CLASS_PRIOR))
    np.testing.assert_allclose(noisy.posterior(CLASS_PRIOR), with_shares, rtol=1e-12)


@pytest.mark.parametrize("suffix", FORMATS)
@pytest.mark.parametrize("task", ["codes", "names"])
def test_targets_of_classes_with_a_public_prior(tables: Tables, task: str, suffix: str) -> None:
    table = tables.made(task, suffix, prior=True)
    noisy, statement = NoisyLabels.load(table), statement_of(table)
    assert noisy.mechanism == RRWithPrior(EPSILON, 4)
    assert noisy.priors is not None and noisy.priors.receipts == ()
    np.testing.assert_allclose(np.asarray(noisy.priors), CLASS_PRIOR, rtol=1e-12)
    # Algorithm 2 of ghazi2021: the k with the largest expected share of kept labels.
    grow = math.exp(EPSILON)
    kept = [grow / (grow + k - 1) * sum(CLASS_PRIOR[:k]) for k in range(1, 5)]
    k = int(np.argmax(kept)) + 1
    assert 1 < k < 4 and set(noisy.values) == set(range(k))
    outputs = [NAMES[code] for code in range(k)] if task == "names" else list(range(k))
    assert statement["outputs"] == outputs
    channel = np.full((4, k), 1.0 / k)
    channel[:k] = (1.0 + (grow - 1.0) * np.eye(k)) / (grow + k - 1)
    posterior = bayes(channel[:, noisy.values].T, np.array(CLASS_PRIOR))
    np.testing.assert_allclose(noisy.posterior(), posterior, rtol=1e-12)
    # Unbiased for every label in the top k (Lemma 18), whatever the loss.
    debiased = noisy.debiased()
    weights = np.array([debiased[np.argmax(noisy.values == code)] for code in range(k)])
    np.testing.assert_array_equal(debiased, weights[noisy.values])
    np.testing.assert_allclose((channel @ weights)[:k], np.eye(4)[:k], atol=1e-12)


@pytest.mark.parametrize("prior", [False, True], ids=["private histogram", "public prior"])
@pytest.mark.parametrize("suffix", FORMATS)
def test_targets_of_numbers(tables: Tables, suffix: str, prior: bool) -> None:
    table = tables.made("numbers", suffix, prior=prior)
    noisy, statement = NoisyLabels.load(table), statement_of(table)
    bins, told = noisy.mechanism, noisy.priors
    assert isinstance(bins, RROnBins) and told is not None and told.values is not None
    assert list(bins.outputs) == statement["outputs"] and bins.epsilon < EPSILON + 1e-12
    values, shares = np.asarray(told.values), np.asarray(told.probabilities)
    assert values.tolist() == statement["prior"]["values"]
    assert shares.tolist() == statement["prior"]["probabilities"]
    if prior:
        assert values.tolist() == NUMBER_PRIOR["values"]
        np.testing.assert_allclose(shares, NUMBER_PRIOR["probabilities"], rtol=1e-12)

    # The channel over d bins: the own output with e^epsilon times the chance of each other one.
    grow, outputs = math.exp(bins.epsilon), np.array(bins.outputs)
    d = outputs.size
    assert d > 1
    channel = (1.0 + (grow - 1.0) * np.eye(d)) / (grow + d - 1)
    place = np.searchsorted(outputs, noisy.values)
    assert np.all(np.diff(outputs) > 0) and outputs[place].tolist() == noisy.values.tolist()
    of_value = bins.bin_of(values)
    posterior = bayes(channel[of_value][:, place].T, shares) @ values
    np.testing.assert_allclose(noisy.posterior(), posterior, rtol=1e-9)
    # Debiased, the mean over the outputs is that of the label's bin, for every label.
    debiased = noisy.debiased()
    by_output = np.array([debiased[np.argmax(place == j)] for j in range(d)])
    assert set(place) == set(range(d))
    np.testing.assert_array_equal(debiased, by_output[place])
    mass = np.bincount(of_value, shares, minlength=d)
    assert np.all(mass > 0.0)
    means = np.bincount(of_value, shares * values, minlength=d) / mass
    np.testing.assert_allclose(channel @ by_output, means, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", BASELINES)
@pytest.mark.parametrize("suffix", FORMATS)
def test_the_baselines_load(tables: Tables, name: str, suffix: str) -> None:
    table = tables.made("whole numbers", suffix, "--mechanism", name)
    noisy = NoisyLabels.load(table)
    assert noisy.values.tolist() == [float(cell) for cell in cells(table, "whole")]
    assert type(noisy.mechanism).__name__.lower() == f"{name.replace('_', '')}mechanism"
    assert noisy.guarantee().epsilon == EPSILON and noisy.priors is None
    with pytest.raises(ValueError, match="need priors with their values"):
        noisy.posterior()


def test_a_seed_is_told_by_what_is_loaded(tables: Tables) -> None:
    noisy = NoisyLabels.load(tables.made("numbers", "csv", *SEEDED))
    assert noisy.guarantee().seeded and not noisy.guarantee().is_private
    assert noisy.guarantee().headline.startswith("NOT PRIVATE: seeded")


def test_receipts_are_those_of_the_vault_and_count_once(tables: Tables, tmp_path: Path) -> None:
    """What was loaded and what the vault of the same store says are one expense."""
    (tmp_path / "public").mkdir()
    store = str(tmp_path / "store")
    table = tables.new(tmp_path / "public" / "noisy.csv", "numbers", "--store", store)
    noisy = NoisyLabels.load(table)
    vault = PrivateLabels(AMOUNTS, low=0, high=400, store=store)
    again = vault.randomize(LabelRandomizer(EPSILON))
    np.testing.assert_array_equal(again.values, noisy.values)
    np.testing.assert_array_equal(again.posterior(), noisy.posterior())
    np.testing.assert_array_equal(again.debiased(), noisy.debiased())
    assert [one.id for one in noisy.receipts] == [one.id for one in vault.receipts]
    assert compose_receipts([*noisy.receipts, *vault.receipts]).epsilon == EPSILON
    # Another draw of the same labels is another expense.
    other = NoisyLabels.load(tables.made("numbers", "csv"))
    together = compose_receipts([*noisy.receipts, *other.receipts])
    assert together.epsilon == pytest.approx(2 * EPSILON, rel=1e-12)


def test_a_private_prior_that_was_loaded_is_not_free(tables: Tables) -> None:
    """Noisy labels of others that are drawn with it carry the receipt of its histogram."""
    noisy = NoisyLabels.load(tables.made("numbers", "csv"))
    assert noisy.priors is not None
    assert [one.id for one in noisy.priors.receipts] == [noisy.receipts[0].id]


@pytest.mark.parametrize("suffix", FORMATS)
@pytest.mark.parametrize(("ids", "column"), [("y.z", "y"), ("y", "y.z"), ("id", 'a, "b"\nc')])
def test_columns_are_told_apart(tmp_path: Path, ids: str, column: str, suffix: str) -> None:
    """Parquet readers take "a" for "a.b" too."""
    labels, table = tmp_path / "labels.parquet", tmp_path / f"noisy.{suffix}"
    parquet.write_table(pa.table({ids: [7] * N, "label": CODES}), labels)
    task = ["--column", "label", "--task", "classification", "--num-classes", "4"]
    options = [*task, "--epsilon", "99", "--id", ids, "--output-column", column, "--quiet"]
    assert main(["randomize", str(labels), *options, "--output", str(table)]) == 0
    assert NoisyLabels.load(table).values.tolist() == CODES.tolist()


@pytest.mark.parametrize("suffix", FORMATS)
def test_names_that_look_like_nothing_are_names(tmp_path: Path, suffix: str) -> None:
    names = ["NULL", "", "nan", "#N/A", "007", " space ", "cr\r\nlf", "\t", "-"]
    codes = np.arange(N) % len(names)
    cells = np.array(names)[codes]
    labels, output = tmp_path / "labels.parquet", tmp_path / f"noisy.{suffix}"
    parquet.write_table(pa.table({"id": [f"a\n{i}" for i in range(N)], "y": cells}), labels)
    options = ["--epsilon", "99", "--column", "y", "--task", "classification", "--quiet"]
    command = ["randomize", str(labels), *options, "--output", str(output), "--classes", *names]
    assert main(command) == 0
    noisy = NoisyLabels.load(output)
    assert noisy.values.tolist() == codes.tolist()
    assert noisy.classes == tuple(names) and noisy.decode().tolist() == cells.tolist()


@pytest.mark.parametrize("suffix", ["CSV", "CSV.GZ", "Parquet"])
def test_suffixes_in_capitals(tables: Tables, suffix: str) -> None:
    table = tables.made("codes", suffix)
    lower = suffix.lower()
    # Such a table is of the format that its suffix says.
    start = {"csv": b"id,", "csv.gz": b"\x1f\x8b", "parquet": b"PAR1"}[lower]
    assert table.read_bytes().startswith(start)
    noisy = NoisyLabels.load(table)
    assert noisy.guarantee().epsilon == EPSILON and len(noisy) == N


@pytest.mark.parametrize("suffix", FORMATS)
def test_ids_of_any_length(tmp_path: Path, suffix: str) -> None:
    labels, output = tmp_path / "labels.parquet", tmp_path / f"noisy.{suffix}"
    parquet.write_table(pa.table({"id": ["x" * 3_000_000, "b"], "code": [0, 1]}), labels)
    command = ["randomize", str(labels), "--epsilon", "99", "--quiet", "--output", str(output)]
    assert main([*command, *TASKS["codes"]]) == 0
    assert NoisyLabels.load(output).values.tolist() == [0, 1]


def test_loading_needs_no_tensorflow(
    tables: Tables, in_process: Callable[..., tuple[int, str]]
) -> None:
    given = {task: str(tables.made(task, "csv.gz")) for task in COLUMN}
    program = (
        "import sys\n"
        "from tf_labeldp import NoisyLabels\n"
        f"for task, table in {given}.items():\n"
        "    noisy = NoisyLabels.load(table)\n"
        "    numbers = len(noisy.posterior()), len(noisy.debiased()), len(noisy.decode())\n"
        "    loaded = sorted({'tensorflow', 'keras'} & set(sys.modules))\n"
        "    print(task, *numbers, noisy.guarantee().headline, loaded, sep='|')\n"
    )
    wanted = f"{N}|{N}|{N}|({EPSILON:g}, 0)-label-DP|[]"
    lines = "".join(f"{task}|{wanted}\n" for task in COLUMN)
    assert in_process(program) == (0, lines)


@pytest.mark.parametrize(
    "missing",
    [
        "noisy.csv",
        "noisy.csv.privacy.json",
    ],
)
def test_the_error_names_the_file_that_is_missing(
    tables: Tables, tmp_path: Path, missing: str
) -> None:
    table = copied(tables.made("codes", "csv"), tmp_path)
    (tmp_path / missing).unlink()
    with pytest.raises(FileNotFoundError, match=rf"{re.escape(missing)}(?!\.?\w)"):
        NoisyLabels.load(table)


def test_a_file_that_is_missing_is_said_to_be(tables: Tables, tmp_path: Path) -> None:
    table = copied(tables.made("codes", "csv"), tmp_path)
    statement = statement_path(table)
    content = statement.read_bytes()
    statement.unlink()
    with pytest.raises(FileNotFoundError, match=r"noisy\.csv"):
        NoisyLabels.load(table)
    statement.write_bytes(content)
    assert len(NoisyLabels.load(table)) == N
    table.unlink()
    with pytest.raises(FileNotFoundError, match=r"noisy\.csv"):
        NoisyLabels.load(table)


def swap_values(column: list[str]) -> None:
    other = next(i for i, cell in enumerate(column) if cell != column[0])
    column[0], column[other] = column[other], column[0]


def other_value(column: list[str]) -> None:
    column[0] = next(cell for cell in column if cell != column[0])


TABLE_EDITS: dict[str, Callable[[list[str]], Any]] = {
    "another value": other_value,
    "two values swapped": swap_values,
    "a row less": lambda column: column.pop(),
    "a row more": lambda column: column.append(column[0]),
    "another order": lambda column: column.reverse(),
}


@pytest.mark.parametrize("change", TABLE_EDITS)
@pytest.mark.parametrize("suffix", FORMATS)
@pytest.mark.parametrize("task", COLUMN)
def test_an_edited_table_is_refused(
    tables: Tables, tmp_path: Path, task: str, suffix: str, change: str
) -> None:
    table = copied(tables.made(task, suffix, prior=True), tmp_path)
    column = statement_of(table)["noisy_label_column"]
    values: list[Any]
    if suffix == "parquet":
        values = parquet.read_table(table)[column].to_pylist()
        kind = parquet.read_schema(table).field(column).type
    else:
        values, kind = cells(table, column), pa.string()
    rewrite(table, values, kind, column)
    assert len(NoisyLabels.load(table)) == N  # another file of the same content is as good
    TABLE_EDITS[change](values)
    rewrite(table, values, kind, column)
    with pytest.raises(ReceiptError, match="damaged or edited"):
        NoisyLabels.load(table)


def rewrite(table: Path, values: list[Any], kind: pa.DataType, column: str) -> None:
    content = pa.table({"id": [str(i) for i in range(len(values))], column: pa.array(values, kind)})
    if table.suffix == ".parquet":
        parquet.write_table(content, table)
    else:
        # Quotes everywhere: Arrow writes an empty text as nothing without them.
        with pa.output_stream(str(table)) as file:
            csv.write_csv(content, file, csv.WriteOptions(quoting_style="all_valid"))


@pytest.mark.parametrize("suffix", FORMATS)
def test_the_statement_of_another_run_is_refused(
    tables: Tables, tmp_path: Path, suffix: str
) -> None:
    first = copied(tables.made("codes", suffix), tmp_path)
    second = tables.new(tmp_path / f"second.{suffix}", "codes")
    statement_path(second).replace(statement_path(first))
    with pytest.raises(ReceiptError, match="damaged or edited"):
        NoisyLabels.load(first)


def receipt(statement: dict[str, Any]) -> dict[str, Any]:
    return statement["receipts"][-1]


EDITED: dict[str, tuple[str, tuple[str, ...], bool]] = {
    "numbers": ("numbers", ("--max-values", "8"), False),
    "codes": ("codes", (), False),
    "names": ("names", (), False),
    "seeded": ("codes", ("--insecure-seed", "1"), False),
    "prior": ("codes", (), True),
}
EDITS: dict[str, tuple[str, Callable[[dict[str, Any]], Any]]] = {
    "a cheaper draw": ("numbers", lambda s: receipt(s)["charge"].update(epsilon=0.1)),
    "a delta": ("numbers", lambda s: receipt(s)["charge"].update(delta=1e-3)),
    "another event": (
        "numbers",
        lambda s: receipt(s)["charge"].update(event={"class_name": "NoOpDpEvent"}),
    ),
    "fewer assumptions": ("numbers", lambda s: receipt(s)["charge"].update(assumptions=[])),
    "other labels": ("codes", lambda s: receipt(s)["labels"].update(people="others")),
    "more labels": ("codes", lambda s: receipt(s)["labels"].update(size=10**6)),
    "no seed": ("seeded", lambda s: receipt(s).update(seeded=False)),
    "another kind": ("codes", lambda s: receipt(s).update(kind="declared")),
    "a receipt cut short": ("codes", lambda s: receipt(s).pop("charge")),
    "the receipt of the histogram left out": ("numbers", lambda s: s["receipts"].pop(0)),
    "the receipt of the draw left out": ("numbers", lambda s: s["receipts"].pop()),
    "the receipt of another draw too": ("codes", lambda s: s["receipts"].append(receipt(s))),
    "no receipts": ("codes", lambda s: s.pop("receipts")),
    "other shares": ("numbers", lambda s: s["prior"]["probabilities"].reverse()),
    "other values": ("numbers", lambda s: s["prior"]["values"].__setitem__(1, 0.5)),
    "no prior": ("numbers", lambda s: s.update(prior=None)),
    "another prior of classes": ("prior", lambda s: s["prior"]["probabilities"].reverse()),
    "a prior that there was not": (
        "codes",
        lambda s: s.update(prior={"probabilities": CLASS_PRIOR}),
    ),
    "another source of the prior": ("numbers", lambda s: s["prior"].update(source="public")),
    "another order of names": ("names", lambda s: s["classes"].reverse()),
    "another epsilon of the mechanism": (
        "codes",
        lambda s: s["mechanism"]["config"].update(epsilon=3.0),
    ),
    "another mechanism": (
        "prior",
        lambda s: s["mechanism"].update(class_name="RandomizedResponse"),
    ),
    "no mechanism": ("codes", lambda s: s.pop("mechanism")),
    "a bias correction": ("codes", lambda s: s.update(bias_correction=0.5)),
    "a remark": ("codes", lambda s: s.update(remarks=["this draw lost nothing"])),
    "an assumption less": ("codes", lambda s: s["assumptions"].pop(0)),
    "no assumptions": ("codes", lambda s: s.pop("assumptions")),
    "a smaller promise": ("codes", lambda s: s["guarantee"].update(epsilon=0.1)),
    "a smaller promise in words": (
        "codes",
        lambda s: s["statement"].__setitem__(0, "(0.1, 0)-label-DP"),
    ),
    "no name of the column": ("codes", lambda s: s.pop("noisy_label_column")),
    "another name of the column": ("codes", lambda s: s.update(noisy_label_column="id")),
    "another digest": ("codes", lambda s: s.update(digest="0" * 64)),
    "no digest": ("codes", lambda s: s.pop("digest")),
    "another format": ("codes", lambda s: s.update(format=2)),
    "no format": ("codes", lambda s: s.pop("format")),
    "nothing": ("codes", lambda s: s.clear()),
}


@pytest.mark.parametrize("change", EDITS)
def test_an_edited_statement_is_refused(tables: Tables, tmp_path: Path, change: str) -> None:
    case, edit = EDITS[change]
    task, options, prior = EDITED[case]
    table = copied(tables.made(task, "csv", *options, prior=prior), tmp_path)
    statement = statement_of(table)
    written = json.dumps(statement)
    statement_path(table).write_text(written)
    assert len(NoisyLabels.load(table)) == N  # other blanks are no edit
    edit(statement)
    assert json.dumps(statement) != written
    statement_path(table).write_text(json.dumps(statement))
    with pytest.raises(ReceiptError):
        NoisyLabels.load(table)


@pytest.mark.parametrize("case", EDITED)
def test_an_edit_of_any_field_is_refused(
    tables: Tables, tmp_path: Path, case: str, edits: Callable[[Any], Iterator[tuple[str, Any]]]
) -> None:
    """The least change of each number, text, list and entry, in whatever depth."""
    task, options, prior = EDITED[case]
    table = copied(tables.made(task, "csv", *options, prior=prior), tmp_path)
    statement = statement_of(table)
    tried, unnoticed = 0, []
    for edit, edited in edits(statement):
        tried += 1
        statement_path(table).write_text(json.dumps(edited))
        try:
            NoisyLabels.load(table)
        except ReceiptError:
            continue
        unnoticed.append(edit)
    assert unnoticed == [] and tried > 150
    statement_path(table).write_text(json.dumps(statement))
    assert len(NoisyLabels.load(table)) == N


def test_a_newer_format_is_told_from_damage(tables: Tables, tmp_path: Path) -> None:
    table = copied(tables.made("codes", "csv"), tmp_path)
    statement = {**statement_of(table), "format": 2, "made_by": "tf-labeldp 9.9 randomize"}
    statement_path(table).write_text(json.dumps(statement))
    with pytest.raises(ReceiptError, match=r"has format 2, made by tf-labeldp 9\.9 randomize"):
        NoisyLabels.load(table)


def test_a_statement_of_version_0_1_is_told_from_damage(tables: Tables, tmp_path: Path) -> None:
    """It has no receipts, and nobody has edited it."""
    table = copied(tables.made("codes", "csv"), tmp_path)
    statement = {**statement_of(table), "made_by": "tf-labeldp 0.1.0 randomize"}
    for name in ("format", "bias_correction", "remarks", "assumptions", "receipts", "digest"):
        del statement[name]
    statement_path(table).write_text(json.dumps(statement))
    with pytest.raises(ReceiptError, match=r"tf-labeldp 0\.1\.0"):
        NoisyLabels.load(table)


@pytest.mark.parametrize("content", ["", "[]", "{", '"text"', "\ufffd"])
def test_what_is_no_statement_is_refused(tables: Tables, tmp_path: Path, content: str) -> None:
    table = copied(tables.made("codes", "csv"), tmp_path)
    statement_path(table).write_bytes(content.encode("utf-16"))
    with pytest.raises(ReceiptError, match="damaged or edited"):
        NoisyLabels.load(table)
    statement_path(table).write_text(content, encoding="utf-8")
    with pytest.raises(ReceiptError, match="damaged or edited"):
        NoisyLabels.load(table)


DAMAGES: dict[str, Callable[[Path, str], Any]] = {
    "cut short": lambda table, column: table.write_bytes(table.read_bytes()[:-40]),
    "empty": lambda table, column: table.write_bytes(b""),
    "no such column": lambda table, column: rewrite(table, ["1"] * N, pa.string(), "other"),
    "other text": lambda table, column: rewrite(table, ["what"] * N, pa.string(), column),
    "nothing in a cell": lambda table, column: rewrite(
        table, [None] + ["1"] * (N - 1), pa.string(), column
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("suffix", FORMATS)
@pytest.mark.parametrize("task", COLUMN)
def test_a_damaged_table_is_refused(
    tables: Tables, tmp_path: Path, task: str, suffix: str, damage: str
) -> None:
    table = copied(tables.made(task, suffix), tmp_path)
    DAMAGES[damage](table, statement_of(table)["noisy_label_column"])
    with pytest.raises(ReceiptError, match="damaged or edited"):
        NoisyLabels.load(table)
