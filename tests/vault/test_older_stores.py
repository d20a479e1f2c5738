"""Stores and keys of version 0.3 open with their spending and draws; older ones are refused.

Version 0.3.0 (commit 1247336) made `of_0_3`: a store of each kind of labels, of users, of labels
that came later, with keyed draws, and a project of two; and a key of 0.2 that it had brought to its
format. `expected.json` has the statements, histories and draws of that version.
"""

from __future__ import annotations

import hashlib
import json
import pathlib
import shutil

import keras
import numpy as np
import pytest

import tf_labeldp as ldp
from tf_labeldp import mechanisms
from tf_labeldp.scale import ReleaseKey
from tf_labeldp.vault import (
    Classes,
    Keyed,
    LabelStoreError,
    Numbers,
    PrivateLabels,
    Rows,
    Users,
    forget,
)

OF_0_3 = pathlib.Path(__file__).parent / "of_0_3"
EXPECTED = json.loads((OF_0_3 / "expected.json").read_text())
Y = [0, 1, 2, 1, 0, 2, 1, 1]
RR = mechanisms.RandomizedResponse(1.0, 3)
RR_OF_TWO = mechanisms.RandomizedResponse(1.0, 2)
ARGUMENTS = {
    "classes": {"labels": Y, "num_classes": 3},
    "named": {"labels": ["no", "yes", "no", "yes"], "kind": Classes(["no", "yes"])},
    "numbers": {"labels": np.linspace(0, 1, 8), "kind": Numbers(0.0, 1.0)},
    "rows": {"labels": np.eye(3, dtype=int)[Y], "kind": Rows(3)},
    "users": {
        "labels": Y,
        "num_classes": 3,
        "users": Users(np.arange(8) // 3, at_most=2),
    },
    "later": {"labels": Y, "num_classes": 3},
    "keyed": {
        "labels": Y,
        "num_classes": 3,
        "draws": Keyed([f"p{i}" for i in range(8)]),
    },
    "project/a": {"labels": Y, "num_classes": 3},
    "project/b": {"labels": [0, 1] * 4, "num_classes": 2},
}


@pytest.fixture
def old(tmp_path):
    """A copy of the folder for one test."""
    return pathlib.Path(shutil.copytree(OF_0_3, tmp_path / "old"))


def opened(folder, name):
    arguments = dict(ARGUMENTS[name])
    return PrivateLabels(arguments.pop("labels"), store=folder / name, **arguments)


def draws_of(name, vault):
    """Asks for the draws that version 0.3 made."""
    if name == "classes":
        counts = vault.release(mechanisms.HistogramMechanism(0.5, 3), key="counts")
        part = vault.randomize(
            mechanisms.RRWithPrior(1.0, 3), np.array([5, 1]), counts.priors(), key="part"
        )
        return {"counts": counts, "randomized-response": vault.randomize(RR), "part": part}
    if name == "numbers":
        return {
            "label-randomizer": vault.randomize(ldp.LabelRandomizer(1.0)),
            "laplace": vault.randomize(mechanisms.LaplaceMechanism(0.5, 0.0, 1.0), key="laplace"),
        }
    if name == "later":
        return {"daily": vault.randomize(RR, key="daily")}
    if name == "project/b":
        return {"randomized-response": vault.randomize(mechanisms.RandomizedResponse(0.5, 2))}
    return {"randomized-response": vault.randomize(RR_OF_TWO if name in ("named", "rows") else RR)}


def test_all_stores_have_arguments_here():
    assert set(ARGUMENTS) == set(EXPECTED)


@pytest.mark.parametrize("name", ARGUMENTS)
def test_a_store_of_0_3_keeps_its_draws_and_spending(name, old, no_new_randomness):
    for _ in range(2):  # The first opening brings it to the present format.
        vault = opened(old, name)
        expected = EXPECTED[name]
        stated = vault.guarantee()
        assert (stated.epsilon, stated.delta) == (expected["epsilon"], expected["delta"])
        assert str(vault.history()) == expected["history"]
    no_new_randomness()
    draws = draws_of(name, vault)
    assert set(draws) == set(expected["draws"])
    for key, found in draws.items():
        np.testing.assert_array_equal(found.values, expected["draws"][key])
    assert vault.guarantee().epsilon == expected["epsilon"]


@pytest.mark.parametrize("name", ARGUMENTS)
def test_with_other_labels_it_is_refused(name, old):
    arguments = dict(ARGUMENTS[name])
    labels = np.asarray(arguments.pop("labels"))[::-1].copy()
    if name == "rows":
        labels = labels[:, ::-1]
    if name == "numbers":
        labels = labels**2
    with pytest.raises(LabelStoreError, match="made for other labels"):
        PrivateLabels(labels, store=old / name, **arguments)


def test_a_key_of_0_3_has_the_same_statement(old):
    assert ReleaseKey(old / "key" / "labels.key").guarantee().epsilon == 2.0


def test_weights_of_a_model_of_0_3_are_recognized_in_a_copy():
    """Only the file knows them: no training in this process had these values."""
    model = ldp.load_model(OF_0_3.parents[1] / "dossier" / "of_0_3" / "card" / "model.keras")
    copy = keras.models.clone_model(model)
    copy.set_weights(model.get_weights())
    assert ldp.guarantee(copy).epsilon == ldp.guarantee(model).epsilon > 0.0


def header(folder, **fields):
    content = {"label_set": "0" * 32, "num_labels": 60, "num_classes": 3, **fields}
    (folder / "header.json").write_text(json.dumps(content))


@pytest.mark.parametrize(("version", "advice"), [(1, "0.1 wrote format 1"), (2, "0.3 once")])
def test_a_store_of_0_1_or_0_2_is_refused_with_what_to_do(version, advice, tmp_path):
    header(tmp_path, format=version)
    before = (tmp_path / "header.json").read_bytes()
    for open_it in (
        lambda: PrivateLabels(Y, 3, budget=ldp.PrivacyBudget(1.0), store=tmp_path),
        lambda: ldp.dossier.report(tmp_path),
        lambda: forget(tmp_path),
    ):
        with pytest.raises(LabelStoreError, match=rf"has format {version}, .*{advice}"):
            open_it()
    assert {path.name for path in tmp_path.iterdir()} <= {"header.json", ".lock"}
    assert (tmp_path / "header.json").read_bytes() == before


def test_a_key_of_0_2_is_refused_with_what_to_do(tmp_path):
    """Its releases are in the file: without them, spending would be forgotten."""
    path = tmp_path / "labels.key"
    content = {"format": 1, "secret": "0" * 64, "labels": {}, "releases": {"a": {}}}
    path.write_text(json.dumps(content))
    before = path.read_bytes()
    with pytest.raises(LabelStoreError, match=r"key file of 0\.2.*0\.3 once"):
        ReleaseKey(path).guarantee()
    assert path.read_bytes() == before


def test_a_header_without_the_kind_of_its_labels_is_refused(tmp_path):
    PrivateLabels([0, 1] * 9, 2, budget=ldp.PrivacyBudget(1.0), store=tmp_path / "s")
    path = tmp_path / "s" / "header.json"
    fields = json.loads(path.read_text())
    kept = {name: fields[name] for name in fields if name not in ("num_classes", "digest")}
    seal = hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()
    path.write_text(json.dumps({**kept, "digest": seal}))
    with pytest.raises(LabelStoreError, match=r"header\.json is damaged"):
        ldp.dossier.report(tmp_path / "s")
