"""One private step: admitted, clipped, noised once, denoised, checked and applied."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tf_labeldp.accounting.provenance import OptimizerSteps, Weights
from tf_labeldp.gradients.clip import Batch, Clip, Speed
from tf_labeldp.gradients.label_distance import LabelDistanceClip
from tf_labeldp.gradients.output_losses import OutputLosses
from tf_labeldp.gradients.per_example_clipping import PerExampleClipping
from tf_labeldp.mechanisms import Mechanism
from tf_labeldp.training._denoisers import NoOp
from tf_labeldp.training._label_dp_optimizer import LabelDPOptimizer, NoisyGradients
from tf_labeldp.training._training_plan import TrainingPlan
from tf_labeldp.training._vertex_losses import VertexLosses

_NOT_CHARGED = (
    "expected a charged training step, got one that has not been charged. LabelDPModel.fit alone "
    "charges steps, epoch by epoch, and takes them."
)
_AT_ONCE = (
    "expected one training step at a time, got two, by two threads. LabelDPModel.fit charges steps "
    "epoch by epoch, and takes one after the other."
)
_NOISE_CHANGED = (
    "the noise was changed during training: its steps were charged for "
    "noise_multiplier={priced:g}. Compile the model with another optimizer."
)
_OUTPUT_NOT_FINITE = (
    "the output of layer {name!r} is NaN or infinite; this step did not change the weights. Check "
    "the features for NaN, lower the learning rate, and continue from the last checkpoint."
)
_OVERFLOW = (
    " It computes in float16, which overflows above 65,504: the policy 'mixed_bfloat16' does not."
)
_GRADIENT_NOT_FINITE = (
    "the noisy gradient of {name!r} is NaN or infinite, after the denoiser and weight "
    "regularizers; this step did not change the weights. Lower l2_norm_clip, try denoiser=None, "
    "and continue from the last checkpoint."
)


class StepGuard:
    """Stops steps without a charge, and steps whose results are not finite.

    Guarantee:
        Every step is charged before its noise is drawn: each charge admits the steps of one epoch.
        The other checks depend on features, weights and noisy gradients alone, so that stopping
        reveals nothing about a label.
        A compiled program can't stop halfway. There a step without a charge gets zeros in place of
        labels; a step that fails a check, and each after it, keeps every variable of model and
        optimizer (but not reported metrics) and reports zeros. The function that ``taking_turns``
        returns raises the error after the program has run.

    Attributes:
        compiled: whether checks are values in a step's program, instead of calls of Python.
        error: the error of a stopped step, which TensorFlow replaces by another.
    """

    def __init__(self, compiled: bool = False) -> None:
        self.compiled, self.error = compiled, None  # type: bool, Exception | None
        self._noise: Any = None
        self._priced: float = 0.0
        self._steps_left = 0
        self._running = threading.Lock()
        if compiled:
            count = {"trainable": False, "aggregation": tf.VariableAggregation.ONLY_FIRST_REPLICA}
            self._left = tf.Variable(0, dtype=tf.int64, **count)
            self._stopped = tf.Variable(-1, dtype=tf.int64, **count)
            # One error per check in any trace; the outcomes are those of the current trace.
            self._errors: list[tuple[type[Exception], str]] = []
            self._passed: list[tf.Tensor] = []

    def price(self, noise: Any) -> None:
        """Records the noise that the steps of a ``fit`` are charged for; admits no step."""
        self._noise, self._priced = noise, noise.noise_multiplier
        self.admit(0)
        if self.compiled:
            self._stopped.assign(-1)

    def admit(self, steps: int) -> None:
        """Admits this many steps from now on; earlier admissions end."""
        self._steps_left = steps
        if self.compiled:
            self._left.assign(steps)

    def take_step(self, noise: Any) -> tf.Tensor:
        """Returns a tensor that this step's noise must depend on; runs once per step."""
        # The graph of this step may contain this multiplier as a constant.
        compiled = noise.noise_multiplier
        if self.compiled:
            self._check_noise(noise, compiled)
            admitted = self._is_admitted()
            self._left.assign_sub(tf.cast(admitted, tf.int64))
            return self._note([admitted], RuntimeError, [_NOT_CHARGED])

        def take() -> np.bool_:
            self._check_noise(noise, compiled)
            if self._steps_left < 1:
                self._stop(RuntimeError(_NOT_CHARGED))
            self._steps_left -= 1
            return np.True_

        return tf.numpy_function(take, [], tf.bool)

    def check_outputs(
        self, finite: dict[str, tf.Tensor], step: Any, in_float16: Collection[str] = ()
    ) -> tf.Tensor:
        messages = [
            _OUTPUT_NOT_FINITE.format(name=name) + (_OVERFLOW if name in in_float16 else "")
            for name in finite
        ]
        return self._check_all(messages, list(finite.values()), step)

    def check_gradients(self, gradients: Sequence[Any], variables: Any, step: Any) -> tf.Tensor:
        names = [variable.path for variable in variables]
        # One pass without a copy: a sum is NaN or infinite if one of its terms is.
        flags = [tf.math.is_finite(tf.reduce_sum(part)) for part in gradients]
        return self._check_all([_GRADIENT_NOT_FINITE.format(name=n) for n in names], flags, step)

    def admitted(self, labels: Any) -> Any:
        if not self.compiled:
            return labels
        good = self._is_admitted()
        labels = tf.nest.map_structure(tf.convert_to_tensor, labels)
        return tf.nest.map_structure(lambda v: tf.where(good, v, tf.zeros_like(v)), labels)

    def _is_admitted(self) -> tf.Tensor:
        return tf.logical_and(self._left >= 1, self._stopped < 0)

    def guarded(self, step: Callable[[], dict[str, tf.Tensor]], variables: Any) -> dict[str, Any]:
        """Returns the report of a step, which keeps the variables if a check fails."""
        if not self.compiled:
            return step()
        before = [tf.convert_to_tensor(variable.value) for variable in variables]
        first, self._passed = len(self._errors), []
        report = step()
        passed = tf.stack(self._passed)
        failed = first + tf.argmin(tf.cast(passed, tf.int32))  # the first false
        number = tf.where(tf.reduce_all(passed), tf.constant(-1, tf.int64), failed)
        self._stopped.assign(tf.where(self._stopped < 0, number, self._stopped))
        good = self._stopped < 0
        for variable, old in zip(variables, before, strict=True):
            variable.assign(tf.where(good, tf.convert_to_tensor(variable.value), old))
        return {name: tf.where(good, part, tf.zeros_like(part)) for name, part in report.items()}

    def taking_turns(self, run: Callable[[Any], Any], optimizer: LabelDPOptimizer) -> Any:
        """Returns a function that runs one step at a time, and raises if a compiled step failed."""

        def run_alone(iterator: Any) -> Any:
            # Two threads could both take the last charged step.
            if not self._running.acquire(blocking=False):
                raise RuntimeError(_AT_ONCE)
            try:
                if self.compiled:
                    return self._run_and_raise(run, iterator, optimizer)
                return run(iterator)
            finally:
                self._running.release()

        return run_alone

    def _run_and_raise(self, run: Any, iterator: Any, optimizer: LabelDPOptimizer) -> Any:
        self._check_noise(optimizer.noise, optimizer.noise_multiplier)
        report, ended = None, None
        try:
            report = run(iterator)
        except (StopIteration, tf.errors.OutOfRangeError) as error:
            # The data may end within the steps of one execution.
            ended = error
        number = int(self._stopped)
        if number >= 0:
            kind, message = self._errors[number]
            self._stop(kind(f"step {int(optimizer.iterations)}: {message}"))
        if ended is not None:
            raise ended
        return report

    def _check_noise(self, noise: Any, compiled: float) -> None:
        if noise is not self._noise or {compiled, noise.noise_multiplier} != {self._priced}:
            self._stop(RuntimeError(_NOISE_CHANGED.format(priced=self._priced)))

    def _check_all(self, messages: list[str], flags: list[tf.Tensor], step: Any) -> Any:
        if self.compiled:
            return self._note(flags, FloatingPointError, messages)

        def check(finite: Any, number: Any) -> Any:
            failed = [text for text, passed in zip(messages, finite, strict=True) if not passed]
            if failed:
                self._stop(FloatingPointError(f"step {int(number)}: {failed[0]}"))
            return np.True_

        return tf.numpy_function(check, [tf.stack(flags), step], tf.bool)

    def _note(self, passed: list[tf.Tensor], kind: type[Exception], messages: list[str]) -> Any:
        self._passed += passed
        self._errors += [(kind, message) for message in messages]
        return tf.reduce_all(tf.stack(passed))

    def _stop(self, error: Exception) -> None:
        self.error = error
        raise error


class PrivateStep:
    """The step of ``LabelDPModel.fit`` on one batch (``ghazi2024``, Algorithm 1).

    Guarantee:
        The step releases the noisy sum of clipped gradients alone, after the guard has admitted it.
        The inputs of denoiser and preconditioner depend on features, weights and that sum.
    """

    def __init__(
        self,
        model: keras.Model,
        optimizer: LabelDPOptimizer,
        per_example_loss: OutputLosses,
        guard: StepGuard,
    ) -> None:
        self._model, self._optimizer, self._guard = model, optimizer, guard
        self.per_example_loss = per_example_loss
        self.clipping = PerExampleClipping(model, Speed(optimizer.method, optimizer.max_bytes))

    def take(
        self, x: Any, y: Any, weights: tf.Tensor, alt: Any, plan: TrainingPlan
    ) -> tuple[tf.Tensor, dict[str, tf.Tensor]]:
        """Updates the weights; returns outputs, computed without labels, and the report.

        Rows with weight 0 are padding; ``alt`` has the features of other public examples, or None.
        """
        optimizer, replicas = self._optimizer, tf.distribute.get_replica_context()
        losses = self.per_example_loss
        if plan.class_weight is not None:
            losses = losses.with_class_weights(plan.class_weights(losses))
        variables = self._model.trainable_variables
        labels = tf.TensorSpec.from_tensor(tf.convert_to_tensor(tf.nest.flatten(y)[0]))
        # Every replica projects onto the examples of all; preconditioners average over replicas.
        pieces = 1 if optimizer.preconditioner is not None else replicas.num_replicas_in_sync
        # The forward pass comes before the gradients, to draw the same random masks.
        forward = self.clipping.training_pass(pieces)

        def vertices(needs: Any, mask: Any = None, stddev: Any = None) -> VertexLosses:
            mask = None if mask is None else _gathered(mask, pieces)
            return VertexLosses.of_model(
                forward,
                losses,
                _gathered(alt if needs.num_examples else x, pieces),
                labels,
                label_range=plan.label_range,
                mask=mask,
                is_weighted=plan.has_sample_weight,
                noise_stddev=stddev,
            )

        coordinates = None
        if optimizer.preconditioner is not None:
            coordinates = optimizer.coordinates(vertices(optimizer.preconditioner))
        clip = self._clip(losses, plan.group_rows, coordinates)
        if isinstance(clip, LabelDistanceClip):
            y = losses.parts[0].part(y)
        result = self.clipping.clipped_sum(Batch(x, y, weights, losses), clip)
        step = optimizer.iterations.value
        noisy = self._with_noise_once(result, step, replicas)
        divisor = tf.constant(plan.divisor, tf.float32)
        mean = [part / divisor for part in noisy]
        if coordinates is not None:
            mean = [side.back(part) for side, part in zip(coordinates, mean, strict=True)]
        denoiser = optimizer.denoiser
        report: dict[str, tf.Tensor] = {}
        if not isinstance(denoiser, NoOp):
            public = None
            if denoiser.num_examples or denoiser.reveals_batch:
                stddev = optimizer.noise_multiplier * optimizer.l2_norm_clip / divisor
                public = vertices(denoiser, None if denoiser.num_examples else weights, stddev)
            mean, report = optimizer.denoise(mean, public)
        mean = _with_weight_penalties(mean, variables)
        report["noisy_gradient_norm"] = tf.linalg.global_norm(noisy)
        if replicas.num_replicas_in_sync > 1:
            # The inner optimizer sums over replicas, whose gradients are the same here.
            mean = [part / replicas.num_replicas_in_sync for part in mean]
        finite = self._guard.check_gradients(mean, variables, step)
        # Weight decay and metrics wait for the check, too.
        with tf.control_dependencies([finite]):
            optimizer.apply(NoisyGradients(mean), variables)
            outputs = result.copied_outputs()
        return outputs, report

    def constants(self, plan: TrainingPlan) -> tuple[Any, ...]:
        """Returns the values that a traced step contains, and that may change between two fits."""
        model, optimizer, inner = self._model, self._optimizer, self._optimizer.inner_optimizer
        settings = [optimizer.denoiser, optimizer.preconditioner or NoOp(), optimizer.noise]
        numbers = {
            name: number
            for name, number in vars(inner).items()
            if isinstance(number, (int, float))
            and not name.startswith(("_", OptimizerSteps.ATTRIBUTE))
        }
        # The settings of plug-ins may be inside other objects: each fit traces their steps.
        return (
            plan.traced_values(self.per_example_loss),
            optimizer.noise_multiplier,
            [
                repr(part.get_config()) if Mechanism.is_of_this_library(part) else object()
                for part in settings
            ],
            (id(inner), id(inner._learning_rate), numbers),
            [(id(layer), layer.trainable) for layer in Weights.layers_of(model)],
            [id(variable) for variable in model.trainable_variables],
            model.report_training_metrics,
            (model.run_eagerly, model.jit_compile, model.steps_per_execution),
        )

    def _clip(self, losses: OutputLosses, group_rows: int, coordinates: Any) -> Clip:
        optimizer = self._optimizer
        if optimizer.clipping == "norm":
            return Clip(optimizer.l2_norm_clip, group_rows, coordinates)
        only = losses.parts[0]
        factors = [only.weight * weight for weight in only.class_weights or (1.0, 1.0)]
        return LabelDistanceClip(optimizer.l2_norm_clip, 1, coordinates, factors)

    def _with_noise_once(self, result: Any, step: Any, replicas: Any) -> list[tf.Tensor]:
        """Returns the clipped sum over all replicas with noise, once its outputs are checked."""
        half = self.clipping.float16_layers
        with tf.control_dependencies([self._guard.check_outputs(result.finite, step, half)]):
            clipped = [tf.identity(part) for part in result.gradients]

        def noisy(total: list[tf.Tensor]) -> list[tf.Tensor]:
            step = self._guard.take_step(self._optimizer.noise)
            with tf.control_dependencies([step]):
                admitted = [tf.identity(part) for part in total]
            return self._optimizer.add_noise(admitted)

        if replicas.num_replicas_in_sync == 1:
            return noisy(clipped)
        if tf.nest.flatten(self._optimizer.noise.initial_state([])):
            raise ValueError(
                f"{type(self._optimizer.noise).__name__} has a state, which works on one replica. "
                "Use GaussianNoise, or no strategy."
            )
        # The first replica adds the noise to the whole sum, and rounds it; the others add zero.
        total = list(replicas.all_reduce(tf.distribute.ReduceOp.SUM, clipped))
        first = tf.equal(replicas.replica_id_in_sync_group, 0)
        zeros = [tf.zeros_like(part) for part in total]
        share = tf.cond(first, lambda: noisy(total), lambda: zeros)
        return list(replicas.all_reduce(tf.distribute.ReduceOp.SUM, share))


def _gathered(values: Any, replicas: int) -> Any:
    """Returns the rows of all replicas, in the order of the batch."""
    if replicas == 1:
        return values
    values = tf.nest.map_structure(tf.convert_to_tensor, values)
    whole = tf.distribute.get_replica_context().all_gather(values, axis=0)
    return tf.nest.map_structure(
        lambda all_rows, rows: tf.ensure_shape(
            all_rows, [rows.shape[0] and replicas * rows.shape[0], *rows.shape[1:]]
        ),
        whole,
        values,
    )


def _with_weight_penalties(gradients: list[tf.Tensor], variables: Sequence[Any]) -> list[tf.Tensor]:
    """Adds the gradients of weight regularizers, which need no label: no clip and no noise."""
    penalized = [v for v in variables if v.regularizer is not None]
    if not penalized:
        return gradients
    with tf.GradientTape() as tape:
        penalty = tf.add_n([tf.cast(v.regularizer(v), tf.float32) for v in penalized])
    parts = tape.gradient(penalty, [v.value for v in penalized], unconnected_gradients="zero")
    by_id = {id(v): part for v, part in zip(penalized, parts, strict=True)}
    return [
        part + tf.cast(by_id[id(v)], part.dtype) if id(v) in by_id else part
        for v, part in zip(variables, gradients, strict=True)
    ]
