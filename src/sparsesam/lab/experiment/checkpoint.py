"""Checkpoints, written atomically, verified on load, and read without executing code from the file. Also reads weights
from a plain state_dict or safetensors.

torch.save writes a zip archive with a CRC-32 of every record; torch.load does not check it, `load` does.
"""

from __future__ import annotations

import os
import pickle
import zipfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.utils import consume_prefix_in_state_dict_if_present

from sparsesam.integrations.extras import required_by
from sparsesam.lab.experiment.errors import CheckpointError, one_line

FORMAT, VERSION = "sparsesam run", 5

#: What only the file of that name contains.
_CONTENT = {"last.pt": "training", "best.pt": "test_accuracy"}
#: Keys under which training scripts store the weights.
_KEYS = ("state_dict", "model", "model_state_dict")


def save(path: Path, run: str, content: dict[str, Any]) -> None:
    """Replace ``path`` atomically: if writing fails or the process dies, the old file remains.

    ``run`` is the identity of the run's settings, by which `RunDirectory.load` recognizes a file of another run.
    """
    part = path.with_name(f"{path.name}.part")
    try:
        with part.open("wb") as file:
            torch.save({"format": FORMAT, "version": VERSION, "run": run, **content}, file)
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    except (OSError, RuntimeError) as error:  # torch's writer turns a full disk into a RuntimeError
        part.unlink(missing_ok=True)
        reason = error.__context__ if isinstance(error.__context__, OSError) else error
        raise CheckpointError(
            f"{path} could not be written ({reason}); earlier files are intact; free some space, then --resume"
        ) from error


def load(path: Path, device: torch.device | str = "cpu") -> dict[str, Any]:
    """Load a file of `save`; raises CheckpointError for damaged and other files."""
    if not path.exists():
        raise CheckpointError(f"{path} does not exist: the run stopped before its first checkpoint; start it again")
    try:
        with zipfile.ZipFile(path) as archive:
            if (damaged := archive.testzip()) is not None:
                raise ValueError(f"the checksum of {damaged} does not match")
    except Exception as error:  # a damaged archive can fail in any way
        raise CheckpointError(
            f"{path} is damaged or truncated ({one_line(error)}); restore it, or use another file of the run"
        ) from error
    content = load_tensors(path, device)
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise CheckpointError(f"{path} must be a checkpoint of `sparsesam train`, but is not; check the path")
    if content.get("version") != VERSION:
        raise CheckpointError(
            f"{path} must be of version {VERSION}, got {content.get('version')}; use the sparsesam that wrote it"
        )
    if not {"run", _CONTENT.get(path.name, "run")} <= content.keys():
        raise CheckpointError(f"{path} is another file of a run; restore the right one")
    return content


def load_tensors(path: Path, device: torch.device | str = "cpu") -> Any:
    """Load any file of torch.save without executing code from it."""
    try:
        return torch.load(path, map_location=device, weights_only=True)
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            f"{path} is rejected: it contains more than tensors and plain values, and loading it could run code; "
            "save the state_dict only: torch.save(model.state_dict(), PATH)"
        ) from error
    except Exception as error:  # a damaged file can fail in any way
        raise CheckpointError(
            f"{path} cannot be read: is it from torch.save, and whole? ({one_line(error)})"
        ) from error


def read_weights(path: Path) -> dict[str, Tensor]:
    """Read the state_dict in a file without executing code from it.

    For a run's directory, reads ``best.pt``, or ``last.pt`` if there is no ``best.pt``.
    """
    if path.is_dir():
        path = path / ("best.pt" if (path / "best.pt").exists() else "last.pt")
    if not path.is_file():
        raise ValueError(f"{path} does not exist; pass a run, a checkpoint, a state_dict (.pt) or a .safetensors file")
    if path.suffix == ".safetensors":
        return _read_safetensors(path)
    content = load_tensors(path)
    if isinstance(content, dict) and content.get("format") == FORMAT:
        content = weights_of(load(path))
    elif isinstance(content, dict):
        content = next((content[key] for key in _KEYS if isinstance(content.get(key), dict)), content)
    if not isinstance(content, dict) or not content or not all(isinstance(value, Tensor) for value in content.values()):
        raise CheckpointError(f"{path} must contain a state_dict; torch.save(model.state_dict(), PATH)")
    for prefix in ("module.", "_orig_mod."):  # of DDP, of averaged models (which count) and of torch.compile
        if all(name.startswith(prefix) for name in content if name != "n_averaged"):
            consume_prefix_in_state_dict_if_present(content, prefix)
    return content


def weights_of(content: dict[str, Any]) -> dict[str, Tensor]:
    """Returns the weights that are evaluated: the moving average if the run has one."""
    training = content.get("training", content)
    if training.get("ema") is None:
        return dict(training.get("model", {}))
    average = training["ema"].items()  # of an AveragedModel, which also counts its updates
    return {name.removeprefix("module."): value for name, value in average if name.startswith("module.")}


def initialize(model: nn.Module, path: Path) -> None:
    """Load weights into ``model``.

    Only the last layer, the classifier, may be missing or have another shape, and keeps its random values; all others
    must be in the file.
    """
    weights, own = read_weights(path), model.state_dict()
    fitting = {name for name in own if name in weights and weights[name].shape == own[name].shape}
    *_, (last, _) = model.named_parameters(remove_duplicate=False)
    classifier = {name for name in own if name.rpartition(".")[0] == last.rpartition(".")[0]}
    wrong = [name for name in own if name not in fitting | classifier and not name.endswith("num_batches_tracked")]
    if wrong:
        unknown = [name for name in weights if name not in own]
        raise CheckpointError(
            f"{path} does not fit the model: {len(wrong)} of its tensors are missing or have another shape, such as "
            f"{', '.join(wrong[:3])}; the file has {', '.join(unknown[:3]) or 'no others'}; "
            "init_from must have the same architecture, except for the classifier"
        )
    model.load_state_dict({name: weights[name] for name in fitting}, strict=False)


def _read_safetensors(path: Path) -> dict[str, Tensor]:
    with required_by(str(path), "safetensors"):
        from safetensors import SafetensorError
        from safetensors.torch import load_file
    try:
        return dict(load_file(path))
    except SafetensorError as error:
        raise CheckpointError(f"{path} cannot be read: it is damaged or not a safetensors file ({error})") from error
