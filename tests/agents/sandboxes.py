"""A sandbox while a context is open, and commands in it."""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

from tinkerscript.isolation.bubblewrap import Bubblewrap, ResourceLimits

FREE = ResourceLimits()


@asynccontextmanager
async def started(limits: ResourceLimits = FREE) -> AsyncGenerator[Bubblewrap]:
    sandbox = Bubblewrap(limits)
    try:
        await sandbox.start()
        yield sandbox
    finally:
        await sandbox.remove()


async def run(sandbox: Bubblewrap, *arguments: str) -> tuple[int, str]:
    """The exit status of a command in the sandbox, and what it prints."""
    command = sandbox.command(arguments)
    process = await asyncio.create_subprocess_exec(*command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    printed, _ = await process.communicate()
    assert process.returncode is not None
    return process.returncode, printed.decode()


async def said(sandbox: Bubblewrap, *arguments: str) -> str:
    """What a command in the sandbox prints."""
    return (await run(sandbox, *arguments))[1]
