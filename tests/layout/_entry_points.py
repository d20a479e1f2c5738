"""The arguments of all public names and the kinds in their annotations, by introspection."""

from __future__ import annotations

import ast
import dataclasses
import importlib
import inspect
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import tf_labeldp

PACKAGE = Path(inspect.getfile(tf_labeldp)).parent
TABLE: dict[str, dict[str, list[str]]] = {}
exec((Path(__file__).parents[2] / "parts.bzl").read_text(encoding="utf-8"), {}, TABLE)
OTHERS = ("cli", "plugins")
"""The command, and names that other parts define. No user imports parts with an underscore."""
PARTS = [
    part
    for part in (*TABLE["PARTS"], *TABLE["OUTSIDE"])
    if part not in OTHERS and not part.startswith("_")
]
TRAINING = {"front_door", "heads", "self_supervised", "semi_supervised", "training"}
"""Parts that train models, which takes long."""
ENGINES = ("scale/beam/__init__.py", "scale/spark/__init__.py", "scale/tfx/__init__.py")
"""Extras, whose source is parsed and not imported: each needs a separate environment."""
VERBS = ("fit", "evaluate", "predict", "transform", "fit_transform", "score")
"""Methods of Keras and scikit-learn that users call. The frameworks call all others."""
CONCRETE = frozenset(
    # Types of Python.
    "float int str bool bytes Hashable Literal tuple list dict set frozenset type Sequence "
    "Iterable Mapping os PathLike Path InitVar dataclasses "
    # Generators, and the modules of qualified names.
    "Rng np random Generator tf Tensor Variable "
    # Statements and receipts.
    "DpEvent Charge Assumption PrivacyGuarantee PrivacyBudget Receipt Receipts LabelSet "
    # Strategies, whose own arguments are public names too.
    "Solver Denoiser NoiseMechanism GaussNewton "
    # Intermediate results of a step, results of audits, and the file of a secret.
    "VertexLosses GradientOperator AuditResult LabelInference ReleaseKey".split()
)
"""Names in the types of settings. None of these types can contain an arbitrary object."""
BARE = frozenset("np ndarray float int bool str tuple list dict tf Tensor data Dataset".split())
"""Names in the types without a statement: arrays, numbers, and containers of these."""
MARKS = {"Public": "public", "PublicInput": "public", "Private": "private", "Setting": "setting"}


@dataclasses.dataclass(frozen=True)
class Argument:
    """An argument of a public class, function or method."""

    place: str
    """Such as ``heads.PrivateRidge.fit``."""
    name: str
    annotation: str | None
    returns: str | None

    @property
    def kind(self) -> str | None:
        """``"public"``, ``"private"`` or ``"setting"``; None without a proper annotation."""
        return None if self.annotation is None else kind_of(self.annotation)

    @property
    def can_be_stated(self) -> bool:
        """Whether the result may carry receipts, by the annotation of the return value."""
        if self.returns is None or self.returns == "None":
            return True
        return not names_in(self.returns) <= BARE


def kind_of(annotation: str) -> str | None:
    """Returns the kind of an annotation, or None if it leaves the kind open."""
    tree = ast.parse(annotation, mode="eval").body
    if isinstance(tree, ast.Subscript) and _name(tree.value) == "InitVar":
        tree = tree.slice
    head = _name(tree.value if isinstance(tree, ast.Subscript) else tree)
    # keras_layers know Keras alone, so they spell the annotation out.
    if head == "Annotated":
        return ast.literal_eval(tree.slice.elts[1])  # type: ignore[attr-defined]
    if head in MARKS:
        return MARKS[head]
    return "setting" if names_in(annotation) <= CONCRETE else None


def names_in(annotation: str) -> set[str]:
    """Returns the names in an annotation, without those in ``type[X]``."""
    found, waiting = set(), [ast.parse(annotation, mode="eval").body]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.Name | ast.Attribute):
            found.add(_name(node))
        is_class = isinstance(node, ast.Subscript) and _name(node.value) == "type"
        waiting += [] if is_class else ast.iter_child_nodes(node)
    return found


def _name(node: ast.AST) -> str:
    return getattr(node, "id", None) or getattr(node, "attr", "")


def arguments() -> list[Argument]:
    """Returns the arguments of all public names, and those of the methods of their results."""
    waiting = list(_listed())
    visited: set[int] = set()
    found: list[Argument] = []
    while waiting:
        place, value, is_listed = waiting.pop(0)
        if id(value) in visited:
            continue
        visited.add(id(value))
        for where, function in _callables(place, value, is_listed):
            found += _of(where, function)
            part = place.partition(".")[0]
            waiting += [(f"{part}.{kind.__name__}", kind, False) for kind in _returned_by(function)]
    return found


def _listed() -> Iterator[tuple[str, Any, bool]]:
    for part in (*PARTS, "cli"):
        module = importlib.import_module(f"tf_labeldp.{part}")
        for name in module.__all__:
            value = getattr(module, name)
            if callable(value) and is_ours(value):
                yield f"{part}.{name}", value, True


def is_ours(value: Any) -> bool:
    """Returns whether the library defines this class or function."""
    home = getattr(value, "__module__", "") or ""
    is_alias = not inspect.isclass(value) and not inspect.isroutine(value)
    return home.partition(".")[0] in ("tf_labeldp", "keras_layers") and not is_alias


def _callables(place: str, value: Any, is_listed: bool) -> Iterator[tuple[str, Callable[..., Any]]]:
    """Yields a function, or the constructor and the public methods of a class."""
    if not inspect.isclass(value):
        yield place, value
        return
    if is_listed and not issubclass(value, Exception):
        yield place, value
    for name in dir(value):
        method = inspect.getattr_static(value, name)
        method = inspect.unwrap(getattr(method, "__func__", method))
        if name.startswith("_") or not isinstance(method, types.FunctionType):
            continue
        if is_ours(method) and not _is_hook(name, value):
            yield f"{place}.{name}", method


def _is_hook(name: str, owner: type) -> bool:
    """Returns whether a framework declares the method too, and calls it."""
    others = (base for base in owner.__mro__ if base is not object and not is_ours(base))
    return name not in VERBS and any(name in vars(base) for base in others)


def _of(place: str, function: Callable[..., Any]) -> Iterator[Argument]:
    signature = inspect.signature(function)
    returns = None if inspect.isclass(function) else _text(signature.return_annotation)
    if returns == "NoReturn":
        return
    for parameter in signature.parameters.values():
        if parameter.name not in ("self", "cls"):
            yield Argument(place, parameter.name, _text(parameter.annotation), returns)


def _text(annotation: Any) -> str | None:
    if annotation is inspect.Parameter.empty:
        return None
    return annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)


def _returned_by(function: Callable[..., Any]) -> Iterator[type]:
    """Yields the classes of the library that a function returns, by its annotation."""
    if inspect.isclass(function):
        return
    returns = _text(inspect.signature(function).return_annotation)
    for name in names_in(returns) if returns else ():
        value = getattr(inspect.getmodule(function), name, None)
        if inspect.isclass(value) and is_ours(value) and not name.startswith("_"):
            yield value


def arguments_of_engines() -> list[Argument]:
    """Returns the arguments of the public names of the engines, which can't be imported here."""
    found: list[Argument] = []
    for name in ENGINES:
        path = PACKAGE / name
        listed = _listed_in(ast.parse(path.read_text(encoding="utf-8")))
        files = sorted(path.parent.glob("*.py")) if path.name == "__init__.py" else [path]
        for file in files:
            for node in ast.parse(file.read_text(encoding="utf-8")).body:
                if getattr(node, "name", None) in listed:
                    place = f"{path.relative_to(PACKAGE).parts[0]}.{file.stem}"
                    found += _in_source(place, node)
    return found


def _listed_in(tree: ast.Module) -> list[str]:
    """Returns ``__all__``."""
    return next(
        ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign) and _name(node.targets[0]) == "__all__"
    )


def _in_source(place: str, node: Any) -> Iterator[Argument]:
    """Yields the arguments of a function, or of a class's constructor and public methods."""
    for function in node.body if isinstance(node, ast.ClassDef) else [node]:
        is_function = isinstance(function, ast.FunctionDef)
        if not is_function or (function.name.startswith("_") and function.name != "__init__"):
            continue
        for argument in (each for each in ast.walk(function.args) if isinstance(each, ast.arg)):
            if argument.arg not in ("self", "cls"):
                text = argument.annotation and ast.unparse(argument.annotation)
                yield Argument(f"{place}.{node.name}.{function.name}", argument.arg, text, None)
