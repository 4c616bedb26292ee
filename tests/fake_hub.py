"""The endpoints of the Hugging Face Hub that huggingface_hub's `snapshot_download` asks, over a folder."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Generator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

COMMIT = "c0ffee" + "0" * 34


class FakeHub:
    """`models`: id -> folder with its files; `gated`: ids that no one may read."""

    def __init__(self) -> None:
        self.models: dict[str, Path] = {}
        self.gated: set[str] = set()
        self.requests: list[str] = []

    @contextmanager
    def serving(self) -> Generator[str]:
        """Serve; gives the URL."""
        server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()
            server.server_close()

    def fetched(self) -> set[str]:
        """Names of the files whose content was asked for."""
        return {
            path.partition("/resolve/")[2].partition("/")[2] for path in self.requests if "/resolve/" in path
        }

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        hub = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                hub.requests.append(self.path)
                self._answer()

            def do_HEAD(self) -> None:
                self._answer()

            def _answer(self) -> None:
                status, headers, body = hub.answer(self.path.partition("?")[0])
                self.send_response(status)
                for name, value in {"Content-Length": str(len(body)), **headers}.items():
                    self.send_header(name, value)
                self.end_headers()
                if self.command == "GET":
                    self.wfile.write(body)

            def log_message(self, format: str, *args: Any) -> None:
                """Say nothing."""

        return Handler

    def answer(self, path: str) -> tuple[int, dict[str, str], bytes]:
        """Status, headers and body of a request."""
        owner, name, *rest = path.removeprefix("/api/models").strip("/").split("/")
        hub_id = f"{owner}/{name}"
        if hub_id in self.gated:
            return 403, {"X-Error-Code": "GatedRepo", "X-Error-Message": "gated"}, b""
        if hub_id not in self.models:
            return 404, {"X-Error-Code": "RepoNotFound", "X-Error-Message": "not found"}, b""
        files = {p.relative_to(self.models[hub_id]): p for p in self.models[hub_id].rglob("*") if p.is_file()}
        revision = rest[1] if len(rest) > 1 else "main"
        if revision not in ("main", COMMIT):
            return 404, {"X-Error-Code": "RevisionNotFound", "X-Error-Message": "no revision"}, b""
        if rest[:1] == ["revision"] or not rest:
            info = {"id": hub_id, "sha": COMMIT, "siblings": [{"rfilename": str(name)} for name in files]}
            return 200, {}, json.dumps(info).encode()
        if rest[0] == "tree":
            tree = [
                {"type": "file", "path": str(name), "size": p.stat().st_size, "oid": _digest(p)}
                for name, p in files.items()
            ]
            return 200, {"Content-Type": "application/json"}, json.dumps(tree).encode()
        file = files.get(Path(*rest[2:]))
        if file is None:
            return 404, {"X-Error-Code": "EntryNotFound"}, b""
        return 200, {"X-Repo-Commit": COMMIT, "ETag": f'"{_digest(file)}"'}, file.read_bytes()


def _digest(path: Path) -> str:
    return hashlib.sha1(path.read_bytes()).hexdigest()
