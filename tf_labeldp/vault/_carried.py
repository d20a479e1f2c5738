"""What artefacts carry: the receipts of the labels that heads, layers and models were made of.

Noisy labels, statistics, priors and heads hold their receipts themselves. Keras layers are noted
here when they are trained or made, and weights by a digest of each variable's values, which stores
keep for other processes: so saving, loading and copying loses no receipt. Where an optimizer of
this process has taken steps on variables of these values which no receipt is about, a receipt of
kind ``"unknown"`` stands for them, and nothing is promised. Without evidence either way statements
name the assumption that weights and features were made without the labels.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import types
import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from tf_labeldp._optimizers import (
    in_the_clear,
    note_in_the_clear,
    trained_in_the_clear,
    weight_digests,
)
from tf_labeldp.accounting import Charge, PrivacyGuarantee
from tf_labeldp.accounting._receipts import (
    LabelSet,
    Receipt,
    Receipts,
    compose_receipts,
    declared_receipt,
    merge_receipts,
    receipts_from_bytes,
)
from tf_labeldp.vault._store import LabelStoreError

_CARRIED: weakref.WeakKeyDictionary[Any, Receipts] = weakref.WeakKeyDictionary()
"""By layer or model."""
_OF_WEIGHTS: dict[bytes, Receipts] = {}
"""By digest of a variable's values."""
LEDGERS: weakref.WeakValueDictionary[str, Any] = weakref.WeakValueDictionary()
"""Of vaults with a store, by the name of their label set."""
_FROM_FILES: weakref.WeakKeyDictionary[Any, Receipts] = weakref.WeakKeyDictionary()
"""By layer that was read from a file, and whose weights are not noted yet."""
_MOST_PARTS = 100_000
_NUMBERS_AND_TEXTS = (str, bytes, int, float, complex, np.ndarray, np.generic)
_ATOMS = (type(None), types.ModuleType, type, *_NUMBERS_AND_TEXTS)
"""Nothing that a model could be part of."""
_LIBRARIES = frozenset(
    "builtins functools keras tensorflow numpy scipy pandas pyarrow sklearn jax torch".split()
)
_PIPELINES = frozenset(["sklearn"])  # its pipelines are made of what users give
_CALLED = ("__call__", "transform", "predict", "predict_proba")
"""Methods by which features are made."""
WEIGHTS_ASSUMED = (
    "the weights that training began with, and any that were set since, were made without these "
    "labels, but for the uses counted here"
)
_IN_THE_CLEAR = (
    "nothing is promised: {name} trained these weights in this process for {steps} steps, on "
    "labels that no receipt is about. If they are public, or their privacy is known from "
    "elsewhere, declare it: tf_labeldp.declare(model, because=...); with made_of=[noisy] where "
    "they are noisy labels"
)


def receipts_of(artefact: Any, *, evidence: bool = True) -> Receipts:
    """Returns the receipts of all that an artefact was made of, as far as this process knows."""
    if evidence:
        note_in_the_clear()
    _note_unknown()
    while _FROM_FILES:
        layer, written = _FROM_FILES.popitem()
        remember_weights(_own_weights(layer), written, unless=())
    found: list[Iterable[Receipt]] = []
    weights: list[tuple[Any, list[Any]]] = []
    for part in _parts(artefact):
        fields = vars(part) if hasattr(part, "__dict__") else {}
        for held in (fields.get("receipts"), fields.get("receipts_")):
            if isinstance(held, tuple) and all(isinstance(one, Receipt) for one in held):
                found.append(held)
        content = fields.get("label_dp_receipts")
        if isinstance(content, bytes) and content:  # of a layer of a head, also from a file
            found.append(receipts_from_bytes(content)[0])
        own = _own_weights(part)
        if own:
            weights.append((part, own))
        else:
            found.append(_noted(part))
    if weights and evidence:
        found.append(_evidence({id(one) for _, own in weights for one in own}))
    for layer, own in weights:
        known = [_OF_WEIGHTS.get(digest, ()) for digest in weight_digests(own)]
        if any(known):  # noted, for the case that it is trained further
            _CARRIED[layer] = merge_receipts(_noted(layer), *known)
        found.append(_noted(layer))
    return merge_receipts(*found)


def carry(artefact: Any, receipts: Iterable[Receipt]) -> None:
    """Notes that a layer, or a Keras model with all its trainable layers, was made of these.

    Layers, and not only the model: an encoder is usually a new model over layers of a trained one.
    """
    added = tuple(receipts)
    layers = [one for one in _layers(artefact) if one.trainable_weights]
    for one in (artefact, *layers):
        _CARRIED[one] = merge_receipts(_noted(one), added)


def carry_from_file(model: Any, receipts: Receipts, layers: Iterable[int] | None) -> None:
    """Notes what a file says that layers of a model were made of; None for all of them.

    The weights may be read later than the receipts: their values are noted at the next question.
    """
    parts = _layers(model)
    chosen = parts if layers is None else [parts[place] for place in layers if place < len(parts)]
    for one in (model, *chosen):
        _CARRIED[one] = merge_receipts(_noted(one), receipts)
    _FROM_FILES.update(dict.fromkeys(chosen, receipts))


def noted_layers(model: Any) -> list[int]:
    """Returns which layers of a model were made of receipts that are noted."""
    return [place for place, layer in enumerate(_layers(model)) if _noted(layer)]


def remember_weights(
    variables: Iterable[Any], receipts: Iterable[Receipt], unless: Iterable[bytes]
) -> None:
    """Notes that values of variables were made of these; but not values of these digests."""
    known = set(unless)
    new = [digest for digest in weight_digests(variables) if digest not in known]
    _note_everywhere(new, tuple(receipts))


def _note_everywhere(digests: Sequence[bytes], receipts: Receipts) -> None:
    """Notes digests here, and for other processes in the stores of vaults that paid for some."""
    note_digests(digests, receipts)
    for name in {one.labels.name for one in receipts if digests} & set(LEDGERS):
        with contextlib.suppress(OSError, LabelStoreError):  # gone, or not to be written to
            LEDGERS[name].keep_weights(digests, receipts)


def note_digests(digests: Iterable[bytes], receipts: Receipts) -> None:
    """Notes that weights of these digests were made of these."""
    for digest in digests:
        known = _OF_WEIGHTS.get(digest)
        _OF_WEIGHTS[digest] = merge_receipts(known, receipts) if known else receipts


def declare(
    artefact: Any,
    because: str,
    *,
    epsilon: float = 0.0,
    delta: float = 0.0,
    made_of: Iterable[Any] = (),
) -> PrivacyGuarantee:
    """Declares what is known of a model's history where this process can't know it.

    Statements print it as its author's claim. It covers what is unknown so far, not training in the
    clear after it.

    Args:
        artefact: a Keras model or layer.
        because: why, in a sentence: ``"trained on public labels of ImageNet"``.
        epsilon: what its training has cost the private labels; 0 if it used none of them.
        delta: likewise.
        made_of: noisy labels, heads or models that it was trained on, whose receipts it then has.

    Returns:
        The statement of the artefact, with the claim.

    Raises:
        TypeError: ``artefact`` is not a Keras model or layer, or ``because`` is no text.

    Example:
        >>> import keras
        >>> model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        >>> model.compile("sgd", "mse")
        >>> history = model.fit(np.zeros((4, 2)), np.arange(4.0), verbose=0)
        >>> declare(model, because="these labels are public").epsilon
        0.0
    """
    if not isinstance(because, str) or not because.strip():
        raise TypeError(
            "because must say why, in a sentence that the statement will print: "
            "because='trained on public labels'."
        )
    if not hasattr(artefact, "trainable_weights"):
        raise TypeError(
            f"artefact must be a Keras model or layer, got {type(artefact).__name__}. Noisy labels "
            "and heads carry their receipts themselves."
        )
    known = receipts_of(artefact)
    claim = declared_receipt(
        [one for one in known if one.kind == "unknown"], because.strip(), epsilon, delta
    )
    receipts = merge_receipts(known, [claim], *(receipts_of(one) for one in made_of))
    carry(artefact, receipts)
    remember_weights(artefact.weights, receipts, unless=())
    return guarantee(artefact)


def guarantee(artefact: Any, delta: float | None = None) -> PrivacyGuarantee:
    """Returns the statement of anything that was made of private labels.

    Guarantee:
        The composition of the receipts that the artefact holds (``accounting.compose_receipts``).

    Args:
        artefact: noisy labels, a head, a Keras model or layer.
        delta: of the statement; None for the largest of the budgets that paid.

    Example:
        >>> from tf_labeldp import PrivacyBudget, PrivateLabels, RandomizedResponse
        >>> labels = PrivateLabels([0, 1, 1], num_classes=2, budget=PrivacyBudget(2.0))
        >>> guarantee(labels.randomize(RandomizedResponse(0.5, 2))).epsilon
        0.5
    """
    stated = compose_receipts(receipts_of(artefact), delta)
    is_model = hasattr(artefact, "trainable_weights")
    return stated.with_assumptions([WEIGHTS_ASSUMED] if is_model else [])


def _parts(artefact: Any) -> Iterator[Any]:
    """Yields an artefact, its layers, and what it visibly uses."""
    waiting: list[Any] = [artefact]
    seen: dict[int, Any] = {}
    while waiting:
        part = waiting.pop()
        if isinstance(part, _ATOMS) or id(part) in seen:
            continue
        seen[id(part)] = part
        if len(seen) > _MOST_PARTS:
            raise ValueError(
                f"{type(artefact).__name__} is made of more than {_MOST_PARTS:,} objects, too many "
                "to look for models that were trained on labels. Give the Keras model itself."
            )
        if isinstance(part, (list, tuple, set, frozenset)):
            waiting += part
        elif isinstance(part, dict):
            waiting += part.values()
        else:
            yield part
            waiting += _used_by(part)


def _used_by(part: Any) -> list[Any]:
    """Returns what one object visibly uses.

    A method uses its owner; a partial what it is made of; a function of the user's the variables
    that it names; any other object of the user's its attributes, and what its methods name.
    """
    layers = _layers(part)
    used = [*layers, getattr(part, "__self__", None), getattr(part, "__wrapped__", None)]
    used.append(getattr(part, "python_function", None))  # of a tf.function
    if isinstance(part, functools.partial):
        used += [part.func, *part.args, *part.keywords.values()]
    elif inspect.isfunction(part):
        if not _is_of_a_library(part.__module__):
            used += _named_in(part)
    elif not layers and not _is_of_a_library(type(part).__module__, _PIPELINES):
        used += getattr(part, "__dict__", {}).values()
        kinds = [one for one in type(part).__mro__ if not _is_of_a_library(one.__module__)]
        for kind in kinds:
            slots = vars(kind).get("__slots__", ())
            names = (slots,) if isinstance(slots, str) else slots
            used += [getattr(part, name, None) for name in names]
        for function in _methods_called(kinds):
            used += _named_in(function)
    return used


def _methods_called(kinds: list[type]) -> Iterator[types.FunctionType]:
    """Yields the methods by which features are made, and those that they name."""
    todo, names = list(_CALLED), set(_CALLED)
    while todo:
        name = todo.pop()
        for one in (vars(kind).get(name) for kind in kinds):
            function = getattr(one, "fget", getattr(one, "__func__", one))
            if inspect.isfunction(function):
                new = _names(function.__code__) - names
                names |= new
                todo += new
                yield function


def _named_in(function: types.FunctionType) -> list[Any]:
    """Returns the values of the variables around a function that it, or one within it, names."""
    cells = []
    for cell in function.__closure__ or ():
        with contextlib.suppress(ValueError):  # without a value as yet
            cells.append(cell.cell_contents)
    around = function.__globals__
    return [*cells, *(around[name] for name in _names(function.__code__) if name in around)]


def _names(code: types.CodeType) -> set[str]:
    """Returns the names that code uses, with that of functions within it."""
    inner = [one for one in code.co_consts if isinstance(one, types.CodeType)]
    return set(code.co_names).union(*map(_names, inner))


def _is_of_a_library(module: str | None, but: frozenset[str] = frozenset()) -> bool:
    """Returns whether what is in a module is no concern of its user's."""
    return (module or "").partition(".")[0] in _LIBRARIES - but


def _noted(part: Any) -> Receipts:
    try:
        return _CARRIED.get(part, ())
    except TypeError:  # nothing that can be remembered
        return ()


def _layers(model: Any) -> list[Any]:
    flatten = getattr(model, "_flatten_layers", None)
    return list(flatten()) if callable(flatten) else []


def _own_weights(part: Any) -> list[Any]:
    """Returns the variables of a layer, or of a module of TensorFlow, but for its layers'."""
    if hasattr(part, "trainable_weights"):
        inner = {id(one) for layer in _layers(part) if layer is not part for one in layer.weights}
        return [one for one in part.weights if id(one) not in inner]
    if type(part).__module__.startswith("tensorflow."):  # as tf.saved_model.load returns it
        variables = getattr(part, "variables", ())
        return [one for one in variables if hasattr(one, "numpy")]
    return []


def _evidence(weights: set[int]) -> Receipts:
    """Returns the receipts of optimizers that trained variables of these ids in the clear."""
    return tuple(
        known.receipt or _in_the_clear_receipt(known)
        for known in in_the_clear()
        if any(id(variable) in weights for variable in known.trained)
    )


def _in_the_clear_receipt(trained: Any) -> Receipt:
    """Returns the receipt of steps of which nothing is known."""
    return Receipt(
        LabelSet.new(0),
        Charge.unknown(_IN_THE_CLEAR.format(name=trained.name, steps=trained.steps)),
        what="training in the clear",
        kind="unknown",
    )


def _note_unknown() -> None:
    """Notes all weights that were trained in the clear: they may turn up in other models later.

    With them go the receipts of the layers whose variables were trained further.
    """
    for trained in trained_in_the_clear():
        watched, receipt = trained.watched(), None
        if watched is not None and watched.receipt_steps == trained.steps:
            receipt = watched.receipt  # values that changed without a step are of the same training
        if receipt is None:
            receipt = _in_the_clear_receipt(trained)
            if watched is not None:
                watched.receipt, watched.receipt_steps = receipt, trained.steps
        ids = {id(reference()) for reference in trained.variables}
        before = [
            receipts
            for layer, receipts in list(_CARRIED.items())
            if any(id(weight) in ids for weight in _own_weights(layer))
        ]
        _note_everywhere(sorted(trained.digests), merge_receipts([receipt], *before))
