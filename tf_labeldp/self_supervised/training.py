"""The base class of learners and their batches."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from typing import Any

import keras
import numpy as np

from tf_labeldp import _validate
from tf_labeldp.accounting import PublicInput, Setting
from tf_labeldp.features.reader import FeatureRows
from tf_labeldp.self_supervised._views import checked_images, strong_views, weak_views
from tf_labeldp.vault.model_history import TrainedModel


class Learner(keras.Model):
    """A model around the user's networks and views, with a configuration of its arguments.

    A subclass keeps each argument of its constructor in the attribute of the same name.
    """

    # Added before logarithms and divisions: a normal number in single precision.
    SMALL = 1e-30

    _checks_images = False

    def __init__(self, **kwargs: Setting[Any]) -> None:
        # Parts follow their own dtype policies; losses, targets and running means are float32.
        super().__init__(autocast=False, **kwargs)

    @staticmethod
    def built_network(network: Setting[Any], name: str) -> keras.Model:
        """Returns a built Keras model with outputs (n, width), or raises a ``ValueError``."""
        is_built = isinstance(network, keras.Model) and network.built
        shape = getattr(network, "output_shape", None) if is_built else None
        if not isinstance(shape, tuple) or len(shape) != 2:
            raise ValueError(
                f"{name} must be a built Keras model with outputs (n, width), got "
                f"{type(network).__name__} with outputs {shape}. Begin it with keras.Input; end an "
                "encoder with a pooling or dense layer."
            )
        return network

    @classmethod
    def negative_log_likelihood(cls, likelihoods: Setting[Any], log_shares: Setting[Any]) -> Any:
        """Returns ``-log P[noisy label | input]`` (n,) from values of the classes (n, K)."""
        joint = log_shares + keras.ops.log(likelihoods + cls.SMALL)
        return -keras.ops.logsumexp(joint, axis=-1)

    def _set_views(self, weak: Any, strong: Any) -> None:
        """Sets weak and strong views; our own views, for None, need images in [0, 1]."""
        self._checks_images = weak is None or strong is None
        self.weak = weak_views() if weak is None else weak
        self.strong = strong_views() if strong is None else strong

    def _note_parts(self, public: PublicInput[Any]) -> None:
        self.built = True
        if public.receipts:
            TrainedModel(self).attach(public.receipts)

    def _read_images(self, images: Any) -> np.ndarray:
        rows = FeatureRows(images)
        rows.check_columns()
        images = rows.network_inputs()
        return checked_images(images) if self._checks_images else np.asarray(images)

    def evaluate(
        self,
        x: Setting[Any] = None,
        y: Setting[Any] = None,
        *args: Setting[Any],
        **kwargs: Setting[Any],
    ) -> Any:
        """Evaluates as Keras does, on classes (n,) or (n, 1) too, which become rows (n, K)."""
        if y is not None and np.shape(y)[1:] in ((), (1,)):
            classes = _validate.class_indices("y", np.ravel(y), self.num_classes)
            y = np.eye(self.num_classes, dtype=np.float32)[classes]
        return super().evaluate(x, y, *args, **kwargs)

    def get_config(self) -> dict[str, Any]:
        """Returns the arguments of the constructor."""
        signature = inspect.signature(type(self).__init__).parameters
        names = [name for name in signature if name not in ("self", "kwargs")]
        serialize = keras.saving.serialize_keras_object
        return {"name": self.name, **{name: serialize(getattr(self, name)) for name in names}}

    @classmethod
    def from_config(cls, config: dict[str, Any], custom_objects: Any = None) -> Any:
        """Returns a model with this configuration."""
        deserialize = keras.saving.deserialize_keras_object
        return cls(**{name: deserialize(part, custom_objects) for name, part in config.items()})


class Batches(keras.utils.PyDataset):
    """Shuffled batches of equal size from one or more streams of rows.

    Args:
        make: function from the rows of each stream to a batch.
        counts: number of rows in each stream.
        sizes: rows of each stream per batch.
        steps: batches per epoch; None for one pass over the last stream.
        seed: public seed of the orders.
    """

    def __init__(
        self,
        make: Any,
        counts: Iterable[int],
        sizes: Iterable[int],
        steps: int | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__()
        self._make, self._seed, self._epoch = make, seed, 0
        self._streams = list(zip(counts, sizes, strict=True))
        last, size = self._streams[-1]
        self._steps = steps or max(1, last // size)
        self._shuffle()

    def __len__(self) -> int:
        """Returns the number of batches per epoch."""
        return self._steps

    def __getitem__(self, step: int) -> Any:
        """Returns one batch."""
        rows = (
            order[step * size : (step + 1) * size]
            for order, (_, size) in zip(self._orders, self._streams, strict=True)
        )
        return self._make(*rows)

    def on_epoch_end(self) -> None:
        """Shuffles again."""
        self._epoch += 1
        self._shuffle()

    def _shuffle(self) -> None:
        rng = np.random.default_rng((self._seed, self._epoch))
        self._orders = []
        # Whole permutations keep the uses of any two rows within one of each other.
        for count, size in self._streams:
            rows = self._steps * size
            passes = [rng.permutation(count) for _ in range(-(-rows // count))]
            self._orders.append(np.concatenate(passes)[:rows])
