"""A demo run in a browser, from its start to its end, with a restart of the page in the middle."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import pytest
from browsing import Tab, url_of
from playwright.sync_api import expect

from command_line import start, start_training


@pytest.mark.timeout(300)
def test_a_live_run_from_empty_to_finished(tab: Tab, tmp_path: Path) -> None:
    steps = 8
    train = start_training(tmp_path, **{"training.steps": steps, "evaluation.every_steps": 3})
    url = url_of(train)
    page = tab.page
    page.goto(url)
    expect(page.get_by_text(f"of {steps} steps")).to_be_visible()
    expect(page.get_by_text("running").first).to_be_visible()
    # Without reloading, the page goes on with the run.
    page.evaluate("window.sameDocument = true")
    expect(page.get_by_text(re.compile(rf"^[1-5] of {steps} steps"))).to_be_visible(timeout=60_000)
    expect(page.locator("tbody a.mono").first).to_be_visible()
    own = next(child for child in train.family() if "view" in child.cmdline())
    os.kill(own.pid, signal.SIGKILL)
    expect(page.get_by_text("reconnecting")).to_be_visible()
    expect(page.get_by_text("live", exact=True)).to_be_visible(timeout=60_000)
    page.get_by_role("link", name="Fleet").click()
    expect(page.get_by_role("heading", name="Queue")).to_be_visible()
    workers = page.get_by_role("region", name="Workers")
    expect(workers.locator("tbody tr")).to_have_count(1)
    expect(workers).to_contain_text(re.compile("1 worker, [1-9][0-9.,]* episodes/min together"))
    page.get_by_role("link", name="Episodes", exact=True).click()
    page.locator("tbody a.mono").first.click()
    waited = re.compile("^It waited in the queue for [0-9.]+ s until .+ claimed it")
    expect(page.get_by_text(waited)).to_be_visible()
    page.get_by_role("link", name="Run", exact=True).click()
    expect(page.get_by_text(re.compile(rf"^[78] of {steps} steps"))).to_be_visible(timeout=90_000)
    assert page.evaluate("window.sameDocument") is True
    assert train.wait() == 0, train.text()
    last = [line for line in train.text().splitlines() if "tinkerscript view" in line][-1]
    folder = last.rpartition("tinkerscript view ")[2].strip()
    view = start(tmp_path, "view", folder, "--port", "0", output="view.txt")
    page.goto(url_of(view))
    expect(page.get_by_text(f"{steps} of {steps} steps")).to_be_visible()
    expect(page.get_by_text("finished").first).to_be_visible()
    expect(page.get_by_text("0 of ", exact=False).first).to_be_visible()
