"""Environments of verifiers 0.4: each episode is a slot of an `Env`, inside its `serving()`.

verifiers' interception servers keep a model client for each endpoint and key, so all episodes share one
endpoint, a `ModelRelay`, which knows each claim by the ids of the episode's traces.

Invariant: an episode that verifiers does not call ok is a failure, with verifiers' own reason.
"""

# verifiers is not installed where types are checked.
# pyright: reportMissingImports=false, reportUnknownParameterType=false, reportUnknownLambdaType=false

from __future__ import annotations

import sys
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

from pydantic import ValidationError
from verifiers.v1.clients import EvalClientConfig, ModelContext
from verifiers.v1.configs.agent import AgentConfig
from verifiers.v1.configs.select import SelectConfig
from verifiers.v1.env import Env, RunSlot
from verifiers.v1.episode import Episode as EnvEpisode
from verifiers.v1.task import Task as EnvTask
from verifiers.v1.utils.loaders import (
    default_harness_id,
    env_config_type,
    load_environment,
    resolve_env_config,
)

from tinkerscript.errors import ConfigError, WorkerError
from tinkerscript.protocol import WorkflowOutput
from tinkerscript.workers.base_task import EpisodeModel, Task, TaskSample, named_scores
from tinkerscript.workers.environments import verifiers_chat
from tinkerscript.workers.model_relay import ModelRelay

NO_KEY = "TINKERSCRIPT_NO_KEY"
"""An environment variable that is not set: the relay needs no key."""

# verifiers imports a harness by its id from this package; ours is not installed there.
sys.modules[f"verifiers.v1.harnesses.{verifiers_chat.HARNESS_ID}"] = verifiers_chat


class VerifiersEnvironment(Task):
    """An environment of verifiers 0.4.

    Its arguments are the environment's config (`taskset`, `agent` and other roles, `timeout`, ...), and
    `select`, which chooses tasks as `vf-eval --select` does. A role without a harness of its own gets the
    chat loop `null`, run in this process; a role without a runtime gets `subprocess`. `bash` and `prime`,
    which verifiers would take, run what the model writes on this machine, or need an account.
    """

    def __init__(
        self, environment: str, /, *, select: Mapping[str, Any] | None = None, **config: Any
    ) -> None:
        """Raises ConfigError for an environment that is not installed, or a config that it does not take."""
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
        return _output(episode, relayed.calls)

    @classmethod
    @asynccontextmanager
    async def resources(cls, tasks: Sequence[Any]) -> AsyncGenerator[None]:
        """One relay, and each environment's own servers."""
        async with AsyncExitStack() as stack:
            relay = await stack.enter_async_context(ModelRelay())
            stack.push_async_callback(verifiers_chat.close_chat_program)
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


def _roles(environment: str, config: Mapping[str, Any]) -> dict[str, Any]:
    """The config with a runtime and a harness for each role that names none."""
    kind = env_config_type(environment, str(config.get("id", "")))
    bundled = default_harness_id(environment) == environment
    filled: dict[str, Any] = {}
    for name, field in kind.model_fields.items():
        if isinstance(role := field.default, AgentConfig):
            ours: dict[str, Any] = {}
            if "runtime" not in role.model_fields_set:
                ours["runtime"] = {"type": "subprocess"}
            if role.harness is None and not bundled:
                ours["harness"] = {"id": verifiers_chat.HARNESS_ID}
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


def _output(episode: EnvEpisode[Any, Any, Any], calls: int) -> WorkflowOutput:
    """The episode's rewards and metrics by name; with several agents, each as `agent/name`.

    The reward is the mean over the traces that verifiers would train on. Raises WorkerError.
    """
    _check_ok(episode)
    several = len(episode.traces) > 1
    scores: dict[str, float] = {}
    metrics: dict[str, float] = {"model_calls": float(calls)}
    for trace in episode.traces:
        prefix = f"{trace.agent.name or 'agent'}/" if several else ""
        scores |= {
            prefix + name: reward.value for name, reward in trace.rewards.items() if reward is not None
        }
        metrics |= {prefix + name: value for name, value in trace.metrics.items() if value is not None}
    trained = [trace for trace in episode.traces if trace.agent.trainable] or episode.traces
    answer = trained[-1].last_reply
    return named_scores(
        sum(trace.reward for trace in trained) / len(trained), scores, metrics=metrics, answer=answer
    )


def _check_ok(episode: EnvEpisode[Any, Any, Any]) -> None:
    """Raises WorkerError with what verifiers recorded."""
    if episode.ok:
        return
    errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
    words = "; ".join(f"{error.type}: {error.message}" for error in errors[-2:])
    raise WorkerError(f"verifiers: {words or 'the episode is not ok'}")
