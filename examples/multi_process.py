"""Two processes with DistributedDataParallel: all use the same perturbation, from the gradient of the whole batch."""

from __future__ import annotations

import argparse
import os
import socket

import torch
from sklearn.datasets import load_digits
from torch import distributed, multiprocessing, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import sparsesam

RANKS = 2


def train(rank: int, port: int, epochs: int) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    distributed.init_process_group("gloo", rank=rank, world_size=RANKS)
    torch.set_num_threads(1)
    torch.manual_seed(0)  # the same batches on every rank; each takes its part
    pixels, digits = load_digits(return_X_y=True)
    x, y = torch.tensor(pixels, dtype=torch.float32) / 16, torch.tensor(digits)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10)))
    base = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    mask = sparsesam.dynamic_mask(sparsity=0.5, refresh=20)  # the same on both
    opt = sparsesam.SSAM(base, model, rho=0.1, mask=mask)
    for _ in range(epochs):
        for batch in torch.randperm(1400).split(128):
            mine = batch[rank::RANKS]
            opt.minimize(lambda mine=mine: F.cross_entropy(model(x[mine]), y[mine]))
    weights = torch.cat([p.detach().flatten() for p in model.parameters()])
    others = [torch.empty_like(weights) for _ in range(RANKS)]
    distributed.all_gather(others, weights)
    if rank == 0:
        with torch.no_grad():
            accuracy = (model.module(x[1400:]).argmax(1) == y[1400:]).double().mean()
        same = all(torch.equal(weights, other) for other in others)
        print(f"test accuracy {accuracy:.1%}; weights are {'the same' if same else 'NOT the same'} on both ranks")
    distributed.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one epoch")
    epochs = 1 if parser.parse_args().quick else 15
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    multiprocessing.spawn(train, args=(port, epochs), nprocs=RANKS)


if __name__ == "__main__":
    main()
