"""``sparsesam export``: the weights of a run for other programs."""

from __future__ import annotations

from pathlib import Path

from sparsesam.lab.commands.parser import Namespace, Parser
from sparsesam.lab.display.numbers import plural

HELP = "Write the weights of a run as a plain state_dict (.pt, .pth) or as safetensors (.safetensors)."


def add_arguments(parser: Parser) -> None:
    parser.add_argument("run", type=Path, metavar="RUN", help="directory of a run")
    parser.add_argument("-o", "--out", type=Path, required=True, help="FILE.pt, FILE.pth or FILE.safetensors")
    parser.add_argument("--weights", type=str, default="best", help="best, last, or a file of weights (default: best)")


def run(options: Namespace) -> int:
    from sparsesam.lab.experiment.evaluation import export

    count = export(options.run, options.weights, options.out)
    print(f"{plural(count, 'number')}: {options.out}")
    return 0
