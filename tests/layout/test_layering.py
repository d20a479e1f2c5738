"""The parts import each other as `parts.bzl` lists them: only upwards, with the packages it names.

Imports inside functions and under `TYPE_CHECKING` count like all others.
"""

from __future__ import annotations

import ast
import inspect
import re
import sys
import types
from collections import Counter
from importlib.util import resolve_name
from pathlib import Path

import pytest
from _entry_points import TABLE

ROOT = Path(__file__).parents[2]

PARTS = TABLE["PARTS"]
ORDER = list(PARTS)
# The lazy front and the building blocks, which know Keras alone, are outside the order.
THIRD_PARTY = {"": [], "_version": [], **PARTS, **TABLE["OUTSIDE"]}


def part_of(module):
    """Returns the part of a module: `data` for `tf_labeldp.data._x`, "" for the front."""
    return module.partition(".")[2].partition(".")[0]


def imported_modules(tree, package):
    """Lists (line, absolute dotted name) of all imports, with the names of `from`."""
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
    """Returns the reason why `part` may not import `name`, or None if it may."""
    top = name.partition(".")[0]
    if top in sys.stdlib_module_names:
        return None
    allowed = THIRD_PARTY[part]
    if top == "keras_layers":
        return "the installed name is tf_labeldp.keras_layers"
    if top != "tf_labeldp":
        if "*" in allowed or top in allowed:
            return None
        return f"third-party packages allowed here: {', '.join(allowed) or 'none'}"

    target = part_of(name)
    if target in (part, "_version", "__version__") or part in ("", "cli"):
        return None
    if target == "keras_layers":
        is_allowed = "keras" in allowed
        return None if is_allowed else "tf_labeldp.keras_layers is for parts that may import keras"
    if target not in PARTS:
        return "import from the part itself: the front hides which part is used"
    if part not in PARTS or ORDER.index(target) > ORDER.index(part):
        return f"`{target}` is not above `{part or 'the front'}`"
    return None


def violations(source, module, *, is_package=False):
    """Lists the imports of a source that the table forbids."""
    part = part_of(module)
    if part not in THIRD_PARTY:
        return [f"{module}: no such part; add it to parts.bzl"]
    package = module if is_package else module.rpartition(".")[0]
    return [
        f"{module}:{line}: imports {name}: {problem}"
        for line, name in imported_modules(ast.parse(source), package)
        if (problem := problem_with(name, part)) is not None
    ]


def source_texts():
    """Maps each installed module name to its source; packages end in `.__init__`."""
    texts = {}
    for path in sorted([*ROOT.glob("tf_labeldp/**/*.py"), *ROOT.glob("keras_layers/**/*.py")]):
        name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        name = f"tf_labeldp.{name}" if name.startswith("keras_layers") else name
        texts[name] = path.read_text(encoding="utf-8")
    return texts


SOURCES = source_texts()


@pytest.mark.slow
def test_imports_keep_to_the_table():
    assert {"tf_labeldp.__init__", "tf_labeldp.keras_layers.__init__"} <= set(SOURCES)
    found = []
    for module, source in SOURCES.items():
        name = module.removesuffix(".__init__")
        found += violations(source, name, is_package=name != module)
    assert found == []


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("accounting._x", "import tf_labeldp.mechanisms"),
        ("accounting._x", "from tf_labeldp import mechanisms"),
        ("accounting._x", "from .. import mechanisms"),
        ("accounting._x", "from ..mechanisms.base import Mechanism"),
        ("accounting._x", "def f():\n    from ..data import randomize_labels"),
        ("accounting._x", "import importlib\nimportlib.import_module('..data', 'x')"),
        ("accounting._x", "from tf_labeldp import RandomizedResponse"),
        ("accounting._x", "import tf_labeldp"),
        ("accounting._x", "import tensorflow as tf"),
        ("mechanisms._x", "def f():\n    import sklearn.cluster"),
        ("mechanisms._x", "from ..keras_layers import Mixup"),
        ("_validate", "from .accounting import PrivacyBudget"),
        ("keras_layers._x", "from .. import _validate"),
        ("keras_layers._x", "import tensorflow"),
        ("cli._x", "import keras_layers"),
        ("surprise", "import numpy"),
    ],
)
def test_a_forbidden_import_is_caught(module, source):
    assert len(violations(source, f"tf_labeldp.{module}")) == 1


def test_an_allowed_import_passes():
    for module, source in (
        ("mechanisms._x", "import json\nfrom ..accounting import PrivacyBudget"),
        ("mechanisms._x", "from ._base import Mechanism\nfrom .. import _validate"),
        ("vault._x", "from .. import mechanisms\nfrom .._version import __version__"),
        ("training._x", "import keras\nfrom tf_labeldp.keras_layers import Mixup"),
        ("cli._x", "import matplotlib.pyplot\nimport tf_labeldp as ldp"),
        ("keras_layers._x", "import keras\nfrom ._numerics import f"),
    ):
        assert violations(source, f"tf_labeldp.{module}") == [], source
    # Relative imports of a package start at the package.
    assert violations("from . import data", "tf_labeldp.accounting", is_package=True) == []
    assert len(violations("from .. import data", "tf_labeldp.accounting", is_package=True)) == 1


def private_imports(source, module):
    """Lists the private files of other parts that a source imports, one for each statement."""
    package = module.removesuffix(".__init__").rpartition(".")[0]
    files = set()
    for line, name in imported_modules(ast.parse(source), package):
        top, *inside = name.split(".")[:3]
        is_private = len(inside) == 2 and inside[1].startswith("_")
        if top == "tf_labeldp" and is_private and inside[0] not in (part_of(module), "_version"):
            files.add((line, ".".join(inside)))
    return [file for _, file in sorted(files)]


def test_private_files_of_another_part_are_imported_where_the_table_lists_them():
    found = Counter(file for item in SOURCES.items() for file in private_imports(*reversed(item)))
    assert found == TABLE["PRIVATE_IMPORTS"]
    assert found.total() <= 10


def test_a_private_import_is_counted():
    for source in (
        "from tf_labeldp.vault._draws import Draws",
        "from tf_labeldp.vault import _draws",
        "from ..vault._draws import Draws",
        "def f():\n    import tf_labeldp.vault._draws",
    ):
        assert private_imports(source, "tf_labeldp.heads._x") == ["vault._draws"]
        assert private_imports(source, "tf_labeldp.vault._x") == []


def file_of(name, files):
    """Returns the file of an imported name, or None if it is in none of these."""
    while name:
        for module in (name, f"{name}.__init__"):
            if module in files:
                return module
        name = name.rpartition(".")[0]
    return None


def cycle(sources):
    """Returns the files that import each other in a circle, and those between two circles."""
    above = {}
    for module, source in sources.items():
        names = imported_modules(ast.parse(source), module.rpartition(".")[0])
        above[module] = {file_of(name, sources) for _, name in names} - {None, module}
    while True:
        imported = set().union(*above.values())
        ends = {module for module in above if not above[module] or module not in imported}
        if not ends:
            return sorted(above)
        above = {module: above[module] - ends for module in set(above) - ends}


def sources_of(part):
    return {name: source for name, source in SOURCES.items() if part_of(name) == part}


@pytest.mark.slow
def test_the_files_of_a_part_import_each_other_without_a_cycle():
    assert {part: found for part in ORDER if (found := cycle(sources_of(part)))} == {}


@pytest.mark.parametrize(
    "source",
    [
        "from tf_labeldp.vault.noisy_labels import NoisyLabels",
        "from .noisy_labels import NoisyLabels",
        "from . import noisy_labels",
        "from tf_labeldp.vault import PrivateLabels",
        "if TYPE_CHECKING:\n    from tf_labeldp.vault.private_labels import PrivateLabels",
        "def f():\n    from tf_labeldp.vault.noisy_labels import NoisyLabels",
        "import importlib\nimportlib.import_module('tf_labeldp.vault.noisy_labels')",
    ],
)
def test_a_cycle_is_caught(source):
    sources = sources_of("vault")
    sources["tf_labeldp.vault.label_kinds"] += f"\n{source}\n"
    assert "tf_labeldp.vault.label_kinds" in cycle(sources)


def test_bazel_and_the_picture_of_the_parts_agree_with_the_table():
    # Starlark parses as Python.
    build = ast.parse((ROOT / "BUILD").read_text(encoding="utf-8"))
    assert "load('//:parts.bzl', 'PARTS')" in {ast.unparse(node) for node in build.body}
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    picture = text.partition("```text")[2].partition("```")[0]
    parts = [part for part in (*PARTS, *TABLE["OUTSIDE"]) if not part.startswith("_")]
    shown = [word for word in re.findall(r"\w+", picture) if word in parts]
    assert list(dict.fromkeys(shown)) == parts


def of_ours_in_keras():
    """Names the functions of this library in the classes and modules of Keras, and import hooks."""
    import tf_labeldp

    for name in dir(tf_labeldp):
        getattr(tf_labeldp, name)
    found = []

    def is_ours(value):
        value = value.fget if isinstance(value, property) else value
        # Keras's lazy modules answer any name by an import.
        if not isinstance(value, (type, types.FunctionType, staticmethod, classmethod)):
            return False
        module = getattr(value, "__module__", None) or ""
        return module.startswith(("tf_labeldp", "keras_layers"))

    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] != "keras" or module is None:
            continue
        for value in [module, *(each for each in vars(module).values() if inspect.isclass(each))]:
            owner = getattr(value, "__module__", None) or name
            # Keras's own list of registered classes has those of its users.
            if owner.startswith("keras"):
                found += [f"{owner}.{key}" for key, each in vars(value).items() if is_ours(each)]
    hooks = [*sys.meta_path, *sys.path_hooks]
    return found + [repr(hook) for hook in hooks if is_ours(hook) or is_ours(type(hook))]


def test_keras_is_not_patched(monkeypatch):
    import keras

    import tf_labeldp

    assert of_ours_in_keras() == []
    monkeypatch.setattr(keras.Model, "compile", tf_labeldp.LabelDPModel.compile)
    assert any(name.endswith(".compile") for name in of_ours_in_keras())


RUNS_CODE = {"eval", "exec", "compile", "__import__"}
RUN_BY = {"pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib"}


def readers_that_run_code(text):
    """Lists the calls in a file that could run what stands in the file that they read."""
    found = []
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.Call):
            continue
        called = ast.unparse(node.func)
        options = {each.arg: ast.unparse(each.value) for each in node.keywords}
        package, _, verb = called.rpartition(".")
        if called in RUNS_CODE or (package in RUN_BY and verb in ("load", "loads", "Unpickler")):
            found.append(called)
        if called == "np.load" and options.get("allow_pickle", "False") != "False":
            found.append(called)
        if options.get("safe_mode", "True") != "True" or called.endswith("unsafe_load"):
            found.append(called)
    return found


@pytest.mark.parametrize(
    "text",
    [
        "pickle.load(f)",
        "np.load(f, allow_pickle=True)",
        "eval(text)",
        "keras.models.load_model(f, safe_mode=False)",
    ],
)
def test_a_reader_that_runs_code_is_caught(text):
    assert readers_that_run_code(text)


@pytest.mark.slow
def test_no_file_runs_code_when_it_is_read():
    """Of noisy labels, stores, reports and cards; Keras reads `.keras` files."""
    found = {
        path.relative_to(ROOT).as_posix(): readers_that_run_code(path.read_text("utf-8"))
        for folder in ("tf_labeldp", "keras_layers")
        for path in (ROOT / folder).rglob("*.py")
    }
    assert {path: calls for path, calls in found.items() if calls} == {}
