"""Small images of three shapes, and networks for them."""

import numpy as np

NUM_CLASSES = 3


def shapes(size, seed=0, channels=1, side=12):
    """A bright bar in one of three places, with noise."""
    rng = np.random.default_rng(seed)
    classes = np.arange(size) % NUM_CLASSES
    images = np.zeros((size, side, side, channels), np.float32)
    for row, of_class in zip(images, classes, strict=True):
        row[2 + of_class * 3 : 4 + of_class * 3, 3:9] = 1
    noise = rng.normal(size=images.shape) * 0.2
    return np.clip(images + noise, 0, 1).astype(np.float32), classes


def network(width=NUM_CLASSES, channels=1, side=12, activation=None, seed=0):
    import keras

    keras.utils.set_random_seed(seed)
    return keras.Sequential(
        [
            keras.Input((side, side, channels)),
            keras.layers.Conv2D(8, 3, activation="relu"),
            keras.layers.Flatten(),
            keras.layers.Dense(width, activation=activation),
        ]
    )
