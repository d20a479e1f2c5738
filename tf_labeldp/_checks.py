"""One table of checks for all doors, of inputs that are taken and give a wrong model.

A door calls ``run`` once with what it has read. A check looks at public facts, at noisy labels, or
at a released model, never at a label. What is certainly wrong is refused, before anything is
charged where it is known by then; what is probably wrong is a warning.
"""

from __future__ import annotations

import dataclasses
import re
import shlex
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from tf_labeldp import _validate
from tf_labeldp._columns import Column
from tf_labeldp._progress import Argument, Message

Columns = Mapping[Any, np.ndarray]
"""Columns (n,) by name, or by place in an array: numbers, NaN where missing, or texts."""

Ends = tuple[float, float, bool]
"""The least and the largest number, and whether all are whole."""

_FEWEST_ROWS = 20
"""Fewer rows may differ in every column."""
_UNIQUE = 0.95
"""Share of different values from which a column of text or whole numbers looks like an id."""
_DENSE = 4
"""Numbers per row from which amounts come at least: of fewer, more than a tenth would be equal."""
_LONG_ID, _UNEVEN = 1e5, 1.5
"""The least id of random digits, and how uneven ids may be: by chance, one column in fifty is."""
_VANISHING = 10.0
"""How many times farther than the fences a number lies next to which the others vanish."""
_SHOWN = 40
"""Characters of a cell in a message."""
_BINS, _ROWS_PER_VALUE = 20, 20
"""Bins of a column of numbers, and rows per category, that are enough for means."""
_SHARE_OF_CERTAINTY = 0.85
"""How far one column goes from the class shares to certainty, from which it may hold the label. Of
two equal classes, a column that is right for 93 % of the labels goes this far."""
_SHARE_OF_VARIANCE = 0.98
"""The same for numbers: twenty bins of a column that equals them explain 99.75 %."""
_CLEAR_SPREAD = 0.2
"""Standard deviation of predictions, in ranges of the labels, that is no mere trend; evenly spread
labels have 0.29."""
_CLEAR_ERRORS = 5.0
"""Standard errors by which noisy labels must differ from their shares, to say that they follow a
column: of thousands of columns without labels, hardly one comes so far by chance."""
_SMALLEST_SIDE = 8
"""Pixels: other inputs with a shorter side are no images."""
_BRIGHT = 50.0
"""Images of 0 to 255 have a pixel above this, also dark ones."""
_NO_PROBABILITIES = ("relu", "leaky_relu", "elu", "selu", "gelu", "silu", "tanh", "softsign")
"""Activations of Keras that are negative or zero over half of their arguments."""
_CHANNEL_ERROR = 1e-4
"""Rounding of a channel's probabilities, in single precision and in a file of a few digits."""
_NUMBER = re.compile(r"\s*([-+]?(\d+([.,]\d*)?|[.,]\d+)([eE][-+]?\d+)?|[-+]?(inf|nan))\s*", re.I)
"""A cell with a number, with a decimal point or comma."""


@dataclasses.dataclass(frozen=True)
class Check:
    """A line of the table.

    Attributes:
        name: the mistake.
        reads: what the check looks at, which is what a door gives to ``run``.
        severity: "refuse" or "warn".
        find: from what was read to a message per mistake.
        error: what a refusal raises.
    """

    name: str
    reads: str
    severity: str
    find: Callable[..., Iterable[str]] = dataclasses.field(repr=False)
    error: type[Exception] = ValueError


def run(reads: str, *facts: Any) -> None:
    """Makes all checks that look at these facts: raises an error, or warns."""
    for check in CHECKS:
        if check.reads == reads:
            for text in check.find(*facts):
                if check.severity == "refuse":
                    raise check.error(text)
                _validate.warn(text)


def _without(name: Any) -> Argument:
    """Returns the advice to leave out a column, which is an option of the command."""
    is_place = isinstance(name, (int, np.integer))
    python = f"np.delete(X, {name}, axis=1)" if is_place else f"X.drop(columns={name!r})"
    return Argument("drop", shlex.quote(str(name)), python)


def _ids(columns: Columns, step: int) -> Iterator[str]:
    for name, column in columns.items():
        is_text = column.dtype.kind not in "biuf"
        if column.size < _FEWEST_ROWS or (is_text and _numbers_among(column) is not None):
            continue
        present = column[column != ""] if is_text else column
        distinct = np.unique(present).size if is_text else _number_of_ids(column, step)
        if present.size >= _FEWEST_ROWS and distinct >= _UNIQUE * present.size:
            yield Message.of(
                f"the column {name} has {distinct:,} different values in {present.size:,} rows, "
                "like an id, from which nothing can be learnt; leave it out: ",
                _without(name),
            )


def _number_of_ids(column: np.ndarray, step: int = 1) -> int:
    """Returns how many ids are in a column of numbers, 0 unless they are like ids.

    Amounts, counts, dates and times differ in nearly each row, too. Ids are rows that are
    numbered, or lie closer than as many different amounts do, or have all their digits at random.
    """
    if column.dtype.kind == "b":
        return 0
    # Dates have become whole numbers too, and do not start at 0 or 1.
    if column[0] in (0, 1) and np.all(np.diff(column) == step):
        return int(column.size)
    low, high = float(column.min()), float(column.max())
    is_dense = column.dtype.kind != "f" and high - low < _DENSE * column.size
    digits = np.floor(np.log10(low)) if low >= _LONG_ID and np.isfinite(high) else np.inf
    if not is_dense and not high < 10.0 ** (digits + 1.0) < np.inf:
        return 0
    values = np.unique(column).astype(np.float64)
    expected = (values / 10.0**digits - 1.0) / 9.0
    error = np.abs(expected - np.linspace(0.0, 1.0, values.size)).max()
    is_random = error < _UNEVEN / np.sqrt(values.size) and bool(np.all(values == np.round(values)))
    months, years = values % 100, values // 100
    are_dates = 1800 <= low and high < 2200  # years
    for month, year in ((months, years), (years % 100, years // 100)):
        are_dates |= bool(np.all((year >= 1800) & (year < 2200) & (1 <= month) & (month <= 12)))
    return int(values.size) if is_random or (is_dense and not are_dates) else 0


def _outliers(columns: Columns) -> Iterator[str]:
    """Finds numbers in columns that no encoder winsorizes: rows are scaled by them."""
    for name, column in columns.items():
        if column.dtype.kind not in "iuf":
            continue
        low, high = Column.fences(column[np.isfinite(column)].astype(np.float64))
        middle, reach = (low + high) / 2.0, (high - low) / 2.0
        far = np.abs(column - middle) > _VANISHING * reach
        if far.any():
            number = _validate.counted(int(far.sum()), "number")
            yield (
                f"the column {name} has {number} far from all others, such as "
                f"{column[far][0]:g}, next to which the others vanish. Clip them, or give "
                "encoder=tf_labeldp.features.RandomFourierFeatures().fit(X), which does."
            )


def _texts(columns: Columns, step: int) -> Iterator[str]:
    for name, column in columns.items():
        found = None if column.dtype.kind in "biuf" else _numbers_among(column)
        if found is None:
            continue
        numbers, present, first = found
        text = f"the column {name} is text: {numbers:,} of {present:,} cells are numbers"
        if first is None:
            convert = Argument("types", shlex.quote(f"{name}=number"), f"X[{name!r}].astype(float)")
            parts = (f"{text}. Unless they are codes, convert it: ", convert)
        else:
            row = f"{first * step + 2:,} (the header is row 1)"
            parts = (
                f"{text}, the first other one is {str(column[first])[:_SHOWN]!r} in row {row}. "
                "Empty or correct such cells to use its numbers, or leave it out: ",
                _without(name),
            )
        yield Message.of(*parts)


def _numbers_among(column: np.ndarray) -> tuple[int, int, int | None] | None:
    """Returns how many texts are numbers, how many there are, and the row of the first other.

    It is None unless most are numbers, and for codes of categories and ids.
    """
    texts, codes, counts = np.unique(column.astype(str), return_inverse=True, return_counts=True)
    is_present = np.array([bool(text.strip()) for text in texts], bool)
    is_number = np.array([_NUMBER.fullmatch(text) is not None for text in texts], bool)
    numbers, present = int(counts[is_number].sum()), int(counts[is_present].sum())
    others = np.flatnonzero((is_present & ~is_number)[codes.ravel()])
    if 2 * numbers <= present:
        return None
    if others.size:
        return numbers, present, int(others[0])
    are_whole = all(text.isdigit() for text in texts[is_present])
    is_distinct = are_whole and texts[is_present].size >= _UNIQUE * present
    is_id = is_distinct and _are_ids(texts[is_present])
    # Zip codes, and the like, are written with zeros before their digits.
    is_code = are_whole and any(text[0] == "0" != text for text in texts[is_present])
    is_text = is_id or is_code or texts[is_present].size <= _BINS
    return None if is_text else (numbers, present, None)


def _are_ids(texts: np.ndarray) -> bool:
    """Returns whether whole numbers as text are ids; no amount has as many digits as some."""
    numbers = texts.astype(np.float64)
    return bool(numbers.max() >= 2.0**53 or _number_of_ids(numbers.astype(np.int64)))


def _leaks_by_model(columns: Columns, outputs: np.ndarray, ends: Any) -> Iterator[str]:
    """Finds columns that alone predict nearly all labels, by a released model.

    Averages of its predictions over the rows with one value of a column estimate how well the
    column alone would do, noise corrected: probabilities (n, K) near certainty, or numbers (n,)
    between ``ends`` that nothing else changes.
    """
    is_leak = _share_of_certainty if ends is None else _share_of_variance
    for name, groups in _grouped(columns):
        if is_leak(outputs, groups, ends):
            yield _leak("the released model", name)


def _leaks_by_draw(columns: Columns, noisy: np.ndarray, channel: np.ndarray) -> Iterator[str]:
    """Finds columns that alone predict noisy classes (n,) nearly as well as the true ones do.

    The best guess for each value of a column is learnt on one half of the rows, and counted on the
    other. No column does better than the channel ``P[noisy | true]`` allows.
    """
    rows, number = np.arange(noisy.size), channel.shape[1]
    shares = np.bincount(noisy, minlength=number) / max(1, noisy.size)
    # The class shares are not known here; the least channel is that of any shares.
    most = float(channel.max(axis=1).min())
    need = _SHARE_OF_CERTAINTY * (most - shares.max())
    if need * np.sqrt(noisy.size) < _CLEAR_ERRORS / 2.0:
        return
    for name, groups in _grouped(columns):
        right = 0
        for half in (rows % 2 == 0, rows % 2 == 1):
            counts = np.bincount(groups[half] * number + noisy[half], minlength=number)
            counts = np.pad(counts, (0, -counts.size % number)).reshape(-1, number)
            counts = np.pad(counts, ((0, max(0, groups.max() + 1 - len(counts))), (0, 0)))
            right += int((counts.argmax(axis=1)[groups[~half]] == noisy[~half]).sum())
        if right / noisy.size - shares.max() >= need:
            yield _leak("the noisy labels", name)


def _leak(source: str, name: Any) -> Message:
    return Message.of(
        f"by {source}, the column {name} alone predicts nearly all labels. If it is made from the "
        "label, or known only after it, leave it out (training again is another release): ",
        _without(name),
    )


def _grouped(columns: Columns) -> Iterator[tuple[Any, np.ndarray]]:
    """Yields columns with the group (n,) of each row: a category, or a bin of numbers.

    Missing values are one group. Columns with few rows per group are left out.
    """
    for name, column in columns.items():
        if column.dtype.kind in "biuf":
            column = column.astype(np.float64)
            present = column[~np.isnan(column)]
            if not present.size:
                continue
            values = np.unique(present)
            if values.size > _BINS:
                values = np.unique(np.quantile(present, np.linspace(0.0, 1.0, _BINS + 1)[1:-1]))
            found = np.searchsorted(values, column)
            groups = np.where(np.isnan(column), values.size + 1, found)
        else:
            groups = np.unique(column.astype(str), return_inverse=True)[1].ravel()
        if groups.max(initial=0) * _ROWS_PER_VALUE <= groups.size:
            yield name, groups


def _share_of_certainty(probabilities: np.ndarray, groups: np.ndarray, unused: Any) -> bool:
    share = probabilities.mean(axis=0).max()
    sums = [np.bincount(groups, each) for each in probabilities.T]
    right = float(np.max(sums, axis=0).sum()) / groups.size
    return right - share >= _SHARE_OF_CERTAINTY * (1.0 - share)


def _share_of_variance(numbers: np.ndarray, groups: np.ndarray, ends: tuple[float, float]) -> bool:
    means = np.bincount(groups, numbers) / np.maximum(np.bincount(groups), 1)
    spread = float(numbers.std())
    is_clear = spread >= _CLEAR_SPREAD * (ends[1] - ends[0])
    return is_clear and float(means[groups].var()) >= _SHARE_OF_VARIANCE * spread**2


def _outputs(output: Any, takes_logits: bool | None) -> Iterator[str]:
    """Finds a model whose last activation, of a symbolic output, is none for its loss.

    ``takes_logits`` is None for a loss of neither logits nor probabilities.
    """
    if output is None or takes_logits is None:
        return
    name, activation = _ending(output)
    if activation == "linear" and not takes_logits:
        yield (
            f"the model ends in {name!r}, a Dense layer without activation, and the loss takes "
            "probabilities. Give the loss from_logits=True, or end the model in a softmax."
        )
    if activation in _NO_PROBABILITIES and not takes_logits:
        yield (
            f"the model ends in {name!r}, a {activation}, and the loss takes probabilities. End "
            "the model in a softmax, or in a Dense layer without activation and give the loss "
            "from_logits=True."
        )
    if activation in ("softmax", "sigmoid") and takes_logits:
        yield (
            f"the model ends in {name!r}, a {activation}, and the loss takes logits: it would "
            f"apply the {activation} twice. Give the loss from_logits=False, or end the model in a "
            "Dense layer without activation."
        )


def _ending(output: Any) -> tuple[str, str]:
    """Returns the name of an output's layer and of its activation, "" for any other."""
    from keras import activations, layers, models

    last: Any = output._keras_history.operation
    while isinstance(last, models.Sequential) and last.layers:
        last = last.layers[-1]
    if isinstance(last, layers.Softmax):
        return last.name, "softmax"
    names: dict[Any, str] = {getattr(activations, each): each for each in _NO_PROBABILITIES}
    names |= {activations.softmax: "softmax", activations.sigmoid: "sigmoid"}
    if type(last) is layers.Dense:
        names[activations.linear] = "linear"
    has_activation = isinstance(last, (layers.Dense, layers.Activation))
    return last.name, names.get(last.activation, "") if has_activation else ""


def _generators(inputs: Any) -> Iterator[str]:
    # Batches of Keras have a length, which is not that of the rows.
    keras = sys.modules.get("keras")
    batches = () if keras is None else (keras.utils.PyDataset,)
    if isinstance(inputs, (Iterator, *batches)):
        yield (
            "features must be rows that can be read more than once, got a "
            f"{type(inputs).__name__}. Give an array, such as np.stack(list(rows))."
        )


def _channels_first(shape: tuple[int, ...]) -> Iterator[str]:
    """Finds images (n, 1 or 3, height, width), unless Keras is set to them."""
    keras = sys.modules.get("keras")
    if keras is not None and keras.config.image_data_format() == "channels_first":
        return
    is_large = len(shape) == 4 and min(shape[2:]) >= _SMALLEST_SIDE
    if is_large and shape[1] in (1, 3) and shape[3] not in (1, 3, 4):
        yield (
            f"expected images (n, height, width, channels), got shape {shape}, which seems to have "
            "the channels first. Move them: np.moveaxis(images, 1, -1)."
        )


def _other_range(fitted: Ends | None, found: Ends | None) -> Iterator[str]:
    """Finds pixels of 0 to 255 where those of fit were 0 to 1, and the reverse."""
    if fitted is None or found is None or min(fitted[0], found[0]) < 0.0:
        return
    are_units = [ends[1] <= 1.0 for ends in (fitted, found)]
    are_pixels = [_BRIGHT <= ends[1] <= 255.0 for ends in (fitted, found)]
    # Dark images of 0 to 255 have small numbers, too, but whole ones.
    is_darker = are_pixels[0] and are_units[1] and not found[2]
    if is_darker or (are_units[0] and not fitted[2] and are_pixels[1]):
        high = 255 if are_pixels[0] else 1
        yield (
            f"expected pixels of 0 to {high}, as in fit, got {found[0]:g} to {found[1]:g}. Rescale "
            "the images."
        )


def _no_labels(number: int) -> Iterator[str]:
    if not number:
        yield "expected at least one label, got none. Give labels and their rows."


def _other_kind(model: str, is_regressor: bool, kind: Any) -> Iterator[str]:
    if is_regressor != (kind.label_range is not None):
        wanted, other = ("numbers", "Classifier") if is_regressor else ("classes", "Regressor")
        yield f"{model} expected {wanted}, got {kind.describe()}. Use Private{other}."


def _corrected_twice(targets: str, loss: str, *unused: Any) -> Iterator[str]:
    if targets != "values":
        yield (
            f"expected targets='values' for {loss!r}, which passes predictions through the "
            f"channel, got targets={targets!r}, which are corrected already. Give "
            "targets='values', or CategoricalCrossentropy for targets='posterior'."
        )


def _other_channel(targets: str, loss: str, matrix: Any, channel: Any) -> Iterator[str]:
    if channel is None:
        return
    if matrix.shape != channel.shape or np.abs(matrix - channel).max() > _CHANNEL_ERROR:
        is_identity = np.array_equal(matrix, np.eye(len(matrix)))
        got = "the identity, which corrects nothing" if is_identity else "that of another mechanism"
        yield (
            f"expected the channel of this draw in {loss!r}, got {got}. Give the loss "
            "noisy.mechanism.transition_matrix()."
        )


def _signed(targets: str, loss: str, is_for_signed: bool, of_numbers: bool) -> Iterator[str]:
    if targets != "debiased" or is_for_signed:
        return
    if of_numbers:
        yield (
            f"targets='debiased' are right on average alone, which {loss!r} does not take. Give "
            "MeanSquaredError, or targets='posterior'."
        )
    else:
        yield (
            f"targets='debiased' have negative entries, for which {loss!r} is not made. Give "
            "tf_labeldp.keras_layers.LabelWeightedLoss, or targets='posterior'."
        )


def _corrects_true_labels(loss: str, is_corrected: bool) -> Iterator[str]:
    if is_corrected:
        yield (
            f"{loss!r} is for noisy labels, and steps on true labels need no correction. Give a "
            "cross-entropy; for noisy labels take tf_labeldp.fit."
        )


CHECKS = (
    Check("a generator", "inputs", "refuse", _generators, TypeError),
    Check("channels-first images", "pixels", "refuse", _channels_first),
    Check("channels-first inputs of a network", "images", "warn", _channels_first),
    Check("numbers of another range than in fit", "range", "refuse", _other_range),
    Check("no labels", "labels", "refuse", _no_labels),
    Check("classes for numbers, or the reverse", "kind", "refuse", _other_kind),
    Check("numbers as texts", "columns", "warn", _texts),
    Check("a column of ids", "columns", "warn", _ids),
    Check("numbers far from all others", "plain numbers", "warn", _outliers),
    Check("a copy of the label, by a released model", "model", "warn", _leaks_by_model),
    Check("a copy of the label, by noisy labels", "draw", "warn", _leaks_by_draw),
    Check("logits for probabilities, or the reverse", "outputs", "refuse", _outputs),
    Check("targets that are corrected twice", "corrected", "refuse", _corrected_twice),
    Check("a loss for another draw", "corrected", "refuse", _other_channel),
    Check("signed targets in another loss", "targets", "warn", _signed),
    Check("a corrected loss of true labels", "true labels", "warn", _corrects_true_labels),
)
"""All checks. Those that read the same are made in this order."""
