"""Weights from a file: a checkpoint of a run, a plain state_dict, or safetensors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor, nn

from sparsesam.integrations.extras import required_by
from sparsesam.lab.experiment import checkpoint
from sparsesam.lab.experiment.errors import CheckpointError

#: Under which key training scripts keep the weights, beside other things.
_KEYS = ("state_dict", "model", "model_state_dict")
#: What wrappers put before every name.
_PREFIXES = ("module.", "_orig_mod.")


def read_weights(path: Path) -> dict[str, Tensor]:
    """The state_dict in a file; nothing that is in the file is run.

    A run's directory stands for its ``best.pt``, or its ``last.pt`` where that is all there is.
    """
    if path.is_dir():
        found = [path / name for name in ("best.pt", "last.pt") if (path / name).exists()]
        if not found:
            raise ValueError(f"{path} has no best.pt and no last.pt; pass a run's directory or a file of weights")
        path = found[0]
    if not path.is_file():
        raise ValueError(f"{path} does not exist; pass a checkpoint, a state_dict (.pt) or a .safetensors file")
    if path.suffix == ".safetensors":
        return _read_safetensors(path)
    content = checkpoint.load_tensors(path)
    if isinstance(content, dict) and content.get("format") == checkpoint.FORMAT:
        return weights_of(checkpoint.load(path))
    for key in _KEYS:
        if isinstance(content, dict) and isinstance(content.get(key), dict):
            content = content[key]
            break
    if not isinstance(content, dict) or not content or not all(isinstance(value, Tensor) for value in content.values()):
        raise CheckpointError(f"{path} must contain a state_dict; torch.save(model.state_dict(), PATH)")
    for prefix in _PREFIXES:
        if all(name.startswith(prefix) for name in content):
            content = {name.removeprefix(prefix): value for name, value in content.items()}
    return content


def weights_of(content: dict[str, Any]) -> dict[str, Tensor]:
    """The weights in a checkpoint of ours as they are tested: the moving average, where the run has one."""
    if "training" not in content:
        return dict(content["model"])
    training = content["training"]
    if training["ema"] is None:
        return dict(training["model"])
    prefix = "module."
    return {name.removeprefix(prefix): value for name, value in training["ema"].items() if name.startswith(prefix)}


def initialize(model: nn.Module, path: Path) -> list[str]:
    """Load weights into ``model``; the names of the classifier's tensors, if those keep their random values.

    Only the last parameters, the classifier, may differ in shape; all others must be in the file.
    """
    weights, own = read_weights(path), model.state_dict()
    differing = [name for name in own if name in weights and weights[name].shape != own[name].shape]
    missing = [name for name in own if name not in weights and not name.endswith("num_batches_tracked")]
    head = _head(model)
    kept = [name for name in own if name in (*differing, *missing) and name in head]
    wrong = [name for name in (*missing, *differing) if name not in kept]
    if wrong:
        unknown = [name for name in weights if name not in own]
        raise CheckpointError(
            f"{path} does not fit the model: {len(wrong)} of its tensors are missing or of another shape, for example "
            f"{', '.join(wrong[:3])}; the file has {', '.join(unknown[:3]) or 'no others'}; "
            "init_from must be of the same architecture, but for the classifier"
        )
    model.load_state_dict({name: weights[name] for name in own if name in weights and name not in kept}, strict=False)
    return kept


def _head(model: nn.Module) -> set[str]:
    """The names of the last module that has parameters of its own."""
    owners = [
        name for name, module in model.named_modules() if next(module.parameters(recurse=False), None) is not None
    ]
    last = model.get_submodule(owners[-1])
    return {f"{owners[-1]}.{name}" if owners[-1] else name for name, _ in last.named_parameters(recurse=False)}


def _read_safetensors(path: Path) -> dict[str, Tensor]:
    with required_by(str(path), "safetensors"):
        from safetensors import SafetensorError
        from safetensors.torch import load_file
    try:
        return dict(load_file(path))
    except SafetensorError as error:
        raise CheckpointError(f"{path} cannot be read: it is damaged or not a safetensors file ({error})") from error
