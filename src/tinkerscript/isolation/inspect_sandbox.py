"""The Inspect sandbox `bubblewrap`: a sample's commands run isolated, without Docker.

    Task(..., sandbox="bubblewrap")

Commands run in `/work` as the user `agent`, without a network. What they leave running ends with the sample.
Files are read and written by commands in the sandbox, so that a link in it leads nowhere else.
"""

from __future__ import annotations

import os
import time
from typing import Literal, overload

from inspect_ai.util import (
    ExecResult,
    OutputLimitExceededError,
    SandboxEnvironment,
    SandboxEnvironmentConfigType,
    SandboxEnvironmentLimits,
    SandboxUserUnsupportedError,
    sandboxenv,
    subprocess,
)

from tinkerscript.isolation.bubblewrap import Bubblewrap

_WRITE = '[ -d "$0" ] && exit 21; mkdir -p -- "$(dirname -- "$0")" && cat > "$0" || exit 13'
_SIZE = '[ -d "$0" ] && exit 21; [ -e "$0" ] || exit 2; [ -r "$0" ] || exit 13; exec stat -L -c %s -- "$0"'
_FAILURES = {2: FileNotFoundError, 13: PermissionError, 21: IsADirectoryError}
"""Exit statuses of these commands, which are the errors' numbers."""

_TIMED_OUT = (124, 137)
"""Exit statuses of `timeout`."""

_USERS = (None, "agent", "1000")


@sandboxenv(name="bubblewrap")  # pyright: ignore[reportUntypedClassDecorator]
class BubblewrapSandbox(SandboxEnvironment):
    """One sample's sandbox."""

    def __init__(self, bubblewrap: Bubblewrap) -> None:
        super().__init__()
        self.bubblewrap = bubblewrap

    @classmethod
    async def sample_init(
        cls, task_name: str, config: SandboxEnvironmentConfigType | None, metadata: dict[str, str]
    ) -> dict[str, SandboxEnvironment]:
        """Raises IsolationError if a sandbox cannot be made here."""
        bubblewrap = Bubblewrap()
        try:
            await bubblewrap.start()
        except BaseException:
            await bubblewrap.remove()
            raise
        return {"default": cls(bubblewrap)}

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
            raise SandboxUserUnsupportedError(f"this sandbox has one user, 'agent', and no {user!r}")
        # What it starts in its process group ends with it; the rest at the latest with the sandbox.
        limited = cmd if timeout is None else ["timeout", "--kill-after=2s", f"{timeout}s", *cmd]
        started = time.monotonic()
        result = await subprocess(
            self.bubblewrap.command(limited, cwd=cwd or ".", environment=env),
            input=input,
            output_limit=SandboxEnvironmentLimits.MAX_EXEC_OUTPUT_SIZE,
            timeout=None if timeout is None else timeout + 5,
            concurrency=concurrency,
        )
        if result.returncode < 0:
            # `nsenter` dies of the signal that its command died of; a shell would say it so.
            result.returncode = 128 - result.returncode
        if timeout is not None and result.returncode in _TIMED_OUT and time.monotonic() - started >= timeout:
            raise TimeoutError(f"the command took longer than {timeout} s and was ended")
        if result.returncode == 126 and "Permission denied" in result.stderr:
            raise PermissionError(result.stderr.strip())
        return result

    async def write_file(self, file: str, contents: str | bytes) -> None:
        data = contents.encode() if isinstance(contents, str) else contents
        # Without input, Inspect's function would leave standard input closed.
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
        content = await subprocess(self.bubblewrap.command(["cat", "--", file]), text=False)
        return content.stdout.decode() if text else content.stdout

    def _shell(self, script: str, file: str) -> list[str]:
        return self.bubblewrap.command(["/bin/sh", "-c", script, file])


def _raise_failure(result: ExecResult[str], file: str) -> None:
    if result.success:
        return
    failure = _FAILURES.get(result.returncode, OSError)
    raise failure(result.returncode, result.stderr.strip() or os.strerror(result.returncode).lower(), file)
