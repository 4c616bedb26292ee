"""Two pages behind one HTTPS proxy, each below a prefix of its own."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml
from browsing import Tab, url_of
from playwright.sync_api import Browser, BrowserContext, Page, expect
from prefix_proxy import PrefixProxy, prefix_proxy

from command_line import start
from made_run import MadeRun
from tinkerscript.record.schema import RECORD_FILE
from tinkerscript.record.writer import RecordWriter

TOKENS = {"run1": "the-admin-token-of-run-1", "run2": "the-admin-token-of-run-2"}


@dataclass
class Behind:
    url: str
    """Of the proxy."""

    proxy: PrefixProxy
    run: Path
    """Folder of the run of the interchange server."""


@pytest.fixture
def behind(tmp_path: Path) -> Iterator[Behind]:
    config = {
        "experiment_dir": "run1",
        "interchange_server": {"interchange_server_port": 0},
        "engine": {"model": "tiny"},
        "evaluation": {"episodes": 0},
        "workers": {"count": 0},
    }
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))
    server = start(tmp_path, "serve", "config.yaml", env=tokens("run1"))
    server.until(lambda: "interchange server at" in server.text())
    made = MadeRun(tmp_path / "made", steps=4, groups=2, group_size=4, evaluation_samples=4, state="running")
    made.write()
    (tmp_path / "made" / RECORD_FILE).rename(tmp_path / "run1" / RECORD_FILE)
    MadeRun(tmp_path / "run2", seed=2, steps=4, groups=2, group_size=4, evaluation_samples=4).write()
    views = {
        run: start(tmp_path, "view", run, "--port", "0", env=tokens(run), output=f"{run}.txt")
        for run in TOKENS
    }
    with prefix_proxy(tmp_path) as (url, proxy):
        for run, view in views.items():
            proxy.targets[f"/team/{run}/"] = url_of(view).removeprefix("http://")
        yield Behind(url, proxy, tmp_path / "run1")


def tokens(name: str) -> dict[str, str]:
    return {
        **os.environ,
        "TINKERSCRIPT_ADMIN_TOKEN": TOKENS[name],
        "TINKERSCRIPT_CLIENT_TOKEN": f"client-{TOKENS[name]}",
    }


@pytest.fixture
def context(browser: Browser) -> Iterator[BrowserContext]:
    found = browser.new_context(ignore_https_errors=True)
    found.set_default_timeout(20_000)
    yield found
    found.close()


def log_in(page: Page, token: str) -> None:
    page.get_by_label("Admin token").fill(token)
    page.get_by_role("button", name="Log in").click()


def test_two_pages_behind_one_proxy(context: BrowserContext, behind: Behind) -> None:
    tab = Tab(context.new_page())
    tab.watch(behind.url)
    page, first, second = tab.page, f"{behind.url}/team/run1/", f"{behind.url}/team/run2/"
    page.goto(first.rstrip("/"))
    assert page.url == first, "the proxy adds the slash"
    log_in(page, TOKENS["run1"])
    expect(page.get_by_text("4 of 4 steps")).to_be_visible()
    (cookie,) = context.cookies()
    assert (cookie["path"], cookie["secure"], cookie["httpOnly"]) == ("/team/run1/api", True, True)
    # Events come through while the reply goes on.
    expect(page.get_by_text("running").first).to_be_visible()
    page.evaluate("window.sameDocument = true")
    with RecordWriter(behind.run / RECORD_FILE) as record:
        record.status(state="finished")
    expect(page.get_by_text("finished").first).to_be_visible()
    assert page.evaluate("window.sameDocument") is True
    # A link opens the same place.
    page.get_by_role("navigation", name="Places").get_by_role("link", name="Steps").click()
    page.get_by_role("link", name="step 3", exact=True).click()
    expect(page.get_by_role("heading", name="Step 3")).to_be_visible()
    link = page.url
    assert link.startswith(f"{first}#/run/run1/steps/3")
    # The other page has a login of its own, and neither ends the other's.
    page.goto(second)
    log_in(page, TOKENS["run2"])
    expect(page.get_by_text("4 of 4 steps")).to_be_visible()
    assert {each["path"] for each in context.cookies()} == {"/team/run1/api", "/team/run2/api"}
    page.goto(link)
    expect(page.get_by_role("heading", name="Step 3")).to_be_visible()
    # What changes something is accepted from the page, and from no other site.
    drop, body = f"{first}api/runs/run1/failed_episodes/drop", {"episode_uuids": ["nobody"]}
    for origin, status in (("https://evil.example", 403), (behind.url, 200)):
        reply = context.request.post(drop, data=body, headers={"origin": origin})
        assert reply.status == status
    # The documentation of both APIs.
    page.goto(f"{first}docs")
    page.get_by_role("link", name="Interchange server").click()
    expect(page.get_by_text("/claim_episode", exact=True)).to_be_visible()
    described = page.get_by_role("link", name="OpenAPI description")
    assert described.evaluate("link => link.href") == f"{first}api/server-openapi.json"
    assert not behind.proxy.strays
    assert not tab.problems
