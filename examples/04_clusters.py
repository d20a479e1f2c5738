"""Clusters of public features make private labels cheaper. Copy this file and change step 1.

    python examples/04_clusters.py [FOLDER]

The folder (default: clusters-output) gets two sub-folders: `private` with the label store, which
stays with the labels, and `publish` with the model and its card. A second run
with the same folder uses the stored noisy labels: it draws nothing and spends nothing.
"""

import argparse
import pathlib

parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
)
parser.add_argument("folder", nargs="?", type=pathlib.Path, default="clusters-output")
folder = parser.parse_args().folder

from sklearn.datasets import load_digits

import tf_labeldp as ldp

ldp.cli.load_tensorflow()  # without the lines of its log

import keras

private, publish = folder / "private", folder / "publish"

# 1. Your data: public features and private labels 0..K-1, one example per person.
features, true_labels = load_digits(return_X_y=True)
features = (features / 16.0).astype("float32")
x_train, x_test = features[:1400], features[1400:]
y_test = true_labels[1400:]  # these labels have to be public: they are used outside the vault

# 2. The vault: the only holder of the true training labels.
labels = ldp.PrivateLabels(
    true_labels[:1400],
    num_classes=10,
    budget=ldp.PrivacyBudget(epsilon=1.0),
    store=private / "label-store",
)

# 3. Clusters of the features, made without labels. Large and pure clusters are worth most. Set
#    `encoder=` to a Keras model to cluster its outputs instead of the raw features.
clusters = ldp.features.find_clusters(x_train, num_clusters=20)
print(clusters.summary())

# 4. ClusterRR (Esfandiari et al. 2022): a noisy distribution of the labels in each cluster, and for
#    each example its label or a draw from that distribution. The two share epsilon.
mechanism = ldp.ClusterRandomizedResponse.for_epsilon(1.0, num_classes=10)
noisy = labels.randomize(mechanism, clusters=clusters)

# 5. Any Keras model that returns one score per class.
model = keras.Sequential(
    [
        keras.Input((64,)),
        keras.layers.Dense(64, activation="relu"),
        keras.layers.Dense(10),
    ]
)
loss = keras.losses.CategoricalCrossentropy(from_logits=True)
model.compile(keras.optimizers.Adam(3e-3), loss=loss)

# 6. Train on the probabilities of the true label, given the noisy label and the distribution. This
#    costs nothing, and attaches the receipts of the noisy labels to the model. For the paper's
#    matrix-inverse loss, set `targets="debiased"` with `LabelWeightedLoss`.
ldp.fit(model, x_train, noisy, targets="posterior", batch_size=64, epochs=15, verbose=2)
predicted = model.predict(x_test, verbose=0).argmax(axis=1)
print(f"test accuracy: {(predicted == y_test).mean():.1%}")

# 7. The statement: what was spent, and its assumptions. Publish it with the model.
print(ldp.guarantee(model))
# The file carries the receipts, which `ldp.load_model` reads, too.
ldp.save(model, publish)
print(ldp.guarantee(publish / "model.keras").headline)
