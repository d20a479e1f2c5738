"""Noisy labels that somebody else drew, such as the answers of a survey by a coin design."""

from __future__ import annotations

import warnings

import numpy as np
import pytest

import tf_labeldp as ldp
from tf_labeldp.boosting import PrivateBoosting
from tf_labeldp.mechanisms import RRWithPrior, SurveyChannel

N = 2000
RNG = np.random.default_rng(7)
TRUE = (RNG.random(N) < 0.3).astype(np.int64)
X = (TRUE[:, np.newaxis] + 0.5 * RNG.normal(size=(N, 3))).astype(np.float32)
WARNER = SurveyChannel.from_warner(0.7)
DRAWN = WARNER.randomize(TRUE, rng=RNG)
WORDS = np.array(["no", "yes"])

DESIGNS = {
    "Warner's cards": (SurveyChannel.from_warner(0.3), [[0.3, 0.7], [0.7, 0.3]]),
    "forced answers": (SurveyChannel.from_forced_response([0.1, 0.2]), [[0.8, 0.2], [0.1, 0.9]]),
    "an unrelated question": (
        SurveyChannel.from_unrelated_question(0.6, [0.25, 0.75]),
        [[0.7, 0.3], [0.1, 0.9]],
    ),
    "three answers": (
        SurveyChannel.from_warner(0.6, 3),
        [[0.6, 0.2, 0.2], [0.2, 0.6, 0.2], [0.2, 0.2, 0.6]],
    ),
    "a table": (SurveyChannel(((0.9, 0.1), (0.4, 0.6))), [[0.9, 0.1], [0.4, 0.6]]),
}


@pytest.mark.parametrize("name", DESIGNS)
@pytest.mark.holds("mechanisms.SurveyChannel")
def test_a_coin_design_has_its_channel_and_its_epsilon(name):
    mechanism, table = DESIGNS[name]
    np.testing.assert_allclose(mechanism.transition_matrix(), table, rtol=0, atol=1e-12)
    logs = np.log(table)
    assert mechanism.epsilon == pytest.approx(np.ptp(logs, axis=0).max(), abs=1e-11)
    true = np.arange(6000) % mechanism.num_classes
    noisy = ldp.NoisyLabels(mechanism.randomize(true, rng=RNG), mechanism)
    np.testing.assert_allclose(noisy.debiased().mean(axis=0), 1 / len(table), atol=0.1)
    assert noisy.guarantee().epsilon == mechanism.epsilon


@pytest.mark.parametrize(
    ("answers", "classes"),
    [
        (DRAWN, None),
        (DRAWN == 1, None),
        (DRAWN + 1, [1, 2]),
        (2.0 * DRAWN - 1.0, [-1, 1]),
        (2 - DRAWN, [2, 1]),
        (list(WORDS[DRAWN]), ["no", "yes"]),
        (WORDS[DRAWN][:, np.newaxis], ["no", "yes"]),
    ],
    ids=["codes", "booleans", "1 and 2", "-1 and 1", "2 and 1", "words", "a column"],
)
def test_answers_are_values_of_the_classes(answers, classes):
    noisy = ldp.NoisyLabels(answers, WARNER, classes=classes)
    np.testing.assert_array_equal(noisy.values, DRAWN)
    np.testing.assert_array_equal(noisy.decode(), np.ravel(answers))
    assert noisy.posterior().shape == (N, 2)


@pytest.mark.parametrize("missing", [None, float("nan"), "masked", "pandas"])
def test_missing_answers_are_left_out_at_every_door(missing):
    pd = pytest.importorskip("pandas")
    answers = list(DRAWN + 1)
    answers[3] = answers[50] = None if isinstance(missing, str) else missing
    if missing == "masked":
        answers = np.ma.masked_array(DRAWN + 1, np.isin(np.arange(N), [3, 50]))
    elif missing == "pandas":
        answers = pd.Series(answers, dtype="Int64")
    noisy = ldp.NoisyLabels(answers, WARNER, classes=[1, 2])
    rest = np.setdiff1d(np.arange(N), [3, 50])
    np.testing.assert_array_equal(noisy.indices, rest)
    np.testing.assert_array_equal(noisy.values, DRAWN[rest])
    np.testing.assert_array_equal(noisy.rows_among({(N,)}), rest)
    codes = [note.code for note in noisy.guarantee().assumptions]
    assert codes[:2] == ["drawn-elsewhere", "answers-missing"]
    (receipt,) = noisy.receipts
    assert (receipt.labels.size, receipt.num_examples, receipt.kind) == (N, N - 2, "draw")


def test_the_statement_says_who_drew_and_follows_the_labels(tmp_path):
    """Into trees, a network, files and an evaluation, which refuses a model that learnt them."""
    keras = pytest.importorskip("keras")
    noisy = ldp.NoisyLabels(WORDS[DRAWN], WARNER, classes=["no", "yes"])
    trees = PrivateBoosting(max_trees=5).fit(X, noisy)
    assert set(trees.predict(X)) <= {"no", "yes"}
    network = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2, activation="softmax")])
    network.compile("sgd", "categorical_crossentropy")
    ldp.fit(network, X, noisy, targets="posterior", batch_size=500, verbose=0)
    noisy.save(tmp_path / "survey")
    again = ldp.NoisyLabels.load(tmp_path / "survey")
    for each in (noisy, trees, network, again):
        stated = ldp.guarantee(each)
        assert stated.epsilon == WARNER.epsilon
        (note,) = [note for note in stated.assumptions if note.code == "drawn-elsewhere"]
        assert note.who == "authors" and "SurveyChannel([[0.7, 0.3], [0.3, 0.7]])" in note
    # One draw counts once, however many models learn from it.
    assert ldp.guarantee([noisy, trees, network, again]).epsilon == WARNER.epsilon
    assert noisy.evaluate(TRUE, "accuracy", model=None).value == pytest.approx(1.0, abs=0.2)
    with pytest.raises(ValueError, match="learn"):
        noisy.evaluate(WORDS[TRUE], "accuracy", model=trees)


def test_a_foreign_receipt_erases_no_cost():
    """Draws add up: of another survey, of the same people's vault, and of their own values."""
    labels = ldp.PrivateLabels(TRUE, 2, budget=ldp.PrivacyBudget(5.0))
    drawn = labels.randomize(ldp.RandomizedResponse(1.0, 2))
    survey = ldp.NoisyLabels(DRAWN, WARNER)
    assert ldp.guarantee([drawn, survey]).epsilon == pytest.approx(1.0 + WARNER.epsilon)
    second = ldp.NoisyLabels(DRAWN, WARNER)
    assert ldp.guarantee([survey, second]).epsilon == pytest.approx(2.0 * WARNER.epsilon)
    weaker = ldp.RandomizedResponse(0.5, 2)
    with pytest.warns(UserWarning, match="counts that draw, too"):
        renamed = ldp.NoisyLabels(drawn.decode(), weaker)
    assert renamed.guarantee().epsilon == pytest.approx(1.5)
    with pytest.raises(TypeError, match="got NoisyLabels, which have receipts"):
        ldp.NoisyLabels(drawn, weaker)
    with pytest.raises(TypeError, match="does not give out true labels"):
        ldp.NoisyLabels(labels, weaker)
    prior = labels.release(ldp.mechanisms.HistogramMechanism(0.25, 2)).priors()
    with_prior = ldp.NoisyLabels(DRAWN, RRWithPrior(1.0, 2), priors=prior)
    assert with_prior.guarantee().epsilon == pytest.approx(1.25)


def test_without_receipts_explicit_indices_promise_nothing():
    bare = ldp.NoisyLabels(DRAWN, np.arange(N), WARNER)
    assert bare.guarantee().epsilon == float("inf")
    assert "NoisyLabels(values, mechanism)" in str(bare.guarantee())


def test_rows_and_numbers_have_their_cost():
    rows = ldp.NoisyLabels(np.stack([DRAWN, DRAWN[::-1], DRAWN], axis=1), WARNER)
    assert rows.guarantee().epsilon == pytest.approx(3.0 * WARNER.epsilon)
    assert rows.guarantee().unit == "the whole row of labels of one training example"
    laplace = ldp.mechanisms.LaplaceMechanism(0.5, 0.0, 1.0)
    numbers = ldp.NoisyLabels([0.25, float("nan"), -3.0], laplace)
    assert numbers.indices.tolist() == [0, 2] and numbers.guarantee().epsilon == 0.5


@pytest.mark.parametrize(
    ("counts", "mechanism", "possible"),
    [
        ([100, 0], WARNER, False),
        ([9, 1], WARNER, True),
        ([70, 30], WARNER, True),
        ([75, 25], WARNER, True),
        ([1400, 600], SurveyChannel.from_warner(0.65), False),
        ([0, 1000, 1000], SurveyChannel.from_warner(0.6, 3), False),
        ([400, 400, 1200], SurveyChannel.from_warner(0.6, 3), True),
        ([200, 900, 900], SurveyChannel.from_warner(0.6, 3), False),
    ],
)
def test_impossible_frequencies_warn_with_a_p_value(counts, mechanism, possible):
    answers = np.repeat(np.arange(len(counts)), counts)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        noisy = ldp.NoisyLabels(answers, mechanism)
    found = [str(warning.message) for warning in caught]
    assert len(noisy) == sum(counts) and len(found) == (not possible)
    # The same text for all counts, which may be those of true labels.
    text = f"impossible under {mechanism!r}: p-value below 0.001. Check"
    assert possible or (text in found[0])


def test_true_draws_hardly_ever_warn():
    """The p-value is an upper bound: 500 draws at the boundary, of all sizes, without a warning."""
    rng = np.random.default_rng(11)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for size in np.geomspace(1, 300, 500).astype(int):
            kept = WARNER.randomize(np.zeros(size, np.int64), rng=rng)
            ldp.NoisyLabels(kept, WARNER)


REFUSED = {
    "codes 0..1": lambda: ldp.NoisyLabels(DRAWN + 987, WARNER),
    "NoisyLabels.values, mechanism, classes": lambda: ldp.NoisyLabels(
        DRAWN + 987, np.arange(N), WARNER
    ),
    "not among the 2 classes": lambda: ldp.NoisyLabels(DRAWN + 987, WARNER, classes=[1, 2]),
    "num_classes=2, the labels have 3": lambda: ldp.NoisyLabels(
        DRAWN, WARNER, classes=["a", "b", "c"]
    ),
    "all missing": lambda: ldp.NoisyLabels([None, None], WARNER),
    "SurveyChannel takes a table": lambda: ldp.NoisyLabels(DRAWN, np.eye(2)),
    "by name": lambda: ldp.NoisyLabels(DRAWN, WARNER, np.array([0.5, 0.5])),
    "must sum to one": lambda: SurveyChannel(((0.5, 0.4), (0.5, 0.5))),
    "reveals the label": lambda: SurveyChannel.from_forced_response([0.0, 0.2]),
    "nothing can be learnt": lambda: SurveyChannel.from_warner(0.5),
    "at least 2 classes": lambda: SurveyChannel.from_forced_response([0.9, 0.9]),
}


@pytest.mark.parametrize("text", REFUSED)
def test_what_cannot_be_read_is_refused_without_a_label(text):
    with pytest.raises((TypeError, ValueError), match=text) as caught:
        REFUSED[text]()
    assert "987" not in str(caught.value)
