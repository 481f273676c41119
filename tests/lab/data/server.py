"""A local web server that can be made to fail."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Server:
    """``files`` by path; the first ``interruptions`` answers stop half-way; ``requests`` keeps the paths, ``ranges``
    the requested parts."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.interruptions = 0
        self.requests: list[str] = []
        self.ranges: list[str | None] = []
        self.has_ranges = True
        self.address = ""

    def url(self, name: str) -> str:
        return f"{self.address}/{name}"


@contextmanager
def serve() -> Iterator[Server]:
    server = Server()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            server.requests.append(self.path.lstrip("/"))
            body = server.files.get(self.path.lstrip("/"))
            if body is None:
                return self.send_error(404)
            wanted = self.headers.get("Range")
            server.ranges.append(wanted)
            start = int(wanted.removeprefix("bytes=").removesuffix("-")) if wanted and server.has_ranges else 0
            if start >= len(body):
                return self.send_error(416)
            body = body[start:]
            self.send_response(206 if start else 200)
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
