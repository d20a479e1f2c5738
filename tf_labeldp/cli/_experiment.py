"""The demo's trainings: one model for each method and epsilon."""

from __future__ import annotations

import dataclasses
import math
import sys
import time
from collections.abc import Sequence

import keras
import numpy as np

from tf_labeldp.accounting import PrivacyBudget, PrivacyGuarantee
from tf_labeldp.cli import _models
from tf_labeldp.cli._datasets import ClassificationData
from tf_labeldp.cli._result import ALONE, Job, Result
from tf_labeldp.training import MultiStageTraining
from tf_labeldp.vault import PrivateLabels

_SETTINGS = "the training settings were not tuned on these labels"


@dataclasses.dataclass(frozen=True)
class Settings:
    """How the demo trains; the same for every method and epsilon.

    Attributes:
        epochs: epochs a stage.
        batch_size: examples a step.
        learning_rate: of Adam.
        fractions: shares of the two stages of LP-2ST.
        temperature: of the second stage's priors.
        mixup_alpha: of the private methods.
    """

    epochs: int
    batch_size: int
    learning_rate: float
    fractions: tuple[float, float] = (0.6, 0.4)
    temperature: float = 0.5
    mixup_alpha: float = 8.0


def settings_for(name: str, epochs: int | None) -> Settings:
    """Returns the settings for a data set; ``epochs`` overrides the number of epochs a stage."""
    default = (
        Settings(15, 64, 3e-3) if name == "digits" else Settings(3, 256, 2e-3, mixup_alpha=0.0)
    )
    return default if epochs is None else dataclasses.replace(default, epochs=epochs)


def jobs(epsilons: Sequence[float]) -> list[Job]:
    """Returns what to train: without privacy once, each private method at each epsilon."""
    private = [Job(method, epsilon) for epsilon in epsilons for method in ("LP-1ST", "LP-2ST")]
    return [Job("non-private", None), *private]


class Progress:
    """Says which run of how many is on, how long it took, and about how long the rest will take.

    On a terminal one line follows the epochs; elsewhere a long run says a line every ten seconds.
    """

    def __init__(self, epochs_of_runs: Sequence[int]) -> None:
        self._epochs = list(epochs_of_runs)
        self._start = self._said = time.monotonic()
        self._run = self._epoch = 0
        self._title = ""

    def begin(self, title: str) -> None:
        """Starts the next run."""
        self._run += 1
        self._epoch = 0
        self._title = f"[{self._run}/{len(self._epochs)}] {title}"
        self._say("...")

    def epoch_done(self) -> None:
        """Counts an epoch of the current run."""
        self._epoch += 1
        if sys.stdout.isatty() or time.monotonic() - self._said > 10.0:
            self._say(f": epoch {self._epoch} of {self._epochs[self._run - 1]}{self._rest()}")

    def end(self, text: str) -> None:
        """Ends the current run."""
        self._epoch = self._epochs[self._run - 1]
        self._say(f": {text}{self._rest()}", last=True)

    def _rest(self) -> str:
        elapsed = time.monotonic() - self._start
        done = sum(self._epochs[: self._run - 1]) + self._epoch
        left = elapsed * (sum(self._epochs) - done) / max(1, done)
        return f"; {elapsed:.0f} s so far" + (f", about {left:.0f} s left" if left else "")

    def _say(self, text: str, last: bool = False) -> None:
        self._said = time.monotonic()
        if sys.stdout.isatty():
            # Over the line before: its rest is erased.
            print(f"\r{self._title}{text}\033[K", end="\n" if last else "", flush=True)
        else:
            print(f"{self._title}{text}", flush=True)


def train(
    job: Job,
    data: ClassificationData,
    settings: Settings,
    seed: int | None,
    progress: Progress,
) -> Result:
    """Trains one model, tests it, and returns all that may be written down about it."""
    progress.begin(job.title)
    start = time.monotonic()
    if seed is not None:
        keras.utils.set_random_seed(seed)
    model = _models.model_for(data.x_train.shape[1:], data.num_classes)
    model.compile(
        keras.optimizers.Adam(settings.learning_rate),
        loss=keras.losses.CategoricalCrossentropy(from_logits=True),
    )
    ticks = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: progress.epoch_done())
    noisy_labels = None
    if job.epsilon is None:
        # The only place where true training labels are used; its result is marked NOT PRIVATE.
        targets = np.eye(data.num_classes, dtype=np.float32)[data.y_train]
        model.fit(
            data.x_train,
            targets,
            batch_size=settings.batch_size,
            epochs=settings.epochs,
            callbacks=[ticks],
            verbose=0,
        )
        guarantee = PrivacyGuarantee(epsilon=math.inf)
    else:
        labels = PrivateLabels(
            data.y_train,
            data.num_classes,
            budget=PrivacyBudget(job.epsilon),
            insecure_seed=seed,
        )
        stages = MultiStageTraining(
            data.x_train,
            labels,
            epsilon=job.epsilon,
            fractions=settings.fractions if job.num_stages == 2 else (1.0,),
            epochs_per_stage=settings.epochs,
            batch_size=settings.batch_size,
            temperature=settings.temperature,
            mixup_alpha=settings.mixup_alpha,
            seed=seed or 0,
            verbose=0,
        )
        model.fit(
            stages.dataset(),
            epochs=stages.epochs,
            callbacks=[stages, ticks],
            shuffle=False,
            verbose=0,
        )
        noisy_labels = stages.noisy_labels()
        guarantee = stages.guarantee().with_assumptions((ALONE, _SETTINGS))
    logits = np.asarray(model.predict(data.x_test, batch_size=1024, verbose=0))
    accuracy = float(np.mean(logits.argmax(axis=1) == data.y_test))
    seconds = time.monotonic() - start
    progress.end(f"test accuracy {100 * accuracy:.1f} %")
    return Result(job, model, guarantee, noisy_labels, accuracy, logits, seconds)
