"""What ``tf-labeldp randomize`` draws: noisy classes or noisy numbers, once for each store.

A task knows how labels are read and checked, which mechanism draws, and what the statement says.
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
from typing import Any, ClassVar, NoReturn

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tf_labeldp import mechanisms
from tf_labeldp._validate import PRIOR_SUM_TOLERANCE
from tf_labeldp.accounting import Assumption, BudgetExceededError, PrivacyBudget
from tf_labeldp.cli import _tables
from tf_labeldp.cli._console import CommandError
from tf_labeldp.mechanisms._base import Mechanism, serialize
from tf_labeldp.mechanisms._classes import top_k_members
from tf_labeldp.vault import LabelRandomizer, LabelStoreError, NoisyLabels, PrivateLabels
from tf_labeldp.vault._records import DrawSettingsError
from tf_labeldp.vault._store import budget_for_store

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
"""What the statement of a table rests on beside the assumptions of its vault."""

_ALONE = Assumption(
    "only-release",
    "holder",
    "Nothing else that is made from these labels is published, except for copies of these noisy "
    "labels: the epsilons of separate draws add up.",
)

_KEY = "noisy-labels"
"""Names the draw in the vault."""
_OWN_KEYS = (_KEY, "label-randomizer")
"""How the names of the draws begin that the command makes, or finds."""

_NUMBER_PRIOR = 'JSON {"values": [...], "probabilities": [...]}, or CSV with these two columns'
_CLASS_PRIOR = 'JSON {"probabilities": [...]}, or CSV with the columns class and probability'


def task_of(args: argparse.Namespace) -> Task:
    """Returns the task that the checked options of the command ask for."""
    shared = ("epsilon", "store", "draws", "insecure_seed")
    common = {name: getattr(args, name) for name in shared}
    if args.task == "classification":
        names = args.classes or [str(code) for code in range(args.num_classes)]
        prior = None if args.prior is None else _read_class_prior(args.prior, names)
        if args.classes is None:
            return Classification(**common, num_classes=args.num_classes, prior=prior)
        return NamedClassification(
            **common, num_classes=len(names), prior=prior, classes=tuple(names)
        )
    mechanism = None
    if args.mechanism not in (None, "rr_on_bins"):
        name = args.mechanism.title().replace("_", "") + "Mechanism"
        try:
            mechanism = getattr(mechanisms, name)(args.epsilon, args.low, args.high)
        except ValueError as error:
            raise CommandError(f"--mechanism {args.mechanism}: {error}") from None
    return Regression(
        **common,
        low=args.low,
        high=args.high,
        clip=bool(args.clip),
        mechanism=mechanism,
        loss=args.loss or "squared_error",
        prior_epsilon=args.prior_epsilon,
        max_values=args.max_values,
        whole_numbers=bool(args.whole_numbers),
        prior=None if args.prior is None else _read_number_prior(args.prior, args.low, args.high),
    )


@dataclasses.dataclass(frozen=True, eq=False)
class Draw:
    """Noisy labels and what may be said of them."""

    noisy_labels: NoisyLabels  # of all rows, in their order
    facts: dict[str, Any]  # what the statement says of the mechanism, as JSON can hold it
    stored: bool  # whether some or all of it was drawn by an earlier run, and now read


@dataclasses.dataclass(frozen=True, eq=False)
class Task(abc.ABC):
    """How labels are read, randomized and written."""

    kind: ClassVar[_tables.ColumnKind]
    output_type: ClassVar[Any]  # the Arrow type of the column of noisy labels
    assumption: ClassVar[Assumption]  # what the statement rests on for labels of this kind

    epsilon: float  # of all that is handed out together
    store: pathlib.Path | None  # folder of the vault's store
    draws: str  # where the vault's random bits come from
    insecure_seed: int | None  # for repeatable draws that protect nobody

    @abc.abstractmethod
    def check(self, labels: np.ndarray) -> str | None:
        """Returns what is wrong with the labels, in words that show none of them, or None."""

    def encoded(self, chunk: Any) -> np.ndarray:
        """Returns an Arrow array of labels as the vault takes them."""
        return chunk.to_numpy(zero_copy_only=False)

    def decoded(self, noisy: np.ndarray) -> Any:
        """Returns noisy labels as an Arrow array of the output's column."""
        return pa.array(noisy)

    def vault(self, labels: np.ndarray, ids: Any) -> PrivateLabels:
        """Returns the vault of the labels, which it copies; ids as ``PrivateLabels`` takes them."""
        with self.explained():
            return PrivateLabels(
                labels,
                **self._label_set(),
                budget=budget_for_store(self.store, PrivacyBudget(self.epsilon)),
                store=self.store,
                draws=self.draws,
                ids=ids,
                insecure_seed=self.insecure_seed,
            )

    def draw(self, vault: PrivateLabels) -> Draw:
        """Returns the noisy labels: those in the store, or new ones."""
        with self.explained():
            own = [one for one in vault.receipts if one.labels.name == vault.label_set.name]
            before = [one for one in own if one.key.startswith(_OWN_KEYS)]
            if self.insecure_seed is not None and not all(one.seeded for one in before):
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
            assumptions, remarks = [*_ASSUMPTIONS, self.assumption], list(noisy.remarks)
            if {one.id for one in vault.receipts} - {one.id for one in noisy.receipts}:
                remarks.append(
                    "this is the statement of this table alone; with all else that the store has "
                    f"handed out of these labels it is {vault.guarantee().headline}"
                )
            else:
                assumptions.append(_ALONE)
            noisy = dataclasses.replace(
                noisy, assumptions=tuple(assumptions), remarks=tuple(remarks)
            )
            earlier = {one.id for one in before}
            return Draw(noisy, facts, stored=any(one.id in earlier for one in noisy.receipts))

    def split(self, mechanism: Mechanism, prior_epsilon: float = 0.0) -> dict[str, Any]:
        """Returns the mechanism that drew, and how epsilon was split, as JSON can hold them."""
        return {
            "epsilon": {"total": self.epsilon, "prior": prior_epsilon, "draw": mechanism.epsilon},
            "mechanism": serialize(mechanism),
        }

    @abc.abstractmethod
    def _label_set(self) -> dict[str, Any]:
        """Returns what the vault is told of the labels."""

    @abc.abstractmethod
    def _draw(self, vault: PrivateLabels) -> tuple[NoisyLabels, dict[str, Any]]:
        """Returns noisy labels and the facts of the statement."""

    @contextlib.contextmanager
    def explained(self) -> Iterator[None]:
        """Turns what the vault and its store raise into errors of the command."""
        try:
            yield
        except (BudgetExceededError, DrawSettingsError):
            raise CommandError(
                f"the store {self.store} holds draws of these labels made with other settings; "
                "give those, or a new --store (publishing from both costs the sum of their "
                "epsilons)"
            ) from None
        except CommandError:
            raise
        except (
            LabelStoreError,
            ValueError,
            TypeError,
        ) as error:  # these say how many labels, never which
            raise CommandError(" ".join(str(error).split())) from None
        except OSError as error:
            raise CommandError(
                f"the store {self.store} cannot be used ({error.strerror}); make room or give "
                "another --store"
            ) from None


@dataclasses.dataclass(frozen=True, eq=False)
class Classification(Task):
    """Classes 0..K-1."""

    kind = _tables.CLASS
    output_type = pa.int64()
    assumption = Assumption(
        "labels-in-range",
        "holder",
        "Every label was known to be one of the classes, as the table itself shows.",
    )

    num_classes: int
    prior: np.ndarray | None = None  # public probabilities (K,); plain randomized response without

    @property
    def names(self) -> list[str] | None:
        """The names of the classes, if they have any, in the order of their codes."""
        return None

    def check(self, labels: np.ndarray) -> str | None:
        wrong = int(np.count_nonzero((labels < 0) | (labels >= self.num_classes)))
        return f"{wrong} of {labels.size} labels are {self._outside()}" if wrong else None

    def _outside(self) -> str:
        return f"not in 0..{self.num_classes - 1}; raise --num-classes or renumber the classes"

    def _label_set(self) -> dict[str, Any]:
        # Codes, not names: ten million texts would not fit, and the codes are the same labels.
        return {"num_classes": self.num_classes}

    def _draw(self, vault: PrivateLabels) -> tuple[NoisyLabels, dict[str, Any]]:
        mechanism: mechanisms.ClassificationMechanism
        outputs: str | list[Any] = "all"  # by name only where some are left out
        prior = None
        if self.prior is None:
            mechanism = mechanisms.RandomizedResponse(self.epsilon, self.num_classes)
        else:
            mechanism = with_prior = mechanisms.RRWithPrior(self.epsilon, self.num_classes)
            size = with_prior.optimal_k(self.prior)
            possible = np.flatnonzero(top_k_members(self.prior[np.newaxis], size)[0])
            if possible.size < self.num_classes:
                outputs = self.decoded(possible).to_pylist()
            prior = {"source": "public", "probabilities": self.prior.tolist()}
        noisy = vault.randomize(mechanism, priors=self.prior, key=self._key())
        return noisy, {
            "task": "classification",
            "num_classes": self.num_classes,
            "classes": self.names,
            **self.split(mechanism),
            "outputs": outputs,
            "prior": prior,
        }

    def _key(self) -> str:
        """Names the draw by what the mechanism itself does not say: class names and prior.

        With others the stored draw is not found, and a new one would pass the budget.
        """
        names = None if self.names is None else tuple(self.names)
        text = repr((names, None if self.prior is None else self.prior.tolist()))
        return f"{_KEY}-{hashlib.sha256(text.encode()).hexdigest()[:16]}"


@dataclasses.dataclass(frozen=True, eq=False)
class NamedClassification(Classification):
    """Classes with names; their codes are in the order of these."""

    kind = _tables.NAME
    output_type = pa.string()

    classes: tuple[str, ...] = ()

    @property
    def names(self) -> list[str] | None:
        return list(self.classes)

    def encoded(self, chunk: Any) -> np.ndarray:
        """Returns ``int64`` codes, -1 for an unknown name."""
        codes = pc.index_in(chunk, value_set=pa.array(self.classes, pa.string()))
        return super().encoded(codes.fill_null(-1).cast(pa.int64()))

    def decoded(self, noisy: np.ndarray) -> Any:
        return pa.array(self.classes, pa.string()).take(pa.array(noisy))

    def _outside(self) -> str:
        return (
            f"none of the {self.num_classes} --classes; add what is missing or check the spelling"
        )


@dataclasses.dataclass(frozen=True, eq=False)
class Regression(Task):
    """Numbers in a public range."""

    kind = _tables.NUMBER
    output_type = pa.float64()
    # The same with and without `clip`: whether it was needed depends on the labels.
    assumption = Assumption(
        "labels-in-range",
        "holder",
        "Every label was known to lie in the label range, or was set to its nearer end (--clip); "
        "without that the table itself shows that all of them lie there.",
    )

    low: float
    high: float
    clip: bool = False  # sets labels outside to the nearer end
    mechanism: mechanisms.RegressionMechanism | None = None  # None: on the best bins
    loss: str = "squared_error"  # which the bins are optimal for
    prior_epsilon: float | None = None  # of the private histogram; None for the default split
    max_values: int | None = None  # most cells of that histogram
    whole_numbers: bool = False
    prior: tuple[np.ndarray, np.ndarray] | None = None  # public values and probabilities

    def check(self, labels: np.ndarray) -> str | None:
        bad = int(np.count_nonzero(~np.isfinite(labels)))
        if bad:
            return f"{bad} of {labels.size} labels are NaN or infinite; {_tables.FILL}"
        outside = int(np.count_nonzero((labels < self.low) | (labels > self.high)))
        if outside and not self.clip:
            return (
                f"{outside} of {labels.size} labels lie outside --low {self.low:g} to --high "
                f"{self.high:g}; widen the range, or give --clip to set them to its nearer end"
            )
        return None

    def _label_set(self) -> dict[str, Any]:
        return {"low": self.low, "high": self.high, "clip": self.clip}

    def _draw(self, vault: PrivateLabels) -> tuple[NoisyLabels, dict[str, Any]]:
        # No word of clipping: whether it was needed depends on the labels.
        facts: dict[str, Any] = {
            "task": "regression",
            "label_range": [self.low, self.high],
            "classes": None,
        }
        if self.mechanism is not None:
            noisy = vault.randomize(self.mechanism, key=_KEY)
            return noisy, {**facts, **self.split(self.mechanism), "prior": None}

        options: dict[str, Any] = {}
        if self.max_values is not None:
            options["max_values"] = self.max_values
        if self.prior is not None:
            options["values"], options["prior"] = (tuple(part.tolist()) for part in self.prior)
        randomizer = LabelRandomizer(
            self.epsilon,
            self.loss,
            prior_epsilon=self.prior_epsilon,
            whole_numbers=self.whole_numbers,
            **options,
        )
        noisy = vault.randomize(randomizer)
        bins, told = noisy.mechanism, noisy.priors
        if not isinstance(bins, mechanisms.RROnBins) or told is None:
            raise CommandError("the draw of this store was not made on bins; give a new --store")
        total, error = randomizer.total(noisy)
        return noisy, {
            **facts,
            "loss": self.loss,
            "total": {"estimate": total, "standard_error": error},
            **self.split(bins, self.epsilon - bins.epsilon),
            "outputs": np.asarray(bins.outputs).tolist(),
            "prior": {
                "source": "private histogram" if self.prior is None else "public",
                "values": np.asarray(told.values).tolist(),
                "probabilities": np.asarray(told.probabilities).tolist(),
            },
        }


def _read_number_prior(
    path: pathlib.Path, low: float, high: float
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the values, rising, and the probabilities of a prior over numbers in a range."""
    columns = _read_prior(path, _NUMBER_PRIOR, "values")
    values, probabilities = (_numbers(path, column, _NUMBER_PRIOR) for column in columns)
    if values.size != probabilities.size:
        raise CommandError(
            f"--prior {path} has {values.size} values but {probabilities.size} probabilities; give "
            "one probability a value"
        )
    order = np.argsort(values, kind="stable")
    values, probabilities = values[order], _sums_to_one(path, probabilities)[order]
    if np.any(np.diff(values) == 0):
        raise CommandError(f"--prior {path} names a value more than once; name each once")
    outside = int(np.count_nonzero((values < low) | (values > high)))
    if outside:
        raise CommandError(
            f"--prior {path} has {outside} values outside --low {low:g} to --high {high:g}; "
            "leave them out or widen the range"
        )
    # The mechanism must know the whole range; an end that the prior lacks has no weight in it.
    ends = [end for end in (low, high) if end not in values]
    places = np.searchsorted(values, ends)
    return np.insert(values, places, ends), np.insert(probabilities, places, 0.0)


def _read_class_prior(path: pathlib.Path, classes: Sequence[str]) -> np.ndarray:
    """Returns the probabilities of a prior over classes, in their order."""
    names, column = _read_prior(path, _CLASS_PRIOR)
    if names is not None:
        by_name = dict(zip((name.strip() for name in names), column, strict=True))
        if len(by_name) != len(names) or set(by_name) != set(classes):
            raise CommandError(
                f"--prior {path} has {len(names)} rows for {len(set(by_name) & set(classes))} of "
                f"the {len(classes)} classes; give each class one row"
            )
        column = [by_name[name] for name in classes]
    probabilities = _numbers(path, column, _CLASS_PRIOR)
    if probabilities.size != len(classes):
        raise CommandError(
            f"--prior {path} has {probabilities.size} probabilities for {len(classes)} classes; "
            "give one a class, in their order"
        )
    return _sums_to_one(path, probabilities)


def _read_prior(path: pathlib.Path, expected: str, first: str = "") -> tuple[Any, Any]:
    """Returns the two columns of a CSV file, or of a JSON file ``first`` and the probabilities.

    What a JSON file lacks is None.
    """
    suffix = path.suffix.lower()
    if suffix not in (".json", ".csv"):
        raise CommandError(f"--prior {path} is neither .json nor .csv; give {expected}")
    content: Any = None
    rows: list[list[str]] = []
    try:
        text = path.read_text(encoding="utf-8-sig")
        if suffix == ".json":
            content = json.loads(text)
        else:
            rows = [row for row in csv.reader(text.splitlines()) if row]
    except OSError as error:
        raise CommandError(
            f"--prior {path} cannot be read ({error.strerror}); check the path"
        ) from error
    except UnicodeDecodeError:
        _malformed(path, "is not UTF-8 text", expected)
    except (ValueError, RecursionError, csv.Error):
        _malformed(path, f"is not {suffix[1:].upper()}", expected)
    if suffix == ".json":
        if isinstance(content, list):
            content = {"probabilities": content}
        if not isinstance(content, dict) or "probabilities" not in content:
            _malformed(path, 'has no "probabilities"', expected)
        return content.get(first), content["probabilities"]
    if len(rows) < 2 or any(len(row) != 2 for row in rows):
        _malformed(path, "does not have a header and rows of two cells", expected)
    return [row[0] for row in rows[1:]], [row[1] for row in rows[1:]]


def _numbers(path: pathlib.Path, column: Any, expected: str) -> np.ndarray:
    if not isinstance(column, list) or not column:
        _malformed(path, "lacks a list of numbers", expected)
    try:
        if any(isinstance(cell, bool) for cell in column):
            raise ValueError
        array = np.array([float(cell) for cell in column])
    except (TypeError, ValueError, OverflowError):
        _malformed(path, "holds something that is not a number", expected)
    if not np.all(np.isfinite(array)):
        _malformed(path, "holds NaN or infinity", expected)
    return array


def _sums_to_one(path: pathlib.Path, probabilities: np.ndarray) -> np.ndarray:
    """Returns probabilities whose sum is one to rounding."""
    total = float(probabilities.sum())
    if np.any(probabilities < 0.0) or abs(total - 1.0) > PRIOR_SUM_TOLERANCE:
        raise CommandError(
            f"the probabilities of --prior {path} must be zero or more and sum to one, got "
            f"a smallest of {probabilities.min():g} and a sum of {total:g}; divide each by the sum"
        )
    return probabilities / total


def _malformed(path: pathlib.Path, problem: str, expected: str) -> NoReturn:
    raise CommandError(f"--prior {path} {problem}; give {expected}") from None
