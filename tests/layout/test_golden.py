"""What public calls return is what it was: arrays, draws, epsilons, statements, and cards.

`golden.json` holds what the builders of `_builders.py`, a draw of each mechanism, and two calls
of the command gave when it was recorded. A change of code that should change nothing leaves it as
it is; one that should change something records it again, and the difference is read:

    python tests/layout/test_golden.py
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import re
import tempfile
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
from _builders import BUDGET, BUILDERS, GROUPS, HALF, RR, Put, X, Y, labels_of, numbers_of
from mechanism_cases import PUBLIC, needing
from sklearn.base import BaseEstimator
from slow_cases import with_slow

import tf_labeldp as ldp
from tf_labeldp import mechanisms
from tf_labeldp.accounting.provenance import Weights
from tf_labeldp.cli import main

GOLDEN = Path(__file__).parent / "golden.json"
FITTED_BY = ("keras", "lightgbm", "numpy", "scikit-learn", "scipy", "tensorflow")
"""Packages whose versions change fitted numbers: with others, statements alone are compared."""
TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\+00:00")
DIGEST = re.compile(r"\b[0-9a-f]{32,64}\b")
"""Of outputs of networks, whose last bits differ between machines."""
NUMBER = re.compile(r"(?<=[a-z])_\d+\b")
"""Of the name of a network, which counts those that were made before."""
OF_MACHINES = ("actor", "num_trees_", "version")
"""The user, the version, and a number that compares sums, which machines round differently."""
LISTED = 8
"""Numbers of a floating-point array that are listed, at equal distances."""
DRAWS: dict[str, Callable[[], Any]] = {
    **{
        name: lambda kind=kind: (
            labels_of()
            .randomize(kind(1.0, 2), **({"priors": HALF} if kind.public_input else {}))
            .values
        )
        for name, kind in needing("epsilon", "num_classes").items()
    },
    **{
        name: lambda kind=kind: numbers_of().randomize(kind(1.0, 0, 1)).values
        for name, kind in needing("epsilon", "low", "high").items()
    },
    "RRTopK": lambda: labels_of().randomize(mechanisms.RRTopK(1.0, 2, 2), priors=HALF).values,
    "RROnBins": lambda: (
        numbers_of().randomize(mechanisms.RROnBins(1.0, (0.0, 1.0), (0.0, 1.0), (0, 1))).values
    ),
    "ChannelMechanism": lambda: (
        numbers_of().randomize(mechanisms.optimal_unbiased([0.0, 1.0], [0.5, 0.5], 1.0)).values
    ),
    "SurveyChannel": lambda: (
        labels_of().randomize(mechanisms.SurveyChannel.from_warner(0.75)).values
    ),
    "LabelRandomizer": lambda: numbers_of().randomize(ldp.LabelRandomizer(1.0)).values,
    "ClusterRandomizedResponse": lambda: (
        labels_of()
        .randomize(
            ldp.ClusterRandomizedResponse(2, 0.1, 4.0, resampling_probability=0.5), clusters=GROUPS
        )
        .values
    ),
    "PeerToPeerRandomizedResponse": lambda: (
        labels_of()
        .randomize(
            mechanisms.PeerToPeerRandomizedResponse.for_cluster_size(0.2, 0.5, 2, 0.0),
            clusters=GROUPS,
        )
        .values
    ),
    "HistogramMechanism": lambda: (
        labels_of().release(mechanisms.HistogramMechanism(1.0, 2), public_input=GROUPS).values
    ),
}


def facts_of(place: str) -> dict[str, Any]:
    """Returns what the call of a builder gave, as JSON has it."""
    keras.utils.set_random_seed(0)
    built = BUILDERS[place](Put("", labels_of().randomize(RR).receipts[0]))
    if isinstance(built, tuple):
        built = built[0]
    found: dict[str, Any] = {}
    if isinstance(built, keras.Model):
        found |= {f"weight {place}": value for place, value in enumerate(built.get_weights())}
    for name in dir(type(built)) + list(built.__dict__ if hasattr(built, "__dict__") else ()):
        if not (name.startswith("_") or name in OF_MACHINES or isinstance(built, keras.Model)):
            # A vault refuses some, and an object that is not fitted has not all.
            with contextlib.suppress(AttributeError, TypeError):
                value = getattr(built, name)
                if isinstance(value, (np.ndarray, int, float, str)):
                    found[name] = value
    if isinstance(built, BaseEstimator) and hasattr(built, "predict"):
        found["predict"] = np.asarray(built.predict(X))
    try:
        found["statement"] = str(ldp.guarantee(built))
    except (TypeError, ValueError) as error:
        found["statement"] = type(error).__name__
    return {name: as_json(value) for name, value in sorted(found.items())}


def as_json(value: Any) -> Any:
    """Returns whole numbers and texts as they are, or their digest, and some of other numbers."""
    if isinstance(value, str):
        return NUMBER.sub("", DIGEST.sub("DIGEST", TIME.sub("TIME", value)))
    if isinstance(value, int):
        return value
    array = np.asarray(value)
    if array.dtype.kind in "fc":
        flat = array.astype(float).ravel()
        places = np.linspace(0, flat.size - 1, min(LISTED, flat.size)).astype(int)
        return {
            "shape": list(array.shape),
            "size": float(np.linalg.norm(flat)),
            "values": [repr(number) for number in flat[places].tolist()],
        }
    if array.dtype.kind == "O":
        return repr(array.tolist())
    content = array.astype(array.dtype.newbyteorder("<")).tobytes()
    return {"shape": list(array.shape), "sha256": hashlib.sha256(content).hexdigest()}


def words_of_the_command(folder: Path) -> dict[str, Any]:
    """Returns what the command answers about a store and its noisy labels."""
    labels = ldp.PrivateLabels(Y, 2, budget=BUDGET, store=folder / "store", insecure_seed=0)
    labels.randomize(RR, key="first").save(folder / "noisy")
    labels.release(mechanisms.HistogramMechanism(1.0, 2), key="second")
    calls = {
        "report": ["report", str(folder / "store"), "--output", str(folder / "report")],
        "verify": ["verify", str(folder / "noisy")],
    }
    found = {}
    for name, words in calls.items():
        output = io.StringIO()
        with contextlib.redirect_stdout(output), contextlib.redirect_stderr(io.StringIO()):
            code = main(words)
        text = output.getvalue().replace(str(folder), "FOLDER")
        found[name] = [code, as_json(text)]
    return found


def versions() -> dict[str, str]:
    return {name: metadata.version(name) for name in FITTED_BY}


def draw_of(name: str) -> Any:
    keras.utils.set_random_seed(0)
    return as_json(np.asarray(DRAWS[name]()))


def recorded() -> dict[str, Any]:
    return json.loads(GOLDEN.read_text(encoding="utf-8"))


def check(found: Any, expected: Any) -> None:
    """Compares texts and whole numbers as they are, and others within the rounding of machines."""
    if isinstance(expected, dict) and "values" in expected:
        assert found["shape"] == expected["shape"]
        numbers = [np.array(each["values"], float) for each in (found, expected)]
        # An iteration that stops at a tolerance differed by 2e-4 of the size on two processors.
        np.testing.assert_allclose(*numbers, rtol=1e-3, atol=5e-4 * expected["size"])
    else:
        assert found == expected


SLOW = {"front_door.PrivateClassifier", "front_door.PrivateRegressor", "heads.BootstrappedHead"}


@pytest.mark.parametrize("place", with_slow(recorded()["calls"] if GOLDEN.exists() else [], SLOW))
def test_a_call_gives_what_it_gave(place, forget):
    forget()
    golden, found = recorded(), facts_of(place)
    expected = golden["calls"][place]
    assert set(expected) <= set(found)
    # Other versions of what fits give other numbers, but the same statements.
    for name in expected if golden["versions"] == versions() else ["statement"]:
        check(found[name], expected[name])


@pytest.mark.parametrize("name", recorded()["draws"] if GOLDEN.exists() else [])
def test_a_seeded_draw_is_what_it_was(name):
    check(draw_of(name), recorded()["draws"][name])


def test_all_mechanisms_that_draw_have_a_draw_here():
    """One that is new is recorded with the next change of `golden.json`."""
    drawing = {name for name, kind in PUBLIC.items() if issubclass(kind, mechanisms.LabelMechanism)}
    assert drawing <= DRAWS.keys()


def test_the_command_says_what_it_said(tmp_path):
    assert words_of_the_command(tmp_path) == recorded()["command"]


def record() -> None:
    """Writes `golden.json`; what differs between two calls in turn is left out."""
    calls = {}
    for place in BUILDERS:
        Weights.by_digest.clear()
        first = facts_of(place)
        Weights.by_digest.clear()
        second = facts_of(place)
        calls[place] = {name: first[name] for name in first if first[name] == second.get(name)}
    content = {
        "versions": versions(),
        "calls": calls,
        "draws": {name: draw_of(name) for name in DRAWS},
        "command": words_of_the_command(Path(tempfile.mkdtemp())),
    }
    text = json.dumps(content, indent=1, sort_keys=True)
    GOLDEN.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    record()
