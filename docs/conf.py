"""The configuration of Sphinx, which builds the documentation: `make docs`."""

import sys
from pathlib import Path

import fastattn

DOCS = Path(__file__).resolve().parent
sys.path.insert(0, str(DOCS / "extensions"))

project = "fastattn"
author = "The fastattn authors"
project_copyright = "The fastattn authors"
version = release = fastattn.__version__.split("+")[0]

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
    "contents",
    "docstrings",
    "repository",
]

myst_heading_anchors = 3
nb_execution_mode = "off"  # the notebook is kept with its outputs; a test runs it anew
nb_merge_streams = True

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_class_signature = "mixed"
napoleon_numpy_docstring = False
napoleon_use_rtype = False
napoleon_custom_sections = [("Shape", "params_style")]
maximum_signature_line_length = 88

html_theme = "furo"
html_title = f"fastattn {version}"
html_static_path = ["static"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_sphinx = False
html_theme_options = {
    "source_repository": "https://github.com/fastattn/fastattn/",
    "source_branch": "main",
    "source_directory": "docs/",
    "navigation_with_keys": True,
}
pygments_style = "default"
pygments_dark_style = "github-dark"
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True
