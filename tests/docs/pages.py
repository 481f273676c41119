"""The code blocks of the documentation, so that the tests run what readers see."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def blocks(page, language="python"):
    """The code blocks of a page, in order; ``page`` is a path from the root of the repository."""
    return re.findall(rf"^```{language}\n(.*?)^```", (ROOT / page).read_text(), flags=re.MULTILINE | re.DOTALL)


def run(page, index, **names):
    """Run one code block with the given names, and return all names afterwards."""
    exec(compile(blocks(page)[index], f"{page}, block {index}", "exec"), names)
    return names
