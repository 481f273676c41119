"""The long form: python -m tests.torture [damage|crash|fuzz …] [--seed N]; about half an hour on two cores."""

import argparse
import tempfile
import time
from pathlib import Path

from sparsesam.lab.experiment import provenance
from tests.torture import crash, damage, fuzz

PARTS = {
    "damage": lambda folder, seed: damage.survive(folder, 2100, seed),
    "crash": lambda folder, seed: crash.survive(folder, 36, seed, ranks=20),
    "fuzz": lambda folder, seed: fuzz.survive(folder, 100_000, seed),
}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("parts", nargs="*", default=list(PARTS), choices=[*PARTS, []])
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    made = provenance()
    print(f"commit {made['commit']}, torch {made['torch']}, Python {made['python']}, seed {options.seed}", flush=True)
    for part in options.parts:
        start = time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            found = PARTS[part](Path(folder), options.seed)
        print(f"{part}: survived, {time.monotonic() - start:.0f} s", flush=True)
        for name, count in found.items():
            print(f"  {count:7,}  {name}", flush=True)


if __name__ == "__main__":
    main()
