"""The masks that a run recorded, over its training."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import fmean
from typing import Any

from sparsesam.analysis import masks_over_time
from sparsesam.lab.experiment.errors import RunError
from sparsesam.lab.experiment.mask_record import mask_files, read_masks
from sparsesam.lab.inspection.base import Analysis, Progress, share
from sparsesam.lab.inspection.run import Run


@dataclass(frozen=True)
class Masks(Analysis):
    help = "density per layer, overlap of one mask with the next, and which weights are ever perturbed"

    @property
    def name(self) -> str:
        return "masks"

    def measure(self, run: Run, progress: Progress) -> dict[str, Any]:
        if not mask_files(run.directory.masks):
            if not run.config.optimizer.startswith("ssam"):
                raise RunError(f"{run.path} has no masks: its optimizer is {run.config.optimizer}; ssam-f has")
            raise RunError(f"{run.path} recorded no masks; train it with --record-masks true")
        return masks_over_time(read_masks(run.path)).to_dict()

    def made(self, run: Run) -> dict[str, Any]:
        return {}

    def summary(self, result: dict[str, Any]) -> dict[str, str]:
        overlap = [value for value in result["overlap"] if value is not None]
        chance = [value for value in result["overlap_by_chance"] if value is not None]
        return {
            "masks": str(len(result["steps"])),
            "density, last": share(result["density"][-1]),
            "overlap with the one before, mean": share(fmean(overlap) if overlap else None),
            "by chance": share(fmean(chance) if chance else None),
            "overlap, last": share(overlap[-1] if overlap else None),
            "weights ever perturbed": share(result["ever"]),
            "weights always perturbed": share(result["always"]),
        }
