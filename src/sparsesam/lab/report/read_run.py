"""Runs in directories: files may be missing, empty or incomplete; what cannot be read is noted as a problem."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import yaml

from sparsesam.lab.display import Number, number
from sparsesam.lab.experiment.config import TrainConfig, from_mapping
from sparsesam.lab.experiment.run_directory import RunDirectory

Status = Literal["finished", "failed", "unfinished", "analyses only"]
#: Any of these makes a directory that of a run: a run can end before it has all of them.
SIGNS = {"config.yaml", "records.jsonl", "result.json", "failure.json", "analyses"}
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
    for folder, folders, files in os.walk(place):  # links are not followed: they may lead in circles
        if not SIGNS.isdisjoint((*files, *folders)):
            yield Path(folder)
            folders.clear()
        folders.sort()


@dataclass(frozen=True, eq=False)
class RunRecord:
    """``epochs`` are the latest record of each epoch, in order; ``analyses`` the files' contents by name.

    ``config`` has defaults where the result does not depend on a setting, so that identical runs are equal; None if the
    settings cannot be read. ``name`` is that given by a sweep or --name, else empty. ``result`` is that of a finished
    run, ``reason`` says why another is not finished, ``problems`` what could not be read.
    """

    path: Path
    status: Status
    reason: str
    config: TrainConfig | None
    name: str
    epochs: dict[float, dict[str, Any]]
    result: dict[str, Any]
    provenance: dict[str, Any]
    analyses: dict[str, dict[str, Any]]
    problems: list[str]

    @property
    def seed(self) -> int | None:
        return None if self.config is None else self.config.seed

    def measured(self, name: str) -> Number:
        """A number of the result."""
        return number(self.result.get(name))

    def curve(self, name: str) -> dict[float, float]:
        """A number of the records, by epoch."""
        values = {epoch: number(record.get(name)) for epoch, record in self.epochs.items()}
        return {epoch: value for epoch, value in values.items() if value is not None}


def read_run(path: Path) -> RunRecord:
    files, problems = RunDirectory(path), list[str]()
    records = _read_records(files.records, problems)
    analyses = _read_analyses(files.analyses, problems)
    written, failure = _read_mapping(files.result, problems), _read_mapping(files.failure, problems)
    begun = _last(records, "run") | _last(records, "resume")
    settings = _read_mapping(files.config, problems) or _mapping(begun, "config") or _mapping(written, "config")
    result = _mapping(written, "result") or _last(records, "result")
    epochs = _by_epoch(records, problems)
    config = _config(settings, problems) if settings else None
    status, reason = _status(path, config, len(epochs), result, failure)
    if not settings and status != "analyses only":
        problems.append("no settings could be read")
    return RunRecord(
        path=path,
        status=status,
        reason=reason,
        config=config,
        name=str(written.get("name") or begun.get("name") or ""),
        epochs=epochs,
        result=result if status == "finished" else {},
        provenance=_mapping(written, "provenance") or _mapping(begun, "provenance") or _mapping(failure, "provenance"),
        analyses=analyses,
        problems=problems,
    )


def _config(settings: dict[str, Any], problems: list[str]) -> TrainConfig | None:
    try:
        return from_mapping(TrainConfig, settings).canonical
    except (TypeError, ValueError) as error:
        problems.append(f"its settings are not those of this version of sparsesam: {error}")
        return None


def _status(
    path: Path, config: TrainConfig | None, epochs: int, result: dict[str, Any], failure: dict[str, Any]
) -> tuple[Status, str]:
    if number(result.get("test_accuracy")) is not None:
        return "finished", ""
    if failure:
        return "failed", str(failure.get("error", "no reason was recorded"))
    if config is None and not epochs and (path / "analyses").is_dir():
        return "analyses only", ""
    if config is None:
        return "unfinished", "its settings cannot be read"
    done = f"epoch {epochs} of {config.epochs}"
    holder = _read_mapping(path / "running.json", [])
    if holder:
        return "unfinished", f"{done}; process {holder.get('pid')} on {holder.get('host')} is running it, or was killed"
    return "unfinished", f"stopped after {done}; sparsesam train --resume --out {path} continues it"


def _by_epoch(records: list[dict[str, Any]], problems: list[str]) -> dict[float, dict[str, Any]]:
    found = {number(record.get("epoch")): record for record in records if record.get("kind") == "epoch"}
    if found.pop(None, None) is not None:
        problems.append("records.jsonl: a record of an epoch without its number, left out")
    return {epoch: found[epoch] for epoch in sorted(epoch for epoch in found if epoch is not None)}


def _read_analyses(folder: Path, problems: list[str]) -> dict[str, dict[str, Any]]:
    found = {}
    for path in sorted(folder.glob("*.json")):
        content = _read_mapping(path, problems)
        if isinstance(content.get("result"), dict):
            found[path.stem] = content
        elif content:
            problems.append(f"analyses/{path.name} has no result")
    return found


def _last(records: list[dict[str, Any]], kind: str) -> dict[str, Any]:
    return next((record for record in reversed(records) if record.get("kind") == kind), {})


def _mapping(content: dict[str, Any], key: str) -> dict[str, Any]:
    value = content.get(key)
    return value if isinstance(value, dict) else {}


def _read(path: Path, parse: Callable[[str], Any], problems: list[str]) -> Any:
    """The content of a file; None if it is missing or cannot be read. Reading a pipe would never end."""
    if not path.is_file():
        return None
    try:
        return parse(path.read_text(encoding="utf-8", errors="replace"))
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        problems.append(f"{path.name} cannot be read: {error}")
        return None


def _read_mapping(path: Path, problems: list[str]) -> dict[str, Any]:
    """Names and values of a YAML or JSON file."""
    is_yaml = path.suffix == ".yaml"
    content = _read(path, partial(yaml.load, Loader=_Loader) if is_yaml else json.loads, problems)
    if content is not None and not isinstance(content, dict):
        problems.append(f"{path.name} must contain names and values, but contains {type(content).__name__}")
    return {str(name): value for name, value in content.items()} if isinstance(content, dict) else {}


def _read_records(path: Path, problems: list[str]) -> list[dict[str, Any]]:
    lines = _read(path, str.splitlines, problems) or []
    records = [_record(line) for line in lines]
    unread = [place for place, record in enumerate(records, start=1) if record is None]
    if unread:
        which = ", ".join(map(str, unread[:5])) + (" …" if len(unread) > 5 else "")
        problems.append(f"{path.name}: {len(unread)} of {len(lines)} lines cannot be read (line {which}), left out")
    elif path.is_file() and not lines:
        problems.append(f"{path.name} is empty")
    return [record for record in records if record is not None]


def _record(line: str) -> dict[str, Any] | None:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) else None
