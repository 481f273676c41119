"""The training loop: what a run has in memory, and how it moves on by steps and epochs."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from lightning_fabric import Fabric
from lightning_fabric.plugins import MixedPrecision
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import sparsesam
from sparsesam.lab.experiment.batches import Batch, Batches
from sparsesam.lab.experiment.config import TrainConfig
from sparsesam.lab.experiment.errors import DivergedError
from sparsesam.lab.experiment.optimizers import TimedMask, lr_factor, make_optimizer
from sparsesam.lab.experiment.seeds import Purpose, derive, seed_global

#: On a GPU a look at the loss waits for it, and ranks must look together: not at every step.
LOOK_EVERY = 20


@dataclass
class Position:
    """Where the run is: epochs finished, and steps taken in the one that is not."""

    epoch: int = 0
    step: int = 0


@dataclass
class Sums:
    """What an epoch adds up."""

    loss: float = 0.0
    correct: float = 0.0
    images: float = 0.0
    seconds: float = 0.0
    mask_seconds: list[float] = field(default_factory=list)
    step_seconds: list[float] = field(default_factory=list)


class Training:
    """Model, optimizer and place of one run. `advance` takes steps until the epoch ends or ``stop`` says so.

    ``record_times`` keeps the seconds of every step, without the mask it makes and the images it waits for; on a GPU
    each step then waits until it is done.
    """

    def __init__(
        self, config: TrainConfig, model: nn.Module, batches: Batches, fabric: Fabric, *, record_times: bool = False
    ) -> None:
        self.config, self.batches, self.fabric = config, batches, fabric
        self.record_times = record_times
        self.position, self.sums = Position(), Sums()
        self.best: dict[str, float] | None = None
        self.looked = False  # whether the loss is known to be finite up to this step
        self.module = model
        self.ema = _averaged(model, config.ema).to(fabric.device) if config.ema is not None else None
        compiled: nn.Module = torch.compile(model) if config.compile else model  # type: ignore[assignment]
        # Only the module goes through Fabric: its optimizer wrapper would hand our closure to a GradScaler,
        # which refuses closures. `_step` does what that wrapper does.
        self.model = fabric.setup_module(compiled)
        # Alone and in float32 its wrapper has nothing to do, but takes a fiftieth of a small network's step.
        self._forward = compiled if fabric.world_size == 1 and config.precision == "fp32" else self.model
        self.optimizer = make_optimizer(
            config,
            compiled,
            fisher_data=batches.unaugmented(),
            steps_per_epoch=batches.steps,
            # Distributed data parallel waits for every gradient, also those that the engine would leave out.
            engine=config.engine and fabric.world_size == 1,
        )
        precision = fabric.strategy.precision
        self.scaler = precision.scaler if isinstance(precision, MixedPrecision) else None
        self._rate = [group["lr"] for group in self.optimizer.param_groups]

    # ---- what is shown and recorded ----------------------------------------------------------------------

    @property
    def steps_taken(self) -> int:
        return self.position.epoch * self.batches.steps + self.position.step

    @property
    def finished(self) -> bool:
        limit = self.config.max_steps
        return self.position.epoch >= self.config.epochs or (limit is not None and self.steps_taken >= limit)

    @property
    def sparsity(self) -> float | None:
        return self.optimizer.sparsity if isinstance(self.optimizer, sparsesam.SharpnessAware) else None

    @property
    def rho(self) -> float | None:
        if not isinstance(self.optimizer, sparsesam.SharpnessAware):
            return None
        return float(self.optimizer.param_groups[0]["rho"])

    @property
    def masks(self) -> dict[str, Tensor]:
        """The masks in use, by parameter; empty without any."""
        return self.optimizer.masks if isinstance(self.optimizer, sparsesam.SharpnessAware) else {}

    @property
    def mask_seconds(self) -> list[float]:
        """The seconds that each mask took which this process has made."""
        rule = getattr(self.optimizer, "mask", None)
        return rule.seconds if isinstance(rule, TimedMask) else []

    # ---- training ----------------------------------------------------------------------------------------

    def advance(self, stop: Callable[[], bool], on_step: Callable[[], None]) -> bool:
        """Train to the end of the epoch, or until all ranks know that one of them was told to stop.

        Returns whether the epoch is complete. ``sums`` then hold its loss and accuracy over all ranks, of the first
        pass of each step that sees the whole batch; ``seconds`` is the time of the steps, augmentation and mask
        updates included.
        """
        self.model.train()
        totals = torch.zeros(2, device=self.fabric.device)
        before, start, made = asdict(self.sums), time.perf_counter(), len(self.mask_seconds)
        told = False
        look_every = 1 if self.fabric.device.type == "cpu" and self.fabric.world_size == 1 else LOOK_EVERY
        for batch in self.batches.train(self.position.epoch, self.position.step):
            totals += self._timed_step(batch) if self.record_times else self._step(batch)
            self.position.step += 1
            self.sums.images += batch.of
            self.sums.seconds = before["seconds"] + time.perf_counter() - start
            self.sums.mask_seconds = before["mask_seconds"] + self.mask_seconds[made:]
            ended = self.position.step == self.batches.steps or self.finished
            self.looked = self.position.step % look_every == 0 or ended
            if self.looked:
                told = self._look(totals, before, stop)
            on_step()
            if told or ended:
                break
        if told and self.position.step < self.batches.steps:
            return False
        if self.position.step == self.batches.steps:
            self.position.epoch, self.position.step = self.position.epoch + 1, 0
        return True

    def _look(self, totals: Tensor, before: dict[str, float], stop: Callable[[], bool]) -> bool:
        seen = [*totals.tolist(), float(stop())]
        if self.fabric.world_size > 1:
            seen = self.fabric.all_reduce(totals.new_tensor(seen), reduce_op="sum").tolist()  # type: ignore[union-attr]
        loss, correct, told = seen
        self.sums.loss, self.sums.correct = before["loss"] + loss, before["correct"] + correct
        if not math.isfinite(loss):
            raise DivergedError(f"the loss is {loss} by step {self.steps_taken}; {self._what_may_help()}")
        return bool(told)

    def _what_may_help(self) -> str:
        rho = "" if self.rho is None else f" or rho ({self.rho})"
        precision = "" if self.config.precision == "fp32" else ", or train with precision fp32"
        return f"lower lr ({self.config.lr}){rho}, warm up longer ({self.config.warmup_epochs} epochs){precision}"

    def _timed_step(self, batch: Batch) -> Tensor:
        self._wait()
        start, masks = time.perf_counter(), len(self.mask_seconds)
        result = self._step(batch)
        self._wait()
        self.sums.step_seconds.append(time.perf_counter() - start - sum(self.mask_seconds[masks:]))
        return result

    def _wait(self) -> None:
        if self.fabric.device.type == "cuda":
            torch.cuda.synchronize(self.fabric.device)

    def _step(self, batch: Batch) -> Tensor:
        """One step; returns this rank's sum of losses and number of right answers over the whole batch.

        They are those at w, but with ``ascent_fraction`` below 1 those at w + e, where alone the whole batch is seen.
        """
        step = self.steps_taken
        self._prepare(step)
        figures: list[Tensor] = []
        # Ranks' gradients are averaged as if their parts were equal; the scale makes up for those that are not.
        scale = len(batch.labels) * self.fabric.world_size / batch.of

        def closure(part: tuple[Tensor, Tensor]) -> Tensor:
            images, labels = part
            self.optimizer.zero_grad()
            scores = self._forward(images)
            loss = cross_entropy(scores, labels, label_smoothing=self.config.label_smoothing)
            self.fabric.backward(loss if scale == 1 else loss * scale)
            if not figures and len(labels) == len(batch.labels):
                correct = (scores.detach().argmax(1) == labels).sum(dtype=loss.dtype)
                figures.extend((loss.detach() * len(labels), correct))
            return loss.detach()

        whole = (batch.images, batch.labels)
        if isinstance(self.optimizer, sparsesam.SharpnessAware):
            self.optimizer.step(closure, batch=whole, scaler=self.scaler)  # type: ignore[arg-type]
        else:
            closure(whole)
            if self.scaler is None:
                self.optimizer.step()
            else:
                self.scaler.step(self.optimizer)
        if self.scaler is not None:
            self.scaler.update()
        if self.ema is not None:
            self.ema.update_parameters(self.module)
        return torch.stack(figures)

    def _prepare(self, step: int) -> None:
        factor = lr_factor(self.config, step, self.batches.steps)
        for group, rate in zip(self.optimizer.param_groups, self._rate, strict=True):
            group["lr"] = rate * factor
        place = (step, self.fabric.global_rank)
        seed_global(derive(self.config.seed, Purpose.STEP, *place), self.fabric.device)

    # ---- test --------------------------------------------------------------------------------------------

    @torch.no_grad()
    def test(self) -> tuple[float, float]:
        """Mean loss and accuracy on the test images, over all ranks."""
        self._agree_on_buffers()
        # Not the wrapped model: its forward would wait for ranks that have fewer test batches.
        model = self.module if self.ema is None else self.ema
        model.eval()
        totals = torch.zeros(3, device=self.fabric.device)
        for batch in self.batches.test():
            with self.fabric.autocast():
                scores = model(batch.images)
            scores = scores.float()
            right, count = (scores.argmax(1) == batch.labels).sum(), scores.new_tensor(len(scores))
            totals += torch.stack((cross_entropy(scores, batch.labels, reduction="sum"), right, count))
        if self.fabric.world_size > 1:
            totals = self.fabric.all_reduce(totals, reduce_op="sum")  # type: ignore[assignment]
        loss, correct, images = totals.tolist()
        return loss / images, correct / images

    def _agree_on_buffers(self) -> None:
        """Normalization statistics are each rank's own after a step; rank 0's count."""
        if self.fabric.world_size > 1:
            for buffer in self.module.buffers():
                torch.distributed.broadcast(buffer, 0)

    # ---- to go on later ----------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Everything; order of images, augmentation, learning rate and dropout follow from the position."""
        return {
            "position": asdict(self.position),
            "sums": asdict(self.sums),
            "best": self.best,
            "model": self.module.state_dict(),
            "ema": None if self.ema is None else self.ema.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scaler": None if self.scaler is None else self.scaler.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position, self.sums = Position(**state["position"]), Sums(**state["sums"])
        self.best = state["best"]
        self.module.load_state_dict(state["model"])
        if self.ema is not None:
            self.ema.load_state_dict(state["ema"])
        self.optimizer.load_state_dict(state["optimizer"])
        if self.scaler is not None:
            self.scaler.load_state_dict(state["scaler"])


def _averaged(model: nn.Module, decay: float) -> AveragedModel:
    return AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(decay), use_buffers=True)
