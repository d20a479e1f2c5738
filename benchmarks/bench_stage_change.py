"""Time of a stage change of LP-MST at n = 60,000, as a ratio to one epoch of training.

A stage change predicts priors for the new part, draws its labels, and filters the earlier labels.
The images are random, since the time does not depend on them.

    python benchmarks/bench_stage_change.py
"""

from __future__ import annotations

import time

import _models
import _results
import keras
import numpy as np

import tf_labeldp as ldp

NUM_EXAMPLES = 60_000


def main() -> None:
    """Runs two stages of two epochs and prints the table."""
    rng = np.random.default_rng(0)
    x = rng.random((NUM_EXAMPLES, 28, 28, 1), dtype=np.float32)
    y = rng.integers(10, size=NUM_EXAMPLES)
    labels = ldp.PrivateLabels(y, 10, budget=ldp.PrivacyBudget(epsilon=2.0))
    stages = ldp.MultiStageTraining(
        x,
        labels,
        epsilon=2.0,
        fractions=(0.6, 0.4),
        epochs_per_stage=2,
        temperature=1.0,
        filter_labels=True,
        verbose=0,
    )
    epochs: list[float] = []
    changes: list[float] = []
    begin = stages._begin

    def timed_begin(stage: int) -> None:
        start = time.perf_counter()
        begin(stage)
        changes.append(time.perf_counter() - start)

    class Clock(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch: int, logs: dict | None = None) -> None:
            self.start = time.perf_counter()

        def on_epoch_end(self, epoch: int, logs: dict | None = None) -> None:
            epochs.append(time.perf_counter() - self.start)

    stages._begin = timed_begin  # type: ignore[method-assign]
    model = _models.small_cnn((28, 28, 1), 10)
    model.compile("adam", keras.losses.CategoricalCrossentropy(from_logits=True))
    callbacks = [stages, Clock()]
    model.fit(stages.dataset(), epochs=stages.epochs, callbacks=callbacks, verbose=0, shuffle=False)
    per_example = epochs[1] / (0.6 * NUM_EXAMPLES)  # the first epoch also compiles
    report = stages.reports[1]
    print("| what | seconds | epochs of 60,000 examples |")
    print("|---|---|---|")
    print(f"| one epoch of 60,000 | {per_example * NUM_EXAMPLES:.2f} | 1.00 |")
    ratio = changes[1] / (per_example * NUM_EXAMPLES)
    print(f"| stage change | {changes[1]:.2f} | {ratio:.2f} |")
    print(
        f"\n{report.num_new} priors and draws, {report.num_reused + report.num_dropped} earlier "
        "labels filtered."
    )


if __name__ == "__main__":
    with _results.recorded(__file__, "times"):
        main()
