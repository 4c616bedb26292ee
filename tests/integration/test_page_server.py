"""The page of a run: beside a server, with and without tokens, and when it dies."""

from __future__ import annotations

import signal
import socket
import ssl
import time
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from certificates import write_certificate
from interchange_helpers import until
from interchange_setup import Setup
from tinkerscript.access_tokens import ADMIN_TOKEN, CLIENT_TOKEN
from tinkerscript.config import InterchangeConfig, RunConfig
from tinkerscript.processes.launcher import MAX_RESTARTS
from tinkerscript.processes.run_page import run_page
from written_run import WrittenRun

TOKENS = {CLIENT_TOKEN: "shared-token-of-tests", ADMIN_TOKEN: "admin-token-of-tests"}


def write_run(folder: Path) -> None:
    (folder / "logs").mkdir(parents=True, exist_ok=True)
    with WrittenRun(folder) as run:
        run.status(began=1000.0, steps=3, step=0)
        run.episode(f"e-{run.last + 1}")


class Page:
    """A run's page: what the run is told, and the process."""

    def __init__(self, folder: Path, *, max_restarts: int = MAX_RESTARTS, **config: Any) -> None:
        write_run(folder)
        self.config = RunConfig.model_validate({"page_port": 0} | config)
        self.folder = folder
        self.max_restarts = max_restarts
        self.notes: list[str] = []
        self.urls: list[str] = []

    def __call__(self) -> Any:
        return run_page(
            self.config,
            self.folder,
            self.notes.append,
            self.urls.append,
            max_restarts=self.max_restarts,
        )

    def client(self, **options: Any) -> httpx.AsyncClient:
        (url,) = self.urls
        return httpx.AsyncClient(base_url=url, timeout=60, **options)

    @property
    def process(self) -> psutil.Process:
        (found,) = self.processes()
        return found

    def processes(self) -> list[psutil.Process]:
        children = psutil.Process().children(recursive=True)
        return [each for each in children if "view" in each.cmdline() and str(self.folder) in each.cmdline()]


async def test_a_run_has_a_page_of_low_priority_beside_it(setup: Setup) -> None:
    page = Page(setup.run_dir)
    of_run = f"/api/runs/{setup.run_dir.name}"
    async with page(), page.client() as http:
        assert page.notes == [f"watch the run at {http.base_url}".rstrip("/")]
        assert (await http.get("/")).headers["content-type"] == "text/html; charset=utf-8"
        assert page.process.nice() >= 10, "it cannot delay a claim"
        fleet = await http.get(f"{of_run}/fleet")
        assert fleet.json()["engine_status"] == "ENGINE.ROLLING", fleet.text
        # What changes something is in the audit log.
        for action in ("drop", "retry"):
            path, body = f"{of_run}/failed_episodes/{action}", {"episode_uuids": ["nobody"]}
            asked = await http.post(path, json=body, headers={"Origin": page.urls[0]})
            assert asked.json()["refused"].keys() == {"nobody"}, asked.text
        audit = [(each["action"], each["from"]) for each in (await http.get(f"{of_run}/audit")).json()]
        actions = ("retry failed episodes", "drop failed episodes")
        assert audit == [(action, "127.0.0.1") for action in actions]
    for path in ("/", "/api/runs", "/page/style.css"):
        assert (await setup.http.get(path)).status_code == 404, "the server has no page"


async def test_a_page_that_dies_is_started_again_at_its_address(tmp_path: Path) -> None:
    page = Page(tmp_path / "run", max_restarts=1)
    async with page(), page.client() as http:
        async with http.stream("GET", "/api/runs/run/events") as events:
            lines = events.aiter_lines()
            assert await anext(lines) == "event: run"
            first = page.process
            first.send_signal(signal.SIGKILL)
            with pytest.raises(httpx.HTTPError):
                async for _ in lines:
                    pass
        assert (await http.get("/api/runs")).status_code == 200, "whoever comes meanwhile waits"
        assert page.process.pid != first.pid
        page.process.send_signal(signal.SIGKILL)
        await until(lambda: len(page.notes) > 2, "the line about the end of the page")
        with pytest.raises(httpx.ConnectError):
            await http.get("/api/runs")
    _, died, gone = page.notes
    assert died.startswith("page died (signal 9); starting it again")
    assert gone.startswith("the run continues without its page: page ended (signal 9) after 1 restarts")
    assert "\n" not in gone


async def test_a_page_ends_with_its_run_whoever_looks(tmp_path: Path) -> None:
    page = Page(tmp_path / "run")
    async with httpx.AsyncClient(timeout=60) as http:
        async with page():
            request = http.build_request("GET", f"{page.urls[0]}/api/runs/run/events")
            lines = (await http.send(request, stream=True)).aiter_lines()
            assert await anext(lines) == "event: run"
            process, began = page.process, time.monotonic()
        assert time.monotonic() - began < 4, "the supervisor's patience"
    assert not process.is_running()


async def test_a_run_may_have_no_page(tmp_path: Path) -> None:
    off = Page(tmp_path / "run", page_port=False)
    assert off.config.page_port == "off"
    async with off():
        assert (off.urls, off.notes, off.processes()) == ([], [], [])
    with socket.create_server(("127.0.0.1", 0)) as listener:
        taken = Page(tmp_path / "run", page_port=listener.getsockname()[1])
        reason = f"cannot listen on port {taken.config.page_port}: Address already in use"
        async with taken():
            assert (taken.urls, taken.notes) == ([], [f"the run has no page: {reason}"])


async def test_the_page_is_beyond_this_machine_only_under_a_token(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    certificate, key = write_certificate(tmp_path)
    section = InterchangeConfig(
        interchange_server_host="0.0.0.0", tls_certificate=str(certificate), tls_key=str(key)
    )
    alone = Page(tmp_path / "run", interchange_server=section)
    async with alone():
        assert alone.urls[0].startswith("http://127.0.0.1:")
        assert not [each for each in alone.process.net_connections() if each.laddr.ip == "0.0.0.0"]
    for name, token in TOKENS.items():
        monkeypatch.setenv(name, token)
    page = Page(tmp_path / "run", interchange_server=section)
    async with page(), page.client(verify=ssl.create_default_context(cafile=certificate)) as http:
        assert page.urls[0].startswith("https://127.0.0.1:")
        assert CLIENT_TOKEN not in page.process.environ()
        assert (await http.get("/api/runs")).status_code == 401
        for name, status in ((CLIENT_TOKEN, 401), (ADMIN_TOKEN, 200)):
            headers = {"Authorization": f"Bearer {TOKENS[name]}"}
            assert (await http.get("/api/runs", headers=headers)).status_code == status
