"""Watches the Keras optimizers of this process: which weights they trained, and how often.

A model that was trained in the clear says so only through its optimizer, which is gone as soon as
the model is compiled anew. So each is noted when it is built, and what it trained when it ends.
Keras is watched once it and this library are loaded; optimizers that exist by then are looked up.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import hashlib
import importlib.abc
import importlib.util
import math
import sys
import weakref
from collections.abc import Iterable
from typing import Any


class Watched:
    """What is known of one optimizer.

    Attributes:
        name: of its class.
        accounted: how many of its steps were on noisy labels or noisy gradients with receipts.
        was_applied: whether it took steps; one that was only read from a checkpoint did not.
        noted: digests of the values that were noted as trained in the clear; None before any were.
            Values change without a step too, where a user averages or scales them.
        receipt: what was noted then; ``receipt_steps`` is how many steps it is about.
        trained: the variables.
        start: digests of their values before the first step.
    """

    def __init__(self, optimizer: Any) -> None:
        self.name = type(optimizer).__name__
        self.accounted: float = 0
        self.was_applied = False
        self.noted: set[bytes] | None = None
        self.receipt: Any = None
        self.receipt_steps = 0
        # Of one around another, the inner one takes the steps, and is looked at by itself.
        self._is_around = hasattr(optimizer, "inner_optimizer")
        self._iterations: Any = None
        self.trained: list[Any] = []
        self.start: list[bytes] = []

    def build(self, optimizer: Any) -> None:
        """Notes what the optimizer trains."""
        self._iterations = optimizer.iterations
        self.trained = list(getattr(optimizer, "_trainable_variables", None) or [])
        tensorflow: Any = sys.modules.get("tensorflow")
        with contextlib.suppress(Exception):  # within fit, a graph is being built
            with contextlib.nullcontext() if tensorflow is None else tensorflow.init_scope():
                self.start = [] if self.steps else weight_digests(self.trained)

    @property
    def steps(self) -> int:
        """How many steps it has taken."""
        return 0 if self._iterations is None else int(_value(self._iterations))

    @property
    def steps_in_the_clear(self) -> int:
        """How many steps it has taken, if some of them have no receipt; else 0."""
        steps = self.steps if self.was_applied and not self._is_around else 0
        return steps if steps > self.accounted else 0


class Trained:
    """What an optimizer has trained without a receipt by now, ``among`` variables of these ids."""

    def __init__(self, watched: Watched, among: set[int] | None = None) -> None:
        self.watched = weakref.ref(watched)  # it holds variables, and may be gone by then
        self.name, self.steps = watched.name, watched.steps
        seen = [one for one in watched.trained if among is None or id(one) in among]
        self.digests = set(weight_digests(seen)) - set(watched.start)
        self.variables = [weakref.ref(variable) for variable in watched.trained]


_WATCHED: dict[int, Watched] = {}
"""By identity of an optimizer that there is: some can't be hashed."""
_TRAINED: list[Trained | Watched] = []
"""Not asked for yet; an optimizer itself where its weights could not be read."""


def watch() -> None:
    """Begins to watch, if Keras has been loaded since."""
    keras: Any = sys.modules.get("keras")
    kind = getattr(getattr(keras, "optimizers", None), "Optimizer", None)
    if kind is None:
        return
    [base] = [one for one in kind.__mro__ if "build" in vars(one)][-1:]
    if hasattr(base.build, "_is_watched"):
        return
    build, load = base.build, base.load_own_variables

    @functools.wraps(build)
    def watched_build(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = build(self, *args, **kwargs)
        known = _of(self)
        known.build(self)
        for one in type(self).__mro__:
            if "apply" in vars(one) and not hasattr(vars(one)["apply"], "_is_watched"):
                _watch_apply(one)
                known.was_applied = True  # it may be within its own `apply` at this moment
        return result

    @functools.wraps(load)
    def watched_load(self: Any, store: Any) -> Any:
        known = _of_inner(self)
        _note(known)  # its steps are about to be set to those of the file
        unlimited = known.accounted == math.inf
        result = load(self, store)
        known.noted = known.receipt = None
        known.accounted = math.inf if unlimited else known.steps
        return result

    watched_build._is_watched = True  # type: ignore[attr-defined]
    base.build, base.load_own_variables = watched_build, watched_load
    _watch_apply(base)
    _watch_copies(keras.Model, "save")
    _watch_copies(keras.Model, "save_weights")
    _watch_copies(keras.layers.Layer, "get_weights")
    kinds, models = _subclasses(kind), _subclasses(keras.Model)
    alive = [one for one in gc.get_objects() if type(one) in kinds or type(one) in models]
    loaded = {id(one.optimizer) for one in alive if type(one) in models and _was_never_fitted(one)}
    for one in alive:
        if type(one) in kinds and getattr(one, "built", False):
            _of(one).was_applied = id(one) not in loaded


def account_for(optimizer: Any, steps: float | None = None) -> None:
    """Notes that an optimizer's first so many steps have receipts; None for those so far."""
    known = _of_inner(optimizer)
    known.accounted = known.steps if steps is None else steps


def in_the_clear() -> list[Watched]:
    """Returns the optimizers that there are and that took steps without a receipt."""
    return [known for known in list(_WATCHED.values()) if known.steps_in_the_clear]


def trained_in_the_clear() -> list[Trained]:
    """Returns what optimizers trained that are gone, or were noted; each once."""
    found = []
    while _TRAINED:
        one = _TRAINED.pop(0)
        if isinstance(one, Trained):
            found.append(one)
        elif one.steps_in_the_clear:
            found.append(Trained(one))
    return found


def note_in_the_clear(among: set[int] | None = None) -> None:
    """Notes what is trained in the clear and not noted yet, ``among`` variables of these ids."""
    watch()
    for known in list(_WATCHED.values()):
        _note(known, among)


def weight_digests(variables: Iterable[Any]) -> list[bytes]:
    """Returns a digest of the values of each variable, but for constants, as fresh layers have."""
    import numpy as np

    digests = []
    for variable in variables:
        values = np.asarray(_value(variable))
        if values.dtype.kind in "fV" and values.size:  # V: bfloat16
            content = np.ascontiguousarray(values, dtype=np.float32)
            if not np.any(content != content.flat[0]):
                continue
            digest = hashlib.blake2b(repr(content.shape).encode(), digest_size=16)
            digest.update(content.data)
            digests.append(digest.digest())
    return digests


def _value(variable: Any) -> Any:
    """Returns the value of a variable; on JAX ``numpy()`` warns, on TensorFlow Keras's function."""
    keras: Any = sys.modules.get("keras")
    if keras is None or keras.backend.backend() == "tensorflow":
        return variable.numpy()
    return keras.ops.convert_to_numpy(variable)


def _of(optimizer: Any) -> Watched:
    """Returns what is known of an optimizer."""
    if id(optimizer) not in _WATCHED:
        known = _WATCHED[id(optimizer)] = Watched(optimizer)
        weakref.finalize(optimizer, _forget, id(optimizer)).atexit = False
        if getattr(optimizer, "built", False):
            known.build(optimizer)
    return _WATCHED[id(optimizer)]


def _of_inner(optimizer: Any) -> Watched:
    """Returns what is known of an optimizer, or of the one that it is around."""
    return _of(getattr(optimizer, "inner_optimizer", optimizer))


def _forget(number: int) -> None:
    _note(_WATCHED.pop(number))


def _watch_apply(kind: type) -> None:
    """Notes that optimizers of a class take steps, when they do."""
    apply: Any = vars(kind)["apply"]

    @functools.wraps(apply)
    def watched_apply(self: Any, *args: Any, **kwargs: Any) -> Any:
        _of(self).was_applied = True
        return apply(self, *args, **kwargs)

    watched_apply._is_watched = True  # type: ignore[attr-defined]
    kind.apply = watched_apply  # type: ignore[attr-defined]


def _watch_copies(owner: Any, name: str) -> None:
    """Notes what has been trained in the clear so far before weights are written or handed out."""
    copy = getattr(owner, name)

    @functools.wraps(copy)
    def watched_copy(self: Any, *args: Any, **kwargs: Any) -> Any:
        # Of what is copied alone: copies are made layer by layer, too.
        note_in_the_clear({id(variable) for variable in self.weights})
        return copy(self, *args, **kwargs)

    setattr(owner, name, watched_copy)


class _AtImport(importlib.abc.MetaPathFinder):
    """Begins to watch as soon as Keras has been imported."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name != "keras":
            return None
        with contextlib.suppress(ValueError):  # another thread was faster
            sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_watch(module: Any) -> None:
                execute(module)
                watch()

            spec.loader.exec_module = execute_and_watch  # type: ignore[method-assign]
        return spec


def _note(known: Watched, among: set[int] | None = None) -> None:
    """Notes what an optimizer has trained in the clear, before that can't be told any more."""
    try:
        if known.steps_in_the_clear:
            trained = Trained(known, among)
            if known.noted is None or not trained.digests <= known.noted:
                _TRAINED.append(trained)
                known.noted = trained.digests | (known.noted or set())
    except Exception:
        _TRAINED.append(known)


def _was_never_fitted(model: Any) -> bool:
    """Returns whether a compiled model came from a file and took no step in this process."""
    compiled = getattr(model, "optimizer", None) is not None
    return compiled and model.train_function is None and getattr(model, "history", None) is None


def _subclasses(kind: type) -> set[type]:
    """Returns a class with all that derive from it."""
    return {kind}.union(*map(_subclasses, kind.__subclasses__()))


if "keras" in sys.modules:
    watch()
else:
    sys.meta_path.insert(0, _AtImport())
