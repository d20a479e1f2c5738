"""Public inputs: values that enter a computation next to the labels, with their receipts.

``public_input`` is the only entry. It reads the receipts that values carry. A Keras model carries
receipts, or shows training that no receipt covers, or has no known history, which statements name
as an assumption.
"""

from __future__ import annotations

import collections
import dataclasses
import datetime
import decimal
import functools
import hashlib
import math
import sys
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any, ClassVar, Generic, TypeVar

import numpy as np

from tf_labeldp._columns import Column
from tf_labeldp._validate import counted
from tf_labeldp.accounting._annotations import Public, Setting
from tf_labeldp.accounting._guarantee import NO_RECORD, Assumption, PrivacyGuarantee
from tf_labeldp.accounting.budget import Charge
from tf_labeldp.accounting.events import EventFields
from tf_labeldp.accounting.receipt import Receipt
from tf_labeldp.accounting.receipts import Receipts

_Value = TypeVar("_Value")
NO_RECEIPTS = (
    "expected noisy labels with receipts, got none. Give the result of PrivateLabels.randomize, or "
    "another object with receipts: a head, a model, a vault, receipts or a statement."
)
_WITHOUT_INTEGERS = 2
"""The last format of files without digests of weights that are integers."""
_MOST_PARTS = 100_000
"""Most objects of a value that are searched. A larger value is refused: the cost of a receipt in a
part that was not searched would be lost."""
_ATOMS = (
    *(type(None), types.ModuleType, type, str, bytes, int, float, complex, np.generic),
    *(decimal.Decimal, datetime.date, datetime.time, datetime.timedelta),
)
"""Values without parts."""
_OPAQUE = frozenset(
    "builtins functools keras tensorflow numpy scipy pandas polars pyarrow jax torch faiss".split()
)
"""Libraries whose objects carry no receipts in their attributes."""


@dataclasses.dataclass(frozen=True, eq=False)
class PublicInput(Generic[_Value]):
    """A value that enters a computation next to the labels, with the receipts that it carries.

    Attributes:
        value: the rows, or the object; None if there is none.
        receipts: receipts of the uses of labels that the value was made of.

    Example:
        >>> public_input([0.5, 0.5]).receipts
        ()
    """

    value: Setting[_Value]
    receipts: tuple[Receipt, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "receipts", Receipts(self.receipts))

    @functools.cached_property
    def digest(self) -> str | None:
        """A digest of the value: its own ``digest()``, or a digest of its content as an array."""
        if self.value is None:
            return None
        if hasattr(self.value, "digest"):  # Such a value may be too large for memory.
            return str(self.value.digest())
        return PublicInput.digest_of(np.asarray(self.value))

    @staticmethod
    def bare(value: Setting[Any]) -> Any:
        """Returns the value of a ``PublicInput``, and any other object unchanged."""
        return value.value if isinstance(value, PublicInput) else value

    @staticmethod
    def digest_of(*arrays: Setting[np.ndarray]) -> str:
        """Returns a digest of the dtypes, shapes and contents of public arrays."""
        digest = hashlib.sha256()
        for array in arrays:
            contiguous = np.ascontiguousarray(array)
            digest.update(f"{contiguous.dtype.str}{contiguous.shape}".encode())
            digest.update(contiguous.tobytes())
        return digest.hexdigest()

    @staticmethod
    def sources_of(values: Setting[Iterable[Any]]) -> tuple[Receipt, ...]:
        """Returns the receipts of everything that a training took labels from.

        Args:
            values: noisy labels, heads, models; vaults, receipts and statements at their value.

        Raises:
            ValueError: one of them has no receipts.
        """
        found: list[tuple[Receipt, ...]] = []
        for value in values:
            public = public_input(value)
            receipts, inner = public.receipts, public.value
            if isinstance(inner, Receipt):
                receipts = (inner,)
            elif isinstance(inner, PrivacyGuarantee):
                receipts = (Receipt.of_statement(inner),)
            elif isinstance(inner, (list, tuple)) and not isinstance(value, PublicInput):
                receipts = PublicInput.sources_of(inner)
            own = getattr(inner, "receipts", receipts)  # The receipts of a vault are a property.
            if hasattr(inner, "label_set"):
                receipts = Receipts.merged(receipts, own)
            # Receipts of priors do not cover the draw of noisy labels that have none.
            if not receipts or own == ():
                raise ValueError(NO_RECEIPTS)
            found.append(receipts)
        if not found:
            raise ValueError(NO_RECEIPTS)
        return Receipts.merged(*found)

    def with_value(self, value: Setting[Any]) -> PublicInput:
        """Returns another value that was made of this value, with the same receipts."""
        return PublicInput(value, self.receipts)


@dataclasses.dataclass(frozen=True, eq=False)
class LayerHistory:
    """The known history of a Keras layer.

    Attributes:
        receipts: receipts of all counted uses.
        digests: digests of its weights at the end of the last counted training; None during a
            training, and while weights are read from a file.
        trained: whether a counted training of the layer began.
        steps: in a file, the number of optimizer steps that receipts cover.
        changed: during a counted training, and after one that was interrupted, returns the weights
            that have other values than its last step left.
        has_integers: whether the digests include those of integers, which 0.3 left out.
    """

    ATTRIBUTE: ClassVar[str] = "label_dp_history"
    """The attribute of a Keras layer for its history, in a saveable object."""

    receipts: tuple[Receipt, ...] = ()
    digests: frozenset[bytes] | None = None
    trained: bool = False
    steps: int | None = None
    changed: Callable[[Iterable[Any]], list[Any]] | None = None
    has_integers: bool = True

    @staticmethod
    def of(layer: Any) -> LayerHistory | None:
        """Returns the history of a layer's trainings, or None."""
        holder = _fields(layer).get(LayerHistory.ATTRIBUTE)
        return None if holder is None else holder.history

    def guarantee(self, delta: float | None = None) -> PrivacyGuarantee:
        """Returns the statement of a Keras model with this history.

        Free receipts, such as that of a public encoder, are no record of its training, except for
        the declaration of an author.
        """
        is_recorded = any(
            receipt.declares_history or receipt.charge.event_fields != EventFields.NONE
            for receipt in self.receipts
        )
        stated = Receipts(self.receipts).guarantee(delta)
        if not is_recorded:
            stated = dataclasses.replace(stated, epsilon=math.inf, assumptions=(NO_RECORD,))
        return stated.with_assumptions([Assumption.INITIAL_WEIGHTS])

    def to_bytes(self) -> bytes:
        """Returns the history in the format of model files."""
        digests = None if self.digests is None else sorted(digest.hex() for digest in self.digests)
        return Receipts(self.receipts).to_bytes(digests=digests, steps=self.steps)

    @classmethod
    def from_bytes(cls, content: bytes) -> LayerHistory:
        """Returns the history that ``to_bytes`` wrote; ``ReceiptError`` if the content changed."""
        receipts, data = Receipts.from_bytes(content)
        digests = data.get("digests")
        if digests is not None:
            digests = frozenset(map(bytes.fromhex, digests))
        has_integers = data["format"] > _WITHOUT_INTEGERS
        return cls(receipts, digests, True, data.get("steps"), has_integers=has_integers)


class Weights:
    """Layers and weights of Keras objects, digests of values, and the receipts of such digests."""

    by_digest: ClassVar[dict[bytes, list[tuple[Receipt, ...]]]] = {}
    """Receipts of weights, by the digest of a variable's values: final weights of counted training
    in this process, and those in the ledgers of stores that this process opened. Different
    trainings can make equal values, such as the positions of small trees: then each has an
    entry."""

    @staticmethod
    def layers_of(model: Any) -> list[Any]:
        """Returns a Keras layer with all its inner layers; an empty list for any other object."""
        flatten = getattr(model, "_flatten_layers", None)
        return list(flatten()) if callable(flatten) else []

    @staticmethod
    def own(part: Any) -> list[Any]:
        """Returns the variables of a layer or TensorFlow module, without those of inner layers."""
        if layers := Weights.layers_of(part):
            inner = {
                id(weight) for layer in layers if layer is not part for weight in layer.weights
            }
            return [weight for weight in part.weights if id(weight) not in inner]
        if type(part).__module__.startswith("tensorflow."):  # from tf.saved_model.load
            variable: Any = sys.modules["tensorflow"].Variable
            return [part for part in getattr(part, "variables", ()) if isinstance(part, variable)]
        return []

    @staticmethod
    def value_of(variable: Any) -> Any:
        """Returns the value of a variable without a warning: ``numpy()`` warns on JAX."""
        keras: Any = sys.modules.get("keras")
        if keras is None or keras.backend.backend() == "tensorflow":
            return variable.numpy()
        return keras.ops.convert_to_numpy(variable)

    @staticmethod
    def digests(variables: Iterable[Any], read: Callable[[Any], Any] | None = None) -> list[bytes]:
        """Returns a digest of the values of each variable, except constants such as fresh biases.

        Constants of equal shapes are in unrelated models, whose receipts a digest would mix up.
        A variable of one number is a constant if it is 0 or 1, or is not trainable. ``read``
        returns a variable's value.
        """
        digests = []
        for variable in variables:
            values = np.asarray((read or Weights.value_of)(variable))
            if values.dtype.kind in "fV" and values.size:  # NumPy's kind of bfloat16 is V.
                content = np.ascontiguousarray(values, dtype=np.float32)
                first = content.flat[0]
                counts = content.size == 1 and getattr(variable, "trainable", True)
                if not np.any(content != first) and not (counts and first not in (0.0, 1.0)):
                    continue
                digest = hashlib.blake2b(repr(content.shape).encode(), digest_size=16)
                digest.update(content.data)
                digests.append(digest.digest())
            elif values.size > 1 and np.any(values != values.flat[0]):
                # These are quantized weights and tables.
                digests.append(bytes.fromhex(PublicInput.digest_of(values)))
        return digests

    @classmethod
    def note(cls, digests: Iterable[bytes], receipts: tuple[Receipt, ...]) -> None:
        """Records the receipts of weights with these digests for this process."""
        for digest in digests:
            origins = cls.by_digest.get(digest, [])
            if not any(_contain(origin, receipts) for origin in origins):
                others = [origin for origin in origins if not _contain(receipts, origin)]
                cls.by_digest[digest] = [*others, receipts]

    @classmethod
    def known(cls, digests: Iterable[bytes]) -> tuple[tuple[Receipt, ...], list[bytes]]:
        """Returns the receipts of weights with these digests, and the digests that are unknown."""
        digests = list(digests)
        unknown = [digest for digest in digests if digest not in cls.by_digest]
        known = [cls.by_digest[digest] for digest in digests if digest in cls.by_digest]
        found = Receipts.merged(*(origins[0] for origins in known if len(origins) == 1))
        for origins in (several for several in known if len(several) > 1):
            # Values that several trainings made are from the one that made the values next to them.
            if not any(_contain(found, origin) for origin in origins):
                found = Receipts.merged(found, *origins)
        return found, unknown

    @classmethod
    def are_known(cls, layers: list[Any]) -> bool:
        """Returns whether the weights of layers were read or copied from counted trainings.

        Only trainable weights count, except in a frozen model, where all count. For layers that
        were trained in this process, the optimizer decides, not the weights.
        """
        trainable = {id(weight) for layer in layers for weight in layer.trainable_weights}
        known, digests = set(cls.by_digest), []
        for layer in layers:
            own = [weight for weight in cls.own(layer) if not trainable or id(weight) in trainable]
            history = LayerHistory.of(layer) or LayerHistory()
            if own and history.trained:
                return False
            known |= history.digests or frozenset()
            digests += cls.digests(own)
        return bool(digests) and known.issuperset(digests)


@dataclasses.dataclass(frozen=True, eq=False)
class OptimizerSteps:
    """The steps of a Keras optimizer, and of them those that receipts cover; None has no steps."""

    # Who attaches receipts also records the number of steps that the optimizer has taken so far.
    # A plain training raises the optimizer's own number alone, so that its steps are uncovered.
    # Infinity stands for a training that charges each step, such as that of `LabelDPOptimizer`.
    ATTRIBUTE: ClassVar[str] = "label_dp_covered"
    """The attribute of a Keras optimizer for the number of steps that receipts cover."""

    optimizer: Any

    @classmethod
    def of(cls, model: Any) -> OptimizerSteps:
        """Returns the steps of a model's optimizer, or of no optimizer."""
        return cls(getattr(model, "optimizer", None))

    @property
    def inner(self) -> Any:
        """The optimizer that takes the steps: the wrapped one, or the optimizer itself."""
        return getattr(self.optimizer, "inner_optimizer", None) or self.optimizer

    @property
    def covered(self) -> float | None:
        """The number of steps that receipts cover; None if none were counted."""
        # An optimizer of this library has the number in its class.
        both = [getattr(part, self.ATTRIBUTE, None) for part in (self.optimizer, self.inner)]
        covered = [steps for steps in both if steps is not None]
        # A counted step leaves the number in an array of the backend.
        return max(map(float, map(np.asarray, covered)), default=None)

    @property
    def uncovered(self) -> int:
        """The number of steps that no receipt covers."""
        covered = self.covered or 0
        if not getattr(self.optimizer, "built", False) or covered == math.inf:
            return 0
        return max(0, int(Weights.value_of(self.inner.iterations)) - int(covered))

    @property
    def receipts(self) -> tuple[Receipt, ...]:
        """The receipts of the steps, which the momentum of the optimizer depends on."""
        receipts: tuple[Receipt, ...] = _fields(self.inner).get("receipts", ())
        if steps := self.uncovered:
            reason = f"the optimizer took {counted(steps, 'step')} that no receipt covers"
            return (*receipts, Receipt.of_unknown_training(reason))
        return receipts

    def cover(self, steps: float | None = None) -> None:
        """Records the number of steps that receipts cover; None covers all so far."""
        if self.optimizer is None:
            return
        inner = self.inner
        if steps is None:
            steps = int(Weights.value_of(inner.iterations)) if inner.built else 0
        _fields(inner)[self.ATTRIBUTE] = steps  # Keras does not track this attribute.

    def note(self, history: LayerHistory | None) -> None:
        """Records the receipts of a model's history, which the momentum depends on too."""
        if self.optimizer is not None and history is not None:
            fields = _fields(self.inner)  # Keras does not track this attribute.
            fields["receipts"] = Receipts.merged(fields.get("receipts", ()), history.receipts)


def _fields(part: Any) -> dict[str, Any]:
    """Returns the attributes of an object as they are, without its properties."""
    fields: dict[str, Any] = getattr(part, "__dict__", {})
    return fields


def public_input(*values: Public[Any]) -> PublicInput:
    """Returns one value, or a tuple of several, with the receipts that they carry.

    It finds receipts in the attributes ``receipts`` and ``receipts_``, in the history of Keras
    layers, by digests of weights, and in the parts of an object: items of containers, steps of
    pipelines, attributes, the owner of a method, the parts of a ``functools.partial``. It does not
    find values that only the body of a function names: statements name that as an assumption.

    Args:
        values: features, priors, clusters, bins, an encoder, a network, a teacher, predictions.

    Raises:
        ReceiptError: a value carries receipts that are damaged.
        ValueError: a value has more than 100,000 objects.

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
    found: list[tuple[Receipt, ...]] = []
    layers: list[Any] = []
    for part in _parts(values):
        fields = _fields(part)
        for receipts in (fields.get("receipts"), fields.get("receipts_")):
            if isinstance(receipts, tuple) and all(isinstance(part, Receipt) for part in receipts):
                found += [receipts, _of_assumptions(receipts, fields.get("assumptions"))]
        content = fields.get("label_dp_receipts")  # an attribute of head layers, also from files
        if isinstance(content, bytes) and content:
            found.append(Receipts.from_bytes(content)[0])
        if Weights.layers_of(part) or Weights.own(part):
            layers.append(part)
    found += map(_receipts_of_layer, layers)
    inside = tuple(Column.unmasked(PublicInput.bare(value)) for value in values)
    return PublicInput(inside[0] if len(inside) == 1 else inside, Receipts.merged(*found))


def _of_assumptions(receipts: tuple[Receipt, ...], assumptions: Any) -> tuple[Receipt, ...]:
    """Returns a receipt of zero cost with the assumptions that a value has next to its receipts."""
    if not receipts or not assumptions or not isinstance(assumptions, tuple):
        return ()
    last = receipts[-1]
    free = Charge(0.0, 0.0, EventFields.NONE, assumptions)
    content = repr((last.id, tuple(map(str, assumptions)))).encode()
    name = hashlib.sha256(content).hexdigest()[:32]
    what = "assumptions of noisy labels"
    return (Receipt(last.labels, free, what, "declared", time=last.time, id=name),)


def _parts(values: tuple[Any, ...]) -> Iterator[Any]:
    waiting: list[Any] = [values]
    visited: dict[int, Any] = {}
    number = 0
    while waiting:
        part = waiting.pop()
        if isinstance(part, np.ndarray) and part.dtype == object:
            part = part.ravel().tolist()
        if isinstance(part, list) and all(
            issubclass(kind, _ATOMS) for kind in set(map(type, part))
        ):
            continue  # a column of a table may have millions of texts
        if isinstance(part, _ATOMS) or type(part) is np.ndarray or id(part) in visited:
            continue
        visited[id(part)] = part
        if isinstance(part, (list, tuple, set, frozenset, collections.deque)):
            waiting.extend(part)
        elif isinstance(part, dict):
            waiting.extend(part.values())
        else:
            number += 1  # Numbers and containers do not count, so lists may have many rows.
            if number > _MOST_PARTS:
                raise ValueError(
                    f"expected a value of at most {_MOST_PARTS:,} objects, got a larger "
                    f"{type(values[0]).__name__}: its receipts can't be read. Pass the Keras model "
                    "itself."
                )
            yield part
            waiting.extend(_inside(part))


def _inside(part: Any) -> Iterable[Any]:
    if isinstance(part, PublicInput):
        return ()
    if layers := Weights.layers_of(part):
        # A loss, a Lambda or a subclass may refer to objects of the user.
        return [*layers, *_fields(part).values()]
    if isinstance(part, functools.partial):
        return [part.func, *part.args, *part.keywords.values()]
    if type(part).__module__.partition(".")[0] in _OPAQUE:
        return [getattr(part, "__self__", None)]  # the owner of a method
    return _fields(part).values()


def _receipts_of_layer(layer: Any) -> tuple[Receipt, ...]:
    """Returns the receipts of a layer; training that they do not cover adds an unknown receipt.

    Such training shows in weights that differ from the end of the last counted training, and in an
    optimizer that took more steps than receipts cover.
    """
    history, steps = LayerHistory.of(layer), OptimizerSteps.of(layer)
    found: list[tuple[Receipt, ...]] = [] if history is None else [history.receipts]
    reason = ""
    weights = Weights.own(layer)
    if history is not None and history.digests is None:
        weights = [] if history.changed is None else history.changed(weights)
    digests = set(Weights.digests(weights)).difference((history and history.digests) or ())
    receipts, unknown = Weights.known(digests)
    found.append(receipts)
    if history is not None and unknown:
        reason = f"layer {layer.name!r} was trained or changed without receipts"
    elif (
        history is not None
        and history.digests is None
        and history.trained
        and steps.optimizer is not None
        and steps.covered is None
    ):
        reason = f"{layer.name!r} was compiled again after a training that was interrupted"
    if (number := steps.uncovered) and not Weights.are_known(Weights.layers_of(layer)):
        uncovered = counted(number, "step")
        reason = f"the optimizer of {layer.name!r} took {uncovered} that no receipt covers"
    if reason:
        found.append((Receipt.of_unknown_training(reason),))
    return Receipts.merged(*found)


def _contain(receipts: tuple[Receipt, ...], others: tuple[Receipt, ...]) -> bool:
    return receipts is others or len(Receipts.merged(receipts, others)) == len(receipts)
