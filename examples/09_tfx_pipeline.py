"""A TFX pipeline on private labels: CsvExampleGen -> LabelRandomizer -> Trainer, on Adult.

Everything after LabelRandomizer, the trainer included, reads only noisy labels. Run it in an
environment with tfx (`make test-tfx` creates one):

    LABELDP_DATA_DIR=data python examples/09_tfx_pipeline.py --epsilon 2
"""

from __future__ import annotations

import argparse
import csv
import gzip
import json
import os
import pathlib
import sys
import tempfile

import numpy as np

COLUMNS = (
    "age workclass fnlwgt education education_num marital_status occupation relationship race sex "
    "capital_gain capital_loss hours_per_week native_country income"
).split()
NUMBERS = ("age", "education_num", "capital_gain", "capital_loss", "hours_per_week")
WORDS = ("marital_status", "occupation", "relationship")
BUCKETS = 32
"""Of the hash of a word."""


def read_adult(path: pathlib.Path) -> list[dict[str, str]]:
    """Returns the rows of one file of Adult."""
    with gzip.open(path, "rt") as file:
        rows = [row for row in csv.reader(file, skipinitialspace=True) if len(row) == len(COLUMNS)]
    return [dict(zip(COLUMNS, row, strict=True)) for row in rows]


def write_table(rows: list[dict[str, str]], path: pathlib.Path) -> None:
    """Writes the input of the pipeline: ids, public features, and private labels 0 or 1."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        table = csv.writer(file)
        table.writerow(["id", *NUMBERS, *WORDS, "income"])
        for number, row in enumerate(rows):
            values = [row[name] for name in (*NUMBERS, *WORDS)]
            table.writerow([number, *values, int(row["income"].startswith(">50K"))])


def features_of(columns: dict) -> tf.Tensor:  # noqa: F821
    """Returns the features of a batch: numbers as logarithms, words as one-hot hashes."""
    import tensorflow as tf

    parts = [tf.math.log1p(tf.cast(columns[name], tf.float32))[:, None] / 4.0 for name in NUMBERS]
    for name in WORDS:
        parts.append(tf.one_hot(tf.strings.to_hash_bucket_fast(columns[name], BUCKETS), BUCKETS))
    return tf.concat(parts, axis=1)


def run_fn(fn_args) -> None:
    """Trains on noisy Examples; the Trainer of TFX calls it."""
    import tensorflow as tf

    spec = {name: tf.io.FixedLenFeature([], tf.int64) for name in (*NUMBERS, "income")}
    spec |= {name: tf.io.FixedLenFeature([], tf.string) for name in WORDS}

    def parsed(records):
        columns = tf.io.parse_example(records, spec)
        return features_of(columns), columns["income"]

    def batches(patterns):
        files = tf.data.Dataset.list_files(patterns, shuffle=False)
        return tf.data.TFRecordDataset(files, "GZIP").batch(256).map(parsed)

    model = tf.keras.Sequential(
        [tf.keras.layers.Dense(16, "relu"), tf.keras.layers.Dense(1, "sigmoid")]
    )
    model.compile("adam", "binary_crossentropy")
    train = batches(fn_args.train_files).shuffle(64, seed=0)
    model.fit(train, validation_data=batches(fn_args.eval_files), epochs=10, verbose=0)
    model.export(fn_args.serving_model_dir)


def pipeline(folder: pathlib.Path, epsilon: float):
    """Returns the pipeline; the artifacts before LabelRandomizer contain true labels."""
    from tfx import v1 as tfx

    from tf_labeldp.mechanisms import RandomizedResponse
    from tf_labeldp.scale.tfx import LabelRandomizer

    examples = tfx.components.CsvExampleGen(input_base=str(folder / "tables"))
    noisy = LabelRandomizer(
        examples.outputs["examples"],
        RandomizedResponse(epsilon, num_classes=2),
        key=folder / "private" / "labels.key",
        release="adult",
        label="income",
    )
    trainer = tfx.components.Trainer(
        module_file=os.path.abspath(__file__),
        examples=noisy.outputs["noisy_examples"],
        train_args=tfx.proto.TrainArgs(num_steps=0),
        eval_args=tfx.proto.EvalArgs(num_steps=0),
    )
    metadata = tfx.orchestration.metadata.sqlite_metadata_connection_config(
        str(folder / "metadata.db")
    )
    return tfx.dsl.Pipeline(
        pipeline_name="adult",
        pipeline_root=str(folder / "private" / "root"),
        components=[examples, noisy, trainer],
        metadata_connection_config=metadata,
        enable_cache=False,
    )


def main(arguments: list[str] | None = None) -> float:
    """Runs the pipeline, prints the statement, and returns the accuracy on the public test set."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epsilon", type=float, default=2.0)
    parser.add_argument("--rows", type=int, default=32561, help="number of rows")
    parser.add_argument("--output", type=pathlib.Path, help="a folder (default: a new one)")
    args = parser.parse_args(arguments)
    folder = args.output or pathlib.Path(tempfile.mkdtemp(prefix="labeldp-tfx-"))
    data = pathlib.Path(os.environ.get("LABELDP_DATA_DIR", "data")) / "adult"

    import tensorflow as tf
    from tfx import v1 as tfx

    from tf_labeldp.scale import ReleaseKey

    write_table(read_adult(data / "adult.data.gz")[: args.rows], folder / "tables" / "adult.csv")
    (folder / "private").mkdir(mode=0o700, exist_ok=True)
    ReleaseKey.create(folder / "private" / "labels.key")
    tfx.orchestration.LocalDagRunner().run(pipeline(folder, args.epsilon))

    root = folder / "private" / "root"
    statement = next(root.glob("LabelRandomizer/statement/*/noisy.privacy.json"))
    print(*json.loads(statement.read_text())["statement"], sep="\n")
    model = tf.saved_model.load(str(next(root.glob("Trainer/model/*/Format-Serving"))))
    test = read_adult(data / "adult.test.gz")
    columns = {name: np.array([float(row[name]) for row in test], np.float32) for name in NUMBERS}
    columns |= {name: np.array([row[name] for row in test]) for name in WORDS}
    labels = np.array([row["income"].startswith(">50K") for row in test])
    predicted = model.serve(features_of(columns))
    accuracy = float(np.mean((predicted.numpy()[:, 0] > 0.5) == labels))
    print(f"accuracy on {len(test)} public test rows: {accuracy:.1%}")
    print(f"all outputs are in {folder}; private/ contains true labels")
    return accuracy


if __name__ == "__main__":
    main(sys.argv[1:])
