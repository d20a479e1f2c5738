"""Two runs on one output, kills and failures: never a table without its own statement."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from tf_labeldp.cli import _outputs, _randomize, main

ROOT = Path(__file__).parents[2]
FILES = ["noisy.csv", "noisy.csv.privacy.json"]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    write_labels(20)
    return tmp_path


def write_labels(rows: int) -> None:
    Path("labels.csv").write_text("id,y\n" + "".join(f"{i},{i % 3}\n" for i in range(rows)))


def command(*more: str) -> list[str]:
    options = ["--column", "y", "--task", "classification", "--num-classes", "3", "--quiet"]
    return ["randomize", "labels.csv", *options, "--epsilon", "1", "--output", "noisy.csv", *more]


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name != "labels.csv")


def rows_and_told() -> tuple[int, int]:
    """Gives the rows of the table, and those that its statement speaks of."""
    told = json.loads(Path("noisy.csv.privacy.json").read_text())["rows"]
    return len(Path("noisy.csv").read_text().splitlines()) - 1, told


@pytest.mark.parametrize("options", [(), ("--overwrite",)])
def test_a_second_run_on_the_same_output_is_refused(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    options: tuple[str, ...],
) -> None:
    statement = _randomize._statement

    def meanwhile(*arguments: object) -> str:
        with monkeypatch.context() as patch:
            patch.setattr(_randomize, "_statement", statement)
            before = names(folder)
            assert main(command(*options)) == 2
            assert names(folder) == before  # the hidden file of the first run is still there
        return statement(*arguments)

    monkeypatch.setattr(_randomize, "_statement", meanwhile)
    assert main(command()) == 0
    told = capsys.readouterr().err
    assert "another run is writing --output noisy.csv at this moment" in told
    assert told.count("\n") == 1
    assert names(folder) == FILES
    assert rows_and_told() == (20, 20)


def test_the_lock_of_a_killed_run_is_no_lock(folder: Path) -> None:
    Path(".noisy.csv.lock").touch()
    assert main(command()) == 0
    assert names(folder) == FILES


def test_without_locks_the_files_of_others_are_left_alone(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There it is not known whether a hidden file was left behind or is being written."""

    def no_locks(*arguments: object, **options: object) -> None:
        raise NotImplementedError

    hidden = f".noisy.csv.{'0' * 16}.tmp"
    Path(hidden).touch()
    with monkeypatch.context() as patch:
        patch.setattr(_outputs.filelock.FileLock, "acquire", no_locks)
        assert main(command()) == 0
    assert names(folder) == [hidden, *FILES]
    assert main(command("--overwrite")) == 0
    assert names(folder) == FILES


def test_a_lock_that_was_removed_before_it_was_taken(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file that was opened is not the one that the next run would open."""
    acquire, calls, held = _outputs.filelock.FileLock.acquire, [], []

    def removed_first(self: object, **options: object) -> object:
        found = acquire(self, **options)
        calls.append(found)
        if len(calls) == 1:
            Path(".noisy.csv.lock").unlink()
        return found

    statement = _randomize._statement

    def look(*arguments: object) -> str:
        held.append(Path(".noisy.csv.lock").exists())
        return statement(*arguments)

    monkeypatch.setattr(_outputs.filelock.FileLock, "acquire", removed_first)
    monkeypatch.setattr(_randomize, "_statement", look)
    assert main(command()) == 0
    assert len(calls) == 2 and held == [True]
    assert names(folder) == FILES


@pytest.mark.parametrize("failing", [1, 2])
@pytest.mark.parametrize("before", ["nothing", "a whole output", "a statement alone"])
def test_a_failure_while_names_are_given_changes_nothing(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    failing: int,
    before: str,
) -> None:
    if before != "nothing":
        assert main(command()) == 0
        write_labels(30)
    if before == "a statement alone":
        Path("noisy.csv").unlink()
    content = {name: Path(name).read_bytes() for name in names(folder)}
    give_name, calls = _outputs.give_name, []

    def fail_once(*paths: Path) -> None:
        calls.append(paths)
        if len(calls) == failing:
            raise OSError(5, "Input/output error")
        give_name(*paths)

    monkeypatch.setattr(_outputs, "give_name", fail_once)
    options = ["--overwrite"] if before == "a whole output" else []
    assert main(command(*options)) == 2
    assert "cannot write --output noisy.csv (Input/output error)" in capsys.readouterr().err
    assert {name: Path(name).read_bytes() for name in names(folder)} == content


def test_a_failure_without_hard_links_changes_nothing(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(command()) == 0
    content = {name: Path(name).read_bytes() for name in names(folder)}
    replace = os.replace

    def no_links(*paths: Path, **options: object) -> None:
        raise OSError(95, "Operation not supported")

    def fail_for_the_table(source: Path, target: Path) -> None:
        if Path(target).name == "noisy.csv" and "old-" not in str(source):
            raise OSError(5, "Input/output error")
        replace(source, target)

    write_labels(30)
    with monkeypatch.context() as patch:
        patch.setattr(os, "link", no_links)
        patch.setattr(os, "replace", fail_for_the_table)
        assert main(command("--overwrite")) == 2
    assert {name: Path(name).read_bytes() for name in names(folder)} == content


def test_a_table_that_comes_into_being_keeps_its_statement(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A statement was alone when the run began, and is another's when it ends."""
    assert main(command()) == 0
    table = Path("noisy.csv").read_bytes()
    Path("noisy.csv").unlink()
    both = {"noisy.csv": table, FILES[1]: Path(FILES[1]).read_bytes()}
    write_labels(30)
    statement = _randomize._statement

    def late(*arguments: object) -> str:
        Path("noisy.csv").write_bytes(table)
        return statement(*arguments)

    monkeypatch.setattr(_randomize, "_statement", late)
    assert main(command()) == 2
    # Found out at once: the statement is no longer alone, and is not even moved away.
    assert f"{FILES[1]} has come into being meanwhile" in capsys.readouterr().err
    assert {name: Path(name).read_bytes() for name in names(folder)} == both


# Kills the process before the n-th call of `os.replace` and `give_name` together, if there is one.
KILLED = """
import os, signal, sys
from tf_labeldp.cli import _outputs, main
calls = 0
def watched(function):
    def wrapper(*arguments):
        global calls
        calls += 1
        if calls == int(sys.argv[1]):
            os.kill(os.getpid(), signal.SIGKILL)
        return function(*arguments)
    return wrapper
_outputs.os.replace = watched(os.replace)
_outputs.give_name = watched(_outputs.give_name)
sys.exit(main(sys.argv[2:]))
"""


@pytest.mark.parametrize("call", [1, 2, 3, 4])
def test_a_kill_leaves_no_table_under_the_statement_of_another_run(
    folder: Path, call: int, in_process: Callable[..., tuple[int, str]]
) -> None:
    assert main(command()) == 0
    write_labels(30)
    code, told = in_process(KILLED, str(call), *command("--overwrite"))
    assert code == -signal.SIGKILL, told
    assert Path("noisy.csv").exists() == (call == 1)
    if call == 1:
        assert rows_and_told() == (20, 20)
        assert main(command("--overwrite")) == 0
    else:
        assert main(command()) == 0  # what the kill left is no output
    assert names(folder) == FILES
    assert rows_and_told() == (30, 30)


@pytest.mark.parametrize("length", [230, 240, 251, 300])
def test_names_that_are_too_long(
    folder: Path, capsys: pytest.CaptureFixture[str], length: int
) -> None:
    output = "x" * length + ".csv"
    assert main(command("--output", output, "--store", "../none")) == 2
    assert "(File name too long)" in capsys.readouterr().err
    assert names(folder) == [] and not Path("../none").exists()  # found out before the draw


@pytest.mark.parametrize(
    ("output", "store", "reason"),
    [
        ("public/n.csv", "public", "the store public is the folder of --output public/n.csv"),
        ("public/n.csv", "public/a/b", "the store public/a/b lies in the folder of --output"),
        ("public/n.csv", "link/a", "the store link/a lies in the folder of --output"),
        ("public/n.csv", ".", "the store . has in it the folder of --output"),
        ("n.csv", "store", "the store store lies in the folder of --output n.csv"),
    ],
)
def test_a_store_that_would_be_published(
    folder: Path, capsys: pytest.CaptureFixture[str], output: str, store: str, reason: str
) -> None:
    Path("public").mkdir()
    Path("link").symlink_to("public")
    assert main(command("--output", output, "--store", store)) == 2
    told = capsys.readouterr().err
    assert reason in told and "the store stays with the labels" in told
    assert names(folder) == ["link", "public"] and list(Path("public").iterdir()) == []
