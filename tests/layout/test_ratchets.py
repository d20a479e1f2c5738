"""The counts of `ratchets.json` never rise, and no way around raises them unseen."""

from __future__ import annotations

import io
import itertools
import json
import re
import shutil
import subprocess
import tarfile
from pathlib import Path

import pytest
from _ratchets import counted

ROOT = Path(__file__).parents[2]
FILE = "ratchets.json"
FOLDERS = ("tf_labeldp", "keras_layers", "tests", "benchmarks", "examples")


def numbers(root=ROOT):
    return json.loads((root / FILE).read_text(encoding="utf-8"))


def git(root, *words):
    """Returns the output of git, or None where git or the repository is missing."""
    try:
        done = subprocess.run(["git", "-C", root, *words], capture_output=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout


def why_no_history(root):
    """Returns why the earlier numbers can't be read, or None if they can."""
    top = git(root, "rev-parse", "--show-toplevel")
    if top is None or not root.samefile(top.decode().strip()):
        return "this is no checkout of git"
    if git(root, "rev-parse", "--is-shallow-repository") != b"false\n":
        return "the clone is shallow: the history is missing"
    return None


def raised(root):
    """Returns the counts whose number is above an earlier one, with the lowest."""
    # All parents of a merge, since either may have the lower number.
    words = ("log", "--full-history", "-m", "-p", "--no-ext-diff", "--no-color", "--format=")
    history = git(root, *words, "--", FILE).decode()
    lowest = {}
    for name, number in re.findall(r'^[-+] *"(\w+)": (\d+)', history, re.MULTILINE):
        lowest[name] = min(int(number), lowest.get(name, int(number)))
    return {name: lowest[name] for name in lowest if numbers(root).get(name, 0) > lowest[name]}


def at_last_change(folder):
    """Returns the members of each count at the commit that last changed the file, or None."""
    commit = (git(ROOT, "log", "-1", "--format=%H", "--", FILE) or b"").decode().strip()
    archive = git(ROOT, "archive", commit, *FOLDERS) if commit else None
    if archive is None:
        return None
    with tarfile.open(fileobj=io.BytesIO(archive)) as files:
        files.extractall(folder, filter="data")
    return counted(folder)


def excess(name, members, limit, earlier):
    """Says what to remove: the members that are new, or all, each with its lines."""
    listed, which = members, "All"
    if earlier is not None and (
        new := {key: members[key] for key in members if key not in earlier}
    ):
        listed, which = new, f"New since {FILE} last changed"
    lines = sorted(f"{', '.join(places[:3])}: {key}" for key, places in listed.items())
    return (
        f"expected at most {limit} {name}, as in {FILE}, got {len(members)}. Take public names, "
        f"or delete as many elsewhere. {which}:\n" + "\n".join(lines)
    )


@pytest.fixture(scope="module")
def members():
    return counted(ROOT)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(numbers()))
def test_a_count_is_at_most_its_number(name, members, tmp_path):
    assert sorted(members) == sorted(numbers())
    limit = numbers()[name]
    if len(members[name]) > limit:
        earlier = at_last_change(tmp_path)
        pytest.fail(excess(name, members[name], limit, earlier and earlier[name]), pytrace=False)


def test_no_number_is_above_an_earlier_one():
    if reason := why_no_history(ROOT):
        pytest.skip(reason)
    assert raised(ROOT) == {}, f"the numbers of {FILE} may only fall; the lowest were these"


@pytest.mark.skipif(shutil.which("git") is None, reason="there is no git")
def test_a_number_that_rises_is_caught(tmp_path):
    root, shallow = tmp_path / "own", tmp_path / "shallow"
    assert why_no_history(tmp_path) is not None
    root.mkdir()
    git(root, "init", "-q")
    for number in (7, 5, 6):
        (root / FILE).write_text(json.dumps({"names": number}, indent=2), encoding="utf-8")
        git(root, "add", FILE)
        git(root, "-c", "user.name=n", "-c", "user.email=e@x", "commit", "-q", "-m", "A number")
        assert raised(root) == ({"names": 5} if number == 6 else {})
    assert why_no_history(root) is None
    git(tmp_path, "clone", "-q", "--depth=1", root.as_uri(), shallow)
    assert why_no_history(shallow) == "the clone is shallow: the history is missing"


# `lib` stands for the name of the library, so that these texts do not count as its names.
TREE = {
    "lib/__init__.py": "_PARTS = {'shop': ('Till',), 'cellar': ()}\n__all__ = [*_PARTS]",
    "lib/_validate.py": "def number(): ...",
    "lib/shop/__init__.py": "from lib.shop.stock import Crate, Till\n__all__ = ['Till']",
    "lib/shop/stock.py": "class Till:\n    def _shelf(self): ...\nclass Crate: ...",
    "lib/shop/_keys.py": "class Lock: ...",
    "lib/cellar/__init__.py": "",
    "lib/cellar/_rooms.py": "def has(x, name):\n    return hasattr(x, name)",
    "lib/cellar/_kinds.py": "@runtime_checkable\nclass Wide(Protocol):\n    width: int",
    "keras_layers/__init__.py": "from lib.keras_layers._blend import Blend\n__all__ = ['Blend']",
    "keras_layers/_blend.py": "class Blend: ...\ndef blend(): ...",
    "tests/fits.py": "from lib.shop.stock import Crate",
}


def add(root, path, source):
    file = root / path.replace("lib/", "tf_labeldp/")
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(re.sub(r"\blib\b", "tf_labeldp", source), encoding="utf-8")
    return file


@pytest.fixture
def tree(tmp_path):
    for path, source in TREE.items():
        add(tmp_path, path, source)
    return tmp_path


def sizes(root):
    return {name: len(found) for name, found in counted(root).items()}


def check_it_counts(tree, path, source, count):
    """A file raises a count of the tree, and without it the counts are as before."""
    before = sizes(tree)
    file = add(tree, path, source)
    assert sizes(tree)[count] > before[count]
    file.unlink()
    assert sizes(tree) == before


TAKEN = (
    "from lib.shop.stock import Crate",
    "from ..shop.stock import Crate",
    "from lib.shop._keys import Lock",
    "from lib.shop import Crate",
    "from ..shop import Crate as Box",
    "from lib.shop import stock\nstock.Crate()",
    "from ..shop import stock as s\ns.Crate()",
    "from lib.shop import stock\nstock.Crate = None",
    "from lib.shop import stock\nalias = stock",
    "import lib.shop.stock\nlib.shop.stock.Crate()",
    "import lib.shop.stock as stock\nstock.Crate()",
    "import lib as l\nl.shop.stock.Crate()",
    "from lib import shop\nshop.stock.Crate.made()",
    "from lib.shop import stock\ngetattr(stock, 'Crate')",
    "def f():\n    from lib.shop.stock import Crate",
    "if TYPE_CHECKING:\n    from lib.shop.stock import Crate",
    "from lib.keras_layers._blend import blend",
    "from keras_layers._blend import blend",
    "from lib.keras_layers import blend",
    "import importlib\nimportlib.import_module('lib.shop._keys').Lock",
    "import importlib\nimportlib.import_module('lib.shop.' + name)",
    "import importlib\nimportlib.import_module(f'lib.{name}')",
    "sys.modules['lib.shop._keys'].Lock",
    "from lib.shop import Till\nTill()._shelf()",
    "def f(till):\n    return till.inner._shelf()",
    "def f(till):\n    return getattr(till, '_shelf')",
)


@pytest.mark.parametrize(
    "source", [*TAKEN, "importlib.import_module('..shop._keys', 'lib.cellar')"]
)
def test_each_way_to_a_name_from_inside_counts(tree, source):
    check_it_counts(tree, "lib/cellar/_taken.py", source, "names")


@pytest.mark.parametrize(
    "source",
    [
        *(source for source in TAKEN if "from .." not in source),
        "from fits import Crate",
        "import fits\nfits.Crate()",
        "monkeypatch.setattr('lib.shop.stock.Crate', None)",
        "from lib.shop import stock\nmonkeypatch.setattr(stock, 'Crate', None)",
        "monkeypatch.setattr(till, '_shelf', None)",
        "SCRIPT = '''\n    from lib.shop import stock\n    stock.Crate()\n'''",
        "SCRIPT = 'from lib.shop.stock import {}'",
    ],
)
def test_each_way_of_a_test_to_an_internal_name_counts(tree, source):
    check_it_counts(tree, "tests/shop/test_taken.py", source, "pairs")


@pytest.mark.parametrize(
    "source",
    [
        "getattr(x, 'a')",
        "hasattr(x, 'a')",
        "vars(x)['a']",
        "dir(x)",
        "x.__dict__['a']",
        "object.__getattribute__(x, 'a')",
        "from operator import attrgetter as get",
        "ask = getattr",
        "functools.partial(hasattr, x)",
        "operator.attrgetter('a')(x)",
        "inspect.getattr_static(x, 'a')",
        "try:\n    x.a\nexcept (AttributeError, KeyError):\n    pass",
        "with contextlib.suppress(AttributeError):\n    x.a",
        "from lib.cellar._rooms import has\nhas(x, 'a')",
        "from lib.cellar._kinds import Wide\nisinstance(x, (int, Wide))",
        "from lib.cellar import _kinds\nisinstance(x, _kinds.Wide)",
        "match x:\n    case object(a=1):\n        pass",
    ],
)
def test_each_way_of_asking_counts(tree, source):
    check_it_counts(tree, "lib/cellar/_asking.py", source, "asking")


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("lib/cellar/_x.py", "from lib.shop import Till\nfrom lib import shop\nshop.Till()"),
        ("lib/cellar/_x.py", "from lib import _validate\n_validate.number()"),
        ("lib/cellar/_x.py", "from lib.cellar import _rooms\n_rooms.has"),
        ("lib/cellar/_x.py", "from lib.keras_layers import Blend"),
        ("lib/cellar/_x.py", "def f(self):\n    return self._shelf()"),
        ("lib/cellar/_x.py", "'''Reads lib.shop.stock in prose.'''\nraise AttributeError('a')"),
        ("lib/cellar/_x.py", "importlib.import_module(f'numpy.{name}')"),
        ("lib/shop/_x.py", "from lib.shop.stock import Crate\nTill()._shelf()"),
        ("tests/test_x.py", "import lib\nlib.shop.Till()\n'lib.shop.Till'"),
        ("benchmarks/bench_x.py", "from lib.shop.stock import Crate"),
    ],
)
def test_public_names_and_own_files_do_not_count(tree, path, source):
    before = sizes(tree)
    add(tree, path, source)
    assert sizes(tree) == before


@pytest.mark.parametrize(
    "head", ["@dataclasses.dataclass(frozen=True)\nclass A:", "class A(NamedTuple):"]
)
def test_fields_after_the_eighth_count(tree, head):
    before = sizes(tree)
    for number in (8, 9, 11):
        body = "".join(f"\n    a{field}: int" for field in range(number))
        add(tree, "lib/shop/_wide.py", f"{head}{body}\n    kind: ClassVar[str] = 'a'")
        assert sizes(tree)["fields"] == before["fields"] + number - 8


def test_an_error_lists_what_is_new():
    found = {"shop.Crate": ["a.py:1", "b.py:2"], "shop.Lock": ["c.py:3"]}
    text = excess("names", found, 1, {"shop.Lock": ["c.py:1"]})
    assert "at most 1 names" in text and text.endswith("changed:\na.py:1, b.py:2: shop.Crate")
    assert excess("names", found, 1, None).endswith(
        "All:\na.py:1, b.py:2: shop.Crate\nc.py:3: shop.Lock"
    )


EXEMPT = re.compile(r"#\s*noqa:[^()]*\b(?:C901|PLR0913|PLR0915)\b(.*)")


def test_exceptions_from_the_limits_of_functions_are_few_and_have_reasons():
    """At most 20 functions are more complex, longer, or have more arguments than ruff allows."""
    exempt, bare = [], []
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).glob("**/*.py")):
            lines = ["", *path.read_text(encoding="utf-8").splitlines()]
            for above, line in itertools.pairwise(lines):
                if match := EXEMPT.search(line):
                    exempt.append(f"{path}: {line}")
                    has_reason = re.search(r"\w{3}", match[1]) or above.strip().startswith("#")
                    bare += [] if has_reason else exempt[-1:]
    assert bare == [], "give a reason, in parentheses or in a comment above"
    assert len(exempt) <= 20, exempt
