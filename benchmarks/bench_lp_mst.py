"""Accuracy of non-private training, LP-1ST and LP-2ST on real images (``ghazi2021``, section 5).

The CNN is that of ``ghazi2024``, Table 10(a); 10 epochs per stage, Adam. Stage fractions, prior
temperatures and mixup parameters are those of the authors' CIFAR-10 profile. Every finished run is
a line in a JSON file, so a stopped benchmark resumes.

    python benchmarks/bench_lp_mst.py --data fashion_mnist mnist --variants profile no-mixup
"""

from __future__ import annotations

import argparse
import dataclasses
import pathlib
import time

import _datasets
import _models
import _results
import keras
import numpy as np
import tensorflow as tf

import tf_labeldp as ldp
from tf_labeldp.keras_layers import Mixup

EPSILONS = (1.0, 2.0, 3.0, 8.0)
# epsilon: (fraction of stage 1, prior temperature, mixup alpha of stage 1, of stage 2)
PROFILE = {
    1.0: (0.8, 0.6, 16, 8),
    2.0: (0.7, 0.5, 8, 8),
    3.0: (0.6, 0.5, 8, 4),
    8.0: (0.6, 0.5, 4, 4),
}


@dataclasses.dataclass(frozen=True)
class Variant:
    """The settings that a row of the table changes.

    Attributes:
        share: the fraction of stage 1; None for the profile's.
        temperature: the temperature of the priors; None for the profile's.
        mixup: whether to mix, with the profile's parameters.
        longer: a factor for the number of epochs per stage.
        methods: the methods that the variant changes.
        options: further arguments of ``MultiStageTraining``.
    """

    share: float | None = None
    temperature: float | None = None
    mixup: bool = False
    longer: int = 1
    methods: tuple[str, ...] = ("LP-2ST",)
    options: dict[str, bool] = dataclasses.field(default_factory=dict)


VARIANTS = {
    "profile": Variant(mixup=True, methods=("non-private", "LP-1ST", "LP-2ST")),
    "no-mixup": Variant(methods=("non-private", "LP-1ST", "LP-2ST")),
    "20 epochs": Variant(longer=2, methods=("LP-1ST",)),
    "40/60": Variant(share=0.4),
    "T=1": Variant(temperature=1.0),
    "T=2": Variant(temperature=2.0),
    "no-filter": Variant(options={"filter_labels": False}),
    "no-reuse": Variant(options={"reuse_labels": False}),
    "cold-start": Variant(options={"warm_start": False}),
}


def accuracy(model: keras.Model, data: _datasets.ClassificationData) -> float:
    """Returns the test accuracy in percent."""
    scores = model.predict(data.x_test, batch_size=1000, verbose=0)
    return 100.0 * float(np.mean(scores.argmax(axis=1) == data.y_test))


def new_model(data: _datasets.ClassificationData, learning_rate: float) -> keras.Model:
    """Returns the compiled CNN."""
    model = _models.small_cnn(data.x_train.shape[1:], data.num_classes)
    loss = keras.losses.CategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(learning_rate), loss=loss)
    return model


def run(data: _datasets.ClassificationData, job: dict, args: argparse.Namespace) -> dict:
    """Trains once and returns the job with its result."""
    keras.utils.set_random_seed(job["seed"])
    model = new_model(data, args.learning_rate)
    start = time.perf_counter()
    epsilon = job["epsilon"]
    variant = VARIANTS[job["variant"]]
    epochs = args.epochs * variant.longer
    if epsilon is None:
        targets = np.eye(data.num_classes, dtype=np.float32)[data.y_train]
        dataset = tf.data.Dataset.from_tensor_slices((data.x_train, targets))
        dataset = dataset.shuffle(len(targets), seed=job["seed"]).batch(256)
        # The mixup of LP-1ST at the largest epsilon.
        if variant.mixup:
            layer = Mixup(PROFILE[max(EPSILONS)][2], seed=job["seed"])
            dataset = dataset.map(lambda x, y: layer((x, y), training=True))
        model.fit(dataset.prefetch(2), epochs=epochs, verbose=0, shuffle=False)
        reports = []
    else:
        share, temperature, *alphas = PROFILE[epsilon]
        share = share if variant.share is None else variant.share
        two_stages = job["method"] == "LP-2ST"
        # Seeded, so that the table is reproducible; such draws protect nobody.
        labels = ldp.PrivateLabels(
            data.y_train,
            data.num_classes,
            budget=ldp.PrivacyBudget(epsilon),
            insecure_seed=job["seed"],
        )
        stages = ldp.MultiStageTraining(
            data.x_train,
            labels,
            epsilon=epsilon,
            fractions=(share, 1.0 - share) if two_stages else (1.0,),
            epochs_per_stage=epochs,
            temperature=temperature if variant.temperature is None else variant.temperature,
            mixup_alpha=(alphas if two_stages else alphas[0]) if variant.mixup else 0.0,
            seed=job["seed"],
            verbose=0,
            **{"filter_labels": True, **variant.options},
        )
        model.fit(
            stages.dataset(), epochs=stages.epochs, callbacks=[stages], verbose=0, shuffle=False
        )
        reports = [vars(report) for report in stages.reports]
    seconds = time.perf_counter() - start
    return {**job, "accuracy": accuracy(model, data), "seconds": seconds, "reports": reports}


def table(results: list[dict], data_names: list[str]) -> str:
    """Returns the results as a Markdown table: mean, standard deviation, number of seeds."""
    rows = ["| data | variant | method | " + " | ".join(f"eps {e:g}" for e in EPSILONS) + " |"]
    rows.append("|---" * (3 + len(EPSILONS)) + "|")
    for name in data_names:
        for variant in VARIANTS:
            for method in ("non-private", "LP-1ST", "LP-2ST"):
                cells = []
                for epsilon in EPSILONS:
                    found = [
                        r["accuracy"]
                        for r in results
                        if (r["data"], r["variant"], r["method"]) == (name, variant, method)
                        and (r["epsilon"] or max(EPSILONS)) == epsilon  # non-private: one cell
                    ]
                    spread = f"{np.mean(found):.2f} ± {np.std(found):.2f}" if found else ""
                    cells.append(f"{spread} ({len(found)})" if found else "")
                if any(cells):
                    rows.append(f"| {name} | {variant} | {method} | {' | '.join(cells)} |")
    return "\n".join(rows)


def main() -> None:
    """Runs what is missing, prints and records the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", nargs="+", default=["fashion_mnist", "mnist"])
    parser.add_argument(
        "--variants", nargs="+", default=["profile", "no-mixup"], choices=list(VARIANTS)
    )
    parser.add_argument("--epsilons", nargs="+", type=float, default=list(EPSILONS))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=10, help="epochs per stage")
    parser.add_argument("--learning-rate", type=float, default=3e-3)
    parser.add_argument("--results", type=pathlib.Path, default=pathlib.Path("bench_lp_mst.jsonl"))
    args = parser.parse_args()

    for name in args.data:
        jobs = [
            {"data": name, "variant": v, "method": method, "epsilon": epsilon, "seed": seed}
            for seed in range(args.seeds)
            for v in args.variants
            for method in VARIANTS[v].methods
            for epsilon in ([None] if method == "non-private" else args.epsilons)
        ]
        data = _datasets.load(name)
        for job in _results.missing(args.results, jobs):
            _results.add_run(args.results, run(data, job, args))
    with _results.recorded(__file__, "accuracy"):
        print(table(_results.runs(args.results), args.data))


if __name__ == "__main__":
    main()
