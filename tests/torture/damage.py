"""Every file of a run, damaged in every way, under every command that reads it.

A case passes if the command prints one line that names a file and exits with 1 or 2, or if its outcome is that of the
undamaged run. The commands run in this process.
"""

from __future__ import annotations

import io
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


DAMAGES = (truncated, emptied, flipped, replaced, missing)


def call(*arguments: str) -> tuple[int, str, str]:
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        code = main(list(arguments))
    return code, out.getvalue(), err.getvalue()


class Runs:
    """Undamaged runs and what every command makes of them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        train(folder / "finished", **SETTINGS)
        train(folder / "other", seed=1, **SETTINGS)
        for name in ("finished", "other"):
            assert call("analyze", "masks", str(folder / name))[0] == 0
        with suppress(Interrupted):
            train(folder / "stopped", InterruptAt(8), **SETTINGS)
        finished = folder / "finished"
        self.outcomes = {name: self.outcome(name, finished) for name in ("eval", "export", "analyze", "report")}
        self.outcomes["resume"] = self.after_resume(finished)

    def outcome(self, command: str, run: Path):
        """Returns what the command gives; raises `Refused` if it ends with an error."""
        if command == "report":
            return self.report(run)
        if command == "resume":
            if run.name == "finished":
                (run / "result.json").unlink(missing_ok=True)
            self.check(*call("train", "--resume", "--quiet", "--out", str(run)))
            return self.after_resume(run)
        file = run.parent / "weights.pt"
        arguments = {"eval": (), "export": ("-o", str(file)), "analyze": ()}[command]
        words = ("analyze", "masks") if command == "analyze" else (command,)
        printed = self.check(*call(*words, str(run), *arguments))
        if command == "export":
            return torch.load(file, weights_only=True)
        if command == "analyze":
            return json.loads((run / "analyses" / "masks.json").read_text())["result"]
        return printed.partition(";")[0]

    @staticmethod
    def report(run: Path):
        """The records as the report reads them; problems that it shows count as a refusal."""
        record = RunRecord(run)
        if record.problems or record.status != "finished":
            raise Refused(" ".join([*record.problems, record.status, record.reason]))
        epochs = {epoch: values["test_accuracy"] for epoch, values in record.epochs.items()}
        measured = record.analyses.get("masks", {}).get("result")  # an analysis may also not have been made
        return epochs, record.result["test_accuracy"], record.config, measured

    @staticmethod
    def after_resume(run: Path):
        figures = [asdict(one) for one in (*read_epochs(run / "records.jsonl"), read_result(run / "result.json"))]
        left = [{name: value for name, value in one.items() if name not in TIMES} for one in figures]
        return state(run)["training"], left, torch.load(run / "best.pt", weights_only=True)["model"]

    @staticmethod
    def check(code: int, out: str, err: str) -> str:
        if code == 0:
            return out
        lines = [line for line in err.splitlines() if line.startswith("sparsesam")]
        if code not in (1, 2) or len(lines) != 1 or not err.endswith(lines[0] + "\n"):
            raise AssertionError(f"exit code {code}, printed {err!r}")
        raise Refused(lines[0])


class Refused(Exception):
    """The command ended with one line."""


def survive(folder: Path, cases: int, seed: int = 0) -> Counter[str]:
    """Returns how many cases were refused and how many gave the right outcome; AssertionError for any other."""
    runs, rng, found = Runs(folder / "originals"), random.Random(seed), Counter[str]()
    kinds = [
        (command, name, damage)
        for command in ("resume", "report", "analyze", "eval", "export")
        for name in FILES
        for damage in DAMAGES
    ]
    for number in range(cases):
        command, name, damage = kinds[number % len(kinds)]
        which = rng.choice(("finished", "stopped")) if command == "resume" else "finished"
        if which == "stopped" and name in ("result.json", "analyses/masks.json"):
            which = "finished"
        place = folder / "case"
        shutil.rmtree(place, ignore_errors=True)
        run = place / which
        shutil.copytree(runs.folder / which, run)
        file = rng.choice(sorted((run / "masks").iterdir())) if name == "masks" else run / name
        counterpart = runs.folder / "other" / file.relative_to(run)
        case = f"case {number}, seed {seed}: {command} of a {which} run, {file.relative_to(run)} {damage.__name__}"
        damage(file, rng, counterpart)
        expected = runs.outcomes[command]
        if command == "report" and name.startswith("analyses") and damage is missing:
            expected = (*expected[:3], None)
        try:
            outcome = runs.outcome(command, run)
        except Refused as refused:
            if command != "report" and file.name not in str(refused) and file.parent.name not in str(refused):
                raise AssertionError(f"{case}: the line does not name the file: {refused}") from None
            found["refused"] += 1
        except BaseException as error:
            raise AssertionError(f"{case}: {type(error).__name__}: {error}") from error
        else:
            if not same(outcome, expected):
                raise AssertionError(f"{case}: another outcome than that of the undamaged run")
            found["right"] += 1
    return found
