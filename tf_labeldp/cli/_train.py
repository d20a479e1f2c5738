"""``tf-labeldp train``: a table, or images and a table of their labels, in; a Keras model out."""

from __future__ import annotations

import argparse
import pathlib
from typing import Any

import numpy as np
import pyarrow as pa
from pyarrow import csv, parquet, types

from tf_labeldp.accounting import BudgetExceededError, PrivacyBudget
from tf_labeldp.accounting._budget import default_delta
from tf_labeldp.cli import _tables
from tf_labeldp.cli._console import CommandError, load_tensorflow, say
from tf_labeldp.vault import LabelStoreError, PrivateLabels
from tf_labeldp.vault._store import budget_for_store

MODEL_FILE, STATEMENT_FILE, REPORT_FILE = "model.keras", "privacy.json", "report.txt"
_KEY = "train"


def run(args: argparse.Namespace) -> int:
    """Trains and writes the model, its statement and a report; returns the exit code."""
    if args.output.exists() and (not args.output.is_dir() or any(args.output.iterdir())):
        raise CommandError(f"--output {args.output} is there and not empty; give a new folder")
    table = _read(args.input)
    labels = _labels(_column(table, args.label, "--label"), args)
    load_tensorflow()
    features = _images(table, args) if args.images is not None else _columns(table, args)
    try:
        model = _fitted(features, labels, args)
    except (BudgetExceededError, LabelStoreError, TypeError, ValueError) as error:
        raise CommandError(" ".join(str(error).split())) from None  # they show no label
    report = [str(model.choice_), str(model.guarantee())]
    if args.evaluate is not None:
        report.insert(1, f"On a tenth of the rows, held out: {model.evaluation_}")
    report.append(
        f"The model: import tf_labeldp.keras_layers; keras.models.load_model("
        f"{str(args.output / MODEL_FILE)!r})"
    )
    args.output.mkdir(parents=True, exist_ok=True)
    model.to_keras().save(args.output / MODEL_FILE)
    (args.output / STATEMENT_FILE).write_text(model.guarantee().to_json() + "\n", encoding="utf-8")
    text = "\n\n".join(report)
    (args.output / REPORT_FILE).write_text(text + "\n", encoding="utf-8")
    say(text)
    return 0


def _fitted(features: Any, labels: np.ndarray, args: argparse.Namespace) -> Any:
    """Returns the fitted front door."""
    from tf_labeldp.front_door import PrivateClassifier, PrivateRegressor

    delta = default_delta(labels.size) if args.delta is None else args.delta
    kind: dict[str, Any] = {"num_classes": args.num_classes, "classes": args.classes}
    if args.low is not None:
        kind = {"low": args.low, "high": args.high, "clip": args.clip}
    budget = PrivacyBudget(max(args.epsilon, args.evaluate or 0.0), delta)
    vault = PrivateLabels(
        labels,
        **kind,
        budget=budget_for_store(args.store, budget),
        store=args.store,
        insecure_seed=args.insecure_seed,
    )
    asked = {"budget_for_evaluation": args.evaluate, "key": _KEY}
    if args.low is None:
        return PrivateClassifier(args.epsilon, delta, **asked).fit(features, vault)
    loss = args.loss or "squared_error"
    return PrivateRegressor(args.epsilon, delta, loss=loss, **asked).fit(features, vault)


def _read(path: pathlib.Path) -> Any:
    """Returns a table; Arrow's own messages quote cells, and are kept back."""
    kind = _tables.format_of(path, "the input")
    try:
        found = parquet.read_table(path) if kind == "parquet" else csv.read_csv(path)
    except OSError as error:
        raise CommandError(f"the input {path} cannot be read ({error.strerror})") from None
    except pa.ArrowException:
        raise CommandError(
            f"the input {path} is no {kind} table that can be read; check that each row has a cell "
            "for each column of the header"
        ) from None
    if not found.num_rows:
        raise _tables.no_rows(path)
    return found


def _column(table: Any, name: str, option: str) -> Any:
    """Returns a column in one piece."""
    if table.column_names.count(name) != 1:
        raise CommandError(
            f"{option} {name}: the table has {table.column_names.count(name)} columns of this "
            f"name; it has {', '.join(table.column_names[:20])}"
        )
    return table.column(name).combine_chunks()


def _labels(column: Any, args: argparse.Namespace) -> np.ndarray:
    """Returns the labels as the vault takes them; errors show none."""
    if column.null_count:
        raise CommandError(f"{column.null_count} labels are missing; {_tables.FILL}")
    kind = pa.string() if args.classes else pa.int64() if args.num_classes else pa.float64()
    try:
        return column.cast(kind).to_numpy(zero_copy_only=False)
    except pa.ArrowException:
        raise CommandError(
            f"--label {args.label}: some cells are no "
            f"{'whole numbers' if args.num_classes else 'numbers'}; "
            + ("give --classes for names" if args.num_classes else "repair the column")
        ) from None


def _columns(table: Any, args: argparse.Namespace) -> dict[str, np.ndarray]:
    """Returns the features: all columns but that of the labels and those that are left out."""
    for name in args.drop or ():
        _column(table, name, "--drop")
    found = {}
    for name in table.column_names:
        if name == args.label or name in (args.drop or ()):
            continue
        column = _column(table, name, "the column")
        if types.is_boolean(column.type) or types.is_integer(column.type):
            column = column.cast(pa.float64())
        if types.is_floating(column.type):
            found[name] = column.to_numpy(zero_copy_only=False)
        elif types.is_string(column.type) or types.is_large_string(column.type):
            found[name] = np.asarray(column.to_pylist(), dtype=object)
        else:
            raise CommandError(
                f"the column {name} holds {column.type}; a feature is a number or a text. Turn it "
                f"into one, or leave it out: --drop {name}"
            )
    if not found:
        raise CommandError("the table has no columns of features beside the labels")
    return found


def _images(table: Any, args: argparse.Namespace) -> np.ndarray:
    """Returns the images that a column of the table names, ``uint8`` (n, h, w, c)."""
    import tensorflow as tf

    names = _column(table, args.file, "--file").cast(pa.string()).to_pylist()
    found: list[np.ndarray] = []
    for name in names:
        path = args.images / str(name)
        try:
            image = tf.io.decode_image(path.read_bytes(), expand_animations=False).numpy()
        except OSError as error:
            raise CommandError(f"the image {path} cannot be read ({error.strerror})") from None
        except tf.errors.InvalidArgumentError:
            raise CommandError(f"{path} is no image in PNG, JPEG, GIF or BMP") from None
        if found and image.shape != found[0].shape:
            raise CommandError(
                f"the image {path} has shape {image.shape}, the first one {found[0].shape}; bring "
                "all to one size and kind first"
            )
        found.append(image)
    return np.stack(found)
