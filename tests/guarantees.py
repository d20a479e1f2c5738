"""The tables of promises and their tests; `make docs` writes them.

Each ``Guarantee:`` of a docstring has a name, such as ``vault.PrivateLabels.evaluate``, and its
tests have the marker ``@pytest.mark.holds(name)``. Each sentence of the pages that promises has its
tests in ``promises.json``.
"""

from __future__ import annotations

import ast
import inspect
import json
import pathlib
import re
from collections import defaultdict

ROOT = pathlib.Path(__file__).parents[1]
_SECTION = re.compile(r"^Guarantee:\n((?:    .*\n?|\n)+)", re.M)
PAGES = ("README.md", "SECURITY.md", "docs/privacy.md", "docs/report.md", "docs/scale.md")
# Words that promise.
_PROMISE = re.compile(
    r"\b(never|always|each|every|everything|only|once|refuse[sd]?|found|count(?:s|ed)?|nothing"
    r"|nobody|none|neither|detect(?:s|ed)?|withholds?|withheld)\b",
    re.I,
)
LIST = ROOT / "tests" / "promises.json"
# Why a sentence of the list has no test.
REASONS = {
    "advice": "says what the reader should do",
    "assumption": "names what others vouch for, or what the library cannot see",
    "definition": "explains a word, a figure or a mistake",
    "history": "tells what earlier versions did",
    "limit": "says what is not promised",
    "measurement": "rests on a benchmark that a page names",
    "people": "says what the maintainers do",
}
HEAD = """# Guarantees and their tests

The first sentence of each guarantee, and the tests that fail if the guarantee is broken. A further
test fails if a guarantee has none. `make docs` generates this page.
[The papers](papers.md) have the place of each theorem.

| guarantee | first sentence | tests |
|---|---|---|"""
HEAD_OF_PAGES = """
## Sentences of the pages

The sentences with a word that promises, such as *never*, *each* or *refused*, and their tests.

| page | sentence | tests |
|---|---|---|"""


def promises() -> dict[str, str]:
    """Returns the first sentence of each guarantee, by its name."""
    found = {}
    for path in sorted([*ROOT.glob("tf_labeldp/**/*.py"), *ROOT.glob("keras_layers/*.py")]):
        inside = path.relative_to(ROOT).parts
        part = inside[1] if inside[0] == "tf_labeldp" else inside[0]
        for name, node in _named(ast.parse(path.read_text(encoding="utf-8"))):
            text = inspect.cleandoc(ast.get_docstring(node, clean=True) or "")
            if section := _SECTION.search(text):
                sentence = re.split(r"(?<=[a-z)`\d])\.(?= |$)", " ".join(section[1].split()))[0]
                found[f"{part}.{name}"] = sentence.rstrip(":")
    return found


def _named(tree: ast.AST, within: str = "") -> list[tuple[str, ast.AST]]:
    found = []
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, (ast.ClassDef, ast.FunctionDef)):
            found.append((within + node.name, node))
            found += _named(node, f"{within}{node.name}.")
    return found


def sentences(page: str) -> list[str]:
    """Returns the sentences of a page that promise, without markup."""
    text = (ROOT / page).read_text(encoding="utf-8")
    text = re.sub(r"^ *```.*?^ *```$|<!--.*?-->", "", text, flags=re.M | re.S)
    # In a list of leaks, each item promises that the library has no such leak.
    leaks = text.partition("## What counts as a leak")[2].partition("\n## ")[0]
    found = []
    # A table has a line with its words above the first rule.
    text = re.sub(r"^.*\n(?=\|[-|]+\|$)", "", text, flags=re.M)
    for block in re.split(r"\n\s*\n|\n(?=\s*(?:[-*] |\||\d+\. |#))", text):
        plain = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", " ".join(block.split()))
        plain = re.sub(r"^(?:[-*]|\d+\.) ", "", plain.replace("**", ""))
        if plain.startswith("|"):
            rows = [] if set(plain) <= set("|-: ") else [plain.strip("| ")]
        else:
            rows = re.split(r"(?<=[.?!])\s+(?=[A-Z`(*])", plain)
        if not plain.startswith("#"):
            listed = block.strip() != "" and block.strip() in leaks
            found += [row for row in rows if listed or _PROMISE.search(row)]
    return found


def listed() -> dict[str, dict[str, list[str] | str]]:
    """Returns the tests, or the reason why there is none, by page and sentence."""
    return json.loads(LIST.read_text(encoding="utf-8"))


def all_tests() -> set[str]:
    """Returns the names of all tests."""
    return {
        f"{path.relative_to(ROOT / 'tests').as_posix()}::{name}"
        for path in ROOT.glob("tests/*/test_*.py")
        for name, _ in _named(ast.parse(path.read_text(encoding="utf-8")))
        if name.rpartition(".")[2].startswith("test_")
    }


def tests() -> dict[str, list[str]]:
    """Returns the tests of each guarantee, by its name."""
    found = defaultdict(list)
    for path in sorted(ROOT.glob("tests/*/test_*.py")):
        for name, node in _named(ast.parse(path.read_text(encoding="utf-8"))):
            for call in getattr(node, "decorator_list", ()):
                if isinstance(call, ast.Call) and ast.unparse(call.func) == "pytest.mark.holds":
                    test = f"{path.relative_to(ROOT / 'tests').as_posix()}::{name}"
                    for argument in call.args:
                        found[ast.literal_eval(argument)].append(test)
    return dict(found)


def page() -> str:
    """Returns the page of the documentation: a table of all guarantees."""
    tests_of = tests()
    lines = [HEAD]
    for name, sentence in sorted(promises().items()):
        shown = "<br>".join(f"`{test}`" for test in tests_of[name])
        lines.append(f"| `{name}` | {_cell(sentence)} | {shown} |")
    lines.append(HEAD_OF_PAGES)
    for name, sentences_of in listed().items():
        for sentence, found in sentences_of.items():
            if isinstance(found, list):
                shown = "<br>".join(f"`{test}`" for test in found)
                lines.append(f"| {name} | {_cell(sentence)} | {shown} |")
    return "\n".join(lines) + "\n"


def _cell(text: str) -> str:
    return text.replace("|", chr(92) + "|")
