"""Records, in one forward, the calls that parameters are arguments of, and where a backward gives their gradients."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from sparsesam.masks.batches import leads_with
from sparsesam.masks.layer_rules import FUNCTIONS, Call, Rule


@dataclass(frozen=True)
class Use:
    """One call that a parameter is an argument of, before the gradient at its result is known."""

    function: str
    rule: Rule
    input: Tensor | None  # the argument that holds the samples
    arguments: dict[str, Any]
    result: GradientEdge
    version: int

    def is_unchanged(self) -> bool:
        return self.input is None or self.input._version == self.version

    def with_gradient(self, grad: Tensor) -> Call:
        return Call(self.rule, self.input, self.arguments, grad.detach())


class Recorder(TorchFunctionMode):
    """Records the calls of torch functions that the wanted parameters are arguments of, during one forward.

    Parameters require no gradient then, so a result that needs none is made a leaf: nothing upstream of it is
    differentiated. ``refusal`` says why these calls do not tell the samples' gradients, if they do not.
    """

    def __init__(self, wanted: Mapping[str, Tensor], size: int) -> None:
        super().__init__()
        self.size, self.names = size, {id(parameter): name for name, parameter in wanted.items()}
        self.uses: dict[str, list[Use]] = {}
        self.refusal: str | None = None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if not any(id(leaf) in self.names for leaf in tree_leaves((args, kwargs))) or id(result) in self.names:
            return result
        if not any(isinstance(leaf, Tensor) and leaf.is_floating_point() for leaf in tree_leaves(result)):
            return result  # a shape or a data type
        return self._recorded(func, args, kwargs, result)

    def _recorded(self, func: Any, args: Any, kwargs: Any, result: Any) -> Any:
        name, known = getattr(func, "__name__", str(func)), FUNCTIONS.get(func)
        if known is None or not leads_with(result, self.size):
            self.refusal = f"{name} has no rule" if known is None else f"{name} does not keep samples apart"
            return result
        arguments = dict(zip(known.arguments, args, strict=False)) | kwargs
        result = _exposed(result)
        for place in [place for place, value in arguments.items() if id(value) in self.names]:
            input = arguments.get("other" if place == "input" else "input")
            if not (place in known.rules and known.accepts(arguments) and _is_by_samples(input, self.size)):
                self.refusal = f"{name} has no rule for these arguments"
                continue
            kept = {key: _detached(value) for key, value in arguments.items()}
            version = 0 if input is None else input._version
            use = Use(name, known.rules[place], _detached(input), kept, get_gradient_edge(result), version)
            self.uses.setdefault(self.names[id(arguments[place])], []).append(use)
        return result


def _is_by_samples(input: Any, size: int) -> bool:
    return input is None or leads_with(input, size)


def _detached(value: Any) -> Any:
    return value.detach() if isinstance(value, Tensor) else value


def _exposed(tensor: Tensor) -> Tensor:
    """A leaf where nothing upstream needs a gradient; a copy of it, so that operations in place may follow."""
    return tensor if tensor.requires_grad else tensor.detach().requires_grad_().clone()
