"""Trained weights of a run: evaluate them, or write them for other programs."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from sparsesam.lab import models
from sparsesam.lab.experiment.batches import Share, load_splits, make_batches
from sparsesam.lab.experiment.config import RunEnvironment, TrainConfig
from sparsesam.lab.experiment.errors import CheckpointError
from sparsesam.lab.experiment.initial_weights import read_weights
from sparsesam.lab.experiment.run import make_fabric
from sparsesam.lab.experiment.run_directory import RunDirectory
from sparsesam.lab.experiment.training import loss_and_accuracy

FORMATS = (".pt", ".pth", ".safetensors")


class Evaluation(NamedTuple):
    loss: float
    accuracy: float
    images: int
    file: Path


def evaluate(run: Path, weights: str, split: Literal["val", "test"], environment: RunEnvironment) -> Evaluation:
    """Loss and accuracy of ``weights`` ("best", "last" or a file) on images that the run was not trained on."""
    config = RunDirectory.existing(run).saved_config()
    if split == "val" and config.val_size is None:
        raise ValueError(f"{run} has no validation images (val_size); evaluate it on the test images")
    file = _file(run, weights)
    fabric = make_fabric(config, environment)
    splits = load_splits(config, environment)
    batches = make_batches(config, splits, Share(), fabric.device, environment.workers or 0)
    model = models.build(config.model, splits.num_classes, splits.in_channels, splits.image_size)
    content = read_weights(file)
    try:
        model.load_state_dict(content)
    except RuntimeError as error:
        raise CheckpointError(f"{file} does not fit {config.model}: {' '.join(str(error).split())}") from error
    totals = loss_and_accuracy(model.to(fabric.device), batches.evaluation(split), fabric)
    loss, correct, images = totals.tolist()
    return Evaluation(loss / images, correct / images, int(images), file)


def export(run: Path, weights: str, out: Path) -> int:
    """Write ``weights`` of a run to ``out``; the number of values written."""
    if out.suffix not in FORMATS:
        raise ValueError(f"--out must end in {', '.join(FORMATS)}, got {out}")
    config, tensors = RunDirectory.existing(run).saved_config(), read_weights(_file(run, weights))
    out.parent.mkdir(parents=True, exist_ok=True)
    if out.suffix == ".safetensors":
        _write_safetensors(tensors, config, out)
    else:
        torch.save(tensors, out)
    return sum(tensor.numel() for tensor in tensors.values())


def _file(run: Path, weights: str) -> Path:
    return run / f"{weights}.pt" if weights in ("best", "last") else Path(weights)


def _write_safetensors(tensors: dict[str, Tensor], config: TrainConfig, out: Path) -> None:
    try:
        from safetensors.torch import save_file
    except ImportError as error:
        raise ImportError("safetensors files need safetensors: pip install safetensors") from error
    # Tensors that share memory are refused by safetensors.
    separate = {name: tensor.detach().cpu().clone().contiguous() for name, tensor in tensors.items()}
    save_file(separate, out, metadata={"model": config.model, "dataset": config.dataset})
