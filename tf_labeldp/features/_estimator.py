"""What scikit-learn expects of an estimator, without importing it."""

from __future__ import annotations

import inspect
from typing import Any, TypeVar

_Self = TypeVar("_Self", bound="Estimator")


class _Family:
    """Stands for an estimator and its clones."""


class Estimator:
    """Parameters by the names of ``__init__``'s arguments; fitted values end in ``_``."""

    def get_params(self, deep: bool = True) -> dict[str, Any]:
        """Returns the constructor's arguments by name.

        Args:
            deep: for scikit-learn's sake; there are no estimators inside.
        """
        names = inspect.signature(type(self).__init__).parameters
        return {name: getattr(self, name) for name in names if name != "self"}

    def set_params(self: _Self, **params: Any) -> _Self:
        """Sets arguments of the constructor by name; the next ``fit`` uses them."""
        known = self.get_params()
        for name, value in params.items():
            if name not in known:
                raise ValueError(
                    f"{type(self).__name__} has no parameter {name!r}; it has {sorted(known)}."
                )
            setattr(self, name, value)
        return self

    def __sklearn_clone__(self: _Self) -> _Self:
        # scikit-learn would clone an encoder too: unfitted, or a Keras model that no one knows to
        # have seen labels.
        made = type(self)(**self.get_params())
        made._family = self._family_of_clones()
        return made

    def _family_of_clones(self) -> object:
        """Returns what is the same object for this estimator and all its clones."""
        if not hasattr(self, "_family"):
            self._family: object = _Family()
        return self._family

    def _refuse_unfitted(self, attribute: str, call: str) -> None:
        """Raises if ``fit`` has not set the attribute."""
        if not hasattr(self, attribute):
            raise ValueError(f"this {type(self).__name__} is not fitted; call {call} first.")

    def __repr__(self) -> str:
        defaults = inspect.signature(type(self).__init__).parameters
        shown = [
            f"{name}={value!r}"
            for name, value in self.get_params().items()
            if value is not defaults[name].default and repr(value) != repr(defaults[name].default)
        ]
        return f"{type(self).__name__}({', '.join(shown)})"


def supervised_tags(*, is_number: bool) -> Any:
    """Returns scikit-learn's tags of an estimator that is fitted to labels.

    Args:
        is_number: whether labels are numbers, not classes.
    """
    from sklearn import utils

    return utils.Tags(
        estimator_type="regressor" if is_number else "classifier",
        target_tags=utils.TargetTags(required=True),
        classifier_tags=None if is_number else utils.ClassifierTags(),
        regressor_tags=utils.RegressorTags() if is_number else None,
    )
