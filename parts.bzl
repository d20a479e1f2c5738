"""The parts of the library: their order, and the packages that each may import.

A part may import the parts above it. BUILD loads this file; the layout tests read it as Python and
compare the code and CONTRIBUTING.md with it.
"""

# Each part, with the third-party packages that it may import; ["*"] is any.
PARTS = {
    "_columns": ["numpy"],
    "_progress": ["tqdm"],
    "_validate": ["numpy"],
    # Keras for the last layer of a model, on the call.
    "_checks": ["numpy", "keras"],
    "accounting": ["numpy", "scipy", "dp_accounting"],
    # The type of an event, and TensorFlow for the noise of training steps, which only `training`
    # imports.
    "mechanisms": ["numpy", "scipy", "dp_accounting", "opendp", "cryptography", "tensorflow"],
    "estimation": ["numpy", "scipy", "sklearn", "opendp", "threadpoolctl"],
    # Files of tables and the lock of a store; TensorFlow for `to_dataset`, and Keras for the
    # histories of models, on their calls.
    "vault": [
        "numpy",
        "dp_accounting",
        "filelock",
        "pyarrow",
        "cryptography",
        "tensorflow",
        "keras",
    ],
    "features": ["numpy", "scipy", "sklearn", "faiss", "keras", "pyarrow", "threadpoolctl"],
    "self_supervised": ["numpy", "keras"],
    "semi_supervised": ["numpy", "keras", "sklearn"],
    "heads": ["numpy", "scipy", "sklearn", "keras", "threadpoolctl"],
    "data": ["numpy", "scipy", "tensorflow"],
    # LightGBM is an extra.
    "boosting": ["numpy", "scipy", "sklearn", "lightgbm", "keras"],
    "gradients": ["numpy", "keras", "tensorflow"],
    "training": ["numpy", "dp_accounting", "keras", "tensorflow"],
    "pate": ["numpy", "keras", "sklearn"],
    "front_door": ["numpy", "scipy", "sklearn", "keras"],
    # matplotlib for a plot, on its call.
    "audit": ["numpy", "scipy", "matplotlib"],
    # The same, for the page of a report; Keras to read models, h5py for the arrays in their files.
    "dossier": ["numpy", "keras", "matplotlib", "h5py", "sklearn"],
    "tf_privacy": ["numpy", "keras", "tensorflow", "tensorflow_privacy"],
    # The engines are extras: `scale` itself loads none of them.
    "scale": ["numpy", "filelock", "pyarrow", "tensorflow", "apache_beam", "pyspark", "tfx"],
    # What authors of plug-ins import, from the parts above.
    "plugins": [],
    "cli": ["*"],
}

# Outside the order: the building blocks, which know Keras alone. Parts that may load Keras use them.
OUTSIDE = {
    "keras_layers": ["numpy", "keras"],
}

# A file of a part whose name begins with an underscore is its own. Parts share public names, and the
# files without an underscore: what mechanisms, heads and engines are written with. Private files
# that another part imports nevertheless, with the number of imports and the reason:
PRIVATE_IMPORTS = {
    # Saved models name the file of each layer, so these files keep their names.
    "keras_layers._fixed_features": 2,
    "keras_layers._released_dense": 5,
    # The search of neighbours is smoothing's; SCAN needs its ids alone.
    "features._neighbour_smoothing": 1,
}
