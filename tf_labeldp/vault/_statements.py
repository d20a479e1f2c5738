"""The statement of any object: what carries receipts answers, and everything else is refused."""

from __future__ import annotations

import abc
import collections
import math
from collections.abc import Iterable
from typing import Any

import numpy as np

from tf_labeldp.accounting import (
    Assumption,
    Charge,
    LabelSet,
    PrivacyGuarantee,
    PublicInput,
    Receipt,
    Receipts,
    public_input,
)
from tf_labeldp.accounting.provenance import LayerHistory, OptimizerSteps, Weights
from tf_labeldp.vault.records import PUBLIC_INPUT

_ON_ARRAYS = "array-of-labels"
"""The code of an assumption on fits on arrays of labels, which reach the steps of a pipeline."""
_WITHOUT_LABELS = frozenset(
    "cluster compose decomposition feature_extraction impute kernel_approximation pipeline "
    "preprocessing random_projection".split()
)
"""Modules of scikit-learn whose transformers ignore the argument y of ``fit``, except for those
whose tags require it. A test fits them all on different labels."""


class LedgerOwner(abc.ABC):
    """An object that answers by its ledger, with or without uses: a vault, or a key."""

    __slots__ = ()

    @abc.abstractmethod
    def guarantee(self, *, delta: float | None = None) -> PrivacyGuarantee:
        """Returns the statement of all uses."""

    @abc.abstractmethod
    def _all_uses(self) -> tuple[Receipt, ...]:
        """Returns the receipts of all uses, also of those that no output carries."""


def fields_of(value: Any) -> dict[str, Any]:
    """Returns the attributes of an object, which is of any library; none if it has no room."""
    return getattr(value, "__dict__", {})


def has_method(value: Any, name: str) -> bool:
    """Returns whether an object, which is of any library, has a method, or forwards it."""
    return callable(getattr(value, name, None))


def statement_of(artefact: Any, delta: float | None) -> PrivacyGuarantee:
    """Returns the statement of an object; raises ``TypeError`` if it can't answer."""
    public = public_input(artefact)
    value, receipts = public.value, public.receipts
    if isinstance(value, PrivacyGuarantee):
        return value
    if isinstance(value, Receipt):
        return Receipts([*receipts, value]).guarantee(delta)
    if Weights.layers_of(value):
        return LayerHistory(receipts).guarantee(delta)
    if has_method(value, "apply_gradients"):
        if receipts := Receipts.merged(receipts, OptimizerSteps(value).receipts):
            return Receipts(receipts).guarantee(delta)
        raise TypeError(
            f"expected an optimizer with counted steps, got a {type(value).__name__} without any. "
            "Train a model with it, and ask tf_labeldp.guarantee(model)."
        )
    if isinstance(value, np.ndarray) and value.dtype == object:
        value = value.ravel().tolist()
    if isinstance(value, (list, tuple, set, frozenset, dict, collections.deque)) and len(value):
        return _of_several(value.values() if isinstance(value, dict) else value, receipts, delta)
    stated = None
    if _library(value) in ("tf_labeldp", "keras_layers"):
        stated = _of_ours(value, receipts, delta)
    elif receipts and (isinstance(artefact, PublicInput) or _carries(value)):
        stated = Receipts(receipts).guarantee(delta)
    elif receipts:
        stated = _of_foreign(value, receipts, delta)
    if stated is None:
        raise TypeError(
            f"expected noisy labels, a head, a vault, a Keras model or the path of a file, got "
            f"{type(value).__name__}, which does not record how it was made. Ask the object that "
            "it comes from, such as tf_labeldp.guarantee(noisy) or tf_labeldp.guarantee(head)."
        )
    return stated


def _library(value: Any) -> str:
    return type(value).__module__.partition(".")[0]


def _carries(value: Any) -> bool:
    """Returns whether an object has receipts itself, as plug-ins do."""
    fields = fields_of(value)
    return bool(fields.get("receipts") or fields.get("receipts_"))


def _of_several(
    values: Iterable[Any], receipts: tuple[Receipt, ...], delta: float | None
) -> PrivacyGuarantee:
    """Returns the statement of several objects together, each of which answers alone."""
    found, is_known = [receipts], True
    notes: dict[Assumption, None] = {}
    for value in values:
        stated = statement_of(value, delta)
        notes |= dict.fromkeys(stated.assumptions)
        is_known &= math.isfinite(stated.epsilon)
        if isinstance(value, Receipt):
            found.append((value,))
        else:
            found.append(_with_vaults(value, public_input(value).receipts))
    together = Receipts.merged(*found).guarantee(delta)
    if not is_known and math.isfinite(together.epsilon):
        together = PrivacyGuarantee(
            math.inf, together.delta, together.unit, assumptions=tuple(notes)
        )
    return together.with_assumptions(notes)


def _with_vaults(value: Any, receipts: tuple[Receipt, ...]) -> tuple[Receipt, ...]:
    """Adds the receipts of a vault or a key, or of the vaults of batches."""
    owners = (value,) if isinstance(value, LedgerOwner) else fields_of(value).get("vaults", ())
    return Receipts.merged(receipts, *(owner._all_uses() for owner in owners))


def _of_ours(
    value: Any, receipts: tuple[Receipt, ...], delta: float | None
) -> PrivacyGuarantee | None:
    """Returns the statement of an object of this library, or None if it can't answer.

    Only vaults, their batches, estimators before ``fit`` and feature maps may be without receipts.
    """
    if isinstance(value, LedgerOwner):
        return value.guarantee(delta=delta)
    fields = fields_of(value)
    if vaults := fields.get("vaults", ()):
        largest = max(vault.budget.delta for vault in vaults)
        together = _with_vaults(value, receipts)
        return Receipts(together).guarantee(largest if delta is None else delta)
    if receipts:
        return Receipts(receipts).guarantee(delta)
    if not has_method(value, "fit"):
        # Noisy labels without a receipt of their draw promise nothing.
        is_output = fields.get("receipts") == () and has_method(value, "guarantee")
        stated = value.guarantee(delta) if is_output else None
        return stated if stated is not None and math.isinf(stated.epsilon) else None
    is_map = has_method(value, "transform") and not has_method(value, "predict")
    is_fitted = any(name.endswith("_") and not name.startswith("_") for name in fields)
    if is_fitted and not (is_map and fields.get("receipts_") == ()):
        return None
    return PrivacyGuarantee(0.0).with_assumptions([PUBLIC_INPUT])


def _of_foreign(value: Any, receipts: tuple[Receipt, ...], delta: float | None) -> PrivacyGuarantee:
    """Returns the statement of an object of another library, which contains objects with receipts.

    It may have learnt labels that no receipt covers, so nothing is promised, except for a pipeline
    of scikit-learn whose last step was fitted on a vault, and whose other steps read no labels.
    """
    notes = _steps_without_labels(value, receipts)
    stated = Receipts(receipts).guarantee(delta)
    if notes is not None:
        return stated.with_assumptions(notes)
    counted = ", ".join(
        f"{name} ({type(part).__name__})"
        for name, part in fields_of(value).items()
        if public_input(part).receipts
    )
    reason = (
        f"Nothing is promised: a {type(value).__name__} of {_library(value)} may have learnt "
        f"labels that no receipt covers. Counted are the receipts in {counted or 'its parts'}, "
        f"{stated.headline} by themselves. Needed is that all labels come from a PrivateLabels: "
        "publish the counted part alone, or a Pipeline whose last step was fitted on a "
        "PrivateLabels and whose other steps read no labels."
    )
    unknown = Receipt(LabelSet.new(0), Charge.unknown(reason), "a fit without receipts", "unknown")
    return Receipts([*receipts, unknown]).guarantee(delta)


def _steps_without_labels(value: Any, receipts: tuple[Receipt, ...]) -> list[Assumption] | None:
    """Returns an assumption for each step of a pipeline before the last; None for other objects.

    The steps came to their fit with the vault, which shows no label. What they read later, or
    before, is unknown; so each has to be one that reads no labels in any fit.
    """
    all_steps = fields_of(value).get("steps")
    if type(value).__module__ != "sklearn.pipeline" or all_steps is None:
        return None
    *steps, (_, last) = all_steps
    codes = {note.code for receipt in receipts for note in receipt.charge.assumptions}
    is_counted = _library(last) == "tf_labeldp" and _carries(last) and _ON_ARRAYS not in codes
    if not is_counted or not all(_reads_no_labels(step) for _, step in steps):
        return None
    text = (
        "The step {!r} ({}) of the pipeline was fitted on features alone, and its settings were "
        "made without these labels, except for the uses counted here."
    )
    return [
        Assumption("public-steps", "trainer", text.format(name, type(step).__name__))
        for name, step in steps
        if step not in (None, "passthrough")
    ]


def _reads_no_labels(step: Any) -> bool:
    """Returns whether a step of a pipeline, with all that it contains, is fitted without labels."""
    waiting, visited = [step], set()
    while waiting:
        part = waiting.pop()
        if id(part) in visited or part is None or isinstance(part, (str, bytes, type)):
            continue
        visited.add(id(part))
        if isinstance(part, (list, tuple, set, frozenset)):
            waiting += part
        elif isinstance(part, dict):
            waiting += part.values()
        elif has_method(part, "fit"):
            library, _, module = type(part).__module__.partition(".")
            if library == "tf_labeldp":
                if has_method(part, "predict"):
                    return False
                continue
            if library != "sklearn" or module.partition(".")[0] not in _WITHOUT_LABELS:
                return False
            tags = part.__sklearn_tags__()
            if tags.target_tags.required or tags.estimator_type in ("classifier", "regressor"):
                return False
            waiting += fields_of(part).values()
        elif part is step:
            return False
    return True
