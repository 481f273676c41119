"""Short constructors for the common masks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

from torch import Tensor, nn

from sparsesam.masks.checks import check_choice
from sparsesam.masks.mask import DynamicMask, Mask, RandomMask
from sparsesam.masks.patterns import Pattern, as_pattern
from sparsesam.masks.refresh import Refresh, manual
from sparsesam.masks.scores import BatchFisher, Fisher, GradientMagnitude, Inverted, Score

_DROPS: dict[str, Score | None] = {
    "flattest": GradientMagnitude(),
    "sharpest": Inverted(GradientMagnitude()),
    "random": None,
}
_GROWTHS: dict[str, Score | None] = {"random": None, "gradient": GradientMagnitude()}


def fisher_mask(
    data: Any = None,
    loss_fn: Callable[..., Tensor] | None = None,
    *,
    sparsity: float | None = None,
    samples: int = 128,
    pattern: Pattern | str = "unstructured",
    refresh: Refresh | None = None,
    labels: Literal["data", "sampled"] = "data",
    model_loss: Callable[[nn.Module, Any], Tensor] | None = None,
    chunk: int | None = None,
    seed: int = 0,
) -> Mask:
    """SSAM-F: perturb the weights with the most Fisher information.

    ``data`` is a dataset, a loader, a tuple of tensors or any iterable of batches, of which ``samples``
    samples are drawn; without it, the Fisher is that of the batch given to ``opt.step(closure, batch=…)``.
    ``loss_fn(output, target)`` is the training loss; models that compute their own loss give
    ``model_loss(model, batch)`` instead. ``refresh`` is usually ``every_epochs(1, steps_per_epoch=len(loader))``.
    ``chunk`` samples are measured at a time; None: up to 128, or fewer where free memory is short.
    """
    if (loss_fn is None) == (model_loss is None):
        raise ValueError("give either loss_fn(output, target) or model_loss(model, batch), and not both")
    score: Score
    if data is None:
        score = BatchFisher(loss_fn, model_loss=model_loss, labels=labels, chunk=chunk)
    else:
        score = Fisher(data, loss_fn, samples=samples, model_loss=model_loss, labels=labels, chunk=chunk)
    return Mask(score, as_pattern(pattern), sparsity, refresh or manual(), seed)


def dynamic_mask(
    *,
    sparsity: float | None = None,
    drop_ratio: float = 0.5,
    total_steps: int | None = None,
    drop: Literal["flattest", "random", "sharpest"] = "flattest",
    growth: Literal["random", "gradient"] = "random",
    pattern: Pattern | str = "unstructured",
    refresh: Refresh,
    seed: int = 0,
) -> DynamicMask:
    """SSAM-D: at each refresh drop the flattest of the perturbed weights and grow as many at random."""
    check_choice("drop", drop, _DROPS)
    check_choice("growth", growth, _GROWTHS)
    return DynamicMask(
        drop=_DROPS[drop],
        growth=_GROWTHS[growth],
        pattern=as_pattern(pattern),
        sparsity=sparsity,
        drop_ratio=drop_ratio,
        total_steps=total_steps,
        refresh=refresh,
        seed=seed,
    )


def random_mask(
    *,
    sparsity: float | None = None,
    pattern: Pattern | str = "unstructured",
    refresh: Refresh | None = None,
    seed: int = 0,
) -> RandomMask:
    """A mask at random, the ablations' baseline."""
    return RandomMask(as_pattern(pattern), sparsity, refresh or manual(), seed)
