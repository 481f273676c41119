"""The values of the options ``ascent`` and ``norm``."""

from __future__ import annotations

from typing import Literal

Ascent = Literal["explicit", "implicit", "implicit-dense", "momentum", "momentum-climbing", "extrapolation"]
#: Ascents that need no gradient at w: a step has one pass, at w + e.
ONE_PASS = ("momentum", "momentum-climbing", "extrapolation")
Norm = Literal["full", "masked"]
