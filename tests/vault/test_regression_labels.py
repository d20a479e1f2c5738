"""The vault with numbers in a range: arguments, errors, releases and stores."""

from __future__ import annotations

import traceback

import numpy as np
import pytest

from tf_labeldp.accounting import BudgetExceededError, PrivacyBudget
from tf_labeldp.accounting.charges_by_example import ChargesByExample
from tf_labeldp.mechanisms import (
    ALIBI,
    ChannelMechanism,
    DiscreteLaplaceMechanism,
    DiscreteStaircaseMechanism,
    ExponentialMechanism,
    HistogramMechanism,
    LabelMomentMechanism,
    LaplaceMechanism,
    RandomizedResponse,
    RegressionMechanism,
    RROnBins,
    StaircaseMechanism,
)
from tf_labeldp.vault import LabelKind, LabelStoreError, Numbers, PrivateLabels

AMOUNTS = np.round(np.random.default_rng(5).gamma(1.0, 80.0, 300), 2).clip(0.0, 400.0)
SECRET = 123.456789


def make(labels=AMOUNTS, epsilon=1.0, **arguments):
    arguments = {"kind": Numbers(0.0, 400.0), **arguments}
    return PrivateLabels(labels, budget=PrivacyBudget(epsilon), **arguments)


def bins(epsilon=1.0, low=0.0, high=400.0):
    return RROnBins(epsilon, (low, high / 2, high), (high / 4, high / 2), (0, 0, 1))


def counts(epsilon=0.5, **arguments):
    return HistogramMechanism(epsilon, values=(0.0, 100.0, 400.0), **arguments)


@pytest.mark.parametrize("dtype", ["int8", "float32", list])
def test_dtypes(dtype):
    labels = [0, 1.5, 100] if dtype is list else np.array([0, 1, 100], dtype)
    vault = make(labels, kind=Numbers(0, 100))
    assert vault.randomize(LaplaceMechanism(1.0, 0.0, 100.0)).values.shape == (3,)


def test_properties():
    vault = make()
    assert vault.label_range == (0.0, 400.0)
    for ask in (lambda: vault.num_classes, lambda: vault.classes, lambda: vault.decode([0])):
        with pytest.raises(ValueError, match=r"numbers in \[0, 400\] and have no classes"):
            ask()
    assert "low=0, high=400" in repr(vault)
    classes = PrivateLabels([0, 1], num_classes=2, budget=PrivacyBudget(1.0))
    assert classes.label_range is None


def test_labels_outside_the_range():
    with pytest.raises(ValueError, match=r"in \[0, 400\], but 2 of 3 do not.*clip") as caught:
        make([1.0, 400.5, -SECRET])
    assert "400.5" not in str(caught.value) and "123.4" not in str(caught.value)
    vault = make([1.0, 1e9, -np.inf], kind=Numbers(0, 400, clip=True))
    sure = RROnBins(50.0, (0.0, 200.0, 400.0), (0.0, 400.0), (0, 0, 1))
    big = PrivateLabels([1.0, 1e9, -np.inf], Numbers(0, 400, clip=True), budget=PrivacyBudget(50.0))
    assert big.randomize(sure).values.tolist() == [0.0, 400.0, 0.0]  # A flip has probability e^-50.
    assert len(vault) == 3


@pytest.mark.parametrize(
    ("labels", "arguments", "error", "message"),
    [
        ([SECRET, np.nan], {}, ValueError, "1 of 2 labels are missing"),
        ([[SECRET]], {}, ValueError, r"shape \(1, 1\)"),
        ([str(SECRET)], {}, TypeError, "labels must be numbers, got texts"),
        ([True, False], {}, TypeError, "labels must be numbers, got dtype bool"),
        ([SECRET, None], {}, ValueError, "1 of 2 labels are missing"),
        ([SECRET, {}], {}, TypeError, "labels must be numbers, got dtype object"),
        (np.ma.array([1.0, SECRET], mask=[0, 1]), {}, ValueError, "1 of 2 labels are missing"),
    ],
)
def test_bad_labels_and_ranges(labels, arguments, error, message):
    with pytest.raises(error, match=message) as caught:
        make(labels, **arguments)
    assert "123.4" not in str(caught.value)


def test_clip_without_a_range():
    with pytest.raises(ValueError, match="clip=True is for numbers"):
        LabelKind.of(num_classes=2, clip=True)
    for arguments, message in [
        ({}, "got none of them"),
        ({"high": 400.0}, "needs both ends, got low=None, high=400"),
        ({"low": 0.0}, "needs both ends"),
        ({"low": 0, "high": 9, "classes": [1, 2]}, "classes together with low and high"),
    ]:
        with pytest.raises(ValueError, match=message):
            LabelKind.of(**arguments)


def test_mechanisms_of_another_kind_or_range():
    vault = make()
    with pytest.raises(TypeError, match="a tf_labeldp mechanism for numbers, got RandomizedResp"):
        vault.randomize(RandomizedResponse(1.0, 3))
    with pytest.raises(ValueError, match=r"labels in \[0, 300\], the labels lie in \[0, 400\]"):
        vault.randomize(bins(high=300.0))
    with pytest.raises(ValueError, match=r"labels in \[1, 400\], the labels lie in \[0, 400\]"):
        vault.randomize(bins(low=1.0))
    with pytest.raises(TypeError, match="a tf_labeldp mechanism, got HistogramMechanism"):
        vault.randomize(counts())
    with pytest.raises(TypeError, match="a tf_labeldp mechanism of many labels, got RROnBins"):
        vault.release(bins())
    classes = PrivateLabels([0, 1], num_classes=2, budget=PrivacyBudget(1.0))
    with pytest.raises(TypeError, match="a tf_labeldp mechanism for classes, got RROnBins"):
        classes.randomize(bins())
    assert vault.guarantee().epsilon == classes.guarantee().epsilon == 0.0


def test_a_release_is_charged_to_its_examples():
    vault = make(epsilon=1.0)
    noisy = vault.release(counts(0.7), indices=np.arange(100))
    assert noisy.values.shape == (3,) and vault.guarantee().epsilon == 0.7
    assert noisy.guarantee().epsilon == 0.7 and noisy.mechanism == counts(0.7)
    vault.randomize(bins(1.0), indices=np.arange(100, 300))  # parallel composition
    assert vault.guarantee().epsilon == 1.0
    with pytest.raises(BudgetExceededError, match="HistogramMechanism"):
        vault.release(counts(0.7), indices=np.arange(50, 60))
    vault.release(counts(0.3), indices=np.arange(100))
    assert vault.guarantee().epsilon == 1.0


def test_release_of_the_right_examples():
    """At epsilon 700 the noise is zero with probability 1 - 1e-150, and the counts are exact."""
    vault = make([0.0, 0.0, 90.0, 400.0], epsilon=2000.0)
    assert vault.release(counts(700.0)).values.tolist() == [2, 1, 1]
    by_group = vault.release(counts(700.0), indices=[3, 0], public_input=[1, 0])
    assert by_group.values.tolist() == [[1, 0, 0], [0, 0, 1]]
    assert by_group.groups.tolist() == [1, 0]


def test_a_histogram_by_groups_makes_a_prior_for_each_label():
    vault, groups = make([0.0, 0.0, 90.0, 400.0], epsilon=700.0), np.array([0, 0, 1, 1])
    priors = vault.release(counts(700.0), public_input=groups).priors()
    np.testing.assert_allclose(priors.probabilities, [[1, 0, 0], [0, 0.5, 0.5]], atol=1e-12)
    np.testing.assert_array_equal(np.asarray(priors), priors.probabilities[groups])


def test_the_store_returns_the_same_draws(tmp_path, monkeypatch):
    first = make(epsilon=2.0, store=tmp_path / "store")
    draw = first.randomize(bins(1.0), key="draw")
    histogram = first.release(counts(1.0), public_input=np.arange(300) % 2, key="histogram")
    again = make(epsilon=2.0, store=tmp_path / "store")
    assert again.guarantee() == first.guarantee()

    def refuse(size):
        raise AssertionError("random bits were drawn")

    monkeypatch.setattr("os.urandom", refuse)
    np.testing.assert_array_equal(again.randomize(bins(1.0), key="draw").values, draw.values)
    found = again.release(counts(1.0), public_input=np.arange(300) % 2, key="histogram")
    np.testing.assert_array_equal(found.values, histogram.values)
    assert found.values.dtype == histogram.values.dtype
    np.testing.assert_array_equal(found.priors(), histogram.priors())
    assert found.receipts[0].id == histogram.receipts[0].id
    assert again.mechanism("draw") == bins(1.0) and again.mechanism("histogram") == counts(1.0)
    with pytest.raises(KeyError, match="there is no draw 'other'; there are"):
        again.mechanism("other")
    with pytest.raises(LabelStoreError, match="made with other mechanism"):
        again.release(counts(0.9), key="histogram")


def test_an_unnamed_stored_release_needs_the_same_groups(tmp_path):
    groups = np.arange(300) % 2
    make(store=tmp_path / "s").release(counts(), public_input=groups)
    with pytest.raises(LabelStoreError, match="other priors or public input"):
        make(store=tmp_path / "s").release(counts(), public_input=1 - groups)


def test_the_store_of_other_numbers_or_another_range_is_refused(tmp_path):
    make(store=tmp_path / "store").randomize(bins())
    other = AMOUNTS.copy()
    other[7] += 0.001
    with pytest.raises(LabelStoreError, match="made for other labels"):
        make(other, store=tmp_path / "store")
    with pytest.raises(LabelStoreError, match=r"other settings: range differ"):
        make(kind=Numbers(0.0, 500.0), store=tmp_path / "store")
    with pytest.raises(LabelStoreError, match="num_classes, range differ"):
        PrivateLabels(
            AMOUNTS.astype(int),
            num_classes=401,
            budget=PrivacyBudget(1.0),
            store=tmp_path / "store",
        )


@pytest.mark.parametrize("kind", ["classes", "numbers"])
def test_errors_of_mechanisms_do_not_depend_on_the_labels(kind):
    """Every mechanism of the library gives the same shapes and errors on two label sets."""
    outcomes = []
    for labels in ([0, 1, 4, 9], [9, 9, 9, 9]):
        if kind == "classes":
            vault = PrivateLabels(labels, num_classes=10, budget=PrivacyBudget(1e6))
        else:
            labels = np.array(labels) / 1.7
            vault = PrivateLabels(labels, Numbers(0, 9), budget=PrivacyBudget(1e6))
        results = []
        for mechanism in (
            *(HistogramMechanism(1.0, num_classes=k) for k in (2, 9, 10, 11)),
            HistogramMechanism(1.0, values=(0.0, 3.0)),
            RandomizedResponse(1.0, 9),
            RandomizedResponse(1.0, 10),
            *(ALIBI(1.0, k) for k in (9, 10)),
            bins(low=0.0, high=8.0),
            bins(low=0.0, high=9.0),
            LaplaceMechanism(1.0, 0.0, 9.0),
            StaircaseMechanism(1.0, 0.0, 9.0),
            ExponentialMechanism(1.0, 0.0, 9.0),
            DiscreteLaplaceMechanism(1.0, 0, 9),
            DiscreteStaircaseMechanism(1.0, 0, 9),
            ChannelMechanism(1.0, np.arange(10.0), (-9.0, 18.0), np.full((10, 2), 0.5)),
        ):
            for use in (vault.randomize, vault.release):
                try:
                    results.append(np.shape(use(mechanism)))
                except (TypeError, ValueError) as error:
                    results.append(str(error))
        outcomes.append(results)
    assert outcomes[0] == outcomes[1]
    assert sum(isinstance(outcome, tuple) for outcome in outcomes[0]) >= 2


class Fragile(RegressionMechanism):
    """A user's mechanism that fails on one label."""

    def __init__(self, epsilon, failure="raises", trouble=SECRET):
        self.epsilon, self.failure, self.trouble = epsilon, failure, trouble

    def randomize(self, labels, public=None, *, rng=None):
        noisy = np.zeros(len(labels))
        if np.any(np.asarray(labels) == self.trouble):
            if self.failure == "raises":
                raise ValueError(f"cannot take {self.trouble}")
            if self.failure == "bare":
                raise ValueError
            if self.failure == "number":
                return np.append(noisy, self.trouble)
            noisy[-1] = np.nan
        return noisy

    def label_range(self):
        return (0.0, 400.0)

    def likelihood(self, outputs, labels):
        return np.ones((len(outputs), len(labels)))


@pytest.mark.parametrize("failure", ["raises", "bare", "number", "nan"])
def test_an_error_that_depends_on_the_labels_is_charged_and_not_shown(tmp_path, failure):
    fragile, store = Fragile(0.25, failure), tmp_path / "store"
    vault = make([1.0, SECRET], store=store)
    with pytest.raises(RuntimeError, match=r"Fragile failed on these labels.*charged") as caught:
        vault.randomize(fragile, key="lost")
    shown = "".join(traceback.format_exception(caught.value))
    assert str(SECRET) not in shown.replace("SECRET", "")
    for charged in (vault, make([1.0, SECRET], store=store)):
        assert charged.guarantee().epsilon == 0.25 and charged.remaining() == 0.75
        (receipt,) = charged.receipts
        assert (receipt.kind, receipt.output_digest, receipt.key) == ("failed", None, "lost")
        assert charged.history()[0].what.endswith(", which failed")
        assert not charged.has_draw("lost")
    assert (store / "records" / "000000").read_bytes().endswith(b"}\n")  # without arrays
    with pytest.raises(RuntimeError, match="charged"):  # No draw was kept, so it is drawn again.
        vault.randomize(fragile, key="lost")
    assert vault.guarantee().epsilon == 0.5
    assert make([1.0, 2.0]).randomize(fragile).values.tolist() == [0.0, 0.0]


def interrupt(monkeypatch, *, first):
    """Interrupts the next charge, before or right after it is counted."""

    def interrupted(self, *arguments, add=ChargesByExample.add):
        if not first:
            add(self, *arguments)
        raise KeyboardInterrupt

    monkeypatch.setattr(ChargesByExample, "add", interrupted)


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("stored", [True, False])
def test_an_interrupted_draw_is_charged_before_it_can_be_returned(
    monkeypatch, tmp_path, first, stored
):
    arguments = {"epsilon": 2.0, "store": tmp_path / "store" if stored else None}
    vault, mechanism = make(**arguments), LaplaceMechanism(1.0, 0.0, 400.0)
    with monkeypatch.context() as patch:
        interrupt(patch, first=first)
        with pytest.raises(KeyboardInterrupt):
            vault.randomize(mechanism, key="draw")
    assert not vault.has_draw("draw")
    if not stored:
        assert vault.remaining() == (2.0 if first else 1.0)
        return
    again = make(**arguments)
    assert again.has_draw("draw") and again.guarantee().epsilon == 1.0
    again.randomize(mechanism, key="draw")
    assert again.guarantee().epsilon == 1.0


def test_float32_labels_at_the_ends_of_the_range():
    vault = make(np.float32([0.1, 0.7]), kind=Numbers(0.1, 0.7))
    noisy = vault.randomize(LaplaceMechanism(1.0, 0.1, 0.7)).values
    assert noisy.min() >= 0.1 and noisy.max() <= 0.7
    with pytest.raises(ValueError, match=r"1 of 2 do not"):
        make(np.float32([0.1, 0.70001]), kind=Numbers(0.1, 0.7))
    # As float32, 0.7 is below the double and 1.1 above it, so both labels miss the range slightly.
    vault = make(np.float32([0.7, 1.1]), kind=Numbers(0.7, 1.1))
    assert float(np.float32(0.7)) < 0.7 and float(np.float32(1.1)) > 1.1
    assert vault.randomize(LaplaceMechanism(1.0, 0.7, 1.1)).values.shape == (2,)


def test_statistics_of_classes_and_of_rows_are_not_for_numbers():
    vault = make([1.0, 2.0])
    for wrong in (
        HistogramMechanism(0.5, 3),
        LabelMomentMechanism(0.5, 1e-6, num_labels=2),
    ):
        with pytest.raises(ValueError, match="Make the mechanism for numbers"):
            vault.release(wrong, public_input=np.ones((2, 1)))
    assert vault.guarantee().epsilon == 0.0
