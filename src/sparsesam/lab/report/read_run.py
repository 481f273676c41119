"""Reads runs from directories. Files may be missing, empty or incomplete; unreadable ones are noted as problems."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, Literal

import yaml

from sparsesam.lab.display import Number, number
from sparsesam.lab.experiment.config import TrainConfig, split_settings
from sparsesam.lab.experiment.run_directory import RunDirectory, sum_of, unseal

Status = Literal["finished", "failed", "unfinished", "analyses only"]
#: A directory with any of these is a run's: a run can end before it has all of them.
SIGNS = {"config.yaml", "records.jsonl", "result.json", "failure.json", "analyses"}
_Loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def find_runs(places: Iterable[str | os.PathLike[str]]) -> list[Path]:
    """Find the directories of runs at or below the given ones: in the given order, each once, sorted below each."""
    found: dict[Path, Path] = {}
    for place in map(Path, places):
        if not place.is_dir():
            raise ValueError(
                f"RUNS must be directories, got {str(place)!r}; pass a run's directory or a parent directory"
            )
        below = list(_below(place))
        if not below:
            raise ValueError(f"{place} has no runs; a run's directory contains a config.yaml")
        for folder in below:
            found.setdefault(folder.resolve(), folder)
    return list(found.values())


def _below(place: Path) -> Iterator[Path]:
    for folder, folders, files in os.walk(place):  # does not follow links, which may be circular
        if not SIGNS.isdisjoint((*files, *folders)):
            yield Path(folder)
            folders.clear()
        folders.sort()


class RunRecord:
    """The content of a run's files; ``problems`` are messages about unreadable ones.

    ``epochs`` are the latest record of each epoch, in order; ``analyses`` the files' contents by name. ``settings`` are
    as recorded; ``config`` has unused ones at their defaults, so that identical runs are equal, and is None if they
    cannot be read. ``name`` is the name given by a sweep or --name, or empty. ``result`` is empty for a run that is not
    finished; ``reason`` then says why.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.problems: list[str] = []
        files = RunDirectory(path)
        records = self._read_records(files.records)
        written, failure = self._read_mapping(files.result), self._read_mapping(files.failure)
        begun = _last(records, "run") | _last(records, "resume")
        self.name = str(written.get("name") or begun.get("name") or "")
        self.provenance = _first((written, begun, failure), "provenance")
        self.settings = self._read_settings(files.config, recorded=_first((begun, written), "config"))
        self.config = self._config()
        self.analyses = self._read_analyses(files.analyses)
        self.epochs = self._by_epoch(records)
        self.result = self._result(files, written, _last(records, "result"))
        self.status, self.reason = self._status(failure)
        if not self.settings and self.status != "analyses only":
            self.problems.append("no settings could be read")

    @property
    def seed(self) -> int | None:
        return None if self.config is None else self.config.seed

    def measured(self, name: str) -> Number:
        """Returns a number of the result."""
        return number(self.result.get(name))

    def curve(self, name: str) -> dict[float, float]:
        """Returns a number of the records, by epoch."""
        values = {epoch: number(record.get(name)) for epoch, record in self.epochs.items()}
        return {epoch: value for epoch, value in values.items() if value is not None}

    def _read_settings(self, file: Path, recorded: dict[str, Any]) -> dict[str, Any]:
        settings = self._read_mapping(file) or recorded
        if all(settings.get(name) == recorded[name] for name in recorded if name != "epochs"):
            return settings
        self.problems.append("config.yaml is not of this run, or damaged: the settings in its records are shown")
        return recorded

    def _config(self) -> TrainConfig | None:
        try:
            return split_settings(self.settings)[0].canonical if self.settings else None
        except (TypeError, ValueError) as error:
            self.problems.append(f"its settings are not valid in this version of sparsesam: {error}")
            return None

    def _read_analyses(self, folder: Path) -> dict[str, dict[str, Any]]:
        found = {}
        for path in sorted(folder.glob("*.json")):
            content = self._read_mapping(path)
            if not isinstance(content.get("result"), dict):
                self.problems += [f"analyses/{path.name} has no result"] if content else []
            elif self.config and content.get("run") not in (None, self.config.identity):
                self.problems.append(f"analyses/{path.name} is of another run, left out")
            else:
                found[path.stem] = content
        return found

    def _by_epoch(self, records: list[dict[str, Any]]) -> dict[float, dict[str, Any]]:
        found = {number(record.get("epoch")): record for record in records if record.get("kind") == "epoch"}
        if found.pop(None, None) is not None:
            self.problems.append("records.jsonl: left out a record of an epoch without its number")
        return {epoch: found[epoch] for epoch in sorted(epoch for epoch in found if epoch is not None)}

    def _result(self, files: RunDirectory, written: dict[str, Any], last: dict[str, Any]) -> dict[str, Any]:
        if "records" in written:
            text = files.records.read_text(errors="replace") if files.records.is_file() else ""
            if written["records"] != sum_of(text):
                self.problems.append("records.jsonl is not what result.json was made from: lines were lost or changed")
        if self.config is not None and written.get("hash", self.config.content_hash) != self.config.content_hash:
            self.problems.append("result.json is of another run, left out")
            return {}
        result = _first((written,), "result") or last
        return result if number(result.get("test_accuracy")) is not None else {}

    def _status(self, failure: dict[str, Any]) -> tuple[Status, str]:
        if self.result:
            return "finished", ""
        if failure:
            return "failed", str(failure.get("error", "no reason was recorded"))
        if self.config is None and not self.epochs and (self.path / "analyses").is_dir():
            return "analyses only", ""
        if self.config is None:
            return "unfinished", "its settings cannot be read"
        done = f"epoch {len(self.epochs)} of {self.config.epochs}"
        holder = self._read_mapping(self.path / "running.json")
        if holder:
            where = f"process {holder.get('pid')} on {holder.get('host')}"
            return "unfinished", f"{done}; {where} is running it, or was killed"
        return "unfinished", f"stopped after {done}; continue with: sparsesam train --resume --out {self.path}"

    def _read_mapping(self, path: Path) -> dict[str, Any]:
        """Returns the names and values of a YAML or JSON file."""
        parse = partial(yaml.load, Loader=_Loader) if path.suffix == ".yaml" else json.loads
        content = self._read(path, lambda text: unseal(parse(text))) or {}
        return {str(name): value for name, value in content.items()}

    def _read_records(self, path: Path) -> list[dict[str, Any]]:
        lines = self._read(path, str.splitlines)
        records, unread = [], []
        for place, line in enumerate(lines or (), start=1):
            try:
                records.append(unseal(json.loads(line)))
            except (ValueError, RecursionError):
                unread.append(str(place))
        if unread:
            which = ", ".join(unread[:5]) + (" …" if len(unread) > 5 else "")
            count = f"{len(unread)} of {len(lines)} lines cannot be read (line {which}), left out"
            self.problems.append(f"{path.name}: {count}")
        elif lines == []:
            self.problems.append(f"{path.name} is empty")
        return records

    def _read(self, path: Path, parse: Callable[[str], Any]) -> Any:
        """Returns None if the file is missing, unreadable or not a regular file: reading a pipe would hang."""
        if not path.is_file():
            return None
        try:
            return parse(path.read_text(encoding="utf-8", errors="replace"))
        except (OSError, TypeError, ValueError, RecursionError, yaml.YAMLError) as error:
            self.problems.append(f"{path.name} cannot be read: {error}")
            return None


def _last(records: list[dict[str, Any]], kind: str) -> dict[str, Any]:
    return next((record for record in reversed(records) if record.get("kind") == kind), {})


def _first(contents: Iterable[dict[str, Any]], key: str) -> dict[str, Any]:
    """Returns the mapping ``key`` of the first content that has one."""
    values = [content.get(key) for content in contents]
    return next((value for value in values if value and isinstance(value, dict)), {})
