"""A real browser on real servers. `make acceptance` installs what these tests need."""

from __future__ import annotations

import shutil
from collections.abc import Iterator

import pytest
from browsing import Tab, Viewed, url_of
from playwright.sync_api import Browser, sync_playwright

from command_line import end_all, start
from made_run import MadeRun
from run_ledger import ask

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
VIEWPORT = {"width": 1280, "height": 900}


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    path = next((found for name in BROWSERS if (found := shutil.which(name))), None)
    assert path, "make acceptance installs chromium"
    with sync_playwright() as playwright:
        found = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield found
        found.close()


@pytest.fixture
def tab(browser: Browser) -> Iterator[Tab]:
    context = browser.new_context(viewport=VIEWPORT, color_scheme="light")
    context.set_default_timeout(20_000)
    found = Tab(context.new_page())
    yield found
    context.close()
    assert not found.problems


@pytest.fixture(autouse=True)
def nothing_is_left_running() -> Iterator[None]:
    yield
    end_all()


@pytest.fixture(scope="session")
def viewed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Viewed]:
    folder = tmp_path_factory.mktemp("viewed")
    first = MadeRun(folder / "runs" / "shop-agent")
    first.write()
    uuid = first.long_episode(turns=100, tokens=50_000)
    MadeRun(folder / "runs" / "shop-agent-2", seed=2, steps=24).write()
    command = start(folder, "view", "runs", "--port", "0", lasts=True)
    ((sample,),) = ask(first.folder, "SELECT sample FROM episodes WHERE label = 'after' LIMIT 1")
    yield Viewed(url_of(command), folder, uuid, sample.hex())
    command.process.terminate()
    command.wait()
