"""``tf-labeldp randomize``: tables of labels in, tables of noisy labels out.

All files of the input are read, and checked, before anything is drawn: one vault holds their
labels. Nothing that is written or printed depends on a true label but through the draw; only the
errors that stop a run count cells, and they are for the label holder.

Files are read, and chunks of rows encoded, by threads: Arrow and NumPy work outside of Python's
lock, and labels need not be sent to other processes.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import hashlib
import json
import os
import pathlib
import secrets
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tf_labeldp._progress import Progress
from tf_labeldp._version import __version__
from tf_labeldp.accounting import Assumption
from tf_labeldp.cli import _outputs, _tables, _tasks
from tf_labeldp.cli._console import CommandError, one_line, say
from tf_labeldp.vault import PrivateLabels
from tf_labeldp.vault._noisy_labels import sealed, table_arrays
from tf_labeldp.vault._records import fingerprint_of, publish

_ROWS = 1 << 16
"""Rows that are written, or whose ids are counted, at once."""
_ROW_COLUMN = "row"
"""The column of row numbers, where there are no ids."""
_AUTOMATIC = ("id", "row_id", _ROW_COLUMN)
_NAMED = 20
"""At most so many columns are listed by name."""
_DIGEST_FILE = "ids-digest"
_LABELS_FILE = "PRIVATE-files"
"""Digests of the labels of each of several files, in the store; salted, like its own."""
_PATIENCE = 2.0
"""Seconds until the first word of progress."""


def run(args: argparse.Namespace) -> int:
    """Randomizes the labels of a table and returns the exit code."""
    with _threads(args.jobs or pa.cpu_count()) as pool:
        return _run(args, pool)


@contextlib.contextmanager
def _threads(jobs: int) -> Iterator[Executor]:
    """Gives threads that begin nothing new once something has failed."""
    pool = ThreadPoolExecutor(jobs)
    try:
        yield pool
    finally:
        pool.shutdown(cancel_futures=True)


def _run(args: argparse.Namespace, pool: Executor) -> int:
    files = _tables.find_files(args.input)
    several = not _tables.is_single(args.input)
    tables = list(pool.map(_tables.open_table, files))
    noisy_column = args.column if args.output_column is None else args.output_column
    ids = _common_ids(tables, args, noisy_column)
    task = _tasks.task_of(args)
    columns = [(name, tables[0].types[name]) for name in ids] or [(_ROW_COLUMN, pa.int64())]
    columns.append((noisy_column, task.output_type))
    target = _output(args, files, columns)
    store = None if args.store is None else args.store.expanduser()
    if store is not None:
        _check_apart(args.output, target.published, args.store)
    pass_over = functools.partial(_Progress, delay=_PATIENCE, quiet=args.quiet)
    with target as output:
        with pass_over("reading labels") as progress:
            read = functools.partial(
                _read_table,
                column=args.column,
                ids=ids,
                task=task,
                several=several,
                digested=store is not None,
                progress=progress,
            )
            parts, shards = zip(*pool.map(read, tables), strict=True)
        for table in tables:
            table.check_unchanged()
        labels = np.concatenate(parts)
        del parts
        counted = pool.submit(_most_rows, [shard.hashes for shard in shards])
        with pass_over("drawing noisy labels") as progress:
            vault = _open_vault(task, store, shards, labels)
            del labels
            draw = task.draw(vault)
            progress.advance(len(draw.noisy_labels))
        del vault  # the labels are not needed any more
        if store is not None:
            with task.explained():
                _keep_ids(store, shards)
        most_rows = counted.result()
        listed = {shard.name: shard.size for shard in shards} if several else None
        statement = _statement([name for name, _ in columns], draw, most_rows, listed)
        with pass_over("writing", len(draw.noisy_labels)) as progress:
            chunks = _output_chunks(shards, task, draw.noisy_labels.values, progress)
            output.publish(statement, chunks, pool)
    if not args.quiet:
        _report(args, tables, ids, output, draw, most_rows)
    return 0


def _output(
    args: argparse.Namespace, files: Sequence[pathlib.Path], columns: Sequence[tuple[str, Any]]
) -> _outputs.Output:
    """Returns where the noisy labels go: one file, stdout, or a folder for several inputs."""
    if args.output == _tables.STREAM:
        if args.statement is None:
            raise CommandError(
                "--output - needs --statement FILE, as the statement can't go to stdout too; name "
                "it like the file that the rows will be in, with .privacy.json at its end"
            )
        return _outputs.StreamOutput(args.statement, columns, overwrite=args.overwrite)
    if args.statement is not None:
        raise CommandError(
            "--statement is for --output -; others have theirs beside the table or in the folder"
        )
    one = _tables.is_single(args.input) or _tables.is_table_name(args.output)
    kind = _outputs.FileOutput if one else _outputs.FolderOutput
    return kind(args.output, columns, overwrite=args.overwrite, sources=files)


class _Progress(Progress):
    """A pass over rows; that its lines cannot be written is no failure of the command."""

    def display(self, msg: str | None = None, pos: int | None = None) -> None:
        with contextlib.suppress(OSError, ValueError):
            super().display(msg, pos)

    def close(self) -> None:
        with contextlib.suppress(OSError, ValueError):
            super().close()


@dataclasses.dataclass(frozen=True, eq=False)
class _Shard:
    """What is known of the rows of one file, but for their labels.

    Attributes:
        name: of the file.
        size: number of rows.
        ids: the columns of ids, in chunks of rows; none for row numbers.
        hashes: of the ids, (n,); empty if there is not one column of them.
        digest: of the ids and their names; of the names alone unless there is a store.
    """

    name: str
    size: int
    ids: list[list[Any]]
    hashes: np.ndarray
    digest: str


def _read_table(
    table: _tables.Table,
    column: str,
    ids: Sequence[str],
    task: _tasks.Task,
    several: bool,
    digested: bool,
    progress: Progress,
) -> tuple[np.ndarray, _Shard]:
    """Returns the labels of one file and what else is in it, after checking them."""
    parts: list[np.ndarray] = []
    chunks: list[list[Any]] = []
    facts = IdFacts(ids, digested=digested)
    rows = missing = nameless = 0
    for labels, columns in table.chunks(column, task.kind, ids):
        rows += len(labels)
        missing += labels.null_count
        parts.append(task.encoded(labels.drop_null()))
        for start in range(0, len(labels) if ids else 0, _ROWS):
            chunks.append([one.slice(start, _ROWS) for one in columns])
            facts.add(chunks[-1])
        if several and len(ids) == 1:
            nameless += _count_missing(columns[0])
        progress.advance(len(labels))
    if not rows:
        raise _tables.no_rows(table.path)
    if missing:
        raise CommandError(
            f"column {column!r} of {table.path} has no label in {missing} of {rows} rows; "
            f"{_tables.FILL}"
        )
    if nameless:
        raise CommandError(
            f"column {ids[0]!r} of {table.path} has no id in {nameless} of {rows} rows, which "
            "could not be told apart among several files; give each row one"
        )
    found = np.concatenate(parts)
    problem = task.check(found)
    if problem is not None:
        raise CommandError(f"column {column!r} of {table.path}: {problem}")
    return found, _Shard(table.path.name, rows, chunks, facts.hashes(), facts.digest())


def _open_vault(
    task: _tasks.Task, store: pathlib.Path | None, shards: Sequence[_Shard], labels: np.ndarray
) -> PrivateLabels:
    """Returns the vault of all labels; raises if its store is of other files."""
    if store is None:
        return task.vault(labels, None)
    chunks = [columns[0] for shard in shards for columns in shard.ids]
    ids = pa.chunked_array(chunks) if chunks and task.draws == "keyed" else None
    with task.explained():
        _check_labels(store, shards, labels)
        _check_ids(store, shards)
        vault = task.vault(labels, ids)
        _keep_labels(store, shards, labels)
    return vault


def _count_missing(column: Any) -> int:
    """Returns the number of ids that are null, or an empty text."""
    if pa.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    empty = 0
    if pa.types.is_string(column.type):
        empty = pc.sum(pc.equal(pc.binary_length(column), 0)).as_py() or 0
    return int(column.null_count + empty)


def _output_chunks(
    shards: Sequence[_Shard], task: _tasks.Task, noisy_labels: np.ndarray, progress: Progress
) -> list[_outputs.Part]:
    """Returns the columns of the output, some rows at a time, for each file."""

    def rows_of(shard: _Shard, start: int) -> Iterator[list[Any]]:
        for columns in shard.ids or _row_numbers(start, start + shard.size):
            end = start + len(columns[0])
            yield [*columns, task.decoded(noisy_labels[start:end])]
            progress.advance(end - start)
            start = end

    starts = np.cumsum([0, *(shard.size for shard in shards)]).tolist()
    return [
        (shard.name, rows_of(shard, start))
        for shard, start in zip(shards, starts[:-1], strict=True)
    ]


def _row_numbers(start: int, stop: int) -> Iterator[list[Any]]:
    for first in range(start, stop, _ROWS):
        yield [pa.array(np.arange(first, min(first + _ROWS, stop)))]


def _statement(
    names: Sequence[str],
    draw: _tasks.Draw,
    most_rows: int | None,
    files: dict[str, int] | None,
) -> str:
    """Returns the content of the statement's file: public, like the table itself."""
    noisy = draw.noisy_labels
    if most_rows is not None and most_rows > 1:
        note = Assumption("rows-per-id", "holder", _repeated(most_rows))
        notes = (*noisy.assumptions, note)
        noisy = dataclasses.replace(noisy, assumptions=notes)
    fields = {
        **noisy.statement(),
        "made_by": f"{_outputs.MADE_BY} {__version__} randomize",
        "rows": len(noisy),
        **({} if files is None else {"files": files}),  # with their rows, in order
        "id_columns": list(names[:-1]),
        "most_rows_of_one_id": most_rows,
        "noisy_label_column": names[-1],
        **draw.facts,
    }
    return sealed(fields, table_arrays(noisy.values, draw.facts["prior"]))


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
    draw: _tasks.Draw,
    most_rows: int | None,
) -> None:
    """Prints what was done; all files are complete by now."""
    if draw.stored:
        ignored = "" if args.insecure_seed is None else ", whatever --insecure-seed says"
        say(
            f"the store {one_line(str(args.store))} had draws of these labels: they were used"
            f"{ignored}, and what they cost is counted once",
            error=True,
        )
    say(one_line(_in_words(tables, args.column, ids)), error=True)
    if most_rows is not None and most_rows > 1:
        say(f"warning: {_repeated(most_rows)}", error=True)
    to_stdout = args.output == _tables.STREAM  # which then has nothing but rows
    say(str(draw.noisy_labels.guarantee()), error=to_stdout)
    if total := draw.facts.get("total"):
        words = f"{total['estimate']:.6g} (standard error {total['standard_error']:.2g})"
        say(f"total of the true labels, estimated from the noisy ones: {words}", error=to_stdout)
    written = f"wrote {output.written(len(draw.noisy_labels))}"
    say(f"\n{one_line(written)}", error=to_stdout)


def _check_apart(output: pathlib.Path, published: pathlib.Path, store: pathlib.Path) -> None:
    """Raises if whoever publishes the folder of the output would publish the store with it."""
    folder, kept = (
        pathlib.Path(os.path.realpath(path)) for path in (published, store.expanduser())
    )
    if folder == kept or folder in kept.parents or kept in folder.parents:
        where = "lies in" if folder in kept.parents else "has in it"
        raise CommandError(
            f"the store {store} {where if folder != kept else 'is'} the folder of --output "
            f"{output}, which may be published; the store stays with the labels: give folders "
            "apart from each other"
        )


def _common_ids(
    tables: Sequence[_tables.Table], args: argparse.Namespace, noisy_column: str
) -> list[str]:
    """Returns the columns to copy, after checking those of each file; may be empty."""
    first = tables[0]
    ids = _id_columns(first, args, noisy_column)
    for other in tables[1:]:
        found = _id_columns(other, args, noisy_column)
        if found != ids:
            raise CommandError(
                f"{first.path} has the id columns {_listed(ids) or 'none'}, {other.path} "
                f"{_listed(found) or 'none'}; name columns that all files have with --id"
            )
        for name in ids:
            if first.types[name] != other.types[name]:
                raise CommandError(
                    f"column {name!r} has type {first.types[name]} in {first.path}, but "
                    f"{other.types[name]} in {other.path}; give ids the same type in all files"
                )
    return ids


def _id_columns(table: _tables.Table, args: argparse.Namespace, noisy_column: str) -> list[str]:
    """Returns the columns to copy, after checking them and the label column; may be empty."""
    for option, name in [("--column", args.column), *(("--id", name) for name in args.id or ())]:
        if table.columns.count(name) != 1:
            problem = "more than one column" if name in table.columns else "no column"
            raise CommandError(
                f"{table.path} has {problem} {name!r} for {option}; {_what_there_is(table.columns)}"
            )
    if args.id:
        if args.column in args.id:
            raise CommandError(
                f"--id {args.column!r} is the label column; copying it would publish the labels"
            )
        if len(set(args.id)) < len(args.id):
            raise CommandError("--id names a column more than once; name each once")
        ids = list(args.id)
    else:
        ids = [name for name in table.columns if name.lower() in _AUTOMATIC and name != args.column]
        if len(ids) > 1:
            raise CommandError(
                f"{table.path} has several columns that look like row ids, {_listed(ids)}; choose "
                "with --id"
            )
    if noisy_column in (ids or [_ROW_COLUMN]):
        raise CommandError(
            f"the noisy labels would have the name of the id column, {noisy_column!r}; give "
            "another --output-column"
        )
    return ids


def _in_words(tables: Sequence[_tables.Table], label: str, ids: Sequence[str]) -> str:
    """Returns which columns are copied and which are not."""
    kept = f"ids copied from {_listed(ids)}" if ids else f"row numbers in {_ROW_COLUMN!r}"
    names = dict.fromkeys(name for table in tables for name in table.columns)
    rest = [name for name in names if name not in (label, *ids)]
    left = f", left out besides the labels {label!r}: {_listed(rest)}" if rest else ""
    return f"columns: {kept}{left}"


def _what_there_is(names: Sequence[str]) -> str:
    """Returns the names of all columns, unless they may be the cells of the first row."""
    for name in names:
        with contextlib.suppress(ValueError):
            float(name)
            return (
                f"its {len(names)} columns are not shown, as some are named by numbers: is there a "
                "header line?"
            )
    return f"its columns are {_listed(names)}"


def _listed(names: Sequence[str]) -> str:
    """Returns quoted names, not more than fit a line."""
    shown = ", ".join(repr(name) for name in names[:_NAMED])
    return f"{shown} and {len(names) - _NAMED} more" if len(names) > _NAMED else shown


class IdFacts:
    """Takes the ids of a file chunk by chunk, in the order of its rows."""

    def __init__(self, names: Sequence[str], *, digested: bool = True) -> None:
        """Takes the names of the id columns, none for row numbers; and if a digest is wanted."""
        self._names = names
        # Whose rows they are is told by one id; several columns do not say which of them it is.
        self._hashes = [np.empty(0, np.uint64)]
        # Texts and lengths apart, so that the size of the chunks makes no difference.
        self._digests = [(hashlib.sha256(), hashlib.sha256()) for _ in names] if digested else []

    def add(self, columns: Sequence[Any]) -> None:
        """Takes one Arrow array for each id column."""
        if not self._digests and len(columns) != 1:
            return
        for place, column in enumerate(columns):
            content, lengths = _bytes_of(_texts(column))
            if self._digests:
                of_content, of_lengths = self._digests[place]
                of_content.update(content.data)
                of_lengths.update(lengths.data)
            if len(columns) == 1:
                self._hashes.append(_hashes(content, lengths))

    def hashes(self) -> np.ndarray:
        """Returns a hash of each id, (n,); none for several columns."""
        return np.concatenate(self._hashes)

    def digest(self) -> str:
        """Returns a digest of all ids, in their order, and of the names of the columns."""
        whole = hashlib.sha256(repr(tuple(self._names)).encode())
        for pair in self._digests:
            for digest in pair:
                whole.update(digest.digest())
        return whole.hexdigest()


def _most_rows(hashes: Sequence[np.ndarray]) -> int | None:
    """Returns the largest number of rows with the same id; None without a single id column.

    By hashes of 64 bits: of ten million ids two share one in one of 100,000 tables.
    """
    found = np.concatenate(hashes)
    if not found.size:
        return None
    found.sort()
    last = np.flatnonzero(found[1:] != found[:-1])  # of each id but the largest
    return int(np.diff(last, prepend=-1, append=found.size - 1).max())


def _check_ids(store: pathlib.Path, shards: Sequence[_Shard]) -> None:
    """Raises if the store's noisy labels went to rows of other ids."""
    path = store / _DIGEST_FILE
    known = path.read_text().split("\n") if path.exists() else []
    if known and known != [shard.digest for shard in shards]:
        raise CommandError(
            f"the store {store} holds noisy labels of rows with other ids (another name, value or "
            f"order){_changed(known, shards, [shard.digest for shard in shards])}; give the input "
            "and --id of the first run, or a new --store (publishing from both costs the sum of "
            "their epsilons)"
        )


def _keep_ids(store: pathlib.Path, shards: Sequence[_Shard]) -> None:
    """Remembers the ids, or raises if the store has others.

    Comes before anything is published, so no table is out that the store knows nothing of.
    """
    try:
        publish(store / _DIGEST_FILE, "\n".join(shard.digest for shard in shards).encode())
    except FileExistsError:
        _check_ids(store, shards)


def _check_labels(store: pathlib.Path, shards: Sequence[_Shard], labels: np.ndarray) -> None:
    """Raises if some files have other labels than at the first run; the store tells of others."""
    path = store / _LABELS_FILE
    if not path.exists():
        return
    kept = json.loads(path.read_text())
    found = _label_digests(kept["salt"], shards, labels)
    if where := _changed(kept["digests"], shards, found):
        raise CommandError(
            f"the store {store} was made for other labels{where}; give the input of the first "
            "run, or a new --store (publishing from both costs the sum of their epsilons)"
        )


def _keep_labels(store: pathlib.Path, shards: Sequence[_Shard], labels: np.ndarray) -> None:
    """Remembers which file had which labels, where there are several."""
    if len(shards) > 1 and not (store / _LABELS_FILE).exists():
        salt = secrets.token_hex(32)
        kept = {"salt": salt, "digests": _label_digests(salt, shards, labels)}
        publish(store / _LABELS_FILE, json.dumps(kept).encode(), replace=True)


def _label_digests(salt: str, shards: Sequence[_Shard], labels: np.ndarray) -> list[str]:
    ends = np.cumsum([shard.size for shard in shards])
    return [fingerprint_of(part, salt) for part in np.split(labels, ends[:-1])]


def _changed(known: Sequence[str], shards: Sequence[_Shard], found: Sequence[str]) -> str:
    """Returns which of as many files have another digest, in words; empty if that is not known."""
    names = [one.name for one, a, b in zip(shards, known, found, strict=False) if a != b]
    return f" in {_listed(names)}" if len(known) == len(found) > 1 and names else ""


_SEED = np.uint64(secrets.randbits(64))  # nobody can make up ids that share a hash


def _hashes(content: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Returns a hash of each text, ``uint64`` (n,), made of eight bytes at a time."""
    # Each place begins a word, wherever it lies.
    padded = np.concatenate([content, np.zeros(8, np.uint8)])
    words = np.ndarray(content.size + 1, "<u8", padded, strides=(1,))
    left = np.maximum(lengths, 0)
    at = np.cumsum(left) - left
    hashes = _mixed(lengths.astype(np.uint64) ^ _SEED)
    rows = np.flatnonzero(left)
    while rows.size:
        beyond = np.uint64(8) * np.maximum(8 - left[rows], 0).astype(np.uint64)
        word = words[at[rows]] << beyond  # without the bytes of the next text
        hashes[rows] = _mixed(hashes[rows] ^ word)
        at[rows] += 8
        left[rows] -= 8
        rows = rows[left[rows] > 0]
    return hashes


def _mixed(words: np.ndarray) -> np.ndarray:
    """Returns 64 bits that depend on all 64 bits given, one to one: the end of MurmurHash3."""
    for shift, factor in ((33, 0xFF51AFD7ED558CCD), (33, 0xC4CEB9FE1A85EC53)):
        words = (words ^ (words >> np.uint64(shift))) * np.uint64(factor)
    return words ^ (words >> np.uint64(33))


def _texts(column: Any) -> Any:
    """Returns an Arrow array as texts, or as the bytes of texts where these may be long."""
    if pa.types.is_string(column.type):
        return column
    if pa.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    try:
        return column.cast(pa.string()).cast(pa.large_binary())
    except pa.ArrowException:  # bytes that are no text, or a type without one, such as a list
        return pa.array([repr(value).encode() for value in column.to_pylist()], pa.large_binary())


def _bytes_of(texts: Any) -> tuple[np.ndarray, np.ndarray]:
    """Returns the bytes of all texts, ``uint8``, and ``int64`` lengths, -1 for a null."""
    lengths = pc.binary_length(texts).cast(pa.int64()).fill_null(-1)
    texts = texts.fill_null("" if pa.types.is_string(texts.type) else b"")  # hides anything
    _, offsets, content = texts.buffers()
    if content is None or not len(texts):
        return np.empty(0, np.uint8), lengths.to_numpy(zero_copy_only=False)
    wide = np.int32 if pa.types.is_string(texts.type) else np.int64
    bounds = np.frombuffer(offsets, wide)[texts.offset : texts.offset + len(texts) + 1]
    inside = np.frombuffer(content, np.uint8)[int(bounds[0]) : int(bounds[-1])]
    return inside, lengths.to_numpy(zero_copy_only=False)
