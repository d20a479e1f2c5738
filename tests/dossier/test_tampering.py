"""Ways to tamper with each kind of published file, and what verification finds.

Each file has an untouched twin that is right. A way is resealed if its digests, which have no key,
are computed again.
"""

from __future__ import annotations

import hashlib
import io
import json
import re
import shutil
import zipfile
import zlib
from pathlib import Path

import h5py
import keras
import numpy as np
import pyarrow as pa
import pytest
from pyarrow import csv, parquet
from seals import sealed

import tf_labeldp as ldp
from tf_labeldp.cli import main

N = 60
RNG = np.random.default_rng(0)
LABELS = RNG.integers(2, size=N)
X = RNG.normal(size=(N, 4)).astype(np.float32)
X[:, 0] += 2.0 * LABELS
PRIORS = np.tile([0.4, 0.6], (N, 1))
RIGHT, WRONG, NOT_CHECKED = 0, 1, 3


def vault(path):
    return ldp.PrivateLabels(LABELS, 2, budget=ldp.PrivacyBudget(9.0, 1e-4), store=path / "store")


# The files, each in the folder ``file`` next to its ``store``.


def npz(path):
    noisy = vault(path).randomize(ldp.RRWithPrior(1.0, 2), priors=PRIORS)
    noisy.save(path / "file")
    return path / "file"


def _randomized(path, name, *inputs):
    rows = [f"{i},{label}" for i, label in enumerate(LABELS)]
    (path / "in").mkdir()
    for number, part in enumerate(np.array_split(rows, len(inputs))):
        (path / "in" / inputs[number]).write_text("\n".join(["id,y", *part]) + "\n")
    (path / "file").mkdir()
    output = path / "file" / name
    files = [str(path / "in" / each) for each in inputs]
    command = ["randomize", *files, "--column", "y", "--epsilon", "1", "--num-classes", "2"]
    command += ["--task", "classification", "--quiet", "--store", str(path / "store")]
    assert main([*command, "--output", str(output)]) == 0
    return output


def csv_table(path):
    return _randomized(path, "noisy.csv", "a.csv")


def parquet_table(path):
    return _randomized(path, "noisy.parquet", "a.csv")


def tables(path):
    return _randomized(path, "noisy", "a.csv", "b.csv")


def _network(path):
    noisy = vault(path).randomize(ldp.RandomizedResponse(2.0, 2))
    inputs = keras.Input((4,))
    hidden = keras.layers.Dense(3, activation="relu", name="hidden")(inputs)
    model = keras.Model(inputs, keras.layers.Dense(2, name="scores")(hidden), name="network")
    loss = keras.losses.CategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(0.01), loss)
    ldp.fit(model, X, noisy, targets="posterior", epochs=1, verbose=0)
    return model


def keras_file(path):
    _network(path).save(path / "network.keras")
    return path / "network.keras"


def card(path):
    model = _network(path)
    shares = keras.ops.convert_to_numpy(keras.ops.softmax(model(X)))
    scores = vault(path).evaluate(shares, "auc", 1.0, key="score")
    ldp.save(model, path / "file", metrics=[scores], data="Sixty rows.")
    return path / "file"


# Changes of one file.


def as_text(name, old, new):
    def change(path):
        file = path / name if name else path
        text = file.read_text()
        assert old in text
        file.write_text(text.replace(old, new, 1))

    return change


def extra(name, content=b"0,1,1"):
    def change(path):
        (path / name).parent.mkdir(exist_ok=True)
        (path / name).write_bytes(content)

    return change


def appended(name=""):
    def change(path):
        with (path / name if name else path).open("ab") as file:
            file.write(bytes(LABELS.astype(np.uint8)))

    return change


def reseal_noisy(path, change=lambda fields, arrays: None):
    """Changes noisy labels in a folder, and seals them again."""
    with np.load(path / "noisy_labels.npz") as content:
        arrays = dict(content)
    fields = json.loads((path / "noisy_labels.json").read_text())
    change(fields, arrays)
    np.savez(path / "noisy_labels.npz", **arrays)
    (path / "noisy_labels.json").write_text(sealed(fields, arrays))


def noisy(change):
    return lambda path: reseal_noisy(path, change)


def with_array(name, value):
    return noisy(lambda fields, arrays: arrays.update({name: value}))


def with_fields(**values):
    return noisy(lambda fields, arrays: fields.update(values))


def with_remark(fields, arrays):
    text = "labels " + "".join(map(str, LABELS))
    fields["remarks"] = [text]
    fields["guarantee"]["remarks"] = [text]
    fields["statement"].append(f"  remark: {text}")


def sorted_by_label(fields, arrays):
    order = np.argsort(LABELS, kind="stable")
    for name in ("values", "indices", "probabilities"):
        arrays[name] = arrays[name][order]


def with_comment(path):
    with zipfile.ZipFile(path, "a") as content:
        content.comment = b"0,1,1"


def between(path):
    """Writes bytes between two members of a zip file, where its list of members names none."""
    with zipfile.ZipFile(path) as content:
        parts = [(part, content.read(part)) for part in content.namelist()]
    with zipfile.ZipFile(path, "w") as content:
        for part, raw in parts:
            content.writestr(part, raw)
            content.fp.seek(content.start_dir)
            content.fp.write(b"0110")
            content.start_dir = content.fp.tell()


def statement_of(path):
    return path / "privacy.json" if path.is_dir() else path.with_name(path.name + ".privacy.json")


def reseal_table(path, change=lambda fields: None):
    """Changes the statement of tables, and seals them again."""
    statement = statement_of(path)
    fields = json.loads(statement.read_text())
    change(fields)
    files = [path / name for name in fields["files"]] if path.is_dir() else [path]
    values = np.concatenate([rows(file)["y"].to_numpy() for file in files])
    if "sha256" in fields:
        fields["sha256"] = [hashlib.sha256(file.read_bytes()).hexdigest() for file in files]
    arrays = {"values": values, "indices": np.arange(len(values))}
    statement.write_text(sealed(fields, arrays))


def rows(path):
    return parquet.read_table(path) if path.suffix == ".parquet" else csv.read_csv(path)


def write_rows(table, path):
    if path.suffix == ".parquet":
        parquet.write_table(table, path)
    else:
        csv.write_csv(table, path, csv.WriteOptions(quoting_style="none"))


def table(change, seal=None):
    """Changes the columns of a table, or of the first of several; ``seal`` changes the fields."""

    def changed(path):
        file = path / "a.csv" if path.is_dir() else path
        write_rows(change(rows(file)), file)
        if seal is not None:
            reseal_table(path, seal)

    return changed


def fields(**values):
    return lambda path: reseal_table(path, lambda content: content.update(values))


def and_no_more(content):
    """Seals again without another change."""


def with_truth(content):
    return content.append_column("y_true", pa.array(LABELS[: len(content)]))


def in_ids(content):
    ids = content["id"].to_numpy().astype(np.int64) + 1000 * LABELS[: len(content)]
    return content.set_column(0, "id", pa.array(ids))


def sorted_rows(content):
    return content.take(np.argsort(LABELS[: len(content)], kind="stable"))


def as_0_3(content):
    content.pop("sha256", None)


def with_id_column(content):
    content["id_columns"] = ["id", "y_true"]


def true_values(content):
    return content.set_column(1, "y", pa.array(LABELS[: len(content)]))


def member(name, change, *, added=False):
    """Rewrites a ``.keras`` file with another content of one member."""

    def changed(path):
        with zipfile.ZipFile(path) as content:
            parts = {part: content.read(part) for part in content.namelist()}
        assert added != (name in parts)
        parts[name] = change(parts.get(name, b""))
        with zipfile.ZipFile(path, "w") as content:
            for part, raw in parts.items():
                content.writestr(part, raw)

    return changed


def config(change):
    def changed(raw):
        content = json.loads(raw)
        change(content)
        return json.dumps(content).encode()

    return member("config.json", changed)


def weights(change):
    def changed(raw):
        buffer = io.BytesIO(raw)
        with h5py.File(buffer, "a") as file:
            change(file)
        return buffer.getvalue()

    return member("model.weights.h5", changed)


def in_history(**values):
    """Changes the history of the first layer in a file."""

    def changed(raw):
        name, _, packed = raw.partition(b"\n")
        content = json.loads(zlib.decompress(packed))
        content["digests"] += values.pop("digests", [])
        content |= values
        return name + b"\n" + zlib.compress(json.dumps(content).encode(), 9)

    return member("assets/layers/dense/label_dp_history/receipts.bin", changed)


def labels_in_state(file):
    file["optimizer/vars/2"][...] = np.resize(LABELS, file["optimizer/vars/2"].shape)


def other_weights(file):
    file["layers/dense/vars/0"][...] = np.resize(LABELS, (4, 3))


def rebuilt(layers):
    """Puts layers before a trained model, as Keras does it, with the receipts that it has."""

    def changed(path):
        model = ldp.load_model(path)
        inputs = keras.Input((4,))
        outputs = model(layers(inputs))
        keras.Model(inputs, outputs).save(path)

    return changed


def rescaling(inputs):
    return keras.layers.Rescaling(1.0, LABELS[:4].astype(float).tolist())(inputs)


def normalization(inputs):
    return keras.layers.Normalization(mean=LABELS[:4] + 0.0, variance=np.ones(4))(inputs)


def public_weights(inputs):
    layer = keras.layers.Dense(4, use_bias=False, name="own")
    outputs = layer(inputs)
    layer.set_weights([np.resize(LABELS, (4, 4)).astype(np.float32)])
    return outputs


def initial_constants(inputs):
    values = keras.initializers.Constant(LABELS[:4].astype(float).tolist())
    layer = keras.layers.Dense(4, bias_initializer=values, name="own")
    outputs = layer(inputs)
    layer.set_weights([np.zeros((4, 4)), np.zeros(4)])
    return outputs


def vocabulary(inputs):
    codes = keras.layers.IntegerLookup(vocabulary=np.flatnonzero(LABELS).tolist())
    number = keras.ops.cast(codes(keras.ops.cast(inputs, "int64")), "float32")
    return inputs + 0.0 * number


def reseal_card(path, change=lambda content: None):
    """Changes a card, and seals it and its page again."""
    content = json.loads((path / "privacy.json").read_text())
    change(content)
    content.pop("digest", None)
    if "model_sha256" in content:
        model = (path / "model.keras").read_bytes()
        content["model_sha256"] = hashlib.sha256(model).hexdigest()
    if "page" in content:
        page = (path / "README.md").read_text()
        parts = [part.strip("\n") for part in re.split(r"(?m)^(?=## )", page)]
        heads = [part.partition("\n")[0] if part.startswith("## ") else "" for part in parts]
        content["page"] = [
            [head, hashlib.sha256(part.encode()).hexdigest()]
            for head, part in zip(heads, parts, strict=True)
        ]
        text = json.dumps(content, sort_keys=True).encode()
        content["digest"] = hashlib.sha256(text).hexdigest()
    (path / "privacy.json").write_text(json.dumps(content, indent=1))


def better(content):
    content["metrics"][0]["value"] = 0.9876


def better_page(path):
    page = (path / "README.md").read_text()
    value = json.loads((path / "privacy.json").read_text())["metrics"][0]["value"]
    page = page.replace(f"| auc | {value:.4g}", "| auc | 0.9876").replace(str(value), "0.9876")
    assert page.count("0.9876") == 2
    (path / "README.md").write_text(page)


def better_card(path):
    better_page(path)
    content = json.loads((path / "privacy.json").read_text())
    better(content)
    (path / "privacy.json").write_text(json.dumps(content, indent=1))


def then(*changes):
    def changed(path):
        for change in changes:
            change(path)

    return changed


def in_model(change):
    return lambda path: change(path / "model.keras")


def without_seal(content):
    content.pop("page", None)


def in_report(change):
    def changed(path):
        content = json.loads(path.read_text())
        change(content)
        path.write_text(json.dumps(content, indent=1))

    return changed


ONE_HOT = np.eye(2)[LABELS]
FORGED = ["(0.1, 0)-label-DP", "  All labels are safe."]
OTHER_LINES = noisy(
    lambda fields, arrays: fields["statement"].__setitem__(-1, "      [none] None.")
)
TWICE = as_text("noisy_labels.json", "{", '{\n  "format": "0110",')
# What verification finds for each way: of the file alone, and with the store.
OF_NOISY = {
    "an array of true labels, resealed": (with_array("y_true", LABELS), 1, 1),
    "a field, resealed": (with_fields(note=LABELS.tolist()), 1, 1),
    "a remark, resealed": (noisy(with_remark), 0, 3),
    "indices shifted by the label, resealed": (
        with_array("indices", np.arange(N) * 2 + LABELS), 1, 1,
    ),
    "indices sorted by the label, resealed": (
        with_array("indices", np.argsort(LABELS, kind="stable")), 0, 1,
    ),
    "rows sorted by the label, resealed": (noisy(sorted_by_label), 1, 1),
    "true one-hot rows as priors, resealed": (with_array("probabilities", ONE_HOT), 0, 1),
    "another epsilon of the mechanism, resealed": (
        noisy(lambda fields, arrays: fields["mechanism"]["config"].update(epsilon=0.5)), 0, 1,
    ),
    "another statement, resealed": (with_fields(statement=FORGED), 1, 1),
    "a forged line of the statement, resealed": (OTHER_LINES, 1, 1),
    "a bias correction, resealed": (with_fields(bias_correction=0.25), 0, 1),
    "class values, resealed": (with_fields(classes=["no", "yes"]), 0, 3),
    "a name twice in the JSON": (TWICE, 1, 1),
    "true labels, resealed": (with_array("values", LABELS), 1, 1),
    "a smaller epsilon": (as_text("noisy_labels.json", '"epsilon": 1.0', '"epsilon": 0.1'), 1, 1),
    "an extra file": (extra("labels.csv"), 1, 1),
    "a hidden file in a folder": (extra(".cache/labels"), 1, 1),
    "bytes after the arrays": (appended("noisy_labels.npz"), 1, 1),
    "a comment in the zip file": (lambda path: with_comment(path / "noisy_labels.npz"), 1, 1),
    "bytes between the arrays": (lambda path: between(path / "noisy_labels.npz"), 1, 1),
    "another layout of the JSON": (
        lambda path: (path / "noisy_labels.json").write_text(
            json.dumps(json.loads((path / "noisy_labels.json").read_text()))
        ), 3, 3,
    ),
}  # fmt: skip
OF_TABLES = {
    "a column of true labels": (table(with_truth), 1, 1),
    "a column of true labels, resealed": (table(with_truth, and_no_more), 1, 1),
    "labels in the ids": (table(in_ids), 1, 1),
    "labels in the ids, resealed": (table(in_ids, and_no_more), 0, 3),
    "labels in the ids, resealed as 0.3 did": (table(in_ids, as_0_3), 3, 3),
    "rows sorted by the label": (table(sorted_rows), 1, 1),
    "rows sorted by the label, resealed": (table(sorted_rows, and_no_more), 1, 1),
    "true labels, resealed": (table(true_values, and_no_more), 1, 1),
    "a field, resealed": (fields(note=LABELS.tolist()), 1, 1),
    "another statement, resealed": (fields(statement=FORGED), 1, 1),
    "other outputs, resealed": (fields(outputs=LABELS.tolist()), 0, 3),
    "another number of rows, resealed": (fields(rows=N + 1), 1, 1),
    "another name of the program, resealed": (fields(made_by="0110"), 1, 1),
}
OF_SINGLE_TABLES = {
    **OF_TABLES,
    "a listed column of true labels, resealed": (table(with_truth, with_id_column), 0, 3),
    "bytes after the rows": (appended(), 1, 1),
}
OF_SEVERAL_TABLES = {
    **{way: case for way, case in OF_TABLES.items() if "column" not in way},
    "a column of true labels": (table(with_truth), 1, 1),
    "an extra file": (extra("labels.csv"), 1, 1),
    "bytes after the rows": (appended("b.csv"), 1, 1),
}
OF_MODELS = {
    "an extra member": (member("labels.txt", lambda raw: b"011", added=True), 1, 1),
    "a comment in the zip file": (with_comment, 1, 1),
    "bytes after the members": (appended(), 1, 1),
    "bytes between the members": (between, 1, 1),
    "an extra array": (weights(lambda file: file.create_dataset("y", data=LABELS)), 1, 1),
    "an attribute of the arrays": (weights(lambda file: file.attrs.update(y=LABELS)), 1, 1),
    "an extra field in the configuration": (
        config(lambda content: content.update(note=LABELS.tolist())), 1, 1,
    ),
    "a name twice in the configuration": (
        member("config.json", lambda raw: raw.replace(b"{", b'{"module": "0110", ', 1)), 1, 1,
    ),
    "an extra field in the metadata": (
        member("metadata.json", lambda raw: raw.replace(b"{", b'{"note": [0, 1], ', 1)), 1, 1,
    ),
    "labels as the time in the metadata": (
        member("metadata.json", lambda raw: raw.replace(b"@", b"@" + 9 * b"0110", 1)), 1, 1,
    ),
    "labels as the number of steps": (in_history(steps=10**300), 1, 1),
    "a field of the history": (in_history(note=[0, 1]), 1, 1),
    "digests of other weights": (in_history(digests=["00" * 16, "11" * 16]), 0, 3),
    "other weights": (weights(other_weights), 1, 1),
    "labels as the state of the optimizer": (weights(labels_in_state), 0, 3),
    "labels as constants of Rescaling": (rebuilt(rescaling), 0, 3),
    "labels as constants of Normalization": (rebuilt(normalization), 0, 3),
    "labels as weights of a public layer": (rebuilt(public_weights), 0, 3),
    "labels as initial constants": (rebuilt(initial_constants), 0, 3),
    "labels as a vocabulary": (rebuilt(vocabulary), 0, 3),
}  # fmt: skip
OF_CARDS = {
    "a better score in both files": (better_card, 1, 1),
    "a better score on the page": (better_page, 1, 1),
    "a better score in both files, resealed": (then(better_card, reseal_card), 0, 3),
    "other sentences on the data": (as_text("README.md", "Sixty rows.", "01101"), 1, 1),
    "other metadata": (as_text("README.md", "tags: ", 'labels: "011"\ntags: '), 1, 1),
    "a field, resealed": (lambda path: reseal_card(path, lambda c: c.update(note=[0, 1])), 1, 1),
    "a field of a score, resealed": (
        lambda path: reseal_card(path, lambda c: c["metrics"][0].update(note=[0, 1])), 1, 1,
    ),
    "an extra file": (extra("labels.csv"), 1, 1),
    "a file in a folder": (extra("logs/labels.csv"), 1, 1),
    "an extra member of the model": (
        in_model(member("labels.txt", lambda raw: b"011", added=True)), 1, 1,
    ),
    "an extra member of the model, resealed": (
        then(in_model(member("labels.txt", lambda raw: b"011", added=True)), reseal_card), 1, 1,
    ),
    "another section of the page": (
        lambda path: (path / "README.md").open("a").write("\n## Use with care\n\n0110\n") and None,
        3, 3,
    ),
    "a smaller epsilon": (as_text("privacy.json", '"epsilon": 3.0', '"epsilon": 1.0'), 1, 1),
    "a name twice in the card": (as_text("privacy.json", "{", '{"data": "0110",'), 1, 1),
    "no seal": (then(better_card, lambda path: reseal_card(path, without_seal)), 3, 3),
    "no card": (lambda path: (path / "privacy.json").unlink(), 3, 3),
    "no page": (lambda path: (path / "README.md").unlink(), 1, 1),
}  # fmt: skip
OF_REPORTS = {
    "another digest of a file": (in_report(lambda c: c["published"][0]["sha256"].clear()), 1, 1),
    "a problem left out": (in_report(lambda c: c["published"][0].pop("problems")), 1, 1),
    "another headline of a file": (
        in_report(lambda c: c["published"][0].update(headline="(0.1, 0)-label-DP")), 1, 1,
    ),
    "another statement": (in_report(lambda c: c.update(statement=FORGED)), 1, 1),
    "a smaller epsilon": (in_report(lambda c: c["guarantee"].update(epsilon=0.1)), 1, 1),
    "a smaller use": (in_report(lambda c: c["label_sets"][0]["history"].pop()), 1, 1),
    "another remaining budget": (
        in_report(lambda c: c["label_sets"][0].update(remaining=100.0)), 1, 1,
    ),
    "a release left out": (in_report(lambda c: c["label_sets"][0]["releases"].pop()), 1, 1),
    "a field": (in_report(lambda c: c.update(note=LABELS.tolist())), 1, 1),
    "other assumptions": (in_report(lambda c: c["assumptions"].clear()), 1, 1),
    "another time": (in_report(lambda c: c.update(made_at="2020-01-01")), 1, 1),
    "another program": (in_report(lambda c: c["versions"].update(keras="0")), 1, 1),
}  # fmt: skip
KINDS = {
    npz: OF_NOISY,
    csv_table: OF_SINGLE_TABLES,
    parquet_table: OF_SINGLE_TABLES,
    tables: OF_SEVERAL_TABLES,
    keras_file: OF_MODELS,
    card: OF_CARDS,
}
WAYS = [(kind, way) for kind, ways in KINDS.items() for way in ways]


@pytest.fixture(scope="module")
def untouched(tmp_path_factory):
    """Returns a function that makes each kind once, and copies it with its store."""
    made: dict[str, tuple[Path, Path]] = {}

    def copy(kind, folder):
        name = kind.__name__
        if name not in made:
            path = tmp_path_factory.mktemp(name)
            made[name] = path, kind(path)
        path, file = made[name]
        shutil.copytree(path, folder, dirs_exist_ok=True)
        return folder / file.relative_to(path)

    return copy


def codes(file, folder):
    command = ["verify", str(file)]
    return main(command), main([*command, "--store", str(folder / "store")])


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_an_untouched_file_is_right(kind, untouched, tmp_path, capsys):
    file = untouched(kind, tmp_path)
    assert codes(file, tmp_path) == (RIGHT, RIGHT), capsys.readouterr().out
    assert capsys.readouterr().out.endswith("  matches its statement\n")
    found = ldp.report(tmp_path / "store", published=[file])
    assert found.content["published"][0]["not_checked"] == []


@pytest.mark.parametrize(("kind", "way"), WAYS, ids=lambda part: getattr(part, "__name__", part))
def test_each_way_to_tamper(kind, way, untouched, tmp_path, capsys):
    file = untouched(kind, tmp_path)
    change, *expected = KINDS[kind][way]
    change(file)
    found = codes(file, tmp_path)
    printed = capsys.readouterr().out
    assert found == tuple(expected), printed
    if expected[1]:
        assert "matches" not in printed.splitlines()[-1]
        assert "not checked: " in printed or "WRONG: " in printed
    published = ["report", str(tmp_path / "store"), "--published", str(file)]
    assert main([*published, "--output", str(tmp_path / "report")]) == expected[1]


def verify_with(report, folder):
    file = ["verify", str(folder / "file"), "--report", str(report)]
    return main(file), main([*file, "--store", str(folder / "store")])


@pytest.mark.parametrize("way", [None, *OF_REPORTS])
def test_each_way_to_tamper_with_a_report(way, untouched, tmp_path, capsys):
    file = untouched(npz, tmp_path)
    ldp.report(tmp_path / "store", published=[file]).save(tmp_path / "out")
    listed = tmp_path / "out" / "report.json"
    if way is None:
        assert verify_with(listed, tmp_path) == (RIGHT, RIGHT)
        return
    change, *expected = OF_REPORTS[way]
    change(listed)
    assert verify_with(listed, tmp_path) == tuple(expected)
    assert "the report" in capsys.readouterr().out


def in_record(number, change):
    def changed(store):
        path = sorted((store / "records").iterdir())[number]
        path.write_bytes(change(path.read_bytes()))

    return changed


def without_record(store):
    sorted((store / "records").iterdir())[0].unlink()


# A store that was changed is refused: the exit code is that of wrong usage.
OF_STORES = {
    "a smaller epsilon": in_record(
        0, lambda raw: raw.replace(b'"epsilon": 1.0', b'"epsilon": 0.1')
    ),
    "another mechanism": in_record(0, lambda raw: raw.replace(b"RRWithPrior(", b"RRWithNoise(")),
    "another time": in_record(0, lambda raw: raw.replace(b'"time": "2', b'"time": "1')),
    "another digest of the output": in_record(
        0, lambda raw: raw.replace(b'"output_digest": "', b'"output_digest": "0')
    ),
    "other noisy labels": in_record(0, lambda raw: raw[:-200] + bytes(20) + raw[-180:]),
    "a part of a record": in_record(0, lambda raw: raw[: len(raw) // 2]),
    "an empty record": in_record(0, lambda raw: b""),
    "bytes after a record": in_record(0, lambda raw: raw + b"0110"),
    "a record left out": without_record,
    "another budget": as_text("header.json", "9.0", "99.0"),
    "other classes": as_text("header.json", '"num_classes": 2', '"num_classes": 3'),
    "no header": lambda store: (store / "header.json").unlink(),
}


@pytest.mark.parametrize("way", OF_STORES)
def test_each_way_to_tamper_with_a_store(way, untouched, tmp_path, capsys):
    file = untouched(npz, tmp_path)
    OF_STORES[way](tmp_path / "store")
    alone, with_store = codes(file, tmp_path)
    assert alone == RIGHT and with_store == 2, capsys.readouterr()
    assert "store" in capsys.readouterr().err


def test_each_kind_has_ten_ways():
    assert min(map(len, [*KINDS.values(), OF_REPORTS, OF_STORES])) >= 10


def trained(model, x, noisy):
    model.compile("adam", keras.losses.CategoricalCrossentropy(from_logits=True))
    ldp.fit(model, x, noisy, targets="posterior", epochs=1, verbose=0)
    return model


def images(labels, noisy):
    layers = keras.layers
    model = keras.Sequential([keras.Input((2, 2, 1)), layers.RandomRotation(0.1)])
    for layer in (layers.Conv2D(2, 2), layers.BatchNormalization(), layers.Flatten()):
        model.add(layer)
    model.add(layers.Dropout(0.3))
    model.add(layers.Dense(2))
    return trained(model, X.reshape(N, 2, 2, 1), noisy)


def texts(labels, noisy):
    inputs = keras.Input((1,), dtype="string")
    words = keras.layers.TextVectorization(output_sequence_length=3)
    words.adapt(["a b c", "d e"])
    rows = keras.layers.Flatten()(keras.layers.Embedding(9, 3)(words(inputs)))
    model = keras.Model(inputs, keras.layers.Dense(2)(rows))
    return trained(model, np.array([["a b"], ["d e"]])[np.arange(N) % 2], noisy)


def adapted(labels, noisy):
    scaling = keras.layers.Normalization()
    scaling.adapt(X)
    return trained(keras.Sequential([keras.Input((4,)), scaling, keras.layers.Dense(2)]), X, noisy)


def by_steps(labels, noisy):
    inputs = keras.Input((4,))
    hidden = keras.layers.Dense(3, activation="gelu")(inputs)
    model = ldp.training.LabelDPModel(inputs, keras.layers.Dense(2)(hidden))
    optimizer = ldp.training.LabelDPOptimizer(keras.optimizers.Adam(0.01), 1.0, 9.0)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="none")
    model.compile(optimizer, loss)
    batches = ldp.data.poisson_batches(X, labels, sampling_probability=0.2, steps=2)
    model.fit(batches, epochs=1, verbose=0)
    return model


@pytest.mark.parametrize(
    ("network", "named"),
    [
        (images, []),
        (texts, 2 * ["the constants in assets/"]),
        (adapted, ["the weights of normalization"]),
        (by_steps, []),
    ],
    ids=lambda part: getattr(part, "__name__", ""),
)
def test_untouched_networks_are_right(network, named, tmp_path):
    labels = ldp.PrivateLabels(
        LABELS, 2, budget=ldp.PrivacyBudget(99.0, 1e-4), store=tmp_path / "store"
    )
    noisy = labels.randomize(ldp.RandomizedResponse(2.0, 2), key="noisy")
    network(labels, noisy).save(tmp_path / "model.keras")
    found = ldp.dossier.verify(tmp_path / "model.keras")
    assert found.problems == found.not_checked == ()
    found = ldp.dossier.verify(tmp_path / "model.keras", store=tmp_path / "store")
    assert found.problems == () and len(found.not_checked) == len(named)
    assert all(text.startswith(name) for text, name in zip(found.not_checked, named, strict=True))


def test_rows_that_were_streamed_are_covered(tmp_path, capfdbinary):
    (tmp_path / "in.csv").write_text("id,y\n" + "".join(f"{i},{y}\n" for i, y in enumerate(LABELS)))
    file = tmp_path / "noisy.csv"
    command = ["randomize", str(tmp_path / "in.csv"), "--column", "y", "--epsilon", "1"]
    command += [
        "--task",
        "classification",
        "--num-classes",
        "2",
        "--store",
        str(tmp_path / "store"),
    ]
    statement = str(statement_of(file))
    assert main([*command, "--quiet", "--output", "-", "--statement", statement]) == 0
    file.write_bytes(capfdbinary.readouterr().out)
    assert codes(file, tmp_path) == (RIGHT, RIGHT)
    appended()(file)
    assert codes(file, tmp_path) == (WRONG, WRONG)


OF_0_3 = Path(__file__).parent / "of_0_3"
"""Files that version 0.3 (commit 226ca83) made of six labels, with their stores."""


def _numbers(version):
    return tuple(map(int, version.split(".")[:3]))


@pytest.mark.parametrize(
    ("name", "store", "unsealed"),
    [
        ("noisy", "store", []),
        ("card/model.keras", "store", []),
        ("card", "store", ["its scores and data", "README.md"]),
        ("noisy.csv", "table_store", ["the columns id"]),
    ],
)
def test_files_of_0_3_name_what_their_seal_did_not_cover(name, store, unsealed, tmp_path):
    shutil.copytree(OF_0_3, tmp_path, dirs_exist_ok=True)
    file = tmp_path / name
    if name.startswith("card"):
        with zipfile.ZipFile(tmp_path / "card" / "model.keras") as content:
            made_by = json.loads(content.read("metadata.json"))["keras_version"]
        if _numbers(keras.__version__) < _numbers(made_by):
            pytest.skip(f"Keras {keras.__version__} reads no files of Keras {made_by}")
    expected = NOT_CHECKED if unsealed else RIGHT
    found = ldp.dossier.verify(file)
    assert found.problems == () and len(found.not_checked) == len(unsealed)
    for part, text in zip(unsealed, found.not_checked, strict=True):
        assert text.startswith(part)
    command = ["verify", str(file)]
    assert main(command) == main([*command, "--store", str(tmp_path / store)]) == expected
    if file.is_dir():
        (file / "labels.csv").write_text("0,1,1")
        assert main(command) == (NOT_CHECKED if unsealed else WRONG)
    elif file.suffix == ".csv":
        write_rows(rows(file).append_column("y_true", pa.array([0, 1, 1, 0, 1, 0])), file)
        assert main(command) == WRONG
    else:
        appended()(file)
        assert main(command) == WRONG
