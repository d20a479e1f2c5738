"""Compares a published file with its own statement and with the store that paid for it."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import pathlib
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from tf_labeldp._validate import counted
from tf_labeldp.accounting import PrivacyGuarantee, public_input
from tf_labeldp.accounting.provenance import (
    WEIGHTS_ASSUMED,
    array_digest,
    layers_of,
    own_weights,
    weight_digests,
)
from tf_labeldp.accounting.receipts import (
    Receipt,
    Receipts,
    compose_receipts,
    merge_receipts,
)
from tf_labeldp.dossier._card import (
    MODEL,
    PAGE,
    card_in,
    file_digest,
    receipts_digest,
    receipts_of_metrics,
)
from tf_labeldp.mechanisms import PeerToPeerRandomizedResponse
from tf_labeldp.pate import ConfidentGNMax
from tf_labeldp.vault import NoisyLabels, guarantee, load_model
from tf_labeldp.vault.ledger import Ledger
from tf_labeldp.vault.noisy_labels import STATEMENT_SUFFIX
from tf_labeldp.vault.records import compact, is_charged

_TOLERANCE = 2e-4
"""Largest relative difference between an epsilon that version 0.2 composed and the same today."""
_LONGEST = 100
"""Characters of a mechanism that a line has room for."""


@dataclasses.dataclass(frozen=True)
class Published:
    """A published file, its content, and its agreement with its statement; print it.

    Attributes:
        path: path of the file or folder.
        contains: content in words.
        sha256: digest of each file, by name.
        guarantee: statement of its receipts; None if it has none, or they can't be read.
        receipts: receipts of everything that the file depends on.
        problems: sentences; empty if no problem was found.

    Example:
        >>> print(Published("noisy", "3 noisy labels", {}, PrivacyGuarantee(1.0), (), ()))
        noisy: 3 noisy labels
          (1, 0)-label-DP
          matches its statement
    """

    path: str
    contains: str
    sha256: dict[str, str]
    guarantee: PrivacyGuarantee | None
    receipts: Receipts
    problems: tuple[str, ...]

    def __str__(self) -> str:
        lines = [f"{self.path}: {self.contains}"]
        lines += [f"  {self.guarantee.headline}"] if self.guarantee is not None else []
        lines += [f"  {verdict([text])}" for text in self.problems] or [f"  {verdict(())}"]
        lines += [f"  sha256 {digest}  {name}" for name, digest in self.sha256.items()]
        return "\n".join(lines)


def verify(
    path: str | os.PathLike[str],
    *,
    store: str | os.PathLike[str] | None = None,
    report: str | os.PathLike[str] | None = None,
) -> Published:
    """Compares a published file with its own statement and with the store that paid for it.

    Alone, a file can only contradict itself, and a forger can forge its statement too. With the
    ``store`` of the label holder, its receipts must be in the ledger, its noisy labels must match a
    draw there, and layers with receipts must have weights that the ledger recorded when they were
    trained or exported. A layer without receipts is public by assumption, and is named. With a
    ``report``, its digests must be listed there.

    Args:
        path: noisy labels (a folder of ``NoisyLabels.save``, or an output of ``tf-labeldp
            randomize``), a ``.keras`` file, or the folder of ``save`` or ``tf-labeldp train``.
        store: folder of the store that paid for the file; or None.
        report: ``report.json`` of ``tf-labeldp report``; or None.

    Raises:
        FileNotFoundError: there is no such file.
        LabelStoreError: the store can't be read.
        ValueError: a file of another kind.

    Example:
        >>> import tempfile
        >>> from tf_labeldp import PrivacyBudget, PrivateLabels, RandomizedResponse
        >>> labels = PrivateLabels([0, 1, 1], num_classes=2, budget=PrivacyBudget(1.0))
        >>> folder = tempfile.mkdtemp()
        >>> labels.randomize(RandomizedResponse(1.0, 2)).save(folder)
        >>> verify(folder).problems
        ()
    """
    found = verify_against(path, [] if store is None else [Ledger.of_store(store)])
    if report is None:
        return found
    unlisted = _not_listed(pathlib.Path(report), found)
    return dataclasses.replace(found, problems=(*found.problems, *unlisted))


def verify_against(path: str | os.PathLike[str], ledgers: Sequence[Ledger]) -> Published:
    """Returns the result of ``verify`` against the ledgers of the stores that paid together."""
    place = pathlib.Path(path).expanduser()
    if not place.exists():
        raise FileNotFoundError(f"expected a published file, got no file {place}. Check the path.")
    model = place / MODEL if (place / MODEL).exists() else place
    if model.suffix == ".keras":
        found = _verify_model(place, model, ledgers)
    else:
        found = _verify_noisy_labels(place, ledgers)
    if not ledgers:
        return found
    missing = _not_in(merge_receipts(*(ledger.receipts() for ledger in ledgers)), found.receipts)
    return dataclasses.replace(found, problems=(*missing, *found.problems))


def _verify_noisy_labels(path: pathlib.Path, ledgers: Sequence[Ledger]) -> Published:
    statement = path.with_name(path.name + STATEMENT_SUFFIX)
    digests = _digests(path.iterdir() if path.is_dir() else [path, statement])
    try:
        noisy = NoisyLabels.load(path)
    except FileNotFoundError:
        raise ValueError(
            f"expected noisy labels with their statement or a .keras file, got {path}. Give the "
            "output of NoisyLabels.save, tf-labeldp randomize or tf-labeldp train."
        ) from None
    except ValueError as error:
        return Published(str(path), "noisy labels", digests, None, (), (str(error),))
    stated = noisy.guarantee()
    problems = []
    for text in path.glob("*.json") if path.is_dir() else [statement]:
        problems += _differs(stated, json.loads(text.read_text(encoding="utf-8"))["guarantee"])
    if not _draws(noisy):
        problems.append("it has no receipt of a draw, so nothing shows that its labels are noisy")
    elif not _are_drawn(noisy, ledgers):
        problems.append("its noisy labels differ from those of its receipt")
    contains = f"{counted(len(noisy), 'noisy label')} by {brief(repr(noisy.mechanism))}"
    return Published(str(path), contains, digests, stated, noisy.receipts, tuple(problems))


def _are_drawn(noisy: NoisyLabels, ledgers: Sequence[Ledger]) -> bool:
    """Returns whether these are the noisy labels of one draw, or of several in a row.

    The digest in a receipt identifies a complete draw; other draws are looked up in the ledgers.
    """
    draws = _draws(noisy)
    if array_digest(compact(noisy.values)) in [receipt.output_digest for receipt in draws]:
        return True
    is_partial = isinstance(noisy.mechanism, (PeerToPeerRandomizedResponse, ConfidentGNMax))
    stored = [
        (record.values, record.indices)
        for receipt in draws
        for ledger in ledgers
        for record in ledger.records
        if record.receipt is not None
        and record.receipt.id == receipt.id
        and record.values is not None
    ]
    # Only the store records who reported or was answered, until it is forgotten.
    if is_partial and not stored:
        return True
    if stored and not is_partial:
        # Labels that came late lie between those of earlier draws.
        values, rows = (np.concatenate(part) for part in zip(*stored, strict=True))
        if np.array_equal(values[np.argsort(rows, kind="stable")], noisy.values):
            return True
    rest = noisy.values
    for values, _ in stored:
        values = values[values >= 0] if is_partial else values
        if np.array_equal(rest[: len(values)], values):
            rest = rest[len(values) :]
    return bool(stored) and not len(rest)


def _draws(noisy: NoisyLabels) -> list[Receipt]:
    # The answers of PATE are a release of their own mechanism, without those that are missing.
    is_release = isinstance(noisy.mechanism, ConfidentGNMax)
    return [
        receipt
        for receipt in noisy.receipts
        if receipt.kind == ("release" if is_release else "draw")
        and (not is_release or receipt.what == repr(noisy.mechanism))
    ]


def _verify_model(place: pathlib.Path, model: pathlib.Path, ledgers: Sequence[Ledger]) -> Published:
    digests = _digests(place.iterdir() if place.is_dir() else [model])
    try:
        loaded = load_model(model, compile=False)
        receipts, stated = public_input(loaded).receipts, guarantee(loaded)
        card = card_in(place)
        if measured := receipts_of_metrics(card):
            receipts = merge_receipts(receipts, measured)
            stated = compose_receipts(receipts).with_assumptions([WEIGHTS_ASSUMED])
    # Layers and file formats raise errors of any type.
    except Exception as error:
        problem = f"the model can't be read ({type(error).__name__}: {error})"
        return Published(str(place), "a Keras model", digests, None, (), (problem,))
    problems = []
    if not receipts:
        problems.append("the model has no receipts, so nothing shows which labels it depends on")
    problems += [
        str(receipt.charge.assumptions[0]) for receipt in receipts if receipt.kind == "unknown"
    ]
    if card:
        # Version 0.2 wrote the statement alone.
        problems += _differs(stated, card.get("guarantee", card))
        digest = receipts_digest(receipts)
        if card.get("receipts_sha256", digest) != digest:
            problems.append("its card is about other receipts")
        model_digest = digests[model.name]
        if card.get("model_sha256", model_digest) != model_digest:
            problems.append(f"{model.name} was changed after its card was written")
        problems += _unquoted(stated, place / PAGE) if "guarantee" in card else []
    contains = f"a Keras model of {counted(loaded.count_params(), 'weight')}"
    if ledgers and receipts:
        unknown, public = _unknown_layers(loaded, ledgers)
        if unknown:
            problems.append(f"the store has no record of the weights of {', '.join(unknown)}")
        if public:
            layers = "the layer" if len(public) == 1 else "the layers"
            contains += f", public by assumption in {layers} {', '.join(public)}"
    # Nothing is known of a model without receipts, so it has no promise.
    promise = stated if receipts else None
    return Published(str(place), contains, digests, promise, receipts, tuple(problems))


def _unquoted(stated: PrivacyGuarantee, page: pathlib.Path) -> list[str]:
    """Returns a problem if a card's page lacks the promise or an assumption, in any wording."""
    text = page.read_text(encoding="utf-8") if page.exists() else ""
    parts = [stated.headline, *(f"[{note.code}]" for note in stated.assumptions)]
    missing = [part for part in parts if part not in text]
    return [f"{page.name} lacks {', '.join(missing)} of the statement"] if text and missing else []


def _differs(stated: PrivacyGuarantee, written: dict[str, Any]) -> list[str]:
    found = PrivacyGuarantee.from_json(json.dumps(written))
    # A head has no initial weights to vouch for; the file of its model does.
    notes = [{*each.assumptions} - {WEIGHTS_ASSUMED} for each in (found, stated)]
    agree = notes[0] == notes[1]
    tolerance = 0.0
    # Version 0.2 wrote other sentences, without codes, and composed losses on another grid.
    if all(isinstance(note, str) for note in written["assumptions"]):
        agree = len(notes[0]) >= len(notes[1])
        tolerance = _TOLERANCE
    problems = []
    is_epsilon = math.isclose(found.epsilon, stated.epsilon, rel_tol=tolerance)
    if not is_epsilon or (found.delta, found.seeded) != (stated.delta, stated.seeded):
        problems.append(
            f"its statement is {found.headline}, but its receipts compose to {stated.headline}"
        )
    if not agree:
        problems.append("its statement and its receipts differ in their assumptions")
    return problems


def _unknown_layers(model: Any, ledgers: Sequence[Ledger]) -> tuple[list[str], list[str]]:
    """Returns layers with receipts whose weights no ledger records, and layers without receipts.

    If no layer has receipts, the layers without them count as unknown. Constant weights, such as
    those of a head that is all noise, need no record.
    """
    weights = [digests for ledger in ledgers for digests, _ in ledger.weights()]
    recorded = {digest for digests in weights for digest in digests}
    unknown: list[str] = []
    public: list[str] = []
    any_recorded = False
    for layer in layers_of(model):
        own = own_weights(layer)
        has_receipts = bool(own and public_input(layer).receipts)
        if not recorded.issuperset(weight_digests(own)):
            (unknown if has_receipts else public).append(layer.name)
        elif has_receipts:
            any_recorded = True
    return (unknown, public) if any_recorded or unknown else (public, [])


def _not_in(ledger: Receipts, receipts: Receipts) -> list[str]:
    json_by_id = {receipt.id: receipt.to_json() for receipt in ledger}
    charged = [receipt for receipt in receipts if is_charged(receipt)]
    missing = [receipt for receipt in charged if receipt.id not in json_by_id]
    changed = [
        receipt
        for receipt in charged
        if json_by_id.get(receipt.id, receipt.to_json()) != receipt.to_json()
    ]
    return [
        *(f"the store has no receipt for {brief(receipt.what)}" for receipt in missing),
        *(f"the store has a different receipt for {brief(receipt.what)}" for receipt in changed),
    ]


def brief(text: str) -> str:
    return text if len(text) <= _LONGEST else text[: _LONGEST - 4] + " ..."


def verdict(problems: Sequence[str]) -> str:
    return f"WRONG: {'; '.join(problems)}" if problems else "matches its statement"


def _not_listed(report: pathlib.Path, found: Published) -> list[str]:
    try:
        listed = json.loads(report.read_text(encoding="utf-8"))["published"]
        digests = {digest for file in listed for digest in file["sha256"].values()}
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ValueError(
            f"expected the report.json of tf-labeldp report, got {report} "
            f"({type(error).__name__}). Give the unchanged file."
        ) from None
    return [
        f"the report does not list the content of {name}"
        for name, digest in found.sha256.items()
        if digest not in digests
    ]


def _digests(files: Iterable[pathlib.Path]) -> dict[str, str]:
    return {file.name: file_digest(file) for file in sorted(files) if file.is_file()}
