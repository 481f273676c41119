"""List the licences of everything that an installation of sparsesam brings along: python tools/licences.py [EXTRA …]

Reads the metadata of the installed packages. Without arguments: the dependencies of the library and of the extras that
users install. Exit code 1 if a package does not state its licence.
"""

from __future__ import annotations

import re
import sys
from importlib import metadata

from packaging.requirements import Requirement

EXTRAS = ("data", "experiment", "report", "lightning", "huggingface", "ray")


def required(name: str, extras: set[str], found: dict[str, metadata.Distribution]) -> None:
    """Add the installed packages that ``name`` with these extras requires, and what those require."""
    for text in metadata.distribution(name).requires or []:
        requirement = Requirement(text)
        environments = [{"extra": extra} for extra in (*extras, "")]
        if requirement.marker and not any(requirement.marker.evaluate(environment) for environment in environments):
            continue
        key = re.sub(r"[-_.]+", "-", requirement.name).lower()
        if key not in found or key == "sparsesam":
            try:
                found[key] = metadata.distribution(requirement.name)
            except metadata.PackageNotFoundError:
                continue
            required(requirement.name, set(requirement.extras), found)


def licence(package: metadata.Distribution) -> str:
    """Returns the SPDX expression of a package, its classifiers, or the first line of its licence field."""
    about = package.metadata
    classifiers = [
        text.rpartition(" :: ")[2] for text in about.get_all("Classifier", []) if text.startswith("License ::")
    ]
    stated = about.get("License", "").strip().partition("\n")[0]
    return about.get("License-Expression") or " / ".join(classifiers) or stated[:60]


def main() -> int:
    found: dict[str, metadata.Distribution] = {}
    required("sparsesam", set(sys.argv[1:] or EXTRAS), found)
    found.pop("sparsesam", None)
    rows = {name: (found[name].version, licence(found[name])) for name in sorted(found)}
    for name, (version, text) in rows.items():
        print(f"{name:28} {version:16} {text or 'NOT STATED'}")
    unstated = [name for name, (_, text) in rows.items() if not text]
    print(f"{len(rows)} packages" + (f"; without a stated licence: {', '.join(unstated)}" if unstated else ""))
    return 1 if unstated else 0


if __name__ == "__main__":
    sys.exit(main())
