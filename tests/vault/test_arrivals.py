"""Labels that come later: new examples, examples without a label yet, and draws that go on."""

from __future__ import annotations

import pathlib
import warnings

import keras
import numpy as np
import pandas as pd
import polars as pl
import pytest

import tf_labeldp as ldp
from tf_labeldp.accounting import BudgetExceededError, PrivacyBudget, ReceiptError, Receipts
from tf_labeldp.dossier import verify
from tf_labeldp.mechanisms import (
    HistogramMechanism,
    LaplaceMechanism,
    Priors,
    RandomizedResponse,
    RRWithPrior,
)
from tf_labeldp.plugins import Ledger
from tf_labeldp.vault import Classes, LabelStoreError, NoisyLabels, Numbers, PrivateLabels, Rows
from tf_labeldp.vault.records import Arrival

WEEKS = [np.random.default_rng(i).integers(0, 5, size) for i, size in enumerate((100, 60, 40))]
ALL = np.concatenate(WEEKS)
SURE = 40.0  # an epsilon at which no label is flipped
NOTE = "The time at which a label became known does not depend on the label."


@pytest.fixture(params=[False, True], ids=["memory", "store"])
def opened(request, make, tmp_path):
    """Makes a vault of the first week, in memory or with a store."""
    place = {"store": tmp_path / "labels"} if request.param else {}
    return lambda epsilon=1.0, **more: make(epsilon, **{"labels": WEEKS[0], **place, **more})


def ways(path, weeks=3, epsilon=1.0):
    """The two ways of opening a store: with all labels, and week by week."""
    budget = PrivacyBudget(epsilon)
    yield PrivateLabels(np.concatenate(WEEKS[:weeks]), 5, budget=budget, store=path)
    labels = PrivateLabels(WEEKS[0], 5, store=path)
    for week in WEEKS[1:weeks]:
        labels.extend(week)
    yield labels


@pytest.mark.holds("vault.PrivateLabels.extend")
def test_a_draw_goes_on_with_the_new_labels_alone(opened, response):
    labels = opened()
    first = labels.randomize(response(1.0), key="weekly")
    second = labels.extend(WEEKS[1])
    assert (len(labels), len(second)) == (160, 60)
    np.testing.assert_array_equal(second.indices, np.arange(100, 160))
    # The new labels have spent nothing, the old ones all.
    assert (labels.remaining(), second.remaining()) == (0.0, 1.0)
    both = labels.randomize(response(1.0), key="weekly")
    np.testing.assert_array_equal(both.indices, np.arange(160))
    np.testing.assert_array_equal(both.values[:100], first.values)
    assert [use.examples for use in labels.history()] == [100, 60]
    assert labels.guarantee().epsilon == both.guarantee().epsilon == second.guarantee().epsilon == 1
    assert labels.guarantee().num_units == 160 and labels.remaining() == 0.0
    # Both sides of the budget: nothing more on any label, in one week or in all.
    for part in (labels, second):
        with pytest.raises(BudgetExceededError):
            part.randomize(response(0.01), key="more")
    third = labels.extend(WEEKS[2])
    third.randomize(response(1.0), key="of its own")
    assert labels.guarantee().epsilon == 1.0 and NOTE not in labels.guarantee().assumptions
    np.testing.assert_array_equal(first.indices, np.arange(100))  # a result stays what it was


@pytest.mark.holds("vault.PrivateLabels.extend")
def test_a_use_of_all_weeks_adds_up_on_each_label(opened, response):
    labels = opened(2.0)
    labels.randomize(response(1.0), key="a")
    labels.extend(WEEKS[1]).randomize(response(0.5), key="b")
    counts = labels.release(HistogramMechanism(0.75, 5))
    assert labels.guarantee().epsilon == 1.75 and counts.guarantee().epsilon == 0.75
    assert abs(counts.values.sum() - 160) < 60
    assert labels.remaining() == 0.25
    labels.extend(WEEKS[2])
    assert labels.guarantee().epsilon == 1.75
    with pytest.raises(BudgetExceededError, match=r"together epsilon=2\.05"):
        labels.randomize(response(0.3), key="c")
    labels.split(np.arange(160, 200))[1].randomize(response(2.0), key="c")
    assert labels.guarantee().epsilon == 2.0


def test_folders_of_draws_are_joined_if_they_count_examples_alike(tmp_path, response):
    vault = PrivateLabels(WEEKS[0], 5, budget=PrivacyBudget(2.0))
    halves = vault.split(0.5)

    def joined(name, *draws):
        for number, noisy in enumerate(draws):
            noisy.save(tmp_path / name / str(number))
        return NoisyLabels.load(tmp_path / name)

    days = [vault.randomize(response(1.0), indices=rows) for rows in np.split(np.arange(90), 3)]
    found = joined("days", days[1], days[2], days[0])
    np.testing.assert_array_equal(found.indices, np.arange(90))
    np.testing.assert_array_equal(found.values, np.concatenate([day.values for day in days]))
    assert found.guarantee().epsilon == 1.0
    vault.extend(WEEKS[1])
    later = vault.randomize(response(1.0), indices=np.arange(100, 150))
    found = joined("the first week last", later, *days)
    np.testing.assert_array_equal(found.rows_among({(160,)}), found.indices)
    parts = [
        half.randomize(response(1.0), indices=rows)
        for half, rows in zip(halves, np.split(np.arange(40), 2), strict=True)
    ]
    for name, draws in {"parts": parts, "both": [parts[1], days[0]], "twice": days[:1] * 2}.items():
        with pytest.raises(ReceiptError, match="different examples of one vault"):
            joined(name, *draws)


def test_receipts_of_each_week_compose_in_parallel_in_any_order(response):
    budget = PrivacyBudget(4.0)
    labels = PrivateLabels(WEEKS[0], 5, budget=budget)
    labels.randomize(response(1.0), key="a")
    labels.randomize(response(0.5), key="b")
    labels.extend(WEEKS[1])
    labels.randomize(response(1.0), key="a")
    labels.charge(ldp.accounting.Charge(0.25, 0.0, response(0.25).dp_event()), what="of all")
    receipts = labels.receipts
    for order in (receipts, receipts[::-1], receipts[1:] + receipts[:1]):
        assert Receipts(order).guarantee().epsilon == 1.75
    without_first = [receipt for receipt in receipts if receipt.num_examples != 100]
    assert Receipts(without_first).guarantee().epsilon == 1.25


def test_the_store_opens_in_both_ways_and_draws_nothing_twice(
    tmp_path, response, no_new_randomness
):
    path = tmp_path / "labels"
    labels = PrivateLabels(WEEKS[0], 5, budget=PrivacyBudget(1.0), store=path)
    for week in WEEKS[1:]:
        noisy = labels.randomize(response(1.0), key="weekly")
        labels.extend(week)
    noisy = labels.randomize(response(1.0), key="weekly")
    vaults = list(ways(path))
    no_new_randomness()
    for again in vaults:
        found = again.randomize(response(1.0), key="weekly")
        np.testing.assert_array_equal(found.values, noisy.values)
        assert len(found.receipts) == 3 and again.guarantee().epsilon == 1.0
    # An older script, which has the first two weeks, gets their draws.
    for before in ways(path, weeks=2):
        found = before.randomize(response(1.0), key="weekly")
        np.testing.assert_array_equal(found.values, noisy.values[:160])
    stored = Ledger.of_store(path)
    assert stored.label_set.size == 200 and stored.guarantee([], None).epsilon == 1.0
    assert [count for _, count in stored.spread()] == [200]


def test_processes_that_share_a_store(tmp_path, response):
    path = tmp_path / "labels"
    one = PrivateLabels(WEEKS[0], 5, budget=PrivacyBudget(1.0), store=path)
    other = PrivateLabels(WEEKS[0], 5, store=path)
    one.extend(WEEKS[1])
    drawn = one.randomize(response(0.5), key="of both")
    # The other one has the first week alone, and is charged for it alone.
    noisy = other.randomize(response(0.5), key="of one")
    assert len(noisy) == 100 and [use.examples for use in other.history()] == [160, 100]
    assert other.guarantee().epsilon == 1.0
    with pytest.raises(LabelStoreError, match="60 labels that came after the first 1"):
        other.extend(WEEKS[2])
    other.extend(WEEKS[1])
    np.testing.assert_array_equal(other.randomize(response(0.5), key="of both"), drawn.values)
    assert len(other) == 160 and one.label_set.name == other.label_set.name


def test_draws_without_a_name_and_with_priors_go_on(opened):
    mechanism = RRWithPrior(1.0, 5)
    priors = np.random.default_rng(4).dirichlet(np.ones(5), 160)
    labels = opened(4.0)
    by_row = labels.randomize(mechanism, priors=priors[:100], key="rows")
    groups = np.arange(160) % 3
    labels.randomize(mechanism, priors=Priors(priors[:3], groups[:100]), key="groups")
    labels.extend(WEEKS[1])
    both = labels.randomize(mechanism, priors=priors, key="rows")
    np.testing.assert_array_equal(both.values[:100], by_row.values)
    np.testing.assert_array_equal(np.asarray(both.priors), priors)
    expected = ldp.estimation.posterior(mechanism, both.values, priors)
    np.testing.assert_array_equal(both.posterior(), expected)
    grouped = labels.randomize(mechanism, priors=Priors(priors[:3], groups), key="groups")
    np.testing.assert_array_equal(np.asarray(grouped.priors), priors[:3][groups])
    assert labels.guarantee().epsilon == 2.0
    # Without a name a second call is a second draw, as ever.
    labels.randomize(RandomizedResponse(0.5, 5))
    labels.randomize(RandomizedResponse(0.5, 5))
    assert labels.guarantee().epsilon == 3.0


def test_draws_without_a_name_go_on_in_a_new_process(tmp_path, response):
    path = tmp_path / "labels"
    labels = PrivateLabels(WEEKS[0], 5, budget=PrivacyBudget(1.0), store=path)
    first = labels.randomize(response(1.0))
    PrivateLabels(WEEKS[0], 5, store=path).extend(WEEKS[1])
    for labels in ways(path, weeks=2):
        noisy = labels.randomize(response(1.0))
        np.testing.assert_array_equal(noisy.values[:100], first.values)
        assert len(noisy) == 160 and labels.guarantee().epsilon == 1.0


@pytest.mark.filterwarnings("ignore:a budget of epsilon", "ignore:epsilon=40")
def test_examples_without_a_label_are_kept_apart(opened):
    """No draw reads their entries, and their labels come later, in any order."""
    some = [1, 5, 99]
    given = WEEKS[0].astype(float)
    given[some] = np.nan
    labels = opened(100.0, labels=given, unlabelled=some)
    rest = np.setdiff1d(np.arange(100), some)
    np.testing.assert_array_equal(labels.indices, rest)
    sure = RandomizedResponse(SURE, 5)
    noisy = labels.randomize(sure, key="weekly")
    np.testing.assert_array_equal(noisy.values, WEEKS[0][rest])
    assert NOTE in noisy.guarantee().assumptions and len(labels) == 97
    with pytest.raises(ValueError, match=r"Give x\[labels.indices\]"):
        noisy.rows_among({(100,)})
    late = labels.extend(WEEKS[0][[99, 1]], rows=[99, 1])
    np.testing.assert_array_equal(late.indices, [1, 99])
    assert len(labels) == 99
    again = labels.randomize(sure, key="weekly")
    np.testing.assert_array_equal(again.values, WEEKS[0][labels.indices])
    new = labels.extend([4, None, 2], unlabelled=np.array([False, True, False]))
    np.testing.assert_array_equal(new.indices, [100, 102])
    labels.extend([3, 0], rows=[101, 5])
    everything = np.concatenate([WEEKS[0], [4, 3, 2]])
    everything[5] = 0
    whole = labels.randomize(sure, key="weekly")
    np.testing.assert_array_equal(whole.values, everything)
    np.testing.assert_array_equal(whole.rows_among({(103,)}), np.arange(103))
    assert labels.guarantee().epsilon == SURE and NOTE in labels.guarantee().assumptions
    assert [use.examples for use in labels.history()] == [97, 2, 4]
    if labels.store_path is not None:
        whole.save(labels.store_path.parent / "published")
        found = verify(labels.store_path.parent / "published", store=labels.store_path)
        assert found.problems == ()
        table = PrivateLabels(everything, 5, store=labels.store_path)
        np.testing.assert_array_equal(table.randomize(sure, key="weekly"), everything)
        few = PrivateLabels(list(WEEKS[0]), 5, store=labels.store_path, unlabelled=[5])
        assert len(few) == 99 and table.guarantee().epsilon == SURE
        with pytest.raises(LabelStoreError, match="Name the others in unlabelled="):
            PrivateLabels(everything, 5, store=labels.store_path, unlabelled=[7])


def test_a_vault_may_begin_without_labels(opened, response):
    labels = opened(labels=[None] * 6, unlabelled=range(6))
    assert len(labels) == 0 and labels.indices.size == 0
    labels.extend([0, 1, 2], rows=[4, 2, 0])
    noisy = labels.randomize(response(1.0), key="weekly")
    assert noisy.values.shape == (3,) and labels.guarantee().epsilon == 1.0
    labels.extend([None, None], unlabelled=[0, 1])
    labels.extend(pd.Series([1, pd.NA, 3], dtype="Int64"), unlabelled=[1])
    labels.extend(pl.Series([None, 4]), unlabelled=[0])
    assert len(labels) == 6 and labels.label_set.size == 13


@pytest.mark.filterwarnings("ignore:a budget of epsilon", "ignore:epsilon=40")
@pytest.mark.parametrize(
    ("labels", "more", "kind", "mechanism"),
    [
        (
            ["no", "yes", None],
            ["yes", "no"],
            {"kind": Classes(["no", "yes"])},
            RandomizedResponse(40, 2),
        ),
        ([(1, 2), "b", None], ["b"], {"kind": Classes([(1, 2), "b"])}, RandomizedResponse(40, 2)),
        ([0.5, 9.0, float("nan")], [3.0, 7.25], {"kind": Numbers(0, 10)}, None),
        ([[0, 1], [1, 1], [0, 0]], [[1, 0], [0, 0]], {"kind": Rows(2)}, RandomizedResponse(40, 2)),
    ],
    ids=["names", "tuples", "numbers", "rows"],
)
def test_every_kind_of_labels(labels, more, kind, mechanism, tmp_path):
    for place in ({}, {"store": tmp_path / "labels"}):
        vault = PrivateLabels(
            labels, budget=PrivacyBudget(1e4), unlabelled=[False, False, True], **kind, **place
        )
        vault.extend(more)
        vault.extend(labels[1:2], rows=[2])
        draw = mechanism or LaplaceMechanism(1e4, 0.0, 10.0)
        found = vault.randomize(draw, key="all").values
        expected = vault.kind.encode([*labels[:2], labels[1], *more])
        np.testing.assert_allclose(found, expected, atol=0.1)


def test_models_train_on_all_weeks(response):
    x = np.eye(5, dtype=np.float32)[ALL[:160]]
    labels = PrivateLabels(WEEKS[0], 5, budget=PrivacyBudget(1.0, delta=1e-5))
    labels.randomize(response(1.0), key="weekly")
    labels.extend(WEEKS[1])
    noisy = labels.randomize(response(1.0), key="weekly")
    model = keras.Sequential([keras.layers.Dense(5)])
    model.compile("sgd", keras.losses.CategoricalCrossentropy(from_logits=True))
    ldp.fit(model, x, noisy, epochs=1, verbose=0)
    assert ldp.guarantee(model).epsilon == 1.0
    third = labels.extend(WEEKS[2])
    head = ldp.PrivateRidge(1.0, 1e-5).fit(np.eye(5)[WEEKS[2]], third)
    assert head.guarantee().epsilon == labels.guarantee().epsilon == 1.0


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (lambda v: v.extend([]), ValueError, "at least one more example, got none"),
        (lambda v: v.extend([5]), ValueError, r"labels must"),
        (lambda v: v.extend([None, 1]), ValueError, r"1 of 2 labels are missing.*unlabelled="),
        (lambda v: v.extend([1], rows=[3]), ValueError, "1 of 1 have one"),
        (lambda v: v.extend([1], rows=[100]), ValueError, r"indices must lie in 0\.\.99"),
        (lambda v: v.extend([1, 2], rows=[7]), ValueError, "got 2 labels and 1 rows"),
        (lambda v: v.extend([1], rows=[7], unlabelled=[]), ValueError, "no unlabelled="),
        (lambda v: v.extend([1], unlabelled=[4]), ValueError, r"indices must lie in 0\.\.0"),
        (lambda v: v.split(0.5)[0].extend([1]), ValueError, "got a part with"),
    ],
)
def test_bad_arrivals_add_nothing(opened, change, error, message):
    labels = opened(unlabelled=[7])
    with pytest.raises(error, match=message):
        change(labels)
    assert len(labels) == 99 and labels.label_set.size == 100 and not labels.history()
    labels.extend(WEEKS[1])
    assert len(labels) == 159


def test_an_arrival_that_comes_twice_is_named(tmp_path):
    path = tmp_path / "labels"
    labels = PrivateLabels(WEEKS[0], 5, budget=PrivacyBudget(1.0), store=path)
    labels.extend(WEEKS[1])
    again = PrivateLabels(np.concatenate(WEEKS[:2]), 5, store=path)
    with pytest.warns(UserWarning, match="equal those that came last.*a second time"):
        again.extend(WEEKS[1])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        again.extend(WEEKS[2])


def test_what_a_store_refuses(tmp_path, response):
    path = tmp_path / "labels"
    labels = PrivateLabels(WEEKS[0], 5, budget=PrivacyBudget(1.0), store=path)
    labels.randomize(response(1.0), key="weekly")
    with pytest.raises(LabelStoreError, match=r"got \d+\. Open it .*labels\.extend"):
        PrivateLabels(ALL, 5, store=path)
    labels.extend(WEEKS[1])
    other = np.concatenate([WEEKS[0], WEEKS[1][::-1]])
    with pytest.raises(LabelStoreError, match="made for other labels"):
        PrivateLabels(other, 5, store=path)
    with pytest.raises(LabelStoreError, match="in the order in which they came"):
        PrivateLabels(WEEKS[0], 5, store=path).extend(WEEKS[1][::-1])
    for draws in (response(0.5), response(1.0)):
        # The draw of a name goes on with its own mechanism, and for later labels alone.
        with pytest.raises(LabelStoreError, match="made with other"):
            labels.randomize(draws, np.arange(draws.epsilon == 1.0, 160), key="weekly")
    assert [use.examples for use in labels.history()] == [100]
    keyed = {"draws": "keyed", "store": tmp_path / "keyed"}
    vault = PrivateLabels(WEEKS[0], 5, budget=PrivacyBudget(1.0), **keyed)
    with pytest.raises(ValueError, match="Keyed draws are for all labels"):
        vault.extend(WEEKS[1])
    with pytest.raises(ValueError, match="Keyed draws need the labels of all examples"):
        PrivateLabels(WEEKS[0], 5, budget=PrivacyBudget(1.0), draws="keyed", unlabelled=[0])


@pytest.mark.slow
def test_a_killed_process_loses_nothing_and_draws_nothing_twice(run_writers, response):
    root, output = run_writers("killed", "extend")
    folders = sorted(root.iterdir())
    assert len(folders) == int(output) > 20
    states = set()
    for folder in folders:
        labels = PrivateLabels(
            np.arange(100) % 5, 5, budget=PrivacyBudget(1.0), store=folder / "store"
        )
        states.add(
            (labels.has_draw("weekly"), labels.label_set.size, _read(folder, "both") is None)
        )
        labels.extend(np.arange(60) % 3)
        noisy = labels.randomize(response(1.0), key="weekly").values
        for name, size in (("first", 100), ("both", 160)):
            returned = _read(folder, name)
            if returned is not None:
                np.testing.assert_array_equal(noisy[:size], returned)
        assert labels.guarantee().epsilon == 1.0
        assert [use.examples for use in labels.history()] in ([100, 60], [160])
    # Killed before and after the draw of the first week, the arrival, and the end.
    assert {(False, 100, True), (True, 100, True), (True, 160, True), (True, 160, False)} <= states


@pytest.mark.parametrize("rows", [None, [0]], ids=["new", "late"])
def test_features_from_before_an_arrival_are_refused_with_its_labels(make, rows):
    """A late label moves the rows of all that follow: they would train on others' labels."""
    labels = make(50.0, 1e-3, labels=[None, *ALL[1:]], unlabelled=[0])
    x = np.zeros((len(labels), 2), np.float32)
    batches = ldp.data.poisson_batches(x, labels, sampling_probability=0.2, steps=2)
    settings = {"fractions": (1.0,), "epochs_per_stage": 1, "verbose": 0}
    stages = ldp.MultiStageTraining(x, labels, epsilon=1.0, **settings)
    inputs = keras.Input((2,))
    model = ldp.LabelDPModel(inputs, keras.layers.Dense(5)(inputs))
    noisy = ldp.LabelDPOptimizer(keras.optimizers.SGD(0.1), 1.0, noise_multiplier=9.0)
    model.compile(noisy, keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    model.fit(batches, verbose=0)
    spent = labels.receipts
    labels.extend(ALL[:1], rows=rows)
    for use in (lambda: model.fit(batches, verbose=0), stages.dataset):
        with pytest.raises(ValueError, match=r"got 200 since labels\.extend"):
            use()
    assert labels.receipts == spent
    now = ldp.data.poisson_batches(np.zeros((200, 2)), labels, sampling_probability=0.2, steps=2)
    model.fit(now, verbose=0)
    assert len(labels.receipts) == len(spent) + 1


def _read(folder: pathlib.Path, name: str):
    path = folder / name
    content = path.read_bytes() if path.exists() else b""
    return np.frombuffer(content, np.int64) if content else None


def test_one_more_week_reads_its_own_arrival_alone(make, tmp_path, monkeypatch, response):
    labels = make(1.0, labels=WEEKS[0], store=tmp_path / "labels")
    read = []
    from_json = Arrival.from_json
    monkeypatch.setattr(
        Arrival, "from_json", lambda fields: read.append(fields) or from_json(fields)
    )
    counts = []
    for week in range(6):
        labels.extend(WEEKS[1])
        drawn = labels.randomize(response(1.0), key="weekly")
        assert len(drawn) == len(labels) == 100 + 60 * (week + 1)
        counts.append(len(read))
        read.clear()
    assert max(counts[1:]) <= counts[1]  # however many weeks there are
