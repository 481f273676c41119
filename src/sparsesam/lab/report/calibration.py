"""Times that can be compared: a sweep measures its variants together, in ``calibration.json`` beside its runs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sparsesam.lab.display.numbers import Number, number
from sparsesam.lab.experiment.calibration import FILE
from sparsesam.lab.report.files import read_object


@dataclass(frozen=True)
class Calibration:
    """Seconds per epoch, masks included, and labels, by the hash of a variant's settings with seed 0."""

    path: Path
    seconds_per_epoch: Mapping[str, float]
    labels: Mapping[str, str]
    machine: str

    def seconds(self, hashes: Iterable[str]) -> Number:
        return next((self.seconds_per_epoch[one] for one in hashes if one in self.seconds_per_epoch), None)


def read_calibrations(runs: Iterable[Path], problems: list[tuple[str, str]]) -> list[Calibration]:
    """Those beside the runs; entries in another format are noted as problems and left out."""
    folders = dict.fromkeys(path.resolve().parent for path in runs)
    found = []
    for folder in folders:
        messages: list[str] = []
        content = read_object(folder / FILE, messages)
        if content and not isinstance(content.get("variants"), dict):
            messages.append(f"{FILE} has no variants")
        elif content:
            found.append(_calibration(folder / FILE, content))
        problems += [(str(folder), message) for message in messages]
    return found


def _calibration(path: Path, content: Mapping[str, Any]) -> Calibration:
    variants = {key: one for key, one in content["variants"].items() if isinstance(one, dict)}
    seconds = {key: number(one.get("seconds_per_epoch")) for key, one in variants.items()}
    provenance = content.get("provenance")
    return Calibration(
        path=path,
        seconds_per_epoch={key: value for key, value in seconds.items() if value},
        labels={key: str(one["label"]) for key, one in variants.items() if one.get("label")},
        machine=str(provenance.get("cpu") or "") if isinstance(provenance, dict) else "",
    )
