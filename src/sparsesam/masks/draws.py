"""Random numbers for masks: the same for every entry, however many ranks the entries are spread over."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

_PIECE = 1 << 16


def draw_words(number: int, generator: torch.Generator) -> Tensor:
    """64 random bits each: a byte drawn by itself would cost as much as eight together."""
    words = torch.empty(number, dtype=torch.int64, device=generator.device)
    return words.random_(-(2**63), None, generator=generator)


def draw_bytes(generator: torch.Generator) -> Callable[[int], Tensor]:
    """A function that gives the next bytes; how they are asked for does not change them."""
    left = torch.empty(0, dtype=torch.uint8, device=generator.device)

    def draw(number: int) -> Tensor:
        nonlocal left
        missing = number - len(left)
        drawn = draw_words(-(-missing // 8), generator).view(torch.uint8) if missing > 0 else left[:0]
        have = torch.cat([left, drawn]) if len(left) else drawn
        taken, left = have[:number], have[number:].clone()
        return taken

    return draw


def draw_uniform(number: int, generator: torch.Generator) -> Tensor:
    """float32 numbers, uniform on the multiples of 2^-24 in [0, 1)."""
    if generator.device.type != "cpu":
        return torch.rand(number, generator=generator, device=generator.device)
    bits = draw_words((number + 1) // 2, generator).numpy().view(np.uint32)[:number]
    scores = np.empty(number, dtype=np.float32)
    for start in range(0, number, _PIECE):
        part = slice(start, start + _PIECE)
        np.multiply((bits[part] >> 8).view(np.int32), np.float32(2**-24), out=scores[part], casting="unsafe")
    return torch.from_numpy(scores)


def tie_keys(positions: Tensor, seed: int) -> Tensor:
    """64 bits for each position, all different: splitmix64 of seed + position * an odd number."""
    keys = positions * _signed(0x9E3779B97F4A7C15) + seed
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        keys = (keys ^ _shifted(keys, shift)) * _signed(factor)
    return keys ^ _shifted(keys, 31)


def draw_seed(generator: torch.Generator) -> int:
    return int(draw_words(1, generator))


def _shifted(keys: Tensor, bits: int) -> Tensor:
    """To the right, zeros coming in."""
    return (keys >> bits).bitwise_and(2 ** (64 - bits) - 1)


def _signed(word: int) -> int:
    return word - 2**64 if word >= 2**63 else word
