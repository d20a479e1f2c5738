"""A run that was killed, started again, uses the draws in its store."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from tf_labeldp.accounting import PrivacyBudget
from tf_labeldp.cli import main
from tf_labeldp.mechanisms import RandomizedResponse, StaircaseMechanism
from tf_labeldp.plugins import Ledger
from tf_labeldp.vault import NoisyLabels, Numbers, PrivateLabels

N = 500
AMOUNTS = np.random.default_rng(8).integers(0, 53, N)
NUMBERS = ("--column", "weeks", "--task", "regression", "--low", "0", "--high", "52")
CLASSES = ("--column", "weeks", "--task", "classification", "--num-classes", "53")
WEEKS = list(map(str, range(53)))
TASKS = {
    "regression": NUMBERS,
    "laplace": (*NUMBERS, "--mechanism", "laplace"),
    "classification": (*CLASSES, "--prior", "prior.json"),
}


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """The current folder, with labels and a prior."""
    rows = "".join(f"{i},{a}\n" for i, a in enumerate(AMOUNTS))
    (tmp_path / "labels.csv").write_text("id,weeks\n" + rows)
    (tmp_path / "prior.json").write_text(json.dumps([1 / 53] * 53))
    (tmp_path / "public").mkdir()
    monkeypatch.chdir(tmp_path)
    return tmp_path


def command(task, *more, store="store"):
    options = ["--epsilon", "1", "--output", "public/noisy.csv", "--store", store]
    return ["randomize", "labels.csv", *TASKS[task], *options, *more]


def contents(folder):
    return {str(path): path.read_bytes() for path in Path(folder).rglob("*") if path.is_file()}


def stored_draws():
    """Returns the records of draws; those of published statements have digests alone."""
    records = [path.read_bytes() for path in sorted(Path("store/records").glob("[0-9]*"))]
    return [record for record in records if b'"receipt": ' in record.partition(b"\n")[0]]


def last_draw():
    values = [record.values for record in Ledger.of_store("store").records]
    return [drawn for drawn in values if drawn is not None][-1].astype(np.float64)


def noisy_labels():
    return np.loadtxt("public/noisy.csv", delimiter=",", skiprows=1)[:, 1]


def statement():
    return json.loads(Path("public/noisy.csv.privacy.json").read_text())


# The write before which a run is killed, and the draws on disk by then: histogram, noisy labels.
KILLS = [(4, 0), (8, 0), (13, 0), (14, 1), (17, 1), (18, 2), (21, 2), (24, 2), (27, 2), (29, 2)]


@pytest.mark.parametrize(("number", "draws"), KILLS)
def test_a_run_that_was_killed_is_resumed(number, draws, killed, capsys):
    assert killed(number, *command("regression"))
    assert not Path("public/noisy.csv").exists()
    assert list(Path("public").glob(".noisy.csv.*"))  # left behind by the kill
    drawn = stored_draws()
    assert len(drawn) == draws

    assert main(command("regression")) == 0
    assert ("their cost is counted once" in capsys.readouterr().err) == (draws > 0)
    after = stored_draws()
    assert len(after) == 2 and after[:draws] == drawn
    assert np.array_equal(noisy_labels(), last_draw())
    assert statement()["guarantee"]["epsilon"] == statement()["epsilon"]["total"] == 1.0
    assert len(list(Path("public").iterdir())) == 2


@pytest.mark.slow
@pytest.mark.parametrize("share", [6, pytest.param(1, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("task", ["regression", "classification"])
def test_an_error_at_any_step_after_the_charge_loses_no_draw(
    task, share, failing_after_release, capsys
):
    """The same command finishes with the draw of its first run, whatever failed in between."""
    codes: list[int] = []

    def randomize():
        if not codes or codes[-1]:
            codes.append(main(command(task, "--quiet")))

    steps = failing_after_release(randomize, share=share)
    assert len(steps) > 60 and len(codes) > 5 and codes[-1] == 0
    number = {"regression": 2, "classification": 1}[task]
    assert len(stored_draws()) == number and statement()["guarantee"]["epsilon"] == 1.0
    if task == "regression":
        assert np.array_equal(noisy_labels(), last_draw())
    assert len(list(Path("public").iterdir())) == 2
    printed = capsys.readouterr()
    assert "injected" not in printed.out + printed.err


@pytest.mark.parametrize("output", ["public/noisy.csv", "public/noisy.parquet", "public/noisy"])
def test_a_run_that_had_written_its_output_needs_no_overwrite(folder, output, capsys):
    """The same command goes on from any point, also after its last write."""
    inputs = ["labels.csv"]
    if output.endswith("noisy"):
        (folder / "more.csv").write_text("id,weeks\nx,3\ny,50\n")
        inputs.append("more.csv")
    words = ["randomize", *inputs, *NUMBERS, "--epsilon", "1", "--output", output]
    assert main([*words, "--store", "store"]) == 0
    drawn, first = stored_draws(), NoisyLabels.load(output)
    capsys.readouterr()
    assert main([*words, "--store", "store"]) == 0
    assert "their cost is counted once" in capsys.readouterr().err
    again = NoisyLabels.load(output)
    assert stored_draws() == drawn and np.array_equal(again.values, first.values)
    for other in ([], ["--store", "other"]):  # a new draw replaces nothing unasked
        assert main([*words, *other]) == 2
        assert "exists; give another --output, or --overwrite" in capsys.readouterr().err
    assert np.array_equal(NoisyLabels.load(output).values, first.values)


def test_seeds_and_stored_draws(capsys):
    seeded = ("--insecure-seed", "1", "--overwrite")
    assert main(command("regression", *seeded, store="seeded")) == 0
    assert main(command("regression", "--overwrite", store="seeded")) == 0
    assert statement()["guarantee"]["seeded"]
    capsys.readouterr()
    assert main(command("regression", *seeded, store="seeded")) == 0
    assert "they were used, and --insecure-seed was ignored" in capsys.readouterr().err
    assert main(command("regression", "--overwrite")) == 0
    capsys.readouterr()
    assert main(command("regression", *seeded)) == 2
    shown = capsys.readouterr().err
    assert "made without a seed, which --insecure-seed does not change; leave" in shown
    # A draw in addition to those of others is new, and has the seed.
    use(vault_of("laplace", 5.0, "mixed"), 2.0)
    assert main(command("laplace", *seeded, store="mixed")) == 0
    assert NoisyLabels.load("public/noisy.csv").guarantee().seeded


def vault_of(task, epsilon, store="store"):
    """Opens a vault of the same labels and store, with another budget."""
    kind = 53 if task == "classification" else Numbers(0, 52)
    return PrivateLabels(AMOUNTS, kind, budget=PrivacyBudget(epsilon), store=store)


def use(vault, epsilon):
    """Draws something else from a vault."""
    if vault.label_range is None:
        vault.randomize(RandomizedResponse(epsilon, 53), key="mine")
    else:
        vault.randomize(StaircaseMechanism(epsilon, 0.0, 52.0), key="mine")


@pytest.mark.parametrize("task", TASKS)
def test_a_store_with_a_larger_budget_keeps_it(task, capsys):
    """The table has the command's epsilon, the store its own budget."""
    use(vault_of(task, 5.0), 2.0)
    assert main(command(task)) == 0
    assert "they were used" not in capsys.readouterr().err
    assert statement()["guarantee"]["epsilon"] == statement()["epsilon"]["total"] == 1.0
    loaded = NoisyLabels.load("public/noisy.csv")
    assert loaded.guarantee().epsilon == 1.0
    vault = vault_of(task, 5.0)
    assert vault.budget == PrivacyBudget(5.0) and vault.guarantee().epsilon == 3.0
    assert {item.id for item in loaded.receipts} <= {item.id for item in vault.receipts}
    # A second run uses the draws of the first.
    drawn, first = stored_draws(), noisy_labels()
    assert main(command(task, "--overwrite")) == 0
    assert "they were used" in capsys.readouterr().err
    assert stored_draws() == drawn and np.array_equal(noisy_labels(), first)
    assert vault_of(task, 5.0).guarantee().epsilon == 3.0


@pytest.mark.parametrize(("budget", "used"), [(2.5, 2.0), (0.5, 0.0)])
@pytest.mark.parametrize("task", TASKS)
def test_the_budget_of_a_store_is_not_passed(task, budget, used, capsys):
    vault = vault_of(task, budget)
    if used:
        use(vault, used)
    before = stored_draws()
    assert main(command(task)) == 2
    shown = capsys.readouterr().err
    assert "budget" in shown and "other settings" not in shown and shown.count("\n") == 1
    assert stored_draws() == before and contents("public") == {}
    assert vault_of(task, budget).guarantee().epsilon == used


def test_a_budget_that_was_raised_is_the_stores():
    assert main(command("laplace")) == 0
    PrivateLabels(AMOUNTS, Numbers(0, 52), store="store").raise_budget(
        PrivacyBudget(3.0), reason="a second table"
    )
    other = ["--mechanism", "staircase", "--epsilon", "2", "--overwrite"]
    assert main(command("regression", *other)) == 2  # the same name, other settings
    assert main(command("regression", "--overwrite")) == 0
    assert PrivateLabels(AMOUNTS, Numbers(0, 52), store="store").guarantee().epsilon == 2.0


@pytest.mark.parametrize(
    ("task", "change"),
    [
        *(
            (NUMBERS, change)
            for change in (
                "--loss absolute_error",
                "--prior-epsilon 0.1",
                "--max-values 20",
                "--epsilon 2",
                "--mechanism laplace",
            )
        ),
        (TASKS["laplace"], "--mechanism staircase"),
        (TASKS["laplace"], "--epsilon 0.5"),
        (TASKS["laplace"], "--mechanism rr_on_bins"),
        (TASKS["classification"], "--prior other.json"),
        # Codes in a store mean nothing without their names.
        ((*CLASSES[:4], "--classes", *WEEKS, "a", "b"), f"--classes {' '.join(WEEKS)} b a"),
    ],
)
def test_other_settings_are_refused(folder, task, change, capsys):
    Path("other.json").write_text(json.dumps([0.5, 0.5] + [0.0] * 51))
    options = ["--epsilon", "1", "--output", "public/noisy.csv", "--store", "store", "--overwrite"]
    assert main(["randomize", "labels.csv", *task, *options]) == 0
    before = contents(folder)
    capsys.readouterr()
    assert main(["randomize", "labels.csv", *task, *options, *change.split()]) == 2
    shown = capsys.readouterr().err
    assert "the store store has draws of these labels made with other settings" in shown
    assert shown.count("\n") == 1 and before == contents(folder)


def test_other_labels_are_refused(capsys):
    assert main(command("regression")) == 0
    capsys.readouterr()
    text = Path("labels.csv").read_text()
    assert AMOUNTS[-1] != 13
    for changed, reason in (
        (text.replace(f"499,{AMOUNTS[-1]}\n", "499,13\n"), "was made for other labels"),
        (text + "500,13\n", "has noisy labels of rows with other ids"),
    ):
        Path("labels.csv").write_text(changed)
        assert main(command("regression", "--overwrite")) == 2
        assert reason in capsys.readouterr().err


def test_a_table_states_that_the_store_has_released_more():
    """Also where the store's delta makes the sum smaller than the table's epsilon."""
    labels = np.random.default_rng(0).integers(0, 1000, 400)
    budget = PrivacyBudget(9.0, 1e-3)
    vault = PrivateLabels(labels, 1000, budget=budget, store="store")
    vault.randomize(RandomizedResponse(0.01, 1000), key="another's")
    Path("labels.csv").write_text("weeks\n" + "".join(f"{label}\n" for label in labels))
    options = [*CLASSES[:4], "--num-classes", "1000", "--epsilon", "1"]
    paths = ["--output", "public/noisy.csv", "--store", "store"]
    assert main(["randomize", "labels.csv", *options, *paths]) == 0
    stated = NoisyLabels.load("public/noisy.csv").guarantee()
    assert vault.guarantee().epsilon < stated.epsilon == 1.0
    assert any("this is the statement of this table alone" in text for text in stated.remarks)
    assert "only-release" not in {note.code for note in stated.assumptions}
