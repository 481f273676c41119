"""Methods that are not in the package, built from its public parts; `methods.yaml` refers to them.

Each function takes a `Training` before its first step and changes how its optimizer steps.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.nn.utils import get_total_norm

import sparsesam
from sparsesam.lab.experiment.training import Training
from sparsesam.masks.mask import MaskRule
from sparsesam.masks.scores import ScoreContext


def hardest_first(training: Training) -> None:
    """The ascent of K-SAM (Ni et al. 2022): sorts samples by loss, so that ``ascent_fraction`` takes the largest.

    A forward pass over the whole batch finds them, with frozen normalization statistics. The descent is on the whole
    batch.
    """
    step: Any = training.optimizer.step
    model = training.module

    def sorted_step(closure: Any, *, batch: tuple[Tensor, Tensor], **options: Any) -> Any:
        images, labels = batch
        model.eval()
        with torch.no_grad():
            order = cross_entropy(model(images), labels, reduction="none").argsort(descending=True)
        model.train()
        return step(closure, batch=(images[order], labels[order]), **options)

    training.optimizer.step = sorted_step  # type: ignore[assignment, method-assign]


def look_sam(training: Training, alpha: float = 0.7) -> None:
    """LookSAM (Liu et al. 2022): SAM every k-th step, and in between one pass at w, with

        g + alpha * ||g|| / ||v|| * v,    v = s - (s·g / ||g||²) g

    where v is the component of SAM's gradient s, in the last SAM step, orthogonal to the gradient g at w.
    """
    opt = training.optimizer
    assert isinstance(opt, sparsesam.SAM)
    sam_step: Any = opt.step
    here: list[Tensor] = []  # g, between the passes of a SAM step
    orthogonal: list[Tensor] = []

    def gradients() -> list[Tensor]:
        return [parameter.grad for group in opt.param_groups for parameter in group["params"]]

    def step(closure: Any, *, batch: Any, **options: Any) -> Any:
        climbs = opt.needs_first_pass

        def watched(part: Any) -> Any:
            loss = closure(part)
            if climbs and not here:
                here.extend(gradient.clone() for gradient in gradients())
            return loss

        return sam_step(watched, batch=batch, **options)

    @torch.no_grad()
    def change(*_: Any) -> None:
        there = gradients()
        if here:
            along = torch.stack([(s * g).sum() for s, g in zip(there, here, strict=True)]).sum()
            share = along / get_total_norm(here).square()
            orthogonal[:] = torch._foreach_sub(there, torch._foreach_mul(here, share))
            here.clear()
        else:
            ratio = alpha * get_total_norm(there) / get_total_norm(orthogonal)
            torch._foreach_add_(there, torch._foreach_mul(orthogonal, ratio))

    opt.step = step  # type: ignore[assignment, method-assign]
    opt.base.register_step_pre_hook(change)


@dataclass(frozen=True, eq=False)
class DrawnLayers(MaskRule):
    """Draws ``share`` of the layers in each step, without replacement, with weights ||g|| or equal weights.

    The largest of log ||g|| + Gumbel noise are such a sample. g is the gradient of the last step, so that the first
    pass can skip work; without a gradient, all layers are equally likely.
    """

    share: float
    by_norm: bool = True
    refresh: int | None = 1
    seed: int = 0

    def make(self, context: ScoreContext) -> dict[str, Tensor]:
        layers: dict[str, list[str]] = {}
        for name in context.parameters:
            layers.setdefault(name.rpartition(".")[0], []).append(name)
        noise = -torch.rand(len(layers), generator=context.generator, dtype=torch.float64).log().neg().log()
        keys = {}
        for (layer, names), extra in zip(layers.items(), noise.tolist(), strict=True):
            norm = float(get_total_norm([context.gradient(name) for name in names]))
            keys[layer] = (math.log(norm) if self.by_norm and norm > 0 else 0.0) + extra
        drawn = sorted(layers, key=lambda layer: -keys[layer])[: math.ceil(self.share * len(layers))]
        kept = {name for layer in drawn for name in layers[layer]}
        return {
            name: torch.full_like(parameter, name in kept, dtype=torch.bool)
            for name, parameter in context.parameters.items()
        }


def draw_layers(training: Training, *, by_norm: bool = True, descends: bool = False) -> None:
    """Like SL-SAM (2026): draws half of the layers in each step, by the norm of the last gradient.

    With ``descends``, the update skips the other layers as well.
    """
    opt = training.optimizer
    assert isinstance(opt, sparsesam.SSAM)
    mask = DrawnLayers(0.5, by_norm, seed=training.config.seed)
    drawn = sparsesam.SSAM(opt.base, training.module, training.config.rho, mask=mask, norm="masked")
    away: list[tuple[Tensor, Tensor | None]] = []

    def leave_out(*_: Any) -> None:
        empty = {name for name, kept in drawn.masks.items() if not kept.any()}
        for name, parameter in training.module.named_parameters():
            if name in empty:
                away.append((parameter, parameter.grad))
                parameter.grad = None

    def put_back(*_: Any) -> None:
        """Restore the gradients, which the next draw uses."""
        for parameter, gradient in away:
            parameter.grad = gradient
        away.clear()

    if descends:
        opt.base.register_step_pre_hook(leave_out)
        opt.base.register_step_post_hook(put_back)
    training.optimizer = drawn


def by_length(training: Training) -> None:
    """Extrapolation with k = ``steps_ahead`` / (mean length of the updates so far): a length instead of a number."""
    opt = training.optimizer
    assert isinstance(opt, sparsesam.ExtrapolatedSAM)
    assert training.config.steps_ahead is not None
    wanted, step = training.config.steps_ahead, cast(Any, opt.step)
    lengths: list[float] = []

    def step_and_measure(*args: Any, **options: Any) -> Any:
        result = step(*args, **options)
        lengths.append(opt.last_update_norm or 0.0)
        for group in opt.param_groups:
            group["rho"] = wanted * len(lengths) / (sum(lengths) or math.inf)
        return result

    opt.step = step_and_measure  # type: ignore[method-assign]


PARTS: dict[str, Callable[[Training], None]] = {
    "hardest-first": hardest_first,
    "look-sam": look_sam,
    "by-length": by_length,
    "draw-layers": lambda training: draw_layers(training, by_norm=False),
    "draw-layers-by-norm": draw_layers,
    "draw-layers-by-norm-descent": lambda training: draw_layers(training, descends=True),
}
