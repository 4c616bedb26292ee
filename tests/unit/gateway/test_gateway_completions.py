"""OpenAI's older completions over the ASGI application: ids and text in, text out."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest

from gateway_bench import Bench, WaitingSampler
from sse_events import events_of
from tinkerscript.errors import GatewayError
from tinkerscript.gateway.sampled_model import sample_all
from tinkerscript.rollouts.call import full_prompts, pack_ids, unpack_ids
from tinkerscript.rollouts.merge import merge_calls
from tinkerscript.sampler import ProgressCallback, SampleRequest, SampleResult


async def post(bench: Bench, prompt: Any = "hi", **fields: Any) -> httpx.Response:
    return await bench.client.post("/v1/completions", json={"model": "policy", "prompt": prompt} | fields)


async def ask(bench: Bench, prompt: Any = "hi", **fields: Any) -> dict[str, Any]:
    response = await post(bench, prompt, **fields)
    assert response.status_code == 200, response.text
    return response.json()


async def test_a_reply_is_openais(bench: Bench) -> None:
    bench.answer = " there "
    reply = await ask(bench, "<|im_start|>hello", max_tokens=15)
    (call,) = bench.calls
    assert reply["id"] == f"cmpl-{call.call_id}"
    assert (reply["object"], reply["model"]) == ("text_completion", "tiny")
    assert reply["choices"] == [{"index": 0, "text": " there ", "logprobs": None, "finish_reason": "stop"}]
    assert reply["usage"] == {"prompt_tokens": 2, "completion_tokens": 8, "total_tokens": 10}
    # Special tokens are read, and none is added.
    ids = bench.tokenizer.convert_tokens_to_ids(["<|im_start|>", "hello"])
    assert bench.sampler.requests[0].prompt == pack_ids(ids) == call.new_prompt
    assert call.fork_reason is None


async def test_every_form_of_prompt(bench: Bench) -> None:
    bench.answer = lambda prompt: chr(ord("a") + len(prompt))
    ids = [72, 105, 33]
    for prompt, texts in (
        (ids, ["d"]),
        (["hello", "hi"], ["b", "c"]),
        ([ids, [72]], ["d", "b"]),
        (["hello", ids], ["b", "d"]),
    ):
        reply = await ask(bench, prompt, n=2, return_token_ids=True)
        assert [choice["text"] for choice in reply["choices"]] == [text for text in texts for _ in range(2)]
        assert [choice["index"] for choice in reply["choices"]] == list(range(2 * len(texts)))
        sent = [unpack_ids(request.prompt).tolist() for request in bench.sampler.requests[-len(texts) :]]
        told = [choice["prompt_token_ids"] for choice in reply["choices"]]
        assert told == [prompt_ids for prompt_ids in sent for _ in range(2)]
        assert reply["usage"]["prompt_tokens"] == sum(map(len, sent))
    calls = bench.calls
    assert len(calls) == len({call.call_id for call in calls}) == 14


async def test_ids_that_continue_a_call_extend_it(bench: Bench) -> None:
    """Chat calls can be continued too; other ids make forks, with a reason."""
    chat = await bench.ask(return_token_ids=True)
    stream = chat["prompt_token_ids"] + chat["choices"][0]["token_ids"]
    await ask(bench, [*stream, 72, 105])
    first = bench.calls[-1]
    stream = [*stream, 72, 105, *first.sampled_ids.tolist()]
    await ask(bench, stream)
    await ask(bench, [*stream[:-1], 72])
    await ask(bench, [1, 2, 3])
    await ask(bench, [1, 2, 3])
    calls = bench.calls
    assert [call.parent_id for call in calls[:3]] == [None, calls[0].call_id, calls[1].call_id]
    assert [call.matched_by for call in calls[1:3]] == ["ids", "ids"]
    assert calls[2].new_prompt == b""
    assert [call.fork_reason for call in calls] == [None] * 4 + ["new_conversation", "sampled_again"]
    prompts = full_prompts(calls)
    assert [prompts[call.call_id] for call in calls] == [request.prompt for request in bench.sampler.requests]
    # The fourth prompt was cut before a sampled token: it shares a prefix, and extends nothing.
    assert calls[3].parent_id == calls[0].call_id
    assert len(merge_calls(calls[:3], episode_uuid="e")) == 1


async def test_logprobs_in_the_old_shape(bench: Bench) -> None:
    bench.answer = "é!"
    logprobs = (await ask(bench, logprobs=2))["choices"][0]["logprobs"]
    assert logprobs["tokens"][2:] == ["!", "<|im_end|>"]
    assert logprobs["token_logprobs"] == [-0.5] * 4
    assert logprobs["text_offset"] == [0, 0, 1, 2]
    assert [max(each.values()) for each in logprobs["top_logprobs"]] == [-0.5] * 4
    assert (await ask(bench, logprobs=0))["choices"][0]["logprobs"]["top_logprobs"] is None


async def test_a_stream_has_the_same_content(bench: Bench) -> None:
    bench.answer = " é STOP"
    fields = {"n": 2, "logprobs": 1, "return_token_ids": True, "stop": ["STOP"]}
    whole = await ask(bench, ["hello", "hi"], **fields)
    response = await post(
        bench, ["hello", "hi"], stream=True, stream_options={"include_usage": True}, **fields
    )
    *chunks, usage, done = events_of(response)
    assert done == "[DONE]"
    assert (usage["choices"], usage["usage"]) == ([], whole["usage"])
    assert len(chunks) > 20
    for index, choice in enumerate(whole["choices"]):
        parts = [part for chunk in chunks for part in chunk["choices"] if part["index"] == index]
        assert "".join(part["text"] for part in parts) == choice["text"] == " é "
        assert [token for part in parts for token in part.get("token_ids", [])] == choice["token_ids"]
        for name, values in choice["logprobs"].items():
            told = [value for part in parts if part["logprobs"] for value in part["logprobs"][name]]
            assert told == values
        assert [part["prompt_token_ids"] for part in parts if "prompt_token_ids" in part] == [
            choice["prompt_token_ids"]
        ]
        assert parts[-1]["finish_reason"] == "stop"


class OneFails(WaitingSampler):
    """Fails a request for two sequences once another has started, which waits for ever."""

    async def sample(self, request: SampleRequest, progress: ProgressCallback | None = None) -> SampleResult:
        if request.num_samples == 1:
            return await super().sample(request, progress)
        await self.started.wait()
        raise GatewayError(503, "engine_unavailable", "the engine went away")


async def test_the_first_error_cancels_the_other_prompts() -> None:
    sampler = OneFails()
    requests = [SampleRequest(prompt=pack_ids([1]), max_tokens=1, num_samples=n) for n in (1, 2)]
    with pytest.raises(GatewayError, match="went away"):
        async with asyncio.timeout(10):
            await sample_all(sampler, requests)
    assert sampler.cancelled.is_set()
