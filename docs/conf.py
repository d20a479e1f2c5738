"""The documentation site: `make docs` builds it from the pages and docstrings of the repository."""

from __future__ import annotations

from tf_labeldp import __version__

project = "tf-labeldp"
author = "the tf-labeldp developers"
release = __version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
root_doc = "docs/index"
# The source folder is the repository, so that links of pages hold here and there.
include_patterns = ["*.md", "docs/**.md", "tests/benchmarks/*.md"]
html_theme = "furo"
html_title = f"{project} {release}"
myst_heading_anchors = 4
# scikit-learn's switches for metadata of pipelines, which no estimator here takes.
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
autodoc_typehints = "none"  # the signatures have them
napoleon_use_ivar = True
napoleon_custom_sections = ["Guarantee", "Source", ("Call arguments", "params_style")]
