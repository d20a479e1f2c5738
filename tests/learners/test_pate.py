"""PATE: the cost of its answers, from both sides, and the secrecy of its teachers."""

import logging
import math
import os
import warnings

import dp_accounting
import keras
import numpy as np
import pytest
from _shapes import network, shapes
from dp_accounting.rdp import RdpAccountant
from sklearn.exceptions import ConvergenceWarning

import tf_labeldp as ldp
from tf_labeldp.accounting import dp_sgd_guarantee
from tf_labeldp.pate import PATE, ConfidentGNMax, fix_match_teacher
from tf_labeldp.semi_supervised import FixMatch

TRUTH = np.arange(1200) % 3
FEATURES = 4.0 * np.eye(3)[TRUTH] + np.random.default_rng(0).normal(size=(1200, 3))
CHECKED = ConfidentGNMax(
    1.0, 3, delta=1e-5, num_queries=40, max_answers=25, threshold=30, check_share=0.3
)
PLAIN = ConfidentGNMax(1.0, 3, delta=1e-5, num_queries=40, max_answers=40)


def vault(epsilon=2.0, **options):
    budget = ldp.PrivacyBudget(epsilon, delta=1e-4)
    return ldp.PrivateLabels(TRUTH, 3, budget=budget, **options)


class Votes:
    """Teachers with fixed votes."""

    def __init__(self, votes):
        self._votes = np.asarray(votes)

    def votes(self, labels):
        return self._votes


@pytest.mark.parametrize("mechanism", [CHECKED, PLAIN])
@pytest.mark.holds("pate.ConfidentGNMax")
def test_the_price_is_that_of_an_independent_composition(mechanism):
    """Each check is a Gaussian release of sensitivity 1, each answer one of sqrt(2)."""
    share = mechanism.max_answers * 2.0 / mechanism.answer_stddev**2
    if mechanism.threshold is not None:
        share += mechanism.num_queries / mechanism.check_stddev**2
    # One step of DP-SGD on all labels is a Gaussian release of sensitivity 2.
    epsilon = dp_sgd_guarantee(2.0 / math.sqrt(share), 1.0, 1, 1e-5).epsilon
    assert epsilon == pytest.approx(1.0, abs=1e-3)
    events = [
        dp_accounting.SelfComposedDpEvent(
            dp_accounting.GaussianDpEvent(mechanism.answer_stddev / math.sqrt(2.0)),
            mechanism.max_answers,
        )
    ]
    if mechanism.threshold is not None:
        check = dp_accounting.GaussianDpEvent(mechanism.check_stddev)
        events.append(dp_accounting.SelfComposedDpEvent(check, mechanism.num_queries))
    composed = dp_accounting.ComposedDpEvent(events)
    by_pld = dp_accounting.pld.PLDAccountant().compose(composed).get_epsilon(1e-5)
    assert by_pld == pytest.approx(1.0, abs=1e-3)
    # The RDP bound is looser.
    assert RdpAccountant().compose(composed).get_epsilon(1e-5) >= 1.0


@pytest.mark.parametrize("mechanism", [CHECKED, PLAIN])
@pytest.mark.holds("pate.ConfidentGNMax")
def test_the_noise_of_answers_has_the_stated_scale(mechanism):
    """The share of wrong answers between two classes is that of the difference of two noises."""
    ahead = 20
    votes = [[0] * 40] * (ahead + 40) + [[1] * 40] * 40
    drawn = np.concatenate(
        [mechanism.release(None, Votes(votes), rng=np.random.default_rng(s)) for s in range(150)]
    )
    answers = drawn[drawn >= 0]
    # The third class has no vote; a simulation of the same distribution gives the share.
    rng = np.random.default_rng(1)
    counts = np.array([ahead + 40, 40, 0])
    noisy = counts + rng.normal(scale=mechanism.answer_stddev, size=(200_000, 3))
    expected = (noisy.argmax(axis=1) == 0).mean()
    error = 5 * math.sqrt(0.25 / len(answers))
    assert abs((answers == 0).mean() - expected) < error


@pytest.mark.slow
def test_the_noise_of_checks_has_the_stated_scale():
    """P[passes] = Phi((max - T) / sigma) for the first query, before ``max_answers`` matters."""
    votes = [[0] * 40] * 60 + [[1] * 40] * 20
    passed = np.mean(
        [CHECKED.release(None, Votes(votes), rng=np.random.default_rng(s))[0] >= 0
         for s in range(3000)]
    )  # fmt: skip
    expected = 0.5 * math.erfc(-(60 - 30) / CHECKED.check_stddev / math.sqrt(2))
    assert abs(passed - expected) < 5 * math.sqrt(0.25 / 3000)


@pytest.mark.holds("pate.ConfidentGNMax")
def test_one_vote_moves_what_is_priced():
    """A teacher that changes all its votes moves the largest count by 1, the counts by sqrt(2)."""
    rng = np.random.default_rng(0)
    first = rng.integers(3, size=(9, 40))
    second = first.copy()
    second[4] = (second[4] + 1) % 3
    # The counts before the noise, whose sensitivity no answer shows.
    before, after = (CHECKED._counts(votes) for votes in (first, second))
    assert np.abs(before.max(axis=1) - after.max(axis=1)).max() <= 1
    np.testing.assert_allclose(np.linalg.norm(before - after, axis=1), math.sqrt(2.0))


def test_no_more_answers_than_paid_for():
    votes = np.zeros((500, 40), int)
    answers = CHECKED.release(None, Votes(votes), rng=np.random.default_rng(0))
    assert (answers >= 0).sum() == CHECKED.max_answers
    # Queries after the last answer are skipped.
    assert np.flatnonzero(answers >= 0).max() < 40 - 5


@pytest.mark.parametrize(
    "votes",
    [[[0] * 39], [[3] * 40], [[-1] * 40]],
    ids=["too few", "no class", "negative"],
)
def test_a_teacher_has_one_vote_for_each_query(votes):
    with pytest.raises(ValueError, match="votes must be integers"):
        CHECKED.release(None, Votes(votes))


@pytest.mark.slow
@pytest.mark.holds("pate.PATE")
def test_answers_are_right_and_charged_once(tmp_path, monkeypatch):
    labels = vault(store=tmp_path / "labels")
    settings = {"num_teachers": 200, "num_queries": 60, "max_answers": 30, "threshold": 0.6}
    answers = PATE(2.0, 1e-4, **settings).answer(FEATURES, labels)
    assert len(answers) == 30 and (answers.values == TRUTH[answers.indices]).mean() > 0.9
    assert answers.guarantee().epsilon == labels.guarantee().epsilon == 2.0
    # A later version may edit the default teacher.
    monkeypatch.setattr("inspect.getsource", lambda _: "def logistic_teacher(): ...")
    again = PATE(2.0, 1e-4, **settings, teacher=None).answer(
        FEATURES, vault(store=tmp_path / "labels")
    )
    # The stored answers are read, not drawn again.
    assert np.array_equal(again.values, answers.values)
    with pytest.raises(ldp.BudgetExceededError):
        PATE(0.5, 1e-4, **settings, key="more").answer(FEATURES, labels)
    assert labels.guarantee().epsilon == 2.0


@pytest.mark.slow
def test_students_learn_from_answers_on_all_features():
    """A release has no draw, and its answers count the examples of the vault."""
    settings = {"num_teachers": 200, "num_queries": 60, "max_answers": 30, "threshold": 0.6}
    answers = PATE(2.0, 1e-4, **settings).answer(FEATURES, vault())
    plain, student = (
        keras.Sequential([keras.Input((3,)), keras.layers.Dense(3)]) for _ in range(2)
    )
    plain.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    ldp.fit(plain, FEATURES, answers, targets="values", verbose=0)
    model = FixMatch(student, *[keras.layers.GaussianNoise(0.1)] * 2)
    model.compile("sgd")
    model.fit(FEATURES, answers, 16, steps_per_epoch=1, verbose=0)
    assert ldp.guarantee(plain).epsilon == ldp.guarantee(model).epsilon == 2.0


@pytest.mark.slow
def test_answers_of_a_part_refuse_the_features_of_the_vault():
    """The numbers of the queries may all be charged rows, so receipts do not show the part."""
    _, part = vault().split(np.arange(1200) != 5)
    pate = PATE(2.0, 1e-4, num_teachers=200, num_queries=60)
    answers = pate.answer(FEATURES[part.indices], part)
    assert 5 not in answers.indices
    with pytest.raises(ValueError, match=r"Give x\[labels.indices\] of that part"):
        answers.rows_among({(1200,)})


@pytest.mark.holds("pate.PATE")
def test_each_teacher_sees_its_shard_alone():
    shards = []

    def teacher(features, labels, queries):
        shards.append(labels)
        return np.zeros(len(queries), int)

    pate = PATE(2.0, 1e-4, num_teachers=7, num_queries=5, teacher=teacher)
    pate.answer(FEATURES, vault())
    made_up = shards.pop(0)  # Before the charge a teacher is tried on all classes.
    np.testing.assert_array_equal(made_up >= 0, shards[0] >= 0)
    assert set(made_up[made_up >= 0]) == {0, 1, 2} and np.any(made_up != shards[0])
    labelled = np.stack(shards) >= 0
    assert labelled.shape == (7, 1200) and (labelled.sum(axis=0) == 1).all()
    assert np.ptp(labelled.sum(axis=1)) <= 1
    np.testing.assert_array_equal(np.stack(shards).max(axis=0), TRUTH)


def test_an_error_on_made_up_labels_is_raised_before_the_charge():
    def teacher(features, labels, queries):
        raise ValueError("a plain mistake")

    labels = vault()
    for broken in (teacher, lambda *_: np.zeros(4, int), lambda *_: np.full(5, 3)):
        pate = PATE(2.0, 1e-4, num_teachers=7, num_queries=5, teacher=broken)
        with pytest.raises(
            ValueError, match=r"a teacher for the classes 0\.\.2.*on made-up labels"
        ):
            pate.answer(FEATURES, labels)
    assert labels.receipts == ()


@pytest.mark.parametrize("failure", ["raises", "exits", "class", "shape", "text", "nothing"])
@pytest.mark.holds("pate.PATE")
def test_a_teacher_that_fails_by_its_labels_votes_as_any_other(failure):
    """Whether one fails depends on its shard, and moves no more than its vote."""

    def teacher(features, labels, queries):
        # Made-up labels and the other shards have all classes at other rows.
        if np.array_equal(labels[labels >= 0], TRUTH[labels >= 0]) and labels[1] >= 0:
            if failure == "raises":
                raise ValueError(f"the labels are {labels.tolist()}")
            if failure == "exits":
                raise SystemExit(int(labels.max()))
            return {
                "class": np.full(len(queries), 3),
                "shape": np.zeros(len(queries) + 1, int),
                "text": np.full(len(queries), "one"),
                "nothing": None,
            }[failure]
        return np.ones(len(queries), int)

    labels = vault()
    settings = {"num_teachers": 200, "num_queries": 5, "teacher": teacher}
    answers = PATE(2.0, 1e-4, **settings).answer(FEATURES, labels)
    assert answers.values.tolist() == [1] * 5 and labels.receipts[0].kind == "release"


@pytest.mark.holds("pate.PATE")
def test_nothing_that_teachers_show_leaves_them(capfd, caplog, recwarn):
    """The default teacher's ConvergenceWarning depends on the labels of a shard."""
    rng = np.random.default_rng(3)
    wide, truth = np.exp(rng.normal(size=(400, 20)) * 2.0) * 100.0, rng.integers(0, 3, 400)
    budget = ldp.PrivacyBudget(2.0, delta=1e-4)
    default = PATE(2.0, 1e-4, num_teachers=2, num_queries=5).teacher
    with pytest.warns(ConvergenceWarning):
        default(wide, np.where(np.arange(400) < 200, truth, -1), np.arange(3))
    recwarn.clear()

    def teacher(features, labels, queries):
        print("labels", labels)
        warnings.warn(f"n1={labels.sum()}", stacklevel=1)
        logging.getLogger("teacher").error("labels %s", labels)
        os.write(2, str(labels.sum()).encode())
        return np.zeros(len(queries), int)

    for chosen in (None, teacher):
        labels = ldp.PrivateLabels(truth, 3, budget=budget)
        PATE(2.0, 1e-4, num_teachers=2, num_queries=5, teacher=chosen).answer(wide, labels)
    assert not [each for each in recwarn if each.category is not DeprecationWarning]
    assert capfd.readouterr() == ("", "") and not caplog.records


def test_outputs_of_a_network_are_compared_with_the_classes_before_a_label_is_read():
    images, classes = shapes(60)
    two = keras.Sequential([keras.Input(images.shape[1:]), keras.layers.Flatten()])
    two.add(keras.layers.Dense(2))
    views = {"weak": keras.layers.GaussianNoise(0.1), "strong": keras.layers.GaussianNoise(0.2)}
    teacher = fix_match_teacher(two, steps_per_epoch=1, batch_size=4, **views)
    for truth in (classes, np.zeros_like(classes), classes % 2):
        labels = ldp.PrivateLabels(truth, 3, budget=ldp.PrivacyBudget(9.0, delta=1e-3))
        with pytest.raises(ValueError, match="the number of its network's outputs"):
            PATE(9.0, 1e-3, num_teachers=30, num_queries=5, teacher=teacher).answer(images, labels)
        assert labels.receipts == ()


@pytest.mark.slow
def test_teachers_by_fix_match():
    """Shards lack a class or two, and no error may reveal it."""
    keras = pytest.importorskip("keras")
    images, classes = shapes(120)
    labels = ldp.PrivateLabels(classes, 3, budget=ldp.PrivacyBudget(50.0, delta=1e-3))
    views = {"weak": keras.layers.GaussianNoise(0.1), "strong": keras.layers.GaussianNoise(0.2)}
    sgd = keras.optimizers.SGD(keras.optimizers.schedules.CosineDecay(0.1, 30), momentum=0.9)
    teacher = fix_match_teacher(
        network(), optimizer=sgd, steps_per_epoch=30, batch_size=8, threshold=0.7, **views
    )
    pate = PATE(50.0, 1e-3, num_teachers=4, num_queries=20, teacher=teacher)
    answers = pate.answer(images, labels)
    assert (answers.values == classes[answers.indices]).mean() > 0.7
    # Each teacher has an optimizer of its own.
    assert int(sgd.iterations) == 0


def test_the_digest_of_a_fix_match_teacher_is_repeatable():
    """It depends on the settings, not on the identity of their objects."""
    keras = pytest.importorskip("keras")

    def described(noise, width=3, optimizer=None):
        # The names of layers count those of the session.
        keras.backend.clear_session()
        views = {"weak": lambda images: images, "strong": keras.layers.GaussianNoise(noise)}
        return fix_match_teacher(network(width), optimizer=optimizer, **views).describe()

    first = described(0.2)
    assert described(0.2) == first
    rates = [described(0.2, optimizer=keras.optimizers.SGD(rate)) for rate in (0.1, 0.1, 0.2)]
    assert rates[0] == rates[1] != rates[2]
    for other in (described(0.1), described(0.2, width=4), *rates):
        assert other != first


@pytest.mark.parametrize(
    "options, match",
    [
        ({"num_teachers": 1201}, "1200 labels for 1201 teachers"),
        ({"num_queries": 1201}, "1201 queries"),
        ({"threshold": 1.0}, "threshold"),
        ({"max_answers": 41, "threshold": 0.5}, "max_answers"),
        ({"max_answers": 5}, "without a threshold"),
    ],
)
def test_bad_settings(options, match):
    with pytest.raises(ValueError, match=match):
        PATE(1.0, 1e-5, **{"num_teachers": 9, "num_queries": 40, **options}).answer(
            FEATURES, vault()
        )


def test_bad_labels_and_features():
    pate = PATE(1.0, 1e-5, num_teachers=9, num_queries=40)
    with pytest.raises(TypeError, match="PrivateLabels"):
        pate.answer(FEATURES, TRUTH)
    with pytest.raises(ValueError, match="got 5 rows and 1200 labels"):
        pate.answer(FEATURES[:5], vault())
