import gzip
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest
import torch

from sparsesam.lab.data import DataError, load_dataset
from sparsesam.lab.data.published import CIFAR10, CIFAR100, FASHION_MNIST, load_published, read_idx
from tests.lab.data.files import RECORDS, fashion_files, idx, labels, pixels, remote, small, tar, write_cifar

ARRAY = np.arange(24, dtype=np.uint8).reshape(2, 3, 4)
BOTH = pytest.mark.parametrize("cifar", [small(CIFAR10), small(CIFAR100)], ids=lambda cifar: cifar.name)


@BOTH
@pytest.mark.parametrize("inside", [False, True], ids=["parent", "the folder itself"])
def test_published_cifar_files_are_read(tmp_path, cifar, inside):
    folder = write_cifar(tmp_path, cifar)
    splits = load_published(cifar, folder if inside else tmp_path, download=False)
    files = len(cifar.train)
    expected = np.concatenate([pixels(RECORDS, seed) for seed in range(files)]).reshape(-1, 3, 32, 32)
    assert torch.equal(splits.train.images, torch.from_numpy(expected))
    assert torch.equal(splits.test.images.flatten(1), torch.from_numpy(pixels(RECORDS, files)))
    assert splits.train.labels.tolist() == labels(RECORDS).tolist() * files


@pytest.fixture
def archived(tmp_path):
    """An archive in ``tmp_path``, and the data set that expects its checksum."""
    cifar = small(CIFAR10)
    archive = tar(write_cifar(tmp_path / "source", cifar), tmp_path / cifar.remotes[0].name)
    return replace(cifar, remotes=(remote(cifar.remotes[0].url, archive.read_bytes()),)), archive


def test_users_archive_is_unpacked_into_cache(tmp_path, archived):
    cifar, archive = archived
    splits = load_published(cifar, tmp_path, download=False)
    assert len(splits.train.labels) == 5 * RECORDS
    archive.unlink()
    assert torch.equal(load_published(cifar, tmp_path, download=False).train.images, splits.train.images)


def test_other_archive_of_same_name_is_rejected(tmp_path, archived):
    cifar, archive = archived
    archive.write_bytes(b"another")
    with pytest.raises(DataError, match=r"cifar-10-binary\.tar\.gz is missing or has another checksum"):
        load_published(cifar, tmp_path)


def test_downloads_unpacks_and_keeps_only_files(archived, server, cache):
    cifar, archive = archived
    server.files["cifar.tar.gz"] = archive.read_bytes()
    cifar = replace(cifar, remotes=(remote(server.url("cifar.tar.gz"), archive.read_bytes()),))
    server.interruptions = 1
    first = load_published(cifar)
    assert not list(cache.rglob("*.tar.gz"))
    assert torch.equal(load_published(cifar, download=False).train.images, first.train.images)


def test_offline_error_names_file_and_directory(cache, tmp_path):
    with pytest.raises(DataError) as caught:
        load_dataset("cifar10", download=False)
    message = str(caught.value)
    assert f"Put into {cache / 'cifar10'}, or into a directory you name as data_dir:" in message
    assert "cifar-10-binary.tar.gz  MD5 c32a1d4ab5d03f1284b67883e8d87530  from https://www.cs.toronto.edu" in message
    with pytest.raises(DataError, match=rf"(?s)Put into {tmp_path}, .* t10k-labels-idx1-ubyte.gz  MD5 bb300cfd"):
        load_dataset("fashion-mnist", tmp_path, download=False)


@BOTH
def test_missing_and_truncated_files_are_named(tmp_path, cifar):
    path = write_cifar(tmp_path, cifar) / cifar.test[0]
    content = path.read_bytes()
    path.write_bytes(content[len(content) // RECORDS :])  # without a record
    with pytest.raises(DataError, match=rf"{path.name}: expected 20 records of .* bytes, found 58,"):
        load_published(cifar, tmp_path)
    path.unlink()
    with pytest.raises(DataError, match=f"found no {path.name}"):
        load_published(cifar, tmp_path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (idx(ARRAY)[:-5], "found 35 bytes"),
        (idx(ARRAY) + b"more", "found 44 bytes"),
        (idx(ARRAY[0]), "the first four are 0x00000802"),
        (b"", "requires a buffer"),
        (gzip.compress(idx(ARRAY))[:-9], "end-of-stream"),
        (b"no gzip at all", "Not a gzipped file"),
    ],
    ids=["truncated", "too long", "other dimensions", "empty", "truncated gzip", "no gzip"],
)
def test_damaged_idx_file_is_named(tmp_path, content, message):
    (tmp_path / ("file.gz" if "gzip" in message or "stream" in message else "file")).write_bytes(content)
    with pytest.raises(DataError, match=f"file.*: expected an idx file of bytes in 3 dimensions, .*{message}"):
        read_idx(tmp_path / "file", 3)


def test_classes_are_as_published():
    assert len(set(CIFAR10.classes)) == 10
    assert len(set(CIFAR100.classes)) == 100
    assert list(CIFAR100.classes) == sorted(CIFAR100.classes)


@pytest.mark.parametrize("compressed", [False, True])
@pytest.mark.parametrize("folder", ["", "FashionMNIST/raw"])
def test_fashion_mnist_is_read_compressed_or_not(tmp_path, folder, compressed):
    (tmp_path / folder).mkdir(parents=True, exist_ok=True)
    for name, content in fashion_files(compressed=compressed).items():
        (tmp_path / folder / name).write_bytes(content)
    splits = load_dataset("fashion-mnist", tmp_path, download=False)
    assert splits.train.images.shape == (20, 1, 28, 28)
    assert splits.test.labels.tolist() == list(range(10))
    content = fashion_files(compressed=False)["train-images-idx3-ubyte"]
    assert splits.train.images.flatten().tolist() == list(content[16:])


@pytest.fixture
def published(server):
    server.files = fashion_files(compressed=True)
    return replace(FASHION_MNIST, remotes=tuple(remote(server.url(name), server.files[name]) for name in server.files))


def test_missing_files_are_downloaded(published, server, cache):
    first = load_published(published)
    assert {path.name for path in (cache / "fashion-mnist").glob("*.gz")} == set(server.files)
    assert torch.equal(load_published(published, download=False).train.images, first.train.images)
    (cache / "fashion-mnist" / "t10k-labels-idx1-ubyte.gz").unlink()
    load_published(published)
    assert server.requests[4:] == ["t10k-labels-idx1-ubyte.gz"]


def test_concurrent_readers_download_once(published, server):
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(lambda _: load_published(published), range(2))
    assert torch.equal(first.train.images, second.train.images)
    assert len(server.requests) == 4
