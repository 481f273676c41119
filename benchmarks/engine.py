"""What a step costs where the engine can leave something out: x an SGD step, one interleaved run.

python -m benchmarks.engine [--model resnet18] [--batch 64] [--rounds 7] [--threads 2] [--only WORDS] [--json FILE]

Masks are fixed before the timing; every case has its own copy of one model. ``--only ,LookSAM`` adds
pytorch-optimizer's LookSAM, ``--only ,forward`` a forward alone, ``--json`` is what ``benchmarks/chart.py`` draws.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import sparsesam
from benchmarks.live_bytes import LiveBytes
from benchmarks.timing import Timed, arguments, begin, format_ratios, interleaved, ratios
from sparsesam.lab.experiment.provenance import provenance
from sparsesam.lab.models import build_model
from sparsesam.settings import Settings

SGD: dict[str, Any] = {"lr": 0.01, "momentum": 0.9, "weight_decay": 1e-3}
Wrap = Callable[..., Any]


class Case:
    """A model of its own, prepared (compiled, wrapped), an optimizer around it, and its step."""

    steps_per_call = 1

    def __init__(
        self,
        model: nn.Module,
        batch: tuple[Tensor, Tensor],
        wrap: Wrap | None,
        prepare: Callable[[nn.Module], nn.Module] = lambda model: model,
    ) -> None:
        self.model = prepare(copy.deepcopy(model))
        base = torch.optim.SGD(self.model.parameters(), **SGD)
        self.optimizer: Any = base if wrap is None else wrap(base, self.model)
        self.batch = batch

    def __call__(self) -> None:
        settings = getattr(self.optimizer, "settings", None)
        if isinstance(settings, Settings) and settings.ascent_fraction < 1:
            self.optimizer.step(self.closure, batch=self.batch)
        elif hasattr(self.optimizer, "first_step"):  # pytorch-optimizer wants the first gradient before the step
            self.closure(self.batch)
            self.optimizer.step(lambda: self.closure(self.batch))
        else:
            self.optimizer.step(lambda: self.closure(self.batch))

    def closure(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        self.optimizer.zero_grad()
        loss = cross_entropy(self.model(batch[0]), batch[1])
        loss.backward()
        return loss

    @property
    def perturbed(self) -> float:
        if hasattr(self.optimizer, "first_step"):
            return 1.0
        sparsity = getattr(self.optimizer, "sparsity", 1.0)
        return 1 - (1.0 if sparsity is None else sparsity)

    def peak_bytes(self) -> int:
        """Live bytes at the peak of a step, beyond model and batch."""
        with LiveBytes([*self.model.parameters(), *self.model.buffers(), *self.batch]) as live:
            self()
            live.restart()
            self()
        return int(live.peak)


def filters_of_every_layer(model: nn.Module, share: float) -> sparsesam.MaskRule:
    """The given share of the filters of every layer, and every bias and normalization parameter."""
    generator = torch.Generator().manual_seed(0)
    masks = {}
    for name, parameter in model.named_parameters():
        mask = torch.ones_like(parameter, dtype=torch.bool)
        if parameter.dim() > 1:
            mask[torch.randperm(len(parameter), generator=generator)[round(share * len(parameter)) :]] = False
        masks[name] = mask
    return sparsesam.fixed_mask(masks)


def ssam(mask: sparsesam.MaskRule, **options: Any) -> Wrap:
    options = {"norm": "masked", **options}
    return lambda base, model: sparsesam.SSAM(base, model, rho=0.1, mask=mask, **options)


def pytorch_optimizer_sam(base: Any, model: nn.Module) -> Any:
    from pytorch_optimizer import SAM

    return SAM(model.parameters(), torch.optim.SGD, rho=0.1, **SGD)


class LookSAMCase(Case):
    """pytorch-optimizer's LookSAM in its cheap form: a second pass only in every fifth step; timed five at a time."""

    steps_per_call = 5

    def __init__(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> None:
        super().__init__(model, batch, None)
        from pytorch_optimizer import LookSAM

        self.optimizer = LookSAM(self.model.parameters(), torch.optim.SGD, rho=0.1, k=5, **SGD)

    def __call__(self) -> None:
        for step in range(5):
            self.closure(self.batch)
            if step == 0:
                self.optimizer.first_step(zero_grad=True)
                self.closure(self.batch)
            self.optimizer.second_step()


class ForwardCase(Case):
    """A forward alone: what no mask of filters leaves out."""

    def __call__(self) -> None:
        cross_entropy(self.model(self.batch[0]), self.batch[1])


#: Batch and image size of each model, for a step of a few seconds on two cores.
SHAPES = {"resnet18": (64, 32), "wrn-28-10": (8, 32), "vit-s-16": (8, 224)}

#: What the last block, the last stage and the last two stages are called in each model.
TAILS = {
    "resnet18": (("layer4.1.*", "fc.*"), ("layer4.*", "fc.*"), ("layer[34].*", "fc.*")),
    "wrn-28-10": (
        ("layer3.3.*", "bn.*", "fc.*"),
        ("layer3.*", "bn.*", "fc.*"),
        ("layer[23].*", "bn.*", "fc.*"),
    ),
    "vit-s-16": (
        ("blocks.11.*", "norm.*", "head.*"),
        ("blocks.9.*", "blocks.1?.*", "norm.*", "head.*"),
        ("blocks.[6-9].*", "blocks.1?.*", "norm.*", "head.*"),
    ),
}


def table(model: nn.Module, *tails: tuple[str, ...]) -> dict[str, Wrap | None]:
    block, stage, more = tails
    half, tenth = (filters_of_every_layer(model, share) for share in (0.5, 0.1))
    unstructured = sparsesam.random_mask(sparsity=0.5)
    return {
        "SGD": None,
        "SAM": lambda base, m: sparsesam.SAM(base, m, rho=0.1),
        "pytorch-optimizer SAM": pytorch_optimizer_sam,
        "half the filters, explicit": ssam(half),
        "half the filters, implicit": ssam(half, ascent="implicit"),
        "a tenth of the filters, implicit": ssam(tenth, ascent="implicit"),
        "last block + classifier": ssam(sparsesam.fixed_mask(*block)),
        "last stage + classifier": ssam(sparsesam.fixed_mask(*stage)),
        "last two stages + classifier": ssam(sparsesam.fixed_mask(*more)),
        "last stage, a quarter of the batch": ssam(sparsesam.fixed_mask(*stage), ascent_fraction=0.25),
        "unstructured 50 %, engine on": ssam(unstructured),
        "unstructured 50 %, engine off": ssam(unstructured, engine=False),
    }


def main() -> None:
    parser = arguments(__doc__, rounds=7, warmup=2, threads=2)
    parser.add_argument("--model", default="resnet18", choices=list(TAILS))
    parser.add_argument("--batch", type=int, help="images in a step; default 64 for ResNet-18, 8 for the others")
    parser.add_argument("--only", default="", help="only cases whose name holds one of these words (and SGD)")
    parser.add_argument("--json", type=Path, help="write the table there as well")
    parser.add_argument("--memory", action="store_true", help="also the peak of live bytes of a step")
    options = begin(parser)
    torch.manual_seed(0)
    count, side = SHAPES[options.model]
    count = options.batch or count
    model = build_model(options.model, image_size=side)
    batch = (torch.randn(count, 3, side, side), torch.randint(10, (count,)))
    words = options.only.split(",")
    chosen = {
        name: Case(model, batch, wrap)
        for name, wrap in table(model, *TAILS[options.model]).items()
        if name == "SGD" or any(word in name for word in words)
    }
    if "forward" in words:
        chosen["a forward alone"] = ForwardCase(model, batch, None)
    if "LookSAM" in words:
        chosen["pytorch-optimizer LookSAM, k=5"] = LookSAMCase(model, batch)
    timed = interleaved(chosen, "SGD", rounds=options.rounds, warmup=options.warmup, clock=options.clock)
    for name, times in timed.items():
        timed[name] = [Timed(one.seconds / chosen[name].steps_per_call, one.reference) for one in times]
    rows = ratios(timed)
    print(f"{options.model}, batch {count} of {side}x{side}, {options.rounds} interleaved rounds")
    print(format_ratios(rows, "SGD"))
    peaks = {}
    if options.memory:
        peaks = {name: case.peak_bytes() for name, case in chosen.items()}
        for name, peak in peaks.items():
            print(f"{name:36} peak {peak / 2**20:8.1f} MiB, {peak / peaks['SGD']:.3f} x SGD")
    if options.json:
        results = [
            {**asdict(row), "perturbed": chosen[row.name].perturbed, "peak_bytes": peaks.get(row.name)} for row in rows
        ]
        options.json.write_text(json.dumps({"provenance": provenance(), "rows": results}, indent=1))


if __name__ == "__main__":
    main()
