"""Bad input ends with exit code 2 and one line that says why; nothing is trained."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tf_labeldp.cli import main

ROOT = Path(__file__).parents[2]
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


def test_unknown_data_set(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    message = error_of(capsys, "demo", "--data", "cats", "--data-dir", tmp_path)
    assert "unknown data set 'cats'" in message
    assert "digits, adult, mnist, fashion_mnist" in message


def test_data_without_a_folder(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("LABELDP_DATA_DIR", raising=False)
    assert "--data mnist needs --data-dir DIR" in error_of(capsys, "demo", "--data", "mnist")


@pytest.mark.parametrize("name", ["mnist", "adult", "cats"])
def test_missing_folder(capsys: pytest.CaptureFixture[str], tmp_path: Path, name: str) -> None:
    missing = tmp_path / "missing"
    message = error_of(capsys, "demo", "--data", name, "--data-dir", missing)
    assert f"--data-dir {missing} is not a folder" in message


@pytest.mark.parametrize(
    ("name", "file"),
    [
        ("mnist", "train-images-idx3-ubyte"),
        ("fashion_mnist", "train-images"),
        ("adult", "adult.data"),
    ],
)
def test_missing_files(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, name: str, file: str
) -> None:
    message = error_of(capsys, "demo", "--data", name, "--data-dir", tmp_path)
    assert f"{tmp_path / name / file}" in message and "does not exist" in message


def test_missing_tfds(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cats" / "1.0.0").mkdir(parents=True)
    (tmp_path / "cats" / "1.0.0" / "dataset_info.json").write_text("{}")
    monkeypatch.setitem(sys.modules, "tensorflow_datasets", None)
    message = error_of(capsys, "demo", "--data", "cats", "--data-dir", tmp_path)
    assert "pip install 'tf-labeldp[examples]'" in message


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
    assert "unknown data set" in errors and "Traceback" not in errors
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
