import gzip
import os
import pickle
import resource
from pathlib import Path

import numpy as np
import pytest
import torch

from sparsesam.lab.data import DataError
from sparsesam.lab.data.formats import read_idx, read_pickle
from tests.lab.data.files import idx

ARRAY = np.arange(24, dtype=np.uint8).reshape(2, 3, 4)


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_idx_round_trip(tmp_path, suffix):
    content = gzip.compress(idx(ARRAY)) if suffix else idx(ARRAY)
    (tmp_path / f"file{suffix}").write_bytes(content)
    assert torch.equal(read_idx(tmp_path / "file", 3), torch.from_numpy(ARRAY))


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
def test_invalid_idx_file_raises(tmp_path, content, message):
    path = tmp_path / "file"
    path.write_bytes(content)
    with pytest.raises(DataError, match=f"file: expected .*{message}"):
        read_idx(path, 3)


@pytest.mark.parametrize("damage", [lambda content: content[:-9], lambda content: b"no gzip at all"])
def test_damaged_gzip_names_file(tmp_path, damage):
    path = tmp_path / "file.gz"
    path.write_bytes(damage(gzip.compress(idx(ARRAY))))
    with pytest.raises(DataError, match=r"file\.gz: expected a complete gzip file, found a damaged one"):
        read_idx(path, 3)


class Malicious:
    def __reduce__(self):
        return os.mkdir, ("made-by-a-pickle",)


def write(path, content):
    path.write_bytes(pickle.dumps(content, protocol=4))
    return path


def test_python_2_pickle_is_read(tmp_path):
    # {'data': array([[247]], dtype=uint8), 'labels': [3]} by Python 2 and a numpy of its time.
    (tmp_path / "batch").write_bytes(
        b"\x80\x02}q\x01(U\x04dataq\x02cnumpy.core.multiarray\n_reconstruct\nq\x03cnumpy\nndarray\nq\x04K\x00\x85U\x01b"
        b"\x87Rq\x05(K\x01K\x01K\x01\x86cnumpy\ndtype\nq\x06U\x02u1K\x00K\x01\x87Rq\x07(K\x03U\x01|NNNJ\xff\xff\xff\xff"
        b"J\xff\xff\xff\xffK\x00tb\x89U\x01\xf7tbU\x06labels]K\x03au."
    )
    content = read_pickle(tmp_path / "batch")
    assert content["data"].tolist() == [[247]]
    assert content["labels"] == [3]


@pytest.mark.parametrize("content", [{"data": Malicious()}, {"data": [print]}, {"data": np.array([Malicious()])}])
def test_pickle_cannot_run_code(tmp_path, monkeypatch, content):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError, match=r"batch: expected a pickle of arrays.* it asks for .*not allowed"):
        read_pickle(write(tmp_path / "batch", content))
    assert not (tmp_path / "made-by-a-pickle").exists()


@pytest.mark.parametrize("damage", [lambda content: content[:30], lambda content: b"", lambda content: b"\xff" * 9])
def test_damaged_pickle_names_file(tmp_path, damage):
    (tmp_path / "batch").write_bytes(damage(pickle.dumps({"data": np.zeros(9)}, protocol=4)))
    with pytest.raises(DataError, match="batch: expected a pickle"):
        read_pickle(tmp_path / "batch")


def test_pickle_of_another_type_raises(tmp_path):
    with pytest.raises(DataError, match="expected a pickled dictionary, found list"):
        read_pickle(write(tmp_path / "batch", [1]))


def test_pickle_does_not_reserve_memory_that_it_asks_for(tmp_path):
    (tmp_path / "data").write_bytes(b"\x80\x02}r\xff\xff\xff\x7f.")  # an empty dictionary as number 2³¹ - 1 of the memo
    before = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + 2**30, before[1]))
    try:
        assert read_pickle(tmp_path / "data") == {}
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
