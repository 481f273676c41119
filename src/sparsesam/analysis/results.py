"""Results as plain data: numbers, lists and dictionaries that JSON can hold."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
from torch import Tensor


class Result:
    """A dataclass that can be written as JSON. NaN and infinity, which JSON lacks, become None."""

    def to_dict(self) -> dict[str, Any]:
        fields = dataclasses.fields(self)  # type: ignore[arg-type]
        shown = {field.name: plain(getattr(self, field.name)) for field in fields if field.metadata.get("plain", True)}
        return {"analysis": type(self).__name__, **shown}


def plain(value: Any) -> Any:
    """The same value made of what JSON knows."""
    if isinstance(value, Result):
        return value.to_dict()
    if isinstance(value, dict):
        return {str(key): plain(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(part) for part in value]
    if isinstance(value, (np.ndarray, Tensor)):
        return plain(value.tolist())
    if isinstance(value, np.generic):
        return plain(value.item())
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value
