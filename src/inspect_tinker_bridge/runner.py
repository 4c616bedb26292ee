"""`TaskRunner` is a persistent Inspect eval that runs every episode of one or more tasks.

The end of a task leaves other tasks' episodes running. Closing restores the process state. One runner is open
at a time, because Inspect allows one eval per process.
"""

from __future__ import annotations

import asyncio
import itertools
import tempfile
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextvars import Context, copy_context
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from inspect_ai import SampleSource, Task, TaskSource, enqueue_sample, enqueue_task, eval_async, task_with
from inspect_ai.dataset import Sample
from inspect_ai.log import EvalLog, EvalSample
from inspect_ai.model import Model
from inspect_ai.solver import Solver

from inspect_tinker_bridge import _inspect_private
from inspect_tinker_bridge.episodes import (
    UNLIMITED,
    ChatPolicy,
    EpisodeOutcome,
    Episodes,
    RunningEpisode,
    bind_episode,
    cancellable,
    guarded,
    policy_model,
    role_model,
)
from inspect_tinker_bridge.errors import EpisodeAbandonedError, InvalidTaskError, RunnerError, SandboxError
from inspect_tinker_bridge.sandbox import SandboxConfig, check_provider
from inspect_tinker_bridge.tasks import AgentOptions, InspectTaskInfo, with_agent

# Docker's engine may be restarting.
_BACK_WITHIN_S = 60.0


@dataclass(frozen=True)
class RunnerOptions:
    model_roles: Mapping[str, str | Model] | None = None
    """Inspect model roles, such as the grader."""

    sandbox: SandboxConfig | None = None
    """Replaces the task's sandbox, like `inspect eval --sandbox`."""

    agent: AgentOptions | None = None
    """Turns the solver's `generate()` into an agent."""

    allow_self_grading: bool = False
    """Whether scorers may call the policy, as ordinary calls of the episode."""

    solver: Solver | None = None
    policy_roles: Sequence[str] = ()
    """Inspect model roles that the policy answers too (see `GenerateRequest.role`)."""


class TaskRunner:
    """Runs any number of concurrent episodes.

        async with TaskRunner(info) as runner:
            outcome = await runner.run(info.samples[0], policy)

    Cancelling a `run` ends only that episode.
    """

    def __init__(
        self, task: InspectTaskInfo | Sequence[InspectTaskInfo], options: RunnerOptions | None = None
    ) -> None:
        tasks = [task] if isinstance(task, InspectTaskInfo) else list(task)
        if not tasks:
            raise InvalidTaskError("a TaskRunner needs at least one task")
        self._checked_sandboxes: set[str] = set()
        self._episodes: dict[int, RunningEpisode] = {}
        self._epochs = itertools.count(1)
        self._entries = [_TaskEntry(info, options or RunnerOptions(), self._episodes) for info in tasks]
        self._source = _TaskFeed(self._task_ended)
        self._eval: asyncio.Task[None] | None = None
        self._stopped: str | None = None
        self._cause: BaseException | None = None
        self._closing = False

    @property
    def task(self) -> InspectTaskInfo:
        return self._entries[0].info

    @property
    def is_open(self) -> bool:
        return self._eval is not None and self._stopped is None and not self._closing

    async def __aenter__(self) -> TaskRunner:
        """Raises RunnerError if the eval does not start."""
        if self._eval is not None:
            raise RunnerError("a TaskRunner can be entered only once; create another one")
        self._eval = asyncio.create_task(self._run_eval(), name=f"inspect-eval-{self.task.name}")
        try:
            for entry in self._entries:
                await _first_of(self._eval, entry.feed.started, entry.ended)
        except asyncio.CancelledError:
            await self._close(self._eval)
            raise
        dead = next((entry for entry in self._entries if not entry.feed.is_open), None)
        if dead is not None:
            error = self._error(dead)
            await self._close(self._eval)
            raise error from self._cause
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._eval is not None:
            await self._close(self._eval)

    async def add(self, task: InspectTaskInfo, options: RunnerOptions | None = None) -> None:
        """Add a task with these options, unless the runner has it.

        Raises RunnerError if the task does not start; other tasks continue.
        """
        options = options or RunnerOptions()
        entry = next((entry for entry in self._entries if entry.serves(task, options)), None)
        if entry is None:
            entry = _TaskEntry(task, options, self._episodes)
            self._entries.append(entry)
        await self._start(entry)

    async def run(
        self,
        sample: Sample,
        policy: ChatPolicy,
        *,
        task: InspectTaskInfo | None = None,
        options: RunnerOptions | None = None,
        on_record: Callable[[EvalSample], None] = lambda record: None,
    ) -> EpisodeOutcome:
        """Run one episode of `sample`: the solver, then the scorers.

        `task` selects one of several tasks (None: the first), and `options` the options it was added with.
        `on_record` gets Inspect's record, even if this raises, unless the episode was abandoned.

        Raises InvalidTaskError for an unknown task, RunnerError if the eval or the task dies or is closed,
        SandboxError if the sandbox is not available here, SelfGradingError if a scorer called the policy, and
        the policy's own exception if the episode then ended with an error. Other exceptions of the solver or
        a scorer are the outcome's `error`. Cancelling ends the episode without a score.
        """
        if not self.is_open:
            raise self._error() from self._cause
        if sample.id is None:
            raise InvalidTaskError("the sample has no id; take samples from load_inspect_task(...).samples")
        entry = self._entry_of(task or self.task, options)
        await self._check_sandbox(entry, sample)
        if not isinstance(sample.input, str):
            sample = await _inspect_private.with_inline_images(sample)
        await self._start(entry)
        epoch = next(self._epochs)
        ended: asyncio.Future[EpisodeOutcome] = asyncio.get_running_loop().create_future()
        episode = RunningEpisode(policy, ended, on_record=on_record)
        self._episodes[epoch] = entry.running[epoch] = episode
        try:
            entry.feed.submit(sample, epoch)
            return await episode.ended
        finally:
            if episode.ended.cancelled():
                _inspect_private.cancel_sample(epoch)
            episode.abandon()
            del self._episodes[epoch], entry.running[epoch]

    def finish(self, policy: ChatPolicy) -> None:
        """End the solver of the policy's episode, and run the scorers."""
        for epoch, episode in self._episodes.items():
            if episode.policy is policy:
                episode.is_finishing = True
                _inspect_private.score_sample(epoch)

    def _entry_of(self, task: InspectTaskInfo, options: RunnerOptions | None) -> _TaskEntry:
        entries = [entry for entry in self._entries if entry.info is task]
        if not entries:
            raise InvalidTaskError(f"the runner has the tasks {self._names}, not {task.name!r}")
        return next((entry for entry in entries if entry.options == options), entries[0])

    async def _start(self, entry: _TaskEntry) -> None:
        if entry.feed.is_open:
            return
        async with entry.starting:
            if entry.feed.is_open:
                return
            if self._eval is None or not self.is_open:
                raise self._error() from self._cause
            entry.reset(self._episodes)
            try:
                self._source.add(self._task_of(entry))
            except Exception as error:
                raise RunnerError(f"the task {entry.info.name!r} cannot start: {error}") from error
            await _first_of(self._eval, entry.feed.started, entry.ended)
            if not entry.feed.is_open:
                raise self._error(entry) from self._cause

    async def _check_sandbox(self, entry: _TaskEntry, sample: Sample) -> None:
        # A missing provider would end the task with all its episodes.
        override = entry.options.sandbox
        own = entry.info.task.sandbox or sample.sandbox
        name = override.sandbox_type if override else own.type if own else None
        was_there = name in self._checked_sandboxes
        if name is None or (was_there and name != "docker"):
            return
        until = asyncio.get_running_loop().time() + (_BACK_WITHIN_S if was_there else 0)
        while True:
            try:
                await asyncio.to_thread(check_provider, name)
                break
            except SandboxError:
                if asyncio.get_running_loop().time() >= until:
                    raise
                await asyncio.sleep(1.0)
        self._checked_sandboxes.add(name)

    @property
    def _names(self) -> str:
        return ", ".join(repr(entry.info.name) for entry in self._entries)

    def _error(self, entry: _TaskEntry | None = None) -> RunnerError:
        stopped = self._stopped or (entry.stopped if entry else None)
        reason = stopped or ("it was closed" if self._closing else "use it inside `async with`")
        names = repr(entry.info.name) if entry else self._names
        return RunnerError(f"the eval of the task {names} is not running: {reason}")

    async def _run_eval(self) -> None:
        before = _inspect_private.ProcessState()
        for entry in self._entries:
            entry.feed.on_started = lambda context: self._begun(before, context)
        _inspect_private.without_live_sessions()
        reason = "it was closed" if self._closing else "it was cancelled"
        try:
            folder = tempfile.TemporaryDirectory(prefix="inspect-bridge-")
            with folder as path, _inspect_private.silent_display():
                logs = await self._eval_logging_to(path)
            reason = _error_in(logs) or "it ended"
        except Exception as error:  # noqa: BLE001 (every pending run raises from it)
            self._cause = error
            reason = str(error) or type(error).__name__
        finally:
            before.restore()
            self._stop_all(reason)

    def _begun(self, before: _inspect_private.ProcessState, context: Context) -> None:
        before.restore()
        self._source.started(context)

    def _eval_logging_to(self, folder: str) -> Coroutine[Any, Any, list[EvalLog]]:
        self._source.first = [self._task_of(entry) for entry in self._entries]
        return eval_async(
            self._source,
            max_tasks=UNLIMITED,
            model=self._source.first[0].model,
            log_dir=folder,
            log_level="error",
            log_samples=False,
            log_realtime=False,
            log_model_api=False,
            score_display=False,
            ctl_server=False,
            acp_server=False,
            fail_on_error=False,
            max_samples=UNLIMITED,
            max_sandboxes=UNLIMITED,
            max_connections=UNLIMITED,
        )

    def _task_of(self, entry: _TaskEntry) -> Task:
        return _episode_task(entry, self._episodes)

    def _task_ended(self, log: EvalLog) -> None:
        # The next run starts the task again.
        number = (log.eval.metadata or {}).get(_ENTRY)
        for entry in self._entries:
            if entry.number == number:
                entry.stopped = "it was closed" if self._closing else (_error_in([log]) or "it ended")
                entry.feed.close()
                entry.ended.set()
                for episode in entry.running.values():
                    episode.abandon(self._error(entry))

    def _stop_all(self, reason: str) -> None:
        self._stopped = "it was closed" if self._closing else reason
        for episode in self._episodes.values():
            error = self._error()
            error.__cause__ = self._cause
            episode.abandon(error)

    async def _close(self, eval_task: asyncio.Task[None]) -> None:
        self._closing = True
        feeds = [entry.feed for entry in self._entries]
        for feed in feeds:
            feed.close()
        self._source.close()
        if self._episodes or any(feed.busy or not feed.started.is_set() for feed in feeds):
            eval_task.cancel()
        await _end_of(eval_task)


_ENTRY = "inspect_tinker_bridge_entry"

_NUMBERS = itertools.count(1)


class _TaskEntry:
    def __init__(self, info: InspectTaskInfo, options: RunnerOptions, episodes: Episodes) -> None:
        self.info = info
        self.options = options
        self.number = next(_NUMBERS)
        self.running: dict[int, RunningEpisode] = {}
        self.starting = asyncio.Lock()
        self.reset(episodes)

    def reset(self, episodes: Episodes) -> None:
        self.feed = _SampleFeed(episodes)
        self.ended = asyncio.Event()
        self.stopped: str | None = None

    def serves(self, info: InspectTaskInfo, options: RunnerOptions) -> bool:
        return self.info is info and self.options == options


class _TaskFeed(TaskSource):
    def __init__(self, on_task_ended: Callable[[EvalLog], None]) -> None:
        self.first: list[Task] = []
        self._on_task_ended = on_task_ended
        self._context: Context | None = None
        self._next: asyncio.Future[list[Task] | None] | None = None
        self._closed = False

    def add(self, task: Task) -> None:
        if self._next is not None and not self._next.done():
            self._next.set_result([task])
        elif self._context is not None:
            self._context.copy().run(enqueue_task, task)
        else:
            raise RunnerError("the eval has not started")

    def close(self) -> None:
        self._closed = True
        if self._next is not None and not self._next.done():
            self._next.set_result(None)

    def initial_tasks(self) -> list[Task]:
        return self.first

    async def next_tasks(self) -> list[Task] | None:
        if self._closed:
            return None
        self._next = asyncio.get_running_loop().create_future()
        return await self._next

    async def task_complete(self, log: EvalLog) -> None:
        self._on_task_ended(log)

    def started(self, context: Context) -> None:
        # Tasks can be added in this context.
        self._context = context


class _SampleFeed(SampleSource):
    """Feeds one task's samples into the eval and delivers its outcomes.

    Inspect awaits `next_samples` only while the task is idle, so every submission must wake it.
    """

    def __init__(self, episodes: Episodes) -> None:
        self.started = asyncio.Event()
        self.on_started: Callable[[Context], None] = lambda context: None
        self._context: Context | None = None
        self._episodes = episodes
        self._wake = asyncio.Event()
        self._closed = False
        self._running = 0

    @property
    def is_open(self) -> bool:
        return self.started.is_set() and not self._closed

    @property
    def busy(self) -> bool:
        return self._running > 0

    def submit(self, sample: Sample, epoch: int) -> None:
        if self._context is None:
            raise RunnerError("the eval has not started")
        # This only works in the eval's context; copies allow nesting.
        self._context.copy().run(enqueue_sample, sample, epoch=epoch)
        self._running += 1
        self._wake.set()

    def close(self) -> None:
        self._closed = True
        self._wake.set()

    async def next_samples(self) -> list[Sample] | None:
        if self._context is None:
            self._context = copy_context()
            self.on_started(self._context)
            self.started.set()
        await self._wake.wait()
        self._wake.clear()
        return None if self._closed else []

    async def sample_complete(self, sample: EvalSample) -> None:
        self._running -= 1
        episode = self._episodes.get(sample.epoch)
        if episode is not None:
            try:
                episode.end(EpisodeOutcome.of(sample))
            except Exception as error:  # noqa: BLE001 - raised here, it would end the task and all its episodes
                episode.abandon(error)

    async def sample_abandoned(self, sample: Sample, epoch: int) -> None:
        self._running -= 1
        episode = self._episodes.get(epoch)
        if episode is not None:
            episode.abandon(EpisodeAbandonedError(f"Inspect dropped the sample {sample.id!r} before it ran"))


def _sandbox_spec(config: SandboxConfig) -> str | tuple[str, str]:
    return config.sandbox_type if config.config is None else (config.sandbox_type, config.config)


def _episode_task(entry: _TaskEntry, episodes: Episodes) -> Task:
    options, task = entry.options, entry.info.fresh_task()
    solver = options.solver or task.solver
    own = task.setup
    setup = [own] if isinstance(own, Solver) else list(own or [])
    sandbox = task.sandbox
    if options.sandbox is not None:
        sandbox = _inspect_private.overridden_sandbox(task, _sandbox_spec(options.sandbox))
    return task_with(
        task,
        name=entry.info.name,
        dataset=entry.feed,
        setup=[bind_episode(episodes), *map(guarded, setup)],
        solver=guarded(with_agent(solver, options.agent) if options.agent else solver),
        scorer=[cancellable(scorer, episodes) for scorer in task.scorer or []] or None,
        model=policy_model(episodes, allow_self_grading=options.allow_self_grading),
        model_roles={
            **(task.model_roles or {}),
            **(options.model_roles or {}),
            **{role: role_model(episodes, role) for role in options.policy_roles},
        },
        sandbox=sandbox,
        metadata={**(task.metadata or {}), _ENTRY: entry.number},
        epochs=1,
        fail_on_error=False,
        continue_on_fail=True,
        score_on_error=False,
        early_stopping=None,
    )


def _error_in(logs: list[EvalLog]) -> str | None:
    return next((log.error.message for log in logs if log.error is not None), None)


async def _first_of(task: asyncio.Task[None], *events: asyncio.Event) -> None:
    waiters = [asyncio.ensure_future(event.wait()) for event in events]
    try:
        await asyncio.wait({task, *waiters}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for waiter in waiters:
            waiter.cancel()
        await asyncio.gather(*waiters, return_exceptions=True)


async def _end_of(task: asyncio.Task[None]) -> None:
    # End the task even if the caller is cancelled.
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError as error:
            cancelled = error
            task.cancel()
    if cancelled is not None:
        raise cancelled
