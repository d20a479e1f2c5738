"""``tf-labeldp train``: models with statements from tables and images."""

from __future__ import annotations

import json
import os
import pathlib
import re
import subprocess
import sys
import warnings
import zipfile

import keras
import numpy as np
import pyarrow as pa
import pytest
import tensorflow as tf
from pyarrow import parquet

import tf_labeldp as ldp
from tf_labeldp.cli import main
from tf_labeldp.plugins import Ledger

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
"""--drop twice, as in version 0.2; it also takes several names."""


@pytest.mark.slow
def test_a_table_with_names_of_classes(csv, capsys):
    assert command(csv, *NAMES, "--evaluate", "1") == 0
    shown = capsys.readouterr()
    printed, out = shown.out, csv.parent / "out"
    # The columns are on stderr before the release, and printed once.
    columns = "2 features: age (number), job (text); left out: id, days"
    assert shown.err.count(columns) == 1 and columns not in printed
    card = (out / "README.md").read_text()
    assert f"{columns}." in card and "NOT PRIVATE: seeded" in card
    assert "NOT PRIVATE: seeded" in printed and "held out: accuracy" in printed
    card = json.loads((out / "privacy.json").read_text())
    assert card["guarantee"]["epsilon"] == pytest.approx(2.0) and card["guarantee"]["seeded"]
    assert [metric["metric"] for metric in card["metrics"]] == ["accuracy"]
    model = keras.models.load_model(out / "model.keras")
    assert ldp.guarantee(model).epsilon == pytest.approx(2.0)
    features = {"age": AGE.reshape(-1, 1), "job": JOB.astype(object).reshape(-1, 1)}
    features["job"] = tf.constant(JOB.reshape(-1, 1))
    predicted = model.predict(features, verbose=0).argmax(axis=1)
    assert np.mean(np.array(["no", "yes"])[predicted] == ILL) > 0.85


def test_trees_if_they_are_asked_for(csv, capsys):
    assert command(csv, *NAMES, "--method", "boosting", epsilon="3") == 0
    assert "You chose --method boosting." in capsys.readouterr().out
    model = keras.models.load_model(csv.parent / "out" / "model.keras")
    assert ldp.guarantee(model).epsilon == pytest.approx(3.0)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["boosting", "head", "auto"])
def test_an_untouched_output_is_verified(csv, method):
    """With trees or a head, with an evaluation or without, and against the store."""
    number = ("--label", "days", "--low", "0", "--high", "30", "--drop", "id")
    options = (*(number if method == "auto" else NAMES), "--method", method)
    for output, more in (("a", ()), ("b", ("--evaluate", "0.5")), ("c", ("--evaluate", "4"))):
        store = csv.parent / f"{output}-store"
        out = csv.parent / output
        assert command(csv, *options, *more, "--store", str(store), output=output) == 0
        assert ldp.dossier.verify(out).problems == ()
        assert ldp.dossier.verify(out, store=store).problems == ()
        stated = ldp.PrivacyGuarantee.from_json((out / "privacy.json").read_text())
        promise = ldp.dossier.report(store, published=[out]).statement
        assert stated.epsilon == pytest.approx(promise.epsilon, rel=1e-3)
        assert main(["verify", str(out)]) == 0


@pytest.mark.slow
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
    assert "Use --metric average_precision." in capsys.readouterr().out


@pytest.mark.slow
def test_a_column_of_any_name_costs_nothing_in_vain(csv, capsys):
    header, rows = csv.read_text().split("\n", 1)
    csv.write_text(header.replace("age", "price/unit").replace("job", "what he does") + "\n" + rows)
    assert command(csv, *NAMES) == 0
    shown = capsys.readouterr().err
    assert "inputs" not in shown and len(shown.splitlines()) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        ldp.load_model(csv.parent / "out" / "model.keras")
    words = [str(csv), "--output", str(csv.parent / "predictions.csv")]
    assert main(["predict", str(csv.parent / "out"), *words]) == 0
    assert main(["verify", str(csv.parent / "out")]) == 0
    assert capsys.readouterr().err == ""
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


@pytest.mark.slow
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
    assert command(path, *NAMES[:5], output="other") == 0
    assert "flag (number), place (text), day (date, in days)" in capsys.readouterr().err
    parquet.write_table(pa.table({**columns, "lists": [[1]] * N}), path)
    assert command(path, *NAMES[:5], output="third") == 2
    assert "column 'lists' must be numbers, text or dates" in capsys.readouterr().err


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


@pytest.mark.slow
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
    shown = capsys.readouterr().err
    assert "has a release of these labels made with other settings or columns" in shown
    assert "give the settings and columns of that run, or a new --store" in shown
    assert not (csv.parent / "third").exists()


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
        (
            ("--label", "age", "--low", "0", "--high", "99"),
            "--label age: 120 of 1200 labels are missing; fill them",
        ),
        (("--label", "sick", "--num-classes", "2"), "has 0 columns of this name"),
        ((*NAMES, "--drop", "name"), "--drop name"),
        ((*NAMES, "--images", "x"), "go together"),
        ((*NAMES, "--clip"), "--clip is for labels that are numbers"),
        (("--label", "ill", "--classes", "no", "maybe"), "labels are none of the 2 --classes"),
        (("--label", "days", "--low", "0", "--high", "10"), "labels"),
        (
            ("--label", "days", "--low", "-1", "--high", "9", "--loss", "poisson"),
            "--loss poisson needs labels of zero or more",
        ),
        ((*NAMES, "--metric", "auc"), "--metric auc needs --evaluate EPSILON"),
        (
            (*NAMES, "--evaluate", "1", "--metric", "mse"),
            "--metric must be one of accuracy, log_loss, brier, auc",
        ),
        (
            (*NAMES[:5], "x", "--evaluate", "1", "--metric", "average_precision"),
            "is for two classes, these labels have 3. Use 'f1' or 'auc'",
        ),
        ((*NAMES, "--delta", "0", "--store", "store"), "--delta must be in (0, 1), got 0"),
    ):
        assert command(csv, *options) == 2
        error = capsys.readouterr().err.strip().splitlines()[-1]
        assert message in error and error.startswith("tf-labeldp train: error: ")
        assert not (csv.parent / "out").exists()
    (csv.parent / "out").mkdir()
    (csv.parent / "out" / "mine").write_text("x")
    assert command(csv, *NAMES) == 2
    assert "not empty" in capsys.readouterr().err


def test_a_table_without_a_header_shows_no_cell(csv, capsys):
    """Its first row, with a label, is taken for the names of the columns."""
    names, *rows = csv.read_text().splitlines()
    csv.write_text("\n".join(rows[1:]) + "\n")
    for options in (NAMES, ("--label", "sick", "--classes", "no", "yes")):
        assert command(csv, *options) == 2
        error = capsys.readouterr().err
        assert "has 0 columns of this name; check its header" in error
        assert not {*rows[1].split(",")} & {*re.split(r"[ ,]+", error)}
    csv.write_text("\n".join([names, *rows]) + "\n")
    assert command(csv, "--label", "ills", *NAMES[2:]) == 2
    assert "do you mean ill?" in capsys.readouterr().err


def test_bad_files(tmp_path, capsys):
    for name, content, message in (
        ("data.txt", "a,ill\n1,no\n", "not known by its name"),
        ("gone.csv", None, "does not exist; check the path"),
        ("empty.csv", "", "is empty; give a CSV file with a header line"),
        ("header.csv", "a,ill\n", "has no rows below its header line"),
        ("ragged.csv", "a,ill\n1,no\n1,no,secret\n", "has 3 cells in row 3 (the header is row 1)"),
        ("excel.csv", "a,ill\n1,no\n".encode("utf-16"), "save UTF-16, as of Excel"),
        ("book.csv", b"PK\x03\x04\0secret", "is not UTF-8 text"),
        ("broken.parquet", b"PAR1 secret", "damaged, or not what its name says"),
        (
            "void.csv",
            "a,v,ill\n1,,no\n",
            "the column v has no value at all; leave it out: --drop v",
        ),
        ("alone.csv", "id,days,ill\n1,2,no\n", "no feature columns"),
    ):
        if content is not None:
            (tmp_path / name).write_bytes(content.encode() if isinstance(content, str) else content)
        drops = NAMES[5:] if name == "alone.csv" else ()
        assert command(tmp_path / name, *NAMES[:5], *drops) == 2
        error = capsys.readouterr().err
        assert message in error and "secret" not in error


@pytest.fixture
def leaky(csv):
    """A table with a column that is made from the label, and ids that are text."""
    header, *rows = csv.read_text().splitlines()
    cells = [row.split(",") for row in rows]
    rows = [f"P{row[0]},{','.join(row[1:])},{'A' if row[3] == 'yes' else 'B'}" for row in cells]
    csv.write_text("\n".join([f"{header},leak", *rows]) + "\n")
    return csv


@pytest.mark.slow
@pytest.mark.parametrize("method", ["head", "boosting"])
def test_columns_are_printed_and_ids_and_copies_of_the_label_are_named(leaky, capsys, method):
    words = ("--label", "ill", "--classes", "no", "yes", "--method", method)
    assert command(leaky, *words, "--drop", "days", epsilon="3") == 0
    shown = capsys.readouterr()
    assert "4 features: id (text), age (number), job (text), leak (text); left out: days" in (
        shown.err
    )
    assert "warning: the column id has 1,200 different values in 1,200 rows" in shown.err
    assert "leave it out: --drop id" in shown.err and "age has" not in shown.err
    named = "by the released model, the column leak alone predicts nearly all labels"
    assert f"warning: {named}" in shown.err and named not in shown.out
    assert shown.err.count("by the released model, the column") == 1
    card = (leaky.parent / "out" / "README.md").read_text()
    assert named in card and "4 features: id (text)" in card
    options = ("--drop", "id", "days", "leak")
    assert command(leaky, *words, *options, output="again", epsilon="3") == 0
    shown = capsys.readouterr()
    assert "warning" not in shown.err + shown.out.lower()


def test_a_number_that_is_the_label_in_another_unit(csv, capsys):
    words = ("--label", "days", "--low", "0", "--high", "30", "--drop", "id", "ill")
    assert command(csv, *words, epsilon="8") == 0
    assert "the column age alone predicts nearly all labels" in capsys.readouterr().err
    # A weak trend is no copy, though the predictions follow one column alone.
    rows = [line.rsplit(",", 1)[0] for line in csv.read_text().splitlines()]
    noise = RNG.uniform(0.0, 30.0, N)
    days = [f"{min(30.0, max(0.0, noise[i] + AGE[i] / 9)):.2f}" for i in range(N)]
    csv.write_text("\n".join(map(",".join, zip(rows, ["days", *days], strict=True))) + "\n")
    assert command(csv, *words, output="weak", epsilon="8") == 0
    assert "predicts nearly all" not in capsys.readouterr().err


@pytest.mark.slow
def test_warnings_read_released_values_alone(csv, capsys):
    """Two tables with other labels and one release give the same warnings."""
    from tf_labeldp.vault import PrivateLabels

    printed = []
    store, kept = csv.parent / "private", PrivateLabels.release
    released = []

    def release(self, *arguments, **options):
        released.append(kept(self, *arguments, **options) if not released else released[0])
        return released[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PrivateLabels, "release", release)
        for name in ("first", "second"):
            assert command(csv, *NAMES, "--method", "head", output=name) == 0
            printed.append(capsys.readouterr())
            csv.write_text(csv.read_text().replace(",yes,", ",no,"))
    assert len(released) == 2 and printed[0].err == printed[1].err and not store.exists()
    first, second = (each.out.partition("\n\n")[0] for each in printed)
    assert first == second


def test_features_that_are_chosen(csv, capsys):
    words = NAMES[:5]
    assert command(csv, *words, "--features", "job", "age") == 0
    assert "2 features: job (text), age (number); left out: id, days" in capsys.readouterr().err
    model = keras.models.load_model(csv.parent / "out" / "model.keras")
    assert set(model.input) == {"job", "age"}
    for options, message in (
        (("--features", "job", "--drop", "id"), "not allowed with argument --features"),
        (("--features", "job", "jbo"), "--features jbo: the table has 0 columns of this name"),
        (("--features", "ill", "age"), "--features ill is the column of --label"),
    ):
        assert command(csv, *words, *options, output="other") == 2
        assert message in capsys.readouterr().err


@pytest.mark.slow
def test_columns_of_numbers_that_have_become_text(csv, capsys):
    """German hospitals write k.A. for an unknown number."""
    header, first, second, *rows = csv.read_text().splitlines()
    second = f"1,k.A.,{second.split(',', 2)[2]}"
    csv.write_text("\n".join([header, first, second, *rows]) + "\n")
    assert command(csv, *NAMES, "--method", "head") == 0
    found = (
        "warning: the column age is text: 1,079 of 1,080 cells are numbers, the first other one is "
        "'k.A.' in row 3 (the header is row 1)"
    )
    shown = capsys.readouterr().err
    assert found in shown and "like an id" not in shown and shown.count("warning") == 1
    csv.write_text(csv.read_text().replace("k.A.", ""))
    assert command(csv, *NAMES, "--method", "head", output="numbers") == 0
    assert "warning" not in capsys.readouterr().err
    new = csv.parent / "new.csv"
    new.write_text("age,job\n30.5,nurse\n45%,smith\n03.04.2024,smith\n")
    words = [str(new), "--output", str(csv.parent / "predictions.csv")]
    assert main(["predict", str(csv.parent / "numbers"), *words]) == 2
    message = (
        "takes numbers in column age, got text in 2 cells, the first in row 3 (the header is row 1)"
    )
    assert f"{message}: '45%'" in capsys.readouterr().err


@pytest.mark.parametrize("form", ["separator at each line end", "sep=;"])
def test_more_forms_of_excel(csv, capsys, form):
    text = csv.read_text().replace(",", ";")
    if form == "sep=;":
        csv.write_bytes(b"\xef\xbb\xbfsep=;\r\n" + text.replace("\n", "\r\n").encode())
    else:
        csv.write_text(text.replace("\n", ";\n"))
    assert command(csv, *NAMES, "--method", "head") == 0
    shown = capsys.readouterr().err
    assert "2 features: age (number), job (text); left out: id, days" in shown
    assert ("without a name and without cells" in shown) == (form != "sep=;")
    if form == "sep=;":
        task = ("--task", "classification", "--column", "ill", "--classes", "no", "yes")
        output = ("--epsilon", "1", "--output", str(csv.parent / "noisy.csv"))
        assert main(["randomize", str(csv), *task, *output]) == 0


def test_labels_with_spaces_show_none_of_them(csv, capsys):
    csv.write_text(csv.read_text().replace(",yes,", ", yes,").replace(",no,", ", no,"))
    assert command(csv, *NAMES) == 2
    shown = capsys.readouterr().err
    assert "1200 of 1200 labels are none of the 2 --classes" in shown
    assert "spaces around the names" in shown and "yes" not in shown
    assert "for whole numbers give --num-classes" in shown
    csv.write_text(csv.read_text().replace(", yes,", ",yes,").replace(", no,", ",no,", 1))
    assert command(csv, "--label", "ill", "--classes", "yes", " no") == 2
    assert "1 of 1200 labels is none of the 2 --classes; add" in capsys.readouterr().err


def test_errors_name_options_and_no_arguments_of_python(csv, capsys):
    days = ("--label", "days", "--low", "0", "--high", "10", "--drop", "id", "ill")
    for options, message in (
        ((*NAMES[:2], "--classes", "no", "maybe"), "are none of the 2 --classes; add what is"),
        (days, "lie outside --low 0 to --high 10; widen the range, or give --clip"),
        (
            (*NAMES, "--metric", "mae", "--evaluate", "1"),
            "confusion_matrix, calibration, got 'mae'.",
        ),
        ((*NAMES, "--method", "boosting", "--epsilon", "0.01"), "Use --method head"),
    ):
        assert command(csv, *options) == 2
        error = capsys.readouterr().err.strip().splitlines()[-1]
        assert message in error and not re.search(r"\b(?!epsilon)[a-z_]+=|np\.clip|Private", error)


@pytest.mark.slow
@pytest.mark.parametrize("point", ["fit", "save", "report"])
def test_a_training_that_was_killed_goes_on(csv, capsys, monkeypatch, point):
    """The same command again, without other options; the release is not drawn twice."""
    from tf_labeldp.front_door import PrivateClassifier

    store = csv.parent / "private"
    words = (*NAMES, "--store", str(store), "--method", "head")

    def killed(*arguments, **options):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        if point == "fit":
            patch.setattr(PrivateClassifier, "fit", killed)
        elif point == "save":
            patch.setattr(PrivateClassifier, "to_keras", killed)
        else:
            patch.setattr(sys.stdout, "write", killed)
        assert command(csv, *words) == 130
    draws = {path: path.read_bytes() for path in store.glob("records/[0-9]*")}
    assert (csv.parent / "out" / ".unfinished").exists()
    assert command(csv, *words) == 0
    names = {path.name for path in (csv.parent / "out").iterdir()}
    assert names == {"model.keras", "privacy.json", "README.md"}
    again = {path: path.read_bytes() for path in store.glob("records/[0-9]*")}
    assert {path: again[path] for path in draws} == draws
    assert ldp.guarantee(csv.parent / "out" / "model.keras").epsilon == pytest.approx(2.0)
    assert command(csv, *words) == 2
    assert "exists and is not empty" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("share", [16, pytest.param(1, marks=pytest.mark.exhaustive)])
def test_an_error_at_any_step_after_the_charge_loses_no_release(
    tmp_path, share, capsys, failing_after_release
):
    """The same command finishes with the release of its first run, whatever failed in between."""
    path, store = tmp_path / "small.csv", tmp_path / "private"
    path.write_text("age,ill\n" + "".join(f"{20 + i},{i % 3 % 2}\n" for i in range(60)))
    words = ("--label", "ill", "--num-classes", "2", "--evaluate", "1", "--store", str(store))

    def train():
        if not codes or codes[-1]:
            codes.append(main(["train", str(path), "--epsilon", "1", *words, *output]))

    codes: list[int] = []
    output = ("--output", str(tmp_path / "out"))
    steps = failing_after_release(train, share=share)
    assert len(steps) > 80 and codes[-1] == 0
    assert len(codes) > 5 and set(codes) <= {0, 2}
    charged = [each for each in Ledger.of_store(store).records if each.receipt is not None]
    assert len(charged) == 2  # the model and its evaluation
    printed = capsys.readouterr()
    assert "injected" not in printed.out + printed.err
    assert ldp.guarantee(tmp_path / "out" / "model.keras").epsilon == pytest.approx(1.0)


def test_a_column_that_is_empty_where_it_is_looked_at(tmp_path, capsys):
    """A release that is paid for is saved before its warnings, and no check ends the command."""
    # Row 1 is not among the evenly spaced rows that are looked at.
    lines = [f"{i % 7},{'1.5' if i == 1 else ''},{i % 2}" for i in range(8200)]
    path = tmp_path / "rare.csv"
    path.write_text("\n".join(["age,rare,ill", *lines]) + "\n")
    assert command(path, "--label", "ill", "--num-classes", "2", "--method", "head") == 0
    assert "predicts nearly all labels" not in capsys.readouterr().err
    assert ldp.guarantee(tmp_path / "out" / "model.keras").epsilon == pytest.approx(2.0)


def test_a_check_of_a_released_model_that_fails_is_a_warning(csv, capsys, monkeypatch):
    monkeypatch.setattr(ldp.PrivateLogisticRegression, "predict_proba", lambda *unused: 1 / 0)
    assert command(csv, *NAMES, "--method", "head") == 0
    shown, card = capsys.readouterr().err, (csv.parent / "out" / "README.md").read_text()
    for what in ("whether a column is a copy of the label", "whether a class is rare"):
        text = f"{what} was not checked: unexpected ZeroDivisionError"
        assert f"warning: {text}" in shown and text in card
    assert ldp.guarantee(csv.parent / "out" / "model.keras").epsilon == pytest.approx(2.0)


@pytest.mark.slow
def test_a_killed_training_leaves_no_statement_of_another_model(csv, monkeypatch):
    """Run 1 is killed at its page, and run 2, at another epsilon, after its model."""

    def killed(*arguments, **options):
        raise KeyboardInterrupt

    out = csv.parent / "out"
    for name, epsilon in (("README.md", "2"), ("privacy.json", "8")):
        replace = os.replace

        def one_fails(source, target, name=name, replace=replace):
            return killed() if pathlib.Path(target).name == name else replace(source, target)

        with monkeypatch.context() as patch:
            patch.setattr(os, "replace", one_fails)
            assert command(csv, *NAMES, "--method", "head", epsilon=epsilon) == 130
        found = {path.name for path in out.iterdir()} - {".unfinished"}
        assert found == {"model.keras"} | ({"privacy.json"} if epsilon == "2" else set())
    assert ldp.guarantee(out / "model.keras").epsilon == pytest.approx(8.0)


def test_a_store_below_the_output_is_a_warning(csv, capsys):
    out = csv.parent / "out"
    assert command(csv, *NAMES, "--store", str(out / "private")) == 0
    assert "is below the folder of --output" in capsys.readouterr().err
    assert {"private", "model.keras"} < {path.name for path in out.iterdir()}
    assert command(csv, *NAMES, "--store", str(csv.parent / "s"), output="s/out") == 2
    assert "the store stays with the labels" in capsys.readouterr().err


@pytest.mark.parametrize("form", ["semicolons", "Latin-1"])
def test_tables_as_excel_writes_them(csv, capsys, form):
    text = csv.read_text().replace("nurse", "infirmière").replace("age", "âge")
    if form == "semicolons":
        text = text.replace(",", ";").replace(".", ",")
    csv.write_bytes(text.encode("utf-8" if form == "semicolons" else "cp1252"))
    assert command(csv, *NAMES) == 0
    shown = capsys.readouterr().err
    assert f"remark: {csv}" in shown and form in shown and "âge (number), job (text)" in shown
    with zipfile.ZipFile(csv.parent / "out" / "model.keras") as file:
        assert "infirmi" in json.dumps(json.loads(file.read("config.json")), ensure_ascii=False)


# Some lines of TensorFlow 2.21 have no level; 2 is the level of `make demo`.
@pytest.mark.slow
@pytest.mark.parametrize("level", [{}, {"TF_CPP_MIN_LOG_LEVEL": "2"}], ids=["unset", "2"])
def test_nothing_of_tensorflow_is_on_stderr(csv, level):
    words = ["train", str(csv), *NAMES, "--epsilon", "2", "--output", str(csv.parent / "out")]
    env = {name: value for name, value in os.environ.items() if name != "TF_CPP_MIN_LOG_LEVEL"}
    env |= level
    command_line = [sys.executable, "-m", "tf_labeldp.cli", *words]
    done = subprocess.run(command_line, capture_output=True, text=True, env=env, check=True)
    assert done.stderr == "2 features: age (number), job (text); left out: id, days\n"
    assert "label-DP" in done.stdout


@pytest.mark.parametrize("form", ["csv", "parquet"])
def test_booleans_are_names_of_classes_as_randomize_reads_them(tmp_path, form):
    """In any spelling: pandas writes False, R FALSE, and Parquet has a type of its own."""
    path = tmp_path / f"data.{form}"
    for spelling in (str, str.upper, str.lower) if form == "csv" else (str,):
        labels = [spelling(str(age > 50)) for age in AGE[:200]]
        if form == "parquet":
            parquet.write_table(pa.table({"age": AGE[:200], "ill": AGE[:200] > 50}), path)
        else:
            rows = [f"{age:.1f},{label}" for age, label in zip(AGE[:200], labels, strict=True)]
            path.write_text("\n".join(["age,ill", *rows]) + "\n")
        for classes in (("False", "True"), ("true", "false")):
            name = f"{spelling.__name__}-{classes[0]}"
            label = ("--label", "ill", "--method", "head")
            assert command(path, *label, "--classes", *classes, output=name) == 0
            options = ("--column", "ill", "--epsilon", "20", "--output")
            noisy = str(tmp_path / f"{name}.csv")
            task = ("randomize", str(path), "--task", "classification", "--classes", *classes)
            assert main([*task, *options, noisy]) == 0
            drawn = pathlib.Path(noisy).read_text().split()[1:]
            found = [row.rpartition(",")[2] == classes[-1] for row in drawn]
            assert found == [(age > 50) == (classes[-1].lower() == "true") for age in AGE[:200]]


def test_names_of_classes_keep_their_zeros(tmp_path):
    rows = [f"{age:.1f},{'01' if age > 50 else '1.0'}" for age in AGE[:200]]
    (tmp_path / "data.csv").write_text("\n".join(["age,ill", *rows]) + "\n")
    label = ("--label", "ill", "--classes", "01", "1.0", "--method", "head")
    assert command(tmp_path / "data.csv", *label) == 0
