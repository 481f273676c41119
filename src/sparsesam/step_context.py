"""What the steps of one optimizer have in common: model, masks, counters, the engine, the way to w + e and back."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from sparsesam.ascent.engine import Engine
from sparsesam.ascent.explicit import Perturbation
from sparsesam.ascent.extrapolation import Extrapolation, TrackedWeights
from sparsesam.ascent.momentum import momentum_of, require_momentum
from sparsesam.ascent.old_gradient import OldGradient, Treatment
from sparsesam.ascent.plan import ONE_PASS
from sparsesam.ascent.rng import RNGState
from sparsesam.ascent.statistics import renormalized_in_forward
from sparsesam.distributed import Shards, local_part
from sparsesam.masks.packed import PackedMask
from sparsesam.masks.scores import ScoreContext
from sparsesam.masks.state import MaskState
from sparsesam.parameters import PerturbedParam
from sparsesam.settings import Settings


@dataclass
class Counters:
    """Saved in checkpoints, and shown as attributes of the optimizer.

    What only a device knows is counted there; `read` waits for it.
    """

    steps: int = 0
    skipped_ascents: int = 0
    skipped_steps: int = 0

    def __post_init__(self) -> None:
        self._skipped_on_device: dict[torch.device, Tensor] = {}

    def skip_where(self, event: Tensor) -> None:
        """Count an ascent as skipped if the tensor is true, without a synchronization."""
        count = self._skipped_on_device.setdefault(event.device, torch.zeros_like(event, dtype=torch.int64))
        count.add_(event)

    def read(self) -> Counters:
        """These counters, with what devices have counted."""
        self.skipped_ascents += sum(int(count) for count in self._skipped_on_device.values())
        self._skipped_on_device = {}
        return self


class ParamFacts(NamedTuple):
    """What is found out once about a list of parameters; the list is the same object as long as nothing changes."""

    params: Sequence[PerturbedParam]
    shards: Shards | None  # how they are spread over ranks; None: every rank has them whole
    renormalized: list[Tensor]  # weights that a forward writes to
    smallest: Tensor | None


@dataclass
class StepContext:
    """Lives as long as its optimizer; a copy or a loaded checkpoint makes a new one."""

    model: nn.Module
    base: Optimizer
    settings: Settings
    masks: MaskState
    counters: Counters
    engine: Engine
    perturbation: Perturbation
    extrapolation: Extrapolation
    rng: RNGState
    #: Whether there is a last e to use again; where it is sharded, this rank's part may be empty.
    has_last: bool = False
    #: ||g|| of the last ascent.
    last_ascent_norm: float | Tensor | None = None
    #: The closure adds to the gradients of earlier micro-batches, and runs them again in the second pass.
    closure_accumulates: bool = False
    #: That of perturbed(), until it is used or cleared.
    second_gradient: OldGradient | None = None
    is_joining: bool = False  # within torch's Join, where ranks answer no collectives but those of DDP
    #: What the last step extrapolated, and the parameters, masks and numbers of steps that this was made from.
    tracked: tuple[tuple[Any, Any, list[Any]], list[TrackedWeights]] = ((None, None, []), [])
    _warned: set[str] = field(default_factory=set)
    _facts: ParamFacts | None = None
    _used_gradient: tuple[Tensor, int] | None = None  # of the smallest parameter, and its version

    def masks_of(self, params: Sequence[PerturbedParam]) -> dict[str, PackedMask | None]:
        """Their current masks; None: all of the parameter is perturbed."""
        masks = self.masks.masks or {}
        return {one.name: masks.get(one.name) for one in params}

    def refresh_due(self, params: Sequence[PerturbedParam]) -> bool:
        return self.masks.rule is not None and self.masks.due(self.counters.steps, {one.name for one in params})

    def refresh(self, params: Sequence[PerturbedParam], batch: Any) -> None:
        """Recompute the masks."""
        ddp = None if self.is_joining else self.engine.ddp
        before = self.masks_of(params)
        self.masks.refresh(
            ScoreContext(
                self.model,
                {one.name: one.parameter for one in params},
                self.masks.generator,
                self.counters.steps,
                directions=self.directions(params),
                previous=self.masks.masks,
                batch=batch,
                shards=self.shards(params),
                ranks=None if ddp is None else ddp.process_group,
            ),
            is_joining=self.is_joining,
        )
        self.perturbation.forget()
        self.has_last = False
        after = self.masks_of(params)
        for one in params:
            self.extrapolation.change_mask(one.name, local_part(one.parameter), before[one.name], after[one.name])

    def shards(self, params: Sequence[PerturbedParam]) -> Shards | None:
        return self.facts(params).shards

    def facts(self, params: Sequence[PerturbedParam]) -> ParamFacts:
        if self._facts is None or self._facts.params is not params:
            shards = Shards.of({one.name: one.parameter for one in params})
            smallest = min((one.parameter for one in params), key=Tensor.numel, default=None)
            self._facts = ParamFacts(params, shards, renormalized_in_forward(self.model.modules()), smallest)
        return self._facts

    def directions(self, params: Sequence[PerturbedParam]) -> dict[str, Tensor]:
        """What the ascent follows, for each parameter that has it: its gradient, or its momentum."""
        found = {}
        for one in params:
            by_momentum = self.settings.ascent in ONE_PASS
            direction = momentum_of(self.base, one.parameter) if by_momentum else one.parameter.grad
            if direction is not None:
                direction = local_part(direction, one.parameter)
                found[one.name] = direction.to_dense() if direction.is_sparse else direction
        if self.settings.follows_momentum and not found:
            require_momentum(self.base, [one.parameter for one in params])
        return found

    def awaits_momentum(self, params: Sequence[PerturbedParam]) -> bool:
        """Whether a mask that is made from the ascent's direction must wait for the base optimizer's first step."""
        if self.settings.ascent not in ONE_PASS or not self.masks.needs_gradient or self.directions(params):
            return False
        require_momentum(self.base, [one.parameter for one in params])
        return True

    def note_used_gradients(self, params: Sequence[PerturbedParam]) -> None:
        """A step has used the gradients that are there now."""
        smallest = self.facts(params).smallest
        gradient = None if smallest is None else smallest.grad
        self._used_gradient = None if gradient is None else (gradient, gradient._version)

    def gradients_are_used(self, params: Sequence[PerturbedParam]) -> bool:
        """Whether gradients are there that the last step has used and nobody has cleared since."""
        smallest, used = self.facts(params).smallest, self._used_gradient
        if smallest is None or used is None or smallest.grad is not used[0]:
            return False
        return used[0]._version == used[1]

    def forget_gradients(self) -> None:
        """They are cleared."""
        self._used_gradient = None
        self.forget_second_gradient()

    def forget_second_gradient(self) -> None:
        if self.second_gradient is not None:
            self.second_gradient.release()
            self.second_gradient = None

    def require_second_gradient_used(self) -> None:
        """The gradient of the last perturbed() was used by a step, or cleared."""
        before = self.second_gradient
        self.forget_second_gradient()
        if before is not None and before.treatment() is Treatment.ADDED_TO:
            raise RuntimeError(
                "this first pass added to the gradient of the last perturbed(), which no step() has used: with micro-"
                "batches, run all of them in the first pass and all again in one perturbed() block, then step(); with "
                "accelerator.accumulate, use sparsesam.integrations.accelerate.AccumulatedPasses. To leave a step out, "
                "call opt.zero_grad()"
            )

    def warn_once(self, text: str) -> None:
        kind = text.split(":")[0]
        if kind not in self._warned:
            self._warned.add(kind)
            warnings.warn(text, RuntimeWarning, stacklevel=4)
