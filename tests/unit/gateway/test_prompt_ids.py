"""The ids of a prompt are those that the renderer writes over the tokenizer's own `encode`, text by text.

How texts are encoded (deferred, as batches, without their tokens' places) changes none of them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from renderers.qwen3 import Qwen3Renderer
from tokenizers import Tokenizer

from chat_families import FAMILIES
from session_book import TOOL, assistant, tool_result, user
from tinkerscript.errors import GatewayError
from tinkerscript.gateway import rendering, tokenizer
from tinkerscript.gateway.frames import DeferringTokenizer
from tinkerscript.gateway.rendering import ChatRenderer, ParseOptions
from tinkerscript.gateway.tokenizer import MARK
from tinkerscript.model_folder import TINY_MODEL

Message = dict[str, Any]

PIECES = (
    *("<|im_start|>", "<|im_end|>", "<|endoftext|>", "<think>", "</think>", "<tool_call>", "</tool_call>"),
    *(
        "<tool_response>",
        "</tool_response>",
        MARK,
        "\n",
        "\n\n",
        " ",
        "  ",
        "\t",
        "\r\n",
        "user",
        "assistant",
    ),
    *("12", "3.5", "é", "漢字", "🙂", "e\u0301", "a", " word", "word ", '{"a": 1}', "<", "|>", "\u2028"),
)
texts = st.lists(st.sampled_from(PIECES) | st.text(max_size=12), max_size=8).map("".join)


def call(number: int, text: str) -> Message:
    function = {"name": "look", "arguments": json.dumps({"a": text}, ensure_ascii=number % 2 == 0)}
    return {"id": f"call_{number}", "type": "function", "function": function}


def reply(text: str, reasoning: str, called: list[Message]) -> Message:
    more: Message = {"reasoning_content": reasoning} if reasoning else {}
    return assistant(text, **more, **({"tool_calls": called} if called else {}))


calls = st.lists(texts, max_size=2).map(lambda given: [call(*each) for each in enumerate(given)])
asked = st.one_of(
    texts.map(user),
    texts.map(lambda text: {"role": "system", "content": text}),
    texts.map(lambda text: tool_result("call_0", text)),
)
said = st.builds(reply, texts, texts, calls)
conversations = st.lists(asked | said, min_size=1, max_size=6)
tools = st.sampled_from([[], [TOOL]])
often = settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])


@contextmanager
def plainly() -> Generator[None]:
    """Renderers encode text by text while this is open."""

    def one_by_one(plain: Tokenizer, text: str, add_special_tokens: bool = False) -> list[int]:
        return plain.encode(text, add_special_tokens=add_special_tokens).ids

    def as_it_is(renderer: Any, deferring: Any) -> Any:
        return renderer, None

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tokenizer, "_encoded", one_by_one)
        patch.setattr(rendering, "_placing", as_it_is)
        yield


class BothWays:
    """The renderer of a model as it is, and one that leaves all to `renderers` and `tokenizers`."""

    def __init__(self, folder: Path, kwargs: dict[str, Any] | None = None) -> None:
        self.ours = ChatRenderer(folder, kwargs)
        with plainly():
            self.plain = ChatRenderer(folder, kwargs)

    def assert_same(self, work: Callable[[ChatRenderer], list[int] | None]) -> list[int] | None:
        """What both return; None if both refuse for the same reason."""
        ours = outcome(work, self.ours)
        with plainly():
            assert ours == outcome(work, self.plain)
        return None if isinstance(ours, str) else ours


def outcome(
    work: Callable[[ChatRenderer], list[int] | None], renderer: ChatRenderer
) -> list[int] | str | None:
    try:
        return work(renderer)
    except GatewayError as error:
        return error.message


@pytest.fixture(scope="module", params=["tiny", "bytes", "qwen3 without thinking", *FAMILIES])
def both(
    request: pytest.FixtureRequest, byte_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> BothWays:
    name, _, without = request.param.partition(" without ")
    if name in FAMILIES:
        folder = FAMILIES[name].write(tmp_path_factory.mktemp("family"), model_type=name)
        return BothWays(folder, {"enable_thinking": False} if without else None)
    return BothWays(byte_model if name == "bytes" else TINY_MODEL)


@often
@given(messages=conversations, tools=tools)
def test_a_conversation(both: BothWays, messages: list[Message], tools: list[Message]) -> None:
    both.assert_same(lambda renderer: renderer.render(messages, tools))


@often
@given(first=conversations, reply=texts, ends=st.booleans(), new=st.lists(asked, min_size=1, max_size=3))
def test_what_follows_a_reply(
    both: BothWays, first: list[Message], reply: str, ends: bool, new: list[Message]
) -> None:
    prompt = both.assert_same(lambda renderer: renderer.render(first, []))
    sampled = both.ours.tokenizer.encode(reply) + both.ours.stop_token_ids[:1] * ends
    if prompt is None:
        return
    history = [*first, both.ours.parse(sampled, ParseOptions(tool_calls=True))]
    both.assert_same(lambda renderer: renderer.extend(prompt, sampled, new, [], lambda: history))


def test_content_that_is_no_text_and_no_messages() -> None:
    both = BothWays(TINY_MODEL)
    for content in (None, [], [{"type": "text", "text": "a"}], [{"type": "text", "text": "b"}, "c"]):
        for role in ("system", "user"):
            messages = [{"role": role, "content": content}, user("d")]
            assert both.assert_same(lambda renderer, given=messages: renderer.render(given, []))
    assert both.assert_same(lambda renderer: renderer.render([], [])) is None


def test_qwen3_defers_and_has_frames(both: BothWays) -> None:
    """Otherwise these tests compare a thing with itself."""
    ours, plain = both.ours._placing, both.plain._placing  # pyright: ignore[reportPrivateUsage]
    if isinstance(plain, Qwen3Renderer):
        assert isinstance(ours, Qwen3Renderer)
        assert isinstance(ours._tokenizer, DeferringTokenizer)  # pyright: ignore[reportPrivateUsage]
        assert both.ours._frames  # pyright: ignore[reportPrivateUsage]
        assert not both.plain._frames  # pyright: ignore[reportPrivateUsage]
