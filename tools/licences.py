"""List the licences of everything that an installation of sparsesam brings along: python tools/licences.py [EXTRA …]

Reads the metadata of the installed packages. Without arguments: the dependencies of the library and of the extras that
users install. Exit code 1 if a package does not state its licence.
"""

from __future__ import annotations

import re
import sys
from contextlib import suppress
from importlib import metadata

from packaging.requirements import Requirement

EXTRAS = ("data", "experiment", "report", "lightning", "huggingface", "ray")


def add_required(found: dict[str, metadata.Distribution], name: str, extras: set[str]) -> None:
    """Add the installed packages that ``name`` with these extras requires, and what those require."""
    for requirement in map(Requirement, metadata.distribution(name).requires or []):
        key = re.sub(r"[-_.]+", "-", requirement.name).lower()
        if key in found and key != "sparsesam":
            continue
        if requirement.marker and not any(requirement.marker.evaluate({"extra": extra}) for extra in (*extras, "")):
            continue
        with suppress(metadata.PackageNotFoundError):
            found[key] = metadata.distribution(requirement.name)
            add_required(found, requirement.name, requirement.extras)


def licence(package: metadata.Distribution) -> str:
    """Returns the SPDX expression of a package, its classifiers, or the first line of its licence field."""
    about = package.metadata
    classifiers = [text.rpartition(" :: ")[2] for text in about.get_all("Classifier", []) if "License ::" in text]
    stated = about.get("License", "").strip().partition("\n")[0]
    return about.get("License-Expression") or " / ".join(classifiers) or stated[:60]


def main() -> int:
    found: dict[str, metadata.Distribution] = {}
    add_required(found, "sparsesam", set(sys.argv[1:] or EXTRAS))
    found.pop("sparsesam", None)
    licences = {name: licence(found[name]) for name in sorted(found)}
    for name, text in licences.items():
        print(f"{name:28} {found[name].version:16} {text or 'NOT STATED'}")
    print(f"{len(licences)} packages, {list(licences.values()).count('')} of them without a stated licence")
    return int("" in licences.values())


if __name__ == "__main__":
    sys.exit(main())
