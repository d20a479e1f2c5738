"""The model whose ``fit`` is private, and the callback that says what it has spent."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any, NoReturn

import keras
import numpy as np
import tensorflow as tf

from tf_labeldp import _validate
from tf_labeldp.accounting import (
    Charge,
    PrivacyGuarantee,
    Private,
    Public,
    Receipt,
    Setting,
    public_input,
)
from tf_labeldp.accounting._public_input import history_of, layers_of
from tf_labeldp.accounting._receipts import LabelSet, receipts_from_bytes, receipts_to_bytes
from tf_labeldp.data._poisson_batches import PoissonBatches
from tf_labeldp.gradients._ghost_clipping import layer_not_compiled
from tf_labeldp.gradients._label_distance import check_candidates, check_labels
from tf_labeldp.gradients._model_checks import (
    check_labels_fit,
    check_layers,
    check_outputs,
    per_example_loss,
    takes_codes,
    takes_rows,
)
from tf_labeldp.keras_layers._released_dense import CarriesReceipts
from tf_labeldp.training._label_checks import check_codes
from tf_labeldp.training._label_dp_optimizer import LabelDPOptimizer
from tf_labeldp.training._private_step import PrivateStep, StepGuard
from tf_labeldp.training._spending import Spending
from tf_labeldp.training._training_plan import PoissonPlan, TrainingPlan
from tf_labeldp.vault import declare
from tf_labeldp.vault._model_history import attach, attach_from_file, cover_steps

_HISTORY_OF_0_1 = "label_dp_history"
_FROM_0_1 = (
    "Nothing is promised: the weights come from a file of tf-labeldp 0.1, which has no receipts. "
    "Train again, or declare what its statement promised: model.declare(because=..., epsilon=..., "
    "delta=...)."
)
_HARMLESS = (
    tf.errors.ResourceExhaustedError,
    tf.errors.CancelledError,
    tf.errors.AbortedError,
    tf.errors.UnavailableError,
    tf.errors.DeadlineExceededError,
)
"""Errors whose texts TensorFlow makes without looking at values."""


@keras.saving.register_keras_serializable(package="tf_labeldp")
class LabelDPModel(CarriesReceipts, keras.Model):
    """A Keras model that trains by DP-SGD under label DP: all that ``fit`` does is private.

    Use it like any functional model; compile it with a ``LabelDPOptimizer`` and a loss per example,
    and fit it on ``data.poisson_batches``. ``LabelDPModel.from_model`` makes one of a model that
    exists and shares its layers.

    Each step clips every example's gradient to ``l2_norm_clip``, adds noise to their sum once (also
    with several replicas), divides by the expected batch size, denoises, and hands the result to
    the inner optimizer (``ghazi2024``, Algorithm 1).

    Guarantee:
        ``guarantee()`` states what all that went into the weights cost under replacement of one
        label: steps of this model and of others that share its layers, noisy labels and heads that
        they were trained on or made of, whatever came with a file or was copied from another model
        of this process. The receipts go with the weights, through ``.keras``, ``.weights.h5`` and
        ``tf.train.Checkpoint``. Where weights were trained in the clear in this process, nothing is
        promised until ``declare`` says what is known of it.

        The charge to a vault is made before an epoch's first step, and ``fit`` alone takes steps:
        each has to be charged, or it stops before its noise is drawn.

        Loss and metrics on the training labels are withheld, since they are not private: the log
        shows the norm of the noisy gradient and what the denoiser says. Validation data are
        reported as usual: their labels are taken for public. With
        ``model.report_training_metrics = True`` the log shows all, and the statement says so.

        Texts of TensorFlow's errors are withheld, since they may quote labels.

    Args:
        inputs: as for ``keras.Model``.
        outputs: as for ``keras.Model``.
        name: as for ``keras.Model``.

    Raises:
        ValueError: on ``compile``: layers that mix examples, a loss that is not per example, or
            nothing to train; on ``fit``: a layer that XLA can't compile, with ``jit_compile=True``.
        TypeError: on ``compile``: another optimizer than ``LabelDPOptimizer``.
        BudgetExceededError: on ``fit``: the vault's budget does not allow the epochs.
        FloatingPointError: on ``fit``: the model returned NaN or infinity, or the noisy gradient
            is not finite; the weights are those before that step.
        RuntimeError: on ``fit``: not compiled, or TensorFlow stopped with an error whose text is
            withheld; on ``train_on_batch``, and on ``train_step`` outside of ``fit``; Keras runs on
            another backend than TensorFlow.

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

    @classmethod
    def from_model(cls, model: Public[keras.Model], inputs: Public[Any] = None) -> LabelDPModel:
        """Returns a private model that shares the layers and weights of ``model``.

        What ``fit`` learns is in ``model`` too. ``keras.Model(private.inputs, private.outputs)``
        is a plain model of the same layers; ``tf_labeldp.guarantee`` states the same of all three.

        Args:
            model: functional or sequential, and built; any other with ``inputs``.
            inputs: ``keras.Input`` tensors, for a model that is not functional.

        Raises:
            TypeError: not a Keras model.
            ValueError: a model whose inputs are not known.
        """
        public = public_input(model, inputs)
        model, inputs = public.value
        if not isinstance(model, keras.Model):
            raise TypeError(f"model must be a keras.Model, got {type(model).__name__}.")
        try:
            if inputs is not None:
                outputs = model(inputs)
            elif isinstance(model, keras.Sequential):
                inputs, outputs = model.inputs[0], model.outputs[0]
            else:
                inputs, outputs = model.input, model.output
        except (AttributeError, TypeError, ValueError) as error:
            if inputs is not None:
                raise
            raise ValueError(
                f"the inputs of {model.name!r} are not known: it is not functional, or not built. "
                "Give them: LabelDPModel.from_model(model, inputs=keras.Input(shape))."
            ) from error
        private = cls(inputs, outputs, name=model.name)
        attach(private, public.receipts)
        # The steps that came with a file are known, too.
        if all(one.kind != "unknown" for one in public.receipts):
            cover_steps(getattr(model, "optimizer", None))
        return private

    # By the names args and kwargs Keras knows that a model is functional.
    def __init__(self, *args: Public[Any], **kwargs: Public[Any]) -> None:
        _validate.keras_on_tensorflow("LabelDPModel")
        super().__init__(*args, **kwargs)

    def written_receipts(self) -> bytes:
        """Returns the receipts, as they are written beside the weights, which they go with."""
        noted = [place for place, one in enumerate(layers_of(self)) if history_of(one)]
        return receipts_to_bytes(public_input(self).receipts, layers=noted)

    def read_receipts(self, content: bytes, *, of_checkpoint: bool = False) -> None:
        """Adds the receipts of a file to those that are known."""
        del of_checkpoint
        receipts, data = receipts_from_bytes(content)
        attach_from_file(self, receipts, data.get("layers"))

    def load_own_variables(self, store: Any) -> None:
        """Reads the receipts; weights of version 0.1 have none."""
        values = {name: store[name] for name in store.keys()}
        if values.pop(_HISTORY_OF_0_1, None) is not None:
            unknown = Charge.unknown(_FROM_0_1)
            attach(self, [Receipt(LabelSet.new(0), unknown, "training by 0.1", "unknown")])
        super().load_own_variables(values)

    def declare(
        self,
        because: str,
        *,
        epsilon: float = 0.0,
        delta: float = 0.0,
        made_of: Public[Iterable[Any]] = (),
    ) -> PrivacyGuarantee:
        """Declares what is known of the history of the weights; see ``tf_labeldp.declare``.

        The arguments are those of ``tf_labeldp.declare`` after the model; so is the statement.
        """
        return declare(self, because, epsilon=epsilon, delta=delta, made_of=made_of)

    @property
    def report_training_metrics(self) -> bool:
        """Whether loss and metrics on the true training labels are shown: that is not private."""
        return bool(getattr(self, "_report_training_metrics", False))

    @report_training_metrics.setter
    def report_training_metrics(self, value: bool) -> None:
        if self._is_training():
            raise RuntimeError(
                "report_training_metrics can't be changed while fit is under way. Set it before."
            )
        self._report_training_metrics = bool(value)

    def compile(self, optimizer: Any = None, loss: Any = None, **settings: Any) -> None:
        """Compiles the model; see ``keras.Model.compile``.

        Args:
            optimizer: a ``LabelDPOptimizer``.
            loss: a Keras loss, its name, or a callable (y_true, y_pred) -> (batch,).
            settings: all other arguments of ``keras.Model.compile``. ``jit_compile=True`` makes a
                step one program of XLA, which draws its noise itself: the optimizer needs
                ``noise=GaussianNoise(..., source="device")``. It is off unless given. With it, use
                a loss of Keras: XLA compiles any other, which is called row by row, in each step.
        """
        if not isinstance(optimizer, LabelDPOptimizer):
            raise TypeError(
                f"optimizer must be a LabelDPOptimizer, got {type(optimizer).__name__}. Wrap it: "
                "LabelDPOptimizer(keras.optimizers.SGD(0.5), l2_norm_clip=1.0, "
                "noise_multiplier=...). A LabelDPModel never trains in the clear."
            )
        _check_compile(settings, optimizer)
        jit_compile = settings.pop("jit_compile", False) is True
        if self._is_training():
            raise RuntimeError("the model can't be compiled while fit is under way.")
        owner = getattr(optimizer, "_owner", lambda: None)()
        if owner is not None and owner is not self:
            raise ValueError(
                "optimizer belongs to another LabelDPModel, and counts its steps. Make one for "
                "each model: LabelDPOptimizer.from_config(optimizer.get_config())."
            )
        check_layers(self)
        losses = per_example_loss(loss)
        check_outputs(self, loss)
        if optimizer.clipping == "label_distance":
            check_candidates(self, loss)
        settings["auto_scale_loss"] = False
        super().compile(optimizer=optimizer, loss=loss, jit_compile=jit_compile, **settings)
        self._guard = StepGuard(compiled=self.jit_compile)
        self._step = PrivateStep(self, optimizer, losses, self._guard)
        optimizer._owner = weakref.ref(self)
        self._spending = Spending(self, optimizer, self._guard)

    def compile_from_config(self, config: dict[str, Any]) -> None:
        """Compiles a loaded model as it was when saved."""
        settings = keras.saving.deserialize_keras_object(config)
        self.compile(**settings)
        if self.built:
            self.optimizer.build(self.trainable_variables)

    def fit(
        self,
        x: Public[Any] = None,
        y: Private[Any] = None,
        *,
        allow_unaccounted: bool = False,
        **settings: Public[Any],
    ) -> Any:
        """Trains privately; see ``keras.Model.fit``.

        Args:
            x: ``data.poisson_batches(...)``; or arrays with ``y``, in which every example is used
                once an epoch (no amplification); or, with ``allow_unaccounted``, a dataset of
                (x, y).
            y: labels, where ``x`` is arrays.
            allow_unaccounted: whether to take a dataset, of whose batches nothing is known, so that
                the statement promises nothing.
            settings: all other arguments of ``keras.Model.fit``.

        Returns:
            The ``keras.callbacks.History``.
        """
        self._assert_compiled()
        if self._is_training():
            raise RuntimeError("fit is under way; a callback can't call it again.")
        if isinstance(settings.get("validation_data"), PoissonBatches):
            raise TypeError(
                "validation_data can't be poisson_batches, of private labels. Give (x, y) of "
                "labels that may be seen."
            )
        plan = TrainingPlan.of(x, y, settings, self.optimizer)
        if plan.sampling_probability is None and not allow_unaccounted:
            raise ValueError(
                "how a dataset draws its batches is not known, so nothing could be promised. Fit "
                "on tf_labeldp.data.poisson_batches(x, labels, ...) or on arrays; or train without "
                "a promise, by fit(..., allow_unaccounted=True)."
            )
        self._check_plan(plan)
        self._check_validation(settings.get("validation_data"))
        settings["callbacks"] = self._spending.with_charges(
            settings.get("callbacks"), settings.get("epochs", 1), settings.get("initial_epoch", 0)
        )
        opened = plan.open()
        if opened is not None:
            x, y = opened[0], None
            settings |= opened[1]
            self._batch_spec = x.element_spec[:3]
            if getattr(self, "outputs", None) is not None:
                check_labels_fit(self, self.loss, self._batch_spec[1])
        if isinstance(x, tf.data.Dataset):
            settings["shuffle"] = False  # as Keras would do, with a warning
        withheld = ""
        self._initial_epoch = None  # what BackupAndRestore found for an earlier fit
        self._begin(plan)
        try:
            return super().fit(x, y, **settings)
        except tf.errors.OpError as error:
            if self._guard.error is None and isinstance(error, _HARMLESS):
                raise
            withheld = type(error).__name__
        finally:
            self._spending.end()
            self.train_function, self._withholding = None, False
        if self._guard.compiled and self._guard.error is None:
            found = layer_not_compiled(self)
            if found is not None:
                raise ValueError(
                    f"jit_compile=True: XLA can't compile {found}. Build it of operations that "
                    "XLA knows, or compile the model without jit_compile."
                )
        # Outside of the handler, so that the new error has no link to the one withheld.
        raise self._guard.error or RuntimeError(
            f"training stopped with {withheld} of TensorFlow, whose text is withheld, since it may "
            "quote labels. Run the same on made-up labels of the same shape, dtype and range to "
            "see it. (An error while the features are read shows itself when they are read apart.)"
        )

    def _check_plan(self, plan: TrainingPlan) -> None:
        together = self.steps_per_execution
        if isinstance(plan, PoissonPlan) and plan.batches.steps % together:
            raise ValueError(
                f"steps={plan.batches.steps} of poisson_batches must be a multiple of "
                f"steps_per_execution={together}: Keras would take steps that are not charged."
            )
        replicas = self.distribute_strategy.num_replicas_in_sync
        if isinstance(self.distribute_strategy, tf.distribute.MultiWorkerMirroredStrategy):
            raise ValueError(
                "MultiWorkerMirroredStrategy is not supported: each worker would sample and draw "
                "noise of its own. Train on one machine, with MirroredStrategy for several GPUs."
            )
        if self._guard.compiled and replicas > 1:
            raise ValueError(
                "jit_compile=True works on one replica only. Leave it out, or train without a "
                "strategy."
            )
        for name, size in plan.shared().items():
            if size % replicas:
                raise ValueError(
                    f"{name}={size} must be a multiple of {replicas}: the replicas of the strategy "
                    "share each batch evenly."
                )
        check_codes(self, self.loss, plan)
        if self.optimizer.clipping == "label_distance":
            _check_candidates_of(plan, self.output_shape[-1])

    def _check_validation(self, data: Any) -> None:
        """Raises for labels that the loss can't take: Keras would after the first epoch alone."""
        outputs = getattr(self, "output_shape", None)
        if not isinstance(data, (tuple, list)) or len(data) < 2 or not isinstance(outputs, tuple):
            return
        shape = np.shape(data[1])
        codes = len(shape) == 1 or shape[1:] == (1,)
        if takes_rows(self.loss) if codes else takes_codes(self.loss):
            wanted = f"rows (n, {outputs[-1]})" if codes else "class codes (n,)"
            raise ValueError(
                f"the labels of validation_data have shape {shape}, and the loss takes {wanted}. "
                "Give them as the private labels are: keras.utils.to_categorical makes rows of "
                "codes, numpy.argmax codes of rows."
            )

    def _begin(self, plan: TrainingPlan) -> None:
        if not self.optimizer.built:  # before a callback restores its variables
            with self.distribute_strategy.scope():
                self.optimizer.build(self.trainable_variables)
        self._guard.error = None
        self._withholding = not self.report_training_metrics
        self._spending.begin(plan, self.report_training_metrics)
        self.train_function = None  # the plan is a constant of the traced step

    def _is_training(self) -> bool:
        spending = getattr(self, "_spending", None)
        return spending is not None and spending.plan is not None

    def _maybe_symbolic_build(self, iterator: Any = None, data_batch: Any = None) -> None:
        """Builds by the shapes of batches: Keras would take one of them, and not train on it.

        That would move the passes over the data against the epochs that are charged.
        """
        spec, self._batch_spec = self._batch_spec, None
        if iterator is not None and spec is not None:
            iterator, data_batch = None, spec
        super()._maybe_symbolic_build(iterator, data_batch)

    def train_on_batch(self, *unused: Any, **also_unused: Any) -> NoReturn:
        """Raises: a batch by itself is not charged, and says nothing of how it was sampled."""
        raise RuntimeError(
            "train_on_batch is not private: what a batch costs depends on how it was drawn. Call "
            "fit on tf_labeldp.data.poisson_batches."
        )

    def evaluate(
        self, *args: Public[Any], **settings: Public[Any]
    ) -> float | list[float] | dict[str, float]:
        """Returns loss and metrics on data whose labels may be seen; see ``keras.Model``."""
        withholding, self._withholding = getattr(self, "_withholding", False), False
        try:
            return super().evaluate(*args, **settings)
        finally:
            self._withholding = withholding

    def get_metrics_result(self) -> dict[str, Any]:
        """Returns the metrics; none while training, where they would be of private labels."""
        return {} if getattr(self, "_withholding", False) else super().get_metrics_result()

    def _assert_compiled(self) -> None:
        if not isinstance(getattr(self, "optimizer", None), LabelDPOptimizer):
            raise RuntimeError(
                "LabelDPModel must be compiled before fit: model.compile(LabelDPOptimizer(...), "
                "loss=...)."
            )
        if self._spending.optimizer is not self.optimizer:
            raise RuntimeError(
                "the optimizer was exchanged without compile. Call model.compile(optimizer, "
                "loss=...)."
            )

    def make_train_function(self, force: bool = False) -> Any:
        """Makes the function that takes steps; see ``keras.Model``."""
        if self.train_function is None or force:
            super().make_train_function(force=True)
            self.train_function = self._guard.taking_turns(self.train_function, self.optimizer)
        return self.train_function

    def train_step(self, data: Any) -> dict[str, tf.Tensor]:
        """Takes one private step.

        Args:
            data: (x, y), (x, y, weights) or (x, y, weights, features of other public examples).

        Returns:
            Scalars that are private, or known without labels.
        """
        plan = self._spending.plan if self._is_training() else None
        if plan is None:
            raise RuntimeError(
                "train_step is for fit alone, which charges its steps. Call fit on "
                "tf_labeldp.data.poisson_batches."
            )
        x, y, weights, alt = _unpacked(data)
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
        """Returns what all that went into the weights costs; see the class.

        What else has left the vaults of the labels is in the statements of these vaults.

        Args:
            delta: of the statement. None takes that of the vault's budget, or n^-1.1 without one.

        Returns:
            The statement. Its epsilon is infinite where nothing is promised, and then it says why.

        Raises:
            RuntimeError: the model has not been compiled.

        Warns:
            UserWarning: delta is not below 1/n.
        """
        self._assert_compiled()
        return self._spending.guarantee(delta)

    def guarantee_after_next_epoch(self, delta: float | None = None) -> PrivacyGuarantee:
        """Returns what ``guarantee`` will state after another epoch of the ``fit`` under way.

        Raises:
            RuntimeError: no ``fit`` is under way.
        """
        self._assert_compiled()
        return self._spending.guarantee(delta, next_epoch=True)


def _check_compile(settings: dict[str, Any], optimizer: LabelDPOptimizer) -> None:
    """Raises for settings of ``compile`` that steps can't be private with."""
    if settings.get("jit_compile", False) is True and not optimizer.noise.compiles:
        raise ValueError(
            f"jit_compile=True needs noise that is drawn inside the program, and this "
            f"{type(optimizer.noise).__name__} is drawn in Python. Give the optimizer noise="
            "GaussianNoise(noise_multiplier, source='device')."
        )
    if settings.get("loss_weights") is not None:
        raise ValueError("loss_weights is not supported: a LabelDPModel has one loss.")
    if settings.get("steps_per_execution") == "auto":
        raise ValueError(
            "steps_per_execution='auto' is not supported: steps are charged by the epoch, so their "
            "number must be known. Give a number that divides the steps of an epoch."
        )


def _check_candidates_of(plan: TrainingPlan, outputs: int) -> None:
    """Raises for labels that clipping by distance has no candidates of."""
    if plan.unit != "label":
        raise ValueError(
            "clipping='label_distance' protects single labels, and these batches are of users. Use "
            "clipping='norm'."
        )
    if plan.vault is not None:
        _ = plan.vault.num_classes  # raises for numbers and rows of labels
    elif (known := plan.known_labels()) is not None:
        check_labels(known, outputs)


def _unpacked(data: Any) -> tuple[Any, Any, tf.Tensor, Any]:
    """Returns (x, y, weights, alt) of what a dataset yields."""
    parts = data if isinstance(data, (tuple, list)) else (data,)
    if not 2 <= len(parts) <= 4:
        raise ValueError(
            f"a step needs (x, y), (x, y, weights) or (x, y, weights, public features), got "
            f"{len(parts)} parts. Fit on tf_labeldp.data.poisson_batches."
        )
    x, y, weights, alt = [*parts, None, None][:4]
    if weights is None:
        weights = tf.ones([tf.shape(tf.nest.flatten(x)[0])[0]])
    return x, y, tf.cast(weights, tf.float32), alt


@keras.saving.register_keras_serializable(package="tf_labeldp")
class PrivacySpent(keras.callbacks.Callback):
    """Prints the epsilon spent after each epoch, and stops training before it passes a target.

    The log of each epoch gets ``epsilon``, so that other callbacks and the history have it too.

    Guarantee:
        It looks at the count of steps alone. Training stops after the last epoch that keeps
        ``epsilon <= target_epsilon``; if not even the first would, it raises before the first step.
        What else the vault of the labels has paid for counts.

    Args:
        delta: of the statement, in (0, 1); None as for ``LabelDPModel.guarantee``.
        target_epsilon: the most to spend; None for no limit.
        verbose: 1 prints a line an epoch, 0 nothing.

    Raises:
        ValueError: an argument out of range, or, when training begins, a target that one epoch
            would pass.
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
        """Checks that the first epoch may be taken, and that something can be stated of it."""
        if not isinstance(self.model, LabelDPModel):
            raise TypeError(
                f"PrivacySpent needs a LabelDPModel, got {type(self.model).__name__}. Make one "
                "with LabelDPModel.from_model(model)."
            )
        after = self._after_another()
        if self.target_epsilon is not None and after > self.target_epsilon:
            raise ValueError(
                f"target_epsilon={self.target_epsilon:g} would be passed by the first epoch, which "
                f"takes it to {after:.4g}. Raise noise_multiplier, or take fewer steps an epoch."
            )

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Says what has been spent; stops if another epoch would be too much."""
        spent = self.model.guarantee(self.delta)
        if logs is not None:
            logs["epsilon"] = spent.epsilon
        if self.verbose:
            print(f"epoch {epoch + 1}: epsilon {spent.epsilon:.4g} at delta {spent.delta:.3g}")
        if self.target_epsilon is not None and self._after_another() > self.target_epsilon:
            self.model.stop_training = True

    def _after_another(self) -> float:
        return self.model.guarantee_after_next_epoch(self.delta).epsilon

    def get_config(self) -> dict[str, Any]:
        """Returns every constructor argument."""
        return {name: getattr(self, name) for name in ("delta", "target_epsilon", "verbose")}

    @classmethod
    def from_config(cls, config: Setting[dict[str, Any]]) -> PrivacySpent:
        """Returns the callback that ``get_config`` described."""
        return cls(**config)
