"""Metrics of the last step, for any logger: ``wandb.log(step_metrics(opt))``."""

from __future__ import annotations

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
