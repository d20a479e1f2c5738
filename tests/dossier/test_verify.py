"""Verification finds a published file that was changed or never came from a store."""

from __future__ import annotations

import dataclasses
import datetime
import gc
import json
import shutil

import keras
import numpy as np
import pytest
from seals import sealed

import tf_labeldp as ldp
from tf_labeldp.accounting import Charge, LabelSet, Receipt
from tf_labeldp.cli import main
from tf_labeldp.dossier import report, verify
from tf_labeldp.mechanisms import (
    HistogramMechanism,
    LaplaceMechanism,
    PeerToPeerRandomizedResponse,
)
from tf_labeldp.plugins import EventFields, TrainedModel
from tf_labeldp.vault import Classes, Numbers

LABELS = np.random.default_rng(0).integers(3, size=300)
X = np.random.default_rng(1).normal(size=(300, 4)).astype(np.float32)
X[:, :3] += 2.0 * np.eye(3, dtype=np.float32)[LABELS]


def vault(path, **more):
    return ldp.PrivateLabels(LABELS, 3, budget=ldp.PrivacyBudget(8.0, 1e-4), store=path, **more)


@pytest.fixture
def noisy(tmp_path):
    vault(tmp_path / "s").randomize(ldp.RandomizedResponse(1.0, 3)).save(tmp_path / "noisy")
    return tmp_path / "noisy"


class TestNoisyLabels:
    def test_a_saved_file_matches_its_statement(self, noisy, tmp_path):
        found = verify(noisy, store=tmp_path / "s")
        assert found.problems == () and found.guarantee.epsilon == 1.0
        assert set(found.sha256) == {"noisy_labels.json", "noisy_labels.npz"}
        assert "matches its statement" in str(found)

    @pytest.mark.parametrize(
        "randomizer", [ldp.LabelRandomizer(1.0), LaplaceMechanism(1.0, low=0.0, high=1.0)], ids=str
    )
    def test_numbers(self, tmp_path, randomizer):
        numbers = ldp.PrivateLabels(
            X[:, 0].clip(0, 1),
            Numbers(0.0, 1.0),
            budget=ldp.PrivacyBudget(4.0),
            store=tmp_path / "s",
        )
        numbers.randomize(randomizer).save(tmp_path / "n")
        assert verify(tmp_path / "n", store=tmp_path / "s").problems == ()

    @pytest.mark.parametrize("priors", [None, [0.2, 0.3, 0.5], "by example"])
    def test_labels_that_came_late_lie_between_the_others(self, tmp_path, priors):
        late = [5, 9, 200]
        known = [None if row in late else int(label) for row, label in enumerate(LABELS)]
        labels = ldp.PrivateLabels(
            known, 3, budget=ldp.PrivacyBudget(8.0), store=tmp_path / "s", unlabelled=late
        )
        mechanism = ldp.RandomizedResponse(1.0, 3) if priors is None else ldp.RRWithPrior(1.0, 3)
        if priors == "by example":
            priors = np.random.default_rng(2).dirichlet(np.ones(3), 300)
        first = np.delete(priors, late, 0) if np.ndim(priors) == 2 else priors
        labels.randomize(mechanism, key="a", priors=first)
        labels.extend(LABELS[late], rows=late)
        noisy = labels.randomize(mechanism, key="a", priors=priors)
        noisy.save(tmp_path / "noisy")
        found = verify(tmp_path / "noisy", store=tmp_path / "s")
        assert (found.problems, found.not_checked) == ((), ())
        values = noisy.values.copy()
        values[5] = (values[5] + 1) % 3
        other = ldp.NoisyLabels(
            values, noisy.indices, mechanism, noisy.priors, receipts=noisy.receipts
        )
        other.save(tmp_path / "other")
        assert verify(tmp_path / "other", store=tmp_path / "s").problems

    def test_other_kinds_of_draws(self, tmp_path):
        """Each untouched file is covered as a whole, alone and with its store."""
        labels = vault(tmp_path / "s", draws="stored")
        part, _ = labels.split(0.25)
        groups, few = np.arange(300) % 4, ldp.RandomizedResponse(0.1, 3)
        by_cluster = ldp.ClusterRandomizedResponse
        lambda_ = by_cluster(3, 0.1, 8.0, resampling_probability=0.9)
        drawn = {
            "some": labels.randomize(few, indices=[5, 3, 9]),
            "clusters": labels.randomize(
                by_cluster.for_epsilon(0.5, num_classes=3), clusters=groups
            ),
            "lambda": labels.randomize(lambda_, clusters=groups, key="lambda"),
            "alibi": labels.randomize(ldp.ALIBI(0.5, 3)),
            "part": part.randomize(ldp.RRWithPrior(0.1, 3), priors=[0.2, 0.3, 0.5], key="part"),
            "some of a part": part.randomize(few, indices=[1, 5, 100], key="some"),
            "head": labels.randomize(
                ldp.heads.HeadPriorRandomizer(0.5, 1e-5), features=X, key="head"
            ),
        }
        keyed = vault(tmp_path / "k", draws="keyed").randomize(few)
        users = vault(tmp_path / "u", users=np.arange(300) // 2).randomize(few, indices=[0, 5])
        names = ldp.PrivateLabels(
            np.array(["a", "b", "c"])[LABELS],
            Classes(["a", "b", "c"]),
            store=tmp_path / "n",
            budget=ldp.PrivacyBudget(1.0),
        )
        cases = [(name, noisy, "s") for name, noisy in drawn.items()]
        cases += [("keyed", keyed, "k"), ("users", users, "u"), ("n", names.randomize(few), "n")]
        for name, noisy, store in cases:
            noisy.save(tmp_path / f"noisy {name}")
            for of_store in (None, tmp_path / store):
                found = verify(tmp_path / f"noisy {name}", store=of_store)
                assert found.problems == found.not_checked == (), name

    def test_labels_that_are_drawn_from_distributions_alone(self, tmp_path):
        """Their draw has no receipt, and reads no label; the store recorded them."""
        mechanism = ldp.ClusterRandomizedResponse(
            3, 0.1, 4.0, resampling_probability=1.0, bias_correction=0.0
        )
        noisy = vault(tmp_path / "s").randomize(mechanism, clusters=np.arange(300) % 4)
        noisy.save(tmp_path / "noisy")
        found = verify(tmp_path / "noisy")
        assert found.problems == () and "without a true label" in found.not_checked[0]
        found = verify(tmp_path / "noisy", store=tmp_path / "s")
        assert found.problems == found.not_checked == ()
        dataclasses.replace(noisy, values=LABELS).save(tmp_path / "true")
        assert verify(tmp_path / "true", store=tmp_path / "s").problems

    def test_labels_that_came_late(self, tmp_path):
        labels = ldp.PrivateLabels(
            LABELS[:200], 3, budget=ldp.PrivacyBudget(8.0), store=tmp_path / "s"
        )
        response = ldp.RandomizedResponse(1.0, 3)
        labels.randomize(response, key="week").save(tmp_path / "weeks" / "0")
        labels.extend(LABELS[200:])
        noisy = labels.randomize(response, key="week")
        noisy.save(tmp_path / "both")
        labels.randomize(response, np.arange(200, 300), key="late").save(tmp_path / "weeks" / "1")
        for name in ("both", "weeks"):
            for of_store in (None, tmp_path / "s"):
                found = verify(tmp_path / name, store=of_store)
                assert found.problems == found.not_checked == (), name
        assert len(found.sha256) == 4
        (tmp_path / "weeks" / "0" / "labels.csv").write_text("0")
        assert "unknown file: 0/labels.csv" in verify(tmp_path / "weeks").problems[0]

    def test_what_only_the_library_writes_is_recorded(self, tmp_path):
        """A remark, other indices in a part, another bias correction: named, or wrong."""
        labels = vault(tmp_path / "s")
        part, _ = labels.split(0.25)
        some = part.randomize(ldp.RandomizedResponse(0.1, 3), indices=[1, 5, 100], key="some")
        mechanism = ldp.ClusterRandomizedResponse.for_epsilon(0.5, num_classes=3)
        resampled = labels.randomize(mechanism, clusters=np.arange(300) % 4)
        for number, (noisy, change) in enumerate([
            (some, {"indices": np.array([2, 7, 200])}),
            (some, {"remarks": ("0110",)}),
            (some, {"assumptions": (ldp.accounting.Assumption("a", "holder", "0110"),)}),
            (resampled, {"bias_correction": 0.123456}),
        ]):  # fmt: skip
            dataclasses.replace(noisy, **change).save(tmp_path / f"noisy {number}")
            found = verify(tmp_path / f"noisy {number}", store=tmp_path / "s")
            assert found.problems == () and found.not_checked
            assert "matches" not in str(found).splitlines()[-1]

    def test_a_forgotten_store_names_what_it_forgot(self, noisy, tmp_path):
        labels = vault(tmp_path / "s")
        labels.randomize(ldp.RandomizedResponse(1.0, 3), [5, 3, 9], key="b").save(tmp_path / "b")
        priors = [0.2, 0.3, 0.5]
        drawn = labels.randomize(ldp.RRWithPrior(1.0, 3), priors=priors, key="c")
        drawn.save(tmp_path / "c")
        other = ldp.mechanisms.Priors(np.eye(3)[LABELS])
        dataclasses.replace(drawn, priors=other).save(tmp_path / "d")
        ldp.vault.forget(tmp_path / "s")
        for name, parts in (("noisy", []), ("b", ["indices"]), ("c", []), ("d", ["priors"])):
            found = verify(tmp_path / name, store=tmp_path / "s")
            assert found.problems == () and len(found.not_checked) == len(parts)
            assert all(part in text for part, text in zip(parts, found.not_checked, strict=True))

    def test_reports_of_users(self, tmp_path):
        labels = ldp.PrivateLabels(
            LABELS % 2, 2, budget=ldp.PrivacyBudget(8.0, 1e-4), store=tmp_path / "s"
        )
        mechanism = PeerToPeerRandomizedResponse(2.0, 0.2, 0.5, 100, 1e-4)
        labels.randomize(mechanism, clusters=np.arange(300) % 3).save(tmp_path / "n")
        assert verify(tmp_path / "n", store=tmp_path / "s").problems == ()

    def test_answers_of_teachers(self, tmp_path):
        labels = vault(tmp_path / "s")
        answers = ldp.pate.PATE(
            2.0, 1e-5, num_teachers=10, num_queries=20, max_answers=10, threshold=0.5
        ).answer(X, labels)
        answers.save(tmp_path / "n")
        assert verify(tmp_path / "n", store=tmp_path / "s").problems == ()
        reseal(tmp_path / "n", lambda fields: None, values=(answers.values + 1) % 3)
        problems = verify(tmp_path / "n", store=tmp_path / "s").problems
        assert "differ from those of its receipt" in problems[0]

    def test_a_receipt_without_cost_that_the_store_does_not_know_is_not_checked(
        self, noisy, tmp_path
    ):
        free = Receipt(LabelSet.new(10), Charge(0.0, 0.0, EventFields.NONE), "an encoder")
        reseal(noisy, lambda fields: fields["receipts"].append(free.to_json()))
        assert "the receipt of an encoder" in verify(noisy, store=tmp_path / "s").not_checked

    def test_an_edited_file_is_found(self, noisy):
        path = noisy / "noisy_labels.json"
        path.write_text(path.read_text().replace('"epsilon": 1.0', '"epsilon": 0.1'))
        found = verify(noisy)
        assert "edited" in found.problems[0] and found.guarantee is None

    def test_a_smaller_statement_that_is_sealed_again_is_found(self, noisy):
        reseal(noisy, lambda fields: fields["guarantee"].update(epsilon=0.1))
        assert "(0.1, 0)-label-DP, but its receipts compose to (1, 0)" in verify(noisy).problems[0]

    @pytest.mark.parametrize(
        "change", [lambda notes: notes.append("The moon is full."), lambda notes: notes.pop()]
    )
    def test_other_assumptions_are_found(self, noisy, change):
        reseal(noisy, lambda fields: change(fields["guarantee"]["assumptions"]))
        assert "differ in their assumptions" in verify(noisy).problems[0]

    def test_a_statement_of_version_0_2_may_have_other_words(self, noisy):
        texts = ["the features are public", "uses are counted", "random bits are secure"]
        reseal(noisy, lambda fields: fields["guarantee"].update(assumptions=texts, epsilon=0.9999))
        assert verify(noisy).problems == ()
        reseal(noisy, lambda fields: fields["guarantee"].update(epsilon=0.999))
        assert "its statement is (0.999, 0)" in verify(noisy).problems[0]
        reseal(noisy, lambda fields: fields["guarantee"].update(assumptions=texts[1:], epsilon=1.0))
        assert "differ in their assumptions" in verify(noisy).problems[0]

    @pytest.mark.parametrize("program", ["tf-labeldp 0.3.0", ""])
    def test_lines_of_another_version_have_its_headline(self, noisy, program):
        own = json.loads((noisy / "noisy_labels.json").read_text())["made_by"]
        lines = [ldp.NoisyLabels.load(noisy).guarantee().headline, "  In other words."]
        problem = ("the lines of its statement differ from its figures",)
        reseal(noisy, lambda fields: fields.update(made_by=program or own, statement=lines))
        unknown = "the lines of its statement, which another version wrote"
        found = verify(noisy)
        assert (found.problems, unknown in found.not_checked) == (
            ((), True) if program else (problem, False)
        )
        for other in (["(0.1, 0)-label-DP", lines[1]], []):
            reseal(noisy, lambda fields, other=other: fields.update(statement=other))
            assert verify(noisy).problems == problem

    @pytest.mark.parametrize("name", ["guarantee", "statement", "made_by"])
    def test_a_statement_without_its_promise_is_found(self, noisy, name):
        reseal(noisy, lambda fields: fields.pop(name))
        assert verify(noisy).problems == (f"noisy_labels.json lacks {name}",)

    @pytest.mark.parametrize("value", [None, True, 5])
    def test_a_promise_of_another_type_is_found(self, noisy, value):
        for name in ("statement", "made_by"):
            reseal(noisy, lambda fields, name=name: fields.update({name: value}))
        problems = verify(noisy).problems
        assert f"noisy_labels.json was made by {value}" in problems

    def test_other_values_of_a_prior_are_found(self, tmp_path):
        labels = ldp.PrivateLabels(
            LABELS.astype(float), Numbers(0, 2), budget=ldp.PrivacyBudget(9.0), store=tmp_path / "s"
        )
        noisy = labels.randomize(ldp.LabelRandomizer(4.0, max_values=5))
        noisy.save(tmp_path / "n")
        assert verify(tmp_path / "n", store=tmp_path / "s").problems == ()
        reseal(tmp_path / "n", lambda fields: None, prior_values=0.9 * noisy.priors.values)
        problems = verify(tmp_path / "n", store=tmp_path / "s").problems
        assert "its priors differ from those of the draw" in problems

    def test_a_prior_of_another_store_is_not_checked(self, tmp_path):
        prior = None
        for name in ("first", "second"):
            labels = ldp.PrivateLabels(
                LABELS.astype(float),
                Numbers(0, 2),
                budget=ldp.PrivacyBudget(9.0),
                store=tmp_path / name,
                people=name,
            )
            given = {} if prior is None else {"values": prior.values, "prior": prior}
            noisy = labels.randomize(ldp.LabelRandomizer(4.0, max_values=5, **given))
            prior = noisy.priors
        noisy.save(tmp_path / "n")
        found = verify(tmp_path / "n", store=tmp_path / "second")
        assert "its priors" in found.not_checked
        assert all("the store has no receipt for Histogram" in text for text in found.problems)

    @pytest.mark.parametrize(
        ("others", "problem"),
        [
            (["no", "no"], "expected 2 different classes, one per class of RandomizedResponse"),
            (["no", "perhaps"], "its classes differ from those of the store"),
        ],
        ids=["repeated", "other"],
    )
    def test_class_values_of_no_draw_are_found(self, tmp_path, others, problem):
        words = ["no", "yes"]
        labels = ldp.PrivateLabels(
            words * 30, Classes(words), budget=ldp.PrivacyBudget(9.0), store=tmp_path / "s"
        )
        labels.randomize(ldp.RandomizedResponse(1.0, 2)).save(tmp_path / "n")
        reseal(tmp_path / "n", lambda fields: fields.update(classes=others))
        [found] = verify(tmp_path / "n", store=tmp_path / "s").problems
        assert problem in found

    def test_true_labels_that_are_sealed_again_are_found(self, noisy, tmp_path):
        reseal(noisy, lambda fields: None, values=LABELS)
        assert "its noisy labels differ from those of its receipt" in verify(noisy).problems[0]

    def test_a_cheaper_receipt_needs_the_store_to_be_found(self, noisy, tmp_path):
        drawn = ldp.NoisyLabels.load(noisy)
        [receipt] = drawn.receipts
        forged = Receipt(
            receipt.labels, Charge(0.1, 0.0, EventFields.randomized_response(0.1)), receipt.what,
            delta=1e-4, id=receipt.id, output_digest=receipt.output_digest, kind=receipt.kind,
        )  # fmt: skip
        forgery = tmp_path / "forged"
        ldp.NoisyLabels(drawn.values, drawn.indices, drawn.mechanism, receipts=[forged]).save(
            forgery
        )
        assert verify(forgery).problems == ()
        problem = verify(forgery, store=tmp_path / "s").problems[0]
        assert problem.startswith("the store has a different receipt for Randomized")

    def test_noisy_labels_of_another_store(self, noisy, tmp_path):
        vault(tmp_path / "other")
        found = verify(noisy, store=tmp_path / "other")
        assert "the store has no receipt for" in found.problems[0]


def reseal(folder, change, **edited):
    """Changes a statement and arrays like a forger who knows the seal of files."""
    with np.load(folder / "noisy_labels.npz") as content:
        arrays = {**content, **edited}
    if edited:
        np.savez(folder / "noisy_labels.npz", **arrays)
    path = folder / "noisy_labels.json"
    fields = json.loads(path.read_text())
    change(fields)
    path.write_text(sealed(fields, arrays))


class TestModels:
    @pytest.fixture
    def model(self, tmp_path):
        head = ldp.PrivateLogisticRegression(2.0, 1e-5).fit(X, vault(tmp_path / "s"))
        head.to_keras().save(tmp_path / "model.keras")
        return tmp_path / "model.keras"

    def test_a_head_carries_its_receipts(self, model, tmp_path):
        found = verify(model, store=tmp_path / "s")
        assert found.problems == () and found.guarantee.epsilon == pytest.approx(2.0)
        vault(tmp_path / "other")
        assert "has no receipt for" in verify(model, store=tmp_path / "other").problems[0]

    def test_a_model_without_receipts_shows_nothing(self, tmp_path):
        keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)]).save(tmp_path / "m.keras")
        found = verify(tmp_path / "m.keras")
        assert "the model has no receipts" in found.problems[0]
        assert found.guarantee is None and "label-DP" not in str(found)

    def test_a_file_that_is_no_model(self, tmp_path):
        (tmp_path / "m.keras").write_text("no model")
        assert "can't be read" in verify(tmp_path / "m.keras").problems[0]

    @pytest.mark.slow
    def test_the_folder_of_train(self, tmp_path):
        rows = [f"{a:.3f},{b:.3f},{int(a + b > 0)}" for a, b in X[:, :2]]
        (tmp_path / "t.csv").write_text("a,b,ill\n" + "\n".join(rows))
        train = ["train", str(tmp_path / "t.csv"), "--label", "ill", "--num-classes", "2"]
        out = tmp_path / "out"
        assert main([*train, "--epsilon", "4", "--store", str(tmp_path / "s"),
                     "--output", str(out)]) == 0  # fmt: skip
        assert verify(out, store=tmp_path / "s").problems == ()
        path = out / "privacy.json"
        path.write_text(path.read_text().replace('"epsilon": 4', '"epsilon": 1'))
        assert "its receipts compose to" in verify(out).problems[0]


class TestB8:
    """Files that passed with a store although the store had not paid for them."""

    def test_b8_true_labels_with_the_receipt_of_a_histogram(self, tmp_path):
        labels = vault(tmp_path / "s")
        counts = labels.release(HistogramMechanism(1.0, 3), key="counts")
        true = ldp.NoisyLabels(
            LABELS, np.arange(300), ldp.RandomizedResponse(1.0, 3), receipts=counts.receipts
        )
        true.save(tmp_path / "true")
        for found in (verify(tmp_path / "true"), verify(tmp_path / "true", store=tmp_path / "s")):
            assert "no receipt of a draw" in found.problems[0]
        assert "WRONG" in str(report(tmp_path / "s", published=[tmp_path / "true"]))

    def test_b8_true_labels_with_a_receipt_of_other_noisy_labels(self, tmp_path):
        labels = vault(tmp_path / "s")
        noisy = labels.randomize(ldp.RandomizedResponse(1.0, 3))
        for name, values in (("true", LABELS), ("some", noisy.values[:250]), ("own", noisy.values)):
            rows = np.arange(len(values))
            ldp.NoisyLabels(values, rows, noisy.mechanism, receipts=noisy.receipts).save(
                tmp_path / name
            )
            problems = verify(tmp_path / name, store=tmp_path / "s").problems
            assert bool(problems) == (name != "own")

    def test_b8_any_weights_with_a_pasted_receipt(self, tmp_path):
        head = ldp.PrivateLogisticRegression(2.0, 1e-5).fit(X, vault(tmp_path / "s"))
        model = head.to_keras()
        model.save(tmp_path / "own.keras")
        rng = np.random.default_rng(0)
        model.set_weights([rng.normal(size=w.shape) for w in model.get_weights()])
        model.save(tmp_path / "pasted.keras")
        assert verify(tmp_path / "own.keras", store=tmp_path / "s").problems == ()
        found = verify(tmp_path / "pasted.keras", store=tmp_path / "s")
        changed, unknown = found.problems
        assert "without receipts" in changed
        assert unknown == "the store has no record of the weights of head"
        reported = report(tmp_path / "s", published=[tmp_path / "pasted.keras"])
        assert reported.content["published"][0]["problems"]

    def test_b8_one_layer_of_several_with_other_weights(self, tmp_path):
        head = ldp.PrivateLogisticRegression(2.0, 1e-5).fit(X, vault(tmp_path / "s"))
        encoder = keras.Sequential(
            [keras.Input((X.shape[1],)), keras.layers.Dense(X.shape[1], name="own")]
        )
        model = head.to_keras(encoder=encoder)
        model.save(tmp_path / "own.keras")
        found = verify(tmp_path / "own.keras", store=tmp_path / "s")
        assert found.problems == () and "the weights of own, spread, public" in found.not_checked[0]
        layer = model.get_layer("head")
        kernel, bias = layer.get_weights()
        layer.set_weights([kernel, bias + 1.0])
        model.save(tmp_path / "bias.keras")
        problems = verify(tmp_path / "bias.keras", store=tmp_path / "s").problems
        assert problems[-1] == "the store has no record of the weights of head"

    def test_several_draws_in_one_file_are_found(self, tmp_path):
        labels, response = vault(tmp_path / "s"), ldp.RandomizedResponse(1.0, 3)
        parts = [labels.randomize(response, np.arange(i, 300, 2), key=str(i)) for i in (0, 1)]
        for name, order in (("both", (0, 1)), ("twice", (0, 0))):
            ldp.NoisyLabels(
                np.concatenate([parts[i].values for i in order]),
                np.concatenate([parts[i].indices for i in order]),
                response,
                receipts=(*parts[0].receipts, *parts[1].receipts),
            ).save(tmp_path / name)
            problems = verify(tmp_path / name, store=tmp_path / "s").problems
            assert bool(problems) == (name == "twice")

    def test_other_weights_with_a_history_of_their_own_need_the_store(self, tmp_path):
        noisy = vault(tmp_path / "s").randomize(ldp.RandomizedResponse(1.0, 3))
        # A store that has not seen the training.
        shutil.copytree(tmp_path / "s", tmp_path / "before")
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3, name="scores")])
        model.compile("sgd", keras.losses.CategoricalCrossentropy(from_logits=True))
        ldp.fit(model, X, noisy, verbose=0)
        model.save(tmp_path / "own.keras")
        assert verify(tmp_path / "own.keras").problems == ()
        assert verify(tmp_path / "own.keras", store=tmp_path / "s").problems == ()
        found = verify(tmp_path / "own.keras", store=tmp_path / "before")
        assert found.problems == ("the store has no record of the weights of scores",)

    def test_a_function_of_the_user_is_no_constant(self, tmp_path):
        labels = vault(tmp_path / "s")

        @keras.saving.register_keras_serializable("test_verify")
        def half(x):
            return 0.5 * x

        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3, half)])
        model.compile("sgd", keras.losses.CategoricalCrossentropy(from_logits=True))
        ldp.fit(model, X, labels.randomize(ldp.RandomizedResponse(1.0, 3)), verbose=0)
        model.save(tmp_path / "own.keras")
        assert verify(tmp_path / "own.keras", store=tmp_path / "s").problems == ()

    @pytest.mark.parametrize("is_open", [True, False])
    def test_weights_are_written_into_the_store_of_a_closed_vault(self, tmp_path, is_open):
        labels = vault(tmp_path / "s")
        noisy = labels.randomize(ldp.RandomizedResponse(1.0, 3))
        head = ldp.PrivateLogisticRegression(1.0, 1e-5).fit(X, labels)
        if not is_open:
            del labels
            gc.collect()
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3)])
        model.compile("sgd", keras.losses.CategoricalCrossentropy(from_logits=True))
        ldp.fit(model, X, noisy, verbose=0)
        model.save(tmp_path / "network.keras")
        head.to_keras().save(tmp_path / "head.keras")
        for name in ("network.keras", "head.keras"):
            assert verify(tmp_path / name, store=tmp_path / "s").problems == ()

    @pytest.mark.slow
    def test_an_exported_head_is_known_as_a_whole(self, tmp_path):
        """With its public layers; those of an encoder of other code are named."""
        labels = vault(tmp_path / "s")
        encoder = keras.Sequential([keras.Input((4,)), keras.layers.Dense(4, name="own")])
        table = {"age": X[:, 0], "job": np.repeat(["nurse", "smith"], 150)}
        heads = {
            "head": ldp.PrivateLogisticRegression(1.0, 1e-5, key="a").fit(X, labels),
            "cluster": ldp.heads.NoiseCluster(epsilon=1.0, num_clusters=4, key="b").fit(X, labels),
            "door": ldp.PrivateClassifier(1.0, 1e-5, key="c", method="head").fit(table, labels),
            "trees": ldp.PrivateClassifier(1.0, key="d", method="boosting").fit(table, labels),
            "own": ldp.PrivateLogisticRegression(1.0, 1e-5, encoder=encoder, key="e").fit(
                X, labels
            ),
        }
        for name, head in heads.items():
            ldp.save(head, tmp_path / name)
            found = verify(tmp_path / name, store=tmp_path / "s")
            assert found.problems == () and bool(found.not_checked) == (name == "own"), name
        assert "the weights of own, spread" in found.not_checked[0]

    def test_names_in_the_file_of_a_head_are_known(self, tmp_path):
        head = ldp.PrivateLogisticRegression(1.0, 1e-5).fit(X, vault(tmp_path / "s"))
        model = head.to_keras()
        for classes in ([0, 1, 2], ["0110", "1011", "0010"]):
            TrainedModel(model).note_facts({"columns": None, "classes": classes})
            model.save(tmp_path / "head.keras")
            found = verify(tmp_path / "head.keras", store=tmp_path / "s")
            assert found.problems == ()
            is_own = classes == [0, 1, 2]
            named = () if is_own else ("the names in the model's file (classes, columns)",)
            assert found.not_checked == named

    def test_a_head_is_known_after_the_store_was_forgotten(self, tmp_path):
        head = ldp.PrivateLogisticRegression(2.0, 1e-5).fit(X, vault(tmp_path / "s"))
        head.to_keras().save(tmp_path / "m.keras")
        ldp.vault.forget(tmp_path / "s")
        assert verify(tmp_path / "m.keras", store=tmp_path / "s").problems == ()


class TestReportAndCommand:
    def test_a_report_lists_digests(self, noisy, tmp_path):
        report(tmp_path / "s", published=[noisy]).save(tmp_path / "out")
        listed = tmp_path / "out" / "report.json"
        assert verify(noisy, report=listed).problems == ()
        vault(tmp_path / "s").randomize(ldp.RandomizedResponse(1.0, 3), key="b").save(
            tmp_path / "other"
        )
        problems = verify(tmp_path / "other", report=listed).problems
        assert len(problems) == 2 and "does not list the content" in problems[0]

    def test_a_report_names_problems(self, noisy, tmp_path):
        reseal(noisy, lambda fields: fields["guarantee"].update(epsilon=0.1))
        found = report(tmp_path / "s", published=[noisy])
        assert "WRONG" in str(found) and found.content["published"][0]["problems"]

    def test_other_files_are_errors(self, tmp_path, noisy):
        (tmp_path / "x.csv").write_text("a\n1\n")
        with pytest.raises(ValueError, match="expected noisy labels with their statement"):
            verify(tmp_path / "x.csv")
        with pytest.raises(FileNotFoundError):
            verify(tmp_path / "nothing")
        with pytest.raises(ValueError, match="expected the report"):
            verify(noisy, report=tmp_path / "x.csv")

    def test_the_commands(self, noisy, tmp_path, capsys):
        store, out = str(tmp_path / "s"), str(tmp_path / "out")
        assert main(["report", store, "--published", str(noisy), "--audit", "--output", out]) == 0
        assert "audit of RandomizedResponse" in capsys.readouterr().out
        listed = str(tmp_path / "out" / "report.json")
        assert main(["verify", str(noisy), "--store", store, "--report", listed]) == 0
        assert main(["forget", store]) == 2
        assert "--yes" in capsys.readouterr().err
        assert main(["forget", store, "--yes"]) == 0
        assert main(["verify", str(noisy), "--store", store]) == 0
        reseal(noisy, lambda fields: fields["guarantee"].update(epsilon=0.1))
        assert main(["verify", str(noisy)]) == 1
        assert main(["report", store, "--published", str(noisy), "--output", out]) == 1

    @pytest.mark.parametrize("verb", ["report", "forget"])
    def test_no_store(self, tmp_path, verb, capsys):
        more = ["--yes"] if verb == "forget" else []
        assert main([verb, str(tmp_path), *more]) == 2
        assert "label store" in capsys.readouterr().err

    def test_matplotlib_is_named_before_anything_is_written(
        self, noisy, tmp_path, monkeypatch, capsys
    ):
        monkeypatch.setitem(__import__("sys").modules, "matplotlib", None)
        assert main(["report", str(tmp_path / "s"), "--output", str(tmp_path / "one")]) == 0
        later = datetime.datetime.now(datetime.timezone.utc) + datetime.timedelta(days=40)
        with monkeypatch.context() as patch:
            patch.setattr(Receipt, "timestamp", lambda: later.isoformat(timespec="seconds"))
            vault(tmp_path / "s").randomize(ldp.RandomizedResponse(0.25, 3), key="second")
        out = tmp_path / "out"
        assert main(["report", str(tmp_path / "s"), "--output", str(out)]) == 2
        assert "tf-labeldp[plots]" in capsys.readouterr().err
        assert not out.exists()


def test_a_copy_of_a_store_is_that_store(noisy, tmp_path):
    shutil.copytree(tmp_path / "s", tmp_path / "copy")
    assert verify(noisy, store=tmp_path / "copy").problems == ()
