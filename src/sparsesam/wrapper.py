"""A wrapper that torch takes for an optimizer: groups, state, hooks and checkpoints are the base optimizer's."""

from __future__ import annotations

import functools
import itertools
import warnings
from abc import abstractmethod
from collections import ChainMap
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any, ClassVar, TypeVar, cast

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.algorithms.join import Joinable, JoinHook
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from sparsesam.distributed import StateJoinHook, local_part, refuse_fsdp1
from sparsesam.parameters import (
    PerturbedParam,
    check_base,
    check_call,
    check_group,
    gradients_of,
    named,
    option_keys,
    perturbed_params,
    unwrap,
)

#: Where a checkpoint holds what is ours: values in the first parameter group, under this key, and tensors in the
#: parameters' state, under keys that begin with it. torch.distributed.checkpoint keeps nothing else.
OWN = "sparsesam"

#: By kind (such as "mask") and parameter name.
OwnTensors = dict[str, dict[str, Tensor]]

Method = TypeVar("Method", bound=Callable[..., Any])


def inside_wrappers(method: Method) -> Method:
    """Act on the optimizer itself when called on the object that Lightning or Fabric hands out in its place.

    That object inherits from the optimizer's class and holds the optimizer in ``_optimizer``: it reads attributes
    there, but would keep to itself what is written.
    """

    @functools.wraps(method)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        return method(self.__dict__.get("_optimizer", self), *args, **kwargs)

    return cast(Method, call)


class OptimizerWrapper(Optimizer, Joinable):
    """Around any optimizer, with options of its own in the parameter groups and state of its own in checkpoints.

    ``param_groups`` and ``state`` are the base optimizer's own, so a scheduler may drive either of the two.
    """

    #: What `_perturbed_params` has listed last: groups (held, so that their ids stay theirs), what it saw, the list.
    _listed: tuple[list[dict[str, Any]], list[Any], list[PerturbedParam]] = ([], [], [])
    #: The kinds of tensors that `_own_state` may give.
    own_tensors: ClassVar[tuple[str, ...]] = ()
    _ended_join: object = None  # by what torch has marked DistributedDataParallel in a Join that is over

    def __new__(cls, *args: Any, **kwargs: Any) -> OptimizerWrapper:  # (typing.Self needs Python 3.11)
        cls._check_call(args, kwargs)
        return super().__new__(cls)

    @classmethod
    def _check_call(cls, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        check_call(cls.__name__, args, kwargs)

    def __init__(self, base: Optimizer, model: nn.Module, options: dict[str, Any]) -> None:
        check_base(base)
        if isinstance(base, OptimizerWrapper):
            raise TypeError(f"base must be a plain optimizer, got {type(base).__name__}; wrap its base instead")
        self.base = base
        self.model = unwrap(model)
        keys = option_keys(base)
        self.defaults = {**base.defaults, **{keys[option]: value for option, value in options.items()}}
        # torch's own hooks; its __init__ would make a second set of parameter groups.
        OptimizerWrapper.__setstate__(self, {})
        for group in base.param_groups:
            self._complete(group)
        self._keep_place()
        self._names = named(self.model, base)
        refuse_fsdp1(self._names)

    @abstractmethod
    def _own_state(self) -> tuple[dict[str, Any], OwnTensors]:
        """What a checkpoint holds beside the base optimizer's state: plain values, and tensors like the parameters.

        Which tensors there are must not depend on the steps taken: torch.distributed.checkpoint loads into what it
        finds.
        """

    @abstractmethod
    def _check_own_state(self, own: dict[str, Any], tensors: OwnTensors) -> None:
        """Refuse a state that does not fit, before anything changes."""

    @abstractmethod
    def _load_own_state(self, own: dict[str, Any] | None, tensors: OwnTensors) -> None:
        """Take over a checked state; None: the checkpoint was the bare base optimizer's."""

    def __setstate__(self, state: dict[str, Any]) -> None:
        Optimizer.__setstate__(self, state)
        Joinable.__init__(self)

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        return self.base.param_groups

    @property
    def state(self) -> SharedState:  # type: ignore[override]
        return SharedState(self.base.state, self.own_tensors)

    @property
    def train(self) -> Callable[[], None]:
        """The base optimizer's own ``train()``, where it has one (schedule-free optimizers)."""
        return self._mode("train")

    @property
    def eval(self) -> Callable[[], None]:
        """The base optimizer's own ``eval()``, where it has one (schedule-free optimizers)."""
        return self._mode("eval")

    def _mode(self, name: str) -> Callable[[], None]:
        switch: Callable[[], None] = getattr(self.base, name)  # hasattr(opt, "train") is that of the base
        return switch

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.base.zero_grad(set_to_none)

    @inside_wrappers
    def add_param_group(self, param_group: dict[str, Any]) -> None:
        self.base.add_param_group(param_group)
        try:
            self._names = named(self.model, self.base)
            self._complete(self.base.param_groups[-1])
        except ValueError:
            self.base.param_groups.pop()
            raise

    def state_dict(self) -> dict[str, Any]:
        """The base optimizer's checkpoint with our values and tensors in it; safe for ``weights_only=True``."""
        for before in self._optimizer_state_dict_pre_hooks.values():
            before(self)
        values, tensors = self._own_state()
        state = _with_own(self.base.state_dict(), {**values, "names": self._names_in_order}, tensors)
        for after in self._optimizer_state_dict_post_hooks.values():
            state = after(self, state) or state
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a checkpoint of this optimizer, or of the bare base optimizer (a run that began without SAM)."""
        state_dict = dict(state_dict)
        for before in self._optimizer_load_state_dict_pre_hooks.values():
            state_dict = before(self, state_dict) or state_dict
        # By place, as torch.optim does: torch.distributed.checkpoint has put everything in this optimizer's order.
        plain, own, tensors = split_own(state_dict, self._names_in_order)
        if own is None:
            warnings.warn(
                "the checkpoint is of a bare base optimizer: its state is loaded, step counters and masks start anew",
                stacklevel=2,
            )
        else:
            self._check_own_state(own, tensors)
        # A scheduled rho begins again where it began.
        keys = option_keys(self.base).values()
        options = [{key: group.get(f"initial_{key}", group[key]) for key in keys} for group in self.param_groups]
        self.base.load_state_dict(plain)
        for group, mine in zip(self.param_groups, options, strict=True):
            for key, value in mine.items():
                group.setdefault(key, value)
        self._keep_place()
        self._names = named(self.model, self.base)
        self._load_own_state(own, tensors)
        for hook in self._optimizer_load_state_dict_post_hooks.values():
            hook(self)

    @property
    def _names_in_order(self) -> list[str]:
        return [self._names[parameter] for group in self.param_groups for parameter in group["params"]]

    def _keep_place(self) -> None:
        """torch's flattened state dicts load only the keys that they find in the groups."""
        if self.base.param_groups:
            self.base.param_groups[0].setdefault(OWN, None)

    def _only_makes_state(self) -> bool:
        """Whether a step is the one by which torch.distributed.checkpoint has the base optimizer make its state.

        It sets every learning rate and every gradient to zero, so that nothing moves.
        """
        rates = [float(group["lr"]) for group in self.param_groups if "lr" in group]
        still = not self.base.state and bool(rates) and not any(rates)
        return still and all(not bool(local_part(gradient).any()) for gradient in gradients_of(self.base))

    # ---- torch.distributed.algorithms.Join ---------------------------------------------------------------

    def join_hook(self, **_: Any) -> JoinHook:
        return StateJoinHook(self, self.join_process_group)

    @property
    def join_device(self) -> torch.device:
        return next(iter(self._names)).device

    @property
    def join_process_group(self) -> Any:
        return dist.group.WORLD

    @property
    def _is_joining(self) -> bool:
        return bool(self._join_config.enable)

    @property
    def _ddp(self) -> DistributedDataParallel | None:
        """What the model is wrapped in, as far as known."""
        return None

    def _check_join(self) -> None:
        """Ranks that stop early must take over counters and masks, or later refreshes would wait for them forever."""
        mark = None if self._ddp is None else self._ddp._join_config
        if mark is not None and mark.enable and mark is not self._ended_join and not self._is_joining:
            raise RuntimeError("Join must have the optimizer too: write `with Join([model, opt]):`")
        if self._is_joining and self._join_config.is_first_joinable:
            raise RuntimeError("Join must have the model first: write `with Join([model, opt]):`")

    def _end_join(self) -> None:
        """torch marks its Joinables when a Join is made, and does not unmark them when it is over."""
        self._ended_join = None if self._ddp is None else self._ddp._join_config
        Joinable.__init__(self)

    def _perturbed_params(self) -> list[PerturbedParam]:
        """The parameters that take part in an ascent now, their groups completed and checked.

        The same list as before if nothing has changed that it depends on: small networks feel what a step looks at.
        """
        options = (*option_keys(self.base).values(), "maximize")
        seen = [
            (
                id(group),
                [group.get(key) for key in options],
                list(map(id, group["params"])),
                [parameter.requires_grad for parameter in group["params"]],
            )
            for group in self.param_groups
        ]
        _, before, params = self._listed
        if before != seen:
            for group in self.param_groups:
                self._complete(group)
            refuse_fsdp1(self._names)
            if any(parameter not in self._names for group in self.param_groups for parameter in group["params"]):
                self._names = named(self.model, self.base)
            params = list(perturbed_params(self.base, self._names))
            self._listed = list(self.param_groups), seen, params
        return params

    def _complete(self, group: dict[str, Any]) -> None:
        keys = option_keys(self.base)
        for key in keys.values():
            group.setdefault(key, self.defaults[key])
        check_group(group, keys)


class SharedState(MutableMapping[Tensor, MutableMapping[str, Any]]):
    """The base optimizer's state, where each parameter also shows the names of our tensors, as None.

    torch's flattened checkpoints load only what they find here. What is written goes to the base optimizer.
    """

    def __init__(self, state: MutableMapping[Tensor, Any], kinds: Iterable[str]) -> None:
        self._state = state
        self._places = dict.fromkeys(f"{OWN}_{kind}" for kind in kinds)

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


def _with_own(state_dict: dict[str, Any], values: dict[str, Any], tensors: OwnTensors) -> dict[str, Any]:
    groups = [dict(group) for group in state_dict["param_groups"]]
    state = {key: dict(entries) for key, entries in state_dict["state"].items()}
    groups[0][OWN] = values
    places = itertools.chain.from_iterable(group["params"] for group in groups)
    for place, name in zip(places, values["names"], strict=True):
        for kind, by_name in tensors.items():
            if name in by_name:
                state.setdefault(place, {})[f"{OWN}_{kind}"] = by_name[name]
    return {**state_dict, "state": state, "param_groups": groups}
