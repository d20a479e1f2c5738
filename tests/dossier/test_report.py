"""The report lists every release of a label set, and reveals no label."""

from __future__ import annotations

import ast
import dataclasses
import html
import html.parser
import inspect
import json
import pathlib
import re

import numpy as np
import pytest

import tf_labeldp as ldp
from tf_labeldp.accounting import (
    PrivacyGuarantee,
    Receipts,
    dp_sgd_guarantee,
    peer_to_peer_guarantee,
)
from tf_labeldp.audit import AuditResult, LabelInference
from tf_labeldp.dossier import Report, report
from tf_labeldp.mechanisms import AggregateMechanism, LabelMechanism
from tf_labeldp.scale import ReleaseKey
from tf_labeldp.vault import Keyed, Numbers, Store, forget

N = 400


def vault(path, epsilon=4.0, project=None, **more):
    labels = np.random.default_rng(0).integers(3, size=N)
    budget = ldp.PrivacyBudget(epsilon, 1e-4)
    store = Store(path, project=project, actor="Ada")
    return ldp.PrivateLabels(labels, 3, budget=budget, store=store, **more)


def rr(epsilon):
    return ldp.RandomizedResponse(epsilon, 3)


class TestContent:
    def test_it_agrees_with_the_vault(self, tmp_path):
        labels = vault(tmp_path / "s")
        labels.randomize(rr(0.5), key="first")
        labels.randomize(rr(1.0), indices=np.arange(100))
        labels.charge(ldp.accounting.dp_sgd_charge(9.0, 0.1, 5, 1e-4), what="5 steps")
        found = report(tmp_path / "s")
        entry = found.content["label_sets"][0]
        assert found.statement == labels.guarantee()
        assert entry["remaining"] == labels.remaining()
        assert [row["what"] for row in entry["history"]] == [use.what for use in labels.history()]
        assert [row["examples"] for row in entry["spread"]] == [300, 100]
        assert entry["spread"][1]["epsilon"] == pytest.approx(labels.guarantee().epsilon)
        assert [row["actor"] for row in entry["releases"]] == ["Ada"] * 3
        assert "noise_multiplier=9.0" in entry["releases"][2]["settings"]
        assert "0.1" in entry["releases"][2]["settings"]
        assert entry["releases"][0]["output_digest"] == labels.receipts[0].output_digest

    def test_engines_and_projects_count(self, tmp_path):
        vault(tmp_path / "p" / "a", draws="keyed", project=True)
        vault(tmp_path / "p" / "b", project=True).randomize(rr(0.5))
        ReleaseKey(tmp_path / "p" / "a" / "labels.key").register("e", rr(1.0), num_rows=N)
        for folder in (tmp_path / "p", tmp_path / "p" / "a", tmp_path / "p" / "b"):
            assert report(folder).statement.epsilon == 1.5
        sets = report(tmp_path / "p").content["label_sets"]
        assert [len(entry["releases"]) for entry in sets] == [1, 1]
        assert [entry["remaining"] for entry in sets] == pytest.approx([2.5, 2.5], rel=1e-3)

    def test_label_sets_of_a_folder_add_up(self, tmp_path):
        vault(tmp_path / "a").randomize(rr(0.5))
        vault(tmp_path / "b").randomize(rr(0.25))
        assert report(tmp_path).statement.epsilon == 0.75

    def test_a_forgotten_store_is_reported(self, tmp_path, monkeypatch):
        vault(tmp_path / "s").randomize(rr(0.5), key="first")
        before = report(tmp_path / "s")
        monkeypatch.setenv("LABELDP_ACTOR", "Eve")
        forget(tmp_path / "s")
        after = report(tmp_path / "s")
        assert after.statement == before.statement
        [entry] = after.content["label_sets"]
        assert entry["releases"] == before.content["label_sets"][0]["releases"]
        assert entry["forgotten"]["actor"] == "Eve"
        assert "forgotten" in str(after)

    def test_a_store_without_releases(self, tmp_path):
        vault(tmp_path / "s")
        found = report(tmp_path / "s")
        assert found.statement.epsilon == 0.0
        found.save(tmp_path / "out")
        assert "Nothing was released" in (tmp_path / "out" / "report.html").read_text()

    def test_the_ledger_of_a_key_is_no_label_set(self, tmp_path):
        ldp.PrivateLabels([0, 1], 2, budget=ldp.PrivacyBudget(1.0), store=tmp_path / "p" / "a")
        ReleaseKey.create(tmp_path / "p" / "labels.key").register("e", rr(1.0), num_rows=2)
        [entry] = report(tmp_path / "p").content["label_sets"]
        assert entry["folder"] == "a"
        with pytest.raises(ldp.LabelStoreError, match="ledger of a key without a vault"):
            report(tmp_path / "p" / "labels.key.ledger")

    def test_no_store_is_an_error(self, tmp_path):
        with pytest.raises(ldp.LabelStoreError, match="expected a label store"):
            report(tmp_path)

    def test_seeded_releases_are_flagged(self, tmp_path):
        vault(tmp_path / "s", insecure_seed=3).randomize(rr(0.5))
        found = report(tmp_path / "s")
        assert "NOT PRIVATE" in str(found).splitlines()[0]
        assert found.content["label_sets"][0]["releases"][0]["flags"] == ["seeded"]


class TestAudits:
    @pytest.mark.slow
    def test_each_mechanism_is_audited_once(self, tmp_path):
        labels = vault(tmp_path / "s")
        labels.randomize(rr(0.5))
        labels.randomize(rr(0.5), key="again")
        labels.randomize(ldp.RRWithPrior(0.5, 3), priors=np.ones(3) / 3)
        labels.release(ldp.mechanisms.HistogramMechanism(0.5, 3))
        found = report(tmp_path / "s", audit=True)
        assert len(found.content["audits"]) == 2 and not found.content["not_audited"]
        assert not any(result["refutes"] for result in found.content["audits"])
        assert all(0.3 < result["lower_bound"] < 0.5 for result in found.content["audits"])
        # A page to sign refutes one correct mechanism in a million.
        assert all(result["confidence"] == 1.0 - 1e-6 for result in found.content["audits"])
        assert "with 0.999999 confidence" in found.content["audits"][0]["found"]

    def test_a_mechanism_whose_prior_was_erased_is_not_audited(self, tmp_path):
        labels = vault(tmp_path / "s")
        labels.randomize(ldp.RRWithPrior(0.5, 3), priors=np.array([0.5, 0.25, 0.25]))
        forget(tmp_path / "s")
        found = report(tmp_path / "s", audit=True)
        assert not found.content["audits"]
        assert list(found.content["not_audited"]) == ["RRWithPrior(epsilon=0.5, num_classes=3)"]

    def test_your_own_results_are_listed(self, tmp_path):
        vault(tmp_path / "s").randomize(rr(0.5))
        audits = {
            "my model": AuditResult(1.2, 0.95, 1.0, 0.0, "canaries"),
            "guesses": LabelInference(0.9, 0.6, 0.3, (0.2, 0.4), 0.95),
        }
        found = report(tmp_path / "s", audits=audits)
        assert [result["refutes"] for result in found.content["audits"]] == [True, False]
        found.save(tmp_path / "out")
        page = (tmp_path / "out" / "report.html").read_text()
        assert 'class="bad"' in page and "the claim is FALSE" in page
        assert "Repeat an audit that ends with FALSE" in page


class Page(html.parser.HTMLParser):
    def __init__(self, text):
        super().__init__()
        self.loaded, self.open, self.tags = [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.loaded += [
            value
            for name, value in attributes
            if name in ("src", "href", "xlink:href") and value and not value.startswith("#")
        ]
        if tag not in ("meta", "br"):
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.handle_starttag(tag, attributes)
        self.handle_endtag(tag)

    def handle_endtag(self, tag):
        if tag not in ("meta", "br"):
            assert self.open.pop() == tag


def a_month_earlier(found):
    """Returns a report whose first use was on another day than its last one."""
    first = found.content["label_sets"][0]["history"][0]
    first["time"] = "2026-01-01T09:30:00+00:00"
    return found


class TestPage:
    @pytest.fixture
    def page(self, tmp_path):
        labels = vault(tmp_path / "s")
        labels.randomize(rr(0.5), key="<script>alert(1)</script>").save(tmp_path / "noisy")
        labels.raise_budget(ldp.PrivacyBudget(5.0, 1e-4), reason="a 'second' study & more")
        labels.randomize(rr(0.25), key="second")
        found = report(tmp_path / "s", published=[tmp_path / "noisy"])
        a_month_earlier(found).save(tmp_path / "out")
        return (tmp_path / "out" / "report.html").read_text(encoding="utf-8")

    def test_it_is_complete_and_loads_nothing(self, page):
        parsed = Page(page)
        assert parsed.open == [] and parsed.loaded == []
        assert "@import" not in page and not re.search(r"url\((?!#)", page)
        assert parsed.tags.count("svg") == 2 and "viewport" in page

    def test_names_are_escaped(self, page):
        assert "script" not in Page(page).tags
        assert "&lt;script&gt;" in page and "&#x27;second&#x27; study &amp; more" in page

    def test_the_plot_has_a_label_in_words(self, page):
        assert 'aria-label="Epsilon spent over time: 0.75 of 5"' in page

    def test_the_text_of_plots_has_12_points(self, page):
        """One plot is drawn for screens and one for phones, so that neither is scaled down."""
        sizes = [float(size) for size in re.findall(r"<text style=\"font-size: ([\d.]+)px", page)]
        assert len(sizes) > 10 and min(sizes) >= 12.0
        points = [
            float(width)
            for width in re.findall(r'<svg class="\w+".*?width="([\d.]+)pt"', page, re.S)
        ]
        assert points[0] < 620 and points[1] * 96 / 72 <= 390 - 2 * 16

    def test_a_plot_of_one_release_is_a_sentence(self, tmp_path):
        labels = vault(tmp_path / "s")
        labels.randomize(rr(0.5))
        labels.raise_budget(ldp.PrivacyBudget(5.0, 1e-4), reason="a second study")
        report(tmp_path / "s").save(tmp_path / "out")
        page = (tmp_path / "out" / "report.html").read_text(encoding="utf-8")
        assert "svg" not in Page(page).tags
        assert re.search(
            r"<p>1 use, on [-\d]+ [:\d]+ UTC, spent epsilon=0.5 of a budget of 5", page
        )

    def test_a_plot_of_one_day_is_a_sentence(self, tmp_path):
        labels = vault(tmp_path / "s")
        labels.randomize(rr(0.5))
        labels.randomize(rr(0.25), key="second")
        report(tmp_path / "s").save(tmp_path / "out")
        page = (tmp_path / "out" / "report.html").read_text(encoding="utf-8")
        assert "svg" not in Page(page).tags
        assert re.search(r"<p>2 uses, on [-\d]{10}, spent epsilon=0.75 of a budget of 4.</p>", page)

    def test_cells_are_named_where_tables_are_lists(self, page):
        """On a phone each row is a list of its cells, and the row of heads is hidden."""
        tables = page.split("<table class=rows>")[1:]
        assert len(tables) == 4
        for table in tables:
            heads, *rows = table.partition("</table>")[0].split("<tr>")[1:]
            heads = re.findall("<th[^>]*>([^<]*)", heads)
            assert rows and all(re.findall('data-head="([^"]*)"', row) == heads for row in rows)
        assert "@media (max-width: 45rem)" in page and "attr(data-head)" in page

    def test_all_assumptions_of_published_files_are_explained(self, tmp_path):
        labels = vault(tmp_path / "s")
        noisy = labels.randomize(rr(0.5))
        more = ldp.accounting.Assumption("only-release", "holder", "Nothing else is published.")
        dataclasses.replace(noisy, assumptions=(more,)).save(tmp_path / "noisy")
        x = np.random.default_rng(0).normal(size=(N, 4))
        head = ldp.PrivateLogisticRegression(1.0, 1e-5).fit(x, labels)
        head.to_keras().save(tmp_path / "model.keras")
        files = [tmp_path / "noisy", tmp_path / "model.keras"]
        found = report(tmp_path / "s", published=files)
        found.save(tmp_path / "out")
        page = html.unescape((tmp_path / "out" / "report.html").read_text(encoding="utf-8"))
        stated = found.statement.assumptions
        notes = [note for file in files for note in ldp.dossier.verify(file).guarantee.assumptions]
        assert len({note.code for note in notes} - {note.code for note in stated}) == 2
        for note in (*stated, *notes):
            explained = f"<dt><code>[{note.code}]</code> {note}</dt>\n<dd>To check: "
            assert page.count(explained) == 1
        assert "Nothing else is published.</dt>" in page and "<dd>For: noisy</dd>" in page
        assert "<dd>For: the promise above, noisy, model.keras</dd>" in page

    def test_an_infinite_epsilon_is_not_cut_off_in_words(self, tmp_path):
        labels = vault(tmp_path / "s")
        labels.randomize(rr(0.5))
        labels.randomize(rr(0.25), key="second")
        found = a_month_earlier(report(tmp_path / "s"))
        found.content["label_sets"][0]["history"][-1]["epsilon_so_far"] = "inf"
        found.save(tmp_path / "out")
        page = (tmp_path / "out" / "report.html").read_text(encoding="utf-8")
        assert 'aria-label="Epsilon spent over time: inf of 4"' in page

    def test_it_has_every_line_of_the_statement(self, tmp_path):
        """Including lines after the assumptions, and remarks that look like their title."""
        vault(tmp_path / "s").randomize(rr(0.5))
        found = report(tmp_path / "s")
        remarks = ["Assumptions are few", "this draw lost nothing"]
        stated = found.statement.with_remarks(remarks)
        lines = str(stated).splitlines()
        content = {**found.content, "guarantee": json.loads(stated.to_json())}
        Report(content, stated).save(tmp_path / "out")
        page = html.unescape((tmp_path / "out" / "report.html").read_text(encoding="utf-8"))
        promise, _, rest = page.partition("</div>")
        assert [text for text in remarks if f"<br>remark: {text}\n" not in promise] == []
        assert "replace_label" not in promise
        lines[1] = lines[1].replace("changed (replace_label)", "changed to any other one")
        assert all(line.strip() in promise for line in lines[:2])
        notes = [line.strip() for line in lines if line.startswith("    ")]
        assert len(notes) > 4 and not any(note in promise for note in notes)
        rest = re.sub("<[^>]+>", "", rest)
        assert [note for note in notes if note.removesuffix(":") not in rest] == []

    def test_published_files_are_compared_with_their_statements(self, page):
        assert "400 noisy labels by RandomizedResponse" in page
        assert "matches its statement" in page

    def test_a_file_without_receipts_has_no_promise(self, tmp_path):
        import keras

        vault(tmp_path / "s").randomize(rr(0.5)).save(tmp_path / "noisy")
        keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)]).save(tmp_path / "m.keras")
        files = [tmp_path / "noisy", tmp_path / "m.keras"]
        found = report(tmp_path / "s", published=files)
        found.save(tmp_path / "out")
        page = (tmp_path / "out" / "report.html").read_text(encoding="utf-8")
        assert ">none</td>" in page and "(0, 0)" not in page and "(0, 0)" not in str(found)
        assert 'data-head="check" class="words bad">WRONG: the model has no receipts' in page
        assert "publishing all of them costs up to the promise at the top" in page

    def test_uses_are_in_words(self, tmp_path):
        """History has purposes, and the settings below it leave out arguments that are None."""
        labels = vault(tmp_path / "s", epsilon=9.0)
        x = np.random.default_rng(0).normal(size=(N, 4))
        ldp.PrivateLogisticRegression(1.0, 1e-5).fit(x, labels)
        labels.evaluate(np.zeros(N, int), "accuracy", 0.5)
        labels.release(ldp.mechanisms.LinearBinningMechanism(0.5, 3), public_input=np.zeros(N))
        labels.randomize(rr(0.5), key="second")
        by_others = "HistogramMechanism(1.0): counts, published with their seed"
        like_ours = repr(rr(0.5))
        for words in (by_others, like_ours):
            labels.charge(ldp.accounting.dp_sgd_charge(9.0, 0.1, 5, 1e-5), what=words)
        report(tmp_path / "s").save(tmp_path / "out")
        page = html.unescape((tmp_path / "out" / "report.html").read_text(encoding="utf-8"))
        for use in (
            "noisy sums of features by label, for a head: LabelMomentMechanism",
            "a noisy metric of predictions: MetricMechanism",
            "noisy counts of labels by score, for a metric: LinearBinningMechanism",
            "noisy labels: RandomizedResponse (second)",
            by_others,
            like_ours,
        ):
            assert f'data-head="use" class="words">{use}</td>' in page
        assert "LabelMomentMechanism(epsilon=1.0, delta=1e-05, num_classes=3, max_norm=" in page
        assert "=None" not in page and " ...</td>" not in page
        assert "compose to their sum or less" in page and "not declared (people=): those" in page
        assert "for n = 400 examples (1 / n would allow publishing the label of" in page

    def test_the_purpose_of_every_mechanism_is_its_own(self):
        """A statistic is no noisy label, and a new mechanism says what it is for."""
        everything = [*vars(ldp.mechanisms).values(), *vars(ldp.pate).values()]
        kinds = {
            kind
            for kind in everything
            if inspect.isclass(kind)
            and issubclass(kind, (LabelMechanism, AggregateMechanism))
            and not inspect.isabstract(kind)
        }
        assert len(kinds) > 15
        statistics = {kind for kind in kinds if issubclass(kind, AggregateMechanism)}
        assert {kind.__name__ for kind in statistics if "purpose" not in vars(kind)} == set()
        assert all(kind.purpose == "noisy labels" for kind in kinds - statistics)
        purposes = {kind.purpose for kind in statistics}
        assert len(purposes) == len(statistics) > 5 and not purposes & {"", "noisy labels"}

    def test_a_reason_is_shown_as_it_was_written(self, tmp_path):
        labels = vault(tmp_path / "s")
        reason = "as agreed (limit=None, see RandomizedResponse(epsilon=1))"
        labels.raise_budget(ldp.PrivacyBudget(5.0, 1e-4), reason=reason)
        report(tmp_path / "s").save(tmp_path / "out")
        page = html.unescape((tmp_path / "out" / "report.html").read_text(encoding="utf-8"))
        assert "budget raised to epsilon=5, delta=0.0001: as agreed (limit=None, see" in page

    def test_no_label_and_no_secret_is_in_it(self, tmp_path):
        """Reports of stores with different labels differ in random bits alone."""

        def reported(name, label):
            labels = ldp.PrivateLabels(
                np.full(50, label),
                3,
                budget=ldp.PrivacyBudget(1.0),
                store=tmp_path / name,
                draws=Keyed([f"patient {i}" for i in range(50)]),
            )
            labels.randomize(rr(1.0))
            found = report(tmp_path / name).content
            text = json.dumps(found)
            secret = json.loads((tmp_path / name / "labels.key").read_text())["secret"]
            salt = json.loads((tmp_path / name / "PRIVATE-fingerprint").read_text())
            secrets = (secret, salt["salt"], salt["digest"], "patient")
            assert not any(word in text for word in secrets)
            return json.loads(re.sub(r'"(\d{4}-[^"]*|[0-9a-f]{32,}|[ab])"', '""', text))

        assert reported("a", 0) == reported("b", 2)

    @pytest.mark.slow
    def test_its_parts_are_in_the_order_that_the_pages_state(self, tmp_path):
        labels = vault(tmp_path / "s")
        labels.randomize(rr(0.5), key="first").save(tmp_path / "noisy")
        labels.randomize(rr(0.25), key="second")
        found = report(tmp_path / "s", published=[tmp_path / "noisy"], audit=True)
        a_month_earlier(found).save(tmp_path / "out")
        page = (tmp_path / "out" / "report.html").read_text(encoding="utf-8")
        page = page.partition("<body>")[2]
        parts = [
            "for one person, over all releases",
            ">left<",
            "Epsilon spent over time",
            "Epsilon spent by example",
            ">History<",
            "Settings of noise and sampling",
            "Who must vouch for what",
            "Published files",
            "matches its statement",
            ">Audits<",
            ">Versions<",
        ]
        places = [page.find(part) for part in parts]
        assert -1 not in places and places == sorted(places)
        history = page.partition(">History<")[2].partition("</table>")[0]
        rows = history.split("<tr")[2:]
        assert len(rows) == 2
        for row, epsilon in zip(rows, ("0.5", "0.25"), strict=True):
            assert all(word in row for word in ("Ada", epsilon)) and re.search(r"20\d\d-", row)

    def test_json_is_the_content(self, tmp_path):
        labels = vault(tmp_path / "s")
        labels.randomize(rr(0.5))
        found = report(tmp_path / "s")
        found.save(tmp_path / "out")
        assert json.loads((tmp_path / "out" / "report.json").read_text()) == found.content


class TestWhoVouches:
    @pytest.mark.slow
    def test_every_assumption_has_a_party(self, tmp_path):
        labels = vault(tmp_path / "s", epsilon=80.0, people="Oslo")
        x = np.random.default_rng(0).normal(size=(N, 4))
        labels.randomize(rr(0.5))
        labels.randomize(ldp.RRWithPrior(0.5, 3), priors=np.ones(3) / 3)
        ldp.PrivateLogisticRegression(8.0, 1e-5).fit(x, labels)
        for kind, clipping in (("label", "norm"), ("label", "label_distance"), ("user", "norm")):
            charge = ldp.accounting.dp_sgd_charge(
                30.0, 0.1, 2, 1e-5, privacy_unit=kind, clipping=clipping
            )
            labels.charge(
                charge, what="steps", unit=kind, num_units=9, metrics_reported=True,
                sample_weights=True,
            )  # fmt: skip
        other = ldp.PrivateLabels(
            np.zeros(30), Numbers(0, 1), budget=ldp.PrivacyBudget(4.0), people="Rome"
        )
        other.randomize(ldp.LabelRandomizer(1.0))
        keyed = vault(tmp_path / "k", draws="keyed")
        keyed.randomize(rr(0.5))
        receipts = Receipts.merged(labels.receipts, other.receipts, keyed.receipts)
        stated = [
            Receipts(receipts).guarantee(1e-4),
            dp_sgd_guarantee(9.0, 0.1, 5, 1e-4),
            ldp.accounting.group_privacy(PrivacyGuarantee(1.0), 3),
            peer_to_peer_guarantee(0.3, 0.5, 40, 1e-4),
            ldp.PrivateLogisticRegression(8.0, 1e-5, num_classes=3).fit(x, np.arange(N) % 3)
            .guarantee(),
        ]  # fmt: skip
        found = {note for guarantee in stated for note in guarantee.assumptions}
        assert len(found) > 20
        assert [note for note in found if note.who == "nobody"] == []

    def test_assumptions_of_models_and_noise(self):
        from tf_labeldp.accounting import Assumption
        from tf_labeldp.training import GaussianNoise

        labels = ldp.PrivateLabels([0, 1] * 9, 2, budget=ldp.PrivacyBudget(1.0))
        drawn = labels.randomize(ldp.RRWithPrior(1.0, 2), priors=[0.5, 0.5])
        notes = [Assumption.INITIAL_WEIGHTS, *drawn.guarantee().assumptions]
        assert "public-inputs" in {note.code for note in notes}
        for source in ("host", "device"):
            notes += GaussianNoise(1.0, source=source).assumptions()
        assert [note for note in notes if note.who == "nobody"] == []

    @pytest.mark.slow
    def test_every_assumption_of_the_library_names_a_party_and_a_check(self, tmp_path):
        known = {"authors", "holder", "library", "machines", "nobody", "trainer", "users"}
        root = pathlib.Path(inspect.getfile(ldp)).parent
        found: dict[str, set[str]] = {}
        for path in root.rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                called = isinstance(node, ast.Call) and getattr(node.func, "id", "")
                if called == "Assumption" and len(node.args) == 3:
                    code, who, _ = node.args
                    found.setdefault(code.value, set()).add(who.value)
        assert len(found) > 30 and set().union(*found.values()) <= known
        reasons = {code for code, who in found.items() if "nobody" in who}
        assert reasons == {"not-promised", "no-record"}
        assert all(len(who) == 1 for who in found.values())
        notes = [ldp.accounting.Assumption(code, *who, f"{code}.") for code, who in found.items()]
        stated = PrivacyGuarantee(1.0, assumptions=[*notes, "Mine."])
        vault(tmp_path / "s")
        content = report(tmp_path / "s").content
        content = {**content, "guarantee": json.loads(stated.to_json())}
        Report(content, stated).save(tmp_path)
        page = (tmp_path / "report.html").read_text("utf-8")
        explained = dict(re.findall(r"<code>\[([a-z0-9-]+)\].*\n<dd>To check: (.*)</dd>", page))
        unknown = explained.pop("other")
        assert {*explained} == {*found} and unknown not in explained.values()
        documented = (root.parent / "docs" / "privacy.md").read_text("utf-8")
        assert [code for code in explained if f"`{code}`" not in documented] == []


def test_a_report_prints_as_lines(tmp_path):
    assert repr(Report({}, PrivacyGuarantee(1.0))) == "Report('(1, 0)-label-DP')"
    labels = vault(tmp_path / "s")
    labels.randomize(rr(0.5))
    assert "s: 400 labels, 1 release; budget epsilon=4, left 3.5" in str(report(tmp_path / "s"))
    labels.randomize(rr(0.5), key="second")
    assert "s: 400 labels, 2 releases; budget" in str(report(tmp_path / "s"))
    one = ldp.PrivateLabels([1], 3, budget=ldp.PrivacyBudget(1.0), store=tmp_path / "one")
    one.randomize(rr(0.5)).save(tmp_path / "noisy")
    found = report(tmp_path / "one", published=[tmp_path / "noisy"])
    assert "one: 1 label, 1 release;" in str(found) and "noisy: 1 noisy label by" in str(found)


def test_one_step_is_no_steps(tmp_path):
    """Uses of a training by their number, in the history of the page."""
    import keras

    labels = vault(tmp_path / "s", epsilon=10.0)
    inputs = keras.Input((4,))
    model = ldp.training.LabelDPModel(inputs, keras.layers.Dense(3)(inputs))
    optimizer = ldp.training.LabelDPOptimizer(keras.optimizers.SGD(0.1), 1.0, 9.0)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="none")
    model.compile(optimizer, loss)
    x = np.zeros((N, 4), np.float32)
    for steps in (1, 2):
        batches = ldp.data.poisson_batches(x, labels, sampling_probability=0.5, steps=steps)
        model.fit(batches, epochs=1, verbose=0)
    uses = [use["what"] for use in report(tmp_path / "s").content["label_sets"][0]["history"]]
    assert uses[0].startswith("1 step of ") and uses[1].startswith("2 steps of ")
