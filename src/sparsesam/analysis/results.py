"""Results of analyses: dataclasses that can be written as JSON and read back with their types."""

from __future__ import annotations

import dataclasses
import math
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]
Self = TypeVar("Self", bound="AnalysisResult")


class AnalysisResult:
    """Base class of the result dataclasses. NaN and infinity become null, as JSON has neither."""

    def to_dict(self) -> dict[str, Any]:
        """Returns the fields as numbers, strings, lists and dictionaries, and the class name as ``"analysis"``."""
        shown = {name: _plain(getattr(self, name)) for name in _stored_fields(type(self))}
        return {"analysis": type(self).__name__, **shown}

    @classmethod
    def from_dict(cls: type[Self], content: Mapping[str, Any]) -> Self:
        """Returns the result that `to_dict` wrote; null numbers become NaN. ValueError names the invalid field."""
        if not isinstance(content, Mapping):
            raise ValueError(f"{cls.__name__} must be an object, got {type(content).__name__}")
        values = {}
        for name, hint in _stored_fields(cls).items():
            if name not in content:
                raise ValueError(f"{cls.__name__} has no field {name!r}")
            values[name] = _decode(hint, content[name], f"{cls.__name__}.{name}")
        return cls(**values)

    def remarks(self) -> list[str]:
        """Returns the notes of this result and of nested results, in order and without duplicates."""
        inner = [note for value in vars(self).values() if isinstance(value, AnalysisResult) for note in value.remarks()]
        return list(dict.fromkeys([*getattr(self, "notes", []), *inner]))


@dataclass(frozen=True)
class ObjectiveSummary(AnalysisResult):
    """The data and options a result was measured with."""

    batches: int
    samples: int
    statistics: str
    random_loss: str


@dataclass(frozen=True, kw_only=True)
class Measurement(AnalysisResult):
    """A result measured on an `Objective`; ``notes`` say in words what limits it."""

    measured_on: ObjectiveSummary
    notes: list[str]


def _stored_fields(kind: type[Any]) -> dict[str, Any]:
    """Returns names and types of the fields that are part of the JSON."""
    hints = typing.get_type_hints(kind)
    return {field.name: hints[field.name] for field in dataclasses.fields(kind) if field.metadata.get("stored", True)}


def _plain(value: Any) -> Any:
    """Convert a value to JSON types."""
    if isinstance(value, AnalysisResult):
        return value.to_dict()
    if isinstance(value, (np.ndarray, np.generic)):
        value = value.tolist()
    if isinstance(value, dict):
        return {key: _plain(part) for key, part in value.items()}
    if isinstance(value, list):
        return [_plain(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _decode(hint: Any, value: Any, name: str) -> Any:
    """Convert JSON types to the field's type."""
    origin, arguments = typing.get_origin(hint) or hint, typing.get_args(hint)
    if origin is types.UnionType:  # X | None
        return None if value is None else _decode(arguments[0], value, name)
    if issubclass(origin, AnalysisResult):
        return origin.from_dict(value)
    if origin is float and value is None:
        return math.nan
    in_json: Any = {float: (int, float), np.ndarray: list}.get(origin, origin)
    if not isinstance(value, in_json) or (isinstance(value, bool) and origin is not bool):
        raise ValueError(f"{name} must be of type {origin.__name__}, got {value!r:.60}")
    if origin is np.ndarray:
        try:
            return np.array(value, dtype=typing.get_args(arguments[1])[0])
        except (TypeError, ValueError) as error:
            raise ValueError(f"{name} must be an array of numbers: {error}") from None
    if origin is list:
        return [_decode(arguments[0], part, name) for part in value]
    if origin is dict:
        return {key: _decode(arguments[1], part, f"{name}[{key!r}]") for key, part in value.items()}
    return value
