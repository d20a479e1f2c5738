"""`load` makes tensorflow-privacy importable, or says how to install it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tf_labeldp.tf_privacy import QueryNoise, load

SWITCH = "skip_tf_privacy_import"
HOMES = {
    "dp_query": ["DPQuery", "SumAggregationDPQuery"],
    "gaussian_query": ["GaussianSumQuery"],
    "nested_query": ["NestedQuery", "NestedSumQuery"],
    "no_privacy_query": ["NoPrivacyAverageQuery", "NoPrivacySumQuery"],
    "normalized_query": ["NormalizedQuery"],
    "restart_query": ["RestartQuery"],
    "tree_aggregation_query": ["TreeCumulativeSumQuery", "TreeResidualSumQuery"],
}


class StandIn:
    """Writes a package that fails without the switch, as the real one does."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.front = folder / "tensorflow_privacy" / "__init__.py"
        queries = self.front.parent / "privacy" / "dp_query"
        queries.mkdir(parents=True)
        self.set_front("import sys\nif not hasattr(sys, 'skip_tf_privacy_import'): import gone")
        for path in (queries.parent, queries):
            (path / "__init__.py").touch()
        for home, names in HOMES.items():
            text = "".join(f"class {name}: pass\n" for name in names)
            (queries / f"{home}.py").write_text(text, encoding="utf-8")
        monkeypatch.syspath_prepend(folder)
        self.forget(monkeypatch)

    def set_front(self, text: str) -> None:
        self.front.write_text(text, encoding="utf-8")

    @staticmethod
    def forget(monkeypatch: pytest.MonkeyPatch) -> None:
        for name in [name for name in sys.modules if name.startswith("tensorflow_privacy")]:
            monkeypatch.delitem(sys.modules, name)


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    yield StandIn(tmp_path, monkeypatch)
    for name in [name for name in sys.modules if name.startswith("tensorflow_privacy")]:
        del sys.modules[name]


def test_the_switch_is_set_for_the_import_alone(stand_in: StandIn) -> None:
    module = load()
    assert not hasattr(sys, SWITCH)
    assert all(hasattr(module, name) for names in HOMES.values() for name in names)
    assert load() is module


def test_a_missing_package_is_named_with_the_way_to_install_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    StandIn.forget(monkeypatch)
    monkeypatch.setitem(sys.modules, "tensorflow_privacy", None)
    with pytest.raises(ImportError, match=r"--no-deps .*tensorflow-privacy==0\.9\.0"):
        load()
    with pytest.raises(ImportError, match="is not installed"):
        QueryNoise(object())
    assert not hasattr(sys, SWITCH)


def test_a_missing_requirement_of_it_is_named(stand_in: StandIn) -> None:
    stand_in.set_front("import a_package_that_is_not_there")
    with pytest.raises(ImportError, match=r"a_package_that_is_not_there.*pip install.*dm-tree"):
        load()
    assert not hasattr(sys, SWITCH)


@pytest.mark.tf_privacy
def test_the_installed_package_is_loaded() -> None:
    module = load()
    assert module.__version__ == "0.9.0"
    assert issubclass(module.GaussianSumQuery, module.DPQuery)
    assert sys.modules["tensorflow_privacy"] is module
