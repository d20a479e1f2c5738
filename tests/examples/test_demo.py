"""A small demo from end to end: its printed lines and its files."""

from __future__ import annotations

import contextlib
import io
import json
import math
import sys

import demo as script
import demo_datasets
import keras
import numpy as np
import pytest

from tf_labeldp.accounting import PrivacyGuarantee
from tf_labeldp.mechanisms import RRWithPrior
from tf_labeldp.vault import NoisyLabels

LP_1ST, LP_2ST = "lp-1st_epsilon-2", "lp-2st_epsilon-2"
DRAWN = (LP_1ST, LP_2ST)
PRIVATE = (*DRAWN, "dp-sgd_epsilon-2", "privateclassifier_epsilon-2")
PLOT = "accuracy_and_channel.png"
MARKER = ".tf-labeldp-demo"
NOISY_LABELS = {"noisy_labels.json", "noisy_labels.npz"}
FILES = {
    MARKER,
    *(f"model_{name}.keras" for name in ("NOT-PRIVATE", *PRIVATE)),
    *(f"noisy_labels_{name}" for name in DRAWN),
    *("privacy.txt", "privacy.json", "results.json", PLOT),
}


def run_demo(*arguments):
    """Runs the demo with one epoch per stage, and returns its printed lines."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        script.main(["--epochs", "1", *map(str, arguments)])
    return printed.getvalue()


def guarantee_of(fields):
    return PrivacyGuarantee.from_json(json.dumps(fields))


@pytest.fixture(scope="session")
def demo(tmp_path_factory):
    """The output folder and the printed lines of a demo at epsilon 2."""
    folder = tmp_path_factory.mktemp("demo") / "new" / "output"
    return folder, run_demo("--epsilons", 2, "--output", folder)


@pytest.mark.slow
def test_all_files_are_there_and_no_others(demo):
    folder, _ = demo
    assert {path.name for path in folder.iterdir()} == FILES
    for name in DRAWN:
        inside = {path.name for path in (folder / f"noisy_labels_{name}").iterdir()}
        assert inside == NOISY_LABELS
    assert (folder / PLOT).read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_it_reports_how_far_it_is_and_ends_with_the_table(demo):
    folder, printed = demo
    assert "1,437 training examples with private labels, 360 test examples" in printed
    for step in ("[1/5] non-private (NOT PRIVATE)", "[3/5] LP-2ST, epsilon 2", "[5/5] PrivateCl"):
        assert step in printed
    results = json.loads((folder / "results.json").read_text())
    head, *rows = printed[printed.index("Test accuracy in %") :].splitlines()[:6]
    assert head.split()[-2:] == ["eps", "2"]
    for row, run in zip(rows, results["runs"], strict=True):
        assert row.startswith(run["method"])
        assert float(row.split()[-1]) == round(100 * run["test_accuracy"], 1)
    assert "(2, 1e-05)-label-DP" in printed
    assert "public test labels" in printed.replace("\n", " ")


@pytest.mark.slow
def test_the_models_load_and_have_the_accuracy_stated(demo):
    folder, _ = demo
    data = demo_datasets.load("digits")
    for run in json.loads((folder / "results.json").read_text())["runs"]:
        model = keras.models.load_model(folder / run["model"])
        predicted = model.predict(data.x_test, verbose=0).argmax(axis=1)
        assert np.mean(predicted == data.y_test) == pytest.approx(run["test_accuracy"], abs=1e-9)


@pytest.mark.slow
def test_each_model_has_its_statement(demo):
    folder, _ = demo
    statements = json.loads((folder / "privacy.json").read_text())
    plain, *private = statements["models"]
    assert guarantee_of(plain["guarantee"]).epsilon == math.inf
    assert not guarantee_of(plain["guarantee"]).is_private
    assert "NOT PRIVATE" in plain["note"] and "NOT-PRIVATE" in plain["model"]
    for entry, name in zip(private, PRIVATE, strict=True):
        guarantee = guarantee_of(entry["guarantee"])
        assert guarantee.delta == (0.0 if name in DRAWN else 1e-5)
        assert 1.99 < guarantee.epsilon <= 2.0
        assert guarantee.is_private and guarantee.relation == "replace_label"
        codes = {note.code for note in guarantee.assumptions}
        assert {"only-model-published", "settings-not-tuned"} <= codes
        assert entry["note"] is None
        assert entry["model"] == f"model_{name}.keras"
        assert entry["noisy_labels"] == (f"noisy_labels_{name}" if name in DRAWN else None)


@pytest.mark.slow
def test_publishing_all_private_models_costs_the_sum(demo):
    folder, printed = demo
    statements = json.loads((folder / "privacy.json").read_text())
    together = guarantee_of(statements["all_private_models_together"])
    assert 7.98 < together.epsilon <= 8.0 and together.is_private
    assert together.delta == pytest.approx(2e-5)
    assert "only-model-published" not in {note.code for note in together.assumptions}
    assert "2e-05)-label-DP" in printed
    text = (folder / "privacy.txt").read_text()
    adaptive = "For any adaptive use: (2, 0)-label-DP"
    assert text.count("(2, 0)-label-DP") - text.count(adaptive) == 2
    assert text.count(adaptive) == 2
    assert text.count("2e-05)-label-DP") == 1
    assert "settings were chosen by looking at results on digits" in text
    assert text.index("NOT PRIVATE: trained on the true labels") < text.index("lp-1st")


@pytest.mark.slow
def test_noisy_labels_hold_each_example_once_and_the_draw_alone(demo):
    folder, _ = demo
    true = demo_datasets.load("digits").y_train
    agreement = {}
    for name in DRAWN:
        saved = folder / f"noisy_labels_{name}"
        with np.load(saved / "noisy_labels.npz", allow_pickle=False) as file:
            assert set(file) == {"indices", "values", "probabilities"}
            np.testing.assert_array_equal(np.sort(file["indices"]), np.arange(true.size))
            indices, noisy = file["indices"], file["values"]
            assert file["probabilities"].shape == (true.size, 10)
        assert noisy.shape == indices.shape
        assert noisy.min() >= 0 and noisy.max() <= 9
        agreement[name] = np.mean(noisy == true[indices])
        # They load with the guarantee of their model.
        loaded = NoisyLabels.load(saved)
        np.testing.assert_array_equal(loaded.values, noisy)
        np.testing.assert_array_equal(loaded.indices, indices)
        assert loaded.mechanism == RRWithPrior(2.0, 10)
        guarantee = loaded.guarantee()
        assert (guarantee.epsilon, guarantee.delta, guarantee.is_private) == (2.0, 0.0, True)
        assert guarantee.num_units == true.size
        assert loaded.posterior().shape == loaded.debiased().shape == (true.size, 10)
    # LP-1ST is randomized response over ten classes, tested at six standard deviations.
    keep = math.exp(2) / (math.exp(2) + 9)
    assert abs(agreement[LP_1ST] - keep) < 6 * math.sqrt(keep * (1 - keep) / true.size)
    assert agreement[LP_2ST] < 0.9


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (("--data", "mnist"), "mnist needs the folder that holds it"),
        (("--epsilons", "1", "0"), "epsilon must be finite and above zero, got '0'"),
        (("--epsilons", "many"), "epsilon must be finite and above zero, got 'many'"),
    ],
)
def test_bad_command_lines(monkeypatch, capsys, words, reason):
    monkeypatch.delenv("LABELDP_DATA_DIR", raising=False)
    with pytest.raises(SystemExit) as stopped:
        script.main(words)
    assert reason in f"{stopped.value} {capsys.readouterr().err}"


def test_an_output_that_is_a_file(tmp_path):
    file = tmp_path / "file"
    file.write_text("mine")
    with pytest.raises(SystemExit, match=f"cannot write to --output {file}"):
        script.main(["--output", str(file)])
    assert file.read_text() == "mine"


def test_a_folder_of_other_files_is_left_alone(tmp_path):
    (tmp_path / "results.json").write_text("years of work")
    with pytest.raises(SystemExit, match="has files that no demo wrote; give a new or empty"):
        script.main(["--output", str(tmp_path)])
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {
        "results.json": "years of work"
    }


def few_of_adult(name, folder):
    """Returns 20 training rows and two test rows with two classes."""
    x, y = np.eye(4, dtype=np.float32)[np.arange(22) % 4], np.arange(22) % 2
    return demo_datasets.ClassificationData(name, x[2:], y[2:], x[:2], y[:2], ("<=50K", ">50K"))


@pytest.mark.slow
def test_a_second_demo_on_adult_replaces_its_own_files_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(demo_datasets, "load", few_of_adult)
    (tmp_path / MARKER).write_text("an earlier demo was here")
    for name in ("model_lp-1st_epsilon-8.keras", PLOT, "notes.txt", "model_mine.keras"):
        (tmp_path / name).write_text("before")
    for name in ("noisy_labels_lp-1st_epsilon-2", "noisy_labels_mine"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "noisy_labels.json").write_text("before")
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    printed = run_demo(
        *("--data", "adult", "--output", tmp_path),
        *("--epsilons", 2, 0.5, 2, "--insecure-seed", 3),
    )
    assert "adult: 20 training examples" in printed and "2 classes" in printed

    found = {path.name for path in tmp_path.iterdir()}
    both = {name.replace("epsilon-2", "epsilon-0.5") for name in FILES} | FILES
    others = {"notes.txt", "model_mine.keras", "noisy_labels_mine"}
    assert found == (both - {PLOT}) | others
    assert (tmp_path / "model_mine.keras").read_text() == "before"
    assert (tmp_path / "noisy_labels_mine" / "noisy_labels.json").read_text() == "before"
    noisy = NoisyLabels.load(tmp_path / "noisy_labels_lp-1st_epsilon-2")
    assert noisy.guarantee().seeded and set(noisy.values.tolist()) <= {0, 1}
    assert "[7/9] LP-2ST, epsilon 2" in printed  # each epsilon once, rising

    # Without matplotlib there is no plot, but a hint.
    assert "pip install 'tf-labeldp[plots]'" in printed

    # Every statement is marked as seeded.
    statements = json.loads((tmp_path / "privacy.json").read_text())
    private = [entry["guarantee"] for entry in statements["models"][1:]]
    for fields in (*private, statements["all_private_models_together"]):
        assert fields["seeded"] and not fields["private"]
    text = (tmp_path / "privacy.txt").read_text()
    assert text.count("NOT PRIVATE: seeded") == 9 and "settings were chosen" not in text
    assert "NOT PRIVATE: seeded" in printed


@pytest.mark.parametrize("name", ["notes.txt", ".noisy_labels.json.0123456789abcdef.tmp"])
def test_noisy_labels_of_an_earlier_demo_are_no_longer_there(tmp_path, monkeypatch, name):
    """The new statements do not cover them. Files of others stay.

    A demo that was killed while it wrote left the other file.
    """
    (tmp_path / MARKER).write_text("an earlier demo was here")
    for epsilon, files in ((8, NOISY_LABELS), (4, {"noisy_labels.npz", name})):
        earlier = tmp_path / f"noisy_labels_lp-1st_epsilon-{epsilon}"
        earlier.mkdir()
        for file in files:
            (earlier / file).write_text("before")

    def stop(*arguments, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr(keras.Sequential, "fit", stop)
    with pytest.raises(KeyboardInterrupt):
        script.main(["--output", str(tmp_path)])
    notes = [earlier, earlier / name] if name == "notes.txt" else []
    assert sorted(tmp_path.rglob("*")) == [tmp_path / MARKER, *notes]
