"""A run's directory: its settings, records, checkpoints and result. Only one process at a time uses it.

config.yaml   every setting            last.pt   everything needed to resume
records.jsonl one line per epoch       best.pt   the weights with the best validation (or test) accuracy
result.json   of a finished run only   masks/    each mask, written when it is computed
analyses/     results of `sparsesam analyze`        failure.json  of a failed run only
"""

from __future__ import annotations

import dataclasses
import json
import os
import socket
import traceback
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from filelock import FileLock, Timeout
from torch import Tensor

from sparsesam.lab.display import plural
from sparsesam.lab.experiment.config import TrainConfig, differences, from_mapping
from sparsesam.lab.experiment.errors import RunError
from sparsesam.lab.experiment.provenance import provenance


class RunDirectory:
    def __init__(self, path: Path) -> None:
        self.path = path
        self.config = path / "config.yaml"
        self.records = path / "records.jsonl"
        self.last = path / "last.pt"
        self.best = path / "best.pt"
        self.result = path / "result.json"
        self.failure = path / "failure.json"
        self.running = path / "running.json"
        self.masks = path / "masks"
        self.analyses = path / "analyses"

    @classmethod
    def existing(cls, path: Path) -> RunDirectory:
        """Returns the directory of an existing run."""
        directory = cls(path)
        if not directory.config.exists():
            raise ValueError(f"{path} has no run: there is no config.yaml; pass a directory of `sparsesam train`")
        return directory

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Lock the directory against a second run. The lock ends with the process, even if it is killed."""
        self.path.mkdir(parents=True, exist_ok=True)
        lock = FileLock(self.path / "running.lock")
        try:
            lock.acquire(timeout=0)
        except Timeout:
            process = "another process"
            with suppress(OSError, ValueError, KeyError, TypeError):
                found = read_json(self.running)
                process = f"process {found['pid']} on {found['host']}"
            raise RunError(f"{self.path} is in use by {process}; choose another --out, or wait") from None
        try:
            self.running.write_text(json.dumps({"pid": os.getpid(), "host": socket.gethostname()}))
            yield
        finally:
            self.running.unlink(missing_ok=True)
            lock.release()

    def check(self, config: TrainConfig, *, resume: bool) -> None:
        """Raise ValueError if the run may not start here; writes nothing."""
        existing = next(path for path in (self.path, *self.path.absolute().parents) if path.exists())
        if not existing.is_dir():
            raise ValueError(f"{self.path} cannot be created: {existing} is not a directory; choose another --out")
        if resume and self.config.exists():
            saved = self.saved_config()
            same = dataclasses.replace(config, epochs=saved.epochs).canonical == saved.canonical
            if not same or config.epochs < saved.epochs:
                raise ValueError(
                    f"{self.path} was started with other settings ({differences(saved, config)}); "
                    "omit them to continue it (only a larger --epochs is allowed), or choose another --out"
                )
            if self.result.exists() and config.epochs == saved.epochs:
                raise ValueError(
                    f"{self.path} has a finished run of {plural(saved.epochs, 'epoch')}; a larger --epochs extends it, "
                    "another --out starts a new one"
                )
        elif self.result.exists():
            raise ValueError(f"{self.path} has a finished run; choose another --out for a new one")
        elif self.last.exists():
            raise ValueError(f"{self.path} has an unfinished run; continue it with --resume, or choose another --out")

    def begin(self, config: TrainConfig, *, resume: bool) -> int | None:
        """Write the settings; returns the previous number of epochs if this run extends an earlier one."""
        self.check(config, resume=resume)
        self.failure.unlink(missing_ok=True)
        before = None
        if resume and self.config.exists():
            before = self.saved_config().epochs
            if before == config.epochs:
                return None
            self.result.unlink(missing_ok=True)
        else:
            self.rewind(-1)
        settings = json.loads(json.dumps(dataclasses.asdict(config)))  # tuples as lists
        write_atomically(self.config, yaml.safe_dump(settings, sort_keys=False))
        return before

    def rewind(self, step: int) -> None:
        """Remove records and masks after ``step``, the step of the last checkpoint; a resumed run writes them again."""
        kept = []
        for line in self.records.read_text().splitlines() if self.records.exists() else []:
            with suppress(json.JSONDecodeError):  # a killed run may leave an incomplete last line
                if json.loads(line).get("step", 0) <= step:
                    kept.append(line + "\n")
        write_atomically(self.records, "".join(kept))
        later = [file for made_in, file in self.mask_files() if made_in >= step]
        for file in (*later, *self.masks.glob("*.part")):
            file.unlink()

    def write_failure(self, error: Exception) -> None:
        """Write the error that ended the run; call it in the exception handler."""
        self.path.mkdir(parents=True, exist_ok=True)
        content = {"error": f"{type(error).__name__}: {error}", "traceback": traceback.format_exc()}
        write_atomically(self.failure, json.dumps({**content, "provenance": provenance()}, indent=1))

    def saved_config(self) -> TrainConfig:
        try:
            return from_mapping(TrainConfig, yaml.safe_load(self.config.read_text()))
        except (OSError, yaml.YAMLError, TypeError, ValueError) as error:
            raise RunError(f"{self.config} must contain the settings of a run: {error}") from error

    def append(self, record: Mapping[str, Any]) -> None:
        append_records(self.records, [record])

    def write_masks(self, step: int, masks: Mapping[str, Tensor]) -> None:
        """Write the masks made in ``step``, counted from 0, atomically and with one bit per weight."""
        self.masks.mkdir(parents=True, exist_ok=True)
        content = {f"bits.{name}": np.packbits(mask.reshape(-1).cpu().numpy()) for name, mask in masks.items()}
        shapes = json.dumps({name: list(mask.shape) for name, mask in masks.items()})
        part = self.masks / f"{step:08d}.part"
        with part.open("wb") as stream:
            np.savez(stream, shapes=np.array(shapes), **content)  # type: ignore[arg-type]
        part.replace(part.with_suffix(".npz"))

    def mask_files(self) -> list[tuple[int, Path]]:
        """Returns the recorded masks as (step, file), ordered by step."""
        return sorted((int(file.stem), file) for file in self.masks.glob("*.npz") if file.stem.isdigit())

    def finish(self, result: Mapping[str, Any]) -> None:
        write_atomically(self.result, json.dumps(result, indent=1, sort_keys=True, allow_nan=False) + "\n")


def append_records(path: Path, records: Iterable[Mapping[str, Any]]) -> None:
    """Append each record as one line of JSON; creates the parent directories of ``path``."""
    lines = [json.dumps(dict(record), sort_keys=True, allow_nan=False) for record in records]
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.writelines(line + "\n" for line in lines)


def read_json(path: Path) -> Any:
    """Read a JSON file; None if it does not exist."""
    try:
        return json.loads(path.read_text())
    except FileNotFoundError:
        return None


def read_records(path: Path) -> list[dict[str, Any]]:
    """Read every record of ``path``, in the order written."""
    return [json.loads(line) for line in path.read_text().splitlines() if line]


def read_masks(run: Path | str) -> Iterator[tuple[int, dict[str, Tensor]]]:
    """Yield the masks of a run's directory, (step, {parameter name: bool tensor}), one at a time."""
    for step, file in RunDirectory(Path(run)).mask_files():
        yield step, read_mask_file(file)


def read_mask_file(file: Path) -> dict[str, Tensor]:
    try:
        with np.load(file, allow_pickle=False) as saved:
            shapes = {name: torch.Size(shape) for name, shape in json.loads(str(saved["shapes"])).items()}
            bits = {name: np.unpackbits(saved[f"bits.{name}"], count=one.numel()) for name, one in shapes.items()}
        return {name: torch.from_numpy(one.astype(np.bool_)).reshape(shapes[name]) for name, one in bits.items()}
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
        raise RunError(f"{file} must contain the masks of a run, but cannot be read ({error}); remove it") from error


def write_atomically(path: Path, text: str) -> None:
    """Replace a file atomically; characters not encodable as UTF-8, as in a directory name, become "?"."""
    part = path.with_name(path.name + ".part")
    part.write_text(text, encoding="utf-8", errors="replace")
    part.replace(path)
