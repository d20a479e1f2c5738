"""Which layers and heads were trained on labels of which vault, as far as this package knows."""

from __future__ import annotations

import contextlib
import functools
import inspect
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any

_TRAINED_ON: weakref.WeakKeyDictionary[Any, list[Callable[[], Any]]] = weakref.WeakKeyDictionary()
"""By layer or head: what returns a vault, or None for one that is gone."""


def remember(model: Any, vault: Any) -> None:
    """Notes that the trainable layers of a Keras model are trained on labels of a vault.

    None stands for labels that no vault keeps account of.

    Layers, and not the model: an encoder is usually a new model over layers of a trained one.
    """
    one_more = _no_vault if vault is None else weakref.ref(vault)
    for layer in _layers(model):
        known = _TRAINED_ON.setdefault(layer, []) if layer.trainable_weights else None
        if known is not None and all(one() is not vault for one in known):
            known.append(one_more)


def remember_head(head: Any, vault: Any) -> None:
    """Notes that a head was fitted to labels of a vault, and to no others; None for no vault."""
    _TRAINED_ON[head] = [_no_vault if vault is None else weakref.ref(vault)]


def inherit(layer: Any, head: Any) -> None:
    """Notes that a Keras layer has the weights of a head."""
    _TRAINED_ON[layer] = list(_TRAINED_ON.get(head, [_no_vault]))


def refuse_foreign(encoder: Any, labels: Any) -> None:
    """Raises if an encoder was trained on private labels and ``labels`` is not their vault.

    A head that releases from the same vault is charged there together with that training. With
    anything else its statement would leave the training out.
    """
    for part in _parts(encoder):
        known = _known(part)
        # A vault that is gone is None, like the labels of a data set of pairs.
        if any(labels is None or one() is not labels for one in known):
            raise ValueError(
                "the encoder was trained on labels of a PrivateLabels, so its features depend on "
                "labels and are not public. Use an encoder that was trained without them; or fit "
                "the head on that same PrivateLabels, whose guarantee then covers both."
            )


def _parts(encoder: Any) -> Iterator[Any]:
    """Yields an encoder, its layers, and what it visibly calls.

    A method calls its owner, such as a head's ``predict_proba``; a partial what it is made of; and
    a function of the user's, ``lambda x: model(x)``, the variables around it that it names.
    """
    waiting: list[Any] = [encoder]
    seen: list[Any] = []
    home = getattr(encoder, "__module__", None)
    while waiting:
        part = waiting.pop()
        if part is None or isinstance(part, types.ModuleType) or any(part is one for one in seen):
            continue
        seen.append(part)
        yield from (part, *_layers(part))
        waiting.append(getattr(part, "__self__", None))
        if isinstance(part, functools.partial):
            waiting += [part.func, *part.args, *part.keywords.values()]
            home = getattr(part.func, "__module__", None) if part is encoder else home
        elif inspect.isfunction(part) and part.__module__ == home:  # not those of libraries
            with contextlib.suppress(ValueError):  # a variable without a value as yet
                around = inspect.getclosurevars(part)
                waiting += [*around.nonlocals.values(), *around.globals.values()]


def _known(part: Any) -> list[Callable[[], Any]]:
    try:
        return _TRAINED_ON.get(part, [])
    except TypeError:  # nothing that can be remembered
        return []


def _no_vault() -> None:
    """Stands for labels that no vault keeps account of."""


def _layers(model: Any) -> list[Any]:
    flatten = getattr(model, "_flatten_layers", None)
    return list(flatten()) if callable(flatten) else []
