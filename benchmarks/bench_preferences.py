"""Epsilon against the win rate of reward models from private preferences.

    python benchmarks/bench_preferences.py

Answers are Gaussian embeddings of 32 numbers with variances 1 / j. Their reward is linear, or a
random network of 64 units, with standard deviation 2; people prefer by the model of Bradley and
Terry. From 10,000 pairs a reward is learnt; it chooses the best of eight new answers, and the win
rate is how often people prefer that one to a random answer, in percent. The head is logistic
regression on differences from one release; networks learn from preferences of randomized response.
Runs go to results/preferences.jsonl, and a stopped benchmark resumes.
"""

from __future__ import annotations

import os
import warnings
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import _results
import keras
import numpy as np

import tf_labeldp as ldp
from tf_labeldp.keras_layers import ForwardCorrectedLoss, LabelWeightedLoss, PreferenceLogits

RUNS = _results.FOLDER / "preferences.jsonl"
PAIRS, WIDTH, NEW = 10_000, 32, 5000
EPSILONS, SEEDS = (0.1, 0.5, 1.0, 2.0, 4.0), (0, 1)
LAWS = ("linear", "network")
METHODS = ("head", "debiased", "forward", "uncorrected")


def rewards_of(law: str, answers: np.ndarray, seed: int) -> np.ndarray:
    """Returns rewards with mean zero and standard deviation 2, up to the sample."""
    rng = np.random.default_rng([seed, 1])
    if law == "linear":
        direction = rng.normal(size=WIDTH)
        return 2.0 * answers @ direction / np.linalg.norm(direction / np.sqrt(np.arange(1, 33)))
    hidden = np.tanh(1.5 * answers @ rng.normal(size=(WIDTH, 64)) + rng.normal(size=64))
    found = hidden @ rng.normal(size=64)
    return 2.0 * (found - found.mean()) / found.std()


def win_rate(rewards: np.ndarray, scores: np.ndarray) -> float:
    """Returns how often the best of eight by scores is preferred to a random one, in percent."""
    rewards = rewards.reshape(-1, 8)
    best = rewards[np.arange(len(rewards)), scores.reshape(-1, 8).argmax(axis=1)]
    return 100.0 * float((1.0 / (1.0 + np.exp(rewards - best[:, np.newaxis]))).mean())


def network_scores(
    method: str, pairs: np.ndarray, labels: Any, epsilon: float, new: np.ndarray, seed: int
) -> np.ndarray:
    """Returns the scores of a network that was trained on noisy, or true, preferences."""
    keras.utils.set_random_seed(seed)
    hidden = keras.layers.Dense(64, "relu")
    reward = keras.Sequential([keras.Input((WIDTH,)), hidden, keras.layers.Dense(1)])
    inputs = keras.Input((WIDTH,)), keras.Input((WIDTH,))
    model = keras.Model(inputs, PreferenceLogits(reward)(inputs))
    channel = ldp.RandomizedResponse(epsilon, 2)
    loss: Any = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    if method == "debiased":
        loss = LabelWeightedLoss(from_logits=True)
    elif method == "forward":
        loss = ForwardCorrectedLoss(channel.transition_matrix(), from_logits=True)
    model.compile(keras.optimizers.AdamW(2e-3, weight_decay=0.1), loss)
    noisy = labels.randomize(channel)
    targets = "debiased" if method == "debiased" else "values"
    ldp.fit(model, tuple(pairs), noisy, targets=targets, epochs=6, batch_size=200, verbose=0)
    return reward.predict(new, verbose=0, batch_size=4096)


def run(law: str, method: str, epsilon: float, seed: int) -> float:
    """Returns the win rate of a method; an epsilon of 50 stands for true preferences."""
    rng = np.random.default_rng(seed)
    scale = 1.0 / np.sqrt(np.arange(1.0, WIDTH + 1.0))
    answers = (rng.normal(size=(2 * PAIRS + 8 * NEW, WIDTH)) * scale).astype(np.float32)
    rewards = rewards_of(law, answers, seed)
    pairs, new = answers[: 2 * PAIRS].reshape(2, PAIRS, WIDTH), answers[2 * PAIRS :]
    odds = np.subtract(*rewards[: 2 * PAIRS].reshape(2, PAIRS))
    preferred = (rng.uniform(size=PAIRS) < 1.0 / (1.0 + np.exp(-odds))).astype(int)
    rewards = rewards[2 * PAIRS :]
    if method == "true reward":
        return win_rate(rewards, rewards)
    budget = ldp.PrivacyBudget(epsilon, 1e-6)
    labels = ldp.PrivateLabels(preferred, num_classes=2, budget=budget, insecure_seed=seed)
    if method == "head":
        head = ldp.PrivateLogisticRegression(epsilon, 1e-6, center=False, intercept=False)
        head.fit(pairs[0] - pairs[1], labels)
        return win_rate(rewards, new @ head.coef_[0])
    return win_rate(rewards, network_scores(method, pairs, labels, epsilon, new, seed))


def main() -> None:
    """Runs what is missing, and prints the table."""
    warnings.filterwarnings("ignore")
    settings = [(method, epsilon) for method in METHODS for epsilon in EPSILONS]
    settings += [("head", 50.0), ("uncorrected", 50.0), ("true reward", 50.0)]
    jobs = [
        {"law": law, "method": method, "epsilon": epsilon, "seed": seed}
        for law in LAWS
        for seed in SEEDS
        for method, epsilon in settings
    ]
    for job in _results.missing(RUNS, jobs):
        _results.add_run(RUNS, {**job, "win": round(run(**job), 2)})
    found = _results.runs(RUNS)
    lines = []
    for law in LAWS:
        for method in (*METHODS, "true reward"):
            cells = []
            for epsilon in (*EPSILONS, 50.0):
                job = {"law": law, "method": method, "epsilon": epsilon}
                wins = [each["win"] for each in found if job.items() <= each.items()]
                cells.append(_results.cell(wins))
            lines.append([law, method, *cells])
    columns = ["reward", "method", *(f"eps {epsilon:g}" for epsilon in EPSILONS), "not private"]
    with _results.recorded(__file__, "preferences"):
        print(_results.markdown(columns, lines))


if __name__ == "__main__":
    main()
