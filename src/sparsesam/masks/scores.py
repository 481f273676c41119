"""How much each weight matters: a score is a function of the context that gives one number per weight."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, Protocol

import torch
from torch import Tensor, nn

from sparsesam.masks.fisher import FisherDiagonal, fisher_diagonal
from sparsesam.masks.packed import PackedMask
from sparsesam.masks.samples import draw_batches

_LARGEST_CHUNK = 128


@dataclass(frozen=True)
class ScoreContext:
    """What a score may look at: the model between the two passes of a step."""

    model: nn.Module
    parameters: Mapping[str, Tensor]
    generator: torch.Generator
    step: int
    directions: Mapping[str, Tensor] = field(default_factory=dict)
    previous: Mapping[str, PackedMask] | None = None
    batch: Any = None

    def gradient(self, name: str) -> Tensor:
        """The ascent gradient at w (the momentum, where that is the direction); zeros where there is none."""
        direction = self.directions.get(name)
        return torch.zeros_like(self.parameters[name]) if direction is None else direction


class Score(Protocol):
    """``needs_gradient`` says whether the ascent gradient must be there already."""

    @property
    def needs_gradient(self) -> bool: ...

    def __call__(self, context: ScoreContext) -> dict[str, Tensor]:
        """One number per weight, the larger the more it matters, under the parameters' names."""
        ...


@dataclass(eq=False)
class Fisher:
    """Diagonal Fisher information over ``samples`` samples drawn from ``data``:

        F = 1/N_F * sum_i (grad_w loss(w; x_i, y_i))²

    ``labels="data"`` is the empirical Fisher (eq. 5 of the paper), ``labels="sampled"`` draws
    y_i from the model's own distribution. Normalization statistics are frozen while it is measured.
    ``chunk`` samples are measured at a time; None: up to 128, or fewer where free memory is short.
    ``paths`` tells, after the first use, how each parameter's squares were computed.
    """

    data: Any
    loss_fn: Callable[..., Tensor] | None = None
    samples: int = 128
    model_loss: Callable[[nn.Module, Any], Tensor] | None = None
    labels: Literal["data", "sampled"] = "data"
    chunk: int | None = None
    paths: dict[str, str] = field(default_factory=dict, repr=False)
    needs_gradient: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if self.samples < 1:
            raise ValueError(f"samples must be at least 1, got {self.samples}; the paper uses 128")
        if self.chunk is not None and self.chunk < 1:
            raise ValueError(f"chunk must be at least 1, got {self.chunk}; None lets free memory decide")

    def __call__(self, context: ScoreContext) -> dict[str, Tensor]:
        batches = draw_batches(self.data, self.samples, generator=context.generator, chunk=self.chunk or _LARGEST_CHUNK)
        result = fisher_diagonal(
            context.model,
            batches,
            self.loss_fn,
            model_loss=self.model_loss,
            parameters=context.parameters,
            labels=self.labels,
            generator=context.generator,
            chunk=self.chunk,
        )
        return _remember(self.paths, result)


@dataclass(eq=False)
class BatchFisher:
    """Fisher information of the batch being trained on, given as ``opt.step(closure, batch=(x, y))``
    or ``opt.perturbed(batch=(x, y))``.
    """

    loss_fn: Callable[..., Tensor] | None = None
    model_loss: Callable[[nn.Module, Any], Tensor] | None = None
    labels: Literal["data", "sampled"] = "data"
    chunk: int | None = None
    paths: dict[str, str] = field(default_factory=dict, repr=False)
    needs_gradient: ClassVar[bool] = False

    def __call__(self, context: ScoreContext) -> dict[str, Tensor]:
        if context.batch is None:
            raise ValueError(
                "batch must be given where a mask takes its Fisher from the current batch, got None; "
                "call opt.step(closure, batch=(x, y)) or opt.perturbed(batch=(x, y))"
            )
        result = fisher_diagonal(
            context.model,
            [context.batch],
            self.loss_fn,
            model_loss=self.model_loss,
            parameters=context.parameters,
            labels=self.labels,
            generator=context.generator,
            chunk=self.chunk,
        )
        return _remember(self.paths, result)


@dataclass(frozen=True)
class GradientMagnitude:
    """|g| of the ascent gradient: small where the loss is flat."""

    needs_gradient: ClassVar[bool] = True

    def __call__(self, context: ScoreContext) -> dict[str, Tensor]:
        return {name: context.gradient(name).abs() for name in context.parameters}


@dataclass(frozen=True)
class Inverted:
    """The opposite order of another score, for ablations."""

    score: Score

    @property
    def needs_gradient(self) -> bool:
        return self.score.needs_gradient

    def __call__(self, context: ScoreContext) -> dict[str, Tensor]:
        return {name: -values for name, values in self.score(context).items()}


def _remember(paths: dict[str, str], result: FisherDiagonal) -> dict[str, Tensor]:
    paths.clear()
    paths.update(result.paths)
    return result.values
