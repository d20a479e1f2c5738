r"""Two parties: one sends noisy labels in a file, the other has the features and trains.

    python examples/02_two_party_regression.py [all FOLDER]              # all three steps
    python examples/02_two_party_regression.py prepare FOLDER            # writes both tables
    python examples/02_two_party_regression.py labels-party FOLDER       # writes the message
    python examples/02_two_party_regression.py features-party FOLDER     # reads it and trains

The labels party sends a table of row ids and noisy labels with its privacy statement and receipts,
once. Its labels never leave its process. To copy this, replace `prepare` by your two tables and the
public range of your labels. The data are claims of motor insurance policies if LABELDP_DATA_DIR has
them, else the diabetes data of scikit-learn.

The labels party can also send the message without Python. Run this instead of the step
labels-party, not after it (with another store it would draw, and spend, once more):

    tf-labeldp randomize FOLDER/labels-party/labels.csv --column label --id id --task regression \
        --low LOW --high HIGH --clip --whole-numbers --epsilon 2 --max-values 32 \
        --store FOLDER/labels-party/label-store --output FOLDER/message/noisy_labels.csv

It writes the same two files, noisy_labels.csv and noisy_labels.csv.privacy.json, and adds to the
second the settings that `NoisyLabels.load` needs for `posterior()` and `debiased()`. LOW and HIGH
are in FOLDER/labels-party/range.json: 0 and 7 for the claims, 25 and 346 for the diabetes data.
"""

import argparse
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
    """Reads ids and true labels; sends ids, noisy labels and a statement."""
    # This party trains nothing, so it needs no TensorFlow.
    import tf_labeldp as ldp

    private, message = folder / "labels-party", folder / "message"
    table = np.loadtxt(private / "labels.csv", delimiter=",", skiprows=1)
    ids, true_labels = table[:, 0].astype(int), table[:, 1]
    # The range is public: both parties know it. Derive it from the meaning of the labels. If you
    # read it off the labels, it reveals the largest label. clip=True clips labels to the range.
    low, high = json.loads((private / "range.json").read_text())

    # The vault charges every draw and stores it, so that a second run sends the same noisy labels
    # and spends nothing. The store is as private as the labels.
    labels = ldp.PrivateLabels(
        true_labels,
        ldp.vault.Numbers(low, high, clip=True),
        budget=ldp.PrivacyBudget(epsilon=EPSILON),
        store=private / "label-store",
    )
    # A part of epsilon pays for a noisy histogram of the labels, on at most 32 values. The rest
    # pays for the draw of each label, among the bins with the least error under this histogram.
    # The labels are counts or whole scores: with whole_numbers=True the values are whole, too.
    noisy = labels.randomize(ldp.LabelRandomizer(EPSILON, max_values=32, whole_numbers=True))

    # The message is in another folder than the store, so that the whole folder can be sent.
    message.mkdir(exist_ok=True)
    with open(message / "noisy_labels.csv", "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["id", "label"])
        writer.writerows(zip(ids.tolist(), noisy.values.tolist(), strict=True))
    # The statement, and the receipts of the draw, for the models that are trained on it.
    statement = json.dumps(noisy.statement(), indent=2)
    (message / "noisy_labels.csv.privacy.json").write_text(statement)
    print(f"labels party: sent {len(ids)} noisy labels")


def features_party(folder: pathlib.Path) -> None:
    """Reads ids, features and the message; trains and publishes the model."""
    import tf_labeldp as ldp

    ldp.cli.load_tensorflow()  # without the lines of its log

    import keras

    mine = folder / "features-party"
    features, test = np.load(mine / "features.npz"), np.load(mine / "public_test.npz")
    message = folder / "message"
    table = np.loadtxt(message / "noisy_labels.csv", delimiter=",", skiprows=1, ndmin=2)
    sent_ids, noisy_labels = table[:, 0].astype(int), table[:, 1]
    statement = json.loads((message / "noisy_labels.csv.privacy.json").read_text())
    promised = ldp.PrivacyGuarantee.from_json(json.dumps(statement["guarantee"]))
    receipts = tuple(map(ldp.accounting.Receipt.from_json, statement["receipts"]))

    # The parties' rows may be in any order, and each party may have rows that the other lacks.
    ids, here, there = np.intersect1d(features["ids"], sent_ids, return_indices=True)
    x, y = features["x"][here], noisy_labels[there]
    print(f"features party: {len(ids)} rows have features and a noisy label")

    # Use any Keras model and the usual loss: the labels are noisy already, so training costs
    # nothing, however often it reads them. The scales come from noisy labels and public features.
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
    # The targets were joined by hand, so the callback names their draw.
    sent = ldp.RecordReceipts(ldp.accounting.PublicInput(noisy_labels, receipts))
    epochs = max(2, 40_000 // len(x))
    model.fit(x, y, batch_size=64, epochs=epochs, callbacks=[sent], verbose=0)

    # Test labels have to be public: they are used outside the vault.
    error = model.evaluate(test["x"], test["y"], batch_size=4096, verbose=0)
    constant = np.mean((test["y"] - center) ** 2)
    model.save(mine / "model.keras")  # with the receipts
    guarantee = ldp.guarantee(mine / "model.keras").with_assumptions(promised.assumptions)
    (mine / "privacy.json").write_text(guarantee.to_json())
    print(guarantee)
    print(f"test MSE: {error:.4g} (always guessing the mean noisy label: {constant:.4g})")


def prepare(folder: pathlib.Path) -> None:
    """Writes the table of each party."""
    data_dir = os.environ.get("LABELDP_DATA_DIR")
    policies = pathlib.Path(data_dir or "", "insurance", "pg15training.csv.gz")
    if data_dir and policies.exists():
        ids, x, y, label_range = motor_insurance(policies)
    else:
        from sklearn.datasets import load_diabetes

        x, y = load_diabetes(return_X_y=True, scaled=False)
        ids, label_range = np.arange(len(y)), (25, 346)  # the range in its description
    order = np.random.default_rng(0).permutation(len(ids))
    train, test = np.split(order, [int(0.8 * len(ids))])

    for part in ("labels-party", "features-party", "message"):
        (folder / part).mkdir(parents=True, exist_ok=True)
    with open(folder / "labels-party" / "labels.csv", "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["id", "label"])
        writer.writerows(zip(ids[train].tolist(), y[train].tolist(), strict=True))
    (folder / "labels-party" / "range.json").write_text(json.dumps(label_range))
    # The features party has its rows in another order.
    train = np.sort(train)
    np.savez(folder / "features-party" / "features.npz", ids=ids[train], x=x[train])
    np.savez(folder / "features-party" / "public_test.npz", x=x[test], y=y[test])


def motor_insurance(path: pathlib.Path) -> tuple[np.ndarray, np.ndarray, np.ndarray, tuple]:
    """Returns policy numbers, features, claim counts and their range."""
    with gzip.open(path, "rt", newline="") as file:
        # One row per person.
        rows = list({row["PolNum"]: row for row in csv.DictReader(file)}.values())
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("step", nargs="?", choices=("all", *STEPS), default="all")
    parser.add_argument("folder", nargs="?", type=pathlib.Path, default="two-party-output")
    arguments = parser.parse_args()
    if arguments.step == "all":
        # Each party has its own process.
        for step in STEPS:
            command = [sys.executable, __file__, step, str(arguments.folder)]
            if subprocess.run(command, check=False).returncode:
                sys.exit(f"{step} failed")
        return
    try:
        STEPS[arguments.step](arguments.folder)
    except FileNotFoundError as error:
        parser.error(f"run the steps before this one first: {error}")


if __name__ == "__main__":
    main()
