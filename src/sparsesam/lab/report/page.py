"""Renders the page as one file: sections in the template, and figures as JSON data that page.js draws."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

from sparsesam import __version__
from sparsesam.integrations.extras import required_by
from sparsesam.lab.display import Figure, Table
from sparsesam.lab.display.figure import COLORS, MOST_BANDS


@dataclass(frozen=True)
class Part:
    """``lead`` is a sentence above the blocks, ``notes`` are below them."""

    title: str
    blocks: Sequence[Table | Figure] = ()
    lead: str = ""
    notes: Sequence[str] = ()

    @property
    def groups(self) -> list[list[Table | Figure]]:
        """Blocks in order; consecutive figures form a group and are shown side by side."""
        return [list(group) for _, group in itertools.groupby(self.blocks, lambda block: isinstance(block, Figure))]


@dataclass(frozen=True)
class Section:
    """``name`` is unique on the page."""

    name: str
    title: str
    parts: Sequence[Part]

    @property
    def figures(self) -> list[Figure]:
        return [block for part in self.parts for block in part.blocks if isinstance(block, Figure)]


def render(sections: Sequence[Section], **texts: Any) -> str:
    """Render the whole page as HTML; ``texts`` are the other variables of page.html."""
    assets = PackageLoader("sparsesam.lab.report", "assets")
    environment = Environment(loader=assets, autoescape=True, undefined=StrictUndefined)
    environment.trim_blocks = environment.lstrip_blocks = True
    # Long paths break after a slash, but not within a word, such as a hash.
    environment.filters["breakable"] = lambda text: Markup(str(escape(text)).replace("/", "/<wbr>"))
    drawn = [
        {**vars(figure), "panels": list(figure.panels.items())} for section in sections for figure in section.figures
    ]
    exact = json.dumps(drawn, default=vars, allow_nan=False)
    rounded = json.loads(exact, parse_float=lambda digits: float(f"{float(digits):.6g}"))  # enough digits for a chart
    data = json.dumps(rounded, separators=(",", ":")).replace("<", "\\u003c")  # which could end the script element
    with required_by("the report", "'sparsesam[report]'"):
        plotly = resources.files("plotly") / "package_data" / "plotly.min.js"
    return environment.get_template("page.html").render(
        **texts,
        version=__version__,
        sections=sections,
        most_bands=MOST_BANDS,
        colors=COLORS,
        plotly=Markup(plotly.read_text(encoding="utf-8")),
        data=Markup(data),
    )
