"""Tiny transformers architectures with random weights: replayed, they give the bits of two plain passes."""

from __future__ import annotations

import copy
import random
from contextlib import nullcontext

import numpy as np
import pytest
import torch

from sparsesam.replay import Tape
from tests.ascent.test_architectures import ALL, build, inputs_of, loss_of
from tests.test_programs import bits


def train(model, kind, names, *, taped, narrows):
    for seeded in (torch.manual_seed, random.seed, np.random.seed):
        seeded(3)
    parameters = dict(model.named_parameters())
    moved, found, reused = {name: parameters[name] for name in names}, [], 0
    for seed in range(2):
        inputs, state = inputs_of(kind, seed), torch.get_rng_state()
        tape = Tape(moved) if taped else None
        model.zero_grad()
        with tape.recording() if tape else nullcontext():
            torch.autograd.backward(loss_of(model, inputs), inputs=[*moved.values()] if narrows else None)
        with torch.no_grad():
            for p in moved.values():
                p.add_(torch.zeros_like(p) if p.grad is None else p.grad, alpha=0.05)
        model.zero_grad()
        torch.set_rng_state(state)
        with tape.replaying() if tape else nullcontext():
            loss = loss_of(model, inputs)
            loss.backward()
        found.append(bits([loss, *(p.grad for p in parameters.values()), *model.buffers(), torch.get_rng_state()]))
        reused += tape.reused if tape else 0
    return found, reused


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ALL)
def test_replayed_architecture_equals_two_plain_passes(kind):
    model = build(kind, ALL[kind])
    trained = [name for name, p in model.named_parameters() if p.requires_grad]
    for names in (trained[-max(1, len(trained) // 4) :], trained[len(trained) // 2 :: 7]):
        for narrows in (True, False):
            wanted, _ = train(copy.deepcopy(model), kind, names, taped=False, narrows=narrows)
            found, reused = train(copy.deepcopy(model), kind, names, taped=True, narrows=narrows)
            assert found == wanted
            assert reused > 0
