"""`TaskRunner`: one persistent Inspect eval that runs every episode of one or more tasks.

Samples enter the eval through one `SampleSource` per task; outcomes come back through the same.

Invariants: every `run` ends with an outcome or an error, whatever the solver, the scorers or the eval itself
do; closing restores the process state. Inspect allows one eval per process at a time, so one runner is open
at a time.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import tempfile
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextvars import Context, copy_context
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

from inspect_ai import SampleSource, Task, enqueue_sample, eval_async, task_with
from inspect_ai.dataset import Sample
from inspect_ai.log import EvalLog, EvalSample
from inspect_ai.model import Model
from inspect_ai.solver import Solver

from inspect_tinker_bridge import _inspect_private
from inspect_tinker_bridge.agent import AgentOptions, with_agent
from inspect_tinker_bridge.episodes import (
    UNLIMITED,
    EpisodeOutcome,
    Episodes,
    Policy,
    RunningEpisode,
    bind_episode,
    cancellable,
    policy_model,
)
from inspect_tinker_bridge.errors import EpisodeAbandonedError, InvalidTaskError, RunnerError
from inspect_tinker_bridge.sandbox import SandboxConfig, check_provider
from inspect_tinker_bridge.tasks import InspectTaskInfo


@dataclass(frozen=True)
class RunnerOptions:
    """How a runner's episodes differ from the task as written."""

    model_roles: Mapping[str, str | Model] | None = None
    """Inspect model roles, such as the grader of model-graded scorers."""

    sandbox: SandboxConfig | None = None
    """Replaces the task's own sandbox, like `inspect eval --sandbox`."""

    agent: AgentOptions | None = None
    """Turns the solver's `generate()` into an agent; None leaves it a single model call."""

    allow_self_grading: bool = False
    """Let scorers call the policy. Such calls become ordinary model calls of the episode."""


class TaskRunner:
    """Runs any number of concurrent episodes of one or more tasks.

        async with TaskRunner(info) as runner:
            outcome = await runner.run(info.samples[0], policy)

    Cancelling a `run` ends that episode only.
    """

    def __init__(
        self, task: InspectTaskInfo | Sequence[InspectTaskInfo], options: RunnerOptions | None = None
    ) -> None:
        """Raises InvalidTaskError if there is no task."""
        self._tasks = [task] if isinstance(task, InspectTaskInfo) else list(task)
        if not self._tasks:
            raise InvalidTaskError("a TaskRunner needs at least one task")
        self._options = options or RunnerOptions()
        self._checked_sandboxes: set[str] = set()
        self._episodes: dict[int, RunningEpisode] = {}
        self._epochs = itertools.count(1)
        self._feeds = {id(info): _SampleFeed(self._episodes) for info in self._tasks}
        self._eval: asyncio.Task[None] | None = None
        self._stopped: str | None = None
        self._cause: BaseException | None = None
        self._closing = False

    @property
    def task(self) -> InspectTaskInfo:
        """The runner's task; the first of several."""
        return self._tasks[0]

    @property
    def _names(self) -> str:
        return ", ".join(repr(info.name) for info in self._tasks)

    @property
    def is_open(self) -> bool:
        """Whether `run` can be called: entered, not closed, and its eval alive."""
        return self._eval is not None and self._stopped is None and not self._closing

    async def __aenter__(self) -> TaskRunner:
        """Start the eval. Raises RunnerError, from the cause, if it does not start."""
        if self._eval is not None:
            raise RunnerError("a TaskRunner can be entered only once; create another one")
        self._eval = asyncio.create_task(self._run_eval(), name=f"inspect-eval-{self.task.name}")
        try:
            await _either(self._all_started(), self._eval)
        except asyncio.CancelledError:
            await self._close(self._eval)
            raise
        if self._stopped is not None:
            raise self._error() from self._cause
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """End the eval; episodes that still run are abandoned and their sandboxes removed."""
        if self._eval is not None:
            await self._close(self._eval)

    async def _all_started(self) -> Literal[True]:
        for feed in self._feeds.values():
            await feed.started.wait()
        return True

    async def run(
        self, sample: Sample, policy: Policy, *, task: InspectTaskInfo | None = None
    ) -> EpisodeOutcome:
        """Run one episode of `sample`: the solver, then the scorers.

        `task` selects one of several tasks; None selects the first.

        Raises InvalidTaskError for a task the runner does not have, RunnerError if the eval is closed or
        dies, SandboxError if the sample's sandbox is not available on this machine, SelfGradingError if a
        scorer called the policy, and the policy's own exception if the episode then ended with an error. Any
        other exception of the solver or a scorer is the outcome's `error`. Cancelling ends the episode
        without a score.
        """
        if not self.is_open:
            raise self._error() from self._cause
        if sample.id is None:
            raise InvalidTaskError("the sample has no id; take samples from load_inspect_task(...).samples")
        info = task or self.task
        if id(info) not in self._feeds:
            raise InvalidTaskError(f"the runner has the tasks {self._names}, not {info.name!r}")
        await self._check_sandbox(info, sample)
        epoch = next(self._epochs)
        episode = RunningEpisode(policy, asyncio.get_running_loop().create_future())
        self._episodes[epoch] = episode
        try:
            self._feeds[id(info)].submit(sample, epoch)
            return await episode.ended
        finally:
            if episode.ended.cancelled():
                _inspect_private.cancel_sample(epoch)
            episode.abandon()
            del self._episodes[epoch]

    async def _check_sandbox(self, info: InspectTaskInfo, sample: Sample) -> None:
        """Check up front: one missing provider would end the eval, and every other episode with it."""
        override = self._options.sandbox
        own = info.task.sandbox or sample.sandbox
        name = override.sandbox_type if override else own.type if own else None
        if name is not None and name not in self._checked_sandboxes:
            await check_provider(name)
            self._checked_sandboxes.add(name)

    def _error(self) -> RunnerError:
        reason = self._stopped or ("it was closed" if self._closing else "use it inside `async with`")
        return RunnerError(f"the eval of the task {self._names} is not running: {reason}")

    async def _run_eval(self) -> None:
        before = _inspect_private.ProcessState()
        for feed in self._feeds.values():
            feed.on_started, feed.on_ended = before.restore, self._task_ended
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

    def _eval_logging_to(self, folder: str) -> Coroutine[Any, Any, list[EvalLog]]:
        options = self._options
        model = policy_model(self._episodes, allow_self_grading=options.allow_self_grading)
        tasks = [
            _episode_task(info, self._feeds[id(info)], model, self._episodes, options.agent)
            for info in self._tasks
        ]
        return eval_async(
            tasks,
            max_tasks=len(tasks),
            model=model,
            model_roles=dict(options.model_roles) if options.model_roles else None,
            sandbox=_sandbox_spec(options.sandbox),
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
            max_connections=UNLIMITED,
        )

    def _task_ended(self) -> None:
        """If one of several tasks ends, its runs would wait forever, so end the whole eval."""
        if len(self._tasks) > 1 and self._eval is not None and not self._closing:
            self._eval.cancel()

    def _stop_all(self, reason: str) -> None:
        self._stopped = "it was closed" if self._closing else reason
        for episode in self._episodes.values():
            error = self._error()
            error.__cause__ = self._cause
            episode.abandon(error)

    async def _close(self, eval_task: asyncio.Task[None]) -> None:
        self._closing = True
        feeds = self._feeds.values()
        for feed in feeds:
            feed.close()
        if self._episodes or any(feed.busy or not feed.started.is_set() for feed in feeds):
            eval_task.cancel()
        await _end_of(eval_task)


class _SampleFeed(SampleSource):
    """Feeds one task's samples into the eval and delivers its outcomes.

    Inspect awaits `next_samples` only while the task is idle, so every submission wakes it. `on_ended` is
    called when Inspect stops asking for samples, whatever the reason, so that no run waits for a task that is
    gone.
    """

    def __init__(self, episodes: Episodes) -> None:
        self.started = asyncio.Event()
        self.on_started: Callable[[], None] = lambda: None
        self.on_ended: Callable[[], None] = lambda: None
        self._episodes = episodes
        self._context: Context | None = None
        self._wake = asyncio.Event()
        self._closed = False
        self._running = 0

    @property
    def busy(self) -> bool:
        """Whether Inspect is still working on a sample, abandoned ones included."""
        return self._running > 0

    def submit(self, sample: Sample, epoch: int) -> None:
        """Hand over a sample.

        `enqueue_sample` works only in the eval's own context; copies of it may nest.
        """
        if self._context is None:
            raise RunnerError("the eval has not started")
        self._context.copy().run(enqueue_sample, sample, epoch=epoch)
        self._running += 1
        self._wake.set()

    def close(self) -> None:
        """Let the eval end once it is idle."""
        self._closed = True
        self._wake.set()

    async def next_samples(self) -> list[Sample] | None:
        if self._context is None:
            self._context = copy_context()
            feeder: asyncio.Task[Any] | None = asyncio.current_task()
            if feeder is not None:
                feeder.add_done_callback(lambda _: self.on_ended())
            self.on_started()
            self.started.set()
        await self._wake.wait()
        self._wake.clear()
        return None if self._closed else []

    async def sample_complete(self, sample: EvalSample) -> None:
        self._running -= 1
        episode = self._episodes.get(sample.epoch)
        if episode is not None:
            episode.end(EpisodeOutcome.of(sample))

    async def sample_abandoned(self, sample: Sample, epoch: int) -> None:
        self._running -= 1
        episode = self._episodes.get(epoch)
        if episode is not None:
            episode.abandon(EpisodeAbandonedError(f"Inspect dropped the sample {sample.id!r} before it ran"))


def _sandbox_spec(config: SandboxConfig | None) -> str | tuple[str, str] | None:
    if config is None or config.config is None:
        return config.sandbox_type if config else None
    return config.sandbox_type, str(Path(config.config).expanduser().absolute())


def _episode_task(
    info: InspectTaskInfo,
    source: SampleSource,
    model: Model,
    episodes: Episodes,
    agent: AgentOptions | None,
) -> Task:
    task = info.fresh_task()
    own = task.setup
    setup = [own] if isinstance(own, Solver) else list(own or [])
    return task_with(
        task,
        name=info.name,
        dataset=source,
        setup=[bind_episode(episodes), *setup],
        solver=with_agent(task.solver, agent) if agent else task.solver,
        scorer=[cancellable(scorer, episodes) for scorer in task.scorer or []] or None,
        model=model,
        epochs=1,
        fail_on_error=False,
        continue_on_fail=True,
        score_on_error=False,
        early_stopping=None,
    )


def _error_in(logs: list[EvalLog]) -> str | None:
    return next((log.error.message for log in logs if log.error is not None), None)


async def _either(condition: Coroutine[Any, Any, Literal[True]], task: asyncio.Task[None]) -> None:
    """Wait for the condition or the end of the task, whichever comes first."""
    waiter = asyncio.ensure_future(condition)
    try:
        await asyncio.wait({waiter, task}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        waiter.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await waiter


async def _end_of(task: asyncio.Task[None]) -> None:
    """Wait for the task to end, even if the caller is cancelled meanwhile; re-raise that afterwards."""
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError as error:
            cancelled = error
            task.cancel()
    if cancelled is not None:
        raise cancelled
