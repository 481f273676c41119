"""Short constructors for the common masks."""

from __future__ import annotations

from typing import Any, Literal

from sparsesam.masks.fisher_problem import LossFn, ModelLoss
from sparsesam.masks.mask import DynamicMask, Mask, RandomMask, Refresh, manual
from sparsesam.masks.patterns import Pattern, as_pattern
from sparsesam.masks.scores import BatchFisher, Fisher, GradientMagnitude, Inverted, Score
from sparsesam.utils.checks import check_choice

_DROPS: dict[str, Score | None] = {
    "flattest": GradientMagnitude(),
    "sharpest": Inverted(GradientMagnitude()),
    "random": None,
}
_GROWTHS: dict[str, Score | None] = {"random": None, "gradient": GradientMagnitude()}


def fisher_mask(
    data: Any = None,
    loss_fn: LossFn | None = None,
    *,
    sparsity: float | None = None,
    samples: int = 128,
    pattern: Pattern | str = "unstructured",
    refresh: Refresh | None = None,
    labels: Literal["data", "sampled"] = "data",
    model_loss: ModelLoss | None = None,
    chunk: int | None = None,
    seed: int = 0,
) -> Mask:
    """SSAM-F: perturbs the weights with the most Fisher information.

    Args:
        data: a dataset, a loader, a tuple of tensors or any iterable of batches. Without it, Fisher information is
            measured on the batch given to ``opt.step(closure, batch=…)``.
        loss_fn: the training loss, ``loss_fn(output, target)``.
        sparsity: the share of weights that is not perturbed, in [0, 1]; not given for n:m patterns, which imply it.
        samples: the number of samples drawn from ``data`` for each mask.
        pattern: a `Pattern` or its name, see `as_pattern`.
        refresh: when a new mask is made, usually ``every_epochs(1, steps_per_epoch=len(loader))``. Default: never.
        labels: ``"data"``, the empirical Fisher information; ``"sampled"``, labels drawn from the model's output.
        model_loss: ``model_loss(model, batch)`` in place of ``loss_fn``, for models that compute their own loss.
        chunk: how many samples are measured at a time. Default: up to 128, fewer where free memory is short.
        seed: the seed for drawing samples.

    Examples:
        >>> mask = sparsesam.fisher_mask(train_set, loss_fn, sparsity=0.5, refresh=sparsesam.every_steps(100))
        >>> opt = sparsesam.SSAM(base, model, rho=0.1, mask=mask)
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
    """SSAM-D: starts with a random mask; each refresh drops the flattest of the perturbed weights and grows as many.

    Args:
        sparsity: the share of weights that is not perturbed, in [0, 1]; not given for n:m patterns, which imply it.
        drop_ratio: the share of the perturbed weights that the first refresh drops.
        total_steps: the steps of the training, over which the share falls to 0 along a cosine. Default: it is constant.
        drop: which weights are dropped: ``"flattest"``, those with the smallest gradient; ``"random"`` and
            ``"sharpest"`` are ablations.
        growth: which weights are grown: ``"random"``, or those with the largest ``"gradient"``.
        pattern: a `Pattern` or its name, see `as_pattern`.
        refresh: when the mask changes, such as ``every_steps(100)``.
        seed: the seed of the random draws.

    Examples:
        >>> mask = sparsesam.dynamic_mask(sparsity=0.5, refresh=sparsesam.every_steps(100))
        >>> opt = sparsesam.SSAM(base, model, rho=0.1, mask=mask)
    """
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
    """Perturbs weights that are drawn at random, the baseline of ablations.

    Args:
        sparsity: the share of weights that is not perturbed, in [0, 1]; not given for n:m patterns, which imply it.
        pattern: a `Pattern` or its name, see `as_pattern`.
        refresh: when a new mask is drawn. Default: never.
        seed: the seed of the draw.

    Examples:
        >>> opt = sparsesam.SSAM(base, model, rho=0.1, mask=sparsesam.random_mask(pattern="2:4"))
    """
    return RandomMask(as_pattern(pattern), sparsity, refresh or manual(), seed)
