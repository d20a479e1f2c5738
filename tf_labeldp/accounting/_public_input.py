"""Public inputs: whatever enters a computation next to the labels, and what it was made of.

``public_input`` is the one way in. It reads the receipts that values carry; of Keras models it
knows three cases: they carry receipts; they show training that no receipt covers; or nothing is
known of them, which statements name as an assumption.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import hashlib
import math
import sys
import types
from collections.abc import Iterable, Iterator
from typing import Any, Generic, TypeVar

import numpy as np

from tf_labeldp.accounting._annotations import Public, Setting
from tf_labeldp.accounting._budget import Charge
from tf_labeldp.accounting._guarantee import Assumption
from tf_labeldp.accounting._receipts import (
    LabelSet,
    Receipt,
    Receipts,
    merge_receipts,
    receipts_from_bytes,
    receipts_to_bytes,
)

_Value = TypeVar("_Value")
HISTORY = "label_dp_history"
"""The attribute of a Keras layer that has its ``History``, in a saveable object."""
COVERED = "label_dp_covered"
"""The attribute of a Keras optimizer that has the number of steps which receipts cover."""
WEIGHTS_ASSUMED = Assumption(
    "initial-weights",
    "trainer",
    "The weights that training began with, and any that were set since, were made without these "
    "labels, except for the uses counted here.",
)
_UNCOVERED = (
    "Nothing is promised: {what}. Train with tf_labeldp.fit(model, x, noisy) or with "
    "callbacks=[tf_labeldp.RecordReceipts(noisy)]; or declare what is known: "
    "tf_labeldp.declare(model, because=...)."
)
_MOST_PARTS = 100_000
_ATOMS = (type(None), types.ModuleType, type, str, bytes, int, float, complex, np.generic)
"""Nothing that has parts."""
_OPAQUE = frozenset(
    "builtins functools keras tensorflow numpy scipy pandas polars pyarrow jax torch faiss".split()
)
"""Libraries whose objects carry no receipts in their attributes."""


@dataclasses.dataclass(frozen=True, eq=False)
class PublicInput(Generic[_Value]):
    """A value that enters a computation next to the labels, with the receipts that it carries.

    Attributes:
        value: the rows, or the object; None for none.
        receipts: of the uses of labels that the value was made of.

    Example:
        >>> public_input([0.5, 0.5]).receipts
        ()
    """

    value: Setting[_Value]
    receipts: Receipts = ()

    @functools.cached_property
    def digest(self) -> str | None:
        """A digest of the value: its own ``digest()``, or that of its content as an array."""
        if self.value is None:
            return None
        if hasattr(self.value, "digest"):  # too large for memory, perhaps
            return str(self.value.digest())
        return array_digest(np.asarray(self.value))

    def with_value(self, value: Setting[Any]) -> PublicInput:
        """Returns another value that was made of this one."""
        return PublicInput(value, self.receipts)


@dataclasses.dataclass(frozen=True, eq=False)
class History:
    """What a Keras layer was made of, as far as it is known.

    Attributes:
        receipts: of all that was counted.
        digests: of its weights at the end of the last counted training; None during one, and for
            weights that a file is read into.
        trained: whether a counted training of the layer began.
        steps: in a file, how many steps of the model's optimizer receipts cover.
    """

    receipts: Receipts = ()
    digests: frozenset[bytes] | None = None
    trained: bool = False
    steps: int | None = None

    def to_bytes(self) -> bytes:
        """Returns the history as files of models keep it."""
        found = None if self.digests is None else sorted(one.hex() for one in self.digests)
        return receipts_to_bytes(self.receipts, digests=found, steps=self.steps)

    @classmethod
    def from_bytes(cls, content: bytes) -> History:
        """Returns what ``to_bytes`` wrote; ``ReceiptError`` if it was changed since."""
        receipts, data = receipts_from_bytes(content)
        found = data.get("digests")
        digests = None if found is None else frozenset(map(bytes.fromhex, found))
        return cls(receipts, digests, True, data.get("steps"))


def public_input(*values: Public[Any]) -> PublicInput:
    """Returns one value, or a tuple of several, with the receipts that they carry.

    Receipts are found in attributes ``receipts`` and ``receipts_``, in the history of Keras layers,
    by digests of weights, and in what an object is made of: the items of containers, steps of
    pipelines, attributes, the owner of a method, the parts of a ``functools.partial``. What only
    the body of a function names is not looked at: statements name that as an assumption.

    Args:
        values: features, priors, clusters, bins, an encoder, a network, a teacher, predictions.

    Raises:
        ReceiptError: a value carries receipts that are damaged.
        ValueError: a value is made of more than 100,000 objects.

    Example:
        >>> from tf_labeldp import PrivacyBudget, PrivateLabels, RandomizedResponse
        >>> labels = PrivateLabels([0, 1, 1], num_classes=2, budget=PrivacyBudget(2.0))
        >>> noisy = labels.randomize(RandomizedResponse(0.5, 2))
        >>> shares = public_input(noisy).with_value(np.bincount(noisy.values) / 3)
        >>> [receipt.charge.epsilon for receipt in shares.receipts]
        [0.5]
    """
    if len(values) == 1 and isinstance(values[0], PublicInput):
        return values[0]
    known: list[Iterable[Receipt]] = []
    layers: list[Any] = []
    for part in _parts(values):
        if isinstance(part, PublicInput):
            known.append(part.receipts)
            continue
        fields = getattr(part, "__dict__", {})
        for held in (fields.get("receipts"), fields.get("receipts_")):
            if isinstance(held, tuple) and all(isinstance(one, Receipt) for one in held):
                known.append(held)
                known.append(_resting_on(held, fields.get("assumptions")))
        content = fields.get("label_dp_receipts")  # of a layer of a head, also from a file
        if isinstance(content, bytes) and content:
            known.append(receipts_from_bytes(content)[0])
        if layers_of(part) or own_weights(part):
            layers.append(part)
    known += (_receipts_of_layer(one) for one in layers)
    inside = tuple(map(bare, values))
    return PublicInput(inside[0] if len(inside) == 1 else inside, merge_receipts(*known))


def _resting_on(receipts: Receipts, assumptions: Any) -> Receipts:
    """Returns a receipt, free of charge, of the assumptions that a value has next to receipts."""
    if not receipts or not assumptions or not isinstance(assumptions, tuple):
        return ()
    import dp_accounting

    last, texts = receipts[-1], tuple(map(str, assumptions))
    free = Charge(0.0, 0.0, dp_accounting.NoOpDpEvent(), assumptions)
    known_by = hashlib.sha256(repr((last.id, texts)).encode()).hexdigest()[:32]
    what = "what noisy labels rest on"
    return (Receipt(last.labels, free, what, "declared", time=last.time, id=known_by),)


def bare(value: Any) -> Any:
    """Returns the value of a public input, and any other value as it is."""
    return value.value if isinstance(value, PublicInput) else value


def history_of(layer: Any) -> History | None:
    """Returns the history that a Keras layer carries."""
    holder = getattr(layer, "__dict__", {}).get(HISTORY)
    return None if holder is None else holder.history


_OF_WEIGHTS: dict[bytes, Receipts] = {}
"""What weights were made of, by the digest of a variable's values: of the final weights of counted
training in this process, and of those in the ledgers of stores that were opened in it."""


def note_digests(digests: Iterable[bytes], receipts: Receipts) -> None:
    """Notes that weights of these digests were made of these."""
    for digest in digests:
        known = _OF_WEIGHTS.get(digest)
        _OF_WEIGHTS[digest] = merge_receipts(known, receipts) if known else receipts


def known_of(digest: bytes) -> Receipts:
    """Returns what weights of a digest were made of, as far as it is known."""
    return _OF_WEIGHTS.get(digest, ())


def array_digest(*arrays: np.ndarray) -> str:
    """Returns a digest of the dtypes, shapes and contents of public arrays."""
    digest = hashlib.sha256()
    for array in arrays:
        contiguous = np.ascontiguousarray(array)
        digest.update(f"{contiguous.dtype.str}{contiguous.shape}".encode())
        digest.update(contiguous.tobytes())
    return digest.hexdigest()


def weight_digests(variables: Iterable[Any]) -> list[bytes]:
    """Returns a digest of the values of each variable, except for constants, as fresh ones are.

    A variable of one number is a constant if it is 0 or 1, or can't be trained.
    """
    digests = []
    for variable in variables:
        values = np.asarray(value_of(variable))
        if values.dtype.kind in "fV" and values.size:  # V: bfloat16
            content = np.ascontiguousarray(values, dtype=np.float32)
            first = content.flat[0]
            counts = content.size == 1 and getattr(variable, "trainable", True)
            if not np.any(content != first) and not (counts and first not in (0.0, 1.0)):
                continue
            digest = hashlib.blake2b(repr(content.shape).encode(), digest_size=16)
            digest.update(content.data)
            digests.append(digest.digest())
    return digests


def value_of(variable: Any) -> Any:
    """Returns the value of a variable; on JAX ``numpy()`` warns, on TensorFlow Keras's function."""
    keras: Any = sys.modules.get("keras")
    if keras is None or keras.backend.backend() == "tensorflow":
        return variable.numpy()
    return keras.ops.convert_to_numpy(variable)


def layers_of(model: Any) -> list[Any]:
    """Returns a Keras layer with all layers inside; an empty list for anything else."""
    flatten = getattr(model, "_flatten_layers", None)
    return list(flatten()) if callable(flatten) else []


def own_weights(part: Any) -> list[Any]:
    """Returns the variables of a layer, or of a module of TensorFlow, without its layers'."""
    if hasattr(part, "trainable_weights"):
        inner = {id(one) for layer in layers_of(part) if layer is not part for one in layer.weights}
        return [one for one in part.weights if id(one) not in inner]
    if type(part).__module__.startswith("tensorflow."):  # as tf.saved_model.load returns it
        return [one for one in getattr(part, "variables", ()) if hasattr(one, "numpy")]
    return []


def _receipts_of_layer(layer: Any) -> Receipts:
    """Returns what a layer was made of; for training that no receipt covers, one without a promise.

    Training shows by weights that are not those at the end of the last counted training, and by an
    optimizer that took more steps than receipts cover.
    """
    history, optimizer = history_of(layer), getattr(layer, "optimizer", None)
    found: list[Receipts] = [] if history is None else [history.receipts]
    what = ""
    if history is None or history.digests is not None:
        for digest in weight_digests(own_weights(layer)):
            if history is None or digest not in (history.digests or ()):
                found.append(known_of(digest))
                if history is not None and digest not in _OF_WEIGHTS:
                    what = f"layer {layer.name!r} was trained or changed without receipts"
    elif history.trained and optimizer is not None and covered_steps(optimizer) is None:
        what = f"{layer.name!r} was compiled again after a training that was interrupted"
    steps = uncovered_steps(optimizer)
    if steps and not _are_known(layers_of(layer)):
        what = f"the optimizer of {layer.name!r} took {steps} steps that no receipt covers"
    if what:
        found.append((_uncovered(what),))
    return merge_receipts(*found)


def covered_steps(optimizer: Any) -> float | None:
    """Returns how many steps of a Keras optimizer receipts cover; None where none were counted."""
    both = (optimizer, inner_optimizer(optimizer))
    return max((getattr(one, COVERED) for one in both if hasattr(one, COVERED)), default=None)


def uncovered_steps(optimizer: Any) -> int:
    """Returns how many steps of a Keras optimizer no receipt covers."""
    if optimizer is None or not getattr(optimizer, "built", False):
        return 0
    covered = covered_steps(optimizer) or 0
    if covered == math.inf:
        return 0
    return max(0, int(value_of(inner_optimizer(optimizer).iterations)) - int(covered))


def inner_optimizer(optimizer: Any) -> Any:
    """Returns the optimizer that takes the steps: itself, or the one that it is around."""
    return getattr(optimizer, "inner_optimizer", None) or optimizer


def _are_known(layers: list[Any]) -> bool:
    """Returns whether the weights of layers were read or copied from those of counted trainings.

    Those that can be trained; of a model that is frozen, all. Layers that were trained in this
    process are not asked: there the optimizer is.
    """
    trainable = {id(one) for layer in layers for one in layer.trainable_weights}
    known, digests = set(_OF_WEIGHTS), []
    for layer in layers:
        mine = [one for one in own_weights(layer) if not trainable or id(one) in trainable]
        history = history_of(layer)
        if mine and history is not None and history.trained:
            return False
        known |= (history or History()).digests or frozenset()
        digests += weight_digests(mine)
    return bool(digests) and known.issuperset(digests)


def _uncovered(what: str) -> Receipt:
    """Returns the receipt of training of which nothing is known."""
    charge = Charge.unknown(_UNCOVERED.format(what=what))
    return Receipt(LabelSet.new(0), charge, "training without receipts", "unknown")


def _parts(values: tuple[Any, ...]) -> Iterator[Any]:
    """Yields values, their layers, and what they visibly consist of."""
    waiting: list[Any] = [values]
    seen: dict[int, Any] = {}
    number = 0
    while waiting:
        part = waiting.pop()
        if isinstance(part, np.ndarray) and part.dtype == object:
            part = part.ravel().tolist()
        if isinstance(part, _ATOMS) or type(part) is np.ndarray or id(part) in seen:
            continue
        seen[id(part)] = part
        if isinstance(part, (list, tuple, set, frozenset, collections.deque)):
            waiting.extend(part)
            continue
        if isinstance(part, dict):
            waiting.extend(part.values())
            continue
        number += 1  # rows in lists are not counted
        if number > _MOST_PARTS:
            raise ValueError(
                f"expected a value of at most {_MOST_PARTS:,} objects, got a larger "
                f"{type(values[0]).__name__}: its receipts can't be read. Give the Keras model "
                "itself."
            )
        yield part
        waiting.extend(_inside(part))


def _inside(part: Any) -> Iterable[Any]:
    """Returns what an object visibly consists of."""
    if isinstance(part, PublicInput):
        return ()
    if layers := layers_of(part):  # and what a loss, a Lambda or a subclass has of the user's
        return [*layers, *vars(part).values()]
    if isinstance(part, functools.partial):
        return [part.func, *part.args, *part.keywords.values()]
    if type(part).__module__.partition(".")[0] in _OPAQUE:
        return [getattr(part, "__self__", None)]  # of a method
    return getattr(part, "__dict__", {}).values()
