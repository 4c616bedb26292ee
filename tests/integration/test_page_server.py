"""The page of a run at its server's address: who may see what, and a child process that comes and goes."""

from __future__ import annotations

import asyncio
import functools
import json
import os
import signal
import socket
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import yaml

from command_line import Command, end_all, named, start
from interchange_helpers import new_episode, new_episodes, stored_outcomes, until
from interchange_setup import Setup, serving
from record_helpers import episode
from tinkerscript.processes.page_door import page_door
from tinkerscript.protocol import FleetResponse
from tinkerscript.record.schema import RECORD_FILE
from tinkerscript.record.writer import RecordWriter
from tinkerscript.server import page_proxy
from tinkerscript.server.auth import ADMIN_TOKEN, CLIENT_TOKEN
from tinkerscript.server.page_child import start_page

TOKENS = {CLIENT_TOKEN: "shared-token-of-tests", ADMIN_TOKEN: "admin-token-of-tests"}
SAY = {"model": "policy", "messages": [{"role": "user", "content": "hi"}]}


@pytest.fixture
async def setup(tmp_path: Path, byte_model: Path) -> AsyncGenerator[Setup]:
    run = tmp_path / "run"
    run.mkdir()
    async with serving(run, byte_model) as made:
        yield made


@pytest.fixture
async def closed(tmp_path: Path, byte_model: Path) -> AsyncGenerator[Setup]:
    """A server with tokens."""
    run = tmp_path / "closed"
    run.mkdir()
    async with serving(run, byte_model, environ=TOKENS) as made:
        yield made


@pytest.fixture
def commands() -> Iterator[None]:
    """Ends the commands that a failed test leaves."""
    yield
    end_all()


def bearer(token: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"}


def write_record(folder: Path, **status: Any) -> None:
    with RecordWriter(folder / RECORD_FILE) as record:
        record.status(model="tiny", began=1000.0, steps=3, step=0, **status)
        record.episode(episode("e-1"))


def pages(run: Path) -> list[psutil.Process]:
    """The processes of this run's page."""
    children = psutil.Process().children(recursive=True)
    return [each for each in named(children, "--run-dir") if str(run) in each.cmdline()]


async def fleet(setup: Setup) -> FleetResponse:
    reply = await setup.http.get("/fleet", headers=setup.member)
    assert reply.status_code == 200, reply.text
    return FleetResponse.model_validate_json(reply.text)


# Fleet


async def test_the_fleet_has_claims_clients_and_failures(setup: Setup) -> None:
    setup.link.set_status(policy_version=4, global_step=3, engine_status="ENGINE.ROLLING")
    await setup.link.register([*new_episodes("a", "b", "c"), new_episode("d", "eval")])
    for client in ("ann", "bob", "ann"):
        assert (await setup.claim(client, episode_type="train", allow_discard_timeout=30)).success
    found = await fleet(setup)
    assert (found.engine_status, found.policy_version, found.global_step) == ("ENGINE.ROLLING", 4, 3)
    assert (found.trainer_connected, found.run_finished, found.failure) == (True, False, "")
    assert (found.episodes["train"].claimed, found.episodes["eval"].registered) == (3, 1)
    assert [(c.episode_uuid, c.client_uuid, c.attempt) for c in found.claims] == [
        *(("a", "ann", 1), ("b", "bob", 1), ("c", "ann", 1))
    ]
    claim = found.claims[0]
    assert (claim.group_id, claim.policy_version, claim.calls_in_flight) == ("g", 4, 0)
    assert 0 < claim.lease_left_s <= 30
    assert 0 <= claim.age_s < 30
    assert [(c.client_uuid, c.claims, c.quarantined) for c in found.clients] == [
        ("ann", 2, ""),
        ("bob", 1, ""),
    ]
    for attempt in range(1, 4):
        if attempt > 1:
            assert (await setup.claim("ann", episode_type="train")).episode_uuid == "a"
        await setup.post(
            "/abort_episode",
            episode_uuid="a",
            attempt=attempt,
            failure={"kind": "bad", "message": "x" * 3000},
        )
    found = await fleet(setup)
    (dead,) = found.failed
    assert (dead.episode_uuid, len(dead.failures), dead.acknowledged) == ("a", 3, False)
    assert {len(each.message) for each in dead.failures} == {2000}
    assert dead.can_retry == (not dead.why_not)
    assert [each.episode_uuid for each in found.claims] == ["b", "c"]
    assert found.totals.model_dump() == {
        "claims": 2,
        "clients": 2,
        "quarantined": 0,
        "failed": 1,
    }


async def test_the_fleet_is_for_the_admin(closed: Setup) -> None:
    assert (await closed.http.get("/fleet")).status_code == 401
    assert (await closed.http.get("/fleet", headers=bearer(TOKENS[CLIENT_TOKEN]))).status_code == 403
    assert (await fleet(closed)).totals.claims == 0


# Trying the model


async def test_a_model_can_be_tried_and_nothing_is_recorded(setup: Setup) -> None:
    await setup.link.register([new_episode("a")])
    key = bearer("none")
    body = {**SAY, "return_token_ids": True}
    reply = await setup.http.post("/try/v1/chat/completions", json=body, headers=key)
    assert reply.status_code == 200, reply.text
    assert reply.json()["choices"][0]["token_ids"][:2] == [72, 105]
    assert setup.sampler.requests[-1].seed is not None, "the run's own seeds stay as they are"
    reply = await setup.http.post("/try/v1/chat/completions", json={**SAY, "seed": 7}, headers=key)
    assert setup.sampler.requests[-1].seed == 7
    assert await setup.metric("tinkerscript_model_calls_total") == 0
    assert stored_outcomes(setup.run_dir / "server.sqlite") == {"a": "registered"}
    assert (await setup.http.post("/try/v1/completions", json={}, headers=key)).status_code == 404


async def test_trying_the_model_takes_the_admin_token(closed: Setup) -> None:
    for headers in ({}, bearer("none"), bearer(TOKENS[CLIENT_TOKEN])):
        reply = await closed.http.post("/try/v1/chat/completions", json=SAY, headers=headers)
        assert (reply.status_code, "error" in reply.json()) == (401, True)
    assert not closed.sampler.requests
    headers = bearer(TOKENS[ADMIN_TOKEN])
    reply = await closed.http.post("/try/v1/chat/completions", json=SAY, headers=headers)
    assert reply.status_code == 200, reply.text


# The page


async def test_the_page_is_at_the_servers_address(setup: Setup) -> None:
    write_record(setup.run_dir)
    assert (await setup.http.get("/health")).status_code == 200
    assert not pages(setup.run_dir), "a page that nobody opens costs nothing"
    replies = await asyncio.gather(*(setup.http.get("/api/runs") for _ in range(4)))
    assert [[run["name"] for run in reply.json()["runs"]] for reply in replies] == [["run"]] * 4
    assert len(pages(setup.run_dir)) == 1, "one for all"
    index = await setup.http.get("/")
    assert (index.status_code, index.headers["content-type"]) == (200, "text/html; charset=utf-8")
    assert "script-src 'self'" in index.headers["content-security-policy"]
    assert (await setup.http.get("/page/style.css")).headers["content-type"].startswith("text/css")
    assert (await setup.http.get("/favicon.ico")).status_code == 200
    assert (await setup.http.head("/")).content == b""
    assert (await setup.http.get("/api/runs/none")).status_code == 404
    found = await setup.http.get("/api/runs/run/search", params={"q": "reply e-1"})
    assert [each["uuid"] for each in found.json()["episodes"]] == ["e-1"], "the query travels too"
    fleet = await setup.http.get("/api/runs/run/fleet")
    assert fleet.json()["engine_status"] == "ENGINE.ROLLING", fleet.text
    body = {"messages": SAY["messages"]}
    tried = await setup.http.post("/api/runs/run/chat", json=body, headers={"Origin": setup.url})
    assert tried.status_code == 200, tried.text
    assert [token["id"] for token in tried.json()["tokens"]][:2] == [72, 105]


async def test_the_page_refuses_other_sites(setup: Setup) -> None:
    elsewhere = await setup.http.get("/api/runs", headers={"Host": "rebound.example"})
    assert elsewhere.status_code == 403
    origin = {"Origin": "https://evil.example"}
    assert (await setup.http.post("/api/login", json={"token": ""}, headers=origin)).status_code == 403


async def test_the_page_takes_the_servers_own_admin_token(closed: Setup) -> None:
    write_record(closed.run_dir)
    assert (await closed.http.get("/")).status_code == 200, "the login form"
    assert (await closed.http.get("/api/runs")).status_code == 401
    assert (await closed.http.get("/api/runs", headers=bearer(TOKENS[CLIENT_TOKEN]))).status_code == 401
    assert (await closed.http.get("/api/runs", headers=closed.member)).status_code == 200
    origin = {"Origin": closed.url}
    entered = await closed.http.post("/api/login", json={"token": TOKENS[ADMIN_TOKEN]}, headers=origin)
    assert entered.json() == {"needed": True, "entered": True}
    assert (await closed.http.get("/api/runs")).status_code == 200, "with the cookie"
    assert (await closed.http.get("/get_engine_status")).status_code == 401, "which opens the page alone"


async def test_events_stream_until_the_browser_goes(setup: Setup) -> None:
    write_record(setup.run_dir)
    async with setup.http.stream("GET", "/api/runs/run/events") as events:
        assert events.headers["content-type"].startswith("text/event-stream")
        lines = events.aiter_lines()
        assert await anext(lines) == "event: run"
        (page,) = pages(setup.run_dir)
        assert connections(page) == 1
    await until(lambda: connections(page) == 0, "the end of the page's stream")


async def ended(lines: AsyncIterator[str]) -> None:
    """Return when the stream breaks off."""
    with pytest.raises(httpx.RemoteProtocolError):
        async for _ in lines:
            pass


def connections(page: psutil.Process) -> int:
    """Connections at the page's socket that are being answered."""
    return (
        sum(each.laddr.endswith("page.sock") and each.status == psutil.CONN_NONE for each in unix(page)) - 1
    )


def unix(page: psutil.Process) -> list[Any]:
    return [each for each in page.net_connections(kind="unix") if isinstance(each.laddr, str)]


async def test_a_page_that_is_killed_comes_back(setup: Setup, caplog: pytest.LogCaptureFixture) -> None:
    write_record(setup.run_dir)
    assert (await setup.http.get("/api/runs")).status_code == 200
    async with setup.http.stream("GET", "/api/runs/run/events") as events:
        lines = events.aiter_lines()
        assert await anext(lines) == "event: run"
        (page,) = pages(setup.run_dir)
        page.send_signal(signal.SIGKILL)
        await ended(lines)
    assert [each.message for each in caplog.records if "broke_off" in each.message]
    assert not [each.message for each in caplog.records if each.name.startswith("uvicorn")]
    assert (await setup.http.get("/api/runs")).status_code == 200
    (again,) = pages(setup.run_dir)
    assert again.pid != page.pid


async def test_a_page_that_nobody_visits_ends_and_comes_back(
    setup: Setup, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = functools.partial(page_proxy.start_page, setup.run_dir, "--idle-s", "0.5")
    monkeypatch.setattr(page_proxy, "start_page", lambda _, *options, **more: start(*options, **more))
    write_record(setup.run_dir)
    async with setup.http.stream("GET", "/api/runs/run/events") as events:
        lines = events.aiter_lines()
        assert await anext(lines) == "event: run"
        (page,) = pages(setup.run_dir)
        await asyncio.sleep(1.0)  # Longer than it stays without a visit.
        assert page.is_running(), "somebody looks at it"
    await until(lambda: not page.is_running(), "the end of the page")
    assert (await setup.http.get("/api/runs")).status_code == 200
    (again,) = pages(setup.run_dir)
    assert again.pid != page.pid


async def test_a_page_that_cannot_start_says_why(setup: Setup) -> None:
    (setup.run_dir / "page.sock").mkdir()
    reply = await setup.http.get("/")
    assert (reply.status_code, reply.headers["retry-after"]) == (503, "1")
    assert f"{setup.run_dir / 'logs' / 'page.log'}" in reply.json()["failure_reason"]
    assert (await setup.http.get("/health")).status_code == 200
    assert not pages(setup.run_dir)


async def test_the_page_ends_with_its_server(tmp_path: Path, byte_model: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    write_record(run)
    loop = asyncio.get_running_loop()
    async with httpx.AsyncClient(timeout=30) as http:
        async with serving(run, byte_model) as setup:
            request = http.build_request("GET", f"{setup.url}/api/runs/run/events")
            events = await http.send(request, stream=True)
            lines = events.aiter_lines()
            assert await anext(lines) == "event: run"
            (page,) = pages(run)
            began = loop.time()
        assert loop.time() - began < 4, "the supervisor's patience"
        assert "" in [line async for line in lines], "the stream ended in order"
    assert not page.is_running()
    assert not (run / "page.sock").exists()


async def test_no_page_survives_its_server(tmp_path: Path, commands: None) -> None:
    config = {
        "experiment_dir": "run",
        "interchange_server": {"interchange_server_port": 0},
        "engine": {"model": "tiny"},
        "evaluation": {"episodes": 0},
        "workers": {"count": 0},
    }
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))
    command = start(tmp_path, "serve", "config.yaml")
    command.until(lambda: "watch it" in command.text())
    run = tmp_path / "run"
    write_record(run)
    info = json.loads((run / "server.json").read_text())
    async with httpx.AsyncClient(base_url=info["url"], timeout=30) as http:
        assert (await http.get("/api/runs")).status_code == 200
        (page,) = page_of(command)
        os.kill(info["pid"], signal.SIGKILL)
        await until(lambda: not page.is_running(), "the end of the page")
        await until(lambda: json.loads((run / "server.json").read_text())["pid"] != info["pid"])
        assert (await http.get("/api/runs")).status_code == 200, "the server and its page are back"
        (page,) = page_of(command)
        command.process.kill()
        await until(lambda: not page.is_running(), "the end of the page")
    command.wait(seconds=10)


def page_of(command: Command) -> list[psutil.Process]:
    return named(command.family(), "tinkerscript page --run-dir")


# Without a server


async def test_a_run_without_a_server_has_a_page_once_somebody_asks(tmp_path: Path) -> None:
    run, notes = tmp_path / "run", list[str]()
    run.mkdir()
    write_record(run)
    async with (
        page_door(run, notes.append, pause_s=0.0) as url,
        httpx.AsyncClient(base_url=url, timeout=30) as http,
    ):
        await asyncio.sleep(0)
        assert not pages(run)
        assert [each["name"] for each in (await http.get("/api/runs")).json()["runs"]] == ["run"]
        (page,) = pages(run)
        page.send_signal(signal.SIGKILL)
        await until(lambda: not page.is_running(), "the end of the page")
        assert (await http.get("/api/runs")).status_code == 200
        (page,) = pages(run)
    assert not page.is_running()
    assert not notes
    async with httpx.AsyncClient() as http:
        with pytest.raises(httpx.ConnectError):
            await http.get(url)


async def test_pages_that_end_because_nobody_comes_are_not_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, notes, started = tmp_path / "run", list[str](), list[Any]()
    run.mkdir()
    write_record(run)

    async def idle_soon(*arguments: Any, **more: Any) -> Any:
        started.append(await start_page(*arguments, "--idle-s", "1", **more))
        return started[-1]

    monkeypatch.setattr("tinkerscript.processes.page_door.start_page", idle_soon)
    monkeypatch.setattr("tinkerscript.processes.page_door.MAX_QUICK_DEATHS", 1)
    async with page_door(run, notes.append, pause_s=0.0) as url, httpx.AsyncClient(timeout=30) as http:
        for visit in range(2):
            assert (await http.get(f"{url}/api/runs")).status_code == 200, visit
            await until(lambda: started[-1].returncode is not None, "the end of the page")
    assert not notes
    assert {page.returncode for page in started[:-1]} == {0}


async def test_a_page_that_cannot_run_is_given_up_and_the_run_goes_on(tmp_path: Path) -> None:
    run, notes = tmp_path / "run", list[str]()
    (run / "logs" / "page.log").mkdir(parents=True)
    async with page_door(run, notes.append, pause_s=0.0) as url, httpx.AsyncClient() as http:
        with pytest.raises(httpx.TransportError):
            await http.get(url, timeout=30)
        await until(lambda: bool(notes), "the note")
    assert len(notes) == 1
    assert "stays away" in notes[0]


async def test_another_port_is_taken_if_the_usual_one_is_in_use(tmp_path: Path) -> None:
    async with page_door(tmp_path, print) as first, page_door(tmp_path, print) as second:
        assert first != second
        assert {url.rpartition(":")[0] for url in (first, second)} == {"http://127.0.0.1"}


# `tinkerscript view`


async def test_view_shows_the_runs_of_a_folder(tmp_path: Path, commands: None) -> None:
    for name in ("one", "two"):
        (tmp_path / "runs" / name).mkdir(parents=True)
        write_record(tmp_path / "runs" / name)
    command = start(tmp_path, "view", "--port", "0")
    command.until(lambda: "\n" in command.text())
    url = command.text().splitlines()[0]
    async with httpx.AsyncClient(base_url=url, timeout=30) as http:
        reply = await http.get("/api/runs")
        assert {each["name"] for each in reply.json()["runs"]} == {"one", "two"}
        fleet = await http.get("/api/runs/one/fleet")
        assert (fleet.status_code, "no server" in fleet.json()["failure_reason"]) == (404, True)
        async with http.stream("GET", "/api/runs/one/events") as events:
            assert await anext(events.aiter_lines()) == "event: run"
            command.process.send_signal(signal.SIGINT)
            assert await asyncio.to_thread(command.process.wait, 5) == 130
    assert command.text().splitlines() == [url, "stopped"]


async def test_view_of_one_run_and_a_port_in_use(tmp_path: Path, commands: None) -> None:
    write_record(tmp_path)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        refused = start(tmp_path, "view", ".", "--port", str(port))
        assert refused.wait(seconds=30) == 2
    assert refused.text() == f"error: cannot listen on 127.0.0.1 port {port}: Address already in use\n"
    command = start(tmp_path, "view", ".", "--port", str(port))
    command.until(lambda: "\n" in command.text())
    assert command.text() == f"http://127.0.0.1:{port}\n"
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=30) as http:
        reply = await http.get("/api/runs")
    assert [each["name"] for each in reply.json()["runs"]] == [tmp_path.name]
