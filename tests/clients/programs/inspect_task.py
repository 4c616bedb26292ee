"""Inspect: a task over the provider `openai-api`, whose settings are named for the service `tinkerscript`."""

from __future__ import annotations

from typing import Any

import travel
from features import conversations, serve
from inspect_ai import Task, eval
from inspect_ai.dataset import Sample
from inspect_ai.model import GenerateConfig
from inspect_ai.solver import Solver, generate, solver, system_message, use_tools, user_message
from inspect_ai.tool import tool
from travel import FORCED, SHORT, SYSTEM

MODEL = "openai-api/tinkerscript/policy"


@tool
def get_weather() -> Any:
    async def execute(city: str) -> str:
        """The weather in a city.

        Args:
            city: Its name.
        """
        return travel.get_weather(city)

    return execute


@tool
def difference() -> Any:
    async def execute(a: float, b: float) -> float:
        """a minus b.

        Args:
            a: The one.
            b: The other.
        """
        return travel.difference(a, b)

    return execute


@solver
def followed_by(questions: tuple[str, ...]) -> Solver:
    """Ask the further questions, one after the other's answer."""

    async def solve(state: Any, generate: Any) -> Any:
        for question in questions:
            state = await user_message(question)(state, generate)
            state = await generate(state)
        return state

    return solve


def play(task: Task, **options: Any) -> Any:
    """The messages of the task's only sample. Raises RuntimeError for one that failed."""
    log = eval(task, model=MODEL, model_args=options, display="none", log_dir=".", log_format="json")[0]
    if log.status != "success" or not log.samples:
        raise RuntimeError(str(log.error.message if log.error else log.status))
    return log.samples[0]


def agent(questions: tuple[str, ...], **options: Any) -> dict[str, Any]:
    solvers = [
        system_message(SYSTEM),
        use_tools(get_weather(), difference()),
        generate(),
        followed_by(questions[1:]),
    ]
    sample = play(Task(dataset=[Sample(input=questions[0])], solver=solvers), **options)
    answers = [
        message.text for message in sample.messages if message.role == "assistant" and not message.tool_calls
    ]
    return {"texts": answers}


def samples() -> Any:
    task = Task(dataset=[Sample(input=SHORT)], config=GenerateConfig(num_choices=3))
    return {"texts": [choice.message.text for choice in play(task).output.choices]}


def logprobs() -> Any:
    task = Task(dataset=[Sample(input=SHORT)], config=GenerateConfig(logprobs=True))
    choice = play(task).output.choices[0]
    return {"logprobs": [entry.logprob for entry in choice.logprobs.content], "texts": [choice.message.text]}


def required_tool() -> Any:
    solvers = [use_tools(get_weather(), difference(), tool_choice="any"), generate(tool_calls="single")]
    sample = play(Task(dataset=[Sample(input=FORCED)], solver=solvers))
    called = [
        call.function for message in sample.messages for call in getattr(message, "tool_calls", None) or ()
    ]
    return {"called": called}


if __name__ == "__main__":
    serve(*conversations(agent), samples, logprobs, required_tool)
