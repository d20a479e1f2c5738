"""What the steps of a private model cost: charged before they are taken, and carried by it."""

from __future__ import annotations

import dataclasses
from typing import Any

import dp_accounting
import keras
import numpy as np
import tensorflow as tf

from tf_labeldp.accounting import Assumption, Charge, PrivacyGuarantee, Receipt, public_input
from tf_labeldp.accounting._dp_sgd import dp_sgd_assumptions
from tf_labeldp.accounting._public_input import WEIGHTS_ASSUMED
from tf_labeldp.accounting._receipts import LabelSet, compose_receipts, merge_receipts
from tf_labeldp.mechanisms._base import is_of_this_library
from tf_labeldp.training._private_step import StepGuard
from tf_labeldp.training._training_plan import TrainingPlan
from tf_labeldp.vault._model_history import (
    attach,
    begin_training,
    end_training,
    known_of_weights,
    note_epoch,
)

_UNKNOWN = (
    "Nothing is promised: how often these data used a label is not known. Fit on "
    "data.poisson_batches or on arrays."
)
_NO_EVENT = "Nothing is promised: {name} states no cost of its steps (its dp_event is None)."
_CLAIMED = (
    "{name} adds noise of the event that its dp_event names: its author's claim, not this "
    "library's."
)
_NO_VAULT = Assumption(
    "no-vault",
    "trainer",
    "No vault keeps account of these labels: all their uses are steps of this model.",
)
_ROUNDED = Assumption(
    "tensor-float-32",
    "machines",
    "TensorFloat-32 rounds the products that clipped norms are made of to about three digits on a "
    "GPU, and does not change the norms by more than that. "
    "tf.config.experimental.enable_tensor_float_32_execution(False) turns it off.",
)


@dataclasses.dataclass(eq=False)
class Run:
    """One ``fit`` under way.

    Attributes:
        plan: how it uses the labels.
        labels: the label set of the plan's vault, or one of this run alone.
        reported: whether loss and metrics on true labels are shown.
        before: digests of the weights before its first step.
        last: the receipt of the last epoch that was charged.
    """

    plan: TrainingPlan
    labels: LabelSet
    reported: bool
    before: list[bytes]
    last: Receipt | None = None


class Spending:
    """Charges the steps of one model to the vault of its labels, and notes them on its layers.

    Args:
        model: whose trainable variables are trained.
        optimizer: whose noise is added.
        guard: lets the steps through that have been charged.
    """

    def __init__(self, model: keras.Model, optimizer: Any, guard: StepGuard) -> None:
        self._model, self.optimizer, self._guard = model, optimizer, guard
        self._run: Run | None = None

    @property
    def plan(self) -> TrainingPlan | None:
        """The plan of the ``fit`` under way, or None."""
        return None if self._run is None else self._run.plan

    def begin(self, plan: TrainingPlan, reported: bool) -> None:
        """Begins a ``fit``; nothing is charged yet, and no step let through.

        What the weights were made of counts against the vault's budget, and stays known from here
        on, evidence of training in the clear included.
        """
        known = merge_receipts(public_input(self._model).receipts, plan.receipts)
        if plan.vault is not None:
            plan.vault.adopt(known)
        before = begin_training(self._model, known)
        self.optimizer.noise.begin()
        self._guard.price(self.optimizer.noise)
        new = LabelSet.new(plan.num_units or 0)
        labels = new if plan.vault is None else plan.vault.label_set
        self._run = Run(plan, labels, reported, before)

    def end(self) -> None:
        """Ends a ``fit``: from now on no step is let through."""
        run, self._run = self._under_way(), None
        self._guard.admit(0)
        end_training(self._model, run.before)

    def with_charges(self, callbacks: Any, epochs: int, initial_epoch: int) -> list[Any]:
        """Returns the callbacks of a ``fit``, and last the one that charges each epoch."""
        if isinstance(callbacks, keras.callbacks.CallbackList):
            callbacks = callbacks.callbacks
        several = callbacks if isinstance(callbacks, (list, tuple)) else [callbacks]
        given = [one for one in several if one is not None]
        return [_EndEpochs(self), *given, _ChargeEpochs(self, epochs, initial_epoch)]

    def check(self, epochs: int) -> None:
        """Raises if the vault's budget does not allow so many epochs."""
        run = self._adopted()
        if run.plan.vault is not None and epochs > 0:
            run.plan.vault.check_budget(self._charge(run.plan, epochs))

    def charge(self) -> None:
        """Charges one epoch, and lets its steps through."""
        run = self._adopted()
        self._spend(run, self._receipt(run, self._charge(run.plan, 1)))
        self._guard.admit(run.plan.steps_an_epoch)

    def end_epoch(self) -> None:
        """Notes the weights, and if the noise of an epoch can be repeated after all."""
        run = self._run
        if run is None:
            return
        if self._is_seeded(run.plan) and run.last is not None and not run.last.seeded:
            free = self._receipt(run, Charge(0.0, 0.0, dp_accounting.NoOpDpEvent()))
            what = "the noise of the steps before can be repeated"
            self._spend(run, dataclasses.replace(free, what=what))
        note_epoch(self._model, run.before)

    def guarantee(self, delta: float | None, next_epoch: bool = False) -> PrivacyGuarantee:
        """Returns the statement of all the model was made of, with another epoch if asked."""
        known = public_input(self._model).receipts
        if next_epoch:
            run = self._under_way()
            known = (*known, self._receipt(run, self._charge(run.plan, 1)))
        stated = compose_receipts(known, delta).with_assumptions([WEIGHTS_ASSUMED])
        return stated.warn_of_delta()

    def _under_way(self) -> Run:
        if self._run is None:
            raise RuntimeError("no fit is under way; ask for guarantee().")
        return self._run

    def _adopted(self) -> Run:
        """Counts what callbacks have loaded into the model against the vault's budget."""
        run, loaded = self._under_way(), known_of_weights(self._model)
        attach(self._model, loaded)
        if run.plan.vault is not None:
            run.plan.vault.adopt(public_input(self._model).receipts)
        return run

    def _spend(self, run: Run, receipt: Receipt) -> None:
        """Charges the vault, if there is one, and notes the receipt on the model's layers."""
        if run.plan.vault is not None:
            receipt = run.plan.vault.charge(
                receipt.charge,
                what=receipt.what,
                unit=receipt.unit,
                num_units=receipt.num_units,
                seeded=receipt.seeded,
                metrics_reported=receipt.metrics_reported,
                sample_weights=receipt.sample_weights,
            )
        run.last = receipt
        attach(self._model, [receipt])

    def _is_seeded(self, plan: TrainingPlan) -> bool:
        return bool(self.optimizer.noise.seeded or plan.seeded)

    def _charge(self, plan: TrainingPlan, epochs: int) -> Charge:
        """Returns what some epochs cost, whose event is that of the noise."""
        noise = self.optimizer.noise
        name = type(noise).__name__
        if plan.sampling_probability is None:
            return Charge.unknown(_UNKNOWN)
        uses = plan.uses_an_epoch * epochs
        event = self.optimizer.dp_event(plan.sampling_probability, uses)
        if event is None:
            if plan.vault is not None:
                raise ValueError(
                    f"no statement can be made about {name}, so the vault can't be charged for it. "
                    "Use GaussianNoise."
                )
            return Charge.unknown(_NO_EVENT.format(name=name))
        # The number of steps is in the receipts.
        clipping = self.optimizer.clipping
        sampling = dp_sgd_assumptions(plan.sampling_probability, None, plan.unit, clipping)
        notes = [*sampling, *noise.assumptions(), WEIGHTS_ASSUMED]
        if not is_of_this_library(noise):
            notes.insert(0, Assumption("claimed-noise", "authors", _CLAIMED.format(name=name)))
        if plan.vault is None:
            notes.append(_NO_VAULT)
        tensor_float = tf.config.experimental.tensor_float_32_execution_enabled()
        if tensor_float and tf.config.list_physical_devices("GPU"):
            notes.append(_ROUNDED)
        return Charge.of_event(event, self._delta(plan), notes)

    def _delta(self, plan: TrainingPlan) -> float:
        if plan.vault is None:
            return float(plan.num_units or 1) ** -1.1
        delta = plan.vault.budget.delta
        if delta <= 0.0:
            raise ValueError(
                "the vault's budget has delta=0, and Gaussian noise needs one above zero. Make "
                f"the vault with PrivacyBudget(epsilon={plan.vault.budget.epsilon:g}, delta=...), "
                "below 1 / n."
            )
        return delta

    def _receipt(self, run: Run, charge: Charge) -> Receipt:
        """Returns the receipt of one epoch, of which no vault knows yet."""
        plan = run.plan
        steps = "steps" if plan.steps_an_epoch is None else f"{plan.steps_an_epoch} steps"
        by_user, unknown = plan.unit == "user", plan.sampling_probability is None
        return Receipt(
            run.labels,
            charge,
            what=f"{steps} of {type(self._model).__name__} {self._model.name!r}, noise "
            f"{self.optimizer.noise.noise_multiplier:g}, sampled with "
            f"{plan.sampling_probability or 0:g}",
            kind="unknown" if unknown else "steps",
            delta=0.0 if unknown else self._delta(plan),
            unit=plan.unit if by_user or plan.vault is None else plan.vault.unit,
            num_units=plan.num_units if by_user else None,
            seeded=self._is_seeded(plan),
            metrics_reported=run.reported,
            sample_weights=plan.is_weighted,
        )


class _EndEpochs(keras.callbacks.Callback):
    """Comes before the callbacks of the user: what they see at the end of an epoch is known."""

    def __init__(self, spending: Spending) -> None:
        super().__init__()
        self._spending = spending

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Notes seeded noise, and makes numbers of logs that Keras may leave as tensors."""
        self._spending.end_epoch()
        for name, value in (logs or {}).items():
            if np.ndim(value) == 0:
                logs[name] = float(value)


class _ChargeEpochs(keras.callbacks.Callback):
    """Charges each epoch of a ``fit`` before its first step."""

    def __init__(self, spending: Spending, epochs: int, initial_epoch: int) -> None:
        super().__init__()
        self._spending, self._epochs, self._initial_epoch = spending, epochs, initial_epoch

    def on_train_begin(self, logs: Any = None) -> None:
        """Checks the whole fit at once; a restored one has fewer epochs to go."""
        done = getattr(self.model, "_initial_epoch", None) or self._initial_epoch
        self._spending.check(self._epochs - done)

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Charges the epoch that begins."""
        self._spending.charge()
