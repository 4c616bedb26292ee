"""A tab of the browser, and what it looks at."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from playwright.sync_api import ConsoleMessage, Page, Request

from command_line import Command

OWN = ("http://127.0.0.1:", "http://localhost:", "data:", "file:", "blob:")
"""Beginnings of the addresses that a page may ask."""


@dataclass
class Tab:
    """A page of the browser that remembers what went wrong in it."""

    page: Page
    problems: list[str] = field(default_factory=list[str])

    def __post_init__(self) -> None:
        self.page.on("pageerror", lambda error: self.problems.append(f"error: {error}"))
        self.page.on("console", self._said)
        self.page.on("dialog", lambda dialog: self.problems.append(f"dialog: {dialog.message}"))
        self.page.on("request", self._requested)

    def _said(self, message: ConsoleMessage) -> None:
        if message.type == "error" and "Failed to load resource" not in message.text:
            self.problems.append(f"error: {message.text}")

    def _requested(self, request: Request) -> None:
        if not request.url.startswith(OWN):
            self.problems.append(f"asks another host: {request.url}")


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
