"""Records, in one forward, the calls that parameters are arguments of and, in its backward, their output gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from sparsesam.masks.batches import leads_with
from sparsesam.masks.layer_rules import FUNCTIONS, Call, Rule, bound


@dataclass
class Use:
    """One call that parameters are arguments of, with its results and later the gradients at them."""

    function: Any
    arguments: tuple[tuple[Any, ...], dict[str, Any]]
    outputs: list[Tensor]
    versions: list[tuple[Tensor, int]]
    waiting: set[str]  # names of parameters that are not measured yet
    grads: list[Tensor | None] = field(default_factory=list)

    @property
    def name(self) -> str:
        is_module = isinstance(self.function, nn.Module)
        return type(self.function).__name__ if is_module else str(getattr(self.function, "__name__", self.function))

    def is_unchanged(self) -> bool:
        return all(tensor._version == version for tensor, version in self.versions)

    def received(self) -> list[int]:
        """The results that have a gradient; the others do not reach the loss."""
        return [place for place, grad in enumerate(self.grads) if grad is not None]

    def done(self, name: str) -> None:
        """Free the activations when no parameter needs them any more: hooks live as long as the graph."""
        self.waiting.discard(name)
        if not self.waiting:
            self.arguments, self.outputs, self.versions, self.grads = ((), {}), [], [], []

    def of_sample(self, index: int, size: int) -> list[Tensor]:
        """The results of one sample, computed again."""

        def part(leaf: Any) -> Any:
            by_sample = leads_with(leaf, size) and not isinstance(leaf, nn.Parameter)
            return leaf[index : index + 1] if by_sample else leaf

        args, kwargs = tree_map(part, self.arguments)
        return floating(self.function(*args, **kwargs))


class Recorder(TorchFunctionMode):
    """Records the calls of torch functions that the wanted parameters are arguments of, during one forward.

    The modules in ``whole``, and those whose parameters are not used sample by sample inside (attention, recurrent and
    re-parametrized layers), are recorded as one call. Parameters require no gradient then, so a result that needs none
    is made a leaf: nothing upstream of it is differentiated.
    """

    def __init__(self, model: nn.Module, wanted: Mapping[str, Tensor], size: int, whole: set[nn.Module]) -> None:
        super().__init__()
        self.size, self.wanted = size, wanted
        self.names = {id(parameter): name for name, parameter in wanted.items()}
        self.uses: dict[str, list[Use]] = {}
        self.mixed: set[str] = set()  # used in a call that does not keep samples apart
        self.leaves: list[Tensor] = []
        self.on_grads: Callable[[str], None] = lambda name: None
        hookable = [module for module in model.modules() if not isinstance(module, torch.jit.ScriptModule)]
        self._whole = [module for module in hookable if module in whole or _is_one_call(module)]
        self._within: list[list[tuple[Tensor, int]]] = []

    @contextmanager
    def watch(self) -> Iterator[None]:
        handles = [m.register_forward_pre_hook(self._enter, with_kwargs=True) for m in self._whole]
        handles += [
            m.register_forward_hook(self._leave, prepend=True, with_kwargs=True, always_call=True) for m in self._whole
        ]
        try:
            with self:
                yield
        finally:
            for handle in handles:
                handle.remove()

    def rule_of(self, name: str) -> Rule | None:
        """The rule for all uses of a parameter, if there is one."""
        uses, parameter = self.uses[name], self.wanted[name]
        if uses[0].function not in FUNCTIONS or any(use.function != uses[0].function for use in uses):
            return None
        known, places = FUNCTIONS[uses[0].function], set[str]()
        for use in uses:
            arguments = bound(use.function, *use.arguments)
            places.update(key for key, value in arguments.items() if value is parameter)
            by_sample = places == {"input"} or leads_with(arguments["input"], self.size)
            if not (by_sample and len(use.grads) == 1 and known.accepts(arguments)):
                return None
        return known.rules.get(places.pop()) if len(places) == 1 else None

    def calls_of(self, name: str) -> list[Call]:
        """The calls of a parameter that reach the loss."""
        return [
            Call(bound(use.function, *use.arguments), grad)
            for use in self.uses[name]
            if (grad := use.grads[0]) is not None
        ]

    def done(self, name: str) -> None:
        for use in self.uses.pop(name):
            use.done(name)

    def release(self) -> None:
        """Free activations now: hooks refer to the recorder, and this cycle would keep them alive."""
        self.on_grads = lambda name: None
        self.uses, self.leaves = {}, []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        names = set() if self._within else self._names_in((args, kwargs))
        if not names:
            return func(*args, **kwargs)
        versions = _versions((args, kwargs))
        return self._record(func, args, kwargs, func(*args, **kwargs), versions, names)

    def _names_in(self, tree: Any) -> set[str]:
        return {self.names[id(leaf)] for leaf in tree_leaves(tree) if id(leaf) in self.names}

    def _enter(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        self._within.append(_versions((args, kwargs)))

    def _leave(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        versions = self._within.pop()
        names = {self.names[id(p)] for p in module.parameters() if id(p) in self.names}
        return None if self._within or not names else self._record(module, args, kwargs, output, versions, names)

    def _record(
        self, function: Any, args: Any, kwargs: Any, result: Any, versions: list[tuple[Tensor, int]], names: set[str]
    ) -> Any:
        flat, structure = tree_flatten(result)
        places = [i for i, leaf in enumerate(flat) if isinstance(leaf, Tensor) and leaf.is_floating_point()]
        if not places or id(result) in self.names:  # a shape or a data type; the parameter as it is
            return result
        is_known = function in FUNCTIONS
        outputs = [flat[i].detach() if is_known else flat[i].detach().clone() for i in places]
        arguments = tree_map(self._detached, (args, kwargs))
        use = Use(function, arguments, outputs, versions, names, [None] * len(places))
        # A state that is not laid out by samples may come along, as long as nothing uses it.
        if not any(leads_with(one, self.size) for one in outputs) or not use.is_unchanged():
            self.mixed |= names
            return result
        for name in names:
            self.uses.setdefault(name, []).append(use)
        for number, place in enumerate(places):
            flat[place] = self._exposed(flat[place], copy=isinstance(function, nn.Module))
            flat[place].register_hook(self._receiver(use, number))
        return tree_unflatten(flat, structure)

    def _detached(self, leaf: Any) -> Any:
        """A parameter stays itself, to be differentiated where the call is repeated."""
        return leaf.detach() if isinstance(leaf, Tensor) and id(leaf) not in self.names else leaf

    def _exposed(self, tensor: Tensor, copy: bool) -> Tensor:
        """The result to hook: a copy where it is a leaf or has consumers inside the module."""
        if not tensor.requires_grad:
            tensor = tensor.detach().requires_grad_()
            self.leaves.append(tensor)
            return tensor.clone()
        return tensor.clone() if copy else tensor

    def _receiver(self, use: Use, number: int) -> Callable[[Tensor], None]:
        def receive(grad: Tensor) -> None:
            if use.waiting:
                use.grads[number] = grad.detach()
                for name in list(use.waiting):
                    if all(len(other.received()) == len(other.grads) for other in self.uses[name]):
                        self.on_grads(name)

        return receive


def _is_one_call(module: nn.Module) -> bool:
    return isinstance(module, (nn.MultiheadAttention, nn.RNNBase)) or is_parametrized(module)


def _versions(tree: Any) -> list[tuple[Tensor, int]]:
    return [(leaf, leaf._version) for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def floating(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor) and leaf.is_floating_point()]
