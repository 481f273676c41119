"""One colour per optimizer, the same in every figure; told apart also by readers who do not see all colours."""

from __future__ import annotations

#: On a light page and on a dark one: each at least 3 : 1 against its background.
COLORS = {
    "sgd": ("#6b7280", "#a3acba"),
    "adam": ("#8a6d1d", "#d9b64c"),
    "adamw": ("#5b4a9c", "#a898e8"),
    "sam": ("#0072b2", "#4aa8e0"),
    "asam": ("#1f8fa8", "#7fd3e6"),
    "ssam-f": ("#d55e00", "#ff8c42"),
    "ssam-d": ("#00876a", "#2fc79d"),
    "ssam-random": ("#b8578f", "#ee9bc9"),
    "other": ("#374151", "#d1d5db"),
}
