"""The arguments of a vault as values, and those of version 0.3, which warn."""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Callable
from typing import Any, TypeVar

from tf_labeldp import _validate
from tf_labeldp.accounting import PrivacyBudget, Public, Receipts, Setting, public_input
from tf_labeldp.vault.label_kinds import LabelKind
from tf_labeldp.vault.store import LabelStore
from tf_labeldp.vault.users import Users

_Constructor = TypeVar("_Constructor", bound=Callable[..., None])

_OF_KIND = ("classes", "low", "high", "clip", "num_labels")


@dataclasses.dataclass(frozen=True)
class Store:
    """A folder that records every use of labels, with its options; for ``PrivateLabels(store=)``.

    Args:
        path: the folder. None keeps the records in memory.
        project: whether the folder around the store is a project, whose stores share the budget of
            the first one: each use counts in all of them, unless ``people`` differ. None keeps the
            choice of an existing store; a new store joins the project of its folder, if any.
        actor: the author of receipts, which are published; None takes the environment variable
            ``LABELDP_ACTOR``, or the login.

    Raises:
        ValueError: a project without a path.

    Example:
        >>> visits = Store("study/visits", project=True, actor="Ada")
        >>> visits.project, Store("private/labels").project
        (True, None)
    """

    path: str | os.PathLike[str] | None = None
    project: bool | None = dataclasses.field(default=None, kw_only=True)
    actor: str | None = dataclasses.field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        if self.project and self.path is None:
            raise ValueError(
                "project=True needs a store in the folder of the project, got none. Write "
                "Store('study/visits', project=True)."
            )


@dataclasses.dataclass(frozen=True, eq=False)
class Keyed:
    """Random bits of draws from a secret key and the row, for ``PrivateLabels(draws=)``.

    ``scale.randomize_batch`` repeats the draw of a ``key=``, as the release ``"vault/<key>"``. The
    key is ``labels.key`` in the store, a ``scale.ReleaseKey`` whose releases count in the vault.
    Such draws take the mechanisms of ``scale.randomize_batch``.

    Args:
        ids: a unique id for each row (n,): whole numbers or texts, none missing. None takes the row
            numbers.

    Example:
        >>> import os, tempfile
        >>> from tf_labeldp import PrivacyBudget, PrivateLabels, RandomizedResponse
        >>> store = os.path.join(tempfile.mkdtemp(), "store")
        >>> clicks = Keyed(["u7-1", "u7-2", "u9-1"])
        >>> budget = PrivacyBudget(1.0)
        >>> labels = PrivateLabels([0, 1, 1], 2, budget=budget, draws=clicks, store=store)
        >>> labels.randomize(RandomizedResponse(1.0, 2), key="clicks").values.shape
        (3,)
    """

    ids: Public[Any] = dataclasses.field(default=None, repr=False)
    receipts: Receipts = dataclasses.field(default=Receipts(), init=False, repr=False)

    def __post_init__(self) -> None:
        public = public_input(self.ids)
        object.__setattr__(self, "ids", public.value)
        object.__setattr__(self, "receipts", public.receipts)

    @classmethod
    def of(cls, draws: Setting[Any]) -> Keyed | None:
        """Returns the keyed draws that ``PrivateLabels(draws=)`` names; None if it names none."""
        if isinstance(draws, Keyed):
            return draws
        return cls() if _validate.one_of("draws", draws, ("stored", "keyed")) == "keyed" else None


def kind_of_vault(kind: LabelKind | int | None, num_classes: int | None) -> LabelKind:
    """Returns the kind of labels of a vault from its arguments."""
    if (kind is None) == (num_classes is None):
        raise ValueError(
            "expected the kind of the labels once, got "
            f"{'none' if kind is None else f'{kind!r} and num_classes={num_classes!r}'}. Give "
            "num_classes=K, Classes([...]), Numbers(low, high) or Rows(num_labels): it is public, "
            "and inferring it from the labels would reveal whether a rare class occurs."
        )
    if isinstance(kind, LabelKind):
        return kind
    return LabelKind.of(num_classes=num_classes if kind is None else kind)


def store_of_vault(store: Any, budget: Any) -> Store:
    """Returns the store of a vault; raises unless it has a budget, or may keep one."""
    folder = store if isinstance(store, Store) else Store(store)
    if not isinstance(budget, PrivacyBudget) and (budget is not None or folder.path is None):
        raise TypeError(
            f"budget must be a PrivacyBudget, got {type(budget).__name__}. Write "
            "budget=PrivacyBudget(epsilon=1.0)."
        )
    return folder


def opened(store: Store) -> LabelStore | None:
    """Returns the folder of a store, which may not exist yet; None in memory."""
    return None if store.path is None else LabelStore(store.path, in_project=store.project)


def check_fits_keys(kind: LabelKind, insecure_seed: int | None, unlabelled: Any) -> None:
    """Raises for arguments of a vault that keyed draws do not take."""
    if kind.unit == "row" or insecure_seed is not None:
        raise ValueError("Keyed draws take neither Rows nor insecure_seed. Leave it out.")
    if unlabelled is not None:
        raise ValueError("Keyed draws need the labels of all examples. Leave unlabelled out.")


def takes_arguments_of_0_3(constructor: _Constructor) -> _Constructor:
    """Lets the constructor of a vault take the arguments of version 0.3, which warn."""

    @functools.wraps(constructor)
    def construct(self: Any, labels: Any, *places: Any, **keywords: Any) -> None:
        names = [name for name in keywords if name in _validate.REPLACED["PrivateLabels"]]
        old = {name: keywords.pop(name) for name in names}
        old = {name: value for name, value in old.items() if value is not None}
        if old:
            keywords = _in_new_arguments(old, dict(zip(["kind"], places, strict=False)) | keywords)
            places = ()
            for name in old:
                # The line of the call: the library's own calls are errors in its tests.
                _validate.warn_of_old("PrivateLabels", name, stacklevel=3)
        constructor(self, labels, *places, **keywords)

    return construct  # type: ignore[return-value]


def _in_new_arguments(old: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    """Returns the arguments ``new``, with those that stand for the ones of version 0.3."""
    of_kind = {name: old[name] for name in _OF_KIND if name in old}
    if of_kind:
        number = [new.pop(name) for name in ("kind", "num_classes") if name in new]
        new["kind"] = LabelKind.of(*number, **of_kind)
    if "project" in old or "actor" in old:
        new["store"] = Store(new.get("store"), project=old.get("project"), actor=old.get("actor"))
    if "ids" in old:
        if new.get("draws") != "keyed":
            raise ValueError("ids= is for keyed draws. Write draws=Keyed(ids), or leave ids out.")
        new["draws"] = Keyed(old["ids"])
    if "max_examples_per_user" in old:
        if new.get("users") is None:
            raise ValueError("expected users with max_examples_per_user, got none. Give both.")
        new["users"] = Users(new["users"], at_most=old["max_examples_per_user"])
    return new
