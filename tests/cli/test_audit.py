"""``tf-labeldp audit``: what it says of a published file."""

from __future__ import annotations

import json

import pytest

from tf_labeldp.cli import main


@pytest.fixture
def output(tmp_path):
    table = tmp_path / "labels.csv"
    table.write_text("id,y\n" + "".join(f"{i},{i % 3}\n" for i in range(300)), "utf-8")
    path = tmp_path / "noisy.csv"
    words = ["randomize", table, "--task", "classification", "--column", "y", "--num-classes", 3]
    assert main([str(word) for word in [*words, "--epsilon", 1, "--output", path]]) == 0
    return path


def test_a_sound_file_and_one_that_claims_too_little(output, capsys):
    plot = output.parent / "audit.png"
    assert (
        main(["audit", str(output), "--draws", "100000", "--seed", "1", "--plot", str(plot)]) == 0
    )
    said = capsys.readouterr().out
    assert "RandomizedResponse(epsilon=1" in said and "no contradiction" in said
    assert plot.stat().st_size > 5000
    with pytest.MonkeyPatch.context() as patch:
        from tf_labeldp.mechanisms import RandomizedResponse

        patch.setattr(
            RandomizedResponse, "randomize", lambda self, labels, priors=None, *, rng=None: labels
        )
        assert main(["audit", str(output), "--draws", "10000"]) == 1
    assert "FALSE" in capsys.readouterr().out


def test_numbers_and_bad_input(output, capsys):
    table, path = output.parent / "labels.csv", output.parent / "numbers.csv"
    words = ["randomize", table, "--task", "regression", "--column", "y", "--low", 0, "--high", 2]
    assert main([str(word) for word in [*words, "--epsilon", 2, "--output", path]]) == 0
    assert main(["audit", str(path), "--draws", "20000", "--seed", "0"]) == 0
    drawn = json.loads((path.parent / "numbers.csv.privacy.json").read_text("utf-8"))
    assert f"claimed: {drawn['epsilon']['draw']:.3g}" in capsys.readouterr().out
    assert main(["audit", str(table)]) == 2
    assert "is no output of tf-labeldp randomize" in capsys.readouterr().err
