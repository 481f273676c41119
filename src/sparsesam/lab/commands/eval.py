"""Evaluate the weights of a run on its test or validation images."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from sparsesam.lab.commands.parser import Namespace, Parser, add_options, given_options
from sparsesam.lab.display import plural
from sparsesam.lab.experiment.batches import Batches
from sparsesam.lab.experiment.config import Machine
from sparsesam.lab.experiment.run import make_fabric
from sparsesam.lab.experiment.training import loss_and_accuracy
from sparsesam.lab.inspection import TrainedRun, load_run

WEIGHTS = "best, last, or a file of weights (default: best)"


def add_arguments(parser: Parser) -> None:
    parser.add_argument("run", type=Path, metavar="RUN", help="directory of a run")
    parser.add_argument("--weights", type=str, default="best", help=WEIGHTS)
    text = "images to evaluate on (default: test)"
    parser.add_argument("--split", type=Literal["test", "val"], default="test", help=text)
    add_options(parser, Machine)


def load_trained(options: Namespace) -> TrainedRun:
    """Load the run in ``options.run`` with the requested weights."""
    machine = given_options(options, Machine)
    if options.weights in ("best", "last"):
        return load_run(options.run, checkpoint=options.weights, **machine)
    return load_run(options.run, weights=Path(options.weights), **machine)


def run(options: Namespace) -> None:
    trained = load_trained(options)
    if options.split == "val" and trained.config.val_size is None:
        raise ValueError(f"{options.run} has no validation images (val_size); evaluate it on the test images")
    fabric = make_fabric(trained.config, trained.environment)
    batches = Batches(trained.config, trained.splits, fabric.device)
    sums = loss_and_accuracy(trained.model, batches.evaluation(options.split), fabric)
    loss, right, among_five, images = sums.tolist()
    measured = f"accuracy {right / images:.2%}, loss {loss / images:.4f}, top-5 accuracy {among_five / images:.2%}"
    print(f"{options.split} {measured}, {plural(int(images), 'image')}; {trained.file}")
