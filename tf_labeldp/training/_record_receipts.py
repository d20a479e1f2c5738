"""Plain Keras training on noisy labels, which records their receipts in the model."""

from __future__ import annotations

from typing import Any

import dp_accounting
import keras
import numpy as np
import tensorflow as tf

from tf_labeldp import _checks, _validate
from tf_labeldp._columns import Column
from tf_labeldp._progress import without_retracing_warnings
from tf_labeldp.accounting import (
    Assumption,
    Charge,
    Public,
    PublicInput,
    Receipt,
    Receipts,
    public_input,
)
from tf_labeldp.features.public_encoder import fitted_encoder
from tf_labeldp.features.reader import FeatureRows
from tf_labeldp.gradients.keras_loss import KerasLoss
from tf_labeldp.gradients.model_checks import InspectedModel
from tf_labeldp.mechanisms import RegressionMechanism
from tf_labeldp.vault import Classes, NoisyLabels
from tf_labeldp.vault.counted_steps import CountedSteps
from tf_labeldp.vault.label_kinds import class_table

_TARGETS = ("posterior", "values", "debiased")
_BY_HAND = Assumption(
    "labels-of-this-draw", "trainer", "The labels of this fit are those of this draw."
)


class CountedTraining(keras.callbacks.Callback):
    """Attaches receipts to the model in training, and records its steps and weights."""

    def __init__(self, receipts: tuple[Receipt, ...], is_alone: bool = False) -> None:
        super().__init__()
        self._is_alone = is_alone
        self._trained_on = receipts
        self._steps: CountedSteps | None = None

    def set_model(self, model: keras.Model) -> None:
        """Attaches the receipts, before another callback restores the weights."""
        super().set_model(model)
        self._steps = CountedSteps(model, self._trained_on, self._on_found)
        if self._is_alone:
            self._steps.trust()

    def _on_found(self) -> None:
        """Counts receipts of weights that another callback set, where a budget counts them."""

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Counts the next step, of which an interrupted training may be the last."""
        if self._steps is not None:
            self._steps.expect()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Records the weights, which another callback may save."""
        if self._steps is not None:
            self._steps.end_epoch()

    def on_train_end(self, logs: Any = None) -> None:
        self.end()

    def end(self) -> None:
        """Records the final weights, once; also those of an interrupted training."""
        steps, self._steps = self._steps, None
        if steps is not None:
            steps.end()


class RecordReceipts(CountedTraining):
    """Attaches the receipts of noisy labels to the Keras model that ``model.fit`` trains on them.

    Use it with data sets and hand-made targets; ``tf_labeldp.fit`` makes targets for you.

    Guarantee:
        After the training ``guarantee(model)`` composes the receipts of the noisy labels with the
        earlier receipts of the model. It assumes that the labels of this fit are those of this
        draw: a data set, shuffled, batched, zipped or cached, does not record the origin of its
        labels. ``model.fit`` without the callback, on a model with receipts, ends in a statement
        that promises nothing.

        The receipts cover the steps of this fit and the weights that they leave, also of a fit that
        was interrupted. Weights of another counted training, which a callback sets, loads or
        restores between two steps, bring their receipts. Any other weights, steps that a callback
        takes, and layers that another model trains meanwhile void the promise.

    Args:
        noisy: the ``NoisyLabels`` behind the targets, one for each output; or another source with
            receipts, such as a head that predicted them.

    Raises:
        ValueError: no receipts.

    Example:
        >>> import tf_labeldp as ldp
        >>> x = np.zeros((60, 4), np.float32)
        >>> labels = ldp.PrivateLabels(np.arange(60) % 3, 3, budget=ldp.PrivacyBudget(2.0))
        >>> noisy = labels.randomize(ldp.RandomizedResponse(2.0, 3))
        >>> model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3)])
        >>> model.compile("sgd", keras.losses.CategoricalCrossentropy(from_logits=True))
        >>> data = noisy.to_dataset(x, "posterior").shuffle(60).batch(20)
        >>> history = model.fit(data, callbacks=[RecordReceipts(noisy)], verbose=0)
        >>> ldp.guarantee(model).epsilon
        2.0
    """

    def __init__(self, *noisy: Public[Any]) -> None:
        receipts = PublicInput.sources_of(noisy)
        free = Charge(0.0, 0.0, dp_accounting.NoOpDpEvent(), (_BY_HAND,))
        by_hand = Receipt(receipts[-1].labels, free, "hand-made targets", "declared")
        super().__init__(Receipts.merged(receipts, [by_hand]))


def fit(
    model: Public[keras.Model],
    x: Public[Any],
    noisy: Public[NoisyLabels],
    *,
    targets: str = "posterior",
    encoder: Public[Any] = None,
    **settings: Public[Any],
) -> keras.callbacks.History:
    """Trains a Keras model on noisy labels, and attaches their receipts to it.

    Guarantee:
        Training post-processes the noisy labels and spends no budget. ``guarantee(model)``
        composes their receipts with those of the model and ``x``, and of weights that callbacks
        set; see ``RecordReceipts``. ``model.save`` writes the receipts: ``load_model(path)`` and
        ``guarantee(path)`` read them, and Keras loads the file without this library.

    Args:
        model: a compiled model. For classes, ``targets="posterior"`` and ``"debiased"`` are rows
            (m, K), for ``keras.losses.CategoricalCrossentropy`` and
            ``keras_layers.LabelWeightedLoss``; ``"values"`` are class codes (m,), for
            ``SparseCategoricalCrossentropy`` and ``keras_layers.ForwardCorrectedLoss``.
        x: an array, a dict or tuple of arrays, or a table, with a row per example of the vault; or,
            for noisy labels of a subset, a row per entry of ``noisy.indices``, in their order.
        noisy: the result of ``PrivateLabels.randomize``.
        targets: ``"posterior"``, ``"values"`` or ``"debiased"``; see ``NoisyLabels.to_dataset``.
        encoder: a fitted feature map, such as ``RandomFourierFeatures``, or what
            ``features.PublicEncoder`` takes; the model takes its features of ``x``. Without it a
            table becomes a matrix of its columns, or for a model with several inputs
            ``features.to_inputs(x, model)``.
        settings: all other arguments of ``keras.Model.fit``; ``sample_weight`` has as many rows as
            ``x``. The inputs of ``validation_data`` are like ``x``; its labels are targets, or the
            names of classes. ``class_weight`` is ``{class: weight}``, 1 for others, by class value;
            if no class value is a number, by code too. With ``"posterior"`` and ``"debiased"`` the
            expected loss is that of weighted true labels; ``"values"`` have the weight of the
            noisy class.

    Returns:
        The ``keras.callbacks.History``.

    Raises:
        TypeError: ``noisy`` is no ``NoisyLabels``, ``model`` no Keras model, or ``x`` a data set.
        ValueError: ``x`` of another length, or with NaN or infinity that the model does not
            replace; targets that the loss can't take, or that it corrects a second time; a
            ``ForwardCorrectedLoss`` for another channel; a loss of probabilities on logits, or the
            reverse; no labels, or no receipts.

    Warns:
        UserWarning: ``"debiased"`` targets, which are signed, for a cross-entropy.

    Example:
        >>> import tf_labeldp as ldp
        >>> x = np.zeros((60, 4), np.float32)
        >>> labels = ldp.PrivateLabels(np.arange(60) % 3, 3, budget=ldp.PrivacyBudget(2.0))
        >>> noisy = labels.randomize(ldp.RandomizedResponse(2.0, 3))
        >>> model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3)])
        >>> model.compile("sgd", keras.losses.CategoricalCrossentropy(from_logits=True))
        >>> history = fit(model, x, noisy, epochs=2, verbose=0)
        >>> ldp.guarantee(model).epsilon
        2.0
    """
    _validate.one_of("targets", targets, _TARGETS)
    wrapped = [v for v in (model, *settings.values()) if isinstance(v, PublicInput)]
    weights = settings.pop("sample_weight", None)
    # The callback reads the receipts of the model when the training begins.
    public = public_input(x, noisy, weights, *wrapped)
    x, labels, weights, *_ = public.value
    model, settings = (
        PublicInput.bare(model),
        {name: PublicInput.bare(value) for name, value in settings.items()},
    )
    _check_types(model, x, labels)
    public = public_input(public, fitted_encoder(encoder, x))
    encoder = public.value[1]
    raw = FeatureRows(x, encoder)
    x = raw.network_arrays(model)
    inspected = InspectedModel(model)
    inspected.check_features_fit(x)
    _checks.run("labels", len(labels))
    y = labels.targets(targets)
    _check_loss(model, targets, x, y)
    _loss_of(model).check_targets(targets, labels)
    if targets == "values" and labels.are_sets and _loss_of(model).takes_codes:
        raise ValueError(
            f"expected noisy labels that are classes, for targets='values', got those of "
            f"{type(labels.mechanism).__name__}. Give targets='posterior', or the loss "
            "ForwardCorrectedLoss."
        )
    weights = Column.weights(weights, None, np.float32)
    leaves = keras.tree.flatten(x if weights is None else [x, weights])
    rows = labels.rows_among({np.shape(leaf)[:1] for leaf in leaves})

    raw.check_columns()
    raw.check_draw(labels, rows)
    x = keras.tree.map_structure(lambda part: _as_taken(part[rows]), x)
    inspected.check_missing(x)
    if weights is not None:
        settings["sample_weight"] = weights[rows]
    if (class_weight := settings.pop("class_weight", None)) is not None:
        y, of_classes = _weighted(labels, targets, y, class_weight)
        settings["sample_weight"] = of_classes * settings.get("sample_weight", 1.0)
    callbacks = _validate.callbacks_of(settings.pop("callbacks", None))
    if (validation := settings.get("validation_data")) is not None:
        settings["validation_data"] = _validation_data(validation, model, labels, y.ndim, encoder)
    recorder = CountedTraining(public.receipts, is_alone=not callbacks)
    y = y.astype(np.float32) if y.dtype == np.float64 else y
    try:
        with without_retracing_warnings():
            history = model.fit(x, y, callbacks=[*callbacks, recorder], **settings)
    finally:
        recorder.end()
    _check_numbers(model, x, labels)
    return history


def _check_numbers(model: keras.Model, x: Any, labels: NoisyLabels) -> None:
    """Warns of columns from which alone the trained model predicts nearly all numbers."""
    are_numbers = isinstance(labels.mechanism, RegressionMechanism) and labels.values.ndim == 1
    is_one = isinstance(x, np.ndarray) and InspectedModel(model).output_shape == (None, 1)
    if are_numbers and is_one:
        ends = labels.kind.label_range
        FeatureRows(x).check_model(lambda rows: np.ravel(model(rows, training=False)), ends)


def _as_taken(part: np.ndarray) -> Any:
    """Returns an array as Keras takes it: texts as tensors alone."""
    return part if part.dtype.kind in "biufc" else keras.ops.convert_to_tensor(part)


def _validation_data(
    data: Any, model: Any, labels: NoisyLabels, num_axes: int, encoder: Any
) -> Any:
    """Returns public validation data as the model and its loss take them; a data set unchanged."""
    if not isinstance(data, (tuple, list)) or len(data) < 2:
        return data
    x, y, *weights = data
    x = keras.tree.map_structure(_as_taken, FeatureRows(x, encoder).network_arrays(model))
    if not isinstance(y, dict) and (codes := labels.kind.codes_of_names(y)) is not None:
        y = codes
        if num_axes == 2:
            y = keras.utils.to_categorical(codes, labels.kind.num_classes)
    return (x, y, *weights)


def _check_types(model: Any, x: Any, labels: Any) -> None:
    if not isinstance(labels, NoisyLabels):
        raise TypeError(
            f"expected the NoisyLabels of one draw, got {type(labels).__name__}. Draw them with "
            "labels.randomize(mechanism) of a PrivateLabels; for several outputs, call "
            "model.fit(..., callbacks=[RecordReceipts(first, second)])."
        )
    if not isinstance(model, keras.Model):
        raise TypeError(
            f"expected a compiled keras.Model, got {type(model).__name__}. Give the model first: "
            "fit(model, x, noisy)."
        )
    PublicInput.sources_of([labels])
    if isinstance(x, tf.data.Dataset):
        raise TypeError(
            "expected x as arrays, got a data set. Give it to model.fit, with "
            "callbacks=[RecordReceipts(noisy)]."
        )


def _weighted(
    labels: NoisyLabels, targets: str, y: np.ndarray, class_weight: Any
) -> tuple[np.ndarray, np.ndarray]:
    """Returns targets and example weights with the expected loss of weighted true labels.

    Of a posterior p and class weights w, the expected loss of the true label, times its weight, is
    ``s`` times the loss of the targets ``p w / s``, with ``s = sum(p w)``: exactly for losses that
    are linear in their targets, and up to a constant for squared errors. Debiased rows are linear
    weights themselves. Noisy classes have the weight of the noisy class.
    """
    kind = labels.kind
    if not isinstance(kind, Classes) or (targets == "values" and labels.are_sets):
        raise ValueError(
            f"expected targets of classes for class_weight, got targets={targets!r} of "
            f"{type(labels.mechanism).__name__}. Give sample_weight, or targets='posterior'."
        )
    table = class_table(class_weight, kind.classes)
    if y.ndim == 1:
        return y, table[y]
    weighted = y * table
    if targets == "debiased":
        return weighted, np.ones(len(y))
    sums = weighted.sum(axis=1, keepdims=True)
    # Targets without a weight stay distributions.
    return np.divide(weighted, sums, out=np.array(y, np.float64), where=sums > 0), sums[:, 0]


def _loss_of(model: keras.Model) -> KerasLoss:
    """Returns the loss, also where it is alone in a list or a dict of losses by output."""
    losses = keras.tree.flatten(model.loss)
    return KerasLoss(losses[0] if len(losses) == 1 else model.loss)


def _check_loss(model: keras.Model, targets: str, x: Any, y: np.ndarray) -> None:
    if model.loss is None:
        raise ValueError("expected a compiled model, got one without a loss. Call model.compile.")
    loss = _loss_of(model)
    outputs, expected, other = InspectedModel(model).output_shape, "", "values"
    if outputs is None and isinstance(model, keras.Sequential):  # is built by the first batch
        outputs = model.compute_output_shape(keras.tree.map_structure(np.shape, x))
    if y.ndim == 1 and loss.takes_rows:
        expected, other = "a loss of class codes, SparseCategoricalCrossentropy", "posterior"
    elif y.ndim == 2 and loss.takes_codes:
        expected = "a loss of rows, CategoricalCrossentropy"
    elif y.ndim == 2 and isinstance(outputs, tuple) and outputs[-1] != y.shape[1]:
        expected = f"a model with {y.shape[1]} outputs, one unit per class"
    if expected:
        raise ValueError(
            f"expected {expected}, for targets={targets!r}, got loss {loss.name!r} and outputs "
            f"of shape {outputs}. Change the model, or give targets={other!r}."
        )
    symbolic = list(InspectedModel(model).outputs.values())
    if len(symbolic) == 1:
        loss.check_output(symbolic[0])
