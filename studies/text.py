"""A text data set that comes with Python: from which package of the standard library is a line of source code?

Lines are encoded as 8x8 "images", 32 tokens of two bytes, so that the command line trains on them like on any data set:
``sparsesam train --dataset studies.text:lines_test --model studies.text:distilbert --augment none``.
"""

from __future__ import annotations

import re
import sysconfig
import zlib
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from sparsesam.lab.data import Labelled, Splits

PACKAGES = (
    "asyncio", "concurrent", "ctypes", "email", "idlelib",
    "multiprocessing", "tkinter", "turtledemo", "unittest", "xml",
)  # fmt: skip
_TOKENS = 32
_VOCABULARY = 4096
#: Lines per package: for training, for validation, for the test.
_COUNTS = (150, 100, 300)


def _lines(data_dir: Path | None, *, final: bool) -> Splits:
    train, validation, test = _COUNTS
    wanted = slice(train + validation, train + validation + test) if final else slice(train, train + validation)
    chosen = [_of_package(name) for name in PACKAGES]
    return Splits(
        train=_labelled([lines[:train] for lines in chosen]),
        test=_labelled([lines[wanted] for lines in chosen]),
        name="standard library",
        classes=PACKAGES,
        mean=(0.0,),
        std=(1 / 255,),  # the network sees the bytes themselves
        mirrored=False,
    )


lines_validation, lines_test = partial(_lines, final=False), partial(_lines, final=True)


def _of_package(name: str) -> Tensor:
    """Returns distinct lines of 30 to 100 characters in a fixed random order, as (n, 64) bytes."""
    folder = Path(sysconfig.get_path("stdlib")) / name
    found: dict[str, None] = {}
    for file in sorted(folder.rglob("*.py")):
        if not {"test", "tests"} & set(file.relative_to(folder).parts):
            found |= dict.fromkeys(line.strip() for line in file.read_text(encoding="utf-8").splitlines())
    lines = [line for line in found if 30 <= len(line) <= 100]
    order = torch.randperm(len(lines), generator=torch.Generator().manual_seed(0)).tolist()[: sum(_COUNTS)]
    return torch.tensor([_bytes(lines[index]) for index in order], dtype=torch.uint8)


def _bytes(line: str) -> list[int]:
    """Encode words and symbols as hashes starting at 1, high byte first; 0 is padding."""
    words = re.findall(r"[A-Za-z]+|[0-9]+|[^\w\s]", line)[:_TOKENS]
    tokens = [1 + zlib.crc32(word.encode()) % (_VOCABULARY - 1) for word in words]
    return [byte for token in tokens + [0] * (_TOKENS - len(tokens)) for byte in divmod(token, 256)]


def _labelled(parts: list[Tensor]) -> Labelled:
    labels = torch.cat([torch.full((len(part),), number) for number, part in enumerate(parts)])
    return Labelled(torch.cat(parts).view(-1, 1, 8, 8), labels)


class LineClassifier(nn.Module):
    """A sequence model of transformers that takes tokens as images."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: Tensor) -> Tensor:
        high, low = images.flatten(1).round().long().unflatten(1, (_TOKENS, 2)).unbind(2)
        tokens = 256 * high + low
        scores: Tensor = self.model(input_ids=tokens, attention_mask=(tokens != 0).long()).logits
        return scores


def distilbert(num_classes: int) -> nn.Module:
    from transformers import DistilBertConfig, DistilBertForSequenceClassification

    config = DistilBertConfig(
        vocab_size=_VOCABULARY,
        max_position_embeddings=_TOKENS,
        dim=64,
        hidden_dim=128,
        n_layers=2,
        n_heads=4,
        dropout=0.0,
        attention_dropout=0.0,
        seq_classif_dropout=0.0,
        num_labels=num_classes,  # type: ignore[call-arg]
    )
    return LineClassifier(DistilBertForSequenceClassification(config))
