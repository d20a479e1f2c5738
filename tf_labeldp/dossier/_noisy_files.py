"""Noisy labels in files, compared with their statement and with the draws in a store."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from tf_labeldp.accounting import Receipt
from tf_labeldp.dossier._files import (
    Findings,
    Stores,
    brief,
    check_arrays,
    check_json,
    check_names,
    check_statement,
    files_in,
    listed,
    version_of,
)
from tf_labeldp.mechanisms import (
    HistogramMechanism,
    PeerToPeerRandomizedResponse,
    Priors,
    RandomizedResponse,
    RRWithPrior,
)
from tf_labeldp.pate import ConfidentGNMax
from tf_labeldp.vault import Classes, NoisyLabels
from tf_labeldp.vault.files import PlainFile
from tf_labeldp.vault.noisy_labels import NoisyFiles, NoisyStatistic
from tf_labeldp.vault.records import Record

_LAYOUT = {"indent": 2, "ensure_ascii": False}
"""The layout of a statement's JSON."""
_OF_TABLES = (
    *("rows", "files", "sha256", "id_columns", "most_rows_of_one_id", "noisy_label_column"),
    *("task", "num_classes", "epsilon", "outputs", "prior", "label_range", "loss", "total"),
)
"""Fields of the statement of a table, next to those of all noisy labels."""
_PROMISE = ("guarantee", "statement", "made_by")
"""Fields with the promise of every statement, which readers of noisy labels do not need."""
_FACTS = ("most_rows_of_one_id", "outputs", "label_range", "loss", "total")
"""Fields of a table's statement that nothing but the run that wrote it can confirm."""


def paths_of(path: pathlib.Path) -> dict[str, pathlib.Path]:
    """Returns the files of noisy labels by name, also those that should not be there."""
    if path.is_dir():
        return files_in(path)
    return {file.name: file for file in (path, NoisyFiles(path).statement) if file.exists()}


def check_noisy_labels(path: pathlib.Path, stores: Stores, found: Findings) -> NoisyLabels:
    """Checks noisy labels, their files and their statement; raises if they can't be read."""
    noisy, parts = NoisyLabels.load(path), NoisyFiles(path).parts
    if parts[0].path != path:
        # Several draws in folders of their own.
        known = {f"{part.path.name}/{name}" for part in parts for name in part.names}
        check_names(found, files_in(path), known, "file", path.name)
    for part in parts:
        _check_folder(part, stores, found)
    return noisy


def _check_folder(files: NoisyFiles, stores: Stores, found: Findings) -> None:
    noisy, path, statement = files.read(), files.path, files.statement
    text = statement.read_text(encoding="utf-8")
    fields = check_json(found, statement.name, text, _LAYOUT)
    if fields is None:
        return
    own = json.loads(json.dumps(noisy.statement()))
    known = (*own, "classes", files.AS_TEXT, "digest", *(_OF_TABLES if files.is_table else ()))
    check_names(found, fields, known, "field", statement.name)
    if lacking := [name for name in _PROMISE if name not in fields]:
        found.problems.append(f"{statement.name} lacks {listed(lacking)}")
        return
    check_statement(
        found, noisy.guarantee(), fields["guarantee"], fields["statement"], fields["made_by"]
    )
    if version_of(fields["made_by"]) is None:
        found.problems.append(f"{statement.name} was made by {brief(str(fields['made_by']))}")
    compared = ("bias_correction", "of_part", "remarks", "assumptions", "prior_receipts")
    differing = [name for name in compared if fields.get(name) != own[name]]
    # A mechanism may have arguments that are newer than the file.
    config, own_config = (part["mechanism"].get("config", {}) for part in (fields, own))
    if any(own_config.get(name) != value for name, value in config.items()):
        differing.append("mechanism")
    if differing:
        found.problems.append(f"{statement.name} differs from what it says in {listed(differing)}")
    is_recorded = False
    if files.is_table:
        is_recorded = stores.has_seal(fields["digest"])
        _check_tables(files, fields, noisy, found)
    else:
        check_names(found, files_in(path), files.names, "file", path.name)
        check_arrays(found, files.arrays, files.ARRAYS)
    of_draws = Findings()
    _check_draws(noisy, stores, of_draws)
    found.problems += of_draws.problems
    if stores.has_seal(noisy.seal()):
        is_recorded = is_recorded or not files.is_table
    else:
        found.not_checked += of_draws.not_checked
    if stores:
        as_text = bool(fields.get(files.AS_TEXT))
        _check_classes(noisy, stores, found, is_recorded=is_recorded, as_text=as_text)
        if not is_recorded:
            found.not_checked += [f"the remark {brief(remark)!r}" for remark in noisy.remarks]
            found.not_checked += [f"the assumption [{note.code}]" for note in noisy.assumptions]
            facts = [*fields["id_columns"]] if files.is_table else []
            facts += set(_FACTS).intersection(fields)
            if facts:
                found.not_checked.append(
                    f"{listed(facts)} of {statement.name}, which this store did not write"
                )


def _check_tables(
    files: NoisyFiles, fields: dict[str, Any], noisy: NoisyLabels, found: Findings
) -> None:
    path = files.path
    tables, sizes = [path], {path.name: fields["rows"]}
    if path.is_dir():
        sizes = fields["files"]
        tables = [path / name for name in sizes]
        check_names(found, files_in(path), (files.statement.name, *sizes), "file", path.name)
    elif "files" in fields:
        found.problems.append(f"{path.name} is one table, and its statement lists several")
    parts = fields["epsilon"]
    agree = {
        "rows": fields["rows"] == len(noisy) == sum(sizes.values()),
        "epsilon": parts["draw"] == noisy.mechanism.epsilon and len(parts) == 3,
        "num_classes": fields.get("num_classes") == getattr(noisy.mechanism, "num_classes", None),
    }
    if "num_classes" not in fields:
        del agree["num_classes"]
    if wrong := [name for name, same in agree.items() if not same]:
        found.problems.append(f"its statement differs from its noisy labels in {listed(wrong)}")
    columns = [*fields["id_columns"], fields["noisy_label_column"]]
    for table in tables:
        check_names(found, files.columns_of(table), columns, "column", table.name)
    digests = fields.get("sha256")
    if digests is None:
        text = f"the columns {listed(fields['id_columns'])}, which version 0.3 did not seal"
        found.not_checked.append(text)
    elif digests != [PlainFile(table).digest() for table in tables]:
        found.problems.append(f"{path.name} was changed after its statement was written")


def _draws(noisy: NoisyLabels) -> list[Receipt]:
    # The answers of PATE are a release of their own mechanism, without those that are missing.
    is_release = isinstance(noisy.mechanism, ConfidentGNMax)
    return [
        receipt
        for receipt in noisy.receipts
        if receipt.kind == ("release" if is_release else "draw")
        and (not is_release or receipt.what == repr(noisy.mechanism))
    ]


def _check_draws(noisy: NoisyLabels, stores: Stores, found: Findings) -> None:
    """Compares noisy labels, indices, mechanism and priors with their draws.

    The digest in a receipt identifies a complete draw; all else is looked up in the stores.
    """
    draws = _draws(noisy)
    is_free = getattr(noisy.mechanism, "resampling_probability", None) == 1.0
    if not draws and is_free and (not stores or stores.has_seal(noisy.seal())):
        found.not_checked.append("its noisy labels, drawn from its priors without a true label")
        return
    if not draws:
        text = "it has no receipt of a draw, so nothing shows that its labels are noisy"
        found.problems.append(text)
        return
    records = [stores.records[receipt.id][0] for receipt in draws if receipt.id in stores.records]
    stored = [record for record in records if record.values is not None]
    if not stored:
        _check_by_receipts(noisy, draws, records, found, has_store=bool(stores))
        return
    matches = list(_matches(noisy, stored))
    if not matches:
        if _are_permuted(noisy, stored):
            found.not_checked.append("the order of its rows")
        else:
            found.problems.append("its noisy labels differ from those of its receipt")
        return
    orders = {_order_of(noisy, rows): (used, order) for used, order, rows in reversed(matches)}
    kind = min(orders)
    used, order = orders[kind]
    if kind == _OTHER:
        found.problems.append("its indices differ from those of the draw")
    elif kind == _UNKNOWN:
        found.not_checked.append("its indices")
    _check_mechanism(noisy, used, found)
    _check_priors(noisy, used, order, stores, found)


_SAME, _UNKNOWN, _OTHER = range(3)


def _order_of(noisy: NoisyLabels, rows: np.ndarray | None) -> int:
    """Returns whether indices are these rows of the vault, or may be, counted within a part."""
    if rows is None:
        return _UNKNOWN
    if np.array_equal(rows, noisy.indices):
        return _SAME
    order, own = np.argsort(rows), np.argsort(noisy.indices)
    if noisy.of_part is False or not np.array_equal(order, own):
        return _OTHER
    # All examples of a part, in this order; with gaps, the store does not know the part.
    return _SAME if np.array_equal(noisy.indices[own], np.arange(len(own))) else _UNKNOWN


def _matches(
    noisy: NoisyLabels, stored: Sequence[Record]
) -> Iterator[tuple[Sequence[Record], np.ndarray, np.ndarray | None]]:
    """Yields records that have these noisy labels together, in an order, with their rows."""
    digest = noisy.output_digest()
    own = noisy.mechanism.to_json(with_receipts=False)
    by_digest = [each for each in stored if each.receipt and each.receipt.output_digest == digest]
    choices: list[list[Record]] = [
        *([record] for record in by_digest),
        list(stored),
        [record for record in stored if record.mechanism.to_json(with_receipts=False) == own],
        _in_sequence(noisy, stored),
    ]
    for records in choices:
        outputs = [_output(noisy, record) for record in records]
        if sum(len(values) for values, _ in outputs) != len(noisy) or not outputs:
            continue
        values = np.concatenate([part for part, _ in outputs])
        places = [part for _, part in outputs if part is not None]
        rows = np.concatenate(places) if len(places) == len(outputs) else None
        orders = [np.arange(len(values))]
        # Labels that came late lie between those of earlier draws.
        orders += [] if rows is None else [np.argsort(rows, kind="stable")]
        for order in orders:
            if np.array_equal(values[order], noisy.values):
                yield records, order, None if rows is None else rows[order]


def _output(noisy: NoisyLabels, record: Record) -> tuple[np.ndarray, np.ndarray | None]:
    """Returns what a draw published, and its rows; None if the store does not know them."""
    values, rows = np.asarray(record.values), record.indices
    has_rows = len(rows) == len(values)
    # A negative value stands for a peer that does not report, or a query without an answer.
    if isinstance(noisy.mechanism, (PeerToPeerRandomizedResponse, ConfidentGNMax)):
        is_answer = values >= 0
        return values[is_answer], rows[is_answer] if has_rows else None
    return values, rows if has_rows else None


def _in_sequence(noisy: NoisyLabels, stored: Sequence[Record]) -> list[Record]:
    """Returns the draws that follow one another in these noisy labels; others are of inputs."""
    rest, used = noisy.values, []
    for record in stored:
        values, _ = _output(noisy, record)
        if len(values) and np.array_equal(rest[: len(values)], values):
            rest = rest[len(values) :]
            used.append(record)
    return [] if len(rest) else used


def _are_permuted(noisy: NoisyLabels, stored: Sequence[Record]) -> bool:
    """Returns whether each row has its noisy label, in an order of several draws."""
    outputs = [_output(noisy, record) for record in stored]
    if len(outputs) < 2 or any(rows is None for _, rows in outputs):
        return False
    rows = np.concatenate([rows for _, rows in outputs if rows is not None])
    if rows.shape != noisy.indices.shape:
        return False
    values = np.concatenate([values for values, _ in outputs])
    order, own = np.argsort(rows), np.argsort(noisy.indices)
    same_rows = np.array_equal(rows[order], noisy.indices[own])
    return same_rows and np.array_equal(values[order], noisy.values[own])


def _check_by_receipts(
    noisy: NoisyLabels,
    draws: Sequence[Receipt],
    records: Sequence[Record],
    found: Findings,
    *,
    has_store: bool,
) -> None:
    """Compares noisy labels with digests in receipts, without a draw in a store."""
    digest = noisy.output_digest()
    single = [receipt for receipt in draws if receipt.output_digest == digest]
    is_partial = isinstance(noisy.mechanism, (PeerToPeerRandomizedResponse, ConfidentGNMax))
    if not single and not is_partial and not _are_of_receipts(noisy, draws):
        if len(draws) == 1:
            found.problems.append("its noisy labels differ from those of its receipt")
        else:
            found.not_checked.append(f"its noisy labels, of {len(draws)} draws, without a store")
        return
    kind = _UNKNOWN
    # All labels of a user are charged, also those that were not drawn.
    if single and single[0].unit != "user":
        rows = _rows_of(single[0])
        kind = _order_of(noisy, rows)
        if kind == _OTHER and not np.array_equal(rows, np.sort(noisy.indices)):
            found.problems.append("its indices differ from those of the draw")
            return
    if not has_store:
        if noisy.shift is not None:
            found.not_checked.append("the predictions that its draw subtracted")
        return
    # Only the store records the order, and who reported or was answered, until it is forgotten.
    if kind != _SAME and not _are_of_receipts(noisy, draws):
        found.not_checked.append("its indices, whose draw the store forgot")
    _check_mechanism(noisy, records, found)
    if noisy.priors is not None:
        if noisy.priors.digest() not in [record.output.public_digest for record in records]:
            found.not_checked.append("its priors")
    elif any("priors" in record.output.names for record in records):
        found.problems.append("its priors differ from those of the draw")


def _are_of_receipts(noisy: NoisyLabels, draws: Sequence[Receipt]) -> bool:
    """Returns whether several draws, in the order of examples, have the labels of these digests."""
    indices = noisy.indices
    is_drawn = np.zeros(len(noisy), bool)
    if np.any(indices[1:] <= indices[:-1]):
        return False
    for receipt in draws:
        rows = _rows_of(receipt)
        if not len(indices) or not np.isin(rows, indices).all():
            continue
        places = np.searchsorted(indices, rows)
        if noisy.output_digest(places) == receipt.output_digest:
            is_drawn[places] = True
    return bool(is_drawn.all())


def _rows_of(receipt: Receipt) -> np.ndarray:
    examples = receipt.examples
    return np.arange(receipt.labels.size) if examples is None else np.asarray(examples)


def _check_mechanism(noisy: NoisyLabels, records: Sequence[Record], found: Findings) -> None:
    own = noisy.mechanism
    for record in records:
        drawn = record.mechanism
        # Stages have one mechanism: randomized response is that of a uniform prior.
        is_first_stage = (
            isinstance(drawn, RandomizedResponse)
            and isinstance(own, RRWithPrior)
            and (drawn.epsilon, drawn.num_classes) == (own.epsilon, own.num_classes)
        )
        if (
            drawn.to_json(with_receipts=False) != own.to_json(with_receipts=False)
            and not is_first_stage
        ):
            found.problems.append("its mechanism differs from that of the draw")
            return
    beta = noisy.bias_correction
    if beta is not None and beta != getattr(own, "resampling_probability", None):
        if not hasattr(own, "resampling_probability"):
            found.problems.append("it has a bias correction, which its mechanism has not")
        else:
            found.not_checked.append("its bias correction")


def _check_priors(
    noisy: NoisyLabels,
    records: Sequence[Record],
    order: np.ndarray,
    stores: Stores,
    found: Findings,
) -> None:
    priors = noisy.priors
    differ = "its priors differ from those of the draw"
    if priors is None:
        if any(record.priors is not None or "shift" in record.output.names for record in records):
            found.problems.append(differ)
        return
    shifts = [record.output.arrays["shift"] for record in records if "shift" in record.output.names]
    shift: Any = np.concatenate(shifts)[order] if shifts else None
    own_shift: Any = priors.shift
    if not np.array_equal(shift, own_shift):
        found.problems.append("its predictions differ from those that the draw subtracted")
        return
    values: Any = getattr(noisy.mechanism, "inputs", None)
    if priors.values is not None and not np.array_equal(priors.values, values):
        found.problems.append(differ)
        return
    drawn = [record.priors for record in records]
    known = [each for each in drawn if each is not None]
    if not known:
        released = _released_priors(priors, stores)
        if not released:
            found.not_checked.append("its priors")
        elif not any(_are_equal(priors, each) for each in released):
            found.problems.append(differ)
        return
    if len(drawn) == 1 and _are_equal(priors, known[0]):
        return
    width = np.shape(priors.probabilities)[-1]
    expected = _rows_of_priors(noisy, records, width)
    own = np.broadcast_to(np.asarray(priors), (len(noisy), width))
    if len(expected) != len(own) or not np.array_equal(expected[order], own):
        found.problems.append(differ)


def _rows_of_priors(noisy: NoisyLabels, records: Sequence[Record], width: int) -> np.ndarray:
    """Returns the prior of each label of these draws, (m, width); empty if one has another width.

    A draw without priors was made with the uniform one.
    """
    rows = []
    for record in records:
        priors = record.priors
        own = np.full(width, 1.0 / width) if priors is None else np.asarray(priors)
        if own.shape[-1] != width:
            return np.empty((0, width))
        rows.append(np.broadcast_to(own, (len(_output(noisy, record)[0]), width)))
    return np.concatenate(rows)


def _released_priors(priors: Priors, stores: Stores) -> list[Priors]:
    """Returns the priors of the histograms that these priors have receipts of."""
    records = [
        stores.records[receipt.id][0]
        for receipt in priors.receipts
        if receipt.id in stores.records and priors.groups is None
    ]
    released = [(record, record.mechanism) for record in records]
    return [
        NoisyStatistic(np.asarray(record.values), mechanism, receipts=record.receipts).priors()
        for record, mechanism in released
        if isinstance(mechanism, HistogramMechanism) and record.values is not None
    ]


def _are_equal(priors: Priors, others: Priors) -> bool:
    same = np.array_equal(priors.probabilities, others.probabilities)
    groups, other_groups = priors.groups, others.groups
    if groups is None or other_groups is None:
        return same and groups is other_groups
    return same and np.array_equal(groups, other_groups)


def _check_classes(
    noisy: NoisyLabels, stores: Stores, found: Findings, *, is_recorded: bool, as_text: bool
) -> None:
    """Compares the class values with the digest of a store's header."""
    headers = [
        ledger.header
        for ledger in stores.ledgers
        if any(receipt.labels.name == ledger.label_set.name for receipt in _draws(noisy))
    ]
    known = [header.get("classes") for header in headers if "num_classes" in header]
    own = None
    if noisy.classes is not None:
        own = Classes(list(noisy.classes)).header()["classes"]
    if own in known or is_recorded or (own is None and not known):
        return
    if own is not None and any(known) and not as_text:
        found.problems.append("its classes differ from those of the store")
    elif own is not None:
        found.not_checked.append("its classes")
