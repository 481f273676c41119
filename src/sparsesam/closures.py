"""Closures with and without the batch as an argument."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any


def with_batch(closure: Callable[..., Any], batch: Any) -> Callable[[Any], Any]:
    """The closure as a function of the batch; torch.optim's takes none."""
    takes_batch = batch is not None and any(
        p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
        for p in inspect.signature(closure).parameters.values()
    )

    def call(part: Any) -> Any:
        return closure(part) if takes_batch else closure()

    call.takes_batch = takes_batch  # type: ignore[attr-defined]
    return call
