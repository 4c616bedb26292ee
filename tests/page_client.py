"""Requests to the page of a run or of a folder of runs, in this process."""

from __future__ import annotations

from pathlib import Path

import httpx

from tinkerscript.page.web_app import create_page


def page(
    root: Path, token: str | None = None, *, host: str = "localhost:8000", scheme: str = "http"
) -> httpx.AsyncClient:
    transport = httpx.ASGITransport(create_page(root, admin_token=token))
    return httpx.AsyncClient(transport=transport, base_url=f"{scheme}://{host}")
