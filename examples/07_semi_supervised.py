"""A deep network on noisy labels and all the images. Copy this file and change step 1.

    python examples/07_semi_supervised.py [FOLDER]

The folder (default: semi-supervised-output) gets two sub-folders: `private` with the label store,
which stays with the labels, and `publish` with the model and its card. A second run with the
same folder uses the stored noisy labels: it draws nothing and spends nothing.
"""

import argparse
import pathlib

parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
)
parser.add_argument("folder", nargs="?", type=pathlib.Path, default="semi-supervised-output")
folder = parser.parse_args().folder

from sklearn.datasets import load_digits

import tf_labeldp as ldp

ldp.cli.load_tensorflow()  # without the lines of its log

import keras

from tf_labeldp.semi_supervised import FixMatch

private, publish = folder / "private", folder / "publish"

# 1. Your data: public images in [0, 1] with a channel axis, and private labels 0..K-1.
digits = load_digits()
images = digits.images[..., None].astype("float32") / 16.0
y_test = digits.target[1400:]  # these labels have to be public: they are used outside the vault

# 2. The vault, the only holder of the true training labels, and one noisy label per image.
labels = ldp.PrivateLabels(
    digits.target[:1400],
    num_classes=10,
    budget=ldp.PrivacyBudget(epsilon=3.0),
    store=private / "label-store",
)
noisy = labels.randomize(ldp.RandomizedResponse(3.0, num_classes=10))

# 3. Any Keras network from images to one logit per class.
keras.utils.set_random_seed(0)
network = keras.Sequential(
    [
        keras.Input((8, 8, 1)),
        keras.layers.Conv2D(32, 3, activation="relu", padding="same"),
        keras.layers.MaxPooling2D(),
        keras.layers.Conv2D(64, 3, activation="relu", padding="same"),
        keras.layers.Flatten(),
        keras.layers.Dense(10),
    ]
)

# 4. FixMatch (LDP-SSL, Tang et al. 2022): confident predictions become targets for strong views.
#    Without a loss, the network learns the true labels through the channel of the noisy ones;
#    `FixMatch.from_paper(network, steps=...)` has the paper's settings. For DenoiseSSL, which uses
#    only the labels that agree with their cluster, call `fit(..., clusters=...)`.
model = FixMatch(network, unlabelled_ratio=3)
model.compile(keras.optimizers.Adam(2e-3))
model.fit(images[:1400], noisy, epochs=120, verbose=2)
predicted = model.predict(images[1400:], verbose=0).argmax(axis=1)
print(f"test accuracy: {(predicted == y_test).mean():.1%}")

# 5. The statement: what was spent, and its assumptions. Publish it with the model.
statement = ldp.guarantee(model)
print(statement)
# The file carries the receipts.
ldp.save(model.network, publish)
print(ldp.guarantee(publish / "model.keras").headline)
