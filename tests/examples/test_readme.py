"""The code blocks of the README and of all pages run unchanged."""

from __future__ import annotations

import operator
import re
import shutil
import subprocess
import textwrap
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

import pytest
from slow_cases import with_slow

import tf_labeldp
from tf_labeldp.cli import main
from tf_labeldp.vault import NoisyLabels, guarantee

ROOT = Path(__file__).parents[2]
PAGES = {
    page.relative_to(ROOT).as_posix(): page.read_text(encoding="utf-8")
    for folder in ("", "docs", "benchmarks")
    for page in sorted((ROOT / folder).glob("*.md"))
    if page.name not in ("CHANGELOG.md", "coverage.md")
}
BLOCK = re.compile(r"^( *)```python\n(.*?)^\1```", re.M | re.S)
CODE = re.compile(r"^```python\n(.*?)^```", re.M | re.S)


class Section(NamedTuple):
    """Words and numbers that a section prints, and its names and files that have a statement."""

    shown: tuple[str, ...] = ()
    private: tuple[str, ...] = ()
    numbers: Mapping[str, tuple[float, float]] = MappingProxyType({})


SECTIONS = {
    ("README.md", "One call"): Section(
        ("A table: random Fourier features", "(1, 1e-05)-label-DP"),
        ("model", "trained/model.keras"),
    ),
    ("README.md", "Ten lines"): Section(("(2, 0)-label-DP",), ("labels", "digits.keras")),
    ("docs/guide.md", "A Keras model on noisy labels"): Section(
        ("(2, 0)-label-DP", "The labels of this fit are those of this draw.", "(1.60944, 0)"),
        ("stages", "digits.keras", "transform", "survey"),
    ),
    ("docs/guide.md", "Labels that come later"): Section(("6 [0 1 2 3 4 5] 1.0",), ("visits",)),
    ("docs/guide.md", "Numbers instead of classes"): Section(
        ("RROnBins(epsilon=", "(1, 0)-label-DP"), ("amounts",)
    ),
    ("docs/guide.md", "Tables"): Section((), ("trees", "model", "net", "trees.keras")),
    # The head on digits: 0.950 with a standard deviation of 0.006 in 40 fits.
    ("docs/guide.md", "One release instead of many draws"): Section(
        ("(1, 1e-05)-label-DP",), ("head",), {r"^(0\.\d+)$": (0.9, 1.0)}
    ),
    ("docs/guide.md", "Clusters of the features"): Section(("(1, 0)-label-DP",), ("noisy",)),
    ("docs/guide.md", "Noisy labels and all the images"): Section(
        ("(3, 0)-label-DP",), ("network.keras",)
    ),
    ("docs/guide.md", "Preferences between answers"): Section(("(1, 0)-label-DP",), ("head",)),
    # DP-SGD spends just below its target.
    ("docs/guide.md", "DP-SGD on labels"): Section(
        (), ("private_model",), {r"^\((3\.9\d+), 0\.0001\)-label-DP": (3.9, 4.0)}
    ),
    ("docs/guide.md", "Evaluate and tune"): Section(("(1, 1e-05)-label-DP",), ("sets",)),
}
QUICK = {
    ("docs/guide.md", "Labels that come later"),
    ("docs/guide.md", "Numbers instead of classes"),
    ("docs/guide.md", "Evaluate and tune"),
}
# They save time.
FEWER_EPOCHS = {
    "epochs_per_stage=10": "epochs_per_stage=2",
    "epochs=120": "epochs=2",
}
# Pages that run by themselves, with words that they print. Blocks of engines are left out.
ALONE = {
    "privacy.md": ["quoted 0.73, at least 1.4", "NOT PRIVATE: seeded", "True\nTrue\n"],
    "report.md": ["2.0", "\nTrue\n"],
    "scale.md": [],
    "start.md": ["(1, 1e-05)-label-DP", "at epsilon 1", "(0.9, 0)-label-DP"],
    "extend.md": [
        "(1, 0)-label-DP",
        "its author's claim",
        "(1.5, 0)-label-DP",
        "(2, 0.0001)-label-DP",
        "(1, 1e-06)-label-DP",
    ],
}
# Accuracies that a page prints by name, of 2,000 fresh noisy labels at epsilon 1: their standard
# errors are 0.5 / (2 p - 1) / sqrt(2000) = 0.024 and sqrt(p (1 - p)) / (2 p - 1) / sqrt(2000) =
# 0.021 with p = e / (1 + e) = 0.731. Any threshold on the ages is right for 0.487 to 0.513 of the
# labels, and a threshold between 0.3 and 0.7 on the bills for 0.999. The limits add seven standard
# errors. The lower bound of an audit is 0.967 with a standard deviation of 0.011.
# The share of labels that 30 draws reveal, 73 %, has a standard error of 1 %.
NUMBERS = {
    "privacy.md": {"age": (0.31, 0.69), "bill": (0.84, 1.16), "30 draws:": (66, 80)},
    "report.md": {"epsilon is at least": (0.89, 1.05)},
}
OF_ENGINES = "with beam.Pipeline"


def sections(page):
    """Returns the blocks of code of each section, after those that stand before all sections."""
    first, *others = re.split(r"^## (.*)$", PAGES[page], flags=re.M)
    before = CODE.findall(first)
    found = {
        title: CODE.findall(text) for title, text in zip(others[::2], others[1::2], strict=True)
    }
    return {title: [*before, *blocks] for title, blocks in found.items() if blocks}


@pytest.mark.parametrize(("page", "title"), with_slow(SECTIONS, SECTIONS.keys() - QUICK))
def test_a_section_runs_by_itself(page, title, tmp_path, monkeypatch, capsys):
    code = "\n".join(sections(page)[title])
    for epochs, fewer in FEWER_EPOCHS.items():
        code = code.replace(epochs, fewer)
    monkeypatch.chdir(tmp_path)
    exec(compile(code, f"{page}: {title}", "exec"), names := {"__name__": "page"})
    shown = capsys.readouterr().out
    expected = SECTIONS[page, title]
    assert [words for words in expected.shown if words not in shown] == []
    for name in expected.private:
        is_file = name not in names
        assert guarantee(tmp_path / name if is_file else names[name]).is_private
    for pattern, (low, high) in expected.numbers.items():
        assert low < float(re.findall(pattern, shown, re.M)[-1]) < high


def test_each_section_with_code_is_run():
    for page in ("README.md", "docs/guide.md"):
        assert [(page, title) for title in sections(page)] == [
            key for key in SECTIONS if key[0] == page
        ]
    code = "".join(block for key in SECTIONS for block in sections(key[0])[key[1]])
    assert [epochs for epochs in FEWER_EPOCHS if code.count(epochs) != 1] == []


@pytest.mark.slow
@pytest.mark.parametrize("name", ALONE)
def test_the_blocks_of_a_page_run(name, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "private").mkdir()
    names: dict[str, object] = {"__name__": "page"}
    text = PAGES[f"docs/{name}"]
    for _, block in BLOCK.findall(text):
        if OF_ENGINES not in block:
            exec(compile(textwrap.dedent(block), name, "exec"), names)
    shown = capsys.readouterr().out
    words = list(ALONE[name])
    # The statement on this page is part of its output.
    if name == "start.md":
        (statement,) = re.findall(r"^```text\n(.*?)^```", text, re.M | re.S)
        words += [line for line in statement.splitlines() if line.strip() != "..."]
    assert [line for line in words if line not in shown] == []
    for word, (low, high) in NUMBERS.get(name, {}).items():
        (number,) = re.findall(rf"^.*{word} ([\d.]+\d)", shown, re.M)
        assert low < float(number) < high


def test_every_page_with_code_is_run():
    with_code = {page.rpartition("/")[2] for page, text in PAGES.items() if BLOCK.search(text)}
    assert with_code == {"README.md", "guide.md", *ALONE}


def test_pictures_have_alternative_texts():
    pictures = re.findall(r"!\[(.*?)\]\((.*?)\)", "".join(PAGES.values()))
    assert len(pictures) >= 10
    assert [target for words, target in pictures if len(words) < 15] == []


def test_the_labels_partys_command_runs(tmp_path, monkeypatch, capsys):
    text = PAGES["docs/guide.md"].replace("\\\n", " ")
    commands = re.findall(r"^tf-labeldp (randomize .*)$", text, re.M)
    assert len(commands) == 1
    monkeypatch.chdir(tmp_path)
    rows = "".join(f"{i},{i % 450}\n" for i in range(1000))
    Path("labels.csv").write_text(f"id,amount\n{rows}", encoding="utf-8")
    assert main(commands[0].split()) == 0
    assert len(Path("noisy.csv").read_text(encoding="utf-8").splitlines()) == 1001
    (loads,) = re.findall(r"`ldp\.(NoisyLabels\.load\(.*?\))`", text)
    noisy = eval(loads, {"NoisyLabels": NoisyLabels})
    assert len(noisy) == 1000 and noisy.guarantee().epsilon == 1.0
    assert Path("noisy.csv.privacy.json").exists()
    assert "(1, 0)-label-DP" in capsys.readouterr().out


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
def test_make_installs_what_the_pages_say():
    """The demo needs one extra, of matplotlib; the engines have an environment each."""

    def commands(*targets):
        run = ["make", "--dry-run", "--always-make", "TFX_PYTHON=python3.10", *targets]
        done = subprocess.run(run, cwd=ROOT, capture_output=True, text=True, check=True)
        return done.stdout

    installed = re.findall(r"pip install (.*)", commands("demo"))
    assert [line for line in installed if "--upgrade" not in line] == ["-q -e '.[plots]'"]
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    (plots,) = re.findall(r"^plots = \[(.*)\]$", project, re.M)
    assert re.findall(r'"([a-z-]+)', plots) == ["matplotlib"]
    engines = commands("test-beam", "test-spark", "test-tfx")
    folders = re.findall(r"-m venv (\S+)", engines)
    assert len(set(folders)) == len(folders) == 3


def test_the_readme_is_short():
    assert len(PAGES["README.md"].splitlines()) <= 120


@pytest.mark.parametrize("page", PAGES)
def test_a_page_names_what_exists(page):
    text = PAGES[page]
    # Another installation lacks `keras_layers` in a Python that starts in the checkout.
    assert re.findall(r"pip install (?!-e)\S*\.(?:\[|'|\s)", text) == []
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z-]+):", makefile, re.M))
    assert set(re.findall(r"(?:^|`)make ([a-z-]+)", text, re.M)) <= targets
    links = re.findall(r"\]\((?!https?:)([^)#]+)\)", text)
    generated = {"coverage.md"}
    missing = {link for link in links if not ((ROOT / page).parent / link).exists()}
    assert missing <= generated
    files = re.findall(r"`([a-z0-9_/]+\.py)`", text)
    folders = [ROOT, *(ROOT / name for name in ("tf_labeldp", "benchmarks", "examples"))]
    assert [file for file in files if not any((folder / file).exists() for folder in folders)] == []
    for name in re.findall(r"\bldp\.(\w+(?:\.\w+)*)", text):
        operator.attrgetter(name)(tf_labeldp)


def test_the_commands_of_the_pages_exist(capsys):
    text = "".join(PAGES.values()).replace("\\\n", " ")
    commands = re.findall(r"(?:^|`)tf-labeldp ([a-z-]+)((?:[^`#\n]|\n--)*)", text, re.M)
    assert {verb for verb, _ in commands} >= {"train", "randomize", "report", "verify"}
    for verb, arguments in commands:
        with pytest.raises(SystemExit, match="0"):
            main([verb, "--help"])
        options = capsys.readouterr().out
        assert [name for name in re.findall(r"--[a-z-]+", arguments) if name not in options] == []
