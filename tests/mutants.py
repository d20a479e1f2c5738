"""Changes single places of the privacy core, and says which changes no fast test sees.

``make mutants`` runs it. A change that survives the tests is a test that is missing, or makes no
difference; docs/coverage.md lists them. The sample is fixed by ``--seed``; a run that was stopped
goes on where it was.
"""

from __future__ import annotations

import argparse
import ast
import collections
import json
import multiprocessing
import os
import pathlib
import random
import shutil
import subprocess
import sys
import tempfile
import time

from cosmic_ray.ast import ast_nodes, get_ast_from_path
from cosmic_ray.mutating import mutate_and_test
from cosmic_ray.plugins import get_operator, operator_names
from cosmic_ray.work_item import MutationSpec, TestOutcome
from tqdm import tqdm

ROOT = pathlib.Path(__file__).parents[1]
# Files of the privacy core, and the fast tests of their part: the likeliest first.
PARTS = {
    "accounting": ("tf_labeldp/accounting/*.py", "tests/accounting tests/ledger"),
    "mechanisms": ("tf_labeldp/mechanisms/*.py", "tests/mechanisms tests/estimation"),
    "vault": ("tf_labeldp/vault/*.py", "tests/vault tests/scale/test_keyed_draws.py tests/ledger"),
    "clipping": (
        "tf_labeldp/gradients/_*clip*.py",
        "tests/gradients tests/training/test_label_dp_model_privacy.py",
    ),
    "noise": (
        "tf_labeldp/training/_gaussian_noise.py tf_labeldp/training/_integer_normal.py "
        "tf_labeldp/training/_normal_draws.py tf_labeldp/training/_chacha.py",
        "tests/training/test_gaussian_noise.py tests/training/test_integer_noise.py "
        "tests/training/test_device_noise.py tests/training/test_label_dp_model_privacy.py",
    ),
    "release": (
        "tf_labeldp/heads/_one_release_head.py",
        "tests/heads/test_head_guarantee.py tests/heads/test_private_ridge.py "
        "tests/heads/test_private_logistic_regression.py tests/heads/test_allocation.py "
        "tests/heads/test_public_rows.py tests/heads/test_fits_on_arrays.py",
    ),
}


def main() -> None:
    """Runs the mutants and prints those that survived."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mutants", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--output", type=pathlib.Path, default=ROOT / "build" / "mutants.jsonl")
    args = parser.parse_args()
    chosen = sample(args.mutants, args.seed)
    args.output.parent.mkdir(exist_ok=True)
    done = {}
    if args.output.exists():
        done = {one["mutant"]: one for one in map(json.loads, open(args.output))}
    left = [one for one in chosen if name_of(one) not in done]
    context = multiprocessing.get_context("spawn")
    limits = context.Manager().dict()
    with context.Pool(args.jobs, own_copy, (limits,)) as pool, open(args.output, "a") as file:
        for result in tqdm(pool.imap_unordered(tried, left), total=len(left), unit="mutant"):
            file.write(json.dumps(result) + "\n")
            file.flush()
            done[result["mutant"]] = result
    report([done[name_of(one)] for one in chosen])


def sample(size: int, seed: int) -> list[tuple[str, dict]]:
    """Returns mutants: places of the core, uniformly, and at each any change that it allows."""
    places = collections.defaultdict(list)
    for part, (files, _) in PARTS.items():
        for path in sorted(path for some in files.split() for path in ROOT.glob(some)):
            words = annotations(path)
            tree = get_ast_from_path(path)
            for name in operator_names():
                if get_operator(name).arguments():
                    continue
                operator = get_operator(name)()
                found = (p for node in ast_nodes(tree) for p in operator.mutation_positions(node))
                for occurrence, (start, end) in enumerate(found):
                    if any(first <= start < last for first, last in words):
                        continue
                    change = {
                        "module_path": str(path.relative_to(ROOT)),
                        "operator_name": name,
                        "occurrence": occurrence,
                        "start_pos": start,
                        "end_pos": end,
                    }
                    places[part, str(path), start].append((part, change))
    rng = random.Random(seed)
    return [rng.choice(places[one]) for one in rng.sample(sorted(places), size)]


def annotations(path: pathlib.Path) -> list[tuple]:
    """Returns where a file has types, which nothing runs."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        for name in ("annotation", "returns"):
            if (one := getattr(node, name, None)) is not None:
                found.append(((one.lineno, one.col_offset), (one.end_lineno, one.end_col_offset)))
    return found


def name_of(mutant: tuple[str, dict]) -> str:
    """Returns a name that is the same in each run."""
    change = mutant[1]
    where = ":".join(map(str, (change["module_path"], *change["start_pos"])))
    return f"{where} {change['operator_name'].removeprefix('core/')} {change['occurrence']}"


def own_copy(limits: dict) -> None:
    """Gives a worker a copy of the tree to change."""
    global LIMITS, _FOLDER
    LIMITS, _FOLDER = limits, tempfile.TemporaryDirectory()
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, check=True, capture_output=True)
    for name in listed.stdout.decode().splitlines():
        target = pathlib.Path(_FOLDER.name, name)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, target)
    os.chdir(_FOLDER.name)
    os.environ.update(PYTHONPATH=_FOLDER.name, TF_CPP_MIN_LOG_LEVEL="2")


def tried(mutant: tuple[str, dict]) -> dict:
    """Returns whether the tests of a part see a mutant."""
    part, change = mutant
    command = f"{sys.executable} -m pytest -x -q -p no:cacheprovider {PARTS[part][1]}"
    if part not in LIMITS:  # once a part: without a change all tests pass
        begun = time.monotonic()
        subprocess.run(command.split(), check=True, capture_output=True)
        LIMITS[part] = 30.0 + 4.0 * (time.monotonic() - begun)
    spec = MutationSpec(**{**change, "module_path": pathlib.Path(change["module_path"])})
    result = mutate_and_test([spec], command, LIMITS[part])
    return {
        "mutant": name_of(mutant),
        "part": part,
        "killed": result.test_outcome == TestOutcome.KILLED,
        "outcome": str(result.test_outcome),
        "diff": result.diff,
    }


def report(results: list[dict]) -> None:
    """Prints how many died in each part, and those that did not."""
    print("| part | mutants | found by the tests |\n|---|---|---|")
    for part in (*PARTS, None):
        some = [one for one in results if part in (one["part"], None)]
        if some:
            killed = sum(one["killed"] for one in some)
            print(f"| {part or 'all'} | {len(some)} | {killed} ({killed / len(some):.0%}) |")
    for one in results:
        if not one["killed"]:
            print(f"\n{one['mutant']} ({one['outcome']})\n{one['diff']}")


if __name__ == "__main__":
    main()
