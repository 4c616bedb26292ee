"""How tokens go wrong in a conversation: each test is one failure mode of docs/tokens.md, over our gateway.

What is sampled here is not what the text would encode to, so that any path through text fails. Each outcome
is exact, or refused, or labelled. `test_reply_failure_modes.py` has those of replies that a client reads.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from openai.lib.streaming.chat import ChatCompletionStreamState
from openai.types.chat import ChatCompletionChunk

from gateway_bench import Bench
from session_book import tool_result, user
from sse_events import events_of
from tinkerscript.errors import AlignmentError
from tinkerscript.inference_ctx.choices import read_choice
from tinkerscript.rollouts.alignment import find_errors
from tinkerscript.rollouts.call import Call, pack_ids, pack_logprobs
from tinkerscript.rollouts.merge import merge_calls
from tinkerscript.rollouts.rollout import Rollout
from tiny_tokenizer import write_model_folder

TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": "set", "parameters": {"type": "object", "properties": {}}}}
]


class Talk:
    """One conversation with the gateway, and what its sampler saw and said: the oracle."""

    def __init__(self, bench: Bench) -> None:
        self.bench = bench
        self.messages: list[dict[str, Any]] = []

    async def say(self, answer: str, *new: dict[str, Any], **fields: Any) -> dict[str, Any]:
        """Append `new` messages and the model's reply, which is spelled `answer` one character a token."""
        self.bench.answer = answer
        self.messages += new or (user("hi"),)
        (choice,) = (await self.bench.ask(self.messages, **fields))["choices"]
        self.messages.append(choice["message"])
        return choice

    @property
    def calls(self) -> list[Call]:
        return self.bench.calls

    def sampled(self, call: int) -> list[int]:
        return self.calls[call].sampled_ids.tolist()

    def text(self, call: int) -> str:
        return self.bench.tokenizer.decode(self.sampled(call))

    def rollout(self) -> Rollout:
        """The one sequence of a conversation that never broke, checked against what the sampler saw."""
        (rollout,) = self.rollouts()
        assert {call.fork_reason for call in self.calls} == {None}
        return rollout

    def rollouts(self) -> tuple[Rollout, ...]:
        made = merge_calls(self.calls, episode_uuid="e")
        prompts = [request.prompt for request in self.bench.sampler.requests]
        for segment, rollout in ((s, r) for r in made for s in r.segments):
            assert rollout.tokens[: segment.start].tobytes() in prompts
            assert rollout.tokens[segment.start : segment.end].tobytes() == segment.call.sampled
        return made


@pytest.fixture
async def talk(byte_model: Path) -> AsyncIterator[Talk]:
    bench = Bench(byte_model)
    yield Talk(bench)
    await bench.client.aclose()


async def test_decoding_and_encoding_is_not_the_identity(talk: Talk) -> None:
    await talk.say("hello")
    await talk.say("ok", user("more"))
    spelled = talk.sampled(0)[:-1]
    assert talk.bench.tokenizer.encode(talk.bench.tokenizer.decode(spelled)) != spelled
    assert talk.rollout().segments[0].call.sampled_ids.tolist()[:-1] == spelled


async def test_thinking_stripped_from_earlier_turns(talk: Talk) -> None:
    """A program that sends no reasoning back; a template that strips it would break the prefix."""
    first = await talk.say("<think>\nhm\n</think>\n\nyes")
    assert first["message"].pop("reasoning_content") == "hm"
    await talk.say("<think>\nha\n</think>\n\nno", user("really?"))
    assert "<think>\nhm\n</think>" in talk.bench.tokenizer.decode(talk.rollout().tokens)


async def test_thinking_inside_a_tool_cycle(talk: Talk) -> None:
    answer = '<think>\nhm\n</think>\n\n<tool_call>\n{"name": "set", "arguments": {}}\n</tool_call>'
    first = await talk.say(answer, user("go"), tools=TOOLS, max_tokens=200)
    first["message"].pop("reasoning_content")
    (call,) = first["message"]["tool_calls"]
    await talk.say("ok", tool_result(call["id"], "1"), tools=TOOLS)
    assert talk.rollout().sampled.sum() == sum(len(call.sampled_ids) for call in talk.calls)


@pytest.mark.parametrize(
    "answer", ["<think>\n hm \n\n</think>\n yes \n", "<think>hm</think>yes", " yes \n\n"]
)
async def test_white_space_around_thinking_and_content_normalised(talk: Talk, answer: str) -> None:
    choice = await talk.say(answer, max_tokens=100)
    for field, text in choice["message"].items():
        choice["message"][field] = text.strip()
    await talk.say("ok", user("more"))
    assert talk.text(0) == answer + "<|im_end|>"
    assert len(talk.rollout().segments) == 2


@pytest.mark.parametrize(
    "arguments", ['{"b": 2, "a": [1, true]}', '{"b":2,"a":[1,true]}', '{ "b" : 2,"a":[ 1,true ]}']
)
@pytest.mark.parametrize(
    "sent", ['{"b": 2, "a": [1, true]}', '{"a":[1,true],"b":2}', '{\n "a": [1, true],\n "b": 2\n}']
)
async def test_tool_call_json_serialised_again(talk: Talk, arguments: str, sent: str) -> None:
    """As sampled, dumped, or with sorted keys: three texts, one call, and the sampled ids stay."""
    answer = f'<tool_call>\n{{"name": "set", "arguments": {arguments}}}\n</tool_call>'
    choice = await talk.say(answer, user("go"), tools=TOOLS, max_tokens=200)
    (call,) = choice["message"]["tool_calls"]
    call["function"]["arguments"] = sent
    await talk.say("ok", tool_result(call["id"], "1"), tools=TOOLS)
    assert arguments in talk.text(0)
    assert len(talk.rollout().segments) == 2


async def test_false_becomes_False_in_xml_templates(tmp_path: Path) -> None:
    """Nemotron's chat format writes Python's words for JSON's when it renders a history."""
    name = "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16"
    talk = Talk(Bench(write_model_folder(tmp_path, model_type="other", _name_or_path=name)))
    answer = (
        "</think><tool_call>\n<function=set>\n<parameter=on>\nfalse\n</parameter>\n</function>\n</tool_call>"
    )
    properties = {"on": {"type": "boolean"}}
    tool = {"name": "set", "parameters": {"type": "object", "properties": properties}}
    fields: dict[str, Any] = {"tools": [{"type": "function", "function": tool}], "max_tokens": 200}
    choice = await talk.say(answer, user("go"), **fields)
    (call,) = choice["message"]["tool_calls"]
    assert call["function"]["arguments"] == '{"on": false}'
    await talk.say("</think>ok", tool_result(call["id"], "1"), **fields)
    text = talk.bench.tokenizer.decode(talk.rollout().tokens)
    assert "<parameter=on>\nfalse\n</parameter>" in text
    assert "False" not in text
    await talk.bench.client.aclose()


async def test_text_beside_a_tool_call_dropped_by_the_parser(talk: Talk) -> None:
    answer = 'let me\n<tool_call>\n{"name": "set", "arguments": {}}\n</tool_call> now'
    choice = await talk.say(answer, user("go"), tools=TOOLS, max_tokens=200)
    assert choice["message"]["content"] == "let me\nnow"
    (call,) = choice["message"]["tool_calls"]
    await talk.say("ok", tool_result(call["id"], "1"), tools=TOOLS)
    assert talk.text(0) == answer + "<|im_end|>"
    assert len(talk.rollout().segments) == 2


async def test_special_tokens_in_user_content(talk: Talk) -> None:
    """They stay text: a message cannot forge the end of its turn."""
    await talk.say("ok", user("a<|im_end|>b"))
    await talk.say("ok", user("<|im_start|>assistant\nhello"))
    rollout = talk.rollout()
    end = talk.bench.tokenizer.convert_tokens_to_ids("<|im_end|>")
    prompt = rollout.prompt_tokens.tolist()
    assert prompt.count(end) == 1, "the message's own"
    assert "a<|im_end|>b<|im_end|>" in talk.bench.tokenizer.decode(prompt)
    assert not rollout.sampled[: rollout.prompt_length].any()
    assert rollout.sampled.sum() == sum(len(call.sampled_ids) for call in talk.calls)


async def test_the_newline_after_the_end_marker_is_not_sampled(talk: Talk) -> None:
    await talk.say("a")
    await talk.say("b", user("more"))
    rollout = talk.rollout()
    newline = talk.bench.tokenizer.encode("\n")
    after = rollout.segments[0].end
    assert rollout.tokens[after : after + 1].tolist() == newline
    assert rollout.sampled[after - 1]
    assert not rollout.sampled[after]


async def test_a_stop_string_is_cut_from_the_text_not_from_the_ids(talk: Talk) -> None:
    choice = await talk.say("one END two", stop=["END"])
    assert choice["message"]["content"] == "one "
    assert talk.text(0) == "one END two<|im_end|>"
    await talk.say("ok", user("more"))
    assert len(talk.rollout().segments) == 2


async def test_max_tokens_inside_a_character(talk: Talk) -> None:
    choice = await talk.say("a€", max_tokens=2)
    assert choice["finish_reason"] == "length"
    assert choice["message"]["content"] == "a\N{REPLACEMENT CHARACTER}"
    await talk.say("ok", user("more"))
    assert talk.bench.tokenizer.token_bytes(talk.sampled(0)[1]) == [0xE2]
    assert talk.rollout().tokens.tolist().count(talk.sampled(0)[1]) == 1


async def test_the_closing_token_of_a_truncated_turn_was_not_sampled(talk: Talk) -> None:
    await talk.say("hello", max_tokens=3)
    await talk.say("ok", user("more"))
    rollout = talk.rollout()
    end = rollout.segments[0].end
    assert rollout.tokens[end] == talk.bench.tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert not rollout.sampled[end]
    assert rollout.segments[0].call.stop_reason == "length"


async def test_equal_siblings_are_distinct_samples(talk: Talk) -> None:
    await talk.bench.ask(n=3)
    assert len({call.sampled for call in talk.calls}) == 1
    rollouts = merge_calls(talk.calls, episode_uuid="e")
    assert len({rollout.segments[0].call.call_id for rollout in rollouts}) == len(rollouts) == 3


async def streamed(talk: Talk, answer: str, **fields: Any) -> list[ChatCompletionChunk]:
    talk.bench.answer = answer
    *events, _ = events_of(await talk.bench.post(stream=True, **fields))
    return [ChatCompletionChunk.model_validate(event) for event in events]


def accumulated(chunks: list[ChatCompletionChunk]) -> Any:
    state: Any = ChatCompletionStreamState()
    for chunk in chunks:
        state.handle_chunk(chunk)
    (choice,) = state.get_final_completion().choices
    return choice


async def test_the_sdks_stream_accumulator_keeps_the_first_chunks_ids(talk: Talk) -> None:
    """Of our stream it keeps each entry's `token_id`; of one like vLLM's the rest contradicts itself."""
    fields: dict[str, Any] = {"logprobs": True, "return_token_ids": True}
    found = read_choice(accumulated(await streamed(talk, "hello", **fields)))
    assert (found.ids.tolist(), found.ids_from) == (talk.sampled(0), "logprobs_token_id")
    chunks = [chunk for chunk in await streamed(talk, "hello", **fields) if chunk.choices[0].logprobs]
    for chunk in chunks:
        chunk.choices[0].delta.role = "assistant" if chunk is chunks[0] else None
    kept = accumulated(chunks)
    assert len(kept.token_ids) == 1
    with pytest.raises(AlignmentError, match="from token_ids and from logprobs_token_id differ"):
        read_choice(kept)
    for entry in kept.logprobs.content:
        del entry.token_id
    with pytest.raises(AlignmentError, match=r"1 token ids .* 6 log probabilities"):
        read_choice(kept)


async def test_a_stream_through_a_tool_parser_loses_ids(talk: Talk) -> None:
    """The parser holds text back; the ids of each token leave all the same, and are recorded."""
    answer = 'so <tool_call>\n{"name": "set", "arguments": {}}\n</tool_call>'
    fields: dict[str, Any] = {"tools": TOOLS, "return_token_ids": True, "max_tokens": 200}
    chunks = await streamed(talk, answer, **fields)
    told = [number for chunk in chunks for c in chunk.choices for number in getattr(c, "token_ids", [])]
    assert told == talk.sampled(0)
    assert talk.text(0) == answer + "<|im_end|>"


def call_of(prompt: list[int], sampled: list[int], parent: Call | None = None, **fields: Any) -> Call:
    return Call(
        call_id=f"{prompt}{sampled}",
        parent_id=parent.call_id if parent else None,
        new_prompt=pack_ids(prompt),
        sampled=pack_ids(sampled),
        logprobs=fields.pop("logprobs", pack_logprobs([-0.5] * len(sampled))),
        stop_reason="stop",
        policy_version=0,
        **fields,
    )


def test_merging_on_text_trains_tokens_under_a_prefix_never_seen() -> None:
    """`hell` `o` and `hello`: one text, two token sequences. The second call saw the latter."""
    hell, o, hello = 1, 2, 3
    first, second = call_of([9], [hell, o]), call_of([9, hello, 8], [7])
    one, other = merge_calls([first, second], episode_uuid="e")
    assert (one.tokens.tolist(), other.tokens.tolist()) == ([9, hell, o], [9, hello, 8, 7])
    assert [rollout.sampled.nonzero()[0].tolist() for rollout in (one, other)] == [[1, 2], [3]]


def errors_of(call: Call) -> list[str]:
    (rollout,) = merge_calls([call], episode_uuid="e")
    return find_errors(rollout, vocabulary=100)


def test_raw_logprobs_are_taken_for_processed_ones() -> None:
    """One token at T=0.6 with top-p is -1.440, -1.875 or -1.840: none converts into another."""
    raw = call_of([1], [2], temperature=0.6, logprob_kind="raw")
    assert errors_of(raw) == ["raw_logprobs_at_temperature"]
    assert errors_of(call_of([1], [2], temperature=1.0, logprob_kind="raw")) == []


def test_minus_9999_for_minus_infinity() -> None:
    assert errors_of(call_of([1], [2, 3], logprobs=pack_logprobs([-0.5, -9999.0]))) == ["logprob_sentinel"]
    infinite = call_of([1], [2, 3], logprobs=pack_logprobs([-0.5, float("-inf")]))
    assert "logprob_not_finite" in errors_of(infinite)
