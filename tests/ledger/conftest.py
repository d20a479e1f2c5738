"""Each test starts from fixed weights, without the trainings of other tests."""

from __future__ import annotations

import keras
import pytest


@pytest.fixture(autouse=True)
def isolated(forget):
    keras.utils.set_random_seed(0)
    forget()
