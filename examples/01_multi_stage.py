"""Multi-stage training (LP-2ST) on noisy labels. Copy this file and change step 1.

    python examples/01_multi_stage.py [FOLDER]

The folder (default: multi-stage-output) gets two sub-folders: `private` with the label store, which
stays with the labels, and `publish` with the model and its card. A second run
with the same folder uses the stored noisy labels: it draws nothing and spends nothing.
"""

import argparse
import pathlib

parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
)
parser.add_argument("folder", nargs="?", type=pathlib.Path, default="multi-stage-output")
folder = parser.parse_args().folder

import numpy as np
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

# 2. The vault: the only holder of the true training labels. It draws noisy labels, charges each
#    draw and refuses to exceed the budget. Keep the store with the labels: it is as private.
labels = ldp.PrivateLabels(
    true_labels[:1400],
    num_classes=10,
    budget=ldp.PrivacyBudget(epsilon=2.0),
    store=private / "label-store",
)

# 3. Two stages. The first 60 % of the examples get noisy labels by randomized response. Then the
#    model predicts the likely classes of the others, and their labels are drawn among those.
stages = ldp.MultiStageTraining(
    x_train,
    labels,
    epsilon=2.0,
    fractions=(0.6, 0.4),
    epochs_per_stage=10,
    batch_size=64,
    mixup_alpha=8.0,  # mixes pairs of examples, which helps against noisy labels
)

# 4. Any Keras model that returns one score per class, with a loss for one-hot labels.
model = keras.Sequential(
    [
        keras.Input((64,)),
        keras.layers.Dense(64, activation="relu"),
        keras.layers.Dense(10),
    ]
)
model.compile(
    keras.optimizers.Adam(3e-3), loss=keras.losses.CategoricalCrossentropy(from_logits=True)
)
model.fit(stages.dataset(), epochs=stages.epochs, callbacks=[stages], shuffle=False, verbose=2)

# 5. The statement: what was spent, and its assumptions. Publish it with the model.
print(stages.guarantee())

# 6. The model is an ordinary Keras model: save it with its card, load it, predict. `ldp.guarantee`
#    and `ldp.load_model` read the receipts in its file, which Keras alone loads, too.
ldp.save(model, publish)
print(ldp.guarantee(publish / "model.keras").headline)
loaded = ldp.load_model(publish / "model.keras")
predicted = np.argmax(loaded.predict(x_test, verbose=0), axis=1)
print(f"test accuracy: {np.mean(predicted == y_test):.1%}")
