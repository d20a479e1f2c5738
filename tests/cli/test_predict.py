"""``tf-labeldp predict``: tables of predictions by files of ``train`` and of ``to_keras``."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import keras
import numpy as np
import pyarrow as pa
import pytest
import tensorflow as tf
from pyarrow import csv, parquet

import tf_labeldp as ldp
from tf_labeldp.cli import main
from tf_labeldp.vault.model_history import ModelFacts

N = 1200
RNG = np.random.default_rng(5)
AGE = RNG.uniform(18.0, 90.0, N).round(1)
JOB = RNG.choice(["nurse", "smith"], N)
ILL = np.where(AGE + 20 * (JOB == "smith") > 60, "yes", "no")
TABLE = {"age": AGE, "job": JOB}


@pytest.fixture
def data(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rows = [f"{i},{AGE[i]},{JOB[i]},{ILL[i]},{AGE[i] / 3:.2f}" for i in range(N)]
    (tmp_path / "data.csv").write_text("\n".join(["id,age,job,ill,days", *rows]) + "\n")
    return tmp_path


def train(*options, output="out"):
    words = ["--epsilon", "8", "--insecure-seed", "0", "--output", output, *options]
    assert main(["train", "data.csv", *words]) == 0


def predicted(*words, output="predictions.csv", delimiter=","):
    assert main(["predict", *words, "--output", output]) == 0
    form = csv.ParseOptions(delimiter=delimiter)
    decimals = csv.ConvertOptions(decimal_point="," if delimiter == ";" else ".")
    if output.endswith("parquet"):
        table = parquet.read_table(output)
    else:
        reading = csv.ReadOptions(encoding="cp1252" if delimiter == ";" else "utf8")
        table = csv.read_csv(output, reading, form, decimals)
    return {name: table.column(name).to_numpy() for name in table.column_names}


CLASSES = ("--label", "ill", "--classes", "no", "yes", "--features", "age", "job")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "output"),
    [("head", "predictions.csv"), ("boosting", "p.parquet"), ("head", "p.csv.gz")],
)
def test_classes_by_name(data, capsys, method, output):
    train(*CLASSES, "--method", method)
    capsys.readouterr()
    found = predicted("out", "data.csv", output=output)
    printed = capsys.readouterr()
    assert list(found) == ["id", "prediction", "probability_no", "probability_yes"]
    assert np.array_equal(found["id"], np.arange(N))
    assert np.mean(found["prediction"] == ILL) > 0.9
    np.testing.assert_allclose(found["probability_no"] + found["probability_yes"], 1.0, atol=1e-5)
    model = ldp.load_model("out/model.keras")
    batch = {"age": AGE.reshape(-1, 1), "job": tf.constant(JOB.reshape(-1, 1))}
    expected = model.predict(batch, verbose=0)
    np.testing.assert_allclose(found["probability_yes"], expected[:, 1], atol=1e-5)
    assert f"wrote 1,200 rows to {output}" in printed.out and printed.err == ""
    assert "of the model, and of these predictions: NOT PRIVATE: seeded" in printed.out


def test_numbers_of_a_parquet_table_with_other_columns(data):
    train("--label", "days", "--low", "0", "--high", "30", "--drop", "id", "ill")
    columns = {"job": pa.array(JOB).dictionary_encode(), "more": AGE, "age": AGE}
    parquet.write_table(pa.table(columns), "new.parquet")
    found = predicted("out/model.keras", "new.parquet")
    assert list(found) == ["row", "prediction"] and np.array_equal(found["row"], np.arange(N))
    assert np.mean((found["prediction"] - AGE / 3) ** 2) < 0.3 * np.var(AGE / 3)


def test_missing_cells_and_forms_of_excel(data):
    text = (data / "data.csv").read_text()
    (data / "data.csv").write_text(text.replace(f"0,{AGE[0]},", "0,,", 1))
    train(*CLASSES)
    text = "Nr;job;age;\u00e9\nx;nurse;30,5;1\ny;;;2\nz;new;80,0;3\n"
    (data / "new.csv").write_bytes(text.encode("cp1252"))
    found = predicted("out", "new.csv", "--id", "Nr", "\u00e9", delimiter=";")
    assert list(found)[:2] == ["Nr", "\u00e9"] and found["Nr"].tolist() == ["x", "y", "z"]
    assert np.isfinite(found["probability_yes"]).all()
    assert found["prediction"].tolist()[0] == "no"


@pytest.mark.slow
def test_models_of_python(data):
    """Those of to_keras() name their classes, and the columns of a table without text."""
    frame = {"age": AGE, "half": AGE / 2}
    codes = (AGE > 50).astype(int)
    head = ldp.PrivateLogisticRegression(8.0, 1e-5, classes=[3, 7], insecure_seed=0)
    x = np.stack([(AGE - 54) / 20, RNG.normal(size=N)], axis=1).astype(np.float32)
    head.fit(x, np.array([3, 7])[codes])
    head.to_keras().save(data / "head.keras")
    parquet.write_table(pa.table({"a": x[:, 0], "b": x[:, 1]}), "rows.parquet")
    found = predicted("head.keras", "rows.parquet")
    assert list(found) == ["row", "prediction", "probability_3", "probability_7"]
    assert np.mean(found["prediction"] == np.array([3, 7])[codes]) > 0.9
    door = ldp.PrivateClassifier(8.0, num_classes=2, insecure_seed=0).fit(frame, codes)
    door.to_keras().save(data / "door.keras")
    assert ModelFacts.of_file("door.keras") == {"columns": ["age", "half"], "classes": [0, 1]}
    ldp.load_model("door.keras").save("again.keras")  # and so does a copy
    assert ModelFacts.of_file("again.keras") == ModelFacts.of_file("door.keras")
    parquet.write_table(pa.table({"half": AGE / 2, "age": AGE}), "rows.parquet")
    assert (
        np.mean(predicted("again.keras", "rows.parquet", "--overwrite")["prediction"] == codes)
        > 0.9
    )


def test_a_model_without_classes_in_its_file(data, capsys):
    inputs = keras.Input((2,))
    keras.Model(inputs, keras.layers.Dense(3)(inputs)).save("plain.keras")
    parquet.write_table(pa.table({"a": AGE, "b": AGE}), "rows.parquet")
    found = predicted("plain.keras", "rows.parquet")
    assert list(found) == ["row", "output_0", "output_1", "output_2"]
    assert "remark: the model's file names no classes" in capsys.readouterr().err


def nowhere(y_true, y_pred):
    """A loss that the command does not find."""
    return keras.ops.mean(y_pred, axis=-1)


@pytest.mark.slow
def test_a_model_of_unknown_weights_has_no_promise(data, capsys):
    """Neither has one that went on training in the clear, nor one of a loss that is not there."""
    inputs = keras.Input((2,))
    model = keras.Model(inputs, keras.layers.Dense(2)(inputs))
    model.save("fresh.keras")
    x, y = np.zeros((9, 2), np.float32), np.zeros(9, int)
    labels = ldp.PrivateLabels(y, 2, budget=ldp.PrivacyBudget(1.0))
    noisy = labels.randomize(ldp.RandomizedResponse(1.0, 2))
    model.compile("sgd", keras.losses.CategoricalCrossentropy(from_logits=True))
    ldp.fit(model, x, noisy, verbose=0)
    model.save("noisy.keras")
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    model.fit(x, y, verbose=0)
    model.save("clear.keras")
    model.compile("sgd", nowhere)
    model.fit(x, y, verbose=0)
    model.save("lost.keras")
    parquet.write_table(pa.table({"a": AGE, "b": AGE}), "rows.parquet")
    for name, promise in (
        ("fresh", "No promise: the model's file has no receipts, so what its weights"),
        ("noisy", "The promise of the model, and of these predictions: (1, 0)-label-DP"),
        ("clear", "of these predictions: NOT PRIVATE: nothing is promised"),
        ("lost", "No promise: the model's file cannot be loaded as compiled"),
    ):
        capsys.readouterr()
        predicted(f"{name}.keras", "rows.parquet", "--overwrite")
        printed = capsys.readouterr().out
        assert promise in printed and "(0, 0)" not in printed


@pytest.mark.slow
def test_stderr_is_empty(data):
    """No line of TensorFlow's log, whatever the level of the caller."""
    train(*CLASSES)
    env = {name: value for name, value in os.environ.items() if name != "TF_CPP_MIN_LOG_LEVEL"}
    done = subprocess.run(
        [sys.executable, "-m", "tf_labeldp.cli", "predict", "out", "data.csv"],
        env={**env, "PYTHONPATH": str(Path(__file__).parents[2])},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stderr == "" and "wrote 1,200 rows to predictions.csv" in done.stdout


@pytest.mark.slow
def test_images(data):
    (data / "images").mkdir()
    lines = ["name,class"]
    for i in range(120):
        image = np.zeros((8, 8, 1), np.uint8)
        image[:, 4 * (i % 2) : 4 * (i % 2) + 4] = RNG.integers(100, 255)
        (data / "images" / f"{i}.png").write_bytes(tf.io.encode_png(image).numpy())
        lines.append(f"{i}.png,{i % 2}")
    (data / "data.csv").write_text("\n".join(lines) + "\n")
    files = ("--images", "images", "--file", "name")
    train("--label", "class", "--num-classes", "2", *files)
    found = predicted("out", "data.csv", *files, "--id", "name")
    assert np.mean(found["prediction"] == np.arange(120) % 2) > 0.9 and found["name"][7] == "7.png"
    assert main(["predict", "out", "data.csv", "--overwrite"]) == 2


@pytest.mark.slow
def test_bad_input_is_one_line_and_writes_nothing(data, capsys):
    train(*CLASSES)
    capsys.readouterr()
    (data / "few.csv").write_text("id,age\n1,30\n")
    (data / "text.csv").write_text("id,age,job\n1,30,nurse\n2,45%,smith\n")
    (data / "ragged.csv").write_text("id,age,job\n1,30,nurse\n2,30\n")
    (data / "empty.csv").write_text("")
    (data / "broken.keras").write_bytes(b"no model")
    (data / "named.csv").write_text("prediction,age,job\n1,30,nurse\n")
    (data / "twice.csv").write_text("id,age,age,job\n1,30,31,nurse\n")
    for words, message in (
        (("gone", "data.csv"), "there is no model gone; give the output of tf-labeldp train"),
        (("broken.keras", "data.csv"), "broken.keras"),
        (("out", "gone.csv"), "the input gone.csv does not exist"),
        (("out", "empty.csv"), "is empty; give a CSV file with a header line"),
        (("out", "few.csv"), "the table lacks 1 column that the model takes: job; add them"),
        (
            ("out", "text.csv"),
            "the model takes numbers in column age, got text in 1 cell, the first in row 3 "
            "(the header is row 1): '45%'",
        ),
        (("out", "twice.csv"), "the column age: the table has 2 columns of this name"),
        (("out", "ragged.csv"), "has 2 cells in row 3 (the header is row 1), but 3 columns"),
        (("out", "data.csv", "--id", "name"), "--id name: the table has 0 columns of this name"),
        (("out", "named.csv", "--id", "prediction"), "the predictions have a column of this name"),
        (("out", "data.csv", "--images", "x"), "--images DIR and --file NAME go together"),
        (("out", "data.csv", "--images", "x", "--file", "id"), "leave out --images and --file"),
        (("out", "data.csv", "--output", "p.txt"), "the format of --output p.txt is not known"),
        (("out", "data.csv", "--output", "no/p.csv"), "cannot write --output no/p.csv"),
        (("out", "data.csv", "--output", "data.csv"), "data.csv exists; give another --output"),
    ):
        assert main(["predict", *words]) == 2, message
        error = capsys.readouterr().err
        assert message in error and error.startswith("tf-labeldp predict: error: ")
        assert error.count("\n") == 1
        assert not (data / "predictions.csv").exists() and not list(data.glob(".*"))
