"""Users with several clicks: a head, DP-SGD and noisy labels, at epsilon for all labels of a user.

    python benchmarks/bench_users.py [--seeds 1] [--users 40000]

The shape of Table 7 of `ghazi2024`: AUC by epsilon and by the most clicks of a user, k. Its data
are replaced by the synthetic log of `examples/click_logs.py`, whose users buy by a known law and a
taste of their own. All methods fit a linear model on the same public columns, and the same k clicks
of a user, chosen without labels. "The law" is the AUC of the true probabilities. "Group privacy" is
the same head, at the budget of one label of k. A run that was stopped resumes.
"""

from __future__ import annotations

import argparse
import functools
import pathlib
import sys
import time
from typing import Any

import _results
import numpy as np
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import roc_auc_score

import tf_labeldp as ldp
from tf_labeldp.accounting import item_budget_for_group
from tf_labeldp.mechanisms import LabelMomentMechanism
from tf_labeldp.vault import Users

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "examples"))
import click_logs

EPSILONS, MOST, DELTA = (0.1, 0.2, 0.5, 1.0, 2.0, 5.0), (2, 10), 1e-6
METHODS = ("head", "head, group privacy", "DP-SGD", "randomized response")
STEPS, EXPECTED_USERS, RATE = 200, 800, 0.1
RUNS = _results.FOLDER / "users.jsonl"


def columns(table: dict[str, np.ndarray]) -> np.ndarray:
    """Returns public numbers (n, 61), of which most are zeros and ones."""
    device = click_logs.DEVICES[:, np.newaxis] == table["device"]
    angle = 2.0 * np.pi * (table["hour"] - 14) / 24.0
    price = np.log(table["price"] / 40.0)
    parts = [
        click_logs.CAMPAIGNS[:, np.newaxis] == table["campaign"],
        click_logs.SITES[:, np.newaxis] == table["site"],
        device,
        device[:2] * np.sin(angle),
        device[:2] * price,
        [np.sin(angle), price, np.nan_to_num(np.exp(-table["days_since_visit"] / 7.0))],
        [0.1 * np.minimum(table["clicks_of_user"], 11)],
    ]
    return np.concatenate(parts).T.astype(np.float32)


@functools.cache
def data(users: int, seed: int) -> tuple[Any, ...]:
    """Returns training features, labels and users; test features and labels; and the law's AUC."""
    table = click_logs.clicks(int(2.5 * 1.25 * users), seed)
    test = table["user"] >= users
    x, y = columns(table), table["converted"].astype(int)
    law = roc_auc_score(y[test], click_logs.probability(table)[test])
    return x[~test], y[~test], table["user"][~test], x[test], y[test], law


def scores(method: str, epsilon: float, k: int, users: int, seed: int) -> np.ndarray:
    """Returns the scores of the test clicks."""
    x, y, owners, x_test, _, _ = data(users, seed)
    budget = ldp.PrivacyBudget(epsilon, DELTA)
    patients = Users(owners, at_most=k)
    labels = ldp.PrivateLabels(y, 2, budget=budget, users=patients, insecure_seed=seed)
    rows = labels.indices
    if method == "head":
        return (
            ldp.PrivateLogisticRegression(epsilon, DELTA)
            .fit(x[rows], labels)
            .decision_function(x_test)
        )
    item = item_budget_for_group(budget, k)
    if method == "head, group privacy":
        plain = ldp.PrivateLabels(y[rows], 2, budget=item, insecure_seed=seed)
        head = ldp.PrivateLogisticRegression(item.epsilon, item.delta)
        return head.fit(x[rows], plain).decision_function(x_test)
    if method == "randomized response":
        noisy = labels.randomize(ldp.RandomizedResponse(epsilon / k, 2))
        return LogisticRegression(max_iter=300).fit(x[rows], noisy.values).decision_function(x_test)
    import keras

    keras.utils.set_random_seed(seed)
    inputs = keras.Input((x.shape[1],))
    outputs = keras.layers.Dense(1, kernel_initializer="zeros")(inputs)
    model = ldp.training.LabelDPModel(inputs, outputs)
    share = EXPECTED_USERS / users
    noise = ldp.accounting.calibrate_noise_multiplier(
        epsilon, DELTA, sampling_probability=share, steps=STEPS
    )
    decay = keras.optimizers.schedules.CosineDecay(RATE, STEPS)
    optimizer = ldp.training.LabelDPOptimizer(keras.optimizers.Adam(decay), 0.5, noise)
    model.compile(optimizer, keras.losses.BinaryCrossentropy(from_logits=True))
    batches = ldp.data.poisson_batches(x[rows], labels, sampling_probability=share, steps=STEPS)
    model.fit(batches, verbose=0)
    return model.predict(x_test, batch_size=4096, verbose=0)[:, 0]


def noise_table(users: int) -> None:
    """Prints the noise for a user, relative to that for one label, by features and k."""
    rng = np.random.default_rng(0)
    print("| features | k | heads | group privacy |\n|---|---|---|---|")
    for name in ("clicks", "64 random numbers", "equal rows of a user"):
        for k in (2, 10, 100):
            owners = np.repeat(np.arange(200), k)
            x = rng.normal(size=(200 * k, 64))
            if name == "equal rows of a user":
                x = np.repeat(x[:200], k, axis=0)
            if name == "clicks":
                x = data(users, 0)[0][: 200 * k]
            x = x - x.mean(axis=0)
            x /= np.linalg.norm(x, axis=1, keepdims=True)
            mechanism = LabelMomentMechanism(1.0, DELTA, num_classes=2)
            norms = mechanism.user_norms(owners, [np.asarray(x, np.float64)], x.shape[1])
            print(f"| {name} | {k} | {np.median(norms):.2f} | {k} |")


def main() -> None:
    """Prints and records AUC in % by method, k and epsilon."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--users", type=int, default=40_000)
    options = parser.parse_args()
    jobs = [
        {"method": method, "epsilon": epsilon, "k": k, "users": options.users, "seed": seed}
        for seed in range(options.seeds)
        for method in METHODS
        for k in MOST
        for epsilon in EPSILONS
    ]
    for job in _results.missing(RUNS, jobs):
        start = time.perf_counter()
        auc = 100.0 * roc_auc_score(data(job["users"], job["seed"])[4], scores(**job))
        took = round(time.perf_counter() - start, 1)
        _results.add_run(RUNS, {**job, "auc": round(auc, 2), "seconds": took})
    found = _results.runs(RUNS)
    law = 100.0 * data(options.users, 0)[5]
    with _results.recorded(__file__, "auc", "noise"):
        print(f"| k | method | {' | '.join(f'{epsilon:g}' for epsilon in EPSILONS)} |")
        print("|---" * (2 + len(EPSILONS)) + "|")
        for k in MOST:
            for method in METHODS:
                cells = []
                for epsilon in EPSILONS:
                    key = {"method": method, "epsilon": epsilon, "k": k, "users": options.users}
                    cells.append(
                        _results.cell([r["auc"] for r in found if key.items() <= r.items()])
                    )
                print(f"| {k} | {method} | {' | '.join(cells)} |")
        print(f"| | the law | {' | '.join([f'{law:.1f}'] * len(EPSILONS))} |\n")
        noise_table(options.users)


if __name__ == "__main__":
    main()
