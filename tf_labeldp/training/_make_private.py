"""``make_private``: a Keras model, its batches and callbacks for DP-SGD at an epsilon."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from tf_labeldp import _validate
from tf_labeldp.accounting import (
    Private,
    Public,
    PublicInput,
    Receipts,
    Setting,
    calibrate_noise_multiplier,
    public_input,
)
from tf_labeldp.data import poisson_batches
from tf_labeldp.data.batches import OutputLabels, PoissonBatches
from tf_labeldp.features.public_encoder import fitted_encoder
from tf_labeldp.features.reader import FeatureRows
from tf_labeldp.gradients.keras_loss import KerasLoss
from tf_labeldp.gradients.model_checks import InspectedModel
from tf_labeldp.training._label_dp_model import LabelDPModel, PrivacySpent
from tf_labeldp.training._label_dp_optimizer import LabelDPOptimizer
from tf_labeldp.training._preconditioner import GaussNewton
from tf_labeldp.vault import Numbers, PrivateLabels, Rows

_RATE = 8.0
"""Learning rate per root of epsilon: chosen on MNIST, confirmed on Fashion-MNIST."""
_LARGEST_RATE = 8.0
"""Largest learning rate, reached at epsilon 1."""
_PLAIN_RATE = 0.01
"""Learning rate of Adam, for gradients that are not whitened."""


@_validate.clears_frames
def make_private(  # noqa: PLR0913 (a model, its batches and its budget in one call)
    model: Public[keras.Model],
    *,
    epsilon: float,
    x: Public[Any],
    labels: Private[Any],
    epochs: int,
    batch_size: int,
    delta: float | None = None,
    encoder: Public[Any] = None,
    columns: Setting[Any] = None,
    sample_weight: Public[Any] = None,
    class_weight: Public[Any] = None,
    insecure_seed: int | None = None,
) -> tuple[LabelDPModel, PoissonBatches, list[keras.callbacks.Callback]]:
    """Returns a private model, batches and callbacks for ``fit``, to train by DP-SGD at an epsilon.

    The noise is calibrated so that ``epochs`` epochs cost epsilon. The loss is that of the compiled
    model; an uncompiled one gets cross-entropy for classes, the squared error for numbers. A model
    with one output per class is trained with ``preconditioner="gauss_newton"`` by SGD with a rate
    of 8 sqrt(epsilon), at most 8, that falls to zero, others by Adam; the clip is 1: the best in
    our measurements. ``BatchNormalization``, which mixes examples, is replaced by
    ``GroupNormalization`` in a copy of the model, with a warning. It stays where it is frozen
    (``layer.trainable = False``), as it should be in a pretrained model; inside another model it
    has to be.

    What ``fit`` would refuse is refused at once: labels or features that do not fit the model, a
    loss for other labels, layers that mix examples, a budget that is too small.

    Guarantee:
        (epsilon, delta)-label-DP under replacement of one label, after ``epochs`` epochs; of all
        labels of one example, for a model with several outputs. ``private.guarantee()`` states the
        cost, with the assumptions of ``LabelDPModel``. Nothing is charged before ``fit``, which
        warns of epochs beyond the planned ones before it takes the first.

    Args:
        model: functional or sequential, and built. The private model shares its layers, so training
            trains ``model`` too (except where layers were replaced: use
            ``keras.Model(private.input, private.output)``).
        epsilon: finite and above zero.
        x: public features of all examples, as for ``data.poisson_batches``. For a model with
            several inputs a table becomes ``features.to_inputs(x, model)``.
        labels: a ``PrivateLabels``, which is charged per epoch; for several outputs a dict of them,
            as for ``data.poisson_batches``, all charged.
        epochs: number of epochs, with about n / batch_size steps each.
        batch_size: expected number of examples per batch.
        delta: in (0, 1); None takes the delta of the vault's budget.
        encoder: a fitted feature map, such as ``RandomFourierFeatures`` for a table with texts, or
            what ``features.PublicEncoder`` takes; the model takes its features of ``x``.
        columns, sample_weight, class_weight: as for ``data.poisson_batches``.
        insecure_seed: makes noise and batches repeatable, and the statement "not private: seeded".

    Returns:
        The compiled model, the batches and the callbacks.

    Raises:
        BudgetExceededError: the budget does not allow all the epochs; nothing was charged.
        TypeError: not a Keras model, or labels that are no ``PrivateLabels``.
        ValueError: an argument out of range, layers that mix examples, or labels, features, weights
            or a loss that do not fit the model.
        RuntimeError: Keras runs on another backend than TensorFlow.

    Example:
        >>> import numpy as np
        >>> from tf_labeldp import PrivacyBudget, PrivateLabels
        >>> x = np.random.default_rng(0).normal(size=(500, 4)).astype("float32")
        >>> budget = PrivacyBudget(2.0, 1e-4)
        >>> labels = PrivateLabels(x[:, 0] > 0, 2, budget=budget)
        >>> plain = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
        >>> private, batches, callbacks = make_private(
        ...     plain, epsilon=2.0, x=x, labels=labels, epochs=2, batch_size=100
        ... )
        >>> history = private.fit(batches, epochs=2, callbacks=callbacks, verbose=0)
        >>> 1.9 < private.guarantee().epsilon <= 2.0
        True
    """
    _validate.keras_on_tensorflow("make_private")
    by_output = OutputLabels.by_output(labels, columns)
    vaults = OutputLabels.vaults_of(by_output)
    if not vaults:
        raise TypeError(
            f"labels must be a PrivateLabels, got {type(labels).__name__}. Make one with a budget: "
            "PrivateLabels(y, num_classes=10, budget=PrivacyBudget(1.0, delta=1e-5))."
        )
    recipe = _Recipe.of(vaults, epsilon, delta, epochs, batch_size)
    inputs = public_input(x)
    inputs = public_input(inputs, fitted_encoder(encoder, inputs))
    rows, encoder = inputs.value
    batches = poisson_batches(
        inputs.with_value(FeatureRows(rows, encoder).network_inputs(PublicInput.bare(model))),
        labels,
        sampling_probability=recipe.sampling_probability,
        steps=recipe.steps_per_epoch,
        columns=columns,
        sample_weight=sample_weight,
        class_weight=class_weight,
        insecure_seed=insecure_seed,
    )
    public = public_input(model)
    model = public.value
    normalized: Any = public.with_value(InspectedModel(model).without_mixing_layers())
    private = LabelDPModel.from_model(normalized)
    compiled = _Compiled.of(model).fitted_to(private, by_output)
    is_single = isinstance(by_output, OutputLabels) and len(private.outputs) == 1
    whitened = is_single and private.outputs[0].shape[-1] == vaults[0].kind.num_classes
    optimizer = recipe.optimizer(whitened, insecure_seed)
    private.compile(optimizer, **compiled._asdict())
    # A training that goes on after a kill has a part of its plan left.
    made_of = Receipts.merged(public.receipts, batches.receipts)
    private._spending.plan_epochs(private._planned(batches, None, {}), recipe.epochs, made_of)
    private._spending.planned = (recipe.epochs, recipe.epsilon)
    return private, batches, [PrivacySpent()]


@dataclasses.dataclass(frozen=True)
class _Recipe:
    """The sampling, the noise and the optimizer of a training that costs (epsilon, delta)."""

    epsilon: float
    delta: float
    size: int  # number of labels
    epochs: int
    batch_size: int

    @classmethod
    def of(
        cls,
        vaults: tuple[PrivateLabels, ...],
        epsilon: float,
        delta: float | None,
        epochs: int,
        batch_size: int,
    ) -> _Recipe:
        size = len(vaults[0])
        epsilon = _validate.positive_finite("epsilon", epsilon)
        epochs = _validate.integer_at_least("epochs", epochs, 1)
        batch_size = _validate.integer_at_least("batch_size", batch_size, 2)
        if batch_size > size:
            raise ValueError(f"batch_size must be at most {size} labels, got {batch_size}.")
        of_budget = min(vault.budget.delta for vault in vaults)
        delta = of_budget if delta is None else delta
        if 0.0 < of_budget < delta:
            _validate.warn(
                f"delta={delta:g} is above that of the budget, {of_budget:g}, at which this "
                f"training costs more than epsilon={epsilon:g}. Use delta={of_budget:g}."
            )
        if not delta:
            raise ValueError(
                "expected a budget with delta above zero, got 0. Make the vault with "
                "PrivacyBudget(epsilon, delta=...), below 1/n for n labels."
            )
        return cls(epsilon, delta, size, epochs, batch_size)

    @property
    def sampling_probability(self) -> float:
        return self.batch_size / self.size

    @property
    def steps_per_epoch(self) -> int:
        return math.ceil(self.size / self.batch_size)

    def optimizer(self, whitened: bool, insecure_seed: int | None) -> LabelDPOptimizer:
        steps = self.epochs * self.steps_per_epoch
        noise = calibrate_noise_multiplier(
            self.epsilon, self.delta, sampling_probability=self.sampling_probability, steps=steps
        )
        inner: Any = keras.optimizers.Adam(_PLAIN_RATE)
        if whitened:
            rate = min(_RATE * math.sqrt(self.epsilon), _LARGEST_RATE)
            decay = keras.optimizers.schedules.PolynomialDecay(rate, steps, 0.0)
            inner = keras.optimizers.SGD(decay)
        return LabelDPOptimizer(
            inner,
            1.0,
            noise,
            preconditioner=GaussNewton(min(256, self.size)) if whitened else None,
            insecure_seed=insecure_seed,
        )


class _Compiled(NamedTuple):
    """The losses, their weights and the metrics of a model: one each, or a dict by output."""

    loss: Any
    loss_weights: Any = None
    metrics: Any = None

    @classmethod
    def of(cls, model: keras.Model) -> _Compiled:
        """Returns what a model was compiled with, except for its metrics."""
        if not model.compiled or model.loss is None:
            return cls(None)
        return cls(model.loss, model.get_compile_config().get("loss_weights"))

    def fitted_to(self, private: LabelDPModel, labels: Any) -> _Compiled:
        """Returns the losses for labels, which are usual ones where none was compiled."""
        inspected = InspectedModel(private)
        outputs = inspected.outputs
        if len(outputs) == 1:
            [(name, output)] = outputs.items()
            [labels] = tf.nest.flatten(labels) if isinstance(labels, (dict, tuple)) else [labels]
            is_by_name = isinstance(self.loss, dict) and name in self.loss
            loss = _loss_of(self.loss[name] if is_by_name else self.loss, output, labels)
            return _Compiled(loss, self.loss_weights, _metrics_of(labels))
        if callable(self.loss) and not isinstance(self.loss, keras.losses.Loss):
            return self
        parts = _labels_by_output(labels, list(outputs))
        found = inspected.by_output(self.loss, "loss")
        losses = {name: _loss_of(found.get(name), outputs[name], parts[name]) for name in parts}
        loss_weights = self.loss_weights
        if loss_weights is not None:
            weights = inspected.by_output(loss_weights, "weight")
            loss_weights = {name: weights.get(name, 1.0) for name in parts}
        metrics = {name: _metrics_of(parts[name]) for name in parts}
        kept = {name: kind for name, kind in metrics.items() if kind}
        return _Compiled(losses, loss_weights, kept)


def _labels_by_output(labels: Any, outputs: list[str]) -> dict[str, OutputLabels]:
    if not isinstance(labels, (dict, tuple)):
        raise ValueError(
            f"expected labels for the outputs {outputs}, got those of one. Give a dict of "
            "vaults by output, or columns= for a vault of rows."
        )
    if isinstance(labels, tuple):
        return dict(zip(outputs[: len(labels)], labels, strict=True))
    unknown = [name for name in labels if name not in outputs]
    if unknown:
        raise ValueError(
            f"expected labels for the outputs {outputs}, got labels for {unknown}. Name the "
            "outputs as the model does."
        )
    return labels


def _metrics_of(labels: OutputLabels) -> list[str] | None:
    return None if labels.kind is None or isinstance(labels.kind, Numbers) else ["accuracy"]


def _loss_of(loss: Any, output: Any, labels: OutputLabels) -> Any:
    """Returns the loss of an output: the compiled one, made for class codes, or the usual one."""
    kind = labels.kind
    if loss is not None:
        found = KerasLoss(loss)
        if not found.takes_rows or isinstance(kind, Rows):
            return loss
        # A vault has class codes.
        return keras.losses.SparseCategoricalCrossentropy(found.from_logits)
    if isinstance(kind, Numbers):
        return keras.losses.MeanSquaredError()
    last = output._keras_history.operation
    is_logits = getattr(last, "activation", None) is keras.activations.linear
    if isinstance(kind, Rows) or output.shape[-1] == 1:
        return keras.losses.BinaryCrossentropy(from_logits=is_logits)
    return keras.losses.SparseCategoricalCrossentropy(from_logits=is_logits)
