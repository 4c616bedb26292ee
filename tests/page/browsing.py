"""A tab of the browser, and what it looks at."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from playwright.sync_api import Page

from command_line import Command


@dataclass
class Tab:
    """A page of the browser that remembers what went wrong in it."""

    page: Page
    problems: list[str] = field(default_factory=list[str])
    _own: tuple[str, ...] = ()

    def watch(self, *own: str) -> None:
        """`own`: beginnings of the addresses that it may ask, if it is not at this machine's by HTTP."""
        self._own = own or ("http://127.0.0.1:", "http://localhost:")
        self.page.on("pageerror", lambda error: self.problems.append(f"error: {error}"))
        self.page.on(
            "console",
            lambda message: (
                self.problems.append(f"{message.type}: {message.text}")
                if message.type == "error" and "Failed to load resource" not in message.text
                else None
            ),
        )
        self.page.on("dialog", lambda dialog: self.problems.append(f"dialog: {dialog.message}"))
        self.page.on("request", self._requested)

    def _requested(self, request: object) -> None:
        url = str(request.url)  # type: ignore[attr-defined]
        if not url.startswith((*self._own, "data:", "file:", "blob:")):
            self.problems.append(f"asks another host: {url}")


@dataclass
class Viewed:
    """`tinkerscript view` over made runs."""

    url: str
    folder: Path
    long_episode: str
    sample: str
    """The digest of one."""


def url_of(command: Command) -> str:
    """The first thing that the command prints."""
    command.until(lambda: "http://" in command.text() and "\n" in command.text().partition("http://")[2])
    return "http://" + command.text().partition("http://")[2].split()[0].rstrip("/")
