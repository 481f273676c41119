"""What a step leaves out, and says that it left out. Only the cost changes, never the result.

first backward     computes the gradients that the ascent needs, if the optimizer runs it (`minimize`, `backward`)
kept filters       their layers compute only their part of dW in that backward               (filters.py)
second forward     operations before the first perturbed weight return their first outputs   (replay.py)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.nn.parallel import DistributedDataParallel

from sparsesam.compile_blocks import COMPILES_WITHIN_MODES, is_compiled
from sparsesam.distributed.ddp import average_gradients, needs_every_gradient
from sparsesam.filters import FilterLayers, WeightGradient, weight_gradient
from sparsesam.masks.packed import PackedMask
from sparsesam.options import Options
from sparsesam.perturbation import is_unmoved
from sparsesam.replay import Tape
from sparsesam.utils.operators import nodes_of
from sparsesam.wrapper import PerturbedParams


class Savings(NamedTuple):
    """What the last step left out.

    ``gradients`` is the share of the trainable weights whose gradient the first backward did not compute; ``reused``
    of ``operations`` in the first forward, up to the first that reads a perturbed weight, were not run again;
    ``ended`` says where that ended and why.
    """

    gradients: float
    reused: int
    operations: int
    ended: str

    def __str__(self) -> str:
        return (
            f"first backward: {self.gradients:.0%} of the weight gradients left out\n"
            f"second forward: {self.reused} of {self.operations} recorded operations reused\n"
            f"reuse ended:    {self.ended}"
        )


class Shortcuts:
    """What one step leaves out; made at its beginning, released at its end.

    ``everything``: the method needs every gradient. ``is_due``: a mask will be made from the gradients of this step.
    ``records``: whether recording operations was worthwhile in earlier steps.
    """

    def __init__(
        self,
        model: nn.Module,
        ddp: DistributedDataParallel | None,
        params: PerturbedParams,
        masks: Mapping[str, PackedMask | None],
        options: Options,
        *,
        everything: bool,
        is_due: bool,
        records: bool,
    ) -> None:
        if options.is_implicit and params.shards is not None:
            raise ValueError(
                f'ascent must be "explicit" with sharded parameters (fully_shard, DTensor), got {options.ascent!r}: '
                "their layers need every gradient"
            )
        self._model, self._ddp, self._options = model, ddp, options
        is_dense = options.ascent == "implicit-dense"
        moved = {p.name: p.parameter for p in params if not is_unmoved(None if is_dense else masks[p.name], p.rho)}
        counts_all = options.norm == "full" or is_dense
        self._needed = [p.parameter for p in params if counts_all or p.name in moved]
        self._trainable = [p for p in model.parameters() if p.requires_grad]
        why = _why_nothing(options, params, is_due, moved)
        self._wanted = {} if everything or why else self._gradients_wanted(params, masks)
        self.layers = FilterLayers(self._wanted) if self._wanted else None
        is_partial = len(self._needed) < len(self._trainable) or self.layers is not None
        # Without knowing the DistributedDataParallel, one must reckon with one that waits for every gradient.
        waits = (dist.is_available() and dist.is_initialized()) if ddp is None else needs_every_gradient(ddp)
        #: the parameters whose gradient the ascent needs; None: all, and nothing is left out of the backward
        self.inputs = self._needed if is_partial and not (why or everything or waits) else None
        if not why and len(moved) == sum(1 for _ in model.parameters()):
            why = "every parameter is perturbed"
        elif not why and options.ascent_fraction < 1:
            why = "the ascent uses only a part of the batch"
        elif not why and not COMPILES_WITHIN_MODES and any(map(is_compiled, model.modules())):
            why = f"torch {torch.__version__} runs compiled modules uncompiled while operations are recorded"
        elif not why and not records:
            why = "operations are so small that recording them takes longer than running them again"
        self.why_no_tape = why
        self.tape = None if why else Tape(moved, start=None if ddp is None else ddp.module)
        self.is_complete = True  # no gradient was left out
        self._by_filter = False  # of layers with kept filters, only their gradients were computed

    def _gradients_wanted(
        self, params: PerturbedParams, masks: Mapping[str, PackedMask | None]
    ) -> dict[Tensor, WeightGradient]:
        """Which layers have a cheaper backward. In an implicit ascent, weights outside the masks stop the gradient."""
        wanted: dict[Tensor, WeightGradient] = {}
        options, names = self._options, {id(p.parameter): p.name for p in params}
        for parameter in self._trainable:
            name = names.get(id(parameter))
            mask = masks[name] if name is not None else None
            if name is None and options.is_implicit:
                mask = PackedMask(parameter.shape, 0, None)
            # Only a mask of some entries, or one that stops an implicit gradient, changes a layer's backward.
            if mask is not None and not mask.is_full and (options.is_implicit or not mask.is_empty):
                is_counted = name is not None
                want = weight_gradient(mask, parameter, ascent=options.ascent, norm=options.norm, is_counted=is_counted)
                wanted |= {} if want is None else {parameter: want}
        return wanted

    def give_up_tape(self, reason: str) -> None:
        if self.tape is not None:
            self.tape.release()
            self.tape, self.why_no_tape = None, reason

    @contextmanager
    def first_pass(self, *, narrows: bool, is_local: bool, between: bool) -> Iterator[None]:
        """``narrows``: the optimizer runs the backward. ``is_local``: gradients are not averaged over ranks.
        ``between``: the user's code runs between the passes.
        """
        is_implicit = self._options.is_implicit and self.layers is not None
        if not narrows and self._ddp is not None:  # a closure that calls loss.backward() needs its synchronization
            self.inputs = None
        # DistributedDataParallel would wait for the gradients that are left out.
        averages = self._ddp is not None and not is_local and (self.inputs is not None or is_implicit)
        if self.tape is not None:
            self.tape.between = between
        with (
            self._ddp.no_sync() if self._ddp is not None and (averages or is_local) else nullcontext(),
            self.layers or nullcontext(),
            self.layers.narrowed() if is_implicit and self.layers is not None else nullcontext(),  # in any backward
            nullcontext() if self.tape is None else self.tape.recording(),
        ):
            yield
        if averages and self._ddp is not None:
            average_gradients(self._ddp, self._needed)

    def backward(self, loss: Tensor, options: dict[str, Any]) -> None:
        """The backward of the first pass."""
        with torch._C.DisableTorchFunction():
            # In a comprehension of Python 3.13, Ctrl-C may leave the block without its end.
            inputs = list(filter(attrgetter("requires_grad"), self.inputs or ()))
            # torch refuses to differentiate a reentrant checkpoint in part.
            checkpoint = "CheckpointFunctionBackward"
            is_full = not inputs or any(type(node).__name__ == checkpoint for node in nodes_of([loss.grad_fn]))
        if is_full:
            loss.backward(**options)
            return
        self.is_complete, self._by_filter = False, True
        with nullcontext() if self.layers is None else self.layers.narrowed():
            loss.backward(inputs=inputs, **options)

    def inputs_for_trainer(self) -> list[Tensor] | None:
        """Returns `inputs` to somebody else's backward: the gradients of other parameters count as left out."""
        self.is_complete &= self.inputs is None
        return self.inputs

    def check_implicit(self, warn: Callable[[str], None]) -> None:
        """Raise unless the first pass computed gradients through masked weights; warn of weights where it did not."""
        ascent, called = self._options.ascent, set() if self.layers is None else self.layers.called
        wanted = {id(p) for p, want in self._wanted.items() if not want.mask.is_empty}
        explicit = [name for name, p in self._model.named_parameters() if id(p) in wanted - called]
        if wanted and wanted.isdisjoint(called):
            raise RuntimeError(
                f"ascent={ascent!r} did not see the first pass: it must use the weights of the model given to the "
                f"optimizer, {type(self._model).__name__}, in torch's linear and convolution functions"
            )
        if explicit:
            shown = ", ".join(explicit[:5]) + (" and more" if len(explicit) > 5 else "")
            warn(f"ascent={ascent!r} acts in linear and convolution layers: the ascent was explicit for {shown}")

    def second_pass(self) -> AbstractContextManager[None]:
        return nullcontext() if self.tape is None else self.tape.replaying()

    def savings(self) -> Savings:
        total = computed = sum(p.numel() for p in self._trainable)
        if not self.is_complete:
            kept = {p: want.mask.count for p, want in self._wanted.items() if self._by_filter and not want.dense}
            computed = sum(kept.get(p, p.numel()) for p in self._needed)
        left_out = 1 - computed / total if total else 0.0
        if self.tape is None:
            return Savings(left_out, 0, 0, self.why_no_tape)
        return Savings(left_out, self.tape.reused, self.tape.operations, self.tape.ended)

    def release(self) -> bool:
        """Drop the tape; returns whether recording is worthwhile."""
        if self.tape is None:
            return True
        self.tape.release()
        return self.tape.is_worthwhile


def _why_nothing(options: Options, params: PerturbedParams, is_due: bool, moved: Mapping[str, Tensor]) -> str:
    if not options.engine:
        return "engine=False"
    if is_due:
        return "the mask is made from the gradients of this step"
    if params.shards is not None:
        return "parameters are sharded (fully_shard, DTensor): they are gathered in every forward and backward"
    return "" if moved else "nothing is perturbed"
