"""Who may know whom: the table of parts, held by reading the imports.

A part may import from those above it in `parts.bzl`, never from below, and third-party packages
only as listed. Imports inside functions and under `TYPE_CHECKING` count like all others.
"""

from __future__ import annotations

import ast
import re
import sys
from importlib.util import resolve_name
from pathlib import Path

ROOT = Path(__file__).parents[2]

# Each part in the order of the layers, and the third-party packages that it may import. The file
# reads as Python.
TABLE: dict[str, dict[str, list[str]]] = {}
exec((ROOT / "parts.bzl").read_text(encoding="utf-8"), {}, TABLE)
PARTS = TABLE["PARTS"]
ORDER = list(PARTS)
# These are outside the order: the lazy front, and the building blocks that know Keras alone.
THIRD_PARTY_OUTSIDE = {"": [], "_version": [], **TABLE["OUTSIDE"]}


def part_of(module):
    """Names the part of a module: `tf_labeldp.data._x` is in `data`, `tf_labeldp` in the front."""
    return module.partition(".")[2].partition(".")[0]


def imported_modules(tree, package):
    """Lists (line, absolute dotted name) of all that is imported, names of `from` included."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = resolve_name("." * node.level + (node.module or ""), package)
            found += [(node.lineno, f"{base}.{alias.name}") for alias in node.names]
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            called = ast.unparse(node.func).rpartition(".")[2]
            if called in ("import_module", "__import__") and isinstance(node.args[0].value, str):
                found.append((node.lineno, resolve_name(node.args[0].value, package)))
    return found


def problem_with(name, part):
    """Says why `part` may not import `name`, or gives None if it may."""
    top = name.partition(".")[0]
    if top in sys.stdlib_module_names:
        return None
    third_party = PARTS[part] if part in PARTS else THIRD_PARTY_OUTSIDE[part]
    if top == "keras_layers":
        return "the installed name is tf_labeldp.keras_layers"
    if top != "tf_labeldp":
        if "*" in third_party or top in third_party:
            return None
        return f"third-party packages allowed here: {', '.join(third_party) or 'none'}"

    target = part_of(name)
    if target in (part, "_version", "__version__") or part in ("", "cli"):
        return None
    if target == "keras_layers":
        allowed = "keras" in third_party
        return None if allowed else "tf_labeldp.keras_layers is for parts that may import keras"
    if target not in PARTS:
        return "import from the part itself: the front hides which part is used"
    if part not in PARTS or ORDER.index(target) > ORDER.index(part):
        return f"`{target}` is not above `{part or 'the front'}`"
    return None


def violations(source, module, *, is_package=False):
    """Lists the imports of a source that its place in the table forbids."""
    part = part_of(module)
    if part not in PARTS and part not in THIRD_PARTY_OUTSIDE:
        return [f"{module}: no such part; give it a place in parts.bzl"]
    package = module if is_package else module.rpartition(".")[0]
    return [
        f"{module}:{line}: imports {name}: {problem}"
        for line, name in imported_modules(ast.parse(source), package)
        if (problem := problem_with(name, part)) is not None
    ]


def source_files():
    """Maps each installed module name to its file; packages end in `.__init__`."""
    paths = [*ROOT.glob("tf_labeldp/**/*.py"), *ROOT.glob("keras_layers/**/*.py")]
    modules = {}
    for path in sorted(paths):
        name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        modules[f"tf_labeldp.{name}" if name.startswith("keras_layers") else name] = path
    return modules


SOURCES = source_files()


def test_imports_keep_to_the_table():
    assert {"tf_labeldp.__init__", "tf_labeldp.keras_layers.__init__"} <= set(SOURCES)
    found = []
    for module, path in SOURCES.items():
        name = module.removesuffix(".__init__")
        found += violations(path.read_text("utf-8"), name, is_package=name != module)
    assert found == []


def test_a_forbidden_import_is_caught():
    forbidden = [
        ("tf_labeldp.accounting._x", "import tf_labeldp.mechanisms"),
        ("tf_labeldp.accounting._x", "from tf_labeldp import mechanisms"),
        ("tf_labeldp.accounting._x", "from .. import mechanisms"),
        ("tf_labeldp.accounting._x", "from ..mechanisms.base import Mechanism"),
        ("tf_labeldp.accounting._x", "def f():\n    from ..data import randomize_labels"),
        ("tf_labeldp.accounting._x", "import importlib\nimportlib.import_module('..data', 'x')"),
        ("tf_labeldp.accounting._x", "from tf_labeldp import RandomizedResponse"),
        ("tf_labeldp.accounting._x", "import tf_labeldp"),
        ("tf_labeldp.accounting._x", "import tensorflow as tf"),
        ("tf_labeldp.mechanisms._x", "def f():\n    import sklearn.cluster"),
        ("tf_labeldp.mechanisms._x", "from ..keras_layers import Mixup"),
        ("tf_labeldp.vault._x", "from ..training import MultiStageTraining"),
        ("tf_labeldp.vault._x", "from .. import data"),
        ("tf_labeldp._validate", "from .accounting import PrivacyBudget"),
        ("tf_labeldp.training._x", "from ..tf_privacy import QueryNoise"),
        ("tf_labeldp.keras_layers._x", "from .. import _validate"),
        ("tf_labeldp.keras_layers._x", "import tensorflow"),
        ("tf_labeldp.cli._x", "import keras_layers"),
        ("tf_labeldp.surprise", "import numpy"),
    ]
    assert [one for one in forbidden if len(violations(one[1], one[0])) != 1] == []


def test_relative_imports_of_a_package_start_at_itself():
    assert violations("from . import data", "tf_labeldp.accounting", is_package=True) == []
    assert len(violations("from .. import data", "tf_labeldp.accounting", is_package=True)) == 1


def test_an_allowed_import_passes():
    allowed = [
        ("tf_labeldp.mechanisms._x", "import json\nfrom ..accounting import PrivacyBudget"),
        ("tf_labeldp.mechanisms._x", "from ._base import Mechanism\nfrom .. import _validate"),
        ("tf_labeldp.vault._x", "from .. import mechanisms"),
        ("tf_labeldp.vault._x", "from .._version import __version__"),
        ("tf_labeldp.training._x", "import keras\nfrom tf_labeldp.keras_layers import Mixup"),
        ("tf_labeldp.cli._x", "import matplotlib.pyplot\nimport tf_labeldp as ldp"),
        ("tf_labeldp.keras_layers._x", "import keras\nfrom ._numerics import f"),
    ]
    assert [one for one in allowed if violations(one[1], one[0])] == []


def private_file(name, part):
    """Names the private file of another part that an imported name lies in, or gives None."""
    words = name.split(".")
    if words[0] != "tf_labeldp" or len(words) < 3 or not words[2].startswith("_"):
        return None
    return None if words[1] in (part, "_version") else ".".join(words[1:3])


def private_imports(source, module):
    """Lists the private files of other parts that a source imports, one for each statement."""
    package = module.removesuffix(".__init__").rpartition(".")[0]
    found = imported_modules(ast.parse(source), package)
    files = {(line, private_file(name, part_of(module))) for line, name in found}
    return [file for _, file in sorted(files, key=str) if file is not None]


def test_private_files_of_another_part_are_imported_where_the_table_says():
    found: dict[str, int] = {}
    for module, path in SOURCES.items():
        for name in private_imports(path.read_text(encoding="utf-8"), module):
            found[name] = found.get(name, 0) + 1
    assert found == TABLE["PRIVATE_IMPORTS"]
    assert sum(found.values()) <= 10


def test_a_private_import_is_counted():
    for source in (
        "from tf_labeldp.vault._draws import Draws",
        "from tf_labeldp.vault import _draws",
        "from ..vault._draws import Draws",
        "def f():\n    import tf_labeldp.vault._draws",
    ):
        assert private_imports(source, "tf_labeldp.heads._x") == ["vault._draws"]
        assert private_imports(source, "tf_labeldp.vault._x") == []


def lines_of(part):
    """Counts the lines of a part; "" is the front, with its version."""
    parts = {path: part_of(name.removesuffix(".__init__")) for name, path in SOURCES.items()}
    files = [path for path, found in parts.items() if found.replace("_version", "") == part]
    return sum(len(path.read_text(encoding="utf-8").splitlines()) for path in files)


def test_a_part_has_no_more_lines_than_the_table_allows():
    lines = {part: lines_of(part) for part in ("", *ORDER, *TABLE["OUTSIDE"])}
    assert {part: n for part, n in lines.items() if not 0 < n <= TABLE["MOST_LINES"][part]} == {}


def file_of(name, files):
    """Gives the file that an imported name lies in; None if it is in none of these."""
    while name:
        for found in (name, f"{name}.__init__"):
            if found in files:
                return found
        name = name.rpartition(".")[0]
    return None


def cycle(sources):
    """Gives the files that import each other in a circle, and those between two circles."""
    files, above = set(sources), {}
    for module, source in sources.items():
        package = module.rpartition(".")[0]  # of a file and of an `__init__` alike
        names = [name for _, name in imported_modules(ast.parse(source), package)]
        above[module] = {file_of(name, files) for name in names} - {None, module}
    while True:
        imported = set().union(*above.values())
        ends = {module for module in above if not above[module] or module not in imported}
        if not ends:
            return sorted(above)
        above = {module: above[module] - ends for module in set(above) - ends}


def part_sources(part):
    texts = {name: path.read_text(encoding="utf-8") for name, path in SOURCES.items()}
    return {name: text for name, text in texts.items() if part_of(name) == part}


def test_the_files_of_a_part_import_each_other_in_an_order():
    assert {part: found for part in ORDER if (found := cycle(part_sources(part)))} == {}


def test_a_cycle_is_caught():
    closing = [
        "from tf_labeldp.vault.noisy_labels import NoisyLabels",
        "from ._noisy_labels import NoisyLabels",
        "from . import _noisy_labels",
        "from tf_labeldp.vault import PrivateLabels",
        "if TYPE_CHECKING:\n    from tf_labeldp.vault.private_labels import PrivateLabels",
        "def f():\n    from tf_labeldp.vault.noisy_labels import NoisyLabels",
        "import importlib\nimportlib.import_module('tf_labeldp.vault.noisy_labels')",
    ]
    for source in closing:
        sources = part_sources("vault")
        sources["tf_labeldp.vault.label_kinds"] += f"\n{source}\n"
        assert "tf_labeldp.vault.label_kinds" in cycle(sources), source


def test_bazel_reads_the_same_table():
    build = ast.parse((ROOT / "BUILD").read_text(encoding="utf-8"))  # Starlark reads as Python
    loads = [ast.unparse(node) for node in build.body if "load(" in ast.unparse(node)]
    assert "load('//:parts.bzl', 'PARTS')" in loads


def test_the_picture_of_the_parts_has_the_same_order():
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    picture = text.partition("```text")[2].partition("```")[0]
    shown = [word for word in re.findall(r"\w+", picture) if word in {*PARTS, *TABLE["OUTSIDE"]}]
    listed = [part for part in (*PARTS, *TABLE["OUTSIDE"]) if not part.startswith("_")]
    assert list(dict.fromkeys(shown)) == listed
