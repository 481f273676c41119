"""Methods that are not in the package, built from its public parts; `methods.yaml` refers to them.

Each function takes a `Training` before its first step and changes how its optimizer steps.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.nn.utils import get_total_norm

import sparsesam
from sparsesam.lab.experiment.training import Training


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


#: Parameters of the last stage and of the classifier alone, and of the first layer with its normalization.
LAST_STAGE = {"small-cnn": ("7.*", "8.*", "12.*"), "resnet10-small": ("layer4.*", "fc.*")}
CLASSIFIER = {"small-cnn": ("12.*",), "resnet10-small": ("fc.*",)}
FIRST_LAYER = {"small-cnn": ("0.", "1."), "resnet10-small": ("conv1.", "bn1.")}


def use_mask(training: Training, mask: sparsesam.MaskRule) -> None:
    """Replaces the optimizer by SSAM with ``mask``, whose perturbation has length rho."""
    opt = training.optimizer
    assert isinstance(opt, sparsesam.SSAM)
    training.optimizer = sparsesam.SSAM(opt.base, training.module, training.config.rho, mask=mask, norm="masked")


def all_but_first(training: Training) -> None:
    first = FIRST_LAYER[training.config.model]
    names = [name for name, _ in training.module.named_parameters() if not name.startswith(first)]
    use_mask(training, sparsesam.fixed_mask(*names))


def within_budget(training: Training, budget: float = 1.2) -> None:
    """Perturbs the tensors of the most Fisher information that fit; costs are counted, so that runs are repeatable."""
    images = next(training.batches.train(0)).images
    mask = sparsesam.budget_mask(
        training.module,
        images,
        budget,
        data=training.batches.unaugmented(),
        loss_fn=cross_entropy,
        refresh=5 * training.batches.steps,
        seed=training.config.seed,
    )
    use_mask(training, mask)


PARTS: dict[str, Callable[[Training], None]] = {
    "look-sam": look_sam,
    "last-stage": lambda training: use_mask(training, sparsesam.fixed_mask(*LAST_STAGE[training.config.model])),
    "classifier": lambda training: use_mask(training, sparsesam.fixed_mask(*CLASSIFIER[training.config.model])),
    "all-but-first": all_but_first,
    "budget": within_budget,
}
