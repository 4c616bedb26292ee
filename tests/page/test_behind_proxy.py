"""Two pages behind one address, each below a prefix of its own, as a reverse proxy puts them there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from browsing import Tab
from playwright.sync_api import Page, expect
from starlette.responses import RedirectResponse, Response
from starlette.types import Receive, Scope, Send

from made_run import MadeRun
from run_ledger import LedgerWriter
from serving import serving
from tinkerscript.page.web_app import create_page

TOKENS = {"run1": "the-admin-token-of-run-1", "run2": "the-admin-token-of-run-2"}


class Prefixes:
    """Forwards `/team/RUN/path` to the page of a run as `/path`."""

    def __init__(self, folder: Path) -> None:
        self._pages = {
            f"/team/{run}/": create_page(folder / run, admin_token=token) for run, token in TOKENS.items()
        }
        self.strays: list[str] = []
        """Paths that were asked for outside of the prefixes."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope.get("path", "")
        prefix = next((each for each in self._pages if path.startswith(each)), None)
        if prefix:
            below = {"path": path[len(prefix) - 1 :], "raw_path": scope["raw_path"][len(prefix) - 1 :]}
            await self._pages[prefix]({**scope, **below}, receive, send)
        elif f"{path}/" in self._pages:
            await RedirectResponse(f"{path}/")(scope, receive, send)
        elif scope["type"] == "http":
            self.strays.append(path)
            await Response(status_code=404)(scope, receive, send)


def log_in(page: Page, token: str) -> None:
    page.get_by_label("Admin token").fill(token)
    page.get_by_role("button", name="Log in").click()


def test_two_pages_behind_one_proxy(tab: Tab, tmp_path: Path) -> None:
    small: dict[str, Any] = {"steps": 4, "groups": 2, "group_size": 4, "evaluation_samples": 4}
    MadeRun(tmp_path / "run1", state="running", **small).write()
    MadeRun(tmp_path / "run2", seed=2, **small).write()
    proxy = Prefixes(tmp_path)
    with serving(proxy) as url:  # type: ignore[arg-type]
        page, first, second = tab.page, f"{url}/team/run1/", f"{url}/team/run2/"
        page.goto(first.rstrip("/"))
        assert page.url == first, "the proxy adds the slash"
        log_in(page, TOKENS["run1"])
        expect(page.get_by_text("4 of 4 steps")).to_be_visible()
        (cookie,) = page.context.cookies()
        assert (cookie["path"], cookie["httpOnly"]) == ("/team/run1/api", True)
        # Events come through while the reply goes on.
        expect(page.get_by_text("running").first).to_be_visible()
        page.evaluate("window.sameDocument = true")
        with LedgerWriter(tmp_path / "run1") as run:
            run.status(state="finished")
        expect(page.get_by_text("finished").first).to_be_visible()
        assert page.evaluate("window.sameDocument") is True
        # A link opens the same place.
        page.get_by_role("navigation", name="Sections").get_by_role("link", name="Steps").click()
        page.get_by_role("link", name="step 3", exact=True).click()
        expect(page.get_by_role("heading", name="Step 3")).to_be_visible()
        link = page.url
        assert link.startswith(f"{first}#/run/run1/steps/3")
        # The other page has a login of its own, and neither ends the other's.
        page.goto(second)
        log_in(page, TOKENS["run2"])
        expect(page.get_by_text("4 of 4 steps")).to_be_visible()
        assert {each["path"] for each in page.context.cookies()} == {"/team/run1/api", "/team/run2/api"}
        page.goto(link)
        expect(page.get_by_role("heading", name="Step 3")).to_be_visible()
    assert not proxy.strays
