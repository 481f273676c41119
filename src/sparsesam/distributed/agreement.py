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


def all_agree(flag: bool, device: torch.device, group: dist.ProcessGroup | None = None) -> bool:
    """Whether the flag is set on every rank."""
    vote = torch.tensor(int(flag), device=device)
    dist.all_reduce(vote, op=dist.ReduceOp.MIN, group=group)
    return bool(vote)


def communication_device(group: dist.ProcessGroup | None = None) -> torch.device:
    """Returns the device on which the group's collectives need their tensors."""
    if "nccl" in str(dist.get_backend(group)):
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def on_every_rank(make: Callable[[], Result], error: type[Exception], group: dist.ProcessGroup | None) -> Result:
    """Returns the result of ``make``; if it raises the error on one rank, all ranks raise it."""
    result, caught = None, None
    try:
        result = make()
    except error as exception:
        caught = exception
    if not all_agree(caught is None, communication_device(group), group) or result is None:
        raise caught or error("the scores of another rank are not finite")
    return result


def hash_of(parts: Iterable[Tensor | int | str]) -> int:
    """Returns a 64-bit hash of the parts; different parts collide with probability 2^-64."""
    digest = hashlib.blake2b(digest_size=8)
    for part in parts:
        if isinstance(part, Tensor):
            digest.update(part.detach().cpu().contiguous().numpy().tobytes())
        else:
            digest.update(str(part).encode() + b"\0")
    return int.from_bytes(digest.digest(), "little", signed=True)


def require_same(parts: Iterable[Tensor | int | str], what: str, group: dist.ProcessGroup | None = None) -> None:
    """Raise RuntimeError on every rank if the parts differ, naming the ranks that differ from the group's first."""
    first, *others = dist.get_process_group_ranks(group or dist.group.WORLD)
    mine = torch.tensor([hash_of(parts)], dtype=torch.int64, device=communication_device(group))
    everyones = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(everyones, mine, group=group)
    expected, *hashes = [int(value) for value in everyones]
    different = [rank for rank, value in zip(others, hashes, strict=True) if value != expected]
    if different:
        raise RuntimeError(
            f"{what} of {_name_ranks(different)} differ from rank {first}'s; every rank must make the optimizer and "
            "its mask with the same arguments, seed and data (all of the data, not the rank's part), take the same "
            "steps, and load the same checkpoint"
        )


def _name_ranks(ranks: list[int]) -> str:
    shown = ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")
    return f"rank {shown}" if len(ranks) == 1 else f"ranks {shown}"
