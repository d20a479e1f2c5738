"""The model with a private ``fit``, and the callback that prints its epsilon."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

import keras
import numpy as np
import tensorflow as tf

from tf_labeldp import _validate
from tf_labeldp._progress import without_retracing_warnings
from tf_labeldp.accounting import PrivacyGuarantee, Private, Public, public_input
from tf_labeldp.accounting.provenance import OptimizerSteps
from tf_labeldp.data.batches import PoissonBatches
from tf_labeldp.features.reader import FeatureRows
from tf_labeldp.gradients.label_distance import LabelDistanceClip
from tf_labeldp.gradients.model_checks import InspectedModel
from tf_labeldp.gradients.output_losses import OutputLosses
from tf_labeldp.keras_layers._released_dense import CarriesReceipts
from tf_labeldp.training._configured import Configured
from tf_labeldp.training._denoisers import NoOp
from tf_labeldp.training._gaussian_noise import GaussianNoise
from tf_labeldp.training._label_dp_optimizer import LabelDPOptimizer
from tf_labeldp.training._private_step import PrivateStep, StepGuard
from tf_labeldp.training._spending import ChecksEpochs, Spending
from tf_labeldp.training._training_plan import PoissonPlan, TrainingPlan, codes_by_output
from tf_labeldp.vault import PrivateLabels, declare
from tf_labeldp.vault.model_history import TrainedModel

_HARMLESS = (
    tf.errors.ResourceExhaustedError,
    tf.errors.CancelledError,
    tf.errors.AbortedError,
    tf.errors.UnavailableError,
    tf.errors.DeadlineExceededError,
)
"""Errors whose texts depend on no value."""


@keras.saving.register_keras_serializable(package="tf_labeldp")
class LabelDPModel(CarriesReceipts, keras.Model):
    """A Keras model whose ``fit`` is private: DP-SGD under label DP.

    Use it like any functional model: compile it with a ``LabelDPOptimizer`` and a loss per example,
    and fit it on ``data.poisson_batches``. ``LabelDPModel.from_model`` converts an existing model
    and shares its layers.

    Each step clips every example's gradient to ``l2_norm_clip``, adds noise to their sum once (also
    with several replicas), divides by the expected batch size, denoises, and passes the result to
    the inner optimizer (``ghazi2024``, Algorithm 1).

    Guarantee:
        ``guarantee()`` states the cost of everything that entered the weights, under replacement of
        one label: steps of this model and of others that share its layers, the noisy labels and
        heads behind the weights, and weights from files or other models of this process. The
        receipts travel with the weights through ``.keras``, ``.weights.h5`` and
        ``tf.train.Checkpoint``. Weights that were trained in the clear in this process, and unknown
        ones that a callback sets between two steps, void the promise until ``declare`` states their
        history.

        With several outputs the unit is all labels of one example, and one clip bounds the gradient
        of the weighted sum of its losses. Each vault of these labels is charged; a statement counts
        their common steps once, and assumes that row i of each vault is the same example.

        Entries of an output that its mask leaves out (``Embedding(mask_zero=True)``, ``Masking``)
        are left out of losses, as in Keras: their labels change nothing.

        The vault is charged before the first step of each epoch, and ``fit`` alone takes steps: a
        step without a charge stops before its noise is drawn.

        Loss and metrics on the training labels are withheld, since they are not private: the log
        shows the norm of the noisy gradient and the report of the denoiser. Validation labels are
        assumed public, and their metrics are reported. With ``model.report_training_metrics =
        True`` the log shows all, and the statement records it.

        Texts of TensorFlow's errors are withheld, since they may quote labels.

    Args:
        inputs, outputs, name: as for ``keras.Model``.

    Raises:
        ValueError: on ``compile``: layers that mix examples, a loss that is not per example, or
            nothing to train; on ``fit``: a layer that XLA can't compile, with ``jit_compile=True``.
        TypeError: on ``compile``: another optimizer than ``LabelDPOptimizer``.
        BudgetExceededError: on ``fit``: the vault's budget does not allow the epochs.
        FloatingPointError: on ``fit``: the model's output or the noisy gradient is not finite; that
            step does not change the weights.
        RuntimeError: on ``fit``: not compiled, or an error of TensorFlow whose text is withheld; on
            ``train_on_batch``, and on ``train_step`` outside of ``fit``; another Keras backend.

    Example:
        >>> import keras, numpy as np
        >>> from tf_labeldp import PrivacyBudget, PrivateLabels
        >>> from tf_labeldp.data import poisson_batches
        >>> from tf_labeldp.training import LabelDPModel, LabelDPOptimizer
        >>> labels = PrivateLabels([0, 1] * 50, num_classes=2, budget=PrivacyBudget(2.0, 1e-3))
        >>> inputs = keras.Input((3,))
        >>> model = LabelDPModel(inputs, keras.layers.Dense(2)(inputs))
        >>> model.compile(
        ...     LabelDPOptimizer(keras.optimizers.SGD(0.5), 1.0, noise_multiplier=5.0),
        ...     loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        ... )
        >>> x = np.zeros((100, 3), np.float32)
        >>> batches = poisson_batches(x, labels, sampling_probability=0.1, steps=2)
        >>> history = model.fit(batches, epochs=1, verbose=0)
        >>> 0 < model.guarantee().epsilon < 2
        True
    """

    train_function: Any
    _batch_spec: Any = None
    _traced_with: Any = None
    _spending: Any = None
    _report_training_metrics = False
    _withholding = False

    @classmethod
    def from_model(cls, model: Public[keras.Model], inputs: Public[Any] = None) -> LabelDPModel:
        """Returns a private model that shares the layers and weights of ``model``.

        So ``fit`` trains ``model`` too. ``keras.Model(private.input, private.output)`` is a plain
        model with the same layers, and takes the same inputs, such as a dict; Keras's ``inputs``
        is their flat list. ``tf_labeldp.guarantee`` is the same for all three.

        Args:
            model: functional or sequential, and built; any other needs ``inputs``.
            inputs: ``keras.Input`` tensors, for a model that is not functional.

        Raises:
            TypeError: not a Keras model.
            ValueError: the inputs of the model are unknown.
        """
        public = public_input(model, inputs)
        model, inputs = public.value
        if not isinstance(model, keras.Model):
            raise TypeError(f"model must be a keras.Model, got {type(model).__name__}.")
        private = cls(*_ends_of(model, inputs), name=model.name)
        TrainedModel(private).attach(public.receipts)
        # Steps recorded in a file have receipts, too.
        if all(receipt.kind != "unknown" for receipt in public.receipts):
            OptimizerSteps.of(model).cover()
        return private

    # Keras recognises functional models by the names args and kwargs.
    def __init__(self, *args: Public[Any], **kwargs: Public[Any]) -> None:
        _validate.keras_on_tensorflow("LabelDPModel")
        super().__init__(*args, **kwargs)

    def written_receipts(self) -> bytes:
        """Returns the receipts as the bytes of a file."""
        return TrainedModel(self).written_receipts()

    def read_receipts(self, content: bytes, *, of_checkpoint: bool = False) -> None:
        """Adds the receipts of a file to those of the model."""
        TrainedModel(self).read_receipts(content)

    def declare(
        self,
        because: str,
        *,
        epsilon: float = 0.0,
        delta: float = 0.0,
        made_of: Public[Iterable[Any]] = (),
    ) -> PrivacyGuarantee:
        """Declares the history of the weights; see ``tf_labeldp.declare``."""
        return declare(self, because, epsilon=epsilon, delta=delta, made_of=made_of)

    @property
    def report_training_metrics(self) -> bool:
        """Whether to show loss and metrics on the true training labels, which is not private."""
        return self._report_training_metrics

    @report_training_metrics.setter
    def report_training_metrics(self, value: bool) -> None:
        if self._is_training():
            raise RuntimeError("report_training_metrics can't be changed while fit is under way.")
        self._report_training_metrics = bool(value)

    def compile(self, optimizer: Any = None, loss: Any = None, **settings: Any) -> None:
        """Compiles the model; see ``keras.Model.compile``.

        Args:
            optimizer: a ``LabelDPOptimizer``.
            loss: a Keras loss, its name, or a callable (y_true, y_pred) -> (batch,). For several
                outputs, a dict or list of losses: their sum, weighted by ``loss_weights``, is the
                loss of an example, and its gradient is clipped once. A Keras loss alone is that of
                each output; a callable of your own takes all labels and outputs.
            settings: all other arguments of ``keras.Model.compile``. ``jit_compile=True`` (off by
                default) compiles a step into one XLA program that draws its noise: a
                ``GaussianNoise`` of the optimizer becomes one of ``source="device"``, with a
                warning. Use it with a Keras loss: any other is called row by row, and compiled in
                each step.

        Warns:
            UserWarning: the noise is drawn by another generator than the optimizer named.
        """
        if not isinstance(optimizer, LabelDPOptimizer):
            raise TypeError(
                f"optimizer must be a LabelDPOptimizer, got {type(optimizer).__name__}. Wrap it: "
                "LabelDPOptimizer(keras.optimizers.SGD(0.5), 1.0, noise_multiplier=...)."
            )
        _check_compile(settings, optimizer)
        jit_compile = settings.pop("jit_compile", False) is True
        if self._is_training():
            raise RuntimeError("the model can't be compiled while fit is under way.")
        owner = optimizer._owner()
        if owner is not None and owner is not self:
            raise ValueError(
                "optimizer belongs to another LabelDPModel, and counts its steps. Copy it: "
                "LabelDPOptimizer.from_config(optimizer.get_config())."
            )
        InspectedModel(self).check_layers()
        losses = OutputLosses(self, loss, settings.get("loss_weights"))
        if losses.only is None:
            _check_one_output(optimizer)
        if optimizer.clipping == "label_distance":
            LabelDistanceClip.check_model(self, losses.parts[0].loss)
        if jit_compile:
            optimizer._draw_on_device()
        settings["auto_scale_loss"] = False
        super().compile(optimizer=optimizer, loss=loss, jit_compile=jit_compile, **settings)
        self._guard = StepGuard(compiled=self.jit_compile)
        self._step = PrivateStep(self, optimizer, losses, self._guard)
        optimizer._owner = weakref.ref(self)
        self._spending = Spending(self, optimizer, self._guard)
        self._traced_with = None

    def get_compile_config(self) -> dict[str, Any]:
        """Returns the settings of ``compile`` for a file."""
        config = dict(super().get_compile_config())
        if config and "optimizer" not in config:
            # Keras removes the optimizer from its own record when it writes an HDF5 file.
            config["optimizer"] = keras.saving.serialize_keras_object(self.optimizer)
        return config

    def compile_from_config(self, config: dict[str, Any]) -> None:
        """Compiles a loaded model with its saved settings."""
        settings = keras.saving.deserialize_keras_object(config)
        self.compile(**settings)
        if self.built:
            self.optimizer.build(self.trainable_variables)

    @_validate.clears_frames
    def fit(
        self,
        x: Public[Any] = None,
        y: Private[Any] = None,
        **settings: Public[Any],
    ) -> Any:
        """Trains privately; see ``keras.Model.fit``.

        Args:
            x: ``data.poisson_batches(...)``; or arrays with ``y``, where every example is used once
                per epoch (no amplification).
            y: labels, if ``x`` is arrays; for several outputs a dict or list of arrays.
            settings: all other arguments of ``keras.Model.fit``. ``class_weight``, and with arrays
                ``sample_weight``, are as for ``data.poisson_batches``: public numbers, which weigh
                the losses before clipping.

        Returns:
            The ``keras.callbacks.History``.
        """
        self._assert_compiled()
        if self._is_training():
            raise RuntimeError("fit is under way. A callback can't call it again.")
        validation = settings.get("validation_data")
        if isinstance(validation, PoissonBatches):
            raise TypeError(
                "expected public validation_data, got poisson_batches of private labels. Give "
                "public (x, y)."
            )
        plan = self._planned(x, y, settings)
        settings["callbacks"] = self._spending.with_charges(
            settings.get("callbacks"), settings.get("epochs", 1), settings.get("initial_epoch", 0)
        )
        dataset, changed = plan.open()
        # Keras would turn the shuffle off with a warning.
        settings |= {**changed, "shuffle": False}
        self._batch_spec = dataset.element_spec[:3]
        settings |= _validation_data(validation, plan.vaults)
        _check_validation_labels(settings.get("validation_data"), self._step.per_example_loss)
        withheld = ""
        # BackupAndRestore sets it, and an earlier fit may have left it.
        self._initial_epoch = None
        self._begin(plan)
        try:
            with without_retracing_warnings():  # A fit may trace its step, which has its plan.
                history = super().fit(dataset, **settings)
            self._check_columns(plan)
            return history
        except tf.errors.OpError as error:
            if self._guard.error is None and isinstance(error, _HARMLESS):
                raise
            withheld = type(error).__name__
        finally:
            self._spending.end()
            self._withholding = False
        if self._guard.compiled and self._guard.error is None:
            layer = self._step.clipping.layer_not_compiled()
            if layer is not None:
                raise ValueError(
                    f"XLA can't compile {layer}. Replace it, or compile without jit_compile=True."
                )
        # Raised outside of the handler, the new error has no link to the withheld one.
        raise self._guard.error or RuntimeError(
            f"training stopped with TensorFlow's {withheld}, whose text is withheld: it may quote "
            "labels. To see it, train on made-up labels, or read the features alone."
        )

    def _planned(self, x: Any, y: Any, settings: dict[str, Any]) -> TrainingPlan:
        """Returns the plan of a fit, or raises for all that needs no charge to be known."""
        plan = TrainingPlan.of(x, y, settings, self.optimizer)
        self._check_plan(plan)
        return plan

    def _check_plan(self, plan: TrainingPlan) -> None:
        per_execution = self.steps_per_execution
        if isinstance(plan, PoissonPlan) and plan.batches.steps % per_execution:
            raise ValueError(
                f"steps={plan.batches.steps} of poisson_batches must be a multiple of "
                f"steps_per_execution={per_execution}: Keras would take steps without a charge."
            )
        _check_replicas(self.distribute_strategy, plan, self._guard.compiled)
        plan.check_labels(self._step.per_example_loss, self.optimizer.clipping)
        inspected = InspectedModel(self)
        inspected.check_features_fit(plan.feature_specs())
        if (features := plan.features_in_memory()) is not None:
            inspected.check_missing(features)

    def _check_columns(self, plan: TrainingPlan) -> None:
        """Warns of columns from which alone the trained model predicts nearly all labels."""
        features, only = plan.features_in_memory(), self._step.per_example_loss.only
        is_array = isinstance(features, np.ndarray) and features.dtype.kind in "biuf"
        if not is_array or only is None or not only.loss.takes_codes:
            return

        def outputs_of(rows: np.ndarray) -> Any:
            outputs = self(rows, training=False)
            return keras.ops.softmax(outputs) if only.loss.from_logits else outputs

        FeatureRows(features).check_model(outputs_of, None)

    def _begin(self, plan: TrainingPlan) -> None:
        # A callback may restore the variables of the optimizer.
        if not self.optimizer.built:
            with self.distribute_strategy.scope():
                self.optimizer.build(self.trainable_variables)
        self._guard.error = None
        self._withholding = not self.report_training_metrics
        self._spending.begin(plan, self.report_training_metrics)
        if self._step.constants(plan) != self._traced_with:
            self.train_function, self._traced_with = None, None

    def _is_training(self) -> bool:
        return self._spending is not None and self._spending.plan is not None

    def _maybe_symbolic_build(self, iterator: Any = None, data_batch: Any = None) -> None:
        # Keras would take a batch for its shapes, and not train on it: the passes over the data
        # would no longer begin with the charged epochs.
        spec, self._batch_spec = self._batch_spec, None
        if spec is not None:
            iterator, data_batch = None, spec
        super()._maybe_symbolic_build(iterator, data_batch)

    def train_on_batch(self, *unused: Any, **also_unused: Any) -> NoReturn:
        """Raises a ``RuntimeError``: the cost of a batch depends on its sampling."""
        raise RuntimeError(
            "train_on_batch is not private: the cost of a batch depends on its sampling. Use fit."
        )

    def evaluate(
        self, *args: Public[Any], **settings: Public[Any]
    ) -> float | list[float] | dict[str, float]:
        """Returns loss and metrics on public labels, typed as in ``fit``; see ``keras.Model``."""
        if len(args) > 1 and args[1] is not None:
            args = (args[0], codes_by_output(args[1]), *args[2:])
        if settings.get("y") is not None:
            settings["y"] = codes_by_output(settings["y"])
        withholding, self._withholding = self._withholding, False
        try:
            return super().evaluate(*args, **settings)
        finally:
            self._withholding = withholding

    def get_metrics_result(self) -> dict[str, Any]:
        """Returns the metrics; none in training, as they depend on private labels."""
        return {} if self._withholding else super().get_metrics_result()

    def _assert_compiled(self) -> None:
        if not self.compiled or not isinstance(self.optimizer, LabelDPOptimizer):
            raise RuntimeError(
                "LabelDPModel must be compiled before fit: compile(LabelDPOptimizer(...), loss)."
            )
        if self._spending.optimizer is not self.optimizer:
            raise RuntimeError("the optimizer was exchanged without compile. Call model.compile.")

    def make_train_function(self, force: bool = False) -> Any:
        """Makes the function that takes steps; see ``keras.Model``."""
        if self.train_function is None or force:
            super().make_train_function(force=True)
            counting = self._spending.counting(self.train_function)
            self.train_function = self._guard.taking_turns(counting, self.optimizer)
        return self.train_function

    def train_step(self, data: Any) -> dict[str, tf.Tensor]:
        """Takes one private step.

        Args:
            data: (x, y, weights) or (x, y, weights, features of other public examples).

        Returns:
            Scalars that are private, or depend on no label.
        """
        plan = self._spending.plan if self._is_training() else None
        if plan is None:
            raise RuntimeError("train_step is for fit alone, which charges its steps.")
        # A callback may have changed them since fit began.
        self._traced_with = self._step.constants(plan)
        x, y, weights, alt = [*data, None][:4]
        y, weights = self._guard.admitted((y, weights))
        written = [*self.variables, *self.optimizer.variables]
        return self._guard.guarded(lambda: self._one_step(x, y, weights, alt, plan), written)

    def _one_step(
        self, x: Any, y: Any, weights: tf.Tensor, alt: Any, plan: TrainingPlan
    ) -> dict[str, tf.Tensor]:
        outputs, report = self._step.take(x, y, weights, alt, plan)
        if not self.report_training_metrics:
            return report
        losses = tf.cast(self._step.per_example_loss(y, outputs), tf.float32)
        self._loss_tracker.update_state(losses, sample_weight=weights)
        return {**self.compute_metrics(x, y, outputs, sample_weight=weights), **report}

    def guarantee(self, delta: float | None = None) -> PrivacyGuarantee:
        """Returns the statement of everything that entered the weights; see the class.

        Where nothing is promised its epsilon is infinite, with the reason. Other releases of a
        vault are in the vault's statement.

        Args:
            delta: in (0, 1). None takes the delta of the vault's budget, or n^-1.1 without a vault.

        Raises:
            RuntimeError: the model has not been compiled.

        Warns:
            UserWarning: delta is not below 1/n.
        """
        self._assert_compiled()
        return self._spending.guarantee(delta)

    def guarantee_after_next_epoch(self, delta: float | None = None) -> PrivacyGuarantee:
        """Returns the statement after one more epoch of the ``fit`` under way.

        Raises:
            RuntimeError: no ``fit`` is under way.
        """
        self._assert_compiled()
        return self._spending.guarantee(delta, next_epoch=True)


def _ends_of(model: keras.Model, inputs: Any) -> tuple[Any, Any]:
    """Returns the symbolic inputs and outputs of a model; a functional one knows its own."""
    if inputs is not None:
        return inputs, model(inputs)
    if not InspectedModel(model).inputs:
        raise ValueError(
            f"the inputs of {model.name!r} are unknown: it is not functional, or not built. "
            "Give them: LabelDPModel.from_model(model, inputs=keras.Input(shape))."
        )
    if isinstance(model, keras.Sequential):
        return model.inputs[0], model.outputs[0]
    return model.input, model.output


def _check_compile(settings: dict[str, Any], optimizer: LabelDPOptimizer) -> None:
    noise = optimizer.noise
    can_compile = noise.compiles or type(noise) is GaussianNoise
    if settings.get("jit_compile", False) is True and not can_compile:
        raise ValueError(
            "jit_compile=True needs noise that is drawn in the compiled program, got "
            f"{type(noise).__name__}, which is drawn in Python. Leave out noise=, or jit_compile=."
        )
    if settings.get("steps_per_execution") == "auto":
        raise ValueError(
            "steps_per_execution='auto' is not supported. Give a divisor of the steps per epoch."
        )


def _validation_data(validation: Any, vaults: Sequence[PrivateLabels]) -> dict[str, Any]:
    """Returns the validation data with codes in place of names of classes, if it has names."""
    if len(vaults) != 1 or not isinstance(validation, (tuple, list)) or len(validation) < 2:
        return {}
    x, y, *weights = validation
    codes = None if isinstance(y, (dict, tuple)) else vaults[0].kind.codes_of_names(y)
    return {} if codes is None else {"validation_data": (x, codes, *weights)}


def _check_validation_labels(validation: Any, losses: OutputLosses) -> None:
    if not isinstance(validation, (tuple, list)) or len(validation) < 2:
        return
    if not isinstance(validation[1], (dict, tuple, list)):
        labels = np.asarray(validation[1])
        losses.check_labels_fit(tf.TensorSpec(labels.shape, labels.dtype))


def _check_replicas(strategy: Any, plan: TrainingPlan, compiled: bool) -> None:
    replicas = strategy.num_replicas_in_sync
    if isinstance(strategy, tf.distribute.MultiWorkerMirroredStrategy):
        raise ValueError(
            "MultiWorkerMirroredStrategy is not supported: each worker would draw its own "
            "noise. Use MirroredStrategy, on one machine."
        )
    if compiled and replicas > 1:
        raise ValueError("jit_compile=True works on one replica only. Leave one of them out.")
    for name, size in plan.shared.items():
        if size % replicas:
            raise ValueError(f"{name}={size} must be a multiple of {replicas}, the replicas.")


def _check_one_output(optimizer: LabelDPOptimizer) -> None:
    clips = optimizer.clipping == "label_distance"
    user = optimizer.preconditioner or optimizer.denoiser
    if clips or not isinstance(user, NoOp):
        name = "clipping='label_distance'" if clips else type(user).__name__
        raise ValueError(
            f"expected a model with one output for {name}, got several. Use clipping='norm' "
            "without a denoiser and a preconditioner."
        )


@keras.saving.register_keras_serializable(package="tf_labeldp")
class PrivacySpent(Configured, ChecksEpochs):
    """Prints the epsilon spent after each epoch, and stops training before it exceeds a target.

    It adds ``epsilon`` to the log of each epoch, for other callbacks and the history.

    Guarantee:
        The callback depends on the number of steps alone. Training stops after the last epoch with
        ``epsilon <= target_epsilon``; if an epoch would exceed it, it raises before that epoch is
        charged. Epsilon includes the earlier receipts of the weights, also of those that callbacks
        load and restore, wherever they are in the list.

    Args:
        delta: delta of the statement, in (0, 1); None as for ``LabelDPModel.guarantee``.
        target_epsilon: the most to spend; None for no limit.
        verbose: 1 prints a line per epoch, except in a ``fit`` with ``verbose=0``; 0 nothing.

    Raises:
        ValueError: an argument out of range; before an epoch: a target that it would exceed.
        TypeError: when training begins: the model is not a ``LabelDPModel``.

    Example:
        >>> PrivacySpent(delta=1e-5, target_epsilon=1.0).target_epsilon
        1.0
    """

    def __init__(
        self,
        delta: float | None = None,
        target_epsilon: float | None = None,
        verbose: int = 1,
    ) -> None:
        super().__init__()
        if delta is not None:
            hint = ". Use a delta below 1/n for n labels"
            delta = _validate.number_in("delta", delta, "(0, 1)", hint)
        if target_epsilon is not None:
            target_epsilon = _validate.positive_finite("target_epsilon", target_epsilon)
        self.delta, self.target_epsilon, self.verbose = delta, target_epsilon, verbose

    def on_train_begin(self, logs: Any = None) -> None:
        """Checks the model."""
        if not isinstance(self.model, LabelDPModel):
            raise TypeError(f"PrivacySpent needs a LabelDPModel, got {type(self.model).__name__}.")

    def check_next_epoch(self) -> None:
        """Raises if the next epoch would exceed the target."""
        if self.target_epsilon is None:
            return
        if (after := self._after_another()) > self.target_epsilon:
            raise ValueError(
                f"target_epsilon={self.target_epsilon:g} is below the {after:.4g} after the next "
                "epoch, with earlier uses of these weights. Raise noise_multiplier, or take fewer "
                "steps per epoch."
            )

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Prints the epsilon spent; stops if another epoch would exceed the target."""
        spent = self.model.guarantee(self.delta)
        if logs is not None:
            logs["epsilon"] = spent.epsilon
        if self.verbose and self.params.get("verbose") != 0:
            print(f"epoch {epoch + 1}: epsilon {spent.epsilon:.4g} at delta {spent.delta:.3g}")
        if self.target_epsilon is not None and self._after_another() > self.target_epsilon:
            self.model.stop_training = True

    def _after_another(self) -> float:
        return self.model.guarantee_after_next_epoch(self.delta).epsilon
