"""``tf-labeldp randomize``: tables of labels in, tables of noisy labels out.

Every input file is read and checked before anything is drawn: one vault holds all labels. Output
depends on a true label only through the draw. An error that stops a run counts cells, and is for
the label holder alone.

Threads read and write files: Arrow releases Python's lock.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import hashlib
import json
import pathlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tf_labeldp._progress import Progress, num_cores
from tf_labeldp._validate import counted
from tf_labeldp._version import MADE_BY
from tf_labeldp.accounting import Assumption
from tf_labeldp.cli import _outputs, _tables
from tf_labeldp.cli._console import CommandError, say
from tf_labeldp.cli._forms import named_forms
from tf_labeldp.cli._label_columns import ClassColumn, Draw, LabelColumn, NumberColumn
from tf_labeldp.vault.files import PlainFile
from tf_labeldp.vault.ledger import Ledger
from tf_labeldp.vault.noisy_labels import NoisyFiles
from tf_labeldp.vault.row_ids import RowIds

_ROWS = 1 << 18
"""Rows per batch: some tens of megabytes of text."""
_ROW_COLUMN = "row"
"""The column of row numbers in an output without ids."""
_AUTOMATIC = ("id", "row_id", _ROW_COLUMN)
_DIGEST_FILE = "ids-digest"
_PATIENCE = 2.0
"""Seconds before the first line of progress."""


def run_randomize(args: argparse.Namespace) -> int:
    jobs = args.jobs or min(pa.cpu_count(), num_cores())
    files, several = _tables.find_files(args.input)
    with ThreadPoolExecutor(jobs) as pool:
        tables = list(pool.map(_tables.open_table, files))
    named = named_forms(args.types)
    for table in tables:
        table.use_threads, table.named = jobs > 1, named
    noisy_column = args.column if args.output_column is None else args.output_column
    ids = _id_columns(tables, args, noisy_column)
    column = NumberColumn(args) if args.task == "regression" else ClassColumn(args)
    columns = [(name, tables[0].types[name]) for name in ids] or [(_ROW_COLUMN, pa.int64())]
    schema = pa.schema([*columns, (noisy_column, column.output_type)])
    target = _outputs.output_of(args, files, several, schema)
    if args.store is not None:
        below = "error" if isinstance(target, _outputs.FolderOutput) else "fine"
        _outputs.check_separate(args.output, target.published, args.store, below)
    progress_of = functools.partial(Progress, delay=_PATIENCE, quiet=args.quiet)
    with target as output:
        read = functools.partial(_read, column=column, ids=ids, several=several)
        draw, shards = _draw_all(tables, read, column, jobs, progress_of)
        most_rows = _most_rows_of_one_id([shard.ids for shard in shards])
        listed = {shard.name: shard.size for shard in shards} if several else None
        statement = functools.partial(_statement, schema.names, draw, most_rows, listed)
        with progress_of("writing", len(draw.noisy_labels)) as progress:
            noisy = draw.noisy_labels.values
            rows = functools.partial(_output_rows, shards, column, schema, noisy)
            output.publish(statement, rows, progress.advance, jobs)
    if not args.quiet:
        _report(args, tables, ids, output, draw, most_rows)
    return 0


def _draw_all(
    tables: Sequence[_tables.Table],
    read: Callable[..., tuple[np.ndarray, _Shard]],
    column: LabelColumn,
    jobs: int,
    progress_of: Callable[[str], Progress],
) -> tuple[Draw, Sequence[_Shard]]:
    """Reads the labels of all tables, and draws their noisy labels.

    Labels and vault are dropped as soon as they are not needed: they take memory.
    """
    args = column.args
    with progress_of("reading labels") as progress, ThreadPoolExecutor(jobs) as pool:
        read = functools.partial(read, progress=progress)
        parts, shards = zip(*pool.map(read, tables), strict=True)
    _tables.check_one_convention(tables, args.column)
    labels = parts[0] if len(parts) == 1 else np.concatenate(parts)
    del parts
    with progress_of("drawing noisy labels") as progress, column.explained():
        has_keys = shards[0].ids.num_columns and args.draws == "keyed"
        keys = pa.concat_tables([shard.ids for shard in shards]).column(0) if has_keys else None
        if args.store is not None:
            _check_ids(args.store, shards)
        vault = column.vault(labels, keys)
        del labels
        draw = column.draw(vault)
        del vault
        if args.store is not None:
            _keep_ids(args.store, shards)
        progress.advance(len(draw.noisy_labels))
    return draw, shards


class _Shard(NamedTuple):
    """One file without its labels."""

    name: str
    size: int  # number of rows
    ids: Any  # an Arrow table, without columns for row numbers
    digest: str  # of the ids and their column names; empty without a store


def _read(
    table: _tables.Table, column: LabelColumn, ids: Sequence[str], several: bool, progress: Progress
) -> tuple[np.ndarray, _Shard]:
    args = column.args
    labels, columns = table.read(args.column, column.kind, ids)
    rows = len(labels)
    if labels.null_count:
        raise CommandError(
            f"column {args.column!r} of {table.path}: {labels.null_count} of {rows} labels are "
            f"missing; {_tables.FILL}"
        )
    if several and len(ids) == 1 and (missing := _count_missing(columns.column(0))):
        raise CommandError(
            f"column {ids[0]!r} of {table.path} has no id in {missing} of {rows} rows; give each "
            "row one, which identifies it among several files"
        )
    try:
        encoded = column.encoded(labels)
    except CommandError as error:
        raise CommandError(f"column {args.column!r} of {table.path}: {error}") from None
    digest = "" if args.store is None else _digest_of(columns)
    progress.advance(rows)
    return encoded, _Shard(table.path.name, rows, columns, digest)


def _count_missing(column: Any) -> int:
    """Returns the number of ids that are null or an empty text."""
    texts = (_texts_of(chunk) for chunk in column.chunks)
    empty = sum(pc.sum(pc.equal(pc.binary_length(text), 0)).as_py() or 0 for text in texts)
    return int(column.null_count + empty)


def _output_rows(
    shards: Sequence[_Shard],
    column: LabelColumn,
    schema: Any,
    noisy: np.ndarray,
    advance: _outputs.Advance,
) -> list[Iterator[Any]]:
    def rows_of(shard: _Shard, first: int) -> Iterator[Any]:
        for start in range(0, shard.size, _ROWS):
            stop = min(start + _ROWS, shard.size)
            ids = shard.ids.slice(start, stop - start).columns
            ids = ids or [_tables.to_arrow(np.arange(first + start, first + stop))]
            part = column.decoded(noisy[first + start : first + stop])
            yield pa.table([*ids, part], schema=schema)
            advance(stop - start)

    starts = np.cumsum([0, *(shard.size for shard in shards)]).tolist()
    return [rows_of(shard, start) for shard, start in zip(shards, starts, strict=False)]


def _statement(
    names: Sequence[str],
    draw: Draw,
    most_rows: int | None,
    files: dict[str, int] | None,
    digests: Sequence[str],
) -> str:
    """Returns the content of the statement's file, which is public like the tables themselves.

    Its digest, which covers those of the tables, is recorded in the store.
    """
    noisy = draw.noisy_labels
    if most_rows is not None and most_rows > 1:
        note = Assumption("rows-per-id", "holder", _repeated(most_rows))
        noisy = dataclasses.replace(noisy, assumptions=(*noisy.assumptions, note))
    fields = {
        **noisy.statement(),
        "made_by": f"{MADE_BY} randomize",
        "rows": len(noisy),
        **({} if files is None else {"files": files}),
        "sha256": list(digests),
        "id_columns": list(names[:-1]),
        "most_rows_of_one_id": most_rows,
        "noisy_label_column": names[-1],
        **draw.facts,
    }
    text = NoisyFiles.sealed_table(fields, noisy.values, draw.facts["prior"])
    Ledger.record_digests([bytes.fromhex(json.loads(text)["digest"])], noisy.receipts)
    return text


def _repeated(most_rows: int) -> str:
    return (
        f"The epsilon is that of one row, and one id has up to {most_rows:,} rows: where an id is "
        "a person, multiply epsilon by the number of the person's rows."
    )


def _report(
    args: argparse.Namespace,
    tables: Sequence[_tables.Table],
    ids: Sequence[str],
    output: _outputs.Output,
    draw: Draw,
    most_rows: int | None,
) -> None:
    if draw.stored:
        ignored = "" if args.insecure_seed is None else ", and --insecure-seed was ignored"
        say(
            f"the store {args.store} had draws of these labels: they were used"
            f"{ignored}, and their cost is counted once",
            error=True,
        )
    for remark in [remark for table in tables for remark in table.remarks]:
        say(f"remark: {remark}", error=True)
    copied = f"ids copied from {_listed(ids)}" if ids else f"row numbers in {_ROW_COLUMN!r}"
    rest = len({name for table in tables for name in table.columns} - {args.column, *ids})
    others = f"{counted(rest, 'other column')} and the labels are left out"
    say(f"columns: {copied}; {others}", error=True)
    if most_rows is not None and most_rows > 1:
        say(f"warning: {_repeated(most_rows)}", error=True)
    to_stdout = args.output == _tables.STREAM  # stdout then has rows alone
    say(*str(draw.noisy_labels.guarantee()).splitlines(), error=to_stdout)
    if total := draw.facts.get("total"):
        words = f"{total['estimate']:.6g} (standard error {total['standard_error']:.2g})"
        say(f"total of the true labels, estimated from the noisy ones: {words}", error=to_stdout)
    place = "stdout" if to_stdout else output.path
    written = f"{counted(len(draw.noisy_labels), 'row')} to {place}, and their statement to"
    say(f"wrote {written} {output.statement}", error=to_stdout)


def _id_columns(
    tables: Sequence[_tables.Table], args: argparse.Namespace, noisy_column: str
) -> list[str]:
    """Returns the columns to copy, after checks; none means row numbers."""
    first = tables[0]
    automatic = [name for name in first.columns if name.lower() in _AUTOMATIC]
    ids = list(dict.fromkeys(args.id or [name for name in automatic if name != args.column]))
    if not args.id and len(ids) > 1:
        raise CommandError(
            f"{first.path} has several columns that look like row ids, {_listed(ids)}; choose "
            "with --id"
        )
    options = {args.column: "--column", **dict.fromkeys(ids, "--id")}
    for table in tables:
        for name, option in options.items():
            if table.columns.count(name) != 1:
                advice = "check its header line"
                if name in table.columns:
                    problem = "more than one column"
                else:
                    problem, advice = "no column", _tables.near_names(name, table.columns)
                raise CommandError(f"{table.path} has {problem} {name!r} for {option}; {advice}")
            if option == "--id" and table.types[name] != first.types[name]:
                raise CommandError(
                    f"column {name!r} has type {first.types[name]} in {first.path}, but "
                    f"{table.types[name]} in {table.path}; give ids the same type in all files"
                )
    if args.column in ids:
        raise CommandError(
            f"--id {args.column!r} is the label column; copying it would publish the labels"
        )
    if noisy_column in (ids or [_ROW_COLUMN]):
        raise CommandError(
            f"the noisy labels would have the name of the id column, {noisy_column!r}; give "
            "another --output-column"
        )
    return ids


def _listed(names: Sequence[str]) -> str:
    return ", ".join(map(repr, names))


def _digest_of(ids: Any) -> str:
    """Returns a digest of all ids and their column names, the same for any chunks."""
    digests = [(hashlib.sha256(), hashlib.sha256()) for _ in ids.column_names]
    for batch in ids.to_batches(_ROWS):
        for column, (of_texts, of_lengths) in zip(batch.columns, digests, strict=True):
            texts = _texts_of(column)
            content, _, lengths = RowIds(_filled(texts)).text_parts()
            if texts.null_count:
                lengths[texts.is_null().to_numpy(zero_copy_only=False)] = -1
            of_texts.update(content)
            of_lengths.update(lengths.data)
    whole = hashlib.sha256(repr(tuple(ids.column_names)).encode())
    for digest in (digest for pair in digests for digest in pair):
        whole.update(digest.digest())
    return whole.hexdigest()


def _most_rows_of_one_id(tables: Sequence[Any]) -> int | None:
    """Returns the largest number of rows with the same id; None unless ids are one column."""
    if tables[0].num_columns != 1:
        return None
    batches = [batch.column(0) for table in tables for batch in table.to_batches(_ROWS)]
    hashes = np.concatenate([_hashes_of(column) for column in batches])
    ordered = np.sort(hashes)
    shared = ordered[1:][ordered[1:] == ordered[:-1]]
    if not shared.size:
        return 1
    # Different ids may share a hash, so the ids of shared hashes are counted.
    is_shared = np.split(np.isin(hashes, shared), np.cumsum([len(column) for column in batches]))
    pairs = zip(batches, is_shared, strict=False)
    texts = [_texts_of(column).filter(pa.array(some)) for column, some in pairs]
    return int(pc.max(pc.value_counts(pa.chunked_array(texts)).field("counts")).as_py())


def _hashes_of(column: Any) -> np.ndarray:
    """Returns a hash of each id, ``uint64`` (n,); equal ids have equal ones."""
    if pa.types.is_integer(column.type) and not column.null_count:
        return _tables.to_numpy(column).astype(np.uint64)
    return RowIds(_filled(_texts_of(column))).hashes()


def _filled(texts: Any) -> Any:
    # Arrow may store any bytes under a null.
    return texts.fill_null(b"") if texts.null_count else texts


def _texts_of(column: Any) -> Any:
    """Returns an Arrow array as text in bytes, ``large_binary``."""
    if pa.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    try:
        return column.cast(pa.string()).cast(pa.large_binary())
    except pa.ArrowException:  # bytes that are no text, or a type without text, such as a list
        return pa.array([repr(value).encode() for value in column.to_pylist()], pa.large_binary())


def _check_ids(store: pathlib.Path, shards: Sequence[_Shard]) -> None:
    path = store / _DIGEST_FILE
    stored = path.read_text().split("\n") if path.exists() else []
    found = [shard.digest for shard in shards]
    if stored and stored != found:
        names = [shard.name for shard, a, b in zip(shards, stored, found, strict=False) if a != b]
        where = f" in {_listed(names)}" if len(stored) == len(found) > 1 else ""
        raise CommandError(
            f"the store {store} has noisy labels of rows with other ids (another name, value or "
            f"order){where}; give the input and --id of the first run, or a new --store "
            "(publishing from both costs the sum of their epsilons)"
        )


def _keep_ids(store: pathlib.Path, shards: Sequence[_Shard]) -> None:
    """Records the ids before anything is published, or raises if the store has others."""
    try:
        PlainFile(store / _DIGEST_FILE).write("\n".join(s.digest for s in shards).encode())
    except FileExistsError:
        _check_ids(store, shards)
