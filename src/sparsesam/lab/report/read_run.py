"""Reads runs from directories. Files may be missing, empty or incomplete; unreadable ones are noted as problems."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator
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
    """The content of a run's files; ``problems`` are messages about those that are damaged, or of another run.

    ``epochs`` are the latest record of each epoch, in order; ``analyses`` the files' contents by name. ``settings`` are
    as recorded; ``config`` has unused ones at their defaults, so that identical runs are equal, and is None if they
    cannot be read. ``name`` is the name given by a sweep or --name, or empty. ``result`` is empty for a run that is not
    finished; ``reason`` then says why.
    """

    def __init__(self, path: Path) -> None:
        self.path, files = path, RunDirectory(path)
        self.problems: list[str] = []
        self.settings = self._read(files.config, lambda text: unseal(yaml.load(text, Loader=_Loader), required=True))
        self.config = self._config()
        self.analyses = self._read_analyses(files.analyses)
        text = self._read(files.records, str) or ""
        records = self._read(files.records, lambda text: [unseal(json.loads(line)) for line in text.splitlines()]) or []
        begun = self._own("records.jsonl", next((record for record in reversed(records) if "config" in record), {}))
        result = self._own("result.json", self._read(files.result, _from_json))
        if "records" in result and result["records"] != sum_of(text):
            self.problems.append("records.jsonl is not what result.json was made from: lines were lost or changed")
        measured = _mapping(result.get("result"))
        self.result = measured if number(measured.get("test_accuracy")) is not None else {}
        epochs = {number(record.get("epoch")): record for record in records if begun and record.get("kind") == "epoch"}
        self.epochs = {epoch: epochs[epoch] for epoch in sorted(epoch for epoch in epochs if epoch is not None)}
        failure = self._read(files.failure, _from_json)
        self.name = str(result.get("name") or begun.get("name") or "")
        self.provenance = _mapping((result or begun or failure).get("provenance"))
        self.status, self.reason = self._status(failure, self._read(files.running, _from_json))
        if not self.settings and self.status != "analyses only":
            self.problems.append("no settings could be read")

    @property
    def seed(self) -> int | None:
        return None if self.config is None else self.config.seed

    def measured(self, name: str) -> Number:
        return number(self.result.get(name))

    def curve(self, name: str) -> dict[float, float]:
        """Returns a number of the records, by epoch."""
        values = {epoch: number(record.get(name)) for epoch, record in self.epochs.items()}
        return {epoch: value for epoch, value in values.items() if value is not None}

    def _config(self) -> TrainConfig | None:
        try:
            return split_settings(self.settings)[0].canonical if self.settings else None
        except (TypeError, ValueError) as error:
            self.problems.append(f"its settings are not valid in this version of sparsesam: {error}")
            return None

    def _own(self, name: str, content: dict[str, Any]) -> dict[str, Any]:
        """Returns the content of a file, nothing if it has the hash of another run."""
        if self.config is None or content.get("hash", self.config.content_hash) == self.config.content_hash:
            return content
        self.problems.append(f"{name} or config.yaml is of another run")
        return {}

    def _read_analyses(self, folder: Path) -> dict[str, dict[str, Any]]:
        found = {}
        for path in sorted(folder.glob("*.json")):
            content = self._read(path, _from_json)
            if not isinstance(content.get("result"), dict):
                self.problems += [f"analyses/{path.name} has no result"] if content else []
            elif self.config and content.get("run") not in (None, self.config.identity):
                self.problems.append(f"analyses/{path.name} is of another run, left out")
            else:
                found[path.stem] = content
        return found

    def _status(self, failure: dict[str, Any], holder: dict[str, Any]) -> tuple[Status, str]:
        if self.result:
            return "finished", ""
        if failure:
            return "failed", str(failure.get("error", "no reason was recorded"))
        if self.config is None:
            is_run = self.epochs or not (self.path / "analyses").is_dir()
            return ("unfinished", "its settings cannot be read") if is_run else ("analyses only", "")
        done = f"epoch {len(self.epochs)} of {self.config.epochs}"
        if holder:
            where = f"process {holder.get('pid')} on {holder.get('host')}"
            return "unfinished", f"{done}; {where} is running it, or was killed"
        return "unfinished", f"stopped after {done}; continue with: sparsesam train --resume --out {self.path}"

    def _read(self, path: Path, parse: Callable[[str], Any]) -> Any:
        """Returns {} if the file is missing, damaged or not a regular file: reading a pipe would hang."""
        if not path.is_file():
            return {}
        try:
            return parse(path.read_text(encoding="utf-8", errors="replace"))
        except (OSError, RecursionError, TypeError, ValueError, yaml.YAMLError) as error:
            self.problems.append(f"{path.name} cannot be read: {error}")
            return {}


def _from_json(text: str) -> dict[str, Any]:
    return unseal(json.loads(text))


def _mapping(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}
