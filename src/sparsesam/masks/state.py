"""The current masks of one optimizer, refreshed when due and saved in its checkpoints."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch import distributed as dist

from sparsesam.distributed.agreement import is_distributed, on_every_rank, require_same
from sparsesam.distributed.shards import Shards, as_shard_of, local_part
from sparsesam.masks.mask import MaskRule
from sparsesam.masks.packed import PackedMask
from sparsesam.masks.scores import ScoreContext
from sparsesam.masks.select import Tensors
from sparsesam.utils.checks import NonFiniteScoreError, check_like_parameters

_around_refresh: ContextVar[Callable[[], AbstractContextManager[Any]]] = ContextVar("refresh", default=nullcontext)


@contextmanager
def around_refresh(enter: Callable[[], AbstractContextManager[Any]]) -> Iterator[None]:
    """Within the block, each computation of masks runs inside of ``enter()``, which may measure it."""
    token = _around_refresh.set(enter)
    try:
        yield
    finally:
        _around_refresh.reset(token)


class MaskState:
    """The masks of a rule, its random generator and the step of the last refresh; without a rule, no masks."""

    def __init__(self, rule: MaskRule | None) -> None:
        self.rule = rule
        self.masks: dict[str, PackedMask] | None = None
        self.generator = torch.Generator().manual_seed(0 if rule is None else rule.seed)
        self.is_requested = False
        self.last_step = -1
        self.skipped = 0
        self.kept: dict[str, int] = {}  # numbers of weights, on all ranks
        self._total = 0

    @property
    def sparsity(self) -> float | None:
        if self.rule is None:
            return 0.0
        if self.masks is None:
            return None
        return 1 - sum(self.kept.values()) / self._total if self._total else 1.0

    @property
    def is_empty(self) -> bool:
        """Whether the masks keep no weight."""
        return self.masks is not None and not any(self.kept.values())

    @property
    def needs_gradient(self) -> bool:
        """Whether masks are computed from the ascent gradient."""
        return self.rule is not None and self.rule.needs_gradient

    def due(self, step: int, names: set[str]) -> bool:
        if self.rule is None:
            return False
        if self.masks is None or self.masks.keys() != names:
            return True
        if self.last_step == step:  # a step that a GradScaler skipped is repeated
            return False
        every = self.rule.refresh
        return self.is_requested or (every is not None and step // every > self.last_step // every)

    @torch.no_grad()
    def refresh(self, context: ScoreContext) -> None:
        """Make new masks; all ranks compare them."""
        assert self.rule is not None, "without a rule there are no masks"
        try:
            masks = self._made(self.rule, context)
        except NonFiniteScoreError as error:
            if self.masks is None:
                raise
            self.skipped += 1
            self.last_step = context.step
            message = f"the previous mask is kept (counted in opt.skipped_refreshes): {error}"
            warnings.warn(message, RuntimeWarning, stacklevel=2)
            return
        self._hold(masks, context.local, context.shards)
        self.last_step = context.step
        self.is_requested = False

    def _made(self, rule: MaskRule, context: ScoreContext) -> dict[str, PackedMask]:
        """Returns the masks, which must be equal on all ranks: all use the same generator and the same scores."""

        def make() -> dict[str, PackedMask]:
            with _around_refresh.get()():
                return {name: PackedMask.pack(mask) for name, mask in rule.make(context).items()}

        if context.shards is not None:
            if not rule.knows_shards:
                raise ValueError(
                    f"mask must not be {type(rule).__name__} with sharded parameters (fully_shard, DTensor): it needs "
                    "to see whole tensors; use fisher_mask, dynamic_mask, random_mask or fixed_mask"
                )
            random_state = self.generator.get_state()
            context.shards.require_same([random_state, context.step], "the step or the random state of the masks")
            return make()
        if not is_distributed() or dist.get_world_size(context.ranks) == 1:
            return make()
        masks = on_every_rank(make, NonFiniteScoreError, context.ranks)
        require_same(_content(masks), "the masks", context.ranks)
        return masks

    def _hold(self, masks: Mapping[str, PackedMask], parameters: Mapping[str, Tensor], shards: Shards | None) -> None:
        self.masks = {name: mask.placed(parameters[name].device) for name, mask in masks.items()}
        shards = shards or Shards.whole(parameters)
        counts = shards.sum_of(*(mask.count if shards.parts[name].counts else 0 for name, mask in masks.items()))
        self.kept, self._total = dict(zip(masks, counts, strict=True)), shards.total

    def state_dict(self, parameters: Mapping[str, Tensor]) -> tuple[dict[str, Any] | None, dict[str, Tensor]]:
        """Returns plain values, and a mask for each parameter, which is zero before the first refresh."""
        if self.rule is None:
            return None, {}
        # Masks of other parameters, such as before a group was added, are replaced in the next ascent.
        is_outdated = self.masks is not None and self.masks.keys() != parameters.keys()
        values = {
            "is_made": self.masks is not None,
            # Not a tensor: torch.distributed.checkpoint would treat it as a shard of the model's size and device.
            "generator": self.generator.get_state().cpu().numpy().tobytes().hex(),
            "asked": self.is_requested or is_outdated,
            "last_step": -1 if is_outdated else self.last_step,
            "skipped": self.skipped,
        }
        masks = self.masks or {}
        return values, {
            name: as_shard_of(p, masks[name].unpack(p.device))
            if name in masks
            else torch.zeros_like(p, dtype=torch.bool)
            for name, p in parameters.items()
        }

    def load_state_dict(
        self, values: Mapping[str, Any] | None, masks: Tensors, model: nn.Module, parameters: Tensors
    ) -> None:
        """Load what `state_dict` returned; masks and parameters may be shards, then all ranks must call this.

        Raises ValueError for masks that do not fit the model, or that are missing.
        """
        if (values is None) != (self.rule is None):
            saved, mine = ("SAM", "SSAM") if values is None else ("SSAM", "SAM")
            raise ValueError(f"state_dict was saved by {saved}, but this is {mine}; load it into the same kind")
        if values is not None and values["is_made"] and not masks:
            raise ValueError("state_dict lacks the masks that were made; load all of the state that was saved")
        check_like_parameters("mask in state_dict", masks, dict(model.named_parameters()))
        if values is None:
            return
        if values["is_made"]:
            own = {name: parameters[name] for name in masks if name in parameters}
            packed = {name: PackedMask.pack(local_part(masks[name], p)) for name, p in own.items()}
            self._hold(packed, {name: local_part(p) for name, p in own.items()}, Shards.of(own))
        else:
            self.masks = None
        state = np.frombuffer(bytes.fromhex(values["generator"]), dtype=np.uint8)
        self.generator.set_state(torch.from_numpy(state.copy()))
        self.is_requested, self.last_step, self.skipped = values["asked"], values["last_step"], values["skipped"]


def _content(masks: Mapping[str, PackedMask]) -> Iterator[Tensor | int | str]:
    for name, mask in masks.items():
        yield from (name, str(tuple(mask.shape)), mask.count)
        if mask.bits is not None:
            yield mask.bits
