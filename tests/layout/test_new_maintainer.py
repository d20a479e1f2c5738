"""The first table of CONTRIBUTING.md is all that a newcomer needs: each addition is made and used.

Each row's addition is applied to a copy of the checkout, and touches the files that the row names,
in as many places as it says. Then it is used in a process of its own, and by the contract's tests.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[2]
ROW = re.compile(r"^\| (.*?) \| (.*?) \| (.*?) \| (\d+) / (\d+) \|$", re.M)
PATH = re.compile(r"`([\w/]+\.(?:py|md))`")


class Edit(NamedTuple):
    """A text that stands once in a file, and what takes its place."""

    file: str
    old: str
    new: str
    is_registration: bool = False  # in a list or a table that names each member


class Addition(NamedTuple):
    edits: Sequence[Edit]
    uses: Sequence[Sequence[str]]  # arguments of Python


PYTEST = ("-m", "pytest", "-q", "-p", "no:cacheprovider")

MECHANISM = Addition(
    [
        Edit(
            "tf_labeldp/mechanisms/channels.py",
            "def checked_table(",
            '''@dataclasses.dataclass(frozen=True)
class CircularResponse(ClassChannel, FrozenClassification):
    """Answers with a class near the label, where the last class is next to the first.

    Example:
        >>> CircularResponse(1.0, num_classes=4).randomize([0, 3]).shape
        (2,)
    """

    def table(self) -> np.ndarray:
        """Returns ``P[output | input]``, which falls with the distance on a circle."""
        angles = 2 * np.pi * np.arange(self.num_classes) / self.num_classes
        weights = np.exp(self.epsilon / 2 * np.cos(np.subtract.outer(angles, angles)))
        return weights / weights.sum(axis=1, keepdims=True)


def checked_table(''',
        ),
        Edit(
            "tf_labeldp/mechanisms/channels.py",
            "import ClassificationMechanism, WithoutPriors\n",
            "import ClassificationMechanism, FrozenClassification, WithoutPriors\n",
        ),
        Edit(
            "tf_labeldp/mechanisms/channels.py", "import abc\n", "import abc\nimport dataclasses\n"
        ),
        Edit(
            "tf_labeldp/mechanisms/__init__.py",
            "channels import ClassChannel\n",
            "channels import CircularResponse, ClassChannel\n",
        ),
        Edit(
            "tf_labeldp/mechanisms/__init__.py",
            '    "ClassChannel",\n',
            '    "CircularResponse",\n    "ClassChannel",\n',
            is_registration=True,
        ),
        Edit(
            "README.md",
            "`mechanisms.InformativeRR`",
            "`mechanisms.InformativeRR`, `mechanisms.CircularResponse`",
            is_registration=True,
        ),
    ],
    [
        (
            "-c",
            """
import tf_labeldp as ldp

mechanism = ldp.mechanisms.CircularResponse(1.0, num_classes=3)
labels = ldp.PrivateLabels([0, 1, 2] * 100, 3, budget=ldp.PrivacyBudget(1.0))
noisy = labels.randomize(mechanism)
assert noisy.guarantee().headline == "(1, 0)-label-DP" and noisy.debiased().shape == (300, 3)
assert ldp.mechanisms.check_mechanism(mechanism)
""",
        ),
        (
            *PYTEST,
            *("tests/mechanisms/test_contract.py", "tests/layout/test_public_api.py"),
            *("-k", "CircularResponse or in_the_table or test_public_api"),
        ),
    ],
)
LAYER_RULE = Addition(
    [
        Edit(
            "tf_labeldp/gradients/_layer_rules.py",
            "@rule_of(keras.layers.EinsumDense)\n",
            """@rule_of(keras.layers.PReLU)
def _prelu(layer: Any, input_shape: _Shape) -> TappedLayer | None:
    if layer.shared_axes:
        return None
    axes = tuple(range(1, len(input_shape)))
    rule = ScaleRule(tuple(layer.alpha.shape), axes, has_scale=True, has_offset=False)

    def factors(inputs: Any, outputs: Any, gradients: Any) -> Factors:
        return tf.minimum(inputs, 0.0), gradients

    return TappedLayer(layer, [LayerRule(rule, tuple(layer.trainable_variables), factors)])


@rule_of(keras.layers.EinsumDense)
""",
        ),
        Edit("docs/guide.md", "`PReLU`, ", ""),
        Edit(
            "docs/guide.md",
            "`TimeDistributed` |",
            "`TimeDistributed`, `PReLU` |",
            is_registration=True,
        ),
    ],
    [
        (*PYTEST, "tests/gradients/test_layer_rules.py", "-k", "PReLU", "-m", "slow or not slow"),
        (
            "-c",
            """
import keras, numpy as np
import tf_labeldp as ldp

labels = ldp.PrivateLabels(
    np.arange(40) % 2, 2, budget=ldp.PrivacyBudget(8.0, delta=1e-3), insecure_seed=0
)
model = keras.Sequential([keras.Input((3,)), keras.layers.PReLU(), keras.layers.Dense(2)])
loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
model.compile(keras.optimizers.SGD(0.1), loss)
x = np.random.default_rng(0).normal(size=(40, 3)).astype("float32")
private, batches, _ = ldp.make_private(
    model, epsilon=8.0, delta=1e-3, x=x, labels=labels, epochs=1, batch_size=20
)
before = model.layers[0].get_weights()[0]
private.fit(batches, verbose=0)
assert np.abs(model.layers[0].get_weights()[0] - before).min() > 0
assert private.guarantee().epsilon <= 8.0
""",
        ),
    ],
)
OPTION = Addition(
    [
        Edit(
            "tf_labeldp/cli/__init__.py",
            '    add("--method", choices=("auto", "head", "boosting"), default="auto",\n',
            '    add("--key", default="train", metavar="NAME",\n'
            '        help="name of this training in the store and its report (default: train)")\n'
            '    add("--method", choices=("auto", "head", "boosting"), default="auto",\n',
            is_registration=True,
        ),
        Edit("tf_labeldp/cli/_train.py", '"key": "train"', '"key": args.key'),
        Edit(
            "tests/cli/test_train.py",
            "def test_trees_if_they_are_asked_for(",
            """def test_a_name_of_the_training_is_in_the_report(csv):
    store, report = csv.parent / "store", csv.parent / "report"
    named = ("--key", "survey of 2026", "--method", "head")
    assert command(csv, *NAMES, *named, "--store", str(store)) == 0
    assert main(["report", str(store), "--output", str(report)]) == 0
    assert "(survey of 2026)" in (report / "report.html").read_text()


def test_trees_if_they_are_asked_for(""",
        ),
    ],
    [(*PYTEST, "tests/cli/test_train.py", "-k", "a_name_of_the_training")],
)
KIND = Addition(
    [
        Edit(
            "tf_labeldp/vault/label_kinds.py",
            "def _other_units(",
            '''@dataclasses.dataclass(frozen=True, init=False, repr=False)
class Counts(Numbers):
    """Labels that are whole numbers from 0 to a public end.

    Example:
        >>> Counts(9).encode([0, 9])
        array([0., 9.])
    """

    def __init__(self, most: int) -> None:
        super().__init__(0, most)

    def __repr__(self) -> str:
        return f"Counts({self.high:g})"

    @_validate.clears_frames
    def encode(self, labels: Private[Any]) -> np.ndarray:
        codes = super().encode(labels)
        if np.any(codes != np.rint(codes)):
            raise ValueError("labels must be whole numbers. Use Numbers for others.")
        return codes

    def describe(self) -> str:
        return f"whole numbers from 0 to {self.high:g}"

    def header(self) -> dict[str, Any]:
        return {**super().header(), "whole": True}


def _other_units(''',
        ),
        Edit(
            "tf_labeldp/vault/label_kinds.py",
            '        if "range" in header:\n',
            '        if "whole" in header:\n            return Counts(header["range"][1])\n'
            '        if "range" in header:\n',
            is_registration=True,
        ),
        Edit(
            "tf_labeldp/vault/__init__.py",
            "label_kinds import Classes, ",
            "label_kinds import Classes, Counts, ",
        ),
        Edit(
            "tf_labeldp/vault/__init__.py",
            '    "Classes",\n',
            '    "Classes",\n    "Counts",\n',
            is_registration=True,
        ),
        Edit(
            "docs/guide.md",
            "Suppose that one party holds the labels (amounts, counts, durations)",
            "Suppose that one party holds the labels (amounts, `vault.Counts`, durations)",
            is_registration=True,
        ),
        Edit(
            "tests/vault/test_label_kinds.py",
            '    "rows": (Rows(2)',
            '    "counts": (Counts(9), [9.0, 0.0], {"kind": Counts(9)}),\n    "rows": (Rows(2)',
            is_registration=True,
        ),
        Edit(
            "tests/vault/test_label_kinds.py",
            "vault import Classes, ",
            "vault import Classes, Counts, ",
        ),
    ],
    [
        (
            "-c",
            """
import tempfile
import numpy as np
import tf_labeldp as ldp
store = tempfile.mkdtemp()
drawn = []
for _ in range(2):
    budget = ldp.PrivacyBudget(1.0)
    labels = ldp.PrivateLabels([0, 3, 9] * 50, ldp.vault.Counts(9), budget=budget, store=store)
    drawn.append(labels.randomize(ldp.LabelRandomizer(1.0)).values)
np.testing.assert_array_equal(*drawn)
[found] = ldp.report(store).content["label_sets"]
assert found["kind"] == "whole numbers from 0 to 9" and found["remaining"] == 0.0
""",
        ),
        (*PYTEST, "tests/vault/test_label_kinds.py", "-k", "counts"),
    ],
)
ADDITIONS = {
    "a mechanism of classes": MECHANISM,
    "a rule for a Keras layer": LAYER_RULE,
    "an option of the command": OPTION,
    "a kind of label": KIND,
}


def rows():
    """Returns the rows of the table by what they add: files, and the numbers of both."""
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    return {
        name: (set(PATH.findall(write + register)), int(files), int(places))
        for name, write, register, files, places in ROW.findall(text)
    }


@pytest.mark.parametrize("name", ADDITIONS)
def test_a_row_names_the_files_and_places_of_its_addition(name):
    edits = ADDITIONS[name].edits
    named, files, places = rows()[name]
    assert named == {edit.file for edit in edits} and len(named) == files
    assert places == sum(edit.is_registration for edit in edits)
    for edit in edits:
        count = (ROOT / edit.file).read_text(encoding="utf-8").count(edit.old)
        assert count == 1, f"{edit.file} has {edit.old!r} {count} times"


def test_each_row_with_numbers_is_tried():
    assert rows().keys() == ADDITIONS.keys()


@pytest.fixture
def copy(tmp_path):
    """Returns a copy of the files of this checkout that git knows."""
    listed = ["git", "ls-files", "-z"]
    done = subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip("this is no checkout of git")
    for name in filter(None, done.stdout.split("\0")):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        if (ROOT / name).is_file():
            shutil.copy(ROOT / name, tmp_path / name)
    return tmp_path


@pytest.mark.slow
@pytest.mark.parametrize("name", ADDITIONS)
def test_an_addition_works_where_the_row_says(name, copy):
    for file, old, new, _ in ADDITIONS[name].edits:
        text = (copy / file).read_text(encoding="utf-8")
        (copy / file).write_text(text.replace(old, new), encoding="utf-8")
    for use in ADDITIONS[name].uses:
        done = subprocess.run(
            [sys.executable, *use],
            cwd=copy,
            env={**os.environ, "PYTHONPATH": str(copy)},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
        # Nothing passes because it was not found.
        assert use[:2] != PYTEST[:2] or re.search(r"\b[1-9]\d* passed", done.stdout), done.stdout
