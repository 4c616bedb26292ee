"""Prompts over a renderer of single characters: what is appended, what forks, and where a reply is cut."""

from __future__ import annotations

import pytest
import tinker
from inspect_ai.model import ChatMessageAssistant, ContentText
from inspect_ai.tool import ToolCall, ToolChoice, ToolFunction, ToolInfo
from tinker_cookbook.renderers import Message, ParseTermination, RenderContext, Renderer, ToolSpec
from tinker_cookbook.renderers import ToolCall as RendererToolCall
from tinker_cookbook.renderers.base import RenderedMessage

from inspect_tinker_bridge.rendering import (
    UNPARSED,
    ContinuingRenderer,
    TokenBuffer,
    offered_tools,
    to_renderer_message,
)

END = ord("|")


class Characters:
    """A tokenizer whose ids are characters."""

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        assert add_special_tokens is False
        return [ord(character) for character in text]

    def decode(self, ids: list[int]) -> str:
        return "".join(map(chr, ids))


def text_of(message: Message) -> str:
    content = message["content"]
    assert isinstance(content, str)
    return content


class Plain(Renderer):
    """`u:...|` for each message, and `a:` for the next reply."""

    def __init__(self) -> None:
        super().__init__(Characters())
        self.contexts: list[RenderContext] = []

    @property
    def has_extension_property(self) -> bool:
        return True

    def get_stop_sequences(self) -> list[int]:
        return [END]

    def _header(self, message: Message) -> str:
        return f"{message['role'][0]}:"

    def render_message(self, message: Message, ctx: RenderContext) -> RenderedMessage:
        self.contexts.append(ctx)
        output = [*self._ids(text_of(message)), END]
        return RenderedMessage(output=[tinker.EncodedTextChunk(tokens=output)])

    def build_generation_prompt(
        self, messages: list[Message], role: str = "assistant", prefill: str | None = None
    ) -> tinker.ModelInput:
        text = "".join(f"{self._header(each)}{text_of(each)}|" for each in messages)
        return tinker.ModelInput.from_ints(self._ids(f"{text}a:{prefill or ''}"))

    def parse_response(self, response: list[int]) -> tuple[Message, ParseTermination]:
        text = self.tokenizer.decode(response)
        found = ParseTermination.STOP_SEQUENCE if text.endswith("|") else ParseTermination.MALFORMED
        return Message(role="assistant", content=text.partition("|")[0]), found

    def _ids(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False)


class Continuing(Plain, ContinuingRenderer):
    """Knows how a conversation goes on, unless it contains `rewritten`."""

    def read(self, action: list[int], tools: list[ToolSpec]) -> tuple[Message, ParseTermination]:
        return self.parse_response(action)

    def continuation(
        self, prompt: list[int], action: list[int], history: list[Message], messages: list[Message]
    ) -> list[int] | None:
        self.asked = self.tokenizer.decode(prompt), self.tokenizer.decode(action), history, messages
        if any(text_of(each) == "rewritten" for each in messages):
            return None
        return self._ids("".join(f"+{text_of(each)}" for each in messages) + "+a:")


def user(text: str) -> Message:
    return Message(role="user", content=text)


def reply(text: str) -> Message:
    return Message(role="assistant", content=text)


def rendered(buffer: TokenBuffer, *messages: Message) -> tuple[str, bool]:
    """The prompt as text, and whether it forks."""
    prompt = buffer.render([*messages])
    return "".join(chr(piece) for piece in prompt.pieces if isinstance(piece, int)), prompt.is_fork


def ids(text: str) -> list[int]:
    return [ord(character) for character in text]


@pytest.mark.parametrize("said", ["Hello|", "Hello"])
def test_the_next_prompt_is_the_previous_one_what_was_sampled_and_what_is_new(said: str) -> None:
    buffer = TokenBuffer(Plain())
    assert rendered(buffer, user("hi")) == ("u:hi|a:", False)
    buffer.record(ids(said), reply("hello"))
    assert rendered(buffer, user("hi"), reply("hello"), user("more")) == ("u:hi|a:Hello|u:more|a:", False)
    buffer.record(ids("Yes|"), reply("yes"))
    whole = "u:hi|a:Hello|u:more|a:Yes|u:end|a:"
    talk = [user("hi"), reply("hello"), user("more"), reply("yes"), user("end")]
    assert rendered(buffer, *talk) == (whole, False)


def test_only_the_tool_that_must_be_called_is_offered() -> None:
    tools = [ToolInfo(name=name, description=f"{name}s") for name in ("add", "note")]

    def offered(choice: ToolChoice) -> list[str]:
        return [spec["name"] for spec in offered_tools(tools, choice)]

    assert offered(ToolFunction("note")) == ["note"]
    assert (offered("auto"), offered("any"), offered("none")) == (["add", "note"], ["add", "note"], [])


def test_an_earlier_turn_is_continued_as_a_fork() -> None:
    buffer = TokenBuffer(Plain())
    for talk, said in (([user("hi")], "A"), ([user("hi"), reply("a"), user("more")], "B")):
        rendered(buffer, *talk)
        buffer.record(ids(f"{said}|"), reply(said.lower()))
    assert rendered(buffer, user("hi"), reply("a"), user("else")) == ("u:hi|a:A|u:else|a:", True)


@pytest.mark.parametrize(("prefill", "end"), [([], ""), ([reply("so")], "so")])
def test_a_renderer_that_continues_is_asked_for_the_new_ids(prefill: list[Message], end: str) -> None:
    renderer = Continuing()
    buffer = TokenBuffer(renderer)
    rendered(buffer, user("hi"))
    buffer.record(ids("Hello|"), reply("hello"))
    talk = [user("hi"), reply("hello"), user("one"), user("two")]
    assert rendered(buffer, *talk, *prefill) == (f"u:hi|a:Hello|+one+two+a:{end}", False)
    assert renderer.asked == ("u:hi|a:", "Hello|", talk[:2], talk[2:])


@pytest.mark.parametrize(
    "new", [[user("rewritten")], [user("one"), reply("not sampled"), user("two")], [reply("so")]]
)
def test_what_cannot_be_continued_is_rendered_whole(new: list[Message]) -> None:
    buffer = TokenBuffer(Continuing())
    rendered(buffer, user("hi"))
    buffer.record(ids("Hello|"), reply("hello"))
    prompt, is_fork = rendered(buffer, user("hi"), reply("hello"), *new)
    assert prompt.startswith("u:hi|a:hello|")
    assert is_fork


class Calling(Plain):
    """Reads every reply as a call."""

    def create_conversation_prefix_with_tools(
        self, tools: list[ToolSpec], system_prompt: str = ""
    ) -> list[Message]:
        return []

    def parse_response(self, response: list[int]) -> tuple[Message, ParseTermination]:
        message, ended = super().parse_response(response)
        function = RendererToolCall.FunctionBody(name="add", arguments="{}")
        return Message({**message, "tool_calls": [RendererToolCall(id="1", function=function)]}), ended


def test_only_what_was_no_call_is_text_again_in_the_history() -> None:
    calls = [
        ToolCall(id="1", function="add", arguments={"raw_text": "a call"}),
        ToolCall(id="2", function=UNPARSED, arguments={"raw_text": "<tool_call>{"}),
    ]
    for content, expected in (
        ("so", "so<tool_call>{"),
        ([ContentText(text="so")], [{"type": "text", "text": each} for each in ("so", "<tool_call>{")]),
    ):
        message = ChatMessageAssistant(content=content, tool_calls=calls)
        assert to_renderer_message(Calling(), message)["content"] == expected
