"""Random sequences of everything that users do with an optimizer, against the equations in float64.

Before a step, weights, base state and kept tensors are read from the optimizer; its method's equation in
`tests/test_variants.py` then gives what they must be afterwards. An interrupted step, by an error of the user's code or
by Ctrl-C at any line of the library, leaves the weights as they were, or as the base optimizer's update left them.
"""

from __future__ import annotations

import copy
import io
import linecache
import pickle
import sys
import warnings
from collections import Counter
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import hypothesis
import pytest
import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from torch import nn
from torch.nn import functional as F

import sparsesam
from tests import cases, oracles
from tests.test_variants import METHODS as VARIANTS
from tests.test_variants import method

LIBRARY = Path(sparsesam.__file__).parent
TOLERANCES = {torch.float64: {"rtol": 1e-7, "atol": 1e-9}, torch.float32: {"rtol": 1e-3, "atol": 1e-4}}
LARGEST = 0.02  # entry of a clipped gradient
SCALE = 2.0**10  # of a GradScaler
RULES = {
    "none": None,
    "random": sparsesam.random_mask(sparsity=0.5, refresh=3),
    "filters": sparsesam.random_mask(sparsity=0.5, pattern="filter"),
    "dynamic": sparsesam.dynamic_mask(sparsity=0.5, refresh=2),
}
SSAM = method(sparsesam.SSAM, 0.3)
METHODS = VARIANTS | {
    "SSAM": (VARIANTS["SAM"][0], lambda *given, mask, **options: SSAM(*given, mask=mask or RULES["random"], **options)),
}
#: Where a step fails: in a call of the loss, in a backward, before the update, or at a line of the library.
FAULTS = st.one_of(
    st.tuples(st.sampled_from(["loss", "backward"]), st.integers(1, 6)),
    st.just(("update", 1)),
    st.tuples(st.just("line"), st.integers(1, 2200)),
)
STEP = st.fixed_dictionaries(
    {
        "seed": st.integers(0, 50),
        "micro_batches": st.integers(1, 2),
        "clip": st.booleans(),
        "scaled": st.booleans(),
        "overflow": st.sampled_from(["", "", "", "first", "last", "both"]),
        "fault": st.integers(0, 2).flatmap(lambda number: FAULTS if number == 2 else st.just(("", 0))),
    }
)


class Twin(oracles.Naive):
    """The model in float64 before a step, with the state of the base optimizer and what the method keeps."""

    def __init__(self, model: nn.Module, opt: sparsesam.SharpnessAware, batches: list[Any], *, clip: bool) -> None:
        names = {id(p): name for name, p in model.named_parameters()}
        groups = [[names[id(p)] for p in group["params"]] for group in opt.param_groups]
        twin = copy.deepcopy(model).double()
        named = dict(twin.named_parameters())
        base = torch.optim.SGD([{"params": [named[name] for name in group]} for group in groups], lr=0.1, momentum=0.9)
        base.load_state_dict(copy.deepcopy(opt.base.state_dict()))
        super().__init__(twin, base, None, opt.options.norm)
        self.active = [name for group in groups for name in group if named[name].requires_grad]
        self.parameters = [named[name] for name in self.active]
        states = [base.state[p] for p in self.parameters]
        if any(state.get("momentum_buffer") is not None for state in states):  # where there is none, it is zero
            for p, state in zip(self.parameters, states, strict=True):
                state["momentum_buffer"] = state.get("momentum_buffer", torch.zeros_like(p))
        self.batches, self.clip, self.statistics = batches, clip, []
        self.kept = self.kept_by(model, opt)

    def kept_by(self, model: nn.Module, opt: sparsesam.SharpnessAware) -> dict[str, torch.Tensor]:
        """What the method keeps for the active parameters, in the words of the equations."""
        found = {}
        for kind, by_name in opt.own.tensors.items():
            if by_name:
                named = dict(model.named_parameters())
                saved = [
                    torch.zeros_like(named[name]).copy_(by_name.get(name, torch.zeros(()))) for name in self.active
                ]
                found[kind] = oracles.flat([part.double() for part in saved])
        if "back" in found:
            found["before"] = self.w + found.pop("back")
        return {"v" if kind == "orthogonal" else kind: kept for kind, kept in found.items()}

    def set_masks(self, opt: sparsesam.SharpnessAware) -> None:
        """Those of the step, which may have made them."""
        masks = [opt.masks.get(name) for name in self.active]
        pairs = zip(masks, self.parameters, strict=True)
        self.mask = oracles.flat([torch.zeros_like(p) if mask is None else mask.double() for mask, p in pairs])

    def loss(self):
        loss = sum(F.cross_entropy(self.model(x.double()), y) for x, y in self.batches)
        self.statistics = self.statistics or [buffer.clone() for buffer in self.model.buffers()]  # of the first pass
        return loss

    def update(self, gradient):
        super().update(gradient.clamp(-LARGEST, LARGEST) if self.clip else gradient)


class Stop(Exception):
    pass


class Losses:
    """The loss of each micro-batch, which may be infinite in the first or last pass, and may fail."""

    def __init__(self, model, batches, passes, overflow, fault) -> None:
        self.functions = [partial(self.loss, *batch) for batch in batches]
        self.model, self.fault, self.counts, each = model, fault, Counter[str](), len(batches)
        first, last = range(1, each + 1), range((passes - 1) * each + 1, passes * each + 1)
        self.infinite = {"": [], "first": first, "last": last, "both": [*first, *last]}[overflow]

    def loss(self, x, y):
        self.reach("loss")
        value = F.cross_entropy(self.model(x), y)
        return value * torch.inf if self.counts["loss"] in self.infinite else value

    def reach(self, place):
        self.counts[place] += 1
        if self.fault == (place, self.counts[place]):
            raise Stop


class Machine(RuleBasedStateMachine):
    """One optimizer, from its construction through a random sequence of steps and of what happens between them."""

    method: str
    counts: ClassVar[Counter[str]] = Counter()

    @initialize(mask=st.sampled_from(list(RULES)), norm=st.sampled_from(["full", "masked"]), whole=st.booleans())
    def construct(self, mask, norm, whole):
        torch.manual_seed(0)
        first = nn.Linear(6, 8, bias=False), nn.BatchNorm1d(8, affine=False), nn.Tanh()
        self.model = nn.Sequential(*first, nn.Linear(8, 5), nn.Tanh(), nn.Linear(5, 3)).double()
        self.mask, self.norm = mask, norm
        self.opt = self.make([{"params": list((self.model if whole else self.model[:5]).parameters())}])
        self.counts["sequences"] += 1

    def make(self, groups):
        base = torch.optim.SGD(groups, lr=0.1, momentum=0.9)
        return METHODS[self.method][1](base, self.model, mask=RULES[self.mask], norm=self.norm)

    @property
    def dtype(self):
        return next(self.model.parameters()).dtype

    # ---- steps ---------------------------------------------------------------------------------------------------

    @rule(steps=st.lists(STEP, min_size=1, max_size=3))
    def minimize(self, steps):
        self.take(steps, lambda functions, scaler: self.opt.minimize(functions, scaler=scaler))

    @rule(steps=st.lists(STEP, min_size=1, max_size=3))
    def step_with_closure(self, steps):
        def run(functions, scaler):
            def closure():
                self.opt.zero_grad()
                return sum(backward(function(), scaler) for function in functions)

            self.opt.step(closure, scaler=scaler)

        self.take(steps, run)

    @rule(between=st.booleans(), steps=st.lists(STEP, min_size=1, max_size=3))
    @precondition(lambda self: self.opt.passes() < 3)
    def step_in_two_phases(self, between, steps):
        self.take(steps, lambda functions, scaler: self.in_two_phases(functions, scaler, between))

    def in_two_phases(self, functions, scaler, between):
        opt = self.opt
        opt.zero_grad()
        if opt.needs_first_pass:
            with opt.first_pass():
                for function in functions:
                    backward(function(), scaler, opt.backward)
        if between:
            self.evaluate()
            opt.state_dict()
        with opt.perturbed():
            if between:
                for refused in (opt.step, opt.perturbed().__enter__, lambda: copy.deepcopy(opt)):
                    with pytest.raises(RuntimeError, match=r"perturbed\(\)"):
                        refused()
            for function in functions:
                backward(function(), scaler)
        if scaler is None:
            opt.step()
        else:
            scaler.step(opt)
        opt.zero_grad()

    def take(self, steps, run):
        for step in steps:
            self.step(run, **step)

    def step(self, run, *, seed, micro_batches, clip, scaled, overflow, fault):
        """Take a step and compare it with the equation."""
        opt, model = self.opt, self.model
        scaler = torch.amp.GradScaler("cpu", init_scale=SCALE) if scaled and opt.allows_scaler else None
        overflow = self.possible(overflow, scaler)
        kept = [tensor for by_name in opt.own.tensors.values() for tensor in by_name.values()]
        held = [*model.parameters(), *kept, *(m for m in self.momenta() if m is not None)]
        lowest = max((tensor.dtype for tensor in held), key=lambda kind: torch.finfo(kind).eps)
        batches = [cases.vectors(8, self.dtype, 2 * seed + number) for number in range(micro_batches)]
        losses = Losses(model, batches, opt.passes() if opt.needs_first_pass else 1, overflow, fault)
        before, steps, twin = cases.weights_of(model), opt.steps, Twin(model, opt, batches, clip=clip)
        updated: list[list[torch.Tensor]] = []
        last = next(p for p in reversed(list(model.parameters())) if p.requires_grad)
        hooks = [
            opt.base.register_step_pre_hook(lambda *_: losses.reach("update")),
            opt.base.register_step_post_hook(lambda *_: updated.append(cases.weights_of(model))),
            last.register_hook(lambda _: losses.reach("backward")),
        ]
        if clip:
            parameters = [p for group in opt.param_groups for p in group["params"]]
            hooks.append(opt.base.register_step_pre_hook(lambda *_: nn.utils.clip_grad_value_(parameters, LARGEST)))
        at_line = interrupted_at_line(fault[1]) if fault[0] == "line" else nullcontext()
        try:
            with warnings.catch_warnings(action="ignore"), at_line:
                run(losses.functions, scaler)
                if scaler is not None:
                    scaler.update()
        except (Stop, KeyboardInterrupt):
            self.counts["interrupted steps"] += 1
            if not updated or not isinstance(opt, sparsesam.WSAM):  # whose update has a second part
                assert cases.same_bits(updated[-1] if updated else before, model.parameters())
            opt.zero_grad()
            return
        finally:
            for hook in hooks:
                hook.remove()
        self.counts["steps"] += 1
        still = overflow in ("last", "both")
        assert opt.steps == steps + (not (still and scaler))
        assert all(bool(p.isfinite().all()) for p in model.parameters())
        for old, new in zip(before, model.parameters(), strict=True):
            assert not (still or not new.requires_grad) or torch.equal(old, new)
        if lowest in TOLERANCES and not still:
            twin.set_masks(opt)
            # LookSAM has no direction after an ascent that failed.
            lost = self.method == "LookSAM" and opt.steps % 3 != 1 and "v" not in twin.kept
            equation = METHODS[self.method][0]
            (plain if overflow or lost else equation)(twin, steps)
            self.compare(twin, TOLERANCES[lowest], kept=not overflow)

    def possible(self, overflow, scaler):
        """Without a scaler, the base would take a step to infinity if only its own gradient overflowed."""
        if self.method == "ESAM" or (overflow == "last" and scaler is None):  # ESAM may draw no tensor: one pass
            return ""
        two = self.opt.needs_first_pass and self.method != "three ascents" and self.mask != "dynamic"
        return overflow if two or overflow == "last" else ""

    def compare(self, twin, tolerance, *, kept):
        named = dict(self.model.named_parameters())
        weights = oracles.flat([named[name].detach().double() for name in twin.active])
        torch.testing.assert_close(weights, twin.w, **tolerance)
        for buffer, expected in zip(self.model.buffers(), twin.statistics, strict=True):
            torch.testing.assert_close(buffer, expected, check_dtype=False, **tolerance)
        for kind, values in twin.kept_by(self.model, self.opt).items() if kept else ():
            expected = twin.kept[kind]
            if kind == "before":
                values, expected = twin.mask * (values - twin.w), twin.mask * (expected - twin.w)
            elif kind == "v":  # its length does not matter, and is that of scaled gradients
                values, expected = F.normalize(values, dim=0), F.normalize(expected, dim=0)
            elif self.norm == "masked":
                values, expected = values * twin.mask, expected * twin.mask
            torch.testing.assert_close(values, expected, **tolerance)

    # ---- between steps -------------------------------------------------------------------------------------------

    @rule()
    @torch.no_grad()
    def evaluate(self):
        self.model.eval()
        assert self.model(cases.vectors(8, self.dtype)[0]).isfinite().all()
        self.model.train()

    @rule()
    @precondition(lambda self: self.opt.needs_first_pass and self.opt.passes() == 2)
    def abandon_step(self):
        before = cases.weights_of(self.model)
        with self.opt.first_pass():
            self.opt.backward(self.model(cases.vectors(8, self.dtype)[0]).sum())
        self.opt.zero_grad()
        assert cases.same_bits(before, self.model.parameters())

    @rule()
    @precondition(lambda self: sum(len(group["params"]) for group in self.opt.param_groups) < 5)
    def add_param_group(self):
        self.opt.add_param_group({"params": list(self.model[5].parameters())})

    @rule(layer=st.sampled_from([0, 3, 5]))
    def freeze_or_unfreeze(self, layer):
        if self.model[3 if layer == 0 else 0].weight.requires_grad:  # something must be trained
            self.model[layer].requires_grad_(not self.model[layer].weight.requires_grad)

    @rule(now=st.booleans())
    @precondition(lambda self: self.opt.mask is not None)
    def refresh_mask(self, now):
        self.opt.refresh_mask(now=now and not self.opt.own.masks.needs_gradient)

    @rule(dtype=st.sampled_from([torch.float64, torch.float32, torch.float64, torch.float32, torch.bfloat16]))
    def move(self, dtype):
        self.model.to(dtype)

    @rule(kind=st.sampled_from(["deepcopy", "pickle", "checkpoint"]))
    def copied(self, kind):
        before = self.state()
        if kind == "deepcopy":
            self.model, self.opt = copy.deepcopy((self.model, self.opt))
        elif kind == "pickle":
            self.model, self.opt = pickle.loads(pickle.dumps((self.model, self.opt)))
        else:
            file = io.BytesIO()
            torch.save(self.opt.state_dict(), file)
            file.seek(0)
            self.opt = self.make([{"params": group["params"]} for group in self.opt.param_groups])
            self.opt.load_state_dict(torch.load(file, weights_only=True))
        torch.testing.assert_close(self.state(), before, rtol=0, atol=0)

    def state(self):
        """Weights, momentum and counters; what is kept, of the parameters that are trained."""
        momenta = zip(self.momenta(), self.model.parameters(), strict=True)
        return (
            cases.weights_of(self.model),
            [None if m is None else m.to(p.dtype) for m, p in momenta],
            Twin(self.model, self.opt, [], clip=False).kept,
            [self.opt.steps, self.opt.skipped_ascents, self.opt.skipped_steps],
        )

    def momenta(self):
        return [self.opt.base.state.get(p, {}).get("momentum_buffer") for p in self.model.parameters()]

    @invariant()
    def nothing_is_left_behind(self):
        if hasattr(self, "opt"):
            assert not self.opt.is_perturbed
            assert cases.modes() == cases.hooks_of(self.model) == 0


def plain(n, t):
    """The base optimizer's step."""
    n.update(n.gradient(n.w))


def backward(loss, scaler, how=torch.Tensor.backward):
    how(loss if scaler is None else scaler.scale(loss))
    return loss


@contextmanager
def interrupted_at_line(number: int, files=None):
    """Raise KeyboardInterrupt at the n-th line of the library, or of these files, that is executed.

    A line with ``with`` is reached again before ``__exit__``: a tracer could raise there, Python delivers no signal.
    """
    count = 0

    def at_line(frame, event, _):
        nonlocal count
        line = linecache.getline(frame.f_code.co_filename, frame.f_lineno)
        if event == "line" and not line.lstrip().startswith("with "):
            count += 1
            if count == number:
                raise KeyboardInterrupt
        return at_line

    def at_call(frame, *_):
        file = Path(frame.f_code.co_filename)
        return at_line if file.is_relative_to(LIBRARY) and (files is None or file.name in files) else None

    before = sys.gettrace()
    sys.settrace(at_call)
    try:
        yield
    finally:
        sys.settrace(before)


def survive(sequences: int, seed: int = 0, methods: list[str] | None = None) -> Counter[str]:
    """Run so many sequences of each method; returns how many sequences, steps and interrupted steps there were."""
    Machine.counts.clear()
    settings = hypothesis.settings(
        max_examples=sequences,
        stateful_step_count=30,
        deadline=None,
        database=None,
        suppress_health_check=list(hypothesis.HealthCheck),
        phases=[hypothesis.Phase.generate, hypothesis.Phase.shrink],
    )
    for name in methods or METHODS:
        machine = hypothesis.seed(seed)(type(name, (Machine,), {"method": name}))
        hypothesis.stateful.run_state_machine_as_test(machine, settings=settings)
    return Machine.counts.copy()
