"""``torch.distributed.algorithms.Join``: ranks with unequal numbers of batches.

    with Join([model, opt]):
        for x, y in loader: ...

DDP answers its own collectives for ranks that are out of batches. Within ``Join`` the optimizer sends nothing else:
every rank makes its mask by itself, from the same gradient and the same random numbers, and the backward is not
narrowed. When all ranks are done, all of them take over the optimizer's state of one that was still training.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist
from torch.distributed.algorithms.join import Joinable, JoinHook
from torch.nn.parallel import DistributedDataParallel

from sparsesam.distributed.agreement import communication_device


class StateJoinHook(JoinHook):
    """Gives every rank the optimizer's state of the last rank that was still training."""

    def __init__(self, optimizer: Any, group: dist.ProcessGroup) -> None:
        self._optimizer, self._group = optimizer, group
        super().__init__()

    def main_hook(self) -> None:
        if not self._optimizer._is_joining:  # a second time in the same Join, in which the others wait for this rank
            raise RuntimeError("a Join must not be entered twice; write `with Join([model, opt]):` for every loop")

    def post_hook(self, is_last_joiner: bool) -> None:
        self._optimizer._end_join()
        device = communication_device(self._group)
        rank = dist.get_rank()
        source = torch.tensor(rank if is_last_joiner else -1, device=device)
        dist.all_reduce(source, op=dist.ReduceOp.MAX, group=self._group)
        state: list[Any] = [self._optimizer.state_dict() if rank == int(source) else None]
        dist.broadcast_object_list(state, src=int(source), group=self._group, device=device)
        self._optimizer.load_state_dict(state[0])  # on the source too: all ranks go on from the same point


class JoinableOptimizer(Joinable):
    """What ``Join`` asks of an optimizer."""

    _names: dict[Tensor, str]
    _ended_join: object = None  # by what torch has marked DistributedDataParallel in a Join that is over

    def join_hook(self, **_: Any) -> JoinHook:
        return StateJoinHook(self, self.join_process_group)

    @property
    def join_device(self) -> torch.device:
        return next(iter(self._names)).device

    @property
    def join_process_group(self) -> Any:
        return dist.group.WORLD

    @property
    @abstractmethod
    def _ddp(self) -> DistributedDataParallel | None:
        """What the model is wrapped in, as far as known."""

    @property
    def _is_joining(self) -> bool:
        return bool(self._join_config.enable)

    def _check_join(self) -> None:
        """Ranks that stop early must take over counters and masks, or later refreshes would wait for them forever."""
        mark = None if self._ddp is None else self._ddp._join_config
        if mark is not None and mark.enable and mark is not self._ended_join and not self._is_joining:
            raise RuntimeError("Join must have the optimizer too: write `with Join([model, opt]):`")
        if self._is_joining and self._join_config.is_first_joinable:
            raise RuntimeError("Join must have the model first: write `with Join([model, opt]):`")

    def _end_join(self) -> None:
        """torch marks its Joinables when a Join is made, and does not unmark them when it is over."""
        self._ended_join = None if self._ddp is None else self._ddp._join_config
        Joinable.__init__(self)
