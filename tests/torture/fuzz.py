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
from functools import partial
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
from sparsesam.lab.experiment.config import RunEnvironment, TrainConfig, from_mapping, split_settings
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


class Hangs(BaseException):
    pass


class Malicious:
    def __reduce__(self):
        return os.system, ("echo this must never run",)


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


def of_text(name: str, draw: Callable[[random.Random], object], reader: Callable[[Path], object]) -> Target:
    """A file of YAML or JSON, sometimes damaged."""

    def target(folder: Path, rng: random.Random) -> object:
        (folder / name).write_bytes(text(draw(rng), rng))
        return reader(folder / name)

    return target


def of_bytes(name: str, contents: list[bytes], *readers: Callable[[Path], object]) -> Target:
    """A file with one of these contents, damaged."""

    def target(folder: Path, rng: random.Random) -> object:
        (folder / name).write_bytes(mutated(rng.choice(contents), rng))
        return rng.choice(readers)(folder / name)

    return target


def written(write: Callable[[io.BytesIO], object]) -> bytes:
    stream = io.BytesIO()
    write(stream)
    return stream.getvalue()


def drawn_sweep(rng: random.Random) -> object:
    base: dict[Any, Any] = {"title": "a", "settings": {"epochs": 3}, "variants": {"A": {"optimizer": "sam"}}}
    base |= {"grid": {"rho": [0.1, 0.2]}, "seeds": 2}
    for _ in range(rng.randrange(3)):
        base[rng.choice([*base, "other", 1])] = value(rng)
    return base


def drawn_calibration(rng: random.Random) -> object:
    return {"variants": {"a": value(rng)} if rng.random() < 0.5 else value(rng), "provenance": value(rng)}


def settings(folder: Path, rng: random.Random) -> object:
    build = from_mapping if rng.random() < 0.8 else split_settings
    return build({rng.choice((*SETTINGS, *WORDS)): value(rng) for _ in range(rng.randrange(1, 4))})


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


def report(folder: Path, rng: random.Random) -> object:
    run = folder / "run"
    (run / "analyses").mkdir(parents=True, exist_ok=True)
    for name in ("config.yaml", "records.jsonl", "result.json", "failure.json", "analyses/a.json"):
        (run / name).write_bytes(text(value(rng), rng) if rng.random() < 0.7 else rng.randbytes(20))
    return RunRecord(run)


def mask_file(folder: Path, rng: random.Random) -> object:
    directory = RunDirectory(folder / "of masks")
    directory.path.mkdir(exist_ok=True)
    directory.begin(TrainConfig(), RunEnvironment())
    directory.write_masks(3, {"a": torch.ones(5, 3, dtype=torch.bool)}, TrainConfig().identity)
    file = directory.masks / "00000003.pt"
    file.write_bytes(mutated(file.read_bytes(), rng))
    return read_mask_file(file)


def paper_recipe(folder: Path, rng: random.Random) -> object:
    known = rng.choice(list(recipes()))
    found = recipe(known if rng.random() < 0.8 else mutated(known.encode(), rng).decode("utf-8", "replace"))
    changed = found.at(rng.choice(("laptop", "full")), {rng.choice((*SETTINGS, *WORDS)): value(rng)})
    changed.check_overrides()
    return changed.sweep([0])


WEIGHTS = {"0.weight": torch.arange(12.0).view(3, 4), "0.bias": torch.zeros(3)}
CHECKPOINT = {"format": checkpoint.FORMAT, "version": checkpoint.VERSION, "run": "a", "model": WEIGHTS, "epoch": 1}
SAVED = (CHECKPOINT, {"state_dict": WEIGHTS}, WEIGHTS, {"format": checkpoint.FORMAT, "x": Malicious()})
CHECKPOINTS = [*(written(partial(torch.save, content)) for content in SAVED), pickle.dumps({"a": Malicious()})]
IDX = idx(np.arange(60, dtype=np.uint8).reshape(3, 4, 5))
PICTURE = Image.fromarray(np.arange(192, dtype=np.uint8).reshape(8, 8, 3))
IMAGES = [
    written(lambda stream, kind=kind: PICTURE.save(stream, kind))
    for kind in ("png", "jpeg", "gif", "bmp", "tiff", "webp")
]
TARGETS: dict[str, Target] = {
    "settings": settings,
    "command lines": command_line,
    "overrides": override,
    "records": record_files,
    "reports": report,
    "masks": mask_file,
    "recipes": paper_recipe,
    "sweep files": of_text("sweep.yaml", drawn_sweep, lambda file: read_sweep(file, overrides={}, seeds=None)),
    "settings files": of_text(
        "settings.yaml",
        lambda rng: {rng.choice(SETTINGS): value(rng) for _ in range(3)},
        lambda file: settings_from(argparse.Namespace(config=[file])),
    ),
    "results": of_text(
        "result.json", lambda rng: {"result": value(rng), "hash": value(rng)}, lambda file: read_result(file, "a")
    ),
    "calibrations": of_text("calibration.json", drawn_calibration, lambda file: read_calibration(file.parent)),
    "settings of runs": of_text(
        "config.yaml",
        lambda rng: {**asdict(TrainConfig()), "rho": value(rng)},
        lambda file: RunDirectory(file.parent).saved_config(),
    ),
    "checkpoints": of_bytes("best.pt", CHECKPOINTS, checkpoint.load, checkpoint.read_weights),
    "safetensors": of_bytes("a.safetensors", [save(WEIGHTS)], checkpoint.read_weights),
    "idx": of_bytes("plain", [IDX], lambda file: read_idx(file, 3)),
    "packed idx": of_bytes("packed.gz", [gzip.compress(IDX)], lambda file: read_idx(file.with_suffix(""), 3)),
    "CIFAR": of_bytes("data_batch.bin", [bytes(2 * 3073)], lambda file: read_cifar([file], 2, label_bytes=1)),
    "images": of_bytes("image", IMAGES, lambda file: image_folder._decode(str(file))),
}
WEIGHT_OF = [1 if name == "recipes" else 4 for name in TARGETS]  # which take longest


def survive(folder: Path, inputs: int, seed: int = 0) -> Counter[str]:
    """Read ``inputs`` malformed inputs; returns how many of each kind, and how many were refused."""
    rng, found, executed = random.Random(seed), Counter[str](), []
    sys.addaudithook(lambda event, _: executed.append(event) if event in EXECUTING else None)

    def too_long(*_: object) -> None:
        raise Hangs(f"longer than {SECONDS} s")

    before = signal.signal(signal.SIGALRM, too_long)
    try:
        for number in range(inputs):
            (name,) = rng.choices(list(TARGETS), WEIGHT_OF)
            signal.alarm(SECONDS)
            try:
                TARGETS[name](folder, random.Random(f"{seed} {number}"))
            except REFUSALS as error:
                found["refused" if str(error) else "refused without a reason"] += 1
            except BaseException as error:
                message = f"input {number}, seed {seed}: {name}: {type(error).__name__}: {error}"
                raise AssertionError(message) from error
            finally:
                signal.alarm(0)
            found[name] += 1
            assert not executed, f"input {number}, seed {seed}: {name} called {executed}"
    finally:
        signal.signal(signal.SIGALRM, before)
    assert not found["refused without a reason"]
    assert not (folder / "outside").exists()
    return found
