import gzip
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest
import torch

from sparsesam.lab.data import DataError, MissingData, load_dataset
from sparsesam.lab.data.formats import read_idx
from sparsesam.lab.data.published import FASHION_MNIST, load_published
from tests.lab.data.files import fashion_files, idx, labels, remote, write_fashion

ARRAY = np.arange(24, dtype=np.uint8).reshape(2, 3, 4)


@pytest.mark.parametrize("compressed", [False, True])
@pytest.mark.parametrize("folder", ["", "FashionMNIST/raw"])
def test_reads_local_files(tmp_path, folder, compressed):
    write_fashion(tmp_path / folder, compressed=compressed)
    splits = load_dataset("fashion-mnist", tmp_path, download=False)
    assert splits.train.images.shape == (20, 1, 28, 28)
    assert splits.test.labels.tolist() == list(range(10))
    content = fashion_files()["train-images-idx3-ubyte"]
    assert splits.train.images.flatten().tolist() == list(content[16:])


@pytest.fixture
def published(server):
    server.files = {f"{name}.gz": gzip.compress(content, mtime=0) for name, content in fashion_files().items()}
    remotes = tuple(remote(server.url(name), content) for name, content in server.files.items())
    return replace(FASHION_MNIST, layouts=(replace(FASHION_MNIST.layouts[0], remotes=remotes),))


def test_downloads_what_is_not_there(published, server, cache):
    first = load_published(published)
    assert {path.name for path in (cache / "fashion-mnist").glob("*.gz")} == set(server.files)
    assert torch.equal(load_published(published, download=False).train.images, first.train.images)
    (cache / "fashion-mnist" / "t10k-labels-idx1-ubyte.gz").unlink()
    load_published(published)
    assert server.requests[4:] == ["t10k-labels-idx1-ubyte.gz"]


def test_two_at_once_download_once(published, server):
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(lambda _: load_published(published), range(2))
    assert torch.equal(first.train.images, second.train.images)
    assert len(server.requests) == 4


def test_without_a_net_says_which_files_to_put_where(tmp_path):
    with pytest.raises(MissingData) as caught:
        load_dataset("fashion-mnist", tmp_path, download=False)
    message = str(caught.value)
    assert f"Put into {tmp_path}:" in message
    assert "t10k-labels-idx1-ubyte.gz  MD5 bb300cfdad3c16e7a12a480ee83cd310  from https://" in message


def test_a_missing_file_is_named(tmp_path):
    write_fashion(tmp_path)
    (tmp_path / "t10k-images-idx3-ubyte").unlink()
    with pytest.raises(DataError, match="found no t10k-images-idx3-ubyte"):
        load_dataset("fashion-mnist", tmp_path)


def test_images_and_labels_must_be_as_many(tmp_path):
    write_fashion(tmp_path)
    (tmp_path / "train-labels-idx1-ubyte").write_bytes(idx(labels(19)))
    with pytest.raises(DataError, match=r"train labels must be int64 of shape \(20,\), one per image, got .*\(19,\)"):
        load_dataset("fashion-mnist", tmp_path)


def test_a_class_without_images_is_named(tmp_path):
    write_fashion(tmp_path)
    (tmp_path / "train-labels-idx1-ubyte").write_bytes(idx(labels(20) % 9))
    with pytest.raises(DataError, match="1 of 10 have none: 'ankle boot'"):
        load_dataset("fashion-mnist", tmp_path)


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_an_idx_file_is_read_as_it_was_written(tmp_path, suffix):
    path = tmp_path / f"file{suffix}"
    path.write_bytes(gzip.compress(idx(ARRAY)) if suffix else idx(ARRAY))
    assert torch.equal(read_idx(path, 3), torch.from_numpy(ARRAY))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (idx(ARRAY)[:-5], "40 bytes for 2 x 3 x 4 entries, found 35"),
        (idx(ARRAY) + b"more", "40 bytes for 2 x 3 x 4 entries, found 44"),
        (idx(ARRAY[0]), r"in 3 dimensions \(magic number 2051\), found magic number 2050"),
        (b"", "found magic number 0 in 0 bytes"),
        (b"<html>not found</html>", "found magic number 1013478509"),
    ],
)
def test_what_is_wrong_with_an_idx_file_is_said(tmp_path, content, message):
    path = tmp_path / "file"
    path.write_bytes(content)
    with pytest.raises(DataError, match=f"file: expected .*{message}"):
        read_idx(path, 3)


@pytest.mark.parametrize("damage", [lambda content: content[:-9], lambda content: b"no gzip at all"])
def test_a_damaged_gzip_file_is_named(tmp_path, damage):
    path = tmp_path / "file.gz"
    path.write_bytes(damage(gzip.compress(idx(ARRAY))))
    with pytest.raises(DataError, match=r"file\.gz: expected a complete gzip file, found a damaged one"):
        read_idx(path, 3)
