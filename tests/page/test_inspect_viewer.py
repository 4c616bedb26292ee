"""Transcripts in a browser: as the page's own timeline, and in Inspect's viewer."""

from __future__ import annotations

import json
import re
from pathlib import Path

from axe_playwright_python.sync_playwright import Axe
from browsing import Tab, Viewed, url_of
from playwright.sync_api import Browser, BrowserContext, expect

from command_line import start
from made_run import MadeRun
from tinkerscript.record.reader import Record

SCRIPTS = ['<img src=x onerror="alert(1)">', "<script>alert(2)</script>", "[click](javascript:alert(3))"]


def transcribed(folder: Path) -> str:
    """The uuid of an episode with a transcript."""
    query = "SELECT uuid FROM episodes WHERE number IN (SELECT episode FROM transcripts) ORDER BY number DESC"
    row = Record(folder).row(query)
    assert row is not None
    return row[0]


def test_an_episode_is_read_event_by_event(tab: Tab, viewed: Viewed) -> None:
    page = tab.page
    page.goto(f"{viewed.url}/#/episode/{transcribed(viewed.folder / 'runs' / 'shop-agent')}")
    page.get_by_role("button", name="Show the events").click()
    events = page.locator(".timeline li")
    expect(events).to_have_count(9)
    in_order = re.compile("model call.*tool.*store.*sandbox.*score", re.DOTALL)
    expect(page.locator(".timeline")).to_contain_text(in_order)
    tool = events.filter(has_text="tool").filter(has_text="calculator")
    expect(tool.locator("pre").first).to_contain_text('"expression"')
    tool.locator("summary").click()
    expect(tool.locator("pre").first).to_be_hidden()
    found = Axe().run(page).response["violations"]
    assert not [each["id"] for each in found if each["impact"] in ("serious", "critical")], json.dumps(found)
    page.get_by_role("button", name="Hide the events").click()
    expect(events).to_have_count(0)


def test_inspects_viewer_shows_the_sample_and_asks_no_other_host(
    context: BrowserContext, tab: Tab, viewed: Viewed
) -> None:
    page = tab.page
    page.goto(f"{viewed.url}/#/episode/{transcribed(viewed.folder / 'runs' / 'shop-agent')}")
    with context.expect_page() as opened:
        page.get_by_role("link", name="Open in Inspect's viewer").click()
    viewer = Tab(opened.value)
    viewer.watch()
    page = viewer.page
    page.wait_for_load_state()
    page.reload()  # From the start, with everything that it asks for seen.
    expect(page.get_by_text("MODEL CALL", exact=False).first).to_be_visible()
    expect(page.get_by_text("calculator", exact=False).first).to_be_visible()
    expect(page.get_by_text("What is due?", exact=False).first).to_be_visible()
    assert not viewer.problems
    # The page's own policy forbids what the viewer needs; each has its own.
    assert "wasm-unsafe-eval" not in (context.request.get(viewed.url).headers["content-security-policy"])


def test_scripts_in_a_transcript_are_text_in_both(browser: Browser, tmp_path: Path) -> None:
    MadeRun(
        tmp_path / "runs" / "nasty", steps=2, groups=2, group_size=4, evaluation_samples=2, texts=SCRIPTS
    ).write()
    uuid = transcribed(tmp_path / "runs" / "nasty")
    url = url_of(start(tmp_path, "view", "runs", "--port", "0"))
    context = browser.new_context()
    tab = Tab(context.new_page())
    tab.watch()
    page = tab.page
    page.goto(f"{url}/#/episode/{uuid}")
    page.get_by_role("button", name="Show the events").click()
    expect(page.locator(".timeline li")).to_have_count(9)
    page.evaluate("document.querySelectorAll('.timeline details').forEach((each) => { each.open = true; })")
    assert any(text in page.inner_text(".timeline") for text in SCRIPTS)
    page.goto(f"{url}/api/inspect/{uuid}/1/")
    expect(page.get_by_text("MODEL CALL", exact=False).first).to_be_visible()
    shown = page.inner_text("body")
    assert any(text in shown for text in SCRIPTS)
    assert page.locator("#app img[onerror]").count() == 0
    assert page.locator("#app a[href^=javascript]").count() == 0
    assert not tab.problems
    context.close()
