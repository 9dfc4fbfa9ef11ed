"""How Sphinx builds the site: `make docs` puts it into build/site, and takes a warning for an error."""

project = "lightning-compile-profiler"
author = "The lightning-compile-profiler authors"
html_theme = "furo"
html_title = project
html_show_copyright = False

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
myst_heading_anchors = 3
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
napoleon_use_ivar = True
