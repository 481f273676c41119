"""Long training of each family of methods: memory, files, threads, torch's mode stacks and hooks stay as they are.

Every loop that users write is in it: `minimize`, closures, two phases, accumulation, evaluation, checkpoints, copies,
interrupted steps. The first fifth of the measurements is a warm-up; of the others, the mean of the first tenth is
compared with that of the last.
"""

from __future__ import annotations

import copy
import gc
import os
import pickle
import resource
import statistics
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import sparsesam
from tests import cases

FISHER = sparsesam.fisher_mask(TensorDataset(*cases.images(32)), F.cross_entropy, sparsity=0.5, samples=8, refresh=7)
FILTERS = partial(sparsesam.SSAM, mask=sparsesam.random_mask(sparsity=0.5, pattern="filter"))
FAMILIES: dict[str, list[Callable[..., sparsesam.SharpnessAware]]] = {
    "two passes, dense": [sparsesam.SAM, sparsesam.FriendlySAM, sparsesam.ZSharp],
    "two passes, masked": [
        partial(sparsesam.SSAM, mask=sparsesam.fixed_mask("4.*"), norm="masked"),
        FILTERS,
        partial(FILTERS, norm="masked", ascent="implicit"),
        sparsesam.ESAM,
    ],
    "one pass": [sparsesam.MomentumSAM, sparsesam.ExtrapolatedSAM],
    "two gradients": [sparsesam.GSAM, sparsesam.WSAM, sparsesam.LookSAM],
    "refreshing masks": [
        partial(sparsesam.SSAM, mask=sparsesam.dynamic_mask(sparsity=0.5, refresh=3)),
        partial(sparsesam.SSAM, mask=FISHER),
        partial(sparsesam.ExtrapolatedSAM, mask=sparsesam.random_mask(sparsity=0.5, refresh=2)),
    ],
}
LOOPS = [*cases.WAYS.values(), lambda opt, loss_of: opt.minimize([loss_of, loss_of])]


class Training:
    """One optimizer and its model, in a process that trains for days."""

    def __init__(self, make: Callable[..., sparsesam.SharpnessAware]) -> None:
        self.model = cases.convnet()
        self.opt = make(cases.sgd(self.model, lr=0.01), self.model)
        self.step = 0

    def loss(self) -> torch.Tensor:
        x, y = cases.images(8, seed=self.step % 50)
        return F.cross_entropy(self.model(x), y)

    def train(self) -> None:
        """One step, by another loop each time, and now and then what happens around steps."""
        self.step += 1
        LOOPS[self.step % len(LOOPS)](self.opt, self.loss)
        if self.step % 7 == 0:
            self.interrupted()
        if self.step % 25 == 0:
            self.evaluate()
        if self.step % 40 == 0:
            self.opt.load_state_dict(pickle.loads(pickle.dumps(self.opt.state_dict())))
        if self.step % 100 == 0:
            self.model, self.opt = copy.deepcopy((self.model, self.opt))

    def interrupted(self) -> None:
        calls = iter(range(9))

        def loss() -> torch.Tensor:
            found = self.loss()
            if next(calls) == self.step % 2 or not self.opt.needs_first_pass:
                raise KeyboardInterrupt
            return found

        with suppress(KeyboardInterrupt):
            self.opt.minimize(loss)
        self.opt.zero_grad()

    @torch.no_grad()
    def evaluate(self) -> None:
        self.model.eval()
        assert self.loss().isfinite()
        self.model.train()


def measured(models: list[nn.Module]) -> dict[str, float]:
    gc.collect()
    return {
        "RSS": int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize(),
        "open files": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
        "modes": cases.modes(),
        "hooks": sum(map(cases.hooks_of, models)),
        "objects": len(gc.get_objects()),
    }


def soak(family: str, seconds: float, steps: int = 100) -> str:
    """Train for this time, and measure each time that every optimizer has taken so many steps.

    Returns what was measured; AssertionError if something grows by more than 1 %.
    """
    trainings = [Training(make) for make in FAMILIES[family]]
    found: list[dict[str, float]] = []
    before = measured([training.model for training in trainings])
    start = time.monotonic()
    while time.monotonic() - start < seconds or len(found) < 10:
        for training in trainings:
            for _ in range(steps):
                training.train()
        found.append(measured([training.model for training in trainings]))
    found = found[len(found) // 5 :]
    tenth = max(1, len(found) // 10)
    shown = []
    for name in before:
        first, last = (statistics.fmean(one[name] for one in part) for part in (found[:tenth], found[-tenth:]))
        drift = last / first - 1 if first else last
        assert drift < 0.01, f"{family}: {name} grew from {first} to {last}"
        shown.append(f"{name} {drift:+.2%}")
    for name in ("modes", "hooks"):
        assert {one[name] for one in found} == {before[name]}, f"{family}: {name} changed"
    taken = sum(training.step for training in trainings)
    return f"{family}: {time.monotonic() - start:.0f} s, {taken:,} steps, {', '.join(shown)}"


def survive(minutes: float, families: list[str] | None = None) -> Counter[str]:
    return Counter(soak(family, 60 * minutes) for family in families or FAMILIES)
