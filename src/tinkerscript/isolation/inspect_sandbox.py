"""The Inspect sandbox `bubblewrap` runs a sample's commands isolated, without Docker.

    Task(..., sandbox="bubblewrap")
    Task(..., sandbox=("bubblewrap", BubblewrapSettings(memory_mb=4096, processes=256, file_mb=1024)))

Commands run in `/work` as the user `agent`, without a network. Files are read and written by commands inside,
so that a link cannot lead outside.
"""

from __future__ import annotations

import os
import re
import time
from typing import Any, Literal, overload

from inspect_ai.util import (
    ComposeConfig,
    ComposeService,
    ExecResult,
    OutputLimitExceededError,
    SandboxEnvironment,
    SandboxEnvironmentConfigType,
    SandboxEnvironmentLimits,
    SandboxUserUnsupportedError,
    sandboxenv,
    subprocess,
)
from pydantic import BaseModel, Field

from tinkerscript.errors import IsolationError
from tinkerscript.isolation.bubblewrap import WORK, Bubblewrap, ResourceLimits

_WRITE = '[ -d "$0" ] && exit 21; mkdir -p -- "$(dirname -- "$0")" && cat > "$0" || exit 13'
_SIZE = '[ -d "$0" ] && exit 21; [ -e "$0" ] || exit 2; [ -r "$0" ] || exit 13; exec stat -L -c %s -- "$0"'
# The scripts' exit statuses are error numbers.
_FAILURES = {2: FileNotFoundError, 13: PermissionError, 21: IsADirectoryError}

_TIMED_OUT = (124, 137)

_USERS = (None, "agent", "1000")


class BubblewrapSettings(ResourceLimits):
    environment: dict[str, str] = Field(default_factory=dict)
    """For every command; a command's own variables override them."""

    working_dir: str = WORK  # Created if needed; not a system folder.

    def __hash__(self) -> int:
        # Inspect keeps settings in sets.
        return hash(self.model_dump_json())


# Meaningless here: no images, no network, no processor limit.
_NOT_OF_IMAGES = {
    *("build", "command", "cpus", "entrypoint", "hostname", "image", "init", "network_mode", "platform"),
    *("pull_policy", "restart", "stop_grace_period", "x_default"),
}

_HONORED = {"environment", "mem_limit", "pids_limit", "working_dir"}


def settings_of(config: SandboxEnvironmentConfigType | None) -> BubblewrapSettings:
    """Accepts a Compose file with one service, as in Harbor's tasks."""
    match config:
        case None:
            return BubblewrapSettings()
        case BubblewrapSettings():
            return config
        case ComposeConfig() if len(config.services) == 1:
            (service,) = config.services.values()
            return _settings_of_service(service)
        case ComposeConfig():
            names = ", ".join(config.services)
            raise IsolationError(f"the Compose settings have the services {names}; this sandbox runs one")
        case _:
            raise IsolationError(f"give BubblewrapSettings or Compose settings, not {config!r}")


def _settings_of_service(service: ComposeService) -> BubblewrapSettings:
    given = {name for name, value in service if value is not None}
    if unknown := sorted(given - _HONORED - _NOT_OF_IMAGES):
        raise IsolationError(
            f"this sandbox cannot honor the Compose settings {', '.join(unknown)}; it honors "
            f"{', '.join(sorted(_HONORED))}"
        )
    processes = int(service.pids_limit or 0)
    return BubblewrapSettings(
        memory_mb=_mib(service.mem_limit) if service.mem_limit else None,
        processes=processes if processes > 0 else None,
        environment=_variables(service.environment),
        working_dir=service.working_dir or WORK,
    )


def _mib(size: str) -> int:
    found = re.fullmatch(r"(\d+)([bkmg]?)b?", size.lower())
    if found is None:
        raise IsolationError(f"mem_limit: {size!r} is not a size such as 512m or 2g")
    return max(1, (int(found[1]) << {"k": 10, "m": 20, "g": 30}.get(found[2], 0)) >> 20)


def _variables(given: list[str] | dict[str, str | None] | None) -> dict[str, str]:
    # Compose would take a variable without a value from this machine.
    if isinstance(given, dict):
        return {name: value for name, value in given.items() if value is not None}
    pairs = [text.partition("=") for text in given or []]
    return {name: value for name, is_set, value in pairs if is_set}


@sandboxenv(name="bubblewrap")  # pyright: ignore[reportUntypedClassDecorator]
class BubblewrapSandbox(SandboxEnvironment):
    def __init__(self, bubblewrap: Bubblewrap, settings: BubblewrapSettings) -> None:
        super().__init__()
        self.bubblewrap = bubblewrap
        self._settings = settings

    @classmethod
    def config_deserialize(cls, config: dict[str, Any]) -> BaseModel:
        return (ComposeConfig if "services" in config else BubblewrapSettings).model_validate(config)

    @classmethod
    async def sample_init(
        cls, task_name: str, config: SandboxEnvironmentConfigType | None, metadata: dict[str, str]
    ) -> dict[str, SandboxEnvironment]:
        settings = settings_of(config)
        bubblewrap = Bubblewrap(settings)
        try:
            await bubblewrap.start()
        except BaseException:
            await bubblewrap.remove()
            raise
        sandbox = cls(bubblewrap, settings)
        if settings.working_dir != WORK:
            made = await subprocess(bubblewrap.command(["mkdir", "-p", "--", settings.working_dir]))
            if not made.success:
                await bubblewrap.remove()
                raise IsolationError(f"working_dir: {made.stderr.strip()}")
        return {"default": sandbox}

    @classmethod
    async def sample_cleanup(
        cls,
        task_name: str,
        config: SandboxEnvironmentConfigType | None,
        environments: dict[str, SandboxEnvironment],
        interrupted: bool,
    ) -> None:
        for environment in environments.values():
            await environment.as_type(cls).bubblewrap.remove()

    async def exec(
        self,
        cmd: list[str],
        input: str | bytes | None = None,
        cwd: str | None = None,
        env: dict[str, str] | None = None,
        user: str | None = None,
        timeout: int | None = None,  # noqa: ASYNC109 (Inspect's interface)
        timeout_retry: bool = True,
        concurrency: bool = True,
    ) -> ExecResult[str]:
        if user not in _USERS:
            raise SandboxUserUnsupportedError(f"user: this sandbox only has 'agent', not {user!r}")
        # Processes in the command's group end with it.
        limited = cmd if timeout is None else ["timeout", "--kill-after=2s", f"{timeout}s", *cmd]
        started = time.monotonic()
        result = await subprocess(
            self._command(limited, cwd or ".", env),
            input=input,
            output_limit=SandboxEnvironmentLimits.MAX_EXEC_OUTPUT_SIZE,
            timeout=None if timeout is None else timeout + 5,
            concurrency=concurrency,
        )
        if result.returncode < 0:
            # As a shell reports it.
            result.returncode = 128 - result.returncode
        if timeout is not None and result.returncode in _TIMED_OUT and time.monotonic() - started >= timeout:
            raise TimeoutError(f"the command took longer than {timeout} s and was ended")
        if result.returncode == 126 and "Permission denied" in result.stderr:
            raise PermissionError(result.stderr.strip())
        return result

    async def write_file(self, file: str, contents: str | bytes) -> None:
        data = contents.encode() if isinstance(contents, str) else contents
        # Inspect's `subprocess` closes standard input if there is none, so `cat` would fail.
        command = self._shell(_WRITE if data else _WRITE.replace("cat", ":"), file)
        _raise_failure(await subprocess(command, input=data or None), file)

    @overload
    async def read_file(self, file: str, text: Literal[True] = True) -> str: ...

    @overload
    async def read_file(self, file: str, text: Literal[False]) -> bytes: ...

    async def read_file(self, file: str, text: bool = True) -> str | bytes:
        size = await subprocess(self._shell(_SIZE, file))
        _raise_failure(size, file)
        if int(size.stdout) > SandboxEnvironmentLimits.MAX_READ_FILE_SIZE:
            raise OutputLimitExceededError(SandboxEnvironmentLimits.MAX_READ_FILE_SIZE_STR, None)
        content = await subprocess(self._command(["cat", "--", file]), text=False)
        return content.stdout.decode() if text else content.stdout

    def _command(self, cmd: list[str], cwd: str = ".", env: dict[str, str] | None = None) -> list[str]:
        place = os.path.join(self._settings.working_dir, cwd)
        return self.bubblewrap.command(cmd, cwd=place, environment=self._settings.environment | (env or {}))

    def _shell(self, script: str, file: str) -> list[str]:
        return self._command(["/bin/sh", "-c", script, file])


def _raise_failure(result: ExecResult[str], file: str) -> None:
    if result.success:
        return
    failure = _FAILURES.get(result.returncode, OSError)
    raise failure(result.returncode, result.stderr.strip() or os.strerror(result.returncode).lower(), file)
