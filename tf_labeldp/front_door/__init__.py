"""The front door: one call for a model of private labels, chosen from public facts alone."""

from tf_labeldp.front_door._estimators import PrivateClassifier, PrivateRegressor
from tf_labeldp.front_door._recommend import recommend

__all__ = ["PrivateClassifier", "PrivateRegressor", "recommend"]
