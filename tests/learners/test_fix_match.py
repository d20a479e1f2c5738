"""FixMatch: its targets and pseudo-labels, and the training that its receipts cover."""

import numpy as np
import pytest
from _shapes import NUM_CLASSES, network, shapes

import tf_labeldp as ldp
from tf_labeldp.accounting import public_input
from tf_labeldp.semi_supervised import FixMatch

# The exact targets of noisy labels, which a training shows on average.
from tf_labeldp.semi_supervised.targets import read_targets
from tf_labeldp.vault import Classes

keras = pytest.importorskip("keras")
LOSS = keras.losses.CategoricalCrossentropy(from_logits=True)


def fitted(images, labels, epochs=5, net=None, **settings):
    fit = {key: settings.pop(key) for key in ("clusters", "targets") if key in settings}
    model = FixMatch(net or network(), threshold=0.6, unlabelled_ratio=2, **settings)
    model.compile(keras.optimizers.Adam(3e-3), LOSS, metrics=["accuracy"])
    model.history = model.fit(images, labels, 16, epochs, verbose=0, **fit)
    return model


@pytest.fixture(scope="session")
def trained(images, noisy):
    return fitted(images[0], noisy)


@pytest.mark.slow
def test_it_learns_the_true_classes_from_noisy_ones(trained, images, noisy):
    test, truth = shapes(150, seed=1)
    assert (np.asarray(noisy) == images[1]).mean() < 0.8
    assert trained.evaluate(test, np.eye(NUM_CLASSES)[truth], verbose=0)[1] > 0.95
    assert trained.history.history["pseudo_labelled"][-1] > 0.5


def targets_of(labels, num_images=300, kind="likelihoods"):
    return read_targets(
        labels, public_input(None, None, None), num_images, Classes(NUM_CLASSES), kind
    )


@pytest.mark.parametrize("from_logits", [True, False])
def test_without_a_loss_noisy_labels_have_the_likelihood_of_their_channel(
    images, noisy, from_logits
):
    """Its gradients are as large as those of true labels: divided by e^1.5 - 1 over e^1.5 + 2."""
    model = FixMatch(
        network(activation=None if from_logits else "softmax"), from_logits=from_logits
    )
    model.compile("sgd")
    outputs, labelled = model(images[0]), targets_of(noisy)
    found = model.compute_loss(None, labelled.targets, outputs, labelled.weights)
    channel = noisy.mechanism.transition_matrix()
    loss = ldp.keras_layers.ForwardCorrectedLoss(channel, from_logits)
    expected = loss(np.asarray(noisy), outputs) * (np.exp(1.5) + 2) / (np.exp(1.5) - 1)
    np.testing.assert_allclose(found, expected, rtol=1e-4)


def test_true_labels_have_cross_entropy_and_answers_of_some_images_leave_ones(images):
    labelled = targets_of(images[1])
    assert labelled.likelihoods is None and set(labelled.weights) == {1.0}
    vault = ldp.PrivateLabels(images[1], NUM_CLASSES, budget=ldp.PrivacyBudget(1.5))
    some = vault.randomize(ldp.RandomizedResponse(1.5, NUM_CLASSES), indices=np.arange(9, 60))
    labelled = targets_of(some)
    channel = some.mechanism.transition_matrix()
    np.testing.assert_allclose(labelled.likelihoods[9:60], channel.T[some.values], rtol=1e-6)
    assert np.all(labelled.likelihoods[:9] == 1) and np.all(labelled.likelihoods[60:] == 1)
    np.testing.assert_allclose(labelled.class_shares, some.posterior().mean(axis=0))


def test_sets_of_classes_have_likelihoods_and_are_no_classes(images):
    """Three sets of three classes, which nothing else would distinguish from classes."""
    vault = ldp.PrivateLabels(images[1], NUM_CLASSES, budget=ldp.PrivacyBudget(0.2))
    sets = vault.randomize(ldp.mechanisms.ProjectiveGeometryResponse(0.2, NUM_CLASSES))
    assert sets.mechanism.num_outputs == NUM_CLASSES
    expected = sets.mechanism.transition_matrix().T[sets.values]
    expected /= expected.sum(axis=1, keepdims=True)
    np.testing.assert_allclose(targets_of(sets).targets, expected, rtol=1e-6)
    with pytest.raises(ValueError, match="noisy labels that are classes, got those of Projective"):
        targets_of(sets, kind="values")
    with pytest.raises(TypeError, match="noisy labels that are classes, got NoisyLabels"):
        ldp.features.denoise_labels(sets, images[1], NUM_CLASSES)


def test_the_settings_of_the_paper():
    """Two steps by hand: an L2 penalty of the kernel, Nesterov momentum, a cosine to 7 pi / 16."""
    rate, decay, steps = 0.1, 0.01, 4
    net = keras.Sequential([keras.Input((2,)), keras.layers.Dense(NUM_CLASSES)])
    same = [keras.layers.Identity()] * 2
    model = FixMatch.from_paper(net, *same, steps=steps, learning_rate=rate, l2_penalty=decay)
    settings = model.threshold, model.unlabelled_ratio, model.priors, model.optimizer.ema_momentum
    assert settings == (0.95, 7, None, 0.999)
    x, y = np.array([[1.0, 2.0], [0.5, -1.0]], np.float32), np.eye(3, dtype=np.float32)[:2]
    weights = [array.astype(np.float64) for array in net.get_weights()]
    velocity = [np.zeros_like(array) for array in weights]
    for step in range(2):
        shares = np.exp(x @ weights[0] + weights[1])
        error = (shares / shares.sum(axis=1, keepdims=True) - y) / 2
        gradients = x.T @ error + decay * weights[0], error.sum(axis=0)
        now = rate * np.cos(7 * np.pi * step / (16 * steps))
        velocity = [0.9 * v - now * g for v, g in zip(velocity, gradients, strict=True)]
        pairs = zip(weights, velocity, gradients, strict=True)
        weights = [w + 0.9 * v - now * g for w, v, g in pairs]
        # No pseudo-label reaches 0.95.
        batch = {"labelled": x, "unlabelled": 0 * x, "evidence": np.ones((2, 3), np.float32)}
        model.train_on_batch(batch, y)
    for found, expected in zip(net.get_weights(), weights, strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-4)
    model.optimizer.iterations.assign(steps)
    last = float(model.optimizer.learning_rate)
    assert last == pytest.approx(rate * np.cos(7 * np.pi / 16), rel=1e-4)


@pytest.mark.slow
def test_xla_compiles_its_step_once(images, noisy):
    traces = []

    class Same(keras.layers.Layer):
        def call(self, inputs):
            traces.append(inputs.shape)
            return inputs

    model = FixMatch(network(seed=3), keras.layers.Identity(), Same(), unlabelled_ratio=2)
    model.compile("adam", jit_compile=True)
    for steps in (2, 3):
        history = model.fit(images[0], noisy, 16, steps_per_epoch=steps, verbose=0).history
    assert model.jit_compile and np.all(np.isfinite(history["loss"]))
    assert len(traces) == 1


@pytest.mark.slow
def test_two_models_on_one_draw_share_no_history(images, noisy):
    """Weights that are the same for every model on a draw would pass receipts between them."""
    same = [keras.layers.Identity()] * 2
    alike = [FixMatch(network(seed=seed), *same, unlabelled_ratio=1) for seed in (4, 5)]
    for model in alike:
        model.compile("sgd")
        model.fit(images[0], noisy, 16, steps_per_epoch=1, verbose=0)
    arrays = [{weight.numpy().tobytes() for weight in model.weights} for model in alike]
    assert not any(np.frombuffer(a, np.float32).any() for a in set.intersection(*arrays))


@pytest.mark.slow
def test_what_was_trained_in_the_clear_before_is_not_covered(images, noisy):
    # No other test has trained weights of this seed.
    net = network(seed=100)
    net.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    net.fit(images[0], images[1], verbose=0)
    assert ldp.guarantee(fitted(images[0], noisy, epochs=1, net=net)).epsilon == np.inf


@pytest.mark.slow
def test_a_training_that_is_stopped_keeps_its_receipts(images, noisy):
    class Stop(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            raise KeyboardInterrupt

    model = FixMatch(network(), unlabelled_ratio=2)
    model.compile("adam", LOSS)
    with pytest.raises(KeyboardInterrupt):
        model.fit(images[0], noisy, 16, callbacks=[Stop()], verbose=0)
    assert ldp.guarantee(model).epsilon == 1.5


def pseudo_labeller(**settings):
    """Returns the function from logits to pseudo-labels and mask; the views change nothing."""
    net = keras.Sequential([keras.Input((NUM_CLASSES,)), keras.layers.Activation("linear")])
    model = FixMatch(net, *[keras.layers.GaussianNoise(0.0)] * 2, **settings)

    def pseudo_labels(logits, evidence=(1.0, 1.0, 1.0)):
        evidence = np.broadcast_to(evidence, logits.shape).astype(np.float32)
        batch = {"labelled": logits, "unlabelled": logits, "evidence": evidence}
        outputs = model(batch, training=True)
        return np.asarray(outputs["targets"]), np.asarray(outputs["mask"])

    pseudo_labels.model = model
    return pseudo_labels


LOGITS_OF_TWO = np.log([[0.8, 0.1, 0.1], [0.4, 0.35, 0.25]]).astype(np.float32)


def test_pseudo_labels_are_those_of_the_formula():
    logits = LOGITS_OF_TWO
    targets, mask = pseudo_labeller(threshold=0.7, temperature=None, priors=None)(logits)
    assert targets.tolist() == [[1, 0, 0], [1, 0, 0]] and mask.tolist() == [1, 0]
    soft = pseudo_labeller(temperature=0.5, priors=None)(logits)[0]
    squares = np.array([[0.64, 0.01, 0.01], [0.16, 0.1225, 0.0625]])
    np.testing.assert_allclose(soft, squares / squares.sum(axis=1, keepdims=True), rtol=1e-5)


def test_the_noisy_label_of_an_image_updates_its_pseudo_label():
    """Bayes' rule: 0.4 * 0.1, 0.35 * 0.8 and 0.25 * 0.1 over their sum; ones change nothing."""
    likelihoods = np.array([[1, 1, 1], [0.1, 0.8, 0.1]], np.float32)
    for threshold, passes in ((0.81, 1), (0.82, 0)):
        pseudo_labels = pseudo_labeller(threshold=threshold, temperature=None, priors=None)
        targets, mask = pseudo_labels(LOGITS_OF_TWO, likelihoods)
        assert targets.tolist() == [[1, 0, 0], [0, 1, 0]] and mask.tolist() == [0, passes]


def test_the_threshold_of_a_class_is_its_mean_confidence():
    """Rows of the first class reach 0.4 and 0.8, of the second 0.5 and 0.9, none of the third."""
    shares = [[0.4, 0.3, 0.3], [0.8, 0.1, 0.1], [0.25, 0.5, 0.25], [0.05, 0.9, 0.05]]
    pseudo_labels = pseudo_labeller(priors=None)
    logits = np.log(shares).astype(np.float32)
    # The running means begin at 1/3.
    assert pseudo_labels(logits)[1].tolist() == [1, 1, 1, 1]
    for _ in range(60):
        _, mask = pseudo_labels(logits)
    assert mask.tolist() == [0, 1, 0, 1]
    third = np.log(np.array([[0.3, 0.35, 0.36]], np.float32))
    assert pseudo_labels(third[:, [2, 1, 0]])[1] == [0] and pseudo_labels(third)[1] == [1]


def test_a_class_that_is_never_predicted_leaves_pseudo_labels_finite():
    pseudo_labels = pseudo_labeller(priors=[0.5, 0.5, 0.0])
    targets = [pseudo_labels(np.full((2, 3), [0.0, 0.0, -200.0], np.float32), [0.5, 0.5, 0.0])[0]]
    pseudo_labels.model.mean_prediction.assign([0.5, 0.5, 0.0])
    targets.append(pseudo_labels(np.full((2, 3), [0.0, 0.0, -200.0], np.float32))[0])
    np.testing.assert_allclose(targets, np.full((2, 2, 3), [0.5, 0.5, 0.0]), atol=1e-6)


def test_posteriors_need_a_loss(images, noisy):
    model = FixMatch(network())
    model.compile("sgd")
    with pytest.raises(ValueError, match="Compile a loss"):
        model.fit(images[0], noisy, targets="posterior", verbose=0)


def test_alignment_moves_pseudo_labels_to_the_priors():
    pseudo_labels = pseudo_labeller(priors=[0.2, 0.4, 0.4], threshold=0.5, temperature=1.0)
    logits = np.log(np.full((4, 3), [0.6, 0.2, 0.2])).astype(np.float32)
    for _ in range(60):
        targets, _ = pseudo_labels(logits, [0.2, 0.4, 0.4])
    np.testing.assert_allclose(targets[0], [0.2, 0.4, 0.4], atol=0.01)


@pytest.mark.slow
def test_clusters_keep_the_labels_that_agree(images, noisy):
    """DenoiseSSL: with perfect clusters, training uses true labels only."""
    public = public_input(None, images[1], None)
    labelled = read_targets(noisy, public, 300, Classes(NUM_CLASSES), "likelihoods")
    assert labelled.likelihoods is None  # The filter knows the noisy labels already.
    assert np.array_equal(labelled.classes, images[1][labelled.rows])
    assert len(labelled.rows) == (np.asarray(noisy) == images[1]).sum()
    assert ldp.guarantee(fitted(images[0], noisy, 1, clusters=images[1])).epsilon == 1.5


@pytest.mark.slow
def test_a_class_without_a_cluster_is_named_and_the_others_are_learnt(images, noisy):
    """Two clusters of three share a class, as k-means often finds them."""
    two = np.where(images[1] == 2, 1, images[1])
    with pytest.warns(UserWarning, match=r"got 2 clusters without the classes \[[12]\].*, 30\)"):
        model = fitted(images[0], noisy, clusters=two)
    test, truth = shapes(150, seed=1)
    predicted = model.predict(test, verbose=0).argmax(axis=1)
    assert (predicted == truth)[truth == 0].mean() > 0.9
    assert ldp.guarantee(model).epsilon == 1.5


def test_posteriors_and_weights_are_the_targets(noisy):
    weights = np.r_[np.zeros(100), np.full(200, 2.0)]
    public = public_input(None, None, weights)
    labelled = read_targets(noisy, public, 300, Classes(NUM_CLASSES), "posterior")
    np.testing.assert_allclose(labelled.targets, noisy.posterior()[100:], rtol=1e-6)
    assert labelled.rows.tolist() == list(range(100, 300)) and set(labelled.weights) == {2.0}


IMAGES, CLASSES = shapes(30)
SOME_SOFT = np.vstack([np.eye(3)[CLASSES[1:]], np.full(3, 1 / 3)])
BAD = {
    "few labels": (IMAGES, np.where(np.arange(30) < 2, CLASSES, -1), {}, r"got 2 without"),
    "a class missing": (IMAGES, np.where(CLASSES == 1, -1, CLASSES), {}, r"classes \[1\]"),
    "other sums": (IMAGES, np.full((30, 3), 0.5), {}, "sum to one"),
    "signed": (IMAGES, np.full((30, 3), [-1.0, 1.0, 1.0]), {}, "LabelWeightedLoss"),
    "too few": (IMAGES, CLASSES[:9], {}, "one label per image"),
    "a column": (IMAGES, CLASSES[:, None], {}, "labels.ravel()"),
    "weights": (IMAGES, CLASSES, {"sample_weight": -np.ones(30)}, "at least zero"),
    "clusters": (IMAGES, np.eye(3)[CLASSES], {"clusters": CLASSES}, "one noisy class per image"),
    "soft": (IMAGES, np.full((30, 3), 1 / 3), {"loss": None}, "Compile a loss"),
    "some soft": (IMAGES, SOME_SOFT, {"loss": None}, "Compile a loss"),
    "other targets": (IMAGES, CLASSES, {"targets": "likelihoods"}, "values, posterior"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input(case):
    images, labels, options, match = BAD[case]
    model = FixMatch(network())
    model.compile("sgd", options.get("loss", LOSS))
    options = {name: value for name, value in options.items() if name != "loss"}
    with pytest.raises(ValueError, match=match):
        model.fit(images, labels, verbose=0, **options)
    assert model.optimizer.iterations == 0
