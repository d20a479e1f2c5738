"""Files of a newer version are refused as such: nothing in them is called damaged or edited."""

from __future__ import annotations

import contextlib
import hashlib
import json
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tf_labeldp as ldp
from tf_labeldp.accounting import Receipt, ReceiptError
from tf_labeldp.mechanisms import Mechanism, RandomizedResponse
from tf_labeldp.vault import LabelStoreError, NoisyLabels, PrivateLabels

N = 60
Y = np.arange(N) % 3
X = np.random.default_rng(0).normal(size=(N, 4))
NEWER = r"written by a newer version of tf-labeldp \(9\.1\), with the field 'weather', .* Update"


def sealed(fields: dict[str, Any]) -> dict[str, Any]:
    rest = {name: value for name, value in fields.items() if name != "digest"}
    text = json.dumps(rest, sort_keys=True).encode()
    return {**rest, "digest": hashlib.sha256(text).hexdigest()}


def without_weather(data: Any) -> Any:
    if isinstance(data, dict):
        return {name: without_weather(part) for name, part in data.items() if name != "weather"}
    return list(map(without_weather, data)) if isinstance(data, list) else data


@contextlib.contextmanager
def version_9_1(change: Callable[[dict[str, Any]], Any]) -> Iterator[None]:
    """Writes receipts as a newer version does, which adds a field, and reads them."""
    write, read = Receipt.to_json, Receipt.from_json

    def to_json(self: Receipt) -> dict[str, Any]:
        fields = json.loads(json.dumps({**write(self), "version": "9.1"}))
        change(fields)
        return sealed(fields)

    def from_json(cls: type[Receipt], data: dict[str, Any], **settings: Any) -> Receipt:
        return read(sealed(without_weather(data)), **settings)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Receipt, "to_json", to_json)
        patch.setattr(Receipt, "from_json", classmethod(from_json))
        yield


FIELDS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "the receipt": lambda fields: fields.update(weather="fair"),
    "its label set": lambda fields: fields["labels"].update(weather="fair"),
    "its charge": lambda fields: fields["charge"].update(weather="fair"),
    "an assumption": lambda fields: fields["charge"]["assumptions"][0].update(weather="fair"),
}


def a_vault(folder: Path | None = None) -> PrivateLabels:
    return PrivateLabels(Y, 3, budget=ldp.PrivacyBudget(20.0, 1e-6), store=folder)


def noisy_labels() -> NoisyLabels:
    prior = np.array([0.2, 0.3, 0.5])  # an array, which statements name as an assumption
    return a_vault().randomize(ldp.mechanisms.RRWithPrior(1.0, 3), priors=prior)


def in_a_store(folder: Path) -> Callable[[], Any]:
    prior = np.array([0.2, 0.3, 0.5])
    a_vault(folder / "store").randomize(ldp.mechanisms.RRWithPrior(1.0, 3), priors=prior)
    return lambda: a_vault(folder / "store")


def in_noisy_labels(folder: Path) -> Callable[[], Any]:
    noisy_labels().save(folder / "noisy")
    return lambda: NoisyLabels.load(folder / "noisy")


def in_a_model(folder: Path) -> Callable[[], Any]:
    import keras

    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3)])
    model.compile("sgd", keras.losses.CategoricalCrossentropy(from_logits=True))
    ldp.fit(model, X, noisy_labels(), targets="posterior", verbose=0)
    model.save(folder / "model.keras")
    return lambda: ldp.load_model(folder / "model.keras")


def in_a_head(folder: Path) -> Callable[[], Any]:
    vault = a_vault()
    head = ldp.PrivateLogisticRegression(1.0, 1e-6).fit(X, vault)
    (folder / "head.pickle").write_bytes(pickle.dumps(head))
    return lambda: pickle.loads((folder / "head.pickle").read_bytes())


FILES = {
    "store": in_a_store,
    "noisy labels": in_noisy_labels,
    "model": in_a_model,
    "head": in_a_head,
}


@pytest.mark.parametrize("place", FIELDS)
@pytest.mark.parametrize("kind", FILES)
def test_a_receipt_of_a_newer_version_is_no_damage(tmp_path: Path, kind: str, place: str) -> None:
    with version_9_1(FIELDS[place]):
        read = FILES[kind](tmp_path)
        read()  # The newer version reads it.
    expected = LabelStoreError if kind == "store" else ReceiptError
    with pytest.raises(expected, match=NEWER) as caught:
        read()
    for word in ("damaged", "edited", "Restore"):
        assert word not in str(caught.value)


@pytest.mark.parametrize("kind", FILES)
def test_a_file_of_this_version_is_read(tmp_path: Path, kind: str) -> None:
    FILES[kind](tmp_path)()


def test_a_mechanism_of_a_newer_version_is_no_damage() -> None:
    fields = RandomizedResponse(1.0, 3).to_json()
    fields["config"]["weather"] = "fair"
    with pytest.raises(ReceiptError, match=r"edited, or .* newer .* 'weather' of RandomizedR"):
        Mechanism.from_json(fields)
