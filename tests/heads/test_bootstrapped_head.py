"""Release, learn, release again: one statement for all of it, and a network that has learnt."""

import math
import os
import stat

import numpy as np
import pytest

import tf_labeldp as ldp
from tf_labeldp.heads import BootstrappedHead, PrivateLogisticRegression
from tf_labeldp.plugins import gaussian_sigma

DELTA = 1e-5
RNG = np.random.default_rng(0)
X = RNG.normal(size=(2000, 4)).astype("float32")
TRUTH = (X[:, 0] > 0).astype(np.int64) + (X[:, 1] > 0)


def vault(epsilon=4.0, **options):
    budget = ldp.PrivacyBudget(epsilon, delta=DELTA)
    return ldp.PrivateLabels(TRUTH, 3, budget=budget, **options)


def network(width=3):
    import keras

    keras.utils.set_random_seed(0)
    dense = keras.layers.Dense
    return keras.Sequential([keras.Input((4,)), dense(32, "relu"), dense(width)])


def head(epsilon=4.0, made=None, **options):
    options = {"epochs": 2, "verbose": 0, **options}
    return BootstrappedHead(epsilon, DELTA, network() if made is None else made, **options)


@pytest.fixture(scope="session")  # the same weights twice would have met two vaults
def fitted():
    labels = vault(2.0, insecure_seed=0)
    return labels, head(2.0).fit(X, labels)


@pytest.mark.slow
@pytest.mark.parametrize("epsilon", [6.0, 3.0])
@pytest.mark.holds("heads.BootstrappedHead")
def test_epsilon_is_the_cost_for_a_user(epsilon):
    """Two labels of a user are drawn at half of the draw's epsilon; 1.5 per label is too little."""
    labels = vault(epsilon, users=np.arange(len(X)) // 2)
    stated = head(epsilon, epochs=1).fit(X, labels).guarantee()
    assert stated.epsilon == pytest.approx(epsilon, rel=1e-4) and stated.epsilon <= epsilon
    kinds = [receipt.kind for receipt in labels.receipts]
    assert kinds == ["release", "draw" if epsilon == 6.0 else "release"]
    assert stated.unit == "all labels of one user"


def test_naming_the_releases_for_users_leaves_the_head_as_it_is():
    """Two labels per user at 1.5 each draw no noisy labels; one label at 3 does."""
    one = head(3.0)
    before = one.epsilons()
    of_users = one.parts(vault(3.0, users=np.arange(len(X)) // 2))
    assert [type(part) for part in of_users.values()].count(ldp.mechanisms.InformativeRR) == 0
    assert one.epsilons() == before and one.rounds() == 5


@pytest.mark.parametrize(("epsilon", "shares"), [(0.1, (0.2, 0.3, 0.5)), (2.4, (0.3, 0.7))])
@pytest.mark.holds("heads.BootstrappedHead")
def test_the_releases_together_are_one_gaussian_release(epsilon, shares):
    """Squares of precisions add up: to the whole from below, by less than 1 part in 10,000."""
    alone = head(epsilon, shares=shares, draw_share=0.0).epsilons()
    precision = sum(gaussian_sigma(one, DELTA, 1.0) ** -2 for one in alone)
    whole = gaussian_sigma(epsilon, DELTA, 1.0) ** -2
    assert 1.0 - 1e-4 < precision / whole < 1.0


@pytest.mark.slow
@pytest.mark.holds("heads.BootstrappedHead")
def test_the_whole_budget_is_spent_and_not_passed(fitted):
    labels, one = fitted
    for made in (labels.guarantee(), one.guarantee(), ldp.guarantee(one.to_keras())):
        assert made.epsilon == pytest.approx(2.0, rel=1e-4) and made.epsilon <= 2.0
    with pytest.raises(ldp.BudgetExceededError):
        PrivateLogisticRegression(0.1, DELTA).fit(X, labels)


@pytest.mark.slow
@pytest.mark.holds("heads.BootstrappedHead")
def test_a_head_states_the_heads_that_its_features_learnt_from():
    labels = vault(1.0)
    whole = head(1.0, shares=(0.3, 0.3, 0.4), epochs=1).fit(X, labels)
    stated = [each.guarantee().epsilon for each in whole.heads_]
    assert stated == sorted(stated) and stated[0] < 0.6
    assert stated[2] == pytest.approx(labels.guarantee().epsilon)
    assert [len(each.receipts_) for each in whole.heads_] == [1, 2, 3]


@pytest.mark.slow
def test_views_teach_the_network_more_than_one_release_tells():
    """Shifted digits stay the same digit, which a linear head on pixels does not know."""
    import keras
    from sklearn.datasets import load_digits

    from tf_labeldp.self_supervised import weak_views

    digits = load_digits()
    x, y = (digits.images[..., None] / 16.0).astype("float32"), digits.target
    train, test = slice(0, 1400), slice(1400, None)
    keras.utils.set_random_seed(0)
    layers = keras.layers
    net = keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            layers.Conv2D(16, 3, activation="relu", padding="same"),
            layers.MaxPooling2D(),
            layers.Flatten(),
            layers.Dense(64, "relu"),
            layers.Dense(10),
        ]
    )
    labels = ldp.PrivateLabels(
        y[train], 10, budget=ldp.PrivacyBudget(2.0, delta=DELTA), insecure_seed=0
    )
    options = {"epochs": 10, "batch_size": 64, "views": weak_views(), "verbose": 0}
    one = BootstrappedHead(2.0, DELTA, net, **options).fit(x[train], labels)
    linear = PrivateLogisticRegression(2.0, DELTA, num_classes=10, insecure_seed=0)
    linear.fit(x[train].reshape(1400, -1), y[train])
    shifted = np.roll(x[test], 1, axis=2)
    ours = one.predict(shifted) == y[test]
    theirs = linear.predict(shifted.reshape(-1, 64)) == y[test]
    won, lost = int((ours & ~theirs).sum()), int((theirs & ~ours).sum())
    assert won - lost > 5.0 * math.sqrt(won + lost)  # McNemar


@pytest.mark.slow
def test_the_result_is_a_keras_model_that_carries_its_statement(fitted, tmp_path):
    import keras

    _, one = fitted
    one.to_keras().save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    np.testing.assert_allclose(loaded.predict(X, verbose=0), one.predict_proba(X), atol=1e-5)
    for stated in (loaded, tmp_path / "model.keras"):  # the path's network has its optimizer
        assert ldp.guarantee(stated).epsilon == pytest.approx(2.0, rel=1e-4)
    np.testing.assert_allclose(one.predict_proba(X).sum(axis=1), 1.0, rtol=1e-4)


@pytest.mark.slow
def test_a_fit_that_was_killed_reads_its_releases_and_networks(tmp_path, monkeypatch):
    import keras

    class KilledError(Exception):
        pass

    fits = []

    def fit(self, *arguments, fit=keras.Sequential.fit, **named):
        fits.append(named["initial_epoch"])
        if len(fits) == 2:  # on the noisy labels, which are drawn
            kill = keras.callbacks.LambdaCallback(on_epoch_end=killed_after_two)
            named["callbacks"] = [*named["callbacks"], kill]
        return fit(self, *arguments, **named)

    def killed_after_two(epoch, logs):
        if epoch == 1:
            raise KilledError

    labels = vault(store=tmp_path / "store")
    old_mask = os.umask(0o022)
    try:
        monkeypatch.setattr(keras.Sequential, "fit", fit)
        with pytest.raises(KilledError):
            head(epochs=1).fit(X, labels)
    finally:
        os.umask(old_mask)
    spent = labels.guarantee().epsilon
    del labels
    # The networks are for the holder of the store alone, and none is half written.
    folder = tmp_path / "store" / "networks"
    files = [*folder.iterdir()]
    assert files and all(path.suffix == ".npz" for path in files)
    assert {stat.S_IMODE(path.stat().st_mode) for path in files} == {0o600}
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    again = vault(store=tmp_path / "store")
    one = head(epochs=1).fit(X, again)
    assert again.guarantee().epsilon == spent > 3.9
    twice = head(epochs=1).fit(X, vault(store=tmp_path / "store"))
    np.testing.assert_allclose(twice.predict_proba(X), one.predict_proba(X), atol=1e-6)
    steps = math.ceil(len(X) / one.batch_size)
    assert fits == [0, 0, 2] and int(one.network.optimizer.iterations) == 4 * steps
    assert ldp.guarantee(twice.to_keras()).epsilon == pytest.approx(spent)


@pytest.mark.slow
def test_noisy_labels_come_last_where_they_pay():
    """By default from epsilon 2 on; their price is added to that of the heads."""
    labels = vault(insecure_seed=0)
    options = {"shares": (1.0,), "encoder": lambda rows: rows[:, :1]}
    one = head(epochs=2, batch_size=64, **options)
    one.fit(X, labels)
    assert labels.has_draw(f"{one.key}/draw")
    assert one.epsilons()[0] == pytest.approx(0.15 * 4.0, rel=1e-4)
    assert labels.mechanism(f"{one.key}/draw").epsilon == pytest.approx(0.85 * 4.0)
    assert one.guarantee().epsilon <= 4.0
    assert ldp.guarantee(one.to_keras()).epsilon > 0.85 * 4.0
    # The encoder hides the second column, which the classes need: the noisy labels tell of it.
    heads_alone = one.heads_[0].predict_proba(X[:, :1]).argmax(axis=1)
    error = 5 * math.sqrt(0.25 / len(X))
    assert one.score(X, TRUTH) > (heads_alone == TRUTH).mean() + error
    assert sum(head(1.9).epsilons()) > 1.9  # all of a smaller epsilon is the heads'


@pytest.mark.slow
@pytest.mark.parametrize(("epsilon", "draw_share"), [(0.5, 0.4), (4.0, None)])
@pytest.mark.holds("heads.BootstrappedHead")
def test_head_and_draw_together_cost_epsilon(epsilon, draw_share):
    """Both are priced by the ledger: never above epsilon, which is the sum, and little below."""
    labels = vault(epsilon)
    one = head(epsilon, draw_share=draw_share, epochs=1, batch_size=1000)
    one.fit(X, labels)
    share = 0.85 if draw_share is None else draw_share
    assert labels.mechanism(f"{one.key}/draw").epsilon == pytest.approx(share * epsilon)
    assert one.epsilons() == pytest.approx(((1.0 - share) * epsilon,), rel=1e-4)
    assert 0.9 * epsilon < labels.guarantee().epsilon <= epsilon
    assert one.guarantee().epsilon == labels.guarantee().epsilon
    with pytest.raises(ldp.BudgetExceededError):
        labels.randomize(ldp.RandomizedResponse(0.2 * epsilon, 3))


@pytest.mark.slow
def test_noisy_labels_correct_a_prior_that_was_sure_and_wrong():
    """The encoder hides the column that moves a tenth of the examples to the other class.

    There the prior of the true class is 0.1. A noisy label that confirms it, the likelier one,
    leaves its posterior below one half; the network's probability replaces the prior.
    """
    import keras

    rng = np.random.default_rng(1)
    x = rng.normal(size=(4000, 2)).astype("float32")
    moved = x[:, 1] > 1.28
    truth = (x[:, 0] > 0) ^ moved
    keras.utils.set_random_seed(0)
    dense = keras.layers.Dense
    net = keras.Sequential([keras.Input((2,)), dense(32, "relu"), dense(2)])
    budget = ldp.PrivacyBudget(2.0, DELTA)
    labels = ldp.PrivateLabels(truth.astype(int), 2, budget=budget, insecure_seed=0)
    options = {"encoder": lambda rows: rows[:, :1], "draw_share": 0.85, "learning_rate": 1e-2}
    one = head(2.0, net, epochs=4, batch_size=128, **options).fit(x, labels)
    assert one.rounds() == 5
    error = 5 * math.sqrt(0.25 / moved.sum())
    prior = one.heads_[0].predict(x[:, :1])
    assert np.mean(prior[moved] == truth[moved]) < 0.5 - error
    assert np.mean(one.predict(x)[moved] == truth[moved]) > 0.5 + error


@pytest.mark.slow
def test_mirrored_images_share_their_prediction(tmp_path):
    import keras

    images = X.reshape(-1, 2, 2)
    keras.utils.set_random_seed(0)
    layers = keras.layers
    net = keras.Sequential([keras.Input((2, 2)), layers.Flatten(), layers.Dense(3)])
    labels = vault(1.0)
    one = head(1.0, net, mirrored=True, shares=(1.0,), epochs=1, batch_size=500)
    one.fit(images, labels)
    expected = one.predict_proba(images[:50])
    np.testing.assert_allclose(one.predict_proba(images[:50, :, ::-1]), expected, atol=1e-6)
    assert np.abs(keras.ops.softmax(net(images[:50])) - expected).max() > 1e-3
    one.to_keras().save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    np.testing.assert_allclose(loaded.predict(images[:50], verbose=0), expected, atol=1e-5)
    with pytest.raises(ValueError, match="expected images"):
        head(1.0, mirrored=True).fit(X, rows := vault())
    assert not rows.history()


def test_a_budget_for_one_release_alone_pays_for_none():
    labels = vault(1.0)
    with pytest.raises(ldp.BudgetExceededError):
        head(1.1).fit(X, labels)
    assert labels.guarantee().epsilon == 0.0


@pytest.mark.parametrize(
    ("options", "labels", "words"),
    [
        ({"shares": (0.5, 0.6)}, None, "sum to one"),
        ({"epochs": 0}, None, "epochs"),
        ({"batch_size": 0}, None, "batch_size"),
        ({"draw_share": 1.0}, None, "draw_share"),
        ({"learning_rate": -1.0}, None, "learning_rate"),
        ({"shares": (0.0, 1.0)}, None, "shares"),
        ({"epsilon": 0.0}, None, "epsilon"),
        ({"made": network(4)}, None, "output for each of 3 classes, got one with 4"),
        ({}, TRUTH, "must be a PrivateLabels"),
    ],
)
def test_what_cannot_be_used_is_refused_before_anything_is_charged(options, labels, words):
    of = vault() if labels is None else labels
    with pytest.raises((TypeError, ValueError), match=words):
        head(**options).fit(X, of)
    if labels is None:
        assert of.guarantee().epsilon == 0.0
    with pytest.raises(ValueError, match="got 10 rows and"):
        head().fit(X[:10], vault())


def two_inputs(form):
    """A network that takes two columns of X each, by name or by place."""
    import keras

    keras.utils.set_random_seed(0)
    inputs = {name: keras.Input((2,), name=name) for name in ("left", "right")}
    joined = keras.layers.Concatenate()(list(inputs.values()))
    logits = keras.layers.Dense(3)(keras.layers.Dense(32, "relu")(joined))
    return keras.Model(inputs if form == "dict" else list(inputs.values()), logits)


@pytest.mark.slow
@pytest.mark.parametrize("form", ["dict", "tuple"])
def test_a_network_with_several_inputs(form, tmp_path):
    import keras

    parts = [X[:, :2], X[:, 2:]]
    inputs = {"left": parts[0], "right": parts[1]} if form == "dict" else parts
    inputs = tuple(inputs) if form == "tuple" else inputs
    labels = vault(4.0)
    one = head(4.0, two_inputs(form), epochs=5, batch_size=64)
    one.fit(inputs, labels)
    assert np.mean(one.predict(inputs) == TRUTH) > 0.7
    assert one.guarantee().epsilon <= 4.0 and labels.guarantee().epsilon <= 4.0
    # The rate falls over all steps of 64 examples, whatever the number of inputs.
    steps = 20 * math.ceil(len(X) / 64)
    rate = one.network.optimizer.get_config()["learning_rate"]["config"]
    assert rate["warmup_steps"] + rate["decay_steps"] == steps
    exported = one.to_keras()
    exported.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    given = inputs if form == "dict" else list(inputs)
    np.testing.assert_allclose(
        loaded.predict(given, verbose=0), one.predict_proba(inputs), atol=1e-5
    )
    assert ldp.guarantee(loaded).epsilon == pytest.approx(labels.guarantee().epsilon)


def test_inputs_of_another_structure_are_refused_before_a_charge():
    labels = vault()
    named = {"left": X[:, :2], "right": X[:, 2:]}
    for form, inputs in (
        ("dict", X),
        ("dict", {"left": X[:, :2]}),
        ("dict", tuple(named.values())),
        ("list", X),
        ("list", named),
        ("list", [X[:, :2]]),
    ):
        with pytest.raises(ValueError, match="expected the inputs that the network takes"):
            head(4.0, two_inputs(form)).fit(inputs, labels)
    with pytest.raises(ValueError, match="expected the inputs that the network takes, one array"):
        head(4.0).fit(named, labels)
    with pytest.raises(ValueError, match="same length"):
        head(4.0, two_inputs("dict")).fit({**named, "left": X[1:, :2]}, labels)
    assert not labels.history()
