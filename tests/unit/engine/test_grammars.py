"""Constrained answers: the embedded engine over random weights, so that only the grammar shapes them."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tinker
import torch
from transformers import AutoModelForCausalLM

from gateway_bench import Bench
from small_models import small_model
from tinkerscript.engine import grammars
from tinkerscript.engine.embedded import EmbeddedEngine
from tinkerscript.model_folder import TINY_MODEL
from tinkerscript.rollouts.call import Call, TokenConstraint
from tinkerscript.rollouts.merge import merge_calls
from tinkerscript.sampler import ProgressCallback, SampleRequest, SampleResult
from tinkerscript.tokenizer import LightTokenizer
from tinkerscript.train.backends.embedded_engine import EmbeddedSampler
from tiny_tokenizer import write_model_folder

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"n": {"$ref": "#/$defs/small"}, "é": {"type": "boolean"}},
    "required": ["n", "é"],
    "additionalProperties": False,
    "$defs": {"small": {"type": "integer", "minimum": 0, "maximum": 99}},
}
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": "add", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "sub", "parameters": {**SCHEMA, "required": ["é"]}}},
]


@pytest.fixture(scope="module")
def random_bytes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedEngine]:
    """Random weights over single bytes and Qwen3's markers; more ids than the tokenizer knows."""
    folder = tmp_path_factory.mktemp("random")
    shape = {
        **{"vocab_size": 280, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1},
        **{"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8},
        "max_position_embeddings": 2048,
    }
    small_model("Qwen3", **shape, eos_token_id=262, initializer_range=0.2).save_pretrained(folder)
    written = json.loads((folder / "config.json").read_text())
    write_model_folder(folder, **written)
    with EmbeddedEngine(folder, checkpoint_dir=folder / "checkpoints", seed=1) as engine:
        yield engine


@pytest.fixture
async def bench(random_bytes: EmbeddedEngine) -> AsyncIterator[Bench]:
    bench = Bench(random_bytes.folder)
    bench.use(EmbeddedSampler(await random_bytes.create_sampling_client(), 0))
    yield bench
    await bench.client.aclose()


def schema(wanted: dict[str, Any]) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "s", "schema": wanted, "strict": True}}


async def answers(bench: Bench, **fields: Any) -> list[dict[str, Any]]:
    """Choices that were not cut off; most are not."""
    reply = await bench.ask(n=12, max_tokens=1500, temperature=1, seed=3, **fields)
    whole = [choice for choice in reply["choices"] if choice["finish_reason"] != "length"]
    assert len(whole) >= 6
    return whole


def own_logprobs(bench: Bench, call: Call) -> torch.Tensor:
    """(T, V): of all ids at each sampled token, by a plain forward pass."""
    model: Any = AutoModelForCausalLM.from_pretrained(bench.folder).eval()
    prompt = call.new_prompt_ids.tolist()
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([prompt + call.sampled_ids.tolist()])).logits[0].float()
    return logits.log_softmax(-1)[len(prompt) - 1 : -1]


def check_arguments(arguments: dict[str, Any], required: set[str]) -> None:
    assert required <= arguments.keys() <= {"n", "é"}
    assert isinstance(arguments["é"], bool)
    assert 0 <= arguments.get("n", 0) <= 99


async def test_a_json_schema_is_kept(bench: Bench) -> None:
    for choice in await answers(bench, response_format=schema(SCHEMA)):
        check_arguments(json.loads(choice["message"]["content"]), {"n", "é"})
    assert all(call.constrained for call in bench.calls)


@pytest.mark.parametrize(
    ("choice", "names", "parallel"),
    [
        ("required", {"add", "sub"}, True),
        ("required", {"add", "sub"}, False),
        ({"type": "function", "function": {"name": "sub"}}, {"sub"}, True),
    ],
)
async def test_a_tool_that_must_be_called_is_called(
    bench: Bench, choice: Any, names: set[str], parallel: bool
) -> None:
    called: list[int] = []
    for answer in await answers(bench, tools=TOOLS, tool_choice=choice, parallel_tool_calls=parallel):
        assert answer["finish_reason"] == "tool_calls"
        assert answer["message"]["content"] is None
        called.append(len(answer["message"]["tool_calls"]))
        for call in answer["message"]["tool_calls"]:
            assert call["function"]["name"] in names
            required = {"n", "é"} if call["function"]["name"] == "add" else {"é"}
            check_arguments(json.loads(call["function"]["arguments"]), required)
    assert (max(called) > 1) == parallel


async def test_one_call_at_most(bench: Bench) -> None:
    await answers(bench, tools=TOOLS, parallel_tool_calls=False)
    marker = bench.tokenizer.convert_tokens_to_ids("<tool_call>")
    assert max(call.sampled_ids.tolist().count(marker) for call in bench.calls) == 1


async def test_a_schema_with_tools_allows_either(bench: Bench) -> None:
    kinds = set[str]()
    for choice in await answers(bench, tools=TOOLS, response_format=schema(SCHEMA)):
        kinds.add(choice["finish_reason"])
        if choice["finish_reason"] == "stop":
            check_arguments(json.loads(choice["message"]["content"]), {"n", "é"})
    assert kinds == {"stop", "tool_calls"}


class NotingSampler(EmbeddedSampler):
    """Keeps the last request."""

    async def sample(self, request: SampleRequest, progress: ProgressCallback | None = None) -> SampleResult:
        self.request = request
        return await super().sample(request, progress)


async def test_each_token_is_recorded_with_what_the_grammar_did_to_it(
    bench: Bench, random_bytes: EmbeddedEngine
) -> None:
    """Judged again by a matcher and a plain forward pass, token by token. The prompt and the logprobs are
    those of a call without a grammar."""
    sampler = NotingSampler(await random_bytes.create_sampling_client(), 0)
    bench.use(sampler)
    await bench.ask()
    (free,) = bench.calls
    assert (free.constrained, free.is_constrained) == (b"", False)
    reply = await bench.ask(
        n=4, max_tokens=200, temperature=1, seed=5, response_format=schema(SCHEMA), return_token_ids=True
    )
    calls = bench.calls[1:]
    assert sampler.request.constraint is not None
    grammar = sampler.request.constraint.grammar
    kinds = Counter[TokenConstraint]()
    for call, choice in zip(calls, reply["choices"], strict=True):
        assert choice["constrained"] == list(call.constrained)
        assert call.new_prompt == free.new_prompt
        matcher = random_bytes.context.grammars.matcher(grammar)
        logprobs = own_logprobs(bench, call)
        own = logprobs[range(len(logprobs)), call.sampled_ids.tolist()]
        np.testing.assert_allclose(call.sampled_logprobs, own, atol=1e-4)
        for place, token in enumerate(call.sampled_ids.tolist()):
            allowed = matcher.allowed()
            cuts = logprobs[place].exp().numpy()[~allowed].any()
            expected = TokenConstraint.CUT if cuts else TokenConstraint.NONE
            expected = TokenConstraint.FORCED if allowed.sum() == 1 else expected
            assert call.constrained[place] == expected
            kinds[expected] += 1
            matcher.take(token)
        (rollout,) = merge_calls([call], episode_uuid="e")
        assert rollout.response_loss_mask.tolist() == [kind == 0 for kind in call.constrained]
    assert kinds[TokenConstraint.FORCED] >= 5
    assert kinds[TokenConstraint.CUT] > 20


@pytest.mark.parametrize("path", ["chat/completions", "responses", "messages"])
@pytest.mark.parametrize("stream", [False, True])
async def test_every_format_tells_what_the_grammar_did(bench: Bench, path: str, stream: bool) -> None:
    tool, function = {"name": "see", "input_schema": SCHEMA}, {"name": "see", "parameters": SCHEMA}
    messages = [{"role": "user", "content": "hi"}]
    bodies: dict[str, dict[str, Any]] = {
        "chat/completions": {"messages": messages, "tools": [{"type": "function", "function": function}]},
        "responses": {"input": "hi", "tools": [{"type": "function", **function}]},
        "messages": {"messages": messages, "tools": [tool], "max_tokens": 30},
    }
    choice: Any = {"type": "any"} if path == "messages" else "required"
    body = {"model": "policy", "return_token_ids": True, "tool_choice": choice, "stream": stream}
    response = await bench.client.post(f"/v1/{path}", json=body | bodies[path])
    assert response.status_code == 200, response.text
    (call,) = bench.calls
    assert f'"constrained":{list(call.constrained)}'.replace(" ", "") in response.text
    assert call.is_constrained


async def test_a_sampler_that_does_not_tell_makes_the_whole_call_unknown(bench: Bench) -> None:
    bench.use(bench.sampler)
    bench.answer = "{}"
    await bench.ask(response_format={"type": "json_object"})
    (call,) = bench.calls
    assert call.constrained == bytes([TokenConstraint.UNKNOWN]) * len(call.sampled_ids)
    assert call.logprob_kind == "unknown"


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"response_format": schema({"type": "nonsense"})}, "nonsense"),
        ({"repetition_penalty": 1.2}, "repetition_penalty"),
    ],
)
async def test_what_this_engine_cannot_do_is_refused_by_name(
    bench: Bench, fields: dict[str, Any], said: str
) -> None:
    response = await bench.post(**fields)
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, *fields)
    assert said in error["message"]
    assert (await bench.post(repetition_penalty=1, min_p=0)).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
async def test_a_grammar_that_ends_nowhere_fails_its_own_call(tmp_path: Path, stream: bool) -> None:
    """The text is spelled by a marker alone, which a grammar's text may not contain."""
    wanted = schema({"const": "<|im_end|>"})
    with EmbeddedEngine(TINY_MODEL, checkpoint_dir=tmp_path) as engine:
        bench = Bench(TINY_MODEL)
        bench.use(EmbeddedSampler(await engine.create_sampling_client(), 0))
        alone = await bench.ask(seed=3, max_tokens=20)
        beside, failed = await asyncio.gather(
            bench.ask(seed=3, max_tokens=20), bench.post(response_format=wanted, stream=stream)
        )
        await bench.client.aclose()
    # A stream has begun, and its last event is the error.
    error = json.loads(failed.text.strip().rpartition("data: ")[2])["error"]
    assert (failed.status_code, error["param"]) == (200 if stream else 400, "response_format")
    assert "the grammar cannot be followed to its end" in error["message"]
    assert len(error["message"]) < 400
    assert [each["message"] for each in beside["choices"]] == [each["message"] for each in alone["choices"]]


async def test_an_engine_that_cannot_constrain_says_so(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammars, "LLMatcher", None)
    response = await bench.post(tools=[TOOLS[0]], tool_choice="required", stream=True)
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, "tool_choice")
    assert "llguidance" in error["message"]


@pytest.mark.parametrize("stream", [False, True])
async def test_the_most_probable_alternatives_are_told(bench: Bench, stream: bool) -> None:
    fields = {"logprobs": True, "top_logprobs": 3, "return_token_ids": True, "max_tokens": 20}
    response = await bench.post(temperature=1, stream=stream, **fields)
    assert response.status_code == 200, response.text
    if stream:
        data = [json.loads(line[6:]) for line in response.text.splitlines() if line.startswith("data: {")]
        choices = [choice for event in data for choice in event["choices"] if choice["logprobs"]]
        entries = [entry for choice in choices for entry in choice["logprobs"]["content"]]
    else:
        entries = response.json()["choices"][0]["logprobs"]["content"]
    (call,) = bench.calls
    assert [entry["token_id"] for entry in entries] == call.sampled_ids.tolist()
    best = own_logprobs(bench, call).topk(3)
    ids, told = (
        [[each[name] for each in entry["top_logprobs"]] for entry in entries]
        for name in ("token_id", "logprob")
    )
    assert ids == best.indices.tolist()
    np.testing.assert_allclose(np.array(told), best.values.numpy(), atol=1e-4)


async def test_min_p_leaves_out_what_is_improbable_and_keeps_the_logprobs(bench: Bench) -> None:
    fields = {"n": 8, "max_tokens": 30, "temperature": 1, "seed": 3}
    await bench.ask(min_p=1.0, **fields)
    await bench.ask(top_k=1, **fields)
    calls = bench.calls
    assert len({call.sampled for call in calls}) == 1, "as the most probable token alone"
    for ours, theirs in zip(calls[:8], calls[8:], strict=True):
        assert ours.logprobs == theirs.logprobs
        assert (ours.min_p, ours.logprob_kind, theirs.min_p) == (1.0, "processed", 0.0)


@pytest.mark.parametrize("stop", [{}, {"stop": ["never sampled"]}])
async def test_an_id_may_end_a_reply(bench: Bench, stop: dict[str, Any]) -> None:
    ends = [bench.tokenizer.encode(letter)[0] for letter in "aeiou"]
    reply = await bench.ask(n=8, max_tokens=200, temperature=1, seed=4, stop_token_ids=ends, **stop)
    ended = 0
    for call, choice in zip(bench.calls, reply["choices"], strict=True):
        *before, last = call.sampled_ids.tolist()
        assert not set(before) & set(ends)
        ended += last in ends
        assert choice["finish_reason"] == call.stop_reason
        assert (call.stop_reason == "stop") == (last in [*ends, 262])
    assert ended >= 6


async def test_other_weights_go_on_in_the_middle_of_a_grammar(random_bytes: EmbeddedEngine) -> None:
    client = await random_bytes.create_sampling_client()
    prompt, settings = [104, 105], {"grammar": "start: /[0-9]{8}/ <[262]>", "stop_ids": [262]}
    params = tinker.SamplingParams(max_tokens=3, seed=1)
    (begun,) = client.sample_rows(prompt, 1, params, **settings).result()
    params = tinker.SamplingParams(max_tokens=40, seed=2)
    (rest,) = client.sample_rows([*prompt, *begun.ids], 1, params, sampled=3, **settings).result()
    text = LightTokenizer(random_bytes.folder).decode([*begun.ids, *rest.ids[:-1]])
    assert (len(text), text.isdigit(), rest.ids[-1]) == (8, True, 262)
