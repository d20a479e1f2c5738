"""DP-SGD on private labels, denoised with public features. Copy this file and change step 1.

    python examples/03_labeldp_pro.py [FOLDER]

The folder (default: labeldp-pro-output) gets two sub-folders: `private` with the label store, which
stays with the labels, and `publish` with the model and its card. Every run trains with fresh
noise and is charged for it: a second run on the same store is refused, as the budget is spent.
"""

import argparse
import pathlib

parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
)
parser.add_argument("folder", nargs="?", type=pathlib.Path, default="labeldp-pro-output")
folder = parser.parse_args().folder

from sklearn.datasets import load_digits

import tf_labeldp as ldp

ldp.cli.load_tensorflow()  # without the lines of its log

import keras

private, publish = folder / "private", folder / "publish"

# 1. Your data: public images and private labels 0..K-1, one example per person.
digits = load_digits()
images = (digits.images[..., None] / 16.0).astype("float32")
x_train, x_test = images[:1400], images[1400:]
y_test = digits.target[1400:]  # these labels have to be public: they are used outside the vault
n = len(x_train)

# 2. The vault: the only holder of the true training labels.
budget = ldp.PrivacyBudget(epsilon=4.0, delta=1e-4)
labels = ldp.PrivateLabels(
    digits.target[:1400], num_classes=10, budget=budget, store=private / "label-store"
)

# 3. The use of the labels: 100 batches, each of which includes each example with probability 0.15.
#    The noise follows from the budget, under replacement of one label.
batches = ldp.data.poisson_batches(x_train, labels, sampling_probability=0.15, steps=20)
epochs = 5
noise_multiplier = ldp.accounting.calibrate_noise_multiplier(
    budget.epsilon, budget.delta, batches.sampling_probability, batches.steps * epochs
)
print(f"noise multiplier {noise_multiplier:.2f} for {batches.expected_batch_size:.0f} a batch")

# 4. An ordinary Keras model. `preconditioner="gauss_newton"` adds less noise where the loss is
#    more curved. For the paper's LabelDP-Pro, set `denoiser=ldp.AltConv(256)` instead.
inputs = keras.Input(x_train.shape[1:])
x = keras.layers.Conv2D(16, 3, activation="relu")(inputs)
x = keras.layers.AveragePooling2D(2)(x)
x = keras.layers.Dense(32, activation="relu")(keras.layers.Flatten()(x))
model = ldp.LabelDPModel(inputs, keras.layers.Dense(10)(x))
schedule = keras.optimizers.schedules.PolynomialDecay(8.0, batches.steps * epochs, 0.0)
model.compile(
    ldp.LabelDPOptimizer(
        keras.optimizers.SGD(schedule),
        l2_norm_clip=1.0,
        noise_multiplier=noise_multiplier,
        preconditioner="gauss_newton",
    ),
    loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    metrics=["accuracy"],
)

# 5. Training. It withholds metrics of the training set, and prints the accuracy on public labels.
model.fit(
    batches,
    epochs=epochs,
    validation_data=(x_test, y_test),
    validation_batch_size=1000,
    callbacks=[ldp.training.PrivacySpent()],
    verbose=2,
)
loss, accuracy = model.evaluate(x_test, y_test, verbose=0)
print(f"test accuracy: {accuracy:.1%}")

# 6. The statement: what was spent, and its assumptions. Publish it with the model.
print(model.guarantee())
ldp.save(model, publish)
