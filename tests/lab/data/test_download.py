import io
import re
import tarfile
from pathlib import Path

import pytest

from sparsesam.lab.data import cache_dir, download
from sparsesam.lab.data.download import DownloadError, Remote, fetch, unpack
from tests.lab.data.files import remote

CONTENT = bytes(range(256)) * 4000


@pytest.fixture(autouse=True)
def no_retries(monkeypatch):
    monkeypatch.setattr(download, "RETRIES", 0)


@pytest.fixture
def published(server):
    server.files["file.bin"] = CONTENT
    return remote(server.url("file.bin"), CONTENT)


def left_in(folder):
    return [path.name for path in folder.iterdir()]


def test_file_is_downloaded_once_and_damaged_one_again(published, server, tmp_path):
    for _ in range(2):
        assert fetch(published, tmp_path / "new" / "folder").read_bytes() == CONTENT
    assert len(server.requests) == 1
    (tmp_path / "new" / "folder" / "file.bin").write_bytes(b"damaged")
    assert fetch(published, tmp_path / "new" / "folder").read_bytes() == CONTENT


@pytest.mark.parametrize("retries", [0, 1])
def test_interrupted_transfer_resumes(published, server, tmp_path, monkeypatch, retries):
    server.interruptions = 1
    if not retries:
        with pytest.raises(DownloadError, match="cannot download"):
            fetch(published, tmp_path)
        assert left_in(tmp_path) == ["file.bin.part"]
    monkeypatch.setattr(download, "RETRIES", retries)
    assert fetch(published, tmp_path).read_bytes() == CONTENT
    whole, rest = server.ranges
    assert whole is None
    assert 0 < int(rest.removeprefix("bytes=").removesuffix("-")) <= len(CONTENT) // 2
    assert left_in(tmp_path) == ["file.bin"]


@pytest.mark.parametrize(
    ("content", "has_ranges"),
    [(CONTENT[:100], False), (b"x" * 100, True), (b"x" * (len(CONTENT) + 1), True)],
    ids=["server without ranges", "other bytes", "too many bytes"],
)
def test_earlier_part_that_cannot_be_continued_is_replaced(
    published, server, tmp_path, monkeypatch, content, has_ranges
):
    monkeypatch.setattr(download, "RETRIES", 1)
    server.has_ranges = has_ranges
    (tmp_path / "file.bin.part").write_bytes(content)
    assert fetch(published, tmp_path).read_bytes() == CONTENT
    assert left_in(tmp_path) == ["file.bin"]


def test_wrong_checksum_leaves_nothing(published, tmp_path):
    with pytest.raises(DownloadError, match=r"file\.bin.*does not match the known hash"):
        fetch(Remote(published.url, "0" * 32), tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_missing_file_or_server_is_named(server, tmp_path):
    for url, reason in ((server.url("none"), "404"), ("http://127.0.0.1:9/file", ".*refused")):
        with pytest.raises(DownloadError, match=f"cannot download {re.escape(url)}: {reason}"):
            fetch(Remote(url, "0" * 32), tmp_path)


def test_progress_is_shown_on_request(published, tmp_path, capsys):
    fetch(published, tmp_path / "silent")
    assert capsys.readouterr() == ("", "")
    fetch(published, tmp_path / "shown", progress=True)
    assert "100%" in capsys.readouterr().err


def test_cache_follows_variable_or_platform(monkeypatch):
    monkeypatch.setenv("SPARSESAM_CACHE", "somewhere")
    assert cache_dir() == Path("somewhere")
    monkeypatch.delenv("SPARSESAM_CACHE")
    assert cache_dir().name == "sparsesam"


def test_folder_is_replaced_by_that_of_the_archive(tmp_path):
    folder = tmp_path / "into" / "here"
    folder.mkdir(parents=True)
    (folder / "old").write_bytes(b"0")
    with tarfile.open(tmp_path / "a.tar.gz", "w:gz") as tar:
        for name in ("here/one", "elsewhere"):
            info = tarfile.TarInfo(name)
            info.size = 1
            tar.addfile(info, io.BytesIO(b"1"))
    unpack(tmp_path / "a.tar.gz", folder)
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["a.tar.gz", "here", "into", "one"]
