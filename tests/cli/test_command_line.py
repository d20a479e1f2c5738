"""Exit codes, one-line errors and progress of commands; and the short verbs."""

from __future__ import annotations

import contextlib
import inspect
import io
import json
import os
import re
import signal
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import tqdm.std
from slow_cases import with_slow

from tf_labeldp import mechanisms
from tf_labeldp._progress import Argument, Message, Progress
from tf_labeldp.cli import _verbs, main
from tf_labeldp.mechanisms import RandomizedResponse
from tf_labeldp.vault import PrivateLabels

ROOT = Path(__file__).parents[2]
SECRET = "31.4159"
TASK = ["--column", "y", "--task", "regression", "--high", "100", "--epsilon", "1"]
OPTIONS = [*TASK, "--low", "0", "--output", "noisy.csv"]


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "labels.csv").write_text(f"id,y\na,1\nb,{SECRET}\n")
    return tmp_path


def shell(command, **environment):
    """Runs a command of bash, with a function `randomize` for the program."""
    start = f'randomize() {{ "{sys.executable}" -m tf_labeldp.cli randomize "$@"; }}; '
    return subprocess.run(
        ["bash", "-c", start + command],
        # Buffered, as usual: a failed write is tried again when the process ends.
        env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "", **environment},
        capture_output=True,
        text=True,
        check=False,
    )


NOBODY_LISTENS = (
    "randomize {} > /dev/full",
    "randomize {} >&- 2>&-",
    "randomize {} | true; exit ${{PIPESTATUS[0]}}",
    "randomize {} | head -c 1 > first; exit ${{PIPESTATUS[0]}}",
    "randomize {} 2> /dev/full",
    "randomize {} >&-",
    "randomize {} 2>&-",
)


@pytest.mark.parametrize("command", with_slow(NOBODY_LISTENS, NOBODY_LISTENS[2:]))
def test_nobody_listens(folder, command):
    """The files are complete, so the command has succeeded."""
    done = shell(command.format("labels.csv " + " ".join(OPTIONS)))
    assert done.returncode == 0, done.stderr
    assert "rror" not in done.stderr
    assert (folder / "noisy.csv").exists() and (folder / "noisy.csv.privacy.json").exists()


def test_a_name_that_the_terminal_cannot_show(folder, monkeypatch):
    shown = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(shown, "ascii"))
    assert main(["randomize", "labels.csv", *OPTIONS[:-1], "é.csv"]) == 0
    assert rb"wrote 2 rows to \xe9.csv, and" in shown.getvalue()
    assert (folder / "é.csv").exists()


def test_a_closed_stream_takes_nothing(monkeypatch):
    stream = io.StringIO()
    stream.close()
    monkeypatch.setattr(sys, "stdout", stream)
    assert main(["randomize", "labels.csv", *OPTIONS]) == 0
    monkeypatch.setattr(sys, "stderr", stream)
    assert main(["randomize", "missing.csv", *OPTIONS]) == 2  # an error that nobody reads


@pytest.mark.parametrize("name", ["two\nlines.csv", "\x1b[31mred.csv"])
def test_names_with_unprintable_characters_stay_in_their_line(capsys, name):
    assert main(["randomize", name, *OPTIONS]) == 2
    shown = repr(name)[1:-1]
    assert capsys.readouterr().err == (
        f"tf-labeldp randomize: error: the input {shown} does not exist; check the path\n"
    )
    assert main(["randomize", "labels.csv", *OPTIONS[:-1], name]) == 0
    assert (
        f"wrote 2 rows to {shown}, and their statement to {shown}.privacy.json"
        in capsys.readouterr().out
    )


@pytest.mark.parametrize("shown", [False, True])
def test_an_unexpected_error_shows_its_kind_alone(monkeypatch, capsys, shown):
    def fail(*arguments, **options):
        raise RuntimeError(f"cannot handle {SECRET}")

    monkeypatch.setattr(PrivateLabels, "randomize", fail)
    monkeypatch.delenv("TF_LABELDP_TRACEBACK", raising=False)
    if shown:
        monkeypatch.setenv("TF_LABELDP_TRACEBACK", "1")
    assert main(["randomize", "labels.csv", *OPTIONS]) == 2
    lines = capsys.readouterr().err.splitlines()
    start = "tf-labeldp randomize: error: unexpected RuntimeError; its text is withheld"
    assert lines[-1].startswith(start) and "TF_LABELDP_TRACEBACK=1" in lines[-1]
    assert SECRET not in lines[-1]
    assert (len(lines) > 1) == (f"RuntimeError: cannot handle {SECRET}" in lines) == shown


@pytest.fixture
def slow(monkeypatch):
    """The clock of the progress passes half a second per row."""
    now, advance = [0.0], Progress.advance

    def slowly(self, rows):
        now[0] += rows / 2
        advance(self, rows)

    monkeypatch.setattr(tqdm.std, "time", lambda: now[0])
    monkeypatch.setattr(Progress, "advance", slowly)


@pytest.mark.usefixtures("slow")
def test_a_long_run_reports_its_progress(capsys):
    """Later passes show the number of rows; an error is the last line."""
    Path("labels.csv").write_text("id,y\n" + "7,1\n" * 10)
    assert main(["randomize", "labels.csv", *OPTIONS]) == 0
    reading, drawing, writing = capsys.readouterr().err.split("\r")[2::2]
    assert reading.startswith("reading labels: 10 rows [") and "2.00 rows/s]\n" in reading
    assert drawing.startswith("drawing noisy labels: 10 rows [")
    assert writing.startswith("writing: 100%") and "10/10 [" in writing
    assert main(["randomize", "labels.csv", *OPTIONS, "--quiet", "--overwrite"]) == 0
    assert capsys.readouterr().err == ""
    Path("more.csv").write_text("id,y\na,1000\n")
    files = ["randomize", "labels.csv", "more.csv", *OPTIONS[:-1], "folder", "--jobs", "1"]
    assert main(files) == 2
    *passes, error = capsys.readouterr().err.splitlines()
    assert any(line.startswith("reading labels: ") for line in passes)
    assert error.startswith("tf-labeldp randomize: error: column 'y' of more.csv: 1 of 1")


def test_progress_that_cannot_be_written_is_no_failure(monkeypatch):
    with open("/dev/full", "w", buffering=1) as full:
        monkeypatch.setattr(sys, "stderr", full)
        with Progress("reading", delay=1e-9) as progress:
            progress.advance(1)
        with contextlib.suppress(OSError):
            full.flush()
        monkeypatch.undo()
        os.dup2(os.open(os.devnull, os.O_WRONLY), full.fileno())  # takes the rest of its buffer


@pytest.mark.parametrize("low", ["-.5", "-7"])
def test_negative_numbers_are_no_options(low):
    output = ["--output", "noisy.csv"]
    assert main(["randomize", "labels.csv", *TASK, "--low", low, *output]) == 0
    assert main(["randomize", "labels.csv", *TASK, f"--low={low}e1", *output, "--overwrite"]) == 0


VERBS = (
    "randomize",
    "recommend",
    "train",
    "predict",
    "audit",
    "report",
    "verify",
    "forget",
)
RANDOMIZE = ("randomize", "labels.csv", *OPTIONS)
RECOMMEND = ("recommend", "--examples", "9", "--kind", "table")
CLASSES = ["--task", "classification", "--column", "y", "--epsilon", "1", "--output", "n.csv"]


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ((), "the following arguments are required: VERB"),
        (("randomise", "x.csv"), "invalid choice: 'randomise'"),
        (("demo", "--epsilons", "1"), "the demo is examples/demo.py of the source now"),
        (("verify", "x.csv", "--stor", "y", "--reports"), "unrecognized arguments: --reports"),
        *(((verb, "--epsilon", "x"), "") for verb in VERBS),
        (("report", "store", "--published"), "--published: expected at least one argument"),
        *(
            ((*RECOMMEND, "--epsilon", text), f"above zero and at most 1000, got {text!r}")
            for text in ("0", "-0.5", "nan", "inf", "1e999", "1e300", "many", "1,2", "")
        ),
        (
            (*RECOMMEND, "--epsilon", "1", "--examples", "0"),
            "--examples: must be a whole number, at least 1, got '0'",
        ),
        ((*RANDOMIZE, "--insecure-seed", "1.5"), "must be a whole number, at least 0, got '1.5'"),
        (("recommend", "--epsilon", "1", "--kind", "table"), "are required: --examples"),
        ((*RANDOMIZE, "--low", "--clip"), "--low: expected one argument"),
        ((*RANDOMIZE, "--high", "-1"), "with LOW below HIGH"),
        (
            ("randomize", *CLASSES, "--classes", "yes", "no", "labels.csv"),
            "required: input",
        ),
    ],
)
def test_bad_command_lines(folder, capsys, words, reason):
    assert main(list(words)) == 2
    captured = capsys.readouterr()
    name = f"tf-labeldp {words[0]}" if words and words[0] in VERBS else "tf-labeldp"
    assert captured.err.startswith(f"{name}: error: ") and captured.err.count("\n") == 1
    assert reason in captured.err and captured.out == ""
    assert [path.name for path in folder.iterdir()] == ["labels.csv"]


def test_warnings_of_python_are_lines_of_the_command(folder, capsys, monkeypatch):
    shown, before = [], warnings.showwarning

    def verb(args):
        text = Message.of("the release is noise.\n  Use ", Argument("num_classes", 3), ".")
        warnings.warn(text, UserWarning, stacklevel=1)
        shown.append(warnings.showwarning)
        raise ValueError

    monkeypatch.setattr(_verbs, "run_recommend", verb)
    words = ["recommend", "--epsilon", "1", "--examples", "9", "--kind", "table"]
    assert main(words) == 2
    first = capsys.readouterr().err.splitlines()[0]
    assert first == "warning: the release is noise. Use --num-classes 3."
    assert warnings.showwarning is before and shown != [before]


def test_every_mechanism_for_numbers_in_a_range_is_an_option(capsys):
    names = {
        re.sub("(?<!^)([A-Z])", r"_\1", kind.__name__.removesuffix("Mechanism")).lower()
        for _, kind in inspect.getmembers(mechanisms, inspect.isclass)
        if issubclass(kind, mechanisms.RegressionMechanism)
        and [*inspect.signature(kind).parameters][:3] == ["epsilon", "low", "high"]
    }
    with contextlib.suppress(SystemExit):
        main(["randomize", "--help"])
    [options] = re.findall(r"--mechanism \{(.*?)\}", " ".join(capsys.readouterr().out.split()))[:1]
    assert len(names) > 4 and names == set(options.replace(" ", "").split(",")) - {"rr_on_bins"}


def test_help_states_the_form_of_errors_and_what_may_be_published(capsys):
    for words, texts in (
        (
            ["--help"],
            [
                "An error is one line, the last one on stderr, and exit code 2",
                "TF_LABELDP_TRACEBACK=1 in the environment",
            ],
        ),
        (["randomize", "--help"], ["Both files may be published", "the sum of their epsilons"]),
    ):
        with pytest.raises(SystemExit):
            main(words)
        shown = " ".join(capsys.readouterr().out.split())
        assert [text for text in texts if text not in shown] == []


# Sends itself a signal while it writes.
STOPPED = """
import os, signal, sys, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may have it ignored
from tf_labeldp.cli import _verbs, main
def slow(file):
    os.kill(os.getpid(), stop)
    time.sleep(60)
os.fsync, stop = slow, int(sys.argv.pop(1))
sys.exit(main())
"""


@pytest.mark.parametrize("stop", [signal.SIGTERM, signal.SIGINT])
def test_a_stop_from_outside_leaves_nothing(folder, stop, in_process):
    arguments = ["randomize", "labels.csv", *OPTIONS, "--quiet"]
    code, printed = in_process(STOPPED, str(int(stop)), *arguments)
    assert code == 128 + stop
    word = {signal.SIGTERM: "ended by SIGTERM", signal.SIGINT: "stopped"}[stop]
    assert printed == f"\ntf-labeldp randomize: {word}\n"
    assert [path.name for path in folder.iterdir()] == ["labels.csv"]


LIGHT = """
import sys
from tf_labeldp.cli import _verbs, main
heavy = {"tensorflow", "keras", "numpy", "sklearn", "scipy", "pyarrow"}
for words in (["--version"], ["--help"], *([verb, "--help"] for verb in sys.argv[1:])):
    try:
        main(words)
    except SystemExit as end:
        assert end.code == 0
    assert not heavy & set(sys.modules)
assert main(["audit", "cats"]) == 2
assert not {"tensorflow", "keras"} & set(sys.modules)
"""


def test_help_loads_nothing_heavy_and_errors_no_tensorflow(folder):
    done = subprocess.run(
        [sys.executable, "-c", LIGHT, *VERBS],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert all(f"usage: tf-labeldp {verb}" in done.stdout for verb in VERBS)
    assert "cats is no output of tf-labeldp randomize" in done.stderr
    assert done.stderr.count("\n") == 1


def test_completion_of_a_shell(capsys):
    pytest.importorskip("shtab")
    with pytest.raises(SystemExit):
        main(["--print-completion", "bash"])
    assert "--prior-epsilon" in capsys.readouterr().out


def test_recommend_prints_measurements(capsys):
    words = ["recommend", "--epsilon", "1", "--examples", "30000", "--kind", "table"]
    assert main(words) == 0
    assert re.search(r"\n  adult +boosting +91\.8", capsys.readouterr().out)
    assert main([*words, "--score", "91", "--num-classes", "2"]) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert re.match(r"Epsilon for 91 %, test AUC in % on Adult, two classes: [01]", last)
    # With more classes, those of Covertype: 72.7 % by a head of 4,200 examples at epsilon 2.
    more = ["recommend", "--epsilon", "1", "--kind", "table", "--num-classes", "7"]
    assert main([*more, "--examples", "4200", "--score", "76.2"]) == 0
    shown = capsys.readouterr().out
    assert "as epsilon: score (test accuracy in % on Covertype, seven classes):" in shown
    assert re.search(r"\n  head .* 2: 72\.7 .*\n  boosting .* 2: 76\.2", shown)
    assert shown.endswith("Epsilon for 76.2 %, test accuracy in % on Covertype, seven classes: 2\n")
    assert main([*words[:-1], "images", "--score", "99"]) == 2
    assert "--score is for --kind table" in capsys.readouterr().err
    assert main([*words, "--numbers", "--score", "99"]) == 0
    assert capsys.readouterr().out.endswith(
        "explained variance in % on French motor claims: more than measured\n"
    )


@pytest.fixture
def output(folder):
    rows = "".join(f"{i},{i % 3}\n" for i in range(300))
    (folder / "labels.csv").write_text(f"id,y\n{rows}")
    assert main(["randomize", "labels.csv", *CLASSES, "--num-classes", "3"]) == 0
    return folder / "n.csv"


def test_an_audit_of_a_sound_file_and_of_one_that_claims_too_little(output, capsys, monkeypatch):
    assert main(["audit", str(output), "--draws", "100000", "--seed", "1"]) == 0
    shown = capsys.readouterr().out
    assert "RandomizedResponse(epsilon=1" in shown and "no contradiction" in shown
    assert "not audited" not in shown
    monkeypatch.setattr(
        RandomizedResponse, "randomize", lambda self, labels, priors=None, *, rng=None: labels
    )
    assert main(["audit", str(output), "--draws", "10000"]) == 1
    assert "FALSE" in capsys.readouterr().out


def test_an_audit_of_numbers_and_of_no_output(output, capsys):
    assert main([*RANDOMIZE]) == 0
    assert main(["audit", "noisy.csv", "--draws", "20000", "--seed", "0"]) == 0
    drawn = json.loads(Path("noisy.csv.privacy.json").read_text("utf-8"))
    printed, parts = capsys.readouterr().out, drawn["epsilon"]
    assert f"claimed: {parts['draw']:.3g}" in printed
    assert (
        f"a part of the stated epsilon 1; the other {parts['prior']:.3g}, of the private" in printed
    )
    Path("model").mkdir()
    for name in ("model.keras", "privacy.json"):
        (Path("model") / name).write_text("{}")
    assert main(["audit", "model"]) == 2
    error = capsys.readouterr().err
    assert "model is a model, and no output of tf-labeldp randomize" in error
    assert main(["audit", "labels.csv"]) == 2
    assert "is no output of tf-labeldp randomize" in capsys.readouterr().err
