"""How a command ends: its exit code, its one line, and what nobody listens to or asked for."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tf_labeldp.cli import _console, _randomize, main

ROOT = Path(__file__).parents[2]
SECRET = "31.4159"
TASK = ["--column", "y", "--task", "regression", "--high", "100", "--epsilon", "1"]
OPTIONS = [*TASK, "--low", "0", "--output", "noisy.csv"]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "labels.csv").write_text(f"id,y\na,1\nb,{SECRET}\n")
    return tmp_path


def shell(command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs a command of bash, in which `randomize` stands for the program."""
    start = f'randomize() {{ "{sys.executable}" -m tf_labeldp.cli randomize "$@"; }}; '
    return subprocess.run(
        ["bash", "-c", start + command],
        # Buffered, as usual: what could not be written is tried again when the process ends.
        env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "", **environment},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize(
    "command",
    [
        "randomize {} > /dev/full",
        "randomize {} >&- 2>&-",
        *(
            pytest.param(command, marks=pytest.mark.slow)
            for command in (
                "randomize {} | true; exit ${{PIPESTATUS[0]}}",
                "randomize {} | head -c 1 > first; exit ${{PIPESTATUS[0]}}",
                "randomize {} 2> /dev/full",
                "randomize {} >&-",
                "randomize {} 2>&-",
            )
        ),
    ],
)
def test_nobody_listens(folder: Path, command: str) -> None:
    """The files are complete, so the command has succeeded."""
    done = shell(command.format("labels.csv " + " ".join(OPTIONS)))
    assert done.returncode == 0, done.stderr
    assert "rror" not in done.stderr
    assert (folder / "noisy.csv").exists() and (folder / "noisy.csv.privacy.json").exists()


def test_an_error_that_nobody_reads_has_its_exit_code() -> None:
    assert shell("randomize missing.csv " + " ".join(OPTIONS) + " 2>&-").returncode == 2


def test_a_name_that_the_terminal_cannot_show(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(shown, "ascii"))
    assert main(["randomize", "labels.csv", *OPTIONS[:-1], "é.csv"]) == 0
    assert rb"wrote \xe9.csv (2 rows)" in shown.getvalue()
    assert (folder / "é.csv").exists()


def test_a_closed_stream_takes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.StringIO()
    stream.close()
    monkeypatch.setattr(sys, "stdout", stream)
    _console.say("text")


@pytest.mark.parametrize("name", ["two\nlines.csv", "\x1b[31mred.csv", "bell\a.csv"])
def test_names_with_unprintable_characters_stay_in_their_line(
    capsys: pytest.CaptureFixture[str], name: str
) -> None:
    assert main(["randomize", name, *OPTIONS]) == 2
    shown = repr(name)[1:-1]
    told = capsys.readouterr().err
    assert told == (
        f"tf-labeldp randomize: error: the input {shown} does not exist; check the path\n"
    )
    assert main(["randomize", "labels.csv", *OPTIONS[:-1], name]) == 0
    assert f"wrote {shown} (2 rows) and {shown}.privacy.json" in capsys.readouterr().out


@pytest.mark.parametrize("shown", [False, True])
def test_an_unexpected_error_shows_its_kind_alone(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], shown: bool
) -> None:
    def fail(*arguments: object) -> None:
        raise RuntimeError(f"cannot handle {SECRET}")

    monkeypatch.setattr(_randomize, "_output_rows", fail)
    monkeypatch.delenv("TF_LABELDP_TRACEBACK", raising=False)
    if shown:
        monkeypatch.setenv("TF_LABELDP_TRACEBACK", "1")
    assert main(["randomize", "labels.csv", *OPTIONS]) == 2
    lines = capsys.readouterr().err.splitlines()
    start = "tf-labeldp randomize: error: unexpected RuntimeError; its text is kept back"
    assert lines[-1].startswith(start) and "TF_LABELDP_TRACEBACK=1" in lines[-1]
    assert SECRET not in lines[-1]
    assert (len(lines) > 1) == (f"RuntimeError: cannot handle {SECRET}" in lines) == shown


def test_the_error_is_the_last_line_after_progress(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(_randomize, "_PATIENCE", 0.0)
    Path("labels.csv").write_text("id,y\na,1000\n")
    assert main(["randomize", "labels.csv", *OPTIONS]) == 2
    *passes, error = capsys.readouterr().err.splitlines()
    assert passes and all(line.startswith("reading labels: ") for line in passes)
    assert error.startswith("tf-labeldp randomize: error: column 'y' of labels.csv: 1 of 1")


@pytest.mark.parametrize("low", ["-1e3", "-1E+3", "-.5", "-5.e-1", "-7", "0"])
def test_negative_numbers_are_no_options(capsys: pytest.CaptureFixture[str], low: str) -> None:
    output = ["--output", "noisy.csv"]
    assert main(["randomize", "labels.csv", *TASK, "--low", low, *output]) == 0
    assert main(["randomize", "labels.csv", *TASK, f"--low={low}", *output, "--overwrite"]) == 0


def test_an_option_after_low_is_no_number(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["randomize", "labels.csv", *OPTIONS, "--low", "--clip"]) == 2
    assert "--low: expected one argument" in capsys.readouterr().err


def test_an_input_that_was_taken_for_a_class(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--column", "y", "--task", "classification", "--epsilon", "1", "--output", "n.csv"]
    assert main(["randomize", *options, "--classes", "yes", "no", "labels.csv"]) == 2
    told = capsys.readouterr().err
    assert "required: input (before the options, as --classes and the like take all words" in told


@pytest.mark.parametrize(
    "options",
    [
        ["--epsilon", "0"],
        ["--nonsense"],
        ["--low"],
        ["--insecure-seed", "x"],
        ["--task", "ranking"],
        ["--high", "-1"],
    ],
)
def test_every_error_begins_with_the_same_name(
    capsys: pytest.CaptureFixture[str], options: list[str]
) -> None:
    assert main(["randomize", "labels.csv", *OPTIONS, *options]) == 2
    told = capsys.readouterr().err
    assert told.startswith("tf-labeldp randomize: error: ") and told.count("\n") == 1


@pytest.mark.parametrize("text", ["1e300", "1001"])
def test_epsilon_has_a_largest_value(capsys: pytest.CaptureFixture[str], text: str) -> None:
    assert main(["randomize", "labels.csv", *OPTIONS, "--epsilon", text]) == 2
    assert "epsilon must be at most 1000" in capsys.readouterr().err
    assert main(["randomize", "labels.csv", *OPTIONS, "--epsilon", "1000"]) == 0


def test_help_says_how_errors_look(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    told = " ".join(capsys.readouterr().out.split())
    assert "An error is one line, the last one on stderr, and exit code 2" in told
    assert "TF_LABELDP_TRACEBACK=1 in the environment" in told


# Is stopped in the middle of its work.
STOPPED = """
import os, signal, sys, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may have it ignored
from tf_labeldp.cli import _randomize, main
def slow():
    os.kill(os.getpid(), int(sys.argv[1]))
    time.sleep(60)
    yield
_randomize._output_rows = lambda *arguments: [slow()]
sys.exit(main(sys.argv[2:]))
"""


@pytest.mark.parametrize("stop", [signal.SIGTERM, signal.SIGINT])
def test_a_stop_from_outside_leaves_nothing(
    folder: Path, stop: signal.Signals, in_process: Callable[..., tuple[int, str]]
) -> None:
    arguments = ["randomize", "labels.csv", *OPTIONS, "--quiet"]
    code, told = in_process(STOPPED, str(int(stop)), *arguments)
    assert code == 128 + stop
    word = {signal.SIGTERM: "ended by SIGTERM", signal.SIGINT: "stopped"}[stop]
    assert told == f"\ntf-labeldp randomize: {word}\n"
    assert [path.name for path in folder.iterdir()] == ["labels.csv"]


def test_a_handler_of_the_caller_stays(folder: Path) -> None:
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        assert main(["randomize", "labels.csv", *OPTIONS]) == 0
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGTERM, before)


HEAVY = {"tensorflow", "keras", "numpy", "sklearn", "scipy", "pyarrow"}


def error_of(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    """Gives the line that the command line ends with, after checking the exit code."""
    assert main([str(argument) for argument in arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1 and captured.err.endswith("\n")
    return captured.err.strip()


@pytest.mark.parametrize("text", ["0", "-1", "-0.5", "nan", "inf", "1e999", "one", ""])
def test_bad_epsilon(capsys: pytest.CaptureFixture[str], text: str) -> None:
    message = error_of(capsys, "demo", "--epsilons", "1", text)
    assert f"epsilon must be a finite number above zero, got {text!r}" in message


@pytest.mark.parametrize(("option", "least"), [("--epochs", 1), ("--insecure-seed", 0)])
@pytest.mark.parametrize("text", ["-1", "1.5", "many"])
def test_bad_whole_numbers(
    capsys: pytest.CaptureFixture[str], option: str, least: int, text: str
) -> None:
    message = error_of(capsys, "demo", option, text)
    assert f"{option}: must be a whole number of at least {least}, got {text!r}" in message


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ((), "the following arguments are required: VERB"),
        (("fly",), "invalid choice: 'fly'"),
        (("demo", "--faster"), "unrecognized arguments: --faster"),
        (("demo", "--epsilons"), "--epsilons: expected at least one argument"),
    ],
)
def test_bad_command_lines(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], reason: str
) -> None:
    message = error_of(capsys, *arguments)
    name = "tf-labeldp demo" if "demo" in arguments else "tf-labeldp"
    assert message.startswith(f"{name}: error: ") and reason in message
    assert message.endswith(f"See {name} --help.")


def test_data_without_a_folder(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("LABELDP_DATA_DIR", raising=False)
    assert "--data mnist needs --data-dir DIR" in error_of(capsys, "demo", "--data", "mnist")


@pytest.mark.parametrize("below", ["", "folder"])
def test_output_that_is_a_file(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, below: str
) -> None:
    file = tmp_path / "file"
    file.write_text("mine")
    message = error_of(capsys, "demo", "--output", file / below)
    assert f"cannot write to --output {file / below}" in message
    assert file.read_text() == "mine"


def test_errors_load_no_tensorflow_and_show_no_traceback(tmp_path: Path) -> None:
    code, errors, loaded = in_new_process("demo", "--data", "cats", "--data-dir", str(tmp_path))
    assert code == 2
    assert "cats.npz is no data set" in errors and "Traceback" not in errors
    assert not loaded & {"tensorflow", "keras"}


def test_help_loads_nothing_heavy() -> None:
    code, errors, loaded = in_new_process("--help")
    assert (code, errors) == (0, "")
    assert "argparse" in loaded
    assert not loaded & HEAVY
    program = (
        "import json, sys\n"
        "from tf_labeldp.cli import main\n"
        "for arguments in (['demo', '--help'], ['randomize', '--help'], ['--version']):\n"
        "    try:\n        main(arguments)\n"
        "    except SystemExit as end:\n        assert end.code == 0\n"
        f"assert not {HEAVY!r} & set(sys.modules)\n"
    )
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert "--epochs" in done.stdout and "--num-classes" in done.stdout and done.stderr == ""


def in_new_process(*arguments: str) -> tuple[int, str, set[str]]:
    """Gives exit code, stderr and the loaded packages of `python -m tf_labeldp.cli ...`."""
    program = (
        "import atexit, json, runpy, sys\n"
        "atexit.register(lambda: print(json.dumps([n.partition('.')[0] for n in sys.modules])))\n"
        "runpy.run_module('tf_labeldp.cli', run_name='__main__')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    return done.returncode, done.stderr, set(json.loads(done.stdout.splitlines()[-1]))


def test_completion_of_a_shell(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("shtab")
    with pytest.raises(SystemExit):
        main(["--print-completion", "bash"])
    assert "--prior-epsilon" in capsys.readouterr().out


def test_recommend_says_what_was_measured(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["recommend", "--epsilon", "1", "--examples", "30000", "--kind", "table"]
    assert main(words) == 0
    assert re.search(r"\n  adult +ridge +85\.2", capsys.readouterr().out)
    assert main([*words[:-1], "pictures"]) == 2
    assert "invalid choice: 'pictures'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["randomise", "x.csv"], "invalid choice: 'randomise'"),
        (["demo", "--epsilon", "1,2"], "1,2', several go with spaces between them"),
        (["demo", "--epoch-count", "3"], "unrecognized arguments: --epoch-count"),
        (["demo", "--epoches", "3"], "unrecognized arguments: --epoches 3"),
    ],
)
def test_words_that_are_nearly_right(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 2
    assert message in capsys.readouterr().err
