"""The agent that `env_type="multi_turn"` gives to a task that has none: bash, python and submit.

Invariant: the task's own solver runs unchanged; its `generate()` is the whole agent. So its prompts and its
tools stay, and what it does with the answer (as multiple choice does) it does with the submitted one.
"""

from __future__ import annotations

from dataclasses import dataclass

from inspect_ai.agent import AgentSubmit, as_solver, react
from inspect_ai.model import ChatMessageSystem, GenerateConfigArgs
from inspect_ai.solver import Generate, Solver, TaskState, solver
from inspect_ai.tool import Tool, ToolDef, bash, python
from typing_extensions import Unpack

SUBMIT_INSTRUCTION = "You must call submit() when you are done to complete the task."
"""What the system message says of the submit tool, unless told otherwise."""


@dataclass(frozen=True)
class AgentOptions:
    """What the agent is made of."""

    submit_instruction: str | None = SUBMIT_INSTRUCTION
    """Added to the task's system message, or a system message of its own; None adds nothing."""

    tool_timeout_s: int = 180
    """Seconds that one bash or python call may take; more is a tool result that says so."""


@solver
def with_agent(own: Solver, options: AgentOptions) -> Solver:
    """`own` with an agent for its `generate`. A solver that calls the model by itself keeps doing that."""

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
    """The state's tools, and bash and python unless it has tools of these names."""
    own = list(state.tools)
    names = {ToolDef(tool).name for tool in own}
    ready = {"bash": bash(timeout=timeout_s), "python": python(timeout=timeout_s)}
    return [*own, *(tool for name, tool in ready.items() if name not in names)]


def _instruct(state: TaskState, instruction: str | None) -> None:
    """One system message: chat templates differ in what they make of a second one."""
    if not instruction:
        return
    first = state.messages[0] if state.messages else None
    if isinstance(first, ChatMessageSystem):
        state.messages[0] = ChatMessageSystem(content=f"{first.text}\n\n{instruction}")
    else:
        state.messages.insert(0, ChatMessageSystem(content=instruction))
