"""The ``sparsesam`` command."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import torch

from sparsesam.experiment import DemoConfig, append_records, provenance, run_demo
from sparsesam.experiment.demo_summary import summarize


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    parser = argparse.ArgumentParser(prog="sparsesam", description="Sparse sharpness-aware training.")
    commands = parser.add_subparsers(dest="command", required=True)
    _add_demo(commands.add_parser("demo", help="SGD, SAM and SSAM side by side on noisy digits, two minutes"))
    options = parser.parse_args(arguments)
    try:
        return _demo(options)
    except (ImportError, ValueError) as error:
        parser.exit(2, f"sparsesam: {error}\n")


def _add_demo(parser: argparse.ArgumentParser) -> None:
    defaults = DemoConfig()
    parser.add_argument("--epochs", type=int, default=defaults.epochs, help="default: %(default)s")
    parser.add_argument("--seeds", type=int, default=defaults.seeds, help="how many runs of each: %(default)s")
    parser.add_argument("--seed", type=int, default=defaults.seed, help="the first of them: %(default)s")
    parser.add_argument("--rho", type=float, default=defaults.rho, help="default: %(default)s")
    # More threads gain little on networks this small, and lose much on a machine that is busy.
    parser.add_argument("--threads", type=int, default=1, help="torch threads: %(default)s")
    parser.add_argument("--out", type=Path, default=Path("runs/demo"), help="records go here: %(default)s")


def _demo(options: argparse.Namespace) -> int:
    try:
        from rich.console import Console

        from sparsesam.experiment import demo_display
    except ImportError as error:
        raise ImportError("the demo draws with rich: pip install 'sparsesam[demo]'") from error
    config = DemoConfig(epochs=options.epochs, seeds=options.seeds, seed=options.seed, rho=options.rho)
    torch.set_num_threads(options.threads)
    console = Console()
    with demo_display.progress(config, console) as on_epoch:
        results = run_demo(config, on_epoch)
    console.print(demo_display.table(summarize(results), config))
    records = options.out / "records.jsonl"
    origin = {"config": asdict(config), "provenance": provenance()}
    append_records(records, ({**asdict(result), **origin} for result in results))
    console.print(f"records: {records}", highlight=False)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
