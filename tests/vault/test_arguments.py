"""The arguments of a vault: options are values, and those of 0.3 warn for one version."""

from __future__ import annotations

import functools
import inspect
import warnings

import numpy as np
import pytest

from tf_labeldp import BudgetExceededError, PrivacyBudget, PrivateLabels, _validate
from tf_labeldp.mechanisms import RandomizedResponse
from tf_labeldp.self_supervised import strong_views
from tf_labeldp.vault import (
    Classes,
    ClusterRandomizedResponse,
    Keyed,
    LabelKind,
    LabelRandomizer,
    Numbers,
    Rows,
    Store,
    Users,
    confirm_move,
    forget,
)

REPLACED = _validate.REPLACED["PrivateLabels"]
Y = np.arange(6) % 2
OWNERS = np.array([0, 0, 0, 1, 1, 2])
BUDGET = PrivacyBudget(4.0)


def settings_of(vault):
    """The public facts that the arguments of a vault decide."""
    users = None if vault.users is None else vault.users.tolist()
    return vault.kind, len(vault), users, vault.store_path


CASES = {
    "classes": (
        {"classes": ["no", "yes"]},
        {"kind": Classes(["no", "yes"])},
        np.array(["no", "yes"])[Y],
    ),
    "low": ({"low": 0, "high": 1}, {"kind": Numbers(0, 1)}, Y),
    "high": ({"low": -1, "high": 1}, {"kind": Numbers(-1, 1)}, Y),
    "clip": ({"low": 0, "high": 0.5, "clip": True}, {"kind": Numbers(0, 0.5, clip=True)}, Y),
    "num_labels": ({"num_labels": 2}, {"kind": Rows(2)}, np.eye(2, dtype=int)[Y]),
    "project": (
        {"kind": 2, "store": "study/{}", "project": True},
        {"kind": 2, "store": Store("study/{}", project=True)},
        Y,
    ),
    "actor": (
        {"kind": 2, "store": "{}", "actor": "Ada"},
        {"kind": 2, "store": Store("{}", actor="Ada")},
        Y,
    ),
    "ids": (
        {"kind": 2, "draws": "keyed", "ids": np.arange(6) + 9, "store": "{}"},
        {"kind": 2, "draws": Keyed(np.arange(6) + 9), "store": "{}"},
        Y,
    ),
    "max_examples_per_user": (
        {"kind": 2, "users": OWNERS, "max_examples_per_user": 2},
        {"kind": 2, "users": Users(OWNERS, at_most=2)},
        Y,
    ),
}
"""For each argument of 0.3: a call with it, the call of today, and labels."""


def opened(arguments, labels, folder):
    """A vault whose store, if it has one, is in the folder; with its draw, where it has classes."""
    store = arguments.get("store")
    if isinstance(store, Store):
        path = folder / str(store.path).format("new")
        arguments = arguments | {"store": Store(path, project=store.project, actor=store.actor)}
    elif store is not None:
        arguments = arguments | {"store": folder / store.format("old")}
    vault = PrivateLabels(labels, **arguments, budget=BUDGET)
    if isinstance(vault.kind, Classes):
        vault.randomize(RandomizedResponse(0.5, 2), key="draw")
    return vault


@pytest.mark.parametrize("name", REPLACED)
def test_an_argument_of_0_3_warns_and_does_the_same(name, tmp_path):
    old, new, labels = CASES[name]
    with pytest.warns(DeprecationWarning, match=rf"PrivateLabels\({name}=\) goes") as caught:
        before = opened(old, labels, tmp_path)
    found = [str(each.message) for each in caught if each.category is DeprecationWarning]
    assert len(found) == len(set(old) & set(REPLACED))
    assert any(text.endswith(f"Write {REPLACED[name]}.") for text in found)
    after = opened(new, labels, tmp_path)
    assert settings_of(before)[:3] == settings_of(after)[:3]
    for first, second in zip(before.receipts, after.receipts, strict=True):
        assert (first.actor, first.charge, first.key) == (second.actor, second.charge, second.key)
    if name == "project":
        # Each has counted the draw of the other.
        assert len(before.receipts) == 2 and before.remaining() == after.remaining() == 3.0


def test_warnings_name_the_line_of_the_call():
    with pytest.warns(DeprecationWarning) as caught:
        PrivateLabels(Y, low=0, high=1, budget=BUDGET)
    assert {each.filename for each in caught} == {__file__}
    with pytest.warns(DeprecationWarning):
        assert PrivateLabels(Y, 2, classes=[0, 1], budget=BUDGET).num_classes == 2


CLUSTERS = ClusterRandomizedResponse(2, 0.1, 4.0, resampling_probability=0.5)
RECEIPTS = (
    PrivateLabels(Y, 2, budget=PrivacyBudget(9.0)).randomize(RandomizedResponse(9.0, 2)).receipts
)


def stored(path):
    return PrivateLabels(Y, 2, budget=PrivacyBudget(3.0), store=path, insecure_seed=0)


def debiased(path, **old):
    return stored(path).randomize(CLUSTERS, clusters=[0] * 6).debiased(**old).tolist()


def total(path, **old):
    numbers = PrivateLabels(Y, Numbers(0, 3), budget=PrivacyBudget(3.0), insecure_seed=0)
    randomizer = LabelRandomizer(2.0)
    return randomizer.total(numbers.randomize(randomizer), **old)


def is_affordable(path, **old):
    try:
        stored(path).check_budget(RandomizedResponse(2.9, 2), **old)
    except BudgetExceededError:
        return False
    return True


def author(function, path, **old):
    stored(path)
    function(path, **old)
    return "Ada" in (path / "header.json").read_text()


OPTIONS = {
    "ClusterRandomizedResponse.for_epsilon": lambda path, **old: (
        ClusterRandomizedResponse.for_epsilon(1.0, 2, **old)
    ),
    "LabelRandomizer.total": total,
    "NoisyLabels.debiased": debiased,
    "PrivateLabels.check_budget": is_affordable,
    "confirm_move": functools.partial(author, confirm_move),
    "forget": functools.partial(author, forget),
    "strong_views": lambda path, **old: strong_views(**old).layers[1].get_config()["factor"],
}
"""For each other function that took more in 0.3: a call, with the path of a store."""
VALUES = {
    "ClusterRandomizedResponse.for_epsilon": {
        "bias_correction": (0.0, 0.1),
        "threshold": (None, 0.3),
    },
    "LabelRandomizer.total": {"seed": (0, 1)},
    "NoisyLabels.debiased": {"bias_correction": (None, 0.1)},
    "PrivateLabels.check_budget": {"receipts": ((), RECEIPTS)},
    "confirm_move": {"actor": (None, "Ada")},
    "forget": {"actor": (None, "Ada")},
    "strong_views": {"strength": (0.3, 0.2)},
}
"""For each of their arguments: the default, and another value."""


@pytest.mark.parametrize("owner", sorted(set(_validate.REPLACED) - {"PrivateLabels"}))
def test_an_option_of_0_3_warns_and_works_and_its_default_is_silent(owner, tmp_path):
    assert set(VALUES[owner]) == set(_validate.REPLACED[owner])
    for name, (default, other) in VALUES[owner].items():
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            before = OPTIONS[owner](tmp_path / name / "a", **{name: default})
            assert before == OPTIONS[owner](tmp_path / name / "b")
        with pytest.warns(DeprecationWarning) as caught:
            assert OPTIONS[owner](tmp_path / name / "c", **{name: other}) != before
        [text] = {str(each.message) for each in caught}
        assert text.startswith(f"{owner}({name}=) goes with version 0.5. Write ")
        assert {each.filename for each in caught} == {__file__}


def test_an_old_argument_by_place_warns_too():
    vault = PrivateLabels(Y, 2, budget=PrivacyBudget(99.0))
    with pytest.warns(DeprecationWarning, match=r"check_budget\(receipts=\)"):
        vault.check_budget(RandomizedResponse(1.0, 2), None, RECEIPTS)
    assert list(inspect.signature(vault.check_budget).parameters) == ["mechanism", "indices"]


def test_an_old_argument_may_be_an_array():
    vault = PrivateLabels(Y, 2, budget=PrivacyBudget(99.0))
    receipts = np.array([*RECEIPTS, *RECEIPTS], object)
    with pytest.warns(DeprecationWarning, match=r"check_budget\(receipts=\)"):
        vault.check_budget(RandomizedResponse(1.0, 2), receipts=receipts)


def test_at_most_ten_arguments():
    parameters = inspect.signature(PrivateLabels).parameters
    assert len(parameters) <= 10 and not set(parameters) & set(REPLACED)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_half_of_an_old_pair_is_refused():
    for arguments, message in [
        ({"ids": np.arange(6)}, r"draws=Keyed\(ids\)"),
        ({"max_examples_per_user": 2}, "Give both"),
        ({"project": True}, "needs a store"),
        ({"classes": [0, 1], "num_classes": 3}, "num_classes=3 but classes has 2"),
    ]:
        with pytest.raises(ValueError, match=message):
            PrivateLabels(Y, **{"num_classes": 2, **arguments}, budget=BUDGET)


def test_kinds_by_their_arguments():
    assert LabelKind.of(3) == Classes(3) and LabelKind.of(low=0, high=2) == Numbers(0, 2)
    assert LabelKind.of(num_labels=4) == Rows(4)


@pytest.mark.parametrize("number", [0, 1])
def test_too_few_classes_are_named(number):
    with pytest.raises(ValueError, match=f"num_classes must be at least 2, got {number}"):
        PrivateLabels(Y, number, budget=BUDGET)
