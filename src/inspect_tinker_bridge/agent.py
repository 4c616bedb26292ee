"""The agent that `env_type="multi_turn"` gives to a task without one: bash, python and submit.

Invariant: the task's own solver runs unchanged, with its `generate()` replaced by the whole agent. So its
prompts and tools stay, and whatever it does with the answer (such as marking choices) it does with the
submitted one.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import NoneType

from inspect_ai.agent import AgentSubmit, as_solver, react
from inspect_ai.model import ChatMessageSystem, GenerateConfigArgs
from inspect_ai.solver import Generate, Solver, TaskState, solver
from inspect_ai.tool import Tool, ToolDef, bash, python
from typing_extensions import Unpack

from inspect_tinker_bridge.errors import EnvironmentConfigError, require_counts

SUBMIT_INSTRUCTION = "You must call submit() when you are done to complete the task."
"""Default instruction about the submit tool in the system message."""


@dataclass(frozen=True)
class AgentOptions:
    """Options of the agent."""

    submit_instruction: str | None = SUBMIT_INSTRUCTION
    """Appended to the task's system message, or added as one; None adds nothing."""

    tool_timeout_s: int = 180
    """Time limit of one bash or python call in seconds; a timeout is a tool result that says so."""

    def __post_init__(self) -> None:
        """Raises EnvironmentConfigError for a time limit below 1, or an instruction that is not a text."""
        require_counts(tool_timeout=self.tool_timeout_s)
        if type(self.submit_instruction) not in (str, NoneType):
            raise EnvironmentConfigError(f"submit_instruction is {self.submit_instruction!r}, not a text")


@solver
def with_agent(own: Solver, options: AgentOptions) -> Solver:
    """Run `own` with an agent as its `generate`. A solver that calls the model directly still does."""

    async def solve(state: TaskState, generate: Generate) -> TaskState:
        async def run_agent(
            state: TaskState, tool_calls: object = "loop", **kwargs: Unpack[GenerateConfigArgs]
        ) -> TaskState:
            _instruct(state, options.submit_instruction)
            agent = react(
                prompt=None,
                tools=_tools(state, options.tool_timeout_s),
                submit=AgentSubmit(answer_only=True, keep_in_messages=True),
            )
            return await as_solver(agent)(state, generate)

        return await own(state, run_agent)

    return solve


def _tools(state: TaskState, timeout_s: int) -> list[Tool]:
    """The state's tools, plus bash and python unless it has tools with these names."""
    own = list(state.tools)
    names = {ToolDef(tool).name for tool in own}
    ready = {"bash": bash(timeout=timeout_s), "python": python(timeout=timeout_s)}
    return [*own, *(tool for name, tool in ready.items() if name not in names)]


def _instruct(state: TaskState, instruction: str | None) -> None:
    """Keep a single system message: chat templates differ in how they treat a second one.

    A solver that generates again finds it there, and the prompt extends the one before.
    """
    first = state.messages[0] if state.messages else None
    if not instruction or (isinstance(first, ChatMessageSystem) and first.text.endswith(instruction)):
        return
    if isinstance(first, ChatMessageSystem):
        state.messages[0] = ChatMessageSystem(content=f"{first.text}\n\n{instruction}")
    else:
        state.messages.insert(0, ChatMessageSystem(content=instruction))
