"""Imports the installed tensorflow-privacy under versions of TensorFlow that its front refuses."""

from __future__ import annotations

import importlib
import sys
from types import ModuleType

WORKS_WITH = "0.9.0"
"""The release of tensorflow-privacy that the tests run against."""

_SWITCH = "skip_tf_privacy_import"
_QUERIES = {
    "DPQuery": "dp_query",
    "GaussianSumQuery": "gaussian_query",
    "NestedQuery": "nested_query",
    "NestedSumQuery": "nested_query",
    "NoPrivacyAverageQuery": "no_privacy_query",
    "NoPrivacySumQuery": "no_privacy_query",
    "NormalizedQuery": "normalized_query",
    "RestartQuery": "restart_query",
    "SumAggregationDPQuery": "dp_query",
    "TreeCumulativeSumQuery": "tree_aggregation_query",
    "TreeResidualSumQuery": "tree_aggregation_query",
}


def load() -> ModuleType:
    """Imports tensorflow-privacy and returns it, with its queries in their usual places.

    The front of tensorflow-privacy 0.9 imports TensorFlow Estimator, which is not made any more, so
    ``import tensorflow_privacy`` fails under TensorFlow 2.16 and later. It looks for a switch,
    ``sys.skip_tf_privacy_import``; here it is set for the time of the import alone. Afterwards
    ``import tensorflow_privacy`` works in this process too.

    Its query classes (``dp_query``) need TensorFlow alone, and are set on the returned module as
    its own front would: ``load().GaussianSumQuery``. Its models and optimizers are for Keras 2:
    set ``TF_USE_LEGACY_KERAS=1`` before TensorFlow is imported, in a process of their own, install
    ``tf-keras`` and import their modules by their full names.

    Returns:
        The module ``tensorflow_privacy``.

    Raises:
        ImportError: it is not installed, or lacks something that it needs; the message says how to
            install it.

    Example:
        >>> load().GaussianSumQuery(l2_norm_clip=1.0, stddev=4.0)  # doctest: +SKIP
        <tensorflow_privacy.privacy.dp_query.gaussian_query.GaussianSumQuery object at 0x...>
    """
    try:
        module = _with_switch("tensorflow_privacy")
        for name, home in _QUERIES.items():
            if not hasattr(module, name):
                queries = importlib.import_module(f"tensorflow_privacy.privacy.dp_query.{home}")
                setattr(module, name, getattr(queries, name))
    except ImportError as error:
        missing = (error.name or "").partition(".")[0]
        if missing == "tensorflow_privacy":
            raise ImportError(
                "tensorflow-privacy is not installed. Its own requirements ask for old versions "
                "of TensorFlow and numpy, so leave them out: pip install --no-deps "
                f"--ignore-requires-python tensorflow-privacy=={WORKS_WITH} (the release that is "
                "known to work), then pip install absl-py dm-tree packaging.",
                name=error.name,
            ) from error
        raise ImportError(
            f"tensorflow-privacy is installed, but its import failed: {error}. This is known to "
            f"work: tensorflow-privacy=={WORKS_WITH} with absl-py, dm-tree and packaging "
            "(pip install absl-py dm-tree packaging).",
            name=error.name,
        ) from error
    return module


def _with_switch(name: str) -> ModuleType:
    """Imports a module with the switch set, and leaves the switch as it was."""
    was_set = hasattr(sys, _SWITCH)
    if not was_set:
        setattr(sys, _SWITCH, True)
    try:
        return importlib.import_module(name)
    finally:
        if not was_set:
            delattr(sys, _SWITCH)
