import re
from concurrent.futures import ThreadPoolExecutor

import pytest

from sparsesam.lab.data.download import DownloadError, Remote, fetch
from sparsesam.lab.data.errors import DataError
from tests.lab.data.files import remote

CONTENT = bytes(range(256)) * 4000


@pytest.fixture
def published(server):
    server.files["file.bin"] = CONTENT
    return remote(server.url("file.bin"), CONTENT)


def test_brings_the_file(published, tmp_path):
    path = fetch(published, tmp_path / "new" / "folder")
    assert path.read_bytes() == CONTENT
    assert not path.with_name("file.bin.part").exists()


def test_does_not_bring_it_twice(published, server, tmp_path):
    fetch(published, tmp_path)
    fetch(published, tmp_path)
    assert len(server.requests) == 1


def test_goes_on_where_the_transfer_stopped(published, server, tmp_path):
    server.interruptions = 2
    path = fetch(published, tmp_path, wait=0.0)
    assert path.read_bytes() == CONTENT
    half = len(CONTENT) // 2
    assert [wanted for _, wanted in server.requests] == [None, f"bytes={half}-", f"bytes={half + half // 2}-"]


def test_the_next_call_goes_on_too(published, server, tmp_path):
    server.interruptions = 1
    with pytest.raises(DownloadError, match=r"the connection ended early; 512,000 bytes are kept in .*file\.bin\.part"):
        fetch(published, tmp_path, attempts=1)
    assert not (tmp_path / "file.bin").exists()
    assert fetch(published, tmp_path).read_bytes() == CONTENT
    assert server.requests[-1] == ("file.bin", "bytes=512000-")


def test_starts_again_if_the_server_knows_no_ranges(published, server, tmp_path):
    server.knows_range = False
    server.interruptions = 1
    assert fetch(published, tmp_path, wait=0.0).read_bytes() == CONTENT


def test_a_part_that_is_already_whole_is_taken(published, tmp_path):
    (tmp_path / "file.bin.part").write_bytes(CONTENT)
    assert fetch(published, tmp_path).read_bytes() == CONTENT


def test_a_wrong_checksum_leaves_nothing_behind(published, tmp_path):
    with pytest.raises(DataError, match=r"expected file\.bin with MD5 0{32}, found [0-9a-f]{32} \(1,024,000 bytes\)"):
        fetch(Remote(published.url, "0" * 32), tmp_path)
    assert [path.name for path in tmp_path.iterdir() if path.suffix != ".lock"] == []


def test_a_damaged_file_is_replaced(published, tmp_path):
    (tmp_path / "file.bin").write_bytes(b"damaged")
    assert fetch(published, tmp_path).read_bytes() == CONTENT


def test_what_is_not_there_is_asked_for_once(server, tmp_path):
    with pytest.raises(DownloadError, match=re.escape(f"cannot download {server.url('none')}: HTTP 404")):
        fetch(Remote(server.url("none"), ""), tmp_path)
    assert len(server.requests) == 1


def test_offline_is_said(tmp_path):
    with pytest.raises(DownloadError, match=r"cannot download http://127\.0\.0\.1:9/file: .*refused"):
        fetch(Remote("http://127.0.0.1:9/file", ""), tmp_path, attempts=2, wait=0.0)


def test_tells_how_far_it_is(published, tmp_path):
    seen = []
    fetch(published, tmp_path, progress=lambda *report: seen.append(report))
    assert seen[-1] == ("file.bin", len(CONTENT), len(CONTENT))
    assert [done for _, done, _ in seen] == sorted({done for _, done, _ in seen})


def test_two_at_once_bring_it_once(published, server, tmp_path):
    with ThreadPoolExecutor(2) as pool:
        paths = list(pool.map(lambda _: fetch(published, tmp_path), range(2)))
    assert paths[0] == paths[1]
    assert len(server.requests) == 1
