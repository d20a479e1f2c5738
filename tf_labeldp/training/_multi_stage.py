"""LP-MST: multi-stage training on labels randomized with the model's own priors."""

from __future__ import annotations

import contextlib
import math
import warnings
from collections.abc import Sequence
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from tf_labeldp import _validate
from tf_labeldp._progress import without_retracing_warnings
from tf_labeldp.accounting import (
    PrivacyGuarantee,
    Private,
    Public,
    Receipts,
    Setting,
    public_input,
)
from tf_labeldp.features.public_encoder import fitted_encoder
from tf_labeldp.features.reader import FeatureRows
from tf_labeldp.gradients.model_checks import InspectedModel
from tf_labeldp.mechanisms import Priors, RRWithPrior
from tf_labeldp.mechanisms.classes import top_k_members
from tf_labeldp.training._labelled_output import LabelledOutput
from tf_labeldp.training._record_receipts import CountedTraining
from tf_labeldp.training._stage_data import FIT, Features, StageDataset, StageSchedule, TrainingSet
from tf_labeldp.training._stage_draws import (
    StageDraws,
    StageRecords,
    StageReport,
    StageWeights,
)
from tf_labeldp.vault import NoisyLabels, Numbers, PrivateLabels, Reservation, guarantee
from tf_labeldp.vault.model_history import TrainedModel

_SHUFFLE_STREAM = 1
"""Added to the seed: the order of batches and the split into stages are drawn independently."""


class _Start(NamedTuple):
    """The variables of a model and of its optimizer, with their initial values."""

    weights: list[tuple[Any, np.ndarray]]
    optimizer: list[tuple[Any, np.ndarray]]


class MultiStageTraining(CountedTraining):
    """Trains in stages, each on labels randomized with the model of the previous stage.

    The examples are split at random, without looking at labels. Stage 1 randomizes the labels of
    its part by randomized response (or RRWithPrior under ``priors``). Each later stage takes the
    current model's predictions on its part as priors, randomizes the labels of this part by
    RRWithPrior, and continues training. One stage is LP-1ST, plain randomized response; two are
    LP-2ST.

    Guarantee:
        (epsilon, 0)-label-DP under replacement of one label, for the final model, all intermediate
        models and all noisy labels together (``ghazi2021``, Observation 4): each label is drawn
        once, and the priors of a stage depend on the labels of earlier parts alone. It assumes that
        ``priors`` do not depend on these labels, and that training reads labels through the vault
        only. With users a stage has whole users, and all labels of one user cost epsilon as often
        as she has labels.

    Put most examples into the first stage (80 % at epsilon 1, 60 to 70 % above). With the defaults
    two stages were then never less accurate than one on MNIST and Fashion-MNIST, and up to 2 points
    more. The paper's settings, ``filter_labels=True`` and ``temperature=1.0``, lost 2 and 4 points
    on MNIST at epsilon 1.

    To resume a run after a crash, give the vault a ``store``, and keep the weights with
    ``keras.callbacks.BackupAndRestore``. Without a store, resuming raises. List this callback
    before others that change the learning rate, which a new stage resets.

    Args:
        features: array (n, ...), or dict or tuple of arrays with n rows: the model's input; a table
            (data frame, records), which becomes a matrix of its columns; a ``tf.data.Dataset`` of
            arrays or dicts, batched or not, which is read into memory; or a source of examples, as
            for ``data.poisson_batches``.
        labels: the vault with the n true labels.
        epsilon: privacy parameter of each draw, finite and above zero.
        fractions: share of the examples in each stage, with sum one. ``(1.0,)`` is LP-1ST.
        epochs_per_stage: epochs of each stage, one number or one per stage.
        batch_size: the most examples per step. Each epoch has ``ceil(n / batch_size)`` steps in
            every stage and is one pass over the stage's training set.
        temperature: scales the logits of the priors ``softmax(logits / temperature)``; one number
            or one per stage. Below one trusts the model more and makes k smaller.
        mixup_alpha: mixup with weights from Beta(alpha, alpha), one number or one per stage; zero
            for none. Needs floating-point features.
        warm_start: whether a stage continues from the weights of the previous stage, or restarts
            from the initial weights. The optimizer and its learning-rate schedule restart in each
            stage in both cases.
        reuse_labels: whether a stage also trains on the noisy labels of earlier stages.
        filter_labels: whether to drop earlier labels outside the current model's top k classes,
            where k is the rounded mean k of RRWithPrior on the new part.
        priors: public or released prior of the first stage, (K,) or (n, K), or
            ``mechanisms.Priors``; None for a uniform one.
        encoder: a fitted feature map, such as ``features.RandomFourierFeatures`` for a table with
            texts, or what ``features.PublicEncoder`` takes; the model takes its features.
        output: the name of the output that has these labels, for a model with several; compile the
            model with a loss for this output alone. The labels of ``dataset()`` are then a dict
            with this key.
        sample_weight: public weights (n,), at least zero: factors of the losses on noisy labels.
        class_weight: public weights of the noisy classes, ``{class: weight}``, 1 for others; or
            ``"balanced"``, one over K times the class's share, as the noisy labels of stage 1
            estimate it. Neither costs anything.
        key: name of the draws in the vault; letters, digits, "_", "-" and "." only. A second run
            with the same vault, key and settings trains on the same draws at no further cost.
        from_logits: whether the model returns logits; None takes it from the compiled loss.
        seed: public seed of the partition, the shuffling and mixup. The labels' random bits come
            from the vault.
        verbose: 0 for silence, 1 for a line and a progress bar at each change of stage, which
            ``model.fit(..., verbose=0)`` silences, too.

    Raises:
        TypeError: ``labels`` is not a ``PrivateLabels``.
        ValueError: an argument is out of range, or sizes differ.

    Example:
        >>> import keras, numpy as np, tf_labeldp as ldp
        >>> x, y = np.random.rand(64, 4), np.random.randint(3, size=64)
        >>> labels = ldp.PrivateLabels(y, num_classes=3, budget=ldp.PrivacyBudget(epsilon=2.0))
        >>> stages = ldp.MultiStageTraining(x, labels, epsilon=2.0, fractions=(0.6, 0.4),
        ...                                 epochs_per_stage=1, batch_size=16, verbose=0)
        >>> model = keras.Sequential([keras.layers.Dense(3)])
        >>> model.compile("adam", loss=keras.losses.CategoricalCrossentropy(from_logits=True))
        >>> history = model.fit(stages.dataset(), epochs=stages.epochs, callbacks=[stages],
        ...                     shuffle=False, verbose=0)
        >>> labels.guarantee().epsilon
        2.0

    Source: ``ghazi2021``, Algorithm 3 (LP-MST), and its enhancements of appendices B and E.
    """

    @_validate.clears_frames
    def __init__(  # noqa: PLR0913 (the paper's parameters of all stages)
        self,
        features: Public[Any],
        labels: Private[PrivateLabels],
        *,
        epsilon: float,
        fractions: Sequence[float],
        epochs_per_stage: int | Sequence[int],
        batch_size: int = 256,
        temperature: float | Sequence[float] = 0.5,
        mixup_alpha: float | Sequence[float] = 0.0,
        warm_start: bool = True,
        reuse_labels: bool = True,
        filter_labels: bool = False,
        priors: Public[Any] = None,
        encoder: Public[Any] = None,
        output: Setting[str | None] = None,
        sample_weight: Public[Any] = None,
        class_weight: Public[Any] = None,
        key: str = "lp-mst",
        from_logits: bool | None = None,
        seed: int = 0,
        verbose: int = 1,
    ) -> None:
        _check_kind(labels)
        epsilon = _validate.positive_finite("epsilon", epsilon)
        self._labels = labels
        features = public_input(features)
        encoder = fitted_encoder(encoder, features)
        public = public_input(features, encoder, sample_weight, class_weight)
        *inputs, sample_weight, class_weight = public.value
        of_weights = Receipts.of_weights(sample_weight, class_weight)
        super().__init__(Receipts.merged(public.receipts, of_weights))
        self._raw = FeatureRows(*inputs)
        self._features = features = Features(self._raw, len(labels))
        _validate.one_label_per_row(features.source.num_rows, len(labels))
        self._output = output
        self._weights = StageWeights.of(labels, sample_weight, class_weight)
        self._batch_size = batch_size
        seed = _validate.integer_at_least("seed", seed, 0)
        self._plan = StageSchedule.make(
            labels,
            fractions=fractions,
            epochs_per_stage=epochs_per_stage,
            batch_size=batch_size,
            temperature=temperature,
            mixup_alpha=mixup_alpha,
            seed=seed,
        )
        self._data = StageDataset(features, labels.num_classes, self._plan, seed + _SHUFFLE_STREAM)
        self._warm_start = warm_start
        self._reuse_labels = reuse_labels
        self._filter_labels = filter_labels
        self._draws = StageDraws.of(labels, features.source, epsilon, self._plan, priors, key)
        self._records = StageRecords(self._draws)
        self._from_logits = from_logits
        self._verbose = verbose
        self._first_epoch = True
        self._start: _Start | None = None
        self._has_begun = False
        self._reservation: Reservation | None = None

    @property
    def epochs(self) -> int:
        """Total number of epochs, for ``model.fit``."""
        return sum(self._plan.epochs)

    @property
    def steps_per_epoch(self) -> int:
        """Batches per epoch, the same in every stage."""
        return self._plan.steps_per_epoch

    @property
    def reports(self) -> tuple[StageReport, ...]:
        """A ``StageReport`` for each stage so far."""
        return tuple(report for _, report in sorted(self._records.reports.items()))

    def noisy_labels(self) -> NoisyLabels:
        """Returns the noisy labels of all stages drawn so far, with their priors.

        They all have ``RRWithPrior`` as their mechanism: the randomized response of a first stage
        is ``RRWithPrior`` under a uniform prior.
        """
        return self._draws.together()

    def guarantee(self, delta: float | None = None) -> PrivacyGuarantee:
        """Returns the guarantee of the trained model, or raises if there is none yet.

        Args:
            delta: in [0, 1); None takes the delta of the vault's budget.
        """
        if self.model is None:
            drawn = sum(self._plan.parts[stage].size for stage in self._draws.stages())
            raise RuntimeError(
                "expected a model trained with these stages among its callbacks, got none; "
                f"epsilon={self._draws.epsilon:g} was spent on the labels of {drawn} of "
                f"{len(self._labels)} examples. Call {FIT}, which uses these draws."
            )
        return guarantee(self.model, delta)

    def dataset(self) -> tf.data.Dataset:
        """Draws the first stage's labels and returns the dataset for ``model.fit``.

        The dataset has the labels of later stages only with this object among the callbacks of
        ``model.fit``; without it, iterating raises where stage 2 would begin. Under a distribution
        strategy call this method within ``strategy.scope()``, so that batches split evenly among
        the replicas.

        Returns:
            ``steps_per_epoch`` batches ``(features, one-hot noisy labels (batch, K))``; with
            weights ``(features, labels, weights (batch,))``.

        Raises:
            BudgetExceededError: the vault's budget does not allow the draws.
            ValueError: a stage has too few examples for the replicas of the current strategy.
        """
        replicas = tf.distribute.get_strategy().num_replicas_in_sync
        smallest = min(part.size for part in self._plan.parts)
        if smallest // replicas < self.steps_per_epoch:
            raise ValueError(
                f"expected {self.steps_per_epoch} batches for {replicas} replicas, got a stage of "
                f"{smallest} examples. Raise its fraction or the batch_size."
            )
        self._reservation = self._draws.reserve()
        if not self._has_begun:
            # A second dataset adds no epochs.
            self._has_begun = True
            drawn = self._draws.draw(0, self._draws.first_priors)
            self._raw.check_draw(drawn, self._plan.parts[0])
            self._records.kept[0] = np.empty(0, dtype=np.int64)
            # A single stage needs no callback: its labels serve all epochs.
            passes = math.inf if len(self._plan.parts) == 1 else self._plan.epochs[0]
            self._data.set(self._training_set(stage=0, epoch=0), passes)
        is_weighted = self._weights is not None
        return self._data.build(replicas, is_weighted=is_weighted, output=self._output)

    def set_model(self, model: keras.Model) -> None:
        """Copies the initial weights and optimizer, before other callbacks restore theirs.

        Receipts of the weights count against the vault's budget.
        """
        optimizer = model.optimizer
        with _scope(model):
            if not model.built:
                model(self._features.first)
            if not optimizer.built:
                optimizer.build(model.trainable_variables)
        self._start = _Start(_snapshot(model.variables), _snapshot(optimizer.variables))
        self._labels.adopt(Receipts.merged(public_input(model).receipts, self._trained_on))
        super().set_model(model)

    def _on_found(self) -> None:
        self._labels.adopt(public_input(self.model).receipts)

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Checks the model and the number of epochs."""
        self._first_epoch = True
        self._reservation = self._draws.reserve()
        if self.params.get("epochs") != self.epochs:
            raise ValueError(
                f"expected epochs={self.epochs}, as the stages have, got "
                f"{self.params.get('epochs')}. Pass epochs=stages.epochs."
            )
        inspected = InspectedModel(self.model)
        inspected.check_features_fit(self._features.tensors)
        self._labelled.check(self._features.first, self._labels.num_classes)
        inspected.check_missing(self._features.tensors)

    @property
    def _labelled(self) -> LabelledOutput:
        return LabelledOutput(self.model, self._output, self._from_logits)

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Enters the stage of this epoch, or resumes inside it."""
        stage = self._plan.stage_of(epoch)
        begins = epoch == self._plan.starts[stage]
        if self._first_epoch and epoch > 0:
            self._records.read(stage if begins else stage + 1)
        self._first_epoch = False
        if begins and self._steps is not None:
            self._steps.look()
            self._begin(stage)
            self._steps.accept()
        begun = [s for s in self._draws.stages() if s in self._records.reports]
        TrainedModel(self.model).attach(
            Receipts.merged(*(self._draws.draw(s, None).receipts for s in begun))
        )
        self._data.set(self._training_set(stage, epoch))
        super().on_epoch_begin(epoch)

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        """Records the final weights and their receipts.

        Warns:
            UserWarning: training ended before the last stage.
        """
        super().on_train_end()
        if self._reservation is not None:
            self._reservation.give_back()
        parts, begun = self._plan.parts, len(self._records.reports)
        if begun < len(parts):
            unused = sum(part.size for part in parts[begun:])
            warnings.warn(
                f"training ended in stage {begun} of {len(parts)}: the labels of {unused} of "
                f"{len(self._labels)} examples were neither drawn nor charged; "
                f"epsilon={self._draws.epsilon:g} was spent on each of the others. Continue with "
                "the same call of fit, and initial_epoch= the number of epochs done.",
                stacklevel=2,
            )

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Stops a run on another dataset, after its first step."""
        if self._data.served:
            return
        if keras.backend.backend() == "jax":
            # The weights set below would otherwise be overwritten.
            self.model.jax_state_sync()
        self._set_back(weights=True)
        self.model.reset_metrics()
        raise RuntimeError(
            "expected model.fit to read the noisy labels of this stage, got another dataset; the "
            "weights were set back to the initial ones. "
            f"Call {FIT} without .cache(), .repeat() or steps_per_epoch."
        )

    def _begin(self, stage: int) -> None:
        """Draws the stage's labels under the current model and restarts the optimizer."""
        part = self._plan.parts[stage]
        earlier = [self._draws.stored(s) for s in range(stage)]
        priors = self._draws.first_priors
        if stage > 0:
            self._report(f"Stage {stage + 1}: predicting priors for {part.size} examples")
            rows = self._predict([stage], self._plan.temperatures[stage])
            priors = Priors(rows, receipts=public_input(self.model).receipts)
        self._draws.draw(stage, priors)
        mean_k = float(self._labels.num_classes)
        if priors is not None:
            mechanism = RRWithPrior(self._draws.epsilon, self._labels.num_classes)
            mean_k = float(mechanism.optimal_k(priors).mean())
        kept = self._filter(earlier, max(1, round(mean_k))) if earlier else part[:0]
        pool = sum(map(len, earlier)) if self._reuse_labels else 0
        report = StageReport(stage + 1, part.size, mean_k, kept.size, pool - kept.size)
        self._records.add(stage, kept, report)
        if stage > 0:
            self._set_back(weights=not self._warm_start)
            self._report(
                f"Stage {stage + 1}: {part.size} new labels, mean k {mean_k:.2f}; "
                f"{kept.size} earlier labels kept, {report.num_dropped} dropped"
            )

    def _training_set(self, stage: int, epoch: int) -> TrainingSet:
        noisy = np.full(len(self._labels), -1, dtype=np.int64)
        for drawn in self._draws.stages():
            noisy[self._plan.parts[drawn]] = self._draws.draw(drawn, None).values
        indices = np.concatenate([self._plan.parts[stage], self._records.kept[stage]])
        weights = np.ones(indices.size, np.float32)
        if self._weights is not None:
            weights = self._weights.of_rows(indices, noisy[indices], self._draws)
        alpha = self._plan.mixup_alphas[stage]
        return TrainingSet(indices, noisy[indices], weights, alpha, epoch)

    @without_retracing_warnings()
    def _predict(self, stages: Sequence[int], temperature: float) -> np.ndarray:
        """Returns the model's probabilities ``float64`` (m, K) of the parts of some stages."""
        indices = np.concatenate([self._plan.parts[stage] for stage in stages])
        rows = tf.data.Dataset.from_tensor_slices(indices).batch(self._batch_size)
        # Keras would take a bare tuple of features for (x, y), so it is wrapped in another.
        features = rows.map(
            lambda some: (self._features.take(some),), num_parallel_calls=tf.data.AUTOTUNE
        ).prefetch(tf.data.AUTOTUNE)
        outputs = self.model.predict(features, verbose=int(self._is_verbose))
        return self._labelled.priors(outputs, temperature)

    def _filter(self, earlier: list[NoisyLabels], k: int) -> np.ndarray:
        indices = np.concatenate(self._plan.parts[: len(earlier)])
        if not self._reuse_labels:
            return indices[:0]
        if not self._filter_labels or k >= self._labels.num_classes:
            return indices
        noisy = np.concatenate([labels.values for labels in earlier])
        self._report(f"Filtering {indices.size} earlier labels by the model's top {k}")
        likely = top_k_members(self._predict(range(len(earlier)), 1.0), k)
        return indices[likely[np.arange(noisy.size), noisy]]

    def _set_back(self, *, weights: bool) -> None:
        """Sets the optimizer, and with ``weights`` the model, to their initial state."""
        start: Any = self._start
        with _scope(self.model):
            for variable, value in [*(start.weights if weights else []), *start.optimizer]:
                variable.assign(value)

    @property
    def _is_verbose(self) -> bool:
        return bool(self._verbose) and self.params.get("verbose") != 0

    def _report(self, text: str) -> None:
        if self._is_verbose:
            print(f"\n{text}", flush=True)


def _scope(model: keras.Model) -> contextlib.AbstractContextManager[Any]:
    """Returns the scope of the model's distribution strategy, which only TensorFlow has."""
    if keras.backend.backend() != "tensorflow":
        return contextlib.nullcontext()
    return model.distribute_strategy.scope()


def _snapshot(variables: Sequence[Any]) -> list[tuple[Any, np.ndarray]]:
    return [(value, np.array(keras.ops.convert_to_numpy(value))) for value in variables]


def _check_kind(labels: Any) -> None:
    if not isinstance(labels, PrivateLabels):
        raise TypeError(f"labels must be a PrivateLabels, got {type(labels).__name__}.")
    if isinstance(labels.kind, Numbers):
        raise ValueError(
            "expected labels of classes, got numbers. Fit any model on the noisy numbers of "
            "labels.randomize(tf_labeldp.LabelRandomizer(...))."
        )
