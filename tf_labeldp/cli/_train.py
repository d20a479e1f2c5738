"""``tf-labeldp train``: a Keras model from a table, or from images and a table of their labels."""

from __future__ import annotations

import argparse
import pathlib
from typing import Any

import numpy as np
import pyarrow as pa
from pyarrow import csv, parquet, types

from tf_labeldp.accounting import BudgetExceededError, PrivacyBudget
from tf_labeldp.accounting.budget import default_delta
from tf_labeldp.cli import _tables
from tf_labeldp.cli._console import CommandError, explained, load_tensorflow, say
from tf_labeldp.vault import LabelStoreError, PrivateLabels
from tf_labeldp.vault.store import budget_for_store


def run_train(args: argparse.Namespace) -> int:
    if args.output.exists() and (not args.output.is_dir() or any(args.output.iterdir())):
        raise CommandError(f"--output {args.output} exists and is not empty; give a new folder")
    table = _read(args.input)
    labels = _labels(table, args)
    load_tensorflow()
    features = _columns(table, args) if args.images is None else _images(table, args)
    delta = default_delta(labels.size) if args.delta is None else args.delta
    with explained(BudgetExceededError, LabelStoreError, OSError, TypeError, ValueError):
        vault = _vault(labels, args, delta)
        # Before the release, which a model that cannot be saved would waste.
        args.output.mkdir(parents=True, exist_ok=True)
        model = _estimator(args, delta).fit(features, vault)
    path = args.output / "model.keras"
    text = "\n\n".join(
        [
            str(model.choice_),
            *([f"On a tenth of the rows, held out: {model.evaluation_}"] if args.evaluate else []),
            str(model.guarantee()),
            f"The model: import tf_labeldp.keras_layers; keras.models.load_model({str(path)!r})",
        ]
    )
    model.to_keras().save(path)
    statement = model.guarantee().to_json()
    (args.output / "privacy.json").write_text(f"{statement}\n", encoding="utf-8")
    (args.output / "report.txt").write_text(f"{text}\n", encoding="utf-8")
    say(text)
    return 0


def _vault(labels: np.ndarray, args: argparse.Namespace, delta: float) -> PrivateLabels:
    budget = PrivacyBudget(max(args.epsilon, args.evaluate or 0.0), delta)
    return PrivateLabels(
        labels,
        args.num_classes,
        classes=args.classes,
        low=args.low,
        high=args.high,
        clip=bool(args.clip),
        budget=budget_for_store(args.store, budget),
        store=args.store,
        insecure_seed=args.insecure_seed,
    )


def _estimator(args: argparse.Namespace, delta: float) -> Any:
    from tf_labeldp.front_door import PrivateClassifier, PrivateRegressor

    evaluation = {"budget_for_evaluation": args.evaluate, "evaluation_metric": args.metric}
    options = {**evaluation, "method": args.method, "key": "train"}
    if args.low is None:
        return PrivateClassifier(args.epsilon, delta, **options)
    return PrivateRegressor(args.epsilon, delta, loss=args.loss or "squared_error", **options)


def _read(path: pathlib.Path) -> Any:
    kind = _tables.format_of(path, "the input")
    try:
        table = parquet.read_table(path) if kind == "parquet" else csv.read_csv(path)
    except OSError as error:
        raise CommandError(f"the input {path} cannot be read ({error.strerror})") from None
    except pa.ArrowException:  # Its message quotes cells.
        raise CommandError(
            f"the input {path} cannot be read as a {kind} table; check that each row has a cell "
            "for each column of the header"
        ) from None
    if not table.num_rows:
        raise _tables.no_rows(path)
    return table


def _column(table: Any, name: str, option: str) -> Any:
    if table.column_names.count(name) != 1:
        raise CommandError(
            f"{option} {name}: the table has {table.column_names.count(name)} columns of this "
            f"name; its columns are {', '.join(table.column_names[:20])}"
        )
    return table.column(name).combine_chunks()


def _labels(table: Any, args: argparse.Namespace) -> np.ndarray:
    column = _column(table, args.label, "--label")
    if column.null_count:
        raise CommandError(f"{column.null_count} labels are missing; {_tables.FILL}")
    kind = pa.string() if args.classes else pa.int64() if args.num_classes else pa.float64()
    try:
        return column.cast(kind).to_numpy(zero_copy_only=False)
    except pa.ArrowException:
        raise CommandError(
            f"--label {args.label}: some cells are not "
            + ("whole numbers; give --classes for names" if args.num_classes else "numbers")
        ) from None


def _columns(table: Any, args: argparse.Namespace) -> dict[str, np.ndarray]:
    for name in args.drop:
        _column(table, name, "--drop")
    features = {}
    for name in table.column_names:
        if name == args.label or name in args.drop:
            continue
        column = _column(table, name, "the column")
        if types.is_dictionary(column.type):  # as pandas writes its categories
            column = column.cast(column.type.value_type)
        if types.is_boolean(column.type) or types.is_integer(column.type):
            column = column.cast(pa.float64())
        if types.is_floating(column.type):
            features[name] = column.to_numpy(zero_copy_only=False)
        elif types.is_string(column.type) or types.is_large_string(column.type):
            # All rows of a category share one text.
            encoded = column.dictionary_encode()
            words = np.append(encoded.dictionary.to_numpy(zero_copy_only=False), [None])
            features[name] = words[encoded.indices.fill_null(words.size - 1).to_numpy()]
        else:
            raise CommandError(
                f"the column {name} has type {column.type}, expected numbers or text; convert it, "
                f"or leave it out: --drop {name}"
            )
    if not features:
        raise CommandError("the table has no feature columns; leave out less with --drop")
    return features


def _images(table: Any, args: argparse.Namespace) -> np.ndarray:
    import tensorflow as tf

    images: list[np.ndarray] = []
    for name in _column(table, args.file, "--file").cast(pa.string()).to_pylist():
        path = args.images / str(name)
        try:
            image = tf.io.decode_image(path.read_bytes(), expand_animations=False).numpy()
        except OSError as error:
            raise CommandError(f"the image {path} cannot be read ({error.strerror})") from None
        except tf.errors.InvalidArgumentError:
            raise CommandError(f"{path} is no image; expected PNG, JPEG, GIF or BMP") from None
        if images and image.shape != images[0].shape:
            raise CommandError(
                f"the image {path} has shape {image.shape}, the first one {images[0].shape}; "
                "convert all to one size and number of channels"
            )
        images.append(image)
    return np.stack(images)
