"""The draw of ``tf-labeldp randomize``: noisy classes or noisy numbers, once per store.

A column of labels is read and checked, and has the mechanism and the facts of the draw.
"""

from __future__ import annotations

import abc
import argparse
import contextlib
import dataclasses
import hashlib
import json
import pathlib
from collections.abc import Iterator
from typing import Any, ClassVar, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tf_labeldp import _validate, mechanisms
from tf_labeldp.accounting import Assumption, BudgetExceededError, PrivacyBudget
from tf_labeldp.cli import BASELINES, _tables
from tf_labeldp.cli._console import CommandError, explained, text_of
from tf_labeldp.mechanisms import Mechanism
from tf_labeldp.mechanisms.classes import top_k_members
from tf_labeldp.vault import (
    Classes,
    Keyed,
    LabelKind,
    LabelRandomizer,
    LabelStoreError,
    NoisyLabels,
    Numbers,
    PrivateLabels,
)
from tf_labeldp.vault.ledger import Ledger
from tf_labeldp.vault.records import DrawSettingsError

# The assumptions of a table's statement, in addition to those of its vault.
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
_ALONE = Assumption(
    "only-release",
    "holder",
    "Nothing else that is made from these labels is published, except for copies of these noisy "
    "labels: the epsilons of separate draws add up.",
)
_KEY = "noisy-labels"
"""The name of the draw in the vault."""
_OWN_KEYS = (_KEY, LabelRandomizer.default_key)
"""Prefixes of the names of this command's draws."""


class Draw(NamedTuple):
    noisy_labels: NoisyLabels  # of all rows, in their order
    facts: dict[str, Any]  # about the mechanism, for the JSON of the statement
    stored: bool  # whether an earlier run drew some or all of it


class LabelColumn(abc.ABC):
    """The column of labels of a table: its kind, its draw, and the facts of the statement."""

    kind: _tables.ColumnKind
    output_type: Any  # the Arrow type of the column of noisy labels
    kind_of_labels: LabelKind
    assumption: ClassVar[Assumption]

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args

    @abc.abstractmethod
    def encoded(self, column: Any) -> np.ndarray:
        """Returns labels for the vault, or raises an error that quotes none of them."""

    def decoded(self, noisy: np.ndarray) -> Any:
        """Returns noisy labels as an Arrow array."""
        return _tables.to_arrow(noisy)

    @abc.abstractmethod
    def _draw(self, vault: PrivateLabels) -> tuple[NoisyLabels, dict[str, Any]]:
        """Returns noisy labels and the facts of the statement."""

    def vault(self, labels: np.ndarray, ids: Any) -> PrivateLabels:
        args = self.args
        return PrivateLabels(
            labels,
            self.kind_of_labels,
            budget=Ledger.budget_for(args.store, PrivacyBudget(args.epsilon)),
            store=args.store,
            draws=Keyed(ids) if args.draws == "keyed" else args.draws,
            insecure_seed=args.insecure_seed,
        )

    def draw(self, vault: PrivateLabels) -> Draw:
        own = [receipt for receipt in vault.receipts if receipt.labels.name == vault.label_set.name]
        before = [receipt for receipt in own if receipt.key.startswith(_OWN_KEYS)]
        if self.args.insecure_seed is not None and not all(receipt.seeded for receipt in before):
            raise CommandError(
                f"the store {self.args.store} has draws of these labels made without a seed, which "
                "--insecure-seed does not change; leave --insecure-seed out, or give a new --store"
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
        """Returns the mechanism and the parts of epsilon for the statement."""
        parts = {"total": self.args.epsilon, "prior": prior_epsilon, "draw": mechanism.epsilon}
        return {"epsilon": parts, "mechanism": mechanism.to_json()}

    @contextlib.contextmanager
    def explained(self) -> Iterator[None]:
        """Turns errors of the vault and its store, which quote no label, into the command's."""
        store = self.args.store
        try:
            yield
        except (BudgetExceededError, DrawSettingsError):
            raise CommandError(
                f"the store {store} has draws of these labels made with other settings; give those "
                "settings, or a new --store (publishing from both costs the sum of their epsilons)"
            ) from None
        except CommandError:
            raise
        except (LabelStoreError, ValueError, TypeError) as error:
            raise CommandError(text_of(error)) from None
        except OSError as error:
            raise CommandError(
                f"the store {store} cannot be used ({error.strerror}); make room or give another "
                "--store"
            ) from None


class ClassColumn(LabelColumn):
    assumption = Assumption(
        "labels-in-range",
        "holder",
        "Every label was known to be one of the classes, as the table itself shows.",
    )

    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__(args)
        self.names: list[str] | None = args.classes  # in the order of their codes
        self.kind = _tables.NAME if self.names else _tables.CLASS
        self.output_type = pa.string() if self.names else pa.int64()
        self.num_classes = len(self.names) if self.names else args.num_classes
        # Codes, not names: ten million texts would not fit into memory.
        self.kind_of_labels = Classes(self.num_classes)
        self.prior = None
        if args.prior is not None:
            [probabilities] = _read_prior(args.prior, "probabilities")
            self.prior = _normalized(args.prior, probabilities, self.num_classes)

    def encoded(self, column: Any) -> np.ndarray:
        return class_codes(column, Classes(self.names or self.num_classes))

    def decoded(self, noisy: np.ndarray) -> Any:
        codes = super().decoded(noisy)
        return pa.array(self.names, pa.string()).take(codes) if self.names else codes

    def _draw(self, vault: PrivateLabels) -> tuple[NoisyLabels, dict[str, Any]]:
        mechanism: mechanisms.ClassificationMechanism
        outputs: str | list[Any] = "all"  # a list only where the prior excludes some
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
        # Class names and prior are no part of the mechanism, so the key has them: with others the
        # stored draw is not found, and a new one would exceed the budget.
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


class NumberColumn(LabelColumn):
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
        self.kind_of_labels = Numbers(args.low, args.high, clip=bool(args.clip))
        self.randomizer: Any  # a LabelRandomizer, or a mechanism for comparison
        with explained(ValueError):
            if args.mechanism in (None, "rr_on_bins"):
                self.randomizer = LabelRandomizer(
                    args.epsilon,
                    args.loss or "squared_error",
                    args.prior_epsilon,
                    args.max_values or LabelRandomizer.max_values,
                    bool(args.whole_numbers),
                    **({} if args.prior is None else _number_prior(args)),
                )
            else:
                config = {"epsilon": args.epsilon, "low": args.low, "high": args.high}
                self.randomizer = Mechanism.from_json(
                    {"class_name": BASELINES[args.mechanism], "config": config}
                )

    def encoded(self, column: Any) -> np.ndarray:
        return checked_numbers(_tables.to_numpy(column), self.args)

    def _draw(self, vault: PrivateLabels) -> tuple[NoisyLabels, dict[str, Any]]:
        # Clipping is not mentioned: whether it was needed depends on the labels.
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


def class_codes(column: Any, kind: Classes) -> np.ndarray:
    """Returns codes of an Arrow column of names or codes, or raises an error with their number."""
    names, num_classes = kind.names, kind.num_classes
    advice = f"not in 0..{num_classes - 1}; raise --num-classes or renumber the classes"
    if names:
        advice = f"none of the {num_classes} --classes; add what is missing or check the spelling"
        values = pa.array(names, pa.string())
        if set(pc.utf8_lower(values).to_pylist()) == {"false", "true"}:
            # Booleans are written in several ways: False, false, FALSE.
            values, column = pc.utf8_lower(values), pc.utf8_lower(column)
        column = pc.index_in(column, value_set=values).fill_null(-1).cast(pa.int64())
    labels = _tables.to_numpy(column)
    if wrong := np.count_nonzero((labels < 0) | (labels >= num_classes)):
        if names and wrong == labels.size:
            advice += " (cells may have spaces around the names)"
            advice += "; for whole numbers give --num-classes in place of --classes"
        raise CommandError(f"{wrong} of {labels.size} labels {_verb(wrong)} {advice}")
    return labels


def _verb(number: int | np.integer[Any], one: str = "is", several: str = "are") -> str:
    return one if number == 1 else several


def checked_numbers(labels: np.ndarray, args: argparse.Namespace) -> np.ndarray:
    """Returns finite labels within the range unless they are to be clipped, or raises."""
    low, high = args.low, args.high
    if bad := np.count_nonzero(~np.isfinite(labels)):
        raise CommandError(
            f"{bad} of {labels.size} labels {_verb(bad)} NaN or infinite; {_tables.FILL}"
        )
    outside = np.count_nonzero((labels < low) | (labels > high))
    if outside and not args.clip:
        raise CommandError(
            f"{outside} of {labels.size} labels {_verb(outside, 'lies', 'lie')} outside "
            f"--low {low:g} to --high {high:g}; "
            "widen the range, or give --clip to set them to its nearer end"
        )
    return labels


def _number_prior(args: argparse.Namespace) -> dict[str, Any]:
    """Returns a prior's values, which increase, and their probabilities."""
    values, probabilities = _read_prior(args.prior, "values", "probabilities")
    probabilities = _normalized(args.prior, probabilities, values.size)
    if outside := np.count_nonzero((values < args.low) | (values > args.high)):
        raise CommandError(
            f"--prior {args.prior} has {outside} values outside --low {args.low:g} to --high "
            f"{args.high:g}; leave them out or widen the range"
        )
    # The mechanism must know the whole range, so an end missing from the prior gets no weight.
    ends = np.setdiff1d([args.low, args.high], values)
    values = np.concatenate([values, ends])
    probabilities = np.concatenate([probabilities, np.zeros(ends.size)])
    order = np.argsort(values, kind="stable")
    return {"values": tuple(values[order].tolist()), "prior": tuple(probabilities[order].tolist())}


def _normalized(path: pathlib.Path, probabilities: np.ndarray, size: int) -> np.ndarray:
    with explained(ValueError):
        [row] = _validate.prior_rows(f"--prior {path}", probabilities, 1, size)
    return row / row.sum()


def _read_prior(path: pathlib.Path, *names: str) -> list[np.ndarray]:
    """Returns arrays from a JSON file by their names; a list is the probabilities."""
    try:
        content = json.loads(path.read_text(encoding="utf-8-sig"))
        content = {"probabilities": content} if isinstance(content, list) else content
        return [np.array(content[name], dtype=np.float64, ndmin=1) for name in names]
    except OSError as error:
        raise CommandError(
            f"--prior {path} cannot be read ({error.strerror}); check the path"
        ) from None
    except (ValueError, LookupError, TypeError, RecursionError):
        expected = ", ".join(f'"{name}": [...]' for name in names)
        raise CommandError(f"--prior {path} has another form; give JSON {{{expected}}}") from None
