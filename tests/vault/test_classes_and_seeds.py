"""Class values of any kind, and runs that can be repeated."""

from __future__ import annotations

import inspect

import numpy as np
import pytest

from tf_labeldp.accounting import PrivacyBudget
from tf_labeldp.mechanisms import HistogramMechanism, RandomizedResponse, RRWithPrior
from tf_labeldp.vault import Classes, LabelKind, PrivateLabels

HUGE = 60.0  # an epsilon without noise

KINDS = {
    "strings": ["cat", "dog", "eel"],
    "tuples": [("a", 1), ("a", 2), ("b", 1)],
    "integers": [30, 10, 20],
    "booleans": [False, True],
    "mixed": [1, "1", None, frozenset()],
}


class Tensor:
    """A tensor of any framework, of which the vault uses only ``numpy()``."""

    def __init__(self, values):
        self._values = np.asarray(values)

    def numpy(self):
        return self._values


def vault_of(labels, **arguments):
    return PrivateLabels(labels, budget=PrivacyBudget(HUGE), **arguments)


def noiseless(vault):
    return vault.randomize(RandomizedResponse(HUGE, vault.num_classes)).values


@pytest.mark.parametrize("kind", KINDS)
def test_classes_of_any_kind(kind):
    classes = KINDS[kind]
    codes = np.random.default_rng(41).integers(0, len(classes), 30)
    labels = [classes[code] for code in codes]
    vault = vault_of(labels, kind=Classes(classes))
    assert (vault.num_classes, vault.classes) == (len(classes), tuple(classes))
    noisy = noiseless(vault)
    np.testing.assert_array_equal(noisy, codes)
    decoded = vault.decode(noisy)
    again = vault_of(labels, kind=Classes(classes)).randomize(
        RandomizedResponse(HUGE, len(classes))
    )
    assert vault.decode(again).tolist() == decoded.tolist()  # from NoisyLabels
    assert decoded.shape == (30,)
    assert decoded.tolist() == labels
    assert [type(value) for value in decoded.tolist()] == [type(value) for value in labels]


@pytest.mark.parametrize("kind", ["strings", "booleans"])
def test_classes_of_numpy_arrays_and_tensors(kind):
    classes = KINDS[kind]
    codes = np.random.default_rng(42).integers(0, len(classes), 30)
    array = np.asarray(classes)[codes]
    for labels in (array, array.astype(object), Tensor(array), tuple(array.tolist())):
        np.testing.assert_array_equal(noiseless(vault_of(labels, kind=Classes(classes))), codes)
    # Python values keep repr and stores independent of NumPy.
    vault = vault_of(array, kind=Classes(np.asarray(classes)))
    assert vault.classes == tuple(classes)
    assert {type(value) for value in vault.classes} == {type(classes[0])}


def test_codes_without_classes():
    for labels in ([0, 2, 1], (0, 2, 1), np.array([0, 2, 1], np.uint8), Tensor([0, 2, 1])):
        vault = vault_of(labels, num_classes=3)
        assert noiseless(vault).tolist() == [0, 2, 1]
        assert vault.classes == (0, 1, 2)
        assert vault.decode([2, 0]).tolist() == [2, 0]


def test_tensorflow_tensors():
    tf = pytest.importorskip("tensorflow")
    assert noiseless(vault_of(tf.constant([0, 2, 1]), num_classes=3)).tolist() == [0, 2, 1]
    words = tf.constant(["dog", "cat"])
    assert noiseless(vault_of(words, kind=Classes([b"cat", b"dog"]))).tolist() == [1, 0]


def test_the_number_of_classes_is_never_counted_from_the_labels():
    with pytest.raises(ValueError, match=r"the kind of the labels once, got none.*rare class"):
        vault_of([0, 1, 2])
    assert vault_of(["a"], kind=Classes(["a", "b", "c"])).num_classes == 3


def test_contradictory_arguments():
    for arguments, error, message in [
        ({"kind": 3, "num_classes": 2}, ValueError, "once, got 3 and num_classes=2"),
        ({"num_classes": 2.0}, TypeError, "num_classes must be an integer, got float"),
        ({"num_classes": 2, "insecure_seed": 1.0}, TypeError, "insecure_seed must be an integer"),
        ({"num_classes": 2, "budget": 1.0}, TypeError, "budget must be a PrivacyBudget, got float"),
    ]:
        with pytest.raises(error, match=message):
            PrivateLabels([], **{"budget": PrivacyBudget(1.0), **arguments})
    for arguments, message in [
        ({"classes": ["a", "b", "a"]}, "has a repeated value"),
        ({"classes": ["a", "b"], "num_classes": 3}, "num_classes=3 but classes has 2"),
        ({"classes": ["a"]}, "classes must have at least 2 values, got 1"),
    ]:
        with pytest.raises(ValueError, match=message):
            LabelKind.of(**arguments)


def test_decode_refuses_other_values():
    vault = vault_of(["a"], kind=Classes(["a", "b"]))
    with pytest.raises(ValueError, match=r"codes must lie in 0..1"):
        vault.decode([2])
    with pytest.raises(TypeError, match="codes must be integers"):
        vault.decode(["a"])


def test_no_labels_at_all():
    vault = vault_of(np.empty(0, int), num_classes=3)
    assert len(vault) == 0 and noiseless(vault).shape == (0,)
    assert vault.guarantee().epsilon == 0.0


def test_a_seed_repeats_the_run(make, response):
    runs = [make(epsilon=3.0, insecure_seed=seed) for seed in (5, 5, 6)]
    drawn = [[vault.randomize(response()).values for _ in range(3)] for vault in runs]
    np.testing.assert_array_equal(drawn[0], drawn[1])
    assert np.any(np.array(drawn[0]) != np.array(drawn[2]))
    assert np.any(drawn[0][0] != drawn[0][1])  # Each draw has its own stream.


def test_stored_draws_do_not_shift_later_seeded_ones(make, response, tmp_path):
    whole = make(epsilon=2.0, insecure_seed=5)
    first, second = whole.randomize(response()).values, whole.randomize(response()).values
    started = make(epsilon=2.0, insecure_seed=5, store=tmp_path / "s")
    np.testing.assert_array_equal(started.randomize(response()).values, first)
    resumed = make(epsilon=2.0, insecure_seed=5, store=tmp_path / "s")
    np.testing.assert_array_equal(resumed.randomize(response()).values, first)  # read, not drawn
    np.testing.assert_array_equal(resumed.randomize(response()).values, second)


def test_a_seeded_run_is_stated_as_not_private(make, response, tmp_path):
    vault = make(epsilon=2.0, store=tmp_path / "s", insecure_seed=3)
    assert not vault.guarantee().seeded
    noisy = vault.randomize(response())
    # The draw stays seeded when the store is opened without the seed.
    opened = make(epsilon=2.0, store=tmp_path / "s")
    read = opened.randomize(response())
    for artefact in (vault, noisy, opened, read):
        stated = artefact.guarantee()
        assert stated.seeded and not stated.is_private
        assert "NOT PRIVATE: seeded" in str(stated)
        assert "secure-random-bits" not in {note.code for note in stated.assumptions}


def test_an_unseeded_run_names_its_assumptions(make, response):
    vault = make()
    noisy = vault.randomize(response())
    for stated in (vault.guarantee(), noisy.guarantee()):
        assert stated.is_private and stated.relation == "replace_label"
        assert "the label of one training example" in str(stated)
        codes = {note.code for note in stated.assumptions}
        assert codes == {"public-features", "all-uses-counted", "secure-random-bits"}
        assert all(f"[{text.code}] {text}" in str(stated) for text in stated.assumptions)


def test_priors_of_unknown_origin_are_an_assumption(make, response):
    """An array does not record how it was made; released priors do."""
    text = "features, weights, encoders and networks of these uses were made without "
    vault = make(epsilon=3.0)
    assert text not in str(vault.randomize(response(0.5)).guarantee())
    released = vault.release(HistogramMechanism(0.5, 5)).priors()
    known = vault.randomize(RRWithPrior(0.5, 5), priors=released)
    assert text not in str(vault.guarantee())
    assert known.guarantee().epsilon == 1.0 and vault.guarantee().epsilon == 1.5
    unknown = vault.randomize(RRWithPrior(0.5, 5), priors=np.asarray(released))
    assert text in str(unknown.guarantee()) and unknown.guarantee().epsilon == 0.5
    assert text in str(vault.guarantee()) and vault.guarantee().epsilon == 2.0


def test_texts_of_a_tensor_are_bytes(make):
    texts = np.array([b"yes", b"no", b"yes"], dtype=object)
    vault = make(kind=Classes(["no", "yes"]), labels=texts, epsilon=60.0)
    noisy = vault.randomize(RandomizedResponse(60.0, 2))
    assert vault.decode(noisy).tolist() == ["yes", "no", "yes"]


def test_one_argument_of_a_vault_repeats_its_noise():
    """The seed of a split chooses examples, and a charge states whether its noise was seeded."""
    arguments = {
        (name, argument)
        for name, method in vars(PrivateLabels).items()
        if inspect.isfunction(method) and (name == "__init__" or not name.startswith("_"))
        for argument in inspect.signature(method).parameters
        if "seed" in argument or "rng" in argument
    }
    own = ("__init__", "insecure_seed")
    assert arguments == {own, ("split", "seed"), ("charge", "seeded")}
    budget = PrivacyBudget(1.0)
    parts = [PrivateLabels([0, 1] * 200, 2, budget=budget).split(0.5, seed=4)[1] for _ in range(2)]
    first, second = (part.randomize(RandomizedResponse(0.5, 2)) for part in parts)
    np.testing.assert_array_equal(first.indices, second.indices)
    assert np.any(first.values != second.values)
    assert not first.guarantee().seeded
