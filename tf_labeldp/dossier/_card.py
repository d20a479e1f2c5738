"""Saves a model in a folder with its card: what it promises, how good it is, how to check both."""

from __future__ import annotations

import hashlib
import json
import os
import pathlib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from tf_labeldp._progress import for_terminal
from tf_labeldp._validate import counted
from tf_labeldp._version import MADE_BY
from tf_labeldp.accounting import PrivacyGuarantee, Public, Receipt, Setting, public_input
from tf_labeldp.accounting.provenance import LayerHistory
from tf_labeldp.dossier._files import (
    Findings,
    Stores,
    brief,
    check_json,
    check_names,
    check_statement,
    listed,
)
from tf_labeldp.dossier._pipeline import statement_receipts, steps_of, with_steps
from tf_labeldp.dossier._texts import for_markdown, for_yaml
from tf_labeldp.vault import Evaluation
from tf_labeldp.vault.files import PlainFile
from tf_labeldp.vault.ledger import Ledger
from tf_labeldp.vault.model_history import TrainedModel
from tf_labeldp.vault.records import SealedFields

MODEL, CARD, PAGE = TrainedModel.FILE, TrainedModel.CARD, "README.md"
_OF_NUMBERS = ("mse", "mae")
_LAYOUT: dict[str, Any] = {"indent": 1}
"""The layout of the card's JSON."""
_FIELDS = (
    *("made_by", "guarantee", "receipts_sha256", "model_sha256", "data", "metrics", "page"),
    "digest",
)
_FIELDS_OF_METRICS = ("metric", "value", "interval", "examples", "receipts")
_TAGS = ("differential-privacy", "label-differential-privacy")


def save(
    model: Public[Any],
    folder: str | os.PathLike[str],
    *,
    metrics: Public[Iterable[Evaluation] | None] = None,
    data: Setting[str] = "",
    cells: Setting[Mapping[str, Any] | None] = None,
) -> PrivacyGuarantee:
    """Saves a model with a model card: its statement, its metrics, and how to verify both.

    The folder gets ``model.keras``; ``README.md``, the card, with the metadata that model hubs
    read; and ``privacy.json``, the card as data. All three may be published. The statement covers
    the model and the metrics. ``tf-labeldp verify FOLDER`` compares the three;
    ``load_model(folder)`` and ``guarantee(folder)`` read them.

    Args:
        model: a Keras model, or an estimator with ``to_keras``: a head, ``PrivateClassifier``; or a
            scikit-learn ``Pipeline`` that ends in one. Its other steps become layers: scalers,
            ``SimpleImputer``, ``PCA`` and the maps of ``features``.
        folder: made if it is missing; an earlier model of ``save`` there is replaced. A path that
            ends in ``.keras`` gets the file of the model alone, with its receipts and without a
            card.
        metrics: results of ``labels.evaluate`` or ``noisy.evaluate``. For labels that you declare
            public, make one: ``vault.Evaluation("accuracy", value, 0.0, n, effective_examples=n)``.
            None for the ``evaluation_`` of a ``PrivateClassifier``, if it has one.
        data: sentences on the training data and its columns, for the card; plain text.
        cells: how ``tf-labeldp train`` read the texts of columns, by name, ready for JSON: kept in
            the model's file for ``tf-labeldp predict``. None for columns as they stand.

    Returns:
        The statement.

    Raises:
        FileExistsError: the folder has other files, which a published folder would show; nothing
            was written.
        TypeError: the model is none, a pipeline has a step without layers, or a metric is no
            ``Evaluation`` of one number; nothing was written.
        ValueError: metrics or data for a file, which has no card.

    Source: Mitchell et al., "Model cards for model reporting", 2019; the metadata are those of
    ``model-index`` of model hubs.

    Example:
        >>> import tempfile
        >>> import keras
        >>> from tf_labeldp import declare
        >>> model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        >>> _ = declare(model, because="its labels are public")
        >>> save(model, tempfile.mkdtemp()).epsilon
        0.0
    """
    path = pathlib.Path(folder).expanduser()
    is_file = path.suffix == TrainedModel.SUFFIX and not path.is_dir()
    if is_file and (metrics is not None or data):
        raise ValueError(
            f"expected a folder for metrics and data, which are on the card, got the file {path}. "
            f"Give a folder: {str(path.with_suffix(''))!r}."
        )
    _refuse_others(path)
    network, fitted, metrics = _network_of(model, metrics)
    if cells is not None:
        facts = TrainedModel(network).note_facts({"cells": dict(cells)})
        Ledger.record_digests([facts.digest()], public_input(network, metrics).receipts)
    if is_file:
        path.parent.mkdir(parents=True, exist_ok=True)
        with PlainFile(path).replaced() as file:
            network.save(file)
        return LayerHistory(public_input(network).receipts).guarantee()
    # Those that the files carry, in the order in which verification reads them.
    receipts = public_input(network, metrics).receipts
    stated = LayerHistory(receipts).guarantee()
    path.mkdir(parents=True, exist_ok=True)
    # A run that is killed leaves no card of another model.
    for name in (PAGE, CARD):
        (path / name).unlink(missing_ok=True)
    with PlainFile(path / MODEL).replaced() as file:
        network.save(file)
    card = {
        "made_by": MADE_BY,
        "guarantee": json.loads(stated.to_json()),
        "receipts_sha256": receipts_digest(receipts),
        "model_sha256": PlainFile(path / MODEL).digest(),
        "data": data,
        "metrics": [_metric(found) for found in metrics],
    }
    name = path.resolve().name
    page = _page(name, network, str(fitted.get("choice_") or ""), card, stated, receipts)
    card["page"] = _sections(page)
    card = SealedFields(card).sealed()
    Ledger.record_digests([bytes.fromhex(card["digest"])], receipts)
    PlainFile(path / CARD).write_text(json.dumps(card, **_LAYOUT))
    PlainFile(path / PAGE).write_text(page)
    return stated


def _refuse_others(folder: pathlib.Path) -> None:
    """Raises if a folder has files that ``save`` did not write; hidden ones do not count."""
    # The writer of an unfinished folder has checked it, before it spent anything.
    if not folder.is_dir() or (folder / PlainFile.UNFINISHED).exists():
        return
    names = {part.name for part in folder.iterdir() if not part.name.startswith(".")}
    # Without a card, the page is someone else's.
    own = {MODEL, CARD, PAGE} if CARD in names else {MODEL}
    if others := sorted(names - own):
        raise FileExistsError(
            f"expected an empty folder, or one that save wrote, got {folder} with "
            f"{listed(map(brief, others))}. Give a new folder."
        )


def _network_of(model: Any, metrics: Any) -> tuple[Any, dict[str, Any], list[Evaluation]]:
    """Returns the network to save, the attributes of its estimator, and the metrics, or raises.

    The network carries the receipts of the model, and those that came with a list of metrics.
    """
    import keras

    of_model = public_input(model).receipts
    public = public_input(model, metrics)
    whole, metrics = public.value
    *steps, (_, estimator) = steps_of(whole)
    is_exported = hasattr(estimator, "to_keras")
    network = estimator.to_keras() if is_exported else estimator
    if not isinstance(network, keras.Model):
        raise TypeError(
            f"expected a Keras model, or an estimator with to_keras, got "
            f"{type(estimator).__name__}. Give the trained model."
        )
    network = with_steps(network, steps)
    fitted = vars(estimator) if is_exported else {}
    metrics = _checked_metrics(metrics, fitted.get("evaluation_"))
    # The file states alone what the model was made of.
    in_file = {receipt.id for receipt in public_input(network).receipts}
    TrainedModel(network).attach([receipt for receipt in of_model if receipt.id not in in_file])
    if whole is not estimator:
        TrainedModel(network).attach(statement_receipts(whole, network))
    # Receipts that came with a list of metrics, and with none of them.
    carried = {receipt.id for receipt in public_input(network, metrics).receipts}
    lost = [part for part in public.receipts if part.id not in carried and part.kind != "unknown"]
    if lost:
        TrainedModel(network).attach(lost)
    return network, fitted, metrics


def _checked_metrics(metrics: Any, own: Evaluation | None) -> list[Evaluation]:
    """Returns the metrics, or else the estimator's own one, or raises."""
    if metrics is None:
        metrics = [] if own is None else [own]
    several = list(metrics)
    for found in several:
        if not isinstance(found, Evaluation) or np.ndim(found.value):
            raise TypeError(
                f"expected metrics of one number from labels.evaluate, got {found!r}. For labels "
                "that are public, give vault.Evaluation(metric, value, 0.0, n, "
                "effective_examples=n)."
            )
    return several


def check_card(
    found: Findings,
    files: Mapping[str, pathlib.Path],
    digests: Mapping[str, str],
    stated: PrivacyGuarantee,
    receipts: tuple[Receipt, ...],
    stores: Stores,
) -> None:
    """Compares the files of a folder with its card, and the card with the receipts."""
    if CARD not in files:
        others = [name for name in files if not name.endswith(".keras")]
        found.not_checked += [f"{name}, without a {CARD}" for name in others]
        return
    card = check_json(found, CARD, files[CARD].read_text(encoding="utf-8"), _LAYOUT)
    if card is None:
        return
    before = len(found.problems)
    # Version 0.2 wrote the statement alone.
    check_statement(found, stated, card.get("guarantee", card))
    digest = receipts_digest(receipts)
    if card.get("receipts_sha256", digest) != digest:
        found.problems.append("its card is about other receipts")
    if card.get("model_sha256", digests[MODEL]) != digests[MODEL]:
        found.problems.append(f"{MODEL} was changed after its card was written")
    others = sorted({*files} - {MODEL, CARD, PAGE})
    page = files[PAGE].read_text(encoding="utf-8") if PAGE in files else ""
    lacking = _lacking(page, stated)
    if "guarantee" in card and lacking:
        found.problems.append(f"{PAGE} lacks {listed(lacking)} of the statement")
    if "digest" not in card:
        names = [*_unsealed(card, page), *others]
        found.not_checked += [f"{name}, which no seal covers" for name in names]
        return
    check_names(found, card, _FIELDS, "field", CARD)
    for metric in card["metrics"]:
        check_names(found, metric, _FIELDS_OF_METRICS, "field", "a score")
    check_names(found, others, (), "file", "the folder")
    if not lacking:
        _check_page(found, page, card["page"])
    if len(found.problems) == before and not SealedFields(card).is_whole:
        found.problems.append(f"{CARD} was edited")
    if stores and not stores.has_seal(card["digest"]):
        found.not_checked.append(
            f"the scores, data and sentences of {CARD} and {PAGE}, which the store did not record"
        )


def _lacking(page: str, stated: PrivacyGuarantee) -> list[str]:
    """Returns the headline and the codes of assumptions that a page lacks; none without a page."""
    parts = [stated.headline, *(f"[{for_terminal(note.code)}]" for note in stated.assumptions)]
    return [part for part in parts if page and part not in page]


def _unsealed(card: Mapping[str, Any], page: str) -> Iterator[str]:
    """Yields what a card of 0.2 has without a seal."""
    if card.get("metrics") or card.get("data"):
        yield "its scores and data"
    if page:
        yield PAGE


def _sections(page: str) -> list[tuple[str, str]]:
    """Returns the heading of each section of a page, and the SHA-256 of its text."""
    texts = [text.strip("\n") for text in re.split(r"(?m)^(?=## )", page)]
    headings = [text.partition("\n")[0] if text.startswith("## ") else "" for text in texts]
    digests = [hashlib.sha256(text.encode()).hexdigest() for text in texts]
    return list(zip(headings, digests, strict=True))


def _check_page(found: Findings, page: str, sealed: Iterable[Sequence[str]]) -> None:
    """Compares the sections that ``save`` wrote; others may stand between them."""
    rest = _sections(page)
    added: list[tuple[str, str]] = []
    for heading, digest in sealed:
        digests = [own for _, own in rest]
        if digest not in digests:
            name = f"section {heading.strip('# ')!r}" if heading else "the beginning"
            found.problems.append(f"{name} of {PAGE} was changed or is missing")
            return
        place = digests.index(digest)
        added += rest[:place]
        rest = rest[place + 1 :]
    found.not_checked += [
        f"section {brief(heading.strip('# '))!r} of {PAGE}" for heading, _ in [*added, *rest]
    ]


def receipts_digest(receipts: tuple[Receipt, ...]) -> str:
    """Returns the SHA-256 of receipts, in any order."""
    content = sorted(json.dumps(receipt.to_json(), sort_keys=True) for receipt in receipts)
    return hashlib.sha256("\n".join(content).encode()).hexdigest()


def _metric(found: Evaluation) -> dict[str, Any]:
    return {
        "metric": found.metric,
        "value": float(found.value),
        "interval": [float(end) for end in found.interval()],
        "examples": found.num_examples,
        "receipts": [receipt.to_json() for receipt in found.receipts],
    }


def _metadata(name: str, network: Any, card: dict[str, Any]) -> dict[str, Any]:
    """Returns the metadata of model hubs."""
    shapes = [np.shape(each) for each in getattr(network, "inputs", None) or []]
    field = "image" if any(len(shape) == 4 for shape in shapes) else "tabular"
    results = [
        {
            "task": {
                "type": f"{field}-"
                + ("regression" if metric["metric"] in _OF_NUMBERS else "classification")
            },
            "dataset": {"type": "private", "name": card["data"] or "labels of this model's owner"},
            "metrics": [{"type": metric["metric"], "value": metric["value"]}],
        }
        for metric in card["metrics"]
    ]
    index = {"model-index": [{"name": name, "results": results}]} if results else {}
    return {"library_name": "keras", "tags": list(_TAGS), **index}


def _page(
    name: str,
    network: Any,
    choice: str,
    card: dict[str, Any],
    stated: PrivacyGuarantee,
    receipts: tuple[Receipt, ...],
) -> str:
    front = [f"{key}: {for_yaml(value)}" for key, value in _metadata(name, network, card).items()]
    uses = [
        f"| {for_markdown(receipt.what)} | {receipt.charge.epsilon:.4g} | "
        f"{receipt.charge.delta:.2g} | {receipt.num_examples:,} | {receipt.time[:10]} |"
        for receipt in receipts
        if receipt.charge.epsilon
    ]
    rows = [
        f"| {for_markdown(metric['metric'])} | {metric['value']:.4g} | "
        f"{metric['interval'][0]:.4g} to {metric['interval'][1]:.4g} | {metric['examples']:,} | "
        + ("private, by a release in the statement" if metric["receipts"] else "declared public")
        + " |"
        for metric in card["metrics"]
    ]
    parts = [
        "\n".join(["---", *front, "---"]),
        f"# {for_markdown(name)}",
        f"A Keras model that was trained on private labels, saved by {card['made_by']}.",
        *([f"```text\n{choice}\n```"] if choice else []),
        "## Privacy",
        f"```text\n{stated}\n```",
        f"The statement rests on {counted(len(receipts), 'receipt')}, which the model's file and "
        f"`{CARD}` carry (SHA-256 of all: `{card['receipts_sha256']}`).",
    ]
    if uses:
        head = ["| use | epsilon | delta | labels | date |", "| --- | --- | --- | --- | --- |"]
        parts.append("\n".join([*head, *uses]))
    if rows:
        head = [
            "| metric | value | 95 % interval | examples | labels |",
            "| --- | --- | --- | --- | --- |",
        ]
        parts += ["## Metrics", "\n".join([*head, *rows])]
        parts.append("The intervals cover the noise and the sample of examples.")
    if card["data"]:
        parts += ["## Data", "\n".join(map(for_markdown, card["data"].splitlines()))]
    lines = ["import tf_labeldp as ldp", "", f'model = ldp.load_model("{MODEL}")']
    if isinstance(getattr(network, "input", None), dict):
        lines.append("model.predict(ldp.features.to_inputs(table, model))  # of a table")
    parts += [
        "## Use",
        "\n".join(["```python", *lines, "```"]),
        "## Verify",
        "```sh\ntf-labeldp verify .                     # the files against their receipts\n"
        "tf-labeldp verify . --store LABEL-STORE # by the owner of the labels, against the ledger"
        "\n```",
        f"SHA-256 of `{MODEL}`: `{card['model_sha256']}`.",
    ]
    return "\n\n".join(parts) + "\n"
