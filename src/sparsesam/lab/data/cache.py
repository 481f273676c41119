"""Where downloaded data sets are kept."""

from __future__ import annotations

import os
import sys
from pathlib import Path

VARIABLE = "SPARSESAM_CACHE"


def cache_dir() -> Path:
    """$SPARSESAM_CACHE, else this platform's cache directory for the user, with /sparsesam; it need not exist yet."""
    if chosen := os.environ.get(VARIABLE):
        return Path(chosen).expanduser()
    return _platform_cache() / "sparsesam"


def _platform_cache() -> Path:
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local")
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
