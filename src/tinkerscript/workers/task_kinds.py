"""The kinds of tasks by the prefix of a task's name, and `load_task`, which loads a task of any kind.

`verifiers:ENV` is a task of the kind `verifiers`, `file.py:NAME` and `module:NAME` are tasks of the user's
own, and every other name is one of Inspect's. A kind belongs to the project (an entry of `KINDS`), or to an
installed package: an entry point of the group `tinkerscript.tasks`.

Invariant: a kind's packages are imported only for a task of that kind; one that is missing is an error with
the `pip install` that helps.
"""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Callable, Mapping
from functools import partial
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any

from tinkerscript.errors import ConfigError, WorkerError
from tinkerscript.workers.base_task import Task
from tinkerscript.workers.script import load_module

KINDS: Mapping[str, str] = {
    "openenv": "tinkerscript.workers.environments.openenv_environment:OpenEnvEnvironment",
    "reasoning_gym": "tinkerscript.workers.environments.reasoning_gym_task:ReasoningGymTask",
    "textarena": "tinkerscript.workers.environments.textarena_game:TextArenaGame",
    "verifiers": "tinkerscript.workers.environments.verifiers_environment:load_verifiers",
}
"""Kind -> `module:factory`. The factory takes what follows the colon, and the task's arguments; it returns a
Task, or raises ConfigError. The extra that installs its packages has the kind's name."""

ENTRY_POINTS = "tinkerscript.tasks"
"""Group of the entry points of other packages' kinds: each names a factory, as in `KINDS`."""

INSPECT = "inspect"
OWN = "own"

_INSPECT_FACTORY = "tinkerscript.workers.inspect_task:InspectTask"


def kind_of(name: str) -> str:
    """The kind of the task that is called `name`: one of `KINDS`, of an installed package, `own`, or
    `inspect`.

    Raises ConfigError for a prefix that is no kind.
    """
    prefix, colon, rest = name.partition(":")
    if re.fullmatch(r".+\.py:\w+", name):
        return OWN
    if not colon or "/" in prefix or "@" in prefix:
        return INSPECT
    if prefix in KINDS or prefix in _entry_points():
        return prefix
    if re.fullmatch(r"\w+(\.\w+)*", prefix) and re.fullmatch(r"\w+", rest):
        return OWN
    raise ConfigError(f"{name!r}: there is no kind of task {prefix!r}; there are {_known()}")


def load_task(name: str, args: Mapping[str, Any]) -> Task:
    """The task called `name`, with its arguments.

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
    if not isinstance(task, Task):
        raise ConfigError(f"{name!r} made a {type(task).__name__}, not a tinkerscript.workers.Task")
    task.task_id = task.task_id or _name_anywhere(name)
    return task


def _factory(kind: str, name: str) -> Callable[..., object]:
    return _imported(KINDS[kind] if kind in KINDS else _entry_points()[kind].value, kind, name)


def _entry_points() -> dict[str, EntryPoint]:
    return {each.name: each for each in entry_points(group=ENTRY_POINTS)}


def _known() -> str:
    return ", ".join(sorted({*KINDS, *_entry_points()})) + ", module:NAME and file.py:NAME"


def _imported(place: str, kind: str, name: str) -> Callable[..., Any]:
    module, _, factory = place.partition(":")
    try:
        return getattr(importlib.import_module(module), factory)
    except ModuleNotFoundError as error:
        extra = f"tinkerscript[{kind}]" if kind in KINDS or kind == INSPECT else _entry_points()[kind].name
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
