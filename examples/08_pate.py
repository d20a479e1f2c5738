"""PATE: teachers on shards of the labels label some examples. Copy this file, change step 1.

    python examples/08_pate.py [FOLDER]

The folder (default: pate-output) gets two sub-folders: `private` with the label store, which stays
with the labels, and `publish` with the statement. A second run with the same folder uses the stored
answers: it draws nothing and spends nothing.
"""

import argparse
import pathlib

parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
)
parser.add_argument("folder", nargs="?", type=pathlib.Path, default="pate-output")
folder = parser.parse_args().folder

import numpy as np
from sklearn.datasets import make_classification
from sklearn.linear_model import LogisticRegression

import tf_labeldp as ldp
from tf_labeldp.pate import PATE

private, publish = folder / "private", folder / "publish"
publish.mkdir(parents=True, exist_ok=True)

# 1. Your data: public features and private labels 0..K-1, one example per person.
features, true_labels = make_classification(
    20_000, 20, n_informative=8, n_classes=4, class_sep=2.0, n_clusters_per_class=1, random_state=0
)
x_train, x_test = features[:18_000], features[18_000:]
y_test = true_labels[18_000:]  # these labels have to be public: they are used outside the vault

# 2. The vault: the only holder of the true training labels.
labels = ldp.PrivateLabels(
    true_labels[:18_000],
    num_classes=4,
    budget=ldp.PrivacyBudget(epsilon=2.0, delta=1e-5),
    store=private / "label-store",
)

# 3. 300 teachers with 60 labels each vote on 400 examples. At most 300 get an answer: those on
#    which, up to noise, more than half of the teachers agree. For images, set
#    `teacher=fix_match_teacher(network)`.
pate = PATE(1.0, 1e-5, num_teachers=300, num_queries=400, max_answers=300, threshold=0.5)
answers = pate.answer(x_train, labels)
print(f"{len(answers)} answers")

# 4. A student learns from the answers alone: here a linear model, for images `FixMatch`.
student = LogisticRegression(max_iter=1000).fit(x_train[answers.indices], np.asarray(answers))
print(f"test accuracy of the student: {student.score(x_test, y_test):.1%}")

# 5. For comparison, a head at the same epsilon: one noisy release of all labels.
head = ldp.PrivateLogisticRegression(1.0, 1e-5).fit(x_train, labels)
print(f"test accuracy of a head: {head.score(x_test, y_test):.1%}")

# 6. The statement: the cost of the answers, and its assumptions. Publish it with them.
print(answers.guarantee())
(publish / "privacy.json").write_text(answers.guarantee().to_json())
