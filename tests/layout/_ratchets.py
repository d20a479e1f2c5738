"""The counts of `ratchets.json`. Run the file to list their members.

Each function maps the members of a count to the lines where they stand. Ways around count too: what
`_taken_names` finds, helpers that import or ask for others, and checks for protocols.
"""

from __future__ import annotations

import ast
import re
from collections import Counter, defaultdict
from pathlib import Path

from _taken_names import File, Library, computed_imports, dotted_names, last_name

ASKING = {"getattr", "hasattr", "vars", "dir", "attrgetter", "methodcaller"}
ASKING |= {"getattr_static", "getmembers", "__dict__", "__getattribute__"}
MOST_FIELDS = 8

Members = dict[str, list[str]]


def names(library: Library) -> Members:
    """Counts the names that parts take from files of other parts, and that are not public."""
    found: Members = defaultdict(list)
    for file in library.files.values():
        for node, local, dotted in dotted_names(file.nodes, file.package):
            name = library.internal(dotted, is_import=bool(local))
            if name and library.part(name) != library.part(file.module):
                found[name].append(file.at(node))
        for node, name in library.private_names(file):
            found[name].append(file.at(node))
        for node, text in computed_imports(file):
            found[f"{file.place}: {text}"].append(file.at(node))
    return found


def pairs(library: Library, root: Path) -> Members:
    """Counts pairs of a test file and a name that is not public, also by a helper's imports."""
    found: Members = defaultdict(list)
    helpers: dict[str, dict[str, str]] = defaultdict(dict)
    uses: list[tuple[str, bool, str]] = []
    for folder in ("tests", "benchmarks", "examples"):
        for path in sorted((root / folder).glob("**/*.py")):
            file = File(root, path)
            for node, local, dotted in dotted_names(file.nodes):
                if local:
                    helpers[path.stem][local] = dotted
                if folder == "tests":
                    uses.append((file.at(node), bool(local), dotted))
            if folder == "tests":
                for node, name in [*library.private_names(file), *computed_imports(file)]:
                    found[f"{file.place}: {name}"].append(file.at(node))
    for at, is_import, dotted in uses:
        for _ in range(3):  # helpers of helpers
            helper, name, *rest = [*dotted.split("."), ""]
            if name in helpers.get(helper, {}):
                dotted = ".".join([helpers[helper][name], *rest[:-1]])
        if internal := library.internal(dotted, is_import=is_import):
            found[f"{at.partition(':')[0]}: {internal}"].append(at)
    return found


def passes_on(function: ast.FunctionDef) -> bool:
    """Whether a function asks an object for an attribute that its caller names."""
    parameters = {node.arg for node in ast.walk(function.args) if isinstance(node, ast.arg)}
    asked: list[ast.expr] = []
    for node in ast.walk(function):
        if isinstance(node, ast.Call) and last_name(node) in ASKING:
            is_getter = last_name(node) in ("attrgetter", "methodcaller")
            asked += node.args[:1] if is_getter else node.args[1:2]
        elif isinstance(node, ast.Subscript) and last_name(node.value) in ASKING:
            asked.append(node.slice)
    is_named = any(isinstance(each, ast.Name) and each.id in parameters for each in asked)
    return is_named and not function.name.startswith("__")


def asking(library: Library) -> Members:
    """Counts places that ask an object what it is.

    A check for a protocol at run time asks for its attributes, and a function that passes a name
    on to `getattr` asks wherever it is called.
    """
    helpers, protocols = set(), set()
    for file in library.files.values():
        for node in file.nodes:
            if isinstance(node, ast.FunctionDef) and passes_on(node):
                helpers.add(node.name)
            elif isinstance(node, ast.ClassDef):
                if "runtime_checkable" in map(last_name, node.decorator_list):
                    protocols |= {node.name, f"{file.module.rpartition('.')[2]}.{node.name}"}

    def asks(node: ast.AST) -> bool:
        if isinstance(node, (ast.Name, ast.Attribute)):
            return last_name(node) in ASKING | {"AttributeError"}
        if isinstance(node, ast.alias):
            return node.asname is not None and node.name in ASKING
        if isinstance(node, ast.MatchClass):
            return bool(node.kwd_attrs) or last_name(node.cls) in protocols
        if isinstance(node, ast.Call) and last_name(node) in ("isinstance", "issubclass"):
            kinds = [each for each in ast.walk(node.args[1]) if last_name(each)]
            return any(".".join(ast.unparse(each).split(".")[-2:]) in protocols for each in kinds)
        return isinstance(node, ast.Call) and last_name(node) in helpers

    found: Members = {}
    for file in library.files.values():
        raised = [node for node in file.nodes if isinstance(node, ast.Raise)]
        skipped = {id(part) for node in raised for part in ast.walk(node)}
        calls = {id(node.func): node for node in file.nodes if isinstance(node, ast.Call)}
        repeats: Counter[str] = Counter()
        for node in file.nodes:
            if asks(node) and not (last_name(node) == "AttributeError" and id(node) in skipped):
                text = ast.unparse(calls.get(id(node), node))
                repeats[text] += 1
                found[f"{file.place}: {text} ({repeats[text]})"] = [file.at(node)]
    return found


def is_no_field(annotation: str) -> bool:
    return re.match(r"(\w+\.)?(ClassVar|KW_ONLY)\b", annotation) is not None


def fields(library: Library) -> Members:
    """Counts the fields that a data class defines after its eighth."""
    found: Members = {}
    for file in library.files.values():
        for node in file.nodes:
            kinds = [*node.decorator_list, *node.bases] if isinstance(node, ast.ClassDef) else []
            if {"dataclass", "NamedTuple", "TypedDict"} & set(map(last_name, kinds)):
                annotated = [each for each in node.body if isinstance(each, ast.AnnAssign)]
                own = [each for each in annotated if not is_no_field(ast.unparse(each.annotation))]
                for each in own[MOST_FIELDS:]:
                    found[f"{file.place}: {node.name}.{last_name(each.target)}"] = [file.at(each)]
    return found


def counted(root: Path) -> dict[str, Members]:
    """Returns the members of each count of a checkout."""
    library = Library(root)
    return {
        "names": names(library),
        "asking": asking(library),
        "pairs": pairs(library, root),
        "fields": fields(library),
    }


if __name__ == "__main__":
    for count, found in counted(Path(__file__).parents[2]).items():
        print(f"{count}: {len(found)}")
        for member, places in sorted(found.items()):
            print(f"  {member}: {', '.join(places)}")
