"""``BootstrappedHead``: a network distilled from private heads on features that it learns."""

from __future__ import annotations

import dataclasses
import math
import pathlib
from typing import Any, TypeVar

import numpy as np

from tf_labeldp import _checks, _validate
from tf_labeldp._progress import silent, without_retracing_warnings
from tf_labeldp.accounting import (
    Charge,
    Private,
    Public,
    PublicInput,
    Receipt,
    Receipts,
    public_input,
)
from tf_labeldp.estimation import likelihoods
from tf_labeldp.features.public_encoder import fitted_encoder
from tf_labeldp.features.reader import FeatureRows
from tf_labeldp.features.tables import symbolic_inputs
from tf_labeldp.heads._logistic import PrivateLogisticRegression
from tf_labeldp.heads._prior_randomizer import teacher_labels
from tf_labeldp.heads.one_release_head import Head
from tf_labeldp.mechanisms import InformativeRR, Priors
from tf_labeldp.vault import PrivateLabels
from tf_labeldp.vault.counted_steps import CountedSteps
from tf_labeldp.vault.files import PlainFile
from tf_labeldp.vault.records import Arrays
from tf_labeldp.vault.uses import NamedUse

_Self = TypeVar("_Self", bound="BootstrappedHead")
_MARGIN = 1e-5
"""Share of epsilon that stays unspent, because the ledger also counts the rounding of releases."""
_DRAW_SHARE, _DRAW_FROM = 0.85, 2.0
"""Share of epsilon for noisy labels, and the epsilon from which they are drawn."""
_DRAW_ROUNDS = 4
"""Rounds of ``epochs`` on noisy labels."""
_ROWS = 512
"""Rows per prediction of the network."""
_LEAST = 1e-12
"""The least probability in a logarithm, and the least length as a divisor."""


@dataclasses.dataclass(eq=False, repr=False)
class BootstrappedHead(Head):
    """A network distilled from private heads, each on features learnt from the earlier releases.

    A ``PrivateLogisticRegression`` on label-free features makes the first release. The network
    learns its probabilities on random views of all inputs. The next head is fitted on the network's
    last hidden layer and the label-free features; the network then learns the sum of the heads'
    log-probabilities, and so on. The result is the network.

    From epsilon 2 per label on, 85 % of it draws noisy labels last, by ``InformativeRR`` with the
    network's probabilities as priors. The network then maximises the probability of the noisy
    labels, which is the sum over classes of its probability times the channel's. Posteriors of the
    priors would be sure and wrong where the priors were; here the network's own probabilities
    replace them.

    Guarantee:
        (epsilon, delta)-label-DP for the replacement of one label, whatever the number of releases.
        The heads' releases are Gaussian with noise multipliers s_r, each chosen after the earlier
        releases; together they are as private as one release with ``1 / s^2 = sum_r 1 / s_r^2``
        (Dong, Roth and Su, "Gaussian differential privacy", 2022, Corollary 2). The draw's epsilon
        is added (basic composition); with users, of whom none has more than k labels, each label is
        drawn at a k-th of it. The network learns from released probabilities alone. The
        vault is charged, and refuses before the first release if its budget is too small for all.

    Source: ours; every release is made by ``PrivateLogisticRegression``.

    Args:
        epsilon: the epsilon of all releases together, finite and above zero.
        delta: in (0, 1), below 1/n for n labels.
        network: a built Keras model from inputs, also a dict or list of them, to logits (n, K),
            which is trained in place. Its last layer is dense. Its last hidden layer should be a
            few hundred wide: the time of a release grows with the cube of that width.
        encoder: maps inputs to the first features, fitted without labels: a feature map, a Keras
            model or a callable; for images the best is
            ``NeighbourSmoothing(PatchDictionary().fit(x)).fit(x)``. None for flattened inputs,
            standardized if there are several.
        shares: shares of the squared precision, one per release of a head; they sum to one. None
            for one release if noisy labels follow, and else two, of 0.3 and 0.7.
        draw_share: share of epsilon for noisy labels, in [0, 1); 0 draws none. None for 0.85 from
            epsilon 2 on, and 0 below.
        mirrored: whether a mirrored image keeps its class. Probabilities are then means over image
            and mirror image; ``views`` should mirror, too.
        epochs: epochs of training after each release of a head; noisy labels get four times these.
        batch_size: examples per training step.
        learning_rate: the peak learning rate of AdamW; a cosine lowers it in every round.
        views: Keras layers that change inputs at random but not their class, for images
            ``self_supervised.weak_views()``; None for none.
        key: the name of the releases in a vault, ``key/1``, ``key/2``, ...
        seed: shuffles the batches; public.
        verbose: as in ``keras.Model.fit``, for the network's training.

    Attributes:
        heads_: the fitted heads.
        classes_: class values (K,).

    Raises:
        TypeError: ``fit`` gets labels outside a vault, or a network of another type.
        ValueError: ``fit`` gets arguments out of range.

    Example:
        >>> import keras
        >>> import tf_labeldp as ldp
        >>> x = np.random.default_rng(0).normal(size=(2000, 6)).astype("float32")
        >>> budget = ldp.PrivacyBudget(2.0, delta=1e-5)
        >>> labels = ldp.PrivateLabels((x[:, 0] > 0).astype(int), 2, budget=budget)
        >>> network = keras.Sequential(
        ...     [keras.Input((6,)), keras.layers.Dense(8, "relu"), keras.layers.Dense(2)]
        ... )
        >>> head = BootstrappedHead(2.0, 1e-5, network, epochs=2, verbose=0).fit(x, labels)
        >>> round(head.guarantee().epsilon, 4), head.to_keras().predict(x, verbose=0).shape
        (2.0, (2000, 2))
    """

    epsilon: float
    delta: float
    network: Public[Any]
    _: dataclasses.KW_ONLY
    encoder: Public[Any] = None
    shares: tuple[float, ...] | None = None
    draw_share: float | None = None
    mirrored: bool = False
    epochs: int = 5
    batch_size: int = 256
    learning_rate: float = 2e-3
    views: Public[Any] = None
    key: str = "bootstrapped-head"
    seed: int = 0
    verbose: int | str = "auto"

    _group_size = 1  # the most labels of one user in the vault of the last fit

    @_validate.clears_frames
    def fit(self: _Self, X: Public[Any], y: Private[PrivateLabels]) -> _Self:
        """Alternates between a release and training of the network.

        A vault with a store also keeps the network after each epoch: a second fit with the same
        key, or a fit after an interruption, reads releases and networks and continues.

        Args:
            X: a public array (n, ...) that the network takes; or a dict, list or tuple of arrays,
                for a network with several inputs.
            y: a vault with the classes of n examples and a budget for (epsilon, delta).

        Returns:
            The head itself.

        Raises:
            BudgetExceededError: the vault's budget does not allow all releases; none was made.
        """
        arguments = public_input(X, self.network, self.views)
        inputs = self._inputs(arguments.value[0])
        heads = self._heads(FeatureRows(inputs).num_inputs, y)
        self._check_inputs(inputs)
        use = NamedUse(y, self.key)
        with use.reserve(public_input(arguments, self.encoder).with_value(self)):
            return self._fit_within(heads, arguments.with_value(inputs), use)

    def _fit_within(
        self: _Self,
        heads: list[PrivateLogisticRegression],
        arguments: PublicInput[Any],
        use: NamedUse,
    ) -> _Self:
        """Fits within the reservation of all releases."""
        from scipy import special

        y = use.labels
        public = public_input(arguments, fitted_encoder(self.encoder, arguments))
        inputs, encoder = public.value
        if encoder is None and not isinstance(inputs, np.ndarray):
            first = _standardized(inputs)
        else:
            first = FeatureRows(inputs, encoder, flatten=True).array()
        features, logits, receipts = first, np.zeros(()), public.receipts
        for number, head in enumerate(heads, 1):
            with silent(self.verbose):
                # The features are those of a network that learnt from the earlier heads.
                head.fit(PublicInput(features, receipts), y)
                logits = logits + np.log(np.maximum(head.predict_proba(features), _LEAST))
            receipts = Receipts.merged(receipts, head.receipts_)
            self._learn(inputs, special.softmax(logits, axis=1), receipts, y, str(number))
            features = np.concatenate([self._hidden(inputs), first], axis=1)
        if self._for_draw(y.group_size):
            priors = Priors(self._probabilities(inputs).astype(np.float64), receipts=receipts)
            drawn = use.part("draw").randomize(self._draw(y), priors=priors)
            receipts = Receipts.merged(receipts, drawn.receipts)
            likelihood = likelihoods(drawn.mechanism, drawn.values, drawn.priors)
            likelihood /= likelihood.sum(axis=1, keepdims=True)
            self._learn(inputs, likelihood, receipts, y, "draw")
        self.heads_, self.receipts_, self._group_size = tuple(heads), receipts, y.group_size
        self.classes_ = y.decode(np.arange(y.num_classes))
        is_array = isinstance(inputs, np.ndarray)
        self._remember_columns(None, math.prod(inputs.shape[1:]) if is_array else len(inputs))
        return self

    def epsilons(self) -> tuple[float, ...]:
        """Returns the epsilon of each head's release alone, at ``delta``."""
        return self._epsilons(self._group_size)

    def rounds(self) -> int:
        """Returns the number of rounds of training, of ``epochs`` each."""
        size = self._group_size
        return len(self._shares(size)) + (_DRAW_ROUNDS if self._for_draw(size) else 0)

    @property
    def _model(self) -> Any:
        return PublicInput.bare(self.network)

    def predict(self, X: Public[Any]) -> np.ndarray:
        """Returns class values (m,) for inputs as in ``fit``."""
        likeliest = self.predict_proba(X).argmax(axis=1)
        return self.classes_[likeliest]

    def predict_proba(self, X: Public[Any]) -> np.ndarray:
        """Returns the network's class probabilities (m, K) for inputs as in ``fit``."""
        self._check_fitted()
        return self._probabilities(self._inputs(X))

    def to_keras(self) -> Any:
        """Returns the network with a softmax; it shares the weights, and saves and loads.

        Its file keeps the receipts, as the file of the network does.
        """
        import keras

        self._check_fitted()
        name = "bootstrapped_head"
        is_single = len(self._model.inputs) == 1
        if is_single and not isinstance(symbolic_inputs(self._model), dict) and not self.mirrored:
            layers = [self._model, keras.layers.Softmax()]
            return self._with_facts(keras.Sequential(layers, name=name))
        inputs = symbolic_inputs(self._model)
        outputs = keras.layers.Softmax()(self._model(inputs))
        if self.mirrored:
            mirror = keras.layers.Softmax()(self._model(keras.ops.flip(inputs, axis=2)))
            outputs = keras.layers.Average()([outputs, mirror])
        return self._with_facts(keras.Model(inputs, outputs, name=name))

    def _inputs(self, inputs: Any) -> Any:
        """Returns inputs of the network: an array, or a dict or tuple of arrays."""
        structure = symbolic_inputs(self._model)
        if isinstance(inputs, list) and isinstance(structure, (list, tuple)):
            inputs = tuple(inputs)
        inputs = FeatureRows(inputs).arrays()
        expected, found = _names_of(structure), _names_of(inputs)
        if structure is not None and expected != found:
            raise ValueError(
                f"expected the inputs that the network takes, {expected}, got {found}. Give an "
                "array for each."
            )
        return inputs

    def _check_inputs(self, inputs: Any) -> None:
        """Raises for inputs that the network can't take, before a release."""
        import keras

        if self.mirrored and not (isinstance(inputs, np.ndarray) and inputs.ndim in (3, 4)):
            raise ValueError(
                "expected images (n, height, width) or (n, height, width, channels) with "
                "mirrored=True, got other inputs. Leave mirrored out."
            )
        for part in keras.tree.flatten(inputs):
            if part.dtype.kind == "f":
                FeatureRows(part.reshape(len(part), -1)).array()
        self._model(FeatureRows(inputs).raw(np.arange(1)), training=False)

    @_validate.clears_frames
    def parts(self, labels: Private[PrivateLabels | NamedUse]) -> dict[str | None, Any]:
        """Returns the mechanisms of the heads and of the draw, for ``PrivateLabels.reserve``.

        They are named by the ``key`` of this object.
        """
        use = NamedUse(NamedUse.of(labels).labels, self.key)
        uses: dict[str | None, Any] = {}
        for head in self._unfitted(use.labels.group_size):
            uses |= head.parts(use)
        if self._for_draw(use.labels.group_size):
            uses[use.part("draw").name] = self._draw(use.labels)
        return uses

    def _unfitted(self, group_size: int) -> list[PrivateLogisticRegression]:
        return [
            PrivateLogisticRegression(epsilon, self.delta, key=f"{self.key}/{number}")
            for number, epsilon in enumerate(self._epsilons(group_size), 1)
        ]

    def _heads(self, num_rows: int, labels: PrivateLabels) -> list[PrivateLogisticRegression]:
        from tf_labeldp.self_supervised.training import Learner

        if not isinstance(labels, PrivateLabels):
            raise TypeError(
                f"labels must be a PrivateLabels, got {type(labels).__name__}. Put them into a "
                "vault: it checks the budget for all releases before the first."
            )
        _validate.positive_finite("epsilon", self.epsilon)
        if self.draw_share is not None:
            _validate.number_in("draw_share", self.draw_share, "[0, 1)")
        size = labels.group_size
        shares = [_validate.positive_finite("shares", share) for share in self._shares(size)]
        if not math.isclose(sum(shares), 1.0, abs_tol=1e-9):
            raise ValueError(
                f"shares must be one number per release and sum to one, got {self.shares}."
            )
        # A bad value must not cost budget.
        _validate.integer_at_least("epochs", self.epochs, 1)
        _validate.integer_at_least("batch_size", self.batch_size, 1)
        _validate.positive_finite("learning_rate", self.learning_rate)
        width = Learner.built_network(self._model, "network").output_shape[-1]
        if width != labels.num_classes:
            raise ValueError(
                f"expected a network with an output for each of {labels.num_classes} classes, got "
                f"one with {width}. Give another last layer."
            )
        _checks.run("outputs", self._model.outputs[0], True)
        _validate.one_label_per_row(num_rows, len(labels))
        return self._unfitted(labels.group_size)

    def _learn(
        self,
        inputs: Any,
        targets: Any,
        receipts: tuple[Receipt, ...],
        labels: PrivateLabels,
        name: str,
    ) -> None:
        """Trains on a head's probabilities, or on ``"draw"``, likelihoods of the noisy labels."""
        import keras

        is_draw = name == "draw"
        epochs = self.epochs * (_DRAW_ROUNDS if is_draw else 1)
        steps = -(-FeatureRows(inputs).num_inputs // self.batch_size) * epochs
        warm = min(100, steps // 2)
        rate = keras.optimizers.schedules.CosineDecay(
            0.1 * self.learning_rate, steps - warm, 0.05, "cosine", self.learning_rate, warm
        )
        loss = keras.losses.CategoricalCrossentropy(from_logits=True)
        model, optimizer = self._model, keras.optimizers.AdamW(rate, weight_decay=1e-3)
        model.compile(optimizer, _loss_of_noisy_labels if is_draw else loss)
        saved = None
        if labels.store_path is not None:  # within a store, the key identifies the release
            file = f"{self.key}-{name}.npz".replace("/", "-")
            saved = _SavedTraining(pathlib.Path(labels.store_path) / "networks" / file, model)
        with CountedSteps.throughout(model, receipts):
            done = 0 if saved is None else saved.restored(epochs)
            if done < epochs:
                taught, seed = teacher_labels(targets), self.seed + done
                model.fit(
                    taught.batches(inputs, self.batch_size, augment=self.views, seed=seed),
                    initial_epoch=done,
                    epochs=epochs,
                    callbacks=None if saved is None else [saved.callback()],
                    verbose=self.verbose,
                )
            model.compile(optimizer, loss)  # which loads in Keras without this package

    def _epsilons(self, group_size: int) -> tuple[float, ...]:
        epsilon = (self.epsilon - self._for_draw(group_size)) * (1.0 - _MARGIN)
        shares = self._shares(group_size)
        return tuple(Charge.gaussian_share(epsilon, self.delta, share).epsilon for share in shares)

    def _shares(self, group_size: int) -> tuple[float, ...]:
        if self.shares is not None:
            return self.shares
        return (1.0,) if self._for_draw(group_size) else (0.3, 0.7)

    def _for_draw(self, group_size: int) -> float:
        """Returns the epsilon of the draw for a user of ``group_size`` labels; zero for none."""
        share = self.draw_share
        if share is None:
            share = _DRAW_SHARE if self.epsilon / group_size >= _DRAW_FROM else 0.0
        return share * self.epsilon

    def _draw(self, labels: PrivateLabels) -> InformativeRR:
        # A user's noisy labels compose, and together they cost the draw's share.
        size = labels.group_size
        return InformativeRR(self._for_draw(size) / size, labels.num_classes)

    @without_retracing_warnings()
    def _probabilities(self, inputs: Any) -> np.ndarray:
        from scipy import special

        # The same views as in ``to_keras``.
        images = [inputs, inputs[:, :, ::-1]] if self.mirrored else [inputs]
        logits = [self._model.predict(x, batch_size=_ROWS, verbose=0) for x in images]
        return np.mean([special.softmax(each, axis=1) for each in logits], axis=0)

    @without_retracing_warnings()
    def _hidden(self, inputs: Any) -> np.ndarray:
        """Returns the inputs of the network's last layer (n, width), divided by their mean norm."""
        import keras

        model = keras.Model(symbolic_inputs(self._model), self._model.layers[-1].input)
        rows = model.predict(inputs, batch_size=_ROWS, verbose=0)
        return rows / max(float(np.linalg.norm(rows, axis=1).mean()), _LEAST)


@dataclasses.dataclass(frozen=True)
class _SavedTraining:
    """A file of a model's weights and its optimizer's state, replaced after each epoch."""

    file: pathlib.Path
    model: Any

    def restored(self, epochs: int) -> int:
        """Loads the file, and returns the number of its epochs; 0 without a file."""
        if not self.file.exists():
            return 0
        with np.load(self.file, allow_pickle=False) as file:
            self.model.set_weights([file[name] for name in file if name.startswith("arr")])
            if file["epochs"] < epochs:
                self.model.optimizer.build(self.model.trainable_variables)
                for number, variable in enumerate(self.model.optimizer.variables):
                    variable.assign(file[f"optimizer_{number}"])
            return int(file["epochs"])

    def callback(self) -> Any:
        """Returns the callback that writes the file."""
        import keras

        return keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: self._save(epoch))

    def _save(self, epoch: int) -> None:
        parts = {f"arr_{i}": part for i, part in enumerate(self.model.get_weights())}
        state = [np.asarray(variable) for variable in self.model.optimizer.variables]
        parts |= {f"optimizer_{i}": part for i, part in enumerate(state)}
        arrays = Arrays({**parts, "epochs": np.asarray(epoch + 1)})
        PlainFile(self.file).write_in_private(arrays.to_bytes(), replace=True)


def _loss_of_noisy_labels(likelihoods: Any, logits: Any) -> Any:
    from keras import ops

    from tf_labeldp.self_supervised.training import Learner

    logs = ops.log_softmax(ops.cast(logits, "float32"))
    return Learner.negative_log_likelihood(likelihoods, logs)


def _names_of(inputs: Any) -> Any:
    if isinstance(inputs, dict):
        return sorted(map(str, inputs))
    is_several = isinstance(inputs, (list, tuple)) and len(inputs) > 1
    return [f"number {place}" for place in range(len(inputs))] if is_several else "one array"


def _standardized(inputs: Any) -> np.ndarray:
    """Returns the flattened arrays side by side (n, d), each entry standardized, by array."""
    rows: list[np.ndarray] = []

    def add(part: np.ndarray) -> None:
        flat = FeatureRows(part.reshape(len(part), -1)).array().astype(np.float32)
        centred = (flat - flat.mean(axis=0)) / np.maximum(flat.std(axis=0), 1e-6)
        rows.append(centred / np.sqrt(flat.shape[1], dtype=np.float32))

    FeatureRows(inputs).parts(add)
    return np.concatenate(rows, axis=1)
