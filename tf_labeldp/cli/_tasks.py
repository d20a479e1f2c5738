"""The draw of ``tf-labeldp randomize``: noisy classes or noisy numbers, once for each store.

A task knows how labels are read and checked, which mechanism draws, and the facts of the statement.
"""

from __future__ import annotations

import abc
import argparse
import contextlib
import csv
import dataclasses
import hashlib
import json
import pathlib
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tf_labeldp import _validate, mechanisms
from tf_labeldp.accounting import Assumption, BudgetExceededError, PrivacyBudget
from tf_labeldp.cli import _tables
from tf_labeldp.cli._console import CommandError, explained
from tf_labeldp.mechanisms.base import Mechanism, serialize
from tf_labeldp.mechanisms.classes import top_k_members
from tf_labeldp.vault import LabelRandomizer, LabelStoreError, NoisyLabels, PrivateLabels
from tf_labeldp.vault.records import DrawSettingsError
from tf_labeldp.vault.store import budget_for_store

_ASSUMPTIONS = (
    Assumption(
        "public-rows",
        "holder",
        "The rows of the table, their order and the copied id columns do not depend on the labels: "
        "no row was left out because of its label.",
    ),
    Assumption(
        "public-settings",
        "holder",
        "The range of the labels, the classes and all other settings were chosen without the "
        "labels.",
    ),
)
"""Of a table's statement, in addition to those of its vault."""
_ALONE = Assumption(
    "only-release",
    "holder",
    "Nothing else that is made from these labels is published, except for copies of these noisy "
    "labels: the epsilons of separate draws add up.",
)
_KEY = "noisy-labels"
"""Names the draw in the vault."""
_OWN_KEYS = (_KEY, "label-randomizer")
"""How the names of the command's own draws begin."""
_NUMBER_PRIOR = 'JSON {"values": [...], "probabilities": [...]}, or CSV with these two columns'
_CLASS_PRIOR = 'JSON {"probabilities": [...]}, or CSV with the columns class and probability'


class Draw(NamedTuple):
    noisy_labels: NoisyLabels  # of all rows, in their order
    facts: dict[str, Any]  # of the mechanism, for the statement, as JSON can hold them
    stored: bool  # whether some or all of it was drawn by an earlier run, and now read


class Task(abc.ABC):
    kind: ClassVar[_tables.ColumnKind]
    output_type: ClassVar[Any]  # the Arrow type of the column of noisy labels
    assumption: ClassVar[Assumption]  # of the statement, for labels of this kind

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args

    @property
    @abc.abstractmethod
    def label_set(self) -> dict[str, Any]:
        """The arguments of the vault that describe the labels."""

    @abc.abstractmethod
    def check(self, labels: np.ndarray) -> str | None:
        """Returns the problem of the labels, in words that show none of them, or None."""

    @abc.abstractmethod
    def _draw(self, vault: PrivateLabels) -> tuple[NoisyLabels, dict[str, Any]]:
        """Returns noisy labels and the facts of the statement."""

    def encoded(self, column: Any) -> np.ndarray:
        return column.to_numpy()

    def decoded(self, noisy: np.ndarray) -> Any:
        return pa.array(noisy)

    def vault(self, labels: np.ndarray, ids: Any) -> PrivateLabels:
        """Returns the vault of the labels, which it copies; ids as ``PrivateLabels`` takes them."""
        args = self.args
        return PrivateLabels(
            labels,
            **self.label_set,
            budget=budget_for_store(args.store, PrivacyBudget(args.epsilon)),
            store=args.store,
            draws=args.draws,
            ids=ids,
            insecure_seed=args.insecure_seed,
        )

    def draw(self, vault: PrivateLabels) -> Draw:
        own = [receipt for receipt in vault.receipts if receipt.labels.name == vault.label_set.name]
        before = [receipt for receipt in own if receipt.key.startswith(_OWN_KEYS)]
        if self.args.insecure_seed is not None and not all(receipt.seeded for receipt in before):
            raise CommandError(
                f"the store {self.args.store} holds draws of these labels made without a seed, "
                "which --insecure-seed does not change; leave --insecure-seed out, or give a "
                "new --store"
            )
        try:
            noisy, facts = self._draw(vault)
        except BudgetExceededError as error:
            if before:
                raise
            raise CommandError(f"the store {self.args.store}: {error}") from None
        assumptions, remarks = [*_ASSUMPTIONS, self.assumption], list(noisy.remarks)
        if {receipt.id for receipt in vault.receipts} - {receipt.id for receipt in noisy.receipts}:
            remarks.append(
                "this is the statement of this table alone; with all other releases of these "
                f"labels in the store it is {vault.guarantee().headline}"
            )
        else:
            assumptions.append(_ALONE)
        noisy = dataclasses.replace(noisy, assumptions=tuple(assumptions), remarks=tuple(remarks))
        earlier = {receipt.id for receipt in before}
        return Draw(noisy, facts, stored=any(receipt.id in earlier for receipt in noisy.receipts))

    def _split(self, mechanism: Mechanism, prior_epsilon: float = 0.0) -> dict[str, Any]:
        """Returns the mechanism that drew, and the parts of epsilon, as JSON can hold them."""
        parts = {"total": self.args.epsilon, "prior": prior_epsilon, "draw": mechanism.epsilon}
        return {"epsilon": parts, "mechanism": serialize(mechanism)}

    @contextlib.contextmanager
    def explained(self) -> Iterator[None]:
        """Turns errors of the vault and its store, which show no label, into the command's."""
        store = self.args.store
        try:
            yield
        except (BudgetExceededError, DrawSettingsError):
            raise CommandError(
                f"the store {store} holds draws of these labels made with other settings; give "
                "those, or a new --store (publishing from both costs the sum of their epsilons)"
            ) from None
        except CommandError:
            raise
        except (LabelStoreError, ValueError, TypeError) as error:
            raise CommandError(" ".join(str(error).split())) from None
        except OSError as error:
            raise CommandError(
                f"the store {store} cannot be used ({error.strerror}); make room or give another "
                "--store"
            ) from None


class Classification(Task):
    kind = _tables.CLASS
    output_type = pa.int64()
    assumption = Assumption(
        "labels-in-range",
        "holder",
        "Every label was known to be one of the classes, as the table itself shows.",
    )

    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__(args)
        self.names: list[str] | None = args.classes  # in the order of their codes
        self.num_classes = len(args.classes) if args.classes else args.num_classes
        self.prior = None
        if args.prior is not None:
            names = self.names or [str(code) for code in range(self.num_classes)]
            self.prior = _read_class_prior(args.prior, names)

    @property
    def label_set(self) -> dict[str, Any]:
        """Codes, not names: ten million texts would not fit, and the codes are the same labels."""
        return {"num_classes": self.num_classes}

    def check(self, labels: np.ndarray) -> str | None:
        wrong = int(np.count_nonzero((labels < 0) | (labels >= self.num_classes)))
        return f"{wrong} of {labels.size} labels are {self._outside()}" if wrong else None

    def _outside(self) -> str:
        return f"not in 0..{self.num_classes - 1}; raise --num-classes or renumber the classes"

    def _draw(self, vault: PrivateLabels) -> tuple[NoisyLabels, dict[str, Any]]:
        mechanism: mechanisms.ClassificationMechanism
        outputs: str | list[Any] = "all"  # by name only where some are left out
        prior = None
        if self.prior is None:
            mechanism = mechanisms.RandomizedResponse(self.args.epsilon, self.num_classes)
        else:
            mechanism = with_prior = mechanisms.RRWithPrior(self.args.epsilon, self.num_classes)
            size = with_prior.optimal_k(self.prior)
            possible = np.flatnonzero(top_k_members(self.prior[np.newaxis], size)[0])
            if possible.size < self.num_classes:
                outputs = self.decoded(possible).to_pylist()
            prior = {"source": "public", "probabilities": self.prior.tolist()}
        # Class names and prior are no part of the mechanism. With others the stored draw is not
        # found under its key, and a new one would pass the budget.
        names = None if self.names is None else tuple(self.names)
        text = repr((names, None if self.prior is None else self.prior.tolist()))
        key = f"{_KEY}-{hashlib.sha256(text.encode()).hexdigest()[:16]}"
        return vault.randomize(mechanism, priors=self.prior, key=key), {
            "task": "classification",
            "num_classes": self.num_classes,
            "classes": self.names,
            **self._split(mechanism),
            "outputs": outputs,
            "prior": prior,
        }


class NamedClassification(Classification):
    kind = _tables.NAME
    output_type = pa.string()

    def encoded(self, column: Any) -> np.ndarray:
        """Returns ``int64`` codes, -1 for an unknown name."""
        codes = pc.index_in(column, value_set=pa.array(self.names, pa.string()))
        return codes.fill_null(-1).cast(pa.int64()).to_numpy()

    def decoded(self, noisy: np.ndarray) -> Any:
        return pa.array(self.names, pa.string()).take(pa.array(noisy))

    def _outside(self) -> str:
        return (
            f"none of the {self.num_classes} --classes; add what is missing or check the spelling"
        )


class Regression(Task):
    kind = _tables.NUMBER
    output_type = pa.float64()
    # The same with and without --clip: whether it was needed depends on the labels.
    assumption = Assumption(
        "labels-in-range",
        "holder",
        "Every label was known to lie in the label range, or was set to its nearer end (--clip); "
        "without that the table itself shows that all of them lie there.",
    )

    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__(args)
        self.randomizer: Any  # on the best bins, or a mechanism for comparison
        if args.mechanism in (None, "rr_on_bins"):
            public = {} if args.prior is None else _read_number_prior(args)
            with explained(ValueError):
                self.randomizer = LabelRandomizer(
                    args.epsilon,
                    args.loss or "squared_error",
                    args.prior_epsilon,
                    args.max_values or LabelRandomizer.max_values,
                    bool(args.whole_numbers),
                    **public,
                )
        else:
            mechanism = getattr(mechanisms, args.mechanism.title().replace("_", "") + "Mechanism")
            with explained(ValueError):
                self.randomizer = mechanism(args.epsilon, args.low, args.high)

    @property
    def label_set(self) -> dict[str, Any]:
        return {"low": self.args.low, "high": self.args.high, "clip": bool(self.args.clip)}

    def check(self, labels: np.ndarray) -> str | None:
        low, high = self.args.low, self.args.high
        bad = int(np.count_nonzero(~np.isfinite(labels)))
        if bad:
            return f"{bad} of {labels.size} labels are NaN or infinite; {_tables.FILL}"
        outside = int(np.count_nonzero((labels < low) | (labels > high)))
        if outside and not self.args.clip:
            return (
                f"{outside} of {labels.size} labels lie outside --low {low:g} to --high {high:g}; "
                "widen the range, or give --clip to set them to its nearer end"
            )
        return None

    def _draw(self, vault: PrivateLabels) -> tuple[NoisyLabels, dict[str, Any]]:
        # No word of clipping: whether it was needed depends on the labels.
        args, randomizer = self.args, self.randomizer
        facts = {"task": "regression", "label_range": [args.low, args.high], "classes": None}
        if not isinstance(randomizer, LabelRandomizer):
            noisy = vault.randomize(randomizer, key=_KEY)
            return noisy, {**facts, **self._split(randomizer), "prior": None}
        noisy = vault.randomize(randomizer)
        bins, prior = noisy.mechanism, noisy.priors
        if not isinstance(bins, mechanisms.RROnBins) or prior is None:
            raise CommandError("the draw of this store was not made on bins; give a new --store")
        total, error = randomizer.total(noisy)
        return noisy, {
            **facts,
            "loss": randomizer.loss,
            "total": {"estimate": total, "standard_error": error},
            **self._split(bins, args.epsilon - bins.epsilon),
            "outputs": np.asarray(bins.outputs).tolist(),
            "prior": {
                "source": "private histogram" if args.prior is None else "public",
                "values": np.asarray(prior.values).tolist(),
                "probabilities": np.asarray(prior.probabilities).tolist(),
            },
        }


def task_of(args: argparse.Namespace) -> Task:
    if args.task == "regression":
        return Regression(args)
    return NamedClassification(args) if args.classes else Classification(args)


def _read_number_prior(args: argparse.Namespace) -> dict[str, Any]:
    """Returns the values, rising, and the probabilities of a prior over numbers in a range."""
    values, column = _read_prior(args.prior, _NUMBER_PRIOR, "values")
    probabilities = _normalized(args.prior, column, len(column))
    outside = int(np.count_nonzero((values < args.low) | (values > args.high)))
    if outside:
        raise CommandError(
            f"--prior {args.prior} has {outside} values outside --low {args.low:g} to --high "
            f"{args.high:g}; leave them out or widen the range"
        )
    # The mechanism must know the whole range; an end that the prior lacks has no weight in it.
    ends = np.setdiff1d([args.low, args.high], values)
    values = np.concatenate([values, ends])
    probabilities = np.concatenate([probabilities, np.zeros(ends.size)])
    order = np.argsort(values, kind="stable")
    return {"values": tuple(values[order].tolist()), "prior": tuple(probabilities[order].tolist())}


def _read_class_prior(path: pathlib.Path, classes: Sequence[str]) -> np.ndarray:
    """Returns the probabilities of a prior over classes, in their order."""
    names, probabilities = _read_prior(path, _CLASS_PRIOR, None)
    if names is not None:
        if sorted(names) != sorted(classes):
            raise CommandError(
                f"--prior {path} has {len(names)} rows for {len(set(names) & set(classes))} of the "
                f"{len(classes)} classes; give each class one row"
            )
        probabilities = probabilities[[names.index(name) for name in classes]]
    return _normalized(path, probabilities, len(classes))


def _normalized(path: pathlib.Path, probabilities: np.ndarray, size: int) -> np.ndarray:
    with explained(ValueError):
        [row] = _validate.prior_rows(f"--prior {path}", probabilities, 1, size)
    return row / row.sum()


def _read_prior(path: pathlib.Path, expected: str, key: str | None) -> tuple[Any, np.ndarray]:
    """Returns the first column of a prior and its probabilities, from a JSON or CSV file.

    The first column is numbers under ``key``, or names: None in a JSON file, which has none.
    """
    first: Any
    try:
        text = path.read_text(encoding="utf-8-sig")
        if path.suffix.lower() == ".csv":
            _, *rows = (row for row in csv.reader(text.splitlines()) if row)
            pairs = ([cell.strip() for cell in row] for row in rows)
            first, column = map(list, zip(*pairs, strict=True))
        else:
            content = json.loads(text)
            content = content if isinstance(content, dict) else {"probabilities": content}
            first, column = content[key] if key else None, content["probabilities"]
        probabilities = np.array([float(cell) for cell in column])
        if key:
            first = np.array([float(cell) for cell in first])
        if first is not None and len(first) != probabilities.size:
            raise ValueError
    except OSError as error:
        raise CommandError(
            f"--prior {path} cannot be read ({error.strerror}); check the path"
        ) from None
    except (ValueError, LookupError, TypeError, OverflowError, RecursionError, csv.Error):
        raise CommandError(f"--prior {path} is not as expected; give {expected}") from None
    return first, probabilities
