"""Receipts of the choices and the later steps of a procedure of several releases."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any, TypeVar

from tf_labeldp.accounting import PublicInput, Receipt, Receipts, public_input
from tf_labeldp.accounting.provenance import LayerHistory, Weights
from tf_labeldp.vault._statements import fields_of, has_method
from tf_labeldp.vault.model_history import TrainedModel

_Value = TypeVar("_Value")
_READ = ("tf_labeldp", "keras_layers", "sklearn")
"""Libraries whose objects are searched for parts that carry receipts."""


def with_receipts(value: _Value, receipts: Iterable[Receipt]) -> _Value:
    """Returns a value that states these receipts too, as do all its parts that state any.

    Guarantee:
        A value that was chosen by a release, or made of data that a release changed, depends on
        that release (composition counts both). So the procedure that hands it on adds the receipts
        of the releases behind it.

    An object is copied, with its parts that carry receipts; a Keras model changes itself. Arguments
    of an estimator's constructor are the caller's public values and stay as they are, except for a
    network, which the estimator may have trained.
    """
    added = tuple(receipts)
    if Weights.layers_of(value):
        _attach_to_all(value, added)
        return value
    found: _Value = _with_receipts(value, added, {})
    return found


def carries_receipts(value: Any) -> bool:
    """Returns whether ``with_receipts`` finds a place for receipts in a value."""
    if Weights.layers_of(value) or _receipts_in(value):
        return True
    return any(map(carries_receipts, _parts_of(value).values()))


def _with_receipts(part: Any, added: tuple[Receipt, ...], done: dict[int, tuple[Any, Any]]) -> Any:
    if id(part) in done:
        return done[id(part)][1]
    done[id(part)] = part, part
    if Weights.layers_of(part):
        if public_input(part).receipts:
            _attach_to_all(part, added)
        return part
    changed: dict[Any, Any] = {
        name: inner
        for name, old in _parts_of(part).items()
        if (inner := _with_receipts(old, added, done)) is not old
    }
    changed |= {name: Receipts.merged(old, added) for name, old in _receipts_in(part).items()}
    if not changed:
        return part
    found: Any
    if isinstance(part, (list, tuple)):
        kind: Any = type(part)
        items = [changed.get(place, inner) for place, inner in enumerate(part)]
        found = kind._make(items) if has_method(part, "_make") else kind(items)
    elif isinstance(part, dict):
        found = {**part, **changed}
    else:
        found = copy.copy(part)
        for name, inner in changed.items():
            object.__setattr__(found, name, inner)  # Values are frozen.
    done[id(part)] = part, found
    return found


def _receipts_in(part: Any) -> dict[str, tuple[Receipt, ...]]:
    """Returns the attributes in which an object carries receipts."""
    fields = fields_of(part)
    return {
        name: fields[name]
        for name in ("receipts", "receipts_")
        if isinstance(fields.get(name), tuple)
        and all(isinstance(receipt, Receipt) for receipt in fields[name])
    }


def _parts_of(part: Any) -> dict[Any, Any]:
    """Returns the items of a container, or the attributes of an object, that may carry receipts."""
    if isinstance(part, (list, tuple)):
        parts: dict[Any, Any] = dict(enumerate(part))
    elif isinstance(part, dict):
        parts = part
    elif isinstance(part, PublicInput) or not (_is_read(part) or _receipts_in(part)):
        return {}
    else:
        parts = dict(fields_of(part))
        # The steps of a scikit-learn pipeline are arguments, too, and it fits them.
        if has_method(part, "get_params") and not type(part).__module__.startswith("sklearn."):
            arguments = part.get_params()
            parts = {
                name: inner
                for name, inner in parts.items()
                if name not in arguments or Weights.layers_of(inner)
            }
    return {name: inner for name, inner in parts.items() if _has_parts(inner)}


def _has_parts(part: Any) -> bool:
    return isinstance(part, (list, tuple, dict)) or bool(fields_of(part))


def _is_read(part: Any) -> bool:
    return type(part).__module__.partition(".")[0] in _READ


def _attach_to_all(model: Any, receipts: tuple[Receipt, ...]) -> None:
    """Adds receipts to a model, its trainable layers, and all its layers that carry receipts."""
    layers = Weights.layers_of(model)
    TrainedModel(model).attach(
        receipts, [part for part in layers if part.trainable_weights or LayerHistory.of(part)]
    )
