import os
import resource
from contextlib import contextmanager

import pytest
import torch

from sparsesam.lab.experiment import checkpoint
from sparsesam.lab.experiment.errors import CheckpointError


class Hostile:
    def __reduce__(self):
        return os.system, ("echo this must never run",)


def test_content_comes_back(tmp_path):
    checkpoint.save(tmp_path / "a.pt", {"weights": torch.arange(3)})
    assert torch.equal(checkpoint.load(tmp_path / "a.pt")["weights"], torch.arange(3))


@contextmanager
def files_no_larger_than(size):
    """A disk that is full after so many bytes of a file."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_disk_that_is_full_halfway_leaves_the_checkpoint_before(tmp_path):
    checkpoint.save(tmp_path / "a.pt", {"weights": torch.arange(3)})
    full = pytest.raises(
        CheckpointError, match=r"a\.pt could not be written .*File too large.*previous checkpoint is intact"
    )
    with files_no_larger_than(20_000), full:
        checkpoint.save(tmp_path / "a.pt", {"weights": torch.zeros(100_000)})
    assert torch.equal(checkpoint.load(tmp_path / "a.pt")["weights"], torch.arange(3))
    assert not list(tmp_path.glob("*.part"))


def test_a_hostile_pickle_is_refused_and_not_run(tmp_path, capfd):
    torch.save({"format": checkpoint.FORMAT, "x": Hostile()}, tmp_path / "a.pt")
    with pytest.raises(CheckpointError, match="loading it could run code"):
        checkpoint.load(tmp_path / "a.pt")
    assert "never" not in capfd.readouterr().out


def test_another_version_is_refused(tmp_path):
    torch.save({"format": checkpoint.FORMAT, "version": 99}, tmp_path / "a.pt")
    with pytest.raises(CheckpointError, match="must be of version 2, got 99"):
        checkpoint.load(tmp_path / "a.pt")


def test_another_file_is_refused(tmp_path):
    torch.save({"state_dict": {}}, tmp_path / "a.pt")
    with pytest.raises(CheckpointError, match="must be a checkpoint of `sparsesam train`"):
        checkpoint.load(tmp_path / "a.pt")


def test_a_cut_off_file_is_refused(tmp_path):
    checkpoint.save(tmp_path / "a.pt", {"weights": torch.zeros(1000)})
    whole = (tmp_path / "a.pt").read_bytes()
    (tmp_path / "a.pt").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(CheckpointError, match=r"damaged or truncated .*--init-from"):
        checkpoint.load(tmp_path / "a.pt")


def test_a_missing_file_is_told(tmp_path):
    with pytest.raises(CheckpointError, match="does not exist"):
        checkpoint.load(tmp_path / "a.pt")


def test_three_changed_bytes_are_noticed(tmp_path):
    checkpoint.save(tmp_path / "a.pt", {"weights": torch.zeros(1000)})
    content = bytearray((tmp_path / "a.pt").read_bytes())
    middle = content.find(bytes(4000))
    assert middle > 0
    content[middle + 500 : middle + 503] = b"abc"
    (tmp_path / "a.pt").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"damaged or truncated \(the checksum of .* does not match\)"):
        checkpoint.load(tmp_path / "a.pt")


def test_a_damaged_best_checkpoint_names_the_last_one(tmp_path):
    checkpoint.save(tmp_path / "best.pt", {"model": {}})
    whole = (tmp_path / "best.pt").read_bytes()
    (tmp_path / "best.pt").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(CheckpointError, match=r"damaged or truncated .* use last\.pt"):
        checkpoint.load(tmp_path / "best.pt")
