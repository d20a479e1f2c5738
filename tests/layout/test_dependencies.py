"""What the package may be installed with: no version with a published hole, and known files."""

from __future__ import annotations

import re
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
HOLES = {
    "pyarrow": ("14.0.1", "a Parquet file can run code", ["10.0.1", "14.0.0"]),
    "keras": (
        "3.12.4 and 3.15.1",
        "a model file can run code, or read files of this machine",
        ["3.10.0", "3.11.3", "3.12.3", "3.13.2", "3.14.1", "3.15.0"],
    ),
    "filelock": ("3.20.3", "a lock follows a symbolic link", ["3.12.0", "3.20.2"]),
}
"""Versions that read what other people wrote, and have a hole: the mended one, the hole, others."""


def requirements() -> list[Requirement]:
    return [Requirement(text) for text in metadata.requires("tf-labeldp") or []]


def pins() -> dict[str, list[str]]:
    """Returns the lines of each package in the file of tested versions, with their hashes."""
    text = (ROOT / "tested-versions.txt").read_text(encoding="utf-8").replace("\\\n", "")
    found: dict[str, list[str]] = {}
    for line in text.splitlines():
        found.setdefault(line.partition("==")[0], []).append(line)
    return found


@pytest.mark.parametrize("name", HOLES)
def test_no_version_with_a_hole_is_admitted(name: str) -> None:
    [bound] = [each.specifier for each in requirements() if each.name == name]
    mended, _, versions = HOLES[name]
    assert not [version for version in versions if version in bound]
    assert all(version in bound for version in mended.split(" and ")) or name == "pyarrow"
    # An upper bound in a library blocks its users.
    assert "99.0" in bound


def test_each_tested_version_is_admitted_and_has_hashes() -> None:
    found = pins()
    for each in requirements():
        if each.marker is not None and not each.marker.evaluate({"extra": "test"}):
            continue
        lines = found[re.sub("[-_.]+", "-", each.name).lower()]
        versions = [line.partition("==")[2].split()[0] for line in lines]
        assert all(version in each.specifier for version in versions), (each, versions)
    assert len(found) > 80
    for lines in found.values():
        for line in lines:
            assert re.search(r" --hash=sha256:[0-9a-f]{64}\b", line), line


def test_only_the_environment_of_tfx_overrides_a_bound() -> None:
    lines = (ROOT / ".ci" / "tfx-overrides.txt").read_text(encoding="utf-8").splitlines()
    [override] = [Requirement(line) for line in lines if not line.startswith("#")]
    assert override.name in HOLES
    users = {
        path.name: path.read_text(encoding="utf-8").count("--override")
        for path in [ROOT / "Makefile", *(ROOT / ".ci").iterdir()]
    }
    assert {name: count for name, count in users.items() if count} == {"Makefile": 1}
    # A cell of the oldest dependencies takes the bounds of the package.
    matrix = (ROOT / ".ci" / "matrix").read_text(encoding="utf-8")
    assert not [name for name in HOLES if re.search(rf"\b{name}[><=]", matrix)]
