"""What the page is made of: sections of parts, each with tables and figures."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from sparsesam.lab.display import Figure, Table


@dataclass(frozen=True)
class Part:
    """``lead`` is a sentence above everything else, ``notes`` are below the tables."""

    title: str
    blocks: Sequence[Table | Figure] = ()
    lead: str = ""
    notes: Sequence[str] = ()

    @property
    def is_empty(self) -> bool:
        return not (self.blocks or self.lead or self.notes)

    @property
    def groups(self) -> list[list[Table | Figure]]:
        """Blocks in order; figures that follow each other are together, to be shown side by side."""
        return [list(group) for _, group in itertools.groupby(self.blocks, lambda block: isinstance(block, Figure))]


@dataclass(frozen=True)
class Section:
    """``name`` is unique on the page. A section without parts is left out."""

    name: str
    title: str
    parts: Sequence[Part]

    @property
    def figures(self) -> list[Figure]:
        return [block for part in self.parts for block in part.blocks if isinstance(block, Figure)]
