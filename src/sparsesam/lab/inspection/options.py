"""Options as the fields of a dataclass, each with the text that ``--help`` shows."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any


def option(default: Any, text: str, *, nargs: int | None = None) -> Any:
    return field(default=default, metadata={"help": text, "nargs": nargs})


def options_of(settings: Any) -> dict[str, Any]:
    """The options of a dataclass or of an instance, by name: fields, or values."""
    fields = [one for one in dataclasses.fields(settings) if "help" in one.metadata]
    if isinstance(settings, type):
        return {one.name: one for one in fields}
    return {one.name: getattr(settings, one.name) for one in fields}


@dataclass(frozen=True)
class NoSettings:
    """Of analyses that measure no checkpoint."""
