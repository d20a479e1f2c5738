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
html_static_path = ["site.css"]
html_css_files = ["site.css"]
# The default underlines names of modules as if they were links.
pygments_dark_style = "github-dark"
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


# The tutorials and notebooks are generated from the scripts of examples/, which the tests run.
ROOT = pathlib.Path(__file__).parents[1]
TUTORIALS = {
    "01_multi_stage": "Classes",
    "02_two_party_regression": "Numbers between two parties",
    "05_one_release": "Images at a small epsilon",
    "10_tables": "A table, with a budget and a report",
    "11_public_encoder": "Images with a public encoder",
    "03_labeldp_pro": "A Keras model by DP-SGD",
    "04_clusters": "Clusters of the features",
    "06_user_level": "Users with several examples",
    "07_semi_supervised": "Noisy labels and all the images",
    "08_pate": "Answers of teachers",
    "12_ads": "Ads between two parties",
    "13_preferences": "Preferences",
    "14_attacks": "Attacks",
    "09_tfx_pipeline": "A TFX pipeline",
}
Part = tuple[str, str]
"""``"text"`` in Markdown or ``"code"``, and its content."""


def parts(name: str, title: str) -> list[Part]:
    """Returns a script as text and code: its docstring, and steps by numbered comments."""
    source = (ROOT / "examples" / f"{name}.py").read_text(encoding="utf-8")
    doc = ast.get_docstring(ast.parse(source)) or ""
    # Commands in a docstring are indented.
    commands = re.sub(r"^    (.*)$", r"```sh\n\1\n```", doc, flags=re.M)
    found: list[Part] = [("text", f"# {title}"), ("text", commands)]
    for step in re.split(r"^(?=# \d+\. )", source.split('"""', 2)[2], flags=re.M):
        comment = re.match(r"(?:#.*\n)*", step)[0] if step.startswith("# ") else ""
        text = " ".join(line[1:].strip() for line in comment.splitlines())
        found += [("text", text), ("code", step[len(comment) :].strip("\n"))]
    return [(kind, content) for kind, content in found if content]


def tutorial(name: str, title: str) -> str:
    """Returns a script as a page in Markdown."""
    heading, *rest = parts(name, title)
    files = f"The whole script: `examples/{name}.py`"
    files += f", and as {{download}}`a notebook <{name}.ipynb>`."
    pages = [content if kind == "text" else f"```python\n{content}\n```" for kind, content in rest]
    return "\n\n".join([heading[1], pages[0], files, *pages[1:]]) + "\n"


def notebook(name: str, title: str) -> dict[str, object]:
    """Returns a script as a notebook, with the default arguments of the script.

    Modules of examples/ that it imports are written first. So is a script with several parties,
    which then runs each in a process of its own.
    """
    import nbformat

    found = parts(name, title)
    code = "\n".join(content for kind, content in found if kind == "code")
    modules = re.findall(r"^(?:import|from) (\w+)", code, flags=re.M)
    files = [f"{each}.py" for each in modules if (ROOT / "examples" / f"{each}.py").exists()]
    steps = [
        (kind, content.replace("parser.parse_args()", "parser.parse_args([])"))
        for kind, content in found[2:]
    ]
    if "def main(" in code:
        files.append(f"{name}.py")
        steps = [("code", f"%run {name}.py")]
    sources = {each: (ROOT / "examples" / each).read_text(encoding="utf-8") for each in files}
    written = [("code", f"%%writefile {each}\n{text}") for each, text in sources.items()]
    new = {"text": nbformat.v4.new_markdown_cell, "code": nbformat.v4.new_code_cell}
    cells = [
        new[kind](content, id=f"cell-{number}")
        for number, (kind, content) in enumerate([*found[:2], *written, *steps])
    ]
    kernel = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
    return nbformat.v4.new_notebook(cells=cells, metadata=kernel)


def api_pages() -> dict[str, str]:
    """Returns a page for each part in the list of docs/api.md."""
    overview = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    pages = {}
    for name in re.findall(r"^api/(\w+)$", overview, re.M):
        directive = f"```{{eval-rst}}\n.. automodule:: tf_labeldp.{name}\n"
        # The names of plug-ins have their pages in the parts that they come from.
        directive += "   :no-index:\n" * (name == "plugins")
        pages[f"api/{name}.md"] = f"# `tf_labeldp.{name}`\n\n{directive}```\n"
    return pages


def setup(app: object) -> None:
    """Writes the generated pages: tutorials, notebooks, API, guarantees and their tests."""
    import nbformat

    sys.path.insert(0, str(ROOT / "tests"))
    import guarantees

    pages = {f"tutorials/{name}.md": tutorial(name, title) for name, title in TUTORIALS.items()}
    for name, title in TUTORIALS.items():
        pages[f"tutorials/{name}.ipynb"] = nbformat.writes(notebook(name, title)) + "\n"
    for name, text in {**pages, **api_pages(), "coverage.md": guarantees.page()}.items():
        page = ROOT / "docs" / name
        page.parent.mkdir(exist_ok=True)
        if not page.exists() or page.read_text(encoding="utf-8") != text:
            page.write_text(text, encoding="utf-8")
