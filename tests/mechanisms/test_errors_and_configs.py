"""Bad input, each with its message, and the round trip of every mechanism."""

from __future__ import annotations

import warnings

import numpy as np
import pytest

from tf_labeldp.mechanisms import (
    AggregateMechanism,
    ClassificationMechanism,
    InformativeRR,
    RandomizedResponse,
    RegressionMechanism,
    RRTopK,
    RRWithPrior,
)
from tf_labeldp.mechanisms.base import LabelMechanism, deserialize, serialize
from tf_labeldp.mechanisms.clusters import PriorResampling

UNIFORM = np.full(4, 0.25)
MAKERS = {
    "RandomizedResponse": lambda epsilon: RandomizedResponse(epsilon, 4),
    "RRTopK": lambda epsilon: RRTopK(epsilon, 4, 2),
    "RRWithPrior": lambda epsilon: RRWithPrior(epsilon, 4),
    "InformativeRR": lambda epsilon: InformativeRR(epsilon, 4),
    "PriorResampling": lambda epsilon: PriorResampling(epsilon, 4, 0.9, 0.1),
}
WITH_PRIORS = ["RRTopK", "RRWithPrior", "InformativeRR", "PriorResampling"]


@pytest.fixture(params=MAKERS)
def mechanism(request):
    return MAKERS[request.param](1.0)


@pytest.mark.parametrize("k", [0, -1])
def test_k_below_one(k):
    with pytest.raises(ValueError, match=f"k must be at least 1, got {k}"):
        RRTopK(1.0, 4, k)


def test_k_above_the_number_of_classes():
    with pytest.raises(ValueError, match="k must be at most num_classes=4, got 5"):
        RRTopK(1.0, 4, 5)


@pytest.mark.parametrize("k", [2.0, "2", True])
def test_k_of_a_wrong_type(k):
    with pytest.raises(TypeError, match="k must be an integer"):
        RRTopK(1.0, 4, k)


def test_fewer_than_two_classes():
    with pytest.raises(ValueError, match="num_classes must be at least 2, got 1"):
        RRWithPrior(1.0, 1)


BAD_LABELS = {
    "above": (np.array([0, 1, 987654]), ValueError, r"must lie in 0..3, but 1 of 3 do not"),
    "negative": (np.array([-1, -2, 0]), ValueError, r"must lie in 0..3, but 2 of 3 do not"),
    "float": (np.array([0.0, 1.0]), TypeError, "must be integers 0..3, got dtype float64"),
    "bool": (np.array([True]), TypeError, "must be integers 0..3, got dtype bool"),
    "text": (["a", "b"], TypeError, "must be integers 0..3, got dtype <U1.*classes="),
    "one-hot": (np.eye(4, dtype=int), ValueError, r"shape \(n,\), got shape \(4, 4\).*argmax"),
    "scalar": (np.int64(1), ValueError, r"shape \(n,\), got shape \(\)"),
}


@pytest.mark.parametrize("case", BAD_LABELS)
def test_bad_labels(mechanism, case):
    labels, error, message = BAD_LABELS[case]
    with pytest.raises(error, match=message) as caught:
        mechanism.randomize(labels, UNIFORM if mechanism.uses_priors else None)
    assert "987654" not in str(caught.value)


BAD_PRIORS = {
    "nan": ([0.5, np.nan, 0.25, 0.25], "must be finite, but 1 row.*overflow"),
    "infinite": ([0.5, np.inf, 0.25, 0.25], "must be finite, but 1 row"),
    "negative": ([0.5, -0.1, 0.3, 0.3], "must not be negative, but 1 row.*prior_from_logits"),
    "sum": ([0.5, 0.3, 0.1, 0.2], "must sum to one.*row 0 sums to 1.1"),
    "zeros": ([0.0] * 4, "must sum to one.*row 0 sums to 0.*uniform"),
    "sum-just-off": (
        [0.25, 0.25, 0.25, 0.2502],
        r"must sum to one in every row \(tolerance 0.0001\)",
    ),
    "short": ([0.5, 0.5], r"must have shape \(4,\) or \(2, 4\), got \(2,\)"),
    "rows": (np.full((3, 4), 0.25), r"must have shape \(4,\) or \(2, 4\), got \(3, 4\)"),
    "cube": (np.full((2, 4, 1), 0.25), r"must have shape .* got \(2, 4, 1\)"),
    "second-row": ([[0.25] * 4, [0.0] * 4], "1 row.* row 1 sums to 0"),
}


@pytest.mark.parametrize("name", WITH_PRIORS)
@pytest.mark.parametrize("case", BAD_PRIORS)
def test_bad_priors(name, case):
    priors, message = BAD_PRIORS[case]
    with pytest.raises(ValueError, match=message):
        MAKERS[name](1.0).randomize([0, 3], priors)


def test_priors_within_the_tolerance_are_taken():
    priors = np.array([0.25, 0.25, 0.25, 0.25009])
    assert RRWithPrior(1.0, 4).randomize([0, 3], priors).shape == (2,)


@pytest.mark.parametrize("name", WITH_PRIORS)
def test_priors_missing(name):
    with pytest.raises(ValueError, match=rf"{name} needs priors of shape \(4,\) or \(2, 4\)"):
        MAKERS[name](1.0).randomize([0, 3])
    with pytest.raises(ValueError, match=r"needs one prior of shape \(4,\), got None"):
        MAKERS[name](1.0).transition_matrix()
    with pytest.raises(ValueError, match=r"needs one prior of shape \(4,\), got \(1, 4\)"):
        MAKERS[name](1.0).transition_matrix(UNIFORM[np.newaxis])


def test_priors_superfluous():
    with pytest.raises(ValueError, match="RandomizedResponse takes no priors"):
        RandomizedResponse(1.0, 4).randomize([0], UNIFORM)
    with pytest.raises(ValueError, match="one channel for every prior"):
        RandomizedResponse(1.0, 4).transition_matrix(UNIFORM)


def test_numpy_scalars_become_python_numbers():
    made = RRTopK(np.float32(0.5), np.int32(4), np.int64(2))
    assert serialize(made)["config"] == {"epsilon": 0.5, "num_classes": 4, "k": 2}
    assert [type(value) for value in made.get_config().values()] == [float, int, int]


def test_unknown_mechanism():
    with pytest.raises(ValueError, match=r"unknown mechanism 'Nothing'; known are .*RRTopK"):
        deserialize({"class_name": "Nothing", "config": {}})


@pytest.mark.parametrize(
    "contract",
    [LabelMechanism, ClassificationMechanism, RegressionMechanism, AggregateMechanism],
)
def test_the_contract_cannot_be_instantiated(contract):
    with pytest.raises(TypeError, match=f"abstract class {contract.__name__}"):
        contract()


def test_swapped_arguments_are_told():
    with pytest.warns(UserWarning, match="epsilon comes first. Are the two swapped?"):
        RandomizedResponse(10, 2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        RandomizedResponse(9, 2)
        RandomizedResponse(10, 10)
        RandomizedResponse(10.5, 2)
