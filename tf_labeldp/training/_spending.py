"""What the steps of an optimizer cost: charged to a vault before they are taken, and stated."""

from __future__ import annotations

import dataclasses
import math
import secrets
import warnings
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np

from tf_labeldp.accounting import Charge, PrivacyGuarantee, compose_charges, dp_sgd_guarantee
from tf_labeldp.mechanisms import DPSGDSteps
from tf_labeldp.private_labels import PrivateLabels
from tf_labeldp.training._ledger import Ledger
from tf_labeldp.training._step_guard import StepGuard
from tf_labeldp.training._training_plan import TrainingPlan

_REPORTED = (
    "nobody sees the training loss and metrics that were reported: they are made of true labels"
)
_WEIGHTED = "the sample weights were made without labels"
_UNKNOWN = (
    "nothing is promised: it is not known how often these data used a label; fit on "
    "data.poisson_batches or on arrays"
)
_NO_EVENT = "nothing is promised: nothing can be said of the steps of this kind of noise one by one"
_OTHER_RELEASES = (
    "what else the vault of these labels has paid for is stated by its own guarantee(), not here"
)
_BY_LABEL = (
    "stated by label and not by user, since the vault has paid for releases that are counted by "
    "label"
)
_SAME = 1e-9
"""Two compositions of the same steps differ by float rounding, not by more."""


class Spending:
    """Counts the steps of one optimizer, and charges the vaults whose labels they use.

    Args:
        optimizer: whose noise is added.
        ledger: in which the steps are kept, one run for each ``fit``.
        guard: lets the steps through that have been charged.
    """

    def __init__(self, optimizer: Any, ledger: Ledger, guard: StepGuard) -> None:
        self.optimizer = optimizer
        self._ledger, self._guard = ledger, guard
        self._plan: TrainingPlan | None = None
        self._entry: dict[str, Any] = {}

    @property
    def plan(self) -> TrainingPlan | None:
        """The plan of the ``fit`` under way, or None."""
        return self._plan

    def begin(self, plan: TrainingPlan, reported: bool) -> None:
        """Begins a ``fit``; nothing is charged yet, and no step let through."""
        batches, noise = plan.batches, self.optimizer.noise
        self._guard.admit(0)
        self._plan = plan
        self._entry = {
            "run": secrets.token_hex(8),
            "noise_multiplier": noise.noise_multiplier,
            "sampling_probability": plan.sampling_probability,
            "privacy_unit": "label" if batches is None else batches.privacy_unit,
            "num_units": plan.num_units,
            "from_vault": plan.vault is not None,
            "has_event": noise.dp_event(1.0, 1) is not None,
            "seeded": bool(noise.seeded or (batches is not None and batches.seeded)),
            "reported": reported,
            "noise_assumptions": list(noise.assumptions()),
            "weighted": plan.is_weighted,
            "steps": 0,
        }

    def end(self) -> None:
        """Ends a ``fit``: from now on no step is let through."""
        self._guard.admit(0)
        self._plan = None

    def with_charges(self, callbacks: Any, epochs: int, initial_epoch: int) -> list[Any]:
        """Returns the callbacks of a ``fit``, and last the one that charges each epoch."""
        if isinstance(callbacks, keras.callbacks.CallbackList):
            callbacks = callbacks.callbacks
        several = callbacks if isinstance(callbacks, (list, tuple)) else [callbacks]
        given = [one for one in several if one is not None]
        return [_PlainLogs(), *given, _ChargeEpochs(self, epochs, initial_epoch)]

    def check(self, epochs: int) -> None:
        """Raises if the vault's budget does not allow so many epochs."""
        plan = self._plan_under_way()
        if plan.vault is not None and epochs > 0:
            plan.vault.check_budget([self._receipt(plan, plan.vault, epochs)])

    def charge(self) -> None:
        """Charges one epoch, and lets its steps through."""
        plan, entry = self._plan_under_way(), self._entry
        if self.optimizer.noise.noise_multiplier != entry["noise_multiplier"]:
            raise RuntimeError(
                "noise_multiplier was changed while training, which the compiled step does not "
                "follow. Compile the model anew with another optimizer."
            )
        if plan.vault is not None:
            # A key of its own: stored noise can't be replayed, so each run pays for itself.
            key = _key(entry["run"], entry["steps"] // plan.uses_an_epoch)
            plan.vault.release(self._receipt(plan, plan.vault, 1), key=key)
            self._ledger.add_vault(plan.vault)
        entry["steps"] += plan.uses_an_epoch
        entry["seeded"] = bool(entry["seeded"] or self.optimizer.noise.seeded)
        self._ledger.add([entry])
        self._guard.admit(plan.steps_an_epoch)

    def _plan_under_way(self) -> TrainingPlan:
        if self._plan is None:
            raise RuntimeError("no fit is under way; ask for guarantee().")
        return self._plan

    def _receipt(self, plan: TrainingPlan, vault: PrivateLabels, epochs: int) -> DPSGDSteps:
        delta = vault.budget.delta
        if delta <= 0.0:
            raise ValueError(
                "the vault's budget has delta=0, and Gaussian noise needs one above zero. Make "
                f"the vault with PrivacyBudget(epsilon={vault.budget.epsilon:g}, delta=...), "
                "below 1 / n."
            )
        warn_large_delta(delta, plan.num_units or len(vault))
        if not self._entry["has_event"]:
            raise ValueError(
                f"no statement can be made about {type(self.optimizer.noise).__name__}, so the "
                "vault can't be charged for it. Use GaussianNoise."
            )
        return DPSGDSteps(
            noise_multiplier=self._entry["noise_multiplier"],
            sampling_probability=float(plan.sampling_probability or 1.0),
            steps=plan.uses_an_epoch * epochs,
            delta=delta,
            num_classes=None if vault.label_range is not None else vault.num_classes,
        )

    def guarantee(self, delta: float | None, next_epoch: bool = False) -> PrivacyGuarantee:
        """Returns the statement of all steps, and of the vaults that their labels came from.

        Args:
            delta: of the statement; None for the vault's, or n^-1.1 without one.
            next_epoch: also count another epoch of the ``fit`` under way.
        """
        history = self._ledger.runs
        if next_epoch:
            uses = self._plan_under_way().uses_an_epoch
            history = [entry for entry in history if entry["run"] != self._entry["run"]]
            history.append({**self._entry, "steps": self._entry["steps"] + uses})
        if not history:
            return PrivacyGuarantee(epsilon=0.0)
        reported = any(entry["reported"] for entry in history)
        of_noise = [text for entry in history for text in entry.get("noise_assumptions", ())]
        notes = tuple(
            dict.fromkeys(
                (
                    *self.optimizer.noise.assumptions(),
                    *of_noise,
                    *((_WEIGHTED,) if any(entry.get("weighted") for entry in history) else ()),
                    *((_REPORTED,) if reported else ()),
                )
            )
        )
        seeded = self.optimizer.noise.seeded or any(entry["seeded"] for entry in history)
        unknown = [
            *((_UNKNOWN,) if any(e["sampling_probability"] is None for e in history) else ()),
            *((_NO_EVENT,) if not all(e["has_event"] for e in history) else ()),
        ]
        if unknown:
            return PrivacyGuarantee(math.inf, assumptions=(*unknown, *notes), seeded=seeded)
        vaults, largest = self._known_vaults(), max(entry["num_units"] for entry in history)
        if delta is None:
            given = [vault.budget.delta for vault in vaults]
            delta = max(given) if given else largest**-1.1
        else:
            warn_large_delta(delta, largest)
        stated = _of_steps(history, delta)
        for vault in vaults:
            stated = self._with_vault(stated, vault, history, delta)
        if any(e["from_vault"] for e in history) and not vaults:
            stated = stated.with_assumptions((_OTHER_RELEASES,))
        stated = dataclasses.replace(stated, seeded=seeded or stated.seeded)
        return stated.with_assumptions(text for text in notes if text not in stated.assumptions)

    def _known_vaults(self) -> list[Any]:
        """Returns the vaults of all labels used so far, and of the ``fit`` under way."""
        vault = None if self._plan is None else self._plan.vault
        known = self._ledger.vaults
        return known if vault is None or any(one is vault for one in known) else [*known, vault]

    def _with_vault(
        self, stated: PrivacyGuarantee, vault: Any, history: list[dict[str, Any]], delta: float
    ) -> PrivacyGuarantee:
        """Returns the statement with all else that the vault has paid for."""
        more = []
        for entry in history:
            left = entry["steps"]
            if vault.has_draw(_key(entry["run"], 0)):
                # It has charged the whole run; of the one under way, not the epoch to come.
                under_way = entry["run"] == self._entry.get("run")
                left -= self._entry["steps"] if under_way else entry["steps"]
            if left > 0:
                more.append(_steps_of(entry, left, delta))
        whole = vault.guarantee(after=more, delta=delta)
        if whole.epsilon <= stated.epsilon * (1.0 + _SAME):
            return dataclasses.replace(stated, epsilon=max(stated.epsilon, whole.epsilon))
        notes = dict.fromkeys((*stated.assumptions, *whole.assumptions))
        if any(entry["privacy_unit"] == "user" for entry in history):
            notes[_BY_LABEL] = None
        return dataclasses.replace(whole, assumptions=tuple(notes))


class _PlainLogs(keras.callbacks.Callback):
    """Makes numbers of what a step returned, which some versions of Keras leave as tensors."""

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Changes the logs for the callbacks to come."""
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


def _of_steps(history: Sequence[dict[str, Any]], delta: float) -> PrivacyGuarantee:
    """Returns the statement of the steps alone."""
    # What is protected by user is protected by label too, and not the other way round.
    units = {entry["privacy_unit"] for entry in history}
    unit = "user" if units == {"user"} else "label"
    counts: dict[tuple[float, float], int] = {}
    for entry in history:
        key = entry["noise_multiplier"], entry["sampling_probability"]
        counts[key] = counts.get(key, 0) + entry["steps"]
    parts = [
        dp_sgd_guarantee(noise, q, steps, delta, privacy_unit=unit)
        for (noise, q), steps in counts.items()
    ]
    if len(parts) == 1:
        return parts[0]
    charges = [
        Charge.of(DPSGDSteps(noise_multiplier=noise, sampling_probability=q, steps=n, delta=delta))
        for (noise, q), n in counts.items()
    ]
    whole = compose_charges(charges, delta)
    texts = dict.fromkeys(text for part in (*parts, whole) for text in part.assumptions)
    return dataclasses.replace(
        parts[0], epsilon=whole.epsilon, delta=delta, assumptions=tuple(texts)
    )


def _steps_of(entry: dict[str, Any], steps: int, delta: float) -> DPSGDSteps:
    return DPSGDSteps(
        noise_multiplier=entry["noise_multiplier"],
        sampling_probability=entry["sampling_probability"],
        steps=steps,
        delta=delta,
    )


def _key(run: str, epoch: int) -> str:
    return f"dp-sgd-{run}-{epoch}"


def warn_large_delta(delta: float, num_units: int) -> None:
    """Warns of a delta that would allow to publish one unit in full."""
    if delta * num_units >= 1.0 - 1e-9:
        warnings.warn(
            f"delta={delta:g} is not below 1/n = {1.0 / num_units:g}: such a delta would allow to "
            "publish the label of one example. Use a smaller one.",
            UserWarning,
            stacklevel=3,
        )
