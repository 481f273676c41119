import gzip
import io
import re
import tarfile
from pathlib import Path

import pytest

from sparsesam.lab.data import DataError, cache_dir
from sparsesam.lab.data.download import DownloadError, Remote, fetch, unpack
from tests.lab.data.files import remote

CONTENT = bytes(range(256)) * 4000


@pytest.fixture
def published(server):
    server.files["file.bin"] = CONTENT
    return remote(server.url("file.bin"), CONTENT)


def left_in(folder):
    return [path.name for path in folder.iterdir()]


def test_file_is_downloaded_once(published, server, tmp_path):
    for _ in range(2):
        assert fetch(published, tmp_path / "new" / "folder").read_bytes() == CONTENT
    assert len(server.requests) == 1


@pytest.mark.parametrize("attempts", [1, 2])
def test_interrupted_transfer_resumes(published, server, tmp_path, attempts):
    server.interruptions = 1
    if attempts == 1:
        with pytest.raises(DownloadError, match="cannot download"):
            fetch(published, tmp_path, attempts=1)
        assert left_in(tmp_path) == ["file.bin.part"]
    assert fetch(published, tmp_path, attempts=attempts).read_bytes() == CONTENT
    whole, rest = server.ranges
    assert whole is None
    assert 0 < int(rest.removeprefix("bytes=").removesuffix("-")) <= len(CONTENT) // 2
    assert left_in(tmp_path) == ["file.bin"]


@pytest.mark.parametrize(
    ("file", "content", "has_ranges"),
    [
        ("file.bin.part", CONTENT[:100], False),
        ("file.bin.part", b"x" * 100, True),
        ("file.bin.part", b"x" * (len(CONTENT) + 1), True),
        ("file.bin", b"damaged", True),
    ],
    ids=["server without ranges", "other bytes", "too many bytes", "damaged file"],
)
def test_earlier_file_that_cannot_be_continued_is_replaced(published, server, tmp_path, file, content, has_ranges):
    server.has_ranges = has_ranges
    (tmp_path / file).write_bytes(content)
    assert fetch(published, tmp_path, attempts=2).read_bytes() == CONTENT
    assert left_in(tmp_path) == ["file.bin"]


def test_wrong_checksum_leaves_nothing(published, tmp_path):
    with pytest.raises(DownloadError, match=r"file\.bin.*does not match the known hash"):
        fetch(Remote(published.url, "0" * 32), tmp_path, attempts=1)
    assert left_in(tmp_path) == []


def test_missing_file_or_server_is_named(server, tmp_path):
    for url, reason in ((server.url("none"), "404"), ("http://127.0.0.1:9/file", ".*refused")):
        with pytest.raises(DownloadError, match=f"cannot download {re.escape(url)}: {reason}"):
            fetch(Remote(url, "0" * 32), tmp_path, attempts=1)


def test_progress_is_shown_on_request(published, tmp_path, capsys):
    fetch(published, tmp_path / "silent")
    assert capsys.readouterr() == ("", "")
    fetch(published, tmp_path / "shown", progress=True)
    assert "100%" in capsys.readouterr().err


def test_cache_follows_variable_or_platform(monkeypatch, tmp_path):
    monkeypatch.setenv("SPARSESAM_CACHE", "somewhere")
    assert cache_dir() == Path("somewhere")
    monkeypatch.delenv("SPARSESAM_CACHE")
    assert cache_dir().name == "sparsesam"


def write_tar(path, members):
    with tarfile.open(path, "w:gz") as tar:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return path


def test_folder_is_replaced_and_only_named_files_are_written(tmp_path):
    members = {"here/one": b"1", "here/two": b"2", "here/other": b"3", "elsewhere": b"4", "../../one": b"5"}
    archive, folder = write_tar(tmp_path / "a.tar.gz", members), tmp_path / "into" / "here"
    folder.mkdir(parents=True)
    (folder / "old").write_bytes(b"0")
    unpack(archive, folder, ["one", "two", "missing"])
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == {"one": b"1", "two": b"2"}
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["a.tar.gz", "here", "into", "one", "two"]


def with_wrong_checksum(content):
    return gzip.compress(gzip.decompress(content)[:600])[:-8] + bytes(8)


@pytest.mark.parametrize("damage", [lambda content: content[:40], with_wrong_checksum])
def test_damaged_archive_raises_and_leaves_folder(tmp_path, damage):
    archive, folder = write_tar(tmp_path / "a.tar.gz", {"here/one": b"1"}), tmp_path / "here"
    unpack(archive, folder, ["one"])
    archive.write_bytes(damage(archive.read_bytes()))
    with pytest.raises(DataError, match="expected a complete archive of files and folders"):
        unpack(archive, folder, ["one"])
    assert (folder / "one").read_bytes() == b"1"
