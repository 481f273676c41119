"""Checks that all ranks have the same values, by hashes: a comparison sends eight bytes per rank."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from typing import TypeVar

import torch
from torch import Tensor
from torch import distributed as dist

Result = TypeVar("Result")


def is_distributed() -> bool:
    return dist.is_available() and dist.is_initialized()


def communication_device(group: dist.ProcessGroup | None = None) -> torch.device:
    """Returns the device on which the group's collectives need their tensors."""
    if "nccl" in str(dist.get_backend(group)):
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def sum_over(group: dist.ProcessGroup | None, number: int) -> int:
    """Returns the sum of a number over the ranks."""
    total = torch.tensor(number, dtype=torch.int64, device=communication_device(group))
    dist.all_reduce(total, group=group)
    return int(total)


def on_every_rank(make: Callable[[], Result], error: type[Exception], group: dist.ProcessGroup | None) -> Result:
    """Returns the result of ``make``; if it raises the error on one rank, all ranks raise it."""
    result, caught = None, None
    try:
        result = make()
    except error as exception:
        caught = exception
    if sum_over(group, caught is not None) or result is None:
        raise caught or error("the scores of another rank are not finite")
    return result


def require_same(parts: Iterable[Tensor | int | str], what: str, group: dist.ProcessGroup | None = None) -> None:
    """Raise RuntimeError on every rank if the parts differ, naming the ranks that differ from the group's first."""
    digest = hashlib.blake2b(digest_size=8)
    for part in parts:
        digest.update(part.detach().cpu().numpy().tobytes() if isinstance(part, Tensor) else f"{part}\0".encode())
    number = int.from_bytes(digest.digest(), "little", signed=True)
    mine = torch.tensor([number], dtype=torch.int64, device=communication_device(group))
    everyones = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(everyones, mine, group=group)
    first, *others = dist.get_process_group_ranks(group or dist.group.WORLD)
    different = [str(rank) for rank, their in zip(others, everyones[1:], strict=True) if their != everyones[0]]
    if different:
        raise RuntimeError(
            f"{what} of rank {', '.join(different)} differ from rank {first}'s; every rank must make the optimizer and "
            "its mask with the same arguments, seed and data (all of the data, not the rank's part), take the same "
            "steps, and load the same checkpoint"
        )
