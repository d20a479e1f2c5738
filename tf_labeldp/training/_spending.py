"""What the steps of a private model cost: charged before they are taken, and carried by it."""

from __future__ import annotations

from typing import Any

import dp_accounting
import keras
import numpy as np
import tensorflow as tf

from tf_labeldp._optimizers import account_for, weight_digests
from tf_labeldp.accounting import Charge, PrivacyGuarantee
from tf_labeldp.accounting._receipts import LabelSet, Receipt, compose_receipts
from tf_labeldp.mechanisms._base import is_of_this_library
from tf_labeldp.training._private_step import StepGuard
from tf_labeldp.training._training_plan import TrainingPlan
from tf_labeldp.vault._carried import (
    WEIGHTS_ASSUMED,
    carry,
    receipts_of,
    remember_weights,
)

_UNKNOWN = (
    "nothing is promised: it is not known how often these data used a label; fit on "
    "data.poisson_batches or on arrays"
)
_NO_EVENT = (
    "nothing is promised: {name} says nothing of what its steps cost one by one (its dp_event is "
    "None)"
)
_CLAIMED = (
    "its author's claim, not this library's: {name} adds noise of the event that its dp_event names"
)
_NO_VAULT = "no vault keeps account of these labels: all their uses are steps of this model"
_ROUNDED = (
    "clipped norms are what they seem: on a GPU, TensorFloat-32 rounds the products that they are "
    "made of to about three digits (tf.config.experimental.enable_tensor_float_32_execution(False) "
    "turns it off)"
)


class Spending:
    """Charges the steps of one model to the vault of its labels, and notes them on its layers.

    Args:
        model: whose trainable variables are trained.
        optimizer: whose noise is added.
        guard: lets the steps through that have been charged.
    """

    def __init__(self, model: keras.Model, optimizer: Any, guard: StepGuard) -> None:
        self._model, self.optimizer, self._guard = model, optimizer, guard
        self._plan: TrainingPlan | None = None
        self._labels = LabelSet.new(0)
        self._reported = False
        self._before: list[bytes] = []
        self._last: Receipt | None = None

    @property
    def plan(self) -> TrainingPlan | None:
        """The plan of the ``fit`` under way, or None."""
        return self._plan

    def begin(self, plan: TrainingPlan, reported: bool) -> None:
        """Begins a ``fit``; nothing is charged yet, and no step let through.

        What the weights were made of counts against the vault's budget, and stays known from here
        on, evidence of training in the clear included.
        """
        carried = receipts_of(self._model)
        if plan.vault is not None:
            plan.vault.adopt(carried)
        carry(self._model, carried)
        account_for(self.optimizer, np.inf)  # by the guard, from here to the end
        self._guard.price(self.optimizer.noise)
        self._plan, self._reported, self._last = plan, reported, None
        self._labels = LabelSet.new(plan.num_units or 0)
        self._before = weight_digests(self._model.weights)

    def end(self) -> None:
        """Ends a ``fit``: from now on no step is let through."""
        self._guard.admit(0)
        self._plan = None
        account_for(self.optimizer)
        self.remember()

    def remember(self) -> None:
        """Notes the weights as they are now, so that they are known wherever they turn up."""
        known = receipts_of(self._model, evidence=False)
        remember_weights(self._model.weights, known, unless=self._before)

    def with_charges(self, callbacks: Any, epochs: int, initial_epoch: int) -> list[Any]:
        """Returns the callbacks of a ``fit``, and last the one that charges each epoch."""
        if isinstance(callbacks, keras.callbacks.CallbackList):
            callbacks = callbacks.callbacks
        several = callbacks if isinstance(callbacks, (list, tuple)) else [callbacks]
        given = [one for one in several if one is not None]
        return [_EndEpochs(self), *given, _ChargeEpochs(self, epochs, initial_epoch)]

    def check(self, epochs: int) -> None:
        """Raises if the vault's budget does not allow so many epochs."""
        plan = self._plan_under_way()
        self._adopt(plan)
        if plan.vault is not None and epochs > 0:
            plan.vault.check_budget(self._charge(plan, epochs))

    def charge(self) -> None:
        """Charges one epoch, and lets its steps through."""
        plan = self._plan_under_way()
        self._adopt(plan)
        charge = self._charge(plan, 1)
        fields = self._described(plan)
        if plan.vault is not None:
            self._last = plan.vault.charge(charge, **fields)
        else:
            self._last = self._receipt(plan, charge, fields)
        carry(self._model, [self._last])
        self._guard.admit(plan.steps_an_epoch)

    def note_a_seed(self) -> None:
        """Notes at the end of an epoch that its noise can be repeated after all."""
        plan = self._plan
        if plan is None or not self._is_seeded(plan):
            return
        if self._last is None or self._last.seeded:
            return
        charge = Charge(0.0, 0.0, dp_accounting.NoOpDpEvent())
        fields = {**self._described(plan), "what": "the noise of the steps before can be repeated"}
        if plan.vault is not None:
            self._last = plan.vault.charge(charge, **fields)
        else:
            self._last = self._receipt(plan, charge, fields)
        carry(self._model, [self._last])

    def guarantee(self, delta: float | None, next_epoch: bool = False) -> PrivacyGuarantee:
        """Returns the statement of all the model was made of, with another epoch if asked."""
        # While fit is under way, it alone trains.
        known = receipts_of(self._model, evidence=self._plan is None)
        if next_epoch:
            plan = self._plan_under_way()
            next_one = self._receipt(plan, self._charge(plan, 1), self._described(plan))
            known = (*known, next_one)
        stated = compose_receipts(known, delta).with_assumptions([WEIGHTS_ASSUMED])
        return stated.warn_of_delta()

    def _adopt(self, plan: TrainingPlan) -> None:
        """Counts what callbacks have loaded into the model against the vault's budget."""
        if plan.vault is not None:
            plan.vault.adopt(receipts_of(self._model, evidence=False))

    def _plan_under_way(self) -> TrainingPlan:
        if self._plan is None:
            raise RuntimeError("no fit is under way; ask for guarantee().")
        return self._plan

    def _is_seeded(self, plan: TrainingPlan) -> bool:
        batches = plan.batches
        return bool(self.optimizer.noise.seeded or (batches is not None and batches.seeded))

    def _charge(self, plan: TrainingPlan, epochs: int) -> Charge:
        """Returns what some epochs cost, whose event is that of the noise."""
        noise = self.optimizer.noise
        name = type(noise).__name__
        if plan.sampling_probability is None:
            return Charge.unknown(_UNKNOWN)
        event = noise.dp_event(plan.sampling_probability, plan.uses_an_epoch * epochs)
        if event is None:
            if plan.vault is not None:
                raise ValueError(
                    f"no statement can be made about {name}, so the vault can't be charged for it. "
                    "Use GaussianNoise."
                )
            return Charge.unknown(_NO_EVENT.format(name=name))
        notes = [*plan.assumptions(), *noise.assumptions(), WEIGHTS_ASSUMED]
        if not is_of_this_library(noise):
            notes.insert(0, _CLAIMED.format(name=name))
        if plan.vault is None:
            notes.append(_NO_VAULT)
        if _rounds_on_gpu():
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

    def _described(self, plan: TrainingPlan) -> dict[str, Any]:
        """Returns what a receipt says of one epoch, beside what it costs."""
        steps = "steps" if plan.steps_an_epoch is None else f"{plan.steps_an_epoch} steps"
        by_user = plan.batches is not None and plan.batches.privacy_unit == "user"
        return {
            "what": f"{steps} of {type(self._model).__name__} {self._model.name!r}, noise "
            f"{self.optimizer.noise.noise_multiplier:g}, sampled with "
            f"{plan.sampling_probability or 0:g}",
            "unit": "user" if by_user else None,
            "num_units": plan.num_units if by_user else None,
            "seeded": self._is_seeded(plan),
            "metrics_reported": self._reported,
            "sample_weights": plan.is_weighted,
        }

    def _receipt(self, plan: TrainingPlan, charge: Charge, fields: dict[str, Any]) -> Receipt:
        """Returns a receipt that no vault is charged for."""
        unit = "label" if plan.vault is None else plan.vault.unit
        return Receipt(
            self._labels if plan.vault is None else plan.vault.label_set,
            charge,
            kind="unknown" if plan.sampling_probability is None else "steps",
            delta=0.0 if plan.sampling_probability is None else self._delta(plan),
            **{**fields, "unit": fields["unit"] or unit},
        )


class _EndEpochs(keras.callbacks.Callback):
    """Comes before the callbacks of the user: what they see at the end of an epoch is known."""

    def __init__(self, spending: Spending) -> None:
        super().__init__()
        self._spending = spending

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Notes the weights, and makes numbers of logs that Keras may leave as tensors."""
        self._spending.note_a_seed()
        self._spending.remember()
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


def _rounds_on_gpu() -> bool:
    """Returns whether matrix products are rounded to TensorFloat-32 here."""
    enabled = tf.config.experimental.tensor_float_32_execution_enabled()
    return bool(enabled and tf.config.list_physical_devices("GPU"))
