"""A function on several ranks, in processes of their own, connected by gloo over a file."""

from __future__ import annotations

import os
import time
import warnings

import torch
from torch import distributed as dist
from torch import multiprocessing as mp


def run_ranks(function, ranks, folder, *arguments, timeout=120.0):
    """Call ``function(rank, *arguments)`` on every rank; what each returns, by rank."""
    folder.mkdir(parents=True, exist_ok=True)
    context = mp.start_processes(
        _rank, (ranks, str(folder), function, arguments), nprocs=ranks, join=False, start_method="spawn"
    )
    deadline = time.monotonic() + timeout
    while not context.join(timeout=1.0):
        if time.monotonic() > deadline:
            for process in context.processes:
                process.kill()
            raise TimeoutError(f"{function.__name__} on {ranks} ranks did not end within {timeout} s")
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(ranks)]


def _rank(rank, ranks, folder, function, arguments):
    torch.set_num_threads(1)
    # DTensor says so of every communication that it starts by itself.
    warnings.filterwarnings("ignore", module="torch")
    os.environ.update(MASTER_ADDR="127.0.0.1", GLOO_SOCKET_IFNAME="lo")
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=ranks)
    try:
        result = function(rank, *arguments)
        torch.save(result, f"{folder}/{rank}.pt")
        dist.barrier()
    finally:
        dist.destroy_process_group()
