"""Uses that are reserved together: all are within the budget, or none is reserved."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import subprocess
import sys

import numpy as np
import pytest

import tf_labeldp as ldp
from tf_labeldp.accounting import BudgetExceededError, Charge, PrivacyBudget
from tf_labeldp.cli import main
from tf_labeldp.mechanisms import HistogramMechanism, LaplaceMechanism, RandomizedResponse
from tf_labeldp.plugins import DrawSettingsError, EventFields, gaussian_sigma
from tf_labeldp.vault import (
    LabelStoreError,
    Numbers,
    PrivateLabels,
    Reservation,
    Store,
    forget,
    give_back,
)
from tf_labeldp.vault.uses import NamedUse

Y = np.arange(60) % 2


def rr(epsilon):
    return RandomizedResponse(epsilon, 2)


def vault(store=None, epsilon=1.0, delta=0.0, **more):
    return PrivateLabels(Y, 2, budget=PrivacyBudget(epsilon, delta), store=store, **more)


@pytest.fixture(params=["memory", "store"])
def labels(request, tmp_path):
    return vault(tmp_path / "s" if request.param == "store" else None)


class TestReserve:
    @pytest.mark.holds("vault.PrivateLabels.reserve")
    def test_all_or_none(self, labels):
        with pytest.raises(BudgetExceededError, match="Nothing was drawn"):
            labels.reserve({"a": rr(0.75), "b": rr(0.5)})
        assert (labels.remaining(), len(labels.history())) == (1.0, 0)
        with labels.reserve({"a": rr(0.75), "b": rr(0.25)}):
            assert labels.remaining() == 0.0

    @pytest.mark.holds("vault.PrivateLabels.reserve")
    def test_labels_that_come_after_a_reservation_pay_for_its_draws(self, tmp_path):
        path = tmp_path / "s"
        labels = vault(path, delta=1e-5)
        # Small draws cost less together than one by one: only the filter refuses the ones after.
        draws = {f"draw {number}": rr(0.04) for number in range(25)}
        with labels.reserve(draws):
            labels.extend(1 - Y)
            for key, draw in draws.items():
                assert len(labels.randomize(draw, key=key)) == 2 * Y.size
        everyone = PrivateLabels([*Y, *(1 - Y)], 2, store=path)
        for each in (labels, everyone):
            old, new = (part.remaining() for part in each.split(np.arange(60, 120)))
            assert old == new < 0.5
            with pytest.raises(BudgetExceededError, match="fixed in advance"):
                each.randomize(rr(new + 0.01), indices=np.arange(60, 120))

    @pytest.mark.holds("vault.PrivateLabels.reserve")
    def test_labels_that_come_after_a_reservation_have_its_draws_checked(self, labels):
        with labels.reserve({"a": rr(0.75)}):
            labels.extend(1 - Y)
            labels.randomize(rr(0.5), indices=np.arange(60, 120), key="b")
            with pytest.raises(BudgetExceededError, match="Nothing was drawn"):
                labels.randomize(rr(0.75), key="a")

    @pytest.mark.holds("vault.Reservation")
    def test_nothing_else_spends_what_is_reserved(self, labels):
        with labels.reserve({"a": rr(0.5), "b": rr(0.25)}):
            for use in (
                lambda: labels.randomize(rr(0.3), key="other"),
                lambda: labels.release(HistogramMechanism(0.3, 2), key="other"),
                lambda: labels.charge(Charge.of(rr(0.3)), what="other"),
                lambda: labels.check_budget(rr(0.3)),
                lambda: labels.reserve({"c": rr(0.3)}),
            ):
                with pytest.raises(BudgetExceededError, match=r"0\.75 with what is reserved"):
                    use()
            labels.randomize(rr(0.25), key="other")
            labels.randomize(rr(0.5), key="a")
            labels.randomize(rr(0.25), key="b")
        assert labels.guarantee().epsilon == 1.0 and labels.remaining() == 0.0

    def test_a_release_takes_nothing_of_a_draw_with_its_name(self, labels):
        with labels.reserve({"a": rr(0.5), "b": Charge.of(rr(0.25))}):
            with pytest.raises(DrawSettingsError, match="got another mechanism"):
                labels.release(HistogramMechanism(0.5, 2), key="a")
            labels.release(HistogramMechanism(0.25, 2), key="b")
            labels.randomize(rr(0.5), key="a")
        assert labels.guarantee().epsilon == 0.75

    @pytest.mark.holds("vault.Reservation")
    def test_parts_become_charges_of_one_plan(self, labels):
        with labels.reserve({"a": rr(0.5), "b": HistogramMechanism(0.25, 2), "c": rr(0.1)}):
            labels.randomize(rr(0.5), key="a")
            assert labels.guarantee().epsilon == 0.5
            labels.release(HistogramMechanism(0.25, 2), key="b")
        labels.randomize(rr(0.1), key="alone")
        plans = {receipt.key: receipt.plan for receipt in labels.receipts}
        assert plans["a"] == plans["b"] != "" and plans["alone"] == ""
        assert labels.remaining() == pytest.approx(0.15)

    def test_what_was_not_drawn_is_given_back_after_an_error(self, labels):
        with pytest.raises(KeyError), labels.reserve({"a": rr(0.5), "b": rr(0.5)}):
            labels.randomize(rr(0.5), key="a")
            raise KeyError
        assert (labels.guarantee().epsilon, labels.remaining()) == (0.5, 0.5)
        labels.randomize(rr(0.5), key="other")

    def test_uses_of_different_examples_are_checked_on_all_of_them(self, labels):
        labels.randomize(rr(0.75), np.arange(30, 60))
        parts = labels.split(np.arange(30, 60))
        uses = [use for part in parts for use in NamedUse(part).planned(rr(0.5))]
        with labels._uses.ledger.turn():
            labels._uses.check(uses[:1])
            with pytest.raises(BudgetExceededError, match=r"have spent epsilon=0\.75"):
                labels._uses.check(uses)

    def test_without_a_block_it_lives_as_long_as_its_object(self, labels):
        kept = labels.reserve({"a": rr(0.5)})
        assert labels.remaining() == 0.5
        with labels._uses.ledger.turn():  # Garbage may be collected while a record is written.
            del kept
            assert labels.guarantee().epsilon == 0.0
        assert labels.remaining() == 1.0

    def test_history_and_remaining_show_it(self, labels):
        with labels.reserve({"a": rr(0.5), "b": rr(0.25)}):
            labels.randomize(rr(0.5), key="a")
            drawn, reserved = labels.history()
            assert (drawn.epsilon_so_far, drawn.key) == (0.5, "a")
            assert reserved.what.endswith(", reserved") and reserved.key == "b"
            assert (reserved.epsilon, reserved.epsilon_so_far) == (0.25, 0.5)
            assert labels.remaining() == 0.25
            assert labels.guarantee().epsilon == 0.5
        assert [use.key for use in labels.history()] == ["a"]

    def test_uses_without_a_key_are_found_by_their_cost(self, labels):
        with labels.reserve({"a": rr(0.25), "epochs": [Charge.of(rr(0.25))] * 2}) as plan:
            assert isinstance(plan, Reservation)
            labels.randomize(rr(0.25))
            labels.check_budget([Charge.of(rr(0.25))] * 2)
            for _ in range(2):
                labels.charge(Charge.of(rr(0.25)), what="an epoch")
            assert labels.remaining() == 0.25
        assert len({receipt.plan for receipt in labels.receipts}) == 1
        assert labels.remaining() == 0.25

    def test_a_charge_covers_the_uses_whose_names_begin_with_its_own(self, labels):
        uses = (rr(0.5), rr(0.3))
        with labels.reserve({"search": Charge.of(rr(0.8))}):
            for names in ("search/a", "search/b"), ("other/a", "other/b"), ("searching", "b"):
                refused = pytest.raises(BudgetExceededError)
                expected = contextlib.nullcontext() if names[0] == "search/a" else refused
                with expected, labels.reserve(dict(zip(names, uses, strict=True))):
                    assert labels.remaining() == pytest.approx(0.2)
            labels.randomize(uses[0], key="search/a")
            assert labels.remaining() == pytest.approx(0.2)
        assert labels.guarantee().epsilon == 0.5

    def test_a_named_use_with_other_settings_is_refused(self, labels):
        with labels.reserve({"a": rr(0.25)}):
            for use in (
                lambda: labels.randomize(rr(0.5), key="a"),
                lambda: labels.reserve({"a": rr(0.5)}),
            ):
                with pytest.raises(DrawSettingsError, match="as it was reserved"):
                    use()
        assert labels.remaining() == 1.0

    def test_a_recorded_draw_is_not_reserved_again(self, labels):
        labels.randomize(rr(0.5), key="a")
        with labels.reserve({"a": rr(0.5), "b": rr(0.5)}):
            labels.randomize(rr(0.5), key="a")
            labels.randomize(rr(0.5), key="b")
        with labels.reserve({"a": rr(0.5), "b": rr(0.5)}):
            assert labels.remaining() == 0.0

    def test_it_is_for_the_examples_of_a_part(self, labels):
        first, second = labels.split(0.5)
        with first.reserve({"a": rr(1.0)}), second.reserve({"b": rr(0.75)}):
            assert (first.remaining(), second.remaining(), labels.remaining()) == (0.0, 0.25, 0.0)

    def test_randomizers_and_heads(self):
        y = np.arange(2000) % 2
        x = np.random.default_rng(0).normal(size=(2000, 3)) + y[:, np.newaxis]
        labels = PrivateLabels(y, 2, budget=PrivacyBudget(3.0, 1e-5))
        clusters = ldp.ClusterRandomizedResponse.for_epsilon(1.0, 2)
        head, boosting = ldp.PrivateRidge(1.0, 1e-5), ldp.PrivateBoosting(0.5)
        with labels.reserve({"c": clusters, "head": head, "boosting": boosting}):
            with pytest.raises(BudgetExceededError):
                labels.randomize(rr(1.0), key="other")
            head.fit(x, labels)
            boosting.fit(x, labels)
            labels.randomize(clusters, clusters=y, key="c")
        receipts = labels.receipts
        assert len(receipts) == 4 and len({receipt.plan for receipt in receipts}) == 1

    def test_receipts_of_inputs_count_with_the_first_use(self):
        encoder_of = vault(epsilon=2.0)
        noisy = encoder_of.randomize(rr(0.5))
        prior = ldp.accounting.public_input(noisy).with_value([0.5, 0.5])
        labels = vault()
        uses = {"a": ldp.LabelRandomizer(0.5, values=(0.0, 1.0), prior=prior)}
        numbers = PrivateLabels(Y, Numbers(0, 1), budget=PrivacyBudget(1.0))
        with numbers.reserve(uses):
            assert numbers.remaining() == 0.0 and numbers.guarantee().epsilon == 0.0
        assert numbers.remaining() == 1.0
        with labels.reserve({"a": rr(0.5)}):
            pass
        assert labels.receipts == ()


class TestProcesses:
    def test_another_handle_sees_it(self, tmp_path):
        first, second = vault(tmp_path / "s"), PrivateLabels(Y, 2, store=tmp_path / "s")
        with first.reserve({"a": rr(0.75)}):
            assert second.remaining() == 0.25
            assert second.history()[0].key == "a"
            with pytest.raises(BudgetExceededError):
                second.randomize(rr(0.5))
        assert second.remaining() == 1.0

    def test_two_calls_of_one_name_share_it(self, tmp_path):
        first, second = vault(tmp_path / "s"), PrivateLabels(Y, 2, store=tmp_path / "s")
        uses = {"a": rr(0.5), "b": rr(0.5)}
        with second.reserve(uses):
            with pytest.raises(KeyError), first.reserve(uses):
                first.randomize(rr(0.5), key="a")
                raise KeyError
            # The other call goes on.
            assert second.remaining() == 0.0
            second.randomize(rr(0.5), key="b")
        assert second.guarantee().epsilon == 1.0

    def test_a_forked_process_does_not_give_it_back(self, tmp_path):
        if not hasattr(os, "fork"):
            pytest.skip("needs os.fork")
        labels = vault(tmp_path / "s")
        reservation = labels.reserve({"a": rr(0.75)})
        if (child := os.fork()) == 0:
            del reservation
            labels.remaining()
            os._exit(0)
        os.waitpid(child, 0)
        assert labels.remaining() == 0.25
        reservation.give_back()

    def test_stores_of_a_project_see_it(self, tmp_path):
        visits, drugs = (
            vault(Store(tmp_path / "p" / name, project=True)) for name in ("visits", "drugs")
        )
        with visits.reserve({"a": rr(0.75)}):
            assert drugs.remaining() == 0.25
            with pytest.raises(BudgetExceededError):
                drugs.reserve({"b": rr(0.5)})
            visits.randomize(rr(0.75), key="a")
        assert (drugs.remaining(), drugs.guarantee().epsilon) == (0.25, 0.75)

    @pytest.mark.parametrize("kills", [30, pytest.param(300, marks=pytest.mark.slow)])
    def test_kills_spend_nothing_for_nothing(self, tmp_path, kills):
        """Two processes at a time; nothing is drawn twice, and nothing is stuck."""
        if not hasattr(os, "fork"):
            pytest.skip("needs os.fork")
        script = pathlib.Path(__file__).with_name("killed_reservations.py")
        paths = os.pathsep.join([os.fspath(script.parent), *filter(None, sys.path)])
        done = subprocess.run(
            [sys.executable, os.fspath(script), os.fspath(tmp_path), str(kills)],
            env={**os.environ, "PYTHONPATH": paths},
            capture_output=True,
            text=True,
            timeout=600,
        )
        assert done.returncode == 0, done.stderr
        problems, number, _ = json.loads(done.stdout)
        assert problems == [] and number >= kills

    def test_a_killed_one_is_given_back_by_the_command(self, tmp_path, capsys):
        store = tmp_path / "s"
        vault(store)
        code = (
            "import os, sys, tf_labeldp as ldp;"
            "labels = ldp.PrivateLabels([0, 1] * 30, 2, store=sys.argv[1]);"
            "r = ldp.RandomizedResponse(0.5, 2);"
            "kept = labels.reserve({'a': r, 'b': r}); labels.randomize(r, key='a'); os._exit(9)"
        )
        assert subprocess.run([sys.executable, "-c", code, os.fspath(store)]).returncode == 9
        labels = PrivateLabels(Y, 2, store=store)
        with pytest.raises(BudgetExceededError, match="tf-labeldp give-back"):
            labels.randomize(rr(0.5), key="other")
        assert labels.history()[-1].key == "b"
        assert give_back(store, key="a") == []  # It was charged.
        assert main(["give-back", str(store), "--key", "b"]) == 0
        assert "given back: b" in capsys.readouterr().out
        labels.randomize(rr(0.5), key="other")
        assert labels.remaining() == 0.0

    def test_the_same_call_uses_a_killed_one(self, tmp_path):
        first = vault(tmp_path / "s")
        reservation = first.reserve({"a": rr(0.5), "b": rr(0.5)})
        first.randomize(rr(0.5), key="a")
        labels = PrivateLabels(Y, 2, store=tmp_path / "s")
        labels.randomize(rr(0.5), key="b")
        assert labels.guarantee().epsilon == 1.0
        assert len({receipt.plan for receipt in labels.receipts}) == 1
        reservation.give_back()
        assert labels.guarantee().epsilon == 1.0

    def test_version_0_3_refuses_the_records_and_names_their_version(self, tmp_path):
        labels = vault(tmp_path / "s")
        labels.randomize(rr(0.25), key="before")
        with labels.reserve({"a": rr(0.25), "b": rr(0.25)}):
            labels.randomize(rr(0.25), key="a")
        lines = [path.read_bytes() for path in sorted((tmp_path / "s" / "records").iterdir())]
        formats = [
            json.loads(line.partition(b"\n")[0].partition(b" ")[2])["format"] for line in lines
        ]
        # It reads 2 and 3, and names the version that wrote any other.
        assert formats == [4, 4, 4, 4]

    def test_a_forgotten_store_holds_nothing_back(self, tmp_path):
        visits, drugs = (
            vault(Store(tmp_path / "p" / name, project=True)) for name in ("visits", "drugs")
        )
        reservation = visits.reserve({"a": rr(0.75)})
        assert drugs.remaining() == 0.25
        forget(tmp_path / "p" / "visits")
        assert drugs.remaining() == 1.0
        with pytest.raises(LabelStoreError, match="forgotten"):
            reservation.give_back()

    def test_a_running_one_is_not_given_back_by_the_command(self, tmp_path):
        labels = vault(tmp_path / "s")
        with labels.reserve({"a": rr(0.75)}):
            with pytest.raises(LabelStoreError, match="of a running one"):
                give_back(tmp_path / "s")
        assert give_back(tmp_path / "s") == []
        assert main(["give-back", str(tmp_path / "s")]) == 0
        assert not list((tmp_path / "s").glob(".reserved-*"))


def test_another_use_between_two_releases_changes_nothing(tmp_path, monkeypatch):
    """The second handle of the store spends between the two releases of a randomizer."""
    y = np.random.default_rng(0).uniform(0, 50, 500)
    labels = PrivateLabels(y, Numbers(0, 50), budget=PrivacyBudget(1.0), store=tmp_path / "s")
    other = PrivateLabels(y, Numbers(0, 50), store=tmp_path / "s")
    release, refused = PrivateLabels.release, []

    def spend(self, *arguments, **keywords):
        found = release(self, *arguments, **keywords)
        if self is labels:
            with pytest.raises(BudgetExceededError):
                other.randomize(LaplaceMechanism(0.5, 0.0, 50.0), key="other")
            refused.append(True)
        return found

    monkeypatch.setattr(PrivateLabels, "release", spend)
    labels.randomize(ldp.LabelRandomizer(1.0))
    assert refused and labels.guarantee().epsilon == 1.0


def gaussian(epsilon, delta=1e-5):
    return Charge(epsilon, delta, EventFields.gaussian(gaussian_sigma(epsilon, delta, 1.0)))


class TestFilter:
    """What is reserved together is one plan of the filter that keeps the budget."""

    @pytest.fixture(params=["memory", "store"])
    def relaxed(self, request, tmp_path):
        store = tmp_path / "s" if request.param == "store" else None
        return vault(store, epsilon=2.0, delta=1e-5)

    @pytest.mark.holds("vault.PrivateLabels.reserve")
    def test_a_plan_costs_what_it_costs_if_fixed(self, relaxed):
        """Sixty draws of .05 cost less than 2 together, and 3 if each is chosen after the last."""
        first, rest = relaxed.split(0.5)
        for number in range(40):
            first.randomize(rr(0.05), key=f"one by one {number}")
        assert first.remaining() == pytest.approx(0.0, abs=1e-9)
        with pytest.raises(BudgetExceededError, match=r"labels\.reserve"):
            first.randomize(rr(0.05))
        uses = {f"draw {number}": rr(0.05) for number in range(60)}
        with rest.reserve(uses):
            for number in range(60):
                rest.randomize(rr(0.05), key=f"draw {number}")
        assert 0.0 < rest.guarantee().epsilon < 2.0
        assert len({receipt.plan for receipt in rest.receipts} - {""}) == 1

    @pytest.mark.parametrize("again", ["block", "call"])
    def test_a_call_that_failed_is_repeated(self, relaxed, again):
        """What is left of a plan can be drawn, though a new plan of it would be refused."""
        uses = {f"draw {number}": rr(0.1) for number in range(28)}  # 29 are over the budget.
        with pytest.raises(KeyError), relaxed.reserve(uses):
            for number in range(3):
                relaxed.randomize(rr(0.1), key=f"draw {number}")
            raise KeyError
        with pytest.raises(BudgetExceededError):
            relaxed.check_budget([rr(0.1)] * 25)
        with relaxed.reserve(uses) if again == "block" else contextlib.nullcontext():
            for name in reversed(uses):
                relaxed.randomize(rr(0.1), key=name)
        assert len(relaxed.receipts) == len(uses) == len({use.id for use in relaxed.receipts})
        assert len({use.plan for use in relaxed.receipts}) == 1
        assert relaxed.guarantee().epsilon <= 2.0

    def test_what_was_given_back_and_spent_is_not_drawn_again(self, labels):
        with pytest.raises(KeyError), labels.reserve({"a": rr(0.25), "b": rr(0.75)}):
            labels.randomize(rr(0.25), key="a")
            raise KeyError
        labels.randomize(rr(0.5), key="other")
        for use in (
            lambda: labels.randomize(rr(0.75), key="b"),
            lambda: labels.reserve({"b": rr(0.75)}),
        ):
            with pytest.raises(BudgetExceededError, match="Nothing was drawn"):
                use()
        assert labels.remaining() == 0.25

    def test_no_use_of_a_plan_is_drawn_after_others_took_its_share(self, relaxed):
        """The filter refuses each, though all uses would be within the budget if fixed."""
        uses = {f"draw {number}": rr(0.05) for number in range(20)}
        with pytest.raises(KeyError), relaxed.reserve(uses):
            for number in range(10):
                relaxed.randomize(rr(0.05), key=f"draw {number}")
            raise KeyError
        for number in range(30):
            relaxed.randomize(rr(0.05), key=f"other {number}")
        assert relaxed.guarantee().epsilon < 1.5 and relaxed.remaining() < 1e-9
        for number in range(10, 20):
            with pytest.raises(BudgetExceededError, match="chosen after them"):
                relaxed.randomize(rr(0.05), key=f"draw {number}")

    def test_another_store_of_the_project_counts_what_is_drawn_after_all(self, tmp_path):
        visits, drugs = (
            vault(Store(tmp_path / "p" / name, project=True)) for name in ("visits", "drugs")
        )
        with pytest.raises(KeyError), visits.reserve({"a": rr(0.25), "b": rr(0.5)}):
            visits.randomize(rr(0.25), key="a")
            raise KeyError
        assert drugs.remaining() == 0.75
        with visits.reserve({"a": rr(0.25), "b": rr(0.5)}):
            assert drugs.remaining() == 0.25
            visits.randomize(rr(0.5), key="b")
        assert drugs.remaining() == visits.remaining() == 0.25

    @pytest.mark.holds("vault.Reservation")
    def test_other_uses_between_those_of_a_plan(self, relaxed):
        with relaxed.reserve({"head": [gaussian(0.5)] * 2}):
            relaxed.charge(gaussian(0.5), what="first")
            left = relaxed.remaining()
            relaxed.randomize(rr(left), key="between")
            relaxed.charge(gaussian(0.5), what="second")
            assert relaxed.remaining() < 1e-3
        assert relaxed.remaining() < 1e-3

    def test_what_is_given_back_of_sums_is_free_again(self, relaxed):
        with relaxed.reserve({"a": rr(0.5), "b": rr(1.5)}):
            relaxed.randomize(rr(0.5), key="a")
        assert relaxed.remaining() == 1.5
        with relaxed.reserve({"head": gaussian(1.3), "another": gaussian(0.2)}):
            pass
        # Nothing was drawn, so it leaves no trace.
        assert relaxed.remaining() == 1.5
        relaxed.charge(gaussian(1.5), what="a head")
        assert relaxed.remaining() == 0.0

    def test_a_plan_that_is_composed_exactly_keeps_its_full_cost(self, relaxed):
        """What was not drawn of it may not be spent on another use: that would be a choice."""
        with relaxed.reserve({"heads": [gaussian(1.0)] * 2, "draws": [rr(0.05)] * 2}):
            left = relaxed.remaining()
            relaxed.charge(gaussian(1.0), what="a head")
        assert relaxed.guarantee().epsilon == pytest.approx(1.0)
        assert left <= relaxed.remaining() < vault_after_one_head()


def vault_after_one_head():
    labels = vault(epsilon=2.0, delta=1e-5)
    labels.charge(gaussian(1.0), what="a head")
    return labels.remaining()
