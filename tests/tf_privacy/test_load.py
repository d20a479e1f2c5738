"""`load` imports tensorflow-privacy, or its error shows how to install it."""

from __future__ import annotations

import sys

import pytest

from tf_labeldp.tf_privacy import QueryNoise, load

SWITCH = "skip_tf_privacy_import"


def test_a_missing_package_is_named_with_the_way_to_install_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in [name for name in sys.modules if name.startswith("tensorflow_privacy")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "tensorflow_privacy", None)
    with pytest.raises(ImportError, match=r"--no-deps .*tensorflow-privacy==0\.9\.0"):
        load()
    with pytest.raises(ImportError, match="is not installed"):
        QueryNoise(object())
    assert not hasattr(sys, SWITCH)


def test_a_missing_requirement_is_named(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith("tensorflow_privacy")]:
        monkeypatch.delitem(sys.modules, name)
    (tmp_path / "tensorflow_privacy.py").write_text("import a_missing_package", encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ImportError, match=r"a_missing_package.*pip install.*dm-tree"):
        load()
    assert not hasattr(sys, SWITCH)


@pytest.mark.tf_privacy
def test_the_installed_package_is_loaded() -> None:
    package = load()
    assert package.__version__ == "0.9.0"
    assert issubclass(package.GaussianSumQuery, package.DPQuery)
    for name in ("NoPrivacySumQuery", "NormalizedQuery", "RestartQuery", "TreeResidualSumQuery"):
        assert hasattr(package, name)
    assert sys.modules["tensorflow_privacy"] is package is load()
    assert not hasattr(sys, SWITCH)


@pytest.mark.parametrize("name", ["NoPrivacySumQuery", "load_model", "__loader__", "sys"])
def test_a_file_does_not_choose_what_is_called(name: str) -> None:
    """Also without the package: the name is checked first."""
    config = {"query": {"class": name, "l2_norm_clip": 1.0, "stddev": 4.0}}
    with pytest.raises(ValueError, match="the class of a query must be one of GaussianSumQuery"):
        QueryNoise.from_config(config)
