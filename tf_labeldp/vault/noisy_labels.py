"""Noisy labels and noisy statistics of a vault, with receipts."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import pathlib
from collections.abc import Hashable, Iterable
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from tf_labeldp import _validate
from tf_labeldp._version import MADE_BY, __version__
from tf_labeldp.accounting import (
    Assumption,
    PrivacyGuarantee,
    Public,
    PublicInput,
    Receipt,
    ReceiptError,
    Receipts,
    Setting,
    public_input,
)
from tf_labeldp.accounting.provenance import Weights
from tf_labeldp.estimation import debiased, posterior
from tf_labeldp.estimation.priors import (
    class_prior,
    estimated_prior,
    histogram_prior,
    ordered_prior,
    shift_of_clusters,
)
from tf_labeldp.mechanisms import (
    AggregateMechanism,
    ClassificationMechanism,
    HistogramMechanism,
    LabelMechanism,
    Mechanism,
    Priors,
    RegressionMechanism,
    RROnBins,
)
from tf_labeldp.mechanisms.clusters import PriorResampling
from tf_labeldp.vault._drawn_elsewhere import drawn_elsewhere, is_foreign
from tf_labeldp.vault._drawn_rows import DrawnRows
from tf_labeldp.vault.evaluation import Evaluation, evaluate_by_noisy_labels
from tf_labeldp.vault.files import PlainFile
from tf_labeldp.vault.label_kinds import Classes, LabelKind, Numbers, Rows, classes_of_mechanism
from tf_labeldp.vault.ledger import Ledger
from tf_labeldp.vault.records import Arrays, compact, content_digest

if TYPE_CHECKING:
    import tensorflow as tf

FORMAT = 1
"""The format of noisy labels; CONTRIBUTING.md has the rule by which it rises."""
_CSV_BLOCK = 1 << 26
"""Bytes of a table parsed at a time, which must hold the longest cell."""
_FEW = 32
"""Fewer noisy labels may be equal to those of another draw by chance."""
_TARGETS = ("values", "posterior", "debiased")
_NO_RECEIPT = Assumption(
    "not-promised",
    "nobody",
    "Nothing is promised: these noisy labels carry no receipt. PrivateLabels.randomize draws noisy "
    "labels that do; NoisyLabels(values, mechanism) declares those that somebody else drew.",
)


@dataclasses.dataclass(frozen=True, eq=False)
class NoisyStatistic:
    """A noisy statistic of private labels, which ``PrivateLabels.release`` returns.

    ``numpy.asarray(statistic)`` is ``values``. Every attribute may be published.

    Attributes:
        values: the statistic, as the mechanism returned it.
        mechanism: the mechanism of the release.
        groups: for a histogram by groups, the group of each label, integers (n,).
        receipts: the receipts of the cost.

    Example:
        >>> from tf_labeldp import PrivacyBudget, PrivateLabels
        >>> labels = PrivateLabels([0, 2, 1] * 99, num_classes=3, budget=PrivacyBudget(1.0))
        >>> counts = labels.release(HistogramMechanism(epsilon=0.5, num_classes=3))
        >>> counts.values.shape, np.asarray(counts.priors()).shape, counts.guarantee().epsilon
        ((3,), (3,), 0.5)
    """

    values: np.ndarray
    mechanism: AggregateMechanism
    groups: np.ndarray | None = None
    receipts: tuple[Receipt, ...] = ()

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.array(self.values, dtype=dtype)

    def guarantee(self, delta: float | None = None) -> PrivacyGuarantee:
        """Returns the statement of this release alone."""
        return Receipts(self.receipts).guarantee(delta)

    def priors(self) -> Priors:
        """Returns the shares of the classes, or of the values, as priors with the receipts.

        With groups each label has the prior of its group: the priors by cluster of ``ghazi2021``,
        Algorithm 4. Other statistics than histograms raise a ``TypeError``.
        """
        if not isinstance(self.mechanism, HistogramMechanism):
            raise TypeError(
                f"priors need a histogram, got a {type(self.mechanism).__name__}. Release a "
                "HistogramMechanism."
            )
        if self.mechanism.values is None:
            return Priors(histogram_prior(self.values), self.groups, None, self.receipts)
        totals: Any = self.receipts[-1].num_examples if self.receipts else self.values.sum()
        if self.groups is not None:
            totals = np.bincount(self.groups, minlength=len(self.values))
        prior = ordered_prior(self.values, totals, self.mechanism.noise_stddev)
        return Priors(prior, self.groups, np.asarray(self.mechanism.values), self.receipts)


@dataclasses.dataclass(frozen=True, eq=False)
class NoisyLabels:
    """Noisy labels with receipts, which ``PrivateLabels.randomize`` returns.

    ``numpy.asarray(noisy)`` is ``values``. Every attribute may be published with the features, and
    post-processing costs nothing more.

    ``NoisyLabels(answers, mechanism, classes=[...])`` are noisy labels that somebody else drew,
    such as a survey's own randomized response: class values or codes (n,), rows or numbers. Missing
    answers are left out, and ``indices`` has the others. The receipt has the epsilon of the
    mechanism, and the statement the assumption that it drew each label once. Each call counts as
    another draw, so keep the object, or ``save`` it. With explicit ``indices`` and without
    ``receipts`` nothing is promised.

    Warns:
        UserWarning: answers with frequencies that are impossible under the mechanism's channel,
            with a p-value below 0.001; or values that this process drew from a vault, whose
            receipts are added.

    Attributes:
        values: one entry per index: class codes ``int64`` (m,), numbers ``float64`` (m,), rows of
            zeros and ones ``int64`` (m, L), or noisy one-hot rows ``float32`` (m, K) from
            ``ALIBI``. Residuals of numbers are without ``priors.shift``, which ``posterior`` and
            ``debiased`` add.
        indices: the examples, ``int64`` (m,).
        mechanism: the mechanism of the draw.
        priors: the priors of the draw, one row per index or one for all; for numbers, the prior
            for which the mechanism was made; or None.
        receipts: the receipts of the labels and their priors.
        bias_correction: beta of ``debiased``, for labels resampled within clusters.
        remarks: remarks on this draw, beyond the promise.
        assumptions: assumptions of the statement beyond those of its receipts.
        classes: the class values in the order of their codes; None if the codes are the values.
        of_part: whether ``indices`` count the examples of a part of the vault (``split``); None if
            that is known from the receipts alone.

    Example:
        >>> from tf_labeldp import PrivacyBudget, PrivateLabels, RandomizedResponse
        >>> labels = PrivateLabels([0, 2, 1, 1], num_classes=3, budget=PrivacyBudget(1.0))
        >>> noisy = labels.randomize(RandomizedResponse(1.0, 3))
        >>> noisy.posterior().shape, noisy.debiased().shape, noisy.guarantee().epsilon
        ((4, 3), (4, 3), 1.0)
        >>> from tf_labeldp.mechanisms import SurveyChannel
        >>> cards = SurveyChannel.from_warner(0.7)
        >>> survey = NoisyLabels(["no", "yes", None, "no"], cards, classes=["no", "yes"])
        >>> survey.indices.tolist(), round(survey.guarantee().epsilon, 3)
        ([0, 1, 3], 0.847)
    """

    values: Public[np.ndarray]
    indices: Public[np.ndarray] = None  # type: ignore[assignment]
    mechanism: Public[LabelMechanism] = None  # type: ignore[assignment]
    priors: Public[Priors | None] = None
    receipts: tuple[Receipt, ...] = ()
    bias_correction: float | None = None
    remarks: tuple[str, ...] = ()
    assumptions: tuple[Assumption, ...] = ()
    classes: tuple[Hashable, ...] | None = None
    of_part: bool | None = None

    def __post_init__(self) -> None:
        """Keeps read-only copies of the arrays, and the receipts of all fields."""
        self._take_mechanism_second()
        public = public_input(self.values, self.indices, self.mechanism, self.priors)
        values, indices, mechanism, priors = public.value
        if mechanism is None:
            raise TypeError(
                "expected the mechanism that drew the noisy labels, got none. Give NoisyLabels("
                "values, mechanism), where mechanisms.SurveyChannel takes a table of probabilities."
            )
        if indices is None and not self.receipts:
            if isinstance(values, NoisyLabels):
                raise TypeError(
                    "expected answers that somebody else drew, got NoisyLabels, which have "
                    "receipts. Use them as they are."
                )
            foreign = drawn_elsewhere(values, mechanism, priors, self.classes)
            values, indices, classes, receipt = foreign
            for name, value in (("classes", classes), ("receipts", (receipt,))):
                object.__setattr__(self, name, value)
        values = np.array(values)
        indices = np.arange(len(values)) if indices is None else np.array(indices)
        if values.dtype.kind in "iu":
            values = values.astype(np.int64, copy=False)
        if indices.shape != values.shape[:1]:
            raise ValueError(
                f"values and indices must have the same length, got shapes {values.shape} and "
                f"{indices.shape}."
            )
        number = classes_of_mechanism(mechanism)
        if self.classes is not None and len(set(self.classes)) != number:
            raise ValueError(
                f"expected {number} different classes, one per class of {mechanism!r}, got "
                f"{self.classes}. Leave classes out for labels 0..K-1."
            )
        if number is not None and values.ndim == 1 and values.dtype.kind == "i":
            self._check_codes(values, mechanism)
        values.flags.writeable = indices.flags.writeable = False
        fields = {"values": values, "indices": indices, "mechanism": mechanism, "priors": priors}
        # Without the draw's own receipt nothing is promised, so other receipts are left out.
        if self.receipts:
            fields["receipts"] = Receipts.merged(public.receipts, self.receipts)
        for name, value in fields.items():
            object.__setattr__(self, name, value)
        self._find_draws()

    def _take_mechanism_second(self) -> None:
        """Reads ``NoisyLabels(values, mechanism)``, whose noisy labels somebody else drew."""
        if not isinstance(PublicInput.bare(self.indices), Mechanism):
            return
        third: Any = self.mechanism
        if third is not None:
            raise TypeError(
                "expected NoisyLabels(values, mechanism) with further arguments by name, got a "
                f"third one, {type(third).__name__}. Write priors= or classes=."
            )
        object.__setattr__(self, "mechanism", self.indices)
        object.__setattr__(self, "indices", None)

    @staticmethod
    def _check_codes(values: np.ndarray, mechanism: Any) -> None:
        most = mechanism.num_outputs if isinstance(mechanism, ClassificationMechanism) else None
        if most is not None and values.size and not 0 <= values.min() <= values.max() < most:
            raise ValueError(
                f"expected codes 0..{most - 1} of {mechanism!r}, got other noisy labels. Give "
                "NoisyLabels(values, mechanism, classes=[...]) with the class values."
            )

    def _find_draws(self) -> None:
        """Adds the receipts of a draw of this process to its values, if others give them as theirs.

        A receipt of somebody else's draw would otherwise erase a cost.
        """
        if len(self) < _FEW or not self.receipts:
            return
        digests = [bytes.fromhex(self.output_digest())]
        if not is_foreign(self.receipts):
            # Of two receipts with one id the first one stays; where both count, they are refused.
            with contextlib.suppress(ReceiptError):
                Weights.note(digests, self.receipts)
        elif found := Receipts(set(Weights.known(digests)[0]).difference(self.receipts)):
            object.__setattr__(self, "receipts", Receipts.merged(found, self.receipts))
            _validate.warn(
                "these noisy labels were drawn by this library, which counts that draw, too. Use "
                "the NoisyLabels of the draw as they are, or load them from their files."
            )

    def __len__(self) -> int:
        return len(self.values)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.array(self.values, dtype=dtype)

    def __repr__(self) -> str:
        return f"NoisyLabels({self.mechanism!r}, num_labels={len(self)})"

    @property
    def shift(self) -> np.ndarray | None:
        """The public predictions (m,) that a draw of residuals subtracted, or None."""
        return None if self.priors is None else self.priors.shift

    @property
    def kind(self) -> LabelKind:
        """The kind of the true labels, ``Classes``, ``Numbers`` or ``Rows``."""
        if self._is_rows_of_labels:
            return Rows(self.values.shape[1])
        number = classes_of_mechanism(self.mechanism)
        if number is None:
            if not isinstance(self.mechanism, RegressionMechanism):
                raise TypeError(
                    "expected noisy labels of classes or numbers, got labels drawn by "
                    f"{self.mechanism!r}. Draw them by a mechanism for either."
                )
            return Numbers(*self.label_range)
        return Classes(number if self.classes is None else self.classes)

    @property
    def label_range(self) -> tuple[float, float]:
        """The smallest and the largest label that the draw distinguishes."""
        mechanism: Any = self.mechanism
        low, high = mechanism.label_range()
        if self.shift is None or not len(self):
            return low, high
        return low + float(self.shift.min()), high + float(self.shift.max())

    @property
    def are_sets(self) -> bool:
        """Whether noisy labels name sets of classes, as of ``ProjectiveGeometryResponse``."""
        mechanism = self.mechanism
        return isinstance(mechanism, ClassificationMechanism) and not mechanism.outputs_are_classes

    @property
    def channel(self) -> np.ndarray | None:
        """``P[noisy class | true class]`` (K, M), for losses; None if it differs by example."""
        mechanism = self.mechanism
        if not isinstance(mechanism, ClassificationMechanism) or mechanism.uses_priors:
            return None
        return mechanism.transition_matrix()

    @property
    def shape(self) -> NoReturn:
        """Raises, since Keras reads the shape first, and would train without the receipts."""
        raise AttributeError(
            "expected targets as an array, got NoisyLabels, whose receipts Keras would lose. Call "
            "tf_labeldp.fit(model, x, noisy), or model.fit(x, noisy.posterior(), "
            "callbacks=[tf_labeldp.RecordReceipts(noisy)])."
        )

    def posterior(self, priors: Public[Any] = None) -> np.ndarray:
        """Returns the distribution of each true label given its noisy label, by Bayes' rule.

        Classes give soft targets ``float64`` (m, K), for ``keras.losses.CategoricalCrossentropy``;
        numbers give posterior means (m,); rows of labels give probabilities of ones (m, L). See
        ``estimation.posterior``.

        Bayes' rule needs the shares of the classes. A uniform prior makes a class of 3.4 % look
        like 24 % at epsilon 2. By default the shares are estimated from these noisy labels, at no
        cost beyond their receipts, and no share is zero. Draws with priors keep them, since they
        differ by example; priors of clusters, which are at least tau, are scaled to the estimated
        shares. The mean is then right, but each target still shrinks to the prior: for
        probabilities train with ``keras_layers.ForwardCorrectedLoss``.

        Args:
            priors: for draws without priors: ``"uniform"``; probabilities (K,) or (m, K); or
                ``mechanisms.Priors`` with values for numbers. None uses the priors of the draw,
                else estimates them for classes, ``ALIBI``, rows and ``RROnBins``.

        Raises:
            TypeError, ValueError: a mechanism with unknown posterior, other numbers without priors,
                or priors of a wrong shape.
        """
        chosen = _priors_of_posterior(self, PublicInput.bare(priors))
        if self._is_rows_of_labels:
            return _posterior_of_rows(self.mechanism, self.values, chosen)
        found = posterior(self.mechanism, self.values, chosen)
        if priors is None and isinstance(self.mechanism, PriorResampling):
            found *= shift_of_clusters(self.mechanism, self.values, chosen)
            found /= found.sum(axis=1, keepdims=True)
        return found

    @_validate.takes_old_arguments
    def debiased(self, *, bias_correction: float | None = None) -> np.ndarray:
        """Returns targets whose loss is unbiased for the true labels.

        Classes give signed weights ``float64`` (m, K), for ``keras_layers.LabelWeightedLoss``;
        numbers give unbiased numbers (m,), rows of labels (m, L). See ``estimation.debiased``.
        Residuals beyond ``residual_range`` were clipped before their draw, which stays a bias.

        Raises:
            TypeError, ValueError: a mechanism with unknown bias, noisy labels that are independent
                of the true labels, or numbers without priors.
        """
        if self._is_rows_of_labels:
            both = debiased(self.mechanism, self.values.reshape(-1))
            return both[:, 1].reshape(self.values.shape)
        beta = self.bias_correction if bias_correction is None else bias_correction
        return debiased(self.mechanism, self.values, self.priors, bias_correction=beta)

    def class_shares(self) -> np.ndarray:
        """Returns the shares of the classes among the true labels, estimated, ``float64`` (K,).

        They are the mean of ``debiased()``, shrunk to equal shares by as much of its distance from
        them as noise explains, projected onto the simplex, and at least a small share each. For
        ``RandomizedResponse`` and ``ProjectiveGeometryResponse`` no table (m, K) is made.

        Guarantee:
            Post-processing of the noisy labels: no charge beyond theirs.

        Raises:
            TypeError: noisy labels that are not of classes.
        """
        if not isinstance(self.kind, Classes):
            raise TypeError(
                f"expected noisy labels of classes, got labels drawn by {self.mechanism!r}. Use "
                "debiased()."
            )
        shares = None if self._draws_with_priors else estimated_prior(self.mechanism, self.values)
        return class_prior(self.debiased())[0] if shares is None else np.asarray(shares)

    def evaluate(self, predictions: Public[Any], metric: str, *, model: Public[Any]) -> Evaluation:
        """Returns an unbiased estimate of a metric of predictions, at no further cost.

        The error of its noise is about 1 / (epsilon sqrt(m)) for two classes; that of
        ``PrivateLabels.evaluate`` is about 1 / (epsilon m), at a cost of epsilon. Intervals cover
        noise and sample (``Evaluation``), as if a user's examples were independent.

        Args:
            predictions: in the order of ``indices``, as ``PrivateLabels.evaluate`` takes them.
            metric: ``"accuracy"``, ``"log_loss"`` or ``"brier"`` for classes, ``"auc"`` for two,
                which is a ratio and unbiased to first order; ``"mean"`` or ``"total"`` of the
                labels for numbers, with ``predictions=None``.
            model: the model that made the predictions; None if it has not learnt from any label.
                Numbers that may be values or codes of classes are values of a model with
                ``classes_``, and codes of any other.

        Raises:
            TypeError: a mechanism with unknown bias.
            ValueError: a model whose receipts include these noisy labels, another metric, or
                unsuitable predictions.

        Example:
            >>> from tf_labeldp import PrivacyBudget, PrivateLabels, RandomizedResponse
            >>> labels = PrivateLabels([0, 1] * 5000, 2, budget=PrivacyBudget(1.0))
            >>> noisy = labels.randomize(RandomizedResponse(1.0, 2))
            >>> found = noisy.evaluate(np.array([0, 1] * 5000), "accuracy", model=None)
            >>> abs(found.value - 1.0) < 5 * found.standard_error
            True
        """
        return evaluate_by_noisy_labels(self, predictions, metric, model)

    def guarantee(self, delta: float | None = None) -> PrivacyGuarantee:
        """Returns the statement of these noisy labels and their priors.

        ``delta`` is by default that of the budget.
        """
        if not self.receipts and len(self):
            return PrivacyGuarantee(float("inf"), assumptions=(_NO_RECEIPT,))
        stated = Receipts(self.receipts).guarantee(delta).with_remarks(self.remarks)
        return stated.with_assumptions(self.assumptions)

    def decode(self) -> np.ndarray:
        """Returns the class values of the noisy labels (m,), or ``values`` without class values.

        Noisy labels that are no classes, of ``ALIBI`` and ``ProjectiveGeometryResponse``, raise a
        ``TypeError``.
        """
        self._refuse_residuals()
        has_names = self.classes is not None
        if self.are_sets or (has_names and self.values.dtype.kind != "i"):
            raise TypeError(
                f"expected noisy labels that are classes, got those of "
                f"{type(self.mechanism).__name__}. Use posterior(), with one column per class."
            )
        return self.values if self.classes is None else Classes(self.classes).decode(self.values)

    def targets(self, kind: str) -> np.ndarray:
        """Returns ``values``, ``posterior()`` or ``debiased()``, as targets of a model."""
        _validate.one_of("targets", kind, _TARGETS)
        if kind == "values":
            self._refuse_residuals()
            return self.values
        return self.posterior() if kind == "posterior" else self.debiased()

    def _refuse_residuals(self) -> None:
        if self.shift is not None:
            raise TypeError(
                "expected noisy labels, got noisy residuals, from which a head's numbers were "
                "subtracted. Use targets 'posterior' or 'debiased', which add them."
            )

    def to_dataset(self, features: Public[Any], targets: str = "values") -> tf.data.Dataset:
        """Returns a ``tf.data.Dataset`` of single examples (x, target), in order of ``indices``.

        The data set never draws again, so it may be shuffled, batched and repeated.

        Args:
            features: one array with a row per example of the vault, or of the part of it from which
                these labels are; or a dict or tuple of arrays.
            targets: ``"values"``, ``"posterior"`` or ``"debiased"``.

        Example:
            >>> from tf_labeldp import PrivacyBudget, PrivateLabels, RandomizedResponse
            >>> labels = PrivateLabels([0, 1] * 4, num_classes=2, budget=PrivacyBudget(1.0))
            >>> noisy = labels.randomize(RandomizedResponse(1.0, 2))
            >>> data = noisy.to_dataset(np.zeros((8, 3), np.float32), "posterior").batch(4)
            >>> [tuple(y.shape) for x, y in data]
            [(4, 2), (4, 2)]
        """
        import tensorflow as tf

        y = self.targets(targets)
        x = self._rows.of_features(PublicInput.bare(features))
        y = y.astype(np.float32) if y.dtype == np.float64 else y
        return tf.data.Dataset.from_tensor_slices((x, y))

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Writes the noisy labels, their mechanism, priors, receipts and statement into a folder.

        The folder may be published; its receipts record who drew the labels and when
        (``PrivateLabels(actor=)``). A folder with noisy labels raises a ``FileExistsError``.
        """
        NoisyFiles(folder).write(self)

    def statement(self) -> dict[str, Any]:
        """Returns the statement and all other fields except the arrays, for JSON."""
        stated = self.guarantee()
        return {
            "format": FORMAT,
            "made_by": MADE_BY,
            "statement": str(stated).splitlines(),
            "guarantee": json.loads(stated.to_json()),
            "mechanism": self.mechanism.to_json(),
            **self._facts(),
            "receipts": [receipt.to_json() for receipt in self.receipts],
            "prior_receipts": [
                receipt.id for receipt in (self.priors.receipts if self.priors else ())
            ],
        }

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> NoisyLabels:
        """Reads noisy labels that ``save`` or ``tf-labeldp randomize`` wrote.

        Args:
            path: the folder of ``save``, or a folder of several such folders, with draws of one
                mechanism for different examples of a vault, which are joined; or the output of
                ``tf-labeldp randomize``: a table (``.csv``, ``.csv.gz`` or ``.parquet``) next to
                its ``.privacy.json``, or a folder of tables, whose rows are joined in the order of
                the statement.

        Raises:
            FileNotFoundError, ValueError: files that are missing, damaged, edited, or newer; or
                folders whose draws do not belong together.
        """
        return NoisyFiles(path).read()

    def rows_among(self, lengths: Setting[Iterable[tuple[int, ...]]]) -> np.ndarray | slice:
        """Returns the rows that belong to these noisy labels, in public arrays of some length.

        Args:
            lengths: the first dimensions of the arrays, as tuples: ``{(n,)}`` for n examples of the
                vault, or for one row per noisy label.

        Raises:
            ValueError: the arrays have other lengths, or an unclear order.
        """
        return self._rows.among(lengths)

    def seal(self) -> str:
        """Returns a digest of all attributes except the receipts."""
        mechanism = self.mechanism.to_json(with_receipts=False)
        fields = {"mechanism": mechanism, "classes": repr(self.classes), **self._facts()}
        return content_digest(fields, NoisyFiles.arrays_of(self))

    def _facts(self) -> dict[str, Any]:
        return {
            "bias_correction": self.bias_correction,
            "of_part": self.of_part,
            "remarks": list(self.remarks),
            "assumptions": [Assumption.of(note).to_json() for note in self.assumptions],
        }

    def output_digest(self, places: Setting[np.ndarray | slice] = slice(None)) -> str:
        """Returns the digest of the values at these places, as ``Receipt.output_digest`` is."""
        return PublicInput.digest_of(compact(self.values[places]))

    def recorded(self) -> NoisyLabels:
        """Records the digest in the store, and returns these noisy labels.

        The draw alone does not know the indices within a part, the bias correction, or what a
        randomizer made of a draw: files with these are compared with the digest.
        """
        Ledger.record_digests([bytes.fromhex(self.seal())], self.receipts)
        return self

    @property
    def _rows(self) -> DrawnRows:
        return DrawnRows(self.indices, self.receipts, self.of_part)

    @property
    def _draws_with_priors(self) -> bool:
        # The answers of PATE are a release: their mechanism draws no labels.
        draws_labels = isinstance(self.mechanism, LabelMechanism)
        return draws_labels and self.mechanism.public_input == "priors"

    @property
    def _is_rows_of_labels(self) -> bool:
        # Other rows are noisy one-hot rows, of ALIBI.
        return isinstance(self.mechanism, ClassificationMechanism) and self.values.ndim == 2


def _priors_of_posterior(noisy: NoisyLabels, priors: Any) -> Any:
    """Returns the priors for Bayes' rule: these, those of the draw, or an estimate."""
    if isinstance(priors, str):
        return _uniform_priors(noisy, priors)
    if priors is None:
        priors = noisy.priors
    if priors is None and noisy._is_rows_of_labels:
        shares = [estimated_prior(noisy.mechanism, column) for column in noisy.values.T]
        return np.array(shares)[:, 1]
    if priors is None and not noisy._draws_with_priors:
        return estimated_prior(noisy.mechanism, noisy.values)
    if noisy.shift is not None and isinstance(priors, Priors) and priors.shift is None:
        return dataclasses.replace(priors, shift=noisy.shift)
    return priors


def _uniform_priors(noisy: NoisyLabels, name: str) -> Priors | None:
    """Returns uniform priors of numbers; None stands for those of classes."""
    _validate.one_of("priors", name, ("uniform",))
    if noisy.priors is not None:
        raise ValueError(
            f"expected priors=None for labels that {type(noisy.mechanism).__name__} drew "
            "with priors, got 'uniform'. Leave priors out."
        )
    if not isinstance(noisy.mechanism, RROnBins):
        return None
    values = np.asarray(noisy.mechanism.inputs)
    return Priors(np.full(values.size, 1.0 / values.size), values=values)


def _posterior_of_rows(mechanism: LabelMechanism, values: np.ndarray, ones: Any) -> np.ndarray:
    """Returns the probability that each label of a row is one; ``ones`` are its priors."""
    priors = None
    if ones is not None:
        ones = np.broadcast_to(np.asarray(ones, np.float64), values.shape).reshape(-1)
        priors = np.stack([1.0 - ones, ones], axis=1)
    both = posterior(mechanism, values.reshape(-1), priors)
    return both[:, 1].reshape(values.shape)


def joined(parts: list[NoisyLabels], rows: np.ndarray) -> NoisyLabels:
    """Returns the noisy labels of several draws as one, in the order of ``rows``."""
    if len(parts) == 1:
        return parts[0]
    indices = np.concatenate([part.indices for part in parts])
    place = np.empty(rows.max(initial=-1) + 1, np.int64)
    place[rows] = np.arange(rows.size)
    order = np.argsort(place[indices])
    drawn_with = [(part.priors, len(part)) for part in parts if part.priors is not None]
    priors = None
    if drawn_with:
        tables = [(np.asarray(of_part), size) for of_part, size in drawn_with]
        each = [np.broadcast_to(table, (size, table.shape[-1])) for table, size in tables]
        receipts = Receipts.merged(*(of_part.receipts for of_part, _ in drawn_with))
        priors = Priors(np.concatenate(each)[order], receipts=receipts)
    return dataclasses.replace(
        parts[0],
        values=np.concatenate([part.values for part in parts])[order],
        indices=indices[order],
        priors=priors,
        receipts=Receipts.merged(*(part.receipts for part in parts)),
    )


class NoisyFiles:
    """The files of noisy labels: those of ``NoisyLabels.save``, or tables with their statement.

    Attributes:
        path: a folder, or one table.
        statement: the file of the statement: within the folder, or next to the table.
    """

    AS_TEXT = "classes_as_text"
    """A field where class values were written as texts, since JSON has no such values."""
    ARRAYS = ("values", "indices", "probabilities", "prior_groups", "prior_values", "prior_shift")
    """Names of the arrays in the file of ``save``; the last four are the fields of ``Priors``."""
    _TEXT, _ARRAYS = "noisy_labels.json", "noisy_labels.npz"

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = pathlib.Path(path).expanduser()
        self.statement = self.statement_at(self.path, in_folder=self.path.is_dir())
        if self.path.is_dir() and not self.statement.exists():
            self.statement = self.path / self._TEXT

    @staticmethod
    def statement_at(path: pathlib.Path, *, in_folder: bool) -> pathlib.Path:
        """Returns the file of the statement on a table, or on the tables in a folder."""
        return path / "privacy.json" if in_folder else path.with_name(f"{path.name}.privacy.json")

    @property
    def is_table(self) -> bool:
        """Whether they are tables, not the files of ``NoisyLabels.save``."""
        return self.statement.name != self._TEXT

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the files that ``NoisyLabels.save`` writes."""
        return self._TEXT, self._ARRAYS

    @property
    def arrays(self) -> pathlib.Path:
        """The file of the arrays, which ``NoisyLabels.save`` writes."""
        return self.path / self._ARRAYS

    @property
    def parts(self) -> list[NoisyFiles]:
        """Several draws in folders of their own, or these files alone."""
        own = (self.statement_at(self.path, in_folder=True), self.path / self._TEXT)
        folders = sorted(part.parent for part in self.path.glob(f"*/{self._TEXT}"))
        is_several = folders and not any(file.exists() for file in own)
        return [NoisyFiles(folder) for folder in folders] if is_several else [self]

    def write(self, noisy: NoisyLabels) -> None:
        """Writes the files of ``NoisyLabels.save``."""
        self.path.mkdir(parents=True, exist_ok=True)
        text = self.path / self._TEXT
        if self.arrays.exists() or text.exists():
            raise FileExistsError(
                f"{self.path} already has noisy labels. Use another folder, or remove them."
            )
        fields = {**noisy.statement(), "classes": noisy.classes}
        if not all(isinstance(name, (str, int, float)) for name in noisy.classes or ()):
            fields |= {"classes": tuple(map(str, noisy.classes or ())), self.AS_TEXT: True}
        arrays = self.arrays_of(noisy)
        PlainFile(self.arrays).write(arrays.to_bytes())
        PlainFile(text).write(self.sealed(fields, arrays).encode())

    @classmethod
    def arrays_of(cls, noisy: NoisyLabels) -> Arrays:
        """Returns the arrays of noisy labels and of their priors."""
        arrays = Arrays(values=noisy.values, indices=noisy.indices)
        if (priors := noisy.priors) is not None:
            fields = (priors.probabilities, priors.groups, priors.values, priors.shift)
            named = zip(cls.ARRAYS[2:], fields, strict=True)
            arrays |= {name: np.asarray(field) for name, field in named if field is not None}
        return arrays

    def read(self) -> NoisyLabels:
        """Returns the noisy labels; raises as ``NoisyLabels.load``."""
        path, parts = self.path, self.parts
        if parts != [self]:
            return _joined_parts(path, [part.read() for part in parts])
        for needed in (path, self.statement, path if self.is_table else self.arrays):
            if not needed.exists():
                raise FileNotFoundError(
                    f"there is no {needed}. Pass a table that has its statement "
                    f"{self.statement_at(path, in_folder=False).name} next to it, or a folder that "
                    "NoisyLabels.save or tf-labeldp randomize wrote."
                )
        try:
            fields = _validate.json_of(PlainFile(self.statement.resolve()).read(None))
            written = fields.get("format")
            if isinstance(written, int) and written > FORMAT:
                raise ReceiptError.of_newer(
                    f"the noisy labels in {path} were", f"format {written}", fields["made_by"]
                )
            if written != FORMAT and "made_by" in fields:
                raise ReceiptError(
                    f"{path} has format {fields.get('format', 0)}, made by {fields['made_by']}; "
                    f"this is tf-labeldp {__version__}, which reads format {FORMAT}. Install the "
                    "version that made it."
                )
            arrays = self._arrays_of_tables(fields) if self.is_table else self._saved_arrays()
            if json.loads(self.sealed(fields, arrays))["digest"] != fields["digest"]:
                raise ValueError("the digest does not match the content")
            return self._of(fields, arrays)
        except (ReceiptError, FileNotFoundError, PermissionError, MemoryError):
            raise
        except Exception as error:  # json, zipfile, numpy and pyarrow have different errors
            raise ReceiptError(
                f"the noisy labels in {path}, or their statement, were damaged or edited "
                f"({type(error).__name__}: {error}). Restore the files as they were written."
            ) from error

    def _saved_arrays(self) -> Arrays:
        return Arrays.from_bytes(PlainFile(self._file(self._ARRAYS).resolve()).read(None))

    def _arrays_of_tables(self, fields: dict[str, Any]) -> Arrays:
        tables = [self.path]
        if self.path.is_dir():
            tables = [self._file(name) for name in fields["files"]]
        values = np.concatenate([_read_table(table, fields) for table in tables])
        return self._of_table(values, fields["prior"])

    def _file(self, name: str) -> pathlib.Path:
        """Returns the path of a file, or raises if its name or a link leads out of the folder."""
        file = self.path / name
        if pathlib.PurePath(name).name != name or file.resolve().parent != self.path.resolve():
            raise ReceiptError(
                f"expected the plain name of a file in {self.path}, got {name!r}, which leads "
                "elsewhere. Restore the files as they were written."
            )
        return file

    def _of(self, fields: dict[str, Any], arrays: Arrays) -> NoisyLabels:
        receipts = Receipts(Receipt.from_json(receipt) for receipt in fields["receipts"])
        priors = None
        if "probabilities" in arrays:
            paid = Receipts(each for each in receipts if each.id in fields["prior_receipts"])
            table, groups, values, shift = (arrays.get(name) for name in self.ARRAYS[2:])
            priors = Priors(np.asarray(table), groups, values, paid, shift)
        classes = fields["classes"]
        return NoisyLabels(
            arrays["values"],
            arrays["indices"],
            Mechanism.from_json(fields["mechanism"]),  # type: ignore[arg-type]
            priors,
            receipts,
            fields["bias_correction"],
            tuple(fields["remarks"]),
            tuple(map(Assumption.of, fields["assumptions"])),
            None if classes is None else tuple(classes),
            fields.get("of_part"),
        )

    @classmethod
    def sealed_table(
        cls, fields: dict[str, Any], values: np.ndarray, prior: dict[str, Any] | None
    ) -> str:
        """Returns the text of the statement on tables, with a digest of it and of their values.

        The rows of the tables are in the order of the examples.
        """
        return cls.sealed(fields, cls._of_table(values, prior))

    @staticmethod
    def _of_table(values: np.ndarray, prior: dict[str, Any] | None) -> Arrays:
        arrays = Arrays(values=np.asarray(values), indices=np.arange(len(values)))
        for name, field in (("probabilities", "probabilities"), ("prior_values", "values")):
            content = (prior or {}).get(field)
            if content is not None:
                arrays[name] = np.asarray(content, dtype=np.float64)
        return arrays

    @staticmethod
    def sealed(fields: dict[str, Any], arrays: Arrays) -> str:
        """Returns the text of a statement's file, with a digest of the statement and the arrays."""
        content = {name: value for name, value in fields.items() if name != "digest"}
        content["digest"] = content_digest(content, arrays)
        text = json.dumps(content, indent=2, ensure_ascii=False) + "\n"
        # Half a character, as of a file name in another encoding, has no UTF-8.
        return text.encode(errors="backslashreplace").decode()

    @staticmethod
    def columns_of(table: pathlib.Path) -> list[str]:
        """Returns the names of the columns of a table."""
        from pyarrow import csv, parquet

        if _is_parquet(table):
            return list(parquet.read_schema(table).names)
        with _opened(table) as stream:
            options = csv.ParseOptions(newlines_in_values=True)
            reading = csv.ReadOptions(block_size=_CSV_BLOCK)
            return list(csv.open_csv(stream, reading, options).schema.names)


def _joined_parts(folder: pathlib.Path, parts: list[NoisyLabels]) -> NoisyLabels:
    """Returns several draws in a folder as one, in the order of their examples."""
    kinds = {_kind_of_draw(part) for part in parts}
    rows = np.sort(np.concatenate([part.indices for part in parts]))
    is_repeated = np.any(rows[1:] == rows[:-1])
    is_of_prior = any(part.priors is not None and part.priors.values is not None for part in parts)
    is_mixed = len(kinds) > 1 or is_repeated or is_of_prior
    # Parts of a vault (``split``) count their examples from 0, each on its own.
    if is_mixed or not all(part.receipts and not part._rows.are_of_a_part for part in parts):
        raise ReceiptError(
            f"expected draws of one mechanism for different examples of one vault in "
            f"{folder}, got {len(parts)} folders of other draws. Load each by itself."
        )
    # The last receipt has the number of examples of the vault, which grows (``extend``).
    parts.sort(key=lambda part: part.receipts[-1].labels.size)
    notes = tuple(dict.fromkeys(note for part in parts for note in part.assumptions))
    remarks = tuple(dict.fromkeys(remark for part in parts for remark in part.remarks))
    return dataclasses.replace(joined(parts, rows), assumptions=notes, remarks=remarks)


def _kind_of_draw(noisy: NoisyLabels) -> tuple[str, ...]:
    """Returns the vault and the settings of a draw: equal ones may be joined."""
    vaults = [receipt.labels.name for receipt in noisy.receipts[-1:]]
    mechanism = noisy.mechanism.to_json(with_receipts=False)
    return *vaults, *map(repr, (mechanism, noisy.classes, noisy.bias_correction))


def _is_parquet(table: pathlib.Path) -> bool:
    return table.name.lower().endswith(".parquet")


def _opened(table: pathlib.Path) -> Any:
    """Returns the stream of a table in CSV, unpacked."""
    import pyarrow as pa

    compression = "gzip" if table.name.lower().endswith(".gz") else None
    return pa.input_stream(str(table), compression=compression)


def _read_table(table: pathlib.Path, fields: dict[str, Any]) -> np.ndarray:
    """Returns the noisy labels of a table, by a statement."""
    import pyarrow as pa
    from pyarrow import csv, parquet

    column, classes = fields["noisy_label_column"], fields["classes"]
    if _is_parquet(table):
        found = parquet.read_table(table, columns=[column]).column(0)
    else:
        kind = pa.string() if classes else pa.float64() if "label_range" in fields else pa.int64()
        with _opened(table) as stream:
            found = csv.read_csv(
                stream,
                csv.ReadOptions(block_size=_CSV_BLOCK),
                csv.ParseOptions(newlines_in_values=True),
                csv.ConvertOptions(include_columns=[column], column_types={column: kind}),
            ).column(0)
    if classes:
        codes = {name: code for code, name in enumerate(classes)}
        return np.array([codes[name] for name in found.to_pylist()], dtype=np.int64)
    return found.to_numpy()
