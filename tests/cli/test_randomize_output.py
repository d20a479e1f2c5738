"""Concurrent runs, kills and failures leave no table without its own statement."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from pathlib import Path

import filelock
import pyarrow as pa
import pytest
from pyarrow import csv

from tf_labeldp.cli import main
from tf_labeldp.vault import NoisyLabels

FILES = ["noisy.csv", "noisy.csv.privacy.json"]


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_labels(20)
    return tmp_path


def write_labels(rows):
    Path("labels.csv").write_text("id,y\n" + "".join(f"{i},{i % 3}\n" for i in range(rows)))


def command(*more, source="labels.csv", output="noisy.csv"):
    options = ["--column", "y", "--task", "classification", "--num-classes", "3", "--quiet"]
    return ["randomize", source, *options, "--epsilon", "1", "--output", output, *more]


def contents():
    """Returns all files and folders except for the input."""
    return {
        path.name: path.read_bytes() if path.is_file() else b""
        for path in sorted(Path().iterdir())
        if path.name != "labels.csv"
    }


def rows_and_stated():
    """Returns the number of rows of the table, and the number in its statement."""
    stated = json.loads(Path("noisy.csv.privacy.json").read_text())["rows"]
    return len(Path("noisy.csv").read_text().splitlines()) - 1, stated


@pytest.fixture
def while_writing(monkeypatch):
    """Calls a function once, before the table is on disk."""

    def at_first_sync(function):
        sync, calls = os.fsync, []

        def watched(file):
            calls.append(file)
            if len(calls) == 1:
                function()
            sync(file)

        monkeypatch.setattr(os, "fsync", watched)

    return at_first_sync


@pytest.mark.parametrize("options", [(), ("--overwrite",)])
def test_a_second_run_on_the_same_output_is_refused(while_writing, capsys, options):
    def second():
        before = sorted(Path().iterdir())
        assert main(command(*options)) == 2
        assert sorted(Path().iterdir()) == before  # the hidden folder of the first is still there

    while_writing(second)
    assert main(command()) == 0
    shown = capsys.readouterr().err
    assert "another run is writing --output noisy.csv at this moment" in shown
    assert shown.count("\n") == 1
    assert list(contents()) == FILES and rows_and_stated() == (20, 20)


def test_the_lock_of_a_killed_run_is_no_lock():
    Path(".noisy.csv.lock").touch()
    assert main(command()) == 0
    assert list(contents()) == FILES


def test_without_locks_the_files_of_others_are_left_alone(monkeypatch):
    """Another run may be writing the hidden folder."""

    def no_locks(*arguments, **options):
        raise NotImplementedError

    hidden = f".noisy.csv.{'0' * 16}.tmp"
    Path(hidden).mkdir()
    with monkeypatch.context() as patch:
        patch.setattr(filelock.FileLock, "acquire", no_locks)
        assert main(command()) == 0
    assert list(contents()) == [hidden, *FILES]
    assert main(command("--overwrite")) == 0
    assert list(contents()) == FILES


@pytest.mark.parametrize("failing", FILES)
@pytest.mark.parametrize("before", ["nothing", "a whole output"])
def test_a_failure_while_names_are_given_changes_nothing(monkeypatch, capsys, failing, before):
    if before != "nothing":
        assert main(command()) == 0
        write_labels(30)
    content, replace = contents(), os.replace

    def no_links(*paths, **options):
        raise OSError(95, "Operation not supported")

    def fail(source, target):
        if Path(target).name == failing and "old-" not in str(source):
            raise OSError(5, "Input/output error")
        replace(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(os, "link", no_links)
        patch.setattr(os, "replace", fail)
        assert main(command(*["--overwrite"] * (before == "a whole output"))) == 2
    assert "cannot write --output noisy.csv (Input/output error)" in capsys.readouterr().err
    assert contents() == content


def test_a_table_that_another_program_creates_stays_as_it_is(while_writing, capsys):
    while_writing(lambda: Path("noisy.csv").write_bytes(b"another's"))
    assert main(command()) == 2
    assert "noisy.csv was created by another program" in capsys.readouterr().err
    assert contents() == {"noisy.csv": b"another's"}


def test_a_kill_leaves_no_table_under_the_statement_of_another_run(killed):
    number, there = 1, []
    while True:
        write_labels(20)
        assert main(command("--overwrite")) == 0
        write_labels(30)
        if not killed(number, *command("--overwrite")):
            break
        there.append(Path("noisy.csv").exists())
        if there[-1]:
            assert rows_and_stated() == (20, 20)
        assert main(command("--overwrite")) == 0
        assert list(contents()) == FILES and rows_and_stated() == (30, 30)
        number += 1
    assert there == [True] * 3 + [False] * 3 and rows_and_stated() == (30, 30)


@pytest.mark.parametrize("length", [230, 251])
def test_names_that_are_too_long(capsys, length):
    assert main(command("--store", "../none", output="x" * length + ".csv")) == 2
    assert "(File name too long)" in capsys.readouterr().err
    assert contents() == {} and not Path("../none").exists()  # found out before the draw


@pytest.mark.parametrize(
    ("output", "store", "reason"),
    [
        ("public/n.csv", "public", "the store public is the folder of --output public/n.csv"),
        ("public/n.csv", ".", "the store . contains the folder of --output"),
    ],
)
def test_a_store_that_would_be_published(folder, capsys, output, store, reason):
    Path("public").mkdir()
    Path("link").symlink_to("public")
    assert main(command("--store", store, output=output)) == 2
    shown = capsys.readouterr().err
    assert reason in shown and "the store stays with the labels" in shown
    assert set(contents()) == {"link", "public"} and list(Path("public").iterdir()) == []


@pytest.mark.parametrize(
    ("output", "store"),
    [("public/n.csv", "public/a/b"), ("public/n.csv", "link/a"), ("n.csv", "s")],
)
def test_a_store_below_the_folder_of_the_output(folder, capsys, output, store):
    """No warning: a single file is published, and rarely the folder that it is in."""
    Path("public").mkdir()
    Path("link").symlink_to("public")
    words = command("--store", store, output=output)
    assert main([word for word in words if word != "--quiet"]) == 0
    assert "warning" not in capsys.readouterr().err
    assert Path(output).exists() and Path(store).exists()


# From stdin to stdout.


def from_stdin(monkeypatch, text):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text.encode())))


@pytest.mark.parametrize("store", [(), ("--store", "store")])
def test_stdin_to_stdout(monkeypatch, capsys, store):
    Path("public").mkdir()
    seeded, words = ("--insecure-seed", "3"), command(source="-", output="-")
    words.remove("--quiet")
    words += [*store, *seeded, "--statement", "public/rows.csv.privacy.json"]
    text = Path("labels.csv").read_text()
    from_stdin(monkeypatch, text)
    assert main(words) == 0
    shown = capsys.readouterr()
    assert (
        "label-DP" in shown.err
        and "wrote 20 rows to stdout, and their statement to public/rows" in shown.err
    )
    Path("public/rows.csv").write_text(shown.out)
    assert len(NoisyLabels.load("public/rows.csv")) == 20
    assert main(command(*seeded)) == 0
    assert Path("noisy.csv").read_text() == shown.out
    if store:  # a run that was stopped while it wrote goes on with its draws
        from_stdin(monkeypatch, text)
        capsys.readouterr()
        assert main([*words, "--overwrite"]) == 0
        assert capsys.readouterr().out == shown.out


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "the input stdin is empty"),
        ("id,y\na,99\n", "column 'y' of stdin: 1 of 1 labels is not in 0..2"),
        ("id,y\na,1\nb,-secret-\n", "of stdin has a cell that is not a whole number in row 3"),
    ],
)
def test_bad_stdin(monkeypatch, capsys, text, reason):
    from_stdin(monkeypatch, text)
    assert main(command("--statement", "s.json", source="-", output="-")) == 2
    shown = capsys.readouterr()
    assert reason in shown.err and "secret" not in shown.err and shown.out == ""
    assert contents() == {}


@pytest.mark.slow
def test_a_pipe_between_processes():
    """Only rows go to stdout; a stdout that cannot be written is an error."""
    words = command("--statement", "s.json", "--overwrite", source="-", output="-")
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    for end, reason in (
        ("", None),
        (" > /dev/full", "cannot write --output - (No space left on device)"),
        (" >&-", "--output - needs stdout, which is closed"),
        (" <&-", "the input - needs stdin, which is closed"),
    ):
        program = f'"{sys.executable}" -m tf_labeldp.cli {" ".join(words)} < labels.csv{end}'
        done = subprocess.run(
            ["bash", "-c", program], env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == (2 if reason else 0), done.stderr
        if reason:
            assert reason in done.stderr and done.stderr.count("rror") == 1
        else:
            assert len(done.stdout.splitlines()) == 21


def test_a_stop_right_after_a_file_got_its_name_leaves_the_earlier_output(monkeypatch):
    assert main(command()) == 0
    before = contents()
    link = os.link

    def stopped_after(source, target, **options):
        link(source, target, **options)
        monkeypatch.setattr(os, "link", link)
        raise KeyboardInterrupt

    write_labels(30)
    monkeypatch.setattr(os, "link", stopped_after)
    assert main(command("--overwrite")) == 130
    assert contents() == before


def test_a_statement_replaces_no_pipe_or_device(capfd):
    os.mkfifo("pipe")
    words = command("--statement", "pipe", "--overwrite", output="-")
    assert main(words) == 2
    assert "pipe is no regular file; give another --statement" in capfd.readouterr().err
    assert Path("pipe").is_fifo()


IDS = ["=1+1", "@SUM(A1)", "+1", "-2+3", "\t=1", "＝1", 'a"b,c', " =1", "12"]


@pytest.mark.parametrize("jobs", ["1", "2"])
@pytest.mark.parametrize("output", ["noisy.csv", "noisy.csv.gz", "-", "noisy"])
def test_ids_that_are_formulas_are_copied_with_one_warning(folder, output, jobs, capfdbinary):
    write_ids(IDS)
    more = ["--statement", "s.csv.privacy.json"] if output == "-" else []
    sources = ["labels.csv"]
    if output == "noisy":
        sources = ["a.csv", "b.csv"]
        for name in sources:
            Path(name).write_bytes(Path("labels.csv").read_bytes())
    call = command(*more, "--jobs", jobs, output=output)
    assert main([call[0], *sources, *call[2:]]) == 0
    out, error = capfdbinary.readouterr()
    assert error.count(b"a spreadsheet would run them as formulas") == 1
    tables = [io.BytesIO(out)] if output == "-" else [*map(Path, sorted(FOUND[output]))]
    for table in tables:
        options = csv.ConvertOptions(column_types={"id": pa.string()})
        source = table if output == "-" else str(table)
        assert csv.read_csv(source, convert_options=options)["id"].to_pylist() == IDS


FOUND = {
    "noisy.csv": ["noisy.csv"],
    "noisy.csv.gz": ["noisy.csv.gz"],
    "noisy": ["noisy/a.csv", "noisy/b.csv"],
    "-": [],
}


def write_ids(ids):
    cells = ['"' + name.replace('"', '""') + '"' for name in ids]
    lines = [f"{cell},{place % 3}\n" for place, cell in enumerate(cells)]
    Path("labels.csv").write_text("id,y\n" + "".join(lines), encoding="utf-8")


@pytest.mark.parametrize("ids", [["a", "b"], [1, -1], ["a-b", "a=1"]], ids=str)
def test_other_ids_have_no_warning_of_formulas(folder, ids, capfd):
    write_ids(map(str, ids)) if isinstance(ids[0], str) else None
    assert main(command()) == 0
    assert "formulas" not in capfd.readouterr().err


def test_names_of_columns_and_classes_may_be_formulas(folder, capfd):
    Path("labels.csv").write_text("=id,y\n" + "1,a\n2,b\n")
    options = ["--column", "y", "--task", "classification", "--classes", "a", "b"]
    call = ["randomize", "labels.csv", "--epsilon", "1", "--output", "noisy.csv", *options]
    assert main([*call, "--id", "=id"]) == 0
    assert capfd.readouterr().err.count("formulas") == 1
    assert Path("noisy.csv").read_text().startswith("=id,y\n")
