import os
import resource
from contextlib import contextmanager
from functools import partial

import pytest
import torch
from safetensors.torch import save_file

from sparsesam.lab.experiment import checkpoint
from sparsesam.lab.experiment.checkpoint import initialize, read_weights
from sparsesam.lab.experiment.errors import CheckpointError
from sparsesam.lab.models import small_cnn
from tests.lab.experiment.runs import same, state, train

BEST = {"model": torch.zeros(1000), "epoch": 1, "test_accuracy": 0.5}


class Malicious:
    def __reduce__(self):
        return os.system, ("echo this must never run",)


@contextmanager
def files_no_larger_than(size):
    """A disk that is full after this many bytes of a file."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_full_disk_keeps_previous_checkpoint(tmp_path):
    checkpoint.save(tmp_path / "a.pt", "run", BEST)
    full = r"a\.pt could not be written .*File too large.*earlier files are intact"
    with files_no_larger_than(20_000), pytest.raises(CheckpointError, match=full):
        checkpoint.save(tmp_path / "a.pt", "run", {"weights": torch.zeros(100_000)})
    assert torch.equal(checkpoint.load(tmp_path / "a.pt")["model"], BEST["model"])
    assert not list(tmp_path.glob("*.part"))


def change_three_bytes(file):
    checkpoint.save(file, "run", BEST)
    content = bytearray(file.read_bytes())
    middle = content.find(bytes(4000))
    content[middle + 500 : middle + 503] = b"abc"
    file.write_bytes(content)


@pytest.mark.parametrize(
    ("name", "write", "reason"),
    [
        ("a.pt", lambda file: None, "does not exist"),
        ("a.pt", lambda file: torch.save({"format": checkpoint.FORMAT, "x": Malicious()}, file), "could run code"),
        ("a.pt", lambda file: torch.save({"format": checkpoint.FORMAT, "version": 99}, file), "of version 5, got 99"),
        ("a.pt", lambda file: torch.save({"state_dict": {}}, file), "must be a checkpoint of `sparsesam train`"),
        ("a.pt", change_three_bytes, r"damaged or truncated \(the checksum of .* does not match\)"),
        ("last.pt", lambda file: checkpoint.save(file, "run", BEST), r"last\.pt is another file of a run"),
        ("best.pt", lambda file: checkpoint.save(file, "run", {}), r"best\.pt is another file of a run"),
    ],
)
def test_file_that_is_not_an_intact_checkpoint_is_refused(tmp_path, capfd, name, write, reason):
    write(tmp_path / name)
    with pytest.raises(CheckpointError, match=reason):
        checkpoint.load(tmp_path / name)
    assert "never" not in capfd.readouterr().out


def other(num_classes=10):
    torch.manual_seed(5)
    return small_cnn(num_classes)


@pytest.mark.parametrize("form", ["state_dict", "nested", "wrapped", "safetensors"])
def test_weights_are_read_from_common_formats(tmp_path, form):
    weights = other().state_dict()
    file = tmp_path / ("a.safetensors" if form == "safetensors" else "a.pt")
    if form == "safetensors":
        save_file(weights, file)
    elif form == "nested":
        torch.save({"epoch": 3, "state_dict": weights}, file)
    else:
        torch.save({("module." if form == "wrapped" else "") + name: value for name, value in weights.items()}, file)
    model = small_cnn()
    initialize(model, file)
    assert same(dict(model.state_dict()), dict(weights))


def test_run_starts_with_weights_of_another(tmp_path):
    train(tmp_path / "first", ema=0.9)
    train(tmp_path / "second", init_from=str(tmp_path / "first" / "last.pt"), lr=0.0, weight_decay=0.0, momentum=0.0)
    average = {name: value for name, value in read_weights(tmp_path / "first" / "last.pt").items() if "weight" in name}
    second = state(tmp_path / "second")["training"]["model"]
    assert all(torch.equal(second[name], value) for name, value in average.items())
    assert same(read_weights(tmp_path / "second"), read_weights(tmp_path / "second" / "best.pt"))


def test_classifier_of_another_size_keeps_random_weights(tmp_path):
    torch.save(other(7).state_dict(), tmp_path / "a.pt")
    model = small_cnn(10)
    before = model[-1].weight.clone()
    initialize(model, tmp_path / "a.pt")
    assert torch.equal(model[-1].weight, before)
    assert torch.equal(model[0].weight, other(7)[0].weight)


@pytest.mark.parametrize(
    ("name", "write", "reason"),
    [
        ("a.pt", partial(torch.save, torch.nn.Linear(3, 4).state_dict()), r"does not fit .*the file has weight, bias"),
        ("a.pt", partial(torch.save, [1, 2]), "must contain a state_dict"),
        ("a.pt", lambda file: file.write_text("weights"), "rejected|cannot be read"),
        ("a.safetensors", lambda file: file.write_text("weights"), "not a safetensors file"),
        ("", lambda file: None, r"last\.pt does not exist"),
    ],
)
def test_file_without_weights_of_the_model_is_rejected(tmp_path, name, write, reason):
    write(tmp_path / name)
    with pytest.raises((CheckpointError, ValueError), match=reason):
        initialize(small_cnn(), tmp_path / name)
