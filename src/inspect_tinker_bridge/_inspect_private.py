"""All uses of Inspect's private modules (inspect_ai 0.3.285), and why."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from pathlib import Path
from typing import Any, Literal

from inspect_ai import Task
from inspect_ai._eval.loader import create_file_tasks, load_file_tasks, resolve_task_sandbox
from inspect_ai._eval.registry import task_create
from inspect_ai._eval.task.images import capture_task_input_media, materialize_sample_input
from inspect_ai._eval.task.sandbox import read_sandboxenv_file, resolve_sample_files
from inspect_ai._eval.task.util import task_run_dir
from inspect_ai._util import entrypoints
from inspect_ai._util.decorator import parse_decorators
from inspect_ai._util.registry import registry_find, registry_info, registry_lookup
from inspect_ai.agent._acp import transport
from inspect_ai.dataset import Sample
from inspect_ai.log._samples import active_samples, sample_active
from inspect_ai.scorer import Scorer
from inspect_ai.scorer._scorer import unique_scorer_name
from inspect_ai.solver import TaskState
from inspect_ai.solver._multiple_choice import parse_answers, set_choices_based_on_generated_response
from inspect_ai.util import (
    SandboxEnvironment,
    SandboxEnvironmentSpec,
    SandboxEnvironmentType,
    _display,  # pyright: ignore[reportPrivateUsage]
)
from inspect_ai.util._sandbox import context as sandbox_context
from inspect_ai.util._sandbox.docker import docker
from inspect_ai.util._sandbox.docker.util import ComposeProject
from inspect_ai.util._sandbox.registry import (
    _SANDBOX_PACKAGES,  # pyright: ignore[reportPrivateUsage]
    registry_find_sandboxenv,
    registry_has_sandboxenv,
)

# Inspect's first eval changes their levels or handlers.
_LOGGERS = ("", "httpx", "httpx2")


def task_names_in_file(path: Path) -> list[str]:
    """List a file's `@task` functions without running it. The public way searches whole folders."""
    return [name for name, _ in parse_decorators(path, "task")]


def load_file(path: Path) -> None:
    """Run a file in its folder to register its tasks. The public way runs an eval."""
    load_file_tasks(path.absolute())


def create_in_file(path: Path, name: str, args: dict[str, Any]) -> Task:
    return create_file_tasks(path, [name], args)[0]


def find_registered(name: str) -> object | None:
    """Return the registered function. The public way creates the task."""
    return registry_lookup("task", name)


def create_registered(name: str, args: dict[str, Any]) -> Task:
    return task_create(name, **args)


def registered_names() -> list[str]:
    entrypoints.ensure_entry_points()
    return sorted(registry_info(task).name for task in registry_find(lambda info: info.type == "task"))


def active_epoch() -> int | None:
    """Not public inside a scorer's model call."""
    active = sample_active()
    return None if active is None else active.epoch


def sandbox_provider(name: str) -> type[SandboxEnvironment] | None:
    entrypoints.ensure_entry_points()
    return registry_find_sandboxenv(name) if registry_has_sandboxenv(name) else None


def sandbox_provider_names() -> list[str]:
    entrypoints.ensure_entry_points()
    found = registry_find(lambda info: info.type == "sandboxenv")
    return sorted({registry_info(provider).name.rpartition("/")[2] for provider in found})


def sandbox_package(name: str) -> str | None:
    return _SANDBOX_PACKAGES.get(name)


async def sandbox_files(files: dict[str, str]) -> dict[str, bytes]:
    return {path: await read_sandboxenv_file(text) for path, text in resolve_sample_files(files).items()}


async def sandbox_script(setup: str) -> bytes:
    script = await read_sandboxenv_file(setup)
    return script if script.lstrip().startswith(b"#!") else b"#!/usr/bin/env bash\n\n" + script


async def start_sandboxes(
    provider: type[SandboxEnvironment],
    task_name: str,
    config: Any,
    files: dict[str, bytes],
    setup: bytes | None,
    metadata: dict[str, Any],
) -> dict[str, SandboxEnvironment]:
    return await sandbox_context.init_sandbox_environments_sample(
        provider, task_name, config, files, setup, metadata
    )


async def stop_sandboxes(
    name: str, task_name: str, config: Any, environments: dict[str, SandboxEnvironment]
) -> None:
    await sandbox_context.cleanup_sandbox_environments_sample(name, task_name, config, environments, False)


@contextmanager
def current_sandboxes(environments: dict[str, SandboxEnvironment]) -> Generator[None]:
    tokens = (
        sandbox_context.sandbox_environments_context_var.set(environments),
        sandbox_context.sandbox_default_context_var.set(next(iter(environments))),
        sandbox_context.sandbox_with_environments_context_var.set({}),
    )
    try:
        yield
    finally:
        sandbox_context.sandbox_environments_context_var.reset(tokens[0])
        sandbox_context.sandbox_default_context_var.reset(tokens[1])
        sandbox_context.sandbox_with_environments_context_var.reset(tokens[2])


def tell_docker_projects(tell: Callable[[str], None]) -> None:
    """Call `tell` with each Compose project's name, which Inspect invents."""
    own = docker.project_startup  # pyright: ignore[reportPrivateImportUsage]

    def startup(project: ComposeProject) -> None:
        tell(project.name)
        own(project)

    docker.project_startup = startup  # pyright: ignore[reportPrivateImportUsage]


async def dead_container() -> str:
    """The engine's message if the current sample's container is gone, or "".

    Inspect would return a failed command, and the public `sandbox()` would record one.
    """
    environments = sandbox_context.sandbox_environments_context_var.get(None) or {}
    for environment in environments.values():
        with suppress(TypeError):
            run = await environment.as_type(docker.DockerSandboxEnvironment).exec(["true"])
            return "" if run.success else run.stderr.strip() or f"exit status {run.returncode}"
    return ""


def mark_choices(state: TaskState) -> None:
    set_choices_based_on_generated_response(state, parse_answers(state, multiple_correct=True))


def scorer_names(scorers: Sequence[Scorer]) -> list[str]:
    names: list[str] = []
    for scorer in scorers:
        names.append(unique_scorer_name(scorer, names))
    return names


def cancel_sample(epoch: int) -> None:
    """Cancel a sample without a score. The public API can only end a sample from within.

    A sample that is still starting is cancelled once it has started.
    """
    _interrupt(epoch, "cancel")


def score_sample(epoch: int) -> None:
    _interrupt(epoch, "score")


def _interrupt(epoch: int, action: Literal["cancel", "score"]) -> None:
    for active in active_samples():
        if active.epoch == epoch and active.completed is None:
            active.interrupt(action)


def task_folder(task: Task) -> str:
    return task_run_dir(task)


def overridden_sandbox(task: Task, sandbox: SandboxEnvironmentType) -> SandboxEnvironmentSpec | None:
    """Replace one task's sandbox; `inspect eval --sandbox` replaces all tasks'."""
    return resolve_task_sandbox(task, sandbox)


async def with_inline_images(sample: Sample) -> Sample:
    """Inline images as data URLs. Evals do this only for their first samples."""
    plan = capture_task_input_media([sample])
    return await materialize_sample_input(sample, plan) if plan else sample


@contextmanager
def silent_display() -> Generator[None]:
    """Turn off Inspect's display. The public switch works once, before any use."""
    before = _display._display_type  # pyright: ignore[reportPrivateUsage]
    _display.init_display_type("none")
    try:
        yield
    finally:
        _display._display_type = before  # pyright: ignore[reportPrivateUsage]


def without_live_sessions() -> None:
    """Turn off live sessions (ACP), which cost a tenth of a short episode's CPU time."""
    flag: ContextVar[bool] | None = getattr(transport, "_acp_live_active", None)
    if flag is not None:
        flag.set(True)


class ProcessState:
    """What Inspect's first eval changes: `sys.excepthook`, log levels and root handlers.

    Inspect's logger stays at ERROR. Otherwise it writes a trace record of every model call to a file.
    """

    def __init__(self) -> None:
        self._excepthook = sys.excepthook
        self._levels = {name: logging.getLogger(name).level for name in _LOGGERS}
        self._handlers = list(logging.getLogger().handlers)

    def restore(self) -> None:
        sys.excepthook = self._excepthook
        for name, level in self._levels.items():
            logging.getLogger(name).setLevel(level)
        logging.getLogger("inspect_ai").setLevel(logging.ERROR)
        logging.getLogger().handlers[:] = self._handlers
