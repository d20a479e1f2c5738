"""A classifier fitted from one private release of the labels. Copy this file and change step 1.

    python examples/05_one_release.py [FOLDER]

The folder (default: one-release-output) gets two sub-folders: `private` with the label store, which
stays with the labels, and `publish` with the model and its card. A second run
with the same folder uses the stored release: it draws nothing and spends nothing.
"""

import argparse
import pathlib

parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
)
parser.add_argument("folder", nargs="?", type=pathlib.Path, default="one-release-output")
folder = parser.parse_args().folder

import numpy as np
from sklearn.datasets import load_digits

import tf_labeldp as ldp

ldp.cli.load_tensorflow()  # without the lines of its log

import keras

private, publish = folder / "private", folder / "publish"

# 1. Your data: public images (n, height, width[, channels]) and private labels 0..K-1, one example
#    per person. For a table of columns, use RandomFourierFeatures instead of PatchDictionary.
digits = load_digits()
x_train, x_test = digits.images[:1400], digits.images[1400:]
y_test = digits.target[1400:]  # these labels have to be public: they are used outside the vault

# 2. The vault: the only holder of the true training labels.
labels = ldp.PrivateLabels(
    digits.target[:1400],
    num_classes=10,
    budget=ldp.PrivacyBudget(epsilon=1.0, delta=1e-5),
    store=private / "label-store",
)

# 3. Features learnt from the images alone: no label, no budget. Smoothing over the graph of nearest
#    neighbours gains accuracy at a small epsilon if classes form clusters (without it: about 90 %).
#    The saved model then contains features of the training images.
patches = ldp.features.PatchDictionary(num_atoms=50, patch_size=3, pooling=3).fit(x_train)
encoder = ldp.features.NeighbourSmoothing(patches).fit(x_train)

# 4. One release of the labels' moments with the features, and logistic regression from it.
head = ldp.heads.PrivateLogisticRegression(
    epsilon=1.0, delta=1e-5, encoder=encoder, key="head"
).fit(x_train, labels)
print(f"{head.num_directions_} of {head.coef_.shape[1]} directions got a share of the release")
print(f"signal to noise in the release: {head.signal_to_noise_:.1f}")
print(f"test accuracy: {head.score(x_test, y_test):.1%}")

# 5. The statement: what was spent, and its assumptions. Publish it with the model.
print(head.guarantee())

# 6. An ordinary Keras model from raw images to class probabilities: save it, load it, predict. In
#    another process, import `tf_labeldp.keras_layers` before you load it.
ldp.save(head, publish)
loaded = keras.models.load_model(publish / "model.keras")
probabilities = loaded.predict(x_test.astype("float32"), verbose=0)
print(f"test accuracy of the saved model: {np.mean(probabilities.argmax(axis=1) == y_test):.1%}")
