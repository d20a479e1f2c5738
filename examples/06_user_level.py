"""DP-SGD for users with several labels each: protects all labels of a postcode together.

    LABELDP_DATA_DIR=... python examples/06_user_level.py

Reads `insurance/beMTPL97.csv.gz` (Belgian motor liability, 163,212 policies in 583 postcodes) from
that folder. The label records whether a policy had a claim. The unit of privacy is the postcode:
the model reveals almost nothing about the labels of any one postcode. With so few units a small
epsilon leaves little to learn, as the output shows.
"""

import argparse
import csv
import gzip
import os
import pathlib
import sys

parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
)
parser.parse_args()

import numpy as np

import tf_labeldp as ldp

ldp.cli.load_tensorflow()  # without the lines of its log

import keras

# 1. Public features, the public unit (postcode), and the private label of each policy.
folder = pathlib.Path(os.environ.get("LABELDP_DATA_DIR", "data")) / "insurance"
path = folder / "beMTPL97.csv.gz"
if not path.exists():
    sys.exit(f"{path} is missing. Set LABELDP_DATA_DIR to the folder that has it.")
with gzip.open(path, "rt", newline="") as file:
    rows = list(csv.DictReader(file))
numeric = ("ageph", "bm", "power", "agec", "long", "lat", "expo")
features = np.array([[float(row[name]) for name in numeric] for row in rows], dtype="float32")
features = (features - features.mean(axis=0)) / features.std(axis=0)
postcodes = np.array([row["postcode"] for row in rows])
claims = np.array([int(float(row["nclaims"]) > 0) for row in rows])

# Whole postcodes go to training or to the test, like the users of the paper's section 6.
names = np.random.default_rng(0).permutation(np.unique(postcodes))
in_training = np.isin(postcodes, names[:483])
x_test, y_test = features[~in_training], claims[~in_training]

# 2. The vault. Delta is small against one over the number of postcodes.
budget = ldp.PrivacyBudget(epsilon=4.0, delta=1e-4)
labels = ldp.PrivateLabels(claims[in_training], num_classes=2, budget=budget)

# 3. Every postcode has exactly 50 policies in a batch, or none; their mean gradient is clipped.
batches = ldp.data.poisson_batches(
    features[in_training],
    labels,
    sampling_probability=0.2,
    steps=20,
    users=postcodes[in_training],
    max_examples_per_user=50,
)
epochs = 3
noise_multiplier = ldp.accounting.calibrate_noise_multiplier(
    budget.epsilon, budget.delta, batches.sampling_probability, batches.steps * epochs
)
inputs = keras.Input((len(numeric),))
hidden = keras.layers.Dense(16, activation="relu")(inputs)
model = ldp.LabelDPModel(inputs, keras.layers.Dense(1)(hidden))
model.compile(
    ldp.LabelDPOptimizer(
        keras.optimizers.SGD(0.5), l2_norm_clip=0.2, noise_multiplier=noise_multiplier
    ),
    loss=keras.losses.BinaryCrossentropy(from_logits=True),
    metrics=[keras.metrics.AUC(from_logits=True, name="auc")],
)
model.fit(
    batches,
    epochs=epochs,
    validation_data=(x_test, y_test),
    validation_batch_size=4096,
    callbacks=[ldp.training.PrivacySpent()],
    verbose=2,
)

# 4. The same unit for randomized response: group privacy leaves epsilon / 50 for each label.
each = ldp.accounting.item_budget_for_group(budget, 50)
print(f"randomized response could spend epsilon={each.epsilon:.3g} per label")
print(model.guarantee())
