"""The parts of the library: their order, the packages that each may import, their most lines.

A part may import the parts above it. BUILD loads this file; the layout tests read it as Python and
compare the code and CONTRIBUTING.md with it.
"""

# Each part, with the third-party packages that it may import; ["*"] is any.
PARTS = {
    "_validate": ["numpy"],
    "_progress": ["tqdm"],
    "accounting": ["numpy", "scipy", "dp_accounting"],
    # TensorFlow for the noise of training steps, which only `training` imports.
    "mechanisms": ["numpy", "scipy", "opendp", "tensorflow"],
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
    "features": ["numpy", "scipy", "sklearn", "faiss", "keras", "threadpoolctl"],
    "self_supervised": ["numpy", "keras"],
    "semi_supervised": ["numpy", "keras", "sklearn"],
    "heads": ["numpy", "scipy", "sklearn", "keras", "threadpoolctl"],
    "data": ["numpy", "tensorflow"],
    "gradients": ["numpy", "keras", "tensorflow"],
    "training": ["numpy", "dp_accounting", "keras", "tensorflow"],
    "pate": ["numpy", "keras", "sklearn"],
    "front_door": ["numpy", "sklearn", "keras"],
    # matplotlib for a plot, on its call.
    "audit": ["numpy", "scipy", "matplotlib"],
    # The same, for the page of a report; Keras to read models.
    "dossier": ["numpy", "keras", "matplotlib"],
    "tf_privacy": ["numpy", "keras", "tensorflow", "tensorflow_privacy"],
    # The engines are extras: `scale` itself loads none of them.
    "scale": ["numpy", "filelock", "pyarrow", "tensorflow", "apache_beam", "pyspark", "tfx"],
    "cli": ["*"],
}

# Outside the order: the building blocks, which know Keras alone. Parts that may load Keras use them.
OUTSIDE = {
    "keras_layers": ["numpy", "keras"],
}

# The most lines of each part, with its docstrings; "" is the front.
MOST_LINES = {
    "": 139,
    "_validate": 265,
    "_progress": 85,
    "keras_layers": 1026,
    "accounting": 2879,
    "mechanisms": 4437,
    "estimation": 564,
    "vault": 5485,
    "features": 2360,
    "self_supervised": 550,
    "semi_supervised": 746,
    "heads": 2884,
    "data": 1126,
    "gradients": 2715,
    "training": 4014,
    "pate": 449,
    "front_door": 737,
    "audit": 607,
    "dossier": 800,
    "tf_privacy": 470,
    "scale": 1201,
    "cli": 2790,
}
