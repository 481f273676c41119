"""Classify docstrings by the Python module they come from: a bag of words with AdamW, SSAM-D and one-pass SAM."""

from __future__ import annotations

import argparse
import importlib
import inspect
import re

import torch
from torch import nn
from torch.nn import functional as F

import sparsesam

MODULES = ("os", "math", "random", "statistics", "asyncio", "logging", "decimal", "argparse")
WORDS = 4096  # words are hashed into this many rows


def sentences() -> tuple[list[list[int]], list[int]]:
    texts, labels = [], []
    for label, name in enumerate(MODULES):
        for _, member in inspect.getmembers(importlib.import_module(name)):
            for sentence in re.split(r"[.\n]\s", inspect.getdoc(member) or ""):
                words = re.findall(r"[a-z_]{2,}", sentence.lower())
                if len(words) > 3:
                    texts.append([sum(map(ord, word)) * 31 % WORDS for word in words])
                    labels.append(label)
    return texts, labels


class BagOfWords(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.EmbeddingBag(WORDS, 32)
        self.head = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, len(MODULES)))

    def forward(self, tokens, offsets):
        return self.head(self.words(tokens, offsets))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one epoch")
    epochs = 1 if parser.parse_args().quick else 6
    torch.set_num_threads(1)
    texts, labels = sentences()
    order = torch.randperm(len(texts), generator=torch.Generator().manual_seed(0)).tolist()
    train, test = order[: len(order) * 3 // 4], order[len(order) * 3 // 4 :]

    def batch_of(indices):
        tokens = torch.tensor([word for i in indices for word in texts[i]])
        lengths = torch.tensor([0, *(len(texts[i]) for i in indices[:-1])])
        return (tokens, lengths.cumsum(0)), torch.tensor([labels[i] for i in indices])

    mask = sparsesam.dynamic_mask(sparsity=0.8, refresh=50)
    methods = {
        "AdamW": lambda base, model: sparsesam.SAM(base, model, rho=0.0),  # the base optimizer, exactly
        "SSAM-D": lambda base, model: sparsesam.SSAM(base, model, rho=0.1, mask=mask),
        "one pass": lambda base, model: sparsesam.ExtrapolatedSAM(base, model, rho=0.05),
    }
    for name, make in methods.items():
        torch.manual_seed(0)
        model = BagOfWords()
        opt = make(torch.optim.AdamW(model.parameters(), lr=3e-3), model)
        for epoch in range(epochs):
            generator = torch.Generator().manual_seed(epoch)
            for chosen in torch.randperm(len(train), generator=generator).split(64):
                inputs, targets = batch_of([train[i] for i in chosen.tolist()])
                opt.minimize(lambda m=model, i=inputs, t=targets: F.cross_entropy(m(*i), t))
        model.eval()
        inputs, targets = batch_of(test)
        with torch.no_grad():
            accuracy = (model(*inputs).argmax(1) == targets).double().mean()
        error = (accuracy * (1 - accuracy) / len(test)) ** 0.5
        print(f"{name:8} test accuracy {accuracy:.1%} ± {error:.1%} of {len(test)} sentences")


if __name__ == "__main__":
    main()
