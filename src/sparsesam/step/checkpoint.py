"""The state an optimizer keeps between steps, and how it is stored in checkpoints.

It is stored in the base optimizer's state dict, so that torch's tools save and load it: plain values in the first
parameter group, under the key `OWN`; tensors in the state of the parameters, under keys with that prefix.
torch.distributed.checkpoint saves nothing else.
"""

from __future__ import annotations

import itertools
from collections import ChainMap, UserDict
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from sparsesam.ascent.perturbation.kept_entries import dense_entries, kept_in
from sparsesam.masks.state import MaskState

OWN = "sparsesam"

_VERSION = 3

#: Kinds of saved tensors: masks, the last perturbation, the reverse of the last update (w_before - w).
KINDS = ("mask", "last", "back")

#: ``{kind: {parameter name: tensor}}``
OwnTensors = dict[str, dict[str, Tensor]]


class SharedState(UserDict[Tensor, Any]):
    """The base optimizer's state, in which each parameter also has the keys of sparsesam's tensors, set to None.

    torch's flattened checkpoints load only keys that they find here. Writes go to the base optimizer's state.
    """

    _places = dict.fromkeys(f"{OWN}_{kind}" for kind in KINDS)

    def __init__(self, state: dict[Tensor, Any]) -> None:
        self.data = state  # itself, not a copy

    def __getitem__(self, parameter: Tensor) -> MutableMapping[str, Any]:
        return ChainMap(self.data[parameter], self._places)

    def __setitem__(self, parameter: Tensor, entries: Mapping[str, Any]) -> None:
        self.data[parameter] = {key: value for key, value in entries.items() if key not in self._places}


def split_own(
    state_dict: Mapping[str, Any], names: Sequence[str] | None = None
) -> tuple[dict[str, Any], dict[str, Any] | None, OwnTensors]:
    """Split a checkpoint into the base optimizer's part, sparsesam's values (None: it has none) and its tensors.

    ``names`` are the parameter names in the checkpoint's order; default: the names saved in the checkpoint.
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
class SavedState:
    """``last`` is the last perturbation, ``back`` the reverse of the last update, w_before - w. Both hold the kept
    entries by parameter name, or are None if the optimizer never needs them.
    """

    masks: MaskState
    counters: Counters = field(default_factory=Counters)
    last: dict[str, Tensor] | None = None
    back: dict[str, Tensor] | None = None
    #: Whether there is a last perturbation to reuse; with sharded parameters, this rank's part of it may be empty.
    has_last: bool = False
    #: Whether ``last`` has only the entries that the masks keep; with ascent="implicit-dense" it has every weight.
    last_is_masked: bool = True

    def state_dict(self, parameters: Mapping[str, Tensor]) -> tuple[dict[str, Any], OwnTensors]:
        """Returns plain values, and tensors shaped like the parameters; the keys are the same after any step."""
        mask, masks = self.masks.state_dict(parameters)
        values = {**asdict(self.counters.read()), "version": _VERSION, "mask": mask}
        values |= {"last": self.has_last, "back": bool(self.back), "extrapolates": self.back is not None}
        tensors = {"mask": masks}
        if self.last is not None:
            tensors["last"] = dense_entries(self.last, self.masks.masks if self.last_is_masked else None, parameters)
        if self.back is not None:
            tensors["back"] = dense_entries(self.back, self.masks.masks, parameters)
        return values, tensors

    def loaded(self, values: Mapping[str, Any], tensors: OwnTensors, parameters: Mapping[str, Tensor]) -> SavedState:
        """Returns the state restored from what `state_dict` returned and `check_state_dict` accepted."""
        here = {
            kind: {name: one.to(parameters[name].device) for name, one in by_name.items() if name in parameters}
            for kind, by_name in tensors.items()
        }
        masks = MaskState(self.masks.rule)
        masks.load_state_dict(values["mask"], here.get("mask", {}), parameters)
        masks_of_last = masks.masks if self.last_is_masked else None
        last = kept_in(here.get("last", {}), masks_of_last, parameters) if values["last"] else {}
        last = {name: entries.reshape(-1) for name, entries in last.items()}
        back = kept_in(here.get("back", {}), masks.masks, parameters) if values["back"] else {}
        counters = Counters(**{key: values[key] for key in asdict(Counters())})
        return SavedState(masks, counters, last, back, values["last"], self.last_is_masked)


def check_state_dict(values: Mapping[str, Any], tensors: OwnTensors, now: SavedState, model: nn.Module) -> None:
    """Raise ValueError for a checkpoint that does not fit this optimizer, before anything is changed."""
    if values.get("version") != _VERSION:
        raise ValueError(
            f"the checkpoint must be of version {_VERSION}, got {values.get('version')}; "
            "load it with the sparsesam that wrote it"
        )
    extrapolates = now.back is not None
    if values["extrapolates"] != extrapolates:
        kinds = ["SAM or SSAM", "ExtrapolatedSAM"]
        raise ValueError(
            f"state_dict was saved by {kinds[values['extrapolates']]}, but this optimizer is {kinds[extrapolates]}, "
            "whose rho has another meaning; load it into an optimizer of the same kind"
        )
    MaskState(now.masks.rule).check_state_dict(values["mask"], tensors.get("mask", {}), model)
