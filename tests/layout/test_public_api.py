"""Every public name is listed, resolves and is documented; nothing else is public."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import re
from pathlib import Path
from types import ModuleType

import pytest
from _entry_points import TABLE

import tf_labeldp
from tf_labeldp import plugins

PARTS = {part for part in (*TABLE["PARTS"], *TABLE["OUTSIDE"]) if not part.startswith("_")}


def public_submodules(package):
    return {
        module.name
        for module in pkgutil.iter_modules(package.__path__)
        if not module.name.startswith("_")
    }


# keras_layers/ lies next to the package in a checkout, and inside it in an installation.
PRESENT = sorted((public_submodules(tf_labeldp) & PARTS) | {"keras_layers"})
MODULES = ["tf_labeldp", *(f"tf_labeldp.{part}" for part in PRESENT)]


def is_class_or_function(value):
    return inspect.isclass(value) or inspect.isroutine(value)


def own_docstring(value):
    """Returns the docstring written for this object, neither inherited nor from a dataclass."""
    doc = vars(value).get("__doc__") if inspect.isclass(value) else value.__doc__
    name = getattr(value, "__name__", "")
    return "" if doc is None or doc.startswith(f"{name}(") else doc.strip()


def unlisted(module):
    """Lists the public classes and functions of a module that its `__all__` leaves out."""
    return sorted(
        name
        for name, value in vars(module).items()
        if not name.startswith("_")
        and is_class_or_function(value)
        and getattr(value, "__module__", "").startswith(module.__name__)
        and name not in module.__all__
    )


def test_the_site_has_a_page_for_each_part():
    """Except for the command, which has its help, and the bridge, which needs other packages."""
    overview = (Path(__file__).parents[2] / "docs" / "api.md").read_text(encoding="utf-8")
    assert set(re.findall(r"^api/(\w+)$", overview, re.M)) == PARTS - {"cli", "tf_privacy"}


def test_public_submodules_are_those_of_the_design():
    found = public_submodules(tf_labeldp) | {"keras_layers"}
    assert found == PARTS


def test_all_is_an_explicit_list_of_documented_names():
    undocumented = []
    for name in MODULES:
        module = importlib.import_module(name)
        listed = module.__all__
        assert listed and len(set(listed)) == len(listed) and module.__doc__, name
        assert [entry for entry in listed if entry[0] == "_" and entry != "__version__"] == []
        for entry in listed:
            value = getattr(module, entry)
            if is_class_or_function(value) or inspect.ismodule(value):
                undocumented += [] if own_docstring(value) else [f"{name}.{entry}"]
    assert undocumented == []


def test_every_own_public_class_and_function_is_listed():
    assert {name: unlisted(importlib.import_module(name)) for name in MODULES} == {
        name: [] for name in MODULES
    }


def test_the_front_lists_all_parts_and_offers_its_names():
    assert set(PRESENT) - {"cli", "plugins"} <= set(tf_labeldp.__all__)
    assert set(tf_labeldp.__all__) <= set(dir(tf_labeldp))
    with pytest.raises(AttributeError, match="no_such_name"):
        tf_labeldp.no_such_name  # noqa: B018


def test_a_page_an_example_or_a_benchmark_uses_every_public_name():
    """A name that none of them needs is not for users. The page of the API lists all, by itself."""
    root = Path(__file__).parents[2]
    folders = [root / name for name in ("docs", "examples", "benchmarks")]
    files = [file for folder in folders for kind in ("*.md", "*.py") for file in folder.rglob(kind)]
    texts = [file.read_text(encoding="utf-8") for file in (*files, root / "README.md")]
    words = set(re.findall(r"\w+", "\n".join(texts)))
    assert {
        name: sorted(set(importlib.import_module(name).__all__) - words) for name in MODULES
    } == {name: [] for name in MODULES}


def test_the_checks_detect_missing_names():
    module = ModuleType("tf_labeldp.synthetic", "A part.")
    namespace = {"__name__": module.__name__}
    exec("class Shown:\n  'Text.'\nclass Bare(Shown): pass\nclass _Private: pass", namespace)
    vars(module).update(namespace, __all__=["Shown"])
    assert unlisted(module) == ["Bare"]
    assert own_docstring(module.Shown) == "Text."
    assert own_docstring(module.Bare) == ""


def test_the_surface_for_plug_ins_is_small_and_gives_names_that_no_part_lists():
    """Otherwise a name would have two public homes, or the surface would be a second library."""
    listed = plugins.__all__
    assert listed == sorted(names := set(listed)) and len(names) <= 40
    assert set(dir(plugins)) == names
    homes = {name: getattr(plugins, name) for name in listed}
    for module in map(importlib.import_module, MODULES):
        if module is not plugins:
            assert {
                name for name in module.__all__ if getattr(module, name) in homes.values()
            } == set()
    with pytest.raises(AttributeError, match="no_such_name"):
        plugins.no_such_name  # noqa: B018
