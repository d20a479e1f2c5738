"""Errors have no labels and no key in the frames of the library, which error trackers send."""

from __future__ import annotations

import inspect
import json
import os
import traceback

import numpy as np
import pytest

import tf_labeldp as ldp
from tf_labeldp.mechanisms import HistogramMechanism, RandomizedResponse
from tf_labeldp.scale import ReleaseKey
from tf_labeldp.vault import Keyed, PrivateLabels

LABELS = np.random.default_rng(8).integers(0, 4, 137)
IDS = np.arange(LABELS.size)
BUDGET = ldp.PrivacyBudget(4.0)


def errors_of(error):
    found, waiting = [], [error]
    while waiting:
        if (part := waiting.pop()) is not None and part not in found:
            found.append(part)
            waiting += [part.__cause__, part.__context__]
    return found


def values_in(value, depth=0):
    """Yields a value, its items, and its attributes as a tracker prints them."""
    yield value
    if depth < 4 and isinstance(value, (list, tuple, set, frozenset)):
        for part in value:
            yield from values_in(part, depth + 1)
    elif depth < 4 and isinstance(value, dict):
        for part in value.values():
            yield from values_in(part, depth + 1)
    elif (
        depth < 4 and type(value).__module__.startswith("tf_labeldp") and hasattr(value, "__dict__")
    ):
        yield from values_in(vars(value), depth + 1)


def is_secret(value, secrets):
    if isinstance(value, (bytes, bytearray)):
        return any(secret in value for secret in secrets)
    if isinstance(value, str):
        return any(secret.hex() in value for secret in secrets)
    if isinstance(value, np.ndarray) and value.dtype.kind in "iuf" and value.size >= 20:
        flat = value.ravel()
        return bool(np.isin(LABELS[:20], flat).all() and (flat[:20] == LABELS[:20]).all())
    if isinstance(value, list) and len(value) >= 20:
        return value[:20] == LABELS[:20].tolist()
    return False


def leaks_of(error, secrets=()):
    """Returns the library's local variables with true labels or a key, by function and name."""
    return [
        f"{frame.f_code.co_filename.rpartition('/')[2]}: {frame.f_code.co_name}: {name}"
        for part in errors_of(error)
        for frame, _ in traceback.walk_tb(part.__traceback__)
        if "/tf_labeldp/" in frame.f_code.co_filename
        for name, value in frame.f_locals.items()
        if any(is_secret(found, secrets) for found in values_in(value))
    ]


def made(store, **arguments):
    return PrivateLabels(LABELS, 4, budget=BUDGET, store=store, **arguments)


def full_disk(store, patch):
    labels = made(store)

    def full(descriptor):
        raise OSError(28, "No space left on device")

    patch.setattr(os, "fsync", full)
    labels.randomize(RandomizedResponse(1.0, 4))


def full_disk_at_first(store, patch):
    def full(descriptor):
        raise OSError(28, "No space left on device")

    patch.setattr(os, "fsync", full)
    made(store)


def wrong_store(store, patch):
    made(store)
    PrivateLabels(LABELS[::-1].copy(), 4, store=store)


def another_kind(store, patch):
    made(store)
    PrivateLabels(LABELS, 5, store=store)


def outside_the_classes(store, patch):
    PrivateLabels(LABELS, 3, budget=BUDGET)


def a_damaged_store(store, patch):
    made(store).randomize(RandomizedResponse(1.0, 4))
    (store / "records" / "000000").write_bytes(b"damaged")
    made(store)


def a_failed_draw(store, patch):
    calls = []

    def fails(self, labels, *unused, **also):
        calls.append(1)
        if np.array_equal(labels, LABELS):
            raise ValueError(f"label {labels[0]}")
        return np.zeros(len(labels), int)

    patch.setattr(RandomizedResponse, "randomize", fails)
    made(store).randomize(RandomizedResponse(1.0, 4))


def an_interrupted_draw(store, patch):
    def stops(self, labels, *unused, **also):
        raise KeyboardInterrupt

    patch.setattr(RandomizedResponse, "randomize", stops)
    made(store).randomize(RandomizedResponse(1.0, 4))


def a_failed_statistic(store, patch):
    def fails(self, labels, *unused, **also):
        if np.array_equal(labels, LABELS):
            raise MemoryError
        return np.zeros(4)

    patch.setattr(HistogramMechanism, "release", fails)
    made(store).release(HistogramMechanism(1.0, 4))


def above_the_budget(store, patch):
    made(store).randomize(RandomizedResponse(5.0, 4))


def wrong_arrivals(store, patch):
    labels = made(store)
    labels.extend(LABELS, rows=[0, 1])


def repeated_ids(store, patch):
    labels = made(store, draws=Keyed(np.zeros(LABELS.size, int)))
    labels.randomize(RandomizedResponse(1.0, 4))


def a_keyed_draw_on_a_full_disk(store, patch):
    labels = made(store, draws=Keyed(IDS))

    def full(descriptor):
        raise OSError(28, "No space left on device")

    patch.setattr(os, "fsync", full)
    labels.randomize(RandomizedResponse(1.0, 4))


def a_key_of_other_labels(store, patch):
    made(store, draws=Keyed(IDS))
    made(store.with_name("other"), draws=Keyed(IDS))
    (store / "labels.key").write_bytes((store.with_name("other") / "labels.key").read_bytes())
    ReleaseKey(store / "labels.key").guarantee()


def a_damaged_key(store, patch):
    made(store, draws=Keyed(IDS))
    path = store / "labels.key"
    path.write_text(path.read_text().replace('"checksum": "', '"checksum": "0'))
    ReleaseKey(path)


def a_head_of_an_array(store, patch):
    ldp.PrivateRidge(1.0, num_classes=3).fit(np.ones((LABELS.size, 2)), LABELS)


def a_front_door(store, patch):
    ldp.PrivateClassifier(epsilon=1.0, num_classes=3).fit(np.ones((LABELS.size, 2)), LABELS)


FAULTS = [
    full_disk, full_disk_at_first, wrong_store, another_kind, outside_the_classes, a_damaged_store,
    a_failed_draw, an_interrupted_draw, a_failed_statistic, above_the_budget, wrong_arrivals,
    repeated_ids, a_keyed_draw_on_a_full_disk, a_key_of_other_labels, a_damaged_key,
    a_head_of_an_array, a_front_door,
]  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_no_error_has_labels_or_keys_in_the_frames_of_the_library(fault, store, monkeypatch):
    with pytest.raises(BaseException) as caught:
        with monkeypatch.context() as patch:
            fault(store, patch)
    error = caught.value
    assert not isinstance(error, (AssertionError, AttributeError, NameError)), error
    keys = [path.read_bytes() for path in store.parent.rglob("labels.key")]
    secrets = [bytes.fromhex(json.loads(key)["secret"]) for key in keys]
    assert leaks_of(error, secrets) == []


def private_functions():
    """All functions and methods of the library with an argument of private labels."""
    import importlib

    import tf_labeldp
    from tf_labeldp import _validate

    home = os.path.dirname(inspect.getfile(tf_labeldp))
    for folder, _, files in os.walk(home):
        for file in files:
            path = os.path.join(folder, file)
            if not file.endswith(".py") or "Private[" not in open(path).read():
                continue
            name = "tf_labeldp." + os.path.relpath(path, home)[:-3].replace(os.sep, ".")
            if name.split(".")[1] == "scale":  # Engines are extras; their steps have no arrays.
                continue
            module = importlib.import_module(name.removesuffix(".__init__"))
            for value in vars(module).values():
                if getattr(value, "__module__", None) != module.__name__:
                    continue
                methods = vars(value).values() if inspect.isclass(value) else [value]
                for function in methods:
                    function = getattr(function, "__func__", function)
                    if not inspect.isfunction(function):
                        continue
                    notes = inspect.unwrap(function).__annotations__.values()
                    if any(str(note).startswith("Private[") for note in notes):
                        yield f"{name}.{function.__qualname__}", function
    del _validate


def test_every_function_of_private_labels_clears_its_frames():
    """Each is called with labels for all of its arguments, and most refuse them."""
    tried = []
    for name, function in private_functions():
        inner = inspect.unwrap(function)
        needed = [
            argument
            for argument in inspect.signature(inner).parameters.values()
            if argument.default is argument.empty and argument.kind < argument.VAR_POSITIONAL
        ]
        # The last argument fails at its first use, at the latest.
        with pytest.raises(BaseException) as caught:
            function(*[LABELS for _ in needed], **{"not an argument": LABELS})
        assert leaks_of(caught.value) == [], name
        assert function is not inner, f"{name} lacks _validate.clears_frames"
        tried.append(name)
    assert len(tried) > 40


def test_a_key_shows_no_secret(tmp_path):
    key = ReleaseKey.create(tmp_path / "k")
    secret = key.secret
    assert len(secret) == 32
    shown = [repr(key), *map(repr, values_in(vars(key)))]
    assert not any(repr(secret) in text or secret.hex() in text for text in shown)


def test_an_error_that_the_caller_handles_keeps_its_frames():
    """Only what the library called is cleared."""

    def own(value):
        raise KeyError(value)

    try:
        own("mine")
    except KeyError as error:
        with pytest.raises(ValueError):
            PrivateLabels(LABELS, 3, budget=BUDGET)
        assert error.__traceback__.tb_next.tb_frame.f_locals == {"value": "mine"}


def test_half_built_objects_have_a_repr():
    """A tracker prints the object whose constructor failed."""
    from tf_labeldp.vault import private_labels

    found = [PrivateLabels]
    for value in (*vars(private_labels).values(), *vars(ldp.vault).values(), ReleaseKey):
        is_ours = inspect.isclass(value) and value.__module__.startswith("tf_labeldp")
        if is_ours and "__repr__" in vars(value):
            found.append(value)
    assert {kind.__name__ for kind in found} >= {"PrivateLabels", "ReleaseKey"}
    for kind in found:
        if not issubclass(kind, (BaseException, tuple)) and not hasattr(
            kind, "__dataclass_fields__"
        ):
            assert isinstance(repr(object.__new__(kind)), str)
