"""What a reader of the page waits for, in a real Chromium: screens, reloads, scrolling, bytes and nodes."""

from __future__ import annotations

import shutil
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from playwright.sync_api import Browser, BrowserContext, CDPSession, Page, sync_playwright

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
VIEWPORT = {"width": 1280, "height": 900}
FRAME_MS = 33.4
"""Two frames of a screen with 60 a second, and what the clock rounds."""

MOST_FRAMES = 400
PER_FRAME_PX = 90
"""At 60 frames a second, 5,400 px/s: a page of the screen in a sixth of a second."""

SETTLED = "!document.querySelector('[aria-busy=true], .skeleton') && !document.querySelector('[role=alert]')"
FIRST_SCREEN = (
    f"{SETTLED} && document.querySelector('.learning canvas')"
    " && document.querySelectorAll('tbody a.mono').length > 3"
)


@dataclass(frozen=True)
class Screen:
    """A place of the page, and what it shows when it is complete."""

    name: str
    to: str
    """After `#/run/NAME`, or from `#` on if it begins with it."""

    ready: str
    """JavaScript."""


@dataclass(frozen=True)
class Scroll:
    """Frames while something scrolls, and the most nodes that the document had meanwhile."""

    within_33_ms: float
    longest_ms: float
    nodes: int
    frames: int


@contextmanager
def chromium() -> Generator[Browser]:
    path = next((found for name in BROWSERS if (found := shutil.which(name))), None)
    if path is None:
        raise SystemExit("no Chromium is installed; `make acceptance` installs one")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield browser
        browser.close()


class Reader:
    """One tab with an empty cache that counts what comes over the network."""

    def __init__(self, context: BrowserContext, url: str) -> None:
        self.page: Page = context.new_page()
        self.problems: list[str] = []
        self.page.on("pageerror", lambda error: self.problems.append(str(error)))
        self._url = url
        self._bytes: dict[str, int] = {}
        """By request."""

        self._browser: CDPSession = context.new_cdp_session(self.page)
        self._browser.send("Network.enable")
        self._browser.send("Performance.enable", {"timeDomain": "threadTicks"})
        self._browser.on("Network.dataReceived", self._received)
        self._browser.on("Network.loadingFinished", self._finished)

    def _received(self, event: dict[str, Any]) -> None:
        received = event["encodedDataLength"] or event["dataLength"]
        self._bytes[event["requestId"]] = self._bytes.get(event["requestId"], 0) + received

    def _finished(self, event: dict[str, Any]) -> None:
        self._bytes[event["requestId"]] = int(event["encodedDataLength"])  # With its head.

    def cpu_ms(self) -> float:
        """Processor time of the tab's main thread so far."""
        metrics = self._browser.send("Performance.getMetrics")["metrics"]
        return 1000 * next(each["value"] for each in metrics if each["name"] == "TaskDuration")

    def first_screen(self, run: str) -> tuple[float, int]:
        """Milliseconds from the start of the navigation to a complete first screen, and bytes received."""
        self._bytes = {}
        self.page.goto(f"{self._url}/#/run/{run}", wait_until="commit")
        return self._until_shown(), sum(self._bytes.values())

    def reload(self) -> float:
        """The same with a warm cache, in milliseconds."""
        self.page.reload(wait_until="commit")
        return self._until_shown()

    def _until_shown(self) -> float:
        return self.page.wait_for_function(
            f"() => {FIRST_SCREEN} && performance.now()", polling="raf", timeout=60_000
        ).json_value()

    def open(self, run: str, screen: Screen) -> float:
        """Milliseconds from a click to a complete screen, painted."""
        to = screen.to if screen.to.startswith("#") else f"#/run/{run}/{screen.to}"
        self.page.evaluate("location.hash = '#/'")
        self.page.wait_for_function(
            "() => !document.querySelector('nav[aria-label=Sections]')", polling="raf"
        )
        return self.page.evaluate(
            f"([to, limit]) => {{ const ready = () => {SETTLED} && {screen.ready};"
            """return new Promise((resolve, reject) => {
              const began = performance.now();
              const look = () => {
                if (ready()) requestAnimationFrame(() => resolve(performance.now() - began));
                else if (performance.now() - began > limit) reject(new Error(`${to} is not complete`));
                else requestAnimationFrame(look);
              };
              location.hash = to;
              requestAnimationFrame(look);
            })}""",
            [to, 60_000],
        )

    def more(self) -> bool:
        """Click "Show more", where there is more; whether there was."""
        button = self.page.get_by_role("button", name="Show more")
        if not button.count():
            return False
        before = self.page.evaluate("document.documentElement.scrollHeight")
        button.click()
        self.page.wait_for_function(f"() => document.documentElement.scrollHeight > {before}")
        self.page.get_by_role("button", name="Loading…").wait_for(state="detached")
        return True

    def blank(self) -> None:
        """Show a long page of plain text without a script: the reference for scrolling."""
        self.page.goto("about:blank")
        self.page.set_content("<!doctype html>" + "<p>A line of plain text.</p>" * 2000)

    def nodes(self) -> int:
        return self.page.evaluate("document.getElementsByTagName('*').length")

    def scroll(self, box: str) -> Scroll:
        """Scroll `box`, a selector, from top to bottom, or for `MOST_FRAMES` frames."""
        found = self.page.evaluate(
            """([box, step, most]) => new Promise((resolve) => {
              const it = document.querySelector(box), times = [];
              let nodes = 0;
              const frame = (now) => {
                times.push(now);
                nodes = Math.max(nodes, document.getElementsByTagName('*').length);
                const before = it.scrollTop;
                it.scrollTop += step;
                if (times.length > most || it.scrollTop === before) resolve({times, nodes});
                else requestAnimationFrame(frame);
              };
              it.scrollTop = 0;
              requestAnimationFrame(frame);
            })""",
            [box, PER_FRAME_PX, MOST_FRAMES],
        )
        times: list[float] = found["times"]
        gaps = [after - before for before, after in pairwise(times)]
        within = sum(gap <= FRAME_MS for gap in gaps) / max(1, len(gaps))
        return Scroll(within, max(gaps, default=0.0), found["nodes"], len(gaps))


@contextmanager
def reader(browser: Browser, url: str) -> Generator[Reader]:
    context = browser.new_context(viewport=VIEWPORT)  # pyright: ignore[reportArgumentType]
    found = Reader(context, url)
    try:
        yield found
    finally:
        context.close()
    if found.problems:
        raise SystemExit(f"the page had errors: {found.problems}")
