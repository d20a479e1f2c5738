"""Stores of a project share one budget, and forgotten stores keep their receipts."""

from __future__ import annotations

import json
import multiprocessing
import shutil

import numpy as np
import pytest

from tf_labeldp import (
    BudgetExceededError,
    NoisyLabels,
    PrivacyBudget,
    PrivateLabels,
    RandomizedResponse,
    RRWithPrior,
    guarantee,
)
from tf_labeldp.accounting import PublicInput, dp_sgd_charge
from tf_labeldp.cli import main
from tf_labeldp.mechanisms import HistogramMechanism
from tf_labeldp.plugins import DrawSettingsError, Ledger
from tf_labeldp.scale import ReleaseKey
from tf_labeldp.vault import LabelStoreError, Store, forget

VISITS, DRUGS = [0, 1] * 20, [1, 0, 1] * 10


def rr(epsilon):
    return RandomizedResponse(epsilon, 2)


def stored(path, epsilon=3.0, project=None, **more):
    store = Store(path, project=project)
    return PrivateLabels(VISITS, 2, budget=PrivacyBudget(epsilon), store=store, **more)


def in_project(folder, name, labels, epsilon=2.0, **more):
    budget = None if epsilon is None else PrivacyBudget(epsilon)
    store = folder / "study" / name
    return PrivateLabels(labels, 2, budget=budget, store=Store(store, project=True), **more)


class TestBudget:
    def test_the_spending_of_one_store_counts_in_all(self, tmp_path):
        visits, drugs = in_project(tmp_path, "visits", VISITS), in_project(tmp_path, "drugs", DRUGS)
        visits.randomize(rr(1.25))
        assert (visits.remaining(), drugs.remaining()) == (0.75, 0.75)
        assert visits.guarantee().epsilon == drugs.guarantee().epsilon == 1.25
        with pytest.raises(BudgetExceededError, match=r"epsilon=2\.25"):
            drugs.randomize(rr(1.0))
        drugs.randomize(rr(0.75))
        with pytest.raises(BudgetExceededError):
            visits.randomize(rr(0.01))

    def test_three_stores_count_each_release_once(self, tmp_path):
        several = [in_project(tmp_path, name, VISITS) for name in "abc"]
        for vault in several * 2:
            vault.randomize(rr(0.25))
            for other in several:  # Each store reads charges that others copied from each other.
                other.remaining()
        assert [vault.guarantee().epsilon for vault in several] == [1.5] * 3
        assert [len(vault.receipts) for vault in several] == [6] * 3

    def test_a_later_store_takes_over_the_budget_and_the_spending(self, tmp_path):
        in_project(tmp_path, "visits", VISITS).randomize(rr(1.5))
        later = in_project(tmp_path, "drugs", DRUGS, epsilon=None)
        assert later.budget == PrivacyBudget(2.0) and later.remaining() == 0.5

    def test_a_new_store_in_the_folder_is_in_the_project(self, tmp_path):
        visits = in_project(tmp_path, "visits", VISITS)
        drugs = PrivateLabels(DRUGS, 2, store=tmp_path / "study" / "drugs")
        drugs.randomize(rr(0.5))
        assert visits.remaining() == 1.5
        stored(tmp_path / "study" / "separate", 1.0, project=False).randomize(rr(0.5))
        assert visits.remaining() == 1.5

    def test_commands_join_it(self, tmp_path, capsys):
        visits = in_project(tmp_path, "visits", VISITS)
        (tmp_path / "t.csv").write_text("y\n" + "0\n1\n" * 20)
        (tmp_path / "out").mkdir()

        def command(store, output, epsilon):
            arguments = ["--column", "y", "--task", "classification", "--num-classes", "2"]
            arguments += ["--store", str(tmp_path / "study" / store), "--epsilon", epsilon]
            arguments += ["--output", str(tmp_path / "out" / output)]
            return main(["randomize", str(tmp_path / "t.csv"), *arguments])

        assert command("drugs", "a.csv", "1.5") == 0
        assert visits.remaining() == 0.5
        visits.randomize(rr(0.5))
        assert command("more", "b.csv", "1") == 2
        assert "over the budget epsilon=2" in capsys.readouterr().err
        assert not (tmp_path / "out" / "b.csv").exists()

    def test_another_budget_is_refused(self, tmp_path):
        in_project(tmp_path, "visits", VISITS)
        with pytest.raises(DrawSettingsError, match="share the budget epsilon=2"):
            in_project(tmp_path, "drugs", DRUGS, epsilon=3.0)
        assert not (tmp_path / "study" / "drugs" / "header.json").exists()

    def test_a_budget_is_raised_for_all(self, tmp_path):
        visits, drugs = in_project(tmp_path, "visits", VISITS), in_project(tmp_path, "drugs", DRUGS)
        visits.raise_budget(PrivacyBudget(3.0), reason="approved")
        assert drugs.budget == PrivacyBudget(3.0)
        assert drugs.history()[0].what == "budget raised to epsilon=3, delta=0: approved"
        drugs.raise_budget(PrivacyBudget(4.0), reason="once more")
        assert visits.budget == PrivacyBudget(4.0)
        reopened = in_project(tmp_path, "visits", VISITS, epsilon=None)
        assert reopened.budget == PrivacyBudget(4.0)

    def test_declared_populations_do_not_add_up(self, tmp_path):
        oslo = in_project(tmp_path, "oslo", VISITS, people="Oslo")
        rome = in_project(tmp_path, "rome", DRUGS, people="Rome")
        oslo.randomize(rr(2.0))
        assert (oslo.remaining(), rome.remaining()) == (0.0, 2.0)

    def test_releases_of_engines_count_in_the_others(self, tmp_path):
        in_project(tmp_path, "visits", VISITS, draws="keyed")
        drugs = in_project(tmp_path, "drugs", DRUGS)
        key = ReleaseKey(tmp_path / "study" / "visits" / "labels.key")
        key.register("by an engine", rr(0.5), num_rows=40)
        assert drugs.remaining() == 1.5

    def test_steps_with_a_delta_compose(self, tmp_path):
        store = tmp_path / "study" / "visits"
        budget = PrivacyBudget(2.0, 1e-3)
        visits = PrivateLabels(VISITS, 2, budget=budget, store=Store(store, project=True))
        drugs = PrivateLabels(DRUGS, 2, store=Store(store.with_name("drugs"), project=True))
        steps = dp_sgd_charge(20.0, 1.0, 10, 1e-3)
        visits.charge(steps, what="steps")
        drugs.charge(steps, what="steps")
        both = dp_sgd_charge(20.0, 1.0, 20, 1e-3).epsilon
        assert visits.guarantee().epsilon == pytest.approx(both)
        assert steps.epsilon < both < 2 * steps.epsilon

    @pytest.mark.slow
    def test_concurrent_processes_do_not_pass_the_budget(self, tmp_path):
        for name in "abcd":
            in_project(tmp_path, name, VISITS)
        context = multiprocessing.get_context("spawn")
        with context.Pool(4) as pool:
            drawn = pool.starmap(_draw_until_refused, [(tmp_path, name) for name in "abcd"])
        assert sum(drawn) == 8  # of 0.25 each
        assert in_project(tmp_path, "a", VISITS, epsilon=None).guarantee().epsilon == 2.0


def _draw_until_refused(folder, name):
    labels = in_project(folder, name, VISITS, epsilon=None)
    for count in range(20):
        try:
            labels.randomize(rr(0.25), key=str(count))
        except BudgetExceededError:
            return count
    return 20


class TestFolder:
    def test_a_store_remembers_its_project(self, tmp_path):
        in_project(tmp_path, "visits", VISITS).randomize(rr(1.0))
        drugs = in_project(tmp_path, "drugs", DRUGS)
        again = PrivateLabels(VISITS, 2, store=tmp_path / "study" / "visits")
        again.randomize(rr(0.5), key="second")
        assert drugs.remaining() == 0.5

    @pytest.mark.parametrize("first", [True, False])
    def test_a_store_never_enters_or_leaves_a_project(self, tmp_path, first):
        stored(tmp_path / "study" / "a", project=first)
        with pytest.raises(LabelStoreError, match="project"):
            stored(tmp_path / "study" / "a", project=not first)

    def test_a_missing_store_is_detected(self, tmp_path):
        visits, drugs = in_project(tmp_path, "visits", VISITS), in_project(tmp_path, "drugs", DRUGS)
        drugs.randomize(rr(1.0))
        shutil.rmtree(tmp_path / "study" / "drugs")
        for use in (
            lambda: visits.randomize(rr(0.1)),
            lambda: visits.release(HistogramMechanism(0.1, 2)),
            lambda: visits.evaluate(np.array(VISITS), "accuracy", 0.1),
            lambda: visits.charge(dp_sgd_charge(9.0, 0.1, 1, 1e-5), what="steps"),
            lambda: visits.reserve({"a": rr(0.1)}),
            lambda: visits.adopt([]),
            lambda: Ledger.of_store(tmp_path / "study" / "visits"),
            lambda: in_project(tmp_path, "drugs", DRUGS),
        ):
            with pytest.raises(LabelStoreError, match="lacks its store 'drugs'"):
                use()

    @pytest.mark.parametrize(
        ("to", "message"), [(".", r"project\.json is missing"), ("other", "another project")]
    )
    def test_a_store_that_was_moved_is_refused(self, tmp_path, to, message):
        in_project(tmp_path, "visits", VISITS)
        stored(tmp_path / "other" / "a", project=True)
        moved = (tmp_path / "study" / "visits").rename(tmp_path / to / "visits")
        for open_it in (
            lambda: PrivateLabels(VISITS, 2, store=moved),
            lambda: Ledger.of_store(moved),
        ):
            with pytest.raises(LabelStoreError, match=message):
                open_it()
        assert not (tmp_path / "project.json").exists()

    def test_a_missing_or_edited_list_of_stores_is_detected(self, tmp_path):
        visits = in_project(tmp_path, "visits", VISITS)
        path = tmp_path / "study" / "project.json"
        content = json.loads(path.read_text())
        path.write_text(json.dumps({**content, "stores": {}}))
        with pytest.raises(LabelStoreError, match="edited"):
            visits.remaining()
        path.unlink()
        with pytest.raises(LabelStoreError, match="missing"):
            in_project(tmp_path, "drugs", DRUGS)

    def test_it_needs_a_store(self):
        with pytest.raises(ValueError, match="needs a store"):
            Store(project=True)


class TestLedgerWithoutLabels:
    def test_it_agrees_with_the_vault_and_writes_nothing(self, tmp_path):
        labels = stored(tmp_path / "s")
        labels.randomize(rr(0.5))
        labels.randomize(rr(1.0), indices=[0, 1, 2])

        def times():
            files = (tmp_path / "s").rglob("*")
            return {path: path.stat().st_mtime_ns for path in files if path.name != ".lock"}

        before = times()
        ledger = Ledger.of_store(tmp_path / "s")
        assert ledger.remaining() == labels.remaining() == 1.5
        assert str(ledger.history()) == str(labels.history())
        assert ledger.spread() == [(0.5, 37), (1.5, 3)]
        assert times() == before
        labels.randomize(rr(0.25))
        assert ledger.remaining() == 1.25

    def test_releases_of_engines_count_when_their_key_is_lost(self, tmp_path):
        store = tmp_path / "s"
        labels = stored(store, draws="keyed")
        labels.randomize(rr(0.5))
        key = ReleaseKey(store / "labels.key")
        key.register("engine", rr(1.0), num_rows=40)
        assert Ledger.of_store(store).remaining() == 1.5
        assert Ledger.of_store(store).receipts()[-1].key == "engine"
        (store / "labels.key").unlink()
        assert Ledger.of_store(store).remaining() == 1.5
        with pytest.raises(FileExistsError, match="Restore the file"):
            ReleaseKey.create(store / "labels.key")

    def test_a_key_of_other_labels_is_refused(self, tmp_path):
        for name in ("s", "other"):
            stored(tmp_path / name)
            ReleaseKey.create(tmp_path / name / "labels.key").register("a", rr(0.5))
        shutil.copy(tmp_path / "other" / "labels.key", tmp_path / "s" / "labels.key")
        for open_it in (
            lambda: PrivateLabels(VISITS, 2, store=tmp_path / "s"),
            lambda: ReleaseKey(tmp_path / "s" / "labels.key").guarantee(),
        ):
            with pytest.raises(LabelStoreError, match="other labels"):
                open_it()

    def test_a_record_whose_number_was_not_written_counts(self, tmp_path):
        labels = stored(tmp_path / "s")
        before = (tmp_path / "s" / "last-record").read_bytes()
        labels.randomize(rr(0.5))
        # A killed process leaves such a file.
        (tmp_path / "s" / "last-record").write_bytes(before)
        assert Ledger.of_store(tmp_path / "s").remaining() == 2.5
        assert (tmp_path / "s" / "last-record").read_bytes() == before

    @pytest.mark.parametrize("name", ["records/000000", "records/000001", "header.json"])
    def test_a_missing_file_is_detected(self, tmp_path, name):
        labels = stored(tmp_path / "s")
        labels.randomize(rr(0.5))
        labels.randomize(rr(0.5))
        (tmp_path / "s" / name).unlink()
        with pytest.raises(LabelStoreError):
            Ledger.of_store(tmp_path / "s")


class TestForget:
    def test_only_the_receipts_are_left(self, tmp_path):
        store = tmp_path / "s"
        labels = stored(store, draws="keyed")
        labels.randomize(rr(0.5), key="kept")
        ReleaseKey(store / "labels.key").register("engine", rr(1.0), num_rows=40)
        labels.raise_budget(PrivacyBudget(4.0), reason="approved")
        (store / "PRIVATE-files").write_text("digests")
        (store / "notes.txt").write_text("mine")
        before = Ledger.of_store(store)
        history, receipts = str(before.history()), before.receipts()
        assert forget(store) == ["notes.txt"]
        (store / "notes.txt").unlink()
        assert before.remaining() == 2.5
        names = {path.name for path in store.iterdir()}
        assert names <= {"header.json", "records", "last-record", ".lock"}
        assert all(b"PK" not in path.read_bytes() for path in (store / "records").iterdir())
        after = Ledger.of_store(store)
        assert str(after.history()) == history
        for new, old in zip(after.receipts(), receipts, strict=True):
            assert new.to_json() == old.to_json()
        assert (after.remaining(), after.budget) == (2.5, PrivacyBudget(4.0))

    def test_nothing_can_be_drawn_afterwards(self, tmp_path, monkeypatch):
        monkeypatch.setenv("LABELDP_ACTOR", "officer")
        labels = stored(tmp_path / "s")
        labels.randomize(rr(0.5), key="a")
        forget(tmp_path / "s")
        for use in (
            lambda: labels.randomize(rr(0.5)),
            lambda: labels.randomize(rr(0.5), key="a"),
            lambda: labels.guarantee(),
            lambda: PrivateLabels(VISITS, 2, store=tmp_path / "s"),
        ):
            with pytest.raises(LabelStoreError, match=r"forgotten on .* by officer"):
                use()

    @pytest.mark.parametrize("reads", [False, True])
    def test_in_a_project_its_receipts_still_count(self, tmp_path, reads):
        visits, drugs = in_project(tmp_path, "visits", VISITS), in_project(tmp_path, "drugs", DRUGS)
        drugs.randomize(rr(0.5))
        assert not reads or visits.remaining() == 1.5
        drugs.randomize(rr(0.5))
        forget(tmp_path / "study" / "drugs")
        assert visits.remaining() == 1.0
        assert in_project(tmp_path, "later", DRUGS, epsilon=None).remaining() == 1.0

    @pytest.mark.parametrize(("people", "total"), [((None, None), 1.5), (("Oslo", "Rome"), 1.0)])
    def test_its_receipts_still_count_where_they_went(self, tmp_path, people, total):
        old = stored(tmp_path / "old", people=people[0])
        old.randomize(rr(1.0)).save(tmp_path / "noisy")
        forget(tmp_path / "old")
        later = stored(tmp_path / "later", people=people[1])
        drawn = later.randomize(rr(0.5))
        before = NoisyLabels.load(tmp_path / "noisy")
        assert guarantee([before, drawn]).epsilon == total
        priors = PublicInput(np.array([0.5, 0.5]), before.receipts)
        drawn = later.randomize(RRWithPrior(0.5, 2), priors=priors)
        assert drawn.guarantee().epsilon == total

    def test_edited_receipts_are_refused(self, tmp_path):
        labels = stored(tmp_path / "s")
        labels.randomize(rr(0.5))
        forget(tmp_path / "s")
        path = tmp_path / "s" / "records" / "000000"
        path.write_bytes(path.read_bytes().replace(b'"epsilon": 0.5', b'"epsilon": 0.1'))
        with pytest.raises(LabelStoreError, match="000000 is damaged"):
            Ledger.of_store(tmp_path / "s")

    @pytest.mark.slow
    def test_a_killed_process_leaves_it_whole_or_forgotten(self, run_writers):
        folders = list(run_writers("killed", "forget")[0].iterdir())
        assert len(folders) > 8
        for store in (folder / "store" for folder in folders):
            assert Ledger.of_store(store).remaining() == 2.5
            forget(store)
            kept = {"header.json", "records", "last-record", ".lock"}
            assert {path.name for path in store.iterdir()} <= kept
            assert b"PK" not in (store / "records" / "000000").read_bytes()
            assert Ledger.of_store(store).remaining() == 2.5


@pytest.mark.parametrize("people", ["", 5])
def test_people_are_a_named_population(people):
    with pytest.raises(TypeError, match="people must be the name of a population"):
        PrivateLabels([0, 1], 2, budget=PrivacyBudget(1.0), people=people)
