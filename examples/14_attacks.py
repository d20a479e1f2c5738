"""Four attacks on labels: what fails without a vault, and what audits and statements say of it.

    python examples/14_attacks.py

The labels are made up. Each step attacks noisy labels or a model as someone could who knows all
features: it guesses labels, or bounds epsilon from below by an audit.
"""

import argparse

parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
)
parser.parse_args()

import numpy as np

import tf_labeldp as ldp

# 1. Private labels of 20,000 people, ten classes. Randomized response at epsilon 1 keeps a label
#    with probability 0.23. So often an attacker guesses right who knows nothing else.
rng = np.random.default_rng()
true = rng.integers(10, size=20_000)
mechanism = ldp.RandomizedResponse(1.0, num_classes=10)
noisy = mechanism.randomize(true, rng=rng)
print(f"one draw: {np.mean(noisy == true):.1%} of the labels guessed")

# 2. Redrawn noise. A map of `tf.data` that draws noise draws again in every epoch. The label that
#    is seen most often in 50 epochs is usually the true one. An audit refutes epsilon 1.
draws = np.stack([mechanism.randomize(true, rng=rng) for _ in range(50)], axis=1)
counts = (draws[:, :, np.newaxis] == np.arange(10)).sum(axis=1)
print(f"50 draws: {np.mean(counts.argmax(axis=1) == true):.1%} guessed")


def redrawn(labels: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Returns three draws of each label."""
    return np.stack([mechanism.randomize(labels, rng=rng) for _ in range(3)], axis=1)


print(ldp.audit.audit_mechanism(redrawn, labels=range(10), claimed=1.0))

# The vault draws once. A second use of the same draw costs nothing, and another draw is charged.
labels = ldp.PrivateLabels(true, 10, budget=ldp.PrivacyBudget(epsilon=1.0))
first = labels.randomize(mechanism)
try:
    labels.randomize(mechanism, key="again")
except ldp.BudgetExceededError as error:
    print(f"the second draw is refused: {str(error).splitlines()[0]}")

# 3. A known seed. With it the noise can be repeated: the label is the one that gives the noisy
#    label. The statement of seeded noise therefore promises nothing.
seeded = mechanism.randomize(true, rng=np.random.default_rng(42))
repeated = np.stack(
    [
        mechanism.randomize(np.full(true.size, label), rng=np.random.default_rng(42))
        for label in range(10)
    ],
    axis=1,
)
possible = repeated == seeded[:, np.newaxis]
is_sure = possible.sum(axis=1) == 1
guessed = possible.argmax(axis=1)[is_sure]
print(f"a known seed: {is_sure.mean():.1%} are certain")
print(f"and of these {np.mean(guessed == true[is_sure]):.1%} are right")

# 4. The wrong neighbours. One changed label moves a sum of clipped gradients by up to 2, one added
#    example by 1. Noise that was calibrated for added examples does not hide a changed label.
noise = 5.0
added = ldp.accounting.dp_sgd_guarantee(noise, 1.0, 1, 1e-5, relation="add_or_remove")
replaced = ldp.accounting.dp_sgd_guarantee(noise, 1.0, 1, 1e-5)
print(f"epsilon: {added.epsilon:.2f} for an added example, {replaced.epsilon:.2f} for a label")


def noisy_sum(labels: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Returns a gradient of norm one, whose sign is the label's, plus noise."""
    return 2.0 * labels - 1.0 + rng.normal(scale=noise, size=len(labels))


for stated in (added, replaced):
    print(
        ldp.audit.audit_mechanism(
            noisy_sum, labels=(0, 1), claimed=stated.epsilon, delta=1e-5, family="gaussian"
        )
    )

# 5. A feature that holds the label. The model keeps its promise, and adds nothing to what the
#    features say; but they were declared public, and this one is the label in other words. The
#    statement lists the assumption. `tf-labeldp train` warns of such columns.
ill = rng.integers(2, size=20_000)
days_in_hospital = np.where(ill, rng.integers(1, 9, size=ill.size), 0)
features = np.stack([days_in_hospital, rng.normal(size=ill.size)], axis=1)
vault = ldp.PrivateLabels(ill, 2, budget=ldp.PrivacyBudget(0.5, 1e-6))
head = ldp.PrivateLogisticRegression(0.5, 1e-6).fit(features, vault)
by_feature = np.where(days_in_hospital[:, np.newaxis] > 0, [0.01, 0.99], [0.99, 0.01])
print(ldp.audit.label_inference(head.predict_proba(features), ill, by_feature))
print(head.guarantee())
