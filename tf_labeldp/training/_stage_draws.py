"""The draws of a multi-stage run, and the records of its stages."""

from __future__ import annotations

import dataclasses
import pathlib
import re
from typing import Any

import numpy as np

from tf_labeldp import _validate
from tf_labeldp._columns import Column
from tf_labeldp.accounting import PublicInput, Receipts
from tf_labeldp.data.row_source import RowSource
from tf_labeldp.mechanisms import ClassificationMechanism, Priors, RandomizedResponse, RRWithPrior
from tf_labeldp.training._stage_data import StageSchedule
from tf_labeldp.vault import NoisyLabels, PrivateLabels, Reservation
from tf_labeldp.vault.files import PlainFile
from tf_labeldp.vault.label_kinds import class_table
from tf_labeldp.vault.records import Arrays
from tf_labeldp.vault.uses import LabelsTogether, NamedUse


@dataclasses.dataclass(frozen=True)
class StageReport:
    """Counts of a stage's training set, which depend on noisy labels alone.

    Attributes:
        stage: number of the stage, from 1.
        num_new: examples whose labels were drawn for this stage.
        mean_k: their mean size of the top-k set (K in a first stage without priors).
        num_reused: examples of earlier stages in the training set.
        num_dropped: earlier examples left out, as the model's top classes lack their noisy label.
    """

    stage: int
    num_new: int
    mean_k: float
    num_reused: int
    num_dropped: int


@dataclasses.dataclass(frozen=True, eq=False)
class StageDraws:
    """The noisy labels of each stage, which the vault draws once by name.

    Attributes:
        labels: the vault.
        rows: the rows of its labels.
        epsilon: of each draw.
        parts: the examples of each stage.
        keys: the names of the draws; a name identifies its priors, so that other priors never reuse
            a draw.
        first_priors: priors of the first stage, or None.
    """

    labels: PrivateLabels
    rows: RowSource
    epsilon: float
    parts: tuple[np.ndarray, ...]
    keys: tuple[str, ...]
    first_priors: Priors | None

    @classmethod
    def of(
        cls,
        labels: PrivateLabels,
        rows: RowSource,
        epsilon: float,
        plan: StageSchedule,
        priors: Any,
        key: str,
    ) -> StageDraws:
        """Returns the draws of a plan; ``key`` begins their names."""
        origins = [f"-temperature-{value:g}" for value in plan.temperatures]
        origins[0] = ""
        first_priors = None
        if priors is not None:
            first = Priors.of(priors)
            values = _validate.prior_rows("priors", first, len(labels), labels.num_classes)
            origins[0] = f"-priors-{PublicInput.digest_of(values)[:12]}"
            values = values[0] if len(values) == 1 else values[plan.parts[0]]
            first_priors = Priors(values, receipts=first.receipts)
        if not re.fullmatch(r"[\w.-]+", key):
            raise ValueError(f"key must be letters, digits, '_', '-' and '.', got {key!r}.")
        keys = tuple(
            f"{key}-stage-{stage}-of-{len(origins)}{origin}"
            for stage, origin in enumerate(origins, start=1)
        )
        return cls(labels, rows, epsilon, plan.parts, keys, first_priors)

    def mechanism(self, stage: int) -> ClassificationMechanism:
        kind = RandomizedResponse if stage == 0 and self.first_priors is None else RRWithPrior
        return kind(self.epsilon, self.labels.num_classes)

    def reserve(self) -> Reservation:
        """Reserves the draws to come: a first one would be wasted if there is none for a later."""
        parts = enumerate(zip(self.keys, self.parts, strict=True))
        uses = [
            (NamedUse(self.labels, key), self.mechanism(stage), part)
            for stage, (key, part) in parts
        ]
        return LabelsTogether.reserve(uses)

    def stages(self) -> list[int]:
        """Returns the stages whose labels are drawn."""
        return [stage for stage, key in enumerate(self.keys) if self.labels.has_draw(key)]

    def draw(self, stage: int, priors: Priors | None) -> NoisyLabels:
        """Returns the noisy labels of a stage, which are drawn if they are not there yet."""
        self.rows.check_not_extended(len(self.labels))
        part, key = self.parts[stage], self.keys[stage]
        return self.labels.randomize(self.mechanism(stage), part, priors, key=key)

    def stored(self, stage: int) -> NoisyLabels:
        if not self.labels.has_draw(self.keys[stage]):
            raise RuntimeError(
                f"expected a vault that drew the labels of stage {stage + 1}, got another. Give it "
                "the store of that run: PrivateLabels(..., store=path)."
            )
        return self.draw(stage, None)

    def together(self) -> NoisyLabels:
        """Returns the noisy labels of all stages drawn so far, with their priors."""
        drawn = [self.draw(stage, None) for stage in self.stages()]
        k = self.labels.num_classes
        mechanism = RRWithPrior(self.epsilon, k)
        if not drawn:
            return NoisyLabels(np.empty(0, np.int64), np.empty(0, np.int64), mechanism)
        priors: list[Any] = [noisy.priors for noisy in drawn]
        if self.first_priors is None:
            priors[0] = np.full(k, 1.0 / k)
        receipts = Receipts.merged(*(noisy.receipts for noisy in drawn))
        parts = zip(priors, drawn, strict=True)
        rows = np.concatenate([np.broadcast_to(p, (len(noisy), k)) for p, noisy in parts])
        return NoisyLabels(
            np.concatenate([noisy.values for noisy in drawn]),
            np.concatenate([noisy.indices for noisy in drawn]),
            mechanism,
            Priors(rows, receipts=receipts),
            receipts,
            of_part=drawn[0].of_part,
        )

    def class_weights(self) -> np.ndarray:
        """Returns weights ``float32`` (K,): one over K times the shares of the classes.

        The noisy labels of stage 1, which estimate the shares, are among the receipts of every
        stage.
        """
        first = self.draw(0, None)
        shares = np.maximum(first.posterior().mean(axis=0), 1.0 / len(first))
        return (1.0 / (len(shares) * shares)).astype(np.float32)


@dataclasses.dataclass(frozen=True, eq=False)
class StageWeights:
    """Public weights of the examples, and those of their noisy classes.

    Attributes:
        of_examples: ``float32`` (n,), or None.
        of_classes: ``float32`` (K,), "balanced" for those of ``StageDraws.class_weights``, or None.
    """

    of_examples: np.ndarray | None
    of_classes: Any

    @classmethod
    def of(cls, labels: PrivateLabels, examples: Any, classes: Any) -> StageWeights | None:
        """Returns weights as ``MultiStageTraining`` takes them; None without any."""
        examples = Column.weights(examples, len(labels), np.float32)
        if classes is not None and classes != "balanced":
            classes = class_table(classes, labels.classes).astype(np.float32)
        return None if examples is None and classes is None else cls(examples, classes)

    def of_rows(self, indices: np.ndarray, noisy: np.ndarray, draws: StageDraws) -> np.ndarray:
        """Returns the weights ``float32`` (m,) of some examples and their noisy labels (m,)."""
        weights = np.ones(indices.size, np.float32)
        if self.of_examples is not None:
            weights = self.of_examples[indices]
        if self.of_classes is None:
            return weights
        is_fixed = not isinstance(self.of_classes, str)
        return weights * (self.of_classes if is_fixed else draws.class_weights())[noisy]


class StageRecords:
    """The stages that began in this run, or that the store of the vault has on record.

    Attributes:
        reports: a ``StageReport`` by stage.
        kept: by stage, the examples of earlier stages in its training set.
    """

    def __init__(self, draws: StageDraws) -> None:
        self._draws = draws
        self.reports: dict[int, StageReport] = {}
        self.kept: dict[int, np.ndarray] = {}

    def add(self, stage: int, kept: np.ndarray, report: StageReport) -> None:
        """Records a stage, for a run that resumes inside it."""
        if (path := self._path(stage)) is not None:
            arrays = Arrays(
                kept=kept,
                mean_k=np.asarray(report.mean_k),
                num_dropped=np.asarray(report.num_dropped),
            )
            PlainFile(path).write_in_private(arrays.to_bytes(), replace=True)
        self.reports[stage], self.kept[stage] = report, kept

    def read(self, num_stages: int) -> None:
        """Reads the records of the stages that have begun, or raises if there are none."""
        for stage in set(range(num_stages)) - set(self.reports):
            path = self._path(stage)
            if path is None or not path.exists():
                raise RuntimeError(
                    f"expected a record of stage {stage + 1}, got none: its labels would be drawn, "
                    "and charged, a second time. Give the vault the store of that run, "
                    "PrivateLabels(..., store=path), or start from epoch 0 with a new model."
                )
            with np.load(path, allow_pickle=False) as state:
                kept, mean_k, dropped = (state[name] for name in ("kept", "mean_k", "num_dropped"))
            new = self._draws.parts[stage].size
            self.kept[stage] = kept
            self.reports[stage] = StageReport(
                stage + 1, new, float(mean_k), kept.size, int(dropped)
            )

    def _path(self, stage: int) -> pathlib.Path | None:
        store = self._draws.labels.store_path
        if store is None:
            return None
        return pathlib.Path(store) / "stages" / f"{self._draws.keys[stage]}.npz"
