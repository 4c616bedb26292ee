"""`run_agent`: one agent in a sandbox, from its start to the end of everything that it started.

Invariant: when it returns or raises, no process of the sandbox is alive.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from tinkerscript.errors import WorkerError
from tinkerscript.isolation.bubblewrap import HOME, Bubblewrap
from tinkerscript.workers.agents.model_door import ModelDoor
from tinkerscript.workers.agents.programs import MAX_PROMPT_BYTES, AgentJob, CodingAgent, installation_of
from tinkerscript.workers.base_task import EpisodeModel

PORT = 8000
"""Where the agent finds the model, on its own loopback interface."""

MAX_OUTPUT_BYTES = 4 * 2**20
"""How much is kept of what an agent prints: the end."""


@dataclass(frozen=True)
class AgentRun:
    """What an agent did, but for the files."""

    answer: str
    output: str
    """What it printed; the last `MAX_OUTPUT_BYTES`."""

    complaints: str
    """What it printed to standard error."""

    exit_code: int | None
    """None: it was ended at its time limit."""

    calls: int
    refusals: dict[str, int]
    """What it asked for and did not get: `STATUS METHOD PATH` -> how often."""


async def run_agent(
    agent: CodingAgent, prompt: str, *, sandbox: Bubblewrap, model: EpisodeModel, limit_s: float
) -> AgentRun:
    """Run the agent in the sandbox, which is started again for it, in its folder `/work`.

    Raises WorkerError for an agent that is not installed, that made no model call, or whose last one the
    gateway does not support; ClaimLostError; IsolationError.
    """
    if len(prompt.encode()) > MAX_PROMPT_BYTES:
        raise WorkerError(
            f"the sample's input has {len(prompt.encode()):,} bytes; agents take {MAX_PROMPT_BYTES:,}"
        )
    installation = installation_of(agent)
    await sandbox.start(readable=installation.folders)
    try:
        async with ModelDoor(model) as door:
            job = AgentJob(prompt, f"http://127.0.0.1:{PORT}/agent", await door.context_length())
            await door.listen(await sandbox.listen(PORT))
            await asyncio.to_thread(_write_home, sandbox, agent, job)
            command = sandbox.command(
                [str(installation.program), *agent.arguments(job)],
                environment={"PATH": installation.path, **agent.environment(job)},
            )
            with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
                exit_code = await _run(command, sandbox, limit_s, output, errors)
                said, complaints = _end_of(output), _end_of(errors)
    finally:
        await sandbox.stop()
    if door.lost is not None:
        raise door.lost
    if door.refused:
        raise WorkerError(f"the gateway does not support what {agent.program} asks for: {door.last_refusal}")
    if not door.answered:
        reason = door.last_refusal or complaints[-1000:] or said[-1000:] or "it said nothing"
        raise WorkerError(f"{agent.program} made no model call (exit status {exit_code}): {reason}")
    return AgentRun(agent.answer(said), said, complaints, exit_code, door.answered, dict(door.refusals))


def _write_home(sandbox: Bubblewrap, agent: CodingAgent, job: AgentJob) -> None:
    """Before anything of the agent's runs: nobody has made links there."""
    for name, text in agent.home_files(job).items():
        path = Path(f"{sandbox.root}{HOME}") / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


async def _run(
    command: list[str], sandbox: Bubblewrap, limit_s: float, output: IO[bytes], errors: IO[bytes]
) -> int | None:
    """The exit status; None if the time limit came first. Ends the sandbox's processes."""
    process = await asyncio.create_subprocess_exec(
        *command, stdin=subprocess.DEVNULL, stdout=output, stderr=errors, env={}
    )
    try:
        async with asyncio.timeout(limit_s):
            return await process.wait()
    except TimeoutError:
        return None
    finally:
        await sandbox.stop()
        await process.wait()


def _end_of(file: IO[bytes]) -> str:
    size = file.seek(0, os.SEEK_END)
    file.seek(max(0, size - MAX_OUTPUT_BYTES))
    return file.read().decode(errors="replace")
