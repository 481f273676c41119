"""Short constructors for the common masks."""

from __future__ import annotations

from typing import Any, Literal

from sparsesam.masks.fisher_problem import LossFn, ModelLoss
from sparsesam.masks.mask import DynamicMask, Mask
from sparsesam.masks.patterns import Pattern, as_pattern
from sparsesam.masks.scores import Fisher, GradientMagnitude, Score, WeightMagnitude
from sparsesam.utils.checks import check_choice

#: The score by which weights are dropped or grown; None: at random.
_DROPS: dict[str, Score | None] = {
    "flattest": GradientMagnitude(),
    "sharpest": GradientMagnitude(),
    "weight": WeightMagnitude(),
    "random": None,
}
_GROWTHS: dict[str, Score | None] = {"random": None, "gradient": GradientMagnitude(), "weight": WeightMagnitude()}


def fisher_mask(
    data: Any = None,
    loss_fn: LossFn | None = None,
    *,
    sparsity: float | None = None,
    samples: int = 128,
    pattern: Pattern | str = "unstructured",
    refresh: int | None = None,
    labels: Literal["data", "sampled"] = "data",
    model_loss: ModelLoss | None = None,
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
        refresh: the optimizer steps between two masks, usually ``every_epochs(1, steps_per_epoch=len(loader))``.
            Default: the first mask is kept until ``opt.refresh_mask()``.
        labels: ``"data"``, the empirical Fisher information; ``"sampled"``, labels drawn from the model's output.
        model_loss: ``model_loss(model, batch)`` in place of ``loss_fn``, for models that compute their own loss.
        seed: the seed for drawing samples.

    Examples:
        >>> mask = sparsesam.fisher_mask(train_set, loss_fn, sparsity=0.5, refresh=100)
        >>> opt = sparsesam.SSAM(base, model, rho=0.1, mask=mask)
    """
    score = Fisher(data, loss_fn, samples=samples, model_loss=model_loss, labels=labels)
    return Mask(score, as_pattern(pattern), sparsity, refresh, seed)


def dynamic_mask(
    *,
    sparsity: float | None = None,
    drop_ratio: float = 0.5,
    total_steps: int | None = None,
    drop: Literal["flattest", "random", "sharpest", "weight"] | Score = "flattest",
    growth: Literal["random", "gradient", "weight"] | Score = "random",
    pattern: Pattern | str = "unstructured",
    refresh: int | None,
    seed: int = 0,
) -> DynamicMask:
    """SSAM-D: starts with a random mask; each refresh drops the flattest of the perturbed weights and grows as many.

    Args:
        sparsity: the share of weights that is not perturbed, in [0, 1]; not given for n:m patterns, which imply it.
        drop_ratio: the share of the perturbed weights that the first refresh drops.
        total_steps: the steps of the training, over which the share falls to 0 along a cosine. Default: it is constant.
        drop: which weights are dropped: ``"flattest"``, those with the smallest gradient, or the smallest of another
            `Score`; ``"random"``, ``"sharpest"`` and ``"weight"``, those with the smallest abs(w), are ablations.
        growth: which weights are grown: ``"random"``, or those with the largest ``"gradient"``, abs(w) (``"weight"``)
            or other `Score`.
        pattern: a `Pattern` or its name, see `as_pattern`.
        refresh: the optimizer steps between two masks; None: only when ``opt.refresh_mask()`` is called.
        seed: the seed of the random draws.

    Examples:
        >>> mask = sparsesam.dynamic_mask(sparsity=0.5, refresh=100)
        >>> opt = sparsesam.SSAM(base, model, rho=0.1, mask=mask)
    """
    return DynamicMask(
        _chosen_score("drop", drop, _DROPS),
        as_pattern(pattern),
        sparsity,
        refresh,
        seed,
        keep="smallest" if drop == "sharpest" else "largest",
        growth=_chosen_score("growth", growth, _GROWTHS),
        drop_ratio=drop_ratio,
        total_steps=total_steps,
    )


def random_mask(
    *,
    sparsity: float | None = None,
    pattern: Pattern | str = "unstructured",
    refresh: int | None = None,
    seed: int = 0,
) -> Mask:
    """Perturbs weights that are drawn at random, the baseline of ablations.

    Args:
        sparsity: the share of weights that is not perturbed, in [0, 1]; not given for n:m patterns, which imply it.
        pattern: a `Pattern` or its name, see `as_pattern`.
        refresh: the optimizer steps between two draws. Default: the first mask is kept.
        seed: the seed of the draw.

    Examples:
        >>> opt = sparsesam.SSAM(base, model, rho=0.1, mask=sparsesam.random_mask(pattern="2:4"))
    """
    return Mask(None, as_pattern(pattern), sparsity, refresh, seed)


def _chosen_score(argument: str, value: str | Score, known: dict[str, Score | None]) -> Score | None:
    if callable(value):
        return value
    check_choice(argument, value, known)
    return known[value]
