"""Inspect's own viewer of logs, from the installed inspect_ai, over the recorded transcripts.

The viewer is a page of its own, in the form that `inspect view bundle` puts on a web server: it reads one log
from a folder beside it, and shows what is in it as plain text. Nothing of inspect_ai is imported.

Invariants: it has a content-security policy of its own, under which it reaches no other host and runs no
script but its own files and those that its index has; it can write nothing.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from datetime import UTC, datetime
from functools import cache
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import msgspec
from fastapi import APIRouter, FastAPI, Response
from fastapi.responses import HTMLResponse, JSONResponse
from fastapi.staticfiles import StaticFiles
from starlette.types import Scope

from tinkerscript.errors import NotRecordedError
from tinkerscript.page.runs import Runs
from tinkerscript.page.transcript_view import TranscriptError, find_transcript, parsed, unpacked_text
from tinkerscript.record.reader import Record

ROOT = "/api/inspect"
"""Below `/api`, where the login's cookie goes."""

_HERE = f"{ROOT}/{{uuid}}/{{attempt}}"
_LOG = "episode.json"
_INLINE = re.compile(r"<script>(.*?)</script>", re.DOTALL)


class _Dist:
    """The files of the installed viewer."""

    def __init__(self, folder: Path) -> None:
        self.assets = folder / "assets"
        context = {"log_dir": "logs", "inspect_version": version("inspect_ai"), "trust_content": False}
        index = (folder / "index.html").read_text(encoding="utf-8")
        # One copy of the files for the browser's cache, whatever the episode.
        index = index.replace('"./assets/', '"../../assets/')
        told = f'<script id="log_dir_context" type="application/json">{json.dumps(context)}</script>'
        self.index = index.replace("</head>", f"{told}</head>")
        self.policy = _policy(_INLINE.findall(index))


def _policy(scripts: list[str]) -> str:
    """The content-security policy of a viewer whose index has these scripts."""
    hashes = [f"'sha256-{base64.b64encode(hashlib.sha256(s.encode()).digest()).decode()}'" for s in scripts]
    return (
        f"default-src 'none'; script-src 'self' {' '.join(hashes)} 'wasm-unsafe-eval'; worker-src 'self'; "
        "style-src-elem 'self'; style-src-attr 'unsafe-inline'; img-src 'self' data:; media-src data:; "
        "font-src 'self'; connect-src 'self'; object-src 'none'; frame-src 'none'; form-action 'none'; "
        "base-uri 'none'; frame-ancestors 'none'"
    )


@cache
def _dist() -> _Dist | None:
    """None if inspect_ai is not installed, or without its viewer."""
    found = find_spec("inspect_ai")
    for place in (found.submodule_search_locations or ()) if found else ():
        folder = Path(place) / "_view" / "dist"
        if (folder / "index.html").is_file() and (folder / "assets" / "index.js").is_file():
            return _Dist(folder)
    return None


def is_installed() -> bool:
    """Whether there is a viewer to open."""
    return _dist() is not None


def add_viewer(app: FastAPI, runs: Runs) -> None:
    """Serve the viewer under `ROOT`."""
    pages = _ViewerPages(runs)
    router = APIRouter(include_in_schema=False)
    router.get(f"{_HERE}/")(pages.index)
    router.get(f"{_HERE}/logs/listing.json")(pages.listing)
    router.get(f"{_HERE}/logs/{_LOG}")(pages.log)
    app.include_router(router)
    if (dist := _dist()) is not None:
        app.mount(f"{ROOT}/assets", _Assets(dist))


class _ViewerPages:
    """The viewer's page of one transcript, and the folder that it reads. Plain functions, which FastAPI runs
    in threads."""

    def __init__(self, runs: Runs) -> None:
        self._runs = runs

    def index(self, uuid: str, attempt: int) -> Response:
        """The viewer."""
        self._find(uuid, attempt)
        dist = _needed()
        return HTMLResponse(dist.index, headers=_headers(dist) | {"cache-control": "no-cache"})

    def listing(self, uuid: str, attempt: int) -> Response:
        """The logs of its folder."""
        record, _ = self._find(uuid, attempt)
        about = _about(record, uuid)
        line = {"status": "success", "task_version": 0, "started_at": about["created"], "completed_at": ""}
        line |= {name: about[name] for name in ("eval_id", "run_id", "task", "task_id", "model")}
        return JSONResponse({_LOG: line}, headers=_headers(_needed()))

    def log(self, uuid: str, attempt: int) -> Response:
        """The transcript as a log of one sample. Raises NotRecordedError for one that cannot be read."""
        record, number = self._find(uuid, attempt)
        try:
            text = unpacked_text(record.transcript(number, attempt) or b"")
            found = parsed(text)
        except TranscriptError as error:
            raise NotRecordedError(f"what was sent as the transcript cannot be read: {error}") from error
        log = {
            "version": 2,
            "status": "success",
            "eval": _about(record, uuid),
            "plan": {"steps": []},
            "results": {"total_samples": 1, "completed_samples": 1, "scores": []},
            "stats": {"started_at": found.started_at or "", "completed_at": found.completed_at or ""},
            "samples": [msgspec.Raw(text)],
        }
        return Response(msgspec.json.encode(log), headers=_headers(_needed()), media_type="application/json")

    def _find(self, uuid: str, attempt: int) -> tuple[Record, int]:
        _, record = self._runs.record_of(uuid)
        return record, find_transcript(record, uuid, attempt)[0]


def _needed() -> _Dist:
    dist = _dist()
    if dist is None:
        raise NotRecordedError(
            "Inspect's viewer is not installed here: pip install inspect_ai, or read the events"
        )
    return dist


def _headers(dist: _Dist) -> dict[str, str]:
    return {"content-security-policy": dist.policy}


def _about(record: Record, uuid: str) -> dict[str, Any]:
    """A log's `EvalSpec`."""
    query = (
        "SELECT step, label, reward, ended, coalesce(samples.task, '') AS task FROM episodes "
        "LEFT JOIN samples ON samples.number = episodes.sample WHERE uuid = ?"
    )
    row = record.row(query, (uuid,))
    assert row is not None
    facts = record.facts()
    named = {"eval_id": uuid, "run_id": uuid, "task_id": uuid}
    return {
        **named,
        "created": datetime.fromtimestamp(row["ended"], UTC).isoformat(),
        "task": row["task"].rpartition("@")[2] or "episode",
        "dataset": {"samples": 1},
        "model": str(facts.get("model", "")),
        "config": {"epochs": 1},
        "metadata": {"episode_uuid": uuid, **{name: row[name] for name in ("step", "label", "reward")}},
    }


class _Assets(StaticFiles):
    """The viewer's scripts and styles. A worker takes its policy from its own file."""

    def __init__(self, dist: _Dist) -> None:
        super().__init__(directory=dist.assets)
        self._headers = _headers(dist)

    async def get_response(self, path: str, scope: Scope) -> Response:
        response = await super().get_response(path, scope)
        response.headers.update(self._headers)
        return response
