import gzip

import numpy as np
import pytest
import torch

from sparsesam.lab.data import DataError
from sparsesam.lab.data.formats import read_idx
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
