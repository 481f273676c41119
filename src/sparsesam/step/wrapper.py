"""A torch optimizer around a base optimizer, which shares the base's parameter groups, state and checkpoints."""

from __future__ import annotations

import functools
import warnings
import weakref
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from sparsesam.distributed.ddp import unwrap
from sparsesam.distributed.join import JoinableOptimizer
from sparsesam.distributed.shards import local_part, refuse_fsdp1
from sparsesam.masks.mask import MaskRule
from sparsesam.masks.state import MaskState
from sparsesam.step.checkpoint import OWN, SavedState, SharedState, check_state_dict, split_own, with_own
from sparsesam.step.context import StepContext
from sparsesam.step.gradients import gradients_of
from sparsesam.step.parameters import PerturbedParams, check_base, check_call, check_group, named, option_keys
from sparsesam.step.settings import Settings

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


class OptimizerWrapper(Optimizer, JoinableOptimizer):
    """Wraps any optimizer, with additional options in the parameter groups and additional state in checkpoints.

    ``param_groups`` and ``state`` are the base optimizer's own, so a scheduler may be attached to either of the two.
    """

    settings: Settings
    _context: StepContext
    _wrapped: weakref.ref[nn.Module] | None = None  # the model as given, possibly a DistributedDataParallel
    _params: PerturbedParams | None = None

    def __new__(cls, *args: Any, **kwargs: Any) -> OptimizerWrapper:  # (typing.Self needs Python 3.11)
        cls._check_call(args, kwargs)
        return super().__new__(cls)

    @classmethod
    def _check_call(cls, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        check_call(cls.__name__, args, kwargs)

    def __init__(
        self, base: Optimizer, model: nn.Module, settings: Settings, mask: MaskRule | None, options: dict[str, Any]
    ) -> None:
        check_base(base)
        if isinstance(base, OptimizerWrapper):
            raise TypeError(f"base must be a plain optimizer, got {type(base).__name__}; wrap its base instead")
        self.base = base
        self.model = unwrap(model)
        keys = option_keys(base)
        own = {keys[option]: value for option, value in options.items()}
        self.defaults = {**base.defaults, **own}
        self._init_bases({})
        earlier = base.__dict__.get(_WRAPPED_WITH, {})
        for group in base.param_groups:
            for key, value in earlier.items():
                before = group.pop(f"initial_{key}", group.get(key))  # a schedule may have changed it
                group.pop(key, None)
                if before is not None and before != value:
                    group[key] = before
            self._complete(group)
        base.__dict__[_WRAPPED_WITH] = own
        self._keep_place()
        self._names = named(self.model, base)
        refuse_fsdp1(self._names)
        self.settings = settings
        self._wrapped = weakref.ref(model)
        self._start(SavedState(MaskState(mask)))

    def _init_bases(self, state: dict[str, Any]) -> None:
        """Set up torch's hooks without Optimizer.__init__, which would create a second set of parameter groups."""
        Optimizer.__setstate__(self, state)
        JoinableOptimizer.__init__(self)

    def _start(self, saved: SavedState) -> None:
        """Create what is not saved; also called for a copy and for a loaded checkpoint."""
        wrapped = None if self._wrapped is None else self._wrapped()
        self._context = StepContext(self.model, self.base, self.settings, saved, wrapped or self.model)

    def __getstate__(self) -> dict[str, Any]:
        kept = {key: self.__dict__[key] for key in ("base", "model", "defaults", "settings")}
        return {**kept, "saved": self._context.saved}

    def __setstate__(self, state: dict[str, Any]) -> None:
        saved = state.pop("saved")
        self._init_bases(state)
        self._names = named(self.model, self.base)
        self._start(saved)

    @property
    def mask(self) -> MaskRule | None:
        """The rule that makes the masks; None: every weight is perturbed."""
        return self._context.masks.rule

    @property
    def _ddp(self) -> DistributedDataParallel | None:
        return self._context.engine.ddp

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        return self.base.param_groups

    @property
    def state(self) -> SharedState:  # type: ignore[override]
        return SharedState(self.base.state)

    @property
    def train(self) -> Callable[[], None]:
        """The base optimizer's own ``train()``, where it has one (schedule-free optimizers)."""
        return self._mode("train")

    @property
    def eval(self) -> Callable[[], None]:
        """The base optimizer's own ``eval()``, where it has one (schedule-free optimizers)."""
        return self._mode("eval")

    def _mode(self, name: str) -> Callable[[], None]:
        switch: Callable[[], None] = getattr(self.base, name)  # so that hasattr(opt, "train") is that of the base
        return switch

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
        """Returns the base optimizer's state dict with sparsesam's state added; safe for ``weights_only=True``."""
        for before in self._optimizer_state_dict_pre_hooks.values():
            before(self)
        values, tensors = self._context.saved.state_dict({p.name: p.parameter for p in self._perturbed_params()})
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
        else:
            check_state_dict(own, tensors, self._context.saved, self.model)
        # A scheduled rho restarts from its initial value.
        keys = option_keys(self.base).values()
        options = [{key: group.get(f"initial_{key}", group[key]) for key in keys} for group in self.param_groups]
        self.base.load_state_dict(plain)
        for group, mine in zip(self.param_groups, options, strict=True):
            for key, value in mine.items():
                group.setdefault(key, value)
        self._keep_place()
        self._names = named(self.model, self.base)
        if own is None:
            self._start(SavedState(MaskState(self.mask)))
        else:
            self._start(self._context.saved.loaded(own, tensors, self._parameters))
        for hook in self._optimizer_load_state_dict_post_hooks.values():
            hook(self)

    @property
    def _parameters(self) -> dict[str, torch.Tensor]:
        return {name: parameter for parameter, name in self._names.items()}

    @property
    def _names_in_order(self) -> list[str]:
        return [self._names[parameter] for group in self.param_groups for parameter in group["params"]]

    def _keep_place(self) -> None:
        """Add the key to the groups: torch's flattened state dicts load only the keys that they find there."""
        if self.base.param_groups:
            self.base.param_groups[0].setdefault(OWN, None)

    def _only_makes_state(self) -> bool:
        """Whether this is the step by which torch.distributed.checkpoint initializes the base optimizer's state.

        It sets every learning rate and every gradient to zero, so that no weight changes.
        """
        rates = [float(group["lr"]) for group in self.param_groups if "lr" in group]
        still = not self.base.state and bool(rates) and not any(rates)
        return still and all(not bool(local_part(gradient).any()) for gradient in gradients_of(self.base))

    def _perturbed_params(self) -> PerturbedParams:
        """Returns the parameters to perturb, after completing and checking their groups."""
        if self._params is None or not self._params.is_current:
            for group in self.param_groups:
                self._complete(group)
            refuse_fsdp1(self._names)
            if any(parameter not in self._names for group in self.param_groups for parameter in group["params"]):
                self._names = named(self.model, self.base)
            self._params = PerturbedParams(self.model, self.base, self._names)
        return self._params

    def _complete(self, group: dict[str, Any]) -> None:
        keys = option_keys(self.base)
        for key in keys.values():
            group.setdefault(key, self.defaults[key])
        check_group(group, keys)
