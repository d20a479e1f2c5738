"""From the `base` of `LabelWeightedLoss` to a function of one-hot targets."""

import functools
import inspect
from collections.abc import Callable
from typing import Any

import keras

_CLOSED_FORM_NAMES = frozenset(
    {
        "categorical_crossentropy",
        "CategoricalCrossentropy",
        "sparse_categorical_crossentropy",
        "SparseCategoricalCrossentropy",
    }
)


def resolve_base(base: Any, from_logits: bool) -> Callable[[Any, Any], Any] | None:
    """The base as a function of one-hot targets; None for the closed form."""
    if isinstance(base, str):
        if base in _CLOSED_FORM_NAMES:
            return None
        function = _loss_by_name(base)
        target: Any = type(function) if isinstance(function, keras.losses.Loss) else function
        if not from_logits:
            pass
        elif "from_logits" not in inspect.signature(target).parameters:
            raise ValueError(
                f'from_logits=True, but the base loss "{base}" takes no `from_logits`. Set '
                "from_logits=False and give it the scores it expects, or pass a callable "
                "base(y_true, y_pred) that converts the logits itself."
            )
        elif isinstance(target, type):
            function = target(from_logits=True)
        else:
            return functools.partial(function, from_logits=True)
    else:
        function = base
        if not callable(base):
            raise ValueError(
                "`base` must be the name of a Keras loss, a keras.losses.Loss instance or a "
                f"callable base(y_true, y_pred). Received: {base!r} of type "
                f"{type(base).__name__}."
            )
        if (
            isinstance(base, keras.losses.SparseCategoricalCrossentropy)
            or base is keras.losses.sparse_categorical_crossentropy
        ):
            raise ValueError(
                f"`base` gets one-hot targets, and {base!r} expects integer ones. Pass "
                'base="sparse_categorical_crossentropy" (with from_logits) instead.'
            )
        if from_logits:
            raise ValueError(
                "from_logits=True is passed on to a base given by name alone. Received: "
                f"base={base!r}. Set from_logits on the instance, or convert inside the callable, "
                "and leave from_logits=False here."
            )
    # A Loss instance is taken unreduced: `call`, not `__call__`.
    return function.call if isinstance(function, keras.losses.Loss) else function


def _loss_by_name(name: str) -> Any:
    function = keras.saving.get_registered_object(name)
    if function is not None:
        return function() if isinstance(function, type) else function
    try:
        return keras.losses.get(name)
    except ValueError as error:
        raise ValueError(
            f'Unknown base loss "{name}". Expected the name of a function or class in '
            'keras.losses (such as "categorical_crossentropy" or "mse"), or of one registered '
            "with keras.saving.register_keras_serializable; for any other, pass the callable."
        ) from error
