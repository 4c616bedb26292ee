"""A demo run in a browser, from its start to its end, with a restart of the page in the middle."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from browsing import Tab, url_of
from playwright.sync_api import expect

from command_line import named, start, start_training

AGENT = """
import json, pathlib, time, urllib.request

def rollout(episode):
    time.sleep(0 if pathlib.Path("HURRY").exists() else 0.5)
    body = {"model": "policy", "messages": [{"role": "user", "content": "What is 23+45?"}]}
    headers = {"Authorization": f"Bearer {episode.openai_api_key}", "Content-Type": "application/json"}
    url = f"{episode.openai_base_url}/chat/completions"
    urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), headers)).read()
    return int(episode.episode_uuid[-1], 16) / 16
"""
"""Takes its time until it is told to hurry, so that the run goes on while it is looked at."""

SLOW = {
    "workers.script": "agent.py",
    "training.groups_per_step": 2,
    "evaluation.episodes": 0,
}


@pytest.mark.timeout(300)
def test_a_live_run_from_empty_to_finished(tab: Tab, tmp_path: Path) -> None:
    steps = 20
    (tmp_path / "agent.py").write_text(AGENT.replace("HURRY", str(tmp_path / "hurry")))
    train = start_training(tmp_path, **SLOW | {"training.steps": steps})
    url = url_of(train)
    page = tab.page
    page.goto(url)
    expect(page.get_by_text(f"of {steps} steps")).to_be_visible()
    expect(page.get_by_text("running").first).to_be_visible()
    # Without reloading, the page goes on with the run.
    page.evaluate("window.sameDocument = true")
    expect(page.get_by_text(re.compile(rf"^[1-9] of {steps} steps"))).to_be_visible(timeout=60_000)
    expect(page.locator("tbody a.mono").first).to_be_visible()
    named(train.family(), "tinkerscript view run")[0].kill()
    expect(page.get_by_text("reconnecting")).to_be_visible()
    expect(page.get_by_text("live", exact=True)).to_be_visible(timeout=60_000)
    (own,) = named(train.family(), "tinkerscript view run")
    page.get_by_role("link", name="Fleet").click()
    expect(page.get_by_role("heading", name="Queue")).to_be_visible()
    workers = page.get_by_role("region", name="Workers")
    expect(workers.locator("tbody tr")).to_have_count(1)
    expect(workers).to_contain_text(re.compile("1 worker, [1-9][0-9.,]* episodes/min together"))
    (tmp_path / "hurry").touch()
    page.get_by_role("link", name="Episodes", exact=True).click()
    page.locator("tbody a.mono").first.click()
    waited = re.compile("^It waited in the queue for [0-9.]+ s until .+ claimed it")
    expect(page.get_by_text(waited)).to_be_visible()
    page.get_by_role("link", name="Run", exact=True).click()
    expect(page.get_by_text(re.compile(rf"^(19|20) of {steps} steps"))).to_be_visible(timeout=90_000)
    assert page.evaluate("window.sameDocument") is True
    assert train.wait() == 0, train.text()
    assert not own.is_running(), "the page ends with its run"
    assert "look at it again   tinkerscript view run" in train.text().splitlines()
    view = start(tmp_path, "view", "run", "--port", "0", output="view.txt")
    page.goto(url_of(view))
    expect(page.get_by_text(f"{steps} of {steps} steps")).to_be_visible()
    expect(page.get_by_text("finished").first).to_be_visible()
