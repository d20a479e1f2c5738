r"""Two parties, one file: one has the labels, the other the features and trains the model.

    python examples/02_two_party_regression.py [FOLDER]                  # all of the following
    python examples/02_two_party_regression.py prepare FOLDER            # makes the parties' tables
    python examples/02_two_party_regression.py labels-party FOLDER       # writes noisy_labels.npz
    python examples/02_two_party_regression.py features-party FOLDER     # reads it, trains a model

The labels party sends one file, once: row ids, noisy labels and the privacy statement. Its labels
never leave its own process. To copy this, replace `prepare` by your own two tables and the public
range of your labels. Here: the claims of motor insurance policies where LABELDP_DATA_DIR has them,
else the diabetes data of scikit-learn.

The labels party needs no Python of its own; the same from the command line:

    tf-labeldp randomize FOLDER/labels-party/labels.csv --column label --id id --task regression \
        --low 0 --high 7 --clip --epsilon 2 --max-values 32 --output noisy_labels.csv

which writes noisy_labels.csv and, beside it, noisy_labels.csv.privacy.json.
"""

import csv
import gzip
import json
import os
import pathlib
import subprocess
import sys

import numpy as np

EPSILON = 2.0


def labels_party(folder: pathlib.Path) -> None:
    """Has ids and true labels; sends ids, noisy labels and a statement."""
    import tf_labeldp as ldp  # without TensorFlow: this party trains nothing

    private = folder / "labels-party"
    table = np.loadtxt(private / "labels.csv", delimiter=",", skiprows=1)
    ids, true_labels = table[:, 0].astype(int), table[:, 1]
    # The range is public: both parties know it. Take it from what the labels mean, not from the
    # labels, or whoever has the largest one is shown; clip=True moves labels beyond it to its end.
    low, high = json.loads((private / "range.json").read_text())

    # The vault: charges every draw, and keeps it, so that a second run sends the same noisy labels
    # and spends nothing again. The store is as private as the labels.
    labels = ldp.PrivateLabels(
        true_labels,
        low=low,
        high=high,
        clip=True,
        budget=ldp.PrivacyBudget(epsilon=EPSILON),
        store=private / "label-store",
    )
    # A part of epsilon buys a noisy histogram of the labels, on at most 32 values; the rest draws
    # each label among the few bins that lose least under it.
    result = ldp.LabelRandomizer(EPSILON, max_values=32).randomize(labels)

    np.savez(
        folder / "noisy_labels.npz",
        ids=ids,
        noisy_labels=result.noisy_labels,
        statement=labels.guarantee().to_json(),
    )
    print(f"labels party: sent {len(ids)} noisy labels")


def features_party(folder: pathlib.Path) -> None:
    """Has ids and features; gets noisy labels, trains, and publishes the model."""
    import keras

    import tf_labeldp as ldp

    mine = folder / "features-party"
    features, test = np.load(mine / "features.npz"), np.load(mine / "public_test.npz")
    message = np.load(folder / "noisy_labels.npz")  # allow_pickle=False: a file from somebody else
    guarantee = ldp.PrivacyGuarantee.from_json(str(message["statement"]))

    # The parties' rows are in any order, and each may have rows that the other lacks.
    ids, here, there = np.intersect1d(features["ids"], message["ids"], return_indices=True)
    x, y = features["x"][here], message["noisy_labels"][there]
    print(f"features party: {len(ids)} rows have features and a noisy label")

    # Any Keras model and the usual loss: the labels are noisy already, so training is free to look
    # at them as often as it likes. What is scaled here are noisy labels and public features.
    scale = keras.layers.Normalization()
    scale.adapt(x)
    center, width = y.mean(), y.std() or 1.0
    model = keras.Sequential(
        [
            keras.Input(x.shape[1:]),
            scale,
            keras.layers.Dense(64, activation="relu"),
            keras.layers.Dense(32, activation="relu"),
            keras.layers.Dense(1),
            keras.layers.Rescaling(width, offset=center),
        ]
    )
    model.compile(keras.optimizers.Adam(1e-3), loss="mean_squared_error")
    model.fit(x, y, batch_size=64, epochs=max(2, 40_000 // len(x)), verbose=0)

    # Test labels must be public, as they are used outside of the vault.
    error = model.evaluate(test["x"], test["y"], batch_size=4096, verbose=0)
    constant = np.mean((test["y"] - center) ** 2)
    model.save(mine / "model.keras")
    (mine / "privacy.json").write_text(guarantee.to_json())
    print(guarantee)
    print(f"test MSE: {error:.4g} (always guessing the mean noisy label: {constant:.4g})")


def prepare(folder: pathlib.Path) -> None:
    """Gives each party its table, as if they had always had it."""
    data_dir = pathlib.Path(os.environ.get("LABELDP_DATA_DIR") or "../shared/data")
    policies = data_dir / "insurance" / "pg15training.csv.gz"
    if policies.exists():
        ids, x, y, label_range = motor_insurance(policies)
    else:
        from sklearn.datasets import load_diabetes

        x, y = load_diabetes(return_X_y=True, scaled=False)
        ids, label_range = np.arange(len(y)), (25, 346)  # the range in its description
    order = np.random.default_rng(0).permutation(len(ids))
    train, test = np.split(order, [int(0.8 * len(ids))])

    for party in ("labels-party", "features-party"):
        (folder / party).mkdir(parents=True, exist_ok=True)
    with open(folder / "labels-party" / "labels.csv", "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["id", "label"])
        writer.writerows(zip(ids[train].tolist(), y[train].tolist(), strict=True))
    (folder / "labels-party" / "range.json").write_text(json.dumps(label_range))
    train = np.sort(train)  # the features party has its rows in another order
    np.savez(folder / "features-party" / "features.npz", ids=ids[train], x=x[train])
    np.savez(folder / "features-party" / "public_test.npz", x=x[test], y=y[test])


def motor_insurance(path: pathlib.Path) -> tuple[np.ndarray, np.ndarray, np.ndarray, tuple]:
    """Returns policy numbers, features, claim counts and their range."""
    with gzip.open(path, "rt", newline="") as file:
        rows = list({row["PolNum"]: row for row in csv.DictReader(file)}.values())  # one a person
    columns = []
    for name in "Age Bonus Poldur Value Density Exppdays Group1 Adind".split():
        columns.append([float(row[name]) for row in rows])
    for name in "Gender Type Category Occupation".split():
        for category in sorted({row[name] for row in rows}):
            columns.append([float(row[name] == category) for row in rows])
    ids = np.array([int(row["PolNum"]) for row in rows])
    y = np.array([float(row["Numtppd"]) for row in rows])
    return ids, np.array(columns, dtype="float32").T, y, (0, 7)


STEPS = {"prepare": prepare, "labels-party": labels_party, "features-party": features_party}

if __name__ == "__main__":
    if len(sys.argv) == 3 and sys.argv[1] in STEPS:
        STEPS[sys.argv[1]](pathlib.Path(sys.argv[2]))
    else:
        folder = sys.argv[1] if len(sys.argv) > 1 else "two-party-output"
        for step in STEPS:  # each in a process of its own, as two parties would
            subprocess.run([sys.executable, __file__, step, folder], check=True)
