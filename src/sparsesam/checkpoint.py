"""Where a checkpoint holds what is ours: in the base optimizer's state dict, so that torch's tools carry it along.

Plain values are in the first parameter group, under `OWN`; tensors are in the parameters' state, under keys that begin
with it. torch.distributed.checkpoint keeps nothing else.
"""

from __future__ import annotations

import itertools
from collections import ChainMap
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from typing import Any

from torch import Tensor

OWN = "sparsesam"

#: The kinds of tensors that there may be: masks, the last perturbation, the way back from the last update.
KINDS = ("mask", "last", "back")

#: By kind and parameter name.
OwnTensors = dict[str, dict[str, Tensor]]


class SharedState(MutableMapping[Tensor, MutableMapping[str, Any]]):
    """The base optimizer's state, where each parameter also shows the names of our tensors, as None.

    torch's flattened checkpoints load only what they find here. What is written goes to the base optimizer.
    """

    _places = dict.fromkeys(f"{OWN}_{kind}" for kind in KINDS)

    def __init__(self, state: MutableMapping[Tensor, Any]) -> None:
        self._state = state

    def __getitem__(self, parameter: Tensor) -> MutableMapping[str, Any]:
        return ChainMap(self._state[parameter], self._places)

    def __setitem__(self, parameter: Tensor, entries: Mapping[str, Any]) -> None:
        self._state[parameter] = {key: value for key, value in entries.items() if key not in self._places}

    def __delitem__(self, parameter: Tensor) -> None:
        del self._state[parameter]

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self._state)

    def __len__(self) -> int:
        return len(self._state)


def split_own(
    state_dict: Mapping[str, Any], names: Sequence[str] | None = None
) -> tuple[dict[str, Any], dict[str, Any] | None, OwnTensors]:
    """The base optimizer's part of a checkpoint, our values (None: there are none) and our tensors.

    ``names`` of the parameters, in the order of the checkpoint's; without them, those of the optimizer that saved it.
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
            elif place in known and isinstance(value, Tensor):  # a flattened checkpoint has {} for what it lacks
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
