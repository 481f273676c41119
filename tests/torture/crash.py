"""Runs that are killed, interrupted, out of disk space or stopped by an error, at every place and at random moments.

Every run is a fork of this process and is resumed afterwards; it must end with the weights and records of an
uninterrupted run. Two-rank runs are two forks that find each other as under torchrun: after they have met, the
survivor ends by itself and names the lost rank; before, it waits for a rank that never comes, and torchrun ends it.
"""

from __future__ import annotations

import errno
import json
import os
import random
import resource
import shutil
import signal
import socket
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import lightning_fabric  # noqa: F401 - once, not in each fork, where signals would meet nothing but its import
from torch.optim.optimizer import register_optimizer_step_pre_hook

from sparsesam.lab.experiment import run as run_module
from sparsesam.lab.experiment.batches import Batches
from sparsesam.lab.experiment.checkpoint import CheckpointError
from sparsesam.lab.experiment.config import RunEnvironment
from sparsesam.lab.experiment.errors import Interrupted, LostRankError
from sparsesam.lab.experiment.result import read_epochs
from tests.lab.experiment.runs import SHORT, same, state
from tests.lab.inspection.networks import normalized


class UserError(Exception):
    pass


SETTINGS = {"optimizer": "ssam-d", "mask_steps": 3, "model": "tests.torture.crash:network"}
STEP = ("in the data loader", "in a forward", "in a backward", "before an update")
FILES = ("before a file is replaced", "after a file is replaced", "within a checkpoint", "after a record")
MOMENT, SIZE = "at a random moment", "at a random size"
ENDS = {0: "finished", 3: "stopped and saved", 4: "named the lost rank", 5: "error of user code", 6: "disk full"}
CODES = {(Interrupted, KeyboardInterrupt): 3, LostRankError: 4, UserError: 5, (CheckpointError, OSError): 6}
LIMIT, LIMIT_OF_SURVIVORS = 360.0, 20.0  # seconds
NOT_MET = "waited for it until torchrun would end it: they had not met"


class Fault(NamedTuple):
    """``kind`` is a signal's name, or "error". ``number``: the n-th time that a run is at the place; seconds; bytes."""

    kind: str
    place: str
    number: float

    def happen(self) -> None:
        if self.kind != "error":
            os.kill(os.getpid(), signal.Signals[self.kind])
        elif self.place in STEP:
            raise UserError
        else:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


# ---- a run, in a fork ------------------------------------------------------------------------------------------------

_reached = Counter[str]()
_faults: list[Fault] = []


def reached(place: str) -> None:
    """Called when the run is at a place: the fault happens if it is due."""
    _reached[place] += 1
    for fault in _faults:
        if (fault.place, fault.number) == (place, _reached[place]):
            fault.happen()


def network(num_classes: int):
    made = normalized(num_classes)
    made.register_forward_pre_hook(lambda *_: reached("in a forward") if made.training else None)
    made[1].weight.register_hook(lambda _: reached("in a backward"))
    return made


def watch(owner: object, name: str, *, before: Callable[[], object] = int, after: Callable[[], object] = int) -> None:
    """Call something before or after every call of a function."""
    original = getattr(owner, name)

    def watched(*args, **options):
        before()
        result = original(*args, **options)
        after()
        return result

    setattr(owner, name, watched)


def watch_places(met: Path) -> None:
    def train(batches, *position, original=Batches.train):
        for batch in original(batches, *position):
            reached("in the data loader")
            yield batch

    Batches.train = train  # type: ignore[method-assign]
    register_optimizer_step_pre_hook(lambda *_: reached("before an update"))
    before, after = (partial(reached, f"{when} a file is replaced") for when in ("before", "after"))
    watch(Path, "replace", before=before, after=after)
    watch(os, "fsync", before=partial(reached, "within a checkpoint"))
    watch(run_module, "append_records", after=partial(reached, "after a record"))
    watch(run_module, "make_training", before=met.touch)  # the first call after two ranks have met


def start(out: Path, ranks: int, fault: Fault | None = None, victim: int = 0, *, resume: bool = False) -> list[int]:
    """Start a run in a fork of this process for each rank; their exit codes say how they end."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    both = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    both |= {"TORCHELASTIC_RUN_ID": "a", "GROUP_RANK": "0", "GLOO_SOCKET_IFNAME": "lo"}
    pids = []
    for rank in range(ranks):
        pids.append(os.fork())
        if pids[-1] == 0:
            if ranks == 2:
                os.environ.update(both, RANK=str(rank), LOCAL_RANK=str(rank))
            code = 99
            try:
                run(out, ranks, fault if rank == victim else None, resume=resume)
                code = 0
            except BaseException as error:
                code = next((code for kinds, code in CODES.items() if isinstance(error, kinds)), 99)
                if code == 99:
                    out.with_name("error").write_text(traceback.format_exc())
            finally:
                os._exit(code)
    return pids


def run(out: Path, ranks: int, fault: Fault | None, *, resume: bool) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)  # which a job in the background ignores
    sys.stderr = sys.stdout = open(os.devnull, "w")  # noqa: SIM115
    if fault is not None:
        _faults.append(fault)
        if fault.place == SIZE:
            resource.setrlimit(resource.RLIMIT_FSIZE, (int(fault.number), int(fault.number)))
    watch_places(out.with_name("met"))
    place = RunEnvironment(
        out=out, resume=resume, logger="none", threads=1, checkpoint_steps=2, devices=ranks, accelerator="cpu"
    )
    run_module.run_training(replace(SHORT, **SETTINGS), place)
    if os.environ.get("RANK", "0") == "0":
        out.with_name("reached").write_text(json.dumps(_reached))


def end_of(pid: int, limit: float = LIMIT) -> str:
    """Wait for a process and say how it ended."""
    deadline = time.monotonic() + limit
    while time.monotonic() < deadline:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            code = os.waitstatus_to_exitcode(status)
            return ENDS.get(code, f"signal {-code}" if code < 0 else f"exit code {code}")
        time.sleep(0.01)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return "ended by the launcher"


# ---- the matrix ------------------------------------------------------------------------------------------------------


class Matrix:
    """Faults of runs with one or two ranks, each compared with a run without a fault."""

    def __init__(self, folder: Path, seed: int, ranks: int) -> None:
        self.ranks, self.out, self.rng = ranks, folder / f"{ranks}" / "run", random.Random(seed)
        self.out.parent.mkdir()
        start = time.monotonic()
        assert set(self.finish(resume=False)) == {"finished"}, self.error()
        self.duration, self.expected = time.monotonic() - start, self.outcome()
        self.times = json.loads((self.out.parent / "reached").read_text())

    def faults(self, number: int) -> Iterator[Fault]:
        """The faults of a round."""
        kills, moment = (STEP + FILES, 4) if self.ranks == 1 else ((), 2)
        for place in kills:
            yield self.at("SIGKILL", place)
        for kind in ["SIGKILL"] * moment + ["SIGTERM", "SIGINT"]:
            yield Fault(kind, MOMENT, self.rng.uniform(0, self.duration))
        for kind in ("SIGTERM", "SIGINT", "error") if kills else ("SIGKILL", "SIGTERM", "SIGINT", "error"):
            yield self.at(kind, (STEP + FILES)[number % 8])
        yield Fault("error", SIZE, self.rng.randrange(40_000))

    def at(self, kind: str, place: str) -> Fault:
        return Fault(kind, place, self.rng.randint(1, self.times[place]))

    def survive(self, fault: Fault) -> str:
        """Returns what happened; AssertionError if the resumed run differs from the run without a fault."""
        shutil.rmtree(self.out, ignore_errors=True)
        ends = self.ends(fault)
        case = f"{fault}, {self.ranks} ranks: {ends}"
        assert not any(end.startswith("exit code") for end in ends), f"{case}: {self.error()}"
        if not (self.out / "result.json").exists():
            resumed = self.finish(resume=True)
            assert set(resumed) == {"finished"}, f"{case}: resumed run {resumed}: {self.error()}"
        assert same(self.outcome(), self.expected), f"{case}: the resumed run differs"
        left = [file.name for file in self.out.rglob("*.part")]
        assert not left, f"{case}: left {left}"
        name = f"{fault.kind} {fault.place}"
        late = ", too late: the run had finished" if ends[0] == "finished" else ""
        if self.ranks == 1:
            return f"{name}{late}"
        assert ends[1] in ("finished", "stopped and saved", "named the lost rank", NOT_MET), case
        return f"{name}, in one of two ranks{late}: the other {ends[1]}"

    def ends(self, fault: Fault) -> list[str]:
        """How the process with the fault ended, and the other one."""
        met = self.out.with_name("met")
        met.unlink(missing_ok=True)
        victim = self.rng.randrange(self.ranks) if fault.place in (*STEP, MOMENT) else 0
        pids = start(self.out, self.ranks, fault, victim)
        if fault.place == MOMENT:
            time.sleep(fault.number)
            os.kill(pids[victim], signal.Signals[fault.kind])
        ends = [end_of(pids.pop(victim)), *(end_of(other, LIMIT_OF_SURVIVORS) for other in pids)]
        return [NOT_MET if end == "ended by the launcher" and not met.exists() else end for end in ends]

    def finish(self, *, resume: bool) -> list[str]:
        return [end_of(pid) for pid in start(self.out, self.ranks, resume=resume)]

    def outcome(self):
        names = ("epoch", "train_loss", "test_accuracy", "forward_backwards")
        epochs = [asdict(epoch) for epoch in read_epochs(self.out / "records.jsonl")]
        return state(self.out)["training"], [{name: epoch[name] for name in names} for epoch in epochs]

    def error(self) -> str:
        file = self.out.with_name("error")
        return file.read_text() if file.exists() else ""


def survive(folder: Path, kills: int, seed: int = 0, *, rounds_of_two: int = 0) -> Counter[str]:
    """Rounds of faults, until so many SIGKILLs have hit a run, and rounds with two ranks; returns what happened."""
    found, hits, number = Counter[str](), 0, 0
    single = Matrix(folder, seed, ranks=1)
    while hits < kills:
        for fault in single.faults(number):
            happened = single.survive(fault)
            found[happened] += 1
            hits += fault.kind == "SIGKILL" and "too late" not in happened
        number += 1
    if rounds_of_two:
        double = Matrix(folder, seed, ranks=2)
        found.update(double.survive(fault) for number in range(rounds_of_two) for fault in double.faults(number))
    return found
