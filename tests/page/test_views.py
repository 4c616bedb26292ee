"""Every view of finished runs, opened from the one before by clicking, as people and as axe see them."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

from axe_playwright_python.sync_playwright import Axe
from browsing import Tab, Viewed, url_of
from playwright.sync_api import Page, Route, expect

from command_line import COMMAND, ROOT, start
from made_run import MadeRun
from run_ledger import ask


def place(page: Page, name: str) -> None:
    page.get_by_role("navigation", name="Sections").get_by_role("link", name=name, exact=True).click()


def heading(page: Page, text: str | re.Pattern[str]) -> None:
    expect(page.get_by_role("heading", name=text).first).to_be_visible()


def settled(page: Page) -> None:
    expect(page.locator("main h1, main h2, main .card").first).to_be_visible()
    expect(page.locator("[aria-busy=true]")).to_have_count(0)


def check_with_axe(page: Page, **options: Any) -> None:
    violations = Axe().run(page, options={"resultTypes": ["violations"], **options}).response["violations"]
    serious = {
        each["id"]: [node["html"] for node in each["nodes"]][:3]
        for each in violations
        if each["impact"] in ("serious", "critical")
    }
    assert not serious, f"{page.url}: {json.dumps(serious, indent=1)}"


def test_every_view_is_opened_from_the_one_before(tab: Tab, viewed: Viewed) -> None:
    page = tab.page
    page.goto(viewed.url)
    heading(page, "Runs")
    page.get_by_role("link", name="shop-agent", exact=True).click()
    for title in ("Progress", "Held-out score", "Reward", "Health", "Where the time goes", "Newest rollouts"):
        heading(page, re.compile(f"^{title}"))
    expect(page.get_by_text("30 of 30 steps")).to_be_visible()
    page.get_by_role("link", name="all curves").click()
    heading(page, "train/entropy")
    for title in ("Reward and score", "Your metrics", "Time by phase", "Reward by scorer"):
        heading(page, title)
    expect(page.get_by_role("img", name="Time by phase by step: training")).to_be_visible()
    expect(page.get_by_text(re.compile("^Constant over all steps: ")).first).to_be_visible()
    page.get_by_label("Compare with").select_option("shop-agent-2")
    expect(page.locator(".u-legend").first).to_contain_text("shop-agent-2")
    page.get_by_role("link", name="config differences").click()
    expect(page.get_by_role("region", name="Differences")).to_contain_text("training.steps")
    place(page, "Steps")
    page.get_by_role("link", name="step 20", exact=True).click()
    heading(page, "Step 20")
    page.get_by_role("link", name="all rewards equal").click()
    expect(page.get_by_text(re.compile("[0-9]+ matching"))).to_be_visible()
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
    heading(page, "Failed attempts")
    expect(page.locator(".message.assistant").first).to_be_visible()
    place(page, "Fleet")
    expect(page.get_by_text("this run has no server")).to_be_visible()


def test_a_search_goes_on_by_itself_until_it_finds_something(tab: Tab, viewed: Viewed) -> None:
    page = tab.page
    asked: list[str] = []

    def partly(route: Route) -> None:
        asked.append(route.request.url.partition("q=calculator")[2])
        if len(asked) < 3:
            route.fulfill(json={"episodes": [], "next": 1000 - len(asked)})
        else:
            route.continue_()

    page.route("**/search?**", partly)
    page.goto(f"{viewed.url}/#/run/shop-agent/episodes?q=calculator")
    expect(page.locator("tbody a.mono").first).to_be_visible()
    assert asked == ["", "&before=999", "&before=998"]


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
    page.get_by_label("Smooth").select_option("strong")
    page.get_by_label("log axis").check()
    expect(shown).not_to_have_attribute("aria-label", exact or "")
    page.get_by_role("link", name="config", exact=True).click()
    expect(page.get_by_role("region", name="Changed from the defaults").locator("tbody tr")).to_have_count(2)


def small_run(folder: Path, state: str = "finished") -> None:
    MadeRun(folder, steps=2, groups=2, group_size=2, evaluation_samples=2, state=state).write()


def test_a_run_is_annotated_found_by_it_and_deleted(tab: Tab, tmp_path: Path) -> None:
    for name, state in (("first", "finished"), ("second", "failed"), ("live", "running")):
        small_run(tmp_path / "runs" / name, state)
    page = tab.page
    page.goto(url_of(start(tmp_path, "view", "runs", "--port", "0")))
    names = page.locator("tbody a")
    page.get_by_role("button", name="Edit first").click()
    page.get_by_label("Note").fill("lr too high <b>twice</b>")
    page.get_by_label("Tags").fill("x" * 41)
    page.get_by_role("button", name="Save").click()
    expect(page.get_by_role("alert")).to_contain_text("at most 40 characters")
    page.get_by_label("Tags").fill("baseline, seed 2")
    page.get_by_role("button", name="Save").click()
    expect(page.locator(".tags .chip")).to_have_text(["baseline", "seed 2"])
    for words in ("BASELINE", "too high"):
        page.get_by_role("searchbox").fill(words)
        expect(names).to_have_text(["first"])
    page.get_by_role("link", name="first", exact=True).click()
    card = page.get_by_role("region", name="Note and tags")
    expect(card).to_contain_text("lr too high <b>twice</b>")
    card.get_by_role("button", name="Edit").click()
    card.get_by_label("Tags").fill("ablation")
    card.get_by_role("button", name="Save").click()
    expect(card.locator(".chip")).to_have_text(["ablation"])
    page.get_by_role("link", name="TinkerScript").click()
    page.get_by_role("button", name="Edit live").click()
    expect(page.get_by_text("It can be deleted once it has stopped.")).to_be_visible()
    page.get_by_role("button", name="Edit second").click()
    check_with_axe(page)
    for answer, left in (("Cancel", 3), ("Delete", 2)):
        page.get_by_role("button", name="Delete the run").click()
        page.get_by_role("dialog").get_by_role("button", name=answer).click()
        expect(names).to_have_count(left)
    assert sorted(path.name for path in (tmp_path / "runs").glob("*/")) == ["first", "live"]


def test_a_page_that_may_not_write_says_so(tab: Tab, tmp_path: Path) -> None:
    for name in ("first", "second"):
        small_run(tmp_path / "runs" / name)
        (tmp_path / "runs" / name).chmod(0o555)
    (tmp_path / "runs").chmod(0o555)
    # Root without this capability is bound by the modes of files like everybody else.
    bound = ("setpriv", "--bounding-set=-dac_override", "--inh-caps=-all") if os.geteuid() == 0 else ("env",)
    program, *options = bound
    command = start(tmp_path, *options, str(COMMAND), "view", "runs", "--port", "0", program=Path(program))
    page = tab.page
    page.goto(url_of(command))
    page.get_by_role("button", name="Edit second").click()
    page.get_by_label("Note").fill("mine")
    for act in ("Save", "Delete the run"):
        page.get_by_role("button", name=act).click()
        if act != "Save":
            page.get_by_role("dialog").get_by_role("button", name="Delete").click()
        reason = page.get_by_role("alert").filter(has_text="cannot change runs/second: Permission denied")
        expect(reason.last).to_be_visible()
    assert "Traceback" not in command.text()
    assert len(list((tmp_path / "runs").glob("*/ledger.sqlite"))) == 2


def test_a_link_to_tokens_marks_them(tab: Tab, viewed: Viewed) -> None:
    tab.page.goto(f"{viewed.url}/#/episode/{viewed.long_episode}?tokens=30000-30010")
    expect(tab.page.locator(".t.x")).to_have_count(10)
    assert tab.page.locator(".t.x").first.get_attribute("data-at") == "30000"


def test_axe_finds_nothing_serious(tab: Tab, viewed: Viewed) -> None:
    page = tab.page
    for path in (
        *("", "run/shop-agent", "run/shop-agent/curves", "run/shop-agent/steps", "run/shop-agent/steps/20"),
        *("run/shop-agent/evaluations", "run/shop-agent/episodes", "run/shop-agent/alignment"),
        *(f"run/shop-agent/samples/{viewed.sample}", f"episode/{viewed.long_episode}"),
    ):
        page.goto(f"{viewed.url}/#/{path}")
        page.wait_for_load_state("networkidle") if not path.startswith(("run", "episode")) else None
        settled(page)
        check_with_axe(page)
        page.emulate_media(color_scheme="dark")
        check_with_axe(page, runOnly=["color-contrast"])
        page.emulate_media(color_scheme="light")


def test_narrow_screens_do_not_scroll_sideways(tab: Tab, viewed: Viewed) -> None:
    page = tab.page
    page.set_viewport_size({"width": 380, "height": 800})
    run = "run/shop-agent"
    for path in ("", run, f"{run}/steps/20", f"{run}/episodes", f"episode/{viewed.long_episode}"):
        page.goto(f"{viewed.url}/#/{path}")
        settled(page)
        assert page.evaluate("document.documentElement.scrollWidth") <= 380, path


def test_an_exported_run_needs_no_network(tab: Tab, viewed: Viewed, tmp_path: Path) -> None:
    target = tmp_path / "shop.html"
    command = start(viewed.folder, "export", "runs/shop-agent", str(target))
    assert command.wait() == 0, command.text()
    page = tab.page
    page.context.set_offline(True)
    page.goto(target.as_uri())
    expect(page.get_by_text("30 of 30 steps")).to_be_visible()
    for name in ("Curves", "Steps", "Evaluations", "Episodes", "Alignment"):
        place(page, name)
        expect(page.locator("main .card").first).to_be_visible()
    place(page, "Steps")
    page.get_by_role("link", name="step 30", exact=True).click()
    page.locator("a.cell:not(.failed)").first.click()
    expect(page.locator(".tokens .t").first).to_be_visible()


NASTY = [
    '<img src=x onerror="alert(1)">',
    "</script><script>alert(2)</script>",
    '"><svg onload=alert(3)>',
    "javascript:alert(4)",
    "${alert(5)}{{constructor.constructor('alert(6)')()}}",
    "<!--<script>",
    "\u202ereversed\u2028line\x1b[31m\ud83d",
]


def test_what_others_wrote_is_shown_as_text(tab: Tab, tmp_path: Path) -> None:
    texts = [text.encode("utf-8", "replace").decode() for text in NASTY]
    name = "<img src=x onerror=alert(7)>"
    run = tmp_path / "runs" / name
    MadeRun(run, steps=3, groups=2, group_size=4, evaluation_samples=6, texts=texts).write()
    url = url_of(start(tmp_path, "view", "runs", "--port", "0"))
    page = tab.page
    page.goto(url)
    expect(page.get_by_text(re.compile("of 3 steps"))).to_be_visible()
    shown = ""
    for label in ("Steps", "Evaluations", "Episodes"):
        place(page, label)
        settled(page)
    for (uuid,) in ask(run, "SELECT uuid FROM episodes LIMIT 20"):
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


def test_an_episode_is_read_event_by_event(tab: Tab, viewed: Viewed) -> None:
    page = tab.page
    told = "SELECT uuid FROM transcripts JOIN episodes ON sequence = episode ORDER BY sequence DESC"
    ((uuid,), *_) = ask(viewed.folder / "runs" / "shop-agent", told)
    page.goto(f"{viewed.url}/#/episode/{uuid}")
    page.get_by_role("button", name="Show the events").click()
    events = page.locator(".timeline li")
    expect(events).to_have_count(10)
    in_order = re.compile("queue.*waited .* until .*model call.*tool.*store.*sandbox.*score", re.DOTALL)
    expect(page.locator(".timeline")).to_contain_text(in_order)
    tool = events.filter(has_text="tool").filter(has_text="calculator")
    expect(tool.locator("pre").first).to_contain_text('"expression"')
    tool.locator("summary").click()
    expect(tool.locator("pre").first).to_be_hidden()
    check_with_axe(page)
    page.get_by_role("button", name="Hide the events").click()
    expect(events).to_have_count(0)


def test_every_module_is_fetched_at_once_and_every_library_listed() -> None:
    folder = ROOT / "src" / "tinkerscript" / "page" / "static"
    page = (folder / "index.html").read_text()
    for path in [*folder.glob("*.js"), *folder.glob("vendor/*.js")]:
        assert f'"page/{path.relative_to(folder)}"' in page, path.name
    listed = (folder / "vendor" / "README.md").read_text()
    for path in (folder / "vendor").iterdir():
        assert path.name in listed or path.name == "README.md"
