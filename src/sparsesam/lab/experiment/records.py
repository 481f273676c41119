"""Records as JSON lines: one object per line, only ever appended, readable by anything."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any


def append_records(path: Path, records: Iterable[Mapping[str, Any]]) -> None:
    """Append each record as one line, making the directories above ``path``."""
    lines = [json.dumps(dict(record), sort_keys=True, allow_nan=False) for record in records]
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.writelines(line + "\n" for line in lines)


def read_records(path: Path) -> list[dict[str, Any]]:
    """Every record of ``path``, in the order written."""
    return [json.loads(line) for line in path.read_text().splitlines() if line]
