import re
from pathlib import Path

import pytest

from sparsesam.lab.data import DataError, cache_dir, download
from sparsesam.lab.data.download import Remote, fetch, unpack
from tests.lab.data.files import remote, tar

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


def assert_fetched(published, folder):
    assert fetch([published], folder) == [folder / "file.bin"]
    assert (folder / "file.bin").read_bytes() == CONTENT
    assert left_in(folder) == ["file.bin"]


def test_file_is_downloaded_once_and_damaged_one_again(published, server, tmp_path):
    for _ in range(2):
        assert_fetched(published, tmp_path / "new" / "folder")
    assert len(server.requests) == 1
    (tmp_path / "new" / "folder" / "file.bin").write_bytes(b"damaged")
    with pytest.raises(DataError, match=r"file\.bin is missing or has another checksum, and is not to be downloaded"):
        fetch([published], tmp_path / "new" / "folder", download=False)
    assert_fetched(published, tmp_path / "new" / "folder")


@pytest.mark.parametrize("retries", [0, 1])
def test_interrupted_transfer_resumes(published, server, tmp_path, monkeypatch, retries):
    server.interruptions = 1
    if not retries:
        with pytest.raises(DataError, match="cannot get the published files"):
            fetch([published], tmp_path)
        assert left_in(tmp_path) == ["file.bin.part"]
    monkeypatch.setattr(download, "RETRIES", retries)
    assert_fetched(published, tmp_path)
    whole, rest = server.ranges
    assert whole is None
    assert 0 < int(rest.removeprefix("bytes=").removesuffix("-")) <= len(CONTENT) // 2


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
    assert_fetched(published, tmp_path)


def test_file_that_cannot_be_downloaded_is_named_and_leaves_nothing(published, server, tmp_path):
    for url, reason in (
        (published.url, "does not match the known hash"),
        (server.url("none"), "404"),
        ("http://127.0.0.1:9/file", "refused"),
    ):
        with pytest.raises(DataError, match=f"(?s){reason}.*Put into {tmp_path}, .*from {re.escape(url)}"):
            fetch([Remote(url, "0" * 32)], tmp_path)
        assert left_in(tmp_path) == []


def test_progress_is_shown_on_request(published, tmp_path, capsys):
    fetch([published], tmp_path / "silent")
    assert capsys.readouterr() == ("", "")
    fetch([published], tmp_path / "shown", progress=True)
    assert "100%" in capsys.readouterr().err


def test_cache_follows_variable_or_platform(monkeypatch):
    monkeypatch.setenv("SPARSESAM_CACHE", "somewhere")
    assert cache_dir() == Path("somewhere")
    monkeypatch.delenv("SPARSESAM_CACHE")
    assert cache_dir().name == "sparsesam"


def test_folder_is_replaced_by_that_of_the_archive(tmp_path):
    old, new = tmp_path / "into" / "here", tmp_path / "source" / "here"
    for file in (old / "old", new / "one"):
        file.parent.mkdir(parents=True)
        file.touch()
    unpack(tar(new, tmp_path / "a.tar.gz"), old)
    assert [path.name for path in (tmp_path / "into").rglob("*")] == ["here", "one"]
