"""verifiers' own chat program, run in this process: what costs a second of start-up in each turn costs
milliseconds.

The `null` harness of verifiers starts a Python program for every turn of a conversation. `SharedChatHarness`
runs the same program, from the same source, as a coroutine. It has the id `tinkerscript`.

Invariant: what a program would print and exit with is what the harness returns, so verifiers judges it the
same way.
"""

# verifiers is not installed where types are checked.
# pyright: reportMissingImports=false, reportUnknownParameterType=false, reportUntypedBaseClass=false

from __future__ import annotations

import argparse
import sys
import traceback
from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from pathlib import Path
from types import ModuleType
from typing import Any, cast

from verifiers.v1.clients import ModelContext
from verifiers.v1.harnesses.null.harness import NullHarness
from verifiers.v1.harnesses.utils.launch import CHAT_PROGRAM_SOURCE
from verifiers.v1.runtimes import ProgramResult, Runtime
from verifiers.v1.runtimes.subprocess import SubprocessRuntime
from verifiers.v1.task import TaskData
from verifiers.v1.trace import Trace

__all__ = ["SharedChatHarness"]

HARNESS_ID = "tinkerscript"

_arguments: ContextVar[argparse.Namespace] = ContextVar("arguments of the chat program")


class SharedChatHarness(NullHarness):
    """The `null` harness without a process of its own. Needs the `subprocess` runtime, whose folder it
    uses."""

    async def setup(self, runtime: Runtime) -> None:
        """Nothing to install."""
        if not isinstance(runtime, SubprocessRuntime):
            raise TypeError(
                f"the harness {HARNESS_ID!r} runs beside the worker, not in a {type(runtime).__name__}; "
                "set the role's harness.id to null"
            )

    async def launch(
        self,
        ctx: ModelContext,
        trace: Trace,
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
    """A runtime whose main program is the chat program, as a coroutine."""

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
    """The chat program as a module of its own, with one pool of connections for all who run it."""

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
        """What the program itself makes of its command line."""
        former, sys.argv = sys.argv, ["chat", *argv]
        try:
            return self._parse()
        finally:
            sys.argv = former

    def _shared_pool(self, **options: Any) -> Any:
        """Connections to the interception server of this process: no certificates, and no limit on
        reading."""
        if self._pool is None:
            self._pool = self._new_pool(verify=False, timeout=None)
        return self._pool

    async def aclose(self) -> None:
        pool, self._pool = self._pool, None
        if pool is not None:
            await pool.aclose()


_PROGRAM = _ChatProgram()


async def close_chat_program() -> None:
    """Close the connections of the episodes that have run."""
    await _PROGRAM.aclose()
