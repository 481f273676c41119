import pytest
import torch

from sparsesam.lab.data import Labelled, Splits, load_dataset


def tiny(data_dir):
    """A user-defined data set, referred to by name below."""
    part = Labelled(torch.zeros(2, 1, 4, 4, dtype=torch.uint8), torch.tensor([0, 1]))
    return Splits(part, part, name=str(data_dir), classes=("a", "b"), mean=(0.0,), std=(1.0,))


def not_a_data_set(data_dir):
    return [1]


def test_digits_sizes_constants_and_stratification():
    before = torch.random.get_rng_state()
    splits = load_dataset("digits")
    assert torch.equal(before, torch.random.get_rng_state())
    assert splits.train.images.shape == (1000, 1, 8, 8)
    assert splits.test.images.shape == (797, 1, 8, 8)
    pixels = splits.train.images / 255
    assert (pixels.min(), pixels.max()) == (0, 1)
    assert pixels.mean().item() == pytest.approx(splits.mean[0], abs=1e-3)
    assert pixels.std().item() == pytest.approx(splits.std[0], abs=1e-3)
    shares = [part.labels.bincount() / len(part.labels) for part in (splits.train, splits.test)]
    assert torch.allclose(*shares, atol=2e-3)


def test_importable_function_is_accepted(tmp_path):
    assert load_dataset("tests.lab.data.test_registry:tiny", tmp_path).name == str(tmp_path)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (":", "dataset must be an importable module:function, got ':'"),
        (f"{__name__}:not_a_data_set", r"must return sparsesam\.lab\.data\.Splits or FolderSplits, got list"),
    ],
)
def test_name_that_is_no_data_set_is_rejected(name, message):
    with pytest.raises(ValueError, match=message):
        load_dataset(name)
