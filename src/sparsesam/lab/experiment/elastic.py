"""Runs that torchrun starts: it says how many processes there are, and starts them again when one is lost."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace

from sparsesam.lab.experiment.config import RunEnvironment


def under_torchrun(place: RunEnvironment, environment: Mapping[str, str] = os.environ) -> RunEnvironment:
    """One process per device, as torchrun has started them; after a restart, from the last checkpoint.

    Without torchrun, the place as it is.
    """
    if "TORCHELASTIC_RUN_ID" not in environment:
        return place
    local, world = int(environment["LOCAL_WORLD_SIZE"]), int(environment["WORLD_SIZE"])
    if world % local:
        raise ValueError(f"--nproc-per-node must be the same on every machine, got {local} here and {world} in total")
    restarted = int(environment["TORCHELASTIC_RESTART_COUNT"]) > 0
    return replace(place, devices=local, num_nodes=world // local, resume=place.resume or restarted)
