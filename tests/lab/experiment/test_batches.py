from dataclasses import replace

import pytest
import torch
from PIL import Image

from sparsesam.lab.data import DataError, load_dataset
from sparsesam.lab.experiment.batches import Batches
from tests.lab.experiment.runs import SHORT

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def splits():
    return load_dataset("digits")


def batches(splits, rank=0, world=1, **settings):
    return Batches(replace(SHORT, **settings), splits, CPU, rank=rank, world=world)


def test_ranks_together_see_batches_of_one_process(splits):
    whole = list(batches(splits).train(epoch=1))
    parts = [list(batches(splits, rank, 3).train(epoch=1)) for rank in range(3)]
    for step, expected in enumerate(whole):
        assert torch.equal(torch.cat([part[step].images for part in parts]), expected.images)
        assert torch.equal(torch.cat([part[step].labels for part in parts]), expected.labels)
        assert all(part[step].global_size == len(expected.labels) for part in parts)


def test_every_training_image_appears_once_per_epoch_in_another_order(splits):
    made = batches(splits, augment="none")
    seen, later = (torch.cat([batch.images for batch in made.train(epoch)]) for epoch in (0, 1))
    assert len(seen) == 72
    assert not torch.equal(seen, later)
    assert len(seen.unique(dim=0)) == len(made.augment.plain(made.sets["train"].tensors[0]).unique(dim=0))
    rest = torch.cat([batch.images for batch in made.train(1, first_step=3)])
    assert torch.equal(rest, later[3 * 16 :])  # an epoch can start at any step


def test_subsets_are_same_for_every_seed_and_validation_images_are_held_out(splits):
    first, second = (batches(splits, val_size=60, train_size=900, seed=seed).sets for seed in (0, 1))
    assert all(torch.equal(first[split].tensors[0], second[split].tensors[0]) for split in first)
    assert [len(first[split]) for split in ("train", "val", "test")] == [900, 60, 40]
    trained = {image.numpy().tobytes() for image in first["train"].tensors[0]}
    assert not [image for image in first["val"].tensors[0] if image.numpy().tobytes() in trained]


@pytest.mark.parametrize(("settings", "sizes"), [({}, [16, 16, 16, 16, 8]), ({"drop_last": True}, [16] * 4)])
def test_last_batch_is_smaller_or_left_out(splits, settings, sizes):
    made = batches(splits, batch_size=16, train_size=72, **settings)
    assert [len(batch.labels) for batch in made.train(0)] == sizes
    assert made.steps == len(sizes)


def test_fisher_images_are_augmented_on_request_and_always_alike(splits):
    plain, augmented = (batches(splits, augment="standard", fisher_augment=on).for_fisher() for on in (False, True))
    assert torch.equal(plain[3][0], batches(splits).unaugmented()[3][0])
    assert not torch.equal(plain[3][0], augmented[3][0])
    assert torch.equal(augmented[3][0], augmented[3][0])
    assert torch.equal(plain[3][1], augmented[3][1])


def write_folders(root, image, name):
    """Training and validation images of a class, the same image."""
    for part in ("train", "val"):
        (root / part / "cat").mkdir(parents=True)
        image.save(root / part / "cat" / name)


def test_images_of_folders_are_unaugmented_as_test_images_and_these_square_on_request(tmp_path):
    red = Image.linear_gradient("L").rotate(90).resize((120, 60))  # from left to right
    write_folders(tmp_path, red.convert("RGB"), "image.png")
    splits = load_dataset("folder", tmp_path, image_size=32)
    sides, square = (batches(splits, dataset="folder", test_resize=how) for how in ("shorter-side", "square"))
    assert torch.equal(sides.unaugmented("train")[0][0], sides.unaugmented("test")[0][0])
    assert not torch.equal(sides.unaugmented("train")[0][0], sides.augment.plain(sides.sets["train"][0][0][None])[0])
    seen = [made.sets["test"][0][0][0].float() for made in (sides, square)]
    assert seen[0].amax() - seen[0].amin() < seen[1].amax() - seen[1].amin()  # more of the wide image is seen


def test_label_noise_and_corruption_change_only_training_images(splits):
    clean, noisy = batches(splits), batches(splits, label_noise=0.25, corruption_rate=0.5)
    assert (clean.sets["train"].tensors[1] != noisy.sets["train"].tensors[1]).sum() == 18
    assert (clean.sets["train"].tensors[0] != noisy.sets["train"].tensors[0]).flatten(1).any(1).sum() <= 36
    tested = zip(clean.evaluation("test"), noisy.evaluation("test"), strict=True)
    assert all(torch.equal(a.images, b.images) for a, b in tested)


def test_test_images_are_split_over_ranks(splits):
    counts = [sum(len(b.labels) for b in batches(splits, rank, 3).evaluation("test")) for rank in range(3)]
    assert counts == [14, 13, 13]
    with pytest.raises(ValueError, match="batch_size must be at least one image per process, 32, got 16"):
        batches(splits, 0, 32)


@pytest.mark.parametrize("workers", [0, 1])
def test_damaged_image_is_named_in_one_line(tmp_path, workers):
    write_folders(tmp_path, Image.effect_noise((64, 64), 50), "1.jpeg")
    path = tmp_path / "train" / "cat" / "1.jpeg"
    path.write_bytes(path.read_bytes()[:500])
    made = Batches(SHORT, load_dataset("folder", tmp_path), CPU, workers=workers)
    with pytest.raises(DataError) as caught:
        list(made.train(0))
    assert str(caught.value).startswith(f"{path}: expected a complete image")
    assert "\n" not in str(caught.value)
