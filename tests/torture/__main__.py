"""The long form: python -m tests.torture [PART …] [--seed N] [--minutes N]; see docs/reliability.md for the parts."""

import argparse
import tempfile
import time
from pathlib import Path

from sparsesam.lab.experiment import provenance
from tests.torture import crash, damage, fuzz, numerics, optimizers, soak

PARTS = {
    "damage": lambda folder, options: damage.survive(folder, 2100, options.seed),
    "crash": lambda folder, options: crash.survive(folder, 200, options.seed, rounds_of_two=8),
    "fuzz": lambda folder, options: fuzz.survive(folder, 100_000, options.seed),
    "numerics": lambda folder, options: numerics.survive(20_000, options.seed),
    "optimizers": lambda folder, options: optimizers.survive(200, options.seed),
    "soak": lambda folder, options: soak.survive(options.minutes, options.family),
}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("parts", nargs="*", default=list(PARTS), choices=[*PARTS, []])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=10.0, help="of soak, for each family")
    parser.add_argument("--family", action="append", choices=list(soak.FAMILIES), help="of soak; default: all")
    options = parser.parse_args()
    made = provenance()
    print(f"commit {made['commit']}, torch {made['torch']}, Python {made['python']}, seed {options.seed}", flush=True)
    for part in options.parts:
        start = time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            found = PARTS[part](Path(folder), options)
        print(f"{part}: survived, {time.monotonic() - start:.0f} s", flush=True)
        for name, count in found.items():
            print(f"  {count:7,}  {name}", flush=True)


if __name__ == "__main__":
    main()
