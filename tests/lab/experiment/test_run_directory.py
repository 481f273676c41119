import pytest
import torch

from sparsesam.checkpoint import split_own
from sparsesam.lab.experiment import append_records, checkpoint, read_masks, read_records
from sparsesam.lab.experiment.config import RunEnvironment, TrainConfig
from sparsesam.lab.experiment.errors import Interrupted
from sparsesam.lab.experiment.run import masks_are_small
from sparsesam.lab.experiment.run_directory import RunDirectory
from tests.lab.experiment.runs import SHORT, InterruptAt, same, train

SPARSE = {"optimizer": "ssam-f", "mask_steps": 3, "model": "tests.lab.inspection.networks:linear"}


def test_records_keep_order_and_must_be_json(tmp_path):
    path = tmp_path / "deep" / "records.jsonl"
    append_records(path, [{"a": 1}, {"a": None}])
    append_records(path, [{"b": [0.5]}])
    with pytest.raises(ValueError, match="not JSON compliant"):
        append_records(path, [{"a": 2}, {"a": float("nan")}])
    assert read_records(path) == [{"a": 1}, {"a": None}, {"b": [0.5]}]


def test_masks_round_trip(tmp_path):
    masks = {
        "a.weight": torch.rand(5, 3, generator=torch.Generator().manual_seed(0)) > 0.5,
        "b": torch.zeros(9, dtype=torch.bool),
        "c": torch.tensor(True),
    }
    directory = RunDirectory(tmp_path)
    directory.begin(SHORT, RunEnvironment())
    directory.write_masks(12, masks, SHORT.identity)
    directory.write_masks(7, {"a": ~masks["a.weight"]}, SHORT.identity)
    assert same(list(read_masks(tmp_path)), [(7, {"a": ~masks["a.weight"]}), (12, masks)])


def test_run_writes_mask_of_every_refresh(tmp_path):
    train(tmp_path / "sam", optimizer="sam", model=SPARSE["model"])
    assert not (tmp_path / "sam" / "masks").exists()
    train(tmp_path, **SPARSE)
    snapshots = list(read_masks(tmp_path))
    assert [step for step, _ in snapshots] == [0, 3, 6, 9, 12]
    _, own, tensors = split_own(checkpoint.load(tmp_path / "last.pt")["training"]["optimizer"])
    assert own["mask"]["last_step"] == 12
    assert same(snapshots[-1][1], tensors["mask"])


@pytest.mark.parametrize("step", [2, 9])
def test_resumed_run_has_masks_of_uninterrupted(tmp_path, step):
    train(tmp_path / "whole", **SPARSE)
    with pytest.raises(Interrupted):
        train(tmp_path / "parts", InterruptAt(step), **SPARSE)
    stale = {"1.weight": torch.ones(10, 64, dtype=torch.bool), "1.bias": torch.ones(10, dtype=torch.bool)}
    position = checkpoint.load(tmp_path / "parts" / "last.pt")["training"]["position"]
    # As a killed run leaves a mask that it made after its checkpoint.
    RunDirectory(tmp_path / "parts").write_masks(5 * position["epoch"] + position["step"], stale, "")
    train(tmp_path / "parts", resume=True, **SPARSE)
    assert same(list(read_masks(tmp_path / "parts")), list(read_masks(tmp_path / "whole")))


def test_masks_are_recorded_by_default_only_if_small():
    config = TrainConfig(epochs=200)
    assert masks_are_small(config, 28_000, 400)
    assert not masks_are_small(config, 11_000_000, 400)
    assert masks_are_small(TrainConfig(epochs=200, mask_epochs=None), 11_000_000, 400)
