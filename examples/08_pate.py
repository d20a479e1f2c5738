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

ldp.cli.load_tensorflow()  # without the lines of its log

import keras

from tf_labeldp.accounting import public_input
from tf_labeldp.pate import PATE
from tf_labeldp.semi_supervised import DivideMix

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

# 5. The student labels every example, at no further cost, and two networks learn which of these
#    labels to believe: AugDescent on labels of PATE (Tang et al. 2022). Views of rows are noise;
#    leave out both for images. `public_input` passes on the receipts of the answers.
labels_of_all = public_input(answers).with_value(student.predict(x_train))
keras.utils.set_random_seed(0)
network = keras.Sequential(
    [
        keras.Input((20,)),
        keras.layers.Dense(64, activation="relu"),
        keras.layers.Dense(64, activation="relu"),
        keras.layers.Dense(4),
    ]
)
noise = {"weak": keras.layers.GaussianNoise(0.1), "strong": keras.layers.GaussianNoise(0.5)}
model = DivideMix(network, **noise)
model.compile(keras.optimizers.Adam(1e-3))
model.fit(x_train, labels_of_all, 128, epochs=4, steps_per_epoch=50, verbose=0)
predicted = model.predict(x_test, verbose=0).argmax(axis=1)
print(f"test accuracy of AugDescent on its labels: {(predicted == y_test).mean():.1%}")
print(ldp.guarantee(model).headline)

# 6. For comparison, a head at the same epsilon: one noisy release of all labels.
head = ldp.PrivateLogisticRegression(1.0, 1e-5).fit(x_train, labels)
print(f"test accuracy of a head: {head.score(x_test, y_test):.1%}")

# 7. The statement: the cost of the answers, and its assumptions. Publish it with them.
print(answers.guarantee())
(publish / "privacy.json").write_text(answers.guarantee().to_json())
