"""The compute cost of a run, in units of one forward-backward pass over one batch, whatever the machine.

Multiply-adds of matrix products and convolutions are counted, so steps that leave work out cost less. Steps of one kind
cost the same, except esam's; one of each kind is counted.
"""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from sparsesam.budget import MultiplyAdds
from sparsesam.lab.experiment.config import TrainConfig
from sparsesam.recommended import ASCENT_FRACTION


def passes_per_step(config: TrainConfig, *, epochs: float | None = None) -> float:
    """Returns forward-backward passes per average step by the settings, without masks: 1 for SGD, 2 for SAM."""
    if config.optimizer == "auto":
        least = 1 + ASCENT_FRACTION
        return least if config.budget is None or config.budget >= least else 1.0
    if config.is_plain or config.ascent in ("momentum", "extrapolation"):
        return 1.0
    ascending = max(0.0, 1 - config.ascent_start / (epochs or config.epochs))
    return 1 + config.ascent_steps * config.ascent_fraction * ascending / config.ascent_every


@dataclass
class StepCost:
    """Cost of the steps so far, by kind: with a first pass at w ("ascent") or without one ("plain").

    ``images`` counts the training images of each kind of step, ``per_image`` is its cost per image and ``per_mask``
    the cost of one mask, both in units of ``unit``, the operations of a forward-backward pass for one image.
    """

    unit: float
    batch_size: int
    images: dict[str, int] = field(default_factory=lambda: {"ascent": 0, "plain": 0})
    per_image: dict[str, float] = field(default_factory=dict)
    masks: int = 0
    per_mask: float = 0.0

    def add_step(self, kind: str, images: int, operations: float | None) -> None:
        """Add a step over ``images`` images; ``operations`` per image, if counted, enter the mean of its kind."""
        if operations is not None:
            before = self.images[kind] if kind in self.per_image else 0
            sum_before = before * self.per_image.get(kind, 0.0)
            self.per_image[kind] = (sum_before + images * operations) / (before + images)
        self.images[kind] += images

    @property
    def forward_backwards(self) -> float:
        """Forward-backward passes over a batch, masks included."""
        steps: float = sum(images * self.per_image.get(kind, 1.0) for kind, images in self.images.items())
        return (steps + self.masks * self.per_mask) / self.batch_size


def plain_pass_operations(model: nn.Module, images: Tensor, labels: Tensor) -> float:
    """Returns the multiply-adds of one forward-backward pass of ``model`` per image; the model is not changed.

    If the model does not accept such images, its own error is raised here, before a run has written anything.
    """
    trial = deepcopy(model).train()
    devices = [] if images.device.type == "cpu" else [images.device]
    with torch.random.fork_rng(devices=devices, device_type=images.device.type), MultiplyAdds() as counter:
        scores = trial(images)
        cross_entropy(scores.float(), labels).backward()
    return float(counter.products / len(images))
