"""What the bridge's tests share: a renderer over bytes, policies that say given texts, and small tools."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import tinker
from inspect_ai.model import ChatCompletionChoice, ChatMessageAssistant, ModelOutput, ModelUsage
from inspect_ai.tool import Tool, ToolCall, tool
from tinker_cookbook.completers import StopCondition, TokenCompleter, TokensWithLogprobs
from tinker_cookbook.renderers import Renderer, get_renderer
from tinker_cookbook.rl.rollouts import do_group_rollout
from tinker_cookbook.rl.types import EnvGroupBuilder, TrajectoryGroup, Transition
from tinker_cookbook.tokenizer_utils import register_tokenizer
from transformers import PreTrainedTokenizerFast

from inspect_tinker_bridge import GenerateRequest
from tinkerscript.rollouts.call import Call, pack_ids, pack_logprobs

END = "<|im_end|>"
BYTES = "local/bytes"


def register_bytes(folder: Path, name: str = BYTES, special: Sequence[str] = ()) -> PreTrainedTokenizerFast:
    """Make `get_tokenizer(name)` answer offline: single bytes, and `special` tokens beside Qwen's."""

    def make() -> PreTrainedTokenizerFast:
        made = PreTrainedTokenizerFast(
            tokenizer_file=str(folder / "tokenizer.json"), eos_token=END, name_or_path=name
        )
        made.name_or_path = name
        made.add_tokens(list(special), special_tokens=True)
        if special:
            made.bos_token = special[0]
        return made

    register_tokenizer(name, make)
    return make()


def bytes_renderer(folder: Path) -> Renderer:
    """Qwen3's chat format, tools included, over single bytes."""
    return get_renderer("qwen3_instruct", register_bytes(folder))


def call(name: str, arguments: str) -> str:
    """A tool call as Qwen3 writes it; `arguments` is JSON."""
    return '<tool_call>\n{"name": "' + name + '", "arguments": ' + arguments + "}\n</tool_call>"


def encode(renderer: Renderer, text: str) -> list[int]:
    return renderer.tokenizer.encode(text, add_special_tokens=False)


def decode(renderer: Renderer, ids: Sequence[int]) -> str:
    return str(renderer.tokenizer.decode(list(ids)))


def calls_of(transitions: Sequence[Transition]) -> list[Call]:
    """Each transition of tinker_cookbook's as a call, after the one whose prompt and reply its prompt starts
    with."""
    calls = list[Call]()
    streams = dict[str, bytes]()
    for number, transition in enumerate(transitions):
        prompt, action = pack_ids(transition.ob.to_ints()), transition.ac
        before = [name for name, stream in streams.items() if prompt.startswith(stream)]
        parent = max(before, key=lambda name: len(streams[name]), default=None)
        made = Call(
            call_id=f"c{number}",
            parent_id=parent,
            new_prompt=prompt[len(streams[parent]) if parent else 0 :],
            sampled=pack_ids(action.tokens),
            logprobs=pack_logprobs(action.maybe_logprobs or []),
            stop_reason="length" if action.stop_reason == "length" else "stop",
            policy_version=0,
            messages="[]",
            reply="{}",
        )
        streams[made.call_id] = prompt + made.sampled
        calls.append(made)
    return calls


class Says(TokenCompleter):
    """Samples the ids of the given texts, one a call, again from the first after the last."""

    def __init__(self, renderer: Renderer, *texts: str) -> None:
        self.actions = [encode(renderer, text) for text in texts]
        self.prompts: list[list[int]] = []
        self.stops: list[StopCondition] = []
        self.turn = 0

    async def __call__(
        self, model_input: tinker.ModelInput, stop: StopCondition, *, max_tokens: int | None = None
    ) -> TokensWithLogprobs:
        action = self.actions[self.turn % len(self.actions)]
        self.turn += 1
        self.prompts.append(list(model_input.to_ints()))
        self.stops.append(stop)
        return TokensWithLogprobs(tokens=action, maybe_logprobs=[-1.0] * len(action))


async def rollout(builder: EnvGroupBuilder, renderer: Renderer, *texts: str) -> TrajectoryGroup:
    """One group by tinker_cookbook's own loop, with a policy that says `texts`, each closed by END."""
    return await do_group_rollout(builder, Says(renderer, *(text + END for text in texts)))


def said(text: str, *calls: ToolCall) -> ModelOutput:
    """A model output with its usage, as Inspect's solvers get it."""
    message = ChatMessageAssistant(content=text, tool_calls=list(calls) or None, source="generate")
    choice = ChatCompletionChoice(message=message, stop_reason="tool_calls" if calls else "stop")
    return ModelOutput(model="scripted", choices=[choice], usage=ModelUsage(total_tokens=2))


class Scripted:
    """A policy that answers from a list, and records what it was asked."""

    def __init__(self, *answers: ModelOutput | str | Exception) -> None:
        self.answers = list(answers)
        self.requests: list[GenerateRequest] = []

    async def generate(self, request: GenerateRequest) -> ModelOutput:
        self.requests.append(request)
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return said(answer) if isinstance(answer, str) else answer


@tool
def add() -> Tool:
    async def execute(a: int, b: int) -> str:
        """Add two numbers.

        Args:
            a: One.
            b: The other.
        """
        return str(a + b)

    return execute
