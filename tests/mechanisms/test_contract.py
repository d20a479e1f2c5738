"""The contract that every mechanism keeps: its channel, price, configuration and refusals."""

from __future__ import annotations

import dataclasses
import inspect
import itertools
import json
import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import pytest
from mechanism_cases import PUBLIC, needing
from numeric_cases import MECHANISMS
from slow_cases import with_slow

from tf_labeldp import ClusterRandomizedResponse, PrivacyBudget, PrivateLabels, mechanisms
from tf_labeldp.accounting import BudgetExceededError
from tf_labeldp.mechanisms import (
    ALIBI,
    ChannelMechanism,
    ExponentialMechanism,
    HistogramMechanism,
    InformativeRR,
    LabelMomentMechanism,
    LinearBinningMechanism,
    MetricMechanism,
    PeerToPeerRandomizedResponse,
    ProjectiveGeometryResponse,
    QuantileMechanism,
    RandomizedResponse,
    RROnBins,
    RRTopK,
    RRWithPrior,
    SelectionMechanism,
)
from tf_labeldp.vault import LabelKind

EPSILONS = [1e-3, 0.5, 4.0, 50.0]
RNG = np.random.default_rng(1)
PRIORS = [RNG.dirichlet(np.full(k, c)) for k in range(2, 13) for c in (0.2, 1.0, 1.0, 20.0)]
PRIORS += [np.full(k, 1.0 / k) for k in range(2, 13)]
RANGES = ((0, 1), (-3, 4), (100, 150))


def by_prior(make):
    return lambda epsilon: [make(epsilon, p.size).transition_matrix(p) for p in PRIORS]


def every_set_size(epsilon):
    return [
        RRTopK(epsilon, p.size, k).transition_matrix(p)
        for p in PRIORS
        for k in range(2, p.size + 1)
    ]


def bins(epsilon):
    return RROnBins(epsilon, (0.0, 10.0, 20.0, 50.0, 100.0), (5.0, 20.0, 70.0), (0, 0, 1, 2, 2))


CHANNELS = {
    "RandomizedResponse": lambda e: [
        RandomizedResponse(e, k).transition_matrix() for k in range(2, 13)
    ],
    "RRTopK": every_set_size,
    "RRWithPrior": by_prior(RRWithPrior),
    "InformativeRR": by_prior(InformativeRR),
    "ProjectiveGeometryResponse": lambda e: [
        ProjectiveGeometryResponse(e, k).transition_matrix() for k in (2, 5, 12, 40)
    ],
    "RROnBins": lambda e: [bins(e).transition_matrix()],
}


@pytest.mark.parametrize("name", CHANNELS)
@pytest.mark.holds(
    "mechanisms.ClassificationMechanism",
    "mechanisms.InformativeRR",
    "mechanisms.PriorMechanism",
    "mechanisms.ProjectiveGeometryResponse",
    "mechanisms.RROnBins",
    "mechanisms.RRTopK",
    "mechanisms.RRWithPrior",
    "mechanisms.RandomizedResponse",
)
def test_the_worst_log_ratio_of_a_channel_is_epsilon(name, worst_log_ratio):
    """Over every pair of labels and every output, for all priors here and all set sizes."""
    varying = 0
    for epsilon, matrix in ((e, matrix) for e in EPSILONS for matrix in CHANNELS[name](e)):
        np.testing.assert_allclose(matrix.sum(axis=1), 1.0, rtol=0, atol=4e-16)
        assert matrix.min() >= 0.0
        worst = worst_log_ratio(matrix)
        if name == "RRWithPrior" and worst == 0.0:  # k* = 1: the answer is constant
            continue
        varying += 1
        assert abs(worst - epsilon) <= 1e-12
        assert worst > epsilon * (1 - 1e-8)  # not private for an epsilon just below
    assert varying


def likelihoods(mechanism):
    """Over all labels, or 51, and all outputs, or 401 of them, with those outside: transposed."""
    low, high = mechanism.label_range()
    width = high - low
    labels = np.arange(low, high + 1) if mechanism.whole else np.linspace(low, high, 51)
    outputs = labels if mechanism.whole else np.linspace(low, high, 401)
    if not mechanism.clip:
        more = np.arange(1, 2 * width + 1) if mechanism.whole else np.linspace(0, 2 * width, 101)
        outputs = np.concatenate([low - more[1:], outputs, high + more[1:]])
    return mechanism.likelihood(outputs, labels).T


@pytest.mark.parametrize("name", MECHANISMS)
@pytest.mark.holds(
    "mechanisms.DiscreteLaplaceMechanism",
    "mechanisms.DiscreteStaircaseMechanism",
    "mechanisms.ExponentialMechanism",
    "mechanisms.LaplaceMechanism",
    "mechanisms.StaircaseMechanism",
)
def test_the_worst_log_ratio_of_likelihoods_is_epsilon(name, worst_log_ratio):
    """Half of epsilon for the exponential mechanism, whose grid moves it by 2^-32 at most."""
    half = MECHANISMS[name] is ExponentialMechanism
    clips = [True] if half else [True, False]  # it has no outputs outside the range
    for epsilon, (low, high), clip in itertools.product((0.1, 1.0, 12.0), RANGES, clips):
        mechanism = MECHANISMS[name](epsilon, low, high, clip)
        assert mechanism.delta == 0.0
        expected = 0.5 * epsilon if half else epsilon
        worst = worst_log_ratio(likelihoods(mechanism))
        assert worst <= expected * (1 + 1e-12)
        assert worst >= expected * (1 - 1e-9)


LABELS = np.arange(60) % 4
PRIOR = np.array([0.4, 0.3, 0.2, 0.1])
RANGE = {"low": 0.0, "high": 8.0}
FEATURES = np.random.default_rng(2).uniform(-0.5, 0.5, (60, 3))
VOTES = np.stack([LABELS, (LABELS + 1) % 4])


class Member(NamedTuple):
    """A mechanism as a function of epsilon, and the vault and public input to use it with."""

    make: Any
    public: Any = None
    kind: Mapping[str, float] = MappingProxyType({"num_classes": 4})
    delta: float = 0.0

    def vault(self, epsilon, store=None):
        kind = self.kind
        labels = LABELS if "num_classes" in kind else LABELS * 2.0
        labels = labels % 2 if kind.get("num_classes") == 2 else labels
        budget = PrivacyBudget(epsilon, self.delta)
        return PrivateLabels(labels, LabelKind.of(**kind), budget=budget, store=store)

    def use(self, vault, key):
        mechanism = self.make(1.0)
        if isinstance(mechanism, mechanisms.AggregateMechanism):
            return vault.release(mechanism, public_input=self.public, key=key)
        public = {} if self.public is None else {mechanism.public_input: self.public}
        return vault.randomize(mechanism, key=key, **public)


def resampling(epsilon):
    return ClusterRandomizedResponse(4, 0.05, 4.0, draw_epsilon=epsilon).draw


OF_CLASSES = needing("epsilon", "num_classes")
OF_NUMBERS = needing("epsilon", "low", "high")
MEMBERS = {
    **{
        name: Member(lambda e, kind=kind: kind(e, 4), PRIOR if kind.public_input else None)
        for name, kind in OF_CLASSES.items()
    },
    **{
        name: Member(lambda e, kind=kind: kind(e, 0, 8), None, RANGE)
        for name, kind in OF_NUMBERS.items()
    },
    "RRTopK": Member(lambda e: RRTopK(e, 4, 2), PRIOR),
    "PriorResampling": Member(resampling, PRIOR),
    "ALIBI, gaussian": Member(lambda e: ALIBI(e, 4, 1e-5, "gaussian"), delta=1e-5),
    "PeerToPeerRandomizedResponse": Member(
        lambda e: PeerToPeerRandomizedResponse(e, 0.4, 0.5, 10),
        np.arange(60) % 5,
        {"num_classes": 2},
    ),
    "RROnBins": Member(lambda e: RROnBins(e, (0, 4, 8), (2, 6), (0, 0, 1)), None, RANGE),
    "ChannelMechanism": Member(
        lambda e: ChannelMechanism(e, (0, 8), (0, 8), ((0.6, 0.4), (0.4, 0.6))), None, RANGE
    ),
    "SurveyChannel": Member(
        lambda e: mechanisms.SurveyChannel(RandomizedResponse(e, 4).transition_matrix())
    ),
    "optimal_unbiased": Member(
        lambda e: mechanisms.optimal_unbiased((0, 4, 8), (0.5, 0.3, 0.2), e), None, RANGE
    ),
    "HistogramMechanism": Member(lambda e: HistogramMechanism(e, 4)),
    "HistogramMechanism of groups": Member(lambda e: HistogramMechanism(e, 4), LABELS),
    "LabelMomentMechanism": Member(
        lambda e: LabelMomentMechanism(e, 1e-5, num_classes=4), FEATURES, delta=1e-5
    ),
    "MetricMechanism": Member(lambda e: MetricMechanism(e, "accuracy", 4), LABELS),
    "MetricMechanism of numbers": Member(
        lambda e: MetricMechanism(e, "mae", **RANGE), LABELS * 1.0, RANGE
    ),
    "LinearBinningMechanism": Member(lambda e: LinearBinningMechanism(e, 4), LABELS / 8.0),
    "SelectionMechanism": Member(lambda e: SelectionMechanism(e, "accuracy", 4), VOTES),
    "QuantileMechanism": Member(
        lambda e: QuantileMechanism(e, 0.5, 4), np.random.default_rng(3).dirichlet(PRIOR, 60)
    ),
    "QuantileMechanism of numbers": Member(
        lambda e: QuantileMechanism(e, 0.5, **RANGE), LABELS * 1.0, RANGE
    ),
}


@pytest.fixture(params=MEMBERS)
def member(request):
    return MEMBERS[request.param]


def test_every_mechanism_is_in_the_table():
    """One with other arguments needs a member of its own."""
    assert set(PUBLIC.values()) <= {type(each.make(1.0)) for each in MEMBERS.values()}
    assert {"RandomizedResponse", "RRWithPrior", "ALIBI"} <= OF_CLASSES.keys()
    assert OF_NUMBERS == MECHANISMS


@pytest.mark.holds("mechanisms.Mechanism")
def test_the_check_of_mechanisms_passes(member):
    mechanisms.check_mechanism(member.make(1.0))


@pytest.mark.slow
@pytest.mark.parametrize("epsilon", [0.01, 5.0, 50.0])
def test_the_check_of_mechanisms_passes_at_any_epsilon(member, epsilon):
    fixed = ("PeerToPeerRandomizedResponse", "ChannelMechanism")  # of a channel that needs more
    if epsilon > 1.0 or member not in [MEMBERS[name] for name in fixed]:
        mechanisms.check_mechanism(member.make(epsilon))


def test_a_use_costs_what_the_mechanism_states(member, tmp_path):
    """One receipt; the budget of one use does not pay for two, and a store reads both back."""
    vault = member.vault(1.0, tmp_path / "store")
    released = member.use(vault, "first")
    (receipt,) = vault.receipts
    assert [one.charge for one in released.receipts] == [receipt.charge]
    assert (receipt.charge.epsilon, receipt.charge.delta) == (1.0, member.delta)
    assert released.guarantee().epsilon == vault.guarantee().epsilon == 1.0
    with pytest.raises(BudgetExceededError):
        member.use(vault, "second")
    assert vault.receipts == (receipt,)
    again = member.vault(1.0, tmp_path / "store")
    assert again.mechanism("first") == member.make(1.0)
    assert again.guarantee() == vault.guarantee()


def test_round_trip(member):
    mechanism = member.make(1.0)
    config = mechanism.get_config()
    fields = [field.name for field in dataclasses.fields(mechanism)]
    assert list(config) == [name for name in fields if name != "receipts"]
    again = type(mechanism).from_config(json.loads(json.dumps(config)))
    assert again == mechanism and hash(again) == hash(mechanism)
    assert again.get_config() == config
    assert member.make(2.0) != mechanism
    with pytest.raises(dataclasses.FrozenInstanceError):
        mechanism.epsilon = 100.0


@pytest.mark.parametrize("name", [name for name in MEMBERS if name != "PriorResampling"])
def test_epsilon_is_finite_and_above_zero(name):
    for epsilon in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match=r"epsilon must be finite and above zero.*plain label"):
            MEMBERS[name].make(epsilon)
    with pytest.raises(TypeError, match="epsilon must be a number above zero, got"):
        MEMBERS[name].make("1")


def test_other_labels_and_generators_are_refused_and_no_label_is_shown(member):
    mechanism, kind = member.make(1.0), member.vault(1.0).kind
    call = getattr(mechanism, "randomize", None) or mechanism.release
    with pytest.raises(TypeError, match=r"rng must be a numpy\.random\.Generator or None, got int"):
        call(kind.any_labels(60), member.public, rng=7)
    labels = kind.any_labels(60) * 1.0
    labels[7] = 987654.25
    with pytest.raises((TypeError, ValueError), match="labels must") as caught:
        call(labels if "num_classes" not in member.kind else labels.astype(int), member.public)
    assert "987654" not in str(caught.value)


ENDS = [(0.0, 10.0**power) for power in (-323, -300, -152, -139, 0, 139, 300)]
ENDS += [(-1.7e308, 1.7e308), (-1e-152, 1e-152), (1e16, 1e16 + 2.0), (1.0, 1.0 + 2.0**-52)]
ROWS = 60


def inputs_between(low, high):
    """Public inputs that some statistic of numbers takes: predictions, features, models."""
    predictions = np.linspace(low, high, ROWS)
    return [None, predictions, [predictions, predictions[::-1]], np.full((ROWS, 2), 0.5)]


def of_range(kind, low, high, **options):
    """A mechanism for numbers of this class, by the arguments that it needs."""
    needed = {"epsilon": 1.0, "delta": 1e-5, "alpha": 0.5, **options}
    names = inspect.signature(kind).parameters
    return kind(low=low, high=high, **{name: needed[name] for name in names if name in needed})


def kinds_of_ranges():
    for kind in PUBLIC.values():
        if {"low", "high"} <= set(inspect.signature(kind).parameters):
            has_metric = "metric" in inspect.signature(kind).parameters
            metrics = ["mse", "mae"] * has_metric + ["mean"] * (kind is MetricMechanism)
            yield from [(kind, {"metric": metric}) for metric in metrics] or [(kind, {})]


KINDS_OF_RANGES = list(kinds_of_ranges())
SLOW_RANGES = {
    mechanisms.LabelMomentMechanism,
    mechanisms.MetricMechanism,
    mechanisms.QuantileMechanism,
    mechanisms.SelectionMechanism,
    mechanisms.StaircaseMechanism,
}


@pytest.mark.parametrize(
    ("kind", "options"),
    with_slow(KINDS_OF_RANGES, [case for case in KINDS_OF_RANGES if case[0] in SLOW_RANGES]),
    ids=lambda each: getattr(each, "__name__", str(each)),
)
def test_a_range_is_refused_or_has_its_noise(kind, options):
    """In a range that doubles can't divide, noise would round to nothing."""
    tested = refused = 0
    for low, high in ENDS:
        try:
            mechanism = of_range(kind, low, high, **options)
        except ValueError as error:
            assert re.search("whole number|high - low must be between", str(error))
            refused += 1
            continue
        for public in inputs_between(low, high):
            size = None if public is None else ROWS
            try:
                is_tested = mechanisms.check_mechanism(
                    mechanism, draws=4000, public_input=public, size=size
                )
            except (TypeError, ValueError) as error:
                # A public input for other statistics; nothing else is refused.
                assert "violates" not in str(error) and "made-up" not in str(error)
                continue
            tested += is_tested
    assert refused >= 4 and (tested or "whole" in vars(kind))
