"""Runs a function on several ranks, in processes connected by gloo and started once per number of ranks."""

from __future__ import annotations

import gc
import io
import os
import tempfile
import time
import traceback
import warnings

import torch
from torch import distributed as dist
from torch import multiprocessing as mp

from sparsesam import replay

_pools = {}


def run_ranks(function, ranks, *arguments, timeout=240.0):
    """Call ``function(rank, *arguments)`` on every rank and return the results by rank; after an error, restart all."""
    pools = _pools.pop(ranks, None) or started(ranks)
    calls = [pool.apply_async(called, (rank, function, arguments)) for rank, pool in enumerate(pools)]
    deadline = time.monotonic() + timeout
    try:
        while not all(call.ready() for call in calls):
            for call in calls:
                if call.ready():
                    call.get()  # raises what the function raised: the other ranks may wait for this one
            if time.monotonic() > deadline:
                raise TimeoutError(f"{function.__name__} did not end within {timeout} s on {ranks} ranks")
            time.sleep(0.02)
        found = [torch.load(io.BytesIO(call.get()), weights_only=False) for call in calls]
    except BaseException:
        for pool in pools:
            pool.terminate()
        raise
    _pools[ranks] = pools
    return found


def started(ranks):
    """A pool of one process for each rank."""
    context, store = mp.get_context("spawn"), os.path.join(tempfile.mkdtemp(), "store")
    return [context.Pool(1, connect, (rank, ranks, store)) for rank in range(ranks)]


def connect(rank, ranks, store):
    torch.set_num_threads(1)
    replay.OPERATION = 0  # as in conftest.py
    os.environ.update(MASTER_ADDR="127.0.0.1", GLOO_SOCKET_IFNAME="lo")
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)


def called(rank, function, arguments):
    content = io.BytesIO()
    try:
        with warnings.catch_warnings():
            # DTensor warns about every communication that it starts by itself.
            warnings.filterwarnings("ignore", module="torch")
            torch.manual_seed(0)
            torch.save(function(rank, *arguments), content)
            dist.barrier()
    except BaseException:
        raise RuntimeError(f"{function.__name__} on rank {rank}:\n{traceback.format_exc()}") from None
    gc.collect()
    return content.getvalue()
