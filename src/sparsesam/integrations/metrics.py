"""Metrics of the last step, for any logger: ``wandb.log(step_metrics(opt))``."""

from __future__ import annotations

import torch

from sparsesam.gradients import gradients_of
from sparsesam.sam import SharpnessAware


def step_metrics(optimizer: SharpnessAware) -> dict[str, float]:
    """Returns radius, sparsity, gradient norm of the last ascent, and counters; omits values not known yet.

    ``sam/rho`` is that of the first parameter group; further groups are ``sam/rho/1``, … With a
    GradScaler, ``sam/ascent_norm`` is the gradient norm of the scaled loss.
    """
    found: dict[str, float | None] = {
        "sam/sparsity": optimizer.sparsity,
        "sam/ascent_norm": optimizer.last_ascent_norm,
        "sam/skipped_ascents": optimizer.skipped_ascents,
        "sam/skipped_steps": optimizer.skipped_steps,
        "sam/skipped_refreshes": optimizer.skipped_refreshes,
    }
    for number, group in enumerate(optimizer.param_groups):
        found[f"sam/rho/{number}" if number else "sam/rho"] = group[optimizer.rho_key]
    return {name: float(value) for name, value in found.items() if value is not None}


@torch.no_grad()
def gradient_norm(optimizer: SharpnessAware) -> float:
    """Returns the norm of the current gradients: after ``perturbed()``, those at w + e."""
    dense = [gradient.to_dense() if gradient.is_sparse else gradient for gradient in gradients_of(optimizer.base)]
    if not dense:
        return 0.0
    norms = [torch.linalg.vector_norm(gradient, dtype=torch.float64).cpu() for gradient in dense]
    return float(torch.linalg.vector_norm(torch.stack(norms)))
