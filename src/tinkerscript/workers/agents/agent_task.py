"""`AgentTask`: an Inspect task whose samples an agent works on, in the place of the task's own solver.

Each episode: the sample's files and setup in a `bubblewrap` sandbox of its own; the agent with the sample's
input as its prompt, in `/work`; the end of every process; the task's tests as they were; the task's scorers,
in the same sandbox with a fresh home, without the agent's programs and without a way to the model.

A sample's metadata `tests` lists its test files: each is restored from the sample's `files`, or removed if
the sample has none of that name, before anything is scored.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from inspect_ai.dataset import Sample
from inspect_ai.log import transcript
from inspect_ai.model import ModelOutput
from inspect_ai.solver import Generate, Solver, TaskState, solver
from inspect_ai.util import sandbox
from pydantic import JsonValue

from inspect_tinker_bridge import RunnerOptions, SandboxConfig
from inspect_tinker_bridge.episodes import current_policy
from inspect_tinker_bridge.sandbox import sandbox_files_of
from tinkerscript.errors import ClaimLostError, ConfigError
from tinkerscript.isolation.inspect_sandbox import BubblewrapSandbox
from tinkerscript.workers.agents.agent_run import AgentRun, run_agent
from tinkerscript.workers.agents.programs import CodingAgent, agent_named, installation_of
from tinkerscript.workers.inspect_task import GatewayPolicy, InspectTask

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
        self.agent = agent_named(agent)
        self.time_limit_s = time_limit_s
        installation_of(self.agent)
        for sample in self.info.samples:
            _tests_of(sample)

    @classmethod
    def options(cls, tasks: Sequence[Any]) -> RunnerOptions:
        # A worker runs one agent, with one time limit, whatever its tasks are.
        first: AgentTask = tasks[0]
        return RunnerOptions(
            sandbox=SandboxConfig("bubblewrap"), solver=agent_solver(first.agent, first.time_limit_s)
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
