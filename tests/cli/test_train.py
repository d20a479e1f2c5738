"""``tf-labeldp train``: models with statements from tables and images."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import keras
import numpy as np
import pyarrow as pa
import pytest
import tensorflow as tf
from pyarrow import parquet

import tf_labeldp as ldp
from tf_labeldp.cli import main

N = 1200
RNG = np.random.default_rng(4)
AGE = RNG.uniform(18.0, 90.0, N)
JOB = RNG.choice(["nurse", "smith"], N)
ILL = np.where(AGE + 20 * (JOB == "smith") > 60, "yes", "no")


@pytest.fixture
def csv(tmp_path):
    """A table with ids, numbers of which some are missing, texts and labels."""
    lines = ["id,age,job,ill,days"]
    for i in range(N):
        age = "" if i % 10 == 0 else f"{AGE[i]:.1f}"
        lines.append(f"{i},{age},{JOB[i]},{ILL[i]},{AGE[i] / 3:.2f}")
    path = tmp_path / "data.csv"
    path.write_text("\n".join(lines) + "\n")
    return path


def command(path, *options, output="out", epsilon="2"):
    words = ["train", str(path), "--epsilon", epsilon, "--insecure-seed", "0", *options]
    return main([*words, "--output", str(path.parent / output)])


NAMES = ("--label", "ill", "--classes", "no", "yes", "--drop", "id", "--drop", "days")


def test_a_table_with_names_of_classes(csv, capsys):
    assert command(csv, *NAMES, "--evaluate", "1") == 0
    printed = capsys.readouterr().out
    out = csv.parent / "out"
    assert (out / "report.txt").read_text().strip() == printed.strip()
    assert "NOT PRIVATE: seeded" in printed and "held out: accuracy" in printed
    stated = json.loads((out / "privacy.json").read_text())
    assert stated["epsilon"] == pytest.approx(2.0) and stated["seeded"]
    model = keras.models.load_model(out / "model.keras")
    assert ldp.guarantee(model).epsilon == pytest.approx(2.0)
    features = {"age": AGE.reshape(-1, 1), "job": JOB.astype(object).reshape(-1, 1)}
    features["job"] = tf.constant(JOB.reshape(-1, 1))
    predicted = model.predict(features, verbose=0).argmax(axis=1)
    assert np.mean(np.array(["no", "yes"])[predicted] == ILL) > 0.85


def test_trees_if_they_are_asked_for(csv, capsys):
    assert command(csv, *NAMES, "--method", "boosting", epsilon="3") == 0
    assert "You chose method='boosting'." in capsys.readouterr().out
    model = keras.models.load_model(csv.parent / "out" / "model.keras")
    assert ldp.guarantee(model).epsilon == pytest.approx(3.0)


def test_a_rare_class_and_its_metric(csv, capsys):
    header, *rows = csv.read_text().splitlines()
    rows = [row.replace(",yes,", ",no,") for row in rows]
    rows = [row.replace(",no,", ",yes,") if AGE[i] > 88.0 else row for i, row in enumerate(rows)]
    csv.write_text("\n".join([header, *rows]) + "\n")
    options = ("--evaluate", "8", "--metric", "average_precision")
    assert command(csv, *NAMES, *options, epsilon="8") == 0
    printed = capsys.readouterr().out
    assert "held out: average_precision" in printed and "a share of" not in printed
    assert command(csv, *NAMES, epsilon="8", output="again") == 0
    assert 'Use evaluation_metric="average_precision"' in capsys.readouterr().out


def test_a_column_of_any_name_costs_nothing_in_vain(csv, capsys):
    header, rows = csv.read_text().split("\n", 1)
    csv.write_text(header.replace("age", "price/unit").replace("job", "what he does") + "\n" + rows)
    assert command(csv, *NAMES) == 0, capsys.readouterr().err
    with pytest.warns(UserWarning, match="price/unit"):  # Keras, of the input's other name
        model = keras.models.load_model(csv.parent / "out" / "model.keras")
    features = {"price/unit": AGE.reshape(-1, 1), "what he does": tf.constant(JOB.reshape(-1, 1))}
    predicted = model.predict(features, verbose=0).argmax(axis=1)
    assert np.mean(np.array(["no", "yes"])[predicted] == ILL) > 0.85


def test_numbers_of_a_parquet_table(csv, capsys):
    columns = {"age": AGE, "job": JOB, "days": AGE / 3}
    path = csv.parent / "data.parquet"
    parquet.write_table(pa.table(columns), path)
    words = ("--label", "days", "--low", "0", "--high", "30", "--loss", "poisson")
    assert command(path, *words, "--evaluate", "1", "--method", "head") == 0
    assert "held out: mse" in capsys.readouterr().out
    model = keras.models.load_model(csv.parent / "out" / "model.keras")
    assert any("exponential" in str(layer.get_config()) for layer in model.layers)
    features = {"age": AGE.reshape(-1, 1), "job": tf.constant(JOB.reshape(-1, 1))}
    off = model.predict(features, verbose=0)[:, 0] - AGE / 3
    assert np.mean(off**2) < 0.3 * np.var(AGE / 3)


def test_columns_of_a_parquet_table_that_are_no_numbers(csv, capsys):
    """Missing texts, pandas' categories, flags, and more categories than are encoded apart."""
    places = np.char.add("p", np.r_[np.arange(1100), RNG.integers(0, 1100, N - 1100)].astype(str))
    columns = {
        "age": AGE,
        "job": pa.array(np.where(np.arange(N) % 3, JOB, None)),
        "level": pa.array(JOB).dictionary_encode(),
        "flag": AGE > 50,
        "place": places,
        "ill": ILL,
    }
    path = csv.parent / "data.parquet"
    parquet.write_table(pa.table(columns), path)
    assert command(path, *NAMES[:5]) == 0
    assert "Column 'place' has 1,100 categories, which are hashed" in capsys.readouterr().out
    model = keras.models.load_model(csv.parent / "out" / "model.keras")
    batch = {
        "age": AGE,
        "job": np.where(np.arange(N) % 3, JOB, "None"),
        **{"level": JOB, "flag": AGE > 50, "place": places},
    }
    batch = {name: tf.constant(values.reshape(-1, 1)) for name, values in batch.items()}
    predicted = model.predict(batch, verbose=0).argmax(axis=1)
    assert np.mean(np.array(["no", "yes"])[predicted] == ILL) > 0.85
    days = pa.array(np.arange(N).astype("datetime64[D]"))
    parquet.write_table(pa.table({**columns, "day": days}), path)
    assert command(path, *NAMES[:5], output="other") == 2
    assert "the column day has type date32" in capsys.readouterr().err


def test_a_folder_of_images(tmp_path, capsys):
    folder = tmp_path / "images"
    folder.mkdir()
    lines = ["name,class"]
    for i in range(120):
        image = np.zeros((8, 8, 1), np.uint8)
        image[:, 4 * (i % 2) : 4 * (i % 2) + 4] = RNG.integers(100, 255)
        (folder / f"{i}.png").write_bytes(tf.io.encode_png(image).numpy())
        lines.append(f"{i}.png,{i % 2}")
    path = tmp_path / "labels.csv"
    path.write_text("\n".join(lines) + "\n")
    options = ("--label", "class", "--num-classes", "2", "--images", str(folder), "--file", "name")
    assert command(path, *options, epsilon="8") == 0
    assert "Images: features of small patches" in capsys.readouterr().out
    model = keras.models.load_model(tmp_path / "out" / "model.keras")
    assert model.input_shape == (None, 8, 8, 1)
    (folder / "7.png").write_bytes(b"no image")
    assert command(path, *options, output="other") == 2
    assert "7.png is no image" in capsys.readouterr().err


def test_a_store_keeps_the_release(csv, capsys):
    store = ("--store", str(csv.parent / "private"))
    words = ["train", str(csv), *NAMES, "--epsilon", "1", *store, "--output"]
    for output in ("first", "second"):
        assert main([*words, str(csv.parent / output)]) == 0
    first, second = (
        keras.models.load_model(csv.parent / name / "model.keras").get_weights()
        for name in ("first", "second")
    )
    for weights, other in zip(first, second, strict=True):
        np.testing.assert_allclose(weights, other, rtol=1e-4, atol=1e-5)
    words[words.index("--epsilon") + 1] = "2"
    assert main([*words, str(csv.parent / "third")]) == 2
    assert "error" in capsys.readouterr().err


def test_an_output_that_cannot_be_made_costs_nothing(csv, capsys):
    (csv.parent / "file").write_text("mine")
    store = csv.parent / "private"
    assert command(csv, *NAMES, "--store", str(store), output="file/out") == 2
    assert "Not a directory" in capsys.readouterr().err
    assert store.exists() and list(store.glob("records/[0-9]*")) == []


def test_bad_input_is_one_line_and_writes_nothing(csv, capsys):
    for options, message in (
        (("--label", "ill"), "one of the arguments --num-classes --classes --low is required"),
        (("--label", "ill", "--classes", "no", "yes", "--low", "0"), "not allowed with argument"),
        (("--label", "days", "--low", "3"), "expected --low LOW and --high HIGH"),
        (("--label", "ill", "--num-classes", "2"), "not whole numbers; give --classes"),
        (("--label", "ill", "--low", "0", "--high", "1"), "not numbers"),
        (("--label", "age", "--low", "0", "--high", "99"), "120 labels are missing"),
        (("--label", "sick", "--num-classes", "2"), "has 0 columns of this name"),
        ((*NAMES, "--drop", "name"), "--drop name"),
        ((*NAMES, "--images", "x"), "go together"),
        ((*NAMES, "--clip"), "--clip is for labels that are numbers"),
        (("--label", "ill", "--classes", "no", "maybe"), "labels"),
        (("--label", "days", "--low", "0", "--high", "10"), "labels"),
        (
            ("--label", "days", "--low", "-1", "--high", "9", "--loss", "poisson"),
            "--loss poisson needs labels of zero or more",
        ),
        ((*NAMES, "--metric", "auc"), "--metric auc needs --evaluate EPSILON"),
        (
            (*NAMES, "--evaluate", "1", "--metric", "mse"),
            "is not for these labels; choose from acc",
        ),
        (
            (*NAMES[:5], "x", "--evaluate", "1", "--metric", "average_precision"),
            "--metric average_precision is for two classes, got 3",
        ),
        ((*NAMES, "--delta", "0", "--store", "store"), "--delta must be between 0 and 1, got 0"),
    ):
        assert command(csv, *options) == 2
        error = capsys.readouterr().err.strip().splitlines()[-1]
        assert message in error and error.startswith("tf-labeldp train: error: ")
        assert not (csv.parent / "out").exists()
    (csv.parent / "out").mkdir()
    (csv.parent / "out" / "mine").write_text("x")
    assert command(csv, *NAMES) == 2
    assert "not empty" in capsys.readouterr().err


def test_bad_files(tmp_path, capsys):
    for name, content, message in (
        ("data.txt", "a,ill\n1,no\n", "not known by its name"),
        ("gone.csv", None, "cannot be read"),
        ("empty.csv", "a,ill\n", "no rows"),
        ("ragged.csv", "a,ill\n1,no,secret\n", "cannot be read as a csv table"),
        ("alone.csv", "id,days,ill\n1,2,no\n", "no feature columns"),
    ):
        if content is not None:
            (tmp_path / name).write_text(content)
        drops = NAMES[5:] if name == "alone.csv" else ()
        assert command(tmp_path / name, *NAMES[:5], *drops) == 2
        error = capsys.readouterr().err
        assert message in error and "secret" not in error


# Some lines of TensorFlow 2.21 have no level; 2 is the level of `make demo`.
@pytest.mark.parametrize("level", [{}, {"TF_CPP_MIN_LOG_LEVEL": "2"}], ids=["unset", "2"])
def test_nothing_of_tensorflow_is_on_stderr(csv, level):
    words = ["train", str(csv), *NAMES, "--epsilon", "2", "--output", str(csv.parent / "out")]
    env = {name: value for name, value in os.environ.items() if name != "TF_CPP_MIN_LOG_LEVEL"}
    env |= level
    command_line = [sys.executable, "-m", "tf_labeldp.cli", *words]
    done = subprocess.run(command_line, capture_output=True, text=True, env=env, check=True)
    assert done.stderr == "" and "label-DP" in done.stdout
