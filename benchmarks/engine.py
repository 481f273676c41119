"""Cost of a step that leaves out work, relative to an SGD step, in one interleaved run.

python -m benchmarks.engine [--model resnet18] [--batch 64] [--rounds 7] [--threads 2] [--only WORDS] [--json FILE]

Masks are fixed before the timing; every case has its own copy of one model. ``--only ,LookSAM`` adds
pytorch-optimizer's LookSAM, ``--only ,forward`` a forward pass alone; ``benchmarks/chart.py`` draws the JSON file.
"""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

import torch
from torch import nn

import sparsesam
from benchmarks.cases import SGD, Batch, Case, ClosureCase, Wrap, cifar_batch, pytorch_optimizer_sam, sam, ssam
from benchmarks.timing import arguments, begin, compare, format_ratios
from sparsesam.lab.experiment.provenance import provenance
from sparsesam.lab.models import build_model


def filters_of_every_layer(model: nn.Module, share: float) -> sparsesam.MaskRule:
    """Returns a mask of the given share of the filters of every layer, and all biases and normalization parameters."""
    generator = torch.Generator().manual_seed(0)
    masks = {}
    for name, parameter in model.named_parameters():
        mask = torch.ones_like(parameter, dtype=torch.bool)
        if parameter.dim() > 1:
            mask[torch.randperm(len(parameter), generator=generator)[round(share * len(parameter)) :]] = False
        masks[name] = mask
    return sparsesam.fixed_mask(masks)


CLOSURE = "last stage + classifier, step(closure)"
LOOK_SAM = "pytorch-optimizer LookSAM, k=5"


class LookSAMCase(Case):
    """Five steps of pytorch-optimizer's LookSAM in its cheap form: a second pass only in every fifth step."""

    def __init__(self, model: nn.Module, batch: Batch) -> None:
        super().__init__(model, batch)
        from pytorch_optimizer import LookSAM

        self.optimizer = LookSAM(self.model.parameters(), torch.optim.SGD, rho=0.1, k=5, **SGD)

    def __call__(self) -> None:
        for step in range(5):
            self.closure()
            if step == 0:
                self.optimizer.first_step(zero_grad=True)
                self.closure()
            self.optimizer.second_step()


class ForwardCase(Case):
    """A forward pass alone, which no mask of filters can skip."""

    def __call__(self) -> None:
        self.loss(self.batch)


#: Batch and image size of each model, so that a step takes a few seconds on two cores.
SHAPES = {"resnet18": (64, 32), "wrn-28-10": (8, 32), "vit-s-16": (8, 224)}

#: Names of the last block, the last stage and the last two stages in each model.
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
        "SAM": sam,
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
    parser.add_argument("--only", default="", help="only cases whose name contains one of these words (and SGD)")
    parser.add_argument("--json", type=Path, help="also write the table to this file")
    parser.add_argument("--memory", action="store_true", help="also measure the peak of live bytes of a step")
    options = begin(parser)
    torch.manual_seed(0)
    count, side = SHAPES[options.model]
    count = options.batch or count
    model = build_model(options.model, image_size=side)
    batch = cifar_batch(count, side)
    words = options.only.split(",")
    chosen = {
        name: Case(model, batch, wrap)
        for name, wrap in table(model, *TAILS[options.model]).items()
        if name == "SGD" or any(word in name for word in words)
    }
    if any(word in CLOSURE for word in words):
        chosen[CLOSURE] = ClosureCase(model, batch, ssam(sparsesam.fixed_mask(*TAILS[options.model][1])))
    if "forward" in words:
        chosen["a forward alone"] = ForwardCase(model, batch)
    if "LookSAM" in words:
        chosen[LOOK_SAM] = LookSAMCase(model, batch)
    rows = compare(chosen, "SGD", options)
    for place, row in enumerate(rows):
        if row.name == LOOK_SAM:
            numbers = {name: value / 5 for name, value in asdict(row).items() if name != "name"}
            rows[place] = replace(row, **numbers)
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
