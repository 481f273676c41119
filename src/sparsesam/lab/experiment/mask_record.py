"""The masks of a run, each written when it is made: ``masks/STEP.npz``, one bit per weight."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from sparsesam.lab.experiment.config import TrainConfig
from sparsesam.lab.experiment.errors import RunError

#: By default masks are recorded if those of the whole run take no more than this.
SMALL_BYTES = 16 * 2**20


def masks_are_small(config: TrainConfig, weights: int, steps_per_epoch: int) -> bool:
    """Whether all masks of a run of ``weights`` weights are small enough to be written by default."""
    masks = config.total_steps(steps_per_epoch) // config.steps_between_masks(steps_per_epoch) + 1
    return masks * weights / 8 <= SMALL_BYTES


def write_masks(directory: Path, step: int, masks: Mapping[str, Tensor]) -> None:
    """Write the masks made in ``step``, counted from 0; the file is written atomically."""
    directory.mkdir(parents=True, exist_ok=True)
    content = {f"bits.{name}": np.packbits(mask.reshape(-1).cpu().numpy()) for name, mask in masks.items()}
    shapes = json.dumps({name: list(mask.shape) for name, mask in masks.items()})
    file = directory / f"{step:08d}.npz"
    part = file.with_suffix(".part")
    with part.open("wb") as stream:
        np.savez(stream, shapes=np.array(shapes), **content)  # type: ignore[arg-type]
    part.replace(file)


def remove_masks_from(directory: Path, step: int) -> None:
    """Remove the masks of ``step`` and later ones, and incomplete files: a resumed run makes them again."""
    for file in directory.glob("*.part"):
        file.unlink()
    for number, file in mask_files(directory):
        if number >= step:
            file.unlink()


def mask_files(directory: Path) -> list[tuple[int, Path]]:
    """The recorded masks as (step, file), in the order of their steps."""
    return sorted((int(file.stem), file) for file in directory.glob("*.npz") if file.stem.isdigit())


def read_masks(run: Path | str) -> Iterator[tuple[int, dict[str, Tensor]]]:
    """The masks of the run in a directory, (step, {parameter name: bool tensor}), read one at a time."""
    for step, file in mask_files(Path(run) / "masks"):
        yield step, read_mask_file(file)


def read_mask_file(file: Path) -> dict[str, Tensor]:
    try:
        with np.load(file, allow_pickle=False) as saved:
            shapes = {name: torch.Size(shape) for name, shape in json.loads(str(saved["shapes"])).items()}
            bits = {name: np.unpackbits(saved[f"bits.{name}"], count=one.numel()) for name, one in shapes.items()}
        return {name: torch.from_numpy(one.astype(np.bool_)).reshape(shapes[name]) for name, one in bits.items()}
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
        raise RunError(f"{file} must contain the masks of a run, but cannot be read ({error}); remove it") from error
