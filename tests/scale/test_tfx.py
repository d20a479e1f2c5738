"""The pipeline of `examples/09_tfx_pipeline.py` from end to end, and refusals of the component."""

from __future__ import annotations

import glob
import json
import runpy
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

pytest.importorskip("tfx", reason="no tfx; `make test-tfx` installs it")

import tensorflow as tf
from tfx.types import artifact_utils, standard_artifacts

from tf_labeldp.mechanisms import RandomizedResponse
from tf_labeldp.scale import ReleaseKey, randomize_batch
from tf_labeldp.scale.tfx import LabelRandomizer, PrivacyStatement

SCRIPT = Path(__file__).parents[2] / "examples" / "09_tfx_pipeline.py"
MECHANISM = RandomizedResponse(epsilon=1.0, num_classes=3)


@pytest.mark.data
def test_a_whole_pipeline_on_adult(tmp_path, data_dir, monkeypatch, capsys):
    monkeypatch.setenv("LABELDP_DATA_DIR", str(data_dir))
    script = runpy.run_path(str(SCRIPT))
    accuracy = script["main"](["--epsilon", "2", "--rows", "12000", "--output", str(tmp_path)])
    assert accuracy > 0.79  # the larger class has 76.4 % of the test set, noisy labels 71 %
    assert "(2, 0)-label-DP" in capsys.readouterr().out
    root = tmp_path / "private" / "root"
    true = examples_in(root / "CsvExampleGen" / "examples")
    noisy = examples_in(root / "LabelRandomizer" / "noisy_examples")
    assert set(true) == set(noisy) and len(true) == 12000  # both splits
    kept = np.mean([true[i] == noisy[i] for i in true])
    assert kept == pytest.approx(np.e**2 / (np.e**2 + 1), abs=0.02)


def examples_in(folder, label="income"):
    """Returns the label of each id, in all splits."""
    files = glob.glob(f"{folder}/**/Split-*/*.gz", recursive=True)
    found = {}
    for record in tf.data.TFRecordDataset(files, "GZIP"):
        features = tf.train.Example.FromString(record.numpy()).features.feature
        found[features["id"].int64_list.value[0]] = features[label].int64_list.value[0]
    return found


def write_split(folder, pairs):
    folder.mkdir(parents=True)
    with tf.io.TFRecordWriter(str(folder / "data_tfrecord.gz"), "GZIP") as file:
        for pair in pairs:
            feature = {
                name: tf.train.Feature(int64_list=tf.train.Int64List(value=[value]))
                for name, value in zip(("id", "y"), pair, strict=True)
            }
            example = tf.train.Example(features=tf.train.Features(feature=feature))
            file.write(example.SerializeToString())


def randomized(folder, splits, release):
    """Runs the executor alone, and returns the folder of the noisy Examples."""
    path = folder / "labels.key"
    key = ReleaseKey(path) if path.exists() else ReleaseKey.create(path)
    examples, noisy = standard_artifacts.Examples(), standard_artifacts.Examples()
    statement = PrivacyStatement()
    examples.uri, noisy.uri, statement.uri = (
        str(folder / release / name) for name in ("examples", "noisy", "statement")
    )
    (folder / release / "statement").mkdir(parents=True)
    for name, pairs in splits.items():
        write_split(folder / release / "examples" / f"Split-{name}", pairs)
    examples.split_names = artifact_utils.encode_split_names(list(splits))
    LabelRandomizer.EXECUTOR_SPEC.executor_class().Do(
        {"examples": [examples]},
        {"noisy_examples": [noisy], "statement": [statement]},
        {
            "mechanism": json.dumps(MECHANISM.to_json()),
            "key": str(key.path),
            "release": release,
            "id": "id",
            "label": "y",
            "priors": "null",
        },
    )
    assert artifact_utils.decode_split_names(noisy.split_names) == sorted(splits)
    return Path(noisy.uri)


@pytest.mark.holds("scale.LabelRandomizer")
def test_the_draws_are_those_of_the_core(tmp_path):
    pairs = [(i, i % 3) for i in range(300)]
    noisy = randomized(tmp_path, {"eval": pairs[:100], "train": pairs[100:]}, "a")
    ids, labels = zip(*pairs, strict=True)
    secret = ReleaseKey(tmp_path / "labels.key").secret
    drawn = randomize_batch(pa.array(ids), np.array(labels), MECHANISM, secret, "a")
    assert examples_in(noisy, "y") == dict(zip(ids, drawn.tolist(), strict=True))
    (tmp_path / "other").mkdir()
    again = randomized(tmp_path / "other", {"train": pairs}, "a")  # of another key
    assert examples_in(again, "y") != examples_in(noisy, "y")


def test_an_id_in_two_splits_is_refused(tmp_path):
    with pytest.raises(Exception, match="1 ids name more than one row"):
        randomized(tmp_path, {"eval": [(1, 0), (2, 0)], "train": [(2, 1)]}, "a")
    assert not list((tmp_path / "a" / "noisy").glob("**/*.gz"))


def test_only_mechanisms_are_taken(tmp_path):
    with pytest.raises(TypeError, match="mechanism must be"):
        LabelRandomizer(None, "rr", key=tmp_path / "labels.key", release="a")
