"""The wheel contains the package and nothing else, and works away from the checkout.

The tests use the dependencies of their own environment; `make wheel-test` installs them into an
empty one.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SMOKE = Path(__file__).with_name("wheel_smoke.py")
FOLDERS = ("tf_labeldp", "keras_layers", "benchmarks", "tests", "examples")
FILES = ("pyproject.toml", "setup.py", "README.md", "LICENSE")


def run(*command, cwd, **environment):
    done = subprocess.run(
        [sys.executable, *map(str, command)],
        cwd=cwd,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout


def build(folder, **environment):
    """Builds from a copy, since setuptools reads the build folder that it leaves in the sources."""
    source = folder / "source"
    source.mkdir()
    for name in FILES:
        shutil.copy(ROOT / name, source)
    for name in FOLDERS:
        if (ROOT / name).is_dir():
            ignored = shutil.ignore_patterns("__pycache__")
            shutil.copytree(ROOT / name, source / name, ignore=ignored)
    options = ("--no-deps", "--no-build-isolation", "--no-index", "--wheel-dir", folder)
    run("-m", "pip", "wheel", source, *options, cwd=folder, **environment)
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="session")
def wheel(tmp_path_factory):
    return build(tmp_path_factory.mktemp("wheel"), SOURCE_DATE_EPOCH="1700000000")


@pytest.mark.slow
def test_two_wheels_have_the_same_bytes(wheel, tmp_path):
    """With the date of the commit, as `make wheel` has it; the copies have dates of their own."""
    second = build(tmp_path, SOURCE_DATE_EPOCH="1700000000")
    assert wheel.read_bytes() == second.read_bytes()


def test_wheel_has_the_packages_and_nothing_else(wheel):
    assert wheel.name.startswith("tf_labeldp-0.")
    names = set(zipfile.ZipFile(wheel).namelist())
    expected = {path.relative_to(ROOT).as_posix() for path in ROOT.glob("tf_labeldp/**/*.py")}
    expected |= {
        f"tf_labeldp/{path.relative_to(ROOT).as_posix()}"
        for path in ROOT.glob("keras_layers/**/*.py")
    }
    expected |= {"tf_labeldp/py.typed", "tf_labeldp/front_door/measured.json"}
    assert {name for name in names if ".dist-info/" not in name} == expected


def test_wheel_metadata(wheel):
    with zipfile.ZipFile(wheel) as archive:
        info = {name.partition(".dist-info/")[2]: name for name in archive.namelist()}
        metadata = archive.read(info["METADATA"]).decode()
        scripts = archive.read(info["entry_points.txt"]).decode()
    assert "licenses/LICENSE" in info
    assert "License-Expression: Apache-2.0" in metadata
    assert "Requires-Python: >=3.10" in metadata
    requirements = [line for line in metadata.splitlines() if line.startswith("Requires-Dist")]
    assert any("dp-accounting>=0.6" in line for line in requirements)
    assert [line for line in requirements if "<" in line or "==" in line.split(";")[0]] == []
    assert "tf-labeldp = tf_labeldp.cli:main" in scripts


@pytest.mark.slow
def test_wheel_works_from_another_folder(wheel, tmp_path):
    site = tmp_path / "site"
    options = ("--quiet", "--no-deps", "--no-index", "--target", site)
    run("-m", "pip", "install", *options, wheel, cwd=tmp_path)
    assert "smoke: ok" in run(SMOKE, site, cwd=tmp_path, PYTHONPATH=str(site))


def test_the_smoke_program_refuses_the_checkout(tmp_path):
    with pytest.raises(AssertionError, match="not from"):
        run(SMOKE, tmp_path, cwd=tmp_path, PYTHONPATH=str(ROOT))
