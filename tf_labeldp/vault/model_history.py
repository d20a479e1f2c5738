"""The receipts of Keras models: counted trainings attach them, and files carry them.

A layer carries a ``LayerHistory``: receipts, and digests of its weights at the end of the last
counted training. ``accounting.public_input`` reads it; this file writes it. The ledgers of charged
vaults record digests of final weights too, so that copies of the weights are recognized.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib
import json
import math
import os
import pathlib
import tempfile
import weakref
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from tf_labeldp import _validate
from tf_labeldp._progress import without_input_warnings
from tf_labeldp.accounting import (
    PrivacyGuarantee,
    Public,
    PublicInput,
    Receipt,
    ReceiptError,
    Receipts,
    Setting,
    public_input,
)
from tf_labeldp.accounting.provenance import LayerHistory, OptimizerSteps, Weights
from tf_labeldp.vault._statements import statement_of
from tf_labeldp.vault.files import PlainFile
from tf_labeldp.vault.ledger import Ledger
from tf_labeldp.vault.records import check_unpacked_size

_FACTS, _FACTS_FILE = "label_dp_facts", "facts.json"
_KEEP_NAMES = ("keras", "tf_labeldp")
"""Libraries whose layers of layers name these by their configuration."""


@dataclasses.dataclass(frozen=True)
class TrainedModel:
    """A Keras model, or a layer, with the receipts of its trainings and what its files keep.

    Example:
        >>> import keras
        >>> from tf_labeldp import PrivacyBudget, PrivateLabels, RandomizedResponse
        >>> labels = PrivateLabels([0, 1, 1], num_classes=2, budget=PrivacyBudget(2.0))
        >>> noisy = labels.randomize(RandomizedResponse(0.5, 2))
        >>> model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(2)])
        >>> TrainedModel(model).attach(noisy.receipts)
        >>> guarantee(model).epsilon
        0.5
    """

    model: Any

    SUFFIX: ClassVar[str] = ".keras"
    FILE: ClassVar[str] = "model.keras"
    CARD: ClassVar[str] = "privacy.json"
    """The names of a model and its card in the folder of ``tf_labeldp.save``."""

    @staticmethod
    def file_in(path: str | os.PathLike[str]) -> pathlib.Path:
        """Returns the path of the file of a model: this path, or the one in this folder."""
        file = pathlib.Path(path).expanduser()
        return file / TrainedModel.FILE if (file / TrainedModel.FILE).exists() else file

    @staticmethod
    def receipts_of_card(folder: str | os.PathLike[str]) -> tuple[Receipt, ...]:
        """Returns the receipts of the metrics on the card in a folder; ``()`` without a card.

        Raises:
            ReceiptError: they were changed.
        """
        card = pathlib.Path(folder).expanduser() / TrainedModel.CARD
        if not card.exists():
            return ()
        try:
            metrics = dict(_validate.json_of(PlainFile(card).read())).get("metrics", [])
            receipts = [receipt for metric in metrics for receipt in metric["receipts"]]
            return tuple(map(Receipt.from_json, receipts))
        except (KeyError, TypeError, ValueError) as error:
            raise ReceiptError(f"{card} is damaged ({error}). Save the model again.") from error

    @staticmethod
    def members() -> tuple[str, str]:
        """Returns the ends of the names of the members that this library adds to a model's file.

        They have the history of a layer, and the facts of the model.
        """
        from tf_labeldp.keras_layers._released_dense import HistoryInFiles

        return f"{LayerHistory.ATTRIBUTE}/{HistoryInFiles.ASSET}", f"{_FACTS}/{_FACTS_FILE}"

    @property
    def layers(self) -> list[Any]:
        """The model and all its inner layers."""
        return Weights.layers_of(self.model)

    @property
    def receipts(self) -> tuple[Receipt, ...]:
        """The receipts in the history of the model itself."""
        return (LayerHistory.of(self.model) or LayerHistory()).receipts

    def attach(self, receipts: Iterable[Receipt], layers: Iterable[Any] | None = None) -> None:
        """Adds receipts to the model, and to these layers or all trainable layers."""
        # An encoder is usually a new model over layers of a trained model, so layers carry
        # receipts.
        added = tuple(receipts)
        trainable = [layer for layer in self.layers if layer.trainable_weights]
        chosen = trainable if layers is None else layers
        merged: dict[int, tuple[Receipt, ...]] = {}  # The layers of a model mostly share a tuple.
        for layer in self._with(chosen):
            history = LayerHistory.of(layer)
            if history is None:
                history = LayerHistory((), frozenset(Weights.digests(Weights.own(layer))))
            if id(history.receipts) not in merged:
                merged[id(history.receipts)] = Receipts.merged(history.receipts, added)
            set_history(layer, dataclasses.replace(history, receipts=merged[id(history.receipts)]))
        OptimizerSteps.of(self.model).note(LayerHistory.of(self.model))

    def written_receipts(self) -> bytes:
        """Returns the receipts of the model and the places of its layers with a history."""
        noted = [place for place, layer in enumerate(self.layers) if LayerHistory.of(layer)]
        return Receipts(public_input(self.model).receipts).to_bytes(layers=noted)

    def read_receipts(self, content: bytes) -> None:
        """Adds the receipts that ``written_receipts`` wrote to the layers at their places."""
        receipts, data = Receipts.from_bytes(content)
        layers, places = self.layers, data.get("layers")
        if places is not None:
            layers = [layers[place] for place in places if place < len(layers)]
        for layer in self._with(layers):
            merged = Receipts.merged(TrainedModel(layer).receipts, receipts)
            set_history(layer, LayerHistory(merged))

    def _with(self, layers: Iterable[Any]) -> Iterable[Any]:
        """Returns the model and layers, each once."""
        return {id(part): part for part in (self.model, *layers)}.values()

    def note_counted(self, receipts: tuple[Receipt, ...], weights: Iterable[Any]) -> None:
        """Records that the present values of these weights come from these receipts alone."""
        self.attach(receipts, ())
        cover_weights([self.model])
        weights = list(weights)
        note_weights(Weights.digests(weights), receipts)
        Ledger.record_digests(self.integer_digests(weights), receipts)

    @staticmethod
    def integer_digests(variables: Iterable[Any]) -> list[bytes]:
        """Returns a digest of each array of whole numbers, also of those with equal numbers."""
        arrays = [np.asarray(Weights.value_of(variable)) for variable in variables]
        several = [array for array in arrays if array.dtype.kind not in "fV" and array.size > 1]
        return [bytes.fromhex(PublicInput.digest_of(array)) for array in several]

    def digest(self) -> bytes:
        """Returns a digest of the model's configuration and all its weights."""
        fields = _without_numbering(self.model.get_config())
        config = json.dumps(fields, sort_keys=True, default=str).encode()
        weights = [np.asarray(Weights.value_of(weight)) for weight in self.model.weights]
        return bytes.fromhex(PublicInput.digest_of(np.frombuffer(config, np.uint8), *weights))

    def note_facts(self, facts: Mapping[str, Any]) -> ModelFacts:
        """Keeps public facts in the ``.keras`` file of the model; returns all that are there."""
        together = ModelFacts(facts)
        earlier = _keep_in_files(
            self.model, _FACTS, together, lambda: json.dumps(together).encode(), _FACTS_FILE
        )
        for name, fact in (earlier.history if earlier else {}).items():
            together.setdefault(name, fact)
        return together


class ModelFacts(dict[str, Any]):
    """Public facts in the file of an exported head, ready for JSON.

    They are ``classes`` (in the order of the outputs) or ``range`` (of numbers), ``columns`` (of
    the features, by name), and ``cells`` (the forms in which the command read their texts).
    """

    NAMES: ClassVar[tuple[str, ...]] = ("classes", "range", "columns", "cells")

    def digest(self) -> bytes:
        """Returns a digest of the facts."""
        return hashlib.sha256(json.dumps(self, sort_keys=True).encode()).digest()

    @classmethod
    def of_file(cls, path: str | os.PathLike[str]) -> ModelFacts:
        """Returns the facts in a file, or nothing."""
        if not zipfile.is_zipfile(path):
            return cls()
        with zipfile.ZipFile(path) as content:
            member = f"assets/{TrainedModel.members()[1]}"
            check_unpacked_size(content, os.path.getsize(path))
            is_there = member in content.namelist()
            return cls(_validate.json_of(content.read(member)) if is_there else {})


def _without_numbering(config: Any) -> Any:
    """Returns a configuration without the numbers that Keras gives shared objects afresh."""
    if isinstance(config, dict):
        fields = {name: _without_numbering(part) for name, part in config.items()}
        fields.pop("shared_object_id", None)
        return fields
    return list(map(_without_numbering, config)) if isinstance(config, (list, tuple)) else config


def note_weights(digests: Sequence[bytes], receipts: tuple[Receipt, ...]) -> None:
    """Records the receipts of weights, here and in the stores of charged vaults."""
    Weights.note(digests, receipts)
    Ledger.record_digests(digests, receipts)


def cover_weights(layers: Iterable[Any]) -> list[bytes]:
    """Marks the present weights of layers as covered by their receipts; returns all digests."""
    digests = []
    for layer in layers:
        own = Weights.digests(Weights.own(layer))
        digests += own
        if (history := LayerHistory.of(layer)) is not None:
            set_history(layer, dataclasses.replace(history, digests=frozenset(own), changed=None))
    return digests


def cover_namesakes(layers: Sequence[Any]) -> None:
    """Gives frozen copies of layers, which share their names, a history without receipts.

    Files name the layer of a history, so the copy would seem to be the trained layer, changed.
    """
    names = {layer.name for layer in layers if LayerHistory.of(layer) is not None}
    for layer in layers:
        own = Weights.digests(Weights.own(layer))
        if own and LayerHistory.of(layer) is None and layer.name in names:
            set_history(layer, LayerHistory((), frozenset(own)))


def set_history(
    layer: Any, history: LayerHistory, content: Callable[[], bytes] | None = None
) -> None:
    """Sets the history of a layer, and writes it, or other content, to the layer's files."""
    name, owner = layer.name, weakref.ref(layer)

    def write() -> bytes:
        of_owner = OptimizerSteps.of(owner())
        covered = of_owner.covered
        if covered == math.inf:
            covered = Weights.value_of(of_owner.inner.iterations)
        steps = None if covered is None else int(covered)
        digests = _digests_in_files(owner(), history)
        written = dataclasses.replace(history, digests=digests, steps=steps)
        return f"{name}\n".encode() + written.to_bytes()

    _keep_in_files(layer, LayerHistory.ATTRIBUTE, history, content or write)


def _digests_in_files(layer: Any, history: LayerHistory) -> frozenset[bytes] | None:
    """Returns the digests of a history; of a layer with adapters also those of its saved weights.

    Weights that changed since the counted training, or since its last step, are left out.
    """
    digests = history.digests
    if history.changed is not None:
        own = Weights.own(layer)
        changed = {id(weight) for weight in history.changed(own)}
        digests = frozenset(Weights.digests(part for part in own if id(part) not in changed))
    if digests is None or not getattr(layer, "lora_enabled", False):
        return digests
    if not digests.issuperset(Weights.digests(Weights.own(layer))):
        return digests
    # Keras adds low-rank adapters to the kernel in the file, and loads adapters of zero.
    saved: dict[str, Any] = {}
    layer.save_own_variables(saved)
    return digests.union(Weights.digests(saved.values()))


def _keep_in_files(layer: Any, attribute: str, *content: Any) -> Any:
    """Sets an attribute that Keras saves, and does not track otherwise; returns the earlier one."""
    from tf_labeldp.keras_layers._released_dense import HistoryInFiles

    attributes = layer.__dict__
    earlier = attributes.get(attribute)
    attributes[attribute] = HistoryInFiles(*content)
    return earlier


def declare(
    artefact: Public[Any],
    because: str,
    *,
    epsilon: float = 0.0,
    delta: float = 0.0,
    made_of: Public[Iterable[Any]] = (),
) -> PrivacyGuarantee:
    """Declares the part of a model's history that its receipts do not record.

    Statements print the declaration as its author's claim. It covers the unknown past, and no later
    training without receipts.

    Args:
        artefact: a Keras model or layer.
        because: the reason, in a sentence: ``"trained on public labels of ImageNet"``.
        epsilon: the cost of its training to the private labels; 0 if it used none of them.
        delta: the delta of this cost.
        made_of: the sources of its labels, which must have receipts: noisy labels, heads, models,
            vaults, receipts or statements. Their receipts are added.

    Returns:
        The statement of the artefact, with the claim.

    Raises:
        ValueError: a source without receipts, such as an array.

    Example:
        >>> import keras
        >>> model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        >>> declare(model, because="these labels are public").epsilon
        0.0
    """
    if not isinstance(because, str) or not because.strip():
        raise TypeError(
            "because must give the reason in a sentence, which the statement prints: "
            "because='trained on public labels'."
        )
    # This raises before anything is declared.
    parts = made_of if isinstance(made_of, (list, tuple)) else (made_of,)
    sources = PublicInput.sources_of(parts) if parts else ()
    public = public_input(artefact)
    artefact = public.value
    if not Weights.layers_of(artefact):
        raise TypeError(
            f"artefact must be a Keras model or layer, got {type(artefact).__name__}. Noisy labels "
            "and heads carry their receipts themselves."
        )
    unknown = [receipt for receipt in public.receipts if receipt.kind == "unknown"]
    claim = Receipt.of_declaration(unknown, because.strip(), epsilon, delta)
    TrainedModel(artefact).attach(Receipts.merged(public.receipts, [claim], sources))
    digests = cover_weights(Weights.layers_of(artefact))
    OptimizerSteps.of(artefact).cover()
    note_weights(digests, public_input(artefact).receipts)
    return guarantee(artefact)


def guarantee(artefact: Public[Any], delta: float | None = None) -> PrivacyGuarantee:
    """Returns the statement of a model, or of another output of private labels.

    Guarantee:
        The composition of the receipts of the object (``accounting.Receipts``): of a vault,
        of its batches and of its key all uses of the labels, and of an optimizer those of its
        steps. Nothing is promised for a Keras model that shows training without receipts; for one
        without receipts, fresh or not, of which there is "no record of any label"; and for an
        object of another library with receipts inside, except for a scikit-learn ``Pipeline`` whose
        last step was fitted on a vault and whose other steps read no labels. Without any use of
        labels are vaults at first, estimators before ``fit``, and feature maps of public rows.

    Args:
        artefact: noisy labels, a head, a vault, batches, an optimizer, receipts; a Keras model or
            layer; the path of a ``.keras`` file that Keras loads without ``custom_objects``, or the
            folder of ``save``, of which the statement covers the metrics too; or a list of these. A
            statement returns unchanged.
        delta: the delta of the statement; None takes the largest of the charged budgets.

    Raises:
        TypeError: an object that does not record how it was made, such as an array of predictions.
            Ask the object that it comes from.
        ReceiptError: the receipts are damaged, or a newer version wrote them.

    Example:
        >>> from tf_labeldp import PrivacyBudget, PrivateLabels, RandomizedResponse
        >>> labels = PrivateLabels([0, 1, 1], num_classes=2, budget=PrivacyBudget(2.0))
        >>> guarantee(labels.randomize(RandomizedResponse(0.5, 2))).epsilon
        0.5
        >>> import keras
        >>> print(guarantee(keras.Sequential([keras.layers.Dense(1)])).headline)
        no record of any label
    """
    if isinstance(artefact, (str, os.PathLike)):
        measured = TrainedModel.receipts_of_card(artefact)
        artefact = load_model(artefact)  # The optimizer comes along: it shows training.
        if measured:
            receipts = Receipts.merged(public_input(artefact).receipts, measured)
            return LayerHistory(receipts).guarantee(delta)
    return statement_of(artefact, delta)


def load_model(path: str | os.PathLike[str], **settings: Setting[Any]) -> Any:
    """Loads the Keras model of a ``.keras`` file, or of the folder of ``save``, with its receipts.

    It loads the files of this library and all others that Keras loads, and takes the arguments of
    ``keras.models.load_model``. That one reads no receipts, and needs ``import
    tf_labeldp.keras_layers`` before.

    Raises:
        FileNotFoundError: there is no such file, or no model in the folder.
        ValueError: the file is damaged, or as from ``keras.models.load_model``.
        ReceiptError: the receipts are damaged, or a newer version wrote them.

    Example:
        >>> import keras, os, tempfile
        >>> model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        >>> path = os.path.join(tempfile.mkdtemp(), "model.keras")
        >>> model.save(path)
        >>> print(guarantee(load_model(path)).headline)
        no record of any label
    """
    import keras

    path = TrainedModel.file_in(path)
    if not path.exists():
        raise FileNotFoundError(
            f"expected the file of a model, got no file {path}. Check the path."
        )
    # Keras saves folders too: save(path, zipped=False).
    if path.is_dir() and not (path / "config.json").exists():
        raise FileNotFoundError(
            f"expected a .keras file or the folder of save, got the folder {path} without "
            f"{TrainedModel.FILE}. Check the path; of noisy labels, call NoisyLabels.load."
        )
    is_model = (
        zipfile.is_zipfile(path) if path.suffix == ".keras" else path.suffix in (".h5", ".hdf5")
    )
    if path.is_file() and not is_model:
        raise ValueError(
            f"expected a .keras file of model.save, got {path}, which is no such file, or damaged. "
            "Save the model again, or restore the file."
        )
    # Keras would take the memory of all members: the facts are read first, within a size.
    facts = ModelFacts.of_file(path)
    importlib.import_module("tf_labeldp.keras_layers")  # It registers the classes in model files.
    with without_input_warnings():
        model = keras.models.load_model(path, **settings)
    if facts:
        TrainedModel(model).note_facts(facts)
    _set_histories(model, _histories_in(path))
    layers = Weights.layers_of(model)
    # A file that was written during a training covers the weights in the file.
    cover_weights(layer for layer in layers if (h := LayerHistory.of(layer)) and h.digests is None)
    for layer in layers:
        if (history := LayerHistory.of(layer)) is None:
            continue
        # A model within the model may have been compiled and trained.
        if history.steps is not None:
            OptimizerSteps.of(layer).cover(history.steps)
            OptimizerSteps.of(layer).note(history)
        # Copies of these weights are recognized.
        Weights.note(history.digests or (), history.receipts)
    return model


@dataclasses.dataclass(frozen=True)
class _Written:
    """The history of a layer in a file, by the name of the layer and by its place there."""

    name: str
    place: str
    history: LayerHistory


def _histories_in(path: pathlib.Path) -> list[_Written]:
    """Returns the histories in a file."""
    histories: list[_Written] = []
    if not zipfile.is_zipfile(path):
        return histories
    with zipfile.ZipFile(path) as content:
        check_unpacked_size(content, path.stat().st_size)
        for place, member in _members(content, TrainedModel.members()[0]):
            name, _, history = content.read(member).partition(b"\n")
            try:
                read = LayerHistory.from_bytes(history)
            except ReceiptError as error:
                raise ReceiptError(f"{path}: {error}") from error
            histories.append(_Written(name.decode(), place, read))
    return histories


def _members(content: zipfile.ZipFile, kept: str) -> Iterator[tuple[str, str]]:
    """Yields the place of each layer that keeps a member in a file, and the member's name."""
    for member in content.namelist():
        place = member.removesuffix(kept)
        if member.startswith("assets/") and place != member and place.endswith("/"):
            yield place, member


def _merged(histories: Sequence[LayerHistory]) -> LayerHistory:
    digests = [history.digests for history in histories if history.digests is not None]
    steps = [history.steps for history in histories if history.steps is not None]
    return LayerHistory(
        Receipts.merged(*(history.receipts for history in histories)),
        frozenset().union(*digests) if len(digests) == len(histories) else None,
        True,
        steps[-1] if steps else None,
    )


def _with_integers(history: LayerHistory, weights: Iterable[Any]) -> LayerHistory:
    if history.has_integers or history.digests is None:
        return history
    of_integers = TrainedModel.integer_digests(weights)
    return dataclasses.replace(history, digests=history.digests.union(of_integers))


def _fitting(layer: Any, histories: Sequence[LayerHistory]) -> tuple[LayerHistory, bool]:
    """Returns the history of a layer among those with its name, and whether its weights fit it."""
    weights = Weights.own(layer)
    own = set(Weights.digests(weights))
    covered = [_with_integers(part, weights) for part in histories]
    fitting = [part for part in covered if own and part.digests and part.digests >= own]
    return _merged(fitting or covered), bool(fitting) or not weights


def _set_histories(model: Any, histories: Sequence[_Written]) -> None:
    """Sets the histories of a file in the layers that they belong to.

    Keras numbers unnamed layers of a user's class in each process, so that a name in the file may
    be that of another layer. There the place in the file decides, by which Keras finds the weights;
    and everywhere if weights do not fit the history of their layer's name.
    """
    layers = Weights.layers_of(model)
    by_name: dict[str, list[LayerHistory]] = {}
    for written in histories:
        by_name.setdefault(written.name, []).append(written.history)
    found = [
        (layer, *_fitting(layer, by_name[layer.name])) for layer in layers if layer.name in by_name
    ]
    are_named = by_name.keys() <= {layer.name for layer in layers} and all(
        len(Weights.layers_of(layer)) == 1
        or type(layer).__module__.partition(".")[0] in _KEEP_NAMES
        for layer in layers
    )
    if are_named and all(fits for _, _, fits in found):
        for layer, history, _ in found:
            _add_history(layer, history)
        return
    by_place = _layers_by_place(model) if histories else {}
    for written in histories:
        if written.place in by_place:
            layer = by_place[written.place]
            _add_history(layer, _fitting(layer, [written.history])[0])
            continue
        # Any layer may have this history. It covers no other weights, and no steps.
        for layer in layers:
            _add_history(layer, dataclasses.replace(written.history, steps=None))


def _add_history(layer: Any, history: LayerHistory) -> None:
    """Adds a history from a file to that of a layer."""
    before = LayerHistory.of(layer) or LayerHistory()
    receipts = Receipts.merged(before.receipts, history.receipts)
    set_history(layer, dataclasses.replace(history, receipts=receipts))


def _layers_by_place(model: Any) -> dict[str, Any]:
    """Returns the layers of a model by their places in its file; none if Keras can't write it."""
    layers = Weights.layers_of(model)
    earlier = [LayerHistory.of(layer) for layer in layers]
    for number, layer in enumerate(layers):
        set_history(layer, LayerHistory(), str(number).encode)
    try:
        with tempfile.TemporaryDirectory() as folder:
            file = pathlib.Path(folder) / TrainedModel.FILE
            with without_input_warnings():
                model.save(file)
            with zipfile.ZipFile(file) as content:
                members = _members(content, TrainedModel.members()[0])
                return {place: layers[int(content.read(member))] for place, member in members}
    # Layers raise errors of any type.
    except Exception:
        return {}
    finally:
        for layer, history in zip(layers, earlier, strict=True):
            delattr(layer, LayerHistory.ATTRIBUTE)
            if history is not None:
                set_history(layer, history)
