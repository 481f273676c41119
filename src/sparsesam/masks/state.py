"""The current masks of one optimizer: made when due, saved with its checkpoints."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import nn

from sparsesam.masks.broadcast import broadcast_masks
from sparsesam.masks.errors import NonFiniteScoreError
from sparsesam.masks.mask import MaskRule
from sparsesam.masks.packed import PackedMask
from sparsesam.masks.scores import ScoreContext


class MaskState:
    """Holds what a mask rule itself does not: its masks, its random generator and when they were last made.

    Without a rule every weight is perturbed, and there is nothing to make.
    """

    def __init__(self, rule: MaskRule | None) -> None:
        self.rule = rule
        self.masks: dict[str, PackedMask] | None = None
        self.generator = torch.Generator().manual_seed(0 if rule is None else rule.seed)
        self.asked = False
        self.last_step = -1
        self.skipped = 0

    @property
    def sparsity(self) -> float | None:
        if self.rule is None:
            return 0.0
        if self.masks is None:
            return None
        total = sum(mask.numel for mask in self.masks.values())
        return 1 - sum(mask.count for mask in self.masks.values()) / total if total else 1.0

    @property
    def needs_gradient(self) -> bool:
        """Whether masks are made from the ascent's gradient."""
        return self.rule is not None and self.rule.needs_gradient

    def due(self, step: int, names: set[str]) -> bool:
        if self.rule is None:
            return False
        if self.masks is None or self.masks.keys() != names:
            return True
        if self.last_step == step:  # a step that a GradScaler skipped comes twice
            return False
        return self.asked or self.rule.refresh.due(step, self.last_step)

    @torch.no_grad()
    def refresh(self, context: ScoreContext) -> None:
        if self.rule is None:
            raise RuntimeError("refresh_mask() needs a mask; SAM perturbs every weight")
        try:
            made = self.rule.make(context)
        except NonFiniteScoreError as error:
            if self.masks is None:
                raise
            self.skipped += 1
            self.last_step = context.step
            warnings.warn(
                f"the mask is kept as it was, and opt.skipped_refreshes counts it: {error}",
                RuntimeWarning,
                stacklevel=2,
            )
            return
        self.masks = broadcast_masks({name: PackedMask.pack(mask) for name, mask in made.items()})
        self.last_step = context.step
        self.asked = False

    def state_dict(self) -> dict[str, Any] | None:
        if self.rule is None:
            return None
        masks = None
        if self.masks is not None:
            masks = {name: mask.state_dict() for name, mask in self.masks.items()}
        return {
            "masks": masks,
            "generator": self.generator.get_state(),
            "asked": self.asked,
            "last_step": self.last_step,
            "skipped": self.skipped,
        }

    def check_state_dict(self, state: dict[str, Any] | None, model: nn.Module) -> None:
        if (state is None) != (self.rule is None):
            saved, mine = ("SAM", "SSAM") if state is None else ("SSAM", "SAM")
            raise ValueError(f"state_dict is of {saved}, but this optimizer is {mine}; load it into the same kind")
        if state is not None:
            _fitting(state["masks"], dict(model.named_parameters()))

    def load_state_dict(self, state: dict[str, Any] | None, model: nn.Module) -> None:
        if state is None:
            return
        self.masks = _fitting(state["masks"], dict(model.named_parameters()))
        self.generator.set_state(state["generator"].cpu())
        self.asked, self.last_step, self.skipped = state["asked"], state["last_step"], state["skipped"]


def _fitting(saved: dict[str, Any] | None, parameters: dict[str, nn.Parameter]) -> dict[str, PackedMask] | None:
    if saved is None:
        return None
    masks = {}
    for name, state in saved.items():
        mask = PackedMask.from_state_dict(state)
        if name not in parameters or parameters[name].shape != mask.shape:
            raise ValueError(
                f"state_dict has a mask of shape {tuple(mask.shape)} for {name!r}, which the model does not have; "
                "load it into the model it was saved with"
            )
        masks[name] = mask.to(parameters[name].device)
    return masks
