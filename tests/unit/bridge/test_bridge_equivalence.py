"""Every kind of solver under `env_type="task"`: messages, calls, scores are those of plain `inspect eval`."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from inspect_ai import Task, eval_async
from inspect_ai.agent import Agent, AgentState, agent, as_tool, handoff, react
from inspect_ai.dataset import Sample
from inspect_ai.log import EvalSample, read_eval_log_async
from inspect_ai.model import (
    ChatMessage,
    ChatMessageAssistant,
    ChatMessageUser,
    Model,
    ModelOutput,
    ModelUsage,
    get_model,
)
from inspect_ai.scorer import Score, choice, includes, match
from inspect_ai.solver import (
    Generate,
    Solver,
    TaskState,
    basic_agent,
    chain,
    chain_of_thought,
    fork,
    generate,
    multiple_choice,
    prompt_template,
    self_critique,
    solver,
    system_message,
    use_tools,
)
from inspect_ai.tool import Tool, tool
from tinker_cookbook.renderers import Renderer
from tinker_cookbook.rl.rollout_runner import run_rollout

from bridge_groups import solving
from bridge_parts import END, Says, add, call, encode
from inspect_tinker_bridge import (
    EnvOptions,
    InspectEnv,
    TaskFailedError,
    TaskRunner,
    load_inspect_task,
    score_episode,
)
from inspect_tinker_bridge._inspect_private import ProcessState, silent_display
from inspect_tinker_bridge.rendering import to_model_output


@tool
def lookup() -> Tool:
    async def execute(key: str) -> str:
        """Look a value up.

        Args:
            key: What to look up.
        """
        if key == "missing":
            raise PermissionError("not yours")
        return f"value of {key}"

    return execute


@agent
def custom() -> Agent:
    """Asks twice, and keeps notes between."""

    async def execute(state: AgentState) -> AgentState:
        state.messages.append(ChatMessageUser(content="First think."))
        thought = await get_model().generate(state.messages)
        state.messages.append(thought.message)
        state.messages.append(ChatMessageUser(content="Now answer."))
        state.output = await get_model().generate(state.messages)
        state.messages.append(state.output.message)
        return state

    return execute


def helper(name: str) -> Agent:
    return react(name=name, description=f"A {name} that adds.", tools=[add()])


@solving
async def four_at_once(state: TaskState, generate: Generate) -> TaskState:
    outputs = await asyncio.gather(*(get_model().generate(f"part {n}") for n in range(4)))
    state.output = outputs[0]
    state.output.completion = " ".join(output.completion for output in outputs)
    state.messages.append(state.output.message)
    return state


@solving
async def forking(state: TaskState, generate: Generate) -> TaskState:
    calm, loud = await fork(state, [generate_once(), shouting()])
    state.messages.extend([calm.messages[-1], loud.messages[-1]])
    state.output.completion = f"{calm.output.completion} {loud.output.completion}"
    return state


@solving
async def generate_once(state: TaskState, generate: Generate) -> TaskState:
    return await generate(state)


@solver
def shouting() -> Solver:
    return chain(system_message("Shout."), generate_once())


@solving
async def failing(state: TaskState, generate: Generate) -> TaskState:
    state = await generate(state)
    raise ValueError(f"cannot use {state.output.completion!r}")


@solving
async def silent(state: TaskState, generate: Generate) -> TaskState:
    state.output = ModelOutput.from_content("none", "42")
    return state


@solving
async def loop_until_done(state: TaskState, generate: Generate) -> TaskState:
    while "done" not in state.output.completion:
        state = await generate(state)
        state.messages.append(ChatMessageUser(content="Go on."))
    return state


SAMPLE = Sample(input="What is six times seven?", target="42", id="q")
SHOTS = [
    ChatMessageUser(content="2 times 2?"),
    ChatMessageAssistant(content="4"),
    ChatMessageUser(content="6 times 7?"),
]
CHOICES = Sample(input="Which is a color?", choices=["five", "blue", "dog"], target="B", id="c")


def submit(answer: str) -> str:
    return call("submit", json.dumps({"answer": answer}))


@dataclass(frozen=True)
class Case:
    """A task, and what the model says: in this order, or by the text of the last message."""

    solver: Callable[[], Any]
    says: Sequence[str] | Callable[[str], str]
    sample: Sample = field(default_factory=lambda: SAMPLE)
    scorers: Callable[[], Any] = includes
    limits: tuple[tuple[str, int], ...] = ()

    def task(self) -> Task:
        return Task(
            dataset=[self.sample], solver=self.solver(), scorer=self.scorers(), **dict[str, Any](self.limits)
        )


ADDS = call("add", '{"a": 40, "b": 2}')
CASES = {
    "generate": Case(generate, ["42"]),
    "templates": Case(
        lambda: [system_message("Be exact."), prompt_template("Q: {prompt}"), generate()], ["42."]
    ),
    "few shots in the input": Case(generate, ["  42  "], Sample(input=list(SHOTS), target="42", id="s")),
    "chain of thought": Case(
        lambda: [chain_of_thought(), generate()], ["Six sevens\n\nANSWER: 42"], scorers=match
    ),
    "multiple choice": Case(multiple_choice, ["I think so.\nANSWER: B"], CHOICES, choice),
    "self critique": Case(lambda: [generate(), self_critique()], ["41", "One too few.", "42"]),
    "tools of a plain solver": Case(lambda: [use_tools(add(), lookup()), generate()], [ADDS, "42 it is"]),
    "basic agent": Case(lambda: basic_agent(tools=[add()]), [ADDS, "Let me see.", submit("42")]),
    "react": Case(
        lambda: react(tools=[add(), lookup()]),
        [ADDS + "\n" + call("lookup", '{"key": "a"}'), "no call", submit("42")],
    ),
    "react, bad calls": Case(
        lambda: react(tools=[lookup()]),
        [
            "<tool_call>\n{broken\n</tool_call>",
            call("nothing_such", "{}"),
            call("lookup", '{"wrong": 1}'),
            call("lookup", '{"key": "missing"}'),
            submit("42"),
        ],
    ),
    "react, two attempts": Case(lambda: react(attempts=2), [submit("41"), submit("42")]),
    "handoff": Case(
        lambda: react(tools=[handoff(helper("adder"))]),
        [call("transfer_to_adder", "{}"), ADDS, submit("42"), submit("42")],
    ),
    "sub-agent as a tool": Case(
        lambda: react(tools=[as_tool(helper("adder"))]),
        [call("adder", '{"input": "40 and 2"}'), ADDS, submit("42"), submit("42")],
    ),
    "fork": Case(forking, lambda text: f"<{text}> 42"),
    "custom agent": Case(custom, ["Six and seven.", "42"]),
    "four at once": Case(four_at_once, lambda text: f"<{text}> 42"),
    "failing": Case(failing, ["42"]),
    "never generates": Case(silent, []),
    "a loop that a message limit ends": Case(loop_until_done, ["not yet 42"], limits=(("message_limit", 5),)),
    "a loop that a turn limit ends": Case(loop_until_done, ["not yet 42"], limits=(("turn_limit", 2),)),
}


class Script:
    """The case's texts: the next one, or the one for what was asked."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.turn = 0

    def next(self, asked: str) -> str:
        if callable(self.case.says):
            return self.case.says(asked)
        said = self.case.says[self.turn % len(self.case.says)]
        self.turn += 1
        return said


def mock_model(case: Case, renderer: Renderer) -> Model:
    """Inspect's own mock, saying what the renderer parses from the policy's tokens."""
    script = Script(case)

    def reply(messages: list[ChatMessage], *_: Any) -> ModelOutput:
        parsed, _termination = renderer.parse_response(encode(renderer, script.next(messages[-1].text) + END))
        output = to_model_output(parsed, prompt_tokens=1, sampled_tokens=1, truncated=False)
        output.usage = ModelUsage(input_tokens=1, output_tokens=1, total_tokens=2)
        return output

    return get_model("mockllm/model", custom_outputs=reply, memoize=False)


class Speaks(Says):
    """The same texts as tokens, found by the last message of the prompt where the case asks for that."""

    def __init__(self, case: Case, renderer: Renderer) -> None:
        super().__init__(renderer)
        self.renderer, self.script = renderer, Script(case)

    async def __call__(self, model_input: Any, stop: Any, *, max_tokens: int | None = None) -> Any:
        prompt = str(self.renderer.tokenizer.decode(list(model_input.to_ints())))
        asked = prompt.rpartition("<|im_start|>user\n")[2].partition(END)[0]
        self.actions = [encode(self.renderer, self.script.next(asked) + END)]
        return await super().__call__(model_input, stop)


async def plain_eval(case: Case, renderer: Renderer, folder: Path) -> EvalSample:
    before = ProcessState()
    with silent_display():
        (log,) = await eval_async(
            case.task(),
            model=mock_model(case, renderer),
            log_dir=str(folder),
            fail_on_error=False,
            score_display=False,
            log_realtime=False,
        )
    before.restore()
    read = await read_eval_log_async(log.location)
    assert read.samples is not None
    return read.samples[0]


def shown(messages: Sequence[ChatMessage]) -> list[Any]:
    calls = [getattr(message, "tool_calls", None) or [] for message in messages]
    return [
        (message.role, message.text, [(one.function, one.arguments) for one in made])
        for message, made in zip(messages, calls, strict=True)
    ]


def judged(scores: Mapping[str, Score]) -> dict[str, Any]:
    return {name: (score.value, score.answer, score.explanation) for name, score in scores.items()}


@pytest.mark.parametrize("name", CASES)
async def test_the_episode_is_the_one_of_plain_inspect_eval(
    name: str, renderer: Renderer, tmp_path: Path
) -> None:
    case = CASES[name]
    expected = await plain_eval(case, renderer, tmp_path)
    info = load_inspect_task(case.task())
    async with TaskRunner(info) as runner:
        env = InspectEnv(runner, info.samples[0], renderer, EnvOptions("task", max_turns=50))
        if expected.error is not None:
            with pytest.raises(TaskFailedError, match="cannot use '42'"):
                await run_rollout(Speaks(case, renderer), env)
            assert "cannot use '42'" in expected.error.message
            return
        trajectory = await run_rollout(Speaks(case, renderer), env)
    outcome = env.outcome
    assert outcome is not None
    assert outcome.limit == (expected.limit.type if expected.limit else None)
    assert shown(outcome.messages) == shown(expected.messages)
    assert judged(outcome.scores) == judged(expected.scores or {})
    assert outcome.completion == expected.output.completion
    turns = expected.model_usage["mockllm/model"].output_tokens if expected.model_usage else 0
    assert sum(bool(transition.ac.tokens) for transition in trajectory.transitions) == turns
    assert sum(transition.reward for transition in trajectory.transitions) == score_episode(outcome).reward
