"""Every file of a run, damaged in every way, under every command that reads it.

A case passes if the command prints one line that names a file and exits with 1 or 2, or if its outcome is that of the
undamaged run. The commands run in this process.
"""

from __future__ import annotations

import io
import itertools
import json
import random
import shutil
from collections import Counter
from contextlib import redirect_stderr, redirect_stdout, suppress
from dataclasses import asdict
from pathlib import Path

import torch

from sparsesam.lab.cli import main
from sparsesam.lab.experiment.errors import Interrupted
from sparsesam.lab.experiment.result import read_epochs, read_result
from sparsesam.lab.report.read_run import RunRecord
from tests.lab.experiment.runs import InterruptAt, same, state, train

SETTINGS = {"optimizer": "ssam-f", "mask_steps": 3, "model": "tests.lab.inspection.networks:linear"}
FILES = ("config.yaml", "records.jsonl", "last.pt", "best.pt", "result.json", "masks", "analyses/masks.json")
TIMES = ("seconds", "images_per_second", "mask_seconds", "seconds_per_mask", "step_seconds")


class Refused(Exception):
    """The command ended with one line."""


# ---- damages -----------------------------------------------------------------------------------------------------


def truncated(file: Path, rng: random.Random, other: Path) -> None:
    content = file.read_bytes()
    lines = [place + 1 for place, byte in enumerate(content) if byte == 10 and place + 1 < len(content)]
    at_line = lines and file.suffix in (".yaml", ".jsonl") and rng.random() < 0.5
    file.write_bytes(content[: rng.choice(lines) if at_line else rng.randrange(1, len(content))])


def emptied(file: Path, rng: random.Random, other: Path) -> None:
    file.write_bytes(b"")


def flipped(file: Path, rng: random.Random, other: Path) -> None:
    content = bytearray(file.read_bytes())
    for _ in range(rng.choice((1, 1, 3, 20))):
        content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
    file.write_bytes(content)


def replaced(file: Path, rng: random.Random, other: Path) -> None:
    """By the same file of another run, by another file of this run, or by noise."""
    alike = [sibling for sibling in file.parent.iterdir() if sibling.suffix == file.suffix and sibling != file]
    source = rng.choice([other, *alike, None])
    file.write_bytes(rng.randbytes(500) if source is None else source.read_bytes())


def missing(file: Path, rng: random.Random, other: Path) -> None:
    file.unlink()


# ---- commands: each returns its outcome for a run, or raises Refused -------------------------------------------------


def call(*arguments: object) -> str:
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        code = main(list(map(str, arguments)))
    if code == 0:
        return out.getvalue()
    lines = [line for line in err.getvalue().splitlines() if line.startswith("sparsesam")]
    if code not in (1, 2) or len(lines) != 1 or not err.getvalue().endswith(lines[0] + "\n"):
        raise AssertionError(f"exit code {code}, printed {err.getvalue()!r}")
    raise Refused(lines[0])


def resume(run: Path):
    if run.name == "finished":
        (run / "result.json").unlink(missing_ok=True)
    call("train", "--resume", "--quiet", "--out", run)
    return saved(run)


def saved(run: Path):
    figures = [asdict(one) for one in (*read_epochs(run / "records.jsonl"), read_result(run / "result.json"))]
    left = [{name: value for name, value in one.items() if name not in TIMES} for one in figures]
    return state(run)["training"], left, torch.load(run / "best.pt", weights_only=True)["model"]


def report(run: Path):
    """The records as the report reads them; problems that it shows count as a refusal."""
    record = RunRecord(run)
    if record.problems or record.status != "finished":
        raise Refused(" ".join([*record.problems, record.status, record.reason]))
    epochs = {epoch: values["test_accuracy"] for epoch, values in record.epochs.items()}
    measured = record.analyses.get("masks", {}).get("result")  # an analysis may also not have been made
    return epochs, record.result["test_accuracy"], record.config, measured


def analyze(run: Path):
    call("analyze", "masks", run)
    return json.loads((run / "analyses" / "masks.json").read_text())["result"]


def evaluate(run: Path):
    return call("eval", run).partition(";")[0]


def export(run: Path):
    file = run.with_name("weights.pt")
    call("export", run, "-o", file)
    return torch.load(file, weights_only=True)


COMMANDS = (resume, report, analyze, evaluate, export)
DAMAGES = (truncated, emptied, flipped, replaced, missing)


def survive(folder: Path, cases: int, seed: int = 0) -> Counter[str]:
    """Returns how many cases were refused and how many gave the right outcome; AssertionError for any other."""
    originals, rng, found = folder / "originals", random.Random(seed), Counter[str]()
    train(originals / "finished", **SETTINGS)
    train(originals / "other", seed=1, **SETTINGS)
    analyze(originals / "other")
    with suppress(Interrupted):
        train(originals / "stopped", InterruptAt(8), **SETTINGS)
    undamaged = {command: command(originals / "finished") for command in (evaluate, export, analyze, report)}
    undamaged[resume] = saved(originals / "finished")
    kinds = list(itertools.product(COMMANDS, FILES, DAMAGES))
    for number in range(cases):
        command, name, damage = kinds[number % len(kinds)]
        may_be_stopped = command is resume and name not in ("result.json", "analyses/masks.json")
        run = folder / "case" / (rng.choice(("finished", "stopped")) if may_be_stopped else "finished")
        shutil.rmtree(run.parent, ignore_errors=True)
        shutil.copytree(originals / run.name, run)
        file = rng.choice(sorted((run / "masks").iterdir())) if name == "masks" else run / name
        case = f"case {number}, seed {seed}: {command.__name__} of a {run.name} run, {name} {damage.__name__}"
        damage(file, rng, originals / "other" / file.relative_to(run))
        expected = undamaged[command]
        if command is report and name.startswith("analyses") and damage is missing:
            expected = (*expected[:3], None)
        try:
            outcome, line = command(run), ""
        except Refused as refused:
            outcome, line = None, str(refused)
        except BaseException as error:
            raise AssertionError(f"{case}: {type(error).__name__}: {error}") from error
        if line:
            is_named = command is report or file.name in line or file.parent.name in line
            assert is_named, f"{case}: the line does not name the file: {line}"
        else:
            assert same(outcome, expected), f"{case}: another outcome than that of the undamaged run"
        found["refused" if line else "right"] += 1
    return found
