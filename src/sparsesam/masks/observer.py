"""Observes one forward: where parameters are used, the inputs of each layer and the gradients at its outputs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from sparsesam.masks.batches import leads_with
from sparsesam.masks.layer_rules import Rule


@dataclass
class CapturedCall:
    """One call of a module: its arguments, its outputs, and later the gradients at the outputs."""

    arguments: tuple[tuple[Any, ...], dict[str, Any]]
    outputs: list[Tensor]
    versions: list[tuple[Tensor, int]]
    grads: list[Tensor | None]

    def complete(self) -> bool:
        return all(grad is not None for grad in self.grads)

    def received(self) -> bool:
        return any(grad is not None for grad in self.grads)

    def separable(self, size: int) -> bool:
        return all(grad is None or leads_with(grad, size) for grad in self.grads)

    def release(self) -> None:
        self.arguments, self.outputs, self.versions, self.grads = ((), {}), [], [], []


@dataclass
class FisherPlan:
    """The method for each parameter: a layer's rule, re-running a module, or the loop over the model."""

    rules: dict[nn.Module, tuple[str, Rule, dict[str, str]]] = field(default_factory=dict)
    reruns: dict[nn.Module, list[str]] = field(default_factory=dict)
    looped: set[str] = field(default_factory=set)

    def module_of(self) -> dict[str, nn.Module]:
        """The module every use of a parameter must be inside of."""
        places = {name: module for module, names in self.reruns.items() for name in names}
        for module, (_, _, names) in self.rules.items():
            places.update(dict.fromkeys(names.values(), module))
        return places

    def names_in(self, module: nn.Module) -> list[str]:
        ruled = self.rules[module][2].values() if module in self.rules else ()
        return [*ruled, *self.reruns.get(module, ())]

    def loop(self, names: Iterable[str]) -> None:
        """Measure these parameters by the loop over the model from now on."""
        moved = set(names)
        self.looped |= moved
        for module, (kind, rule, own) in list(self.rules.items()):
            self.rules[module] = (kind, rule, {k: v for k, v in own.items() if v not in moved})
        self.rules = {module: entry for module, entry in self.rules.items() if entry[2]}
        kept = {module: [n for n in names if n not in moved] for module, names in self.reruns.items()}
        self.reruns = {module: names for module, names in kept.items() if names}


class Observer(TorchFunctionMode):
    """Sees, during one forward, where parameters are used and which module calls keep samples apart.

    Inputs of the plan's modules are kept and their outputs hooked. Parameters require no gradient then, so
    an output that needs none is made a leaf: nothing upstream of it is differentiated.
    """

    def __init__(self, model: nn.Module, wanted: Mapping[str, Tensor], plan: FisherPlan, size: int) -> None:
        super().__init__()
        self.plan, self.size = plan, size
        self.names = {id(parameter): name for name, parameter in wanted.items()}
        self.modules = list(_hookable_modules(model))
        self.stack: list[nn.Module] = []
        self.uses: dict[str, set[tuple[nn.Module, ...]]] = {}
        self.separate: dict[nn.Module, bool] = {}
        self.runs: dict[nn.Module, list[CapturedCall]] = {}
        self.leaves: list[Tensor] = []
        self.inputs: list[list[tuple[Tensor, int]]] = []
        self.watching = False
        self.on_grads: Callable[[nn.Module], None] = lambda module: None

    @contextmanager
    def watch(self) -> Iterator[None]:
        handles = [m.register_forward_pre_hook(self._enter, prepend=True, with_kwargs=True) for m in self.modules]
        handles += [m.register_forward_hook(self._leave, prepend=True, with_kwargs=True) for m in self.modules]
        self.watching = True
        try:
            with self:
                yield
        finally:
            self.watching = False
            for handle in handles:
                handle.remove()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        used = self._parameters_in((args, kwargs)) if _holds_tensor(result) else ()
        for name in used:
            self.uses.setdefault(name, set()).add(tuple(self.stack))
        return result

    def _parameters_in(self, arguments: Any) -> list[str]:
        if isinstance(arguments, Tensor):
            name = self.names.get(id(arguments))
            return [] if name is None else [name]
        if isinstance(arguments, dict):
            arguments = arguments.values()
        elif not isinstance(arguments, (tuple, list)):
            return []
        return [name for argument in arguments for name in self._parameters_in(argument)]

    def _enter(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if self.watching:
            self.stack.append(module)
            self.inputs.append([(t, t._version) for t in tensors_of((args, kwargs))])

    def _leave(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        if not self.watching:
            return None
        # A call that raised left its entry behind if the model caught the exception.
        while self.stack.pop() is not module:
            self.inputs.pop()
        versions = self.inputs.pop()
        separate = self._keeps_samples_apart(output) and _unchanged(versions)
        self.separate[module] = self.separate.get(module, True) and separate
        if not separate or not (module in self.plan.rules or module in self.plan.reruns):
            return None
        return self._capture(module, args, kwargs, output)

    def _keeps_samples_apart(self, output: Any) -> bool:
        # A state that is not laid out by samples may come along, as long as nothing uses it.
        return any(leads_with(t, self.size) for t in floating(output))

    def _capture(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        flat, structure = tree_flatten(output)
        inputs = tree_map(detached, (args, kwargs))
        floating = [i for i, leaf in enumerate(flat) if isinstance(leaf, Tensor) and leaf.is_floating_point()]
        exposed = [self._exposed(flat[i], copy=module in self.plan.reruns) for i in floating]
        kept = [flat[i].detach().clone() for i in floating] if module in self.plan.reruns else []
        versions = [(t, t._version) for t in tensors_of(inputs)]
        run = CapturedCall(inputs, kept, versions, [None] * len(floating))
        self.runs.setdefault(module, []).append(run)
        for place, tensor in enumerate(exposed):
            flat[floating[place]] = tensor
            tensor.register_hook(self._receiver(module, run, place))
        return tree_unflatten(flat, structure)

    def _exposed(self, tensor: Tensor, copy: bool) -> Tensor:
        """The output to hook: a copy where it is a leaf or has consumers inside the module."""
        if not tensor.requires_grad:
            tensor = tensor.detach().requires_grad_()
            self.leaves.append(tensor)
            return tensor.clone()
        return tensor.clone() if copy else tensor

    def _receiver(self, module: nn.Module, run: CapturedCall, place: int) -> Callable[[Tensor], None]:
        def receive(grad: Tensor) -> None:
            run.grads[place] = grad.detach()
            if all(other.complete() for other in self.runs[module]):
                self.on_grads(module)

        return receive

    def release(self) -> None:
        """Free activations and sums now: hooks refer to the observer, and this cycle would keep them alive."""
        self.on_grads = lambda module: None
        self.runs, self.leaves, self.inputs = {}, [], []

    def misplaced(self) -> set[str]:
        """Parameters for which this forward differs from what the plan relies on."""
        places = self.plan.module_of()
        found = {
            name
            for name, stacks in self.uses.items()
            if name not in self.plan.looped
            and (name not in places or any(places[name] not in stack for stack in stacks))
        }
        for module, separate in self.separate.items():
            if not separate:
                found.update(self.plan.names_in(module))
        for module, runs in self.runs.items():
            ruled_input_is_shared = module in self.plan.rules and not all(
                leads_with(only_input(run), self.size) for run in runs
            )
            if ruled_input_is_shared or not all(_unchanged(run.versions) for run in runs):
                found.update(self.plan.names_in(module))
        return found


def _hookable_modules(model: nn.Module) -> Iterator[nn.Module]:
    """Every module that runs as Python; scripted ones take no hooks."""
    seen: set[nn.Module] = set()

    def visit(module: nn.Module) -> Iterator[nn.Module]:
        if module not in seen:
            seen.add(module)
            if not isinstance(module, torch.jit.ScriptModule):
                yield module
                for child in module.children():
                    yield from visit(child)

    return visit(model)


def tensors_of(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def floating(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tensors_of(tree) if leaf.is_floating_point()]


def _holds_tensor(result: Any) -> bool:
    """Whether a call's result can carry a gradient; shapes and data types cannot."""
    return isinstance(result, Tensor) or (
        isinstance(result, (tuple, list)) and any(_holds_tensor(part) for part in result)
    )


def _unchanged(versions: Iterable[tuple[Tensor, int]]) -> bool:
    return all(tensor._version == version for tensor, version in versions)


def only_input(run: CapturedCall) -> Any:
    args, kwargs = run.arguments
    return args[0] if args else next(iter(kwargs.values()), None)


def detached(leaf: Any) -> Any:
    return leaf.detach() if isinstance(leaf, Tensor) else leaf
