"""``sparsesam train``: one run."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from sparsesam.lab.commands.parser import Namespace, Parser, add_settings, settings_of
from sparsesam.lab.experiment.config import RunEnvironment

HELP = "Train one model. Everything has a default: `sparsesam train` alone takes half a minute on a laptop."


def add_arguments(parser: Parser) -> None:
    parser.usage = "%(prog)s [--config FILE.yaml] [--OPTION VALUE …]"
    add_settings(parser)


def rewrite(arguments: list[str]) -> list[str]:
    """With ``--resume``, the settings of the run in ``--out`` come first, so that they need not be repeated."""
    from sparsesam.lab.experiment.run_directory import RunDirectory

    if "--resume" not in arguments:
        return arguments
    out = _value_of("--out", arguments)
    if out is None:
        raise ValueError("--resume needs --out, the directory of the run to continue")
    return ["--config", str(RunDirectory.existing(Path(out)).config), *arguments]


def run(options: Namespace) -> int:
    from sparsesam.lab.experiment.observers import ProgressBar, RunObserver
    from sparsesam.lab.experiment.run import run as run_one

    config, environment = settings_of(options)
    environment = under_torchrun(environment)
    result = run_one(config, environment, RunObserver() if environment.quiet else ProgressBar())
    chosen = "validation" if result.best_chosen_on == "val" else "test"
    print(
        f"test accuracy {result.test_accuracy:.2%}; best.pt {result.best_test_accuracy:.2%}, "
        f"epoch {result.best_epoch}, chosen on {chosen} images; "
        f"{result.seconds:.1f} s of training; {environment.directory(config)}"
    )
    return 0


def under_torchrun(environment: RunEnvironment, variables: Mapping[str, str] = os.environ) -> RunEnvironment:
    """One process per device, as torchrun has started them; after it has lost one, from the last checkpoint.

    Without torchrun, the environment as it is.
    """
    if "TORCHELASTIC_RUN_ID" not in variables:
        return environment
    local, world = int(variables["LOCAL_WORLD_SIZE"]), int(variables["WORLD_SIZE"])
    if world % local:
        raise ValueError(f"--nproc-per-node must be the same on every machine, got {local} here and {world} in total")
    restarted = int(variables["TORCHELASTIC_RESTART_COUNT"]) > 0
    return replace(environment, devices=local, num_nodes=world // local, resume=environment.resume or restarted)


def _value_of(name: str, arguments: list[str]) -> str | None:
    for index, argument in enumerate(arguments):
        if argument == name and index + 1 < len(arguments):
            return arguments[index + 1]
        if argument.startswith(name + "="):
            return argument.partition("=")[2]
    return None
