"""Clusters of public features make private labels cheaper. Copy this file and change step 1.

    python examples/04_clusters.py [FOLDER]

The folder (default: clusters-output) gets two sub-folders: `private` with the label store, which
stays with the labels, and `publish` with the model and its statement. Run it again with the same
folder: the stored noisy labels are used, nothing is drawn and nothing is spent a second time.
"""

import pathlib
import sys

import keras
from sklearn.datasets import load_digits

import tf_labeldp as ldp

folder = pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else "clusters-output")
private, publish = folder / "private", folder / "publish"
publish.mkdir(parents=True, exist_ok=True)

# 1. Your data: public features and private labels 0..K-1, one example a person.
features, true_labels = load_digits(return_X_y=True)
features = (features / 16.0).astype("float32")
x_train, x_test = features[:1400], features[1400:]
y_test = true_labels[1400:]  # must be public, as they are used outside the vault

# 2. The vault: the only holder of the true training labels.
labels = ldp.PrivateLabels(
    true_labels[:1400],
    num_classes=10,
    budget=ldp.PrivacyBudget(epsilon=1.0),
    store=private / "label-store",
)

# 3. Clusters of the features, made without labels. Large and pure ones are worth most; give
#    `encoder=` a Keras model to cluster its outputs instead of the features as they are.
clusters = ldp.features.find_clusters(x_train, num_clusters=20)
print(clusters.summary())

# 4. ClusterRR (Esfandiari et al. 2022): a noisy distribution of the labels of each cluster, and for
#    each example its own label or one drawn from that distribution. The two share epsilon.
mechanism = ldp.ClusterRandomizedResponse.for_epsilon(1.0, num_classes=10)
noisy = labels.randomize(mechanism, clusters=clusters)

# 5. Any Keras model that ends in one score per class.
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
#    costs nothing more, and gives the model the receipts of the noisy labels.
#    `targets="debiased"` with `LabelWeightedLoss` instead is the paper's matrix-inverse loss.
ldp.fit(model, x_train, noisy, targets="posterior", batch_size=64, epochs=15, verbose=2)
predicted = model.predict(x_test, verbose=0).argmax(axis=1)
print(f"test accuracy: {(predicted == y_test).mean():.1%}")

# 7. What was spent, and on which assumptions the statement rests. Publish it with the model.
print(ldp.guarantee(model))
(publish / "privacy.json").write_text(ldp.guarantee(model).to_json())
model.save(publish / "model.keras")  # with its receipts
print(ldp.guarantee(publish / "model.keras").headline)  # `ldp.load_model` reads them, too
