"""Sphinx's configuration: `uv run --group docs sphinx-build -W --keep-going docs build/site`.

Tables and pictures are made first, from the code and from benchmarks/results, into docs/generated.
"""

import os
import re
import sys
import warnings
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["PYTHONPATH"] = str(HERE.parent)  # for notebooks, whose processes begin elsewhere
# Kernels that examples of pages would compile are the business of the tests.
warnings.filterwarnings("ignore", category=DeprecationWarning, module="jax")

import jax_mx  # noqa: E402
from docs import pictures, tables  # noqa: E402

tables.write(HERE / "generated")
pictures.write(HERE / "generated")

project = "jax_mx"
copyright = "the authors of jax_mx, Apache-2.0"
version = release = jax_mx.__version__
extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx.ext.intersphinx",
]
exclude_patterns = ["generated/*.md"]
html_theme = "furo"
html_title = "jax_mx"
html_theme_options = {"sidebar_hide_name": False}
html_static_path = ["static"]
html_css_files = ["wide.css"]
nitpicky = False

# ---- pages ---
myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3
nb_execution_mode = "force"
nb_execution_timeout = 60
nb_execution_raise_on_error = True
suppress_warnings = ["mystnb.unknown_mime_type"]

# ---- docstrings ---
default_role = "code"
smartquotes = False
autodoc_member_order = "bysource"
autodoc_typehints = "none"  # signatures have them
autodoc_preserve_defaults = True
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True
intersphinx_mapping = {}


def plain(app, type_name, name, obj, options, lines: list[str]) -> None:
    """Docstrings are plain text: what reStructuredText takes for marks of its own is escaped."""
    del app, type_name, name, obj, options
    for i, line in enumerate(lines):
        parts = re.split(r"(`[^`]*`)", line)
        parts[::2] = [re.sub(r"(?<![\\])([*|]|_(?=\W|$))", r"\\\1", part) for part in parts[::2]]
        lines[i] = "".join(parts)


def setup(app) -> None:
    """Before napoleon reads docstrings."""
    app.connect("autodoc-process-docstring", plain, priority=100)
