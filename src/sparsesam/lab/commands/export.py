"""Write the weights of a run as a plain state_dict (.pt, .pth) or as safetensors (.safetensors)."""

from __future__ import annotations

from pathlib import Path

import torch

from sparsesam.integrations.extras import required_by
from sparsesam.lab.commands.eval import WEIGHTS, load_trained
from sparsesam.lab.commands.parser import Namespace, Parser
from sparsesam.lab.display import make_parent, plural

WEIGHT_FORMATS = (".pt", ".pth", ".safetensors")


def add_arguments(parser: Parser) -> None:
    parser.add_argument("run", type=Path, metavar="RUN", help="directory of a run")
    parser.add_argument("-o", "--out", type=Path, required=True, help="FILE.pt, FILE.pth or FILE.safetensors")
    parser.add_argument("--weights", type=str, default="best", help=WEIGHTS)


def run(options: Namespace) -> None:
    out: Path = options.out
    if out.suffix not in WEIGHT_FORMATS:
        raise ValueError(f"--out must end in {', '.join(WEIGHT_FORMATS)}, got {out}")
    trained = load_trained(options)
    tensors = trained.weights
    make_parent("--out", out)
    if out.suffix == ".safetensors":
        with required_by(str(out), "safetensors"):
            from safetensors.torch import save_file
        # safetensors rejects tensors that share memory.
        separate = {name: tensor.detach().cpu().clone().contiguous() for name, tensor in tensors.items()}
        save_file(separate, out, metadata={"model": trained.config.model, "dataset": trained.config.dataset})
    else:
        torch.save(tensors, out)
    print(f"{plural(sum(tensor.numel() for tensor in tensors.values()), 'number')}: {out}")
