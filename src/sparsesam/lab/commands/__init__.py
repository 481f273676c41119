"""The subcommands of ``sparsesam``.

A subcommand is a module here with ``HELP``, ``add_arguments(parser)`` and ``run(options)``, and a line
in `COMMANDS`. It is imported only when it is called.
"""

from __future__ import annotations

import importlib
from types import ModuleType

COMMANDS = {
    "train": "train one model",
    "sweep": "train a grid of settings times seeds, on all cores",
    "eval": "evaluate the weights of a run",
    "export": "write the weights of a run as a state_dict or safetensors",
    "paper": "reproduce a table or figure of the paper and compare the numbers",
    "data": "draw training images as the network sees them",
    "analyze": "measure trained runs: landscape, Hessian, gradients, masks, bounds",
    "report": "write one HTML page about runs: tables, charts, analyses",
    "doctor": "show versions, devices, and which fast paths are on",
}


def find(name: str) -> ModuleType:
    return importlib.import_module(f"sparsesam.lab.commands.{name}")
