"""The paper's timing of N:M masks: one step of a ViT of a single, very wide block, on whatever device is there.

python -m benchmarks.vit_timing [--scale 0.125] [--image 16] [--batch 4] [--precision bf16] [--rounds 5]
                                [--only 'implicit 2:4']

The paper's own are scale 1, image 32 and batch 16 with Adam on an A100: 403 million weights, so that each case holds
8 GB (weights, gradients, two moments, saved weights), and all cases are held at once; --only takes fewer.

Sparse tensor cores leave out half of the multiplications of an implicit 2:4 ascent's input gradient, where there are
any and in 16 bits; elsewhere the masked product is dense and costs what the dense one does. Refreshes of the masks are
not counted.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import sparsesam
from benchmarks.timing import arguments, begin, interleaved, ratios
from sparsesam.lab.models.vit import vit

WIDTH = 8192
#: Seconds of one iteration on an A100 (the paper's table nm_vit).
PAPER = {"SAM": 4.10, "implicit 1:2": 3.58, "implicit 2:4": 3.53}
CASES: dict[str, dict[str, str]] = {
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
    parser.add_argument("--scale", type=float, default=0.125, help=f"of the width {WIDTH}")
    parser.add_argument("--precision", choices=("fp32", "bf16", "fp16"), default="fp32")
    parser.add_argument("--only", default="", help="cases whose name contains this, beside SAM")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = begin(parser)
    device, width = torch.device(options.device), round(WIDTH * options.scale)
    steps = {
        name: case(name, width, options.image, options.batch, device, options.precision, settings)
        for name, settings in CASES.items()
        if name == "SAM" or options.only in name
    }
    timed = interleaved(steps, "SAM", rounds=options.rounds, warmup=options.warmup, clock=options.clock)
    print(
        f"one block of width {width}, {options.image}x{options.image} patches of one pixel, batch {options.batch}, "
        f"{options.precision} on {_called(device)}, {options.rounds} interleaved rounds"
    )
    print(f"{'':32} {'s / step':>9}  x SAM (quartiles)         paper: s / step, x SAM")
    for row in ratios(timed):
        theirs = f"{PAPER[row.name]:.2f}, {PAPER[row.name] / PAPER['SAM']:.2f}" if row.name in PAPER else "–"
        print(f"{row.name:32} {row.seconds:9.4f}  {row.median:.3f} ({row.low:.3f} to {row.high:.3f})    {theirs}")


def case(
    name: str, width: int, side: int, batch: int, device: torch.device, precision: str, settings: dict[str, str]
) -> Callable[[], float]:
    """A step of one optimizer, which returns its loss; a mask is made once, in the first step."""
    torch.manual_seed(0)
    model = vit(10, 3, side, patch_size=1, dim=width, depth=1, heads=1, mlp_ratio=1.0).to(device)
    images = torch.randn(batch, 3, side, side, device=device)
    labels = torch.arange(batch, device=device) % 10
    optimizer = _optimizer(name, model, (images, labels), settings)
    sixteen = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision)

    def cast() -> AbstractContextManager[object]:
        return nullcontext() if sixteen is None else torch.autocast(device.type, sixteen)

    def closure() -> Tensor:
        optimizer.zero_grad()
        with cast():
            scores = model(images)
        loss = cross_entropy(scores.float(), labels)
        loss.backward()
        return loss.detach()

    def step() -> float:
        return float(optimizer.step(closure))  # type: ignore[arg-type]  # which waits for the device

    return step


def _optimizer(
    name: str, model: nn.Module, data: tuple[Tensor, Tensor], settings: dict[str, str]
) -> torch.optim.Optimizer:
    base = torch.optim.Adam(model.parameters(), lr=1e-3, betas=(0.9, 0.999))
    if name == "Adam":
        return base
    if name == "SAM":
        return sparsesam.SAM(base, model, rho=0.2)
    options = dict(settings)
    mask = sparsesam.fisher_mask(
        data, cross_entropy, pattern=options.pop("pattern"), samples=len(data[1]), refresh=sparsesam.manual()
    )
    return sparsesam.SSAM(base, model, rho=0.2, mask=mask, **options)  # type: ignore[arg-type]


def _called(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


if __name__ == "__main__":
    main()
