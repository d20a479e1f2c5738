"""A reward model of texts from private preferences. Copy this file and change step 1.

    python examples/13_preferences.py [FOLDER]

Two answers are public; which one a person preferred is private. The folder (default:
preferences-output) gets `private` with the label store and `publish` with the reward model and its
statement. A second run with the same folder uses the stored draws and spends nothing.
"""

import argparse
import pathlib

parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
)
parser.add_argument("folder", nargs="?", type=pathlib.Path, default="preferences-output")
folder = parser.parse_args().folder

import numpy as np
from sklearn.decomposition import TruncatedSVD
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.pipeline import make_pipeline

import tf_labeldp as ldp

ldp.cli.load_tensorflow()  # without the lines of its log

import keras

private, publish = folder / "private", folder / "publish"
publish.mkdir(parents=True, exist_ok=True)

# 1. Your data: two public answers per person, and the private preference, 1 for the first. These
#    texts are made up; each phrase adds its number to the reward, and a person prefers the first
#    answer with the probability of Bradley and Terry.
PHRASES = {
    "Good question.": 0.3, "Thanks for asking.": 0.5, "Obviously.": -1.5, "As I said before.": -1.0,
    "Open the settings first.": 1.2, "Restart the router.": 0.8, "Call the provider.": 0.2,
    "Nothing can be done.": -1.8, "It depends.": -0.7, "Here are three steps.": 1.6,
    "Back up your files.": 1.0, "Let me know if it helps.": 0.6, "Never mind.": -1.1,
    "The manual has a page on it.": 0.1, "Everybody knows that.": -1.4, "Take your time.": 0.4,
}  # fmt: skip
rng = np.random.default_rng(0)


def answers(number: int) -> tuple[list[str], np.ndarray]:
    """Returns texts of four phrases, and their rewards."""
    chosen = [rng.choice(list(PHRASES), 4, replace=False) for _ in range(number)]
    rewards = np.array([sum(PHRASES[phrase] for phrase in phrases) for phrases in chosen])
    return [" ".join(phrases) for phrases in chosen], rewards


def win_rate(rewards: np.ndarray, scores: np.ndarray) -> float:
    """Returns how often people prefer the best of eight answers, by scores, to a random one."""
    best = np.take_along_axis(rewards, scores.argmax(axis=1)[:, np.newaxis], axis=1)
    return float((1.0 / (1.0 + np.exp(rewards - best))).mean())


N = 4000
(first, reward_1), (second, reward_2) = answers(N), answers(N)
preferred = (rng.uniform(size=N) < 1.0 / (1.0 + np.exp(reward_2 - reward_1))).astype(int)
new, rewards = answers(8 * 1000)
rewards = rewards.reshape(-1, 8)
print(f"win rate of the true reward: {win_rate(rewards, rewards):.1%}")

# 2. The vault: the only holder of the true preferences.
labels = ldp.PrivateLabels(
    preferred,
    num_classes=2,
    budget=ldp.PrivacyBudget(epsilon=2.0, delta=1e-5),
    store=private / "label-store",
)

# 3. Embeddings that know no preference: here of word counts; or of your language model.
encoder = make_pipeline(TfidfVectorizer(), TruncatedSVD(32, random_state=0)).fit(first + second)
x_1, x_2, x_new = (encoder.transform(texts).astype("float32") for texts in (first, second, new))

# 4. One release, and logistic regression on differences: the model of Bradley and Terry. Without
#    centring and intercept, swapped answers have swapped odds. Step 5 needs the rest of the budget:
#    uses that are planned together cost less than uses that are chosen one after the other.
head = ldp.PrivateLogisticRegression(1.0, 1e-5, center=False, intercept=False, key="head")
draw = ldp.RandomizedResponse(1.0, num_classes=2)
with labels.reserve({"head": head, "preferences": draw}):
    head.fit(x_1 - x_2, labels)
    noisy = labels.randomize(draw, key="preferences")
scores = x_new @ head.coef_[0]
print(f"win rate of the head: {win_rate(rewards, scores.reshape(-1, 8)):.1%}")
print(head.guarantee())

# 5. Noisy preferences, drawn once, train any Keras model: a reward, or with `reference=` a language
#    model by DPO. The loss is debiased: its mean is that on true preferences.
reward = keras.Sequential(
    [keras.Input((32,)), keras.layers.Dense(16, "relu"), keras.layers.Dense(1)]
)
inputs = keras.Input((32,)), keras.Input((32,))
pair = keras.Model(inputs, ldp.keras_layers.PreferenceLogits(reward, beta=4.0)(inputs))
loss = ldp.keras_layers.LabelWeightedLoss(from_logits=True)
pair.compile(keras.optimizers.AdamW(3e-3, weight_decay=0.1), loss)
ldp.fit(pair, (x_1, x_2), noisy, targets="debiased", epochs=8, batch_size=100, verbose=0)
scores = reward.predict(x_new, verbose=0)
print(f"win rate of the network: {win_rate(rewards, scores.reshape(-1, 8)):.1%}")

# 6. The statements of the network, and of both models together.
reward.save(publish / "reward.keras")
print(ldp.guarantee(publish / "reward.keras"))
(publish / "privacy.json").write_text(labels.guarantee().to_json())
