"""Runs that are killed, interrupted, out of disk space or stopped by the user's code, at random moments.

Every run is a fork of this process and is resumed afterwards; it must end with the weights and records of an
uninterrupted run. Two-rank runs are two forks that find each other as under torchrun: after they have met, the
survivor ends by itself and names the lost rank; before, it waits for a rank that never comes, and torchrun ends it.
"""

from __future__ import annotations

import os
import random
import resource
import shutil
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

import lightning_fabric  # noqa: F401 - once, not in each fork, where signals would meet nothing but its import

from sparsesam.lab.experiment import checkpoint, recorder
from sparsesam.lab.experiment import run as run_module
from sparsesam.lab.experiment.batches import Batches
from sparsesam.lab.experiment.config import RunEnvironment
from sparsesam.lab.experiment.errors import Interrupted, LostRankError
from sparsesam.lab.experiment.result import read_epochs
from tests.lab.experiment.runs import SHORT, same, state

SETTINGS = {"optimizer": "ssam-d", "mask_steps": 3, "model": "tests.torture.crash:network"}
#: Calls of the network in training: two passes of each of the fifteen steps.
FORWARDS = 30
ENDS = {0: "finished", 3: "stopped and saved", 4: "named the lost rank", 5: "error of user code", 6: "disk full"}
LIMIT = 90.0  # seconds
LIMIT_OF_SURVIVORS = 5.0
ERRORS = Path(tempfile.gettempdir()) / f"crash-{os.getpid()}.txt"


class UserError(Exception):
    pass


def network(num_classes: int):
    from tests.lab.inspection.networks import normalized

    return normalized(num_classes)


def run(out: Path, *, resume: bool = False, devices: int = 1) -> None:
    place = RunEnvironment(
        out=out, resume=resume, logger="none", threads=1, checkpoint_steps=2, devices=devices, accelerator="cpu"
    )
    run_module.run_training(replace(SHORT, **SETTINGS), place)


def fork(work: Callable[[], None], **variables: str) -> int:
    """Start ``work`` in a fork of this process; its exit code says how it ended."""
    pid = os.fork()
    if pid:
        return pid
    code = 99
    try:
        os.environ.update(variables)
        sys.stderr = sys.stdout = open(os.devnull, "w")  # noqa: SIM115
        work()
        code = 0
    except (Interrupted, KeyboardInterrupt):
        code = 3
    except LostRankError:
        code = 4
    except UserError:
        code = 5
    except (checkpoint.CheckpointError, OSError):
        code = 6
    except BaseException:
        ERRORS.write_text(traceback.format_exc())
    finally:
        os._exit(code)


def end_of(pid: int, limit: float = LIMIT) -> str:
    """Wait for a process and say how it ended."""
    deadline = time.monotonic() + limit
    while True:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            code = os.waitstatus_to_exitcode(status)
            return ENDS.get(code, f"signal {-code}" if code < 0 else f"exit code {code}")
        if time.monotonic() > deadline:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            return "ended by the launcher"
        time.sleep(0.01)


# ---- faults ----------------------------------------------------------------------------------------------------------


def after(seconds: float, number: int) -> Callable[[Path], str]:
    """A signal at a random moment."""

    def happens(out: Path) -> str:
        pid = fork(lambda: run(out))
        time.sleep(seconds)
        os.kill(pid, number)
        return end_of(pid)

    return happens


def full_disk(size: int) -> Callable[[Path], str]:
    """No file may be larger than ``size`` bytes."""

    def work(out: Path) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
        run(out)

    return lambda out: end_of(fork(lambda: work(out)))


def at_call(owner: object, name: str, count: int, fault: Callable[[], None], *, before: bool) -> Callable[[Path], str]:
    """A fault before or after the ``count``-th call of a function."""

    def work(out: Path) -> None:
        original, calls = getattr(owner, name), [0]

        def wrapped(*args, **options):
            calls[0] += 1
            if before and calls[0] == count:
                fault()
            result = original(*args, **options)
            if not before and calls[0] == count:
                fault()
            return result

        setattr(owner, name, wrapped)
        run(out)

    return lambda out: end_of(fork(lambda: work(out)))


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def fail() -> None:
    raise UserError


class FaultyNetwork:
    """A network, or its backward hook, that raises in one of its calls."""

    def __init__(self, call: int, *, in_hook: bool) -> None:
        self.call, self.in_hook = call, in_hook

    def __call__(self, out: Path) -> str:
        return end_of(fork(lambda: self.work(out)))

    def work(self, out: Path) -> None:
        module, original, calls = sys.modules[__name__], network, [0]

        def count(*_) -> None:
            calls[0] += 1
            if calls[0] == self.call:
                raise UserError

        def faulty(num_classes: int):
            made = original(num_classes)
            if self.in_hook:
                made[1].weight.register_hook(count)
            else:
                made.register_forward_pre_hook(lambda *_: count() if made.training else None)
            return made

        module.network = faulty  # type: ignore[attr-defined]
        run(out)


class FaultyLoader:
    """A data loader that raises at one of its batches."""

    def __init__(self, batch: int) -> None:
        self.batch = batch

    def __call__(self, out: Path) -> str:
        return end_of(fork(lambda: self.work(out)))

    def work(self, out: Path) -> None:
        original, seen = Batches.train, [0]

        def train(batches, *place):
            for one in original(batches, *place):
                seen[0] += 1
                if seen[0] == self.batch:
                    raise UserError
                yield one

        Batches.train = train  # type: ignore[method-assign]
        run(out)


def two_ranks(out: Path, seconds: float | None, number: int, victim: int, *, resume: bool = False) -> list[str]:
    """Start two ranks and, after some seconds, send one of them a signal."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    both = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    both |= {"TORCHELASTIC_RUN_ID": "a", "GROUP_RANK": "0", "GLOO_SOCKET_IFNAME": "lo"}
    met = out.with_name("met")
    met.unlink(missing_ok=True)

    def work() -> None:
        original = run_module.make_training

        def make_training(*given):
            met.touch()
            return original(*given)

        run_module.make_training = make_training  # the first call after the ranks have met
        run(out, resume=resume, devices=2)

    pids = [fork(work, RANK=str(rank), LOCAL_RANK=str(rank), **both) for rank in range(2)]
    if seconds is None:
        return [end_of(pid, 4 * LIMIT) for pid in pids]
    time.sleep(seconds)
    os.kill(pids[victim], number)
    ends = {victim: end_of(pids[victim])}
    survivor = end_of(pids[1 - victim], LIMIT_OF_SURVIVORS)
    if survivor == "ended by the launcher" and not met.exists():
        survivor = "waited for it until torchrun would end it: they had not met"
    return [ends[victim], survivor] if victim == 0 else [survivor, ends[victim]]


# ---- the matrix ------------------------------------------------------------------------------------------------------


def faults(rng: random.Random, duration: float) -> list[tuple[str, Callable[[Path], str]]]:
    """One random fault of each kind."""
    saves, appends = rng.randrange(1, 11), rng.randrange(1, 6)
    return [
        ("SIGKILL at a random moment", after(rng.uniform(0, duration), signal.SIGKILL)),
        ("SIGKILL at a random moment", after(rng.uniform(0, duration), signal.SIGKILL)),
        ("SIGTERM at a random moment", after(rng.uniform(0, duration), signal.SIGTERM)),
        ("SIGINT at a random moment", after(rng.uniform(0, duration), signal.SIGINT)),
        ("SIGKILL before a file is replaced", at_call(Path, "replace", rng.randrange(1, 20), kill, before=True)),
        ("SIGKILL after a file is replaced", at_call(Path, "replace", rng.randrange(1, 20), kill, before=False)),
        ("SIGKILL within a checkpoint", at_call(os, "fsync", saves, kill, before=True)),
        ("SIGKILL after a record", at_call(recorder, "append_records", appends, kill, before=False)),
        ("full disk", full_disk(rng.randrange(0, 40_000))),
        ("exception in the network", FaultyNetwork(rng.randrange(1, FORWARDS + 1), in_hook=False)),
        ("exception in a backward hook", FaultyNetwork(rng.randrange(1, FORWARDS + 1), in_hook=True)),
        ("exception in the data loader", FaultyLoader(rng.randrange(1, 16))),
    ]


def outcome(out: Path):
    epochs = [asdict(one) for one in read_epochs(out / "records.jsonl")]
    shown = [
        {name: one[name] for name in ("epoch", "train_loss", "test_accuracy", "forward_backwards")} for one in epochs
    ]
    return state(out)["training"], shown


def survive(folder: Path, rounds: int, seed: int = 0, *, ranks: int = 0) -> Counter[str]:
    """Returns how often each fault was survived, and how the runs ended; AssertionError if a resumed run differs."""
    rng, found, whole = random.Random(seed), Counter[str](), folder / "whole"
    start = time.monotonic()
    assert end_of(fork(lambda: run(whole))) == "finished"
    duration = 1.2 * (time.monotonic() - start)
    expected = outcome(whole)
    for number in range(rounds):
        for name, happens in faults(rng, duration):
            out = folder / "run"
            shutil.rmtree(out, ignore_errors=True)
            ended = happens(out)
            _check(f"round {number}, seed {seed}: {name} ({ended})", ended, out, expected, devices=1)
            found[name if ended != "finished" else f"{name}, too late: the run had finished"] += 1
    if ranks:
        both = folder / "both"
        start = time.monotonic()
        assert two_ranks(both, None, 0, 0) == ["finished", "finished"]
        duration, expected = time.monotonic() - start, outcome(both)
    for number in range(ranks):
        out, victim = folder / "run", rng.randrange(2)
        shutil.rmtree(out, ignore_errors=True)
        ended = two_ranks(out, rng.uniform(0.1, duration), signal.SIGKILL, victim)
        case = f"two ranks {number}, seed {seed}: SIGKILL of rank {victim} ({ended})"
        _check(case, ended[1 - victim], out, expected, devices=2)
        assert ended[1 - victim].startswith(("finished", "named the lost rank", "waited for it")), case
        late = "" if ended[victim] == "signal 9" else ", too late: the run had finished"
        found[f"SIGKILL of one of two ranks{late}: the other {ended[1 - victim]}"] += 1
    return found


def _check(case: str, ended: str, out: Path, expected: object, *, devices: int) -> None:
    assert not ended.startswith("exit code"), f"{case}: {ERRORS.read_text()}"
    if not (out / "result.json").exists():
        if devices == 2:
            ends = two_ranks(out, None, 0, 0, resume=True)
        else:
            ends = [end_of(fork(lambda: run(out, resume=True)))]
        assert set(ends) == {"finished"}, f"{case}: resumed run {ends}"
    assert same(outcome(out), expected), f"{case}: the resumed run differs"
    left = [file.name for file in out.rglob("*.part")]
    assert not left, f"{case}: left {left}"
