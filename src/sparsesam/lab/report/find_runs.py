"""The directories of runs at or below the given ones."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path

#: Any of these makes a directory that of a run: a run can end before it has all of them.
SIGNS = ("config.yaml", "records.jsonl", "result.json", "failure.json", "analyses")


def find_runs(places: Iterable[str | os.PathLike[str]]) -> list[Path]:
    """In the order given, each once, sorted below one place."""
    found: dict[Path, Path] = {}
    for place in map(Path, places):
        if not place.is_dir():
            raise ValueError(
                f"RUNS must be directories, got {str(place)!r}, which is not one; give that of a run, or one above"
            )
        below = list(_below(place))
        if not below:
            raise ValueError(f"{place} holds no runs; a run's directory has a config.yaml in it")
        for one in below:
            found.setdefault(one.resolve(), one)
    return list(found.values())


def _below(place: Path) -> Iterator[Path]:
    # Links are not followed: they may lead in circles.
    for folder, folders, files in os.walk(place):
        if any(sign in files or sign in folders for sign in SIGNS):
            yield Path(folder)
            folders.clear()
        folders.sort()
