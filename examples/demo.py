"""The accuracy that label privacy costs: the methods of this library on a small data set.

    make demo
    python examples/demo.py --data mnist --data-dir FOLDER --epsilons 1 2 4

Trains a small Keras model without privacy (NOT PRIVATE, for comparison), with LP-1ST (randomized
response), LP-2ST (two stages, RRWithPrior), DP-SGD and `PrivateClassifier` at several values of
epsilon, prints a table, and writes a plot, privacy statements, noisy labels and models to a folder.
Files of an earlier demo in that folder are replaced; other files are left untouched.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import pathlib
import sys
import textwrap
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import demo_datasets
import numpy as np
from demo_datasets import ClassificationData
from tqdm import tqdm

import tf_labeldp as ldp
from tf_labeldp.accounting import Assumption, PrivacyBudget, PrivacyGuarantee
from tf_labeldp.estimation import prior_from_logits
from tf_labeldp.mechanisms import RRWithPrior
from tf_labeldp.vault import NoisyLabels, PrivateLabels

METHODS = {
    "LP-1ST": "randomized response",
    "LP-2ST": "two stages",
    "DP-SGD": "noisy gradients",
    "PrivateClassifier": "one call",
}
_PLOT_FILE = "accuracy_and_channel.png"
_MARKER = ".tf-labeldp-demo"
# What an earlier demo wrote, also one that was killed.
_OWN_FILES = (
    "model_NOT-PRIVATE.keras",
    *(f"model_{method.lower()}_epsilon-*.keras" for method in METHODS),
    "noisy_labels_lp-*st_epsilon-*/noisy_labels.*",
    "noisy_labels_lp-*st_epsilon-*/.noisy_labels.*.tmp",
    "privacy.txt",
    "privacy.json",
    "results.json",
    _PLOT_FILE,
)
_PUBLIC_TEST = "Test accuracy uses public test labels and is covered by no privacy statement."
_CHOSEN = (
    "The demo's training settings were chosen by looking at results on {}, whose labels are "
    "public: here the assumption that they were not tuned on these labels does not hold, and the "
    "statements only show the form of yours."
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
# The demo makes several models from the same labels, so each statement needs it.
_ALONE = Assumption(
    "only-model-published",
    "trainer",
    "This model and its noisy labels alone are published, of all that was made from these labels.",
)
_FRACTIONS = (0.6, 0.4)
"""Shares of the examples for the two stages of LP-2ST."""
_BATCHES = 4
"""Batches per epoch of DP-SGD, about: large batches need less noise."""
_MOST_NAMED_CLASSES, _MOST_LETTERS_IN_A_ROW = 12, 40
"""More class names would overlap in the plot, or overlap unless they are turned."""


class DemoRun(NamedTuple):
    """One trained model."""

    method: str
    epsilon: float | None  # None for the model that is not private
    file: str
    guarantee: PrivacyGuarantee
    noisy_labels: str | None  # their folder
    logits: np.ndarray  # of the test examples
    test_accuracy: float
    seconds: float

    @property
    def note(self) -> str | None:
        return _NOT_PRIVATE if self.epsilon is None else None


def main(argv: Sequence[str] | None = None) -> None:
    args = _parser().parse_args(argv)
    try:
        data = demo_datasets.load(args.data, args.data_dir)
    except demo_datasets.DatasetError as error:
        sys.exit(str(error))
    if len(data.y_train) < 10 or not len(data.y_test):
        sys.exit(f"{data.name} has too few examples for the demo")
    prepare(args.output)
    print(
        f"{data.name}: {len(data.y_train):,} training examples with private labels, "
        f"{len(data.y_test):,} test examples with public labels, {data.num_classes} classes"
    )
    ldp.cli.load_tensorflow()  # without the lines of its log
    training = _Training(data, args.epochs, args.insecure_seed)
    report = DemoReport(args.output, data, seeded=args.insecure_seed is not None)
    runs: list[tuple[str, float | None]] = [("non-private", None)]
    runs += [(method, epsilon) for epsilon in sorted(set(args.epsilons)) for method in METHODS]
    with tqdm(runs, unit=" models", disable=None, leave=False) as bar:
        for number, (method, epsilon) in enumerate(bar, 1):
            title = f"[{number}/{len(runs)}] {title_of(method, epsilon)}"
            bar.set_description(title)
            run = report.add(method, epsilon, training)
            words = f"test accuracy {100 * run.test_accuracy:.1f} % ({run.seconds:.0f} s)"
            bar.write(f"{title}: {words}", file=sys.stdout)
    plot = _plot(report)
    print("", report.table(), "", report.summary(), plot, sep="\n")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add(
        "--data",
        default="digits",
        metavar="NAME",
        help="digits (of scikit-learn; default), adult, mnist, fashion_mnist or a TFDS name",
    )
    add(
        "--data-dir",
        type=pathlib.Path,
        default=os.environ.get("LABELDP_DATA_DIR") or None,
        metavar="DIR",
        help="folder of the data set (default: the environment variable LABELDP_DATA_DIR)",
    )
    add(
        "--epsilons",
        type=_epsilon,
        nargs="+",
        default=[1.0, 2.0, 4.0],
        metavar="EPSILON",
        help="privacy parameters (default: 1 2 4)",
    )
    add(
        "--epochs",
        type=int,
        metavar="N",
        help="epochs per stage; LP-2ST has two stages (default: 15 for digits, 3 for others)",
    )
    add(
        "--insecure-seed",
        type=int,
        metavar="N",
        help="repeatable random numbers; the statements are then 'NOT PRIVATE: seeded'",
    )
    add(
        "--output",
        type=pathlib.Path,
        default=pathlib.Path("demo-output"),
        metavar="DIR",
        help="folder for the results (default: demo-output)",
    )
    return parser


def _epsilon(text: str) -> float:
    with contextlib.suppress(ValueError):
        if 0.0 < float(text) < math.inf:
            return float(text)
    raise argparse.ArgumentTypeError(f"epsilon must be finite and above zero, got {text!r}")


def title_of(method: str, epsilon: float | None) -> str:
    return f"{method} (NOT PRIVATE)" if epsilon is None else f"{method}, epsilon {epsilon:g}"


def _network(data: ClassificationData) -> Any:
    """Returns a perceptron, or for images the CNN of ``ghazi2024``, Table 10(a)."""
    import keras

    shape = data.x_train.shape[1:]
    layers: list[Any] = [keras.Input(shape)]
    for _ in range(2 if len(shape) == 3 else 0):
        layers.append(keras.layers.Conv2D(16, 3, activation="relu"))
        layers.append(keras.layers.AveragePooling2D(2))
    layers += [keras.layers.Flatten(), keras.layers.Dense(16 if layers[1:] else 64, "relu")]
    return keras.Sequential([*layers, keras.layers.Dense(data.num_classes)])


class _Training:
    """Trains models with the same settings for every method and epsilon."""

    def __init__(self, data: ClassificationData, epochs: int | None, seed: int | None) -> None:
        self.data, self.seed = data, seed
        small = data.name == "digits"
        self.epochs = epochs or (15 if small else 3)  # per stage
        self.batch_size, self.learning_rate = (64, 3e-3) if small else (256, 2e-3)
        self.mixup_alpha = 8.0 if small else 0.0

    def run(
        self, method: str, epsilon: float | None
    ) -> tuple[Any, PrivacyGuarantee, NoisyLabels | None]:
        import keras

        data, num_classes = self.data, self.data.num_classes
        if self.seed is not None:
            keras.utils.set_random_seed(self.seed)
        model = _network(data)
        model.compile(
            keras.optimizers.Adam(self.learning_rate),
            loss=keras.losses.CategoricalCrossentropy(from_logits=True),
        )
        if epsilon is None:
            # No other model is trained on true labels; this one is marked NOT PRIVATE.
            targets = np.eye(num_classes, dtype=np.float32)[data.y_train]
            model.fit(data.x_train, targets, self.batch_size, self.epochs, verbose=0)
            return model, PrivacyGuarantee(epsilon=math.inf), None
        delta = 0.0 if method.startswith("LP") else PrivacyBudget.default_delta(len(data.y_train))
        budget = PrivacyBudget(epsilon, delta)
        labels = PrivateLabels(data.y_train, num_classes, budget=budget, insecure_seed=self.seed)
        noisy_labels = None
        guarantee: PrivacyGuarantee
        if method == "DP-SGD":
            # Its callbacks print, so they are left out.
            private, batches, _ = ldp.make_private(
                model,
                epsilon=epsilon,
                x=data.x_train,
                labels=labels,
                epochs=self.epochs,
                batch_size=min(1024, max(2, len(labels) // _BATCHES)),
                insecure_seed=self.seed,
            )
            private.fit(batches, epochs=self.epochs, verbose=0)
            guarantee = private.guarantee()
        elif method == "PrivateClassifier":
            door = ldp.PrivateClassifier(epsilon).fit(data.x_train, labels)
            model, guarantee = door.to_keras(), door.guarantee()
        else:
            stages = ldp.MultiStageTraining(
                data.x_train,
                labels,
                epsilon=epsilon,
                fractions=_FRACTIONS if method == "LP-2ST" else (1.0,),
                epochs_per_stage=self.epochs,
                batch_size=self.batch_size,
                temperature=0.5,
                mixup_alpha=self.mixup_alpha,
                seed=self.seed or 0,
                verbose=0,
            )
            model.fit(
                stages.dataset(), epochs=stages.epochs, callbacks=[stages], shuffle=False, verbose=0
            )
            noisy_labels, guarantee = stages.noisy_labels(), stages.guarantee()
        return model, guarantee.with_assumptions((_ALONE, _SETTINGS)), noisy_labels


def prepare(folder: pathlib.Path) -> None:
    """Creates the folder, or removes the files of an earlier demo from it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()) and not (folder / _MARKER).exists():
            sys.exit(f"--output {folder} has files that no demo wrote; give a new or empty folder")
        for path in (path for pattern in _OWN_FILES for path in folder.glob(pattern)):
            path.unlink()
        for path in folder.glob("noisy_labels_lp-*st_epsilon-*"):
            with contextlib.suppress(OSError):  # It still has files of others.
                path.rmdir()
        (folder / _MARKER).write_text("Files of `examples/demo.py`, which replaces them.\n")
    except OSError as error:
        sys.exit(f"cannot write to --output {folder} ({error.strerror}); give another folder")


class DemoReport:
    """Writes each result as it comes, so that a demo that is stopped leaves consistent files."""

    def __init__(self, folder: pathlib.Path, data: ClassificationData, *, seeded: bool) -> None:
        self.folder, self.data, self._seeded = folder, data, seeded
        self.runs: list[DemoRun] = []
        # Test accuracy of the constant answer: the most frequent class of the public test labels.
        self.baseline = float(np.bincount(data.y_test).max() / data.y_test.size)
        self.remarks = [_PUBLIC_TEST]
        if data.name in ("digits", "mnist"):
            self.remarks.append(_CHOSEN.format(data.name))

    def add(self, method: str, epsilon: float | None, training: _Training) -> DemoRun:
        """Trains a model, and writes it with the statements and results so far."""
        start = time.monotonic()
        model, guarantee, noisy_labels = training.run(method, epsilon)
        logits = np.asarray(model.predict(self.data.x_test, batch_size=1024, verbose=0))
        seconds = round(time.monotonic() - start, 2)
        accuracy = float(np.mean(logits.argmax(axis=1) == self.data.y_test))
        name = f"{method.lower()}_epsilon-{epsilon!r}".removesuffix(".0")
        file = f"model_{'NOT-PRIVATE' if epsilon is None else name}.keras"
        model.save(self.folder / file)
        folder = None if noisy_labels is None else f"noisy_labels_{name}"
        if noisy_labels is not None:
            noisy_labels.save(self.folder / f"{folder}")
        run = DemoRun(method, epsilon, file, guarantee, folder, logits, accuracy, seconds)
        self.runs.append(run)
        self._write()
        return run

    def _write(self) -> None:
        together = self.together()
        texts = [
            f"{run.file}: {title_of(run.method, run.epsilon)}\n{run.note or run.guarantee}"
            for run in self.runs
        ]
        privacy = {
            "models": [
                {
                    "model": run.file,
                    "noisy_labels": run.noisy_labels,
                    "method": run.method,
                    "note": run.note,
                    "guarantee": json.loads(run.guarantee.to_json()),
                }
                for run in self.runs
            ],
            "all_private_models_together": json.loads(together.to_json()),
            "remarks": self.remarks,
        }
        figures = {
            "data": self.data.name,
            "num_train": len(self.data.y_train),
            "num_test": len(self.data.y_test),
            "num_classes": self.data.num_classes,
            "most_frequent_class_accuracy": self.baseline,
            "seeded": self._seeded,
            "runs": [
                {
                    "method": run.method,
                    "epsilon": run.epsilon,
                    "private": run.guarantee.is_private,
                    "test_accuracy": run.test_accuracy,
                    "seconds": run.seconds,
                    "model": run.file,
                }
                for run in self.runs
            ],
        }
        for name, text in (
            ("privacy.txt", "\n\n".join([*texts, f"{_TOGETHER}:\n{together}", *self.remarks])),
            ("privacy.json", json.dumps(privacy, indent=2)),
            ("results.json", json.dumps(figures, indent=2)),
        ):
            (self.folder / name).write_text(f"{text}\n", encoding="utf-8")

    @property
    def epsilons(self) -> list[float]:
        """The epsilons with results, in increasing order."""
        return list(dict.fromkeys(run.epsilon for run in self.runs if run.epsilon is not None))

    def accuracies(self, method: str) -> list[float]:
        """Returns a method's test accuracies in percent, in the order of ``epsilons``."""
        return [100 * run.test_accuracy for run in self.runs if run.method == method]

    def together(self) -> PrivacyGuarantee:
        private = [run.guarantee for run in self.runs if run.epsilon is not None]
        assumptions = dict.fromkeys(note for stated in private for note in stated.assumptions)
        return PrivacyGuarantee(
            epsilon=math.fsum(stated.epsilon for stated in private),
            delta=math.fsum(stated.delta for stated in private),
            assumptions=tuple(note for note in assumptions if note != _ALONE),
            seeded=self._seeded,
        )

    def table(self) -> str:
        heads = [f"eps {epsilon:g}" for epsilon in self.epsilons]
        width = max(8, *(len(head) + 2 for head in heads))
        rows = {
            "non-private (NOT PRIVATE)": self.accuracies("non-private") * len(heads),
            **{f"{name} ({words})": self.accuracies(name) for name, words in METHODS.items()},
            "most frequent class": [100 * self.baseline],
        }
        lines = ["Test accuracy in %".ljust(29) + "".join(head.rjust(width) for head in heads)]
        for name, cells in rows.items():
            lines.append(name.ljust(29) + "".join(f"{cell:.1f}".rjust(width) for cell in cells))
        return "\n".join(lines)

    def summary(self) -> str:
        share, last = self.runs[0].test_accuracy, self.runs[-1]
        spread = 196 * math.sqrt(share * (1 - share) / self.data.y_test.size)
        notes = (
            f"One run of each, so small differences mean nothing: the {self.data.y_test.size:,} "
            f"test examples alone leave +-{spread:.1f} points or more, the random labels add to "
            f"it. {' '.join(self.remarks)}"
        )
        together = str(self.together()).splitlines()[0]
        return "\n".join(
            [
                textwrap.fill(notes, 100),
                f"\nPrivacy of {title_of(last.method, last.epsilon)}:\n{last.guarantee}\n",
                textwrap.fill(f"{_TOGETHER} {together}", 100),
                f"\nIn {self.folder}: every statement (privacy.txt, privacy.json), results.json,",
                "noisy_labels_*/, model_*.keras (model_NOT-PRIVATE.keras saw the true labels).",
            ]
        )


def _plot(report: DemoReport) -> str:
    try:
        # Without pyplot it draws with Agg, and needs no display.
        from matplotlib.figure import Figure
    except ImportError:
        return "No plot: it needs matplotlib, pip install 'tf-labeldp[plots]'."
    figure = Figure(figsize=(12.5, 5.2), layout="constrained", dpi=120)
    left, right = figure.subplots(1, 2, width_ratios=(1.1, 1.0))
    _draw_accuracy(left, report)
    _draw_channel(figure, right, report)
    path = report.folder / _PLOT_FILE
    figure.savefig(path)
    return f"Plot: {path}"


def _draw_accuracy(axes: Any, report: DemoReport) -> None:
    epsilons = report.epsilons
    [best] = report.accuracies("non-private")
    axes.axhline(best, color="black", linestyle="--", label="non-private (NOT PRIVATE)")
    for (method, words), marker in zip(METHODS.items(), "so^D", strict=True):
        label = f"{method}: {words}"
        axes.plot(epsilons, report.accuracies(method), marker=marker, label=label)
    chance = "most frequent class (chance)"
    axes.axhline(100 * report.baseline, color="gray", linestyle=":", label=chance)
    axes.set_xscale("log", base=2)
    axes.set_xticks(epsilons, [f"{epsilon:g}" for epsilon in epsilons])
    axes.set_xlabel("epsilon of label-DP (smaller is more private)")
    axes.set_ylabel("test accuracy (%)")
    axes.margins(y=0.1)
    axes.set_title(f"{report.data.name}: what label privacy costs (one run each)")
    axes.grid(alpha=0.3)
    axes.legend(loc="best")


def _draw_channel(figure: Any, axes: Any, report: DemoReport) -> None:
    """Draws the channel of RRWithPrior under a trained model's prior for one example."""
    names = report.data.class_names
    epsilon = report.epsilons[(len(report.epsilons) - 1) // 2]
    mechanism = RRWithPrior(epsilon, len(names))
    [run] = (run for run in report.runs if (run.method, run.epsilon) == ("LP-2ST", epsilon))
    priors = prior_from_logits(run.logits[:1000])
    sizes = mechanism.optimal_k(priors)
    # An example on which the model hesitates between a few classes shows the mechanism best.
    example = int(np.argmin(np.abs(sizes - min(3, len(names)))))
    k = int(sizes[example])
    matrix = mechanism.transition_matrix(priors[example])
    image = axes.imshow(matrix, vmin=0.0, vmax=1.0, cmap="Blues")
    figure.colorbar(image, ax=axes, label="probability of the noisy label", shrink=0.85)
    few = len(names) <= _MOST_NAMED_CLASSES
    ticks, shown = (range(len(names)), list(names)) if few else ([], [])
    crowded = len("".join(names)) > _MOST_LETTERS_IN_A_ROW
    axes.set_xticks(ticks, shown, rotation=40 if crowded else 0)
    axes.set_yticks(ticks, shown)
    for (row, column), value in np.ndenumerate(matrix):
        if few and value > 0.0:
            color, center = "white" if value > 0.5 else "black", {"ha": "center", "va": "center"}
            axes.text(column, row, f"{value:.2f}", color=color, fontsize=8, **center)
    axes.set_xlabel(
        "noisy label, which training sees\n\nA row has the probability of each noisy label for one "
        "true label. LP-2ST draws\namong the classes that its first stage finds likely; rows "
        "differ by a factor of e^epsilon at most."
    )
    axes.set_ylabel("true label, which stays private")
    classes = "class" if k == 1 else "classes"
    axes.set_title(
        f"RRWithPrior at epsilon {epsilon:g}, under the model's prior\nfor one example: "
        f"it draws among the {k} likeliest {classes}"
    )


if __name__ == "__main__":
    main()
