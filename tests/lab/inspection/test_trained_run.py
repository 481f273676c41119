import pytest
import torch
from torch.nn.functional import cross_entropy

from sparsesam.lab.experiment import checkpoint, read_masks, read_records
from sparsesam.lab.experiment.errors import CheckpointError, Interrupted
from sparsesam.lab.inspection import load_run
from tests.lab.experiment.runs import InterruptAt, same, train
from tests.lab.inspection import networks

MODEL = "tests.lab.inspection.networks:normalized"


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """A run without masks."""
    path = tmp_path_factory.mktemp("plain")
    train(path, model=MODEL)
    return path


def epochs_of(out):
    return [record for record in read_records(out / "records.jsonl") if record["kind"] == "epoch"]


@pytest.mark.parametrize("settings", [{"label_smoothing": 0.1}, {"ema": 0.9}], ids=["smoothed", "moving average"])
def test_objective_is_test_loss_of_run(tmp_path, settings):
    train(tmp_path, model=MODEL, **settings)
    objective = load_run(tmp_path, split="test", samples=None).objective
    with objective.measuring():
        assert objective.loss() == pytest.approx(epochs_of(tmp_path)[-1]["test_loss"], rel=1e-5)


def test_best_weights_have_best_accuracy_and_mask_of_their_epoch(tmp_path):
    train(tmp_path, model=MODEL, optimizer="ssam-f", mask_steps=2, lr=0.5, epochs=4)
    accuracies = [record["test_accuracy"] for record in epochs_of(tmp_path)]
    run = load_run(tmp_path, split="test", samples=None, checkpoint="best", batch_size=40)
    [(images, labels)] = run.objective.batches
    with run.objective.measuring():
        right = (run.model(images).argmax(1) == labels).float().mean()
    assert float(right) == pytest.approx(max(accuracies))
    steps = epochs_of(tmp_path)[accuracies.index(max(accuracies))]["step"]
    assert run.step == steps
    assert run.mask_step == max(step for step in range(0, 20, 2) if step < steps)
    assert same(run.masks, dict(read_masks(tmp_path))[run.mask_step])


def test_training_images_have_noise_of_run_and_no_augmentation(tmp_path):
    train(tmp_path / "noisy", model=MODEL, label_noise=0.5, label_smoothing=0.1, seed=3)
    run = load_run(tmp_path / "noisy", samples=None, batch_size=1000)
    [(images, labels)] = run.objective.batches
    assert torch.equal(labels, run.batches.sets["train"].tensors[1])
    train(tmp_path / "clean", model=MODEL, seed=3, max_steps=1)
    assert not torch.equal(labels, load_run(tmp_path / "clean").batches.sets["train"].tensors[1])
    expected = cross_entropy(run.model.eval()(images), labels, label_smoothing=0.1)
    with run.objective.measuring():
        assert run.objective.loss() == pytest.approx(expected.item(), rel=1e-5)


def test_sample_is_fixed_by_seed(plain):
    first, again, other = (load_run(plain, samples=10, seed=seed).objective.batches for seed in (0, 0, 1))
    assert first[0][0].shape[0] == 10
    assert same(first, again)
    assert not same(first, other)


def test_mask_is_that_of_checkpoint_and_none_for_plain_runs(tmp_path, plain):
    train(tmp_path, model=MODEL, optimizer="ssam-d", sparsity=0.75, mask_steps=2)
    run = load_run(tmp_path)
    assert same(run.masks, list(read_masks(tmp_path))[-1][1])
    assert run.mask_step == 14
    assert load_run(plain).masks is None
    for file in (tmp_path / "masks").iterdir():
        file.unlink()
    notes = [load_run(path, checkpoint="best").origin()["notes"] for path in (tmp_path, plain)]
    assert notes == [["the mask in use at best.pt was not recorded; train with --record-masks true"], []]


def test_unfinished_run_is_accepted(tmp_path):
    with pytest.raises(Interrupted):
        train(tmp_path, InterruptAt(7), model=MODEL)
    run = load_run(tmp_path)
    assert run.step == 8  # the signal is seen one step later
    assert same(dict(run.model.state_dict()), checkpoint.load(tmp_path / "last.pt")["training"]["model"])


def test_loading_does_not_change_global_generator(plain):
    before = torch.random.get_rng_state()
    load_run(plain).objective  # noqa: B018
    assert torch.equal(before, torch.random.get_rng_state())


def test_directory_without_run_or_checkpoint_raises(tmp_path):
    with pytest.raises(ValueError, match=r"has no run: there is no config\.yaml"):
        load_run(tmp_path)
    train(tmp_path, model=MODEL)
    (tmp_path / "last.pt").unlink()
    with pytest.raises(CheckpointError, match=r"last\.pt does not exist.*--resume --out"):
        load_run(tmp_path).model  # noqa: B018


def test_mismatched_checkpoint_names_file_and_parameter(plain, monkeypatch):
    monkeypatch.setattr(networks, "normalized", networks.linear)  # the model's code changed
    with pytest.raises(CheckpointError, match=r"last\.pt does not fit the model in config\.yaml.*1\.weight"):
        load_run(plain).model  # noqa: B018


def test_missing_device_raises(plain):
    with pytest.raises(ValueError, match=r"accelerator .* is not available on this machine"):
        load_run(plain, accelerator="abacus").model  # noqa: B018
