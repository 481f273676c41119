"""Train one model. All options have defaults: `sparsesam train` alone takes half a minute on a laptop."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace

from sparsesam.lab.commands.parser import Namespace, Parser, add_settings, settings_from
from sparsesam.lab.experiment.config import RunEnvironment
from sparsesam.lab.experiment.run_directory import RunDirectory


def add_arguments(parser: Parser) -> None:
    parser.usage = "%(prog)s [--config FILE.yaml] [--OPTION VALUE …]"
    add_settings(parser)


def run(options: Namespace) -> None:
    from sparsesam.lab.experiment.observers import ProgressBar
    from sparsesam.lab.experiment.run import run_training

    saved = {}
    if getattr(options, "resume", False):  # read the settings of the run, so they need not be repeated
        if not hasattr(options, "out"):
            raise ValueError("--resume needs --out, the directory of the run to continue")
        saved = RunDirectory.existing(options.out).settings()
    config, environment = settings_from(options, saved)
    environment = under_torchrun(environment)
    result = run_training(config, environment, None if environment.quiet else ProgressBar())
    if result is None:
        return
    chosen = "validation" if result.best_chosen_on == "val" else "test"
    price = f"{result.forward_backwards_per_step:.2f} passes per step, budget {result.budget}; "
    print(
        f"test accuracy {result.test_accuracy:.2%}; best.pt {result.best_test_accuracy:.2%}, "
        f"epoch {result.best_epoch}, chosen on {chosen} images; {price if result.budget else ''}"
        f"{result.seconds:.1f} s of training; {environment.directory(config)}"
    )


def under_torchrun(environment: RunEnvironment, variables: Mapping[str, str] = os.environ) -> RunEnvironment:
    """Use the processes that torchrun started, one per device, and resume after torchrun restarted them.

    Returns the environment unchanged without torchrun.
    """
    if "TORCHELASTIC_RUN_ID" not in variables:
        return environment
    local, world = int(variables["LOCAL_WORLD_SIZE"]), int(variables["WORLD_SIZE"])
    if world % local:
        raise ValueError(f"--nproc-per-node must be the same on every machine, got {local} here and {world} in total")
    restarted = int(variables["TORCHELASTIC_RESTART_COUNT"]) > 0
    return replace(environment, devices=local, num_nodes=world // local, resume=environment.resume or restarted)
