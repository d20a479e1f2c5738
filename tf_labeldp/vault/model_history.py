"""The receipts of Keras models: attached when a training is counted, and read from files.

A layer carries a ``History``: the receipts of what it was made of, and digests of its weights when
the last counted training ended. ``accounting.public_input`` reads it; here it is written. Digests
of final weights also go to the ledgers of the vaults that paid, so that copies are known elsewhere.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import math
import os
import pathlib
import sys
import weakref
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from tf_labeldp.accounting import (
    PrivacyGuarantee,
    Public,
    PublicInput,
    Receipt,
    ReceiptError,
    Setting,
    public_input,
)
from tf_labeldp.accounting.provenance import (
    COVERED,
    HISTORY,
    WEIGHTS_ASSUMED,
    History,
    covered_steps,
    history_of,
    inner_optimizer,
    known_of,
    layers_of,
    note_digests,
    own_weights,
    value_of,
    weight_digests,
)
from tf_labeldp.accounting.receipts import (
    Receipts,
    compose_receipts,
    declared_receipt,
    merge_receipts,
)
from tf_labeldp.vault.records import PUBLIC_INPUT, LabelStoreError

_KERAS_CLASSES = ("keras_layers", "training", "self_supervised", "semi_supervised")
"""The parts that register the classes which files of models name."""
LEDGERS: dict[str, Callable[[Sequence[bytes], Receipts], None]] = {}
"""Functions that keep weights in the stores of vaults, by the name of the label set."""


def attach(model: Any, receipts: Iterable[Receipt], layers: Iterable[Any] | None = None) -> None:
    """Adds receipts to a model, and to these layers or all trainable ones."""
    # An encoder is usually a new model over layers of a trained one, so the layers count.
    added = tuple(receipts)
    trainable = [layer for layer in layers_of(model) if layer.trainable_weights]
    chosen = trainable if layers is None else layers
    merged: dict[int, Receipts] = {}  # layers of one model mostly share a tuple
    for layer in {id(part): part for part in (model, *chosen)}.values():
        history = history_of(layer)
        if history is None:
            history = History((), frozenset(weight_digests(own_weights(layer))))
        if id(history.receipts) not in merged:
            merged[id(history.receipts)] = merge_receipts(history.receipts, added)
        _set_history(layer, dataclasses.replace(history, receipts=merged[id(history.receipts)]))


def attach_from_file(model: Any, receipts: Receipts, places: Iterable[int] | None) -> None:
    """Adds receipts of a file to layers of a model by their places; None for all of them."""
    layers = layers_of(model)
    chosen = (
        layers if places is None else [layers[place] for place in places if place < len(layers)]
    )
    for layer in {id(part): part for part in (model, *chosen)}.values():
        earlier = (history_of(layer) or History()).receipts
        _set_history(layer, History(merge_receipts(earlier, receipts)))


def begin_training(model: Any, receipts: Iterable[Receipt] = ()) -> list[bytes]:
    """Adds receipts to a model whose training begins; returns digests of its weights."""
    earlier = public_input(model).receipts  # with the evidence of training without receipts
    attach(model, merge_receipts(earlier, receipts))
    for layer in layers_of(model):
        if (history := history_of(layer)) is not None:
            _set_history(layer, dataclasses.replace(history, digests=None, trained=True))
    optimizer = getattr(model, "optimizer", None)
    if optimizer is not None and covered_steps(optimizer) is None:
        cover_steps(optimizer, 0)
    return weight_digests(model.weights)


def end_training(model: Any, before: Iterable[bytes]) -> None:
    """Notes the final weights of a training, here and in the ledgers of the vaults that paid."""
    keras: Any = sys.modules["keras"]
    if keras.backend.backend() == "jax":
        # Keras leaves weights and their averages (`use_ema`) one buffer, which `predict` frees.
        model.set_weights(model.get_weights())
    cover_steps(model.optimizer)
    by_layer = _digests_by_layer(layers_of(model))
    digests = [digest for own in by_layer.values() for digest in own]
    attach(model, merge_receipts(*map(known_of, digests)))  # of weights that a callback has set
    _cover_weights(by_layer)
    changed = sorted(set(digests).difference(before))
    note_weights(changed, (history_of(model) or History()).receipts)


def known_of_weights(model: Any) -> Receipts:
    """Returns the receipts of the values that the weights of a model have now."""
    return merge_receipts(*map(known_of, weight_digests(model.weights)))


def note_epoch(model: Any, before: Iterable[bytes]) -> None:
    """Notes the weights at the end of an epoch in this process: they may be read from a file."""
    changed = set(weight_digests(model.weights)).difference(before)
    note_digests(changed, (history_of(model) or History()).receipts)


@contextlib.contextmanager
def counted_training(model: Any, receipts: Iterable[Receipt]) -> Iterator[None]:
    """Counts the training inside as made of these receipts, in addition to those of the model."""
    before = begin_training(model, receipts)
    cover_steps(model.optimizer, math.inf)
    try:
        yield
    finally:
        end_training(model, before)


def counted_weights(layer: Any, receipts: Receipts, weights: Iterable[Any]) -> None:
    """Notes that these weights of a layer, as they are now, were made of these receipts alone."""
    attach(layer, receipts, ())
    _cover_weights(_digests_by_layer([layer]))
    note_weights(weight_digests(weights), receipts)


def cover_steps(optimizer: Any, steps: float | None = None) -> None:
    """Notes that receipts cover this many steps of an optimizer; None for all so far."""
    if optimizer is not None:
        inner = inner_optimizer(optimizer)
        if steps is None:
            steps = int(value_of(inner.iterations)) if inner.built else 0
        inner.__dict__[COVERED] = steps  # past Keras's tracking of attributes


def note_weights(digests: Sequence[bytes], receipts: Receipts) -> None:
    """Notes the receipts of weights, here and in the stores of vaults that paid for some."""
    note_digests(digests, receipts)
    for name in {receipt.labels.name for receipt in receipts if digests} & set(LEDGERS):
        with contextlib.suppress(OSError, LabelStoreError):  # gone, or not to be written to
            LEDGERS[name](digests, receipts)


def _digests_by_layer(layers: Iterable[Any]) -> dict[Any, list[bytes]]:
    return {layer: weight_digests(own_weights(layer)) for layer in layers}


def _cover_weights(digests: Mapping[Any, Iterable[bytes]]) -> None:
    for layer, own in digests.items():
        if (history := history_of(layer)) is not None:
            _set_history(layer, dataclasses.replace(history, digests=frozenset(own)))


def _set_history(layer: Any, history: History) -> None:
    from tf_labeldp.keras_layers._released_dense import HistoryInFiles

    name, owner = layer.name, weakref.ref(layer)

    def write() -> bytes:
        optimizer = getattr(owner(), "optimizer", None)
        covered = None if optimizer is None else covered_steps(optimizer)
        if covered == math.inf:
            covered = value_of(inner_optimizer(optimizer).iterations)
        steps = None if covered is None else int(covered)
        return f"{name}\n".encode() + dataclasses.replace(history, steps=steps).to_bytes()

    layer.__dict__[HISTORY] = HistoryInFiles(history, write)  # past Keras's tracking


def declare(
    artefact: Public[Any],
    because: str,
    *,
    epsilon: float = 0.0,
    delta: float = 0.0,
    made_of: Public[Iterable[Any]] = (),
) -> PrivacyGuarantee:
    """Declares the history of a model where its receipts do not record it.

    Statements print the declaration as its author's claim. It covers the unknown past, and no
    training without receipts that follows.

    Args:
        artefact: a Keras model or layer; else a ``TypeError``.
        because: the reason, in a sentence: ``"trained on public labels of ImageNet"``.
        epsilon: the cost of its training to the private labels; 0 if it used none of them.
        delta: likewise.
        made_of: noisy labels, heads or models that it was trained on, whose receipts it then has.

    Returns:
        The statement of the artefact, with the claim.

    Example:
        >>> import keras
        >>> model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        >>> declare(model, because="these labels are public").epsilon
        0.0
    """
    if not isinstance(because, str) or not because.strip():
        raise TypeError(
            "because must give the reason in a sentence, which the statement will print: "
            "because='trained on public labels'."
        )
    public = public_input(artefact)
    artefact = public.value
    if not hasattr(artefact, "trainable_weights"):
        raise TypeError(
            f"artefact must be a Keras model or layer, got {type(artefact).__name__}. Noisy labels "
            "and heads carry their receipts themselves."
        )
    unknown = [receipt for receipt in public.receipts if receipt.kind == "unknown"]
    claim = declared_receipt(unknown, because.strip(), epsilon, delta)
    parts = made_of if isinstance(made_of, PublicInput) else tuple(made_of)
    attach(artefact, merge_receipts(public.receipts, [claim], public_input(parts).receipts))
    by_layer = _digests_by_layer(layers_of(artefact))
    _cover_weights(by_layer)
    cover_steps(getattr(artefact, "optimizer", None))
    digests = [digest for own in by_layer.values() for digest in own]
    note_weights(digests, public_input(artefact).receipts)
    return guarantee(artefact)


def guarantee(artefact: Public[Any], delta: float | None = None) -> PrivacyGuarantee:
    """Returns the statement of anything that was made of private labels.

    Guarantee:
        The composition of its receipts (``accounting.compose_receipts``). A Keras model with
        evidence of training that no receipt covers gets no promise; an unknown one, an assumption.

    Args:
        artefact: noisy labels, a head, a Keras model or layer; or the path of a ``.keras`` file
            that Keras loads without ``custom_objects``.
        delta: of the statement; None for the largest of the budgets that paid.

    Raises:
        ReceiptError: the receipts were damaged, or written by a newer version.

    Example:
        >>> from tf_labeldp import PrivacyBudget, PrivateLabels, RandomizedResponse
        >>> labels = PrivateLabels([0, 1, 1], num_classes=2, budget=PrivacyBudget(2.0))
        >>> guarantee(labels.randomize(RandomizedResponse(0.5, 2))).epsilon
        0.5
    """
    if isinstance(artefact, (str, os.PathLike)):
        artefact = load_model(artefact)  # with the optimizer, which has evidence of training
    receipts = public_input(artefact).receipts
    stated = compose_receipts(receipts, delta)
    if hasattr(artefact, "trainable_weights"):
        return stated.with_assumptions([WEIGHTS_ASSUMED])
    # Of an array, or of anything else without receipts, nothing is known.
    return stated if receipts else stated.with_assumptions([PUBLIC_INPUT])


def load_model(path: str | os.PathLike[str], **settings: Setting[Any]) -> Any:
    """Returns the Keras model of a ``.keras`` file, with the receipts in the file.

    Keras's own ``load_model`` reads the same file without them, and takes the same arguments.

    Raises:
        FileNotFoundError, ValueError: as of ``keras.models.load_model``.
        ReceiptError: the receipts were damaged, or written by a newer version.

    Example:
        >>> import keras, os, tempfile
        >>> model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        >>> path = os.path.join(tempfile.mkdtemp(), "model.keras")
        >>> model.save(path)
        >>> guarantee(load_model(path)).epsilon
        0.0
    """
    import keras

    path = pathlib.Path(path).expanduser()
    if zipfile.is_zipfile(path) and b"tf_labeldp>" in zipfile.ZipFile(path).read("config.json"):
        for part in _KERAS_CLASSES:
            importlib.import_module(f"tf_labeldp.{part}")
    model = keras.models.load_model(path, **settings)
    histories = _histories_in(path)
    _match_by_name(model, histories)
    # A file that was written within a training has the receipts of the weights as they are there.
    under_way = [
        layer for layer in layers_of(model) if (h := history_of(layer)) and h.digests is None
    ]
    _cover_weights(_digests_by_layer(under_way))
    of_model = histories.get(model.name)
    if of_model is not None and of_model.steps is not None:
        cover_steps(getattr(model, "optimizer", None), of_model.steps)
    for layer in layers_of(model):  # so that copies are known
        if (history := history_of(layer)) is not None:
            note_digests(history.digests or (), history.receipts)
    return model


def _histories_in(path: pathlib.Path) -> dict[str, History]:
    from tf_labeldp.keras_layers._released_dense import ASSET

    histories: dict[str, History] = {}
    if not zipfile.is_zipfile(path):
        return histories
    with zipfile.ZipFile(path) as content:
        for member in content.namelist():
            if not (member.startswith("assets/") and member.endswith(f"/{HISTORY}/{ASSET}")):
                continue
            name, _, found = content.read(member).partition(b"\n")
            layer = name.decode()
            try:
                read = History.from_bytes(found)
                histories[layer] = _both(histories.get(layer, read), read)
            except ReceiptError as error:
                raise ReceiptError(f"{path}: {error}") from error
    return histories


def _both(first: History, second: History) -> History:
    """Returns the history of layers of one name, which files do not distinguish."""
    digests = None
    if first.digests is not None and second.digests is not None:
        digests = first.digests | second.digests
    steps = first.steps if second.steps is None else second.steps
    return History(merge_receipts(first.receipts, second.receipts), digests, True, steps)


def _match_by_name(model: Any, histories: Mapping[str, History]) -> None:
    by_name: dict[str, list[Any]] = {}
    for layer in layers_of(model):
        by_name.setdefault(layer.name, []).append(layer)
    for name, history in histories.items():
        # Of a layer that has another name now: all may be made of it.
        for layer in by_name.get(name, layers_of(model)):
            earlier = (history_of(layer) or History()).receipts
            digests = history.digests if name in by_name else None
            receipts = merge_receipts(earlier, history.receipts)
            _set_history(layer, dataclasses.replace(history, receipts=receipts, digests=digests))
