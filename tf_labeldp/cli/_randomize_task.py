"""What the tasks of ``tf-labeldp randomize`` share: the vault, its store, what may be said."""

from __future__ import annotations

import abc
import contextlib
import dataclasses
import os
import pathlib
from collections.abc import Iterator
from typing import Any

import numpy as np

from tf_labeldp import mechanisms
from tf_labeldp.accounting import BudgetExceededError, PrivacyBudget
from tf_labeldp.cli._errors import CommandError
from tf_labeldp.cli._id_facts import IdFacts
from tf_labeldp.mechanisms._base import Mechanism
from tf_labeldp.vault import LabelStoreError, NoisyLabels, PrivateLabels
from tf_labeldp.vault._store import DrawSettingsError, budget_for_store

ASSUMPTIONS = (
    "which rows are in the table, their order and the copied id columns do not depend on the "
    "labels: no row was left out because of its label",
    "the range of the labels, the classes and all other settings were chosen without the labels",
)
"""What the statement of a table rests on beside the assumptions of its vault."""

_ALONE = (
    "nothing else is made from these labels and handed out, but copies of these same noisy "
    "labels: the epsilons of separate draws add up"
)

KEY = "noisy-labels"
"""Names the draw in the vault."""
_OWN_KEYS = (KEY, "label-randomizer")
"""How the names of the draws begin that the command makes, or finds."""


@dataclasses.dataclass(frozen=True, eq=False)
class Draw:
    """Noisy labels and what may be said of them.

    Attributes:
        noisy_labels: of all rows, in their order.
        facts: what the statement says of the mechanism, as JSON can hold it.
        stored: whether some or all of it was drawn by an earlier run, and now read.
    """

    noisy_labels: NoisyLabels
    facts: dict[str, Any]
    stored: bool


@dataclasses.dataclass(frozen=True, eq=False)
class Task(abc.ABC):
    """How labels are read, randomized and written.

    Attributes:
        epsilon: of all that is handed out together.
        store: folder of the vault's store, or None.
        insecure_seed: for repeatable draws that protect nobody, or None.
    """

    epsilon: float
    store: pathlib.Path | None
    insecure_seed: int | None

    @property
    @abc.abstractmethod
    def kind(self) -> str:
        """What the label column holds: one of the kinds of ``_table_read``."""

    @property
    @abc.abstractmethod
    def output_type(self) -> Any:
        """The Arrow type of the column of noisy labels."""

    @property
    @abc.abstractmethod
    def assumption(self) -> str:
        """What the statement rests on for labels of this kind."""

    @abc.abstractmethod
    def check(self, labels: np.ndarray) -> str | None:
        """Returns what is wrong with the labels, in words that show none of them, or None."""

    @abc.abstractmethod
    def encoded(self, chunk: Any) -> np.ndarray:
        """Returns an Arrow array of labels as the vault takes them."""

    @abc.abstractmethod
    def decoded(self, noisy: np.ndarray) -> Any:
        """Returns noisy labels as an Arrow array of the output's column."""

    def vault(self, labels: np.ndarray) -> PrivateLabels:
        """Returns the vault of the labels, which it copies.

        Raises:
            CommandError: the store is of other labels or settings, damaged, or cannot be used.
        """
        with self._explained():
            return self._vault(
                labels,
                budget=budget_for_store(self.store, PrivacyBudget(self.epsilon)),
                store=self.store,
                insecure_seed=self.insecure_seed,
            )

    def draw(self, vault: PrivateLabels) -> Draw:
        """Returns the noisy labels: those in the store, or new ones.

        Raises:
            CommandError: the store holds draws of other settings, or the mechanism refuses them.
        """
        with self._explained():
            before = [one for one in vault.receipts if one.key.startswith(_OWN_KEYS)]
            secret = any(not one.seeded for one in before)
            if self.insecure_seed is not None and secret:
                raise CommandError(
                    f"the store {self.store} holds draws of these labels made without a seed, "
                    "which --insecure-seed does not change; leave --insecure-seed out, or give a "
                    "new --store"
                )
            try:
                noisy, facts = self._draw(vault)
            except BudgetExceededError as error:
                if before:
                    raise
                raise CommandError(f"the store {self.store}: {error}") from None
            notes, remarks, everything = [*ASSUMPTIONS, self.assumption], [], vault.guarantee()
            if {one.id for one in vault.receipts} - {one.id for one in noisy.receipts}:
                remarks = [
                    "this is the statement of this table alone; with all else that the store has "
                    f"handed out of these labels it is {everything.headline}"
                ]
            else:
                notes.append(_ALONE)
            noisy = dataclasses.replace(
                noisy, assumptions=tuple(notes), remarks=(*noisy.remarks, *remarks)
            )
            earlier = {one.id for one in before}
            return Draw(noisy, facts, any(one.id in earlier for one in noisy.receipts))

    def check_ids(self, ids: IdFacts) -> None:
        """Raises if the store, where there is one, is of rows with other ids; else keeps them.

        Raises:
            CommandError: other ids, or the store cannot be used.
        """
        if self.store is not None:
            with self._explained():
                ids.check_store(self.store.expanduser())

    def split(self, mechanism: Mechanism, prior_epsilon: float = 0.0) -> dict[str, Any]:
        """Returns the mechanism that drew, and how epsilon was split, as JSON can hold them."""
        return {
            "epsilon": {
                "total": self.epsilon,
                "prior": prior_epsilon,
                "draw": mechanism.epsilon,
            },
            "mechanism": mechanisms.serialize(mechanism),
        }

    @abc.abstractmethod
    def _vault(self, labels: np.ndarray, **arguments: Any) -> PrivateLabels:
        """Returns the vault of these labels."""

    @abc.abstractmethod
    def _draw(self, vault: PrivateLabels) -> tuple[NoisyLabels, dict[str, Any]]:
        """Returns noisy labels and the facts of the statement."""

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except (BudgetExceededError, DrawSettingsError):
            raise self._other_settings() from None
        except LabelStoreError as error:
            raise CommandError(f"{error}") from None
        except CommandError:
            raise
        except ValueError as error:  # what it says of labels is how many, never which
            raise CommandError(" ".join(str(error).split())) from None
        except OSError as error:
            raise CommandError(
                f"the store {self.store} cannot be used ({error.strerror}); make room or give "
                "another --store"
            ) from None

    def _other_settings(self) -> CommandError:
        return CommandError(
            f"the store {self.store} holds draws of these labels made with other settings; give "
            "those, or a new --store (publishing from both costs the sum of their epsilons)"
        )


def check_apart(output: pathlib.Path, store: pathlib.Path) -> None:
    """Raises if whoever publishes the folder of the output would publish the store with it."""
    store = store.expanduser()
    folder, kept = (pathlib.Path(os.path.realpath(path)) for path in (output.parent, store))
    if folder == kept or folder in kept.parents or kept in folder.parents:
        where = "lies in" if folder in kept.parents else "has in it"
        raise CommandError(
            f"the store {store} {where if folder != kept else 'is'} the folder of --output "
            f"{output}, which may be published; the store stays with the labels: give folders "
            "apart from each other"
        )


def as_list(values: Any) -> list[Any]:
    """Returns numbers as JSON can hold them."""
    return np.asarray(values).tolist()
