"""``sparsesam eval``: loss and accuracy of a trained run."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from sparsesam.lab.commands.parser import Namespace, Parser
from sparsesam.lab.display.numbers import plural

HELP = "Evaluate the weights of a run on its test or validation images."


def add_arguments(parser: Parser) -> None:
    parser.add_argument("run", type=Path, metavar="RUN", help="directory of a run")
    parser.add_argument("--weights", type=str, default="best", help="best, last, or a file of weights (default: best)")
    parser.add_argument("--split", type=Literal["test", "val"], default="test", help="images (default: test)")
    parser.add_argument("--data-dir", type=Path | None, default=None, help="where the data set's files are")
    parser.add_argument("--accelerator", type=str, default="auto", help="cpu, cuda, mps or auto")


def run(options: Namespace) -> int:
    from sparsesam.lab.experiment.config import RunEnvironment
    from sparsesam.lab.experiment.evaluation import evaluate

    environment = RunEnvironment(data_dir=options.data_dir, accelerator=options.accelerator)
    found = evaluate(options.run, options.weights, options.split, environment)
    numbers = f"accuracy {found.accuracy:.2%}, loss {found.loss:.4f}"
    print(f"{options.split} {numbers}, {plural(found.images, 'image')}; {found.file}")
    return 0
