import io
import tarfile

import pytest

from sparsesam.lab.data.download import unpack


def write_tar(path, members):
    with tarfile.open(path, "w:gz") as tar:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return path


def test_the_folder_is_replaced_and_nothing_else_is_written(tmp_path):
    archive = write_tar(tmp_path / "a.tar.gz", {"here/one": b"1", "here/two": b"2", "elsewhere": b"3"})
    folder = tmp_path / "into" / "here"
    folder.mkdir(parents=True)
    (folder / "old").write_bytes(b"0")
    unpack(archive, folder)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == {"one": b"1", "two": b"2"}
    assert list(folder.parent.iterdir()) == [folder]


def test_members_cannot_leave_the_folder(tmp_path):
    with pytest.raises(tarfile.FilterError):
        unpack(write_tar(tmp_path / "a.tar.gz", {"../../one": b"1"}), tmp_path / "deep" / "here")
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["a.tar.gz", "deep"]
