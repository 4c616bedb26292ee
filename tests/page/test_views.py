"""Every view of finished runs, opened from the one before by clicking, as people and as axe see them."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest
from axe_playwright_python.sync_playwright import Axe
from browsing import Tab, Viewed, url_of
from playwright.sync_api import Browser, BrowserContext, Page, expect

from command_line import ROOT, start
from made_run import MadeRun
from tinkerscript.record.reader import Record

PLACES = ["Run", "Curves", "Steps", "Evaluations", "Episodes", "Alignment", "Fleet"]


def place(page: Page, name: str) -> None:
    page.get_by_role("navigation", name="Places").get_by_role("link", name=name, exact=True).click()


def heading(page: Page, text: str | re.Pattern[str]) -> None:
    expect(page.get_by_role("heading", name=text).first).to_be_visible()


def test_every_view_is_opened_from_the_one_before(tab: Tab, viewed: Viewed) -> None:
    page = tab.page
    page.goto(viewed.url)
    heading(page, "Runs")
    page.get_by_role("link", name="shop-agent", exact=True).click()
    for title in ("Progress", "Held-out score", "Reward", "Health", "Newest rollouts"):
        heading(page, re.compile(f"^{title}"))
    expect(page.get_by_text("30 of 30 steps")).to_be_visible()
    page.get_by_role("link", name="all curves").click()
    heading(page, "train/entropy")
    for title in ("Reward and score", "Your metrics", "Time by phase", "Reward by scorer"):
        heading(page, title)
    expect(page.get_by_role("img", name="Time by phase by step: rollouts")).to_be_visible()
    expect(page.get_by_text(re.compile("^The same in every step: ")).first).to_be_visible()
    page.get_by_label("Compare with").select_option("shop-agent-2")
    expect(page.locator(".u-legend").first).to_contain_text("shop-agent-2")
    page.get_by_role("link", name="config differences").click()
    expect(page.get_by_role("region", name="What differs")).to_contain_text("training.steps")
    place(page, "Steps")
    page.get_by_role("link", name="step 20", exact=True).click()
    heading(page, "Step 20")
    page.get_by_role("link", name="all rewards equal").click()
    expect(page.get_by_text("of this kind")).to_be_visible()
    page.get_by_role("link", name="best first").click()
    page.locator("a.cell:not(.failed)").first.click()
    heading(page, re.compile("^Episode "))
    expect(page.locator(".message.assistant").first).to_be_visible()
    expect(page.locator(".tokens .t").first).to_be_visible()
    for color in ("logprob", "entropy", "trainer − sampler", "policy version", "advantage"):
        page.get_by_role("link", name=color, exact=True).click()
        expect(page.get_by_role("link", name=color, exact=True)).to_have_attribute("aria-current", "true")
    page.locator(".tokens .t.s").first.hover()
    expect(page.get_by_role("tooltip")).to_contain_text("advantage")
    page.get_by_role("button", name="Replies side by side").click()
    expect(page.locator(".siblings pre").first).to_be_visible()
    page.get_by_role("link", name=re.compile("^sample order-")).click()
    heading(page, "Mean reward by policy version")
    place(page, "Evaluations")
    expect(page.get_by_text(re.compile("[0-9]+ better"))).to_be_visible()
    page.get_by_role("link", name="worse", exact=True).click()
    expect(page.locator("tbody .bad").first).to_be_visible()
    place(page, "Alignment")
    page.get_by_role("link", name="no_stop_token").click()
    expect(page.get_by_role("heading", name="warning: no_stop_token")).to_be_visible()
    page.locator("tbody a.mono").first.click()
    heading(page, re.compile("^Episode "))
    place(page, "Episodes")
    page.get_by_role("link", name="failed", exact=True).click()
    page.locator("tbody a.mono").first.click()
    heading(page, "Attempts that failed")
    expect(page.locator(".message.assistant").first).to_be_visible()
    place(page, "Fleet")
    expect(page.get_by_text("this run has no server")).to_be_visible()


def test_runs_are_found_and_sorted_and_a_curve_is_taken_away(tab: Tab, viewed: Viewed) -> None:
    page = tab.page
    page.goto(viewed.url)
    names = page.locator("tbody a")
    for order in (["shop-agent-2", "shop-agent"], ["shop-agent", "shop-agent-2"]):  # Of 24 and of 30 steps.
        expect(names).to_have_text(order)
        page.get_by_role("button", name=re.compile("^step")).click()
    page.get_by_role("searchbox").fill("tiny agent-2")
    expect(names).to_have_text(["shop-agent-2"])
    page.goto(f"{viewed.url}/#/run/shop-agent/curves")
    with page.expect_download() as taken:
        page.get_by_role("button", name="Download eval/score as CSV").click()
    assert taken.value.suggested_filename == "eval_score.csv"
    rows = Path(taken.value.path()).read_text().splitlines()
    assert rows[0] == "line,step,mean,low,high"
    assert [row.split(",")[1] for row in rows[1:]] == ["0", "10", "20", "30"]
    shown = page.get_by_role("img", name="reward/mean by step")
    exact = shown.get_attribute("aria-label")
    page.get_by_label("Smooth").select_option("much")
    page.get_by_label("log axis").check()
    expect(shown).not_to_have_attribute("aria-label", exact or "")
    page.get_by_role("link", name="config", exact=True).click()
    expect(page.get_by_role("region", name="What you set").locator("tbody tr")).to_have_count(2)


def test_the_search_takes_words_and_conditions(tab: Tab, viewed: Viewed) -> None:
    page = tab.page
    page.goto(f"{viewed.url}/#/run/shop-agent/episodes")
    page.get_by_role("searchbox").fill("calculator reward=0 step=12")
    page.keyboard.press("Enter")
    expect(page.locator("tbody tr").first).to_contain_text("step 12")
    rewards = page.locator("tbody tr td:nth-child(3)").all_inner_texts()
    assert rewards
    assert set(rewards) == {"0"}
    page.get_by_role("searchbox").fill("step=abc reward>x")
    page.keyboard.press("Enter")
    expect(page.get_by_role("alert")).to_contain_text("is not a number")


def test_a_link_to_tokens_marks_them(tab: Tab, viewed: Viewed) -> None:
    tab.page.goto(f"{viewed.url}/#/episode/{viewed.long_episode}?tokens=30000-30010")
    expect(tab.page.locator(".t.x")).to_have_count(10)
    assert tab.page.locator(".t.x").first.get_attribute("data-at") == "30000"


def test_a_long_episode_stays_small_in_the_document(tab: Tab, viewed: Viewed) -> None:
    page = tab.page
    page.goto(f"{viewed.url}/#/episode/{viewed.long_episode}")
    expect(page.locator(".tokens .t").first).to_be_visible()
    seen = page.evaluate(
        """async () => {
          const box = document.querySelector('.tokens');
          let most = 0;
          for (let at = 0; at < box.scrollHeight; at += 2000) {
            box.scrollTop = at;
            await new Promise(requestAnimationFrame);
            await new Promise(requestAnimationFrame);
            most = Math.max(most, document.querySelectorAll('*').length);
          }
          return {most, end: box.scrollTop + box.clientHeight, height: box.scrollHeight};
        }"""
    )
    assert seen["most"] <= 5000
    expect(page.locator(".tokens .t").last).to_contain_text("<|im_end|>")


def test_keys_move_between_places(tab: Tab, viewed: Viewed) -> None:
    page = tab.page
    page.goto(f"{viewed.url}/#/run/shop-agent")
    heading(page, re.compile("^Progress"))
    page.keyboard.press("s")
    heading(page, "Steps")
    page.keyboard.press("/")
    expect(page.get_by_role("searchbox")).to_be_focused()
    page.keyboard.press("Escape")
    page.goto(f"{viewed.url}/#/run/shop-agent/steps/20")
    heading(page, "Step 20")
    page.keyboard.press("]")
    heading(page, "Step 21")
    page.keyboard.press("?")
    expect(page.get_by_role("dialog")).to_be_visible()
    page.keyboard.press("Escape")
    expect(page.get_by_role("dialog")).to_have_count(0)


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_axe_finds_nothing_serious(browser: Browser, viewed: Viewed, theme: str) -> None:
    context = browser.new_context(color_scheme=theme)  # type: ignore[arg-type]
    page = context.new_page()
    axe = Axe()
    for path in (
        *("", "run/shop-agent", "run/shop-agent/curves", "run/shop-agent/steps", "run/shop-agent/steps/20"),
        *("run/shop-agent/evaluations", "run/shop-agent/episodes", "run/shop-agent/alignment"),
        *("run/shop-agent/samples/3", f"episode/{viewed.long_episode}"),
    ):
        page.goto(f"{viewed.url}/#/{path}")
        page.wait_for_load_state("networkidle") if not path.startswith(("run", "episode")) else None
        expect(page.locator("main h1, main h2, main .card").first).to_be_visible()
        expect(page.locator("[aria-busy=true]")).to_have_count(0)
        found = axe.run(page).response["violations"]
        serious = {
            each["id"]: [node["html"] for node in each["nodes"]][:3]
            for each in found
            if each["impact"] in ("serious", "critical")
        }
        assert not serious, f"{theme} {path}: {json.dumps(serious, indent=1)}"
    context.close()


def test_narrow_screens_do_not_scroll_sideways(browser: Browser, viewed: Viewed) -> None:
    context = browser.new_context(viewport={"width": 380, "height": 800})
    page = context.new_page()
    for path in (
        "run/shop-agent",
        "run/shop-agent/steps/20",
        "run/shop-agent/episodes",
        f"episode/{viewed.long_episode}",
    ):
        page.goto(f"{viewed.url}/#/{path}")
        expect(page.locator("main .card").first).to_be_visible()
        expect(page.locator("[aria-busy=true]")).to_have_count(0)
        assert page.evaluate("document.documentElement.scrollWidth") <= 380, path
    context.close()


def test_an_exported_run_needs_no_network(browser: Browser, viewed: Viewed, tmp_path: Path) -> None:
    target = tmp_path / "shop.html"
    command = start(viewed.folder, "export", "runs/shop-agent", str(target))
    assert command.wait() == 0, command.text()
    context = browser.new_context(offline=True)
    tab = Tab(context.new_page())
    tab.watch()
    page = tab.page
    page.goto(target.as_uri())
    expect(page.get_by_text("30 of 30 steps")).to_be_visible()
    for name in ("Curves", "Steps", "Evaluations", "Episodes", "Alignment"):
        place(page, name)
        expect(page.locator("main .card").first).to_be_visible()
    place(page, "Steps")
    page.get_by_role("link", name="step 30", exact=True).click()
    page.locator("a.cell:not(.failed)").first.click()
    expect(page.locator(".tokens .t").first).to_be_visible()
    assert not tab.problems
    context.close()


NASTY = [
    '<img src=x onerror="alert(1)">',
    "</script><script>alert(2)</script>",
    '"><svg onload=alert(3)>',
    "javascript:alert(4)",
    "${alert(5)}{{constructor.constructor('alert(6)')()}}",
    "<!--<script>",
    "\u202ereversed\u2028line\x1b[31m\ud83d",
]


def test_what_others_wrote_is_shown_as_text(browser: Browser, tmp_path: Path) -> None:
    texts = [text.encode("utf-8", "replace").decode() for text in NASTY]
    name = "<img src=x onerror=alert(7)>"
    MadeRun(
        tmp_path / "runs" / name, steps=3, groups=2, group_size=4, evaluation_samples=6, texts=texts
    ).write()
    command = start(tmp_path, "view", "runs", "--port", "0")
    url = url_of(command)
    context = browser.new_context()
    tab = Tab(context.new_page())
    tab.watch()
    page = tab.page
    page.goto(url)
    expect(page.get_by_text(re.compile("of 3 steps"))).to_be_visible()
    shown = ""
    for label in ("Steps", "Evaluations", "Episodes"):
        place(page, label)
        expect(page.locator("main .card").first).to_be_visible()
        expect(page.locator("[aria-busy=true]")).to_have_count(0)
    uuids = [
        line["uuid"]
        for line in json.loads(context.request.get(f"{url}/api/runs/{name}/episodes?limit=20").text())[
            "episodes"
        ]
    ]
    for uuid in uuids:
        page.goto(f"{url}/#/episode/{uuid}")
        expect(page.locator(".message").first).to_be_visible()
        shown += page.inner_text("main")
    assert "onerror=" in shown
    assert "</script><script>" in shown
    export = start(tmp_path, "export", f"runs/{name}", "page.html", output="export.txt")
    assert export.wait() == 0, export.text()
    page.goto((tmp_path / "page.html").as_uri())
    expect(page.get_by_text(re.compile("of 3 steps"))).to_be_visible()
    place(page, "Episodes")
    page.locator("tbody a.mono").first.click()
    expect(page.locator(".message").first).to_be_visible()
    assert not tab.problems
    context.close()


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


def test_scripts_in_a_transcript_are_text(browser: Browser, tmp_path: Path) -> None:
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
    assert not tab.problems
    context.close()


def test_other_machines_log_in(context: BrowserContext, viewed: Viewed) -> None:
    token = "a-long-admin-token-for-tests"
    env = {**os.environ, "TINKERSCRIPT_ADMIN_TOKEN": token}
    command = start(
        viewed.folder, "view", "runs", "--host", "0.0.0.0", "--port", "0", env=env, output="login.txt"
    )
    port = url_of(command).rpartition(":")[2]
    url = f"http://127.0.0.1:{port}"
    page = context.new_page()
    assert context.request.get(f"{url}/api/runs").status == 401
    assert context.request.get(f"{url}/api/episodes/{viewed.long_episode}").status == 401
    page.goto(f"{url}/#/run/shop-agent/steps")
    page.get_by_label("Admin token").fill("not it")
    page.get_by_role("button", name="Log in").click()
    expect(page.get_by_role("alert")).to_contain_text("not the admin token")
    page.get_by_label("Admin token").fill(token)
    page.get_by_role("button", name="Log in").click()
    heading(page, "Steps")
    (cookie,) = context.cookies()
    assert cookie["httpOnly"]
    assert cookie["sameSite"] == "Strict"
    assert token not in json.dumps([cookie, page.url])
    page.reload()
    heading(page, "Steps")
    context.clear_cookies()
    page.goto(f"{url}/docs")
    page.get_by_label("Admin token").fill(token)
    page.get_by_role("button", name="Log in").click()
    expect(page.get_by_text("/api/runs/{run}/steps", exact=True)).to_be_visible()
    page.get_by_role("link", name="Interchange server").click()
    expect(page.get_by_text("no interchange server runs here")).to_be_visible()


def test_the_api_is_documented_without_another_host(tab: Tab, viewed: Viewed) -> None:
    tab.page.goto(f"{viewed.url}/docs")
    tab.page.get_by_text("/api/episodes/{uuid}", exact=True).click()
    expect(tab.page.locator("details[open]")).to_contain_text("SequenceLine")


def test_every_module_is_fetched_at_once() -> None:
    folder = ROOT / "src" / "tinkerscript" / "page" / "static"
    page = (folder / "index.html").read_text()
    for path in [*folder.glob("*.js"), *folder.glob("vendor/*.js")]:
        assert f'"page/{path.relative_to(folder)}"' in page or path.name == "docs.js", path.name


def test_the_vendored_libraries_are_listed() -> None:
    folder = ROOT / "src" / "tinkerscript" / "page" / "static" / "vendor"
    listed = (folder / "README.md").read_text()
    for path in folder.iterdir():
        assert path.name in listed or path.name == "README.md"
