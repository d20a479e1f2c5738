"""Where the labels of one fit are: a vault, given or made; or rows of zeros and ones."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from tf_labeldp.accounting import Charge, PrivacyBudget, PrivacyGuarantee, compose_charges
from tf_labeldp.estimation import LabelMomentMechanism
from tf_labeldp.heads._public_rows import PublicRows
from tf_labeldp.private_labels import PrivateLabels


@dataclasses.dataclass(frozen=True)
class LabelArguments:
    """What a head was told about the labels and their release; see ``PrivateRidge``."""

    epsilon: float
    delta: float
    num_classes: int | None
    classes: Any
    low: float | None
    high: float | None
    num_labels: int | None
    noise: str
    key: str | None
    seed: int | None


class LabelSource:
    """Labels that can be released once, as moments with public rows.

    Args:
        told: the head's arguments.
        labels: a ``PrivateLabels``, or labels as ``PrivateRidge.fit`` takes them.
    """

    def __init__(self, told: LabelArguments, labels: Any) -> None:
        self._told = told
        self.class_values: np.ndarray | None = None
        self.label_range: tuple[float, float] | None = None
        self._rows: np.ndarray | None = None
        self.vault: PrivateLabels | None = None
        given = {
            "num_classes or classes": told.num_classes is not None or told.classes is not None,
            "low and high": told.low is not None or told.high is not None,
            "num_labels": told.num_labels is not None,
        }
        if not isinstance(labels, PrivateLabels) and sum(given.values()) != 1:
            found = [name for name, is_given in given.items() if is_given]
            raise ValueError(
                "the head must be told what the labels are, by exactly one of num_classes (or "
                "classes, their values), low and high (numbers), and num_labels (rows of zeros and "
                f"ones); got {' together with '.join(found) or 'none of them'}. They are public, "
                "so they are never taken from the labels; a PrivateLabels knows them."
            )
        if told.num_labels is not None:
            self._open_rows(labels)
            return
        if isinstance(labels, PrivateLabels):
            self._check_vault(labels)
            self.vault = labels
        else:
            self.mechanism(1.0)  # its arguments first: labels are not looked at for a bad delta
            self.vault = PrivateLabels(
                labels,
                told.num_classes,
                classes=told.classes,
                low=told.low,
                high=told.high,
                budget=PrivacyBudget(told.epsilon, told.delta),
                seed=told.seed,
            )
        self.label_range = self.vault.label_range
        if self.label_range is None:
            self.class_values = self.vault.decode(np.arange(self.vault.num_classes))
        if not self.vault.has_draw(told.key):
            self.vault.check_budget(self.mechanism(1.0))

    def __len__(self) -> int:
        return len(self._rows) if self.vault is None and self._rows is not None else len(self._held)

    def check_length(self, num_rows: int) -> None:
        """Raises unless there are so many labels."""
        if len(self) != num_rows:
            raise ValueError(
                f"there are {num_rows} rows of features and {len(self)} labels; give one row a "
                "label, in the same order."
            )

    @property
    def code_variance(self) -> float:
        """The largest variance of the code of a label, summed over the columns."""
        if self._rows is not None:
            return 0.25 * self._rows.shape[1]
        if self.label_range is not None:
            return 0.25 * (self.label_range[1] - self.label_range[0]) ** 2
        k = self._held.num_classes
        return 0.25 if k == 2 else 1.0 - 1.0 / k

    def mechanism(self, max_l1: float) -> LabelMomentMechanism:
        """Returns the mechanism of the release, for rows of unit norm and L1 norm ``max_l1``."""
        told = self._told
        kind: dict[str, Any]
        if told.num_labels is not None:
            kind = {"num_labels": told.num_labels}
        elif self.vault is None:
            known = told.num_classes
            if known is None and told.classes is not None:
                known = len(told.classes)
            kind = {"num_classes": known, "low": told.low, "high": told.high}
        elif self.vault.label_range is not None:
            low, high = self.vault.label_range
            kind = {"low": low, "high": high}
        else:
            kind = {"num_classes": self.vault.num_classes}
        return LabelMomentMechanism(
            told.epsilon,
            told.delta,
            max_l1=max_l1 if told.noise == "laplace" else None,
            noise=told.noise,
            **kind,
        )

    def release(self, mechanism: LabelMomentMechanism, rows: PublicRows) -> np.ndarray:
        """Returns the noisy moments, charged to the vault."""
        if self._rows is None:
            return self._held.release(mechanism, public_input=rows, key=self._told.key)
        seed = self._told.seed
        rng = None if seed is None else np.random.default_rng(seed)
        return mechanism.release(self._rows, rows, rng=rng)

    def guarantee(self, mechanism: LabelMomentMechanism) -> PrivacyGuarantee:
        """Returns the statement of the vault, or of the one release."""
        if self._rows is None:
            return self._held.guarantee()
        one = compose_charges([Charge.of(mechanism)], mechanism.delta)
        return PrivacyGuarantee(
            one.epsilon,
            one.delta,
            unit="the whole row of labels of one training example",
            assumptions=(
                "the features are public, and each person has one example",
                "this fit is the only use of these labels: no vault keeps account of them",
            ),
            seeded=self._told.seed is not None,
        )

    @property
    def _held(self) -> PrivateLabels:
        if self.vault is None:
            raise RuntimeError("rows of labels have no vault.")
        return self.vault

    def _open_rows(self, labels: Any) -> None:
        if isinstance(labels, PrivateLabels):
            raise TypeError(
                "a PrivateLabels holds one label an example, not rows of labels; leave out "
                "num_labels, or pass the rows (n, L) themselves."
            )
        self._rows = np.asarray(labels)
        if self._rows.ndim != 2:
            raise ValueError(
                f"labels must have shape (n, {self._told.num_labels}), got {self._rows.shape}."
            )

    def _check_vault(self, vault: PrivateLabels) -> None:
        told = self._told
        if told.seed is not None:
            raise ValueError(
                "seed must be None with a PrivateLabels: it has its own source of random bits. Use "
                "PrivateLabels(..., seed=...) for a repeatable run."
            )
        if vault.label_range is None:
            found: dict[str, Any] = {"num_classes": vault.num_classes, "classes": vault.classes}
        else:
            found = {"low": vault.label_range[0], "high": vault.label_range[1]}
        for name in ("num_classes", "classes", "low", "high"):
            given = getattr(told, name)
            given = tuple(given) if name == "classes" and given is not None else given
            if given is not None and given != found.get(name):
                raise ValueError(
                    f"{name} is not that of the PrivateLabels, which has {found}. Leave it out: "
                    "the vault knows its labels."
                )
