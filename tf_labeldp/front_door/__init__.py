"""The front door: one call fits a model on private labels, chosen from public facts alone."""

from tf_labeldp.front_door._estimators import PrivateClassifier, PrivateRegressor
from tf_labeldp.front_door._recommend import recommend
from tf_labeldp.front_door._search import PrivateSearchCV

__all__ = ["PrivateClassifier", "PrivateRegressor", "PrivateSearchCV", "recommend"]
