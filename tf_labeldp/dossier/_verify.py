"""Holds a published file against its own statement, and against the store that it came from."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import pathlib
from typing import Any

from tf_labeldp.accounting import PrivacyGuarantee
from tf_labeldp.accounting._receipts import Receipts
from tf_labeldp.mechanisms import PeerToPeerRandomizedResponse
from tf_labeldp.vault import NoisyLabels
from tf_labeldp.vault._carried import guarantee, receipts_of
from tf_labeldp.vault._draws import compact
from tf_labeldp.vault._ledger import Ledger
from tf_labeldp.vault._noisy_labels import STATEMENT_SUFFIX
from tf_labeldp.vault._store import array_digest

_STATEMENT_OF_MODEL = "privacy.json"
_BLOCK = 1 << 20
_LONGEST = 100
"""Characters of what a line says of a mechanism."""


@dataclasses.dataclass(frozen=True)
class Published:
    """A file that was published, what it holds, and whether it keeps to its statement; print it.

    Attributes:
        path: of the file or folder.
        contains: what it holds, in words.
        sha256: of each file, by name.
        guarantee: the statement that its receipts add up to; None where they can't be read.
        receipts: of all that it was made of.
        problems: what is wrong with it, in sentences; empty if nothing was found.

    Example:
        >>> print(Published("noisy", "3 noisy labels", {}, PrivacyGuarantee(1.0), (), ()))
        noisy: 3 noisy labels
          (1, 0)-label-DP
          keeps to its statement
    """

    path: str
    contains: str
    sha256: dict[str, str]
    guarantee: PrivacyGuarantee | None
    receipts: Receipts
    problems: tuple[str, ...]

    def __str__(self) -> str:
        """Returns what was found in plain English."""
        lines = [f"{self.path}: {self.contains}"]
        lines += [f"  {self.guarantee.headline}"] if self.guarantee is not None else []
        lines += [f"  WRONG: {text}" for text in self.problems] or ["  keeps to its statement"]
        lines += [f"  sha256 {digest}  {name}" for name, digest in self.sha256.items()]
        return "\n".join(lines)


def verify(
    path: str | os.PathLike[str],
    *,
    store: str | os.PathLike[str] | None = None,
    report: str | os.PathLike[str] | None = None,
) -> Published:
    """Holds a published file against what it says of itself, and of where it came from.

    By itself a file can only contradict itself: whoever made one up could make up its statement
    too. With the ``store`` of the label holder its receipts must be those of the ledger, and with a
    ``report`` its digests those that are listed there.

    Args:
        path: noisy labels (a folder of ``NoisyLabels.save``, or what ``tf-labeldp randomize``
            wrote), a ``.keras`` file, or the folder of ``tf-labeldp train``.
        store: folder of the store that paid for it; or None.
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
    place = pathlib.Path(path).expanduser()
    if not place.exists():
        raise FileNotFoundError(f"there is no {place}. Give the path of a published file.")
    model = place / "model.keras" if (place / "model.keras").exists() else place
    if model.suffix == ".keras":
        found = _verify_model(place, model)
    else:
        found = _verify_noisy_labels(place)
    problems = list(found.problems)
    if store is not None:
        problems += not_in(Ledger.of_store(store).receipts(), found.receipts)
    if report is not None:
        problems += _not_listed(pathlib.Path(report), found)
    return dataclasses.replace(found, problems=tuple(problems))


def _verify_noisy_labels(path: pathlib.Path) -> Published:
    statement = path.with_name(path.name + STATEMENT_SUFFIX)
    names = sorted(path.iterdir()) if path.is_dir() else [path, statement]
    digests = {one.name: _sha256(one) for one in names if one.is_file()}
    try:
        noisy = NoisyLabels.load(path)
    except FileNotFoundError:
        raise ValueError(
            f"{path} is neither noisy labels with their statement nor a .keras file. Give the "
            "output of NoisyLabels.save, tf-labeldp randomize or tf-labeldp train."
        ) from None
    except ValueError as error:
        return Published(str(path), "noisy labels", digests, None, (), (str(error),))
    stated = noisy.guarantee()
    problems = []
    for text in path.glob("*.json") if path.is_dir() else [statement]:
        problems += _differs(stated, json.loads(text.read_text(encoding="utf-8"))["guarantee"])
    drawn = {one.output_digest for one in noisy.receipts if one.kind == "draw"} - {None}
    reports = isinstance(noisy.mechanism, PeerToPeerRandomizedResponse)  # not of all
    if drawn and not reports and array_digest(compact(noisy.values)) not in drawn:
        problems.append("its noisy labels are not those that its receipt was written for")
    contains = f"{len(noisy):,} noisy labels by {brief(repr(noisy.mechanism))}"
    return Published(str(path), contains, digests, stated, noisy.receipts, tuple(problems))


def _verify_model(place: pathlib.Path, model: pathlib.Path) -> Published:
    import keras

    import tf_labeldp.keras_layers
    import tf_labeldp.training  # noqa: F401 - both are what files of models may name

    files = [one for one in sorted(place.iterdir()) if one.is_file()] if place.is_dir() else [model]
    digests = {one.name: _sha256(one) for one in files}
    try:
        loaded = keras.models.load_model(model, compile=False)
        receipts, stated = receipts_of(loaded), guarantee(loaded)
    except Exception as error:  # each layer and each format has errors of its own
        problem = f"the model can't be read ({type(error).__name__}: {error})"
        return Published(str(place), "a Keras model", digests, None, (), (problem,))
    problems = []
    if not receipts:
        problems.append(
            "the model carries no receipts: nothing here shows which labels it was made of"
        )
    beside = place / _STATEMENT_OF_MODEL
    if beside.exists():
        problems += _differs(stated, json.loads(beside.read_text(encoding="utf-8")))
    contains = f"a Keras model of {loaded.count_params():,} weights"
    return Published(str(place), contains, digests, stated, receipts, tuple(problems))


def _differs(stated: PrivacyGuarantee, written: dict[str, Any]) -> list[str]:
    """Returns what is wrong with a statement in a file, given what the receipts add up to."""
    found = PrivacyGuarantee.from_json(json.dumps(written))
    if (found.epsilon, found.delta, found.seeded) == (
        stated.epsilon,
        stated.delta,
        stated.seeded,
    ) and set(found.assumptions) <= set(stated.assumptions):
        return []
    return [
        f"its statement says {found.headline}, and its receipts add up to {stated.headline}; or "
        "the assumptions differ"
    ]


def not_in(ledger: Receipts, receipts: Receipts) -> list[str]:
    """Returns what is wrong with receipts, given those of the label holder."""
    known = {one.id: one.to_json() for one in ledger}
    missing = [brief(one.what) for one in receipts if one.id not in known]
    changed = [one for one in receipts if known.get(one.id, one.to_json()) != one.to_json()]
    other = [brief(one.what) for one in changed]
    found = [f"the store knows nothing of its receipt for {what}" for what in missing]
    return found + [f"the store has another receipt than its own for {what}" for what in other]


def brief(text: str) -> str:
    """Returns the beginning of a long text, such as a mechanism with all its values."""
    return text if len(text) <= _LONGEST else text[: _LONGEST - 4] + " ..."


def _not_listed(report: pathlib.Path, found: Published) -> list[str]:
    """Returns what is wrong with a file, given a report that should list it."""
    try:
        listed = json.loads(report.read_text(encoding="utf-8"))["published"]
        digests = {digest for one in listed for digest in one["sha256"].values()}
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ValueError(
            f"{report} is no report.json of tf-labeldp report ({type(error).__name__}). Give the "
            "file as it was written."
        ) from None
    return [
        f"the report lists no file with the content of {name}"
        for name, digest in found.sha256.items()
        if digest not in digests
    ]


def _sha256(path: pathlib.Path) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(_BLOCK):
            digest.update(block)
    return digest.hexdigest()
