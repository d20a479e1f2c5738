"""The report of a label set, or of all label sets of a folder: what left them, and at what cost."""

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

import numpy as np

from tf_labeldp._version import __version__
from tf_labeldp.accounting import PrivacyGuarantee, Setting
from tf_labeldp.accounting._receipts import (
    Receipt,
    compose_receipts,
    merge_receipts,
    timestamp,
)
from tf_labeldp.audit import AuditResult, LabelInference, audit_mechanism
from tf_labeldp.dossier._verify import Published, brief, verify_against
from tf_labeldp.mechanisms._base import deserialize
from tf_labeldp.vault import LabelStoreError
from tf_labeldp.vault._label_kinds import kind_of_header
from tf_labeldp.vault._ledger import UNNAMED, Ledger
from tf_labeldp.vault._records import Record
from tf_labeldp.vault._store import LabelStore

_LIBRARIES = ("dp-accounting", "keras", "numpy", "opendp", "scipy", "tensorflow")
_FLAGS = ("seeded", "metrics_reported", "sample_weights")


@dataclasses.dataclass(frozen=True)
class Report:
    """What left one or more label sets; print it, or ``save`` it as a page and as JSON.

    Attributes:
        content: all of it, as JSON can hold it.
        statement: the promise for one person with an example in each label set.

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
            folder: is made if it is not there; an earlier report in it is replaced.
        """
        from tf_labeldp.dossier._page import page

        path = pathlib.Path(folder).expanduser()
        html = page(self.content)
        path.mkdir(parents=True, exist_ok=True)
        (path / "report.html").write_text(html, encoding="utf-8")
        (path / "report.json").write_text(json.dumps(self.content, indent=1), encoding="utf-8")

    def __repr__(self) -> str:
        return f"Report({self.statement.headline!r})"

    def __str__(self) -> str:
        """Returns the statement, and a line for each label set, file and audit."""
        lines = [str(self.statement), ""]
        for one in self.content["label_sets"]:
            budget = one["budget"]
            lines.append(
                f"{one['folder']}: {one['num_labels']:,} labels, {len(one['releases'])} releases; "
                f"budget epsilon={budget['epsilon']:g}, left {one['remaining']:g}"
                + (f"; forgotten on {one['forgotten']['time']}" if one["forgotten"] else "")
            )
        for one in self.content["published"]:
            wrong = "; ".join(one["problems"])
            lines.append(f"{one['path']}: {f'WRONG: {wrong}' if wrong else one['contains']}")
        lines += [f"audit of {one['of']}: {one['found']}" for one in self.content["audits"]]
        return "\n".join(lines)


def report(
    folder: str | os.PathLike[str],
    *,
    published: Iterable[str | os.PathLike[str]] = (),
    audits: Mapping[str, AuditResult | LabelInference] | None = None,
    audit: bool = False,
) -> Report:
    """Reports what has left a label set, when, by whom and at what epsilon.

    It reads the store and needs no labels; nothing is charged or written there. What engines drew
    with the key in the store counts, and so do the other stores of a project. It knows nothing of
    vaults without a store, and of stores that were removed.

    Args:
        folder: of a store, or one with several stores in it, whose label sets add up as those of
            the same people unless ``people`` differ.
        published: files to list, each held against its statement and the stores (``verify``).
        audits: results to list, by what was audited.
        audit: whether to audit each mechanism that drew noisy labels, too (some seconds each).

    Raises:
        LabelStoreError: there is no store, or one is damaged or lacks a part of its account.
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
    stores = [path] if LabelStore(path).exists() else _stores_in(path)
    ledgers = {one: Ledger.of_store(one) for one in stores}
    receipts = merge_receipts(*(one.receipts() for one in ledgers.values()))
    budgets = [one.budget for one in ledgers.values()]
    stated = compose_receipts(receipts, max(one.delta for one in budgets))
    files = [verify_against(one, list(ledgers.values())) for one in published]
    found = dict(audits or {})
    skipped: dict[str, str] = {}
    if audit:
        _audit_draws([one for ledger in ledgers.values() for one in ledger.records], found, skipped)
    content = {
        "format": 1,
        "made_by": f"tf-labeldp {__version__}",
        "made_at": timestamp(),
        "statement": str(stated).splitlines(),
        "guarantee": json.loads(stated.to_json()),
        "label_sets": [_label_set(one, ledger) for one, ledger in ledgers.items()],
        "assumptions": {
            who: list(map(str, notes)) for who, notes in stated.assumptions_by_voucher().items()
        },
        "published": [_as_json(one) for one in files],
        "audits": [_audit_as_json(name, one) for name, one in found.items()],
        "not_audited": skipped,
        "versions": _versions(receipts),
    }
    return Report(content, stated)


def _stores_in(folder: pathlib.Path) -> list[pathlib.Path]:
    several = sorted(path.parent for path in folder.glob("*/header.json"))
    found = [one for one in several if "budget" in LabelStore(one).header()]  # of labels
    if not found:
        raise LabelStoreError(
            f"There is no label store in {folder} (no header.json there, nor one folder below). "
            "Give the folder that PrivateLabels(..., store=) or --store named."
        )
    return found


def _label_set(path: pathlib.Path, ledger: Ledger) -> dict[str, Any]:
    """Returns what is told of one label set."""
    store, name = LabelStore(path), ledger.label_set.name
    header = store.header()
    own = [one for one in ledger.receipts() if one.labels.name == name]
    return {
        "folder": path.name,
        "id": name,
        "people": ledger.label_set.people,
        "num_labels": ledger.label_set.size,
        "kind": kind_of_header(header).describe(),
        "in_project": store.in_project,
        "forgotten": header.get("forgotten"),
        "budget": {"epsilon": ledger.budget.epsilon, "delta": ledger.budget.delta},
        "remaining": ledger.remaining(),
        "spread": [
            {"epsilon": _finite(epsilon), "examples": count} for epsilon, count in ledger.spread()
        ],
        "history": [
            {
                **one._asdict(),
                "epsilon": _finite(one.epsilon),
                "epsilon_so_far": _finite(one.epsilon_so_far),
            }
            for one in ledger.history()
        ],
        "releases": [_release(one) for one in own],
    }


def _release(one: Receipt) -> dict[str, Any]:
    """Returns what is told of one release."""
    return {
        "id": one.id,
        "time": one.time,
        "actor": one.actor,
        "what": one.what,
        "kind": one.kind,
        "key": "" if one.key.startswith(UNNAMED) else one.key,
        "examples": one.num_examples,
        "unit": one.unit,
        "epsilon": _finite(one.charge.epsilon),
        "delta": one.charge.delta,
        "settings": str(one.charge.event),
        "flags": [name for name in _FLAGS if getattr(one, name)],
        "output_digest": one.output_digest,
        "version": one.version,
    }


def _as_json(one: Published) -> dict[str, Any]:
    stated = one.guarantee
    return {
        "path": pathlib.Path(one.path).name,
        "contains": one.contains,
        "guarantee": None if stated is None else json.loads(stated.to_json()),
        "headline": "" if stated is None else stated.headline,
        "sha256": one.sha256,
        "receipts": [receipt.id for receipt in one.receipts],
        "problems": list(one.problems),
    }


def _audit_draws(
    records: Iterable[Record],
    found: dict[str, AuditResult | LabelInference],
    skipped: dict[str, str],
) -> None:
    """Audits each mechanism that drew noisy labels, once."""
    for record in records:
        if record.receipt is None or record.receipt.kind != "draw" or record.mechanism is None:
            continue
        mechanism = deserialize(record.mechanism)
        name = brief(repr(mechanism))
        if name in found or name in skipped:
            continue
        try:
            prior = evenest(mechanism, record.priors)
            found[name] = audit_mechanism(mechanism, public=prior)
        except (TypeError, ValueError) as error:  # priors that were erased, rows of labels
            skipped[name] = str(error)


def evenest(mechanism: Any, priors: Any) -> np.ndarray | None:
    """Returns the prior, of those of a draw, under which it tells most; None without any."""
    if priors is None or not getattr(mechanism, "uses_priors", False):
        return None
    rows = np.atleast_2d(np.asarray(getattr(priors, "probabilities", priors)))
    return rows[int(np.argmin(np.square(rows).sum(axis=1)))]


def _audit_as_json(name: str, result: AuditResult | LabelInference) -> dict[str, Any]:
    fields = dataclasses.asdict(result)
    fields = {key: _finite(one) if isinstance(one, float) else one for key, one in fields.items()}
    refutes = getattr(result, "refutes", False)
    return {"of": name, "found": str(result), "refutes": refutes, **fields}


def _versions(receipts: Iterable[Receipt]) -> dict[str, str]:
    """Returns what made the report, and what made the releases."""
    found = {"python": platform.python_version(), "system": platform.platform()}
    for name in _LIBRARIES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:  # TensorFlow has several packages
            continue
    drawn_by = sorted({one.version for one in receipts})
    return {"tf-labeldp": __version__, "releases were made by": ", ".join(drawn_by), **found}


def _finite(value: float) -> float | str:
    """Returns a number as JSON can hold it."""
    return value if math.isfinite(value) else str(value)
