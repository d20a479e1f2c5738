"""The steps of a training that receipts cover, and changes of weights that they did not make."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import sys
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np

from tf_labeldp._progress import without_retracing_warnings
from tf_labeldp.accounting import Receipt, Receipts, public_input
from tf_labeldp.accounting.provenance import LayerHistory, OptimizerSteps, Weights
from tf_labeldp.vault.model_history import (
    TrainedModel,
    cover_namesakes,
    cover_weights,
    note_weights,
    set_history,
)

_FEW_BYTES = 4096
"""Below this, a comparison of all bytes is faster than that of two addresses."""


class CountedSteps:
    """The steps of one training, whose receipts cover the weights that they left, and no others.

    It keeps the values that the last counted step left. Before the next step, at the end of each
    epoch and in each statement they are compared with the present values. A value that anything
    else set brings its receipts if it is known, and otherwise voids the promise.

    Args:
        model: the Keras model, whose training begins.
        receipts: receipts of the labels that its steps use.
        on_found: is called after receipts of other values were attached to the model.
    """

    def __init__(
        self, model: Any, receipts: Iterable[Receipt], on_found: Callable[[], None] | None = None
    ) -> None:
        # The receipts of the model include one of unknown cost for training without receipts.
        TrainedModel(model).attach(Receipts.merged(public_input(model).receipts, receipts))
        self._model, self._on_found = model, on_found
        self._before = frozenset(Weights.digests([*model.weights, *self._state]))
        self._is_alone = False
        self._history: Any = None
        self._function: Any = None
        # Keras on JAX passes values from step to step; variables have none within an epoch.
        self._passed: dict[int, Any] = {}
        self._left: dict[int, Any] = {}
        self._readers: dict[int, Callable[[], Any]] = {}
        self.accept()

    @classmethod
    @contextlib.contextmanager
    def throughout(cls, model: Any, receipts: Iterable[Receipt]) -> Iterator[None]:
        """Adds receipts to a model, and counts the training in this context, the only one."""
        steps = cls(model, receipts)
        steps.trust()
        try:
            with without_retracing_warnings():
                yield
        finally:
            steps.end()

    def changed(self, variables: Iterable[Any]) -> list[Any]:
        """Returns the variables that have other values than the last counted step left."""
        different = [
            variable
            for variable in variables
            if id(variable) in self._left
            and not _same(self._left[id(variable)], self._value(variable))
        ]
        if different and self._averages:
            # The averages of an optimizer become the weights, for an evaluation or at the end.
            # Keras swaps both by sums and differences, which round.
            made = [np.asarray(value) for value in self._left.values()]
            different = [
                part
                for part in different
                if not any(_are_close(value, np.asarray(self._value(part))) for value in made)
            ]
        return different

    def accept(self) -> None:
        """Covers the present values and steps: the training itself has set them."""
        model, optimizer = self._model, self._optimizer
        # A model that was not built has had weights since its first step.
        late = [
            layer
            for layer in Weights.layers_of(model)
            if layer.trainable_weights and LayerHistory.of(layer) is None
        ]
        if late:
            TrainedModel(model).attach(TrainedModel(model).receipts, late)
        self._is_built = model.built and (optimizer is None or optimizer.built)
        self._readers = {id(part): self._reader(part) for part in self._variables()}
        self._keep({key: read() for key, read in self._readers.items()})
        self._arm()

    def trust(self) -> None:
        """Covers everything until the end: nothing else runs during this training."""
        self._is_alone, self._left = True, {}
        OptimizerSteps(self._optimizer).cover(math.inf)

    def look(self) -> None:
        """Attaches the receipts of values that no counted step left, before they are used."""
        model = self._model
        changed, steps = self.changed(model.weights), self._other_steps()
        if not changed and not steps:
            # Another counted training of these layers may have ended.
            if (history := LayerHistory.of(model)) is None or history.changed != self.changed:
                self._arm()
            return
        of_files = _read_from_files(model)
        digests = self._digests(part for part in changed if id(part) not in of_files)
        found, unknown = Weights.known(digests)
        reason = ""
        if self._before.issuperset(unknown):
            # A restored optimizer has momentum, which counted steps made.
            state = self._digests(self._state) if steps else []
            digests += state
            of_state, unknown = Weights.known(state)
            found = Receipts.merged(found, of_state)
            if unknown:
                reason = f"the optimizer of {model.name!r} took steps that no receipt covers"
        else:
            reason = f"weights of {model.name!r} were changed between the counted steps"
        if reason:
            found = Receipts.merged(found, [Receipt.of_unknown_training(reason)])
        TrainedModel(model).attach(found)
        # These values keep the receipts that they had.
        self._before = self._before.union(digests)
        self.accept()
        if self._on_found is not None:
            self._on_found()

    def expect(self) -> None:
        """Counts the next step of the ``fit`` under way."""
        model = self._model
        if self._is_alone:
            return
        if model.train_function is not self._function:
            run = getattr(model.train_function, "uncounted", model.train_function)
            self._function = model.train_function = self._counting(run)
        # A later fit has another history, also if this one was interrupted before the step.
        self._history = self._history_of_fit()

    def _history_of_fit(self) -> tuple[Any]:
        return (getattr(self._model, "history", None),)

    def _counting(self, run: Callable[..., Any]) -> Callable[..., Any]:
        def counting(*arguments: Any) -> Any:
            expected, self._history = self._history, None
            if expected != self._history_of_fit() or self._is_single_batch(arguments):
                return run(*arguments)
            return self.take(run, *arguments)

        counting.uncounted = run  # type: ignore[attr-defined]
        return counting

    def take(self, run: Callable[..., Any], *arguments: Any) -> Any:
        """Takes one step, or one execution of several, and covers its steps and weights."""
        of_state = len(arguments) > 1
        if of_state:
            passed = self._by_variable(arguments[0])
            if any(self._passed.get(key) is not value for key, value in passed.items()):
                self._passed = passed
                self.look()
            # An interrupted step leaves the values of the step before.
            result = run(*arguments)
            self._passed = self._by_variable(result[1])
            copy = sys.modules["keras"].ops.copy
            self._keep({key: copy(value) for key, value in self._passed.items()})
            return result
        if not all(_same(value, self._readers[key]()) for key, value in self._left.items()):
            self.look()
        # The step changes values in place if nothing else refers to them.
        self._left = {}
        try:
            return run(*arguments)
        finally:
            if self._is_built:
                self._keep({key: read() for key, read in self._readers.items()})
            else:
                self.accept()  # The first step makes variables.

    def end_epoch(self) -> None:
        """Records the weights after an epoch, which other callbacks may save and restore."""
        if not self._is_alone:
            self.look()
            self.accept()
        self._note()

    def end(self) -> None:
        """Records the final weights, here and in the ledgers of charged vaults."""
        model = self._model
        if self._function is not None and model.train_function is self._function:
            model.train_function = self._function.uncounted
        if self._is_alone:
            self.accept()
        self.look()
        if _backend() == "jax":
            # Weights and their averages (`use_ema`) share a buffer, which `predict` would free.
            model.set_weights(model.get_weights())
        cover_namesakes(Weights.layers_of(model))
        cover_weights(Weights.layers_of(model))
        self._note()
        self._left = {}

    def _note(self) -> None:
        receipts = TrainedModel(self._model).receipts
        # Files have the state of the optimizer, too.
        digests = Weights.digests([*self._model.weights, *self._state])
        note_weights(sorted(set(digests).difference(self._before)), receipts)

    @property
    def _optimizer(self) -> Any:
        return getattr(self._model, "optimizer", None)

    @property
    def _state(self) -> list[Any]:
        return [] if self._optimizer is None else self._optimizer.variables

    @property
    def _averages(self) -> bool:
        return self._optimizer is not None and OptimizerSteps(self._optimizer).inner.use_ema

    def _variables(self) -> list[Any]:
        optimizer = self._optimizer
        if optimizer is None:
            return list(self._model.weights)
        state = self._state if self._averages else ()
        return [*self._model.weights, _steps_of(optimizer), *state]

    def _keep(self, values: dict[int, Any]) -> None:
        self._left = values
        if (optimizer := self._optimizer) is not None:
            taken = values.get(id(_steps_of(optimizer)), 0)
            per_step = _batches_per_step(optimizer)
            OptimizerSteps(optimizer).cover(
                taken if per_step == 1 else int(np.asarray(taken)) // per_step
            )

    def _arm(self) -> None:
        for layer in Weights.layers_of(self._model):
            if (history := LayerHistory.of(layer)) is not None:
                kept = dataclasses.replace(
                    history, digests=None, trained=True, changed=self.changed
                )
                set_history(layer, kept)

    def _other_steps(self) -> int:
        """Returns the steps that were not counted; fewer than zero if the optimizer was reset."""
        optimizer, covered = self._optimizer, OptimizerSteps(self._optimizer).covered
        if covered is None or covered == math.inf or not optimizer.built:
            return 0
        taken = int(np.asarray(self._value(_steps_of(optimizer))))
        return taken // _batches_per_step(optimizer) - int(covered)

    def _digests(self, variables: Iterable[Any]) -> list[bytes]:
        return Weights.digests(variables, self._value)

    def _reader(self, variable: Any) -> Callable[[], Any]:
        """Returns a function that returns the present value, which later steps do not change."""
        if _backend() == "tensorflow" and type(variable.value).__name__ == "ResourceVariable":
            # No copy: an assignment leaves a buffer as it is if anything else refers to it.
            tf: Any = sys.modules["tensorflow"]
            value, read = variable.value, tf.raw_ops.ReadVariableOp
            return functools.partial(read, resource=value.handle, dtype=value.dtype)
        return functools.partial(self._value, variable)

    def _value(self, variable: Any) -> Any:
        if _has_no_value(variable):
            return self._passed.get(id(variable))
        if _backend() == "jax":
            return sys.modules["keras"].ops.copy(variable.value)
        return np.array(Weights.value_of(variable))

    def _by_variable(self, state: Any) -> dict[int, Any]:
        """Returns the values that Keras on JAX passes to a step, by variable."""
        model = self._model
        groups = (
            model.trainable_variables,
            model.non_trainable_variables,
            model.optimizer.variables,
        )
        pairs = [
            pair for group in zip(groups, state, strict=False) for pair in zip(*group, strict=True)
        ]
        kept = {id(variable) for variable in self._variables()}
        return {id(variable): value for variable, value in pairs if id(variable) in kept}

    def _is_single_batch(self, arguments: Any) -> bool:
        """Returns whether Keras calls a step for ``train_on_batch``, not for ``fit``."""
        if len(arguments) > 1:
            return not all(map(_has_no_value, self._model.trainable_variables))
        return isinstance(arguments[0], types.GeneratorType)


def _read_from_files(model: Any) -> set[int]:
    """Returns the ids of weights that were read from files with receipts during this training."""
    found = set()
    for layer in Weights.layers_of(model):
        history = LayerHistory.of(layer)
        if history is not None and history.digests is None and history.changed is None:
            found |= {id(weight) for weight in Weights.own(layer)}
    return found


def _steps_of(optimizer: Any) -> Any:
    """Returns the variable that counts the batches of an optimizer."""
    return OptimizerSteps(optimizer).inner.variables[0]


def _batches_per_step(optimizer: Any) -> int:
    return OptimizerSteps(optimizer).inner.gradient_accumulation_steps or 1


def _has_no_value(variable: Any) -> bool:
    return getattr(variable, "_value", variable) is None


def _backend() -> str:
    keras: Any = sys.modules["keras"]
    return str(keras.backend.backend())


def _are_close(first: np.ndarray, second: np.ndarray) -> bool:
    return first.shape == second.shape and np.allclose(first, second, rtol=1e-5, atol=1e-6)


def _same(kept: Any, present: Any) -> bool:
    if present is None or kept is present:
        return True
    if "GPU" in str(getattr(kept, "device", "")):
        keras: Any = sys.modules["keras"]
        if bool(keras.ops.all(keras.ops.equal(kept, present))):
            return True
    first, second = np.asarray(kept), np.asarray(present)
    if first.nbytes < _FEW_BYTES:
        return first.tobytes() == second.tobytes()
    if first.ctypes.data == second.ctypes.data or np.array_equal(first, second):
        return True
    return first.tobytes() == second.tobytes()  # NaN
