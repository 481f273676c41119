"""The training loop: the state of a run, its steps, epochs and evaluations."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import sparsesam
from sparsesam.budget import MultiplyAdds
from sparsesam.lab.experiment.batches import Batch, Batches
from sparsesam.lab.experiment.config import TrainConfig
from sparsesam.lab.experiment.cost import StepCost, plain_pass_operations
from sparsesam.lab.experiment.errors import DivergedError
from sparsesam.lab.experiment.optimizers import lr_factor, make_optimizer
from sparsesam.lab.experiment.result import Sums
from sparsesam.lab.experiment.seeds import Purpose, derive_seed, seed_global
from sparsesam.masks.state import around_refresh

if TYPE_CHECKING:
    from lightning_fabric import Fabric

#: Reading the loss synchronizes with the GPU and all ranks, so there it is read only every `SYNC_EVERY` steps.
SYNC_EVERY = 20
#: Steps of esam perturb other layers each: the cost is the mean of so many.
VARYING_STEPS = 100


class Training:
    """Model, optimizer and state of one run.

    ``record_times`` records the seconds of every step, excluding mask refreshes and waiting for images; on a GPU it
    synchronizes each step.
    """

    def __init__(
        self, config: TrainConfig, model: nn.Module, batches: Batches, fabric: Fabric, *, record_times: bool = False
    ) -> None:
        self.config, self.batches, self.fabric = config, batches, fabric
        self.record_times = record_times
        self.clock: Callable[[], float] = time.perf_counter
        self.steps_taken, self.sums = 0, Sums()
        self.stop_requested = False  # whether a rank had to stop in the last step
        self.synced = False  # whether the loss is known to be finite up to this step
        self.module = model
        first = next(batches.train(0))
        unit = plain_pass_operations(model.to(fabric.device), first.images, first.labels)
        self.cost = StepCost(unit, config.batch_size)
        compiled = model
        if config.compile:  # operations of compiled code are not seen
            self.cost.per_image = {"ascent": 1 + config.ascent_steps * config.ascent_fraction, "plain": 1.0}
            compiled = torch.compile(model)  # type: ignore[assignment]
        self.ema: AveragedModel | None = None
        if config.ema is not None:
            average = get_ema_multi_avg_fn(config.ema)
            self.ema = AveragedModel(model, multi_avg_fn=average, use_buffers=True).to(fabric.device)
        # Not Fabric's own wrappers: they call our closures with a GradScaler, which rejects closures, and `minimize`
        # differentiates where they want `fabric.backward`.
        self.model = fabric.strategy.setup_module(compiled)
        fisher_data = batches.for_fisher()
        self.optimizer = make_optimizer(config, self.model, fisher_data=fisher_data, steps_per_epoch=batches.steps)
        self.scaler = getattr(fabric.strategy.precision, "scaler", None)  # only mixed precision has one
        if self.scaler is not None and not getattr(self.optimizer, "allows_scaler", True):
            raise ValueError(f"precision must not be fp16 with optimizer {config.optimizer}; bf16 needs no GradScaler")
        self._rate = [group["lr"] for group in self.optimizer.param_groups]

    @property
    def num_parameters(self) -> int:
        return sum(parameter.numel() for parameter in self.module.parameters())

    @property
    def total_steps(self) -> int:
        return self.config.total_steps(self.batches.steps)

    @property
    def finished(self) -> bool:
        return self.steps_taken >= self.total_steps

    @property
    def epoch_ended(self) -> bool:
        """Whether the last step completed an epoch or the run."""
        return self.steps_taken % self.batches.steps == 0 or self.finished

    @property
    def rho(self) -> float | None:
        rho = self.optimizer.param_groups[0].get("rho")
        return None if rho is None else float(rho)

    # ---- training ----------------------------------------------------------------------------------------

    def advance(self, stop: Callable[[], bool], on_step: Callable[[], None] = lambda: None) -> None:
        """Train to the end of the epoch, or until all ranks know that one of them was asked to stop.

        At the end of an epoch, ``sums`` has its loss and accuracy over all ranks, from the first pass of each step over
        the whole batch, and the time of the steps, including augmentation and mask updates.
        """
        self.model.train()
        self.stop_requested = False
        totals, last = torch.zeros(2, device=self.fabric.device), self.clock()
        sync_every = 1 if self.fabric.device.type == "cpu" and self.fabric.world_size == 1 else SYNC_EVERY
        for batch in self.batches.train(*divmod(self.steps_taken, self.batches.steps)):
            start, masks = self._now(sync=self.record_times), len(self.sums.mask_seconds)
            totals += self._step(batch)
            if self.record_times:
                self.sums.step_seconds.append(self._now() - start - sum(self.sums.mask_seconds[masks:]))
            self.steps_taken += 1
            self.sums.images += batch.global_size
            self.synced = self.steps_taken % sync_every == 0 or self.epoch_ended
            if self.synced:
                self.stop_requested = self._sync(totals, stop)
                totals.zero_()
            now = self.clock()
            self.sums.seconds, last = self.sums.seconds + now - last, now
            on_step()
            if self.stop_requested or self.epoch_ended:
                break

    def _sync(self, totals: Tensor, stop: Callable[[], bool]) -> bool:
        """Add loss and correct predictions of the last steps to ``sums``; returns whether any rank must stop."""
        loss, correct, stops = self._summed(torch.cat((totals, totals.new_tensor([float(stop())]))))
        self.sums.loss, self.sums.correct = self.sums.loss + loss, self.sums.correct + correct
        if not math.isfinite(loss):
            rho = "" if self.rho is None else f" or rho ({self.rho})"
            raise DivergedError(
                f"the loss is {loss} by step {self.steps_taken}; lower lr ({self.config.lr}){rho}, use a longer "
                f"warm-up (warmup_epochs {self.config.warmup_epochs}), or fp32 instead of mixed precision"
            )
        return bool(stops)

    def _now(self, *, sync: bool = True) -> float:
        if sync and self.fabric.device.type == "cuda":
            torch.cuda.synchronize(self.fabric.device)
        return self.clock()

    @contextmanager
    def _measured_refresh(self) -> Iterator[None]:
        """Measure the time of a mask refresh, and the cost of the first one."""
        start = self._now()
        with nullcontext() if self.cost.masks else MultiplyAdds() as counter:
            yield
        if counter is not None:
            self.cost.per_mask = counter.products / self.cost.unit
        self.cost.masks += 1
        self.sums.mask_seconds.append(self._now() - start)

    def _step(self, batch: Batch) -> Tensor:
        """Take one step; returns this rank's sum of losses and number of correct predictions over the whole batch.

        They are at w; with ``ascent_fraction`` below 1 they are at w + e, the only pass over the whole batch.
        """
        factor = lr_factor(self.config, self.steps_taken, self.batches.steps)
        for group, rate in zip(self.optimizer.param_groups, self._rate, strict=True):
            group["lr"] = rate * factor
        place = (self.steps_taken, self.fabric.global_rank)
        seed_global(derive_seed(self.config.seed, Purpose.STEP, *place), self.fabric.device)
        kind = "ascent" if getattr(self.optimizer, "needs_first_pass", False) else "plain"
        masks = self.cost.masks
        varies = self.config.optimizer == "esam" and self.steps_taken < VARYING_STEPS
        with MultiplyAdds() if varies or kind not in self.cost.per_image else nullcontext() as counter:
            figures = self._passes(batch)
        masks, operations, rule = self.cost.masks - masks, None, getattr(self.optimizer, "mask", None)
        # Count a step without a mask refresh if there is one: from a step that makes a mask nothing is left out.
        if counter is not None and (not masks or (rule is not None and rule.refresh == 1)):
            operations = (counter.products / self.cost.unit - masks * self.cost.per_mask) / len(batch.images)
        self.cost.add_step(kind, batch.global_size, operations)
        if self.scaler is not None:
            self.scaler.update()
        if self.ema is not None:
            self.ema.update_parameters(self.module)
        return figures

    def _passes(self, batch: Batch) -> Tensor:
        # DDP averages gradients with equal weight per rank; the scale corrects for parts of unequal size.
        scale = len(batch.labels) * self.fabric.world_size / batch.global_size
        fraction = 1.0 if self.config.is_plain else self.config.ascent_fraction
        count = min(self.config.accumulate, math.ceil(fraction * len(batch.labels)))
        losses = [partial(self._loss, number, count, scale) for number in range(count)]
        whole = (batch.images, batch.labels)
        if isinstance(self.optimizer, sparsesam.SharpnessAware):
            with around_refresh(self._measured_refresh):
                _, figures = self.optimizer.minimize(losses, has_aux=True, batch=whole, scaler=self.scaler)
            return torch.stack(figures).sum(0)
        self.optimizer.zero_grad()
        figures = []
        for number, function in enumerate(losses, start=1):
            no_sync = getattr(self.model, "no_sync", nullcontext) if number < count else nullcontext
            with no_sync():
                loss, some = function(whole)
                (loss if self.scaler is None else self.scaler.scale(loss)).backward()
            figures.append(some)
        if self.scaler is None:
            self.optimizer.step()
        else:
            self.scaler.step(self.optimizer)
        return torch.stack(figures).sum(0)

    def _loss(self, number: int, count: int, scale: float, part: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Returns what one of ``count`` micro-batches adds to the mean loss over ``part``, times ``scale``; and its sum
        of losses and number of correct predictions.
        """
        images, labels = (tensor.tensor_split(count)[number] for tensor in part)
        with self.fabric.autocast():
            scores = self.model(images)
        if self.config.precision in ("bf16", "fp16"):
            scores = scores.float()
        loss = cross_entropy(scores, labels, label_smoothing=self.config.label_smoothing)
        classes = labels if labels.dim() == 1 else labels.argmax(1)
        correct = (scores.detach().argmax(1) == classes).sum(dtype=loss.dtype)
        share = scale * len(labels) / len(part[1])
        return loss if share == 1 else loss * share, torch.stack((loss.detach() * len(labels), correct))

    # ---- evaluation --------------------------------------------------------------------------------------

    def evaluate(self, split: Literal["val", "test"]) -> tuple[float, float, float]:
        """Returns mean loss, accuracy and top-5 accuracy on the validation or test images, over all ranks."""
        # Not the wrapped model: its forward would wait for ranks that have fewer batches.
        model = self.module if self.ema is None else self.ema
        if self.fabric.world_size > 1:  # normalization statistics differ between ranks after a step; use rank 0's
            for buffer in dict.fromkeys((*self.module.buffers(), *model.buffers())):
                torch.distributed.broadcast(buffer, 0)
        totals = loss_and_accuracy(model, self.batches.evaluation(split), self.fabric)
        loss, correct, among_five, images = self._summed(totals)
        return loss / images, correct / images, among_five / images

    def _summed(self, values: Tensor) -> list[float]:
        """Returns the sums over all ranks."""
        if self.fabric.world_size > 1:
            values = self.fabric.all_reduce(values, reduce_op="sum")  # type: ignore[assignment]
        return values.tolist()

    # ---- checkpoints -------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Returns all state; image order, augmentation, learning rate and dropout follow from the position."""
        epoch, step = divmod(self.steps_taken, self.batches.steps)
        parts = {name: None if part is None else part.state_dict() for name, part in self._parts().items()}
        position = {"epoch": epoch, "step": step}
        return {"position": position, "sums": asdict(self.sums), "cost": asdict(self.cost), **parts}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.steps_taken = state["position"]["epoch"] * self.batches.steps + state["position"]["step"]
        self.sums, self.cost = Sums(**state["sums"]), StepCost(**state["cost"])
        for name, part in self._parts().items():
            if part is not None:
                part.load_state_dict(state[name])

    def _parts(self) -> dict[str, Any]:
        return {"model": self.module, "ema": self.ema, "optimizer": self.optimizer, "scaler": self.scaler}


@torch.no_grad()
def loss_and_accuracy(model: nn.Module, batches: Iterable[Batch], fabric: Fabric) -> Tensor:
    """Returns sums over this rank's batches: loss, images with the right class first or among five, all images."""
    model.eval()
    totals = torch.zeros(4, device=fabric.device)
    for batch in batches:
        with fabric.autocast():
            scores = model(batch.images)
        scores = scores.float()
        right, count = (scores.argmax(1) == batch.labels).sum(), scores.new_tensor(len(scores))
        among_five = (scores.topk(min(5, scores.shape[1])).indices == batch.labels[:, None]).sum()
        totals += torch.stack((cross_entropy(scores, batch.labels, reduction="sum"), right, among_five, count))
    return totals
