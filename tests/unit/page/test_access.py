"""Who may see the page: hosts, origins, tokens and cookies, through the app itself."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest

from clock import Clock
from tinkerscript.page.access import CONTENT_POLICY, HEADERS, SESSION_S, PageSessions
from tinkerscript.page.web_app import create_page
from written_run import WrittenRun

TOKEN = "the-admin-token-of-this-test"


@pytest.fixture(autouse=True)
def run(tmp_path: Path) -> Iterator[Path]:
    """The folder of a run with one episode."""
    with WrittenRun(tmp_path / "runs" / "one", seed=1) as run:
        run.status(state="finished", began=5.0)
        run.episode("e1")
        yield run.folder


@asynccontextmanager
async def page(
    tmp_path: Path, *, token: str | None = None, host: str = "localhost:8000", scheme: str = "http"
) -> AsyncGenerator[httpx.AsyncClient]:
    app = create_page(tmp_path / "runs", admin_token=token)
    transport = httpx.ASGITransport(app=app)
    async with httpx.AsyncClient(transport=transport, base_url=f"{scheme}://{host}") as client:
        yield client


# Without a token: by a loopback name alone


@pytest.mark.parametrize("host", ["localhost", "localhost:8000", "127.0.0.1:80", "[::1]:8000", "LOCALHOST"])
async def test_without_a_token_the_page_answers_to_loopback_names(tmp_path: Path, host: str) -> None:
    async with page(tmp_path) as client:
        reply = await client.get("/api/runs", headers={"host": host})
    assert reply.status_code == 200
    assert [run["name"] for run in reply.json()["runs"]] == ["one"]


@pytest.mark.parametrize(
    "host",
    [
        "evil.example",
        "localhost.evil.example",
        "10.0.0.1",
        "127.0.0.1.evil.example:80",
        "",
        "[",
        "a@localhost:1@b",
    ],
)
@pytest.mark.parametrize("path", ["/", "/api/runs", "/api/login", "/page/style.css"])
async def test_without_a_token_no_other_name_gets_anything(tmp_path: Path, host: str, path: str) -> None:
    async with page(tmp_path) as client:
        reply = await client.get(path, headers={"host": host})
    assert reply.status_code == 403
    assert reply.json()["success"] is False
    assert "answers to localhost, 127.0.0.1 and ::1 only" in reply.json()["failure_reason"]


# Other sites


@pytest.mark.parametrize(
    ("origin", "status"),
    [
        ("http://localhost:8000", 200),
        (None, 200),
        ("http://evil.example", 403),
        ("http://localhost:8001", 403),
        ("http://localhost", 403),
        ("null", 403),
        ("", 403),
        ("http://[", 403),
    ],
)
async def test_only_the_page_itself_may_change_something(
    tmp_path: Path, origin: str | None, status: int
) -> None:
    async with page(tmp_path) as client:
        headers = {"origin": origin} if origin is not None else {}
        reply = await client.post("/api/logout", headers=headers)
        assert reply.status_code == status
        read = await client.get("/api/runs", headers=headers)
        assert read.status_code == 200, "what changes nothing needs no origin, and is unreadable elsewhere"
        assert "access-control-allow-origin" not in read.headers


async def test_the_origin_of_a_page_behind_a_proxy_is_the_proxys(tmp_path: Path) -> None:
    async with page(tmp_path, host="localhost:8000") as client:
        for origin, status in (("https://train.example", 200), ("http://localhost:8000", 403)):
            headers = {"origin": origin, "x-forwarded-host": "train.example"}
            assert (await client.post("/api/logout", headers=headers)).status_code == status


async def test_a_browser_that_says_so_is_the_page_itself(tmp_path: Path) -> None:
    """A proxy that hides its own name cannot hide this header, which no script can set."""
    async with page(tmp_path) as client:
        for site, status in (("same-origin", 200), ("same-site", 403), ("cross-site", 403), ("none", 403)):
            headers = {"origin": "https://train.example", "sec-fetch-site": site}
            assert (await client.post("/api/logout", headers=headers)).status_code == status, site


# With a token

CLOSED = [
    *("/api/runs", "/api/runs/one", "/api/runs/one/events", "/api/runs/one/config", "/api/runs/one/steps/1"),
    *("/api/episodes/e1", "/api/episodes/e1/tokens", "/api/openapi.json", "/api/config-differences?run=one"),
    *("/docs", "/nothing", "/api/loginx", "/page"),
]


@pytest.mark.parametrize("path", CLOSED)
async def test_nothing_is_answered_without_the_token(tmp_path: Path, path: str) -> None:
    async with page(tmp_path, token=TOKEN) as client:
        for headers in (
            {},
            {"authorization": "Bearer wrong"},
            {"authorization": TOKEN},
            {"authorization": f"Basic {TOKEN}"},
            {"authorization": "Bearer "},
            {"cookie": f"{PageSessions(TOKEN).cookie_name}={TOKEN}"},
            {"cookie": f"{PageSessions(TOKEN).cookie_name}="},
            {"cookie": "=;;,\x7f"},
        ):
            reply = await client.get(path, headers=headers)
            assert reply.status_code == 401, headers
            assert reply.headers["www-authenticate"] == "Bearer"
            assert "one" not in reply.text.replace("none", "")
        assert (await client.get(f"{path}{'&' if '?' in path else '?'}token={TOKEN}")).status_code == 401


@pytest.mark.parametrize("path", ["/", "/page/style.css", "/favicon.ico", "/api/session"])
async def test_the_login_form_needs_no_token(tmp_path: Path, path: str) -> None:
    async with page(tmp_path, token=TOKEN) as client:
        reply = await client.get(path)
    assert reply.status_code == 200
    assert TOKEN not in reply.text


async def test_static_files_stay_within_their_folder(tmp_path: Path) -> None:
    async with page(tmp_path, token=TOKEN) as client:
        for path in ("/page/../access.py", "/page/%2e%2e/access.py", "/page/..%2faccess.py"):
            assert (await client.get(path)).status_code in (401, 404), path


async def test_a_login_gives_a_cookie_that_opens_the_api(tmp_path: Path) -> None:
    async with page(tmp_path, token=TOKEN) as client:
        assert (await client.get("/api/session")).json() == {"needed": True, "entered": False}
        reply = await client.post("/api/login", json={"token": TOKEN})
        assert (reply.status_code, reply.json()) == (200, {"needed": True, "entered": True})
        cookie = reply.headers["set-cookie"]
        assert cookie.startswith(f"{PageSessions(TOKEN).cookie_name}=")
        assert TOKEN not in cookie
        attributes = {part.strip().lower() for part in cookie.split(";")[1:]}
        assert {"httponly", "samesite=strict", f"max-age={SESSION_S}"} <= attributes
        assert "path" not in cookie.lower(), "it is that of /api, behind whichever prefix"
        assert "secure" not in attributes
        assert (await client.get("/api/runs")).status_code == 200
        assert (await client.get("/api/session")).json() == {"needed": True, "entered": True}
        await client.post("/api/logout")
        assert (await client.get("/api/runs")).status_code == 401


@pytest.mark.parametrize(("scheme", "headers"), [("https", {}), ("http", {"x-forwarded-proto": "https"})])
async def test_over_https_the_cookie_stays_there(
    tmp_path: Path, scheme: str, headers: dict[str, str]
) -> None:
    async with page(tmp_path, token=TOKEN, scheme=scheme) as client:
        reply = await client.post("/api/login", json={"token": TOKEN}, headers=headers)
    assert "; secure" in reply.headers["set-cookie"].lower()


async def test_a_wrong_token_gives_no_cookie_after_a_pause(tmp_path: Path) -> None:
    async with page(tmp_path, token=TOKEN) as client:
        began = time.monotonic()
        reply = await client.post("/api/login", json={"token": TOKEN[:-1]})
        assert time.monotonic() - began >= 0.5
        assert (reply.status_code, reply.json()["entered"]) == (401, False)
        assert "set-cookie" not in reply.headers
        assert (await client.get("/api/runs")).status_code == 401


async def test_a_token_with_half_a_character_is_refused_by_name(tmp_path: Path) -> None:
    async with page(tmp_path, token=TOKEN) as client:
        body, headers = b'{"token": "\\ud800"}', {"Content-Type": "application/json"}
        reply = await client.post("/api/login", content=body, headers=headers)
    assert (reply.status_code, "not Unicode text" in reply.text) == (400, True)


def test_a_cookie_ends_and_cannot_be_forged(clock: Clock) -> None:
    sessions = PageSessions(TOKEN, clock=clock)
    cookie = sessions.cookie()
    assert sessions.is_valid(cookie)
    assert sessions.cookie() != cookie
    expires, salt, mac = cookie.split(".")
    later = str(int(expires) + 1)
    other = "0" if mac[-1] != "0" else "1"
    for forged in (
        f"{later}.{salt}.{mac}",
        f"{expires}.{salt}x.{mac}",
        f"{expires}.{salt}.{mac[:-1]}{other}",
        f"{expires}.{salt}.",
        f"{expires}.{mac}",
        PageSessions("another token", clock=clock).cookie(),
        PageSessions(None, clock=clock).cookie(),
        mac,
        "",
        ".",
        "..",
        "é.é.é",
    ):
        assert not sessions.is_valid(forged), forged
    clock.now += SESSION_S - 1
    assert sessions.is_valid(cookie)
    clock.now += 2
    assert not sessions.is_valid(cookie)


# What confines the page


@pytest.mark.parametrize("path", ["/", "/api/runs", "/page/style.css", "/api/runs/none", "/nowhere"])
@pytest.mark.parametrize("token", [None, TOKEN])
async def test_every_reply_is_confined(tmp_path: Path, path: str, token: str | None) -> None:
    async with page(tmp_path, token=token) as client:
        reply = await client.get(path)
    for name, value in HEADERS.items():
        assert reply.headers[name] == value, name


def test_the_policy_lets_no_other_sites_script_run() -> None:
    rules = dict(rule.strip().split(" ", 1) for rule in CONTENT_POLICY.split(";"))
    assert rules["default-src"] == "'none'"
    assert rules["script-src"] == rules["style-src"] == rules["connect-src"] == "'self'"
    assert rules["base-uri"] == "'none'"
    assert "unsafe" not in CONTENT_POLICY
    assert "*" not in CONTENT_POLICY


# The API by its addresses


@pytest.mark.parametrize(
    ("path", "status", "reason"),
    [
        ("/api/runs/two", 404, "no run 'two' here; the runs here are one"),
        ("/api/runs/one/steps/7", 404, "no step 7 yet"),
        ("/api/runs/one/comparison", 404, "not been evaluated"),
        ("/api/runs/one/samples/9", 404, "'9' is not the digest of a sample"),
        ("/api/runs/one/samples/99", 404, "no sample '99'"),
        ("/api/episodes/nope", 404, "no run here has an episode 'nope'"),
        ("/api/episodes/e1/tokens?sequence=5", 404, "has 1 sequences"),
        ("/api/runs/one/search?q=reward%3Emuch", 404, "is not a number"),
        ("/api/runs/one/fleet", 404, "this run has no server"),
        ("/api/runs/one/episodes?limit=1000", 422, None),
        ("/api/runs/one/episodes?show=odd", 422, None),
        ("/api/runs/one/curves", 422, None),
    ],
)
async def test_what_is_not_there_is_named(tmp_path: Path, path: str, status: int, reason: str | None) -> None:
    async with page(tmp_path) as client:
        reply = await client.get(path)
    assert reply.status_code == status
    if reason is not None:
        assert reason in reply.json()["failure_reason"]
