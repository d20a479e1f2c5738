"""Random walks over what people do with labels, models and files, with an account of their own.

The account knows nothing of receipts: it writes down, for every artefact, the uses of labels that
went into it, and adds up epsilons on the worst example. Statements must never be below it. They are
infinite only where something was trained without receipts and not declared, and must be so for the
very model that was; otherwise they equal the account (all uses here are pure, so that composition
is a sum, up to rounding). Copies of weights that were changed without receipts are a named
assumption: of these the account is sure of nothing.
"""

from __future__ import annotations

import itertools
import math
import pathlib
import pickle
import tempfile
import warnings
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_labeldp as ldp

N, D, K, DELTA = 24, 3, 2, 1e-12
DENSE = keras.losses.CategoricalCrossentropy(from_logits=True)
SPARSE = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


class Account:
    """Which uses went into which artefact: a use is (label set, examples, epsilon)."""

    def __init__(self):
        self.uses: dict[int, tuple[Any, frozenset[int], float]] = {}
        self.made_of: dict[int, frozenset[int]] = {}

    def use(self, label_set, examples, epsilon):
        number = len(self.uses)
        self.uses[number] = (label_set, frozenset(examples), epsilon)
        return frozenset([number])

    def epsilon(self, uses):
        """What the worst person has lost who may have an example in every label set."""
        total = 0.0
        for label_set in {self.uses[one][0] for one in uses}:
            of_set = [self.uses[one] for one in uses if self.uses[one][0] == label_set]
            examples = frozenset().union(*(touched for _, touched, _ in of_set))
            total += max(
                sum(epsilon for _, touched, epsilon in of_set if example in touched)
                for example in examples
            )
        return total


@keras.saving.register_keras_serializable(package="walks")
class PureNoise(ldp.training.NoiseMechanism):
    """Noise that claims to be epsilon-DP in each step: composition is then a sum."""

    def __init__(self, noise_multiplier=0.05):
        self.noise_multiplier = noise_multiplier

    def add_noise(self, clipped_sum, l2_norm_clip, state):
        noisy = [part + tf.random.normal(part.shape, stddev=0.1) for part in clipped_sum]
        return noisy, state

    def dp_event(self, sampling_probability, steps):
        import dp_accounting

        one = ldp.accounting.events.pure_dp_event(self.noise_multiplier)
        return dp_accounting.SelfComposedDpEvent(one, steps)


class MadeOf:
    """The uses that went into an artefact: those that its statement must have, and may have."""

    def __init__(self, sure=frozenset()):
        self.sure = self.possible = sure
        self.changed = False  # without receipts, since what is sure
        self.carried = True  # by the layers themselves: copies are known by their values

    def add(self, sure, possible=frozenset()):
        self.sure |= sure
        self.possible |= sure | possible
        self.carried = True

    def copy(self):
        made = MadeOf()
        made.sure, made.possible = self.sure, self.possible
        made.changed, made.carried = self.changed, self.carried
        return made

    def of_copy(self, sure=True):
        """What a copy of the weights is made of, which has nothing but their values."""
        made = self.copy()
        if self.changed or not sure:
            made.sure = frozenset()
        made.carried = False
        return made


class Walk:
    """One walk: what there is, and what can be done with it."""

    def __init__(self, seed, folder):
        self.rng = np.random.default_rng(seed)
        self.folder, self.number = folder, itertools.count()
        self.account = Account()
        self.x = self.rng.normal(size=(N, D)).astype(np.float32)
        self.vaults: list[tuple[ldp.PrivateLabels, frozenset[int]]] = []
        # Artefacts with what they are made of, which models of the same weights share.
        self.noisy: list[tuple[Any, MadeOf]] = []
        self.models: list[tuple[keras.Model, MadeOf]] = []
        self.heads: list[tuple[Any, MadeOf]] = []
        self.of_files: list[keras.Model] = []
        self.uncovered: list[keras.Model] = []  # by receipts, in training with their optimizer
        self.new_vault()
        self.fresh_model()

    # What there is.

    def new_vault(self):
        y = self.rng.integers(0, K, N)
        store = self.path("store") if self.rng.random() < 0.5 else None
        budget = ldp.PrivacyBudget(1e6, DELTA)
        self.vaults.append([ldp.PrivateLabels(y, K, budget=budget, store=store), frozenset()])

    def path(self, suffix):
        return self.folder / f"{next(self.number)}{suffix}"

    def pick(self, things):
        return things[self.rng.integers(len(things))]

    def left(self, vault, examples, epsilon):
        """Writes down a use of a vault."""
        made = self.account.use(id(vault[0]), examples, epsilon)
        vault[1] |= made
        return made

    def plain(self):
        layers = [keras.Input((D,)), keras.layers.Dense(3, "tanh"), keras.layers.Dense(K)]
        return keras.Sequential(layers)

    def fresh_model(self):
        self.models.append((self.plain(), MadeOf()))

    # What leaves a vault.

    def randomize(self):
        vault, epsilon = self.pick(self.vaults), float(self.rng.uniform(0.1, 1.0))
        rows = self.rng.permutation(N)[: self.rng.integers(1, N + 1)]
        noisy = vault[0].randomize(ldp.RandomizedResponse(epsilon, K), rows)
        self.noisy.append((noisy, MadeOf(self.left(vault, rows.tolist(), epsilon))))

    def randomize_with_priors(self):
        vault, other = self.pick(self.vaults), self.pick(self.vaults)
        epsilons = self.rng.uniform(0.1, 1.0, 2).tolist()
        histogram = ldp.mechanisms.HistogramMechanism(epsilons[0], K)
        counts = other[0].release(histogram, public_input=np.arange(N) % 2)
        made = self.left(other, range(N), epsilons[0])
        priors = counts.priors()
        noisy = vault[0].randomize(ldp.RRWithPrior(epsilons[1], K), priors=priors)
        made |= self.left(vault, range(N), epsilons[1])
        self.noisy += [(counts, MadeOf(made - {max(made)})), (noisy, MadeOf(made))]

    def copy_noisy(self):
        noisy, made = self.pick(self.noisy) if self.noisy else (None, None)
        if isinstance(noisy, ldp.NoisyLabels):
            folder = self.path("noisy")
            noisy.save(folder)
            self.noisy.append((ldp.NoisyLabels.load(folder), made))

    def fit_head(self):
        vault, epsilon = self.pick(self.vaults), float(self.rng.uniform(0.1, 1.0))
        encoder, made = None, MadeOf()
        if self.rng.random() < 0.5:
            encoder, made = self.pick(self.models)
            if not np.any(np.ptp(encoder.predict(self.x, verbose=0), axis=0)):
                return  # it has lost all features, and heads refuse it
        head = ldp.PrivateRidge(epsilon, noise="laplace", encoder=encoder)
        head.fit(self.x, vault[0])
        box = made.copy()
        box.add(self.left(vault, range(N), epsilon))
        if encoder is not None:
            head.encoder = None  # pickled and exported by itself
        self.heads.append((head, box))

    def copy_head(self):
        if self.heads:
            head, made = self.pick(self.heads)
            self.heads.append((pickle.loads(pickle.dumps(head)), made))

    def export_head(self):
        if self.heads:
            head, made = self.pick(self.heads)
            if head.n_features_in_ == D:
                self.models.append((head.to_keras(), made.copy()))

    # Training.

    def fit_privately(self):
        model, made = self.pick(self.models)
        if not model.trainable_variables:
            return
        vault = self.pick(self.vaults)
        private = model
        if not isinstance(model, ldp.LabelDPModel) or self.rng.random() < 0.3:
            private = ldp.LabelDPModel.from_model(model)
            noise = PureNoise(float(self.rng.uniform(0.05, 0.5)))
            optimizer = ldp.LabelDPOptimizer(keras.optimizers.SGD(0.1), 1.0, noise=noise)
            private.compile(optimizer, loss=SPARSE, run_eagerly=True)
            self.models.append((private, made))
        batches = ldp.data.poisson_batches(
            self.x, vault[0], sampling_probability=0.3, steps=int(self.rng.integers(1, 3))
        )
        private.fit(batches, epochs=1, verbose=0)
        epsilon = batches.steps * private.optimizer.noise_multiplier
        made.add(self.left(vault, range(N), epsilon))

    def fit_in_stages(self):
        model, made = self.pick(self.models)
        if isinstance(model, ldp.LabelDPModel) or not model.trainable_variables:
            return
        vault, epsilon = self.pick(self.vaults), float(self.rng.uniform(0.1, 1.0))
        if model.output_shape[-1] != K:
            return
        self.compile(model, DENSE)
        stages = ldp.MultiStageTraining(
            self.x,
            vault[0],
            epsilon=epsilon,
            fractions=(0.5, 0.5),
            epochs_per_stage=1,
            batch_size=12,
            key=f"stages-{next(self.number)}",
            from_logits=True,
            verbose=0,
        )
        model.fit(stages.dataset(), epochs=2, callbacks=[stages], shuffle=False, verbose=0)
        noisy = stages.noisy_labels()
        for half in (noisy.indices[: N // 2], noisy.indices[N // 2 :]):
            made.add(self.left(vault, half.tolist(), epsilon))
        made.changed = False
        self.noisy.append((noisy, made.copy()))  # the second stage asked the model for priors

    def fit_in_the_clear(self):
        model, made = self.pick(self.models)
        if isinstance(model, ldp.LabelDPModel) or not model.trainable_variables:
            return
        self.compile(model, SPARSE)
        model.fit(self.x, self.rng.integers(0, K, N), verbose=0)
        made.possible |= self.account.use("in the clear", [0], math.inf)
        made.changed = True
        if not made.carried:
            made.sure = frozenset()
        self.uncovered.append(model)

    def compile(self, model, loss):
        """Compiles a model, which forgets the steps of the optimizer that it had."""
        model.compile(keras.optimizers.SGD(0.1), loss, run_eagerly=True)
        self.uncovered = [one for one in self.uncovered if one is not model]

    def declare(self):
        model, made = self.pick(self.models)
        epsilon = float(self.rng.uniform(0.1, 1.0)) if self.rng.random() < 0.5 else 0.0
        if math.isinf(ldp.guarantee(model).epsilon):
            ldp.declare(model, "a walk", epsilon=epsilon)
            assert math.isfinite(ldp.guarantee(model).epsilon)
            self.uncovered = [one for one in self.uncovered if not share(one, model)]
            claim = self.account.use(object(), [0], epsilon)
            made.sure |= claim
            # It is about these weights, in whatever model they are.
            for other, box in self.models:
                if box is made or share(other, model):
                    box.possible |= claim
                    box.changed = box.changed and box is not made

    def fit_on_noisy_labels(self):
        if not self.noisy:
            return
        noisy, made = self.pick(self.noisy)
        if not isinstance(noisy, ldp.NoisyLabels) or not len(noisy):
            return
        model, box = self.pick(self.models)
        if isinstance(model, ldp.LabelDPModel) or not model.trainable_variables:
            return
        if model.output_shape[-1] != K:
            return
        self.compile(model, SPARSE)
        if self.rng.random() < 0.5:
            ldp.fit(model, self.x, noisy, targets="values", verbose=0)
        else:
            data = noisy.to_dataset(self.x).batch(8)
            model.fit(data, callbacks=[ldp.RecordReceipts(noisy)], verbose=0)
        box.add(made.sure, made.possible)
        box.changed = False

    # Weights that go elsewhere.

    def save_and_load(self):
        model, made = self.pick(self.models)
        path = self.path(".keras")
        model.save(path)
        self.models.append((ldp.load_model(path), made.copy()))

    def save_and_load_with_keras(self):
        model, made = self.pick(self.models)
        path = self.path(".keras")
        model.save(path)
        self.read(keras.models.load_model(path), made)

    def load_weights(self):
        model, made = self.pick(self.models)
        path = self.path(".weights.h5")
        model.save_weights(path)
        other = self.twin(model)
        other.load_weights(path)
        self.read(other, made)

    def checkpoint(self):
        model, made = self.pick(self.models)
        path = tf.train.Checkpoint(model=model).save(str(self.path("checkpoint")))
        other = self.twin(model)
        tf.train.Checkpoint(model=other).restore(path).expect_partial()
        self.read(other, made)

    def read(self, model, made):
        """Adds a model that Keras has read, perhaps with the steps of an optimizer."""
        self.models.append((model, made.of_copy()))
        self.of_files.append(model)

    def set_weights(self):
        model, made = self.pick(self.models)
        other = self.twin(model)
        other.set_weights(model.get_weights())
        self.models.append((other, made.of_copy(sure=can_be_told(model))))

    def one_layer(self):
        model, made = self.pick(self.models)
        other = self.twin(model)
        layers = [one for one in model.layers if one.weights]
        twins = [one for one in other.layers if one.weights]
        if layers:
            twins[-1].set_weights(layers[-1].get_weights())
            self.models.append((other, made.of_copy(sure=can_be_told(layers[-1]))))

    def same_layers(self):
        model, made = self.pick(self.models)
        self.models.append((keras.Model(model.inputs, model.outputs), made))

    def clone(self):
        model, _ = self.pick(self.models)
        self.models.append((self.twin(model), MadeOf()))

    def twin(self, model):
        """A model of the same configuration, with weights of its own."""
        made = keras.models.clone_model(model)
        if isinstance(made, ldp.LabelDPModel):
            noise = PureNoise(0.2)
            optimizer = ldp.LabelDPOptimizer(keras.optimizers.SGD(0.1), 1.0, noise=noise)
            made.compile(optimizer, loss=SPARSE, run_eagerly=True)
        return made

    # The comparison.

    def check(self, number=None):
        """Compares the statements of some artefacts, or of all."""
        artefacts: list[Any] = [*self.noisy, *self.models, *self.heads]
        chosen = self.rng.permutation(len(artefacts))[:number]
        for artefact, made in [self.models[-1], *(artefacts[place] for place in chosen)]:
            least = self.account.epsilon(made.sure) if made.sure else 0.0
            stated = ldp.guarantee(artefact).epsilon
            assert stated >= least * (1.0 - 1e-9), (artefact, stated, least)
            counted = {one for one in made.possible if math.isfinite(self.account.uses[one][2])}
            if math.isinf(stated):
                # Of a model whose layers were trained through another one since it was read with
                # its optimizer, the steps of that optimizer are not known.
                read = any(artefact is one and one.optimizer for one in self.of_files)
                assert made.possible - counted or read, artefact
            else:
                assert not any(artefact is one for one in self.uncovered)
                # Composition rounds losses up, by less than two parts in a thousand of their sum.
                most = self.account.epsilon(frozenset(counted)) if counted else 0.0
                assert stated <= most * 1.002 + 1e-9, (artefact, stated, most)
            if number is None and hasattr(artefact, "guarantee"):
                assert artefact.guarantee().epsilon == pytest.approx(stated)
        for vault, uses in self.vaults:
            stated = vault.guarantee().epsilon
            assert math.isfinite(stated) and stated >= self.account.epsilon(uses) * (1.0 - 1e-9)


def can_be_told(model):
    """Whether values alone tell where they come from: zeros of a silent head are of any layer."""
    layers = [one for one in getattr(model, "layers", [model]) if one.weights]
    return any(np.ptp(weight) for weight in layers[-1].get_weights())


def share(first, second):
    """Whether two models have the same values in a variable that is no constant."""
    mine, other = ([w for w in m.get_weights() if np.ptp(w)] for m in (first, second))
    return any(np.array_equal(a, b) for a in mine for b in other)


MOVES: list[Callable[[Walk], None]] = [
    Walk.new_vault,
    Walk.fresh_model,
    *[Walk.randomize, Walk.randomize_with_priors, Walk.fit_head, Walk.export_head] * 2,
    *[Walk.copy_noisy, Walk.copy_head],
    *[Walk.fit_privately] * 4,
    *[Walk.fit_in_stages, Walk.fit_in_the_clear, Walk.declare, Walk.fit_on_noisy_labels],
    *[Walk.save_and_load, Walk.save_and_load_with_keras, Walk.load_weights],
    *[Walk.checkpoint, Walk.set_weights],
    *[Walk.one_layer, Walk.same_layers, Walk.clone],
]


def walk(seed):
    keras.utils.set_random_seed(seed)
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        one = Walk(seed, pathlib.Path(folder))
        for number in one.rng.permutation(len(MOVES))[:10]:
            move = MOVES[number]
            try:
                move(one)
                one.check(4)
            except AssertionError as error:
                raise AssertionError(f"seed {seed}, after {move.__name__}") from error
        one.check()


@pytest.mark.parametrize("seed", [0, 2])
def test_statements_follow_a_random_walk(seed):
    walk(seed)


@pytest.mark.slow
@pytest.mark.parametrize("first", [0, *range(1000, 1500, 25)])
def test_statements_follow_many_random_walks(first):
    for seed in range(first, first + 25):
        walk(seed)
        keras.backend.clear_session()


def test_the_account_adds_up_as_it_should():
    account = Account()
    first = account.use("a", [0, 1], 1.0) | account.use("a", [1, 2], 0.5)
    assert account.epsilon(first) == 1.5
    assert account.epsilon(first | account.use("b", [7], 0.25)) == 1.75
    assert account.epsilon(account.use("a", [0], 1.0) | account.use("a", [3], 2.0)) == 2.0
