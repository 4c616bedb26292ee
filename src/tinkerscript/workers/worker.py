"""One worker process: `run_worker` runs a user's script or tasks of any kind over a server's episodes.

Invariants: SIGTERM, SIGINT and, on request, the parent's end stop it gracefully, and after a grace period it
exits whatever its rollouts do; at the second signal it exits at once. What a task needs is imported only to
run one.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import NoReturn

from pydantic import JsonValue

from tinkerscript.client import Runner, RunStatistics, TinkerScriptClient
from tinkerscript.client.episode import RolloutFunction
from tinkerscript.client.runner import (
    DEFAULT_GIVE_UP_AFTER_S,
    DEFAULT_GRACE_S,
    INTERRUPT_GRACE_S,
    stopped_by_signals,
)
from tinkerscript.client.settings import DEFAULT_SERVER_URL
from tinkerscript.errors import ConfigError, WorkerError
from tinkerscript.lifecycle import (
    INTERRUPTED,
    ORPHAN_GRACE_S,
    STOP_WITHIN_S,
    exit_hard_after,
    when_parent_ends,
    without_garbage_collection,
)
from tinkerscript.protocol import DEFAULT_ALLOW_DISCARD_TIMEOUT_S, TRAINER_POOL, ClaimType
from tinkerscript.workers.base_task import Task
from tinkerscript.workers.script import load_rollout

DEFAULT_TIME_LIMIT_S = 1800.0

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class WorkerOptions:
    """What a worker runs, and for which server. Give either `script` or `tasks`."""

    server_url: str = DEFAULT_SERVER_URL
    script: str = ""
    """File with a `rollout(episode)` function."""

    tasks: Mapping[str, Mapping[str, JsonValue]] = field(default_factory=dict[str, Mapping[str, JsonValue]])
    """Tasks by name (docs/environments.md), each with its arguments."""

    agent: str = ""
    """A coding agent that works on the samples of Inspect tasks in place of their own solvers."""

    time_limit_s: float = DEFAULT_TIME_LIMIT_S
    """Seconds after which an agent is ended and what it left is scored."""

    concurrency: int = 1
    client_uuid: str | None = None
    episode_type: ClaimType = "any"
    pool: str = TRAINER_POOL
    """Whose episodes: the trainer's, or the `client_uuid` of the client that registered them."""

    allow_discard_timeout: float = DEFAULT_ALLOW_DISCARD_TIMEOUT_S
    """Seconds without activity after which the lease of this worker's claims expires."""

    exit_with_parent: bool = False
    """Whether the worker stops when standard input, a pipe from its parent, closes."""

    grace_s: float = DEFAULT_GRACE_S
    """Seconds that running episodes get to finish after SIGTERM. What is left is handed back."""

    give_up_after_s: float | None = DEFAULT_GIVE_UP_AFTER_S
    """Seconds to wait for an unreachable server. None: no limit."""

    token: str | None = field(default=None, repr=False)
    """Token of the client role; None where the server asks for none."""


def run_worker(options: WorkerOptions) -> RunStatistics:
    """Run episodes until stopped.

    Raises WorkerError for a script or task that cannot be run, or an episode of another task,
    ServerUnreachableError when the server stays unreachable, RequestRefusedError when it refuses this client.
    """
    return asyncio.run(_run(options, []))


def worker_process(options: WorkerOptions) -> int:
    """The same, as a process: its exit code, 0 when the run is finished, `INTERRUPTED` after a signal.

    They differ because who starts workers again has to know whether there is work left: a Job of Kubernetes
    is complete when one of its pods ends with 0.
    """
    signals = list[signal.Signals]()
    asyncio.run(_run(options, signals))
    return INTERRUPTED if signals else 0


async def _run(options: WorkerOptions, signals: list[signal.Signals]) -> RunStatistics:
    """Adds the signal that has stopped it to `signals`."""
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
            when_parent_ends(partial(runner.stop, grace_s=ORPHAN_GRACE_S / 3))
        first = partial(_on_signal, signals, runner, options.grace_s, asyncio.get_running_loop())
        statistics = await stopped_by_signals(runner, first=first, second=_exit_at_once)
    logger.info("worker done: %s", statistics)
    return statistics


def _on_signal(
    signals: list[signal.Signals],
    runner: Runner,
    grace_s: float,
    loop: asyncio.AbstractEventLoop,
    number: signal.Signals,
) -> None:
    """The first one: the process ends in time whatever its rollouts do."""
    signals.append(number)
    is_interrupt = number == signal.SIGINT
    exit_hard_after(STOP_WITHIN_S + (0.0 if is_interrupt else grace_s + STOP_WITHIN_S), INTERRUPTED)
    text = "%s: no more claims; %d episodes have %g s to finish, and are handed back after that"
    patience_s = INTERRUPT_GRACE_S if is_interrupt else grace_s
    loop.call_soon_threadsafe(logger.info, text, number.name, runner.statistics().running, patience_s)


def _exit_at_once(number: signal.Signals) -> NoReturn:
    os._exit(INTERRUPTED)


def _client(options: WorkerOptions) -> TinkerScriptClient:
    try:
        return TinkerScriptClient(
            options.server_url,
            client_uuid=options.client_uuid,
            token=options.token,
            allow_discard_timeout=options.allow_discard_timeout,
        )
    except ValueError as error:
        raise WorkerError(str(error)) from error


async def _rollout(options: WorkerOptions, stack: AsyncExitStack) -> RolloutFunction:
    if bool(options.script) == bool(options.tasks):
        raise WorkerError("give a worker either a script (SCRIPT) or tasks (--task NAME)")
    if options.agent and options.script:
        raise WorkerError("an agent works on tasks (--task NAME), not on a script")
    if options.script:
        return load_rollout(options.script)
    try:
        with without_garbage_collection():
            tasks = _agent_tasks(options) if options.agent else _tasks(options)

            from tinkerscript.workers.task_rollout import TaskRollout
    except ModuleNotFoundError as error:
        raise WorkerError(
            f"running a task needs the package {error.name!r}: pip install {error.name}"
        ) from error
    except ConfigError as error:
        raise WorkerError(str(error)) from error
    return await stack.enter_async_context(TaskRollout(tasks))


def _tasks(options: WorkerOptions) -> dict[str, Task]:
    from tinkerscript.workers.task_kinds import load_task

    return {name: load_task(name, args) for name, args in options.tasks.items()}


def _agent_tasks(options: WorkerOptions) -> dict[str, Task]:
    from tinkerscript.workers.task_kinds import INSPECT, kind_of

    others = [name for name in options.tasks if kind_of(name) != INSPECT]
    if others:
        raise WorkerError(f"agents work on Inspect tasks (file.py@NAME); {', '.join(others)} is none")
    from tinkerscript.workers.agents.agent_task import AgentTask

    return {
        name: AgentTask(name, options.agent, options.time_limit_s, **args)
        for name, args in options.tasks.items()
    }


def tasks_with_args(
    tasks: Sequence[str], args: Sequence[Mapping[str, JsonValue]]
) -> dict[str, Mapping[str, JsonValue]]:
    """Each task with its arguments, given in the same order; tasks beyond the last `args` have none.

    Raises WorkerError for more arguments than tasks, or a task that is named twice.
    """
    if len(args) > len(tasks) or len(set(tasks)) < len(tasks):
        raise WorkerError(f"give each task once and at most one --task-args for each, got {list(tasks)}")
    return {task: args[i] if i < len(args) else {} for i, task in enumerate(tasks)}
