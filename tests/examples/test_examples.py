"""The scripts that a user would copy run as they are."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import keras
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
