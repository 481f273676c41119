"""The directories of runs, and their files, which may be missing, empty or incomplete: a problem, never an error."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import yaml

#: Any of these makes a directory that of a run: a run can end before it has all of them.
SIGNS = ("config.yaml", "records.jsonl", "result.json", "failure.json", "analyses")
_Loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def find_runs(places: Iterable[str | os.PathLike[str]]) -> list[Path]:
    """The directories of runs at or below the given ones: in the order given, each once, sorted below one place."""
    found: dict[Path, Path] = {}
    for place in map(Path, places):
        if not place.is_dir():
            raise ValueError(
                f"RUNS must be directories, got {str(place)!r}, which is none; pass a run's directory, or one above it"
            )
        below = list(_below(place))
        if not below:
            raise ValueError(f"{place} has no runs; a run's directory has a config.yaml in it")
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


def read_text(path: Path, problems: list[str]) -> str:
    """Empty for a missing file; only regular files are opened, because reading a pipe would never end."""
    if not path.is_file():
        return ""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        problems.append(f"{path.name} cannot be read: {error}")
        return ""


def read_mapping(path: Path, problems: list[str]) -> dict[str, Any]:
    """Names and values of a YAML or JSON file; empty for a missing file."""
    is_yaml = path.suffix == ".yaml"
    text = read_text(path, problems)
    if not text:
        problems += [f"{path.name} is empty"] if path.is_file() else []
        return {}
    try:
        content = yaml.load(text, _Loader) if is_yaml else json.loads(text)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        problems.append(f"{path.name} is not {'YAML' if is_yaml else 'JSON'}: {error}")
        return {}
    if isinstance(content, dict):
        return {str(name): value for name, value in content.items()}
    problems.append(f"{path.name} must contain names and values, but contains {type(content).__name__}")
    return {}


def read_lines(path: Path, problems: list[str]) -> list[dict[str, Any]]:
    records, unread = [], []
    lines = read_text(path, problems).splitlines()
    for place, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            record = None
        if isinstance(record, dict):
            records.append(record)
        else:
            unread.append(place)
    if unread:
        which = ", ".join(map(str, unread[:5])) + (" …" if len(unread) > 5 else "")
        problems.append(f"{path.name}: {len(unread)} of {len(lines)} lines cannot be read (line {which}), left out")
    elif path.is_file() and not records:
        problems.append(f"{path.name} is empty")
    return records
