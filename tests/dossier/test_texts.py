"""Texts from other people, in every field that has one: nothing runs, and nothing is hidden.

One hostile text goes into each text of each public object, and from there to a terminal, to the
page of a report, which a browser opens if there is one, and to a card in Markdown.
"""

from __future__ import annotations

import copy
import dataclasses
import html.parser
import importlib
import inspect
import json
import pathlib
import pkgutil
import re
import shutil
import subprocess
import tempfile
import traceback
import urllib.parse
from collections.abc import Callable, Iterator
from typing import Any

import keras
import markdown_it
import numpy as np
import pytest
import yaml
from _entry_points import PACKAGE, arguments, names_in

import tf_labeldp as ldp
from tf_labeldp.accounting import Assumption, Charge, PrivacyGuarantee, Receipt
from tf_labeldp.audit import AuditResult, LabelInference
from tf_labeldp.cli import main
from tf_labeldp.dossier import Published, Report, report
from tf_labeldp.features import find_clusters
from tf_labeldp.front_door import recommend
from tf_labeldp.vault import Classes, Evaluation, Store

ESCAPES = "\x1b[2J\x1b]0;t\x07\r\n\x9b2K\u2028\u202e\u2066\u200b\ud800\U000e0100"
HOSTILE = (
    f"{ESCAPES}</title></style>'\"><script>document.title='ran'</script>"
    "<img src=x onerror=document.title='ran'>\n```\n# forged\n---\n"
    "matches its statement\n[a](b)|$x$&#9;<plaintext><!--"
)
"""Runs a script in a page, hides the rest of it, forges lines, headings and links."""
SHOWN = (
    r"\x1b[2J\x1b]0;t\x07\r\n\x9b2K\u2028\u202e\u2066\u200b\ud800\U000e0100"
    "</title></style>'\"><script>document.title='ran'</script>"
    r"<img src=x onerror=document.title='ran'>\n```\n# forged\n---\n"
    r"matches its statement\n[a](b)|$x$&#9;<plaintext><!--"
)
"""The same, as people read it."""
NAME = (
    "\x1b[2J\r\n\u202e\udc9b\nmatches its statement\n<img src=x onerror=document.title='ran'><!--"
)
"""A name of a file; a byte that is no UTF-8 is half a character in Python."""
PLAIN = "a plain text"
TEXTS = {"str", "Assumption", "PathLike"}
"""Names in annotations of arguments that are texts, or may contain one."""
BROWSER = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))),
    None,
)


def leaves(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yields the path of each text inside containers, also of those that are keys."""
    if isinstance(value, dict):
        for key, part in value.items():
            yield from leaves(part, (*path, key))
    elif isinstance(value, (list, tuple)):
        for place, part in enumerate(value):
            yield from leaves(part, (*path, place))
    elif isinstance(value, str):
        yield path


def with_leaf(value: Any, path: tuple[Any, ...], text: str) -> Any:
    """Returns a copy of containers with another text at a path."""
    if not path:
        is_note = isinstance(value, Assumption)
        return Assumption(value.code, value.who, text) if is_note else text
    first, *rest = path
    if isinstance(value, dict):
        return {**value, first: with_leaf(value[first], tuple(rest), text)}
    parts = list(value)
    parts[first] = with_leaf(parts[first], tuple(rest), text)
    if hasattr(value, "_fields"):
        return type(value)(*parts)
    return type(value)(parts)


def is_safe(text: str) -> bool:
    shown = text.split("\n")
    is_forged = {"matches its statement", "# forged"} & {line.strip() for line in shown}
    return all(line.isprintable() for line in shown) and not is_forged


def check_terminal(text: str, lines: int | None = None) -> None:
    """Fails if a terminal would obey or hide a part of the text, or shows a forged line."""
    assert is_safe(text), ascii(text)
    assert lines is None or len(text.split("\n")) == lines


# What prints.

NOTE = Assumption("a-code", "holder", "An assumption.")
STATED = PrivacyGuarantee(1.0, 1e-5, assumptions=(NOTE,), remarks=("A remark.",), num_units=5)
PRINTS: dict[str, Callable[[], Any]] = {
    "AuditResult": lambda: AuditResult(1.0, 0.95, 0.5, 0.0, "an attack"),
    "Choice": lambda: recommend(1.0, 1000, "table"),
    "Clusters": lambda: find_clusters(np.eye(4), 2),
    "Evaluation": lambda: Evaluation("accuracy", 0.5, 0.1, 100, effective_examples=100),
    "LabelInference": lambda: LabelInference(0.5, 0.4, 0.1, (0.0, 0.2), 0.95),
    "LabelKind": lambda: ldp.vault.Classes(["no", "yes"]),
    "PrivacyBudget": lambda: ldp.PrivacyBudget(1.0),
    "PrivacyGuarantee": lambda: STATED,
    "Published": lambda: Published("a", "b", {"c": "d"}, STATED, (), ("e",), ("f",)),
    "Report": lambda: Report({}, STATED),
    "UseHistory": lambda: drawn(store=Store(actor="me")).history(),
}
"""One object of each class that defines how it prints."""


def classes_that_print() -> set[str]:
    found = set()
    for module in pkgutil.walk_packages([str(PACKAGE)], "tf_labeldp."):
        # The engines need environments of their own.
        if not re.search(r"\.(beam|spark|tfx|__main__|tf_privacy)", module.name):
            for name, value in vars(importlib.import_module(module.name)).items():
                own = inspect.isclass(value) and value.__module__ == module.name
                if own and {"__str__", "_repr_html_"} & {*vars(value)}:
                    found.add(name)
    return found


def test_every_class_that_prints_is_known() -> None:
    assert classes_that_print() == {*PRINTS}


def fields_of(value: Any) -> dict[str, Any]:
    if dataclasses.is_dataclass(value):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    return {} if isinstance(value, tuple) else dict(vars(value))


@pytest.mark.parametrize("name", PRINTS)
def test_every_field_of_what_prints(name: str) -> None:
    original = PRINTS[name]()
    if isinstance(original, tuple):
        variants = [
            [with_leaf(original, path, text) for text in (PLAIN, HOSTILE)]
            for path in leaves(original)
        ]
    else:
        variants = []
        for field, value in fields_of(original).items():
            for path in leaves(value):
                pair = [copy.copy(original), copy.copy(original)]
                for each, text in zip(pair, (PLAIN, HOSTILE), strict=True):
                    object.__setattr__(each, field, with_leaf(value, path, text))
                variants.append(pair)
    for plain, hostile in variants:
        try:
            expected = len(str(plain).split("\n"))
        except KeyError:  # A relation, which the constructor checks.
            continue
        check_terminal(str(hostile), expected)
        assert "\U000e0100" not in str(hostile)
        check_terminal(repr(hostile), 1)
    if name == "PrivacyGuarantee":
        texts = [
            dataclasses.replace(STATED, assumptions=[Assumption(HOSTILE, "nobody", HOSTILE)]),
            dataclasses.replace(STATED, assumptions=[Assumption("code", HOSTILE, "text")]),
        ]
        assert [len(str(each).split("\n")) for each in texts] == [len(str(STATED).split("\n"))] * 2
        for each in texts:
            check_terminal(str(each))


# What is made from texts.

K = 3
VALUES: dict[str, Any] = {
    "base": "squared_error",
    "delta": 1e-5,
    "epochs_per_stage": 1,
    "epsilon": 1.0,
    "event": ldp.mechanisms.RandomizedResponse(1.0, K).dp_event(),
    "features": np.zeros((8, 4), np.float32),
    "fractions": (1.0,),
    "indices": np.arange(2),
    "inner_optimizer": "sgd",
    "interval": (0.0, 1.0),
    "l2_norm_clip": 1.0,
    "ledger": None,
    "mechanism": ldp.RandomizedResponse(1.0, K),
    "metric": "accuracy",
    "noise": "laplace",
    "noise_multiplier": 1.0,
    "noise_stderr": 0.0,
    "num_classes": K,
    "num_clusters": 2,
    "num_examples": 8,
    "num_queries": 2,
    "num_teachers": 2,
    "param_grid": {"penalty": [1.0]},
    "path": "labels.key",
    "plans": ("a plan",),
    "receipts": (),
    "scale": 1.0,
    "sha256": {},
    "statement": STATED,
    "guarantee": STATED,
    "transition_matrix": np.eye(K),
    "value": 0.5,
    "values": np.zeros(2, int),
    "content": {"label_sets": [], "published": [], "audits": []},
}
"""Arguments that have to be there, by name. Others that are missing get a plain text."""
MADE: dict[str, Callable[[], dict[str, Any]]] = {
    "accounting.Receipt": lambda: {"labels": label_set(), "charge": Charge.unknown(PLAIN)},
    "audit.AuditResult": lambda: {"lower_bound": 1.0, "confidence": 0.9, "claimed": 1.0},
    "features.PublicEncoder": lambda: {"model": np.asarray},
    "front_door.PrivateSearchCV": lambda: {"estimator": ldp.PrivateRidge(1.0, 1e-5)},
    "gradients.GradientOperator": lambda: {"losses": np.sum, "variables": []},
    "heads.BootstrappedHead": lambda: {"network": keras.Sequential},
    "semi_supervised.DivideMix": lambda: {"network": keras.Sequential([keras.Input((4,))])},
    "training.MultiStageTraining": lambda: {"labels": vault()},
    "vault.PrivateLabels": lambda: {"labels": [0, 1, 2], "num_classes": K},
}
"""More arguments that have to be there, for one class."""


def vault(**options: Any) -> ldp.PrivateLabels:
    budget = ldp.PrivacyBudget(9.0, 1e-3)
    return ldp.PrivateLabels(np.arange(8) % K, K, budget=budget, **options)


def drawn(**options: Any) -> ldp.PrivateLabels:
    """Returns a vault with a draw."""
    labels = vault(**options)
    labels.randomize(ldp.RandomizedResponse(0.5, K), key="first")
    return labels


def label_set() -> Any:
    """Returns the labels that a receipt is about."""
    return drawn(people="someone").receipts[0].labels


def constructors() -> dict[str, tuple[type, list[str]]]:
    """Returns all public classes whose constructors take texts, with the names of these."""
    found: dict[str, tuple[type, list[str]]] = {}
    for argument in arguments():
        part, _, rest = argument.place.partition(".")
        value = getattr(importlib.import_module(f"tf_labeldp.{part}"), rest, None)
        is_text = argument.annotation and TEXTS & names_in(argument.annotation)
        if inspect.isclass(value) and is_text:
            found.setdefault(argument.place, (value, []))[1].append(argument.name)
    return found


@pytest.mark.filterwarnings("ignore")
def test_every_constructor_with_texts(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A text is kept, and prints as one line; or it is refused, in a message without it."""
    monkeypatch.chdir(tmp_path)
    kept, refused, wrong = 0, 0, []
    for place, (kind, names) in constructors().items():
        more = MADE.get(place, dict)
        parameters = inspect.signature(kind).parameters.values()
        needed = {
            each.name: VALUES.get(each.name, PLAIN)
            for each in parameters
            if each.default is each.empty and each.kind not in (each.VAR_KEYWORD,)
        }
        for name in names:
            annotation = inspect.signature(kind).parameters[name].annotation
            hostile: Any = HOSTILE
            if name in ("assumptions", "remarks", "problems", "not_checked", "answers", "plans"):
                hostile = (HOSTILE,)
            elif "dict" in str(annotation):
                hostile = {HOSTILE: HOSTILE}
            try:
                made = kind(**needed | more() | {name: hostile})
            except (TypeError, ValueError, OSError, ldp.LabelStoreError) as error:
                refused += 1
                # Keras and NumPy have words of their own.
                if "tf_labeldp" in traceback.extract_tb(error.__traceback__)[-1].filename:
                    wrong += [] if is_safe(str(error)) else [f"{place}({name}): {error!r}"]
                continue
            kept += 1
            # scikit-learn breaks long lines; an assumption is a text itself.
            is_note = isinstance(made, Assumption)
            wrong += [] if is_note or is_safe(repr(made)) else [f"{place}({name}): {made!r}"]
    assert not wrong, "\n".join(wrong)
    assert kept + refused == sum(len(names) for _, names in constructors().values()) >= 80
    assert kept > 30 and refused > 30


# A page.

ELEMENTS = set(
    "html head meta title style body h1 h2 h3 p div b br table tr th td dl dt dd code ul li "
    "details summary tbody".split()
)


class Parsed(html.parser.HTMLParser):
    """The elements of a page, and its text."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.elements: list[str] = []
        self.problems: list[str] = []
        self.text = ""
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append(tag)
        self.problems += [tag] if tag not in ELEMENTS else []
        known = ("class", "data-head", "content", "name", "charset", "lang", "http-equiv")
        self.problems += [name for name, _ in attrs if name not in known]

    def handle_comment(self, data: str) -> None:
        self.problems.append(f"a comment {data[:20]!r}")

    def handle_data(self, data: str) -> None:
        is_hidden = self.elements and self.elements[-1] in ("style", "title")
        self.text += "" if is_hidden else data


def squeezed(text: str) -> str:
    return "".join(text.split())


def check_page(page: str) -> Parsed:
    """Checks the source of a page: its own elements alone, and its last line among its text."""
    parsed = Parsed(page)
    assert not parsed.problems, parsed.problems
    assert not [c for c in page if not c.isprintable() and c != "\n"]
    assert "A store that was restored from an earlier copy" in parsed.text
    return parsed


def in_browser(page: str, folder: pathlib.Path) -> tuple[str, str]:
    """Returns the title of a page and the text that is visible, once its scripts have run."""
    # The escapes alone, without the second wall.
    bare = re.sub(r"<meta http-equiv=.*\n", "", page)
    assert bare != page or "http-equiv" not in page
    read = (
        "<script>for (const part of document.querySelectorAll('details')) part.open = true;"
        "setTimeout(() => document.documentElement.dataset.shown = encodeURIComponent("
        "JSON.stringify([document.title, document.body.innerText])), 200)</script>"
    )
    file = folder / "page.html"
    file.write_text(bare.replace("</body>", f"{read}</body>"), encoding="utf-8")
    return dumped(file, folder)


def dumped(file: pathlib.Path, folder: pathlib.Path) -> tuple[str, str]:
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-sync"]
    flags += ["--disable-background-networking", "--disable-component-update", "--disable-quic"]
    flags += [f"--user-data-dir={folder / 'profile'}", "--virtual-time-budget=2000", "--dump-dom"]
    run = subprocess.run(
        [str(BROWSER), *flags, file.as_uri()], capture_output=True, timeout=120, check=True
    )
    found = re.search(r'data-shown="([^"]*)"', run.stdout.decode())
    assert found, "the end of the page is hidden, or the browser did not run"
    title, text = json.loads(urllib.parse.unquote(found[1]))
    return title, text


needs_browser = pytest.mark.skipif(BROWSER is None, reason="needs Chromium")


def receipts_with_texts(own: Any) -> Iterator[tuple[str, Receipt]]:
    """Yields receipts of a label set, each with the hostile text in one field."""
    note = Assumption("public-features", "holder", "The features are public.")
    event = ldp.RandomizedResponse(0.5, K).dp_event()
    charge = Charge(0.5, 0.0, event, (note,))
    plain = Receipt(own, charge, PLAIN, output_digest="0" * 64)
    short = HOSTILE[:200]
    for field in dataclasses.fields(Receipt):
        if isinstance(getattr(plain, field.name), str):
            is_name = field.name in ("id", "use", "plan", "output_digest", "version")
            yield field.name, unchecked(plain, field.name, short if is_name else HOSTILE)
    yield "answers", unchecked(plain, "answers", (short,))
    for name, text in (("name", short), ("people", HOSTILE)):
        labels = dataclasses.replace(label_set(), **{name: text})
        yield f"labels.{name}", dataclasses.replace(plain, labels=labels, id=f"of {name}")
    for part in range(3):
        texts = [f"code-{part}", "holder", f"text {part}"]
        texts[part] = HOSTILE
        new = charge.with_assumptions((Assumption(*texts),))
        yield f"assumption[{part}]", dataclasses.replace(plain, charge=new, id=f"of note {part}")


def unchecked(receipt: Receipt, name: str, value: Any) -> Receipt:
    """Returns a copy with another value, which the constructor may refuse."""
    other = copy.copy(receipt)
    object.__setattr__(other, "id", f"of {name}")
    object.__setattr__(other, name, value)
    return other


@pytest.fixture(scope="module")
def hostile_store(tmp_path_factory: pytest.TempPathFactory) -> tuple[pathlib.Path, list[str]]:
    """A store in whose ledger every field is hostile that somebody else can fill."""
    path = tmp_path_factory.mktemp("of others") / NAME
    with pytest.raises(ValueError, match="lone surrogate"):
        ldp.vault.Classes([HOSTILE, "b", "c"])
    classes = [HOSTILE.replace("\ud800", ""), "b", "c"]
    labels = ldp.PrivateLabels(
        np.array(classes, object)[np.arange(8) % K],
        Classes(classes),
        budget=ldp.PrivacyBudget(7.0, 1e-3),
        store=Store(path, actor=HOSTILE),
        people=HOSTILE,
    )
    fields = ["folder", "classes", "actor", "people"]
    labels.randomize(ldp.RandomizedResponse(0.5, K), key=HOSTILE)
    labels.charge(Charge.of(ldp.RandomizedResponse(0.5, K)), what=HOSTILE, key=f"2{HOSTILE}")
    labels.raise_budget(ldp.PrivacyBudget(8.0, 1e-3), reason=HOSTILE)
    fields += ["randomize(key)", "charge(what)", "charge(key)", "raise_budget(reason)"]
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    ldp.declare(model, because=HOSTILE)
    labels.adopt(ldp.accounting.public_input(model).receipts)
    fields.append("declare(because)")
    for name, receipt in receipts_with_texts(labels.receipts[0].labels):
        try:
            labels.adopt([Receipt.from_json(receipt.to_json())])
        except ValueError as error:
            assert name in ("kind", "unit", "relation", "time", "output_digest", "answers"), error
            check_terminal(str(error))
        fields.append(f"receipt.{name}")
    return path, fields


@pytest.fixture(scope="module")
def hostile_report(
    hostile_store: Any, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Report, int]:
    """A report with hostile published files and audits, and the number of hostile fields."""
    path, fields = hostile_store
    folder = tmp_path_factory.mktemp("published")
    noisy = vault().randomize(ldp.RandomizedResponse(1.0, K))
    noisy.save(folder / NAME)
    audits = {HOSTILE: AuditResult(1.0, 0.9, 0.5, 0.0, HOSTILE)}
    found = report(path, published=[folder / NAME], audits=audits)
    return found, len(fields) + 3


@pytest.mark.slow
def test_every_text_of_a_report(hostile_report: Any) -> None:
    """One at a time, so that the next field of a report is tested, too."""
    found, _ = hostile_report
    tested = 0
    plain = page_of(found.content)
    check_page(plain)
    for path in leaves(found.content):
        content = with_leaf(found.content, path, HOSTILE)
        try:
            page = page_of(content)
        except ValueError:
            # A receipt refuses such a relation and such times.
            assert path[-1] in ("relation", "time"), path
            continue
        check_page(page)
        # An audit prints several lines; its own texts are tested above.
        if path[-1] != "found":
            check_terminal(str(Report(content, found.statement)))
        tested += 1
    assert tested > 150


def page_of(content: dict[str, Any]) -> str:
    with tempfile.TemporaryDirectory() as folder:
        Report(content, STATED).save(folder)
        return (pathlib.Path(folder) / "report.html").read_text(encoding="utf-8")


@needs_browser
def test_a_report_in_a_browser(hostile_report: Any, tmp_path: pathlib.Path) -> None:
    found, size = hostile_report
    found.save(tmp_path / "report")
    page = (tmp_path / "report" / "report.html").read_text(encoding="utf-8")
    parsed = check_page(page)
    title, text = in_browser(page, tmp_path)
    assert title.startswith("Privacy report: ") and "<!--" in title
    assert squeezed(text) == squeezed(parsed.text)
    # Long texts are cut.
    assert squeezed(text).count(squeezed(SHOWN[:60])) >= 19 and size == 30


@needs_browser
def test_the_browser_runs_what_is_not_escaped(tmp_path: pathlib.Path) -> None:
    """What the other test would see; the second wall stops it."""
    page = page_of(report_of_nothing())
    broken = page.replace("<h1>", "<h1><script>document.title='ran'</script>")
    assert in_browser(broken, tmp_path)[0] == "ran"
    hidden = page.replace("<h2>Limits", "<div hidden><h2>Limits")
    assert "restored" not in in_browser(hidden, tmp_path)[1]
    with pytest.raises(AssertionError, match="hidden"):
        in_browser(page.replace("<h2>Limits", "<!--<h2>Limits"), tmp_path)
    file = tmp_path / "walled.html"
    file.write_text(broken.replace("</h1>", "</h1><p data-shown=''></p>"), encoding="utf-8")
    flags = ["--headless", "--no-sandbox", f"--user-data-dir={tmp_path / 'profile'}", "--dump-dom"]
    run = subprocess.run([str(BROWSER), *flags, file.as_uri()], capture_output=True, timeout=120)
    assert "<title>ran</title>" not in run.stdout.decode()


def report_of_nothing() -> dict[str, Any]:
    empty = PrivacyGuarantee(0.0)
    return {
        "label_sets": [],
        "published": [],
        "audits": [],
        "not_audited": {},
        "made_at": "2026-01-01T00:00:00+00:00",
        "made_by": "tf-labeldp",
        "statement": str(empty).splitlines(),
        "guarantee": json.loads(empty.to_json()),
        "versions": {},
    }


@pytest.mark.parametrize(
    "time",
    [
        *("yesterday", "<script src=//a>", "2026-01-01", "2026-01-01T00:00:00"),
        *("2026-01-01<00:00:00+00:00", "0001-01-01T00:00:00+00:00", "9999-12-31T00:00:00+00:00"),
    ],
)
def test_a_receipt_has_a_plain_time(time: str) -> None:
    with pytest.raises(ValueError, match=r"expected the time of a receipt like '20.*got '"):
        Receipt(label_set(), Charge.unknown(PLAIN), PLAIN, time=time)


def test_a_report_has_any_time(tmp_path: pathlib.Path) -> None:
    """A clock may be wrong, and a receipt from somebody else may have any time."""
    labels = vault(store=tmp_path / "store")
    own = labels.randomize(ldp.RandomizedResponse(0.5, K)).receipts[0]
    for place, time in enumerate(["1970-01-01T00:00:00+00:00", "2999-12-31T23:59:59+00:00"]):
        labels.adopt([dataclasses.replace(own, time=time, id=f"receipt {place}")])
        report(tmp_path / "store").save(tmp_path / "report")
    page = (tmp_path / "report" / "report.html").read_text(encoding="utf-8")
    assert "1970-01-01 00:00" in page and "2999-12-31 23:59" in page


# A card.


@pytest.fixture(scope="module")
def hostile_card(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """The folder of a model whose name, columns, data, metric and receipts are hostile."""
    folder = tmp_path_factory.mktemp("cards") / NAME
    column = HOSTILE.replace("\ud800", "")
    table = {column: np.arange(40.0), "b": np.arange(40) % 2}
    classes = [column, "b"]
    labels = ldp.PrivateLabels(
        np.array(classes, object)[np.arange(40) % 2],
        Classes(classes),
        budget=ldp.PrivacyBudget(9.0, 1e-3),
    )
    model = ldp.PrivateClassifier(8.0, 1e-3, key=HOSTILE, method="head").fit(table, labels)
    network = model.to_keras()
    of_others = (receipt for _, receipt in receipts_with_texts(label_set()))
    ldp.declare(network, because=PLAIN, made_of=[each for each in of_others if is_readable(each)])
    ldp.declare(network, because=HOSTILE)
    metrics = [
        Evaluation(HOSTILE, np.nan, 0.0, 100, effective_examples=100),
        Evaluation("\U0001f600", np.inf, 0.0, 100, effective_examples=100),
    ]
    ldp.save(network, folder, metrics=metrics, data=f"{HOSTILE}\n\n- {HOSTILE}\n# x\n1. y\n=== z")
    return folder


def is_readable(receipt: Receipt) -> bool:
    try:
        Receipt.from_json(receipt.to_json())
    except ValueError:
        return False
    return True


@pytest.mark.filterwarnings("ignore")
def test_a_card(hostile_card: pathlib.Path, tmp_path: pathlib.Path) -> None:
    text = (hostile_card / "README.md").read_text(encoding="utf-8")
    assert not [c for c in text if not c.isprintable() and c != "\n"]
    _, front, body = text.split("---\n", 2)
    read = yaml.safe_load(front)
    (results,) = read["model-index"]
    first, second = results["results"][0]["metrics"][0], results["results"][1]["metrics"][0]
    assert np.isnan(first["value"]) and second == {"type": "\U0001f600", "value": np.inf}
    assert first["type"] == SHOWN and read["library_name"] == "keras"
    page = markdown_it.MarkdownIt("gfm-like", {"linkify": False}).render(body)
    parsed = Parsed(page)
    assert set(parsed.problems) <= {"pre", "thead"}, parsed.problems
    headings = re.findall(r"<h([1-6])>([^<]*)", page)
    assert [name for level, name in headings if level == "2"] == [
        *("Privacy", "Metrics", "Data", "Use", "Verify")
    ]
    assert len(headings) == 6 and {"a", "ol", "li", "hr"}.isdisjoint(parsed.elements)
    assert parsed.text.count(SHOWN) >= 5 and "by the owner of the labels" in parsed.text
    if BROWSER is not None:
        whole = f"<!doctype html><meta charset=utf-8><title>card</title><body>{page}</body>"
        title, shown = in_browser(whole, tmp_path)
        assert title == "card" and squeezed(shown) == squeezed(parsed.text)


# The command.


@pytest.mark.filterwarnings("ignore")
def test_the_command_prints_plain_lines(
    hostile_store: Any,
    hostile_card: pathlib.Path,
    tmp_path: pathlib.Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    store, _ = hostile_store
    noisy = vault().randomize(ldp.RandomizedResponse(1.0, K))
    noisy.save(tmp_path / NAME)
    (tmp_path / NAME / NAME).write_text("another file")
    inputs = keras.Input((2,))
    layer = HOSTILE.replace("/", "∕")[20:80]
    keras.Model(inputs, keras.layers.Dense(1, name=layer)(inputs)).save(tmp_path / "a.keras")
    calls = [
        ["verify", str(tmp_path / NAME)],
        ["verify", str(tmp_path / NAME), "--store", str(store)],
        ["verify", str(tmp_path / "a.keras"), "--store", str(store)],
        ["verify", str(hostile_card), "--store", str(store)],
        ["report", str(store), "--output", str(tmp_path / "r"), "--published", str(hostile_card)],
        ["audit", str(tmp_path / NAME), "--draws", "1000"],
        ["audit", str(tmp_path / f"no {NAME}")],
        ["give-back", str(store), "--key", HOSTILE],
        ["predict", str(hostile_card), str(tmp_path / f"{NAME}.csv")],
    ]
    for call in calls:
        main(call)
        out, error = capfd.readouterr()
        assert is_safe(out) and is_safe(error), (call[0], ascii(out), ascii(error))
        assert out or error
    gone = vault(store=tmp_path / f"s{NAME}")
    del gone
    (tmp_path / f"s{NAME}" / NAME).write_text("another file")
    main(["forget", str(tmp_path / f"s{NAME}"), "--yes"])
    out, _ = capfd.readouterr()
    assert is_safe(out) and "Other files" in out
