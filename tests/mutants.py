"""Changes single places of the privacy core, and lists the changes that no fast test detects.

``make mutants`` runs it. A change that survives the tests reveals a missing test, or makes no
difference. ``--seed`` and the code fix the sample. ``build/mutants.jsonl`` keeps the results with
the digest of the changed file: a run that was stopped, or that ended after ``--minutes``, resumes,
also after other files have changed. Each change is tested by the tests of its part that run the
changed line; a line that only imports run, such as a constant, by all tests of the part. With
``--since`` the places are those of lines that changed since a commit.
"""

from __future__ import annotations

import argparse
import ast
import collections
import difflib
import hashlib
import importlib
import json
import math
import multiprocessing
import os
import pathlib
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from concurrent import futures
from os import _exit
from typing import NamedTuple

import coverage
import pytest
from cosmic_ray.ast import ast_nodes, get_ast_from_path
from cosmic_ray.mutating import use_mutation
from cosmic_ray.plugins import get_operator, operator_names
from tqdm import tqdm

ROOT = pathlib.Path(__file__).parents[1]
# Files of the privacy core, and the fast tests of each part.
PARTS = {
    "accounting": ("tf_labeldp/accounting/*.py", "tests/accounting tests/ledger"),
    # All except step_noise, which is in "noise".
    "mechanisms": ("tf_labeldp/mechanisms/[!s]*.py", "tests/mechanisms tests/estimation"),
    "vault": (
        "tf_labeldp/vault/*.py",
        "tests/vault tests/scale/test_keyed_draws.py tests/cli/test_noisy_labels_folder.py "
        "tests/mechanisms/test_cluster_randomized_response.py tests/ledger "
        "tests/doors/test_class_values.py tests/doors/test_class_weights.py "
        "tests/training/test_label_dp_charges.py "
        "tests/layout/test_statements.py::test_a_pipeline_fitted_on_a_vault_is_composed",
    ),
    "clipping": (
        "tf_labeldp/gradients/*clip*.py",
        "tests/gradients tests/training/test_label_dp_model_privacy.py",
    ),
    "noise": (
        "tf_labeldp/training/_gaussian_noise.py tf_labeldp/mechanisms/step_noise.py",
        "tests/training/test_gaussian_noise.py tests/training/test_device_noise.py "
        "tests/training/test_label_dp_model_privacy.py",
    ),
    "release": (
        "tf_labeldp/heads/one_release_head.py tf_labeldp/heads/design.py "
        "tf_labeldp/heads/label_source.py",
        "tests/heads/test_head_guarantee.py tests/heads/test_private_ridge.py "
        "tests/heads/test_private_logistic_regression.py tests/heads/test_allocation.py "
        "tests/heads/test_public_rows.py tests/heads/test_fits_on_arrays.py "
        "tests/heads/test_keras_export.py tests/heads/test_weights.py",
    ),
    # Parts that carry receipts.
    "features": (
        "tf_labeldp/features/*.py",
        "tests/features tests/ledger/test_more_routes.py",
    ),
    "learners": (
        "tf_labeldp/self_supervised/*.py tf_labeldp/semi_supervised/*.py tf_labeldp/pate/*.py",
        "tests/learners tests/ledger/test_provenance.py",
    ),
    "training": (
        "tf_labeldp/training/_record_receipts.py tf_labeldp/training/_spending.py",
        "tests/training/test_record_receipts.py tests/training/test_label_dp_charges.py "
        "tests/training/test_label_dp_statements.py tests/ledger",
    ),
    "front door": (
        "tf_labeldp/front_door/*.py",
        "tests/front_door tests/ledger/test_provenance.py",
    ),
    "dossier": ("tf_labeldp/dossier/*.py", "tests/dossier"),
    "data": ("tf_labeldp/data/*.py", "tests/data"),
    # The code and tests of the engines that need no engine.
    "engines": (
        "tf_labeldp/scale/*.py tf_labeldp/vault/keyed_draws.py",
        "tests/scale",
    ),
}


class Mutant(NamedTuple):
    """A change of a single place."""

    part: str
    path: str
    operator: str
    occurrence: int
    start: tuple[int, int]
    end: tuple[int, int]

    @property
    def name(self) -> str:
        """The name, the same in each run."""
        where = ":".join(map(str, (self.path, *self.start)))
        return f"{where} {self.operator.removeprefix('core/')} {self.occurrence}"


def main() -> None:
    """Runs the mutants and prints those that survived."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mutants", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--since", help="a commit: changes of lines that are newer")
    parser.add_argument("--parts", nargs="+", choices=list(PARTS), default=list(PARTS))
    parser.add_argument(
        "--minutes", type=float, default=math.inf, help="the latest start of a mutant"
    )
    parser.add_argument("--output", type=pathlib.Path, default=ROOT / "build" / "mutants.jsonl")
    args = parser.parse_args()
    begun = time.monotonic()
    chosen = sample(args.mutants, args.seed, args.parts, args.since)
    args.output.parent.mkdir(exist_ok=True)
    done: dict[tuple[str, str], dict] = {}
    if args.output.exists():
        results = map(json.loads, args.output.open())
        done = {(result["mutant"], result["file"]): result for result in results}
    left = [mutant for mutant in chosen if key(mutant) not in done]
    traces = {part: traced(part, args) for part in sorted({mutant.part for mutant in left})}
    work = [
        # All tests of a part take long, and a mutant that is slow is not one that was found.
        (mutant, tests, traces[mutant.part][1] * (1 if "::" in tests[0] else 4))
        for mutant in left
        for tests in (tests_of(mutant, traces[mutant.part][0]),)
    ]
    context = multiprocessing.get_context("spawn")
    with (
        futures.ProcessPoolExecutor(args.jobs, context, own_copy) as pool,
        args.output.open("a") as file,
    ):
        running = [pool.submit(tried, each) for each in work]
        for finished in tqdm(futures.as_completed(running), total=len(left), unit="mutant"):
            if finished.cancelled():
                continue
            # A change that the tool cannot make is not counted; the others go on.
            if finished.exception():
                tqdm.write(repr(finished.exception()))
                continue
            result = finished.result()
            file.write(json.dumps(result) + "\n")
            file.flush()
            done[result["mutant"], result["file"]] = result
            if time.monotonic() - begun > 60.0 * args.minutes:
                pool.shutdown(wait=False, cancel_futures=True)
    report([done[key(mutant)] for mutant in chosen if key(mutant) in done])


def key(mutant: Mutant) -> tuple[str, str]:
    """Returns the key of a result: the mutant, and the digest of the file."""
    content = (ROOT / mutant.path).read_bytes()
    return mutant.name, hashlib.sha256(content).hexdigest()[:16]


def sample(size: int, seed: int, parts: list[str], since: str | None = None) -> list[Mutant]:
    """Returns mutants: uniform places of these parts, with a uniform change at each."""
    places = collections.defaultdict(list)
    for part in parts:
        patterns = PARTS[part][0].split()
        for path in sorted(path for pattern in patterns for path in ROOT.glob(pattern)):
            newer = None if since is None else lines_since(since, path)
            if newer is not None and not newer:
                continue
            types, tree = annotations(path), get_ast_from_path(path)
            for name in operator_names():
                if get_operator(name).arguments():
                    continue
                operator = get_operator(name)()
                found = (p for node in ast_nodes(tree) for p in operator.mutation_positions(node))
                for occurrence, (start, end) in enumerate(found):
                    if newer is not None and start[0] not in newer:
                        continue
                    if not any(first <= start < last for first, last in types):
                        inside = str(path.relative_to(ROOT))
                        mutant = Mutant(part, inside, name, occurrence, start, end)
                        places[part, inside, start].append(mutant)
    rng = random.Random(seed)
    size = min(size, len(places))
    return [rng.choice(places[place]) for place in rng.sample(sorted(places), size)]


def lines_since(commit: str, path: pathlib.Path) -> set[int]:
    """Returns the numbers of the lines of a file that a commit does not have."""
    command = ["git", "diff", "--unified=0", commit, "--", str(path)]
    diff = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    lines: set[int] = set()
    for start, size in re.findall(r"^@@ -\S+ \+(\d+)(?:,(\d+))? @@", diff, re.MULTILINE):
        lines.update(range(int(start), int(start) + int(size or 1)))
    return lines


def annotations(path: pathlib.Path) -> list[tuple]:
    """Returns the ranges of the annotations of a file, which nothing runs."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        for name in ("annotation", "returns"):
            if (types := getattr(node, name, None)) is not None:
                start, end = types.lineno, types.end_lineno
                found.append(((start, types.col_offset), (end, types.end_col_offset)))
    return found


def traced(part: str, args: argparse.Namespace) -> tuple[coverage.CoverageData, float]:
    """Returns the lines that each test of a part runs, and the time limit of a mutant."""
    path = args.output.with_name(f"mutants.{part}.coverage")
    begun = time.monotonic()
    if not path.exists():
        command = f"{sys.executable} -m pytest -q -n {args.jobs} -p no:cacheprovider"
        command += f" --cov=tf_labeldp --cov-context=test --cov-report= {PARTS[part][1]}"
        environment = {**os.environ, "COVERAGE_FILE": str(path)}
        subprocess.run(command.split(), cwd=ROOT, env=environment, check=True)
    data = coverage.CoverageData(str(path))
    data.read()
    return data, max(300.0, 4.0 * args.jobs * (time.monotonic() - begun))


def tests_of(mutant: Mutant, data: coverage.CoverageData) -> list[str]:
    """Returns the tests that run the statement of a mutant, or all if the import runs it."""
    path = ROOT / mutant.path
    inside = [
        node
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.stmt) and node.lineno <= mutant.start[0] <= (node.end_lineno or 0)
    ]
    # A decorator is outside of all statements.
    if not inside:
        return PARTS[mutant.part][1].split()
    statement = max(inside, key=lambda node: node.lineno)
    body = getattr(statement, "body", None)
    last = body[0].lineno - 1 if body else statement.end_lineno
    by_line = data.contexts_by_lineno(str(path))
    lines = range(statement.lineno, max(statement.lineno, last) + 1)
    contexts = {context for line in lines for context in by_line.get(line, ())}
    if "" in contexts or not contexts:
        return PARTS[mutant.part][1].split()
    return sorted({context.rpartition("|")[0] for context in contexts})


def own_copy() -> None:
    """Gives a worker a copy of the tree to change, and imports the heavy packages once."""
    global FOLDER
    FOLDER = tempfile.TemporaryDirectory()
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, check=True, capture_output=True)
    for name in listed.stdout.decode().splitlines():
        target = pathlib.Path(FOLDER.name, name)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, target)
    os.chdir(FOLDER.name)
    os.environ.update(PYTHONPATH=FOLDER.name, TF_CPP_MIN_LOG_LEVEL="3")
    sys.path.insert(0, FOLDER.name)
    sys.dont_write_bytecode = True
    for module in ("keras", "scipy.stats", "sklearn.linear_model", "hypothesis", "pyarrow.parquet"):
        importlib.import_module(module)


def tried(work: tuple[Mutant, list[str], float]) -> dict:
    """Returns whether the tests detect a mutant, in a forked process."""
    mutant, tests, limit = work
    operator = get_operator(mutant.operator)()
    path = pathlib.Path(mutant.path)
    context = multiprocessing.get_context("fork")
    begun = time.monotonic()
    with use_mutation(path, operator, mutant.occurrence) as (before, after):
        process = context.Process(target=run, args=(tests,))
        process.start()
        process.join(limit)
        late = process.is_alive()
        if late:
            os.killpg(process.pid, signal.SIGKILL)
            process.join()
        diff = difflib.unified_diff(before.splitlines(), (after or "").splitlines(), n=1)
    return {
        "mutant": mutant.name,
        "file": key(mutant)[1],
        "part": mutant.part,
        "killed": after is not None and process.exitcode != 0,
        "late": late,
        "tests": len(tests),
        "seconds": time.monotonic() - begun,
        "diff": "\n".join(diff),
    }


def run(tests: list[str]) -> None:
    """Runs tests until one fails, in a new process group, and exits with their code."""
    os.setsid()
    # Heads refuse arrays of labels in a worker process, and tests would fail without any change.
    multiprocessing.process._parent_process = None
    null = os.open(os.devnull, os.O_RDWR)
    for stream in range(3):
        os.dup2(null, stream)
    _exit(int(pytest.main(["-x", "-q", "-p", "no:cacheprovider", *tests])))


def report(results: list[dict]) -> None:
    """Prints the share of detected mutants by part, and the survivors."""
    print("| part | mutants | found by the tests |\n|---|---|---|")
    for part in (*PARTS, None):
        some = [result for result in results if part in (result["part"], None)]
        if some:
            killed = sum(result["killed"] for result in some)
            print(f"| {part or 'all'} | {len(some)} | {killed} ({killed / len(some):.0%}) |")
    for result in results:
        if not result["killed"]:
            print(f"\n{result['mutant']}\n{result['diff']}")


if __name__ == "__main__":
    main()
