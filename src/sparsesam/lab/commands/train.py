"""``sparsesam train``: one run."""

from __future__ import annotations

from pathlib import Path

from sparsesam.lab.commands.parser import Namespace, Parser, add_settings, settings_of

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
    from sparsesam.lab.experiment.elastic import under_torchrun
    from sparsesam.lab.experiment.observers import for_terminal
    from sparsesam.lab.experiment.run import run as run_one

    config, environment = settings_of(options)
    environment = under_torchrun(environment)
    result = run_one(config, environment, for_terminal(quiet=environment.quiet))
    chosen = "validation" if result.best_chosen_on == "val" else "test"
    print(
        f"test accuracy {result.test_accuracy:.2%}; best.pt {result.best_test_accuracy:.2%}, "
        f"epoch {result.best_epoch}, chosen on {chosen} images; "
        f"{result.seconds:.1f} s of training; {environment.directory(config)}"
    )
    return 0


def _value_of(name: str, arguments: list[str]) -> str | None:
    for index, argument in enumerate(arguments):
        if argument == name and index + 1 < len(arguments):
            return arguments[index + 1]
        if argument.startswith(name + "="):
            return argument.partition("=")[2]
    return None
