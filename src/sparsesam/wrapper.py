"""A torch optimizer around a base optimizer, which shares the base's parameter groups, state and checkpoints."""

from __future__ import annotations

import functools
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from sparsesam.checkpoint import OWN, OwnState, SharedState, split_own, with_own
from sparsesam.distributed.ddp import unwrap
from sparsesam.distributed.shards import Shards, local_part, refuse_fsdp1
from sparsesam.gradients import gradients_of
from sparsesam.masks.mask import MaskRule
from sparsesam.options import check_group, check_keywords, option_keys
from sparsesam.perturbation import is_on_accelerator


class PerturbedParam(NamedTuple):
    """A parameter that is perturbed, against its gradient if the base optimizer is to ``maximize`` the loss.

    ``rho`` is a tensor if its group holds one on an accelerator (for CUDA graphs), which the host does not read.
    ``eta`` is ASAM's where T = |w| + eta, None where T = 1, or T = ||w|| with ``layerwise``.
    """

    name: str
    parameter: Tensor
    rho: float | Tensor
    eta: float | None
    layerwise: bool
    maximize: bool


class PerturbedParams:
    """The trainable parameters of the perturbed groups; valid while they are `is_current`.

    ``shards`` is their layout over the ranks; None: every rank holds whole tensors. ``renormalized`` are weights of
    embeddings with ``max_norm``: a forward rescales their rows in place, whatever the mask keeps.
    """

    def __init__(self, model: nn.Module, base: Optimizer, names: Mapping[Tensor, str], keys: Mapping[str, str]) -> None:
        self._base, self._keys, self._groups = base, keys, list(base.param_groups)  # references: no id is reused
        self._options, self._flags = self._now()
        self._params = list(_listed(base, names, keys))
        self.shards = Shards.of({param.name: param.parameter for param in self})
        embeddings = (m for m in model.modules() if getattr(m, "max_norm", None) is not None)
        weights = (getattr(m, "weight", None) for m in embeddings)
        self.renormalized = [weight for weight in weights if isinstance(weight, nn.Parameter)]
        self.names = {param.name for param in self}

    def _now(self) -> tuple[list[Any], list[bool]]:
        """What the list depends on: parameters and options of the groups, and the requires_grad flags."""
        keys = (*self._keys.values(), "maximize")
        groups = [
            (
                id(group),
                [id(group[key]) if is_on_accelerator(group.get(key)) else _read(group.get(key)) for key in keys],
                list(map(id, group["params"])),
            )
            for group in self._base.param_groups
        ]
        return groups, [parameter.requires_grad for group in self._base.param_groups for parameter in group["params"]]

    def is_current(self, *, flags: bool = True) -> bool:
        """Whether groups and their options are unchanged, and the requires_grad ``flags``."""
        options, now = self._now()
        return options == self._options and (now == self._flags or not flags)

    def __iter__(self) -> Iterator[PerturbedParam]:
        return iter(self._params)


def _listed(base: Optimizer, names: Mapping[Tensor, str], keys: Mapping[str, str]) -> Iterator[PerturbedParam]:
    for group in base.param_groups:
        rho, adaptive, eta, perturb = (group[key] for key in keys.values())
        # torch's optimizers hold it in their groups, others (pytorch-optimizer) in an attribute.
        maximize = bool(group.get("maximize", getattr(base, "maximize", False)))
        for parameter in group["params"] if perturb else ():
            if parameter.requires_grad:
                name = names[parameter]
                scales = adaptive == "all" or (adaptive and not name.rpartition(".")[2].endswith("bias"))  # as in ASAM
                layerwise = scales and adaptive == "layer"
                own_eta = float(eta) if scales and not layerwise else None
                yield PerturbedParam(name, parameter, _read(rho), own_eta, layerwise, maximize)


def _read(option: Any) -> Any:
    """Returns the value of a CPU tensor as a number; anything else unchanged."""
    return float(option) if isinstance(option, Tensor) and not is_on_accelerator(option) else option


def _names_of(model: nn.Module, base: Optimizer) -> dict[Tensor, str]:
    """Returns the names of the model's parameters; raises unless they include all of the optimizer's."""
    names: dict[Tensor, str] = {parameter: name for name, parameter in model.named_parameters()}
    optimized = [parameter for group in base.param_groups for parameter in group["params"]]
    unknown = sum(parameter not in names for parameter in optimized)
    if unknown:
        raise ValueError(
            f"model must own every parameter of the base optimizer, but {unknown} of {len(optimized)} are not in "
            f"{type(model).__name__}; pass the model the optimizer was made for, or an nn.ModuleList of all of them"
        )
    refuse_fsdp1(names)
    return names


Method = TypeVar("Method", bound=Callable[..., Any])
#: Attribute of the base with the options of its last wrapper. A later wrapper (a notebook cell that is run again)
#: replaces them, but not options that the user set in a group.
_WRAPPED_WITH = "_sparsesam_options"


def inside_wrappers(method: Method) -> Method:
    """Make a method act on the optimizer itself when it is called on the wrapper that Lightning or Fabric returns.

    That wrapper inherits from the optimizer's class and holds the optimizer in ``_optimizer``: it forwards reads of
    attributes, but not writes.
    """

    @functools.wraps(method)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        return method(self.__dict__.get("_optimizer", self), *args, **kwargs)

    return cast(Method, call)


class OptimizerWrapper(Optimizer):
    """Wraps any optimizer, with additional options in the parameter groups and additional state in checkpoints.

    ``param_groups`` and ``state`` are the base optimizer's own, so a scheduler may be attached to either of the two.
    """

    own: OwnState
    _names: dict[Tensor, str]  # of the model's parameters
    _wrapped: weakref.ref[nn.Module] | None = None  # the model as given, possibly a DistributedDataParallel
    _params: PerturbedParams | None = None

    def __new__(cls, *args: Any, **kwargs: Any) -> OptimizerWrapper:  # (typing.Self needs Python 3.11)
        check_keywords(kwargs)
        return super().__new__(cls)

    def __init__(self, base: Optimizer, model: nn.Module, own: OwnState, options: dict[str, Any]) -> None:
        if isinstance(base, OptimizerWrapper):
            raise TypeError(f"base must be a plain optimizer, got {type(base).__name__}; wrap its base instead")
        self.base, self.model = base, unwrap(model)
        given = {self._keys[option]: value for option, value in options.items()}
        self.defaults = {**base.defaults, **given}
        # torch's hooks, without Optimizer.__init__, which would create a second set of parameter groups.
        Optimizer.__setstate__(self, {})
        for group in base.param_groups:
            for key, earlier in base.__dict__.get(_WRAPPED_WITH, {}).items():
                value = group.pop(f"initial_{key}", group.get(key, earlier))  # a schedule may have changed it
                group.pop(key, None)
                if value != earlier:
                    group[key] = value
        base.__dict__[_WRAPPED_WITH] = given
        self._wrapped = weakref.ref(model)
        self._perturbed_params()
        self._start(own)

    def _start(self, own: OwnState) -> None:
        """Continue from this state; also called for a copy and for a loaded checkpoint."""
        self.own = own

    def __getstate__(self) -> dict[str, Any]:
        """Copies hold the public attributes; others, and methods that a scheduler has replaced, are made anew."""
        held = self.__dict__.items()
        return {key: value for key, value in held if key[0] != "_" and not callable(getattr(type(self), key, None))}

    def __setstate__(self, state: dict[str, Any]) -> None:
        Optimizer.__setstate__(self, state)
        self._perturbed_params()
        self._start(state["own"])

    def __repr__(self) -> str:
        shown = [f"{key}={self.defaults[key]!r}" for option, key in self._keys.items() if option != "perturb"]
        shown += [] if self.mask is None else [f"mask={type(self.mask).__name__}"]
        place = f"    {OWN}: {self.base.param_groups[0].get(OWN)}\n"
        return f"{type(self).__name__}({', '.join(shown)}) around {repr(self.base).replace(place, '')}"

    @property
    def mask(self) -> MaskRule | None:
        """The rule that makes the masks; None: every weight is perturbed."""
        return self.own.masks.rule

    @functools.cached_property
    def _keys(self) -> dict[str, str]:
        return option_keys(self.base)

    @property
    def rho_key(self) -> str:
        """The key of rho in each parameter group: ``"rho"``, or ``"sam_rho"`` if the base has a rho of its own."""
        return self._keys["rho"]

    @property
    def _ddp(self) -> DistributedDataParallel | None:
        """The DistributedDataParallel that the optimizer was given as its model."""
        wrapped = None if self._wrapped is None else self._wrapped()
        return wrapped if isinstance(wrapped, DistributedDataParallel) else None

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        return self.base.param_groups

    @property
    def state(self) -> SharedState:  # type: ignore[override]
        return SharedState(self.base.state, self.own.kinds)

    @inside_wrappers
    def add_param_group(self, param_group: dict[str, Any]) -> None:
        self.base.add_param_group(param_group)
        try:
            self._perturbed_params()
        except ValueError:
            self.base.param_groups.pop()
            raise

    def state_dict(self) -> dict[str, Any]:
        """Returns the base optimizer's state dict with sparsesam's state added; safe for ``weights_only=True``."""
        for before in self._optimizer_state_dict_pre_hooks.values():
            before(self)
        perturbed = {p.name: p.parameter for p in self._perturbed_params()}
        trained = {self._names[p]: p for group in self.param_groups for p in group["params"] if p.requires_grad}
        values, tensors = self.own.state_dict(perturbed, trained)
        state = with_own(self.base.state_dict(), {**values, "names": self._names_in_order}, tensors)
        for after in self._optimizer_state_dict_post_hooks.values():
            state = after(self, state) or state
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a checkpoint of this optimizer, or of the bare base optimizer (a run that began without SAM)."""
        state_dict = dict(state_dict)
        for before in self._optimizer_load_state_dict_pre_hooks.values():
            state_dict = before(self, state_dict) or state_dict
        # By position, as torch.optim does: torch.distributed.checkpoint has reordered everything for this optimizer.
        plain, own, tensors = split_own(state_dict, self._names_in_order)
        if own is None:
            warnings.warn(
                "the checkpoint is from a bare base optimizer: its state is loaded, step counters and masks are reset",
                stacklevel=2,
            )
            loaded = self.own.reset()
        else:
            loaded = self.own.loaded(own, tensors, self.model, self._parameters)  # raises before anything is changed
        for saved, group in zip(plain["param_groups"], self.param_groups, strict=False):
            for key in self._keys.values():
                saved.setdefault(key, group.get(f"initial_{key}", group[key]))  # a scheduled rho restarts
        self.base.load_state_dict(plain)
        self._start(loaded)
        self._perturbed_params()
        for hook in self._optimizer_load_state_dict_post_hooks.values():
            hook(self)

    @property
    def _parameters(self) -> dict[str, torch.Tensor]:
        return {name: parameter for parameter, name in self._names.items()}

    @property
    def _names_in_order(self) -> list[str]:
        return [self._names[parameter] for group in self.param_groups for parameter in group["params"]]

    def _only_makes_state(self) -> bool:
        """Whether this is the step by which torch.distributed.checkpoint initializes the base optimizer's state.

        It sets every learning rate and every gradient to zero, so that no weight changes.
        """
        rates = [float(group["lr"]) for group in self.param_groups if "lr" in group]
        still = not self.base.state and bool(rates) and not any(rates)
        return still and all(not bool(local_part(gradient).any()) for gradient in gradients_of(self.base))

    def _perturbed_params(self) -> PerturbedParams:
        """Returns the parameters to perturb, after completing and checking their groups."""
        if self._params is None or not self._params.is_current():
            for group in self.param_groups:
                self._complete(group)
            # torch's flattened state dicts load only the keys that they find in a group.
            self.param_groups[0].setdefault(OWN, None)
            optimized = (parameter for group in self.param_groups for parameter in group["params"])
            if self._params is None or any(parameter not in self._names for parameter in optimized):
                self._names = _names_of(self.model, self.base)
            self._params = PerturbedParams(self.model, self.base, self._names, self._keys)
        return self._params

    def _complete(self, group: dict[str, Any]) -> None:
        for key in self._keys.values():
            group.setdefault(key, self.defaults[key])
        check_group(group, self._keys)
