"""The report of a label set, or of all label sets in a folder: releases and their cost."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import pathlib
import platform
from collections.abc import Iterable, Mapping
from importlib import metadata
from typing import Any

from tf_labeldp._progress import for_terminal
from tf_labeldp._validate import counted
from tf_labeldp._version import MADE_BY, __version__
from tf_labeldp.accounting import PrivacyGuarantee, Receipt, Receipts, Setting
from tf_labeldp.audit import AuditResult, LabelInference, audit_mechanism
from tf_labeldp.dossier._files import brief
from tf_labeldp.dossier._verify import Published, verdict, verify_against
from tf_labeldp.vault import LabelKind
from tf_labeldp.vault.files import PlainFile
from tf_labeldp.vault.ledger import Ledger
from tf_labeldp.vault.records import Record, SealedFields

_LIBRARIES = ("dp-accounting", "keras", "numpy", "opendp", "scipy", "tensorflow")
_CONFIDENCE = 1.0 - 1e-6
"""Confidence of audits: a report is signed, so a correct mechanism fails one in a million."""


@dataclasses.dataclass(frozen=True)
class Report:
    """The releases of one or more label sets; print it, or ``save`` it as a page and as JSON.

    Attributes:
        content: all of it, ready for JSON.
        statement: the promise to one person with an example in each label set.

    Example:
        >>> Report({"label_sets": [], "published": [], "audits": []}, PrivacyGuarantee(1.0))
        Report('(1, 0)-label-DP')
    """

    content: Setting[dict[str, Any]]
    statement: PrivacyGuarantee

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Writes ``report.html``, which needs no other file, and ``report.json``.

        Needs matplotlib (``pip install 'tf-labeldp[plots]'``).

        Args:
            folder: folder to write to. It is created if needed, and an earlier report is replaced.
        """
        from tf_labeldp.dossier._page import page

        path = pathlib.Path(folder).expanduser()
        html = page(self.content)
        path.mkdir(parents=True, exist_ok=True)
        PlainFile(path / "report.html").write_text(html)
        PlainFile(path / "report.json").write_text(json.dumps(self.content, indent=1))

    def __repr__(self) -> str:
        return f"Report({self.statement.headline!r})"

    def __str__(self) -> str:
        lines = [*str(self.statement).splitlines(), ""]
        for entry in self.content["label_sets"]:
            budget = entry["budget"]
            lines.append(
                f"{entry['folder']}: {counted(entry['num_labels'], 'label')}, "
                f"{counted(len(entry['releases']), 'release')}; "
                f"budget epsilon={budget['epsilon']:g}, "
                f"left {entry['remaining']:g}"
                + (f"; forgotten on {entry['forgotten']['time']}" if entry["forgotten"] else "")
            )
        for file in self.content["published"]:
            is_right = not (file["problems"] or file["not_checked"])
            text = verdict(file["problems"], file["not_checked"])
            lines.append(f"{file['path']}: {file['contains'] if is_right else text}")
        for audit in self.content["audits"]:
            first, *others = audit["found"].splitlines()
            lines += [f"audit of {audit['of']}: {first}", *others]
        return for_terminal(*lines)


def report(
    folder: str | os.PathLike[str],
    *,
    published: Iterable[str | os.PathLike[str]] = (),
    audits: Mapping[str, AuditResult | LabelInference] | None = None,
    audit: bool = False,
) -> Report:
    """Lists every release of a label set: when, by whom and at what epsilon.

    It reads the store and needs no labels; it charges and writes nothing there. Draws of engines
    with the store's key count, and so do the other stores of a project. Vaults without a store and
    removed stores are left out.

    Args:
        folder: folder of a store, or of several stores, whose label sets add up as those of the
            same people unless ``people`` differ.
        published: files to list, each compared with its statement and the stores (``verify``).
        audits: audit results to list, by name.
        audit: whether to audit each mechanism that drew noisy labels, too (some seconds each), at
            a confidence of 1 - 1e-6.

    Raises:
        LabelStoreError: there is no store, or one is damaged or lacks a part of its ledger.
        FileNotFoundError, ValueError: a file that can't be read.

    Example:
        >>> import os, tempfile
        >>> from tf_labeldp import PrivacyBudget, PrivateLabels, RandomizedResponse
        >>> path = os.path.join(tempfile.mkdtemp(), "store")
        >>> labels = PrivateLabels([0, 1, 1], 2, budget=PrivacyBudget(2.0), store=path)
        >>> noisy = labels.randomize(RandomizedResponse(0.5, 2), key="first")
        >>> found = report(path)
        >>> found.statement.epsilon, found.content["label_sets"][0]["remaining"]
        (0.5, 1.5)
    """
    path = pathlib.Path(folder).expanduser()
    ledgers = Ledger.all_in(path)
    receipts = Receipts.merged(*(ledger.receipts() for ledger in ledgers.values()))
    budgets = [ledger.budget for ledger in ledgers.values()]
    stated = receipts.guarantee(max(budget.delta for budget in budgets))
    files = [verify_against(file, list(ledgers.values())) for file in published]
    results = dict(audits or {})
    skipped: dict[str, str] = {}
    if audit:
        records = (record for ledger in ledgers.values() for record in ledger.records)
        _audit_draws(records, results, skipped)
    content = {
        "format": 1,
        "made_by": MADE_BY,
        "made_at": Receipt.timestamp(),
        "statement": str(stated).splitlines(),
        "guarantee": json.loads(stated.to_json()),
        "label_sets": [_label_set(path, ledger) for path, ledger in ledgers.items()],
        "assumptions": {
            party: list(map(str, texts)) for party, texts in stated.assumptions_by_voucher().items()
        },
        "published": [_published(file) for file in files],
        "audits": [
            {
                "of": name,
                "found": str(result),
                "refutes": isinstance(result, AuditResult) and result.refutes,
                **dataclasses.asdict(result),
            }
            for name, result in results.items()
        ],
        "not_audited": skipped,
        "versions": _versions(receipts),
    }
    content = _for_json(content)
    return Report(SealedFields(content).sealed(), stated)


def _label_set(path: pathlib.Path, ledger: Ledger) -> dict[str, Any]:
    header, name = ledger.header, ledger.label_set.name
    own = [receipt for receipt in ledger.receipts() if receipt.labels.name == name]
    return {
        "folder": path.name,
        "id": name,
        "people": ledger.label_set.people,
        "num_labels": ledger.label_set.size,
        "kind": LabelKind.of_header(header).describe(),
        "in_project": ledger.in_project,
        "forgotten": header.get("forgotten"),
        "budget": {"epsilon": ledger.budget.epsilon, "delta": ledger.budget.delta},
        "remaining": ledger.remaining(),
        "spread": [{"epsilon": epsilon, "examples": n} for epsilon, n in ledger.spread()],
        "history": [{**use._asdict(), "in_words": words} for use, words in ledger.lines()],
        "releases": [_release(receipt) for receipt in own],
    }


def _release(receipt: Receipt) -> dict[str, Any]:
    return {
        "id": receipt.id,
        "time": receipt.time,
        "actor": receipt.actor,
        "what": receipt.what,
        "kind": receipt.kind,
        "key": receipt.name,
        "examples": receipt.num_examples,
        "unit": receipt.unit,
        "epsilon": receipt.charge.epsilon,
        "delta": receipt.charge.delta,
        "settings": str(receipt.charge.event),
        "flags": [name for name, is_set in receipt.flags.items() if is_set],
        "output_digest": receipt.output_digest,
        "version": receipt.version,
    }


def _published(file: Published) -> dict[str, Any]:
    stated = file.guarantee
    return {
        "path": pathlib.Path(file.path).name,
        "contains": file.contains,
        "guarantee": None if stated is None else json.loads(stated.to_json()),
        "headline": "none" if stated is None else stated.headline,
        "sha256": file.sha256,
        "receipts": [receipt.id for receipt in file.receipts],
        "problems": list(file.problems),
        "not_checked": list(file.not_checked),
    }


def _audit_draws(
    records: Iterable[Record],
    results: dict[str, AuditResult | LabelInference],
    skipped: dict[str, str],
) -> None:
    for record in records:
        drawn = record.output
        if record.receipt is None or record.receipt.kind != "draw" or drawn.mechanism is None:
            continue
        mechanism = record.mechanism
        name = brief(repr(mechanism))
        if name in results or name in skipped:
            continue
        # Mechanisms of rows of labels can't be audited, nor those whose priors were erased.
        try:
            priors = drawn.arrays.get("priors")
            results[name] = audit_mechanism(mechanism, public=priors, confidence=_CONFIDENCE)
        except (TypeError, ValueError) as error:
            skipped[name] = str(error)


def _versions(receipts: Iterable[Receipt]) -> dict[str, str]:
    found = {"python": platform.python_version(), "system": platform.platform()}
    for name in _LIBRARIES:
        try:
            found[name] = metadata.version(name)
        # TensorFlow has several package names.
        except metadata.PackageNotFoundError:
            continue
    drawn_by = sorted({receipt.version for receipt in receipts})
    return {"tf-labeldp": __version__, "releases were made by": ", ".join(drawn_by), **found}


def _for_json(value: Any) -> Any:
    """Returns a value with lists for tuples and texts for infinities, which JSON lacks."""
    if isinstance(value, dict):
        return {name: _for_json(part) for name, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [_for_json(part) for part in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
