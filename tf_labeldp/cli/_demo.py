"""``tf-labeldp demo``: what label privacy costs in accuracy, on a data set of one's choice."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import math
import pathlib
import sys
import tempfile
import textwrap
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from tf_labeldp.accounting import Assumption, PrivacyBudget, PrivacyGuarantee
from tf_labeldp.accounting._budget import default_delta
from tf_labeldp.cli import _datasets
from tf_labeldp.cli._console import CommandError, DatasetError, load_tensorflow
from tf_labeldp.estimation import prior_from_logits
from tf_labeldp.mechanisms import RRWithPrior
from tf_labeldp.vault import NoisyLabels, PrivateLabels

PLOT_FILE = "accuracy_and_channel.png"
_OWN_FILES = (
    "model_NOT-PRIVATE.keras",
    "model_lp-*st_epsilon-*.keras",
    "model_dp-sgd_epsilon-*.keras",
    "model_privateclassifier_epsilon-*.keras",
    "noisy_labels_lp-*st_epsilon-*.npz",  # of version 0.1
    "noisy_labels_lp-*st_epsilon-*/noisy_labels.*",
    "noisy_labels_lp-*st_epsilon-*/.noisy_labels.*.tmp",  # of a demo that was killed
    "privacy.txt",
    "privacy.json",
    "results.json",
    PLOT_FILE,
)
METHODS = {
    "LP-1ST": "randomized response",
    "LP-2ST": "two stages",
    "DP-SGD": "noisy gradients",
    "PrivateClassifier": "one call",
}
_STEPS = 4
"""Of DP-SGD in an epoch, about."""
_MARKER = ".tf-labeldp-demo"
_PUBLIC_TEST = "Test accuracy uses public test labels and is covered by no privacy statement."
_CHOSEN_ON = ("digits", "mnist")
_CHOSEN = (
    "The demo's training settings were chosen by looking at results on {}, whose labels are "
    "public: here the assumption that they were not tuned on these labels does not hold, and the "
    "statements only show what yours would say."
)
_NOT_PRIVATE = (
    "NOT PRIVATE: trained on the true labels, for comparison. Publishing this model voids every "
    "other statement."
)
_TOGETHER = (
    "All models here were made from the same labels, so publishing several costs the sum of their "
    "epsilons; all private ones together are"
)
_SETTINGS = Assumption(
    "settings-not-tuned", "trainer", "The training settings were not tuned on these labels."
)
ALONE = Assumption(
    "only-model-published",
    "trainer",
    "This model and its noisy labels alone are published, of all that was made from these labels.",
)
"""An assumption of each model's statement: the demo makes several from the same labels."""
_MOST_NAMED_CLASSES = 12
"""With more classes, neither ticks nor cells are labelled: they would not be readable."""
_MOST_LETTERS_IN_A_ROW = 40


def run(args: argparse.Namespace) -> int:
    """Runs the demo; returns the exit code."""
    data = _datasets.load(args.data, args.data_dir)
    if len(data.y_train) < 10 or not len(data.y_test):
        raise DatasetError(f"{data.name} has too few examples for the demo")
    report = Report(args.output, data, seeded=args.insecure_seed is not None)
    print(
        f"{data.name}: {len(data.y_train):,} training examples with private labels, "
        f"{len(data.y_test):,} test examples with public labels, {data.num_classes} classes",
        flush=True,
    )

    load_tensorflow()
    settings = settings_for(data.name, args.epochs)
    private = [Job(method, one) for one in sorted(set(args.epsilons)) for method in METHODS]
    jobs = [Job("non-private", None), *private]
    progress = Progress([job.num_epochs(settings) for job in jobs])
    for job in jobs:
        report.add(train(job, data, settings, args.insecure_seed, progress))
    plot = draw(report)
    print(f"\n{report.table()}\n\n{report.summary()}\n{plot}")
    return 0


@dataclasses.dataclass(frozen=True)
class Job:
    """One model to train."""

    method: str  # "non-private", or of METHODS
    epsilon: float | None  # None without privacy

    def num_epochs(self, settings: Settings) -> int:
        """Returns how many epochs it trains; 1 for what trains none."""
        if self.method == "PrivateClassifier":
            return 1
        return settings.epochs * (2 if self.method == "LP-2ST" else 1)

    @property
    def title(self) -> str:
        """The job in words."""
        if self.epsilon is None:
            return f"{self.method} (NOT PRIVATE)"
        return f"{self.method}, epsilon {self.epsilon:g}"

    @property
    def name(self) -> str:
        """The job in file names."""
        if self.epsilon is None:
            return "NOT-PRIVATE"
        return f"{self.method.lower()}_epsilon-{self.epsilon!r}".removesuffix(".0")


@dataclasses.dataclass(frozen=True, eq=False)
class Result:
    """A trained model, and all that may be written down about it: no true training label."""

    job: Job
    model: Any  # a Keras model that returns logits
    guarantee: PrivacyGuarantee  # infinite epsilon for the non-private model
    noisy_labels: NoisyLabels | None  # all that training saw of the labels; None without privacy
    accuracy: float  # on the test set, in [0, 1]
    test_logits: np.ndarray  # float32 (m, K)
    seconds: float  # of training and testing

    @property
    def model_file(self) -> str:
        """Name of the model's file."""
        return f"model_{self.job.name}.keras"

    @property
    def noisy_labels_folder(self) -> str | None:
        """Name of the folder of noisy labels, if there are any."""
        return None if self.noisy_labels is None else f"noisy_labels_{self.job.name}"


@dataclasses.dataclass(frozen=True)
class Settings:
    """How the demo trains; the same for every method and epsilon."""

    epochs: int  # per stage
    batch_size: int
    learning_rate: float  # of Adam
    fractions: tuple[float, float] = (0.6, 0.4)  # of the examples, for the two stages of LP-2ST
    temperature: float = 0.5  # of the second stage's priors
    mixup_alpha: float = 8.0  # of the private methods


def settings_for(name: str, epochs: int | None) -> Settings:
    """Returns the settings for a data set; ``epochs`` overrides the number of epochs a stage."""
    default = (
        Settings(15, 64, 3e-3) if name == "digits" else Settings(3, 256, 2e-3, mixup_alpha=0.0)
    )
    return default if epochs is None else dataclasses.replace(default, epochs=epochs)


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
    data: _datasets.ClassificationData,
    settings: Settings,
    seed: int | None,
    progress: Progress,
) -> Result:
    """Trains one model, tests it, and returns all that may be written down about it."""
    import keras

    from tf_labeldp.cli import _models

    progress.begin(job.title)
    start = time.monotonic()
    if seed is not None:
        keras.utils.set_random_seed(seed)
    model = _models.model_for(data.x_train.shape[1:], data.num_classes)
    ticks = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: progress.epoch_done())
    noisy_labels = None
    if job.epsilon is None:
        # The only place where true training labels are used; its result is marked NOT PRIVATE.
        targets = np.eye(data.num_classes, dtype=np.float32)[data.y_train]
        _compile(model, settings)
        model.fit(
            data.x_train, targets, settings.batch_size, settings.epochs, verbose=0,
            callbacks=[ticks],
        )  # fmt: skip
        guarantee = PrivacyGuarantee(epsilon=math.inf)
    else:
        delta = 0.0 if job.method.startswith("LP") else default_delta(len(data.y_train))
        budget = PrivacyBudget(job.epsilon, delta)
        labels = PrivateLabels(data.y_train, data.num_classes, budget=budget, insecure_seed=seed)
        if job.method == "DP-SGD":
            guarantee = _noisy_steps(model, data, labels, job.epsilon, settings, seed, ticks)
        elif job.method == "PrivateClassifier":
            from tf_labeldp.front_door import PrivateClassifier

            door = PrivateClassifier(job.epsilon).fit(data.x_train, labels)
            model, guarantee = door.to_keras(), door.guarantee()
            progress.epoch_done()
        else:
            noisy_labels, guarantee = _in_stages(model, data, labels, job, settings, seed, ticks)
        guarantee = guarantee.with_assumptions((ALONE, _SETTINGS))
    logits = np.asarray(model.predict(data.x_test, batch_size=1024, verbose=0))
    accuracy = float(np.mean(logits.argmax(axis=1) == data.y_test))
    seconds = time.monotonic() - start
    progress.end(f"test accuracy {100 * accuracy:.1f} %")
    return Result(job, model, guarantee, noisy_labels, accuracy, logits, seconds)


def _compile(model: Any, settings: Settings) -> None:
    import keras

    model.compile(
        keras.optimizers.Adam(settings.learning_rate),
        loss=keras.losses.CategoricalCrossentropy(from_logits=True),
    )


def _in_stages(
    model: Any,
    data: _datasets.ClassificationData,
    labels: PrivateLabels,
    job: Job,
    settings: Settings,
    seed: int | None,
    ticks: Any,
) -> tuple[NoisyLabels, PrivacyGuarantee]:
    """Trains a model on noisy labels, in one stage or two."""
    from tf_labeldp.training import MultiStageTraining

    _compile(model, settings)
    stages = MultiStageTraining(
        data.x_train,
        labels,
        epsilon=job.epsilon or 0.0,
        fractions=settings.fractions if job.method == "LP-2ST" else (1.0,),
        epochs_per_stage=settings.epochs,
        batch_size=settings.batch_size,
        temperature=settings.temperature,
        mixup_alpha=settings.mixup_alpha,
        seed=seed or 0,
        verbose=0,
    )
    model.fit(
        stages.dataset(), epochs=stages.epochs, callbacks=[stages, ticks], shuffle=False,
        verbose=0,
    )  # fmt: skip
    return stages.noisy_labels(), stages.guarantee()


def _noisy_steps(
    model: Any,
    data: _datasets.ClassificationData,
    labels: PrivateLabels,
    epsilon: float,
    settings: Settings,
    seed: int | None,
    ticks: Any,
) -> PrivacyGuarantee:
    """Trains a model by DP-SGD."""
    from tf_labeldp.training import make_private

    batch_size = min(1024, max(2, len(labels) // _STEPS))
    private, batches, callbacks = make_private(
        model, epsilon=epsilon, x=data.x_train, labels=labels, epochs=settings.epochs,
        batch_size=batch_size, insecure_seed=seed,
    )  # fmt: skip
    del callbacks  # they print
    private.fit(batches, epochs=settings.epochs, callbacks=[ticks], verbose=0)
    return private.guarantee()


class Report:
    """Writes each result as it comes, so that a demo that is stopped leaves consistent files.

    Args:
        folder: new, empty, or of an earlier demo, whose files are removed.
        data: the data set.
        seeded: whether the run is repeatable and so not private.

    Raises:
        CommandError: nothing can be written there, or it holds other files than a demo's.
    """

    def __init__(
        self, folder: pathlib.Path, data: _datasets.ClassificationData, *, seeded: bool
    ) -> None:
        self.folder = folder
        self.data = data
        self.results: list[Result] = []
        self._seeded = seeded
        # Test accuracy of always answering the most frequent class of the public test labels.
        self.baseline = float(np.bincount(data.y_test).max() / data.y_test.size)
        self.remarks = [_PUBLIC_TEST]  # what the statements do not cover
        if data.name in _CHOSEN_ON:
            self.remarks.append(_CHOSEN.format(data.name))
        try:
            folder.mkdir(parents=True, exist_ok=True)
            if any(folder.iterdir()) and not (folder / _MARKER).exists():
                raise CommandError(
                    f"--output {folder} holds files that are not the demo's; give a new or empty "
                    "folder"
                )
            with tempfile.TemporaryFile(dir=folder):
                pass
            for pattern in _OWN_FILES:
                for path in folder.glob(pattern):
                    path.unlink()
            for path in folder.glob("noisy_labels_lp-*st_epsilon-*"):
                with contextlib.suppress(OSError):  # a file, or other files are in it
                    path.rmdir()
            (folder / _MARKER).write_text("Files of `tf-labeldp demo`, which replaces them.\n")
        except OSError as error:
            raise CommandError(
                f"cannot write to --output {folder} ({error.strerror}); give another folder"
            ) from error

    def add(self, result: Result) -> None:
        """Writes a result's model and noisy labels, and the statements of all results so far."""
        self.results.append(result)
        result.model.save(self.folder / result.model_file)
        if result.noisy_labels is not None and result.noisy_labels_folder is not None:
            result.noisy_labels.save(self.folder / result.noisy_labels_folder)
        for name, text in (
            ("privacy.txt", self._privacy_text()),
            ("privacy.json", json.dumps(self._privacy(), indent=2) + "\n"),
            ("results.json", json.dumps(self._figures(), indent=2) + "\n"),
        ):
            (self.folder / name).write_text(text, encoding="utf-8")

    @property
    def epsilons(self) -> list[float]:
        """The epsilons with results, rising."""
        return sorted({r.job.epsilon for r in self.results if r.job.epsilon is not None})

    def accuracies(self, method: str) -> list[float]:
        """Test accuracies of a private method in the order of ``epsilons``."""
        found = {r.job.epsilon: r.accuracy for r in self.results if r.job.method == method}
        return [found[epsilon] for epsilon in self.epsilons]

    @property
    def non_private(self) -> float:
        """Test accuracy of the non-private model."""
        return next(r.accuracy for r in self.results if r.job.epsilon is None)

    def together(self) -> PrivacyGuarantee:
        """Returns the guarantee of publishing all private models (basic composition)."""
        private = [r.guarantee for r in self.results if r.job.epsilon is not None]
        assumptions = dict.fromkeys(text for one in private for text in one.assumptions)
        return PrivacyGuarantee(
            epsilon=math.fsum(one.epsilon for one in private),
            delta=math.fsum(one.delta for one in private),
            assumptions=tuple(text for text in assumptions if text != ALONE),
            seeded=self._seeded,
        )

    def table(self) -> str:
        """Returns test accuracy by method and epsilon."""
        heads = [f"eps {epsilon:g}" for epsilon in self.epsilons]
        wide = max(8, *(len(head) + 2 for head in heads))
        rows = ["Test accuracy in %".ljust(29) + "".join(head.rjust(wide) for head in heads)]
        plain = f"{100 * self.non_private:.1f}".rjust(wide) * len(heads)
        rows.append("non-private (NOT PRIVATE)".ljust(29) + plain)
        for method, words in METHODS.items():
            cells = "".join(f"{100 * a:.1f}".rjust(wide) for a in self.accuracies(method))
            rows.append(f"{method} ({words})".ljust(29) + cells)
        rows.append("most frequent class".ljust(29) + f"{100 * self.baseline:.1f}".rjust(wide))
        return "\n".join(rows)

    def summary(self) -> str:
        """Returns what to know about the figures, one statement, and where everything is."""
        spread = 196 * math.sqrt(self.non_private * (1 - self.non_private) / self.data.y_test.size)
        notes = (
            f"One run of each, so small differences mean nothing: the {self.data.y_test.size:,} "
            f"test examples alone leave +-{spread:.1f} points or more, the random labels add to "
            f"it. {' '.join(self.remarks)}"
        )
        last = self.results[-1]
        together = str(self.together()).splitlines()[0]
        return "\n".join(
            [
                textwrap.fill(notes, 100),
                "",
                f"Privacy of {last.job.title}:",
                str(last.guarantee),
                "",
                textwrap.fill(f"{_TOGETHER} {together}", 100),
                "",
                f"In {self.folder}: every statement (privacy.txt, privacy.json), results.json,",
                "noisy_labels_*/, model_*.keras (model_NOT-PRIVATE.keras saw the true labels).",
            ]
        )

    def _privacy_text(self) -> str:
        parts = []
        for result in self.results:
            private = result.job.epsilon is not None
            statement = str(result.guarantee) if private else _NOT_PRIVATE
            parts.append(f"{result.model_file}: {result.job.title}\n{statement}")
        parts.append(f"{_TOGETHER}:\n{self.together()}")
        parts += self.remarks
        return "\n\n".join(parts) + "\n"

    def _privacy(self) -> dict[str, Any]:
        return {
            "models": [
                {
                    "model": result.model_file,
                    "noisy_labels": result.noisy_labels_folder,
                    "method": result.job.method,
                    "note": None if result.job.epsilon is not None else _NOT_PRIVATE,
                    "guarantee": json.loads(result.guarantee.to_json()),
                }
                for result in self.results
            ],
            "all_private_models_together": json.loads(self.together().to_json()),
            "remarks": self.remarks,
        }

    def _figures(self) -> dict[str, Any]:
        return {
            "data": self.data.name,
            "num_train": len(self.data.y_train),
            "num_test": len(self.data.y_test),
            "num_classes": self.data.num_classes,
            "most_frequent_class_accuracy": self.baseline,
            "seeded": self._seeded,
            "runs": [
                {
                    "method": result.job.method,
                    "epsilon": result.job.epsilon,
                    "private": result.guarantee.is_private,
                    "test_accuracy": result.accuracy,
                    "seconds": round(result.seconds, 2),
                    "model": result.model_file,
                }
                for result in self.results
            ],
        }


def draw(report: Report) -> str:
    """Writes the picture and returns what to tell the user about it."""
    try:
        from matplotlib.figure import Figure  # draws with Agg, needs no display
    except ImportError:
        return "No plot: it needs matplotlib, pip install 'tf-labeldp[plots]'."
    figure = Figure(figsize=(12.5, 5.2), layout="constrained", dpi=120)
    left, right = figure.subplots(1, 2, width_ratios=(1.1, 1.0))
    _draw_accuracy(left, report)
    _draw_channel(figure, right, report)
    path = report.folder / PLOT_FILE
    figure.savefig(path)
    return f"Plot: {path}"


def _draw_accuracy(axes: Any, report: Report) -> None:
    epsilons = report.epsilons
    axes.axhline(
        100 * report.non_private, color="black", linestyle="--", label="non-private (NOT PRIVATE)"
    )
    for (method, words), marker in zip(METHODS.items(), "so^D", strict=True):
        values = [100 * accuracy for accuracy in report.accuracies(method)]
        axes.plot(epsilons, values, marker=marker, label=f"{method}: {words}")
    axes.axhline(
        100 * report.baseline, color="gray", linestyle=":", label="most frequent class (chance)"
    )
    axes.set_xscale("log", base=2)
    axes.set_xticks(epsilons, [f"{epsilon:g}" for epsilon in epsilons])
    axes.set_xlabel("epsilon of label-DP (smaller is more private)")
    axes.set_ylabel("test accuracy (%)")
    axes.margins(y=0.1)
    axes.set_title(f"{report.data.name}: what label privacy costs (one run each)")
    axes.grid(alpha=0.3)
    axes.legend(loc="best")


def _draw_channel(figure: Any, axes: Any, report: Report) -> None:
    """Draws the channel of RRWithPrior under the prior that a trained model has for one example."""
    names = report.data.class_names
    epsilon = report.epsilons[(len(report.epsilons) - 1) // 2]
    mechanism = RRWithPrior(epsilon, len(names))
    job = Job("LP-2ST", epsilon)
    logits = next(result.test_logits for result in report.results if result.job == job)
    priors = prior_from_logits(logits[:1000])
    sizes = mechanism.optimal_k(priors)
    # An example on which the model hesitates between a few classes shows the mechanism best.
    example = int(np.argmin(np.abs(sizes - min(3, len(names)))))
    k = int(sizes[example])
    matrix = mechanism.transition_matrix(priors[example])
    image = axes.imshow(matrix, vmin=0.0, vmax=1.0, cmap="Blues")
    figure.colorbar(image, ax=axes, label="probability of the noisy label", shrink=0.85)
    few = len(names) <= _MOST_NAMED_CLASSES
    ticks = range(len(names)) if few else []
    shown = list(names) if few else []
    crowded = len("".join(names)) > _MOST_LETTERS_IN_A_ROW
    axes.set_xticks(ticks, shown, rotation=40 if crowded else 0)
    axes.set_yticks(ticks, shown)
    if few:
        for (row, column), value in np.ndenumerate(matrix):
            if value > 0.0:
                color = "white" if value > 0.5 else "black"
                axes.text(
                    column, row, f"{value:.2f}", ha="center", va="center", color=color, fontsize=8
                )
    axes.set_xlabel(
        "noisy label, which training sees\n\nA row says how likely each noisy label is for one "
        "true label. LP-2ST draws them so,\namong the classes that its first stage finds likely; "
        "rows differ by a factor of e^epsilon at most."
    )
    axes.set_ylabel("true label, which stays private")
    classes = "class" if k == 1 else "classes"
    axes.set_title(
        f"RRWithPrior at epsilon {epsilon:g}, under the model's prior\nfor one example: "
        f"it answers among the {k} likeliest {classes}"
    )
