"""``torch.distributed.algorithms.Join``: ranks with unequal numbers of batches.

    with Join([model, opt]):
        for x, y in loader: ...

Ranks without batches only take part in DDP's own collectives. Within ``Join`` the optimizer therefore runs no others:
every rank makes its mask locally, from the same gradient and the same random numbers, and the backward is not narrowed.
When all ranks are done, they all load the optimizer state of a rank that was still training.
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
    """Broadcasts the optimizer state of the last rank that was still training."""

    def __init__(self, optimizer: Any, group: dist.ProcessGroup) -> None:
        self._optimizer, self._group = optimizer, group
        super().__init__()

    def main_hook(self) -> None:
        if not self._optimizer._is_joining:  # the same Join is entered again, and the others wait for this rank
            raise RuntimeError("a Join must not be entered twice; write `with Join([model, opt]):` for every loop")

    def post_hook(self, is_last_joiner: bool) -> None:
        self._optimizer._end_join()
        device = communication_device(self._group)
        rank = dist.get_rank()
        source = torch.tensor(rank if is_last_joiner else -1, device=device)
        dist.all_reduce(source, op=dist.ReduceOp.MAX, group=self._group)
        state: list[Any] = [self._optimizer.state_dict() if rank == int(source) else None]
        dist.broadcast_object_list(state, src=int(source), group=self._group, device=device)
        self._optimizer.load_state_dict(state[0])  # on the source too, so that all ranks continue from the same state


class JoinableOptimizer(Joinable):
    """The methods of an optimizer that ``Join`` needs."""

    _names: dict[Tensor, str]
    _ended_join: object = None  # the _join_config of DistributedDataParallel in the last finished Join

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
        """The DistributedDataParallel around the model, if known."""

    @property
    def _is_joining(self) -> bool:
        return bool(self._join_config.enable)

    def _check_join(self) -> None:
        """Raise unless Join has model and optimizer: with other counters on some ranks, later refreshes would hang."""
        mark = None if self._ddp is None else self._ddp._join_config
        if mark is not None and mark.enable and mark is not self._ended_join and not self._is_joining:
            raise RuntimeError("Join must have the optimizer too: write `with Join([model, opt]):`")
        if self._is_joining and self._join_config.is_first_joinable:
            raise RuntimeError("Join must have the model first: write `with Join([model, opt]):`")

    def _end_join(self) -> None:
        """Disable the optimizer's join state: torch enables it when a Join is created, but does not disable it."""
        self._ended_join = None if self._ddp is None else self._ddp._join_config
        Joinable.__init__(self)
