"""The charges for the steps of a private model, made before the steps are taken."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import dp_accounting
import keras
import numpy as np
import tensorflow as tf

from tf_labeldp import _validate
from tf_labeldp._validate import counted
from tf_labeldp.accounting import (
    Assumption,
    Charge,
    LabelSet,
    PrivacyGuarantee,
    Receipt,
    Receipts,
    public_input,
)
from tf_labeldp.accounting.dp_sgd import NoisySteps
from tf_labeldp.accounting.planned_uses import ChainedUse
from tf_labeldp.accounting.provenance import LayerHistory
from tf_labeldp.mechanisms import Mechanism
from tf_labeldp.training._private_step import StepGuard
from tf_labeldp.training._training_plan import TrainingPlan
from tf_labeldp.vault.counted_steps import CountedSteps
from tf_labeldp.vault.model_history import TrainedModel
from tf_labeldp.vault.uses import LabelsTogether

_NO_EVENT = "Nothing is promised: {name} states no cost of its steps (its dp_event is None)."
_CLAIMED = "{name} adds the noise of its dp_event: its author's claim, not this library's."
_NO_VAULT = Assumption(
    "no-vault",
    "trainer",
    "No vault tracks the uses of these labels: all of them are steps of this model.",
)
_SAME_EXAMPLES = Assumption(
    "same-examples",
    "holder",
    "Row i of each vault of a training step has labels of the same example.",
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
        labels: the labels of the plan's first vault, or of this run alone.
        reported: whether loss and metrics on true labels are shown.
        steps: the steps taken, and the weights that they left.
        last: the receipt of the last charged epoch.
        once: the charge of each epoch, as it was planned.
        plans: the plan of each epoch to come, and the plan's number of epochs.
    """

    plan: TrainingPlan
    labels: LabelSet
    reported: bool
    steps: CountedSteps
    last: Receipt | None = None
    once: Charge | None = None
    plans: list[tuple[str, int]] = dataclasses.field(default_factory=list)


class Spending:
    """Charges the steps of one model to the vault of its labels, and attaches their receipts."""

    def __init__(self, model: keras.Model, optimizer: Any, guard: StepGuard) -> None:
        self._model, self.optimizer, self._guard = model, optimizer, guard
        self._run: Run | None = None
        self._checks: list[ChecksEpochs] = []
        self._epochs_charged = 0
        # The epochs that the noise was calibrated for, and their epsilon.
        self.planned: tuple[int, float] | None = None

    @property
    def _name(self) -> str:
        return f"{type(self._model).__name__} {self._model.name!r}"

    @property
    def plan(self) -> TrainingPlan | None:
        return None if self._run is None else self._run.plan

    def begin(self, plan: TrainingPlan, reported: bool) -> None:
        """Begins a ``fit`` without a charge, so that no step is admitted.

        The receipts of the weights, also of training in the clear, count against the budget.
        """
        for vault in plan.vaults:
            vault.adopt(Receipts.merged(public_input(self._model).receipts, plan.receipts))
        steps = CountedSteps(self._model, plan.receipts, self._adopt)
        self.optimizer.noise.begin()
        self._guard.price(self.optimizer.noise)
        labels = plan.vaults[0].label_set if plan.vaults else LabelSet.new(plan.uses.num_units)
        self._run = Run(plan, labels, reported, steps)

    def end(self) -> None:
        run, self._run = self._under_way(), None
        self._guard.admit(0)
        run.steps.end()

    def counting(self, take: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """Returns a function that takes a step, and covers the weights that the step leaves."""

        def take_counted(iterator: Any) -> Any:
            return take(iterator) if self._run is None else self._run.steps.take(take, iterator)

        return take_counted

    def with_charges(self, callbacks: Any, epochs: int, initial_epoch: int) -> list[Any]:
        """Returns the callbacks of a ``fit``; the last charges each epoch."""
        several = _validate.callbacks_of(callbacks)
        self._checks = [part for part in several if isinstance(part, ChecksEpochs)]
        return [_EndEpochs(self), *several, _ChargeEpochs(self, epochs, initial_epoch)]

    def check(self, epochs: int) -> None:
        run = self._adopted()
        if run.plan.vaults and epochs > 0:
            self._warn_of_plan(run.plan, epochs)
            run.once, run.plans = self.plan_epochs(run.plan, epochs)

    def _warn_of_plan(self, plan: TrainingPlan, epochs: int) -> None:
        """Warns of epochs that the noise was not calibrated for, which cost more than planned."""
        if self.planned is None or self._epochs_charged + epochs <= self.planned[0]:
            return
        total, epsilon = self.planned
        left = max(0, total - self._epochs_charged)
        cost = self._charge(plan, self._epochs_charged + epochs).epsilon
        _validate.warn(
            f"expected at most {counted(left, 'epoch')} more of the {total} that make_private "
            f"planned for epsilon {epsilon:.4g}, got a fit of {epochs}: together they cost epsilon "
            f"{cost:.4g}. Call make_private with all epochs, or fit with epochs={left}."
            if left
            else f"the {counted(total, 'epoch')} that make_private planned for epsilon "
            f"{epsilon:.4g} are taken, and this fit takes {epochs} more: together they cost "
            f"epsilon {cost:.4g}. Call make_private with all epochs."
        )

    def plan_epochs(
        self, plan: TrainingPlan, epochs: int, made_of: tuple[Receipt, ...] = ()
    ) -> tuple[Charge, list[tuple[str, int]]]:
        """Returns the charge of one epoch, and the plan of each with the plan's number of epochs.

        Raises a ``BudgetExceededError`` if a budget does not allow all of them, with the receipts
        of their inputs.
        """
        once = self._charge(plan, 1)
        together = LabelsTogether(plan.vaults)
        plans = together.plans(once, epochs)
        rest = [each for each in plans if each[0]]
        if rest:
            # Only a new plan, which comes last, is more than was planned before.
            last = ChainedUse(once, *rest[-1])
            what = f"{counted(len(rest), 'epoch')} of {self._name}"
            together.check(what, self._charge(plan, len(rest)), last, made_of)
        return once, plans

    def charge(self) -> None:
        run = self._adopted()
        charge = self._charge(run.plan, 1)
        receipt = self._receipt(run, charge)
        if run.plans and charge == run.once:
            plan, uses = run.plans.pop(0)
            receipt = dataclasses.replace(receipt, plan=plan, plan_uses=uses)
        # The receipt is in the ledger before a step may run: a process that dies within the epoch
        # has charged steps that it did not take, never the reverse.
        self._spend(run, receipt)
        self._epochs_charged += 1
        self._guard.admit(run.plan.uses.steps_per_epoch)

    def end_epoch(self) -> None:
        """Records the weights, and whether the noise became repeatable within the epoch."""
        run = self._run
        if run is None:
            return
        if self._is_seeded(run.plan) and run.last is not None and not run.last.seeded:
            free = self._receipt(run, Charge(0.0, 0.0, dp_accounting.NoOpDpEvent()))
            what = "the noise of the earlier steps is repeatable"
            self._spend(run, dataclasses.replace(free, what=what))
        run.steps.end_epoch()

    def guarantee(self, delta: float | None, next_epoch: bool = False) -> PrivacyGuarantee:
        receipts = public_input(self._model).receipts
        if next_epoch:
            run = self._under_way()
            receipts = (*receipts, self._receipt(run, self._charge(run.plan, 1)))
        statement = LayerHistory(receipts).guarantee(delta)
        return statement.warn_of_delta()

    def _under_way(self) -> Run:
        if self._run is None:
            raise RuntimeError("no fit is under way. Call guarantee().")
        return self._run

    def _adopted(self) -> Run:
        """Counts weights that callbacks loaded against the vault's budget, and a target."""
        run = self._under_way()
        run.steps.look()
        self._adopt()
        for callback in self._checks:
            callback.check_next_epoch()
        return run

    def _adopt(self) -> None:
        for vault in self._run.plan.vaults if self._run is not None else ():
            vault.adopt(public_input(self._model).receipts)

    def _spend(self, run: Run, receipt: Receipt) -> None:
        receipts: tuple[Receipt, ...] = (receipt,)
        if run.plan.vaults:
            receipts = LabelsTogether(run.plan.vaults).charge(
                receipt.charge,
                what=receipt.what,
                unit=receipt.unit,
                num_units=receipt.num_units,
                seeded=receipt.seeded,
                metrics_reported=receipt.metrics_reported,
                sample_weights=receipt.sample_weights,
                plan=receipt.plan,
                plan_uses=receipt.plan_uses,
            )
        run.last = receipts[0]
        TrainedModel(self._model).attach(receipts)

    def _is_seeded(self, plan: TrainingPlan) -> bool:
        return bool(self.optimizer.noise.seeded or plan.uses.seeded)

    def _charge(self, plan: TrainingPlan, epochs: int) -> Charge:
        noise = self.optimizer.noise
        name = type(noise).__name__
        uses = plan.uses.per_epoch * epochs
        event = self.optimizer.dp_event(plan.uses.probability, uses)
        if event is None:
            if plan.vaults:
                raise ValueError(
                    f"expected noise with a known cost, got {name}, whose dp_event is None. Use "
                    "GaussianNoise."
                )
            return Charge.unknown(_NO_EVENT.format(name=name))
        q, clipping = plan.uses.probability, self.optimizer.clipping
        steps = NoisySteps(noise.noise_multiplier, q, uses, plan.uses.unit, clipping)
        assumptions = [*steps.assumptions(), *noise.assumptions(), Assumption.INITIAL_WEIGHTS]
        if not Mechanism.is_of_this_library(noise):
            claimed = Assumption("claimed-noise", "authors", _CLAIMED.format(name=name))
            assumptions.insert(0, claimed)
        if not plan.vaults:
            assumptions.append(_NO_VAULT)
        if len(plan.vaults) > 1:
            assumptions.append(_SAME_EXAMPLES)
        tensor_float = tf.config.experimental.tensor_float_32_execution_enabled()
        if tensor_float and tf.config.list_physical_devices("GPU"):
            assumptions.append(_ROUNDED)
        return Charge.of_event(event, self._delta(plan), assumptions)

    def _delta(self, plan: TrainingPlan) -> float:
        if not plan.vaults:
            # No budget names a delta: n^-1.1 is the usual one below 1 / n.
            return float(plan.uses.num_units) ** -1.1
        budget = min((vault.budget for vault in plan.vaults), key=lambda budget: budget.delta)
        if budget.delta <= 0.0:
            raise ValueError(
                "expected a budget with delta above zero for Gaussian noise, got delta=0. Write "
                f"PrivacyBudget(epsilon={budget.epsilon:g}, delta=...)."
            )
        return budget.delta

    def _receipt(self, run: Run, charge: Charge) -> Receipt:
        plan = run.plan
        by_user = plan.uses.unit == "user"
        return Receipt(
            run.labels,
            charge,
            what=f"{counted(plan.uses.steps_per_epoch, 'step')} of {self._name}, noise "
            f"{self.optimizer.noise.noise_multiplier:g}, sampled with "
            f"{plan.uses.probability:g}",
            kind="steps",
            delta=self._delta(plan),
            unit=plan.uses.unit,
            num_units=plan.uses.num_units if by_user else None,
            seeded=self._is_seeded(plan),
            metrics_reported=run.reported,
            sample_weights=plan.is_weighted,
        )


class ChecksEpochs(keras.callbacks.Callback):
    """A callback that may stop a ``fit`` before an epoch is charged."""

    def check_next_epoch(self) -> None:
        """Raises if the next epoch must not begin.

        By then all callbacks have loaded and restored weights, wherever they are in the list.
        """


class _EndEpochs(keras.callbacks.Callback):
    """Runs before the user's callbacks, which may save the weights of an epoch."""

    def __init__(self, spending: Spending) -> None:
        super().__init__()
        self._spending = spending

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Records seeded noise and weights; turns tensors in the logs into numbers."""
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
        """Checks the cost of the epochs to come, of which a restored fit has fewer."""
        done = self.model._initial_epoch or self._initial_epoch
        self._spending.check(self._epochs - done)

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._spending.charge()
