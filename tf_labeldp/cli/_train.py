"""``tf-labeldp train``: a Keras model from a table, or from images and a table of their labels."""

from __future__ import annotations

import argparse
import contextlib
import os
import pathlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tf_labeldp import dossier
from tf_labeldp._progress import for_terminal
from tf_labeldp.accounting import BudgetExceededError, PrivacyBudget
from tf_labeldp.cli import _console, _features, _label_columns, _outputs, _tables
from tf_labeldp.cli._cells import MISSING
from tf_labeldp.cli._console import (
    CommandError,
    explained,
    in_options,
    load_tensorflow,
    say,
    text_of,
)
from tf_labeldp.cli._forms import TableForms, is_text, named_forms
from tf_labeldp.vault import Classes, LabelKind, LabelStoreError, Numbers, PrivateLabels
from tf_labeldp.vault.files import PlainFile
from tf_labeldp.vault.ledger import Ledger
from tf_labeldp.vault.records import DrawSettingsError

_OTHER_SETTINGS = (
    "give the settings and columns of that run, or a new --store (publishing from both costs the "
    "sum of their epsilons)"
)


def run_train(args: argparse.Namespace) -> int:
    _check_metric(args)
    _check_output(args)
    source = _tables.open_table(args.input)
    table = source.whole()
    column_of_labels = _features.column_of(table, args.label, "--label")
    forms = TableForms(table, named_forms(args.types), source.dialect.delimiter)
    if args.images is None:
        index = _features.index_columns(table)
        ids = [name for name, form in forms.named.items() if form.kind == "id"]
        names = _features.chosen_columns(table, args, [*index, *ids])
        table = forms.read(names, None if args.low is None else args.label)
        features: Any = _features.features_of(table, names)
        columns = _features.described(table, features, args.label)
        if unused := [name for name in index if name not in names]:
            forms.remarks.append(_features.without_index(unused))
    else:
        columns = f"images of {args.images}, named by the column {args.file}"
    # The card is public, and has no line on the labels.
    lines = [columns, *forms.remarks]
    labels = _labels(column_of_labels, forms, args)
    source.decimal = forms.decimal
    # Before the release, so that a wrong column can be left out.
    for text in (*source.remarks, *forms.remarks):
        say(f"remark: {text}", error=True)
    say(columns, error=True)
    load_tensorflow()
    if args.images is not None:
        features = images_of(table, args)
    delta = PrivacyBudget.default_delta(labels.size) if args.delta is None else args.delta
    with _refusals(args):
        vault = _vault(labels, args, delta)
        # Before the release, which a model that cannot be saved would waste.
        with _output(args.output):
            model = _estimator(args, delta).fit(features, vault)
            say(*_write(model, args, lines, forms.to_json()))
    return 0


def _write(
    model: Any, args: argparse.Namespace, lines: list[str], cells: dict[str, Any]
) -> list[str]:
    """Writes the model, with the forms of its columns' cells, and its card.

    Returns:
        The choice, the score and the statement, for stdout; columns and warnings are on stderr.
    """
    folder: pathlib.Path = args.output
    warnings = [f"Warning: {for_terminal(text).removesuffix('.')}." for text in _console.warned]
    lines = [f"{text[0].upper()}{for_terminal(text[1:])}." for text in lines]
    stated = dossier.save(model, folder, data="\n\n".join([*lines, *warnings]), cells=cells)
    evaluation = []
    if args.budget_for_evaluation:
        evaluation = [f"On a tenth of the rows, held out: {model.evaluation_}"]
    parts = [
        model.choice_.text(in_options),
        *evaluation,
        str(stated),
        f"The model: tf-labeldp predict {for_terminal(folder)} TABLE, or in Python "
        f"tf_labeldp.load_model({str(folder / 'model.keras')!r})",
    ]
    first, *others = (part.splitlines() for part in parts)
    return [*first, *(line for part in others for line in ("", *part))]


def _check_metric(args: argparse.Namespace) -> None:
    if args.evaluation_metric is None:
        return
    with explained(ValueError):
        _kind(args).check_metric(args.evaluation_metric, of_predictions=True)


def _kind(args: argparse.Namespace) -> LabelKind:
    if args.low is not None:
        return Numbers(args.low, args.high, clip=bool(args.clip))
    return Classes(args.classes or args.num_classes)


def _check_output(args: argparse.Namespace) -> None:
    folder, store = args.output, args.store
    if store is not None:
        _outputs.check_separate(folder, folder, store, below="warning")
    if not folder.exists():
        return
    kept = None if store is None else pathlib.Path(os.path.realpath(store))
    names = list(folder.iterdir()) if folder.is_dir() else [folder]
    real = [pathlib.Path(os.path.realpath(path)) for path in names]
    others = [path for path in real if kept is None or not kept.is_relative_to(path)]
    if others and not (folder / PlainFile.UNFINISHED).exists():
        raise CommandError(f"--output {folder} exists and is not empty; give a new folder")


@contextlib.contextmanager
def _output(folder: pathlib.Path) -> Iterator[None]:
    """Makes the folder, marked until its files are complete: a killed run may be started again."""
    is_new = not folder.exists()
    folder.mkdir(parents=True, exist_ok=True)
    mark = folder / PlainFile.UNFINISHED
    PlainFile(mark).write_text("")
    try:
        yield
    except Exception:
        if not (folder / "model.keras").exists():
            mark.unlink()
            with contextlib.suppress(OSError):  # The store may be in it.
                folder.rmdir() if is_new else None
        raise
    mark.unlink()


@contextlib.contextmanager
def _refusals(args: argparse.Namespace) -> Iterator[None]:
    """Turns errors of the vault and of the fit, which quote no label, into the command's."""
    try:
        with explained(OSError, TypeError, ValueError):
            yield
    except DrawSettingsError:
        raise CommandError(
            f"the store {args.store} has a release of these labels made with other settings or "
            f"columns. Nothing was drawn: {_OTHER_SETTINGS}"
        ) from None
    except BudgetExceededError as error:
        raise CommandError(
            f"{text_of(error)} For the store of an earlier run, {_OTHER_SETTINGS}"
        ) from None
    except LabelStoreError as error:
        raise CommandError(text_of(error)) from None


def _vault(labels: np.ndarray, args: argparse.Namespace, delta: float) -> PrivateLabels:
    budget = PrivacyBudget(max(args.epsilon, args.budget_for_evaluation or 0.0), delta)
    return PrivateLabels(
        labels,
        _kind(args),
        budget=Ledger.budget_for(args.store, budget),
        store=args.store,
        insecure_seed=args.insecure_seed,
    )


def _estimator(args: argparse.Namespace, delta: float) -> Any:
    from tf_labeldp.front_door import PrivateClassifier, PrivateRegressor

    options = {
        "budget_for_evaluation": args.budget_for_evaluation,
        "evaluation_metric": args.evaluation_metric,
        "method": args.method,
        "key": "train",
    }
    if args.low is None:
        return PrivateClassifier(args.epsilon, delta, **options)
    return PrivateRegressor(args.epsilon, delta, loss=args.loss or "squared_error", **options)


def _labels(column: Any, forms: TableForms, args: argparse.Namespace) -> np.ndarray:
    row = None
    if args.classes:
        words = pa.array([word for word in MISSING if word not in args.classes])
        column = column.cast(pa.string())
        column = pc.if_else(pc.is_in(column, words), None, column)
    elif is_text(column.type):
        column, row = forms.number_label(args.label)
        column = column.combine_chunks()
    if column.null_count:
        missing = f"{column.null_count} of {len(column)} labels are missing"
        raise CommandError(f"--label {args.label}: {missing}; {_tables.FILL}")
    kind = pa.string() if args.classes else pa.int64() if args.num_classes else pa.float64()
    try:
        if row is not None:
            raise pa.ArrowInvalid
        column = column.cast(kind)
    except pa.ArrowException:
        raise CommandError(
            f"--label {args.label}: some cells are not "
            + ("whole numbers; give --classes for names" if args.num_classes else "numbers")
        ) from None
    if args.low is None:
        classes = Classes(args.classes or args.num_classes)
        return classes.decode(_label_columns.class_codes(column, classes))
    return _label_columns.checked_numbers(column.to_numpy(zero_copy_only=False), args)


def images_of(table: Any, args: argparse.Namespace) -> np.ndarray:
    """Returns the images (n, h, w, c) that the column --file names, from the folder --images."""
    import tensorflow as tf

    images: list[np.ndarray] = []
    names = _features.column_of(table, args.file, "--file").cast(pa.string()).to_pylist()
    for name in names:
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
