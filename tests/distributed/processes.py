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

_worlds = {}


def run_ranks(function, ranks, *arguments, timeout=240.0):
    """Call ``function(rank, *arguments)`` on every rank and return the results by rank; after an error, restart all."""
    world = _worlds.pop(ranks, None) or World(ranks)
    try:
        found = world.run(function, arguments, timeout)
    except BaseException:
        world.end()
        raise
    _worlds[ranks] = world
    return found


class World:
    def __init__(self, ranks):
        context = mp.get_context("spawn")
        store = os.path.join(tempfile.mkdtemp(), "store")
        self.pipes, self.processes = [], []
        for rank in range(ranks):
            mine, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, ranks, store, theirs), daemon=True)
            process.start()
            theirs.close()
            self.pipes.append(mine)
            self.processes.append(process)

    def run(self, function, arguments, timeout):
        for pipe in self.pipes:
            pipe.send((function, arguments))
        found, deadline = {}, time.monotonic() + timeout
        while len(found) < len(self.pipes):
            for rank, pipe in enumerate(self.pipes):
                if rank not in found and pipe.poll(0.02):
                    error, found[rank] = pipe.recv()
                    if error is not None:
                        raise RuntimeError(f"{function.__name__} on rank {rank}:\n{error}")
            if time.monotonic() > deadline:
                raise TimeoutError(f"{function.__name__} did not end within {timeout} s on {len(self.pipes)} ranks")
        return [torch.load(io.BytesIO(found[rank]), weights_only=False) for rank in sorted(found)]

    def end(self):
        for process in self.processes:
            process.kill()


def _serve(rank, ranks, store, pipe):
    torch.set_num_threads(1)
    replay.OPERATION = 0  # as in conftest.py
    os.environ.update(MASTER_ADDR="127.0.0.1", GLOO_SOCKET_IFNAME="lo")
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    while True:
        try:
            function, arguments = pipe.recv()
        except EOFError:  # the tests are over
            os._exit(0)
        pipe.send(_called(rank, function, arguments))


def _called(rank, function, arguments):
    content = io.BytesIO()
    try:
        with warnings.catch_warnings():
            # DTensor warns about every communication that it starts by itself.
            warnings.filterwarnings("ignore", module="torch")
            torch.manual_seed(0)
            torch.save(function(rank, *arguments), content)
            dist.barrier()
    except BaseException:
        return traceback.format_exc(), None
    gc.collect()
    return None, content.getvalue()
