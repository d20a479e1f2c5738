"""LP-2ST on real images: the second stage's labels are as good as their channel says."""

from __future__ import annotations

import _datasets
import _models
import keras
import numpy as np
import pytest

import tf_labeldp as ldp

EPSILON = 2.0
NUM_EXAMPLES = 12_000


@pytest.mark.slow
@pytest.mark.data
@pytest.mark.parametrize("name", ["mnist", "fashion_mnist"])
def test_second_stage_labels_beat_randomized_response(kit, data_dir, name):
    data = _datasets.load(name, data_dir)
    x, y = data.x_train[:NUM_EXAMPLES], data.y_train[:NUM_EXAMPLES]
    labels = ldp.PrivateLabels(y, 10, budget=ldp.PrivacyBudget(EPSILON), insecure_seed=1)
    stages = kit.stages(x, labels, epsilon=EPSILON, epochs_per_stage=3, temperature=0.5)
    model = _models.small_cnn((28, 28, 1), 10)
    model.compile("adam", keras.losses.CategoricalCrossentropy(from_logits=True))
    kit.fit(stages, model)

    mechanism, rows, priors = kit.draws[1]
    agreed = stages._stored(1).values == y[rows]
    # Probability that each label came out as it is, under its own prior.
    k = mechanism.optimal_k(priors)
    own = priors[np.arange(rows.size), y[rows]]
    inside = np.count_nonzero(priors > own[:, np.newaxis], axis=1) < k
    keep = np.where(inside, np.exp(EPSILON) / (np.exp(EPSILON) + k - 1), 0.0)
    spread = 5 * np.sqrt(np.sum(keep * (1 - keep)) + 1)
    assert abs(agreed.sum() - keep.sum()) < spread
    # The check sees a channel of another epsilon ...
    nearby = np.where(inside, np.exp(1.5) / (np.exp(1.5) + k - 1), 0.0)
    assert abs(agreed.sum() - nearby.sum()) > spread
    # ... and the labels are better than those of plain randomized response.
    plain = np.exp(EPSILON) / (np.exp(EPSILON) + 9)
    assert agreed.sum() > rows.size * plain + 5 * np.sqrt(rows.size * plain * (1 - plain))
