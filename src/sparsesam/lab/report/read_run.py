"""The records of one run: what cannot be read is noted as a problem, and the rest is used."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from sparsesam.lab.display.numbers import Number, number
from sparsesam.lab.experiment.config import TrainConfig, from_mapping
from sparsesam.lab.experiment.run_directory import RunDirectory
from sparsesam.lab.report.files import read_lines, read_mapping

Status = Literal["finished", "failed", "unfinished", "analyses only"]
_DEFAULTS = {one.name: one.default for one in dataclasses.fields(TrainConfig)}


@dataclass(frozen=True, eq=False)
class RunRecord:
    """``epochs`` are its records of that kind, the latest of each epoch; ``analyses`` the files' contents by name.

    ``config`` is None if the settings are those of another version of sparsesam. ``settings`` have defaults where the
    result does not depend on them. ``variant_name`` is the name that a sweep or --name gave, else empty;
    ``variant_hash`` is that of the settings with seed 0. ``reason`` says why a run is not finished, ``problems`` what
    could not be read.
    """

    path: Path
    status: Status
    reason: str
    settings: dict[str, Any]
    config: TrainConfig | None
    variant_name: str
    variant_hash: str
    epochs: list[dict[str, Any]]
    result: dict[str, Any]
    provenance: dict[str, Any]
    analyses: dict[str, dict[str, Any]]
    problems: list[str]

    def measured(self, name: str) -> Number:
        """A number of the result."""
        return number(self.result.get(name))


def read_run(path: Path) -> RunRecord:
    files, problems = RunDirectory(path), list[str]()
    records = read_lines(files.records, problems)
    analyses = _read_analyses(path / "analyses", problems)
    written = read_mapping(files.result, problems)
    failure = read_mapping(path / "failure.json", problems)
    begun = _last(records, "run") | _last(records, "resume")
    settings = read_mapping(files.config, problems) or _mapping(begun, "config") or _mapping(written, "config")
    result = _mapping(written, "result") or _last(records, "result")
    epochs = _epochs(records, problems)
    status, reason = _status(path, settings, epochs, result, failure)
    if not settings and status != "analyses only":
        problems.append("no settings could be read")
    config = _config(settings) if settings else None
    return RunRecord(
        path=path,
        status=status,
        reason=reason,
        settings=_canonical(config) if config else {**_DEFAULTS, **settings} if settings else {},
        config=config,
        variant_name=str(written.get("name") or begun.get("name") or ""),
        variant_hash=_variant_hash(config, written.get("hash") or begun.get("hash")),
        epochs=epochs,
        result=result if status == "finished" else {},
        provenance=_mapping(written, "provenance") or _mapping(begun, "provenance") or _mapping(failure, "provenance"),
        analyses=analyses,
        problems=problems,
    )


def _config(settings: dict[str, Any]) -> TrainConfig | None:
    try:
        return from_mapping(TrainConfig, settings)
    except (TypeError, ValueError):
        return None


def _canonical(config: TrainConfig) -> dict[str, Any]:
    """Settings without influence on the result at their defaults, so that identical runs are equal."""
    return dataclasses.asdict(config.canonical)


def _variant_hash(config: TrainConfig | None, written: Any) -> str:
    """The hash with seed 0: as the run wrote it, or by today's settings; empty for those of another version."""
    if config is None:
        return ""
    return str(written) if written and config.seed == 0 else dataclasses.replace(config, seed=0).content_hash


def _status(
    path: Path, settings: dict[str, Any], epochs: list[Any], result: dict[str, Any], failure: dict[str, Any]
) -> tuple[Status, str]:
    if number(result.get("test_accuracy")) is not None:
        return "finished", ""
    if failure:
        return "failed", str(failure.get("error", "no reason was recorded"))
    if not settings and not epochs and (path / "analyses").is_dir():
        return "analyses only", ""
    if not settings:
        return "unfinished", "its settings cannot be read"
    done = f"epoch {len(epochs)} of {settings.get('epochs', '?')}"
    holder = read_mapping(path / "running.json", [])
    if holder:
        return "unfinished", f"{done}; process {holder.get('pid')} on {holder.get('host')} is running it, or was killed"
    return "unfinished", f"stopped after {done}; sparsesam train --resume --out {path} continues it"


def _epochs(records: list[dict[str, Any]], problems: list[str]) -> list[dict[str, Any]]:
    """The latest record of each epoch, in order."""
    found: dict[float, dict[str, Any]] = {}
    for record in records:
        if record.get("kind") == "epoch":
            epoch = number(record.get("epoch"))
            if epoch is None:
                problems.append("records.jsonl: a record of an epoch without its number, left out")
            else:
                found[epoch] = record
    return [found[epoch] for epoch in sorted(found)]


def _read_analyses(folder: Path, problems: list[str]) -> dict[str, dict[str, Any]]:
    found = {}
    for path in sorted(folder.glob("*.json")) if folder.is_dir() else []:
        content = read_mapping(path, problems)
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
