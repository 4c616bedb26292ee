"""Load Inspect tasks, and give an agent to tasks that have none."""

from __future__ import annotations

import ast
import copy
import difflib
import functools
import inspect
import pickle
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from types import NoneType
from typing import Any, TypeAlias

from inspect_ai import Task
from inspect_ai.agent import AgentSubmit, as_solver, react
from inspect_ai.dataset import Dataset, Sample
from inspect_ai.model import ChatMessageSystem, GenerateConfigArgs
from inspect_ai.scorer import Scorer
from inspect_ai.solver import Generate, Solver, TaskState, solver
from inspect_ai.tool import Tool, ToolDef, bash, python
from typing_extensions import Unpack

from inspect_tinker_bridge import _inspect_private
from inspect_tinker_bridge.errors import (
    EnvironmentConfigError,
    InvalidTaskError,
    TaskArgumentsError,
    TaskError,
    TaskNotFoundError,
    require_counts,
)

__all__ = [
    "SUBMIT_INSTRUCTION",
    "AgentOptions",
    "InspectTaskInfo",
    "TaskLike",
    "load_inspect_task",
    "with_agent",
]


TaskLike: TypeAlias = Callable[..., Task] | Task | str
"""A task function, a Task, `file.py@name`, a `file.py` with a single task, or a registered name."""

_NAMES_SHOWN = 20


@dataclass(frozen=True)
class InspectTaskInfo:
    """A loaded task. Unless it was given as a Task, it is pickled as instructions to load the task again."""

    task: Task
    """Not to be modified; see `fresh_task`."""

    name: str
    samples: list[Sample]
    """In the dataset's order, with unique ids."""

    scorers: list[Scorer]
    scorer_names: list[str]
    """As in Inspect's logs, where a second `match` is `match1`."""

    sandbox_type: str | None

    dataset: Dataset
    source: TaskLike = field(repr=False)
    args: dict[str, Any] = field(default_factory=dict[str, Any], repr=False)

    @property
    def task_id(self) -> str:
        """The task's name on any machine: `file.py@name`, or the registered name."""
        if not isinstance(self.source, str):
            return self.name
        path = Path(self.source.partition("@")[0])
        return f"{path.name}@{self.name}" if path.suffix == ".py" else self.source

    def fresh_task(self) -> Task:
        """A copy to modify."""
        return copy.copy(self.task)

    def __reduce__(self) -> tuple[Callable[[bytes], InspectTaskInfo], tuple[bytes]]:
        if isinstance(self.source, Task):
            raise pickle.PicklingError(
                f"the task {self.name!r} was given as a Task object, which other processes cannot load; "
                "pass the task function or 'file.py@name' instead"
            )
        return _load_pickled, (pickle.dumps((self.source, self.args)),)


@functools.cache
def _load_pickled(source_and_args: bytes) -> InspectTaskInfo:
    source, args = pickle.loads(source_and_args)
    return load_inspect_task(source, **args)


def load_inspect_task(task: TaskLike, **task_args: Any) -> InspectTaskInfo:
    """Load a task; each call creates a fresh Task.

    Samples without an id get their position from 1, as in Inspect. Raises TaskNotFoundError,
    TaskArgumentsError, InvalidTaskError for duplicate sample ids or something that is not a task, and the
    task's exceptions.
    """
    loaded = _create(task, task_args)
    if not isinstance(loaded, Task):
        raise InvalidTaskError(f"{_describe(task)} returned a {type(loaded).__name__}, not an Inspect Task")
    return InspectTaskInfo(
        task=loaded,
        name=loaded.name,
        samples=_with_unique_ids(loaded),
        scorers=list(loaded.scorer or []),
        scorer_names=_inspect_private.scorer_names(loaded.scorer or []),
        sandbox_type=loaded.sandbox.type if loaded.sandbox else None,
        dataset=loaded.dataset,
        source=_absolute(task) if isinstance(task, str) else task,
        args=dict(task_args),
    )


def _absolute(spec: str) -> str:
    # Another process may run in another folder.
    path, separator, name = spec.rpartition("@")
    if separator and path:
        return f"{Path(path).expanduser().absolute()}@{name}"
    return str(Path(spec).expanduser().absolute()) if spec.endswith(".py") else spec


def _create(task: TaskLike, args: dict[str, Any]) -> object:
    if isinstance(task, Task):
        if args:
            raise TaskArgumentsError(
                f"{_describe(task)} is already a Task and takes no arguments ({', '.join(args)}); "
                "pass the task function instead"
            )
        return copy.copy(task)
    if isinstance(task, str):
        return _create_named(task, args)
    _check_args(task, args, _describe(task))
    return task(**args)


def _create_named(spec: str, args: dict[str, Any]) -> Task:
    path, separator, name = spec.rpartition("@")
    if separator and path:
        return _create_in_file(Path(path).expanduser(), name, args)
    if spec.endswith(".py"):
        return _create_in_file(Path(spec).expanduser(), None, args)
    function = _inspect_private.find_registered(spec)
    if function is None:
        raise TaskNotFoundError(_unknown_registered(spec))
    _check_args(function, args, f"the task {spec!r}")
    return _inspect_private.create_registered(spec, args)


def _create_in_file(path: Path, name: str | None, args: dict[str, Any]) -> Task:
    name = _name_in_file(path, name)
    _inspect_private.load_file(path)
    _check_args(_inspect_private.find_registered(name), args, f"the task {name!r} of {path}")
    return _inspect_private.create_in_file(path, name, args)


def _name_in_file(path: Path, name: str | None) -> str:
    if not path.is_file():
        raise TaskNotFoundError(_missing_file(path))
    try:
        ast.parse(path.read_bytes(), str(path))
    except SyntaxError as error:
        raise TaskError(f"{path} is not valid Python: {error}") from error
    names = _inspect_private.task_names_in_file(path)
    if name in names:
        return name
    if name is None and len(names) == 1:
        return names[0]
    if not names:
        raise TaskNotFoundError(f"{path} has no function decorated with @task")
    wanted = f"no task {name!r}" if name else "more than one task"
    raise TaskNotFoundError(f"{path} has {wanted}; name one of: " + _listed(f"{path}@{n}" for n in names))


def _missing_file(path: Path) -> str:
    folder = path.parent
    if not folder.is_dir():
        return f"there is no file {path}: the folder {folder.absolute()} does not exist"
    names = _listed(sorted(found.name for found in folder.glob("*.py"))) or "no Python files"
    return f"there is no file {path}; {folder.absolute()} contains {names}"


def _unknown_registered(spec: str) -> str:
    package, slash, _ = spec.partition("/")
    names = _inspect_private.registered_names()
    near = difflib.get_close_matches(spec, names, n=5)
    of_package = [name for name in names if slash and name.startswith(f"{package}/")] or names
    others = [name for name in of_package if name not in near]
    known = _listed([*near, *others]) or "none; install the package that provides it"
    hint = " (name a file as file.py@name)"
    return f"no task is registered as {spec!r}{hint}; registered tasks: {known}"


def _check_args(function: object, args: dict[str, Any], what: str) -> None:
    if not callable(function):
        raise InvalidTaskError(f"{what} is a {type(function).__name__}, not a task function")
    try:
        signature = inspect.signature(function)
    except ValueError:  # Builtins may have no signature; then the call raises.
        return
    try:
        signature.bind(**args)
    except TypeError as error:
        parameters = ", ".join(signature.parameters) or "no arguments"
        raise TaskArgumentsError(f"{what}: {error}; it accepts {parameters}") from error


def _with_unique_ids(task: Task) -> list[Sample]:
    if task.sample_source is not None:
        raise InvalidTaskError(
            f"the task {task.name!r} generates samples as it runs (SampleSource); episodes need a dataset"
        )
    samples = [
        sample if sample.id is not None else sample.model_copy(update={"id": position})
        for position, sample in enumerate(task.dataset, start=1)
    ]
    seen: set[str] = set()
    for sample in samples:
        if str(sample.id) in seen:
            raise InvalidTaskError(
                f"the task {task.name!r} has two samples with the id {sample.id!r}; make them unique"
            )
        seen.add(str(sample.id))
    return samples


def _listed(names: Iterable[str]) -> str:
    names = list(names)
    more = f", and {len(names) - _NAMES_SHOWN} more" if len(names) > _NAMES_SHOWN else ""
    return ", ".join(names[:_NAMES_SHOWN]) + more


def _describe(task: TaskLike) -> str:
    if isinstance(task, Task):
        return f"the task {task.name!r}"
    if isinstance(task, str):
        return f"the task {task!r}"
    return f"the task function {getattr(task, '__name__', task)!r}"


# The task's solver runs unchanged with the agent as its `generate()`, so that its marking of choices, for
# example, applies to the submitted answer.

SUBMIT_INSTRUCTION = "You must call submit() when you are done to complete the task."


@dataclass(frozen=True)
class AgentOptions:
    submit_instruction: str | None = SUBMIT_INSTRUCTION
    """Added to the task's system message."""

    tool_timeout_s: int = 180
    """Limit of a bash or python call; a timeout is a result."""

    def __post_init__(self) -> None:
        require_counts(tool_timeout=self.tool_timeout_s)
        if type(self.submit_instruction) not in (str, NoneType):
            raise EnvironmentConfigError(f"submit_instruction is {self.submit_instruction!r}, not a text")


@solver
def with_agent(own: Solver, options: AgentOptions) -> Solver:
    """Run `own` with an agent as its `generate`. It does not affect direct model calls."""

    async def solve(state: TaskState, generate: Generate) -> TaskState:
        async def run_agent(
            state: TaskState, tool_calls: object = "loop", **kwargs: Unpack[GenerateConfigArgs]
        ) -> TaskState:
            _instruct(state, options.submit_instruction)
            agent = react(
                prompt=None,
                tools=_tools(state, options.tool_timeout_s),
                submit=AgentSubmit(answer_only=True, keep_in_messages=True),
            )
            return await as_solver(agent)(state, generate)

        return await own(state, run_agent)

    return solve


def _tools(state: TaskState, timeout_s: int) -> list[Tool]:
    own = list(state.tools)
    names = {ToolDef(tool).name for tool in own}
    ready = {"bash": bash(timeout=timeout_s), "python": python(timeout=timeout_s)}
    return [*own, *(tool for name, tool in ready.items() if name not in names)]


def _instruct(state: TaskState, instruction: str | None) -> None:
    # Chat templates treat a second system message differently. A solver that generates again finds the
    # instruction there, so the prompt extends the previous one.
    first = state.messages[0] if state.messages else None
    if not instruction or (isinstance(first, ChatMessageSystem) and first.text.endswith(instruction)):
        return
    if isinstance(first, ChatMessageSystem):
        state.messages[0] = ChatMessageSystem(content=f"{first.text}\n\n{instruction}")
    else:
        state.messages.insert(0, ChatMessageSystem(content=instruction))
