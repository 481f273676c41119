"""The code of docs/training-loops.md, so that the tests run what readers see."""

from __future__ import annotations

import re
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "training-loops.md"


def run(section, index, **names):
    """Run the section's code block of this index; the names are what it may use, and what it leaves is returned."""
    (text,) = re.findall(rf"^## {section}$(.*?)^## ", PAGE.read_text(), flags=re.MULTILINE | re.DOTALL)
    exec(re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)[index], names)
    return names
