"""Malformed inputs in one process: each is accepted or refused with a message; no crash, hang or execution."""

from __future__ import annotations

import argparse
import gzip
import io
import json
import os
import pickle
import random
import signal
import sys
from collections import Counter
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from PIL import Image
from safetensors.torch import save

from sparsesam.lab.commands.parser import Parser, add_settings, settings_from
from sparsesam.lab.commands.sweep import overrides
from sparsesam.lab.data import image_folder
from sparsesam.lab.data.published import read_cifar, read_idx
from sparsesam.lab.experiment import checkpoint
from sparsesam.lab.experiment.calibration import read_calibration
from sparsesam.lab.experiment.config import RunEnvironment, TrainConfig, from_mapping
from sparsesam.lab.experiment.errors import RunError
from sparsesam.lab.experiment.result import read_epochs, read_result
from sparsesam.lab.experiment.run_directory import RunDirectory, read_mask_file
from sparsesam.lab.experiment.sweep import read_sweep
from sparsesam.lab.paper.recipe import recipe, recipes
from sparsesam.lab.report.read_run import RunRecord
from tests.lab.data.files import idx

REFUSALS = (ValueError, RunError, OSError)
SECONDS = 20
EXECUTING = ("os.system", "os.exec", "os.posix_spawn", "os.fork", "subprocess.Popen", "webbrowser.open")
_executed: list[str] = []
_watching = [False]


class Malicious:
    def __reduce__(self):
        return os.system, ("echo this must never run",)


def _watch(event: str, arguments: object) -> None:
    if _watching[0] and event in EXECUTING:
        _executed.append(event)


# ---- inputs ----------------------------------------------------------------------------------------------------------

WORDS = [
    *("sam", "ssam-f", "sgd", "", "null", "true", "1e-3", "[", "{a: 1", "&a [*a]", "!!python/object:os.system x"),
    *("0.5", "-1", "nan", ".inf", "9" * 400, "2:4", "digits", "x" * 3000, "*", "2026-01-01", "0x1f", "1:2:3", "é\x00"),
]
SETTINGS = [setting.name for setting in (*fields(TrainConfig), *fields(RunEnvironment))]


def value(rng: random.Random, depth: int = 0) -> Any:
    """Random plain values, nested up to three levels."""
    kind = rng.randrange(9 if depth < 3 else 6)
    if kind < 6:
        return [rng.choice(WORDS), rng.randrange(-3, 10), rng.random(), None, rng.choice((True, False)), 10**30][kind]
    if kind == 6:
        return [value(rng, depth + 1) for _ in range(rng.randrange(4))]
    return {rng.choice((*SETTINGS, *WORDS, "A", 1)): value(rng, depth + 1) for _ in range(rng.randrange(4))}


def mutated(content: bytes, rng: random.Random) -> bytes:
    """Flip, cut, repeat, insert or overwrite some bytes."""
    data = bytearray(content)
    for _ in range(rng.choice((1, 1, 2, 5))):
        place = rng.randrange(len(data) + 1)
        kind = rng.randrange(5)
        if kind == 0 and place < len(data):
            data[place] ^= 1 << rng.randrange(8)
        elif kind == 1:
            del data[place:]
        elif kind == 2:
            data[place:place] = data[place : place + rng.randrange(1, 64)]
        elif kind == 3:
            data[place:place] = rng.randbytes(rng.randrange(1, 16))
        else:
            data[place : place + 4] = rng.choice((b"\xff" * 4, b"\x00" * 4, b"\x7f\xff\xff\xff"))
    return bytes(data)


def text(content: object, rng: random.Random) -> bytes:
    """YAML or JSON of the content, sometimes damaged."""
    written = yaml.safe_dump(content) if rng.random() < 0.5 else json.dumps(content)
    encoded = written.encode("utf-8", "replace")
    return mutated(encoded, rng) if rng.random() < 0.5 else encoded


# ---- targets: each takes a folder and a source of randomness, and reads one malformed input --------------------------

Target = Callable[[Path, random.Random], object]


def sweep_file(folder: Path, rng: random.Random) -> object:
    base: dict[Any, Any] = {"title": "a", "settings": {"epochs": 3}, "variants": {"A": {"optimizer": "sam"}}}
    base |= {"grid": {"rho": [0.1, 0.2]}, "seeds": 2}
    for _ in range(rng.randrange(3)):
        base[rng.choice([*base, "other", 1])] = value(rng)
    (folder / "sweep.yaml").write_bytes(text(base, rng))
    return read_sweep(folder / "sweep.yaml", overrides={}, seeds=None)


def settings(folder: Path, rng: random.Random) -> object:
    kind = TrainConfig if rng.random() < 0.8 else RunEnvironment
    return from_mapping(kind, {rng.choice((*SETTINGS, *WORDS)): value(rng) for _ in range(rng.randrange(1, 4))})


def settings_file(folder: Path, rng: random.Random) -> object:
    (folder / "settings.yaml").write_bytes(text({rng.choice(SETTINGS): value(rng) for _ in range(3)}, rng))
    return settings_from(argparse.Namespace(config=[folder / "settings.yaml"]))


_PARSER = Parser("sparsesam train", "help")
add_settings(_PARSER)


def command_line(folder: Path, rng: random.Random) -> object:
    words = []
    for _ in range(rng.randrange(1, 4)):
        name = rng.choice((*SETTINGS, "", "-", "config")).replace("_", "-")
        words += [f"--{name}", *([rng.choice(WORDS)] if rng.random() < 0.9 else [])]
    try:
        with redirect_stderr(io.StringIO()), redirect_stdout(io.StringIO()):
            return settings_from(_PARSER.parse_args(words))
    except SystemExit as error:
        raise ValueError(f"refused with exit code {error.code}") from None


def override(folder: Path, rng: random.Random) -> object:
    return overrides([rng.choice((*WORDS, f"{rng.choice(SETTINGS)}={rng.choice(WORDS)}")) for _ in range(2)])


def record_files(folder: Path, rng: random.Random) -> object:
    line = {"kind": rng.choice(("epoch", "run", "result", 3)), "epoch": value(rng), "step": value(rng)}
    lines = b"\n".join(text(line | {"config": value(rng)}, rng) for _ in range(2))
    (folder / "records.jsonl").write_bytes(lines)
    return read_epochs(folder / "records.jsonl")


def result_file(folder: Path, rng: random.Random) -> object:
    (folder / "result.json").write_bytes(text({"result": value(rng), "hash": value(rng)}, rng))
    return read_result(folder / "result.json", "a")


def report(folder: Path, rng: random.Random) -> object:
    run = folder / "run"
    (run / "analyses").mkdir(parents=True, exist_ok=True)
    for name in ("config.yaml", "records.jsonl", "result.json", "failure.json", "analyses/a.json"):
        (run / name).write_bytes(text(value(rng), rng) if rng.random() < 0.7 else rng.randbytes(20))
    return RunRecord(run)


def calibration(folder: Path, rng: random.Random) -> object:
    content = {"variants": {"a": value(rng)} if rng.random() < 0.5 else value(rng), "provenance": value(rng)}
    (folder / "calibration.json").write_bytes(text(content, rng))
    return read_calibration(folder)


def run_settings(folder: Path, rng: random.Random) -> object:
    (folder / "config.yaml").write_bytes(text({**asdict(TrainConfig()), "rho": value(rng)}, rng))
    return RunDirectory(folder).saved_config()


def _saved(content: object) -> bytes:
    stream = io.BytesIO()
    torch.save(content, stream)
    return stream.getvalue()


_WEIGHTS = {"0.weight": torch.arange(12.0).view(3, 4), "0.bias": torch.zeros(3)}
_CHECKPOINTS = [
    _saved({"format": checkpoint.FORMAT, "version": checkpoint.VERSION, "run": "a", "model": _WEIGHTS, "epoch": 1}),
    _saved({"state_dict": _WEIGHTS}),
    _saved(_WEIGHTS),
    _saved({"format": checkpoint.FORMAT, "x": Malicious()}),
    pickle.dumps({"a": Malicious()}),
]


def checkpoint_file(folder: Path, rng: random.Random) -> object:
    (folder / "best.pt").write_bytes(mutated(rng.choice(_CHECKPOINTS), rng))
    return checkpoint.load(folder / "best.pt") if rng.random() < 0.5 else checkpoint.read_weights(folder / "best.pt")


_SAFETENSORS = save(_WEIGHTS)


def safetensors_file(folder: Path, rng: random.Random) -> object:
    (folder / "a.safetensors").write_bytes(mutated(_SAFETENSORS, rng))
    return checkpoint.read_weights(folder / "a.safetensors")


def mask_file(folder: Path, rng: random.Random) -> object:
    directory = RunDirectory(folder / "of masks")
    directory.path.mkdir(exist_ok=True)
    directory.begin(TrainConfig(), RunEnvironment())
    directory.write_masks(3, {"a": torch.ones(5, 3, dtype=torch.bool)}, TrainConfig().identity)
    file = directory.masks / "00000003.pt"
    file.write_bytes(mutated(file.read_bytes(), rng))
    return read_mask_file(file)


_IDX = idx(np.arange(60, dtype=np.uint8).reshape(3, 4, 5))


def idx_file(folder: Path, rng: random.Random) -> object:
    packed = rng.random() < 0.5
    content = mutated(gzip.compress(_IDX) if packed else _IDX, rng)
    (folder / "a").unlink(missing_ok=True)
    (folder / ("a.gz" if packed else "a")).write_bytes(content)
    return read_idx(folder / "a", 3)


def cifar_file(folder: Path, rng: random.Random) -> object:
    (folder / "data_batch.bin").write_bytes(mutated(bytes(2 * 3073), rng))
    return read_cifar([folder / "data_batch.bin"], 2, label_bytes=1)


def _image(form: str) -> bytes:
    stream = io.BytesIO()
    Image.fromarray(np.arange(192, dtype=np.uint8).reshape(8, 8, 3)).save(stream, form)
    return stream.getvalue()


_IMAGES = {form: _image(form) for form in ("png", "jpeg", "gif", "bmp", "tiff", "webp")}


def image_file(folder: Path, rng: random.Random) -> object:
    form = rng.choice(list(_IMAGES))
    (folder / f"a.{form}").write_bytes(mutated(_IMAGES[form], rng))
    return image_folder._decode(str(folder / f"a.{form}"))


def paper_recipe(folder: Path, rng: random.Random) -> object:
    known = rng.choice(list(recipes()))
    found = recipe(known if rng.random() < 0.8 else mutated(known.encode(), rng).decode("utf-8", "replace"))
    changed = found.at(rng.choice(("laptop", "full")), {rng.choice((*SETTINGS, *WORDS)): value(rng)})
    changed.check_overrides()
    return changed.sweep([0])


TARGETS: dict[Target, int] = {
    **dict.fromkeys((sweep_file, settings, settings_file, command_line, override), 8),
    **dict.fromkeys((record_files, result_file, report, calibration, run_settings), 6),
    **dict.fromkeys((checkpoint_file, safetensors_file, mask_file), 8),
    **dict.fromkeys((idx_file, cifar_file, image_file), 8),
    **dict.fromkeys((paper_recipe,), 2),
}


def survive(folder: Path, inputs: int, seed: int = 0) -> Counter[str]:
    """Read ``inputs`` malformed inputs; returns how many of each kind, and how many were refused."""
    if not _watching[0]:
        sys.addaudithook(_watch)
    _watching[0] = True
    _executed.clear()
    rng, found = random.Random(seed), Counter[str]()
    targets, weights = list(TARGETS), list(TARGETS.values())

    def too_long(*_: object) -> None:
        raise TimeoutError(f"longer than {SECONDS} s")

    before = signal.signal(signal.SIGALRM, too_long)
    try:
        for number in range(inputs):
            target = rng.choices(targets, weights)[0]
            own = random.Random(f"{seed} {number}")
            signal.alarm(SECONDS)
            try:
                target(folder, own)
            except TimeoutError as error:
                raise AssertionError(f"input {number}, seed {seed}: {target.__name__}: {error}") from error
            except REFUSALS as error:
                found["refused" if str(error) else "refused without a reason"] += 1
            except BaseException as error:
                message = f"input {number}, seed {seed}: {target.__name__}: {type(error).__name__}: {error}"
                raise AssertionError(message) from error
            finally:
                signal.alarm(0)
            found[target.__name__] += 1
            assert not _executed, f"input {number}, seed {seed}: {target.__name__} called {_executed}"
    finally:
        signal.signal(signal.SIGALRM, before)
        _watching[0] = False
    assert not found["refused without a reason"]
    assert not (folder / "outside").exists()
    return found
