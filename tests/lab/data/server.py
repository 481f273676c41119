"""A web server on this machine that knows Range, and can be told to fail."""

import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Server:
    """``files`` by path; the first ``interruptions`` answers stop half-way; ``requests`` keeps (path, Range)."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.interruptions = 0
        self.knows_range = True
        self.requests: list[tuple[str, str | None]] = []
        self.address = ""

    def url(self, name: str) -> str:
        return f"{self.address}/{name}"


@contextmanager
def serve() -> Iterator[Server]:
    server = Server()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            wanted = self.headers.get("Range")
            server.requests.append((self.path.lstrip("/"), wanted))
            content = server.files.get(self.path.lstrip("/"))
            if content is None:
                return self.send_error(404)
            start = int(re.fullmatch(r"bytes=(\d+)-", wanted)[1]) if wanted and server.knows_range else 0
            if start and start >= len(content):
                return self.send_error(416)
            self.send_response(206 if start else 200)
            if start:
                self.send_header("Content-Range", f"bytes {start}-{len(content) - 1}/{len(content)}")
            body = content[start:]
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if server.interruptions:
                server.interruptions -= 1
                body = body[: len(body) // 2]
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    httpd = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=httpd.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    server.address = f"http://127.0.0.1:{httpd.server_port}"
    try:
        yield server
    finally:
        httpd.shutdown()
        thread.join()
        httpd.server_close()
