"""A lazy frame of Polars works at each door where its data frame does, and is collected once.

The doors are those of ``_builders.py`` that take the table ``X`` or its rows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from _builders import BUILDERS, X, dense, labels_of
from _entry_points import TRAINING, arguments
from slow_cases import with_slow

import tf_labeldp as ldp
from tf_labeldp import features, heads
from tf_labeldp.boosting import PrivateBoosting

pytestmark = pytest.mark.usefixtures("repeatable_and_eager")

pl = pytest.importorskip("polars")
FRAME = pl.DataFrame({f"x{place}": column for place, column in enumerate(X.T)})
NOISY = labels_of().randomize(ldp.RandomizedResponse(4.0, 2))
METHODS: dict[str, Callable[[Any], Any]] = {
    "RandomFourierFeatures.fit_transform": lambda x: features.RandomFourierFeatures(
        8
    ).fit_transform(x),
    "TableCodes.fit_transform": lambda x: features.TableCodes().fit_transform(x),
    "NeighbourSmoothing.fit_transform": lambda x: features.NeighbourSmoothing().fit_transform(x),
    "PublicEncoder.fit_transform": lambda x: features.PublicEncoder(dense(3)).fit_transform(x),
    "PublicEncoder.transform": lambda x: features.PublicEncoder(dense(3)).fit(FRAME).transform(x),
    "find_clusters": lambda x: features.find_clusters(x, 4, encoder=dense(3)),
    "to_inputs": lambda x: features.to_inputs(x, dense()),
    "NoisyLabels.to_dataset": lambda x: next(iter(NOISY.to_dataset(x))),
    "PrivateLogisticRegression.predict": lambda x: (
        ldp.PrivateLogisticRegression(1.0, 1e-4).fit(FRAME, labels_of()).predict(x)
    ),
    "PrivateBoosting.predict": lambda x: PrivateBoosting(max_trees=2).fit(FRAME, NOISY).predict(x),
    "conformal": lambda x: ldp.conformal(dense(), (x, labels_of()), 0.5, 1.0),
}
"""Doors that a builder does not reach, or not with an encoder."""
OF_HEADS: dict[str, Callable[[Any], Any]] = {
    "BootstrappedHead.fit": lambda x: heads.BootstrappedHead(
        2.0, 1e-4, dense(), encoder=dense(3), shares=(1.0,), epochs=1, verbose=0
    ).fit(x, labels_of()),
}
"""Doors that train a network."""


class PutFrame:
    """Gives a frame for the argument under test if it is the table, and leaves all others."""

    def __init__(self, name: str, frame: Any) -> None:
        self.name, self.frame, self.was_table = name, frame, False

    def __call__(self, name: str, value: Any) -> Any:
        if name != self.name or value is not X:
            return value
        self.was_table = True
        return self.frame

    def only(self, name: str, value: Any, keyword: str | None = None) -> dict[str, Any]:
        return {}


def by_builder(place: str, name: str) -> Callable[[Any], bool]:
    """A call of an entry point with a frame; whether the argument is the table."""

    def call(frame: Any) -> bool:
        put = PutFrame(name, frame)
        BUILDERS[place](put)
        return put.was_table

    return call


def doors() -> dict[str, dict[str, Callable[[Any], Any]]]:
    """The doors of each part by name."""
    found: dict[str, dict[str, Callable[[Any], Any]]] = {"methods": METHODS, "heads": {**OF_HEADS}}
    for argument in arguments():
        if argument.kind == "public" and argument.name in ("X", "features", "inputs", "x"):
            for place in (argument.place, argument.place.rpartition(".")[0]):
                if place in BUILDERS:
                    part = found.setdefault(place.partition(".")[0], {})
                    part[f"{argument.place}({argument.name})"] = by_builder(place, argument.name)
                    break
    return found


DOORS = doors()


def tried(name: str, call: Callable[[Any], Any], collected: list[int]) -> str | None:
    """What is wrong with a lazy frame at a door; empty if nothing, None if it takes no frame."""
    try:
        if call(FRAME) is False:
            return None
    except Exception:
        return None
    collected.clear()
    try:
        call(FRAME.lazy())
    except Exception as error:
        return f"{name}: {error!r:.300}"
    return "" if len(collected) == 1 else f"{name}: collected {len(collected)} times"


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("part", with_slow(sorted(DOORS), TRAINING))
def test_a_lazy_frame_works_where_a_frame_does_and_is_collected_once(part, monkeypatch) -> None:
    collected: list[int] = []
    collect = pl.LazyFrame.collect

    def counted(frame: Any, *arguments: Any, **options: Any) -> Any:
        collected.append(1)
        return collect(frame, *arguments, **options)

    monkeypatch.setattr(pl.LazyFrame, "collect", counted)
    results = {name: tried(name, call, collected) for name, call in DOORS[part].items()}
    assert not any(results.values()), "\n".join(filter(None, results.values()))
    assert part != "methods" or None not in results.values()


def test_most_parts_have_doors() -> None:
    assert {"features", "heads", "training", "boosting", "front_door", "vault"} <= DOORS.keys()
