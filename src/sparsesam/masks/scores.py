"""Scores: functions of a context that return one number per weight, which says how much the weight matters."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar, Literal, Protocol

import torch
from torch import Tensor, nn
from torch import distributed as dist

from sparsesam.distributed.shards import Shards, local_part
from sparsesam.masks.fisher import LossFn, ModelLoss, Problem, fisher_diagonal
from sparsesam.masks.packed import PackedMask
from sparsesam.masks.samples import draw_batches
from sparsesam.utils.batches import to_device
from sparsesam.utils.checks import check_count, check_like_parameters


@dataclass(frozen=True)
class ScoreContext:
    """The input of a score: the model between the two passes of a step.

    With ``shards``, ``directions`` and ``previous`` are this rank's parts, and so are scores and masks.
    """

    model: nn.Module
    parameters: Mapping[str, Tensor]
    generator: torch.Generator
    step: int
    directions: Mapping[str, Tensor] = field(default_factory=dict)
    previous: Mapping[str, PackedMask] | None = None
    batch: Any = None
    shards: Shards | None = None
    ranks: dist.ProcessGroup | None = None  # ranks that train on different batches, each with the whole model

    @cached_property
    def local(self) -> dict[str, Tensor]:
        """The parameters, or this rank's parts of them."""
        return {name: local_part(parameter) for name, parameter in self.parameters.items()}

    def scores(self, score: Score) -> dict[str, Tensor]:
        """Returns this rank's part of a score; raises ValueError unless it has a number for every weight."""
        found = {name: local_part(values) for name, values in score(self).items()}
        check_like_parameters("score", found, self.local)
        if missing := self.local.keys() - found.keys():
            raise ValueError(f"score must have every parameter to perturb, but lacks {sorted(missing)[0]!r}")
        return found

    def gradient(self, name: str) -> Tensor:
        """Returns the ascent gradient at w (or the momentum, if that is the direction); zeros if there is none."""
        direction = self.directions.get(name)
        return torch.zeros_like(self.local[name]) if direction is None else direction


class Score(Protocol):
    """A function that returns one number per weight; ``needs_gradient``: it uses the ascent gradient."""

    @property
    def needs_gradient(self) -> bool: ...

    def __call__(self, context: ScoreContext) -> dict[str, Tensor]:
        """Returns ``{parameter name: scores}``, one number per weight; larger means that the weight matters more."""
        ...


@dataclass(frozen=True, eq=False)
class Fisher:
    """Diagonal Fisher information over ``samples`` samples drawn from ``data``, with frozen normalization statistics.

        F = 1/N_F * sum_i (grad_w loss(w; x_i, y_i))²

    The arguments are those of `fisher_mask`. ``labels="data"`` is eq. 5 of the paper, the empirical Fisher information.
    Without ``data``, it is measured on the batch being trained on: ``opt.step(closure, batch=(x, y))``.
    """

    data: Any = None
    loss_fn: LossFn | None = None
    samples: int = 128
    model_loss: ModelLoss | None = None
    labels: Literal["data", "sampled"] = "data"
    needs_gradient: ClassVar[bool] = False

    def __post_init__(self) -> None:
        check_count("samples", self.samples, "the paper uses 128")
        Problem(self.loss_fn, self.model_loss, self.labels, torch.Generator())

    def __call__(self, context: ScoreContext) -> dict[str, Tensor]:
        """Returns the Fisher information over the samples of all ranks."""
        return fisher_diagonal(
            context.model,
            self._batches(context),
            self.loss_fn,
            model_loss=self.model_loss,
            parameters=context.parameters,
            labels=self.labels,
            generator=context.generator,
            # Also if all ranks measure the same samples: devices may round differently, and masks must be equal.
            ranks=context.ranks if context.shards is None else None,
        ).values

    def _batches(self, context: ScoreContext) -> Iterable[Any]:
        if self.data is not None:
            return draw_batches(self.data, self.samples, generator=context.generator)
        if context.batch is None:
            raise ValueError(
                "batch must be given for a mask that measures Fisher information on the current batch, got None; "
                "call opt.step(closure, batch=(x, y)) or opt.perturbed(batch=(x, y))"
            )
        return [context.batch] if context.shards is None else _gathered_batches(context.batch, context.shards)


@dataclass(frozen=True)
class GradientMagnitude:
    """|g| of the ascent gradient, which is small where the loss is flat."""

    needs_gradient: ClassVar[bool] = True

    def __call__(self, context: ScoreContext) -> dict[str, Tensor]:
        return {name: context.gradient(name).abs() for name in context.parameters}


@dataclass(frozen=True)
class WeightMagnitude:
    """|w|, the score of magnitude pruning."""

    needs_gradient: ClassVar[bool] = False

    def __call__(self, context: ScoreContext) -> dict[str, Tensor]:
        return {name: weight.detach().abs() for name, weight in context.local.items()}


def _gathered_batches(batch: Any, shards: Shards) -> list[Any]:
    """Returns the batches of all ranks, on the CPU; each rank later moves them to its own device."""
    batches = [batch]
    for dim in range(shards.mesh.ndim):
        group = shards.mesh.get_group(dim)
        found: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(found, to_device(batches, "cpu"), group=group)
        batches = [gathered for part in found for gathered in part]
    return batches
