"""The documentation site: `make docs` builds it from the pages and docstrings of the repository."""

from __future__ import annotations

import ast
import pathlib
import re
import sys

from tf_labeldp import __version__

project = "tf-labeldp"
author = "the tf-labeldp developers"
release = __version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
root_doc = "docs/index"
# The repository is the source folder, so that links of pages work on the site and in the checkout.
include_patterns = ["*.md", "docs/**.md", "benchmarks/*.md"]
html_theme = "furo"
html_title = f"{project} {release}"
myst_heading_anchors = 4
# Methods of scikit-learn that set metadata of pipelines, which no estimator here uses.
_SWITCHES = (
    "fit",
    "partial_fit",
    "predict",
    "score",
    "transform",
    "predict_proba",
    "decision_function",
)
autodoc_default_options = {
    "members": True,
    "imported-members": True,
    "exclude-members": ", ".join(f"set_{name}_request" for name in _SWITCHES),
}
autodoc_member_order = "bysource"
# The signatures have the types.
autodoc_typehints = "none"
napoleon_use_ivar = True
napoleon_custom_sections = ["Guarantee", "Source", ("Call arguments", "params_style")]


# The tutorials are generated from the scripts of examples/, which the tests run.
ROOT = pathlib.Path(__file__).parents[1]
TUTORIALS = {
    "01_multi_stage": "Classes",
    "02_two_party_regression": "Numbers between two parties",
    "05_one_release": "Images at a small epsilon",
    "10_tables": "Tables",
    "03_labeldp_pro": "A Keras model by DP-SGD",
    "04_clusters": "Clusters of the features",
    "06_user_level": "Users with several examples",
    "07_semi_supervised": "Noisy labels and all the images",
    "08_pate": "Answers of teachers",
    "12_ads": "Ads between two parties",
    "09_tfx_pipeline": "A TFX pipeline",
}


def tutorial(name: str, title: str) -> str:
    """Returns a script as a page: its docstring, and text and code by numbered comments."""
    source = (ROOT / "examples" / f"{name}.py").read_text(encoding="utf-8")
    doc = ast.get_docstring(ast.parse(source)) or ""
    code = source.split('"""', 2)[2]
    steps = re.split(r"^(?=# \d+\. )", code, flags=re.M)
    page = [f"# {title}", _without_indented(doc), f"The whole script: `examples/{name}.py`."]
    for step in steps:
        comment = re.match(r"(?:#.*\n)*", step)[0] if step.startswith("# ") else ""
        page.append(" ".join(line[1:].strip() for line in comment.splitlines()))
        rest = step[len(comment) :].strip("\n")
        page += [f"```python\n{rest}\n```"] if rest else []
    return "\n\n".join(page) + "\n"


def _without_indented(doc: str) -> str:
    """Returns a docstring with its commands as code blocks."""
    return re.sub(r"^    (.*)$", r"```sh\n\1\n```", doc, flags=re.M)


def setup(app: object) -> None:
    """Writes the generated pages: tutorials, and the guarantees with their tests."""
    sys.path.insert(0, str(ROOT / "tests"))
    import guarantees

    pages = {f"tutorials/{name}": tutorial(name, title) for name, title in TUTORIALS.items()}
    (ROOT / "docs" / "tutorials").mkdir(exist_ok=True)
    for name, text in {**pages, "coverage": guarantees.page()}.items():
        page = ROOT / "docs" / f"{name}.md"
        if not page.exists() or page.read_text(encoding="utf-8") != text:
            page.write_text(text, encoding="utf-8")
