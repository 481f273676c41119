import os
import pickle

import numpy as np
import pytest

from sparsesam.lab.data import DataError
from sparsesam.lab.data.formats import read_pickle


class Hostile:
    def __reduce__(self):
        return os.mkdir, ("made-by-a-pickle",)


def write(path, content, protocol=4):
    path.write_bytes(pickle.dumps(content, protocol=protocol))
    return path


@pytest.mark.parametrize("protocol", [2, 3, 4])
def test_reads_arrays_lists_and_bytes(tmp_path, protocol):
    array = np.arange(6, dtype=np.uint8).reshape(2, 3)
    content = read_pickle(write(tmp_path / "batch", {b"data": array, "labels": [1, 2], b"raw": b"\x80"}, protocol))
    assert np.array_equal(content["data"], array)
    assert content["labels"] == [1, 2]
    assert content["raw"] == b"\x80"


def test_reads_what_python_2_wrote(tmp_path):
    # {'data': array([[7]], dtype=uint8), 'labels': [3]} by Python 2 and a numpy of its time.
    (tmp_path / "batch").write_bytes(
        b"\x80\x02}q\x01(U\x04dataq\x02cnumpy.core.multiarray\n_reconstruct\nq\x03cnumpy\nndarray\nq\x04K\x00\x85U\x01b"
        b"\x87Rq\x05(K\x01K\x01K\x01\x86cnumpy\ndtype\nq\x06U\x02u1K\x00K\x01\x87Rq\x07(K\x03U\x01|NNNJ\xff\xff\xff\xff"
        b"J\xff\xff\xff\xffK\x00tb\x89U\x01\x07tbU\x06labels]K\x03au."
    )
    content = read_pickle(tmp_path / "batch")
    assert content["data"].tolist() == [[7]]
    assert content["labels"] == [3]


@pytest.mark.parametrize("content", [{"data": Hostile()}, {"data": [print]}, {"data": np.array([Hostile()])}])
def test_runs_nothing_else(tmp_path, monkeypatch, content):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError, match=r"batch: expected a pickle of nothing but arrays.* it asks for .*not allowed"):
        read_pickle(write(tmp_path / "batch", content))
    assert not (tmp_path / "made-by-a-pickle").exists()


def test_other_codecs_are_refused(tmp_path):
    (tmp_path / "batch").write_bytes(b"c_codecs\nencode\n(X\x01\x00\x00\x00aX\x03\x00\x00\x00zipt" + b"R.")
    with pytest.raises(DataError, match="the codec 'zip' is not allowed"):
        read_pickle(tmp_path / "batch")


@pytest.mark.parametrize("damage", [lambda content: content[:30], lambda content: b"", lambda content: b"\xff" * 9])
def test_a_damaged_file_is_named(tmp_path, damage):
    (tmp_path / "batch").write_bytes(damage(pickle.dumps({"data": np.zeros(9)}, protocol=4)))
    with pytest.raises(DataError, match="batch: expected a pickle"):
        read_pickle(tmp_path / "batch")


def test_anything_but_a_dictionary_is_refused(tmp_path):
    with pytest.raises(DataError, match="expected a pickled dictionary, found list"):
        read_pickle(write(tmp_path / "batch", [1]))
