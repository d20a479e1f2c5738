"""The scripts that a user would copy run as they are."""

from __future__ import annotations

import io
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import keras
import numpy as np
import pytest

from tf_labeldp.accounting import PrivacyGuarantee

EXAMPLES = Path(__file__).parents[2] / "examples"


def test_multi_stage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script = EXAMPLES / "01_multi_stage.py"
    folder = tmp_path / "output"
    monkeypatch.setattr(sys, "argv", [str(script), str(folder)])
    runpy.run_path(str(script), run_name="__main__")

    printed = capsys.readouterr().out
    assert "(2, 0)-label-DP" in printed
    # Randomized response alone has about 85 %; chance is 10 %.
    assert float(printed.rpartition("test accuracy: ")[2].strip("%\n")) > 60
    guarantee = PrivacyGuarantee.from_json((folder / "publish" / "privacy.json").read_text())
    assert guarantee.epsilon == 2.0 and guarantee.is_private
    assert keras.models.load_model(folder / "publish" / "model.keras").output_shape == (None, 10)

    # Again with the same folder: the stored draws are used, nothing is spent again.
    stored = folder / "private" / "label-store" / "draws"
    draws = {path: path.read_bytes() for path in stored.iterdir()}
    assert len(draws) == 2
    runpy.run_path(str(script), run_name="__main__")
    assert "(2, 0)-label-DP" in capsys.readouterr().out
    after = {path: path.read_bytes() for path in stored.iterdir()}
    assert after == draws


TWO_PARTY = EXAMPLES / "02_two_party_regression.py"


def run_two_party(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> None:
    monkeypatch.setattr(sys, "argv", [str(TWO_PARTY), *arguments])
    runpy.run_path(str(TWO_PARTY), run_name="__main__")


def test_two_party_regression(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("LABELDP_DATA_DIR", str(tmp_path / "no-data"))  # those of scikit-learn
    run_two_party(monkeypatch, "prepare", str(tmp_path))
    private = tmp_path / "labels-party"
    true_labels = np.loadtxt(private / "labels.csv", delimiter=",", skiprows=1)

    # The message: ids, noisy labels and the statement, nothing else.
    run_two_party(monkeypatch, "labels-party", str(tmp_path))
    sent = (tmp_path / "noisy_labels.npz").read_bytes()
    with np.load(tmp_path / "noisy_labels.npz") as message:
        assert set(message) == {"ids", "noisy_labels", "statement"}
        assert message["ids"].tolist() == true_labels[:, 0].tolist()
        assert np.mean(message["noisy_labels"] == true_labels[:, 1]) < 0.1
        guarantee = PrivacyGuarantee.from_json(str(message["statement"]))
    assert guarantee.epsilon == 2.0 and guarantee.is_private

    # A second run sends the same draws: nothing is spent again.
    run_two_party(monkeypatch, "labels-party", str(tmp_path))
    with np.load(tmp_path / "noisy_labels.npz") as again, np.load(io.BytesIO(sent)) as before:
        np.testing.assert_array_equal(again["noisy_labels"], before["noisy_labels"])

    # The features party needs the message and its own folder alone.
    shutil.rmtree(private)
    capsys.readouterr()
    fitted: list[tuple[np.ndarray, np.ndarray]] = []
    fit = keras.Sequential.fit

    def spying_fit(model: keras.Model, x: np.ndarray, y: np.ndarray, **options: object) -> object:
        fitted.append((x, y))
        return fit(model, x, y, **options)

    monkeypatch.setattr(keras.Sequential, "fit", spying_fit)
    run_two_party(monkeypatch, "features-party", str(tmp_path))
    printed = capsys.readouterr().out
    assert f"{len(true_labels)} rows have features and a noisy label" in printed
    assert "(2, 0)-label-DP" in printed
    error, constant = re.search(r"test MSE: (\S+) .*: (\S+)\)", printed).groups()  # type: ignore[union-attr]
    assert float(error) < 1.5 * float(constant)
    public = tmp_path / "features-party"

    # Each row was trained with the noisy label of its own id.
    with np.load(io.BytesIO(sent)) as message, np.load(public / "features.npz") as features:
        noisy_of = dict(zip(message["ids"], message["noisy_labels"], strict=True))
        id_of = {x.tobytes(): i for x, i in zip(features["x"], features["ids"], strict=True)}
    ((x, y),) = fitted
    assert y.tolist() == [noisy_of[id_of[row.tobytes()]] for row in x]

    assert PrivacyGuarantee.from_json((public / "privacy.json").read_text()) == guarantee
    assert keras.models.load_model(public / "model.keras").output_shape == (None, 1)


def test_two_parties_are_processes_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands: list[list[str]] = []
    monkeypatch.setattr(subprocess, "run", lambda command, check: commands.append(command))
    run_two_party(monkeypatch, str(tmp_path))
    steps = ("prepare", "labels-party", "features-party")
    assert commands == [[sys.executable, str(TWO_PARTY), step, str(tmp_path)] for step in steps]


@pytest.mark.data
def test_two_party_regression_reads_the_insurance_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, data_dir: Path
) -> None:
    if not (data_dir / "insurance" / "pg15training.csv.gz").exists():
        pytest.skip(f"no insurance data in {data_dir}")
    monkeypatch.setenv("LABELDP_DATA_DIR", str(data_dir))
    run_two_party(monkeypatch, "prepare", str(tmp_path))
    labels = np.loadtxt(tmp_path / "labels-party" / "labels.csv", delimiter=",", skiprows=1)
    with np.load(tmp_path / "features-party" / "features.npz") as features:
        # The same policies in both tables, each once, in another order; no feature is the label.
        assert sorted(features["ids"]) == sorted(labels[:, 0]) == np.unique(labels[:, 0]).tolist()
        assert features["ids"].tolist() != labels[:, 0].tolist()
        _, order = np.unique(labels[:, 0], return_index=True)
        x = features["x"][np.argsort(features["ids"])]
        assert np.max(np.abs(np.corrcoef(x.T, labels[order, 1])[-1, :-1])) < 0.3
