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

from sparsesam.distributed.shards import local_part
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

    ``tensors`` has the kinds that the optimizer declares, shaped like the parameters, or this rank's parts of them; a
    kind without tensors is not set.
    """

    masks: MaskState
    tensors: OwnTensors
    counters: Counters = field(default_factory=Counters)

    @property
    def kinds(self) -> list[str]:
        return ["mask", *self.tensors]

    def reset(self) -> OwnState:
        """Returns the state before the first step."""
        return OwnState(MaskState(self.masks.rule), {kind: {} for kind in self.tensors})

    def refresh(self, context: ScoreContext) -> None:
        """Make new masks."""
        masks = copy(self.masks)
        masks.refresh(context)
        self.masks = masks  # at once: Ctrl-C leaves the old ones, or all new ones

    def state_dict(
        self, parameters: Mapping[str, Tensor], trained: Mapping[str, Tensor]
    ) -> tuple[dict[str, Any], OwnTensors]:
        """Returns plain values, and tensors shaped like the parameters; the keys are the same after any step.

        Masks are saved of ``parameters``, the perturbed ones, tensors of all that are ``trained``.
        """
        mask, masks = self.masks.state_dict(parameters)
        values = {**asdict(self.counters.read()), "version": _VERSION, "mask": mask}
        values["set"] = {kind: bool(by_name) for kind, by_name in self.tensors.items()}
        saved = {
            kind: {name: torch.zeros_like(p, requires_grad=False) for name, p in trained.items()}
            for kind in self.tensors
        }
        for kind, by_name in self.tensors.items():
            for name in by_name.keys() & trained.keys():
                local_part(saved[kind][name]).copy_(by_name[name])
        return values, {"mask": masks, **saved}

    def loaded(
        self, values: Mapping[str, Any], tensors: OwnTensors, model: nn.Module, parameters: Mapping[str, Tensor]
    ) -> OwnState:
        """Returns the state restored from what `state_dict` returned; raises ValueError if it does not fit."""
        if values.get("version") != _VERSION:
            raise ValueError(
                f"the checkpoint must be of version {_VERSION}, got {values.get('version')}; "
                "load it with the sparsesam that wrote it"
            )
        state = self.reset()
        state.masks.load_state_dict(values["mask"], tensors.get("mask", {}), model, parameters)
        for kind in state.tensors:
            if values["set"].get(kind):
                state.tensors[kind] = {
                    name: local_part(tensor, p).to(p.device, copy=True)
                    for name, tensor in tensors.get(kind, {}).items()
                    if (p := parameters.get(name)) is not None
                }
        state.counters = Counters(**{key: values[key] for key in asdict(Counters())})
        return state
