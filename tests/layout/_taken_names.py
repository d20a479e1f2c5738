"""The files of the library, and the names that a file takes from them, from the source alone.

A name is public if the `__all__` of a part or of a subpackage lists it. A file takes names by
imports, also relative ones, by attributes of a module imported whole, by texts that name them or
are code, and by imports whose names are computed.
"""

from __future__ import annotations

import ast
import re
import textwrap
from collections import defaultdict
from collections.abc import Iterator
from importlib.util import resolve_name
from pathlib import Path

FRONT = "tf_labeldp"
OF_ALL_PARTS = [f"{FRONT}.{name}" for name in ("_validate", "_progress", "_version")]
IMPORTING = {"import_module", "__import__"}
OF_TUPLES = {"_asdict", "_fields", "_make", "_replace"}  # Python documents these methods.
OWN = {"self", "cls", "super"}


class File:
    """A parsed file, with the name of its module if it belongs to the library."""

    def __init__(self, root: Path, path: Path, module: str = "") -> None:
        self.place, self.module = path.relative_to(root).as_posix(), module
        self.is_package = path.name == "__init__.py"
        self.package = module if self.is_package else module.rpartition(".")[0]
        self.nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
        self.defined = {name for node in self.nodes if (name := defined_name(node))}
        # The front makes its list from the table of its parts.
        lists = [node for node in self.nodes if isinstance(node, (ast.Assign, ast.AnnAssign))]
        lists = [node for node in lists if re.match(r"(__all__|_PARTS)\b", ast.unparse(node))]
        self.listed = {text_of(part) for node in lists for part in ast.walk(node)} - {""}

    def at(self, node: ast.AST) -> str:
        return f"{self.place}:{getattr(node, 'lineno', 1)}"


def last_name(node: ast.AST) -> str:
    """Returns `b` of `b`, `a.b` and `a.b()`, and "" of other expressions."""
    node = node.func if isinstance(node, ast.Call) else node
    return getattr(node, "id", getattr(node, "attr", ""))


def defined_name(node: ast.AST) -> str:
    if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
        return node.name
    is_set = isinstance(getattr(node, "ctx", None), ast.Store) and is_own(node)
    return last_name(node) if is_set else ""


def is_own(node: ast.AST) -> bool:
    """Whether a name is no attribute, or one of `self`: a base class shares those with others."""
    return not isinstance(node, ast.Attribute) or last_name(node.value) in OWN


def is_private(name: str) -> bool:
    return re.match(r"_[a-z]", name) is not None and name not in OF_TUPLES


def text_of(node: ast.AST) -> str:
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""


def docstrings(nodes: list[ast.AST]) -> set[int]:
    return {id(node.value) for node in nodes if isinstance(node, ast.Expr) and text_of(node.value)}


def installed(name: str) -> str:
    return f"{FRONT}.{name}" if name.partition(".")[0] == "keras_layers" else name


class Library:
    """The files of `tf_labeldp` and `keras_layers` in a checkout, by module."""

    def __init__(self, root: Path) -> None:
        self.files: dict[str, File] = {}
        for path in sorted([*root.glob("tf_labeldp/**/*.py"), *root.glob("keras_layers/**/*.py")]):
            words = path.relative_to(root).with_suffix("").parts
            module = installed(".".join(word for word in words if word != "__init__"))
            self.files[module] = File(root, path, module)
        self.homes: dict[str, set[str]] = defaultdict(set)
        for module, file in self.files.items():
            for name in filter(is_private, file.defined):
                self.homes[name].add(self.part(module))

    def is_package(self, module: str) -> bool:
        return module in self.files and self.files[module].is_package

    def part(self, name: str) -> str:
        """Returns the part of a dotted name, or "" for the front and the files next to it."""
        package = ".".join(name.split(".")[:2])
        return package if package != FRONT and self.is_package(package) else ""

    def is_public(self, module: str, name: str) -> bool:
        whole = f"{module}.{name}"
        if whole in OF_ALL_PARTS or module in OF_ALL_PARTS:
            files = [self.files[each] for each in OF_ALL_PARTS if each in self.files]
            return whole in OF_ALL_PARTS or any(name in file.defined for file in files)
        if whole in self.files:
            is_shown = module == FRONT or bool(self.files[whole].listed)
            return self.is_package(whole) and is_shown and not name.startswith("_")
        return self.is_package(module) and "._" not in module and name in self.files[module].listed

    def internal(self, dotted: str, *, is_import: bool = False) -> str:
        """Returns a dotted name up to its first word that is not public, or "" if all are.

        A module that is imported whole counts by what is read of it, or where it is passed on.
        """
        module, *rest = dotted.split(".")
        while rest and f"{module}.{rest[0]}" in self.files:
            module = f"{module}.{rest.pop(0)}"
        outer, _, name = ".".join([module, *rest[:1]]).rpartition(".")
        is_inside = outer in self.files and not self.is_public(outer, name)
        return f"{outer}.{name}" if is_inside and (rest or not is_import) else ""

    def private_names(self, file: File) -> Iterator[tuple[ast.AST, str]]:
        """Yields `object._name`, and the text "_name", of what only other parts define."""
        part = self.part(file.module)
        prose = docstrings(file.nodes)
        for node in file.nodes:
            names = [] if is_own(node) else [last_name(node)]
            if id(node) not in prose and re.fullmatch(r"\w+(\.\w+)*", text_of(node)):
                names = text_of(node).split(".")
            for name in filter(is_private, names):
                if part not in self.homes.get(name, {part}):
                    yield node, f".{name}"


def dotted_names(nodes: list[ast.AST], package: str = "") -> Iterator[tuple[ast.AST, str, str]]:
    """Yields (node, local name if it is an import, dotted name) of what code names."""
    bound = {FRONT: FRONT}
    for node in nodes:
        if isinstance(node, ast.Import):
            for alias in node.names:
                top = alias.name.partition(".")[0]
                bound[alias.asname or top] = installed(alias.name if alias.asname else top)
        elif isinstance(node, ast.ImportFrom) and (package or not node.level):
            base = resolve_name("." * node.level + (node.module or ""), package)
            for alias in node.names:
                local = alias.asname or alias.name
                bound[local] = installed(f"{base}.{alias.name}")
                yield node, local, bound[local]

    def dotted(node: ast.AST) -> str:
        if isinstance(node, ast.Attribute):
            return f"{base}.{node.attr}" if (base := dotted(node.value)) else ""
        return bound.get(node.id, "") if isinstance(node, ast.Name) else ""

    inner = {id(node.value) for node in nodes if isinstance(node, ast.Attribute)}
    for call in [node for node in nodes if isinstance(node, ast.Call) and node.args]:
        first, text = call.args[0], text_of(call.args[1]) if len(call.args) > 1 else ""
        if text and (base := dotted(first)):  # getattr(module, "name")
            inner.add(id(first))
            yield call, "", f"{base}.{text}"
        if last_name(call) in IMPORTING and text_of(first).startswith("."):
            yield call, "", resolve_name(text_of(first), package)
    prose = docstrings(nodes)
    for node in nodes:
        if id(node) in inner:
            continue
        is_read = isinstance(getattr(node, "ctx", None), ast.Load)
        if (is_read or isinstance(node, ast.Attribute)) and (name := dotted(node)):
            yield node, "", name
        if FRONT in (text := text_of(node)) and id(node) not in prose:
            yield from ((node, "", name) for name in names_in_text(text))


def names_in_text(text: str) -> list[str]:
    """Lists the dotted names of a text that is code, and of one that is not."""
    try:
        code = ast.parse(textwrap.dedent(text))
    except (SyntaxError, ValueError):
        return re.findall(rf"{FRONT}(?:\.\w+)+", text)
    return [name for _, _, name in dotted_names(list(ast.walk(code)))]


def computed_imports(file: File) -> Iterator[tuple[ast.AST, str]]:
    """Yields imports of modules whose names are computed, except for those of other packages."""
    for node in file.nodes:
        if isinstance(node, ast.Call) and last_name(node) in IMPORTING and node.args:
            name = node.args[0]
            start = text_of(name.values[0]) if isinstance(name, ast.JoinedStr) else ""
            if not isinstance(name, ast.Constant) and (not start or start.startswith(FRONT)):
                yield node, ast.unparse(node)
