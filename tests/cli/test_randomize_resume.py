"""A run that was killed and started again uses the draws that its store kept."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from tf_labeldp.accounting import PrivacyBudget
from tf_labeldp.cli import _outputs, _randomize, main
from tf_labeldp.mechanisms import RandomizedResponse, StaircaseMechanism
from tf_labeldp.vault import LabelRandomizer, NoisyLabels, PrivateLabels
from tf_labeldp.vault.ledger import Ledger

N = 500
AMOUNTS = np.random.default_rng(8).integers(0, 53, N)
TASKS = {
    "regression": ("--column", "weeks", "--task", "regression", "--low", "0", "--high", "52"),
    "laplace": (
        *("--column", "weeks", "--task", "regression", "--low", "0", "--high", "52"),
        *("--mechanism", "laplace"),
    ),
    "classification": (
        *("--column", "weeks", "--task", "classification", "--num-classes", "53"),
        *("--prior", "prior.json"),
    ),
}
# How many draws are on disk by then: of the histogram and of the noisy labels.
POINTS = {
    "before the first charge": ("vault.store", "LabelStore._write_last", 2, 1),
    "between histogram and draw": ("vault.store", "LabelStore.append", 2, 1),
    "before the second charge": ("vault.store", "LabelStore._write_last", 3, 2),
    "before the first rows": ("cli._outputs", "CsvWriter.write_table", 1, 2),
    "between rows": ("cli._outputs", "CsvWriter.write_table", 4, 2),
    "before the ids are kept": ("cli._randomize", "_keep_ids", 1, 2),
    "before the statement is on disk": ("cli._outputs", "_sync", 2, 2),
    "before the statement has its name": ("cli._outputs", "give_name", 1, 2),
    "between statement and table": ("cli._outputs", "give_name", 2, 2),
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with labels and a prior."""
    rows = "".join(f"{i},{a}\n" for i, a in enumerate(AMOUNTS))
    (tmp_path / "labels.csv").write_text("id,weeks\n" + rows)
    (tmp_path / "prior.json").write_text(json.dumps([1 / 53] * 53))
    (tmp_path / "public").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(_randomize, "_PATIENCE", 1e9)  # however slow the machine is
    return tmp_path


def command(task: str, *more: str) -> list[str]:
    options = ["--epsilon", "1", "--output", "public/noisy.csv", "--store", "store"]
    return ["randomize", "labels.csv", *TASKS[task], *options, *more]


def stored_draws(folder: Path) -> list[bytes]:
    return [path.read_bytes() for path in sorted((folder / "store" / "records").glob("[0-9]*"))]


def last_draw(folder: Path) -> np.ndarray:
    values = Ledger.of_store(folder / "store").records[-1].values
    assert values is not None
    return values.astype(np.float64)


def noisy_labels(folder: Path) -> np.ndarray:
    return np.loadtxt(folder / "public" / "noisy.csv", delimiter=",", skiprows=1)[:, 1]


@pytest.mark.parametrize("point", POINTS)
def test_killed_and_resumed(
    folder: Path,
    point: str,
    capsys: pytest.CaptureFixture[str],
    killed: Callable[..., None],
) -> None:
    *place, draws = POINTS[point]
    killed(*place, *command("regression"))
    assert not (folder / "public" / "noisy.csv").exists()
    assert len(list((folder / "public").glob(".noisy.csv.*"))) >= 1  # left behind by the kill
    drawn = stored_draws(folder)
    assert len(drawn) == draws

    assert main(command("regression")) == 0
    assert "what they cost is counted once" in capsys.readouterr().err
    after = stored_draws(folder)
    assert len(after) == 2 and after[:draws] == drawn
    assert np.array_equal(noisy_labels(folder), last_draw(folder))
    statement = json.loads((folder / "public" / "noisy.csv.privacy.json").read_text())
    assert statement["guarantee"]["epsilon"] == 1.0
    assert statement["epsilon"]["total"] == 1.0
    assert list((folder / "public").glob(".noisy.csv.*")) == []


@pytest.mark.parametrize("task", TASKS)
def test_a_failed_writer_and_two_more_runs(
    folder: Path, task: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(_randomize, "_ROWS", 64)
    with monkeypatch.context() as patch:
        write_table = _outputs.CsvWriter.write_table

        def fail_at_row_100(self: _outputs.CsvWriter, table: pa.Table) -> None:
            if "100" in table.column(0).to_pylist():
                raise OSError(28, "No space left on device")
            write_table(self, table)

        patch.setattr(_outputs.CsvWriter, "write_table", fail_at_row_100)
        assert main(command(task)) == 2
    assert (
        "cannot write --output public/noisy.csv (No space left on device)"
        in capsys.readouterr().err
    )
    assert sorted(path.name for path in folder.iterdir()) == [
        "labels.csv", "prior.json", "public", "store",
    ]  # fmt: skip
    assert list((folder / "public").iterdir()) == []

    drawn = stored_draws(folder)
    assert main(command(task)) == 0
    files = [path.read_bytes() for path in sorted((folder / "public").iterdir())]
    assert np.array_equal(noisy_labels(folder), last_draw(folder))
    assert main(command(task, "--overwrite")) == 0
    assert len(files) == 2
    assert files == [path.read_bytes() for path in sorted((folder / "public").iterdir())]
    assert stored_draws(folder) == drawn


def test_no_random_bits_are_used_again(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert main(command("regression")) == 0

    def refuse(size: int) -> bytes:
        raise AssertionError(f"{size} random bytes were drawn")

    monkeypatch.setattr(os, "urandom", refuse)
    assert main(command("regression", "--overwrite")) == 0
    monkeypatch.undo()
    monkeypatch.chdir(folder)
    assert np.array_equal(noisy_labels(folder), last_draw(folder))


def test_without_a_store_every_run_draws(folder: Path) -> None:
    once = command("regression")[:-2]
    assert main(once) == 0
    first = noisy_labels(folder)
    assert main([*once, "--overwrite"]) == 0
    assert not np.array_equal(noisy_labels(folder), first)


def test_seeded_draws_stay_seeded(folder: Path) -> None:
    assert main(command("regression", "--insecure-seed", "1")) == 0
    assert main(command("regression", "--overwrite")) == 0
    assert json.loads((folder / "public" / "noisy.csv.privacy.json").read_text())["guarantee"][
        "seeded"
    ]


def test_the_vault_of_the_library_reads_the_store(folder: Path) -> None:
    assert main(command("regression")) == 0
    vault = PrivateLabels(AMOUNTS, low=0, high=52, budget=PrivacyBudget(1.0), store="store")
    assert vault.guarantee().epsilon == 1.0
    assert PrivateLabels(AMOUNTS, low=0, high=52, store="store").budget == PrivacyBudget(1.0)
    # What it gives for the same request is what is in the table.
    noisy = vault.randomize(LabelRandomizer(1.0))
    assert vault.guarantee().epsilon == 1.0 and len(vault.receipts) == 2
    assert np.array_equal(noisy.values, noisy_labels(folder))


def vault_of(task: str, epsilon: float) -> PrivateLabels:
    """Gives a vault of the same labels and store, made by the library with a budget of its own."""
    kind = {"num_classes": 53} if task == "classification" else {"low": 0, "high": 52}
    return PrivateLabels(AMOUNTS, **kind, budget=PrivacyBudget(epsilon), store="store")


def use(vault: PrivateLabels, epsilon: float) -> None:
    """Draws something else from a vault of either kind."""
    if vault.label_range is None:
        vault.randomize(RandomizedResponse(epsilon, 53), key="mine")
    else:
        vault.randomize(StaircaseMechanism(epsilon, 0.0, 52.0), key="mine")


@pytest.mark.parametrize("task", TASKS)
def test_a_store_with_a_larger_budget_keeps_it(folder: Path, task: str) -> None:
    """The command's epsilon is that of its own table; the budget is the store's."""
    use(vault_of(task, 5.0), 2.0)
    assert main(command(task)) == 0
    statement = json.loads((folder / "public" / "noisy.csv.privacy.json").read_text())
    assert statement["guarantee"]["epsilon"] == statement["epsilon"]["total"] == 1.0
    loaded = NoisyLabels.load("public/noisy.csv")
    assert loaded.guarantee().epsilon == 1.0
    vault = vault_of(task, 5.0)
    assert vault.budget == PrivacyBudget(5.0) and vault.guarantee().epsilon == 3.0
    assert {one.id for one in loaded.receipts} <= {one.id for one in vault.receipts}
    # Again: what the command drew is used.
    drawn, first = stored_draws(folder), noisy_labels(folder)
    assert main(command(task, "--overwrite")) == 0
    assert stored_draws(folder) == drawn and np.array_equal(noisy_labels(folder), first)
    assert vault_of(task, 5.0).guarantee().epsilon == 3.0


@pytest.mark.parametrize("task", TASKS)
def test_the_budget_of_a_store_is_not_passed(folder: Path, task: str) -> None:
    use(vault_of(task, 2.5), 2.0)
    before = stored_draws(folder)
    assert main(command(task)) == 2
    assert stored_draws(folder) == before and not (folder / "public" / "noisy.csv").exists()
    assert vault_of(task, 2.5).guarantee().epsilon == 2.0


def test_a_budget_that_was_raised_is_the_stores(folder: Path) -> None:
    assert main(command("laplace")) == 0
    PrivateLabels(AMOUNTS, low=0, high=52, store="store").raise_budget(
        PrivacyBudget(3.0), reason="a second table"
    )
    other = ["--mechanism", "staircase", "--epsilon", "2", "--overwrite"]
    assert main(command("regression", *other)) == 2  # the same name, other settings
    assert main(command("regression", "--overwrite")) == 0
    assert PrivateLabels(AMOUNTS, low=0, high=52, store="store").guarantee().epsilon == 2.0


@pytest.mark.parametrize("task", TASKS)
def test_new_draws_are_not_said_to_be_used_again(
    folder: Path, task: str, capsys: pytest.CaptureFixture[str]
) -> None:
    use(vault_of(task, 5.0), 2.0)
    assert main(command(task)) == 0
    assert vault_of(task, 5.0).guarantee().epsilon == 3.0  # one more was made
    assert "they were used" not in capsys.readouterr().err
    assert main(command(task, "--overwrite")) == 0
    assert "they were used" in capsys.readouterr().err


def test_a_seed_beside_other_draws(folder: Path) -> None:
    """The command's own draw is new, and is seeded as asked for."""
    use(vault_of("laplace", 5.0), 2.0)
    assert main(command("laplace", "--insecure-seed", "1")) == 0
    assert NoisyLabels.load("public/noisy.csv").guarantee().seeded


@pytest.mark.parametrize("task", TASKS)
def test_a_budget_that_is_too_small_is_named(
    folder: Path, task: str, capsys: pytest.CaptureFixture[str]
) -> None:
    vault_of(task, 0.5)
    assert main(command(task)) == 2
    told = capsys.readouterr().err
    assert "other settings" not in told and "budget" in told and told.count("\n") == 1


@pytest.mark.parametrize(
    ("task", "change"),
    [
        ("regression", ("--loss", "absolute_error")),
        ("regression", ("--prior-epsilon", "0.1")),
        ("regression", ("--max-values", "20")),
        ("regression", ("--epsilon", "2")),
        ("regression", ("--mechanism", "laplace")),
        ("laplace", ("--mechanism", "staircase")),
        ("laplace", ("--epsilon", "0.5")),
        ("laplace", ("--mechanism", "rr_on_bins")),
        ("classification", ("--prior", "other.json")),
        ("classification", ("--epsilon", "2")),
    ],
)
def test_other_settings_are_refused(
    folder: Path, task: str, change: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "other.json").write_text(json.dumps([0.5, 0.5] + [0.0] * 51))
    assert main(command(task)) == 0
    before = {p.name: p.read_bytes() for p in folder.rglob("*") if p.is_file()}
    capsys.readouterr()
    assert main(command(task, "--overwrite", *change)) == 2
    told = capsys.readouterr().err
    assert "the store store holds draws of these labels made with other settings" in told
    assert told.count("\n") == 1
    assert before == {p.name: p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def test_other_labels_are_refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(command("regression")) == 0
    capsys.readouterr()
    text = (folder / "labels.csv").read_text()
    (folder / "labels.csv").write_text(text.replace(f"499,{AMOUNTS[-1]}\n", "499,13\n"))
    assert AMOUNTS[-1] != 13
    assert main(command("regression", "--overwrite")) == 2
    assert "was made for other labels" in capsys.readouterr().err
    (folder / "labels.csv").write_text(text + "500,13\n")
    assert main(command("regression", "--overwrite")) == 2
    assert "holds noisy labels of rows with other ids" in capsys.readouterr().err


def test_a_damaged_store_is_refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(command("regression")) == 0
    capsys.readouterr()
    path = folder / "store" / "records" / "000001"
    path.write_bytes(path.read_bytes()[:-100])
    assert main(command("regression", "--overwrite")) == 2
    told = capsys.readouterr().err
    assert "000001 is damaged" in told and told.count("\n") == 1


def test_a_folder_that_is_no_store(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "mine").mkdir()
    (folder / "mine" / "notes.txt").write_text("mine")
    assert main([*command("regression")[:-1], "mine"]) == 2
    assert "is not a label store" in capsys.readouterr().err
    assert list((folder / "public").iterdir()) == []


def test_a_table_says_that_the_store_has_released_more(folder: Path) -> None:
    """Also where a delta of the store makes the sum look smaller than the table's own epsilon."""
    labels = np.random.default_rng(0).integers(0, 1000, 400)
    budget = PrivacyBudget(9.0, 1e-3)
    vault = PrivateLabels(labels, 1000, budget=budget, store="store")
    vault.randomize(RandomizedResponse(0.01, 1000), key="another's")
    Path("other.csv").write_text("weeks\n" + "".join(f"{label}\n" for label in labels))
    options = [*command("classification")[2:6], "--num-classes", "1000", "--epsilon", "1"]
    paths = ["--output", "public/noisy.csv", "--store", "store"]
    assert main(["randomize", "other.csv", *options, *paths]) == 0
    stated = NoisyLabels.load("public/noisy.csv").guarantee()
    assert vault.guarantee().epsilon < stated.epsilon == 1.0
    assert any("this is the statement of this table alone" in text for text in stated.remarks)
    assert "only-release" not in {one.code for one in stated.assumptions}
