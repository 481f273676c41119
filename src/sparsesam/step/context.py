"""What all steps of one optimizer share: model, masks, counters, engine, perturbation."""

from __future__ import annotations

import warnings
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from sparsesam.ascent.engine import Engine
from sparsesam.ascent.kinds import ONE_PASS
from sparsesam.ascent.perturbation.explicit import Perturbation
from sparsesam.ascent.perturbation.extrapolation import Extrapolation
from sparsesam.ascent.perturbation.momentum import momentum_of, require_momentum
from sparsesam.ascent.perturbation.pieces import Target
from sparsesam.distributed.shards import local_part
from sparsesam.masks.packed import PackedMask
from sparsesam.masks.scores import ScoreContext
from sparsesam.step.checkpoint import SavedState
from sparsesam.step.gradients import GradientUse
from sparsesam.step.parameters import PerturbedParams
from sparsesam.step.settings import Settings
from sparsesam.utils.restore import statistics_versions
from sparsesam.utils.rng import RNGState


class StepContext:
    """Lives as long as its optimizer; a copy or a loaded checkpoint makes a new one.

    ``wrapped`` is the model as given to the optimizer, possibly wrapped in DistributedDataParallel.
    """

    def __init__(
        self, model: nn.Module, base: Optimizer, settings: Settings, saved: SavedState, wrapped: nn.Module
    ) -> None:
        self.model, self.base, self.settings = model, base, settings
        self.masks, self.counters, self.has_last = saved.masks, saved.counters, saved.has_last
        self.engine = Engine(model, wrapped, off=settings.why_no_engine)
        self.perturbation = Perturbation(remember=settings.off_steps == "reuse")
        self.perturbation.last = saved.last or {}
        self.extrapolation = Extrapolation(saved.back) if settings.ascent == "extrapolation" else None
        self.rng = RNGState(model.parameters())
        self.gradients = GradientUse(base)
        self.last_ascent_norm: float | Tensor | None = None
        self.is_joining = False  # within torch's Join, where ranks without inputs only run the collectives of DDP
        #: The targets that the last step extrapolated, preceded by the parameters and masks they were made from.
        self.tracked: tuple[PerturbedParams | None, Any, list[Target]] = (None, None, [])
        self._statistics: list[int] | None = None
        self.note_statistics()
        self._warned: set[str] = set()

    @property
    def saved(self) -> SavedState:
        """The state from which a new context continues."""
        last = self.perturbation.last if self.settings.off_steps == "reuse" else None
        back = None if self.extrapolation is None else self.extrapolation.back
        is_masked = self.settings.ascent != "implicit-dense"
        return SavedState(self.masks, self.counters, last, back, self.has_last, is_masked)

    # ---- masks and directions ----------------------------------------------------------------------------

    def masks_of(self, params: PerturbedParams) -> dict[str, PackedMask | None]:
        """Returns the current mask of each parameter; None: the whole parameter is perturbed."""
        masks = self.masks.masks or {}
        return {one.name: masks.get(one.name) for one in params}

    def refresh_due(self, params: PerturbedParams) -> bool:
        return self.masks.rule is not None and self.masks.due(self.counters.steps, {one.name for one in params})

    def refresh(self, params: PerturbedParams, batch: Any) -> None:
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
                shards=params.shards,
                ranks=None if ddp is None else ddp.process_group,
            ),
        )
        self.perturbation.index.clear()
        self.has_last, self.perturbation.last = False, {}  # it belongs to the old masks
        if self.extrapolation is not None:
            after = self.masks_of(params)
            for one in params:
                self.extrapolation.change_mask(one.name, local_part(one.parameter), before[one.name], after[one.name])

    def directions(self, params: PerturbedParams) -> dict[str, Tensor]:
        """Returns the ascent direction of each parameter that has one: its gradient or its momentum."""
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

    def awaits_momentum(self, params: PerturbedParams) -> bool:
        """Whether a mask computed from the momentum must wait for the base optimizer's first step."""
        if self.settings.ascent not in ONE_PASS or not self.masks.needs_gradient or self.directions(params):
            return False
        require_momentum(self.base, [one.parameter for one in params])
        return True

    # ---- what happened between steps ---------------------------------------------------------------------

    def note_statistics(self, *, known: bool = True) -> None:
        """Record the versions of the running statistics after a step; ``known=False``: they are not known."""
        self._statistics = statistics_versions(self.model) if known else None

    def statistics_moved(self) -> bool:
        """Whether a forward has updated the running statistics since the last step; False if not known."""
        return self._statistics not in (None, statistics_versions(self.model))

    def skip_step(self, why: str) -> None:
        """Count a step that does not update the weights."""
        self.counters.skipped_steps += 1
        self.counters.steps += 1
        self.warn_once(why)

    def warn_once(self, text: str) -> None:
        kind = text.split(":")[0]
        if kind not in self._warned:
            self._warned.add(kind)
            warnings.warn(text, RuntimeWarning, stacklevel=4)
