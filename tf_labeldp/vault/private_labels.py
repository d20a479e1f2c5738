"""The vault of the true labels: every output is randomized, charged to a budget and recorded."""

from __future__ import annotations

import abc
import dataclasses
import os
import pathlib
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any, ClassVar, NoReturn

import numpy as np

from tf_labeldp import _validate
from tf_labeldp._columns import Column
from tf_labeldp.accounting import (
    Assumption,
    Charge,
    LabelSet,
    PrivacyBudget,
    PrivacyGuarantee,
    Private,
    Public,
    PublicInput,
    Receipt,
    Receipts,
    Setting,
    public_input,
)
from tf_labeldp.mechanisms import (
    AggregateMechanism,
    HistogramMechanism,
    LabelMechanism,
    Mechanism,
    Priors,
)
from tf_labeldp.mechanisms.users import UsersOfRows
from tf_labeldp.vault._arguments import (
    Keyed,
    Store,
    check_fits_keys,
    kind_of_vault,
    opened,
    store_of_vault,
    takes_arguments_of_0_3,
)
from tf_labeldp.vault._draws import DrawRequest, Draws, Sealed, assignments_of
from tf_labeldp.vault._examples import VaultPart, encoded
from tf_labeldp.vault._statements import LedgerOwner
from tf_labeldp.vault.evaluation import Evaluation, evaluate_by_release
from tf_labeldp.vault.keyed_draws import KeyedDraws
from tf_labeldp.vault.label_kinds import Classes, LabelKind, Numbers
from tf_labeldp.vault.ledger import Ledger
from tf_labeldp.vault.noisy_labels import NoisyLabels, NoisyStatistic, joined
from tf_labeldp.vault.reservations import PlannedUse, Reservation
from tf_labeldp.vault.use_history import UseHistory
from tf_labeldp.vault.users import Users
from tf_labeldp.vault.uses import LabelsTogether, LedgerOfExamples, NamedUse

_BY_THIS_PROCESS = Assumption(
    "array-of-labels",
    "holder",
    "An array of labels has no vault: the fits of this process that are counted here are the only "
    "uses of these labels, or all others are added to this statement. Fits on equal rows, on parts "
    "of one array that overlap, and on other arrays of as many labels count; fits on arrays of "
    "other lengths and rows are about other people.",
)


class Randomizer(abc.ABC):
    """Draws noisy labels by several releases; ``PrivateLabels.randomize`` takes it.

    Guarantee:
        Each release is charged to the vault, and the noisy labels carry all receipts; together the
        releases cost ``epsilon``. They are reserved together: if the budget does not allow all of
        them, none is drawn, and no other use spends what they need.
    """

    public_input: ClassVar[str | None] = None
    """The public input that the randomizer needs: ``"clusters"``, ``"features"`` or None."""

    default_key: ClassVar[str]
    """The name of the draw by default, by which a store finds it."""

    is_for_users: ClassVar[bool] = False
    """Whether ``epsilon`` is the cost for all labels of a user, and not for one label."""

    epsilon: float
    """The cost of all releases together, known before the first one."""

    @abc.abstractmethod
    @_validate.clears_frames
    def draw_from(self, use: Private[NamedUse], public: PublicInput[Any]) -> NoisyLabels:
        """Returns noisy labels of all examples of a vault; ``PrivateLabels.randomize`` calls it.

        ``use.labels`` is the vault, and ``use.key`` the name of the draw. ``use.randomize`` draws
        under this name, and ``use.part("prior").release`` releases as ``key/prior``. ``public`` is
        the value that ``public_input`` names, with the receipts of the randomizer.
        """

    @abc.abstractmethod
    @_validate.clears_frames
    def parts(self, labels: Private[PrivateLabels | NamedUse]) -> dict[str, Mechanism]:
        """Returns mechanisms that cost what the releases from a vault cost, by their names.

        ``labels`` is a use, as ``draw_from`` takes it. Randomizers of this library take a vault,
        too, whose draw has the name ``default_key``.
        """


class PrivateLabels(LedgerOwner):
    """The true labels of a training set, with a privacy budget.

    Labels are released in three ways: ``randomize`` draws noisy labels, ``release`` a noisy
    statistic, and training charges the vault for noisy steps. Each use adds a receipt to the vault,
    to its store and to the output.

    Guarantee:
        At any time all outputs together are ``guarantee()``-label-DP, for the replacement of one
        label (of one row, with ``Rows``; of all labels of one user, with ``users``). Uses of
        disjoint examples compose in parallel, uses of the same example in sequence
        (``ghazi2021``, Observation 4; ``accounting.Receipts.guarantee``). A use that would take an
        example past the budget raises before anything is drawn.

    The process and its store folder are trusted; outputs may be published with the features. No
    ``repr`` and no error shows a label. A store contains a salted digest of the labels, which is
    not differentially private: keep it with the labels. Processes share a vault through its store;
    without a store, a forked process is refused.

    Args:
        labels: the true labels, shape (n,): integers 0..K-1, the values of ``Classes([...])``, or
            numbers in the range of ``Numbers(low, high)`` (regression); or rows (n, L) of zeros and
            ones with ``Rows(L)``. An array, list, tensor or column of a data frame; copied. None,
            NaN, NA, nulls of Arrow and masked entries are missing, and refused.
        kind: the kind of the labels, ``Classes``, ``Numbers`` or ``Rows``, or the number of classes
            K. Public knowledge: inferring it from the labels would reveal rare classes.
        num_classes: K, at least 2, for labels 0..K-1, in place of ``kind``.
        budget: the most that may be spent on one label. A store keeps it: leave it out later.
        people: the population that the labels come from. The costs of several vaults add up, since
            they may contain labels of the same people, unless their populations differ.
        store: a folder that records every use, or a ``Store`` with its project and the author of
            receipts. Opened again with the same labels, it returns the same draws without a charge.
            Without a store, a second run spends again.
        draws: the source of the random bits of noisy labels. ``"stored"`` draws once, with the
            operating system's random bits. ``Keyed(ids)`` derives them from a secret key and the id
            of the row, so that ``scale.randomize_batch`` repeats them; ``"keyed"`` takes the row
            numbers as ids. The key is in the store, which they need.
        unlabelled: the examples without a label yet, integers or a boolean mask (n,); public
            knowledge. Their entries in ``labels`` are not read, and may be None or NaN. The others
            are numbered from 0, like those of a part: their features are ``x[labels.indices]``.
            ``extend`` takes their labels later.
        users: the user of each example (n,), if one person has several, or ``Users``, which bounds
            the examples of one user. Public knowledge. The budget and every statement are then for
            all labels of one user. The epsilon of a mechanism stays that of one label: a draw costs
            as often as a user has labels in it, a release as a user counts for
            (``AggregateMechanism.group_size``). The epsilon of heads, ``evaluate``, ``select`` and
            ``conformal`` is the cost for a user. Engines (``scale``) refuse its key.
        insecure_seed: makes draws repeatable; the statement then reads "not private: seeded".

    Raises:
        TypeError: the labels are not integers, and the kind has neither class values nor a range.
        ValueError: labels outside the classes or the range, wrong shape, no budget, or
            contradictory arguments.
        LabelStoreError: the store is damaged, or has other labels, settings or another budget.

    Example:
        >>> from tf_labeldp import PrivacyBudget, RandomizedResponse
        >>> from tf_labeldp.mechanisms import LaplaceMechanism
        >>> labels = PrivateLabels([0, 2, 1, 1], num_classes=3, budget=PrivacyBudget(epsilon=1.0))
        >>> noisy = labels.randomize(RandomizedResponse(epsilon=1.0, num_classes=3))
        >>> noisy.values.shape, labels.guarantee().epsilon, labels.remaining()
        ((4,), 1.0, 0.0)
        >>> budget = PrivacyBudget(epsilon=1.0)
        >>> weeks = PrivateLabels([52, 40, 13], Numbers(0, 52), budget=budget)
        >>> weeks.randomize(LaplaceMechanism(epsilon=1.0, low=0.0, high=52.0)).values.dtype
        dtype('float64')
    """

    __slots__ = (
        "__weakref__",
        "_examples",
        "_store",
        "_uses",
    )

    @_validate.clears_frames
    @takes_arguments_of_0_3
    def __init__(  # noqa: PLR0913 (the labels, their unit, budget, store and draws)
        self,
        labels: Private[Any],
        kind: Setting[LabelKind | int | None] = None,
        *,
        num_classes: int | None = None,
        budget: PrivacyBudget | None = None,
        people: str | None = None,
        store: Setting[Store | str | os.PathLike[str] | None] = None,
        draws: Public[Keyed | str] = "stored",
        unlabelled: Public[Any] = None,
        users: Public[Any] = None,
        insecure_seed: int | None = None,
    ) -> None:
        folder = store_of_vault(store, budget)
        refuse_noisy(labels)
        if people is not None and not (isinstance(people, str) and people):
            raise TypeError(f"people must be the name of a population, got {people!r}.")
        if insecure_seed is not None:
            insecure_seed = _validate.integer_at_least("insecure_seed", insecure_seed, 0)
        missing, source, owners = map(public_input, (unlabelled, draws, users))
        by_key, persons = Keyed.of(source.value), Users.of(owners.value)
        of_labels = kind_of_vault(kind, num_classes)
        if by_key is not None:
            check_fits_keys(of_labels, insecure_seed, missing.value)
        array, first = encoded(of_labels, labels, missing.value)
        self._store = opened(folder)
        keyed = None if by_key is None else KeyedDraws(by_key.ids, len(array))
        all_users = None if persons is None else UsersOfRows(persons.codes(len(array)))
        ledger = Ledger.of_labels(
            array, first.rows, of_labels, people, budget, self._store, folder.actor, all_users
        )
        arrivals = [first]
        if self._store is not None:
            arrivals = self._store.arrivals(len(array), first.rows)
        if keyed is not None:
            keyed.open(ledger, self._store)
        self._examples = VaultPart(of_labels, Sealed(array, arrivals), missing.with_value(None))
        drawn = Draws(self._examples.sealed, of_labels, ledger, insecure_seed, keyed)
        self._uses = LedgerOfExamples(ledger, drawn, self._examples)
        self._uses.note_arrivals()
        if persons is not None and persons.at_most is not None:
            some = persons.some_rows(self._users.codes)
            self._set_examples(self._examples.some(some))
        self.adopt(Receipts.merged(source.receipts, missing.receipts, owners.receipts))

    def _set_examples(self, examples: VaultPart) -> None:
        self._examples, self._uses = examples, self._uses.of(examples)

    def _part(self, examples: VaultPart) -> PrivateLabels:
        part = object.__new__(PrivateLabels)
        part._store, part._uses = self._store, self._uses
        part._set_examples(examples)
        return part

    def _residuals(self, predictions: PublicInput[Any], largest: float) -> PrivateLabels:
        """Returns a vault of what public predictions (n,) leave, whose uses the ledger charges."""
        examples, uses = self._examples, self._uses
        shift = np.zeros(len(examples.sealed))
        shift[examples.rows] = predictions.value
        chosen = public_input(examples.chosen_by, predictions).with_value(None)
        kind = Numbers(-largest, largest, clip=True)
        sealed = examples.sealed.residuals(shift, largest)
        view = self._part(VaultPart(kind, sealed, chosen, examples.rows))
        draws = uses.draws.of_residuals(sealed, shift, kind)
        view._uses = LedgerOfExamples(uses.ledger, draws, view._examples)
        return view

    @property
    def kind(self) -> LabelKind:
        """The kind of the labels, ``Classes``, ``Numbers`` or ``Rows``; public knowledge."""
        return self._examples.kind

    @property
    def num_classes(self) -> int:
        """The number of classes K; raises a ``ValueError`` for numbers and rows of labels."""
        return self._classes.num_classes

    @property
    def classes(self) -> tuple[Hashable, ...]:
        """The class values in the order of their codes; raises for numbers and rows of labels."""
        return self._classes.classes

    @property
    def _classes(self) -> Classes:
        kind = self._examples.kind
        if not isinstance(kind, Classes):
            raise ValueError(
                f"These labels are {kind.describe()} and have no classes. Make PrivateLabels "
                "with num_classes for one class per example."
            )
        return kind

    @property
    def label_range(self) -> tuple[float, float] | None:
        """The smallest and the largest label of a regression task, or None."""
        return self._examples.kind.label_range

    @property
    def num_labels(self) -> int | None:
        """The number of labels in a row; None for single labels."""
        return self._examples.kind.num_labels

    @property
    def unit(self) -> str:
        """The unit of privacy: ``"label"``, ``"row"`` for rows of labels, or ``"user"``."""
        return self._uses.ledger.account.unit

    @property
    def users(self) -> np.ndarray | None:
        """The users of these examples as numbers from 0, ``int64`` (n,); None without users."""
        return None if self._uses.ledger.account.users is None else self._users.codes

    @property
    def _users(self) -> UsersOfRows:
        users, examples = self._uses.ledger.account.users, self._examples
        return UsersOfRows.one_per_row(len(self)) if users is None else users.at(examples.rows)

    @property
    def group_size(self) -> int:
        """The largest number of these examples that one user has; 1 without users."""
        return 1 if self._uses.ledger.account.users is None else self._users.most

    @property
    def mean_group_size(self) -> float:
        """The number of labels that the user of a label has on average; 1 without users."""
        return 1.0 if self._uses.ledger.account.users is None else self._users.mean

    def epsilon_of_one_label(self, epsilon: float) -> float:
        """Returns the epsilon of a mechanism that costs this epsilon for all labels of a user."""
        return _validate.positive_finite("epsilon", epsilon) / self.group_size

    @property
    def budget(self) -> PrivacyBudget:
        """The most that may be spent on one label."""
        with self._uses.ledger.turn():
            return self._uses.ledger.budget

    @property
    def label_set(self) -> LabelSet:
        """The name of these labels in receipts, with their number."""
        return self._uses.ledger.label_set

    @property
    def receipts(self) -> tuple[Receipt, ...]:
        """The receipts of all uses, and those of models that the vault adopted."""
        return self._uses.ledger.receipts()

    def _all_uses(self) -> tuple[Receipt, ...]:
        return self.receipts

    @property
    def store_path(self) -> pathlib.Path | None:
        """The folder of the store, or None."""
        return None if self._store is None else self._store.path

    @property
    def indices(self) -> np.ndarray:
        """The rows of these examples in the whole vault, ``int64`` (n,)."""
        return self._examples.rows.copy()

    def __len__(self) -> int:
        return len(self._examples)

    def split(self, held_out: Public[Any], *, seed: int = 0) -> tuple[PrivateLabels, PrivateLabels]:
        """Splits the examples in two parts, such as for training and for evaluation.

        Both parts share the ledger of this vault. A use of one part is charged to its examples
        alone, so that uses of the two parts compose in parallel. ``guarantee()`` is that of the
        whole vault. Each part numbers its examples from 0: their features are ``x[part.indices]``.

        Args:
            held_out: the share of the second part, in (0, 1), chosen at random (with users, the
                share of the users); or its examples, integers (m,) or a boolean mask (n,). Neither
                part may be empty. A user with examples in both parts is charged for both.
            seed: the public seed of the random choice.

        Returns:
            The vault of the other examples, and the vault of the held-out examples.

        Example:
            >>> from tf_labeldp import PrivacyBudget
            >>> labels = PrivateLabels([0, 1] * 50, num_classes=2, budget=PrivacyBudget(1.0))
            >>> train, held_out = labels.split(0.2)
            >>> len(train), len(held_out), held_out.indices.shape
            (80, 20, (20,))
        """
        public = public_input(held_out)
        if np.ndim(public.value) == 0:
            public = public.with_value(self._users.random_share(public.value, seed))
        first, second = self._examples.split(self._examples.some(public))
        self.adopt(public.receipts)
        return self._part(first), self._part(second)

    @_validate.clears_frames
    def extend(
        self, labels: Private[Any], *, rows: Public[Any] = None, unlabelled: Public[Any] = None
    ) -> PrivateLabels:
        """Adds labels that came later, to this vault and to its store.

        Guarantee:
            New examples have spent nothing: uses of them compose in parallel with uses of the
            others, under the same budget, and ``guarantee()`` is that of the most charged example
            (``ghazi2021``, Observation 4). Nothing is drawn twice, also after a kill, which leaves
            the labels of an arrival in the store, or not.

        Stored draws stay: ``randomize`` with the same name draws for the new labels alone; a
        ``Randomizer`` of several releases needs a name for each part that this method returns.
        Opened again, the store takes all labels at once, or the first ones and then each arrival in
        its order, with the same labels.

        Which examples have a label is public. If it depends on the labels, such as a purchase that
        is known at once and its absence later, it reveals them: wait until all are known.

        Args:
            labels: the labels of new examples, or those of ``rows``.
            rows: the examples ``unlabelled`` so far whose labels these are, integers (m,), in the
                order of ``labels``; None adds new examples at the end.
            unlabelled: the new examples without a label yet, as for the constructor.

        Returns:
            The part of the vault with these labels, as ``split`` returns one.

        Raises:
            LabelStoreError: the store has another arrival at this place.
            ValueError: this is a part of a vault, draws are keyed, or the labels, rows or
                unlabelled examples are wrong. Nothing was added.

        Example:
            >>> from tf_labeldp import PrivacyBudget, RandomizedResponse
            >>> labels = PrivateLabels([0, 1, 1], num_classes=2, budget=PrivacyBudget(1.0))
            >>> first = labels.randomize(RandomizedResponse(1.0, 2), key="weekly")
            >>> week_2 = labels.extend([1, None, 0], unlabelled=[1])
            >>> both = labels.randomize(RandomizedResponse(1.0, 2), key="weekly")
            >>> len(both), labels.indices.tolist(), labels.guarantee().epsilon
            (5, [0, 1, 2, 3, 5], 1.0)
            >>> bool((both.values[:3] == first.values).all())
            True
            >>> late = labels.extend([0], rows=[4])
            >>> len(labels), late.indices.tolist()
            (6, [4])
        """
        examples, ledger = self._examples, self._uses.ledger
        if examples.part is not None:
            raise ValueError(
                f"expected the whole vault, got a part with {len(self)} examples. Extend the vault "
                "that was split."
            )
        if self._uses.draws.is_keyed or ledger.account.users is not None:
            name = "Keyed draws" if self._uses.draws.is_keyed else "Users"
            raise ValueError(f"{name} are for all labels. Make a vault of the new ones.")
        public = public_input(rows, unlabelled)
        rows, unlabelled = public.value
        if rows is not None and unlabelled is not None:
            raise ValueError(
                "expected a label for each of rows, and no unlabelled=, got both. Leave out rows "
                "without a label."
            )
        array, new = encoded(examples.kind, labels, unlabelled)
        self.adopt(public.receipts)
        with ledger.turn():
            array, arrival = examples.arrival(array, new, rows, len(ledger.records))
            ledger.arrive(arrival, array, examples.sealed.arrivals)
            if self._store is not None:
                arrival = self._store.arrivals()[examples.sealed.arrivals]
            examples.sealed.add(arrival, array)
        self._uses.note_arrivals()
        chosen = public_input(examples.chosen_by, public).with_value(None)
        self._set_examples(dataclasses.replace(examples, chosen_by=chosen))
        return self._part(dataclasses.replace(self._examples, part=arrival.rows))

    def randomize(
        self,
        mechanism: Public[LabelMechanism | Randomizer],
        indices: Public[Any] = None,
        priors: Public[Any] = None,
        *,
        clusters: Public[Any] = None,
        features: Public[Any] = None,
        key: str | None = None,
    ) -> NoisyLabels:
        """Draws noisy labels, charges them, and stores them before it returns them.

        Args:
            mechanism: a mechanism for the classes or the range of the vault, ``ALIBI``,
                ``LabelRandomizer``, ``ClusterRandomizedResponse``,
                ``PeerToPeerRandomizedResponse``, ``heads.HeadPriorRandomizer``. Rows of labels take
                ``RandomizedResponse(epsilon, num_classes=2)`` for each label, charged L times.
            indices: the examples to draw for: integers (m,), each at most once, or a boolean mask
                (n,). None draws for all.
            priors: probabilities (K,) or (m, K), in the order of ``indices``, or
                ``mechanisms.Priors``, for mechanisms that use priors.
            clusters: the cluster of each example, integers (m,) or the result of ``find_clusters``,
                for mechanisms that use clusters.
            features: public features, for mechanisms that use features.
            key: a name for this draw. A second call with this name returns the stored draw, without
                a charge and whatever the priors; it draws for, and charges, only the examples whose
                labels came since (``extend``). Draws without a name are numbered, and a store
                returns them in that order.

        Warns:
            UserWarning: the budget's delta is not below 1/n; ``release`` and ``charge`` warn too.

        Raises:
            BudgetExceededError: the draw would take an example past the budget; nothing was drawn.
            LabelStoreError: the stored draw of this name has other settings.
            RuntimeError: this process was forked, and the vault has no store; or a mechanism of
                another library failed on the labels, and was charged.
            TypeError, ValueError: the mechanism is for other labels or breaks its claims, or the
                indices, the public input or the key are wrong. Nothing was charged.
        """
        source, use = public_input(mechanism), NamedUse(self, key)
        mechanism = source.value
        if not isinstance(mechanism, Randomizer):
            self._examples.kind.check(LabelMechanism.checked(mechanism))
        name, needed = type(mechanism).__name__, mechanism.public_input
        inputs = {"priors": priors, "clusters": clusters, "features": features}
        extra = [kind for kind, value in inputs.items() if value is not None and kind != needed]
        if extra:
            raise ValueError(
                f"{name} takes no {extra[0]}; leave them out. RRWithPrior takes priors, "
                "ClusterRandomizedResponse clusters, HeadPriorRandomizer features, and "
                "LabelRandomizer(values=..., prior=...) a public prior."
            )
        examples = self._examples.some(indices)
        public = _with_receipts_of(inputs.get(needed or ""), source, examples.chosen_by)
        if isinstance(mechanism, Randomizer):
            if needed and public.value is None:
                raise ValueError(f"{name} needs {needed}=, and takes nothing else; got nothing.")
            if indices is not None:
                raise ValueError(f"{name} draws for all examples; leave indices=None.")
            return mechanism.draw_from(use.or_named(mechanism.default_key), public)
        if needed == "priors" and public.value is not None:
            public = public.with_value(Priors.of(public.value))
        elif needed == "clusters" and public.value is not None:
            public = public.with_value(Column.of(assignments_of(public.value)).complete("clusters"))
        request = DrawRequest(mechanism, examples.rows, public)
        records = self._uses.draws.records(use.key, request)
        parts = [self._examples.noisy_labels(each, mechanism) for each in records]
        noisy = joined(parts, self._examples.numbers(examples.rows))
        return noisy.recorded() if noisy.of_part and indices is not None else noisy

    def release(
        self,
        mechanism: Public[AggregateMechanism],
        indices: Public[Any] = None,
        public_input: Public[Any] = None,
        *,
        key: str | None = None,
    ) -> NoisyStatistic:
        """Releases one noisy statistic of the labels; charges and stores it like a draw.

        Args:
            mechanism: for example ``mechanisms.HistogramMechanism``.
            indices: the examples of the statistic, as for ``randomize``; each is charged.
            public_input: group numbers (m,), the result of ``find_clusters``, or features (m, d),
                in the order of ``indices``, for mechanisms that use them. Objects with ``digest()``
                and ``matches(digest)`` are compared by these. A stored release is returned for the
                same public input only.
            key: a name for this release, as for ``randomize``.

        Raises:
            BudgetExceededError, LabelStoreError, RuntimeError, TypeError, ValueError: as from
                ``randomize``.

        Example:
            >>> from tf_labeldp.accounting import PrivacyBudget
            >>> from tf_labeldp.mechanisms import HistogramMechanism
            >>> labels = PrivateLabels([0, 2, 1], num_classes=3, budget=PrivacyBudget(epsilon=1.0))
            >>> labels.release(HistogramMechanism(epsilon=0.5, num_classes=3)).values.shape
            (3,)
        """
        examples = self._examples.some(indices)
        public = _with_receipts_of(public_input, mechanism, examples.chosen_by)
        mechanism = PublicInput.bare(mechanism)
        self._examples.kind.check_release(AggregateMechanism.checked(mechanism))
        public = public.with_value(assignments_of(public.value))
        request = DrawRequest(mechanism, examples.rows, public)
        record = self._uses.draws.record(NamedUse(self, key).key, request)
        groups = None
        if isinstance(mechanism, HistogramMechanism) and public.value is not None:
            groups = np.asarray(public.value)
        # The public input of a stored release is the same, but its receipts may be known since.
        receipts = Receipts.merged(public.receipts, record.receipts)
        return NoisyStatistic(np.array(record.values), mechanism, groups, receipts)

    def evaluate(
        self, predictions: Public[Any], metric: str, epsilon: float, *, key: str | None = None
    ) -> Evaluation:
        """Releases a noisy metric of predictions on these labels.

        Guarantee:
            Epsilon-DP for the replacement of one label (of all labels of one user, with ``users``),
            charged to the vault: noise of the exact
            sensitivity on a sum (``mechanisms.MetricMechanism``), or on class counts by prediction
            (``mechanisms.LinearBinningMechanism``, ``HistogramMechanism``). Assumes that the
            predictions are public.

        Evaluate on examples that the model was not trained on (``split``): on training examples it
        looks better than it is, and their labels are charged twice. The interval covers the metric
        of the population, that is noise and sample, for examples that were drawn at random. Its
        errors use the release and public facts alone; the error of the sample is an upper bound for
        ``"auc"``, for losses and for numbers.

        Args:
            predictions: in the order of the labels: probabilities (n, K); probabilities (n,) of the
                second of two classes; classes (n,), as values or as codes, for ``"accuracy"``,
                ``"f1"``, ``"precision"``, ``"recall"`` and ``"confusion_matrix"``; numbers (n,);
                None for ``"mean"`` and ``"total"``. Where class values are numbers that may be
                codes too, such as 1 and 2 of the classes 1, 2, 3, classes (n,) of these alone are
                refused: give probabilities.
            metric: for classes ``"accuracy"``, ``"log_loss"`` (at most 5 per example), ``"brier"``,
                ``"confusion_matrix"`` (true classes in rows) or ``"calibration"`` (the share of
                right predictions, or of the second of two classes, in ten bins of its
                probability). For a rare class ``"auc"``, ``"f1"``, ``"precision"`` or ``"recall"``,
                of the second of two classes, or the mean over all classes of each against the
                rest; or, for two classes, ``"average_precision"``. For numbers ``"mse"`` or
                ``"mae"``, or ``"mean"`` or ``"total"`` of the labels themselves.
            epsilon: the cost, finite and above zero.
            key: a name for this release, as for ``randomize``.

        Raises:
            BudgetExceededError: an example would pass the budget; nothing was released.
            TypeError: the labels are rows.
            ValueError: an unknown metric, or unsuitable predictions; nothing was charged.

        Example:
            >>> from tf_labeldp import PrivacyBudget
            >>> labels = PrivateLabels([0, 1] * 500, num_classes=2, budget=PrivacyBudget(1.0))
            >>> score = labels.evaluate(np.array([0, 1] * 500), "accuracy", epsilon=0.5)
            >>> abs(score.value - 1.0) < 10 * score.standard_error, score.guarantee().epsilon
            (True, 0.5)
        """
        epsilon = self.epsilon_of_one_label(epsilon)
        found = evaluate_by_release(NamedUse(self, key), predictions, metric, epsilon)
        # The labels of a user may all be equal, so her rows are one draw of their weight.
        examples = found.effective_examples / self.mean_group_size
        return dataclasses.replace(found, effective_examples=examples)

    def charge(  # noqa: PLR0913 (the fields of the receipt that it writes)
        self,
        charge: Charge,
        *,
        what: str,
        key: str = "",
        indices: Public[Any] = None,
        made_of: Public[Any] = None,
        unit: str | None = None,
        num_units: int | None = None,
        seeded: bool = False,
        metrics_reported: bool = False,
        sample_weights: bool = False,
    ) -> Receipt:
        """Charges a use of the labels outside the vault, such as noisy training steps.

        Call it before each use, as ``LabelDPModel.fit`` does before every epoch. Attach the receipt
        and those of ``made_of`` to every output of the use.

        Args:
            charge: the cost: ``accounting.dp_sgd_charge(...)``, or your own ``accounting.Charge``.
            what: a description for the history.
            key: a name for the history.
            indices: the examples, as for ``randomize``.
            made_of: the public inputs of the use, such as the model and its features; their
                receipts count in the budget too.
            unit: the unit of privacy that the cost is for, ``"label"``, ``"row"`` or ``"user"``;
                None takes that of the labels. With users it must be ``"user"``: the cost for all
                labels of one user.
            num_units: the number of users.
            seeded: whether the noise can be repeated.
            metrics_reported: whether loss or metrics on true labels are shown.
            sample_weights: whether examples have weights.

        Returns:
            The receipt of the use.

        Raises:
            BudgetExceededError: an example would pass the budget; nothing was charged.

        Example:
            >>> from tf_labeldp.accounting import PrivacyBudget, dp_sgd_charge
            >>> labels = PrivateLabels([0, 1] * 99, 2, budget=PrivacyBudget(2.0, delta=1e-3))
            >>> steps = dp_sgd_charge(10.0, sampling_probability=0.1, steps=5, delta=1e-3)
            >>> receipt = labels.charge(steps, what="5 steps of my own")
            >>> labels.guarantee().epsilon == receipt.charge.epsilon
            True
        """
        if not isinstance(charge, Charge):
            raise TypeError(
                f"charge must be an accounting.Charge, got {type(charge).__name__}. For DP-SGD "
                "steps use accounting.dp_sgd_charge."
            )
        if unit is not None:
            _validate.one_of("unit", unit, PrivacyGuarantee.UNITS)
        self._uses.check_unit(unit)
        examples = self._examples.some(indices)
        use = PlannedUse(NamedUse(self, key).key, what, "steps", charge, examples.rows)
        flags = {
            "unit": unit or self.unit,
            "num_units": num_units,
            "seeded": seeded,
            "metrics_reported": metrics_reported,
            "sample_weights": sample_weights,
        }
        inherited = public_input(made_of, examples.chosen_by).receipts
        return self._uses.charge(use, inherited, **flags)

    def adopt(self, receipts: Iterable[Receipt]) -> None:
        """Counts the receipts of a model or of priors that may be about these labels.

        They may be, unless both label sets have stores, or ``people`` declares different
        populations. ``LabelDPModel.fit``, ``MultiStageTraining`` and heads call it.

        Raises:
            BudgetExceededError: the receipts would pass the budget; none was counted.
            ValueError: the vault has users, and a receipt is by label.
        """
        with self._uses.ledger.turn():
            for receipt in self._uses.ledger.account.check([], receipts):
                self._uses.ledger.keep(receipt=receipt)

    @_validate.takes_old_arguments
    def check_budget(
        self,
        mechanism: Public[
            Mechanism | Randomizer | Charge | Sequence[Mechanism | Randomizer | Charge]
        ],
        indices: Public[Any] = None,
        receipts: Iterable[Receipt] = (),
    ) -> None:
        """Raises a ``BudgetExceededError`` if uses would pass the budget; draws nothing.

        Several uses are checked as if ``reserve`` kept them together.
        ``mechanism`` is an argument of ``randomize``, ``release`` or ``charge``, or a list of such
        arguments. The receipts of public inputs count with
        ``accounting.public_input(inputs).with_value(mechanism)``.
        """
        examples = self._examples.some(indices)
        public = public_input(mechanism, examples.chosen_by)
        uses = NamedUse(self).planned(public.value[0], examples)
        with self._uses.ledger.turn():
            self._uses.check(uses, Receipts.merged(receipts, public.receipts))

    def reserve(self, uses: Public[Mapping[Any, Any] | PublicInput[Any]]) -> Reservation:
        """Reserves several uses together: all are within the budget, or none is reserved.

        In the block of ``with``, a call that draws one of the uses finds it, by its name or else by
        its cost: ``randomize``, ``release`` and ``evaluate`` with this ``key``, the ``fit`` of a
        head or a ``PrivateBoosting``, an epoch of ``LabelDPModel.fit``, ``charge``. At its end,
        also after an error, what was not drawn is given back.

        Guarantee:
            That of ``Reservation``. The uses are one plan that was fixed before its first release,
            and a statement for adaptive use counts them as one.

        Args:
            uses: by name, arguments of ``randomize``, ``release`` or ``charge``; heads; or lists of
                them, such as ``[charge] * epochs``. A ``Charge`` covers all uses whose names begin
                with its own, such as those of ``PrivateClassifier(key=name)``. A use whose name is
                recorded costs nothing more.

        Raises:
            BudgetExceededError: the uses together would pass the budget; none was reserved.
            DrawSettingsError: a use of this name is reserved with other settings.
            TypeError: a use that the vault can't price before its ``fit``.

        Example:
            >>> from tf_labeldp import PrivacyBudget, PrivateLabels, RandomizedResponse
            >>> labels = PrivateLabels([0, 1] * 50, num_classes=2, budget=PrivacyBudget(1.0))
            >>> uses = {"draw": RandomizedResponse(0.75, 2), "second": RandomizedResponse(0.25, 2)}
            >>> with labels.reserve(uses):
            ...     noisy = labels.randomize(RandomizedResponse(0.75, 2), key="draw")
            ...     labels.remaining()
            0.0
            >>> labels.remaining()
            0.25
        """
        public = public_input(uses)
        several = [(NamedUse(self, key), use) for key, use in public.value.items()]
        return LabelsTogether.reserve(several, public)

    def has_draw(self, key: str | None) -> bool:
        """Returns whether a draw of this name is recorded, and so costs nothing for its labels.

        None stands for the next draw without a key, which a store may have recorded.
        """
        return NamedUse(self, key).is_recorded

    def mechanism(self, key: str | None) -> Mechanism:
        """Returns the mechanism of a recorded draw; raises a ``KeyError`` if there is none.

        None stands for the next draw without a key.
        """
        return NamedUse(self, key).mechanism

    def decode(self, codes: Public[Any]) -> np.ndarray:
        """Returns the class values of class codes (m,), or of ``NoisyLabels``."""
        return self._classes.decode(PublicInput.bare(codes))

    def guarantee(self, *, after: Public[Any] = (), delta: float | None = None) -> PrivacyGuarantee:
        """Returns the statement of all uses so far, for the most charged example.

        ``model.guarantee()`` and ``noisy.guarantee()`` are the statements of one output.

        Args:
            after: mechanisms to add, with one use of all examples each; nothing is charged. With
                users, a ``LabelMomentMechanism`` costs what it costs in a head; with less noise
                than that of a head, its release costs more.
            delta: the delta of the statement; None takes the budget's.
        """
        public = public_input(after)
        planned = [
            Receipt(
                self.label_set,
                use.charge,
                use.what,
                unit=self.unit,
                num_units=self._uses.ledger.account.num_users,
            )
            for use in NamedUse(self).planned(public.value)
        ]
        return self._uses.ledger.guarantee(Receipts.merged(public.receipts, planned), delta)

    def history(self) -> UseHistory:
        """Returns the uses so far in order; equal steps in a row share a line.

        It prints as a table. Each use has ``time`` (UTC), ``what``, ``examples`` (a number),
        ``epsilon``, ``epsilon_so_far``, ``actor`` and ``key``.

        Example:
            >>> from tf_labeldp import PrivacyBudget
            >>> labels = PrivateLabels([0, 1], num_classes=2, budget=PrivacyBudget(1.0))
            >>> labels.raise_budget(PrivacyBudget(2.0), reason="a second study was approved")
            >>> labels.history()[0].what
            'budget raised to epsilon=2, delta=0: a second study was approved'
        """
        return self._uses.ledger.history()

    def remaining(self) -> float:
        """Returns the largest epsilon of one more pure-DP use of all these labels."""
        return self._uses.ledger.remaining(self._examples.chosen)

    def raise_budget(self, budget: PrivacyBudget, *, reason: str) -> None:
        """Raises the budget; the store keeps it, and the history shows it with its reason.

        Args:
            budget: at least the old budget in epsilon and delta, or a ``ValueError`` is raised.
            reason: a sentence for the history.
        """
        if not isinstance(reason, str) or not reason.strip():
            raise TypeError("reason must say why the budget is raised, in a sentence.")
        self._uses.ledger.raise_budget(budget, reason.strip())

    def __repr__(self) -> str:
        """Describes sizes and budget, and no label."""
        try:
            ledger = self._uses.ledger
        except AttributeError:  # An error in the constructor shows its arguments.
            return "PrivateLabels(not made)"
        return (
            f"PrivateLabels(n={len(self)}, {self._examples.kind}, "
            f"budget={ledger.budget!r}, draws={len(ledger.draws)})"
        )

    def _refuse(self, *unused: Any, **also_unused: Any) -> NoReturn:
        raise TypeError(
            "PrivateLabels does not give out true labels: it cannot be pickled, copied, indexed, "
            "iterated, turned into an array or passed to model.fit. Call randomize(mechanism) for "
            "noisy labels, or train with PrivateClassifier, a head or LabelDPModel."
        )

    __reduce_ex__ = __getitem__ = __iter__ = __array__ = _refuse  # type: ignore[assignment]
    shape = property(_refuse)  # Keras reads the shape first.


def _with_receipts_of(value: Any, *others: Any) -> PublicInput[Any]:
    public = public_input(value)
    return public_input(public, *others).with_value(public.value)


def refuse_noisy(labels: Any) -> None:
    """Raises for noisy labels, which would be randomized a second time."""
    if isinstance(labels, NoisyLabels):
        raise TypeError(
            "expected true labels, got NoisyLabels, which are drawn already. Fit "
            "PrivateBoosting().fit(X, noisy), or a Keras model by tf_labeldp.fit."
        )


def vault_of_array(
    labels: Any, kind: LabelKind, budget: PrivacyBudget, insecure_seed: int | None
) -> PrivateLabels:
    """Returns the vault of one fit on an array of labels, which each of its receipts names."""
    vault = PrivateLabels(labels, kind, budget=budget, insecure_seed=insecure_seed)
    vault._uses.ledger.account.notes = (_BY_THIS_PROCESS,)
    return vault
