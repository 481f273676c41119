"""N of every M consecutive entries, where the edge of a shard may cut a group.

FSDP2 cuts tensors along dimension 0, along which the groups of axis="output" run. The rows of groups that are cut, at
most M - 1 on either side of an edge, are sent to all ranks; all others are chosen where they are.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sparsesam.distributed.shards import Part, Shards
from sparsesam.masks.nm import as_matrix, choose_in_groups
from sparsesam.masks.patterns import NM
from sparsesam.masks.patterns.base import Choice
from sparsesam.masks.sharded.base import ShardedPattern, best, left_after_drop, scores_or_draws
from sparsesam.masks.sharded.select import Parts, count_kept, random_scores, refuse_nan


@dataclass(frozen=True)
class _Groups:
    """The part of a matrix that divides into groups: this rank's rows and columns of it, and which groups are cut."""

    part: Part
    rows: int
    columns: int
    cut: Tensor

    def of(self, tensor: Tensor) -> Tensor:
        """What this rank has of the groups, as a matrix: a view."""
        return as_matrix(tensor)[: self.rows, : self.columns]


@dataclass(frozen=True)
class NMOnShards(ShardedPattern):
    pattern: NM
    shards: Shards

    def select(self, scores: Parts, sparsity: float | None = None) -> dict[str, Tensor]:
        refuse_nan(scores, self.shards)
        groups = self._groups()
        masks = {name: self._outside_groups(name, score, groups.get(name)) for name, score in scores.items()}
        self._fill({name: group.of(scores[name]) for name, group in groups.items()}, masks, groups, None)
        return masks

    def draw(self, like: Parts, generator: torch.Generator, sparsity: float | None = None) -> dict[str, Tensor]:
        return self.select(random_scores(like, self.shards, generator))

    def drop_and_grow(
        self, masks: Parts, keep: Choice, grow: Choice, *, sparsity: float | None = None, ratio: float
    ) -> dict[str, Tensor]:
        groups = self._groups()
        grouped = {name: group.of(masks[name]).contiguous() for name, group in groups.items()}
        inside = Shards({name: group.part for name, group in groups.items()}, self.shards.mesh)
        own_keep, own_grow = (
            choice if isinstance(choice, torch.Generator) else {n: groups[n].of(choice[n]) for n in groups}
            for choice in (keep, grow)
        )
        left = left_after_drop(count_kept(grouped, inside), ratio)
        survivors = best(grouped, left, own_keep, inside, among=grouped)
        growth = scores_or_draws(grouped, own_grow, inside)
        refuse_nan(growth, self.shards)
        # What lies outside full groups is fixed by the pattern, so it stays as it is.
        result = {name: mask.clone() for name, mask in masks.items()}
        self._fill(growth, result, groups, survivors)
        return result

    # ---- groups ------------------------------------------------------------------------------------------

    def _groups(self) -> dict[str, _Groups]:
        """By name, for the tensors that have groups."""
        found = {}
        for name, part in self.shards.parts.items():
            if len(part.shape) < 2 or not part.shape.numel():
                continue
            matrix = part.as_matrix()
            rows, columns = matrix.shape
            along, axis = (rows, 0) if self.pattern.axis == "output" else (columns, 1)
            full = along // self.pattern.m * self.pattern.m
            if full < along and self.pattern.remainder == "error":
                raise ValueError(
                    f"{name!r} has {along} entries along its {self.pattern.axis} axis, not a multiple of "
                    f"m={self.pattern.m}; choose another m or axis, or remainder='dense' to keep the last group whole"
                )
            inside = matrix.first((full, columns) if axis == 0 else (rows, full))
            held = [len(index) for index in inside.indices]
            found[name] = _Groups(inside, held[0], held[1], torch.empty(0, dtype=torch.int64))
        return self._with_cut(found)

    def _with_cut(self, groups: dict[str, _Groups]) -> dict[str, _Groups]:
        """Ask all ranks which groups they hold a part of, but not all."""
        axis = 0 if self.pattern.axis == "output" else 1
        sizes = [group.part.shape[axis] // self.pattern.m for group in groups.values()]
        held = [
            torch.bincount(group.part.indices[axis] // self.pattern.m, minlength=size)
            for group, size in zip(groups.values(), sizes, strict=True)
        ]
        partly = [((count > 0) & (count < self.pattern.m)).long() for count in held]
        everywhere = self.shards.sum(torch.cat(partly)).split(sizes) if partly else []
        result = {}
        for (name, group), cut in zip(groups.items(), everywhere, strict=True):
            if bool(cut.any()) and (axis == 1 or len(group.part.indices[1]) < group.part.shape[1]):
                raise ValueError(
                    f"{name!r} is sharded so that groups of {self.pattern} are cut, and along more than its dimension "
                    "0; shard it along dimension 0, or along others only where groups run along dimension 0"
                )
            result[name] = _Groups(group.part, group.rows, group.columns, cut.nonzero().squeeze(1))
        return result

    def _outside_groups(self, name: str, score: Tensor, group: _Groups | None) -> Tensor:
        """The mask before its groups are filled: remainders and vectors."""
        if group is None:
            dense = score.dim() >= 2 or self.pattern.vectors == "dense"
            return score > -torch.inf if dense else torch.zeros_like(score, dtype=torch.bool)
        mask = (score > -torch.inf).contiguous()
        group.of(mask).fill_(False)
        return mask

    def _fill(self, scores: Parts, masks: dict[str, Tensor], groups: dict[str, _Groups], first: Parts | None) -> None:
        """Choose n in every group of this rank's masks, in place; entries of ``first`` are chosen before others."""
        for name, group in groups.items():
            chosen = group.of(masks[name])
            inner = ~torch.isin(group.part.indices[0] // self.pattern.m, group.cut) if len(group.cut) else None
            kept = None if first is None else first[name]
            self._choose(scores[name], kept, chosen, inner)
        cut = {name: group for name, group in groups.items() if len(group.cut)}
        if not cut:
            return
        gathered = self._gathered_rows({name: scores[name].double() for name in cut}, cut)
        certain = None if first is None else self._gathered_rows({name: first[name].double() for name in cut}, cut)
        for name, group in cut.items():
            whole = torch.zeros(gathered[name].shape, dtype=torch.bool)
            kept = None if certain is None else certain[name] > 0
            choose_in_groups(gathered[name], self.pattern.n, self.pattern.m, "output", out=whole, first=kept)
            own, places = self._own_cut_rows(group)
            group.of(masks[name])[own.to(masks[name].device)] = whole[places].to(masks[name].device)

    def _choose(self, scores: Tensor, first: Tensor | None, out: Tensor, rows: Tensor | None) -> None:
        n, m, axis = self.pattern.n, self.pattern.m, self.pattern.axis
        if rows is None:
            choose_in_groups(scores, n, m, axis, out=out, first=first)
            return
        index = rows.nonzero().squeeze(1).to(scores.device)
        chosen = torch.zeros(len(index), scores.shape[1], dtype=torch.bool, device=scores.device)
        choose_in_groups(
            scores[index], n, m, axis, out=chosen, first=None if first is None else first[index].contiguous()
        )
        out[index] = chosen

    def _own_cut_rows(self, group: _Groups) -> tuple[Tensor, Tensor]:
        """The rows of groups that are cut which this rank has, and their places among all such rows."""
        m, rows = self.pattern.m, group.part.indices[0]
        own = torch.isin(rows // m, group.cut).nonzero().squeeze(1)
        return own, torch.searchsorted(group.cut, rows[own] // m) * m + rows[own] % m

    def _gathered_rows(self, parts: Parts, cut: dict[str, _Groups]) -> dict[str, Tensor]:
        """The rows of all groups that are cut, from the ranks that hold them; on the CPU."""
        buffers = {}
        for name, group in cut.items():
            buffers[name] = torch.zeros(len(group.cut) * self.pattern.m, group.part.shape[1], dtype=torch.float64)
            if group.part.counts:
                own, places = self._own_cut_rows(group)
                buffers[name][places] = parts[name][own.to(parts[name].device)].cpu()
        summed = self.shards.sum(torch.cat([buffer.reshape(-1) for buffer in buffers.values()]))
        sizes = [buffer.numel() for buffer in buffers.values()]
        return {name: flat.view(buffers[name].shape) for name, flat in zip(buffers, summed.split(sizes), strict=True)}
