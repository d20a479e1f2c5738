"""Priors for RRWithPrior from one private histogram of the labels by clusters of the features."""

from __future__ import annotations

from typing import Any

import numpy as np

from tf_labeldp.estimation._clusters import Clusters, find_clusters
from tf_labeldp.estimation._histogram import histogram_prior, private_histogram
from tf_labeldp.mechanisms import HistogramMechanism


def cluster_priors(
    features: Any,
    labels: Any,
    num_clusters: int | None,
    epsilon: float,
    encoder: Any = None,
    *,
    num_classes: int | None = None,
    clusters: Any = None,
    noise: str = "discrete_laplace",
    key: str | None = None,
    seed: int = 0,
    rng: np.random.Generator | None = None,
) -> np.ndarray:
    """Returns a prior for each example: the noisy shares of the classes in its cluster.

    The features are clustered, the labels of each cluster are counted with discrete Laplace noise
    of scale 2/epsilon, negative counts become zero, and each example gets the normalised counts of
    its cluster; uniform ones where no count is above zero. Use them for
    ``labels.randomize(RRWithPrior(...), priors=priors)`` or ``MultiStageTraining(priors=priors)``.

    Privacy: all the counts, and so all the priors, are (epsilon, 0)-DP for the replacement of one
    label: a label is in one cluster, so the clusters compose in parallel. The prior of an example
    depends on its own label, but through this release alone: what is drawn with it afterwards
    composes with it in sequence, and the epsilons add up. A vault (``PrivateLabels``) charges
    epsilon and stores the counts under ``key``; with a plain array nobody keeps account. Assumes
    that ``encoder`` and ``clusters`` were made without the labels, except through noisy labels and
    releases of the same vault; this can't be checked here.

    Source: Algorithm 4 of ``ghazi2021``, which spends 0.025 and 0.05 on 50 and 100 clusters of
    CIFAR-10; the uniform row is not in the paper.

    Args:
        features: numbers (n, ...), or what the encoder takes, as for ``find_clusters``; None with
            ``clusters``.
        labels: a ``PrivateLabels`` for classes, or integers (n,) in 0..K-1 with ``num_classes``.
        num_clusters: as for ``find_clusters``; None with ``clusters``.
        epsilon: finite and above zero; of all clusters together.
        encoder: as for ``find_clusters``.
        num_classes: K, for labels in an array; public, so it is not taken from the labels.
        clusters: clusters that are known already, ``Clusters`` or integers (n,), in place of
            features.
        noise: ``"discrete_laplace"`` or ``"laplace"``.
        key: for a vault, the name under which it stores the counts. Asking again, also in another
            run, gives the same priors and charges nothing, if the clusters are the same; keep their
            ``assignments`` beside the store to be sure.
        seed: of the clusters; public.
        rng: for an array, a generator for repeatable (not private) runs.

    Returns:
        ``float64`` (n, K); rows sum to one.

    Raises:
        BudgetExceededError: the vault's budget does not allow the release; nothing was released.
        TypeError: features, labels or clusters of a wrong kind.
        ValueError: an argument out of range, missing or superfluous; nothing was charged.

    Example:
        >>> labels = np.repeat([0, 2, 1], [600, 400, 1000])
        >>> features = np.repeat([[0.0], [9.0]], 1000, axis=0)
        >>> rng = np.random.default_rng(0)
        >>> priors = cluster_priors(features, labels, 2, epsilon=0.5, num_classes=3, rng=rng)
        >>> priors.shape, priors[[0, 1999]].round(2).tolist()
        ((2000, 3), [[0.59, 0.0, 0.41], [0.0, 1.0, 0.0]])
    """
    in_vault = hasattr(labels, "release")
    if in_vault:
        classes = int(labels.num_classes)
        if num_classes is not None and num_classes != classes:
            raise ValueError(
                f"num_classes={num_classes} is not that of the labels, {classes}. Leave it out: a "
                "PrivateLabels knows its classes."
            )
    elif num_classes is None:
        raise ValueError(
            "num_classes is missing: an array of labels does not say how many classes there are, "
            "and the number is public, not taken from the labels. Or give a PrivateLabels."
        )
    else:
        classes = num_classes
    if noise == "gaussian":
        raise ValueError(
            "cluster_priors makes one release, for which Laplace noise is smaller. Leave noise="
            "'discrete_laplace'."
        )
    mechanism = HistogramMechanism(epsilon, classes, noise=noise)
    if in_vault and not labels.has_draw(key):
        labels.check_budget(mechanism)  # before minutes of clustering
    found = _clusters(features, num_clusters, encoder, clusters, seed)
    if len(found) != len(labels):
        raise ValueError(
            f"there are {len(found)} examples in the clusters and {len(labels)} labels; give one "
            "example a label, in the same order."
        )
    counts = private_histogram(labels, classes, epsilon, found.assignments, noise, key=key, rng=rng)
    return histogram_prior(counts)[found.assignments]


def checked_clusters(clusters: Any) -> Clusters:
    """Returns ``Clusters``, also of an array of assignments."""
    return clusters if isinstance(clusters, Clusters) else Clusters.from_assignments(clusters)


def _clusters(
    features: Any, num_clusters: int | None, encoder: Any, clusters: Any, seed: int
) -> Clusters:
    if clusters is None:
        if features is None or num_clusters is None:
            raise ValueError(
                "features and num_clusters are needed to find clusters; or give clusters=."
            )
        return find_clusters(features, num_clusters, encoder=encoder, seed=seed)
    if features is not None or num_clusters is not None or encoder is not None:
        raise ValueError(
            "clusters were given, and features, num_clusters or an encoder to find others. Give "
            "None for these, or leave clusters out."
        )
    return checked_clusters(clusters)
