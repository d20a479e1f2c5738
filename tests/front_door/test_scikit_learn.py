"""Every estimator passes scikit-learn's ``check_estimator``, with named exceptions."""

from __future__ import annotations

import types
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import pytest
from fits import fits_apart as fits_apart
from sklearn.base import BaseEstimator, clone
from sklearn.utils import column_or_1d
from sklearn.utils.estimator_checks import check_estimator
from slow_cases import with_slow

import tf_labeldp as ldp
from tf_labeldp import boosting, features, front_door, heads
from tf_labeldp.boosting import PrivateBoosting
from tf_labeldp.vault import LabelKind

EPSILON, DELTA = 1e4, 1e-3
RANGE = {"low": -1000.0, "high": 1000.0}
NUMBERS = {**RANGE, "insecure_seed": 0}
TREES = {"max_trees": 2, "insecure_seed": 0}


def classes_of(y: Any) -> list[Any]:
    """Returns the whole numbers or texts among labels, which this test declares public."""
    labels = np.asarray(y)
    return np.unique(labels.astype(int) if labels.dtype.kind == "f" else labels).tolist()


class WithClasses:
    """Takes the classes, which scikit-learn's checks do not name, from the labels."""

    def fit(self, X, y, sample_weight=None):
        kinds = {} if y is None else {"classes": classes_of(y)}
        model = clone(self).set_params(**kinds)
        options = {} if sample_weight is None else {"sample_weight": sample_weight}
        fitted = super(WithClasses, model).fit(X, y, **options)
        own = self.get_params()
        vars(self).update({name: each for name, each in vars(fitted).items() if name not in own})
        return self


class Ridge(WithClasses, ldp.PrivateRidge):
    pass


class LogisticRegression(WithClasses, ldp.PrivateLogisticRegression):
    pass


class Clusters(WithClasses, heads.NoiseCluster):
    """Counts examples, which have no weights."""

    def fit(self, X, y):
        return super().fit(X, y)


class Boosting(WithClasses, PrivateBoosting):
    pass


class Classifier(WithClasses, ldp.PrivateClassifier):
    pass


class Search(ldp.PrivateSearchCV):
    """Puts labels into a vault, which a search needs."""

    def fit(self, X, y, sample_weight=None):
        if y is not None:
            kinds = RANGE if self._is_regressor() else {"classes": classes_of(y)}
            y = column_or_1d(y, warn=True)
            kind = LabelKind.of(**kinds)
            budget = ldp.PrivacyBudget(EPSILON, DELTA)
            y = ldp.PrivateLabels(y, kind, budget=budget, insecure_seed=0)
        return super().fit(X, y, sample_weight)


class Case(NamedTuple):
    estimator: BaseEstimator
    expected: Mapping[str, str] = types.MappingProxyType({})


FEW = "Trees are refused for fewer than 20 labels, from which they would learn next to nothing."
WITH_FEW = {
    "check_n_features_in_after_fitting": FEW,
    "check_sample_weights_pandas_series": FEW,
    "check_sample_weights_not_an_array": FEW,
    "check_sample_weights_shape": FEW,
    "check_sample_weights_not_overwritten": FEW,
    "check_sample_weight_equivalence_on_dense_data": FEW,
    "check_sample_weight_equivalence_on_sparse_data": FEW,
    "check_fit2d_1feature": FEW,
}

NOISE = "A row of weight two and two rows get different noise; without noise they are the same."
WITH_NOISE = {
    "check_sample_weight_equivalence_on_dense_data": NOISE,
    "check_sample_weight_equivalence_on_sparse_data": NOISE,
}

CASES = {
    "RandomFourierFeatures": Case(features.RandomFourierFeatures(20)),
    "TableCodes": Case(features.TableCodes()),
    "NeighbourSmoothing": Case(features.NeighbourSmoothing(num_neighbours=2)),
    # Images have three dimensions: scikit-learn checks the constructor alone.
    "PatchDictionary": Case(features.PatchDictionary(4, 3, pooling=1)),
    "PrivateRidge, classes": Case(Ridge(EPSILON, DELTA, insecure_seed=0), WITH_NOISE),
    "PrivateRidge, numbers": Case(ldp.PrivateRidge(EPSILON, DELTA, **NUMBERS)),
    "PrivateLogisticRegression": Case(
        LogisticRegression(EPSILON, DELTA, insecure_seed=0), WITH_NOISE
    ),
    "PrivatePoissonRegression": Case(
        heads.PrivatePoissonRegression(EPSILON, DELTA, **{**NUMBERS, "low": 0.0}), WITH_NOISE
    ),
    "NoiseCluster": Case(Clusters(3, EPSILON, insecure_seed=0)),
    "PrivateBoosting, classes": Case(
        Boosting(EPSILON, **TREES),
        {
            **WITH_FEW,
            "check_classifier_data_not_an_array": FEW,
        },
    ),
    "PrivateBoosting, numbers": Case(
        PrivateBoosting(EPSILON, **{**NUMBERS, **TREES}),
        {**WITH_FEW, "check_regressors_no_decision_function": FEW},
    ),
    "PrivateClassifier": Case(Classifier(EPSILON, DELTA, insecure_seed=0), WITH_NOISE),
    "PrivateRegressor": Case(ldp.PrivateRegressor(EPSILON, DELTA, **NUMBERS)),
    "PrivateSearchCV, classes": Case(
        Search(ldp.PrivateRidge(1.0, DELTA), {"penalty": [1.0, 10.0]}, 100.0, DELTA), WITH_NOISE
    ),
    "PrivateSearchCV, numbers": Case(
        Search(ldp.PrivateRidge(1.0, DELTA, **RANGE), {"penalty": [1.0, 10.0]}, 100.0, DELTA),
        {**WITH_NOISE, "check_fit2d_1sample": "Its error names the part that has no example."},
    ),
}
FAST = {"TableCodes", "PatchDictionary", "PrivateRidge, classes"}


def test_every_estimator_is_in_the_table():
    """``BootstrappedHead`` and ``PublicEncoder`` take a network, which fixes their inputs."""
    parts = (features, heads, boosting, front_door)
    public = {getattr(part, name) for part in parts for name in part.__all__}
    public = {kind for kind in public if isinstance(kind, type) and issubclass(kind, BaseEstimator)}
    tested = {kind for case in CASES.values() for kind in type(case.estimator).__mro__}
    assert public - tested == {heads.BootstrappedHead, features.PublicEncoder}


@pytest.mark.usefixtures("fits_apart")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", with_slow(CASES, CASES.keys() - FAST))
def test_check_estimator(name):
    case = CASES[name]
    results = check_estimator(
        case.estimator, expected_failed_checks=dict(case.expected), on_fail=None, on_skip=None
    )
    found: dict[str, dict[str, Any]] = {"failed": {}, "xfail": {}}
    for each in results:
        found.setdefault(each["status"], {})[each["check_name"]] = each["exception"]
    assert found["failed"] == {}
    assert set(found["xfail"]) == set(case.expected), "an exception that is no longer needed"
