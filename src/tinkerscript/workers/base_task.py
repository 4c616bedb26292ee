"""`Task` is the interface of every kind of environment, and `load_task` makes one from its name.

The trainer asks a task for its samples; a worker runs one with its episode's `EpisodeModel`. `verifiers:ENV`
is of the kind `verifiers`, `file.py:NAME` and `module:NAME` are the user's, and every other name is
Inspect's.
"""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import inspect
import logging
import re
import sys
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, TypeAlias, cast

from pydantic import JsonValue

from tinkerscript.client import Episode
from tinkerscript.client.episode import RolloutResult
from tinkerscript.errors import ClientError, ConfigError, WorkerError
from tinkerscript.protocol import WorkflowOutput

if TYPE_CHECKING:  # This needs aiohttp, which the extras of the kinds install.
    from tinkerscript.workers.chat_endpoint import ChatEndpoint

__all__ = ["EpisodeModel", "Task", "TaskSample", "named_scores"]

HELD_OUT_SEED = 1_000_000
TRANSCRIPT_S = 10.0  # At the end of the transcript's episode.
TaskSample: TypeAlias = Mapping[str, JsonValue]
"""One problem as JSON.

`id` is unique in its task, and `input` is the question: text or chat messages. Optional `target` and
`metadata` are shown too; further fields are free. Samples of two machines are the same problem if their
`digest`s are equal or, without one, all their fields.
"""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class EpisodeModel:
    """The model of one episode, for programs that speak OpenAI's or Anthropic's format."""

    base_url: str
    """For OpenAI's clients; ends in `/v1`."""

    api_key: str = field(repr=False)
    name: str = "policy"  # The `model` field of requests.
    endpoint: ChatEndpoint = field(repr=False)  # Shared by all episodes of a worker.
    # Fields for every call; empty in a run, where the server decides.
    sampling: Mapping[str, Any] = field(default_factory=dict[str, Any])
    # In order, for `WorkflowOutput.call_rewards`.
    reply_ids: list[str] = field(default_factory=list[str], repr=False, compare=False)
    claim: Episode | None = None  # None in `tinkerscript eval`.

    def role(self, name: str) -> EpisodeModel:
        """Return the model of a role. The server refuses unknown roles."""
        return replace(self, name=name, reply_ids=[])

    @property
    def roles(self) -> tuple[str, ...]:
        """Valid names for `role`."""
        return self.claim.roles if self.claim else ()

    @property
    def anthropic_base_url(self) -> str:
        return self.base_url.removesuffix("/v1")

    async def complete(self, messages: Sequence[Mapping[str, Any]], **fields: Any) -> dict[str, Any]:
        """Make a model call and return the reply's message (`role`, `content`, and `tool_calls` if any).

        Arguments follow OpenAI's chat completions. Raises like `ChatEndpoint.complete`.
        """
        body = {"model": self.name, "messages": list(messages), **self.sampling, **fields}
        completion = await self.endpoint.complete(self.base_url, self.api_key, body)
        self.reply_ids.append(str(completion.get("id", "")))
        return completion["choices"][0]["message"]

    async def ask(self, messages: Sequence[Mapping[str, Any]], **fields: Any) -> str:
        """Return the reply's text. Raises like `complete`."""
        return (await self.complete(messages, **fields))["content"] or ""

    @property
    def max_transcript_bytes(self) -> int:
        return self.claim.max_transcript_bytes if self.claim else 0

    async def record_transcript(self, transcript: bytes) -> None:
        """Never raises, because only people read transcripts."""
        if self.claim is None or not 0 < len(transcript) <= self.max_transcript_bytes:
            return
        url = f"{self.claim.server_url or self.anthropic_base_url.rstrip('/')}/record_transcript"
        try:
            async with asyncio.timeout(TRANSCRIPT_S):
                await self.endpoint.send_bytes(url, self.api_key, transcript)
        except (ClientError, TimeoutError) as error:
            logger.info("episode %s: its transcript is not recorded: %s", self.claim.episode_uuid, error)


class Task(ABC):
    """A source of samples that can run them. A subclass takes `task.train_args`."""

    task_id: str = ""  # The same on every machine; set by `load_task`.
    temperature: float | None = None  # If calls set none; 0 does not train.

    _own: dict[bool, dict[str, TaskSample]] | None = None

    @abstractmethod
    def samples(self, *, held_out: bool) -> Sequence[TaskSample]:
        """Return the samples to train on or to evaluate on, always the same ones.

        Without a split, these are the same, and the arguments choose (`task.train_args`, `task.eval_args`).
        """

    def own_sample(self, sample_id: str, *, held_out: bool) -> TaskSample | None:
        # Never the payload's, which comes from whoever runs the server.
        if self._own is None:
            self._own = {}
        if held_out not in self._own:
            self._own[held_out] = {str(sample["id"]): sample for sample in self.samples(held_out=held_out)}
        return self._own[held_out].get(sample_id)

    @abstractmethod
    async def rollout(self, sample: TaskSample, model: EpisodeModel) -> RolloutResult:
        """Run one episode and score it. Calls may be concurrent.

        Returns a reward, or a reward and more (see `named_scores`). Raises if the rollout cannot be scored,
        and the exception is recorded as the reason.
        """

    @classmethod
    @asynccontextmanager
    async def resources(cls, tasks: Sequence[Any]) -> AsyncGenerator[None]:
        """Hold resources for `tasks`, all of this kind in the process."""
        yield


def named_scores(
    reward: float,
    scores: Mapping[str, float],
    *,
    metrics: Mapping[str, float] | None = None,
    answer: str = "",
    metadata: Mapping[str, JsonValue] | None = None,
    call_rewards: Mapping[str, float] | None = None,
) -> WorkflowOutput:
    """Make a rollout's result with scores by name, shown and averaged as `score/<name>`.

    `metrics` are averaged under their names. `answer` shows people what was scored. `call_rewards` rewards
    single calls.
    """
    shown: dict[str, JsonValue] = {
        "scores": dict(scores),
        "explanations": {name: {} for name in scores},
        "answer": answer,
        **(metadata or {}),
    }
    averaged = {f"score/{name}": float(value) for name, value in scores.items()}
    return WorkflowOutput(
        reward=float(reward),
        call_rewards=dict(call_rewards or {}),
        metadata=shown,
        log_metrics={**averaged, **(metrics or {})},
    )


TASK_KINDS: Mapping[str, str] = {
    "openenv": "tinkerscript.workers.environments.openenv_environment:OpenEnvEnvironment",
    "reasoning_gym": "tinkerscript.workers.environments.reasoning_gym_task:ReasoningGymTask",
    "textarena": "tinkerscript.workers.environments.textarena_game:TextArenaGame",
    "verifiers": "tinkerscript.workers.environments.verifiers_environment:VerifiersEnvironment",
}
"""Kind, which also names its extra -> `module:factory`.

A factory takes the part after the colon and the task's arguments, and raises ConfigError.
"""

ENTRY_POINTS = "tinkerscript.tasks"  # Other packages' kinds, with factories like ours.
INSPECT = "inspect"
OWN = "own"

_INSPECT_FACTORY = "tinkerscript.workers.inspect_task:InspectTask"


def kind_of(name: str) -> str:
    """Return a kind of `TASK_KINDS` or an installed package, `own`, or `inspect`. Raises ConfigError."""
    prefix, colon, rest = name.partition(":")
    if re.fullmatch(r".+\.py:\w+", name):
        return OWN
    if not colon or "/" in prefix or "@" in prefix:
        return INSPECT
    if prefix in TASK_KINDS or prefix in _entry_points():
        return prefix
    if re.fullmatch(r"\w+(\.\w+)*", prefix) and re.fullmatch(r"\w+", rest):
        return OWN
    raise ConfigError(f"{name!r}: there is no kind of task {prefix!r}; there are {_known()}")


def load_task(name: str, args: Mapping[str, Any], *, sandbox: str = "") -> Task:
    """Load a task. `sandbox` (`TYPE` or `TYPE:CONFIG_FILE`) replaces an Inspect task's.

    Raises ConfigError for an unknown name, a missing package, or arguments that the task does not accept, and
    the task's exceptions.
    """
    kind = kind_of(name)
    rest = name.partition(":")[2]
    if kind == OWN:
        factory = _own(name)
    elif kind == INSPECT:
        factory = partial(_imported(_INSPECT_FACTORY, kind, name), name)
    else:
        factory = partial(_factory(kind, name), rest)
    _check_arguments(factory, args, name)
    task = factory(**args)
    if sandbox:
        if kind != INSPECT:
            raise ConfigError(f"a sandbox can be chosen for Inspect tasks; {name!r} is none")
        cast("Any", task).replace_sandbox(sandbox)
    if not isinstance(task, Task):
        raise ConfigError(f"{name!r} made a {type(task).__name__}, not a tinkerscript.workers.Task")
    task.task_id = task.task_id or _name_anywhere(name)
    return task


def _factory(kind: str, name: str) -> Callable[..., object]:
    return _imported(TASK_KINDS[kind] if kind in TASK_KINDS else _entry_points()[kind].value, kind, name)


def _entry_points() -> dict[str, EntryPoint]:
    return {each.name: each for each in entry_points(group=ENTRY_POINTS)}


def _known() -> str:
    return ", ".join(sorted({*TASK_KINDS, *_entry_points()})) + ", module:NAME and file.py:NAME"


def _imported(place: str, kind: str, name: str) -> Callable[..., Any]:
    module, _, factory = place.partition(":")
    try:
        return getattr(importlib.import_module(module), factory)
    except ModuleNotFoundError as error:
        extra = (
            f"tinkerscript[{kind}]" if kind in TASK_KINDS or kind == INSPECT else _entry_points()[kind].name
        )
        raise ConfigError(
            f"the task {name!r} needs the package {error.name!r}: pip install '{extra}'"
        ) from error


def _own(name: str) -> Callable[..., object]:
    source, _, wanted = name.rpartition(":")
    try:
        module = (
            load_module(Path(source).expanduser())
            if source.endswith(".py")
            else importlib.import_module(source)
        )
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"the task {name!r} needs the package {error.name!r}: install it, or put it on PYTHONPATH "
            f"(kinds of tasks: {_known()})"
        ) from error
    except WorkerError as error:
        raise ConfigError(str(error)) from error
    factory: object = getattr(module, wanted, None)
    if not callable(factory):
        raise ConfigError(f"{source} has no class or function {wanted!r} that makes a task")
    return factory


def _check_arguments(factory: Callable[..., object], args: Mapping[str, Any], name: str) -> None:
    signature = inspect.signature(factory)
    try:
        signature.bind(**args)
    except TypeError as error:
        accepted = ", ".join(signature.parameters) or "no arguments"
        raise ConfigError(f"the task {name!r}: {error}; it accepts {accepted}") from error


def _name_anywhere(name: str) -> str:
    source, _, wanted = name.rpartition(":")
    return f"{Path(source).name}:{wanted}" if source.endswith(".py") else name


def load_module(path: Path) -> ModuleType:
    path = path.resolve()
    check_is_there(path)
    name = f"tinkerscript_script_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise WorkerError(f"{path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    # Dataclasses and pickling in the script look for it.
    sys.modules[name] = module
    sys.path.insert(0, str(path.parent))
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        hint = ""
        if isinstance(error, ModuleNotFoundError):
            hint = f"; what it imports has to be on this machine: {how_to_install(error.name)}"
        raise WorkerError(f"{path} cannot be imported: {type(error).__name__}: {error}{hint}") from error
    return module


def how_to_install(module: str | None) -> str:
    package = (module or "").partition(".")[0]
    if package in ("inspect_ai", "aiohttp", "anyio"):
        return "pip install 'tinkerscript[inspect]'"
    return f"pip install {package}"


def check_is_there(path: Path) -> None:
    if not path.is_file():
        raise WorkerError(f"no script at {path}; {_beside(path)}")


def _beside(path: Path) -> str:
    if not path.parent.is_dir():
        return f"there is no folder {path.parent}"
    scripts = sorted(file.name for file in path.parent.glob("*.py"))
    return f"{path.parent} holds {', '.join(scripts[:20]) or 'no Python file'}"
