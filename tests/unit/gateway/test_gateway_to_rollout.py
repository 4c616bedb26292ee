"""Our gateway's replies through `InferenceContext`: the rollout of a client is the rollout of the record."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from openai.types.chat import ChatCompletion
from transformers import PreTrainedTokenizerFast

from gateway_bench import Bench
from tinkerscript.inference_ctx import InferenceContext, InferenceTurn
from tinkerscript.rollouts.merge import merge_calls
from tinkerscript.rollouts.rollout import Rollout

TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}"
    "{{ '<|im_start|>assistant\n' }}"
)
"""As the gateway writes the messages of the tests' model."""

IDS = {"logprobs": True, "return_token_ids": True}


@pytest.fixture
async def bench(byte_model: Path) -> AsyncIterator[Bench]:
    bench = Bench(byte_model)
    bench.answer = "<think>\nhm\n</think>\n\nhello"
    yield bench
    await bench.client.aclose()


def recorded(bench: Bench) -> Rollout:
    (rollout,) = merge_calls(bench.calls, episode_uuid="e")
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


async def test_logprobs_alone_make_a_rollout_in_both_of_openais_formats(
    bench: Bench, byte_model: Path
) -> None:
    """The first program that anybody writes with an `InferenceContext` asks for nothing of our own."""
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(byte_model / "tokenizer.json"))
    tokenizer.chat_template = TEMPLATE
    inference_ctx = InferenceContext(tokenizer)
    prompt = "What is 2+2?"
    body = await bench.ask([{"role": "user", "content": prompt}], max_tokens=100, logprobs=True)
    completion = ChatCompletion.model_validate(body)

    prompt_tokens = inference_ctx.tokenize_prompt(prompt)
    response_tokens = inference_ctx.response_tokens_from_choice(completion.choices[0])
    response_logprobs = inference_ctx.logprobs_from_choice(completion.choices[0])
    rollout = inference_ctx.create_rollout_from_choice(
        prompt=prompt,
        choice=completion.choices[0],
        env_name="gsm8k",
        env_example_id="ex_123",
        reward=1.0,
    )

    assert same(rollout, recorded(bench))
    assert rollout.tokens.tolist() == [*prompt_tokens.tolist(), *response_tokens.tolist()]
    assert rollout.response_logprobs.tolist() == response_logprobs.tolist()
    old = {"model": "policy", "prompt": "2+2=", "max_tokens": 100, "logprobs": 1}
    (choice,) = (await bench.client.post("/v1/completions", json=old)).json()["choices"]
    call = bench.calls[-1]
    assert inference_ctx.response_tokens_from_choice(choice).tolist() == call.sampled_ids.tolist()
