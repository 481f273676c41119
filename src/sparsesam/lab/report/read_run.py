"""Reads runs from directories. A run of which a file is damaged is noted as a problem."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Literal

from sparsesam.lab.display import Number, number
from sparsesam.lab.experiment.config import TrainConfig
from sparsesam.lab.experiment.errors import RunError
from sparsesam.lab.experiment.run_directory import RESTORE, RunDirectory, read_json, read_records, sum_of

Status = Literal["finished", "failed", "unfinished", "unreadable", "analyses only"]
#: A directory with any of these is a run's: a run can end before it has all of them.
SIGNS = {"config.yaml", "records.jsonl", "result.json", "failure.json", "analyses"}


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
            # Below a run is no other; a directory with analyses only, as of `analyze convergence runs`, may hold runs.
            folders[:] = [] if SIGNS.intersection(files) else [name for name in folders if name != "analyses"]
        folders.sort()


class RunRecord:
    """The content of a run's files. A run with a damaged file, or one of another run, is unreadable and has no result.

    ``problems`` say why, and which analyses are left out. ``epochs`` are the latest record of each epoch, in order;
    ``analyses`` the files' contents by name. ``settings`` are as recorded; ``config`` has unused ones at their
    defaults, so that identical runs are equal, and is None if there are none. ``name`` is the name given by a sweep or
    --name, or empty. ``result`` is empty for a run that is not finished; ``reason`` then says why.
    """

    def __init__(self, path: Path) -> None:
        self.path, self.name = path, ""
        self.config: TrainConfig | None = None
        self.settings, self.result, self.provenance = dict[str, Any](), dict[str, Any](), dict[str, Any]()
        self.epochs, self.analyses = dict[float, dict[str, Any]](), dict[str, dict[str, Any]]()
        self.problems: list[str] = []
        self.status: Status = "unreadable"
        self.reason = "see the problems"
        try:
            self._read(RunDirectory(path))
        except (RunError, OSError, AttributeError, TypeError, ValueError) as error:
            self.problems.append(str(error))

    @property
    def seed(self) -> int | None:
        return None if self.config is None else self.config.seed

    def measured(self, name: str) -> Number:
        return number(self.result.get(name))

    def curve(self, name: str) -> dict[float, float]:
        """Returns a number of the records, by epoch."""
        values = {epoch: number(record.get(name)) for epoch, record in self.epochs.items()}
        return {epoch: value for epoch, value in values.items() if value is not None}

    def _read(self, files: RunDirectory) -> None:
        texts = (files.config, files.records, files.result, files.failure)
        for file in (*texts, *files.analyses.glob("*.json")):
            if file.exists() and not file.is_file():  # reading a pipe would wait
                raise RunError(f"{file} must be a file; remove it")
        if files.config.exists():
            self.settings, self.config = files.settings(), files.saved_config().canonical
        records = read_records(files.records) if files.records.exists() else []
        result, failure = read_json(files.result) or {}, read_json(files.failure) or {}
        text = files.records.read_text() if files.records.exists() else ""
        begun: dict[str, Any] = next((record for record in reversed(records) if "config" in record), {})
        if self.config is None and (records or result):
            raise RunError(f"{files.config} is missing; restore it")
        if result and not isinstance(result.get("result"), dict):
            raise RunError(f"{files.result} has no result; delete it and continue the run with --resume")
        for file, content in ((files.records, begun), (files.result, result)):
            if self.config and content.get("hash", self.config.content_hash) != self.config.content_hash:
                raise RunError(f"{file} or {files.config} is of another run; restore the right one")
        if "records" in result and result["records"] != sum_of(text):
            raise RunError(f"{files.records} is not what result.json was made from; {RESTORE}")
        self.name = str(result.get("name") or begun.get("name") or "")
        self.provenance = dict((result or begun or failure).get("provenance") or {})
        epochs = {number(record.get("epoch")): record for record in records if record.get("kind") == "epoch"}
        self.epochs = {epoch: epochs[epoch] for epoch in sorted(epoch for epoch in epochs if epoch is not None)}
        self._read_analyses(files.analyses)
        if result:
            self.result, self.status, self.reason = dict(result["result"]), "finished", ""
        elif failure:
            self.status, self.reason = "failed", str(failure.get("error", "no reason was recorded"))
        elif self.config is None:
            self.status, self.reason = "analyses only", ""
        else:
            done = f"epoch {len(self.epochs)} of {self.config.epochs}"
            continued = f"sparsesam train --resume --out {self.path}"
            self.status, self.reason = "unfinished", f"{done}; unless it is running, continue with: {continued}"

    def _read_analyses(self, folder: Path) -> None:
        for file in sorted(folder.glob("*.json")):
            try:
                content = read_json(file)
            except RunError as error:
                self.problems.append(str(error))
                continue
            if not isinstance(content.get("result"), dict):
                self.problems.append(f"analyses/{file.name} has no result")
            elif self.config and content.get("run") not in (None, self.config.identity):
                self.problems.append(f"analyses/{file.name} is of another run, left out")
            else:
                self.analyses[file.stem] = content
