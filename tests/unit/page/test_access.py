"""Who may see the page: hosts, origins, tokens and cookies, through the app itself."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from clock import Clock
from page_client import page
from tinkerscript.page.access import CONTENT_POLICY, HEADERS, SESSION_S, PageSessions
from written_run import WrittenRun

TOKEN = "the-admin-token-of-this-test"


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """A folder with one run, which has one episode."""
    with WrittenRun(tmp_path / "one", seed=1) as run:
        run.status(state="finished", began=5.0)
        run.episode("e1")
    return tmp_path


# Without a token: by a loopback name alone


@pytest.mark.parametrize("host", ["localhost", "localhost:8000", "127.0.0.1:80", "[::1]:8000", "LOCALHOST"])
async def test_without_a_token_the_page_answers_to_loopback_names(runs: Path, host: str) -> None:
    async with page(runs) as client:
        reply = await client.get("/api/runs", headers={"host": host})
    assert reply.status_code == 200
    assert [run["name"] for run in reply.json()["runs"]] == ["one"]


FOREIGN = "evil.example localhost.evil.example 127.0.0.1.evil.example:80 10.0.0.1 [ a@localhost:1@b"


@pytest.mark.parametrize("path", ["/", "/api/runs", "/api/login", "/page/style.css"])
async def test_without_a_token_no_other_name_gets_anything(runs: Path, path: str) -> None:
    async with page(runs) as client:
        for host in (*FOREIGN.split(), ""):
            reply = await client.get(path, headers={"host": host})
            assert reply.status_code == 403, host
            assert "answers to localhost, 127.0.0.1 and ::1 only" in reply.json()["failure_reason"]


# Other sites


OTHERS = ("http://evil.example", "http://localhost:8001", "http://localhost", "null", "", "http://[")


async def test_only_the_page_itself_may_change_something(runs: Path) -> None:
    async with page(runs) as client:
        for headers in ({}, {"origin": "http://localhost:8000"}):
            assert (await client.post("/api/logout", headers=headers)).status_code == 200
        for origin in OTHERS:
            headers = {"origin": origin}
            assert (await client.post("/api/logout", headers=headers)).status_code == 403, origin
            read = await client.get("/api/runs", headers=headers)
            assert read.status_code == 200, "what changes nothing is unreadable elsewhere"
            assert "access-control-allow-origin" not in read.headers


async def test_the_origin_of_a_page_behind_a_proxy_is_the_proxys(runs: Path) -> None:
    async with page(runs) as client:
        for origin, status in (("https://train.example", 200), ("http://localhost:8000", 403)):
            headers = {"origin": origin, "x-forwarded-host": "train.example"}
            assert (await client.post("/api/logout", headers=headers)).status_code == status


async def test_a_browser_that_says_so_is_the_page_itself(runs: Path) -> None:
    """A proxy that hides its own name cannot hide this header, which no script can set."""
    async with page(runs) as client:
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
async def test_nothing_is_answered_without_the_token(runs: Path, path: str) -> None:
    cookie = PageSessions(TOKEN).cookie_name
    tried = [("authorization", each) for each in ("", "Bearer wrong", TOKEN, f"Basic {TOKEN}", "Bearer ")]
    tried += [("cookie", each) for each in (f"{cookie}={TOKEN}", f"{cookie}=", "=;;,\x7f")]
    async with page(runs, TOKEN) as client:
        for name, value in tried:
            reply = await client.get(path, headers={name: value})
            assert reply.status_code == 401, value
            assert reply.headers["www-authenticate"] == "Bearer"
            assert "one" not in reply.text.replace("none", "")
        assert (await client.get(f"{path}{'&' if '?' in path else '?'}token={TOKEN}")).status_code == 401


@pytest.mark.parametrize("path", ["/", "/page/style.css", "/favicon.ico", "/api/session"])
async def test_the_login_form_needs_no_token(runs: Path, path: str) -> None:
    async with page(runs, TOKEN) as client:
        reply = await client.get(path)
    assert reply.status_code == 200
    assert TOKEN not in reply.text


async def test_static_files_stay_within_their_folder(runs: Path) -> None:
    async with page(runs, TOKEN) as client:
        for path in ("/page/../access.py", "/page/%2e%2e/access.py", "/page/..%2faccess.py"):
            assert (await client.get(path)).status_code in (401, 404), path


async def test_a_login_gives_a_cookie_that_opens_the_api(runs: Path) -> None:
    async with page(runs, TOKEN) as client:
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
async def test_over_https_the_cookie_stays_there(runs: Path, scheme: str, headers: dict[str, str]) -> None:
    async with page(runs, TOKEN, scheme=scheme) as client:
        reply = await client.post("/api/login", json={"token": TOKEN}, headers=headers)
    assert "; secure" in reply.headers["set-cookie"].lower()


async def test_a_wrong_token_gives_no_cookie_after_a_pause(runs: Path) -> None:
    async with page(runs, TOKEN) as client:
        began = time.monotonic()
        reply = await client.post("/api/login", json={"token": TOKEN[:-1]})
        assert time.monotonic() - began >= 0.5
        assert (reply.status_code, reply.json()["entered"]) == (401, False)
        assert "set-cookie" not in reply.headers
        assert (await client.get("/api/runs")).status_code == 401


async def test_a_token_with_half_a_character_is_refused_by_name(runs: Path) -> None:
    async with page(runs, TOKEN) as client:
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
    changed = [f"{later}.{salt}.{mac}", f"{expires}.{salt}x.{mac}", f"{expires}.{salt}.{mac[:-1]}{other}"]
    others = [PageSessions(token, clock=clock).cookie() for token in ("another token", None)]
    for forged in (*changed, *others, f"{expires}.{salt}.", f"{expires}.{mac}", mac, "", ".", "..", "é.é.é"):
        assert not sessions.is_valid(forged), forged
    clock.now += SESSION_S - 1
    assert sessions.is_valid(cookie)
    clock.now += 2
    assert not sessions.is_valid(cookie)


# What confines the page


@pytest.mark.parametrize("path", ["/", "/api/runs", "/page/style.css", "/api/runs/none", "/nowhere"])
@pytest.mark.parametrize("token", [None, TOKEN])
async def test_every_reply_is_confined(runs: Path, path: str, token: str | None) -> None:
    async with page(runs, token) as client:
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
        ("runs/two", 404, "no run 'two' here; the runs here are one"),
        ("runs/one/steps/7", 404, "no step 7 yet"),
        ("runs/one/comparison", 404, "not been evaluated"),
        ("episodes/e1/tokens?sequence=5", 404, "has 1 sequences"),
        ("runs/one/search?q=reward%3Emuch", 404, "is not a number"),
        ("runs/one/fleet", 404, "this run has no server"),
        ("runs/one/episodes?limit=1000", 422, "limit"),
        ("runs/one/episodes?show=odd", 422, "show"),
    ],
)
async def test_what_is_not_there_is_named(runs: Path, path: str, status: int, reason: str) -> None:
    async with page(runs) as client:
        reply = await client.get(f"/api/{path}")
    assert reply.status_code == status
    assert reason in reply.json()["failure_reason"]
