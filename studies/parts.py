"""Methods that are not in the package, built from its public parts; `methods.yaml` refers to them.

Each function takes a `Training` before its first step and changes how its optimizer steps.
"""

from __future__ import annotations

from collections.abc import Callable

from torch.nn.functional import cross_entropy

import sparsesam
from sparsesam.lab.experiment.training import Training

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
    "last-stage": lambda training: use_mask(training, sparsesam.fixed_mask(*LAST_STAGE[training.config.model])),
    "classifier": lambda training: use_mask(training, sparsesam.fixed_mask(*CLASSIFIER[training.config.model])),
    "all-but-first": all_but_first,
    "budget": within_budget,
}
