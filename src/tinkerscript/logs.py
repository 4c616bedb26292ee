"""Logs as lines for people or JSON, with run, episode and claim.

No text can forge a record, because control characters are escaped and continuation lines indented. Tokens and
keys are never shown.
"""

from __future__ import annotations

import json
import logging
import os
import re
import sys
import time
from collections import Counter
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import UTC, datetime
from pathlib import Path
from types import MappingProxyType
from typing import IO, Literal

from tinkerscript.limits import LOG_CHARS, LOG_LINES

LogFormat = Literal["text", "json"]

FORMAT = "TINKERSCRIPT_LOG_FORMAT"
FIELDS = ("run", "episode", "attempt", "claim", "client")  # `claim` is `EPISODE/ATTEMPT`.

_NOTHING: Mapping[str, object] = MappingProxyType({})
_about: ContextVar[Mapping[str, object]] = ContextVar("about", default=_NOTHING)
_of_process: dict[str, object] = {}

_KEYS = re.compile(r"\bts-[\w-]+\.\d+\.[\w-]+|(?<=Bearer )\S+|(?<=://)[^/\s:@]*:[^/\s@]+(?=@)")

_SECRET_NAME = re.compile(r"(TOKEN|KEY|SECRET|PASSWORD)$")
_MIN_SECRET_CHARS = 8


def now_about(
    *, run: str = "", episode: str = "", attempt: int = 0, client: str = "", whole_process: bool = False
) -> None:
    """Label this task's later records, or with `whole_process` all."""
    fields = {"run": run, "episode": episode, "attempt": attempt, "client": client}
    given: dict[str, object] = {name: value for name, value in fields.items() if value}
    if episode and attempt:
        given["claim"] = f"{episode}/{attempt}"
    if whole_process:
        _of_process.update(given)
    else:
        _about.set({**_about.get(), **given})


@contextmanager
def about(*, run: str = "", episode: str = "", attempt: int = 0, client: str = "") -> Generator[None]:
    """Label the records of this block and everything it starts."""
    token = _about.set(_about.get())
    now_about(run=run, episode=episode, attempt=attempt, client=client)
    try:
        yield
    finally:
        _about.reset(token)


def start_logging(format: LogFormat | None = None, *, environ: Mapping[str, str] = os.environ) -> None:
    """Log to standard error, in `format` or as the environment says.

    Does nothing if the root logger already has a handler.
    """
    if not logging.getLogger().handlers:
        log_to(sys.stderr, "json" if (format or environ.get(FORMAT)) == "json" else "text", environ=environ)


def log_to(stream: IO[str], format: LogFormat, *, environ: Mapping[str, str] = os.environ) -> logging.Handler:
    handler = logging.StreamHandler(stream)
    handler.addFilter(FloodFilter())
    handler.setFormatter((JsonFormatter if format == "json" else TextFormatter)(secrets_of(environ)))
    root = logging.getLogger()
    root.addHandler(handler)
    root.setLevel(logging.INFO)
    for library in ("httpx", "httpx2"):  # They log every request.
        logging.getLogger(library).setLevel(logging.WARNING)
    return handler


@contextmanager
def logged_to(path: Path, format: LogFormat, *, run: str) -> Generator[None]:
    root, level = logging.getLogger(), logging.getLogger().level
    with path.open("a", encoding="utf-8") as file, about(run=run):
        handler = log_to(file, format)
        try:
            yield
        finally:
            root.removeHandler(handler)
            root.setLevel(level)


def secrets_of(environ: Mapping[str, str]) -> list[str]:
    return [
        value
        for name, value in environ.items()
        if _SECRET_NAME.search(name) and len(value) >= _MIN_SECRET_CHARS
    ]


def fields_of(record: logging.LogRecord) -> dict[str, object]:
    known = {**_of_process, **_about.get(), **vars(record)}
    return {name: known[name] for name in FIELDS if name in known}


MORE_LEFT_OUT = " (further lines like this one are left out for a minute)"


class FloodFilter(logging.Filter):
    def __init__(self, lines: int = LOG_LINES, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._lines = lines
        self._clock = clock
        self._minute = 0
        self._seen: Counter[tuple[str, str]] = Counter()

    def filter(self, record: logging.LogRecord) -> bool:
        if record.levelno < logging.WARNING:
            return True
        if (minute := int(self._clock() // 60)) != self._minute:
            self._minute = minute
            self._seen.clear()
        kind = (record.name, str(record.msg)[:100])
        self._seen[kind] += 1
        if self._seen[kind] == self._lines:
            record.more = MORE_LEFT_OUT
        return self._seen[kind] <= self._lines


class _Formatter(logging.Formatter):
    def __init__(self, secrets: list[str]) -> None:
        super().__init__()
        self._secrets = sorted(secrets, key=len, reverse=True)

    def message(self, record: logging.LogRecord) -> str:
        return self.safe(record.getMessage()) + getattr(record, "more", "")

    def safe(self, text: str) -> str:
        return self._without_secrets(text[:LOG_CHARS])

    def _without_secrets(self, text: str) -> str:
        for secret in self._secrets:
            text = text.replace(secret, "[secret]")
        return _KEYS.sub("[secret]", text)

    def traceback(self, record: logging.LogRecord) -> str:
        if record.exc_info and not record.exc_text:
            record.exc_text = self.formatException(record.exc_info)
        text = record.exc_text or ""
        return "\n".join(map(self.safe, text.splitlines()[-LOG_LINES:]))


class TextFormatter(_Formatter):
    """Formats `2026-01-31 12:00:00,123 INFO tinkerscript.server: message [run=r episode=e attempt=1]`."""

    def format(self, record: logging.LogRecord) -> str:
        shown = {name: value for name, value in fields_of(record).items() if name != "claim"}
        fields = " ".join(f"{name}={escaped(str(value))}" for name, value in shown.items())
        head = f"{self.formatTime(record)} {record.levelname} {record.name}: "
        line = head + escaped(self.message(record)) + (f" [{self.safe(fields)}]" if fields else "")
        lines = [escaped(each) for each in self.traceback(record).splitlines()]
        return "\n".join([line, *(f"    {each}" for each in lines)])


class JsonFormatter(_Formatter):
    """Formats an object with `time` (ISO 8601, UTC), `level`, `logger`, `message`, `pid`, labels, and
    `traceback`.
    """

    def format(self, record: logging.LogRecord) -> str:
        values: dict[str, object] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "logger": record.name,
            "message": self.message(record),
            "pid": record.process,
            **fields_of(record),
        }
        if trace := self.traceback(record):
            values["traceback"] = trace
        return self._without_secrets(json.dumps(values))  # ASCII has no other line breaks.


def escaped(text: str) -> str:
    text = text.encode("utf-8", "backslashreplace").decode()
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
