"""The notebooks of the site are the example scripts, and run from top to bottom."""

from __future__ import annotations

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


def run(notebook, folder, monkeypatch):
    """Runs a notebook in a folder, and returns what it prints."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("IPYTHONDIR", str(folder / "ipython"))
    nbclient.NotebookClient(notebook, timeout=600).execute(cwd=str(folder))
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    return "".join(output.get("text", "") for output in outputs)


@pytest.mark.slow
def test_a_notebook_runs_in_an_empty_folder(tmp_path, monkeypatch):
    shown = run(NOTEBOOKS["14_attacks"], tmp_path, monkeypatch)
    assert shown.count("the claim is FALSE") == 2 and "100.0% are right" in shown
    assert {path.name for path in tmp_path.iterdir()} <= {"ipython"}


def test_a_notebook_of_two_parties_writes_its_script(tmp_path, monkeypatch):
    notebook = NOTEBOOKS["12_ads"]
    notebook.cells[-1].source += " --help"
    assert "advertiser" in run(notebook, tmp_path, monkeypatch)
    assert {"12_ads.py", "click_logs.py"} <= {path.name for path in tmp_path.iterdir()}
