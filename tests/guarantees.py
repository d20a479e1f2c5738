"""The table of guarantees and their tests, from docstrings and markers; `make docs` writes it.

Each ``Guarantee:`` of a docstring has a name, such as ``vault.PrivateLabels.evaluate``, and its
tests have the marker ``@pytest.mark.holds(name)``.
"""

from __future__ import annotations

import ast
import inspect
import pathlib
import re
from collections import defaultdict

ROOT = pathlib.Path(__file__).parents[1]
_SECTION = re.compile(r"^Guarantee:\n((?:    .*\n?|\n)+)", re.M)
HEAD = """# Guarantees and their tests

The first sentence of each guarantee, and the tests that fail if the guarantee is broken. A further
test fails if a guarantee has none. `make docs` generates this page.
[The papers](papers.md) have the place of each theorem.

| guarantee | first sentence | tests |
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
        lines.append(f"| `{name}` | {sentence.replace('|', chr(92) + '|')} | {shown} |")
    return "\n".join(lines) + "\n"
