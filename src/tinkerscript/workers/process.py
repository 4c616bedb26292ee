"""One worker process: `run_worker` runs a script or an Inspect task over a server's episodes.

Owns the process's way to die: SIGTERM, SIGINT and, on request, the end of its parent stop it gracefully;
after a grace period it exits whatever its rollouts do. Inspect is imported for a task only.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib
import json
import logging
import os
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Any, cast

from pydantic import JsonValue

from tinkerscript.client import Runner, RunStatistics, TinkerScriptClient
from tinkerscript.client.rollout import RolloutFunction
from tinkerscript.client.runner import DEFAULT_GIVE_UP_AFTER_S, DEFAULT_GRACE_S, stopped_by_signals
from tinkerscript.client.settings import DEFAULT_SERVER_URL, client_token
from tinkerscript.errors import TinkerScriptError, WorkerError
from tinkerscript.protocol import DEFAULT_ALLOW_DISCARD_TIMEOUT_S, TRAINER_POOL, ClaimType
from tinkerscript.workers.script import load_rollout

logger = logging.getLogger(__name__)

CANNOT_RUN = 2
"""Exit status of a worker that no restart would help."""

ORPHAN_GRACE_S = 10.0
"""Seconds that a worker whose parent is gone may take to end."""


@dataclass(frozen=True, kw_only=True)
class WorkerOptions:
    """What a worker does, and for whom. Either `script` or some `tasks` are given."""

    server_url: str = DEFAULT_SERVER_URL
    script: str = ""
    """File with a `rollout(episode)` function."""

    tasks: Mapping[str, Mapping[str, JsonValue]] = field(default_factory=dict[str, Mapping[str, JsonValue]])
    """Arguments of each Inspect task by its name: `file.py@name` or a registered one."""

    concurrency: int = 1
    client_uuid: str | None = None
    episode_type: ClaimType = "any"
    pool: str = TRAINER_POOL
    """Whose episodes: the trainer's, or the `client_uuid` of the client that registered them."""

    allow_discard_timeout: float = DEFAULT_ALLOW_DISCARD_TIMEOUT_S
    """Seconds without activity after which a claim of this worker lapses."""

    exit_with_parent: bool = False
    """Whether the end of standard input ends the worker."""

    grace_s: float = DEFAULT_GRACE_S
    """Seconds that running episodes are given after a stop."""

    give_up_after_s: float | None = DEFAULT_GIVE_UP_AFTER_S
    """Seconds that an unreachable server is waited for. None: for ever."""

    token: str | None = field(default=None, repr=False)
    """Token of the client role; None where the server asks for none."""


def run_worker(options: WorkerOptions) -> RunStatistics:
    """Work until stopped.

    Raises WorkerError for a script or task that cannot be run, or that claimed episodes are not of,
    ServerUnreachableError when the server stayed away, RequestRefusedError when it refuses this client.
    """
    return asyncio.run(_run(options))


async def _run(options: WorkerOptions) -> RunStatistics:
    async with AsyncExitStack() as stack:
        rollout = await _rollout(options, stack)
        client = stack.enter_context(_client(options))
        runner = Runner(
            rollout,
            client=client,
            concurrency=options.concurrency,
            episode_type=options.episode_type,
            pool=options.pool,
            grace_s=options.grace_s,
            give_up_after_s=options.give_up_after_s,
        )
        if options.exit_with_parent:
            _watch_parent(runner, sys.stdin.fileno())
        return await stopped_by_signals(runner)


def _client(options: WorkerOptions) -> TinkerScriptClient:
    try:
        return TinkerScriptClient(
            options.server_url,
            client_uuid=options.client_uuid,
            token=options.token or client_token(),
            allow_discard_timeout=options.allow_discard_timeout,
        )
    except ValueError as error:
        raise WorkerError(str(error)) from error


async def _rollout(options: WorkerOptions, stack: AsyncExitStack) -> RolloutFunction:
    if bool(options.script) == bool(options.tasks):
        raise WorkerError("give a worker either a script (--script FILE) or an Inspect task (--task SPEC)")
    if options.script:
        return load_rollout(options.script)
    room, bridge = _imported("tinkerscript.workers.inspect_task"), _imported("inspect_tinker_bridge")
    try:
        return await stack.enter_async_context(room.InspectRollout(options.tasks))
    except bridge.BridgeError as error:
        raise WorkerError(str(error)) from error


def _imported(module: str) -> Any:
    """A module that needs Inspect, which a bare install does not have."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise WorkerError(
            f"running an Inspect task needs the package {error.name!r}: pip install 'tinkerscript[inspect]'"
        ) from error


def _watch_parent(runner: Runner, stdin: int) -> None:
    """Stop when file descriptor `stdin`, a pipe from the parent, ends; then exit, come what may."""
    loop = asyncio.get_running_loop()

    def watch() -> None:
        # Unbuffered: a thread that holds a buffer's lock would break the interpreter's shutdown.
        while os.read(stdin, 4096):
            pass
        if not loop.is_closed():
            loop.call_soon_threadsafe(runner.stop)
        exit_now = threading.Timer(ORPHAN_GRACE_S, os._exit, args=(1,))
        exit_now.daemon = True
        exit_now.start()

    threading.Thread(target=watch, name="parent-watch", daemon=True).start()


def parse_options(arguments: Sequence[str] | None = None) -> WorkerOptions:
    """Options of `python -m tinkerscript.workers`. Ends the program for an unknown or malformed one."""
    parser = argparse.ArgumentParser(prog="python -m tinkerscript.workers", allow_abbrev=False)
    parser.add_argument("--server", default=DEFAULT_SERVER_URL, metavar="URL", help="interchange server")
    work = parser.add_mutually_exclusive_group(required=True)
    work.add_argument("--script", default="", metavar="FILE", help="script with a rollout(episode) function")
    work.add_argument(
        "--task", action="append", metavar="SPEC", help="Inspect task: file.py@name, or a name; repeatable"
    )
    parser.add_argument(
        "--task-args", action="append", type=_json_object, metavar="JSON", help="of each task, in their order"
    )
    parser.add_argument("--concurrency", type=_positive(int), default=1, metavar="N", help="episodes at once")
    parser.add_argument("--client-uuid", metavar="U", help="name of this worker at the server")
    parser.add_argument("--episode-type", choices=("train", "eval", "any"), default="any")
    parser.add_argument("--pool", default=TRAINER_POOL, metavar="U", help="episodes of that client's own")
    parser.add_argument(
        "--allow-discard-timeout",
        type=_positive(float),
        default=DEFAULT_ALLOW_DISCARD_TIMEOUT_S,
        metavar="S",
        help="seconds without activity after which a claim lapses",
    )
    parser.add_argument("--exit-with-parent", action="store_true", help="stop when standard input ends")
    given = parser.parse_args(arguments)
    try:
        tasks = tasks_with_args(given.task or [], given.task_args or [])
    except WorkerError as error:
        parser.error(str(error))
    return WorkerOptions(
        server_url=given.server,
        script=given.script,
        tasks=tasks,
        concurrency=given.concurrency,
        client_uuid=given.client_uuid,
        episode_type=given.episode_type,
        pool=given.pool,
        allow_discard_timeout=given.allow_discard_timeout,
        exit_with_parent=given.exit_with_parent,
    )


def tasks_with_args(
    tasks: Sequence[str], args: Sequence[Mapping[str, JsonValue]]
) -> dict[str, Mapping[str, JsonValue]]:
    """Each task with its arguments, which are in the same order; tasks beyond them have none.

    Raises WorkerError for more arguments than tasks, or a task that is named twice.
    """
    if len(args) > len(tasks) or len(set(tasks)) < len(tasks):
        raise WorkerError(f"give each task once and at most one --task-args for each, got {list(tasks)}")
    return {task: args[i] if i < len(args) else {} for i, task in enumerate(tasks)}


def main(arguments: Sequence[str] | None = None) -> int:
    """The worker process; the exit status is 1, or 2 for a WorkerError, which is printed in one line."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)
    options = parse_options(arguments)
    try:
        statistics = run_worker(options)
    except TinkerScriptError as error:
        print(f"error: {error}", file=sys.stderr)
        return CANNOT_RUN if isinstance(error, WorkerError) else 1
    logger.info("worker done: %s", statistics)
    return 0


def _json_object(text: str) -> dict[str, JsonValue]:
    try:
        value: Any = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"must be a JSON object, not {type(value).__name__}")
    return cast("dict[str, JsonValue]", value)


def _positive(kind: type[int] | type[float]) -> Callable[[str], float]:
    def convert(text: str) -> float:
        try:
            value = kind(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(f"{text!r} is not a number") from error
        if not value > 0:
            raise argparse.ArgumentTypeError(f"must be above 0, got {text}")
        return value

    return convert
