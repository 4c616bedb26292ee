"""`verifiers:ENV` is an environment of verifiers 0.4. Each episode is a slot of an `Env` in its `serving()`.

verifiers keeps a model client for each endpoint and key, so all episodes share one `ModelRelay`, which knows
each claim by the ids of the episode's traces. verifiers' `null` harness starts a Python program for every
turn, which takes a second; `SharedChatHarness` runs the same source as a coroutine.
"""

# Types are checked without verifiers.
# pyright: reportMissingImports=false, reportUnknownParameterType=false, reportUnknownLambdaType=false
# pyright: reportUntypedBaseClass=false

from __future__ import annotations

import argparse
import importlib
import sys
import traceback
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from contextvars import ContextVar
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any, cast

from pydantic import ValidationError
from verifiers.v1.clients import EvalClientConfig, ModelContext
from verifiers.v1.configs.agent import AgentConfig
from verifiers.v1.configs.select import SelectConfig
from verifiers.v1.env import Env, RunSlot
from verifiers.v1.episode import Episode as EnvEpisode
from verifiers.v1.errors import EnvError
from verifiers.v1.harnesses.null.harness import NullHarness
from verifiers.v1.harnesses.utils.launch import CHAT_PROGRAM_SOURCE
from verifiers.v1.runtimes import ProgramResult, Runtime
from verifiers.v1.runtimes.subprocess import SubprocessRuntime
from verifiers.v1.task import Task as EnvTask
from verifiers.v1.task import TaskData
from verifiers.v1.trace import Trace as EnvTrace
from verifiers.v1.utils.loaders import (
    default_harness_id,
    env_config_type,
    load_environment,
    resolve_env_config,
)

from tinkerscript.errors import ConfigError, WorkerError
from tinkerscript.protocol import WorkflowOutput
from tinkerscript.workers.base_task import EpisodeModel, Task, TaskSample, named_scores
from tinkerscript.workers.model_relay import ModelRelay

__all__ = ["SharedChatHarness"]  # verifiers looks for this.

NO_KEY = "TINKERSCRIPT_NO_KEY"  # Unset, because the relay needs no key.
HARNESS_ID = "tinkerscript"

# Where verifiers looks for harnesses.
sys.modules[f"verifiers.v1.harnesses.{HARNESS_ID}"] = sys.modules[__name__]


class VerifiersEnvironment(Task):
    """Its arguments are the environment's config (`taskset`, `agent` and other roles, `timeout`, ...), and
    `select`, as in `vf-eval --select`.

    A role gets the harness `null` in this process and the runtime `subprocess`, because verifiers' defaults,
    `bash` and `prime`, run the model's commands on this machine or need an account.
    """

    def __init__(
        self, environment: str, /, *, select: Mapping[str, Any] | None = None, **config: Any
    ) -> None:
        _check_installed(environment)
        taskset = {**config.pop("taskset", {}), "id": environment}
        try:
            self.env: Env[Any] = load_environment(
                resolve_env_config({**_roles(environment, config), "taskset": taskset})
            )
            self._select = SelectConfig.model_validate(select or {})
        except ValidationError as error:
            raise ConfigError(f"verifiers:{environment}: {error}") from error
        self._relay: ModelRelay | None = None

    def samples(self, *, held_out: bool) -> Sequence[TaskSample]:
        tasks = self.env.taskset.select(self._select)
        if not tasks.bounded:
            raise ConfigError(
                f"{self.task_id}: the taskset never ends: choose with task.train_args and eval_args, such as "
                "{select: {include: {idx: ['0:1000']}}}"
            )
        return [_as_sample(task) for task in tasks]

    async def rollout(self, sample: TaskSample, model: EpisodeModel) -> WorkflowOutput:
        assert self._relay is not None, "a rollout runs inside `resources`"
        client = EvalClientConfig(base_url=self._relay.url, api_key_var=NO_KEY)
        context = ModelContext(model=model.name, client=client)
        with self._relay.episode(model) as relayed:
            slot = RunSlot(self._task(sample))
            episode = await self.env.run_slot(
                slot, context, on_trace=lambda trace: relayed.announce(trace.id)
            )
        if relayed.error is not None:
            raise relayed.error
        return _output(episode, model.name, relayed.calls)

    @classmethod
    @asynccontextmanager
    async def resources(cls, tasks: Sequence[Any]) -> AsyncGenerator[None]:
        async with AsyncExitStack() as stack:
            relay = await stack.enter_async_context(ModelRelay())
            stack.push_async_callback(_PROGRAM.aclose)
            for task in tasks:
                await stack.enter_async_context(task.env.serving())
                task._relay = relay
            yield

    def _task(self, sample: TaskSample) -> EnvTask[Any, Any, Any]:
        kind = type(self.env.taskset).task_type()
        try:
            data = kind.data_type().model_validate(sample["data"])
        except (KeyError, ValidationError) as error:
            raise WorkerError(
                f"the sample {sample.get('id')!r} holds no task of {self.task_id}: {error}"
            ) from error
        return kind(data, self.env.config.taskset.task)


def _check_installed(environment: str) -> None:
    name = environment.rpartition("/")[2].partition("@")[0].replace("-", "_")
    if name.isidentifier() and find_spec(f"verifiers.v1.tasksets.{name}") is not None:
        return
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"verifiers:{environment} needs the module {error.name!r}, which is not installed: install the "
            "environment's package"
        ) from error
    if hasattr(module, "load_environment"):
        raise ConfigError(
            f"verifiers:{environment} is written for the API of verifiers 0.3 (load_environment): take a "
            "version of the package for verifiers 0.4"
        )


def _roles(environment: str, config: Mapping[str, Any]) -> dict[str, Any]:
    kind = env_config_type(environment, str(config.get("id", "")))
    bundled = default_harness_id(environment) == environment
    filled: dict[str, Any] = {}
    for name, field in kind.model_fields.items():
        if isinstance(role := field.default, AgentConfig):
            ours: dict[str, Any] = {}
            if "runtime" not in role.model_fields_set:
                ours["runtime"] = {"type": "subprocess"}
            if role.harness is None and not bundled:
                ours["harness"] = {"id": HARNESS_ID}
            filled[name] = {**ours, **config.get(name, {})}
    return {**config, **filled}


def _as_sample(task: EnvTask[Any, Any, Any]) -> TaskSample:
    data = task.data
    return {
        "id": data.idx,
        "input": data.prompt_text or data.description or data.name or "",
        "metadata": {"name": data.name or data.id or ""},
        "data": data.model_dump(mode="json"),
    }


def _output(episode: EnvEpisode[Any, Any, Any], policy: str, calls: int) -> WorkflowOutput:
    """Return rewards and metrics by name, as `agent/name` with several agents.

    The reward is the mean over the traces of `policy` that verifiers would train on. An agent with another
    `model` is scored as its role.
    """
    ended_by = _ended_by(episode)
    several = len(episode.traces) > 1
    scores: dict[str, float] = {}
    metrics: dict[str, float] = {"model_calls": float(calls)}
    for trace in episode.traces:
        prefix = f"{trace.agent.name or 'agent'}/" if several else ""
        scores |= {
            prefix + name: reward.value for name, reward in trace.rewards.items() if reward is not None
        }
        metrics |= {prefix + name: value for name, value in trace.metrics.items() if value is not None}
    if ended_by:
        metrics["environment_error"] = 1.0
    trained = [trace for trace in episode.traces if trace.agent.trainable] or episode.traces
    own = [trace for trace in trained if _model_of(trace, policy) == policy]
    for role in {_model_of(trace, policy) for trace in trained} - {policy}:
        scores[role] = _mean_reward([trace for trace in trained if _model_of(trace, policy) == role])
    return named_scores(
        _mean_reward(own or trained),
        scores,
        metrics=metrics,
        answer=(own or trained)[-1].last_reply,
        metadata={"environment_error": ended_by} if ended_by else None,
    )


def _model_of(trace: EnvTrace[Any, Any, Any], policy: str) -> str:
    return trace.agent.config.model or policy


def _mean_reward(traces: Sequence[EnvTrace[Any, Any, Any]]) -> float:
    return sum(trace.reward for trace in traces) / len(traces)


def _ended_by(episode: EnvEpisode[Any, Any, Any]) -> str:
    """Return the exception of the environment's `run()`, or "".

    The work so far is then scored, as by verifiers. Raises WorkerError for other failures.
    """
    if episode.ok:
        return ""
    last = episode.last_error
    is_own = last is not None and last.type == EnvError.__name__ and ".run(): " in last.message
    if last is not None and is_own and episode.traces and all(trace.ok for trace in episode.traces):
        return last.message
    errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
    words = "; ".join(f"{error.type}: {error.message}" for error in errors[-2:])
    raise WorkerError(f"verifiers: {words or 'the episode is not ok'}")


_arguments: ContextVar[argparse.Namespace] = ContextVar("arguments of the chat program")


class SharedChatHarness(NullHarness):
    async def setup(self, runtime: Runtime) -> None:
        if not isinstance(runtime, SubprocessRuntime):
            raise TypeError(
                f"the harness {HARNESS_ID!r} runs beside the worker, not in a {type(runtime).__name__}; "
                "set the role's harness.id to null"
            )

    async def launch(
        self,
        ctx: ModelContext,
        trace: EnvTrace[Any, Any, Any],
        runtime: Runtime,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: TaskData,
        tool_interception_url: str | None = None,
    ) -> ProgramResult:
        here = cast("Runtime", _InThisProcess(cast("SubprocessRuntime", runtime)))
        return await super().launch(ctx, trace, here, endpoint, secret, mcp_urls, data, tool_interception_url)


class _InThisProcess:
    def __init__(self, runtime: SubprocessRuntime) -> None:
        self._runtime = runtime

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runtime, name)

    async def prepare_uv_script(self, script: str, env: dict[str, str], **options: Any) -> list[str]:
        assert script == CHAT_PROGRAM_SOURCE
        return []

    async def run_program(self, argv: list[str], env: dict[str, str]) -> ProgramResult:
        arguments = _PROGRAM.arguments(argv)
        if arguments.initial_messages_file:
            arguments.initial_messages_file = str(
                Path(str(self._runtime.workdir), arguments.initial_messages_file)
            )
        token = _arguments.set(arguments)
        try:
            await _PROGRAM.main()
        except SystemExit as ended:
            return ProgramResult(exit_code=int(ended.code or 0), stdout="", stderr=traceback.format_exc())
        except Exception:  # noqa: BLE001 - a program ends with its traceback, which verifiers reads
            return ProgramResult(exit_code=1, stdout="", stderr=traceback.format_exc())
        finally:
            _arguments.reset(token)
        return ProgramResult(exit_code=0, stdout="", stderr="")


class _ChatProgram:
    def __init__(self) -> None:
        module = ModuleType("verifiers_chat_program")
        exec(compile(CHAT_PROGRAM_SOURCE, "<the chat program of verifiers>", "exec"), module.__dict__)
        self._parse: Callable[[], argparse.Namespace] = module.__dict__["parse_args"]
        self.main: Callable[[], Awaitable[None]] = module.__dict__["main"]
        self._pool: Any = None
        self._new_pool: Callable[..., Any] = module.__dict__["DefaultAsyncHttpxClient"]
        module.__dict__["parse_args"] = _arguments.get
        module.__dict__["DefaultAsyncHttpxClient"] = self._shared_pool

    def arguments(self, argv: list[str]) -> argparse.Namespace:
        former, sys.argv = sys.argv, ["chat", *argv]
        try:
            return self._parse()
        finally:
            sys.argv = former

    def _shared_pool(self, **options: Any) -> Any:
        if self._pool is None:
            self._pool = self._new_pool(verify=False, timeout=None)
        return self._pool

    async def aclose(self) -> None:
        pool, self._pool = self._pool, None
        if pool is not None:
            await pool.aclose()


_PROGRAM = _ChatProgram()
