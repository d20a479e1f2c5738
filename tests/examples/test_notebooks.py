"""The notebooks of the site are the example scripts, and run from top to bottom."""

from __future__ import annotations

import os
import runpy
from pathlib import Path

import nbclient
import nbformat
import pytest

ROOT = Path(__file__).parents[2]
CONF = runpy.run_path(str(ROOT / "docs" / "conf.py"))
NOTEBOOKS = {name: CONF["notebook"](name, title) for name, title in CONF["TUTORIALS"].items()}


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_a_notebook_has_the_whole_script(name):
    """So the tests that run the script run its notebook."""
    notebook = NOTEBOOKS[name]
    nbformat.validate(notebook)
    source = (ROOT / "examples" / f"{name}.py").read_text(encoding="utf-8")
    code = [cell.source for cell in notebook.cells if cell.cell_type == "code"]
    if f"%run {name}.py" in code:
        assert f"%%writefile {name}.py\n{source}" in code
    else:
        statements = "\n".join(each for each in code if not each.startswith("%%writefile"))
        expected = source.split('"""', 2)[2].replace("parse_args()", "parse_args([])")
        # Numbered comments are text there.
        lines = [line for line in expected.splitlines() if line and not line.startswith("#")]
        found = [line for line in statements.splitlines() if line and not line.startswith("#")]
        assert found == lines


@pytest.mark.parametrize("name", ["14_attacks", pytest.param("12_ads", marks=pytest.mark.slow)])
def test_a_notebook_runs_in_an_empty_folder(name, tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    notebook = NOTEBOOKS[name]
    if name == "12_ads":
        notebook.cells[-1].source += " all ads-output --rows 20000"
    nbclient.NotebookClient(notebook, timeout=600).execute(cwd=str(tmp_path))
    shown = "".join(
        output.get("text", "") for cell in notebook.cells for output in cell.get("outputs", [])
    )
    if name == "14_attacks":
        assert shown.count("the claim is FALSE") == 2 and "100.0% are right" in shown
        assert os.listdir(tmp_path) in ([], ["ipython"])
    else:
        assert "(4, 0)-label-DP" in shown and (tmp_path / "ads-output" / "publish").exists()
