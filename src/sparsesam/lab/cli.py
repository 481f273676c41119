"""The ``sparsesam`` command.

A subcommand is a module in `sparsesam.lab.commands` with ``add_arguments(parser)``, ``run(options)`` and a docstring,
which ``--help`` shows, and a line in `COMMANDS`. It is imported only when it is called.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Sequence
from importlib import import_module

from sparsesam import __version__

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


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a subcommand and return the exit code: 0 done, 1 stopped by an error, 2 bad usage, 130 interrupted."""
    if arguments is None:  # in a process of its own
        gc.freeze()  # thousands of objects of torch stay to the end: collections of them take as long as the rest here
    given = list(sys.argv[1:] if arguments is None else arguments)
    command, rest = given[0] if given else "", given[1:]
    if command in ("", "-h", "--help"):
        print(_usage())
        return 0 if command else 2
    if command == "--version":
        print(__version__)
        return 0
    try:
        from sparsesam.lab.commands.parser import Parser
        from sparsesam.lab.experiment.errors import Interrupted, RunError
        from sparsesam.lab.names import unknown_name
    except ImportError as error:
        if command == "doctor":  # it works without these packages and reports what is missing
            import_module("sparsesam.lab.commands.doctor").run()
            return 0
        return _say(f"the command line needs {error.name}: pip install 'sparsesam[experiment]'", 2)
    if command not in COMMANDS:
        return _say(unknown_name("command", command, COMMANDS), 2)
    try:
        module = import_module(f"sparsesam.lab.commands.{command}")
        parser = Parser(f"sparsesam {command}", module.__doc__)
        module.add_arguments(parser)
        try:
            options = parser.parse_args(rest)
        except SystemExit as error:  # the parser has already printed its help or an error
            return int(error.code or 0)
        module.run(options)
        return 0
    except Interrupted as error:
        return _say(str(error), 130)
    except KeyboardInterrupt:
        return _say("interrupted", 130)
    except (RunError, OSError) as error:
        return _say(str(error), 1)
    except (ImportError, ValueError) as error:
        return _say(str(error), 2)


def _usage() -> str:
    width = max(map(len, COMMANDS))
    lines = "\n".join(f"  {name:{width}}  {text}" for name, text in COMMANDS.items())
    start, end = "Sparse sharpness-aware training.", "`sparsesam COMMAND --help` lists the options of a command."
    return f"usage: sparsesam COMMAND …\n\n{start}\n\n{lines}\n\n{end}"


def _say(text: str, code: int) -> int:
    print(f"sparsesam: {text}", file=sys.stderr)
    return code


if __name__ == "__main__":
    raise SystemExit(main())
