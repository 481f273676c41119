"""The state an optimizer keeps between steps, and how it is stored in checkpoints.

It is stored in the base optimizer's state dict, so that torch's tools save and load it: plain values in the first
parameter group, under the key `OWN`; tensors in the state of the parameters, under keys with that prefix.
torch.distributed.checkpoint saves nothing else.
"""

from __future__ import annotations

import itertools
from collections import ChainMap, UserDict
from collections.abc import Iterable, Mapping, MutableMapping, Sequence
from copy import copy
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from sparsesam.masks.packed import PackedMask, dense_entries, kept_entries, kept_in, put_entries
from sparsesam.masks.scores import ScoreContext
from sparsesam.masks.state import MaskState

OWN = "sparsesam"

_VERSION = 5

#: ``{kind: {parameter name: tensor}}``
OwnTensors = dict[str, dict[str, Tensor]]


class SharedState(UserDict[Tensor, Any]):
    """The base optimizer's state, in which each parameter also has the keys of sparsesam's tensors, set to None.

    torch's flattened checkpoints load only keys that they find here. Writes go to the base optimizer's state.
    """

    def __init__(self, state: dict[Tensor, Any], kinds: Iterable[str]) -> None:
        self.data = state  # itself, not a copy
        self._places = {f"{OWN}_{kind}": None for kind in kinds}

    def __getitem__(self, parameter: Tensor) -> MutableMapping[str, Any]:
        return ChainMap(self.data[parameter], self._places)

    def __setitem__(self, parameter: Tensor, entries: Mapping[str, Any]) -> None:
        self.data[parameter] = {key: value for key, value in entries.items() if key not in self._places}


def split_own(
    state_dict: Mapping[str, Any], names: Sequence[str] | None = None
) -> tuple[dict[str, Any], dict[str, Any] | None, OwnTensors]:
    """Split a checkpoint into the base optimizer's part, sparsesam's values (None: it has none) and its tensors.

    ``names`` are those of the parameters in order; default: as saved in the checkpoint.
    """
    groups = [dict(group) for group in state_dict["param_groups"]]
    own = groups[0].pop(OWN, None) if groups else None
    places = itertools.chain.from_iterable(group["params"] for group in groups)
    known = {} if own is None else dict(zip(places, own["names"] if names is None else names, strict=False))
    state: dict[Any, dict[str, Any]] = {}
    tensors: OwnTensors = {}
    for place, entries in state_dict["state"].items():
        for key, value in entries.items():
            if not key.startswith(f"{OWN}_"):
                state.setdefault(place, {})[key] = value
            elif place in known and isinstance(value, Tensor):  # a flattened checkpoint has {} for a missing tensor
                tensors.setdefault(key.removeprefix(f"{OWN}_"), {})[known[place]] = value
    return {**state_dict, "state": state, "param_groups": groups}, own, tensors


def with_own(state_dict: dict[str, Any], values: dict[str, Any], tensors: OwnTensors) -> dict[str, Any]:
    groups = [dict(group) for group in state_dict["param_groups"]]
    state = {key: dict(entries) for key, entries in state_dict["state"].items()}
    groups[0][OWN] = values
    places = itertools.chain.from_iterable(group["params"] for group in groups)
    for place, name in zip(places, values["names"], strict=True):
        for kind, by_name in tensors.items():
            if name in by_name:
                state.setdefault(place, {})[f"{OWN}_{kind}"] = by_name[name]
    return {**state_dict, "state": state, "param_groups": groups}


@dataclass
class Counters:
    """Shown as attributes of the optimizer. Events known only to a device are counted there; `read` synchronizes."""

    steps: int = 0
    skipped_ascents: int = 0
    skipped_steps: int = 0

    def __post_init__(self) -> None:
        self._skipped_on_device: dict[torch.device, Tensor] = {}

    def skip_where(self, event: Tensor) -> None:
        """Count an ascent as skipped if the tensor is true, without synchronizing."""
        count = self._skipped_on_device.setdefault(event.device, torch.zeros_like(event, dtype=torch.int64))
        count.add_(event)

    def read(self) -> Counters:
        """Add the counts of all devices and return self."""
        self.skipped_ascents += sum(int(count) for count in self._skipped_on_device.values())
        self._skipped_on_device = {}
        return self


@dataclass
class OwnState:
    """What an optimizer keeps between steps besides its base's state.

    ``tensors`` has the kinds that the optimizer declares. A kind in ``whole`` holds whole parameters, the others the
    entries that the masks keep (`kept_entries`); a kind without tensors is not set.
    """

    masks: MaskState
    tensors: OwnTensors
    whole: frozenset[str]
    counters: Counters = field(default_factory=Counters)

    @property
    def kinds(self) -> list[str]:
        return ["mask", *self.tensors]

    def reset(self) -> OwnState:
        """Returns the state before the first step."""
        return OwnState(MaskState(self.masks.rule), {kind: {} for kind in self.tensors}, self.whole)

    def refresh(self, context: ScoreContext) -> None:
        """Make new masks. Kept entries follow them, with zeros where only the new one keeps."""
        masks, old = copy(self.masks), self.masks.masks or {}
        masks.refresh(context)
        new = masks.masks or {}
        moved = {
            kind: {
                name: kept_entries(put_entries(torch.zeros_like(w), old.get(name), entries), new.get(name)).clone()
                for name, entries in self.tensors[kind].items()
                if (w := context.local.get(name)) is not None  # otherwise it is not perturbed any more
            }
            for kind in self.tensors.keys() - self.whole
        }
        self.masks, self.tensors = masks, self.tensors | moved  # at once: Ctrl-C leaves both as they were, or both new

    def state_dict(
        self, parameters: Mapping[str, Tensor], trained: Mapping[str, Tensor]
    ) -> tuple[dict[str, Any], OwnTensors]:
        """Returns plain values, and tensors shaped like the parameters; the keys are the same after any step.

        ``parameters`` are the perturbed ones; kinds in ``whole`` are saved of all that are ``trained``.
        """
        mask, masks = self.masks.state_dict(parameters)
        values = {**asdict(self.counters.read()), "version": _VERSION, "mask": mask}
        values["set"] = {kind: bool(by_name) for kind, by_name in self.tensors.items()}
        dense = {
            kind: dense_entries(by_name, self._masks_of(kind), trained if kind in self.whole else parameters)
            for kind, by_name in self.tensors.items()
        }
        return values, {"mask": masks, **dense}

    def loaded(
        self, values: Mapping[str, Any], tensors: OwnTensors, model: nn.Module, parameters: Mapping[str, Tensor]
    ) -> OwnState:
        """Returns the state restored from what `state_dict` returned; raises ValueError if it does not fit."""
        if values.get("version") != _VERSION:
            raise ValueError(
                f"the checkpoint must be of version {_VERSION}, got {values.get('version')}; "
                "load it with the sparsesam that wrote it"
            )
        placed = {
            kind: {name: tensor.to(parameters[name].device) for name, tensor in by_name.items() if name in parameters}
            for kind, by_name in tensors.items()
        }
        state = self.reset()
        state.masks.load_state_dict(values["mask"], tensors.get("mask", {}), model, parameters)
        for kind in state.tensors:
            if values["set"].get(kind):
                state.tensors[kind] = kept_in(placed.get(kind, {}), state._masks_of(kind), parameters)
        state.counters = Counters(**{key: values[key] for key in asdict(Counters())})
        return state

    def _masks_of(self, kind: str) -> Mapping[str, PackedMask]:
        return {} if kind in self.whole else self.masks.masks or {}
