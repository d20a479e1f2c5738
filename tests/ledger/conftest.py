"""Each test starts from fixed weights, without the trainings of other tests."""

from __future__ import annotations

import keras
import pytest

from tf_labeldp.heads import label_source


@pytest.fixture(autouse=True)
def isolated(monkeypatch, forget):
    keras.utils.set_random_seed(0)
    monkeypatch.setattr(label_source, "_FITS", label_source._Fits())
    forget()
