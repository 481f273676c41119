import pytest
import torch

from sparsesam.lab.data import DataError, Labelled, Splits


def splits(**changes):
    images, labels = torch.zeros(4, 1, 8, 8, dtype=torch.uint8), torch.tensor([0, 1, 0, 1])
    content = {"train": Labelled(images, labels), "test": Labelled(images, labels), "name": "mine"}
    return Splits(**{**content, "classes": ("a", "b"), "mean": (0.5,), "std": (0.5,), **changes})


def test_plain_pair_is_accepted():
    made = splits(test=(torch.zeros(1, 1, 8, 8, dtype=torch.uint8), torch.tensor([1])))
    assert (made.num_classes, made.in_channels, made.image_size, made.test.labels.tolist()) == (2, 1, 8, [1])


@pytest.mark.parametrize(
    ("train", "message"),
    [
        ((torch.zeros(4, 1, 8, 8), torch.tensor([0, 1, 0, 1])), "images must be uint8 of shape .* got torch.float32"),
        ((torch.zeros(4, 3, 8, 8, dtype=torch.uint8), torch.tensor([0, 1, 0, 1])), r"\(n, 1, .* got .*\(4, 3, 8, 8\)"),
        ((torch.zeros(4, 1, 8, 8, dtype=torch.uint8), torch.tensor([0, 1])), r"labels must be .*\(4,\), got .*\(2,\)"),
        ((torch.zeros(1, 1, 8, 8, dtype=torch.uint8), torch.tensor([2])), r"labels must be in 0\.\.1, got 2 to 2"),
        ((torch.zeros(1, 1, 8, 8, dtype=torch.uint8), torch.tensor([0])), "1 of 2 have none, such as 'b'"),
        ((torch.zeros(0, 1, 8, 8, dtype=torch.uint8), torch.zeros(0, dtype=torch.long)), "at least one, got none"),
    ],
)
def test_invalid_content_raises(train, message):
    with pytest.raises(DataError, match=f"mine: .*{message}"):
        splits(train=train)
