"""The shipped tiny model: its files, its tokenizer, and that three renderers write the same ids."""

from __future__ import annotations

import json
from typing import Any

import pytest
from renderers.configs import Qwen3RendererConfig
from renderers.qwen3 import Qwen3Renderer
from tinker_cookbook.renderers import ToolCall, get_renderer
from tokenizers import Tokenizer
from transformers import AutoConfig, AutoTokenizer
from transformers import PreTrainedTokenizerBase as Tokens

from tinkerscript.model_folder import TINY_MODEL

FILES = {
    *("config.json", "generation_config.json", "model.safetensors"),
    *("tokenizer.json", "tokenizer_config.json", "training.json"),
}


def tool(name: str, description: str, **properties: dict[str, str]) -> dict[str, Any]:
    parameters = {"type": "object", "properties": properties, "required": list(properties)}
    return {"name": name, "description": description, "parameters": parameters}


# Two tools that the tokenizer was not trained on.
TICKER = {"type": "string", "description": "Stock symbol, for example AAPL."}
STOCK_TOOL = tool("get_stock_price", "Fetch the latest share price of a company.", ticker=TICKER)
DICE_TOOL = tool(
    "roll_dice",
    "Roll some dice.",
    sides={"type": "integer", "description": "How many sides each has."},
    count={"type": "integer", "description": "How many to roll."},
)

Message = dict[str, Any]


def user(content: str) -> Message:
    return {"role": "user", "content": content}


def assistant(content: str) -> Message:
    return {"role": "assistant", "content": content}


def calls(content: str, *named: tuple[str, dict[str, Any]]) -> Message:
    functions = [{"name": name, "arguments": json.dumps(arguments)} for name, arguments in named]
    return {**assistant(content), "tool_calls": [{"type": "function", "function": f} for f in functions]}


SYSTEM = {"role": "system", "content": "You are a helpful assistant."}
ROLL = calls("", ("roll_dice", {"sides": 6, "count": 2}))
TALK_AND_ROLL = calls("I will roll.\n", ("roll_dice", {"sides": 6, "count": 2}))
TWO_CALLS = calls("", ("roll_dice", {"sides": 6, "count": 1}), ("get_stock_price", {"ticker": "AB\nC"}))
RESULT = {"role": "tool", "content": "8"}

# (messages, tools); each ends where the assistant speaks next.
CHATS: dict[str, tuple[list[Message], list[dict[str, Any]]]] = {
    "odd text": ([SYSTEM, user("\n\n  a\r\n\tb na\u00efve 東京 \U0001f9ea ²½ e\u0301 \x00 \n")], []),
    "multi-turn": (
        [user("What is 1+2?"), assistant("3"), user("And 3+4?"), assistant("\n7 "), user("Bye")],
        [],
    ),
    "system and two tools": ([SYSTEM, user("Roll.")], [DICE_TOOL, STOCK_TOOL]),
    "text before the call": ([SYSTEM, user("Roll."), TALK_AND_ROLL, RESULT], [DICE_TOOL]),
    "two calls": ([user("Both."), TWO_CALLS, RESULT], [DICE_TOOL, STOCK_TOOL]),
    "after the tool": (
        [user("Roll."), ROLL, RESULT, assistant("8"), user("Again."), ROLL, RESULT],
        [DICE_TOOL],
    ),
}


@pytest.fixture(scope="module")
def tokenizer() -> Tokens:
    return AutoTokenizer.from_pretrained(str(TINY_MODEL))


def openai_tools(tools: list[dict[str, Any]]) -> list[dict[str, Any]] | None:
    return [{"type": "function", "function": tool} for tool in tools] or None


def with_template(tokenizer: Any, messages: list[Message], tools: list[dict[str, Any]]) -> list[int]:
    return tokenizer.apply_chat_template(
        messages, tools=openai_tools(tools), add_generation_prompt=True, return_dict=False
    )


def with_renderers(tokenizer: Any, messages: list[Message], tools: list[dict[str, Any]]) -> list[int]:
    renderer = Qwen3Renderer(tokenizer, Qwen3RendererConfig(thinking_retention="all"))
    return renderer.render_ids(messages, tools=openai_tools(tools), add_generation_prompt=True)


def with_cookbook(tokenizer: Any, messages: list[Message], tools: list[dict[str, Any]]) -> list[int]:
    renderer = get_renderer("qwen3_instruct", tokenizer)
    messages = [
        {**m, "tool_calls": [ToolCall.model_validate(c) for c in m["tool_calls"]]} if "tool_calls" in m else m
        for m in messages
    ]
    if tools:
        has_system = messages[0]["role"] == "system"
        system = messages[0]["content"] if has_system else ""
        messages = renderer.create_conversation_prefix_with_tools(tools, system) + messages[has_system:]
    return renderer.build_generation_prompt(messages).to_ints()


@pytest.mark.parametrize("name", CHATS)
def test_three_renderers_write_the_same_ids(tokenizer: Tokens, name: str) -> None:
    messages, tools = CHATS[name]
    ids = with_template(tokenizer, messages, tools)
    assert with_renderers(tokenizer, messages, tools) == ids
    assert with_cookbook(tokenizer, messages, tools) == ids


@pytest.mark.parametrize(
    "text",
    [
        "",
        "\n\n\n",
        " two  spaces \t\r\n",
        "12345 ١٢٣ ²½ Ⅷ",
        "e\u0301 vs é, ﬁ, Å",
        "東京 한국어 हिन्दी العربية",
        "\U0001f9d1‍\U0001f52c \U0001f1e6\U0001f1f9 \u200b\ufeff\x00\x7f",
        "<|im_start|>user\n<think></think><|endoftext|>",
        '{"type": "function", "function": {"name": "',
    ],
)
def test_any_text_survives_the_round_trip(tokenizer: Tokens, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text
    plain = Tokenizer.from_file(str(TINY_MODEL / "tokenizer.json"))
    assert plain.decode(plain.encode(text).ids, skip_special_tokens=False) == text


def test_each_digit_and_line_end_is_its_own_token(tokenizer: Tokens) -> None:
    assert [tokenizer.decode([i]) for i in tokenizer.encode("1234567890")] == list("1234567890")
    mixed = set("0123456789\n")
    pieces = [tokenizer.decode([i]) for i in range(len(tokenizer))]
    assert [p for p in pieces if len(p) > 1 and mixed & set(p)] == []


def test_special_tokens_are_those_of_qwen3(tokenizer: Tokens) -> None:
    special = {token.content: token.special for token in tokenizer.added_tokens_decoder.values()}
    added = ["<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"]
    markers = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    assert special == {**dict.fromkeys(added, False), **dict.fromkeys(markers, True)}
    assert (tokenizer.eos_token, tokenizer.pad_token) == ("<|im_end|>", "<|endoftext|>")


def test_the_folder_holds_exactly_the_model_and_is_small(tokenizer: Tokens) -> None:
    assert {path.name for path in TINY_MODEL.iterdir()} == FILES
    assert sum(path.stat().st_size for path in TINY_MODEL.iterdir()) <= 4_000_000
    for path in TINY_MODEL.glob("*.json"):
        assert not any(root in path.read_text() for root in ("/home/", "/root/", "/tmp/", "/Users/")), path
    config = AutoConfig.from_pretrained(str(TINY_MODEL))
    assert config.vocab_size >= len(tokenizer)
    assert (config.eos_token_id, config.pad_token_id) == (tokenizer.eos_token_id, tokenizer.pad_token_id)


def test_training_record_is_within_the_calibration() -> None:
    record = json.loads((TINY_MODEL / "training.json").read_text())
    accuracy = record["held_out_accuracy"]
    assert 0.35 <= accuracy["temperature_1"] <= 0.50
    assert accuracy["samples"] >= 2000
    assert accuracy["greedy"] >= 0.97
    assert record["mix"]["noise"] > 0
