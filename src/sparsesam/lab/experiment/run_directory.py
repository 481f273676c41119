"""A run's directory: its settings, records, checkpoints and result. Only one process at a time uses it.

config.yaml   every setting            last.pt   everything needed to resume, with a copy of the records
records.jsonl one line per epoch       best.pt   the weights with the best validation (or test) accuracy
result.json   of a finished run only   masks/    each mask, written when it is computed
analyses/     results of `sparsesam analyze`        failure.json  of a failed run only

Every file is checked before it is used, and ``last.pt`` decides what the run has done (docs/reliability.md).
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import os
import traceback
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from filelock import FileLock, Timeout
from torch import Tensor

from sparsesam.lab.display import plural
from sparsesam.lab.experiment import checkpoint
from sparsesam.lab.experiment.config import DEFAULTS, RunEnvironment, TrainConfig, split_settings
from sparsesam.lab.experiment.errors import CheckpointError, RunError, one_line
from sparsesam.lab.experiment.provenance import provenance
from sparsesam.masks.packed import unpack_bits

#: Several times as fast as yaml.SafeLoader, which counts in a report of many runs.
_YAML: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
#: The remedy for records: ``last.pt`` has a copy.
RESTORE = "restore it, or continue the run with --resume (a finished one without its result.json): it is written again"


class RunDirectory:
    def __init__(self, path: Path) -> None:
        self.path = path
        self.config = path / "config.yaml"
        self.records = path / "records.jsonl"
        self.last = path / "last.pt"
        self.best = path / "best.pt"
        self.result = path / "result.json"
        self.failure = path / "failure.json"
        self.masks = path / "masks"
        self.analyses = path / "analyses"

    @classmethod
    def existing(cls, path: Path) -> RunDirectory:
        directory = cls(path)
        if not directory.config.exists():
            raise ValueError(f"{path} has no run: there is no config.yaml; pass a directory of `sparsesam train`")
        return directory

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Lock the directory against a second run. The lock ends with the process, even if it is killed."""
        self.path.mkdir(parents=True, exist_ok=True)
        try:
            with FileLock(self.path / "running.lock", timeout=0):
                yield
        except Timeout:
            raise RunError(f"{self.path} is in use by another process; choose another --out, or wait") from None

    # ---- settings ------------------------------------------------------------------------------------------

    def check(self, config: TrainConfig, *, resume: bool) -> None:
        """Raise ValueError or RunError if the run may not start in this directory; writes nothing."""
        try:
            place = next(path for path in (self.path, *self.path.absolute().parents) if path.exists())
        except OSError as error:  # a name that is too long
            raise ValueError(f"{self.path} cannot be a directory ({error.strerror}); choose another --out") from error
        if not (place.is_dir() and os.access(place, os.W_OK)):
            raise ValueError(f"{place} is not a directory that can be written to; choose another --out")
        if resume and self.config.exists():
            saved = self.saved_config()
            same = dataclasses.replace(config, epochs=saved.epochs).canonical == saved.canonical
            if not same or config.epochs < saved.epochs:
                pairs = ((name, getattr(saved, name), getattr(config, name)) for name in DEFAULTS)
                changed = "; ".join(f"{name}: {old}, now {new}" for name, old, new in pairs if old != new)
                raise ValueError(
                    f"{self.path} was started with other settings ({changed}); "
                    "omit them to continue it (only a larger --epochs is allowed), or choose another --out"
                )
            if self.result.exists() and config.epochs == saved.epochs:
                raise ValueError(
                    f"{self.path} has a finished run of {plural(saved.epochs, 'epoch')}; a larger --epochs extends it, "
                    "another --out starts a new one"
                )
            later = [path.name for path in (self.best, self.result) if path.exists()]
            if later and not self.last.exists():
                raise RunError(
                    f"{self.last} is missing, although {' and '.join(later)} came after it; restore it, or "
                    "choose another --out to train from the beginning"
                )
        elif self.result.exists():
            raise ValueError(f"{self.path} has a finished run; choose another --out for a new one")
        elif self.last.exists() or self.best.exists():
            raise ValueError(f"{self.path} has an unfinished run; continue it with --resume, or choose another --out")

    def begin(self, config: TrainConfig, environment: RunEnvironment) -> None:
        """Write the settings; a run that is extended by more epochs loses its result."""
        for left in (self.failure, *self.path.glob("*.part"), *self.masks.glob("*.part")):  # of a run that ended early
            left.unlink(missing_ok=True)
        self.result.unlink(missing_ok=True)
        settings = {**dataclasses.asdict(config), **dataclasses.asdict(environment)}
        settings["data_dir"] = environment.data_dir and str(environment.data_dir.absolute())
        kept = {name: value for name, value in settings.items() if name not in ("out", "resume")}
        write_atomically(self.config, yaml.safe_dump(seal(kept), sort_keys=False))

    def settings(self) -> dict[str, Any]:
        """Returns every setting, except where the run is and whether it is resumed."""
        try:
            return unseal(yaml.load(self.config.read_text(), Loader=_YAML), required=True)
        except Exception as error:  # damaged text can fail in any way
            raise RunError(f"{self.config} is damaged ({one_line(error)}); restore it, or start a new run") from error

    def saved_config(self) -> TrainConfig:
        """Returns the settings that determine the run's result."""
        try:
            return split_settings(self.settings())[0]
        except (TypeError, ValueError) as error:
            raise RunError(f"{self.config} has settings that this version cannot use: {error}") from error

    # ---- checkpoints and records ---------------------------------------------------------------------------

    def load(self, file: Path, device: torch.device | str = "cpu") -> dict[str, Any]:
        """Load ``last.pt``, ``best.pt`` or masks; raises CheckpointError if the file is damaged or of another run."""
        content = checkpoint.load(file, device)
        if content["run"] != self.saved_config().identity:
            raise CheckpointError(f"{file} or {self.config} is of another run; restore the right one")
        return content

    def rewind(self, step: int, records: str) -> None:
        """Undo what was written after the checkpoint of ``step``; a resumed run writes it again."""
        write_atomically(self.records, records)
        for made_in, mask in self.mask_files():
            if made_in >= step:
                mask.unlink()
            else:
                read_mask_file(mask)

    def write_failure(self, error: Exception) -> None:
        """Write the error that ended the run; call it in the exception handler."""
        content = {"error": f"{type(error).__name__}: {error}", "traceback": traceback.format_exc()}
        write_json(self.failure, {**content, "provenance": provenance()})

    def finish(self, result: Mapping[str, Any]) -> None:
        """Write the result, with a sum of the records that it was made from."""
        write_json(self.result, {**result, "records": sum_of(self.records.read_text())})

    # ---- masks ---------------------------------------------------------------------------------------------

    def write_masks(self, step: int, masks: Mapping[str, Tensor], run: str) -> None:
        """Write the masks that the run with the identity ``run`` made in ``step``, counted from 0, with one bit per
        weight (numpy's packbits).
        """
        self.masks.mkdir(parents=True, exist_ok=True)
        bits = {name: torch.from_numpy(np.packbits(mask.flatten().cpu().numpy())) for name, mask in masks.items()}
        shapes = {name: list(mask.shape) for name, mask in masks.items()}
        checkpoint.save(self.masks / f"{step:08d}.pt", run, {"step": step, "shapes": shapes, "bits": bits})

    def mask_files(self) -> list[tuple[int, Path]]:
        """Returns the recorded masks as (step, file), ordered by step."""
        return sorted((int(file.stem), file) for file in self.masks.glob("*.pt") if file.stem.isdigit())


# ---- text files with a sum -------------------------------------------------------------------------------------------


def sum_of(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]


def seal(content: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the content with a sum of it, by which `unseal` detects damage."""
    return {**content, "sum": sum_of(content)}


def unseal(content: Any, *, required: bool = False) -> dict[str, Any]:
    """Returns the content without its sum; ValueError if they do not agree. Files made by hand have no sum."""
    if not isinstance(content, dict):
        raise ValueError("it must contain names and values")
    rest = {name: value for name, value in content.items() if name != "sum"}
    if ("sum" in content or required) and content.get("sum") != sum_of(rest):
        raise ValueError("its sum does not match its content")
    return rest


def append_records(path: Path, records: Iterable[Mapping[str, Any]]) -> str:
    """Append each record as one line of JSON and return the lines; creates the parent directories of ``path``."""
    lines = [json.dumps(seal(record), sort_keys=True, allow_nan=False) + "\n" for record in records]
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.writelines(lines)
    return "".join(lines)


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Replace a JSON file atomically, with a sum that `read_json` checks."""
    write_atomically(path, json.dumps(seal(content), indent=1, allow_nan=False) + "\n")


def read_json(path: Path) -> Any:
    """Read a JSON file and check its sum; None if it does not exist."""
    try:
        return unseal(json.loads(path.read_text()))
    except FileNotFoundError:
        return None
    except (ValueError, RecursionError) as error:
        raise RunError(f"{path} is damaged ({one_line(error)}); delete it and run the same command again") from error


def read_records(path: Path) -> list[dict[str, Any]]:
    """Read every record of ``path``, in the order written."""
    records = []
    try:
        for line in filter(None, path.read_text().splitlines()):
            records.append(unseal(json.loads(line)))
    except (ValueError, RecursionError) as error:
        raise RunError(f"{path} is damaged in line {len(records) + 1} ({one_line(error)}); {RESTORE}") from error
    return records


def read_masks(run: Path | str) -> Iterator[tuple[int, dict[str, Tensor]]]:
    """Yield the masks of a run's directory, (step, {parameter name: bool tensor}), one at a time."""
    directory = RunDirectory(Path(run))
    files = directory.mask_files()
    if directory.result.exists():
        made = sum(len(record.get("mask_seconds", ())) for record in read_records(directory.records))
        if made != len(files):
            raise RunError(f"{directory.masks} has {len(files)} of {plural(made, 'mask')}; restore the others")
    for step, file in files:
        yield step, read_mask_file(file)


def read_mask_file(file: Path) -> dict[str, Tensor]:
    """Read a file of masks; RunError if it is damaged, or of another step or run."""
    content = RunDirectory(file.parent.parent).load(file)
    if (found := content.get("step")) != int(file.stem):
        raise RunError(f"{file} has the masks of step {found}; restore the right one, or remove it")
    shapes = content["shapes"].items()
    return {name: unpack_bits(content["bits"][name])[: math.prod(shape)].view(shape) for name, shape in shapes}


def write_atomically(path: Path, text: str) -> None:
    """Replace a file atomically, in a new folder if need be; characters that UTF-8 cannot encode become "?"."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")
    part.write_text(text, encoding="utf-8", errors="replace")
    part.replace(path)
