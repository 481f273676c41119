"""Diagonal empirical Fisher information, exactly one gradient per sample.

    F = 1/N sum_i (grad_w loss(w; x_i, y_i))^2

The definition is the batch-1 loop. The fast way is one forward and one input-gradient backward over the
whole batch, in which hooks give every layer's input and output gradient, and the layer's rule makes the
squared per-sample gradients of them (``layer_rules``). A parameter that no rule covers is measured by
re-running, sample by sample, the smallest module that contains all its uses, or the whole model.

Which way a parameter goes is decided on the first sample and never trusted: the fast result of that sample
must equal autograd's, the batched output must equal the single one, and later batches must use the
parameters in the same places. Whatever fails goes to the loop; the way may change the cost, not the result.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from sparsesam.masks.layer_rules import Accumulators, Call, Rule, find_rule
from sparsesam.masks.samples import batch_size, leads_with, slice_batch

LossFn = Callable[[Any, Any], Tensor]
ModelLoss = Callable[[nn.Module, Any], Tensor]
SampleLabels = Callable[[Any, torch.Generator | None], Any]


@dataclass(frozen=True)
class FisherDiagonal:
    """Mean squared per-sample gradients and, per parameter, the way they were computed.

    ``values``: float32 (float64 for float64 parameters), zeros for a parameter the loss does not depend on.
    ``paths``: "rule: Conv2d", "recomputed: <module name or 'model'>" or "unused".
    """

    values: dict[str, Tensor]
    paths: dict[str, str]
    samples: int


def fisher_diagonal(
    model: nn.Module,
    batches: Iterable[Any],
    loss_fn: LossFn | None = None,
    *,
    model_loss: ModelLoss | None = None,
    parameters: Mapping[str, Tensor] | None = None,
    labels: Literal["data", "sampled"] = "data",
    sample_labels: SampleLabels | None = None,
    generator: torch.Generator | None = None,
) -> FisherDiagonal:
    """Diagonal Fisher information of the named parameters over the samples of ``batches``.

    With ``loss_fn(output, target)`` a batch is a pair (inputs, targets), inputs being a tensor, a tuple of
    positional or a dictionary of keyword arguments of the model; sample i's loss is
    ``loss_fn(model(x[i:i+1]), y[i:i+1])``, so the reduction over a batch does not matter. With
    ``model_loss(model, batch)`` batches are anything that can be sliced, and every sample runs alone.

    ``labels="sampled"`` draws y_i from softmax(output) over dimension 1 with ``generator`` (the true Fisher
    information); ``sample_labels(output, generator)`` replaces the draw.

    The model runs in evaluation mode with frozen statistics and is left as it was found.
    """
    problem = _problem(loss_fn, model_loss, labels, sample_labels, generator)
    wanted = _wanted_parameters(model, parameters)
    with _left_as_found(model):
        measurement = _Measurement(model, problem, wanted)
        for batch in batches:
            measurement.add(_moved(batch, next(iter(wanted.values())).device))
    return measurement.result()


# --- what is asked -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Problem:
    """The loss of a batch's samples; ``draw`` gives the labels of an output when they are not the data's."""

    loss_fn: LossFn | None
    model_loss: ModelLoss | None
    draw: Callable[[Any], Any] | None

    def inputs(self, batch: Any) -> Any:
        """The model's inputs, of which the samples are counted."""
        return batch if self.model_loss is not None else self._pair(batch)[0]

    def labelled(self, batch: Any, output: Any) -> Any:
        """The batch with labels drawn from its output, if they are to be drawn."""
        if self.draw is None:
            return batch
        with torch.no_grad():
            return self._pair(batch)[0], self.draw(tree_map(_detached, output))

    def output(self, model: nn.Module, batch: Any) -> Any:
        inputs = self._pair(batch)[0]
        if isinstance(inputs, Mapping):
            return model(**inputs)
        return model(*inputs) if isinstance(inputs, (tuple, list)) else model(inputs)

    def loss(self, output: Any, batch: Any) -> Tensor:
        """The loss of one sample, from its output and its batch of one."""
        assert self.loss_fn is not None
        return _scalar(self.loss_fn(output, self._pair(batch)[1]), "loss_fn")

    def own_loss(self, model: nn.Module, batch: Any) -> Tensor:
        """The loss of one sample by a model that computes its own."""
        assert self.model_loss is not None
        return _scalar(self.model_loss(model, batch), "model_loss")

    def _pair(self, batch: Any) -> tuple[Any, Any]:
        if isinstance(batch, (tuple, list)) and len(batch) == 2:
            return batch[0], batch[1]
        if self.draw is not None:
            return batch, None
        raise ValueError(
            f"with loss_fn a batch must be a pair (inputs, targets), got {type(batch).__name__}; "
            "use model_loss=lambda model, batch: ... for anything else"
        )


def _problem(
    loss_fn: LossFn | None,
    model_loss: ModelLoss | None,
    labels: str,
    sample_labels: SampleLabels | None,
    generator: torch.Generator | None,
) -> _Problem:
    if (loss_fn is None) == (model_loss is None):
        raise ValueError("exactly one of loss_fn and model_loss must be given")
    if labels not in ("data", "sampled"):
        raise ValueError(f"labels must be 'data' or 'sampled', got {labels!r}")
    if labels == "data":
        return _Problem(loss_fn, model_loss, None)
    if model_loss is not None:
        raise ValueError("labels='sampled' needs the model's output; use loss_fn instead of model_loss")
    if sample_labels is not None:
        draw = sample_labels
        return _Problem(loss_fn, None, lambda output: draw(output, generator))
    if generator is None:
        raise ValueError("labels='sampled' needs a generator, got None; give a torch.Generator")
    return _Problem(loss_fn, None, lambda output: sample_categorical(output, generator))


def sample_categorical(output: Any, generator: torch.Generator) -> Tensor:
    """Class labels (N, ...) drawn from softmax(output), output (N, C, ...) holding logits."""
    if not isinstance(output, Tensor) or output.dim() < 2:
        raise ValueError(
            "labels='sampled' draws classes from an output tensor of shape (N, C, ...), got "
            f"{tuple(output.shape) if isinstance(output, Tensor) else type(output).__name__}; "
            "give sample_labels=lambda output, generator: ... for other outputs"
        )
    precise = torch.promote_types(output.dtype, torch.float32)
    probabilities = output.detach().to(precise).softmax(1).movedim(1, -1)
    flat = probabilities.reshape(-1, probabilities.shape[-1]).to(generator.device)
    return flat.multinomial(1, generator=generator).view(probabilities.shape[:-1]).to(output.device)


def _scalar(loss: Any, name: str) -> Tensor:
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        got = f"shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
        raise ValueError(f"{name} must return one number for one sample, got {got}; reduce it with mean or sum")
    return loss.reshape(())


def _wanted_parameters(model: nn.Module, names: Mapping[str, Tensor] | None) -> dict[str, Tensor]:
    available: dict[str, Tensor] = dict(model.named_parameters())
    if names is None:
        wanted = {name: parameter for name, parameter in available.items() if parameter.requires_grad}
    else:
        unknown = [name for name in names if name not in available]
        if unknown:
            raise ValueError(f"parameters holds {unknown[0]!r}, which model.named_parameters() does not")
        wanted = {name: available[name] for name in names}
    if not wanted:
        raise ValueError("there is no parameter to measure; none is named or none requires a gradient")
    return wanted


def _detached(leaf: Any) -> Any:
    return leaf.detach() if isinstance(leaf, Tensor) else leaf


def _moved(batch: Any, device: torch.device) -> Any:
    def move(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        # Tensors made in inference mode cannot be saved for a backward.
        return (leaf.clone() if leaf.is_inference() else leaf).detach().to(device)

    # Dictionary-like batches of other libraries are not known to torch's pytrees.
    known = dict(batch) if isinstance(batch, Mapping) else batch
    return tree_map(move, known)


# --- what is put back --------------------------------------------------------------------------------------


@contextmanager
def _left_as_found(model: nn.Module) -> Iterator[None]:
    """Evaluation mode with gradients on; flags, buffers and random states are put back on the way out."""
    with ExitStack() as stack:
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        stack.enter_context(torch.random.fork_rng(_cuda_devices(model)))
        stack.callback(torch.clear_autocast_cache)
        torch.clear_autocast_cache()
        # torch's fused transformer kernels run only without gradients and hide the layers.
        stack.callback(torch.backends.mha.set_fastpath_enabled, torch.backends.mha.get_fastpath_enabled())
        torch.backends.mha.set_fastpath_enabled(False)
        if any(isinstance(module, nn.RNNBase) for module in model.modules()):
            # cuDNN refuses the backward of a recurrent layer in evaluation mode.
            stack.enter_context(torch.backends.cudnn.flags(enabled=False))
        if "torch._dynamo" in sys.modules and hasattr(torch.compiler, "set_stance"):
            # Compiled graphs do not run the hooks.
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        if isinstance(model, nn.parallel.DistributedDataParallel):
            stack.enter_context(model.no_sync())
        _remember_flags(model, stack)
        _remember_buffers(model, stack)
        yield


def _cuda_devices(model: nn.Module) -> list[int]:
    return sorted({p.device.index for p in model.parameters() if p.device.type == "cuda"})


def _remember_flags(model: nn.Module, stack: ExitStack) -> None:
    for module in model.modules():
        stack.callback(setattr, module, "training", module.training)
        # Not eval(): some modules change their weights there (merged adapters).
        module.training = False
    for parameter in model.parameters():
        stack.callback(parameter.requires_grad_, parameter.requires_grad)
        parameter.requires_grad_(False)


def _remember_buffers(model: nn.Module, stack: ExitStack) -> None:
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                stack.callback(_put_back, module, name, buffer, buffer._version, buffer.clone())


def _put_back(module: nn.Module, name: str, buffer: Tensor, version: int, value: Tensor) -> None:
    module._buffers[name] = buffer
    if buffer._version != version:
        with torch.no_grad():
            buffer.copy_(value)


@contextmanager
def _requiring_grad(parameters: Iterable[Tensor]) -> Iterator[None]:
    chosen = list(parameters)
    try:
        for parameter in chosen:
            parameter.requires_grad_(True)
        yield
    finally:
        for parameter in chosen:
            parameter.requires_grad_(False)


# --- one observed forward ----------------------------------------------------------------------------------


@dataclass
class _Run:
    """One call of a captured module: its arguments, its outputs, and later the gradients at the outputs."""

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
class _Plan:
    """Which way each parameter goes: a layer's rule, re-running a module, or the loop over the model."""

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
        """Send these parameters to the loop over the model, from which none returns."""
        moved = set(names)
        self.looped |= moved
        for module, (kind, rule, own) in list(self.rules.items()):
            self.rules[module] = (kind, rule, {k: v for k, v in own.items() if v not in moved})
        self.rules = {module: entry for module, entry in self.rules.items() if entry[2]}
        kept = {module: [n for n in names if n not in moved] for module, names in self.reruns.items()}
        self.reruns = {module: names for module, names in kept.items() if names}


class _Observer(TorchFunctionMode):
    """Sees, during one forward, where parameters are used and which module calls keep samples apart.

    Inputs of the plan's modules are kept and their outputs hooked. Parameters require no gradient then, so
    an output that needs none is made a leaf: nothing upstream of it is differentiated.
    """

    def __init__(self, model: nn.Module, wanted: Mapping[str, Tensor], plan: _Plan, size: int) -> None:
        super().__init__()
        self.plan, self.size = plan, size
        self.names = {id(parameter): name for name, parameter in wanted.items()}
        self.modules = list(_hookable_modules(model))
        self.stack: list[nn.Module] = []
        self.uses: dict[str, set[tuple[nn.Module, ...]]] = {}
        self.separate: dict[nn.Module, bool] = {}
        self.runs: dict[nn.Module, list[_Run]] = {}
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
            self.inputs.append([(t, t._version) for t in _tensors((args, kwargs))])

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
        return any(leads_with(t, self.size) for t in _floating(output))

    def _capture(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        flat, structure = tree_flatten(output)
        inputs = tree_map(_detached, (args, kwargs))
        floating = [i for i, leaf in enumerate(flat) if isinstance(leaf, Tensor) and leaf.is_floating_point()]
        exposed = [self._exposed(flat[i], copy=module in self.plan.reruns) for i in floating]
        kept = [flat[i].detach().clone() for i in floating] if module in self.plan.reruns else []
        versions = [(t, t._version) for t in _tensors(inputs)]
        run = _Run(inputs, kept, versions, [None] * len(floating))
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

    def _receiver(self, module: nn.Module, run: _Run, place: int) -> Callable[[Tensor], None]:
        def receive(grad: Tensor) -> None:
            run.grads[place] = grad.detach()
            if all(other.complete() for other in self.runs[module]):
                self.on_grads(module)

        return receive

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
                leads_with(_only_input(run), self.size) for run in runs
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


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def _floating(tree: Any) -> list[Tensor]:
    return [leaf for leaf in _tensors(tree) if leaf.is_floating_point()]


def _holds_tensor(result: Any) -> bool:
    """Whether a call's result can carry a gradient; shapes and data types cannot."""
    return isinstance(result, Tensor) or (
        isinstance(result, (tuple, list)) and any(_holds_tensor(part) for part in result)
    )


def _unchanged(versions: Iterable[tuple[Tensor, int]]) -> bool:
    return all(tensor._version == version for tensor, version in versions)


def _only_input(run: _Run) -> Any:
    args, kwargs = run.arguments
    return args[0] if args else next(iter(kwargs.values()), None)


# --- measuring ---------------------------------------------------------------------------------------------


class _Measurement:
    """Sums of squared per-sample gradients over the batches seen so far."""

    def __init__(self, model: nn.Module, problem: _Problem, wanted: dict[str, Tensor]) -> None:
        self.model, self.problem, self.wanted = model, problem, wanted
        self.sums = self._zeros()
        self.samples = 0
        self.plan: _Plan | None = None
        self.first_output: Any = None

    def add(self, batch: Any) -> None:
        size = batch_size(self.problem.inputs(batch))
        if size == 0:
            return
        plan = self._first_plan(slice_batch(batch, slice(0, 1), size)) if self.plan is None else self.plan
        self.plan = plan
        self.samples += size
        used = self._add_by_hooks(plan, batch, size, self.sums, draw=True)
        chosen = {name: self.wanted[name] for name in self.wanted if name in plan.looped}
        for i in range(size if chosen else 0):
            sample = slice_batch(batch if used is None else used, slice(i, i + 1), size)
            self._add_sample(sample, chosen, self.sums, draw=used is None)

    def result(self) -> FisherDiagonal:
        if self.plan is None:
            raise ValueError("batches is empty; at least one sample is needed")
        values = {name: total / self.samples for name, total in self.sums.items()}
        for name, value in values.items():
            if not bool(torch.isfinite(value).all()):
                raise ValueError(
                    f"the Fisher information of {name!r} is not finite; the loss or its gradient overflows "
                    "at the current weights (lower the learning rate or rho, or measure in float32)"
                )
        return FisherDiagonal(values, self._paths(self.plan), self.samples)

    def _zeros(self) -> dict[str, Tensor]:
        return {name: torch.zeros_like(p, dtype=_sum_dtype(p)) for name, p in self.wanted.items()}

    def _paths(self, plan: _Plan) -> dict[str, str]:
        module_names = {module: name for name, module in self.model.named_modules()}
        paths = dict.fromkeys(self.wanted, "unused") | dict.fromkeys(plan.looped, "recomputed: model")
        for module, names in plan.reruns.items():
            paths.update(dict.fromkeys(names, f"recomputed: {module_names[module]}"))
        for kind, _, own in plan.rules.values():
            paths.update(dict.fromkeys(own.values(), f"rule: {kind}"))
        return {name: paths[name] for name in self.wanted}

    def _first_plan(self, sample: Any) -> _Plan:
        """The cheapest way for each parameter that reproduces autograd's gradients of one sample."""
        plan = _Plan()
        if self.problem.model_loss is not None or _normalizes_over_samples(self.model):
            plan.loop(self.wanted)
            return plan
        observer = _Observer(self.model, self.wanted, plan, 1)
        expected, trial = self._zeros(), self._zeros()
        self.first_output, used = self._add_sample(sample, self.wanted, expected, draw=True, observer=observer)
        plan = _planned(self.model, self.wanted, observer)
        try:
            self._add_by_hooks(plan, used, 1, trial, draw=False)
        except Exception:
            # Autograd has just differentiated this sample, so it is the hooks that the model does not bear.
            plan.loop(self.wanted)
        plan.loop(_different(trial, expected))
        return plan

    def _add_sample(
        self,
        sample: Any,
        chosen: Mapping[str, Tensor],
        into: dict[str, Tensor],
        *,
        draw: bool,
        observer: _Observer | None = None,
    ) -> tuple[Any, Any]:
        """The definition: the squared gradient of one sample's loss. Returns output and labelled sample."""
        with _requiring_grad(chosen.values()):
            # Only the forward: setting flags and taking gradients touch the parameters too.
            with nullcontext() if observer is None else observer.watch():
                output, sample, loss = self._sample_loss(sample, draw=draw)
            _add_squared_gradients([loss], [None], chosen, into)
        return tree_map(_detached, output), sample

    def _sample_loss(self, sample: Any, *, draw: bool) -> tuple[Any, Any, Tensor]:
        if self.problem.model_loss is not None:
            return None, sample, self.problem.own_loss(self.model, sample)
        output = self.problem.output(self.model, sample)
        labelled = self.problem.labelled(sample, output) if draw else sample
        return output, labelled, self.problem.loss(output, labelled)

    def _add_by_hooks(self, plan: _Plan, batch: Any, size: int, into: dict[str, Tensor], *, draw: bool) -> Any | None:
        """Add what rules and reruns give. Returns the batch with the labels used, None if there are none."""
        while plan.rules or plan.reruns:
            observer = _Observer(self.model, self.wanted, plan, size)
            with observer.watch():
                output = self.problem.output(self.model, batch)
                used = self.problem.labelled(batch, output) if draw else batch
                total = self._total_loss(output, used, size)
            if total is None or self._mixes_samples(output, size):
                plan.loop(self.wanted)
                continue
            misplaced = observer.misplaced()
            if misplaced:
                plan.loop(misplaced)
                continue
            del output
            _backward(observer, total, into)
            self._rerun(plan, observer, size, into)
            return used
        return None

    def _total_loss(self, output: Any, batch: Any, size: int) -> Tensor | None:
        """Sum over the samples of their own losses; None where the output cannot be split into samples."""
        flat, structure = tree_flatten(output)
        if not all(leads_with(t, size) for t in _tensors(flat)):
            return None
        # One split has one backward; slices would each fill a gradient of the whole output.
        parts = [leaf.split(1) if isinstance(leaf, Tensor) else (leaf,) * size for leaf in flat]
        losses = []
        for i in range(size):
            alone = tree_unflatten([part[i] for part in parts], structure)
            losses.append(self.problem.loss(alone, slice_batch(batch, slice(i, i + 1), size)))
        return torch.stack(losses).sum()

    def _mixes_samples(self, output: Any, size: int) -> bool:
        """Whether the first sample's output changes in the company of others; asked of one batch."""
        alone = self.first_output
        if alone is None or size == 1:
            return False
        self.first_output = None
        return not _close(_floating(slice_batch(output, slice(0, 1), size)), _floating(alone))

    def _rerun(self, plan: _Plan, observer: _Observer, size: int, into: dict[str, Tensor]) -> None:
        for module, names in list(plan.reruns.items()):
            runs = [run for run in observer.runs.get(module, ()) if run.received()]
            squares = _rerun_samples(module, runs, {name: self.wanted[name] for name in names}, size)
            if squares is None:
                plan.loop(names)
                continue
            for name, square in squares.items():
                into[name] += square


def _normalizes_over_samples(model: nn.Module) -> bool:
    return any(isinstance(m, _BatchNorm) and m.running_mean is None for m in model.modules())


def _planned(model: nn.Module, wanted: Mapping[str, Tensor], observer: _Observer) -> _Plan:
    """Each parameter goes to the innermost module that contains all its uses and keeps samples apart."""
    plan = _Plan()
    for name, parameter in wanted.items():
        stacks = list(observer.uses.get(name, ()))
        if not stacks:
            continue
        common = [m for m in stacks[0] if m is not model and all(m in stack for stack in stacks)]
        place = next((m for m in reversed(common) if observer.separate.get(m, False)), None)
        if place is None:
            plan.loop([name])
            continue
        local = [key for key, own in place._parameters.items() if own is parameter]
        rule = find_rule(place) if len(local) == 1 else None
        if rule is None:
            plan.reruns.setdefault(place, []).append(name)
        else:
            plan.rules.setdefault(place, (*rule, {}))[2][local[0]] = name
    return plan


def _backward(observer: _Observer, total: Tensor, into: dict[str, Tensor]) -> None:
    """One backward for all samples; each layer's rule runs as soon as its gradients are complete."""

    def finish(module: nn.Module) -> None:
        if module not in observer.plan.rules:
            return
        _, rule, own = observer.plan.rules[module]
        runs = observer.runs[module]
        calls = [Call(_only_input(run), grad) for run in runs if (grad := run.grads[0]) is not None]
        accumulators: Accumulators = {local: into[name] for local, name in own.items()}
        if calls:
            with torch.no_grad(), torch.autocast(total.device.type, enabled=False):
                rule(module, calls, accumulators)
        if module not in observer.plan.reruns:
            # The hooks live as long as the graph, the activations need not.
            del observer.runs[module]
            for run in runs:
                run.release()

    observer.on_grads = finish
    if total.requires_grad and observer.leaves:
        torch.autograd.grad(total, observer.leaves, allow_unused=True)
    for module in list(observer.runs):
        if not all(run.complete() for run in observer.runs[module]):
            finish(module)


def _rerun_samples(
    module: nn.Module, runs: Sequence[_Run], parameters: Mapping[str, Tensor], size: int
) -> dict[str, Tensor] | None:
    """Squared per-sample gradients from the module alone; None if it does not reproduce its outputs."""
    squares = {name: torch.zeros_like(p, dtype=_sum_dtype(p)) for name, p in parameters.items()}
    if not all(run.separable(size) for run in runs):
        return None
    with _requiring_grad(parameters.values()):
        for i in range(size):
            outputs: list[Tensor] = []
            grads: list[Tensor | None] = []
            for run in runs:
                args, kwargs = slice_batch(run.arguments, slice(i, i + 1), size)
                found = _floating(module(*args, **kwargs))
                if len(found) != len(run.grads):
                    return None
                for output, captured, grad in zip(found, run.outputs, run.grads, strict=True):
                    if grad is None:
                        continue
                    if not _close([output], [captured[i : i + 1]]):
                        return None
                    outputs.append(output)
                    grads.append(grad[i : i + 1].to(output.dtype))
            _add_squared_gradients(outputs, grads, parameters, squares)
    return squares


def _add_squared_gradients(
    outputs: Sequence[Tensor],
    grads: Sequence[Tensor | None],
    parameters: Mapping[str, Tensor],
    into: dict[str, Tensor],
) -> None:
    pairs = [(output, grad) for output, grad in zip(outputs, grads, strict=True) if output.requires_grad]
    if not pairs:
        return
    ends, starts = zip(*pairs, strict=True)
    gradients = torch.autograd.grad(ends, list(parameters.values()), starts, allow_unused=True)
    for name, gradient in zip(parameters, gradients, strict=True):
        if gradient is not None:
            dense = gradient.to_dense() if gradient.is_sparse else gradient
            real = (dense.abs() if dense.is_complex() else dense).to(into[name].dtype)
            into[name].addcmul_(real, real)


def _sum_dtype(tensor: Tensor) -> torch.dtype:
    return torch.float64 if tensor.dtype in (torch.float64, torch.complex128) else torch.float32


# --- comparing two computations of the same number ---------------------------------------------------------


def _tolerance(tensor: Tensor) -> float:
    """Far above what another order of summation does, far below what a wrong formula does."""
    if torch.is_autocast_enabled(tensor.device.type):
        return 5e-2
    return {torch.float64: 1e-7, torch.float32: 1e-3}.get(tensor.dtype, 5e-2)


def _close(found: Sequence[Tensor], expected: Sequence[Tensor]) -> bool:
    return len(found) == len(expected) and all(map(_tensors_close, found, expected))


def _tensors_close(found: Tensor, expected: Tensor) -> bool:
    if found.shape != expected.shape:
        return False
    # Masked scores are -inf in both.
    difference = torch.where(found == expected, torch.zeros_like(found), found - expected)
    return bool(difference.norm() <= _tolerance(found) * expected.nan_to_num(0, 0, 0).norm())


def _different(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> set[str]:
    """Names whose root squares differ, beyond rounding of the largest: some gradients are zero but for it."""
    norms = {name: square.sum().sqrt().item() for name, square in expected.items()}
    floor = 1e-3 * max(norms.values())
    return {
        name
        for name, square in expected.items()
        if (found[name].sqrt() - square.sqrt()).norm().item() > _tolerance(square) * (norms[name] + floor)
    }
