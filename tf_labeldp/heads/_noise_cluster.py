"""A classifier from one noisy histogram of the labels by clusters of the features."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from tf_labeldp import _validate
from tf_labeldp.accounting import Private, Public, PublicInput, Receipts, Setting, public_input
from tf_labeldp.estimation.priors import histogram_prior
from tf_labeldp.features import find_clusters
from tf_labeldp.features.clusters import Clusters
from tf_labeldp.features.estimator import keras_model, note_release, with_encoder
from tf_labeldp.features.reader import FeatureRows
from tf_labeldp.heads.label_source import LabelSource
from tf_labeldp.heads.one_release_head import Head
from tf_labeldp.mechanisms import HistogramMechanism
from tf_labeldp.vault import Classes, LabelKind

_LEAST = 1e-12
"""The least share of a class by which balanced weights divide."""


@dataclasses.dataclass(eq=False, repr=False)
class NoiseCluster(Head):
    """Clusters public features, and releases the class counts of each cluster once.

    An example gets the class with the largest noisy count in its cluster. The labels only name the
    clusters, so a far smaller epsilon than for other heads is enough. Once every cluster has its
    right class, more epsilon does not help: the clusters cause the remaining errors.

    Guarantee:
        The head, with all its attributes and predictions, is (epsilon, delta)-DP for the
        replacement of one label, by one ``HistogramMechanism`` over all clusters: discrete Laplace
        noise of scale 2/epsilon for ``delta=0``, else Gaussian noise, calibrated analytically for
        an L2 sensitivity of sqrt(2). The rest is post-processing. Assumes that the features, the
        order and number of the examples and all arguments are public, and that the encoder and the
        clusters were made without the labels, except for uses that their receipts count.

    Source: Algorithm 2 and Theorem 1 of ``tang2022``, with clusters from SCAN. Ours: the noise for
    ``delta=0``, the probabilities, and the overall class shares for a cluster without a count above
    zero.

    Args:
        num_clusters: C, at least 1; None with ``clusters``.
        epsilon: finite and above zero.
        delta: in (0, 1), below 1/n for n labels, for Gaussian noise; 0 for a pure guarantee.
        num_classes: K, for labels 0..K-1. Leave it out for a vault, which has it.
        classes: the class values in the order of their codes, for other labels; public.
        encoder: as in ``features.find_clusters``; None if the inputs are features.
        clusters: clusters of the training examples from ``find_clusters``, which replace k-means on
            the features; or integers (n,), with which ``predict`` fails.
        cluster_seed: seeds k-means; public.
        class_weight: public weights above zero by class value, or ``"balanced"``, as in
            ``PrivateRidge``: they multiply the shares of the classes in each cluster.
        key: the name of the release in a vault.
        insecure_seed: makes the noise repeatable, and the statement "not private: seeded".

    Attributes:
        clusters_: the ``Clusters`` of the training examples.
        cluster_counts_: the noisy counts, (C, K).
        cluster_probabilities_: the class shares in each cluster, ``float64`` (C, K): the noisy
            counts, cut at zero and normalised.
        cluster_classes_: the class value of each cluster, (C,).
        classes_: class values (K,).
        noise_stddev_: the standard deviation of the noise on each count.

    Raises:
        ValueError: ``fit`` gets arguments out of range.

    Example:
        >>> rng = np.random.default_rng(0)
        >>> labels = np.arange(900) % 3
        >>> features = 8.0 * np.eye(3)[labels] + rng.normal(size=(900, 3))
        >>> head = NoiseCluster(3, epsilon=0.2, num_classes=3, insecure_seed=0)
        >>> head = head.fit(features, labels)
        >>> head.score(features, labels) > 0.99, head.guarantee().epsilon
        (True, 0.2)
    """

    num_clusters: int | None
    epsilon: float
    delta: float = 0.0
    _: dataclasses.KW_ONLY
    num_classes: int | None = None
    classes: Setting[Any] = None
    encoder: Public[Any] = None
    clusters: Public[Any] = None
    cluster_seed: int = 0
    class_weight: Public[Any] = None
    key: str | None = None
    insecure_seed: int | None = None

    @_validate.clears_frames
    def fit(self, X: Public[Any], y: Private[Any]) -> NoiseCluster:
        """Clusters the features, and releases the counts of the labels by cluster.

        Args:
            X: numbers (n, ...), or inputs of ``encoder``; unused with ``clusters``, and may
                then be None.
            y: classes (n,), which are put into a vault with the budget (epsilon, delta); or a
                ``PrivateLabels`` with classes, which charges the release to its own budget.

        Returns:
            The head itself.

        Raises:
            BudgetExceededError: a vault's budget does not allow the release; nothing was released.
            TypeError: features or labels have a wrong type.
            ValueError: the features are not finite or have a wrong shape; the labels are outside
                the classes, or numbers; arguments are out of range, missing or superfluous.
            RuntimeError: labels are an array in a worker process (``n_jobs``).

        Warns:
            UserWarning: delta is above 1/n; or there was an earlier fit on these rows, whose
                release the statement then includes.
        """
        source = LabelSource(self, y, self._mechanism)
        public = public_input(X, self.clusters, self.class_weight)
        features = public.value[0]
        if self.clusters is None:
            features = self._checked_inputs(features, encoder=self.encoder)
        # One reading of a data set serves the clusters and the digests.
        rows = FeatureRows(features)
        read = rows.joined()
        clusters = self._clusters_of(public.with_value(read))
        _validate.one_label_per_row(len(clusters), len(source.vault))
        public = public_input(public, clusters).with_value(clusters.assignments)
        digests = None if features is None else FeatureRows(read).digests()
        # Sensitivity: one label moves two counts by one. The mechanism adds the noise.
        mechanism: Any = source.mechanism
        found, receipts = source.release(mechanism, public, digests, self._family_of_clones())
        # The release ends with the last cluster that has an example.
        counts = np.zeros((clusters.num_clusters, mechanism.num_classes), found.values.dtype)
        counts[: len(found.values)] = found.values
        overall = histogram_prior(counts.sum(axis=0))
        has_count = np.any(counts > 0, axis=1, keepdims=True)
        shares = np.where(has_count, histogram_prior(counts), overall)
        # A class without a count above zero stays without one.
        class_weight = PublicInput.bare(self.class_weight)
        shares = shares * source.kind.class_weights(class_weight, np.maximum(overall, _LEAST))
        shares /= shares.sum(axis=1, keepdims=True)
        cluster_classes = source.vault.decode(shares.argmax(axis=1))
        is_array = self.clusters is None and not isinstance(features, tuple)
        is_array = is_array and self.encoder is None
        # After all that can fail: a failed fit changes neither a fitted head nor its statement.
        self.receipts_, self.clusters_ = receipts, clusters
        self.classes_ = source.kind.class_values
        self.noise_stddev_, self.cluster_counts_ = mechanism.noise_stddev, counts
        self.cluster_probabilities_, self.cluster_classes_ = shares, cluster_classes
        self._input_shape = np.shape(features)[1:] if is_array else ()
        if features is not None:
            self._remember_columns(rows.columns, rows.width(1))
        return self

    def predict(self, X: Public[Any]) -> np.ndarray:
        """Returns the class values (m,) of the nearest clusters.

        Args:
            X: (m, ...), as in ``fit``.

        Raises:
            ValueError: the head was fitted with bare assignments, which have no centres.
        """
        clusters = self._clusters(X)
        return self.cluster_classes_[clusters]

    def predict_proba(self, X: Public[Any]) -> np.ndarray:
        """Returns the class shares in the nearest clusters, ``float64`` (m, K)."""
        clusters = self._clusters(X)
        return self.cluster_probabilities_[clusters]

    def to_keras(self, encoder: Public[Any] = None) -> Any:
        """Returns a ``keras.Model`` for the probabilities, with fixed weights; it saves and loads.

        Import ``tf_labeldp.keras_layers`` before you load it in another program. It works in single
        precision: a row equally near to two centres up to rounding may get the other centre.

        Args:
            encoder: a Keras model from raw inputs to the features (m, d), put in front; None for
                the encoder of the clusters.

        Raises:
            TypeError: the encoder of the clusters is a plain function; pass ``encoder``.
            ValueError: the clusters have no centres, or the encoder has other outputs.
        """
        self._check_fitted()
        clusters = self.clusters_
        if clusters.centres is None:
            raise ValueError(
                "the export needs centres, and the head was fitted with bare assignments. Fit it "
                "with features, or with clusters from find_clusters."
            )
        import keras

        from tf_labeldp.keras_layers._fixed_features import NearestCentre

        width = clusters.centres.shape[1]
        public = public_input(clusters.encoder if encoder is None else encoder)
        encoder = public.value
        if encoder is None and len(self._input_shape) > 1:
            inputs = keras.Input(self._input_shape, name="features")
            rows = keras.layers.Reshape((width,), dtype="float32", name="flat")(inputs)
        else:
            inputs, rows = with_encoder(encoder, width)
        layer = NearestCentre(clusters.centres, self.cluster_probabilities_, name="head")
        model = keras_model(inputs, layer(rows), "noise_cluster")
        receipts = Receipts.merged(self.receipts_, public.receipts)
        note_release(layer, receipts, [layer.outputs])  # the centres are public
        return self._recorded(self._with_facts(model), encoder)

    def _clusters(self, X: Any) -> np.ndarray:
        self._check_fitted()
        return self.clusters_.assign(self._checked_inputs(X, encoder=self.encoder, is_fitted=True))

    def _clusters_of(self, features: PublicInput[Any]) -> Clusters:
        if self.clusters is None:
            if features.value is None or self.num_clusters is None:
                raise ValueError("expected features and num_clusters. Pass both, or clusters=.")
            return find_clusters(
                features, self.num_clusters, encoder=self.encoder, seed=self.cluster_seed
            )
        if self.num_clusters is not None or self.encoder is not None:
            raise ValueError(
                "expected clusters, or num_clusters with an optional encoder, got both. Leave out "
                "either."
            )
        return Clusters.of(self.clusters)

    def _mechanism(self, kind: LabelKind) -> HistogramMechanism:
        if not isinstance(kind, Classes):
            raise ValueError(
                "NoiseCluster expected classes, got numbers or rows of labels. Use PrivateRidge."
            )
        kind.class_weights(PublicInput.bare(self.class_weight))
        delta = _validate.number_in("delta", self.delta, "[0, 1)")
        noise = "gaussian" if delta > 0.0 else "discrete_laplace"
        return HistogramMechanism(self.epsilon, kind.num_classes, noise=noise, delta=delta)
