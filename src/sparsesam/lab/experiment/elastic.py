"""Runs that torchrun starts: it says how many processes there are, and starts them again when one is lost."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace

from sparsesam.lab.experiment.config import RunEnvironment


def under_torchrun(environment: RunEnvironment, variables: Mapping[str, str] = os.environ) -> RunEnvironment:
    """One process per device, as torchrun has started them; after a restart, from the last checkpoint.

    Without torchrun, the environment as it is.
    """
    if "TORCHELASTIC_RUN_ID" not in variables:
        return environment
    local, world = int(variables["LOCAL_WORLD_SIZE"]), int(variables["WORLD_SIZE"])
    if world % local:
        raise ValueError(f"--nproc-per-node must be the same on every machine, got {local} here and {world} in total")
    restarted = int(variables["TORCHELASTIC_RESTART_COUNT"]) > 0
    return replace(environment, devices=local, num_nodes=world // local, resume=environment.resume or restarted)
