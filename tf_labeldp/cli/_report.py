"""The demo's output folder: models, noisy labels, statements, figures and the table of them."""

from __future__ import annotations

import contextlib
import json
import math
import pathlib
import tempfile
import textwrap
from typing import Any

import numpy as np

from tf_labeldp.accounting import PrivacyGuarantee
from tf_labeldp.cli._datasets import ClassificationData
from tf_labeldp.cli._errors import CommandError
from tf_labeldp.cli._result import ALONE, Result

PLOT_FILE = "accuracy_and_channel.png"
_OWN_FILES = (
    "model_NOT-PRIVATE.keras",
    "model_lp-*st_epsilon-*.keras",
    "noisy_labels_lp-*st_epsilon-*.npz",  # of version 0.1
    "noisy_labels_lp-*st_epsilon-*/noisy_labels.*",
    "noisy_labels_lp-*st_epsilon-*/.noisy_labels.*.tmp",  # of a demo that was killed
    "privacy.txt",
    "privacy.json",
    "results.json",
    PLOT_FILE,
)
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


class Report:
    """Writes each result as it comes, so that a demo that is stopped leaves consistent files.

    Args:
        folder: new, empty, or of an earlier demo, whose files are removed.
        data: the data set.
        seeded: whether the run is repeatable and so not private.

    Raises:
        CommandError: nothing can be written there, or it holds other files than a demo's.
    """

    def __init__(self, folder: pathlib.Path, data: ClassificationData, *, seeded: bool) -> None:
        self.folder = folder
        self.data = data
        self.results: list[Result] = []
        self._seeded = seeded
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
        self._write("privacy.txt", self._privacy_text())
        self._write("privacy.json", json.dumps(self._privacy(), indent=2) + "\n")
        self._write("results.json", json.dumps(self._figures(), indent=2) + "\n")

    @property
    def epsilons(self) -> list[float]:
        """The epsilons with results, rising."""
        return sorted({r.job.epsilon for r in self.results if r.job.epsilon is not None})

    @property
    def baseline(self) -> float:
        """Test accuracy of always answering the most frequent class of the public test labels."""
        return float(np.bincount(self.data.y_test).max() / self.data.y_test.size)

    @property
    def remarks(self) -> list[str]:
        """What the statements do not cover."""
        chosen = [_CHOSEN.format(self.data.name)] if self.data.name in _CHOSEN_ON else []
        return [_PUBLIC_TEST, *chosen]

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
        rows = ["Test accuracy in %".ljust(28) + "".join(head.rjust(wide) for head in heads)]
        plain = f"{100 * self.non_private:.1f}".rjust(wide) * len(heads)
        rows.append("non-private (NOT PRIVATE)".ljust(28) + plain)
        for method, words in (("LP-1ST", "randomized response"), ("LP-2ST", "two stages")):
            cells = "".join(f"{100 * a:.1f}".rjust(wide) for a in self.accuracies(method))
            rows.append(f"{method} ({words})".ljust(28) + cells)
        rows.append("most frequent class".ljust(28) + f"{100 * self.baseline:.1f}".rjust(wide))
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

    def _write(self, name: str, text: str) -> None:
        (self.folder / name).write_text(text, encoding="utf-8")
