"""Configuration of Sphinx. The site loads nothing from other hosts: furo brings its fonts and scripts."""

from sphinx.pycode import ModuleAnalyzer

import backhaul

project = "Backhaul"
author = "The Backhaul authors"
copyright = author
version = release = backhaul.__version__
html_title = "Backhaul"
language = "en"

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
source_suffix = {".md": "markdown"}
html_theme = "furo"
html_static_path = ["static"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_sphinx = False
html_theme_options = {"navigation_with_keys": True, "top_of_page_buttons": []}

myst_heading_anchors = 4
myst_enable_extensions = ["attrs_inline", "colon_fence"]
nitpicky = False

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True
python_use_unqualified_type_names = True
maximum_signature_line_length = 90

_analyze = ModuleAnalyzer.analyze


def analyze_without_overloads(analyzer: ModuleAnalyzer) -> None:
    """Shows one signature for each function: overloads are for type checkers, and docs/typing.md is about them."""
    _analyze(analyzer)
    analyzer.overloads = {}


ModuleAnalyzer.analyze = analyze_without_overloads  # type: ignore[method-assign, assignment]
