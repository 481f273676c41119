"""The paper's timing of N:M masks: one step of a ViT with a single, very wide block, on the current device.

python -m benchmarks.vit_timing [--scale 0.125] [--image 16] [--batch 4] [--precision bf16] [--rounds 5]
                                [--only 'implicit 2:4']

The paper uses scale 1, image 32 and batch 16 with Adam on an A100: 403 million weights, so that each case takes 8 GB
(weights, gradients, two moments, saved weights), and all cases are in memory at once; --only selects fewer.

Sparse tensor cores skip half of the multiplications of the input gradient in an implicit 2:4 ascent, in 16 bits; on
other devices the masked product is dense and costs as much as the unmasked one. Mask refreshes are not counted.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy

import sparsesam
from benchmarks.cases import Batch, Case
from benchmarks.timing import arguments, begin, compare, device_name
from sparsesam.lab.models.vit import vit

WIDTH = 8192
#: Seconds of one iteration on an A100 (the paper's table nm_vit).
PAPER = {"SAM": 4.10, "implicit 1:2": 3.58, "implicit 2:4": 3.53}
PRECISIONS = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}
CASES: dict[str, dict[str, Any]] = {
    "Adam": {},
    "SAM": {},
    "explicit 2:4": {"pattern": "2:4"},
    "implicit 1:2": {"pattern": "1:2", "ascent": "implicit-dense"},
    "implicit 2:4": {"pattern": "2:4", "ascent": "implicit-dense"},
    "implicit 2:4, masked dW": {"pattern": "2:4", "ascent": "implicit", "norm": "masked"},
    "implicit 2:4 filters, masked dW": {"pattern": "2:4 filters", "ascent": "implicit", "norm": "masked"},
}


def main() -> None:
    parser = arguments(__doc__, image=16, batch=4, rounds=5, warmup=1, threads=2)
    parser.add_argument("--scale", type=float, default=0.125, help=f"fraction of the paper's width {WIDTH}")
    parser.add_argument("--precision", choices=tuple(PRECISIONS), default="fp32")
    parser.add_argument("--only", default="", help="only cases whose name contains this, and SAM")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = begin(parser)
    device, width = torch.device(options.device), round(WIDTH * options.scale)
    steps = {
        name: case(name, width, options.image, options.batch, device, options.precision)
        for name in CASES
        if name == "SAM" or options.only in name
    }
    rows = compare(steps, "SAM", options)
    print(
        f"one block of width {width}, {options.image}x{options.image} patches of one pixel, batch {options.batch}, "
        f"{options.precision} on {device_name(device)}, {options.rounds} interleaved rounds"
    )
    print(f"{'':32} {'s / step':>9}  x SAM (quartiles)         paper: s / step, x SAM")
    for row in rows:
        theirs = f"{PAPER[row.name]:.2f}, {PAPER[row.name] / PAPER['SAM']:.2f}" if row.name in PAPER else "–"
        print(f"{row.name:32} {row.seconds:9.4f}  {row.median:.3f} ({row.low:.3f} to {row.high:.3f})    {theirs}")


def case(name: str, width: int, side: int, batch: int, device: torch.device, precision: str) -> TimedCase:
    torch.manual_seed(0)
    model = vit(10, 3, side, patch_size=1, dim=width, depth=1, heads=1, mlp_ratio=1.0)
    data = (torch.randn(batch, 3, side, side, device=device), torch.arange(batch, device=device) % 10)
    wrap = None if name == "Adam" else partial(_wrap, data=data, **CASES[name])
    adam = {"lr": 1e-3, "betas": (0.9, 0.999)}
    half, move = PRECISIONS[precision], partial(nn.Module.to, device=device)
    return TimedCase(model, data, wrap, prepare=move, base=torch.optim.Adam, settings=adam, precision=half)


class TimedCase(Case):
    """A case whose step returns the loss, and so waits for the device."""

    def __call__(self) -> float:
        return float(super().__call__().detach())


def _wrap(
    base: torch.optim.Optimizer, model: nn.Module, *, data: Batch, pattern: str = "", **options: Any
) -> torch.optim.Optimizer:
    """Returns SAM, or SSAM with a mask computed once, in the first step."""
    if not pattern:
        return sparsesam.SAM(base, model, rho=0.2)
    mask = sparsesam.fisher_mask(data, cross_entropy, pattern=pattern, samples=len(data[1]))
    return sparsesam.SSAM(base, model, rho=0.2, mask=mask, **options)


if __name__ == "__main__":
    main()
