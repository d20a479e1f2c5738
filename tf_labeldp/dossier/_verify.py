"""Compares a published file with its own statement and with the store that paid for it."""

from __future__ import annotations

import dataclasses
import os
import pathlib
from collections.abc import Sequence

from tf_labeldp._progress import for_terminal
from tf_labeldp._validate import counted, json_of
from tf_labeldp.accounting import PrivacyGuarantee, Receipt, Receipts, public_input
from tf_labeldp.accounting.provenance import LayerHistory
from tf_labeldp.dossier._card import MODEL, check_card
from tf_labeldp.dossier._files import Findings, Stores, brief, digests_of, files_in
from tf_labeldp.dossier._model_files import check_layers, check_members, has_unknown_state
from tf_labeldp.dossier._noisy_files import check_noisy_labels, paths_of
from tf_labeldp.vault import guarantee, load_model
from tf_labeldp.vault.files import PlainFile
from tf_labeldp.vault.ledger import Ledger
from tf_labeldp.vault.model_history import TrainedModel
from tf_labeldp.vault.records import SealedFields


@dataclasses.dataclass(frozen=True)
class Published:
    """A published file, its content, and its agreement with its statement; print it.

    Attributes:
        path: path of the file or folder.
        contains: content in words.
        sha256: digest of each file, by name.
        guarantee: statement of its receipts; None if it has none, or they can't be read.
        receipts: receipts of everything that the file depends on.
        problems: sentences; empty if no contradiction was found.
        not_checked: names of the parts that nothing was compared with; empty if there are none.

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
    receipts: tuple[Receipt, ...]
    problems: tuple[str, ...]
    not_checked: tuple[str, ...] = ()

    def __str__(self) -> str:
        lines = [f"{self.path}: {self.contains}"]
        lines += [f"  {self.guarantee.headline}"] if self.guarantee is not None else []
        lines += [f"  sha256 {digest}  {name}" for name, digest in self.sha256.items()]
        lines += [f"  not checked: {name}" for name in self.not_checked]
        lines += [f"  {verdict([text])}" for text in self.problems]
        lines += [] if self.problems or self.not_checked else [f"  {verdict(())}"]
        return for_terminal(*lines)


def verify(
    path: str | os.PathLike[str],
    *,
    store: str | os.PathLike[str] | None = None,
    report: str | os.PathLike[str] | None = None,
) -> Published:
    """Compares a published file with its own statement and with the store that paid for it.

    All of it is compared: each file, column, array, member and field is a known one, and the seals
    of statements and cards cover their content. What nothing can be compared with, such as sections
    that were added to a card, is in ``not_checked``.

    Alone, a file can only contradict itself, and a forger can forge its statement too. With the
    ``store`` of the label holder, its receipts must be in the ledger; its noisy labels, indices,
    mechanism, priors and classes must be those of a draw there; and layers with receipts must have
    weights that the ledger recorded when they were trained or exported. Layers without receipts,
    and constants in the configuration of a model, are public by assumption, and not checked. With a
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
        >>> found = verify(folder)
        >>> found.problems, found.not_checked
        ((), ())
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
    stores = Stores(ledgers)
    model = place / MODEL if (place / MODEL).exists() else place
    if model.suffix == ".keras":
        return _verify_model(place, model, stores)
    return _verify_noisy_labels(place, stores)


def _verify_noisy_labels(path: pathlib.Path, stores: Stores) -> Published:
    digests, found = digests_of(paths_of(path)), Findings()
    try:
        noisy = check_noisy_labels(path, stores, found)
    except FileNotFoundError:
        raise ValueError(
            f"expected noisy labels with their statement or a .keras file, got {path}. Give the "
            "output of NoisyLabels.save, tf-labeldp randomize or tf-labeldp train."
        ) from None
    except ValueError as error:
        return Published(str(path), "noisy labels", digests, None, (), (str(error),))
    contains = f"{counted(len(noisy), 'noisy label')} by {brief(repr(noisy.mechanism))}"
    return _published(path, contains, digests, noisy.guarantee(), noisy.receipts, found, stores)


def _verify_model(place: pathlib.Path, model: pathlib.Path, stores: Stores) -> Published:
    files = files_in(place) if place.is_dir() else {model.name: model}
    digests, found = digests_of(files), Findings()
    try:
        loaded = load_model(model, compile=False)
        own = public_input(loaded).receipts
        measured = TrainedModel.receipts_of_card(place)
        receipts = Receipts.merged(own, measured)
        stated = guarantee(loaded)
        if measured:
            stated = LayerHistory(receipts).guarantee()
        config, assets = check_members(found, model, loaded)
    # Layers and file formats raise errors of any type.
    except Exception as error:
        problem = f"the model can't be read ({type(error).__name__}: {error})"
        return Published(str(place), "a Keras model", digests, None, (), (problem,))
    if not receipts:
        text_of = "the model has no receipts, so nothing shows which labels it depends on"
        found.problems.append(text_of)
    found.problems += [
        str(receipt.charge.assumptions[0]) for receipt in receipts if receipt.kind == "unknown"
    ]
    try:
        check_card(found, files, digests, stated, receipts, stores)
    # The card of someone else may have any content.
    except Exception as error:
        found.problems.append(f"its card can't be read ({type(error).__name__})")
    if stores and receipts:
        check_layers(found, model, loaded, config, assets, stores)
        if has_unknown_state(model, stores.digests):
            found.not_checked.append("the state of the optimizer")
    contains = f"a Keras model of {counted(loaded.count_params(), 'weight')}"
    # Nothing is known of a model without receipts, so it has no promise.
    promise = stated if receipts else None
    return _published(place, contains, digests, promise, receipts, found, stores)


def _published(
    path: pathlib.Path,
    contains: str,
    digests: dict[str, str],
    stated: PrivacyGuarantee | None,
    receipts: tuple[Receipt, ...],
    found: Findings,
    stores: Stores,
) -> Published:
    of_ledgers = Findings()
    if stores:
        stores.check_receipts(receipts, of_ledgers)
    problems = dict.fromkeys([*of_ledgers.problems, *found.problems])
    not_checked = dict.fromkeys([*of_ledgers.not_checked, *found.not_checked])
    return Published(
        str(path), contains, digests, stated, receipts, tuple(problems), tuple(not_checked)
    )


def verdict(problems: Sequence[str], not_checked: Sequence[str] = ()) -> str:
    if problems:
        return f"WRONG: {'; '.join(problems)}"
    return f"not checked: {'; '.join(not_checked)}" if not_checked else "matches its statement"


def _not_listed(report: pathlib.Path, found: Published) -> list[str]:
    try:
        content = json_of(PlainFile(report.resolve()).read())
        digests = {digest for file in content["published"] for digest in file["sha256"].values()}
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ValueError(
            f"expected the report.json of tf-labeldp report, got {report} "
            f"({type(error).__name__}). Give the unchanged file."
        ) from None
    problems = [
        f"the report does not list the content of {name}"
        for name, digest in found.sha256.items()
        if digest not in digests
    ]
    # Version 0.3 sealed no report.
    if "digest" in content and not SealedFields(content).is_whole:
        problems.append("the report was changed after it was made")
    return problems
