"""`AgentTask`: an Inspect task whose samples an agent works on, in the place of the task's own solver.

Each episode: the sample's files and setup in a `bubblewrap` sandbox of its own; the agent with the sample's
input as its prompt, in `/work`; the end of every process; the task's tests as they were; the task's scorers,
in the same sandbox with a fresh home, without the agent's programs and without a way to the model.

A sample's metadata `tests` lists its test files: each is restored from the sample's `files`, or removed if
the sample has none of that name, before anything is scored.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from inspect_ai.dataset import Sample
from inspect_ai.log import transcript
from inspect_ai.model import ModelOutput
from inspect_ai.solver import Generate, Solver, TaskState, solver
from inspect_ai.util import sandbox
from pydantic import JsonValue

from inspect_tinker_bridge import RunnerOptions, SandboxConfig
from inspect_tinker_bridge.episodes import current_policy
from inspect_tinker_bridge.sandbox import sandbox_files_of
from tinkerscript.errors import ClaimLostError, ConfigError, WorkerError
from tinkerscript.isolation.bubblewrap import HOME, Bubblewrap
from tinkerscript.isolation.inspect_sandbox import BubblewrapSandbox
from tinkerscript.workers.agents.programs import (
    MAX_PROMPT_BYTES,
    AgentJob,
    CodingAgent,
    agent_named,
    installation_of,
)
from tinkerscript.workers.base_task import EpisodeModel
from tinkerscript.workers.inspect_task import GatewayPolicy, InspectTask
from tinkerscript.workers.model_relay import AgentRelay

PORT = 8000
"""Where the agent finds the model, on its own loopback interface."""

MAX_OUTPUT_BYTES = 4 * 2**20
"""How much is kept of what an agent prints: the end."""

OF_A_CLAIM = 0.9
"""The part of a claim's lifetime that the agent may use; the rest is for scoring."""

TESTS = "tests"


class AgentTask(InspectTask):
    """An Inspect task for one agent."""

    def __init__(self, name: str, agent: str, time_limit_s: float, /, **args: Any) -> None:
        """Raises ConfigError for a task that cannot be loaded, or metadata `tests` that is no list of paths,
        and WorkerError for an agent that is unknown or not installed.
        """
        super().__init__(name, **args)
        program = agent_named(agent)
        installation_of(program)
        for sample in self.info.samples:
            _tests_of(sample)
        self.options = RunnerOptions(
            sandbox=SandboxConfig("bubblewrap"), solver=agent_solver(program, time_limit_s)
        )


@solver
def agent_solver(agent: CodingAgent, time_limit_s: float) -> Solver:
    """Run the agent in the sample's sandbox; its answer becomes the output."""

    async def solve(state: TaskState, generate: Generate) -> TaskState:
        policy = current_policy()
        assert isinstance(policy, GatewayPolicy)
        place = sandbox().as_type(BubblewrapSandbox)
        claim = policy.model.claim
        limit_s = min(
            time_limit_s, OF_A_CLAIM * claim.max_claim_s if claim and claim.max_claim_s else time_limit_s
        )
        try:
            run = await run_agent(
                agent, state.input_text, sandbox=place.bubblewrap, model=policy.model, limit_s=limit_s
            )
        except ClaimLostError as error:
            policy.lost = error
            raise
        policy.calls += run.calls
        _record(agent, run)
        await place.bubblewrap.start()
        await _restore(policy.sample, place)
        state.output = ModelOutput.from_content(str(state.model), run.answer)
        state.messages.append(state.output.message)
        return state

    return solve


def _record(agent: CodingAgent, run: AgentRun) -> None:
    """Into Inspect's record of the sample, which is the episode's transcript."""
    found: dict[str, JsonValue] = {
        "exit_code": run.exit_code,
        "model_calls": run.calls,
        "refused": dict(run.refusals),
        "output": run.output,
        "errors": run.complaints,
    }
    transcript().info(found, source=agent.program)


async def _restore(sample: Sample, place: BubblewrapSandbox) -> None:
    tests = _tests_of(sample)
    files = await sandbox_files_of(sample)
    for name in tests:
        # A link or a folder in its place is the agent's.
        await place.exec(["rm", "-rf", "--", name])
        if name in files:
            await place.write_file(name, files[name])


def _tests_of(sample: Sample) -> list[str]:
    tests: Any = (sample.metadata or {}).get(TESTS, [])
    if not isinstance(tests, list) or not all(isinstance(name, str) for name in tests):  # pyright: ignore[reportUnknownVariableType]
        raise ConfigError(f"the sample {sample.id!r}: metadata {TESTS!r} must list the paths of test files")
    return tests  # pyright: ignore[reportUnknownVariableType]


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
    relay = AgentRelay(model)
    await sandbox.start(readable=installation.folders)
    try:
        job = AgentJob(prompt, f"http://127.0.0.1:{PORT}/agent", await relay.context_length())
        async with relay.listening(await sandbox.listen(PORT)):
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
    if relay.lost is not None:
        raise relay.lost
    if relay.refused:
        raise WorkerError(f"the gateway does not support what {agent.program} asks for: {relay.last_refusal}")
    if not relay.answered:
        reason = relay.last_refusal or complaints[-1000:] or said[-1000:] or "it said nothing"
        raise WorkerError(f"{agent.program} made no model call (exit status {exit_code}): {reason}")
    return AgentRun(agent.answer(said), said, complaints, exit_code, relay.answered, dict(relay.refusals))


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
