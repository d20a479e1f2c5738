"""Keras models in files: every member, array and number, compared with what the model needs."""

from __future__ import annotations

import itertools
import json
import pathlib
import re
import tempfile
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from tf_labeldp._progress import without_input_warnings
from tf_labeldp.accounting import public_input
from tf_labeldp.accounting.provenance import LayerHistory, Weights
from tf_labeldp.dossier._files import (
    Findings,
    Stores,
    brief,
    check_json,
    check_names,
    check_zip,
    listed,
)
from tf_labeldp.vault.model_history import ModelFacts, TrainedModel

_CONFIG, _METADATA, _WEIGHTS = "config.json", "metadata.json", "model.weights.h5"
_METADATA_TEXT = re.compile(r"[0-9][0-9a-z.+-]{0,20}(@[0-9:]{8})?")
"""A version, or a time."""
_OPTIMIZER = "optimizer/"
"""Arrays of the optimizer, which verification does not build."""
_RECEIPTS_ARRAY = "/label_dp_receipts"
_NUMBER = re.compile(r"_\d{1,4}$")
_LONGEST_TEXT = 64
"""Characters of a name in a configuration: of a layer, a class or a module."""
_LONGEST_VERSION = 24
_LEAST_RECEIPTS, _MOST_RATIO = 1 << 22, 100
"""Receipts may unpack to this size, or to this multiple of the packed one."""
_MOST_NUMBERS = 6
"""Numbers of a shape or of axes."""
_LARGEST = 2**40
"""The largest size, in bytes."""
_DIGITS = 4
"""Decimal digits of a rate; more may carry data."""
_SHAPES = re.compile(
    "units|filters|num_.*|depth|rank|groups|depth_multiplier|.*size|.*shape|.*strides|stride|"
    "padding|cropping|dilation_rate|.*ax[ei]s|dims|perm|.*_dim|.*_count|steps_per_execution|n|"
    "max_tokens|max_bytes|vocabulary_size|start|stop|step|index|args|seed|.*_seed|keras_history|"
    "input_layers|output_layers|.*frequency|.*_steps|.*_length|lora_rank|repetitions|k|height|width"
)
"""Names of whole numbers that fix the shapes of a model."""
_RATES = re.compile(
    "rate|.*_rate|dropout|.*_dropout|momentum|.*_momentum|epsilon|alpha|negative_slope|threshold|"
    "max_value|beta_1|beta_2|rho|decay|weight_decay|.*clip.*|initial_.*|"
    "label_smoothing|factor|.*_factor|fill_value|warmup_target|noise_multiplier|lora_alpha"
)
"""Names of single numbers that set a rate."""
_INITIAL = re.compile("mean|stddev|scale|minval|maxval|gain|l1|l2")
"""Names of single numbers of initializers and regularizers."""
_TEXTS = re.compile(
    "axes|keras_history|input_layers|output_layers|metrics|weighted_metrics|loss|args"
)
"""Names of lists of names."""
_NAMES = ("input_layers", "output_layers")
"""Fields with the names of layers, by those of inputs and outputs."""
_ASIDE = ("shared_object_id", "compile_config")
"""Fields that Keras numbers in each file again, and those of an optimizer that is not read."""


def check_members(
    found: Findings, path: pathlib.Path, model: Any
) -> tuple[dict[str, Any], list[str]]:
    """Compares the members of a ``.keras`` file with those of its model.

    Returns its configuration, and the members with other content of layers, such as a vocabulary.
    The model that was read is written again: what it does not write is no part of it.
    """
    parts = Findings()
    check_zip(parts, path)
    with tempfile.TemporaryDirectory() as folder:
        again = pathlib.Path(folder) / "model.keras"
        with without_input_warnings():
            model.save(again)
        with zipfile.ZipFile(path) as content, zipfile.ZipFile(again) as own:
            names = content.namelist()
            check_names(parts, names, own.namelist(), "member", path.name)
            _check_weights(parts, content, own)
            for name in names:
                if name.endswith(TrainedModel.members()):
                    _check_asset(parts, name, content.read(name))
            texts = {name: content.read(name).decode() for name in (_CONFIG, _METADATA)}
            written = {name: json.loads(own.read(name)) for name in texts}
    metadata = check_json(parts, _METADATA, texts[_METADATA], {}) or {}
    check_names(parts, metadata, written[_METADATA], "field", _METADATA)
    if not all(_METADATA_TEXT.fullmatch(str(text)) for text in metadata.values()):
        parts.problems.append(f"{_METADATA} has no plain version and time")
    config: dict[str, Any] = check_json(parts, _CONFIG, texts[_CONFIG], {}) or {}
    fields = (name for name, _ in _unknown_fields(config, written[_CONFIG]))
    check_names(parts, fields, (), "field", _CONFIG)
    # Another version of Keras may write other names.
    is_own_keras = metadata.get("keras_version") == written[_METADATA]["keras_version"]
    (found.problems if is_own_keras else found.not_checked).extend(parts.problems)
    found.not_checked += parts.not_checked
    assets = [name for name in names if name.startswith("assets/")]
    return config, [name for name in assets if not name.endswith(TrainedModel.members())]


def _unknown_fields(config: Any, written: Any) -> Iterator[tuple[str, Any]]:
    """Yields the fields of a configuration that the model does not write."""
    if isinstance(config, Mapping) and isinstance(written, Mapping):
        for name, part in config.items():
            if name in _ASIDE:
                continue
            if name in written:
                yield from _unknown_fields(part, written[name])
            else:
                yield name, part
    elif isinstance(config, list) and isinstance(written, list):
        for part, other in zip(config, written, strict=False):
            yield from _unknown_fields(part, other)
        if len(config) > len(written):
            yield f"a list of {len(config)} parts instead of {len(written)}", config


def _check_asset(found: Findings, name: str, content: bytes) -> None:
    """Checks that receipts, or facts, have no other content."""
    if name.endswith(".json"):
        facts = check_json(found, name, content.decode(), {}) or {}
        check_names(found, facts, ModelFacts.NAMES, "field", name)
        return
    layer, _, packed = content.partition(b"\n")
    if len(layer) > _LONGEST_TEXT:
        found.problems.append(f"{name} names a layer in {len(layer)} bytes")
    _check_receipts(found, name, packed)


def _check_receipts(found: Findings, name: str, packed: bytes) -> None:
    stream = zlib.decompressobj()
    text = stream.decompress(packed, max(_LEAST_RECEIPTS, _MOST_RATIO * len(packed))).decode()
    if stream.unused_data or stream.unconsumed_tail:
        found.problems.append(f"{name} has content outside its receipts")
    fields = check_json(found, name, text, {}) or {}
    known = ("format", "version", "digests", "steps", "receipts", "layers")
    check_names(found, fields, known, "field", name)
    if len(str(fields.get("version"))) > _LONGEST_VERSION or (
        fields.get("steps") is not None and not 0 <= fields["steps"] <= _LARGEST
    ):
        found.problems.append(f"{name} has no plain version and number of steps")
    places = fields.get("layers", [])
    if any(later <= place for place, later in itertools.pairwise(places)):
        found.problems.append(f"{name} lists its layers in another order")


def _check_weights(found: Findings, content: zipfile.ZipFile, own: zipfile.ZipFile) -> None:
    import h5py  # type: ignore[import-untyped]

    with content.open(_WEIGHTS) as file, own.open(_WEIGHTS) as again:
        stored, written = _arrays(h5py.File(file)), _arrays(h5py.File(again))
    is_state = {name for name in stored if f"{name}/".startswith(_OPTIMIZER)}
    check_names(found, set(stored) - is_state, written, "array", _WEIGHTS)
    for name in stored:
        if name.endswith(_RECEIPTS_ARRAY) and (packed := stored[name][1]) is not None:
            _check_receipts(found, name, packed.astype(np.uint8).tobytes())
    differing = [
        name
        for name in sorted((set(stored) - is_state) & set(written))
        if not all(map(_are_equal, stored[name], written[name]))
    ]
    if differing:
        found.problems.append(f"{_WEIGHTS} has content outside its arrays: {listed(differing)}")


def _are_equal(one: Any, other: Any) -> bool:
    if not isinstance(one, np.ndarray):
        return bool(one == other)
    return (
        one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes()
    )


def _arrays(file: Any) -> dict[str, tuple[Any, Any]]:
    """Returns each group and array of an HDF5 file by name: its attributes and its values."""
    import h5py

    found: dict[str, tuple[Any, Any]] = {"": (dict(file.attrs), None)}

    def note(name: str, part: Any) -> None:
        # Keras numbers the names of layers within layers again.
        attributes = {key: _NUMBER.sub("", str(value)) for key, value in part.attrs.items()}
        found[name] = attributes, np.asarray(part) if isinstance(part, h5py.Dataset) else None

    file.visititems(note)
    return found


def has_unknown_state(path: pathlib.Path, digests: frozenset[bytes]) -> bool:
    """Returns whether the optimizer in a file has arrays that no store recorded."""
    import h5py

    with zipfile.ZipFile(path) as content, content.open(_WEIGHTS) as file:
        arrays = _arrays(h5py.File(file))
    state = [array for name, (_, array) in arrays.items() if name.startswith(_OPTIMIZER)]
    several = [array for array in state if array is not None and array.size > 1]
    floats = [_Values(array) for array in several if array.dtype.kind in "fV"]
    return len(floats) < len(several) or not digests.issuperset(Weights.digests(floats))


class _Values:
    """An array with the methods by which digests read variables."""

    trainable = False

    def __init__(self, values: np.ndarray) -> None:
        self._values = values

    def numpy(self) -> np.ndarray:
        return self._values

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.array(self._values, dtype=dtype)


def constants_of(config: Any, layer: str = "the model") -> Iterator[tuple[str, str]]:
    """Yields layers whose configuration has numbers or texts beyond shapes, names and rates."""
    if "class_name" in config and isinstance(config.get("config"), dict):
        layer = config["config"].get("name") or config.get("name") or layer
        layer = layer if isinstance(layer, str) else "a layer"
    module = str(config.get("module"))
    for name, value in config.items():
        yield from _constants_in(name, value, layer, module)


def _constants_in(name: str, value: Any, layer: str, module: str) -> Iterator[tuple[str, str]]:
    if name == _ASIDE[0] or value is None or isinstance(value, bool):
        return
    if isinstance(value, dict) and name in _NAMES:
        for part in value.values():
            yield from _constants_in(name, part, layer, module)
    elif isinstance(value, dict):
        inner = {"module": module, **value} if name == "config" else value
        yield from constants_of(inner, layer)
    elif isinstance(value, list) and any(isinstance(part, (dict, list)) for part in value):
        for part in value:
            yield from _constants_in(name, part, layer, module)
    elif not _is_structure(name, value, module):
        yield layer, name


def _is_structure(name: str, value: Any, module: str) -> bool:
    """Returns whether a value is a shape, a rate or a name, which carry little."""
    if isinstance(value, list):
        if all(isinstance(part, str) for part in value):
            return not value or bool(_TEXTS.fullmatch(name))
        is_short = len(value) <= _MOST_NUMBERS
        return is_short and all(_is_structure(name, part, module) for part in value)
    if value is None or isinstance(value, bool):
        return True
    if isinstance(value, str):
        return len(value) <= _LONGEST_TEXT
    if isinstance(value, int) and _SHAPES.fullmatch(name):
        return abs(value) <= _LARGEST
    is_initial = "initializers" in module or "regularizers" in module
    is_optimizer = ".optimizers" in module
    is_rate = (
        _RATES.fullmatch(name) is not None
        or (is_initial and _INITIAL.fullmatch(name) is not None)
        or (is_optimizer and name == "learning_rate")
    )
    # Keras writes single precision.
    return is_rate and np.float32(f"{value:.{_DIGITS}g}") == np.float32(value)


def check_layers(
    found: Findings,
    path: pathlib.Path,
    model: Any,
    config: dict[str, Any],
    assets: list[str],
    stores: Stores,
) -> None:
    """Compares weights with those in the stores; names layers that they don't know.

    If no layer has receipts, the layers without them count as unknown. Constant weights, such as
    those of a head that is all noise, need no record.
    """
    unknown: list[str] = []
    public: list[str] = []
    any_recorded = False
    listed_only: list[str] = []
    whole_numbers: list[str] = []
    for layer in Weights.layers_of(model):
        own = Weights.own(layer)
        has_receipts = bool(own and public_input(layer).receipts)
        digests = Weights.digests(own)
        history = LayerHistory.of(layer)
        if history is not None and (history.digests or set()) - {*digests, *stores.digests}:
            listed_only.append(layer.name)
        if not stores.digests.issuperset(TrainedModel.integer_digests(own)):
            whole_numbers.append(layer.name)
        if not stores.digests.issuperset(digests):
            (unknown if has_receipts else public).append(layer.name)
        elif has_receipts:
            any_recorded = True
    if not any_recorded and not unknown:
        unknown, public = public, []
    if whole_numbers:
        found.not_checked.append(f"the whole numbers of {listed(whole_numbers)}")
    if listed_only:
        found.not_checked.append(f"digests of earlier weights of {listed(listed_only)}")
    if unknown:
        found.problems.append(f"the store has no record of the weights of {listed(unknown)}")
    facts = ModelFacts.of_file(path)
    if facts and facts.digest() not in stores.digests:
        found.not_checked.append(f"the names in the model's file ({listed(sorted(facts))})")
    # A store knows an exported model as a whole, with its public layers.
    if TrainedModel(model).digest() in stores.digests:
        return
    if public:
        found.not_checked.append(f"the weights of {listed(public)}, public by assumption")
    found.not_checked += [
        f"the constants {place}, public by assumption" for place in _constants(config, assets)
    ]


def _constants(config: dict[str, Any], assets: list[str]) -> Iterator[str]:
    """Yields where a model has constants, which no store records: in files, and of layers."""
    yield from (f"in {brief(name)}" for name in assets)
    names_of: dict[str, set[str]] = {}
    for layer, name in constants_of(config):
        names_of.setdefault(layer, set()).add(name)
    yield from (f"of {brief(layer)} ({listed(sorted(names))})" for layer, names in names_of.items())
