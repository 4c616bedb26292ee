"""`run_worker` is a worker process: it runs a user's script, or tasks, over a server's episodes.

SIGTERM, SIGINT and, on request, the parent's end stop it gracefully. A worker runs its own copy of a sample,
never a payload's content, so a server cannot make it run anything else.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import logging
import os
import signal
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn, cast

from pydantic import JsonValue

from tinkerscript.client import (
    AsyncTinkerScriptClient,
    Episode,
    Runner,
    RunStatistics,
    TinkerScriptClient,
)
from tinkerscript.client.episode import RolloutFunction, RolloutResult
from tinkerscript.client.runner import (
    DEFAULT_GIVE_UP_AFTER_S,
    DEFAULT_GRACE_S,
    INTERRUPT_GRACE_S,
    stopped_by_signals,
)
from tinkerscript.client.settings import DEFAULT_SERVER_URL
from tinkerscript.errors import ConfigError, WorkerError, WrongTaskError
from tinkerscript.lifecycle import (
    INTERRUPTED,
    ORPHAN_GRACE_S,
    STOP_WITHIN_S,
    exit_hard_after,
    when_parent_ends,
    without_garbage_collection,
)
from tinkerscript.protocol import DEFAULT_ALLOW_DISCARD_TIMEOUT_S, TRAINER_POOL, ClaimType
from tinkerscript.workers.base_task import (
    INSPECT,
    EpisodeModel,
    Task,
    TaskSample,
    how_to_install,
    kind_of,
    load_module,
    load_task,
)

if TYPE_CHECKING:  # This needs aiohttp, which a script does not.
    from tinkerscript.workers.chat_endpoint import ChatEndpoint

DEFAULT_TIME_LIMIT_S = 1800.0

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class WorkerOptions:
    """Give either `script` or `tasks`. `Runner` and its client explain fields without comments."""

    server_url: str = DEFAULT_SERVER_URL
    script: str = ""  # A file with a `rollout(episode)` function.
    tasks: Mapping[str, Mapping[str, JsonValue]] = field(default_factory=dict[str, Mapping[str, JsonValue]])
    """Each task's arguments, by name."""

    eval_args: Mapping[str, Mapping[str, JsonValue]] = field(
        default_factory=dict[str, Mapping[str, JsonValue]]
    )
    """Arguments for evaluations, where they differ."""

    # `TYPE` or `TYPE:CONFIG_FILE`, by task.
    sandboxes: Mapping[str, str] = field(default_factory=dict[str, str])
    agent: str = ""  # Replaces the solvers of Inspect tasks.
    time_limit_s: float = DEFAULT_TIME_LIMIT_S  # Then the agent is stopped and scored.
    concurrency: int = 1
    client_uuid: str | None = None
    episode_type: ClaimType = "any"
    pool: str = TRAINER_POOL  # The trainer's, or a registering client's `client_uuid`.
    # Seconds without activity before claims lose their lease.
    allow_discard_timeout: float = DEFAULT_ALLOW_DISCARD_TIMEOUT_S
    exit_with_parent: bool = False  # When standard input, a pipe from the parent, closes.
    grace_s: float = DEFAULT_GRACE_S  # For running episodes after SIGTERM.
    give_up_after_s: float | None = DEFAULT_GIVE_UP_AFTER_S  # For an unreachable server. None: no limit.
    token: str | None = field(default=None, repr=False)


def run_worker(options: WorkerOptions) -> RunStatistics:
    """Raises WorkerError for an unusable script or task, ServerUnreachableError, or RequestRefusedError."""
    statistics, _ = asyncio.run(_run(options, []))
    return statistics


def worker_process(options: WorkerOptions) -> int:
    """Return the exit code: `INTERRUPTED` after a signal, 1 if the run failed, otherwise 0.

    A Kubernetes Job is complete when one pod exits with 0. The run's own workers do not report its failure.
    """
    signals = list[signal.Signals]()
    _, has_failed = asyncio.run(_run(options, signals))
    return INTERRUPTED if signals else int(has_failed and not options.exit_with_parent)


async def _run(options: WorkerOptions, signals: list[signal.Signals]) -> tuple[RunStatistics, bool]:
    async with open_runner(options) as runner:
        if options.exit_with_parent:
            when_parent_ends(partial(runner.stop, grace_s=ORPHAN_GRACE_S / 3))
        first = partial(_on_signal, signals, runner, options.grace_s, asyncio.get_running_loop())
        statistics = await stopped_by_signals(runner, first=first, second=_exit_at_once)
    logger.info("worker done: %s", statistics)
    return statistics, runner.has_failed


@asynccontextmanager
async def open_runner(
    options: WorkerOptions,
    *,
    client: AsyncTinkerScriptClient | None = None,
    endpoint: ChatEndpoint | None = None,
) -> AsyncGenerator[Runner]:
    """Pass `client` and `endpoint` to reach a server in this process."""
    async with AsyncExitStack() as stack:
        rollout = await _rollout(options, stack, endpoint)
        yield Runner(
            rollout,
            client=client or stack.enter_context(_client(options)),
            concurrency=options.concurrency,
            episode_type=options.episode_type,
            pool=options.pool,
            grace_s=options.grace_s,
            give_up_after_s=options.give_up_after_s,
        )


def _on_signal(
    signals: list[signal.Signals],
    runner: Runner,
    grace_s: float,
    loop: asyncio.AbstractEventLoop,
    number: signal.Signals,
) -> None:
    # The process must end in time even if its rollouts hang.
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


async def _rollout(
    options: WorkerOptions, stack: AsyncExitStack, endpoint: ChatEndpoint | None
) -> RolloutFunction:
    if bool(options.script) == bool(options.tasks):
        raise WorkerError("give a worker either a script (SCRIPT) or tasks (--task NAME)")
    if options.agent and options.script:
        raise WorkerError("an agent works on tasks (--task NAME), not on a script")
    if options.agent and any(options.sandboxes.values()):
        raise WorkerError("an agent has the sandbox bubblewrap; leave out --sandbox, and task.sandbox_type")
    if options.script:
        return load_rollout(options.script)
    try:
        with without_garbage_collection():
            tasks = {name: _task(name, args, options) for name, args in options.tasks.items()}
            held_out = {
                name: _task(name, args, options)
                for name, args in options.eval_args.items()
                if args != options.tasks[name]
            }
    except ModuleNotFoundError as error:
        raise WorkerError(
            f"running a task needs the package {error.name!r}: {how_to_install(error.name)}"
        ) from error
    except ConfigError as error:
        raise WorkerError(str(error)) from error
    return await stack.enter_async_context(TaskRollout(tasks, held_out=held_out, endpoint=endpoint))


def _task(name: str, args: Mapping[str, JsonValue], options: WorkerOptions) -> Task:
    if not options.agent:
        return load_task(name, args, sandbox=options.sandboxes.get(name, ""))
    if kind_of(name) != INSPECT:
        raise WorkerError(f"agents work on Inspect tasks (file.py@NAME); {name} is none")
    from tinkerscript.workers.agents import AgentTask

    return AgentTask(name, options.agent, options.time_limit_s, **args)


def tasks_with_args(
    tasks: Sequence[str], args: Sequence[Mapping[str, JsonValue]]
) -> dict[str, Mapping[str, JsonValue]]:
    if len(args) > len(tasks) or len(set(tasks)) < len(tasks):
        raise WorkerError(f"give each task once and at most one --task-args for each, got {list(tasks)}")
    return {task: args[i] if i < len(args) else {} for i, task in enumerate(tasks)}


def load_rollout(script: str | Path) -> RolloutFunction:
    """Return a script's `rollout`, with its folder first in `sys.path`, as when Python runs it."""
    path = Path(script).expanduser().resolve()
    module = load_module(path)
    rollout: Any = getattr(module, "rollout", None)
    if not callable(rollout):
        own = (
            name
            for name, each in vars(module).items()
            if inspect.isfunction(each) and each.__module__ == module.__name__
        )
        defined = ", ".join(sorted(own)) or "no function"
        raise WorkerError(f"{path} defines no function rollout(episode); it defines {defined}")
    try:
        inspect.signature(rollout).bind(object())
    except TypeError as error:
        raise WorkerError(f"{path}: rollout must take one argument, the episode: {error}") from error
    return cast("RolloutFunction", rollout)


class TaskRollout:
    def __init__(
        self,
        tasks: Mapping[str, Task],
        *,
        held_out: Mapping[str, Task] | None = None,
        endpoint: ChatEndpoint | None = None,
    ) -> None:
        """`held_out` has different tasks for evaluations."""
        others = held_out or {}
        self._tasks: dict[str, tuple[Task, Task]] = {}  # For training and for evaluation.

        for name, task in tasks.items():
            self._tasks[name] = self._tasks[task.task_id] = task, others.get(name, task)
        self._loaded = [*tasks.values(), *others.values()]
        if endpoint is None:
            from tinkerscript.workers.chat_endpoint import ChatEndpoint

            endpoint = ChatEndpoint()
        self._endpoint = endpoint
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> TaskRollout:
        kinds = {
            type(task): [each for each in self._loaded if type(each) is type(task)] for task in self._loaded
        }
        async with AsyncExitStack() as stack:
            stack.push_async_callback(self._endpoint.aclose)
            for kind, tasks in kinds.items():
                await stack.enter_async_context(kind.resources(tasks))
            self._stack = stack.pop_all()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self._stack.aclose()

    async def __call__(self, episode: Episode) -> RolloutResult:
        """Raises WrongTaskError, WorkerError for an unusable payload, and the rollout's exceptions."""
        task, sample = self._found(episode)
        model = EpisodeModel(
            base_url=episode.openai_base_url,
            api_key=episode.openai_api_key,
            endpoint=self._endpoint,
            claim=episode,
        )
        return await task.rollout(sample, model)

    def _found(self, episode: Episode) -> tuple[Task, TaskSample]:
        tasks, given = self._of(episode.payload), _sample(episode.payload)
        is_eval = episode.episode_type == "eval"
        sample_id, others = str(given["id"]), 0
        for held_out in (is_eval, not is_eval):
            sample = tasks[held_out].own_sample(sample_id, held_out=held_out)
            if sample is not None and _is_same(sample, given):
                return tasks[held_out], sample
            others += sample is not None
        problem = (
            f"the sample {sample_id!r} is another problem" if others else f"there is no sample {sample_id!r}"
        )
        raise WrongTaskError(
            f"{problem} in the task {tasks[0].task_id!r} of this machine, and a worker runs its own samples "
            "only. It needs the trainer's version of the task and its data, the run's train_args "
            "(--task-args) and eval_args (--eval-args), and a task that makes the same samples whenever it "
            "is loaded: a seed where it shuffles. Samples that programs register are for scripts"
        )

    def _of(self, payload: Mapping[str, JsonValue]) -> tuple[Task, Task]:
        named = payload.get("task")
        if not isinstance(named, str):  # No worker could run it, so it is the episode's failure.
            raise WorkerError("the episode's payload names no task, so there is no sample to run")
        if named not in self._tasks:
            runs = ", ".join(sorted({repr(task.task_id) for task in self._loaded}))
            raise WrongTaskError(f"the episode is of the task {named!r}, this worker runs {runs}")
        return self._tasks[named]


def _is_same(own: TaskSample, given: TaskSample) -> bool:
    if "digest" in own:
        return own["digest"] == given.get("digest")
    return _as_json(own) == _as_json(given)


def _as_json(sample: TaskSample) -> str:
    # Transport turns keys into text and tuples into lists.
    return json.dumps(json.loads(json.dumps(dict(sample))), sort_keys=True)


def _sample(payload: Mapping[str, JsonValue]) -> TaskSample:
    sample = payload.get("sample")
    if not isinstance(sample, dict):
        raise WorkerError(f"the episode's payload holds no sample: {str(sample)[:100]}")
    if sample.get("id") is None:
        raise WorkerError("the episode's sample has no id")
    return sample
