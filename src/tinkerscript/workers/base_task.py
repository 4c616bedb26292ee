"""`Task`: what each kind of environment is to a run, and `load_task`, which makes one from its name.

The trainer asks a task for its samples and never runs one. A worker gets a sample with each episode, and runs
it with the model of that episode, an `EpisodeModel`. `verifiers:ENV` is a task of the kind `verifiers`,
`file.py:NAME` and `module:NAME` are the user's own, and every other name is one of Inspect's. A kind is an
entry of `TASK_KINDS`, or an installed package's entry point in the group `tinkerscript.tasks`.

Invariants: a rollout that cannot be scored raises; it never returns a reward in place of a failure. A kind's
packages are imported only for a task of that kind; a missing one is an error that names the `pip install`.
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

if TYPE_CHECKING:  # It needs aiohttp, which the extras of the kinds install.
    from tinkerscript.workers.chat_endpoint import ChatEndpoint

__all__ = ["EpisodeModel", "Task", "TaskSample", "named_scores"]

HELD_OUT_SEED = 1_000_000
"""Where the seeds of generated samples to evaluate on begin: added to the first seed of those to train on."""

TRANSCRIPT_S = 10.0
"""Seconds that sending a transcript may hold up its episode's end."""

TaskSample: TypeAlias = Mapping[str, JsonValue]
"""One problem, as JSON. `id`: unique in its task. `input`: what is asked, for people: text, or chat messages.
Optional `target` and `metadata` are shown, too. Whatever else the rollout needs may stand beside them. With a
`digest`, that alone says whether the sample of another machine is the same problem; else all of it does."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class EpisodeModel:
    """The model of one episode: its calls go to `base_url` with `api_key`, which opens this episode alone.

    Programs of any kind can be pointed there: it speaks OpenAI's and Anthropic's formats.
    """

    base_url: str
    """For OpenAI's clients: it ends in `/v1`. Anthropic's add that themselves: `anthropic_base_url`."""

    api_key: str = field(repr=False)
    name: str = "policy"
    """What requests call the model."""

    endpoint: ChatEndpoint = field(repr=False)
    """The connections that all episodes of a worker share."""

    sampling: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Request fields that are set for every call, such as `temperature`. Empty under a run: the server
    decides."""

    reply_ids: list[str] = field(default_factory=list[str], repr=False, compare=False)
    """The ids of the replies so far, by which `WorkflowOutput.call_rewards` rewards single calls."""

    claim: Episode | None = None
    """The claim that is worked on, with its lease and limits. None in `tinkerscript eval`."""

    def role(self, name: str) -> EpisodeModel:
        """The model of a role of the run (`roles` in its config), for this episode: a judge, an opponent.

        The server refuses a role that the run does not have.
        """
        return replace(self, name=name, reply_ids=[])

    @property
    def roles(self) -> tuple[str, ...]:
        """Names for `role`: the roles that the claim's run has."""
        return self.claim.roles if self.claim else ()

    @property
    def anthropic_base_url(self) -> str:
        return self.base_url.removesuffix("/v1")

    async def complete(self, messages: Sequence[Mapping[str, Any]], **fields: Any) -> dict[str, Any]:
        """One model call: the reply's message (`role`, `content`, and `tool_calls` if there are any).

        `messages` and `fields` (`tools`, `max_tokens`, ...) are those of OpenAI's chat completions. Raises
        what `ChatEndpoint.complete` raises.
        """
        body = {"model": self.name, "messages": list(messages), **self.sampling, **fields}
        completion = await self.endpoint.complete(self.base_url, self.api_key, body)
        self.reply_ids.append(str(completion.get("id", "")))
        return completion["choices"][0]["message"]

    async def ask(self, messages: Sequence[Mapping[str, Any]], **fields: Any) -> str:
        """One model call: the reply's text. Raises what `complete` raises."""
        return (await self.complete(messages, **fields))["content"] or ""

    @property
    def max_transcript_bytes(self) -> int:
        """The longest transcript that is kept of this episode; 0: none is."""
        return self.claim.max_transcript_bytes if self.claim else 0

    async def record_transcript(self, transcript: bytes) -> None:
        """Keep what a rollout recorded beside its calls. Raises nothing: it is for people."""
        if self.claim is None or not 0 < len(transcript) <= self.max_transcript_bytes:
            return
        url = f"{self.claim.server_url or self.anthropic_base_url.rstrip('/')}/record_transcript"
        try:
            async with asyncio.timeout(TRANSCRIPT_S):
                await self.endpoint.send_bytes(url, self.api_key, transcript)
        except (ClientError, TimeoutError) as error:
            logger.info("episode %s: its transcript is not recorded: %s", self.claim.episode_uuid, error)


class Task(ABC):
    """A source of samples and the way to run one. Subclass it; its arguments are those of
    `task.train_args`."""

    task_id: str = ""
    """What programs on every machine call the task. `load_task` sets it."""

    temperature: float | None = None
    """What every model call asks for unless it says otherwise, if the task knows: a run says before it starts
    that a temperature of 0 does not train."""

    _own: dict[bool, dict[str, TaskSample]] | None = None
    """The samples by id, each kind once it has been asked for."""

    @abstractmethod
    def samples(self, *, held_out: bool) -> Sequence[TaskSample]:
        """The samples to train on, or those to evaluate on: the same whenever they are asked for.

        A task without a split of its own returns the same ones for both; then its arguments choose
        (`task.train_args`, `task.eval_args`).
        """

    def own_sample(self, sample_id: str, *, held_out: bool) -> TaskSample | None:
        """The sample with this id, as text, on this machine; None if there is none.

        It is what a worker runs: of what comes with an episode only the id is used, since whoever runs the
        server writes that.
        """
        if self._own is None:
            self._own = {}
        if held_out not in self._own:
            self._own[held_out] = {str(sample["id"]): sample for sample in self.samples(held_out=held_out)}
        return self._own[held_out].get(sample_id)

    @abstractmethod
    async def rollout(self, sample: TaskSample, model: EpisodeModel) -> RolloutResult:
        """Run one episode and score it. Any number run at once.

        Returns a reward, or a reward and more: `named_scores` makes that of scores by name. Raises whatever
        went wrong, which is recorded as the reason of the failure.
        """

    @classmethod
    @asynccontextmanager
    async def resources(cls, tasks: Sequence[Any]) -> AsyncGenerator[None]:
        """Hold what rollouts of `tasks` need, all of this kind that a process runs: servers, pools, an
        eval."""
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
    """A rollout's result with its scores by name. `call_rewards`: what single calls earned beside `reward`.

    The scores are shown with the episode, and averaged as `score/<name>`; `metrics` are averaged under their
    own names. `answer`: what was scored, for people.
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
"""Kind -> `module:factory`. The factory takes what follows the colon, and the task's arguments; it returns a
Task, or raises ConfigError. The extra that installs its packages has the kind's name."""

ENTRY_POINTS = "tinkerscript.tasks"
"""Group of the entry points of other packages' kinds: each names a factory, as in `TASK_KINDS`."""

INSPECT = "inspect"
OWN = "own"

_INSPECT_FACTORY = "tinkerscript.workers.inspect_task:InspectTask"


def kind_of(name: str) -> str:
    """The kind of the task that is called `name`: one of `TASK_KINDS`, of an installed package, `own`, or
    `inspect`.

    Raises ConfigError for a prefix that is no kind.
    """
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
    """The task called `name`, with its arguments. `sandbox`: one to use in place of an Inspect task's own, as
    `TYPE` or `TYPE:CONFIG_FILE`.

    Raises ConfigError for a name that is unknown, a package that is missing, or arguments that the task does
    not take. What the task's own code raises propagates.
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
    """The name without the folder of its file."""
    source, _, wanted = name.rpartition(":")
    return f"{Path(source).name}:{wanted}" if source.endswith(".py") else name


def load_module(path: Path) -> ModuleType:
    """The module of a Python file. Raises WorkerError for a file that is missing or cannot be imported."""
    path = path.resolve()
    check_is_there(path)
    name = f"tinkerscript_script_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise WorkerError(f"{path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    # Registered before it runs, so that dataclasses and pickling inside the script find their module.
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
    """What to type for a module that this machine lacks."""
    package = (module or "").partition(".")[0]
    if package in ("inspect_ai", "aiohttp", "anyio"):
        return "pip install 'tinkerscript[inspect]'"
    return f"pip install {package}"


def check_is_there(path: Path) -> None:
    """Raises WorkerError that says what is there instead of the file."""
    if not path.is_file():
        raise WorkerError(f"no script at {path}; {_beside(path)}")


def _beside(path: Path) -> str:
    if not path.parent.is_dir():
        return f"there is no folder {path.parent}"
    scripts = sorted(file.name for file in path.parent.glob("*.py"))
    return f"{path.parent} holds {', '.join(scripts[:20]) or 'no Python file'}"
