"""Random walks over uses of labels, models and files, compared with an independent account.

The account reads no receipts: it records the uses of labels behind every artefact, and adds up
epsilons for the worst example. No statement may be below it. A statement is infinite only for a
model without any record, and after an undeclared training without receipts, always for the trained
model itself; otherwise it equals the account, since all uses here are pure and compose by a sum, up
to rounding. Of copies of weights that were changed without receipts the account is sure of nothing.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
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
from tf_labeldp.accounting import Receipt
from tf_labeldp.plugins import TrainedModel

N, D, K, DELTA = 24, 3, 2, 1e-12
DENSE = keras.losses.CategoricalCrossentropy(from_logits=True)
SPARSE = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


class Account:
    """The uses of labels: a use is (label set, examples, epsilon)."""

    def __init__(self):
        self.uses: dict[int, tuple[Any, frozenset[int], float]] = {}

    def use(self, label_set, examples, epsilon):
        number = len(self.uses)
        self.uses[number] = (label_set, frozenset(examples), epsilon)
        return frozenset([number])

    def epsilon(self, uses):
        """Returns the epsilon of the worst person, with one example in every label set."""
        total = 0.0
        for label_set in {self.uses[number][0] for number in uses}:
            of_set = [self.uses[number] for number in uses if self.uses[number][0] == label_set]
            examples = frozenset().union(*(touched for _, touched, _ in of_set))
            total += max(
                sum(epsilon for _, touched, epsilon in of_set if example in touched)
                for example in examples
            )
        return total


@keras.saving.register_keras_serializable(package="walks")
class PureNoise(ldp.training.NoiseMechanism):
    """Noise that claims epsilon-DP in each step, so that steps compose by a sum."""

    def __init__(self, noise_multiplier=0.05):
        self.noise_multiplier = noise_multiplier

    def add_noise(self, clipped_sum, l2_norm_clip, state):
        noisy = [part + tf.random.normal(part.shape, stddev=0.1) for part in clipped_sum]
        return noisy, state

    def dp_event(self, sampling_probability, steps):
        import dp_accounting

        step = ldp.plugins.EventFields.randomized_response(self.noise_multiplier).dp_event()
        return dp_accounting.SelfComposedDpEvent(step, steps)


class Origin:
    """The uses behind an artefact that its statement must count (sure) and may count (possible)."""

    def __init__(self, sure=frozenset()):
        self.sure = self.possible = sure
        self.changed = False  # whether weights changed without receipts since the last sure use
        self.carried = True  # whether layers carry receipts; copies are recognized by values

    def add(self, sure, possible=frozenset()):
        self.sure |= sure
        self.possible |= sure | possible
        self.carried = True

    def copy(self):
        return copy.copy(self)

    def of_copy(self, sure=True):
        """Returns the uses behind a copy of the weight values."""
        values = self.copy()
        if self.changed or not sure:
            values.sure = frozenset()
        values.carried = False
        return values


class Walk:
    """The artefacts of one walk, and the moves."""

    def __init__(self, seed, folder):
        self.rng = np.random.default_rng(seed)
        self.folder, self.number = folder, itertools.count()
        self.account = Account()
        self.x = self.rng.normal(size=(N, D)).astype(np.float32)
        self.vaults: list[tuple[ldp.PrivateLabels, frozenset[int]]] = []
        # Models with the same variables share a Origin.
        self.noisy: list[tuple[Any, Origin]] = []
        self.models: list[tuple[keras.Model, Origin]] = []
        self.heads: list[tuple[Any, Origin]] = []
        self.of_files: list[keras.Model] = []
        self.uncovered: list[keras.Model] = []  # their optimizers took steps without receipts
        self.new_vault()
        self.fresh_model()

    def new_vault(self):
        y = self.rng.integers(0, K, N)
        store = self.path("store") if self.rng.random() < 0.5 else None
        budget = ldp.PrivacyBudget(1e6, DELTA)
        self.vaults.append([ldp.PrivateLabels(y, K, budget=budget, store=store), frozenset()])

    def path(self, suffix):
        return self.folder / f"{next(self.number)}{suffix}"

    def pick(self, things):
        return things[self.rng.integers(len(things))]

    def record(self, vault, examples, epsilon):
        """Records a use of a vault."""
        use = self.account.use(id(vault[0]), examples, epsilon)
        vault[1] |= use
        return use

    def plain(self):
        layers = [keras.Input((D,)), keras.layers.Dense(3, "tanh"), keras.layers.Dense(K)]
        return keras.Sequential(layers)

    def fresh_model(self):
        self.models.append((self.plain(), Origin()))

    def randomize(self):
        vault, epsilon = self.pick(self.vaults), float(self.rng.uniform(0.1, 1.0))
        rows = self.rng.permutation(N)[: self.rng.integers(1, N + 1)]
        noisy = vault[0].randomize(ldp.RandomizedResponse(epsilon, K), rows)
        self.noisy.append((noisy, Origin(self.record(vault, rows.tolist(), epsilon))))

    def randomize_with_priors(self):
        vault, other = self.pick(self.vaults), self.pick(self.vaults)
        epsilons = self.rng.uniform(0.1, 1.0, 2).tolist()
        histogram = ldp.mechanisms.HistogramMechanism(epsilons[0], K)
        counts = other[0].release(histogram, public_input=np.arange(N) % 2)
        uses = self.record(other, range(N), epsilons[0])
        priors = counts.priors()
        noisy = vault[0].randomize(ldp.RRWithPrior(epsilons[1], K), priors=priors)
        self.noisy.append((counts, Origin(uses)))
        self.noisy.append((noisy, Origin(uses | self.record(vault, range(N), epsilons[1]))))

    def reserve(self):
        """Reserves two draws and a release, of which an error leaves out the last ones."""
        vault, number = self.pick(self.vaults), next(self.number)
        drawn = int(self.rng.integers(0, 4))
        epsilons = self.rng.uniform(0.1, 1.0, 3).tolist()
        uses = {
            f"{number}-a": ldp.RandomizedResponse(epsilons[0], K),
            f"{number}-b": ldp.mechanisms.HistogramMechanism(epsilons[1], K),
            f"{number}-c": ldp.RandomizedResponse(epsilons[2], K),
        }
        with contextlib.suppress(OverflowError), vault[0].reserve(uses):
            assert self.reserved(vault) == pytest.approx(sum(epsilons))
            for key, use in itertools.islice(uses.items(), drawn):
                is_draw = isinstance(use, ldp.RandomizedResponse)
                verb = vault[0].randomize if is_draw else vault[0].release
                output = verb(use, key=key)
                self.noisy.append((output, Origin(self.record(vault, range(N), use.epsilon))))
            if drawn < len(uses):
                raise OverflowError
        assert self.reserved(vault) == 0.0

    def reserved(self, vault):
        uses = [use for use in vault[0].history() if use.what.endswith("reserved")]
        return sum(use.epsilon for use in uses)

    def release_in_two(self):
        """Draws by a randomizer that reserves its two releases."""
        vault, epsilon = self.pick(self.vaults), float(self.rng.uniform(0.1, 1.0))
        randomizer = ldp.ClusterRandomizedResponse.for_epsilon(epsilon, K)
        clusters, key = np.arange(N) % 2, f"clusters-{next(self.number)}"
        noisy = vault[0].randomize(randomizer, clusters=clusters, key=key)
        self.noisy.append((noisy, Origin(self.record(vault, range(N), epsilon))))

    def search(self):
        """Fits two heads, chooses one by a release, and goes on with the best alone."""
        vault, epsilon = self.pick(self.vaults), float(self.rng.uniform(0.1, 1.0))
        head, key = ldp.PrivateRidge(1.0, noise="laplace"), f"search-{next(self.number)}"
        search = ldp.PrivateSearchCV(head, {"spread": [True, False]}, epsilon, 0.0, key=key)
        search.fit(self.x, vault[0])
        # The fits and the choice are on different examples, all at epsilon.
        self.heads.append((search.best_estimator_, Origin(self.record(vault, range(N), epsilon))))

    def select(self):
        """Chooses one of two heads by a release: the best depends on both."""
        if not self.heads:
            return
        vault, epsilon = self.pick(self.vaults), float(self.rng.uniform(0.1, 1.0))
        candidates = [self.pick(self.heads), self.pick(self.heads)]
        predictions = self.rng.integers(0, K, (2, N))
        heads = [head for head, _ in candidates]
        best = ldp.select(predictions, vault[0], epsilon, candidates=heads)
        origin = Origin(self.record(vault, range(N), epsilon))
        for _, behind in candidates:
            origin.add(behind.sure, behind.possible)
        self.heads.append((best, origin))

    def take_from_others(self):
        """Takes a model whose author names all published ids in receipts of a small cost."""
        published = [receipt for vault, _ in self.vaults for receipt in vault.receipts]
        ids = sorted({name for receipt in published for name in (receipt.id, receipt.use) if name})
        epsilon = float(self.rng.uniform(0.01, 0.1))
        claim = Receipt.of_declaration((), "a walk of others", epsilon)
        name = str(self.pick(ids)) if ids else ""
        model = self.plain()
        TrainedModel(model).attach(
            [dataclasses.replace(claim, answers=tuple(ids), use=name, plan=name)]
        )
        origin = Origin(self.account.use(object(), [0], epsilon))
        origin.changed = True  # The receipts are in the layers, and no file names the weights.
        self.models.append((model, origin))

    def copy_noisy(self):
        noisy, origin = self.pick(self.noisy) if self.noisy else (None, None)
        if isinstance(noisy, ldp.NoisyLabels):
            folder = self.path("noisy")
            noisy.save(folder)
            self.noisy.append((ldp.NoisyLabels.load(folder), origin))

    def fit_head(self):
        vault, epsilon = self.pick(self.vaults), float(self.rng.uniform(0.1, 1.0))
        encoder, origin = None, Origin()
        if self.rng.random() < 0.5:
            encoder, origin = self.pick(self.models)
            if not np.any(np.ptp(encoder.predict(self.x, verbose=0), axis=0)):
                return  # Heads refuse an encoder with constant features.
        head = ldp.PrivateRidge(epsilon, noise="laplace", encoder=encoder)
        head.fit(self.x, vault[0])
        of_head = origin.copy()
        of_head.add(self.record(vault, range(N), epsilon))
        if encoder is not None:
            head.encoder = head.encoder_ = (
                None  # The head is pickled and exported without its encoder.
            )
        self.heads.append((head, of_head))

    def copy_head(self):
        if self.heads:
            head, origin = self.pick(self.heads)
            self.heads.append((pickle.loads(pickle.dumps(head)), origin))

    def export_head(self):
        if self.heads:
            head, origin = self.pick(self.heads)
            model = head.to_keras()
            # That of a head with an encoder may take the encoder's features.
            if model.input_shape[-1] == D:
                self.models.append((model, origin.copy()))

    def fit_privately(self):
        model, origin = self.pick(self.models)
        if not model.trainable_variables:
            return
        vault = self.pick(self.vaults)
        private = model
        if not isinstance(model, ldp.LabelDPModel) or self.rng.random() < 0.3:
            private = ldp.LabelDPModel.from_model(model)
            noise = PureNoise(float(self.rng.uniform(0.05, 0.5)))
            optimizer = ldp.LabelDPOptimizer(keras.optimizers.SGD(0.1), 1.0, noise=noise)
            private.compile(optimizer, loss=SPARSE, run_eagerly=True)
            self.models.append((private, origin))
        batches = ldp.data.poisson_batches(
            self.x, vault[0], sampling_probability=0.3, steps=int(self.rng.integers(1, 3))
        )
        private.fit(batches, epochs=1, verbose=0)
        epsilon = batches.steps * private.optimizer.noise_multiplier
        origin.add(self.record(vault, range(N), epsilon))

    def fit_in_stages(self):
        model, origin = self.pick(self.models)
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
            origin.add(self.record(vault, half.tolist(), epsilon))
        origin.changed = False
        self.noisy.append((noisy, origin.copy()))  # The second stage took priors from the model.

    def fit_in_the_clear(self):
        model, origin = self.pick(self.models)
        if isinstance(model, ldp.LabelDPModel) or not model.trainable_variables:
            return
        self.compile(model, SPARSE)
        model.fit(self.x, self.rng.integers(0, K, N), verbose=0)
        origin.possible |= self.account.use("in the clear", [0], math.inf)
        origin.changed = True
        if not origin.carried:
            origin.sure = frozenset()
        self.uncovered.append(model)

    def compile(self, model, loss):
        """Compiles a model with a new optimizer."""
        model.compile(keras.optimizers.SGD(0.1), loss, run_eagerly=True)
        self.uncovered = [other for other in self.uncovered if other is not model]

    def declare(self):
        model, origin = self.pick(self.models)
        epsilon = float(self.rng.uniform(0.1, 1.0)) if self.rng.random() < 0.5 else 0.0
        if "NOT PRIVATE" in ldp.guarantee(model).headline:
            ldp.declare(model, "a walk", epsilon=epsilon)
            assert math.isfinite(ldp.guarantee(model).epsilon)
            self.uncovered = [other for other in self.uncovered if not share(other, model)]
            claim = self.account.use(object(), [0], epsilon)
            origin.sure |= claim
            # The claim is about these weights, in any model.
            for other, other_origin in self.models:
                if other_origin is origin or share(other, model):
                    other_origin.possible |= claim
                    other_origin.changed = other_origin.changed and other_origin is not origin

    def fit_on_noisy_labels(self):
        if not self.noisy:
            return
        noisy, origin = self.pick(self.noisy)
        if not isinstance(noisy, ldp.NoisyLabels) or not len(noisy):
            return
        model, other_origin = self.pick(self.models)
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
        other_origin.add(origin.sure, origin.possible)
        other_origin.changed = False

    def save_and_load(self):
        model, origin = self.pick(self.models)
        path = self.path(".keras")
        model.save(path)
        self.models.append((ldp.load_model(path), origin.copy()))

    def save_and_load_with_keras(self):
        model, origin = self.pick(self.models)
        path = self.path(".keras")
        model.save(path)
        self.read(keras.models.load_model(path), origin)

    def load_weights(self):
        model, origin = self.pick(self.models)
        path = self.path(".weights.h5")
        model.save_weights(path)
        other = self.twin(model)
        other.load_weights(path)
        self.read(other, origin)

    def checkpoint(self):
        model, origin = self.pick(self.models)
        path = tf.train.Checkpoint(model=model).save(str(self.path("checkpoint")))
        other = self.twin(model)
        tf.train.Checkpoint(model=other).restore(path).expect_partial()
        self.read(other, origin)

    def read(self, model, origin):
        """Adds a model that Keras has read from a file."""
        self.models.append((model, origin.of_copy()))
        self.of_files.append(model)

    def set_weights(self):
        model, origin = self.pick(self.models)
        other = self.twin(model)
        other.set_weights(model.get_weights())
        self.models.append((other, origin.of_copy(sure=are_recognizable(model))))

    def one_layer(self):
        model, origin = self.pick(self.models)
        other = self.twin(model)
        layers = [layer for layer in model.layers if layer.weights]
        twins = [layer for layer in other.layers if layer.weights]
        if layers:
            twins[-1].set_weights(layers[-1].get_weights())
            self.models.append((other, origin.of_copy(sure=are_recognizable(layers[-1]))))

    def same_layers(self):
        model, origin = self.pick(self.models)
        self.models.append((keras.Model(model.inputs, model.outputs), origin))

    def clone(self):
        model, _ = self.pick(self.models)
        self.models.append((self.twin(model), Origin()))

    def twin(self, model):
        """Returns a model of the same configuration with its own weights."""
        twin = keras.models.clone_model(model)
        if isinstance(twin, ldp.LabelDPModel):
            noise = PureNoise(0.2)
            optimizer = ldp.LabelDPOptimizer(keras.optimizers.SGD(0.1), 1.0, noise=noise)
            twin.compile(optimizer, loss=SPARSE, run_eagerly=True)
        return twin

    def check(self, number=None):
        """Compares the statements of some artefacts, or of all."""
        artefacts: list[Any] = [*self.noisy, *self.models, *self.heads]
        chosen = self.rng.permutation(len(artefacts))[:number]
        for artefact, origin in [self.models[-1], *(artefacts[place] for place in chosen)]:
            least = self.account.epsilon(origin.sure) if origin.sure else 0.0
            statement = ldp.guarantee(artefact)
            stated = statement.epsilon
            if statement.headline == "no record of any label":
                # No counted use is in its weights for sure.
                assert math.isinf(stated) and not any(
                    math.isfinite(self.account.uses[number][2]) for number in origin.sure
                )
                continue
            assert stated >= least * (1.0 - 1e-9), (artefact, stated, least)
            counted = {
                number for number in origin.possible if math.isfinite(self.account.uses[number][2])
            }
            if math.isinf(stated):
                # If a model was read with its optimizer, and another model then trained its layers,
                # the steps of the optimizer are not covered.
                read = any(
                    artefact is model and getattr(model, "optimizer", None)
                    for model in self.of_files
                )
                assert origin.possible - counted or read, artefact
            else:
                assert not any(artefact is model for model in self.uncovered)
                # Composition rounds losses up, by less than 0.2 % of their sum.
                most = self.account.epsilon(frozenset(counted)) if counted else 0.0
                assert stated <= most * 1.002 + 1e-9, (artefact, stated, most)
            if number is None and hasattr(artefact, "guarantee"):
                assert artefact.guarantee().epsilon == pytest.approx(stated)
        for vault, uses in self.vaults:
            stated = vault.guarantee().epsilon
            assert math.isfinite(stated) and stated >= self.account.epsilon(uses) * (1.0 - 1e-9)


def are_recognizable(model):
    """Returns whether the last weights are no constants, which any layer may have."""
    layers = [layer for layer in getattr(model, "layers", [model]) if layer.weights]
    return any(np.ptp(weight) for weight in layers[-1].get_weights())


def share(first, second):
    """Returns whether two models have equal values in a variable that is no constant."""
    values, others = ([w for w in m.get_weights() if np.ptp(w)] for m in (first, second))
    return any(np.array_equal(a, b) for a in values for b in others)


MOVES: list[Callable[[Walk], None]] = [
    Walk.new_vault,
    Walk.fresh_model,
    *[Walk.randomize, Walk.randomize_with_priors, Walk.fit_head, Walk.export_head] * 2,
    *[Walk.copy_noisy, Walk.copy_head, Walk.reserve, Walk.release_in_two],
    *[Walk.search, Walk.select, Walk.take_from_others],
    *[Walk.fit_privately] * 4,
    *[Walk.fit_in_stages, Walk.fit_in_the_clear, Walk.declare, Walk.fit_on_noisy_labels],
    *[Walk.save_and_load, Walk.save_and_load_with_keras, Walk.load_weights],
    *[Walk.checkpoint, Walk.set_weights],
    *[Walk.one_layer, Walk.same_layers, Walk.clone],
]


def walk(seed, moves=10):
    keras.utils.set_random_seed(seed)
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        state = Walk(seed, pathlib.Path(folder))
        for number in state.rng.permutation(len(MOVES))[:moves]:
            move = MOVES[number]
            try:
                move(state)
                state.check(4)
            except AssertionError as error:
                raise AssertionError(f"seed {seed}, after {move.__name__}") from error
        state.check()


@pytest.mark.parametrize("seed", [0, 2])
def test_statements_follow_a_random_walk(seed):
    walk(seed)


@pytest.mark.slow
@pytest.mark.parametrize(
    "first",
    [
        *range(1000, 1030, 10),
        *(pytest.param(first, marks=pytest.mark.exhaustive) for first in range(1030, 1250, 10)),
    ],
)
def test_statements_follow_many_random_walks(first):
    """Each sequence of three moves comes once on average: 30 * comb(22, 3) / (33 * 32 * 31)."""
    for seed in range(first, first + 10):
        walk(seed, moves=22)


def test_the_account_composes_in_parallel_and_in_sequence():
    account = Account()
    first = account.use("a", [0, 1], 1.0) | account.use("a", [1, 2], 0.5)
    assert account.epsilon(first) == 1.5
    assert account.epsilon(first | account.use("b", [7], 0.25)) == 1.75
    assert account.epsilon(account.use("a", [0], 1.0) | account.use("a", [3], 2.0)) == 2.0
