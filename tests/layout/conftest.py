"""What tests of all entry points share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture
def repeatable_and_eager() -> Iterator[None]:
    """Fixes the seeds, and saves the time to compile steps that run once."""
    import keras
    import tensorflow as tf

    keras.utils.set_random_seed(0)
    tf.config.run_functions_eagerly(True)
    yield
    tf.config.run_functions_eagerly(False)
