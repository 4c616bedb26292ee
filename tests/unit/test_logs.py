"""What is logged: the ids of what it is about, one record at a time, and no secrets."""

from __future__ import annotations

import asyncio
import io
import json
import logging
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from clock import Clock
from tinkerscript.access_tokens import ClaimKeys, Roles, claim_key
from tinkerscript.client.episode import Episode, HeldClaim, run_rollout
from tinkerscript.logs import (
    MORE_LEFT_OUT,
    FloodFilter,
    LogFormat,
    TextFormatter,
    about,
    log_to,
    logged_to,
    now_about,
)

FORGED = "\n2026-01-01 00:00:00,000 INFO root: a forged record\r\x1b[2J\u2028\x85{}"
ENVIRON = {"TINKERSCRIPT_CLIENT_TOKEN": "the-clients-token", "PATH": "/usr/bin:/bin", "SHORT_KEY": "a"}

Logs = Callable[[LogFormat], io.StringIO]

logger = logging.getLogger("tried")


@pytest.fixture
def logs() -> Iterator[Logs]:
    """Starts logging in a format; what is logged."""
    root, handlers = logging.getLogger(), list[logging.Handler]()
    level = root.level

    def start(format: LogFormat) -> io.StringIO:
        stream = io.StringIO()
        handlers.append(log_to(stream, format, environ=ENVIRON))
        return stream

    yield start
    for handler in handlers:
        root.removeHandler(handler)
    root.setLevel(level)


def records(stream: io.StringIO) -> list[dict[str, Any]]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def test_a_record_says_what_it_is_about(logs: Logs) -> None:
    as_json, as_text = logs("json"), logs("text")
    with about(run="r", episode="e", attempt=2, client="w"):
        logger.info("in the block")
    logger.info("after it")
    inside, after = records(as_json)
    ids = {"run": "r", "episode": "e", "attempt": 2, "claim": "e/2", "client": "w"}
    record = {"level": "INFO", "logger": "tried", "message": "in the block"}
    assert inside.items() >= (ids | record).items()
    assert inside["time"].endswith("+00:00")
    assert not after.keys() & ids.keys()
    first, second = as_text.getvalue().splitlines()
    assert first.endswith("INFO tried: in the block [run=r episode=e attempt=2 client=w]")
    assert second.endswith("INFO tried: after it")


@pytest.mark.parametrize("format", ["json", "text"])
def test_no_text_can_look_like_another_record(logs: Logs, format: LogFormat) -> None:
    stream = logs(format)
    with about(episode=f"e{FORGED}", client=FORGED):
        logger.warning("a client said %s", FORGED)
        try:
            raise ValueError(FORGED)
        except ValueError:
            logger.exception("failed")
    text = stream.getvalue()
    begins = [line for line in text.splitlines() if not line.startswith("    ")]
    assert len(begins) == 2, text
    assert not [line for line in text.splitlines() if line.startswith("2026-01-01")]
    assert all(char.isprintable() or char == "\n" for char in text)
    if format == "json":
        assert "ValueError" in records(stream)[1]["traceback"]


@pytest.mark.parametrize("format", ["json", "text"])
def test_secrets_are_not_shown(logs: Logs, format: LogFormat) -> None:
    stream = logs(format)
    key = claim_key(b"secret", "episode", 3)
    logger.info("with the-clients-token, %s, postgresql://me:hunter2@db/x", key)
    logger.info("Authorization: Bearer %s", "abc.def")
    try:
        raise ValueError(f"refused {key}")
    except ValueError:
        logger.exception("key %s", "the-clients-token")
    text = stream.getvalue()
    for secret in ("the-clients-token", key, "hunter2", "abc.def"):
        assert secret not in text
    assert text.count("[secret]") == 6
    assert "@db/x" in text


@pytest.mark.parametrize("is_async", [True, False])
async def test_what_a_rollout_logs_is_about_its_episode(logs: Logs, is_async: bool) -> None:
    """Also on the thread of a plain one; and two that run at once are not confused."""
    stream = logs("json")
    both = threading.Barrier(1 if is_async else 2)

    def plain(episode: Episode) -> float:
        both.wait(20)
        logging.getLogger("users.own").info("at work on %s", episode.episode_uuid)
        return 1.0

    async def coroutine(episode: Episode) -> float:
        await asyncio.sleep(0)
        return plain(episode)

    async def run(name: str) -> None:
        episode = Episode(name, 1, {}, "train", "g", "", "", run="r")
        with about(run="r", episode=name, attempt=1):
            await run_rollout(coroutine if is_async else plain, HeldClaim(episode))

    await asyncio.gather(run("a"), run("b"))
    found = {record["message"]: record["claim"] for record in records(stream)}
    assert found == {"at work on a": "a/1", "at work on b": "b/1"}


async def test_what_the_server_logs_for_a_request_is_about_its_claim(logs: Logs) -> None:
    stream = logs("json")
    keys = ClaimKeys(b"secret", Roles())

    async def request(*headers: tuple[bytes, bytes]) -> None:
        keys.authorize({"type": "http", "headers": list(headers)})
        logger.info("answered")

    key = claim_key(b"secret", "e", 2)
    await asyncio.create_task(request((b"authorization", f"Bearer {key}".encode())))
    await asyncio.create_task(request())
    first, second = records(stream)
    assert first["claim"] == "e/2"
    assert "claim" not in second


def test_a_trainers_log_is_a_file(tmp_path: Path) -> None:
    with logged_to(tmp_path / "trainer.log", "json", run="r"):
        now_about(episode="e")
        logger.info("trained")
    logger.warning("not in it")
    (line,) = (tmp_path / "trainer.log").read_text().splitlines()
    assert json.loads(line).items() >= {"run": "r", "episode": "e"}.items()


def test_a_flood_of_one_warning_is_cut_and_says_so(clock: Clock) -> None:
    flood, passed = FloodFilter(lines=3, clock=clock), list[str]()
    for number in range(5):
        for message in ("call.failed number=%d", "another number=%d"):
            record = logging.LogRecord("n", logging.WARNING, "f", 1, message, (number,), None)
            if flood.filter(record):
                passed.append(TextFormatter([]).format(record).partition("n: ")[2])
    assert passed[:2] == ["call.failed number=0", "another number=0"]
    assert passed[4:] == [f"{said} number=2{MORE_LEFT_OUT}" for said in ("call.failed", "another")]
    clock.now += 60
    assert flood.filter(logging.LogRecord("n", logging.WARNING, "f", 1, "call.failed number=%d", (9,), None))
