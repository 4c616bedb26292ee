"""Sandboxes outside of episodes.

A `SandboxInstance` is released once, by `cleanup_sandbox` or at the process's exit.
"""

from __future__ import annotations

import asyncio
import atexit
import logging
import subprocess
from collections.abc import AsyncGenerator, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from contextvars import Context, copy_context
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from inspect_ai import Task
from inspect_ai.dataset import Sample
from inspect_ai.util import (
    ExecResult,
    OutputLimitExceededError,
    SandboxEnvironment,
    SandboxEnvironmentSpec,
)

from inspect_tinker_bridge import _inspect_private
from inspect_tinker_bridge.containers import remove_at_the_end
from inspect_tinker_bridge.conversion import sample_of_row
from inspect_tinker_bridge.errors import EnvironmentConfigError, SandboxError, require_counts

__all__ = [
    "SandboxConfig",
    "SandboxInstance",
    "Sandboxes",
    "check_provider",
    "check_sandboxes",
    "cleanup_sandbox",
    "create_sandbox_for_sample",
    "exec_in_sandbox",
    "sandbox_context",
    "sandbox_files_of",
]

Sandboxes = Mapping[str, SandboxEnvironment]
"""By name. The first is the default."""

_DOCKER_TIMEOUT_S = 60.0

_inspect_private.tell_docker_projects(remove_at_the_end)

_T = TypeVar("_T")

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class SandboxConfig:
    sandbox_type: str = "docker"
    """`docker`, `local` (runs commands on this machine), or a package's."""

    config: str | None = None
    """Absolute path of the provider's config file. None uses the task's if it fits."""

    timeout: int = 120
    """Default time limit of `exec_in_sandbox`, in seconds."""

    def __post_init__(self) -> None:
        require_counts(timeout=self.timeout)
        if self.config is not None:
            path = Path(self.config).expanduser().absolute()
            if not path.exists():
                raise EnvironmentConfigError(f"sandbox_config: there is no file {path}")
            object.__setattr__(self, "config", str(path))


@dataclass(eq=False)
class SandboxInstance:
    environments: dict[str, SandboxEnvironment]
    sandbox_type: str
    config: Any
    task_name: str
    timeout: int = 120
    context: Context = field(default_factory=copy_context, repr=False)
    released: bool = False


_OPEN: set[SandboxInstance] = set()


def check_sandboxes(task: Task, samples: Sequence[Sample], override: SandboxConfig | None) -> bool:
    """Check that each sandbox can start here; return whether every sample has one.

    Blocks while docker answers. Raises SandboxError, with the remedy.
    """
    own = {task.sandbox} if task.sandbox else {sample.sandbox for sample in samples}
    if override is not None:
        wanted = {SandboxEnvironmentSpec(override.sandbox_type, override.config)}
    else:
        wanted = {spec for spec in own if spec is not None}
    folder = Path(_inspect_private.task_folder(task))
    for spec in wanted:
        if isinstance(spec.config, str) and spec.type == "docker" and not (folder / spec.config).is_file():
            raise SandboxError(
                f"the sandbox's file {folder / spec.config} does not exist; correct the task, or pass "
                "sandbox_type and sandbox_config"
            )
    for name in sorted({spec.type for spec in wanted}):
        check_provider(name)
    return override is not None or None not in own


def check_provider(sandbox_type: str) -> type[SandboxEnvironment]:
    """Blocks while docker answers."""
    provider = _inspect_private.sandbox_provider(sandbox_type)
    if provider is None:
        known = ", ".join(_inspect_private.sandbox_provider_names())
        package = _inspect_private.sandbox_package(sandbox_type)
        remedy = (
            f"It comes with a package: pip install {package}" if package else "Packages can provide others"
        )
        raise SandboxError(f"no sandbox provider is called {sandbox_type!r}; known: {known}. {remedy}")
    if sandbox_type == "docker":
        _check_docker()
    return provider


async def create_sandbox_for_sample(
    sample: Sample | Mapping[str, Any] | str, task_name: str, sandbox_config: SandboxConfig | None = None
) -> SandboxInstance:
    """Start a sample's sandboxes, copy its files into the default one and run its setup script.

    `sample` is a Sample or the `info` of an `inspect_dataset_to_hf` row. A `sandbox_config` of the same type
    uses the sample's file by default. Raises SandboxError, and the provider's or script's exceptions.
    """
    wanted = sample if isinstance(sample, Sample) else sample_of_row(sample)
    sandbox_type, config = _resolve(wanted, sandbox_config)
    provider = await asyncio.to_thread(check_provider, sandbox_type)
    instance = SandboxInstance({}, sandbox_type, config, task_name)
    if sandbox_config is not None:
        instance.timeout = sandbox_config.timeout
    setup = await _inspect_private.sandbox_script(wanted.setup) if wanted.setup else None
    files = await sandbox_files_of(wanted)
    metadata = {**(wanted.metadata or {}), "__sample_id__": wanted.id}
    await _inside(instance, _start(provider, instance, files, setup, metadata))
    _OPEN.add(instance)
    return instance


async def sandbox_files_of(sample: Sample) -> dict[str, bytes]:
    return await _inspect_private.sandbox_files(sample.files or {})


async def exec_in_sandbox(
    sandboxes: SandboxInstance | Sandboxes,
    cmd: Sequence[str],
    *,
    sandbox_name: str | None = None,
    timeout: int | None = None,  # noqa: ASYNC109 (the document's name; the provider enforces it)
    cwd: str | None = None,
    env: Mapping[str, str] | None = None,
) -> ExecResult[str]:
    """Run a command in the named or the default sandbox; `timeout` is in seconds.

    As in a tool call, a timeout (return code 124), a denied permission (126) or too much output is a result.
    Raises SandboxError for an unknown name.
    """
    environments = _environments(sandboxes)
    name = sandbox_name or next(iter(environments))
    if name not in environments:
        raise SandboxError(f"there is no sandbox {name!r}; the sample has {', '.join(environments)}")
    if timeout is None:
        timeout = sandboxes.timeout if isinstance(sandboxes, SandboxInstance) else SandboxConfig.timeout
    try:
        return await environments[name].exec(list(cmd), timeout=timeout, cwd=cwd, env=dict(env or {}))
    except TimeoutError:
        return ExecResult(False, 124, "", f"the command took longer than {timeout} s and was killed")
    except PermissionError as error:
        return ExecResult(False, 126, "", f"permission denied: {error}")
    except OutputLimitExceededError as error:
        return ExecResult(False, 1, error.truncated_output or "", f"more output than {error.limit_str}")


@asynccontextmanager
async def sandbox_context(sandboxes: SandboxInstance | Sandboxes) -> AsyncGenerator[Sandboxes]:
    """Make `inspect_ai.util.sandbox()` return these, for scorers and tools."""
    environments = _environments(sandboxes)
    with _inspect_private.current_sandboxes(dict(environments)):
        yield environments


async def cleanup_sandbox(instance: SandboxInstance) -> None:
    """End the sandboxes, even if the caller is cancelled. Idempotent."""
    if instance.released:
        return
    instance.released = True
    _OPEN.discard(instance)
    ending = asyncio.ensure_future(_inside(instance, _stop(instance)))
    try:
        await asyncio.shield(ending)
    except asyncio.CancelledError:
        await asyncio.wait({ending})
        raise


async def _start(
    provider: type[SandboxEnvironment],
    instance: SandboxInstance,
    files: dict[str, bytes],
    setup: bytes | None,
    metadata: dict[str, Any],
) -> None:
    await provider.task_init("startup", instance.config)
    try:
        instance.environments = await _inspect_private.start_sandboxes(
            provider, instance.task_name, instance.config, files, setup, metadata
        )
    except BaseException:
        await provider.task_cleanup("shutdown", instance.config, True)
        raise


async def _stop(instance: SandboxInstance) -> None:
    provider = _inspect_private.sandbox_provider(instance.sandbox_type)
    try:
        await _inspect_private.stop_sandboxes(
            instance.sandbox_type, instance.task_name, instance.config, instance.environments
        )
    finally:
        if provider is not None:
            await provider.task_cleanup("shutdown", instance.config, True)


async def _inside(instance: SandboxInstance, work: Coroutine[Any, Any, _T]) -> _T:
    # Providers keep their state in context variables.
    return await asyncio.get_running_loop().create_task(work, context=instance.context)


def _environments(sandboxes: SandboxInstance | Sandboxes) -> Sandboxes:
    environments = sandboxes.environments if isinstance(sandboxes, SandboxInstance) else sandboxes
    if not environments or (isinstance(sandboxes, SandboxInstance) and sandboxes.released):
        raise SandboxError("the sandbox was not started, or has been released")
    return environments


def _resolve(sample: Sample, wanted: SandboxConfig | None) -> tuple[str, Any]:
    own = sample.sandbox
    if wanted is None:
        if own is None:
            raise SandboxError(f"the sample {sample.id!r} names no sandbox; pass a SandboxConfig")
        return own.type, own.config
    if wanted.config is None and own is not None and own.type == wanted.sandbox_type:
        return own.type, own.config
    return wanted.sandbox_type, wanted.config


def _check_docker() -> None:
    remedy = "start it, or set another sandbox_type ('local' runs the model's commands on this machine)"
    command = ["docker", "version", "--format", "{{.Server.Version}}"]
    try:
        probe = subprocess.run(command, capture_output=True, timeout=_DOCKER_TIMEOUT_S, check=False)
    except FileNotFoundError as error:
        raise SandboxError(f"docker is not installed; install it and {remedy}") from error
    except subprocess.TimeoutExpired as error:
        raise SandboxError(
            f"the docker engine does not respond within {_DOCKER_TIMEOUT_S:g} s; {remedy}"
        ) from error
    if probe.returncode != 0:
        reason = probe.stderr.decode(errors="replace").strip()
        raise SandboxError(f"the docker engine does not respond ({reason}); {remedy}")


@atexit.register
def _release_all() -> None:
    async def release() -> None:
        for instance in list(_OPEN):
            try:
                await cleanup_sandbox(instance)
            except Exception:
                logger.exception("a sandbox of the task %r was not released", instance.task_name)

    if _OPEN:
        asyncio.run(release())
