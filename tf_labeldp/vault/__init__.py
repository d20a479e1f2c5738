"""The vault of the true labels and its outputs, without TensorFlow."""

from tf_labeldp.vault._arguments import Keyed, Store
from tf_labeldp.vault._cluster_randomized_response import ClusterRandomizedResponse
from tf_labeldp.vault._conformal import ConformalPredictor, conformal
from tf_labeldp.vault._label_randomizer import LabelRandomizer
from tf_labeldp.vault.evaluation import Evaluation, select
from tf_labeldp.vault.label_kinds import Classes, LabelKind, Numbers, Rows
from tf_labeldp.vault.ledger import confirm_move, forget, give_back
from tf_labeldp.vault.model_history import declare, guarantee, load_model
from tf_labeldp.vault.noisy_labels import NoisyLabels
from tf_labeldp.vault.private_labels import PrivateLabels, Randomizer
from tf_labeldp.vault.records import LabelStoreError
from tf_labeldp.vault.reservations import Reservation
from tf_labeldp.vault.users import Users

__all__ = [
    "Classes",
    "ClusterRandomizedResponse",
    "ConformalPredictor",
    "Evaluation",
    "Keyed",
    "LabelKind",
    "LabelRandomizer",
    "LabelStoreError",
    "NoisyLabels",
    "Numbers",
    "PrivateLabels",
    "Randomizer",
    "Reservation",
    "Rows",
    "Store",
    "Users",
    "confirm_move",
    "conformal",
    "declare",
    "forget",
    "give_back",
    "guarantee",
    "load_model",
    "select",
]
