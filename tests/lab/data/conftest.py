"""An empty cache for each test, and a local web server that can be made to fail."""

import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """An empty cache for this test."""
    monkeypatch.setenv("SPARSESAM_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


class Server(ThreadingHTTPServer):
    """``files`` by path; the first ``interruptions`` answers stop half-way; ``requests`` keeps the paths."""

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.files, self.interruptions, self.requests = {}, 0, []

    def url(self, name):
        return f"http://127.0.0.1:{self.server_port}/{name}"


class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.server.requests.append(self.path.lstrip("/"))
        body = self.server.files.get(self.path.lstrip("/"))
        if body is None:
            return self.send_error(404)
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.server.interruptions:
            self.server.interruptions -= 1
            body = body[: len(body) // 2]
        self.wfile.write(body)

    def log_message(self, *_):
        pass


@pytest.fixture
def server():
    with Server() as running:
        thread = threading.Thread(target=running.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield running
        running.shutdown()
        thread.join()
