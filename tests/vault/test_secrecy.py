"""No text, error or output of the vault shows a label."""

from __future__ import annotations

import copy
import json
import logging
import pickle
import traceback

import numpy as np
import pytest

from tf_labeldp.mechanisms import HistogramMechanism, RRTopK

SECRET = 987654
"""A label that cannot be in any text by chance."""


@pytest.fixture
def vault(make):
    return make(labels=[SECRET] * 7, num_classes=SECRET + 1)


@pytest.mark.parametrize("show", [repr, str, "{!r:>9}".format])
def test_texts(vault, show):
    text = show(vault)
    assert str(SECRET) not in text.replace(f"num_classes={SECRET + 1}", "")
    assert "n=7" in text


def test_logging(vault, caplog):
    with caplog.at_level(logging.DEBUG):
        logging.getLogger("user").info("vault %s %r", vault, vault._examples.sealed)
    assert str(SECRET) not in caplog.text
    assert "<sealed>" in caplog.text


@pytest.mark.parametrize(
    "leak",
    [
        pickle.dumps,
        copy.copy,
        copy.deepcopy,
        np.asarray,
        list,
        lambda vault: vault[0],
        lambda vault: list(reversed(vault)),
        lambda vault: np.sum(vault),
        lambda vault: pickle.dumps(vault, protocol=0),
        lambda vault: vault.shape,  # Keras's fit reads it first.
    ],
)
def test_no_way_out(vault, leak):
    with pytest.raises(TypeError, match=r"does not give out true labels.*randomize") as caught:
        leak(vault)
    assert str(SECRET) not in "".join(traceback.format_exception(caught.value))


def test_the_sealed_labels_refuse_too(vault):
    for leak in (pickle.dumps, copy.copy, copy.deepcopy):
        with pytest.raises(TypeError, match="true labels cannot be pickled or copied"):
            leak(vault._examples.sealed)


def test_the_vault_has_no_dictionary(vault):
    with pytest.raises(TypeError, match="__dict__"):
        vars(vault)
    for leak in (json.dumps, lambda vault: SECRET in vault, lambda vault: memoryview(vault)):
        with pytest.raises(TypeError):
            leak(vault)
    with pytest.raises(AttributeError):
        vault.labels = 1


def test_public_attributes_show_no_label(vault):
    vault.randomize(RRTopK(1.0, SECRET + 1, 1), priors=np.eye(1, SECRET + 1)[0])
    for name in dir(vault):
        if not name.startswith("_") and name != "shape":
            value = getattr(vault, name)
            if name not in ("num_classes", "classes"):
                assert str(SECRET) not in repr(value), name


def test_texts_of_a_draw_show_no_label(vault):
    first = np.eye(1, SECRET + 1)[0]
    noisy = vault.randomize(RRTopK(0.5, SECRET + 1, 1), priors=first)
    shown = [repr(noisy), str(noisy.guarantee()), noisy.guarantee().to_json()]
    shown += [str(vault.history()), repr(vault.history()), json.dumps(noisy.statement())]
    shown += [json.dumps(receipt.to_json()) for receipt in vault.receipts]
    for text in shown:
        assert str(SECRET) not in text.replace(str(SECRET + 1), "")
    assert not np.any(noisy.values)  # This channel reveals nothing.


def test_no_warning_or_output(vault, capfd, recwarn):
    vault.randomize(RRTopK(1.0, SECRET + 1, 1), priors=np.eye(1, SECRET + 1)[0])
    vault.guarantee()
    out, err = capfd.readouterr()
    assert (out, err, len(recwarn)) == ("", "", 0)


BAD_LABELS = {
    "out of range": ([0, 1, SECRET], {}, ValueError, "must lie in 0..4, but 1 of 3 do not"),
    "negative": ([-SECRET], {}, ValueError, "must lie in 0..4, but 1 of 1 do not"),
    "float": ([SECRET + 0.5], {}, TypeError, r"got dtype float64.*astype\('int64'\)"),
    "text": ([f"s{SECRET}"], {}, TypeError, "got texts.*Classes"),
    "one-hot": (np.full((3, 5), SECRET), {}, ValueError, r"got shape \(3, 5\).*argmax"),
    "column": (np.full((3, 1), SECRET), {}, ValueError, r"got shape \(3, 1\).*ravel"),
    "unknown class": (["a", f"s{SECRET}"], {"classes": [*"abcde"]}, ValueError, "1 of 2 labels"),
    "other type": ([1, SECRET], {"classes": [*"abcde"]}, ValueError, "got 2 whole"),
    "shape": (np.full((2, 2), SECRET), {"classes": [*"abcde"]}, ValueError, r"shape \(n,\), got"),
}  # fmt: skip


def test_errors_about_labels_do_not_show_them(make):
    for labels, arguments, error, message in BAD_LABELS.values():
        with pytest.raises(error, match=message) as caught:
            make(labels=labels, **arguments)
        assert str(SECRET) not in "".join(traceback.format_exception(caught.value))


def test_errors_of_draws_do_not_show_labels(vault):
    mechanism = RRTopK(1.0, SECRET + 1, 1)
    for indices, priors in ((None, None), ([99], None), (None, np.ones(3)), ([[1]], None)):
        with pytest.raises(ValueError) as caught:
            vault.randomize(mechanism, indices, priors)
        text = "".join(traceback.format_exception(caught.value)).replace(str(SECRET + 1), "")
        assert str(SECRET) not in text


def test_the_vault_copies_the_labels(make, labels, response):
    expected = labels.copy()
    vault = make(epsilon=60.0)
    labels[:] = 0
    np.testing.assert_array_equal(vault.randomize(response(60.0)).values, expected)


def test_a_returned_array_is_a_copy(make, response):
    vault = make()
    first = vault.randomize(response(), key="a")
    expected = first.values.copy()
    for array in (first.values, first.indices):
        with pytest.raises(ValueError, match="read-only"):
            array[:] = -1
    np.asarray(first)[:] = -1
    np.testing.assert_array_equal(first.values, expected)
    again = vault.randomize(response(), key="a")
    again.values.flags.writeable = True
    again.values[:] = -1
    np.testing.assert_array_equal(first.values, expected)
    np.testing.assert_array_equal(vault.randomize(response(), key="a").values, expected)


def test_a_released_array_is_a_copy(make):
    vault = make()
    first = vault.release(HistogramMechanism(1.0, 5), key="a")
    expected = first.values.copy()
    np.asarray(first)[:] = -1
    np.testing.assert_array_equal(first.values, expected)
    first.values[:] = -1
    np.testing.assert_array_equal(vault.release(HistogramMechanism(1.0, 5), key="a"), expected)


def test_indices_that_change_later_change_nothing(make, response):
    vault, indices = make(epsilon=1.0), np.arange(100)
    vault.randomize(response(1.0), indices, key="a")
    indices[:] = 150
    vault.randomize(response(1.0), np.arange(100, 200))
    vault.randomize(response(1.0), np.arange(100), key="a")
    assert vault.guarantee().epsilon == 1.0
