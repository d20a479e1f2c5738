"""``tf-labeldp predict``: a table of predictions by a model of ``train``, or of ``to_keras``."""

from __future__ import annotations

import argparse
import contextlib
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tf_labeldp._validate import counted
from tf_labeldp.cli import _features, _outputs, _tables, _train
from tf_labeldp.cli._console import CommandError, explained, load_tensorflow, say
from tf_labeldp.cli._forms import Form, TableForms, named_forms
from tf_labeldp.features.tables import symbolic_inputs
from tf_labeldp.vault.files import PlainFile

_BATCH = 1024
_IDS = ("id", "row_id", "row")
_MANY_UNSEEN = 0.1
"""A larger share of cells with new categories is a warning."""
_PLAIN_NUMBER = r"^(?:0|-?[1-9]\d{0,17})$"
"""A cell that comes back as it is from a column of whole numbers."""
_ROW = "row"
"""The column of row numbers in an output without ids."""


def run_predict(args: argparse.Namespace) -> int:
    kind = _tables.format_of(args.output, "--output")
    if args.output.exists() and not args.overwrite:
        raise CommandError(
            f"{args.output} exists; give another --output, or --overwrite to replace it"
        )
    path = args.model / "model.keras" if args.model.is_dir() else args.model
    if not path.exists():
        raise CommandError(f"there is no model {path}; give the output of tf-labeldp train")
    source = _tables.open_table(args.input)
    load_tensorflow()
    from tf_labeldp.vault.model_history import ModelFacts

    model, promise = _model(path)
    with explained(Exception):
        facts = ModelFacts.of_file(path)
    needed = _inputs_of(model)
    table = source.whole()
    of_model, decimal = TableForms.of_json(facts.get("cells", {}))
    ids = _ids(table, args, of_model)
    used = {name: form for name, form in of_model.items() if form.kind != "id"}
    if "cells" in facts:  # Of other models it is not known which numbers were dates.
        plain = [name for name, tensor in needed.items() if tensor.dtype != "string"]
        used = {**dict.fromkeys(plain, Form("number", unit="")), **used}
    used = {name: form for name, form in used.items() if name in table.column_names}
    forms = TableForms(
        table, {**used, **named_forms(args.types)}, source.dialect.delimiter, decimal
    )
    inputs = _inputs(model, needed, facts, forms, ids, args)
    source.decimal = forms.decimal
    for remark in (*source.remarks, *forms.remarks):
        say(f"remark: {remark}", error=True)
    outputs = np.asarray(model.predict(inputs, batch_size=_BATCH, verbose=0))
    columns = _predictions(outputs.reshape(len(outputs), -1), facts)
    if shared := {*ids} & {*columns}:
        raise CommandError(
            f"--id {min(shared)}: the predictions have a column of this name; rename that of the "
            "table"
        )
    unseen = _unseen(model, facts.get("columns") or (), forms)
    rows = {name: _id_column(name, forms, kind) for name in ids} or {
        _ROW: pa.array(np.arange(len(outputs)))
    }
    _write(args.output, kind, pa.table({**rows, **columns}), source)
    if not facts:
        note = "remark: the model's file names no classes; its outputs are numbered"
        say(note, error=True)
    for line, is_warning in unseen:
        say(f"warning: {line}" if is_warning else line, error=is_warning)
    say(promise)
    say(f"wrote {counted(len(outputs), 'row')} to {args.output}")
    return 0


def _model(path: pathlib.Path) -> tuple[Any, str]:
    """Returns a model, and what is known of the labels behind it."""
    from tf_labeldp.accounting import public_input
    from tf_labeldp.vault import guarantee, load_model

    unknown = "No promise: the model's file {}, so what its weights were made of is not known"
    try:
        model = load_model(path)  # Its optimizer shows training without receipts.
    except Exception:
        # Keras raises errors of any type for files that it did not write, and they quote no cell.
        with explained(Exception):
            return load_model(path, compile=False), unknown.format("cannot be loaded as compiled")
    if not public_input(model).receipts:
        return model, unknown.format("has no receipts")
    return model, f"The promise of the model, and of these predictions: {guarantee(model).headline}"


def _inputs_of(model: Any) -> dict[str, Any]:
    """Returns the model's inputs by column, or by their own names."""
    structure = symbolic_inputs(model)
    if isinstance(structure, Mapping):
        return dict(structure)
    return {tensor.name: tensor for tensor in model.inputs}


def _ids(table: Any, args: argparse.Namespace, forms: Mapping[str, Form]) -> list[str]:
    """Returns the columns to copy: those of --id, or the ids of the training, or one by name."""
    trained = [name for name, form in forms.items() if form.kind == "id"]
    named = [name for name in table.column_names if name.lower() in _IDS][:1]
    names = args.id or [name for name in trained if name in table.column_names] or named
    for name in names:
        _features.column_of(table, name, "--id")
    return list(dict.fromkeys(names))


def _id_column(name: str, forms: TableForms, kind: str) -> Any:
    """Returns a column to copy; of CSV as the text it is, or as equal whole numbers in Parquet."""
    column = forms.table.column(name)
    if kind != "parquet" or not forms.is_of_text or name in forms.named:
        return column
    are_plain = pc.all(pc.match_substring_regex(column, _PLAIN_NUMBER)).as_py()
    return column.cast(pa.int64()) if are_plain else column


def _inputs(
    model: Any,
    needed: Mapping[str, Any],
    facts: Mapping[str, Any],
    forms: TableForms,
    ids: Sequence[str],
    args: argparse.Namespace,
) -> Any:
    """Returns what the model takes: a dict of columns (n, 1), rows (n, p), or images."""
    table = forms.table
    [*tensors] = needed.values()
    is_image = len(tensors) == 1 and len(tensors[0].shape) == 4
    if is_image != (args.images is not None):
        raise CommandError(
            "the model takes images; give --images DIR and --file NAME"
            if is_image
            else "the model takes columns; leave out --images and --file"
        )
    if is_image:
        return _train.images_of(table, args)
    names = list(needed)
    if len(tensors) == 1 and not isinstance(symbolic_inputs(model), Mapping):
        names = facts.get("columns") or [name for name in table.column_names if name not in ids]
    if missing := [name for name in names if name not in table.column_names]:
        raise CommandError(
            f"the table lacks {counted(len(missing), 'column')} that the model takes: "
            f"{', '.join(missing)}; add them"
        )
    from tf_labeldp.features import to_inputs

    for name in names:
        _features.column_of(table, name, "the column")
    texts = [name for name in names if name in needed and needed[name].dtype == "string"]
    read = forms.read(names, numbers=[name for name in names if name not in texts], texts=texts)
    with explained(TypeError, ValueError):
        return to_inputs(read.select(names), model)


def _unseen(model: Any, columns: Sequence[str], forms: TableForms) -> list[tuple[str, bool]]:
    """Returns lines on the shares of cells that the model did not see in training.

    Each is with whether it is a warning. Of a column whose categories are hashed, the model does
    not know them.
    """
    found = []
    for name, words in _vocabularies(model, columns).items():
        share, is_near = forms.cells(name).share_outside(words)
        if share:
            near = "; some differ by blanks around them or by capitals alone" if is_near else ""
            line = (
                f"{name}: {share:.1%} of the cells have a category that is new to the model{near}"
            )
            found.append((line, share > _MANY_UNSEEN))
    return found


def _vocabularies(model: Any, columns: Sequence[str]) -> dict[str, set[str]]:
    """Returns the texts that a model knows, by column; none of a column that is hashed."""
    import keras

    found: dict[str, set[str]] = {}
    hashed = set()
    if symbolic_inputs(model) is None:
        return found
    for part in model.layers:
        if isinstance(part, keras.Model):
            found |= _vocabularies(part, columns)
    for part in model.layers if len(model.inputs) == len(columns) else ():
        if isinstance(part, keras.layers.StringLookup | keras.layers.Hashing):
            places = [place for place, each in enumerate(model.inputs) if each is part.input]
            for name in (columns[place] for place in places):
                if isinstance(part, keras.layers.StringLookup):
                    found.setdefault(name, set()).update(part.get_vocabulary())
                elif part.num_bins > 1:  # One bin is the layer of a column without categories.
                    hashed.add(name)
    return {name: words for name, words in found.items() if name not in hashed}


def _predictions(outputs: np.ndarray, facts: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the columns of the output: predictions, and probabilities of classes by name."""
    classes = facts.get("classes")
    if "range" in facts or (classes is None and outputs.shape[1] == 1):
        return {"prediction": pa.array(outputs[:, 0].astype(np.float64))}
    are_probabilities = np.allclose(outputs.sum(axis=1), 1.0, atol=1e-3) and outputs.min() >= 0.0
    if classes is None and not are_probabilities:
        return {f"output_{number}": pa.array(each) for number, each in enumerate(outputs.T)}
    names = list(range(outputs.shape[1])) if classes is None else list(classes)
    likeliest = pa.array(names).take(pa.array(outputs.argmax(axis=1)))
    columns = {
        f"probability_{name}": pa.array(each) for name, each in zip(names, outputs.T, strict=True)
    }
    return {"prediction": likeliest, **columns}


def _write(path: pathlib.Path, kind: str, table: Any, source: _tables.Table) -> None:
    try:
        with (
            PlainFile(path).replaced() as staged,
            pa.output_stream(str(staged), compression="gzip" if kind == "csv.gz" else None) as file,
            contextlib.closing(_outputs.table_writer(file, kind, table.schema, source)) as writer,
        ):
            writer.write_table(table)
    except OSError as error:
        raise CommandError(
            f"cannot write --output {path} ({error.strerror}); make room or give another place"
        ) from None
