"""Sphinx: what it needs to know to build these pages, without a network."""

from docutils import nodes

import sb3_nstep

project = "sb3_nstep"
author = "the authors of sb3_nstep"
release = sb3_nstep.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc"]
exclude_patterns = ["_build"]
html_theme = "furo"
html_title = f"sb3_nstep {release}"
html_static_path = ["_static"]

myst_heading_anchors = 3
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
autodoc_type_aliases = {name: name for name in ("Array", "ArrayLike", "Floats", "Horizon", "NDArray")}
python_maximum_signature_line_length = 60  # a telephone is narrow

SB3 = "https://stable-baselines3.readthedocs.io/en/master"
SB3_PAGES = {
    "stable_baselines3.A2C": "modules/a2c.html",
    "stable_baselines3.common.buffers.RolloutBuffer": "common/on_policy_algorithm.html",
}


def link_to_sb3(app, env, node, contnode):
    """Plain links for what would take an inventory from the network."""
    page = SB3_PAGES.get(node.get("reftarget", ""))
    return page and nodes.reference("", "", contnode, refuri=f"{SB3}/{page}", internal=False)


def setup(app):
    app.connect("missing-reference", link_to_sb3)
