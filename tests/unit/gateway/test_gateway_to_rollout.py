"""Our gateway's replies through `InferenceContext`: the rollout of a client is the rollout of the record."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from openai.types.chat import ChatCompletion
from openai.types.responses import Response

from gateway_bench import CLAIM, Bench
from tinkerscript.errors import AlignmentError
from tinkerscript.inference_ctx import InferenceContext, InferenceTurn
from tinkerscript.rollouts.merge import merge_calls
from tinkerscript.rollouts.rollout import Rollout

IDS = {"logprobs": True, "return_token_ids": True}


@pytest.fixture
async def bench(byte_model: Path) -> AsyncIterator[Bench]:
    bench = Bench(byte_model)
    bench.answer = "<think>\nhm\n</think>\n\nhello"
    yield bench
    await bench.client.aclose()


def recorded(bench: Bench) -> Rollout:
    (rollout,) = merge_calls(bench.claims.recorded[CLAIM], episode_uuid="e")
    return rollout


def same(ours: Rollout, theirs: Rollout) -> bool:
    pairs = ((ours.tokens, theirs.tokens), (ours.sampled, theirs.sampled), (ours.logprobs, theirs.logprobs))
    return all(np.array_equal(left, right) for left, right in pairs)


@pytest.mark.parametrize("as_object", [True, False])
async def test_a_conversation(bench: Bench, as_object: bool) -> None:
    context = InferenceContext(bench.tokenizer)
    messages: list[dict[str, Any]] = [{"role": "user", "content": "hi"}]
    turns: list[InferenceTurn] = []
    for number in range(3):
        body = await bench.ask(messages, max_tokens=100, **IDS)
        reply: Any = ChatCompletion.model_validate(body) if as_object else body
        choice = reply.choices[0] if as_object else reply["choices"][0]
        turns.append(InferenceTurn(list(messages), choice, reply))
        messages += [body["choices"][0]["message"], {"role": "user", "content": f"turn {number}"}]
    (rollout,) = context.create_rollouts_from_turns(turns, "e", "x", 1.0)
    assert same(rollout, recorded(bench))
    assert [segment.call.ids_from for segment in rollout.segments] == ["token_ids"] * 3
    assert not context.warnings


@pytest.mark.parametrize("as_object", [True, False])
async def test_a_response(bench: Bench, as_object: bool) -> None:
    body = {
        "model": "policy",
        "input": "hi",
        "max_output_tokens": 100,
        "include": ["message.output_text.logprobs"],
        "return_token_ids": True,
    }
    answered = (await bench.client.post("/v1/responses", json=body)).json()
    reply: Any = Response.model_validate(answered) if as_object else answered
    context = InferenceContext(bench.tokenizer)
    (rollout,) = context.create_rollouts_from_response("hi", reply, "e", "x", [1.0])
    assert same(rollout, recorded(bench))
    assert context.to_inference_response("hi", reply).choices[0].response_text == "hello"


async def test_a_message_has_ids_and_no_logprobs(bench: Bench) -> None:
    messages = [{"role": "user", "content": "hi"}]
    body = {"model": "policy", "messages": messages, "max_tokens": 100, "return_token_ids": True}
    reply = (await bench.client.post("/v1/messages", json=body)).json()
    context = InferenceContext(bench.tokenizer)
    with pytest.raises(AlignmentError, match="no log probabilities"):
        context.create_rollouts_from_response("hi", reply, "e", "x", [1.0])
    assert reply["token_ids"] == recorded(bench).response_tokens.tolist()
