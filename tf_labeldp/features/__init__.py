"""Public features: feature maps and clusters; loads neither TensorFlow nor Keras."""

from tf_labeldp.features._neighbour_smoothing import NeighbourSmoothing
from tf_labeldp.features._patch_dictionary import PatchDictionary
from tf_labeldp.features._random_fourier import RandomFourierFeatures
from tf_labeldp.features._table_codes import TableCodes
from tf_labeldp.features.clusters import denoise_labels, find_clusters
from tf_labeldp.features.public_encoder import PublicEncoder
from tf_labeldp.features.tables import to_inputs

__all__ = [
    "NeighbourSmoothing",
    "PatchDictionary",
    "PublicEncoder",
    "RandomFourierFeatures",
    "TableCodes",
    "denoise_labels",
    "find_clusters",
    "to_inputs",
]
