"""Random walks over what people do with labels, models and files, with an account of their own.

The account knows nothing of receipts: it writes down, for every artefact, the uses of labels that
went into it, and adds up epsilons on the worst example. Statements must never be below it, must be
infinite only where something was trained in the clear and not declared, and equal it otherwise (all
uses here are pure, so that composition is a sum but for rounding).
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

    def __init__(self) -> None:
        self.uses: dict[int, tuple[Any, frozenset[int], float]] = {}
        self.made_of: dict[int, frozenset[int]] = {}

    def use(self, label_set: Any, examples: Any, epsilon: float) -> frozenset[int]:
        number = len(self.uses)
        self.uses[number] = (label_set, frozenset(examples), epsilon)
        return frozenset([number])

    def epsilon(self, uses: frozenset[int]) -> float:
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

    def __init__(self, noise_multiplier: float = 0.05) -> None:
        self.noise_multiplier = noise_multiplier

    def add_noise(self, clipped_sum: Any, l2_norm_clip: float, state: Any) -> Any:
        noisy = [part + tf.random.normal(part.shape, stddev=0.1) for part in clipped_sum]
        return noisy, state

    def dp_event(self, sampling_probability: float, steps: int) -> Any:
        import dp_accounting

        one = ldp.accounting._events.pure_dp_event(self.noise_multiplier)
        return dp_accounting.SelfComposedDpEvent(one, steps)


class Walk:
    """One walk: what there is, and what can be done with it."""

    def __init__(self, seed: int, folder: pathlib.Path) -> None:
        self.rng = np.random.default_rng(seed)
        self.folder, self.number = folder, itertools.count()
        self.account = Account()
        self.x = self.rng.normal(size=(N, D)).astype(np.float32)
        self.vaults: list[tuple[ldp.PrivateLabels, frozenset[int]]] = []
        # Artefacts with the uses that they are made of, as a box that models of one weight share.
        self.noisy: list[tuple[Any, list[frozenset[int]]]] = []
        self.models: list[tuple[keras.Model, list[frozenset[int]]]] = []
        self.heads: list[tuple[Any, list[frozenset[int]]]] = []
        self.new_vault()
        self.fresh_model()

    # What there is.

    def new_vault(self) -> None:
        y = self.rng.integers(0, K, N)
        store = self.path("store") if self.rng.random() < 0.5 else None
        budget = ldp.PrivacyBudget(1e6, DELTA)
        self.vaults.append([ldp.PrivateLabels(y, K, budget=budget, store=store), frozenset()])

    def path(self, suffix: str) -> pathlib.Path:
        return self.folder / f"{next(self.number)}{suffix}"

    def pick(self, things: list[Any]) -> Any:
        return things[self.rng.integers(len(things))]

    def left(self, vault: Any, examples: Any, epsilon: float) -> frozenset[int]:
        """Writes down a use of a vault."""
        made = self.account.use(id(vault[0]), examples, epsilon)
        vault[1] |= made
        return made

    def plain(self) -> keras.Model:
        layers = [keras.Input((D,)), keras.layers.Dense(3, "tanh"), keras.layers.Dense(K)]
        return keras.Sequential(layers)

    def fresh_model(self) -> None:
        self.models.append((self.plain(), [frozenset()]))

    # What leaves a vault.

    def randomize(self) -> None:
        vault, epsilon = self.pick(self.vaults), float(self.rng.uniform(0.1, 1.0))
        rows = self.rng.permutation(N)[: self.rng.integers(1, N + 1)]
        noisy = vault[0].randomize(ldp.RandomizedResponse(epsilon, K), rows)
        self.noisy.append((noisy, [self.left(vault, rows.tolist(), epsilon)]))

    def randomize_with_priors(self) -> None:
        vault, other = self.pick(self.vaults), self.pick(self.vaults)
        epsilons = self.rng.uniform(0.1, 1.0, 2).tolist()
        histogram = ldp.mechanisms.HistogramMechanism(epsilons[0], K)
        counts = other[0].release(histogram, public_input=np.arange(N) % 2)
        made = self.left(other, range(N), epsilons[0])
        priors = counts.priors()
        noisy = vault[0].randomize(ldp.RRWithPrior(epsilons[1], K), priors=priors)
        made |= self.left(vault, range(N), epsilons[1])
        self.noisy += [(counts, [made - {max(made)}]), (noisy, [made])]

    def copy_noisy(self) -> None:
        noisy, made = self.pick(self.noisy) if self.noisy else (None, None)
        if isinstance(noisy, ldp.NoisyLabels):
            folder = self.path("noisy")
            noisy.save(folder)
            self.noisy.append((ldp.NoisyLabels.load(folder), made))

    def fit_head(self) -> None:
        vault, epsilon = self.pick(self.vaults), float(self.rng.uniform(0.1, 1.0))
        encoder, made = (None, [frozenset()])
        if self.rng.random() < 0.5:
            encoder, made = self.pick(self.models)
            if not np.any(np.ptp(encoder.predict(self.x, verbose=0), axis=0)):
                return  # it has lost all features, and heads refuse it
        head = ldp.PrivateRidge(epsilon, noise="laplace", encoder=encoder)
        head.fit(self.x, vault[0])
        box = [made[0] | self.left(vault, range(N), epsilon)]
        if encoder is not None:
            head.encoder = None  # pickled and exported by itself
        self.heads.append((head, box))

    def copy_head(self) -> None:
        if self.heads:
            head, made = self.pick(self.heads)
            self.heads.append((pickle.loads(pickle.dumps(head)), made))

    def export_head(self) -> None:
        if self.heads:
            head, made = self.pick(self.heads)
            if head.n_features_in_ == D:
                self.models.append((head.to_keras(), [made[0]]))

    # Training.

    def fit_privately(self) -> None:
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
        made[0] |= self.left(vault, range(N), epsilon)

    def fit_in_stages(self) -> None:
        model, made = self.pick(self.models)
        if isinstance(model, ldp.LabelDPModel) or not model.trainable_variables:
            return
        vault, epsilon = self.pick(self.vaults), float(self.rng.uniform(0.1, 1.0))
        if model.output_shape[-1] != K:
            return
        model.compile(keras.optimizers.SGD(0.1), DENSE, run_eagerly=True)
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
            made[0] |= self.left(vault, half.tolist(), epsilon)
        self.noisy.append((noisy, [made[0]]))  # the second stage asked the model for priors

    def fit_in_the_clear(self) -> None:
        model, made = self.pick(self.models)
        if isinstance(model, ldp.LabelDPModel) or not model.trainable_variables:
            return
        model.compile(keras.optimizers.SGD(0.1), SPARSE, run_eagerly=True)
        model.fit(self.x, self.rng.integers(0, K, N), verbose=0)
        made[0] |= self.account.use("in the clear", [0], math.inf)

    def declare(self) -> None:
        model, made = self.pick(self.models)
        epsilon = float(self.rng.uniform(0.1, 1.0)) if self.rng.random() < 0.5 else 0.0
        unknown = {one for one in made[0] if math.isinf(self.account.uses[one][2])}
        if unknown:
            ldp.declare(model, "a walk", epsilon=epsilon)
            claim = self.account.use(object(), [0], epsilon)
            # It is about these weights, in whatever model they are.
            for box in {id(b): b for m, b in self.models if b is made or share(m, model)}.values():
                if unknown & box[0]:
                    box[0] = (box[0] - unknown) | claim

    def fit_on_noisy_labels(self) -> None:
        if not self.noisy:
            return
        noisy, made = self.pick(self.noisy)
        if not isinstance(noisy, ldp.NoisyLabels) or not len(noisy):
            return
        model = self.plain()
        model.compile(keras.optimizers.SGD(0.1), SPARSE, run_eagerly=True)
        model.fit(noisy.to_dataset(self.x).batch(8), verbose=0)
        ldp.declare(model, "trained on these alone", made_of=[noisy])
        self.models.append((model, [made[0]]))

    # Weights that go elsewhere.

    def save_and_load(self) -> None:
        model, made = self.pick(self.models)
        path = self.path(".keras")
        model.save(path)
        self.models.append((keras.models.load_model(path), [made[0]]))

    def load_weights(self) -> None:
        model, made = self.pick(self.models)
        path = self.path(".weights.h5")
        model.save_weights(path)
        other = self.twin(model)
        other.load_weights(path)
        self.models.append((other, [made[0]]))

    def checkpoint(self) -> None:
        model, made = self.pick(self.models)
        path = tf.train.Checkpoint(model=model).save(str(self.path("checkpoint")))
        other = self.twin(model)
        tf.train.Checkpoint(model=other).restore(path).expect_partial()
        self.models.append((other, [made[0]]))

    def set_weights(self) -> None:
        model, made = self.pick(self.models)
        other = self.twin(model)
        other.set_weights(model.get_weights())
        self.models.append((other, [made[0] if can_be_told(model) else frozenset()]))

    def one_layer(self) -> None:
        model, made = self.pick(self.models)
        other = self.twin(model)
        layers = [one for one in model.layers if one.weights]
        twins = [one for one in other.layers if one.weights]
        if layers:
            twins[-1].set_weights(layers[-1].get_weights())
            self.models.append((other, [made[0] if can_be_told(layers[-1]) else frozenset()]))

    def same_layers(self) -> None:
        model, made = self.pick(self.models)
        self.models.append((keras.Model(model.inputs, model.outputs), made))

    def clone(self) -> None:
        model, _ = self.pick(self.models)
        self.models.append((self.twin(model), [frozenset()]))

    def twin(self, model: keras.Model) -> keras.Model:
        """A model of the same configuration, with weights of its own."""
        made = keras.models.clone_model(model)
        if isinstance(made, ldp.LabelDPModel):
            noise = PureNoise(0.2)
            optimizer = ldp.LabelDPOptimizer(keras.optimizers.SGD(0.1), 1.0, noise=noise)
            made.compile(optimizer, loss=SPARSE, run_eagerly=True)
        return made

    # The comparison.

    def check(self, number: int | None = None) -> None:
        """Compares the statements of so many artefacts, or of all."""
        artefacts: list[Any] = [*self.noisy, *self.models, *self.heads]
        chosen = self.rng.permutation(len(artefacts))[:number]
        for artefact, made in [self.models[-1], *(artefacts[place] for place in chosen)]:
            expected = self.account.epsilon(made[0]) if made[0] else 0.0
            stated = ldp.guarantee(artefact).epsilon
            assert stated >= expected * (1.0 - 1e-9), (artefact, stated, expected)
            assert math.isinf(stated) == math.isinf(expected), (artefact, stated, expected)
            if math.isfinite(expected):
                # Composition rounds each of a use's two steps up to a grid of 1e-4.
                above = 2e-4 * len(made[0]) + 1e-9
                assert stated <= expected + above, (artefact, stated, expected)
            if number is None and hasattr(artefact, "guarantee"):
                assert artefact.guarantee().epsilon == pytest.approx(stated)
        for vault, uses in self.vaults:
            stated = vault.guarantee().epsilon
            assert math.isfinite(stated) and stated >= self.account.epsilon(uses) * (1.0 - 1e-9)


def can_be_told(model: Any) -> bool:
    """Whether values alone tell where they come from: zeros of a silent head are of any layer."""
    layers = [one for one in getattr(model, "layers", [model]) if one.weights]
    return any(np.ptp(weight) for weight in layers[-1].get_weights())


def share(first: keras.Model, second: keras.Model) -> bool:
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
    *[Walk.save_and_load, Walk.load_weights, Walk.checkpoint, Walk.set_weights],
    *[Walk.one_layer, Walk.same_layers, Walk.clone],
]


def walk(seed: int) -> None:
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
def test_statements_follow_a_random_walk(seed: int) -> None:
    walk(seed)


@pytest.mark.slow
@pytest.mark.parametrize("first", [0, *range(1000, 1500, 25)])
def test_statements_follow_many_random_walks(first: int) -> None:
    for seed in range(first, first + 25):
        walk(seed)
        keras.backend.clear_session()


def test_the_account_adds_up_as_it_should() -> None:
    account = Account()
    first = account.use("a", [0, 1], 1.0) | account.use("a", [1, 2], 0.5)
    assert account.epsilon(first) == 1.5
    assert account.epsilon(first | account.use("b", [7], 0.25)) == 1.75
    assert account.epsilon(account.use("a", [0], 1.0) | account.use("a", [3], 2.0)) == 2.0
