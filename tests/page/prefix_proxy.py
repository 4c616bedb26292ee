"""A reverse proxy as nginx is set up in docs/page.md: HTTPS, and each server below a prefix of its own."""

from __future__ import annotations

import http.client
import ssl
import sys
import threading
from collections.abc import Generator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from certificates import write_certificate


class PrefixProxy(ThreadingHTTPServer):
    """Forwards `/PREFIX/path` to a server as `/path`."""

    daemon_threads = True
    targets: dict[str, str]
    """Prefix, such as `/team/run1/` -> host and port."""

    strays: list[str]
    """Paths that were asked for outside of the prefixes."""

    def handle_error(self, request: object, client_address: object) -> None:
        """The browser tries each connection once before it believes the certificate."""
        if not isinstance(sys.exc_info()[1], ssl.SSLError):
            super().handle_error(request, client_address)  # type: ignore[arg-type]

    def server_bind(self) -> None:
        self.targets, self.strays = {}, []
        super().server_bind()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: PrefixProxy

    def do_GET(self) -> None:
        prefix = next((each for each in self.server.targets if self.path.startswith(each)), None)
        if prefix is not None:
            self._forward(self.server.targets[prefix], self.path[len(prefix) - 1 :])
        elif f"{self.path}/" in self.server.targets:
            self._answer(301, {"Location": f"{self.path}/"})
        else:
            self.server.strays.append(self.path)
            self._answer(404, {})

    do_POST = do_GET

    def _answer(self, status: int, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": "0"}.items():
            self.send_header(name, value)
        self.end_headers()

    def _forward(self, target: str, path: str) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        headers = {name: value for name, value in self.headers.items() if name != "Connection"}
        headers |= {"X-Forwarded-For": self.client_address[0], "X-Forwarded-Proto": "https"}
        upstream = http.client.HTTPConnection(target, timeout=60)
        try:
            upstream.request(self.command, path, body, headers)
            reply = upstream.getresponse()
            self.send_response_only(reply.status)
            for name, value in reply.getheaders():
                if name.lower() not in ("connection", "transfer-encoding", "content-length"):
                    self.send_header(name, value)
            self.send_header("Connection", "close")
            self.end_headers()
            while part := reply.read1(65536):
                self.wfile.write(part)
        except (OSError, http.client.HTTPException):
            pass  # The browser or the server has gone in the middle.
        finally:
            upstream.close()
            self.close_connection = True

    def log_message(self, format: str, *args: object) -> None:
        del format, args


@contextmanager
def prefix_proxy(folder: Path) -> Generator[tuple[str, PrefixProxy]]:
    """Its URL, and itself, while the block runs."""
    certificate, key = write_certificate(folder)
    with PrefixProxy(("127.0.0.1", 0), _Handler) as proxy:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate, key)
        proxy.socket = context.wrap_socket(proxy.socket, server_side=True, do_handshake_on_connect=False)
        thread = threading.Thread(target=proxy.serve_forever, daemon=True)
        thread.start()
        try:
            yield f"https://127.0.0.1:{proxy.server_port}", proxy
        finally:
            proxy.shutdown()
            thread.join()
