"""Which test holds which guarantee: the table of docs/coverage.md, made of docstrings and markers.

``python tests/guarantees.py`` writes the table. Each ``Guarantee:`` of a docstring has a name, such
as ``vault.PrivateLabels.evaluate``, and tests say ``@pytest.mark.holds(name)``.
"""

from __future__ import annotations

import ast
import inspect
import pathlib
import re
from collections import defaultdict

ROOT = pathlib.Path(__file__).parents[1]
PAGE = ROOT / "docs" / "coverage.md"
_SECTION = re.compile(r"^Guarantee:\n((?:    .*\n?|\n)+)", re.M)
_TABLE = re.compile(r"(?<=<!-- guarantees -->\n).*?(?=<!-- end -->)", re.S)


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


def held() -> dict[str, list[str]]:
    """Returns the tests that hold each guarantee, by its name."""
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
    """Returns the page with its table as it should be."""
    tests = held()
    lines = ["| guarantee | says first | held by |", "|---|---|---|"]
    for name, sentence in sorted(promises().items()):
        shown = "<br>".join(f"`{test}`" for test in tests.get(name, ["nothing"]))
        lines.append(f"| `{name}` | {sentence.replace('|', chr(92) + '|')} | {shown} |")
    table = "\n".join(lines) + "\n"
    return _TABLE.sub(lambda _: table, PAGE.read_text(encoding="utf-8"))


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
