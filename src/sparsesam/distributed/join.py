"""``torch.distributed.algorithms.Join``: ranks with unequal numbers of batches.

    with Join([model, opt]):
        for x, y in loader: ...

DDP answers its own collectives for ranks that are out of batches. Within ``Join`` the optimizer sends nothing else:
every rank makes its mask by itself, from the same gradient and the same random numbers, and the backward is not
narrowed. When all ranks are done, all of them take over the optimizer's state of one that was still training.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import distributed as dist
from torch.distributed.algorithms.join import JoinHook

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
        if rank != int(source):
            self._optimizer.load_state_dict(state[0])
