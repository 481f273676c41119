"""With the datasets package, where installed, from a local directory."""

import sys

import numpy as np
import pytest

from sparsesam.lab.data import DataError, load_dataset


def test_missing_package_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ImportError, match="needs datasets: pip install datasets"):
        load_dataset("hf/somebody/pictures")


def written(folder, columns=("image", "label")):
    datasets = pytest.importorskip("datasets")
    from PIL import Image

    draws = np.random.default_rng(0)
    pictures = [Image.fromarray(draws.integers(0, 255, (10, 10, 3), dtype=np.uint8)) for _ in range(6)]
    features = datasets.Features(
        {columns[0]: datasets.Image(), columns[1]: datasets.ClassLabel(names=["cat", "dog", "eel"])}
    )
    split = datasets.Dataset.from_dict({columns[0]: pictures, columns[1]: [0, 1, 2, 0, 1, 2]}, features=features)
    datasets.DatasetDict({"train": split, "validation": split}).save_to_disk(folder)
    return pictures


def test_saved_data_set_is_read(tmp_path):
    pictures = written(tmp_path, ("img", "fine_label"))
    splits = load_dataset("hf/pictures", tmp_path)
    assert splits.classes == ("cat", "dog", "eel")
    assert splits.train.labels.tolist() == [0, 1, 2, 0, 1, 2]
    assert np.array_equal(splits.test.images[3].permute(1, 2, 0).numpy(), np.array(pictures[3]))
    assert load_dataset("hf/pictures", tmp_path, image_size=4).image_size == 4


def test_unreadable_data_set_raises(tmp_path):
    pytest.importorskip("datasets")
    with pytest.raises(DataError, match="hf/pictures: expected a data set that can be loaded"):
        load_dataset("hf/pictures", tmp_path)
