import io
import tarfile

import pytest

from sparsesam.lab.data import DataError
from sparsesam.lab.data.download import unpack


def write_tar(path, members):
    with tarfile.open(path, "w:gz") as tar:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return path


def test_takes_the_named_members_only(tmp_path):
    archive = write_tar(tmp_path / "a.tar.gz", {"top/one": b"1", "two": b"2", "top/other": b"3"})
    unpack(archive, ["one", "two"], tmp_path / "into" / "here")
    assert {path.name: path.read_bytes() for path in (tmp_path / "into" / "here").iterdir()} == {
        "one": b"1",
        "two": b"2",
    }


def test_members_cannot_leave_the_folder(tmp_path):
    unpack(write_tar(tmp_path / "a.tar.gz", {"../../one": b"1"}), ["one"], tmp_path / "deep" / "here")
    assert (tmp_path / "deep" / "here" / "one").exists()
    assert not (tmp_path / "one").exists()


@pytest.mark.parametrize("damage", [lambda content: content[:-20], lambda content: b"no archive"])
def test_a_damaged_archive_leaves_no_folder(tmp_path, damage):
    archive = write_tar(tmp_path / "a.tar.gz", {"one": bytes(9999)})
    archive.write_bytes(damage(archive.read_bytes()))
    with pytest.raises(DataError, match=r"a\.tar\.gz: expected a complete tar archive, found a damaged one"):
        unpack(archive, ["one"], tmp_path / "here")
    assert [path.name for path in tmp_path.iterdir()] == ["a.tar.gz"]


def test_a_missing_member_is_named(tmp_path):
    with pytest.raises(DataError, match="expected one, two in it, found no two"):
        unpack(write_tar(tmp_path / "a.tar.gz", {"one": b"1"}), ["one", "two"], tmp_path / "here")
