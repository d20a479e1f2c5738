"""Images and noisy labels for the tests of learners."""

import pytest
from _shapes import NUM_CLASSES, shapes

import tf_labeldp as ldp


@pytest.fixture(scope="session")
def images():
    return shapes(300)


@pytest.fixture(scope="session")
def noisy(images):
    labels = ldp.PrivateLabels(
        images[1], NUM_CLASSES, budget=ldp.PrivacyBudget(1.5), insecure_seed=0
    )
    return labels.randomize(ldp.RandomizedResponse(1.5, NUM_CLASSES))
