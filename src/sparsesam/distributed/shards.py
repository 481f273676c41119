"""Sharded parameters, of which each rank holds a part: DTensors of ``fully_shard`` (FSDP2) and tensor parallelism.

A step works on the part of a weight that this rank holds, `local_part`, which is an ordinary tensor. Quantities over
all parts (a norm, a number of kept weights) are computed with `Shards.sum`.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch import distributed as dist

from sparsesam.distributed.agreement import require_same

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def is_sharded(tensor: Tensor) -> bool:
    """Whether it is a DTensor, without importing the slow module that defines it."""
    return hasattr(tensor, "full_tensor")


def local_part(tensor: Tensor, like: Tensor | None = None) -> Tensor:
    """Returns this rank's part of a DTensor, with the placements of ``like``; any other tensor unchanged."""
    sharded: Any = tensor
    if not is_sharded(tensor):
        return tensor
    with torch.no_grad():
        if like is not None and sharded.placements != like.placements:  # type: ignore[attr-defined]
            sharded = sharded.redistribute(placements=like.placements)  # type: ignore[attr-defined]
        part: Tensor = sharded.to_local()
        return part.detach()


def as_shard_of(parameter: Tensor, part: Tensor) -> Tensor:
    """Returns a DTensor like the parameter with this rank's ``part``; ``part`` itself if it is not sharded."""
    if not is_sharded(parameter):
        return part
    from torch.distributed.tensor import DTensor

    whole: Any = parameter
    return DTensor.from_local(
        part, whole.device_mesh, whole.placements, run_check=False, shape=whole.shape, stride=whole.stride()
    )


def reshard(model: nn.Module) -> None:
    """Free parameters that FSDP2 gathered, so that the next forward gathers the current shards.

    FSDP2 does this itself after a backward, except with ``set_reshard_after_backward(False)``.
    """
    fsdp = sys.modules.get("torch.distributed.fsdp")
    for module in model.modules():
        if fsdp is not None and isinstance(module, fsdp.FSDPModule):
            module.reshard()


def refuse_fsdp1(parameters: Iterable[Tensor]) -> None:
    """Raise for parameters that FSDP1 flattened: each rank would use the norm of its own shard."""
    if any(getattr(parameter, "_fsdp_flattened", False) for parameter in parameters):
        raise TypeError(
            "model must not be wrapped in FullyShardedDataParallel (FSDP1): its flat shards look like whole tensors, "
            "and each rank would divide by the norm of its own part; use torch.distributed.fsdp.fully_shard (FSDP2) "
            "or DistributedDataParallel"
        )


@dataclass(frozen=True)
class ShardLayout:
    """Which entries of a tensor of ``shape`` this rank holds: those at every combination of the ``indices``.

    ``counts``: this rank counts its entries; of several ranks that hold the same entries, exactly one does.
    """

    shape: torch.Size
    indices: tuple[Tensor, ...]
    counts: bool

    def of(self, whole: Tensor) -> Tensor:
        """Returns this rank's part of a whole tensor."""
        for dim, index in enumerate(self.indices):
            if len(index) != self.shape[dim]:
                whole = whole.index_select(dim, index.to(whole.device))
        return whole

    def positions(self, entries: Tensor) -> Tensor:
        """Map flat indices of this rank's part to flat indices of the whole tensor."""
        if all(len(index) == size for index, size in zip(self.indices, self.shape, strict=True)):
            return entries
        places, rest, stride = torch.zeros_like(entries), entries, 1
        for size, index in zip(reversed(self.shape), reversed(self.indices), strict=True):
            places += index.to(entries.device)[rest % len(index)] * stride
            rest, stride = rest // len(index), stride * size
        return places

    @property
    def columns(self) -> Tensor:
        """The columns that this rank holds of the tensor reshaped to a matrix (O, everything else)."""
        rest = ShardLayout(self.shape[1:], self.indices[1:], self.counts)
        return rest.positions(torch.arange(math.prod(len(index) for index in rest.indices)))


class Shards:
    """The layout of parameters over the ranks of a device mesh. All ranks must call every method together.

    Without a mesh, this process holds whole tensors, and nothing is sent.
    """

    def __init__(self, parts: Mapping[str, ShardLayout], mesh: DeviceMesh | None) -> None:
        self.parts = dict(parts)
        self.mesh: Any = mesh

    @classmethod
    def whole(cls, tensors: Mapping[str, Tensor]) -> Shards:
        """Returns the layout of tensors that this process holds as a whole."""
        return cls({name: _whole_part(tensor.shape) for name, tensor in tensors.items()}, None)

    @classmethod
    def of(cls, parameters: Mapping[str, Tensor]) -> Shards | None:
        """Returns the layout of the parameters; None if none is sharded."""
        sharded: list[Any] = [parameter for parameter in parameters.values() if is_sharded(parameter)]
        if not sharded:
            return None
        mesh = max((parameter.device_mesh for parameter in sharded), key=lambda mesh: mesh.size())
        return cls({name: _part(parameter, mesh) for name, parameter in parameters.items()}, mesh)

    def only(self, name: str) -> Shards:
        return Shards({name: self.parts[name]}, self.mesh)

    @property
    def total(self) -> int:
        """The number of entries of all parameters, on all ranks."""
        return sum(math.prod(part.shape) for part in self.parts.values())

    def counted(self, names: Iterable[str]) -> list[str]:
        """Returns the names of the tensors whose entries this rank counts."""
        return [name for name in names if self.parts[name].counts]

    def sum(self, tensor: Tensor) -> Tensor:
        """Returns the sum of the tensor over all ranks, on its device."""
        if self.mesh is None:
            return tensor
        total = tensor.to(self.mesh.device_type, copy=True)
        for dim in range(self.mesh.ndim):
            dist.all_reduce(total, group=self.mesh.get_group(dim))
        return total.to(tensor.device)

    def sum_of(self, *numbers: int) -> list[int]:
        """Returns the sum of each number over all ranks."""
        return [int(number) for number in self.sum(torch.tensor(numbers, dtype=torch.int64)).tolist()]

    def gathered(self, name: str, part: Tensor) -> Tensor:
        """Returns the whole tensor, gathered from the ranks' parts; float64, on the CPU."""
        layout = self.parts[name]
        whole = torch.zeros(layout.shape, dtype=torch.float64)
        if layout.counts and part.numel():
            whole.view(-1)[layout.positions(torch.arange(part.numel()))] = part.double().cpu().reshape(-1)
        return self.sum(whole)

    def norm(self, norm: float | Tensor) -> float | Tensor:
        """Returns the norm over all ranks, from the norm of the entries that this rank counts."""
        if isinstance(norm, Tensor):
            return self.sum(norm.square()).sqrt()
        return math.sqrt(float(self.sum(torch.tensor(norm, dtype=torch.float64).square())))

    def require_same(self, parts: Sequence[Tensor | int], what: str) -> None:
        """Raise on all ranks if the parts differ, naming the ranks that differ from the first."""
        for dim in range(self.mesh.ndim):
            require_same(parts, what, self.mesh.get_group(dim))


def _whole_part(shape: torch.Size, counts: bool = True) -> ShardLayout:
    return ShardLayout(shape, tuple(torch.arange(size) for size in shape), counts)


def _part(parameter: Any, mesh: Any) -> ShardLayout:
    if not is_sharded(parameter):
        return _whole_part(parameter.shape, not any(mesh.get_coordinate()))
    indices = [torch.arange(size) for size in parameter.shape]
    own = parameter.device_mesh
    # Over the dimensions of the mesh that its own mesh lacks, the parameter is replicated.
    places = torch.isin(mesh.mesh, own.mesh).nonzero()
    is_lacking = (places.amax(0) == places.amin(0)).tolist()
    counts = not any(place and lacks for place, lacks in zip(mesh.get_coordinate(), is_lacking, strict=True))
    for dim, (placement, place) in enumerate(zip(parameter.placements, own.get_coordinate(), strict=True)):
        if placement.is_replicate():
            counts &= place == 0
            continue
        # A strided shard (FSDP2 of a tensor-parallel parameter) takes its piece of each of several chunks.
        pieces = getattr(placement, "split_factor", 1)
        chunks = indices[placement.dim].chunk(pieces)
        indices[placement.dim] = torch.cat([_piece(chunk, own.size(dim), place) for chunk in chunks])
    if (found := parameter.to_local().shape) != (expected := tuple(map(len, indices))):
        raise ValueError(
            f"a parameter of shape {tuple(parameter.shape)} is laid out as {parameter.placements}, which is not "
            f"supported: this rank holds {tuple(found)} of it, not {expected}; use fully_shard or parallelize_module"
        )
    return ShardLayout(parameter.shape, tuple(indices), counts)


def _piece(index: Tensor, ranks: int, place: int) -> Tensor:
    """Returns what torch.chunk gives to one of the ranks; the last ones may get nothing."""
    size = math.ceil(len(index) / ranks)
    return index[place * size : (place + 1) * size]
